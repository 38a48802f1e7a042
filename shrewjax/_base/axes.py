"""Mapped axes: which there are, over which of them an array varies, and along which of them a reduction must run.

A mapped axis is a mesh axis of `jax.shard_map` or `jax.pmap`, where an array is one device's part. A named axis of
`jax.vmap` is used only if the caller names it. JAX's types are *tracked* if they record over which mapped axes an array
varies. `shard_map` tracks by default; `check_vma=False` and `pmap` do not. Under `jax.jit` alone no axis is mapped, and
XLA reduces over shards by itself.

A leaf that is one unit is reduced over the axes of its type if types are tracked, and over those in `sharded_over`
otherwise. A leaf of several units, such as stacked layers, needs two answers (`UnitSharding`). Along some mapped axes
devices hold parts of the same unit, along others they hold other units. `unit_axes` finds both:

================  =====================================  ======================================  =====================
`sharded_over`    mapped, tracked                        mapped, untracked                       not mapped
================  =====================================  ======================================  =====================
()                no axis: every device has a gradient   no axis                                 no axis
                  of its own
None              an error if the leaf varies;           an error                                no axis
                  otherwise no axis
names             `within`: the named axes over which    `within`: the names, an error unless    `within`: the names,
                  the leaf varies; `across`: the rest,   all mapped axes are among them;         such as axes of vmap
                  read from the result's type            `across`: none
PartitionSpec     `within`: axes in the entries of       `within` and `across`: axes in the      no axis
                  dimensions inside a unit; `across`:    entries of dimensions inside a unit,
                  read from the result's type; an error  and of dimensions that index units
                  if the spec is not the leaf's type
================  =====================================  ======================================  =====================

`varying_axes`, `partitions` and `_pcast` hide spellings that differ between JAX's versions. Each names the version that
brought today's spelling. Delete the older one when that version is the oldest supported.
"""

import contextlib
import math
from collections.abc import Hashable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax import lax

from shrewjax._base.types import Axes, AxisNames, Function, Leaf

UnitDims = tuple[int, ...]
"""The dimensions of a leaf that index its units, in increasing order. A reduction by unit keeps them."""


class UnitSharding(NamedTuple):
    within: AxisNames  # along these, devices hold parts of the same units
    across: Axes  # along these, other units; None: read from the per-unit result's type


def are_whole(given: Axes | jax.P | Function) -> bool:
    """Returns whether `sharded_over` is (): each device has whole gradients of its own, such as a model of its own.

    `jax.P()` says that all devices have the same. In JAX 0.8 it is equal to ().
    """
    return isinstance(given, tuple) and not given


def unit_axes(name: str, leaf: Leaf, dims: UnitDims, given: Axes | jax.P) -> UnitSharding:
    """Returns the mapped axes over which a leaf is sharded. `given` is the user's `sharded_over` for this leaf.

    Raises if the type and `given` leave it open.
    """
    mapped, is_tracked = mapped_axes()
    varying = tuple(a for a in mapped if a in varying_axes(leaf))
    across = () if mapped and not is_tracked else None
    if isinstance(given, jax.P):
        return _axes_of_spec(name, leaf, dims, given)
    if not dims:
        return UnitSharding(axes_to_reduce([leaf], given)[0], across)
    names = given or ()
    unknown = [a for a in (varying if is_tracked else mapped) if a not in names]
    if unknown and (given is None or not is_tracked):
        raise ValueError(
            f"cannot tell how leaf {name} is sharded over {', '.join(map(repr, unknown))}. Pass sharded_over=fn, where "
            "fn(name, leaf) returns its PartitionSpec. Pass () for a model on each device"
        )
    within = tuple(a for a in varying if a in names) if is_tracked else names
    return UnitSharding(within, across)


def _axes_of_spec(name: str, leaf: Leaf, dims: UnitDims, spec: jax.P) -> UnitSharding:
    """Returns the mapped axes in a leaf's PartitionSpec: the last row of the table."""
    mapped, is_tracked = mapped_axes()
    varying = tuple(a for a in mapped if a in varying_axes(leaf))
    if len(spec) > leaf.ndim:
        raise ValueError(
            f"sharded_over {spec} has more entries than leaf {name} of shape {leaf.shape} has dimensions"
        )
    dimension = {m: a for a, names in enumerate(axes_by_dimension(spec)) for m in names}
    along = [m for m in mapped if m in dimension]
    within = tuple(m for m in along if dimension[m] not in dims)
    across = tuple(m for m in along if dimension[m] in dims)
    if is_tracked and {*within, *across} != {*varying}:
        raise ValueError(
            f"sharded_over {spec} is not how leaf {name} is sharded: by its type it varies over {varying}"
        )
    return UnitSharding(within, across if mapped and not is_tracked else None)


