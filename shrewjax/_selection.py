"""Exact percentiles of |g| by counting: no sort, no copy, no gather.

One idea: the bits of |x|, read as an integer (its *key*), order as the magnitudes do. So an order statistic is found by
counting, in one read of the data, how many keys lie at or below each of a few pivots, and going on between the two
pivots that enclose the wanted rank. Where the pivots lie decides how many reads it takes, never what is found.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial, reduce
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax import _bigint, _extended, _floats, _ranks
from shrewjax._bigint import BigUint
from shrewjax._mesh import Axes
from shrewjax._norms import Scope
from shrewjax._ranks import Method, OrderStatistic
from shrewjax._reductions import Group, grouped, leaf_counts, leaf_maxima, sizes

Over = Literal["all", "nonzero"]


class Selected(NamedTuple):
    """A percentile of |g|: of all leaves together (shape ()) or of each (shape (leaves,))."""

    bound: jax.Array  # the percentile, float32 or float64 (if a leaf is); 0 if there is no element, NaN if one is NaN
    bits: jax.Array  # the same as integers, which no backend flushes; without meaning where there is a NaN
    above: jax.Array  # float32: how many elements are larger; NaN where one is NaN
    elements: jax.Array  # float32: how many there are
    reads: jax.Array  # int32 (): how often the data was read


def select(
    leaves: Sequence[Any],
    percentile: Fraction | jax.Array,
    *,
    method: Method,
    scope: Scope,
    over: Over,
    axes: Axes,
    start: jax.Array | None = None,
) -> Selected:
    """The percentile of |x|, p in [0, 100], over the elements of all leaves together or of each.

    The search begins at `start`, of the result's shape, if that is positive and finite: near the result it saves reads.
    The derivative is 0.
    """
    known, traced = (percentile, None) if isinstance(percentile, Fraction) else (None, percentile)
    return _select(leaves, traced, start, known, method, scope, over, axes)


@partial(jax.jit, static_argnums=(3, 4, 5, 6, 7), inline=True)  # outside of jit, each call would compile its loop anew
def _select(
    leaves: Sequence[Any],
    traced: jax.Array | None,
    start: jax.Array | None,
    known: Fraction | None,
    method: Method,
    scope: Scope,
    over: Over,
    axes: Axes,
) -> Selected:
    leaves = [lax.stop_gradient(_at_least_16_bits(x)) for x in leaves]
    dtype = _common_dtype(leaves)
    wide_dtype = jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
    counts = sizes(leaves, axes=axes)
    counts = counts if scope == "leaf" else [sum(counts)]
    groups = [(x,) for x in leaves] if scope == "leaf" else grouped(leaves, axes)
    if not groups:
        nothing = jnp.zeros((0,) if scope == "leaf" else (), wide_dtype)
        bits, none = _floats.magnitude_bits(nothing), nothing.astype(jnp.float32)
        return Selected(nothing, bits, none, none, jnp.zeros((), jnp.int32))
    count = _bigint.constant(counts, max(map(_bigint.words_for, counts)))
    percentile = known if traced is None else traced
    assert percentile is not None

    def place(considered: BigUint) -> OrderStatistic:
        if over == "all" and isinstance(percentile, Fraction):
            position = _ranks.static_virtual_index(percentile, counts, len(count))
        else:
            position = _ranks.virtual_index(percentile, considered)
        return _ranks.apply_method(position, method)

    def place_beyond(zeros: BigUint) -> OrderStatistic:
        of_nonzero = place(_bigint.subtract(count, zeros))
        nothing = _bigint.is_at_most(count, zeros)  # but zeros: then the first of them
        first = tuple(map(jnp.zeros_like, zeros))
        return of_nonzero._replace(rank=_bigint.where(nothing, first, _bigint.add(of_nonzero.rank, zeros)))

    def read_once_more(s: _Search) -> _Search:
        # A branch always taken: from it, XLA cannot move the keys out of the loop, and so write them out.
        counted = lax.cond(
            s.reads >= 0,
            lambda: _counts(groups, s.pivots, dtype, scope, len(count), axes),
            lambda: tuple(jnp.zeros(s.pivots.shape, jnp.uint32) for _ in count),
        )
        return _narrowed(s, counted, count, place_beyond if over == "nonzero" else None, dtype)

    search = lax.while_loop(lambda s: jnp.any(~s.done), read_once_more, _started(count, place(count), start, dtype))
    lower, upper, up_to_lower, reads = _enclosed(search, groups, dtype, scope, axes)
    bits = _interpolated(lower, upper, search.place.fraction, dtype, wide_dtype)
    bits = jnp.where(_bigint.equals(count, 0), 0, bits)
    bound = lax.bitcast_convert_type(bits, wide_dtype)
    up_to_bound = _bigint.where(bits >= _floats.infinity_bits(wide_dtype), count, up_to_lower)
    above, elements = (_bigint.to_float(x, jnp.float32) for x in (_bigint.subtract(count, up_to_bound), count))
    undefined = search.has_nan if traced is None else search.has_nan | jnp.isnan(traced)
    results = jnp.where(undefined, jnp.nan, bound), bits, jnp.where(undefined, jnp.nan, above), elements
    bound, bits, above, elements = results if scope == "leaf" else (x[0] for x in results)
    return Selected(bound, bits, above, elements, reads)


def _at_least_16_bits(x: Any) -> jax.Array:
    return x.astype(jnp.bfloat16) if jnp.finfo(x.dtype).bits < 16 else x


def _common_dtype(leaves: Sequence[Any]) -> Any:
    """The dtype whose keys the pivots are: the narrowest that holds every leaf's magnitudes."""
    dtypes = {_floats.real_dtype(x) for x in leaves}
    if len(dtypes) == 1:
        return dtypes.pop()
    return jnp.dtype(jnp.float64 if jnp.dtype(jnp.float64) in dtypes else jnp.float32)


