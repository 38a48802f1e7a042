"""Norms of leaves that neither overflow nor underflow: of all leaves together, by leaf, by unit and by slice.

A norm of order p = 1 or 2 is the root of a sum of p-th powers, which can leave the range of floats. The platform for
which a program is lowered decides what happens then:

* On CUDA and ROCm `_in_float64` sums in float64, which holds the squares of all float32 numbers.
* Elsewhere, and for leaves of float64, `_in_two_passes` sums twice. `shift_into_range` decides which sums left their
  range, and by which power of two to scale their elements. The second sum stands in a branch that is rarely taken.

A global norm is that of one unit of many leaves. A norm is an `ExtendedFloat`, so neither it nor a quotient of two
norms leaves the range before the clipped gradient does.

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

Other orders take `_by_maximum`, because the error of x**p grows with p log x. Orders 3 and 4 take it only if
the sum of a first pass leaves the range.

The idea is that of J. L. Blue, ACM TOMS 4 (1978). The tests are `test_norm_neither_overflows_nor_underflows` and, for
units, `test_unit_norms_neither_overflow_nor_underflow`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax._base.axes import UnitDims, UnitSharding, axes_beside
from shrewjax._base.branches import run_if
from shrewjax._base.types import Axes, AxisNames, DType, Tree
from shrewjax._numerics.floats import (
    EXPONENT_OF_ZERO,
    ExtendedFloat,
    factors_of_two,
    from_extended,
    is_complex,
    magnitude_bits,
    mul_real,
    power_of_two,
    shifted,
    sum_dtype,
    times_power_of_two,
    to_extended,
    upcast,
)
from shrewjax._numerics.reductions import (
    any_device,
    are_known,
    leaf_maxima,
    leaf_sums,
)
from shrewjax._numerics.vectors import (
    Groups,
    broadcast_to_leaf,
    join,
    scalars,
    shape_of_units,
    split,
)


class _Range(NamedTuple):
    """The sums of p-th powers that the first pass may trust, and the exponents that scale all other elements."""

    trusted_above: float  # a sum from here on lost less than half an ulp to underflow
    shrink: int  # after an overflow, elements times 2**shrink overflow no sum
    grow: int  # elements of a smaller sum, times 2**grow, stay in range


RANGE = {
    jnp.dtype(jnp.float32): _Range(2.0**-60, -96, 88),
    jnp.dtype(jnp.float64): _Range(2.0**-900, -600, 600),
}


def shift_into_range(powers: jax.Array, rescales_small: jax.Array | None = None) -> jax.Array:
    """Returns the exponent of the power of two that scales elements so that their sum can be trusted; 0 if it can.

    The sum is one of the p-th powers of magnitudes, p = 1, 2, 3 or 4. If `rescales_small` is False, the
    exponent is also 0 for a sum that is too small.
    """
    trusted_above, shrink, grow = RANGE[powers.dtype]
    is_small = powers < trusted_above
    is_small = is_small if rescales_small is None else is_small & rescales_small
    # A product, because on an Explicit mesh that is not set, vmap cannot use a choice between two constants
    # (tests/devices/test_models_on_devices.py).
    return jnp.where(
        powers == jnp.inf, np.int32(shrink), is_small.astype(jnp.int32) * np.int32(grow)
    )


class _Kind(NamedTuple):
    """Which norms to measure."""

    ord: float
    unit_dims: Sequence[UnitDims]  # of each leaf
    axes: Axes | list[Axes]  # along which devices hold parts of the same units
    groups: Groups  # the leaves whose units' numbers are joined in one vector
    is_global: bool = False  # all leaves together have one norm
    by_leaf: bool = False  # the norms of the leaves follow the global one

    def sums(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the sums of p-th powers by leaf, for each of its units."""
        dtype = sum_dtype(*leaves)
        powers = [_power(upcast(x, dtype), self.ord) for x in leaves]
        return leaf_sums(powers, axes=self.axes, unit_dims=self.unit_dims)

    def on_all_devices(self, is_rare: jax.Array) -> jax.Array:
        """Returns the same flag on all devices, because they wait for each other in a branch with collectives.

        Without it, one device would wait forever (tests/devices/test_distribution.py, "no_other_wait"). All devices
        know a global norm's sum, and for leaves of a device's own the branch has no collective.
        """
        is_same = self.is_global or self.axes == [()] * len(self.unit_dims)
        return is_rare if is_same else any_device(is_rare)

    def totals(self, sums: list[jax.Array]) -> list[jax.Array]:
        """Returns the sum of each norm from the sums of units, joined."""
        return [_ordered_sum(sums[0])] if self.is_global else sums


