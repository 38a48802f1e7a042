"""A window around an optimizer: sum micro-batches, and run the optimizer once on their average.

`accumulate` wraps an optimizer in a `Window`, which has all the arithmetic. `apply_gradients`, `flush` and
`check_window` are the calls of a train step beside `tx.update`.
"""

import difflib
import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from shrewjax._base import arguments, trees
from shrewjax._base.branches import run_if
from shrewjax._base.flax_names import is_of_nnx
from shrewjax._base.mesh import is_traced, on_mesh_of
from shrewjax._base.states import (
    nodes_in,
    note,
    require_one_window,
    require_state_of,
    without_variables,
)
from shrewjax._base.trees import is_gradient
from shrewjax._base.types import (
    AnyState,
    Argument,
    ArrayTree,
    AxisName,
    DType,
    ExtraArgs,
    Flag,
    Function,
    Leaf,
    Number,
    PyTree,
    State,
    Tree,
)
from shrewjax._numerics import floats
from shrewjax._programs.lost_scatters import warn_of_lost_scatters
from shrewjax._skipping.wrapping import (
    Result,
    Step,
    declared_arguments,
    first_step,
    inner_transformation,
    run_step,
    update_of_wrapper,
)
from shrewjax._windows.window import (
    AccumSteps,
    Advanced,
    Nonfinite,
    Reduction,
    Window,
    checked_weight,
)
from shrewjax._windows.window_state import (
    WINDOW_STATES,
    AccumulateState,
    after_average,
    measured,
)


