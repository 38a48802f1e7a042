"""A whole batch in one call: `jax.value_and_grad` from several micro-batches, in one loop of the compiled program.

`batch` divides the arguments, `_Loss` runs `fun` on a micro-batch, and `_Loop` adds up the results. Two windows hold
the sums that are divided by a weight: of loss and gradients, and of the averaged leaves of the aux. If axes of
`sum_over` are not mapped, the call maps them (`on_each_device`). `_run` is what a device does:

1. Take the parameters, without the statistics that Flax overwrites, and the carry.
2. Trace `fun` with its gradients for a micro-batch, once. The loop runs what was traced.
3. Check what `fun` returns: the axes over which the loss differs, the carry, the leaves of the aux.
4. Run the loop. `_Loop.turn` has the order of a micro-batch: weight, results, sums, whether it is kept, and the rest.
   With `skip_empty`, `_Loop.run_where` leaves out micro-batches without a weight.
5. Divide the sums by the weights, and sum them over devices, once.
6. Put together what `fun` returned beside the loss.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax._base import arguments, trees
from shrewjax._base.axes import (
    as_varying,
    newly_varying,
    replicated_axes,
    row_axes,
    sum_over_others,
    varying_axes,
)
from shrewjax._base.mesh import (
    axes_beside_partitions,
    devices_to_map,
    is_tracing,
    on_each_device,
    partitioned_like,
    placed_like,
    summed,
)
from shrewjax._base.trees import check_unchanged, is_gradient
from shrewjax._base.types import (
    Axes,
    AxisName,
    AxisNames,
    DType,
    Function,
    KeyPath,
    Leaf,
    Number,
    PyTree,
    Scalar,
)
from shrewjax._batches import _overwritten
from shrewjax._batches._aux import (
    COMBINE,
    STACKED,
    AuxLeaves,
    AuxSums,
    cast_like,
    empty_stacks,
    nan_unless,
    selected,
)
from shrewjax._batches.batch import Batch, batch_of_call
from shrewjax._batches.roles import is_array, roles_of
from shrewjax._numerics.reductions import agreed_over, any_device_along
from shrewjax._programs.forwarding import returned_as_given
from shrewjax._programs.jaxprs import axes_of_collectives, reads
from shrewjax._programs.loops import Traced
from shrewjax._programs.scatters import unknown_true
from shrewjax._programs.unrolled import scan_in_order
from shrewjax._windows.window import NonfiniteOfBatch, Reduction, Window
from shrewjax._windows.window_state import GradAccumulatorState

P = ParamSpec("P")


class _LossAndGradients(NamedTuple):
    value: jax.Array
    gradients: PyTree


class _Returned(NamedTuple):
    to_average: _LossAndGradients
    aux: tuple[PyTree, list[Leaf]]  # and statistics of Flax's fp8 layers
    carried: list[PyTree]  # the new value of the argument `carry_argnum`, or empty


class _LoopState(NamedTuple):
    window_state: GradAccumulatorState
    aux: AuxSums
    carried: list[PyTree]


_Ran: TypeAlias = tuple[_LoopState, list[Leaf]]
"""The state after micro-batches, and the leaves of the aux that are stacked, of one or of all."""


def accumulated_value_and_grad(
    fun: Callable[P, Any],
    micro_batches: int,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    batch_argnums: int | str | Sequence[int | str] | None = None,
    weight_fn: Function | None = None,
    aux_reduction: PyTree = "mean",
    rng_argnums: int | str | Sequence[int | str] = (),
    carry_argnum: int | None = None,
    reduction: Reduction = "mean",
    nonfinite: NonfiniteOfBatch = "propagate",
    accumulator_dtype: DType = None,
    sum_over: AxisName | None = None,
    sharded_over: AxisName | None = None,
    skip_empty: bool = False,
) -> Callable[P, tuple[PyTree, PyTree]]:
    r"""Returns the mean of `jax.value_and_grad` of `fun` over micro-batches, each with a loss of its own.

    .. math:: \ell = \frac{\sum_i w_i \ell_i}{\sum_i w_i}, \qquad \bar g = \frac{\sum_i w_i g_i}{\sum_i w_i}

    The returned function takes the arguments of `fun`, with the whole batch. Each micro-batch has a loss of its own,
    and the results are their mean: a window of `accumulate` in one call. So batch norm has a micro-batch's statistics,
    and a policy decides on each one. `value_and_grad` has the loss of the whole batch. Call the returned function
    under `jax.jit`, because outside of it each call compiles the loop again.

    A step takes the memory of one micro-batch and of the sum of the gradients. Stacked gradients of scanned layers are
    added in place, except with `nonfinite="drop_micro_batch"`, if they also come from elsewhere, such as a penalty, or
    if `unroll` is above half of the scan's length. With `SHREWJAX_DISABLE_PASSES=1` in the environment, `fun` runs as
    JAX traced it, and nothing is added in place.

    The first axis of each array in `batch_argnums` numbers the B examples. Micro-batch i of K has the examples i, i +
    K, i + 2 K, and so on. So an axis that is sharded over devices is split without moving data.

    ==============================================  ============================================================
    condition                                       result
    ==============================================  ============================================================
    a micro-batch of weight 0                       adds nothing to value, gradients and aux, even if its loss or its
                                                    gradients are NaN; the carry stays unchanged
    a non-finite one, `nonfinite="propagate"`       it is added, so the results are non-finite
    a non-finite one, `"drop_micro_batch"`          it gets weight 0
    every micro-batch has weight 0 or is dropped    the gradients are zeros, the value and every `"mean"` are NaN;
                                                    with `reduction="sum"`, the value is 0
    an array's weight, or a sum, out of range       value, gradients and every `"mean"` are NaN; a `"sum"` is
                                                    neither multiplied nor divided by it, and stays
    a leaf below `_overwrite_with_gradient`         the largest new value of a kept micro-batch, over devices too; the
                                                    old one if none is kept: a statistic of Flax's fp8 layers
    a derivative of the results in reverse mode     NaN if a micro-batch that is not kept has a NaN, because JAX
                                                    multiplies it by 0; let `fun` avoid it, as by
                                                    `sum / jnp.maximum(n, 1)`; forward mode is right
    ==============================================  ============================================================

    A micro-batch is non-finite if its loss or its gradients contain a NaN or an infinity, and its weight is not 0.

    Each leaf of the aux keeps its dtype; a `"sum"` of booleans or short integers has `jnp.sum`'s.

    ===============  ==================================================  =============================  =============
    `aux_reduction`  over the micro-batches that are kept                over devices, with `sum_over`  none is kept
    ===============  ==================================================  =============================  =============
    `"mean"`         sum(w a) / sum(w), for every `reduction`            the same, over all of them     NaN
    `"sum"`          sum(a), which is not weighted                       the same                       0
    `"max"`          the largest, NaN if one is NaN                      the same                       least number
    `"min"`          the smallest, NaN if one is NaN                     the same                       largest number
    `"last"`         the last one's                                      joined, see `sum_over`         0
    `"stack"`        all, along a new first axis of K; the others are 0  joined, see `sum_over`         0
    `"examples"`     rows of examples, in the batch's order, as of       joined, see `sum_over`         0
                     predictions; rows of the others are 0
    ===============  ==================================================  =============================  =============

    Args:
      fun: the loss function, as for `jax.value_and_grad`.
      micro_batches: K, an int >= 1, into which the examples can be divided.
      argnums: as in `jax.value_and_grad`.
      has_aux: whether `fun` returns a pair.
      batch_argnums: the arguments that hold examples, trees of arrays: positions, or names of parameters and of keys
        of `**batch`. A position names its parameter however it is passed. None: all that come by position, except those
        of `argnums`, `rng_argnums` and `carry_argnum`. If there are none, all that come by keyword, except these. All
        other arguments reach every micro-batch whole. They may hold no PRNG key, and those by keyword no array of B
        examples.
      weight_fn: a function of `fun`'s arguments for one micro-batch, which returns the number of examples or tokens
        that its mean counts. With a mask, count those in the mask. A weight is as in `accumulate`. None: all
        micro-batches have the same.
      aux_reduction: one name of the table above for all leaves, or a tree prefix of names. A leaf whose shape depends
        on the number of examples has no `"mean"`. Leaves of `"examples"` have a row for each example.
      rng_argnums: the arguments that are trees of PRNG keys, typed or raw: positions or names, as above. Micro-batch i
        gets `jax.random.fold_in(key, i)`. On device d along `sum_over`, it gets `fold_in(key, d * K + i)`.
        If `fun` closes over a key, all micro-batches have the same noise.
      carry_argnum: the position of an argument that each micro-batch passes on to the next, such as batch statistics.
        No gradient flows through it, as in truncated backpropagation. `fun` then returns `(loss, (aux, carry))`, and
        the result is `((value, (aux, carry)), grads)`. With `sum_over`, each device has its own carry, unless `fun`
        reduces it.
      reduction: `"mean"` for a mean loss, as above. `"sum_over_weights"` for a summed loss, with `weight_fn`:
        sum(l) / sum(w) and sum(g) / sum(w), without micro-batches of weight 0. If these have a gradient, as the
        negatives in detection, return `jnp.maximum(w, 2.0**-30)`. `"sum"`: sum(l) and sum(g). There, `weight_fn`
        marks empty micro-batches and averages the aux alone, so the gradient of a mean is K times too large.
      nonfinite: `"propagate"` or `"drop_micro_batch"`, see above. The latter reads the gradients once more.
      accumulator_dtype: dtype of the gradients' sum, as in `accumulate`. Gradients have the dtypes of
        `jax.value_and_grad`.
      sum_over: the axis, or axes, over which the batch is divided: mapped ones, or those of the mesh of `jax.set_mesh`,
        over which the call then maps itself. Gradients cross the network once, after the loop. If the call maps itself,
        `"last"`, `"stack"` and `"examples"` are joined along their axis of examples, and floating leaves of the carry
        are averaged at the end (others should be the same on all devices, and the largest is taken). Otherwise these
        stay a device's own. `()` sums over no axis: each device's results stay its own, for `accumulate(sum_over=)`.
        With `check_vma=False` and in `jax.pmap`, pass `()` also if the gradients are the same on every device.
      sharded_over: as in `accumulate`.
      skip_empty: whether micro-batches of weight 0 do not run, in any place, so that a step takes the time of those
        that have a weight. Results are the same, see below.

    With `skip_empty=True`, all weights are computed before the loop, so `weight_fn` must not read the carry. The
    program learns the number of turns when it runs. So pass it if many are empty: a GPU's host may wait for each.
    Forward mode works, and outside of `jax.jit` reverse mode, too. Under `jax.jit` reverse mode is an error of JAX:
    "Reverse-mode differentiation does not work for lax.while_loop or lax.fori_loop with dynamic start/stop values."
    `jax.vmap` over different numbers takes the time of the largest, and holds a second sum of the gradients. Over a
    sharded axis of an Explicit mesh it is an error of JAX.

    With `sum_over`, each device runs its own number. But if devices wait for each other in a micro-batch, it runs on
    all of them if any has a weight in it. So it is with `nonfinite="drop_micro_batch"`, with a loss that reduces over
    `sum_over` or calls `jax.lax.ppermute`, and if XLA also shards over other axes of the mesh.

    Without `sum_over`, a batch that is sharded over its examples has the same results under plain `jax.jit`. But XLA
    then decides how often gradients cross the network, on Auto and on Explicit meshes: up to K times and more (the
    guide "Many devices"). The guide "Windows" has a step with a mask, keys, aux and carry. A
    `clip_cotangent` inside a mean loss is K times as tight in a micro-batch. Sum the loss, with
    `reduction="sum_over_weights"`. Or pass `max_norm * B / len(x)`, where x is the micro-batch.

    Returns:
      A function of `fun`'s arguments: `(value, grads)`, or `((value, aux), grads)` with `has_aux`. The gradients are
      a tuple if `argnums` is a sequence.

    Raises:
      ValueError: an argument is not as described; an argument has two roles; an array of examples has no axis, or
        another number of examples than the first array, or a number that K does not divide; `aux_reduction` does not
        fit the aux; a parameter is not floating; a key or an array of B examples comes as described under
        `batch_argnums`; `sum_over` is no axis here; a leaf to be joined has no axis of examples. Inside `shard_map`,
        the loss is not reduced and `sum_over` is missing, or it is reduced already.
      AssertionError: `fun` returns a carry of another structure, shape or dtype.

    Example:
      >>> def loss(params, x, y):
      ...     return jnp.mean((x @ params - y) ** 2)
      >>> params, x, y = jnp.zeros(2), jnp.ones((8, 2)), jnp.arange(8.0)
      >>> value, grads = jax.jit(accumulated_value_and_grad(loss, micro_batches=4))(params, x, y)
      >>> value, grads
      (Array(17.5, dtype=float32), Array([-7., -7.], dtype=float32))

    Source: as for `accumulate`, by linearity of the gradient.
    """
    # The docstring has more than 70 lines, because its tables and its arguments are promises that tests hold.
    # 1. Check the arguments.
    arguments.integer("micro_batches", micro_batches, at_least=1)
    _check_aux_reduction(aux_reduction, has_aux)
    arguments.choice("nonfinite", nonfinite, get_args(NonfiniteOfBatch))
    arguments.static_flag("skip_empty", skip_empty)
    window = Window(**arguments.among(Window, locals()))
    _check_weight_fn(weight_fn, reduction, skip_empty)
    has_carry = carry_argnum is not None
    if has_carry and not has_aux:
        raise ValueError(
            "carry_argnum needs has_aux=True, because fun returns (loss, (aux, carry))"
        )
    axes = window.axes or ()
    of_params = arguments.positions("argnums", argnums)
    of_carry = (arguments.integer("carry_argnum", carry_argnum),) if has_carry else ()
    reserved = {"argnums": of_params, "carry_argnum": of_carry}
    roles = roles_of(fun, reserved, rng_argnums, batch_argnums)
    remedy = "Return jnp.sum of it"
    if reduction == "mean":
        remedy = "Return jnp.mean of it, or jnp.sum with reduction='sum'"

    def of_batch(*args: P.args, **kwargs: P.kwargs) -> tuple[PyTree, PyTree]:
        # 2. Divide the arguments of a call.
        arguments.require_arguments_of_fun("weight_fn", weight_fn, args, kwargs)
        along = tuple(a for a in axes if a in row_axes())
        if along and reduction == "sum":
            raise ValueError(
                f"reduction='sum' must not have sum_over={along!r} inside per_device. Leave out sum_over="
            )
        devices = devices_to_map("sum_over", axes)
        call = roles.call(args, kwargs, micro_batches, max(devices, 1))
        batch = batch_of_call(call, axes, devices, reduction == "sum")
        # 3. Run micro-batches of a loss that has its arguments in the batch's order.
        of_args = _checked_loss(call.in_order(fun), has_aux, has_carry, remedy)
        by_jax = jax.value_and_grad(of_args, call.numbers["argnums"], has_aux=True)
        weigh = weight_fn and call.in_order(weight_fn)
        loss = _Loss(of_args, by_jax, batch, window, reduction, aux_reduction, weigh, skip_empty)
        run = _run_on_each_device if devices else _run_here
        (value, (aux, carried)), grads = run(loss)
        # 4. Return what fun does.
        grads = grads if isinstance(argnums, Sequence) else grads[0]
        if not has_aux:
            return value, grads
        return (value, (aux, *carried) if has_carry else aux), grads

    return of_batch


def _check_aux_reduction(given: PyTree, has_aux: bool) -> None:
    if not has_aux and given != "mean":
        raise ValueError(
            f"aux_reduction={trees.shown(given)} needs has_aux=True, because fun returns (loss, aux)"
        )
    for name in jax.tree.leaves(given, is_leaf=lambda x: x is None):
        arguments.choice("aux_reduction", name, ("mean", *STACKED, *COMBINE))


def _check_weight_fn(weight_fn: Any, reduction: str, skip_empty: bool) -> None:
    """Raises if it is no function, or if there is none and another argument needs it."""
    if weight_fn is not None and not callable(weight_fn):
        raise ValueError(
            f"weight_fn must be a function, got {trees.shown(weight_fn)}. Pass such as lambda params, x, y: len(x)"
        )
    what = "skip_empty=True" if skip_empty else f"reduction={reduction!r}"
    if weight_fn is None and (skip_empty or reduction == "sum_over_weights"):
        raise ValueError(
            f"{what} needs weight_fn=, got None. Pass a function that counts the examples. Or leave out {what}"
        )


def sums_over_turns(turn: Function, params: PyTree, count: int, window: Window) -> PyTree:
    """Runs `turn(i, params)` for each micro-batch i of `count`. Returns its `((loss, aux), gradients)`.

    Loss, gradients and the first half of the aux are added up, and the second half is stacked. A turn's number is its
    only example, in an array of shape (1, count). `turn` takes its gradients itself, so `of_one` serves as
    `value_and_grad`. Nothing calls it as `fun`, because no leaf is averaged or joined.
    """
    roles = {"batch_argnums": (0,), "argnums": (1,)}
    examples = {0: jnp.arange(count, dtype=jnp.int32)[None]}
    # Argument 0 is the turn's number, so its place among the arguments is empty. Argument 1 holds the parameters.
    batch = Batch(((), params), roles, {1: params}, examples, divisor=count)

    def of_one(i: jax.Array, params: PyTree) -> tuple[PyTree, PyTree]:
        (value, aux), grads = turn(i[0], params)
        return (value, (aux, [])), (grads,)

    loss = _Loss(of_one, of_one, batch, window, "sum", ("sum", "stack"))
    (value, (aux, _)), (grads,) = _run_here(loss)
    return (value, aux), grads


def _run_here(loss: "_Loss") -> tuple[PyTree, PyTree]:
    def run(examples: dict[int, PyTree]) -> tuple[PyTree, PyTree]:
        return _run(loss.of(loss.batch._replace(examples=examples)))

    # Outside of `jax.jit`, one program. Otherwise the loop closes over examples, and JAX keeps them alive
    # (tests/batches/test_micro_batched.py, "alive"). With `skip_empty`, reverse mode needs a number of turns that is
    # known here.
    runs_as_it_is = is_tracing() or loss.skip_empty
    return (run if runs_as_it_is else jax.jit(run))(loss.batch.examples)


def _run_on_each_device(loss: "_Loss") -> tuple[PyTree, PyTree]:
    batch, axes = loss.batch, loss.axes

    def run(examples: PyTree, args: PyTree) -> tuple[PyTree, PyTree]:
        return _run(loss.of(batch.of_device(examples, args, axes)))

    # Rows of examples stay on the devices that have their examples.
    parts = ((False, (loss.aux_reduction == "examples", False)), False)
    on_devices = partial(on_each_device, run, axes, returns_parts=parts)
    returned, grads = on_devices(batch.examples, batch.args)
    return returned, jax.tree.map(partitioned_like, grads, batch.with_role("argnums"))


def _checked_loss(fun: Function, has_aux: bool, has_carry: bool, remedy: str) -> Function:
    """Returns `fun` with results `(loss, (aux, carry))`. The carry is a list of one or none, and no aux is ().

    Raises unless the loss is a scalar, with arrays beside it. JAX would say "output.sum()" for losses of examples,
    which is K times too small in a mean over micro-batches.
    """

    def of_arguments(*args: PyTree) -> tuple[PyTree, tuple[PyTree, list[PyTree]]]:
        # 1. Take apart what fun returns.
        returned = fun(*args)
        came = len(returned) if isinstance(returned, tuple | list) else 1
        if came != 1 + has_aux:
            wanted = "(loss, aux)" if has_aux else "a scalar"
            raise ValueError(
                f"fun must return {wanted} with has_aux={has_aux}, got {came} value{'' if came == 1 else 's'}. "
                f"Return that, or pass has_aux={not has_aux}"
            )
        value, beside = returned if has_aux else (returned, ())
        # 2. Check it.
        if shape := getattr(value, "shape", ()):
            raise ValueError(f"fun must return a scalar, got shape {shape}. {remedy}")
        for path, x in jax.tree.leaves_with_path(beside):
            if not is_array(x):
                raise ValueError(
                    f"leaf {trees.leaf_name(path)} of the aux must be an array, got {trees.shown(x)}. Leave it out"
                )
        if not has_carry:
            return value, (beside, [])
        if not isinstance(beside, tuple | list) or len(beside) != 2:
            raise ValueError(
                f"with carry_argnum, fun must return (loss, (aux, carry)), got {trees.shown(beside)} beside the loss"
            )
        aux, carry = beside
        return value, (aux, [carry])

    return of_arguments


def _run(loss: "_Loss") -> tuple[PyTree, PyTree]:
    """Returns the results of the batch, or of a device's part of it. The module's docstring has its steps."""
    batch = loss.batch
    # 1. Take the parameters and the carry. Statistics that Flax overwrites have no mean, so they stand apart.
    all_params = batch.with_role("argnums")
    params, old_values = _overwritten.separated(all_params)
    carried = [jax.tree.map(jnp.asarray, x) for x in batch.with_role("carry_argnum")]

    # 2. Trace fun once, for an abstract number of a micro-batch. It varies over devices if each runs its own.
    has_weight = loss.has_weight(carried) if loss.skip_empty else None
    number = jnp.int32(0)
    if has_weight is not None:
        number = as_varying(number, _axes_of(has_weight))
    traced = Traced(loss.results, number, carried)

    # 3. Check what fun returns: where it is sharded, the axes of the loss, the weight, the carry, the aux.
    own_axes, aux = _checked(loss, traced, params, carried)

    # 4. Run the loop over all micro-batches, or over those with a weight.
    loop = _Loop(loss, traced, aux, own_axes)
    start = loop.start(params, batch.carry_of_device(carried))
    if has_weight is None:
        is_slow = traced.has_convolutions()
        end, stacked = scan_in_order(loop.turn, start, batch.divisor, has_convolutions=is_slow)
    else:
        end, stacked = loop.run_where(has_weight, start)

    # 5. Divide and sum over devices. Statistics that Flax overwrites are put back among the gradients.
    value, grads = loop.averages(end.window_state)
    whole_aux, overwritten = aux.finalize(end.aux, stacked)
    if old_values:
        new_values = _overwritten.finalize(overwritten, old_values)
        grads = _overwritten.joined(grads, new_values, all_params)

    # 6. Add aux and carry to the results. If the call maps the axes, its carry has to be one for all devices.
    new_carry = loop.one_carry(carried, end) if batch.devices else end.carried
    return (value, (whole_aux, new_carry)), grads


def _checked(
    loss: "_Loss", traced: Traced, params: PyTree, carried: list[PyTree]
) -> tuple[AxisNames, AuxLeaves]:
    """Returns the axes along which a device's results stay its own, and how the aux is reduced.

    Raises if `fun` returned something that cannot be averaged, reduced or carried.
    """
    batch, like, sum_over = loss.batch, traced.result_types, loss.window.axes
    if batch.devices and {*loss.axes} & traced.constrained_axes():
        # JAX raises as late as it lowers the program. `on_each_device` adds the remedies.
        what = f"mesh axes in sum_over={sum_over!r}"
        raise ValueError(f"fun constrains an array to {what}")
    own_axes = _own_axes(like.to_average.value, params, sum_over)
    loss.check_weight(carried)
    if carried:
        weight = jax.eval_shape(loss.weight_of, 0, carried)
        _check_carried(like.carried, carried, weight)
    examples = jax.tree.leaves(batch.examples)
    size = examples[0].shape[0] if examples else 0
    aux = AuxLeaves(loss.aux_reduction, like.aux, size, Window(sum_over=sum_over))
    if batch.divisor * max(batch.devices, 1) > 1:
        is_joined = batch.devices > 0 and loss.aux_reduction != "examples"
        aux.find_axes(loss.aux_of_whole_batch, is_joined)
    return own_axes, aux


_NO_SELECTION = (
    "In fun, shapes must not depend on values. Take the mean of jnp.where(mask, ...) over the mask, and let weight_fn= "
    "count it"
)
_WHOLE_IN_ARGNUMS = (
    "Each micro-batch gets the parameters whole, which come first or in argnums. If one holds examples, pass it after "
    "them. For a gradient by examples, leave them in argnums, and pass their indices as the batch"
)


class _Loss(NamedTuple):
    fun: Function  # as `_checked_loss` returns it
    value_and_grad: Function  # of `fun`, by a tuple of arguments
    batch: Batch
    window: Window
    reduction: Reduction
    aux_reduction: PyTree
    weight_fn: Function | None = None  # takes the arguments in order, as `fun` does
    skip_empty: bool = False

    @property
    def axes(self) -> AxisNames:
        return self.window.axes or ()

    def of(self, batch: Batch) -> "_Loss":
        return self._replace(batch=batch)

    def results(self, i: Number, carried: list[PyTree]) -> _Returned:
        batch = self.batch
        try:
            results = self.value_and_grad(*batch.arguments(i, carried))
        except jax.errors.NonConcreteBooleanIndexError as error:
            error.add_note(_NO_SELECTION)
            raise
        except (TypeError, ValueError) as error:
            examples, params = map(jax.tree.leaves, (batch.examples, batch.params))
            counts = {(x.shape[0] * batch.divisor,) for x in examples}
            if counts & {np.shape(x)[:1] for x in params}:
                error.add_note(_WHOLE_IN_ARGNUMS)
            raise
        (value, (aux, carried)), all_grads = summed(results)
        grads, overwritten = _overwritten.separated(all_grads)
        return _Returned(_LossAndGradients(value, grads), (aux, overwritten), carried)

    def weight_of(self, i: Number, carried: list[PyTree]) -> Scalar:
        """Returns the weight of micro-batch i, or 1 for a number in a mean, where it cancels.

        XLA leaves an all-reduce inside the loop if a constant multiplies it (XLA-24).
        """
        is_mean = self.reduction == "mean"
        if self.weight_fn is None:
            return 1.0
        given = self.weight_fn(*self.batch.arguments(i, carried))
        weight = arguments.weight(given, {()})
        return 1.0 if is_mean and isinstance(weight, float) and weight else weight

    def has_weight(self, carried: list[PyTree]) -> jax.Array:
        """Returns for each micro-batch whether its weight is not 0. Raises if weights depend on the carry."""
        if any(reads(partial(self.weight_of, 0), carried)):
            raise ValueError(
                "weight_fn must not read the carry (in NNX, state outside of wrt) with skip_empty=True. Let it count "
                "in the batch. Or leave out skip_empty"
            )
        numbers = jnp.arange(self.batch.divisor, dtype=jnp.int32)
        return lax.map(lambda i: jnp.asarray(self.weight_of(i, carried) != 0), numbers)

    def check_weight(self, carried: list[PyTree]) -> None:
        """Raises if the weight has a derivative by the parameters, because averages take it for a constant."""

        batch = self.batch

        def weight(params: dict[int, PyTree]) -> jax.Array:
            loss = self.of(batch._replace(params=params))
            return jnp.asarray(loss.weight_of(0, carried))

        def tangent(tangents: dict[int, PyTree]) -> jax.Array:
            return jax.jvp(weight, (batch.params,), (tangents,))[1]

        if self.reduction != "sum" and any(reads(tangent, batch.params)):
            raise ValueError(
                "weight_fn must have no derivative by parameters. Return jax.lax.stop_gradient(weight). Or let fun "
                "multiply by it, and pass reduction='sum'"
            )

    def aux_of_whole_batch(self) -> PyTree:
        _, (aux, _) = self.fun(*self.batch.whole_arguments())
        return aux


class _Loop(NamedTuple):
    loss: _Loss
    traced: Traced  # its results
    aux: AuxLeaves
    own_axes: AxisNames  # the mapped axes along which a device's results stay its own

    def start(self, params: PyTree, carried: list[PyTree]) -> _LoopState:
        like = self.traced.result_types
        zero = jnp.zeros((), like.to_average.value.dtype)
        empty = self.loss.window.init(_LossAndGradients(zero, summed(params)))
        # The loss is summed beside the gradients. `accumulator_dtype` is for these alone, so another window makes zero.
        of_value = Window(sum_over=self.loss.window.axes).init(zero).gradient_sum
        sums = empty.gradient_sum._replace(value=of_value)
        state = _LoopState(empty._replace(gradient_sum=sums), self.aux.init(), carried)
        return self._varying(placed_like(state, (self.loss.batch.examples, params)))

    def turn(self, state: _LoopState, i: jax.Array) -> _Ran:
        """Runs micro-batch i. Returns the new state, and its leaves of the aux that are stacked."""
        # 1. Its weight and its results. Loops of fun may add gradients already.
        weight = self.loss.weight_of(i, state.carried)
        returned, begun = self._run_and_add(state, i, weight)
        # 2. Add the loss, and the gradients that are left.
        added = self.loss.window.update(begun, returned.to_average, weight)
        # 3. Is it kept? The window counts those that it drops. Sums of scatters in the aux and in the carry are lost,
        # too, if XLA knows that it is kept (XLA-27).
        is_kept = unknown_true() & (weight != 0)
        if self.loss.window.nonfinite != "propagate":
            is_kept &= added.dropped == state.window_state.dropped
        # 4. Add the rest of what it returned, if it is kept.
        aux, stacked = self.aux.update(state.aux, returned.aux, weight, is_kept)
        carried = selected(is_kept, returned.carried, state.carried)
        return self._varying(_LoopState(added, aux, carried)), stacked

    def run_where(self, has_weight: jax.Array, start: _LoopState) -> _Ran:
        """Runs the micro-batches that have a weight, in their order. Each device runs its own.

        1. Devices that wait for each other in a turn run the same ones: those that have a weight on any of them.
           If one had more turns than another, it would wait forever. If their turns differed, a collective would join
           different micro-batches.
        2. Order the micro-batches, those that run first.
        3. Run as many turns. Stacks of the aux stay 0 where none ran.
        """
        # A `lax.cond` in the scan takes the same time, is simpler, and has a reverse mode. With JAX 0.10.2 an H100 then
        # holds 1.96 P for 0.96 (tests/devices/test_scanned_layers.py, "skip_empty"). So take it when pyproject.toml
        # asks for JAX 0.12.
        # 1.
        axes = _axes_of(has_weight)
        turn = partial(self.turn, start, as_varying(jnp.int32(0), axes))
        waiting = axes_of_collectives(turn).union(axes_beside_partitions())
        runs = any_device_along(has_weight, waiting)

        # 2.
        order = as_varying(jnp.argsort(~runs, stable=True).astype(jnp.int32), axes)

        # 3.
        def run(at: jax.Array, before: _Ran) -> _Ran:
            state, stacks = before
            number = lax.dynamic_index_in_dim(order, at, keepdims=False)
            state, new = self.turn(state, number)
            put = partial(lax.dynamic_update_index_in_dim, index=number, axis=0)
            return state, jax.tree.map(put, stacks, new)

        stacks = empty_stacks(self.loss.batch.divisor, jax.eval_shape(turn)[1])
        return lax.fori_loop(0, jnp.sum(runs), run, (start, stacks))

    def _run_and_add(
        self, state: _LoopState, i: jax.Array, weight: Scalar
    ) -> tuple[_Returned, GradAccumulatorState]:
        """Returns the results of micro-batch i, and the window with those gradients that loops of `fun` can add.

        A gradient is known by the number of its result in the traced program. In the results, those that a loop has
        added are None.
        """
        # One micro-batch has no sum to add to. A policy looks at the gradients before they are added.
        if self.loss.batch.divisor == 1 or self.loss.window.nonfinite != "propagate":
            return self.traced(i, state.carried), state.window_state
        sums = state.window_state.gradient_sum
        leaves, structure = jax.tree.flatten(sums.gradients)
        # For each gradient, its number among the results of the traced program.
        places = jax.tree.leaves(self.traced.numbers.to_average.gradients)
        by_place = dict(zip(places, leaves, strict=True))
        add = self.loss.window.adder_in_loop(state.window_state, weight)
        returned, added = self.traced.added_to(by_place, add, i, state.carried)
        gradients = jax.tree.unflatten(structure, [added[at] for at in places])
        sums = sums._replace(gradients=gradients)
        return returned, state.window_state._replace(gradient_sum=sums)

    def _varying(self, state: _LoopState) -> _LoopState:
        """Returns the state with sums whose types vary over `own_axes`, because a loop keeps the types of its state."""
        if not self.own_axes:
            return state
        vary = lambda x: as_varying(x, self.own_axes)  # noqa: E731
        sums = jax.tree.map(vary, state._replace(carried=[]))
        return sums._replace(carried=state.carried)

    def averages(self, window_state: GradAccumulatorState) -> _LossAndGradients:
        window = self.loss.window
        if self.loss.batch.devices and self.loss.reduction != "sum":
            # Divided already, so a "sum" takes only the total.
            window_state = window.divided(window_state)
            window = Window(reduction="sum", sum_over=window.axes)
        average, has_weight = window.finalize(window_state)
        # If no micro-batch is kept, the sums are still zeros, and so are the gradients.
        like = self.traced.result_types.to_average
        value, grads = jax.tree.map(cast_like, average.gradients, like)
        if self.loss.reduction != "sum":
            value = nan_unless(has_weight, value)
        return _LossAndGradients(value, grads)

    def one_carry(self, old: list[PyTree], end: _LoopState) -> list[PyTree]:
        """Returns one carry for all devices: the mean of floating leaves, the largest of others.

        A device that keeps no micro-batch, as one that has only padding, does not count. A leaf that no micro-batch
        changes stays as it is, because frozen weights would cross the network.
        """
        first = partial(self.traced, jnp.int32(0))
        is_same = iter(returned_as_given(lambda carried: first(carried).carried, old))
        axes = self.loss.axes
        has_new = jnp.any(end.window_state.sum_of_weights != 0)

        def one(x: jax.Array, y: jax.Array) -> jax.Array:
            return x if next(is_same) else agreed_over(y, x, has_new, axes)

        return jax.tree.map(one, old, end.carried)


def _axes_of(has_weight: jax.Array) -> AxisNames:
    """Returns the mapped axes along which devices may have other weights, if types show them."""
    return tuple(sorted(varying_axes(has_weight), key=str))


def _own_axes(loss: PyTree, params: PyTree, sum_over: Axes) -> AxisNames:
    """Returns the mapped axes along which a device's results stay its own. Raises if the loss differs along others.

    They are those along which the loss and all parameters differ, and only with `sum_over=()`.
    """
    axes = sum_over or ()
    reduced = replicated_axes(loss, axes)
    if reduced:
        raise ValueError(
            f"the loss is already reduced over {', '.join(map(repr, reduced))} of sum_over={axes!r}. Return the "
            f"loss of the device's own examples. Or {sum_over_others(axes, reduced)}"
        )
    along = tuple(sorted(varying_axes(loss) - set(axes), key=str))
    leaves = filter(is_gradient, jax.tree.leaves(trees.parameter_arrays(params)))
    is_own = sum_over == () and all({*along} <= varying_axes(x) for x in leaves)
    if along and not is_own:
        wanted = (*axes, *along)
        raise ValueError(
            f"the loss may differ over {', '.join(map(repr, along))}. Pass "
            f"sum_over={wanted if len(wanted) > 1 else along[0]!r} if examples differ. Or reduce the loss by "
            "jax.lax.pmean. For each device's own gradients, pass sum_over=() and jax.lax.pcast(params, "
            f"{along}, to='varying')"
        )
    return along


def _check_carried(new: list[PyTree], carried: list[PyTree], weight: Leaf) -> None:
    """Raises if a micro-batch would change the carry's structure, shapes, dtypes or the axes over which it varies."""
    what = "the carry that fun returns must be like the one that it gets"
    check_unchanged(new[0], carried[0], what)

    def check(path: KeyPath, new: Leaf, old: Leaf) -> None:
        if along := newly_varying(new, old) or newly_varying(weight, old):
            raise ValueError(
                f"leaf {trees.leaf_name(path[1:])} of the carry may differ over {along}, but did not "
                f"before. Return jax.lax.pmean(carry, {along})"
            )

    jax.tree.map_with_path(check, new, carried)