def _global(leaves: Sequence[jax.Array], ord: float, axes: Axes | list[Axes]) -> _Kind:
    one_group = (tuple(range(len(leaves))),)
    return _Kind(ord, [()] * len(leaves), axes, one_group, is_global=True)


# Outside of jit, `grad_norm` of 20 leaves takes 1.8 ms in one call and 18 ms one by one (XLA-21).
@partial(jax.jit, static_argnums=(1, 2), inline=True)
def measure(
    leaves: Sequence[jax.Array], ord: float, axes: Axes | tuple[Axes, ...]
) -> ExtendedFloat:
    """Returns the `ord`-norm of all leaves together. Shape ().

    It does not depend on the leaves' order. Its derivative is 0 if the norm is 0 or not finite.
    """
    return _measure(leaves, None, _global(leaves, ord, axes))[0]


def measure_local(leaves: Sequence[jax.Array], local: AxisNames) -> ExtendedFloat:
    """Returns the 2-norm of each device's own leaves along the mapped axes `local`; along others, of whole leaves."""
    return measure(leaves, 2, tuple(axes_beside(leaves, local)))


@partial(jax.jit, static_argnums=1, inline=True)  # XLA-21
def measure_with_leaves(
    leaves: Sequence[jax.Array], axes: Axes
) -> tuple[ExtendedFloat, list[jax.Array]]:
    """Returns the 2-norm of all leaves as `measure` does, and each leaf's norm as a float.

    No leaf is read again for its own norm, so small elements may be flushed in it (`clip_by_global_norm`).
    """
    kind = _global(leaves, 2, axes)._replace(by_leaf=True)
    norm, *of_leaves = _measure(leaves, None, kind)
    return norm, scalars(from_extended(*of_leaves)) if leaves else []


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
    if ord not in (1, 2) and len(groups) > 1:
        # Devices share some leaves and not others: two types, two vectors (tests/devices/test_distribution.py,
        # "any_order").
        norms = [measure([x], ord, of) for x, of in zip(leaves, within, strict=True)]
        return join(norms, groups)
    kind = _Kind(ord, unit_dims, within, groups)
    if floor is None:
        return _measure(leaves, None, kind)
    # Smaller sums belong to norms below a root of this one. Above a floor there, no norm is rescaled.
    trusted_above = RANGE[sum_dtype(*leaves)].trusted_above
    trusted_exponent = math.floor(math.log2(trusted_above) / ord)
    return _measure(leaves, floor.exponent <= trusted_exponent, kind)


