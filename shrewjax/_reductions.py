"""Reductions of a list of leaves, one number a leaf, over every device that holds a part of the leaf.

The only place that talks to mapped axes. Under `jit`, sharded arrays need nothing: XLA reduces over their
shards. Inside `shard_map` and `pmap` a leaf is a device's own part, and its sum is only a partial sum:

* with varying-axes tracking (`shard_map`'s default) the leaf's type tells over which axes it varies, and its
  partial result is reduced over exactly those, so a replicated leaf is not counted once a device;
* without tracking (`check_vma=False`, `pmap`) nothing tells, and `axis_name` must.

One thing no type tells: a shard of a gradient (its parts' squares add up) and a gradient that is not reduced
yet (its parts themselves add up first) both vary over the axis. Reduce the latter before it comes here.
"""

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


def is_counted(leaf: Any) -> bool:
    """Whether a leaf takes part: floating and complex ones do; integers, booleans, float0 and keys do not."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def leaf_sums(
    terms: Callable[..., jax.Array], leaves: Sequence[Any], *per_leaf: Sequence[Any], axes: Axes
) -> list[jax.Array]:
    """The sum of `terms(leaf, *scalars)` over each leaf's elements and devices; `per_leaf` has the leaves' scalars."""
    partials = [_sum(terms(*of_leaf)) for of_leaf in zip(leaves, *per_leaf, strict=True)]
    return _over_devices(lax.psum, partials, axes)


def leaf_maxima(
    keys: Callable[..., jax.Array], leaves: Sequence[Any], *per_leaf: Sequence[Any], axes: Axes
) -> list[jax.Array]:
    """The maximum of the non-negative integers `keys(leaf, *scalars)`, likewise; 0 where a leaf is empty.

    Integers, because XLA:CPU's float maximum loses a NaN.
    """
    partials = [_largest(keys(*of_leaf)) for of_leaf in zip(leaves, *per_leaf, strict=True)]
    return _over_devices(lax.pmax, partials, axes)


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


def _sum(x: jax.Array) -> jax.Array:
    return lax.reduce(x, np.zeros((), x.dtype), lax.add, range(x.ndim))


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
    for i, over in enumerate(_axes_to_reduce(partials, axes)):
        groups.setdefault(over, []).append(i)
    results = list(partials)
    for over, members in groups.items():
        if over:
            reduced = collective(jnp.stack([partials[i] for i in members]), over)
            for place, i in enumerate(members):
                results[i] = reduced[place]
    return results


def _axes_to_reduce(partials: Sequence[jax.Array], axes: Axes) -> list[tuple[Hashable, ...]]:
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual and _varying(lax.axis_index(manual[0])):
        return [tuple(a for a in manual if a in _varying(x)) for x in partials]
    if axes is not None:
        return [axes] * len(partials)
    if manual:
        raise ValueError(
            f"inside shard_map with check_vma=False, or pmap (mapped axes here: {', '.join(map(repr, manual))}), a "
            "leaf's type does not tell whether it is a shard: pass axis_name= with the axes over which the gradients "
            "are sharded, or axis_name=() if every device holds all of them"
        )
    return [()] * len(partials)


def _varying(x: jax.Array) -> frozenset[Hashable]:
    """The manual axes over which an array varies, as its type has it."""
    aval = jax.typeof(x)
    if hasattr(aval, "manual_axis_type"):  # jax >= 0.10
        return aval.manual_axis_type.varying
    return getattr(aval, "vma", frozenset())
