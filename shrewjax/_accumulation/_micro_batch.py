"""A micro-batch's gradients: checked, tested for NaN and infinity, measured, and summed by device.

With `sum_over`, the sums have per-device rows: one array that holds each device's own sum in a row of its own.

Inside `shard_map` a device sees its own sum as an array whose leading dimension has size 1. Outside, the same array has
one row per device along the mapped axes, and is sharded over them. So the array can leave a step, enter the next one,
and be saved. Its other dimensions have the parameter's sharding.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shrewjax._base import trees
from shrewjax._base.mesh import (
    as_varying,
    context_mesh,
    is_mapped,
    is_replicated_over,
    is_traced,
    newly_varying,
    varying_axes,
)
from shrewjax._base.trees import is_gradient, leaf_name
from shrewjax._base.types import ArrayTree, Axes, AxisNames, DType, Flag, KeyPath, Leaf, PyTree
from shrewjax._numerics import floats
from shrewjax._numerics.floats import ExtendedFloat
from shrewjax._numerics.norms import measure, measure_local
from shrewjax._numerics.reductions import all_finite, any_device


def checked_gradients(grads: ArrayTree, gradient_sum: ArrayTree, axes: Axes) -> ArrayTree:
    """Returns the gradients, inside `shard_map` with a device's row, and None for each leaf that adds nothing.

    Raises if a leaf does not fit its accumulator. A parameter that is not floating has an int32 scalar in the place of
    its accumulator. The loss and the averaged aux of `value_and_grad` come here, too. Gradients that a scan has added
    itself come as None.
    """
    if axes and is_mapped(axes):

        def row(path: KeyPath, grad: Leaf) -> Leaf:
            if is_gradient(grad) and is_replicated_over(grad, axes):
                raise ValueError(
                    f"gradient leaf {leaf_name(path)} is already reduced over sum_over={axes!r}. "
                    f"To keep gradients local, compute own = jax.lax.pcast(params, {axes!r}, to='varying') outside "
                    "the loss and differentiate with respect to own. To accumulate reduced gradients, leave out "
                    "sum_over"
                )
            return grad[None] if is_gradient(grad) else grad

        grads = jax.tree.map_with_path(row, grads)
    same_leaves(grads, gradient_sum, axes)

    def added(path: KeyPath, total: jax.Array, grad: Leaf) -> Leaf:
        if grad is None or grad.dtype == jax.dtypes.float0:
            return None
        is_added = is_gradient(grad)
        if is_added != is_gradient(total):
            raise ValueError(
                f"gradient leaf {leaf_name(path)} is {grad.dtype}, but {_remedy_of_kind(total)}"
            )
        if is_added and floats.is_complex(grad) and not floats.is_complex(total):
            raise ValueError(
                f"gradient leaf {leaf_name(path)} is {grad.dtype}, but its accumulator is {total.dtype} and would lose "
                "the imaginary part. Pass the real part of the gradient. Or call init with a complex parameter"
            )
        # A sum that is the same on every device cannot take a gradient that differs, because its type would change and
        # JAX would raise at the end of a loop or a branch. With sum_over, sums differ between devices, too.
        along = is_added and newly_varying(grad, total)
        if along:
            raise ValueError(
                f"gradient leaf {leaf_name(path)} may differ between devices along {along}, but its parameter does "
                "not, because the gradients are not reduced. Reduce them first, for example with "
                f"jax.lax.pmean(grads, {along}). Or pass sum_over={along} to sum them when the window closes"
            )
        return grad if is_added else None

    return jax.tree.map_with_path(added, gradient_sum, grads)


def _remedy_of_kind(total: jax.Array) -> str:
    if is_gradient(total):
        return (
            f"its parameter is floating, with an accumulator of {total.dtype}. Convert the gradient to the parameter's "
            "dtype. Or pass None in its place if there is no gradient"
        )
    return (
        "its parameter is not floating and has no accumulator. Pass None in its place. Or pass float0, as "
        "jax.grad(..., allow_int=True) returns it"
    )


def is_nonfinite_micro_batch(grads: ArrayTree, has_weight: Flag, axes: Axes) -> jax.Array:
    leaves = jax.tree.leaves(grads)
    if not axes:
        return has_weight & ~all_finite(leaves, axes)
    is_nonfinite = jnp.any(has_weight & ~all_finite(leaves, [()] * len(leaves), unit_dims=(0,)))
    return any_device([is_nonfinite], axes)[0]


def norm_of_gradients(grads: ArrayTree, axes: Axes) -> ExtendedFloat:
    leaves = jax.tree.leaves(grads)
    if not axes:
        return measure_local(leaves, ())
    if is_mapped(axes):
        norm = measure_local([g[0] for g in leaves], axes)
        return ExtendedFloat(norm.mantissa[None], norm.exponent[None])
    return jax.vmap(lambda rows: measure(rows, 2, ()))(leaves)


def without_rows(grads: ArrayTree, axes: Axes) -> ArrayTree:
    """Returns the gradients, or the shapes and dtypes of one row if they have per-device rows."""
    if not axes or is_mapped(axes):
        return grads
    return jax.tree.map(lambda g: jax.ShapeDtypeStruct(g.shape[1:], g.dtype), grads)


def same_leaves(grads: PyTree, gradient_sum: PyTree, axes: Axes) -> None:
    """Raises, while tracing, unless gradients have the accumulator's structure and shapes.

    A gradient of None fits every leaf, and so does any shape if one of the two leaves is no gradient.
    """
    sums = jax.tree.leaves_with_path(gradient_sum, is_leaf=lambda x: x is None)
    without_sum = {path for path, total in sums if total is None}

    def filled(path: KeyPath, grad: Leaf) -> Leaf:
        return 0 if grad is None and path not in without_sum else grad

    given = jax.tree.map_with_path(filled, grads, is_leaf=lambda x: x is None)
    trees.require_structure(
        given,
        gradient_sum,
        "the gradients must have the structure of the accumulator",
        ". Pass gradients like the parameters that init got, with None for a leaf without one",
    )

    def check(path: KeyPath, total: Leaf, grad: Leaf) -> None:
        if (
            hasattr(grad, "dtype")
            and grad.shape != total.shape
            and is_gradient(grad)
            and is_gradient(total)
        ):
            raise AssertionError(
                f"gradient leaf {leaf_name(path)} must have the shape of its accumulator, {total.shape}, got "
                f"{grad.shape}. {_remedy_of_shape(grad.shape, total.shape, axes)}"
            )

    jax.tree.map_with_path(check, gradient_sum, given)


def _remedy_of_shape(given: tuple[int, ...], expected: tuple[int, ...], axes: Axes) -> str:
    if axes and not is_mapped(axes):
        return (
            f"With sum_over={axes!r}, gradients outside of jax.shard_map have a row for each device. Call the step "
            f"inside jax.shard_map over {', '.join(map(repr, axes))}. Or, if jax.jit reduces them, leave out sum_over"
        )
    if axes and given[1:] == expected[1:]:
        return (
            "The state came with the rows of all devices. Pass the state to jax.shard_map with "
            "in_specs=shrewjax.state_specs(opt_state), and return it with the same out_specs"
        )
    return "Pass gradients of the parameters that init got. Or call init with the parameters of these gradients"


def mesh_of(params: ArrayTree, axes: AxisNames) -> Mesh | AbstractMesh | None:
    """Returns a mesh that has the axes: the parameters' or the context's. None if the axes are mapped here."""
    if is_mapped(axes):
        return None
    leaves = [x for x in jax.tree.leaves(params) if hasattr(x, "dtype")]
    meshes = [sharding.mesh for sharding in map(sharding_of, leaves) if sharding is not None]
    # Optax calls `init` with placeholders for parameters, which have no leaves and need no mesh.
    context = jax.sharding.get_abstract_mesh() if is_traced(params) else context_mesh()
    for mesh in (*meshes, context):
        if set(axes) <= set(mesh.axis_names):
            return mesh
    if not leaves:
        return None
    raise ValueError(
        f"sum_over={axes!r} needs a mesh with these axes, and init found none. Call init outside of jit with "
        "parameters that are placed on the mesh. Or call it under jax.set_mesh(mesh). Or call it inside jax.shard_map. "
        "Or, on a mesh with Explicit axes, call it under jit"
    )


def zero_rows(
    like: jax.Array, dtype: DType, axes: AxisNames, mesh: Mesh | AbstractMesh | None, name: str
) -> jax.Array:
    """Returns zeros like a parameter, with one row per device. `name` is the parameter's name in messages."""
    sharding = sharding_of(like)
    spec = () if sharding is None else sharding.spec
    over = (
        {a for dim in spec for a in (dim if isinstance(dim, tuple) else (dim,))}
        if mesh
        else varying_axes(like)
    )
    if over & set(axes):
        raise ValueError(
            f"parameter {name} is sharded over sum_over={axes!r} itself, so its gradients are already reduced over it. "
            "Use another mesh axis for the data. Inside jax.shard_map, pass parameters to init before any "
            "jax.lax.pcast"
        )
    if mesh is None:
        return as_varying(jnp.zeros_like(like, dtype=dtype)[None], axes)
    shape = (math.prod(mesh.shape[a] for a in axes), *like.shape)
    if isinstance(mesh, Mesh):
        return jnp.zeros(shape, dtype, device=NamedSharding(mesh, P(axes, *spec)))
    if any(kind != AxisType.Explicit for kind in mesh.axis_types):
        raise ValueError(
            f"init cannot tell under jit how parameter {name} is sharded over a mesh whose axes are not Explicit. Call "
            "init outside of jit"
        )
    rows = jnp.broadcast_to(jnp.zeros_like(like, dtype=dtype)[None], shape)
    return jax.sharding.reshard(rows, P(axes, *spec))


