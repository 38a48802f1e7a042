"""Range-safe norms of leaves, and scaling that keeps range and dtypes.

A norm is measured as `mantissa * 2**exponent` (`Scaled`), so that neither the squares nor the norm itself, nor the
ratio of two such numbers, overflows or underflows before the answer does.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax._arguments import Scalar
from shrewjax._branches import run_if
from shrewjax._extended import (
    EXPONENT_OF_ZERO,
    ExtendedFloat,
    extended_number,
    in_dtype_of,
    is_greater,
    shifted,
    to_extended,
)
from shrewjax._floats import (
    accumulator_dtype,
    factors_of_two,
    float_format,
    is_complex,
    magnitude_bits,
    mul_real,
    power_of_two,
    times_power_of_two,
    upcast,
)
from shrewjax._mesh import Axes, UnitDims, UnitSharding
from shrewjax._reductions import any_device, leaf_maxima, leaf_sums

Scope = Literal["global", "leaf"]


class ClipScale(NamedTuple):
    """What a clip multiplies by: `coarse * fine * fine` where `applies`; elsewhere nothing is touched."""

    applies: jax.Array  # bool
    coarse: jax.Array
    fine: jax.Array  # 1, unless one factor alone would underflow where its product with a gradient does not


@partial(jax.jit, static_argnums=(1, 2), inline=True)  # outside of jit, each call would compile its `cond` anew
def measure(leaves: Sequence[Any], ord: float, axes: Axes) -> ExtendedFloat:
    """Returns the `ord`-norm of all leaves together. Shape ().

    It is accumulated in float32, or in float64 if a leaf is, and does not depend on the leaves' order. Its derivative
    is 0 where the norm is 0 or not finite.
    """
    return _measure(leaves, ord, "global", axes)


@partial(jax.jit, static_argnums=(1, 2, 3), inline=True)  # as for `measure`
def measure_units(
    leaves: Sequence[Any], unit_dims: Sequence[UnitDims], axes: Sequence[UnitSharding], ord: float = 2
) -> list[ExtendedFloat]:
    """Returns the norm of every unit of each leaf, of the sizes of its unit dims, stacked (`stack_single_units`).

    Orders other than 1 and 2 are for leaves that are single units.
    """
    if not leaves:
        return []
    within: list[Axes] = [of_leaf.within for of_leaf in axes]
    if ord not in (1, 2):
        return [_measure(leaves, ord, "leaf", within)]
    powers, shifts = _powers_of_units(leaves, ord, unit_dims, within)
    return [_rooted(of_stack, ord, shift) for of_stack, shift in zip(powers, shifts, strict=True)]


def combine(norms: Sequence[ExtendedFloat], over: list[Axes]) -> ExtendedFloat:
    """The norm of everything from the norms of its units, packed. Shape ()."""
    if not norms:
        return to_extended(jnp.zeros((), jnp.float32))
    keys = leaf_maxima(_exponent_key, [n.exponent for n in norms], axes=over)
    largest = jnp.max(jnp.concatenate(keys)) + EXPONENT_OF_ZERO * 2
    heights = [times_power_of_two(n.mantissa, n.exponent - largest) for n in norms]
    squares = leaf_sums(lambda h: h * h, heights, axes=over)
    return shifted(jnp.sqrt(_ordered_sum(jnp.stack(squares))), largest)


def as_limit(value: Scalar, like: ExtendedFloat) -> ExtendedFloat:
    """A threshold to hold norms `like` these to, or one for each of them; below 0 counts as 0."""
    if not isinstance(value, jax.Array):
        return extended_number(value, like.mantissa.dtype)
    return in_dtype_of(to_extended(jnp.maximum(value, 0)), like)


@partial(jax.jit, inline=True)  # as `measure`
def clip_scale(norm: ExtendedFloat, limit: ExtendedFloat) -> ClipScale:
    """What brings a measured norm down to its limit: the decision of every norm clip. Shapes of `norm`."""
    applies = _exceeds(norm, limit)
    one = jnp.ones_like(norm.mantissa)
    # Not only for speed: what comes out of a `cond` is computed once, not again in the kernel of every leaf.
    return run_if(
        jnp.any(applies),
        lambda: _reduced(norm, limit, applies),
        lambda: ClipScale(jnp.zeros_like(applies), one, one),
    )


def clip_scales(norms: Sequence[ExtendedFloat], limits: Sequence[ExtendedFloat]) -> list[ClipScale]:
    """`clip_factor` for the units of each leaf, decided together."""
    if not norms:
        return []
    applies = list(map(_exceeds, norms, limits))

    def untouched(norm: ExtendedFloat, applies: jax.Array) -> ClipScale:
        return ClipScale(jnp.zeros_like(applies), jnp.ones_like(norm.mantissa), jnp.ones_like(norm.mantissa))

    return run_if(
        jnp.any(jnp.stack([jnp.any(a) for a in applies])),
        lambda: list(map(_reduced, norms, limits, applies)),
        lambda: list(map(untouched, norms, applies)),
    )


def apply_scale(x: Any, factor: ClipScale) -> jax.Array:
    """x times the factor where it applies, else x to the last bit; in x's dtype, multiplied in the factor's."""
    dtype = factor.coarse.dtype
    product = mul_real(mul_real(mul_real(upcast(x, dtype), factor.coarse), factor.fine), factor.fine)
    # Not x * 1 where nothing is clipped: that flushes subnormals on some backends.
    select = lax.select if factor.applies.ndim == 0 else jnp.where
    return select(factor.applies, lax.convert_element_type(product, x.dtype), x)


def apply_unit_scales(x: Any, factor: ClipScale, dims: UnitDims) -> jax.Array:
    """Returns `apply_scale` with a scale for each unit."""
    return apply_scale(x, ClipScale(*(broadcast_to_leaf(part, x, dims) for part in factor)))


def applied_scale(factor: ClipScale) -> jax.Array:
    """What gradients were multiplied by, float32: 1 where nothing was clipped."""
    return jnp.where(factor.applies, factor.coarse * factor.fine * factor.fine, 1).astype(jnp.float32)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _measure(leaves: Sequence[Any], ord: float, scope: Scope, axes: Axes | list[Axes]) -> ExtendedFloat:
    if not leaves:
        return to_extended(jnp.zeros((0,) if scope == "leaf" else (), jnp.float32))
    if ord not in _ROOTS:
        return _measure_by_maximum(leaves, ord, scope, axes)
    return _measure_by_powers(leaves, ord, scope, axes)


class _Range(NamedTuple):
    """Where the sum of a leaf's p-th powers, p = 1 or 2, is trusted, and what brings every other leaf there."""

    trusted_above: float  # what underflows is too little to matter for a sum above this
    shrink: int  # elements times 2**shrink overflow no sum;
    grow: int  # elements of an untrusted leaf times 2**grow neither overflow nor lose what counts


