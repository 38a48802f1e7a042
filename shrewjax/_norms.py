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

from shrewjax._branches import run_if
from shrewjax._checks import Scalar
from shrewjax._reductions import Axes, Kept, UnitAxes, anywhere, leaf_maxima, leaf_sums

Scope = Literal["global", "leaf"]


class Scaled(NamedTuple):
    """Non-negative numbers `mantissa * 2**exponent`, beyond the range of the mantissa's dtype."""

    mantissa: jax.Array  # float32 or float64: in [1, 2), or 0, inf or nan
    exponent: jax.Array  # int32, same shape


class Factor(NamedTuple):
    """What a clip multiplies by: `first * second * second` where `applies`, else nothing is touched. Scalars."""

    applies: jax.Array  # bool
    first: jax.Array
    second: jax.Array  # 1, unless `first` alone would underflow where its product with a gradient does not


# A zero compares below every other number, and two such exponents add without wrapping.
_EXPONENT_OF_ZERO = -(2**20)


# --- numbers with an exponent of their own ---------------------------------------------------------------------


def split(x: jax.Array) -> Scaled:
    """Splits x >= 0 exactly, subnormals included. An infinity or a NaN becomes the mantissa."""
    fraction_bits, bias = _float_format(x.dtype)
    # Arithmetic flushes subnormals on some backends, but their bits are the integer x * 2**(bias + fraction_bits - 1).
    as_integer = magnitude_bits(x)
    is_subnormal = as_integer < (1 << fraction_bits)
    normal = jnp.where(is_subnormal, as_integer.astype(x.dtype), x)
    moved = jnp.where(is_subnormal, 1 - bias - fraction_bits, 0)
    exponent = jnp.where(jnp.isfinite(normal), _exponent(normal), 0)
    mantissa = times_power_of_two(normal, -exponent)
    return Scaled(mantissa, jnp.where(mantissa == 0, _EXPONENT_OF_ZERO, exponent + moved))


def split_number(value: float, dtype: Any) -> Scaled:
    """Splits a Python number >= 0, also where the dtype could not hold it."""
    if value == 0 or math.isinf(value):
        mantissa, exponent = value, 0 if value else _EXPONENT_OF_ZERO
    else:
        half, exponent = math.frexp(value)
        mantissa, exponent = 2 * half, exponent - 1
    return Scaled(jnp.asarray(mantissa, dtype), jnp.asarray(exponent, jnp.int32))


def join(number: Scaled) -> jax.Array:
    """The number in the mantissa's dtype: inf where it is too large for it, 0 where it is too small."""
    return times_power_of_two(number.mantissa, number.exponent)


def is_greater(a: Scaled, b: Scaled) -> jax.Array:
    """a > b for finite numbers."""
    return (a.exponent > b.exponent) | ((a.exponent == b.exponent) & (a.mantissa > b.mantissa))


def in_dtype_of(number: Scaled, like: Scaled) -> Scaled:
    """The number, its mantissa in another's dtype."""
    return Scaled(number.mantissa.astype(like.mantissa.dtype), number.exponent)


def to_float32(number: Scaled) -> jax.Array:
    """The number as the statistics and the states have it: inf where it is too large."""
    return join(number).astype(jnp.float32)


def maximum(a: Scaled, b: Scaled) -> Scaled:
    """The larger; a NaN wins, then an infinity."""
    both_finite = jnp.isfinite(a.mantissa) & jnp.isfinite(b.mantissa)
    b_wins = jnp.isnan(b.mantissa) | (jnp.isinf(b.mantissa) & ~jnp.isnan(a.mantissa))
    takes_b = jnp.where(both_finite, is_greater(b, a), b_wins)
    return Scaled(*(jnp.where(takes_b, y, x) for x, y in zip(a, b, strict=True)))


