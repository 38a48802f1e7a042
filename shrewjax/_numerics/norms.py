"""Norms of leaves that neither overflow nor underflow: of all leaves together, by leaf, by unit and by slice.

Norms of order p = 1 or 2 take three steps:

* `_first_pass` sums the p-th powers of each leaf's units, as they are.
* `shift_into_range` says which sums left the range of floats, and by which power of two to scale their elements.
* `_again_if` reads leaves again in a branch that is rarely taken, and sums their scaled elements.

A norm is an `ExtendedFloat`, so neither it nor a quotient of two norms leaves the range before the clipped gradient
does.

Why two passes suffice, for p = 2 in float32 and a sum over n elements:

* First pass: trust a finite sum of x**2 of at least 2**-60. A square below 2**-126 may be flushed. All flushed squares
  together are below n 2**-126, and half an ulp of 2**-60 is 2**-84. So they do not count for n < 2**42.
* Second pass after an overflow: scale by 2**-96. Squares are now below 2**64, and 2**64 of them fit. The scaled sum is
  about 2**128 * 2**-192 = 2**-64 or more, half an ulp of which is at least 2**-89. So flushed squares do not count for
  n < 2**37.
* Second pass for a sum below 2**-60: scale by 2**88. The scaled sum is below 2**-60 * 2**176 = 2**116. The smallest
  subnormal number, 2**-149, becomes 2**-61, whose square is normal. So no square is flushed.

For p = 1 every bound is at least as wide. A complex leaf counts as twice as many elements. The numbers for float64
follow in the same way, with 2**-1022 for 2**-126 and 2**-1074 for 2**-149.

A sum of exactly 0 is not trusted, because all squares may have been flushed. So zeros are read twice.

Other orders take `_measure_by_maximum`, because the error of x**p grows with p log x. Orders 3 and 4 take it only if
the sum of a first pass leaves the range.

The idea is that of J. L. Blue, ACM TOMS 4 (1978). The tests are `test_norm_neither_overflows_nor_underflows` and, for
units, `test_unit_norms_neither_overflow_nor_underflow`.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax._base.branches import run_if
from shrewjax._base.mesh import UnitDims, UnitSharding, axes_beside
from shrewjax._base.types import Axes, Flag
from shrewjax._numerics.floats import (
    EXPONENT_OF_ZERO,
    ExtendedFloat,
    accumulator_dtype,
    factors_of_two,
    from_extended,
    is_complex,
    magnitude_bits,
    mul_real,
    power_of_two,
    shifted,
    times_power_of_two,
    to_extended,
    upcast,
)
from shrewjax._numerics.reductions import any_device, are_known, leaf_maxima, leaf_sums
from shrewjax._numerics.vectors import Groups, broadcast_to_leaf, join, scalars


class _Range(NamedTuple):
    """The sums of p-th powers that the first pass may trust, and the exponents that scale all other elements."""

    trusted_above: float  # a sum from here on has lost less than half an ulp to underflow
    shrink: int  # after an overflow, elements times 2**shrink overflow no sum
    grow: int  # elements of a smaller sum, times 2**grow, neither overflow nor underflow


RANGE = {
    jnp.dtype(jnp.float32): _Range(2.0**-60, -96, 88),
    jnp.dtype(jnp.float64): _Range(2.0**-900, -600, 600),
}


def shift_into_range(powers: jax.Array, small_counts: Flag = True) -> jax.Array:
    """Returns the exponent of the power of two that scales elements so that their sum can be trusted; 0 if it can.

    The sum is one of the p-th powers of magnitudes, p = 1, 2, 3 or 4. If `small_counts` is False, the exponent is also
    0 for a sum that is too small.
    """
    trusted_above, shrink, grow = RANGE[powers.dtype]
    is_small = powers < trusted_above
    is_small = is_small if small_counts is True else is_small & small_counts
    return jnp.where(
        powers == jnp.inf, np.int32(shrink), jnp.where(is_small, np.int32(grow), np.int32(0))
    )


Scope = Literal["global", "leaf", "both"]
"""The norms to measure: of all leaves together, of each leaf as a vector, or the first and each leaf's as floats."""