_RANGE = {
    jnp.dtype(jnp.float32): _Range(2.0**-60, -96, 88),
    jnp.dtype(jnp.float64): _Range(2.0**-900, -600, 600),
}


def _cube_root(x: jax.Array) -> jax.Array:
    """The cube root, with a step of Newton's, because XLA computes x**(1/3) with a rounded 1/3: 18 eps off at 1e90."""
    root = lax.cbrt(x)
    return root - (root - x / (root * root)) / 3


# The orders whose powers are summed as they are, and their roots. Products of a few factors are right to a few ulp, and
# seldom leave the range. A power with a fraction is neither: it is computed from the logarithm, whose error grows.
_ROOTS: dict[float, Callable[[jax.Array], jax.Array]] = {
    1: lambda x: x,
    2: lax.sqrt,
    3: _cube_root,
    4: lambda x: lax.sqrt(lax.sqrt(x)),
}


def _measure_by_powers(leaves: Sequence[Any], p: float, scope: Scope, axes: Axes | list[Axes]) -> ExtendedFloat:
    """One plain pass, and another one, over scaled elements, only if sums left the trusted range."""
    dtype = _accumulation_dtype(leaves)
    leaf_powers = leaf_sums(_power(p, dtype), leaves, axes=axes)
    plain = jnp.stack(leaf_powers) if scope == "leaf" else _ordered_sum(jnp.stack(leaf_powers))
    shift = _shift_into_range(plain)

    def rescaled() -> ExtendedFloat:
        factor = power_of_two(shift, dtype)
        # XLA:CPU writes out a factor that leaves share, broadcast to their shape: where that is large, the factor is an
        # operation of the leaf's own, a clamp between equal bounds.
        each = [
            lax.clamp(factor, s, factor) if x.size > 2**14 else factor for x, s in zip(leaves, leaf_powers, strict=True)
        ]
        total = _ordered_sum(jnp.stack(leaf_sums(_power(p, dtype), _unknown(leaves), each, axes=axes)))
        # XLA:GPU would turn the branch into a select, and so run it always, if it held nothing but plain reductions.
        return _rooted(lax.optimization_barrier(total), p, shift)

    def by_maximum() -> ExtendedFloat:
        return _measure_by_maximum(_unknown(leaves), p, scope, axes)

    another = rescaled if p in (1, 2) else by_maximum
    return run_if(jnp.any(shift != 0), another, lambda: _rooted(plain, p, jnp.zeros_like(shift)))