def accumulate(
    inner: optax.GradientTransformation,
    accum_steps: AccumSteps,
    *,
    reduction: Reduction = "mean",
    accumulator_dtype: DType = None,
    nonfinite: Nonfinite = "propagate",
    sum_over: AxisName | None = None,
    sharded_over: AxisName | None = None,
    noise_decay: Number | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Runs an optimizer once per window of `accum_steps` micro-batches, on the average of their gradients.

    .. math:: \bar g = \frac{\sum_i w_i g_i}{\sum_i w_i}

    On the last call of a window, inner runs on the average. On all other calls the updates are zeros, and inner's state
    stays unchanged. Transformations for the large batch, such as clipping, belong inside:
    `accumulate(optax.chain(clip_by_global_norm(1.0), optax.adamw(1e-3)), 4)`.

    `update` takes three more arguments, of which inner receives only the last:

    * `weight=1`: the micro-batch's number of examples or tokens. A real scalar, traced or not: 0, or between 2**-30 and
      2**100. A boolean is 0 or 1. Sums in float32 add whole numbers exactly up to 2**24; use larger units above. With
      `sum_over`, a scalar is the weight of each device's row, and is not divided over them.
    * `flush=False`: closes the window with this call, however many micro-batches it has. A bool, traced or not.
    * `value=None`: the micro-batch's loss, a real scalar. Inner gets the window's, averaged as the gradients are; inf
      if one micro-batch comes without it. Pass `grad=` too if inner needs it, as `optax.lbfgs` does; inner gets the
      average there.

    Inner gets other arguments as they are in the window's last call. So a function of the parameters, such as a line
    search's `value_fn`, Sophia's `obj_fn` or the `grad_fn` of SAM, must be that of the whole window:
    `micro_batched(loss, K)` if the window's batch is at hand. A line search gets its `value_fn` at the parameters as
    `value`, which costs one evaluation, so that a step compares values of one function.

    ================================================  ==========================================================
    condition                                         result
    ================================================  ==========================================================
    a micro-batch of weight 0                         adds nothing, even if its gradient is NaN, but counts towards
                                                      `accum_steps`
    `weight=` in some calls of a window alone         the others weigh 1; pass it in each
    a window of weight 0                              inner does not run, updates are zeros
    a Python or NumPy weight out of range or NaN      an error
    an array's weight, or a sum, out of range         the average is NaN, under every `nonfinite`; a `"sum"` is
                                                      neither multiplied nor divided by it, and stays
    a product w g, or a sum, too large for its dtype  the average is infinite or NaN, under every `nonfinite`
    a product w g below the smallest normal number    may be flushed to 0; larger weights avoid it
    a derivative of the average in reverse mode       NaN if a micro-batch that is not kept has a NaN, because JAX
                                                      multiplies it by 0; let the loss avoid it; forward mode is right
    accum_steps shrinks, by schedule or on resuming   the open window closes at its next step, if it has as many
    a gradient of None where there is a parameter     adds zero
    integer, boolean and key parameters               have no sum and get zero updates; their gradients are of the
                                                      same dtype, float0 or None
    ================================================  ==========================================================

    `nonfinite` decides about a micro-batch whose gradients contain a NaN or an infinity:

    ====================  ======================================================================================
    `"propagate"`         it is added, so the average is non-finite; the next window is clean
    `"drop_micro_batch"`  it gets weight 0; the window closes on schedule, with the average of the others
    `"drop_window"`       the whole window is discarded: zero updates, inner does not run
    `"extend_window"`     it is ignored and does not count towards `accum_steps`
    ====================  ======================================================================================

    Args:
      inner: the transformation to wrap, usually a whole optimizer.
      accum_steps: number of micro-batches per window. An int >= 1, a scalar array, or a function of `windows` (int32)
        that returns such a number, or a float, which is rounded up. In an array, a number below 1 or NaN counts as 1.
      reduction: `"mean"` for gradients of a mean loss: sum(w g) / sum(w), equal to the gradient of the one large
        batch. `"sum_over_weights"` for gradients of a summed loss: sum(g) / sum(w), without micro-batches of weight 0.
        If these have a gradient, as the negatives in detection, pass `jnp.maximum(w, 2.0**-30)`. `"sum"`: sum(g).
      accumulator_dtype: dtype of the sum. By default the wider of float32 and the parameter's dtype, complex for
        complex. Inner gets the average in the wider dtype of gradient and parameter, within 2 ulp of the exact
        quotient. In `flush`, which has no gradient, it is that of sum and parameter (under strict promotion the
        parameter's). Updates come back as inner returns them. In float16, weights that count tokens soon make sums of w
        g overflow.
      nonfinite: the policy of the second table. All but `"propagate"` read the gradients once more, and count such
        micro-batches in `dropped`. To check the average as well, wrap inner in `skip_nonfinite`.
      sum_over: mapped axis or axes along which each device has its own gradients, not yet summed, and its own weight.
        See the guide "Many devices". With `check_vma=False` and in `jax.pmap`, pass `()` if gradients are the same on
        every device, or if each device has a model and a state of its own.
      sharded_over: with `check_vma=False` and in `jax.pmap`, the axes along which devices hold parts of one model's
        gradients. `nonfinite` decides for all of these devices. With `sum_over=()` alone, each decides alone.
      noise_decay: measures the gradient noise scale, with averages of this decay in [0, 1), such as 0.99. A weight then
        counts independent examples, not tokens. See the guide "The noise of a window".

    Returns:
      A transformation with state `AccumulateState`, whose structure, shapes and dtypes never change.

    Raises:
      ValueError: an argument is not as described; `inner` was returned by `accumulate`, or `init` finds an accumulation
        inside it; a gradient does not fit its accumulator's kind; by its type, a gradient is already reduced over
        `sum_over`, or not reduced without it; devices may disagree on when a window closes, and inner has a collective
        over them; `sum_over` is missing or `init` finds no mesh; the state is another transformation's; an extra
        argument that no transformation inside inner declares misspells `weight` or `flush`. `update` only
        warns of `loss` without `value`, and of `last` without `flush`, which `apply_gradients` refuses.
      AssertionError: while tracing: the gradients' structure or a leaf's shape differs from the parameters
        passed to `init`, or inner changes the structure, shapes or dtypes of its state, except for a float that fits
        the old dtype.

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
    if isinstance(inner, Accumulation | optax.MultiSteps):
        raise ValueError(f"inner is itself an accumulation. {_NESTED}")
    wrapped = inner_transformation(inner)
    window = Window(**arguments.among(Window, locals()))

    def init_fn(params: optax.Params) -> AccumulateState:
        inner_state = wrapped.init(params)
        if nested := nodes_in(inner_state, (*WINDOW_STATES, optax.MultiStepsState)):
            raise ValueError(
                f"inner has an accumulation inside, {type(nested[0]).__name__}. {_NESTED}"
            )
        state = AccumulateState(
            **window.init(params)._asdict(), applied=jnp.zeros((), bool), inner_state=inner_state
        )
        state = on_mesh_of(params, state)
        # `from_optax` reads it.
        note(state.micro_step, reduction=reduction, nonfinite=nonfinite)
        return state

    update_fn = update_of_wrapper(AccumulateState, partial(_add_and_run, window, wrapped))
    return Accumulation(init_fn, update_fn)


class Accumulation(optax.GradientTransformationExtraArgs):
    """The transformation that `accumulate` returns. Its type is how `flush` and `accumulate` recognize it."""


def _add_and_run(
    window: Window, inner: optax.GradientTransformationExtraArgs, step: Step
) -> Result:
    """Adds a micro-batch to the window, and runs inner on the average if that closes it."""
    # 1. Take the window's arguments from those of inner, and check them.
    _check_names(inner, step.extra_args)
    state: AccumulateState = step.state
    inner_args = {**step.extra_args}
    weight = checked_weight(inner_args.pop("weight", 1), state)
    value = inner_args.pop("value", None)
    grads = trees.gradient_arrays(step.make_gradients())
    flushes = arguments.flag("flush", inner_args.pop("flush", False))
    warn_of_lost_scatters(grads)
    passes_loss = value is not None
    if isinstance(weight, float) and weight == 0:
        # A call that adds nothing, such as `flush`, needs no value. Inner gets the window's mean if it declares one.
        passes_loss |= "value" in declared_arguments(inner)[0]

    # 2. Add the micro-batch.
    added = window.advance(state, grads, weight, value, flush=flushes, when_full=True)

    # 3. Run inner if the window closes.
    like = window.devices.like_total(grads)
    inner_step = step._replace(state=state.inner_state, extra_args=inner_args)
    run_inner = partial(_run_inner, inner, like, passes_loss, inner_step)
    if window.is_partial:
        returned, new_state = _run_on_total(window, added, inner_step, run_inner)
    else:
        returned, new_state = _run_on_average(window, added, run_inner)
    # 4. Leaves without a sum get zero updates, or keep their parameters.
    return _with_integers(returned, like, state.gradient_sum, step), new_state


def _run_inner(
    inner: optax.GradientTransformation,
    like: ArrayTree,
    passes_loss: bool,
    step: Step,
    gradients: ArrayTree,
    mean_loss: jax.Array,
    runs: Flag,
) -> Result:
    """Runs inner on the window's average and mean loss. `step` is inner's step on the last micro-batch.

    `gradients` are the average in the sums' dtypes. `like` are the gradients of the call, which help to choose the
    average's dtypes (`_as_gradients`).
    """
    # 1. The gradients are cast in the branch that needs them.
    params = trees.parameter_arrays(step.params)
    make_gradients = partial(_as_gradients, gradients, like, params)
    # 2. The loss and the gradient of a micro-batch give way to those of the window.
    extra_args = {**step.extra_args}
    if passes_loss:
        extra_args["value"] = mean_loss
    value_fn = extra_args.get("value_fn")
    if value_fn is not None and nodes_in(step.state, _LINE_SEARCHES):
        of_call = step.extra_args
        value_there = partial(_value_at_params, value_fn, params, of_call, mean_loss)
        extra_args["value"] = run_if(runs, value_there, lambda: mean_loss)
    if extra_args.get("grad") is not None:
        extra_args["grad"] = make_gradients()
    # 3. Inner runs if the window closes.
    step = step._replace(make_gradients=make_gradients, extra_args=extra_args, runs=runs)
    return run_step(inner, step)


_LINE_SEARCHES = optax.ScaleByBacktrackingLinesearchState, optax.ScaleByZoomLinesearchState


def _value_at_params(
    value_fn: Function, params: PyTree, extra_args: ExtraArgs, mean_loss: jax.Array
) -> jax.Array:
    """Returns a line search's function at the parameters, called as Optax calls it.

    A search compares it with what the function returns elsewhere. If the function is that of the last micro-batch, a
    search that began with the window's mean would stop, or step away (tests/windows/test_accumulate.py,
    "last_micro_batch").
    """
    names = inspect.signature(value_fn).parameters.keys() - {"grad", "value_fn"}
    given = {name: x for name, x in extra_args.items() if name in names}
    return jnp.asarray(value_fn(params, **given)).astype(mean_loss.dtype)


RunInner: TypeAlias = Callable[[ArrayTree, jax.Array, Flag], Result]
"""Runs inner on a window's average and mean loss, if the flag is set. Returns what it returns, and its state."""


def _run_on_average(window: Window, added: Advanced, run_inner: RunInner) -> Result:
    """Runs inner if the window closes. `added` has the averaged gradients, so inner itself branches (XLA-2)."""
    state: AccumulateState = added.state
    runs = added.closes & added.has_weight
    applied = jnp.asarray(runs)
    # Only the noise needs a branch, because its norm takes a pass. Other fields are computed in every call, and
    # `after_average` selects them by `applied`.
    measures = runs if state.noise else True
    new = run_if(measures, lambda: measured(window.average(added)), lambda: measured(state))
    state = after_average(state, new, applied)
    returned, inner_state = run_inner(state.gradient_sum, state.loss, runs)
    return returned, state._replace(applied=applied, inner_state=inner_state)


def _run_on_total(window: Window, added: Advanced, inner_step: Step, run_inner: RunInner) -> Result:
    """Runs inner if the window closes, in one branch with the total of its partial sums.

    If inner branched itself, as in `_run_on_average`, each guard and the optimizer would branch, and each branch would
    take the total again.
    """
    # The state if the window stays open, and what a closing one starts from.
    with_micro_batch: AccumulateState = added.state._replace(applied=jnp.zeros((), bool))

    def total_and_run() -> Result:
        # 1. Take the total, and run inner.
        average = window.average(added)
        ran = run_inner(average.gradients, average.loss, True)
        applied = jnp.asarray(average.has_weight)
        if average.has_weight is not True:
            # 2. Without a weight, take back what inner did. XLA-2: select, because XLA copies parameters in a branch
            # within a branch on CUDA (tests/devices/test_accelerators.py, "closing_calls_alone").
            ran = optax.tree.where(applied, ran, inner_step.skipped(ran[0]))
        # 3. Put the new state together.
        returned, inner_state = ran
        state = after_average(with_micro_batch, measured(average), applied)
        sums = window.devices.emptied(state.gradient_sum, average.total, average.gradients)
        state = state._replace(applied=applied, inner_state=inner_state, gradient_sum=sums)
        return returned, state

    # One branch returns all. If the window stays open, `run_or_skip` returns the step's state.
    window_step = inner_step._replace(state=with_micro_batch, runs=added.closes)
    return window_step.run_or_skip(total_and_run)


def _as_gradients(
    gradients: ArrayTree, like: ArrayTree, params: optax.Params | None
) -> optax.Updates:
    """Returns averaged gradients in the wider dtype of gradient and parameter. In float16, Adam's squares overflow.

    For a gradient of None, that is the wider dtype of sum and parameter. Under strict promotion, where JAX refuses to
    add two dtypes, it is the parameter's.
    """
    is_strict = jax.config.jax_numpy_dtype_promotion == "strict"

    def cast(x: jax.Array, grad: Leaf, param: Leaf = None) -> Leaf:
        given = [y for y in (grad, param) if y is not None]
        if not given:
            return x
        if not is_gradient(given[0]):
            return _zero_like(given[0])  # of an integer parameter, or float0
        if grad is None and not is_strict:
            given.append(x)
        target = floats.wider_dtype(*filter(is_gradient, given))
        # An earlier micro-batch may have been complex (tests/windows/test_accumulate.py, "closes_a_complex_window").
        if floats.is_complex(x) and target.kind != "c":
            return x
        return x.astype(target)

    if params is None:
        return jax.tree.map(cast, gradients, like)
    return jax.tree.map(cast, gradients, like, params)


def _with_integers(
    returned: ArrayTree, like: ArrayTree, gradient_sum: ArrayTree, step: Step
) -> ArrayTree:
    """Returns updates with zeros, or new parameters with the old ones, in the leaves that are no gradients.

    Inner's own update there need not be zero, for example with weight decay.

    =============================  ==========  ==========================================================
    the gradient                   parameters  updates
    =============================  ==========  ==========================================================
    floating, or None with a sum   new         new
    other, such as float0          old         zeros of the gradient's dtype
    None without a sum             old         zeros of the parameter's: adding float32 rounds integers
    =============================  ==========  ==========================================================
    """

    def keep(total: Leaf, grad: Leaf, new: PyTree, old: Leaf = None) -> PyTree:
        if is_gradient(total if grad is None else grad):
            return new
        if step.as_params:
            return old
        if grad is not None:
            return _zero_like(grad)
        # Without parameters, `new` is what inner returned, which may be None or another node without leaves.
        return jax.tree.map(_zero_like, new if old is None else jnp.asarray(old))

    if step.params is None:
        return jax.tree.map(keep, gradient_sum, like, returned)
    return jax.tree.map(keep, gradient_sum, like, returned, step.params)


def _zero_like(x: Leaf) -> Leaf:
    """Returns zeros of the same shape and dtype. JAX has no float0 arrays, so those are NumPy's."""
    if x.dtype == jax.dtypes.float0:
        return np.zeros(x.shape, x.dtype)
    return jnp.zeros_like(x)


def _check_names(inner: optax.GradientTransformation, extra_args: ExtraArgs) -> None:
    """Raises if an extra argument misspells `weight` or `flush`, and nothing inside inner declares it.

    Only warns of `loss` and `last`, because trainers pass such arguments to any optimizer.
    """
    if "value_fn" in extra_args:
        return  # a line search hands it the caller's own names, and raises at those that it does not take
    for name in extra_args.keys() - {"weight", "flush", "value"}:
        # 0.8 finds swapped, doubled and missing letters, and a plural.
        own = ("weight", "flush")
        misspelled = difflib.get_close_matches(name.lower(), own, cutoff=0.8)
        meant = next(iter(misspelled), {"loss": "value", "last": "flush"}.get(name))
        if meant is None or name in declared_arguments(inner)[0]:
            continue
        message = f"{name}= is no argument of accumulate. Pass {meant}="
        if misspelled:
            raise ValueError(message)
        if meant not in extra_args:
            warnings.warn(message, stacklevel=2)


_NESTED = "Multiply the accum_steps instead of nesting accumulations"


def apply_gradients(
    tx: optax.GradientTransformation,
    grads: PyTree,
    opt_state: State,
    params: Tree,
    **extra_args: Argument,
) -> tuple[Tree, State]:
    r"""Returns the new parameters and the new state, by `tx.update` and `optax.apply_updates`, for any transformation.

    .. math:: (u_t, s_{t+1}) = \text{update}(g_t, s_t, \theta_t), \qquad \theta_{t+1} = \theta_t + u_t

    If `accumulate` returned `tx`, a call that does not close the window neither reads nor writes parameters and
    updates. An accumulation inside an Optax transformation, such as `optax.chain`, gives the same result without this
    saving.

    Donate parameters and state, and return them in the order of the arguments:
    `step(params, opt_state, ...) -> (params, opt_state)` with `jax.jit(step, donate_argnums=(0, 1))`. Another order
    costs a copy. Keys, and parameters whose gradient is float0, stay unchanged.

    Args:
      tx: any transformation.
      grads: the gradients.
      opt_state: its state.
      params: the parameters.
      **extra_args: passed to `tx.update`. `weight` and `flush` need an accumulation in `tx`, at any depth, or a
        transformation in `tx` that declares them. So do all others, except `value`, `grad` and those that a line
        search hands to `value_fn`. A transformation with `**extra_args` that is not one of Optax may take any. So may
        one that a function of yours makes for `optax.inject_hyperparams`.

    Returns:
      The new parameters and the new state.

    Raises:
      ValueError: `tx` is no transformation; `weight` or `flush` without a window in `opt_state`; an extra argument
        that no transformation in `tx` takes; a parameter is no array or number.
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
    if isinstance(tx, Mapping) or not hasattr(tx, "update"):
        raise ValueError(
            f"tx must be a transformation, got {type(tx).__name__}. Pass tx, grads, opt_state and params, in this order"
        )
    if is_of_nnx(grads) and type(params) is not type(grads):
        raise ValueError(
            f"grads and params must be trees of one kind, got {type(grads).__name__} and {type(params).__name__}. "
            "Pass nnx.state(model, nnx.Param), or call update of shrewjax.flax.Optimizer"
        )
    if params is None:
        raise ValueError("params must be the parameters, got None. Pass them after the state")
    structure: Any = jax.tree.structure(params)
    is_pair = isinstance(grads, tuple) and len(grads) == 2
    if is_pair and structure == jax.tree.structure(grads[1]):
        raise ValueError(
            "grads must be a tree like params, got a pair, such as (value, grads). Pass its second element"
        )
    _require_taken(tx, opt_state, extra_args)
    # `parameter_arrays` leaves integer NumPy arrays alone. Outside of jit, a skipped step would otherwise return the
    # caller's own, which then share memory (tests/promises/test_train_steps.py, "returns_jax_arrays_too").
    params = jax.tree.map(jnp.asarray, trees.parameter_arrays(params))
    step = first_step(grads, opt_state, params, extra_args=extra_args, as_params=True)
    return run_step(tx, step)


def _require_taken(
    tx: optax.GradientTransformation, opt_state: AnyState, extra_args: ExtraArgs
) -> None:
    """Raises if no transformation in `tx` takes an extra argument. Any may get the loss and its gradient."""
    taken = {"value", "grad"}
    if isinstance(tx, Accumulation) or _windows_in(opt_state):
        taken |= {"weight", "flush"}
    if extra_args.keys() <= taken:
        return
    names, takes_any = declared_arguments(tx)
    for name in extra_args.keys() - taken - names:
        if name in ("weight", "flush"):
            raise ValueError(
                f"{name}= needs a window, and opt_state has none. Wrap the optimizer in accumulate. Or leave out "
                f"{name}="
            )
        # A line search hands any argument to `value_fn`.
        if not takes_any and "value_fn" not in extra_args:
            # 0.62 finds `weight` in `sample_weight`, and not `value` in `scale`.
            near = difflib.get_close_matches(name.lower(), taken | names, n=1, cutoff=0.62)
            remedy = " or ".join(f"{x}=" for x in near or sorted(taken))
            raise ValueError(
                f"no transformation in tx takes {name}=. Pass {remedy}. Or leave it out"
            )


def flush(
    tx: optax.GradientTransformation, opt_state: State, params: Tree, **extra_args: Argument
) -> tuple[Tree, State]:
    r"""Closes an open window, at the end of an epoch or of training, with the micro-batches that it has.

    .. math:: \bar g = \frac{\sum_{i \le k} w_i g_i}{\sum_{i \le k} w_i}
              \;\text{ over the } k \text{ micro-batches so far}

    An empty window leaves the parameters as they are, and inner does not run. If inner declares `value`, it gets that
    of these micro-batches. To close a window together with its last micro-batch, pass `flush=True` to `update` instead.
    With `nnx.Optimizer`, call `optimizer.update(model, grads, weight=0, flush=True)`, in which `grads` add nothing.

    Args:
      tx: the transformation that `accumulate` returned. For an accumulation inside another transformation, such as
        `optax.chain`, pass `flush=True` to `update`.
      opt_state: its state.
      params: the parameters.
      **extra_args: passed to the wrapped optimizer.

    Returns:
      The new parameters and the new state, as `apply_gradients`.

    Raises:
      ValueError: `tx` was not returned by `accumulate`, or `opt_state` is not its state.

    Example:
      >>> tx = accumulate(optax.sgd(1.0), 4)
      >>> params = jnp.zeros(2)
      >>> _, state = tx.update(jnp.array([1.0, 2.0]), tx.init(params), params)
      >>> params, state = flush(tx, state, params)
      >>> params
      Array([-1., -2.], dtype=float32)

    Source: by linearity of the gradient, the average is the gradient of the mean loss over these micro-batches alone.
    """
    if not isinstance(tx, Accumulation):
        raise ValueError(
            f"tx must be the transformation of accumulate, got {trees.shown(tx)}. Call flush(tx, opt_state, params). "
            "If accumulate is inside tx, call tx.update(zeros, opt_state, params, weight=0, flush=True)"
        )
    require_state_of(opt_state, AccumulateState, "flush(tx, opt_state, params)")
    no_gradients = jax.tree.map(lambda _: None, params)
    return apply_gradients(tx, no_gradients, opt_state, params, weight=0, flush=True, **extra_args)


def check_window(opt_state: AnyState, accum_steps: int, *, weight: Number = 1) -> None:
    r"""Checks the values in all windows of a state, under `chex.chexify` or outside of jit.

    .. math:: 0 \le \mathrm{micro\_step} < \mathrm{accum\_steps}

    .. math:: \mathrm{weight}, \mathrm{sum\_of\_weights} \in \{0\} \cup [2^{-30}, 2^{100}]

    This must hold in every window. In a full window of `GradAccumulator`, `micro_step` may also be `accum_steps`.
    `accumulate` itself checks all values that are known while tracing, but no others.

    Args:
      opt_state: a state that contains windows, at any depth.
      accum_steps: the length of a window.
      weight: the weight about to be passed to `update`.

    Returns:
      Nothing.

    Raises:
      AssertionError: from chex; under `chex.chexify` when the program runs.
      RuntimeError: from chex, in a jitted function that is not inside `chex.chexify`.
      ValueError: the state contains no window, or one inside a window of `optax.MultiSteps`; `accum_steps` is a
        function.

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
            f"accum_steps must be a number of micro-batches, got {trees.shown(accum_steps)}. Pass "
            "accum_steps(state.windows)"
        )
    require_one_window(without_variables(opt_state))
    windows = _windows_in(opt_state)
    if not windows:
        raise ValueError("opt_state must contain a window of accumulate or GradAccumulator")
    _assert_weight("weight", weight)
    for window in windows:
        _assert_weight("sum_of_weights", window.sum_of_weights)
        longest = accum_steps - isinstance(window, AccumulateState)
        in_range = (window.micro_step >= 0) & (window.micro_step <= longest)
        what = f"micro_step must be between 0 and {longest}, for {accum_steps=}"
        _assert_values(in_range, what, window.micro_step)


def _windows_in(opt_state: AnyState) -> list[AnyState]:
    return nodes_in(without_variables(opt_state), WINDOW_STATES)


def _assert_weight(name: str, weight: Number) -> None:
    in_range = arguments.is_weight(jnp.asarray(weight, dtype=float))
    _assert_values(in_range, f"{name} must be {arguments.RANGE_OF_WEIGHTS}", weight)


def _assert_values(is_valid: Flag, what: str, value: Number) -> None:
    text = f"{what}, got {value}"
    if not is_traced(is_valid) and not jnp.all(is_valid):
        raise AssertionError(text)  # chex would show arrays of flags
    chex.assert_trees_all_equal(is_valid, jnp.ones_like(is_valid), custom_message=text)
