"""States on a mesh: read how a state is sharded, and move it to another number of devices."""

from collections.abc import Collection, Hashable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shrewjax._base import trees
from shrewjax._base.axes import axes_by_dimension
from shrewjax._base.mesh import without_context_mesh
from shrewjax._base.states import fields, require_state
from shrewjax._base.types import AnyState, AxisNames, KeyPath, Leaf, PyTree, State
from shrewjax._windows import _devices
from shrewjax._windows.window_state import WINDOW_STATES


def state_specs(opt_state: AnyState, *, axis_names: Collection[Hashable] | None = None) -> PyTree:
    r"""Returns how a state's arrays are sharded over a mesh, as `in_specs` and `out_specs` for `jax.shard_map`.

    .. math:: P(p_1, \dots, p_n) \quad\Rightarrow\quad P(\mathrm{sum\_over}, p_1, \dots, p_n)

    The first is a parameter's spec, the second that of its sum, if that has a row a device.

    Use `state_specs(tx.init(params))` for a state with rows. `optax.tree.map_params` and Flax's
    `nn.get_partition_spec` give each sum the specs of its parameter, which put the rows of all devices on each device.

    `tx.init` of parameters on a mesh replicates counters over it, those of the wrapped optimizer too. Place other
    states, such as a bare optimizer's, with these specs:
    `jax.device_put(state, jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), state_specs(state)))`.

    The second example replicates parameters and shards the state (ZeRO), because `tx.init` of sharded parameters shards
    it. The last transformation inside `accumulate` replicates the updates. Without it, `jax.jit` returns sharded
    parameters. With `out_shardings` instead, it gathers parameters on every call.

    Args:
      opt_state: arrays, such as `tx.init(params)` with parameters that are placed on a mesh.
      axis_names: the mesh axes to keep in the specs, as passed to `jax.shard_map(axis_names=...)`. `None` means all.

    Returns:
      The same tree with a `jax.sharding.PartitionSpec` for each array: that of its `NamedSharding`, or an empty one
      (replicated).

    Raises:
      ValueError: `opt_state` is a transformation; a leaf is no array on a device and has no sharding, such as a NumPy
        array or a `jax.ShapeDtypeStruct` without one. A scalar is none of these, because it is replicated.

    Example:
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> params = jax.device_put(jnp.zeros(3), jax.sharding.NamedSharding(mesh, jax.P()))
      >>> tx = accumulate(optax.sgd(1.0), 2, sum_over="data")
      >>> specs = state_specs(tx.init(params))
      >>> specs.gradient_sum, specs.micro_step
      (P('data',), P())

      >>> whole = jax.sharding.NamedSharding(mesh, jax.P())
      >>> divided = jax.sharding.NamedSharding(mesh, jax.P("data"))
      >>> replicate = optax.stateless(
      ...     lambda updates, _: jax.lax.with_sharding_constraint(updates, whole)
      ... )
      >>> tx = accumulate(optax.chain(optax.adamw(1e-3), replicate), 4)
      >>> params = jax.device_put(jnp.zeros(8), whole)
      >>> opt_state = tx.init(jax.device_put(params, divided))
      >>> state_specs(params), state_specs(opt_state.gradient_sum)
      (P(), P('data',))
      >>> def step(params, state, grads):
      ...     return apply_gradients(tx, grads, state, params)
      >>> step = jax.jit(step, donate_argnums=(0, 1))
      >>> params, opt_state = step(params, opt_state, jnp.ones(8))

    Source: the specs have the form that `jax.shard_map` takes as `in_specs`.
    """

    require_state(opt_state)

    def kept(names: AxisNames) -> AxisNames | None:
        return tuple(a for a in names if axis_names is None or a in axis_names) or None

    def spec(path: KeyPath, x: Leaf) -> P:
        sharding = _devices.sharding_of(x)
        if sharding is not None:
            return P(*map(kept, axes_by_dimension(sharding.spec)))
        # A scalar is replicated, also if it is on no device, such as a Python number.
        if not isinstance(x, jax.Array) and np.shape(x) != ():
            raise ValueError(
                f"leaf {trees.leaf_name(path)} must be an array on a device, got {type(x).__name__}. Place it by "
                "redistribute"
            )
        return P()

    return jax.tree.map_with_path(spec, opt_state)