@partial(jax.jit, static_argnums=(1, 2, 3), inline=True)  # XLA-21
def measure_slices(
    x: jax.Array, ord: float, dims: UnitDims, within: AxisNames, limit: ExtendedFloat
) -> ExtendedFloat:
    """Returns the `ord`-norm of each slice of x. The dimensions `dims` index the slices.

    `within` are mapped axes along which devices hold parts of the same slice. For orders 1 and 2, a norm below the
    limit may be inexact. So zeros, as of masked tokens, are read only once.
    """
    if ord in (1, 2):
        sharding = UnitSharding(within, None)
        (norms,) = measure_units([x], (dims,), (sharding,), ((0,),), ord, limit)
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
    exponent = jnp.max(jnp.concatenate(keys)) + lowest
    heights = [times_power_of_two(n.mantissa, n.exponent - exponent) for n in norms]
    squares = leaf_sums([h * h for h in heights], axes=over)
    return shifted(jnp.sqrt(_ordered_sum(jnp.stack(squares))), exponent)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _measure(
    leaves: Sequence[jax.Array], rescales_small: jax.Array | None, kind: _Kind
) -> list[ExtendedFloat]:
    """Returns norms, joined. `rescales_small` is None without a floor (`measure_units`).

    If it is False, a norm below the floor may be inexact, but stays below it.

    =======  =================================================================================
    order    a norm is a root of a sum of powers
    =======  =================================================================================
    1, 2     in float64 on GPUs (`_in_float64`), otherwise read twice if needed (`_in_two_passes`)
    3, 4     of elements as they are, or relative to the largest if that leaves the range
    others   of elements relative to the largest (`_by_maximum`)
    =======  =================================================================================
    """
    if not leaves:
        return [to_extended(jnp.zeros((), jnp.float32))]
    if kind.ord not in _ROOTS:
        return [_by_maximum(leaves, kind)]
    if kind.ord > 2:
        (total,) = kind.totals(join(kind.sums(leaves), kind.groups))
        is_rare = kind.on_all_devices(jnp.any(shift_into_range(total) != 0))
        return [
            run_if(
                is_rare,
                lambda: _by_maximum(_unknown(leaves), kind),
                lambda: to_extended(_ROOTS[kind.ord](total)),
            )
        ]
    in_passes = partial(_in_two_passes, rescales_small=rescales_small, kind=kind)
    if sum_dtype(*leaves) == jnp.float64:
        return in_passes(leaves)
    on_gpus = partial(_in_float64, kind=kind)
    return lax.platform_dependent(leaves, cuda=on_gpus, rocm=on_gpus, default=in_passes)


def _in_float64(leaves: Sequence[jax.Array], kind: _Kind) -> list[ExtendedFloat]:
    """Returns norms from sums in float64, whose range no square of a float32 leaves. For GPUs.

    There, a branch would make the host wait, and hold all that it may read, even if it never runs (XLA-3).
    """
    with jax.enable_x64(True):
        sums = join(kind.sums(list(map(_as_float64, leaves))), kind.groups)
        totals = kind.totals(sums) + (sums if kind.by_leaf else [])
        norms = [to_extended(_ROOTS[kind.ord](total)) for total in totals]
        # Rounded to float32, a mantissa may become 2, so it is split again.
        return [shifted(lax.convert_element_type(m, jnp.float32), e) for m, e in norms]


def _as_float64(x: jax.Array) -> jax.Array:
    if jnp.finfo(x.dtype).bits < 32:
        # XLA-34: in float32 first, because XLA on CUDA fuses no cast from 16 bits to float64 into some sums, and would
        # write the squares to memory. Rounding to float32's own precision does nothing, but keeps the two casts apart.
        x = upcast(x, jnp.float32)
        x = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=23)
    return upcast(x, jnp.float64)


def _in_two_passes(
    leaves: Sequence[jax.Array], rescales_small: jax.Array | None, kind: _Kind
) -> list[ExtendedFloat]:
    """Returns norms from sums in the accumulator's dtype.

    1. Sum powers of elements as they are.
    2. If a norm's sum left the range, read all leaves again, in a branch that is rarely taken. Each unit is scaled by
       one of two constants, which its own sum chooses; for a global norm, the sum of all leaves chooses.
    3. Take the sum that is in range, its root, and undo the scale.
    """
    # 1
    unit_sums = kind.sums(leaves)
    joined_sums = join(unit_sums, kind.groups)
    norm_sums = kind.totals(joined_sums)  # one if it is global
    shifts = [shift_into_range(total, rescales_small) for total in norm_sums]

    # 2
    are_shifted = jnp.stack([jnp.any(shift != 0) for shift in shifts])
    is_rare = kind.on_all_devices(jnp.any(are_shifted))
    sums_of_scaled = partial(_sums_of_scaled, leaves, unit_sums, norm_sums, kind)
    scaled = run_if(is_rare, sums_of_scaled, lambda: joined_sums)

    # 3
    # Trusted sums stay as they are, because the second pass may round them otherwise.
    each = zip(shifts, kind.totals(scaled), norm_sums, strict=True)
    in_range = [jnp.where(shift != 0, second, first) for shift, second, first in each]
    roots = [_ROOTS[kind.ord](total) for total in in_range]
    norms = [shifted(root, -shift) for root, shift in zip(roots, shifts, strict=True)]
    if kind.by_leaf:
        norms.append(_norms_by_leaf(joined_sums[0], scaled[0], shifts[0]))
    return norms


