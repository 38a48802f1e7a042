"""The window: what inner sees, when, and what each micro-batch may do to it."""

import copy
import inspect
import itertools
import pickle
import pydoc_data.topics
import re
import subprocess
import sys
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, bits, compiled, lenient, quick_jit, tree_of, users_jit

import shrewjax

POLICIES = ["propagate", "drop_microbatch", "drop_window", "extend_window"]


def recorder():
    """An optimizer whose updates are what it was given, and which counts its runs."""
    return optax.GradientTransformation(
        lambda params: {"runs": jnp.zeros((), jnp.int32)}, lambda g, s, params=None: (g, {"runs": s["runs"] + 1})
    )


def run(tx, steps, params):
    """Feeds (gradient, keyword arguments) pairs to a jitted update; returns the updates and states."""
    return run_compiled(compiled(tx), steps, params)


def run_compiled(tx, steps, params):
    state, history = tx.init(params), []
    for gradient, kwargs in steps:
        updates, state = tx.update(gradient, state, params, **kwargs)
        history.append((updates, state))
    return history


@cache
def recording_window(accum_steps, **rules):
    """A window around the recorder, compiled once for all tests and each kind of argument."""
    return compiled(shrewjax.accumulate(recorder(), accum_steps, **rules))


def vector(*values):
    return jnp.asarray(values, jnp.float32)


# --- against Optax ----------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
    "adamw": lambda: optax.adamw(0.01),
    "lion": lambda: optax.lion(0.01),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=2),
}


@pytest.mark.parametrize("k", [1, 2, 3, 8])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trajectory_is_that_of_multisteps(name, k):
    params = tree_of()

    def trajectory(tx):
        update, p, state = quick_jit(lenient(tx).update), params, tx.init(params)
        for i in range(17):
            updates, state = update(tree_of(i + 1), state, p)
            p = optax.apply_updates(p, updates)
            yield p

    theirs = optax.MultiSteps(OPTIMIZERS[name](), k)
    ours = shrewjax.accumulate(lenient(OPTIMIZERS[name]()), k)
    for step, (a, b) in enumerate(zip(trajectory(ours), trajectory(theirs), strict=True)):
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            assert float(jnp.linalg.norm(x - y)) <= 1e-6 * float(jnp.linalg.norm(y)), f"step {step}"


def test_window_of_one_is_inner_itself():
    params, inner = tree_of(), lenient(optax.adam(0.1))
    tx = shrewjax.accumulate(inner, 1)
    state, plain = tx.init(params), inner.init(params)
    update, plain_update = quick_jit(tx.update), quick_jit(inner.update)
    for i in range(5):
        updates, state = update(tree_of(i), state, params)
        expected, plain = plain_update(tree_of(i), plain, params)
        assert_close(updates, expected, rtol=1e-6)
        assert bool(state.applied)
        assert int(state.windows) == i + 1


# --- what inner sees, and when ----------------------------------------------------------------------------------


def test_inner_runs_once_a_window():
    runs = []

    def update(g, s, params=None):
        jax.debug.callback(lambda: runs.append(1))
        return g, s

    tx = shrewjax.accumulate(optax.GradientTransformation(lambda params: (), update), 4)
    run(tx, [(vector(1.0), {})] * 8, vector(0.0))
    jax.effects_barrier()
    assert len(runs) == 2


def test_inner_and_its_counters_rest_until_the_window_closes():
    params = vector(1.0, 2.0)
    tx = shrewjax.accumulate(lenient(optax.adam(optax.linear_schedule(0.1, 0.0, 10))), 3)
    before = tx.init(params)
    for i, (updates, state) in enumerate(run(tx, [(vector(1.0, -2.0), {})] * 6, params)):
        closing = i % 3 == 2
        assert bool(state.applied) == closing
        assert int(state.micro_step) == (i + 1) % 3
        assert int(state.windows) == (i + 1) // 3
        assert (bits(state.inner_state) == bits(before.inner_state)) != closing
        assert (bits(updates) == bits(jnp.zeros(2))) != closing
        before = state


def test_average_reaches_inner_in_the_gradients_dtype_and_is_summed_in_float32():
    params = jnp.zeros(3, jnp.bfloat16)
    rng = np.random.default_rng(0)
    grads = [jnp.asarray(rng.normal(size=3), jnp.bfloat16) for _ in range(64)]
    updates, state = run(shrewjax.accumulate(recorder(), 64), [(g, {}) for g in grads], params)[-1]
    exact = np.mean([np.float64(g) for g in grads], axis=0)
    assert updates.dtype == jnp.bfloat16
    assert state.gradient_sum.dtype == jnp.float32
    np.testing.assert_allclose(state.gradient_sum, exact, rtol=1e-6)
    assert bits(updates) == bits(jnp.asarray(state.gradient_sum, jnp.bfloat16))


@pytest.mark.parametrize(
    ("param", "explicit", "expected"),
    [
        ("float16", None, "float32"),
        ("bfloat16", None, "float32"),
        ("float32", None, "float32"),
        ("complex64", None, "complex64"),
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", jnp.float16, "float16"),
    ],
)
def test_dtype_of_the_accumulator(param, explicit, expected):
    tx = shrewjax.accumulate(optax.identity(), 2, accumulator_dtype=explicit)
    assert tx.init(jnp.zeros(2, param)).gradient_sum.dtype == expected


def test_float64_and_complex128_accumulate_in_their_own():
    with jax.enable_x64(True):
        params = {"r": jnp.zeros(1, jnp.float64), "c": jnp.zeros(1, jnp.complex128), "s": jnp.zeros(1, jnp.float32)}
        tx = shrewjax.accumulate(recorder(), 3)
        state = tx.init(params)
        assert {k: v.dtype for k, v in state.gradient_sum.items()} == {
            "r": "float64",
            "c": "complex128",
            "s": "float32",
        }
        grads = {"r": jnp.ones(1), "c": jnp.full(1, 1 + 1j), "s": jnp.ones(1, jnp.float32)}
        steps = [(jax.tree.map(lambda g, i=i: g * i, grads), {"weight": 0.1}) for i in (1, 2, 4)]
        updates, _ = run(tx, steps, params)[-1]
        np.testing.assert_allclose(updates["r"], 7 / 3, rtol=1e-15)
        np.testing.assert_allclose(updates["c"], (1 + 1j) * 7 / 3, rtol=1e-15)


