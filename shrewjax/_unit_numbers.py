"""The numbers of units, such as norms and scales: stacked into few arrays, and broadcast over a leaf's elements."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shrewjax._mesh import Axes, UnitDims, UnitSharding


def stack_single_units(per_leaf: Sequence[Any], unit_dims: Sequence[UnitDims]) -> list[Any]:
    """Stacks the numbers of all single-unit leaves into vectors, so that arithmetic on them is compiled once.

    The vectors come first, then the numbers of each leaf of several units. Those stay apart because their arrays may be
    sharded.
    """
    single = [x for x, dims in zip(per_leaf, unit_dims, strict=True) if not dims]
    together = [jax.tree.map(lambda *xs: jnp.stack(xs), *single)] if single else []
    return [*together, *(x for x, dims in zip(per_leaf, unit_dims, strict=True) if dims)]


def unstack_units(stacked: Sequence[Any], unit_dims: Sequence[UnitDims]) -> list[Any]:
    """Returns the numbers leaf by leaf: the inverse of `stack_single_units`."""
    count = sum(not dims for dims in unit_dims)
    single = iter([jax.tree.map(lambda x, i=i: x[i], stacked[0]) for i in range(count)])
    several = iter(stacked[1:] if count else stacked)
    return [next(several if dims else single) for dims in unit_dims]


def stacked_axes(axes: Sequence[UnitSharding], unit_dims: Sequence[UnitDims]) -> list[Axes]:
    """Returns, for each entry of `stack_single_units`, the mapped axes along which devices hold other units."""
    single = [of_leaf.across for of_leaf, dims in zip(axes, unit_dims, strict=True) if not dims]
    # The leaves of one unit share an entry. All have the same `across`: None if their types tell it, otherwise no axis.
    return [*single[:1], *(of_leaf.across for of_leaf, dims in zip(axes, unit_dims, strict=True) if dims)]


def broadcast_to_leaf(of_units: jax.Array, leaf: Any, dims: UnitDims) -> jax.Array:
    """Returns the numbers of a leaf's units in a shape that broadcasts over its elements."""
    return of_units if not dims else lax.expand_dims(of_units, [a for a in range(leaf.ndim) if a not in dims])
