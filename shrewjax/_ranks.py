"""The exact rank of a percentile.

Percentile p of n sorted elements has the virtual index p (n - 1) / 100, a whole number and a fraction, counted from 0.
float32 cannot compute it. As `p * 0.01 * (n - 1)`, 22 of the 101 whole percentiles of 101 elements get the element
below the right one. So the product and the quotient are computed in integers (`_bigint`). The fraction is rounded
down to a multiple of 2**-64. A *sticky* bit records whether rounding changed it, as in IEEE arithmetic.

A known percentile is exactly the fraction that its decimal digits denote. A traced one is rounded to a multiple of
2**-24, which moves the rank by less than 1e-9 of n. A float32 of at least 0.5 is such a multiple already.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from shrewjax import _bigint
from shrewjax._bigint import BigUint

Method = Literal["linear", "lower", "higher", "nearest", "midpoint"]


class VirtualIndex(NamedTuple):
    """The number percentile * (count - 1) / 100, never rounded up."""

    whole: BigUint
    fraction: jax.Array  # in four half words, (4, ...), units of 2**-64
    sticky: jax.Array  # bool: the fraction was rounded down


class OrderStatistic(NamedTuple):
    """The sorted element at a rank, or the point a fraction of the way to the next one."""

    rank: BigUint
    fraction: jax.Array  # in four half words, (4, ...), units of 2**-64; 0 only if the exact fraction is 0


def virtual_index(percentile: Fraction | jax.Array, count: BigUint) -> VirtualIndex:
    """Returns the virtual index of a percentile of `count` elements. The count may be traced."""
    one = _bigint.from_word(jnp.ones_like(count[0]), len(count))
    last = _bigint.halves(_bigint.where(_bigint.equals(count, 0), count, _bigint.subtract(count, one)))
    if isinstance(percentile, Fraction):
        ratio = percentile / 100
        numerator = _bigint.halves(_bigint.constant(ratio.numerator, _bigint.words_for(ratio.numerator)))
        divisors = _half_word_factors(ratio.denominator)
    else:
        on_grid = jnp.round(jnp.clip(percentile, 0, 100) * 2.0**24).astype(jnp.uint32)
        numerator, divisors = _bigint.halves((on_grid,)), [100, 2**12, 2**12]
    digits = jnp.concatenate([jnp.zeros((4, *last.shape[1:]), jnp.uint32), _bigint.multiply(numerator[:, None], last)])
    sticky = jnp.zeros(last.shape[1:], bool)
    for divisor in divisors:
        digits, remainder = _bigint.divide(digits, divisor)
        sticky |= remainder != 0
    return VirtualIndex(_bigint.from_halves(digits[4:], len(count)), digits[:4], sticky)


def static_virtual_index(percentile: Fraction, counts: Sequence[int], words: int) -> VirtualIndex:
    """Returns the virtual index for each of several known counts, computed on the host."""
    positions = [percentile * max(n - 1, 0) / 100 for n in counts]
    wholes = [p.numerator // p.denominator for p in positions]
    fractions = [(p - whole) * 2**64 for p, whole in zip(positions, wholes, strict=True)]
    fraction = _bigint.halves(_bigint.constant([int(f) for f in fractions], 2))
    return VirtualIndex(_bigint.constant(wholes, words), fraction, jnp.asarray([f.denominator > 1 for f in fractions]))


def apply_method(index: VirtualIndex, method: Method) -> OrderStatistic:
    """Returns the order statistic that NumPy's method of that name takes at a virtual index."""
    whole, fraction, sticky = index
    none, highest = jnp.zeros_like(fraction), fraction[3]
    is_round = ~sticky & (jnp.max(fraction[:3], axis=0) == 0)
    if method == "linear":
        return OrderStatistic(whole, fraction.at[0].set(fraction[0] | sticky.astype(jnp.uint32)))
    if method == "midpoint":
        return OrderStatistic(whole, none.at[3].set(jnp.where(is_round & (highest == 0), 0, 2**15)))
    if method == "lower":
        return OrderStatistic(whole, none)
    if method == "higher":
        step = ~(is_round & (highest == 0))
    else:  # nearest; of two equally near ranks the even one, as in NumPy
        step = (highest >= 2**15) & (~(is_round & (highest == 2**15)) | (whole[0] % 2 == 1))
    return OrderStatistic(_bigint.add(whole, _bigint.from_word(step.astype(jnp.uint32), len(whole))), none)


def as_float(fraction: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the fraction of an order statistic as a float, within 2 ulp."""
    result = jnp.zeros(fraction.shape[1:], dtype)
    for half in fraction:
        result = (result + half.astype(dtype)) * 2.0**-16
    return result


def _half_word_factors(denominator: int) -> list[int]:
    """Returns the denominator of a decimal number as a product of half words."""
    factors, left = [], denominator
    while left >= 2**16:
        factors.append(gcd(left, 10**4))
        left //= factors[-1]
    return [*factors, left]