def product(a: Scaled, b: Scaled) -> Scaled:
    """a * b; infinite if a factor is, whatever the other."""
    infinite = jnp.isinf(a.mantissa) | jnp.isinf(b.mantissa)
    finite = a.mantissa * jnp.where(infinite, 1, b.mantissa)  # never 0 * inf, at which `jax_debug_nans` stops
    return _shifted(jnp.where(infinite, jnp.inf, finite), a.exponent + b.exponent)


def quotient(a: Scaled, b: Scaled) -> Scaled:
    """a / b; x / 0 is infinite, 0 / 0 is 0."""
    ratio = _shifted(a.mantissa / jnp.where(b.mantissa == 0, 1, b.mantissa), a.exponent - b.exponent)
    return Scaled(jnp.where((b.mantissa == 0) & (a.mantissa != 0), jnp.inf, ratio.mantissa), ratio.exponent)


def times_power_of_two(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """x * 2**exponent in two factors, so that no factor leaves the range where the result does not."""
    first, second = _factors_of_two(exponent, x.dtype)
    return x * first * second


def _factors_of_two(exponent: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    _, bias = _float_format(dtype)
    first = jnp.clip(exponent, 1 - bias, bias)
    return _power_of_two(first, dtype), _power_of_two(jnp.clip(exponent - first, -bias, bias), dtype)


def power_of_two_for(x: jax.Array) -> jax.Array:
    """A power of two that brings each finite, normal x > 0 to [1, 4), to multiply with."""
    _, bias = _float_format(x.dtype)
    return _power_of_two(-jnp.clip(_exponent(x), 1 - bias, bias - 1), x.dtype)


def _power_of_two(exponent: jax.Array, dtype: Any) -> jax.Array:
    """2**exponent for -bias < exponent <= bias, and 0 for -bias; from the bits, as `exp2` is not exact."""
    fraction_bits, bias = _float_format(dtype)
    return lax.bitcast_convert_type((exponent + bias).astype(_integers_like(dtype)) << fraction_bits, dtype)


def _exponent(x: jax.Array) -> jax.Array:
    fraction_bits, bias = _float_format(x.dtype)
    return (magnitude_bits(x) >> fraction_bits).astype(jnp.int32) - bias


def magnitude_bits(x: jax.Array) -> jax.Array:
    """The bits of |x|: integers that order as the magnitudes do, with NaN above infinity."""
    integers = _integers_like(x.dtype)
    return lax.bitcast_convert_type(x, integers) & jnp.asarray(jnp.iinfo(integers).max, integers)


def narrower_bits(bits: jax.Array, dtype: Any, narrower: Any) -> jax.Array:
    """The bits of the largest magnitude in a narrower dtype that is not above one with these; -1 stays -1."""
    fraction_bits, bias = _float_format(dtype)
    to_fraction_bits, to_bias = _float_format(narrower)
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
    return result.astype(_integers_like(narrower))


def wider_bits(bits: jax.Array, dtype: Any, wider: Any) -> jax.Array:
    """The bits of the same magnitude, no NaN, in a wider dtype."""
    fraction_bits, bias = _float_format(dtype)
    to_fraction_bits, to_bias = _float_format(wider)
    bits = bits.astype(_integers_like(wider))
    result = bits << (to_fraction_bits - fraction_bits)
    if to_bias != bias:
        unit = _power_of_two(jnp.asarray(1 - bias - fraction_bits, jnp.int32), wider)
        subnormal = lax.bitcast_convert_type(bits.astype(wider) * unit, bits.dtype)
        result = jnp.where(bits < (1 << fraction_bits), subnormal, result + ((to_bias - bias) << to_fraction_bits))
        result = jnp.where(bits >= infinity_bits(dtype), infinity_bits(wider), result)
    return result


def bits_of(number: Scaled) -> jax.Array:
    """The bits of `join(number)`, with a subnormal result rounded instead of flushed."""
    dtype = number.mantissa.dtype
    fraction_bits, bias = _float_format(dtype)
    units = jnp.round(times_power_of_two(number.mantissa, number.exponent + (bias + fraction_bits - 1)))
    is_subnormal = number.exponent < 1 - bias
    as_subnormal = jnp.where(is_subnormal, units, 0).astype(_integers_like(dtype))
    return jnp.where(is_subnormal, as_subnormal, magnitude_bits(join(number)))


def with_leading_bits(x: jax.Array, count: int) -> jax.Array:
    """x with so many of its leading significant bits, the others 0."""
    fraction_bits, _ = _float_format(x.dtype)
    integers = _integers_like(x.dtype)
    mask = jnp.asarray(-1 << (fraction_bits + 1 - count), integers)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, integers) & mask, x.dtype)


