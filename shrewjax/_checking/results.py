"""What the check compares: a function of the whole batch of a divided call, and of each of its micro-batches."""

import warnings
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from shrewjax._base import arguments
from shrewjax._base.flax_names import is_overwritten
from shrewjax._base.trees import is_gradient, is_typed_key
from shrewjax._base.types import Function, Leaf, PyTree
from shrewjax._batches.roles import Call, roles_of
from shrewjax._batches.value_and_grad import Options
from shrewjax._numerics.relations import as_float64

Point: TypeAlias = tuple[dict[int, Leaf], dict[int, Leaf]]
"""Parameters, and other leaves with a role, by their numbers among the leaves of all arguments."""


class Batches(NamedTuple):
    """A divided call with the whole batch, and with each micro-batch.

    Programs are traced for the leaves with a role alone: the parameters, and all others. Other leaves stay as they are,
    such as a Python number or a function. Leaf -1 has a number for each example, for the gradient of rows.
    """

    fun: Function
    call: Call  # with the whole batch
    has_aux: bool
    returns_rows: bool
    num_examples: int
    each: list[Point]  # of the whole batch, and of each micro-batch

    def of(self, function: Function, params: PyTree, others: PyTree) -> PyTree:
        leaves = dict(enumerate(jax.tree.leaves(self.call.values)))
        moved = leaves | params | others
        replaced = [moved[i] for i in leaves]
        values = jax.tree.unflatten(jax.tree.structure(self.call.values), replaced)
        return self.call.in_order(function)(*values)

    def loss(self, params: PyTree, others: PyTree) -> tuple[PyTree, PyTree]:
        """Returns the loss and its aux, or a sum of rows and these. The new carry is left out."""
        returned = self.of(self.fun, params, others)
        has_carry = bool(self.call.numbers["carry_argnum"])
        if self.returns_rows:
            rows = returned[0] if has_carry else returned
            return _sum_of(rows, others[-1]), rows
        pair: PyTree = returned if self.has_aux else (returned, ())
        value, aux = pair
        return value, aux[0] if has_carry else aux

    def names(self) -> list[tuple[str, str]]:
        """Returns the role of each leaf with one, and its name in messages."""
        names = _roles_and_names(self.call)
        return [names.get(i, ("", "")) for leaves in self.each[0] for i in sorted(leaves)]

    def has_keys(self) -> bool:
        is_named = bool(self.call.numbers["rng_argnums"])
        return is_named or any(map(is_typed_key, jax.tree.leaves(self.each[0])))


def batches_of(
    fun: Function,
    options: Options,
    roles: dict[str, Any],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    returns_rows: bool,
) -> Batches:
    """Returns the whole batch of a call, divided as `value_and_grad` does. Warns of examples that are all the same."""
    carry = roles.get("carry_argnum")
    carry = () if carry is None else arguments.positions("carry_argnum", carry)
    reserved = {"carry_argnum": carry}
    reserved |= {"argnums": roles["argnums"]} if "argnums" in roles else {}
    divisor = options.micro_batches
    call = roles_of(fun, reserved, roles["rng_argnums"], roles["batch_argnums"]).call(
        args, kwargs, divisor
    )
    if "argnums" not in roles:  # of rows and of a loss, all floating arrays that are whole
        call = call._replace(numbers={**call.numbers, "argnums": tuple(call.whole())})
    leaves, names = jax.tree.leaves(call.values), _roles_and_names(call)
    params, others, num_examples = dict[int, Leaf](), dict[int, Leaf](), divisor
    for i, (role, name) in names.items():
        x = leaves[i]
        if role != "argnums":
            others[i] = jnp.asarray(x)
        elif "argnums" in roles or (isinstance(x, jax.Array) and is_gradient(x)):
            params[i] = jnp.asarray(x)
        if role == "batch_argnums":
            num_examples, rows = len(x), as_float64(x)
            if np.array_equal(rows, np.broadcast_to(rows[:1], rows.shape), equal_nan=True):
                what = f"{name} is the same for each example, which hides mistakes"
                warnings.warn(
                    f"{what}. Pass others, such as a mask of zeros and ones", stacklevel=4
                )
    others[-1] = jnp.asarray(np.random.default_rng(0).normal(size=num_examples), jnp.float32)
    is_divided = {i for i in others if i < 0 or names[i][0] == "batch_argnums"}

    def part(i: int, x: Leaf) -> Leaf:
        """Returns the rows of micro-batch i. An array of an Explicit mesh has no strided slices."""
        return x.reshape(num_examples // divisor, divisor, *x.shape[1:])[:, i]

    parts = [
        {at: part(i, x) if at in is_divided else x for at, x in others.items()}
        for i in range(divisor)
    ]
    each = [(params, x) for x in (others, *parts)]
    return Batches(fun, call, options.has_aux, returns_rows, num_examples, each)


def _roles_and_names(call: Call) -> dict[int, tuple[str, str]]:
    """Returns the role of each leaf with one, and its name in messages, by its number.

    A statistic of Flax's fp8 layers has none, because its "gradient" is its new value, which has no mean.
    """
    role_of = {at: role for role, of_role in call.numbers.items() for at in of_role}
    places = [(at, path) for at in range(len(call.values)) for path, _ in call.leaves(at)]
    return {
        i: (role_of[at], call.name(at, path))
        for i, (at, path) in enumerate(places)
        if at in role_of and not is_overwritten(path)
    }


def _sum_of(tree: PyTree, of_examples: jax.Array) -> jax.Array:
    """Returns a sum over rows, of each element times a number of its place in the row, and one of the example."""
    total = jnp.float32(0)
    for x in jax.tree.leaves(tree):
        if jnp.issubdtype(x.dtype, jnp.inexact):
            finite = jnp.where(jnp.isfinite(x), x, 0)
            wide = finite.astype(jnp.promote_types(x.dtype, jnp.float32)).reshape(len(x), -1)
            total += (of_examples @ (wide @ jnp.cos(jnp.arange(1.0, wide.shape[1] + 1)))).real
    return total


def nearby(x: Leaf) -> jax.Array:
    """Returns a parameter near x, a tenth of its size away, because the zeros of a new layer hide mistakes."""
    noise = np.random.default_rng(0).normal(size=np.shape(x))
    size = float(np.sqrt(np.mean(np.abs(as_float64(x)) ** 2))) if np.size(x) else 0.0
    return jnp.asarray(x + 0.1 * (size or 0.1) * noise, dtype=jnp.result_type(x))
