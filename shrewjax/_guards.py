"""Guards: wrappers that leave out a step, so that neither the parameters nor the optimizer's state see it.

Where a step is left out, the updates are zeros and the wrapped transformation does not run: its moments, counters and
schedules stay as they are. The decision is made on whole gradients, on every device alike.
"""

from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shrewjax import _arguments, _extended, _gradients, _history
from shrewjax._clipping import global_norm
from shrewjax._gradients import is_gradient
from shrewjax._mesh import AxisName, require_replicated
from shrewjax._reductions import all_finite
from shrewjax._states import described, fields
from shrewjax._wrapping import Flag, Gradients, decide_if, inner_transformation, update_or_apply, wrapper

AtLimit = Literal["keep_skipping", "zero_nonfinite"]


Monitor = Literal["grad_norm", "value"]


@described
class SkipNonfiniteState(NamedTuple):
    """What was skipped, and the wrapped optimizer. Its fields are a file format."""

    applied: Annotated[jax.Array, "bool (): the last call ran inner"]
    skipped: Annotated[jax.Array, "int32 (): calls so far that did not"]
    consecutive: Annotated[jax.Array, "int32 (): non-finite gradients in a row, up to the last call"]
    limit_reached: Annotated[jax.Array, "bool (): as many in a row as max_consecutive"]
    inner_state: Annotated[Any, "the wrapped optimizer's state"]

    def metrics(self) -> dict[str, Any]:
        """Returns what `shrewjax.metrics` shows."""
        return fields(self, "applied", "skipped", "consecutive", "limit_reached")


