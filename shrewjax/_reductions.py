"""Reductions of a list of leaves, one number a leaf or unit, over every device that holds a part of it.

The only place that talks to mapped axes. Under `jit`, sharded arrays need nothing: XLA reduces over their
shards. Inside `shard_map` and `pmap` a leaf is a device's own part, and its sum is only a partial sum:

* with varying-axes tracking (`shard_map`'s default) the leaf's type tells over which axes it varies, and its
  partial result is reduced over exactly those, so a replicated leaf is not counted once a device;
* without tracking (`check_vma=False`, `pmap`) nothing tells, and `axis_name` must.

One thing no type tells: a shard of a gradient (its parts' squares add up) and a gradient that is not reduced
yet (its parts themselves add up first) both vary over the axis. Reduce the latter before it comes here.

A leaf may be many units, such as stacked layers: then some of its axes are `kept`, and its result has their sizes.
Along a kept axis a shard holds other units, along another one parts of the same; no type tells these apart either
(`unit_axes`).
"""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax import _wide
from shrewjax._branches import run_if
from shrewjax._wide import Wide

AxisName = Hashable | tuple[Hashable, ...]
"""What users may pass as `axis_name`."""
Axes = tuple[Hashable, ...] | None
"""The same, checked; None: to be found."""
Kept = tuple[int, ...]
"""The axes of a leaf that a reduction keeps, in order."""


class UnitAxes(NamedTuple):
    """The mapped axes over which a leaf of units is spread."""

    divided: tuple[Hashable, ...]  # along these, devices hold parts of the same units
    others: tuple[Hashable, ...] | None  # along these, other units; None: what the type of a result by unit says


