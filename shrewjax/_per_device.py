"""What each device has of its own, as the rows of one array.

Inside `shard_map` a device's own sum is an array with a leading axis of size 1; outside, the same array has a row for
each device along the mapped axes, sharded over them. So it can leave a step and enter the next one, be saved, and be
looked at. The other axes are the parameter's, sharded as that is.
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

Axes = tuple[Hashable, ...]


def mesh_of(params: chex.ArrayTree, axes: Axes) -> Mesh | AbstractMesh | None:
    """The mesh that has the axes: that of the parameters, else the context's. None where the axes are mapped."""
    if is_mapped(axes):
        return None
    leaves = [x for x in jax.tree.leaves(params) if hasattr(x, "dtype")]
    meshes = [sharding.mesh for sharding in map(sharding_of, leaves) if sharding is not None]
    # A placeholder for parameters, as Optax has them, has no leaves, and needs no mesh.
    context = jax.sharding.get_abstract_mesh() if _is_traced(params) else _compat.context_mesh()
    for mesh in (*meshes, context):
        if set(axes) <= set(mesh.axis_names):
            return mesh
    if not leaves:
        return None
    raise ValueError(
        f"sum_over {', '.join(map(repr, axes))}: the size of the accumulator's leading axis is that of the mesh, and "
        "there is none here. Call init with parameters that are placed on the mesh, outside of jit (or under it, on a "
        "mesh with Explicit axes), or under jax.set_mesh(mesh), or inside jax.shard_map"
    )


def zero_rows(like: jax.Array, dtype: Any, axes: Axes, mesh: Mesh | AbstractMesh | None, name: str) -> jax.Array:
    """Zeros like a parameter, a row for each device; the parameter's name is for the error."""
    sharding = sharding_of(like)
    spec = () if sharding is None else sharding.spec
    over = {a for dim in spec for a in (dim if isinstance(dim, tuple) else (dim,))} if mesh else varying_axes(like)
    if over & set(axes):
        raise ValueError(
            f"parameter {name} is sharded over {', '.join(map(repr, axes))} itself: its gradients are reduced as they "
            "come, and no device has a sum of its own. Use another mesh axis for the data; inside jax.shard_map, give "
            "init the parameters as they come in, before any jax.lax.pcast"
        )
    if mesh is None:
        return as_varying(jnp.zeros_like(like, dtype=dtype)[None], axes)
    shape = (math.prod(mesh.shape[a] for a in axes), *like.shape)
    if isinstance(mesh, Mesh):
        return jnp.zeros(shape, dtype, device=NamedSharding(mesh, P(axes, *spec)))
    if any(kind != AxisType.Explicit for kind in mesh.axis_types):
        raise ValueError(
            f"under jit, parameter {name} does not say how it is sharded over a mesh whose axes are not Explicit: call "
            "init outside of jit"
        )
    rows = jnp.broadcast_to(jnp.zeros_like(like, dtype=dtype)[None], shape)
    return jax.sharding.reshard(rows, P(axes, *spec))


def redistributed_rows(rows: jax.Array, like: jax.Array) -> jax.Array:
    """The same sum in as many rows as `like` has, and where that is: in the first of them, the others 0."""
    total = jnp.sum(rows, axis=0)
    if isinstance(like.sharding, NamedSharding):
        total = jax.device_put(total, NamedSharding(like.sharding.mesh, P(*like.sharding.spec[1:])))
    first = along(jnp.arange(like.shape[0], dtype=jnp.int32) == 0, like)
    place = jax.jit(lambda first, x: jnp.where(first, x, jnp.zeros_like(x)), out_shardings=like.sharding)
    return place(first, total[None])


def along(per_row: jax.Array, rows: jax.Array) -> jax.Array:
    """A number for each row, or one for all, shaped to go with the rows."""
    return per_row.reshape(per_row.shape + (1,) * (rows.ndim - per_row.ndim)) if per_row.ndim else per_row


def sharding_of(x: Any) -> NamedSharding | None:
    sharding = jax.typeof(x).sharding if _is_traced(x) else getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names else None


def _is_traced(tree: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))