Floats = tuple[jax.Array, ...]
"""With the scope "both" the norm of all leaves and that of each leaf, as floats. Otherwise nothing."""


@partial(
    jax.jit, static_argnums=(1, 2), inline=True
)  # XLA-21: outside of jit, each call would compile its branches
def measure(leaves: Sequence[jax.Array], ord: float, axes: Axes) -> ExtendedFloat:
    """Returns the `ord`-norm of all leaves together. Shape ().

    It does not depend on the leaves' order. Its derivative is 0 if the norm is 0 or not finite.
    """
    return _measure(leaves, ord, "global", axes)[0]


@partial(jax.jit, static_argnums=1, inline=True)  # XLA-21
def measure_local(leaves: Sequence[jax.Array], local: tuple[Hashable, ...]) -> ExtendedFloat:
    """Returns the 2-norm of each device's own leaves along the mapped axes `local`; along others, of whole leaves."""
    return _measure(leaves, 2, "global", axes_beside(leaves, local))[0]


@partial(jax.jit, static_argnums=1, inline=True)  # XLA-21
def measure_with_leaves(
    leaves: Sequence[jax.Array], axes: Axes
) -> tuple[ExtendedFloat, jax.Array, list[jax.Array]]:
    """Returns the 2-norm of all leaves as `measure` does, the same as a float, and each leaf's norm as a float.

    No leaf is read again for its own norm, so small elements may be flushed in it (`clip_by_global_norm`).
    """
    norm, (as_float, *of_leaves) = _measure(leaves, 2, "both", axes)
    return norm, as_float, of_leaves


@partial(jax.jit, static_argnums=(1, 2, 3, 4), inline=True)  # XLA-21
def measure_units(
    leaves: Sequence[jax.Array],
    unit_dims: Sequence[UnitDims],
    axes: Sequence[UnitSharding],
    groups: Groups,
    ord: float = 2,
    floor: ExtendedFloat | None = None,
) -> list[ExtendedFloat]:
    """Returns the norms of all units, joined (`join`).

    Orders other than 1 and 2 require that each leaf is a single unit. With a floor, a norm below it may come out wrong,
    but still below it, and takes no second read.
    """
    if not leaves:
        return []
    within: list[Axes] = [of_leaf.within for of_leaf in axes]
    if ord not in (1, 2):
        return [_measure(leaves, ord, "leaf", within)[0]]
    first = _first_pass(leaves, ord, unit_dims, within, floor)
    joined = join(first.sums, groups)
    shifts = [shift_into_range(sums, first.small_counts) for sums in joined]
    is_rare = jnp.any(jnp.stack([jnp.any(shift != 0) for shift in shifts]))
    powers = _again_if(is_rare, first, lambda sums: join(sums, groups), lambda: joined)
    return [shifted(_root(sums, ord), -shift) for sums, shift in zip(powers, shifts, strict=True)]


@partial(jax.jit, static_argnums=(1, 2, 3), inline=True)  # XLA-21
def measure_slices(
    x: jax.Array, ord: float, dims: UnitDims, within: tuple[Hashable, ...], limit: ExtendedFloat
) -> ExtendedFloat:
    """Returns the `ord`-norm of each slice of x. The dimensions `dims` index the slices.

    `within` are mapped axes along which devices hold parts of the same slice. For orders 1 and 2, a norm below the
    limit may be inexact. So zeros, as of masked tokens, are read only once.
    """
    if ord in (1, 2):
        (norms,) = measure_units([x], (dims,), (UnitSharding(within, None),), ((0,),), ord, limit)
        return norms if dims else ExtendedFloat(*(part[0] for part in norms))
    of_one = partial(measure, ord=ord, axes=within)
    # `measure` knows only one unit, so it is mapped over each dimension. The outer maps have removed those before it.
    for before, axis in reversed([*enumerate(dims)]):
        of_one = jax.vmap(of_one, in_axes=axis - before)
    return of_one([x])


