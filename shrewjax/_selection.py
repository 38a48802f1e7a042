"""Exact percentiles of magnitudes by counting keys (`_keys`) at or below pivots, without a sort.

The search for the key at a rank:

* **Invariant.** The state has four keys and the number of elements at or below each. The second and the third are the
  *bracket*: counts[1] <= rank < counts[2]. At the start the bracket holds all keys.
* **A read** counts the elements at or below eleven pivots inside the bracket. Then the bracket is the pair of pivots
  around the rank. The next point on either side is kept for the model.
* **The model** takes the key as a cubic of the rank, through the four points. It predicts the key at the rank. The
  next pivots are at multiples of its uncertainty around that prediction, the closest ones at half of it.
* **The fallback** spaces pivots evenly. It is used if the bracket is wider than a factor of four, or if the last read
  left more than half of it. A bracket of up to twelve keys gets a pivot at each.
* **Stop** if the bracket is a single key, or if the rank is its last element, or the first of two. One more read then
  finds the keys next to the bracket, unless all that is needed is known: see the table in `_enclosed`.

An even read leaves a twelfth of a bracket, and a read that leaves more than half is followed by an even one. So a
search takes at most 27 reads of float32 leaves (float64: 56; bfloat16: 11; float16: 10), the last one included. It
usually takes 5 to 8. Pivots decide the number of reads, never the result. The tests are
`test_hostile_data_takes_a_bounded_number_of_reads` and
`test_a_search_takes_few_reads_and_fewer_from_a_start_near_the_result`.

Ranks are exact integers, see `_ranks`. Results are compared and returned as bits, because CPU and TPU flush subnormal
numbers (XLA-18).
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax import _extended, _floats, _keys, _ranks
from shrewjax._mesh import Axes
from shrewjax._norms import Scope
from shrewjax._ranks import Method, OrderStatistic
from shrewjax._reductions import Group, count_dtype, grouped, sizes

Over = Literal["all", "nonzero"]


class Selected(NamedTuple):
    """A percentile of |g| for all leaves together (shape ()) or for each leaf (shape (leaves,))."""

    bound: jax.Array  # the percentile, float32 or float64 (if a leaf is); 0 without elements, NaN if an element is NaN
    bits: jax.Array  # the bits of the bound, which no backend flushes; undefined if an element is NaN
    above: jax.Array  # float32: number of larger elements; NaN if an element is NaN
    elements: jax.Array  # float32: number of elements
    reads: jax.Array  # int32 (): number of reads of the data


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
    """Returns the percentile of |x|, p in [0, 100], over the elements of all leaves together or of each leaf.

    The search begins at `start`, of the result's shape, if that is positive and finite. A start near the result saves
    reads. The derivative is 0.
    """
    static, traced = (percentile, None) if isinstance(percentile, Fraction) else (None, percentile)
    return _select(leaves, traced, start, static, method, scope, over, axes)


@partial(jax.jit, static_argnums=(3, 4, 5, 6, 7), inline=True)  # XLA-21: else each call outside jit compiles its loop
def _select(
    leaves: Sequence[Any],
    traced_percentile: jax.Array | None,
    start: jax.Array | None,
    static_percentile: Fraction | None,
    method: Method,
    scope: Scope,
    over: Over,
    axes: Axes,
) -> Selected:
    percentile = static_percentile if traced_percentile is None else traced_percentile
    assert percentile is not None
    with jax.enable_x64(True):  # for ranks, and for counts beyond 2**32. Everything else has a dtype of its own.
        return _selected(leaves, percentile, start, method, scope, over, axes)


def _selected(
    leaves: Sequence[Any],
    percentile: Fraction | jax.Array,
    start: jax.Array | None,
    method: Method,
    scope: Scope,
    over: Over,
    axes: Axes,
) -> Selected:
    leaves = [lax.stop_gradient(_keys.at_least_16_bits(x)) for x in leaves]
    dtype = _keys.common_dtype(leaves)
    result_dtype = jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
    counts = sizes(leaves, axes=axes)
    counts = counts if scope == "leaf" else [sum(counts)]
    groups = [(x,) for x in leaves] if scope == "leaf" else grouped(leaves, axes)
    if not groups:
        nothing = jnp.zeros((0,) if scope == "leaf" else (), result_dtype)
        bits, none = _floats.magnitude_bits(nothing), nothing.astype(jnp.float32)
        return Selected(nothing, bits, none, none, jnp.zeros((), jnp.int32))
    count = jnp.asarray(counts, count_dtype(max(counts)))

    def order_statistic(considered: jax.Array) -> OrderStatistic:
        return _ranks.apply_method(_ranks.virtual_index(percentile, considered), method, result_dtype)

    def wanted_beyond(zeros: jax.Array) -> OrderStatistic:
        of_nonzero = order_statistic(count - zeros)
        # If all are zero, the percentile is the first of the zeros.
        return of_nonzero._replace(rank=jnp.where(zeros >= count, 0, of_nonzero.rank + zeros))

    def read(s: _Search) -> _Search:
        # XLA-12: this branch is always taken. It stops XLA from hoisting the keys out of the loop, which would
        # materialize a copy of the data.
        counted = lax.cond(
            s.reads >= 0,
            lambda: _keys.counts(groups, s.pivots, dtype, scope, count.dtype, axes),
            lambda: jnp.zeros(s.pivots.shape, count.dtype),
        )
        return _narrowed(s, counted, count, wanted_beyond if over == "nonzero" else None, dtype)

    search = lax.while_loop(lambda s: jnp.any(~s.done), read, _started(count, order_statistic(count), start, dtype))
    lower, upper, up_to_lower, reads = _enclosed(search, groups, dtype, scope, axes)
    bits = _interpolated(lower, upper, search.wanted.fraction, dtype, result_dtype)
    bits = jnp.where(count == 0, 0, bits)
    bound = lax.bitcast_convert_type(bits, result_dtype)
    up_to_bound = jnp.where(bits >= _floats.infinity_bits(result_dtype), count, up_to_lower)
    above, elements = (x.astype(jnp.float32) for x in (count - up_to_bound, count))
    undefined = search.has_nan if isinstance(percentile, Fraction) else search.has_nan | jnp.isnan(percentile)
    results = jnp.where(undefined, jnp.nan, bound), bits, jnp.where(undefined, jnp.nan, above), elements
    bound, bits, above, elements = results if scope == "leaf" else (x[0] for x in results)
    return Selected(bound, bits, above, elements, reads)


# These constants, and those in `_next_pivots`, change the number of reads, never the result. They were tuned on float32
# data of several distributions, 58.7 million elements each. More pivots would save few reads and slow down each.

# The first pivots without a start: exponents of two between which gradients usually are.
_FIRST_EXPONENTS = (-27, -21, -15, -11, -8, -4, 0, 3, 6)
# The first pivots around a start, in powers of two. The key just below the start is one, too, so that a single read
# suffices if the result has not changed.
_FIRST_DISTANCES = (-0.135, -0.08, -0.04, 0.0, 0.04, 0.06, 0.09, 0.135)
# Later pivots, around the model's prediction, in units of its uncertainty.
_DISTANCES = (-16.0, -8.0, -4.0, -2.0, -0.5, 0.0, 0.5, 2.0, 4.0, 8.0, 16.0)
_PIVOTS = len(_DISTANCES)
assert len(_FIRST_EXPONENTS) == len(_FIRST_DISTANCES) + 1 == _PIVOTS - 2  # the first read adds zero and infinity


class _Search(NamedTuple):
    """The state of the search for each rank: arrays of shape (1 or leaves, ...)."""

    keys: jax.Array  # (..., 4), ascending
    counts: jax.Array  # (..., 4): number of elements at or below each, uint32 or uint64
    pivots: jax.Array  # (..., pivots): the keys at which the next read counts, ascending
    wanted: OrderStatistic
    has_nan: jax.Array  # bool: known after the first read
    done: jax.Array  # bool
    reads: jax.Array  # int32 ()


def _started(count: jax.Array, wanted: OrderStatistic, start: jax.Array | None, dtype: Any) -> _Search:
    """Returns the search before its first read."""
    groups = len(count)
    integers, infinity = _keys.integers(dtype), _floats.infinity_bits(dtype)
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
    return _Search(
        keys=jnp.tile(jnp.asarray([[-1, -1, infinity, infinity]], integers), (groups, 1)),
        counts=count[:, None] * np.asarray([[0, 0, 1, 1]], count.dtype),
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
    dtype: Any,
) -> _Search:
    """Returns the search after a read that `counted` the elements at or below its pivots.

    Its first pivot counts the zeros. If they are not to be considered, `wanted_beyond` them is what to search for.
    """
    is_first = s.reads == 0
    wanted = s.wanted
    if wanted_beyond is not None:
        wanted = lax.cond(is_first, lambda: wanted_beyond(counted[:, 0]), lambda: s.wanted)
    has_nan = jnp.where(is_first, counted[:, -1] < count, s.has_nan)
    rank = wanted.rank

    keys = jnp.concatenate([s.keys[:, :2], s.pivots, s.keys[:, 2:]], axis=-1)
    counts = jnp.concatenate([s.counts[:, :2], counted, s.counts[:, 2:]], axis=-1)
    below = jnp.sum(counts[:, 1:-2] <= rank[:, None], axis=-1, dtype=jnp.int32)
    places = below[:, None] + np.arange(-1, 3, dtype=np.int32)[None]
    keys = jnp.take_along_axis(keys, places, axis=-1)
    counts = jnp.take_along_axis(counts, places, axis=-1)

    width_before, width = s.keys[:, 2] - s.keys[:, 1], keys[:, 2] - keys[:, 1]
    inside, left = counts[:, 2] - counts[:, 1], counts[:, 2] - rank
    # A single key; or the rank is the last in the bracket, or the first of two, which `_enclosed` reads off.
    done = (width == 1) | (left == 1) | ((inside == 2) & (left == 2))
    return _Search(
        keys=keys,
        counts=counts,
        pivots=_next_pivots(keys, counts, rank, width_before, dtype),
        wanted=wanted,
        has_nan=has_nan,
        done=done | has_nan | s.done,
        reads=s.reads + 1,
    )


def _next_pivots(keys: jax.Array, counts: jax.Array, rank: jax.Array, width_before: jax.Array, dtype: Any) -> jax.Array:
    """Returns pivots inside the bracket, close to the key that the model predicts at the rank."""
    integers = keys.dtype
    low, high = keys[:, 1:2], keys[:, 2:3]
    width = high - low
    place = np.arange(1, _PIVOTS + 1, dtype=integers)[None]

    def elements(a: jax.Array, b: jax.Array) -> jax.Array:
        return (a - b).astype(jnp.float32)[:, None]

    # In units of the bracket, whose ends are (0, 0) and (1, 1): x is a number of elements, y a key.
    left, below, up_to, right = counts.T
    inside = elements(up_to, below)
    x = 1 - (elements(up_to, rank) - 0.5) / inside
    x0 = 1 - elements(up_to, left) / inside
    x3 = 1 + elements(right, up_to) / inside
    y0, y3 = ((k - low).astype(jnp.float32) / width.astype(jnp.float32) for k in (keys[:, 0:1], keys[:, 3:4]))
    # The parabola through the ends and a third point (u, v) is x + bend x (x - 1), bend = (v - u) / (u (u - 1)). The
    # cubic through all four points blends the parabolas of both outer points.
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
    # The model cannot be trusted if the bracket is wide or the last read left more than half of it.
    even = low + (width // (_PIVOTS + 1)) * place + (width % (_PIVOTS + 1)) * place // (_PIVOTS + 1)
    is_unknown = (width > 2 << jnp.finfo(dtype).nmant) | (width > width_before[:, None] // 2)
    return jnp.where(width <= _PIVOTS + 1, jnp.minimum(low + place, high), jnp.where(is_unknown, even, aimed))


def _enclosed(
    search: _Search, groups: Sequence[Group], dtype: Any, scope: Scope, axes: Axes
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the keys at the rank and at the next one, the number of elements up to the former, and all reads."""
    # The bracket (low, high] at the end of the search    lower       upper
    # a single key, and the rank not its last element    high        high         no further read
    # a single key, and the rank its last element        high        above_high
    # the rank the last of several elements              at_high     above_high
    # the rank the first of two                          above_low   at_high
    low, high = search.keys[:, 1], search.keys[:, 2]
    up_to_high = search.counts[:, 2]
    is_last = up_to_high - search.wanted.rank == 1
    is_single_key = high - low == 1
    is_known = (is_single_key & ~is_last) | search.has_nan

    def read() -> tuple[jax.Array, jax.Array]:
        # XLA-4: without the barrier, XLA:GPU turns the branch into a select, and so reads the data on every call.
        return lax.optimization_barrier(
            _keys.neighbours(groups, high, jnp.where(is_last, high, low), dtype, scope, axes)
        )

    needed = ~jnp.all(is_known)
    # `at_high`: the largest key at or below high. `above`: the smallest one above high if the rank is last, else above
    # low.
    at_high, above = lax.cond(needed, read, lambda: (high, high))
    lower = jnp.where(is_single_key, high, jnp.where(is_last, at_high, above))
    upper = jnp.where(is_last, above, jnp.where(is_single_key, high, at_high))
    is_first_of_two = ~is_single_key & ~is_last & (lower < upper)
    up_to_lower = up_to_high - is_first_of_two.astype(up_to_high.dtype)
    return lower, upper, up_to_lower, search.reads + needed.astype(jnp.int32)


def _interpolated(lower: jax.Array, upper: jax.Array, fraction: jax.Array, dtype: Any, result_dtype: Any) -> jax.Array:
    """Returns the bits of lower + fraction (upper - lower), within 4 ulp, and those of `lower` if the fraction is 0.

    The result is below `upper`, unless that is infinite. So the number of larger elements is known without another
    read.
    """
    lower, upper = (_floats.wider_bits(k, dtype, result_dtype) for k in (lower, upper))
    low, high = (_extended.to_extended(lax.bitcast_convert_type(k, result_dtype)) for k in (lower, upper))
    # Both ends are scaled by the power of two of the upper one, so that nothing is flushed or overflows.
    start = _floats.times_power_of_two(low.mantissa, low.exponent - high.exponent)
    number = _extended.to_extended(start + fraction * (high.mantissa - start))
    bits = _extended.bits_of(number._replace(exponent=number.exponent + high.exponent))
    is_lower = (fraction == 0) | (lower >= upper)
    infinity = _floats.infinity_bits(result_dtype)
    between = jnp.where(upper >= infinity, infinity, jnp.clip(bits, lower, upper - 1))
    return jnp.where(is_lower, lower, between)
