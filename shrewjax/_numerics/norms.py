"""Norms of leaves that neither overflow nor underflow: of all leaves together, by leaf, by unit and by slice.

A norm is an `ExtendedFloat`, so neither it nor a quotient of two norms leaves the range before the clipped gradient
does. The squares do not either, because a sum outside of a trusted range is read again, scaled by a power of two. The
numbers of units, such as norms and scales, are stacked into few arrays and broadcast over a leaf's elements.

Why two passes suffice, for p = 2 in float32 and a sum over n elements:

* First pass: sum x**2 as it is, and trust a finite sum of at least 2**-60. A square below 2**-126, of an element below
  2**-63, may be flushed. All flushed squares together are below n 2**-126, and half an ulp of 2**-60 is 2**-84. So they
  do not count for n < 2**42.
* Second pass after an overflow: scale by 2**-96. Elements are below 2**128, so their squares are now below 2**64, and
  2**64 of them fit. The scaled sum is about 2**128 * 2**-192 = 2**-64 or more, half an ulp of which is at least
  2**-89. So flushed squares do not count for n < 2**37.
* Second pass for a sum below 2**-60: scale by 2**88. The scaled sum is below 2**-60 * 2**176 = 2**116. The smallest
  subnormal number, 2**-149, becomes 2**-61, whose square is normal. So no square is flushed.

So a third pass is never needed. For p = 1 no bound is narrower. In a complex leaf the real and the imaginary parts
count as elements. Orders 3 and 4 share the first pass; their second is `_measure_by_maximum`. The numbers for
float64 follow in the same way, with 2**-1022 for 2**-126 and 2**-1074 for 2**-149.

A sum of exactly 0 is not trusted, because all squares may have been flushed. So gradients of zeros are read twice. If
only some units are zero, only their leaves are read twice, and all small ones (`_read_again`).

The idea is that of J. L. Blue, ACM TOMS 4 (1978). The tests are `test_norm_neither_overflows_nor_underflows` and, for
units, `test_unit_norms_neither_overflow_nor_underflow`.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from itertools import chain
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax._base.branches import run_if
from shrewjax._base.mesh import Axes, UnitDims, UnitSharding, axes_beside
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
from shrewjax._numerics.reductions import any_device, are_known, elements, leaf_maxima, leaf_sums, pieces


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

    The sum is one of the p-th powers of magnitudes, p = 1, 2, 3 or 4. If `small_counts` is False, the exponent is
    also 0 for a sum that is too small, because the caller needs no exact norm there.
    """
    _, shrink, grow = RANGE[powers.dtype]
    return _by_range(powers, small_counts, np.int32(shrink), np.int32(grow), np.int32(0))


def _factor_into_range(powers: jax.Array, small_counts: jax.Array | bool) -> jax.Array:
    """Returns 2**shift_into_range(powers, small_counts)."""
    (_, shrink, grow), number = RANGE[powers.dtype], powers.dtype.type
    return _by_range(powers, small_counts, number(2.0**shrink), number(2.0**grow), number(1))


def _by_range(powers: jax.Array, small_counts: Any, if_infinite: Any, if_small: Any, if_trusted: Any) -> jax.Array:
    is_small = powers < RANGE[powers.dtype].trusted_above
    is_small = is_small if small_counts is True else is_small & small_counts
    return jnp.where(powers == jnp.inf, if_infinite, jnp.where(is_small, if_small, if_trusted))


Scope = Literal["global", "leaf", "both"]
"""The norms to measure: of all leaves together, of each leaf as a vector, or the first and each leaf's as floats."""


class _Measured(NamedTuple):
    """The result of a measurement. Only the scope "both" has floats."""

    norm: ExtendedFloat  # of all leaves together, or, with the scope "leaf", of each leaf as a vector
    as_float: jax.Array | None = None
    leaf_norms: Sequence[jax.Array] = ()


@partial(jax.jit, static_argnums=(1, 2), inline=True)  # XLA-21: outside of jit, each call would compile its branches
def measure(leaves: Sequence[Any], ord: float, axes: Axes) -> ExtendedFloat:
    """Returns the `ord`-norm of all leaves together. Shape ().

    It is accumulated in float32, or in float64 if a leaf is float64, and does not depend on the leaves' order. Its
    derivative is 0 if the norm is 0 or not finite.
    """
    return _measure(leaves, ord, "global", axes).norm


