"""The devices over which a window sums (`sum_over`), and the per-device rows in which each has its own sum.

`Devices` has all that a window asks of them. Its rules read as on one device.

Inside `shard_map` a device sees its own sum as an array whose leading dimension has size 1. Outside, the same array has
one row per device along the mapped axes, and is sharded over them. So the array can leave a step, enter the next one,
and be saved. Its other dimensions have the parameter's sharding. Weights and losses have rows, too.

Gradients are summed over the network in these places:

* `sum_over=`: `reductions.device_sums`, called by `Devices.total` when a window closes, and after the loop of
  `accumulated_value_and_grad`. Inside `shard_map` it is a `psum`. Outside, it is a sum over rows, and XLA writes the
  collective.
* without `sum_over=`: the caller, or XLA, with each gradient.
* gradients of the type `unreduced`: `mesh.summed`, as soon as there are any.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shrewjax._base import arguments
from shrewjax._base.axes import (
    as_varying,
    axes_beside,
    axes_by_dimension,
    is_mapped,
    newly_varying,
    replicated_axes,
    require_replicated,
    require_sum_over,
    sum_over_others,
    varying_axes,
)
from shrewjax._base.mesh import (
    context_mesh,
    explicit_axes,
    is_traced,
    partitioned_like,
    spec_of_result,
)
from shrewjax._base.trees import is_gradient, leaf_name
from shrewjax._base.types import (
    AnyState,
    ArrayTree,
    Axes,
    AxisNames,
    DType,
    Flag,
    KeyPath,
    Leaf,
    Number,
    PyTree,
    Scalar,
)
from shrewjax._numerics.floats import ExtendedFloat
from shrewjax._numerics.norms import measure, measure_local
from shrewjax._numerics.reductions import all_finite, any_device, device_sums
from shrewjax._windows._gradients import checked_gradients


@dataclass(frozen=True)
class Devices:
    """The devices along these axes. Without axes there is one, or all have the same gradients."""

    given: Axes
    sharded_over: Axes = None

    @property
    def axes(self) -> AxisNames:
        return self.given or ()

    def zeros_maker(self, params: ArrayTree) -> Callable[[Leaf, DType, str], jax.Array]:
        """Returns a function of a parameter, a dtype and a name for messages, which returns zeros for its sum."""
        if not self.axes:
            return lambda x, dtype, _name: jnp.zeros_like(x, dtype=dtype)
        return partial(_zero_rows, self.axes, _mesh_of(params, self.axes))

    def checked(
        self, grads: PyTree, weight: Scalar, value: Number | None, state: AnyState
    ) -> tuple[ArrayTree, jax.Array | None]:
        """Returns a micro-batch's gradients and loss as arrays. Inside `shard_map`, gradients get the axis of rows.

        Its weight is checked already. Raises unless all fit the state, and unless devices share weight and loss.
        """
        require_sum_over("accumulation", self.given)
        grads = checked_gradients(self._own_rows(grads), state.gradient_sum, self._remedy_of_shape)
        like = state.sum_of_weights
        loss = None
        if value is not None:
            loss = jnp.asarray(arguments.value_of_loss(value, {(), like.shape}))
        # Weight and loss may differ between devices only if each has its own window, whose sum then varies, too.
        if not self.axes:
            for name, x in {"weight": weight, "value": loss}.items():
                if isinstance(x, jax.Array) and newly_varying(x, like):
                    require_replicated(name, x)
        return grads, loss

    def is_nonfinite(self, grads: ArrayTree, has_weight: Flag, varies_like: jax.Array) -> jax.Array:
        """Returns whether gradients of a micro-batch with weight contain a NaN or an infinity, on any device.

        Without `sum_over`, devices that hold parts of one model decide together. If each has a model of its own, each
        decides alone.
        """
        leaves = jax.tree.leaves(grads)
        if self.axes:
            of_rows = ~all_finite(leaves, [()] * len(leaves), unit_dims=(0,))
            return any_device(jnp.any(has_weight & of_rows), self.axes)
        own_axes = self._own_axes(varies_like)
        # If each device has its own window, reduce over the other axes alone. Untracked types do not tell axes, so
        # arguments do. Without `sharded_over`, `sum_over=()` means a model on each device.
        by_arguments = self.given if self.sharded_over is None else self.sharded_over
        axes = axes_beside(leaves, own_axes) if own_axes else by_arguments
        return has_weight & ~all_finite(leaves, axes)

    def _own_axes(self, varies_like: jax.Array) -> AxisNames:
        """Returns, without `sum_over`, the axes over which a window's number varies: each device has its own window."""
        return () if self.axes else tuple(sorted(varying_axes(varies_like), key=str))

    def own_norm(self, grads: ArrayTree, varies_like: jax.Array) -> ExtendedFloat:
        """Returns the norm of the gradients of each device, as rows."""
        leaves = jax.tree.leaves(grads)
        if not self.axes:
            return measure_local(leaves, self._own_axes(varies_like))
        if is_mapped(self.axes):
            norm = measure_local([g[0] for g in leaves], self.axes)
            return ExtendedFloat(norm.mantissa[None], norm.exponent[None])
        return jax.vmap(lambda rows: measure(rows, 2, ()))(leaves)

    def norm(self, total: ArrayTree, varies_like: jax.Array) -> ExtendedFloat:
        """Returns the norm of gradients that are the same on all devices of a model."""
        leaves = [x for x in jax.tree.leaves(total) if is_gradient(x)]
        return measure_local(leaves, self.axes or self._own_axes(varies_like))

    def total(
        self, numbers: Sequence[jax.Array], gradient_sum: ArrayTree
    ) -> tuple[list[jax.Array], ArrayTree]:
        """Returns the sums of all devices, in one collective. Each array of numbers has one in each device's row.

        The first is the weight, in whose dtype all are added.
        """
        together = jnp.stack([x.astype(numbers[0].dtype) for x in numbers], axis=-1)
        leaves = filter(is_gradient, jax.tree.leaves(gradient_sum))
        of_numbers, *of_leaves = device_sums([together, *leaves], self.axes)
        totals = optax.tree.cast_like([*of_numbers], [*numbers])
        require_replicated("weight, summed over sum_over,", totals[0])
        rest = iter(of_leaves)
        whole = jax.tree.map(lambda x: next(rest) if is_gradient(x) else x, gradient_sum)
        return totals, whole

    def emptied(self, gradient_sum: ArrayTree, total: ArrayTree, average: ArrayTree) -> ArrayTree:
        """Returns rows for the state of a closed window. Nobody reads their values, so other arrays can stand there."""
        # XLA-22: On CUDA and TPU, XLA would otherwise keep the rows beside these arrays, which costs memory of the
        # parameters' size. If the total were returned inside `shard_map`, a TPU would keep both
        # (tests/devices/test_accelerators.py, "sends_gradients_once"). If the average were outside, an H100 would
        # (tests/devices/test_rows_compiled.py).
        reused = average if is_mapped(self.axes) else total
        return jax.tree.map(self._as_rows, reused, gradient_sum)

    def _as_rows(self, x: jax.Array, rows: jax.Array) -> jax.Array:
        """Returns an array in each row, on the row's device, or the rows if no context tells their devices."""
        axes = self.axes
        if not is_gradient(rows):
            return rows
        if is_mapped(axes):  # inside shard_map
            return as_varying(x[None], axes)
        copies = jnp.broadcast_to(x[None], rows.shape)
        if {*axes} <= explicit_axes(rows):
            return partitioned_like(copies, rows)
        mesh = jax.sharding.get_abstract_mesh()
        if {*axes} <= {*mesh.axis_names} and {*mesh.axis_types} == {AxisType.Auto}:
            spec = P(axes, *[P.UNCONSTRAINED] * x.ndim)
            return jax.lax.with_sharding_constraint(copies, spec)
        return rows

    def like_total(self, grads: ArrayTree) -> ArrayTree:
        """Returns the gradients, or the shapes and dtypes of one row if they have per-device rows."""
        if not self.axes or is_mapped(self.axes):
            return grads
        return jax.tree.map(lambda g: jax.ShapeDtypeStruct(g.shape[1:], g.dtype), grads)

    def _own_rows(self, grads: ArrayTree) -> ArrayTree:
        """Returns gradients inside `shard_map` as this device's rows. Otherwise they have rows, or need none.

        Raises if one is already reduced over one of the axes, over which the closing window would sum it again.
        """
        axes = self.axes
        if not axes or not is_mapped(axes):
            return grads

        def own_row(path: KeyPath, grad: Leaf) -> Leaf:
            if not is_gradient(grad):
                return grad
            if reduced := replicated_axes(grad, axes):
                raise ValueError(
                    f"gradient leaf {leaf_name(path)} is already reduced over {', '.join(map(repr, reduced))} of "
                    f"sum_over={axes!r}. Pass jax.lax.pcast(params, {axes!r}, to='varying') to the loss. Or "
                    f"{sum_over_others(axes, reduced)}"
                )
            return grad[None]

        return jax.tree.map_with_path(own_row, grads)

    def _remedy_of_shape(self, given: tuple[int, ...], expected: tuple[int, ...]) -> str:
        axes = self.axes
        if axes and not is_mapped(axes):
            return (
                f"With sum_over={axes!r}, gradients outside of jax.shard_map have a row for each device. Compute them "
                f"with shrewjax.per_device(fun, {axes!r}). Or, if jax.jit reduces them, leave out sum_over"
            )
        if axes and given[1:] == expected[1:]:
            return (
                "The state came with the rows of all devices. Pass the state to jax.shard_map with "
                "in_specs=shrewjax.state_specs(opt_state), and return it with the same out_specs"
            )
        if not axes and given[1:] == expected:
            return (
                "If these are rows of per_device, pass its axes to accumulate as sum_over=. Otherwise pass gradients "
                "of the parameters that init got"
            )
        return "Pass gradients of the parameters that init got. Or call init with the parameters of these gradients"


