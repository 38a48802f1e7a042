"""The check that micro-batches give what the whole batch gives, of each divided call in a function.

`check_micro_batches` runs the function without jit, so that a divided call in a jitted step has arrays. Each divided
call compares itself, and then runs as it is. `_check_call` compares its whole batch with its micro-batches:

1. Run both near the given parameters, because the zeros of a new layer hide mistakes, or else at them.
2. Compare results. Compiled programs are the fastest. If they differ, run equation by equation, until a line is known.
"""

from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shrewjax._base import arguments
from shrewjax._base.mesh import is_traced
from shrewjax._base.types import Function, Leaf, PyTree
from shrewjax._batches.value_and_grad import CHECK, Options
from shrewjax._checking.causes import Case
from shrewjax._checking.results import Batches, batches_of, nearby
from shrewjax._numerics.relations import Division, tolerance
from shrewjax._programs import jaxprs, lockstep


def check_micro_batches(
    fun: Function, /, *args: PyTree, rtol: float | None = None, **kwargs: PyTree
) -> float:
    r"""Raises if micro-batches in `fun` give another result or other gradients than the whole batch.

    .. math:: \sum_i w_i \ell_i \Big/ \sum_i w_i = \ell, \qquad \sum_i w_i g_i \Big/ \sum_i w_i = g

    It calls `fun(*args, **kwargs)` once. Each call of `value_and_grad`, `micro_batched` and `micro_batch_map` in it, or
    of these in `shrewjax.flax`, checks itself, with the arguments and options that it has there. Call it in a test,
    with a small batch in which masks differ from example to example. If results differ, the error names the lines where
    micro-batches part from the whole batch, and the expressions to compute by `micro_batch_map`.

    It moves parameters by a tenth of their size, because the zeros of a new layer hide mistakes. It takes them as given
    if results there are not finite, or if a loop may not end. Each micro-batch draws the random numbers that the whole
    batch draws for its examples. All micro-batches start with the same carry.

    ============================================  ==================================================================
    it does not see                               because
    ============================================  ==================================================================
    a loss that is divided by K in `fun`          the whole batch's is, too
    a term below `rtol` of loss and gradient      it is rounding
    a branch that does not run; a carry's use     it compares what runs, and micro-batches share the carry
    counts that are equal in each micro-batch     a mean over them is right there
    ============================================  ==================================================================

    Args:
      fun: a function that makes such a call outside of `grad`, `vmap`, `checkpoint` and `shard_map`: a loss, what
        `value_and_grad` returned, a step, jitted or not.
      *args: its arguments.
      rtol: the largest error of the loss, and of each leaf of the gradients. None: 2.4e-5 in float32, 4e-11 in float64,
        1% in float16 and 4% in bfloat16, by the coarsest dtype in the divided function.
      **kwargs: its arguments by keyword.

    Returns:
      The largest relative error.

    Raises:
      AssertionError: micro-batches give another result, other gradients or another aux than the whole batch.
      ValueError: `fun` makes no such call, or one with traced arrays or one micro-batch; a result of the whole batch is
        not finite; random numbers of micro-batches are no rows of the whole batch's.

    Example:
      >>> def loss(w, x, mask):
      ...     return jnp.sum(mask * (x @ w - 1) ** 2) / jnp.sum(mask)
      >>> w, x, mask = jnp.ones(2), jnp.arange(16.0).reshape(8, 2), jnp.arange(8) % 3 > 0
      >>> count = lambda w, x, mask: jnp.sum(mask)
      >>> error = check_micro_batches(value_and_grad(loss, 2, weight_fn=count), w, x, mask)
      >>> error < 1e-5
      True

    Source: the results of `value_and_grad`, by linearity of the gradient.
    """
    if rtol is not None:
        rtol = float(arguments.real("rtol", rtol, at_least=0))
    errors: list[float] = []

    def check(run: Callable[[], Any], its_fun: Function, options: Options, *given: Any) -> Any:
        CHECK.set(None)  # a divided call inside is a part of this one
        try:
            with jax.disable_jit(False):
                _require_comparable(options, given)
                jax.eval_shape(run)  # raises the call's own errors
                batches = batches_of(its_fun, options, *given)
                errors.append(_check_call(batches, options, rtol))
                return run()
        finally:
            CHECK.set(check)

    def run_fun() -> None:
        CHECK.set(check)
        with jax.disable_jit(), jax.transfer_guard("allow"):
            fun(
                *map(_as_jax_arrays, args),
                **{name: _as_jax_arrays(x) for name, x in kwargs.items()},
            )

    copy_context().run(run_fun)
    if not errors:
        raise ValueError(
            "fun must call micro_batch_map, value_and_grad or micro_batched. Pass what these return, or a function "
            "that calls them"
        )
    return max(errors)


