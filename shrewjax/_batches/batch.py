"""The arguments of one call of `value_and_grad`: their roles, checked, and what a micro-batch gets of them.

Examples are divided among the micro-batches, keys are folded with a micro-batch's number, and all others are passed on
whole.
"""

import inspect
import math
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax._base import trees
from shrewjax._base.axes import as_varying, axes_by_dimension, device_index
from shrewjax._base.flax_names import changing_state
from shrewjax._base.types import AxisNames, DType, Function, KeyPath, Leaf, Number, Place, PyTree
from shrewjax._batches._call import Call, is_key, label
from shrewjax._batches._mistaken_roles import key_message, number_of_examples, other_batch

ROLES = "argnums", "rng_argnums", "carry_argnum", "batch_argnums"


def roles_of_arguments(
    given: Mapping[str, tuple[Place, ...] | None],
    fun: Function,
    count: int,
    keywords: Collection[str],
) -> dict[str, tuple[Place, ...]]:
    """Returns, for each role, how its arguments came: a position among those by position, or a keyword.

    `count` arguments came by position, and others by these keywords. A position names the parameter of `fun` there,
    however it is passed. A negative one counts back from the last argument that came by position.

    A role given as None has all arguments by position that none before it has. If there are none, it has all by keyword
    that none before it has. So it has to be the last of `given`. Raises if none is left for it, if there is no such
    argument, or if an argument has two roles.
    """
    names = positional_names(fun)
    roles: dict[str, tuple[Place, ...]] = {}
    taken: dict[Place, str] = {}
    for name, wanted in given.items():
        if wanted is None:
            by_position = tuple(at for at in range(count) if at not in taken)
            by_keyword = tuple(key for key in keywords if key not in taken)
            places: tuple[Place, ...] = by_position or by_keyword
            if not places:
                came = (
                    f"{count + len(keywords)} argument{'' if count + len(keywords) == 1 else 's'}"
                )
                raise ValueError(
                    f"no argument holds examples, because the call has {came}, in "
                    f"{', '.join(dict.fromkeys(taken.values()))}. Pass the batch. Or pass batch_argnums=() if there is "
                    "none"
                )
        else:
            places = tuple(_place(name, at, names, count, keywords) for at in wanted)
        for place in places:
            if place in taken:
                raise ValueError(
                    f"{label(place)} is in {taken[place]} and in {name}. Give it one of the two"
                )
            taken[place] = name
        roles[name] = places
    return roles


