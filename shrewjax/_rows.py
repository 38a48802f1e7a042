"""What each device has of its own, as the rows of one array.

Inside `shard_map` a device's own sum is an array with a leading axis of size 1; outside, the same array has a row for
each device along the mapped axes, sharded over them. So it can leave a step and enter the next one, be saved, and be
looked at. The other axes are the parameter's, sharded as that is.
"""

import math
from collections.abc import Collection, Hashable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shrewjax import _checks
from shrewjax._reductions import is_mapped, varying_axes, varying_over

Axes = tuple[Hashable, ...]


def mesh_of(params: chex.ArrayTree, axes: Axes) -> Mesh | AbstractMesh | None:
    """The mesh that has the axes: that of the parameters, else the context's. None where the axes are mapped."""
    if is_mapped(axes):
        return None
    leaves = [x for x in jax.tree.leaves(params) if hasattr(x, "dtype")]
    meshes = [sharding.mesh for sharding in map(_sharding, leaves) if sharding is not None]
    # A placeholder for parameters, as Optax has them, has no leaves, and needs no mesh.
    context = jax.sharding.get_abstract_mesh() if _is_traced(params) else jax.sharding.get_mesh()
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


def zeros(like: jax.Array, dtype: Any, axes: Axes, mesh: Mesh | AbstractMesh | None, name: str) -> jax.Array:
    """Zeros like a parameter, a row for each device; the parameter's name is for the error."""
    sharding = _sharding(like)
    spec = () if sharding is None else sharding.spec
    over = {a for dim in spec for a in (dim if isinstance(dim, tuple) else (dim,))} if mesh else varying_axes(like)
    if over & set(axes):
        raise ValueError(
            f"parameter {name} is sharded over {', '.join(map(repr, axes))} itself: its gradients are reduced as they "
            "come, and no device has a sum of its own. Use another mesh axis for the data; inside jax.shard_map, give "
            "init the parameters as they come in, before any jax.lax.pcast"
        )
    if mesh is None:
        return varying_over(jnp.zeros_like(like, dtype=dtype)[None], axes)
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


def moved(rows: jax.Array, like: jax.Array) -> jax.Array:
    """The same sum in as many rows as `like` has, and where that is: in the first of them, the others 0."""
    total = jnp.sum(rows, axis=0)
    if isinstance(like.sharding, NamedSharding):
        total = jax.device_put(total, NamedSharding(like.sharding.mesh, P(*like.sharding.spec[1:])))
    first = along(jnp.arange(like.shape[0], dtype=jnp.int32) == 0, like)
    place = jax.jit(lambda first, x: jnp.where(first, x, jnp.zeros_like(x)), out_shardings=like.sharding)
    return place(first, total[None])


def state_specs(opt_state: Any, *, axis_names: Collection[Hashable] | None = None) -> Any:
    """How the arrays of a state are spread over a mesh: what `jax.shard_map` wants as `in_specs` and `out_specs`.

    `tx.init` leaves counters on no device in particular, as every Optax transformation does. Where all arrays have to
    be on the mesh, such as for a checkpoint of several processes, place them with these specs:
    `jax.device_put(state, jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), state_specs(state)))`.

    With parameters replicated and the state sharded (ZeRO), each device holds a part of the sums and of the optimizer's
    state, and no `shard_map` is needed: `tx.init` of sharded parameters makes the state, as in the second example. The
    last link inside `accumulate` replicates the updates. Without it, `jax.jit` returns sharded parameters; with
    `out_shardings` in its place, it gathers parameters on every call.

    Args:
      opt_state: arrays, such as `tx.init(params)` with parameters that are placed on a mesh.
      axis_names: only these mesh axes, if `jax.shard_map` itself is given `axis_names`. `None` means all.

    Returns:
      The same tree of `jax.sharding.PartitionSpec`: that of each array's `NamedSharding`, an empty one for an array
      that has none, and so is the same on every device.

    Raises:
      ValueError: something is no array on a device, and so says nothing of its sharding: a NumPy array, or an abstract
        one, of `jax.eval_shape` for instance.

    Example:
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> params = jax.device_put(jnp.zeros(3), jax.sharding.NamedSharding(mesh, jax.P()))
      >>> tx = accumulate(optax.sgd(1.0), 2, sum_over="data")
      >>> specs = state_specs(tx.init(params))
      >>> specs.gradient_sum, specs.micro_step
      (P('data',), P())

      >>> whole, divided = (jax.sharding.NamedSharding(mesh, spec) for spec in (jax.P(), jax.P("data")))
      >>> replicate = optax.stateless(lambda updates, _: jax.lax.with_sharding_constraint(updates, whole))
      >>> tx = accumulate(optax.chain(optax.adamw(1e-3), replicate), 4)
      >>> params = jax.device_put(jnp.zeros(8), whole)
      >>> opt_state = tx.init(jax.device_put(params, divided))
      >>> state_specs(params), state_specs(opt_state.gradient_sum)
      (P(), P('data',))
      >>> step = jax.jit(lambda params, opt_state, grads: apply_gradients(tx, grads, opt_state, params))
      >>> params, opt_state = step(params, opt_state, jnp.ones(8))
    """

    def kept(names: Any) -> Any:
        if axis_names is None or names is None:
            return names
        if isinstance(names, tuple):
            return tuple(a for a in names if a in axis_names) or None
        return names if names in axis_names else None

    def spec(path: _checks.KeyPath, x: Any) -> P:
        sharding = _sharding(x)
        if sharding is not None:
            return P(*map(kept, sharding.spec))
        if not isinstance(x, jax.Array) and np.shape(x) != ():
            raise ValueError(
                f"leaf {_checks.leaf_name(path)} says nothing of its sharding: it is {type(x).__name__}, not an array "
                "on a device. Place it first, by redistribute for instance"
            )
        return P()

    return jax.tree.map_with_path(spec, opt_state)


def along(per_row: jax.Array, rows: jax.Array) -> jax.Array:
    """A number for each row, or one for all, shaped to go with the rows."""
    return per_row.reshape(per_row.shape + (1,) * (rows.ndim - per_row.ndim)) if per_row.ndim else per_row


def _sharding(x: Any) -> NamedSharding | None:
    sharding = jax.typeof(x).sharding if _is_traced(x) else getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names else None


def _is_traced(tree: Any) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))
