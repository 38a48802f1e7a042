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

* **Invariant.** The state has two keys, the *bracket*, and the number of elements at or below each: counts[0] <= rank <
  counts[1].
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

import dataclasses
from collections.abc import Callable, Sequence
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
        counts = leaf_counts(flags, self.groups, by_group, dtype=integers, axes=self.axes)
        of_groups = jnp.stack(counts)
        if self.scope == "leaf":
            return of_groups
        return jnp.sum(of_groups, axis=0, keepdims=True, dtype=integers)

    def neighbours(self, below: jax.Array, above: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the largest key at or below `below` and the smallest above `above`; 0 and infinity without one."""
        by_group = self._by_group(jnp.stack([below, above], axis=-1))
        beside = partial(_beside, self.dtype)
        found = jnp.stack(leaf_maxima(beside, self.groups, by_group, axes=self.axes))
        (end_below, end_above), (near_below, near_above) = jnp.stack(by_group).T, found.T
        most = np.asarray(np.iinfo(found.dtype).max, found.dtype)
        largest_below = jnp.where(near_below <= 0, 0, end_below - (most - near_below))
        infinity = floats.infinity_bits(self.dtype)
        smallest_above = jnp.where(near_above <= 0, infinity, end_above + 1 + (most - near_above))
        if self.scope == "global":
            return jnp.max(largest_below)[None], jnp.min(smallest_above)[None]
        return largest_below, smallest_above

    def _by_group(self, keys: jax.Array) -> list[jax.Array]:
        return scalars(keys) if self.scope == "leaf" else [keys[0]] * len(self.groups)


def at_least_16_bits(x: Leaf) -> jax.Array:
    """Returns a leaf of 8 bits as bfloat16, which is exact, and any other as it is."""
    return x.astype(jnp.bfloat16) if jnp.finfo(x.dtype).bits < 16 else x


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
    flags = ([(k <= p).astype(jnp.uint32) for k in keys] for p in pivots)
    return [reduce(lax.add, of_pivot) for of_pivot in flags]


def _beside(dtype: DType, group: Group, below_and_above: jax.Array) -> list[jax.Array]:
    """Returns two arrays whose maxima give the neighbours: the closer a key, the larger; negative on the wrong side."""
    keys = [_keys_of(x, dtype) for x in group]
    below, above = below_and_above
    # A key on the wrong side makes the sum exceed the largest integer and wrap around to a negative one. So no key has
    # to be compared.
    largest = jnp.asarray(jnp.iinfo(below.dtype).max, below.dtype)
    up_to = [k + (largest - below) for k in keys]
    beyond = [(above + 1 + largest) - k for k in keys]
    return [reduce(lax.max, up_to), reduce(lax.max, beyond)]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["traced"],
    meta_fields=["known", "method", "scope", "over", "axes"],
)
@dataclasses.dataclass(frozen=True)
class Rule:
    """Which percentile of which elements. All but a traced percentile decides which program is compiled."""

    known: Fraction | None
    traced: jax.Array | None  # if the percentile is not known
    method: Method
    scope: Scope
    over: Over
    axes: Any  # the users' `sharded_over`, and in `select` the axes of each leaf

    @property
    def percentile(self) -> Fraction | jax.Array:
        given = self.traced if self.known is None else self.known
        assert given is not None
        return given


class Selected(NamedTuple):
    """A percentile of |g| for all leaves together (shape ()) or for each leaf (shape (leaves,))."""

    bound: jax.Array  # the percentile, float32 or float64 (if a leaf is); 0 without elements, NaN if an element is NaN
    bits: jax.Array  # its bits, which no backend flushes; undefined if an element is NaN
    above: jax.Array  # float32: number of larger elements; NaN if an element is NaN
    elements: jax.Array  # float32: number of elements
    reads: jax.Array  # int32 (): number of reads of the data


@partial(jax.jit, inline=True)  # XLA-21: else each call outside jit compiles its loop
def select(leaves: Sequence[Leaf], rule: Rule, start: jax.Array | None = None) -> Selected:
    """Returns the percentile of |x| over the elements of all leaves together or of each leaf.

    The search begins at `start`, of the result's shape, if that is positive and finite. A start near the result saves
    reads. The derivative is 0.
    """
    # 64 bits are for ranks, and for counts beyond 2**32. Everything else has a dtype of its own.
    with jax.enable_x64(True):
        return _selected(leaves, rule, start)


def _selected(leaves: Sequence[Leaf], rule: Rule, start: jax.Array | None) -> Selected:
    """Returns the percentile, in four steps.

    1. Count the elements, and group the leaves that are read together.
    2. Search for the key at the rank. If zeros are left out, the first read counts them and moves the rank.
    3. Find the keys at the rank and at the next one. The bound is between them.
    4. Count the elements above the bound. A NaN among the elements, or as the percentile, makes both NaN.
    """
    # 1. Elements and groups.
    of_leaf = rule.scope == "leaf"
    leaves = [lax.stop_gradient(at_least_16_bits(x)) for x in leaves]
    dtype, result_dtype = common_dtype(leaves), floats.sum_dtype(*leaves)
    axes: list[Axes] = [*axes_to_reduce(leaves, rule.axes)]
    counts = sizes(leaves, axes=axes)
    counts = counts if of_leaf else [sum(counts)]
    with_axes = [((x,), over) for x, over in zip(leaves, axes, strict=True)]
    groups = with_axes if of_leaf else grouped(leaves, axes)
    if not groups:
        nothing = jnp.zeros((0,) if of_leaf else (), result_dtype)
        bits, none = floats.magnitude_bits(nothing), nothing.astype(jnp.float32)
        return Selected(nothing, bits, none, none, jnp.zeros((), jnp.int32))
    data = Keys([x for x, _ in groups], [over for _, over in groups], dtype, rule.scope)
    count = placed_like(jnp.asarray(counts, count_dtype(counts)), leaves)

    # 2. The search.
    def wanted_of(considered: jax.Array) -> OrderStatistic:
        return order_statistic(rule.percentile, considered, rule.method, result_dtype)

    def wanted_beyond(zeros: jax.Array) -> OrderStatistic:
        of_nonzero = wanted_of(count - zeros)
        # If all are zero, the percentile is the first of the zeros.
        rank = jnp.where(zeros >= count, 0, of_nonzero.rank + zeros)
        return of_nonzero._replace(rank=rank)

    beyond_zeros = wanted_beyond if rule.over == "nonzero" else None

    def read(s: _Search) -> _Search:
        # XLA-12: this branch is always taken. It stops XLA from hoisting the keys out of the loop, which would
        # materialize a copy of the data.
        counted = run_if(
            s.reads >= 0,
            lambda: data.counts(s.pivots, count.dtype),
            lambda: s.pivots.astype(count.dtype),
        )
        return _narrowed(s, counted, count, beyond_zeros, dtype)

    started = _started(count, wanted_of(count), start, dtype)
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
    up_to_bound = jnp.where(is_infinite, count, up_to_lower)
    above, elements = (x.astype(jnp.float32) for x in (count - up_to_bound, count))
    undefined = search.has_nan
    if rule.traced is not None:
        undefined = undefined | jnp.isnan(rule.traced)
    bound, above = (jnp.where(undefined, jnp.nan, x) for x in (bound, above))
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
    keys: jax.Array  # (..., 2): the bracket
    counts: jax.Array  # (..., 2): number of elements at or below each, uint32 or uint64
    pivots: jax.Array  # (..., pivots): where the next read counts, ascending
    wanted: OrderStatistic
    has_nan: jax.Array  # bool: known after the first read
    done: jax.Array  # bool
    reads: jax.Array  # int32 ()


def _started(
    count: jax.Array, wanted: OrderStatistic, start: jax.Array | None, dtype: DType
) -> _Search:
    groups = len(count)
    integers, infinity = key_dtype(dtype), floats.infinity_bits(dtype)
    usual = jnp.asarray(np.asarray([2.0**e for e in _FIRST_EXPONENTS]).astype(dtype))
    inner = jnp.tile(floats.magnitude_bits(usual[None]).astype(integers), (groups, 1))
    ends = [jnp.full((groups, 1), end, integers) for end in (0, infinity)]
    inner, ends = placed_like((inner, ends), count)
    if start is not None:
        start = jnp.broadcast_to(start.astype(dtype), (groups,))
        around = floats.magnitude_bits(start).astype(integers)[:, None]
        steps = np.asarray(_FIRST_DISTANCES) * 2.0 ** jnp.finfo(dtype).nmant
        offsets = np.sort([*steps.astype(integers), -1])[None].astype(integers)
        usable = (start > 0) & (start < jnp.inf)
        inner = jnp.where(usable[:, None], jnp.clip(around + offsets, 1, infinity - 1), inner)
    return _Search(
        keys=jnp.tile(jnp.asarray([[-1, infinity]], integers), (groups, 1)),
        counts=count[:, None] * np.asarray([[0, 1]], count.dtype),
        pivots=jnp.concatenate([ends[0], inner, ends[1]], axis=-1),
        wanted=wanted,
        has_nan=jnp.zeros((groups,), bool),
        done=count == 0,
        reads=jnp.zeros((), jnp.int32),
    )


def _narrowed(
    s: _Search,
    counted: jax.Array,
    count: jax.Array,
    wanted_beyond: Callable[[jax.Array], OrderStatistic] | None,
    dtype: DType,
) -> _Search:
    """Returns the search after a read that `counted` the elements at or below its pivots.

    The first pivot of the first read counts the zeros. If zeros are left out, `wanted_beyond` takes their number, and
    returns the order statistic to search for.
    """
    is_first = s.reads == 0
    wanted = s.wanted
    if wanted_beyond is not None:
        wanted = run_if(is_first, lambda: wanted_beyond(counted[:, 0]), lambda: s.wanted)
    has_nan = jnp.where(is_first, counted[:, -1] < count, s.has_nan)
    rank = wanted.rank

    keys = jnp.concatenate([s.keys[:, :1], s.pivots, s.keys[:, 1:]], axis=-1)
    counts = jnp.concatenate([s.counts[:, :1], counted, s.counts[:, 1:]], axis=-1)
    below = jnp.sum(counts[:, :-1] <= rank[:, None], axis=-1, dtype=jnp.int32)
    places = below[:, None] + np.asarray([[-1, 0]], np.int32)
    keys, counts = _at(places, keys), _at(places, counts)

    width_before, width = s.keys[:, 1] - s.keys[:, 0], keys[:, 1] - keys[:, 0]
    inside, left = counts[:, 1] - counts[:, 0], counts[:, 1] - rank
    # A single key; or the rank is the last in the bracket, or the first of two, which `_enclosed` reads off.
    done = (width == 1) | (left == 1) | ((inside == 2) & (left == 2))
    return _Search(
        keys=keys,
        counts=counts,
        pivots=_next_pivots(keys, inside, left, width_before, dtype),
        wanted=wanted,
        has_nan=has_nan,
        done=done | has_nan | s.done,
        reads=s.reads + 1,
    )


def _at(places: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the elements at these places of each row.

    It is no gather, which JAX refuses if `jax.vmap` maps a sharded axis of an Explicit mesh
    (tests/devices/test_models_on_devices.py).
    """
    all_places = np.arange(rows.shape[-1], dtype=np.int32)
    is_there = places[:, :, None] == all_places[None, None]
    return jnp.sum(jnp.where(is_there, rows[:, None], 0), axis=-1, dtype=rows.dtype)


def _next_pivots(
    keys: jax.Array, inside: jax.Array, left: jax.Array, width_before: jax.Array, dtype: DType
) -> jax.Array:
    """Returns pivots inside the bracket: around the key that the model predicts, evenly spaced, or at each key.

    `inside` is the number of elements in the bracket, and `left` that of those at the rank or beyond it.
    """
    low, high = keys[:, :1], keys[:, 1:]
    width = high - low
    parts = _PIVOTS + 1
    place = np.arange(1, parts, dtype=keys.dtype)[None]

    aimed = _predicted_places(inside, left) * width.astype(jnp.float32)
    aimed = low + jnp.round(aimed).astype(keys.dtype)
    # Strictly inside the bracket.
    aimed = jnp.clip(aimed, low + place, high - place[:, ::-1])
    # This is low + width * place // parts, in two terms because that product may overflow.
    even = low + (width // parts) * place + (width % parts) * place // parts
    each = jnp.minimum(low + place, high)

    # The model cannot be trusted if the bracket is wide or the last read left more than half of it.
    is_wide = width > 2 << jnp.finfo(dtype).nmant
    is_unknown = is_wide | (width > width_before[:, None] // 2)
    is_narrow = width <= parts
    return jnp.where(is_narrow, each, jnp.where(is_unknown, even, aimed))


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
    (low, high), (_, up_to_high) = search.keys.T, search.counts.T
    is_last = up_to_high - search.wanted.rank == 1
    is_single_key = high - low == 1
    # One leaf among others may be empty, with the scope "leaf". It needs no further read of all.
    is_empty = up_to_high == 0
    is_known = (is_single_key & ~is_last) | search.has_nan | is_empty

    def read() -> tuple[jax.Array, jax.Array]:
        return data.neighbours(high, jnp.where(is_last, high, low))

    needed = ~jnp.all(is_known)
    # `at_high`: the largest key at or below high. `above`: the smallest key above high if the rank is the bracket's
    # last, otherwise the smallest above low.
    at_high, above = run_if(needed, read, lambda: (high, high))
    lower = jnp.where(is_single_key, high, jnp.where(is_last, at_high, above))
    upper = jnp.where(is_last, above, jnp.where(is_single_key, high, at_high))
    # If both keys are equal, both elements are at or below lower, and `clipped_fraction` would count one too many.
    is_first_of_two = ~is_single_key & ~is_last & (lower < upper)
    up_to_lower = up_to_high - is_first_of_two.astype(up_to_high.dtype)
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
