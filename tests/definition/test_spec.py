"""Every fast path against the definition, evaluated in exact fractions.

Each test runs few examples, and with HYPOTHESIS_PROFILE=search thousands of random ones.
"""

import collections
import contextlib
import functools
import math
from decimal import Decimal
from fractions import Fraction

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import bits, exact, exact_root, thorough
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from speed import users_jit

import shrewjax
from shrewjax import spec

# Few structures, as each is compiled once.
STRUCTURES = {
    "float32": [[((2, 2), "float32"), ((), "float32"), (3, "float32")]],
    "bfloat16": [[((2, 2), "bfloat16"), ((), "bfloat16")]],
    "float16": [[(5, "float16")]],
    "float64": [[((2, 2), "float64"), ((), "float32")]],
    "complex64": [[(2, "complex64"), (2, "float32")]],
    "mixed": [[(3, "bfloat16"), (2, "float16"), ((2, 1), "float32")]],
}
each_kind = pytest.mark.parametrize("kind", STRUCTURES)


def precision(kind):
    return jax.enable_x64(True) if kind == "float64" else contextlib.nullcontext()


def eps(leaf):
    return Fraction(float(jnp.finfo(leaf.dtype).eps))


def tiny(leaf):
    return Fraction(float(jnp.finfo(leaf.dtype).tiny))


def largest(dtype):
    return Fraction(float(jnp.finfo(dtype).max))


def accumulator(leaves):
    """What norms are measured in."""
    return np.dtype("float64" if any(x.dtype == jnp.float64 for x in leaves) else "float32")


# --- gradients and thresholds -----------------------------------------------------------------------------------

TRIANGLES = [[3.0, 4.0], [1.0, 2.0, 2.0], [2.0, 3.0, 6.0], [1.0]]  # vectors whose norms are integers


@st.composite
def gradients(draw, structures):
    """Finite leaves: of like magnitude, of any magnitude, or of a norm that is exact."""
    structure = draw(st.sampled_from(structures))
    narrowest = min((jnp.finfo(dtype) for _, dtype in structure), key=lambda info: info.maxexp)
    exponent = draw(st.integers(narrowest.minexp - narrowest.nmant, narrowest.maxexp))
    how = draw(st.sampled_from(["alike", "alike", "any", "triangle"]))
    triangle = [0.0] * 8
    if how == "triangle":
        triangle = [*draw(st.permutations([*draw(st.sampled_from(TRIANGLES)), 0.0, 0.0])), *triangle]
    leaves = []
    for shape, dtype in structure:
        part = jnp.finfo(dtype).dtype
        shape = (shape,) if isinstance(shape, int) else shape
        shape_of_parts = (*shape, 2) if dtype == "complex64" else shape
        size = math.prod(shape_of_parts)
        noise = draw(st.binary(min_size=8 * size, max_size=8 * size))
        with np.errstate(all="ignore"):
            if how == "any":
                x = np.frombuffer(noise, part)[:size]
            elif how == "alike":
                fractions = np.frombuffer(noise, np.int64) / 2.0**63
                x = np.ldexp(np.where(fractions * 2**12 % 8 < 1, np.copysign(0.0, fractions), fractions), exponent)
            else:
                next_to_nothing = np.float64(jnp.finfo(part).smallest_subnormal) * np.asarray([0, -0.0, 1, -1])
                corner, triangle = triangle[:size], triangle[size:]
                x = np.where(corner, np.ldexp(corner, exponent - 3), next_to_nothing[np.frombuffer(noise, "u8") % 4])
            x = np.where(np.isfinite(x.astype(part)), x, jnp.finfo(part).max).astype(part).reshape(shape_of_parts)
        leaves.append(x[..., 0] + np.complex64(1j) * x[..., 1] if dtype == "complex64" else x)
    return leaves


def rounded(value, dtype):
    """A fraction in a dtype, at most its largest number."""
    return np.dtype(dtype).type(float(min(value, largest(dtype))))


FLOAT32 = np.finfo(np.float32)
SPECIAL = [0.0, -0.0, 1e-45, 1e-40, float(FLOAT32.tiny), 1e-38, 1.0, 1e38, float(FLOAT32.max), math.inf]
# How to make a threshold of a norm.
THRESHOLDS = st.one_of(
    st.tuples(st.just("times"), st.floats(2**-20, 4)),
    st.tuples(st.just("measured, and ulps more"), st.integers(-2, 2)),
    st.tuples(st.just("given"), st.sampled_from(SPECIAL)),
)


