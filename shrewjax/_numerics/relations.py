"""Relations of numbers: how a value of a whole batch comes from those of its micro-batches.

NumPy compares the values on the host, in float64, element by element.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from shrewjax._base.types import DType, Leaf

Array: TypeAlias = np.ndarray[Any, Any]

Relation: TypeAlias = Literal["same", "rows", "scaled", "result", "sum", "mean", "max", "min"]
"""The value of the whole batch is the same, it has the rows of examples, or it is made of those of the micro-batches.

`"scaled"`: it is the same or has the rows, times the share of each micro-batch, as the cotangents of a mean.
`"result"`: it is what the call makes of losses, the sum of each times its share.
"""


class Division(NamedTuple):
    """The micro-batches of a batch: the examples of each, by their numbers, and its share in the results."""

    examples: Sequence[Array]
    shares: Array

    def made(self, parts: Array) -> dict[Relation, Array]:
        """Returns what is made of all parts, the first axis. One without a share adds nothing, not even a NaN."""
        kept = parts[self.shares != 0]
        return {
            "result": np.tensordot(self.shares[self.shares != 0], kept, 1),
            "sum": kept.sum(0),
            "mean": kept.sum(0) / len(parts),
            "max": kept.max(0),
            "min": kept.min(0),
        }

    def rows(self, whole: Any, parts: Sequence[Any]) -> Iterator[list[Any]]:
        """Yields the rows of each micro-batch in an array of the whole batch, with the shapes of `parts`.

        The axis of examples is the first one along which they differ, or a part of it, because a batch may be merged
        with the axes around it.
        """
        count, pairs = sum(map(len, self.examples)), [*zip(parts, self.examples, strict=True)]
        is_divided = [
            x.size * count == whole.size * len(e) and x.ndim == whole.ndim for x, e in pairs
        ]
        if not whole.size or not all(is_divided):
            return
        axis = next(a for a in range(whole.ndim) if whole.shape[a] != parts[0].shape[a])
        for merged in range(1, whole.shape[axis] + 1):
            before = math.prod(whole.shape[:axis]) * merged
            if whole.size % (before * count) == 0:
                table = whole.reshape(before, count, -1)
                yield [table[:, e].reshape(x.shape) for x, e in pairs]


def shares_of(reduction: str, weights: Sequence[float]) -> Array:
    """Returns what each micro-batch's loss and gradients are multiplied by, before they are added up.

    With `"sum_over_weights"` the call also divides the sum by the weights, as it does for the whole batch.
    """
    given = np.asarray(weights, np.float64)
    return given / given.sum() if reduction == "mean" else (given != 0).astype(np.float64)


def numbers(x: Leaf) -> Array:
    """Returns an array in float64 or complex128. A key is its numbers, and a float0 is 0."""
    dtype = jax.typeof(x).dtype
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    array = np.zeros(x.shape) if dtype == jax.dtypes.float0 else np.asarray(x)
    return array if array.dtype.kind == "c" else array.astype(np.float64)


def tolerance(dtypes: Iterable[DType]) -> float:
    """Returns eps^(2/3) of the coarsest dtype, without float8: 2.4e-5 for float32, 1% for float16, 4% for bfloat16."""
    eps = [float(jnp.finfo(d).eps) for d in {*dtypes} if jnp.issubdtype(d, np.inexact)]
    largest: float = max((e for e in eps if e < 0.1), default=0.0)
    return largest ** (2 / 3)


@np.errstate(all="ignore")
def relations(whole: Leaf, parts: Sequence[Leaf], division: Division, rtol: float) -> set[Relation]:
    """Returns all relations that hold for each element, within `rtol`. Integers are compared exactly.

    The tolerance is one of the element's own size and of its terms', or of the median in the array. The mean would let
    a mask of -1e9 widen it for all others.
    """
    w, ms = numbers(whole), [*map(numbers, parts)]
    is_float = jnp.issubdtype(jax.typeof(whole).dtype, np.inexact)
    sizes = np.abs(np.concatenate([*map(np.ravel, (w, *ms))]))
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    usual = np.median(sizes) if sizes.size else 0.0

    def is_close(x: Array, y: Array, size: Any = 0.0) -> bool:
        bound = rtol * is_float * np.maximum(np.maximum(size, np.abs(y)), usual)
        near = np.isfinite(x) & (np.abs(x - y) <= bound)
        return bool(np.all(near | (x == y) | (np.isnan(x) & np.isnan(y))))

    found = set[Relation]()
    views: list[tuple[Relation, list[Array]]] = [("rows", x) for x in division.rows(w, ms)]
    if all(m.shape == w.shape for m in ms):
        made, terms = (division.made(x) for x in (np.stack(ms), np.abs(ms)))
        found, views = (
            {of for of in made if is_close(made[of], w, terms[of])},
            [("same", [w] * len(ms))],
        )
    for relation, view in views:
        found |= {relation} if all(map(is_close, ms, view)) else set()
        triples = zip(ms, view, division.shares, strict=True)
        found |= {"scaled"} if all(is_close(m * s, x) for m, x, s in triples if s) else set()
    return found
