"""Parameters that Flax overwrites with their "gradient": the statistics of its fp8 layers, which are no gradients.

The backward pass returns a statistic's new value in the place of its gradient, such as a history of largest magnitudes.
The batch's value is the largest of its micro-batches' values, where a gradient is their mean.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from shrewjax._base.mesh import as_varying, varying_axes
from shrewjax._base.trees import is_overwritten
from shrewjax._base.types import AxisNames, Flag, Leaf, PyTree
from shrewjax._numerics.reductions import combined_over


def split(tree: PyTree) -> tuple[PyTree, list[Leaf]]:
    """Returns a tree with None for each leaf that is overwritten, and a list of those leaves."""
    rest = jax.tree.map_with_path(lambda path, x: None if is_overwritten(path) else x, tree)
    return rest, [x for path, x in jax.tree.leaves_with_path(tree) if is_overwritten(path)]


def joined(rest: PyTree, values: Sequence[Leaf], like: PyTree) -> PyTree:
    """Returns the tree of which `split` made these two. It has the structure of `like`."""
    others, overwritten = iter(jax.tree.leaves(rest)), iter(values)
    return jax.tree.map_with_path(
        lambda path, _: next(overwritten if is_overwritten(path) else others), like
    )


def least(like: Sequence[Leaf]) -> list[jax.Array]:
    return [as_varying(jnp.full(x.shape, -jnp.inf, x.dtype), tuple(varying_axes(x))) for x in like]


def larger(values: Sequence[jax.Array], new: Sequence[jax.Array], kept: Flag) -> list[jax.Array]:
    return [jnp.where(kept, jnp.maximum(x, y), x) for x, y in zip(values, new, strict=True)]


def of_batch(values: Sequence[jax.Array], old: Sequence[Leaf], axes: AxisNames) -> list[jax.Array]:
    """Returns the batch's values, which are over all devices along `axes`. They stay if no micro-batch is kept."""
    over_devices = combined_over(axes, ["max"] * len(values), values)
    return [jnp.where(x == -jnp.inf, y, x) for x, y in zip(over_devices, old, strict=True)]
