"""Which argument of a call is what: parameters, keys, examples, and those that stay whole.

Several functions divide a batch, among micro-batches or among devices. Each makes one object of its roles (`Roles`),
which turns the arguments of a call into a checked `Call`, with all arguments in one order.

A batch often holds a leaf of another role: a scalar, a key, class weights, another network's parameters. A message
names the leaf, what it needs and what came. Then it names the roles to pass.
"""

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from shrewjax._base import arguments, trees
from shrewjax._base.flax_names import changing_state
from shrewjax._base.types import Argument, DType, Function, KeyPath, Leaf, Place, PyTree

PartName = Literal["micro-batch", "device"]

Places: TypeAlias = dict[str, tuple[Place, ...]]
"""For each role, how its arguments came."""


def label(place: Place) -> str:
    """Returns an argument's name in messages."""
    kind = "argument" if isinstance(place, int) else "keyword argument"
    return f"{kind} {place}"


LeafOfCall: TypeAlias = tuple[int, KeyPath, Leaf]
"""A leaf of a call, behind the number of its argument and its path there."""


class Call(NamedTuple):
    """The arguments of one call in one order, those by position first. A number means an argument in this order."""

    places: tuple[Place, ...]
    values: tuple[PyTree, ...]
    numbers: dict[str, tuple[int, ...]]  # by role
    divisor: int  # the number of micro-batches or devices, among which the examples are divided
    part: PartName

    def name(self, at: int, path: KeyPath = ()) -> str:
        return label(self.places[at]) + jax.tree_util.keystr(path)

    def leaves(self, *numbers: int) -> list[LeafOfCall]:
        """Returns all leaves of these arguments."""
        of_each = [(at, jax.tree.leaves_with_path(self.values[at])) for at in numbers]
        return [(at, path, x) for at, leaves in of_each for path, x in leaves]

    def with_role(self, name: str) -> tuple[int, ...]:
        return self.numbers.get(name, ())

    def whole(self) -> list[int]:
        """Returns the arguments without one of these four roles."""
        roles = "argnums", "rng_argnums", "carry_argnum", "batch_argnums"
        others = {at for role in roles for at in self.with_role(role)}
        return [at for at in range(len(self.values)) if at not in others]

    def in_order(self, function: Function) -> Function:
        """Returns `function` of arguments in this order. It gets them as they came, by position or by keyword."""
        names = [at for at in self.places if isinstance(at, str)]
        count = len(self.places) - len(names)

        def of_values(*values: PyTree) -> PyTree:
            by_name = dict(zip(names, values[count:], strict=True))
            return function(*values[:count], **by_name)

        return of_values

    def as_role(self, name: str, *numbers: int) -> str:
        """Returns what a caller writes for a role of these arguments, such as `batch_argnums=(1, 'y')`."""
        places = tuple(self.places[at] for at in sorted({*numbers}))
        return f"{name}={(places[0] if len(places) == 1 else places)!r}"


def is_key(x: Leaf) -> bool:
    """Returns whether a leaf is a PRNG key, or several, or looks like a raw one."""
    return trees.is_typed_key(x) or _is_like_raw_key(x)


def _is_like_raw_key(x: Leaf) -> bool:
    return getattr(x, "dtype", None) == np.uint32 and np.shape(x) in ((2,), (4,))


