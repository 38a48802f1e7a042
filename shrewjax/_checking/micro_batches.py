"""The check that micro-batches of a loss give what the whole batch gives.

`check_call` does it:

1. Find the share of each micro-batch in the results.
2. Run loss and gradients in lockstep, at the given parameters and near them.
3. Compare loss and gradients. If they differ, say where and why.
4. Compare the aux.
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from shrewjax._base import arguments, trees
from shrewjax._base.types import Function, Place, PyTree
from shrewjax._batches.roles import roles_of
from shrewjax._batches.value_and_grad import Options, of_options
from shrewjax._checking.causes import Case, lines, option
from shrewjax._checking.results import (
    Batches,
    batches_of,
    gradients_of,
    moved,
    require_different_examples,
    results_at,
)
from shrewjax._numerics.relations import Division, shares_of, tolerance
from shrewjax._programs import jaxprs, lockstep
from shrewjax._programs.lockstep import Programs
from shrewjax._windows.window import Reduction


def check_micro_batches(
    fun: Function,
    micro_batches: int | Sequence[tuple[PyTree, ...]],
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    batch_argnums: Place | Sequence[Place] | None = None,
    weight_fn: Function | None = None,
    aux_reduction: PyTree = "mean",
    rng_argnums: Place | Sequence[Place] = (),
    carry_argnum: int | None = None,
    reduction: Reduction = "mean",
    rtol: float | None = None,
) -> Callable[..., None]:
    r"""Returns a check that micro-batches of a loss give the loss and the gradients of the whole batch.

    .. math:: \sum_i w_i \ell_i \Big/ \sum_i w_i = \ell, \qquad \sum_i w_i g_i \Big/ \sum_i w_i = g

    Call it once, in a test, with a small batch in which masks differ from example to example. It takes the arguments
    of `value_and_grad`, and the returned function those of `fun`. If results differ, the error names the line of
    `fun` where micro-batches part from the whole batch, what each side has there, and a remedy.

    It runs `fun` at the given parameters, and at others a tenth of their size away, because the zeros of a new layer
    hide mistakes. Each micro-batch draws the random numbers that the whole batch draws for its examples, so dropout
    and noise are compared, too. All micro-batches start with the same carry.

    ====================================================  ==========================================================
    it does not see                                       because
    ====================================================  ==========================================================
    a loss that is divided by K in `fun`                  the whole batch's is, too
    a term below `rtol` of the loss and the gradient      it is rounding
    a branch that does not run; a carry that is read      it compares what runs, and micro-batches share the carry
    counts that are equal in each micro-batch             a mean over them is right there; a mask of them is a warning
    ====================================================  ==========================================================

    Batch norm differs, as it should: check with its running averages.

    Args:
      fun: the loss function, as for `value_and_grad`.
      micro_batches: K >= 2, as in `value_and_grad`. Or a list of micro-batches, which may differ in size, as they come
        one by one to `accumulate`: each a tuple of the arguments that hold examples, which come last by position.
      argnums: as in `value_and_grad`.
      has_aux: as in `value_and_grad`.
      batch_argnums: as in `value_and_grad`.
      weight_fn: as in `value_and_grad`.
      aux_reduction: as in `value_and_grad`.
      rng_argnums: as in `value_and_grad`.
      carry_argnum: as in `value_and_grad`.
      reduction: as in `value_and_grad`.
      rtol: the largest error of the loss, and of each leaf of the gradients. None: 2e-5 in float32, 4e-11 in float64,
        1% in float16 and 4% in bfloat16, by the coarsest dtype in `fun`.

    Returns:
      A function of `fun`'s arguments, which returns None. It does not run under `jax.jit`.

    Raises:
      AssertionError: micro-batches give another loss, other gradients or another aux than the whole batch.
      ValueError: the loss or a gradient of the whole batch is not finite; all micro-batches have the same examples; no
        weight is above 0; or an error of `value_and_grad` about an argument.

    Example:
      >>> def loss(w, x, mask):
      ...     return jnp.sum(mask * (x @ w - 1) ** 2) / jnp.sum(mask)
      >>> w, x, mask = jnp.ones(2), jnp.arange(16.0).reshape(8, 2), jnp.arange(8) % 3 > 0
      >>> check_micro_batches(loss, 2, weight_fn=lambda w, x, mask: jnp.sum(mask))(w, x, mask)
      >>> try:
      ...     check_micro_batches(loss, 2)(w, x, mask)
      ... except AssertionError as error:
      ...     print(str(error).partition("    ")[2].partition(". ")[0])
      This line counts 2, 3 in the micro-batches, and 5 in the whole batch

    Source: the results of `value_and_grad`, by linearity of the gradient.
    """
    options = options_of(micro_batches, has_aux, weight_fn, aux_reduction, reduction)
    # Made for its checks alone.
    of_options(fun, options, argnums, carry_argnum, rng_argnums, batch_argnums)
    carry = () if carry_argnum is None else (carry_argnum,)
    own = {"argnums": arguments.positions("argnums", argnums), "carry_argnum": carry}
    roles = roles_of(fun, own, rng_argnums, batch_argnums)

    def check(*args: PyTree, **kwargs: PyTree) -> None:
        calls = calls_of(micro_batches, args)
        arguments.require_arguments_of_fun("weight_fn", weight_fn, calls[0], kwargs)
        check_call(fun, options, batches_of(roles, options, calls, kwargs), rtol)

    return check


def options_of(micro_batches: int | Sequence[tuple[PyTree, ...]], *options: PyTree) -> Options:
    """Returns checked options of `value_and_grad` for K micro-batches, or for those of a list."""
    count = len(micro_batches) if isinstance(micro_batches, list | tuple) else micro_batches
    return Options(arguments.integer("micro_batches", count, at_least=2), *options).checked()


def calls_of(
    micro_batches: int | Sequence[tuple[PyTree, ...]], args: tuple[PyTree, ...]
) -> list[tuple[PyTree, ...]]:
    """Returns the arguments by position of a call with the whole batch, or of one with each micro-batch."""
    if not isinstance(micro_batches, list | tuple):
        return [args]
    if not all(isinstance(x, tuple) for x in micro_batches) or len({*map(len, micro_batches)}) != 1:
        raise ValueError(
            "micro_batches must be a number, or a list of tuples of one length, got "
            f"{trees.shown(micro_batches)}. Let each tuple hold the arguments of a micro-batch that have examples"
        )
    return [(*args, *x) for x in micro_batches]


def check_call(fun: Function, options: Options, batches: Batches, rtol: float | None) -> None:
    """Raises an AssertionError if micro-batches give another result than the whole batch. `fun` is the user's loss."""
    # 1.
    weights = _weights(options, batches)
    known = weights or [1.0] * options.micro_batches
    division = Division(batches.examples, shares_of(options.reduction, known))
    require_different_examples(batches, known)

    # 2.
    of_batch = jax.value_and_grad(batches.loss, batches.trained, has_aux=True)
    programs = lockstep.trace(of_batch, batches.each)
    if rtol is None:
        rtol = tolerance(jaxprs.dtypes_in(programs.jaxprs[0]))
    rtol = float(arguments.real("rtol", rtol, at_least=0))
    given, near = (results_at(batches, programs, division, x) for x in (lambda x: x, moved))
    if not given.is_finite():
        raise ValueError(
            f"loss and gradients of the whole batch must be finite, got a loss of {given.loss.whole}. Pass other "
            "parameters, or other examples"
        )
    runs = [given, near] if near.is_finite() else [given]

    # 3. A gradient of 0 at the given parameters may be one of rounding. Near them it has its size.
    wrong = [x for x in runs if not x.errors(division, rtol)[0] <= rtol]
    wrong += [] if wrong or runs[-1].fit(division, rtol) else runs[-1:]
    case = Case(fun, batches, runs, wrong, division, options.reduction, weights, rtol)
    if wrong:
        raise AssertionError(_message(case, programs))

    # 4.
    of_means = division._replace(shares=shares_of("mean", known))
    _check_aux(options.aux_reduction, case._replace(wrong=runs, division=of_means))