def _keys(x: Any) -> jax.Array:
    return _floats.magnitude_bits(lax.abs(x) if _floats.is_complex(x) else x)


def _integers(dtype: Any) -> Any:
    """In which a search computes with keys and their differences."""
    return jnp.dtype(jnp.int64 if dtype == jnp.float64 else jnp.int32)


def _counts(groups: Sequence[Group], pivots: jax.Array, dtype: Any, scope: Scope, words: int, axes: Axes) -> BigUint:
    """How many keys lie at or below each pivot. `pivots`, and the result's words: (1 or leaves, pivots)."""
    # A leaf's pivots as its own dtype has them: so that no element is converted.
    own = _for_each_group(groups, pivots, dtype, scope)
    by_group = leaf_counts(_at_or_below, groups, own, words=words, axes=axes)
    stacked = tuple(jnp.stack(of_groups) for of_groups in zip(*by_group, strict=True))
    return stacked if scope == "leaf" else tuple(word[None] for word in _bigint.total(stacked, 0))


def _at_or_below(group: Group, pivots: jax.Array) -> list[jax.Array]:
    """For each pivot, how many keys at each place of the group."""
    keys = [_keys(x) for x in group]
    return [reduce(lax.add, [(k <= p).astype(jnp.uint32) for k in keys]) for p in pivots]


def _neighbours(
    groups: Sequence[Group], below: jax.Array, above: jax.Array, dtype: Any, scope: Scope, axes: Axes
) -> tuple[jax.Array, jax.Array]:
    """The largest key at or below `below`, and the smallest above `above`: (1 or leaves,) each; else 0 and infinity."""
    own = _for_each_group(groups, jnp.stack([below, above], axis=-1), dtype, scope)
    maxima = leaf_maxima(_beside, groups, own, axes=axes)
    found, ends = (jnp.stack([x.astype(_integers(dtype)) for x in of_groups]) for of_groups in (maxima, own))
    largest = np.asarray([[np.iinfo(m.dtype).max] for m in maxima], found.dtype)
    keys = jnp.where(np.asarray([[True, False]]), ends - (largest - found), ends + 1 + (largest - found))
    own_dtypes = [_floats.real_dtype(x) for x, *_ in groups]
    for narrow in set(own_dtypes) - {dtype}:
        is_narrow = np.asarray([[d == narrow] for d in own_dtypes])
        keys = jnp.where(is_narrow, _floats.wider_bits(keys, narrow, dtype), keys)
    nothing = np.asarray([[0, _floats.infinity_bits(dtype)]], found.dtype)
    largest_below, smallest_above = jnp.where(found <= 0, nothing, keys).T
    if scope == "global":
        return jnp.max(largest_below)[None], jnp.min(smallest_above)[None]
    return largest_below, smallest_above


