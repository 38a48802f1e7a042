"""The window: what each micro-batch may do to it, its length, its errors and its state."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_refused, lenient
from recording import BAD_WEIGHTS, POLICIES, recorder, recording_window, run, run_compiled, vector
from speed import quick_jit, users_jit

import shrewjax

# --- weights and reductions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum_over_weights", "sum"])
@pytest.mark.parametrize("cast", [float, jnp.float32, jnp.bfloat16, np.float64])
def test_window_is_the_weighted_reduction(reduction, cast):
    grads = [vector(1.0, -2.0), vector(3.0, 0.5), vector(-1.0, 8.0)]
    tx = recording_window(3, reduction=reduction)
    for weights in ([1, 1, 1], [512, 37, 460], [0.3, 0.1, 0.2], [1, 0, 2], [1e-6, 1e6, 1]):
        g, w = np.float64(grads), np.float64(weights)[:, None]
        expected = {
            "mean": (w * g).sum(0) / w.sum(),
            "sum_over_weights": (g * (w != 0)).sum(0) / w.sum(),
            "sum": (g * (w != 0)).sum(0),
        }[reduction]
        steps = [(x, {"weight": cast(v)}) for x, v in zip(grads, weights, strict=True)]
        updates, state = run_compiled(tx, steps, vector(0.0, 0.0))[-1]
        rtol = 1e-2 if cast is jnp.bfloat16 else 1e-6
        np.testing.assert_allclose(updates, expected, rtol=rtol, err_msg=str(weights))
        assert bool(state.applied)


@pytest.mark.parametrize("reduction", ["mean", "sum_over_weights", "sum"])
@pytest.mark.parametrize(("nonfinite", "cast"), [*zip(POLICIES, (int, float, np.float32, jnp.int32), strict=True)])
def test_micro_batch_of_weight_zero_contributes_nothing_whatever_it_holds(reduction, nonfinite, cast):
    tx = recording_window(3, reduction=reduction, nonfinite=nonfinite)
    padded = (vector(np.nan, np.inf), {"weight": cast(0)})
    for place in range(3):
        steps = [(vector(2.0, 4.0), {"weight": cast(1)}), (vector(6.0, 8.0), {"weight": cast(1)})]
        steps.insert(place, padded)
        updates, state = run_compiled(tx, steps, vector(0.0, 0.0))[-1]
        expected = [8, 12] if reduction == "sum" else [4, 6]
        np.testing.assert_allclose(updates, expected, rtol=1e-6, err_msg=f"at {place}")
        assert (int(state.dropped), int(state.windows)) == (0, 1), place


@pytest.mark.parametrize("reduction", ["mean", "sum_over_weights", "sum"])
def test_window_of_weight_zero_does_not_run_inner(reduction):
    steps = [(vector(np.nan), {"weight": 0})] * 2 + [(vector(3.0), {"weight": 1})] * 2
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
    "sum of two weights in range": ([2.0**100] * 2, 1.0),
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


@pytest.mark.parametrize(("restored", "weight"), [(-3.0, 2), (-3.0, jnp.float32(2)), (2.0**100, 2.0**100)], ids=str)
def test_a_sum_of_weights_out_of_range_makes_the_average_nan_also_if_each_weight_is_in_range(restored, weight):
    """A restored state, or Python's numbers, whose sum no check of a weight sees."""
    tx = recording_window(2)
    state = tx.init(vector(0.0))._replace(sum_of_weights=jnp.float32(restored), micro_step=jnp.int32(1))
    updates, state = tx.update(vector(1.0), state, vector(0.0), weight=weight)
    assert bool(state.applied)
    assert np.isnan(updates).all()


