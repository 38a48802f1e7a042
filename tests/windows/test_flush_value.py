"""A window that is closed without a last micro-batch keeps its loss; equal accumulators are one static argument."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import lenient

import shrewjax

PARAMS = {"w": jnp.float32([1.0, -2.0])}
GRADS = {"w": jnp.float32([0.5, 0.25])}
NANS = {"w": jnp.float32([jnp.nan, jnp.nan])}
LOSSES, WEIGHTS = (3.0, 5.0, 4.0), (1.0, 2.0, 1.0)
MEAN = 17 / 4


def closed_by_flush(tx, state, params):
    return shrewjax.flush(tx, state, params)


def closed_by_update(tx, state, params):
    updates, state = tx.update(NANS, state, params, weight=0, flush=True)
    return optax.apply_updates(params, updates), state


def closed_by_apply_gradients(tx, state, params):
    return shrewjax.apply_gradients(tx, NANS, state, params, weight=0, flush=True)


CLOSED = {f.__name__: f for f in (closed_by_flush, closed_by_update, closed_by_apply_gradients)}


def opened(tx, losses=LOSSES):
    """The state after three micro-batches of a window of eight."""
    state = tx.init(PARAMS)
    for value, weight in zip(losses, WEIGHTS, strict=True):
        _, state = tx.update(GRADS, state, PARAMS, weight=weight, value=value)
    return state


each = pytest.mark.parametrize("close", CLOSED.values(), ids=CLOSED)


@each
@pytest.mark.parametrize("jit", [lambda f: f, lambda f: jax.jit(f, static_argnums=0)], ids=["outside of jit", "jit"])
def test_the_windows_loss_stays_in_the_state(close, jit):
    tx = shrewjax.accumulate(optax.sgd(0.1), 8)
    params, state = jit(close)(tx, opened(tx), PARAMS)
    np.testing.assert_allclose(shrewjax.metrics(state)["accumulate/value"], MEAN)
    np.testing.assert_allclose(params["w"], PARAMS["w"] - 0.1 * GRADS["w"], rtol=1e-6)


@each
@pytest.mark.parametrize("reduction", ["mean", "sum_over_weights", "sum"])
def test_an_optimizer_that_takes_the_loss_gets_the_windows(close, reduction):
    inner = optax.chain(shrewjax.skip_on_spike(optax.sgd(0.1), monitor="value"), lenient(optax.polyak_sgd()))
    tx = shrewjax.accumulate(inner, 8, reduction=reduction)
    _, state = close(tx, opened(tx), PARAMS)
    expected = {"mean": MEAN, "sum_over_weights": sum(LOSSES) / sum(WEIGHTS), "sum": sum(LOSSES)}[reduction]
    measured = shrewjax.metrics(state)
    np.testing.assert_allclose(measured["skip_on_spike/measured"], expected, rtol=1e-6)
    assert measured["skip_on_spike/applied"]
    assert measured["accumulate/windows"] == 1


@each
def test_a_window_with_a_micro_batch_without_a_loss_has_none(close):
    tx = shrewjax.accumulate(optax.sgd(0.1), 8)
    _, state = close(tx, opened(tx, (3.0, None, 4.0)), PARAMS)
    assert np.isinf(state.loss)


def test_a_known_weight_of_zero_leaves_the_open_windows_loss_alone():
    accumulator = shrewjax.GradAccumulator(4)
    state = accumulator.init(PARAMS)
    for value, weight in zip(LOSSES, WEIGHTS, strict=True):
        state = accumulator.add(state, GRADS, weight, value)
        state = accumulator.add(state, GRADS, 0)
    _, _, state = accumulator.take(state)
    np.testing.assert_allclose(state.loss, MEAN)
    # A window that begins with such a micro-batch does not begin with the loss of the one before.
    state = accumulator.add(state, GRADS, 0)
    state = accumulator.add(state, GRADS, 1, 7.0)
    np.testing.assert_allclose(accumulator.take(state)[2].loss, 7.0)


def test_an_optimizer_that_takes_no_loss_is_not_given_one():
    # As `optax.contrib.sam`, which has an argument of its own, and no `**extra_args`.
    def update(updates, state, params=None, *, grad_fn=None):
        del params, grad_fn
        return jax.tree.map(jnp.negative, updates), state

    tx = shrewjax.accumulate(optax.GradientTransformationExtraArgs(optax.identity().init, update), 8)
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    params, state = shrewjax.flush(tx, state, PARAMS)
    np.testing.assert_array_equal(params["w"], PARAMS["w"] - GRADS["w"])
    assert state.windows == 1


@each
def test_a_window_closed_outside_of_jit_leaves_a_state_that_can_be_donated(close):
    tx = shrewjax.accumulate(shrewjax.skip_on_spike(optax.sgd(0.1), monitor="value"), 8)
    params, state = close(tx, opened(tx), PARAMS)
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(buffers)) == len(buffers)
    step = jax.jit(lambda state, params: tx.update(GRADS, state, params, value=1.0)[1], donate_argnums=0)
    assert step(state, params).micro_step == 1


def test_equal_accumulators_are_one_static_argument():
    def schedule(windows):
        return 2

    given = [
        {"accum_steps": 2, "sum_over": "data", "accumulator_dtype": np.float32, "noise_decay": 0.5},
        {"accum_steps": schedule, "nonfinite": "drop_window", "reduction": "sum"},
    ]
    for options in given:
        one, other = shrewjax.GradAccumulator(**options), shrewjax.GradAccumulator(**options)
        assert one == other
        assert hash(one) == hash(other)
        assert one != shrewjax.GradAccumulator(**options | {"reduction": "sum_over_weights"})
        assert one != shrewjax.GradAccumulator(**options | {"accum_steps": 5})
    assert shrewjax.GradAccumulator(2) != 2
    # An array may be traced, so it is equal to itself alone.
    of_array = shrewjax.GradAccumulator(jnp.int32(3))
    assert {of_array: "found"}[of_array] == "found"
    assert of_array != shrewjax.GradAccumulator(jnp.int32(3))

    traces = []

    def add(accumulator, state, grads):
        traces.append(accumulator)
        return accumulator.add(state, grads)

    jitted = jax.jit(add, static_argnums=0)
    for _ in range(2):
        accumulator = shrewjax.GradAccumulator(2)
        jitted(accumulator, accumulator.init(PARAMS), PARAMS)
    assert len(traces) == 1
