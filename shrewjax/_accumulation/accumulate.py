"""A window around an optimizer: sum micro-batches, and run the optimizer once on their average.

`accumulate` wraps an optimizer in a `Window`, which has all the arithmetic. `apply_gradients`, `flush` and
`check_window` are the calls of a train step beside `tx.update`.
"""

import difflib
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from shrewjax._accumulation._micro_batch import emptied_rows, without_rows
from shrewjax._accumulation.window import (
    WINDOW_STATES,
    AccumSteps,
    AccumulateState,
    Nonfinite,
    Reduction,
    Window,
    WindowStep,
)
from shrewjax._base import arguments, trees
from shrewjax._base.branches import Flag, run_if
from shrewjax._base.mesh import AxisName
from shrewjax._base.states import State, increment_if, require_own, without_variables
from shrewjax._base.trees import Tree, is_gradient
from shrewjax._numerics import floats
from shrewjax._skipping.wrapping import (
    MakeGradients,
    Params,
    inner_transformation,
    run_or_skip,
    update_or_apply,
    wrapper,
)


def accumulate(
    inner: optax.GradientTransformation,
    accum_steps: AccumSteps,
    *,
    reduction: Reduction = "mean",
    accumulator_dtype: Any = None,
    nonfinite: Nonfinite = "propagate",
    sum_over: AxisName | None = None,
    noise_decay: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Runs an optimizer once per window of `accum_steps` micro-batches, on the average of their gradients.

    .. math:: \bar g = \frac{\sum_i w_i g_i}{\sum_i w_i}

    On the last call of a window, inner runs on the average. On all other calls the updates are zeros, and inner's state
    stays unchanged. Transformations for the large batch, such as clipping, belong inside:
    `accumulate(optax.chain(clip_by_global_norm(1.0), optax.adamw(1e-3)), 4)`.

    `update` takes three more arguments. Inner does not receive the first two:

    * `weight=1`: the micro-batch's number of examples or tokens. A real scalar, traced or not: 0, or between 2**-30 and
      2**100. A boolean is 0 or 1. Sums in float32 add whole numbers exactly up to 2**24; use larger units above.
    * `flush=False`: closes the window with this call, however many micro-batches it has. A bool, traced or not.
    * `value=None`: the micro-batch's loss, a real scalar. Inner gets the window's, averaged as the gradients are. If
      one micro-batch comes without a `value`, it is inf. Pass `grad=` too if inner needs it, as `optax.lbfgs` does;
      inner gets the average there.

    ================================================  ==========================================================
    condition                                         result
    ================================================  ==========================================================
    a micro-batch of weight 0                         adds nothing, even if its gradient is NaN, but counts towards
                                                      `accum_steps`
    a window of weight 0                              inner does not run, updates are zeros
    a Python or NumPy weight out of range or NaN      an error
    a weight sum that is out of range or NaN          the average is NaN; a `"sum"` is not divided and not affected
    a product w g, or a sum, too large for its dtype  the average is infinite or NaN, under every `nonfinite`
    a product w g below the smallest normal number    may be flushed to 0; larger weights avoid it
    accum_steps = 1                                   inner runs on every call
    accum_steps shrinks, by schedule or on resuming   the open window closes at its next step, if it has as many
    a gradient of None where there is a parameter     adds zero
    integer, boolean and key parameters               have no sum and get zero updates; their gradients are of the
                                                      same dtype, float0 or None
    ================================================  ==========================================================

    `nonfinite` decides about a micro-batch whose gradients contain a NaN or an infinity:

    ====================  ======================================================================================
    `"propagate"`         it is added like any other, so the average is non-finite; the next window is clean
    `"drop_microbatch"`   it gets weight 0; the window closes on schedule, with the average of the others
    `"drop_window"`       the whole window is discarded: zero updates, inner does not run
    `"extend_window"`     it is ignored and does not count towards `accum_steps`
    ====================  ======================================================================================

    Args:
      inner: the transformation to wrap, usually a whole optimizer.
      accum_steps: number of micro-batches per window. An int >= 1, a scalar array, or a function of `windows` (int32)
        that returns such a number, or a float, which is rounded up. In an array, a number below 1 or NaN counts as 1.
      reduction: `"mean"` for gradients of a mean loss: sum(w g) / sum(w), equal to the gradient of the one large
        batch. `"sum_over_weights"` for gradients of a summed loss: sum(g) / sum(w). `"sum"`: sum(g).
      accumulator_dtype: dtype of the sum. By default the wider of float32 and the parameter's dtype, complex for
        complex. Inner gets the average cast to the gradient's dtype, within 2 ulp of the exact quotient. In float16,
        sums of w g overflow beyond 65504, which weights that count tokens reach soon.
      nonfinite: the policy of the second table, counted in `dropped`. All but `"propagate"` read the gradients once
        more. To check the average as well, wrap inner in `skip_nonfinite`.
      sum_over: mapped axis or axes along which each device has its own gradients, not yet summed, and its own weight.
        Both cross the network once a window: see the guide "Many devices". Pass `()` if gradients are the same on
        every device, which types do not record with `check_vma=False` and in `jax.pmap`.
      noise_decay: measures the gradient noise scale, with this decay of its averages in [0, 1), such as 0.99: see the
        guide "The noise of a window". A weight then counts independent examples, not tokens.

    Returns:
      A transformation with state `AccumulateState`, whose structure, shapes and dtypes never change.

    Raises:
      ValueError: an argument is not as described; `inner` was returned by `accumulate`; a gradient does not fit its
        accumulator's kind; by its type, a gradient is already reduced over `sum_over`, or not reduced without it;
        devices may disagree on when a window closes; `sum_over` is missing or `init` finds no mesh; the state is
        another transformation's; an extra argument that inner does not declare has a similar name, such as `weights`.
      AssertionError: while tracing: the gradients' structure or a leaf's shape differs from the parameters
        passed to `init`, or inner changes the structure, shapes or dtypes of its state.

    Example:
      >>> tx = accumulate(optax.sgd(1.0), 2)
      >>> params = jnp.zeros(2)
      >>> state = tx.init(params)
      >>> updates, state = tx.update(jnp.array([1.0, 2.0]), state, params)
      >>> updates, state.micro_step
      (Array([0., 0.], dtype=float32), Array(1, dtype=int32))
      >>> updates, state = tx.update(jnp.array([5.0, 6.0]), state, params, weight=3)
      >>> updates, state.windows
      (Array([-4., -5.], dtype=float32), Array(1, dtype=int32))

    Source: by linearity of the gradient, the weighted mean is the large batch's gradient. The mean of means is not, see
    "Bugs in LLM Training - Gradient Accumulation Fix", Unsloth, 2024.
    """
    # The docstring has more than 70 lines, because its tables and its arguments are promises that tests hold.
    if isinstance(inner, Accumulation):
        raise ValueError("inner is itself an accumulation. Multiply the accum_steps instead of nesting accumulations")
    wrapped = inner_transformation(inner)
    window = Window(
        accum_steps,
        reduction=reduction,
        accumulator_dtype=accumulator_dtype,
        nonfinite=nonfinite,
        sum_over=sum_over,
        noise_decay=noise_decay,
    )

    def init_fn(params: optax.Params) -> AccumulateState:
        return AccumulateState(
            **window.init(params)._asdict(), applied=jnp.zeros((), bool), inner_state=wrapped.init(params)
        )

    def advance_and_run(
        make_gradients: MakeGradients, state: AccumulateState, params: Params, apply: bool, extra_args: dict[str, Any]
    ) -> tuple[Any, AccumulateState]:
        inner_args = {"weight": 1, "flush": False, "value": None} | extra_args
        weight, flush, value = (inner_args.pop(name) for name in ("weight", "flush", "value"))
        grads, closes = make_gradients(), arguments.flag("flush", flush)
        # A call of weight 0, such as `flush`, needs no value. Inner then gets the mean value of the window so far.
        adds_nothing = not isinstance(weight, jax.Array) and np.ndim(weight) == 0 and weight == 0
        takes_value = value is not None or (adds_nothing and _takes_value(wrapped))
        step = window.advance(state, grads, weight, value, flush=closes, when_full=True)
        like = without_rows(trees.gradient_arrays(grads), window.axes)
        call = _Inner(wrapped, state.inner_state, params, like, apply, takes_value, inner_args)
        run = _run_on_rows if window.axes else _run_on_average
        returned, after = run(window, step, state.value, call)
        windows = increment_if(after.applied, state.windows)
        new_state = step.state._replace(windows=windows, **after._asdict())
        return _with_integers(returned, like, state.gradient_sum, params, apply), new_state

    def step_fn(
        make_gradients: MakeGradients,
        state: AccumulateState,
        params: Params,
        extra_args: dict[str, Any],
        *,
        apply: bool,
        runs: Flag,
    ) -> tuple[Any, AccumulateState]:
        require_own(state, AccumulateState)
        _check_names(wrapped, extra_args)
        run = partial(advance_and_run, make_gradients, state, params, apply, extra_args)
        return run_or_skip(runs, run, state, params, apply=apply, what_changed="the accumulation's state changed")

    return Accumulation(init_fn, wrapper(step_fn))


def _check_names(inner: optax.GradientTransformation, extra_args: Mapping[str, Any]) -> None:
    """Raises if an extra argument is a near miss of one that `accumulate` takes, which inner would get unnoticed."""
    taken = ("weight", "flush", "value", "grad")
    for name in extra_args.keys() - {*taken}:
        # 0.8 finds swapped, doubled and missing letters, and a plural. Optax's own `value_fn` and `grad_fn` are below.
        for meant in difflib.get_close_matches(name, taken, n=1, cutoff=0.8):
            if not _declares(inner, name):
                raise ValueError(
                    f"{name}= is no argument of accumulate, and near {meant}=. Pass {meant}=. If a transformation "
                    f"inside inner takes {name}=, let inner's own update declare it, or give it another name"
                )


def _declares(tx: optax.GradientTransformation, name: str) -> bool:
    """Returns whether the transformation's own `update` names this argument, so that it does not vanish.

    A chain or a guard hides what the transformations inside it declare.
    """
    return name in inspect.signature(tx.update).parameters


class Accumulation(optax.GradientTransformationExtraArgs):
    """The transformation that `accumulate` returns. Its type is how `flush` and `accumulate` recognize it."""


class _Inner(NamedTuple):
    """The wrapped optimizer, and what it gets in one call beside the average."""

    tx: optax.GradientTransformationExtraArgs
    state: Any
    params: Params
    like: chex.ArrayTree  # the call's gradients, whose dtypes the average gets
    apply: bool
    takes_value: bool
    extra_args: dict[str, Any]

    def run(self, average: chex.ArrayTree, mean_value: jax.Array, runs: Flag) -> tuple[Any, Any]:
        """Returns the updates (the new parameters if `apply`) and the new state, unchanged unless it `runs`."""
        params = trees.parameter_arrays(self.params)

        def of_average() -> optax.Updates:
            return _as_gradients(average, self.like, params)

        extra = self.extra_args | ({"value": mean_value} if self.takes_value else {})
        if extra.get("grad") is not None:
            extra["grad"] = of_average()
        return update_or_apply(self.tx, of_average, self.state, self.params, extra, apply=self.apply, runs=runs)

    def unchanged(self, returned: Any) -> tuple[Any, Any]:
        """Returns the result of a step that does not run, with updates like `returned`."""
        return self.params if self.apply else optax.tree.zeros_like(returned), self.state


def _takes_value(tx: optax.GradientTransformationExtraArgs) -> bool:
    """Returns whether `update` takes a `value`. `optax.contrib.sam` has other extra arguments, and raises at one."""
    parameters = inspect.signature(tx.update).parameters
    return "value" in parameters or any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values())


class _After(NamedTuple):
    """The fields of the state that depend on whether inner ran."""

    inner_state: Any
    applied: jax.Array
    gradient_sum: chex.ArrayTree
    value: jax.Array
    noise: Any


def _run_on_average(window: Window, step: WindowStep, value: jax.Array, inner: _Inner) -> tuple[Any, _After]:
    """Runs inner if the window closes. `step` has the average already, so inner itself branches (XLA-2)."""
    average, noise = step.state.gradient_sum, step.state.noise
    applied = jnp.asarray(step.has_average)
    if noise:  # in a branch, because the norm of the average takes a pass
        value, noise = run_if(step.has_average, lambda: window.average(step)[2:], lambda: (value, step.state.noise))
    elif step.has_average is not False:
        value = jnp.where(applied, window.average(step).value, value)
    returned, inner_state = inner.run(average, value, step.has_average)
    return returned, _After(inner_state, applied, average, value, noise)


def _run_on_rows(window: Window, step: WindowStep, value: jax.Array, inner: _Inner) -> tuple[Any, _After]:
    """Runs inner if the window closes, in one branch with the sum of the per-device rows over devices."""
    rows, noise = step.state.gradient_sum, step.state.noise

    def reduce_and_run() -> tuple[Any, _After]:
        average = window.average(step)
        ran = inner.run(average.gradients, average.value, True)
        measured = average.value, average.noise
        if average.has_weight is not True:
            # XLA-2: select, because XLA copies parameters and state in a branch within a branch on CUDA
            # (tests/devices/test_accelerators.py).
            ran = optax.tree.where(average.has_weight, ran, inner.unchanged(ran[0]))
            measured = optax.tree.where(average.has_weight, measured, (value, noise))
        emptied = emptied_rows(rows, average.gradients, window.axes or ())
        return ran[0], _After(ran[1], jnp.asarray(average.has_weight), emptied, *measured)

    idle = _After(inner.state, jnp.zeros((), bool), rows, value, noise)
    return run_or_skip(step.has_average, reduce_and_run, idle, inner.params, apply=inner.apply)


def _as_gradients(average: chex.ArrayTree, like: chex.ArrayTree, params: optax.Params | None) -> optax.Updates:
    """Returns the average in the gradients' dtypes, or in the parameters' if a gradient is None."""

    def cast(x: jax.Array, grad: Any, param: Any = None) -> Any:
        grad = param if grad is None else grad
        if grad is None:
            return x
        if not is_gradient(grad):
            return _zero_like(grad)
        return x if floats.is_complex(x) and not floats.is_complex(grad) else x.astype(grad.dtype)

    return jax.tree.map(cast, average, like) if params is None else jax.tree.map(cast, average, like, params)


def _with_integers(
    returned: chex.ArrayTree,
    like: chex.ArrayTree,
    gradient_sum: chex.ArrayTree,
    params: optax.Params | None,
    apply: bool,
) -> chex.ArrayTree:
    """Returns updates with zeros, or new parameters with the old ones, in the leaves that are no gradients.

    These are integers, keys, and leaves whose gradient is float0. If the gradient of an integer parameter is None,
    inner may have made an update of it, such as a weight decay. Its zero has the parameter's dtype, because a float32
    zero would round a large integer.
    """

    def keep(total: Any, grad: Any, new: Any, old: Any = None) -> Any:
        if is_gradient(total) if grad is None else is_gradient(grad):
            return new
        if apply:
            return old
        return jax.tree.map(_zero_like, (new if old is None else jnp.asarray(old)) if grad is None else grad)

    trees = (returned,) if params is None else (returned, params)
    return jax.tree.map(keep, gradient_sum, like, *trees)


def _zero_like(x: Any) -> Any:
    """Returns zeros of the same shape and dtype. JAX has no float0 arrays, so those are NumPy's."""
    return np.zeros(x.shape, x.dtype) if x.dtype == jax.dtypes.float0 else jnp.zeros_like(x)


def apply_gradients(
    tx: optax.GradientTransformation,
    grads: Any,
    opt_state: State,
    params: Tree,
    **extra_args: Any,
) -> tuple[Tree, State]:
    r"""Calls `tx.update` and `optax.apply_updates` in one, for any Optax transformation.

    .. math:: (u_t, s_{t+1}) = \text{update}(g_t, s_t, \theta_t), \qquad \theta_{t+1} = \theta_t + u_t

    If `accumulate` returned `tx`, a call that does not close the window touches only the accumulator. It neither reads
    nor writes updates and parameters. Tests check this in programs compiled for CPU, GPU and TPU. An accumulation
    inside an Optax transformation, such as `optax.chain`, gives the same result without this saving.

    Donate parameters and state. The step has to return them in the order in which it takes them, such as
    `step(params, opt_state, ...) -> (params, opt_state)` with `jax.jit(step, donate_argnums=(0, 1))`. JAX pairs donated
    buffers with results in order, and a wrong pair costs a copy. Keys, and parameters whose gradient is float0, stay
    unchanged.

    Args:
      tx: any transformation.
      grads: the gradients.
      opt_state: its state.
      params: the parameters.
      **extra_args: passed to `tx.update`, `weight` and `flush` included. These two need an accumulation in `tx`, at any
        depth, unless `tx.update` itself declares them.

    Returns:
      The new parameters and the new state.

    Raises:
      ValueError: `weight` or `flush` without a window in `opt_state`; a parameter is no array or number.
      Exception: an error of `tx.update`.

    Example:
      >>> tx = accumulate(optax.sgd(1.0), 2)
      >>> params = jnp.zeros(2)
      >>> state = tx.init(params)
      >>> params, state = apply_gradients(tx, jnp.array([1.0, 2.0]), state, params)
      >>> params, state = apply_gradients(tx, jnp.array([3.0, 4.0]), state, params)
      >>> params
      Array([-2., -3.], dtype=float32)

    Source: the result is that of `tx.update` and `optax.apply_updates`, Optax's own two calls.
    """
    wanted = [name for name in ("weight", "flush") if name in extra_args and not _declares(tx, name)]
    if wanted and not isinstance(tx, Accumulation) and not _windows_in(opt_state):
        raise ValueError(
            f"{wanted[0]}= needs a window, and opt_state has none. Wrap the optimizer in accumulate. Or leave out "
            f"{wanted[0]}="
        )
    # `parameter_arrays` leaves integer NumPy arrays alone. Outside of jit, a skipped step would otherwise return the
    # caller's own, which then share memory (tests/promises/test_train_steps.py, "returns_jax_arrays_too").
    params = jax.tree.map(jnp.asarray, trees.parameter_arrays(params))
    return update_or_apply(tx, lambda: grads, opt_state, params, extra_args, apply=True, runs=True)


def flush(tx: optax.GradientTransformation, opt_state: State, params: Tree, **extra_args: Any) -> tuple[Tree, State]:
    r"""Closes an open window, at the end of an epoch or of training, with the micro-batches that it has.

    .. math:: \bar g = \frac{\sum_{i \le k} w_i g_i}{\sum_{i \le k} w_i}
              \;\text{ over the } k \text{ micro-batches so far}

    The divisor is the window's weight so far, not `accum_steps`. For an empty window, the updates are zeros and inner
    does not run. To close a window together with its last micro-batch, pass `flush=True` to `update` instead. With
    `nnx.Optimizer`, which holds state and parameters as variables, call
    `optimizer.update(model, grads, weight=0, flush=True)`. At weight 0 any gradients add nothing. If inner takes the
    loss, it gets the mean `value` of these micro-batches.

    Args:
      tx: the transformation that `accumulate` returned. An accumulation inside another transformation (`optax.chain`,
        `optax.masked`, `optax.inject_hyperparams`) cannot be flushed from outside, because the outer one would process
        a gradient that does not exist. There, pass `flush=True` to `update`, as above.
      opt_state: its state.
      params: the parameters. The average is cast to their dtypes.
      **extra_args: passed to the wrapped optimizer.

    Returns:
      The updates and the new state.

    Raises:
      ValueError: `tx` was not returned by `accumulate`.

    Example:
      >>> tx = accumulate(optax.sgd(1.0), 4)
      >>> params = jnp.zeros(2)
      >>> _, state = tx.update(jnp.array([1.0, 2.0]), tx.init(params), params)
      >>> updates, state = flush(tx, state, params)
      >>> updates
      Array([-1., -2.], dtype=float32)

    Source: by linearity of the gradient, the average is the gradient of the mean loss over these micro-batches alone.
    """
    if not isinstance(tx, Accumulation):
        raise ValueError(
            f"tx must be the transformation that accumulate returned, got {tx!r}. If accumulate is inside another "
            "transformation, pass flush=True to update with the last micro-batch. Or call "
            "tx.update(grads, opt_state, params, weight=0, flush=True) with any finite grads, which add nothing"
        )
    no_gradients = jax.tree.map(lambda _: None, params)
    return tx.update(no_gradients, opt_state, params, weight=0, flush=True, **extra_args)


def check_window(opt_state: Any, accum_steps: int, *, weight: Any = 1) -> None:
    r"""Checks the values in all windows of a state, under `chex.chexify` or outside of jit.

    .. math:: 0 \le \mathrm{micro\_step} < \mathrm{accum\_steps}

    .. math:: 0 \le \mathrm{weight\_sum} < \infty, \qquad 0 \le \mathrm{weight} < \infty

    This must hold in every window. A full window of `GradAccumulator` waits for `take`, so its `micro_step` may also be
    `accum_steps`. `accumulate` itself always checks shapes, dtypes and all values that are known while tracing. Other
    values can only be checked when the program runs.

    Args:
      opt_state: a state that contains windows, at any depth.
      accum_steps: the length of a window.
      weight: the weight about to be passed to `update`.

    Returns:
      Nothing.

    Raises:
      AssertionError: from chex; under `chex.chexify` when the program runs.
      RuntimeError: from chex, in a jitted function that is not inside `chex.chexify`.
      ValueError: the state contains no window; `accum_steps` is a function.

    Example:
      >>> tx = accumulate(optax.sgd(0.1), 2)
      >>> def step(grads, state, weight):
      ...     check_window(state, 2, weight=weight)
      ...     return tx.update(grads, state, weight=weight)
      >>> step = chex.chexify(jax.jit(step, donate_argnums=1))
      >>> updates, state = step(jnp.ones(2), tx.init(jnp.zeros(2)), 3.0)
      >>> chex.block_until_chexify_assertions_complete()

    Source: the checks are value assertions of chex, with the contract of `chex.chexify`.
    """
    if callable(accum_steps):
        raise ValueError(
            f"accum_steps must be a number of micro-batches, got {accum_steps!r}. Pass the schedule's value for this "
            "window, accum_steps(state.windows)"
        )
    windows = _windows_in(opt_state)
    if not windows:
        raise ValueError("opt_state must contain a window of accumulate or GradAccumulator, got a state with no window")
    is_valid = jnp.isfinite(weight) & (jnp.asarray(weight, dtype=float) >= 0)
    _assert_values(is_valid, f"weight must be finite and >= 0, got {weight}")
    for window in windows:
        longest = accum_steps - isinstance(window, AccumulateState)
        in_range = (window.micro_step >= 0) & (window.micro_step <= longest)
        _assert_values(in_range, f"micro_step must be between 0 and {longest}")
        _assert_values(jnp.isfinite(window.weight_sum) & (window.weight_sum >= 0), "weight_sum must be finite and >= 0")


def _windows_in(opt_state: Any) -> list[Any]:
    """Returns the windows in a state, at any depth."""
    nodes = jax.tree.leaves(without_variables(opt_state), is_leaf=lambda x: isinstance(x, WINDOW_STATES))
    return [x for x in nodes if isinstance(x, WINDOW_STATES)]


def _assert_values(is_valid: jax.Array, message: str) -> None:
    chex.assert_trees_all_equal(is_valid, jnp.ones_like(is_valid), custom_message=message)
