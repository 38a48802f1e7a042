"""A loss whose value and derivatives are computed micro-batch by micro-batch, for programs that differentiate it.

`value_and_grad` computes gradients. This module makes them a rule of JAX (`jax.custom_jvp`): the tangent of the loss is
the sum of gradients times tangents. JAX transposes the rule, differentiates it again and maps it. `value_of_batch` is a
call:

1. Find its free arrays, by which there are derivatives, and its fixed ones (`_of_arrays`).
2. The value alone is that of the batch with no parameters, so that nothing runs backward.
3. JAX tells the rule which tangents are zeros, by their types. The parameters are the free leaves of all others.

The rule never sees the cotangent, such as a loss scale. One of `jax.custom_vjp` would, but it would run forward twice
(1.35 times the operations of `jax.value_and_grad`), and have no forward mode.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from shrewjax._base import arguments
from shrewjax._base.axes import is_bound, mapped_axes, replicated_axes, varying_axes
from shrewjax._base.trees import is_gradient
from shrewjax._base.types import AxisName, AxisNames, DType, Function, Leaf, PyTree
from shrewjax._batches._of_arrays import Arrays, OfArrays, call_of_arrays, perturbed_among
from shrewjax._batches.roles import label, roles_of
from shrewjax._batches.value_and_grad import Options, of_options, seen_by_check
from shrewjax._numerics.floats import sum_dtype, upcast
from shrewjax._numerics.reductions import combined_over, mean_over
from shrewjax._windows.window import NonfiniteOfBatch, Reduction

P = ParamSpec("P")
Result = TypeVar("Result")


def micro_batched(
    fun: Callable[P, Result],
    micro_batches: int,
    *,
    has_aux: bool = False,
    batch_argnums: int | str | Sequence[int | str] | None = None,
    weight_fn: Function | None = None,
    aux_reduction: PyTree = "mean",
    rng_argnums: int | str | Sequence[int | str] = (),
    reduction: Reduction = "mean",
    nonfinite: NonfiniteOfBatch = "propagate",
    accumulator_dtype: DType = None,
    sum_over: AxisName | None = None,
    skip_empty: bool = False,
) -> Callable[P, Result]:
    r"""Returns `fun` with a value and derivatives that are computed micro-batch by micro-batch.

    .. math:: \mathrm{d}\ell = \sum_\theta \Big( \frac{\sum_i w_i \, \partial \ell_i / \partial \theta}{\sum_i w_i}
        \cdot \mathrm{d}\theta \Big)

    Take it for programs that take a loss and differentiate it themselves: line searches, second-order methods,
    samplers, trainers. If you call `jax.value_and_grad` yourself, take `value_and_grad`, which can also carry state.

    The returned function has the signature of `fun`, and takes the whole batch. It has a value and derivatives of any
    order and mode: `jax.grad`, `jax.jvp`, `jax.linearize`, `jax.vmap` of them, products with the Hessian. Call it under
    `jax.jit`, because outside of it each call compiles the loop again.

    A first derivative takes the memory of `value_and_grad`, and computes gradients of those leaves alone that are
    differentiated. The value alone takes that of one micro-batch. A Hessian times a vector takes little if the outer
    derivative is forward, as `jax.jvp` of `jax.grad`. Reverse over reverse may take more memory than `fun` itself.

    =============================================  =============================================================
    you differentiate by                           result
    =============================================  =============================================================
    floating or complex arrays of other arguments  the derivative, with the conventions and dtypes of JAX
    an argument that holds examples                an error
    an array that the functions close over         the derivative, as by an argument; an error on an Explicit mesh and
                                                   inside `shard_map` with tracked types, each with `sum_over`
    =============================================  =============================================================

    ===============================================  ===========================================================
    condition                                        result
    ===============================================  ===========================================================
    the derivative of the aux is used                it is NaN; `has_aux=True` of JAX does not use it
    `fun` returns no scalar                          an error
    `jax.jvp`, with a `lax.while_loop` in `fun`      an error of JAX about reverse mode, in which gradients are computed
    `holomorphic=True` of `jax.grad`                 an error of JAX about the dtype, because the loss has to be real
    a product with the result, as a loss scale       the gradient is multiplied after it is computed, so float16
                                                     gradients underflow as without it; put the scale into `fun`
    a `clip_cotangent` in `fun`                      it sees the cotangents of `fun` alone, as without a product
    `weight_fn` depends on what is differentiated    an error, except with `reduction="sum"`; a mask does not
    a value with `nonfinite="drop_micro_batch"`      it runs the backward pass by all floating arrays of `fun`'s
                                                     arguments, so that value and derivatives drop the same; arrays
                                                     that `fun` closes over count in derivatives by them alone
    ===============================================  ===========================================================

    Args:
      fun: the loss function, which returns a scalar. Arguments are trees of anything. Arrays in them are operands, and
        all else, as an activation function, stays as it is.
      micro_batches: K, as in `value_and_grad`.
      has_aux: whether `fun` returns a pair.
      batch_argnums: the arguments that hold examples, as in `value_and_grad`. None: all by position, except the first
        and those of `rng_argnums`. If there are none, all by keyword, except these.
      weight_fn: as in `value_and_grad`.
      aux_reduction: as in `value_and_grad`.
      rng_argnums: as in `value_and_grad`.
      reduction: as in `value_and_grad`.
      nonfinite: as in `value_and_grad`.
      accumulator_dtype: as in `value_and_grad`.
      sum_over: as in `value_and_grad`, but not `()`, because there are no gradients to return. With `check_vma=False`
        and in `jax.pmap`, it names all mapped axes.
      skip_empty: as in `value_and_grad`. Under `jax.jit` reverse over reverse is then an error of JAX.

    Returns:
      A function with the arguments of `fun`, its name and its docstring. It returns the batch's value, or the pair
      `(value, aux)` with `has_aux`.

    Raises:
      ValueError: as in `value_and_grad`, or as above. A derivative raises when JAX traces it.

    Example:
      >>> import optax
      >>> def loss(params, x, y):
      ...     return jnp.mean((x @ params - y) ** 2)
      >>> params, x, y = jnp.zeros(2), jnp.eye(8, 2), jnp.arange(8.0)
      >>> of_batch = micro_batched(loss, micro_batches=4)
      >>> jax.jit(jax.value_and_grad(of_batch))(params, x, y)
      (Array(17.5, dtype=float32), Array([ 0.  , -0.25], dtype=float32))
      >>> jax.jit(lambda d: jax.jvp(lambda p: jax.grad(of_batch)(p, x, y), (params,), (d,))[1])(jnp.ones(2))
      Array([0.25, 0.25], dtype=float32)

    Source: as for `value_and_grad`, and `jax.custom_jvp`.
    """
    options = Options(**arguments.among(Options, locals())).checked()
    require_axes(options)
    roles = roles_of(fun, None, rng_argnums, batch_argnums)

    @functools.wraps(fun)
    def of_batch(*args: P.args, **kwargs: P.kwargs) -> Result:
        arguments.require_arguments_of_fun("weight_fn", weight_fn, args, kwargs)
        # Checked here, because below there is one more argument, which no caller passed.
        its_roles = roles.call(args, kwargs, options.micro_batches).keys_and_examples()
        return value_of_batch(fun, options, its_roles, args, kwargs)

    return of_batch


def require_axes(options: Options) -> None:
    """Raises if `sum_over` is (), which keeps gradients on each device."""
    if options.sum_over == ():
        raise ValueError(
            "sum_over must be a mapped axis or None, got (). Name the axes that divide the batch. Or call "
            "value_and_grad"
        )


def _require_all_axes(options: Options) -> None:
    """Raises if types are not tracked, and parameters may be sharded over a mapped axis, where a tangent is a part."""
    mapped, is_tracked = mapped_axes()
    others = tuple(a for a in mapped if a not in options.axes)
    if others and not is_tracked:
        raise ValueError(
            f"sum_over must name all mapped axes inside shard_map(check_vma=False) or pmap, got {options.sum_over!r}, "
            f"without {', '.join(map(repr, others))}. Name them if they divide the batch. Otherwise call value_and_grad"
        )


@seen_by_check
def value_of_batch(
    fun: Function,
    options: Options,
    roles: dict[str, Any],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
) -> PyTree:
    """Returns the value, or the pair `(value, aux)`, with a rule for its derivatives.

    `roles` are arguments of `value_and_grad`.
    """
    _require_all_axes(options)
    # 1. Its arrays.
    of_value = lambda call, arrays: _value_and_grad(call, arrays, [], [])[0]  # noqa: E731
    call = call_of_arrays(fun, options, roles, args, kwargs, of_value)
    # With this policy, a NaN in the gradient by any argument drops its micro-batch. So each call computes them all.
    # Otherwise the value and a derivative would drop others.
    is_read = options.nonfinite == "drop_micro_batch"
    read_for_dropping = [at for at in call.free if is_read and at < call.num_given]

    # 2. The value, for callers that do not differentiate.
    @jax.custom_jvp
    def value(free: list[jax.Array], fixed: list[jax.Array]) -> PyTree:
        arrays = call.by_number(free, fixed)
        return _value_and_grad(call, arrays, read_for_dropping, perturbed=[])[0]

    # 3. Its derivative, for those that do.
    def rule(primals: PyTree, tangents: PyTree) -> tuple[PyTree, PyTree]:
        perturbed = perturbed_among(call.by_number(*tangents))
        for at in perturbed:
            if at in call.fixed:
                raise ValueError(_no_derivative_by(call, at))
            if at >= call.num_given and replicated_axes(call.leaves[at], call.sum_over):
                raise ValueError(_CLOSED_OVER_IN_SHARD_MAP)
        param_numbers = [*dict.fromkeys([*read_for_dropping, *perturbed])]
        of_arrays = partial(
            _value_and_grad, call, param_numbers=param_numbers, perturbed=[*perturbed]
        )
        returned, grads = _in_one_piece(of_arrays, call.by_number(*primals), call.sum_over)
        return returned, _tangent(returned, grads, perturbed, has_aux=options.has_aux)

    value.defjvp(rule, symbolic_zeros=True)
    return value(*call.operands())


def _value_and_grad(
    call: OfArrays, arrays: Arrays, param_numbers: list[int], perturbed: list[int]
) -> tuple[PyTree, Arrays]:
    """Returns the results with these arrays as leaves, and the gradients by the parameters. All have numbers.

    `perturbed` are those parameters that a caller differentiates. The weight may depend smoothly on others, so with a
    weight these stay in their places, too, where it reads them.
    """
    weight_fn = call.options.weight_fn
    args, kwargs, closed_over = call.arguments(
        arrays, absent=perturbed if weight_fn else param_numbers
    )
    weigh = weight_fn and partial(call.with_params, weight_fn, perturbed, closed_over)
    run = of_options(
        partial(call.with_params, call.fun, param_numbers, closed_over),
        call.options._replace(weight_fn=weigh),
        argnums=len(args),
        **call.roles,
    )
    given = dict(enumerate(call.leaves)) | arrays
    returned, grads = run(*args, {at: given[at] for at in param_numbers}, **kwargs)
    return returned, grads


def _in_one_piece(function: Function, arrays: Arrays, sum_over: AxisNames) -> PyTree:
    """Returns `function(arrays)`, whose loops stay as they are where JAX linearizes a rule that calls it.

    Otherwise JAX computes before a loop all that is the same in each turn, and holds it
    (tests/batches/test_micro_batched.py, "loop_of_value_and_grad").
    """
    in_one_piece = jax.custom_jvp(function)

    def rule(primals: PyTree, tangents: PyTree) -> tuple[PyTree, PyTree]:
        perturbed = perturbed_among(tangents[0])
        params = {at: primals[0][at] for at in perturbed}

        def of_replicated(params: Arrays) -> PyTree:
            # Types that are not tracked have a psum as the transpose of a psum, so JAX leaves each device its own part
            # of a second derivative, D times too large. The transpose of this mean averages them
            # (tests/devices/test_sum_over.py, "untracked").
            if all(map(is_bound, sum_over)) and not mapped_axes()[1]:
                params = mean_over(params, sum_over)
            return function(primals[0] | params)

        return jax.jvp(of_replicated, (params,), (perturbed,))

    in_one_piece.defjvp(rule, symbolic_zeros=True)
    return in_one_piece(arrays)


def _tangent(
    returned: PyTree, grads: dict[int, jax.Array], tangents: dict[int, jax.Array], *, has_aux: bool
) -> PyTree:
    """Returns the tangent of the results: of the loss, the sum of gradients times tangents, and of the aux, NaN."""
    value = returned[0] if has_aux else returned

    def product(grad: jax.Array, tangent: jax.Array) -> jax.Array:
        # The product is wide, so that a large cotangent times a gradient of 0 is 0 in float16, too. It is no `vdot`,
        # because JAX's gradients by complex numbers are conjugates already.
        wide = sum_dtype(grad, value)
        products = upcast(grad, wide) * upcast(tangent, wide)
        # Devices hold parts of a parameter along an axis over which it varies, and the value does not.
        along = tuple(varying_axes(products) - varying_axes(value))
        (total,) = combined_over(along, ["sum"], [jnp.sum(products.real)])
        return total.astype(value.dtype)

    terms = [product(grads[at], t) for at, t in tangents.items()]
    of_value = functools.reduce(operator.add, terms, jnp.zeros_like(value))

    def of_aux(x: jax.Array) -> Leaf:
        if not is_gradient(x):
            return np.zeros(x.shape, jax.dtypes.float0)
        return jnp.full_like(x, jnp.nan) * of_value.astype(x.dtype)

    return (of_value, jax.tree.map(of_aux, returned[1])) if has_aux else of_value


_CLOSED_OVER_IN_SHARD_MAP = (
    "fun must not close over an array that is differentiated, inside shard_map with sum_over= and tracked types. Pass "
    "the array as an argument of fun, and leave it out of batch_argnums="
)


def _no_derivative_by(call: OfArrays, at: int) -> str:
    path = call.paths[at]
    return (
        f"{label(call.place(at))}{jax.tree_util.keystr(path[2:])} is differentiated, but micro_batched has no "
        "derivative by examples, keys or a carry. Pass jax.lax.stop_gradient of it. Or, if it holds none, name the "
        "others in batch_argnums="
    )