def test_what_holds_no_floats_holds_no_sum_and_gets_zero_updates():
    params = {"x": vector(1.0), "i": jnp.arange(3), "flag": jnp.ones(2, bool), "n": None, "m": optax.MaskedNode()}
    grads = {**params, "i": jnp.ones(3, jnp.int32)}
    tx = shrewjax.accumulate(
        optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (jax.tree.map(lambda x: x, g), s)), 2
    )
    history = run(tx, [(grads, {})] * 2, params)
    for updates, state in history:
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        np.testing.assert_array_equal(updates["i"], [0, 0, 0])
        np.testing.assert_array_equal(updates["flag"], [False, False])
        assert (state.gradient_sum["i"].shape, state.gradient_sum["i"].dtype) == ((), jnp.int32)
    assert float(history[-1][0]["x"][0]) == 1


def test_float0_gradients_of_integer_parameters_get_zero_updates():
    params = {"x": vector(1.0), "i": jnp.arange(3)}
    grads = {"x": vector(4.0), "i": np.zeros(3, jax.dtypes.float0)}
    tx = shrewjax.accumulate(optax.identity(), 2)
    state = tx.init(params)
    for expected in (0, 4):
        updates, state = tx.update(grads, state, params)
        assert updates["i"].dtype == jax.dtypes.float0
        assert float(updates["x"][0]) == expected


@pytest.mark.parametrize(
    "gradient", [jax.random.key(1), None, np.zeros((), jax.dtypes.float0)], ids=["key", "None", "float0"]
)
def test_key_among_parameters_holds_no_sum_and_gets_a_zero_update(gradient):
    params = {"x": vector(1.0), "key": jax.random.key(1)}
    tx = shrewjax.accumulate(optax.identity(), 2)
    state = tx.init(params)
    for expected in (0, 4):
        updates, state = tx.update({"x": vector(4.0), "key": gradient}, state, params)
        assert float(updates["x"][0]) == expected
        assert updates["key"].dtype == (params["key"] if gradient is None else gradient).dtype


@pytest.mark.parametrize(
    "wrap",
    [optax.with_extra_args_support, partial(shrewjax.accumulate, accum_steps=2), shrewjax.skip_nonfinite],
    ids=["Optax", "accumulate", "guard"],
)
def test_apply_gradients_leaves_parameters_to_which_nothing_can_be_added(wrap):
    params = {"x": vector(1.0), "i": jnp.arange(3), "key": jax.random.key(1)}
    grads = {"x": vector(4.0), "i": np.zeros(3, jax.dtypes.float0), "key": jax.random.key(2)}
    tx = wrap(optax.identity())
    state, step = tx.init(params), quick_jit(lambda state, params: shrewjax.apply_gradients(tx, grads, state, params))
    new_params = params
    for _ in range(2):
        new_params, state = step(state, new_params)
    assert float(new_params["x"][0]) > 1
    np.testing.assert_array_equal(new_params["i"], params["i"])
    assert new_params["key"] == params["key"]


def test_keys_among_gradients_pass_through_guards_around_an_accumulation():
    params = {"x": vector(1.0), "key": jax.random.key(1)}
    tx = shrewjax.skip_nonfinite(shrewjax.accumulate(optax.identity(), 1), max_consecutive=1, at_limit="zero_nonfinite")
    updates, _ = tx.update({"x": vector(np.nan), "key": params["key"]}, tx.init(params), params)
    assert float(updates["x"][0]) == 0
    assert updates["key"].dtype == params["key"].dtype


NOT_FLOATING = {"int32": jnp.int32(1), "bool": jnp.ones((), bool), "key": jax.random.key(0)}


