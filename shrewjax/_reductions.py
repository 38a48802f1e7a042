"""Reductions of a list of leaves, one number a leaf or unit, over every device that holds a part of it.

The only place that talks to mapped axes. Under `jit`, sharded arrays need nothing: XLA reduces over their
shards. Inside `shard_map` and `pmap` a leaf is a device's own part, and its sum is only a partial sum:

* with varying-axes tracking (`shard_map`'s default) the leaf's type tells over which axes it varies, and its
  partial result is reduced over exactly those, so a replicated leaf is not counted once a device;
* without tracking (`check_vma=False`, `pmap`) nothing tells, and `sharded_over` must.

One thing no type tells: a shard of a gradient (its parts' squares add up) and a gradient that is not reduced
yet (its parts themselves add up first) both vary over the axis. Reduce the latter before it comes here.

A leaf may be many units, such as stacked layers: then some of its axes are `unit_dims`, and its result has their sizes.
Along a unit_dims axis a shard holds other units, along another one parts of the same; no type tells these apart either
(`unit_axes`).
"""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax import _bigint
from shrewjax._bigint import BigUint
from shrewjax._branches import run_if
from shrewjax._mesh import Axes, UnitDims, axes_to_reduce, is_bound, is_mapped, mapped_axes, may_be_partitioned

Group = tuple[Any, ...]
"""Leaves of one shape and dtype, which a reduction combines element by element, as if they were one leaf."""


def leaf_sums(
    terms: Callable[..., jax.Array],
    leaves: Sequence[Any],
    *per_leaf: Sequence[Any],
    axes: Axes | list[Axes],
    unit_dims: Sequence[UnitDims] | None = None,
) -> list[jax.Array]:
    """The sum of `terms(leaf, *scalars)` over each leaf's elements and devices; `per_leaf` has the leaves' scalars.

    The mapped axes in a list, one entry a leaf, hold exactly, but for None: whatever a type may say.
    """
    unit_dims = [()] * len(leaves) if unit_dims is None else unit_dims
    partials = [_sum(terms(*of_leaf), dims) for dims, *of_leaf in zip(unit_dims, leaves, *per_leaf, strict=True)]
    return _over_devices(lax.psum, partials, axes)


def leaf_maxima(
    keys: Callable[..., Sequence[jax.Array]], leaves: Sequence[Any], *per_leaf: Sequence[Any], axes: Axes | list[Axes]
) -> list[jax.Array]:
    """The maxima of the integer arrays `keys(leaf, *scalars)`, likewise: a vector a leaf. What is not positive is none.

    Integers, because XLA:CPU's float maximum loses a NaN.
    """
    partials = [_leaf_maxima(keys, *of_leaf) for of_leaf in zip(leaves, *per_leaf, strict=True)]
    return _over_devices(lax.pmax, partials, axes)


def leaf_counts(
    flags: Callable[..., Sequence[jax.Array]], leaves: Sequence[Any], *per_leaf: Sequence[Any], words: int, axes: Axes
) -> list[BigUint]:
    """How many elements of each leaf have each of the flags `flags(leaf, *scalars)`, likewise: a vector a leaf.

    In as many words as hold the largest count. Of a group, a flag is the number of its leaves that have it at a place.
    """
    partials = [_leaf_counts(flags, words, *of_leaf) for of_leaf in zip(leaves, *per_leaf, strict=True)]
    counts = _over_devices(lax.psum, partials, axes)
    return [(x,) if words == 1 else _bigint.from_halves(_bigint.carried(x), words) for x in counts]