WINDOW = shrewjax.accumulate(recorder(), 2)
REFUSED_WEIGHTS = [-1.0, -(2.0**-40), 2.0**-31, 2.0**100 * 1.01, np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("nonfinite", POLICIES)
@pytest.mark.parametrize("reduction", ["mean", "sum_over_weights"])
def test_a_traced_weight_that_python_would_refuse_makes_its_average_nan_and_no_other(reduction, nonfinite):
    """Also if the window's weight is in range, such as 3 - 1."""
    tx = recording_window(2, reduction=reduction, nonfinite=nonfinite)
    for weight in REFUSED_WEIGHTS:
        with pytest.raises(ValueError, match="weight must be 0, or between"):
            WINDOW.update(vector(1.0), tx.init(vector(0.0)), weight=weight)
        steps = [(vector(1.0), {"weight": jnp.float32(w), "value": jnp.float32(2)}) for w in (3, weight, 1, 1)]
        history = run_compiled(tx, steps, vector(0.0))
        assert np.isnan(history[1][0]).all(), weight
        assert np.isnan(history[1][1].loss), weight
        assert (bool(history[1][1].applied), int(history[1][1].dropped)) == (True, 0), weight
        assert (float(history[3][0][0]), int(history[3][1].windows)) == (1, 2), weight


def test_a_sum_has_no_use_for_a_traced_weight_but_whether_it_is_0():
    tx = recording_window(2, reduction="sum")
    for weight in REFUSED_WEIGHTS:
        steps = [(vector(1.0), {"weight": jnp.float32(w)}) for w in (3, weight)]
        assert float(run_compiled(tx, steps, vector(0.0))[-1][0][0]) == 2, weight


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
@pytest.mark.parametrize("guarded", [False, True])
def test_product_beyond_its_dtype_makes_the_average_infinite_which_a_guard_inside_leaves_out(nonfinite, guarded):
    steps = [(vector(1e36, 1.0), {"weight": np.float32(1000)})]
    inner = shrewjax.skip_nonfinite(recorder()) if guarded else recorder()
    updates, state = run(shrewjax.accumulate(inner, 1, nonfinite=nonfinite), steps, vector(0.0, 0.0))[-1]
    assert int(state.dropped) == 0
    if guarded:
        np.testing.assert_array_equal(updates, [0, 0])
        assert int(state.inner_state.skipped) == 1
    else:
        assert np.isinf(updates[0])


@pytest.mark.parametrize(("wide", "counted"), [(False, 0), (True, 1)], ids=["float32", "float64"])
def test_weights_of_one_count_to_two_to_the_24_and_beyond_in_float64(wide, counted):
    with jax.enable_x64(wide):
        window = shrewjax.GradAccumulator(2, accumulator_dtype="float64" if wide else None)
        state = window.init(vector(0.0))
        state = window.add(state, vector(1.0), weight=2**24 - 1)
        state = window.add(state, vector(1.0))
        assert int(state.sum_of_weights) == 2**24
        assert int(window.add(state, vector(1.0)).sum_of_weights) == 2**24 + counted


# --- non-finite micro-batches -------------------------------------------------------------------------------------


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
        "drop_micro_batch": [zero, mean(good), zero, mean(2, 3), zero, mean(4, 5)],
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


def test_after_a_nan_the_next_window_is_clean_where_multisteps_never_is():
    steps = [(vector(v), {}) for v in (np.nan, 1.0, 2.0, 4.0)]
    ours = [float(u[0]) for u, _ in run(shrewjax.accumulate(optax.identity(), 2), steps, vector(0.0))]
    theirs = [float(u[0]) for u, _ in run(lenient(optax.MultiSteps(optax.identity(), 2)), steps, vector(0.0))]
    np.testing.assert_array_equal(ours, [0, np.nan, 0, 3])
    assert np.isnan(theirs[-1])


@pytest.mark.parametrize("dropped", [{"nonfinite": "drop_micro_batch"}, {"weight": 0}], ids=["policy", "weight"])
def test_a_reverse_mode_derivative_through_a_micro_batch_that_is_not_kept_is_nan_and_a_forward_one_is_right(dropped):
    weight = dropped.get("weight", 1)
    tx = shrewjax.accumulate(recorder(), 2, nonfinite=dropped.get("nonfinite", "propagate"))

    def average(x):
        _, state = tx.update(vector(2.0) * x, tx.init(vector(0.0)), vector(0.0))
        bad = jnp.sqrt(x - x) * vector(jnp.nan)
        return tx.update(bad, state, vector(0.0), weight=jnp.float32(weight))[0][0]

    assert float(jax.jit(average)(1.0)) == 2
    assert float(jax.jit(jax.jacfwd(average))(1.0)) == 2
    assert np.isnan(jax.jit(jax.grad(average))(1.0))


# --- window length ------------------------------------------------------------------------------------------------


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


def test_window_length_that_makes_no_sense_is_an_error():
    bad = [0, -1, True, 2.0, "4", None, np.float32(2), np.True_, jnp.ones(2), jnp.ones((), bool)]
    assert_refused([partial(shrewjax.accumulate, optax.identity()), shrewjax.GradAccumulator], bad, "accum_steps must")


def test_window_length_may_be_any_integer():
    for good in (2, np.int64(2), np.uint8(2), np.array(2), jnp.int32(2)):
        history = run(shrewjax.accumulate(recorder(), good), [(vector(1.0), {})] * 4, vector(0.0))
        assert int(history[-1][1].windows) == 2, type(good)


def test_function_that_returns_a_window_length_that_makes_no_sense_is_an_error():
    def update(steps):
        tx = shrewjax.accumulate(recorder(), lambda _: steps)
        tx.update(vector(1.0), tx.init(vector(0.0)))

    def ready(steps):
        window = shrewjax.GradAccumulator(lambda _: steps)
        window.ready(window.init(vector(0.0)))

    bad = [0, -3, 0.5, np.nan, True, "2", None, [2, 2], np.ones(2), np.True_, jnp.ones(2), jnp.ones((), bool), 1j]
    assert_refused([update, ready], bad, "function accum_steps returns must be")


@pytest.mark.parametrize("function", [True, False])
@pytest.mark.parametrize(("steps", "closes"), [(0, True), (-3.0, True), (np.nan, True), (np.inf, False), (1e30, False)])
def test_window_length_in_an_array_is_at_least_one(steps, closes, function):
    length = jnp.asarray(steps)
    window = shrewjax.GradAccumulator((lambda _: length) if function else length)
    state = window.init(vector(0.0))
    assert not bool(window.ready(state))
    assert bool(window.ready(window.add(state, vector(1.0)))) == closes


# --- errors, and the state they leave -----------------------------------------------------------------------------


def test_bad_weight_is_named():
    tx = shrewjax.accumulate(recorder(), 2)
    update = lambda weight: tx.update(vector(1.0), tx.init(vector(0.0)), weight=weight)  # noqa: E731
    assert_refused([update], [-1, -0.5, *BAD_WEIGHTS, np.ones(2), jnp.ones(2)], "weight must be")


@pytest.mark.parametrize(
    ("bad", "remedy"),
    [
        ({"weight": None}, "examples or tokens, such as len(x)"),
        ({"weight": [8, 8]}, "examples or tokens, such as len(x)"),
        ({"weight": len}, "examples or tokens, such as len(x)"),
        ({"value": (jnp.float32(2), {})}, "Pass the loss alone, without its aux"),
    ],
    ids=str,
)
def test_an_argument_of_another_kind_is_an_error_whose_remedy_is_right(bad, remedy):
    tx = shrewjax.accumulate(recorder(), 2)
    with pytest.raises(ValueError, match="must be a real scalar") as raised:
        tx.update(vector(1.0), tx.init(vector(0.0)), **bad)
    assert str(raised.value).split(". ", 1)[1].endswith(remedy)


def test_a_function_for_the_window_length_gets_the_number_of_windows_alone():
    for bad in (lambda: 4, lambda windows, step: 4):
        tx = shrewjax.accumulate(recorder(), bad)
        with pytest.raises(ValueError, match=r"^accum_steps is called with the number of closed windows, but it takes"):
            tx.update(vector(1.0), tx.init(vector(0.0)))
    for good in (lambda windows, step=1: step + windows, jax.jit(lambda windows: 1 + windows)):
        history = run(shrewjax.accumulate(recorder(), good), [(vector(1.0), {})] * 3, vector(0.0))
        assert [int(state.windows) for _, state in history] == [1, 1, 2]


def test_weight_that_is_not_given_is_one():
    params, grads = vector(0.0), vector(3.0)
    window, tx = shrewjax.GradAccumulator(2), shrewjax.accumulate(recorder(), 2)
    assert float(window.add(window.init(params), grads).sum_of_weights) == 1
    assert float(window.step(window.init(params), grads)[1].sum_of_weights) == 1
    assert float(tx.update(grads, tx.init(params), params)[1].sum_of_weights) == 1
    assert float(shrewjax.apply_gradients(tx, grads, tx.init(params), params)[1].sum_of_weights) == 1


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


NESTED = {
    "chain": lambda: optax.chain(shrewjax.clip_by_global_norm(1.0), shrewjax.accumulate(optax.sgd(1.0), 2)),
    "guard": lambda: shrewjax.skip_nonfinite(shrewjax.accumulate(optax.sgd(1.0), 2)),
    "partition": lambda: optax.partition({"a": shrewjax.accumulate(optax.sgd(1.0), 2)}, "a"),
    "injected": lambda: optax.inject_hyperparams(shrewjax.accumulate, static_args="inner")(
        optax.sgd(1.0), accum_steps=2
    ),
    "MultiSteps": lambda: optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation(),
    "MultiSteps in a chain": lambda: optax.chain(optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()),
}


@pytest.mark.parametrize("name", NESTED)
def test_accumulation_inside_what_is_accumulated_is_an_error_from_init(name):
    with pytest.raises(ValueError, match=r"^inner has an accumulation inside, \w+\. Multiply the accum"):
        shrewjax.accumulate(NESTED[name](), 2).init(jnp.zeros(2))


# --- the state ----------------------------------------------------------------------------------------------------


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
