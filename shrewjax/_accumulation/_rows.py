"""Per-device rows: one array that holds each device's own sum in a row of its own, for `sum_over`.

Inside `shard_map` a device sees its own sum as an array whose leading dimension has size 1. Outside, the same array has
one row per device along the mapped axes, and is sharded over them. So the array can leave a step, enter the next one,
and be saved. Its other dimensions have the parameter's sharding.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shrewjax._base.mesh import (
    as_varying,
    axes_by_dimension,
    context_mesh,
    is_mapped,
    is_replicated_over,
    is_traced,
    varying_axes,
)
from shrewjax._base.trees import is_gradient, leaf_name
from shrewjax._base.types import ArrayTree, Axes, AxisNames, DType, KeyPath, Leaf


def of_device(grads: ArrayTree, axes: Axes) -> ArrayTree:
    """Returns gradients inside `shard_map` as this device's rows. Otherwise they have their rows, or need none."""
    if not axes or not is_mapped(axes):
        return grads

    def row(path: KeyPath, grad: Leaf) -> Leaf:
        if is_gradient(grad) and is_replicated_over(grad, axes):
            raise ValueError(
                f"gradient leaf {leaf_name(path)} is already reduced over sum_over={axes!r}. To keep gradients local, "
                f"compute own = jax.lax.pcast(params, {axes!r}, to='varying') outside the loss and differentiate with "
                "respect to own. To accumulate reduced gradients, leave out sum_over"
            )
        return grad[None] if is_gradient(grad) else grad

    return jax.tree.map_with_path(row, grads)


def without_rows(grads: ArrayTree, axes: Axes) -> ArrayTree:
    """Returns the gradients, or the shapes and dtypes of one row if they have per-device rows."""
    if not axes or is_mapped(axes):
        return grads
    return jax.tree.map(lambda g: jax.ShapeDtypeStruct(g.shape[1:], g.dtype), grads)


def _mesh_of(params: ArrayTree, axes: AxisNames) -> Mesh | AbstractMesh | None:
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


def zeros_of(params: ArrayTree, axes: AxisNames) -> Callable[[Leaf, DType, str], jax.Array]:
    """Returns a function of a parameter, a dtype and a name for messages, which returns zeros with per-device rows."""
    return partial(_zero_rows, axes, _mesh_of(params, axes))


def _zero_rows(
    axes: AxisNames, mesh: Mesh | AbstractMesh | None, like: jax.Array, dtype: DType, name: str
) -> jax.Array:
    sharding = sharding_of(like)
    spec = () if sharding is None else sharding.spec
    over = {a for names in axes_by_dimension(spec) for a in names} if mesh else varying_axes(like)
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


def emptied(rows: ArrayTree, average: ArrayTree, axes: AxisNames) -> ArrayTree:
    """Returns rows for the state of a closed window, whose values nobody reads. Reuses the average if it can."""
    if not is_mapped(axes):
        return rows
    # XLA-22.
    # On CUDA and TPU, XLA would otherwise keep both the rows and the average, which costs memory of the parameters'
    # size (tests/devices/test_accelerators.py, "sends gradients once").
    return jax.tree.map(
        lambda row, x: as_varying(x[None], axes) if row.ndim else row, rows, average
    )


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
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names else None