@partial(jax.jit, static_argnums=1, inline=True)  # XLA-21
def measure_local(leaves: Sequence[Any], local: tuple[Any, ...]) -> ExtendedFloat:
    """Returns the 2-norm of each device's own leaves along the mapped axes `local`; along others, of whole leaves."""
    return _measure(leaves, 2, "global", axes_beside(leaves, local)).norm


@partial(jax.jit, static_argnums=1, inline=True)  # XLA-21
def measure_with_leaves(leaves: Sequence[Any], axes: Axes) -> tuple[ExtendedFloat, jax.Array, list[jax.Array]]:
    """Returns `measure` for order 2, the same as a float, and the norm of each leaf, whose squares it adds up anyway.

    The branch returns them as floats, because XLA:GPU would launch a kernel more to make floats of them
    (tests/devices/test_accelerators.py, "by leaf").

    No leaf is read again for its own norm. So an element below 2**-63 may be flushed in it, unless the norm of all
    leaves is below 2**-30. The norms of the leaves have no derivative.
    """
    measured = _measure(leaves, 2, "both", axes)
    assert measured.as_float is not None
    return measured.norm, measured.as_float, list(measured.leaf_norms)


Groups = tuple[tuple[int, ...], ...]
"""The places of leaves whose units' numbers are joined in one vector, so that their arithmetic is compiled once."""


@partial(jax.jit, static_argnums=(1, 2, 3, 4), inline=True)  # XLA-21
def measure_units(
    leaves: Sequence[Any], unit_dims: Sequence[UnitDims], axes: Sequence[UnitSharding], groups: Groups, ord: float = 2
) -> list[ExtendedFloat]:
    """Returns the norms of all units, joined (`join`).

    Orders other than 1 and 2 require that each leaf is a single unit.
    """
    if not leaves:
        return []
    within: list[Axes] = [of_leaf.within for of_leaf in axes]
    if ord not in (1, 2):
        return [_measure(leaves, ord, "leaf", within).norm]
    powers, shifts = _powers_of_units(leaves, ord, unit_dims, within, partial(join, groups=groups))
    return [_rooted(of_group, ord, shift) for of_group, shift in zip(powers, shifts, strict=True)]


@partial(jax.jit, static_argnums=(0, 1, 4, 5, 6, 7), inline=True)  # XLA-21
def decide_by_norms(
    in_floats: Callable[..., tuple[Any, jax.Array]],
    exactly: Callable[..., Any],
    trees: Sequence[Sequence[Any]],
    given: tuple[ExtendedFloat, ...],
    unit_dims: Sequence[UnitDims],
    axes: Sequence[Sequence[UnitSharding]],
    groups: Groups,
    alike: Groups,
) -> list[Any]:
    """Returns `exactly(*norms, *given)` for each group, from the 2-norms of its units in each tree.

    `in_floats` takes norms as floats. It returns the same bits, and which units are usual (`scaling.usual_numbers`).
    Unless all are, leaves are read again in a branch. There they are joined by the larger groups `alike`, because a
    gather in a rare branch may cost time.
    """
    if not groups:
        return []
    within: list[list[Axes]] = [[of_leaf.within for of_leaf in of_tree] for of_tree in axes]
    plain = [_sums_of_units(leaves, 2, unit_dims, over) for leaves, over in zip(trees, within, strict=True)]
    by_group = list(zip(*(join(sums, groups) for sums in plain), strict=True))

    def usual(*sums: jax.Array) -> tuple[Any, jax.Array]:
        return in_floats(*(_root(of_tree, 2) for of_tree in sums), *given)

    def exact_norms(powers: list[jax.Array], sums: list[jax.Array]) -> list[ExtendedFloat]:
        first = map(shift_into_range, join(sums, alike))
        return [_rooted(of_group, 2, shift) for of_group, shift in zip(join(powers, alike), first, strict=True)]

    def rescued() -> list[Any]:
        leaves, over, sums = (list(chain.from_iterable(part)) for part in (trees, within, plain))
        again = _read_again(leaves, 2, [*unit_dims] * len(trees), over, sums, trees=len(trees))
        by_tree = [again[i : i + len(unit_dims)] for i in range(0, len(again), len(unit_dims))]
        results = [exactly(*norms, *given) for norms in zip(*map(exact_norms, by_tree, plain), strict=True)]
        return results if alike == groups else join(split(results, alike, [x.shape for x in plain[0]]), groups)

    agreed = _agreed(list(chain.from_iterable(within)))
    (is_rare,) = agreed([~jnp.all(jnp.stack([jnp.all(usual(*sums)[1]) for sums in by_group]))])
    return run_if(is_rare, rescued, lambda: [usual(*sums)[0] for sums in by_group])


