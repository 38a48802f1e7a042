"""The number of examples in a call's arguments; if they have no common one, what is odd, and a line that is right.

A batch often holds a leaf with another role: a scalar, a key, class weights, another network's parameters. The message:

1. Find the likely number of examples, on which most arguments agree.
2. Take the first leaf without it, and say what it is instead.
3. If its whole argument differs, give the role that leaves it out. Otherwise give a `fun` that gets the leaf by
   keyword.
"""

import dataclasses
import keyword
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shrewjax._base.flax_names import changing_state
from shrewjax._base.types import DType, KeyPath, Leaf, Place, PyTree


def label(place: Place) -> str:
    """Returns an argument's name in messages."""
    return f"argument {place}" if isinstance(place, int) else f"keyword argument {place}"


class Call(NamedTuple):
    """The arguments of one call in one order, those by position first. Roles have their numbers in this order."""

    places: tuple[Place, ...]
    values: tuple[PyTree, ...]
    roles: dict[str, tuple[int, ...]]
    steps: int

    def label(self, at: int) -> str:
        return label(self.places[at])

    def name(self, at: int, path: KeyPath) -> str:
        return self.label(at) + jax.tree_util.keystr(path)

    def leaves(self, at: int) -> list[tuple[KeyPath, Leaf]]:
        return jax.tree.leaves_with_path(self.values[at])

    def whole(self) -> list[int]:
        """Returns the arguments without a role."""
        with_role = {at for role in self.roles.values() for at in role}
        return [at for at in range(len(self.values)) if at not in with_role]

    def as_role(self, name: str, *numbers: int) -> str:
        """Returns what a caller writes for a role of these arguments, such as `batch_argnums=(1, 'y')`."""
        return f"{name}={_written(tuple(self.places[at] for at in sorted({*numbers})))}"


def number_of_examples(call: Call) -> int | None:
    """Returns the number of examples, which is None without arrays of them. Raises if a leaf has another."""
    leaves = [(at, *leaf) for at in call.roles["batch_argnums"] for leaf in call.leaves(at)]
    if not leaves:
        return None
    counts = {_count(x) for _, _, x in leaves}
    if len(counts) == 1 and None not in counts:
        return counts.pop()
    likely = _likely_count(call)
    for at, path, x in leaves:
        if likely is None or _count(x) != likely:
            raise ValueError(_message(call, at, path, x, likely))
    return likely


def is_key(x: Leaf) -> bool:
    """Returns whether a leaf is a PRNG key, or several, or looks like a raw one."""
    dtype: DType = getattr(x, "dtype", np.object_)
    is_typed: bool = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return is_typed or (dtype == np.uint32 and np.shape(x) in ((2,), (4,)))


def _is_array(x: Leaf) -> bool:
    """Returns whether JAX can compute with a leaf. It has no text, no dates and no objects."""
    dtype: DType = getattr(x, "dtype", None) or np.asarray(x).dtype
    return getattr(dtype, "kind", "key") not in "OUSMm"


def _count(x: Leaf) -> int | None:
    return np.shape(x)[0] if _is_array(x) and np.ndim(x) else None


def _counts(call: Call, at: int) -> list[int | None]:
    """Returns the first axes of an argument's leaves, with None for a leaf that cannot hold examples."""
    return [None if is_key(x) else _count(x) for _, x in call.leaves(at)]


def _agrees(call: Call, at: int, count: int | None) -> bool:
    """Returns whether most leaves of an argument have this number of examples."""
    counts = _counts(call, at)
    return count is not None and 2 * counts.count(count) > len(counts)


def _parameters_like(call: Call, at: int) -> int | None:
    """Returns the argument in `argnums` that has the same tree and the same shapes, if this is a tree."""

    def shapes(at: int) -> PyTree:
        return jax.tree.structure(call.values[at]), [np.shape(x) for _, x in call.leaves(at)]

    is_tree = not jax.tree_util.all_leaves([call.values[at]])
    alike = (other for other in call.roles["argnums"] if shapes(other) == shapes(at))
    return next(alike, None) if is_tree else None


def _likely_count(call: Call) -> int | None:
    """Returns the number of examples that all leaves of most arguments have, or None if none has an axis.

    Among equals, it is one that K divides, then the number of most leaves if no argument is uniform, then the last.
    """
    batch = call.roles["batch_argnums"]
    unlike = [at for at in batch if _parameters_like(call, at) is None]
    trees = [_counts(call, at) for at in unlike or batch]
    # Without an argument of examples, the batch may be one without a role.
    if not any(_agrees(call, at, count) for at in batch for count in _counts(call, at)):
        trees += [_counts(call, at) for at in call.whole()]

    def rank(count: int) -> tuple[int, bool, int, int]:
        uniform = sum({*tree} == {count} for tree in trees)
        leaves = 0 if uniform else sum(tree.count(count) for tree in trees)
        last = max(at for at, tree in enumerate(trees) if count in tree)
        return uniform, count % call.steps == 0, leaves, last

    counts = dict.fromkeys(count for tree in trees for count in tree if count is not None)
    return max(counts, key=rank, default=None)


