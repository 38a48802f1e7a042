"""Trees of gradients: their leaves as arrays, which leaves are clipped and summed, and how messages name a leaf.

Rules take a tree apart with `gradient_leaves` and treat the leaves for which `is_gradient` is true. All other leaves,
such as integers, float0 and keys, pass through.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from shrewjax._base import flax_names, mesh
from shrewjax._base.types import (
    Argument,
    DType,
    KeyPath,
    Leaf,
    PyTree,
    Tree,
)


def gradient_leaves(grads: PyTree) -> tuple[list[KeyPath], list[Leaf], Any]:
    """Returns the key paths of a tree of gradients, its leaves as arrays, and its structure.

    Raises if a sparse array may have an element in several parts, because rules would take each part for an element.
    """
    for path, x in jax.tree.leaves_with_path(grads, is_leaf=_may_repeat):
        if _may_repeat(x):
            raise ValueError(
                f"gradient leaf {leaf_name(path)} must have each index once, got {type(x).__name__} with "
                "unique_indices=False. Call its sum_duplicates(nse=x.nse)"
            )
    with_paths, treedef = jax.tree.flatten_with_path(grads)
    leaves = [array_leaf(path, leaf) for path, leaf in with_paths]
    return [path for path, _ in with_paths], leaves, treedef


def floating(grads: PyTree) -> list[Leaf]:
    """Returns the leaves of a tree of gradients that rules measure and clip, as arrays."""
    return [x for x in gradient_leaves(grads)[1] if is_gradient(x)]


def map_floating(function: Callable[[Leaf], Leaf], grads: Tree) -> Tree:
    """Returns the tree with `function` of each of those leaves. All other leaves pass through."""
    _, leaves, structure = gradient_leaves(grads)
    return structure.unflatten(function(x) if is_gradient(x) else x for x in leaves)


def _may_repeat(x: PyTree) -> bool:
    """Returns whether `x` is one of JAX's sparse arrays, such as BCOO, in which an index may stand twice."""
    return _is_sparse(x) and getattr(x, "unique_indices", None) is False


def _is_sparse(x: PyTree) -> bool:
    return hasattr(type(x), "todense")  # a container may have any attribute


def gradient_arrays(grads: PyTree) -> PyTree:
    """Returns the tree of gradients with its leaves as arrays, which may still have to be summed over devices.

    Raises for a sparse array, because a sum of two has the indices of neither.
    """
    for path, x in jax.tree.leaves_with_path(grads, is_leaf=_is_sparse):
        if _is_sparse(x):
            raise ValueError(
                f"gradient leaf {leaf_name(path)} must be dense, got {type(x).__name__}. Call its todense()"
            )
    return jax.tree.map_with_path(_as_gradient, grads)


def parameter_arrays(params: PyTree) -> PyTree:
    """Returns the tree of parameters with its leaves as arrays. Any dtype is accepted."""
    return jax.tree.map_with_path(partial(_as_array, what="parameter"), params)


def is_zero_tangent(tangent: Leaf) -> bool:
    """Returns whether a rule with symbolic zeros has no tangent to compute here."""
    return isinstance(tangent, SymbolicZero) or tangent.dtype == jax.dtypes.float0


def replaced(values: Sequence[Leaf], places: Sequence[int], new: Sequence[Leaf]) -> list[Leaf]:
    """Returns values, with new ones at these places."""
    by_place = dict(zip(places, new, strict=True))
    return [by_place.get(i, x) for i, x in enumerate(values)]


def shown(value: Argument) -> str:
    """Returns a value for a message, without the numbers of arrays and with at most 100 characters."""
    arrays = [x for x in jax.tree.leaves(value) if hasattr(x, "dtype") and np.ndim(x)]
    if len(arrays) == 1 and arrays[0] is value:
        return f"an array of shape {np.shape(value)} and dtype {value.dtype}"
    if arrays:
        return f"{type(value).__name__} with {len(arrays)} array{'' if len(arrays) == 1 else 's'}"
    return shortened(repr(value))


def shortened(text: str, at_most: int = 100) -> str:
    return text if len(text) <= at_most else f"{text[: at_most - 4]} ..."


def leaf_name(path: KeyPath) -> str:
    """Returns the name of the leaf at `path` for messages. The whole tree may be one leaf."""
    return jax.tree_util.keystr(path) or "(the tree itself)"


def short_leaf_name(path: KeyPath) -> str:
    """Returns the name of the leaf at `path` for logs and for users' functions, such as "dense/kernel"."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or leaf_name(path)


def leaf_names(tree: PyTree) -> list[str]:
    """Returns the leaves' names for logs; as in messages if the short ones are not unique."""
    paths = [path for path, _ in jax.tree.leaves_with_path(tree)]
    names = [*map(short_leaf_name, paths)]
    return names if len({*names}) == len(names) else [*map(leaf_name, paths)]