def _mesh_of(params: ArrayTree, axes: AxisNames) -> Mesh | AbstractMesh | None:
    """Returns a mesh that has the axes: the parameters' or the context's. None if the axes are mapped here."""
    if is_mapped(axes):
        return None
    leaves = [x for x in jax.tree.leaves(params) if hasattr(x, "dtype")]
    meshes = [s.mesh for s in map(sharding_of, leaves) if s is not None]
    # Optax calls `init` with placeholders for parameters, which have no leaves and need no mesh.
    context = jax.sharding.get_abstract_mesh() if is_traced(params) else context_mesh()
    for mesh in (*meshes, context):
        if set(axes) <= set(mesh.axis_names):
            return mesh
    if not leaves:
        return None
    raise ValueError(
        f"sum_over={axes!r} needs a mesh with these axes, and init found none. Call init under jax.set_mesh(mesh)"
    )


def _zero_rows(
    axes: AxisNames, mesh: Mesh | AbstractMesh | None, like: jax.Array, dtype: DType, name: str
) -> jax.Array:
    """Returns zeros with a row for each device along the axes. Raises if the parameter is sharded over one of them.

    Inside `shard_map` there is no mesh, and the device's one row. On a concrete mesh rows are placed. Under jit, types
    place them on an Explicit mesh, and a constraint on an Auto mesh with no other axes.
    """
    sharding = sharding_of(like)
    spec = () if sharding is None else sharding.spec
    over = varying_axes(like).union(*axes_by_dimension(spec))
    if over & set(axes):
        raise ValueError(
            f"parameter {name} must not be sharded over sum_over={axes!r}. Leave out sum_over under jax.jit. Inside "
            "jax.shard_map, pass parameters from before jax.lax.pcast"
        )
    if mesh is None:
        return as_varying(jnp.zeros_like(like, dtype=dtype)[None], axes)
    shape = (math.prod(mesh.shape[a] for a in axes), *like.shape)
    if isinstance(mesh, Mesh):
        spec = spec_of_result(mesh, P(axes, *spec))
        return jnp.zeros(shape, dtype, device=NamedSharding(mesh, spec))
    rows = jnp.broadcast_to(jnp.zeros_like(like, dtype=dtype)[None], shape)
    if all(kind == AxisType.Explicit for kind in mesh.axis_types):
        return jax.sharding.reshard(rows, P(axes, *spec))
    others = [a for a in mesh.axis_names if a not in axes and mesh.shape[a] > 1]
    if others or AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            f"init cannot tell under jit how parameter {name} is sharded. Call init outside of jit"
        )
    return jax.lax.with_sharding_constraint(rows, P(axes))


