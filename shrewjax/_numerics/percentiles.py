"""Exact percentiles of magnitudes by counting keys at or below pivots, without a sort.

**Ranks.** Percentile p of n sorted elements has the virtual index p (n - 1) / 100, counted from 0. float32 would round
it. So the product is divided in 64-bit integers, with a remainder. They need `jax.enable_x64`, which `select` sets for
its own operations alone.

A known percentile is exactly the fraction that its decimal digits denote, up to 15 decimals. Beyond that, it is the
nearest fraction with a denominator of at most 2**57, which moves the rank by less than 1e-17 of n. A traced percentile
is rounded to a multiple of 2**-24, which moves the rank by less than 1e-9 of n.

**Keys.** The bits of abs(x), read as an integer, are the *key* of x: keys order as the magnitudes do (`floats`). A read
counts the keys at or below some pivots (`counts`), or finds the keys next to a bracket (`neighbours`). In `shard_map`
it needs one collective for each set of mapped axes.

Keys and pivots of a search are those of the narrowest dtype that holds every leaf's magnitudes. They are compared as
integers of at least 32 bits, because those of 16 bits take longer (XLA-26).

**The search** for the key at a rank:

* **Invariant.** The state has two keys, the *bracket*, and the number of elements at or below each: up_to_low <= rank <
  up_to_high.
* **A read** has eleven pivots inside the bracket. The next bracket is the pair of pivots around the rank.
* **The model** is the straight line through both ends. It predicts the key at the rank. The next pivots are at
  multiples of its uncertainty around that prediction.
* **The fallback** spaces pivots evenly. It is used if the bracket is wider than a factor of four, or if the last read
  left more than half of it. A bracket of up to twelve keys gets a pivot at each.
* **Stop** if the bracket is a single key, or if the rank is its last element, or the first of two. One more read then
  finds the keys next to the bracket, unless all that is needed is known: see the table in `_enclosed`.

An even read leaves a twelfth of a bracket, and a read that leaves more than half is followed by an even one. So a
search takes at most 27 reads of float32 leaves (float64: 56; bfloat16: 11; float16: 10), the last one included. Pivots
decide the number of reads, never the result. The tests are `test_hostile_data_takes_a_bounded_number_of_reads` and
`test_a_search_takes_few_reads_and_fewer_from_a_start_near_the_result`.

Results are compared and returned as bits, because CPU and TPU flush subnormal numbers (XLA-18).
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import partial, reduce
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax._base.axes import as_varying, axes_to_reduce, varying_axes
from shrewjax._base.branches import run_if
from shrewjax._base.mesh import placed_like
from shrewjax._base.types import Axes, DType, Leaf
from shrewjax._numerics import floats
from shrewjax._numerics.reductions import (
    Group,
    count_dtype,
    grouped,
    leaf_counts,
    leaf_maxima,
    sizes,
)
from shrewjax._numerics.vectors import scalars

Over = Literal["all", "nonzero"]
Scope = Literal["global", "leaf"]
Method = Literal["linear", "lower"]


class OrderStatistic(NamedTuple):
    """The sorted element at a rank, or the point a fraction of the way to the next one."""

    rank: jax.Array  # in the dtype of the count
    fraction: jax.Array  # a float, within 2 ulp; 0 only if the remainder is 0


def order_statistic(
    percentile: Fraction | jax.Array, count: jax.Array, method: Method, dtype: DType
) -> OrderStatistic:
    """Returns a percentile of `count` elements, an array of uint32 or uint64. Its fraction has this dtype."""
    if isinstance(percentile, Fraction):
        ratio = (percentile / 100).limit_denominator(2**57)
        numerator, divisor = jnp.asarray(ratio.numerator, jnp.uint64), ratio.denominator
    else:
        numerator = jnp.round(jnp.clip(percentile, 0, 100) * 2.0**24).astype(jnp.uint64)
        divisor = 100 * 2**24
    last = jnp.where(count == 0, count, count - 1)
    # The long division of numerator * last. It takes as many bits of `last` at a time as fit without overflow: the
    # remainder is below the divisor, the numerator at most equal to it, so both terms are at most 2**63.
    bits = 63 - divisor.bit_length()
    whole = remainder = jnp.zeros(count.shape, jnp.uint64)
    for position in reversed(range(0, jnp.iinfo(count.dtype).bits, bits)):
        digit = last.astype(jnp.uint64) >> position & (2**bits - 1)
        dividend = (remainder << bits) + numerator * digit
        whole, remainder = (whole << bits) + dividend // divisor, dividend % divisor
    whole = whole.astype(count.dtype)
    if method == "lower":
        return OrderStatistic(whole, jnp.zeros(count.shape, dtype))
    return OrderStatistic(whole, remainder.astype(dtype) / divisor)


class Keys(NamedTuple):
    """The keys of all leaves, as a search reads them. Pivots and results are of one row for all leaves or one each."""

    groups: Sequence[Group]
    axes: list[Axes]  # of each group
    dtype: DType
    scope: Scope

    def counts(self, pivots: jax.Array, integers: DType) -> jax.Array:
        """Returns how many keys are at or below each pivot, over all devices, as `integers` that hold the largest."""
        flags, by_group = partial(_at_or_below, self.dtype), self._by_group(pivots)
        each = leaf_counts(flags, self.groups, by_group, dtype=integers, axes=self.axes)
        of_groups = jnp.stack(each)
        total = jnp.sum(of_groups, axis=0, keepdims=True, dtype=integers)
        return of_groups if self.scope == "leaf" else total

    def neighbours(self, below: jax.Array, above: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the largest key at or below `below` and the smallest above `above`; 0 and infinity without one."""
        by_group = self._by_group(jnp.stack([below, above], axis=-1))
        beside = partial(_beside, self.dtype)
        found = jnp.stack(leaf_maxima(beside, self.groups, by_group, axes=self.axes))
        found = found if self.scope == "leaf" else jnp.max(found, axis=0, keepdims=True)
        return found[:, 0], floats.infinity_bits(self.dtype) - found[:, 1]

    def _by_group(self, keys: jax.Array) -> list[jax.Array]:
        return scalars(keys) if self.scope == "leaf" else [keys[0]] * len(self.groups)


