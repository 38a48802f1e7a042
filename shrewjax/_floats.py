"""Floats and their bits: comparing, rounding and scaling without losing subnormal numbers.

The bits of a float >= 0, read as an integer, order as the numbers do. Comparisons here use these integers, because CPU
and TPU flush subnormal numbers to zero in every floating-point operation, comparisons included (XLA-18). The tests are
in `tests/test_norms.py`, under "numbers and their bits".

Four functions of JAX look like ones of this module or of `_extended`, and cannot replace them:

* Not `jnp.signbit` for `sign_bit`, because it refuses 8-bit floats.
* Not `jnp.exp2` for `power_of_two`, because on CPU it misses most powers of two, 2**13 for one. Not `2.0**exponent`
  either, because that is inexact on GPU (XLA-19).
* Not `jnp.ldexp` for `times_power_of_two`, because on CPU it returns a subnormal number unscaled.
* Not `jnp.frexp` for `_extended.to_extended`, because on CPU it returns mantissa 0.5 and exponent -149 for every
  subnormal float32.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax._arguments import Scalar


def is_complex(x: Any) -> bool:
    """Returns whether an array is complex."""
    return x.dtype.kind == "c"


def real_dtype(x: Any) -> Any:
    """Returns an array's dtype, or that of its parts if it is complex."""
    return jnp.finfo(x.dtype).dtype


def accumulator_dtype(x: Any) -> Any:
    """Returns the real dtype in which to sum an array's elements or their parts: float64 for float64, else float32."""
    return jnp.dtype(jnp.float64 if real_dtype(x) == jnp.float64 else jnp.float32)


def upcast(x: Any, dtype: Any) -> jax.Array:
    """Returns x in a real dtype, or in the complex dtype of that precision if x is complex."""
    return lax.convert_element_type(x, upcast_dtype(x, dtype))


def upcast_dtype(x: Any, dtype: Any) -> Any:
    """Returns the dtype of `upcast(x, dtype)`."""
    return jnp.dtype(f"complex{2 * jnp.finfo(dtype).bits}" if is_complex(x) else dtype)


def mul_real(x: jax.Array, factor: jax.Array) -> jax.Array:
    """Returns x times a real factor. Parts are multiplied apart, because a complex product turns inf + 0i into NaN."""
    return lax.complex(x.real * factor, x.imag * factor) if is_complex(x) else x * factor


def magnitude_bits(x: jax.Array) -> jax.Array:
    """Returns the bits of |x|: integers that order as the magnitudes do, with NaN above infinity."""
    integers = integers_like(x.dtype)
    return lax.bitcast_convert_type(x, integers) & jnp.asarray(jnp.iinfo(integers).max, integers)


def sign_bit(x: jax.Array) -> jax.Array:
    """Returns whether the sign bit is set. `x < 0` would flush a subnormal x to 0 (XLA-18)."""
    return lax.bitcast_convert_type(x, integers_like(x.dtype)) < 0


def infinity_bits(dtype: Any) -> int:
    """Returns the bits of infinity. The bits of NaNs are larger."""
    fraction_bits, bias = float_format(dtype)
    return (2 * bias + 1) << fraction_bits


def narrower_bits(bits: jax.Array, dtype: Any, narrower: Any) -> jax.Array:
    """Returns the bits of a magnitude, rounded toward zero to a narrower dtype."""
    fraction_bits, bias = float_format(dtype)
    to_fraction_bits, to_bias = float_format(narrower)
    dropped = fraction_bits - to_fraction_bits
    result = bits >> dropped
    if to_bias != bias:
        infinity, to_infinity = infinity_bits(dtype), infinity_bits(narrower)
        exponent = bits >> fraction_bits
        significand = (bits & ((1 << fraction_bits) - 1)) | (1 << fraction_bits)
        to_unit = jnp.clip(dropped + bias - to_bias + 1 - exponent, 0, jnp.iinfo(bits.dtype).bits - 1)
        is_normal = exponent > bias - to_bias
        result = jnp.where(is_normal, result - ((bias - to_bias) << to_fraction_bits), significand >> to_unit)
        result = jnp.where(bits >= infinity, to_infinity, jnp.minimum(result, to_infinity - 1))
    return result.astype(integers_like(narrower))


