"""The number of examples in a call's arguments, and the messages for a leaf whose role is another.

A batch often holds such a leaf: a scalar, a key, class weights, another network's parameters. A message names the leaf,
what it needs and what came. Then it names the roles to pass.
"""

from collections.abc import Sequence

import numpy as np

from shrewjax._base.types import DType, KeyPath, Leaf
from shrewjax._batches._call import Call, is_key


def number_of_examples(call: Call) -> int | None:
    """Returns the number of examples, which is None without arrays of them. Raises if a leaf has another."""
    batch = call.roles["batch_argnums"]
    leaves = [(at, *leaf) for at in batch for leaf in call.leaves(at)]
    counts = {_count(x) for _, _, x in leaves}
    if len(counts) < 2 and None not in counts:
        return next(iter(counts), None)
    # If no argument of the batch holds examples, the batch may be one without a role.
    is_elsewhere = not any(_held(call, at) for at in batch)
    among = (*batch, *call.whole()) if is_elsewhere else batch
    count = _likely_count(call, among)
    odd = next((leaf for leaf in leaves if _count(leaf[2]) != count), leaves[0])
    raise ValueError(_message(call, *odd, count, among))


def _message(
    call: Call, at: int, path: KeyPath, x: Leaf, count: int | None, among: Sequence[int]
) -> str:
    if is_key(x):
        return key_message(call, at, path)
    like = [
        call.name(other, of)
        for other in among
        for of, y in call.leaves(other)
        if _count(y) == count
    ]
    need = "an axis of examples"
    if count is not None:
        need = f"a first axis of {count} examples, as {like[0]} has"
    came = f"shape {np.shape(x)}" if _is_array(x) else getattr(x, "dtype", type(x).__name__)
    message = f"{call.name(at, path)} must have {need}, got {came}"
    holders = _holders(call, among, count)
    if path and count is not None and count in _counts(call, at):
        batch = call.as_role("batch_argnums", *holders, at)
        same = f"If it is the same for all micro-batches, pass it as an argument of its own, with {batch}"
        return f"{message}. {same}{_if_state(call, at, call.label(at))}"
    batch = call.as_role("batch_argnums", *holders)
    same = f"If {call.label(at)} is the same for all micro-batches, pass {batch}"
    return f"{message}. {same}{_if_state(call, at, 'it')}"


def key_message(call: Call, at: int, path: KeyPath) -> str:
    """Returns the message for a PRNG key without a role."""
    x = dict(call.leaves(at))[path]
    is_typed = x.dtype != np.uint32
    keys = call.as_role("rng_argnums", *call.roles["rng_argnums"], at)
    if is_typed and np.ndim(x):
        remedy = f"Pass one key, with {keys}, and split it in fun"
    elif all(is_key(y) for _, y in call.leaves(at)):
        remedy = f"Pass {keys}"
    else:
        remedy = "Pass it as an argument of its own, and name that in rng_argnums="
    no_key = "" if is_typed else ". If these numbers are no key, convert them to int32"
    others = [other for other in call.whole() if other != at and call.leaves(other)]
    state = "".join(_if_state(call, other, call.label(other)) for other in others[:1])
    return (
        f"{call.name(at, path)} is a PRNG key, and each {call.part} needs its own. {remedy}. "
        f"If all share one, let fun close over it{no_key}{state}"
    )


def _if_state(call: Call, at: int, name: str) -> str:
    """Returns the remedy for an argument that may be a state, if the called function has one that takes it."""
    place = call.places[at]
    if call.roles.get("carry_argnum") != () or isinstance(place, str):
        return ""
    return (
        f". If {name} is a state that fun returns changed, carry_argnum={place} hands it from micro-batch to "
        "micro-batch"
    )


def other_batch(call: Call) -> str:
    """Returns the remedy if arguments by keyword look more like the batch, or an empty text."""
    among = [at for at in call.whole() if isinstance(call.places[at], str)]
    count = _likely_count(call, among)
    holders = _holders(call, among, count)
    if count is None or count % call.parts or not holders:
        return ""
    batch = call.as_role("batch_argnums", *holders)
    return f"If {' and '.join(map(call.label, holders))} hold the examples, pass {batch}"


def _likely_count(call: Call, among: Sequence[int]) -> int | None:
    """Returns the number of examples that most arguments hold. Among equals, K divides it, or it comes last."""
    counts = [(at, n) for at in among for n in _counts(call, at) if n is not None]

    def rank(number: tuple[int, int]) -> tuple[int, bool, int, int]:
        at, count = number
        leaves = sum(n == count for _, n in counts)
        return len(_holders(call, among, count)), count % call.parts == 0, at, leaves

    return max(counts, key=rank, default=(0, None))[1]


def _holders(call: Call, among: Sequence[int], count: int | None) -> list[int]:
    return [at for at in among if count is not None and _held(call, at) == count]


def _held(call: Call, at: int) -> int | None:
    """Returns the first axis that most leaves of an argument have, or None."""
    counts = _counts(call, at)
    return next((n for n in counts if n is not None and 2 * counts.count(n) > len(counts)), None)


def _counts(call: Call, at: int) -> list[int | None]:
    """Returns the first axes of an argument's leaves, with None for a leaf that cannot hold examples."""
    return [None if is_key(x) else _count(x) for _, x in call.leaves(at)]


def _count(x: Leaf) -> int | None:
    return np.shape(x)[0] if _is_array(x) and np.ndim(x) else None


def _is_array(x: Leaf) -> bool:
    """Returns whether JAX can compute with a leaf. It has no text, no dates and no objects."""
    dtype: DType = getattr(x, "dtype", None) or np.asarray(x).dtype
    return getattr(dtype, "kind", "key") not in "OUSMm"