def common_dtype(leaves: Sequence[Leaf]) -> DType:
    """Returns the narrowest dtype that holds the magnitudes of all leaves."""
    dtypes = {floats.real_dtype(x) for x in leaves}
    return dtypes.pop() if len(dtypes) == 1 else floats.sum_dtype(*leaves)


def key_dtype(dtype: DType) -> DType:
    # XLA-26: not int16 for 16-bit leaves.
    return jnp.dtype(jnp.int64 if dtype == jnp.float64 else jnp.int32)


def _keys_of(x: Leaf, dtype: DType) -> jax.Array:
    """Returns the keys of a leaf, in the search's dtype. A complex element has that of its modulus."""
    bits = floats.magnitude_bits(lax.abs(x) if floats.is_complex(x) else x)
    return floats.wider_bits(bits, floats.real_dtype(x), dtype).astype(key_dtype(dtype))


def _at_or_below(dtype: DType, group: Group, pivots: jax.Array) -> list[jax.Array]:
    """Returns, for each pivot and each place of the group, the number of its keys at or below the pivot."""
    keys = [_keys_of(x, dtype) for x in group]
    integers = count_dtype([group[0].size])
    flags = ([(k <= p).astype(integers) for k in keys] for p in pivots)
    return [reduce(lax.add, of_pivot) for of_pivot in flags]


def _beside(dtype: DType, group: Group, below_and_above: jax.Array) -> list[jax.Array]:
    """Returns two arrays, whose maxima are the largest key up to `below`, and infinity minus the next after `above`."""
    keys = [_keys_of(x, dtype) for x in group]
    below, above = below_and_above
    infinity = floats.infinity_bits(dtype)
    up_to = [jnp.where(k <= below, k, 0) for k in keys]
    beyond = [jnp.where(k > above, infinity - k, 0) for k in keys]
    return [reduce(lax.max, up_to), reduce(lax.max, beyond)]


