"""Clipping each unit by its own norm: to a threshold, to one from its parameters, or from its past norms.

A unit is a leaf, a layer of a leaf that stacks layers, or a row or column of a kernel, as each rule says (`units`).
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shrewjax._base import arguments, trees
from shrewjax._base.axes import UnitDims, are_whole, whole_shape
from shrewjax._base.mesh import partitioned_like, placed_like
from shrewjax._base.states import described, fields, increment_if, largest
from shrewjax._base.types import (
    Argument,
    Axes,
    KeyPath,
    Leaf,
    Metrics,
    Number,
    Params,
    PyTree,
    ShardedOver,
)
from shrewjax._clipping.rule import (
    Updated,
    clipping_rule,
    metrics_of_counts,
    new_counts,
)
from shrewjax._clipping.units import find_units, stacked_layers
from shrewjax._numerics import floats, histories, scaling
from shrewjax._numerics.floats import ExtendedFloat
from shrewjax._numerics.reductions import sizes
from shrewjax._numerics.scaling import ClipScale


@described
class ClipByLeafNormState(NamedTuple):
    """Measurements of the last update for each leaf, trees like the parameters, and counts.

    Norms and scales are float64 where a parameter is.

    Attributes:
      grad_norm: float32 (sizes of a leaf's batch axes): norms before clipping; 0 for leaves without one
      clip_scale: float32, same shape: the numbers that multiplied the gradients; 1 if not clipped
      calls: int32 (): number of updates
      clipped: int32 (): number of updates in which a finite norm was above its threshold
    """

    grad_norm: PyTree
    clip_scale: PyTree
    calls: jax.Array
    clipped: jax.Array

    def metrics(self) -> Metrics:
        """Returns the entries of `shrewjax.metrics`."""
        return {
            "grad_norm_max": largest(self.grad_norm),
            "clipped_fraction": _fraction_clipped(self.grad_norm, self.clip_scale),
            **metrics_of_counts(self),
        }


def clip_by_leaf_norm(
    max_norm: Number,
    *,
    ord: float | None = None,
    stacked_axes: Argument = None,
    sharded_over: ShardedOver = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Clips the norm of each leaf, or of each layer that it stacks, on its own.

    .. math:: g_\ell \leftarrow g_\ell \cdot \min\Big(1, \frac{\mathrm{max\_norm}}{\|g_\ell\|}\Big)

    The table of `clip_grad_norm` applies to each leaf, so a NaN in one leaf does not change the others.

    Args:
      max_norm: the threshold of every leaf, as in `clip_grad_norm`.
      ord: as in `grad_norm`. With `stacked_axes` it must be 1 or 2.
      stacked_axes: as in `clip_by_block_rms`.
      sharded_over: as in `grad_norm`; with `stacked_axes` as in `adaptive_grad_clip`.

    Returns:
      A transformation with state `ClipByLeafNormState(grad_norm, clip_scale, calls, clipped)`: measurements of the last
      update (before the first: 0 and 1), and counts of updates. A leaf's measurements are scalars, or arrays of the
      sizes of its `stacked_axes`.

    Raises:
      ValueError: an argument is not as described; the updates' tree, or a leaf's number of layers, differs from that of
        the parameters given to `init`; the state is another transformation's; or as in `clip_grad_norm`.

    Example:
      >>> tx = clip_by_leaf_norm(1.0)
      >>> grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.5])}
      >>> clipped, state = tx.update(grads, tx.init(grads))
      >>> clipped["a"].round(6), clipped["b"], state.grad_norm["a"]
      (Array([0.6, 0.8], dtype=float32), Array([0.5], dtype=float32), Array(5., dtype=float32))

    Source: the rule is that of `tf.clip_by_norm` and of Keras' `clipnorm`, for each tensor.
    """
    max_norm, ord = arguments.threshold("max_norm", max_norm), arguments.order(ord)
    stacked_axes = arguments.axes("stacked_axes", stacked_axes)
    mesh_axes = arguments.sharded_over(sharded_over)
    if stacked_axes is not None and ord not in (1, 2):
        raise ValueError(
            f"ord must be 1 or 2 with stacked_axes, got {ord}. Leave out ord or stacked_axes"
        )

    def init_fn(params: optax.Params) -> ClipByLeafNormState:
        units = find_units(params, stacked_layers(stacked_axes), mesh_axes)
        return ClipByLeafNormState(
            grad_norm=units.numbers(params, 0.0, units.dtype),
            clip_scale=units.numbers(params, 1.0, units.dtype),
            **new_counts(),
        )

    def update_fn(updates: PyTree, state: ClipByLeafNormState, _: Params) -> Updated:
        units = find_units(updates, stacked_layers(stacked_axes), mesh_axes)
        units.numbers_beside(state.grad_norm)  # raises if the state has other units
        norms = units.norms(ord)
        limits = [scaling.as_limit(max_norm, norm) for norm in norms]
        updates, scales, measured = units.clip(updates, norms, limits, state)
        dtype = floats.sum_dtype(*jax.tree.leaves(state.grad_norm))
        stored_norms = [floats.stored(norm, dtype) for norm in norms]
        stored_scales = [scaling.applied_scale(scale, dtype) for scale in scales]
        return updates, ClipByLeafNormState(
            grad_norm=units.with_numbers(state.grad_norm, stored_norms, absent=0.0),
            clip_scale=units.with_numbers(state.clip_scale, stored_scales, absent=1.0),
            calls=measured["calls"],
            clipped=measured["clipped"],
        )

    return clipping_rule(ClipByLeafNormState, init_fn, update_fn)


@described
class AdaptiveGradClipState(NamedTuple):
    """Measurements of the last update, the ratio in float64 where a parameter is, and counts.

    Attributes:
      ratio_max: float32 (): the largest ratio of a unit's gradient norm to its parameter norm
      clipped_fraction: float32 (): clipped units / units
      calls: int32 (): number of updates
      clipped: int32 (): number of updates in which a finite norm was above its threshold
    """

    ratio_max: jax.Array
    clipped_fraction: jax.Array
    calls: jax.Array
    clipped: jax.Array

    def metrics(self) -> Metrics:
        """Returns the entries of `shrewjax.metrics`."""
        return fields(self, "ratio_max", "clipped_fraction") | metrics_of_counts(self)


def adaptive_grad_clip(
    clipping: Number = 0.01,
    *,
    eps: Number = 1e-3,
    axis: Argument = None,
    stacked_axes: Argument = None,
    sharded_over: ShardedOver = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Clips the norm of each unit to a share of the norm of its parameters (AGC).

    .. math:: g_i \leftarrow g_i \cdot \min\Big(1, \frac{\lambda \max(\|w_i\|, \epsilon)}{\|g_i\|}\Big)

    A unit is a part of a leaf with one norm. It depends on the leaf's shape without `stacked_axes`:

    * At most one axis longer than 1: the whole leaf is a unit.
    * Rank 2 and 3: each position of all axes except the first, which has a kernel's inputs, is a unit.
    * Rank 4 and more: each position of the last axis, which has a convolution's outputs, is a unit.

    `axis` overrides this: a unit spans the axes that it names.

    The first row that applies:

    ========================================  =======================================================================
    condition for a unit                      result
    ========================================  =======================================================================
    clipping = inf                            the gradients to the last bit, NaN and infinities included
    a NaN parameter, a NaN `eps` in an array  the unit becomes NaN, other units do not
    an infinite parameter, or eps = inf       as with clipping = inf
    a NaN or infinite gradient                the unit becomes NaN, other units do not
    a NaN `clipping` in an array              the unit becomes NaN
    ratio at most `clipping`                  the gradients to the last bit
    parameter norm zero, or below `eps`       clipped to clipping * eps, so that the unit can still learn
    parameter norm zero, eps = 0              zeros
    ========================================  =======================================================================

    The authors leave the classifier, the last linear layer, unclipped. `optax.masked` does that.

    Args:
      clipping: lambda >= 0, a real scalar or a scalar array. The authors use 0.01 for a batch of 4096, and more for
        smaller batches.
      eps: a lower bound of parameter norms, >= 0, a real scalar or a scalar array.
      axis: the axes that a unit spans, in the forms of `stacked_axes` in `clip_by_block_rms`. `None`, also if returned,
        leaves it to the shape. `lambda name, leaf: tuple(range(leaf.ndim))` makes each leaf a unit.
      stacked_axes: as in `clip_by_block_rms`. No unit spans two layers.
      sharded_over: for leaves of one unit, as in `grad_norm`. For a leaf of several units it is needed inside
        `jax.shard_map` and `jax.pmap`. Pass a function of a leaf's name and the leaf that returns its `jax.P`, as in
        `in_specs`. Or pass one `jax.P` for all leaves, such as `jax.P()` if every device holds all of them. Names of
        mapped axes, passed or returned, are those along which devices hold parts of the same units. () says that each
        device has whole leaves of its own, such as those of independent models. Its measurements are then its own.

    Returns:
      A transformation with state `AdaptiveGradClipState(ratio_max, clipped_fraction, calls, clipped)`: two scalars of
      the last update (before the first: 0), and counts of updates. Its `update` needs `params`, of the gradients'
      shapes.

    Raises:
      ValueError: an argument is not as described; an axis is out of range for a leaf; `params` are missing or differ in
        shape; `sharded_over` is missing for a leaf of several units, or contradicts its type; or as in `grad_norm`.

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
    clipping = arguments.threshold("clipping", clipping)
    eps = arguments.threshold("eps", eps)
    axis = arguments.axes("axis", axis)
    stacked_axes = arguments.axes("stacked_axes", stacked_axes)
    mesh_axes = arguments.sharded_over(sharded_over)

    def is_vector(path: KeyPath, leaf: Leaf, free: list[int], by_rank: list[int]) -> bool:
        """Returns whether at most one of the free axes is longer than 1 over all devices. Raises if nothing tells."""
        given = arguments.axis_names_of_leaf(mesh_axes, path, leaf)
        sizes = leaf.shape if are_whole(mesh_axes) else whole_shape(leaf, given)
        if sizes is not None:
            return sum(sizes[a] != 1 for a in free) < 2
        long = [a for a in free if leaf.shape[a] != 1]
        if len(long) == 1 and long[0] not in by_rank:
            raise ValueError(
                f"cannot tell the units of leaf {trees.leaf_name(path)}, of shape {leaf.shape} on each device. "
                "Pass sharded_over=fn, where fn(name, leaf) returns its PartitionSpec"
            )
        return len(free) < 2

    def unit_dims(path: KeyPath, leaf: Leaf) -> UnitDims:
        batch = arguments.axes_of_leaf("stacked_axes", stacked_axes, path, leaf) or ()
        given = arguments.axes_of_leaf("axis", axis, path, leaf)
        free = [a for a in range(leaf.ndim) if a not in batch]
        by_rank = free[:1] if len(free) < 4 else free[:-1]
        if given is None and is_vector(path, leaf, free, by_rank):
            given = tuple(free)
        shared = by_rank if given is None else given
        return tuple(a for a in range(leaf.ndim) if a in batch or a not in shared)

    def init_fn(params: optax.Params) -> AdaptiveGradClipState:
        return AdaptiveGradClipState(
            ratio_max=jnp.zeros((), find_units(params, unit_dims).dtype),
            clipped_fraction=jnp.zeros((), jnp.float32),
            **new_counts(),
        )

    def update_fn(updates: PyTree, state: AdaptiveGradClipState, params: Params) -> Updated:
        if params is None:
            raise ValueError(
                "adaptive_grad_clip needs the parameters, got params=None. Pass params to update"
            )
        units = find_units(updates, unit_dims, mesh_axes)
        weights = units.of_parameters(params)
        norms = units.norms()
        bases = [
            floats.in_dtype_of(floats.maximum(base, scaling.as_limit(eps, base)), norm)
            for base, norm in zip(weights.norms(), norms, strict=True)
        ]
        # On an Explicit mesh, parameters and gradients may be sharded differently.
        bases = jax.tree.map(partitioned_like, bases, norms)
        limits = [floats.product(b, scaling.as_limit(clipping, b)) for b in bases]
        updates, _, measured = units.clip(updates, norms, limits, state)
        ratios = list(map(floats.quotient, norms, bases))
        ratio_max = units.largest(ratios, state.ratio_max.dtype)
        return updates, AdaptiveGradClipState(ratio_max, **measured)

    return clipping_rule(AdaptiveGradClipState, init_fn, update_fn, takes_any_state=True)


@described
class ClipByBlockRmsState(NamedTuple):
    """Measurements of the last update, the root mean square in float64 where a parameter is, and counts.

    Attributes:
      rms_max: float32 (): the largest root mean square of a block before clipping
      clipped_fraction: float32 (): clipped blocks / blocks
      calls: int32 (): number of updates
      clipped: int32 (): number of updates in which a finite norm was above its threshold
    """

    rms_max: jax.Array
    clipped_fraction: jax.Array
    calls: jax.Array
    clipped: jax.Array

    def metrics(self) -> Metrics:
        """Returns the entries of `shrewjax.metrics`."""
        return fields(self, "rms_max", "clipped_fraction") | metrics_of_counts(self)


def clip_by_block_rms(
    threshold: Number = 1.0,
    *,
    stacked_axes: Argument = None,
    sharded_over: ShardedOver = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Clips the root mean square of each leaf, or of each layer that it stacks.

    .. math:: u_\ell \leftarrow \frac{u_\ell}{\max(1, \mathrm{RMS}(u_\ell) / d)}, \qquad
              \mathrm{RMS}(u) = \sqrt{\textstyle\frac{1}{n} \sum_{i=1}^n u_i^2}

    A leaf, or a layer that it stacks, is a block. Chain the rule after an optimizer's scaling, where a typical element
    is about 1.

    ========================================  =======================================================================
    condition for a block                     result
    ========================================  =======================================================================
    threshold = inf                           the updates to the last bit, NaN and infinities included
    a NaN or infinity, or a NaN threshold     the block becomes NaN, others do not
    RMS at most `threshold`                   the updates to the last bit
    no elements                               RMS 0
    ========================================  =======================================================================

    Args:
      threshold: d >= 0, a real scalar or a scalar array.
      stacked_axes: the axes along which a leaf stacks layers: an int, a tuple of ints, or a function of a leaf's name
        (such as "dense/kernel") and the leaf that returns one of these. `None` or () means none.
      sharded_over: as in `adaptive_grad_clip`.

    Returns:
      A transformation with state `ClipByBlockRmsState(rms_max, clipped_fraction, calls, clipped)`: two scalars of the
      last update (before the first: 0), and counts of updates.

    Raises:
      ValueError: an argument is not as described; an axis is out of range for a leaf; or as in `adaptive_grad_clip`.

    Example:
      >>> tx = clip_by_block_rms(1.0, stacked_axes=0)
      >>> updates = jnp.array([[0.5, 0.5], [3.0, 3.0]])  # two layers
      >>> tx.update(updates, tx.init(updates))[0].round(6)
      Array([[0.5, 0.5],
             [1. , 1. ]], dtype=float32)

    Source: N. Shazeer, M. Stern, "Adafactor: Adaptive learning rates with sublinear memory cost", ICML 2018,
    arXiv:1804.04235, section 6 and Algorithm 4.
    """
    threshold = arguments.threshold("threshold", threshold)
    stacked_axes = arguments.axes("stacked_axes", stacked_axes)
    mesh_axes = arguments.sharded_over(sharded_over)

    def init_fn(params: optax.Params) -> ClipByBlockRmsState:
        units = find_units(params, stacked_layers(stacked_axes))
        return ClipByBlockRmsState(
            rms_max=jnp.zeros((), units.dtype),
            clipped_fraction=jnp.zeros((), jnp.float32),
            **new_counts(),
        )

    def update_fn(updates: PyTree, state: ClipByBlockRmsState, _: Params) -> Updated:
        units = find_units(updates, stacked_layers(stacked_axes), mesh_axes)
        norms = units.norms()
        within: list[Axes] = [of_leaf.within for of_leaf in units.sharding]
        counts = sizes(units.leaves, axes=within, unit_dims=units.dims)
        # The norm is compared, not the RMS, because rounding could put the RMS of ones above a threshold of 1. The test
        # is `test_a_block_of_ones_has_a_root_mean_square_of_one`.
        of_ones = [floats.root_of_count(n, norms[0].mantissa.dtype) for n in counts]
        bases = list(map(placed_like, units.joined(of_ones), norms))
        limits = [floats.product(scaling.as_limit(threshold, b), b) for b in bases]
        updates, _, measured = units.clip(updates, norms, limits, state)
        rms = list(map(floats.quotient, norms, bases))
        rms_max = units.largest(rms, state.rms_max.dtype)
        return updates, ClipByBlockRmsState(rms_max, **measured)

    return clipping_rule(ClipByBlockRmsState, init_fn, update_fn, takes_any_state=True)


@partial(jax.jit, inline=True)  # as `largest`
def _fraction_clipped(grad_norm: PyTree, clip_scale: PyTree) -> jax.Array:
    """Returns the fraction of units that were clipped, from a state. A leaf without a gradient counts as unclipped."""
    pairs = zip(jax.tree.leaves(grad_norm), jax.tree.leaves(clip_scale), strict=True)
    # A unit of zeros never counts, as in `Units.clipped`, not even with a limit of 0, which scales it.
    flags = [jnp.ravel((scale != 1) & (norm != 0)) for norm, scale in pairs]
    if not flags:
        return jnp.zeros((), jnp.float32)
    return jnp.mean(jnp.concatenate(flags), dtype=jnp.float32)


@described
class ClipByLeafNormEmaState(NamedTuple):
    """The averages of the units, measurements of the last update, and counts. Its fields are a file format.

    The largest norm is float64 where a parameter is.

    Attributes:
      recorded: int32 (): number of steps recorded so far
      norm_ema: like the parameters, float32 (sizes of a leaf's batch axes): 0 if no norm is recorded
      threshold_max: float32 (): the largest threshold of a unit; in the warm-up the global one
      grad_norm_max: float32 (): the largest norm of a unit before clipping
      clipped_fraction: float32 (): clipped units / units
      calls: int32 (): number of updates
      clipped: int32 (): number of updates in which a finite norm was above its threshold
    """

    recorded: jax.Array
    norm_ema: PyTree
    threshold_max: jax.Array
    grad_norm_max: jax.Array
    clipped_fraction: jax.Array
    calls: jax.Array
    clipped: jax.Array

    def metrics(self) -> Metrics:
        """Returns the entries of `shrewjax.metrics`."""
        measured = fields(self, "threshold_max", "grad_norm_max", "clipped_fraction")
        return measured | metrics_of_counts(self)


def clip_by_leaf_norm_ema(
    max_ratio: Number = 1.04,
    *,
    decay: Number = 0.99,
    warmup_steps: Number = 100,
    warmup_max_norm: Number = 1.0,
    min_norm: Number = 1e-6,
    stacked_axes: Argument = None,
    sharded_over: ShardedOver = None,
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
    a leaf's gradient is zero                 nothing is recorded for it
    no record of a leaf after the warm-up     as in the warm-up, until it has a gradient; its threshold shows as 0
                                              until then
    norms rise lastingly                      the average grows by (1 - decay) (max_ratio - 1) a step at most: with the
                                              defaults, tenfold in 5,758 steps
    an average below `min_norm`               raised to `min_norm`
    ========================================  =======================================================================

    Args:
      max_ratio: lambda, >= 1. This and the next four are real scalars or scalar arrays.
      decay: beta, in [0, 1].
      warmup_steps: a number of recorded steps, >= 0.
      warmup_max_norm: the global threshold of the warm-up, >= 0.
      min_norm: the floor of every average, >= 0.
      stacked_axes: as in `clip_by_block_rms`.
      sharded_over: as in `adaptive_grad_clip`.

    Returns:
      A transformation with state `ClipByLeafNormEmaState(recorded, norm_ema, threshold_max, grad_norm_max,
      clipped_fraction, calls, clipped)`. In `norm_ema`, a tree like the parameters, each leaf is a float32 scalar, or
      an array of the sizes of its `stacked_axes`.

    Raises:
      ValueError: an argument is not as described; an axis is out of range for a leaf; the updates' tree, or a leaf's
        number of layers, differs from that of the parameters given to `init`; the state is another transformation's; or
        as in `adaptive_grad_clip`.

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
    max_ratio = arguments.real("max_ratio", max_ratio, at_least=1)
    decay = arguments.real("decay", decay, at_least=0, at_most=1)
    warmup_steps = arguments.threshold("warmup_steps", warmup_steps)
    warmup_max_norm = arguments.threshold("warmup_max_norm", warmup_max_norm)
    min_norm = arguments.threshold("min_norm", min_norm)
    stacked_axes = arguments.axes("stacked_axes", stacked_axes)
    mesh_axes = arguments.sharded_over(sharded_over)

    def init_fn(params: optax.Params) -> ClipByLeafNormEmaState:
        units = find_units(params, stacked_layers(stacked_axes), mesh_axes)
        return ClipByLeafNormEmaState(
            recorded=jnp.zeros((), jnp.int32),
            norm_ema=units.numbers(params, 0.0, jnp.float32),
            threshold_max=jnp.full((), jnp.inf, jnp.float32),
            grad_norm_max=jnp.zeros((), units.dtype),
            clipped_fraction=jnp.zeros((), jnp.float32),
            **new_counts(),
        )

    def update_fn(updates: PyTree, state: ClipByLeafNormEmaState, _: Params) -> Updated:
        share, floor = jnp.float32(1 - decay), jnp.float32(min_norm)
        units = find_units(updates, stacked_layers(stacked_axes), mesh_axes)
        emas = units.numbers_beside(state.norm_ema)
        norms = units.norms()
        total = units.total(norms)
        # On an Explicit mesh, the state and gradients may be sharded differently.
        emas = list(map(partitioned_like, units.joined(emas), [norm.mantissa for norm in norms]))
        is_warmup = state.recorded.astype(jnp.float32) < jnp.float32(warmup_steps)
        is_recorded = jnp.isfinite(total.mantissa)

        def norm_and_limit(norm: ExtendedFloat, ema: jax.Array) -> tuple[ExtendedFloat, ...]:
            """Returns the norm that decides on each unit, and its limit: its own after the warm-up, if it has one."""
            ratio = scaling.as_limit(max_ratio, norm)
            of_unit = norm, floats.product(scaling.as_limit(ema, norm), ratio)
            of_all = total, scaling.as_limit(warmup_max_norm, norm)
            return optax.tree.where(is_warmup | (ema == 0), of_all, of_unit)

        pairs = list(map(norm_and_limit, norms, emas))
        decisive, limits = ([pair[i] for pair in pairs] for i in (0, 1))
        # A unit that becomes NaN is in `clipped_fraction`. An update counts as clipped by its finite norms alone.
        updates, scales, measured = units.clip(updates, norms, limits, state, decisive)

        # A unit that never had a nonzero gradient has no threshold: show 0.
        def shown(norm: ExtendedFloat, ema: jax.Array, limit: ExtendedFloat) -> ExtendedFloat:
            is_idle = ~is_warmup & (ema == 0) & (norm.mantissa == 0)
            return limit._replace(mantissa=jnp.where(is_idle, 0, limit.mantissa))

        # The smallest norm of the warm-up, and from then on a moving average, both at least `floor`.
        def next_ema(ema: jax.Array, clipped: jax.Array) -> jax.Array:
            smallest = jnp.where(ema == 0, clipped, jnp.minimum(ema, clipped))
            average = histories.ema(ema, clipped, share)
            new = jnp.maximum(jnp.where(is_warmup | (ema == 0), smallest, average), floor)
            is_finite = is_recorded & jnp.isfinite(clipped) & jnp.isfinite(new)
            return jnp.where(is_finite & (clipped > 0), new, ema)

        clipped = map(_clipped_norm, norms, decisive, limits, scales)
        norm_emas = list(map(next_ema, emas, clipped))
        thresholds = list(map(shown, norms, emas, limits))
        return updates, ClipByLeafNormEmaState(
            recorded=increment_if(is_recorded, state.recorded),
            norm_ema=units.updated(state.norm_ema, norm_emas),
            threshold_max=units.largest(thresholds, state.threshold_max.dtype),
            grad_norm_max=units.largest(norms, state.grad_norm_max.dtype),
            **measured,
        )

    return clipping_rule(ClipByLeafNormEmaState, init_fn, update_fn)


def _clipped_norm(
    norm: ExtendedFloat, decisive: ExtendedFloat, limit: ExtendedFloat, scale: ClipScale
) -> jax.Array:
    """Returns each unit's norm after the clip, float32."""
    if_clipped = floats.product(norm, floats.quotient(limit, decisive))
    return floats.stored(optax.tree.where(scale.applies, if_clipped, norm), jnp.float32)