def combine(norms: Sequence[ExtendedFloat], over: list[Axes]) -> ExtendedFloat:
    """Returns the 2-norm of all units together from their norms, which come stacked. Shape ()."""
    if not norms:
        return to_extended(jnp.zeros((), jnp.float32))
    # Relative to the largest exponent, so that no square leaves the range.
    lowest = 2 * EXPONENT_OF_ZERO  # subtracted, because keys are not negative
    keys = leaf_maxima(magnitude_key, [n.exponent - lowest for n in norms], axes=over)
    largest = jnp.max(jnp.concatenate(keys)) + lowest
    heights = [times_power_of_two(n.mantissa, n.exponent - largest) for n in norms]
    squares = leaf_sums([h * h for h in heights], axes=over)
    return shifted(jnp.sqrt(_ordered_sum(jnp.stack(squares))), largest)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _measure(
    leaves: Sequence[jax.Array], ord: float, scope: Scope, axes: Axes | list[Axes]
) -> tuple[ExtendedFloat, Floats]:
    """Returns the norm of all leaves together or, with the scope "leaf", of each leaf as a vector; and `Floats`."""
    if not leaves:
        norm = to_extended(jnp.zeros((0,) if scope == "leaf" else (), jnp.float32))
        return norm, (from_extended(norm),) if scope == "both" else ()
    if ord not in _ROOTS:
        return _measure_by_maximum(leaves, ord, scope, axes), ()
    first = _first_pass(leaves, ord, [()] * len(leaves), axes)
    by_leaf = jnp.stack(first.sums)
    plain = by_leaf if scope == "leaf" else _ordered_sum(by_leaf)
    shift = shift_into_range(plain)

    def finished(
        of_leaves: jax.Array, total: jax.Array, shift: jax.Array
    ) -> tuple[ExtendedFloat, Floats]:
        norm = shifted(_root(total, ord), -shift)
        if scope != "both":
            return norm, ()
        # The sum of all leaves decides on the shift. A leaf whose own sum needs another one keeps its first sum.
        is_helped = shift_into_range(by_leaf) == shift
        roots = _root(jnp.where(is_helped, of_leaves, by_leaf), ord)
        leaf_norms = shifted(roots, -jnp.where(is_helped, shift, 0))
        # As floats, because an H100 would launch a kernel more to make floats of what the branch returns
        # (tests/devices/test_accelerators.py, "by leaf").
        return norm, (from_extended(norm), *scalars(from_extended(leaf_norms)))

    def rescued(sums: list[jax.Array]) -> tuple[ExtendedFloat, Floats]:
        of_leaves = jnp.stack(sums)
        return finished(of_leaves, _ordered_sum(of_leaves), shift)

    is_rare = jnp.any(shift != 0)
    usual = partial(finished, by_leaf, plain, jnp.zeros_like(shift))
    if ord in (1, 2):
        return _again_if(is_rare, first, rescued, usual, shift)
    return run_if(
        is_rare, lambda: (_measure_by_maximum(_unknown(leaves), ord, scope, axes), ()), usual
    )


