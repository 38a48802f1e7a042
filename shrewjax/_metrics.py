"""What the transformations measured, read out of an optimizer's state."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from shrewjax._accumulation import AccumulateState, GradAccumulatorState
from shrewjax._adaptive import (
    AdaptiveGradClipState,
    ClipByBlockRmsState,
    ClipByLeafNormEmaState,
    ClipByNormPercentileState,
    ClipByNormZscoreState,
)
from shrewjax._checks import KeyPath
from shrewjax._clipping import ClipByGlobalNormState, ClipByLeafNormState, ClipByPercentileState
from shrewjax._guards import SkipNonfiniteState, SkipOnSpikeState


def metrics(opt_state: Any) -> dict[str, jax.Array]:
    """The scalars that this package's transformations keep in a state, by name.

    Finds the states by their type, however deep they sit: in chains, in wrappers such as `optax.masked`,
    `optax.partition` or `optax.inject_hyperparams`, in `nnx.Optimizer.opt_state`. Works on states that are traced, so
    that a jitted train step can return it, and under `vmap`.

    ====================  ==================================================================================
    state                 names
    ====================  ==================================================================================
    clip_by_global_norm   grad_norm, clip_scale: other than 1 (NaN included) if it clipped
    clip_by_leaf_norm     grad_norm_max: the largest leaf norm; clipped_share: clipped leaves / leaves
    clip_by_percentile    bound (the largest, if one a leaf); clipped_fraction of the elements
    norm_percentile       threshold, grad_norm, clip_scale
    norm_zscore           threshold, grad_norm, clip_scale, mean, std
    adaptive_grad_clip    threshold, ratio_max, clipped_share: clipped units / units
    clip_by_block_rms     threshold, rms_max, clipped_share
    leaf_norm_ema         threshold_max, grad_norm_max, clipped_share
    skip_nonfinite        applied, skipped, consecutive, limit_reached
    skip_on_spike         applied, skipped, measured, threshold
    accumulate            micro_step, windows, applied, weight_sum, window_bad, dropped. What is measured inside
                          dates from the last window that closed, and before the first from init. With `axis_name`,
                          there is no weight_sum: each device has its own
    ====================  ==================================================================================

    Args:
      opt_state: the state of any Optax transformation.

    Returns:
      A dictionary from the path of fields and indices, joined by "/", to scalars: empty if there is nothing.

    Example:
      >>> tx = optax.chain(clip_by_global_norm(1.0), optax.sgd(0.1))
      >>> state = tx.init(jnp.zeros(2))
      >>> _, state = tx.update(jnp.array([3.0, 4.0]), state)
      >>> metrics(state)
      {'0/grad_norm': Array(5., dtype=float32), '0/clip_scale': Array(0.2, dtype=float32)}
    """
    return dict(_walk(opt_state, ()))


def _walk(state: Any, path: KeyPath) -> Iterator[tuple[str, jax.Array]]:
    for inner_path, node in jax.tree.leaves_with_path(state, is_leaf=lambda x: type(x) in _MEASURED):
        read = _MEASURED.get(type(node))
        if read is None:
            continue
        here = path + inner_path
        for name, value in read(node).items():
            yield jax.tree_util.keystr((*here, jax.tree_util.GetAttrKey(name)), simple=True, separator="/"), value
        if isinstance(node, _WRAPPERS):
            yield from _walk(node.inner_state, (*here, jax.tree_util.GetAttrKey("inner_state")))


def _fields(*names: str) -> Callable[[Any], dict[str, jax.Array]]:
    return lambda state: {name: _array(getattr(state, name)) for name in names}


def _leaf_norms(state: ClipByLeafNormState) -> dict[str, jax.Array]:
    norms, scales = jax.tree.leaves(state.grad_norm), jax.tree.leaves(state.clip_scale)
    if not norms:
        return {"grad_norm_max": jnp.zeros((), jnp.float32), "clipped_share": jnp.zeros((), jnp.float32)}
    return {
        "grad_norm_max": jnp.max(jnp.stack(norms), axis=0),
        "clipped_share": jnp.mean(jnp.stack([scale != 1 for scale in scales]), axis=0, dtype=jnp.float32),
    }


def _percentile(state: ClipByPercentileState) -> dict[str, jax.Array]:
    bounds = jax.tree.leaves(state.bound)
    bound = jnp.max(jnp.stack(bounds), axis=0) if bounds else jnp.zeros((), jnp.float32)
    return {"bound": bound, "clipped_fraction": _array(state.clipped_fraction)}


def _window(state: AccumulateState | GradAccumulatorState) -> dict[str, jax.Array]:
    fields = _fields("micro_step", "windows", "weight_sum", "window_bad", "dropped")(state)
    if fields["weight_sum"].ndim > fields["micro_step"].ndim:  # the rows of several devices
        del fields["weight_sum"]
    return fields


def _array(field: Any) -> jax.Array:
    (array,) = jax.tree.leaves(field)  # the field may be a variable around the array, as in nnx
    return array


_WRAPPERS = (AccumulateState, SkipNonfiniteState, SkipOnSpikeState)

_MEASURED: dict[type, Callable[[Any], dict[str, jax.Array]]] = {
    ClipByGlobalNormState: _fields("grad_norm", "clip_scale"),
    ClipByLeafNormState: _leaf_norms,
    ClipByPercentileState: _percentile,
    AdaptiveGradClipState: _fields(*AdaptiveGradClipState._fields),
    ClipByBlockRmsState: _fields(*ClipByBlockRmsState._fields),
    ClipByNormPercentileState: _fields("threshold", "grad_norm", "clip_scale"),
    ClipByNormZscoreState: _fields("threshold", "grad_norm", "clip_scale", "mean", "std"),
    ClipByLeafNormEmaState: _fields("threshold_max", "grad_norm_max", "clipped_share"),
    SkipNonfiniteState: _fields("applied", "skipped", "consecutive", "limit_reached"),
    SkipOnSpikeState: _fields("applied", "skipped", "measured", "threshold"),
    GradAccumulatorState: _window,
    AccumulateState: lambda state: _window(state) | _fields("applied")(state),
}