def skip_nonfinite(
    inner: optax.GradientTransformation,
    *,
    max_consecutive: Any = None,
    at_limit: AtLimit = "keep_skipping",
    sharded_over: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Skips the steps whose gradients hold a NaN or an infinity.

    Such an element never gets to `inner`, however many steps in a row hold one. A run of them mostly means that the
    parameters themselves are broken, or that a loss scale is too high: `max_consecutive` in a row set `limit_reached`
    in the state, for the training loop to read (`shrewjax.metrics`) and to stop at, or go back to a checkpoint. What
    the guard itself does from there on is `at_limit`:

    ====================  ======================================================================================
    `"keep_skipping"`     it goes on skipping
    `"zero_nonfinite"`    it zeroes the elements that are not finite, and inner gets the rest
    ====================  ======================================================================================

    ========================================  =======================================================================
    condition                                 result
    ========================================  =======================================================================
    all gradients finite                      what inner does; the row ends, and with it `limit_reached`
    finite, but with a norm beyond float32    likewise
    no leaves                                 likewise
    inner makes a NaN of finite gradients     it goes through: only what comes in is looked at. Chained behind,
                                              `skip_nonfinite(optax.identity())` looks at what comes out, but inner's
                                              state has then taken it in
    ========================================  =======================================================================

    Reads the gradients once more. Put it around the whole optimizer, inside `accumulate`; to leave out a micro-batch
    alone, use the `nonfinite` of `accumulate`.

    Args:
      inner: the transformation to wrap, usually a whole optimizer.
      max_consecutive: how many in a row are the limit, a real scalar >= 1, or a scalar array. `None` means no limit.
      at_limit: what to do from the limit on, see above.
      sharded_over: as in `grad_norm`.

    Returns:
      A transformation with state `SkipNonfiniteState(applied, skipped, consecutive, limit_reached, inner_state)`.

    Raises:
      ValueError: an argument is not as described, or `at_limit="zero_nonfinite"` without
        `max_consecutive`; or as in `grad_norm`.
      AssertionError: from chex, while tracing: inner changes the structure, shapes or dtypes of its state.

    Example:
      >>> tx = skip_nonfinite(optax.sgd(1.0), max_consecutive=2, at_limit="keep_skipping")
      >>> state = tx.init(jnp.zeros(2))
      >>> for bad in (jnp.nan, jnp.inf):
      ...     updates, state = tx.update(jnp.array([1.0, bad]), state)
      >>> updates, state.skipped, state.limit_reached
      (Array([0., 0.], dtype=float32), Array(2, dtype=int32), Array(True, dtype=bool))

    `optax.apply_if_finite` is its model, but for what happens at the limit: there the NaN is applied.
    """
    wrapped = inner_transformation(inner)
    limit = None if max_consecutive is None else _arguments.real("max_consecutive", max_consecutive, at_least=1)
    at_limit = _arguments.choice("at_limit", at_limit, ("keep_skipping", "zero_nonfinite"))
    if limit is None and at_limit != "keep_skipping":
        raise ValueError(f"at_limit={at_limit!r} needs a limit, got max_consecutive=None: pass max_consecutive")
    axes = _arguments.sharded_over(sharded_over)

    def init_fn(params: optax.Params) -> SkipNonfiniteState:
        return SkipNonfiniteState(
            applied=jnp.zeros((), bool),
            skipped=jnp.zeros((), jnp.int32),
            consecutive=jnp.zeros((), jnp.int32),
            limit_reached=jnp.zeros((), bool),
            inner_state=wrapped.init(params),
        )

    def step_fn(
        gradients: Gradients,
        state: SkipNonfiniteState,
        params: optax.Params | None,
        /,
        *,
        apply: bool,
        runs: Flag,
        **extra_args: Any,
    ) -> tuple[Any, SkipNonfiniteState]:
        def decide() -> tuple[jax.Array, SkipNonfiniteState]:
            leaves = _gradients.gradient_leaves(gradients())[1]
            finite = all_finite([x for x in leaves if is_gradient(x)], axes)
            consecutive = jnp.where(finite, 0, optax.safe_increment(state.consecutive))
            limit_reached = (
                jnp.zeros((), bool)
                if limit is None
                else consecutive.astype(jnp.float32) >= jnp.asarray(limit, jnp.float32)
            )
            applied = finite | limit_reached if at_limit == "zero_nonfinite" else finite
            return applied, SkipNonfiniteState(
                applied=applied,
                skipped=_counted_unless(applied, state.skipped),
                consecutive=consecutive,
                limit_reached=limit_reached,
                inner_state=(),
            )

        def finite_gradients() -> optax.Updates:
            return jax.tree.map(_without_nonfinite, _gradients.gradient_arrays(gradients()))

        runs, new_state = decide_if(runs, decide, state._replace(inner_state=()))
        for_inner = finite_gradients if at_limit == "zero_nonfinite" else gradients
        returned, inner_state = update_or_apply(
            wrapped, for_inner, state.inner_state, params, apply=apply, runs=runs, **extra_args
        )
        return returned, new_state._replace(inner_state=inner_state)

    def update_fn(
        updates: optax.Updates, state: SkipNonfiniteState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, SkipNonfiniteState]:
        return step_fn(lambda: updates, state, params, apply=False, runs=True, **extra_args)

    return optax.GradientTransformationExtraArgs(init_fn, wrapper(update_fn, step_fn))


@described
class SkipOnSpikeState(NamedTuple):
    """What was seen and skipped, and the wrapped optimizer. Its fields are a file format."""

    history: Annotated[_history.History, "the last finite measurements, spikes among them"]
    measured: Annotated[jax.Array, "float32 (): the last one, finite or not"]
    threshold: Annotated[jax.Array, "float32 (): above it, the last one was a spike; inf while the guard is off"]
    applied: Annotated[jax.Array, "bool (): the last call ran inner"]
    skipped: Annotated[jax.Array, "int32 (): calls so far that did not"]
    inner_state: Annotated[Any, "the wrapped optimizer's state"]

    def metrics(self) -> dict[str, Any]:
        """Returns what `shrewjax.metrics` shows."""
        return fields(self, "applied", "skipped", "measured", "threshold")


def skip_on_spike(
    inner: optax.GradientTransformation,
    *,
    monitor: Monitor = "grad_norm",
    max_zscore: Any = 6.0,
    history_length: int | None = None,
    warmup_steps: Any = 64,
    min_relative_std: Any = 1e-3,
    sharded_over: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Skips the steps whose gradient norm, or loss, stands far out from the last ones.

    .. math:: \text{skip if } x_t > m + k \max(s, r |m|)

    with mean m and standard deviation s (of a sample: n - 1 in the denominator)
    of the last `history_length` measurements before this one.

    ========================================  =======================================================================
    condition                                 result
    ========================================  =======================================================================
    fewer than `warmup_steps` recorded        no spike is found
    a spike                                   skipped, but recorded: a new level becomes the usual one, and the guard
                                              cannot lock up
    NaN or infinite measurement, or a norm    skipped, from the first step on; not recorded
    beyond float32
    all measurements equal                    a spike starts at k r above them, not at the next larger number
    far below the mean                        no spike
    ========================================  =======================================================================

    With `monitor="grad_norm"`, the guard makes one extra pass over the gradients. With `monitor="value"` it never looks
    at them: wrap it in `skip_nonfinite` to skip NaN gradients as well.

    Args:
      inner: the transformation to wrap, usually a whole optimizer.
      monitor: `"grad_norm"`, or `"value"`: a real scalar array or number that is passed to `update` as `value=`,
        usually the loss, the same on every device. It is forwarded to inner, too.
      max_zscore: k, a real scalar >= 0, or a scalar array. With inf, nothing finite is a spike.
      history_length: how many measurements are remembered, an int >= 1. `None` means 128.
      warmup_steps: how many measurements have to be recorded before a step can be skipped, a real scalar >= 0, or a
        scalar array.
      min_relative_std: r, a real scalar >= 0, or a scalar array.
      sharded_over: as in `grad_norm`.

    Returns:
      A transformation with state `SkipOnSpikeState(history, measured, threshold, applied, skipped, inner_state)`.

    Raises:
      ValueError: an argument is not as described; `warmup_steps` is more than `history_length`; `monitor="value"`, and
        `update` gets no `value`, or one that may differ between devices; or as in `grad_norm`.
      AssertionError: from chex, while tracing: inner changes the structure, shapes or dtypes of its state.

    Example:
      >>> tx = skip_on_spike(optax.sgd(1.0), warmup_steps=4)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 1.1, 0.9, 1.0, 5.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> updates, state.skipped
      (Array([0.], dtype=float32), Array(1, dtype=int32))

    The rule, with its history of 128 and 6 standard deviations, is the SkipStep optimizer of OLMo
    ("2 OLMo 2 Furious", 2025, arXiv:2501.00656).
    """
    wrapped = inner_transformation(inner)
    monitor = _arguments.choice("monitor", monitor, ("grad_norm", "value"))
    length = _arguments.length("history_length", history_length, default=128)
    max_zscore = _arguments.threshold("max_zscore", max_zscore)
    warmup_steps = _arguments.threshold("warmup_steps", warmup_steps)
    min_relative_std = _arguments.threshold("min_relative_std", min_relative_std)
    if isinstance(warmup_steps, float) and warmup_steps > length:
        raise ValueError(f"warmup_steps must be at most history_length, {length}, got {warmup_steps!r}")
    axes = _arguments.sharded_over(sharded_over)

    def init_fn(params: optax.Params) -> SkipOnSpikeState:
        return SkipOnSpikeState(
            history=_history.empty_history(length),
            measured=jnp.zeros((), jnp.float32),
            threshold=jnp.full((), jnp.inf, jnp.float32),
            applied=jnp.zeros((), bool),
            skipped=jnp.zeros((), jnp.int32),
            inner_state=wrapped.init(params),
        )

    def step_fn(
        gradients: Gradients,
        state: SkipOnSpikeState,
        params: optax.Params | None,
        /,
        *,
        apply: bool,
        runs: Flag,
        **extra_args: Any,
    ) -> tuple[Any, SkipOnSpikeState]:
        if monitor == "value":
            if extra_args.get("value") is None:
                raise ValueError('skip_on_spike(monitor="value") needs value= in update, usually the loss')
            value = jnp.asarray(_arguments.any_real("value", extra_args["value"]), jnp.float32)
            require_replicated("value", value)

        def decide() -> tuple[jax.Array, SkipOnSpikeState]:
            measured = value if monitor == "value" else _extended.to_float32(global_norm(gradients(), 2.0, axes))
            mean, std = _history.mean_and_std(state.history)
            least = jnp.asarray(min_relative_std, jnp.float32) * jnp.abs(mean)
            k = jnp.asarray(max_zscore, jnp.float32)
            onset = jnp.where(k == jnp.inf, jnp.inf, mean + k * jnp.maximum(std, least))
            observed = state.history.filled
            is_on = (observed > 0) & (observed.astype(jnp.float32) >= jnp.asarray(warmup_steps, jnp.float32))
            threshold = jnp.where(is_on, onset, jnp.inf)
            applied = jnp.isfinite(measured) & (measured <= threshold)
            return applied, SkipOnSpikeState(
                history=_history.push(state.history, measured),
                measured=measured,
                threshold=threshold,
                applied=applied,
                skipped=_counted_unless(applied, state.skipped),
                inner_state=(),
            )

        runs, new_state = decide_if(runs, decide, state._replace(inner_state=()))
        returned, inner_state = update_or_apply(
            wrapped, gradients, state.inner_state, params, apply=apply, runs=runs, **extra_args
        )
        return returned, new_state._replace(inner_state=inner_state)

    def update_fn(
        updates: optax.Updates, state: SkipOnSpikeState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, SkipOnSpikeState]:
        return step_fn(lambda: updates, state, params, apply=False, runs=True, **extra_args)

    return optax.GradientTransformationExtraArgs(init_fn, wrapper(update_fn, step_fn))


def _counted_unless(runs: jax.Array, count: jax.Array) -> jax.Array:
    return jnp.where(runs, count, optax.safe_increment(count))


def _without_nonfinite(x: Any) -> Any:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x)) if is_gradient(x) else x
