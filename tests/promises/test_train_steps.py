"""What training scripts do and tests seldom do.

Gradients that the compiler knows, because they come out of `jax.grad` in the same program; steps outside of jit.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import TRANSFORMATIONS, assert_close, bits, small_tree
from speed import quick_jit

import shrewjax

each = pytest.mark.parametrize("name", TRANSFORMATIONS)
pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("one_device")]


# --- gradients that come out of jax.grad ------------------------------------------------------------------------


def layer(seed, dtype):
    """No bias, because programs compile leaf by leaf."""
    return {"kernel": jnp.asarray(np.random.default_rng(seed).normal(size=(2, 3)), dtype)}


def parameters(dtype):
    """Six numbers that are trained and eight that are not: the gradients of these are constants of the program."""
    return {"live": layer(0, dtype), "frozen": layer(1, dtype), "unused": jnp.ones(2, dtype)}


LABELS = {"live": "on", "frozen": "off", "unused": "off"}
TRAINED = {"live": True, "frozen": False, "unused": False}


def loss(params, x):
    live, frozen = params["live"], jax.lax.stop_gradient(params["frozen"])
    return jnp.sum((x @ live["kernel"] + x @ frozen["kernel"]) ** 2)


def loss_of_nothing(params, x):
    return jnp.sum(x)


def batches(dtype):
    return [jnp.asarray(x, dtype) for x in ([1.0, -0.5], [0.25, 0.75], [-1.5, 1.0])]


def train_step(tx, loss):
    """Returns the step of one transformation. One program of all of them would take a third longer to compile."""

    def step(params, state, x):
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    return step


def arguments(tx, loss, make, batches):
    """Parameters and states go in and come out."""
    step = quick_jit(train_step(tx, loss))
    params, state = make(), tx.init(make())
    for x in batches:
        params, state = step(params, state, x)
        yield params, state


def closed_over(tx, loss, make, batches):
    """The parameters are constants of the program, and stay where they are."""
    step = quick_jit(functools.partial(train_step(tx, loss), make()))
    state = tx.init(make())
    for x in batches:
        params, state = step(state, x)
        yield params, state


def made_inside(tx, loss, make, batches):
    """The parameters and the states are made by the program that makes the first step."""
    yield quick_jit(lambda x: train_step(tx, loss)(make(), tx.init(make()), x))(batches[0])


# Above the eight zeros of what is not trained, the 75th percentile is this one of the six numbers that are left.
OF_THE_OTHERS = 100 * (0.75 * 13 - 8) / 5
CHAINED = {name: optax.chain(make(), optax.sgd(0.1)) for name, make in TRANSFORMATIONS.items()}
ALONE = CHAINED | {"percentile above zeros": optax.chain(shrewjax.clip_by_percentile(OF_THE_OTHERS), optax.sgd(0.1))}


@functools.cache
def step_alone(name):
    """The step where there is nothing but the parameters that are trained."""

    def step(live, others, state, x):
        return train_step(ALONE[name], lambda live, x: loss({"live": live, **others}, x))(live, state, x)

    return quick_jit(step)


@functools.cache
def steps_alone(name, dtype, moves):
    """In float64, from numbers of that dtype: the parameters and the measurements after each step."""
    given, xs = jax.tree.map(lambda x: np.asarray(x, np.float64), (parameters(dtype), batches(dtype)))
    live, steps = given.pop("live"), []
    with jax.enable_x64(True):
        state = ALONE[name].init(live)
        for x in xs:
            stepped, state = step_alone(name)(live, given, state, x)
            live = stepped if moves else live
            steps.append((stepped, measured(state[0])))
    return steps


def has_nan(tree):
    return any(np.isnan(np.asarray(x, np.float64)).any() for x in jax.tree.leaves(tree))


def assert_no_nan(params, state):
    """Nor in the state, where a NaN stays in a history or an average. An infinity there is a threshold."""
    assert not has_nan(params)
    assert not has_nan(state)


def assert_stays(params, start):
    """Untrained parameters stay. A zero may change its sign, because XLA takes 0 + x for x if it knows the 0."""
    for part in set(start) - {"live"}:
        jax.tree.map(np.testing.assert_array_equal, params[part], start[part])


def measured(state):
    """Without shares of all units or elements, which depend on how many there are."""
    return {k: v for k, v in shrewjax.metrics(state).items() if "clipped_" not in k}


def assert_as_alone(params, rule_state, alone, rtol):
    expected, expected_measured = alone
    assert_close(params["live"], expected, rtol=rtol, atol=rtol)
    assert_close(measured(rule_state), expected_measured, rtol=rtol)


def where_zeros_count(name):
    """A zero adds nothing to a norm, and is the smallest magnitude of a percentile, which counts it."""
    return "percentile above zeros" if name == "clip_by_percentile" else name


PRECISION = {"float32": 1e-5, "bfloat16": 4e-2, "float64": 1e-6}
CASES = [
    (arguments, "float32"),
    (closed_over, "float32"),
    (made_inside, "bfloat16"),
    (made_inside, "float64"),
]


def precision(dtype):
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


# Each transformation where parameters and states go in and come out, and each other situation with two of them.
OF_EACH = [
    *((*CASES[0], name) for name in TRANSFORMATIONS),
    (closed_over, "float32", "adaptive_grad_clip"),
    (closed_over, "float32", "clip_by_norm_zscore"),
    (made_inside, "bfloat16", "clip_by_percentile"),
    (made_inside, "bfloat16", "accumulate"),
    (made_inside, "float64", "clip_by_leaf_norm_ema"),
    (made_inside, "float64", "skip_on_spike"),
]


@pytest.mark.combinations
@pytest.mark.parametrize(("situation", "dtype", "name"), OF_EACH, ids=lambda x: getattr(x, "__name__", x))
def test_parameters_that_are_not_trained_stay_and_the_others_do_not_notice(situation, dtype, name):
    with precision(dtype):
        steps = situation(CHAINED[name], loss, functools.partial(parameters, dtype), batches(dtype))
        alone = steps_alone(where_zeros_count(name), dtype, moves=situation is not closed_over)
        for (params, state), expected in zip(steps, alone, strict=False):
            assert_no_nan(params, state)
            assert_stays(params, parameters(dtype))
            assert_as_alone(params, state[0], expected, PRECISION[dtype])


@functools.cache
def steps_of_no_loss(name):
    start = functools.partial(layer, 0, jnp.float32)
    return list(arguments(CHAINED[name], loss_of_nothing, start, batches(jnp.float32)))


@each
def test_loss_that_uses_no_parameter_leaves_all_of_them(name):
    for params, state in steps_of_no_loss(name):
        assert_no_nan(params, state)
        assert bits(params) == bits(layer(0, jnp.float32))


def test_loss_that_uses_no_parameter_is_recorded_as_a_norm_of_zero():
    def state(name):
        return steps_of_no_loss(name)[-1][1][0]

    history = state("clip_by_norm_percentile").history
    assert (int(history.filled), *history.values.tolist()) == (3, 0, 0, 0, 0)
    zscore = state("clip_by_norm_zscore")
    assert (int(zscore.recorded), float(zscore.mean), float(zscore.std)) == (3, 0, 0)
    assert not any(np.any(x) for x in jax.tree.leaves(state("clip_by_leaf_norm_ema").norm_ema))
    assert int(state("skip_on_spike").skipped) == int(state("skip_nonfinite").skipped) == 0


def partitioned(name):
    rules = {"on": TRANSFORMATIONS[name](), "off": TRANSFORMATIONS[name]()}
    return optax.chain(optax.partition(rules, LABELS), optax.sgd(0.1))


def masked(name):
    return optax.chain(optax.masked(TRANSFORMATIONS[name](), TRAINED), optax.sgd(0.1))


def guarded(name):
    return shrewjax.skip_nonfinite(shrewjax.skip_on_spike(CHAINED[name]))


# How to wrap a transformation and SGD behind it, and where the transformation's state is then.
WRAPPERS = {
    "partition": (partitioned, lambda state: state[0].inner_states["on"].inner_state),
    "masked": (masked, lambda state: state[0].inner_state),
    "accumulate": (lambda name: shrewjax.accumulate(CHAINED[name], 2), lambda state: state.inner_state[0]),
    "both guards": (guarded, lambda state: state.inner_state.inner_state[0]),
}


# Each wrapper around a state of another kind; `CASES` has every transformation.
WRAPPED = [
    ("partition", "clip_by_leaf_norm_ema"),
    ("masked", "clip_by_percentile"),
    ("accumulate", "adaptive_grad_clip"),
    ("both guards", "clip_by_norm_zscore"),
]


@pytest.mark.parametrize(("wrapper", "name"), WRAPPED)
def test_inside_a_wrapper_parameters_that_are_not_trained_stay_and_the_others_do_not_notice(wrapper, name):
    wrap, state_of_rule = WRAPPERS[wrapper]
    calls = 2 if wrapper == "accumulate" else 1  # there the average of a gradient and itself
    start = parameters(jnp.float32)
    given = [x for x in batches(jnp.float32) for _ in range(calls)]
    steps = list(arguments(wrap(name), loss, lambda: start, given))
    for params, state in steps:
        assert_no_nan(params, state)
        assert_stays(params, start)
    same = name if wrapper in ("partition", "masked") else where_zeros_count(name)
    alone = steps_alone(same, "float32", moves=True)
    for (params, state), expected in zip(steps[calls - 1 :: calls], alone, strict=True):
        assert_as_alone(params, state_of_rule(state), expected, PRECISION["float32"])


# --- derivatives ------------------------------------------------------------------------------------------------


CLIPS_TO = {
    "clip_grad_norm": lambda limit, grads, params: shrewjax.clip_grad_norm(grads, limit)[0],
    "adaptive_grad_clip": lambda limit, grads, params: update_once(shrewjax.adaptive_grad_clip(limit), grads, params),
}


def slopes_and_clipped(clip):
    """Derivatives of a clip's sum, by factors on the loss and on a kernel, and what is summed; all is made inside."""

    def total(of_loss, of_kernel, limit):
        params, x = parameters(jnp.float32), jnp.asarray([1.0, -0.5])
        grads = jax.grad(lambda params: of_loss * loss(params, x))(params)
        params["live"]["kernel"] *= of_kernel
        clipped = CLIPS_TO[clip](limit, grads, params)
        return sum(map(jnp.sum, jax.tree.leaves(clipped))), clipped

    return quick_jit(jax.grad(total, argnums=(0, 1), has_aux=True))


