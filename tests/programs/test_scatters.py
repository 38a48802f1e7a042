"""Scatters in loops: hidden from the XLA that loses them, in all that a loss may consist of, and nothing else changes.

The numbers of programs for several GPUs are in `tests/devices`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bits
from jax.extend import core
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lookups import LOSSES, TABLE, TOKENS, WIDTH, over_time, take
from speed import quick_jit

import shrewjax
from shrewjax._programs import scatters
from shrewjax._programs.jaxprs import SCATTER_ADDS, jaxprs_in, opened


def scatters_in_loops(jaxpr, in_loop=False):
    """The number of scatters in loops, and of those whose result is selected and read by nothing else."""
    found = np.zeros(2, int)
    for equation in opened(jaxpr).eqns:
        if in_loop and equation.primitive.name in SCATTER_ADDS:
            readers = [x for x in opened(jaxpr).eqns if equation.outvars[0] in [*x.invars]]
            found += 1, [x.primitive.name for x in readers] == ["select_n"]
        for inner in jaxprs_in(equation):
            found += scatters_in_loops(inner, in_loop or equation.primitive.name in ("scan", "while"))
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_each_scatter_in_a_loop_is_selected_and_no_bit_changes(name):
    program = jax.make_jaxpr(jax.value_and_grad(LOSSES[name]))(TABLE, TOKENS)
    hidden = scatters.hide_scatters(program)
    count, before = scatters_in_loops(program)
    assert count > 0
    assert before == 0
    assert list(scatters_in_loops(hidden)) == [count, count]
    run = [quick_jit(core.jaxpr_as_fun(x))(TABLE, TOKENS) for x in (program, hidden)]
    assert bits(run[0]) == bits(run[1])


def test_what_has_no_scatter_in_a_loop_stays_the_same_object():
    def loss(w, x):
        h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]
        return jnp.mean(TABLE[TOKENS] @ h.T)

    program = jax.make_jaxpr(jax.value_and_grad(loss))(np.ones((2, WIDTH, WIDTH), "f"), np.ones((3, WIDTH), "f"))
    assert scatters.hide_scatters(program) is program


def test_a_function_that_is_called_often_is_rebuilt_once():
    one = jax.jit(over_time(take))
    program = jax.make_jaxpr(lambda table: one(table, TOKENS) + one(table, TOKENS))(TABLE)
    hidden = scatters.hide_scatters(jax.make_jaxpr(jax.grad(lambda t: one(t, TOKENS) + one(t, TOKENS)))(TABLE))
    for jaxpr in (program, hidden):
        inner = [x for e in jaxpr.jaxpr.eqns if e.primitive.name == "jit" for x in jaxprs_in(e)]
        assert len({id(x) for x in inner}) < len(inner)


# --- where True is unknown -------------------------------------------------------------------------------------


def lowered(platform, devices, function=lambda x: jnp.where(scatters.unknown_true(), x, 0.0)):
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("data",)), P("data"))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    return jax.jit(function).trace(x).lower(lowering_platforms=(platform,)).as_text()


LOOKUPS = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)), jnp.float32)
LOOKED_UP = np.arange(24).reshape(8, 3) % 5


def _recurrent(look, start):
    def loss(rows, tokens):
        last, _ = jax.lax.scan(lambda h, i: (jnp.tanh(h + look(rows, i)), None), start(tokens), tokens.T)
        return jnp.mean(last**2)

    return loss


def _zeros(tokens):
    return jnp.zeros((tokens.shape[0], 4))


def _in_other_mesh(form, mesh):
    """Losses with a scatter in a loop that JAX traces in another context than the caller's."""
    is_explicit = mesh.axis_types[0] == AxisType.Explicit

    def start(tokens):
        return jax.reshard(_zeros(tokens), P("data")) if is_explicit else _zeros(tokens)

    def look(rows, i):
        return jax.shard_map(lambda rows, i: rows[i], mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))(
            rows, i
        )

    def inside(rows, tokens):
        varying = _recurrent(lambda rows, i: rows[i], lambda x: jax.lax.pcast(_zeros(x), "data", to="varying"))
        run = lambda rows, tokens: jax.lax.pmean(varying(rows, tokens), "data")  # noqa: E731
        return jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(rows, tokens)

    return {
        "shard_map in a scan": _recurrent(look, start),
        "scan in shard_map": inside,
        "lookup with a sharding": _recurrent(lambda rows, i: rows.at[i].get(out_sharding=P("data")), start),
    }[form]


@pytest.mark.skipif(not hasattr(jax.lax, "pcast"), reason="this JAX has no jax.lax.pcast")
@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("shard_map in a scan", AxisType.Auto),
        ("shard_map in a scan", AxisType.Explicit),
        ("scan in shard_map", AxisType.Auto),
        ("lookup with a sharding", AxisType.Explicit),
    ],
)
def test_scatters_of_another_mesh_context_are_hidden_in_theirs(form, kind):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(kind,))
    loss = _in_other_mesh(form, mesh)
    with jax.set_mesh(mesh):
        arguments = jax.device_put(LOOKUPS, P()), jax.device_put(LOOKED_UP, P("data"))
        grads = quick_jit(shrewjax.accumulated_value_and_grad(loss, 2))(*arguments)[1]
    expected = jax.grad(_recurrent(lambda rows, i: rows[i], _zeros))(LOOKUPS, LOOKED_UP)
    np.testing.assert_allclose(grads, expected, rtol=1e-5, atol=1e-7)


def test_scatter_in_a_linear_solve_is_no_error():
    """`custom_linear_solve` keeps its jaxprs in a named tuple."""

    def loss(scale, x):
        def matvec(v):
            return scale * v + jnp.zeros_like(v).at[jnp.array([1, 2, 3, 0])].add(0.1 * v)

        return jnp.mean(jax.vmap(lambda row: jax.scipy.sparse.linalg.cg(matvec, row)[0])(x) ** 2)

    x = np.float32(np.random.default_rng(0).normal(size=(4, 4)))
    value, grad = quick_jit(shrewjax.accumulated_value_and_grad(loss, 2))(jnp.float32(2), x)
    expected, of_whole = quick_jit(jax.value_and_grad(loss))(jnp.float32(2), x)
    np.testing.assert_allclose((value, grad), (expected, of_whole), rtol=1e-5)


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu", "cpu"])
@pytest.mark.parametrize("devices", [1, 8])
def test_true_is_a_constant_for_one_device_and_for_cpus(platform, devices):
    is_hidden = platform != "cpu" and devices > 1
    assert ("optimization_barrier" in lowered(platform, devices)) == is_hidden


def test_true_is_unknown_in_shard_map_over_several_devices():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    unknown = lambda x: jnp.where(scatters.unknown_true(), x, 0.0)  # noqa: E731
    mapped = jax.shard_map(unknown, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert "optimization_barrier" in lowered("cuda", 8, mapped)


def test_true_is_true_outside_of_jit_under_vmap_and_in_derivatives():
    def select(x):
        return jnp.where(scatters.unknown_true(), x, 0.0) * 2

    np.testing.assert_array_equal(select(np.ones(2, "f")), [2, 2])
    np.testing.assert_array_equal(jax.vmap(jax.grad(select))(np.ones(2, "f")), [2, 2])
    np.testing.assert_array_equal(jax.jit(jax.hessian(lambda x: select(x) ** 2))(np.float32(1)), 8)
