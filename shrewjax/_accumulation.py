"""The accumulation window: sum micro-batches, then let the optimizer see their average once.

`GradAccumulator` is the window alone and holds all of its arithmetic; `accumulate` wraps an optimizer in one.
"""

from typing import Annotated, Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from shrewjax import _arguments, _floats, _gradients
from shrewjax._gradients import Tree, is_gradient
from shrewjax._mesh import AxisName
from shrewjax._states import State, described, fields
from shrewjax._window import (
    AccumSteps,
    GradAccumulator,
    GradAccumulatorState,
    Nonfinite,
    Reduction,
    increment_if,
    metrics_of_window,
    zero_like,
)
from shrewjax._wrapping import (
    Flag,
    Gradients,
    check_unchanged,
    inner_transformation,
    run_or_skip,
    update_or_apply,
    wrapper,
)


@described
class AccumulateState(NamedTuple):
    """A window and the wrapped optimizer. Its fields are a file format: a change to them breaks checkpoints."""

    micro_step: Annotated[jax.Array, "int32 (): micro-batches in the open window"]
    windows: Annotated[jax.Array, "int32 (): windows so far in which inner ran"]
    applied: Annotated[jax.Array, "bool (): the last call ran inner"]
    weight_sum: Annotated[jax.Array, "float32 or float64 (), or (devices,): weight of the open window"]
    window_bad: Annotated[jax.Array, "bool (): the open window is to be discarded"]
    dropped: Annotated[jax.Array, "int32 (): non-finite micro-batches met so far, unless they propagate"]
    gradient_sum: Annotated[
        Any,
        "like the parameters, with a leading axis of all devices where there is a sum_over, in the accumulator's "
        "dtype; meaningless while micro_step is 0",
    ]
    inner_state: Annotated[Any, "the wrapped optimizer's state"]

    def metrics(self) -> dict[str, Any]:
        """Returns what `shrewjax.metrics` shows."""
        return metrics_of_window(self) | fields(self, "applied")


