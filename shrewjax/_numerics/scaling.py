r"""Clipping to a norm: decide whether a norm exceeds its limit, compute the scale, apply it to the gradients.

A scale has two factors, because one number may leave the range although its product with a gradient does not.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shrewjax._base.axes import UnitDims
from shrewjax._base.branches import run_if
from shrewjax._base.mesh import placed_like
from shrewjax._base.types import DType, Leaf, Scalar
from shrewjax._numerics.floats import (
    ExtendedFloat,
    extended_number,
    float_format,
    is_greater,
    mul_real,
    power_of_two,
    sign_bit,
    sum_dtype,
    to_extended,
    upcast,
)
from shrewjax._numerics.vectors import broadcast_to_leaf


class ClipScale(NamedTuple):
    """The number `coarse * fine * fine` that a clip multiplies by where it `applies`: below 1, or NaN."""

    coarse: jax.Array  # 1 only where nothing changes
    fine: jax.Array  # 1, unless one factor would underflow; not read where nothing changes

    @property
    def applies(self) -> jax.Array:
        return self.coarse != 1


def as_limit(value: Scalar, like: ExtendedFloat | jax.Array) -> ExtendedFloat:
    """Returns a threshold, or an array of them, as an `ExtendedFloat`. A negative one counts as 0.

    `like` are the norms that it limits, or the array whose slices it limits.
    """
    dtype = sum_dtype(*jax.tree.leaves(like)[:1])
    if not isinstance(value, jax.Array):
        return placed_like(extended_number(value, dtype), like)
    # Selected by the sign bit, because a maximum would flush a subnormal threshold to 0 (XLA-18).
    is_negative = sign_bit(value) & ~jnp.isnan(value)
    number = to_extended(jnp.where(is_negative, jnp.zeros_like(value), value))
    return placed_like(number._replace(mantissa=number.mantissa.astype(dtype)), like)


@partial(jax.jit, inline=True)  # XLA-21
def clip_scales(norms: Sequence[ExtendedFloat], limits: Sequence[ExtendedFloat]) -> list[ClipScale]:
    """Returns the scales that reduce norms to their limits, in their shapes: the decision of every norm clip."""
    if not norms:
        return []
    applies = list(map(_exceeds, norms, limits))

    def decide() -> list[ClipScale]:
        return list(map(_scale_to_limit, norms, limits, applies))

    def leave() -> list[ClipScale]:
        ones = [jnp.ones_like(norm.mantissa) for norm in norms]
        return list(map(ClipScale, ones, ones))

    def decide_if_needed() -> list[ClipScale]:
        # XLA-5: without the branch, XLA:CPU fuses this arithmetic into the kernel of every leaf and repeats it there.
        # TPU: as on CPU. Only on GPUs does a branch make the host wait (XLA-3).
        is_needed = jnp.any(jnp.stack([jnp.any(a) for a in applies]))
        return run_if(is_needed, decide, leave)

    return lax.platform_dependent(cuda=decide, rocm=decide, default=decide_if_needed)


def counts_as_clipped(scale: ClipScale, norm: ExtendedFloat) -> jax.Array:
    """Returns whether a unit was clipped. A unit with zero norm never counts."""
    return scale.applies & (norm.mantissa != 0)


def is_above(norm: ExtendedFloat, limit: ExtendedFloat) -> jax.Array:
    """Returns whether a finite norm is above its limit."""
    # Not from the scale: on an H100, the decision would take one more kernel.
    is_finite_above = is_greater(norm, limit) & jnp.isfinite(norm.mantissa)
    return is_finite_above & jnp.isfinite(limit.mantissa)


def apply_scale(x: Leaf, scale: ClipScale, dims: UnitDims = ()) -> jax.Array:
    """Returns x times the scale of each unit if it applies, else x to the last bit.

    The result has the dtype of x. The product is taken in the dtype of the scale.
    """
    scale = ClipScale(*(broadcast_to_leaf(part, x, dims) for part in scale))
    product = upcast(x, scale.coarse.dtype)
    product = mul_real(product, scale.coarse, scale.fine, scale.fine)
    # Selected, not multiplied by 1, because x * 1 flushes subnormals on CPU and TPU (XLA-18).
    # `test_gradients_inside_keep_every_bit` holds this.
    select = lax.select if scale.applies.ndim == 0 else jnp.where
    return select(scale.applies, lax.convert_element_type(product, x.dtype), x)


def clip_slices(
    x: Leaf, norm: ExtendedFloat, limit: ExtendedFloat, dims: UnitDims
) -> tuple[jax.Array, jax.Array]:
    """Returns x with each slice scaled to its limit, and which slices were. If none is, x is not written again."""
    applies = _exceeds(norm, limit)

    def scaled() -> jax.Array:
        return apply_scale(x, _scale_to_limit(norm, limit, applies), dims)

    return run_if(jnp.any(applies), scaled, lambda: x), applies


def applied_scale(scale: ClipScale, dtype: DType) -> jax.Array:
    """Returns the number that gradients were multiplied by, in a dtype: 1 if nothing was clipped."""
    applied = scale.coarse * scale.fine * scale.fine
    return jnp.where(scale.applies, applied, 1).astype(dtype)


def _exceeds(norm: ExtendedFloat, limit: ExtendedFloat) -> jax.Array:
    """Returns whether a clip changes gradients of this norm. A NaN or an infinite norm does.

    So does a limit of 0, because flushed subnormal elements have norm 0. An infinite limit never does.
    """
    defined = jnp.isfinite(norm.mantissa) & ~jnp.isnan(limit.mantissa)
    changes = is_greater(norm, limit) | (limit.mantissa == 0) | ~defined
    return changes & (limit.mantissa != jnp.inf)


def _scale_to_limit(norm: ExtendedFloat, limit: ExtendedFloat, applies: jax.Array) -> ClipScale:
    """Returns the scale limit / norm where it applies; NaN if one of the two is NaN or the norm is infinite.

    A limit of 1 and a norm of 3 * 2**140 in float32: 1/3 * 2**-140 is below the smallest normal number, 2**-126. So it
    comes as 1/3 * 2**-124, `coarse`, and twice 2**-8, `fine`.
    """
    dtype = norm.mantissa.dtype
    defined = jnp.isfinite(norm.mantissa) & ~jnp.isnan(limit.mantissa)
    # An infinite limit, which does not apply, would make derivatives NaN.
    bound = jnp.where(applies, limit.mantissa, 1)
    # 1. Divide the mantissas. Both are in [1, 2), so the ratio is between 1/2 and 2.
    ratio = bound / jnp.where(defined & (norm.mantissa > 0), norm.mantissa, 1)
    # 2. Split the exponent, at most 0 because the norm is larger. `coarse` takes it down to `lowest`, and each of two
    # `fine` half of the rest.
    _, bias = float_format(dtype)
    lowest, exponent = 2 - bias, limit.exponent - norm.exponent
    fine_exponent = jnp.clip((exponent - lowest) // 2, 1 - bias, 0)
    coarse_exponent = jnp.clip(exponent - 2 * fine_exponent, lowest, 0)
    # 3. The product is normal, because the ratio is at least 1/2 and the exponent at least 2 - bias.
    product = ratio * power_of_two(coarse_exponent, dtype)
    coarse = jnp.where(applies, jnp.where(defined, product, jnp.nan), 1)
    return ClipScale(coarse, power_of_two(fine_exponent, dtype))