@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
@pytest.mark.parametrize("dtype", NOT_FLOATING)
def test_gradient_that_is_not_floating_for_a_parameter_that_is_is_an_error_that_names_both(dtype, shape):
    params = {"w": jnp.ones(shape)}
    grads = {"w": jnp.broadcast_to(NOT_FLOATING[dtype], shape)}
    window, tx = shrewjax.GradAccumulator(2), shrewjax.accumulate(optax.identity(), 2)
    message = rf"\['w'\] is {re.escape(str(grads['w'].dtype))}.*floating.*float32"
    for call in (
        lambda: tx.update(grads, tx.init(params), params),
        lambda: tx.update(grads, tx.init(params)),
        lambda: window.add(window.init(params), grads),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("shape", [(), (2,)], ids=["scalar", "vector"])
def test_floating_gradient_for_an_integer_parameter_is_an_error_that_names_it(shape):
    tx = shrewjax.accumulate(optax.identity(), 2)
    with pytest.raises(ValueError, match=r"\['i'\] is float32, but its parameter is not floating"):
        tx.update({"i": jnp.ones(shape)}, tx.init({"i": jnp.ones(shape, jnp.int32)}))


def test_python_numbers_are_parameters_and_gradients_as_in_optax():
    params, grads = {"a": 1.0, "b": 2}, [{"a": 2.0, "b": 0}, {"a": 4.0, "b": 0}]
    tx = shrewjax.accumulate(optax.sgd(1.0), 2)
    state = tx.init(params)
    for g, expected in zip(grads, (1.0, -2.0), strict=True):
        params, state = shrewjax.apply_gradients(tx, g, state, params)
        assert float(params["a"]) == expected
    window = shrewjax.GradAccumulator(2)
    average, state = window.step(window.init({"a": 1.0}), {"a": 2.0})
    assert average is None
    assert float(window.step(state, {"a": 4.0})[0]["a"]) == 3


def test_float64_numpy_leaves_without_x64_are_float32_without_a_warning():
    params = {"w": np.ones(2), "c": np.ones(2, np.complex128), "i": np.arange(2)}
    tx = shrewjax.accumulate(optax.identity(), 2)
    _, state = tx.update(params, tx.init(params), params)
    updates, _ = tx.update(params, state, params)
    np.testing.assert_array_equal(updates["w"], [1, 1])
    assert (updates["w"].dtype, updates["c"].dtype) == (jnp.float32, jnp.complex64)
    assert shrewjax.flush(tx, state, params)[0]["w"].dtype == jnp.float32


def test_real_gradient_that_closes_a_complex_window_leaves_the_average_complex():
    params = jnp.zeros(1, jnp.complex64)
    tx = shrewjax.accumulate(recorder(), 2)
    _, state = tx.update(jnp.asarray([2 + 2j], jnp.complex64), tx.init(params), params)
    updates, _ = tx.update(vector(4.0), state, params)
    np.testing.assert_array_equal(updates, [3 + 1j])


def test_missing_gradient_adds_zero():
    params = {"a": vector(0.0), "b": vector(0.0)}
    tx = shrewjax.accumulate(recorder(), 2)
    steps = [({"a": vector(2.0), "b": None}, {}), ({"a": vector(4.0), "b": vector(6.0)}, {})]
    assert_close(run(tx, steps, params)[-1][0], {"a": [3.0], "b": [3.0]}, rtol=1e-7)
    steps = [({"a": vector(2.0), "b": None}, {})] * 2
    assert_close(run(tx, steps, params)[-1][0], {"a": [2.0], "b": [0.0]}, rtol=0)


# --- weights and reductions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum_over_weights", "sum"])
@pytest.mark.parametrize("weights", [[1, 1, 1], [512, 37, 460], [0.3, 0.1, 0.2], [1, 0, 2], [1e-6, 1e6, 1]])
def test_window_is_the_weighted_reduction(reduction, weights):
    grads = [vector(1.0, -2.0), vector(3.0, 0.5), vector(-1.0, 8.0)]
    g, w = np.float64(grads), np.float64(weights)[:, None]
    expected = {
        "mean": (w * g).sum(0) / w.sum(),
        "sum_over_weights": (g * (w != 0)).sum(0) / w.sum(),
        "sum": (g * (w != 0)).sum(0),
    }[reduction]
    tx = recording_window(3, reduction=reduction)
    for cast in (float, jnp.float32, jnp.bfloat16, np.float64):
        if cast is jnp.bfloat16 and weights[0] == 512:
            continue  # 460 and 37 need more than its eight bits
        steps = [(x, {"weight": cast(v)}) for x, v in zip(grads, weights, strict=True)]
        updates, state = run_compiled(tx, steps, vector(0.0, 0.0))[-1]
        rtol = 1e-2 if cast is jnp.bfloat16 else 1e-6
        np.testing.assert_allclose(updates, expected, rtol=rtol, err_msg=f"weights are {cast}")
        assert bool(state.applied), cast


@pytest.mark.parametrize("weights", [(1, 3), (2, 1), (0.5, 1.0)])
def test_weights_known_at_trace_time_count_as_others_do(weights):
    tx = shrewjax.accumulate(recorder(), 2)
    state = tx.init(vector(0.0))
    for value, weight in zip((4.0, 1.0), weights, strict=True):
        updates, state = tx.update(vector(value), state, weight=weight)
    assert float(updates[0]) == pytest.approx((4 * weights[0] + weights[1]) / sum(weights), rel=1e-6)


def test_weights_make_uneven_micro_batches_equal_to_the_large_batch():
    rng = np.random.default_rng(0)
    x, y, w = rng.normal(size=(100, 4)), rng.normal(size=100), rng.normal(size=4)

    def gradient(w, x, y):  # of the mean of (x @ w - y) ** 2
        return 2 * x.T @ (x @ w - y) / len(y)

    with jax.enable_x64(True):
        cuts = [0, 3, 40, 41, 100]
        steps = [(gradient(w, x[a:b], y[a:b]), {"weight": b - a}) for a, b in itertools.pairwise(cuts)]
        weighted, _ = run(shrewjax.accumulate(recorder(), 4), steps, jnp.asarray(w))[-1]
        unweighted, _ = run(shrewjax.accumulate(recorder(), 4), [(g, {}) for g, _ in steps], jnp.asarray(w))[-1]
        whole = gradient(w, x, y)
        np.testing.assert_allclose(weighted, whole, rtol=1e-12)
        assert np.abs(unweighted - whole).max() > 0.1 * np.abs(whole).max()  # the mean of means is another thing


@pytest.mark.parametrize("reduction", ["mean", "sum_over_weights", "sum"])
@pytest.mark.parametrize("nonfinite", POLICIES)
@pytest.mark.parametrize("weight", [0, 0.0, jnp.float32(0), jnp.int32(0)], ids=lambda w: type(w).__name__)
def test_micro_batch_of_weight_zero_contributes_nothing_whatever_it_holds(reduction, nonfinite, weight):
    tx = recording_window(3, reduction=reduction, nonfinite=nonfinite)
    padded = (vector(np.nan, np.inf), {"weight": weight})
    for place in range(3):
        steps = [(vector(2.0, 4.0), {"weight": 1}), (vector(6.0, 8.0), {"weight": 1})]
        steps.insert(place, padded)
        updates, state = run_compiled(tx, steps, vector(0.0, 0.0))[-1]
        expected = [8, 12] if reduction == "sum" else [4, 6]
        np.testing.assert_allclose(updates, expected, rtol=1e-6, err_msg=f"at {place}")
        assert (int(state.dropped), int(state.windows)) == (0, 1), place


@pytest.mark.parametrize("reduction", ["mean", "sum_over_weights", "sum"])
def test_window_of_weight_zero_does_not_run_inner(reduction):
    steps = [(vector(np.nan), {"weight": 0})] * 2 + [(vector(3.0), {})] * 2
    history = run_compiled(recording_window(2, reduction=reduction), steps, vector(0.0))
    updates, state = history[1]
    assert (float(updates[0]), bool(state.applied), int(state.windows), int(state.micro_step)) == (0, False, 0, 0)
    updates, state = history[3]
    assert (float(updates[0]), int(state.windows)) == (6 if reduction == "sum" else 3, 1)


OUT_OF_RANGE = {
    "sum beyond the reciprocals": ([3e38], 1.0),
    "sum and products too large": ([1e38, 1e38], 10.0),
    "products too small": ([1e-30], 1e-10),
    "sum too small": ([2.0**-32] * 3, 1.0),
    "negative sum": ([1.0, -2.0], 1.0),
    "infinite": ([np.inf], 1.0),
}


@pytest.mark.parametrize("reduction", ["mean", "sum_over_weights"])
@pytest.mark.parametrize("case", OUT_OF_RANGE)
def test_traced_weights_whose_sum_is_out_of_range_make_the_average_nan(case, reduction):
    weights, gradient = OUT_OF_RANGE[case]
    tx = recording_window(len(weights), reduction=reduction)
    steps = [(vector(gradient), {"weight": jnp.float32(w)}) for w in weights]
    updates, state = run_compiled(tx, steps, vector(0.0))[-1]
    assert bool(state.applied)
    assert np.isnan(updates).all()


def test_traced_weight_that_the_backend_may_flush_to_zero_is_zero_or_makes_the_average_nan():
    tx = shrewjax.accumulate(recorder(), 1)
    updates, state = run(tx, [(vector(3.0), {"weight": jnp.float32(1e-40)})], vector(0.0))[-1]
    assert np.isnan(updates).all() == bool(state.applied)


@pytest.mark.parametrize("cast", [float, jnp.float32])
@pytest.mark.parametrize("weights", [(2.0**-30, 2.0**-29), (2.0**-30, 0), (2.0**100, 0), (2.0**99, 2.0**98)], ids=str)
def test_average_is_right_at_both_ends_of_the_range_of_weights(weights, cast):
    steps = [(vector(1.0, 3.0), {"weight": cast(weights[0])}), (vector(2.0, 5.0), {"weight": cast(weights[1])})]
    expected = np.average([[1.0, 3.0], [2.0, 5.0]], axis=0, weights=weights)
    updates, _ = run_compiled(recording_window(2), steps, vector(0.0, 0.0))[-1]
    np.testing.assert_allclose(updates, expected, rtol=3e-7)


@pytest.mark.parametrize("nonfinite", POLICIES)
def test_product_beyond_its_dtype_makes_the_average_infinite_which_a_guard_inside_leaves_out(nonfinite):
    steps = [(vector(1e36, 1.0), {"weight": jnp.float32(1000)})]
    updates, state = run(shrewjax.accumulate(recorder(), 1, nonfinite=nonfinite), steps, vector(0.0, 0.0))[-1]
    assert np.isinf(updates[0])
    assert int(state.dropped) == 0
    guarded = shrewjax.accumulate(shrewjax.skip_nonfinite(recorder()), 1, nonfinite=nonfinite)
    updates, state = run(guarded, steps, vector(0.0, 0.0))[-1]
    np.testing.assert_array_equal(updates, [0, 0])
    assert int(state.inner_state.skipped) == 1


@pytest.mark.parametrize(("wide", "counted"), [(False, 0), (True, 1)], ids=["float32", "float64"])
def test_weights_of_one_count_to_two_to_the_24_and_beyond_in_float64(wide, counted):
    with jax.enable_x64(wide):
        window = shrewjax.GradAccumulator(2, accumulator_dtype="float64" if wide else None)
        state = window.init(vector(0.0))
        state = window.add(state, vector(1.0), weight=2**24 - 1)
        state = window.add(state, vector(1.0))
        assert int(state.weight_sum) == 2**24
        assert int(window.add(state, vector(1.0)).weight_sum) == 2**24 + counted


def test_nan_weight_propagates_and_leaves_the_next_window_clean():
    tx = shrewjax.accumulate(recorder(), 2)
    steps = [(vector(1.0), {"weight": jnp.float32(w)}) for w in (1, np.nan, 1, 1)]
    history = run(tx, steps, vector(0.0))
    assert np.isnan(history[1][0]).all()
    assert bool(history[1][1].applied)
    assert float(history[3][0][0]) == 1


# --- non-finite micro-batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("weight", [{}, {"weight": jnp.float32(2)}], ids=["no weight", "weight"])
def test_one_bad_micro_batch_under_each_policy(bad, place, weight):
    """Windows of two; the bad one comes first or second. Expected: (update, applied) of each call, then dropped."""
    calls = [vector(2.0, 4.0), vector(8.0, 2.0), vector(4.0, 2.0), vector(0.0, 2.0), vector(6.0, 6.0)]
    calls.insert(place, vector(bad, 6.0))
    mean = lambda *at: np.mean([np.float64(calls[i]) for i in at], axis=0)  # noqa: E731
    zero, good = np.zeros(2), 1 - place
    expected = {
        "propagate": [zero, np.array([bad, (6 + float(calls[good][1])) / 2]), zero, mean(2, 3), zero, mean(4, 5)],
        "drop_microbatch": [zero, mean(good), zero, mean(2, 3), zero, mean(4, 5)],
        "drop_window": [zero, zero, zero, mean(2, 3), zero, mean(4, 5)],
        "extend_window": [zero, zero, mean(good, 2), zero, mean(3, 4), zero],
    }
    for policy in POLICIES:
        history = run_compiled(recording_window(2, nonfinite=policy), [(g, weight) for g in calls], vector(0.0, 0.0))
        for i, ((updates, state), want) in enumerate(zip(history, expected[policy], strict=True)):
            np.testing.assert_allclose(updates, want, rtol=1e-6, err_msg=f"{policy}, call {i}")
            assert bool(state.applied) == bool(np.any(want != 0)), f"{policy}, call {i}"
        assert int(history[-1][1].dropped) == (policy != "propagate"), policy
        assert int(history[-1][1].inner_state["runs"]) == int(history[-1][1].windows), policy


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "complex64"])
def test_policies_see_bad_values_in_every_dtype_and_no_overflow_of_finite_ones(dtype):
    largest = float(jnp.finfo(dtype).max)
    tx = recording_window(1, nonfinite="drop_microbatch")
    params = jnp.zeros((300, 4), dtype)
    imaginary = jnp.asarray(1j if dtype == "complex64" else 1, dtype)
    everywhere_largest = jnp.full_like(params, largest)  # the sum overflows, no element does
    for case, grads, dropped in (
        ("the largest everywhere", everywhere_largest, 0),
        ("an infinity", params.at[200, 1].set(jnp.asarray(np.inf, dtype) * imaginary), 1),
        ("a NaN", params.at[200, 1].set(jnp.asarray(np.nan, dtype) * imaginary), 1),
        ("infinities of both signs", params.at[200, 1].set(np.inf).at[7, 0].set(-np.inf), 1),
    ):
        _, state = run_compiled(tx, [(grads, {})], params)[-1]
        assert int(state.dropped) == dropped, case