def _beside(group: Group, below_and_above: jax.Array) -> list[jax.Array]:
    """Arrays whose maxima tell `_neighbours`: the closer a key, the larger; negative for one on the other side."""
    keys = [_keys(x) for x in group]
    below, above = below_and_above
    # What is above the largest integer wraps around to the negative ones: no key has to be compared.
    largest = jnp.asarray(jnp.iinfo(below.dtype).max, below.dtype)
    up_to, beyond = [k + (largest - below) for k in keys], [(above + 1 + largest) - k for k in keys]
    return [reduce(lax.max, up_to), reduce(lax.max, beyond)]


def _for_each_group(groups: Sequence[Group], keys: jax.Array, dtype: Any, scope: Scope) -> list[jax.Array]:
    """Keys (1 or leaves, k) as each group's (k,), in its own dtype."""
    own_dtypes = [_floats.real_dtype(x) for x, *_ in groups]
    own = {d: _floats.narrower_bits(keys, dtype, d) for d in dict.fromkeys(own_dtypes)}
    if scope == "leaf":
        return [own[d][i] for i, d in enumerate(own_dtypes)]
    shared = {d: of_all[0] for d, of_all in own.items()}
    return [shared[d] for d in own_dtypes]


# These decide how many reads a search takes, and nothing else. Tuned on float32 data of several distributions, 58.7
# million elements each: more pivots would save few reads and make each slower.

# Where gradients are likely to lie, as exponents of two.
_FIRST_EXPONENTS = (-27, -21, -15, -11, -8, -4, 0, 3, 6)


# Around a start, in powers of two; and the key below it, so that one read is enough if nothing has moved.
_FIRST_DISTANCES = (-0.135, -0.08, -0.04, 0.0, 0.04, 0.06, 0.09, 0.135)


# Around an estimate, in units of its uncertainty.
_DISTANCES = (-16.0, -8.0, -4.0, -2.0, -0.5, 0.0, 0.5, 2.0, 4.0, 8.0, 16.0)


_PIVOTS = len(_DISTANCES)


assert len(_FIRST_EXPONENTS) == len(_FIRST_DISTANCES) + 1 == _PIVOTS - 2  # and zero and infinity


class _Search(NamedTuple):
    """Four points of the distribution of keys, the wanted rank between the second and the third; (1 or leaves,) all.

    counts[1] <= rank < counts[2]: the bracket. The outer points only bend the estimate of where to count next. Each
    read puts the pivots, counted, between the second and the third, and keeps the four points around the rank.
    """

    keys: jax.Array  # (..., 4), ascending
    counts: BigUint  # (..., 4): how many elements lie at or below each
    pivots: jax.Array  # (..., pivots): ascending, where to count next
    place: OrderStatistic
    has_nan: jax.Array  # bool: known after the first read
    done: jax.Array  # bool
    reads: jax.Array  # int32 ()


def _started(count: BigUint, place: OrderStatistic, start: jax.Array | None, dtype: Any) -> _Search:
    groups = count[0].shape[0]
    integers, infinity = _integers(dtype), _floats.infinity_bits(dtype)
    exponents = np.asarray([2.0**e for e in _FIRST_EXPONENTS]).astype(dtype)
    inner = jnp.tile(_floats.magnitude_bits(jnp.asarray(exponents)[None]).astype(integers), (groups, 1))
    if start is not None:
        start = jnp.broadcast_to(start.astype(dtype), (groups,))
        around = _floats.magnitude_bits(start).astype(integers)[:, None]
        steps = np.asarray(_FIRST_DISTANCES) * 2.0 ** jnp.finfo(dtype).nmant
        offsets = np.sort([*steps.astype(integers), -1])[None].astype(integers)
        usable = (start > 0) & (start < jnp.inf)
        inner = jnp.where(usable[:, None], jnp.clip(around + offsets, 1, infinity - 1), inner)
    ends = [jnp.full((groups, 1), end, integers) for end in (0, infinity)]
    nothing = tuple(map(jnp.zeros_like, count))
    return _Search(
        keys=jnp.tile(jnp.asarray([[-1, -1, infinity, infinity]], integers), (groups, 1)),
        counts=tuple(jnp.stack([z, z, n, n], axis=-1) for z, n in zip(nothing, count, strict=True)),
        pivots=jnp.concatenate([ends[0], inner, ends[1]], axis=-1),
        place=place,
        has_nan=jnp.zeros((groups,), bool),
        done=_bigint.equals(count, 0),
        reads=jnp.zeros((), jnp.int32),
    )