def is_counted(leaf: Any) -> bool:
    """Whether a leaf takes part: floating and complex ones do; integers, booleans, float0 and keys do not."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def leaf_sums(
    terms: Callable[..., jax.Array],
    leaves: Sequence[Any],
    *per_leaf: Sequence[Any],
    axes: Axes | list[Axes],
    kept: Sequence[Kept] | None = None,
) -> list[jax.Array]:
    """The sum of `terms(leaf, *scalars)` over each leaf's elements and devices; `per_leaf` has the leaves' scalars.

    The mapped axes in a list, one entry a leaf, hold exactly, but for None: whatever a type may say.
    """
    kept = [()] * len(leaves) if kept is None else kept
    partials = [_sum(terms(*of_leaf), keep) for keep, *of_leaf in zip(kept, leaves, *per_leaf, strict=True)]
    return _over_devices(lax.psum, partials, axes)


def leaf_maxima(
    keys: Callable[..., Sequence[jax.Array]], leaves: Sequence[Any], *per_leaf: Sequence[Any], axes: Axes | list[Axes]
) -> list[jax.Array]:
    """The maxima of the non-negative integer arrays `keys(leaf, *scalars)`, likewise: a vector a leaf, 0 where empty.

    Integers, because XLA:CPU's float maximum loses a NaN.
    """
    partials = [_leaf_maxima(keys, *of_leaf) for of_leaf in zip(leaves, *per_leaf, strict=True)]
    return _over_devices(lax.pmax, partials, axes)


def leaf_counts(
    flags: Callable[..., Sequence[jax.Array]], leaves: Sequence[Any], *per_leaf: Sequence[Any], words: int, axes: Axes
) -> list[Wide]:
    """How many elements of each leaf have each of the flags `flags(leaf, *scalars)`, likewise: a vector a leaf.

    In as many words as hold the largest count.
    """
    partials = [_leaf_counts(flags, words, *of_leaf) for of_leaf in zip(leaves, *per_leaf, strict=True)]
    counts = _over_devices(lax.psum, partials, axes)
    return [(x,) if words == 1 else _wide.packed(_wide.carried(x), words) for x in counts]


def joined(leaves: Sequence[Any], axes: Axes) -> list[Any]:
    """The same elements with the smallest leaves of a kind as one vector, where a device holds all of them.

    For reductions of all elements together: a kernel takes longer to compile and to launch than to read a small leaf.
    What is copied so is less than 1/256 of all.
    """
    if _may_be_partitioned():
        return list(leaves)
    left = sum(x.size for x in leaves) // 256
    large: list[Any] = []
    small: dict[Any, list[Any]] = {}
    with_axes = zip(leaves, _axes_to_reduce(leaves, axes), strict=True)
    for x, over in sorted(with_axes, key=lambda pair: pair[0].size):
        left -= x.size
        if left < 0:
            large.append(x)
        else:
            small.setdefault((x.dtype, over), []).append(jnp.ravel(x))
    return large + [jnp.concatenate(of_kind) for of_kind in small.values()]


def sizes(leaves: Sequence[Any], *, axes: Axes | list[Axes], kept: Sequence[Kept] | None = None) -> list[int]:
    """How many elements such a sum has, on all devices: a fact of the types."""
    kept = [()] * len(leaves) if kept is None else kept
    over = _axes_to_reduce(leaves, axes)
    return [
        math.prod(n for a, n in enumerate(x.shape) if a not in keep) * (lax.psum(1, names) if names else 1)
        for x, keep, names in zip(leaves, kept, over, strict=True)
    ]


def unit_zeros(leaf: Any, keep: Kept) -> jax.Array:
    """A float32 zero for each unit of a leaf, sharded as its sums are."""
    return _sum(jnp.zeros_like(leaf, dtype=jnp.float32), keep)


def anywhere(flags: Sequence[jax.Array], axes: tuple[Hashable, ...] = ()) -> list[jax.Array]:
    """Whether each flag is set on any device, so that all devices take the same branch.

    If `axes` name axes of `jax.vmap`, flags are compared along these too.
    """
    mapped, is_tracked = _mapped_axes()
    counts = _over_devices(lax.pmax, [flag.astype(jnp.int32) for flag in flags], () if is_tracked else mapped)
    of_vmap = tuple(a for a in axes if a not in mapped and _is_bound(a))
    return [count > 0 for count in (lax.pmax(counts, of_vmap) if of_vmap else counts)]


def row_sums(rows: Sequence[jax.Array], axes: tuple[Hashable, ...]) -> list[jax.Array]:
    """The sum of the rows of each array, on this device and along mapped axes: one collective for all together."""
    sums = [_sum(x, tuple(range(1, x.ndim))) for x in rows]
    return lax.psum(sums, axes) if is_mapped(axes) else sums


def is_mapped(axes: tuple[Hashable, ...]) -> bool:
    """Whether these are mapped axes here, so that a device has but its own part; an error if only some are."""
    missing = [a for a in axes if not _is_bound(a)]
    if missing and len(missing) < len(axes):
        raise ValueError(
            f"axis_name {axes!r}: {', '.join(map(repr, missing))} is no mapped axis here, where "
            f"{', '.join(map(repr, dict.fromkeys((*_mapped_axes()[0], *(a for a in axes if a not in missing)))))} are"
        )
    return not missing


def is_same_along(x: jax.Array, axes: tuple[Hashable, ...]) -> bool:
    """Whether an array is known to be the same on all devices along one of the mapped axes."""
    return _mapped_axes()[1] and not set(axes) <= varying_axes(x)


def varying_over(x: jax.Array, axes: tuple[Hashable, ...]) -> jax.Array:
    """The array as one that may differ between the devices along mapped axes."""
    missing = tuple(a for a in axes if a not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if _mapped_axes()[1] and missing else x


def demand_agreement(what: str, flag: jax.Array | bool) -> None:
    """An error where devices may decide differently: one would wait for the others in a collective for ever."""
    if isinstance(flag, jax.Array) and varying_axes(flag):
        raise ValueError(
            f"{what} must be the same on every device, and may differ over {', '.join(map(repr, varying_axes(flag)))}"
        )


def demand_axis_name(what: str, axes: Axes) -> None:
    """An error where no type tells whether devices' gradients are the whole ones, and nobody said."""
    mapped, is_tracked = _mapped_axes()
    if mapped and not is_tracked and axes is None:
        raise ValueError(
            f"{what} inside shard_map with check_vma=False, or pmap (mapped axes here: {', '.join(map(repr, mapped))}),"
            " cannot see whether the gradients are a device's own: pass axis_name= with the axes over which they are "
            "still to be summed, or axis_name=() if they already are the same on every device"
        )