def accumulate(
    inner: optax.GradientTransformation,
    accum_steps: AccumSteps,
    *,
    reduction: Reduction = "mean",
    accumulator_dtype: Any = None,
    nonfinite: Nonfinite = "propagate",
    sum_over: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Lets an optimizer see the average of `accum_steps` micro-batches' gradients, once.

    .. math:: \bar g = \frac{\sum_i w_i g_i}{\sum_i w_i}

    On all but the last call of a window the updates are zeros, and neither inner's state nor its counters and
    schedules move. On the last one inner gets the average. The optimizer is wrapped, not preceded: an optimizer with a
    state must not see the calls that do not close a window. Put what belongs to the large batch, such as clipping,
    inside: `accumulate(optax.chain(clip_by_global_norm(1.0), optax.adamw(1e-3)), 4)`.

    `update` takes two more arguments, which are not passed on:

    * `weight=1`: the micro-batch's number of examples or tokens, a real scalar, also traced: 0, or between 2**-30 and
      2**100. Weights are summed in float32 (in float64 beside a float64 sum), so whole numbers count exactly to 2**24.
      Above that a weight of 1 is lost: count in larger units, such as batches, or sum in float64.
    * `flush=False`: closes the window with this call, however many micro-batches it has. A bool, also traced.

    ================================================  ==========================================================
    what happens                                      result
    ================================================  ==========================================================
    a micro-batch of weight 0                         contributes nothing, whatever its gradient holds; is a step
    a window of weight 0                              inner is not run, updates are zeros
    a known weight that is out of range or NaN        an error
    a weight sum that is out of range or NaN          the average is NaN; a `"sum"` is not divided, and stays
    a product w g, or a sum, too large for its dtype  the average is infinite or NaN, under every `nonfinite`
    a product w g below the smallest normal number    may count as 0; larger weights avoid it
    accum_steps = 1                                   what inner does, on every call
    accum_steps shrinks, by schedule or on resuming   the open window closes when it has that many or more
    a gradient of None where there is a parameter     adds zero
    integer, boolean and key parameters               hold no sum, get zero updates; gradients of the same, or float0
    ================================================  ==========================================================

    A micro-batch whose gradients hold a NaN or an infinity, by `nonfinite`:

    ====================  ======================================================================================
    `"propagate"`         is taken as it is: the average is what arithmetic says, and the next window is clean
    `"drop_microbatch"`   weighs 0; the window closes on schedule, over the others
    `"drop_window"`       takes the whole window with it: zero updates, inner is not run
    `"extend_window"`     is as if it had never come: the window waits for another
    ====================  ======================================================================================

    `nonfinite` looks at the gradients alone. `skip_nonfinite` inside, around the optimizer, looks at the average.

    What surprises: unknown keywords go to inner, as everywhere in Optax, so a misspelt `weights=` is not noticed here.
    A gradient tree of `None`s is a micro-batch of zeros; to close a window without one, use `flush`.
    `optax.masked(accumulate(...), mask)` lets the raw gradients of masked-out leaves through on every call. A link
    after `accumulate` in a chain moves on every call. A line search, or a rule that looks at the loss, sees the
    `value` of the closing call.

    Args:
      inner: the transformation to wrap, usually a whole optimizer.
      accum_steps: calls a window. An int >= 1, a scalar array, or a function of `windows` (int32) that returns one, or
        a float, which is rounded up. In an array, a number below 1 or NaN counts as 1.
      reduction: `"mean"` for gradients of a mean loss: sum(w g) / sum(w), equal to the gradient of the one large
        batch. `"sum_over_weights"` for gradients of a summed loss: sum(g) / sum(w). `"sum"`: sum(g).
      accumulator_dtype: dtype of the sum; by default the wider of float32 and the parameter's (complex for complex).
        The average is cast to the gradient's dtype on its way into inner, within 2 ulp of the exact quotient.
      nonfinite: what to do with a bad micro-batch, see above; counted in the state as `dropped`. All but `"propagate"`
        read the gradients once more.
      sum_over: the mapped axis, or axes, over which the gradients are still to be summed, see below. `()` says that
        they are the same on every device, which must be said where no type tells it (`check_vma=False`, `jax.pmap`).

    Many devices: where the gradients come reduced, as under `jax.jit`, there is nothing to do, and every micro-step
    costs an all-reduce. With `sum_over="data"` each device adds up its own gradients, and sum(w g) and sum(w) cross
    the network once a window, when it closes, in one all-reduce:

    * in `jax.shard_map` over that axis the gradients are a device's own, and `weight` is its own number of examples (of
      all devices that share its batch, where parameters are sharded over other axes: what the loss is divided by). By
      default JAX reduces the gradient of replicated parameters as it makes it; to keep it local, let
      `own = jax.lax.pcast(params, "data", to="varying")` and then take `jax.grad(loss)(own)`. Under `check_vma=False`
      it is local already; do not accumulate over an axis that parameters are sharded over.
    * under plain `jax.jit` the gradients, as made by `jax.vmap`, have a leading axis with a row for each device, and
      `weight` is a scalar or a vector of them.
    * in `jax.vmap(..., axis_name="data")` each row is such a device; map `init` likewise.

    The sums and the weight in the state have such a leading axis, sharded over `sum_over`: `init` finds its size from
    parameters that are placed on a mesh, or from `jax.set_mesh`; `state_specs` has the specs for `shard_map`;
    `redistribute` moves a state to another number of devices. If `nonfinite` is not `"propagate"`, one flag is reduced
    on every micro-step: a micro-batch that is bad on one device is bad on all. Parameters may be sharded over other
    axes of the mesh. The transformations inside see the average, the same on every device along `sum_over`: where they
    need `sharded_over` (`check_vma=False`, `jax.pmap`), it is that of the parameters' shards, or `()`.

    Returns:
      A transformation with state `AccumulateState`, whose structure, shapes and dtypes never change.

    Raises:
      ValueError: an argument is not as described; `inner` is itself what `accumulate` returned; a complex gradient
        comes for a real accumulator, an integer one for a floating parameter; a gradient is known to be reduced over
        `sum_over` already, or, without it, known not to be; devices may differ on when a window closes; no type tells
        whether gradients are reduced, and `sum_over` is missing; `init` does not find the mesh.
      AssertionError: from chex, while tracing: the gradients' structure or a leaf's shape differs from the parameters
        given to `init`, or inner changes the structure, shapes or dtypes of its state.

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

    The weighted mean is the large batch's gradient by linearity; the mean of means is not, see "Bugs in LLM Training -
    Gradient Accumulation Fix", Unsloth, 2024.
    """
    if isinstance(inner, _Accumulation):
        raise ValueError("inner is itself an accumulation: multiply the accum_steps instead of nesting them")
    wrapped = inner_transformation(inner)
    window = GradAccumulator(
        accum_steps,
        reduction=reduction,
        accumulator_dtype=accumulator_dtype,
        nonfinite=nonfinite,
        sum_over=sum_over,
    )

    def init_fn(params: optax.Params) -> AccumulateState:
        return AccumulateState(
            **window.init(params)._asdict(), applied=jnp.zeros((), bool), inner_state=wrapped.init(params)
        )

    def step_fn(
        gradients: Gradients,
        state: AccumulateState,
        params: optax.Params | None,
        /,
        *,
        apply: bool,
        runs: Flag,
        **extra_args: Any,
    ) -> tuple[Any, AccumulateState]:
        def run() -> tuple[Any, AccumulateState]:
            return advance_and_run(gradients(), state, params, apply=apply, **extra_args)

        return run_or_skip(runs, run, state, params, apply=apply)

    def advance_and_run(
        grads: optax.Updates,
        state: AccumulateState,
        params: optax.Params | None,
        /,
        *,
        apply: bool,
        weight: Any = 1,
        flush: Any = False,
        **extra_args: Any,
    ) -> tuple[Any, AccumulateState]:
        stepped = window._advance(state, grads, weight, flush=_arguments.flag("flush", flush), when_full=True)
        like = window._without_rows(_gradients.gradient_arrays(grads))
        typed_params = _gradients.parameter_arrays(params)

        def run_inner(average: chex.ArrayTree, runs: Flag) -> tuple[Any, Any]:
            def gradients() -> optax.Updates:
                return _as_gradients(average, like, typed_params)

            return update_or_apply(wrapped, gradients, state.inner_state, params, apply=apply, runs=runs, **extra_args)

        def reduce_and_run() -> tuple[Any, tuple[Any, ...]]:
            average, weighs = window._average(stepped)
            returned, inner_state = run_inner(average, True)
            if weighs is not True:  # selected, because a branch within a branch would copy on CUDA
                unchanged = params if apply else optax.tree.zeros_like(returned), state.inner_state
                returned, inner_state = optax.tree.where(weighs, (returned, inner_state), unchanged)
            return returned, (inner_state, jnp.asarray(weighs), window._emptied_rows(stepped, average))

        gradient_sum = stepped.state.gradient_sum
        if window._axes:
            idle = (state.inner_state, jnp.zeros((), bool), gradient_sum)
            returned, after = run_or_skip(stepped.closes, reduce_and_run, idle, params, apply=apply)
            inner_state, applied, gradient_sum = after
        else:
            returned, inner_state = run_inner(gradient_sum, stepped.closes)
            applied = jnp.asarray(stepped.closes)
        returned = _with_integers(returned, like, params if apply else None)
        new_state = stepped.state._replace(
            windows=increment_if(applied, state.windows),
            applied=applied,
            gradient_sum=gradient_sum,
            inner_state=inner_state,
        )
        check_unchanged(new_state, state, "the accumulation's state changed")
        return returned, new_state

    def update_fn(
        updates: optax.Updates,
        state: AccumulateState,
        params: optax.Params | None = None,
        *,
        weight: Any = 1,
        flush: Any = False,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AccumulateState]:
        return advance_and_run(updates, state, params, apply=False, weight=weight, flush=flush, **extra_args)

    return _Accumulation(init_fn, wrapper(update_fn, step_fn))


def apply_gradients(
    tx: optax.GradientTransformation,
    grads: Any,
    opt_state: State,
    params: Tree,
    **extra_args: Any,
) -> tuple[Tree, State]:
    """`tx.update` and `optax.apply_updates` in one, for any Optax transformation.

    For what `accumulate` returned, a call that does not close the window touches nothing but the accumulator: neither
    updates nor parameters are read or written. Programs compiled for CPU, GPU and TPU are tested to do so.
    Donate both, in a step that takes them in the order in which it returns them, such as
    `jax.jit(step, donate_argnums=(0, 1))` for `step(params, opt_state, ...) -> (params, opt_state)`: JAX pairs donated
    buffers with results in order, and a wrong pair costs a copy. An accumulation inside another transformation, such
    as `optax.chain`, is not seen; the result is the same. Parameters to which nothing can be added stay: keys, and
    those whose gradient is float0.

    Args:
      tx: any transformation.
      grads: the gradients.
      opt_state: its state.
      params: the parameters.
      **extra_args: passed to `tx.update`, `weight` and `flush` included.

    Returns:
      The new parameters and the new state.

    Raises:
      What `tx.update` raises.

    Example:
      >>> tx = accumulate(optax.sgd(1.0), 2)
      >>> params = jnp.zeros(2)
      >>> state = tx.init(params)
      >>> params, state = apply_gradients(tx, jnp.array([1.0, 2.0]), state, params)
      >>> params, state = apply_gradients(tx, jnp.array([3.0, 4.0]), state, params)
      >>> params
      Array([-2., -3.], dtype=float32)
    """
    # Outside of jit, a NumPy array would come back itself from a call that leaves it alone, and be shared.
    params = jax.tree.map(jnp.asarray, params)
    return update_or_apply(tx, lambda: grads, opt_state, params, apply=True, runs=True, **extra_args)


def flush(tx: optax.GradientTransformation, opt_state: State, params: Tree, **extra_args: Any) -> tuple[Tree, State]:
    """Closes a window that is open, at the end of an epoch or of training, over the micro-batches that it has.

    The divisor is the weight that came, not `accum_steps`. An empty window is left alone: zero updates. To close a
    window together with its last micro-batch, pass `flush=True` to `update` instead. Through `nnx.Optimizer`, which
    holds state and parameters as variables, call `optimizer.update(model, grads, weight=0, flush=True)` with any
    gradients: at weight 0 they contribute nothing.

    Args:
      tx: what `accumulate` returned. An accumulation inside another transformation (`optax.chain`, `optax.masked`,
        `optax.inject_hyperparams`) cannot be flushed from outside: what is around it would see a gradient that never
        was. There, pass `flush=True` to `update`, as above.
      opt_state: its state.
      params: the parameters; the average is cast to their dtypes.
      **extra_args: passed to the wrapped optimizer.

    Returns:
      The updates and the new state.

    Raises:
      ValueError: `tx` is not what `accumulate` returned.

    Example:
      >>> tx = accumulate(optax.sgd(1.0), 4)
      >>> params = jnp.zeros(2)
      >>> _, state = tx.update(jnp.array([1.0, 2.0]), tx.init(params), params)
      >>> updates, state = flush(tx, state, params)
      >>> updates
      Array([-1., -2.], dtype=float32)
    """
    if not isinstance(tx, _Accumulation):
        raise ValueError(
            f"tx must be what accumulate returned itself, got {tx!r}. Where accumulate is inside of another "
            "transformation, pass flush=True to update with the last micro-batch. Or call "
            "tx.update(grads, opt_state, params, weight=0, flush=True) with any finite grads, which contribute nothing"
        )
    no_gradients = jax.tree.map(lambda _: None, params)
    return tx.update(no_gradients, opt_state, params, weight=0, flush=True, **extra_args)


def check_window(opt_state: Any, accum_steps: int, *, weight: Any = 1) -> None:
    """Checks the values in a window, where wanted: under `chex.chexify`, or outside of jit.

    For every window found in the state: `0 <= micro_step < accum_steps` (`<=` for `GradAccumulator`, whose full window
    waits to be taken) and a finite `weight_sum >= 0`; and a finite `weight >= 0`. What is known while tracing is always
    checked by `accumulate` itself; values can only be checked when the program runs.

    Args:
      opt_state: a state that holds windows, at any depth.
      accum_steps: the length of a window.
      weight: the weight about to be passed to `update`.

    Returns:
      Nothing.

    Raises:
      AssertionError: from chex; under `chex.chexify` when the program runs.
      RuntimeError: from chex; in a jitted function that is not inside `chex.chexify`.
      ValueError: the state holds no window.

    Example:
      >>> tx = accumulate(optax.sgd(0.1), 2)
      >>> @chex.chexify
      ... @jax.jit
      ... def step(grads, state, weight):
      ...     check_window(state, 2, weight=weight)
      ...     return tx.update(grads, state, weight=weight)
      >>> updates, state = step(jnp.ones(2), tx.init(jnp.zeros(2)), 3.0)
      >>> chex.block_until_chexify_assertions_complete()
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, WINDOW_STATES))
    windows = [x for x in nodes if isinstance(x, WINDOW_STATES)]
    if not windows:
        raise ValueError("check_window found no window in the state")
    _assert_values(jnp.isfinite(weight) & (jnp.asarray(weight) >= 0), f"weight {weight} is not finite and >= 0")
    for window in windows:
        longest = accum_steps - isinstance(window, AccumulateState)
        in_range = (window.micro_step >= 0) & (window.micro_step <= longest)
        _assert_values(in_range, f"micro_step is not between 0 and {longest}")
        _assert_values(jnp.isfinite(window.weight_sum) & (window.weight_sum >= 0), "weight_sum is not finite and >= 0")


