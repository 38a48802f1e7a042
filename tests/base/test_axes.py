"""The mapped axes are found, and it is an error if nothing says over which of them gradients are sharded."""

import jax
import numpy as np
import pytest
from helpers import true_norm
from sharded import GRADS, SPECS, P, clip, place
from speed import quick_jit

import shrewjax


def test_untracked_shard_map_without_axis_name_is_an_error_that_says_what_to_pass(mesh):
    mapped = jax.shard_map(clip, mesh=mesh, in_specs=(SPECS,), out_specs=(SPECS, P()), check_vma=False)
    with pytest.raises(ValueError, match=r"'data', 'model'.*Pass sharded_over= with .* \(\) for none"):
        jax.jit(mapped)(place(GRADS, mesh))


def test_untracked_shard_map_reduces_over_the_axes_that_are_named(mesh):
    def norms(grads):
        return (
            shrewjax.grad_norm(grads["rows"], sharded_over="data"),
            shrewjax.grad_norm(grads["columns"], sharded_over=("data", "model")),
            shrewjax.grad_norm(grads["replicated"], sharded_over=()),
        )

    mapped = jax.shard_map(norms, mesh=mesh, in_specs=(SPECS,), out_specs=P(), check_vma=False)
    rows, columns, replicated = jax.jit(mapped)(place(GRADS, mesh))
    assert float(rows) == pytest.approx(float(true_norm(GRADS["rows"])), rel=1e-6)
    # over an axis on which the leaf is replicated it is counted once a device: what sharded_over asks for
    assert float(columns) == pytest.approx((24 * mesh.shape["data"]) ** 0.5, rel=1e-6)
    assert float(replicated) == 5


@pytest.mark.parametrize("make", [shrewjax.clip_by_global_norm, shrewjax.clip_by_leaf_norm])
def test_pmap_needs_and_takes_an_axis_name(make):
    shards = np.float32(np.arange(16).reshape(8, 2))

    def update(g, **kwargs):
        tx = make(1.0, **kwargs)
        return tx.update(g, tx.init(g))

    clipped, state = jax.pmap(lambda g: update(g, sharded_over="i"), axis_name="i")(shards)
    np.testing.assert_allclose(state.grad_norm, np.full(8, float(true_norm(shards))), rtol=1e-6)
    assert float(true_norm(clipped)) == pytest.approx(1.0, rel=1e-6)
    with pytest.raises(ValueError, match="Pass sharded_over="):
        jax.pmap(update, axis_name="i")(shards)


def test_vmap_over_a_named_axis_is_a_mapped_axis_only_if_named():
    rows = np.float32([[3, 4], [6, 8]])

    def norms(g):
        given = "i", P("i"), lambda *_: P("i")
        return shrewjax.grad_norm(g), [shrewjax.grad_norm(g, sharded_over=x) for x in given]

    apart, over = quick_jit(jax.vmap(norms, axis_name="i"))(rows)
    np.testing.assert_allclose(apart, [5, 10])
    np.testing.assert_allclose(over, [[125**0.5] * 2] * 3, rtol=1e-6)
