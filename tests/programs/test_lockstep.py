"""Programs in lockstep: the values are those of JAX, draws are rows of the whole batch's, and lines are found."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shrewjax
from shrewjax._numerics.relations import Division, shares_of
from shrewjax._programs import jaxprs, lockstep

B = 6
X = np.random.default_rng(0).normal(size=(B, 3)).astype("f")
EXAMPLES = [np.arange(0, B, 2), np.arange(1, B, 2)]
DIVISION = Division(B, shares_of("mean", [1, 1]))


def ran(function, *args, is_unrolled=True):
    """Runs a function of the rows of X and of other arguments, which stay whole."""
    each = [(X, *args), *((X[e], *args) for e in EXAMPLES)]
    names = [("", str(i)) for i in range(len(jax.tree.leaves(each[0])))]
    rows = lambda whole, parts: next(DIVISION.rows(whole, parts), parts)  # noqa: E731
    return lockstep.run(function, each, names, rows, is_unrolled=is_unrolled)


def lines(result):
    """Returns the lines that made values without a relation of values that have one."""

    def apart(x):
        return [y for y in x.operands if y.equations and not DIVISION.relations(y.whole, y.parts, 1e-5)]

    found = [x for x in lockstep.walk(result, apart) if not apart(x)][::-1]
    return [last_place(x) for x in found]


def last_place(value):
    return lockstep.expressions_of(value, ran)[-1].shown(expression=False).split(": ", 1)[1]


def scanned(x):
    def step(c, row):
        return jnp.tanh(c + row), c * row

    c, rows = jax.lax.scan(jax.checkpoint(step), x[:, 0], x.T, reverse=True)
    return jnp.sum(c) + jnp.mean(rows)


def in_calls(x):
    return jnp.where(x > 0, jax.jit(jnp.sin)(x), jax.nn.relu(x)).sum()


def in_a_while(x):
    return jax.lax.while_loop(lambda c: jnp.max(c) < 10, lambda c: c * 2, 1 + x**2)


@pytest.mark.parametrize("is_unrolled", [True, False])
@pytest.mark.parametrize("function", [scanned, jax.grad(scanned), in_calls, in_a_while])
def test_values_are_those_of_the_function(function, is_unrolled):
    value = ran(function, is_unrolled=is_unrolled)
    for x, result in zip([X, *(X[e] for e in EXAMPLES)], value.each, strict=True):
        np.testing.assert_allclose(result, function(x), rtol=1e-4, atol=1e-6)


def dropout(x, key):
    return jnp.sum(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0), 1)


def dropout_in_scanned_layers(x, key):
    def layer(x, key):
        return x + jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0), None

    return jax.lax.scan(jax.checkpoint(layer), x, jax.random.split(key, 3))[0]


def key_for_each_example(x, key):
    return jax.vmap(lambda k, x: x + jax.random.gamma(k, 2.0))(jax.random.split(key, len(x)), x)


@pytest.mark.parametrize(
    ("function", "is_unrolled"),
    [(dropout, True), (dropout, False), (dropout_in_scanned_layers, True), (key_for_each_example, True)],
)
def test_micro_batches_draw_their_rows_of_what_the_whole_batch_draws(function, is_unrolled):
    for key in (jax.random.key(1), jax.random.PRNGKey(1)):
        value = ran(function, key, is_unrolled=is_unrolled)
        np.testing.assert_allclose(value.whole, function(X, key), rtol=1e-6)
        for e, part in zip(EXAMPLES, value.parts, strict=True):
            np.testing.assert_allclose(part, value.whole[e], rtol=1e-6)


def test_a_key_that_is_closed_over_draws_the_same_in_each_micro_batch():
    key = jax.random.key(1)
    value = ran(lambda x: dropout(x, key))
    assert not any(np.array_equal(x, value.whole[e]) for e, x in zip(EXAMPLES, value.parts, strict=True))


def test_noise_without_an_axis_of_examples_is_the_same_in_all():
    value = ran(lambda x, key: x @ jax.random.normal(key, (3,)), jax.random.key(0))
    for e, part in zip(EXAMPLES, value.parts, strict=True):
        np.testing.assert_allclose(part, value.whole[e], rtol=1e-5)


def test_the_line_that_mixes_examples_is_found_in_calls_scans_and_backward_passes():
    @jax.jit
    def layer(x, _):
        x = x - jnp.mean(x, 0, keepdims=True)
        return jnp.tanh(x), None

    def loss(x):
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, None, length=2)[0])

    assert lines(ran(loss)) == ["x = x - jnp.mean(x, 0, keepdims=True)"]
    assert lines(ran(jax.grad(loss)))[:1] == ["x = x - jnp.mean(x, 0, keepdims=True)"]


def test_a_constant_that_differs_leads_to_the_line_that_reads_it():
    def loss(x):
        return jnp.sum(x[:, 0] * np.arange(len(x), dtype="f"))

    assert lines(ran(loss)) == ['return jnp.sum(x[:, 0] * np.arange(len(x), dtype="f"))']


def test_programs_that_differ_run_as_one_and_name_their_first_other_line():
    def loss(x):
        total = jnp.sum(x)
        for i in range(len(x)):
            total = total + x[i, 0]
        return total

    value = ran(loss)
    assert not value.is_alike
    assert last_place(value) == "total = total + x[i, 0]"
    np.testing.assert_allclose(value.whole, loss(X), rtol=1e-5)


def test_programs_of_one_number_of_equations_that_are_wired_otherwise_differ():
    def loss(x):
        return jnp.sin(x) - jnp.cos(x) if len(x) == B else jnp.cos(jnp.sin(x)) - x

    assert not ran(loss).is_alike


def test_a_call_without_operands_that_differs_is_one_equation():
    """As of a loss that takes another way for one example."""
    of_size = lambda x: jax.jit(lambda: jnp.zeros(3) if len(x) == B // 2 else jnp.arange(6.0))()  # noqa: E731
    value = ran(lambda x: jnp.sum(of_size(x)) + jnp.sum(x) * 0, is_unrolled=False)
    assert [float(x) for x in value.each] == [15, 0, 0]
    assert not all(y.is_alike for y in lockstep.walk(value, lambda y: y.operands))


def test_a_print_does_not_run(capsys):
    def loss(x):
        jax.debug.print("printed {}", x[0, 0], ordered=True)
        return jnp.sum(x)

    for is_unrolled in (True, False):
        ran(loss, is_unrolled=is_unrolled)
    jax.effects_barrier()
    assert capsys.readouterr().out == ""


def test_the_expression_is_named_and_an_equation_knows_its_arguments():
    value = ran(lambda x: 1 + jnp.tanh(x))
    (made,) = [x for x in lockstep.walk(value, lambda x: x.operands) if x.equations and x is not value]
    place = lockstep.expressions_of(made, ran)[-1]
    assert place.shown(expression=True).endswith(": jnp.tanh(x)")
    assert made.sources == {("", "0")}


@pytest.mark.parametrize("folder", [sys.prefix, pathlib.Path(shrewjax.__file__).parent.with_name("shrewjax_runs")])
def test_a_project_is_the_users_wherever_it_lies(folder):
    """Such as /usr/src, below the prefix of Debian's Python; or beside a checkout of this package."""
    user, file = {"jnp": jnp}, f"{folder}/project/model.py"
    exec(compile("def f(x):\n    return jnp.tanh(x)", file, "exec"), user)
    assert lockstep.expressions_of(ran(lambda x: user["f"](x)), ran)[-1].filename == file


def test_frames_are_those_of_this_jax():
    """If JAX keeps no traceback, or another one, the check names no line."""
    (equation,) = jax.make_jaxpr(lambda x: jnp.sin(x))(1.0).eqns
    assert jaxprs.frames_of(equation)[0].filename.endswith(".py")
    ours = [frame for frame in jaxprs.frames_of(equation) if frame.filename == __file__]
    assert "jax.make_jaxpr(lambda x: jnp.sin(x))" in ours[0].shown(expression=False)
    backward = jax.make_jaxpr(jax.grad(lambda x: jnp.sin(x)))(1.0).eqns[-1]
    assert any(frame.filename == __file__ for frame in jaxprs.frames_of(backward))
