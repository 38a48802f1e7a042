"""The exact rank of a percentile.

Percentile p of n sorted elements has the virtual index p (n - 1) / 100, a whole number and a fraction, counted from 0.
float32 cannot compute it. As `p * 0.01 * (n - 1)`, 22 of the 101 whole percentiles of 101 elements get the element
below the right one. So the product is divided in 64-bit integers, with a remainder. They need `jax.enable_x64`, which
`_selection` sets for its own operations alone.

A known percentile is exactly the fraction that its decimal digits denote, up to 15 decimals. One with more digits is
replaced by the nearest fraction with a denominator of at most 2**57. That moves the rank by less than 1e-17 of n, but
the fraction may become 0. A traced percentile is rounded to a multiple of 2**-24, which moves the rank by less than
1e-9 of n. A float32 of at least 0.5 is such a multiple already.
"""

from fractions import Fraction
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

Method = Literal["linear", "lower", "higher", "nearest", "midpoint"]


class VirtualIndex(NamedTuple):
    """The number percentile * (count - 1) / 100 = whole + remainder / divisor."""

    whole: jax.Array  # in the dtype of the count
    remainder: jax.Array  # uint64, less than the divisor
    divisor: int  # at most 2**57


class OrderStatistic(NamedTuple):
    """The sorted element at a rank, or the point a fraction of the way to the next one."""

    rank: jax.Array  # in the dtype of the count
    fraction: jax.Array  # a float, within 2 ulp; 0 only if the remainder is 0


def virtual_index(percentile: Fraction | jax.Array, count: jax.Array) -> VirtualIndex:
    """Returns the virtual index of a percentile of `count` elements, an array of uint32 or uint64."""
    if isinstance(percentile, Fraction):
        ratio = (percentile / 100).limit_denominator(2**57)
        numerator, divisor = jnp.asarray(ratio.numerator, jnp.uint64), ratio.denominator
    else:
        numerator = jnp.round(jnp.clip(percentile, 0, 100) * 2.0**24).astype(jnp.uint64)
        divisor = 100 * 2**24
    last = jnp.where(count == 0, count, count - 1)
    # The long division of numerator * last, in as many bits of `last` at a time as no partial dividend overflows with:
    # the remainder is below the divisor, the numerator at most equal to it, so both terms are at most 2**63.
    bits = 63 - divisor.bit_length()
    whole = remainder = jnp.zeros(count.shape, jnp.uint64)
    for position in reversed(range(0, jnp.iinfo(count.dtype).bits, bits)):
        digit = last.astype(jnp.uint64) >> position & (2**bits - 1)
        dividend = (remainder << bits) + numerator * digit
        whole, remainder = (whole << bits) + dividend // divisor, dividend % divisor
    return VirtualIndex(whole.astype(count.dtype), remainder, divisor)


def apply_method(index: VirtualIndex, method: Method, dtype: Any) -> OrderStatistic:
    """Returns the order statistic that NumPy's method of that name takes, with its fraction in a dtype."""
    whole, remainder, divisor = index
    is_between, nothing = remainder > 0, jnp.zeros(whole.shape, dtype)
    if method == "linear":
        return OrderStatistic(whole, remainder.astype(dtype) / divisor)
    if method == "midpoint":
        return OrderStatistic(whole, jnp.where(is_between, 0.5, nothing))
    if method == "lower":
        return OrderStatistic(whole, nothing)
    if method == "higher":
        step = is_between
    else:  # nearest; of two equally near ranks the even one, as in NumPy
        step = (2 * remainder > divisor) | ((2 * remainder == divisor) & (whole % 2 == 1))
    return OrderStatistic(whole + step.astype(whole.dtype), nothing)
