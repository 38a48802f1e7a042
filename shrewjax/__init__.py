"""Gradient clipping and accumulation for JAX, as composable Optax transformations."""

from types import FunctionType as _FunctionType

from shrewjax import spec
from shrewjax._accumulation import (
    AccumulateState,
    GradAccumulator,
    GradAccumulatorState,
    accumulate,
    apply_gradients,
    check_window,
    flush,
    redistribute,
)
from shrewjax._adaptive import (
    AdaptiveGradClipState,
    ClipByBlockRmsState,
    ClipByLeafNormEmaState,
    ClipByNormPercentileState,
    ClipByNormZscoreState,
    adaptive_grad_clip,
    clip_by_block_rms,
    clip_by_leaf_norm_ema,
    clip_by_norm_percentile,
    clip_by_norm_zscore,
)
from shrewjax._clipping import (
    ClipByGlobalNormState,
    ClipByLeafNormState,
    ClipByPercentileState,
    clip_by_global_norm,
    clip_by_leaf_norm,
    clip_by_percentile,
    clip_by_value,
    clip_grad_norm,
    clip_grad_percentile,
    clip_grad_value,
    grad_norm,
)
from shrewjax._cotangents import clip_cotangent
from shrewjax._guards import SkipNonfiniteState, SkipOnSpikeState, skip_nonfinite, skip_on_spike
from shrewjax._metrics import metrics
from shrewjax._rows import state_specs

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
    # Accumulate.
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
