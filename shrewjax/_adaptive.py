"""Clipping to a threshold that is measured: against the parameters, the leaf's size, or the norms of past steps.

Two kinds. `clip_by_norm_percentile` and `clip_by_norm_zscore` scale all gradients by one number, as
`clip_by_global_norm` does. `adaptive_grad_clip`, `clip_by_block_rms` and `clip_by_leaf_norm_ema` scale each *unit*: a
leaf, a layer of a leaf that stacks layers, or what the rule says. What past steps leave behind is in float32, whatever
the gradients are in, and a step with a gradient that is not finite leaves nothing behind.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax

from shrewjax import _checks, _norms, _statistics
from shrewjax._checks import AxesOf, KeyPath, UnitAxisNames
from shrewjax._clipping import global_norm, hold_to
from shrewjax._norms import Factor, Scaled
from shrewjax._reductions import (
    Axes,
    AxisName,
    Kept,
    UnitAxes,
    is_counted,
    leaf_maxima,
    leaf_sums,
    sizes,
    unit_axes,
    unit_zeros,
)
from shrewjax._states import described, fields

Unit = Literal["auto", "tensor"]
UnitAxisName = AxisName | jax.P | Callable[[str, Any], Any]
"""What users may pass as `sharded_over` to a rule for units."""

# --- one threshold for all gradients together ------------------------------------------------------------------


@described
class ClipByNormPercentileState(NamedTuple):
    """The norms so far and what the last update did. Its fields are a file format."""

    history: Annotated[_statistics.History, "the last finite norms, before clipping"]
    threshold: Annotated[jax.Array, "float32 (): what the last norm was held to; inf while there is no history"]
    grad_norm: Annotated[jax.Array, "float32 (): the last norm before clipping"]
    clip_scale: Annotated[jax.Array, "float32 (): what the gradients were multiplied by; 1 if not clipped"]

    def metrics(self) -> dict[str, Any]:
        """Returns what `shrewjax.metrics` shows."""
        return fields(self, "threshold", "grad_norm", "clip_scale")


def clip_by_norm_percentile(
    percentile: Any, *, history_length: int | None = None, sharded_over: AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Clips the norm of all gradients together to a percentile of the norms so far (AutoClip).

    .. math:: g_t \leftarrow g_t \cdot \min\Big(1, \frac{c_t}{\|g_t\|}\Big), \qquad
              c_t = \mathrm{percentile}_p(\|g_{t-H+1}\|, \dots, \|g_t\|)

    The present norm counts, and norms count as they are before clipping. With a percentile of 10, as in
    the paper, nine steps in ten are clipped: the rule normalises more than it guards. For a guard, take a percentile
    near 100, or `skip_on_spike`.

    The first row that fits:

    ========================================  =======================================================================
    condition                                 result
    ========================================  =======================================================================
    NaN percentile in an array                every floating leaf becomes NaN; the norm is recorded if it is finite
    a NaN or infinite gradient, or a norm     not recorded; while nothing else is, it passes as it is. Later a gradient
    beyond float32                            that is not finite makes every floating leaf NaN, and such a norm is
                                              clipped to the percentile of the others
    the first norm; percentile = 100          never clipped, the gradients to the last bit
    percentile = 0                            clipped to the smallest norm in the history
    ========================================  =======================================================================

    A percentile outside [0, 100] in an array counts as 0 or 100. A norm of 0 counts as any other: with more than p % of
    them, all updates are 0. When the history is full, the oldest norm makes place.

    The rows of `clip_grad_norm` hold for the clip itself.

    Args:
      percentile: p, a real scalar in [0, 100], or a scalar array of any real dtype. Between two norms of the history it
        is interpolated, as in `numpy.percentile`.
      history_length: H, an int >= 1, how many norms are remembered. `None` means 1024.
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
    percentile = _checks.real("percentile", percentile, at_least=0, at_most=100)
    length = _checks.length("history_length", history_length, default=1024)
    axes = _checks.sharded_over(sharded_over)

    def init_fn(params: optax.Params) -> ClipByNormPercentileState:
        del params
        return ClipByNormPercentileState(
            history=_statistics.empty_history(length),
            threshold=jnp.full((), jnp.inf, jnp.float32),
            grad_norm=jnp.zeros((), jnp.float32),
            clip_scale=jnp.ones((), jnp.float32),
        )

    def update_fn(
        updates: optax.Updates,
        state: ClipByNormPercentileState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ClipByNormPercentileState]:
        del params, extra_args
        norm = global_norm(updates, 2.0, axes)
        grad_norm = _norms.to_float32(norm)
        history = _statistics.push(state.history, grad_norm)
        threshold = _statistics.percentile(history, percentile)
        updates, factor = hold_to(updates, norm, _limit_as_shown(threshold, grad_norm, norm))
        return updates, ClipByNormPercentileState(history, threshold, grad_norm, _norms.applied_scale(factor))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@described
class ClipByNormZscoreState(NamedTuple):
    """The norms' statistics and what the last update did. Its fields are a file format."""

    recorded: Annotated[jax.Array, "int32 (): norms recorded so far"]
    mean: Annotated[jax.Array, "float32 (): the mean of the norms, each held to its own threshold"]
    std: Annotated[jax.Array, "float32 (): their standard deviation, likewise"]
    threshold: Annotated[jax.Array, "float32 (): what the last norm was held to; if it was no spike, where one begins"]
    grad_norm: Annotated[jax.Array, "float32 (): the last norm before clipping"]
    clip_scale: Annotated[jax.Array, "float32 (): what the gradients were multiplied by; 1 if not clipped"]

    def metrics(self) -> dict[str, Any]:
        """Returns what `shrewjax.metrics` shows."""
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

    The norm is held to :math:`\min(n_t, \text{max\_norm})`: the further a spike stands out, the harder it is clipped.
    Then the averages move, by the norm as the rule (not `max_norm`) left it:

    .. math:: \mu \leftarrow \beta \mu + (1 - \beta) n_t, \qquad
              \sigma^2 \leftarrow \beta \sigma^2 + (1 - \beta) (n_t - \mu)^2

    with the new mean. In the first `warmup_steps` steps there is no z-score: mean and standard deviation are those of
    all norms so far, dividing by their number, and only `max_norm` holds.

    ========================================  =======================================================================
    condition                                 result
    ========================================  =======================================================================
    a NaN or infinite gradient                not recorded; every floating leaf becomes NaN (while `max_norm` is inf,
                                              in the warm-up: it passes as it is)
    norm beyond float32                       in the warm-up not recorded; then held to the mean, and recorded so
    all norms equal                           the mean is that norm to the last bit, the deviation 0
    then a new, higher level of norms         held to the mean for good: without any deviation there is no growth
    mean 0 (no warm-up, or one of zeros)      as in the warm-up, until there is another
    a NaN argument in an array                every floating leaf becomes NaN; nothing is recorded that is not finite
    z at most max_zscore, norm <= max_norm   the gradients to the last bit
    max_norm = inf                            no cap; in the warm-up nothing is clipped
    ========================================  =======================================================================

    Args:
      max_zscore: the z-score from which on a norm is a spike, a real scalar >= 0, or a scalar array.
      decay: beta, a real scalar in [0, 1], or a scalar array.
      warmup_steps: a number of recorded norms, a real scalar >= 0, or a scalar array.
      max_norm: a cap on every step, a real scalar >= 0, or a scalar array. The default, inf, is no cap. The paper's 1.0
        suits gradients of the scale that it trained language models with.
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
      >>> updates.round(4)  # mean 1, deviation 0.1: z = 10, held to 1 + 0.1 * 2.5**2 / 10
      Array([1.0625], dtype=float32)

    Source: A. Kumar et al., "ZClip: Adaptive spike mitigation for LLM pre-training", 2025, arXiv:2504.02507.
    """
    max_zscore = _checks.threshold("max_zscore", max_zscore)
    decay = _checks.real("decay", decay, at_least=0, at_most=1)
    warmup_steps = _checks.threshold("warmup_steps", warmup_steps)
    max_norm, eps = _checks.threshold("max_norm", max_norm), _checks.threshold("eps", eps)
    axes = _checks.sharded_over(sharded_over)

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
        updates: optax.Updates,
        state: ClipByNormZscoreState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ClipByNormZscoreState]:
        del params, extra_args
        limit_z, eps_, cap = (jnp.asarray(x, jnp.float32) for x in (max_zscore, eps, max_norm))
        norm = global_norm(updates, 2.0, axes)
        grad_norm = _norms.to_float32(norm)

        past = _statistics.Moments(state.recorded, state.mean, state.std)
        is_warmup = past.recorded.astype(jnp.float32) < jnp.asarray(warmup_steps, jnp.float32)
        # A mean of 0, too, says nothing of what is to come: without any warm-up, or after one of zeros.
        averages_all = is_warmup | (past.recorded == 0) | (past.mean == 0)
        z = (grad_norm - past.mean) / (past.std + eps_)
        is_spike = ~averages_all & (z > limit_z)
        held = past.mean + limit_z * (limit_z / jnp.where(is_spike, z, 1)) * past.std
        # What is no spike is at most this, whatever the rounding.
        onset = jnp.fmax(past.mean + limit_z * (past.std + eps_), grad_norm)
        threshold = jnp.minimum(jnp.where(averages_all, jnp.inf, jnp.where(is_spike, held, onset)), cap)
        threshold = jnp.where(jnp.isnan(limit_z) | jnp.isnan(eps_), jnp.nan, threshold)
        updates, factor = hold_to(updates, norm, _limit_as_shown(threshold, grad_norm, norm))

        # A spike beyond float32 is recorded as what is left of it, an infinite gradient is not.
        value = jnp.where(jnp.isfinite(norm.mantissa), jnp.where(is_spike, held, grad_norm), jnp.nan)
        moments = _statistics.update_moments(past, value, jnp.asarray(1 - decay, jnp.float32), averages_all)
        return updates, ClipByNormZscoreState(
            *moments, threshold=threshold, grad_norm=grad_norm, clip_scale=_norms.applied_scale(factor)
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _limit_as_shown(threshold: jax.Array, grad_norm: jax.Array, norm: Scaled) -> Scaled:
    """What to hold a norm to: decided on the number that is recorded and shown, not on digits beyond it."""
    return _norms.limit(jnp.where(grad_norm <= threshold, jnp.inf, threshold), norm)


# --- a threshold for each unit ---------------------------------------------------------------------------------


@described
class AdaptiveGradClipState(NamedTuple):
    """What the last update measured."""

    ratio_max: Annotated[jax.Array, "float32 (): the largest ratio of a unit's gradient norm to its parameter norm"]
    clipped_fraction: Annotated[jax.Array, "float32 (): clipped units / units"]

    def metrics(self) -> dict[str, Any]:
        """Returns what `shrewjax.metrics` shows."""
        return self._asdict()


def adaptive_grad_clip(
    clipping: Any = 0.01,
    *,
    eps: Any = 1e-3,
    unit: Unit = "auto",
    axis: Any = None,
    batch_axes: Any = None,
    sharded_over: UnitAxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Clips the norm of each unit to a share of the norm of its parameters (AGC).

    .. math:: g_i \leftarrow g_i \cdot \min\Big(1, \frac{\lambda \max(\|w_i\|, \epsilon)}{\|g_i\|}\Big)

    A unit is what shares a norm. With `unit="auto"`, by the leaf's rank without `batch_axes`: 0 and 1, the whole; 2 and
    3, a unit for each position of all axes but the first (the inputs of a dense or multi-head kernel); 4 and more, for
    each position of the last (the outputs of a convolution). With `unit="tensor"`, the whole. `axis` says which axes
    share a norm instead.

    The first row that fits:

    ========================================  =======================================================================
    condition, unit by unit                   result
    ========================================  =======================================================================
    clipping = inf                            the gradients to the last bit, whatever they hold
    a NaN parameter, a NaN `eps` in an array  the unit becomes NaN, other units do not
    an infinite parameter, or eps = inf       as with clipping = inf
    a NaN or infinite gradient, a NaN         the unit becomes NaN, other units do not
    `clipping` in an array
    ratio at most `clipping`                  the gradients to the last bit
    parameters zero, or below `eps`           clipped to clipping * eps: it learns
    parameters zero, eps = 0                  zeros
    ========================================  =======================================================================

    The authors leave the classifier, the last linear layer, unclipped: see `optax.masked`.

    Args:
      clipping: lambda, a real scalar >= 0, or a scalar array. The authors' 0.01 is for a batch of 4096; smaller batches
        want more.
      eps: the least norm that parameters count with, a real scalar >= 0, or a scalar array.
      unit: `"auto"` or `"tensor"`, see above.
      axis: the axes that share a norm: an int, a tuple of ints, or a function of a leaf's name (as
        `jax.tree_util.keystr` has it) and the leaf that returns such, or None for what `unit` says.
      batch_axes: the axes along which layers are stacked, likewise; None or () for none. They share nothing.
      sharded_over: needed inside `jax.shard_map` and `jax.pmap` where a leaf has several units, because its type
        does not tell what other devices hold of it. A function of a leaf's name and the leaf that returns how it is sharded, a
        `jax.P`, as in `in_specs`; or one `jax.P` for all leaves, such as `jax.P()` if every device holds all of them.
        Names of mapped axes, for all leaves or returned by the function, are those along which units are divided:
        where devices hold parts of the same units, not other units. For leaves of one unit, names are as in
        `grad_norm`.

    Returns:
      A transformation with state `AdaptiveGradClipState(ratio_max, clipped_fraction)`, float32 scalars of the
      last update (before the first: 0). Its `update` needs `params`, of the gradients' shapes.

    Raises:
      ValueError: an argument is not as described; an axis is out of range for a leaf; `params` are missing or differ in
        shape; how a leaf of several units is spread over devices is not told, or not as its type says; or as in
        `grad_norm`.

    Example:
      >>> tx = adaptive_grad_clip(0.1)
      >>> params = {"w": jnp.ones((4, 2))}  # two units of norm 2
      >>> grads = {"w": jnp.ones((4, 2)) * jnp.array([[1.0, 0.05]])}  # of norms 2 and 0.1
      >>> updates, state = tx.update(grads, tx.init(params), params)
      >>> updates["w"][0].round(6), state.ratio_max, state.clipped_fraction
      (Array([0.1 , 0.05], dtype=float32), Array(1., dtype=float32), Array(0.5, dtype=float32))

    Source: A. Brock, S. De, S. L. Smith, K. Simonyan, "High-performance large-scale image recognition without
    normalization", ICML 2021, arXiv:2102.06171, equation 3.
    """
    clipping, eps = _checks.threshold("clipping", clipping), _checks.threshold("eps", eps)
    unit = _checks.choice("unit", unit, ("auto", "tensor"))
    axis, batch_axes = _checks.axes("axis", axis), _checks.axes("batch_axes", batch_axes)
    mesh_axes = _checks.unit_axis_names(sharded_over)

    def kept(path: KeyPath, leaf: Any) -> Kept:
        batch = _checks.axes_of_leaf("batch_axes", batch_axes, path, leaf) or ()
        shared = _checks.axes_of_leaf("axis", axis, path, leaf)
        if shared is None:
            free = [a for a in range(leaf.ndim) if a not in batch]
            by_rank = free if len(free) < 2 else free[:1] if len(free) < 4 else free[:-1]
            shared = tuple(by_rank if unit == "auto" else free)
        return tuple(a for a in range(leaf.ndim) if a in batch or a not in shared)

    def init_fn(params: optax.Params) -> AdaptiveGradClipState:
        _find_units(params, kept)
        return AdaptiveGradClipState(*(jnp.zeros((), jnp.float32) for _ in AdaptiveGradClipState._fields))

    def update_fn(
        updates: optax.Updates,
        state: AdaptiveGradClipState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AdaptiveGradClipState]:
        del state, extra_args
        if params is None:
            raise ValueError("adaptive_grad_clip compares gradients with parameters: pass params to update")
        units = _find_units(updates, kept)
        weights = units.beside(params)
        for path, g, w in zip(units.paths, units.leaves, weights, strict=True):
            if not is_counted(w) or g.shape != w.shape:
                raise ValueError(
                    f"gradient leaf {_checks.leaf_name(path)} is {g.dtype} of shape {g.shape}, its parameter {w.dtype} "
                    f"of shape {w.shape}"
                )
        axes = units.axes(mesh_axes)
        over = _norms.packed_axes(axes, units.kept)
        norms = _norms.measure_units(units.leaves, units.kept, axes)
        weight_norms = _norms.measure_units(weights, units.kept, units._replace(leaves=weights).axes(mesh_axes))

        bases = [
            _norms.in_dtype_of(_norms.maximum(w, _norms.limit(eps, w)), norm)
            for w, norm in zip(weight_norms, norms, strict=True)
        ]
        limits = [_norms.product(base, _norms.limit(clipping, base)) for base in bases]
        factors = _norms.clip_factors(norms, limits)
        return units.scaled(updates, factors), AdaptiveGradClipState(
            ratio_max=_largest(list(map(_norms.quotient, norms, bases)), over),
            clipped_fraction=_clipped_fraction(factors, norms, over),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@described
class ClipByBlockRmsState(NamedTuple):
    """What the last update measured."""

    rms_max: Annotated[jax.Array, "float32 (): the largest of a block before clipping"]
    clipped_fraction: Annotated[jax.Array, "float32 (): clipped blocks / blocks"]

    def metrics(self) -> dict[str, Any]:
        """Returns what `shrewjax.metrics` shows."""
        return self._asdict()


def clip_by_block_rms(
    threshold: Any = 1.0, *, batch_axes: Any = None, sharded_over: UnitAxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Clips the root mean square of each leaf, or of each layer that it stacks.

    .. math:: u_\ell \leftarrow \frac{u_\ell}{\max(1, \mathrm{RMS}(u_\ell) / d)}, \qquad
              \mathrm{RMS}(u) = \sqrt{\textstyle\frac{1}{n} \sum_{i=1}^n u_i^2}

    Meant for what an optimizer makes of the gradients, so chained after its scaling: there a typical element is about
    1, whatever the size of the leaf.

    ========================================  =======================================================================
    condition, block by block                 result
    ========================================  =======================================================================
    threshold = inf                           the updates to the last bit, whatever they hold
    a NaN or infinity, or a NaN threshold     the block becomes NaN, others do not
    RMS at most `threshold`                   the updates to the last bit
    no elements                               RMS 0
    ========================================  =======================================================================

    Args:
      threshold: d, a real scalar >= 0, or a scalar array.
      batch_axes: the axes along which blocks are stacked in a leaf: an int, a tuple of ints, a function of a
        leaf's name (as `jax.tree_util.keystr` has it) and the leaf that returns such, or None for none.
      sharded_over: as in `adaptive_grad_clip`.

    Returns:
      A transformation with state `ClipByBlockRmsState(rms_max, clipped_fraction)`, float32 scalars of the last
      update (before the first: 0).

    Raises:
      ValueError: an argument is not as described; an axis is out of range for a leaf; or as in `adaptive_grad_clip`.

    Example:
      >>> tx = clip_by_block_rms(1.0, batch_axes=0)
      >>> updates = jnp.array([[0.5, 0.5], [3.0, 3.0]])  # two layers
      >>> tx.update(updates, tx.init(updates))[0].round(6)
      Array([[0.5, 0.5],
             [1. , 1. ]], dtype=float32)

    Source: N. Shazeer, M. Stern, "Adafactor: Adaptive learning rates with sublinear memory cost", ICML 2018,
    arXiv:1804.04235, section 6 and Algorithm 4.
    """
    threshold = _checks.threshold("threshold", threshold)
    batch_axes, mesh_axes = _checks.axes("batch_axes", batch_axes), _checks.unit_axis_names(sharded_over)

    def init_fn(params: optax.Params) -> ClipByBlockRmsState:
        _find_units(params, _stacked(batch_axes))
        return ClipByBlockRmsState(*(jnp.zeros((), jnp.float32) for _ in ClipByBlockRmsState._fields))

    def update_fn(
        updates: optax.Updates,
        state: ClipByBlockRmsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ClipByBlockRmsState]:
        del state, params, extra_args
        units = _find_units(updates, _stacked(batch_axes))
        axes = units.axes(mesh_axes)
        over = _norms.packed_axes(axes, units.kept)
        norms = _norms.measure_units(units.leaves, units.kept, axes)
        counts = sizes(units.leaves, axes=[of_leaf.divided for of_leaf in axes], kept=units.kept)
        # Not the rounded RMS is compared, but the norm: so that a block of ones is within a threshold of 1.
        of_ones, inverses = (
            _norms.packed(
                [_norms.split_number(max(n, 1) ** power, norms[0].mantissa.dtype) for n in counts], units.kept
            )
            for power in (0.5, -0.5)
        )
        limits = [_norms.product(_norms.limit(threshold, n), n) for n in of_ones]
        rms = list(map(_norms.product, norms, inverses))
        factors = _norms.clip_factors(norms, limits)
        return units.scaled(updates, factors), ClipByBlockRmsState(
            rms_max=_largest(rms, over),
            clipped_fraction=_clipped_fraction(factors, norms, over),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@described
class ClipByLeafNormEmaState(NamedTuple):
    """The units' averages and what the last update did. Its fields are a file format."""

    recorded: Annotated[jax.Array, "int32 (): steps recorded so far"]
    norm_ema: Annotated[Any, "like the parameters, float32 (sizes of a leaf's batch axes): 0 where none is recorded"]
    threshold_max: Annotated[
        jax.Array, "float32 (): the largest that a norm was held to; in the warm-up the global one"
    ]
    grad_norm_max: Annotated[jax.Array, "float32 (): the largest of a unit before clipping"]
    clipped_fraction: Annotated[jax.Array, "float32 (): clipped units / units"]

    def metrics(self) -> dict[str, Any]:
        """Returns what `shrewjax.metrics` shows."""
        return fields(self, "threshold_max", "grad_norm_max", "clipped_fraction")


def clip_by_leaf_norm_ema(
    max_ratio: Any = 1.04,
    *,
    decay: Any = 0.99,
    warmup_steps: Any = 100,
    warmup_max_norm: Any = 1.0,
    min_norm: Any = 1e-6,
    batch_axes: Any = None,
    sharded_over: UnitAxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Clips the norm of each leaf, or of each layer that it stacks, to a multiple of its own average (AdaGC).

    .. math:: h_\ell = \min\Big(1, \frac{\lambda \gamma_\ell}{\|g_\ell\|}\Big), \qquad
              \gamma_\ell \leftarrow \beta \gamma_\ell + (1 - \beta) \|h_\ell g_\ell\|

    In the first `warmup_steps` steps all gradients are clipped together, to `warmup_max_norm`, and :math:`\gamma_\ell`
    is the smallest norm that the leaf has had after that.

    ========================================  =======================================================================
    condition                                 result
    ========================================  =======================================================================
    a NaN or infinite gradient                nothing is recorded of the step, for no leaf; the leaf becomes NaN (in the
                                              warm-up: every floating leaf), or passes as it is where the threshold is
                                              infinite: warmup_max_norm, later max_ratio
    a leaf's gradient is zero                 nothing is recorded for it. As published, one zero in the warm-up holds
                                              a leaf at zero for ever: an idle expert, half of a low-rank adapter
    nothing recorded yet for a leaf, though   as in the warm-up, until it has a gradient; no threshold shows till then
    the warm-up is over
    norms rise for good                       the average grows by (1 - decay) (max_ratio - 1) a step at most: with the
                                              defaults, tenfold in 5,758 steps
    an average below `min_norm`               counts as `min_norm`: the way up is never longer than from there
    ========================================  =======================================================================

    Args:
      max_ratio: lambda, a real scalar >= 1, or a scalar array.
      decay: beta, a real scalar in [0, 1], or a scalar array.
      warmup_steps: a number of recorded steps, a real scalar >= 0, or a scalar array.
      warmup_max_norm: the global threshold of the warm-up, a real scalar >= 0, or a scalar array.
      min_norm: the floor of every average, a real scalar >= 0, or a scalar array.
      batch_axes: as in `clip_by_block_rms`.
      sharded_over: as in `adaptive_grad_clip`.

    Returns:
      A transformation with state `ClipByLeafNormEmaState(recorded, norm_ema, threshold_max, grad_norm_max,
      clipped_fraction)`: `norm_ema` like the parameters, float32 arrays of the sizes of the `batch_axes`, else scalars.

    Raises:
      ValueError: an argument is not as described; an axis is out of range for a leaf; the updates' tree, or a leaf's
        number of layers, differs from that of the parameters given to `init`; or as in `adaptive_grad_clip`.

    Example:
      >>> tx = clip_by_leaf_norm_ema(1.5, decay=0.5, warmup_steps=1)
      >>> params = {"a": jnp.zeros(1), "b": jnp.zeros(1)}
      >>> state = tx.init(params)
      >>> _, state = tx.update({"a": jnp.array([0.5]), "b": jnp.array([0.25])}, state)
      >>> updates, state = tx.update({"a": jnp.array([2.0]), "b": jnp.array([0.25])}, state)
      >>> updates, state.norm_ema["a"]
      ({'a': Array([0.75], dtype=float32), 'b': Array([0.25], dtype=float32)}, Array(0.625, dtype=float32))

    Source: G. Wang et al., "AdaGC: Improving training stability for large language model pretraining", 2025,
    arXiv:2502.11034; the floor and the handling of zeros are this package's.
    """
    max_ratio = _checks.real("max_ratio", max_ratio, at_least=1)
    decay = _checks.real("decay", decay, at_least=0, at_most=1)
    warmup_steps = _checks.threshold("warmup_steps", warmup_steps)
    warmup_max_norm = _checks.threshold("warmup_max_norm", warmup_max_norm)
    min_norm = _checks.threshold("min_norm", min_norm)
    batch_axes, mesh_axes = _checks.axes("batch_axes", batch_axes), _checks.unit_axis_names(sharded_over)

    def init_fn(params: optax.Params) -> ClipByLeafNormEmaState:
        units = _find_units(params, _stacked(batch_axes))
        uncounted = jax.tree.map(lambda _: jnp.zeros((), jnp.float32), params)
        return ClipByLeafNormEmaState(
            recorded=jnp.zeros((), jnp.int32),
            norm_ema=units.with_leaves(uncounted, list(map(unit_zeros, units.leaves, units.kept))),
            threshold_max=jnp.full((), jnp.inf, jnp.float32),
            grad_norm_max=jnp.zeros((), jnp.float32),
            clipped_fraction=jnp.zeros((), jnp.float32),
        )

    def update_fn(
        updates: optax.Updates,
        state: ClipByLeafNormEmaState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ClipByLeafNormEmaState]:
        del params, extra_args
        share, floor = jnp.asarray(1 - decay, jnp.float32), jnp.asarray(min_norm, jnp.float32)
        units = _find_units(updates, _stacked(batch_axes))
        emas = units.beside(state.norm_ema)
        for path, x, keep, ema in zip(units.paths, units.leaves, units.kept, emas, strict=True):
            expected = tuple(x.shape[a] for a in keep)
            if ema.shape != expected:
                raise ValueError(
                    f"gradient leaf {_checks.leaf_name(path)} of shape {x.shape} has averages of shape {expected}, but "
                    f"those in the state are of shape {ema.shape}: it was another leaf when init saw it"
                )
        axes = units.axes(mesh_axes)
        over = _norms.packed_axes(axes, units.kept)
        norms = _norms.measure_units(units.leaves, units.kept, axes)
        total = _norms.combine(norms, over)
        emas = _norms.packed(emas, units.kept)
        is_warmup = state.recorded.astype(jnp.float32) < jnp.asarray(warmup_steps, jnp.float32)
        is_recorded = jnp.isfinite(total.mantissa)

        def compared(norm: Scaled, ema: jax.Array) -> tuple[Scaled, Scaled]:
            """What is compared for a unit: a norm, and what it is held to."""
            own = _norms.product(_norms.limit(ema, norm), _norms.limit(max_ratio, norm))
            return _chosen(is_warmup | (ema == 0), (total, _norms.limit(warmup_max_norm, norm)), (norm, own))

        def next_ema(norm: Scaled, seen: Scaled, limit: Scaled, factor: Factor, ema: jax.Array) -> jax.Array:
            held = _norms.product(norm, _norms.quotient(limit, seen))
            clipped = _norms.to_float32(_chosen(factor.applies, held, norm))
            smallest = jnp.where(ema == 0, clipped, jnp.minimum(ema, clipped))
            ema_or_min = jnp.where(is_warmup | (ema == 0), smallest, _statistics.ema(ema, clipped, share))
            new = jnp.maximum(ema_or_min, floor)
            return jnp.where(is_recorded & jnp.isfinite(clipped) & jnp.isfinite(new) & (clipped > 0), new, ema)

        pairs = list(map(compared, norms, emas))
        seen, limits = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        factors = _norms.clip_factors(seen, limits)
        # Without a gradient, now or before, a unit is held to nothing.
        is_idle = [~is_warmup & (ema == 0) & (norm.mantissa == 0) for norm, ema in zip(norms, emas, strict=True)]
        shown = [
            limit._replace(mantissa=jnp.where(i, 0, limit.mantissa)) for i, limit in zip(is_idle, limits, strict=True)
        ]
        norm_emas = list(map(next_ema, norms, seen, limits, factors, emas))
        return units.scaled(updates, factors), ClipByLeafNormEmaState(
            recorded=jnp.where(is_recorded, optax.safe_increment(state.recorded), state.recorded),
            norm_ema=units.with_leaves(state.norm_ema, _norms.unpacked(norm_emas, units.kept)),
            threshold_max=_largest(shown, over),
            grad_norm_max=_largest(norms, over),
            clipped_fraction=_clipped_fraction(factors, norms, over),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Units(NamedTuple):
    """The leaves of gradients that count, and the axes along which each holds several units."""

    paths: tuple[KeyPath, ...]
    leaves: list[Any]
    kept: tuple[Kept, ...]

    def axes(self, given: UnitAxisNames) -> tuple[UnitAxes, ...]:
        """The mapped axes over which each leaf is spread."""
        return tuple(
            unit_axes(_checks.leaf_name(path), x, keep, _checks.axis_names_of_leaf(given, path, x))
            for path, x, keep in zip(self.paths, self.leaves, self.kept, strict=True)
        )

    def beside(self, tree: chex.ArrayTree) -> list[Any]:
        """The leaves of a tree like the parameters at the same places."""
        at = dict(jax.tree.leaves_with_path(tree))
        missing = [_checks.leaf_name(path) for path in self.paths if path not in at]
        if missing:
            raise ValueError(f"no parameter for the gradient leaves {', '.join(missing)}")
        return [_checks.array_leaf(path, at[path]) for path in self.paths]

    def with_leaves(self, tree: chex.ArrayTree, leaves: Sequence[Any]) -> chex.ArrayTree:
        """The tree with other leaves at the same places."""
        at = dict(zip(self.paths, leaves, strict=True))
        return jax.tree.map_with_path(lambda path, leaf: at.get(path, leaf), tree)

    def scaled(self, updates: chex.ArrayTree, factors: Sequence[Factor]) -> chex.ArrayTree:
        """The gradients, each unit times its factor, which come packed."""
        per_leaf = _norms.unpacked(factors, self.kept)
        return self.with_leaves(updates, list(map(_norms.scale_units, self.leaves, per_leaf, self.kept)))


def _find_units(updates: chex.ArrayTree, kept: Callable[[KeyPath, Any], Kept]) -> _Units:
    paths, leaves, _ = _checks.gradient_leaves(updates)
    counted = [(path, x) for path, x in zip(paths, leaves, strict=True) if is_counted(x)]
    return _Units(
        paths=tuple(path for path, _ in counted),
        leaves=[x for _, x in counted],
        kept=tuple(kept(path, x) for path, x in counted),
    )


def _stacked(batch_axes: AxesOf) -> Callable[[KeyPath, Any], Kept]:
    return lambda path, leaf: _checks.axes_of_leaf("batch_axes", batch_axes, path, leaf) or ()


def _chosen(condition: jax.Array, a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)


def _largest(numbers: Sequence[Scaled], over: list[Axes]) -> jax.Array:
    """The largest of all units, on all devices; NaN if there is one. Shape (), float32."""
    if not numbers:
        return jnp.zeros((), jnp.float32)
    values = [_norms.to_float32(n) for n in numbers]
    keys = leaf_maxima(_norms.magnitude_keys(jnp.dtype(jnp.float32)), values, axes=over)
    return lax.bitcast_convert_type(jnp.max(jnp.concatenate(keys)), jnp.float32)


def _clipped_fraction(factors: Sequence[Factor], norms: Sequence[Scaled], over: list[Axes]) -> jax.Array:
    """Clipped units / units, on all devices. Shape (), float32."""
    if not factors:
        return jnp.zeros((), jnp.float32)
    # Of nothing, nothing is clipped off.
    is_clipped = [factor.applies & (norm.mantissa != 0) for factor, norm in zip(factors, norms, strict=True)]
    clipped = leaf_sums(lambda flag: flag.astype(jnp.float32), is_clipped, axes=over)
    return jnp.sum(jnp.stack(clipped)) / max(sum(sizes(is_clipped, axes=over)), 1)
