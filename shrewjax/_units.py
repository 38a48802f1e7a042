"""Units: what shares a norm in a rule that clips parts of a gradient on their own.

A unit is a leaf, or a part of one: some axes of the leaf, its *unit dims*, tell units apart, and a unit spans the
others. Arithmetic on units is compiled once for all leaves that are a single unit (`_norms.stack_single_units`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax

from shrewjax import _arguments, _extended, _gradients, _norms
from shrewjax._arguments import AxesOf, UnitAxisNames
from shrewjax._extended import ExtendedFloat
from shrewjax._gradients import KeyPath, is_gradient
from shrewjax._mesh import Axes, AxisName, UnitDims, UnitSharding, unit_axes
from shrewjax._norms import ClipScale
from shrewjax._reductions import leaf_maxima, leaf_sums, sizes, unit_zeros

UnitAxisName = AxisName | jax.P | Callable[[str, Any], Any]
"""What users may pass as `sharded_over` to a rule for units."""


class Units(NamedTuple):
    """The leaves of gradients that count, and the axes along which each holds several units."""

    paths: tuple[KeyPath, ...]
    leaves: list[Any]
    dims: tuple[UnitDims, ...]

    def axes(self, given: UnitAxisNames) -> tuple[UnitSharding, ...]:
        """The mapped axes over which each leaf is spread."""
        return tuple(
            unit_axes(_gradients.leaf_name(path), x, dims, _arguments.axis_names_of_leaf(given, path, x))
            for path, x, dims in zip(self.paths, self.leaves, self.dims, strict=True)
        )

    def beside(self, tree: chex.ArrayTree) -> list[Any]:
        """The leaves of a tree like the parameters at the same places."""
        at = dict(jax.tree.leaves_with_path(tree))
        missing = [_gradients.leaf_name(path) for path in self.paths if path not in at]
        if missing:
            raise ValueError(f"no parameter for the gradient leaves {', '.join(missing)}")
        return [_gradients.array_leaf(path, at[path]) for path in self.paths]

    def with_leaves(self, tree: chex.ArrayTree, leaves: Sequence[Any]) -> chex.ArrayTree:
        """The tree with other leaves at the same places."""
        at = dict(zip(self.paths, leaves, strict=True))
        return jax.tree.map_with_path(lambda path, leaf: at.get(path, leaf), tree)

    def numbers(self, tree: chex.ArrayTree, value: float) -> chex.ArrayTree:
        """Returns a tree like `tree` of float32 numbers, one for each unit; leaves that do not count have one."""
        others = jax.tree.map(lambda _: jnp.full((), value, jnp.float32), tree)
        return self.with_leaves(
            others, [unit_zeros(x, d) + jnp.float32(value) for x, d in zip(self.leaves, self.dims, strict=True)]
        )

    def numbers_beside(self, tree: chex.ArrayTree) -> list[Any]:
        """Returns the numbers of these units in a state's tree, by leaf; an error if there are others."""
        numbers = self.beside(tree)
        for path, x, dims, number in zip(self.paths, self.leaves, self.dims, numbers, strict=True):
            expected = tuple(x.shape[a] for a in dims)
            if number.shape != expected:
                raise ValueError(
                    f"gradient leaf {_gradients.leaf_name(path)} of shape {x.shape} has units of shape {expected}, but "
                    f"the state has some of shape {number.shape}. Call init with parameters like the gradients"
                )
        return numbers

    def with_numbers(self, tree: chex.ArrayTree, numbers: Sequence[Any], absent: float) -> chex.ArrayTree:
        """Returns a state's tree with new numbers, which come stacked; `absent` for leaves without a gradient."""
        others = jax.tree.map(lambda x: jnp.full_like(x, absent), tree)
        return self.with_leaves(others, _norms.unstack_units(numbers, self.dims))

    def scaled(self, updates: chex.ArrayTree, factors: Sequence[ClipScale]) -> chex.ArrayTree:
        """The gradients, each unit times its factor, which come packed."""
        per_leaf = _norms.unstack_units(factors, self.dims)
        return self.with_leaves(updates, list(map(_norms.apply_unit_scales, self.leaves, per_leaf, self.dims)))


def find_units(updates: chex.ArrayTree, unit_dims: Callable[[KeyPath, Any], UnitDims]) -> Units:
    paths, leaves, _ = _gradients.gradient_leaves(updates)
    counted = [(path, x) for path, x in zip(paths, leaves, strict=True) if is_gradient(x)]
    return Units(
        paths=tuple(path for path, _ in counted),
        leaves=[x for _, x in counted],
        dims=tuple(unit_dims(path, x) for path, x in counted),
    )


def stacked_layers(batch_axes: AxesOf) -> Callable[[KeyPath, Any], UnitDims]:
    return lambda path, leaf: _arguments.axes_of_leaf("batch_axes", batch_axes, path, leaf) or ()


def largest_number(numbers: Sequence[ExtendedFloat], over: list[Axes]) -> jax.Array:
    """The largest of all units, on all devices; NaN if there is one. Shape (), float32."""
    if not numbers:
        return jnp.zeros((), jnp.float32)
    values = [_extended.to_float32(n) for n in numbers]
    keys = leaf_maxima(_norms.magnitude_keys(jnp.dtype(jnp.float32)), values, axes=over)
    return lax.bitcast_convert_type(jnp.max(jnp.concatenate(keys)), jnp.float32)


def clipped_fraction(factors: Sequence[ClipScale], norms: Sequence[ExtendedFloat], over: list[Axes]) -> jax.Array:
    """Clipped units / units, on all devices. Shape (), float32."""
    if not factors:
        return jnp.zeros((), jnp.float32)
    # Of nothing, nothing is clipped off.
    is_clipped = [factor.applies & (norm.mantissa != 0) for factor, norm in zip(factors, norms, strict=True)]
    clipped = leaf_sums(lambda flag: flag.astype(jnp.float32), is_clipped, axes=over)
    return jnp.sum(jnp.stack(clipped)) / max(sum(sizes(is_clipped, axes=over)), 1)
