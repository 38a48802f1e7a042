"""A window around an optimizer: what inner sees, and when."""

import itertools
import pydoc_data.topics

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, bits, lenient, thorough, tree_of
from recording import POLICIES, recorder, recording_window, run, run_compiled, vector
from speed import quick_jit

import shrewjax

# --- against Optax ------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
}


def stepper(tx):
    """The update of gradients, state and parameters, and its application, in one program."""
    tx = lenient(tx)

    @quick_jit
    def step(grads, state, params, **extra_args):
        updates, state = tx.update(grads, state, params, **extra_args)
        return optax.apply_updates(params, updates), state

    return step


def is_near(a, b, rtol):
    """Leaf by leaf, in relation to the leaf's norm."""
    pairs = zip(*(map(np.float64, jax.tree.leaves(tree)) for tree in (a, b)), strict=True)
    return all(np.linalg.norm(x - y) <= rtol * np.linalg.norm(y) for x, y in pairs)


# Others, and windows of three, are in `test_every_optimizer_of_optax_takes_the_steps_it_takes_in_multisteps`.
@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trajectory_is_that_of_multisteps(name, k):
    params = tree_of()

    def trajectory(tx):
        step, p, state = stepper(tx), params, tx.init(params)
        for i in range(17):
            p, state = step(tree_of(i + 1), state, p)
            yield p

    theirs = optax.MultiSteps(OPTIMIZERS[name](), k)
    ours = shrewjax.accumulate(lenient(OPTIMIZERS[name]()), k)
    for step, (a, b) in enumerate(zip(trajectory(ours), trajectory(theirs), strict=True)):
        assert is_near(a, b, 1e-6), f"step {step}"


# --- what inner sees, and when ------------------------------------------------------------------------------------


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
    """Integers with and without a float0, flags, nothing, and keys with a gradient of any kind."""
    float0, one_float0, key = (*(np.zeros(n, jax.dtypes.float0) for n in (3, ())), jax.random.key(1))
    params = {"x": vector(1.0), "i": jnp.arange(3), "flag": jnp.ones(2, bool), "n": None, "m": optax.MaskedNode()}
    params |= {"float0": jnp.arange(3), "key": key, "key, None": key, "key, float0": key}
    grads = {**params, "i": jnp.ones(3, jnp.int32), "float0": float0, "key, None": None, "key, float0": one_float0}
    tx = shrewjax.accumulate(recorder(), 2)
    history = [step for in_jit_or_not in (run, run_compiled) for step in in_jit_or_not(tx, [(grads, {})] * 2, params)]
    for updates, state in history:
        assert jax.tree.structure(updates) == jax.tree.structure(params)
        assert not np.any(updates["i"])
        assert not np.any(updates["flag"])
        assert updates["float0"].dtype == updates["key, float0"].dtype == jax.dtypes.float0
        assert updates["key"].dtype == updates["key, None"].dtype == key.dtype
        assert (state.gradient_sum["i"].shape, state.gradient_sum["i"].dtype) == ((), jnp.int32)
    assert [float(updates["x"][0]) for updates, _ in history] == [0, 1, 0, 1]


def test_weight_decay_does_not_reach_integer_parameters_without_a_gradient():
    params, grads = {"x": vector(1.0), "i": jnp.asarray([3, 2**24 + 1])}, {"x": vector(4.0), "i": None}
    tx = shrewjax.accumulate(lenient(optax.chain(optax.add_decayed_weights(0.1), optax.sgd(1.0))), 1)
    updates, _ = quick_jit(tx.update)(grads, tx.init(params), params)
    assert not np.any(updates["i"])
    assert updates["i"].dtype == params["i"].dtype
    with jax.numpy_dtype_promotion("standard"):  # Optax adds a float to the integers
        new_params, _ = quick_jit(lambda *args: shrewjax.apply_gradients(tx, *args))(grads, tx.init(params), params)
    np.testing.assert_array_equal(new_params["i"], params["i"])
    assert float(new_params["x"][0]) == pytest.approx(1 - 4.1)


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
    for given in (params, None):  # without parameters, only the gradients tell dtypes
        updates, _ = tx.update(vector(4.0), state, given)
        np.testing.assert_array_equal(updates, [3 + 1j])


