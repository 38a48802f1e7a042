"""Gradient clipping and accumulation for JAX, as composable Optax transformations."""

import importlib as _importlib
import typing as _typing
from types import FunctionType as _FunctionType

from shrewjax import spec
from shrewjax._base.states import metrics
from shrewjax._batches.accumulated import accumulated_value_and_grad
from shrewjax._batches.micro_batched import micro_batched, print_micro_batches, value_and_grad
from shrewjax._batches.per_device import per_device
from shrewjax._clipping.cotangents import clip_cotangent
from shrewjax._clipping.elements import (
    ClipByPercentileState,
    clip_by_percentile,
    clip_by_value,
    clip_grad_percentile,
    clip_grad_value,
)
from shrewjax._clipping.global_norm import (
    ClipByGlobalNormState,
    ClipByNormPercentileState,
    ClipByNormZscoreState,
    clip_by_global_norm,
    clip_by_norm_percentile,
    clip_by_norm_zscore,
    clip_grad_norm,
    grad_norm,
)
from shrewjax._clipping.unit_norms import (
    AdaptiveGradClipState,
    ClipByBlockRmsState,
    ClipByLeafNormEmaState,
    ClipByLeafNormState,
    adaptive_grad_clip,
    clip_by_block_rms,
    clip_by_leaf_norm,
    clip_by_leaf_norm_ema,
)
from shrewjax._division.each_example import of_each_example
from shrewjax._numerics.histories import HistoryState
from shrewjax._skipping.guards import (
    SkipNonfiniteState,
    SkipOnSpikeState,
    skip_nonfinite,
    skip_on_spike,
)
from shrewjax._windows.accumulate import accumulate, apply_gradients, check_window, flush
from shrewjax._windows.from_optax import from_optax
from shrewjax._windows.grad_accumulator import GradAccumulator
from shrewjax._windows.sharded_state import redistribute, state_specs
from shrewjax._windows.window_state import AccumulateState, GradAccumulatorState, NoiseState

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
    "HistoryState",
    # Accumulate: a whole batch in one call, or batches that come one by one.
    "value_and_grad",
    "micro_batched",
    "of_each_example",
    "print_micro_batches",
    "accumulated_value_and_grad",
    "accumulate",
    "apply_gradients",
    "check_window",
    "flush",
    "from_optax",
    "per_device",
    "redistribute",
    "state_specs",
    "GradAccumulator",
    "AccumulateState",
    "GradAccumulatorState",
    "NoiseState",
    # Read what was measured.
    "metrics",
    # The definition that all of it is held to.
    "spec",
]

# `help` and pickles name a function or a class as users do, so that moving it breaks no pickle. `inspect` then finds
# the source of functions and methods, and none of a class.
for _name in __all__:
    if isinstance(globals()[_name], _FunctionType | type):
        globals()[_name].__module__ = __name__

if not _typing.TYPE_CHECKING:  # a type checker would take any name for an attribute

    def __getattr__(name: str) -> _typing.Any:
        """Imports `shrewjax.flax` on demand, because Flax may not be installed."""
        if name == "flax":
            return _importlib.import_module("shrewjax.flax")
        raise AttributeError(f"module 'shrewjax' has no attribute {name!r}")