def whole_shape(leaf: Leaf, given: Axes | jax.P) -> tuple[int, ...] | None:
    """Returns the shape of a leaf over all devices; None if nothing tells it. `given` is as in `unit_axes`."""
    mapped, is_tracked = mapped_axes()
    if not (varying_axes(leaf) if is_tracked else mapped):
        return leaf.shape
    if not isinstance(given, jax.P):
        return None
    by_dimension = [*axes_by_dimension(given), *[()] * leaf.ndim]

    def whole(n: int, names: AxisNames) -> int:
        return n * math.prod(lax.axis_size(m) for m in names if m in mapped)

    return tuple(map(whole, leaf.shape, by_dimension))


def slice_axes(name: str, leaf: Leaf, given: Axes) -> AxisNames:
    """Returns the mapped axes along which devices hold parts of the same slices of a leaf."""
    mapped, is_tracked = mapped_axes()
    varying = tuple(a for a in mapped if a in varying_axes(leaf))
    unknown = varying if is_tracked else mapped
    if given is None and unknown:
        raise ValueError(
            f"cannot tell whether slices of leaf {name} are divided along {', '.join(map(repr, unknown))}. Pass "
            "sharded_over= with their axes, () for none"
        )
    given = given or ()
    missing = [a for a in given if not is_bound(a)]
    if missing:
        raise ValueError(
            f"sharded_over {given!r}: {', '.join(map(repr, missing))} is no mapped axis. Name axes of the "
            "jax.shard_map around this call"
        )
    return tuple(a for a in varying if a in given) if is_tracked else given


def axes_to_reduce(arrays: Sequence[jax.Array], axes: Axes | list[Axes]) -> list[AxisNames]:
    """Returns, for each array, the mapped axes along which devices hold parts of it.

    =====================  =================================================================
    `axes`                 result
    =====================  =================================================================
    ()                     no axis: each device has arrays of its own, as of independent models
    names                  the axes of the array's type if types are tracked, otherwise the names
    None                   the axes of the array's type; an error if there are mapped axes and no types
    several of these       the entry of each array, and None as above
    =====================  =================================================================
    """
    if axes == ():
        return [()] * len(arrays)
    # Several entries, one for each array. The name of a mapped axis is never a tuple or None.
    if any(a is None or isinstance(a, tuple) for a in axes or ()):
        each: list[Any] = [*(axes or ())]
        by_type = axes_to_reduce(arrays, None) if None in each else [()] * len(arrays)
        pairs = zip(each, by_type, strict=True)
        return [told if given is None else given for given, told in pairs]
    mapped, is_tracked = mapped_axes()
    if is_tracked:
        return [tuple(a for a in mapped if a in varying_axes(x)) for x in arrays]
    if axes is not None:
        return [tuple(axes)] * len(arrays)
    if mapped:
        raise ValueError(
            f"cannot tell whether gradients are sharded over {', '.join(map(repr, mapped))}. Pass sharded_over= with "
            "their axes, () for none"
        )
    return [()] * len(arrays)


def require_replicated(what: str, x: jax.Array) -> None:
    """Raises if `x` may differ between devices, because a collective deadlocks if some devices skip it."""
    if varying_axes(x):
        raise ValueError(
            f"{what} must be the same on every device, got one that may differ over "
            f"{', '.join(map(repr, varying_axes(x)))}"
        )


def require_sum_over(what: str, axes: Axes) -> None:
    """Raises if types do not record whether the gradients are reduced, and `sum_over` is missing."""
    mapped, is_tracked = mapped_axes()
    if mapped and not is_tracked and axes is None:
        raise ValueError(
            f"{what} cannot tell whether gradients are already summed over {', '.join(map(repr, mapped))}. Pass "
            "sum_over= with the axes that remain, () for none. Pass sharded_over=, too, if devices hold parts of a "
            "model"
        )


def is_mapped(axes: AxisNames) -> bool:
    """Returns whether these axes are mapped here, so that a device has only its own part. Raises if only some are."""
    missing = [a for a in axes if not is_bound(a)]
    if missing and len(missing) < len(axes):
        raise ValueError(
            f"sum_over={axes!r} contains {', '.join(map(repr, missing))}, which is not mapped. Name it in "
            "axis_names= of the jax.shard_map, too"
        )
    return not missing


def is_bound(axis: Hashable) -> bool:
    """Returns whether collectives over this axis can be called here: an axis of `shard_map`, `pmap` or `vmap`."""
    try:
        lax.axis_size(axis)
    except (NameError, ValueError):  # the latter for an int, which may be a dimension
        return False
    return True