def _weights(options: Options, batches: Batches) -> list[float] | None:
    if options.weight_fn is None:
        return None
    weigh = batches.of(options.weight_fn)
    weights = [float(arguments.weight(weigh(*args), {()})) for args in batches.each[1:]]
    if not all(map(arguments.is_weight, weights)) or not any(weights):
        raise ValueError(
            f"weight_fn must return {arguments.RANGE_OF_WEIGHTS}, and not 0 for all micro-batches, got "
            f"{trees.shown(weights)}. Return the number of examples or tokens"
        )
    return weights


def _percent(error: float) -> str:
    return f"{float(f'{100 * error:.2g}'):g} %"


def _message(case: Case, programs: Programs) -> str:
    loss, grads = case.wrong[0].errors(case.division, case.rtol)
    worst = int(np.argmax(grads))  # a NaN is the largest
    why = option(case)
    if why is None and loss <= case.rtol:
        why = lines(case, programs, lambda tree: gradients_of(tree[1])[worst])
    return (
        f"{len(case.batches.examples)} micro-batches give another result than the whole batch: the gradients are "
        f"{_percent(grads[worst])} off, the loss {_percent(loss)}. {why or _lines_of_loss(case, 0)}"
    )


def _lines_of_loss(case: Case, at: int, remedy: str | None = None) -> str:
    """Returns the lines where a leaf of the pair of loss and aux parts."""
    programs = lockstep.trace(case.batches.loss, case.batches.each)
    return lines(case, programs, lambda tree: jax.tree.leaves(tree)[at], remedy)


def _check_aux(aux_reduction: PyTree, case: Case) -> None:
    first, *_ = each = [x.aux for x in case.runs]
    names = jax.tree.leaves(jax.tree.broadcast(aux_reduction, first))
    leaves = zip(jax.tree.leaves_with_path(first), *map(jax.tree.leaves, each), strict=True)
    for at, (name, ((path, _), *value)) in enumerate(zip(names, leaves, strict=True), 1):
        related = case.related(tuple(value))
        # In the order in which they are proposed. A micro-batch's own, "last" or "stack", is right.
        names_of = {"result": "mean", "sum": "sum", "max": "max", "min": "min", "rows": "examples"}
        fitting = [of for relation, of in names_of.items() if relation in related]
        if name not in (*fitting, "last", "stack"):
            remedy = (
                "Return what this line takes, such as sums (each 'sum' in aux_reduction=), and compute it after the "
                "call."
            )
            why = (
                f"Name it {fitting[0]!r} in aux_reduction=."
                if fitting
                else _lines_of_loss(case, at, remedy)
            )
            raise AssertionError(
                f"leaf {trees.leaf_name(path)} of the aux has another {name!r} in {len(case.batches.examples)} "
                f"micro-batches than in the whole batch. {why}"
            )