def test_missing_gradient_adds_zero():
    params = {"a": vector(0.0), "b": vector(0.0)}
    tx = shrewjax.accumulate(recorder(), 2)
    steps = [({"a": vector(2.0), "b": None}, {}), ({"a": vector(4.0), "b": vector(6.0)}, {})]
    assert_close(run(tx, steps, params)[-1][0], {"a": [3.0], "b": [3.0]}, rtol=1e-7)
    steps = [({"a": vector(2.0), "b": None}, {})] * 2
    assert_close(run(tx, steps, params)[-1][0], {"a": [2.0], "b": [0.0]}, rtol=0)


BARE_LEAVES = {
    "an integer": (jnp.int32(3), jnp.int32(1)),
    "float0": (jnp.int32(3), np.zeros((), jax.dtypes.float0)),
    "integer without a gradient": (jnp.int32(3), None),
    "array without a gradient": (jnp.ones(2), None),
}


@pytest.mark.parametrize("nonfinite", ["drop_window", "extend_window"])
@pytest.mark.parametrize("case", BARE_LEAVES)
def test_a_tree_that_is_one_leaf_counts_as_a_tree_that_holds_it_does(case, nonfinite):
    params, grads = BARE_LEAVES[case]
    in_a_tree, alone = [], []
    tx = shrewjax.accumulate(recorder(), 2, nonfinite=nonfinite, noise_decay=0.5)
    window = shrewjax.GradAccumulator(2, nonfinite=nonfinite, noise_decay=0.5)
    for found, wrapped in ((alone, lambda x: x), (in_a_tree, lambda x: [x])):
        state = tx.init(wrapped(params))
        host = window.add(window.init(wrapped(params)), wrapped(grads), value=2.0)
        found += [host, window.take(host)]
        for _ in range(2):
            updates, state = tx.update(wrapped(grads), state, wrapped(params), value=2.0)
            found += [updates, state]
        found += shrewjax.flush(tx, tx.update(wrapped(grads), state, wrapped(params))[1], wrapped(params))
    assert [x.micro_step for x in (alone[0], alone[3], alone[5])] == [1, 1, 0]
    assert bits(alone) == bits(in_a_tree)


# --- flush --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("traced", [False, True])
def test_flush_with_the_last_micro_batch_divides_by_what_came(traced):
    tx = recording_window(8) if traced else shrewjax.accumulate(recorder(), 8)
    steps = [(vector(2.0), {"weight": 3}), (vector(6.0), {"weight": 1, "flush": True})]
    updates, state = run_compiled(tx, steps, vector(0.0))[-1]
    assert float(updates[0]) == pytest.approx(3.0)
    assert (int(state.micro_step), float(state.sum_of_weights), int(state.windows)) == (0, 0, 1)


@pytest.mark.usefixtures("as_users_have_it")  # Optax adds float32 to bfloat16
@pytest.mark.parametrize("jitted", [False, True])
def test_flush_closes_what_is_open_and_leaves_an_empty_window_alone(jitted):
    params = jnp.zeros(1, jnp.bfloat16)
    tx = shrewjax.accumulate(lenient(optax.adam(0.1)), 4)
    flush = quick_jit(lambda s, p: shrewjax.flush(tx, s, p)) if jitted else lambda s, p: shrewjax.flush(tx, s, p)
    empty = tx.init(params)
    assert bits(flush(empty, params)) == bits((params, empty))

    state = run(tx, [(jnp.asarray([2.0], jnp.bfloat16), {}), (jnp.asarray([4.0], jnp.bfloat16), {})], params)[-1][1]
    params, state = flush(state, params)
    assert params.dtype == jnp.bfloat16
    assert float(params[0]) == pytest.approx(-0.1, rel=1e-2)
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
        ValueError,
        match=r"tx must be the transformation of accumulate.*inside tx, call .*weight=0, flush=True",
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


def test_flush_with_its_arguments_in_another_order_names_its_own():
    params, tx = vector(0.0), shrewjax.accumulate(recorder(), 4)
    with pytest.raises(ValueError, match=r"in the order flush\(tx, opt_state, params\)"):
        shrewjax.flush(tx, params, tx.init(params))


