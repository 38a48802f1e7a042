"""Sums of stacked gradients: each form of a model that scans its layers, against a loop over micro-batches by hand.

The memory of a step is read from the compiled program: `temp_size_in_bytes`, beyond that of one micro-batch's own
gradients, in multiples of the gradients' bytes. A whole tree beside the sum is 1.
"""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import bits, mesh_of, thorough
from speed import users_jit

import shrewjax
import shrewjax.flax
from shrewjax._programs.loops import Traced

pytestmark = pytest.mark.usefixtures("as_users_have_it")

LAYERS, WIDTH, K = 8, 64, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, WIDTH)).astype("f")
STACK = (RNG.normal(size=(LAYERS, WIDTH, WIDTH)) / WIDTH**0.5).astype("f")


def layer(h, w):
    return jnp.tanh(h @ w), None


def scanned(stack, x, wrap=lambda turn: turn, **options):
    return jax.lax.scan(wrap(layer), x, stack, **options)[0]


def loss_of(model):
    return lambda stack, x: jnp.mean(model(stack, x) ** 2)


def in_bfloat16(turn):
    return lambda h, w: turn(h, w.astype(jnp.bfloat16))


def two_scans(stack, x):
    return scanned(stack, scanned(stack, x))


def in_blocks(stack, x):
    return jax.lax.scan(lambda h, block: (scanned(block, h), None), x, stack.reshape(2, -1, WIDTH, WIDTH))[0]


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


def linen(axis, wrap=lambda module: module):
    class Block(nn.Module):
        @nn.compact
        def __call__(self, h, _):
            return h + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(h)))), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.scan(wrap(Block), {"params": axis}, split_rngs={"params": True}, length=LAYERS)()(x, None)[0]

    model = Model()
    return loss_of(model.apply), model.init(jax.random.key(0), X[:1])


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, h):
        return h + self.down(nnx.gelu(self.up(h)))


def of_nnx():
    @nnx.split_rngs(splits=LAYERS)
    @nnx.vmap
    def blocks(rngs):
        return Block(rngs)

    graph, params = nnx.split(blocks(nnx.Rngs(0)))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(h, block):
        return block(h)

    return lambda params, x: jnp.mean(run(x, nnx.merge(graph, params)) ** 2), params


class Linear(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        self.up, self.down = eqx.nn.Linear(WIDTH, WIDTH, key=key), eqx.nn.Linear(WIDTH, 2, key=key)

    def __call__(self, h):
        return h + self.up(jnp.tanh(h)) * jnp.mean(self.down(h))


def of_equinox():
    layers = eqx.filter_vmap(Linear)(jax.random.split(jax.random.key(0), LAYERS))
    arrays, static = eqx.partition(layers, eqx.is_inexact_array)
    turn = lambda h, one: (jax.vmap(eqx.combine(one, static))(h), None)  # noqa: E731
    return lambda arrays, x: jnp.mean(jax.lax.scan(turn, x, arrays)[0] ** 2), arrays


def simple(model, stack=STACK):
    return lambda: (loss_of(model), stack)


# The losses and their parameters, by form.
FORMS = {
    "scan": simple(scanned),
    "reverse": simple(functools.partial(scanned, reverse=True)),
    "unrolled": simple(functools.partial(scanned, unroll=2)),
    "checkpoint": simple(functools.partial(scanned, wrap=jax.checkpoint)),
    "checkpoint of all": lambda: (jax.checkpoint(loss_of(scanned)), STACK),
    "jit": simple(jax.jit(scanned)),
    "custom_vjp": simple(lambda stack, x: doubled(scanned(stack, doubled(x)))),
    "transposed": simple(lambda stack, x: scanned(jnp.moveaxis(stack, 1, 0), x), np.moveaxis(STACK, 0, 1)),
    "reshaped": simple(lambda stack, x: scanned(stack.reshape(STACK.shape), x), STACK.reshape(LAYERS, -1)),
    "blocks": simple(in_blocks),
    "two scans": simple(two_scans),
    "bfloat16 inside": simple(lambda stack, x: scanned(stack, x.astype(jnp.bfloat16), in_bfloat16)),
    "bfloat16 copy": simple(lambda stack, x: scanned(stack.astype(jnp.bfloat16), x.astype(jnp.bfloat16))),
    "Linen": lambda: linen(0),
    "Linen, axis 1": lambda: linen(1),
    "Linen, remat": lambda: linen(0, functools.partial(nn.remat, prevent_cse=False)),
    "NNX": of_nnx,
    "Equinox": of_equinox,
}
# Each part of the gradient is added on its own, so that the last bits differ from those of the sum of the parts.
IN_PARTS = {"two scans", "penalty"}
FIVE = "scan", "jit", "bfloat16 inside", "Linen, remat", "Equinox"
OTHERS = [name for name in FORMS if name not in FIVE]


def by_hand(loss, params, x):
    """The mean over micro-batches of the gradients, which are summed in float32, in a loop as users write it."""
    parts = x.reshape(-1, K, *x.shape[1:])

    def turn(sums, i):
        grads = jax.grad(loss)(params, parts[:, i])
        return jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums, grads), None

    start = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    sums, _ = jax.lax.scan(turn, start, jnp.arange(K))
    return jax.tree.map(lambda total, p: (total / K).astype(p.dtype), sums, params)


