"""TODO."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax._arguments import Scalar


def is_complex(x: Any) -> bool:
    return x.dtype.kind == "c"


def real_dtype(x: Any) -> Any:
    return jnp.finfo(x.dtype).dtype


def accumulator_dtype(x: Any) -> Any:
    """The real dtype to sum x's elements, or their parts, in: float32, or float64 if x has that."""
    return jnp.dtype(jnp.float64 if real_dtype(x) == jnp.float64 else jnp.float32)


def upcast(x: Any, dtype: Any) -> jax.Array:
    """x in a real dtype, or in the complex one of its precision if x is complex."""
    return lax.convert_element_type(x, upcast_dtype(x, dtype))


def upcast_dtype(x: Any, dtype: Any) -> Any:
    """What `widen` makes of x."""
    return jnp.dtype(f"complex{2 * jnp.finfo(dtype).bits}" if is_complex(x) else dtype)


def mul_real(x: jax.Array, factor: jax.Array) -> jax.Array:
    """x times a real factor; componentwise, as a complex product would turn inf + 0i into NaN."""
    return lax.complex(x.real * factor, x.imag * factor) if is_complex(x) else x * factor


def magnitude_bits(x: jax.Array) -> jax.Array:
    """The bits of |x|: integers that order as the magnitudes do, with NaN above infinity."""
    integers = integers_like(x.dtype)
    return lax.bitcast_convert_type(x, integers) & jnp.asarray(jnp.iinfo(integers).max, integers)


def sign_bit(x: jax.Array) -> jax.Array:
    """Whether the sign bit is set: x < 0 also where that comparison would flush x to 0."""
    return lax.bitcast_convert_type(x, integers_like(x.dtype)) < 0


def infinity_bits(dtype: Any) -> int:
    """The bits of infinity: above them are the NaNs."""
    fraction_bits, bias = float_format(dtype)
    return (2 * bias + 1) << fraction_bits


def narrower_bits(bits: jax.Array, dtype: Any, narrower: Any) -> jax.Array:
    """The bits of the largest magnitude in a narrower dtype that is not above one with these; -1 stays -1."""
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
        result = jnp.where(bits < 0, -1, result)
    return result.astype(integers_like(narrower))


def wider_bits(bits: jax.Array, dtype: Any, wider: Any) -> jax.Array:
    """The bits of the same magnitude, no NaN, in a wider dtype."""
    fraction_bits, bias = float_format(dtype)
    to_fraction_bits, to_bias = float_format(wider)
    bits = bits.astype(integers_like(wider))
    result = bits << (to_fraction_bits - fraction_bits)
    if to_bias != bias:
        unit = power_of_two(jnp.asarray(1 - bias - fraction_bits, jnp.int32), wider)
        subnormal = lax.bitcast_convert_type(bits.astype(wider) * unit, bits.dtype)
        result = jnp.where(bits < (1 << fraction_bits), subnormal, result + ((to_bias - bias) << to_fraction_bits))
        result = jnp.where(bits >= infinity_bits(dtype), infinity_bits(wider), result)
    return result


def round_toward_zero(value: Scalar, dtype: Any) -> jax.Array:
    """A threshold in another dtype: the largest finite number there that is not above it, 0 if it is negative.

    Infinity, which callers leave out, may stay what it is.
    """
    if isinstance(value, jax.Array):
        return _rounded_toward_zero(value, dtype)
    # Once it is known, on the host, which flushes nothing.
    number = min(value, float(jnp.finfo(dtype).max))
    nearest = np.asarray(number, dtype)
    integers = integers_like(dtype)
    return jnp.asarray((nearest.view(integers) - integers.type(float(nearest) > number)).view(dtype))


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


def times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """x * 2**exponent in two factors, so that no factor leaves the range where the result does not."""
    first, second = factors_of_two(exponent, x.dtype)
    return x * first * second


def power_of_two_for(x: jax.Array) -> jax.Array:
    """A power of two that brings each finite, normal x > 0 to [1, 4), to multiply with."""
    _, bias = float_format(x.dtype)
    return power_of_two(-jnp.clip(exponent_of(x), 1 - bias, bias - 1), x.dtype)


def factors_of_two(exponent: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    _, bias = float_format(dtype)
    first = jnp.clip(exponent, 1 - bias, bias)
    return power_of_two(first, dtype), power_of_two(jnp.clip(exponent - first, -bias, bias), dtype)


def power_of_two(exponent: jax.Array, dtype: Any) -> jax.Array:
    """2**exponent for -bias < exponent <= bias, and 0 for -bias; from the bits, as `exp2` is not exact."""
    fraction_bits, bias = float_format(dtype)
    return lax.bitcast_convert_type((exponent + bias).astype(integers_like(dtype)) << fraction_bits, dtype)


def exponent_of(x: jax.Array) -> jax.Array:
    fraction_bits, bias = float_format(x.dtype)
    return (magnitude_bits(x) >> fraction_bits).astype(jnp.int32) - bias


def integers_like(dtype: Any) -> Any:
    return jnp.dtype(f"int{jnp.finfo(dtype).bits}")


def float_format(dtype: Any) -> tuple[int, int]:
    info = jnp.finfo(dtype)
    return int(info.nmant), 2 ** (int(info.nexp) - 1) - 1