def test_after_a_nan_the_next_window_is_clean_where_multisteps_never_is():
    steps = [(vector(v), {}) for v in (np.nan, 1.0, 2.0, 4.0)]
    ours = [float(u[0]) for u, _ in run(shrewjax.accumulate(optax.identity(), 2), steps, vector(0.0))]
    theirs = [float(u[0]) for u, _ in run(lenient(optax.MultiSteps(optax.identity(), 2)), steps, vector(0.0))]
    np.testing.assert_array_equal(ours, [0, np.nan, 0, 3])
    assert np.isnan(theirs[-1])


# --- window length ----------------------------------------------------------------------------------------------


def test_window_length_by_schedule_counts_windows():
    tx = shrewjax.accumulate(recorder(), lambda windows: 1 + windows)  # 1, 2, 3, ...
    applied = [bool(s.applied) for _, s in run(tx, [(vector(1.0), {})] * 6, vector(0.0))]
    assert applied == [True, False, True, False, False, True]


def test_window_length_by_a_float_schedule_of_optax():
    tx = shrewjax.accumulate(recorder(), optax.piecewise_constant_schedule(2.0, {2: 1.5}))
    applied = [bool(s.applied) for _, s in run(lenient(tx), [(vector(1.0), {})] * 10, vector(0.0))]
    assert [i for i, a in enumerate(applied) if a] == [1, 3, 6, 9]


def test_window_length_traced():
    params = vector(0.0)

    @quick_jit
    def calls_until_applied(k):
        tx = shrewjax.accumulate(recorder(), k)
        state, applied = tx.init(params), []
        for _ in range(5):
            _, state = tx.update(vector(1.0), state, params)
            applied.append(state.applied)
        return 1 + jnp.argmax(jnp.stack(applied))

    assert [int(calls_until_applied(jnp.int32(k))) for k in (1, 2, 5)] == [1, 2, 5]
    with pytest.raises(ValueError, match="accum_steps"):
        shrewjax.accumulate(recorder(), jnp.ones(2, jnp.int32))


