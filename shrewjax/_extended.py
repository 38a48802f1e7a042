"""TODO."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shrewjax._floats import exponent_of, float_format, integers_like, magnitude_bits, times_power_of_two


class ExtendedFloat(NamedTuple):
    """Non-negative numbers `mantissa * 2**exponent`, beyond the range of the mantissa's dtype."""

    mantissa: jax.Array  # float32 or float64: in [1, 2), or 0, inf or nan
    exponent: jax.Array  # int32, same shape


# A zero compares below every other number, and two such exponents add without wrapping.
EXPONENT_OF_ZERO = -(2**20)


def to_extended(x: jax.Array) -> ExtendedFloat:
    """Splits x >= 0 exactly, subnormals included. An infinity or a NaN becomes the mantissa."""
    fraction_bits, bias = float_format(x.dtype)
    # Arithmetic flushes subnormals on some backends, but their bits are the integer x * 2**(bias + fraction_bits - 1).
    as_integer = magnitude_bits(x)
    is_subnormal = as_integer < (1 << fraction_bits)
    normal = jnp.where(is_subnormal, as_integer.astype(x.dtype), x)
    moved = jnp.where(is_subnormal, 1 - bias - fraction_bits, 0)
    exponent = jnp.where(jnp.isfinite(normal), exponent_of(normal), 0)
    mantissa = times_power_of_two(normal, -exponent)
    return ExtendedFloat(mantissa, jnp.where(mantissa == 0, EXPONENT_OF_ZERO, exponent + moved))


def extended_number(value: float, dtype: Any) -> ExtendedFloat:
    """Splits a Python number >= 0, also where the dtype could not hold it."""
    if value == 0 or math.isinf(value):
        mantissa, exponent = value, 0 if value else EXPONENT_OF_ZERO
    else:
        half, exponent = math.frexp(value)
        mantissa, exponent = 2 * half, exponent - 1
    return ExtendedFloat(jnp.asarray(mantissa, dtype), jnp.asarray(exponent, jnp.int32))


def from_extended(number: ExtendedFloat) -> jax.Array:
    """The number in the mantissa's dtype: inf where it is too large for it, 0 where it is too small."""
    return times_power_of_two(number.mantissa, number.exponent)


def to_float32(number: ExtendedFloat) -> jax.Array:
    """The number as the statistics and the states have it: inf where it is too large."""
    return from_extended(number).astype(jnp.float32)


def in_dtype_of(number: ExtendedFloat, like: ExtendedFloat) -> ExtendedFloat:
    """The number, its mantissa in another's dtype."""
    return ExtendedFloat(number.mantissa.astype(like.mantissa.dtype), number.exponent)


def bits_of(number: ExtendedFloat) -> jax.Array:
    """The bits of `join(number)`, with a subnormal result rounded instead of flushed."""
    dtype = number.mantissa.dtype
    fraction_bits, bias = float_format(dtype)
    units = jnp.round(times_power_of_two(number.mantissa, number.exponent + (bias + fraction_bits - 1)))
    is_subnormal = number.exponent < 1 - bias
    as_subnormal = jnp.where(is_subnormal, units, 0).astype(integers_like(dtype))
    return jnp.where(is_subnormal, as_subnormal, magnitude_bits(from_extended(number)))


def is_greater(a: ExtendedFloat, b: ExtendedFloat) -> jax.Array:
    """a > b for finite numbers."""
    return (a.exponent > b.exponent) | ((a.exponent == b.exponent) & (a.mantissa > b.mantissa))


def maximum(a: ExtendedFloat, b: ExtendedFloat) -> ExtendedFloat:
    """The larger; a NaN wins, then an infinity."""
    both_finite = jnp.isfinite(a.mantissa) & jnp.isfinite(b.mantissa)
    b_wins = jnp.isnan(b.mantissa) | (jnp.isinf(b.mantissa) & ~jnp.isnan(a.mantissa))
    takes_b = jnp.where(both_finite, is_greater(b, a), b_wins)
    return ExtendedFloat(*(jnp.where(takes_b, y, x) for x, y in zip(a, b, strict=True)))


def product(a: ExtendedFloat, b: ExtendedFloat) -> ExtendedFloat:
    """a * b; infinite if a factor is, whatever the other."""
    infinite = jnp.isinf(a.mantissa) | jnp.isinf(b.mantissa)
    finite = a.mantissa * jnp.where(infinite, 1, b.mantissa)  # never 0 * inf, at which `jax_debug_nans` stops
    return shifted(jnp.where(infinite, jnp.inf, finite), a.exponent + b.exponent)


def quotient(a: ExtendedFloat, b: ExtendedFloat) -> ExtendedFloat:
    """a / b; x / 0 is infinite, 0 / 0 is 0."""
    ratio = shifted(a.mantissa / jnp.where(b.mantissa == 0, 1, b.mantissa), a.exponent - b.exponent)
    return ExtendedFloat(jnp.where((b.mantissa == 0) & (a.mantissa != 0), jnp.inf, ratio.mantissa), ratio.exponent)


def shifted(x: jax.Array, exponent: jax.Array) -> ExtendedFloat:
    number = to_extended(x)
    return ExtendedFloat(number.mantissa, number.exponent + exponent)
