"""TODO."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from shrewjax import _compat

AxisName = Hashable | tuple[Hashable, ...]
"""What users may pass as `sharded_over`."""


Axes = tuple[Hashable, ...] | None
"""The same, checked; None: to be found."""


UnitDims = tuple[int, ...]
"""The axes of a leaf that tell its units apart, in order: a reduction keeps them."""


class UnitSharding(NamedTuple):
    """The mapped axes over which a leaf of units is spread."""

    within: tuple[Hashable, ...]  # along these, devices hold parts of the same units
    across: tuple[Hashable, ...] | None  # along these, other units; None: what the type of a result by unit says


def require_replicated(what: str, flag: jax.Array | bool) -> None:
    """An error where devices may decide differently: one would wait for the others in a collective for ever."""
    if isinstance(flag, jax.Array) and varying_axes(flag):
        raise ValueError(
            f"{what} must be the same on every device, and may differ over {', '.join(map(repr, varying_axes(flag)))}"
        )


def require_sum_over(what: str, axes: Axes) -> None:
    """An error where no type tells whether devices' gradients are the whole ones, and nobody said."""
    mapped, is_tracked = mapped_axes()
    if mapped and not is_tracked and axes is None:
        raise ValueError(
            f"{what} inside shard_map with check_vma=False, or pmap (mapped axes here: {', '.join(map(repr, mapped))}),"
            " cannot see whether the gradients are a device's own: pass sum_over= with the axes over which they are "
            "still to be summed, or sum_over=() if they already are the same on every device"
        )


def unit_axes(name: str, leaf: Any, dims: UnitDims, given: Axes | jax.P) -> UnitSharding:
    """Over which mapped axes a leaf is spread, from its type and what the user says: names, or how it is sharded."""
    mapped, is_tracked = mapped_axes()
    varying = tuple(a for a in mapped if a in varying_axes(leaf))
    types_tell = is_tracked or not mapped
    if isinstance(given, jax.P):
        if len(given) > leaf.ndim:
            raise ValueError(f"sharded_over {given} has more entries than leaf {name} of shape {leaf.shape} has axes")
        by_axis = [entry if isinstance(entry, tuple) else (entry,) for entry in given]
        along_units = {m for a, names in enumerate(by_axis) if a in dims for m in names}
        along_parts = {m for a, names in enumerate(by_axis) if a not in dims for m in names}
        within, across = (tuple(m for m in mapped if m in along) for along in (along_parts, along_units))
        if is_tracked and {*within, *across} != {*varying}:
            raise ValueError(
                f"sharded_over {given} is not how leaf {name} is sharded: by its type it varies over {varying}"
            )
        return UnitSharding(within, None if types_tell else across)
    if not dims:
        return UnitSharding(axes_to_reduce([leaf], given)[0], None if types_tell else ())
    names = given or ()
    if not types_tell and not set(mapped) <= set(names):
        unknown = ", ".join(repr(a) for a in mapped if a not in names)
        raise ValueError(
            f"inside shard_map with check_vma=False, or pmap, nothing tells whether leaf {name} of several units has "
            f"other units along the mapped axes {unknown}, or the same ones: use check_vma=True, or pass sharded_over= "
            "with a function that returns each leaf's PartitionSpec, or sharded_over=jax.P() if every device holds all "
            "of all leaves"
        )
    if given is None and varying:
        raise ValueError(
            f"inside shard_map, leaf {name} of several units varies over the mapped axes "
            f"{', '.join(map(repr, varying))}, and its type does not tell whether there are other units along them, or "
            "other parts of the same: pass sharded_over= with a function that returns each leaf's PartitionSpec, or "
            "with the axes along which the units of every leaf are divided, sharded_over=() if along none"
        )
    if types_tell:
        return UnitSharding(tuple(a for a in varying if a in names) if is_tracked else names, None)
    return UnitSharding(names, ())


def axes_to_reduce(arrays: Sequence[jax.Array], axes: Axes | list[Axes]) -> list[tuple[Hashable, ...]]:
    if isinstance(axes, list):
        by_type = axes_to_reduce(arrays, None) if None in axes else [()] * len(arrays)
        return [told if given is None else given for given, told in zip(axes, by_type, strict=True)]
    mapped, is_tracked = mapped_axes()
    if is_tracked:
        return [tuple(a for a in mapped if a in varying_axes(x)) for x in arrays]
    if axes is not None:
        return [axes] * len(arrays)
    if mapped:
        raise ValueError(
            f"inside shard_map with check_vma=False, or pmap (mapped axes here: {', '.join(map(repr, mapped))}), a "
            "leaf's type does not tell whether it is a shard: pass sharded_over= with the axes over which the "
            "gradients are sharded, or sharded_over=() if every device holds all of them"
        )
    return [()] * len(arrays)


def is_mapped(axes: tuple[Hashable, ...]) -> bool:
    """Whether these are mapped axes here, so that a device has but its own part; an error if only some are."""
    missing = [a for a in axes if not is_bound(a)]
    if missing and len(missing) < len(axes):
        raise ValueError(
            f"sum_over {axes!r}: {', '.join(map(repr, missing))} is no mapped axis here, where "
            f"{', '.join(map(repr, dict.fromkeys((*mapped_axes()[0], *(a for a in axes if a not in missing)))))} are"
        )
    return not missing


def is_replicated_over(x: jax.Array, axes: tuple[Hashable, ...]) -> bool:
    """Whether an array is known to be the same on all devices along one of the mapped axes."""
    return mapped_axes()[1] and not set(axes) <= varying_axes(x)


def as_varying(x: jax.Array, axes: tuple[Hashable, ...]) -> jax.Array:
    """The array as one that may differ between the devices along mapped axes."""
    missing = tuple(a for a in axes if a not in varying_axes(x))
    return _compat.as_varying(x, missing) if mapped_axes()[1] and missing else x


def newly_varying(new: Any, old: Any) -> str:
    """The axes over which the first varies and the second does not, as messages have them; empty if there are none."""
    over = sorted(varying_axes(new) - varying_axes(old), key=str)
    return repr(tuple(over) if len(over) > 1 else over[0]) if over else ""


def varying_axes(x: jax.Array) -> frozenset[Hashable]:
    """The manual axes over which an array varies, as its type has it."""
    aval = x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
    return _compat.varying_axes(aval)


def mapped_axes() -> tuple[tuple[Hashable, ...], bool]:
    """The mapped axes here, and whether types tell over which of them an array varies."""
    mapped = jax.sharding.get_abstract_mesh().manual_axes
    return mapped, bool(mapped) and bool(varying_axes(lax.axis_index(mapped[0])))


def is_bound(axis: Hashable) -> bool:
    """Whether collectives over this axis can be called here: it is an axis of `shard_map`, `pmap` or `vmap`."""
    try:
        lax.axis_size(axis)
    except (NameError, ValueError):  # a name that is an int: an axis of an array
        return False
    return True


def may_be_partitioned() -> bool:
    """Whether an array here may be spread over devices by XLA, and so be more than what one of them holds."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() > 1 and (not mesh.manual_axes or set(mesh.manual_axes) != set(mesh.axis_names))
