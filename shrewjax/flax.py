r"""Flax's optimizer, train state and `value_and_grad`, for windows of micro-batches.

Flax is no dependency of the package, and `import shrewjax` does not import it. The first use of `shrewjax.flax` does. A
type checker wants `import shrewjax.flax`. The arithmetic is that of `shrewjax.apply_gradients` and
`shrewjax.value_and_grad`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import jax
import numpy as np
import optax

import shrewjax
from shrewjax._accumulation.batch import roles_of_arguments
from shrewjax._accumulation.window import NonfiniteOfBatch, Reduction
from shrewjax._base import arguments, trees
from shrewjax._base.types import Argument, ArrayTree, AxisName, DType, Function, Number, PyTree
from shrewjax._programs.forwarding import returned_as_given

try:
    from flax import nnx
    from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
    from flax.training import train_state
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError(
        "shrewjax.flax needs Flax, which is not installed. Run: python -m pip install flax"
    ) from error

__all__ = ["Optimizer", "TrainState", "value_and_grad"]


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
      wrt: a filter of variables, the same one as for the gradients, such as `nnx.Param`.
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
        super().__init__(model, tx, wrt=wrt, **options)
        _require_variables(nnx.state(model, wrt, **options), wrt, model)

    def update(self, model: PyTree, grads: PyTree, /, **extra_args: Argument) -> dict[str, Any]:
        """Changes parameters and state in place. Returns the measurements.

        `extra_args` are those of the class: `weight`, `flush`, `value` and others that `tx.update` takes.
        """
        if isinstance(model, nnx.State) and not isinstance(grads, nnx.State):
            raise ValueError(
                f"update takes the model first, got an nnx.State and then {type(grads).__name__}. Call "
                "optimizer.update(model, grads)"
            )
        mode = (
            {"graph": self.graph} if hasattr(self, "graph") else {}
        )  # an option of `nnx.state` since Flax 0.12.8
        params, its_grads = (_arrays(nnx.state(x, self.wrt, **mode)) for x in (model, grads))
        with_paths = (
            jax.tree.leaves_with_path(x, is_leaf=lambda x: x is None) for x in (params, its_grads)
        )
        of_params, of_grads = ({path for path, _ in leaves} for leaves in with_paths)
        missing = of_params - of_grads
        if missing:
            raise ValueError(
                f"grads must hold the variables of wrt={self.wrt!r}, got {type(grads).__name__} without "
                f"{min(map(trees.leaf_name, missing))}. Pass the gradients as nnx.grad or shrewjax.flax.value_and_grad "
                "returned them, with the same wrt"
            )
        new_params, opt_state = shrewjax.apply_gradients(
            self.tx, its_grads, _arrays(self.opt_state), params, **_arrays(extra_args)
        )
        nnx.update(model, new_params)
        nnx.update(self.opt_state, nnx.state(opt_state, **mode))
        self.step[...] += 1
        return shrewjax.metrics(opt_state)


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
                    f"{cls.__name__} must not have a field named {field.name}, because {field.name}= is an argument of "
                    "apply_gradients and would not change the field. Give the field another name"
                )

    def apply_gradients(
        self,
        *,
        grads: PyTree,
        weight: Number = 1,
        flush: Any = False,
        value: Number = None,
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
        given, default = (
            {"weight": weight, "flush": flush, "value": value},
            {"weight": 1, "flush": False, "value": None},
        )
        # Without a window, `weight=` and `flush=` are errors, so known defaults are not passed on, such as 1 and 1.0.
        extra_args = {
            name: x
            for name, x in given.items()
            if isinstance(x, jax.Array) or np.ndim(x) or x != default[name]
        }
        # As in Flax, parameters that their "gradient" overwrites, such as the scales of fp8, are none of `tx`.
        overwrites = isinstance(grads, Mapping) and OVERWRITE_WITH_GRADIENT in grads
        its_grads, params = (
            (grads["params"], self.params["params"]) if overwrites else (grads, self.params)
        )
        params, opt_state = shrewjax.apply_gradients(
            self.tx, its_grads, self.opt_state, params, **extra_args
        )
        if overwrites:
            params = {"params": params, OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT]}
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **fields)


def value_and_grad(
    fun: Function,
    micro_batches: int,
    *,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] | None = None,
    weight: Function | None = None,
    aux: PyTree = "mean",
    rng_argnums: int | Sequence[int] = (),
    reduction: Reduction = "mean",
    nonfinite: NonfiniteOfBatch = "propagate",
    accumulator_dtype: DType = None,
    sum_over: AxisName | None = None,
) -> Callable[..., tuple[PyTree, PyTree]]:
    r"""Returns `nnx.value_and_grad` of `fun`, computed micro-batch by micro-batch, for batches that do not fit at once.

    .. math:: \ell = \frac{\sum_i w_i \ell_i}{\sum_i w_i}, \qquad \bar g = \frac{\sum_i w_i g_i}{\sum_i w_i}

    The returned function takes the arguments of `fun`, the model first, with the whole batch. All state of the model
    that is not in `wrt` goes from micro-batch to micro-batch: batch statistics, the counts of dropout keys, frozen
    weights. At the end the model is updated in place. Value, gradients and the model are those of K calls of
    `nnx.value_and_grad`, averaged by weight. A micro-batch of weight 0, or one that is dropped, leaves the model's
    state as it was.

    Everything else is as in `shrewjax.value_and_grad`, with its tables of edge cases. Call the returned function under
    `nnx.jit`. Both of Flax's modes, graph and tree, give the same.

    =========================================  =====================================================================
    you have                                   what to do, or what happens
    =========================================  =====================================================================
    LoRA, frozen layers                        `wrt=nnx.LoRAParam`, or another filter that `nnx.DiffState` takes
    keys or a second model that `fun` changes  pass a tuple such as `(model, rngs)` as the first argument
    a second model that `fun` does not change  leave its position out of `batch_argnums`
    a variable that two modules share          it has one gradient, in graph mode
    `nnx.remat`, `jit`, `scan`, `shard_map`    nothing; `fun` is traced once more
    `fun` changes a variable in `wrt`          an error, because K calls would differentiate at other points
    `nnx.WeightNorm`, which writes its kernel  call a copy, `nnx.clone(layer)(x)`; the layer keeps its old kernel
    `nnx.SpectralNorm`, which also counts      an error; `nnx.value_and_grad` for each micro-batch
    `fun` adds variables                       an error; remove them in `fun` with `nnx.pop`, and return them as aux
    `fun` changes a Python attribute           an error; change it before the call
    `sum_over` under plain `nnx.jit`           each device draws from keys of its own; batch statistics are averaged
    `sum_over` inside `nnx.shard_map`          all devices draw from the same keys, unless each has its own
    =========================================  =====================================================================

    Args:
      fun: the loss function, as for `nnx.value_and_grad`. It takes the model first.
      micro_batches: K, an int >= 1, into which the examples can be divided.
      wrt: a filter of the variables to differentiate with respect to.
      has_aux: whether `fun` returns a pair.
      batch_argnums: the positions of the arguments that hold examples, where the model has position 0. None: all
        positional arguments except the model and those of `rng_argnums`.
      weight: as in `shrewjax.value_and_grad`.
      aux: as in `shrewjax.value_and_grad`.
      rng_argnums: the positions of the arguments that are trees of PRNG keys. Keys in the model need no position.
      reduction: as in `shrewjax.value_and_grad`.
      nonfinite: as in `shrewjax.value_and_grad`.
      accumulator_dtype: as in `shrewjax.value_and_grad`.
      sum_over: as in `shrewjax.value_and_grad`.

    Returns:
      A function of `fun`'s arguments: `(value, grads)`, or `((value, aux), grads)` with `has_aux`. The gradients are an
      `nnx.State` of variables, as `nnx.value_and_grad` returns them in graph mode.

    Raises:
      ValueError: an argument is not as described; `wrt` matches no variable of the model; `fun` changes a variable in
        `wrt`, or adds or removes variables.
      Exception: an error of `shrewjax.value_and_grad`.

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
      ...     return shrewjax.flax.value_and_grad(loss, micro_batches=4)(model, x, y)
      >>> value, grads = step(model, jnp.ones((8, 2)), jnp.ones(8))
      >>> grads["linear"]["kernel"].shape, model.dropout.rngs.count[...]
      ((2, 1), Array(4, dtype=uint32))

    Source: `shrewjax.value_and_grad` and `flax.nnx.value_and_grad`.
    """

    options: dict[str, Any] = {
        "aux": aux,
        "reduction": reduction,
        "nonfinite": nonfinite,
        "accumulator_dtype": accumulator_dtype,
        "sum_over": sum_over,
    }
    positions: dict[str, Any] = {"rng_argnums": rng_argnums, "batch_argnums": batch_argnums}
    # Made here for its checks alone, so that a wrong argument raises before the call.
    shrewjax.value_and_grad(
        fun, micro_batches, has_aux=has_aux, weight=weight, **positions, **options
    )
    given: dict[str, Any] = {
        name: None if at is None else arguments.positions(name, at)
        for name, at in positions.items()
    }

    def loss(
        parts: _Parts, /, *args: PyTree, **kwargs: PyTree
    ) -> tuple[PyTree, tuple[PyTree, PyTree]]:
        returned, state = parts.call(fun, args, kwargs)
        value, its_aux = returned if has_aux else (returned, ())
        return value, (its_aux, state)

    def value_and_grad_of_batch(
        model: PyTree, *args: PyTree, **kwargs: PyTree
    ) -> tuple[PyTree, PyTree]:
        # Checked here, because below there is one more argument, which no caller passed (test_flax_arguments.py).
        roles = roles_of_arguments({"wrt": (0,)} | given, 1 + len(args), kwargs)
        arguments.require_arguments_of_fun("weight", weight, (model, *args), kwargs)
        for at in roles["batch_argnums"]:
            if isinstance(args[at - 1], nnx.Module):
                kept = tuple(i for i in roles["batch_argnums"] if i != at)
                raise ValueError(
                    f"argument {at} is a model, {type(args[at - 1]).__name__}, and has no axis of examples. If fun "
                    f"does not change it, pass batch_argnums={kept}. Otherwise pass both models as one tuple, as the "
                    "first argument"
                )
        parts = _Parts(model, wrt)
        (value, (whole_aux, new_state)), grads = shrewjax.value_and_grad(
            partial(loss, parts),
            micro_batches,
            has_aux=True,
            weight=None
            if weight is None
            else lambda *args, **kwargs: parts.call(weight, args, kwargs)[0],
            carry_argnum=-1,
            **{name: _before_last(at) for name, at in given.items()},
            **options,
        )(_arrays(parts.params), *args, _arrays(parts.others), **kwargs)
        nnx.update(model, _like(parts.others, new_state))
        return ((value, whole_aux) if has_aux else value), _like(parts.params, grads)

    return value_and_grad_of_batch


def _require_variables(params: PyTree, wrt: Any, model: PyTree) -> None:
    if not jax.tree.leaves(params):
        raise ValueError(
            f"wrt={wrt!r} must match a variable of the model, got {type(model).__name__}, which has none, so that "
            "nothing would be trained. Pass a filter of the variables to train, such as nnx.Param"
        )
    kinds = {
        type(x).__name__
        for x in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    }
    if OVERWRITE_WITH_GRADIENT in kinds:  # of linen, by `nnx.bridge`
        raise ValueError(
            f"wrt={wrt!r} matches variables of the type {OVERWRITE_WITH_GRADIENT}. These statistics of fp8 layers are "
            "no gradients, and have no mean. Leave them out of wrt. To keep them, call nnx.value_and_grad for each "
            "micro-batch, and overwrite them with what it returns"
        )


def _before_last(positions: tuple[int, ...] | None) -> Any:
    """Returns positions of arguments with one more argument at the end, which moves those counted from the end."""
    return None if positions is None else tuple(at - (at < 0) for at in positions)


class _Parts:
    """A model taken apart: its graph, its variables in `wrt`, and all its others."""

    def __init__(self, model: PyTree, wrt: Any) -> None:
        self._wrt = wrt
        graph_and_variables: Any = nnx.split(model, wrt, ...)
        self._graph, self.params, self.others = graph_and_variables
        _require_variables(self.params, wrt, model)
        self._flow: dict[
            int, list[bool]
        ] = {}  # of each function: which arrays it returns as they were given

    def call(
        self, function: Function, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[PyTree, ArrayTree]:
        """Calls `function` with the model of the arrays in the first and the last argument.

        Returns its result, and the new arrays of the variables that are not in `wrt`. Raises if it changes anything
        else of the model.
        """
        returned, new = self._call(function, args, kwargs)
        old, params = (args[0], args[-1]), jax.tree.leaves_with_path(args[0])
        is_same = [x is y for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)]
        # An array that comes back as another tracer may be the same one, for example out of nnx.remat. The function's
        # program tells. It is traced once, although JAX traces `fun` several times, and not if parameters are the same.
        if not all(is_same[: len(params)]):
            if id(function) not in self._flow:
                self._flow[id(function)] = returned_as_given(
                    lambda arrays: self._call(
                        function, (arrays[0], *args[1:-1], arrays[1]), kwargs
                    )[1],
                    old,
                )
            is_same = self._flow[id(function)]
        for (path, _), same in zip(params, is_same, strict=False):
            if not same:
                raise ValueError(
                    f"fun changes the variable {trees.leaf_name(path)}, which is in wrt, so that the micro-batches "
                    "would not be differentiated at the same point. Leave it out of wrt. If a layer writes it in each "
                    "call, as nnx.WeightNorm does, call a copy of the layer, nnx.clone(layer)(x), where its "
                    "writes are lost. Or call nnx.value_and_grad and shrewjax.flax.Optimizer.update for each "
                    "micro-batch"
                )
        # A scan copies what it returns, so frozen layers would be copied for each micro-batch
        # (tests/promises/test_flax_models.py, "frozen_layers").
        unchanged = iter(is_same[len(params) :])
        return returned, jax.tree.map(lambda x, y: y if next(unchanged) else x, new[1], old[1])

    def _call(
        self, function: Function, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]
    ) -> tuple[PyTree, tuple[ArrayTree, ArrayTree]]:
        """Returns the result of `function`, and the new arrays of the variables in `wrt` and of the others."""
        model = nnx.merge(self._graph, _like(self.params, args[0]), _like(self.others, args[-1]))
        returned = function(model, *args[1:-1], **kwargs)
        new_graph, *variables = nnx.split(model, self._wrt, ...)
        params, others = map(_arrays, variables)
        check_model(new_graph == self._graph, (params, others), (args[0], args[-1]))
        return returned, (params, others)


def check_model(is_same_graph: bool, new: PyTree, old: PyTree) -> None:
    """Raises if `fun` changed what cannot go from micro-batch to micro-batch: which variables there are, or the graph.

    `new` and `old` are the arrays of the model after and before `fun`.
    """
    new_paths, paths = (
        {path for path, _ in jax.tree.leaves_with_path(tree)} for tree in (new, old)
    )
    for verb, differing in (("adds", new_paths - paths), ("removes", paths - new_paths)):
        if differing:
            name = min(trees.leaf_name(path[1:]) for path in differing)
            raise ValueError(
                f"fun {verb} the variable {name}, but it has to leave the model with the variables that it found. "
                "Change the model before the call. If fun adds it, remove it in fun with nnx.pop, and return it as aux"
            )
    if not is_same_graph:
        raise ValueError(
            "fun changes the model beside its variables, such as a Python attribute, and the change would be lost. "
            "Change it before the call, for example with model.train()"
        )


def _like(variables: PyTree, arrays: ArrayTree) -> PyTree:
    """Returns the variables with other arrays. A variable may hold a tree of them."""
    return jax.tree.unflatten(jax.tree.structure(variables), jax.tree.leaves(arrays))


# Flax 0.12.7 has a new name for `nnx.pure`, which warns since then.
_arrays: Callable[[PyTree], PyTree] = getattr(nnx, "as_pure", None) or nnx.pure
