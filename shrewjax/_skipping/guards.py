r"""Guards: wrappers that skip a step, so that neither the parameters nor the optimizer's state see its gradients.

In a skipped step the updates are zeros and the wrapped transformation does not run. A guard decides on whole gradients,
so that every device decides the same.
"""

import math
from functools import partial
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shrewjax._base import arguments, trees
from shrewjax._base.axes import require_replicated
from shrewjax._base.mesh import on_mesh_of
from shrewjax._base.states import described, fields, increment_if, require_made_with
from shrewjax._base.trees import is_gradient
from shrewjax._base.types import (
    AnyState,
    Argument,
    Leaf,
    Metrics,
    Number,
    PyTree,
    Scalar,
    ShardedOver,
)
from shrewjax._clipping.global_norm import global_norm
from shrewjax._clipping.units import find_units
from shrewjax._numerics import floats, histories
from shrewjax._numerics.reductions import finite_leaves
from shrewjax._skipping.wrapping import Step, inner_transformation, update_of_guard

AtLimit = Literal["keep_skipping", "zero_nonfinite"]


Monitor = Literal["grad_norm", "value"]


@described
class SkipNonfiniteState(NamedTuple):
    """Counts of skipped steps, and the wrapped optimizer. Its fields are a file format.

    Attributes:
      applied: bool (): the last call ran inner
      skipped: int32 (): number of calls so far that did not run inner
      consecutive: int32 (): number of calls with non-finite gradients in a row, to the last one
      limit_reached: bool (): `consecutive` is at least max_consecutive
      inner_state: the wrapped optimizer's state
      nonfinite_leaves: with per_leaf=True, a tree like the parameters of int32 (): number of calls so far in
        which the leaf was non-finite; otherwise ()
    """

    applied: jax.Array
    skipped: jax.Array
    consecutive: jax.Array
    limit_reached: jax.Array
    inner_state: AnyState
    nonfinite_leaves: PyTree = ()

    def metrics(self) -> Metrics:
        """Returns the entries of `shrewjax.metrics`."""
        names = trees.leaf_names(self.nonfinite_leaves)
        by_name = zip(names, jax.tree.leaves(self.nonfinite_leaves), strict=True)
        of_leaves = {f"nonfinite_leaf/{name}": count for name, count in by_name}
        of_calls = fields(self, "applied", "skipped", "consecutive", "limit_reached")
        return of_calls | of_leaves


