"""Per-device rows from any function: what it returns on each device's own examples, under plain `jax.jit`.

A partial `shard_map` runs the function on each device, so XLA partitions its program over the other axes of the mesh
alone. Whatever the function does, nothing crosses the axes of the batch.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from shrewjax._base import arguments
from shrewjax._base.axes import as_on_one_device, device_index, is_bound
from shrewjax._base.mesh import on_each_device
from shrewjax._base.types import AxisName, AxisNames, DType, Function, Leaf, Place, PyTree
from shrewjax._batches._call import Call, is_key
from shrewjax._batches.batch import in_order, roles_of_arguments


def per_device(
    fun: Function,
    axes: AxisName,
    *,
    batch_argnums: int | str | Sequence[int | str] | None = None,
    rng_argnums: int | str | Sequence[int | str] = (),
) -> Callable[..., PyTree]:
    r"""Returns a function that runs `fun` on each device's own examples, and returns a row for each device.

    .. math:: \mathrm{rows}_d = \mathrm{fun}(\theta, x_d), \qquad d = 1, \dots, D

    With `per_device(jax.value_and_grad(loss), "data")`, row d has the loss and the gradients of device d. No gradient
    crosses the network. `accumulate(..., sum_over="data")` takes such rows, adds up each device's own, and sums them
    over devices when a window closes. `weight=` and `value=` are then numbers, or vectors with a number for each row.

    Call the returned function under `jax.jit` and `jax.set_mesh(mesh)`, where `fun` runs as on one device. It may be
    any function, such as one of `value_and_grad`, which then needs no `sum_over=`. XLA partitions it over the other
    axes of the mesh, as in tensor parallel training. On one device, `jax.vmap(fun, (None, 0))` of examples of shape
    (D, B / D, ...) returns the same rows. Use it in tests, and not on a mesh, because XLA then gathers the examples of
    all devices for some operations.

    ========================================  ==================================================================
    arguments                                 a device gets
    ========================================  ==================================================================
    the first one, such as parameters         all of it; over the other axes it stays sharded
    others by position, trees of arrays       its part of their first axis, in the order of devices along `axes`
    those in `rng_argnums`                    `jax.random.fold_in(key, d)`
    by keyword, if others come by position    all of it
    arrays that `fun` closes over             all of them; so a key is the same on every device
    ========================================  ==================================================================

    Args:
      fun: any function that returns a tree of arrays and numbers. It must not place arrays over `axes`.
      axes: the axis of the mesh, or a tuple of axes, over which the batch is divided.
      batch_argnums: the arguments that hold examples: positions, or names as in `value_and_grad`. None: all that come
        by position, except the first and those of `rng_argnums`. If there are none, all that come by keyword, except
        these. The others reach every device whole, and may hold no PRNG key.
      rng_argnums: the arguments that are trees of PRNG keys, typed or raw: positions or names, as above.

    Returns:
      A function of `fun`'s arguments. It returns what `fun` returns, with a new first axis that has a row for each
      device and is sharded over `axes`.

    Raises:
      ValueError: an argument is not as described; `axes` are no axes of the mesh of `jax.set_mesh`, or they are mapped
        already; the devices do not divide an array of examples; a key, or by keyword an array with as many rows as the
        batch, is to reach every device whole; `fun` places arrays over `axes`, or changes its arguments in place.

    Example:
      >>> def loss(params, x, y):
      ...     return jnp.mean((x @ params - y) ** 2)
      >>> devices = jax.device_count()
      >>> auto = jax.sharding.AxisType.Auto
      >>> mesh = jax.make_mesh((devices,), ("data",), axis_types=(auto,))
      >>> own = jax.jit(per_device(jax.value_and_grad(loss), "data"))
      >>> with jax.set_mesh(mesh):
      ...     value, grads = own(jnp.zeros(2), jnp.ones((16, 2)), jnp.ones(16))
      >>> value.shape == (devices,), grads.shape == (devices, 2)
      (True, True)

    Source: as for `accumulate`, by linearity of the gradient.
    """
    names = arguments.axis_names("axes", axes)
    if not names:
        raise ValueError(f"axes must name at least one axis of the mesh, got {axes!r}")
    keys = arguments.places("rng_argnums", rng_argnums)
    batch = None if batch_argnums is None else arguments.places("batch_argnums", batch_argnums)

    def rows_of_devices(*args: PyTree, **kwargs: PyTree) -> PyTree:
        devices = _devices_along(names)
        places = (*range(len(args)), *kwargs)
        roles = _roles(keys, batch, fun, len(args), kwargs)
        numbers = {name: tuple(map(places.index, of_role)) for name, of_role in roles.items()}
        call = Call(places, (*args, *kwargs.values()), numbers, devices)
        _check_divided(call)
        _check_keys(call)
        _check_whole(call)

        def run(examples: dict[int, PyTree], others: dict[int, PyTree]) -> PyTree:
            device = device_index(names)
            for at in numbers["rng_argnums"]:
                others[at] = jax.tree.map(lambda key: jax.random.fold_in(key, device), others[at])
            given = examples | others
            before = jax.tree.leaves(given)
            with as_on_one_device(names):
                returned = in_order(fun, args, kwargs)(*(given[at] for at in range(len(places))))
            _check_unchanged(call, before, given)
            return jax.tree.map(lambda x: jnp.asarray(x)[None], returned)

        examples = {at: call.values[at] for at in numbers["batch_argnums"]}
        others = {at: x for at, x in enumerate(call.values) if at not in examples}
        return on_each_device(run, names, examples, others, returns_parts=True)

    return rows_of_devices


def _devices_along(axes: AxisNames) -> int:
    """Returns the number of devices along these axes of the mesh. Raises if the call cannot map them."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes or any(map(is_bound, axes)):
        raise ValueError(
            f"per_device maps axes={axes!r} itself, so it must be called outside of shard_map, pmap and a vmap with "
            "axis_name, where a device has its own examples already. Call fun itself there"
        )
    if not {*axes} <= {*mesh.axis_names}:
        raise ValueError(
            f"axes must be axes of the mesh of jax.set_mesh, got {axes!r}, and the mesh has {mesh.axis_names}. Call "
            "the step under jax.set_mesh(mesh), with a mesh that has them. Or name the axes over which your mesh "
            "divides the batch"
        )
    return math.prod(mesh.shape[a] for a in axes)


