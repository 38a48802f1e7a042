r"""The aux of a batch: how the aux of its micro-batches is reduced, leaf by leaf, over those that are kept."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax._base import trees
from shrewjax._base.axes import as_varying, varying_axes
from shrewjax._base.mesh import partitioned_like
from shrewjax._base.trees import is_gradient
from shrewjax._base.types import AxisNames, DType, Flag, Leaf, PyTree, Scalar
from shrewjax._numerics import floats
from shrewjax._numerics.reductions import combined_over, joined_over
from shrewjax._windows.window import Window
from shrewjax._windows.window_state import GradAccumulatorState


class AuxSums(NamedTuple):
    means: GradAccumulatorState
    others: list[jax.Array]  # the leaves of `COMBINE`


# The function that combines a leaf of the micro-batches so far with the next one's. `_empty` has what each begins
# with, and `combined_over` what devices do.
COMBINE: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "sum": lax.add,
    "max": lax.max,
    "min": lax.min,
    "last": lambda _, x: x,
}


STACKED = ("stack", "examples")
"""The names of leaves that a loop returns along a new axis of micro-batches."""


OWN = ("last", *STACKED)
"""The names of leaves that devices do not reduce."""


class AuxLeaves:
    """The leaves of an aux, and statistics that Flax overwrites, whose name is "max". Both are like `like`.

    `size` is the number of examples in a micro-batch, on one device.
    """

    def __init__(
        self, names: PyTree, like: tuple[PyTree, list[Leaf]], size: int, window: Window
    ) -> None:
        self._size, self._window, self._sum_over = size, window, window.axes or ()
        self._structure: Any = jax.tree.structure(like)
        with_paths = jax.tree.leaves_with_path(like)
        self._like = [x for _, x in with_paths]
        self._paths = [trees.leaf_name(path[1:]) for path, _ in with_paths]
        aux, self._overwritten = like
        self._names = [*_names_of_leaves(names, aux), *["max"] * len(self._overwritten)]
        # The axes along which devices join the results of leaves, by the places of these.
        self._joined: dict[int, int] = {}
        for leaf in zip(self._paths, self._like, self._names, strict=True):
            _check_aux_leaf(*leaf, size)

    def find_axes(self, of_whole_batch: Callable[[], PyTree], is_joined: bool) -> None:
        """Finds the axis of examples of each leaf that devices join, and raises if it has none.

        Raises, too, if an averaged leaf has another shape for the whole batch, because the mean would mix examples. It
        traces `fun` for the whole batch if it needs its shapes.
        """
        has_axis = any(x.shape for x in self._of(self._like, "mean"))
        whole = None
        if has_axis or (is_joined and self._of(self._like, "last", "stack")):
            # `fun` may take no other number of examples, so that no other shape is known. Then no axis differs from a
            # micro-batch's, and `_axis_to_join` raises.
            with suppress(Exception):
                whole = jax.eval_shape(of_whole_batch)
        both = whole, self._overwritten
        has_shapes = jax.tree.structure(both) == self._structure
        of_whole = jax.tree.leaves(both) if has_shapes else self._like
        each = zip(self._paths, self._like, of_whole, self._names, strict=True)
        for at, (path, x, large, name) in enumerate(each):
            if name == "mean":
                _check_mean(path, x, large, self._size)
            elif is_joined and name in OWN:
                self._joined[at] = _axis_to_join(path, name, x, large, has_shapes)

    def _of(self, leaves: Sequence[Leaf], *names: str) -> list[Leaf]:
        return [x for x, name in zip(leaves, self._names, strict=True) if name in names]

    def init(self) -> AuxSums:
        averaged = self._of(self._like, "mean")
        # `Window.init` adds the axes of `sum_over`, and refuses leaves that have them.
        means = [_empty("mean", x, without=self._sum_over) for x in averaged]
        pairs = zip(self._names, self._like, strict=True)
        combined = [(name, _empty(name, x)) for name, x in pairs if name in COMBINE]
        others = [self._varying(*x) for x in combined]
        return AuxSums(self._window.init(means), others)

    def _varying(self, name: str, x: jax.Array) -> jax.Array:
        """Returns a leaf that varies over the axes over which it is reduced, because weights may."""
        return as_varying(x, () if name in OWN else self._sum_over)

    def update(
        self, sums: AuxSums, aux: PyTree, weight: Scalar, is_kept: Flag
    ) -> tuple[AuxSums, list[jax.Array]]:
        """Returns the new sums, and the leaves that are stacked."""
        leaves = [jnp.asarray(x) for x in jax.tree.leaves(aux)]
        # A leaf that is the same on every device, such as a metric that fun has reduced, is its own mean over devices.
        averaged = [as_varying(x, self._sum_over) for x in self._of(leaves, "mean")]
        means = sums.means
        if averaged:
            means = self._window.update(means, averaged, weight, is_kept)

        def added(name: str, total: jax.Array, x: jax.Array) -> jax.Array:
            return _combined(name, total, self._varying(name, x), is_kept)

        names = self._of(self._names, *COMBINE)
        others = [*map(added, names, sums.others, self._of(leaves, *COMBINE))]
        stacked = [selected(is_kept, x, jnp.zeros_like(x)) for x in self._of(leaves, *STACKED)]
        return AuxSums(means, others), stacked

    def finalize(self, sums: AuxSums, stacked: list[jax.Array]) -> PyTree:
        """Returns the aux of the batch, and the statistics.

        A mean is NaN if no micro-batch is kept, or if a weight or their sum is out of range.
        """
        means: list[jax.Array] = []
        # Without a mean nothing has a weight, and `jax_debug_nans` would stop at 0 / 0.
        if "mean" in self._names:
            average, has_weight = self._window.finalize(sums.means)
            means = [nan_unless(has_weight, x) for x in average.gradients]
        names = self._of(self._names, *COMBINE)
        # JAX 0.8 makes a collective of no arrays, too.
        others = combined_over(self._sum_over, names, sums.others) if names else []
        # Put each leaf in its place.
        places = range(len(self._names))
        placed = dict(zip(self._of(places, "mean"), means, strict=True))
        placed |= zip(self._of(places, *COMBINE), others, strict=True)
        placed |= zip(self._of(places, *STACKED), stacked, strict=True)
        for at in self._of(places, "examples"):
            placed[at] = _in_order(placed[at])
        for at, axis in self._joined.items():
            placed[at] = joined_over(placed[at], self._sum_over, axis)
        leaves = [cast_like(placed[at], x) for at, x in enumerate(self._like)]
        return jax.tree.unflatten(self._structure, leaves)


def _names_of_leaves(names: PyTree, like: PyTree) -> list[str]:
    """Returns the name for each leaf of the aux. Raises if the names are no tree prefix of it."""
    try:
        return jax.tree.leaves(jax.tree.broadcast(names, like))
    except ValueError as error:
        named = [path for path, _ in jax.tree.leaves_with_path(names)]
        for path, _ in jax.tree.leaves_with_path(like):
            if not any(path[: len(of)] == of for of in named):
                raise ValueError(
                    f"aux_reduction must name each leaf of the aux, got {trees.shown(names)} without "
                    f"{trees.leaf_name(path)}. Add it"
                ) from None
        raise ValueError(
            f"aux_reduction must be one name or a tree prefix of the aux, got {trees.shown(names)}: "
            f"{trees.shortened(str(error))}"
        ) from error


def _check_aux_leaf(leaf: str, x: Leaf, name: str, size: int) -> None:
    """Raises if a leaf cannot be reduced, or stacked, as its name says."""
    if trees.is_typed_key(x):
        raise ValueError(
            f'leaf {leaf} of the aux is a PRNG key. Return its jax.random.key_data, with "stack" in aux_reduction='
        )
    is_number = jnp.issubdtype(x.dtype, np.number) or x.dtype == np.bool
    if not is_number or (name == "mean" and not is_gradient(x)):
        raise ValueError(
            f"leaf {leaf} of the aux is {x.dtype}, which {name!r} does not take. Pass a tree of "
            "names as aux_reduction=, with 'sum' for this leaf. Pass a state by carry_argnum= of "
            "accumulated_value_and_grad"
        )
    if name in ("max", "min") and jnp.issubdtype(x.dtype, np.complexfloating):
        raise ValueError(
            f"leaf {leaf} of the aux is {x.dtype}, which has no order for {name!r}. Let fun return its real part"
        )
    if name == "examples" and x.shape[:1] != (size,):
        raise ValueError(
            f"leaf {leaf} must have {size} rows, one for each example, got shape {x.shape}"
        )


def empty_stacks(count: int, stacked: list[Leaf]) -> list[jax.Array]:
    """Returns a stack of zeros for each leaf, with a slice for each of `count` micro-batches. Leaves may be types."""
    empty = [_empty("stack", x) for x in stacked]
    return [jnp.broadcast_to(x, (count, *x.shape)) for x in empty]


def _in_order(stacked: jax.Array) -> jax.Array:
    """Returns the rows of all micro-batches in the order of the batch, of which micro-batch i has i, i + K, ..."""
    count, size, *shape = stacked.shape
    return stacked.swapaxes(0, 1).reshape(count * size, *shape)


def _check_mean(leaf: str, x: Leaf, large: Leaf, size: int) -> None:
    """Raises if the leaf has another shape for the whole batch (`large`) than for a micro-batch."""
    if x.shape != large.shape:
        name = "examples" if x.shape[:1] == (size,) else "stack"
        raise ValueError(
            f"leaf {leaf} of the aux must have one shape for 'mean', got {x.shape}, and {large.shape} for the whole "
            f"batch. Give it {name!r} in aux_reduction="
        )


def _axis_to_join(leaf: str, name: str, x: Leaf, large: Leaf, has_shapes: bool) -> int:
    """Returns the axis of examples in the result: the one that is longer for the whole batch (`large`).

    Raises if there is none, or several.
    """
    if name == "examples":
        return 0
    differ = [axis for axis, n in enumerate(x.shape) if large.shape[axis : axis + 1] != (n,)]
    if len(differ) != 1:
        found = large.shape if has_shapes else "no shape, because fun does not take it,"
        raise ValueError(
            f"leaf {leaf} of the aux must have an axis of examples for {name!r}, got {x.shape}, and {found} for the "
            "whole batch. Give it another aux_reduction"
        )
    return differ[0] + (name == "stack")


def _empty(name: str, like: Leaf, without: AxisNames = ()) -> jax.Array:
    """Returns what a leaf begins with: the number that any other replaces, or 0.

    It varies over the mapped axes of the leaf, but for these.
    """
    dtype = _dtype_of_sum(like) if name == "sum" else like.dtype
    empty = jnp.zeros(like.shape, dtype)
    if name in _EXTREMES:
        empty = _EXTREMES[name](jnp.zeros((0, *like.shape), dtype), [0])
    over = tuple(varying_axes(like).difference(without))
    return as_varying(partitioned_like(empty, like), over)


_EXTREMES = {"max": lax.reduce_max, "min": lax.reduce_min}
"""Reductions that start from the least or the largest number of a dtype, and return it for no elements."""


def _dtype_of_sum(like: Leaf) -> DType:
    if is_gradient(like):
        return floats.upcast_dtype(like, floats.sum_dtype(like))
    return jax.eval_shape(jnp.sum, like).dtype


def _combined(name: str, total: jax.Array, x: jax.Array, is_kept: Flag) -> jax.Array:
    x, combine = x.astype(total.dtype), COMBINE[name]
    if name == "sum":  # selected before adding: XLA-24
        return combine(total, jnp.where(is_kept, x, jnp.zeros_like(x)))
    return jnp.where(is_kept, combine(total, x), total)


def selected(is_kept: Flag, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda x, y: jnp.where(is_kept, x, y), new, old)


def nan_unless(known: Flag, x: jax.Array) -> jax.Array:
    """Returns x, or NaN in its place if it is not known."""
    # A NaN that is made on the host, because outside of jit `jax_debug_nans` stops at `full_like`.
    return jnp.where(known, x, np.asarray(np.nan).astype(x.dtype))


def cast_like(x: jax.Array, like: Leaf) -> jax.Array:
    if not is_gradient(x):
        return x
    loses_imaginary = floats.is_complex(x) and not floats.is_complex(like)
    return (x.real if loses_imaginary else x).astype(like.dtype)