@pytest.mark.parametrize("nonfinite", POLICIES)
def test_flush_of_a_window_with_a_bad_micro_batch(nonfinite):
    params, tx = vector(0.0), shrewjax.accumulate(recorder(), 4, nonfinite=nonfinite)
    state = run(tx, [(vector(2.0), {}), (vector(np.nan), {})], params)[-1][1]
    found, state = shrewjax.flush(tx, state, params)  # the average, because the parameters are 0
    expected = {"propagate": np.nan, "drop_micro_batch": 2, "drop_window": 0, "extend_window": 2}[nonfinite]
    np.testing.assert_array_equal(found, [expected])
    assert int(state.micro_step) == 0
    assert not bool(state.window_bad)
    assert int(state.windows) == (nonfinite != "drop_window")


def test_flush_discards_a_window_that_another_policy_has_found_bad():
    params, dropping = vector(0.0), shrewjax.accumulate(recorder(), 4, nonfinite="drop_window")
    state = run(dropping, [(vector(2.0), {}), (vector(np.nan), {})], params)[-1][1]
    found, state = shrewjax.flush(shrewjax.accumulate(recorder(), 4), state, params)
    np.testing.assert_array_equal(found, params)
    assert not bool(state.applied)


# --- apply_gradients ----------------------------------------------------------------------------------------------


AROUND_SGD = {
    "sgd": lambda sgd: sgd,
    "accumulate": lambda sgd: shrewjax.accumulate(sgd, 3),
    "chain": lambda sgd: optax.chain(shrewjax.clip_by_value(1.0), shrewjax.accumulate(sgd, 3)),
    "MultiSteps": lambda sgd: lenient(optax.MultiSteps(sgd, 3).gradient_transformation()),
    "guard": shrewjax.skip_nonfinite,
    "guard in accumulate": lambda sgd: shrewjax.accumulate(shrewjax.skip_on_spike(sgd, warmup_steps=1), 2),
    "accumulate in guard": lambda sgd: shrewjax.skip_nonfinite(shrewjax.accumulate(sgd, 2)),
}
# "chain" stands for what has no window or guard outside.
OF_EACH_KIND = "accumulate", "chain", "guard", "guard in accumulate", "accumulate in guard"


@pytest.mark.parametrize("name", [*OF_EACH_KIND, *thorough("sgd", "MultiSteps")])
def test_apply_gradients_is_update_and_apply_updates(name):
    tx, params = AROUND_SGD[name](optax.sgd(0.1, momentum=0.9)), tree_of()
    both, one_by_one = quick_jit(lambda g, s, p: shrewjax.apply_gradients(tx, g, s, p)), stepper(tx)
    p = q = params
    s = t = tx.init(params)
    for i in range(7):
        grads = tree_of(i, scale=1e3 if i == 5 else 1.0)
        p, s = both(grads, s, p)
        q, t = one_by_one(grads, t, q)
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


# --- functions that inner calls -----------------------------------------------------------------------------------


X, Y = np.float32([[1, 2], [3, 4]]), np.float32([[1, 1], [2, 8]])


def squares(w, x, y):
    return jnp.mean((w * x - y) ** 2)


def searched(tx, value_fn, calls, *, at=(0, 1)):
    """Where a line search ends with the micro-batches in this order. `value_fn` has those of a call as arguments."""
    with jax.numpy_dtype_promotion("standard"):

        @quick_jit
        def step(w, state, x, y):
            value, grad = jax.value_and_grad(squares)(w, x, y)
            given = {"value": value, "grad": grad, "value_fn": value_fn, "x": x, "y": y}
            updates, state = tx.update(grad, state, w, **given)
            return optax.apply_updates(w, updates), state

        w, state = jnp.float32(0), tx.init(jnp.float32(0))
        for i in range(calls):
            w, state = step(w, state, X[at[i % 2]], Y[at[i % 2]])
    return float(w)


SEARCHES = {
    "lbfgs": optax.lbfgs,
    "backtracking": lambda: optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(15)),
}