def skip_nonfinite(
    inner: optax.GradientTransformation,
    *,
    max_consecutive: Number | None = None,
    at_limit: AtLimit = "keep_skipping",
    per_leaf: bool = False,
    sharded_over: ShardedOver = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Skips the steps whose gradients contain a NaN or an infinity.

    .. math:: (u_t, s_{t+1}) = \begin{cases} \text{inner}(g_t, s_t) & \text{if all elements of } g_t
              \text{ are finite} \\ (0, s_t) & \text{otherwise} \end{cases}

    A run of such steps usually means that the parameters are broken, or that a loss scale is too high. After
    `max_consecutive` in a row, the state's `limit_reached` is set, which the training loop can read by
    `shrewjax.metrics`. From the limit on, the guard follows `at_limit`:

    ====================  ======================================================================================
    `"keep_skipping"`     it skips every step with non-finite gradients, as before
    `"zero_nonfinite"`    it sets the non-finite elements to zero, and runs inner on the result
    ====================  ======================================================================================

    ========================================  =======================================================================
    condition                                 result
    ========================================  =======================================================================
    all gradients finite                      inner runs; `consecutive` is 0 and `limit_reached` is not set
    a norm beyond float32; no leaves          as for finite gradients
    inner makes a NaN of finite gradients     the NaN is returned, because only incoming gradients are checked.
                                              `skip_nonfinite(optax.identity())`, chained behind inner, checks its
                                              updates, but inner's state already contains the NaN
    ========================================  =======================================================================

    The guard makes one extra pass over the gradients. Wrap the whole optimizer in it, inside `accumulate`. There it
    sees averages. To skip a single micro-batch, use `accumulate(nonfinite=)`.

    With `per_leaf=True` the state also counts, at no extra pass, the calls in which each leaf had a NaN or an infinity.
    `metrics` shows each count by the leaf's name, as `nonfinite_leaf/NAME`.

    Around `accumulate`, `skip_nonfinite(accumulate(tx, k), per_leaf=True)` names the leaves of a micro-batch in its own
    call. It leaves out the whole call: the window takes one micro-batch more, and a `flush` of the call is lost.

    Args:
      inner: the transformation to wrap, usually a whole optimizer.
      max_consecutive: the limit, a number of steps in a row, as a real scalar >= 1 or a scalar array. `None` means no
        limit.
      at_limit: the guard's behaviour from the limit on, see the first table.
      per_leaf: a bool, whether the state has a count for each leaf. It changes no update.
      sharded_over: as in `grad_norm`.

    Returns:
      A transformation with state `SkipNonfiniteState(applied, skipped, consecutive, limit_reached, inner_state,
      nonfinite_leaves)`.

    Raises:
      ValueError: an argument is not as described; the state is another transformation's; `at_limit="zero_nonfinite"`
        without `max_consecutive`; with `per_leaf=True`, the gradients' tree differs from that of the parameters given
        to `init`; or as in `grad_norm`.
      AssertionError: while tracing: inner changes the structure, shapes or dtypes of its state, except for a float that
        fits the old dtype.

    Example:
      >>> tx = skip_nonfinite(optax.sgd(1.0), max_consecutive=2, at_limit="keep_skipping")
      >>> state = tx.init(jnp.zeros(2))
      >>> for bad in (jnp.nan, jnp.inf):
      ...     updates, state = tx.update(jnp.array([1.0, bad]), state)
      >>> updates, state.skipped, state.limit_reached
      (Array([0., 0.], dtype=float32), Array(2, dtype=int32), Array(True, dtype=bool))
      >>> tx = skip_nonfinite(optax.sgd(1.0), per_leaf=True)
      >>> grads = {"a": jnp.ones(2), "b": jnp.array([1.0, jnp.nan])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> state.nonfinite_leaves
      {'a': Array(0, dtype=int32), 'b': Array(1, dtype=int32)}

    Source: the contract is that of `optax.apply_if_finite`, except at the limit, because Optax applies the NaN there.
    """
    wrapped = inner_transformation(inner)
    limit = _limit("max_consecutive", max_consecutive, at_least=1)
    at_limit = arguments.choice("at_limit", at_limit, get_args(AtLimit))
    is_repairing = at_limit == "zero_nonfinite"
    if max_consecutive is None and is_repairing:
        raise ValueError(
            f"at_limit={at_limit!r} needs a limit, got max_consecutive=None. Pass max_consecutive"
        )
    per_leaf = arguments.static_flag("per_leaf", per_leaf)
    axes = arguments.sharded_over(sharded_over)

    def init_fn(params: optax.Params) -> SkipNonfiniteState:
        counted = params if per_leaf else ()
        state = SkipNonfiniteState(
            applied=jnp.zeros((), bool),
            skipped=jnp.zeros((), jnp.int32),
            consecutive=jnp.zeros((), jnp.int32),
            limit_reached=jnp.zeros((), bool),
            inner_state=wrapped.init(params),
            nonfinite_leaves=jax.tree.map(lambda _: jnp.zeros((), jnp.int32), counted),
        )
        return on_mesh_of(params, state)

    def decide(step: Step) -> tuple[jax.Array, SkipNonfiniteState]:
        # 1. Which leaves are finite? Sparse arrays with repeated indices are, too, which `trees.floating` refuses.
        state: SkipNonfiniteState = step.state
        grads = jax.tree.map_with_path(trees.array_leaf, step.make_gradients())
        leaves = [x for x in jax.tree.leaves(grads) if is_gradient(x)]
        are_finite = finite_leaves(leaves, arguments.axes_by_leaf(axes, grads))
        counts = _counted(state, grads, are_finite) if per_leaf else state.nonfinite_leaves
        # 2. Decide.
        finite = jnp.all(are_finite)
        consecutive = jnp.where(finite, 0, optax.safe_increment(state.consecutive))
        limit_reached = _reaches(consecutive, limit)
        applied = finite | limit_reached if is_repairing else finite
        return applied, SkipNonfiniteState(
            applied=applied,
            skipped=increment_if(~applied, state.skipped),
            consecutive=consecutive,
            limit_reached=limit_reached,
            inner_state=(),
            nonfinite_leaves=counts,
        )

    repaired = partial(trees.map_floating, _finite_or_zero) if is_repairing else None
    update_fn = update_of_guard(wrapped, SkipNonfiniteState, decide, repaired)
    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _counted(state: SkipNonfiniteState, grads: PyTree, are_finite: jax.Array) -> PyTree:
    """Returns the state's counts by leaf, one more for each leaf that is not finite."""
    units = find_units(grads)
    if not units.leaves:
        return state.nonfinite_leaves
    require_made_with("per_leaf=True", state, "nonfinite_leaves")
    counts = jnp.stack(units.numbers_beside(state.nonfinite_leaves))
    counts = increment_if(~are_finite, counts)
    return units.with_leaves(state.nonfinite_leaves, list(counts))


def _finite_or_zero(x: Leaf) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))