class _FirstPass(NamedTuple):
    leaves: Sequence[jax.Array]
    p: float
    unit_dims: Sequence[UnitDims]  # of each leaf
    axes: Axes | list[Axes]
    sums: list[jax.Array]  # of each leaf's units
    small_counts: Flag

    def again(self, places: list[int], shared: jax.Array | None = None) -> list[jax.Array]:
        """Returns the sums of the leaves at these places after a second pass."""
        sums, dims = [self.sums[i] for i in places], [self.unit_dims[i] for i in places]
        if shared is None:
            # XLA-23: from the leaf's own sums, not from an index into a vector of shifts, because an index would make
            # the kernels of leaves of one shape differ.
            shifts = [shift_into_range(x, self.small_counts) for x in sums]
            factors = [power_of_two(shift, x.dtype) for shift, x in zip(shifts, sums, strict=True)]
        else:
            of_all = power_of_two(shared, sums[0].dtype)
            # XLA-6: XLA:CPU materializes a scalar that leaves share, as an array of each leaf's size. So each large
            # leaf gets its own copy of the scalar: a clamp between equal bounds.
            are_small = [_is_small(self.leaves[i]) for i in places]
            factors = [
                of_all if small else lax.clamp(of_all, x, of_all)
                for small, x in zip(are_small, sums, strict=True)
            ]
        terms = []
        for i, factor in zip(places, factors, strict=True):
            x = _unknown(self.leaves[i])
            terms.append(
                _power(x, self.p, factor.dtype, broadcast_to_leaf(factor, x, self.unit_dims[i]))
            )
        axes = [self.axes[i] for i in places] if isinstance(self.axes, list) else self.axes
        scaled = leaf_sums(terms, axes=axes, unit_dims=dims)
        if shared is not None:
            return scaled
        # Trusted sums stay as they are, because the second pass may round them otherwise.
        return [
            jnp.where(shift != 0, x, own)
            for shift, x, own in zip(shifts, scaled, sums, strict=True)
        ]

    def is_untrusted(self, places: list[int]) -> jax.Array:
        """Returns whether a sum of these leaves left the range. Leaves of a single unit are judged together."""
        sums = [self.sums[i] for i in places]
        numbers, single = [x for x in sums if x.ndim], [x for x in sums if not x.ndim]
        numbers += [jnp.stack(single)] if single else []
        return jnp.any(
            jnp.stack([jnp.any(shift_into_range(x, self.small_counts) != 0) for x in numbers])
        )


def _first_pass(
    leaves: Sequence[jax.Array],
    p: float,
    unit_dims: Sequence[UnitDims],
    axes: Axes | list[Axes],
    floor: ExtendedFloat | None = None,
) -> _FirstPass:
    """Returns the sums of p-th powers of the leaves.

    With a floor, sums that are too small count as out of range only if their norms may reach the floor.
    """
    dtype = accumulator_dtype(*leaves)
    sums = leaf_sums([_power(x, p, dtype) for x in leaves], axes=axes, unit_dims=unit_dims)
    # The exponent of norms whose sums are too small.
    small_norm = math.log2(RANGE[dtype].trusted_above) / p
    small_counts = True if floor is None else floor.exponent <= math.floor(small_norm)
    return _FirstPass(leaves, p, unit_dims, axes, sums, small_counts)


def _again_if(
    is_rare: jax.Array,
    first: _FirstPass,
    rescued: Callable[[list[jax.Array]], Any],
    usual: Callable[[], Any],
    shared: jax.Array | None = None,
) -> Any:
    """Returns `usual()` or, in a branch, `rescued` of the leaves' sums after a second pass.

    The second pass reads those leaves of which a sum left the range, and scales each unit by its own power of two. Or
    it scales all leaves by 2**shared, on which all devices must agree.
    """
    if shared is not None:
        return run_if(
            is_rare, lambda: rescued(first.again([*range(len(first.leaves))], shared)), usual
        )
    # If branches have collectives, all devices have to take the same one.
    has_no_collectives = isinstance(first.axes, list) and all(over == () for over in first.axes)
    agreed: Callable[[list[jax.Array]], list[jax.Array]] = (
        list if has_no_collectives else any_device
    )
    # The places of the leaves that one branch reads, because each branch takes time to compile: of all small leaves, or
    # of one large leaf.
    all_places = range(len(first.leaves))
    small = [i for i in all_places if _is_small(first.leaves[i])]
    together = [small] * bool(small) + [[i] for i in all_places if not _is_small(first.leaves[i])]

    def read(is_untrusted: jax.Array, places: list[int]) -> list[jax.Array]:
        return run_if(
            is_untrusted, lambda: first.again(places), lambda: [first.sums[i] for i in places]
        )

    def second() -> Any:
        flags = agreed([*map(first.is_untrusted, together)])
        at = dict(zip(chain(*together), chain(*map(read, flags, together)), strict=True))
        return rescued([at[i] for i in range(len(at))])

    (is_rare,) = agreed([is_rare])
    return run_if(is_rare, second, usual)


