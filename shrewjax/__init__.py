"""Gradient clipping and accumulation for JAX, as composable Optax transformations."""

from types import FunctionType as _FunctionType

from shrewjax import spec
from shrewjax._accumulation import AccumulateState, accumulate
from shrewjax._accumulator import GradAccumulator
from shrewjax._batches import value_and_grad
from shrewjax._clipping import (
    ClipByGlobalNormState,
    clip_by_global_norm,
    clip_by_value,
    clip_grad_norm,
    clip_grad_value,
    grad_norm,
)
from shrewjax._clipping_averages import ClipByLeafNormEmaState, clip_by_leaf_norm_ema
from shrewjax._clipping_history import (
    ClipByNormPercentileState,
    ClipByNormZscoreState,
    clip_by_norm_percentile,
    clip_by_norm_zscore,
)
from shrewjax._clipping_percentile import ClipByPercentileState, clip_by_percentile, clip_grad_percentile
from shrewjax._clipping_units import (
    AdaptiveGradClipState,
    ClipByBlockRmsState,
    ClipByLeafNormState,
    adaptive_grad_clip,
    clip_by_block_rms,
    clip_by_leaf_norm,
)
from shrewjax._cotangents import clip_cotangent
from shrewjax._guards import SkipNonfiniteState, SkipOnSpikeState, skip_nonfinite, skip_on_spike
from shrewjax._metrics import metrics
from shrewjax._sharded_state import redistribute, state_specs
from shrewjax._train_step import apply_gradients, check_window, flush
from shrewjax._window import GradAccumulatorState

__version__ = "0.1.0"

__all__ = [
    # Measure and apply: a pytree in, a pytree out.
    "clip_grad_norm",
    "clip_grad_percentile",
    "clip_grad_value",
    "grad_norm",
    # Clip, as Optax transformations.
    "clip_by_global_norm",
    "clip_by_leaf_norm",
    "clip_by_percentile",
    "clip_by_value",
    "ClipByGlobalNormState",
    "ClipByLeafNormState",
    "ClipByPercentileState",
    # Clip in the backward pass.
    "clip_cotangent",
    # Clip to a threshold that is measured.
    "adaptive_grad_clip",
    "clip_by_block_rms",
    "clip_by_leaf_norm_ema",
    "clip_by_norm_percentile",
    "clip_by_norm_zscore",
    "AdaptiveGradClipState",
    "ClipByBlockRmsState",
    "ClipByLeafNormEmaState",
    "ClipByNormPercentileState",
    "ClipByNormZscoreState",
    # Skip a step.
    "skip_nonfinite",
    "skip_on_spike",
    "SkipNonfiniteState",
    "SkipOnSpikeState",
    # Accumulate: a whole batch in one call, or batches that come one by one.
    "value_and_grad",
    "accumulate",
    "apply_gradients",
    "check_window",
    "flush",
    "redistribute",
    "state_specs",
    "GradAccumulator",
    "AccumulateState",
    "GradAccumulatorState",
    # Read what was measured.
    "metrics",
    # The definition that all of it is held to.
    "spec",
]

# `help` and pickle find a function where users do. (Classes keep their module: `inspect` looks for their source there.)
for _name in __all__:
    if isinstance(globals()[_name], _FunctionType):
        globals()[_name].__module__ = __name__