def times(factor, tree):
    return jax.tree.map(lambda x: factor * x, tree)


def update_once(tx, grads, params):
    return tx.update(grads, tx.init(params), params)[0]


@pytest.mark.parametrize("clip", CLIPS_TO)
def test_derivative_of_a_clip_is_the_rules_where_gradients_and_parameters_are_made_inside(clip):
    slopes, one = slopes_and_clipped(clip), np.float32(1)
    (by_loss, by_kernel), unclipped = slopes(one, one, np.float32(1e6))
    np.testing.assert_allclose([by_loss, by_kernel], [sum(x.sum() for x in jax.tree.leaves(unclipped)), 0], rtol=1e-5)
    # A clipped gradient is as long as its limit, however long it was. AGC's limit grows with the kernel.
    (by_loss, by_kernel), clipped = slopes(one, one, np.float32(1e-3))
    kernel = clipped["live"]["kernel"].sum() if clip == "adaptive_grad_clip" else 0
    np.testing.assert_allclose([by_loss, by_kernel], [0, kernel], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["clip_by_norm_percentile", "clip_by_norm_zscore", "clip_by_leaf_norm_ema"])
def test_derivative_through_steps_of_equal_norms_is_finite(name):
    """That of the third update's sum, by a factor on three gradients of one norm."""
    tx, params = TRANSFORMATIONS[name](), layer(0, jnp.float32)

    def last(factor):
        grads = times(factor, layer(1, jnp.float32))
        carry = grads, tx.init(params)
        (updates, _), _ = jax.lax.scan(lambda carry, _: (tx.update(grads, carry[1], params), None), carry, length=3)
        return jnp.sum(updates["kernel"])

    assert np.isfinite(quick_jit(jax.grad(last))(np.float32(1)))