def held(function, *args):
    return users_jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.combinations
@pytest.mark.parametrize("name", [*FIVE, *thorough(*OTHERS)])
def test_scans_add_their_gradients_with_the_bits_of_a_loop_by_hand(name):
    loss, params = FORMS[name]()
    found = jax.jit(shrewjax.accumulated_value_and_grad(loss, K))(params, X)[1]
    expected = jax.jit(functools.partial(by_hand, loss))(params, X)
    if name in IN_PARTS:
        for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6 * np.abs(e).max())
    else:
        assert bits(found) == bits(expected)


# XLA may keep the bfloat16 copy, half a tree, from micro-batch to micro-batch.
@pytest.mark.combinations
@pytest.mark.needs_passes
@pytest.mark.parametrize("name", [*FIVE, *thorough(*(name for name in OTHERS if name != "bfloat16 copy"))])
def test_scans_that_add_their_gradients_hold_no_tree_beside_the_sum(name):
    loss, params = FORMS[name]()
    step = shrewjax.accumulated_value_and_grad(loss, K)
    unit = sum(x.nbytes for x in jax.tree.leaves(params))
    alone = held(jax.value_and_grad(loss), params, X[::K])
    assert (held(step, params, X) - alone) / unit < 0.35


def test_the_measure_finds_the_tree_of_a_loop_by_hand():
    loss, params = FORMS["scan"]()
    alone = held(jax.grad(loss), params, X[::K])
    assert (held(functools.partial(by_hand, loss), params, X) - alone) / STACK.nbytes > 0.9


def added(loss, *args, wanted=None):
    """The numbers of the gradients that scans add, of all."""
    traced = Traced(lambda i, *args: jax.value_and_grad(loss)(*args), 0, *args)
    numbers = jax.tree.leaves(traced.numbers[1])
    results = [jax.tree.leaves(traced.result_types)[n] for n in numbers]
    sums = {n: jnp.zeros(x.shape, jnp.float32) for n, x in zip(numbers, results, strict=True)}
    found, _ = traced.added_to(sums, lambda total, g: total + g.astype(total.dtype), 0, *args)
    return [x is None for x in jax.tree.leaves(found[1], is_leaf=lambda x: x is None)]


def fori(stack, x):
    return jax.lax.fori_loop(0, LAYERS, lambda i, h: jnp.tanh(h @ stack[i]), x)


LEFT = {
    "a loop over an index": fori,
    "layers of a list": lambda stack, x: functools.reduce(lambda h, w: jnp.tanh(h @ w), stack, x),
    "one layer for all turns": lambda stack, x: jax.lax.scan(lambda h, _: layer(h, stack[0]), x, length=3)[0],
    "another order of elements": lambda stack, x: scanned(stack.reshape(WIDTH, LAYERS, WIDTH).swapaxes(0, 1), x),
}


