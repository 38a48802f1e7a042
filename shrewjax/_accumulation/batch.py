"""The arguments of one call of `value_and_grad`: their roles, checked, and what a micro-batch gets of them.

Examples are divided among the micro-batches, keys are folded with a micro-batch's number, and all others are passed on
whole.
"""

import math
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax._base.mesh import as_varying, axes_by_dimension, device_index
from shrewjax._base.types import AxisNames, DType, KeyPath, Leaf, Number, PyTree


def roles_of_arguments(
    given: Mapping[str, tuple[int, ...] | None], count: int, keywords: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Returns the positions of each role's arguments, counted from the front.

    A role given as None has all arguments that none before it has, so it comes last. Raises if none is left for it, if
    a position is out of range, or if an argument has two roles.
    """
    plural = "" if count == 1 else "s"
    roles: dict[str, tuple[int, ...]] = {}
    taken: dict[int, str] = {}
    for name, positions in given.items():
        if positions is None:
            positions = tuple(at for at in range(count) if at not in taken)
            if not positions:
                raise ValueError(
                    f"no argument holds examples, because the call has {count} positional argument"
                    f"{plural}, in {', '.join(dict.fromkeys(taken.values()))}. Pass the batch by "
                    "position. Or pass batch_argnums=() if there is none"
                )
        for at in positions:
            if not -count <= at < count:
                came = (
                    f"{name} has the position {at}, but {count} argument{plural} came by position"
                )
                remedy = (
                    f", and by keyword {', '.join(keywords)}. Pass what {name} names by position"
                    if keywords
                    else ""
                )
                raise ValueError(came + remedy)
            if at % count in taken:
                raise ValueError(
                    f"argument {at % count} is in {taken[at % count]} and in {name}. Give it one of the two"
                )
            taken[at % count] = name
        roles[name] = tuple(at % count for at in positions)
    return roles


class Batch(NamedTuple):
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    roles: dict[str, tuple[int, ...]]
    own_params: dict[int, PyTree]  # those of `argnums`, by position
    examples: dict[int, PyTree]  # as `_split_examples` returns them
    steps: int  # number of micro-batches
    first_number: Number  # of the device's first micro-batch, over all devices
    devices: int  # over which the call itself maps the examples, or 0

    def with_role(self, name: str) -> tuple[PyTree, ...]:
        return tuple(self.args[at] for at in self.roles[name])

    def arguments(self, i: Number, carried: list[PyTree]) -> list[PyTree]:
        replaced = self.own_params | _micro_batch_of(self.examples, i)
        for at in self.roles["rng_argnums"]:
            replaced[at] = folded_keys(f"argument {at}", self.args[at], self.first_number + i)
        replaced |= dict(zip(self.roles["carry_argnum"], carried, strict=True))
        return [replaced.get(at, x) for at, x in enumerate(self.args)]

    def whole_arguments(self) -> list[PyTree]:
        """Returns the arguments of the whole batch on all devices. If the call maps it, its examples are zeros.

        Copies the trees, because `fun` may change them.
        """
        replaced = dict(self.own_params)
        if self.devices:
            rows = self.steps * self.devices
            replaced |= jax.tree.map(
                lambda x: jnp.zeros((len(x) * rows, *x.shape[2:]), x.dtype), self.examples
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
    roles: dict[str, tuple[int, ...]],
    steps: int,
    axes: AxisNames,
    devices: int,
) -> Batch:
    """Returns the arguments of one call by their roles.

    `axes` are those mapped axes over which the examples are divided already. `devices` is the number of devices over
    which they will be, or 0.
    """
    first_number = device_index(axes) * steps if axes else 0
    _check_parameters({at: args[at] for at in roles["argnums"]})
    examples = _split_examples({at: args[at] for at in roles["batch_argnums"]}, steps, devices)
    if steps * max(devices, 1) > 1:
        with_role = {at for positions in roles.values() for at in positions}
        sizes = {x.shape[0] * x.shape[1] for x in jax.tree.leaves(examples)}
        check_whole({at: x for at, x in enumerate(args) if at not in with_role}, kwargs, sizes)
    # Parameters become a device's own. In `shard_map`, JAX would otherwise reduce their gradients on every
    # micro-batch (tests/accumulation/test_value_and_grad.py, "cross_the_network_once").
    own_params = {
        at: jax.tree.map(lambda x: as_varying(x, axes), args[at]) for at in roles["argnums"]
    }
    return Batch(args, kwargs, roles, own_params, examples, steps, first_number, devices)


def _check_parameters(params: dict[int, PyTree]) -> None:
    def check(path: KeyPath, x: Leaf) -> None:
        dtype: DType = getattr(x, "dtype", np.object_)
        if not isinstance(x, float | complex) and not jnp.issubdtype(dtype, jnp.inexact):
            given = f"{dtype} of shape {x.shape}" if hasattr(x, "dtype") else repr(x)
            raise ValueError(
                f"{_name(path)} must be a floating or complex array, because it is in argnums, got {given}. Split the "
                "model, and merge it in fun: in Equinox with eqx.partition(model, eqx.is_inexact_array), in Flax NNX "
                "with nnx.split(model, nnx.Param, ...)"
            )

    jax.tree.map_with_path(check, params)


def _split_examples(
    arguments: dict[int, PyTree], steps: int, devices_to_map: int
) -> dict[int, PyTree]:
    """Returns arrays of shape (B, ...) as (B / K, K, ...), in which the second axis numbers the micro-batches.

    If the first axis is sharded over devices, each device's examples are so divided among all micro-batches.
    """
    first: dict[KeyPath, int] = {}  # the first array's number of examples

    def of_micro_batches(path: KeyPath, x: Leaf) -> jax.Array:
        at, name = path[0].key, _name(path)
        others = tuple(other for other in arguments if other != at)
        if np.ndim(x) == 0:
            check_key(name, x, at)
            raise ValueError(
                f"{name} has no axis of examples, but shape (). If it is the same for all micro-batches, pass "
                f"batch_argnums={others}. If each example has its own, pass an array of them"
            )
        count, *rest = np.shape(x)
        if not first:
            first[path] = count
        ((of_first, expected),) = first.items()
        if count != expected:
            check_key(name, x, at)
            raise ValueError(
                f"{name} has {count} examples along its first axis, {_name(of_first)} has {expected}. "
                + (
                    "If it holds no examples, pass it as an argument of its own. If it holds parts of an example, such "
                    f"as a graph's edges, stack {steps} padded batches along a new first axis"
                    if at == of_first[0].key
                    else f"If argument {at} is the same for all micro-batches, pass batch_argnums={others}"
                )
            )
        together = steps * max(devices_to_map, 1)
        if count % steps:
            raise ValueError(
                f"{name} has {count} examples, which micro_batches={steps} does not divide. If its first axis does not "
                "number the examples, move the axis that does to the front. Otherwise pad the batch to "
                f"{-(-count // together) * together}, and let weight= count the real ones. If the loss is a mean, let "
                "fun take it over the real ones, too"
            )
        x = jnp.asarray(x)
        devices = devices_to_map or _devices_along_first_axis(x)
        if count // steps % devices:
            padded = -(-count // (steps * devices)) * steps * devices
            remedy = "leave out sum_over" if devices_to_map else "use a mesh with Auto axes"
            raise ValueError(
                f"{name} has {count} examples, sharded over {devices} devices, in micro-batches of {count // steps}, "
                f"which {devices} does not divide. Pad the batch to {padded}, and let weight= count the real ones. Or "
                f"{remedy}, so that examples may move between devices"
            )
        return x.reshape(count // steps, steps, *rest)

    return jax.tree.map_with_path(of_micro_batches, arguments)


def _name(path: KeyPath) -> str:
    """Returns the name of a leaf of the arguments, a tree by position, for messages."""
    return f"argument {path[0].key}{jax.tree_util.keystr(path[1:])}"


def _devices_along_first_axis(x: jax.Array) -> int:
    """Returns over how many devices the type of an array shards its first axis: more than one on an Explicit mesh."""
    sharding: Any = jax.typeof(x).sharding
    over = axes_by_dimension(sharding.spec)[:1]
    return math.prod(sharding.mesh.shape[a] for names in over for a in names)


def check_whole(
    arguments: dict[int, PyTree],
    keywords: dict[str, PyTree],
    sizes: Collection[int],
    part: str = "micro-batch",
) -> None:
    """Raises if arguments that reach every part whole hold PRNG keys, or one by keyword has as many rows as a batch.

    A part is a micro-batch, or a device's own.
    """

    def check(path: KeyPath, x: Leaf) -> None:
        of, at = path[0].key, path[0].key if path[0].key in arguments else None
        name = f"{'keyword argument' if at is None else 'argument'} {of}{jax.tree_util.keystr(path[1:])}"
        check_key(name, x, at, part)
        if at is None and np.ndim(x) and np.shape(x)[0] in sizes:
            raise ValueError(
                f"{name} has {np.shape(x)[0]} rows, as many as the batch has examples, but every {part} gets "
                "arguments by keyword whole. Pass it by position. If it holds no examples, leave its position out of "
                "batch_argnums="
            )

    jax.tree.map_with_path(check, arguments)
    jax.tree.map_with_path(check, keywords)


def check_key(name: str, x: Leaf, at: int | None, part: str = "micro-batch") -> None:
    """Raises if a leaf is a PRNG key, or looks like a raw one. `at` is the argument's position, if it has one."""
    dtype: DType = getattr(x, "dtype", np.object_)
    is_typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if is_typed or (dtype == np.uint32 and np.shape(x) in ((2,), (4,))):
        remedy = (
            "it by position, and its position in rng_argnums="
            if at is None
            else f"rng_argnums={at}"
        )
        raise ValueError(
            f"{name} is a PRNG key, and each {part} needs its own. Pass {remedy}. If all shall have the same one, "
            "let fun close over it"
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