# --- constants --------------------------------------------------------------------------------------------------


def constants(dtype, count=10):
    """Leaves whose squares, or whose norms, leave the range of the dtype or of float32, and an ordinary one."""
    info = jnp.finfo(dtype)
    smallest, tiny, largest = (float(x) for x in (info.smallest_subnormal, info.tiny, info.max))
    values = [[3.0, 4.0, -0.0], [-0.0, 0.0], [-smallest, 0.0, 7 * smallest], [1e-30, 1.0, -1e-20], [1e30, -1.0]]
    values += [[x, x, -x] for x in (tiny, largest, 1e-20, 1e20, 1e-30, 1e30)]
    leaves = [np.clip(np.asarray(x), -largest, largest) for x in values[:count]]
    with np.errstate(under="ignore"):
        if dtype == "complex64":
            return [(x - 1j * x[::-1]).astype(dtype) for x in leaves]
        return [x.astype(info.dtype) for x in leaves]


# Narrower and complex leaves in one program: without others beside them, some norms are subnormal, which XLA flushes
# if it does not know them.
KINDS = {
    "float32": [("float32", 11)],
    "narrower and complex": [("bfloat16", 3), ("float16", 3), ("complex64", 7)],
    "float64": [("float64", 7)],
}
# The other clips do the arithmetic of one of these, or compare bits.
CLIPS = ("clip_by_global_norm", "clip_by_value", "adaptive_grad_clip", "clip_by_block_rms", "clip_by_leaf_norm_ema")