@pytest.mark.parametrize("name", LEFT)
def test_gradients_that_no_scan_stacks_are_left_to_the_caller(name):
    params = [*STACK] if name == "layers of a list" else STACK
    if name == "another order of elements":
        params = STACK.reshape(-1)  # the layers' axis is not the first of the array
    assert not any(added(loss_of(LEFT[name]), params, X[:2]))
    found = jax.jit(shrewjax.accumulated_value_and_grad(loss_of(LEFT[name]), K))(params, X)[1]
    expected = jax.jit(functools.partial(by_hand, loss_of(LEFT[name])))(params, X)
    np.testing.assert_allclose(jnp.stack(found), jnp.stack(expected), rtol=1e-4, atol=1e-7)


def test_a_gradient_that_is_read_twice_is_left_to_the_caller():
    def twice(params, x):  # as aux, the gradient of the stack is a result of its own, too
        value, grads = jax.value_and_grad(loss_of(scanned))(params, x)
        return value, grads, grads * 2

    traced = Traced(twice, STACK, X[:2])
    number = traced.numbers[1]
    found, sums = traced.added_to({number: jnp.ones_like(STACK)}, jnp.add, STACK, X[:2])
    assert found[1] is not None
    np.testing.assert_array_equal(sums[number], 1)


def penalized(stack, x):
    return loss_of(scanned)(stack, x) + 0.1 * jnp.sum(stack**2)


@pytest.mark.needs_passes
def test_a_scan_adds_also_if_a_penalty_does():
    assert added(penalized, STACK, X[:2]) == [True]


def test_a_penalty_and_the_scan_both_reach_the_sum():
    found = jax.jit(shrewjax.accumulated_value_and_grad(penalized, K))(STACK, X)[1]
    expected = np.asarray(jax.jit(functools.partial(by_hand, penalized))(STACK, X))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


# --- scans that XLA unrolls ------------------------------------------------------------------------------------


@pytest.mark.needs_passes
@pytest.mark.parametrize(("unroll", "adds"), [(1, True), (2, True), (4, True), (5, False), (8, False), (True, False)])
def test_a_scan_that_xla_unrolls_whole_leaves_its_gradients_to_the_caller(unroll, adds):
    assert added(loss_of(functools.partial(scanned, unroll=unroll)), STACK, X[:2]) == [adds]


@pytest.mark.parametrize("unroll", [True, *thorough(5)])
def test_a_scan_that_xla_unrolls_whole_holds_no_more_than_by_hand(unroll):
    loss = loss_of(functools.partial(scanned, unroll=unroll))
    ours, theirs = (
        held(step, STACK, X) for step in (shrewjax.accumulated_value_and_grad(loss, K), lambda *a: by_hand(loss, *a))
    )
    assert ours <= theirs + 0.05 * STACK.nbytes


# --- functions that a loss calls often -------------------------------------------------------------------------


def lines(step, *args):
    return len(jax.jit(step).lower(*args).as_text().splitlines())


def often(count):
    one = jax.jit(scanned)
    return loss_of(lambda stacks, x: functools.reduce(lambda h, stack: one(stack, h), stacks, x))


def nested(depth):
    run = scanned
    for _ in range(depth):
        run = jax.jit(lambda stack, h, run=run: run(stack, run(stack, h)))
    return loss_of(run)


OFTEN = {
    "40 calls": (often(40), [STACK[:2, :4, :4]] * 40),
    "ten functions that call each other twice": (nested(10), STACK[:2, :4, :4]),
}


@pytest.mark.parametrize("name", OFTEN)
def test_calls_of_one_function_are_calls_in_the_program(name):
    loss, params = OFTEN[name]
    ours, theirs = (
        lines(step, params, X[:, :4])
        for step in (shrewjax.accumulated_value_and_grad(loss, K), functools.partial(by_hand, loss))
    )
    assert ours < 2 * theirs


def test_calls_add_each_to_its_own_sum_and_in_its_own_way():
    """Three stacks: one as it is, one with its layers along the last axis, one through a function around the first."""
    one = jax.jit(scanned)
    around = jax.jit(lambda stack, h: one(stack, one(2 * stack, h)))

    def loss(params, x):
        first, last, third = params
        h = one(first, one(jnp.moveaxis(last, -1, 0), x))
        return jnp.mean(around(third, one(first, around(first, h))) ** 2)

    stacks = STACK[:2, :4, :4], np.moveaxis(STACK[2:4, :4, :4], 0, -1), STACK[4:6, :4, :4]
    found = jax.jit(shrewjax.accumulated_value_and_grad(loss, K))(stacks, X[:, :4])[1]
    expected = jax.jit(jax.grad(loss))(stacks, X[:, :4])
    for a, e in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5 * np.abs(np.asarray(e)).max())


