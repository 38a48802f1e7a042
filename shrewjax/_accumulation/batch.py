"""The arguments of one call of `value_and_grad`: their roles, checked, and what a micro-batch gets of them.

Examples are divided among the micro-batches, keys are folded with a micro-batch's number, and all others are passed on
whole.
"""

import inspect
import math
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax._base.mesh import as_varying, axes_by_dimension, device_index
from shrewjax._base.types import AxisNames, DType, Function, KeyPath, Leaf, Number, PyTree

ROLES = "argnums", "rng_argnums", "carry_argnum", "batch_argnums"

Place: TypeAlias = int | str
"""How an argument came: its position, or its name if it came by keyword."""


def roles_of_arguments(
    given: Mapping[str, tuple[Place, ...] | None],
    fun: Function,
    count: int,
    keywords: Collection[str],
) -> dict[str, tuple[Place, ...]]:
    """Returns the places of each role's arguments, which are positions or names again that mean the same arguments.

    `count` arguments came by position, and others by these keywords. A position names the parameter of `fun` there,
    however it is passed. A negative one counts back from the last argument that came by position.

    A role given as None has all arguments by position that none before it has. If there are none, it has all by
    keyword that none before it has. So it comes last. Raises if none is left for it, if there is no such argument, or
    if an argument has two roles.
    """
    names = _positional_names(fun)
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
                    f"{label_of(place)} is in {taken[place]} and in {name}. Give it one of the two"
                )
            taken[place] = name
        roles[name] = places
    return roles


def _positional_names(fun: Function) -> list[str]:
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
    places: tuple[Place, ...]  # how each came
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
            name = label_of(self.places[at])
            replaced[at] = folded_keys(name, self.args[at], self.first_number + i)
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
    places = (*range(len(args)), *kwargs)
    values = (*args, *kwargs.values())
    numbers = {name: tuple(map(places.index, roles.get(name, ()))) for name in ROLES}
    _check_parameters(places, {at: values[at] for at in numbers["argnums"]})
    batch = {at: values[at] for at in numbers["batch_argnums"]}
    examples = _split_examples(places, batch, steps, devices)
    if steps * max(devices, 1) > 1:
        with_role = {at for role in numbers.values() for at in role}
        whole = {at: x for at, x in enumerate(values) if at not in with_role}
        sizes = {x.shape[0] * x.shape[1] for x in jax.tree.leaves(examples)}
        check_whole(places, whole, tuple(examples), sizes)
    # Parameters become a device's own. In `shard_map`, JAX would otherwise reduce their gradients on every
    # micro-batch (tests/accumulation/test_value_and_grad.py, "cross_the_network_once").
    own_params = {
        at: jax.tree.map(lambda x: as_varying(x, axes), values[at]) for at in numbers["argnums"]
    }
    return Batch(values, places, numbers, own_params, examples, steps, first_number, devices)


def _check_parameters(places: tuple[Place, ...], params: dict[int, PyTree]) -> None:
    def check(path: KeyPath, x: Leaf) -> None:
        dtype: DType = getattr(x, "dtype", np.object_)
        if not isinstance(x, float | complex) and not jnp.issubdtype(dtype, jnp.inexact):
            given = f"{dtype} of shape {x.shape}" if hasattr(x, "dtype") else repr(x)
            raise ValueError(
                f"{name_in(places, path)} must be a floating or complex array, because it is in argnums, got {given}. "
                "Split the model, and merge it in fun: in Equinox with eqx.partition(model, eqx.is_inexact_array), in "
                "Flax NNX with nnx.split(model, nnx.Param, ...)"
            )

    jax.tree.map_with_path(check, params)


