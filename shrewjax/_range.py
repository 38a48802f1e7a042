"""The range in which a sum of p-th powers can be trusted, and the powers of two that bring other sums into it.

Why two passes suffice, for p = 2 in float32 and a sum over n elements:

* First pass: sum x**2 as it is, and trust a finite sum of at least 2**-60. A square below 2**-126 may be flushed. All
  flushed squares together are below n 2**-126, and half an ulp of 2**-60 is 2**-84. So they do not count for
  n < 2**42.
* Second pass after an overflow: scale by 2**-96. Elements are below 2**128, so their squares are now below 2**64, and
  2**64 of them fit. The scaled sum is about 2**128 * 2**-192 = 2**-64 or more, half an ulp of which is at least
  2**-89. So flushed squares do not count for n < 2**37.
* Second pass for a sum below 2**-60: scale by 2**88. The scaled sum is below 2**-60 * 2**176 = 2**116. The smallest
  subnormal number, 2**-149, becomes 2**-61, whose square is normal. So no square is flushed.

So a third pass is never needed. For p = 1 no bound is narrower. In a complex leaf the real and the imaginary parts
count as elements. Orders 3 and 4 share the first pass; their second is `_norms._measure_by_maximum`. The numbers for
float64 follow in the same way, with 2**-1022 for 2**-126 and 2**-1074 for 2**-149.

A sum of exactly 0 is not trusted, because all squares may have been flushed. So gradients of zeros are read twice. If
only some units are zero, only their leaves are read twice (`_norms._powers_of_units`).

The idea is that of J. L. Blue, ACM TOMS 4 (1978). The tests are `test_norm_neither_overflows_nor_underflows` and, for
units, `test_unit_norms_neither_overflow_nor_underflow`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class _Range(NamedTuple):
    """The sums of p-th powers that the first pass may trust, and the exponents that scale all other elements."""

    trusted_above: float  # a sum from here on has lost less than half an ulp to underflow
    shrink: int  # after an overflow, elements times 2**shrink overflow no sum
    grow: int  # elements of a smaller sum, times 2**grow, neither overflow nor underflow


RANGE = {
    jnp.dtype(jnp.float32): _Range(2.0**-60, -96, 88),
    jnp.dtype(jnp.float64): _Range(2.0**-900, -600, 600),
}


def shift_into_range(powers: jax.Array, small_counts: jax.Array | bool = True) -> jax.Array:
    """Returns the exponent of the power of two that scales elements so that their sum can be trusted; 0 if it can.

    It is also 0 for a sum that is too small if such sums do not count.
    """
    trusted_above, shrink, grow = RANGE[powers.dtype]
    return jnp.where(powers == jnp.inf, shrink, jnp.where((powers < trusted_above) & small_counts, grow, 0))
