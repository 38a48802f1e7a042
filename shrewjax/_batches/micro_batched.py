"""The same function of a whole batch, in the memory of a micro-batch: `micro_batched`, and `value_and_grad` of it.

1. Trace the function of the whole batch, with the arrays that it closes over as arguments (`TracedCall`).
2. Divide it, for the arguments that a caller differentiates (`divided`).
3. Give JAX a rule. The tangent of a scalar is its gradient times the tangents (`jax.custom_jvp`), so there is a forward
   mode, and one pass does. Other results have cotangents of their own, so they have a reverse mode
   (`jax.custom_vjp`).
"""

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from contextvars import ContextVar
from typing import Any, Never, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from shrewjax._base import arguments
from shrewjax._base.axes import as_varying, mapped_axes, varying_axes
from shrewjax._base.mesh import devices_to_map, is_tracing
from shrewjax._base.trees import is_gradient, is_zero_tangent, replaced
from shrewjax._base.types import AxisName, DType, Function, Leaf, PyTree
from shrewjax._batches.derivatives import Run, run_by_rules, summed_like, zeros_of
from shrewjax._batches.divided import Divided, Setting
from shrewjax._batches.roles import Roles, check_parameter, is_array, is_operand, roles_of
from shrewjax._numerics.floats import sum_dtype, upcast
from shrewjax._programs import jaxprs

P = ParamSpec("P")
Result = TypeVar("Result")


def micro_batched(
    fun: Callable[P, Result],
    micro_batches: int,
    *,
    has_aux: bool = False,
    batch_argnums: int | str | Sequence[int | str] | None = None,
    accumulator_dtype: DType = None,
    sum_over: AxisName | None = None,
    **others: Never,
) -> Callable[P, Result]:
    r"""Returns the same function, whose derivative takes the memory of a micro-batch, as `jax.checkpoint` takes less.

    .. math:: f(\theta, x) = h\Big(\sum_i s(\theta, x_i), \; r(\theta, x_1), \dots, r(\theta, x_K)\Big)

    Arguments, results and derivatives are those of `fun` on the whole batch, up to rounding: any loss, aux and dropout,
    for trainers, line searches and samplers. Call it under `jax.jit`, because outside of it each call compiles again.

    `fun` is traced once, and its program divided. Sums s and rows r of a micro-batch's examples are computed in a loop,
    and what follows, h, for the whole batch. If the gradient by sums and rows depends on them, as in a contrastive
    loss, the loop runs twice, forward only the first time. `print_micro_batches` prints the three parts.

    Micro-batch i of K has the examples i, i + K, i + 2 K, and so on. The first ones have one more if K does not divide
    their number. Arrays with another number of examples are divided for themselves.

    ==============================================  ================================================================
    in `fun`                                        result
    ==============================================  ================================================================
    examples mix before weights act on them         an error that names the line, if less than half could be divided;
                                                    for batch norm in training, `accumulated_value_and_grad` takes
                                                    statistics of micro-batches
    `jax.random`                                    the whole batch's own draws; with another generator than threefry
                                                    other draws, from `fold_in(key, i)`
    a kernel, such as one of pallas                 put `of_each_example` around it
    `jax.debug.print` of rows of the model          it prints for each micro-batch
    ordered effects, `io_callback`, `jax.new_ref`   an error
    a scalar result, with or without aux            forward and reverse mode of any order; the aux has no derivative
    any other result                                reverse mode
    ==============================================  ================================================================

    Args:
      fun: any function of trees of arrays, numbers and objects.
      micro_batches: K, an int >= 1. At most as many as there are examples are made.
      has_aux: whether `fun` returns a pair `(loss, aux)`, as for `jax.value_and_grad`.
      batch_argnums: the arguments whose arrays have examples along their first axis: positions, or names of parameters
        and keywords. None: all by position except the first. If there are none, all by keyword. Results do not depend
        on it. Gradients by examples come back as rows.
      accumulator_dtype: dtype of the gradients' sum, as in `accumulate`. Gradients have the dtypes of JAX.
      sum_over: axes of the mesh of `jax.set_mesh` that divide the batch. Each device then runs its own examples, and
        gradients cross the network once, after the loop.

    Returns:
      A function with the arguments, results, name and docstring of `fun`.

    Raises:
      ValueError: an argument is not as described; `fun` does what the table calls an error.

    Example:
      >>> def loss(params, x, y, mask):
      ...     return jnp.sum((x @ params - y) ** 2 * mask) / jnp.sum(mask)
      >>> params, x, y = jnp.zeros(2), jnp.eye(8, 2), jnp.arange(8.0)
      >>> of_batch = micro_batched(loss, micro_batches=4)
      >>> jax.jit(jax.value_and_grad(of_batch))(params, x, y, y < 2)
      (Array(0.5, dtype=float32), Array([ 0., -1.], dtype=float32))

    Source: for losses of rows, Gao, Zhang, Han and Callan, "Scaling Deep Contrastive Learning Batch Size under Memory
    Limited Setup" (GradCache), 2021, https://arxiv.org/abs/2101.06983.
    """
    division = Division(micro_batches, has_aux, accumulator_dtype, sum_over, others)
    roles = roles_of(fun, None, (), batch_argnums)
    return _with_checks(roles, functools.partial(division.call, roles))