class Rule(NamedTuple):
    """Which percentile of which elements. All but a traced percentile decides which program is compiled."""

    percentile: Any  # a Fraction if it is known, otherwise an array
    method: Method
    scope: Scope
    over: Over
    axes: Any  # the users' `sharded_over`, and in `select` the axes of each leaf


class Selected(NamedTuple):
    """A percentile of |g| for all leaves together (shape ()) or for each leaf (shape (leaves,))."""

    bound: jax.Array  # the percentile, float32 or float64 (if a leaf is); 0 without elements, NaN if an element is NaN
    bits: jax.Array  # its bits, which no backend flushes; undefined if an element is NaN
    above: jax.Array  # float32: number of larger elements; NaN if an element is NaN
    elements: jax.Array  # float32: number of elements
    reads: jax.Array  # int32 (): number of reads of the data


def select(leaves: Sequence[Leaf], rule: Rule, start: jax.Array | None = None) -> Selected:
    """Returns the percentile of |x| over the elements of all leaves together or of each leaf.

    The search begins at `start`, of the result's shape, if that is positive and finite. A start near the result saves
    reads. The derivative is 0.
    """
    traced = None if isinstance(rule.percentile, Fraction) else rule.percentile
    static = rule if traced is None else rule._replace(percentile=None)
    # 64 bits are for ranks, and for counts beyond 2**32. Everything else has a dtype of its own.
    with jax.enable_x64(True):
        return _selected(leaves, static, traced, start)


# XLA-21: else each call outside jit compiles its loop
@partial(jax.jit, static_argnums=1, inline=True)
def _selected(
    leaves: Sequence[Leaf], rule: Rule, traced: jax.Array | None, start: jax.Array | None
) -> Selected:
    """Returns the percentile, in four steps. It is `traced` if the rule has none.

    1. Count the elements, and group the leaves that are read together.
    2. Search for the key at the rank. If zeros are left out, the first read counts them and moves the rank.
    3. Find the keys at the rank and at the next one. The bound is between them.
    4. Count the elements above the bound. A NaN among the elements, or as the percentile, makes both NaN.
    """
    # 1. Elements and groups.
    of_leaf = rule.scope == "leaf"
    if not leaves:
        nothing = jnp.zeros((0,) if of_leaf else (), jnp.float32)
        none = nothing.astype(jnp.int32)
        return Selected(nothing, none, nothing, nothing, jnp.zeros((), jnp.int32))
    leaves = [lax.stop_gradient(x) for x in leaves]
    # Leaves of 8 bits as bfloat16, which is exact.
    leaves = [x.astype(jnp.bfloat16) if jnp.finfo(x.dtype).bits < 16 else x for x in leaves]
    dtype, result_dtype = common_dtype(leaves), floats.sum_dtype(*leaves)
    axes: list[Axes] = [*axes_to_reduce(leaves, rule.axes)]
    counts = sizes(leaves, axes=axes)
    each = zip(leaves, axes, strict=True)
    groups: list[tuple[Group, Axes]] = [((x,), over) for x, over in each]
    if not of_leaf:
        counts, groups = [sum(counts)], grouped(leaves, axes)
    data = Keys([x for x, _ in groups], [over for _, over in groups], dtype, rule.scope)
    count = placed_like(jnp.asarray(counts, count_dtype(counts)), leaves)

    # 2. The search.
    percentile = rule.percentile if traced is None else traced

    def wanted_beyond(zeros: jax.Array) -> OrderStatistic:
        """Returns what to search for if this many zeros are left out."""
        others = order_statistic(percentile, count - zeros, rule.method, result_dtype)
        # If all are zero, the percentile is the first of the zeros.
        return others._replace(rank=jnp.where(zeros < count, others.rank + zeros, 0))

    def read(s: _Search) -> _Search:
        # XLA-12: this branch is always taken. It stops XLA from hoisting the keys out of the loop, which would
        # materialize a copy of the data.
        count_keys = partial(data.counts, s.pivots, count.dtype)
        counted = run_if(s.reads >= 0, count_keys, lambda: s.pivots.astype(count.dtype))
        if rule.over == "nonzero":
            # The first pivot of the first read is 0.
            of_rest = partial(wanted_beyond, counted[:, 0])
            s = s._replace(wanted=run_if(s.reads == 0, of_rest, lambda: s.wanted))
        return _narrowed(s, counted, count, dtype)

    started = _started(count, wanted_beyond(jnp.zeros_like(count)), start, dtype)
    started = placed_like(started, leaves)
    if rule.axes == ():  # the search of each device takes its own turns
        varying = tuple({a for x in leaves for a in varying_axes(x)})
        started = jax.tree.map(lambda x: as_varying(x, varying), started)
    search = lax.while_loop(lambda s: jnp.any(~s.done), read, started)

    # 3. The bound.
    lower, upper, up_to_lower, reads = _enclosed(search, data)
    bits = _interpolated(lower, upper, search.wanted.fraction, dtype, result_dtype)
    bits = jnp.where(count == 0, 0, bits)
    bound = lax.bitcast_convert_type(bits, result_dtype)

    # 4. The elements above it.
    is_infinite = bits >= floats.infinity_bits(result_dtype)
    above = jnp.where(is_infinite, 0, count - up_to_lower).astype(jnp.float32)
    undefined = search.has_nan
    if traced is not None:
        undefined = undefined | jnp.isnan(traced)
    bound, above = (jnp.where(undefined, jnp.nan, x) for x in (bound, above))
    elements = count.astype(jnp.float32)
    if not of_leaf:
        bound, bits, above, elements = (x[0] for x in (bound, bits, above, elements))
    return Selected(bound, bits, above, elements, reads)