def threshold(how, norm, measured):
    kind, number = how
    dtype = measured.dtype
    if kind == "times":
        return rounded(norm * Fraction(number), dtype)
    if kind == "given":
        return dtype.type(number)
    with np.errstate(all="ignore"):
        limit = np.asarray(measured)
        for _ in range(abs(number)):
            limit = np.nextafter(limit, dtype.type(np.inf if number > 0 else 0))
        return np.minimum(limit, np.finfo(dtype).max)


# --- norms ------------------------------------------------------------------------------------------------------


@users_jit
def norm_clips(leaves, limit):
    """The norm and every norm clip in one program, as it is compiling that takes time."""
    whole, by_leaf = shrewjax.clip_by_global_norm(limit), shrewjax.clip_by_leaf_norm(limit)
    return (
        shrewjax.grad_norm(leaves),
        shrewjax.clip_grad_norm(leaves, limit),
        whole.update(leaves, whole.init(leaves)),
        by_leaf.update(leaves, by_leaf.init(leaves)),
        [shrewjax.grad_norm([x]) for x in leaves],
    )


def grad_norm(leaves):
    return np.asarray(norm_clips(leaves, accumulator(leaves).type(1))[0])


def entries(leaves):
    return [g for x in leaves for g in exact(x)]


def flushed(leaves):
    """The most that a norm can lose where subnormal elements are taken for zeros."""
    lost = [tiny(x) ** 2 for x in leaves for g in exact(x) if 0 < abs(g) < tiny(x)]
    return exact_root(sum(lost, Fraction(0)))


def check_norm(leaves, measured):
    """Half an eps for the root, and half an eps for each addition and square under it, which the root halves."""
    g = entries(leaves)
    norm = spec.global_norm_spec(g, sqrt=exact_root)
    if np.isfinite(measured):
        assert abs(Fraction(float(measured)) - norm) <= eps(measured) * norm * (len(g) + 2) / 4 + flushed(leaves)
    else:
        assert measured == np.inf
        assert norm > largest(measured.dtype) * (1 - eps(measured))
    return norm


