"""Parameters that Flax overwrites with their "gradient": the statistics of its fp8 layers, which are no gradients.

The backward pass returns a statistic's new value in the place of its gradient, such as a history of largest magnitudes.
The batch's value is the largest of its micro-batches' values, where a gradient is their mean.
"""

import jax
import jax.numpy as jnp

from shrewjax._base.axes import as_varying, varying_axes
from shrewjax._base.flax_names import is_overwritten
from shrewjax._base.types import AxisNames, Flag, KeyPath, Leaf, PyTree
from shrewjax._numerics.reductions import combined_over


def separated(tree: PyTree) -> tuple[PyTree, list[Leaf]]:
    """Returns a tree with None for each leaf that is overwritten, and a list of those leaves."""
    rest = jax.tree.map_with_path(lambda path, x: None if is_overwritten(path) else x, tree)
    with_paths = jax.tree.leaves_with_path(tree)
    return rest, [x for path, x in with_paths if is_overwritten(path)]


def joined(rest: PyTree, values: list[Leaf], like: PyTree) -> PyTree:
    """Returns the tree of which `separated` made these two. It has the structure of `like`."""
    others, overwritten = iter(jax.tree.leaves(rest)), iter(values)

    def taken(path: KeyPath, _: Leaf) -> Leaf:
        return next(overwritten if is_overwritten(path) else others)

    return jax.tree.map_with_path(taken, like)


def init(like: list[Leaf]) -> list[jax.Array]:
    def lowest(x: Leaf) -> jax.Array:
        return as_varying(jnp.full(x.shape, -jnp.inf, x.dtype), tuple(varying_axes(x)))

    return [lowest(x) for x in like]


def update(old: list[jax.Array], new: list[jax.Array], is_kept: Flag) -> list[jax.Array]:
    return jax.tree.map(lambda x, y: jnp.where(is_kept, jnp.maximum(x, y), x), old, new)


def finalize(values: list[jax.Array], old: list[Leaf], axes: AxisNames) -> list[jax.Array]:
    """Returns the batch's values, which are over all devices along `axes`. They stay if no micro-batch is kept."""
    over_devices = combined_over(axes, ["max"] * len(values), values)
    return jax.tree.map(lambda x, y: jnp.where(x == -jnp.inf, y, x), over_devices, old)
