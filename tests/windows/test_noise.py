"""What a window knows besides its gradients: its loss, and how noisy it was."""

from fractions import Fraction
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from helpers import bits, lenient, mesh_of, own_params, placed, thorough
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from speed import compiled, quick_jit, users_jit

import shrewjax
from shrewjax import spec

WEIGHTS = np.float32([1, 2, 3, 5, 8, 13, 4, 20])
KEEP = optax.identity()


@cache
def scan_of(tx):
    def call(state, batch):
        gradient, weight, value = batch
        updates, state = tx.update(gradient, state, weight=weight, value=value)
        return state, updates

    return quick_jit(partial(jax.lax.scan, call))


def through(tx, gradients, weights, values=None):
    """The state after micro-batches that go through one program, and the updates of all calls."""
    values = weights if values is None else values
    return scan_of(tx)(tx.init(np.zeros_like(gradients[0])), (gradients, weights, values))


def estimates(state):
    found = shrewjax.metrics(jax.device_get(state))
    return float(found["accumulate/noise_trace"]), float(found["accumulate/signal_squared"])


# --- the loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nonfinite", ["propagate", "drop_micro_batch", "extend_window"])
@pytest.mark.parametrize("reduction", ["mean", "sum_over_weights", "sum"])
def test_value_of_a_window_is_that_of_the_large_batch(reduction, nonfinite):
    """The last micro-batch weighs nothing, and one is bad unless bad ones propagate."""
    rng = np.random.default_rng(0)
    examples = [rng.normal(size=n) for n in (1, 4, 7, 2, 3)]
    weights = np.float32([*map(len, examples), 0])
    combine = np.mean if reduction == "mean" else np.sum
    values = np.float32([*map(combine, examples), np.nan])
    gradients = np.ones((6, 2), np.float32)
    gradients[5] = np.nan
    kept = range(5)
    if nonfinite != "propagate":
        gradients[1, 0], kept = np.inf, [0, 2, 3, 4]
    tx = shrewjax.accumulate(KEEP, 5 if nonfinite == "extend_window" else 6, reduction=reduction, nonfinite=nonfinite)

    state, _ = through(tx, gradients, weights, values)

    whole = np.concatenate([examples[i] for i in kept])
    assert int(state.windows) == 1
    assert float(state.loss) == pytest.approx(np.sum(whole) if reduction == "sum" else np.mean(whole), rel=1e-6)
    assert shrewjax.metrics(state)["accumulate/value"] == state.loss


def test_rule_inside_sees_the_windows_loss_once_a_window():
    tx = shrewjax.accumulate(shrewjax.skip_on_spike(KEEP, monitor="value", history_length=3, warmup_steps=3), 2)
    values = np.float32([1, 3, 5, 1, 2, 4])
    state, _ = through(tx, np.zeros((6, 1), np.float32), np.float32([1, 3] * 3), values)
    assert state.inner_state.history.values.tolist() == [2.5, 2, 3.5]


def test_window_without_a_loss_in_every_micro_batch_has_none():
    tx = shrewjax.accumulate(KEEP, 2)
    state = tx.init(jnp.zeros(1))
    assert state.loss == jnp.inf
    _, state = tx.update(jnp.ones(1), state, value=1.0)
    _, state = tx.update(jnp.ones(1), state)
    assert (int(state.windows), float(state.loss)) == (1, np.inf)
    for value in (2.0, 4.0):
        _, state = tx.update(jnp.ones(1), state, value=value)
    assert float(state.loss) == 3


X = np.float32(np.random.default_rng(1).normal(size=(12, 3)))
Y = X @ np.float32([1, -2, 0.5]) + 0.1


def loss(params, x=X, y=Y):
    return jnp.mean(jnp.square(x @ params - y))


# Micro-batches of 2, 5 and 5 rows, in arrays of 5: those of NaN do not count.
PARTS = [(np.full((5, 3), np.nan, np.float32), np.full(5, np.nan, np.float32), np.arange(5) < n) for n in (2, 5, 5)]
for part, rows in zip(PARTS, np.split(np.arange(12), [2, 7]), strict=True):
    part[0][: len(rows)], part[1][: len(rows)] = X[rows], Y[rows]


def loss_of_part(params, x, y, counts):
    errors = jnp.where(counts[:, None], x, 0) @ params - jnp.where(counts, y, 0)
    return jnp.sum(jnp.square(errors)) / jnp.sum(counts).astype(jnp.float32)