def unit_axes(name: str, leaf: Any, keep: Kept, given: Axes | jax.P) -> UnitAxes:
    """Over which mapped axes a leaf is spread, from its type and what the user says: names, or how it is sharded."""
    mapped, is_tracked = _mapped_axes()
    varying = tuple(a for a in mapped if a in varying_axes(leaf))
    types_tell = is_tracked or not mapped
    if isinstance(given, jax.P):
        if len(given) > leaf.ndim:
            raise ValueError(f"axis_name {given} has more entries than leaf {name} of shape {leaf.shape} has axes")
        by_axis = [entry if isinstance(entry, tuple) else (entry,) for entry in given]
        along_units = {m for a, names in enumerate(by_axis) if a in keep for m in names}
        along_parts = {m for a, names in enumerate(by_axis) if a not in keep for m in names}
        divided, others = (tuple(m for m in mapped if m in along) for along in (along_parts, along_units))
        if is_tracked and {*divided, *others} != {*varying}:
            raise ValueError(
                f"axis_name {given} is not how leaf {name} is sharded: by its type it varies over {varying}"
            )
        return UnitAxes(divided, None if types_tell else others)
    if not keep:
        return UnitAxes(_axes_to_reduce([leaf], given)[0], None if types_tell else ())
    names = given or ()
    if not types_tell and not set(mapped) <= set(names):
        unknown = ", ".join(repr(a) for a in mapped if a not in names)
        raise ValueError(
            f"inside shard_map with check_vma=False, or pmap, nothing tells whether leaf {name} of several units has "
            f"other units along the mapped axes {unknown}, or the same ones: use check_vma=True, or pass axis_name= "
            "with a function that returns each leaf's PartitionSpec, or axis_name=jax.P() if every device holds all "
            "of all leaves"
        )
    if given is None and varying:
        raise ValueError(
            f"inside shard_map, leaf {name} of several units varies over the mapped axes "
            f"{', '.join(map(repr, varying))}, and its type does not tell whether there are other units along them, or "
            "other parts of the same: pass axis_name= with a function that returns each leaf's PartitionSpec, or with "
            "the axes along which the units of every leaf are divided, axis_name=() if along none"
        )
    if types_tell:
        return UnitAxes(tuple(a for a in varying if a in names) if is_tracked else names, None)
    return UnitAxes(names, ())


def slice_axes(name: str, leaf: Any, given: Axes) -> tuple[Hashable, ...]:
    """Along which mapped axes devices hold parts of the same slices of a leaf; no type tells, so the user has to."""
    mapped, is_tracked = _mapped_axes()
    varying = tuple(a for a in mapped if a in varying_axes(leaf))
    unknown = varying if is_tracked else mapped
    if given is None and unknown:
        raise ValueError(
            f"inside shard_map or pmap, nothing tells whether leaf {name} has other slices along the mapped axes "
            f"{', '.join(map(repr, unknown))}, or other parts of the same ones: pass sharded_over= with the mapped axes"
            " along which slices are divided, or sharded_over=() if each device holds its slices whole"
        )
    given = given or ()
    missing = [a for a in given if not _is_bound(a)]
    if missing:
        raise ValueError(
            f"sharded_over {given!r}: {', '.join(map(repr, missing))} is no mapped axis here. Name the axes of the "
            "shard_map around this call; under plain jit leave sharded_over out"
        )
    return tuple(a for a in varying if a in given) if is_tracked else given


def all_finite(leaves: Sequence[Any], axes: Axes | list[Axes], kept: Kept = ()) -> jax.Array:
    """Whether no leaf holds a NaN or an infinity, on any device. Shape (); or of the axes that all leaves keep."""
    if not leaves:
        return jnp.ones((), bool)

    def sums_are_finite(terms: Callable[[Any], jax.Array]) -> jax.Array:
        sums = leaf_sums(terms, leaves, axes=axes, kept=[kept] * len(leaves))
        return jnp.all(jnp.stack([jnp.isfinite(s) for s in sums]), axis=0)

    # A sum is what XLA:CPU reduces at memory speed. If it is finite, so is every element; if not, it may have
    # overflowed, and x - x decides, 0 for a finite x, else NaN. (The barrier keeps XLA:GPU from running both always.)
    plain = sums_are_finite(lambda x: x)
    return run_if(~jnp.all(plain), lambda: lax.optimization_barrier(sums_are_finite(lambda x: x - x)), lambda: plain)


def _sum(x: jax.Array, keep: Kept = ()) -> jax.Array:
    return lax.reduce(x, np.zeros((), x.dtype), lax.add, [a for a in range(x.ndim) if a not in keep])


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
    return _wide.carried(jnp.stack(columns))


