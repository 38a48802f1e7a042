"""Reductions of a list of leaves, one number a leaf or unit, over every device that holds a part of it.

The only place that talks to mapped axes. Under `jit`, sharded arrays need nothing: XLA reduces over their
shards. Inside `shard_map` and `pmap` a leaf is a device's own part, and its sum is only a partial sum:

* with varying-axes tracking (`shard_map`'s default) the leaf's type tells over which axes it varies, and its
  partial result is reduced over exactly those, so a replicated leaf is not counted once a device;
* without tracking (`check_vma=False`, `pmap`) nothing tells, and `axis_name` must.

One thing no type tells: a shard of a gradient (its parts' squares add up) and a gradient that is not reduced
yet (its parts themselves add up first) both vary over the axis. Reduce the latter before it comes here.

A leaf may be many units, such as stacked layers: then some of its axes are `kept`, and its result has their sizes.
Along a kept axis a shard holds other units, along another one parts of the same; no type tells these apart either.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

AxisName = Hashable | tuple[Hashable, ...]
"""What users may pass as `axis_name`."""
Axes = tuple[Hashable, ...] | None
"""The same, checked; None: to be found."""
Kept = tuple[int, ...]
"""The axes of a leaf that a reduction keeps, in order."""


def is_counted(leaf: Any) -> bool:
    """Whether a leaf takes part: floating and complex ones do; integers, booleans, float0 and keys do not."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def leaf_sums(
    terms: Callable[..., jax.Array],
    leaves: Sequence[Any],
    *per_leaf: Sequence[Any],
    axes: Axes,
    kept: Sequence[Kept] | None = None,
) -> list[jax.Array]:
    """The sum of `terms(leaf, *scalars)` over each leaf's elements and devices; `per_leaf` has the leaves' scalars."""
    kept = [()] * len(leaves) if kept is None else kept
    partials = [_sum(terms(*of_leaf), keep) for keep, *of_leaf in zip(kept, leaves, *per_leaf, strict=True)]
    return _over_devices(lax.psum, partials, axes)


def leaf_maxima(
    keys: Callable[..., jax.Array], leaves: Sequence[Any], *per_leaf: Sequence[Any], axes: Axes
) -> list[jax.Array]:
    """The maximum of the non-negative integers `keys(leaf, *scalars)`, likewise; 0 where a leaf is empty.

    Integers, because XLA:CPU's float maximum loses a NaN.
    """
    partials = [_largest(keys(*of_leaf)) for of_leaf in zip(leaves, *per_leaf, strict=True)]
    return _over_devices(lax.pmax, partials, axes)


def sizes(leaves: Sequence[Any], *, axes: Axes, kept: Sequence[Kept] | None = None) -> list[int]:
    """How many elements such a sum has, on all devices: a fact of the types."""
    kept = [()] * len(leaves) if kept is None else kept
    over = _axes_to_reduce(leaves, [bool(keep) for keep in kept], axes)
    return [
        math.prod(n for a, n in enumerate(x.shape) if a not in keep) * (lax.psum(1, names) if names else 1)
        for x, keep, names in zip(leaves, kept, over, strict=True)
    ]


def unit_zeros(leaf: Any, keep: Kept) -> jax.Array:
    """A float32 zero for each unit of a leaf, sharded as its sums are."""
    return _sum(jnp.zeros_like(leaf, dtype=jnp.float32), keep)


def anywhere(flag: jax.Array) -> jax.Array:
    """Whether a flag is set on any device: what a branch of all devices can hang on where units differ. Shape ()."""
    return _over_devices(lax.pmax, [flag.astype(jnp.int32)], ())[0] > 0