@partial(jax.jit, static_argnums=(1, 2, 3), inline=True)  # XLA-21
def measure_slices(x: Any, ord: float, dims: UnitDims, within: Axes, limit: ExtendedFloat) -> ExtendedFloat:
    """Returns the `ord`-norm of each slice of x. The dimensions `dims` index the slices.

    `within` are mapped axes along which devices hold parts of the same slice. For orders 1 and 2, a norm below the
    limit may be inexact, because such a slice is not clipped. So zeros, as of masked tokens, are read only once.
    """
    if ord in (1, 2):
        (powers,), (shift,) = _powers_of_units([x], ord, [dims], [within], list, floor=limit)
        return _rooted(powers, ord, shift)

    def of_one(x: Any) -> ExtendedFloat:
        return measure([x], ord, within)

    # `measure` knows only one unit, so it is mapped over each dimension. The outer maps have removed those before it.
    for before, axis in reversed([*enumerate(dims)]):
        of_one = jax.vmap(of_one, in_axes=axis - before)
    return of_one(x)


def combine(norms: Sequence[ExtendedFloat], over: list[Axes]) -> ExtendedFloat:
    """Returns the 2-norm of all units together from their norms, which come stacked. Shape ()."""
    if not norms:
        return to_extended(jnp.zeros((), jnp.float32))
    # Relative to the largest exponent, so that no square leaves the range.
    keys = leaf_maxima(_exponent_key, [n.exponent for n in norms], axes=over)
    largest = jnp.max(jnp.concatenate(keys)) + EXPONENT_OF_ZERO * 2  # back from `_exponent_key`
    heights = [times_power_of_two(n.mantissa, n.exponent - largest) for n in norms]
    squares = leaf_sums([h * h for h in heights], axes=over)
    return shifted(jnp.sqrt(_ordered_sum(jnp.stack(squares))), largest)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _measure(leaves: Sequence[Any], ord: float, scope: Scope, axes: Axes | list[Axes]) -> _Measured:
    if not leaves:
        norm = to_extended(jnp.zeros((0,) if scope == "leaf" else (), jnp.float32))
        return _Measured(norm, from_extended(norm) if scope == "both" else None)
    if ord not in _ROOTS:
        return _Measured(_measure_by_maximum(leaves, ord, scope, axes))
    return _measure_by_powers(leaves, ord, scope, axes)


def _cube_root(x: jax.Array) -> jax.Array:
    """Returns the cube root, with one Newton step, because `lax.cbrt` may be many eps off in float64 (XLA-20)."""
    root = lax.cbrt(x)
    return root - (root - x / (root * root)) / 3


# The roots of the orders whose powers the first pass sums: products of few factors, right to a few ulp. All other
# orders take `_measure_by_maximum` at once, because the error of `x**p` grows with p log x.
_ROOTS: dict[float, Callable[[jax.Array], jax.Array]] = {
    1: lambda x: x,
    2: lax.sqrt,
    3: _cube_root,
    4: lambda x: lax.sqrt(lax.sqrt(x)),
}


def _measure_by_powers(leaves: Sequence[Any], p: float, scope: Scope, axes: Axes | list[Axes]) -> _Measured:
    """Returns the norm from one pass over the leaves; from a second, scaled one if sums left the trusted range."""
    dtype = accumulation_dtype(leaves)
    leaf_powers = leaf_sums([_power(x, p, dtype) for x in leaves], axes=axes)
    by_leaf = jnp.stack(leaf_powers)
    plain = by_leaf if scope == "leaf" else _ordered_sum(by_leaf)
    shift = shift_into_range(plain)

    def rooted(powers: jax.Array, shift: jax.Array, again: jax.Array) -> _Measured:
        norm = _rooted(powers, p, shift)
        if scope != "both":
            return _Measured(norm)
        # The sum of all leaves decides on the shift. A leaf whose own sum needs another one keeps its first sum.
        is_helped = shift_into_range(by_leaf) == shift
        norms = _rooted(jnp.where(is_helped, again, by_leaf), p, jnp.where(is_helped, shift, 0))
        return _Measured(norm, from_extended(norm), tuple(elements(from_extended(norms))))

    def rescaled() -> _Measured:
        factor = power_of_two(shift, dtype)
        # XLA-6: XLA:CPU materializes a scalar that leaves share, as an array of each leaf's size. So each large leaf
        # gets its own copy of the scalar: a clamp between equal bounds.
        own = [
            factor if are_known([x.size]) and x.size <= 2**14 else lax.clamp(factor, s, factor)
            for x, s in zip(leaves, leaf_powers, strict=True)
        ]
        terms = [_power(x, p, dtype, of_leaf) for x, of_leaf in zip(_unknown(leaves), own, strict=True)]
        again = jnp.stack(leaf_sums(terms, axes=axes))
        # XLA-4: without the barrier, XLA:GPU turns the branch into a select, and so reads the data on every call.
        return rooted(lax.optimization_barrier(_ordered_sum(again)), shift, again)

    def by_maximum() -> _Measured:
        return _Measured(_measure_by_maximum(_unknown(leaves), p, scope, axes))

    another = rescaled if p in (1, 2) else by_maximum
    return run_if(jnp.any(shift != 0), another, lambda: rooted(plain, jnp.zeros_like(shift), by_leaf))