class Roles(NamedTuple):
    """The roles of the arguments of `fun`. Messages call a role by its key."""

    fun: Function
    given: Mapping[str, tuple[Place, ...] | None]  # the last is `batch_argnums`
    part: PartName

    def call(self, args: PyTree, kwargs: PyTree, divisor: int, devices: int = 1) -> Call:
        """Returns the arguments of one call by their roles. Raises if one does not fit its role.

        `divisor` is the number of micro-batches, each of which `devices` share, or the number of devices.
        """
        places = (*range(len(args)), *kwargs)
        of_roles = self.places(args, kwargs)
        numbers = {role: tuple(map(places.index, at)) for role, at in of_roles.items()}
        call = Call(places, (*args, *kwargs.values()), numbers, divisor, self.part)
        if self.part != "device":
            self.require_no_flax_state(args, kwargs)
        for at, path, x in call.leaves(*call.with_role("argnums")):
            check_parameter(call.name(at, path), x)
        for leaf in call.leaves(*call.with_role("rng_argnums")):
            _check_folded(call, leaf)
        if self.part == "device":
            _check_whole(call, _numbers_of_examples(call))
            return call
        count = number_of_examples(call)
        differ = call.with_role("rng_argnums") or call.with_role("carry_argnum")
        if count is None and divisor > 1 and not differ:
            raise ValueError(
                "batch_argnums must name arrays of examples, got none, so all micro-batches are the same. Pass "
                "arguments with a first axis"
            )
        if divisor * devices > 1:
            _check_whole(call, {count})
        return call

    def require_no_flax_state(self, args: PyTree, kwargs: PyTree) -> None:
        """Raises if an NNX object has state that `fun` changes, because only `shrewjax.flax` keeps it."""
        models = self.places(args, kwargs).get("argnums") or (0,)
        given: list[tuple[Place, PyTree]] = [*enumerate(args), *kwargs.items()]
        for place, value in given:
            for path, kind in changing_state(value, is_model=place in models):
                raise ValueError(
                    f"{label(place)}{jax.tree_util.keystr(path)} is an NNX object, whose new {kind} would be lost. "
                    "Call the function of this name in shrewjax.flax"
                )

    def examples(self, args: PyTree, kwargs: PyTree) -> dict[int, int]:
        """Returns the number of examples in each leaf of `(args, kwargs)` that holds some, by the leaf's number.

        Nothing depends on which arrays are examples but memory. By default, those by keyword hold them if none does by
        position, as when only a key comes so.
        """
        roles = self.places(args, kwargs)
        held = roles["batch_argnums"]
        # In the order of a tree's leaves, which has the keys of a dict sorted.
        given = dict(enumerate(args)) | dict(sorted(kwargs.items()))
        by_place = {place: jax.tree.leaves(value) for place, value in given.items()}
        each = [(place, x) for place, found in by_place.items() for x in found]
        leaves = [(i, *leaf) for i, leaf in enumerate(each)]
        # 1. The arrays in these arguments, or in those by keyword.
        found = _counts_of_examples(x for x in leaves if x[1] in held)
        if not found and self.given["batch_argnums"] is None:
            found = _counts_of_examples(x for x in leaves if x[1] in kwargs)
        if not found:
            names = " or ".join(map(label, held)) or "batch_argnums"
            raise ValueError(
                f"{names} must hold arrays of examples, got none. Pass jnp.asarray of a list. Or name the batch in "
                "batch_argnums="
            )
        # 2. Also an argument that is differentiated beside the parameters, such as images, if each of its arrays has as
        # many examples.
        for other in roles.get("argnums", ())[1:]:
            axes = {i: np.shape(x)[:1] for i, place, x in leaves if place == other}
            if {*axes.values()} <= {(n,) for n in found.values()}:
                found |= {i: n for i, (n,) in axes.items()}
        return found

    def places(self, args: Sequence[PyTree], keywords: Collection[str]) -> Places:
        """Returns, for each role, how its arguments came: a position among those by position, or a keyword.

        A position names the parameter of `fun` there, however it is passed. A negative one counts back from the last
        argument that came by position.

        A role given as None has all arguments by position that none before it has. If there are none, it has all by
        keyword that none before it has. Raises if none is left for it, if there is no such argument, or if an argument
        has two roles.
        """
        count = len(args)
        names = positional_names(self.fun)
        roles: Places = {}
        taken: dict[Place, str] = {}
        for name, wanted in self.given.items():
            if wanted is None:
                by_position = [at for at in range(count) if at not in taken]
                by_keyword = [key for key in keywords if key not in taken]
                places: tuple[Place, ...] = (*by_position,) or (*by_keyword,)
                if not places:
                    raise ValueError(
                        f"no argument holds examples, because all are in {', '.join(dict.fromkeys(taken.values()))}. "
                        "Pass the batch. Or name it in batch_argnums="
                    )
            else:
                place_of = partial(_place_of_role, name, names, count, keywords)
                places = tuple(map(place_of, wanted))
            for place in places:
                if place in taken:
                    raise ValueError(
                        f"{label(place)} is in {taken[place]} and in {name}. Give it one of the two"
                    )
                taken[place] = name
            roles[name] = places
        return roles