@described
class SkipOnSpikeState(NamedTuple):
    """The measurements, counts of skipped steps, and the wrapped optimizer. Its fields are a file format.

    Attributes:
      history: the last finite measurements, spikes too; none above `max_value`
      measured: float32 (): the last measurement, finite or not
      threshold: float32 (): a larger last measurement was a spike; inf if no finite one can be
      applied: bool (): the last call ran inner
      skipped: int32 (): number of calls so far that did not run inner
      consecutive: int32 (): number of spikes skipped in a row; non-finite steps leave it as it is
      spikes_applied: int32 (): number of spikes so far that ran inner, because of `max_consecutive`
      inner_state: the wrapped optimizer's state
    """

    history: histories.HistoryState
    measured: jax.Array
    threshold: jax.Array
    applied: jax.Array
    skipped: jax.Array
    consecutive: jax.Array
    spikes_applied: jax.Array
    inner_state: AnyState

    def metrics(self) -> Metrics:
        """Returns the entries of `shrewjax.metrics`."""
        of_calls = fields(self, "applied", "skipped", "consecutive", "spikes_applied")
        return of_calls | fields(self, "measured", "threshold")


def skip_on_spike(
    inner: optax.GradientTransformation,
    *,
    monitor: Monitor = "grad_norm",
    max_zscore: Number = 6.0,
    history_length: int | None = None,
    warmup_steps: Number = 64,
    max_value: Number | None = None,
    max_consecutive: Number | None = None,
    sharded_over: ShardedOver = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Skips the steps whose gradient norm, or loss, is far above the recent ones, or above a fixed limit.

    .. math:: \text{skip if } x_t > m + k \max(s, 0.001 |m|) \quad\text{or}\quad x_t > \text{max\_value}

    m and s are the mean and the sample standard deviation (n - 1 in the denominator) of the last `history_length`
    recorded measurements before this one. A measurement that either rule would skip is a spike.

    ========================================  =======================================================================
    condition                                 result
    ========================================  =======================================================================
    fewer than `warmup_steps` recorded        no finite measurement is a spike
    a spike                                   skipped, but recorded, so that the guard adapts to a new level
    above `max_value`                         a spike from the first step on. It is not recorded, applied or not
    a spike after `max_consecutive` in a row  applied, counted in `spikes_applied`, and the run starts again from 0
    NaN, infinite, or norm beyond float32     skipped, from the first step on, even after `max_consecutive`. It is not
                                              recorded, and neither counts in a run nor ends one
    NaN `max_value` in an array               every finite measurement is a spike
    `max_consecutive` < 1 or NaN in an array  no finite measurement is skipped
    ========================================  =======================================================================

    `monitor="grad_norm"` costs one extra pass over the gradients. `monitor="value"` costs none and does not see NaN
    gradients: wrap the guard in `skip_nonfinite` to skip those.

    Args:
      inner: the transformation to wrap, usually a whole optimizer.
      monitor: `"grad_norm"`, or `"value"`. The value is a real number or scalar array, usually the loss, passed to
        `update` as `value=` and the same on every device. The guard forwards it to inner.
      max_zscore: k >= 0, a real scalar or a scalar array. If it is inf, no finite measurement is a spike.
      history_length: number of measurements to remember, an int >= 1. `None` means 128.
      warmup_steps: number of recorded measurements before a finite one can be a spike, >= 0, a real scalar or a scalar
        array.
      max_value: the fixed limit, a real scalar (>= 0 for a norm), or a scalar array. `None` means no limit. It needs
        `max_consecutive`.
      max_consecutive: number of spikes that may be skipped in a row, >= 1, a real scalar or a scalar array. It needs
        `max_value`. `None` means any number.
      sharded_over: as in `grad_norm`.

    Returns:
      A transformation with state `SkipOnSpikeState`.

    Raises:
      ValueError: an argument is not as described; one of `max_value` and `max_consecutive` comes without the other;
        `warmup_steps` is greater than `history_length`; the state is another transformation's; with
        `monitor="value"`, `update` gets no `value`, or one that may differ between devices; or as in `grad_norm`.
      AssertionError: while tracing: inner changes the structure, shapes or dtypes of its state, except for a float that
        fits the old dtype.

    Example:
      >>> tx = skip_on_spike(optax.sgd(1.0), warmup_steps=4)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (1.0, 1.1, 0.9, 1.0, 5.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> updates, state.skipped
      (Array([0.], dtype=float32), Array(1, dtype=int32))
      >>> tx = skip_on_spike(optax.sgd(1.0), max_value=100.0, max_consecutive=2)
      >>> state = tx.init(jnp.zeros(1))
      >>> for _ in range(9):  # two of three are skipped
      ...     _, state = tx.update(jnp.array([500.0]), state)
      >>> state.skipped, state.spikes_applied
      (Array(6, dtype=int32), Array(3, dtype=int32))

    Source: the SkipStep optimizer of OLMo, with its history of 128 and 6 standard deviations ("2 OLMo 2 Furious", 2025,
    arXiv:2501.00656).
    """
    wrapped = inner_transformation(inner)
    of_norm = arguments.choice("monitor", monitor, get_args(Monitor)) == "grad_norm"
    length = arguments.length("history_length", history_length, default=128)
    max_zscore = arguments.threshold("max_zscore", max_zscore)
    warmup_steps = arguments.threshold("warmup_steps", warmup_steps)
    if isinstance(warmup_steps, float) and warmup_steps > length:
        raise ValueError(
            f"warmup_steps must be at most history_length, {length}, got {warmup_steps!r}"
        )
    _require_both(max_value, max_consecutive)
    fixed_limit = _limit("max_value", max_value, at_least=0 if of_norm else -math.inf)
    longest_run = _limit("max_consecutive", max_consecutive, at_least=1)
    axes = arguments.sharded_over(sharded_over)
    # `declared_arguments` finds the parameter `value`, so that `flush` hands it on (tests/windows/test_flush_value.py).
    measure = partial(_norm, axes) if of_norm else _value

    def init_fn(params: optax.Params) -> SkipOnSpikeState:
        state = SkipOnSpikeState(
            history=histories.empty_history(length),
            measured=jnp.zeros((), jnp.float32),
            threshold=jnp.full((), jnp.inf, jnp.float32),
            applied=jnp.zeros((), bool),
            skipped=jnp.zeros((), jnp.int32),
            consecutive=jnp.zeros((), jnp.int32),
            spikes_applied=jnp.zeros((), jnp.int32),
            inner_state=wrapped.init(params),
        )
        return on_mesh_of(params, state)

    def decide(step: Step) -> tuple[jax.Array, SkipOnSpikeState]:
        # 1. Measure the norm or the loss.
        state: SkipOnSpikeState = step.state
        measured = measure(step, step.params, **step.extra_args)
        # 2. A spike is above the threshold. It is skipped, unless as many as allowed were skipped in a row.
        of_history = _threshold(state.history, max_zscore, warmup_steps)
        largest, longest = _float32(fixed_limit), _float32(longest_run)
        threshold = jnp.minimum(of_history, largest)
        finite = jnp.isfinite(measured)
        is_spike = finite & ~(measured <= threshold)
        allows_none = ~(longest >= 1)  # also if it is NaN
        run_is_full = _reaches(state.consecutive, longest) | allows_none
        applied = finite & (~is_spike | run_is_full)
        # 3. Count and record. A measurement that is infinite is not recorded.
        consecutive = jnp.where(applied, 0, increment_if(is_spike, state.consecutive))
        recorded = jnp.where(measured <= largest, measured, jnp.inf)
        return applied, SkipOnSpikeState(
            history=histories.push(state.history, recorded),
            measured=measured,
            threshold=threshold,
            applied=applied,
            skipped=increment_if(~applied, state.skipped),
            consecutive=consecutive,
            spikes_applied=increment_if(is_spike & applied, state.spikes_applied),
            inner_state=(),
        )

    update_fn = update_of_guard(wrapped, SkipOnSpikeState, decide)
    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _threshold(
    history: histories.HistoryState, max_zscore: Scalar, warmup_steps: Scalar
) -> jax.Array:
    """Returns the threshold that the history gives, inf while it is too short."""
    mean, std = histories.mean_and_std(history)
    least = jnp.float32(1e-3) * jnp.abs(mean)  # measurements may be alike for long
    k = _float32(max_zscore)
    # If k is inf, the product is NaN for a deviation of 0.
    onset = jnp.where(k == jnp.inf, jnp.inf, mean + k * jnp.maximum(std, least))
    is_on = (history.filled > 0) & _reaches(history.filled, warmup_steps)
    return jnp.where(is_on, onset, jnp.inf)


def _require_both(max_value: Number | None, max_consecutive: Number | None) -> None:
    given, missing = "max_value", "max_consecutive"
    if max_value is None:
        given, missing = missing, given
    if (max_value is None) != (max_consecutive is None):
        raise ValueError(
            f"max_value and max_consecutive must come together, got {given} alone. Pass {missing}"
        )


def _limit(name: str, value: Number | None, *, at_least: float) -> Scalar:
    """Returns a limit: inf if it is None, which no number exceeds and no count reaches."""
    return arguments.real(name, math.inf if value is None else value, at_least=at_least)


def _norm(
    axes: arguments.Shardings, step: Step, params: PyTree, /, **_others: Argument
) -> jax.Array:
    grads = step.make_gradients()
    trees.require_no_device_rows(grads, params)
    return floats.stored(global_norm(grads, 2.0, axes), jnp.float32)


def _value(
    _step: Step, params: PyTree, /, value: Number | None = None, **_others: Argument
) -> jax.Array:
    """Returns the loss that the caller passed."""
    del params
    if value is None:
        raise ValueError(
            'skip_on_spike(monitor="value") needs value= in update, got none. Pass the loss'
        )
    # A copy. Outside of jit the state would share the caller's buffer, or the window's, and donating both fails
    # (tests/windows/test_flush_value.py, "can_be_donated").
    value = jnp.array(arguments.value_of_loss(value, {()}), jnp.float32)
    require_replicated("value", value)
    return value


def _reaches(count: jax.Array, limit: Scalar) -> jax.Array:
    # Also without a limit, inf. A constant would lose the mesh axis of models that vmap maps, and the next step would
    # fail (tests/devices/test_models_on_devices.py).
    return count.astype(jnp.float32) >= _float32(limit)


def _float32(value: Scalar) -> jax.Array:
    # A Python number beyond float32 becomes inf, and NumPy would warn.
    with np.errstate(over="ignore"):
        return jnp.asarray(value, jnp.float32)