def array_leaf(path: KeyPath, leaf: Leaf) -> Leaf:
    """Returns a gradient leaf as an array: Python numbers and floating or complex NumPy arrays become JAX arrays.

    Other arrays are returned as they are. A leaf that is `unreduced` by its type is summed over devices. Raises if the
    leaf is no array or number, if its dtype cannot hold gradients, or if its place says that it is none.
    """
    return mesh.summed(_as_gradient(path, leaf))


def _as_gradient(path: KeyPath, leaf: Leaf) -> Leaf:
    if flax_names.is_overwritten(path):
        raise ValueError(
            f'gradient leaf {leaf_name(path)} is a value that Flax writes. Pass grads["params"] alone, as '
            "shrewjax.flax.TrainState does"
        )
    if hasattr(leaf, "dtype") and not _holds_gradients(leaf.dtype):
        raise ValueError(
            f"gradient leaf {leaf_name(path)} must have a dtype with sign and NaN, got {leaf.dtype}. Cast it to "
            "float32"
        )
    return _as_array(path, leaf, what="gradient")


def is_gradient(leaf: Leaf) -> bool:
    """Returns whether a leaf is clipped and summed: true for floating and complex leaves alone."""
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def is_typed_key(leaf: Leaf) -> bool:
    """Returns whether a leaf, or its type, is a PRNG key or an array of keys."""
    return jnp.issubdtype(getattr(leaf, "dtype", np.float64), jax.dtypes.prng_key)


def _as_array(path: KeyPath, leaf: Leaf, what: str) -> Leaf:
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        is_numpy = isinstance(leaf, np.ndarray | np.generic)
        return jnp.asarray(leaf) if is_numpy and is_gradient(leaf) else leaf
    if isinstance(leaf, bool | int | float | complex):
        return jnp.asarray(leaf)
    raise ValueError(
        f"{what} leaf {leaf_name(path)} must be an array or a number, got {shown(leaf)}. Pass the arrays alone. Of "
        "a model, take params, static = eqx.partition(model, eqx.is_inexact_array), and eqx.combine(params, static)"
    )


def _holds_gradients(dtype: DType) -> bool:
    """Returns whether a dtype has negative numbers and NaN: float8_e8m0fnu has no sign, 4- and 6-bit floats no NaN."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return True
    negative, nan = np.asarray([-1.0, np.nan]).astype(dtype)
    return bool(negative == -1 and np.isnan(nan))


def require_no_device_rows(updates: PyTree, params: PyTree) -> None:
    """Raises if a leaf is shaped as its parameter with one more axis in front: gradients with a row for each device.

    Only `accumulate` takes these. What measures them takes the rows for gradients that are `len(rows)` times as many.
    """
    of_params = dict(jax.tree.leaves_with_path(params))
    for path, x in jax.tree.leaves_with_path(updates):
        shape, wanted = (getattr(y, "shape", None) for y in (x, of_params.get(path)))
        if shape and shape[1:] == wanted:
            raise ValueError(
                f"update leaf {leaf_name(path)} must have the shape of its parameter, {wanted}, got {shape}. Put this "
                "transformation inside accumulate, or behind what reduces rows"
            )


def check_unchanged(new: PyTree, old: PyTree, what: str) -> None:
    """Raises, while tracing, if structure, shapes or dtypes differ. Adds no operation to the program."""
    require_structure(new, old, f"{what}: the structure must stay")

    def type_of(x: Leaf) -> str:
        return f"{getattr(x, 'dtype', type(x).__name__)} of shape {np.shape(x)}"

    def check(path: KeyPath, new: Leaf, old: Leaf) -> None:
        if type_of(new) != type_of(old):
            raise AssertionError(
                f"{what}: leaf {leaf_name(path)} must stay {type_of(old)}, got {type_of(new)}. Cast it"
            )

    jax.tree.map_with_path(check, new, old)


def require_structure(given: PyTree, expected: PyTree, requirement: str, remedy: str = "") -> None:
    """Raises if two trees differ in structure, and names leaves. The message has requirement, leaves and remedy."""
    structures: list[Any] = [jax.tree.structure(x) for x in (given, expected)]
    if structures[0] == structures[1]:
        return
    came, wanted = ({path for path, _ in jax.tree.leaves_with_path(x)} for x in (given, expected))
    wrong = [f"{leaf_name(path)} is missing" for path in wanted - came]
    wrong += [f"{leaf_name(path)} is unexpected" for path in came - wanted]
    found = ", ".join(sorted(wrong)[:4])
    if len(wrong) > 4:
        found += f" and {len(wrong) - 4} more"
    if not wrong:
        given, expected = (shortened(str(x), 150) for x in structures)
        found = f"expected {expected}, got {given}"
    raise AssertionError(f"{requirement}, but {found}{remedy}")
