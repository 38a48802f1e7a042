"""One conditional, whose first branch is the idle one; and none where the condition is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of
from jax.sharding import PartitionSpec as P

from shrewjax._base.branches import run_if


def test_a_traced_flag_makes_one_conditional_that_returns_operands_in_its_first_branch():
    """The other branches copy what they return unchanged (XLA-1)."""
    program = jax.make_jaxpr(lambda flag, x: run_if(flag, lambda: x + 1, lambda: x))(True, jnp.ones(3))
    (conditional,) = (equation for equation in program.eqns if equation.primitive.name == "cond")
    idle, run = conditional.params["branches"]
    assert [equation.primitive.name for equation in idle.eqns] == []
    assert [equation.primitive.name for equation in run.eqns] == ["add"]
    taken = jax.jit(lambda flag, x: run_if(flag, lambda: x + 1, lambda: x))
    assert [float(taken(flag, np.float32(1))) for flag in (True, False)] == [2, 1]


@pytest.mark.parametrize("known", [bool, np.bool, jnp.asarray], ids=["bool", "NumPy's", "array"])
def test_a_known_flag_calls_one_branch_and_does_not_trace_the_other(known):
    called = []
    for flag in (True, False):
        run_if(known(flag), lambda: called.append("run"), lambda: called.append("idle"))
    assert called == ["run", "idle"]


@pytest.mark.parametrize("mapped", [None, "model"])
def test_vmap_chooses_row_by_row_where_operands_are_sharded_over_an_explicit_axis(mapped):
    x, rises = np.arange(16, dtype="f").reshape(4, 4), np.asarray([True, False, False, True])
    mesh = mesh_of("Explicit", model=2, width=2)
    with jax.set_mesh(mesh):
        given = [
            jax.device_put(a, jax.NamedSharding(mesh, P(mapped, *axes))) for a, axes in ((rises, ()), (x, ("width",)))
        ]
        choose = jax.vmap(lambda flag, x: run_if(flag, lambda: x + 1, lambda: x))
        found = jax.jit(choose)(*given), jax.jit(jax.vmap(choose))(*(a[None] for a in given))[0]
        slope = jax.jit(jax.grad(lambda x: choose(given[0], x * x).sum()))(given[1])
    expected = np.where(rises[:, None], x + 1, x)
    np.testing.assert_array_equal(found, [expected, expected])
    np.testing.assert_array_equal(slope, 2 * x)


def test_vmap_chooses_row_by_row_in_shard_map_also_between_arrays_that_are_the_same_on_all_devices():
    rises, limit = np.asarray([True, False] * 4), np.float32(3)
    x = np.arange(8, dtype="f")

    def choose(flag, x, limit):
        return run_if(flag, lambda: x * limit + 2 * limit, lambda: x)

    rows = jax.vmap(choose, in_axes=(0, 0, None))
    specs = P("data"), P("data"), P()
    mapped = jax.shard_map(rows, mesh=mesh_of(data=4), in_specs=specs, out_specs=P("data"))
    np.testing.assert_array_equal(jax.jit(mapped)(rises, x, limit), np.where(rises, 3 * x + 6, x))
