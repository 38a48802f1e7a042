"""Relations of numbers: how a value of a whole batch comes from those of its micro-batches.

NumPy compares the values on the host, in float64, element by element.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from shrewjax._base.trees import is_typed_key
from shrewjax._base.types import DType, Leaf

Array: TypeAlias = np.ndarray[Any, Any]


class Division(NamedTuple):
    """The number of examples, of which micro-batch i has each K-th from i on, and the micro-batches' shares."""

    num_examples: int
    shares: Array

    def made(self, parts: Sequence[Array]) -> dict[str, Array]:
        """Returns what is made of all parts. One without a share adds nothing, not even a NaN.

        `"result"` is what the call makes of losses, the sum of each times its share.
        """
        kept, shares = np.stack(parts)[self.shares != 0], self.shares[self.shares != 0]
        total, result = kept.sum(0), np.tensordot(shares, kept, 1)
        made = {"result": result, "sum": total, "unweighted_mean": total / len(parts)}
        return made | {"max": kept.max(0), "min": kept.min(0)}

    def rows(self, whole: Any, parts: Sequence[Any]) -> Iterator[list[Any]]:
        """Yields the rows of each micro-batch in an array of the whole batch, with the shapes of `parts`.

        The axis of examples is the first one along which they differ, or a part of it, because a batch may be merged
        with the axes around it.
        """
        pairs = zip(whole.shape, parts[0].shape, strict=False)
        axis = next((a for a, (x, y) in enumerate(pairs) if x != y), None)
        if axis is None or not whole.size or whole.size != parts[0].size * len(parts):
            return
        for merged in range(1, whole.shape[axis] // self.num_examples + 1):
            if whole.shape[axis] % (merged * self.num_examples) == 0:
                # Its axes: what comes before the examples, the examples, what comes behind them.
                table = whole.reshape(math.prod(whole.shape[:axis]) * merged, self.num_examples, -1)
                yield [table[:, i :: len(parts)].reshape(x.shape) for i, x in enumerate(parts)]

    @np.errstate(all="ignore")
    def relations(self, whole: Leaf, parts: Sequence[Leaf], rtol: float) -> set[str]:
        """Returns all relations that hold for each element, within `rtol`. Integers are compared exactly.

        The value of the whole batch is the `"same"`, it has the `"rows"` of examples, or it is made of those of the
        micro-batches. `"scaled"`: it is the same or has the rows, times the share of each micro-batch, as the
        cotangents of a mean.

        The tolerance is one of the element's own size and of its terms', or of the median in the array. The mean would
        let a mask of -1e9 widen it for all others.
        """
        w, *ms = map(as_float64, (whole, *parts))
        sizes = np.abs(np.concatenate([*map(np.ravel, (w, *ms))]))
        sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
        usual = np.median(sizes) if sizes.size else 0.0
        if not jnp.issubdtype(jax.typeof(whole).dtype, np.inexact):
            rtol = 1e-12  # a mean of integers rounds

        def is_close(x: Array, y: Array, size: Any = 0.0) -> bool:
            bound = rtol * np.maximum(np.maximum(size, np.abs(y)), usual)
            return np.isclose(x, y, 0, bound, equal_nan=True).all()

        if any(m.shape != w.shape for m in ms):
            found, views = set[str](), [("rows", x) for x in self.rows(w, ms)]
        else:
            made, terms = (self.made(x) for x in (ms, [*map(np.abs, ms)]))
            found = {x for x in made if is_close(made[x], w, terms[x])}
            views = [("same", [w] * len(ms))]
        for relation, view in views:
            triples = [*zip(ms, view, self.shares, strict=True)]
            found |= {relation} if all(is_close(m, x) for m, x, _ in triples) else set()
            found |= {"scaled"} if all(is_close(m * s, x) for m, x, s in triples if s) else set()
        return found


def shares_of(reduction: str, weights: Sequence[float]) -> Array:
    """Returns what each micro-batch's loss and gradients are multiplied by, before they are added up.

    With `"sum_over_weights"` the call also divides the sum by the weights, as it does for the whole batch.
    """
    given = np.asarray(weights, np.float64)
    return given / given.sum() if reduction == "mean" else (given != 0).astype(np.float64)


def as_float64(x: Leaf) -> Array:
    """Returns an array in float64 or complex128. A key is its numbers, and a float0 is 0."""
    dtype = jax.typeof(x).dtype
    if is_typed_key(x):
        x = jax.random.key_data(x)
    array = np.zeros(x.shape) if dtype == jax.dtypes.float0 else np.asarray(x)
    return array if array.dtype.kind == "c" else array.astype(np.float64)


def tolerance(dtypes: Iterable[DType]) -> float:
    """Returns eps^(2/3) of the coarsest dtype, without float8: 2.4e-5 for float32, 1% for float16, 4% for bfloat16."""
    eps = [float(jnp.finfo(d).eps) for d in {*dtypes} if jnp.issubdtype(d, np.inexact)]
    return max((e for e in eps if e < 0.05), default=0.0) ** (2 / 3)