def redistributed(rows: jax.Array, like: jax.Array) -> jax.Array:
    """Returns rows with the shape and sharding of `like`. The first one holds the sum of `rows`, the others are 0."""
    total = jnp.sum(rows, axis=0)
    if isinstance(like.sharding, NamedSharding):
        total = jax.device_put(total, NamedSharding(like.sharding.mesh, P(*like.sharding.spec[1:])))
    is_first = expand_like(jnp.arange(like.shape[0], dtype=jnp.int32) == 0, like)

    @partial(jax.jit, out_shardings=like.sharding)
    def place(is_first: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(is_first, x, jnp.zeros_like(x))

    return place(is_first, total[None])


def expand_like(per_row: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns a scalar, or one number per row, in a shape that broadcasts against the rows."""
    if per_row.ndim == 0:
        return per_row
    return per_row.reshape(per_row.shape + (1,) * (rows.ndim - per_row.ndim))


def sharding_of(x: Leaf) -> NamedSharding | None:
    """Returns the `NamedSharding` of an array over a mesh with axes, otherwise None."""
    sharding = jax.typeof(x).sharding if is_traced(x) else getattr(x, "sharding", None)
    is_on_mesh = isinstance(sharding, NamedSharding) and sharding.mesh.axis_names
    return sharding if is_on_mesh else None