def wider_bits(bits: jax.Array, dtype: Any, wider: Any) -> jax.Array:
    """Returns the bits of the same magnitude in a wider dtype. NaN stays NaN."""
    fraction_bits, bias = float_format(dtype)
    to_fraction_bits, to_bias = float_format(wider)
    bits = bits.astype(integers_like(wider))
    result = bits << (to_fraction_bits - fraction_bits)
    if to_bias != bias:
        unit = power_of_two(jnp.asarray(1 - bias - fraction_bits, jnp.int32), wider)
        subnormal = lax.bitcast_convert_type(bits.astype(wider) * unit, bits.dtype)
        result = jnp.where(bits < (1 << fraction_bits), subnormal, result + ((to_bias - bias) << to_fraction_bits))
        beyond = bits - infinity_bits(dtype)
        result = jnp.where(beyond >= 0, infinity_bits(wider) + beyond, result)
    return result


def round_toward_zero(value: Scalar, dtype: Any) -> jax.Array:
    """Returns the largest finite number of a dtype that is at most a threshold; 0 for a negative threshold.

    Callers handle an infinite threshold themselves: it becomes the largest finite number.
    """
    if isinstance(value, jax.Array):
        return _rounded_toward_zero(value, dtype)
    # A Python number is rounded on the host, because the device would flush a subnormal one (XLA-18).
    number = min(value, float(jnp.finfo(dtype).max))
    nearest = np.asarray(number, dtype)
    integers = integers_like(dtype)
    return jnp.asarray((nearest.view(integers) - integers.type(float(nearest) > number)).view(dtype))


def times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """Returns x * 2**exponent. It multiplies twice, because 2**exponent may leave the range where the result does not.

    A subnormal x or result is flushed on CPU and TPU.
    """
    first, second = factors_of_two(exponent, x.dtype)
    return x * first * second


def factors_of_two(exponent: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns two powers of two, each in range, whose product is 2**exponent."""
    _, bias = float_format(dtype)
    first = jnp.clip(exponent, 1 - bias, bias)
    return power_of_two(first, dtype), power_of_two(jnp.clip(exponent - first, -bias, bias), dtype)


def power_of_two_for(x: jax.Array) -> jax.Array:
    """Returns a power of two that scales each finite, normal x > 0 to [1, 4)."""
    _, bias = float_format(x.dtype)
    return power_of_two(-jnp.clip(exponent_of(x), 1 - bias, bias - 1), x.dtype)


def power_of_two(exponent: jax.Array, dtype: Any) -> jax.Array:
    """Returns 2**exponent for -bias < exponent <= bias, and 0 for exponent -bias. Made of bits, so exact (XLA-19)."""
    fraction_bits, bias = float_format(dtype)
    return lax.bitcast_convert_type((exponent + bias).astype(integers_like(dtype)) << fraction_bits, dtype)


def exponent_of(x: jax.Array) -> jax.Array:
    """Returns the exponent of a normal number, int32. It is -bias for zeros and subnormal numbers."""
    fraction_bits, bias = float_format(x.dtype)
    return (magnitude_bits(x) >> fraction_bits).astype(jnp.int32) - bias


def integers_like(dtype: Any) -> Any:
    """Returns the signed integer dtype of the same size."""
    return jnp.dtype(f"int{jnp.finfo(dtype).bits}")


def float_format(dtype: Any) -> tuple[int, int]:
    """Returns the number of fraction bits and the exponent's bias."""
    info = jnp.finfo(dtype)
    return int(info.nmant), 2 ** (int(info.nexp) - 1) - 1


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded_toward_zero(value: jax.Array, dtype: Any) -> jax.Array:
    wanted = jnp.clip(value, 0, float(jnp.finfo(dtype).max))
    nearest = wanted.astype(dtype)
    is_above = nearest.astype(wanted.dtype) > wanted
    integers = integers_like(dtype)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(nearest, integers) - is_above.astype(integers), dtype)


@_rounded_toward_zero.defjvp
def _rounded_toward_zero_jvp(
    dtype: Any, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    _, tangent = jax.jvp(lambda v: jnp.clip(v, 0, float(jnp.finfo(dtype).max)).astype(dtype), primals, tangents)
    return _rounded_toward_zero(primals[0], dtype), tangent
