r"""Flax's optimizer, train state and `value_and_grad`, for windows of micro-batches.

Flax is no dependency of the package, and `import shrewjax` does not import it. The first use of `shrewjax.flax` does. A
type checker wants `import shrewjax.flax`. The arithmetic is that of `shrewjax.apply_gradients` and
`shrewjax.value_and_grad`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Never, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shrewjax._base import arguments, trees
from shrewjax._base.states import metrics, with_own_buffers
from shrewjax._base.types import (
    Argument,
    AxisName,
    DType,
    Function,
    KeyPath,
    Leaf,
    Metrics,
    Number,
    Place,
    PyTree,
)
from shrewjax._batches import accumulated
from shrewjax._batches.micro_batched import Division
from shrewjax._batches.roles import Roles, positional_names, roles_of
from shrewjax._programs.forwarding import returned_as_given
from shrewjax._windows.accumulate import apply_gradients
from shrewjax._windows.window import NonfiniteOfBatch, Reduction

try:
    from flax import nnx
    from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
    from flax.training import train_state
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError("shrewjax.flax needs Flax. Run: python -m pip install flax") from error

__all__ = [
    "Optimizer",
    "TrainState",
    "accumulated_value_and_grad",
    "micro_batched",
    "value_and_grad",
]


class Optimizer(nnx.Optimizer[Any]):
    r"""An `nnx.Optimizer` whose `update` costs no more than the accumulator while a window is open.

    .. math:: (\theta_{t+1}, s_{t+1}) = \mathrm{apply\_gradients}(g_t, s_t, \theta_t)

    It is made, saved, restored and placed on a mesh as an `nnx.Optimizer`, and has the same attributes. `nnx.Optimizer`
    writes all parameters on every call. This one does not read or write parameters and optimizer state in an open
    window, if `accumulate` returned `tx`.

    Donate the model and the optimizer: `@nnx.jit(donate_argnames=("model", "optimizer"))`. Otherwise the step copies
    both. `update(model, grads, /, **extra_args)` changes the model's parameters, the optimizer's state and its `step`,
    which counts calls. The number of closed windows is `optimizer.opt_state.windows`.

    Args:
      model: the model, for its parameters.
      tx: any Optax transformation.
      wrt: a filter of variables, the same one as for the gradients, such as `nnx.Param`. As in Flax, its paths begin
        at a tuple of models. So make an optimizer for each model if the filter is about paths in one.
      grads: the gradients, as `nnx.grad` or `shrewjax.flax.value_and_grad` returns them.
      **extra_args: passed to `tx.update`, such as `weight`, `flush` and `value`.

    Returns:
      `update` returns the `shrewjax.metrics` of the new state. A compiled step does not compute those that it does not
      return. Newer versions of `nnx.Optimizer` return the updates instead.

    Raises:
      ValueError: `wrt` matches no variable of the model; `grads` has none of them; model and gradients are
        swapped, which only Flax's graph mode shows.
      Exception: an error of `tx.update`.

    Example:
      >>> from flax import nnx
      >>> import shrewjax.flax
      >>> model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
      >>> tx = shrewjax.accumulate(optax.sgd(1.0), 2)
      >>> optimizer = shrewjax.flax.Optimizer(model, tx, wrt=nnx.Param)
      >>> @nnx.jit(donate_argnames=("model", "optimizer"))
      ... def step(model, optimizer, x):
      ...     loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x)))(model)
      ...     return optimizer.update(model, grads, weight=len(x), value=loss)
      >>> for size in (3, 5):
      ...     metrics = step(model, optimizer, jnp.ones((size, 2)))
      >>> metrics["accumulate/applied"], metrics["accumulate/windows"]
      (Array(True, dtype=bool), Array(1, dtype=int32))

    Source: the results are those of `flax.nnx.Optimizer`.
    """

    def __init__(
        self, model: PyTree, tx: optax.GradientTransformation, *, wrt: Any, **options: Any
    ) -> None:
        _predicate(wrt)
        if not hasattr(tx, "init") or not hasattr(tx, "update"):
            raise ValueError(
                f"tx must be a transformation, got {type(model).__name__} and then {type(tx).__name__}. Call "
                "Optimizer(model, tx, wrt=nnx.Param)"
            )
        init = lambda params: with_own_buffers(tx.init(params), params)  # noqa: E731
        own_tx = optax.GradientTransformation(init, tx.update)
        super().__init__(model, own_tx, wrt=wrt, **options)
        self.tx = tx
        _require_variables(nnx.state(model, wrt, **options), wrt, model)

    def update(self, model: PyTree, grads: PyTree, /, **extra_args: Argument) -> Metrics:
        """Changes parameters and state in place. Returns the measurements.

        `extra_args` are those of the class: `weight`, `flush`, `value` and others that `tx.update` takes.
        """
        if isinstance(model, nnx.State) and not isinstance(grads, nnx.State):
            raise ValueError(
                f"update takes the model first, got an nnx.State and then {type(grads).__name__}. Call "
                "optimizer.update(model, grads)"
            )
        # An option of `nnx.state` since Flax 0.12.8.
        mode = {"graph": self.graph} if hasattr(self, "graph") else {}
        arrays_of = lambda x: _arrays(nnx.state(x, self.wrt, **mode))  # noqa: E731
        params, its_grads = arrays_of(model), arrays_of(grads)
        wanted = dict(jax.tree.leaves_with_path(params))
        came = dict(jax.tree.leaves_with_path(its_grads, lambda x: x is None))
        missing = sorted(map(trees.leaf_name, wanted.keys() - came))
        if missing:
            raise ValueError(
                f"grads must hold the variables of wrt={trees.shown(self.wrt)}, got {type(grads).__name__} without "
                f"{missing[0]}. Pass gradients of the same wrt. Or make an optimizer for each model"
            )
        new_params, opt_state = apply_gradients(
            self.tx, its_grads, _arrays(self.opt_state), params, **_arrays(extra_args)
        )
        nnx.update(model, new_params)
        nnx.update(self.opt_state, nnx.state(opt_state, **mode))
        self.step[...] += 1
        return metrics(opt_state)


class TrainState(train_state.TrainState):
    r"""Linen's `TrainState`, whose `apply_gradients` takes the weight of a micro-batch and its loss.

    .. math:: (\theta_{t+1}, s_{t+1}) = \mathrm{apply\_gradients}(g_t, s_t, \theta_t)

    It is made by `create`, replicated and saved as Flax's own, and can be subclassed for more fields, except `weight`,
    `flush` and `value`, which are arguments of `apply_gradients`. In an open window
    `apply_gradients` does not read or write parameters and optimizer state, if `accumulate` returned `tx`. Donate the
    state: `jax.jit(step, donate_argnums=0)`. Otherwise the step copies it.

    `step` counts calls, as in Flax. The number of closed windows is `state.opt_state.windows`.

    Args:
      step: the number of calls of `apply_gradients`.
      apply_fn: usually the model's `apply`.
      params: the parameters.
      tx: any Optax transformation.
      opt_state: its state.

    Example:
      >>> import shrewjax.flax
      >>> tx = shrewjax.accumulate(optax.sgd(1.0), 2)
      >>> params = {"w": jnp.zeros(2)}
      >>> state = shrewjax.flax.TrainState.create(apply_fn=None, params=params, tx=tx)
      >>> for number, weight in ((1.0, 3), (5.0, 1)):
      ...     state = state.apply_gradients(grads={"w": jnp.full(2, number)}, weight=weight)
      >>> state.params["w"], state.step
      (Array([-2., -2.], dtype=float32), 2)

    Source: the results are those of `flax.training.train_state.TrainState`.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Raises if a field of the subclass would never change, because `apply_gradients` has such an argument."""
        super().__init_subclass__(**options)  # Flax's makes a dataclass of it
        for field in dataclasses.fields(cls):
            if field.name in ("weight", "flush", "value"):
                raise ValueError(
                    f"{cls.__name__} must not have a field named {field.name}, an argument of apply_gradients. "
                    "Rename it"
                )

    @classmethod
    def create(
        cls, *, apply_fn: Any, params: PyTree, tx: optax.GradientTransformation, **fields: Any
    ) -> Self:
        """Returns a new state, whose `opt_state` is `tx.init(params)`.

        Args:
          apply_fn: usually the model's `apply`.
          params: the parameters.
          tx: any Optax transformation.
          **fields: those of a subclass.

        Returns:
          The state, in which `opt_state` shares no buffer with the parameters. So it can be donated.
        """
        state = super().create(apply_fn=apply_fn, params=params, tx=tx, **fields)
        return state.replace(opt_state=with_own_buffers(state.opt_state, params))

    def apply_gradients(
        self,
        *,
        grads: PyTree,
        weight: Number = 1,
        flush: Any = False,
        value: Number | None = None,
        **fields: Any,
    ) -> Self:
        """Returns the state after a micro-batch.

        Args:
          grads: the gradients of the parameters.
          weight: the micro-batch's number of examples or tokens, for `accumulate`.
          flush: whether to close the window with this call, for `accumulate`.
          value: the micro-batch's loss, if `tx` takes one.
          **fields: new values of other fields.

        Returns:
          The new state.

        Raises:
          Exception: an error of `tx.update`.
        """
        # Without a window, `weight=` and `flush=` are errors, so known defaults are not passed on, such as 1 and 1.0.
        given = {"weight": (weight, 1), "flush": (flush, False), "value": (value, None)}
        extra_args = {
            name: x
            for name, (x, default) in given.items()
            if isinstance(x, jax.Array) or np.ndim(x) or x != default
        }
        # As in Flax, parameters that their "gradient" overwrites, such as the scales of fp8, are none of `tx`.
        is_fp8 = isinstance(grads, Mapping) and OVERWRITE_WITH_GRADIENT in grads
        its_grads, params = (x["params"] if is_fp8 else x for x in (grads, self.params))
        params, opt_state = apply_gradients(
            self.tx, its_grads, self.opt_state, params, **extra_args
        )
        if is_fp8:
            params = {**grads, "params": params}
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **fields)


def value_and_grad(
    fun: Function,
    micro_batches: int,
    *,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    batch_argnums: int | str | Sequence[int | str] | None = None,
    accumulator_dtype: DType = None,
    sum_over: AxisName | None = None,
    **others: Never,
) -> Callable[..., tuple[PyTree, PyTree]]:
    r"""Returns `nnx.value_and_grad` of `fun`, in the memory of a micro-batch.

    .. math:: \big(f(\theta, x), \; \nabla_\theta f(\theta, x)\big)

    It is `shrewjax.value_and_grad` for a loss that takes an NNX model first. Value, aux, gradients and dropout are
    those of `nnx.value_and_grad` of the whole batch. The objects are updated as by one call of it: counts of keys
    advance once. Batch norm in training is refused. With running averages (`model.eval()`) it is not. Or call
    `accumulated_value_and_grad`, in which each micro-batch has statistics of its own.

    Call the returned function under `nnx.jit`. Both of Flax's modes, graph and tree, give the same.

    Args:
      fun: the loss function, as for `nnx.value_and_grad`. It takes the model first.
      micro_batches: as in `shrewjax.value_and_grad`.
      wrt: a filter of the variables in the first argument to differentiate with respect to.
      has_aux: whether `fun` returns a pair.
      batch_argnums: the arguments that hold examples, by positions or names as in `shrewjax.value_and_grad`. The model
        has position 0. None: all by position except nnx objects. If there are none, all by keyword, except these.
      accumulator_dtype: as in `shrewjax.value_and_grad`.
      sum_over: as in `shrewjax.value_and_grad`.

    Returns:
      A function of `fun`'s arguments: `(value, grads)`, or `((value, aux), grads)` with `has_aux`. The gradients are an
      `nnx.State` of variables, in place of each object of the first argument, as `nnx.value_and_grad` returns them in
      graph mode.

    Raises:
      ValueError: as in `accumulated_value_and_grad` and in `shrewjax.micro_batched`.

    Example:
      >>> from flax import nnx
      >>> import shrewjax.flax
      >>> def loss(model, x, y, mask):
      ...     return jnp.sum((model(x)[:, 0] - y) ** 2 * mask) / jnp.sum(mask)
      >>> model, y = nnx.Linear(2, 1, rngs=nnx.Rngs(0)), jnp.arange(8.0)
      >>> step = nnx.jit(shrewjax.flax.value_and_grad(loss, micro_batches=4))
      >>> value, grads = step(model, jnp.ones((8, 2)), y, y < 5)
      >>> grads["kernel"].shape
      (2, 1)

    Source: `shrewjax.value_and_grad` and `flax.nnx.value_and_grad`.
    """
    _predicate(wrt)
    division = Division(micro_batches, True, accumulator_dtype, sum_over, others)
    roles = roles_of(fun, {}, (), batch_argnums)

    def value_and_grad_of_batch(*args: PyTree, **kwargs: PyTree) -> Any:
        call = _Call(fun, has_aux, wrt, args, kwargs)
        run = jax.value_and_grad(call.divided(division, roles), has_aux=True)
        returned, grads = run(*call.arrays, **call.kwargs)
        return call.returned(returned), call.like_model(grads)

    return value_and_grad_of_batch


def micro_batched(
    fun: Function,
    micro_batches: int,
    *,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    batch_argnums: int | str | Sequence[int | str] | None = None,
    accumulator_dtype: DType = None,
    sum_over: AxisName | None = None,
    **others: Never,
) -> Function:
    r"""Returns the same function, whose derivative takes the memory of a micro-batch.

    .. math:: f(\theta, x) = h\Big(\sum_i s(\theta, x_i), \; r(\theta, x_1), \dots, r(\theta, x_K)\Big)

    It is `shrewjax.micro_batched` for a function that takes an NNX model first, as `nnx.value_and_grad` and `nnx.grad`
    do. A call updates the objects as a call of `fun` does. The derivative of their new state is NaN.

    Args:
      fun: any function that takes the model first, such as a loss, or one that returns rows.
      micro_batches: as in `shrewjax.micro_batched`.
      wrt: a filter of all variables that a caller may differentiate with respect to.
      has_aux: whether `fun` returns a pair.
      batch_argnums: as in `value_and_grad`.
      accumulator_dtype: as in `shrewjax.micro_batched`.
      sum_over: as in `shrewjax.micro_batched`.

    Returns:
      A function with the arguments and results of `fun`.

    Raises:
      ValueError: as in `value_and_grad`.

    Example:
      >>> from flax import nnx
      >>> import shrewjax.flax
      >>> def loss(model, x, y):
      ...     return jnp.mean((model(x)[:, 0] - y) ** 2)
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> of_batch = shrewjax.flax.micro_batched(loss, micro_batches=4)
      >>> value, grads = nnx.jit(nnx.value_and_grad(of_batch))(model, jnp.ones((8, 2)), jnp.ones(8))
      >>> grads["kernel"].shape
      (2, 1)

    Source: `shrewjax.micro_batched`.
    """
    _predicate(wrt)
    division = Division(micro_batches, True, accumulator_dtype, sum_over, others)
    roles = roles_of(fun, {}, (), batch_argnums)

    @wraps(fun)
    def of_batch(*args: PyTree, **kwargs: PyTree) -> PyTree:
        call = _Call(fun, has_aux, wrt, args, kwargs)
        return call.returned(call.divided(division, roles)(*call.arrays, **call.kwargs))

    return of_batch


def accumulated_value_and_grad(
    fun: Function,
    micro_batches: int,
    *,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    batch_argnums: int | str | Sequence[int | str] | None = None,
    weight_fn: Function | None = None,
    aux_reduction: PyTree = "mean",
    rng_argnums: int | str | Sequence[int | str] = (),
    reduction: Reduction = "mean",
    nonfinite: NonfiniteOfBatch = "propagate",
    accumulator_dtype: DType = None,
    sum_over: AxisName | None = None,
    sharded_over: AxisName | None = None,
    skip_empty: bool = False,
) -> Callable[..., tuple[PyTree, PyTree]]:
    r"""Returns `nnx.value_and_grad` of `fun`, computed micro-batch by micro-batch, for batches that do not fit at once.

    .. math:: \ell = \frac{\sum_i w_i \ell_i}{\sum_i w_i}, \qquad \bar g = \frac{\sum_i w_i g_i}{\sum_i w_i}

    The returned function takes the arguments of `fun`, the model first, with the whole batch. All state that is not in
    `wrt` goes from micro-batch to micro-batch: batch statistics, the counts of dropout keys, frozen weights. So does
    the state of nnx objects in other arguments. At the end the objects are updated in place. Value, gradients and
    state are those of K calls of `nnx.value_and_grad`, averaged by weight. A micro-batch of weight 0, or one that is
    dropped, leaves all state as it was.

    Everything else is as in `shrewjax.accumulated_value_and_grad`, with its tables of edge cases. Call the returned
    function under `nnx.jit`. Both of Flax's modes, graph and tree, give the same.

    =========================================  =====================================================================
    you have                                   what to do, or what happens
    =========================================  =====================================================================
    LoRA, frozen layers                        `wrt=nnx.LoRAParam`, or another filter that `nnx.DiffState` takes
    keys, a metric, a teacher                  pass them as other arguments; they need no position
    several models to train                    pass a tuple, list or dict as the first argument. As in Flax, paths in
                                               `wrt` begin at each model, and arrays beside the models have gradients
    a variable that two modules share          it has one gradient, in graph mode
    a model that is also another argument      an error, as in Flax; pass `nnx.clone(model)` there
    `nnx.remat`, `jit`, `scan`, `shard_map`    nothing; `fun` is traced once more
    `fun` changes a variable in `wrt`          an error, because K calls would differentiate at other points
    `nnx.WeightNorm`, which writes its kernel  call a copy, `nnx.clone(layer)(x)`; the layer keeps its old kernel
    `nnx.SpectralNorm`, which also counts      an error; `nnx.value_and_grad` for each micro-batch
    `fun` adds variables                       an error; remove them in `fun` with `nnx.pop`, and return them as aux
    `fun` changes a variable's shape or dtype  an error; cast the new value
    `fun` changes a Python attribute           an error; change it before the call
    `sum_over` under plain `nnx.jit`           each device draws from keys of its own; batch statistics are averaged
    `sum_over` inside `nnx.shard_map`          all devices draw from the same keys, unless each has its own
    =========================================  =====================================================================

    Args:
      fun: the loss function, as for `nnx.value_and_grad`. It takes the model first.
      micro_batches: K, an int >= 1, into which the examples can be divided.
      wrt: a filter of the variables in the first argument to differentiate with respect to.
      has_aux: whether `fun` returns a pair.
      batch_argnums: the arguments that hold examples, by positions or names as in
        `shrewjax.accumulated_value_and_grad`. The model has position 0. None: all by position except nnx objects and
        those of `rng_argnums`. If there are none, all by keyword, except these.
      weight_fn: as in `shrewjax.accumulated_value_and_grad`.
      aux_reduction: as in `shrewjax.accumulated_value_and_grad`.
      rng_argnums: the arguments that are trees of PRNG keys, by positions or names. Keys in nnx objects need none.
      reduction: as in `shrewjax.accumulated_value_and_grad`.
      nonfinite: as in `shrewjax.accumulated_value_and_grad`.
      accumulator_dtype: as in `shrewjax.accumulated_value_and_grad`.
      sum_over: as in `shrewjax.accumulated_value_and_grad`.
      sharded_over: as in `shrewjax.accumulate`.
      skip_empty: as in `shrewjax.accumulated_value_and_grad`. `weight_fn` must not read state outside of `wrt`.

    Returns:
      A function of `fun`'s arguments: `(value, grads)`, or `((value, aux), grads)` with `has_aux`. The gradients are an
      `nnx.State` of variables, in place of each object of the first argument, as `nnx.value_and_grad` returns them in
      graph mode.

    Raises:
      ValueError: an argument is not as described; `wrt` matches no variable of the model, or an integer; the model is
        not in the first argument; `fun` changes a variable in `wrt`, or adds or removes variables.
      Exception: an error of `shrewjax.accumulated_value_and_grad`.

    Example:
      >>> from flax import nnx
      >>> import shrewjax.flax
      >>> class Model(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.linear = nnx.Linear(2, 1, rngs=rngs)
      ...         self.dropout = nnx.Dropout(0.5, rngs=rngs)
      ...     def __call__(self, x):
      ...         return self.linear(self.dropout(x))[:, 0]
      >>> def loss(model, x, y):
      ...     return jnp.mean((model(x) - y) ** 2)
      >>> model = Model(nnx.Rngs(0))
      >>> @nnx.jit(donate_argnames="model")
      ... def step(model, x, y):
      ...     return shrewjax.flax.accumulated_value_and_grad(loss, micro_batches=4)(model, x, y)
      >>> value, grads = step(model, jnp.ones((8, 2)), jnp.ones(8))
      >>> grads["linear"]["kernel"].shape, model.dropout.rngs.count[...]
      ((2, 1), Array(4, dtype=uint32))

    Source: `shrewjax.accumulated_value_and_grad` and `flax.nnx.value_and_grad`.
    """

    _predicate(wrt)
    make = accumulated.accumulated_value_and_grad
    options = arguments.among(make, locals())
    make(**options)  # raises for its arguments
    roles = roles_of(fun, {}, rng_argnums, batch_argnums)

    def of_batch(*args: PyTree, **kwargs: PyTree) -> Any:
        call = _Call(fun, has_aux, wrt, args, kwargs)
        arguments.require_arguments_of_fun("weight_fn", weight_fn, *call.given)
        its = call.places(roles)
        # The state comes last, and goes from micro-batch to micro-batch.
        own_options = {
            "fun": call.loss,
            "has_aux": True,
            "weight_fn": weight_fn and call.alone(weight_fn),
            "carry_argnum": len(call.arrays) - 1,
            "rng_argnums": its["rng_argnums"],
            "batch_argnums": its["batch_argnums"],
        }
        returned, grads = make(**options | own_options)(*call.arrays, **call.kwargs)
        return call.returned(returned), call.like_model(grads)

    return of_batch


def _with_model_by_position(fun: Function, args: PyTree, kwargs: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the arguments, with the first one of `fun` by position, however it came."""
    if args:
        return args, kwargs
    first = next(iter(positional_names(fun)), None)
    if first not in kwargs:
        raise ValueError(
            "the first argument must be the model, got none by position. Pass it first"
        )
    others = dict(kwargs)
    return (others.pop(first),), others


def _require_on_one_side(
    numbered: dict[int, Any], is_in_wrt: Callable[[KeyPath, Leaf], bool]
) -> None:
    """Raises if objects share a variable that is in `wrt` in one of them alone."""
    nodes = [pair for i, x in numbered.items() for pair in nnx.iter_graph({i: x})]
    variables = [(path, x) for path, x in nodes if isinstance(x, nnx.Variable)]
    in_wrt = {id(x) for path, x in variables if is_in_wrt(path, x)}
    if in_wrt & {id(x) for path, x in variables if not is_in_wrt(path, x)}:
        raise ValueError(
            "two nnx objects share a variable that is in wrt in one alone. Pass nnx.clone(x) as the other"
        )


def _predicate(wrt: Argument) -> Callable[[KeyPath, Leaf], bool]:
    try:
        return nnx.filterlib.to_predicate(wrt)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"wrt must be a filter such as nnx.Param, got {trees.shown(wrt)}. For nnx.DiffState(0, f), pass f"
        ) from error


