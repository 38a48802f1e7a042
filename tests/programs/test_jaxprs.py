"""The names of JAX's inside: they are those of the JAX that is installed, from the oldest to the newest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of, own_params
from jax.extend import core

from shrewjax._programs import jaxprs

X = np.arange(12, dtype="f").reshape(4, 3)


@jax.custom_jvp
def with_jvp(x):
    return jnp.sin(x)


with_jvp.defjvps(lambda t, answer, x: t * jnp.cos(x))


@jax.custom_vjp
def with_vjp(x):
    return jnp.sin(x)


with_vjp.defvjp(lambda x: (jnp.sin(x), x), lambda x, t: (t * jnp.cos(x),))

CALLS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "custom_jvp": lambda _: with_jvp,
    "custom_vjp": lambda _: with_vjp,
}
LOOPS = {
    "scan": lambda x: jax.lax.scan(lambda c, row: (c + row, c), x[0], x)[0],
    "while": lambda x: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: c + 1, x[0]),
    "fori": lambda x: jax.lax.fori_loop(0, x.shape[0] * 2, lambda i, c: c + i, x[0]),
}


def equations(function, *args):
    return jax.make_jaxpr(function)(*args).jaxpr.eqns


@pytest.mark.parametrize("name", CALLS)
def test_names_are_those_of_this_jax_for_calls(name):
    call = CALLS[name](lambda x: jnp.sin(x))
    (equation,) = equations(lambda x: call(x), X)
    inner = jaxprs.opened(jaxprs.jaxpr_of_call(equation))
    assert [x.primitive.name for x in inner.eqns] == ["sin"]
    assert [x.aval for x in inner.invars] == [x.aval for x in equation.invars]


@pytest.mark.parametrize("name", LOOPS)
def test_names_are_those_of_this_jax_for_loops(name):
    assert len([x for x in equations(LOOPS[name], X) if x.primitive.name in jaxprs.LOOPS]) == 1


@pytest.mark.parametrize("sign", [1, -1])
def test_names_are_those_of_this_jax_for_scatters(sign):
    def scatter(x):
        return x.at[np.array([0, 0])].add(1.0) if sign == 1 else x.at[np.array([0, 0])].subtract(1.0)

    found = {x.primitive.name for x in equations(scatter, X)}
    assert found & jaxprs.SCATTER_ADDS
    gradient = equations(jax.grad(lambda x: jnp.sum(x[np.array([0, 0])])), X)
    assert {x.primitive.name for x in gradient} & jaxprs.SCATTER_ADDS


def test_names_are_those_of_this_jax_for_operations_that_reorder_copy_round_place_and_add():
    whole = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def function(x):
        placed = jax.lax.with_sharding_constraint(jax.lax.reduce_precision(x, 8, 7), whole)
        return jax.lax.add(x, x), jnp.copy(placed).astype("i"), x.T, jax.lax.reshape(x, (12,))

    found = {x.primitive.name: x for x in equations(function, X)}
    kinds = {*jaxprs.ADDS, *jaxprs.COPIES, *jaxprs.REORDERS, jaxprs.ROUNDING, jaxprs.CONSTRAINT}
    assert {*found} == kinds - {jaxprs.ADD_ANY}
    square = equations(jax.grad(lambda x: jnp.sum(jnp.sin(x) * x)), X)
    assert jaxprs.ADD_ANY in {x.primitive.name for x in square}
    order = {name: jaxprs.permutation_of(x) for name, x in found.items() if jaxprs.permutation_of(x)}
    assert order == {"transpose": (1, 0)}
    assert [name for name, x in found.items() if jaxprs.is_plain_reshape(x)] == ["reshape"]
    renamed = [*map(with_other_names, found.values())]
    assert not any(jaxprs.permutation_of(x) or jaxprs.is_plain_reshape(x) for x in renamed)


def test_scan_is_taken_apart_by_shapes():
    def loop(w, x):
        def turn(c, rows):
            return (c[0] @ w + rows[0], c[1] + 1), (c[0], -rows[1])

        return jax.lax.scan(turn, (x[0], 0), (x, x[:, :2]))

    *_, equation = equations(loop, np.eye(3, dtype="f"), X)
    scan = jaxprs.scan_of(equation)
    assert (scan.constants, scan.carries, scan.length) == (1, 2, 4)
    assert jaxprs.carry_of(equation) == slice(1, 3)
    operands = [x.aval.shape for x in equation.invars]
    assert operands == [(3, 3), (3,), (), (4, 3), (4, 2)]
    run = core.jaxpr_as_fun(scan.body)(np.eye(3, dtype="f"), X[0], np.int32(0), X[1], X[1, :2])
    assert [np.shape(x) for x in run] == [(3,), (), (3,), (2,)]
    assert jaxprs.scan_of(equations(jnp.sin, X)[0]) is None
    assert jaxprs.carry_of(equations(jnp.sin, X)[0]) is None


def test_carry_of_a_while_loop_comes_after_the_constants_of_its_body():
    def loop(w, x):
        return jax.lax.while_loop(lambda c: c[1] < x[0, 0], lambda c: (c[0] @ w + x, c[1] + 1), (x, 0.0))

    *_, equation = equations(loop, np.eye(3, dtype="f"), X)
    body = jaxprs.opened(equation.params["body_jaxpr"])
    assert [x.aval.shape for x in body.invars[jaxprs.carry_of(equation)]] == [(4, 3), ()]


def test_part_of_a_jaxpr_is_a_function_of_what_it_reads():
    def function(x, y):
        sine = jnp.sin(x)
        return sine * y, jnp.cos(sine)

    program = jax.make_jaxpr(function)(1.0, 2.0)
    sine, product, _ = program.jaxpr.eqns
    some = [sine, product]
    part = jaxprs.program_of(some, jaxprs.read_by(some), [*sine.outvars, *product.outvars])
    np.testing.assert_allclose(core.jaxpr_as_fun(part)(1.0, 2.0), [np.sin(1.0), np.sin(1.0) * 2], rtol=1e-6)
    assert [x for equation in program.jaxpr.eqns for x in jaxprs.jaxprs_in(equation)] == []


def with_other_names(equation):
    return equation.replace(params={f"new_{name}": x for name, x in equation.params.items()})


BRANCHES = {"cond": lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)}


@pytest.mark.parametrize("name", [*CALLS, *LOOPS, *BRANCHES])
def test_equations_whose_parameters_have_other_names_are_not_taken_apart(name):
    function = CALLS[name](lambda x: jnp.sin(x)) if name in CALLS else (LOOPS | BRANCHES)[name]
    *_, equation = equations(lambda x: function(x), X)
    assert jaxprs.jaxprs_on_operands(equation)
    assert jaxprs.is_plain_jit(equation) == (name == "jit")
    renamed = with_other_names(equation)
    assert not jaxprs.jaxprs_on_operands(renamed)
    assert jaxprs.jaxpr_of_call(renamed) is jaxprs.carry_of(renamed) is jaxprs.scan_of(renamed) is None
    assert not jaxprs.is_plain_jit(renamed)
    assert not jaxprs.is_checkpoint(renamed)


@pytest.mark.parametrize("prevents", [False, True])
def test_names_are_those_of_this_jax_for_a_checkpoint_that_xla_may_not_merge(prevents):
    (equation,) = equations(jax.checkpoint(jnp.sin, prevent_cse=prevents), X)
    assert jaxprs.prevents_cse(equation) == prevents
    assert jaxprs.prevents_cse(with_other_names(equation))


@pytest.mark.parametrize("name", ["in_shardings", "out_shardings"])
def test_jit_with_shardings_is_not_plain(name):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    (equation,) = equations(jax.jit(jnp.sin, **{name: sharding}), X)
    assert not jaxprs.is_plain_jit(equation)


@pytest.mark.parametrize("mapped", [{"a"}, {"a", "b"}])
def test_names_are_those_of_this_jax_for_shard_map(mapped):
    mesh = mesh_of(a=2, b=1)
    specs = {"in_specs": jax.P(), "out_specs": jax.P(), "axis_names": mapped}
    found = equations(jax.jit(jax.shard_map(jnp.sin, mesh=mesh, **specs)), X)
    (equation,) = [y for x in found for y in jaxprs.opened(jaxprs.jaxpr_of_call(x)).eqns]
    assert jaxprs.is_whole_shard_map(equation) == (mapped == {"a", "b"})
    assert jaxprs.shard_map_of(equation).in_specs == (jax.P(),)
    renamed = with_other_names(equation)
    assert not jaxprs.is_whole_shard_map(renamed)
    assert jaxprs.shard_map_of(renamed) is None


WAITS = {
    "psum": (lambda x: jax.lax.psum(x, "a"), {"a"}),
    "pmax": (lambda x: jax.lax.pmax(x, "b"), {"b"}),
    "all_gather": (lambda x: jax.lax.all_gather(x, "a"), {"a"}),
    "ppermute, for which all devices of a CPU wait": (lambda x: jax.lax.ppermute(x, "a", [(0, 1)]), {"a", "b"}),
    "pcast, or pvary before JAX 0.9": (lambda x: own_params(x, "a"), set()),
    "axis_index": (lambda x: (x, jax.lax.axis_index("a")), set()),
    "a collective in a loop": (lambda x: jax.lax.fori_loop(0, 2, lambda _, c: jax.lax.psum(c, "a"), x), {"a"}),
}


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("name", WAITS)
def test_names_are_those_of_this_jax_for_collectives(name, check_vma):
    function, waits = WAITS[name]
    found = []

    def mapped(x):
        found.append(jaxprs.axes_of_collectives(lambda: function(x)))
        return x

    jax.eval_shape(
        jax.shard_map(mapped, mesh=mesh_of(a=2, b=2), in_specs=jax.P(), out_specs=jax.P(), check_vma=check_vma), X
    )
    assert found == [waits]
