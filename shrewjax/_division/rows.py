"""Rows: along which axis of an array each example has its part, and how that axis is divided among micro-batches.

A *set* of examples is named by its size. Arrays with as many examples belong to one set. An axis of rows has blocks,
one after the other, each of a whole set. In a block, an example has one element, or several that are neighbours::

    x                           Rows(axis=0, sets=(B,))
    concatenate([x, y])         Rows(axis=0, sets=(B, B))      a block for each batch
    x.reshape(B * T)            Rows(axis=0, sets=(B,))        T neighbours for each example
    x.T.reshape(T * B)          Rows(axis=0, sets=(B,) * T)

With B = 2 and T = 3, the third has the examples 0 0 0 1 1 1, and the fourth 0 1 0 1 0 1. `apart` gives both as
(examples, blocks, neighbours): (2, 1, 3) and (2, 3, 1).

Micro-batch i of K has the examples i, i + K, i + 2 K, and so on, so the first B mod K have one more than the others.
Those with as many examples run in one loop.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
from jax import lax

from shrewjax._base.types import Leaf

Shape: TypeAlias = Sequence[int]
Sizes: TypeAlias = dict[int, int]
"""The number of examples that there are of each set, in a micro-batch or in all."""


class Rows(NamedTuple):
    """The axis of an array along which examples have their parts, and the sets of its blocks."""

    axis: int
    sets: tuple[int, ...]

    @property
    def whole(self) -> Sizes:
        """Returns the numbers of all examples."""
        return {s: s for s in self.sets}

    def fits(self, shape: Shape) -> bool:
        """Returns whether an array of this shape can have these rows."""
        return self.axis < len(shape) and shape[self.axis] % sum(self.sets) == 0

    def shape(self, whole: Shape, sizes: Sizes) -> tuple[int, ...]:
        """Returns the shape of the part that has these examples."""
        neighbours = whole[self.axis] // sum(self.sets)
        return _with(whole, self.axis, (sum(sizes[s] for s in self.sets) * neighbours,))

    def apart(self, x: Leaf, sizes: Sizes) -> list[Leaf]:
        """Returns an array with its examples first. It comes in pieces, if blocks of several sets alternate."""
        neighbours = x.shape[self.axis] // sum(sizes[s] for s in self.sets)
        pieces, start = [], 0
        for set_, blocks in self._runs():
            end = start + blocks * sizes[set_] * neighbours
            is_all = end - start == x.shape[self.axis]
            piece = x if is_all else lax.slice_in_dim(x, start, end, axis=self.axis)
            if blocks == neighbours == 1:
                pieces.append(jnp.moveaxis(piece, self.axis, 0))
            else:
                dims = blocks, sizes[set_], neighbours
                # (..., blocks, examples, neighbours, ...), and then the examples first.
                split = piece.reshape(_with(piece.shape, self.axis, dims))
                pieces.append(jnp.moveaxis(split, self.axis + 1, 0))
            start = end
        return pieces

    def together(self, pieces: Sequence[Leaf], shape: Shape, sizes: Sizes) -> Leaf:
        """Returns the array of this shape that `apart` took apart."""
        neighbours = shape[self.axis] // sum(sizes[s] for s in self.sets)
        parts = []
        for piece, (set_, blocks) in zip(pieces, self._runs(), strict=True):
            if blocks == neighbours == 1:
                parts.append(jnp.moveaxis(piece, 0, self.axis))
            else:
                dims = (blocks * sizes[set_] * neighbours,)
                split = jnp.moveaxis(piece, 0, self.axis + 1)
                parts.append(split.reshape(_with(shape, self.axis, dims)))
        return jnp.concatenate(parts, self.axis) if len(parts) > 1 else parts[0]

    def bounds(self, whole: Shape, sizes: Sizes) -> dict[int, int]:
        """Returns where blocks begin and end in the part that has these examples, by where they do in the whole."""
        neighbours = whole[self.axis] // sum(self.sets)
        ends = itertools.accumulate(self.sets, initial=0)
        own = itertools.accumulate((sizes[s] for s in self.sets), initial=0)
        return {x * neighbours: y * neighbours for x, y in zip(ends, own, strict=True)}

    def _runs(self) -> list[tuple[int, int]]:
        """Returns, for each run of blocks of one set, this set and the number of the blocks."""
        return [(s, len([*blocks])) for s, blocks in itertools.groupby(self.sets)]

    def sets_of_pieces(self) -> list[int]:
        """Returns the set of each piece that `apart` returns."""
        return [s for s, _ in self._runs()]

    def reshaped(self, old: Shape, new: Shape) -> "Rows | None":
        """Returns the rows of an array after a reshape that keeps the order of its elements."""
        # Elements lie as (outer, blocks, examples, neighbours). The axes before the new one must number `before` parts
        # of `outer`. The new one holds the other `repeats`, with all examples. With rows along axis 1 of (T, B),
        # `outer` is T. In (T * B,), axis 0 holds all T blocks.
        outer, sets = math.prod(old[: self.axis]), self.sets
        if len({*sets}) == 1:  # blocks can become an axis of their own
            outer, sets = outer * len(sets), sets[:1]
        for axis, size in enumerate(new):
            before = math.prod(new[:axis])
            if before and size and outer % before == 0:
                repeats = outer // before
                if size % (repeats * sum(sets)) == 0:
                    return Rows(axis, sets * repeats)
        return None


def _with(shape: Shape, axis: int, dims: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:axis], *dims, *shape[axis + 1 :])


class Turns(NamedTuple):
    """Micro-batches with as many examples: those from `first` to `last - 1`."""

    first: int
    last: int
    sizes: Sizes

    def of(self, x: Leaf, set_: int, micro_batches: int) -> Leaf:
        """Returns the part of these micro-batches in an array of examples. Its second axis numbers them."""
        size, *rest = x.shape
        # Fill the last row, so that a reshape is possible. The slice below cuts what was filled.
        if missing := -size % micro_batches:
            x = jnp.concatenate([x, x[:missing]])
        by_turn = x.reshape(x.shape[0] // micro_batches, micro_batches, *rest)
        return by_turn[: self.sizes[set_], self.first : self.last]


def turns(counts: Sizes, micro_batches: int) -> list[Turns]:
    """Returns the loops in which all micro-batches run, for these numbers of examples."""
    cuts = sorted({0, micro_batches, *(n % micro_batches for n in counts.values())})

    def sizes(first: int) -> Sizes:
        pairs = [(s, *divmod(n, micro_batches)) for s, n in counts.items()]
        return {s: size + (first < larger) for s, size, larger in pairs}

    return [Turns(x, y, sizes(x)) for x, y in itertools.pairwise(cuts)]


def joined(parts: Sequence[Leaf]) -> Leaf:
    """Returns an array of examples from the parts of all loops, whose first axis numbers micro-batches.

    It undoes `Turns.of`: example e of micro-batch i stands at e K + i. Later micro-batches may have one example less.
    Their last row is filled up, and the surplus at the end is cut.
    """
    columns = [x.swapaxes(0, 1) for x in parts]
    examples = sum(x.shape[0] * x.shape[1] for x in parts)
    if len(parts) > 1:
        longest = max(x.shape[0] for x in columns)
        padded = [jnp.concatenate([x, x[: longest - x.shape[0]]]) for x in columns]
        columns = [jnp.concatenate(padded, 1)]
    size, count, *rest = columns[0].shape
    whole = columns[0].reshape(size * count, *rest)
    return whole if len(parts) == 1 else whole[:examples]