def _split_examples(
    places: tuple[Place, ...], arguments: dict[int, PyTree], steps: int, devices_to_map: int
) -> dict[int, PyTree]:
    """Returns arrays of shape (B, ...) as (B / K, K, ...), in which the second axis numbers the micro-batches.

    If the first axis is sharded over devices, each device's examples are so divided among all micro-batches.
    """
    with_paths = jax.tree.leaves_with_path(arguments)
    for path, x in with_paths:
        _check_count(places, path, x, with_paths[0], tuple(arguments), steps)
        _check_divisible(name_in(places, path), len(x), steps, devices_to_map)

    def divided(path: KeyPath, x: Leaf) -> jax.Array:
        count, *rest = np.shape(x)
        x = jnp.asarray(x)
        devices = devices_to_map or _devices_along_first_axis(x)
        name = name_in(places, path)
        _check_divisible_over(name, count, steps, devices, is_mapped_here=devices_to_map > 0)
        return x.reshape(count // steps, steps, *rest)

    return jax.tree.map_with_path(divided, arguments)


def _check_count(
    places: tuple[Place, ...],
    path: KeyPath,
    x: Leaf,
    first: tuple[KeyPath, Leaf],
    batch: tuple[int, ...],
    steps: int,
) -> None:
    """Raises unless a leaf has as many examples as the first one."""
    at, name = path[0].key, name_in(places, path)
    wanted = tuple(places[other] for other in batch if other != at)
    if np.ndim(x) == 0:
        check_key(name, x, places[at])
        raise ValueError(
            f"{name} has no axis of examples, but shape (). If it is the same for all micro-batches, pass "
            f"batch_argnums={wanted}. If each example has its own, pass an array of them"
        )
    of_first, expected = first[0], np.shape(first[1])[0]
    if len(x) == expected:
        return
    check_key(name, x, places[at])
    raise ValueError(
        f"{name} has {len(x)} examples along its first axis, {name_in(places, of_first)} has {expected}. "
        + (
            "If it holds no examples, pass it as an argument of its own. If it holds parts of an example, such "
            f"as a graph's edges, stack {steps} padded batches along a new first axis"
            if at == of_first[0].key
            else f"If {label_of(places[at])} is the same for all micro-batches, pass batch_argnums={wanted}"
        )
    )


def _check_divisible(name: str, count: int, steps: int, devices_to_map: int) -> None:
    together = steps * max(devices_to_map, 1)
    if count % steps:
        raise ValueError(
            f"{name} has {count} examples, which micro_batches={steps} does not divide. If its first axis does "
            "not number the examples, move the axis that does to the front. Otherwise pad the batch to "
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


def label_of(place: Place) -> str:
    return f"argument {place}" if isinstance(place, int) else f"keyword argument {place}"


def name_in(places: tuple[Place, ...], path: KeyPath) -> str:
    """Returns the name of a leaf of the arguments, trees by their numbers, for messages."""
    return f"{label_of(places[path[0].key])}{jax.tree_util.keystr(path[1:])}"


def _devices_along_first_axis(x: jax.Array) -> int:
    """Returns over how many devices the type of an array shards its first axis: more than one on an Explicit mesh."""
    sharding: Any = jax.typeof(x).sharding
    over = axes_by_dimension(sharding.spec)[:1]
    return math.prod(sharding.mesh.shape[a] for names in over for a in names)


def check_whole(
    places: tuple[Place, ...],
    arguments: dict[int, PyTree],
    batch: tuple[int, ...],
    sizes: Collection[int],
    part: str = "micro-batch",
) -> None:
    """Raises if arguments that reach every part whole hold PRNG keys, or one by keyword has as many rows as the batch.

    A part is a micro-batch, or a device's own. `batch` are the numbers of the arguments that hold examples.
    """

    def check(path: KeyPath, x: Leaf) -> None:
        place, name = places[path[0].key], name_in(places, path)
        check_key(name, x, place, part)
        if isinstance(place, str) and np.ndim(x) and np.shape(x)[0] in sizes:
            wanted = (*(places[at] for at in batch), place)
            raise ValueError(
                f"{name} has a first axis of {np.shape(x)[0]}, as many as the batch has examples, but every "
                f"{part} gets arguments by keyword whole. If it holds examples, pass batch_argnums={wanted}. Otherwise "
                "let fun close over it"
            )

    jax.tree.map_with_path(check, arguments)


def check_key(name: str, x: Leaf, place: Place, part: str = "micro-batch") -> None:
    """Raises if a leaf is a PRNG key, or looks like a raw one."""
    dtype: DType = getattr(x, "dtype", np.object_)
    is_typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if is_typed or (dtype == np.uint32 and np.shape(x) in ((2,), (4,))):
        raise ValueError(
            f"{name} is a PRNG key, and each {part} needs its own. Pass rng_argnums={place!r}. If all shall have "
            "the same one, let fun close over it"
            + ("" if is_typed else ". If these numbers are no key, convert them to int32")
        )


def _micro_batch_of(examples: dict[int, PyTree], i: Number) -> dict[int, PyTree]:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False), examples)


def folded_keys(name: str, keys: PyTree, number: Number) -> PyTree:
    """Folds `number`, which counts micro-batches over all devices, into each key. Raises if a leaf is no single key."""

    def fold(path: KeyPath, key: Leaf) -> jax.Array:
        dtype: DType = getattr(key, "dtype", np.object_)
        is_typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        is_raw = not is_typed and dtype == np.uint32
        if np.ndim(key) != (0 if is_typed else 1) or not (is_typed or is_raw):
            given = f"shape {key.shape} and dtype {dtype}" if hasattr(key, "dtype") else repr(key)
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} is in rng_argnums and must be one PRNG key, got {given}. Make it "
                "with jax.random.key. If each example has a key, put the argument into batch_argnums"
            )
        return jax.random.fold_in(key, number)

    return jax.tree.map_with_path(fold, keys)
