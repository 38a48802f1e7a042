"""Arrays on a mesh are seen and placed as JAX itself has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of, placed
from jax.sharding import PartitionSpec as P

from shrewjax._base import mesh as meshes

X = np.float32(np.arange(32).reshape(8, 4))


def test_an_array_gets_the_partitions_of_another_where_types_have_them(mesh):
    is_explicit = mesh.axis_types[0] == jax.sharding.AxisType.Explicit
    x, like = placed((X, X), mesh, (P("data"), P(None, "model")))
    outside, inside = meshes.partitioned_like(x, like), jax.jit(meshes.partitioned_like)(x, like)
    np.testing.assert_array_equal((outside, inside), (X, X))
    expected = (like if is_explicit else x).sharding
    assert outside.sharding.is_equivalent_to(expected, 2)
    assert not is_explicit or inside.sharding.is_equivalent_to(expected, 2)
    assert meshes.partitioned_like(outside, outside) is outside


def test_a_new_state_stands_on_the_mesh_of_the_parameters_and_what_is_placed_stays(mesh):
    params, kept, whole = placed((X, X, X), mesh, (P("data"), P("model"), P(None)))
    elsewhere = jax.device_put(X, jax.devices()[1])
    given = {"count": jnp.zeros(()), "kept": kept, "number": 3, "elsewhere": elsewhere, "whole": whole}
    state = meshes.on_mesh_of({"w": params}, given)
    assert state["elsewhere"] is elsewhere
    assert state["whole"] is whole
    assert state["count"].sharding == jax.NamedSharding(mesh, P())
    assert state["kept"] is kept
    assert state["number"] == 3
    alone = jnp.zeros(())
    assert meshes.on_mesh_of({"w": X}, alone) is alone
    assert meshes.on_mesh_of((params, placed(X, mesh_of(other=2), P())), alone) is alone


@pytest.mark.parametrize("mapped", [(), ("data",), ("data", "model")])
def test_xla_partitions_over_the_axes_of_the_mesh_that_are_not_mapped(mapped):
    mesh, seen = mesh_of(data=4, model=2), []

    def look(x):
        seen.append((meshes.may_be_partitioned(), {*meshes.axes_beside_partitions()}))
        return x

    look_there = jax.shard_map(look, in_specs=P(), out_specs=P(), axis_names={*mapped}) if mapped else look
    with jax.set_mesh(mesh):
        assert meshes.context_mesh() == mesh
        jax.eval_shape(look_there, X)
    assert seen == [(len(mapped) < 2, {*mapped} if len(mapped) == 1 else set())]
    assert not meshes.context_mesh().axis_names


@pytest.mark.skipif(not hasattr(jax, "reshard"), reason="this JAX has no types for sums over devices")
def test_a_gradient_of_the_type_unreduced_is_summed_over_devices():
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)  # noqa: E731
    w, x = X[:4], X / 32

    def gradient(w, x):
        return meshes.summed(jax.grad(loss)(jax.lax.pcast(w, "data", to="reduced"), x))

    found = jax.jit(jax.shard_map(gradient, mesh=mesh_of(data=8), in_specs=(P(), P("data")), out_specs=P()))(w, x)
    np.testing.assert_allclose(found, jax.grad(loss)(w, x), rtol=1e-5)
