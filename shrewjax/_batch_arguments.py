"""The arguments of a loss function, micro-batch by micro-batch: their roles, the examples, the keys and the carry."""

from collections.abc import Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax import _gradients
from shrewjax._mesh import newly_varying, varying_axes
from shrewjax._wrapping import check_unchanged


def roles_of_arguments(given: Mapping[str, tuple[int, ...] | None], count: int) -> dict[str, tuple[int, ...]]:
    """Returns the positions of each role's arguments, counted from the front. Raises if an argument has two roles."""
    roles: dict[str, tuple[int, ...]] = {}
    taken: dict[int, str] = {}
    for name, positions in given.items():
        if positions is None:
            positions = tuple(at for at in range(count) if at not in taken)
            if not positions:
                raise ValueError(
                    f"no argument holds examples, because the call has {count} positional argument"
                    f"{'' if count == 1 else 's'}, in {', '.join(dict.fromkeys(taken.values()))}. Pass the batch by "
                    "position. Or pass batch_argnums=() if there is none"
                )
        for at in positions:
            if not -count <= at < count:
                raise ValueError(f"{name} has the position {at}, but {count} arguments came by position")
            if at % count in taken:
                raise ValueError(
                    f"argument {at % count} is in {taken[at % count]} and in {name}. Give it one of the two"
                )
            taken[at % count] = name
        roles[name] = tuple(at % count for at in positions)
    return roles


def split_examples(arguments: dict[int, Any], steps: int) -> dict[int, Any]:
    """Returns arrays of shape (B, ...) as (B / K, K, ...), in which the second axis numbers the micro-batches.

    If the first axis is sharded over devices, each device's examples are so divided among all micro-batches.
    """
    counts: dict[str, int] = {}

    def split(path: _gradients.KeyPath, x: Any) -> jax.Array:
        name = f"argument {path[0].key}{jax.tree_util.keystr(path[1:])}"
        if np.ndim(x) == 0:
            raise ValueError(
                f"{name} has no axis of examples, but shape (). Leave the argument out of batch_argnums. Or give each "
                "example its own number"
            )
        (count, *rest), (first, of_first) = np.shape(x), next(iter(counts.items()), (name, len(x)))
        counts[name] = count
        if count != of_first:
            raise ValueError(f"{name} has {count} examples along its first axis, {first} has {of_first}")
        if count % steps:
            raise ValueError(
                f"{name} has {count} examples, which micro_batches={steps} does not divide. Pad the batch to "
                f"{-(-count // steps) * steps}, and let weight= count the real ones. If the loss is a mean, let fun "
                "take it over the real ones, too"
            )
        return jnp.asarray(x).reshape(count // steps, steps, *rest)

    return jax.tree.map_with_path(split, arguments)


def micro_batch_of(examples: dict[int, Any], i: Any) -> dict[int, Any]:
    """Returns the examples of micro-batch i."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False), examples)


def folded_keys(name: str, keys: Any, number: Any) -> Any:
    """Folds `number`, which counts micro-batches over all devices, into each key. Raises if a leaf is no single key."""

    def fold(path: _gradients.KeyPath, key: Any) -> jax.Array:
        dtype: Any = getattr(key, "dtype", np.object_)
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


def aux_and_carry(returned: Any) -> tuple[Any, Any]:
    """Returns the pair (aux, carry). Raises if `fun` returned something else beside the loss."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise ValueError(f"with carry_argnum, fun must return (loss, (aux, carry)), got {returned!r} beside the loss")
    aux, carry = returned
    return aux, carry


def check_loss(loss: Any, axes: tuple[Hashable, ...]) -> None:
    """Raises if the loss may differ between devices along a mapped axis that `sum_over` does not have."""
    along = sorted(varying_axes(loss) - set(axes), key=str)
    if along:
        wanted = (*axes, *along)
        raise ValueError(
            f"the loss may differ between devices along {', '.join(map(repr, along))}, which is not in sum_over. "
            f"Pass sum_over={wanted if len(wanted) > 1 else along[0]!r} if devices have different examples. Otherwise "
            "reduce the loss in fun, for example with jax.lax.pmean"
        )


def check_carried(new: list[Any], carried: list[Any], weight: Any) -> None:
    """Raises if a micro-batch would change the carry's structure, shapes, dtypes or the axes over which it varies."""
    check_unchanged(new, carried, "the carry that fun returns differs from the one that it is given,")

    def check(path: _gradients.KeyPath, new: Any, old: Any) -> None:
        along = newly_varying(new, old) or newly_varying(weight, old)
        if along:
            raise ValueError(
                f"leaf {_gradients.leaf_name(path[1:])} of the carry may differ between devices along {along}, but the "
                f"one that is passed does not. Reduce it in fun, for example with jax.lax.pmean(carry, {along}). If "
                "weights differ between devices, pass each device a carry of its own"
            )

    jax.tree.map_with_path(check, new, carried)
