"""Floats and their bits, and numbers beyond the range of floats.

The bits of a float >= 0, read as an integer, order as the numbers do. Comparisons here use these integers, because CPU
and TPU flush subnormal numbers to zero in every floating-point operation, comparisons included (XLA-18). The tests are
in `tests/numerics/test_floats.py`.

* `sign_bit` is not `jnp.signbit`, which refuses 8-bit floats.
* `power_of_two` is not `jnp.exp2`, which is inexact on CPU, nor `2.0**exponent`, which is inexact on GPU (XLA-19).
* `times_power_of_two` is not `jnp.ldexp`, which on CPU returns a subnormal number unscaled.
* `to_extended` does not use `jnp.frexp`, which on CPU returns the same for every subnormal float32.

An `ExtendedFloat` is `mantissa * 2**exponent`, its mantissa in [1, 2) and its exponent an int32. Norms are measured as
such numbers, because a norm may exceed float32 where the clip's quotient does not.

* Zero has mantissa 0 and exponent -2**20, so it compares below every other number.
* An infinity or a NaN is the mantissa, with any exponent.
* Splitting a float is exact. Products and quotients are rounded once.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax._base.types import DType, Leaf, Number


def is_complex(x: Leaf) -> bool:
    return x.dtype.kind == "c"


def real_dtype(x: Leaf) -> DType:
    """Returns an array's dtype, or that of its parts if it is complex."""
    return jnp.finfo(x.dtype).dtype


def sum_dtype(*xs: Leaf) -> DType:
    """Returns the real dtype in which to compute with arrays' elements or their parts: float64 if one is, else float32.

    It says nothing of a state. The dtype of a window's sums is the user's, `accumulator_dtype`.
    """
    has_double = any(real_dtype(x) == jnp.float64 for x in xs)
    return jnp.dtype(jnp.float64 if has_double else jnp.float32)


def wider_dtype(*xs: Leaf) -> DType:
    """Returns the dtype of arrays if they have the same, otherwise `sum_dtype`, complex if one is."""
    if len({x.dtype for x in xs}) == 1:
        return xs[0].dtype
    return upcast_dtype(next(filter(is_complex, xs), xs[0]), sum_dtype(*xs))


def upcast(x: Leaf, dtype: DType) -> jax.Array:
    """Returns x in a real dtype, or in the complex dtype of that precision if x is complex."""
    return lax.convert_element_type(x, upcast_dtype(x, dtype))


def upcast_dtype(x: Leaf, dtype: DType) -> DType:
    return jnp.dtype(f"complex{2 * jnp.finfo(dtype).bits}" if is_complex(x) else dtype)


def mul_real(x: jax.Array, *factors: jax.Array) -> jax.Array:
    """Returns x times real factors, in turn.

    Parts are multiplied apart, because a complex product turns inf + 0i into NaN.
    """
    for factor in factors:
        is_pair = is_complex(x)
        x = lax.complex(x.real * factor, x.imag * factor) if is_pair else x * factor
    return x


def magnitude_bits(x: jax.Array) -> jax.Array:
    """Returns the bits of |x|: integers that order as the magnitudes do, with NaN above infinity."""
    integers = integers_like(x.dtype)
    largest = jnp.iinfo(integers).max
    return lax.bitcast_convert_type(x, integers) & jnp.asarray(largest, integers)


def sign_bit(x: jax.Array) -> jax.Array:
    """Returns whether the sign bit is set. `x < 0` would flush a subnormal x to 0 (XLA-18)."""
    return lax.bitcast_convert_type(x, integers_like(x.dtype)) < 0


def infinity_bits(dtype: DType) -> int:
    """Returns the bits of infinity. The bits of NaNs are larger."""
    fraction_bits, bias = float_format(dtype)
    return (2 * bias + 1) << fraction_bits


def narrower_bits(bits: jax.Array, dtype: DType, narrower: DType) -> jax.Array:
    """Returns the bits of a magnitude, rounded toward zero to a narrower dtype.

    An infinity or a NaN becomes its largest finite number, so callers test for these first.
    """
    fraction_bits, bias = float_format(dtype)
    to_fraction_bits, to_bias = float_format(narrower)
    dropped, shift = fraction_bits - to_fraction_bits, bias - to_bias
    result = (bits >> dropped) - (shift << to_fraction_bits)
    if shift:
        # A number that is subnormal in the narrower dtype is a multiple of its smallest one.
        exponent = bits >> fraction_bits
        significand = (bits & ((1 << fraction_bits) - 1)) | (1 << fraction_bits)
        most = jnp.iinfo(bits.dtype).bits - 1
        multiple = significand >> jnp.clip(dropped + shift + 1 - exponent, 0, most)
        result = jnp.where(exponent > shift, result, multiple)
    integers = integers_like(narrower)
    largest = int(np.asarray(jnp.finfo(narrower).max, narrower).view(integers))
    return jnp.minimum(result, largest).astype(integers)