def infinity_bits(dtype: Any) -> int:
    """The bits of infinity: above them are the NaNs."""
    fraction_bits, bias = _float_format(dtype)
    return (2 * bias + 1) << fraction_bits


def sign_bit(x: jax.Array) -> jax.Array:
    """Whether the sign bit is set: x < 0 also where that comparison would flush x to 0."""
    return lax.bitcast_convert_type(x, _integers_like(x.dtype)) < 0


def round_toward_zero(value: Scalar, dtype: Any) -> jax.Array:
    """A threshold in another dtype: the largest finite number there that is not above it, 0 if it is negative.

    Infinity, which callers leave out, may stay what it is.
    """
    if isinstance(value, jax.Array):
        return _rounded_toward_zero(value, dtype)
    # Once it is known, on the host, which flushes nothing.
    number = min(value, float(jnp.finfo(dtype).max))
    nearest = np.asarray(number, dtype)
    integers = _integers_like(dtype)
    return jnp.asarray((nearest.view(integers) - integers.type(float(nearest) > number)).view(dtype))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _rounded_toward_zero(value: jax.Array, dtype: Any) -> jax.Array:
    wanted = jnp.clip(value, 0, float(jnp.finfo(dtype).max))
    nearest = wanted.astype(dtype)
    is_above = nearest.astype(wanted.dtype) > wanted
    integers = _integers_like(dtype)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(nearest, integers) - is_above.astype(integers), dtype)


