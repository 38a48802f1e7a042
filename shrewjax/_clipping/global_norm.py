"""Clipping all gradients together, by their global norm: to a given threshold, or to one from past norms."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shrewjax._base import arguments, trees
from shrewjax._base.states import described, fields, require_made_with
from shrewjax._base.types import (
    AnyState,
    Metrics,
    Number,
    Params,
    PyTree,
    ShardedOver,
    Tree,
)
from shrewjax._clipping.rule import (
    Updated,
    clipping_rule,
    counted,
    metrics_of_counts,
    new_counts,
)
from shrewjax._clipping.units import find_units
from shrewjax._numerics import floats, histories, scaling
from shrewjax._numerics.floats import ExtendedFloat
from shrewjax._numerics.norms import measure, measure_with_leaves
from shrewjax._numerics.scaling import ClipScale


def grad_norm(
    grads: PyTree, ord: float | None = None, *, sharded_over: ShardedOver = None
) -> jax.Array:
    r"""Returns the norm of all gradients together, as if they were one long vector.

    .. math:: \|g\|_p = \Big(\sum_i |g_i|^p\Big)^{1/p}, \qquad \|g\|_\infty = \max_i |g_i|

    Neither the powers nor their sum overflow or underflow, for any dtypes.

    ======================================  ==================================================
    gradients                               norm
    ======================================  ==================================================
    all zero, no elements, no leaves        0
    a NaN                                   NaN
    an infinity and no NaN                  inf
    norm beyond the dtype's largest number  inf (the clips below still see the true one)
    subnormal                               counted; as 0 on backends that flush subnormals (CPU, TPU)
    ======================================  ==================================================

    Args:
      grads: pytree of arrays. Complex leaves count with their modulus. Integer, boolean and float0 leaves, `None` and
        `optax.MaskedNode` do not count.
      ord: p, any Python number >= 1 or inf. `None` means 2.
      sharded_over: mapped axes over which the gradients are sharded, () for none, a `PartitionSpec`, or a function of a
        leaf's name and the leaf that returns one of these: `lambda name, leaf: "model" if "dense" in name else ()`. It
        is only needed in `jax.pmap` and in `jax.shard_map` with `check_vma=False`, where types do not record it. () for
        all says that each device has whole gradients of its own, such as those of independent models. Its result is
        then its own.

    Returns:
      float32 scalar; float64 if a leaf is float64 or complex128.

    Raises:
      ValueError: `ord` is traced, below 1 or NaN. Or a leaf is neither an array nor a number. Or its dtype cannot hold
        a gradient: it has no sign and no zero (float8_e8m0fnu), or no NaN (float4, float6). Or `sharded_over` is
        missing where it is needed.

    Example:
      >>> grad_norm({"w": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])})
      Array(5., dtype=float32)
      >>> grad_norm(jnp.full(4, 1e20, jnp.float32))
      Array(2.e+20, dtype=float32)

    Source: J. L. Blue, "A portable Fortran program to find the Euclidean norm of a vector", ACM TOMS 4 (1978), for the
    scaled second pass.
    """
    return floats.from_extended(
        global_norm(grads, arguments.order(ord), arguments.sharded_over(sharded_over))
    )


def clip_grad_norm(
    grads: Tree,
    max_norm: Number,
    *,
    ord: float | None = None,
    sharded_over: ShardedOver = None,
) -> tuple[Tree, jax.Array]:
    r"""Scales all gradients by one number so that their norm is at most `max_norm`, and returns the norm before, too.

    .. math:: g \leftarrow g \cdot \min\Big(1, \frac{\mathrm{max\_norm}}{\|g\|}\Big)

    The first row that applies:

    ====================================  =============================================================
    condition                             result
    ====================================  =============================================================
    max_norm = inf                        the gradients to the last bit
    a NaN or infinite gradient            every floating leaf becomes NaN
    a NaN max_norm in an array            the same
    a negative max_norm in an array       as 0
    norm <= max_norm                      the gradients to the last bit, subnormals and -0.0 included
    max_norm = 0                          zeros
    norm > max_norm                       same direction, norm within 2 eps of max_norm, relative (4 eps
                                          for ord other than 2 and inf; eps of each leaf's dtype). If
                                          scaled elements become subnormal: plus sqrt(n) smallest normals
    ====================================  =============================================================

    The clip is differentiable; at a zero norm its derivative is that of the identity.

    Args:
      grads: pytree of arrays. Leaves that do not count in `grad_norm` pass through. The others keep their dtype; 16-bit
        ones are multiplied in float32.
      max_norm: the threshold, a real scalar >= 0, or a scalar array of any real dtype.
      ord: as in `grad_norm`.
      sharded_over: as in `grad_norm`.

    Returns:
      The clipped gradients, and `grad_norm(grads)`.

    Raises:
      ValueError: `max_norm` is a Python or NumPy number that is negative or NaN, or is no real scalar; or as in
        `grad_norm`.

    Example:
      >>> clipped, norm = clip_grad_norm({"w": jnp.array([3.0, 4.0])}, 1.0)
      >>> clipped["w"].round(6), norm
      (Array([0.6, 0.8], dtype=float32), Array(5., dtype=float32))

    Source: R. Pascanu, T. Mikolov, Y. Bengio, "On the difficulty of training recurrent neural networks", 2013,
    arXiv:1211.5063, Algorithm 1. The name and the return value are those of `torch.nn.utils.clip_grad_norm_`.
    """
    max_norm, ord = arguments.threshold("max_norm", max_norm), arguments.order(ord)
    norm = global_norm(grads, ord, arguments.sharded_over(sharded_over))
    clipped, _ = _clip_to_limit(grads, norm, scaling.as_limit(max_norm, norm))
    return clipped, floats.from_extended(norm)


@described
class ClipByGlobalNormState(NamedTuple):
    """Measurements of the last update, in float64 where a parameter is, and counts.

    Attributes:
      grad_norm: float32 (): the norm before clipping
      clip_scale: float32 (): the number that multiplied the gradients; 1 if not clipped
      calls: int32 (): number of updates
      clipped: int32 (): number of updates in which a finite norm was above its threshold
      leaf_norms: with per_leaf=True, a tree like the parameters of norms before clipping, float32 ();
        otherwise ()
    """

    grad_norm: jax.Array
    clip_scale: jax.Array
    calls: jax.Array
    clipped: jax.Array
    leaf_norms: PyTree = ()

    def metrics(self) -> Metrics:
        """Returns the entries of `shrewjax.metrics`."""
        measured = fields(self, "grad_norm", "clip_scale") | metrics_of_counts(self)
        return measured | _of_leaves(self.leaf_norms)


def clip_by_global_norm(
    max_norm: Number,
    *,
    ord: float | None = None,
    per_leaf: bool = False,
    sharded_over: ShardedOver = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Clips the norm of all gradients together: `clip_grad_norm` as an Optax transformation.

    .. math:: g \leftarrow g \cdot \min\Big(1, \frac{\mathrm{max\_norm}}{\|g\|}\Big)

    The table of `clip_grad_norm` has the edge cases. Chain it before the optimizer. Inside `accumulate` it clips the
    window's average. To schedule the threshold, wrap it in `optax.inject_hyperparams`.

    With `per_leaf=True` the state also has the norm of each leaf, at no extra pass over the gradients. `metrics` shows
    each by name, and the largest share of the squared norm:

    ======================================  =====================================================================
    gradients                               norms by leaf
    ======================================  =====================================================================
    a NaN in a leaf                         NaN for that leaf; `largest_share` is NaN and `largest_leaf` has the NaN
    an infinity and no NaN                  inf for its leaf; k infinite leaves have a share of 1/k each
    a leaf's norm beyond float32            inf, and a share as for an infinity. Beside a NaN, from 2**64 on
    all zero                                0, and `largest_share` is 0
    no leaves                               neither norms by leaf nor `largest_share`
    an element below 2**-63                 may count as 0 in its leaf's norm, unless `grad_norm` is below 2**-30
    complex, sharded, 16-bit leaves         as in `grad_norm`
    other leaves                            0
    ======================================  =====================================================================

    Args:
      max_norm: as in `clip_grad_norm`.
      ord: as in `grad_norm`.
      per_leaf: a bool, whether the state has the leaves' norms. It requires order 2, and changes no update.
      sharded_over: as in `grad_norm`.

    Returns:
      A transformation with state `ClipByGlobalNormState(grad_norm, clip_scale, calls, clipped, leaf_norms)`: counts of
      updates, and measurements of the last one (before the first: 0, 1 and 0). The norms of the leaves have no
      derivative.

    Raises:
      ValueError: `per_leaf` is no bool, or is set although `ord` is not 2; with `per_leaf=True`, the updates' tree
        differs from that of the parameters given to `init`, or the state is another transformation's; or as in
        `clip_grad_norm`.

    Example:
      >>> tx = optax.chain(clip_by_global_norm(1.0), optax.sgd(0.1))
      >>> params = {"w": jnp.zeros(2)}
      >>> updates, state = tx.update({"w": jnp.array([3.0, 4.0])}, tx.init(params), params)
      >>> updates["w"].round(6), state[0].grad_norm
      (Array([-0.06, -0.08], dtype=float32), Array(5., dtype=float32))
      >>> tx = clip_by_global_norm(1.0, per_leaf=True)
      >>> grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> state.leaf_norms["b"], state.metrics()["largest_share"].round(6)
      (Array(4., dtype=float32), Array(0.64, dtype=float32))

    Source: R. Pascanu, T. Mikolov, Y. Bengio, 2013, arXiv:1211.5063, Algorithm 1.
    """
    max_norm, ord = arguments.threshold("max_norm", max_norm), arguments.order(ord)
    per_leaf = arguments.static_flag("per_leaf", per_leaf)
    if per_leaf and ord != 2:
        raise ValueError(f"ord must be 2 with per_leaf=True, got {ord}. Leave out ord or per_leaf")
    axes = arguments.sharded_over(sharded_over)

    def init_fn(params: optax.Params) -> ClipByGlobalNormState:
        measured = _new_measurements(params)
        dtype, of_leaves = measured["grad_norm"].dtype, params if per_leaf else ()
        leaf_norms = jax.tree.map(lambda _: jnp.zeros((), dtype), of_leaves)
        return ClipByGlobalNormState(**measured, leaf_norms=leaf_norms)

    def update_fn(updates: PyTree, state: ClipByGlobalNormState, _: Params) -> Updated:
        if per_leaf:
            norm, leaf_norms = _global_and_leaf_norms(updates, state, axes)
        else:
            norm, leaf_norms = global_norm(updates, ord, axes), ()
        limit = scaling.as_limit(max_norm, norm)
        updates, measured = _clip_and_measure(updates, norm, limit, state)
        return updates, ClipByGlobalNormState(**measured, leaf_norms=leaf_norms)

    return clipping_rule(
        ClipByGlobalNormState, init_fn, update_fn, takes_any_state=not per_leaf, sharded_over=axes
    )


def _new_measurements(params: PyTree) -> Metrics:
    """Returns the fields of a new state. The norm has the dtype of a norm of gradients like the parameters."""
    arrays = (x for x in jax.tree.leaves(params) if hasattr(x, "dtype"))
    # NumPy's float64 counts as float32 without x64.
    dtype = jnp.result_type(floats.sum_dtype(*filter(trees.is_gradient, arrays)))
    measured = {"grad_norm": jnp.zeros((), dtype), "clip_scale": jnp.ones((), dtype)}
    return measured | new_counts()


def global_norm(grads: PyTree, ord: float, axes: arguments.Shardings) -> ExtendedFloat:
    return measure(trees.floating(grads), ord, arguments.axes_by_leaf(axes, grads))


def _clip_to_limit(
    grads: Tree, norm: ExtendedFloat, limit: ExtendedFloat
) -> tuple[Tree, ClipScale]:
    """Clips gradients of this norm to a limit, and returns the scale, too."""
    (scale,) = scaling.clip_scales([norm], [limit])
    return trees.map_floating(lambda x: scaling.apply_scale(x, scale), grads), scale


def _clip_and_measure(
    updates: PyTree, norm: ExtendedFloat, limit: ExtendedFloat, state: AnyState
) -> tuple[PyTree, Metrics]:
    """Clips updates of this norm to a limit. Returns also the fields of the state that `_new_measurements` begins."""
    clipped, scale = _clip_to_limit(updates, norm, limit)
    measured = {
        "grad_norm": floats.stored(norm, state.grad_norm.dtype),
        "clip_scale": scaling.applied_scale(scale, state.clip_scale.dtype),
    }
    return clipped, measured | counted(state, scaling.is_above(norm, limit))


def _global_and_leaf_norms(
    grads: PyTree, state: ClipByGlobalNormState, axes: arguments.Shardings
) -> tuple[ExtendedFloat, PyTree]:
    """Returns the norm of all gradients, and the new `leaf_norms` of the state: 0 for a leaf without a gradient."""
    units = find_units(grads)
    if units.leaves:
        require_made_with("per_leaf=True", state, "leaf_norms")
    units.numbers_beside(state.leaf_norms)  # raises if the state has other leaves
    norm, norms = measure_with_leaves(units.leaves, arguments.axes_by_leaf(axes, grads))
    absent = jax.tree.map(jnp.zeros_like, state.leaf_norms)
    dtype = state.grad_norm.dtype
    return norm, units.with_leaves(absent, [x.astype(dtype) for x in norms])


def _of_leaves(leaf_norms: PyTree) -> Metrics:
    """Returns the metrics of norms by leaf. There are none without leaves."""
    names, norms = trees.leaf_names(leaf_norms), jax.tree.leaves(leaf_norms)
    by_name = dict(sorted(zip(names, norms, strict=True)))
    if not by_name:
        return {}
    share, index = _largest_of([*by_name.values()])
    return {
        "largest_share": share,
        "largest_leaf": index,
        **{f"leaf_norm/{name}": norm for name, norm in by_name.items()},
    }


# Outside of jit, operations would send their constants to the device.
@partial(jax.jit, inline=True)
def _largest_of(leaf_norms: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the share of the squared norm that the largest leaf has, and its place."""
    norms = jnp.stack(leaf_norms)
    index = jnp.argmax(norms, axis=0)  # of the first NaN, if there is one
    largest = jnp.take_along_axis(norms, index[None], axis=0)
    is_largest = norms == largest
    # Relative to the largest, so that no square leaves the range. No 0 / 0 or inf / inf, which `jax_debug_nans` finds.
    others = jnp.where(is_largest, 0, norms) / jnp.where(largest == 0, 1, largest)
    share = 1 / jnp.sum(jnp.where(is_largest, 1, others * others), axis=0)
    return jnp.where(largest[0] == 0, 0, share), index.astype(jnp.int32)


@described
class ClipByNormPercentileState(NamedTuple):
    """The history of norms, measurements of the last update, and counts. Its fields are a file format.

    The norm and the scale are float64 where a parameter is.

    Attributes:
      history: the last finite norms, before clipping
      threshold: float32 (): the threshold of the last norm; inf while the history is empty
      grad_norm: float32 (): the last norm before clipping
      clip_scale: float32 (): the number that multiplied the gradients; 1 if not clipped
      calls: int32 (): number of updates
      clipped: int32 (): number of updates in which a finite norm was above its threshold
    """

    history: histories.HistoryState
    threshold: jax.Array
    grad_norm: jax.Array
    clip_scale: jax.Array
    calls: jax.Array
    clipped: jax.Array

    def metrics(self) -> Metrics:
        """Returns the entries of `shrewjax.metrics`."""
        measured = fields(self, "threshold", "grad_norm", "clip_scale")
        return measured | metrics_of_counts(self)


def clip_by_norm_percentile(
    percentile: Number,
    *,
    history_length: int | None = None,
    sharded_over: ShardedOver = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Clips the norm of all gradients together to a percentile of its history (AutoClip).

    .. math:: g_t \leftarrow g_t \cdot \min\Big(1, \frac{c_t}{\|g_t\|}\Big), \qquad
              c_t = \mathrm{percentile}_p(\|g_{t-H+1}\|, \dots, \|g_t\|)

    p is in percent: 90, not 0.9. The history holds norms before clipping, the present one included. A percentile of 10,
    as in the paper, clips nine steps in ten. For a guard, use one near 100, or `skip_on_spike`.

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
    ========================================  =======================================================================

    A percentile outside [0, 100] in an array counts as 0 or 100. If more than p % of the norms are 0, all updates are.
    The table of `clip_grad_norm` describes the clip itself.

    Args:
      percentile: p, a real scalar in [0, 100], or a scalar array of any real dtype. Between two norms of the history it
        is interpolated, as in `numpy.percentile`.
      history_length: H, an int >= 1, the number of norms in the history. `None` means 1024.
      sharded_over: as in `grad_norm`.

    Returns:
      A transformation with state `ClipByNormPercentileState(history, threshold, grad_norm, clip_scale, calls,
      clipped)`: three scalars of the last update (before the first: inf, 0 and 1), and counts of updates.

    Raises:
      ValueError: `percentile` or `history_length` is not as described; the state is another transformation's; or as in
        `grad_norm`.

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
    percentile = arguments.percent(percentile)
    length = arguments.length("history_length", history_length, default=1024)
    axes = arguments.sharded_over(sharded_over)

    def init_fn(params: optax.Params) -> ClipByNormPercentileState:
        return ClipByNormPercentileState(
            history=histories.empty_history(length),
            threshold=jnp.full((), jnp.inf, jnp.float32),
            **_new_measurements(params),
        )

    def update_fn(updates: PyTree, state: ClipByNormPercentileState, _: Params) -> Updated:
        norm = global_norm(updates, 2.0, axes)
        grad_norm = floats.stored(norm, jnp.float32)
        history = histories.push(state.history, grad_norm)
        threshold = histories.percentile(history, percentile)
        limit = _float32_limit(threshold, grad_norm, norm)
        updates, measured = _clip_and_measure(updates, norm, limit, state)
        return updates, ClipByNormPercentileState(history, threshold, **measured)

    return clipping_rule(ClipByNormPercentileState, init_fn, update_fn, sharded_over=axes)


@described
class ClipByNormZscoreState(NamedTuple):
    """The moments of the norms, measurements of the last update, and counts. Its fields are a file format.

    The norm and the scale are float64 where a parameter is.

    Attributes:
      recorded: int32 (): number of norms recorded so far
      mean: float32 (): the mean of the norms, each clipped by its own z-score
      std: float32 (): the standard deviation of the same norms
      threshold: float32 (): the last norm's threshold; if it was no spike, the least spike
      grad_norm: float32 (): the last norm before clipping
      clip_scale: float32 (): the number that multiplied the gradients; 1 if not clipped
      calls: int32 (): number of updates
      clipped: int32 (): number of updates in which a finite norm was above its threshold
    """

    recorded: jax.Array
    mean: jax.Array
    std: jax.Array
    threshold: jax.Array
    grad_norm: jax.Array
    clip_scale: jax.Array
    calls: jax.Array
    clipped: jax.Array

    def metrics(self) -> Metrics:
        """Returns the entries of `shrewjax.metrics`."""
        measured = fields(self, "threshold", "grad_norm", "clip_scale", "mean", "std")
        return measured | metrics_of_counts(self)


def clip_by_norm_zscore(
    max_zscore: Number = 2.5,
    *,
    decay: Number = 0.97,
    warmup_steps: Number = 25,
    max_norm: Number = math.inf,
    eps: Number = 1e-6,
    sharded_over: ShardedOver = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Clips the norm of all gradients together when it stands out from the recent ones (ZClip).

    .. math:: z_t = \frac{\|g_t\| - \mu}{\sigma + \epsilon}, \qquad
              n_t = \mu + \frac{z_{thr}^2}{z_t} \sigma \;\text{ if } z_t > z_{thr}, \text{ else } \|g_t\|

    The norm is clipped to :math:`\min(n_t, \mathrm{max\_norm})`. The further a spike stands out, the more it is
    clipped. Then the moments are updated with :math:`n_t`:

    .. math:: \mu \leftarrow \beta \mu + (1 - \beta) n_t, \qquad
              \sigma^2 \leftarrow \beta \sigma^2 + (1 - \beta) (n_t - \mu)^2

    with the new mean. Until `warmup_steps` norms are recorded, only `max_norm` clips. The mean and
    the standard deviation are then those of all norms so far, with their number as the denominator.

    ========================================  =======================================================================
    condition                                 result
    ========================================  =======================================================================
    a NaN or infinite gradient                not recorded; every floating leaf becomes NaN. In the warm-up with
                                              max_norm = inf, the gradient passes as it is
    norm beyond float32                       in the warm-up not recorded; later clipped to the mean, and so recorded
    all norms equal                           the mean is that norm to the last bit, the deviation 0
    a higher level after equal norms          clipped to the mean forever
    mean 0 (no warm-up, or only zeros in it)  as in the warm-up, until the mean is positive
    a NaN argument in an array                every floating leaf becomes NaN; nothing non-finite is recorded
    z at most max_zscore, norm <= max_norm    the gradients to the last bit
    ========================================  =======================================================================

    Args:
      max_zscore: the largest z-score of a norm that is no spike, >= 0. This and the next four are real scalars or
        scalar arrays.
      decay: beta, in [0, 1].
      warmup_steps: a number of recorded norms, >= 0.
      max_norm: a cap on every step, >= 0. The default, inf, is no cap. The paper uses 1.0 for language models.
      eps: added to the deviation, >= 0.
      sharded_over: as in `grad_norm`.

    Returns:
      A transformation with state `ClipByNormZscoreState(recorded, mean, std, threshold, grad_norm, clip_scale, calls,
      clipped)`.

    Raises:
      ValueError: an argument is not as described; the state is another transformation's; or as in `grad_norm`.

    Example:
      >>> tx = clip_by_norm_zscore(warmup_steps=4)
      >>> state = tx.init(jnp.zeros(1))
      >>> for norm in (0.9, 1.1, 0.9, 1.1, 2.0):
      ...     updates, state = tx.update(jnp.array([norm]), state)
      >>> updates.round(4)  # mean 1, deviation 0.1, z = 10: clipped to 1 + 0.1 * 2.5**2 / 10
      Array([1.0625], dtype=float32)

    Source: A. Kumar et al., "ZClip: Adaptive spike mitigation for LLM pre-training", 2025, arXiv:2504.02507.
    """
    max_zscore = arguments.threshold("max_zscore", max_zscore)
    decay = arguments.real("decay", decay, at_least=0, at_most=1)
    warmup_steps = arguments.threshold("warmup_steps", warmup_steps)
    max_norm = arguments.threshold("max_norm", max_norm)
    eps = arguments.threshold("eps", eps)
    axes = arguments.sharded_over(sharded_over)

    def init_fn(params: optax.Params) -> ClipByNormZscoreState:
        return ClipByNormZscoreState(
            recorded=jnp.zeros((), jnp.int32),
            mean=jnp.zeros((), jnp.float32),
            std=jnp.zeros((), jnp.float32),
            threshold=jnp.full((), jnp.inf, jnp.float32),
            **_new_measurements(params),
        )

    def update_fn(updates: PyTree, state: ClipByNormZscoreState, _: Params) -> Updated:
        z_limit, eps_ = jnp.float32(max_zscore), jnp.float32(eps)
        cap = jnp.float32(max_norm)
        norm = global_norm(updates, 2.0, axes)
        grad_norm = floats.stored(norm, jnp.float32)

        past = histories.Moments(state.recorded, state.mean, state.std)
        is_warmup = past.recorded.astype(jnp.float32) < jnp.float32(warmup_steps)
        # A mean of 0 (no warm-up, or only zero gradients so far) gives no z-score either.
        has_no_score = is_warmup | (past.recorded == 0) | (past.mean == 0)
        z = (grad_norm - past.mean) / (past.std + eps_)
        is_spike = ~has_no_score & (z > z_limit)
        clipped_z = z_limit * (z_limit / jnp.where(is_spike, z, 1))
        clipped_norm = past.mean + clipped_z * past.std
        # No norm below a spike exceeds this, in spite of rounding.
        spikes_begin_at = jnp.fmax(past.mean + z_limit * (past.std + eps_), grad_norm)
        scored = jnp.where(is_spike, clipped_norm, spikes_begin_at)
        threshold = jnp.minimum(jnp.where(has_no_score, jnp.inf, scored), cap)
        threshold = jnp.where(jnp.isnan(z_limit) | jnp.isnan(eps_), jnp.nan, threshold)
        limit = _float32_limit(threshold, grad_norm, norm)
        updates, measured = _clip_and_measure(updates, norm, limit, state)

        # A finite gradient whose norm is beyond float32 is recorded as clipped. An infinite gradient is not recorded.
        recorded = jnp.where(is_spike, clipped_norm, grad_norm)
        recorded = jnp.where(jnp.isfinite(norm.mantissa), recorded, jnp.nan)
        share = jnp.asarray(1 - decay, jnp.float32)
        moments = histories.update_moments(past, recorded, share, has_no_score)
        return updates, ClipByNormZscoreState(*moments, threshold=threshold, **measured)

    return clipping_rule(ClipByNormZscoreState, init_fn, update_fn, sharded_over=axes)


def _float32_limit(
    threshold: jax.Array, grad_norm: jax.Array, norm: ExtendedFloat
) -> ExtendedFloat:
    """Returns the limit of a norm; inf if its float32 value, which is what states show, is within the threshold.

    Otherwise a norm that reads equal to its threshold could be clipped for digits beyond float32. The test is
    `test_percentile_100_leaves_gradients_of_any_size_alone`.
    """
    return scaling.as_limit(jnp.where(grad_norm <= threshold, jnp.inf, threshold), norm)
