"""What transformations measured, read out of an optimizer's state."""

import re
from collections.abc import Iterator
from typing import Any

import jax

from shrewjax._gradients import KeyPath


def metrics(opt_state: Any) -> dict[str, jax.Array]:
    """Returns the scalars that transformations keep in a state, by the transformation's name.

    Finds the states however deep they sit: in chains, in wrappers such as `optax.masked`, `optax.partition` or
    `optax.inject_hyperparams`, in `nnx.Optimizer.opt_state`. Works on states that are traced, so that a jitted train
    step can return it, and under `vmap`.

    =======================  ===============================================================================
    transformation           names
    =======================  ===============================================================================
    clip_by_global_norm      grad_norm, clip_scale: other than 1 (NaN included) if it clipped
    clip_by_leaf_norm        grad_norm_max: the largest leaf norm; clipped_fraction: clipped leaves / leaves
    clip_by_percentile       bound (the largest, if one a leaf); clipped_fraction of the elements
    clip_by_norm_percentile  threshold, grad_norm, clip_scale
    clip_by_norm_zscore      threshold, grad_norm, clip_scale, mean, std
    adaptive_grad_clip       ratio_max, clipped_fraction: clipped units / units
    clip_by_block_rms        rms_max, clipped_fraction
    clip_by_leaf_norm_ema    threshold_max, grad_norm_max, clipped_fraction
    skip_nonfinite           applied, skipped, consecutive, limit_reached
    skip_on_spike            applied, skipped, measured, threshold
    accumulate               micro_step, windows, applied, weight_sum, window_bad, dropped. Values measured inside
                             date from the last window that closed, and before the first from init. With `sum_over`,
                             there is no weight_sum: each device has its own
    grad_accumulator         as accumulate, without applied
    =======================  ===============================================================================

    A state of your own takes part if it is a pytree node whose class, `MyRuleState`, has a method `metrics` that takes
    nothing and returns a dictionary of scalars: they are found as `"my_rule/..."`.

    Args:
      opt_state: the state of any Optax transformation.

    Returns:
      A dictionary from `"transformation/name"` to scalars: empty if there is nothing. A link that is added to a chain
      changes no name. If there are several states of a kind, each but the first has its path of fields and indices in
      front, such as `"1/inner_state/clip_by_global_norm/grad_norm"`.

    Example:
      >>> tx = optax.chain(clip_by_global_norm(1.0), optax.sgd(0.1))
      >>> state = tx.init(jnp.zeros(2))
      >>> _, state = tx.update(jnp.array([3.0, 4.0]), state)
      >>> for name, value in metrics(state).items():
      ...     print(name, value)
      clip_by_global_norm/grad_norm 5.0
      clip_by_global_norm/clip_scale 0.2
    """
    found: dict[str, jax.Array] = {}
    kinds = set()
    for path, state in _measuring(opt_state):
        kind = _name(type(state))
        where = "" if kind not in kinds else jax.tree_util.keystr(path, simple=True, separator="/") + "/"
        kinds.add(kind)
        for name, value in state.metrics().items():
            (array,) = jax.tree.leaves(value)  # a field may be a variable around an array, as in nnx
            found[f"{where}{kind}/{name}"] = array
    return found


def _measuring(tree: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yields the states that measured something, each with its path: the outer one before those inside."""
    if _measures(tree):
        yield path, tree
    for below, node in jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is not tree and _measures(x)):
        if node is not tree and _measures(node):
            yield from _measuring(node, (*path, *below))


def _measures(node: Any) -> bool:
    return callable(getattr(type(node), "metrics", None))


def _name(state: type) -> str:
    """Returns `clip_by_global_norm` for `ClipByGlobalNormState`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", state.__name__.removesuffix("State")).lower()