def clipped_by(tx):
    return lambda leaves: tx.update(leaves, tx.init(leaves), leaves)


def norms_of_order(p):
    return lambda leaves: [shrewjax.grad_norm(leaves[i::4], p) for i in range(4)]


# Leaf by leaf where one call does that, and of a few leaves together.
ORDERS = (1, 2, 3, np.inf)
NORMS_AND_CLIPS = (
    {f"norms of order {p}": norms_of_order(p) for p in ORDERS}
    | {f"leaf norms of order {p}": clipped_by(shrewjax.clip_by_leaf_norm(0.5, ord=p)) for p in ORDERS}
    | {name: clipped_by(TRANSFORMATIONS[name]()) for name in CLIPS}
)


# Cases that have every order and every kind of dtype, and the clips that do arithmetic of their own. Norms of
# order 2 are in the clip by them.
CONSTANTS = [
    ("norms of order 1", "float32"),
    ("norms of order 3", "float32"),
    ("leaf norms of order 2", "float32"),
    ("leaf norms of order inf", "float64"),
    ("clip_by_global_norm", "narrower and complex"),
    ("adaptive_grad_clip", "float32"),
    ("clip_by_leaf_norm_ema", "float64"),
]


@pytest.mark.parametrize(("name", "kind"), CONSTANTS)
def test_constants_of_the_program_have_the_norms_and_clips_that_arguments_have(name, kind):
    """But for rounding: XLA adds up constants in another order, and has other functions for their powers."""
    with precision(kind):
        function, leaves = NORMS_AND_CLIPS[name], [x for dtype, count in KINDS[kind] for x in constants(dtype, count)]
        found, expected = quick_jit(lambda: function(leaves))(), quick_jit(function)(leaves)
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        rtol = 4 * float(jnp.finfo(x.dtype).eps) if jnp.issubdtype(x.dtype, jnp.inexact) else 0
        x, y = np.asarray(x, np.complex128), np.asarray(y, np.complex128)
        np.testing.assert_allclose(x, y, rtol=rtol, err_msg=jax.tree_util.keystr(path))


def test_large_constants_have_the_norms_that_arguments_have():
    """Beyond 2**14 elements norms scale in another way. Powers of two: their sums are exact in any order."""

    def norms(leaves):
        return [shrewjax.grad_norm([x], p) for x in leaves for p in (1, 2)]

    def leaves():
        return [jnp.full(2**14 + 2**12, 2.0**e, jnp.float32) for e in (-100, 0, 100)] + [jnp.zeros(2**14 + 1)]

    assert bits(quick_jit(lambda: norms(leaves()))()) == bits(quick_jit(norms)(leaves()))


# --- outside of jit ---------------------------------------------------------------------------------------------


def small(seed=0, scale=1.0):
    return jax.device_put(small_tree(seed, scale))


@contextlib.contextmanager
def compilations():
    """Counts what is compiled meanwhile."""
    compiled = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


