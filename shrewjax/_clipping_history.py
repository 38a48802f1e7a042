"""Clipping the global norm to a threshold from the norms of past steps: a percentile, or a z-score."""

import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shrewjax import _arguments, _extended, _history, _scaling
from shrewjax._clipping import clip_to_limit, global_norm
from shrewjax._extended import ExtendedFloat
from shrewjax._mesh import AxisName
from shrewjax._states import described, fields


@described
class ClipByNormPercentileState(NamedTuple):
    """The history of norms and measurements of the last update. Its fields are a file format."""

    history: Annotated[_history.History, "the last finite norms, before clipping"]
    threshold: Annotated[jax.Array, "float32 (): the threshold of the last norm; inf while the history is empty"]
    grad_norm: Annotated[jax.Array, "float32 (): the last norm before clipping"]
    clip_scale: Annotated[jax.Array, "float32 (): the number that multiplied the gradients; 1 if not clipped"]

    def metrics(self) -> dict[str, Any]:
        """Returns the entries of `shrewjax.metrics`."""
        return fields(self, "threshold", "grad_norm", "clip_scale")


def clip_by_norm_percentile(
    percentile: Any, *, history_length: int | None = None, sharded_over: AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Clips the norm of all gradients together to a percentile of its history (AutoClip).

    .. math:: g_t \leftarrow g_t \cdot \min\Big(1, \frac{c_t}{\|g_t\|}\Big), \qquad
              c_t = \mathrm{percentile}_p(\|g_{t-H+1}\|, \dots, \|g_t\|)

    The history holds norms before clipping, the present one included. A percentile of 10, as in the paper, clips nine
    steps in ten, so the rule normalises more than it guards. For a guard, use a percentile near 100, or
    `skip_on_spike`.

    The first row that applies:

    ========================================  =======================================================================
    condition                                 result
    ========================================  =======================================================================
    NaN percentile in an array                every floating leaf becomes NaN; the norm is recorded if it is finite
    a NaN or infinite gradient                not recorded. While the history is empty, the gradient passes as it is.
                                              Later it makes every floating leaf NaN
    a norm beyond float32                     not recorded. While the history is empty, the gradient passes as it is.
                                              Later it is clipped to the percentile of the others
    the first norm; percentile = 100          never clipped, the gradients to the last bit
    percentile = 0                            clipped to the smallest norm in the history
    ========================================  =======================================================================

    A percentile outside [0, 100] in an array counts as 0 or 100. A norm of 0 counts as any other, so all updates are 0
    if more than p % of the norms are. A full history drops its oldest norm.

    The table of `clip_grad_norm` describes the clip itself.

    Args:
      percentile: p, a real scalar in [0, 100], or a scalar array of any real dtype. Between two norms of the history it
        is interpolated, as in `numpy.percentile`.
      history_length: H, an int >= 1, the number of norms in the history. `None` means 1024.
      sharded_over: as in `grad_norm`.

    Returns:
      A transformation with state `ClipByNormPercentileState(history, threshold, grad_norm, clip_scale)`; the last three
      are float32 scalars of the last update (before the first: inf, 0 and 1).

    Raises:
      ValueError: `percentile` or `history_length` is not as described; or as in `grad_norm`.

    Example:
      >>> tx = clip_by_norm_percentile(50.0)
      >>> state = tx.init(jnp.zeros(2))
      >>> for scale in (1.0, 3.0, 2.0):
      ...     updates, state = tx.update(scale * jnp.array([0.6, 0.8]), state)
      >>> state.threshold, updates
      (Array(2., dtype=float32), Array([1.2, 1.6], dtype=float32))

    Source: P. Seetharaman, G. Wichern, B. Pardo, J. Le Roux, "AutoClip: Adaptive gradient clipping for source
    separation networks", MLSP 2020, arXiv:2007.14469, Algorithm 1, there with an unbounded history.
    """
    percentile = _arguments.real("percentile", percentile, at_least=0, at_most=100)
    length = _arguments.length("history_length", history_length, default=1024)
    axes = _arguments.sharded_over(sharded_over)

    def init_fn(params: optax.Params) -> ClipByNormPercentileState:
        del params
        return ClipByNormPercentileState(
            history=_history.empty_history(length),
            threshold=jnp.full((), jnp.inf, jnp.float32),
            grad_norm=jnp.zeros((), jnp.float32),
            clip_scale=jnp.ones((), jnp.float32),
        )

    def update_fn(
        updates: optax.Updates, state: ClipByNormPercentileState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, ClipByNormPercentileState]:
        del params, extra_args
        norm = global_norm(updates, 2.0, axes)
        grad_norm = _extended.to_float32(norm)
        history = _history.push(state.history, grad_norm)
        threshold = _history.percentile(history, percentile)
        updates, scale = clip_to_limit(updates, norm, _float32_limit(threshold, grad_norm, norm))
        return updates, ClipByNormPercentileState(history, threshold, grad_norm, _scaling.applied_scale(scale))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@described
class ClipByNormZscoreState(NamedTuple):
    """The moments of the norms and measurements of the last update. Its fields are a file format."""

    recorded: Annotated[jax.Array, "int32 (): number of norms recorded so far"]
    mean: Annotated[jax.Array, "float32 (): the mean of the norms, each clipped by its own z-score"]
    std: Annotated[jax.Array, "float32 (): the standard deviation of the same norms"]
    threshold: Annotated[jax.Array, "float32 (): the last norm's threshold; if it was no spike, the least spike"]
    grad_norm: Annotated[jax.Array, "float32 (): the last norm before clipping"]
    clip_scale: Annotated[jax.Array, "float32 (): the number that multiplied the gradients; 1 if not clipped"]

    def metrics(self) -> dict[str, Any]:
        """Returns the entries of `shrewjax.metrics`."""
        return fields(self, "threshold", "grad_norm", "clip_scale", "mean", "std")


def clip_by_norm_zscore(
    max_zscore: Any = 2.5,
    *,
    decay: Any = 0.97,
    warmup_steps: Any = 25,
    max_norm: Any = math.inf,
    eps: Any = 1e-6,
    sharded_over: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Clips the norm of all gradients together when it stands out from the recent ones (ZClip).

    .. math:: z_t = \frac{\|g_t\| - \mu}{\sigma + \epsilon}, \qquad
              n_t = \mu + \frac{z_{thr}^2}{z_t} \sigma \;\text{ if } z_t > z_{thr}, \text{ else } \|g_t\|

    The norm is clipped to :math:`\min(n_t, \text{max\_norm})`. The further a spike stands out, the more it is clipped.
    Then the moments are updated with the norm as the rule, without `max_norm`, clipped it:

    .. math:: \mu \leftarrow \beta \mu + (1 - \beta) n_t, \qquad
              \sigma^2 \leftarrow \beta \sigma^2 + (1 - \beta) (n_t - \mu)^2

    with the new mean. In the first `warmup_steps` steps there is no z-score, and only `max_norm` clips. The mean and
    the standard deviation are then those of all norms so far, with their number as the denominator.

    ========================================  =======================================================================
    condition                                 result
    ========================================  =======================================================================
    a NaN or infinite gradient                not recorded; every floating leaf becomes NaN. In the warm-up with
                                              max_norm = inf, the gradient passes as it is
    norm beyond float32                       in the warm-up not recorded; later clipped to the mean, and so recorded
    all norms equal                           the mean is that norm to the last bit, the deviation 0
    then a new, higher level of norms         clipped to the mean forever, because the threshold cannot rise without
                                              deviation
    mean 0 (no warm-up, or only zeros in it)  as in the warm-up, until the mean is positive
    a NaN argument in an array                every floating leaf becomes NaN; nothing non-finite is recorded
    z at most max_zscore, norm <= max_norm    the gradients to the last bit
    max_norm = inf                            no cap; in the warm-up nothing is clipped
    ========================================  =======================================================================

    Args:
      max_zscore: the largest z-score of a norm that is no spike, a real scalar >= 0, or a scalar array.
      decay: beta, a real scalar in [0, 1], or a scalar array.
      warmup_steps: a number of recorded norms, a real scalar >= 0, or a scalar array.
      max_norm: a cap on every step, a real scalar >= 0, or a scalar array. The default, inf, is no cap. The paper's 1.0
        suits the gradients of the language models that it trained.
      eps: added to the deviation, a real scalar >= 0, or a scalar array.
      sharded_over: as in `grad_norm`.

    Returns:
      A transformation with state `ClipByNormZscoreState(recorded, mean, std, threshold, grad_norm, clip_scale)`: an
      int32 scalar and float32 scalars.

    Raises:
      ValueError: an argument is not as described; or as in `grad_norm`.

    Example:
      >>> tx = clip_by_norm_zscore(warmup_steps=4)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (0.9, 1.1, 0.9, 1.1, 2.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> updates.round(4)  # mean 1, deviation 0.1, z = 10: clipped to 1 + 0.1 * 2.5**2 / 10
      Array([1.0625], dtype=float32)

    Source: A. Kumar et al., "ZClip: Adaptive spike mitigation for LLM pre-training", 2025, arXiv:2504.02507.
    """
    max_zscore = _arguments.threshold("max_zscore", max_zscore)
    decay = _arguments.real("decay", decay, at_least=0, at_most=1)
    warmup_steps = _arguments.threshold("warmup_steps", warmup_steps)
    max_norm, eps = _arguments.threshold("max_norm", max_norm), _arguments.threshold("eps", eps)
    axes = _arguments.sharded_over(sharded_over)

    def init_fn(params: optax.Params) -> ClipByNormZscoreState:
        del params
        return ClipByNormZscoreState(
            recorded=jnp.zeros((), jnp.int32),
            mean=jnp.zeros((), jnp.float32),
            std=jnp.zeros((), jnp.float32),
            threshold=jnp.full((), jnp.inf, jnp.float32),
            grad_norm=jnp.zeros((), jnp.float32),
            clip_scale=jnp.ones((), jnp.float32),
        )

    def update_fn(
        updates: optax.Updates, state: ClipByNormZscoreState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, ClipByNormZscoreState]:
        del params, extra_args
        limit_z, eps_, cap = (jnp.asarray(x, jnp.float32) for x in (max_zscore, eps, max_norm))
        norm = global_norm(updates, 2.0, axes)
        grad_norm = _extended.to_float32(norm)

        past = _history.Moments(state.recorded, state.mean, state.std)
        is_warmup = past.recorded.astype(jnp.float32) < jnp.asarray(warmup_steps, jnp.float32)
        # A mean of 0 (no warm-up, or only zero gradients so far) cannot serve for a z-score either.
        averages_all = is_warmup | (past.recorded == 0) | (past.mean == 0)
        z = (grad_norm - past.mean) / (past.std + eps_)
        is_spike = ~averages_all & (z > limit_z)
        clipped_norm = past.mean + limit_z * (limit_z / jnp.where(is_spike, z, 1)) * past.std
        # No norm below a spike exceeds this, in spite of rounding.
        onset = jnp.fmax(past.mean + limit_z * (past.std + eps_), grad_norm)
        threshold = jnp.minimum(jnp.where(averages_all, jnp.inf, jnp.where(is_spike, clipped_norm, onset)), cap)
        threshold = jnp.where(jnp.isnan(limit_z) | jnp.isnan(eps_), jnp.nan, threshold)
        updates, scale = clip_to_limit(updates, norm, _float32_limit(threshold, grad_norm, norm))

        # A finite gradient whose norm is beyond float32 is recorded as clipped. An infinite gradient is not recorded.
        value = jnp.where(jnp.isfinite(norm.mantissa), jnp.where(is_spike, clipped_norm, grad_norm), jnp.nan)
        moments = _history.update_moments(past, value, jnp.asarray(1 - decay, jnp.float32), averages_all)
        return updates, ClipByNormZscoreState(
            *moments, threshold=threshold, grad_norm=grad_norm, clip_scale=_scaling.applied_scale(scale)
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _float32_limit(threshold: jax.Array, grad_norm: jax.Array, norm: ExtendedFloat) -> ExtendedFloat:
    """Returns the limit of a norm; inf if its float32 value, which is what states show, is within the threshold.

    Without this, a norm that reads equal to its threshold could be clipped for digits beyond float32. The test is
    `test_percentile_100_leaves_gradients_of_any_size_alone`.
    """
    return _scaling.as_limit(jnp.where(grad_norm <= threshold, jnp.inf, threshold), norm)
