"""Calls that once gave a wrong result in silence: each is an error that names the remedy, or gives what it says."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, quick_jit

import shrewjax

PARAMS = {"w": jnp.zeros(3)}
GRADS = {"w": jnp.ones(3)}
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 3)).astype(np.float32), RNG.normal(size=8).astype(np.float32)
WEIGHTS = {"w": jnp.asarray([0.5, -1.0, 2.0])}


def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] - y) ** 2)


# --- extra arguments of update ----------------------------------------------------------------------------------


def with_extra(record):
    """An optimizer that writes down its extra arguments, and declares `values` as one of its own."""

    def update(updates, state, params=None, *, values=None, **extra_args):
        record.update(extra_args, values=values)
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def calls_of(tx, params=PARAMS):
    state = tx.init(params)
    return {
        "update": lambda **extra: tx.update(GRADS, state, params, **extra),
        "apply_gradients": lambda **extra: shrewjax.apply_gradients(tx, GRADS, state, params, **extra),
        "flush": lambda **extra: shrewjax.flush(tx, state, params, **extra),
    }


@pytest.mark.parametrize("call", ["update", "apply_gradients", "flush"])
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("weights", "weight"),
        ("wieght", "weight"),
        ("flsuh", "flush"),
        ("values", "value"),
        ("valeu", "value"),
        ("grads", "grad"),
    ],
)
def test_near_miss_of_an_argument_is_an_error_that_names_the_one_meant(call, name, meant):
    calls = calls_of(shrewjax.accumulate(optax.sgd(1.0), 2))
    if (call, name) == ("apply_gradients", "grads"):
        pytest.skip("grads is an argument of apply_gradients")
    with pytest.raises(ValueError, match=rf"^{name}= is no argument of accumulate, and near {meant}=\. Pass {meant}="):
        calls[call](**{name: 1.0})


@pytest.mark.parametrize(
    "wrap",
    [lambda tx: optax.chain(optax.identity(), tx), shrewjax.skip_nonfinite],
    ids=["chain", "guard"],
)
def test_near_miss_is_found_when_accumulate_is_inside_another_transformation(wrap):
    tx = wrap(shrewjax.accumulate(optax.sgd(1.0), 2))
    with pytest.raises(ValueError, match=r"^weights= is no argument"):
        tx.update(GRADS, tx.init(PARAMS), PARAMS, weights=3)


def test_extra_arguments_of_an_inner_optimizer_pass_also_if_they_are_near_ones_that_it_declares():
    record = {}
    tx = shrewjax.accumulate(with_extra(record), 1)
    given = {"value_fn": 1, "grad_fn": 2, "batch_size": 3, "loss": 4, "params_ema": 5, "key": 6, "values": 7}
    calls_of(tx)["update"](**given)
    assert record == given


@pytest.mark.parametrize("extra", [{"weight": 3}, {"flush": True}, {"weight": jnp.ones(())}], ids=repr)
@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.adam(1e-3),
        lambda: optax.chain(shrewjax.clip_by_global_norm(1.0), optax.adam(1e-3)),
        lambda: shrewjax.skip_nonfinite(optax.adam(1e-3)),
    ],
    ids=["Optax alone", "a chain that takes any argument", "a guard"],
)
def test_apply_gradients_with_a_weight_or_a_flush_but_no_window_is_an_error(make, extra):
    call = calls_of(make())["apply_gradients"]
    (name,) = extra
    with pytest.raises(ValueError, match=rf"^{name}= needs a window, and opt_state has none\. Wrap .* in accumulate"):
        call(**extra)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: tx,
        lambda tx: optax.chain(optax.identity(), tx),
        lambda tx: optax.masked(tx, {"w": True}),
        shrewjax.skip_nonfinite,
        lambda tx: optax.partition({"a": tx}, {"w": "a"}),
    ],
    ids=["alone", "chain", "masked", "guard", "partition"],
)
def test_apply_gradients_passes_the_weight_to_an_accumulation_at_any_depth(wrap):
    call = calls_of(wrap(shrewjax.accumulate(optax.sgd(1.0), 2)))["apply_gradients"]
    _, state = call(weight=3)
    assert float(shrewjax.metrics(state)["accumulate/weight_sum"]) == 3


def test_apply_gradients_passes_a_weight_that_an_optimizer_declares_itself():
    seen = []

    def update(updates, state, params=None, *, weight=1, **extra_args):
        seen.append(weight)
        return updates, state

    tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    shrewjax.apply_gradients(tx, GRADS, tx.init(PARAMS), PARAMS, weight=3)
    assert seen == [3]


# --- metrics of something that is no state ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [lambda: shrewjax.clip_by_global_norm(1.0), lambda: optax.adam(1e-3), lambda: optax.MultiSteps(optax.sgd(1.0), 2)],
    ids=["ours", "Optax's", "MultiSteps"],
)
def test_metrics_of_a_transformation_is_an_error(make):
    with pytest.raises(ValueError, match=r"^opt_state must be a state.* got a transformation\. Pass the state"):
        shrewjax.metrics(make())


@pytest.mark.parametrize("state", [(), None, {}, optax.adam(1e-3).init(PARAMS), jnp.zeros(3)], ids=lambda s: type(s))
def test_metrics_of_a_state_without_measurements_is_empty(state):
    assert shrewjax.metrics(state) == {}


# --- percentiles and weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule", [shrewjax.clip_by_norm_percentile, shrewjax.clip_by_percentile], ids=lambda f: f.__name__
)
def test_percentile_rules_say_90_and_not_09_in_their_first_lines(rule):
    assert "90, not 0.9" in " ".join(rule.__doc__.split("\n\n")[2].split())


@pytest.mark.parametrize("weight", [True, np.True_, jnp.asarray(True), np.asarray(True)], ids=repr)
@pytest.mark.parametrize("negated", [False, True])
def test_boolean_weight_is_one_or_zero(weight, negated):
    weight = (not weight) if isinstance(weight, bool) else (weight ^ True if negated else weight)
    tx, window = shrewjax.accumulate(optax.sgd(1.0), 2), shrewjax.GradAccumulator(2)
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS, weight=weight)
    assert float(state.weight_sum) == float(weight)
    assert float(window.step(window.init(PARAMS), GRADS, weight)[1].weight_sum) == float(weight)
    shrewjax.check_window(state, 2, weight=weight)


def test_boolean_weights_of_micro_batches_leave_out_those_that_are_false():
    real = np.asarray([True, False, True, True, True, False, True, True])

    def weight(params, x, y, real):
        return real[0]

    def loss(params, x, y, real):
        return loss_fn(params, x, y), {"mean": x[0, 0], "kept": jnp.ones((), jnp.int32)}

    step = shrewjax.value_and_grad(loss, 8, has_aux=True, weight=weight, aux={"mean": "mean", "kept": "sum"})
    (value, aux), grads = quick_jit(step)(WEIGHTS, X, Y, real)
    expected = quick_jit(jax.value_and_grad(loss_fn))(WEIGHTS, X[real], Y[real])
    assert_close((value, grads), expected, rtol=1e-5)
    assert int(aux["kept"]) == 6
    assert float(aux["mean"]) == pytest.approx(float(np.mean(X[real, 0])), rel=1e-5)


def test_boolean_weights_of_devices_count_as_zero_or_one():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    params = jax.device_put(PARAMS, jax.sharding.NamedSharding(mesh, jax.P()))
    tx = shrewjax.accumulate(optax.sgd(1.0), 2, sum_over="data")
    rows = {"w": jnp.ones((8, 3))}
    _, state = tx.update(rows, tx.init(params), params, weight=np.arange(8) % 2 == 0)
    assert state.weight_sum.tolist() == [1, 0] * 4