OPTIMIZERS = {
    "lbfgs": optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(max_backtracking_steps=8)),
    "momo": optax.with_extra_args_support(optax.contrib.momo(0.1)),
    "reduce_on_plateau": optax.chain(
        optax.sgd(0.3), optax.contrib.reduce_on_plateau(patience=1, factor=0.5, cooldown=0)
    ),
}


@pytest.mark.parametrize("name", ["lbfgs", "reduce_on_plateau", *thorough("momo")])
def test_optimizer_that_reads_the_loss_trains_as_on_the_large_batch(name):
    inner = lenient(OPTIMIZERS[name])
    tx = shrewjax.accumulate(inner, 3)

    @quick_jit
    def micro_step(params, state, *part):
        value, grad = jax.value_and_grad(loss_of_part)(params, *part)
        updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=loss, weight=jnp.sum(part[-1]))
        return optax.apply_updates(params, updates), state

    @quick_jit
    def whole_step(params, state):
        value, grad = jax.value_and_grad(loss)(params)
        updates, state = inner.update(grad, state, params, value=value, grad=grad, value_fn=loss)
        return optax.apply_updates(params, updates), state

    ours = theirs = np.zeros(3, np.float32)
    state, opt_state = tx.init(ours), inner.init(theirs)
    for _ in range(5):
        for part in PARTS:
            ours, state = micro_step(ours, state, *part)
        theirs, opt_state = whole_step(theirs, opt_state)
    np.testing.assert_allclose(ours, theirs, rtol=2e-4)
    assert np.mean((X @ np.asarray(ours) - Y) ** 2) < np.mean(Y**2)


def test_optimizer_that_takes_the_gradient_by_name_gets_the_average():
    def update(updates, state, params=None, *, grad, **extra_args):
        return grad, state

    tx = shrewjax.accumulate(optax.GradientTransformationExtraArgs(KEEP.init, update), 2)
    call = quick_jit(lambda gradient, state: tx.update(gradient, state, grad=gradient))
    _, state = call(np.float32([1]), tx.init(np.zeros(1, np.float32)))
    assert call(np.float32([3]), state)[0].tolist() == [2]


@pytest.mark.parametrize("bad", [np.float32([1, 2]), "low", jnp.ones(2)], ids=["numpy", "text", "jax"])
def test_bad_value_is_named(bad):
    tx = shrewjax.accumulate(KEEP, 2)
    with pytest.raises(ValueError, match="value must be a real scalar, got"):
        tx.update(jnp.ones(1), tx.init(jnp.zeros(1)), value=bad)


# --- the noise ------------------------------------------------------------------------------------------------------


def simulated(windows, dimensions=200, weights=WEIGHTS, decay=0.0):
    """S and G2 of many windows of gradients of known mean and covariance, and those two."""
    covariance, mean = np.linspace(0.5, 2, dimensions), np.full(dimensions, 0.05)
    tx = shrewjax.accumulate(KEEP, len(weights), noise_decay=decay)
    spread = np.float32(np.sqrt(covariance) / np.sqrt(weights)[:, None])
    noise = np.random.default_rng(0).standard_normal((windows, len(weights), dimensions), np.float32)

    def window(state, noise):
        gradients = np.float32(mean)[None] + noise * spread
        state, _ = jax.lax.scan(
            lambda state, batch: (tx.update(batch[0], state, weight=batch[1])[1], ()), state, (gradients, weights)
        )
        found = shrewjax.metrics(state)
        small = jnp.mean(jnp.sum(jnp.square(gradients), axis=1))  # the textbook's pair, of the mean micro-batch
        large = jnp.sum(jnp.square(jnp.average(gradients, axis=0, weights=weights)))
        size, total = np.mean(weights), np.sum(weights)
        textbook = (total * large - size * small) / (total - size), (small - large) / (1 / size - 1 / total)
        return state, (found["accumulate/noise_trace"], found["accumulate/signal_squared"], *textbook)

    # Many windows take longer to run than to compile, so they get LLVM's optimizations.
    jit = users_jit if windows > 1000 else quick_jit
    _, found = jit(partial(jax.lax.scan, window))(tx.init(np.zeros(dimensions, np.float32)), noise)
    return [np.float64(x) for x in found], np.sum(covariance), np.sum(mean**2)