def check_norm_clip(leaves, clipped, measured, limit):
    """The norm within 2 eps of the threshold, each element within 2 1/2; to the last bit where nothing is to do."""
    # A subnormal threshold may be taken for 0.
    if float(measured) <= limit and limit >= tiny(measured):
        assert bits(clipped) == bits(leaves)
        return
    limit = Fraction(limit)
    norm = spec.global_norm_spec(entries(leaves), sqrt=exact_root)
    wanted = iter(spec.clip_gradients_spec(entries(leaves), limit, sqrt=exact_root))
    lost, allowed = flushed(leaves), Fraction(0)
    for x, y in zip(leaves, clipped, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        for before, got in zip(exact(x), exact(y), strict=True):
            want = next(wanted)
            may_underflow = any(0 < abs(value) < tiny(x) * (1 + 4 * eps(x)) for value in (want, before))
            assert before * got >= 0
            assert abs(got - want) <= eps(x) * abs(want) * 5 / 2 + may_underflow * tiny(x) + lost
            allowed += may_underflow * tiny(x) ** 2
    got = spec.global_norm_spec(entries(clipped), sqrt=exact_root)
    assert abs(got - min(norm, limit)) <= 2 * max(map(eps, leaves)) * limit + exact_root(allowed)


@pytest.mark.thorough
@each_kind
def test_norm_is_the_definitions(kind):
    @given(gradients(STRUCTURES[kind]))
    def check(leaves):
        measured = grad_norm(leaves)
        assert measured.dtype == accumulator(leaves)
        check_norm(leaves, measured)

    with precision(kind):
        check()


@pytest.mark.parametrize("kind", ["float32", *thorough(*(kind for kind in STRUCTURES if kind != "float32"))])
def test_norm_clip_is_the_definitions(kind):
    @given(gradients(STRUCTURES[kind]), THRESHOLDS)
    def check(leaves, how):
        norm = spec.global_norm_spec(entries(leaves), sqrt=exact_root)
        limit = threshold(how, norm, grad_norm(leaves))
        norm_alone, (clipped, measured), (updates, state), _, _ = jax.device_get(norm_clips(leaves, limit))
        assert norm_alone == measured
        check_norm(leaves, measured)
        check_norm_clip(leaves, clipped, measured, float(limit))
        assert bits(updates) == bits(clipped)
        assert state.grad_norm == measured

    with precision(kind):
        check()


@pytest.mark.thorough
@each_kind
def test_leaf_norm_clip_is_the_definitions_for_each_leaf(kind):
    @given(gradients(STRUCTURES[kind]), THRESHOLDS, st.integers(0, 2))
    def check(leaves, how, which):
        leaf = [leaves[which % len(leaves)]]
        norm = spec.global_norm_spec(entries(leaf), sqrt=exact_root)
        limit = threshold(how, norm, np.asarray(rounded(norm, accumulator(leaves))))
        *_, (clipped, _), norms = jax.device_get(norm_clips(leaves, limit))
        for x, y, measured in zip(leaves, clipped, norms, strict=True):
            check_norm_clip([x], [y], measured, float(limit))

    with precision(kind):
        check()


clip_to_python_number = users_jit(shrewjax.clip_grad_norm, static_argnums=1)


@pytest.mark.thorough
def test_norm_clip_to_a_python_number_is_the_definitions():
    """Also one that the gradients' dtype cannot hold."""

    @given(gradients(STRUCTURES["mixed"]), st.sampled_from([1e-320, 1 / 3, 10**40]))
    def check(leaves, limit):
        clipped, measured = jax.device_get(clip_to_python_number(leaves, limit))
        if check_norm(leaves, measured) <= limit and not np.isfinite(measured):
            assert bits(clipped) == bits(leaves)  # the reading overflows, the decision does not
        else:
            check_norm_clip(leaves, clipped, measured, float(limit))

    check()


# --- values -----------------------------------------------------------------------------------------------------


@users_jit
def value_clips(leaves, limit):
    by_transformation, _ = shrewjax.clip_by_value(limit).update(leaves, optax.EmptyState())
    return shrewjax.clip_grad_value(leaves, limit), by_transformation


def toward_zero(limit, dtype):
    """The largest number of a dtype that is not above a threshold >= 0."""
    with np.errstate(all="ignore"):
        nearest = np.asarray(min(limit, float(jnp.finfo(dtype).max)), dtype)
    return (nearest.view(f"i{dtype.itemsize}") - (float(nearest) > limit)).view(dtype)


@pytest.mark.thorough
@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 1.6 * 2.0**-120), ("float32", 1.6 * 2.0**-105)])
def test_value_clip_to_a_small_number_stays_in_the_box(dtype, limit):
    assert float(users_jit(lambda x: shrewjax.clip_grad_value(x, limit))(np.ones((), dtype))) <= limit


def check_value_clip(x, y, limit):
    """The definition to the last bit, with the threshold rounded toward zero; a subnormal one may be flushed to 0."""
    if limit == math.inf:
        assert bits(y) == bits(x)
        return
    if x.dtype.kind == "c":  # the modulus is clipped: the norm clip of the two parts
        parts = exact(x)
        pairs = [parts[i : i + 2] for i in range(0, len(parts), 2)]
        wanted = [part for z in pairs for part in spec.clip_gradients_spec(z, Fraction(limit), sqrt=exact_root)]
        for want, got in zip(wanted, exact(y), strict=True):
            assert abs(got - want) <= 3 * eps(x) * Fraction(limit) + 2 * tiny(x)
        return
    bound = toward_zero(limit, x.dtype)
    before = np.asarray(x).ravel()
    got = np.asarray(y).ravel()
    bounds = [bound, bound * 0] if 0 < bound < jnp.finfo(x.dtype).tiny else [bound]
    wanted = [np.asarray(spec.clip_by_value_spec(list(before), b[()]), x.dtype) for b in bounds]
    assert any(np.array_equal(got, want, equal_nan=True) for want in wanted)
    if limit >= float(FLOAT32.tiny):
        inside = np.abs(before.astype(np.float64)) <= limit
        assert bits(got[inside]) == bits(before[inside])


