"""Units: the parts of a gradient that a rule clips on their own, each by its own norm.

A unit is a leaf or a part of one. Some axes of the leaf, its *unit dims*, number its units; each unit spans the other
axes. Arithmetic on units is compiled once for all leaves that are a single unit (`_unit_numbers.stack_single_units`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from shrewjax import _arguments, _extended, _gradients, _norms, _scaling, _unit_numbers
from shrewjax._arguments import AxesOf, UnitAxisNames
from shrewjax._extended import ExtendedFloat
from shrewjax._gradients import KeyPath, is_gradient
from shrewjax._mesh import Axes, AxisName, UnitDims, UnitSharding, unit_axes
from shrewjax._reductions import leaf_maxima, leaf_sums, sizes, unit_zeros
from shrewjax._scaling import ClipScale

UnitAxisName = AxisName | jax.P | Callable[[str, Any], Any]
"""The values of `sharded_over` that users may pass to a rule for units."""


class Units(NamedTuple):
    """The floating leaves of a gradient, and the unit dims of each."""

    paths: tuple[KeyPath, ...]
    leaves: list[Any]
    dims: tuple[UnitDims, ...]

    def axes(self, given: UnitAxisNames) -> tuple[UnitSharding, ...]:
        """Returns the mapped axes over which each leaf is sharded."""
        return tuple(
            unit_axes(_gradients.leaf_name(path), x, dims, _arguments.axis_names_of_leaf(given, path, x))
            for path, x, dims in zip(self.paths, self.leaves, self.dims, strict=True)
        )

    def beside(self, tree: chex.ArrayTree) -> list[Any]:
        """Returns the leaves at the same places of a tree like the parameters."""
        at = dict(jax.tree.leaves_with_path(tree))
        missing = [_gradients.leaf_name(path) for path in self.paths if path not in at]
        if missing:
            raise ValueError(
                f"gradient leaves {', '.join(missing)} need parameters at the same places, and there are none. Call "
                "update with params like the gradients"
            )
        return [_gradients.array_leaf(path, at[path]) for path in self.paths]

    def with_leaves(self, tree: chex.ArrayTree, leaves: Sequence[Any]) -> chex.ArrayTree:
        """Returns the tree with these leaves at the same places."""
        at = dict(zip(self.paths, leaves, strict=True))
        return jax.tree.map_with_path(lambda path, leaf: at.get(path, leaf), tree)

    def numbers(self, tree: chex.ArrayTree, value: float) -> chex.ArrayTree:
        """Returns a tree like `tree` of float32 numbers: one for each unit, and one for each leaf without units."""
        others = jax.tree.map(lambda _: jnp.full((), value, jnp.float32), tree)
        return self.with_leaves(
            others, [unit_zeros(x, d) + jnp.float32(value) for x, d in zip(self.leaves, self.dims, strict=True)]
        )

    def numbers_beside(self, tree: chex.ArrayTree) -> list[Any]:
        """Returns the numbers of these units in a state's tree, by leaf. Raises if it has numbers of other units."""
        numbers = self.beside(tree)
        for path, x, dims, number in zip(self.paths, self.leaves, self.dims, numbers, strict=True):
            expected = tuple(x.shape[a] for a in dims)
            if number.shape != expected:
                raise ValueError(
                    f"gradient leaf {_gradients.leaf_name(path)} of shape {x.shape} has units of shape {expected}, but "
                    f"the state has units of shape {number.shape}. Call init with parameters like the gradients"
                )
        return numbers

    def with_numbers(self, tree: chex.ArrayTree, numbers: Sequence[Any], absent: float) -> chex.ArrayTree:
        """Returns a state's tree with new numbers, which come stacked, and `absent` for leaves without a gradient."""
        others = jax.tree.map(lambda x: jnp.full_like(x, absent), tree)
        return self.with_leaves(others, _unit_numbers.unstack_units(numbers, self.dims))

    def scaled(self, updates: chex.ArrayTree, scales: Sequence[ClipScale]) -> chex.ArrayTree:
        """Returns the gradients, each unit times its scale. The scales come stacked."""
        per_leaf = _unit_numbers.unstack_units(scales, self.dims)
        return self.with_leaves(updates, list(map(_scaling.apply_unit_scales, self.leaves, per_leaf, self.dims)))


def find_units(updates: chex.ArrayTree, unit_dims: Callable[[KeyPath, Any], UnitDims]) -> Units:
    """Returns the units of a gradient. `unit_dims(path, leaf)` gives the unit dims of a leaf."""
    paths, leaves, _ = _gradients.gradient_leaves(updates)
    counted = [(path, x) for path, x in zip(paths, leaves, strict=True) if is_gradient(x)]
    return Units(
        paths=tuple(path for path, _ in counted),
        leaves=[x for _, x in counted],
        dims=tuple(unit_dims(path, x) for path, x in counted),
    )


def stacked_layers(batch_axes: AxesOf) -> Callable[[KeyPath, Any], UnitDims]:
    """Returns the `unit_dims` of rules whose units are leaves, or the layers that a leaf stacks along `batch_axes`."""
    return lambda path, leaf: _arguments.axes_of_leaf("batch_axes", batch_axes, path, leaf) or ()


def largest_number(numbers: Sequence[ExtendedFloat], over: list[Axes]) -> jax.Array:
    """Returns the largest number of all units on all devices; NaN if one is NaN. Shape (), float32."""
    if not numbers:
        return jnp.zeros((), jnp.float32)
    values = [_extended.to_float32(n) for n in numbers]
    keys = leaf_maxima(_norms.magnitude_keys(jnp.dtype(jnp.float32)), values, axes=over)
    return lax.bitcast_convert_type(jnp.max(jnp.concatenate(keys)), jnp.float32)


def clipped_fraction(scales: Sequence[ClipScale], norms: Sequence[ExtendedFloat], over: list[Axes]) -> jax.Array:
    """Returns clipped units / units, on all devices. Shape (), float32."""
    if not scales:
        return jnp.zeros((), jnp.float32)
    # A unit with zero norm never counts as clipped.
    is_clipped = [scale.applies & (norm.mantissa != 0) for scale, norm in zip(scales, norms, strict=True)]
    clipped = leaf_sums([flag.astype(jnp.float32) for flag in is_clipped], axes=over)
    return jnp.sum(jnp.stack(clipped)) / max(sum(sizes(is_clipped, axes=over)), 1)