def test_estimates_are_unbiased_for_uneven_weights_and_the_textbooks_are_not():
    (trace, signal, textbook_signal, textbook_trace), true_trace, true_signal = simulated(20_000)
    for found, true in ((trace, true_trace), (signal, true_signal)):
        assert abs(found.mean() - true) <= 4 * found.std() / np.sqrt(len(found))
    assert textbook_trace.mean() > 1.5 * true_trace
    assert textbook_signal.mean() < 0


def test_for_equal_weights_they_are_those_of_mccandlish():
    (trace, signal, textbook_signal, textbook_trace), _, _ = simulated(50, weights=np.float32([3] * 8))
    np.testing.assert_allclose(trace, textbook_trace, rtol=1e-4)
    np.testing.assert_allclose(signal, textbook_signal, rtol=1e-4, atol=1e-4 * np.max(textbook_trace) / 24)


@pytest.mark.parametrize("reduction", ["mean", "sum_over_weights", "sum"])
def test_estimates_of_a_window_are_the_definitions(reduction):
    rng, weights = np.random.default_rng(2), WEIGHTS / 64  # below 1 together
    gradients = np.float32(rng.normal(size=(8, 5)) + 1)
    given = gradients if reduction == "mean" else gradients * weights[:, None]  # of a summed loss
    state, _ = through(shrewjax.accumulate(KEEP, 8, reduction=reduction, noise_decay=0.5), given, weights)
    exact = spec.noise_spec(
        [([Fraction(float(x)) for x in g], Fraction(float(w))) for g, w in zip(gradients, weights, strict=True)]
    )
    np.testing.assert_allclose(estimates(state), [float(x) for x in exact], rtol=2e-6)


def test_per_example_gradients_give_the_sample_covariance():
    gradients = np.float32(np.random.default_rng(3).normal(size=(16, 4)) * [1, 2, 3, 4])
    state, _ = through(shrewjax.accumulate(KEEP, 16, noise_decay=0.9), gradients, np.ones(16, np.float32))
    trace, signal = estimates(state)
    covariance = np.cov(gradients.astype(np.float64), rowvar=False)
    assert trace == pytest.approx(np.trace(covariance), rel=1e-5)
    mean = gradients.astype(np.float64).mean(0)
    assert signal == pytest.approx(mean @ mean - np.trace(covariance) / 16, rel=1e-5)


def test_averages_over_windows_have_exponential_weights_corrected_for_their_start():
    gradients = np.float32(np.random.default_rng(4).normal(size=(10, 3)))
    tx = shrewjax.accumulate(KEEP, 2, noise_decay=0.75)
    state, _ = through(tx, gradients, np.ones(10, np.float32))
    pairs = [spec.noise_spec([(g, 1), (h, 1)]) for g, h in gradients.astype(np.float64).reshape(5, 2, 3)]
    share = 0.75 ** np.arange(4, -1, -1)
    expected = share @ np.array(pairs) / share.sum()
    np.testing.assert_allclose(estimates(state), expected, rtol=1e-5)
    found = shrewjax.metrics(state)
    assert float(found["accumulate/noise_scale"]) == pytest.approx(expected[0] / expected[1], rel=1e-5)


OF_TWO = shrewjax.accumulate(KEEP, 2, noise_decay=0.9)


@pytest.mark.parametrize("scale", [1e20, 1e-20, 1e36, 1e-36])
def test_norms_of_any_range_have_the_noise_scale_of_those_around_one(scale):
    gradients = np.float32([[3, 1], [1, 2], [2, 2], [2, 0]])
    state, _ = through(OF_TWO, gradients * np.float32(scale), np.ones(4, np.float32))
    # the first window has S = 2.5 and G2 = 5, the second 2 and 4
    assert float(shrewjax.metrics(state)["accumulate/noise_scale"]) == pytest.approx(0.5, rel=1e-5)


def test_windows_that_say_nothing_do_not_enter():
    gradients = np.float32([[1, 2], [3, 4]])
    tx = shrewjax.accumulate(KEEP, 2, noise_decay=0.9, nonfinite="drop_micro_batch")
    update, first = compiled(tx).update, tx.init(np.zeros(2, np.float32))
    for gradient in gradients:
        _, first = update(gradient, first, weight=1)
    for spoilt, weights in (
        (np.float32([[np.nan, 1], [5, 5]]), [1, 1]),  # one micro-batch is left
        (gradients, [0, 7]),
        (gradients, [0, 0]),
    ):
        state = first
        for gradient, weight in zip(spoilt, weights, strict=True):
            _, state = update(gradient, state, weight=weight)
        for field in ("recorded", "noise_trace", "signal", "exponent"):
            assert bits(getattr(state.noise, field)) == bits(getattr(first.noise, field)), (field, weights)