@pytest.mark.thorough
@each_kind
def test_value_clip_is_the_definitions(kind):
    @given(
        gradients(STRUCTURES[kind]),
        st.integers(0, 8),
        THRESHOLDS,
        st.sampled_from([None, math.nan, math.inf, -math.inf]),
    )
    def check(leaves, which, how, special):
        size = max(abs(g) for g in [*entries(leaves[which % len(leaves) :]), Fraction(0)])
        limit = abs(threshold(how, size, np.asarray(rounded(size, accumulator(leaves)))))
        if special is not None and leaves[0].dtype.kind != "c":
            first = leaves[0].copy()
            first.flat[0] = special
            leaves = [first, *leaves[1:]]
        clipped, by_transformation = jax.device_get(value_clips(leaves, limit))
        assert bits(by_transformation) == bits(clipped)
        for x, y in zip(leaves, clipped, strict=True):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            check_value_clip(x, y, float(limit))

    with precision(kind):
        check()


# --- the definition itself --------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "root"),
    [
        (float, math.sqrt),
        (np.float32, np.sqrt),
        (np.longdouble, np.sqrt),
        (Fraction, exact_root),
        (Decimal, Decimal.sqrt),
    ],
)
def test_definition_runs_on_any_scalar(number, root):
    def numbers(*values):
        return [number(x) for x in values]

    assert spec.global_norm_spec(numbers(3, 4), sqrt=root) == 5
    assert spec.clip_gradients_spec(numbers(3, 4), number(10), sqrt=root) == [3, 4]
    halved = spec.clip_gradients_spec(numbers(3, 4), number(-5) / 2, sqrt=root)
    assert halved == [1.5, 2]
    assert {type(x) for x in halved} == {number}
    assert spec.clip_by_value_spec(numbers(-3, 1), number(2)) == [-2, 1]
    assert spec.clip_by_percentile_spec(numbers(1, -9, 2, 4), 50) == [1, -2, 2, 2]
    assert spec.percentile_spec(numbers(1, 2), 75, "linear") == number(7) / 4
    batches = [(numbers(1), number(3)), (numbers(5), number(1)), (numbers(7), number(2), True)]
    assert list(spec.accumulate_spec(batches, 2)) == [None, [2], [7]]
    parts = [(*numbers(1), numbers(2), number(3), numbers(4)), (*numbers(5), numbers(6), number(1), numbers(0))]
    assert spec.accumulated_value_and_grad_spec(parts, 2, lambda part: part[0]) == (2, [3], [3])


@pytest.mark.thorough
def test_definition_of_nothing_is_nothing():
    assert spec.global_norm_spec([], sqrt=math.sqrt) == 0
    assert spec.clip_gradients_spec([], 1.0, sqrt=math.sqrt) == []
    assert spec.clip_by_percentile_spec([], 50) == []
    assert list(spec.accumulate_spec([], 2)) == []
    assert spec.accumulated_value_and_grad_spec([(1, [1], 0, [1])], 1, lambda part: part[0]) is None


@pytest.mark.thorough
def test_definition_gives_back_what_it_was_given_and_does_not_change_it():
    gradient = [3.0, -4.0]
    for clipped in (
        spec.clip_gradients_spec(gradient, 9.0, sqrt=math.sqrt),
        spec.clip_by_value_spec(gradient, 9.0),
        spec.clip_by_percentile_spec(gradient, 100),
    ):
        assert clipped == gradient
        assert clipped is not gradient


# --- percentiles ------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["lower", "linear"])
def test_percentiles_of_the_definition_are_numpys(method):
    """On ranks that NumPy's floats hold exactly."""
    for size in range(1, 10):
        values = [7 * i % size * 10 for i in range(size)]  # in no order, and different, but all 0 for a size of 7
        for percentile in (0, 12.5, 25, "37.5", 50, Fraction(125, 2), 75, 100):
            expected = np.percentile(values, float(percentile), method=method)
            assert spec.percentile_spec([Fraction(x) for x in values], percentile, method) == expected


@pytest.mark.thorough
def test_rank_of_a_percentile_is_exact_where_floats_are_not():
    assert math.floor(29 / 100 * (101 - 1)) == 28
    assert spec.percentile_spec(range(101), 29) == 29
    assert Fraction(0.3) < Fraction("0.3")
    assert spec.percentile_spec(range(1001), 0.3) == 3
    assert spec.percentile_spec(range(10**5 + 1), "99.9") == 99_900