def _roles(
    keys: tuple[Place, ...],
    batch: tuple[Place, ...] | None,
    fun: Function,
    count: int,
    kwargs: dict[str, PyTree],
) -> dict[str, tuple[Place, ...]]:
    """Returns the places of `rng_argnums` and of `batch_argnums`: by default all others but the first."""
    if batch is None and count + len(kwargs) <= 1 + len(keys):
        raise ValueError(
            f"no argument holds examples, because the call has {count + len(kwargs)}, and by default the first one "
            "reaches every device whole. Pass the batch after it. If the first one holds the examples, pass "
            "batch_argnums=0"
        )
    # The first one comes by position, or as the first parameter of `fun` by keyword.
    first: dict[str, tuple[Place, ...] | None] = {} if batch is not None else {_FIRST: (0,)}
    given = {"rng_argnums": keys, "batch_argnums": batch}
    roles = roles_of_arguments(first | given, fun, count, kwargs)
    return {name: roles[name] for name in given}


_FIRST = "the whole first argument"


def _check_divided(call: Call) -> None:
    """Raises if an array of examples has no first axis that the devices divide."""
    devices = call.steps
    for at in call.roles["batch_argnums"]:
        for path, x in call.leaves(at):
            name, shape = call.name(at, path), np.shape(x)
            is_rows_of_keys = shape and jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
            if is_key(x) and not is_rows_of_keys:
                raise ValueError(_key_message(call, at, name, x))
            if not shape:
                raise ValueError(
                    f"{name} must have a first axis of examples, got {x!r}. If it is the same on all devices, leave it "
                    "out of batch_argnums=, which by default has all by position but the first. Or pass it by keyword"
                )
            if shape[0] % devices:
                raise ValueError(
                    f"{name} must have a first axis that {devices} devices divide, got shape {shape}. Pad the batch to "
                    f"{-(-shape[0] // devices) * devices} examples, let fun take its mean over the real ones, and pass "
                    "their numbers as weight=. If it holds no examples, leave it out of batch_argnums="
                )


def _check_keys(call: Call) -> None:
    """Raises unless each leaf of the arguments in `rng_argnums` is one key, typed or raw."""
    for at in call.roles["rng_argnums"]:
        for path, x in call.leaves(at):
            dtype: DType = getattr(x, "dtype", np.object_)
            is_typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
            if np.ndim(x) != (0 if is_typed else 1) or not (is_typed or dtype == np.uint32):
                given = f"{dtype} of shape {np.shape(x)}" if hasattr(x, "dtype") else repr(x)
                raise ValueError(
                    f"{call.name(at, path)} is in rng_argnums and must be one PRNG key, got {given}. Make it with "
                    "jax.random.key. If each device or example has a key, put the argument into batch_argnums"
                )


def _check_whole(call: Call) -> None:
    """Raises if arguments that reach every device whole hold keys, or one by keyword has as many rows as the batch."""
    batch = call.roles["batch_argnums"]
    sizes = {np.shape(x)[0] for at in batch for _, x in call.leaves(at)}
    for at in call.whole():
        for path, x in call.leaves(at):
            name = call.name(at, path)
            if is_key(x):
                raise ValueError(_key_message(call, at, name, x))
            if isinstance(call.places[at], str) and np.ndim(x) and np.shape(x)[0] in sizes:
                raise ValueError(
                    f"{name} has a first axis of {np.shape(x)[0]}, as the batch has, but every device gets arguments "
                    f"by keyword whole. If it holds examples, pass {call.as_role('batch_argnums', *batch, at)}. "
                    "Otherwise let fun close over it"
                )


def _key_message(call: Call, at: int, name: str, x: Leaf) -> str:
    keys = call.as_role("rng_argnums", *call.roles["rng_argnums"], at)
    is_typed = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return (
        f"{name} is a PRNG key, and each device needs its own. Pass {keys}. If the argument holds other arrays, pass "
        "the key as an argument of its own. If all devices shall have the same one, let fun close over it"
        + ("" if is_typed else ". If these numbers are no key, convert them to int32")
    )


def _check_unchanged(call: Call, before: list[Leaf], after: dict[int, PyTree]) -> None:
    """Raises if `fun` changed an argument in place, as a model of NNX does, because nobody would see the new value."""
    kept = {*map(id, before)}
    for at, value in after.items():
        for path, x in jax.tree.leaves_with_path(value):
            if id(x) not in kept:
                raise ValueError(
                    f"fun must not change its arguments, but it gave {call.name(at, path)} a new value, of which each "
                    "device has its own. In Flax NNX, split the model, let fun merge it, and return the new value as "
                    "aux. Then reduce its rows, as by jax.tree.map(lambda x: x.mean(0), rows)"
                )