@pytest.mark.parametrize("reduction", ["mean", *thorough("sum_over_weights", "sum")])
def test_a_gradient_without_examples_does_not_enter(reduction):
    """As of a micro-batch of negatives alone, whose weight is the least that there is."""
    tx = shrewjax.accumulate(KEEP, 3, noise_decay=0.9, reduction=reduction)
    gradients, weights = np.float32([[1, 2], [30, 40], [3, 4]]), [2.0, 2.0**-30, 3.0]
    update, state = compiled(tx).update, tx.init(np.zeros(2, np.float32))
    for gradient, weight in zip(gradients, weights, strict=True):
        _, state = update(gradient, state, weight=weight)
    factor = {"mean": lambda w: w}.get(reduction, lambda w: 1 / w)
    expected = 5 * factor(2.0) + 25 * factor(3.0)
    assert float(state.noise.square_sums[0]) == pytest.approx(expected, rel=1e-6)
    assert int(state.noise.kept) == 2


def test_without_noise_decay_nothing_is_kept_or_computed():
    tx = shrewjax.accumulate(KEEP, 2)
    assert tx.init(jnp.zeros(3)).noise == ()

    def program(tx):
        return str(jax.make_jaxpr(tx.update)(jnp.ones(3), tx.init(jnp.zeros(3))))

    assert "sqrt" not in program(tx)
    assert "sqrt" in program(shrewjax.accumulate(KEEP, 2, noise_decay=0.9))


@pytest.mark.parametrize("decay", [1.0, -0.1, np.nan])
def test_bad_decay_is_named(decay):
    with pytest.raises(ValueError, match="noise_decay must be"):
        shrewjax.accumulate(KEEP, 2, noise_decay=decay)


# --- on many devices ------------------------------------------------------------------------------------------------


ROWS = np.float32(np.random.default_rng(5).normal(size=(2, 8, 3)))
ROW_WEIGHTS = np.float32(np.random.default_rng(6).integers(1, 5, size=(2, 8)))
ROW_VALUES = np.float32(np.random.default_rng(7).normal(size=(2, 8)))


OVER_DEVICES = shrewjax.accumulate(KEEP, 2, sum_over="data", noise_decay=0.9)


def started(tx, devices=8):
    """A state whose leaves all have a sharding, as those of later states, and the update that keeps it: one program."""
    mesh = mesh_of(data=devices)
    state = tx.init(placed(np.zeros(3, np.float32), mesh, P()))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), shrewjax.state_specs(state))
    return jax.device_put(state, shardings), quick_jit(tx.update, out_shardings=(None, shardings))


@cache
def after_rows():
    """The states after one micro-step and after two."""
    state, update = started(OVER_DEVICES)
    states = []
    for gradients, weights, values in zip(ROWS, ROW_WEIGHTS, ROW_VALUES, strict=True):
        _, state = update(gradients, state, weight=weights, value=values)
        states.append(state)
    return states


@cache
def alone():
    """The state of one device after as many micro-batches as the devices have."""
    tx = shrewjax.accumulate(KEEP, 16, noise_decay=0.9)
    return through(tx, ROWS.reshape(16, 3), ROW_WEIGHTS.ravel(), ROW_VALUES.ravel())[0]


def test_eight_devices_measure_as_one_with_all_micro_batches_in_one_all_reduce():
    tx = OVER_DEVICES
    state, _ = started(tx)
    specs = shrewjax.state_specs(state)

    @users_jit
    @partial(jax.shard_map, mesh=mesh_of(data=8), in_specs=(specs, P("data"), P("data"), P("data")), out_specs=specs)
    def call(state, gradient, weight, value):
        grads = jax.grad(lambda p: p @ gradient[0])(own_params(jnp.zeros(3), "data"))
        return tx.update(grads, state, weight=weight[0], value=value[0])[1]

    program = call.lower(state, ROWS[0], ROW_WEIGHTS[0], ROW_VALUES[0]).compile()
    for batch in zip(ROWS, ROW_WEIGHTS, ROW_VALUES, strict=True):
        state = program(state, *batch)
    text = program.as_text()
    assert text.count(" all-reduce(") + text.count(" all-reduce-start(") == 1
    np.testing.assert_allclose(estimates(state), estimates(alone()), rtol=1e-5)
    assert float(state.loss) == pytest.approx(np.average(ROW_VALUES, weights=ROW_WEIGHTS), rel=1e-6)