def test_resuming_with_fewer_steps_closes_an_open_window_at_once():
    params = vector(0.0)
    long, short = shrewjax.accumulate(recorder(), 8), shrewjax.accumulate(recorder(), 3)
    state = run(long, [(vector(float(i)), {}) for i in range(1, 6)], params)[-1][1]
    updates, state = short.update(vector(6.0), state, params)
    assert float(updates[0]) == pytest.approx(3.5)
    assert (int(state.micro_step), int(state.windows)) == (0, 1)


@pytest.mark.parametrize("bad", [0, -1, True, 2.0, "4", None, np.float32(2), np.True_, jnp.ones(2), jnp.ones((), bool)])
def test_window_length_that_makes_no_sense_is_an_error(bad):
    for make in (lambda k: shrewjax.accumulate(optax.identity(), k), shrewjax.GradAccumulator):
        with pytest.raises(ValueError, match="accum_steps"):
            make(bad)


@pytest.mark.parametrize(
    "good", [2, np.int64(2), np.uint8(2), np.array(2), jnp.int32(2)], ids=lambda k: type(k).__name__
)
def test_window_length_may_be_any_integer(good):
    history = run(shrewjax.accumulate(recorder(), good), [(vector(1.0), {})] * 4, vector(0.0))
    assert int(history[-1][1].windows) == 2


BAD_STEPS = [0, -3, 0.5, np.nan, True, "2", None, [2, 2], np.ones(2), np.True_, jnp.ones(2), jnp.ones((), bool), 1j]


@pytest.mark.parametrize("bad", BAD_STEPS, ids=repr)
def test_function_that_returns_a_window_length_that_makes_no_sense_is_an_error(bad):
    tx, window = (make(lambda _: bad) for make in (partial(shrewjax.accumulate, recorder()), shrewjax.GradAccumulator))
    for call in (
        lambda: tx.update(vector(1.0), tx.init(vector(0.0))),
        lambda: window.ready(window.init(vector(0.0))),
    ):
        with pytest.raises(ValueError, match="function accum_steps returns must be"):
            call()


@pytest.mark.parametrize("function", [True, False])
@pytest.mark.parametrize(("steps", "closes"), [(0, True), (-3.0, True), (np.nan, True), (np.inf, False), (1e30, False)])
def test_window_length_in_an_array_is_at_least_one(steps, closes, function):
    length = jnp.asarray(steps)
    window = shrewjax.GradAccumulator((lambda _: length) if function else length)
    state = window.init(vector(0.0))
    assert not bool(window.ready(state))
    assert bool(window.ready(window.add(state, vector(1.0)))) == closes


# --- flush ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("traced", [False, True])
def test_flush_with_the_last_micro_batch_divides_by_what_came(traced):
    tx = recording_window(8) if traced else shrewjax.accumulate(recorder(), 8)
    steps = [(vector(2.0), {"weight": 3}), (vector(6.0), {"weight": 1, "flush": True})]
    updates, state = run_compiled(tx, steps, vector(0.0))[-1]
    assert float(updates[0]) == pytest.approx(3.0)
    assert (int(state.micro_step), float(state.weight_sum), int(state.windows)) == (0, 0, 1)


@pytest.mark.parametrize("jitted", [False, True])
def test_flush_closes_what_is_open_and_leaves_an_empty_window_alone(jitted):
    params = jnp.zeros(1, jnp.bfloat16)
    tx = shrewjax.accumulate(lenient(optax.adam(0.1)), 4)
    flush = quick_jit(lambda s, p: shrewjax.flush(tx, s, p)) if jitted else lambda s, p: shrewjax.flush(tx, s, p)
    empty = tx.init(params)
    updates, state = flush(empty, params)
    assert float(updates[0]) == 0
    assert bits(state) == bits(empty)

    state = run(tx, [(jnp.asarray([2.0], jnp.bfloat16), {}), (jnp.asarray([4.0], jnp.bfloat16), {})], params)[-1][1]
    updates, state = flush(state, params)
    assert updates.dtype == jnp.bfloat16
    assert float(updates[0]) == pytest.approx(-0.1, rel=1e-2)
    assert float(state.gradient_sum[0]) == 3
    assert (int(state.micro_step), int(state.windows), bool(state.applied)) == (0, 1, True)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(lambda x: (x.shape, x.dtype), empty)


AROUND = {
    "chain": lambda tx: optax.chain(shrewjax.clip_by_global_norm(jnp.inf), tx),
    "named_chain": lambda tx: optax.named_chain(("window", tx)),
    "masked": lambda tx: optax.masked(tx, True),
    "partition": lambda tx: optax.partition({"all": tx}, "all"),
    "inject_hyperparams": lambda _: optax.inject_hyperparams(shrewjax.accumulate)(optax.sgd(1.0), 8),
    "skip_nonfinite": shrewjax.skip_nonfinite,
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("way", ["the last micro-batch", "weight=0"])
def test_flush_of_a_wrapped_accumulation_is_an_error_whose_advice_closes_the_window(around, way):
    tx, params = AROUND[around](shrewjax.accumulate(optax.sgd(1.0), 8)), vector(0.0)
    with pytest.raises(
        ValueError, match=r"tx must be the transformation that accumulate returned.*flush=True.*weight=0, flush=True"
    ):
        shrewjax.flush(tx, tx.init(params), params)
    _, state = tx.update(vector(2.0), tx.init(params), params)
    if way == "weight=0":
        _, state = tx.update(vector(4.0), state, params)
        updates, state = tx.update(vector(1e9), state, params, weight=0, flush=True)
    else:
        updates, state = tx.update(vector(4.0), state, params, flush=True)
    assert updates.tolist() == [-3.0]
    (windows,) = (value for name, value in shrewjax.metrics(state).items() if name == "accumulate/windows")
    assert int(windows) == 1


def test_flush_of_another_transformation_is_an_error():
    with pytest.raises(ValueError, match="tx must be the transformation that accumulate returned"):
        shrewjax.flush(optax.sgd(1.0), optax.sgd(1.0).init(vector(0.0)), vector(0.0))


@pytest.mark.parametrize("nonfinite", POLICIES)
def test_flush_of_a_window_with_a_bad_micro_batch(nonfinite):
    params, tx = vector(0.0), shrewjax.accumulate(recorder(), 4, nonfinite=nonfinite)
    state = run(tx, [(vector(2.0), {}), (vector(np.nan), {})], params)[-1][1]
    updates, state = shrewjax.flush(tx, state, params)
    expected = {"propagate": np.nan, "drop_microbatch": 2, "drop_window": 0, "extend_window": 2}[nonfinite]
    np.testing.assert_array_equal(updates, [expected])
    assert int(state.micro_step) == 0
    assert not bool(state.window_bad)
    assert int(state.windows) == (nonfinite != "drop_window")


# --- apply_gradients --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda adam: adam,
        lambda adam: shrewjax.accumulate(adam, 3),
        lambda adam: lenient(optax.chain(shrewjax.clip_by_value(1.0), shrewjax.accumulate(adam, 3))),
        lambda adam: lenient(optax.MultiSteps(adam, 3).gradient_transformation()),
        lambda adam: shrewjax.skip_nonfinite(adam),
        lambda adam: shrewjax.accumulate(shrewjax.skip_on_spike(adam, warmup_steps=1), 2),
        lambda adam: shrewjax.skip_nonfinite(shrewjax.accumulate(adam, 2)),
    ],
    ids=["adam", "accumulate", "chain", "MultiSteps", "guard", "guard in accumulate", "accumulate in guard"],
)
def test_apply_gradients_is_update_and_apply_updates(make):
    tx, params = make(lenient(optax.adam(0.1))), tree_of()
    both = quick_jit(lambda g, s, p: shrewjax.apply_gradients(tx, g, s, p))
    update = quick_jit(tx.update)
    p = q = params
    s = t = tx.init(params)
    for i in range(7):
        grads = tree_of(i, scale=1e3 if i == 5 else 1.0)
        p, s = both(grads, s, p)
        updates, t = update(grads, t, q)
        q = optax.apply_updates(q, updates)
        assert_close(p, q, rtol=1e-6, atol=1e-7)
    assert_close(s, t, rtol=1e-6, atol=1e-7)


