"""Flax's own names: what a leaf or an argument of Flax is, without an import, because Flax may not be installed.

Another Flax changes this module and `shrewjax.flax` alone. Messages elsewhere may name Flax.
"""

import sys
from collections.abc import Iterator
from typing import Any

import jax

from shrewjax._base.types import Argument, KeyPath, Leaf, PyTree


def is_overwritten(path: KeyPath) -> bool:
    """Returns whether a leaf is a statistic of an fp8 layer, whose "gradient" is its new value."""
    return any(getattr(key, "key", None) == "_overwrite_with_gradient" for key in path)


def is_variable(x: Leaf) -> bool:
    return hasattr(type(x), "raw_value")


def is_of_nnx(x: Argument) -> bool:
    return type(x).__module__.startswith("flax.nnx")


def changing_state(tree: PyTree, *, is_model: bool) -> Iterator[tuple[KeyPath, str]]:
    """Yields each NNX object with state that a call changes, by its path, and the type of such a variable.

    That is the count of a key, and in a model also a batch statistic.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None:
        return

    def is_object(x: Leaf) -> bool:
        is_node: bool = nnx.graph.is_graph_node(x)
        return is_node and not isinstance(x, nnx.State | nnx.Variable)

    kinds = (nnx.RngState, nnx.BatchStat) if is_model else nnx.RngState
    for path, x in jax.tree.leaves_with_path(tree, is_leaf=is_object):
        nodes = nnx.iter_graph(x) if is_object(x) else ()
        found = next((type(y).__name__ for _, y in nodes if isinstance(y, kinds)), None)
        if found:
            yield path, found
