r"""Flax's optimizer, train state and `value_and_grad`, for windows of micro-batches.

Flax is no dependency of the package, and `import shrewjax` does not import it. So import this module by its name,
`import shrewjax.flax`. It has no arithmetic of its own: it takes Flax's objects apart, calls `shrewjax.apply_gradients`
and `shrewjax.value_and_grad`, and puts the results back.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self

import jax
import numpy as np

import shrewjax
from shrewjax._accumulation.value_and_grad import roles_of_arguments
from shrewjax._accumulation.window import Reduction
from shrewjax._base import arguments, trees
from shrewjax._base.mesh import AxisName

try:
    from flax import nnx
    from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
    from flax.training import train_state
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ImportError("shrewjax.flax needs Flax, which is not installed. Run: python -m pip install flax") from error

__all__ = ["Optimizer", "TrainState", "value_and_grad"]


class Optimizer(nnx.Optimizer[Any]):
    r"""An `nnx.Optimizer` whose `update` costs no more than the accumulator while a window is open.

    .. math:: (\theta_{t+1}, s_{t+1}) = \mathrm{apply\_gradients}(g_t, s_t, \theta_t)

    It is made, saved, restored and placed on a mesh as an `nnx.Optimizer`, and has the same attributes. Parameters and
    states after each call are those of `nnx.Optimizer`. That writes all parameters on every call. This one does not
    read or write parameters and optimizer state in an open window, if `accumulate` returned `tx`.

    Donate the model and the optimizer: `@nnx.jit(donate_argnames=("model", "optimizer"))`. Otherwise the step copies
    both.

    `update(model, grads, /, **extra_args)` changes the model's parameters, the optimizer's state and its `step`, which
    counts calls. The number of closed windows is `optimizer.opt_state.windows`.

    Args:
      model: the model, for its parameters.
      tx: any Optax transformation.
      wrt: a filter of variables, the same one as for the gradients, such as `nnx.Param`.
      grads: the gradients, as `nnx.grad` or `shrewjax.flax.value_and_grad` returns them.
      **extra_args: passed to `tx.update`, such as `weight`, `flush` and `value`.

    Returns:
      `update` returns what `shrewjax.metrics` shows of the new state, as arrays by name. A compiled step does not
      compute those that it does not return. `nnx.Optimizer` returns the updates in newer versions. In an open window
      they would be a tree of zeros.

    Raises:
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

    def update(self, model: Any, grads: Any, /, **extra_args: Any) -> dict[str, Any]:
        """Changes parameters and state in place. Returns the measurements. See the class."""
        mode = {"graph": self.graph} if hasattr(self, "graph") else {}  # newer than Flax 0.12.7
        params, its_grads = (_arrays(nnx.state(x, self.wrt, **mode)) for x in (model, grads))
        if jax.tree.leaves(params) and not jax.tree.leaves(its_grads):
            raise ValueError(
                f"grads must hold variables of wrt={self.wrt!r}, got {type(grads).__name__} without one. Pass the "
                "gradients as nnx.grad or shrewjax.flax.value_and_grad returned them, with the same wrt"
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

    It is made by `create`, replicated and saved as Flax's own, and can be subclassed for more fields. In an open window
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

    def apply_gradients(
        self, *, grads: Any, weight: Any = 1, flush: Any = False, value: Any = None, **fields: Any
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
            name: x for name, x in given.items() if isinstance(x, jax.Array) or np.ndim(x) or x != default[name]
        }
        # As in Flax, parameters that their "gradient" overwrites, such as the scales of fp8, are none of `tx`.
        overwrites = isinstance(grads, Mapping) and OVERWRITE_WITH_GRADIENT in grads
        its_grads, params = (grads["params"], self.params["params"]) if overwrites else (grads, self.params)
        params, opt_state = shrewjax.apply_gradients(self.tx, its_grads, self.opt_state, params, **extra_args)
        if overwrites:
            params = {"params": params, OVERWRITE_WITH_GRADIENT: grads[OVERWRITE_WITH_GRADIENT]}
        return self.replace(step=self.step + 1, params=params, opt_state=opt_state, **fields)


def value_and_grad(
    fun: Callable[..., Any],
    micro_batches: int,
    *,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] | None = None,
    weight: Callable[..., Any] | None = None,
    aux: Any = "mean",
    rng_argnums: int | Sequence[int] = (),
    reduction: Reduction = "mean",
    nonfinite: Literal["propagate", "drop_microbatch"] = "propagate",
    accumulator_dtype: Any = None,
    sum_over: AxisName | None = None,
) -> Callable[..., tuple[Any, Any]]:
    r"""Returns `nnx.value_and_grad` of `fun`, computed micro-batch by micro-batch, for batches that do not fit at once.

    .. math:: \ell = \frac{\sum_i w_i \ell_i}{\sum_i w_i}, \qquad \bar g = \frac{\sum_i w_i g_i}{\sum_i w_i}

    The returned function takes the arguments of `fun`, the model first, with the whole batch. `fun` sees one
    micro-batch at a time. All state of the model that is not in `wrt` goes from micro-batch to micro-batch: batch
    statistics, the counts of dropout keys, frozen weights. At the end the model is updated in place. Value, gradients
    and the model are those of K calls of `nnx.value_and_grad`, averaged by weight. A micro-batch of weight 0, or one
    that is dropped, leaves the model's state as it was.

    Everything else is as in `shrewjax.value_and_grad`, with its tables of edge cases. Which examples are in which
    micro-batch, how `aux` is reduced, and what `sum_over` does, stands there. Call it under `nnx.jit`, because outside
    of it each call compiles the loop again. Both of Flax's modes, graph and tree, give the same.

    =========================================  =====================================================================
    you have                                   what to do, or what happens
    =========================================  =====================================================================
    LoRA, frozen layers                        `wrt=nnx.LoRAParam`, or another filter that `nnx.DiffState` takes
    keys or a second model that `fun` changes  pass a tuple such as `(model, rngs)` as the first argument
    a second model that `fun` does not change  leave its position out of `batch_argnums`
    a variable that two modules share          it has one gradient, in graph mode
    `fun` changes a variable in `wrt`          an error, because K calls would differentiate at other points
    `fun` adds variables                       an error; remove them in `fun` with `nnx.pop`, and return them as aux
    `fun` changes a Python attribute           an error; change it before the call
    `sum_over`                                 all devices draw from the same keys, unless each has its own
    =========================================  =====================================================================

    Args:
      fun: the loss function, as for `nnx.value_and_grad`: it takes the model first, and returns a scalar; with
        `has_aux`, a pair of that and anything else.
      micro_batches: K, an int >= 1, into which the examples can be divided.
      wrt: a filter of the variables to differentiate with respect to.
      has_aux: whether `fun` returns a pair.
      batch_argnums: the positions of the arguments that hold examples, where the model has position 0. None: all
        positional arguments except the model and those of `rng_argnums`.
      weight: a function of `fun`'s arguments for one micro-batch, which returns its number of examples or tokens.
      aux: how the aux is reduced: one name for all leaves, or a tree prefix of names.
      rng_argnums: the positions of the arguments that are trees of PRNG keys. Keys in the model need no position.
      reduction: `"mean"` for a mean loss, `"sum_over_weights"` or `"sum"` for a summed one.
      nonfinite: how to treat a non-finite micro-batch.
      accumulator_dtype: dtype of the gradients' sum.
      sum_over: the mapped axis, or axes, over which the batch is divided.

    Returns:
      A function of `fun`'s arguments: `(value, grads)`, or `((value, aux), grads)` with `has_aux`. The gradients are an
      `nnx.State` of variables, as `nnx.value_and_grad` returns them in graph mode.

    Raises:
      ValueError: an argument is not as described; `fun` changes a variable in `wrt`, or adds or removes variables.
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

    Source: by linearity of the gradient, the weighted mean is the large batch's gradient; `flax.nnx.value_and_grad`.
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
    shrewjax.value_and_grad(fun, micro_batches, has_aux=has_aux, weight=weight, **positions, **options)
    given: dict[str, Any] = {
        name: None if at is None else arguments.positions(name, at) for name, at in positions.items()
    }

    def with_model(graphdef: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Calls `function` with a model of the first and the last argument. Returns its result and the state."""
        model = nnx.merge(graphdef, args[0], args[-1])
        returned = function(model, *args[1:-1], **kwargs)
        new_graphdef, *new_arrays = nnx.split(model, wrt, ...)
        new_params, new_state = map(_arrays, new_arrays)
        check_model(new_graphdef == graphdef, (new_params, new_state), (args[0], args[-1]))
        return returned, new_state

    def loss(graphdef: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, Any]]:
        returned, state = with_model(graphdef, fun, *args, **kwargs)
        value, its_aux = returned if has_aux else (returned, ())
        return value, (its_aux, state)

    def value_and_grad_of_batch(model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        # Checked here, because below there is one more argument, which no caller passed (test_flax_arguments.py).
        roles = roles_of_arguments({"wrt": (0,)} | given, 1 + len(args), kwargs)
        for at in roles["batch_argnums"]:
            if isinstance(args[at - 1], nnx.Module):
                kept = tuple(i for i in roles["batch_argnums"] if i != at)
                raise ValueError(
                    f"argument {at} is a model, {type(args[at - 1]).__name__}, and has no axis of examples. If fun "
                    f"does not change it, pass batch_argnums={kept}. Otherwise pass both models as one tuple, as the "
                    "first argument"
                )
        graphdef, *split = nnx.split(model, wrt, ...)
        variables, others = split
        (value, (whole_aux, new_state)), grads = shrewjax.value_and_grad(
            partial(loss, graphdef),
            micro_batches,
            has_aux=True,
            weight=None if weight is None else lambda *args, **kwargs: with_model(graphdef, weight, *args, **kwargs)[0],
            carry_argnum=-1,
            **{name: _before_last(at) for name, at in given.items()},
            **options,
        )(_arrays(variables), *args, _arrays(others), **kwargs)
        nnx.update(model, new_state)
        grads = jax.tree.unflatten(jax.tree.structure(variables), jax.tree.leaves(grads))
        return ((value, whole_aux) if has_aux else value), grads

    return value_and_grad_of_batch


def _before_last(positions: tuple[int, ...] | None) -> Any:
    """Returns positions of arguments with one more argument at the end, which moves those counted from the end."""
    return None if positions is None else tuple(at - (at < 0) for at in positions)


def check_model(is_same_graph: bool, new: tuple[Any, Any], old: tuple[Any, Any]) -> None:
    """Raises if `fun` changed anything that does not go from micro-batch to micro-batch.

    `new` and `old` are the arrays of the model after and before `fun`: those in `wrt`, and all others.
    """
    new_paths, paths = ({path for tree in both for path, _ in jax.tree.leaves_with_path(tree)} for both in (new, old))
    for verb, differing in (("adds", new_paths - paths), ("removes", paths - new_paths)):
        if differing:
            raise ValueError(
                f"fun {verb} the variable {min(map(trees.leaf_name, differing))}, but it has to leave the model with "
                "the variables that it found. Change the model before the call. If fun adds it, remove it in fun with "
                "nnx.pop, and return it as aux"
            )
    for (path, param), new_param in zip(jax.tree.leaves_with_path(old[0]), jax.tree.leaves(new[0]), strict=True):
        if new_param is not param:
            raise ValueError(
                f"fun changes the variable {trees.leaf_name(path)}, which is in wrt, so that the micro-batches would "
                "not be differentiated at the same point. Leave it out of wrt. Or call nnx.value_and_grad and "
                "shrewjax.flax.Optimizer.update for each micro-batch"
            )
    if not is_same_graph:
        raise ValueError(
            "fun changes the model beside its variables, such as a Python attribute, and the change would be lost. "
            "Change it before the call, for example with model.train()"
        )


# Flax 0.12.7 has a new name for `nnx.pure`, which warns since then.
_arrays: Callable[[Any], Any] = getattr(nnx, "as_pure", None) or nnx.pure