def all_finite(leaves: Sequence[Any], axes: Axes) -> jax.Array:
    """Whether no leaf holds a NaN or an infinity, on any device. Shape ()."""
    if not leaves:
        return jnp.ones((), bool)

    def sums_are_finite(terms: Callable[[Any], jax.Array]) -> jax.Array:
        return jnp.all(jnp.stack([jnp.isfinite(s) for s in leaf_sums(terms, leaves, axes=axes)]))

    # A sum is what XLA:CPU reduces at memory speed. If it is finite, so is every element; if not, it may have
    # overflowed, and x - x decides, 0 for a finite x, else NaN. (The barrier keeps XLA:GPU from running both always.)
    plain = sums_are_finite(lambda x: x)
    return lax.cond(plain, lambda: plain, lambda: lax.optimization_barrier(sums_are_finite(lambda x: x - x)))


def _sum(x: jax.Array, keep: Kept = ()) -> jax.Array:
    return lax.reduce(x, np.zeros((), x.dtype), lax.add, [a for a in range(x.ndim) if a not in keep])


def _largest(keys: jax.Array) -> jax.Array:
    # XLA:CPU writes out what a reduction of a single operand reads; with a second, different operand it does not.
    zero = jnp.zeros((), keys.dtype)

    def combine(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
        return lax.max(a[0], b[0]), lax.bitwise_or(a[1], b[1])

    other = lax.shift_right_logical(keys, jnp.ones_like(keys))
    return lax.reduce((keys, other), (zero, zero), combine, range(keys.ndim))[0]


def _over_devices(collective: Callable[..., Any], partials: Sequence[jax.Array], axes: Axes) -> list[jax.Array]:
    """Combines the devices' partial results: one collective for each set of axes over which leaves vary."""
    groups: dict[tuple[Hashable, ...], list[int]] = {}
    for i, over in enumerate(_axes_to_reduce(partials, [x.ndim > 0 for x in partials], axes)):
        groups.setdefault(over, []).append(i)
    results = list(partials)
    for over, members in groups.items():
        if over:
            scalars = [i for i in members if partials[i].ndim == 0]
            others = [i for i in members if partials[i].ndim > 0]
            packed = [jnp.stack([partials[i] for i in scalars])] if scalars else []
            reduced = collective([*packed, *(partials[i] for i in others)], over)
            for place, i in enumerate(scalars):
                results[i] = reduced[0][place]
            for i, of_units in zip(others, reduced[len(packed) :], strict=True):
                results[i] = of_units
    return results


def _axes_to_reduce(arrays: Sequence[jax.Array], have_units: Sequence[bool], axes: Axes) -> list[tuple[Hashable, ...]]:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual and _varying(lax.axis_index(manual[0])):
        varying = [tuple(a for a in manual if a in _varying(x)) for x in arrays]
        return [_dividing(v, axes) if many else v for v, many in zip(varying, have_units, strict=True)]
    if axes is not None:
        return [axes] * len(arrays)
    if manual:
        raise ValueError(
            f"inside shard_map with check_vma=False, or pmap (mapped axes here: {', '.join(map(repr, manual))}), a "
            "leaf's type does not tell whether it is a shard: pass axis_name= with the axes over which the gradients "
            "are sharded, or axis_name=() if every device holds all of them"
        )
    return [()] * len(arrays)


def _dividing(varying: tuple[Hashable, ...], axes: Axes) -> tuple[Hashable, ...]:
    """Of the axes over which a leaf of several units varies, those along which the units are divided."""
    if varying and axes is None:
        raise ValueError(
            f"inside shard_map, a leaf of several units varies over the mapped axes {', '.join(map(repr, varying))}, "
            "and its type does not tell whether other units are on other devices, or other parts of them: pass "
            "axis_name= with the axes along which units are divided, axis_name=() if none is"
        )
    return tuple(a for a in varying if a in (axes or ()))


def _varying(x: jax.Array) -> frozenset[Hashable]:
    """The manual axes over which an array varies, as its type has it."""
    aval = jax.typeof(x)
    if hasattr(aval, "manual_axis_type"):  # jax >= 0.10
        return aval.manual_axis_type.varying
    return getattr(aval, "vma", frozenset())