def _counts_of_examples(leaves: Iterable[tuple[int, Place, Leaf]]) -> dict[int, int]:
    """Returns the first axis of each array, by its number. Raises if a leaf is none, and no number or function."""
    found: dict[int, int] = {}
    for i, place, x in leaves:
        if is_operand(x) and np.ndim(x) and not _is_like_raw_key(x):
            found[i] = x.shape[0]
        else:
            _require_tree(place, x)
    return found


def _require_tree(place: Place, x: Leaf) -> None:
    """Raises if a leaf is an object, such as a `UserDict`, which may have arrays inside that JAX does not see."""
    if not is_array(x) and not isinstance(x, str | np.ndarray) and not callable(x):
        raise ValueError(
            f"{label(place)} must be a tree of arrays, got {type(x).__name__}. Pass a dict. Or register its class by "
            "jax.tree_util.register_dataclass"
        )


_WHOLE_BY_DEFAULT = "what stays whole by default"


def roles_of(
    fun: Function,
    reserved: Mapping[str, tuple[Place, ...]] | None,
    rng_argnums: Argument,
    batch_argnums: Argument,
    part: PartName = "micro-batch",
) -> Roles:
    """Returns the roles of `fun`'s arguments: the function's own ones, keys, and examples.

    `reserved` is None if the first argument has no role, and by default holds no examples.
    """
    if not callable(fun):
        raise ValueError(f"fun must be a function, got {trees.shown(fun)}")
    batch = batch_argnums
    if batch is not None:
        batch = arguments.places("batch_argnums", batch)
    if reserved is None:
        reserved = {_WHOLE_BY_DEFAULT: (0,)} if batch is None else {}
    keys = arguments.places("rng_argnums", rng_argnums)
    return Roles(fun, {**reserved, "rng_argnums": keys, "batch_argnums": batch}, part)


def positional_names(fun: Function) -> list[str]:
    """Returns the names of those parameters that may come by position; none if Python does not know them."""
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (ValueError, TypeError):  # of a function in C
        return []
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [x.name for x in parameters if x.kind in kinds]


def _place_of_role(
    role: str, names: list[str], count: int, keywords: Collection[str], at: Place
) -> Place:
    """Returns how the argument came that a position or a name means."""
    if at in keywords:
        return at
    came = f"{count} argument{'' if count == 1 else 's'} came by position"
    if keywords:
        came += f", and by keyword {', '.join(keywords)}"
    name = "batch_argnums" if role == _WHOLE_BY_DEFAULT else role
    if isinstance(at, str):
        if at in names[:count]:
            return names.index(at)
        known = ", ".join([*names[:count], *keywords]) or "none"
        raise ValueError(
            f"{name} has the name {at!r}, but {came}. Name one of {known}. Or pass a position"
        )
    if -count <= at < count:
        return at % count
    if 0 <= at < len(names) and names[at] in keywords:
        return names[at]
    remedy = "Pass it by position"
    if keywords and role not in ("argnums", "carry_argnum"):
        remedy = f"Name it, such as {name}={[*keywords][-1]!r}"
    raise ValueError(f"{name} has the position {at}, but {came}. {remedy}")


def check_parameter(name: str, x: Leaf) -> None:
    """Raises unless a leaf can be differentiated. Its name stands in the message."""
    dtype: DType = getattr(x, "dtype", np.object_)
    if not isinstance(x, float | complex) and not jnp.issubdtype(dtype, jnp.inexact):
        given = f"{dtype} of shape {x.shape}" if hasattr(x, "dtype") else trees.shown(x)
        raise ValueError(
            f"{name} in argnums must be floating or complex, got {given}. Split models by eqx.partition or "
            "nnx.split, and merge them in fun"
        )