def _message(call: Call, at: int, path: KeyPath, x: Leaf, count: int | None) -> str:
    if is_key(x):
        return key_message(call, at, path)
    batch, whole = call.roles["batch_argnums"], call.whole()
    # Those by keyword count, because arrays of B examples among them are an error.
    with_names = (*batch, *(other for other in whole if isinstance(call.places[other], str)))
    others = [other for other in with_names if other != at and _agrees(call, other, count)]
    others = others or [other for other in whole if _agrees(call, other, count)]
    if _count(x) is None:
        return _without_axis(call, at, path, x, count, others)
    return _of_other_count(call, at, path, x, count, others)


def _without_axis(
    call: Call, at: int, path: KeyPath, x: Leaf, count: int | None, others: list[int]
) -> str:
    if _is_array(x):
        what = f"{call.name(at, path)} has no axis of examples, but shape ()"
    else:
        given = getattr(x, "dtype", type(x).__name__)
        what = f"{call.name(at, path)} must be an array of numbers, got {given}"
    if path and count in _counts(call, at):
        return f"{what}. {beside_examples(call, at, path)}"
    batch = call.as_role("batch_argnums", *others)
    of_them = "of them" if count is None else f"of {count}"
    return (
        f"{what}. If it is the same for all micro-batches, pass {batch}. If each example has its own, pass an array "
        f"{of_them}"
    )


def _of_other_count(
    call: Call, at: int, path: KeyPath, x: Leaf, count: int | None, others: list[int]
) -> str:
    """Returns the message for a leaf with another number of examples: what came, then the remedies that apply."""
    name, label = call.name(at, path), call.label(at)
    everywhere = [*call.roles["batch_argnums"], *call.whole()]
    leaves = [(other, *leaf) for other in everywhere for leaf in call.leaves(other)]
    like_it = next(call.name(other, of) for other, of, y in leaves if _count(y) == count)
    message = [f"{name} has {np.shape(x)[0]} examples along its first axis, {like_it} has {count}"]
    if others and not _agrees(call, at, count):
        batch = call.as_role("batch_argnums", *others)
        message.append(f"If {label} is the same for all micro-batches, pass {batch}")
    parameters = _parameters_like(call, at)
    if parameters is None:
        message += _remedies_of_count(call, at, path, x, count, others)
    else:
        like = f"Its tree has the shapes of {call.label(parameters)}, which is in argnums"
        message.insert(1, like)
    return ". ".join(message)


def _remedies_of_count(
    call: Call, at: int, path: KeyPath, x: Leaf, count: int | None, others: list[int]
) -> list[str]:
    """Returns the remedies for a leaf with another number of examples, if it does not look like parameters."""
    name, shape, its_counts = call.name(at, path), np.shape(x), {*_counts(call, at)}
    if count in its_counts:
        remedy = beside_examples(call, at, path)
        return [
            f"If {name} is the same for all micro-batches, {remedy[:1].lower()}{remedy[1:]}",
            f"If {name} holds parts of an example, such as a graph's edges, stack {call.steps} padded batches along a "
            "new first axis, and let fun take x[0]",
        ]
    if count in shape[1:]:
        axis = shape.index(count)
        return [f"If axis {axis} numbers the examples, pass jnp.moveaxis(x, {axis}, 0)"]
    if its_counts != {shape[0]}:
        return []
    if shape[0] % call.steps:
        return [f"If it holds examples, pass {count} of them"]
    both = (
        f"If both are sets of examples, pass each array as x.reshape({call.steps}, -1, *x.shape[1:]), and let fun take "
        "x[0]"
    )
    if len(others) != 1:
        return [both]
    own = call.as_role("batch_argnums", at)
    return [f"If {call.label(others[0])} is, pass {own}", both]


def other_batch(call: Call) -> str:
    """Returns the remedy if arguments without a role look more like the batch, or an empty text."""
    whole = [at for at in call.whole() if isinstance(call.places[at], str)]
    counts = {at: {*_counts(call, at)} for at in whole}
    likely = _likely_count(call._replace(roles=call.roles | {"batch_argnums": tuple(whole)}))
    fit = [at for at, own in counts.items() if own == {likely}]
    if likely is None or likely % call.steps or not fit:
        return ""
    return f"If {' and '.join(map(call.label, fit))} hold the examples, pass {call.as_role('batch_argnums', *fit)}. "


def key_message(call: Call, at: int, path: KeyPath) -> str:
    """Returns the message for a PRNG key without a role."""
    is_typed = dict(call.leaves(at))[path].dtype != np.uint32
    return (
        f"{call.name(at, path)} is a PRNG key, and each micro-batch needs its own. {key_remedy(call, at, path)}. "
        "If all shall have the same one, let fun close over it"
        + ("" if is_typed else ". If these numbers are no key, convert them to int32")
    )


def key_remedy(call: Call, at: int, path: KeyPath) -> str:
    x = dict(call.leaves(at))[path]
    keys = call.as_role("rng_argnums", *call.roles["rng_argnums"], at)
    if x.dtype != np.uint32 and np.ndim(x):
        return f"Pass one key, with {keys}, and split it in fun"
    if all(is_key(y) for _, y in call.leaves(at)):
        return f"Pass {keys}"
    return beside_examples(call, at, path, is_key=True)


