"""Norms are right in range, precision and derivative."""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import quick_jit, true_norm, users_jit

import shrewjax
from shrewjax import _extended, _floats, _mesh, _norms, _scaling, _unit_numbers

ORDERS = [1, 2, 3, 1000, np.inf]
f32 = np.float32


IN_RANGE = [
    [f32([3, 4])],
    [f32([1e20, 1e20]), f32([1e20])],
    [f32([1e-25, 1e-25])],
    [f32([3e-30, 4e-30]), f32([0, 0])],
    [f32([1e30]), f32([1e-30])],
    [f32([1e-18, 1e-19, 1e-20])],
    [np.float16([300] * 50)],
    [np.float16([6e-8] * 4)],
    [jnp.bfloat16(np.full(300, 1.0))] * 3,
    [np.float16([1.0]), f32([1e5])],
    [np.complex64([3 + 4j, 1j])],
    [np.complex64([1e25 + 1e25j]), f32([1e25])],
    [np.complex64([1e-25 + 1e-25j])],
    [np.zeros((0,), f32), f32([2.0])],
    [np.ones((), f32), np.ones((1, 2, 3), f32)],
]


@functools.cache
def norms_in_range(case):
    """Of every order, in one program, as it is compiling that takes time."""
    return quick_jit(lambda leaves: {ord: shrewjax.grad_norm(leaves, ord) for ord in ORDERS})(IN_RANGE[case])


@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize(
    "case", range(len(IN_RANGE)), ids=lambda i: "+".join(f"{x.dtype}{list(x.shape)}" for x in IN_RANGE[i])
)
def test_norm_neither_overflows_nor_underflows(case, ord):
    expected = true_norm(IN_RANGE[case], ord)
    assert norms_in_range(case)[ord] == pytest.approx(float(expected), rel=1e-6, abs=0)


def test_norm_of_float64_leaves_is_float64_and_neither_overflows_nor_underflows():
    with jax.enable_x64(True):
        for values in ([3e200, 4e200], [3e-200, 4e-200], [3e-310, 4e-310], [1.0, 1e-9]):
            leaves = [np.float64(values), np.float32([1.0]) * 0]
            norm = shrewjax.grad_norm(leaves)
            assert norm.dtype == jnp.float64
            tolerance = 1e-15 if values[0] > 1e-300 else 1.0  # subnormals are flushed on CPU
            assert float(norm) == pytest.approx(float(true_norm(leaves)), rel=tolerance, abs=0)


@pytest.mark.parametrize("ord", ORDERS)
def test_norm_of_nothing_is_zero(ord):
    for tree in ({}, None, [np.zeros((0, 3), f32)], [np.zeros(3, f32)], {"i": np.arange(3), "flag": np.ones(2, bool)}):
        assert float(shrewjax.grad_norm(tree, ord)) == 0