def _root(powers: jax.Array, p: float) -> jax.Array:
    """Returns the p-th root. Its derivative at 0 is 0."""
    positive = powers > 0  # the root of 0 has no derivative
    return jnp.where(positive, _ROOTS[p](jnp.where(positive, powers, 1)), powers)


def _cube_root(x: jax.Array) -> jax.Array:
    """Returns the cube root, with one Newton step, because `lax.cbrt` may be many eps off in float64 (XLA-20)."""
    root = lax.cbrt(x)
    return root - (root - x / (root * root)) / 3


# The roots of the orders whose powers the first pass sums.
_ROOTS: dict[float, Callable[[jax.Array], jax.Array]] = {
    1: lambda x: x,
    2: lax.sqrt,
    3: _cube_root,
    4: lambda x: lax.sqrt(lax.sqrt(x)),
}


def _power(x: jax.Array, p: float, dtype: np.dtype[Any], *factor: jax.Array) -> jax.Array:
    x = mul_real(upcast(x, dtype), *factor)
    if p != 2:
        return lax.integer_pow(lax.abs(x), int(p))
    return lax.mul(x.real, x.real) + lax.mul(x.imag, x.imag) if is_complex(x) else lax.mul(x, x)


def _is_small(x: jax.Array) -> bool:
    """Returns whether a leaf is so small that a second read costs nothing. A symbolic size may be large."""
    return are_known([x.size]) and x.size <= 2**14


def _measure_by_maximum(
    leaves: Sequence[jax.Array], p: float, scope: Scope, axes: Axes | list[Axes]
) -> ExtendedFloat:
    """Returns the norm of any order p >= 1 from two passes: the largest magnitude; the sum of (|x| / largest)**p."""
    dtype = accumulator_dtype(*leaves)

    # XLA-29: the barriers hide numbers that XLA knows. It would not flush their subnormal halves, moduli and norms.
    hidden = [_unknown(x) if is_complex(x) else x for x in leaves]
    keys = _unknown(leaf_maxima(magnitude_key, [upcast(x, dtype) for x in hidden], axes=axes))
    maxima = lax.bitcast_convert_type(jnp.concatenate(keys), dtype)
    mantissas, exponents = to_extended(maxima)
    exponents = exponents + np.asarray([is_complex(x) for x in leaves], np.int32)
    if p < math.inf:
        each = zip(leaves, *map(scalars, _scale_to_one(mantissas, exponents)), strict=True)
        relative = [
            lax.abs(mul_real(upcast(x, dtype), first, second, 1 / unit))
            for x, first, second, unit in each
        ]
        sums = jnp.stack(leaf_sums([x**p for x in relative], axes=axes))
    else:
        sums = jnp.ones_like(mantissas)

    if scope == "global":
        largest = jnp.max(exponents)
        height = times_power_of_two(mantissas, exponents - largest)
        top = jnp.max(height)
        share = height / jnp.where(top > 0, top, 1)
        sums = _ordered_sum(sums * share**p) if p < math.inf else jnp.max(sums * share)
        mantissas, exponents = top, largest
        maxima = jnp.sum(
            maxima, where=~jnp.isfinite(maxima)
        )  # inf or NaN if a leaf has one, else 0
    norm = shifted(mantissas * (sums ** (1 / p) if p < math.inf else sums), exponents)
    return ExtendedFloat(jnp.where(jnp.isfinite(maxima), norm.mantissa, maxima), norm.exponent)