def redistribute(opt_state: State, like: State) -> State:
    r"""Moves a state with windows of `accumulate(..., sum_over=...)`, open or empty, to another number of devices.

    .. math:: r'_0 = \sum_d r_d, \qquad r'_1 = r'_2 = \dots = 0
              \qquad\Rightarrow\qquad \sum_d r'_d = \sum_d r_d

    A window has one row per device along `sum_over`, and only their sum matters. The new state has one row per device
    of `like`. All other values stay unchanged, and all arrays get the sharding of `like`.

    Restore a checkpoint with the number of rows with which it was written, and then pass it here.
    `examples/train_sharded.py` does so with Orbax.

    Args:
      opt_state: a state, for example from a checkpoint, or a tree that contains one, such as `(params, state)`.
      like: a tree of the same structure on the new devices, such as `tx.init(params)` of the placed parameters.

    Returns:
      The state with the values of `opt_state` and the shapes and shardings of `like`.

    Raises:
      ValueError: the two differ in structure, a dtype or a shape (the number of rows may differ); a leaf of `like` is
        no array on a device.

    Example:
      >>> tx = accumulate(optax.sgd(1.0), 2, sum_over="data")
      >>> def placed(axis_size):
      ...     auto = jax.sharding.AxisType.Auto
      ...     mesh = jax.make_mesh((axis_size,), ("data",), axis_types=(auto,))
      ...     return jax.device_put(jnp.zeros(3), jax.sharding.NamedSharding(mesh, jax.P()))
      >>> state = tx.init(placed(jax.device_count()))
      >>> redistribute(state, like=tx.init(placed(1))).gradient_sum.shape
      (1, 3)

    Source: a closing window only uses the sum of its rows.
    """
    given, expected = jax.tree.structure(opt_state), jax.tree.structure(like)
    if str(given) != str(expected):
        raise ValueError(f"opt_state must have the structure of like, {expected}, got {given}")
    with without_context_mesh():  # whose devices need not be those of the rows
        with_rows = jax.tree.map(_with_rows_of, opt_state, like, is_leaf=_is_window)
        return jax.tree.map_with_path(_placed_as, with_rows, like)


def _is_window(x: PyTree) -> bool:
    return isinstance(x, WINDOW_STATES)


def _with_rows_of(window: AnyState, like: AnyState) -> AnyState:
    """Returns a window with its rows summed into as many as `like` has. All else is returned as it is.

    So is an array that does not fit `like`. `_placed_as` then raises an error that names the leaf.
    """
    if not _is_window(window) or not window.sum_of_weights.ndim:
        return window

    def summed(x: Leaf, like: Leaf) -> Leaf:
        may_fit = isinstance(like, jax.Array) and like.ndim == np.ndim(x) > 0
        fits = may_fit and like.shape[1:] == np.shape(x)[1:]
        return _devices.redistributed(x, like) if fits else x

    # Only sums have rows. The first dimension of inner's arrays is their own.
    names = [name for name in window._fields if name != "inner_state"]
    sums, like_sums = fields(window, *names), fields(like, *names)
    return window._replace(**jax.tree.map(summed, sums, like_sums))


def _placed_as(path: KeyPath, x: Leaf, like: Leaf) -> jax.Array:
    """Returns an array on the devices of `like`. Raises if shapes or dtypes differ."""
    name = trees.leaf_name(path)
    if not isinstance(like, jax.Array):
        raise ValueError(
            f"leaf {name} of like must be an array on a device, got {trees.shown(like)}"
        )
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    if (x.shape, x.dtype) != (like.shape, like.dtype):
        raise ValueError(
            f"leaf {name} must be {like.dtype} of shape {like.shape}, as in like, got {x.dtype} of shape {x.shape}"
        )
    if like.committed:
        return jax.device_put(x, like.sharding)
    # Counters and other uncommitted arrays must stay uncommitted. `jit` refuses an array that is committed to one
    # device beside arrays on the mesh (tests/devices/test_distribution.py, "on_half_as_many_devices").
    if trees.is_typed_key(x):
        data = jnp.asarray(np.asarray(jax.random.key_data(x)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jnp.asarray(np.asarray(x))
