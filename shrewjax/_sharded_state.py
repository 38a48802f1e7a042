"""TODO."""

from collections.abc import Collection, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shrewjax import _gradients, _per_device
from shrewjax._accumulation import WINDOW_STATES
from shrewjax._per_device import sharding_of
from shrewjax._states import State


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

    def spec(path: _gradients.KeyPath, x: Any) -> P:
        sharding = sharding_of(x)
        if sharding is not None:
            return P(*map(kept, sharding.spec))
        if not isinstance(x, jax.Array) and np.shape(x) != ():
            raise ValueError(
                f"leaf {_gradients.leaf_name(path)} must be an array on a device, got {type(x).__name__}, which has no "
                "sharding. Place it first, by redistribute for instance"
            )
        return P()

    return jax.tree.map_with_path(spec, opt_state)


def redistribute(opt_state: State, like: State) -> State:
    """A state with windows of `accumulate(..., sum_over=...)`, in mid-window or not, on another number of devices.

    A window has a row for each device along `sum_over`, and only their sum means something: it goes to the first of
    as many rows as there are devices now. The other arrays stay as they are. All are placed as those of `like`.

    A checkpoint holds the rows of the devices that wrote it: that is what it has to be restored as, before it comes
    here. `examples/train_sharded.py` does so with Orbax.

    Args:
      opt_state: a state, from a checkpoint for instance, or a tree that holds one, such as `(params, state)`.
      like: the same as it is placed now, such as what `tx.init` makes of the parameters.

    Returns:
      The state with the values of `opt_state` and the shapes and shardings of `like`.

    Raises:
      ValueError: the two differ in structure, in a dtype, or in a shape but for the number of rows.

    Example:
      >>> tx = accumulate(optax.sgd(1.0), 2, sum_over="data")
      >>> def placed(axis_size):
      ...     mesh = jax.make_mesh((axis_size,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      ...     return jax.device_put(jnp.zeros(3), jax.sharding.NamedSharding(mesh, jax.P()))
      >>> state = tx.init(placed(jax.device_count()))
      >>> redistribute(state, like=tx.init(placed(1))).gradient_sum.shape
      (1, 3)
    """
    given, expected = jax.tree.structure(opt_state), jax.tree.structure(like)
    if str(given) != str(expected):
        raise ValueError(f"opt_state has the structure {given}, like has {expected}")

    def place(path: _gradients.KeyPath, x: Any, like: Any) -> jax.Array:
        if not isinstance(like, jax.Array):
            raise ValueError(f"leaf {_gradients.leaf_name(path)} of like is no array on a device, but {like!r}")
        x = x if isinstance(x, jax.Array) else jnp.asarray(x)
        if (x.shape, x.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"leaf {_gradients.leaf_name(path)} must be {like.dtype} of shape {like.shape}, as in like, got "
                f"{x.dtype} of shape {x.shape}"
            )
        if like.committed:
            return jax.device_put(x, like.sharding)
        # What is on no device in particular, such as a counter, stays so, or no program would take both.
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = jnp.asarray(np.asarray(jax.random.key_data(x)))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return jnp.asarray(np.asarray(x))

    def move(x: Any, like: Any) -> Any:
        """Rows, as many as there are now; what does not fit is left for `place` to refuse."""
        return (
            _per_device.redistributed_rows(x, like) if x.ndim == like.ndim > 0 and x.shape[1:] == like.shape[1:] else x
        )

    def place_window(path: _gradients.KeyPath, window: Any, like: Any) -> Any:
        if not isinstance(window, WINDOW_STATES):
            return place(path, window, like)
        if window.weight_sum.ndim:
            window = window._replace(
                weight_sum=move(window.weight_sum, like.weight_sum),
                gradient_sum=jax.tree.map(move, window.gradient_sum, like.gradient_sum),
            )
        return type(window)(*(jax.tree.map_with_path(place, *fields) for fields in zip(window, like, strict=True)))

    return jax.tree.map_with_path(place_window, opt_state, like, is_leaf=lambda x: isinstance(x, WINDOW_STATES))