@pytest.mark.parametrize("search", ["lbfgs", *thorough("backtracking")])
def test_a_line_search_whose_function_is_that_of_the_window_finds_the_minimum(search):
    tx, whole = shrewjax.accumulate(SEARCHES[search](), 2), shrewjax.micro_batched(squares, 2)
    functions = {
        "plain": lambda w, x, y: squares(w, X, Y) + 0 * jnp.sum(x + y),
        "micro-batches": lambda w, x, y: whole(w, X, Y) + 0 * jnp.sum(x + y),
    }
    for name, function in functions.items():
        assert searched(tx, function, 40) == pytest.approx(np.sum(X * Y) / np.sum(X * X), rel=1e-3), name


@pytest.mark.parametrize("at", [(0, 1), (1, 0)], ids=str)
@pytest.mark.parametrize("search", ["lbfgs", *thorough("backtracking")])
def test_a_line_search_whose_function_is_that_of_the_last_micro_batch_ends_as_in_multisteps(search, at):
    """Its steps then compare values of one function. With the window's mean as the first one, it would stop."""
    ours = searched(shrewjax.accumulate(SEARCHES[search](), 2), squares, 16, at=at)
    theirs = searched(optax.MultiSteps(SEARCHES[search](), 2), squares, 16, at=at)
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_a_line_search_does_not_hand_its_own_arguments_to_its_function():
    """Optax takes `value`, `grad` and `value_fn` for itself. This function would be 0 with a value."""

    def function(w, x, y, value=None):
        return squares(w, x, y) if value is None else 0 * value

    ours = searched(shrewjax.accumulate(optax.lbfgs(), 1), function, 8)
    assert ours == pytest.approx(searched(optax.lbfgs(), function, 8), rel=1e-5)


def test_the_function_of_a_line_search_runs_in_closing_calls_alone():
    runs = []

    def seen(w, x, y):
        jax.debug.callback(lambda: runs.append(1))
        return squares(w, x, y)

    tx = shrewjax.accumulate(optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(1)), 4)
    searched(tx, seen, 3)
    jax.effects_barrier()
    assert not runs
    searched(tx, seen, 4)
    jax.effects_barrier()
    assert runs


# --- every optimizer, real data, value checks ---------------------------------------------------------------------


# Their updates need more than gradients and parameters.
ARGUMENTS = {
    "lbfgs": {"learning_rate": 0.1, "linesearch": None},
    "noisy_sgd": {"learning_rate": 0.1, "key": 0},
    "polyak_sgd": {},
}

DEPRECATED = {"optimistic_adam"}

EXPORTED = {n for n in dir(optax) if getattr(getattr(optax, n), "__module__", "") == "optax._src.alias"}


# One of each kind of state: factored moments, one moment, past steps, a key, the loss. CI runs the others.
# No state, and two moments, are in `test_trajectory_is_that_of_multisteps`.
ONE_OF_A_KIND = "adafactor", "lion", "lbfgs", "noisy_sgd", "polyak_sgd"
OTHERS = sorted((EXPORTED | {"nadam", "nadamw"}) - DEPRECATED - {*ONE_OF_A_KIND})


@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types")  # lbfgs alone
@pytest.mark.parametrize("name", [*ONE_OF_A_KIND, *thorough(*OTHERS)])
def test_every_optimizer_of_optax_runs_with_parameters_and_gradients_of_two_dtypes(name):
    """Updates have the dtype that they have without a window, of gradients in the wider of the two dtypes."""
    inner = optax.with_extra_args_support(getattr(optax, name)(**ARGUMENTS.get(name, {"learning_rate": 0.01})))
    tx = shrewjax.accumulate(inner, 2)
    with jax.numpy_dtype_promotion("standard"):
        for param, grad in itertools.product(["float32", "bfloat16"], repeat=2):
            params = {"w": jnp.ones((3, 4), param), "b": jnp.ones(4, param)}
            grads = jax.tree.map(lambda x, grad=grad: x.astype(grad), params)
            state = jax.eval_shape(tx.init, params)

            def step(tx, grads, state, params=params):
                return jax.eval_shape(lambda g, s, p: tx.update(g, s, p, value=jnp.float32(1)), grads, state, params)

            wide = jax.tree.map(lambda g, x: g.astype(jnp.promote_types(g.dtype, x.dtype)), grads, params)
            if (name, param, grad) == ("novograd", "bfloat16", "float32"):
                for either in (inner, tx):  # Optax's two branches differ in dtype
                    with pytest.raises(TypeError, match="branches must have equal output types"):
                        step(either, grads, jax.eval_shape(either.init, params))
                continue
            expected, _ = step(inner, wide, jax.eval_shape(inner.init, params))
            updates, new_state = step(tx, grads, state)
            assert jax.tree.map(lambda x: x.dtype, updates) == jax.tree.map(lambda x: x.dtype, expected)
            assert jax.tree.map(lambda x: x.dtype, new_state) == jax.tree.map(lambda x: x.dtype, state)