@pytest.mark.parametrize("ord", ORDERS)
@pytest.mark.parametrize("shape", [(3,), (300, 400)], ids=str)
def test_norm_of_nan_is_nan_and_of_inf_is_inf(ord, shape):
    norm = quick_jit(functools.partial(shrewjax.grad_norm, ord=ord))
    for bad, expected in ((np.nan, np.nan), (np.inf, np.inf), (-np.inf, np.inf)):
        x = np.ones(shape, f32)
        x.flat[x.size // 2] = bad
        np.testing.assert_equal(float(norm([x, np.ones(2, f32)])), expected)
        np.testing.assert_equal(float(norm([x, f32([np.nan, 1])])), np.nan)


@pytest.mark.parametrize("ord", [1, 2, 3, np.inf])
def test_norm_beyond_float32_reads_inf(ord):
    leaves = [f32([3e38] * 3), np.complex64([3e38 + 3e38j])]
    assert float(shrewjax.grad_norm(leaves, ord)) == np.inf


@functools.lru_cache(maxsize=1)
def a_million_elements(kind, dtype):
    rng = np.random.default_rng(0)
    draw = {"normal": rng.normal, "constant": lambda size: np.full(size, 0.1), "heavy tail": rng.standard_cauchy}[kind]
    return [jnp.asarray(np.clip(draw(size=s), -6e4, 6e4), dtype) for s in ((1000, 900), (99_999,), (1,))]


norms_of_four_orders = users_jit(lambda leaves: {ord: shrewjax.grad_norm(leaves, ord) for ord in (1, 2, 3, np.inf)})


@pytest.mark.parametrize("ord", [1, 2, 3, np.inf])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("kind", ["normal", "constant", "heavy tail"])
def test_norm_of_a_million_elements_is_within_1e_6(dtype, kind, ord):
    leaves = a_million_elements(kind, dtype)
    found = norms_of_four_orders(leaves)[ord]  # for each order again: it runs far sooner than it compiles
    assert float(found) == pytest.approx(float(true_norm(leaves, ord)), rel=1e-6, abs=0)


def test_norm_does_not_depend_on_the_order_of_the_leaves():
    rng = np.random.default_rng(1)
    leaves = [
        jnp.asarray(rng.normal(size=n) * 10.0**k, d)
        for n, k, d in [
            (7, 0, jnp.float32),
            (100, -2, jnp.bfloat16),
            (3, 2, jnp.float16),
            (50, 1, jnp.float32),
            (1, 0, jnp.complex64),
        ]
    ]
    expected = shrewjax.grad_norm(leaves)
    assert expected.dtype == jnp.float32
    for _ in range(8):
        shuffled = [leaves[i] for i in rng.permutation(len(leaves))]
        assert shrewjax.grad_norm(shuffled) == expected


def test_three_hundred_bfloat16_leaves_do_not_stall():
    """A sum of ones in bfloat16 stalls at 256."""
    leaves = [jnp.ones((), jnp.bfloat16)] * 300
    assert float(quick_jit(shrewjax.grad_norm)(leaves)) == pytest.approx(300**0.5, rel=1e-6, abs=0)


@pytest.mark.parametrize("ord", [1, 2, 3, np.inf])
@pytest.mark.parametrize("scale", [1.0, 1e25, 1e-25])
def test_derivative_of_the_norm(ord, scale):
    x = scale * jnp.array([3.0, -4.0, 1.0])
    slope = quick_jit(jax.grad(lambda x: shrewjax.grad_norm([x[:1], x[1:]], ord)))(x)
    magnitudes = np.abs(np.float64(x)) / np.abs(np.float64(x)).max()
    if ord == np.inf:
        expected = np.float64([0, -1, 0])
    else:  # d norm / d x_i = sign(x_i) (|x_i| / norm) ** (p - 1)
        expected = np.sign(x) * (magnitudes / np.sum(magnitudes**ord) ** (1 / ord)) ** (ord - 1)
    np.testing.assert_allclose(slope, expected, rtol=1e-5)


def test_derivative_of_the_largest_is_shared_between_ties():
    slope = quick_jit(jax.grad(lambda x: shrewjax.grad_norm([x], math.inf)))(jnp.array([2.0, -2.0, 1.0, 0.0]))
    np.testing.assert_array_equal(slope, [0.5, -0.5, 0, 0])


@pytest.mark.parametrize("ord", [1, 2, 3, np.inf])
def test_derivative_at_a_zero_norm_is_zero(ord):
    slope = quick_jit(jax.grad(lambda x: shrewjax.grad_norm([x], ord)))(jnp.zeros(3))
    np.testing.assert_array_equal(slope, np.zeros(3))


def test_derivative_of_a_complex_leaf_is_that_of_its_parts():
    def norm(parts):
        return shrewjax.grad_norm([jax.lax.complex(parts[0], parts[1]), parts[2]])

    parts = jnp.array([[3.0, 1.0], [-2.0, 0.5], [0.0, 4.0]])
    np.testing.assert_allclose(quick_jit(jax.grad(norm))(parts), parts / np.linalg.norm(parts), rtol=1e-6)


def test_second_derivative_of_the_norm():
    x = jnp.array([3.0, 4.0])
    hessian = quick_jit(jax.hessian(lambda x: shrewjax.grad_norm([x])))(x)
    unit = np.float64(x) / 5
    np.testing.assert_allclose(hessian, (np.eye(2) - np.outer(unit, unit)) / 5, rtol=1e-5, atol=1e-7)


def test_norm_under_vmap_takes_each_row_through_its_own_range():
    rows = jnp.array([[3.0, 4.0], [3e25, 4e25], [3e-25, 4e-25], [0.0, 0.0], [jnp.inf, 1.0]])
    np.testing.assert_allclose(jax.vmap(shrewjax.grad_norm)(rows), [5, 5e25, 5e-25, 0, np.inf], rtol=1e-6)


def test_common_case_reads_the_gradients_once():
    """The scaled pass sits in a branch: outside of it there is one reduction of the data."""
    jaxpr = jax.make_jaxpr(lambda x: _norms._measure_by_powers([x], 2, "global", None))(jnp.ones((8, 8)))
    reductions = [e for e in jaxpr.eqns if e.primitive.name == "reduce_sum" and e.invars[0].aval.shape == (8, 8)]
    assert len(reductions) == 1
    assert [e.primitive.name for e in jaxpr.eqns].count("cond") == 1


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 1.2e-38, 0.1, 1.0, 3.4e38, np.inf])
def test_split_and_join_lose_nothing(value):
    x = jnp.asarray(value, jnp.float32)
    number = _extended.to_extended(x)
    if np.isfinite(value) and value:
        mantissa, exponent = float(number.mantissa), int(number.exponent)
        assert 1 <= mantissa < 2
        assert np.longdouble(mantissa) * np.longdouble(2) ** exponent == np.longdouble(float(np.float32(value)))
    else:
        assert float(number.mantissa) == value
    if value == 0 or value > 1e-38:
        assert _extended.from_extended(number) == x


