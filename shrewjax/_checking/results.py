"""What the check compares: a batch and its micro-batches, and how far loss and gradients of the two differ."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from shrewjax._base.flax_names import is_overwritten
from shrewjax._base.types import Function, Leaf, Place, PyTree
from shrewjax._batches.batch import batch_of_call
from shrewjax._batches.roles import Roles, positional_names
from shrewjax._batches.value_and_grad import Options, of_loss
from shrewjax._numerics.relations import Array, Division, numbers
from shrewjax._programs import lockstep
from shrewjax._programs.lockstep import Programs, Value


class Batches(NamedTuple):
    """A call with the whole batch, and with each micro-batch.

    Programs are traced for the arguments with a role alone. All others stay as they are, such as a Python number.
    """

    loss: Function  # of the arguments with a role; it returns the loss and its aux
    of: Callable[[Function], Function]  # makes a user's function one of the arguments with a role
    each: list[list[PyTree]]  # these arguments, of the whole batch and of each micro-batch
    trained: tuple[int, ...]  # the numbers of those in `argnums`
    names: list[tuple[str, str]]  # the role of each leaf, and its name in messages
    examples: list[Array]  # the numbers of the examples of each micro-batch

    def with_role(self, role: str, leaves: Sequence[Value]) -> dict[Value, str]:
        """Returns those leaves of the arguments that have a role, with their names."""
        pairs = zip(leaves, self.names, strict=True)
        return {x: name for x, (its_role, name) in pairs if its_role == role}


def batches_of(
    roles: Roles,
    options: Options,
    calls: Sequence[tuple[PyTree, ...]],
    kwargs: dict[str, PyTree],
) -> Batches:
    """Returns the whole batch of one call, divided as `value_and_grad` does; or of one call for each micro-batch."""
    remedy = "Return jnp.mean of it, or jnp.sum with reduction='sum'"
    fun = of_loss(roles.fun, options.has_aux, remedy)
    count = options.micro_batches
    made = [roles.call(args, kwargs, count) for args in calls]
    call, parts = made[0], [[*x.values] for x in made]
    if len(calls) == 1:
        batch = batch_of_call(call, (), 0, is_sum=False)
        carried = list(batch.with_role("carry_argnum"))
        parts = [batch.arguments(i, carried) for i in range(count)]
    in_batch = call.roles["batch_argnums"]
    parameters: dict[Place, str] = dict(enumerate(positional_names(roles.fun)))
    if not in_batch:
        raise ValueError(
            "batch_argnums must name an argument that holds examples, got none. Pass the batch"
        )

    sizes = [len(jax.tree.leaves([x[at] for at in in_batch])[0]) for x in parts]
    # As under jit: NumPy's arrays have no elements at traced places.
    as_traced = lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x  # noqa: E731
    total, whole = sum(sizes), jax.tree.map(as_traced, [*call.values])
    examples = [np.arange(i, total, count) for i in range(count)]
    if len(calls) > 1:
        examples = np.split(np.arange(total), np.cumsum(sizes)[:-1])
        for at in in_batch:
            whole[at] = jax.tree.map(lambda *xs: jnp.concatenate(xs), *(x[at] for x in parts))

    role_of = {at: role for role, its_places in call.roles.items() for at in its_places}
    places = sorted(role_of)

    def of(function: Function) -> Function:
        def of_places(*args: PyTree) -> PyTree:
            replaced = dict(zip(places, args, strict=True))
            return call.in_order(function)(*(replaced.get(at, x) for at, x in enumerate(whole)))

        return of_places

    def loss(*args: PyTree) -> tuple[PyTree, PyTree]:
        returned = of(fun)(*args)
        value, beside = returned if options.has_aux else (returned, ())
        return (value, *beside[:1]) if call.roles["carry_argnum"] else (value, beside)

    # Keys and carries are those of the whole batch.
    each = [[x[at] if at in in_batch else whole[at] for at in places] for x in (whole, *parts)]
    labels = [parameters.get(x, call.label(at)) for at, x in enumerate(call.places)]
    leaves = [(at, path) for at in places for path, _ in call.leaves(at)]
    names = [(role_of[at], labels[at] + keystr(path)) for at, path in leaves]
    trained = tuple(map(places.index, call.roles["argnums"]))
    return Batches(loss, of, each, trained, names, examples)


def require_different_examples(batches: Batches, weights: Sequence[float]) -> None:
    """Raises if all micro-batches have equal examples. Warns of a mask that counts the same in each of them."""
    columns = zip(batches.names, *map(jax.tree.leaves, batches.each[1:]), strict=True)
    of_examples = [(name, xs) for (role, name), *xs in columns if role == "batch_argnums"]
    each = {name: [numbers(x).reshape(len(x), -1) for x in xs] for name, xs in of_examples}
    if all(np.array_equal(x, rows[0], equal_nan=True) for rows in each.values() for x in rows):
        raise ValueError(
            "micro-batches must have different examples, because equal ones hide each mistake. Pass a batch of data"
        )
    for name, rows in each.items():
        values, counts = {*np.unique(np.concatenate(rows))}, {float(x.sum()) for x in rows}
        # Rows of one-hot labels all have one 1, and are no mask.
        is_mask = values == {1} or (values == {0, 1} and np.ptp(np.concatenate(rows).sum(1)))
        if is_mask and len(counts) == 1 == len({*weights}):
            warnings.warn(
                f"{name} counts {min(counts):g} in each micro-batch, so a mean over it is not checked. Pass a batch "
                "in which the counts differ",
                stacklevel=4,
            )


def moved(x: Leaf) -> jax.Array:
    """Returns a parameter near x, a tenth of its size away, because the zeros of a new layer hide mistakes."""
    noise = np.random.default_rng(0).normal(size=np.shape(x))
    size = float(np.sqrt(np.mean(np.abs(numbers(x)) ** 2))) if np.size(x) else 0.0
    return jnp.asarray(x + 0.1 * (size or 0.1) * noise, dtype=jnp.result_type(x))


class Results(NamedTuple):
    """The loss, the aux and the leaves of the gradients, of the whole batch and of the micro-batches."""

    args: list[Value]
    loss: Value
    aux: PyTree
    grads: list[Value]

    def is_finite(self) -> bool:
        return all(np.isfinite(numbers(x.whole)).all() for x in (self.loss, *self.grads))

    def errors(self, division: Division, rtol: float) -> tuple[float, list[float]]:
        """Returns how far loss and gradients of the micro-batches are off, in units of their size.

        The size of a leaf is its own and a part of the whole gradient's, so that a gradient of rounding alone, such as
        that of the keys' bias in attention, may be off by eps of the whole. `rtol` is eps^(2/3).
        """
        norm = np.sqrt(sum(np.sum(np.abs(numbers(x.whole)) ** 2) for x in self.grads))
        of_leaves = [_error(x, division, rtol**0.5 * norm) for x in self.grads]
        return _error(self.loss, division, 0.0), of_leaves

    def fit(self, division: Division, rtol: float) -> bool:
        loss, grads = self.errors(division, rtol)
        return all(x <= rtol for x in (loss, *grads))


@np.errstate(all="ignore")
def _error(value: Value, division: Division, least_size: float) -> float:
    whole, *parts = map(numbers, value.each)
    result, terms = (division.made(x)["result"] for x in (np.stack(parts), np.abs(parts)))
    size = max(np.linalg.norm(whole.ravel()), np.linalg.norm(terms.ravel())) + least_size
    return float(np.linalg.norm((result - whole).ravel()) / (size or 1.0))


def gradients_of(tree: PyTree) -> list[Value]:
    """Returns the leaves of gradients, without new statistics of Flax's fp8 layers, which have no mean."""
    return [x for path, x in jax.tree.leaves_with_path(tree) if not is_overwritten(path)]


def results_at(
    batches: Batches, programs: Programs, division: Division, move: Callable[[Leaf], Any]
) -> Results:
    """Runs the programs of loss and gradients, at parameters that are moved."""
    points = [
        [jax.tree.map(move, x) if at in batches.trained else x for at, x in enumerate(args)]
        for args in batches.each
    ]
    args = [*map(Value, zip(*map(jax.tree.leaves, points), strict=True))]
    (loss, aux), grads = lockstep.run(programs, args, division.rows, by_equation=False)
    return Results(args, loss, aux, gradients_of(grads))