def _norms_by_leaf(sums: jax.Array, scaled: jax.Array, shift: jax.Array) -> ExtendedFloat:
    """Returns the norms of the leaves of a global norm from their sums, plain and scaled by its shift."""
    # The sum of all leaves decides on the shift. After an overflow of the total, a leaf that did not overflow keeps its
    # first sum. Beside a large leaf, a tiny one keeps its flushed sum.
    is_helped = shift_into_range(sums) == shift
    root = jnp.sqrt(jnp.where(is_helped, scaled, sums))
    return shifted(root, -jnp.where(is_helped, shift, 0))


def _sums_of_scaled(
    leaves: Sequence[jax.Array],
    unit_sums: Sequence[jax.Array],
    norm_sums: Sequence[jax.Array],
    kind: _Kind,
) -> list[jax.Array]:
    """Returns the sums of units, joined, of elements times the scale that brings an untrusted sum into range."""
    # 1. Choose a power of two by each sum. The caller reads only those sums that it shifts. XLA-7: XLA knows a frozen
    # leaf's zeros, and so their sum and this scale. It would turn (0 * scale) * (0 * scale) into 0 * (scale * scale),
    # which is NaN (test_norms, "one element"). So barriers hide the sum here, and the leaves in step 3.
    deciding_sums = _unknown(norm_sums if kind.is_global else unit_sums)
    factors = [power_of_two(shift_into_range(s), s.dtype) for s in deciding_sums]
    if kind.is_global:
        # 2. For a global norm there is one factor. XLA-6: XLA:CPU materializes a scalar that leaves share, as an array
        # of each leaf's size. So each large leaf gets a copy: its own sum between equal bounds.
        (factor,) = factors
        pairs = zip(leaves, unit_sums, strict=True)
        factors = [factor if _is_small(x) else lax.clamp(factor, own, factor) for x, own in pairs]
    # 3. Scale the leaves, and sum again.
    scaled = []
    for x, factor, dims in zip(_unknown(leaves), factors, kind.unit_dims, strict=True):
        x = upcast(x, factor.dtype)
        scaled.append(mul_real(x, broadcast_to_leaf(factor, x, dims)))
    return join(kind.sums(scaled), kind.groups)


def _is_small(x: jax.Array) -> bool:
    """Returns whether a scalar in the size of a leaf is nothing that counts. A symbolic size may be large."""
    return are_known([x.size]) and x.size <= 2**14


def _cube_root(x: jax.Array) -> jax.Array:
    """Returns the cube root, with one Newton step, because `lax.cbrt` may be many eps off in float64 (XLA-20)."""
    positive = jnp.where(x > 0, x, 1)  # of 0, the step is 0 / 0
    root = lax.cbrt(positive)
    return jnp.where(x > 0, root - (root - positive / (root * root)) / 3, x)


# The roots of the orders whose powers the first pass sums.
_ROOTS: dict[float, Callable[[jax.Array], jax.Array]] = {
    1: lambda x: x,
    2: lax.sqrt,
    3: _cube_root,
    4: lambda x: lax.sqrt(lax.sqrt(x)),
}


def _power(x: jax.Array, p: float) -> jax.Array:
    if p != 2:
        return lax.integer_pow(lax.abs(x), int(p))
    if is_complex(x):
        return lax.mul(x.real, x.real) + lax.mul(x.imag, x.imag)
    return lax.mul(x, x)