def wider_bits(bits: jax.Array, dtype: DType, wider: DType) -> jax.Array:
    """Returns the bits of the same magnitude in a wider dtype of at least 16 bits. Infinity and NaN stay.

    A cast instead would flush a subnormal float32 on CPU (XLA-18).
    """
    fraction_bits, bias = float_format(dtype)
    to_fraction_bits, to_bias = float_format(wider)
    bits = bits.astype(integers_like(wider))
    result = bits << (to_fraction_bits - fraction_bits)
    if to_bias != bias:
        unit = power_of_two(jnp.asarray(1 - bias - fraction_bits, jnp.int32), wider)
        subnormal = lax.bitcast_convert_type(bits.astype(wider) * unit, bits.dtype)
        is_subnormal = bits < (1 << fraction_bits)
        normal = result + ((to_bias - bias) << to_fraction_bits)
        result = jnp.where(is_subnormal, subnormal, normal)
        beyond = bits - infinity_bits(dtype)
        result = jnp.where(beyond >= 0, infinity_bits(wider) + beyond, result)
    return result


def toward_zero(value: float, dtype: DType) -> jax.Array:
    """Returns a Python number >= 0, rounded toward zero to a dtype; its largest finite number for one beyond that."""
    # On the host, because the device would flush a subnormal one (XLA-18).
    nearest = np.asarray(min(value, float(jnp.finfo(dtype).max)), dtype)
    next_lower = np.nextafter(nearest, dtype.type(0))
    return jnp.asarray(next_lower if float(nearest) > value else nearest)


def times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Returns x * 2**exponent. A subnormal x or result is flushed on CPU and TPU."""
    first, second = factors_of_two(exponent, x.dtype)
    return x * first * second


def factors_of_two(exponent: jax.Array, dtype: DType) -> tuple[jax.Array, jax.Array]:
    """Returns two powers of two whose product is 2**exponent, for exponents from 2 - 2 * bias to 2 * bias.

    For a lower exponent the second is 0, and for a higher one the product is 2**(2 * bias).
    """
    _, bias = float_format(dtype)
    first = jnp.clip(exponent, 1 - bias, bias)
    # `power_of_two(-bias)` is 0, so x times a power below that range, such as 2**EXPONENT_OF_ZERO, is 0. The first is
    # never 0, or x would vanish too soon.
    return power_of_two(first, dtype), power_of_two(jnp.clip(exponent - first, -bias, bias), dtype)


def power_of_two_for(x: jax.Array) -> jax.Array:
    """Returns a power of two that scales each finite, normal x > 0 to [1, 4), where its products stay in range."""
    _, bias = float_format(x.dtype)
    return power_of_two(-jnp.clip(exponent_of(x), 1 - bias, bias - 1), x.dtype)


def power_of_two(exponent: jax.Array, dtype: DType) -> jax.Array:
    """Returns 2**exponent for -bias < exponent <= bias, and 0 for exponent -bias. Made of bits, so exact (XLA-19)."""
    fraction_bits, bias = float_format(dtype)
    bits = (exponent + bias).astype(integers_like(dtype)) << fraction_bits
    return lax.bitcast_convert_type(bits, dtype)


def exponent_of(x: jax.Array) -> jax.Array:
    """Returns the exponent of a normal number, int32. It is -bias for zeros and subnormal numbers."""
    fraction_bits, bias = float_format(x.dtype)
    return (magnitude_bits(x) >> fraction_bits).astype(jnp.int32) - bias


def integers_like(dtype: DType) -> DType:
    return jnp.dtype(f"int{jnp.finfo(dtype).bits}")


def float_format(dtype: DType) -> tuple[int, int]:
    """Returns the number of bits of the fraction, and the bias of the exponent."""
    info = jnp.finfo(dtype)
    return int(info.nmant), 1 - int(info.minexp)


class ExtendedFloat(NamedTuple):
    """Non-negative numbers `mantissa * 2**exponent`, beyond the range of the mantissa's dtype."""

    mantissa: jax.Array  # float32 or float64: in [1, 2), or 0, inf or nan
    exponent: jax.Array  # int32, same shape


EXPONENT_OF_ZERO = -(2**20)


def to_extended(x: jax.Array) -> ExtendedFloat:
    """Returns x >= 0, exactly, subnormal numbers included."""
    fraction_bits, bias = float_format(x.dtype)
    # 1. The bits of a subnormal x are the integer x * 2**(bias + fraction_bits - 1). As a float, this integer is
    # normal, and `correction` undoes the scale. Arithmetic on x itself would flush it (XLA-18).
    # `test_split_and_join_lose_nothing` holds this.
    as_integer = magnitude_bits(x)
    is_subnormal = as_integer < (1 << fraction_bits)
    not_subnormal = jnp.where(is_subnormal, as_integer.astype(x.dtype), x)
    correction = is_subnormal.astype(jnp.int32) * np.int32(1 - bias - fraction_bits)
    # 2. Split off the exponent. An infinity or a NaN stays the mantissa.
    exponent = jnp.where(jnp.isfinite(not_subnormal), exponent_of(not_subnormal), 0)
    mantissa = times_power_of_two(not_subnormal, -exponent)
    # 3. Give zero its own exponent.
    exponent = jnp.where(mantissa == 0, EXPONENT_OF_ZERO, exponent + correction)
    return ExtendedFloat(mantissa, exponent)


