r"""The rows of a whole batch, computed micro-batch by micro-batch, with derivatives in reverse mode.

The loss that takes the rows stands outside, so this module knows no loss. Its rule of JAX (`jax.custom_vjp`) has two
passes, and both are `value_and_grad`'s loop:

1. The first pass computes the rows of each micro-batch, and keeps nothing for a backward pass.
2. The second pass computes them again, and pulls back their cotangents. Gradients by whole arguments are added up. A
   gradient by examples is that of one micro-batch alone, so these come back as rows, too.

Keys, and the state of Flax's objects, begin both passes as they were, so that a micro-batch has the same draws in both.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from shrewjax._base import arguments
from shrewjax._base.axes import as_varying, varying_axes
from shrewjax._base.mesh import devices_to_map, partitioned_like
from shrewjax._base.trees import is_gradient, leaf_name, shown
from shrewjax._base.types import AxisName, DType, Function, Place, PyTree
from shrewjax._batches._aux import nan_unless
from shrewjax._batches._of_arrays import Arrays, OfArrays, call_of_arrays, perturbed_among
from shrewjax._batches.roles import is_array, is_key, number_of_examples, roles_of
from shrewjax._batches.value_and_grad import Options, of_options, seen_by_check

P = ParamSpec("P")
Result = TypeVar("Result")


def micro_batch_map(
    fun: Callable[P, Result],
    micro_batches: int,
    *,
    batch_argnums: int | str | Sequence[int | str] | None = None,
    rng_argnums: int | str | Sequence[int | str] = (),
    accumulator_dtype: DType = None,
    sum_over: AxisName | None = None,
) -> Callable[P, Result]:
    r"""Maps `fun` over micro-batches, as `jax.shard_map` does over shards, and joins the rows that it returns.

    .. math:: z_j = f(\theta, x_j), \qquad
        \bar\theta = \sum_j \bar z_j \, \frac{\partial f(\theta, x_j)}{\partial \theta}

    With it, a loss is written in plain JAX as for the whole batch, and only the model's part runs in micro-batches:
    masked means, statistics of the batch, contrastive losses, advantages, penalties, ranks. Differentiate the loss by
    `jax.value_and_grad`, or by what Flax, Equinox or a trainer has. It is exact for every such loss.

    A step takes the memory of one micro-batch, of the rows, and of the sum of the gradients. `fun` runs forward twice.
    If the loss is a mean of terms of one example each, `value_and_grad` runs it once. So return what is small for each
    example, such as losses and not logits. Call it under `jax.jit`, because outside of it each call compiles the loop.

    The first axis of each array in `batch_argnums` numbers the B examples. Micro-batch i of K has the examples i, i +
    K, i + 2 K, and so on, and the rows come back in the order of the batch.

    ==============================================  ============================================================
    in `fun`, or around it                          result
    ==============================================  ============================================================
    reverse mode of any order, `jax.vmap`           the derivative by every floating array: whole arguments,
                                                    examples, and traced arrays that `fun` closes over
    forward mode                                    of a gradient, right; of the rows, an error of JAX about
                                                    custom_vjp: take `jax.lax.map(jax.checkpoint(fun), ...)` there
    integers, booleans, None, empty containers      they come back, and have no derivative
    batch norm                                      statistics of a micro-batch; to split the model around it saves
                                                    no memory
    a comparison of examples, a position in x       those of one micro-batch, which `check_micro_batches` finds
    time-major arrays, of shape (T, B, ...)         an error; move their axis of examples to the front
    inside `shard_map` or `jax.pmap`                a device's own rows, with the derivatives of JAX
    ==============================================  ============================================================

    Args:
      fun: a function that returns a tree of arrays with a row for each example that it gets. `jax.vmap` of a function
        of one example does, with `in_axes=(None, 0)`. Other arguments are trees of anything, such as modules.
      micro_batches: K, as in `value_and_grad`.
      batch_argnums: the arguments that hold examples, as in `value_and_grad`. None: all by position, except the first
        and those of `rng_argnums`. If there are none, all by keyword, except these.
      rng_argnums: arguments that are PRNG keys, as in `value_and_grad`: each micro-batch draws from its own. To draw
        what the whole batch draws, pass a key for each example, `jax.random.split(key, B)`, or draw outside of `fun`.
      accumulator_dtype: as in `value_and_grad`.
      sum_over: axes of the mesh of `jax.set_mesh`, over which the batch is divided, as in `value_and_grad`. Gradients
        then cross the network once, after the loop, and the rows stay sharded.

    Returns:
      A function with the arguments of `fun`, its name and its docstring. It takes the whole batch, and returns the tree
      of `fun` with the rows of the whole batch: arrays of shape (B, ...).

    Raises:
      ValueError: as in `value_and_grad`; `fun` returns a leaf without a row for each example, or closes over a PRNG
        key; `sum_over` is mapped already.

    Example:
      >>> def squares(params, x, y):
      ...     return (x @ params - y) ** 2
      >>> def loss_fn(params, x, y, mask):
      ...     rows = micro_batch_map(squares, micro_batches=4)(params, x, y)
      ...     return jnp.sum(rows * mask) / jnp.sum(mask)
      >>> params, x, y = jnp.zeros(2), jnp.eye(8, 2), jnp.arange(8.0)
      >>> jax.jit(jax.value_and_grad(loss_fn))(params, x, y, y < 2)
      (Array(0.5, dtype=float32), Array([ 0., -1.], dtype=float32))

    Source: Gao, Zhang, Han and Callan, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup"
    (GradCache), 2021, https://arxiv.org/abs/2101.06983.
    """
    options = Options(**arguments.among(Options, locals())).checked()
    roles = roles_of(fun, None, rng_argnums, batch_argnums)

    @functools.wraps(fun)
    def of_batch(*args: P.args, **kwargs: P.kwargs) -> Result:
        call = roles.call(args, kwargs, micro_batches)
        if number_of_examples(call) is None:
            raise ValueError(
                "an argument in batch_argnums must hold examples, got none. Pass the batch"
            )
        return rows_of_batch(fun, options, call.keys_and_examples(), args, kwargs)

    return of_batch


@functools.partial(seen_by_check, returns_rows=True)
def rows_of_batch(
    fun: Function,
    options: Options,
    roles: dict[str, Any],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> PyTree:
    """Returns the rows, with a rule for their derivatives. With a carry, `fun` and it return `(rows, ((), carry))`."""
    if not devices_to_map("sum_over", options.axes):
        if options.axes:
            raise ValueError(
                f"sum_over must not name mapped axes, got {options.axes!r}. Leave it out. If fun draws, fold "
                "jax.lax.axis_index of these axes into its key"
            )
        options = options._replace(sum_over=())
    options = options._replace(has_aux=True, aux_reduction="examples", reduction="sum")
    checked = _with_checked_rows(fun, roles, options.micro_batches)
    call = call_of_arrays(checked, options, roles, args, kwargs, _rows)
    if any(map(is_key, call.constants)):
        raise ValueError(
            "fun must not close over a PRNG key. Pass it in rng_argnums=, or its draws with the examples. Convert "
            "what is no key to int32"
        )
    call = call._replace(fun=fun, constants=[])

    def rows_of(free: list[Any], fixed: list[Any]) -> PyTree:
        return _rows(call, call.by_number(free, fixed))

    def forward(free: list[Any], fixed: list[Any]) -> tuple[PyTree, tuple[Arrays, Arrays]]:
        given = call.by_number(free, fixed)
        perturbed = {at: x.value for at, x in given.items() if x.perturbed and is_gradient(x.value)}
        others = {at: x.value for at, x in given.items() if at not in perturbed}
        # It does not call the rule itself, so that forward mode over reverse mode needs none of its derivatives.
        return _rows(call, perturbed | others), (perturbed, others)

    def backward(residuals: tuple[Arrays, Arrays], cotangents: PyTree) -> PyTree:
        perturbed, others = residuals
        rows, (_, carry) = cotangents if call.has_carry else (cotangents, ((), ()))
        of_rows = perturbed_among(dict(enumerate(jax.tree.leaves(rows))))
        grads = _gradients(call, perturbed, others, of_rows)
        # A derivative of the new carry is NaN, as that of a loss has it, because a zero would be silently wrong.
        for x in perturbed_among(dict(enumerate(jax.tree.leaves(carry)))).values():
            grads = jax.tree.map(functools.partial(nan_unless, jnp.all(x == 0)), grads)
        return tuple([grads.get(at) for at in numbers] for numbers in (call.free, call.fixed))

    rule = jax.custom_vjp(rows_of)
    rule.defvjp(forward, backward, symbolic_zeros=True)
    return rule(*call.operands())


def _rows(call: OfArrays, arrays: Arrays) -> PyTree:
    (_, rows), _ = _pass(call, {}, arrays, {})
    return (rows[0], ((), rows[1])) if call.has_carry else rows


def _gradients(call: OfArrays, perturbed: Arrays, others: Arrays, cotangents: Arrays) -> Arrays:
    """Returns the gradients by what is perturbed, for these cotangents of leaves of the rows."""
    if not cotangents:
        return jax.tree.map(jnp.zeros_like, perturbed)
    # Parameters vary as the cotangents do, so that JAX sums gradients over devices once, after the loop. The program of
    # a function that closes over arrays has the types that it was traced with.
    found = [varying_axes(x) for x in cotangents.values() if not call.programs]
    axes = tuple(frozenset().union(*found))
    vary = functools.partial(jax.tree.map, lambda x: as_varying(x, axes))
    varying, sum_over_devices = jax.vjp(vary, perturbed)
    (_, aux), grads = _pass(call, varying, others, vary(cotangents))
    of_examples = aux[0] if call.has_carry else aux
    (grads,) = sum_over_devices(jax.tree.map(partitioned_like, grads | of_examples, varying))
    return grads


def _pass(
    call: OfArrays, perturbed: Arrays, others: Arrays, cotangents: Arrays
) -> tuple[PyTree, Arrays]:
    """Runs `fun` on all micro-batches. Returns their rows, or with cotangents their gradients by what is perturbed.

    Both are in the form of `value_and_grad`: `((0, aux), gradients)`. The aux are the rows, or gradients by examples.
    """
    params = {at: x for at, x in perturbed.items() if at in call.free}
    args, kwargs, closed_over = call.arguments(perturbed | others, absent=[*params])

    def of_micro_batch(*args: PyTree, **kwargs: PyTree) -> tuple[PyTree, Arrays]:
        *its_args, params, cotangents = args
        leaves = call.structure.flatten_up_to((tuple(its_args), kwargs))
        of_examples = {at: leaves[at] for at in perturbed if at not in params}

        def its_rows(its_perturbed: Arrays) -> tuple[Arrays, PyTree]:
            returned = call.with_params(
                call.fun, [*perturbed], closed_over, *its_args, its_perturbed, **kwargs
            )
            rows, (_, carry) = returned if call.has_carry else (returned, ((), ()))
            by_number = dict(enumerate(jax.tree.leaves(rows)))
            return {at: by_number[at] for at in cotangents}, (rows, carry)

        _, pull_back, (rows, carry) = jax.vjp(its_rows, params | of_examples, has_aux=True)
        (grads,) = pull_back(cotangents)
        aux = {at: grads.pop(at) for at in of_examples} if cotangents else rows
        return (jnp.float32(0), (aux, carry) if call.has_carry else aux), grads

    at = len(args)
    roles = call.roles | {"batch_argnums": (*call.roles["batch_argnums"], at + 1)}
    run = of_options(of_micro_batch, call.options, at, **roles, has_gradients=True)
    return run(*args, params, cotangents, **kwargs)


def _with_checked_rows(fun: Function, roles: dict[str, Any], divisor: int) -> Function:
    """Returns `fun`, which raises unless it returns rows.

    A shape may fit by chance, as statistics of 4 classes from micro-batches of 4 examples. So `fun` is traced for the
    whole batch, too, where rows have another number. If it takes no other number of examples, that stays unknown.
    """

    def rows_of(given: dict[Place, PyTree]) -> PyTree:
        args = [x for at, x in given.items() if isinstance(at, int)]
        returned = fun(*args, **{at: x for at, x in given.items() if isinstance(at, str)})
        return returned if roles.get("carry_argnum") is None else returned[0]

    def of_micro_batch(*args: PyTree, **kwargs: PyTree) -> PyTree:
        given = dict(enumerate(args)) | kwargs
        examples = {at: given[at] for at in roles["batch_argnums"]}
        whole = jax.tree.map(functools.partial(_repeated, divisor), examples)
        of_whole_batch = None
        with suppress(Exception):
            of_whole_batch = jax.eval_shape(lambda: rows_of(given | whole))
        # Not by `len`, which a symbol of jax.export does not have.
        size = jax.tree.leaves(examples)[0].shape[0]
        try:
            returned = fun(*args, **kwargs)
        except (TypeError, ValueError) as error:
            if of_whole_batch is not None:
                error.add_note(_CLOSED_OVER_EXAMPLES)
            raise
        rows = returned if roles.get("carry_argnum") is None else returned[0]
        _check_rows(rows, size, of_whole_batch, size * divisor)
        return returned

    return of_micro_batch


_CLOSED_OVER_EXAMPLES = (
    "fun takes the whole batch, but no micro-batch. Pass each array with a row for each example as an argument of fun, "
    "in batch_argnums="
)


def _repeated(count: int, x: jax.Array) -> jax.Array:
    size, *rest = x.shape
    return jnp.broadcast_to(x[:, None], (size, count, *rest)).reshape(size * count, *rest)


def _check_rows(rows: PyTree, size: int, of_whole_batch: PyTree, whole_size: int) -> None:
    leaves = jax.tree.leaves_with_path(rows) or [((), rows)]
    structure: Any = jax.tree.structure(rows)
    is_known = jax.tree.structure(of_whole_batch) == structure
    large = jax.tree.leaves(of_whole_batch) if is_known else []
    for (path, x), y in zip_longest(leaves, large):
        # No text, no object and no PRNG key.
        is_number = is_array(x) and not jnp.issubdtype(jnp.result_type(x), jax.dtypes.extended)
        shape = np.shape(x)
        fits_whole = y is None or y.shape == (whole_size, *shape[1:])
        if not is_number or shape[:1] != (size,) or not fits_whole:
            came = f"{jax.typeof(x) if is_array(x) else shown(x)} for {size} examples"
            came += f", and {jax.typeof(y)} for {whole_size}" if y is not None else ""
            raise ValueError(
                "fun must return arrays of numbers with a row for each example, got "
                f"{came}{f' in {leaf_name(path)}' if path else ''}. Compute the rest outside, on the whole batch"
            )
