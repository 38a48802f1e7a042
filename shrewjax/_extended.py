"""Numbers beyond the range of floats.

An `ExtendedFloat` is `mantissa * 2**exponent`, its mantissa in [1, 2) and its exponent an int32. Norms are measured as
such numbers, because a norm may exceed float32 where the clip's quotient does not.

* Zero has mantissa 0 and exponent -2**20. So it compares below every other number, and the sum of two such exponents
  does not wrap around.
* An infinity or a NaN is the mantissa, with any exponent.
* Splitting a float is exact. Products and quotients are rounded once.

`_floats` says why `jnp.frexp` and `jnp.ldexp` do not serve here.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shrewjax._floats import exponent_of, float_format, integers_like, magnitude_bits, times_power_of_two


class ExtendedFloat(NamedTuple):
    """Non-negative numbers `mantissa * 2**exponent`, beyond the range of the mantissa's dtype."""

    mantissa: jax.Array  # float32 or float64: in [1, 2), or 0, inf or nan
    exponent: jax.Array  # int32, same shape


EXPONENT_OF_ZERO = -(2**20)


def to_extended(x: jax.Array) -> ExtendedFloat:
    """Returns x >= 0, exactly, subnormal numbers included."""
    fraction_bits, bias = float_format(x.dtype)
    # The bits of a subnormal x are the integer x * 2**(bias + fraction_bits - 1). Arithmetic on x itself would flush it
    # (XLA-18). `test_split_and_join_lose_nothing` holds this.
    as_integer = magnitude_bits(x)
    is_subnormal = as_integer < (1 << fraction_bits)
    normal = jnp.where(is_subnormal, as_integer.astype(x.dtype), x)
    correction = jnp.where(is_subnormal, 1 - bias - fraction_bits, 0)
    exponent = jnp.where(jnp.isfinite(normal), exponent_of(normal), 0)
    mantissa = times_power_of_two(normal, -exponent)
    return ExtendedFloat(mantissa, jnp.where(mantissa == 0, EXPONENT_OF_ZERO, exponent + correction))


def extended_number(value: float, dtype: Any) -> ExtendedFloat:
    """Returns a Python number >= 0, which may be beyond the range of the dtype."""
    if value == 0 or math.isinf(value):
        mantissa, exponent = value, 0 if value else EXPONENT_OF_ZERO
    else:
        half, exponent = math.frexp(value)
        mantissa, exponent = 2 * half, exponent - 1
    return ExtendedFloat(jnp.asarray(mantissa, dtype), jnp.asarray(exponent, jnp.int32))


def from_extended(number: ExtendedFloat) -> jax.Array:
    """Returns the number in its mantissa's dtype: inf if it is too large, 0 if it is too small."""
    return times_power_of_two(number.mantissa, number.exponent)


def to_float32(number: ExtendedFloat) -> jax.Array:
    """Returns the number as histories and states store it, float32: inf if it is too large."""
    return from_extended(number).astype(jnp.float32)


def in_dtype_of(number: ExtendedFloat, like: ExtendedFloat) -> ExtendedFloat:
    """Returns the number with its mantissa in the dtype of another."""
    return ExtendedFloat(number.mantissa.astype(like.mantissa.dtype), number.exponent)


def bits_of(number: ExtendedFloat) -> jax.Array:
    """Returns the bits of `from_extended(number)`, but rounds a subnormal result instead of flushing it (XLA-18)."""
    dtype = number.mantissa.dtype
    fraction_bits, bias = float_format(dtype)
    units = jnp.round(times_power_of_two(number.mantissa, number.exponent + (bias + fraction_bits - 1)))
    is_subnormal = number.exponent < 1 - bias
    as_subnormal = jnp.where(is_subnormal, units, 0).astype(integers_like(dtype))
    return jnp.where(is_subnormal, as_subnormal, magnitude_bits(from_extended(number)))


def is_greater(a: ExtendedFloat, b: ExtendedFloat) -> jax.Array:
    """Returns a > b for finite numbers."""
    return (a.exponent > b.exponent) | ((a.exponent == b.exponent) & (a.mantissa > b.mantissa))


def maximum(a: ExtendedFloat, b: ExtendedFloat) -> ExtendedFloat:
    """Returns the larger number, or NaN if one is NaN."""
    both_finite = jnp.isfinite(a.mantissa) & jnp.isfinite(b.mantissa)
    b_wins = jnp.isnan(b.mantissa) | (jnp.isinf(b.mantissa) & ~jnp.isnan(a.mantissa))
    takes_b = jnp.where(both_finite, is_greater(b, a), b_wins)
    return ExtendedFloat(*(jnp.where(takes_b, y, x) for x, y in zip(a, b, strict=True)))


def product(a: ExtendedFloat, b: ExtendedFloat) -> ExtendedFloat:
    """Returns a * b. It is infinite if a factor is, even for 0 * inf."""
    infinite = jnp.isinf(a.mantissa) | jnp.isinf(b.mantissa)
    # 0 * inf is left out, because `jax_debug_nans` would stop at it: see `tests/test_train_steps.py`.
    finite = a.mantissa * jnp.where(infinite, 1, b.mantissa)
    return shifted(jnp.where(infinite, jnp.inf, finite), a.exponent + b.exponent)


def quotient(a: ExtendedFloat, b: ExtendedFloat) -> ExtendedFloat:
    """Returns a / b. x / 0 is infinite for x > 0, and 0 / 0 is 0."""
    ratio = shifted(a.mantissa / jnp.where(b.mantissa == 0, 1, b.mantissa), a.exponent - b.exponent)
    return ExtendedFloat(jnp.where((b.mantissa == 0) & (a.mantissa != 0), jnp.inf, ratio.mantissa), ratio.exponent)


def shifted(x: jax.Array, exponent: jax.Array) -> ExtendedFloat:
    """Returns x * 2**exponent for x >= 0."""
    number = to_extended(x)
    return ExtendedFloat(number.mantissa, number.exponent + exponent)
