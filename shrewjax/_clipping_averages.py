"""Clipping each unit (`_units`) to a multiple of the moving average of its own norm."""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shrewjax import _arguments, _extended, _history, _norms, _scaling, _unit_numbers
from shrewjax._extended import ExtendedFloat
from shrewjax._scaling import ClipScale
from shrewjax._states import described, fields
from shrewjax._units import UnitAxisName, clipped_fraction, find_units, largest_number, stacked_layers


@described
class ClipByLeafNormEmaState(NamedTuple):
    """The averages of the units and measurements of the last update. Its fields are a file format."""

    recorded: Annotated[jax.Array, "int32 (): number of steps recorded so far"]
    norm_ema: Annotated[Any, "like the parameters, float32 (sizes of a leaf's batch axes): 0 if no norm is recorded"]
    threshold_max: Annotated[jax.Array, "float32 (): the largest threshold of a unit; in the warm-up the global one"]
    grad_norm_max: Annotated[jax.Array, "float32 (): the largest norm of a unit before clipping"]
    clipped_fraction: Annotated[jax.Array, "float32 (): clipped units / units"]

    def metrics(self) -> dict[str, Any]:
        """Returns the entries of `shrewjax.metrics`."""
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

    In the first `warmup_steps` steps all gradients are clipped together, to `warmup_max_norm`. Meanwhile
    :math:`\gamma_\ell` is the smallest norm of the leaf after such a clip.

    ========================================  =======================================================================
    condition                                 result
    ========================================  =======================================================================
    a NaN or infinite gradient                the step is recorded for no leaf. The leaf becomes NaN (in the warm-up:
                                              every floating leaf), or passes as it is if the threshold is infinite
                                              (in the warm-up `warmup_max_norm`, later `max_ratio`)
    a leaf's gradient is zero                 nothing is recorded for it. As published, one zero in the warm-up keeps
                                              a leaf at zero forever, such as an idle expert or half of a low-rank
                                              adapter
    no record of a leaf after the warm-up     as in the warm-up, until it has a gradient; its threshold shows as 0
                                              until then
    norms rise lastingly                      the average grows by (1 - decay) (max_ratio - 1) a step at most: with the
                                              defaults, tenfold in 5,758 steps
    an average below `min_norm`               raised to `min_norm`, which bounds the time of its growth
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
      clipped_fraction)`. In `norm_ema`, a tree like the parameters, each leaf is a float32 scalar, or an array of the
      sizes of its `batch_axes`.

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
    max_ratio = _arguments.real("max_ratio", max_ratio, at_least=1)
    decay = _arguments.real("decay", decay, at_least=0, at_most=1)
    warmup_steps = _arguments.threshold("warmup_steps", warmup_steps)
    warmup_max_norm = _arguments.threshold("warmup_max_norm", warmup_max_norm)
    min_norm = _arguments.threshold("min_norm", min_norm)
    batch_axes, mesh_axes = _arguments.axes("batch_axes", batch_axes), _arguments.unit_axis_names(sharded_over)

    def init_fn(params: optax.Params) -> ClipByLeafNormEmaState:
        units = find_units(params, stacked_layers(batch_axes))
        return ClipByLeafNormEmaState(
            recorded=jnp.zeros((), jnp.int32),
            norm_ema=units.numbers(params, 0.0),
            threshold_max=jnp.full((), jnp.inf, jnp.float32),
            grad_norm_max=jnp.zeros((), jnp.float32),
            clipped_fraction=jnp.zeros((), jnp.float32),
        )

    def update_fn(
        updates: optax.Updates, state: ClipByLeafNormEmaState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, ClipByLeafNormEmaState]:
        del params, extra_args
        share, floor = jnp.asarray(1 - decay, jnp.float32), jnp.asarray(min_norm, jnp.float32)
        units = find_units(updates, stacked_layers(batch_axes))
        emas = units.numbers_beside(state.norm_ema)
        axes = units.axes(mesh_axes)
        over = _unit_numbers.stacked_axes(axes, units.dims)
        norms = _norms.measure_units(units.leaves, units.dims, axes)
        total = _norms.combine(norms, over)
        emas = _unit_numbers.stack_single_units(emas, units.dims)
        is_warmup = state.recorded.astype(jnp.float32) < jnp.asarray(warmup_steps, jnp.float32)
        is_recorded = jnp.isfinite(total.mantissa)

        def norm_and_limit(norm: ExtendedFloat, ema: jax.Array) -> tuple[ExtendedFloat, ExtendedFloat]:
            """Returns the norm that decides on a unit, its own or the global one, and the limit of that norm."""
            own = _extended.product(_scaling.as_limit(ema, norm), _scaling.as_limit(max_ratio, norm))
            whole = total, _scaling.as_limit(warmup_max_norm, norm)
            return optax.tree.where(is_warmup | (ema == 0), whole, (norm, own))

        def next_ema(
            norm: ExtendedFloat, decisive: ExtendedFloat, limit: ExtendedFloat, scale: ClipScale, ema: jax.Array
        ) -> jax.Array:
            if_clipped = _extended.product(norm, _extended.quotient(limit, decisive))
            clipped = _extended.to_float32(optax.tree.where(scale.applies, if_clipped, norm))
            smallest = jnp.where(ema == 0, clipped, jnp.minimum(ema, clipped))
            ema_or_min = jnp.where(is_warmup | (ema == 0), smallest, _history.ema(ema, clipped, share))
            new = jnp.maximum(ema_or_min, floor)
            return jnp.where(is_recorded & jnp.isfinite(clipped) & jnp.isfinite(new) & (clipped > 0), new, ema)

        pairs = list(map(norm_and_limit, norms, emas))
        decisive, limits = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        scales = _scaling.clip_scales(decisive, limits)
        # A unit that never had a nonzero gradient has no threshold: show 0.
        is_idle = [~is_warmup & (ema == 0) & (norm.mantissa == 0) for norm, ema in zip(norms, emas, strict=True)]
        shown = [
            limit._replace(mantissa=jnp.where(i, 0, limit.mantissa)) for i, limit in zip(is_idle, limits, strict=True)
        ]
        norm_emas = list(map(next_ema, norms, decisive, limits, scales, emas))
        return units.scaled(updates, scales), ClipByLeafNormEmaState(
            recorded=jnp.where(is_recorded, optax.safe_increment(state.recorded), state.recorded),
            norm_ema=units.with_leaves(state.norm_ema, _unit_numbers.unstack_units(norm_emas, units.dims)),
            threshold_max=largest_number(shown, over),
            grad_norm_max=largest_number(norms, over),
            clipped_fraction=clipped_fraction(scales, norms, over),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
