"""Per-device rows from any function: what it returns on each device's own examples, under plain `jax.jit`.

A partial `shard_map` runs the function on each device, so XLA partitions its program over the other axes of the mesh
alone. Whatever the function does, nothing crosses the axes of the batch.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from shrewjax._base import arguments
from shrewjax._base.axes import as_on_one_device, device_index, is_bound
from shrewjax._base.mesh import devices_to_map, on_each_device
from shrewjax._base.types import AxisName, Function, Leaf, PyTree
from shrewjax._batches.roles import Call, roles_of


def per_device(
    fun: Function,
    axis_names: AxisName,
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
    others by position, trees of arrays       its part of their first axis, in the order of devices along `axis_names`
    those in `rng_argnums`                    `jax.random.fold_in(key, d)`
    by keyword, if others come by position    all of it
    arrays that `fun` closes over             all of them, so a key is the same on every device; on an Explicit
                                              mesh, or if `fun` indexes one, an error, so pass it as an argument
    ========================================  ==================================================================

    Args:
      fun: any function that returns a tree of arrays and numbers. It must not place arrays over `axis_names`.
      axis_names: the axis of the mesh, or a tuple of axes, over which the batch is divided.
      batch_argnums: the arguments that hold examples: positions, or names as in `value_and_grad`. None: all that come
        by position, except the first and those of `rng_argnums`. If there are none, all that come by keyword, except
        these. The others reach every device whole, and may hold no PRNG key.
      rng_argnums: the arguments that are trees of PRNG keys, typed or raw: positions or names, as above.

    Returns:
      A function of `fun`'s arguments. It returns what `fun` returns, with a new first axis that has a row for each
      device and is sharded over `axis_names`.

    Raises:
      ValueError: an argument is not as described; `axis_names` are no axes of the mesh of `jax.set_mesh`, or they are
        mapped already; the devices do not divide an array of examples; a key, or by keyword an array with as many rows
        as the batch, is to reach every device whole; `fun` places arrays over `axis_names`, or changes its arguments in
        place.

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
    names = arguments.axis_names("axis_names", axis_names)
    if not names:
        raise ValueError(f"axis_names must name axes of the mesh, got {axis_names!r}")
    roles = roles_of(fun, None, rng_argnums, batch_argnums, "device")

    def rows_of_devices(*args: PyTree, **kwargs: PyTree) -> PyTree:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.manual_axes or any(map(is_bound, names)):
            raise ValueError(
                f"per_device must be called outside of shard_map and pmap, got axis_names={names!r}. Call fun itself "
                "there"
            )
        call = roles.call(args, kwargs, devices_to_map("axis_names", names))
        in_order = call.in_order(fun)

        def run(examples: dict[int, PyTree], others: dict[int, PyTree]) -> PyTree:
            fold = partial(jax.random.fold_in, data=device_index(names))
            for at in call.numbers["rng_argnums"]:
                others[at] = jax.tree.map(fold, others[at])
            given = examples | others
            before = jax.tree.leaves(given)
            with as_on_one_device(names):
                returned = in_order(*(given[at] for at in range(len(given))))
            _check_unchanged(call, before, given)
            return jax.tree.map(lambda x: jnp.asarray(x)[None], returned)

        examples = {at: call.values[at] for at in call.numbers["batch_argnums"]}
        others = {at: x for at, x in enumerate(call.values) if at not in examples}
        return on_each_device(run, names, examples, others, returns_parts=True)

    return rows_of_devices


def _check_unchanged(call: Call, before: list[Leaf], after: dict[int, PyTree]) -> None:
    """Raises if `fun` changed an argument in place, as a model of NNX does, because nobody would see the new value."""
    kept = {*map(id, before)}
    for at, value in after.items():
        for path, x in jax.tree.leaves_with_path(value):
            if id(x) not in kept:
                raise ValueError(
                    f"fun must not change its arguments, but it changed {call.name(at, path)}. Split the model, merge "
                    "it in fun, and return the new value"
                )