@_rounded_toward_zero.defjvp
def _rounded_toward_zero_jvp(
    dtype: Any, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    _, tangent = jax.jvp(lambda v: jnp.clip(v, 0, float(jnp.finfo(dtype).max)).astype(dtype), primals, tangents)
    return _rounded_toward_zero(primals[0], dtype), tangent


def _integers_like(dtype: Any) -> Any:
    return jnp.dtype(f"int{jnp.finfo(dtype).bits}")


def _float_format(dtype: Any) -> tuple[int, int]:
    info = jnp.finfo(dtype)
    return int(info.nmant), 2 ** (int(info.nexp) - 1) - 1


# --- norms -----------------------------------------------------------------------------------------------------


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


@partial(jax.jit, static_argnums=(1, 2, 3), inline=True)  # outside of jit, each call would compile its `cond` anew
def measure(leaves: Sequence[Any], ord: float, scope: Scope, axes: Axes) -> Scaled:
    """The `ord`-norm of all floating leaves together (scope "global", shape ()) or of each (scope "leaf", shape (n,)).

    Accumulated in float32, or in float64 if a leaf is, whatever the leaves' order. Its derivative is 0 where the
    norm is 0 or not finite.
    """
    return _measure(leaves, ord, scope, axes)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _measure(leaves: Sequence[Any], ord: float, scope: Scope, axes: Axes) -> Scaled:
    if not leaves:
        return split(jnp.zeros((0,) if scope == "leaf" else (), jnp.float32))
    if ord not in _ROOTS:
        return _measure_by_maximum(leaves, ord, scope, axes)
    if scope == "leaf" and ord in (1, 2):
        powers, shifts = _powers_of_units(leaves, ord, [()] * len(leaves), axes)
        return _rooted(powers[0], ord, shifts[0])
    return _measure_by_powers(leaves, ord, scope, axes)


def _measure_by_powers(leaves: Sequence[Any], p: float, scope: Scope, axes: Axes) -> Scaled:
    """One plain pass, and another one, over scaled elements, only if sums left the trusted range."""
    dtype = _accumulation_dtype(leaves)
    leaf_powers = leaf_sums(_power(p, dtype), leaves, axes=axes)
    plain = jnp.stack(leaf_powers) if scope == "leaf" else _ordered_sum(jnp.stack(leaf_powers))
    shift = _shift_into_range(plain)

    def rescaled() -> Scaled:
        factor = _power_of_two(shift, dtype)
        # XLA:CPU writes out a factor that leaves share, broadcast to their shape: where that is large, the factor is an
        # operation of the leaf's own, a clamp between equal bounds.
        each = [
            lax.clamp(factor, s, factor) if x.size > 2**14 else factor for x, s in zip(leaves, leaf_powers, strict=True)
        ]
        total = _ordered_sum(jnp.stack(leaf_sums(_power(p, dtype), _unknown(leaves), each, axes=axes)))
        # XLA:GPU would turn the branch into a select, and so run it always, if it held nothing but plain reductions.
        return _rooted(lax.optimization_barrier(total), p, shift)

    def by_maximum() -> Scaled:
        return _measure_by_maximum(_unknown(leaves), p, scope, axes)

    another = rescaled if p in (1, 2) else by_maximum
    return run_if(jnp.any(shift != 0), another, lambda: _rooted(plain, p, jnp.zeros_like(shift)))


def _powers_of_units(
    leaves: Sequence[Any],
    p: float,
    kept: Sequence[Kept],
    axes: Axes | list[Axes],
    floor: Scaled | None = None,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The sums of p-th powers, p = 1 or 2, of all units, and the powers of two that scale them, both `packed`.

    A leaf is read again only if sums of its own left the trusted range, such as that of a frozen leaf, which is 0. A
    norm that is sure to be below the floor need not be right, only below it.
    """
    dtype = _accumulation_dtype(leaves)
    power = _power(p, dtype)
    plain = leaf_sums(power, leaves, axes=axes, kept=kept)
    highest = math.floor(math.log2(_RANGE[dtype].trusted_above) / p)  # of the exponents of norms below that range
    shift = partial(_shift_into_range, small_count=True if floor is None else floor.exponent <= highest)
    shifts = [shift(powers) for powers in packed(plain, kept)]
    # Where there is a collective in a branch, all devices have to take it.
    agreed = list if isinstance(axes, list) and all(over == () for over in axes) else anywhere

    def read_again(i: int, untrusted: jax.Array) -> jax.Array:
        x, keep, over = _unknown(leaves[i]), kept[i], [axes[i]] if isinstance(axes, list) else axes
        # From the leaf's own sums, not from a place in `shifts`: so leaves of one shape share a compiled kernel.
        factor = over_leaf(_power_of_two(shift(plain[i]), dtype), x, keep)
        # The barrier is as in `_measure_by_powers`.
        return run_if(
            untrusted,
            lambda: lax.optimization_barrier(leaf_sums(power, [x], [factor], axes=over, kept=[keep])[0]),
            lambda: plain[i],
        )

    def rescaled() -> list[jax.Array]:
        untrusted = agreed([jnp.any(shift(powers) != 0) for powers in plain])
        return packed([read_again(i, flag) for i, flag in enumerate(untrusted)], kept)

    (is_out_of_range,) = agreed([jnp.any(jnp.stack([jnp.any(s != 0) for s in shifts]))])
    return run_if(is_out_of_range, rescaled, lambda: packed(plain, kept)), shifts


def _rooted(powers: jax.Array, p: float, shift: jax.Array) -> Scaled:
    """The norm of elements whose p-th powers, scaled by 2**shift, sum to this. Its derivative at 0 is 0."""
    positive = powers > 0  # the root of 0 has no derivative
    safe = jnp.where(positive, powers, 1)
    root = _ROOTS[p](safe)
    return _shifted(jnp.where(positive, root, powers), -shift)


@cache
def _power(p: float, dtype: Any) -> Callable[..., jax.Array]:
    """What `leaf_sums` sums: the p-th powers of elements, scaled by a number if one is given."""

    def power(x: Any, *factor: jax.Array) -> jax.Array:
        x = _rescaled(x, dtype, *factor)
        return _squared_modulus(x) if p == 2 else lax.integer_pow(lax.abs(x), int(p))

    return power


def _shift_into_range(powers: jax.Array, small_count: jax.Array | bool = True) -> jax.Array:
    """The power of two by which elements have to be scaled for their sums, or those that count, to be trusted."""
    trusted_above, shrink, grow = _RANGE[powers.dtype]
    return jnp.where(powers == jnp.inf, shrink, jnp.where((powers < trusted_above) & small_count, grow, 0))


@partial(jax.jit, static_argnums=(1, 2), inline=True)  # as for `measure`
def measure_units(leaves: Sequence[Any], kept: Sequence[Kept], axes: Sequence[UnitAxes]) -> list[Scaled]:
    """The 2-norm of every unit of each leaf: over all its axes but the `kept`, whose sizes are the shape; `packed`."""
    if not leaves:
        return []
    powers, shifts = _powers_of_units(leaves, 2, kept, [of_leaf.divided for of_leaf in axes])
    return [_rooted(*of_pack) for of_pack in zip(powers, [2] * len(powers), shifts, strict=True)]


@partial(jax.jit, static_argnums=(1, 2, 3), inline=True)  # as for `measure`
def measure_slices(x: Any, ord: float, kept: Kept, divided: Axes, limit: Scaled) -> Scaled:
    """The `ord`-norm of every slice of x: over all its axes but the `kept`, whose sizes are the shape.

    A norm that is sure to be below the limit may be anything that is below it: so zeros, of masked tokens, are read
    once.
    """
    if ord in (1, 2):
        (powers,), (shift,) = _powers_of_units([x], ord, [kept], [divided], floor=limit)
        (norm,) = unpacked([_rooted(powers, ord, shift)], [kept])
        return norm

    def of_one(x: Any) -> Scaled:
        return measure([x], ord, "global", divided)

    for before, axis in reversed([*enumerate(kept)]):
        of_one = jax.vmap(of_one, in_axes=axis - before)
    return of_one(x)


def combine(norms: Sequence[Scaled], over: list[Axes]) -> Scaled:
    """The norm of everything from the norms of its units, packed. Shape ()."""
    if not norms:
        return split(jnp.zeros((), jnp.float32))
    keys = leaf_maxima(_exponent_key, [n.exponent for n in norms], axes=over)
    largest = jnp.max(jnp.concatenate(keys)) + _EXPONENT_OF_ZERO * 2
    heights = [times_power_of_two(n.mantissa, n.exponent - largest) for n in norms]
    squares = leaf_sums(lambda h: h * h, heights, axes=over)
    return _shifted(jnp.sqrt(_ordered_sum(jnp.stack(squares))), largest)


def _exponent_key(exponent: jax.Array) -> tuple[jax.Array]:
    return (exponent - _EXPONENT_OF_ZERO * 2,)


def _measure_by_maximum(leaves: Sequence[Any], p: float, scope: Scope, axes: Axes) -> Scaled:
    """Any p >= 1: the largest magnitude, then the sum of (|x| / largest)**p, whose terms stay in [0, 1]."""
    dtype = _accumulation_dtype(leaves)

    maxima = lax.bitcast_convert_type(jnp.concatenate(leaf_maxima(magnitude_keys(dtype), leaves, axes=axes)), dtype)
    mantissas, exponents = split(maxima)
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
    norm = _shifted(mantissas * (sums ** (1 / p) if p < math.inf else sums), exponents)
    return Scaled(jnp.where(jnp.isfinite(maxima), norm.mantissa, maxima), norm.exponent)


@cache
def magnitude_keys(dtype: Any) -> Callable[[Any], tuple[jax.Array]]:
    """What `leaf_maxima` takes to find the largest magnitude, of complex leaves half of it: its bits in this dtype."""

    def key(x: Any) -> tuple[jax.Array]:
        x = widen(x, dtype)
        # Half the modulus: the modulus itself can be beyond the dtype's range where its parts are not.
        return (magnitude_bits(lax.abs(times(x, jnp.asarray(0.5, dtype))) if is_complex(x) else x),)

    return key


def _scale_to_one(mantissas: jax.Array, exponents: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Two factors and a divisor that bring numbers of these mantissas and exponents to 1; ones for a mantissa of 0."""
    first, second = _factors_of_two(jnp.where(mantissas > 0, -exponents, 0), mantissas.dtype)
    return first, second, jnp.where(mantissas > 0, mantissas, 1)


@_measure.defjvp
def _measure_jvp(
    ord: float, scope: Scope, axes: Axes, primals: tuple[Any], tangents: tuple[Any]
) -> tuple[Scaled, Scaled]:
    """d norm = sum of Re(conj(sign(x)) dx) (|x| / norm)**(ord - 1), spread evenly over the largest for ord = inf."""
    (leaves,), (d_leaves,) = primals, tangents
    norm = measure(leaves, ord, scope, axes)
    no_exponent: Any = np.zeros(norm.exponent.shape, jax.dtypes.float0)  # an integer's tangent
    if not leaves:
        return norm, Scaled(jnp.zeros_like(norm.mantissa), no_exponent)
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
            x = times(jnp.sign(x), weight)
        return x.real * dx.real + x.imag * dx.imag if is_complex(x) else x * dx

    pairs = _unknown(list(zip(leaves, d_leaves, strict=True)))
    slopes = jnp.stack(leaf_sums(term, pairs, *scale, axes=axes))
    if ord == math.inf:
        ties = jnp.stack(leaf_sums(is_largest, pairs, *scale, axes=axes))
        ties = jnp.broadcast_to(jnp.sum(ties), ties.shape) if scope == "global" else ties
        slopes = slopes / jnp.maximum(ties, 1)
    slopes = jnp.where(defined, slopes, 0)
    return norm, Scaled(jnp.sum(slopes) if scope == "global" else slopes, no_exponent)


def _accumulation_dtype(leaves: Sequence[Any]) -> Any:
    return jnp.dtype(jnp.float64 if any(accumulator_dtype(x) == jnp.float64 for x in leaves) else jnp.float32)


def _ordered_sum(terms: jax.Array) -> jax.Array:
    """A sum that does not depend on the order of the leaves, to the last bit."""
    return jnp.sum(jnp.sort(terms))


def _shifted(x: jax.Array, exponent: jax.Array) -> Scaled:
    number = split(x)
    return Scaled(number.mantissa, number.exponent + exponent)


# --- scaling ---------------------------------------------------------------------------------------------------


def limit(value: Scalar, like: Scaled) -> Scaled:
    """A threshold to hold norms `like` these to, or one for each of them; below 0 counts as 0."""
    return limit_in(value, like.mantissa.dtype)


def limit_in(value: Scalar, dtype: Any) -> Scaled:
    """The same for norms in a dtype, `accumulator_dtype`."""
    if not isinstance(value, jax.Array):
        return split_number(value, dtype)
    number = split(jnp.maximum(value, 0))
    return Scaled(number.mantissa.astype(dtype), number.exponent)


@partial(jax.jit, inline=True)  # as `measure`
def clip_factor(norm: Scaled, limit: Scaled) -> Factor:
    """What brings a measured norm down to its limit: the decision of every norm clip. Shapes of `norm`."""
    applies = _exceeds(norm, limit)
    one = jnp.ones_like(norm.mantissa)
    # Not only for speed: what comes out of a `cond` is computed once, not again in the kernel of every leaf.
    return run_if(
        jnp.any(applies),
        lambda: _reduced(norm, limit, applies),
        lambda: Factor(jnp.zeros_like(applies), one, one),
    )


def clip_factors(norms: Sequence[Scaled], limits: Sequence[Scaled]) -> list[Factor]:
    """`clip_factor` for the units of each leaf, decided together."""
    if not norms:
        return []
    applies = list(map(_exceeds, norms, limits))

    def untouched(norm: Scaled, applies: jax.Array) -> Factor:
        return Factor(jnp.zeros_like(applies), jnp.ones_like(norm.mantissa), jnp.ones_like(norm.mantissa))

    return run_if(
        jnp.any(jnp.stack([jnp.any(a) for a in applies])),
        lambda: list(map(_reduced, norms, limits, applies)),
        lambda: list(map(untouched, norms, applies)),
    )


def _exceeds(norm: Scaled, limit: Scaled) -> jax.Array:
    defined = jnp.isfinite(norm.mantissa) & ~jnp.isnan(limit.mantissa)
    return (is_greater(norm, limit) | (limit.mantissa == 0) | ~defined) & (limit.mantissa != jnp.inf)


def _reduced(norm: Scaled, limit: Scaled, applies: jax.Array) -> Factor:
    dtype = norm.mantissa.dtype
    defined = jnp.isfinite(norm.mantissa) & ~jnp.isnan(limit.mantissa)
    # 1/2 < ratio < 2, so that ratio * 2**first is normal; the rest of the exponent goes into a second factor, halved so
    # that it is normal, too.
    ratio = limit.mantissa / jnp.where(defined & (norm.mantissa > 0), norm.mantissa, 1)
    _, bias = _float_format(dtype)
    exponent = limit.exponent - norm.exponent
    second = jnp.clip((exponent - (2 - bias)) // 2, 1 - bias, 0)
    first = jnp.clip(exponent - 2 * second, 2 - bias, 0)
    product = ratio * _power_of_two(first, dtype)
    return Factor(applies, jnp.where(defined, product, jnp.nan), _power_of_two(second, dtype))


def scale(x: Any, factor: Factor) -> jax.Array:
    """x times the factor where it applies, else x to the last bit; in x's dtype, multiplied in the factor's."""
    dtype = factor.first.dtype
    product = times(times(times(widen(x, dtype), factor.first), factor.second), factor.second)
    # Not x * 1 where nothing is clipped: that flushes subnormals on some backends.
    select = lax.select if factor.applies.ndim == 0 else jnp.where
    return select(factor.applies, lax.convert_element_type(product, x.dtype), x)


def scale_units(x: Any, factor: Factor, keep: Kept) -> jax.Array:
    """`scale`, with a factor for each unit along the axes in `keep`."""
    return scale(x, Factor(*(over_leaf(part, x, keep) for part in factor)))


def scaled_to(x: Any, norm: Scaled, limit: Scaled, keep: Kept) -> tuple[jax.Array, jax.Array]:
    """x with each unit along the axes in `keep` held to its limit; and for which units that meant to scale them.

    Where nothing is to be scaled, x is handed through, not written again.
    """
    applies = _exceeds(norm, limit)
    scaled = run_if(jnp.any(applies), lambda: scale_units(x, _reduced(norm, limit, applies), keep), lambda: x)
    return scaled, applies


def applied_scale(factor: Factor) -> jax.Array:
    """What gradients were multiplied by, float32: 1 where nothing was clipped."""
    return jnp.where(factor.applies, factor.first * factor.second * factor.second, 1).astype(jnp.float32)


# --- many leaves, many units -----------------------------------------------------------------------------------


def packed(per_leaf: Sequence[Any], kept: Sequence[Kept]) -> list[Any]:
    """The same trees of arrays, but one tree of vectors for all leaves that are one unit: their arithmetic once.

    Leaves of several units stay apart: their arrays may be sharded.
    """
    single = [x for x, keep in zip(per_leaf, kept, strict=True) if not keep]
    together = [jax.tree.map(lambda *xs: jnp.stack(xs), *single)] if single else []
    return [*together, *(x for x, keep in zip(per_leaf, kept, strict=True) if keep)]


def unpacked(packs: Sequence[Any], kept: Sequence[Kept]) -> list[Any]:
    """The trees leaf by leaf again."""
    count = sum(not keep for keep in kept)
    single = iter([jax.tree.map(lambda x, i=i: x[i], packs[0]) for i in range(count)])
    several = iter(packs[1:] if count else packs)
    return [next(several if keep else single) for keep in kept]


def packed_axes(axes: Sequence[UnitAxes], kept: Sequence[Kept]) -> list[Axes]:
    """Over which mapped axes there are more units, of each of what is `packed`."""
    single = [of_leaf.others for of_leaf, keep in zip(axes, kept, strict=True) if not keep]
    return [*single[:1], *(of_leaf.others for of_leaf, keep in zip(axes, kept, strict=True) if keep)]


def over_leaf(of_units: jax.Array, leaf: Any, keep: Kept) -> jax.Array:
    """A number for each unit, to be broadcast over the leaf's elements."""
    return of_units if not keep else lax.expand_dims(of_units, [a for a in range(leaf.ndim) if a not in keep])


# --- dtypes ----------------------------------------------------------------------------------------------------


def is_complex(x: Any) -> bool:
    return x.dtype.kind == "c"


def real_dtype(x: Any) -> Any:
    return jnp.finfo(x.dtype).dtype


def accumulator_dtype(x: Any) -> Any:
    """The real dtype to sum x's elements, or their parts, in: float32, or float64 if x has that."""
    return jnp.dtype(jnp.float64 if real_dtype(x) == jnp.float64 else jnp.float32)


def widen(x: Any, dtype: Any) -> jax.Array:
    """x in a real dtype, or in the complex one of its precision if x is complex."""
    return lax.convert_element_type(x, wide_dtype(x, dtype))


def wide_dtype(x: Any, dtype: Any) -> Any:
    """What `widen` makes of x."""
    return jnp.dtype(f"complex{2 * jnp.finfo(dtype).bits}" if is_complex(x) else dtype)


def times(x: jax.Array, factor: jax.Array) -> jax.Array:
    """x times a real factor; componentwise, as a complex product would turn inf + 0i into NaN."""
    return lax.complex(x.real * factor, x.imag * factor) if is_complex(x) else x * factor


def _unknown(x: Any) -> Any:
    """x, as a value of which XLA knows nothing: for what is scaled and then multiplied again.

    XLA regroups products with constants. A frozen parameter's gradient is a zero that it knows, and of
    `(0 * c) * (0 * c)` it makes `0 * (c * c)`: 0 * inf for c = 2**88 in float32. This holds on CPU
    (`tests/test_train_steps.py`) and CUDA (`tests/test_accelerators.py`), where `lax.reduce_precision` does not help.
    """
    return jax.tree.map(lax.optimization_barrier, x)  # one by one, or all would vary over the same mapped axes


def _rescaled(x: Any, dtype: Any, *factors: jax.Array) -> jax.Array:
    """x in a real dtype (`widen`), times each real factor in turn."""
    x = widen(x, dtype)
    for factor in factors:
        x = times(x, factor)
    return x


def _squared_modulus(x: jax.Array) -> jax.Array:
    return lax.mul(x.real, x.real) + lax.mul(x.imag, x.imag) if is_complex(x) else lax.mul(x, x)