def _by_maximum(leaves: Sequence[jax.Array], kind: _Kind) -> ExtendedFloat:
    """Returns norms of any order p >= 1, relative to the largest magnitude of a leaf, or of all for a global norm.

    1. Find the largest magnitude.
    2. Add up (|x| / largest)**p, in a second pass. The norm is the largest times the root of the sum.
    3. If an element is infinite or NaN, so is the largest, and that is the norm.
    """
    # 1
    p, dtype = kind.ord, sum_dtype(*leaves)
    largest = _largest(leaves, dtype, kind.axes)
    if kind.is_global:
        exponent = jnp.max(largest.exponent)
        heights = times_power_of_two(largest.mantissa, largest.exponent - exponent)
        top = jnp.broadcast_to(jnp.max(heights), heights.shape)
        largest = shifted(top, exponent)

    # 2
    mantissa = largest.mantissa
    if p < math.inf:
        each = zip(leaves, *map(scalars, _scale_to_one(largest)), strict=True)
        relative = [
            lax.abs(mul_real(upcast(x, dtype), first, second, 1 / divisor))
            for x, first, second, divisor in each
        ]
        sums = jnp.stack(leaf_sums([x**p for x in relative], axes=kind.axes))
        # `full_like` would cast a number that varies over devices again, an error in JAX 0.8.
        if kind.is_global:
            sums = jnp.broadcast_to(_ordered_sum(sums), sums.shape)
        mantissa = mantissa * sums ** (1 / p)

    # 3
    mantissa = jnp.where(jnp.isfinite(largest.mantissa), mantissa, largest.mantissa)
    norms = shifted(mantissa, largest.exponent)
    return ExtendedFloat(*(part[0] for part in norms)) if kind.is_global else norms


def _largest(leaves: Sequence[jax.Array], dtype: DType, axes: Axes | list[Axes]) -> ExtendedFloat:
    """Returns the largest magnitude of each leaf, as a vector."""
    # XLA-29: the barriers hide numbers that XLA knows. It would not flush their subnormal parts, moduli and norms.
    hidden = [_unknown(x) if is_complex(x) else x for x in leaves]
    converted = [upcast(x, dtype) for x in hidden]
    keys = _unknown(leaf_maxima(magnitude_key, converted, axes=axes))
    # The first key of a complex leaf is of half the moduli, so 1 is added to the exponent. The last is of moduli times
    # 2**_GROWN_BY, which is subtracted. A real leaf has one key, which is both.
    firsts = jnp.concatenate([key[:1] for key in keys])
    largest = lax.bitcast_convert_type(firsts, dtype)
    mantissas, exponents = to_extended(largest)
    are_complex = np.asarray([is_complex(x) for x in leaves])
    if not are_complex.any():
        return ExtendedFloat(mantissas, exponents)
    lasts = jnp.concatenate([key[-1:] for key in keys])
    grown = to_extended(lax.bitcast_convert_type(lasts, dtype))
    is_small = are_complex & (exponents < -_GROWN_BY)
    mantissas = jnp.where(is_small, grown.mantissa, mantissas)
    of_grown = grown.exponent - _GROWN_BY
    of_halved = exponents + are_complex.astype(np.int32)
    return ExtendedFloat(mantissas, jnp.where(is_small, of_grown, of_halved))


_GROWN_BY = 64  # the exponent of the scale of small moduli