def test_rows_under_plain_jit_measure_as_devices_do():
    _, state = after_rows()
    np.testing.assert_allclose(estimates(state), estimates(alone()), rtol=1e-5)
    assert float(state.loss) == pytest.approx(np.average(ROW_VALUES, weights=ROW_WEIGHTS), rel=1e-6)


def test_saved_open_window_with_noise_goes_on_on_another_number_of_devices(tmp_path):
    state, expected = after_rows()
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", state)
    # what eight devices would add in one micro-step, from four in two
    like, update = started(shrewjax.accumulate(KEEP, 3, sum_over="data", noise_decay=0.9), 4)
    moved = shrewjax.redistribute(restored, like)
    for rows in (slice(0, 4), slice(4, 8)):
        gradients, weights, values = ROWS[1][rows], ROW_WEIGHTS[1][rows], ROW_VALUES[1][rows]
        _, moved = update(gradients, moved, weight=weights, value=values)
    assert int(moved.windows) == 1
    np.testing.assert_allclose(estimates(moved), estimates(expected), rtol=1e-5)
    assert float(moved.loss) == pytest.approx(float(expected.loss), rel=1e-6)


# --- recipes --------------------------------------------------------------------------------------------------------


def test_window_closed_by_a_token_budget_runs_when_the_tokens_are_there():
    tx, budget = shrewjax.accumulate(optax.sgd(1.0), 2**20), 10
    params = jnp.zeros(1)
    state, closed = tx.init(params), []
    for tokens in (4, 3, 5, 9, 2, 1):
        _, state = tx.update(jnp.ones(1), state, params, weight=tokens, flush=state.sum_of_weights + tokens >= budget)
        closed.append(bool(state.applied))
    assert closed == [False, False, True, False, True, False]


def long_enough(noise_scale, state, least=2, most=6):
    """Whether this call should close: the window is as long as the noise of closed windows asks for, within bounds."""
    wanted = jnp.clip(jnp.where(jnp.isfinite(noise_scale) & (noise_scale > 0), noise_scale, least), least, most)
    return state.micro_step.astype(jnp.float32) + 1 >= wanted


def test_closing_by_the_noise_of_closed_windows_is_unbiased_and_by_the_open_one_is_not():
    """Scalar gradients 1 + noise. The control closes a window once its own gradients look alike."""
    tx = shrewjax.accumulate(KEEP, 6, noise_decay=0.9)

    def call(carry, noise, looks_inside):
        state, seen = carry
        gradient = 1 + 2 * noise[None]
        scale = shrewjax.metrics(state)["accumulate/noise_scale"]
        seen = jnp.where(state.micro_step == 0, gradient, seen + gradient)
        closes = (seen[0] > 3) if looks_inside else long_enough(scale, state)
        updates, state = tx.update(gradient, state, flush=closes)
        return (state, seen), (updates[0], state.applied)

    noise = np.random.default_rng(0).standard_normal(40_000, np.float32)
    for looks_inside in (False, True):
        start = tx.init(jnp.zeros(1)), jnp.zeros(1)
        run = quick_jit(partial(jax.lax.scan, partial(call, looks_inside=looks_inside)))
        _, (averages, applied) = run(start, noise)
        closed = np.float64(averages)[np.asarray(applied)]
        bias = abs(closed.mean() - 1) / (closed.std() / np.sqrt(len(closed)))
        assert len(closed) > 6_000
        assert bias > 20 if looks_inside else bias < 4


def test_seeds_on_an_explicit_mesh_need_no_set_mesh():
    """The oracle is one seed after the other, without a mesh."""
    if jax.version.__version_info__ < (0, 10):
        pytest.skip("JAX cannot select there")
    tx = shrewjax.accumulate(optax.sgd(1.0), 2, noise_decay=0.9)

    def run(grads):
        state = tx.init(grads)
        for scale in (1.0, 3.0):
            _, state = tx.update(scale * grads, state, grads)
        return shrewjax.metrics(state)["accumulate/noise_trace"]

    grads = jnp.arange(24.0).reshape(8, 3)
    found = quick_jit(jax.vmap(run))(placed(grads, mesh_of("Explicit", d=8), P("d")))
    np.testing.assert_allclose(found, [quick_jit(run)(x) for x in grads], rtol=1e-6)