# --- tracing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"nonfinite": "drop_micro_batch"}, {"weight_fn": lambda layers, x: jnp.sum(x > 0)}]
)
def test_the_loss_is_traced_once_and_adds_few_lines_to_a_loop_by_hand(options):
    seen = []

    def loss(layers, x):
        seen.append(x)
        return loss_of(LEFT["layers of a list"])(layers, x)

    layers = [*STACK[:, :4, :4]] * 4
    ours = lines(shrewjax.accumulated_value_and_grad(loss, K, **options), layers, X[:, :4])
    assert len(seen) == 1
    theirs = lines(functools.partial(by_hand, loss), layers, X[:, :4])
    assert options or ours < 1.25 * theirs


# --- options of the window -------------------------------------------------------------------------------------


def test_weights_select_and_scale_each_slice():
    weights = np.array([3, 0, 1, 4], "f")
    x = np.where(weights[None, :, None] == 0, np.nan, X.reshape(-1, K, WIDTH)).reshape(X.shape).astype("f")
    weigh = lambda stack, x: jnp.where(jnp.isnan(x[0, 0]), 0.0, jnp.round(x[0, 0] * 0 + x[-1, 1]))  # noqa: E731
    x = np.array(x)
    for i, w in enumerate(weights):
        if w:
            x[i + K :: K, 1] = w
    loss, params = FORMS["scan"]()
    found = jax.jit(shrewjax.accumulated_value_and_grad(loss, K, weight_fn=weigh))(params, x)[1]
    kept = [i for i, w in enumerate(weights) if w]
    grads = [jax.jit(jax.grad(loss))(params, x[i::K]) for i in kept]
    expected = sum(np.float64(weights[i]) * np.asarray(g, np.float64) for i, g in zip(kept, grads, strict=True))
    np.testing.assert_allclose(found, expected / weights.sum(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", ["sum", "sum_over_weights"])
def test_other_reductions_are_those_of_layers_in_a_list(reduction):
    options = {"reduction": reduction, "weight_fn": (lambda stack, x: 2.0) if reduction != "sum" else None}
    found = jax.jit(shrewjax.accumulated_value_and_grad(loss_of(scanned), K, **options))(STACK, X)
    listed = loss_of(LEFT["layers of a list"])
    expected = jax.jit(shrewjax.accumulated_value_and_grad(listed, K, **options))([*STACK], X)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5, atol=1e-7)


def test_sums_of_bfloat16_parameters_are_float32():
    stack, x = jnp.asarray(STACK, jnp.bfloat16), jnp.asarray(np.tile(X, (8, 1)), jnp.bfloat16)
    step = shrewjax.accumulated_value_and_grad(loss_of(scanned), 32)
    found = jax.jit(step)(stack, x)[1]
    one = jax.jit(jax.grad(loss_of(scanned)))
    parts = [one(stack, x[i::32]) for i in range(32)]
    exact = np.mean([np.asarray(g, np.float64) for g in parts], axis=0)
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=2**-8, atol=1e-12)


def test_per_device_sums_in_shard_map_are_added_in_the_scan():
    mesh = mesh_of(data=8)
    x = np.tile(X, (4, 1))
    step = shrewjax.accumulated_value_and_grad(loss_of(scanned), K, sum_over="data")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=(jax.P(), jax.P()))
    value, grads = jax.jit(mapped)(STACK, x)
    expected_value, expected = jax.jit(jax.value_and_grad(loss_of(scanned)))(STACK, x)
    np.testing.assert_allclose(value, expected_value, rtol=1e-5)
    np.testing.assert_allclose(grads, expected, rtol=1e-4, atol=1e-6)
    alone = jax.shard_map(
        jax.value_and_grad(loss_of(scanned)),
        mesh=mesh,
        in_specs=(jax.P(), jax.P("data")),
        out_specs=(jax.P(), jax.P()),
        check_vma=False,
    )
    assert (held(mapped, STACK, x) - held(alone, STACK, x[::K])) / STACK.nbytes < 1.35  # its own sum, and the batch's