def _narrowed(
    s: _Search, counted: BigUint, count: BigUint, place_beyond: Callable[[BigUint], OrderStatistic] | None, dtype: Any
) -> _Search:
    """The search after a read that `counted` at the pivots; if the place depends on the zeros, `place_beyond` them."""
    is_first = s.reads == 0
    place = s.place
    if place_beyond is not None:
        place = lax.cond(is_first, lambda: place_beyond(_column(counted, 0)), lambda: s.place)
    has_nan = jnp.where(is_first, ~_bigint.is_at_most(count, _column(counted, -1)), s.has_nan)
    rank = place.rank

    keys = jnp.concatenate([s.keys[:, :2], s.pivots, s.keys[:, 2:]], axis=-1)
    counts = tuple(
        jnp.concatenate([old[:, :2], new, old[:, 2:]], axis=-1) for old, new in zip(s.counts, counted, strict=True)
    )
    below = _bigint.is_at_most(tuple(c[:, 1:-2] for c in counts), tuple(r[:, None] for r in rank))
    places = jnp.sum(below, axis=-1, dtype=jnp.int32)[:, None] + np.arange(-1, 3, dtype=np.int32)[None]
    keys = jnp.take_along_axis(keys, places, axis=-1)
    counts = tuple(jnp.take_along_axis(c, places, axis=-1) for c in counts)

    width_before, width = s.keys[:, 2] - s.keys[:, 1], keys[:, 2] - keys[:, 1]
    inside = _bigint.subtract(_column(counts, 2), _column(counts, 1))
    left = _bigint.subtract(_column(counts, 2), rank)
    # One key left, or the rank is the last in the bracket, or the first of two: then `_neighbours` reads it off.
    done = (width == 1) | _bigint.equals(left, 1) | (_bigint.equals(inside, 2) & _bigint.equals(left, 2))
    return _Search(
        keys=keys,
        counts=counts,
        pivots=_next_pivots(keys, counts, rank, width_before, dtype),
        place=place,
        has_nan=has_nan,
        done=done | has_nan | s.done,
        reads=s.reads + 1,
    )


def _column(counts: BigUint, i: int) -> BigUint:
    return tuple(c[:, i] for c in counts)