# The first pivots without a start: exponents of two between which gradients usually are.
_FIRST_EXPONENTS = (-27, -21, -15, -11, -8, -4, 0, 3, 6)


# The first pivots around a start, in powers of two. The key just below the start is one, too, so that one or two
# reads suffice if the result has not changed.
_FIRST_DISTANCES = (-0.135, -0.08, -0.04, 0.0, 0.04, 0.06, 0.09, 0.135)


# Later pivots, around the model's prediction, in units of its uncertainty. That is this many standard deviations: the
# inner pivots are 0.15 of them away, the outer ones 4.8. It is at least this part of the bracket, because the elements
# of a large bracket are not spread evenly.
_DISTANCES = (-16.0, -8.0, -4.0, -2.0, -0.5, 0.0, 0.5, 2.0, 4.0, 8.0, 16.0)
_DEVIATIONS = 0.3
_LEAST_UNCERTAINTY = 0.002


_PIVOTS = len(_DISTANCES)


# The first read adds zero and infinity.
assert len(_FIRST_EXPONENTS) == len(_FIRST_DISTANCES) + 1 == _PIVOTS - 2


class _Search(NamedTuple):
    """A search for each row: one of all leaves, or one of each."""

    low: jax.Array  # (rows,): the bracket is (low, high]
    high: jax.Array
    up_to_low: jax.Array  # (rows,): number of elements at or below it, uint32 or uint64
    up_to_high: jax.Array
    pivots: jax.Array  # (rows, pivots): where the next read counts, ascending
    wanted: OrderStatistic
    has_nan: jax.Array  # bool (rows,): known after the first read
    done: jax.Array  # bool (rows,)
    reads: jax.Array  # int32 ()


