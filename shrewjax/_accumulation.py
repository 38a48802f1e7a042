"""Accumulation around an optimizer: sum micro-batches, and run the optimizer once on their average.

`accumulate` wraps an optimizer in a `Window` (`_window.py`), which has all the arithmetic.
"""

from typing import Annotated, Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from shrewjax import _arguments, _floats, _gradients
from shrewjax._branches import run_if
from shrewjax._gradients import is_gradient
from shrewjax._mesh import AxisName
from shrewjax._micro_batch import without_rows
from shrewjax._per_device import emptied_rows
from shrewjax._states import described, fields, increment_if
from shrewjax._window import AccumSteps, GradAccumulatorState, Nonfinite, Reduction, Window, metrics_of_window
from shrewjax._wrapping import (
    Flag,
    Gradients,
    Params,
    inner_transformation,
    run_or_skip,
    update_or_apply,
    wrapper,
)


@described
class AccumulateState(NamedTuple):
    """A window and the wrapped optimizer. Its fields are a file format: a change to them breaks checkpoints."""

    micro_step: Annotated[jax.Array, "int32 (): number of micro-batches in the open window"]
    windows: Annotated[jax.Array, "int32 (): number of windows so far that ran inner"]
    applied: Annotated[jax.Array, "bool (): the last call ran inner"]
    weight_sum: Annotated[jax.Array, "float32 or float64 (), or (devices,) with sum_over: weight of the open window"]
    window_bad: Annotated[jax.Array, "bool (): drop_window will discard the open window"]
    dropped: Annotated[jax.Array, "int32 (): number of non-finite micro-batches so far; 0 if they propagate"]
    value_sum: Annotated[jax.Array, "like weight_sum: weighted sum of `value` in the open window; inf without one"]
    value: Annotated[jax.Array, "like a weight (): mean `value` of the last window that ran inner; inf before it"]
    noise: Annotated[Any, "sums and averages of the gradient noise, () without noise_decay"]
    gradient_sum: Annotated[
        Any,
        "like the parameters, in the accumulator's dtype, with a leading axis of devices with sum_over; meaningless "
        "while micro_step is 0",
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
    noise_decay: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Runs an optimizer once per window of `accum_steps` micro-batches, on the average of their gradients.

    .. math:: \bar g = \frac{\sum_i w_i g_i}{\sum_i w_i}

    On the last call of a window, inner runs on the average. On all other calls the updates are zeros, and inner's state
    stays unchanged, with its counters and schedules. `accumulate` has to wrap the optimizer, because in a chain a
    stateful optimizer would run on every call. Transformations for the large batch, such as clipping, belong inside:
    `accumulate(optax.chain(clip_by_global_norm(1.0), optax.adamw(1e-3)), 4)`.

    `update` takes three more arguments. Inner does not receive the first two:

    * `weight=1`: the micro-batch's number of examples or tokens. It is a real scalar, traced or not: 0, or between
      2**-30 and 2**100. Weights are summed in float32 (in float64 if a sum is float64), so whole numbers add exactly up
      to 2**24. Above that, a weight of 1 is lost. Use larger units, such as batches, or float64 sums.
    * `flush=False`: closes the window with this call, however many micro-batches it has. A bool, traced or not.
    * `value=None`: the micro-batch's loss, a real scalar. Inner gets the window's: with `reduction="mean"`
      sum(w value) / sum(w), over the micro-batches that the gradients are averaged over. So `skip_on_spike`, a line
      search and a plateau rule inside see the loss of the large batch. It stays in the state and in `metrics`. If one
      micro-batch of a window comes without a `value`, the window's is inf. Inner gets a `grad`, as `optax.lbfgs` takes
      it, as the window's average, too.

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
    accum_steps shrinks, by schedule or on resuming   the open window closes at its next step with that many or more
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

    `nonfinite` checks the micro-batches' gradients alone. To check the average as well, wrap inner in `skip_nonfinite`.

    Caution:

    * `update` forwards unknown keyword arguments to inner, as is usual in Optax. A misspelt `weights=` is therefore no
      error here.
    * A gradient tree of `None` is a micro-batch of zeros. To close a window without a micro-batch, use `flush`.
    * `optax.masked(accumulate(...), mask)` returns the raw gradients of masked-out leaves on every call.
    * A transformation after `accumulate` in a chain runs on every call.

    Args:
      inner: the transformation to wrap, usually a whole optimizer.
      accum_steps: number of micro-batches per window. An int >= 1, a scalar array, or a function of `windows` (int32)
        that returns such a number, or a float, which is rounded up. In an array, a number below 1 or NaN counts as 1.
      reduction: `"mean"` for gradients of a mean loss: sum(w g) / sum(w), equal to the gradient of the one large
        batch. `"sum_over_weights"` for gradients of a summed loss: sum(g) / sum(w). `"sum"`: sum(g).
      accumulator_dtype: dtype of the sum. By default the wider of float32 and the parameter's dtype, complex for
        complex. Inner gets the average cast to the gradient's dtype, within 2 ulp of the exact quotient.
      nonfinite: the policy for a non-finite micro-batch, see the second table. The state counts those in `dropped`. All
        policies except `"propagate"` make one extra pass over the gradients.
      sum_over: mapped axis or axes along which each device has its own gradients, not yet summed, see below. Pass `()`
        if the gradients are the same on every device already. This is required with `check_vma=False` and in
        `jax.pmap`, because JAX's types do not record it there.

      noise_decay: measures the gradient noise scale of the windows, with this decay of its averages, a real scalar in
        [0, 1), for example 0.99. `None` does not measure. A weight must then count independent examples, such as
        sequences, not tokens.

    With `noise_decay`, `metrics` shows three numbers. `noise_trace` is the trace of the covariance of one example's
    gradient, `signal_squared` the squared norm of the true gradient. `noise_scale` is their quotient: the weight of a
    window in which noise and signal are equal, in units of `weight`. They are averages over windows of

    .. math:: S = \frac{\sum_i w_i |g_i|^2 - W |\bar g|^2}{K - 1}, \qquad |\bar g|^2 - S / W

    with W = sum(w) and K micro-batches, on all devices, and unbiased for any weights. Windows with fewer than two
    micro-batches, and non-finite ones, do not enter. Before the first estimate they are inf. The estimate of the signal
    may be negative while noise dominates. It is measured before inner clips. Each micro-batch costs a norm of its
    gradients, and each closing window one of the average. Take it as a diagnostic: whether it may steer the batch size
    is disputed (W. Merrill et al., 2025, arXiv:2505.23971). Source: S. McCandlish et al., "An empirical model of
    large-batch training", 2018, arXiv:1812.06162, appendix A.1, which has equal weights.

    Under plain `jax.jit` on many devices, JAX reduces the gradients of a mean loss itself, and no argument is needed.
    That costs one all-reduce per micro-step. With `sum_over="data"` each device adds up its own gradients, and one
    all-reduce of sum(w g) and sum(w) runs per window, when it closes:

    * In `jax.shard_map` over that axis, each device passes its own gradients, and its own number of examples as
      `weight`. If parameters are sharded over other axes, several devices share a batch. `weight` is then the number of
      examples of all of them, by which the loss is divided. By default, JAX reduces the gradient of replicated
      parameters. To keep it local, compute `own = jax.lax.pcast(params, "data", to="varying")` outside the loss, and
      then `jax.grad(loss)(own)`. With `check_vma=False` it is local already. Parameters must not be sharded over
      `sum_over`.
    * Under plain `jax.jit` the gradients have a leading axis with one row per device, as `jax.vmap` returns them.
      `weight` is a scalar, or a vector with one number per row.
    * In `jax.vmap(..., axis_name="data")` each row is such a device. Map `init` over the same axis.

    The sums and the weight in the state have such a leading axis, sharded over `sum_over`. `init` reads its size from
    parameters that are placed on a mesh, or from `jax.set_mesh`. `state_specs` returns the specs for `shard_map`, and
    `redistribute` moves a state to another number of devices. Unless `nonfinite` is `"propagate"`, one flag is reduced
    on every micro-step, because a micro-batch that is non-finite on one device is so on all. Parameters may be sharded
    over other axes of the mesh. The average is the same on every device along `sum_over`. If transformations inside
    need `sharded_over` (`check_vma=False`, `jax.pmap`), pass the axes of the parameters' shards, or `()`.

    Returns:
      A transformation with state `AccumulateState`, whose structure, shapes and dtypes never change.

    Raises:
      ValueError: an argument is not as described; `inner` was returned by `accumulate`; a gradient is complex and its
        accumulator real, or one of gradient and parameter is floating and the other not; by its type, a gradient is
        already reduced over `sum_over`, or not reduced without `sum_over`; devices may disagree on when a window
        closes; types do not record whether gradients are reduced, and `sum_over` is missing; `init` finds no mesh.
      AssertionError: from chex, while tracing: the gradients' structure or a leaf's shape differs from the parameters
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

    def step_fn(
        gradients: Gradients,
        state: AccumulateState,
        params: Params,
        /,
        *,
        apply: bool,
        runs: Flag,
        weight: Any = 1,
        flush: Any = False,
        value: Any = None,
        **extra_args: Any,
    ) -> tuple[Any, AccumulateState]:
        def advance_and_run() -> tuple[Any, AccumulateState]:
            grads, closes = gradients(), _arguments.flag("flush", flush)
            stepped = window.advance(state, grads, weight, value, flush=closes, when_full=True)
            like = without_rows(_gradients.gradient_arrays(grads), window.axes)
            typed_params = _gradients.parameter_arrays(params)

            def run_inner(average: chex.ArrayTree, mean_value: jax.Array, runs: Flag) -> tuple[Any, Any]:
                def of_average() -> optax.Updates:
                    return _as_gradients(average, like, typed_params)

                of_window = {} if value is None else {"value": mean_value}
                if extra_args.get("grad") is not None:
                    of_window["grad"] = of_average()
                extra = extra_args | of_window
                return update_or_apply(wrapped, of_average, state.inner_state, params, apply=apply, runs=runs, **extra)

            def reduce_and_run() -> tuple[Any, tuple[Any, ...]]:
                taken = window.average(stepped)
                has_weight = taken.has_weight
                returned, inner_state = run_inner(taken.gradients, taken.value, True)
                measured = taken.value, taken.noise
                if has_weight is not True:
                    # XLA-2: select, because XLA copies parameters and state in a branch within a branch on CUDA
                    # (tests/test_accelerators.py).
                    unchanged = params if apply else optax.tree.zeros_like(returned), state.inner_state
                    returned, inner_state = optax.tree.where(has_weight, (returned, inner_state), unchanged)
                    measured = optax.tree.where(has_weight, measured, (state.value, stepped.state.noise))
                emptied = emptied_rows(stepped.state.gradient_sum, taken.gradients, window.axes or ())
                return returned, (inner_state, jnp.asarray(has_weight), emptied, *measured)

            gradient_sum, mean_value, noise = stepped.state.gradient_sum, state.value, stepped.state.noise
            if window.axes:
                idle = (state.inner_state, jnp.zeros((), bool), gradient_sum, mean_value, noise)
                returned, after = run_or_skip(stepped.has_average, reduce_and_run, idle, params, apply=apply)
                inner_state, applied, gradient_sum, mean_value, noise = after
            else:
                applied = jnp.asarray(stepped.has_average)
                if noise:  # in a branch, because the norm of the average takes a pass

                    def measure() -> tuple[jax.Array, Any]:
                        taken = window.average(stepped)
                        return taken.value, taken.noise

                    mean_value, noise = run_if(stepped.has_average, measure, lambda: (state.value, stepped.state.noise))
                elif stepped.has_average is not False:
                    mean_value = jnp.where(applied, window.average(stepped).value, mean_value)
                returned, inner_state = run_inner(gradient_sum, mean_value, stepped.has_average)
            returned = _with_integers(returned, like, params if apply else None)
            new_state = stepped.state._replace(
                windows=increment_if(applied, state.windows),
                applied=applied,
                value=mean_value,
                noise=noise,
                gradient_sum=gradient_sum,
                inner_state=inner_state,
            )
            return returned, new_state

        changed = "the accumulation's state changed"
        return run_or_skip(runs, advance_and_run, state, params, apply=apply, changed=changed)

    return Accumulation(init_fn, wrapper(step_fn))


class Accumulation(optax.GradientTransformationExtraArgs):
    """The transformation that `accumulate` returns. Its type is how `flush` and `accumulate` recognize it."""


def _as_gradients(average: chex.ArrayTree, like: chex.ArrayTree, params: optax.Params | None) -> optax.Updates:
    """Returns the average in the gradients' dtypes, or in the parameters' if a gradient is None."""

    def cast(x: jax.Array, grad: Any, param: Any = None) -> Any:
        grad = param if grad is None else grad
        if grad is None:
            return x
        if not is_gradient(grad):
            return _zero_like(grad)
        return x if _floats.is_complex(x) and not _floats.is_complex(grad) else x.astype(grad.dtype)

    return jax.tree.map(cast, average, like) if params is None else jax.tree.map(cast, average, like, params)


def _with_integers(returned: chex.ArrayTree, like: chex.ArrayTree, params: optax.Params | None) -> chex.ArrayTree:
    """Returns updates with zeros, or new parameters with the old ones, in the leaves that have no sum."""

    def keep(grad: Any, new: Any, old: Any = None) -> Any:
        if grad is None or is_gradient(grad):
            return new
        return _zero_like(grad) if old is None else old

    trees = (returned,) if params is None else (returned, params)
    return jax.tree.map(keep, like, *trees, is_leaf=lambda x: x is None)


def _zero_like(x: Any) -> Any:
    """Returns zeros of the same shape and dtype. JAX has no float0 arrays, so those are NumPy's."""
    return np.zeros(x.shape, x.dtype) if x.dtype == jax.dtypes.float0 else jnp.zeros_like(x)


WINDOW_STATES = (GradAccumulatorState, AccumulateState)