def magnitude_key(x: jax.Array) -> tuple[jax.Array]:
    """Returns the bits of magnitudes, by which `leaf_maxima` finds the largest; a NaN counts as larger than all others.

    Those of a complex leaf are of half the moduli, because a modulus can leave the range. Bits are compared because
    XLA:CPU's maximum of floats loses a NaN (XLA-10). Integers are their own keys.
    """
    if jnp.issubdtype(x.dtype, jnp.integer):
        return (x,)
    return (
        magnitude_bits(
            lax.abs(mul_real(x, jnp.asarray(0.5, x.real.dtype))) if is_complex(x) else x
        ),
    )


def _scale_to_one(
    mantissas: jax.Array, exponents: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns two factors and a divisor that scale these numbers to 1. For a mantissa of 0 all three are 1."""
    first, second = factors_of_two(jnp.where(mantissas > 0, -exponents, 0), mantissas.dtype)
    return first, second, jnp.where(mantissas > 0, mantissas, 1)


@_measure.defjvp
def _measure_jvp(
    ord: float, scope: Scope, axes: Axes | list[Axes], primals: tuple[Any], tangents: tuple[Any]
) -> tuple[Any, Any]:
    """Returns the norm and its tangent, the sum of Re(conj(sign(x)) dx) (|x| / norm)**(ord - 1).

    For ord = inf the tangent is shared evenly by the largest elements. The norms of the leaves have none.
    """
    (leaves,), (d_leaves,) = primals, tangents
    norm, floats = _measure(leaves, ord, scope, axes)
    dtype = norm.mantissa.dtype
    mantissas, exponents = (jnp.broadcast_to(part, (len(leaves),)) for part in norm)
    defined = jnp.isfinite(mantissas) & (mantissas > 0)
    scale = zip(
        *map(scalars, _scale_to_one(jnp.where(defined, mantissas, 0), exponents)), strict=True
    )
    terms, largest = [], []
    for x, dx, (first, second, unit) in zip(*_unknown((leaves, d_leaves)), scale, strict=True):
        x, dx = (mul_real(upcast(part, dtype), first, second) for part in (x, dx))
        is_largest = (jnp.abs(x) >= unit).astype(dtype)
        x = mul_real(x, 1 / unit)
        if ord != 2:
            x = mul_real(jnp.sign(x), is_largest if ord == math.inf else jnp.abs(x) ** (ord - 1))
        terms.append(x.real * dx.real + x.imag * dx.imag if is_complex(x) else x * dx)
        largest.append(is_largest)
    slopes = jnp.stack(leaf_sums(terms, axes=axes))
    if ord == math.inf:
        ties = jnp.stack(leaf_sums(largest, axes=axes))
        ties = ties if scope == "leaf" else jnp.broadcast_to(jnp.sum(ties), ties.shape)
        slopes = slopes / jnp.maximum(ties, 1)
    slopes = jnp.where(defined, slopes, 0)
    slopes = slopes if scope == "leaf" else jnp.sum(slopes)
    no_exponent: Any = np.zeros(norm.exponent.shape, jax.dtypes.float0)  # an integer's tangent
    d_floats = [times_power_of_two(slopes, norm.exponent), *map(jnp.zeros_like, floats[1:])]
    return (norm, floats), (ExtendedFloat(slopes, no_exponent), tuple(d_floats[: len(floats)]))


def _unknown(x: Any) -> Any:
    """Returns x behind a barrier, so that XLA does not know it as a constant. Wraps leaves that are scaled and squared.

    XLA-7: The gradient of a frozen parameter is a known zero. XLA turns `(0 * c) * (0 * c)` into `0 * (c * c)`, which
    is NaN for c = 2**88 in float32.
    """
    # One barrier for each array, because all outputs of a shared barrier vary over the same mapped axes.
    return jax.tree.map(lax.optimization_barrier, x)


def _ordered_sum(terms: jax.Array) -> jax.Array:
    """Returns the sum of the leaves' terms, which does not depend on their order, to the last bit."""
    return jnp.sum(jnp.sort(terms))