def _check_folded(call: Call, leaf: LeafOfCall) -> None:
    """Raises unless a leaf of an argument in `rng_argnums` is one key, typed or raw."""
    at, path, x = leaf
    if is_key(x) and np.ndim(x) == (0 if trees.is_typed_key(x) else 1):
        return
    given = trees.shown(x)
    if hasattr(x, "dtype"):
        given = f"shape {x.shape} and dtype {x.dtype}"
    raise ValueError(
        f"{call.name(at, path)} in rng_argnums must be one PRNG key, got {given}. Pass jax.random.key(seed). Put keys "
        "of examples into batch_argnums"
    )


def _numbers_of_examples(call: Call) -> set[int]:
    """Returns the numbers of examples. Raises if an array has no first axis that the devices divide."""
    devices, sizes = call.divisor, set()
    for leaf in call.leaves(*call.with_role("batch_argnums")):
        at, path, x = leaf
        name, shape = call.name(at, path), np.shape(x)
        is_rows_of_keys = shape and trees.is_typed_key(x)
        if not is_rows_of_keys:
            _require_no_key(call, leaf)
        if not shape:
            raise ValueError(
                f"{name} must have a first axis of examples, got {x!r}. Pass it apart, not in batch_argnums="
            )
        if shape[0] % devices:
            raise ValueError(
                f"{name} must have a first axis that {devices} devices divide, got shape {shape}. Pad the batch to "
                f"{-(-shape[0] // devices) * devices}, and count real examples in weight="
            )
        sizes.add(shape[0])
    return sizes


def _check_whole(call: Call, sizes: Collection[int | None]) -> None:
    """Raises if arguments that reach every part whole hold PRNG keys, or one by keyword has B examples."""
    for leaf in call.leaves(*call.whole()):
        at, path, x = leaf
        _require_no_key(call, leaf)
        if isinstance(call.places[at], str) and {*np.shape(x)[:1]} & {*sizes}:
            held = call.with_role("batch_argnums")
            batch = call.as_role("batch_argnums", *held, at)
            others = call.as_role("batch_argnums", *held)
            raise ValueError(
                f"{call.name(at, path)} has as many rows as the batch. If it holds examples, pass "
                f"{batch}. Otherwise pass it by position, with {others}"
            )


Held: TypeAlias = dict[int, int | None]
"""For each argument, the first axis that most of its leaves have, or None."""


def number_of_examples(call: Call) -> int | None:
    """Returns the number of examples, which is None without arrays of them. Raises if a leaf has another."""
    counts = {_first_size(x) for *_, x in call.leaves(*call.with_role("batch_argnums"))}
    if len(counts) > 1 or None in counts:
        _refuse_counts(call)
    return next(iter(counts), None)


def _refuse_counts(call: Call) -> None:
    """Raises for the first leaf of the batch that has not as many examples as the others."""
    batch = call.with_role("batch_argnums")
    # 1. Find the number that most arguments hold. If none of the batch holds any, it may be in one without a role.
    held = {at: _held(call, at) for at in (*batch, *call.whole())}
    if any(map(held.get, batch)):
        held = {at: held[at] for at in batch}
    count = _likely_count(call, held)
    # 2. Name a leaf that has another one.
    leaves = call.leaves(*batch)
    odd = next((leaf for leaf in leaves if _first_size(leaf[-1]) != count), leaves[0])
    _refuse(call, odd, count, held)


