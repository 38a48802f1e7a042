"""Per-device rows: one array that holds each device's own sum in a row of its own.

Inside `shard_map` a device sees its own sum as an array whose leading dimension has size 1. Outside, the same array has
one row per device along the mapped axes, and is sharded over them. The array can therefore leave a step, enter the next
one, and be saved. Its other dimensions are the parameter's, with the parameter's sharding.
"""

import math
from collections.abc import Hashable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shrewjax import _compat
from shrewjax._mesh import as_varying, is_mapped, varying_axes

RowAxes = tuple[Hashable, ...]


def mesh_of(params: chex.ArrayTree, axes: RowAxes) -> Mesh | AbstractMesh | None:
    """Returns a mesh that has the axes: the parameters' or the context's. None if the axes are mapped here."""
    if is_mapped(axes):
        return None
    leaves = [x for x in jax.tree.leaves(params) if hasattr(x, "dtype")]
    meshes = [sharding.mesh for sharding in map(sharding_of, leaves) if sharding is not None]
    # Optax calls `init` with placeholders for parameters, which have no leaves and need no mesh.
    context = jax.sharding.get_abstract_mesh() if _is_traced(params) else _compat.context_mesh()
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


def zero_rows(like: jax.Array, dtype: Any, axes: RowAxes, mesh: Mesh | AbstractMesh | None, name: str) -> jax.Array:
    """Returns zeros like a parameter, with one row per device. `name` is the parameter's name in messages."""
    sharding = sharding_of(like)
    spec = () if sharding is None else sharding.spec
    over = {a for dim in spec for a in (dim if isinstance(dim, tuple) else (dim,))} if mesh else varying_axes(like)
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


def emptied_rows(rows: chex.ArrayTree, average: chex.ArrayTree, axes: RowAxes) -> chex.ArrayTree:
    """Returns rows for the state of a closed window, whose values nobody reads. Reuses the average if it can."""
    if not is_mapped(axes):
        return rows
    # XLA-22.
    # On CUDA and TPU, XLA would otherwise keep both the rows and the average, which costs memory of the parameters'
    # size (tests/test_accelerators.py, "sends gradients once").
    return jax.tree.map(lambda row, x: as_varying(x[None], axes) if row.ndim else row, rows, average)


def redistribute_rows(rows: jax.Array, like: jax.Array) -> jax.Array:
    """Returns rows with the shape and sharding of `like`. The first one holds the sum of `rows`, the others are 0."""
    total = jnp.sum(rows, axis=0)
    if isinstance(like.sharding, NamedSharding):
        total = jax.device_put(total, NamedSharding(like.sharding.mesh, P(*like.sharding.spec[1:])))
    is_first = expand_like(jnp.arange(like.shape[0], dtype=jnp.int32) == 0, like)
    place = jax.jit(lambda is_first, x: jnp.where(is_first, x, jnp.zeros_like(x)), out_shardings=like.sharding)
    return place(is_first, total[None])


def expand_like(per_row: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns a scalar, or one number per row, in a shape that broadcasts against the rows."""
    return per_row.reshape(per_row.shape + (1,) * (rows.ndim - per_row.ndim)) if per_row.ndim else per_row


def sharding_of(x: Any) -> NamedSharding | None:
    """Returns the `NamedSharding` of an array over a mesh with axes, otherwise None."""
    sharding = jax.typeof(x).sharding if _is_traced(x) else getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names else None


def _is_traced(tree: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))
