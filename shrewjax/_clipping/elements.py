"""Clipping element by element: to a given bound, or to a percentile of the magnitudes."""

import math
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from shrewjax._base import arguments, trees
from shrewjax._base.mesh import placed_like
from shrewjax._base.states import described, largest
from shrewjax._base.trees import is_gradient
from shrewjax._base.types import (
    Argument,
    Leaf,
    Metrics,
    Number,
    Params,
    PyTree,
    Scalar,
    ShardedOver,
    Tree,
)
from shrewjax._clipping.rule import Updated, clipping_rule
from shrewjax._numerics import floats
from shrewjax._numerics.percentiles import Method, Over, Rule, Scope, select
from shrewjax._numerics.vectors import scalars


def clip_grad_value(grads: Tree, max_value: Number) -> Tree:
    r"""Clips each element to [-max_value, max_value].

    .. math:: g_i \leftarrow \max(-\mathrm{max\_value}, \min(g_i, \mathrm{max\_value}))

    ====================================  =======================================================================
    element                               result
    ====================================  =======================================================================
    inside                                itself to the last bit, subnormals and -0.0 included
    outside, infinities included          the end of the interval, rounded toward zero to the leaf's dtype, so
                                          that the result never leaves the interval
    NaN                                   NaN
    complex, modulus outside              same phase, modulus max_value; NaN if the element is not finite
    any, max_value = inf                  itself to the last bit
    any, max_value NaN in an array        NaN
    any, max_value negative in an array   as for 0
    ====================================  =======================================================================

    It changes the gradient's direction.

    Args:
      grads: pytree of arrays. Integer, boolean and float0 leaves, `None` and `optax.MaskedNode` pass through.
      max_value: the threshold, a real scalar >= 0, or a scalar array of any real dtype.

    Returns:
      The clipped gradients, each leaf in its dtype.

    Raises:
      ValueError: `max_value` is a Python or NumPy number that is negative or NaN, or is no real scalar; or for a leaf
        as in `grad_norm`.

    Example:
      >>> clip_grad_value(jnp.array([0.5, -3.0, jnp.inf]), 1.0)
      Array([ 0.5, -1. ,  1. ], dtype=float32)

    Source: the rule and the name are those of `torch.nn.utils.clip_grad_value_`.
    """
    max_value = arguments.threshold("max_value", max_value)
    return trees.map_floating(lambda x: _clip_leaf_value(x, max_value), grads)