def _as_jax_arrays(tree: PyTree) -> PyTree:
    """Returns arrays of JAX, as under jit. A traced number is no index of a NumPy array. Others stay themselves."""
    if not any(isinstance(x, np.ndarray) for x in jax.tree.leaves(tree)):
        return tree
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, tree)


def _require_comparable(options: Options, arrays: PyTree) -> None:
    if is_traced(arrays):
        raise ValueError(
            "check_micro_batches needs arrays, got tracers of grad, vmap, checkpoint, shard_map or an outer jit. "
            "Check the loss itself, outside of these"
        )
    if options.micro_batches < 2:
        raise ValueError("a divided call must have micro_batches >= 2, got 1. Pass 2 or more")


def _check_call(batches: Batches, options: Options, rtol: float | None) -> float:
    """Returns the largest error of a call. Raises an AssertionError if micro-batches give another result."""
    function = jax.value_and_grad(batches.loss, has_aux=True)
    program = jax.jit(function).trace(*batches.each[0]).jaxpr
    rtol = tolerance(jaxprs.dtypes_in(program)) if rtol is None else rtol
    near = [(jax.tree.map(nearby, params), others) for params, others in batches.each]
    # A loop that ends at the given parameters may run forever near them.
    tries = [batches.each] if jaxprs.may_run_forever(program) else [near, batches.each]
    # JAX's own checks stop at what this one looks for, such as a NaN.
    with jax.debug_nans(False), jax.debug_infs(False):
        for each in tries:
            error = _error_at(batches._replace(each=each), function, options, rtol)
            if error is not None:
                return error
    raise ValueError(
        "the whole batch must give finite results and gradients. Pass other parameters or examples"
    )


def _error_at(batches: Batches, function: Function, options: Options, rtol: float) -> float | None:
    """Returns the largest error at these parameters, None if a result is not finite. Raises above `rtol`."""
    weights, has_keys = _weights(batches, options), batches.has_keys()
    for (loss, aux), grads in _runs(function, batches):
        case = Case(batches, options, weights, rtol, loss, aux, grads)
        if not case.is_finite():
            return None
        why: Any = case.why()
        if why is None:
            return max(case.errors())
        if why.is_told() and not has_keys:  # the next run would tell no more
            break
    # Other programs, and loops that stay closed, may draw other numbers in micro-batches. That is no mistake of fun.
    may_draw = has_keys and not (loss.is_alike and why.is_told())
    raise (ValueError if may_draw else AssertionError)(why.text)


def _weights(batches: Batches, options: Options) -> list[float]:
    if options.weight_fn is None:
        return [1.0] * (len(batches.each) - 1)
    given = (batches.of(options.weight_fn, *point) for point in batches.each[1:])
    weights = [float(arguments.weight(x, {()})) for x in given]
    if not any(weights):
        raise ValueError(
            "weight_fn must not return 0 for all micro-batches. Return the number of examples"
        )
    return weights


def _runs(function: Function, batches: Batches) -> Iterator[PyTree]:
    """Yields the results of one run after another. They are right if those of one run agree.

    The first run is fast, and the next may tell enough. Random numbers are shared where loops are unrolled. There are
    two ways to find rows in them, examples first in a merged axis, or last.
    """
    num_ways = [1]  # for each draw

    def run(way: int, *, is_unrolled: bool = True) -> PyTree:
        def rows(whole: Leaf, parts: Sequence[Leaf]) -> Sequence[Leaf]:
            found = [*Division(batches.num_examples, np.ones(0)).rows(whole, parts)]
            num_ways.append(len(found))
            return found[way] if found else parts

        return lockstep.run(function, batches.each, batches.names(), rows, is_unrolled=is_unrolled)

    if not batches.has_keys():
        yield lockstep.compiled(function, batches.each)
        yield run(0, is_unrolled=False)
        yield run(0)
        return
    yield (results := run(-1))
    if max(num_ways) > 1:
        yield (results := run(0))
    if not results[0][0].is_alike:  # loops over examples differ if they are unrolled
        yield run(0, is_unrolled=False)