def _refuse(call: Call, leaf: LeafOfCall, count: int | None, held: Held) -> None:
    """Raises for a leaf of the batch that has not `count` examples."""
    at, path, x = leaf
    _require_no_key(call, leaf)
    _require_tree(call.places[at], x)
    # 1. Say what the leaf needs, and what came.
    need = "an axis of examples"
    if count is not None:
        like = next(x for x in call.leaves(*held) if _first_size(x[-1]) == count)
        need = f"a first axis of {count} examples, as {call.name(*like[:2])} has"
    came = f"shape {np.shape(x)}" if is_array(x) else getattr(x, "dtype", type(x).__name__)
    message = f"{call.name(at, path)} must have {need}, got {came}. "
    scalars = [is_array(y) and not np.shape(y) for *_, y in call.leaves(at)]
    if isinstance(call.values[at], list) and all(scalars):
        raise ValueError(f"{message}Pass jnp.asarray of the list")
    # 2. Say what to pass: a leaf beside examples apart from these, or a batch without the argument.
    if np.ndim(x):
        message += "Pass parameters first, and as many examples in each array. "
    holders = [other for other, n in held.items() if n is not None and n == count]
    if path and count is not None and count in _counts(call, at):
        batch = call.as_role("batch_argnums", *holders, at)
        remedy = f"pass it as an argument of its own, with {batch}"
        raise ValueError(f"{message}If it is the same for all micro-batches, {remedy}")
    batch = call.as_role("batch_argnums", *holders)
    message += f"If {call.name(at)} is the same for all micro-batches, pass {batch}"
    is_by_position = isinstance(call.places[at], int)
    if path and is_by_position and call.numbers.get("carry_argnum") == ():
        message += (
            f". If fun returns a new one, return (loss, (aux, carry)), and pass carry_argnum={at}"
        )
    raise ValueError(message)


def _require_no_key(call: Call, leaf: LeafOfCall) -> None:
    """Raises for a PRNG key without a role."""
    at, path, x = leaf
    if not is_key(x):
        return
    is_typed = trees.is_typed_key(x)
    keys = call.as_role("rng_argnums", *call.with_role("rng_argnums"), at)
    if is_typed and np.ndim(x):
        remedy = f"Pass one key, with {keys}, and split it in fun"
    elif all(is_key(y) for *_, y in call.leaves(at)):
        remedy = f"Pass {keys}"
    else:
        remedy = "Pass it as an argument of its own, and name that in rng_argnums="
    no_key = "" if is_typed else ". If these numbers are no key, convert them to int32"
    message = (
        f"{call.name(at, path)} is a PRNG key, and each {call.part} needs its own. {remedy}. "
        f"If all share one, pass jax.random.key_data of it as int32 by keyword, and let fun wrap it as uint32{no_key}"
    )
    raise ValueError(message)


def _likely_count(call: Call, held: Held) -> int | None:
    """Returns the number of examples that most arguments hold. Among equals, K divides it, or it comes last."""
    candidates = [(at, n) for at in held for n in _counts(call, at) if n is not None]

    def rank(number: tuple[int, int]) -> tuple[int, bool, int, int]:
        at, count = number
        leaves = sum(n == count for _, n in candidates)
        return [*held.values()].count(count), count % call.divisor == 0, at, leaves

    return max(candidates, key=rank, default=(0, None))[1]


def _held(call: Call, at: int) -> int | None:
    """Returns the first axis that most leaves of an argument have, or None."""
    counts = _counts(call, at)
    return next((n for n in counts if 2 * counts.count(n) > len(counts)), None)


def _counts(call: Call, at: int) -> list[int | None]:
    """Returns the first axes of an argument's leaves, with None for a leaf that cannot hold examples."""
    return [None if is_key(x) else _first_size(x) for *_, x in call.leaves(at)]


def _first_size(x: Leaf) -> int | None:
    return np.shape(x)[0] if is_array(x) and np.ndim(x) else None


def is_operand(x: Leaf) -> bool:
    """Returns whether a leaf is an array with which JAX can compute."""
    return isinstance(x, jax.Array | np.ndarray) and is_array(x)


def is_array(x: Leaf) -> bool:
    """Returns whether JAX can compute with a leaf. It has no text, no dates and no objects."""
    dtype: DType = getattr(x, "dtype", None) or np.asarray(x).dtype
    return getattr(dtype, "kind", "key") not in "OUSMm"