def grouped(leaves: Sequence[Any], axes: Axes) -> list[Group]:
    """The same elements in few groups, because each takes a kernel of its own: long to compile, and to launch.

    For reductions of all elements together. The smallest leaves of a kind become one vector, which copies less than
    1/256 of all.
    """
    if may_be_partitioned():
        return [(x,) for x in leaves]
    left = sum(x.size for x in leaves) // 256
    large: dict[Any, list[Any]] = {}
    small: dict[Any, list[Any]] = {}
    with_axes = zip(leaves, axes_to_reduce(leaves, axes), strict=True)
    for x, over in sorted(with_axes, key=lambda pair: pair[0].size):
        left -= x.size
        if left < 0:
            large.setdefault((x.shape, x.dtype, over), []).append(x)
        else:
            small.setdefault((x.dtype, over), []).append(jnp.ravel(x))
    vectors: list[Group] = [(jnp.concatenate(of_kind),) for of_kind in small.values()]
    most = min(_MOST_IN_A_GROUP, sum(map(len, large.values())) // _FEWEST_GROUPS)
    return [group for alike in large.values() for group in _evenly(alike, most)] + vectors


def _evenly(alike: Sequence[Any], most: int) -> list[Group]:
    """Leaves of one shape in groups of nearly the same length, each of no more elements than a word can count."""
    most = max(min(most, _LARGEST_COUNT // max(alike[0].size, 1)), 1)
    groups = math.ceil(len(alike) / most)
    return [tuple(alike[i::groups]) for i in range(groups)]


def sizes(leaves: Sequence[Any], *, axes: Axes | list[Axes], unit_dims: Sequence[UnitDims] | None = None) -> list[int]:
    """How many elements such a sum has, on all devices: a fact of the types."""
    unit_dims = [()] * len(leaves) if unit_dims is None else unit_dims
    over = axes_to_reduce(leaves, axes)
    return [
        math.prod(n for a, n in enumerate(x.shape) if a not in dims) * (lax.psum(1, names) if names else 1)
        for x, dims, names in zip(leaves, unit_dims, over, strict=True)
    ]


def unit_zeros(leaf: Any, dims: UnitDims) -> jax.Array:
    """A float32 zero for each unit of a leaf, sharded as its sums are."""
    return _sum(jnp.zeros_like(leaf, dtype=jnp.float32), dims)


def any_device(flags: Sequence[jax.Array], axes: tuple[Hashable, ...] = ()) -> list[jax.Array]:
    """Whether each flag is set on any device, so that all devices take the same branch.

    If `axes` name axes of `jax.vmap`, flags are compared along these too.
    """
    mapped, is_tracked = mapped_axes()
    counts = _over_devices(lax.pmax, [flag.astype(jnp.int32) for flag in flags], () if is_tracked else mapped)
    of_vmap = tuple(a for a in axes if a not in mapped and is_bound(a))
    return [count > 0 for count in (lax.pmax(counts, of_vmap) if of_vmap else counts)]


def row_sums(rows: Sequence[jax.Array], axes: tuple[Hashable, ...]) -> list[jax.Array]:
    """The sum of the rows of each array, on this device and along mapped axes: one collective for all together."""
    sums = [_sum(x, tuple(range(1, x.ndim))) for x in rows]
    return lax.psum(sums, axes) if is_mapped(axes) else sums


def all_finite(leaves: Sequence[Any], axes: Axes | list[Axes], unit_dims: UnitDims = ()) -> jax.Array:
    """Whether no leaf holds a NaN or an infinity, on any device. Shape (); or of the axes that all leaves keep."""
    if not leaves:
        return jnp.ones((), bool)

    def sums_are_finite(terms: Callable[[Any], jax.Array]) -> jax.Array:
        sums = leaf_sums(terms, leaves, axes=axes, unit_dims=[unit_dims] * len(leaves))
        return jnp.all(jnp.stack([jnp.isfinite(s) for s in sums]), axis=0)

    # A sum is what XLA:CPU reduces at memory speed. If it is finite, so is every element; if not, it may have
    # overflowed, and x - x decides, 0 for a finite x, else NaN. (The barrier keeps XLA:GPU from running both always.)
    plain = sums_are_finite(lambda x: x)
    return run_if(~jnp.all(plain), lambda: lax.optimization_barrier(sums_are_finite(lambda x: x - x)), lambda: plain)


def _sum(x: jax.Array, dims: UnitDims = ()) -> jax.Array:
    return lax.reduce(x, np.zeros((), x.dtype), lax.add, [a for a in range(x.ndim) if a not in dims])


# Jitted, so that leaves of one shape are traced and lowered once.
@partial(jax.jit, static_argnums=0)
def _leaf_maxima(keys: Callable[..., Sequence[jax.Array]], *of_leaf: Any) -> jax.Array:
    wanted = keys(*of_leaf)
    # XLA:CPU writes out what a reduction of a single operand reads; with a second, different operand it does not.
    another = [wanted[0] >> jnp.ones((), wanted[0].dtype)] if len(wanted) == 1 else []
    return jnp.stack(_reduce_together([*wanted, *another], lax.max, range(wanted[0].ndim))[: len(wanted)])


@partial(jax.jit, static_argnums=(0, 1))
def _leaf_counts(flags: Callable[..., Sequence[jax.Array]], words: int, *of_leaf: Any) -> jax.Array:
    """Of each flag: a word, or the three half words of a count that no word may hold, as the rows of an array."""
    ones = [f.astype(jnp.uint32) for f in flags(*of_leaf)]
    shape = ones[0].shape
    if words == 1:
        return jnp.stack(_reduce_together(ones, lax.add, range(len(shape))))
    # Along some axes first, as many as a word can count, so that few counts are left to be split and added up.
    first, counted = [], 1
    for axis in sorted(range(len(shape)), key=lambda a: -shape[a]):
        if counted * shape[axis] <= _LARGEST_COUNT:
            first.append(axis)
            counted *= shape[axis]
    if math.prod(shape) > counted * _MOST_COUNTS:
        raise ValueError(f"a leaf of shape {shape} has too many elements to be counted")
    counts = jnp.stack(_reduce_together(ones, lax.add, first))
    low, high = (jnp.sum(x, axis=range(1, x.ndim), dtype=jnp.uint32) for x in (counts & 0xFFF, counts >> 12))
    columns = [(low & 0xFFFF) + ((high & 0xF) << 12), (low >> 16) + (high >> 4 & 0xFFFF), high >> 20]
    return _bigint.carried(jnp.stack(columns))


_LARGEST_COUNT = 2**32 - 1


_MOST_COUNTS = 2**20  # of 12 bits each, in a word


_MOST_IN_A_GROUP = 8  # a fusion of many more operands would be cut, and what is between its parts written out


_FEWEST_GROUPS = 9  # XLA:CPU runs up to eight kernels one after another, and more of them side by side


def _reduce_together(operands: Sequence[jax.Array], combine: Callable[..., Any], axes: Sequence[int]) -> list[Any]:
    """Reduces arrays of one shape over the axes, with 0 for an empty one; in one read of the data where possible."""
    zeros = [np.zeros((), x.dtype) for x in operands]
    if len(operands) > 1 and not may_be_partitioned():
        return list(lax.reduce(tuple(operands), tuple(zeros), _of_each(combine), tuple(axes)))
    # Where it partitions a reduction of several operands, XLA gathers the devices' results, an all-gather for each
    # operand; a single one becomes an all-reduce. (XLA:GPU fuses such siblings, and reads the data once.)
    return [lax.reduce(x, zero, combine, tuple(axes)) for x, zero in zip(operands, zeros, strict=True)]


@cache
def _of_each(combine: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: tuple(combine(x, y) for x, y in zip(a, b, strict=True))


def _over_devices(
    collective: Callable[..., Any], partials: Sequence[jax.Array], axes: Axes | list[Axes]
) -> list[jax.Array]:
    """Combines the devices' partial results: one collective for each set of axes over which leaves vary."""
    groups: dict[tuple[Hashable, ...], dict[Any, list[int]]] = {}
    for i, (x, over) in enumerate(zip(partials, axes_to_reduce(partials, axes), strict=True)):
        if over:
            groups.setdefault(over, {}).setdefault(jax.typeof(x), []).append(i)
    results = list(partials)
    for over, alike in groups.items():
        stacked = collective([jnp.stack([partials[i] for i in of_kind]) for of_kind in alike.values()], over)
        for of_kind, reduced in zip(alike.values(), stacked, strict=True):
            for place, i in enumerate(of_kind):
                results[i] = reduced[place]
    return results