@pytest.mark.thorough
def test_percentile_clip_is_the_definitions():
    """To the last bit where the bound is one of the magnitudes, else within 2 eps."""

    @functools.cache
    def compiled(percentile, method):
        return users_jit(lambda leaves: shrewjax.clip_grad_percentile(leaves, percentile, method=method))

    @given(
        gradients(STRUCTURES["float32"]),
        st.sampled_from([(50, "lower"), (99.9, "linear")]),
    )
    def check(leaves, rule):
        clipped, measured = jax.device_get(compiled(*rule)(leaves))
        bound = spec.percentile_spec([abs(g) for g in entries(leaves)], *rule)
        assert abs(Fraction(float(measured)) - bound) <= 2 * eps(leaves[0]) * bound + tiny(leaves[0])
        if rule[1] == "lower":
            assert Fraction(float(measured)) == bound
        for x, y in zip(leaves, clipped, strict=True):
            assert exact(y) == spec.clip_by_value_spec(exact(x), Fraction(float(measured)))

    check()


# --- accumulation -----------------------------------------------------------------------------------------------

PARAMS = {"w": jnp.zeros(2, jnp.float32), "b": jnp.zeros((), jnp.bfloat16)}
REDUCTIONS = ["mean", "sum_over_weights", "sum"]
# Each policy with weights and with (False) the literal 1, and with another reduction: each is compiled.
KINDS_OF_WINDOWS = [
    ("propagate", "mean", True),
    ("propagate", "mean", False),
    ("drop_micro_batch", "sum_over_weights", True),
    ("drop_window", "sum", True),
    ("extend_window", "mean", True),
    ("propagate", "sum", True),
    ("drop_micro_batch", "mean", True),
    ("drop_micro_batch", "mean", False),
    ("drop_window", "mean", True),
    ("drop_window", "mean", False),
    ("extend_window", "mean", False),
    ("extend_window", "sum_over_weights", True),
]
TABLE = 4  # a schedule's windows; the last length holds from then on


@functools.cache
def programs(reduction, nonfinite, weighted):
    """A micro-step and a flush, through `accumulate` and through `GradAccumulator`, compiled once a policy."""
    options = {"reduction": reduction, "nonfinite": nonfinite}

    def schedule(table):
        return lambda windows: table[jnp.minimum(windows, TABLE - 1)]

    def close(window, state, closes):
        average, _, emptied = window.take(state)
        return average, jax.tree.map(lambda a, b: jnp.where(closes, a, b), emptied, state)

    @users_jit
    def micro_step(table, states, gradient, weight, flush):
        tx = shrewjax.accumulate(optax.identity(), schedule(table), **options)
        window = shrewjax.GradAccumulator(schedule(table), **options)
        weight = {"weight": weight} if weighted else {}
        updates, state = tx.update(gradient, states[0], PARAMS, flush=flush, **weight)
        added = window.add(states[1], gradient, **weight)
        average, other = close(window, added, window.ready(added) | flush)
        return updates, average, (state, other)

    @users_jit
    def flush(table, states):
        tx = shrewjax.accumulate(optax.identity(), schedule(table), **options)
        window = shrewjax.GradAccumulator(schedule(table), **options)
        updates, state = shrewjax.flush(tx, states[0], PARAMS)
        average, other = close(window, states[1], True)
        return updates, average, (state, other)

    return micro_step, flush


def tree(values):
    return {"w": np.asarray(values[:2], jnp.float32), "b": np.asarray(values[2], jnp.bfloat16)}


def assert_within_ulps(got, want, ulps):
    """Distance of a float32 from an exact value; where that is not finite, they are the same."""
    if not math.isfinite(want):
        np.testing.assert_equal(float(got), float(want))
        return
    assert abs(Fraction(float(got)) - want) <= ulps * max(eps(got) * abs(want), tiny(got))


# Sums of these are exact in float32, so that nothing but the last division rounds.
WEIGHTS = st.one_of(st.sampled_from([0, 1, 1]), st.integers(0, 40).map(lambda k: k / 4))
ENTRIES = st.lists(st.integers(-128, 128).map(lambda k: k / 8), min_size=3, max_size=3)
BAD = st.lists(st.sampled_from([1.0, -2.5, math.nan, math.inf, -math.inf]), min_size=3, max_size=3)
GOOD_OR_BAD = st.one_of(ENTRIES, ENTRIES, BAD)


