"""Numbers and their bits: magnitudes, powers of two, split numbers, without a loss at the subnormal ones."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from speed import quick_jit

from shrewjax._numerics import floats

f32 = np.float32


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
    """The largest finite numbers of a narrower dtype that are not above x >= 0."""
    with np.errstate(all="ignore"):
        nearest = np.minimum(x, np.asarray(jnp.finfo(dtype).max, x.dtype)).astype(dtype)
    return integers_of(nearest) - (nearest.astype(x.dtype) > x)


@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_of_magnitudes_and_signs(dtype):
    with jax.enable_x64(dtype == "float64"):
        x = magnitudes(dtype)
        np.testing.assert_array_equal(quick_jit(floats.magnitude_bits)(-x), integers_of(x))
        assert floats.infinity_bits(x.dtype) == integers_of(np.asarray(np.inf, x.dtype))
        sign_bit = quick_jit(floats.sign_bit)
        assert np.asarray(sign_bit(-x)).all()
        assert not np.asarray(sign_bit(x)).any()
        normal = x[(x >= jnp.finfo(dtype).tiny) & np.isfinite(x)]
        up = np.asarray(quick_jit(floats.power_of_two_for)(normal)).astype(np.float64)
        assert (np.frexp(up)[0] == 0.5).all()
        assert ((normal * up >= 1) & (normal * up < 4)).all()


@pytest.mark.parametrize("wide", ["float32", "float64"])
@pytest.mark.parametrize("narrow", ["float16", "bfloat16", "float32"])
def test_bits_in_another_dtype(narrow, wide):
    with jax.enable_x64(wide == "float64"):
        x, y = magnitudes(wide), magnitudes(narrow)
        narrower, wider = (quick_jit(f, static_argnums=(1, 2)) for f in (floats.narrower_bits, floats.wider_bits))
        bits = narrower(integers_of(x), x.dtype, y.dtype)
        np.testing.assert_array_equal(bits, below(x, y.dtype))
        assert bits.dtype == integers_of(y).dtype
        bits = wider(integers_of(y), y.dtype, x.dtype)
        np.testing.assert_array_equal(bits, integers_of(y.astype(x.dtype)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_python_numbers_are_rounded_toward_zero(dtype):
    values = [0.0, 1e-320, 1e-45, 1e-40, 0.1, 1 / 3, 65519.9, 3e38, 3.4028236e38, 1e300, 1e400]
    with jax.enable_x64(dtype == "float64"):
        for value in values:
            found = np.asarray(floats.toward_zero(value, np.dtype(dtype)))
            assert integers_of(found) == below(np.float64(value), np.dtype(dtype)), value


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
                got = np.asarray(floats.times_power_of_two(jnp.asarray(x), jnp.asarray(exponents, jnp.int32)))
                normal = expected > info.tiny
                np.testing.assert_array_equal(got[normal], expected[normal])
                assert (got[~normal] <= info.tiny).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bits_of_a_split_number_are_rounded_where_they_are_subnormal(dtype):
    with jax.enable_x64(dtype == "float64"):
        info = jnp.finfo(dtype)
        exponents = np.arange(info.minexp - info.nmant - 3, info.minexp + 3)
        bits_of = quick_jit(floats.bits_of)
        for mantissa in (1.0, 1.5, 1.75, 1 + float(info.eps), 2 - float(info.eps)):
            number = floats.ExtendedFloat(jnp.full(exponents.shape, mantissa, dtype), jnp.asarray(exponents, jnp.int32))
            exact = np.ldexp(np.full(exponents.shape, mantissa, np.longdouble), exponents)
            np.testing.assert_array_equal(bits_of(number), integers_of(exact.astype(dtype)))


def exactly(number):
    return Fraction(float(number.mantissa)) * Fraction(2) ** int(number.exponent)


def assert_near(got, want):
    assert abs(got - want) <= want / 10**7


def test_arithmetic_of_split_numbers_reaches_beyond_the_dtype():
    values = [0.0, 1e-300, 3e-39, 1.5, 1.75, 2.0, 3e38, 1e300]
    for a in values:
        x = floats.extended_number(a, jnp.float32)
        assert_near(exactly(x), Fraction(a))
        assert a == 0 or 1 <= float(x.mantissa) < 2
        for b in values:
            y = floats.extended_number(b, jnp.float32)
            assert bool(floats.is_greater(x, y)) == (a > b)
            assert exactly(floats.maximum(x, y)) == max(exactly(x), exactly(y))
            assert_near(exactly(floats.product(x, y)), exactly(x) * exactly(y))
            ratio = floats.quotient(x, y)
            if b:
                assert_near(exactly(ratio), exactly(x) / exactly(y))
            else:
                assert float(ratio.mantissa) == (np.inf if a else 0)
        infinite = floats.extended_number(np.inf, jnp.float32)
        assert float(floats.product(x, infinite).mantissa) == float(floats.product(infinite, x).mantissa) == np.inf
    nan = floats.to_extended(jnp.float32(np.nan))
    assert np.isnan(floats.maximum(nan, floats.extended_number(9.0, jnp.float32)).mantissa)
    assert float(floats.stored(floats.extended_number(1e300, jnp.float32), jnp.float32)) == np.inf


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, 1.2e-38, 0.1, 1.0, 3.4e38, np.inf])
def test_split_and_join_lose_nothing(value):
    x = jnp.asarray(value, jnp.float32)
    number = floats.to_extended(x)
    if np.isfinite(value) and value:
        mantissa, exponent = float(number.mantissa), int(number.exponent)
        assert 1 <= mantissa < 2
        assert np.longdouble(mantissa) * np.longdouble(2) ** exponent == np.longdouble(float(np.float32(value)))
    else:
        assert float(number.mantissa) == value
    if value == 0 or value > 1e-38:
        assert floats.from_extended(number) == x