def device_index(axes: AxisNames) -> jax.Array:
    return lax.axis_index(axes)


def replicated_axes(x: jax.Array, axes: AxisNames) -> AxisNames:
    """Returns those of the axes along which, by its tracked type, `x` is the same on all devices."""
    is_tracked = mapped_axes()[1]
    return tuple(a for a in axes if is_tracked and a not in varying_axes(x))


def sum_over_others(axes: AxisNames, reduced: AxisNames) -> str:
    """Returns the remedy, as text, if some of the axes in `sum_over=axes` are already reduced."""
    others = tuple(a for a in axes if a not in reduced)
    return f"pass sum_over={others!r}" if others else "leave out sum_over"


def as_varying(x: jax.Array, axes: AxisNames) -> jax.Array:
    """Returns `x` with a type that varies over all of these mapped axes. Without tracked types: `x` itself."""
    missing = tuple(a for a in axes if a not in varying_axes(x))
    return _pcast(x, missing) if mapped_axes()[1] and missing else x


def newly_varying(new: Leaf, old: Leaf) -> str:
    """Returns the axes over which `new` varies and `old` does not, as text for a message. Empty if there are none."""
    over = sorted(varying_axes(new) - varying_axes(old), key=str)
    return repr(tuple(over) if len(over) > 1 else over[0]) if over else ""


def axes_beside(leaves: Sequence[Leaf], local: AxisNames) -> list[Axes]:
    """Returns the mapped axes, except `local`, over which each leaf varies. Untracked leaves count as whole."""
    beside = [a for a in mapped_axes()[0] if a not in local]
    return [tuple(a for a in beside if a in varying_axes(x)) for x in leaves]


@contextlib.contextmanager
def as_on_one_device(axes: AxisNames) -> Iterator[None]:
    """Inside of it, a device's part along these mapped axes counts as all there is, so nothing is reduced over them.

    It lasts while JAX traces a function. A function jitted by itself, which JAX has traced already, may be traced again
    or not. Its program is the same, but then no check that asks for `row_axes` runs.
    """
    token = _not_reduced.set(axes)
    try:
        yield
    finally:
        _not_reduced.reset(token)


_not_reduced: ContextVar[AxisNames] = ContextVar("_not_reduced", default=())


def row_axes() -> AxisNames:
    """Returns the mapped axes along which each device's result is a row, as `as_on_one_device` has them."""
    return _not_reduced.get()


def mapped_axes() -> tuple[AxisNames, bool]:
    """Returns the mapped axes over which devices may have other parts, and whether types are tracked."""
    manual = jax.sharding.get_abstract_mesh().manual_axes
    mapped = tuple(a for a in manual if a not in _not_reduced.get())
    # A device's index along an axis varies over that axis. Its type shows this only if types are tracked.
    return mapped, bool(mapped) and bool(varying_axes(lax.axis_index(mapped[0])))


def varying_axes(x: Leaf) -> frozenset[Hashable]:
    """Returns the mapped axes over which an array, or a type, varies. Empty if types are not tracked."""
    aval = type_of(x)
    # `manual_axis_type`: JAX 0.10.0. It is None for a `jax.ShapeDtypeStruct` without mapped axes.
    if hasattr(aval, "manual_axis_type"):
        return aval.manual_axis_type.varying if aval.manual_axis_type else frozenset()
    return getattr(aval, "vma", None) or frozenset()


def type_of(x: Leaf) -> Any:
    is_type = isinstance(x, jax.ShapeDtypeStruct | jax.core.ShapedArray)
    return x if is_type else jax.typeof(x)


def axes_by_dimension(spec: Any) -> list[AxisNames]:
    """Returns the mesh axes in each entry of a `PartitionSpec`, which has no entry for the last dimensions if none."""
    entries = partitions(spec)
    return [x if isinstance(x, tuple) else () if x is None else (x,) for x in entries]


def partitions(spec: Any) -> tuple[Any, ...]:
    """Returns the entries of a `PartitionSpec`. `partitions`: JAX 0.10.2."""
    return spec.partitions if hasattr(spec, "partitions") else tuple(spec)


def _pcast(x: jax.Array, axes: AxisNames) -> jax.Array:
    """Returns `x` with a type that also varies over these mapped axes. `jax.lax.pcast`: JAX 0.9.0."""
    spelling: Any = lax
    if hasattr(lax, "pcast"):
        return spelling.pcast(x, axes, to="varying")
    return spelling.pvary(x, axes)