class Windows(RuleBasedStateMachine):
    """Micro-batches, good, bad and empty ones, and flushes, against the definition, micro-step by micro-step."""

    @initialize(
        table=st.permutations(range(1, TABLE + 1)),
        exponent=st.sampled_from([-100, 0, 0, 100]),
    )
    def start(self, table, exponent):
        self.nonfinite, reduction, self.weighted = self.kind
        self.scale = 2.0**exponent
        self.exact = reduction == "sum"
        self.table = jnp.asarray(table, jnp.int32)
        self.micro_step, self.flush = programs(reduction, self.nonfinite, self.weighted)
        options = {"reduction": reduction, "nonfinite": self.nonfinite}
        window = shrewjax.GradAccumulator(1, **options)
        self.states = shrewjax.accumulate(optax.identity(), 1, **options).init(PARAMS), window.init(PARAMS)
        self.coming = collections.deque()
        self.definition = spec.accumulate_spec(
            iter(self.coming.popleft, None), lambda windows: table[min(windows, TABLE - 1)], **options
        )
        self.windows, self.dropped = 0, 0

    @rule(entries=GOOD_OR_BAD, weight=WEIGHTS, flush=st.sampled_from([False, False, False, True]))
    def micro_batch(self, entries, weight, flush):
        values = [self.scale * x for x in entries]
        weight = weight if self.weighted else 1
        updates, average, self.states = self.micro_step(
            self.table, self.states, tree(values), np.float32(weight), np.bool(flush)
        )
        finite = all(math.isfinite(x) for x in values)
        if self.nonfinite != "propagate" and weight and not finite:
            self.dropped += 1
        self.check(
            updates, average, ([Fraction(x) if math.isfinite(x) else x for x in values], Fraction(weight), flush)
        )

    @rule(entries=GOOD_OR_BAD, weight=WEIGHTS)
    def end_of_an_epoch(self, entries, weight):
        self.micro_batch(entries, weight, flush=False)
        for _ in range(2):  # the second time there is nothing to flush
            updates, average, self.states = self.flush(self.table, self.states)
            self.check(updates, average, ([], 0, True))

    def check(self, updates, average, micro_batch):
        self.coming.append(micro_batch)
        seen = next(self.definition)
        self.windows += seen is not None
        transformation, window = self.states
        assert bool(transformation.applied) == (seen is not None)
        assert int(transformation.micro_step) == int(window.micro_step)
        for state in self.states:
            assert int(state.windows) == self.windows
            assert int(state.dropped) == self.dropped
        if seen is None:
            assert bits(updates) == bits(PARAMS)
            return
        assert int(window.micro_step) == 0
        for got, want in zip(np.append(average["w"], average["b"]), seen, strict=True):
            assert_within_ulps(got, want, 0 if self.exact else 2)
        assert bits(updates) == bits({"w": average["w"], "b": average["b"].astype(jnp.bfloat16)})