def _powers_of_units(
    leaves: Sequence[Any],
    p: float,
    unit_dims: Sequence[UnitDims],
    axes: list[Axes],
    joined: Callable[[list[jax.Array]], list[jax.Array]],
    floor: ExtendedFloat | None = None,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the sums of p-th powers, p = 1 or 2, of all units and the exponents that scale them, both joined.

    A leaf is read again only if a sum of its own left the trusted range. An example is a frozen leaf, whose sum is 0.
    With a floor, a norm that is below it may come out as any other number below it, and takes no second read.
    """
    plain = _sums_of_units(leaves, p, unit_dims, axes)
    untrusted_exponent = math.floor(math.log2(RANGE[plain[0].dtype].trusted_above) / p)  # of norms with too small sums
    small_counts = True if floor is None else floor.exponent <= untrusted_exponent
    shifts = [shift_into_range(of_group, small_counts) for of_group in joined(plain)]
    (is_out_of_range,) = _agreed(axes)([jnp.any(jnp.stack([jnp.any(s != 0) for s in shifts]))])

    def again() -> list[jax.Array]:
        return joined(_read_again(leaves, p, unit_dims, axes, plain, small_counts))

    return run_if(is_out_of_range, again, lambda: joined(plain)), shifts


def _sums_of_units(leaves: Sequence[Any], p: float, unit_dims: Sequence[UnitDims], axes: list[Axes]) -> list[jax.Array]:
    """Returns the sums of p-th powers of all units, leaf by leaf: the first pass."""
    dtype = accumulation_dtype(leaves)
    return leaf_sums([_power(x, p, dtype) for x in leaves], axes=axes, unit_dims=unit_dims)


def _agreed(axes: list[Axes]) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    """Returns a function that combines flags over devices if a branch has collectives.

    All devices have to take the same branch then.
    """
    return list if all(over == () for over in axes) else any_device


def _read_again(
    leaves: Sequence[Any],
    p: float,
    unit_dims: Sequence[UnitDims],
    axes: list[Axes],
    plain: list[jax.Array],
    small_counts: jax.Array | bool = True,
    trees: int = 1,
) -> list[jax.Array]:
    """Returns the sums of p-th powers leaf by leaf, after a second pass over leaves of which a sum is untrusted.

    Small leaves are read again together, because each branch takes time to compile. So are leaves at the same place of
    several trees, whose leaves follow each other.
    """
    count = len(leaves) // trees
    small = tuple(i for i in range(count) if are_known([leaves[i].size]) and leaves[i].size <= 2**14)
    of_tree = [small] * bool(small) + [(i,) for i in range(count) if i not in small]
    together = tuple(tuple(i + t * count for t in range(trees) for i in places) for places in of_tree)

    def again(i: int) -> jax.Array:
        x, sums, dims = _unknown(leaves[i]), plain[i], unit_dims[i]
        # XLA-23: the factor comes from the leaf's own sums, not from an index into a vector of factors. So leaves of
        # one shape share a compiled kernel.
        factor = _factor_into_range(sums, small_counts)
        terms = _power(x, p, sums.dtype, broadcast_to_leaf(factor, x, dims))
        (scaled,) = leaf_sums([terms], axes=[axes[i]], unit_dims=[dims])
        # Trusted sums stay as they are, because the second pass may round them otherwise.
        return jnp.where(factor != 1, lax.optimization_barrier(scaled), sums)  # the barrier: XLA-4

    def sums_of(untrusted: jax.Array, places: tuple[int, ...]) -> dict[int, jax.Array]:
        return run_if(untrusted, lambda: {i: again(i) for i in places}, lambda: {i: plain[i] for i in places})

    def is_untrusted(places: tuple[int, ...]) -> jax.Array:
        numbers = [plain[i] for i in places if plain[i].ndim]
        for dtype in RANGE:  # single numbers are judged together, but each dtype in its own range
            single = [plain[i] for i in places if not plain[i].ndim and plain[i].dtype == dtype]
            numbers += [jnp.stack(single)] if single else []
        return jnp.any(jnp.stack([jnp.any(shift_into_range(x, small_counts) != 0) for x in numbers]))

    untrusted = _agreed(axes)(list(map(is_untrusted, together)))
    results = reduce(operator.or_, map(sums_of, untrusted, together))
    return [results[i] for i in range(len(leaves))]


def _rooted(powers: jax.Array, p: float, shift: jax.Array) -> ExtendedFloat:
    """Returns the norm of elements from the sum of their p-th powers, taken after scaling by 2**shift.

    Its derivative at 0 is 0.
    """
    return shifted(_root(powers, p), -shift)


def _root(powers: jax.Array, p: float) -> jax.Array:
    positive = powers > 0  # the root of 0 has no derivative
    return jnp.where(positive, _ROOTS[p](jnp.where(positive, powers, 1)), powers)


def _power(x: Any, p: float, dtype: Any, *factor: jax.Array) -> jax.Array:
    """Returns the p-th powers of a leaf's magnitudes, times the factor if there is one."""
    x = _rescaled(x, dtype, *factor)
    return _squared_modulus(x) if p == 2 else lax.integer_pow(lax.abs(x), int(p))


def _measure_by_maximum(leaves: Sequence[Any], p: float, scope: Scope, axes: Axes | list[Axes]) -> ExtendedFloat:
    """Returns the norm of any order p >= 1 from two passes: the largest magnitude; the sum of (|x| / largest)**p.

    The terms of that sum are in [0, 1].
    """
    dtype = accumulation_dtype(leaves)

    # XLA-29: the barriers hide numbers that XLA knows. It would not flush their subnormal halves, moduli and norms.
    hidden = [_unknown(x) if is_complex(x) else x for x in leaves]
    keys = _unknown(leaf_maxima(magnitude_keys(dtype), hidden, axes=axes))
    maxima = lax.bitcast_convert_type(jnp.concatenate(keys), dtype)
    mantissas, exponents = to_extended(maxima)
    exponents = exponents + np.asarray([is_complex(x) for x in leaves], np.int32)
    if p < math.inf:
        each = zip(leaves, *map(elements, _scale_to_one(mantissas, exponents)), strict=True)
        relative = [lax.abs(_rescaled(x, dtype, first, second, 1 / unit)) for x, first, second, unit in each]
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
        maxima = jnp.sum(maxima, where=~jnp.isfinite(maxima))  # inf or NaN if a leaf has one, else 0
    norm = shifted(mantissas * (sums ** (1 / p) if p < math.inf else sums), exponents)
    return ExtendedFloat(jnp.where(jnp.isfinite(maxima), norm.mantissa, maxima), norm.exponent)


@cache  # `leaf_maxima` traces and compiles again for each new function
def magnitude_keys(dtype: Any) -> Callable[[Any], tuple[jax.Array]]:
    """Returns the function with which `leaf_maxima` finds the largest magnitude: its bits in this dtype.

    For a complex leaf it finds half the largest modulus. Bits are compared because XLA:CPU's maximum of floats loses a
    NaN (XLA-10).
    """

    def key(x: Any) -> tuple[jax.Array]:
        x = upcast(x, dtype)
        # Half the modulus, because the modulus can be beyond the dtype's range even if the parts are within.
        return (magnitude_bits(lax.abs(mul_real(x, jnp.asarray(0.5, dtype))) if is_complex(x) else x),)

    return key


def _scale_to_one(mantissas: jax.Array, exponents: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns two factors and a divisor that scale these numbers to 1. For a mantissa of 0 all three are 1."""
    first, second = factors_of_two(jnp.where(mantissas > 0, -exponents, 0), mantissas.dtype)
    return first, second, jnp.where(mantissas > 0, mantissas, 1)


def _exponent_key(exponent: jax.Array) -> tuple[jax.Array]:
    """Returns the exponent, shifted to be non-negative, because `leaf_maxima` takes non-negative integers."""
    return (exponent - EXPONENT_OF_ZERO * 2,)


@_measure.defjvp
def _measure_jvp(
    ord: float, scope: Scope, axes: Axes | list[Axes], primals: tuple[Any], tangents: tuple[Any]
) -> tuple[_Measured, _Measured]:
    """Returns the norm and its tangent, the sum of Re(conj(sign(x)) dx) (|x| / norm)**(ord - 1).

    For ord = inf the tangent is shared evenly by the largest elements.
    """
    (leaves,), (d_leaves,) = primals, tangents
    measured = _measure(leaves, ord, scope, axes)
    norm = measured.norm

    def tangent(slopes: jax.Array) -> _Measured:
        no_exponent: Any = np.zeros(norm.exponent.shape, jax.dtypes.float0)  # an integer's tangent
        d_norm = ExtendedFloat(slopes, no_exponent)
        if scope != "both":
            return _Measured(d_norm)
        d_float = times_power_of_two(slopes, norm.exponent)
        return _Measured(d_norm, d_float, tuple(map(jnp.zeros_like, measured.leaf_norms)))

    if not leaves:
        return measured, tangent(jnp.zeros_like(norm.mantissa))
    dtype = norm.mantissa.dtype
    mantissas, exponents = (jnp.broadcast_to(part, (len(leaves),)) for part in norm)
    defined = jnp.isfinite(mantissas) & (mantissas > 0)
    scale = zip(*map(elements, _scale_to_one(jnp.where(defined, mantissas, 0), exponents)), strict=True)
    terms, largest = [], []
    for x, dx, (first, second, unit) in zip(*_unknown((leaves, d_leaves)), scale, strict=True):
        x, dx = (_rescaled(part, dtype, first, second) for part in (x, dx))
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
    return measured, tangent(slopes if scope == "leaf" else jnp.sum(slopes))


def _unknown(x: Any) -> Any:
    """Returns x behind a barrier, so that XLA does not know it as a constant. Wraps leaves that are scaled and squared.

    XLA-7: XLA regroups products with constants. The gradient of a frozen parameter is a known zero. XLA turns
    `(0 * c) * (0 * c)` into `0 * (c * c)`, which is 0 * inf = NaN for c = 2**88 in float32.
    """
    # One barrier for each array, because all outputs of a shared barrier vary over the same mapped axes.
    return jax.tree.map(lax.optimization_barrier, x)


def _rescaled(x: Any, dtype: Any, *factors: jax.Array) -> jax.Array:
    """Returns x in a real dtype (`upcast`), times each real factor in turn."""
    x = upcast(x, dtype)
    for factor in factors:
        x = mul_real(x, factor)
    return x


def _squared_modulus(x: jax.Array) -> jax.Array:
    return lax.mul(x.real, x.real) + lax.mul(x.imag, x.imag) if is_complex(x) else lax.mul(x, x)


def accumulation_dtype(leaves: Sequence[Any]) -> Any:
    return jnp.dtype(jnp.float64 if any(accumulator_dtype(x) == jnp.float64 for x in leaves) else jnp.float32)


def _ordered_sum(terms: jax.Array) -> jax.Array:
    """Returns the sum of the leaves' terms. It does not depend on their order, to the last bit."""
    return jnp.sum(jnp.sort(terms))


def join(per_leaf: Sequence[Any], groups: Groups) -> list[Any]:
    """Returns a vector of the numbers of each group's units. A leaf alone keeps its shape, unless it is ()."""

    def joined(*xs: jax.Array) -> jax.Array:
        return xs[0] if len(xs) == 1 and xs[0].ndim else jnp.concatenate([jnp.ravel(x) for x in xs])

    return [jax.tree.map(joined, *(per_leaf[i] for i in group)) for group in groups]


def split(numbers: Sequence[Any], groups: Groups, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Returns the numbers leaf by leaf: the inverse of `join`."""
    per_leaf: list[Any] = [None] * len(shapes)
    for group, of_group in zip(groups, numbers, strict=True):
        parts, structure = jax.tree.flatten(of_group)
        sizes = tuple(math.prod(shapes[i]) for i in group)
        for i, of_leaf in zip(group, pieces(parts, sizes) if len(group) > 1 else [parts], strict=True):
            per_leaf[i] = jax.tree.unflatten(structure, [x.reshape(shapes[i]) for x in of_leaf])
    return per_leaf


def broadcast_to_leaf(of_units: jax.Array, leaf: Any, dims: UnitDims) -> jax.Array:
    """Returns the numbers of a leaf's units in a shape that broadcasts over its elements."""
    return of_units if not dims else lax.expand_dims(of_units, [a for a in range(leaf.ndim) if a not in dims])
