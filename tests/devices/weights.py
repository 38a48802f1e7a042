"""Small numbers for the parameters and the batches of models, without the time that an initializer compiles."""

from typing import Any

import jax
import numpy as np


def integers(seed: int, below: int, *shape: int) -> np.ndarray:
    """Returns tokens, edges, labels."""
    return np.random.default_rng(seed).integers(0, below, shape, np.int32)


def normal(seed: int, *shape: int, scale: float | None = None) -> np.ndarray:
    """Returns weights whose products have the size of what they multiply, unless `scale` says another."""
    scale = shape[-2] ** -0.5 if scale is None else scale
    return np.float32(np.random.default_rng(seed).standard_normal(shape) * scale)


def table(seed: int, rows: int, width: int) -> np.ndarray:
    """Returns rows of the size of activations."""
    return normal(seed, rows, width, scale=1.0)


def filled(shapes: Any) -> Any:
    """Returns weights for a tree of Flax's shapes, by the names of the leaves."""

    def fill(seed: int, path: Any, x: Any) -> np.ndarray:
        name = str(getattr(path[-1], "key", path[-1]))
        if name == "embedding":
            return normal(seed, *x.shape, scale=1.0)
        if x.ndim > 1:
            return normal(seed, *x.shape)
        near_zero = normal(seed, *x.shape, scale=0.1)
        return np.abs(1 + near_zero) if name in ("scale", "var") else near_zero

    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    return jax.tree.unflatten(tree, [fill(i, *leaf) for i, leaf in enumerate(leaves)])