def value_and_grad(
    fun: Callable[P, Any],
    micro_batches: int,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    batch_argnums: int | str | Sequence[int | str] | None = None,
    accumulator_dtype: DType = None,
    sum_over: AxisName | None = None,
    **others: Never,
) -> Callable[P, tuple[PyTree, PyTree]]:
    r"""Returns `jax.value_and_grad` of `fun`, in the memory of a micro-batch.

    .. math:: \big(f(\theta, x), \; \nabla_\theta f(\theta, x)\big)

    The loss is that of the whole batch, as it stands: a masked mean, a sum, pairs of examples, dropout. Values, aux and
    gradients are those of JAX up to rounding. It is `jax.value_and_grad(micro_batched(fun, micro_batches))`, and
    `micro_batched` says how it works and what is refused. Call it under `jax.jit`.

    Args:
      fun: the loss function, as for `jax.value_and_grad`.
      micro_batches: K, an int >= 1, into which the examples are divided.
      argnums: as in `jax.value_and_grad`.
      has_aux: as in `jax.value_and_grad`.
      batch_argnums: the arguments with examples, as in `micro_batched`. None: all by position except those of
        `argnums`. If there are none, all by keyword.
      accumulator_dtype: as in `micro_batched`.
      sum_over: as in `micro_batched`.

    Returns:
      A function of `fun`'s arguments: `(value, grads)`, or `((value, aux), grads)` with `has_aux`.

    Raises:
      ValueError: as in `micro_batched`.

    Example:
      >>> def loss(params, x, y):
      ...     return jnp.mean((x @ params - y) ** 2)
      >>> params, x, y = jnp.zeros(2), jnp.ones((8, 2)), jnp.arange(8.0)
      >>> jax.jit(value_and_grad(loss, micro_batches=4))(params, x, y)
      (Array(17.5, dtype=float32), Array([-7., -7.], dtype=float32))

    Source: `jax.value_and_grad`.
    """
    division = Division(micro_batches, has_aux, accumulator_dtype, sum_over, others)
    positions = arguments.positions("argnums", argnums)
    reserved = {"argnums": positions} if batch_argnums is None else {}
    roles = roles_of(fun, reserved, (), batch_argnums)
    divided = functools.partial(division.call, roles)
    return _with_checks(roles, jax.value_and_grad(divided, argnums, has_aux), positions)