@pytest.mark.parametrize("dtype", ["float16", *thorough("bfloat16")])
def test_narrow_gradients_of_float32_parameters_take_the_path_of_wide_ones(dtype):
    """In float16, the squares of small gradients are 0, and Adam would divide by them."""
    tx = shrewjax.accumulate(lenient(optax.adam(1e-3)), 2)
    step = stepper(tx)

    def path(cast):
        params, state = jnp.zeros(8), tx.init(jnp.zeros(8))
        for g in np.random.default_rng(0).normal(size=(8, 8), scale=1e-3):
            params, state = step(cast(jnp.asarray(g, dtype)), state, params)
        return params

    assert_close(path(lambda g: g), path(lambda g: g.astype(jnp.float32)), rtol=1e-5)


@pytest.mark.parametrize("name", [*ONE_OF_A_KIND, *thorough(*OTHERS)])
def test_every_optimizer_of_optax_takes_the_steps_it_takes_in_multisteps(name):
    make = lambda: getattr(optax, name)(**ARGUMENTS.get(name, {"learning_rate": 0.01}))  # noqa: E731
    matrices = lambda seed: {k: v for k, v in tree_of(seed).items() if v.ndim}  # noqa: E731 (sm3 takes no scalars)
    params = matrices(0)

    def trajectory(tx):
        step, p, state = stepper(tx), params, tx.init(params)
        for i in range(9):
            p, state = step(matrices(i + 1), state, p, value=1.0 + i // 3)
        return p

    ours = trajectory(shrewjax.accumulate(lenient(make()), 3))
    multi_steps = optax.MultiSteps(make(), 3)
    theirs = trajectory(optax.GradientTransformationExtraArgs(multi_steps.init, multi_steps.update))
    assert is_near(ours, theirs, 1e-5)
    for x, start in zip(*map(jax.tree.leaves, (ours, params)), strict=True):
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
    params = {k: np.float32(rng.normal(size=s) / width**0.5) for k, s in shapes.items()}

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
        means = [jax.device_get(mean_gradient(params, x, n)) for x, n in zip(texts, lengths, strict=True)]
    steps = [(mean, {"weight": int(n)}) for mean, n in zip(means, lengths, strict=True)]
    sums = [(jax.tree.map(lambda g, n=weight["weight"]: g * np.float32(n), mean), weight) for mean, weight in steps]
    for reduction, given in (("mean", steps), ("sum_over_weights", sums)):
        average, _ = run(shrewjax.accumulate(recorder(), 8, reduction=reduction), given, params)[-1]
        assert is_near(average, whole, 1e-5)
    assert not is_near(np.mean([mean["in"] for mean in means], axis=0), whole["in"], 1e-2)  # the mean of means


@pytest.mark.parametrize(
    ("change", "weight", "message"),
    [
        ({}, 2.0, None),
        ({}, -1.0, "weight"),
        ({}, np.nan, "weight"),
        ({}, 0.0, None),
        ({}, 1e-20, "weight must be 0, or between"),
        ({}, 2.0**110, "weight must be 0, or between"),
        ({"micro_step": jnp.int32(3)}, 1.0, "micro_step must be between 0 and 2"),
        ({"micro_step": jnp.int32(-1)}, 1.0, "micro_step"),
        ({"sum_of_weights": jnp.float32(np.inf)}, 1.0, "sum_of_weights"),
        ({"sum_of_weights": jnp.float32(2.0**101)}, 1.0, "sum_of_weights must be 0, or between"),
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
    with pytest.raises(ValueError, match="must contain a window"):
        shrewjax.check_window(optax.EmptyState(), 3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["adam", "clip"])
def test_float32_gradients_of_narrow_parameters_stay_wide_in_inner(name, dtype):
    """In float16, Adam's square of 1e-3 is 0, and the norm of 1e5 is infinite. The oracle is Optax without a window."""
    inner = {"adam": optax.adam(1e-2), "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))}[name]
    params, grad = {"w": jnp.full(3, 0.5, dtype)}, {"w": jnp.full(3, {"adam": 1e-3, "clip": 1e5}[name], "f")}
    with jax.numpy_dtype_promotion("standard"):
        expected, _ = inner.update(grad, inner.init(params), params)
        new_params = optax.apply_updates(params, expected)
        tx = shrewjax.accumulate(inner, 2)
        first = tx.init(params)
        _, opened = tx.update(grad, first, params)
        updates, state = tx.update(grad, opened, params)
        assert_close(updates, expected, rtol=1e-6)
        assert updates["w"].dtype == jnp.float32
        applied, other = shrewjax.apply_gradients(tx, grad, opened, params)
        flushed, last = shrewjax.flush(tx, opened, params)
        for found in (applied, flushed):
            np.testing.assert_array_equal(found["w"], new_params["w"])
        for after in (state, other, last):
            assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, first)


@pytest.mark.parametrize("call", [shrewjax.flush, lambda tx, s, p: shrewjax.apply_gradients(tx, vector(1.0), s, p)])
def test_a_step_without_parameters_is_an_error_that_names_them(call):
    tx = shrewjax.accumulate(optax.sgd(1.0), 2)
    with pytest.raises(ValueError, match=r"params must be the parameters, got None\. Pass them after the state"):
        call(tx, tx.init(vector(0.0)), None)


def test_a_window_that_is_too_long_is_named_with_both_numbers_outside_of_jit():
    tx, params = shrewjax.accumulate(optax.sgd(1.0), 4), vector(0.0)
    _, state = run(tx, [(vector(1.0), {})] * 3, params)[-1]
    with pytest.raises(AssertionError, match=r"^micro_step must be between 0 and 1, for accum_steps=2, got 3$"):
        shrewjax.check_window(state, accum_steps=2)


def test_a_state_of_another_import_of_the_package_is_named_as_such():
    of_another = type("AccumulateState", (tuple,), {})()
    tx = shrewjax.accumulate(optax.sgd(1.0), 4)
    with pytest.raises(ValueError, match=r"got AccumulateState\. .* if shrewjax was imported again, call tx\.init"):
        tx.update(vector(1.0), of_another, vector(0.0))


# --- what inner gets beside gradients, and states that are set by hand ---------------------------------------------


def test_flush_hands_a_loss_to_a_transformation_that_declares_one_and_to_no_other():
    def strict(updates, state, params=None, **extra_args):
        assert not extra_args
        return updates, state

    def declaring(updates, state, params=None, *, value):
        return updates, value

    for update, first, value in ((strict, (), {}), (declaring, jnp.float32(0), {"value": jnp.float32(2)})):
        inner = optax.GradientTransformationExtraArgs(lambda params, first=first: first, update)
        tx = shrewjax.accumulate(optax.chain(optax.sgd(0.1), inner), 4)
        params = jnp.ones(3)
        _, state = tx.update(params, tx.init(params), params, **value)
        params, state = shrewjax.flush(tx, state, params)
        np.testing.assert_allclose(params, 0.9)
    assert state.inner_state[1] == 2


@pytest.mark.parametrize(
    "number", [0.5, np.float64(0.5), np.float32(0.5), np.array(0.5)], ids=lambda x: type(x).__name__
)
@pytest.mark.parametrize(
    "wrap", [lambda tx: shrewjax.accumulate(tx, 2), shrewjax.skip_nonfinite, shrewjax.skip_on_spike]
)
def test_a_hyperparameter_may_be_set_by_hand_to_a_number(wrap, number):
    tx = wrap(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    params = jnp.ones(3)
    state = tx.init(params)
    state.inner_state.hyperparams["learning_rate"] = number
    for _ in range(2):
        updates, state = tx.update(params, state, params)
    np.testing.assert_allclose(updates, -0.5)
