"""Gradient clipping and accumulation for JAX, as composable Optax transformations."""

# Measure and apply: a pytree in, a pytree out.
from shrewjax._clipping import clip_grad_norm as clip_grad_norm
from shrewjax._clipping import clip_grad_percentile as clip_grad_percentile
from shrewjax._clipping import clip_grad_value as clip_grad_value
from shrewjax._clipping import grad_norm as grad_norm

# Clip, as Optax transformations.
from shrewjax._clipping import clip_by_global_norm as clip_by_global_norm
from shrewjax._clipping import clip_by_leaf_norm as clip_by_leaf_norm
from shrewjax._clipping import clip_by_percentile as clip_by_percentile
from shrewjax._clipping import clip_by_value as clip_by_value
from shrewjax._clipping import ClipByGlobalNormState as ClipByGlobalNormState
from shrewjax._clipping import ClipByLeafNormState as ClipByLeafNormState
from shrewjax._clipping import ClipByPercentileState as ClipByPercentileState

# Clip to a threshold that is measured.
from shrewjax._adaptive import adaptive_grad_clip as adaptive_grad_clip
from shrewjax._adaptive import clip_by_block_rms as clip_by_block_rms
from shrewjax._adaptive import clip_by_leaf_norm_ema as clip_by_leaf_norm_ema
from shrewjax._adaptive import clip_by_norm_percentile as clip_by_norm_percentile
from shrewjax._adaptive import clip_by_norm_zscore as clip_by_norm_zscore
from shrewjax._adaptive import AdaptiveGradClipState as AdaptiveGradClipState
from shrewjax._adaptive import ClipByBlockRmsState as ClipByBlockRmsState
from shrewjax._adaptive import ClipByLeafNormEmaState as ClipByLeafNormEmaState
from shrewjax._adaptive import ClipByNormPercentileState as ClipByNormPercentileState
from shrewjax._adaptive import ClipByNormZscoreState as ClipByNormZscoreState

# Skip a step.
from shrewjax._guards import skip_nonfinite as skip_nonfinite
from shrewjax._guards import skip_on_spike as skip_on_spike
from shrewjax._guards import SkipNonfiniteState as SkipNonfiniteState
from shrewjax._guards import SkipOnSpikeState as SkipOnSpikeState

# Accumulate.
from shrewjax._accumulation import accumulate as accumulate
from shrewjax._accumulation import apply_gradients as apply_gradients
from shrewjax._accumulation import check_window as check_window
from shrewjax._accumulation import flush as flush
from shrewjax._accumulation import redistribute as redistribute
from shrewjax._rows import state_specs as state_specs
from shrewjax._accumulation import GradAccumulator as GradAccumulator
from shrewjax._accumulation import AccumulateState as AccumulateState
from shrewjax._accumulation import GradAccumulatorState as GradAccumulatorState

# Read what was measured.
from shrewjax._metrics import metrics as metrics

# The definition that all of it is held to.
from shrewjax import spec as spec