@pytest.mark.combinations
@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS_OF_WINDOWS, ids=str)
def test_windows_are_the_definitions_micro_step_by_micro_step(kind):
    machine = type("WindowsOfAKind", (Windows,), {"kind": kind})
    a_twelfth = max(4, hypothesis.settings().max_examples // 12)
    run_state_machine_as_test(machine, settings=hypothesis.settings(stateful_step_count=30, max_examples=a_twelfth))


WINDOW = 6


@functools.partial(users_jit, static_argnums=0)
def one_window(reduction, gradients, weights):
    """All of a window's micro-batches, of which those of weight 0 do not count."""
    window = shrewjax.GradAccumulator(WINDOW, reduction=reduction)
    state, _ = jax.lax.scan(
        lambda state, batch: (window.add(state, *batch), None), window.init(gradients[0]), (gradients, weights)
    )
    return window.take(state)[0]


@pytest.mark.thorough
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_window_of_any_numbers_is_the_definitions_within_the_rounding_of_its_sums(reduction):
    """Half an eps for each product, addition (the weights' too) and the division, relative to the magnitudes."""

    @given(
        st.integers(-90, 90),
        st.binary(min_size=8 * 4 * WINDOW, max_size=8 * 4 * WINDOW),
        st.lists(st.one_of(st.just(0.0), st.floats(2**-20, 2**20, width=32)), min_size=WINDOW, max_size=WINDOW),
    )
    def check(exponent, noise, weights):
        gradients = np.ldexp(np.frombuffer(noise, np.int64).reshape(WINDOW, 4) / 2.0**63, exponent).astype(np.float32)
        got = one_window(reduction, jnp.asarray(gradients), np.float32(weights))
        batches = [(exact(g), Fraction(w)) for g, w in zip(gradients, weights, strict=True) if w]
        if not batches:
            np.testing.assert_array_equal(got, np.zeros(4))
            return
        magnitudes = spec.window_spec([([abs(x) for x in g], w) for g, w in batches], reduction)
        for value, want, size in zip(exact(got), spec.window_spec(batches, reduction), magnitudes, strict=True):
            assert abs(value - want) <= (WINDOW + 2) * eps(got) * size + tiny(got)

    check()


AUX = ["mean", "sum", "max", "min", "last", "stack", "examples"]


@functools.cache
def whole_batch(reduction, nonfinite):
    """A batch of as many examples as micro-batches, each with its own loss, gradient, weight and aux."""

    def run(params, losses, gradients, weights, aux):
        # Zero for its value, and exactly the gradient for its derivative.
        linear = jnp.sum(jnp.where(jnp.isfinite(gradients[0]), params * gradients[0], gradients[0] - gradients[0]))
        return losses[0] + linear, dict.fromkeys(AUX, aux[0]) | {"examples": aux}

    step = shrewjax.accumulated_value_and_grad(
        run,
        WINDOW,
        has_aux=True,
        weight_fn=lambda params, losses, gradients, weights, aux: weights[0],
        reduction=reduction,
        nonfinite=nonfinite,
        aux_reduction={name: name for name in AUX},
    )
    return users_jit(step)


@pytest.mark.thorough
@pytest.mark.parametrize("nonfinite", ["propagate", "drop_micro_batch"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_batch_is_the_definitions(reduction, nonfinite):
    """Within 2 eps, because sums of these are exact; to the last bit where nothing is divided."""

    @given(
        st.lists(
            st.tuples(ENTRIES, WEIGHTS, st.sampled_from([0, 0, 0, math.nan, math.inf])),
            min_size=WINDOW,
            max_size=WINDOW,
        )
    )
    def check(drawn):
        # A bad one has a bad loss, and a gradient that is not. Without a policy for it, there is none.
        losses = [entries[0] + (bad if nonfinite != "propagate" else 0) for entries, _, bad in drawn]
        gradients, weights = [entries[:2] for entries, _, _ in drawn], [weight for _, weight, _ in drawn]
        aux = [entries[2] for entries, _, _ in drawn]
        arrays = (np.asarray(x, np.float32) for x in (losses, gradients, weights, aux))
        (value, found), grads = whole_batch(reduction, nonfinite)(np.zeros(2, np.float32), *arrays)

        rational = [
            (Fraction(x) if math.isfinite(x) else x, [*map(Fraction, g)], Fraction(w), [Fraction(a)])
            for x, g, w, a in zip(losses, gradients, weights, aux, strict=True)
        ]
        for name in AUX:
            options = {"reduction": reduction, "nonfinite": nonfinite, "aux_reduction": name}
            of_rows = [(*part[:3], [[*part[3]]]) for part in rational] if name == "examples" else rational
            expected = spec.accumulated_value_and_grad_spec(of_rows, WINDOW, lambda part: part[0], **options)
            if expected is None:
                assert bits(grads) == bits(np.zeros(2, np.float32))
                assert np.isnan(found["mean"])
                assert value == 0 if reduction == "sum" else np.isnan(value)
                return
            wanted, gradient, (of_aux,) = expected
            for got, want in zip((value, *grads), (wanted, *gradient), strict=True):
                assert_within_ulps(got, want, 0 if reduction == "sum" else 2)
            if name == "mean":
                assert_within_ulps(found[name], of_aux, 2)
            else:
                assert exact(found[name]) == (of_aux if name in ("stack", "examples") else [of_aux])

    check()