def extended_number(value: float, dtype: DType) -> ExtendedFloat:
    """Returns a Python number >= 0, which may be beyond the range of the dtype."""
    half, exponent = math.frexp(value)  # in [1/2, 1) if it is neither 0 nor infinite
    exponent = exponent - 1 if value else EXPONENT_OF_ZERO
    # Rounded to the dtype, the mantissa may become 2. A clip to such a limit is still right.
    return ExtendedFloat(jnp.asarray(2 * half, dtype), jnp.asarray(exponent, jnp.int32))


def root_of_count(count: Number, dtype: DType) -> ExtendedFloat:
    """Returns the square root of a number of elements. No elements count as one.

    The number may be symbolic (`jax.export`). It then takes the same float64 operations on the device.
    """
    if isinstance(count, int):
        return extended_number(max(count, 1) ** 0.5, dtype)
    with jax.enable_x64(True):
        root = to_extended(jnp.sqrt(jnp.maximum(jnp.asarray(count, jnp.float64), 1)))
        return ExtendedFloat(root.mantissa.astype(dtype), root.exponent)


def from_extended(number: ExtendedFloat) -> jax.Array:
    """Returns the number in its mantissa's dtype: inf if it is too large, 0 if it is too small."""
    return times_power_of_two(number.mantissa, number.exponent)


def stored(number: ExtendedFloat, dtype: DType) -> jax.Array:
    """Returns the number as a state stores it, in its dtype: inf if it is too large."""
    return from_extended(number).astype(dtype)


def in_dtype_of(number: ExtendedFloat, like: ExtendedFloat) -> ExtendedFloat:
    return ExtendedFloat(number.mantissa.astype(like.mantissa.dtype), number.exponent)


def bits_of(number: ExtendedFloat) -> jax.Array:
    """Returns the bits of `from_extended(number)`, but rounds a subnormal result instead of flushing it (XLA-18)."""
    dtype = number.mantissa.dtype
    fraction_bits, bias = float_format(dtype)
    exponent = number.exponent + (bias + fraction_bits - 1)
    units = jnp.round(times_power_of_two(number.mantissa, exponent))
    is_subnormal = number.exponent < 1 - bias
    as_subnormal = jnp.where(is_subnormal, units, 0).astype(integers_like(dtype))
    return jnp.where(is_subnormal, as_subnormal, magnitude_bits(from_extended(number)))


def is_greater(a: ExtendedFloat, b: ExtendedFloat) -> jax.Array:
    is_higher = a.exponent > b.exponent
    return is_higher | ((a.exponent == b.exponent) & (a.mantissa > b.mantissa))


def maximum(a: ExtendedFloat, b: ExtendedFloat) -> ExtendedFloat:
    """Returns the larger number, or NaN if one is NaN."""
    both_finite = jnp.isfinite(a.mantissa) & jnp.isfinite(b.mantissa)
    b_wins = jnp.isnan(b.mantissa) | (jnp.isinf(b.mantissa) & ~jnp.isnan(a.mantissa))
    takes_b = jnp.where(both_finite, is_greater(b, a), b_wins)
    return ExtendedFloat(*(jnp.where(takes_b, y, x) for x, y in zip(a, b, strict=True)))


def product(a: ExtendedFloat, b: ExtendedFloat) -> ExtendedFloat:
    """Returns a * b. It is infinite if a factor is, even for 0 * inf."""
    infinite = jnp.isinf(a.mantissa) | jnp.isinf(b.mantissa)
    # 0 * inf is left out, because `jax_debug_nans` would stop at it: see `tests/promises/test_train_steps.py`.
    finite = jnp.where(infinite, 1, a.mantissa) * b.mantissa
    return shifted(jnp.where(infinite, jnp.inf, finite), a.exponent + b.exponent)


def quotient(a: ExtendedFloat, b: ExtendedFloat) -> ExtendedFloat:
    """Returns a / b. x / 0 is infinite for x > 0 and for NaN, and 0 / 0 is 0."""
    divisor = jnp.where(b.mantissa == 0, 1, b.mantissa)
    ratio = shifted(a.mantissa / divisor, a.exponent - b.exponent)
    is_infinite = (b.mantissa == 0) & (a.mantissa != 0)
    return ratio._replace(mantissa=jnp.where(is_infinite, jnp.inf, ratio.mantissa))


def shifted(x: jax.Array, exponent: jax.Array) -> ExtendedFloat:
    number = to_extended(x)
    return ExtendedFloat(number.mantissa, number.exponent + exponent)