_LARGEST_COUNT = 2**32 - 1
_MOST_COUNTS = 2**20  # of 12 bits each, in a word


def _reduce_together(operands: Sequence[jax.Array], combine: Callable[..., Any], axes: Sequence[int]) -> list[Any]:
    """Reduces arrays of one shape over the axes, with 0 for an empty one; in one read of the data where possible."""
    zeros = [np.zeros((), x.dtype) for x in operands]
    if len(operands) > 1 and not _may_be_partitioned():
        return list(lax.reduce(tuple(operands), tuple(zeros), _of_each(combine), tuple(axes)))
    # Where it partitions a reduction of several operands, XLA gathers the devices' results, an all-gather for each
    # operand; a single one becomes an all-reduce. (XLA:GPU fuses such siblings, and reads the data once.)
    return [lax.reduce(x, zero, combine, tuple(axes)) for x, zero in zip(operands, zeros, strict=True)]


@cache
def _of_each(combine: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: tuple(combine(x, y) for x, y in zip(a, b, strict=True))


def _may_be_partitioned() -> bool:
    """Whether an array here may be spread over devices by XLA, and so be more than what one of them holds."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() > 1 and (not mesh.manual_axes or set(mesh.manual_axes) != set(mesh.axis_names))


def _over_devices(
    collective: Callable[..., Any], partials: Sequence[jax.Array], axes: Axes | list[Axes]
) -> list[jax.Array]:
    """Combines the devices' partial results: one collective for each set of axes over which leaves vary."""
    groups: dict[tuple[Hashable, ...], dict[Any, list[int]]] = {}
    for i, (x, over) in enumerate(zip(partials, _axes_to_reduce(partials, axes), strict=True)):
        if over:
            groups.setdefault(over, {}).setdefault(jax.typeof(x), []).append(i)
    results = list(partials)
    for over, alike in groups.items():
        stacked = collective([jnp.stack([partials[i] for i in of_kind]) for of_kind in alike.values()], over)
        for of_kind, reduced in zip(alike.values(), stacked, strict=True):
            for place, i in enumerate(of_kind):
                results[i] = reduced[place]
    return results


def _axes_to_reduce(arrays: Sequence[jax.Array], axes: Axes | list[Axes]) -> list[tuple[Hashable, ...]]:
    if isinstance(axes, list):
        by_type = _axes_to_reduce(arrays, None) if None in axes else [()] * len(arrays)
        return [told if given is None else given for given, told in zip(axes, by_type, strict=True)]
    mapped, is_tracked = _mapped_axes()
    if is_tracked:
        return [tuple(a for a in mapped if a in varying_axes(x)) for x in arrays]
    if axes is not None:
        return [axes] * len(arrays)
    if mapped:
        raise ValueError(
            f"inside shard_map with check_vma=False, or pmap (mapped axes here: {', '.join(map(repr, mapped))}), a "
            "leaf's type does not tell whether it is a shard: pass axis_name= with the axes over which the gradients "
            "are sharded, or axis_name=() if every device holds all of them"
        )
    return [()] * len(arrays)


def _mapped_axes() -> tuple[tuple[Hashable, ...], bool]:
    """The mapped axes here, and whether types tell over which of them an array varies."""
    mapped = jax.sharding.get_abstract_mesh().manual_axes
    return mapped, bool(mapped) and bool(varying_axes(lax.axis_index(mapped[0])))


def _is_bound(axis: Hashable) -> bool:
    """Whether collectives over this axis can be called here: it is an axis of `shard_map`, `pmap` or `vmap`."""
    try:
        lax.axis_size(axis)
    except (NameError, ValueError):  # a name that is an int: an axis of an array
        return False
    return True


def newly_varying(new: Any, old: Any) -> str:
    """The axes over which the first varies and the second does not, as messages have them; empty if there are none."""
    over = sorted(varying_axes(new) - varying_axes(old), key=str)
    return repr(tuple(over) if len(over) > 1 else over[0]) if over else ""


def varying_axes(x: jax.Array) -> frozenset[Hashable]:
    """The manual axes over which an array varies, as its type has it."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    if hasattr(aval, "manual_axis_type"):  # jax >= 0.10; None in a shape that says nothing of axes
        return aval.manual_axis_type.varying if aval.manual_axis_type else frozenset()
    return getattr(aval, "vma", frozenset())
