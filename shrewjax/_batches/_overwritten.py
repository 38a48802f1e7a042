"""Parameters that Flax overwrites with their "gradient": the statistics of its fp8 layers, which are no gradients.

The backward pass returns a statistic's new value in the place of its gradient, such as a history of largest magnitudes.
The batch's value is the largest of its micro-batches' values, as of a leaf of the aux with the name "max" (`_aux`).
"""

import jax
import jax.numpy as jnp

from shrewjax._base.flax_names import is_overwritten
from shrewjax._base.types import KeyPath, Leaf, PyTree


def separated(tree: PyTree) -> tuple[PyTree, list[Leaf]]:
    """Returns a tree with None for each leaf that is overwritten, and a list of those leaves."""
    kept = lambda path, x: None if is_overwritten(path) else x  # noqa: E731
    rest = jax.tree.map_with_path(kept, tree)
    with_paths = jax.tree.leaves_with_path(tree)
    return rest, [x for path, x in with_paths if is_overwritten(path)]


def joined(rest: PyTree, values: list[Leaf], like: PyTree) -> PyTree:
    """Returns the tree of which `separated` made these two. It has the structure of `like`."""
    others, overwritten = iter(jax.tree.leaves(rest)), iter(values)

    def taken(path: KeyPath, _: Leaf) -> Leaf:
        return next(overwritten if is_overwritten(path) else others)

    return jax.tree.map_with_path(taken, like)


def finalize(values: list[jax.Array], old: list[Leaf]) -> list[jax.Array]:
    """Returns the batch's values, of those that are the largest. They stay if no micro-batch is kept."""
    return [jnp.where(x == -jnp.inf, y, x) for x, y in zip(values, old, strict=True)]
