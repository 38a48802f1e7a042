"""TODO."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np

KeyPath = tuple[Any, ...]


Tree = TypeVar("Tree")
"""A pytree that comes back as the type that went in. Its leaves come back as JAX arrays."""


def gradient_leaves(grads: Any) -> tuple[list[KeyPath], list[Any], Any]:
    """The leaves of gradients as arrays, where each is, and the tree's structure."""
    with_paths, treedef = jax.tree.flatten_with_path(grads)
    return [path for path, _ in with_paths], [array_leaf(path, leaf) for path, leaf in with_paths], treedef


def gradient_arrays(grads: Any) -> Any:
    """The same tree with such leaves."""
    return jax.tree.map_with_path(array_leaf, grads)


def parameter_arrays(params: Any) -> Any:
    """Parameters likewise, of whatever dtype."""
    return jax.tree.map_with_path(partial(_as_array, what="parameter"), params)


def same_leaves(grads: Any, gradient_sum: Any, *, compared: Callable[[Any], bool], what: str) -> None:
    """At trace time: gradients have the accumulator's structure and, where both leaves are `compared`, its shapes.

    A gradient of None fits every leaf. Adds no operation to the program.
    """
    given, expected = (
        dict(jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is None)) for tree in (grads, gradient_sum)
    )
    wrong = [f"{leaf_name(path)} is missing" for path in expected.keys() - given.keys()]
    wrong += [
        f"{leaf_name(path)} is unexpected"
        for path, leaf in given.items()
        if leaf is not None and expected.get(path) is None
    ]
    filled = grads
    if not wrong:

        def fill(total: Any, grad: Any) -> Any:
            return grad if grad is not None and compared(grad) and compared(total) else total

        filled = jax.tree.map(fill, gradient_sum, grads)
    chex.assert_trees_all_equal_structs(
        filled,
        gradient_sum,
        custom_message=f"the gradients differ in structure from the {what}: {', '.join(sorted(wrong)) or 'nodes'}",
    )
    chex.assert_trees_all_equal_shapes(
        filled, gradient_sum, custom_message=f"the gradients differ in shape from the {what}"
    )


def leaf_name(path: KeyPath) -> str:
    """How messages name the leaf at `path`; the tree itself may be the leaf."""
    return jax.tree_util.keystr(path) or "(the tree itself)"


def array_leaf(path: KeyPath, leaf: Any) -> Any:
    """A gradient leaf: floating and complex NumPy arrays and Python numbers as JAX has them, the rest as it is."""
    if hasattr(leaf, "dtype") and not _holds_gradients(leaf.dtype):
        raise ValueError(
            f"gradient leaf {leaf_name(path)} must have a dtype with a sign, a zero and a NaN, got {leaf.dtype}: "
            "cast the leaf to float32, or leave it out by optax.masked"
        )
    return _as_array(path, leaf, what="gradient")


def is_gradient(leaf: Any) -> bool:
    """Whether a leaf takes part: floating and complex ones do; integers, booleans, float0 and keys do not."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _as_array(path: KeyPath, leaf: Any, what: str) -> Any:
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        is_foreign = isinstance(leaf, np.ndarray | np.generic) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        return jnp.asarray(leaf) if is_foreign else leaf
    if isinstance(leaf, bool | int | float | complex):
        return jnp.asarray(leaf)
    raise ValueError(f"{what} leaf {leaf_name(path)} must be an array or a number, got {leaf!r}")


def _holds_gradients(dtype: Any) -> bool:
    """Whether a number of the dtype can be negative or NaN: float8_e8m0fnu has no sign, narrower ones no NaN."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return True
    negative, nan = np.asarray([-1.0, np.nan]).astype(dtype)
    return bool(negative == -1 and np.isnan(nan))
