"""Percentiles of |g| against sorting: the exact order statistics at the exact rational rank."""

import math
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import thorough
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from speed import quick_jit, users_jit

from shrewjax._numerics import percentiles, reductions
from shrewjax.spec import percentile_spec

pytestmark = pytest.mark.usefixtures("one_device")

METHODS = ["linear", "lower"]
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float64": np.float64}


# --- the oracle: the definition, which sorts, in rational arithmetic ---------------------------------------------


HUGE = Fraction(2) ** 5000  # stands for infinity, in exact arithmetic


def rational(x):
    return HUGE if math.isinf(x) else Fraction(float(x))


def ulp(exact, dtype):
    """The distance of the dtype's numbers around an exact one."""
    info = np.finfo(dtype)
    exponent = int(info.minexp)
    while Fraction(2) ** (exponent + 1) <= exact:
        exponent += 1
    return Fraction(2) ** (exponent - int(info.nmant))


def on_grid(percentile):
    """A traced percentile as it counts: the nearest multiple of 2**-24."""
    return Fraction(round(Fraction(float(percentile)) * 2**24), 2**24)


def check(leaves, percentile, method, over, selected):
    values = [float(abs(v)) for x in leaves for v in np.ravel(x)]
    considered = [v for v in values if v != 0] if over == "nonzero" else values
    wide = np.float64 if any(x.dtype == np.float64 for x in leaves) else np.float32
    expected = percentile_spec([rational(v) for v in considered], percentile, method) if considered else Fraction(0)
    # where it is part of the way to infinity, it is infinite
    expected = HUGE if expected > 2 * Fraction(float(np.finfo(wide).max)) else expected
    # not `bound`: to look at a subnormal float may flush it
    found = rational(np.asarray(selected.bits).view(wide).item())
    if method == "linear" and HUGE not in (expected, found):
        assert abs(found - expected) <= 4 * ulp(expected, wide)
    else:
        assert found == expected
    assert int(selected.above) == sum(rational(v) > found for v in values)
    assert int(selected.elements) == len(values)


OPTIONS = ("method", "over", "scope")


def plain_select(leaves, percentile, start=None, method="linear", over="all", scope="global"):
    rule = percentiles.Rule(percentile, method=method, scope=scope, over=over, axes=None)
    return percentiles.select(leaves, rule, start)


select, quick_select = (jit(plain_select, static_argnames=OPTIONS) for jit in (users_jit, quick_jit))


@partial(quick_jit, static_argnames=("percentile", *OPTIONS))
def known(leaves, percentile, method="linear", over="all", scope="global"):
    return plain_select(leaves, Fraction(percentile), method=method, over=over, scope=scope)


# --- against sorting --------------------------------------------------------------------------------------------

# One tree, so that few programs are compiled: several leaves, one of them empty.
SHAPES = ((11,), (), (0,), (3, 2))


