"""The arguments of one call of `accumulated_value_and_grad`, divided: what a micro-batch gets of them.

Examples are divided among the micro-batches, keys are folded with a micro-batch's number, and all others are passed on
whole.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax._base.axes import as_varying, axes_by_dimension, device_index
from shrewjax._base.trees import is_typed_key
from shrewjax._base.types import AxisNames, KeyPath, Leaf, Number, PyTree
from shrewjax._batches.roles import Call


class Batch(NamedTuple):
    """The arguments of one call in one order, those by position first. A number means an argument in this order."""

    args: tuple[PyTree, ...]  # without examples
    numbers: Mapping[str, tuple[int, ...]]  # by role
    params: dict[int, PyTree]  # those of `argnums`
    examples: dict[int, PyTree]  # as `_split_examples` returns them
    divisor: int  # number of micro-batches
    first_number: Number = 0  # of the device's first micro-batch, over all devices
    devices: int = 0  # over which the call itself maps the examples, or 0

    def with_role(self, name: str) -> tuple[PyTree, ...]:
        return tuple(self.args[at] for at in self.numbers.get(name, ()))

    def arguments(self, i: Number, carried: list[PyTree]) -> list[PyTree]:
        of_examples = partial(lax.dynamic_index_in_dim, index=i, axis=1, keepdims=False)
        replaced = self.params | jax.tree.map(of_examples, self.examples)
        for at in self.numbers.get("rng_argnums", ()):
            fold = partial(jax.random.fold_in, data=self.first_number + i)
            replaced[at] = jax.tree.map(fold, self.args[at])
        replaced |= zip(self.numbers.get("carry_argnum", ()), carried, strict=True)
        return [replaced.get(at, x) for at, x in enumerate(self.args)]

    def whole_arguments(self) -> list[PyTree]:
        """Returns the arguments of the whole batch on all devices, to trace `fun`, which may change the trees."""

        def whole(x: jax.Array) -> jax.Array:
            of_device = x.reshape(len(x) * self.divisor, *x.shape[2:])
            return jnp.concatenate([of_device] * max(self.devices, 1))

        replaced = self.params | jax.tree.map(whole, self.examples)
        args = [replaced.get(at, x) for at, x in enumerate(self.args)]
        return jax.tree.map(lambda x: x, args)

    def of_device(self, examples: PyTree, args: PyTree, axes: AxisNames) -> "Batch":
        """Returns the batch of this device, from its examples and the other arguments."""
        params = {at: args[at] for at in self.numbers["argnums"]}
        first = device_index(axes) * self.divisor
        own = self._replace(args=args, params=params, examples=examples)
        return own._replace(first_number=first)

    def carry_of_device(self, carried: list[PyTree]) -> list[PyTree]:
        """Returns the carry with which a device begins. If the call maps it, each device has its own typed keys."""

        def fold(x: jax.Array) -> jax.Array:
            if not is_typed_key(x):
                return x
            of_device = partial(jax.random.fold_in, data=self.first_number)
            return jax.vmap(of_device)(x.reshape(-1)).reshape(x.shape)

        return jax.tree.map(fold, carried) if self.devices else carried


def batch_of_call(call: Call, sum_over: AxisNames, devices: int, is_sum: bool) -> Batch:
    """Returns the arguments of one call of `accumulated_value_and_grad` by their roles.

    `devices` is the number of devices over which the examples will be divided along the axes of `sum_over`. If it is 0,
    they are already.
    """
    axes = () if devices else sum_over
    first_number = device_index(axes) * call.divisor if axes else 0
    examples = _split_examples(call, devices, is_sum)

    def varying(x: Leaf) -> Leaf:
        return as_varying(x, axes) if isinstance(x, jax.Array) else x

    # Whole arguments become a device's own. In `shard_map`, JAX would otherwise reduce gradients by them on every
    # micro-batch (tests/batches/test_accumulated.py, "cross_the_network_once"), also those that `fun` takes itself
    # (tests/devices/test_sum_over.py, "inner_step").
    params = {at: call.values[at] for at in call.numbers["argnums"]}
    own = jax.tree.map(lambda x: as_varying(x, axes), params)
    whole = {at: jax.tree.map(varying, call.values[at]) for at in call.whole()}
    others = whole | dict.fromkeys(examples, ())
    args = tuple(others.get(at, x) for at, x in enumerate(call.values))
    return Batch(args, call.numbers, own, examples, call.divisor, first_number, devices)


def _split_examples(call: Call, devices_to_map: int, is_sum: bool) -> dict[int, PyTree]:
    """Returns arrays of shape (B, ...) as (B / K, K, ...), in which the second axis numbers the micro-batches.

    If the first axis is sharded over devices, each device's examples are so divided among all micro-batches.
    """
    divisor = call.divisor

    def divided(path: KeyPath, x: Leaf) -> jax.Array:
        name = call.name(path[0].key, path[1:])
        count, *rest = np.shape(x)
        x = jnp.asarray(x)
        if count or not is_sum:  # the sum of no terms is 0
            devices = devices_to_map or _devices_along_first_axis(x)
            _check_divisible(call, name, count, devices, is_sum)
        return x.reshape(count // divisor, divisor, *rest)

    batch = {at: call.values[at] for at in call.numbers["batch_argnums"]}
    return jax.tree.map_with_path(divided, batch)


def _check_divisible(call: Call, name: str, count: int, devices: int, is_sum: bool) -> None:
    if count == 0:
        raise ValueError(
            f"{name} must hold an example, got none. Leave out the call for an empty batch"
        )
    parts = call.divisor * devices
    if count % parts:
        over = f" on each of {devices} devices" if devices > 1 else ""
        padding = "let weight_fn= count the real ones"
        if is_sum:
            padding = "leave the padding out of the loss"
        raise ValueError(
            f"{name} has {count} examples, which micro_batches={call.divisor}{over} does not divide. Pad the batch to "
            f"{-(-count // parts) * parts}, and {padding}. If it holds none, pass parameters first, or pass "
            "batch_argnums="
        )


def _devices_along_first_axis(x: jax.Array) -> int:
    """Returns over how many devices the type of an array shards its first axis: more than one on an Explicit mesh."""
    sharding: Any = jax.typeof(x).sharding
    over = axes_by_dimension(sharding.spec)[:1]
    return math.prod(sharding.mesh.shape[a] for names in over for a in names)