def _next_pivots(keys: jax.Array, counts: BigUint, rank: BigUint, width_before: jax.Array, dtype: Any) -> jax.Array:
    """Close to where the distribution, a cubic through its four points, reaches the rank."""
    integers = keys.dtype
    low, high = keys[:, 1:2], keys[:, 2:3]
    width = high - low
    place = np.arange(1, _PIVOTS + 1, dtype=integers)[None]

    def elements(a: BigUint, b: BigUint) -> jax.Array:
        return _bigint.to_float(_bigint.subtract(a, b), jnp.float32)[:, None]

    # In units of the bracket: x counts elements, y is the key; its ends are (0, 0) and (1, 1).
    left, below, up_to, right = (_column(counts, i) for i in range(4))
    inside = elements(up_to, below)
    x = 1 - (elements(up_to, rank) - 0.5) / inside
    x0 = 1 - elements(up_to, left) / inside
    x3 = 1 + elements(right, up_to) / inside
    y0, y3 = ((k - low).astype(jnp.float32) / width.astype(jnp.float32) for k in (keys[:, 0:1], keys[:, 3:4]))
    # The parabola through the ends and another point (u, v) is x + bend x (x - 1). A cubic blends two of them.
    has_left, has_right = x0 < 0, x3 > 1
    bend_0, bend_3 = ((v - u) / jnp.where(ok, u * (u - 1), 1) for u, v, ok in ((x0, y0, has_left), (x3, y3, has_right)))
    both = (x - x0) / jnp.maximum(x3 - x0, 1)
    blend = jnp.where(has_left & has_right, both, has_right.astype(jnp.float32))
    bend = jnp.where(has_left | has_right, bend_0 + blend * (bend_3 - bend_0), 0)
    estimate = x + bend * x * (x - 1)
    estimate = jnp.where((estimate > 0) & (estimate < 1), estimate, x)

    noise = jnp.sqrt(jnp.maximum(x * (1 - x), 1 / inside) / inside)  # of a rank between two known ones
    uncertainty = jnp.maximum(0.3 * noise, 0.2 * jnp.abs(estimate - x) + 1e-3)
    aimed = jnp.clip(estimate + np.asarray([_DISTANCES], np.float32) * uncertainty, 0, 1)
    aimed = low + jnp.round(aimed * width.astype(jnp.float32)).astype(integers)
    aimed = jnp.clip(aimed, low + place, high - place[:, ::-1])
    # Where a bracket is wide, or the last read shrank it little, the estimate is not to be trusted.
    even = low + (width // (_PIVOTS + 1)) * place + (width % (_PIVOTS + 1)) * place // (_PIVOTS + 1)
    is_unknown = (width > 2 << jnp.finfo(dtype).nmant) | (width > width_before[:, None] // 2)
    return jnp.where(width <= _PIVOTS + 1, jnp.minimum(low + place, high), jnp.where(is_unknown, even, aimed))


def _enclosed(
    search: _Search, groups: Sequence[Group], dtype: Any, scope: Scope, axes: Axes
) -> tuple[jax.Array, jax.Array, BigUint, jax.Array]:
    """The keys at the rank and at the next one, how many elements the former has up to it, and all reads."""
    # The bracket (low, high] at the end of the search    lower       upper
    # a single key, and the rank not its last element    high        high         nothing is left to read
    # a single key, and the rank its last element        high        above_high
    # the rank the last of several elements              below_high  above_high
    # the rank the first of two                          above_low   below_high
    low, high = search.keys[:, 1], search.keys[:, 2]
    up_to_high = _column(search.counts, 2)
    is_last = _bigint.equals(_bigint.subtract(up_to_high, search.place.rank), 1)
    is_single_key = high - low == 1
    is_known = (is_single_key & ~is_last) | search.has_nan

    def read() -> tuple[jax.Array, jax.Array]:
        # XLA:GPU would turn the branch into a select, and so run it always, if it held nothing but plain reductions.
        return lax.optimization_barrier(_neighbours(groups, high, jnp.where(is_last, high, low), dtype, scope, axes))

    needed = ~jnp.all(is_known)
    below_high, above = lax.cond(needed, read, lambda: (high, high))  # above high, or else above low
    lower = jnp.where(is_single_key, high, jnp.where(is_last, below_high, above))
    upper = jnp.where(is_last, above, jnp.where(is_single_key, high, below_high))
    is_first_of_two = ~is_single_key & ~is_last & (lower < upper)
    one = _bigint.from_word(jnp.ones_like(up_to_high[0]), len(up_to_high))
    up_to_lower = _bigint.where(is_first_of_two, _bigint.subtract(up_to_high, one), up_to_high)
    return lower, upper, up_to_lower, search.reads + needed.astype(jnp.int32)


def _interpolated(lower: jax.Array, upper: jax.Array, fraction: jax.Array, dtype: Any, wide_dtype: Any) -> jax.Array:
    """The bits of lower + fraction (upper - lower), to 4 ulp, from the keys; lower itself if the fraction is 0.

    It stays below `upper`, if that is finite, so that what is larger than it is known without another read.
    """
    lower, upper = (_floats.wider_bits(k, dtype, wide_dtype) for k in (lower, upper))
    low, high = (_extended.to_extended(lax.bitcast_convert_type(k, wide_dtype)) for k in (lower, upper))
    # In units of the power of two at or below the upper one, so that nothing is flushed or overflows.
    start = _floats.times_power_of_two(low.mantissa, low.exponent - high.exponent)
    number = _extended.to_extended(start + _ranks.as_float(fraction, wide_dtype) * (high.mantissa - start))
    bits = _extended.bits_of(number._replace(exponent=number.exponent + high.exponent))
    is_lower = (jnp.max(fraction, axis=0) == 0) | (lower >= upper)
    infinity = _floats.infinity_bits(wide_dtype)
    between = jnp.where(upper >= infinity, infinity, jnp.clip(bits, lower, upper - 1))
    return jnp.where(is_lower, lower, between)
