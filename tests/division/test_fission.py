"""Fission: a scan or a checkpoint in which examples mix becomes two, of which the first is in the loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compared import RNG, B, D, T, W, X, check, plan_of
from helpers import assert_close
from jax import lax

import shrewjax
from shrewjax._division.kinds import MIXED, SAME, Fact, Program
from shrewjax._division.micro_batch import function_of_steps
from shrewjax._division.rows import Rows

pytestmark = pytest.mark.usefixtures("as_users_have_it", "x64_only")

LAYERS = jnp.stack([W["a"], W["b"], W["a"] - W["b"]])
OTHER = RNG.normal(size=(3, D))


def balance(z):
    """Sums over examples, multiplied."""
    share = jax.nn.softmax(z)
    return D * jnp.sum(share.mean(0) * (share**2).mean(0))


def carried(w, x):
    def layer(c, v):
        z, total = c
        return (jnp.tanh(z @ v), total * 0.5 + balance(z)), None

    z, total = lax.scan(layer, (x, 1.0), LAYERS * w["a"][0, 0])[0]
    return jnp.mean(z**2) + total


def stacked_backwards(w, x):
    """Results of both halves are stacked, in reverse, and both read the same slices."""

    def layer(z, own):
        v, u = own
        return jnp.tanh(z @ v + u), (jnp.mean(z) ** 2 * u, z[:, 0], u * 2)

    z, (mixed, rows, plain) = lax.scan(layer, x, (LAYERS * w["b"][1, 1], OTHER * w["a"][0]), reverse=True, unroll=2)
    return jnp.mean(z**2) + jnp.sum(mixed[0] - mixed[2]) + jnp.sum(rows[1] ** 2) + jnp.sum(plain[0] ** 2)


def numbered(w, x):
    """The second half reads what the first one carries for all examples alike: a number and a decay."""

    def layer(c, _):
        z, i, decay, total = c
        return (jnp.tanh(z @ w["a"] + i), i + 1, decay * w["b"][0, 0], total + decay * i * balance(z)), i

    (z, _, decay, total), numbers = lax.scan(layer, (x, 0, 1.0, 0.0), None, T)
    return jnp.mean(z**2) * decay + total + jnp.sum(numbers)


def in_checkpoint(w, x):
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def block(w, x):
        z = jnp.tanh(x @ w["a"])
        return z, balance(z), jnp.sum(w["b"])

    z, total, of_weights = block(w, x)
    return jnp.mean(z @ w["b"]) * of_weights + total


def nested(w, x):
    """A scan of blocks, each a checkpoint around a scan."""

    @jax.checkpoint
    def block(c, v):
        def layer(c, _):
            z, total = c
            return (jnp.tanh(z @ v), total + balance(z)), None

        (z, total), _ = lax.scan(layer, c, None, 2)
        return (z, total * 0.9), balance(z)

    (z, total), each = lax.scan(block, (x, 0.0), LAYERS * w["a"][0, 0])
    return jnp.mean(z**2) + total + jnp.prod(each)


LOSSES = [carried, stacked_backwards, numbered, in_checkpoint, nested]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_a_loss_with_sums_that_multiply_inside_of_its_layers_is_that_of_jax(loss):
    check(loss, W, X, micro_batches=(3,))


def dots(equations):
    """The primitives inside of equations, with how often they are products."""
    return sum(str(x.params.get("jaxpr", "")).count("dot_general") for x in equations)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_the_layers_are_in_the_loop_and_the_products_of_sums_after_it(loss):
    plan = plan_of(loss, W, X)
    kind = "checkpoint" if loss is in_checkpoint else "scan"
    in_loop, after = [x.step.equation for x in plan.loop], [x.equation for x in plan.after]
    assert dots(in_loop) >= 1
    assert dots(after) == 0
    assert [x for x in after if x.primitive.name in ("scan", "remat2", "checkpoint")], kind
    assert all(np.prod(x.aval.shape) <= 3 * B for x in plan.frontier)


def program_of(fun, *args):
    jaxpr = jax.make_jaxpr(fun)(*args)
    facts = [Fact(SAME, is_free=True), Fact(Rows(0, (B,)), is_free=False)]
    return Program(jaxpr, facts, (B,))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_both_halves_together_are_the_program(loss):
    of_arrays = lambda a, x: loss({"a": a, "b": W["b"]}, x)  # noqa: E731
    program = program_of(of_arrays, W["a"], X)
    names_of = [*program.arguments, *program.constants]
    run = function_of_steps(program.steps, names_of, program.results)
    found = run(W["a"], X, *program.constants.values())
    assert_close(found, [of_arrays(W["a"], X)], rtol=1e-10)


def test_layers_of_which_nothing_can_be_divided_stay_one_scan_that_mixes():
    def normalized(a, x):
        return lax.scan(lambda z, _: (jnp.tanh((z - z.mean(0)) @ a), None), x, None, T)[0]

    program = program_of(normalized, W["a"], X)
    scans = [x for x in program.steps if x.equation.primitive.name == "scan"]
    assert len(scans) == 1
    assert [*scans[0].kinds] == [MIXED] * len(scans[0].kinds)


def test_a_mixture_of_experts_has_the_memory_of_a_micro_batch():
    """The sums of its layers are kept, and not the layers."""
    x, layers = jnp.ones((512, 32), "f"), jnp.ones((6, 32, 32), "f") / 32

    def loss(layers, x):
        def layer(c, v):
            z, total = c
            share = jax.nn.softmax(z @ v)
            return (z + jnp.tanh(z @ v), total + jnp.sum(share.mean(0) * (share**2).mean(0))), None

        (z, total), _ = lax.scan(jax.checkpoint(layer), (x, jnp.float32(0)), layers)
        return jnp.mean(z**2) + total

    def held(f):
        return jax.jit(f).lower(layers, x).compile().memory_analysis().temp_size_in_bytes

    assert held(shrewjax.value_and_grad(loss, 16)) < held(jax.value_and_grad(loss)) / 4