def test_apply_gradients_passes_weight_flush_and_the_rest():
    def update(g, s, params=None, *, value):
        return jax.tree.map(lambda x: x * value, g), s

    tx = shrewjax.accumulate(optax.GradientTransformationExtraArgs(lambda p: (), update), 8)
    params, state = vector(0.0), tx.init(vector(0.0))
    params, state = shrewjax.apply_gradients(tx, vector(2.0), state, params, weight=3, value=10.0)
    params, state = shrewjax.apply_gradients(tx, vector(6.0), state, params, flush=True, value=10.0)
    assert float(params[0]) == pytest.approx(30.0)


# --- the host's form --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nonfinite", POLICIES)
@pytest.mark.parametrize("reduction", ["mean", "sum_over_weights", "sum"])
def test_host_driven_window_gives_what_accumulate_gives(nonfinite, reduction):
    params = tree_of()
    window = shrewjax.GradAccumulator(3, reduction=reduction, nonfinite=nonfinite)
    tx = shrewjax.accumulate(recorder(), 3, reduction=reduction, nonfinite=nonfinite)
    add, take = quick_jit(window.add, donate_argnums=0), quick_jit(window.take)
    update, state, host = quick_jit(tx.update), tx.init(params), window.init(params)
    for i in range(11):
        grads = tree_of(i) if i != 4 else jax.tree.map(lambda x: x * jnp.nan, tree_of(i))
        updates, state = update(grads, state, params, weight=jnp.float32(i % 4))
        host = add(host, grads, jnp.float32(i % 4))
        assert int(window.current_step(host)) % 3 == int(state.micro_step)
        if window.ready(host):
            average, _, host = take(host)
            assert_close(average, updates, rtol=3e-7)
    for name in ("micro_step", "windows", "weight_sum", "window_bad", "dropped"):
        assert getattr(host, name) == getattr(state, name), name


def test_step_gives_the_average_when_the_window_is_full():
    window = shrewjax.GradAccumulator(2)
    state = window.init(vector(0.0))
    for i in range(3):
        average, state = window.step(state, vector(2.0 * i))
        assert average is None
        average, state = window.step(state, vector(4.0), weight=3)
        assert float(average[0]) == pytest.approx((2.0 * i + 12) / 4)
    assert window.accum_steps == 2
    with pytest.raises(ValueError, match="step decides on the host"):
        jax.jit(window.step)(state, vector(0.0))


BAD_WEIGHTS = [-1.0, np.nan, np.inf, 3e38, 1e-30, np.float32(-1), np.float64(np.nan), np.array(-1), "1", None, 1j]


@pytest.mark.parametrize("bad", BAD_WEIGHTS, ids=repr)
def test_step_raises_what_add_raises_of_a_weight(bad):
    window = shrewjax.GradAccumulator(2)
    state = window.init(vector(0.0))
    with pytest.raises(ValueError, match="weight must be") as of_add:
        window.add(state, vector(1.0), bad)
    with pytest.raises(ValueError, match=re.escape(str(of_add.value))):
        window.step(state, vector(1.0), bad)


def longer(windows):
    return 2 + windows


COPIES = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "copy": copy.copy, "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("how", COPIES)
def test_copy_of_a_window_does_what_the_window_does(how):
    window = shrewjax.GradAccumulator(longer, accumulator_dtype="bfloat16", nonfinite="drop_microbatch")
    _, state = window.step(window.init(vector(0.0)), vector(2.0))
    copied = COPIES[how](window)
    average, _ = copied.step(COPIES[how](state), vector(4.0))
    assert average.dtype == jnp.bfloat16
    assert float(average[0]) == 3


def test_window_goes_to_another_process():
    script = (
        "import pickle, sys, jax.numpy as jnp\n"
        "window, grads = pickle.load(sys.stdin.buffer)\n"
        "_, state = window.step(window.init(grads), grads)\n"
        "print(window.step(state, 2 * grads, 3)[0].tolist())\n"
    )
    sent = pickle.dumps((shrewjax.GradAccumulator(2), np.float32([4.0, 8.0])))
    done = subprocess.run([sys.executable, "-c", script], input=sent, capture_output=True, check=True)
    assert done.stdout.decode().split() == ["[7.0,", "14.0]"]


def test_take_and_reset_of_open_and_empty_windows():
    window = shrewjax.GradAccumulator(4)
    empty = window.init(vector(0.0))
    average, closed, state = window.take(empty)
    assert (float(average[0]), bool(closed)) == (0, False)
    assert int(state.windows) == 0
    state = window.add(window.add(empty, vector(2.0)), vector(4.0))
    assert int(window.current_step(window.reset(state))) == 0
    average, _, _ = window.take(window.add(window.reset(state), vector(7.0)))
    assert float(average[0]) == 7
    average, closed, state = window.take(state)
    assert (float(average[0]), bool(closed)) == (3, True)
    assert (int(state.micro_step), int(state.windows)) == (0, 1)


# --- errors, and the state they leave ---------------------------------------------------------------------------