def positional_names(fun: Function) -> list[str]:
    """Returns the names of those parameters that may come by position; none if Python does not know them."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (ValueError, TypeError):  # of a function in C
        return []
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [x.name for x in parameters if x.kind in kinds]


def _place(role: str, at: Place, names: list[str], count: int, keywords: Collection[str]) -> Place:
    """Returns how the argument came that a position or a name means."""
    if at in keywords:
        return at
    if isinstance(at, str):
        if at in names[:count]:
            return names.index(at)
        came = ", ".join([*names[:count], *keywords]) or "none"
        raise ValueError(
            f"{role} names {at!r}, which no argument of the call has. Name one of those that came: {came}. Or pass a "
            "position"
        )
    if -count <= at < count:
        return at % count
    if 0 <= at < len(names) and names[at] in keywords:
        return names[at]
    came = f"{count} argument{'' if count == 1 else 's'} came by position"
    remedy = (
        f", and by keyword {', '.join(keywords)}. Name what came by keyword, such as {role}={next(iter(keywords))!r}"
        if keywords
        else ""
    )
    raise ValueError(f"{role} has the position {at}, but {came}{remedy}")


def in_order(function: Function, args: Collection[PyTree], kwargs: Collection[str]) -> Function:
    """Returns `function` of arguments in one order: as many by position, then those that it gets by these names."""
    count, names = len(args), tuple(kwargs)

    def of_values(*values: PyTree) -> PyTree:
        return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

    return of_values


class Batch(NamedTuple):
    """The arguments of one call in one order, those by position first. A number means an argument in this order."""

    args: tuple[PyTree, ...]
    roles: dict[str, tuple[int, ...]]
    own_params: dict[int, PyTree]  # those of `argnums`
    examples: dict[int, PyTree]  # as `_split_examples` returns them
    steps: int  # number of micro-batches
    first_number: Number  # of the device's first micro-batch, over all devices
    devices: int  # over which the call itself maps the examples, or 0

    def with_role(self, name: str) -> tuple[PyTree, ...]:
        return tuple(self.args[at] for at in self.roles[name])

    def arguments(self, i: Number, carried: list[PyTree]) -> list[PyTree]:
        replaced = self.own_params | _micro_batch_of(self.examples, i)
        for at in self.roles["rng_argnums"]:
            replaced[at] = _folded_keys(self.args[at], self.first_number + i)
        replaced |= dict(zip(self.roles["carry_argnum"], carried, strict=True))
        return [replaced.get(at, x) for at, x in enumerate(self.args)]

    def whole_arguments(self) -> list[PyTree]:
        """Returns the arguments of the whole batch on all devices. If the call maps it, its examples are zeros.

        Copies the trees, because `fun` may change them.
        """
        replaced = dict(self.own_params)
        if self.devices:
            parts = self.steps * self.devices
            replaced |= jax.tree.map(
                lambda x: jnp.zeros((len(x) * parts, *x.shape[2:]), x.dtype), self.examples
            )
        return jax.tree.map(lambda x: x, [replaced.get(at, x) for at, x in enumerate(self.args)])

    def to_map(self) -> "Batch":
        """Returns the batch without its examples, and with each other array once."""
        args = tuple(() if at in self.examples else x for at, x in enumerate(self.args))
        return self._replace(args=args, examples={}, own_params={})

    def of_device(self, examples: dict[int, PyTree], axes: AxisNames) -> "Batch":
        """Returns a batch without examples, with those of this device."""
        own_params = {at: self.args[at] for at in self.roles["argnums"]}
        first = device_index(axes) * self.steps
        return self._replace(examples=examples, own_params=own_params, first_number=first)

    def own_keys(self, carried: list[PyTree]) -> list[PyTree]:
        """Returns the carry with which a device begins. If the call maps it, each device has its own typed keys."""

        def fold(x: jax.Array) -> jax.Array:
            if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return x
            of_device = partial(jax.random.fold_in, data=self.first_number)
            return jax.vmap(of_device)(x.reshape(-1)).reshape(x.shape)

        return jax.tree.map(fold, carried) if self.devices else carried


def batch_of_arguments(
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    roles: dict[str, tuple[Place, ...]],
    steps: int,
    axes: AxisNames,
    devices: int,
) -> Batch:
    """Returns the arguments of one call by their roles, which are those of `roles_of_arguments`.

    A role that the caller does not have may be missing. `Batch.arguments` returns them for the function `in_order`.

    `axes` are those mapped axes over which the examples are divided already. `devices` is the number of devices over
    which they will be, or 0.
    """
    first_number = device_index(axes) * steps if axes else 0
    call = checked_call(args, kwargs, roles, steps, is_divided=steps * max(devices, 1) > 1)
    numbers, values = call.roles, call.values
    examples = _split_examples(call, devices)
    # Parameters become a device's own. In `shard_map`, JAX would otherwise reduce their gradients on every
    # micro-batch (tests/batches/test_value_and_grad.py, "cross_the_network_once").
    own_params = {
        at: jax.tree.map(lambda x: as_varying(x, axes), values[at]) for at in numbers["argnums"]
    }
    return Batch(values, numbers, own_params, examples, steps, first_number, devices)


def checked_call(
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    roles: dict[str, tuple[Place, ...]],
    steps: int,
    *,
    is_divided: bool,
) -> Call:
    """Returns the arguments of one call in one order. Raises if one does not fit its role.

    `is_divided` is whether there are several micro-batches, on all devices together.
    """
    places = (*range(len(args)), *kwargs)
    numbers = {name: tuple(map(places.index, roles.get(name, ()))) for name in ROLES}
    call = Call(places, (*args, *kwargs.values()), numbers, steps)
    _require_no_flax_state(call)
    for at in numbers["argnums"]:
        for path, x in call.leaves(at):
            _check_parameter(call.name(at, path), x)
    for at in numbers["rng_argnums"]:
        for path, x in call.leaves(at):
            _check_folded(call, at, path, x)
    count = number_of_examples(call)
    if is_divided:
        _check_whole(call, count)
    return call


def _require_no_flax_state(call: Call) -> None:
    """Raises if an NNX object has state that `fun` changes, because only `shrewjax.flax` keeps it."""
    for at, value in enumerate(call.values):
        is_model = at in (call.roles["argnums"] or (0,))
        for path, kind in changing_state(value, is_model=is_model):
            raise ValueError(
                f"{call.name(at, path)} is an NNX object with variables of the type {kind}, whose new values would be "
                "lost. Call shrewjax.flax.value_and_grad, or micro_batched of that module, with the model first"
            )


def _check_parameter(name: str, x: Leaf) -> None:
    dtype: DType = getattr(x, "dtype", np.object_)
    if not isinstance(x, float | complex) and not jnp.issubdtype(dtype, jnp.inexact):
        given = f"{dtype} of shape {x.shape}" if hasattr(x, "dtype") else trees.shown(x)
        raise ValueError(
            f"{name} must be a floating or complex array, because it is in argnums, got {given}. Split the model, and "
            "merge it in fun: in Equinox with eqx.partition(model, eqx.is_inexact_array), in Flax NNX with "
            "nnx.split(model, nnx.Param, ...)"
        )


def _check_folded(call: Call, at: int, path: KeyPath, x: Leaf) -> None:
    """Raises unless a leaf of an argument in `rng_argnums` is one key, typed or raw."""
    dtype: DType = getattr(x, "dtype", np.object_)
    is_typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if np.ndim(x) == (0 if is_typed else 1) and (is_typed or dtype == np.uint32):
        return
    given = f"shape {x.shape} and dtype {dtype}" if hasattr(x, "dtype") else trees.shown(x)
    raise ValueError(
        f"{call.name(at, path)} is in rng_argnums and must be one PRNG key, got {given}. Make it with jax.random.key, "
        "and pass what is no key as another argument. If each example has a key, name the argument in batch_argnums"
    )


def _split_examples(call: Call, devices_to_map: int) -> dict[int, PyTree]:
    """Returns arrays of shape (B, ...) as (B / K, K, ...), in which the second axis numbers the micro-batches.

    If the first axis is sharded over devices, each device's examples are so divided among all micro-batches.
    """
    steps = call.steps

    def divided(path: KeyPath, x: Leaf) -> jax.Array:
        name = call.name(path[0].key, path[1:])
        count, *rest = np.shape(x)
        _check_divisible(call, name, count, devices_to_map)
        x = jnp.asarray(x)
        devices = devices_to_map or _devices_along_first_axis(x)
        _check_divisible_over(name, count, steps, devices, is_mapped_here=devices_to_map > 0)
        return x.reshape(count // steps, steps, *rest)

    batch = {at: call.values[at] for at in call.roles["batch_argnums"]}
    return jax.tree.map_with_path(divided, batch)


def _check_divisible(call: Call, name: str, count: int, devices_to_map: int) -> None:
    together = call.steps * max(devices_to_map, 1)
    if count == 0:
        raise ValueError(
            f"{name} must hold at least one example, because the mean of none is NaN, got 0 examples. Leave out the "
            "call for an empty batch"
        )
    if count % call.steps:
        raise ValueError(
            f"{name} has {count} examples, which micro_batches={call.steps} does not divide. {other_batch(call)}If its "
            "first axis does not number the examples, move the axis that does to the front. Otherwise pad the batch to "
            f"{-(-count // together) * together}, and let weight= count the real ones. If the loss is a mean, let "
            "fun take it over the real ones, too"
        )


def _check_divisible_over(
    name: str, count: int, steps: int, devices: int, *, is_mapped_here: bool
) -> None:
    if count // steps % devices:
        padded = -(-count // (steps * devices)) * steps * devices
        remedy = "leave out sum_over" if is_mapped_here else "use a mesh with Auto axes"
        raise ValueError(
            f"{name} has {count} examples, sharded over {devices} devices, in micro-batches of "
            f"{count // steps}, which {devices} does not divide. Pad the batch to {padded}, and let weight= count the "
            f"real ones. Or {remedy}, so that examples may move between devices"
        )


def _devices_along_first_axis(x: jax.Array) -> int:
    """Returns over how many devices the type of an array shards its first axis: more than one on an Explicit mesh."""
    sharding: Any = jax.typeof(x).sharding
    over = axes_by_dimension(sharding.spec)[:1]
    return math.prod(sharding.mesh.shape[a] for names in over for a in names)


def _check_whole(call: Call, count: int | None) -> None:
    """Raises if arguments that reach every micro-batch whole hold PRNG keys, or one by keyword has B examples."""
    for at in call.whole():
        for path, x in call.leaves(at):
            if is_key(x):
                raise ValueError(key_message(call, at, path))
            if isinstance(call.places[at], str) and np.ndim(x) and np.shape(x)[0] == count:
                batch = call.as_role("batch_argnums", *call.roles["batch_argnums"], at)
                raise ValueError(
                    f"{call.name(at, path)} has a first axis of {count}, as many as the batch has examples, but every "
                    f"micro-batch gets arguments by keyword whole. If it holds examples, pass {batch}. Otherwise let "
                    "fun close over it"
                )


def _micro_batch_of(examples: dict[int, PyTree], i: Number) -> dict[int, PyTree]:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False), examples)


def _folded_keys(keys: PyTree, number: Number) -> PyTree:
    """Folds `number`, which counts micro-batches over all devices, into each key."""
    return jax.tree.map(lambda key: jax.random.fold_in(key, number), keys)