def _started(
    count: jax.Array, wanted: OrderStatistic, start: jax.Array | None, dtype: DType
) -> _Search:
    """Returns the search before its first read, whose first pivot is zero and whose last is infinity."""
    rows, integers, infinity = len(count), key_dtype(dtype), floats.infinity_bits(dtype)
    usual = np.asarray([0, *(2.0**e for e in _FIRST_EXPONENTS), np.inf]).astype(dtype)
    keys = usual.view(floats.integers_like(dtype)).astype(integers)
    pivots = placed_like(jnp.tile(jnp.asarray(keys)[None], (rows, 1)), count)
    if start is not None:
        start = jnp.broadcast_to(start.astype(dtype), (rows,))
        usable = (start > 0) & (start < jnp.inf)
        steps = np.asarray(_FIRST_DISTANCES) * 2.0 ** jnp.finfo(dtype).nmant
        offsets = np.asarray([0, *np.sort([*steps.astype(integers), -1]), 0], integers)
        around = floats.magnitude_bits(start).astype(integers)[:, None] + offsets[None]
        inner = [1] * (_PIVOTS - 2)
        lowest = np.asarray([0, *inner, infinity], integers)
        highest = np.asarray([0, *(infinity - n for n in inner), infinity], integers)
        pivots = jnp.where(usable[:, None], jnp.clip(around, lowest[None], highest[None]), pivots)
    return _Search(
        low=jnp.full((rows,), -1, integers),
        high=jnp.full((rows,), infinity, integers),
        up_to_low=jnp.zeros_like(count),
        up_to_high=count,
        pivots=pivots,
        wanted=wanted,
        has_nan=jnp.zeros((rows,), bool),
        done=count == 0,
        reads=jnp.zeros((), jnp.int32),
    )


def _narrowed(s: _Search, counted: jax.Array, count: jax.Array, dtype: DType) -> _Search:
    """Returns the search after a read that `counted` the elements at or below its pivots.

    1. The bracket ends at the last pivot up to which all elements are before the rank, and at the next pivot.
    2. The search is done if the bracket has a single key; or if the rank is its last element, or the first of two,
       which `_enclosed` reads off.
    """
    # 1
    rank = s.wanted.rank
    is_before = counted <= rank[:, None]
    low = jnp.max(jnp.where(is_before, s.pivots, s.low[:, None]), axis=-1)
    high = jnp.min(jnp.where(is_before, s.high[:, None], s.pivots), axis=-1)
    up_to_low = jnp.max(jnp.where(is_before, counted, s.up_to_low[:, None]), axis=-1)
    up_to_high = jnp.min(jnp.where(is_before, s.up_to_high[:, None], counted), axis=-1)

    # 2
    has_nan = jnp.where(s.reads == 0, counted[:, -1] < count, s.has_nan)
    inside, left = up_to_high - up_to_low, up_to_high - rank
    done = (high - low == 1) | (left == 1) | ((inside == 2) & (left == 2))
    return _Search(
        low=low,
        high=high,
        up_to_low=up_to_low,
        up_to_high=up_to_high,
        pivots=_next_pivots(low, high, inside, left, s.high - s.low, dtype),
        wanted=s.wanted,
        has_nan=has_nan,
        done=done | has_nan | s.done,
        reads=s.reads + 1,
    )