def keys_alone(call: Call, at: int) -> str | None:
    """Returns the remedy for an argument in `rng_argnums` that holds other leaves beside a key, if it does."""
    key = next((path for path, x in call.leaves(at) if is_key(x)), None)
    if key is None:
        return None
    others = tuple(other for other in call.roles["rng_argnums"] if other != at)
    holds_examples = any(count is not None for count in _counts(call, at))
    batch = (*call.roles["batch_argnums"], *([at] if holds_examples else []))
    roles = call.roles | {"rng_argnums": others, "batch_argnums": batch}
    mended = call._replace(roles=roles)
    return beside_examples(mended, at, key, is_key=True, names_batch=holds_examples)


def require_no_flax_state(call: Call) -> None:
    """Raises if an NNX object has state that `fun` changes, because only `shrewjax.flax` keeps it."""
    for at, value in enumerate(call.values):
        is_model = at in (call.roles["argnums"] or (0,))
        for path, found in changing_state(value, is_model=is_model):
            raise ValueError(
                f"{call.name(at, path)} is an NNX object with variables of the type {found}, whose new values "
                "would be lost. Call shrewjax.flax.value_and_grad, or the function of that module which you need, "
                "with the model first. It keeps keys and batch statistics"
            )


def beside_examples(
    call: Call, at: int, path: KeyPath, *, is_key: bool = False, names_batch: bool = False
) -> str:
    """Returns the remedy for one leaf of a tree: it comes by keyword, and `fun` puts it back."""
    # 1. Names for the arguments in the new function, and for the leaf.
    names = _names(call, at)
    own = _name_of_leaf(path, names)
    put = _put(names[at], call.values[at], path, own)
    if put is None:
        return "Pass it as an argument of its own, and let fun put it back"

    # 2. The new function, which takes the leaf by keyword.
    by_name = [x for x in call.places if isinstance(x, str)]
    count = len(names) - len(by_name)
    given = [put if number == at else name for number, name in enumerate(names)]
    given[count:] = [f"{x}={y}" for x, y in zip(by_name, given[count:], strict=True)]
    new_fun = f"lambda {', '.join([*names[:count], '*', *by_name, own])}: fun({', '.join(given)})"

    # 3. The roles that have to be named then.
    roles = ["by keyword"]
    if is_key:
        keys = (*(call.places[other] for other in call.roles["rng_argnums"]), own)
        roles.append(f"rng_argnums={_written(keys)}")
    if names_batch or isinstance(call.places[at], str):
        roles.append(call.as_role("batch_argnums", *call.roles["batch_argnums"]))
    return f"Put None in place of {call.name(at, path)}, pass it {', with '.join(roles)}, and use {new_fun}"


def _names(call: Call, batch: int) -> list[str]:
    """Returns a name for each argument in a new function, where this one holds the batch."""
    names = [x if isinstance(x, str) else f"a{x}" for x in call.places]
    named = {batch: "batch"} | dict.fromkeys(call.roles["argnums"][:1], "params")
    for at, name in named.items():
        if isinstance(call.places[at], int):
            names[at] = name
    return names


def _name_of_leaf(path: KeyPath, taken: list[str]) -> str:
    name = jax.tree_util.keystr(path[-1:], simple=True)
    is_free = name.isidentifier() and not keyword.iskeyword(name) and name not in taken
    is_number = isinstance(path[-1], jax.tree_util.SequenceKey)
    return name if is_free and not is_number else "leaf"


def _written(places: tuple[Place, ...]) -> str:
    return repr(places[0] if len(places) == 1 else places)


def _put(expression: str, tree: PyTree, path: KeyPath, new: str) -> str | None:
    """Returns Python for a copy of a tree with another leaf. None if JAX does not know how it is written."""
    if not path:
        return new
    first = path[0]
    if isinstance(first, jax.tree_util.DictKey):
        child, of_child = tree[first.key], f"{expression}[{first.key!r}]"
        before, after = f"{{**{expression}, {first.key!r}: ", "}"
    elif isinstance(first, jax.tree_util.SequenceKey):
        child, of_child = tree[first.idx], f"{expression}[{first.idx}]"
        opening, closing = "[]" if isinstance(tree, list) else "()"
        before = f"{opening}*{expression}[:{first.idx}], "
        after = f", *{expression}[{first.idx + 1}:]{closing}"
    elif isinstance(first, jax.tree_util.GetAttrKey) and (
        isinstance(tree, tuple) or dataclasses.is_dataclass(tree)
    ):
        child, of_child = getattr(tree, first.name), f"{expression}.{first.name}"
        is_tuple = isinstance(tree, tuple)
        start = f"{expression}._replace(" if is_tuple else f"dataclasses.replace({expression}, "
        before, after = f"{start}{first.name}=", ")"
    else:
        return None
    item = _put(of_child, child, path[1:], new)
    return None if item is None else f"{before}{item}{after}"