EAGER = (
    TRANSFORMATIONS
    | {
        f"accumulate, {policy}": functools.partial(shrewjax.accumulate, optax.identity(), 2, nonfinite=policy)
        for policy in ("drop_micro_batch", "drop_window", "extend_window")
    }
    | {
        "accumulate around a guard": lambda: shrewjax.accumulate(shrewjax.skip_nonfinite(optax.trace(0.9)), 2),
        "zero_nonfinite": lambda: shrewjax.skip_nonfinite(
            optax.identity(), max_consecutive=2, at_limit="zero_nonfinite"
        ),
    }
)


def test_what_is_compiled_is_counted():
    with compilations() as compiled:
        jax.jit(lambda x: x + 1)(jnp.ones(3))
    assert compiled


@pytest.mark.parametrize("use", ["update", "apply_gradients"])
@pytest.mark.parametrize("name", EAGER)
def test_outside_of_jit_nothing_is_compiled_after_two_calls(name, use):
    tx, params, grads = EAGER[name](), small(), small(1)
    state = tx.init(params)

    def call(state):
        if use == "update":
            return tx.update(grads, state, params)[1]
        return shrewjax.apply_gradients(tx, grads, state, params)[1]

    for _ in range(2):
        state = call(state)
    with compilations() as compiled:
        for _ in range(2):
            state = call(state)
    assert compiled == []


FUNCTIONS = {
    "grad_norm": shrewjax.grad_norm,
    "grad_norm of order 3": functools.partial(shrewjax.grad_norm, ord=3),
    "clip_grad_norm": lambda grads: shrewjax.clip_grad_norm(grads, 0.5),
    "clip_grad_value": lambda grads: shrewjax.clip_grad_value(grads, 0.5),
    "clip_grad_percentile": lambda grads: shrewjax.clip_grad_percentile(grads, 75),
    "metrics": lambda grads: shrewjax.metrics(TRANSFORMATIONS["clip_by_leaf_norm"]().init(grads)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_outside_of_jit_functions_compile_once(name):
    FUNCTIONS[name](small())
    with compilations() as compiled:
        FUNCTIONS[name](small(1))
    assert compiled == []


@pytest.mark.parametrize("nonfinite", ["propagate", "drop_micro_batch", "drop_window", "extend_window"])
def test_outside_of_jit_a_window_compiles_nothing_after_the_first(nonfinite):
    window = shrewjax.GradAccumulator(2, nonfinite=nonfinite)
    state = window.init(small())

    def fill(state):
        _, state = window.step(state, small(1), weight=2.0)
        return window.step(state, small(2), weight=3.0)[1]

    state = fill(state)
    with compilations() as compiled:
        fill(fill(state))
    assert compiled == []


@each
def test_outside_of_jit_numpy_arrays_do_what_jax_arrays_do(name):
    tx, params, grads = TRANSFORMATIONS[name](), small(), small(1)
    state = tx.init(params)
    as_numpy = functools.partial(jax.tree.map, np.asarray)
    found = tx.update(as_numpy(grads), as_numpy(tx.init(as_numpy(params))), as_numpy(params))
    assert bits(found) == bits(tx.update(grads, state, params))


@pytest.mark.parametrize("name", ["accumulate", "skip_nonfinite", "skip_on_spike"])
def test_outside_of_jit_a_step_that_is_left_out_returns_jax_arrays_too(name):
    tx, params = TRANSFORMATIONS[name](), {"w": np.ones(2, np.float32), "number": 2.0, "count": np.ones(2, np.int32)}
    left_out = {"w": params["w"] * np.float32(np.nan), "number": np.nan, "count": np.zeros(2, np.int32)}
    found, _ = shrewjax.apply_gradients(tx, left_out, tx.init(params), params)
    assert {k: (type(v), v.tolist()) for k, v in found.items()} == {
        "w": (type(jnp.ones(2)), [1, 1]),
        "number": (type(jnp.ones(())), 2),
        "count": (type(jnp.ones(2)), [1, 1]),
    }


@each
def test_outside_of_jit_finite_gradients_make_no_nan_on_the_way(name):
    """Such as a constant, or a value that a `where` leaves out: `jax_debug_nans` stops at it."""
    params = small()
    with jax.debug_nans(True):
        for grads in (small(1), small(1, 1e30), jax.tree.map(jnp.zeros_like, params)):
            tx = TRANSFORMATIONS[name]()
            state = tx.init(params)
            for _ in range(2):
                _, state = tx.update(grads, state, params)