def _next_pivots(
    low: jax.Array,
    high: jax.Array,
    inside: jax.Array,
    left: jax.Array,
    width_before: jax.Array,
    dtype: DType,
) -> jax.Array:
    """Returns pivots inside the bracket: around the key that the model predicts, or evenly spaced.

    `inside` is the number of elements in the bracket, and `left` that of those at the rank or beyond it.
    """
    low, high = low[:, None], high[:, None]
    width, parts = high - low, _PIVOTS + 1
    place = np.arange(1, parts, dtype=low.dtype)[None]

    aimed = _predicted_places(inside, left) * width.astype(jnp.float32)
    aimed = low + jnp.round(aimed).astype(low.dtype)
    # Strictly inside the bracket.
    aimed = jnp.clip(aimed, low + place, high - place[:, ::-1])
    # This is low + width * place // parts, in two terms because that product may overflow. A bracket of few keys gets a
    # pivot at each.
    even = low + (width // parts) * place + (width % parts) * place // parts

    # The model cannot be trusted if the bracket is wide or the last read left more than half of it.
    is_wide = width > 2 << jnp.finfo(dtype).nmant
    is_unknown = is_wide | (width > width_before[:, None] // 2)
    return jnp.where(is_unknown | (width <= parts), even, aimed)


def _predicted_places(inside: jax.Array, left: jax.Array) -> jax.Array:
    """Returns where the model puts the pivots, as fractions of the bracket. Shape (..., pivots)."""
    inside = inside.astype(jnp.float32)[:, None]
    left = left.astype(jnp.float32)[:, None]
    estimate = 1 - (left - 0.5) / inside
    # The standard deviation of the key at the rank, if the elements fall anywhere in the bracket.
    deviation = jnp.sqrt(jnp.maximum(estimate * (1 - estimate), 1 / inside) / inside)
    uncertainty = jnp.maximum(_DEVIATIONS * deviation, _LEAST_UNCERTAINTY)
    distances = np.asarray([_DISTANCES], np.float32) * uncertainty
    return jnp.clip(estimate + distances, 0, 1)


def _enclosed(search: _Search, data: Keys) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the keys at the rank and at the next one, the number of elements up to the former, and all reads."""
    # The bracket (low, high] at the end of the search    lower       upper
    # a single key, and the rank not its last element    high        high         no further read
    # a single key, and the rank its last element        high        above_high
    # the rank the last of several elements              at_high     above_high
    # the rank the first of two                          above_low   at_high
    is_last = search.up_to_high - search.wanted.rank == 1
    is_single_key = search.high - search.low == 1
    # One leaf among others may be empty, with the scope "leaf". It needs no further read of all.
    is_empty = search.up_to_high == 0
    is_known = (is_single_key & ~is_last) | search.has_nan | is_empty

    def read() -> tuple[jax.Array, jax.Array]:
        return data.neighbours(search.high, jnp.where(is_last, search.high, search.low))

    needed = ~jnp.all(is_known)
    # `at_high`: the largest key at or below high, which is high itself in a bracket of a single key. `above`: the
    # smallest key above high if the rank is the bracket's last, otherwise the smallest above low.
    at_high, above = run_if(needed, read, lambda: (search.high, search.high))
    lower = jnp.where(is_single_key | is_last, at_high, above)
    upper = jnp.where(is_last, above, at_high)
    # If both keys are equal, both elements are at or below lower, and `clipped_fraction` would count one too many.
    is_first_of_two = ~is_single_key & ~is_last & (lower < upper)
    up_to_lower = search.up_to_high - is_first_of_two.astype(search.up_to_high.dtype)
    return lower, upper, up_to_lower, search.reads + needed.astype(jnp.int32)


def _interpolated(
    lower: jax.Array, upper: jax.Array, fraction: jax.Array, dtype: DType, result_dtype: DType
) -> jax.Array:
    """Returns the bits of lower + fraction (upper - lower), within 4 ulp, and those of `lower` if the fraction is 0.

    The result is below `upper`, unless that is infinite.
    """
    lower, upper = (floats.wider_bits(k, dtype, result_dtype) for k in (lower, upper))

    def number_of(bits: jax.Array) -> floats.ExtendedFloat:
        return floats.to_extended(lax.bitcast_convert_type(bits, result_dtype))

    low, high = number_of(lower), number_of(upper)
    # Both ends are scaled by the power of two of the upper one, so that nothing is flushed or overflows.
    start = floats.times_power_of_two(low.mantissa, low.exponent - high.exponent)
    number = floats.to_extended(start + fraction * (high.mantissa - start))
    bits = floats.bits_of(number._replace(exponent=number.exponent + high.exponent))
    is_lower = (fraction == 0) | (lower >= upper)
    infinity = floats.infinity_bits(result_dtype)
    between = jnp.where(upper >= infinity, infinity, jnp.clip(bits, lower, upper - 1))
    return jnp.where(is_lower, lower, between)