def print_micro_batches(
    fun: Function,
    micro_batches: int,
    *args: PyTree,
    has_aux: bool = False,
    batch_argnums: int | str | Sequence[int | str] | None = None,
    **kwargs: PyTree,
) -> None:
    r"""Prints how `micro_batched` divides a function.

    .. math:: f = h \circ \mathrm{loop} \circ \mathrm{data}

    The function is traced, and not run. *before* is data of the whole batch, such as the size of a mask. *loop* is what
    a micro-batch computes, with the share of all bytes that `fun` computes. *kept* are its sums and rows, for the whole
    batch. *after* is computed from these. Gradients are those by the first argument.

    Args:
      fun: as in `micro_batched`.
      micro_batches: as in `micro_batched`.
      *args: the arguments of `fun`. Types of arrays, such as `jax.ShapeDtypeStruct`, will do.
      has_aux: as in `micro_batched`.
      batch_argnums: as in `micro_batched`.
      **kwargs: as `args`.

    Returns:
      None.

    Raises:
      ValueError: as in `micro_batched`.

    Example:
      >>> def loss(params, x, mask):
      ...     return jnp.sum((x @ params) ** 2 * mask) / jnp.sum(mask)
      >>> print_micro_batches(loss, 4, jnp.ones(2), jnp.ones((8, 2)), jnp.ones(8))  # doctest: +SKIP

    Source: `jax.ad_checkpoint.print_saved_residuals`.
    """
    division = Division(micro_batches, has_aux)
    roles = roles_of(fun, None, (), batch_argnums)

    leaves, structure = jax.tree.flatten((args, kwargs))
    has_type = lambda x: hasattr(x, "shape") and hasattr(x, "dtype")  # noqa: E731
    places = [i for i, x in enumerate(leaves) if has_type(x)]
    count = len(jax.tree.leaves(args[:1]))
    is_first = [i < count for i in places]

    def traced(arrays: list[Leaf]) -> None:
        of_call = jax.tree.unflatten(structure, replaced(leaves, places, arrays))
        call = TracedCall(division, roles.fun, roles.examples(*of_call), *of_call)
        print(call.described(is_first))

    jax.eval_shape(traced, [leaves[i] for i in places])


