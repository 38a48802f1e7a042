"""Units: the parts of a gradient that a rule clips on their own, each by its own norm.

Some axes of a leaf, its *unit dims*, number its units; each unit spans the other axes. Arithmetic on units is compiled
once for all leaves whose units' numbers are joined (`vectors.join`).
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
from jax import lax

from shrewjax._base import arguments, trees
from shrewjax._base.arguments import AxesOf, Shardings
from shrewjax._base.axes import (
    UnitDims,
    UnitSharding,
    are_whole,
    newly_varying,
    unit_axes,
    varying_axes,
)
from shrewjax._base.mesh import is_typed_by_device, may_be_partitioned, partitioned_like
from shrewjax._base.trees import is_gradient
from shrewjax._base.types import (
    AnyState,
    ArrayTree,
    Axes,
    AxisNames,
    DType,
    KeyPath,
    Leaf,
    Metrics,
    PyTree,
)
from shrewjax._clipping.rule import counted
from shrewjax._numerics import floats, scaling
from shrewjax._numerics.floats import ExtendedFloat
from shrewjax._numerics.norms import combine, magnitude_key, measure_units
from shrewjax._numerics.reductions import are_known, leaf_maxima, leaf_sums, placed_as_units, sizes
from shrewjax._numerics.scaling import ClipScale
from shrewjax._numerics.vectors import Groups, join, shape_of_units, split


@dataclasses.dataclass(frozen=True)
class Units:
    """The units of a gradient. Most methods take and return numbers of units, such as norms, as they are `joined`."""

    paths: tuple[KeyPath, ...]
    leaves: list[Leaf]  # the floating leaves
    dims: tuple[UnitDims, ...]  # the unit dims of each
    given: Shardings  # the user's `sharded_over`

    @cached_property
    def sharding(self) -> tuple[UnitSharding, ...]:
        if are_whole(self.given):
            return (UnitSharding((), ()),) * len(self.leaves)

        def of_leaf(path: KeyPath, x: Leaf, dims: UnitDims) -> UnitSharding:
            given = arguments.axis_names_of_leaf(self.given, path, x)
            return unit_axes(trees.leaf_name(path), x, dims, given)

        return tuple(map(of_leaf, self.paths, self.leaves, self.dims))

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        return list(map(shape_of_units, self.leaves, self.dims))

    @cached_property
    def groups(self) -> Groups:
        """The groups of leaves whose numbers are joined.

        A leaf of several units is a group of its own in two cases. XLA may shard its numbers, and would gather them. Or
        types can say how its numbers are sharded, and JAX joins only arrays of one sharding
        (tests/clipping/test_units.py, "explicit mesh").
        """
        alike: dict[Hashable, list[int]] = {}
        each = zip(self.leaves, self.shapes, self.sharding, strict=True)
        for i, (x, shape, over) in enumerate(each):
            may_be_sharded = may_be_partitioned() or is_typed_by_device(x)
            is_apart = shape and (may_be_sharded or not are_known(shape))
            others = varying_axes(x).difference(over.within)
            key = others, over.across, (i,) if is_apart else ()
            alike.setdefault(key, []).append(i)
        return tuple(map(tuple, alike.values()))

    @cached_property
    def _across(self) -> list[Axes]:
        """The mapped axes along which devices hold other units of each group; None if the numbers' types tell."""
        return [self.sharding[group[0]].across for group in self.groups]

    def by_leaf(self, numbers: Sequence[PyTree]) -> list[PyTree]:
        return split(numbers, self.groups, self.shapes)

    def norms(self, ord: float = 2) -> list[ExtendedFloat]:
        return measure_units(self.leaves, self.dims, self.sharding, self.groups, ord)

    def total(self, norms: Sequence[ExtendedFloat]) -> ExtendedFloat:
        return combine(norms, self._across)

    def joined(self, per_leaf: Sequence[PyTree]) -> list[PyTree]:
        """Returns the numbers of each leaf, joined by group. A single number of a leaf stands for each of its units."""

        def of_units(number: PyTree, shape: tuple[int, ...]) -> PyTree:
            return jax.tree.map(lambda part: jnp.broadcast_to(part, shape), number)

        return join(list(map(of_units, per_leaf, self.shapes)), self.groups)

    def _beside(self, tree: ArrayTree, problem: str) -> list[PyTree]:
        """Returns the leaves at the same places of a tree like the parameters. Raises if it has none there."""
        at = dict(jax.tree.leaves_with_path(tree))
        missing = [trees.leaf_name(path) for path in self.paths if path not in at]
        if missing:
            raise ValueError(f"gradient leaves {', '.join(missing)} {problem}")
        return [trees.array_leaf(path, at[path]) for path in self.paths]

    def of_parameters(self, params: ArrayTree) -> "Units":
        """Returns the same units of the parameters. Raises unless their leaves are like the gradients."""
        weights = self._beside(
            params,
            "need parameters at the same places, and there are none. Call update with params like the gradients",
        )
        each = zip(self.paths, self.leaves, weights, self.dims, strict=True)
        for path, g, w, dims in each:
            if not is_gradient(w) or g.shape != w.shape:
                raise ValueError(
                    f"gradient leaf {trees.leaf_name(path)} must have the shape of its floating parameter, got "
                    f"{g.dtype} of shape {g.shape} for {w.dtype} of shape {w.shape}"
                )
            if along := newly_varying(w, g) if dims else "":
                raise ValueError(
                    f"parameter leaf {trees.leaf_name(path)} may differ over {along}, but its "
                    f"gradient does not. Pass the parameter from before jax.lax.pcast"
                )
        return dataclasses.replace(self, leaves=weights)

    def with_leaves(self, tree: ArrayTree, leaves: Sequence[Leaf]) -> ArrayTree:
        at = dict(zip(self.paths, leaves, strict=True))
        return jax.tree.map_with_path(lambda path, leaf: at.get(path, leaf), tree)

    @property
    def dtype(self) -> DType:
        """The dtype of norms of these units, and of what states keep of them."""
        return floats.sum_dtype(*self.leaves)

    def numbers(self, tree: ArrayTree, value: float, dtype: DType) -> ArrayTree:
        """Returns a tree like `tree` of numbers: one for each unit, and one for each leaf without units."""
        others = jax.tree.map(lambda _: jnp.full((), value, dtype), tree)
        # Inside `shard_map`, with the types that norms of these units have
        # (tests/devices/test_distribution.py, "that_init_in_shard_map").
        is_typed = any(map(varying_axes, self.leaves))
        whole: Sequence[AxisNames] = [()] * len(self.leaves)
        within = [x.within for x in self.sharding] if is_typed else whole

        def of_units(leaf: Leaf, dims: UnitDims, over: AxisNames) -> jax.Array:
            zeros = jnp.zeros_like(leaf, dtype=dtype)
            (sums,) = leaf_sums([zeros], axes=[over], unit_dims=[dims])
            return placed_as_units(sums + jnp.asarray(value, dtype), leaf, dims)

        numbers = list(map(of_units, self.leaves, self.dims, within))
        return self.with_leaves(others, numbers)

    def numbers_beside(self, tree: ArrayTree) -> list[PyTree]:
        """Returns the numbers of these units in a state's tree, by leaf. Raises if it has numbers of other units."""
        numbers = self._beside(
            tree, "have no numbers in the state. Call init with parameters like the gradients"
        )
        each = zip(self.paths, self.leaves, self.shapes, numbers, strict=True)
        for path, x, expected, number in each:
            if number.shape != expected:
                raise ValueError(
                    f"gradient leaf {trees.leaf_name(path)} of shape {x.shape} has units of shape {expected}, but "
                    f"the state has {number.shape}. Call init with parameters like the gradients"
                )
        return numbers

    def largest(self, numbers: Sequence[ExtendedFloat], dtype: DType) -> jax.Array:
        """Returns the largest of all units' numbers on all devices, in a dtype; NaN if one is NaN. Shape ()."""
        if not numbers:
            return jnp.zeros((), dtype)
        values = [floats.stored(number, dtype) for number in numbers]
        keys = leaf_maxima(magnitude_key, values, axes=self._across)
        return lax.bitcast_convert_type(jnp.max(jnp.concatenate(keys)), dtype)

    def clip(
        self,
        updates: ArrayTree,
        norms: Sequence[ExtendedFloat],
        limits: Sequence[ExtendedFloat],
        state: AnyState,
        decisive: Sequence[ExtendedFloat] | None = None,
    ) -> tuple[ArrayTree, list[ClipScale], Metrics]:
        """Returns the clipped gradients, the scales, and the new `clipped_fraction` and counts of the state.

        The limits are for the norms `decisive`, which are the units' own unless they are given. Norms that are not
        finite are not above.
        """
        decisive = norms if decisive is None else decisive
        scales = scaling.clip_scales(decisive, limits)
        each = map(scaling.apply_scale, self.leaves, self.by_leaf(scales), self.dims)
        clipped = self.with_leaves(updates, list(each))
        fraction, is_any_above = jnp.zeros((), jnp.float32), jnp.zeros((), bool)
        if norms:
            is_clipped = list(map(scaling.counts_as_clipped, scales, norms))
            is_above = list(map(scaling.is_above, decisive, limits))
            # One collective takes all.
            flags = [flag.astype(jnp.float32) for flag in (*is_clipped, *is_above)]
            sums = jnp.stack(leaf_sums(flags, axes=2 * self._across))
            of_clipped, of_above = jnp.sum(sums.reshape(2, len(norms)), axis=1)
            # May be symbolic (tests/promises/test_export.py).
            units = sum(sizes(is_clipped, axes=self._across))
            fraction = of_clipped / jnp.maximum(jnp.asarray(units, jnp.float32), 1)
            is_any_above = of_above > 0
        measured = {"clipped_fraction": fraction, **counted(state, is_any_above)}
        return clipped, scales, measured

    def with_numbers(self, tree: ArrayTree, numbers: Sequence[PyTree], absent: float) -> ArrayTree:
        """Returns a state's tree with new numbers, which come joined, and `absent` for leaves without a gradient."""
        others = jax.tree.map(lambda x: jnp.full_like(x, absent), tree)
        return self.updated(others, numbers)

    def updated(self, tree: ArrayTree, numbers: Sequence[PyTree]) -> ArrayTree:
        """Returns a state's tree with new numbers, which come joined. On an Explicit mesh it keeps its sharding."""
        placed = map(partitioned_like, self.by_leaf(numbers), self.numbers_beside(tree))
        return self.with_leaves(tree, list(placed))


def find_units(
    updates: ArrayTree,
    unit_dims: Callable[[KeyPath, Leaf], UnitDims] = lambda *_: (),
    sharded_over: Shardings = None,
) -> Units:
    """Returns the units of a gradient. `unit_dims(path, leaf)` gives the unit dims of a leaf, by default none."""
    paths, leaves, _ = trees.gradient_leaves(updates)
    each = zip(paths, leaves, strict=True)
    counted = [(path, x) for path, x in each if is_gradient(x)]
    return Units(
        paths=tuple(path for path, _ in counted),
        leaves=[x for _, x in counted],
        dims=tuple(unit_dims(path, x) for path, x in counted),
        given=sharded_over,
    )


def stacked_layers(stacked_axes: AxesOf) -> Callable[[KeyPath, Leaf], UnitDims]:
    """Returns the `unit_dims` of rules whose units are leaves, or the layers that a leaf stacks along these axes."""
    return lambda path, leaf: arguments.axes_of_leaf("stacked_axes", stacked_axes, path, leaf) or ()
