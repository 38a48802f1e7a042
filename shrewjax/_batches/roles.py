"""The roles of a function's arguments: which are parameters, keys, examples, and which stay whole.

Six functions divide a batch, among micro-batches or among devices. Each makes one object of its roles, which turns the
arguments of a call into a checked `Call`.
"""

import inspect
from collections.abc import Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shrewjax._base import arguments, trees
from shrewjax._base.flax_names import changing_state
from shrewjax._base.types import Argument, DType, Function, KeyPath, Leaf, Place, PyTree
from shrewjax._batches._call import Call, Part, is_key, label
from shrewjax._batches._mistaken_roles import key_message, number_of_examples


class Roles(NamedTuple):
    """The roles of the arguments of `fun`. Messages call a role by its key."""

    fun: Function
    given: Mapping[str, tuple[Place, ...] | None]  # the last is `batch_argnums`
    part: Part

    def call(
        self, args: tuple[PyTree, ...], kwargs: dict[str, PyTree], parts: int, devices: int = 1
    ) -> Call:
        """Returns the arguments of one call by their roles. Raises if one does not fit its role.

        `parts` is the number of micro-batches, each of which `devices` share, or the number of devices.
        """
        places = (*range(len(args)), *kwargs)
        of_roles = self._places(len(args), kwargs).items()
        roles = {name: tuple(map(places.index, of_role)) for name, of_role in of_roles}
        call = Call(places, (*args, *kwargs.values()), roles, parts, self.part)
        is_device = self.part == "device"
        if not is_device:
            _require_no_flax_state(call)
        for at in roles.get("argnums", ()):
            for path, x in call.leaves(at):
                _check_parameter(call.name(at, path), x)
        for at in roles["rng_argnums"]:
            for path, x in call.leaves(at):
                _check_folded(call, at, path, x)
        sizes = _rows_of_examples(call) if is_device else {number_of_examples(call)}
        if is_device or parts * devices > 1:
            _check_whole(call, sizes)
        return call

    def with_own(self, own: Mapping[str, tuple[Place, ...]]) -> "Roles":
        """Returns these roles after those of the function's own."""
        return self._replace(given={**own, **self.given})

    def _places(self, count: int, keywords: Collection[str]) -> dict[str, tuple[Place, ...]]:
        """Returns, for each role, how its arguments came: a position among those by position, or a keyword.

        `count` arguments came by position, and others by these keywords. A position names the parameter of `fun` there,
        however it is passed. A negative one counts back from the last argument that came by position.

        A role given as None has all arguments by position that none before it has. If there are none, it has all by
        keyword that none before it has. Raises if none is left for it, if there is no such argument, or if an argument
        has two roles.
        """
        names = positional_names(self.fun)
        roles: dict[str, tuple[Place, ...]] = {}
        taken: dict[Place, str] = {}
        for name, wanted in self.given.items():
            if wanted is None:
                by_position = tuple(at for at in range(count) if at not in taken)
                by_keyword = tuple(key for key in keywords if key not in taken)
                places: tuple[Place, ...] = by_position or by_keyword
                if not places:
                    total = count + len(keywords)
                    came = f"{total} argument{'' if total == 1 else 's'}"
                    raise ValueError(
                        f"no argument holds examples, because the call has {came}, in "
                        f"{', '.join(dict.fromkeys(taken.values()))}. Pass the batch. Or name it in batch_argnums=, "
                        "with () if there is none"
                    )
            else:
                places = tuple(_place_of_role(name, at, names, count, keywords) for at in wanted)
            for place in places:
                if place in taken:
                    raise ValueError(
                        f"{label(place)} is in {taken[place]} and in {name}. Give it one of the two"
                    )
                taken[place] = name
            roles[name] = places
        return roles


def roles_of(
    fun: Function,
    own: Mapping[str, tuple[Place, ...]] | None,
    rng_argnums: Argument,
    batch_argnums: Argument,
    part: Part = "micro-batch",
) -> Roles:
    """Returns the roles of `fun`'s arguments: the function's own ones, keys, and examples.

    `own` is None if the first argument has no role, and by default holds no examples.
    """
    if not callable(fun):
        raise ValueError(f"fun must be a function, got {trees.shown(fun)}")
    batch = None if batch_argnums is None else arguments.places("batch_argnums", batch_argnums)
    if own is None:
        own = {"what stays whole by default": (0,)} if batch is None else {}
    keys = arguments.places("rng_argnums", rng_argnums)
    return Roles(fun, {**own, "rng_argnums": keys, "batch_argnums": batch}, part)


def positional_names(fun: Function) -> list[str]:
    """Returns the names of those parameters that may come by position; none if Python does not know them."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (ValueError, TypeError):  # of a function in C
        return []
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [x.name for x in parameters if x.kind in kinds]


def _place_of_role(
    role: str, at: Place, names: list[str], count: int, keywords: Collection[str]
) -> Place:
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


def _require_no_flax_state(call: Call) -> None:
    """Raises if an NNX object has state that `fun` changes, because only `shrewjax.flax` keeps it."""
    for at, value in enumerate(call.values):
        is_model = at in (call.roles.get("argnums") or (0,))
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
        f"{call.name(at, path)} is in rng_argnums and must be one PRNG key, got {given}. Pass jax.random.key(seed), "
        "and all else as other arguments. Put keys of examples into batch_argnums"
    )


def _rows_of_examples(call: Call) -> set[int]:
    """Returns the numbers of examples. Raises if an array has no first axis that the devices divide."""
    devices, sizes = call.parts, set()
    for at in call.roles["batch_argnums"]:
        for path, x in call.leaves(at):
            name, shape = call.name(at, path), np.shape(x)
            is_rows_of_keys = shape and jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
            if is_key(x) and not is_rows_of_keys:
                raise ValueError(key_message(call, at, path))
            if not shape:
                raise ValueError(
                    f"{name} must have a first axis of examples, got {x!r}. Leave it out of batch_argnums= if it is "
                    "the same on all devices. Or pass it by keyword"
                )
            if shape[0] % devices:
                raise ValueError(
                    f"{name} must have a first axis that {devices} devices divide, got shape {shape}. Pad the batch to "
                    f"{-(-shape[0] // devices) * devices}, and pass numbers of real examples as weight=. If it holds "
                    "none, leave it out of batch_argnums="
                )
            sizes.add(shape[0])
    return sizes


def _check_whole(call: Call, sizes: Collection[int | None]) -> None:
    """Raises if arguments that reach every part whole hold PRNG keys, or one by keyword has B examples."""
    for at in call.whole():
        for path, x in call.leaves(at):
            if is_key(x):
                raise ValueError(key_message(call, at, path))
            if isinstance(call.places[at], str) and np.ndim(x) and np.shape(x)[0] in sizes:
                batch = call.as_role("batch_argnums", *call.roles["batch_argnums"], at)
                raise ValueError(
                    f"{call.name(at, path)} has a first axis of {len(x)}, as the batch has, but every {call.part} gets "
                    f"arguments by keyword whole. If it holds examples, pass {batch}. Otherwise let fun close over it"
                )