def _require_variables(params: PyTree, wrt: Any, model: PyTree) -> None:
    if not jax.tree.leaves(params):
        raise ValueError(
            f"wrt={trees.shown(wrt)} must match a variable of the model, got {type(model).__name__} without one. "
            "Pass such as nnx.Param"
        )
    variables = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    # Those of linen, by `nnx.bridge`.
    if OVERWRITE_WITH_GRADIENT in {type(x).__name__ for x in variables}:
        raise ValueError(
            f"wrt={trees.shown(wrt)} must not match variables of the type {OVERWRITE_WITH_GRADIENT}. Leave them out of "
            "wrt"
        )


class _Call:
    """A call of a function of nnx objects, as one of arrays, whose last one is the state of the objects.

    Each object has a number. All leaves of the first argument do, because Flax differentiates its arrays, too.

    Attributes:
      given: the arguments by position and by keyword, the model by position.
      arrays: the arguments by position, with None for each object. In the place of the first one are the arrays of the
        variables in `wrt`. Those of all other variables come last.
      kwargs: those by keyword, with None for each object.
    """

    def __init__(
        self, fun: Function, has_aux: bool, wrt: Any, args: PyTree, kwargs: PyTree
    ) -> None:
        self._fun, self._has_aux = fun, has_aux
        self.given = args, kwargs = _with_model_by_position(fun, args, kwargs)
        model = args[0]
        # 1. Number the objects, those of the first argument first, and leave them out of the arguments.
        is_object = nnx.graph.is_graph_node
        self._treedef: Any
        with_paths, self._treedef = jax.tree.flatten_with_path(self.given, is_object)
        self._paths, leaves = zip(*with_paths, strict=True)
        self._model: Any = jax.tree.structure(model, is_object)
        in_model = range(len(jax.tree.leaves(model, is_object)))
        numbered = {i: x for i, x in enumerate(leaves) if i in in_model or is_object(x)}
        arrays = {i: jnp.asarray(x) for i, x in numbered.items() if not is_object(x)}
        self._objects = numbered | arrays
        without = [None if i in numbered else x for i, x in enumerate(leaves)]
        (self._no_model, *others), self.kwargs = self._treedef.unflatten(without)
        after_model = dict(enumerate(args[1:], 1)) | kwargs
        alone = tuple(at for at, x in after_model.items() if is_object(x))
        # The roles of arguments that hold no examples.
        self._reserved = {"wrt": (0,), "nnx objects (they need no position)": alone}

        is_wanted = _predicate(wrt)
        if not any(is_object(numbered[i]) for i in in_model):
            self._require_no_other_model(wrt, model)

        # 2. Take them apart. As in Flax, a path begins at its object, and a variable or an array beside the objects is
        # always in wrt (test_flax_objects.py, "paths_begin_at_each_object").

        def is_in_wrt(path: KeyPath, x: Leaf) -> bool:
            return path[0] in in_model and (not path[1:] or is_wanted(path[1:], x))

        self._filters: Any = is_in_wrt, ...
        self._graph, *self._variables = nnx.split(self._objects, *self._filters)
        params, state = map(_arrays, self._variables)
        # A second call with the same model gets the state that the first one returned, whose derivative is NaN.
        self.arrays = params, *others, jax.lax.stop_gradient(state)
        # Of each function: which arrays it returns as they were given.
        self._flow: dict[int, list[bool]] = {}
        # By leaf of the state, whether no function has changed it.
        self._is_kept: list[bool] = []

        # 3. Check them.
        _require_variables(self._variables[0], wrt, model)
        self._require_floating(wrt)
        _require_on_one_side(numbered, is_in_wrt)

    def _require_no_other_model(self, wrt: Any, first: PyTree) -> None:
        """Raises if another argument than the first has variables of `wrt`, which nothing would differentiate."""
        is_wanted = _predicate(wrt)
        objects = {i: x for i, x in self._objects.items() if nnx.graph.is_graph_node(x)}
        for i, x in objects.items():
            if any(is_wanted(path, y) for path, y in nnx.iter_graph(x)):
                place = jax.tree_util.keystr(self._paths[i][1:2], simple=True)
                raise ValueError(
                    f"the first argument must be the model, got {trees.shown(first)}, but {type(x).__name__} in "
                    f"argument {place} matches wrt={trees.shown(wrt)}. Pass it first. Or close over it"
                )

    def _require_floating(self, wrt: Any) -> None:
        for path, x in jax.tree.leaves_with_path(self.arrays[0]):
            if not jnp.issubdtype(x.dtype, jnp.inexact):
                raise ValueError(
                    f"the variable {self._name(path)} in wrt={trees.shown(wrt)} must be floating or complex, got "
                    f"{x.dtype}. Leave it out of wrt"
                )

    def loss(self, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        returned, state = self._run(self._fun, args, kwargs)
        value, its_aux = returned if self._has_aux else (returned, ())
        return value, (its_aux, state)

    def alone(self, function: Function) -> Function:
        """Returns a function of the objects as one of arrays, without their new state."""
        return lambda *args, **kwargs: self._run(function, args, kwargs)[0]

    def places(self, roles: Roles) -> dict[str, tuple[Place, ...]]:
        """Returns the roles of the arguments without the state, which no caller passed."""
        own = roles._replace(given={**self._reserved, **roles.given})
        return own.places(self.arrays[:-1], self.kwargs)

    def divided(self, division: Division, roles: Roles) -> Function:
        """Returns `loss`, divided."""
        given = {"batch_argnums": self.places(roles)["batch_argnums"]}
        return partial(division.call, Roles(self.loss, given, roles.part))

    def returned(self, results: tuple[PyTree, PyTree]) -> PyTree:
        """Returns what `fun` would return, and gives the objects their new state."""
        value, (whole_aux, state) = results
        self._update(state)
        return (value, whole_aux) if self._has_aux else value

    def _run(self, function: Any, args: PyTree, kwargs: PyTree) -> PyTree:
        """Calls `function` with the objects of the arrays in the first and the last argument.

        Returns its result, and the new arrays of the variables that are not in `wrt`. Raises if it changes anything
        else of the objects.
        """
        params, *others, state = args
        old = params, state
        returned, new = self._call(function, old, others, kwargs)
        leaves = zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
        is_same = [x is y for x, y in leaves]
        in_wrt = [path for path, _ in jax.tree.leaves_with_path(params)]
        # An array that comes back as another tracer may be the same one, for example out of nnx.remat. The function's
        # program tells. It is traced once, although JAX traces `fun` several times, and not if parameters are the same.
        if not all(is_same[: len(in_wrt)]):
            if id(function) not in self._flow:
                new_of = lambda x: self._call(function, x, others, kwargs)[1]  # noqa: E731
                self._flow[id(function)] = returned_as_given(new_of, old)
            is_same = self._flow[id(function)]
        for path, same in zip(in_wrt, is_same, strict=False):
            if not same:
                raise ValueError(
                    f"fun must not change the variable {self._name(path)} in wrt. Leave it out of wrt. Or call "
                    "nnx.clone(layer)(x)"
                )
        # A scan copies what it returns, so frozen layers would be copied for each micro-batch
        # (tests/promises/test_flax_models.py, "frozen_layers").
        kept = is_same[len(in_wrt) :]
        of_leaves = iter(kept)
        state = jax.tree.map(lambda x, y: y if next(of_leaves) else x, new[1], state)
        # A function for weights keeps what the loss changes.
        before = self._is_kept or kept
        self._is_kept = [x and y for x, y in zip(before, kept, strict=True)]
        return returned, state

    def _call(self, function: Any, old: PyTree, args: PyTree, kwargs: PyTree) -> Any:
        """Returns the result of `function`, and the new arrays of the variables in `wrt` and of the others."""
        objects = nnx.merge(self._graph, *_like(self._variables, old))
        without = self._treedef.flatten_up_to(((self._no_model, *args), kwargs))
        leaves = [objects.get(i, x) for i, x in enumerate(without)]
        args, kwargs = self._treedef.unflatten(leaves)
        returned = function(*args, **kwargs)
        graph, *variables = nnx.split(objects, *self._filters)
        new = tuple(map(_arrays, variables))
        self._check(new, old, graph)
        return returned, new

    def _check(self, new: PyTree, old: PyTree, graph: Any) -> None:
        """Raises if `fun` changed what cannot go from micro-batch to micro-batch: the graph, or a variable's type."""
        now, before = _kinds(new), _kinds(old)
        for path in sorted(now | before, key=self._name):
            was, given = (kinds.get(path, "missing") for kinds in (before, now))
            if given != was:
                raise ValueError(
                    f"fun must keep each variable's type, but {self._name(path)} was {was} and is {given}. Cast it. "
                    "Return an added one as aux, by nnx.pop"
                )
        if graph != self._graph:
            raise ValueError(
                "fun must change no Python attribute of the model. Change it before the call, as by model.train()"
            )

    def _update(self, state: PyTree) -> None:
        """Gives the objects their new state, those variables that `fun` has changed.

        NNX refuses to write others, if they are of an outer trace (test_flax_objects.py, "teacher").
        """
        flat = nnx.to_flat_state(_like(self._variables[1], state))
        kept = nnx.to_flat_state(_like(self._variables[1], self._is_kept))
        pairs = zip(flat, kept, strict=True)
        changed = [new for new, (_, x) in pairs if not all(jax.tree.leaves(x))]
        nnx.update(self._objects, nnx.from_flat_state(changed))

    def like_model(self, grads: PyTree) -> PyTree:
        """Returns the gradients of the objects, in the place of each in the first argument."""
        its_grads = _like(self._variables[0], grads)
        numbers = range(self._model.num_leaves)
        return self._model.unflatten([its_grads.get(i, nnx.State({})) for i in numbers])

    def _name(self, path: KeyPath) -> str:
        _, argument, *outside = self._paths[path[0].key]
        name = trees.leaf_name((*outside, *path[1:]))
        at = jax.tree_util.keystr((argument,), simple=True)
        return name if at == "0" else f"{name} of argument {at}"


def _kinds(arrays: PyTree) -> dict[KeyPath, str]:
    leaves = [(path[1:], x) for path, x in jax.tree.leaves_with_path(arrays)]
    return {path: f"{jax.typeof(x).dtype} of shape {np.shape(x)}" for path, x in leaves}


def _like(variables: PyTree, arrays: PyTree) -> PyTree:
    """Returns the variables with other arrays. A variable may hold a tree of them."""
    return jax.tree.unflatten(jax.tree.structure(variables), jax.tree.leaves(arrays))


# Flax 0.12.7 has a new name for `nnx.pure`, which warns since then.
_arrays: Callable[[PyTree], PyTree] = getattr(nnx, "as_pure", None) or nnx.pure