def test_a_checkpoint_in_shard_map_may_read_what_is_the_same_on_every_device():
    """Such as a factor, in the carry."""

    @jax.checkpoint
    def run(stack, x, factor):
        def turn(state, w):
            h, factor = state
            return (jnp.tanh(h @ w) * factor, factor), None

        return jax.lax.scan(turn, (x, factor), stack)[0][0]

    loss = loss_of(lambda stack, x: run(stack, x, 0.9 * jnp.ones(())))
    mesh = mesh_of(data=8)
    specs = {"in_specs": (jax.P(), jax.P("data")), "out_specs": (jax.P(), jax.P())}
    x = np.tile(X, (4, 1))
    found = jax.jit(jax.shard_map(shrewjax.accumulated_value_and_grad(loss, K, sum_over="data"), mesh=mesh, **specs))(
        STACK, x
    )
    for a, e in zip(found, jax.jit(jax.value_and_grad(loss))(STACK, x), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-7)


# --- what has to stay ------------------------------------------------------------------------------------------


def squared_gradients(step):
    return lambda stack: jnp.sum(step(stack)[1] ** 2)


DERIVATIVES = {
    "reverse": lambda step: jax.grad(squared_gradients(step)),
    "forward": lambda step: lambda stack: jax.jvp(step, (stack,), (stack,))[1],
    "second": lambda step: jax.grad(lambda stack: jnp.sum(jax.grad(squared_gradients(step))(stack) ** 2)),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_through_the_sum_are_those_of_the_whole_batch(name):
    stack, x = STACK[:2, :4, :4], X[:, :4]
    steps = shrewjax.accumulated_value_and_grad(loss_of(scanned), K), jax.value_and_grad(loss_of(scanned))
    found, expected = (jax.jit(DERIVATIVES[name](lambda s, step=step: step(s, x)))(stack) for step in steps)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-4, atol=1e-5 * np.abs(e).max())


def test_vmap_over_parameters_is_a_loop_over_them():
    stacks = np.stack([STACK[:2], 0.5 * STACK[:2]])
    step = shrewjax.accumulated_value_and_grad(loss_of(scanned), K)
    value, grads = jax.jit(jax.vmap(step, in_axes=(0, None)))(stacks, X)
    for i, stack in enumerate(stacks):
        v, g = jax.jit(step)(stack, X)
        np.testing.assert_allclose(value[i], v, rtol=1e-6)
        np.testing.assert_allclose(grads[i], g, rtol=1e-5, atol=1e-7)


def test_effects_keep_their_order(capfd):
    def loss(stack, x):
        jax.debug.print("before {}", x.shape[0], ordered=True)
        value = loss_of(scanned)(stack, x)
        jax.debug.print("after", ordered=True)
        return value

    jax.block_until_ready(jax.jit(shrewjax.accumulated_value_and_grad(loss, 2))(STACK[:2], X))
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["before", "4", "after"] * 2


def test_names_in_a_profile_stay():
    def loss(stack, x):
        def turn(h, w):
            with jax.named_scope("my_layer"):
                return layer(h, w)

        with jax.named_scope("my_model"):
            return jnp.mean(jax.lax.scan(turn, x, stack)[0] ** 2)

    text = users_jit(shrewjax.accumulated_value_and_grad(loss, 2)).lower(STACK, X).compile().as_text()
    assert "transpose(jvp(my_model))/while/body/" in text
    assert "my_layer" in text


def test_errors_of_the_loss_are_raised_as_they_are():
    def loss(stack, x):
        return jnp.mean(scanned(stack, x @ x))

    with pytest.raises(TypeError, match="dot_general requires contracting dimensions to have the same shape"):
        jax.jit(shrewjax.accumulated_value_and_grad(loss, 2))(STACK, X)


def test_without_jit_the_loss_sees_numbers():
    seen = []

    def loss(stack, x):
        seen.append(x)
        return jnp.mean(x * jnp.sum(stack))

    with jax.disable_jit():
        grads = shrewjax.accumulated_value_and_grad(loss, 2)(STACK[:2], X)[1]
    assert [isinstance(x, jax.core.Tracer) for x in seen][-2:] == [False, False]
    np.testing.assert_allclose(grads, np.mean(X), rtol=1e-4)