def clip_by_value(max_value: Number) -> optax.GradientTransformationExtraArgs:
    r"""Clips each element to [-max_value, max_value]: `clip_grad_value` as an Optax transformation.

    .. math:: g_i \leftarrow \max(-\mathrm{max\_value}, \min(g_i, \mathrm{max\_value}))

    The table of `clip_grad_value` has the edge cases.

    Args:
      max_value: as in `clip_grad_value`.

    Returns:
      A transformation with state `optax.EmptyState`: it measures nothing.

    Raises:
      ValueError: as in `clip_grad_value`.

    Example:
      >>> tx = clip_by_value(0.25)
      >>> grads = jnp.array([0.125, -3.0])
      >>> tx.update(grads, tx.init(grads))[0]
      Array([ 0.125, -0.25 ], dtype=float32)

    Source: as for `clip_grad_value`; `optax.clip` has the same rule.
    """
    max_value = arguments.threshold("max_value", max_value)

    def clip(updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        trees.require_no_device_rows(updates, params)
        return clip_grad_value(updates, max_value)

    return optax.with_extra_args_support(optax.stateless(clip))


class Limit(NamedTuple):
    """The largest magnitude that a leaf may have, in the leaf's precision. All fields are scalars."""

    bound: jax.Array  # the largest magnitude, for complex leaves and for derivatives
    bits: jax.Array  # its bits, rounded toward zero
    is_infinite: jax.Array  # elements stay, to the last bit
    is_nan: jax.Array  # they become NaN


def _clip_leaf_value(x: Leaf, max_value: Scalar) -> jax.Array:
    if isinstance(max_value, float):
        if math.isinf(max_value):
            return x
        max_value = floats.toward_zero(max_value, floats.sum_dtype(x))
    value = max_value.astype(floats.sum_dtype(x, max_value))
    bits = jnp.where(floats.sign_bit(value), 0, floats.magnitude_bits(value))
    return _clip_magnitude(x, value, bits, value == jnp.inf)


def _clip_magnitude(
    x: Leaf, value: jax.Array, bits: jax.Array, is_infinite: jax.Array
) -> jax.Array:
    """Clips |x| to a limit, a float32 or float64 number with its bits. NaN stays NaN.

    The number has derivatives. A backend flushes it if it is subnormal, but not the bits (XLA-18).
    """
    precision = floats.real_dtype(x)
    bound = jnp.clip(value, 0, float(jnp.finfo(precision).max)).astype(precision)
    bits = floats.narrower_bits(bits, value.dtype, precision)
    limit = placed_like(Limit(bound, bits, is_infinite, jnp.isnan(value)), x)
    if not floats.is_complex(x):
        return _clip_real(x, limit)
    # Rounded toward zero, as the bits are, with the derivative of the bound.
    excess = limit.bound - lax.bitcast_convert_type(limit.bits, precision)
    bound = limit.bound - lax.stop_gradient(jnp.where(excess > 0, excess, 0))
    clipped = jnp.where(limit.is_infinite, x, _clip_modulus(x, bound))
    return jnp.where(limit.is_nan, jnp.nan, clipped)


@jax.custom_jvp
def _clip_real(x: jax.Array, limit: Limit) -> jax.Array:
    """Clips a real leaf by its bits, because CPU and TPU flush subnormals in float arithmetic (XLA-18).

    `test_value_clip_never_leaves_the_interval_and_touches_nothing_inside` holds this.
    """
    integers = floats.integers_like(x.dtype)
    # XLA-28: all selections are of integers, and the ends are computed as integers. If an operand were a float's bits,
    # LLVM would select floats instead, and flush subnormals.
    values = np.asarray([math.nan, -0.0], x.dtype)
    nan, minus_zero = map(int, values.view(integers))
    upper = jnp.where(limit.is_nan, jnp.asarray(nan, integers), limit.bits)
    lower = jnp.where(
        upper == 0, jnp.asarray(minus_zero, integers), upper | jnp.iinfo(integers).min
    )
    ends = jnp.where(floats.sign_bit(x), lower, upper)
    kept = lax.bitcast_convert_type(x, integers)
    clipped = jnp.where(_is_outside(x, limit), ends, kept)
    return lax.bitcast_convert_type(clipped, x.dtype)


@_clip_real.defjvp
def _clip_real_jvp(
    primals: tuple[jax.Array, Limit], tangents: tuple[jax.Array, Limit]
) -> tuple[jax.Array, jax.Array]:
    (x, limit), (d_x, d_limit) = primals, tangents
    d_bound = jnp.where((limit.bits == 0) | limit.is_nan, 0, d_limit.bound)
    d_ends = jnp.where(floats.sign_bit(x), -d_bound, d_bound)
    return _clip_real(x, limit), jnp.where(_is_outside(x, limit), d_ends, d_x)


def _is_outside(x: jax.Array, limit: Limit) -> jax.Array:
    # XLA-17: a limit of 0 has a check of its own. On CPU LLVM turns a comparison of bits with 0 into one of floats, so
    # that subnormals would not be clipped. The test that notices is that of `_clip_real`.
    magnitude = floats.magnitude_bits(x)
    # XLA-28: a NaN is found by its bits, too. Floats of 8 bits need `isnan`, because some of their formats have a NaN
    # at other bits. It does no harm there, because LLVM does not know such floats.
    wide = jnp.finfo(x.dtype).bits >= 16
    is_nan = magnitude > floats.infinity_bits(x.dtype) if wide else jnp.isnan(x)
    is_outside = ((magnitude > limit.bits) | (limit.bits == 0)) & ~is_nan
    return (is_outside & ~limit.is_infinite) | limit.is_nan


def _clip_modulus(x: Leaf, bound: jax.Array) -> jax.Array:
    # Scaled by a power of two first, because the modulus may leave the range where the parts do not.
    up = floats.power_of_two_for(jnp.maximum(jnp.abs(x.real), jnp.abs(x.imag)))
    scaled = floats.mul_real(x, up)
    modulus = jnp.abs(scaled)
    phase = floats.mul_real(scaled, 1 / jnp.where(modulus > 0, modulus, 1))
    clipped = jnp.where(modulus > bound * up, floats.mul_real(phase, bound), x)
    return jnp.where(jnp.isfinite(x), clipped, jnp.nan)


def clip_grad_percentile(
    grads: Tree,
    percentile: Number,
    *,
    method: Method = "linear",
    scope: Scope = "global",
    over: Over = "all",
    sharded_over: ShardedOver = None,
) -> tuple[Tree, PyTree]:
    r"""Clips each element to [-b, b], where b is a percentile of the magnitudes, and returns b, too.

    .. math:: g_i \leftarrow \max(-b, \min(g_i, b)), \qquad b = \mathrm{percentile}_p(|g_1|, \dots, |g_n|)

    p is in percent: 90, not 0.9. The sorted magnitudes are v_0 <= ... <= v_(n-1). The exact rank is h = p (n - 1) /
    100, its floor is j, and f = h - j:

    ==========  ===============================================================
    method      b
    ==========  ===============================================================
    linear      v_j + f (v_(j+1) - v_j), within 4 ulp, and below v_(j+1) unless that is v_j or inf
    lower       v_j
    ==========  ===============================================================

    ====================================  =======================================================================
    gradients                             result
    ====================================  =======================================================================
    a NaN                                 every floating leaf (scope "leaf": that leaf) becomes NaN, and b is NaN
    percentile = 100                      the gradients to the last bit; b is the largest magnitude
    an infinity                           counts as the largest magnitude; clipped if b is finite
    an element within [-b, b]             itself to the last bit, subnormals and -0.0 included
    complex                               modulus clipped, same phase; a non-finite element becomes NaN, unless
                                          percentile is 100; a modulus beyond the dtype counts as inf, a subnormal one
                                          may count as 0
    b = 0 (more than p % zeros)           zeros: `over="nonzero"` is for sparse gradients
    only zeros, no elements, no leaves    unchanged; b is 0
    percentile NaN in an array            as a NaN gradient; outside of [0, 100] in an array: as the nearer end
    ====================================  =======================================================================

    It clips a fixed share of the elements, (100 - p) %, in *every* step, even a calm one. That helps as a
    coordinate-wise rule against heavy-tailed noise. It does not guard against spikes, because b grows with the
    gradients: for that, use `clip_grad_norm`.

    The bound usually takes 5 to 8 reads of the data, and never more than 27 (16 bits: 11; 64 bits: 56). Nothing is
    sorted, copied or gathered. Sharded gradients give the same bits. The clip is differentiable, with b as a constant.

    Args:
      grads: pytree of arrays. Integer, boolean and float0 leaves, `None` and `optax.MaskedNode` pass through and do not
        count.
      percentile: p in [0, 100]. A number means exactly the decimal that it is written as (99.9 is 999/10), up to 15
        decimals. A scalar array is rounded to a multiple of 2**-24.
      method: "linear" or "lower", as in `numpy.percentile`, with the exact rank.
      scope: "global" for one b from all leaves, "leaf" for one b for each leaf.
      over: "all" elements, or the "nonzero" ones only.
      sharded_over: as in `grad_norm`.

    Returns:
      The clipped gradients, each leaf in its dtype (b is rounded toward zero to it), and b. That is a float32 scalar
      (float64 if a leaf is float64 or complex128). For scope "leaf" it is a tree like `grads` of such scalars, with 0
      for leaves that do not count.

    Raises:
      ValueError: `percentile` is a Python or NumPy number outside [0, 100] or NaN, or is no real scalar; `method`,
        `scope` or `over` is none of these choices; or as in `grad_norm`.

    Example:
      >>> grads = {"w": jnp.array([1.0, -2.0, 3.0, -40.0, 5.0])}
      >>> clipped, bound = clip_grad_percentile(grads, 75)
      >>> clipped["w"], bound
      (Array([ 1., -2.,  3., -5.,  5.], dtype=float32), Array(5., dtype=float32))

    Source: the rule is `clipByPercentileSpec` in TorchLean, there with `method="lower"`. The ranks are those of
    `numpy.percentile`: R. J. Hyndman, Y. Fan, "Sample quantiles in statistical packages", The American Statistician 50
    (1996), definition 7. Coordinate-wise clipping under heavy tails: J. Zhang et al., 2020, arXiv:1912.03194.
    """
    rule = _checked(percentile, method, scope, over, sharded_over)
    clipped, bounds, _ = _clip_percentile(grads, rule, start=None)
    return clipped, bounds


@described
class ClipByPercentileState(NamedTuple):
    """Measurements of the last update.

    Attributes:
      bound: float32 (): the percentile of the magnitudes; for scope 'leaf' a tree of them
      clipped_fraction: float32 (): clipped elements / elements
    """

    bound: PyTree
    clipped_fraction: jax.Array

    def metrics(self) -> Metrics:
        """Returns the entries of `shrewjax.metrics`."""
        return {"bound": largest(self.bound), "clipped_fraction": self.clipped_fraction}


def clip_by_percentile(
    percentile: Number,
    *,
    method: Method = "linear",
    scope: Scope = "global",
    over: Over = "all",
    sharded_over: ShardedOver = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Clips each element to a percentile of the magnitudes: `clip_grad_percentile` as an Optax transformation.

    .. math:: g_i \leftarrow \max(-b, \min(g_i, b)), \qquad b = \mathrm{percentile}_p(|g_1|, \dots, |g_n|)

    p is in percent: 90, not 0.9. `clip_grad_percentile` has the edge cases, and says when the rule helps.

    To schedule the percentile, wrap it in `optax.inject_hyperparams`. If parameters are narrower than float32, pass
    `hyperparam_dtype=jnp.float32`, because in bfloat16 99.9 is 100, which clips nothing.

    Args:
      percentile: as in `clip_grad_percentile`.
      method: as in `clip_grad_percentile`.
      scope: as in `clip_grad_percentile`.
      over: as in `clip_grad_percentile`.
      sharded_over: as in `grad_norm`.

    Returns:
      A transformation with state `ClipByPercentileState(bound, clipped_fraction)`, float32 scalars of the last update
      (before the first: 0). For scope "leaf", `bound` is a tree.

    Raises:
      ValueError: as in `clip_grad_percentile`; or, with scope "leaf", the updates' tree differs from that of the
        parameters given to `init`; or the state is another transformation's.

    Example:
      >>> tx = clip_by_percentile(75)
      >>> grads = jnp.array([1.0, -2.0, 3.0, -40.0, 5.0])
      >>> clipped, state = tx.update(grads, tx.init(grads))
      >>> clipped, state.bound, state.clipped_fraction
      (Array([ 1., -2.,  3., -5.,  5.], dtype=float32), Array(5., dtype=float32), Array(0.2, dtype=float32))

    Source: as for `clip_grad_percentile`.
    """
    rule = _checked(percentile, method, scope, over, sharded_over)

    def init_fn(params: optax.Params) -> ClipByPercentileState:
        of_leaves = params if scope == "leaf" else 0
        bounds = jax.tree.map(lambda _: jnp.zeros((), jnp.float32), of_leaves)
        return ClipByPercentileState(bound=bounds, clipped_fraction=jnp.zeros((), jnp.float32))

    def update_fn(updates: PyTree, state: ClipByPercentileState, _: Params) -> Updated:
        clipped, bounds, fraction = _clip_percentile(updates, rule, start=state.bound)
        zero = jnp.zeros((), jnp.float32)  # the bound of a gradient of None

        def recorded(_: jax.Array, bound: jax.Array | None) -> jax.Array:
            return zero if bound is None else bound.astype(jnp.float32)

        bounds = jax.tree.map(recorded, state.bound, bounds)
        return clipped, ClipByPercentileState(bound=bounds, clipped_fraction=fraction)

    return clipping_rule(ClipByPercentileState, init_fn, update_fn)


def _checked(
    percentile: Number, method: Method, scope: Scope, over: Over, sharded_over: Argument
) -> Rule:
    return Rule(
        arguments.percentile(percentile),
        arguments.choice("method", method, get_args(Method)),
        arguments.choice("scope", scope, get_args(Scope)),
        arguments.choice("over", over, get_args(Over)),
        arguments.sharded_over(sharded_over),
    )


def _clip_percentile(grads: Tree, rule: Rule, start: PyTree) -> tuple[Tree, PyTree, jax.Array]:
    """Returns the clipped gradients, the bound or bounds, and clipped elements / elements.

    `start` has the bound or bounds of the last update, where the search begins. With None, it begins at usual
    magnitudes.
    """
    _, leaves, treedef = trees.gradient_leaves(grads)
    counted = [i for i, x in enumerate(leaves) if is_gradient(x)]
    of_leaf = rule.scope == "leaf"
    if start is not None and of_leaf:
        # The state may have a bound where the gradient is None. The search does not need it.
        kept = jax.tree.map(lambda s, g: None if g is None else s, start, grads)
        starts = jax.tree.leaves(kept)
        start = jnp.stack([starts[i] for i in counted]) if counted else None
    rule = rule._replace(axes=arguments.axes_by_leaf(rule.axes, grads))
    selected = select([leaves[i] for i in counted], rule, start)
    bounds: list[jax.Array] = [jnp.zeros((), jnp.float32)] * len(leaves)

    def by_leaf(of_scope: jax.Array) -> list[jax.Array]:
        return scalars(of_scope) if of_leaf else [of_scope] * len(counted)

    selected_bounds, selected_bits = by_leaf(selected.bound), by_leaf(selected.bits)
    for i, bound, bits in zip(counted, selected_bounds, selected_bits, strict=True):
        keeps_all = (rule.percentile >= 100) | jnp.isinf(bound)
        leaves[i] = _clip_magnitude(leaves[i], bound, bits, keeps_all)
        bounds[i] = bound
    above = jnp.sum(selected.above)
    fraction = above / jnp.maximum(jnp.sum(selected.elements), 1)
    of_grads = treedef.unflatten(bounds) if of_leaf else selected.bound
    return treedef.unflatten(leaves), of_grads, fraction