BAD_GRADIENTS = {
    "shape": ({"w": jnp.ones((3, 1)), "b": jnp.ones(4)}, AssertionError, r"\['w'\] must have .*\(3, 4\), got \(3, 1\)"),
    "scalar": ({"w": jnp.ones(()), "b": jnp.ones(4)}, AssertionError, r"\['w'\] must have .*\(3, 4\), got \(\)"),
    "missing": ({"w": jnp.ones((3, 4))}, AssertionError, r"\['b'\] is missing"),
    "unexpected": (
        {"w": jnp.ones((3, 4)), "b": jnp.ones(4), "c": jnp.ones(1)},
        AssertionError,
        r"\['c'\] is unexpected",
    ),
    "complex": ({"w": jnp.ones((3, 4)), "b": jnp.ones(4, complex)}, ValueError, r"\['b'\] is complex64"),
    "no array": ({"w": jnp.ones((3, 4)), "b": "text"}, ValueError, r"\['b'\] must be an array"),
}


@pytest.mark.parametrize("case", BAD_GRADIENTS)
def test_bad_gradients_are_named_and_leave_the_state_usable(case):
    grads, error, message = BAD_GRADIENTS[case]
    params = {"w": jnp.zeros((3, 4)), "b": jnp.zeros(4)}
    window, tx = shrewjax.GradAccumulator(2), shrewjax.accumulate(recorder(), 2)
    state, host = tx.init(params), window.init(params)
    with pytest.raises(error, match=message):
        tx.update(grads, state, params)
    with pytest.raises(error, match=message):
        window.add(host, grads)
    if case != "no array":
        with pytest.raises(error, match=message):
            quick_jit(tx.update, donate_argnums=1)(grads, state, params)
    updates, _ = tx.update(params, state, params)
    assert_close(updates, params, rtol=0)


@pytest.mark.parametrize("bad", [-1, -0.5, *BAD_WEIGHTS, np.ones(2), jnp.ones(2)], ids=repr)
def test_bad_weight_is_named(bad):
    tx = shrewjax.accumulate(recorder(), 2)
    with pytest.raises(ValueError, match="weight must be"):
        tx.update(vector(1.0), tx.init(vector(0.0)), weight=bad)


def test_weight_that_is_not_given_is_one():
    params, grads = vector(0.0), vector(3.0)
    window, tx = shrewjax.GradAccumulator(2), shrewjax.accumulate(recorder(), 2)
    assert float(window.add(window.init(params), grads).weight_sum) == 1
    assert float(window.step(window.init(params), grads)[1].weight_sum) == 1
    assert float(tx.update(grads, tx.init(params), params)[1].weight_sum) == 1
    assert float(shrewjax.apply_gradients(tx, grads, tx.init(params), params)[1].weight_sum) == 1


def test_rules_of_a_window_are_keyword_only():
    parameters = list(inspect.signature(shrewjax.GradAccumulator).parameters.values())
    assert parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters[1:])


def test_bad_arguments_are_named():
    for name, value in (
        ("reduction", "average"),
        ("nonfinite", "skip"),
        ("accumulator_dtype", "int32"),
        ("accumulator_dtype", "x"),
    ):
        with pytest.raises(ValueError, match=name):
            shrewjax.accumulate(optax.identity(), 2, **{name: value})
    tx = shrewjax.accumulate(optax.identity(), 2)
    with pytest.raises(ValueError, match="flush must be a bool"):
        tx.update(vector(1.0), tx.init(vector(0.0)), flush=1)
    with pytest.raises(ValueError, match="inner must be"):
        shrewjax.accumulate(lambda g: g, 2)
    with pytest.raises(ValueError, match="inner is itself an accumulation"):
        shrewjax.accumulate(shrewjax.accumulate(optax.identity(), 2), 2)
    with pytest.raises(ValueError, match="x64"):
        shrewjax.accumulate(optax.identity(), 2, accumulator_dtype="float64")


def test_inner_that_changes_its_state_is_an_error_that_names_the_leaf():
    grows = optax.GradientTransformation(lambda p: {"m": jnp.zeros(1)}, lambda g, s, p=None: (g, {"m": jnp.zeros(2)}))
    tx = shrewjax.accumulate(grows, 2)
    with pytest.raises(AssertionError, match=r"inner's update changed its state: leaf \['m'\]"):
        tx.update(vector(1.0), tx.init(vector(0.0)))


@pytest.mark.parametrize("new", [lambda n: n + 1, lambda n: 7], ids=["a counter", "a number anew"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: shrewjax.accumulate(inner, 1),
        lambda inner: shrewjax.accumulate(inner, 2),
        shrewjax.skip_nonfinite,
        shrewjax.skip_on_spike,
    ],
    ids=["window of one", "accumulate", "skip_nonfinite", "skip_on_spike"],
)
def test_inner_may_keep_python_numbers_in_its_state(wrap, new):
    inner = optax.GradientTransformation(lambda p: {"n": 6}, lambda g, s, p=None: (g, {"n": new(s["n"])}))
    tx = wrap(inner)
    state = tx.init(vector(0.0))
    for update in (tx.update, tx.update, quick_jit(tx.update), tx.update):
        before = int(state.inner_state["n"])
        _, state = update(vector(1.0), state)
        assert int(state.inner_state["n"]) == (new(before) if bool(state.applied) else before)
    assert bool(state.applied)


def test_checks_add_nothing_to_the_program():
    params = tree_of()
    tx = shrewjax.accumulate(recorder(), 2)
    program = lambda: str(jax.make_jaxpr(tx.update)(params, tx.init(params), params))  # noqa: E731
    with_checks = program()
    chex.disable_asserts()
    try:
        without_checks = program()
    finally:
        chex.enable_asserts()
    assert with_checks == without_checks


# --- the state --------------------------------------------------------------------------------------------------


def test_state_is_a_named_tuple_that_optax_can_search_and_change():
    tx = optax.chain(shrewjax.clip_by_value(1.0), shrewjax.accumulate(lenient(optax.adam(0.1)), 3))
    state = tx.init(tree_of())
    assert int(optax.tree.get(state, "micro_step")) == 0
    changed = optax.tree.set(state, micro_step=jnp.int32(2))
    assert int(changed[1].micro_step) == 2
    assert shrewjax.AccumulateState._fields == (
        "micro_step", "windows", "applied", "weight_sum", "window_bad", "dropped", "value_sum", "value",
        "noise", "gradient_sum", "inner_state",
    )  # fmt: skip


@pytest.mark.parametrize("guarded", [False, True])
def test_donated_state_is_written_in_place_and_no_buffer_is_shared(guarded):
    params = {"w": jnp.zeros((256, 256))}
    inner = lenient(optax.adam(0.1))
    tx = shrewjax.accumulate(shrewjax.skip_nonfinite(inner) if guarded else inner, 4)
    state = jax.tree.map(jnp.copy, tx.init(params))
    leaves = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(leaves)) == len(leaves)
    step = users_jit(lambda p, s, g: shrewjax.apply_gradients(tx, g, s, p), donate_argnums=(0, 1))
    grads = {"w": jnp.ones((256, 256))}
    compiled = step.lower(params, state, grads).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.05 * params["w"].nbytes
    where = state.gradient_sum["w"].unsafe_buffer_pointer()
    _, state = compiled(params, state, grads)
    assert state.gradient_sum["w"].unsafe_buffer_pointer() == where