class Division:
    """How a function is divided: the arguments of `micro_batched`, without those about roles.

    `others` are arguments that it does not take, such as those of `accumulated_value_and_grad`.
    """

    def __init__(
        self,
        micro_batches: int,
        has_aux: bool,
        accumulator_dtype: DType = None,
        sum_over: AxisName | None = None,
        others: Collection[str] = (),
    ) -> None:
        if others:
            raise TypeError(
                f"value_and_grad and micro_batched take no {', '.join(others)}. Leave it out. Or call "
                "accumulated_value_and_grad, in which micro-batches have their own losses"
            )
        self.micro_batches = arguments.integer("micro_batches", micro_batches, at_least=1)
        self.has_aux, self.accumulator_dtype = has_aux, accumulator_dtype
        self.axes = arguments.axis_names("sum_over", sum_over) or ()

    def call(self, roles: Roles, /, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Returns what `roles.fun` returns, with its derivatives."""
        counts = roles.examples(args, kwargs)
        setting = self.setting(counts.values())
        # Without jit, users look at numbers in the function, which a traced one does not show. Of functions that are
        # inside of each other, the outermost one is divided.
        is_whole = setting.micro_batches * setting.devices == 1
        if is_whole or jaxprs.is_jit_disabled() or _is_dividing.get():
            return roles.fun(*args, **kwargs)
        return TracedCall(self, roles.fun, counts, args, kwargs).results()

    def setting(self, counts: Collection[int]) -> Setting:
        """Returns how sets of these sizes are divided. One that is smaller than the number of micro-batches is not."""
        devices = devices_to_map("sum_over", self.axes)
        if self.axes and not devices:
            raise ValueError(
                f"sum_over must not name mapped axes, got {self.axes!r}. Leave it out, and let fun reduce, "
                "as by jax.lax.pmean"
            )
        if uneven := [n for n in counts if devices and n % devices]:
            raise ValueError(
                f"sum_over={self.axes!r} needs a number of examples that its {devices} devices divide, got "
                f"{uneven[0]}. Pad the batch, and mask the padding"
            )
        parts = max(devices, 1)
        micro_batches = self.micro_batches
        symbols = [n for n in counts if not isinstance(n, int)]  # of jax.export
        if open_ := [n for n in symbols if n % (micro_batches * parts)]:
            raise ValueError(
                f"micro_batches={micro_batches} must divide a symbolic number of examples, got {open_[0]}. Export it "
                f"for jax.export.symbolic_shape('{micro_batches * parts}*b')"
            )
        if not symbols:  # no more micro-batches than the largest set has examples
            micro_batches = max(min(micro_batches, max(counts) // parts), 1)
        sets = [n for n in dict.fromkeys(counts) if n >= micro_batches * parts]
        dtype, axes = self.accumulator_dtype, self.axes
        return Setting(micro_batches, tuple(sets), dtype, axes, parts)


def _with_checks(roles: Roles, run: Function, argnums: Sequence[int] = ()) -> Function:
    """Returns `run` with the name of `roles.fun`. Raises for NNX objects, and for parameters that are not floating.

    `argnums` are the positions of the parameters.
    """

    @functools.wraps(roles.fun)
    def of_batch(*args: PyTree, **kwargs: PyTree) -> Any:
        roles.require_no_flax_state(args, kwargs)
        for at in argnums:  # `or None`: the slice that begins at -1 has no end
            for path, x in jax.tree.leaves_with_path(args[at : at + 1 or None]):
                its_name = f"argument {at % len(args)}{jax.tree_util.keystr(path[1:])}"
                check_parameter(its_name, x)
        return run(*args, **kwargs)

    return of_batch


_is_dividing: ContextVar[bool] = ContextVar("_is_dividing", default=False)


class TracedCall:
    """A call: its program, as a function of its arrays and of those that `fun` closes over.

    `call` has the arguments by position and those by keyword. `counts` has the number of examples of each leaf of it
    that holds some, by the leaf's number.
    """

    def __init__(
        self, division: Division, fun: Function, counts: dict[int, int], *call: PyTree
    ) -> None:
        self._fun, self._has_aux = fun, division.has_aux
        self._setting = division.setting(counts.values())
        self._divided: dict[tuple[bool, ...], Divided] = {}
        # 1. Arrays are operands. All else is known, as a number or a function.
        leaves, structure = jax.tree.flatten(call)
        places = [i for i, x in enumerate(leaves) if is_operand(x)]

        def as_before(values: list[Leaf]) -> Any:
            return jax.tree.unflatten(structure, replaced(leaves, places, values))

        # 2. Trace the function of these arrays.
        given = [leaves[i] for i in places]
        traced = self._traced(as_before, given)
        # 3. In shard_map, a loss may vary over axes over which an argument does not. Such arguments are cast. Each
        # device then has gradients of its own, and JAX sums them outside of the rule.
        of_loss = [varying_axes(x) for x in traced.out_avals[:1]]
        if of_loss and any(of_loss[0] - varying_axes(x) for x in given):
            given = [as_varying(x, tuple(of_loss[0])) for x in given]
            traced = self._traced(as_before, given)
        # 4. Operands are the arrays that it closes over, and those given.
        self._program, closed_over = jaxprs.with_arrays_as_arguments(traced)
        if effects := jaxprs.other_effects(self._program):
            raise ValueError(
                f"fun must only compute, and print in any order, got {', '.join(effects)}. Return what it writes or "
                "sends, or pass ordered=False to jax.debug"
            )
        self._operands = [*closed_over, *given]
        counted = [*[None] * len(closed_over), *map(counts.get, places)]
        self._are_rows = [n in self._setting.sets for n in counted]

    def _traced(self, arguments_of: Function, given: list[Leaf]) -> Any:
        """Returns the program of `fun` of arrays. Keeps what else `fun` returns, which is known when it has run."""

        def of_arrays(values: list[Leaf]) -> list[Leaf]:
            args, kwargs = arguments_of(values)
            token = _is_dividing.set(True)
            try:
                returned = self._fun(*args, **kwargs)
            finally:
                _is_dividing.reset(token)
            made, self._structure = jax.tree.flatten(returned)
            self._known = [None if is_array(x) else x for x in made]
            # The loss is one leaf, and comes before all of the aux. `_has_scalar_rule` looks at its type.
            has_aux = self._has_aux and isinstance(returned, tuple | list)
            is_first = has_aux and made and returned[0] is made[0]
            self._loss_is_first = is_first or len(made) == 1
            return [jnp.asarray(x) for x in made if is_array(x)]

        return jaxprs.traced(of_arrays, given)

    def results(self) -> PyTree:
        made = iter(self._of_scalar() if self._has_scalar_rule() else self._of_any())
        leaves = [next(made) if x is None else x for x in self._known]
        return jax.tree.unflatten(self._structure, leaves)

    def described(self, is_first: list[bool]) -> str:
        """Returns how the call is divided for derivatives by those of the arrays in its arguments."""
        closed_over = len(self._operands) - len(is_first)
        are_wanted = [*[False] * closed_over, *is_first]
        pairs = zip(are_wanted, self._program.in_avals, strict=True)
        are_free = [is_wanted and is_gradient(x) for is_wanted, x in pairs]
        run = self._on(self._operands, are_free)
        if self._has_scalar_rule():
            run.value_and_grad()
        return run.described()

    def _has_scalar_rule(self) -> bool:
        """Returns whether the first result is a floating scalar, whose gradient is known without its cotangent."""
        if not self._loss_is_first or not self._program.out_avals:
            return False
        loss = self._program.out_avals[0]
        if loss.shape != () or not is_gradient(loss):
            return False
        # Without types, psum's transpose sums the cotangents of all devices. The rule takes each for 1, but those of
        # other devices may differ.
        mapped, is_tracked = mapped_axes()
        if mapped and not is_tracked and jaxprs.has_collective(self._program):
            return False
        # `__init__` casts the given arrays in its step 3. Arrays that `fun` closes over are not cast, and their
        # gradient would be a sum over devices.
        arrays = filter(is_gradient, self._program.in_avals)
        return not any(varying_axes(loss) - varying_axes(x) for x in arrays)

    def _on(self, operands: Sequence[Leaf], are_free: Sequence[bool]) -> Run:
        free = tuple(are_free)
        if free not in self._divided:
            flags = [*zip(self._are_rows, are_free, strict=True)]
            parts = self._fun, self._program, self._setting, flags
            self._divided[free] = Divided(*parts)
        return Run(self._divided[free], operands)

    def _value(self, operands: list[Leaf]) -> list[Leaf]:
        """Returns the results, for callers that do not differentiate.

        Parameters count as free here, too. Otherwise all would be data, and nothing would run in the loop.
        """
        pairs = zip(self._program.in_avals, self._are_rows, strict=True)
        are_free = [is_gradient(x) and not is_row for x, is_row in pairs]
        return self._on(operands, are_free).value()[0]

    def _of_scalar(self) -> list[Leaf]:
        """Returns the results. If JAX differentiates them, value and gradients are computed together."""

        def with_gradients(are_free: list[bool], operands: list[Leaf]) -> Any:
            def run(values: list[Leaf]) -> Any:
                return self._on(values, are_free).value_and_grad()

            # Outside of `jax.jit`, one program, which knows the mesh of its operands.
            return (run if is_tracing() else jax.jit(run))(operands)

        # Primals and tangents hold one list each, that of the operands.
        def rule(primals: PyTree, tangents: PyTree) -> tuple[list[Leaf], list[Leaf]]:
            are_free = [not is_zero_tangent(t) for t in tangents[0]]
            by_free = functools.partial(with_gradients, are_free)
            results, grads = _in_one_piece(by_free, *primals)
            of_free = itertools.compress(tangents[0], are_free)
            return results, _tangents(results, grads, of_free)

        value = jax.custom_jvp(self._value)
        value.defjvp(rule, symbolic_zeros=True)
        return value(self._operands)

    def _of_any(self) -> list[Leaf]:
        """Returns the results. If JAX differentiates them, the gradients are computed when it has the cotangents."""

        def forward(given: list[Any]) -> Any:
            operands = [x.value for x in given]
            pairs = zip(given, map(jax.typeof, operands), strict=True)
            are_free = tuple(x.perturbed and is_gradient(kind) for x, kind in pairs)
            results, frontier = self._on(operands, are_free).value(run_by_rules)
            return results, (operands, frontier, are_free)

        def backward(saved: Any, cotangents: list[Leaf]) -> tuple[list[Leaf | None]]:
            operands, frontier, are_free = saved
            of_results = [*map(_instantiated, cotangents)]
            grads = iter(self._on(operands, are_free).cotangents(frontier, of_results))
            return ([next(grads) if is_free else None for is_free in are_free],)

        value = jax.custom_vjp(self._value)
        value.defvjp(forward, backward, symbolic_zeros=True)
        return value(self._operands)


def _in_one_piece(function: Function, operands: list[Leaf]) -> PyTree:
    """Returns `function(operands)` as one operation for JAX.

    JAX linearizes a rule. It would then compute before the loop over micro-batches, and hold, all that turns share,
    such as a cast of the weights (tests/batches/test_micro_batched.py, "loop_of_value_and_grad"). The rule below runs
    only for a second derivative.
    """
    in_one_piece = jax.custom_jvp(function)

    def rule(primals: PyTree, tangents: PyTree) -> tuple[PyTree, PyTree]:
        (values,), (its_tangents,) = primals, tangents
        perturbed = [i for i, t in enumerate(its_tangents) if not is_zero_tangent(t)]

        def of_perturbed(some: list[Leaf]) -> PyTree:
            return function(replaced(values, perturbed, some))

        # Wide operands, so that a loop adds up second derivatives without rounding each micro-batch's to 16 bits.
        wide = lambda x: upcast(x, sum_dtype(x))  # noqa: E731
        pick = lambda leaves: [wide(leaves[i]) for i in perturbed]  # noqa: E731
        return jax.jvp(of_perturbed, (pick(values),), (pick(its_tangents),))

    in_one_piece.defjvp(rule, symbolic_zeros=True)
    return in_one_piece(operands)


def _tangents(results: PyTree, grads: PyTree, tangents: Iterable[Leaf]) -> list[Leaf]:
    """Returns the tangents of the results: of the loss, the sum of gradients times tangents, and of the aux, NaN."""
    value, *aux = results

    def product(grad: Leaf, tangent: Leaf) -> Leaf:
        # The product is wide, or the transpose casts a loss's large cotangent to float16, where it is infinite, and a
        # gradient of 0 becomes NaN. It is no `vdot`: JAX's gradients by complex numbers are conjugates already.
        wide = sum_dtype(grad, value)
        products = upcast(grad, wide) * upcast(tangent, wide)
        # Devices hold parts of a parameter along an axis over which it varies, and the value does not.
        return summed_like(jnp.sum(products.real), value).astype(value.dtype)

    terms = map(product, grads, tangents)
    of_value = functools.reduce(operator.add, terms, jnp.zeros_like(value))

    def of_aux(x: Leaf) -> Leaf:
        if not is_gradient(x):
            return np.zeros(x.shape, jax.dtypes.float0)
        # A product, because a rule must be linear in the tangents.
        return jnp.full_like(x, jnp.nan) * of_value.astype(x.dtype)

    return [of_value, *map(of_aux, aux)]


def _instantiated(cotangent: Leaf) -> Leaf:
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    if cotangent.dtype == jax.dtypes.float0:
        return np.zeros(cotangent.shape, cotangent.dtype)
    return zeros_of(cotangent.aval)