# --- numbers and their bits -------------------------------------------------------------------------------------

FLOATS = {d: np.dtype(getattr(jnp, d)) for d in ("float16", "bfloat16", "float32", "float64")}


def magnitudes(dtype):
    """The non-negative numbers of a dtype, without NaN: all of 16 bits, else those around every change."""
    dtype = FLOATS[dtype]
    integers = np.dtype(f"i{dtype.itemsize}")
    infinity = np.asarray(np.inf, dtype).view(integers)
    if dtype.itemsize == 2:
        return np.arange(infinity + 1, dtype=integers).view(dtype)
    powers = np.ldexp(1.0, np.arange(-160, 128)).astype(np.float32).astype(dtype).view(integers)
    around = np.add.outer(powers, np.arange(-2, 3)).ravel()
    random = np.random.default_rng(0).integers(0, infinity, 3000)
    return np.concatenate([np.unique(np.clip(around, 0, infinity)), random, [infinity]]).astype(integers).view(dtype)


def integers_of(x):
    return x.view(f"i{x.dtype.itemsize}")


def below(x, dtype):
    """The largest numbers of a narrower dtype that are not above x >= 0."""
    with np.errstate(all="ignore"):
        nearest = np.minimum(x, np.asarray(jnp.finfo(dtype).max, x.dtype)).astype(dtype)
    return np.where(np.isinf(x), np.asarray(np.inf, dtype).view(f"i{dtype.itemsize}"), integers_of(nearest)) - (
        np.isfinite(x) & (nearest.astype(x.dtype) > x)
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_of_magnitudes_and_signs(dtype):
    with jax.enable_x64(dtype == "float64"):
        x = magnitudes(dtype)
        np.testing.assert_array_equal(quick_jit(_floats.magnitude_bits)(-x), integers_of(x))
        assert _floats.infinity_bits(x.dtype) == integers_of(np.asarray(np.inf, x.dtype))
        sign_bit = quick_jit(_floats.sign_bit)
        assert np.asarray(sign_bit(-x)).all()
        assert not np.asarray(sign_bit(x)).any()
        normal = x[(x >= jnp.finfo(dtype).tiny) & np.isfinite(x)]
        up = np.asarray(quick_jit(_floats.power_of_two_for)(normal)).astype(np.float64)
        assert (np.frexp(up)[0] == 0.5).all()
        assert ((normal * up >= 1) & (normal * up < 4)).all()


@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize("narrow", ["float16", "bfloat16", "float32"])
def test_bits_in_another_dtype(narrow, wide):
    with jax.enable_x64(wide == "float64"):
        x, y = magnitudes(wide), magnitudes(narrow)
        narrower, wider = (quick_jit(f, static_argnums=(1, 2)) for f in (_floats.narrower_bits, _floats.wider_bits))
        bits = narrower(integers_of(x), x.dtype, y.dtype)
        np.testing.assert_array_equal(bits, below(x, y.dtype))
        assert bits.dtype == integers_of(y).dtype
        bits = wider(integers_of(y), y.dtype, x.dtype)
        np.testing.assert_array_equal(bits, integers_of(y.astype(x.dtype)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_thresholds_are_rounded_toward_zero_traced_or_not(dtype):
    values = np.concatenate([magnitudes("float32")[::50], np.float32([0.1, 1 / 3, 65519.9, 3e38])])
    values = values[
        np.isfinite(values) & ((values == 0) | (values >= jnp.finfo(jnp.float32).tiny))
    ]  # CPUs flush the others
    with jax.enable_x64(dtype == "float64"):
        to = FLOATS[dtype]
        largest = float(jnp.finfo(to).max)
        expected = below(np.minimum(values.astype(np.float64), largest), to)
        np.testing.assert_array_equal(
            integers_of(np.asarray(_floats.round_toward_zero(jnp.asarray(values), to))), expected
        )
        for value, want in zip(values.tolist(), expected, strict=True):
            assert integers_of(np.asarray(_floats.round_toward_zero(value, to))) == want
        assert float(_floats.round_toward_zero(jnp.float32(-1), to)) == 0


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_powers_of_two_reach_as_far_as_the_result(dtype):
    with jax.enable_x64(dtype == "float64"):
        info = jnp.finfo(dtype)
        reach = 2 * info.maxexp - 4
        exponents = np.arange(-reach, reach, 1 if dtype == "float32" else 7)
        for mantissa in (1.0, 1.25, 2 - float(info.eps)):
            for start in (0, info.minexp, info.maxexp - 1):
                x = np.ldexp(np.asarray(mantissa, dtype), start)
                with np.errstate(all="ignore"):
                    expected = np.ldexp(np.full(exponents.shape, x), exponents)
                got = np.asarray(_floats.times_power_of_two(jnp.asarray(x), jnp.asarray(exponents, jnp.int32)))
                normal = expected > info.tiny
                np.testing.assert_array_equal(got[normal], expected[normal])
                assert (got[~normal] <= info.tiny).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bits_of_a_split_number_are_rounded_where_they_are_subnormal(dtype):
    with jax.enable_x64(dtype == "float64"):
        info = jnp.finfo(dtype)
        exponents = np.arange(info.minexp - info.nmant - 3, info.minexp + 3)
        bits_of = quick_jit(_extended.bits_of)
        for mantissa in (1.0, 1.5, 1.75, 1 + float(info.eps), 2 - float(info.eps)):
            number = _extended.ExtendedFloat(
                jnp.full(exponents.shape, mantissa, dtype), jnp.asarray(exponents, jnp.int32)
            )
            exact = np.ldexp(np.full(exponents.shape, mantissa, np.longdouble), exponents)
            np.testing.assert_array_equal(bits_of(number), integers_of(exact.astype(dtype)))


def exactly(number):
    return Fraction(float(number.mantissa)) * Fraction(2) ** int(number.exponent)


def assert_near(got, want):
    assert abs(got - want) <= want / 10**7


def test_arithmetic_of_split_numbers_reaches_beyond_the_dtype():
    values = [0.0, 1e-300, 3e-39, 1.5, 1.75, 2.0, 3e38, 1e300]
    for a in values:
        x = _extended.extended_number(a, jnp.float32)
        assert_near(exactly(x), Fraction(a))
        assert a == 0 or 1 <= float(x.mantissa) < 2
        for b in values:
            y = _extended.extended_number(b, jnp.float32)
            assert bool(_extended.is_greater(x, y)) == (a > b)
            assert exactly(_extended.maximum(x, y)) == max(exactly(x), exactly(y))
            assert_near(exactly(_extended.product(x, y)), exactly(x) * exactly(y))
            ratio = _extended.quotient(x, y)
            if b:
                assert_near(exactly(ratio), exactly(x) / exactly(y))
            else:
                assert float(ratio.mantissa) == (np.inf if a else 0)
        infinite = _extended.extended_number(np.inf, jnp.float32)
        assert (
            float(_extended.product(x, infinite).mantissa) == float(_extended.product(infinite, x).mantissa) == np.inf
        )
    nan = _extended.to_extended(jnp.float32(np.nan))
    assert np.isnan(_extended.maximum(nan, _extended.extended_number(9.0, jnp.float32)).mantissa)
    assert float(_extended.to_float32(_extended.extended_number(1e300, jnp.float32))) == np.inf


@pytest.mark.parametrize("x64", [False, True])
def test_factors_of_a_clip_multiply_to_limit_over_norm_and_each_is_normal(x64):
    with jax.enable_x64(x64):
        dtype = jnp.float64 if x64 else jnp.float32
        info = jnp.finfo(dtype)
        below = np.arange(0, 3 * info.maxexp - 9, 1 if not x64 else 11)
        norm = _extended.ExtendedFloat(jnp.full(below.shape, 1.75, dtype), jnp.full(below.shape, 9, jnp.int32))
        limit = _extended.ExtendedFloat(jnp.full(below.shape, 1.25, dtype), jnp.asarray(9 - below, jnp.int32))
        factor = quick_jit(_scaling._scale_to_limit)(norm, limit, np.ones(below.shape, bool))
        first, second = (np.asarray(part, np.float64) for part in factor[1:])
        assert (first >= info.tiny).all()
        assert (second >= info.tiny).all()
        for a, b, n in zip(first, second, below.tolist(), strict=True):
            assert Fraction(a) * Fraction(b) ** 2 == Fraction(float(dtype(1.25) / dtype(1.75))) / 2**n
        once = below < info.maxexp - 3
        assert (second[once] == 1).all()


@pytest.mark.parametrize("scale", [1.0, 1e25, 1e-25])
def test_norms_of_units_and_of_all_of_them_together(scale):
    leaves = [scale * jnp.arange(60.0).reshape(3, 4, 5), scale * jnp.arange(1.0, 4), scale * jnp.ones(())]
    kept = ((0, 2), (), ())
    axes = tuple(_mesh.unit_axes("", x, keep, None) for x, keep in zip(leaves, kept, strict=True))
    norms = _norms.measure_units(leaves, kept, axes)
    for x, keep, norm in zip(leaves, kept, _unit_numbers.unstack_units(norms, kept), strict=True):
        rest = tuple(a for a in range(x.ndim) if a not in keep)
        expected = np.sqrt(np.sum(np.float64(x) ** 2, axis=rest))
        np.testing.assert_allclose(_extended.from_extended(norm), expected, rtol=1e-6)
        spread = _unit_numbers.broadcast_to_leaf(norm.mantissa, x, keep)
        assert np.broadcast_shapes(spread.shape, x.shape) == x.shape
    together = _norms.combine(norms, _unit_numbers.stacked_axes(axes, kept))
    assert float(_extended.from_extended(together)) == pytest.approx(float(true_norm(leaves)), rel=1e-6)
    assert _norms.measure_units([], (), ()) == []
    assert float(_extended.from_extended(_norms.combine([], []))) == 0


@pytest.mark.parametrize("bad", [0, 0.99, -1, np.nan, "2", True])
def test_ord_out_of_range_is_an_error(bad):
    with pytest.raises(ValueError, match="ord"):
        shrewjax.grad_norm([np.ones(2, f32)], bad)


def test_traced_ord_is_an_error_that_says_why():
    with pytest.raises(ValueError, match=r"ord must be a Python number.*inject_hyperparams"):
        jax.jit(lambda p: shrewjax.grad_norm([jnp.ones(2)], p))(2.0)
    with pytest.raises(ValueError, match="ord"):
        shrewjax.grad_norm([jnp.ones(2)], jnp.float32(2))


def test_leaf_that_is_no_array_is_named():
    with pytest.raises(ValueError, match=r"gradient leaf \['layer'\]\[1\] must be an array or a number, got 'text'"):
        shrewjax.grad_norm({"layer": [np.ones(2, f32), "text"]})