def emptied_rows(rows: ArrayTree, average: ArrayTree, axes: AxisNames) -> ArrayTree:
    """Returns rows for the state of a closed window, whose values nobody reads. Reuses the average if it can."""
    if not is_mapped(axes):
        return rows
    # XLA-22.
    # On CUDA and TPU, XLA would otherwise keep both the rows and the average, which costs memory of the parameters'
    # size (tests/devices/test_accelerators.py, "sends gradients once").
    return jax.tree.map(
        lambda row, x: as_varying(x[None], axes) if row.ndim else row, rows, average
    )


def redistribute_rows(rows: jax.Array, like: jax.Array) -> jax.Array:
    """Returns rows with the shape and sharding of `like`. The first one holds the sum of `rows`, the others are 0."""
    total = jnp.sum(rows, axis=0)
    if isinstance(like.sharding, NamedSharding):
        total = jax.device_put(total, NamedSharding(like.sharding.mesh, P(*like.sharding.spec[1:])))
    is_first = expand_like(jnp.arange(like.shape[0], dtype=jnp.int32) == 0, like)
    place = jax.jit(
        lambda is_first, x: jnp.where(is_first, x, jnp.zeros_like(x)), out_shardings=like.sharding
    )
    return place(is_first, total[None])


def expand_like(per_row: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns a scalar, or one number per row, in a shape that broadcasts against the rows."""
    return (
        per_row.reshape(per_row.shape + (1,) * (rows.ndim - per_row.ndim))
        if per_row.ndim
        else per_row
    )


def sharding_of(x: Leaf) -> NamedSharding | None:
    """Returns the `NamedSharding` of an array over a mesh with axes, otherwise None."""
    sharding = jax.typeof(x).sharding if is_traced(x) else getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names else None