class _Accumulation(optax.GradientTransformationExtraArgs):
    """What `accumulate` returns, known by its type."""


def _as_gradients(average: chex.ArrayTree, like: chex.ArrayTree, params: optax.Params | None) -> optax.Updates:
    """The average in the gradients' dtypes; where there was none, in the parameters'."""

    def cast(x: jax.Array, grad: Any, param: Any = None) -> Any:
        grad = param if grad is None else grad
        if grad is None:
            return x
        if not is_gradient(grad):
            return zero_like(grad)
        return x if _floats.is_complex(x) and not _floats.is_complex(grad) else x.astype(grad.dtype)

    return jax.tree.map(cast, average, like) if params is None else jax.tree.map(cast, average, like, params)


def _with_integers(returned: chex.ArrayTree, like: chex.ArrayTree, params: optax.Params | None) -> chex.ArrayTree:
    """Returns updates with zeros (new parameters with `params`) in the leaves that hold no sum."""

    def keep(grad: Any, new: Any, old: Any = None) -> Any:
        if grad is None or is_gradient(grad):
            return new
        return zero_like(grad) if old is None else old

    trees = (returned,) if params is None else (returned, params)
    return jax.tree.map(keep, like, *trees, is_leaf=lambda x: x is None)


def _assert_values(holds: jax.Array, message: str) -> None:
    chex.assert_trees_all_equal(holds, jnp.ones_like(holds), custom_message=message)


WINDOW_STATES = (GradAccumulatorState, AccumulateState)