def magnitude_key(x: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the bits of magnitudes, by which `leaf_maxima` finds the largest; a NaN counts as larger than all others.

    Those of a complex leaf are of half the moduli, because a modulus can leave the range, and of moduli times 2**64,
    because half of a small one can be flushed. Bits are compared because XLA:CPU's maximum of floats loses a NaN
    (XLA-10). Integers are their own keys.
    """
    if jnp.issubdtype(x.dtype, jnp.integer):
        return (x,)
    if not is_complex(x):
        return (magnitude_bits(x),)
    scales = (0.5, 2.0**_GROWN_BY)
    moduli = [lax.abs(mul_real(x, jnp.asarray(s, x.real.dtype))) for s in scales]
    return tuple(map(magnitude_bits, moduli))


class _ScaleToOne(NamedTuple):
    """The scale `first * second / divisor`, which brings a number to 1. `first * second` is a power of two."""

    first: jax.Array
    second: jax.Array
    divisor: jax.Array  # the number's mantissa


def _scale_to_one(numbers: ExtendedFloat) -> _ScaleToOne:
    """Returns the scales of these numbers. All three parts are 1 for a number that is 0 or not finite."""
    is_defined = _is_defined(numbers)
    exponents = jnp.where(is_defined, -numbers.exponent, 0)
    first, second = factors_of_two(exponents, numbers.mantissa.dtype)
    return _ScaleToOne(first, second, jnp.where(is_defined, numbers.mantissa, 1))


def _is_defined(numbers: ExtendedFloat) -> jax.Array:
    return jnp.isfinite(numbers.mantissa) & (numbers.mantissa > 0)


@_measure.defjvp
def _measure_jvp(kind: _Kind, primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> Any:
    """Returns norms and their tangents, the sums of Re(conj(sign(x)) dx) (|x| / norm)**(ord - 1).

    For ord = inf the tangent is shared evenly by the largest elements. The norms of a global one's leaves have none.

    1. Take the scale of each leaf's units that brings their norm to 1.
    2. Compute the terms of the leaves' elements.
    3. Add them up. The sums are the tangents of the mantissas, because the exponents stay.
    4. A norm that is 0 or not finite has the tangent 0.
    """
    (leaves, rescales_small), (d_leaves, _) = primals, tangents
    norms = _measure(leaves, rescales_small, kind)
    measured = norms[:1] if kind.is_global else norms

    # 1
    scales = list(map(_scale_to_one, measured))
    if kind.is_global:
        shape = (len(leaves),)
        scales = jax.tree.map(lambda part: jnp.broadcast_to(part, shape), scales)
    shapes = list(map(shape_of_units, leaves, kind.unit_dims))
    by_leaf = split(scales, kind.groups, shapes)

    # 2
    each = zip(*_unknown((leaves, d_leaves)), kind.unit_dims, by_leaf, strict=True)
    pairs = [_term(*of_leaf, kind.ord) for of_leaf in each]

    # 3
    def of_norms(per_element: Sequence[jax.Array]) -> list[jax.Array]:
        sums = leaf_sums(per_element, axes=kind.axes, unit_dims=kind.unit_dims)
        sums = join(sums, kind.groups)
        return [jnp.sum(sums[0])] if kind.is_global else sums

    slopes = of_norms([term for term, _ in pairs])
    if kind.ord == math.inf:
        ties = of_norms([is_largest for _, is_largest in pairs])
        slopes = [s / jnp.maximum(t, 1) for s, t in zip(slopes, ties, strict=True)]

    # 4
    defined = map(_is_defined, measured)
    slopes = [jnp.where(d, s, 0) for d, s in zip(defined, slopes, strict=True)]
    slopes += [jnp.zeros_like(norm.mantissa) for norm in norms[len(measured) :]]
    no_tangent: Any = partial(np.zeros, dtype=jax.dtypes.float0)  # of an integer
    return norms, [ExtendedFloat(slope, no_tangent(slope.shape)) for slope in slopes]


def _term(
    x: jax.Array, dx: jax.Array, dims: UnitDims, scale: _ScaleToOne, ord: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the terms sign(x) (|x| / norm)**(ord - 1) dx / 2**exponent, and 1 for each largest element."""
    first, second, divisor = (broadcast_to_leaf(part, x, dims) for part in scale)
    # norm = mantissa * 2**exponent with an integer exponent, so d(mantissa) = d(norm) / 2**exponent. So dx gets the two
    # factors, too, and not the divisor.
    x, dx = (mul_real(upcast(part, divisor.dtype), first, second) for part in (x, dx))
    # x is scaled as the mantissa is, so for ord = inf, abs(x) >= divisor means that abs(x) is the norm.
    is_largest = (jnp.abs(x) >= divisor).astype(divisor.dtype)
    slope = mul_real(x, 1 / divisor)
    if ord != 2:
        power = is_largest if ord == math.inf else jnp.abs(slope) ** (ord - 1)
        slope = mul_real(jnp.sign(slope), power)
    if is_complex(slope):
        return slope.real * dx.real + slope.imag * dx.imag, is_largest
    return slope * dx, is_largest


def _unknown(x: Tree) -> Tree:
    """Returns x behind a barrier, so that XLA does not know it as a constant. Wraps leaves that are scaled and squared.

    XLA-7: The gradient of a frozen parameter is a known zero. XLA turns `(0 * c) * (0 * c)` into `0 * (c * c)`, which
    is NaN for c = 2**88 in float32.
    """
    # One barrier for each array, because all outputs of a shared barrier vary over the same mapped axes.
    return jax.tree.map(lax.optimization_barrier, x)


def _ordered_sum(terms: jax.Array) -> jax.Array:
    """Returns the sum of the leaves' terms, which does not depend on their order, to the last bit."""
    return jnp.sum(jnp.sort(terms))