def bit_patterns(dtype, shape):
    """Every magnitude but NaN is drawn as its bits: zeros, subnormals, infinity and neighbours are all likely."""
    bits = 8 * np.dtype(dtype).itemsize
    infinity = int(np.asarray(np.inf, dtype).view(f"u{bits // 8}"))
    magnitudes = st.one_of(
        st.integers(0, infinity),
        st.sampled_from([0, 1, 2, infinity, infinity - 1]),
        st.integers(infinity // 2, infinity // 2 + 3),
    )
    signed = st.tuples(magnitudes, st.booleans()).map(lambda t: t[0] | (t[1] << (bits - 1)))
    return hnp.arrays(f"u{bits // 8}", shape, elements=signed).map(lambda a: a.view(dtype))


@st.composite
def cases(draw, dtype):
    dtypes = ["float32", "float16", "bfloat16", "bfloat16"] if dtype == "mixed" else [dtype] * 4
    leaves = [draw(bit_patterns(DTYPES[d], s)) for d, s in zip(dtypes, SHAPES, strict=True)]
    size = sum(x.size for x in leaves)
    # whole ranks, halves between them, and whatever floats there are
    at_rank = st.integers(0, 2 * size).map(lambda i: np.float32(min(100, 100 * i / max(2 * (size - 1), 1))))
    anywhere = st.floats(0, 100, width=32).map(np.float32)
    return leaves, draw(at_rank | anywhere), draw(st.floats(width=32).map(np.float32))


CASES = [
    ("float32", "linear", "all"),
    ("float32", "lower", "nonzero"),
    ("bfloat16", "lower", "nonzero"),
    ("float16", "linear", "nonzero"),
    ("mixed", "linear", "nonzero"),
    *thorough(("float32", "lower", "all"), ("bfloat16", "linear", "all"), ("mixed", "lower", "all")),
]


@pytest.mark.parametrize(("dtype", "method", "over"), CASES)
@given(data=st.data())
def test_any_percentile_is_that_of_the_sorted_magnitudes(dtype, method, over, data):
    leaves, percentile, start = data.draw(cases(dtype))
    # As users compile it where a float is rounded; elsewhere elements and integers are compared.
    compiled = select if method == "linear" and dtype in ("float32", "mixed") else quick_select
    selected = compiled(leaves, percentile, start, method=method, over=over)
    check(leaves, on_grid(percentile), method, over, selected)


@given(data=st.data())
def test_float64_too(data):
    leaves, percentile, _ = data.draw(cases("float64"))
    with jax.enable_x64(True):
        selected = select(leaves, np.float64(percentile), method="linear")
        check(leaves, on_grid(percentile), "linear", "all", selected)


@pytest.mark.parametrize(
    ("written", "method", "over"),
    [
        ("0", "lower", "all"),
        ("12.5", "lower", "nonzero"),
        ("33.3", "linear", "all"),
        ("50", "linear", "nonzero"),
        ("99.9", "lower", "all"),
        # The ranks of these are in `test_a_known_percentile_is_exact_up_to_fifteen_decimals`.
        *thorough(("99.999999", "linear", "nonzero"), ("1e-7", "lower", "nonzero"), ("100", "linear", "all")),
    ],
)
def test_a_known_percentile_is_the_decimal_it_is_written_as(written, method, over):
    values = np.float32(np.random.default_rng(0).integers(-6, 7, 1001) * 0.37)
    check([values], Fraction(written), method, over, known([values], written, method, over))


@pytest.mark.parametrize("distribution", ["normal", "heavy", "sparse", "constant", "two values", "wide", "integers"])
def test_large_leaves_of_many_distributions(distribution):
    rng = np.random.default_rng(0)
    n = 200_000
    values = {
        "normal": lambda: rng.standard_normal(n),
        "heavy": lambda: rng.standard_cauchy(n),
        "sparse": lambda: rng.standard_normal(n) * (rng.random(n) < 0.03),
        "constant": lambda: np.full(n, -0.1),
        "two values": lambda: rng.choice([1e-30, 1e30], n),
        "wide": lambda: np.exp(rng.uniform(-90, 88, n)),
        "integers": lambda: rng.integers(-9, 10, n),
    }[distribution]()
    values = np.float32(values)
    leaves = jax.device_put([values[: n // 3], values[n // 3 :].reshape(2, -1)])
    magnitudes = np.sort(np.abs(values))
    for percentile in (0.1, 1, 25, 50, 90, 99.9, 100):
        rank = on_grid(np.float32(percentile)) * (n - 1) / 100
        for start in (0.0, magnitudes[-1], magnitudes[int(rank)] * np.float32(1.03)):
            lower = select(leaves, np.float32(percentile), np.float32(start), method="lower")
            found = np.asarray(lower.bound)  # NumPy flushes no subnormals
            assert found == magnitudes[int(rank)]
            assert int(lower.above) == np.sum(magnitudes > found)
        linear = select(leaves, np.float32(percentile), np.float32(0), method="linear")
        low, high = (rational(magnitudes[i]) for i in (math.floor(rank), math.ceil(rank)))
        between = low + (rank - math.floor(rank)) * (high - low)
        assert abs(rational(np.asarray(linear.bound)) - between) <= 4 * ulp(between, np.float32)


SIZES = (5, 1, 12, 0)


def percentile_of_each(leaves):
    return jax.device_get(known(leaves, "40", "linear", scope="leaf"))


def test_an_empty_leaf_takes_no_read_of_the_others():
    leaves = [np.full(n, 0.5, np.float32) for n in SIZES]
    beside, alone = (int(percentile_of_each(x).reads) for x in (leaves, leaves[:-1]))
    assert beside == alone


def test_a_search_takes_few_reads_and_fewer_from_a_start_near_the_result():
    """On average, as measured: this is all that the choice of where to count next decides."""
    rng = np.random.default_rng(0)
    n = 30_000
    distributions = [
        rng.standard_normal(n),
        rng.standard_cauchy(n),
        np.exp(rng.uniform(-60, 60, n)),
        rng.standard_normal(n) ** 8,
    ]
    # how the data grew since the start: the reads (None: there is no start)
    most = {None: 4.9, 1: 2, 1.02: 3.3, 1.09: 4, 0.9: 4.7}
    reads = {growth: [] for growth in most}
    for values in map(np.float32, distributions):
        grown = {growth: jax.device_put(values * np.float32(growth or 1)) for growth in most}
        for percentile in np.float32([0.1, 5, 37, 50, 90, 99, 99.9]):
            cold = select([grown[None]], percentile, np.float32(0))
            for growth in most:
                warm = cold if growth is None else select([grown[growth]], percentile, cold.bound)
                reads[growth].append(int(warm.reads))
    for growth, limit in most.items():
        assert np.mean(reads[growth]) <= limit


def test_hostile_data_takes_a_bounded_number_of_reads():
    # Each key is twice the one before, in steps from the bottom: no estimate fits for long.
    values = (2 ** np.arange(31, dtype=np.int64)).astype(np.int32).view(np.float32)[:30]
    for percentile in range(0, 101, 7):
        assert int(quick_select([values], np.float32(percentile), np.float32(0)).reads) <= 2 * 31 // 3


def test_complex_leaves_count_with_their_modulus():
    rng = np.random.default_rng(0)
    values = np.complex64(rng.standard_normal(50) + 1j * rng.standard_normal(50))
    selected = known([values], "30", "lower")
    np.testing.assert_allclose(selected.bound, np.sort(np.abs(values))[14], rtol=3e-7)


def test_one_percentile_a_leaf():
    rng = np.random.default_rng(0)
    leaves = [np.float32(rng.standard_normal(n) * 10**n) for n in SIZES]
    selected = percentile_of_each(leaves)
    for i, x in enumerate(leaves):
        check([x], Fraction(40), "linear", "all", jax.tree.map(lambda a, i=i: a[i] if a.ndim else a, selected))


def test_leaves_of_one_shape_are_selected_from_as_any_others():
    # enough of them, of two dtypes, to be read by several kernels of several leaves each
    values = np.random.default_rng(0).integers(-9, 10, (24, 5)) * 0.37
    leaves = [np.float32(x) for x in values[:17]] + [x.astype(ml_dtypes.bfloat16) for x in values[17:]]
    for percentile in np.float32([0, 3, 50, 77.7, 99, 100]):
        check(leaves, on_grid(percentile), "linear", "all", select(leaves, percentile))


@pytest.mark.parametrize(
    ("leaves", "shape", "scope", "kernels"),
    [
        (27, (64,), "global", 9),
        (100, (64,), "global", 13),
        (16, (64,), "global", 16),  # XLA:CPU runs few kernels one after another
        (18, (64,), "leaf", 18),
        (18, (2**30,), "global", 9),
        (18, (2**31,), "global", 18),  # of two together, 32 bits hold no count
    ],
)
def test_few_kernels_read_leaves_of_one_shape(leaves, shape, scope, kernels):
    median = partial(plain_select, percentile=Fraction(50), scope=scope)
    jaxpr = jax.make_jaxpr(lambda given: median(given).bound)([jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * leaves)
    assert str(jaxpr).count("name=_reduced") == 2 * kernels  # one that counts, and one that finds neighbours


def test_a_nan_is_reported():
    ones, dtypes = np.ones(4, np.float32), (np.float16, ml_dtypes.bfloat16, np.float32)
    values = ones * np.float32([1, np.nan, -np.inf, 2])
    for bad in dtypes:  # a NaN of 16 bits is converted to the keys of the wider leaf
        leaves = [(values if dtype is bad else ones).astype(dtype) for dtype in dtypes]
        assert np.isnan(known(leaves, "50").bound), bad
    by_leaf = [np.ones(n, np.float32) for n in SIZES]
    by_leaf[0][3] = np.nan
    np.testing.assert_array_equal(percentile_of_each(by_leaf).bound, [np.nan, 1, 1, 0])
    assert np.isnan(quick_select([np.ones(30, np.float32)], np.float32(np.nan), np.float32(0)).bound)


def test_a_single_element_is_every_percentile():
    for percentile in (0, 37.5, 100):
        assert float(quick_select([np.float32([-3])], np.float32(percentile)).bound) == 3


@pytest.mark.parametrize("over", ["all", "nonzero"])
@pytest.mark.parametrize("shapes", [(), ((0,),), ((0,), (3, 0))], ids=str)
def test_nothing_to_select_from(shapes, over):
    leaves = [np.zeros(shape, dtype) for shape, dtype in zip(shapes, (np.float32, ml_dtypes.bfloat16), strict=False)]
    selected = jax.device_get(known(leaves, "50", over=over))
    assert (selected.bound, selected.above, selected.elements) == (0, 0, 0)


def test_vmap_and_scan():
    def bound(values, percentile):
        return plain_select([values], percentile, method="lower").bound

    rows = np.float32(np.random.default_rng(0).standard_normal((3, 40)))
    percentiles = np.float32([10, 50, 99])
    batched = quick_jit(jax.vmap(bound))(rows, percentiles)
    scanned = quick_jit(lambda *of_all: jax.lax.scan(lambda c, xs: (c, bound(*xs)), 0, of_all)[1])(rows, percentiles)
    for row, p, a, b in zip(rows, percentiles, batched, scanned, strict=True):
        expected = np.sort(np.abs(row))[int(Fraction(float(p)) * 39 / 100)]
        assert a == b == expected


# --- counts and ranks beyond 32 bits ----------------------------------------------------------------------------


@given(st.integers(1, 2**62), st.floats(0, 100, width=32), st.sampled_from(METHODS))
def test_ranks_are_exact_beyond_two_to_the_thirty_first(count, percentile, method):
    with jax.enable_x64(True):
        place = jax.device_get(place_of(np.float32(percentile), np.uint64([count]), method))
    rank = on_grid(percentile) * (count - 1) / 100
    assert int(place.rank[0]) == math.floor(rank)
    between = rank - math.floor(rank)
    if method == "linear":
        assert_rounded(place.fraction[0], between)
    else:
        assert place.fraction[0] == 0


def assert_rounded(fraction, exact):
    assert abs(Fraction(float(fraction)) - exact) <= 2 * ulp(exact, np.float32)
    assert (fraction == 0) == (exact == 0)


def plain_place_of(percentile, count, method="linear"):
    return percentiles.order_statistic(percentile, count, method, jnp.float32)


place_of, known_place_of = (quick_jit(plain_place_of, static_argnums=static) for static in (2, (0, 2)))


WRITTEN = ["0", "0.0001", "12.5", "99.9", "33.333333333333336", "99.999999999999999", "100"]


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
@given(data=st.data())
def test_a_known_percentile_is_exact_up_to_fifteen_decimals(dtype, data):
    written = data.draw(st.sampled_from(WRITTEN))
    count = data.draw(st.integers(1, np.iinfo(dtype).max // 4))
    with jax.enable_x64(True):
        place = jax.device_get(known_place_of(Fraction(written), np.asarray([count], dtype)))
    rank = Fraction(written) * (count - 1) / 100
    assert int(place.rank[0]) == math.floor(rank)
    assert_rounded(place.fraction[0], rank - math.floor(rank))


@pytest.mark.parametrize("written", ["31.4159265358979323846", "99.99999999999999999999", "1e-30"])
def test_more_decimals_move_the_rank_by_less_than_1e_17_of_the_count(written):
    count = 2**63 - 1
    with jax.enable_x64(True):
        place = jax.device_get(known_place_of(Fraction(written), np.uint64([count])))
    rank = int(place.rank[0]) + Fraction(float(place.fraction[0]))
    assert abs(rank - Fraction(written) * (count - 1) / 100) <= Fraction(count, 10**17)


@pytest.mark.parametrize("shapes", [((60, 7, 11), (3,)), *thorough((((7, 60, 11),),))], ids=str)
def test_a_leaf_whose_count_exceeds_32_bits_is_counted_in_64(monkeypatch, shapes):
    # the arithmetic without the memory: as if 32 bits held no more than 100
    monkeypatch.setattr(reductions, "_LARGEST_COUNT", 100)
    jax.clear_caches()
    values = np.float32(np.random.default_rng(0).standard_normal((7, 60, 11)))
    leaves = [np.resize(values, s) for s in shapes]
    check(leaves, Fraction("99.9"), "linear", "nonzero", known(leaves, "99.9", over="nonzero"))
    jax.clear_caches()


def test_totals_beyond_32_bits_select_the_right_rank():
    # counts as a search of 6 * 2**32 elements would have them: its bracket ends with the rank
    elements = 6 * 2**32

    @quick_jit
    def after_a_read(count, counted):
        place = percentiles.order_statistic(Fraction("75"), count, "lower", jnp.float32)
        search = percentiles._started(count, place, None, jnp.dtype(jnp.float32))
        return search, percentiles._narrowed(search, counted, count, jnp.dtype(jnp.float32))

    with jax.enable_x64(True):
        count = np.asarray([elements], reductions.count_dtype([elements]))
        counted = np.asarray([[*(i * 2**31 for i in range(10)), elements]], count.dtype)
        search, narrowed = jax.device_get(after_a_read(count, counted))
    rank = 75 * (elements - 1) // 100
    assert int(narrowed.up_to_low[0]) <= rank < int(narrowed.up_to_high[0])
    assert narrowed.low[0] == search.pivots[0, rank // 2**31]
    assert not narrowed.has_nan[0]


def test_the_largest_count_decides_the_width():
    assert [reductions.count_dtype([n]) for n in (2**32 - 1, 2**32)] == [jnp.uint32, jnp.uint64]