def _powers_of_units(
    leaves: Sequence[Any], p: float, unit_dims: Sequence[UnitDims], axes: Axes | list[Axes]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The sums of p-th powers, p = 1 or 2, of all units, and the powers of two that scale them, both `packed`.

    A leaf is read again only if sums of its own left the trusted range, such as that of a frozen leaf, which is 0.
    """
    power = _power(p, _accumulation_dtype(leaves))
    plain = leaf_sums(power, leaves, axes=axes, unit_dims=unit_dims)
    shifts = [_shift_into_range(powers) for powers in stack_single_units(plain, unit_dims)]

    def read_again(i: int, untrusted: jax.Array) -> jax.Array:
        x, dims, over = _unknown(leaves[i]), unit_dims[i], [axes[i]] if isinstance(axes, list) else axes
        # From the leaf's own sums, not from a place in `shifts`: so leaves of one shape share a compiled kernel.
        factor = broadcast_to_leaf(power_of_two(_shift_into_range(plain[i]), plain[i].dtype), x, dims)
        # The barrier is as in `_measure_by_powers`.
        return run_if(
            untrusted,
            lambda: lax.optimization_barrier(leaf_sums(power, [x], [factor], axes=over, unit_dims=[dims])[0]),
            lambda: plain[i],
        )

    def rescaled() -> list[jax.Array]:
        untrusted = any_device([jnp.any(_shift_into_range(powers) != 0) for powers in plain])
        return stack_single_units([read_again(i, flag) for i, flag in enumerate(untrusted)], unit_dims)

    (is_out_of_range,) = any_device([jnp.any(jnp.stack([jnp.any(s != 0) for s in shifts]))])
    return run_if(is_out_of_range, rescaled, lambda: stack_single_units(plain, unit_dims)), shifts


def _rooted(powers: jax.Array, p: float, shift: jax.Array) -> ExtendedFloat:
    """The norm of elements whose p-th powers, scaled by 2**shift, sum to this. Its derivative at 0 is 0."""
    positive = powers > 0  # the root of 0 has no derivative
    safe = jnp.where(positive, powers, 1)
    root = _ROOTS[p](safe)
    return shifted(jnp.where(positive, root, powers), -shift)


@cache
def _power(p: float, dtype: Any) -> Callable[..., jax.Array]:
    """What `leaf_sums` sums: the p-th powers of elements, scaled by a number if one is given."""

    def power(x: Any, *factor: jax.Array) -> jax.Array:
        x = _rescaled(x, dtype, *factor)
        return _squared_modulus(x) if p == 2 else lax.integer_pow(lax.abs(x), int(p))

    return power


def _shift_into_range(powers: jax.Array) -> jax.Array:
    """The power of two by which elements have to be scaled for their sums to be trusted."""
    trusted_above, shrink, grow = _RANGE[powers.dtype]
    return jnp.where(powers == jnp.inf, shrink, jnp.where(powers < trusted_above, grow, 0))


def _measure_by_maximum(leaves: Sequence[Any], p: float, scope: Scope, axes: Axes | list[Axes]) -> ExtendedFloat:
    """Any p >= 1: the largest magnitude, then the sum of (|x| / largest)**p, whose terms stay in [0, 1]."""
    dtype = _accumulation_dtype(leaves)

    maxima = lax.bitcast_convert_type(jnp.concatenate(leaf_maxima(magnitude_keys(dtype), leaves, axes=axes)), dtype)
    mantissas, exponents = to_extended(maxima)
    exponents = exponents + np.asarray([is_complex(x) for x in leaves], np.int32)
    if p < math.inf:
        scale = [list(vector) for vector in _scale_to_one(mantissas, exponents)]

        def relative_power(x: Any, first: jax.Array, second: jax.Array, unit: jax.Array) -> jax.Array:
            return lax.abs(_rescaled(x, dtype, first, second, 1 / unit)) ** p

        sums = jnp.stack(leaf_sums(relative_power, leaves, *scale, axes=axes))
    else:
        sums = jnp.ones_like(mantissas)

    if scope == "global":
        largest = jnp.max(exponents)
        height = times_power_of_two(mantissas, exponents - largest)
        top = jnp.max(height)
        share = height / jnp.where(top > 0, top, 1)
        sums = _ordered_sum(sums * share**p) if p < math.inf else jnp.max(sums * share)
        mantissas, exponents = top, largest
        maxima = jnp.sum(maxima, where=~jnp.isfinite(maxima))  # 0, or what is to be reported
    norm = shifted(mantissas * (sums ** (1 / p) if p < math.inf else sums), exponents)
    return ExtendedFloat(jnp.where(jnp.isfinite(maxima), norm.mantissa, maxima), norm.exponent)


@cache
def magnitude_keys(dtype: Any) -> Callable[[Any], tuple[jax.Array]]:
    """What `leaf_maxima` takes to find the largest magnitude, of complex leaves half of it: its bits in this dtype."""

    def key(x: Any) -> tuple[jax.Array]:
        x = upcast(x, dtype)
        # Half the modulus: the modulus itself can be beyond the dtype's range where its parts are not.
        return (magnitude_bits(lax.abs(mul_real(x, jnp.asarray(0.5, dtype))) if is_complex(x) else x),)

    return key


def _scale_to_one(mantissas: jax.Array, exponents: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Two factors and a divisor that bring numbers of these mantissas and exponents to 1; ones for a mantissa of 0."""
    first, second = factors_of_two(jnp.where(mantissas > 0, -exponents, 0), mantissas.dtype)
    return first, second, jnp.where(mantissas > 0, mantissas, 1)


def _exponent_key(exponent: jax.Array) -> tuple[jax.Array]:
    return (exponent - EXPONENT_OF_ZERO * 2,)


@_measure.defjvp
def _measure_jvp(
    ord: float, scope: Scope, axes: Axes | list[Axes], primals: tuple[Any], tangents: tuple[Any]
) -> tuple[ExtendedFloat, ExtendedFloat]:
    """d norm = sum of Re(conj(sign(x)) dx) (|x| / norm)**(ord - 1), spread evenly over the largest for ord = inf."""
    (leaves,), (d_leaves,) = primals, tangents
    norm = _measure(leaves, ord, scope, axes)
    no_exponent: Any = np.zeros(norm.exponent.shape, jax.dtypes.float0)  # an integer's tangent
    if not leaves:
        return norm, ExtendedFloat(jnp.zeros_like(norm.mantissa), no_exponent)
    dtype = norm.mantissa.dtype
    mantissas, exponents = (jnp.broadcast_to(part, (len(leaves),)) for part in norm)
    defined = jnp.isfinite(mantissas) & (mantissas > 0)
    scale = [list(v) for v in _scale_to_one(jnp.where(defined, mantissas, 0), exponents)]

    def is_largest(pair: Any, first: jax.Array, second: jax.Array, unit: jax.Array) -> jax.Array:
        return (jnp.abs(_rescaled(pair[0], dtype, first, second)) >= unit).astype(dtype)

    def term(pair: Any, first: jax.Array, second: jax.Array, unit: jax.Array) -> jax.Array:
        x, dx = _rescaled(pair[0], dtype, first, second, 1 / unit), _rescaled(pair[1], dtype, first, second)
        if ord != 2:
            weight = is_largest(pair, first, second, unit) if ord == math.inf else jnp.abs(x) ** (ord - 1)
            x = mul_real(jnp.sign(x), weight)
        return x.real * dx.real + x.imag * dx.imag if is_complex(x) else x * dx

    pairs = _unknown(list(zip(leaves, d_leaves, strict=True)))
    slopes = jnp.stack(leaf_sums(term, pairs, *scale, axes=axes))
    if ord == math.inf:
        ties = jnp.stack(leaf_sums(is_largest, pairs, *scale, axes=axes))
        ties = jnp.broadcast_to(jnp.sum(ties), ties.shape) if scope == "global" else ties
        slopes = slopes / jnp.maximum(ties, 1)
    slopes = jnp.where(defined, slopes, 0)
    return norm, ExtendedFloat(jnp.sum(slopes) if scope == "global" else slopes, no_exponent)


def _unknown(x: Any) -> Any:
    """x, as a value of which XLA knows nothing: for what is scaled and then multiplied again.

    XLA regroups products with constants. A frozen parameter's gradient is a zero that it knows, and of
    `(0 * c) * (0 * c)` it makes `0 * (c * c)`: 0 * inf for c = 2**88 in float32. This holds on CPU
    (`tests/test_train_steps.py`) and CUDA (`tests/test_accelerators.py`), where `lax.reduce_precision` does not help.
    """
    return jax.tree.map(lax.optimization_barrier, x)  # one by one, or all would vary over the same mapped axes


def _rescaled(x: Any, dtype: Any, *factors: jax.Array) -> jax.Array:
    """x in a real dtype (`widen`), times each real factor in turn."""
    x = upcast(x, dtype)
    for factor in factors:
        x = mul_real(x, factor)
    return x


def _squared_modulus(x: jax.Array) -> jax.Array:
    return lax.mul(x.real, x.real) + lax.mul(x.imag, x.imag) if is_complex(x) else lax.mul(x, x)


def _accumulation_dtype(leaves: Sequence[Any]) -> Any:
    return jnp.dtype(jnp.float64 if any(accumulator_dtype(x) == jnp.float64 for x in leaves) else jnp.float32)


def _ordered_sum(terms: jax.Array) -> jax.Array:
    """A sum that does not depend on the order of the leaves, to the last bit."""
    return jnp.sum(jnp.sort(terms))


def _exceeds(norm: ExtendedFloat, limit: ExtendedFloat) -> jax.Array:
    defined = jnp.isfinite(norm.mantissa) & ~jnp.isnan(limit.mantissa)
    return (is_greater(norm, limit) | (limit.mantissa == 0) | ~defined) & (limit.mantissa != jnp.inf)


def _reduced(norm: ExtendedFloat, limit: ExtendedFloat, applies: jax.Array) -> ClipScale:
    dtype = norm.mantissa.dtype
    defined = jnp.isfinite(norm.mantissa) & ~jnp.isnan(limit.mantissa)
    # 1/2 < ratio < 2, so that ratio * 2**first is normal; the rest of the exponent goes into a second factor, halved so
    # that it is normal, too.
    ratio = limit.mantissa / jnp.where(defined & (norm.mantissa > 0), norm.mantissa, 1)
    _, bias = float_format(dtype)
    exponent = limit.exponent - norm.exponent
    second = jnp.clip((exponent - (2 - bias)) // 2, 1 - bias, 0)
    first = jnp.clip(exponent - 2 * second, 2 - bias, 0)
    product = ratio * power_of_two(first, dtype)
    return ClipScale(applies, jnp.where(defined, product, jnp.nan), power_of_two(second, dtype))


def stack_single_units(per_leaf: Sequence[Any], unit_dims: Sequence[UnitDims]) -> list[Any]:
    """The same trees of arrays, but one tree of vectors for all leaves that are one unit: their arithmetic once.

    Leaves of several units stay apart: their arrays may be sharded.
    """
    single = [x for x, dims in zip(per_leaf, unit_dims, strict=True) if not dims]
    together = [jax.tree.map(lambda *xs: jnp.stack(xs), *single)] if single else []
    return [*together, *(x for x, dims in zip(per_leaf, unit_dims, strict=True) if dims)]


def unstack_units(packs: Sequence[Any], unit_dims: Sequence[UnitDims]) -> list[Any]:
    """The trees leaf by leaf again."""
    count = sum(not dims for dims in unit_dims)
    single = iter([jax.tree.map(lambda x, i=i: x[i], packs[0]) for i in range(count)])
    several = iter(packs[1:] if count else packs)
    return [next(several if dims else single) for dims in unit_dims]


def stacked_axes(axes: Sequence[UnitSharding], unit_dims: Sequence[UnitDims]) -> list[Axes]:
    """Over which mapped axes there are more units, of each of what is `packed`."""
    single = [of_leaf.across for of_leaf, dims in zip(axes, unit_dims, strict=True) if not dims]
    return [*single[:1], *(of_leaf.across for of_leaf, dims in zip(axes, unit_dims, strict=True) if dims)]


def broadcast_to_leaf(of_units: jax.Array, leaf: Any, dims: UnitDims) -> jax.Array:
    """A number for each unit, to be broadcast over the leaf's elements."""
    return of_units if not dims else lax.expand_dims(of_units, [a for a in range(leaf.ndim) if a not in dims])