def test_sharding_of_the_parameters_is_that_of_the_accumulator():
    mesh = jax.make_mesh((8,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    params = jax.device_put(jnp.zeros((16, 2)), sharding)
    tx = shrewjax.accumulate(lenient(optax.adam(0.1)), 2)
    state = tx.init(params)
    assert state.gradient_sum.sharding.is_equivalent_to(sharding, 2)
    step = quick_jit(lambda g, s, p: shrewjax.apply_gradients(tx, g, s, p))
    for _ in range(2):
        params, state = step(params + 1, state, params)
    assert state.gradient_sum.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_allclose(params, -0.1, rtol=1e-5)


# --- every optimizer, real data, value checks -------------------------------------------------------------------

# Their updates need more than gradients and parameters.
ARGUMENTS = {
    "lbfgs": {"learning_rate": 0.1, "linesearch": None},
    "noisy_sgd": {"learning_rate": 0.1, "key": 0},
    "polyak_sgd": {},
}
DEPRECATED = {"optimistic_adam"}
EXPORTED = {n for n in dir(optax) if getattr(getattr(optax, n), "__module__", "") == "optax._src.alias"}


@pytest.mark.parametrize("name", sorted((EXPORTED | {"nadam", "nadamw"}) - DEPRECATED))
def test_every_optimizer_of_optax_takes_the_steps_it_takes_in_multisteps(name):
    make = lambda: getattr(optax, name)(**ARGUMENTS.get(name, {"learning_rate": 0.01}))  # noqa: E731
    matrices = lambda seed: {k: v for k, v in tree_of(seed).items() if v.ndim}  # noqa: E731 (sm3 takes no scalars)
    params = matrices(0)

    def trajectory(tx):
        update, p, state = quick_jit(lenient(tx).update), params, tx.init(params)
        for i in range(9):
            updates, state = update(matrices(i + 1), state, p, value=1.0 + i // 3)
            p = optax.apply_updates(p, updates)
        return p

    ours = trajectory(shrewjax.accumulate(lenient(make()), 3))
    multi_steps = optax.MultiSteps(make(), 3)
    theirs = trajectory(optax.GradientTransformationExtraArgs(multi_steps.init, multi_steps.update))
    for x, y, start in zip(*map(jax.tree.leaves, (ours, theirs, params)), strict=True):
        assert float(jnp.linalg.norm(x - y)) <= 1e-5 * float(jnp.linalg.norm(y))
        assert bits(x) != bits(start)


def test_uneven_micro_batches_of_text_equal_the_large_batch():
    """A character model on sentences of 5 to 200 characters of the documentation that comes with Python."""
    text = "".join(pydoc_data.topics.topics[k] for k in sorted(pydoc_data.topics.topics))
    letters = sorted(set(text))
    tokens = np.asarray([letters.index(c) for c in text[:4000]])
    rng = np.random.default_rng(0)
    lengths = [5, 200, *rng.integers(5, 200, size=6)]
    starts = rng.integers(0, len(tokens) - 201, size=8)
    texts, lengths = np.stack([tokens[a : a + 201] for a in starts]), np.asarray(lengths)  # one shape: one program
    width = 16
    shapes = {"in": (len(letters), width), "q": (width, width), "k": (width, width), "out": (width, len(letters))}
    params = {k: jnp.asarray(rng.normal(size=s) / width**0.5, jnp.float32) for k, s in shapes.items()}

    def loss(params, x, n):  # one attention layer, the losses of n characters, each given those before it
        h = params["in"][x[:-1]]
        scores = (h @ params["q"]) @ (h @ params["k"]).T
        h = h + jax.nn.softmax(jnp.where(jnp.tri(len(x) - 1, dtype=bool), scores, -1e9)) @ h
        losses = optax.softmax_cross_entropy_with_integer_labels(h @ params["out"], x[1:])
        return jnp.sum(losses, where=jnp.arange(len(losses)) < n)

    with jax.numpy_dtype_promotion("standard"):
        mean_gradient = quick_jit(jax.grad(lambda p, x, n: loss(p, x, n) / n))
        all_losses = jax.vmap(loss, in_axes=(None, 0, 0))
        whole = quick_jit(jax.grad(lambda p: jnp.sum(all_losses(p, texts, lengths)) / lengths.sum()))(params)
        steps = [(mean_gradient(params, x, n), {"weight": int(n)}) for x, n in zip(texts, lengths, strict=True)]
        sums = [(jax.tree.map(lambda g, n=weight["weight"]: g * n, mean), weight) for mean, weight in steps]
    for reduction, given in (("mean", steps), ("sum_over_weights", sums)):
        average, _ = run(shrewjax.accumulate(recorder(), 8, reduction=reduction), given, params)[-1]
        for a, b in zip(jax.tree.leaves(average), jax.tree.leaves(whole), strict=True):
            assert float(jnp.linalg.norm(a - b)) <= 1e-5 * float(jnp.linalg.norm(b))
    unweighted, _ = run(shrewjax.accumulate(recorder(), 8), [(g, {}) for g, _ in steps], params)[-1]
    assert float(jnp.linalg.norm(unweighted["in"] - whole["in"])) > 1e-2 * float(jnp.linalg.norm(whole["in"]))


@pytest.mark.parametrize(
    ("change", "weight", "message"),
    [
        ({}, 2.0, None),
        ({}, -1.0, "weight"),
        ({}, np.nan, "weight"),
        ({"micro_step": jnp.int32(3)}, 1.0, "micro_step must be between 0 and 2"),
        ({"micro_step": jnp.int32(-1)}, 1.0, "micro_step"),
        ({"weight_sum": jnp.float32(np.inf)}, 1.0, "weight_sum"),
    ],
)
def test_value_checks_of_the_window_are_there_for_who_wants_them(change, weight, message):
    tx = optax.chain(shrewjax.accumulate(recorder(), 3), optax.identity())
    state = tx.init(vector(0.0))
    state = (state[0]._replace(**change), state[1])

    @chex.chexify
    @jax.jit
    def step(grads, state, weight):
        shrewjax.check_window(state, 3, weight=weight)
        return tx.update(grads, state, weight=weight)

    def call():
        step(vector(1.0), state, jnp.float32(weight))
        step.wait_checks()

    if message is None:
        call()
    else:
        with pytest.raises(AssertionError, match=message):
            call()
    with pytest.raises(ValueError, match="no window"):
        shrewjax.check_window(optax.EmptyState(), 3)
