"""Clipping to a given threshold: by global norm, by leaf norm, by value, by percentile.

Leaves that hold no floating or complex numbers, and places without a leaf (`None`, `optax.MaskedNode`), pass
through untouched and are not counted.
"""

import math
from fractions import Fraction
from typing import Annotated, Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import lax

from shrewjax import _checks, _norms
from shrewjax._checks import Scalar, Tree
from shrewjax._norms import Factor, Scaled, Scope
from shrewjax._reductions import Axes, AxisName, is_counted
from shrewjax._selection import Method, Over, select
from shrewjax._states import described, fields, largest


def grad_norm(grads: Any, ord: float | None = None, *, sharded_over: AxisName | None = None) -> jax.Array:
    r"""The norm of all gradients together, as if they were one long vector.

    .. math:: \|g\|_p = \Big(\sum_i |g_i|^p\Big)^{1/p}, \qquad \|g\|_\infty = \max_i |g_i|

    Exact in range: neither the powers nor their sum overflow or underflow, whatever the dtypes.

    ======================================  ==================================================
    gradients                               norm
    ======================================  ==================================================
    all zero, no elements, no leaves        0
    a NaN                                   NaN
    an infinity and no NaN                  inf
    norm beyond the dtype's largest number  inf (the clips below still see the true one)
    subnormal                               counted, or 0 on backends that flush them (CPU, TPU)
    ======================================  ==================================================

    Args:
      grads: pytree of arrays. Complex leaves count with their modulus; integer, boolean and float0 leaves, `None` and
        `optax.MaskedNode` do not count.
      ord: p, any Python number >= 1 or inf. `None` means 2.
      sharded_over: mapped axes over which the gradients are sharded; only needed inside `jax.shard_map` with
        `check_vma=False` and inside `jax.pmap`. With `check_vma=True` the leaves' types tell.

    Returns:
      float32 scalar; float64 if a leaf is float64 or complex128.

    Raises:
      ValueError: `ord` is traced, below 1 or NaN; a leaf is neither an array nor a number, or has a dtype that cannot
        hold a gradient, without a sign and a zero (float8_e8m0fnu) or without a NaN (float4, float6); the leaves'
        mapped axes cannot be known and `sharded_over` is missing.

    Example:
      >>> grad_norm({"w": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])})
      Array(5., dtype=float32)
      >>> grad_norm(jnp.full(4, 1e20, jnp.float32))
      Array(2.e+20, dtype=float32)

    The scaled second pass follows the idea of J. L. Blue, "A portable Fortran program to find the Euclidean norm of a
    vector", ACM TOMS 4 (1978).
    """
    return _norms.join(global_norm(grads, _checks.order(ord), _checks.sharded_over(sharded_over)))


def clip_grad_norm(
    grads: Tree, max_norm: Any, *, ord: float | None = None, sharded_over: AxisName | None = None
) -> tuple[Tree, jax.Array]:
    r"""Scales all gradients by one number so that their norm is at most `max_norm`; also returns the norm before.

    .. math:: g \leftarrow g \cdot \min\Big(1, \frac{\text{max\_norm}}{\|g\|}\Big)

    The first row that fits:

    ====================================  =============================================================
    condition                             result
    ====================================  =============================================================
    max_norm = inf                        the gradients to the last bit; the norm is only measured
    a NaN or infinite gradient, or a NaN  every floating leaf becomes NaN
    max_norm in an array
    a negative max_norm in an array       as 0
    norm <= max_norm                      the gradients to the last bit, subnormals and -0.0 included
    max_norm = 0                          zeros
    norm > max_norm                       direction kept, norm within 2 eps of max_norm, relative (4 eps
                                          for ord other than 2 and inf; eps of each leaf's dtype). Where
                                          scaled elements become subnormal: plus sqrt(n) smallest normals
    ====================================  =============================================================

    There is no epsilon in the denominator, and the division is done once. Differentiable; at a zero norm the
    derivative is that of the identity.

    Args:
      grads: pytree of arrays, as in `grad_norm`. Each leaf keeps its dtype; 16-bit leaves are multiplied in float32.
      max_norm: the threshold, a real scalar >= 0, or a scalar array of any real dtype.
      ord: p of the norm, as in `grad_norm`.
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
    clipped, norm, _ = _clip_to(
        _checks.threshold("max_norm", max_norm), grads, _checks.order(ord), _checks.sharded_over(sharded_over)
    )
    return clipped, _norms.join(norm)


def clip_grad_value(grads: Tree, max_value: Any) -> Tree:
    r"""Limits each element to [-max_value, max_value].

    .. math:: g_i \leftarrow \max(-\text{max\_value}, \min(g_i, \text{max\_value}))

    ====================================  =======================================================================
    element                               result
    ====================================  =======================================================================
    inside                                itself to the last bit, subnormals and -0.0 included
    outside, infinities included          the end of the interval, rounded toward zero to the leaf's dtype, so
                                          that the result never leaves the interval
    NaN                                   NaN
    complex, modulus outside              phase kept, modulus max_value; NaN where it is not finite
    any, max_value = inf                  itself to the last bit
    any, max_value NaN in an array        NaN
    any, max_value negative in an array   as for 0
    ====================================  =======================================================================

    Unlike the norm clips this changes the direction. Nothing is measured, so that it costs one read and one write.

    Args:
      grads: pytree of arrays. Integer, boolean and float0 leaves, `None` and `optax.MaskedNode` pass through.
      max_value: the threshold, a real scalar >= 0, or a scalar array of any real dtype.

    Returns:
      The clipped gradients, each leaf in its dtype.

    Raises:
      ValueError: `max_value` is a Python or NumPy number that is negative or NaN, or is no real scalar; or a leaf is
        refused as in `grad_norm`.

    Example:
      >>> clip_grad_value(jnp.array([0.5, -3.0, jnp.inf]), 1.0)
      Array([ 0.5, -1. ,  1. ], dtype=float32)

    The name is that of `torch.nn.utils.clip_grad_value_`.
    """
    max_value = _checks.threshold("max_value", max_value)
    _, leaves, treedef = _checks.gradient_leaves(grads)
    return treedef.unflatten([_clip_leaf_value(x, max_value) if is_counted(x) else x for x in leaves])


def clip_grad_percentile(
    grads: Tree,
    percentile: Any,
    *,
    method: Method = "linear",
    scope: Scope = "global",
    over: Over = "all",
    sharded_over: AxisName | None = None,
) -> tuple[Tree, Any]:
    r"""Limits each element to [-b, b], where b is a percentile of the magnitudes; also returns b.

    .. math:: g_i \leftarrow \max(-b, \min(g_i, b)), \qquad b = \mathrm{percentile}_p(|g_1|, \dots, |g_n|)

    With the magnitudes sorted, v_0 <= ... <= v_(n-1), and the exact rank h = p (n - 1) / 100, a rational number, j its
    floor and f what is left:

    ==========  ===============================================================
    method      b
    ==========  ===============================================================
    linear      v_j + f (v_(j+1) - v_j), within 1 ulp, and below v_(j+1) unless that is v_j or inf
    lower       v_j
    higher      v_(j+1) if f > 0, else v_j
    nearest     the nearer of the two; at f = 1/2 the one of even rank
    midpoint    (v_j + v_(j+1)) / 2 if f > 0, else v_j; within 1 ulp
    ==========  ===============================================================

    ====================================  =======================================================================
    gradients                             result
    ====================================  =======================================================================
    a NaN                                 every floating leaf (scope "leaf": that leaf) becomes NaN, and b is NaN
    percentile = 100                      the gradients to the last bit; b is the largest magnitude
    an infinity                           counts as the largest; clipped if b is finite
    an element within [-b, b]             itself to the last bit, subnormals and -0.0 included
    complex                               modulus limited, phase kept; NaN where it is not finite, unless percentile is
                                          100; a modulus beyond the dtype counts as inf, a subnormal one may count as 0
    b = 0 (more than p % zeros)           zeros: `over="nonzero"` is for sparse gradients
    only zeros, no elements, no leaves    unchanged; b is 0
    percentile NaN in an array            as a NaN gradient; outside of [0, 100] in an array: as the nearer end
    ====================================  =======================================================================

    **When it helps, and when not.** It limits a fixed share of the elements, (100 - p) %, in *every* step, a calm one
    too: it changes the shape of the update, as a coordinate-wise rule against heavy-tailed noise. It is no guard
    against spikes: a gradient a thousand times as large is clipped at a bound a thousand times as large. For that, use
    `clip_grad_norm`. Before an optimizer that divides by the gradients' scale, such as Adam, only the shape matters.

    No sort, no copy of the data, no gather: found by counting, in 5 to 8 reads of the data (16-bit leaves: 3 to 6),
    more where most magnitudes are equal, at most some 20. Sharded gradients give the same bits. Differentiable with b
    taken as a constant.

    Args:
      grads: pytree of arrays. Complex leaves count and are clipped with their modulus, keeping their phase; integer,
        boolean and float0 leaves, `None` and `optax.MaskedNode` pass through and do not count.
      percentile: p in [0, 100]: a number, which is taken as the decimal it is written as (99.9 is 999/10), or a scalar
        array, which is taken as the number it holds.
      method: "linear", "lower", "higher", "nearest" or "midpoint": NumPy's, with the exact rank.
      scope: "global", one b from all leaves; "leaf", one for each leaf.
      over: "all" elements, or the "nonzero" ones only.
      sharded_over: as in `grad_norm`.

    Returns:
      The clipped gradients, each leaf in its dtype (b rounded toward zero to it); and b, a float32 scalar (float64 if a
      leaf is float64 or complex128), for scope "leaf" a tree like `grads` of such, 0 for leaves that do not count.

    Raises:
      ValueError: `percentile` is a Python or NumPy number outside of [0, 100] or NaN, or is no real scalar; `method`,
        `scope` or `over` is none of those; or as in `grad_norm`.

    Example:
      >>> clipped, bound = clip_grad_percentile({"w": jnp.array([1.0, -2.0, 3.0, -40.0, 5.0])}, 75)
      >>> clipped["w"], bound
      (Array([ 1., -2.,  3., -5.,  5.], dtype=float32), Array(5., dtype=float32))

    The rule is the clipByPercentile of formal specifications of training (there with `method="lower"`); the ranks are
    those of `numpy.percentile`, R. J. Hyndman and Y. Fan, "Sample quantiles in statistical packages", The American
    Statistician 50 (1996), definition 7. Coordinate-wise clipping under heavy tails: J. Zhang et al., 2020,
    arXiv:1912.03194.
    """
    rule = _PercentileRule.checked(percentile, method, scope, over, sharded_over)
    clipped, bounds, _ = _clip_percentile(grads, rule, start=None)
    return clipped, bounds


@described
class ClipByGlobalNormState(NamedTuple):
    """What the last update measured."""

    grad_norm: Annotated[jax.Array, "float32 (): the norm before clipping"]
    clip_scale: Annotated[jax.Array, "float32 (): what the gradients were multiplied by; 1 if not clipped"]

    def metrics(self) -> dict[str, Any]:
        """Returns what `shrewjax.metrics` shows."""
        return fields(self, "grad_norm", "clip_scale")


def clip_by_global_norm(
    max_norm: Any, *, ord: float | None = None, sharded_over: AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Clips the norm of all gradients together: `clip_grad_norm` as an Optax transformation.

    .. math:: g \leftarrow g \cdot \min\Big(1, \frac{\text{max\_norm}}{\|g\|}\Big)

    The table of `clip_grad_norm` says what happens at the edges. Chain it before the optimizer; inside `accumulate`
    it sees the window's average, which is what most people want. To schedule the threshold, wrap it in
    `optax.inject_hyperparams`.

    Args:
      max_norm: the threshold, a real scalar >= 0, or a scalar array of any real dtype.
      ord: p of the norm, any Python number >= 1 or inf. `None` means 2.
      sharded_over: as in `grad_norm`.

    Returns:
      A transformation with state `ClipByGlobalNormState(grad_norm, clip_scale)`, float32 scalars of the last update
      (before the first: 0 and 1).

    Raises:
      ValueError: as in `clip_grad_norm`.

    Example:
      >>> tx = optax.chain(clip_by_global_norm(1.0), optax.sgd(0.1))
      >>> params = {"w": jnp.zeros(2)}
      >>> updates, state = tx.update({"w": jnp.array([3.0, 4.0])}, tx.init(params), params)
      >>> updates["w"].round(6), state[0].grad_norm
      (Array([-0.06, -0.08], dtype=float32), Array(5., dtype=float32))

    Source: R. Pascanu, T. Mikolov, Y. Bengio, 2013, arXiv:1211.5063, Algorithm 1.
    """
    max_norm, ord = _checks.threshold("max_norm", max_norm), _checks.order(ord)
    axes = _checks.sharded_over(sharded_over)

    def init_fn(params: optax.Params) -> ClipByGlobalNormState:
        del params
        return ClipByGlobalNormState(grad_norm=jnp.zeros((), jnp.float32), clip_scale=jnp.ones((), jnp.float32))

    def update_fn(
        updates: optax.Updates,
        state: ClipByGlobalNormState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ClipByGlobalNormState]:
        del state, params, extra_args
        updates, norm, factor = _clip_to(max_norm, updates, ord, axes)
        return updates, ClipByGlobalNormState(
            grad_norm=_norms.to_float32(norm), clip_scale=_norms.applied_scale(factor)
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@described
class ClipByLeafNormState(NamedTuple):
    """What the last update measured, leaf by leaf: trees like the parameters."""

    grad_norm: Annotated[Any, "float32 () each: the leaf's norm before clipping; 0 for leaves that do not count"]
    clip_scale: Annotated[Any, "float32 () each: what the leaf was multiplied by; 1 if not clipped"]

    def metrics(self) -> dict[str, Any]:
        """Returns what `shrewjax.metrics` shows."""
        return {
            "grad_norm_max": largest(self.grad_norm),
            "clipped_fraction": _fraction_clipped(self.clip_scale),
        }


def _fraction_clipped(clip_scale: Any) -> jax.Array:
    flags = [jnp.ravel(scale != 1) for scale in jax.tree.leaves(clip_scale)]
    return jnp.mean(jnp.concatenate(flags), dtype=jnp.float32) if flags else jnp.zeros((), jnp.float32)


def clip_by_leaf_norm(
    max_norm: Any, *, ord: float | None = None, sharded_over: AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Clips the norm of each leaf on its own.

    .. math:: g_\ell \leftarrow g_\ell \cdot \min\Big(1, \frac{\text{max\_norm}}{\|g_\ell\|}\Big)

    The table of `clip_grad_norm` holds leaf by leaf: a NaN in one leaf leaves the others alone. The direction of
    the whole gradient changes. A leaf that stacks layers counts as one.

    Args:
      max_norm: the threshold of every leaf, a real scalar >= 0, or a scalar array of any real dtype.
      ord: p of the norm, any Python number >= 1 or inf. `None` means 2.
      sharded_over: as in `grad_norm`.

    Returns:
      A transformation with state `ClipByLeafNormState(grad_norm, clip_scale)`: for each leaf float32 scalars of the
      last update (before the first: 0 and 1).

    Raises:
      ValueError: as in `clip_grad_norm`; or the updates' tree differs from that of the parameters given to `init`.

    Example:
      >>> tx = clip_by_leaf_norm(1.0)
      >>> grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.5])}
      >>> clipped, state = tx.update(grads, tx.init(grads))
      >>> clipped["a"].round(6), clipped["b"], state.grad_norm["a"]
      (Array([0.6, 0.8], dtype=float32), Array([0.5], dtype=float32), Array(5., dtype=float32))

    The rule is `tf.clip_by_norm` and Keras' `clipnorm`, applied to each tensor.
    """
    max_norm, ord = _checks.threshold("max_norm", max_norm), _checks.order(ord)
    axes = _checks.sharded_over(sharded_over)

    def init_fn(params: optax.Params) -> ClipByLeafNormState:
        return ClipByLeafNormState(
            grad_norm=jax.tree.map(lambda _: jnp.zeros((), jnp.float32), params),
            clip_scale=jax.tree.map(lambda _: jnp.ones((), jnp.float32), params),
        )

    def update_fn(
        updates: optax.Updates,
        state: ClipByLeafNormState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ClipByLeafNormState]:
        del params, extra_args
        _, leaves, treedef = _checks.gradient_leaves(updates)
        counted = [i for i, x in enumerate(leaves) if is_counted(x)]
        norms = _norms.measure([leaves[i] for i in counted], ord, "leaf", axes)
        factors = _norms.clip_factor(norms, _norms.limit(max_norm, norms))
        measured = _norms.to_float32(norms), _norms.applied_scale(factors)
        grad_norms = [jnp.zeros((), jnp.float32)] * len(leaves)
        clip_scales = [jnp.ones((), jnp.float32)] * len(leaves)
        for place, i in enumerate(counted):
            leaves[i] = _norms.scale(leaves[i], Factor(*(part[place] for part in factors)))
            grad_norms[i], clip_scales[i] = (part[place] for part in measured)
        return treedef.unflatten(leaves), ClipByLeafNormState(
            grad_norm=_like(state.grad_norm, treedef.unflatten(grad_norms), absent=0.0),
            clip_scale=_like(state.clip_scale, treedef.unflatten(clip_scales), absent=1.0),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def clip_by_value(max_value: Any) -> optax.GradientTransformationExtraArgs:
    r"""Limits each element to [-max_value, max_value]: `clip_grad_value` as an Optax transformation.

    .. math:: g_i \leftarrow \max(-\text{max\_value}, \min(g_i, \text{max\_value}))

    The table of `clip_grad_value` says what happens at the edges.

    Args:
      max_value: the threshold, a real scalar >= 0, or a scalar array of any real dtype.

    Returns:
      A transformation with state `optax.EmptyState`: it measures nothing.

    Raises:
      ValueError: as in `clip_grad_value`.

    Example:
      >>> tx = clip_by_value(0.25)
      >>> grads = jnp.array([0.125, -3.0])
      >>> tx.update(grads, tx.init(grads))[0]
      Array([ 0.125, -0.25 ], dtype=float32)

    The rule is `torch.nn.utils.clip_grad_value_` and `optax.clip`.
    """
    max_value = _checks.threshold("max_value", max_value)

    def init_fn(params: optax.Params) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params, extra_args
        return clip_grad_value(updates, max_value), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@described
class ClipByPercentileState(NamedTuple):
    """What the last update measured."""

    bound: Annotated[Any, "float32 (): the percentile of |g|; for scope 'leaf' a tree like the parameters of such"]
    clipped_fraction: Annotated[jax.Array, "float32 (): the share of elements that were larger, and so clipped"]

    def metrics(self) -> dict[str, Any]:
        """Returns what `shrewjax.metrics` shows."""
        return {"bound": largest(self.bound), "clipped_fraction": self.clipped_fraction}


def clip_by_percentile(
    percentile: Any,
    *,
    method: Method = "linear",
    scope: Scope = "global",
    over: Over = "all",
    sharded_over: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Limits each element to a percentile of the magnitudes: `clip_grad_percentile` as an Optax transformation.

    .. math:: g_i \leftarrow \max(-b, \min(g_i, b)), \qquad b = \mathrm{percentile}_p(|g_1|, \dots, |g_n|)

    The tables of `clip_grad_percentile` say what happens at the edges, and its text when the rule is useful: it limits
    (100 - p) % of the elements in every step, and guards against no spike. The search for b starts from that of the
    step before, near which it usually lies; whatever the start, it is exact. To schedule the percentile, wrap it in
    `optax.inject_hyperparams`, with `hyperparam_dtype=jnp.float32` where parameters are narrower: in bfloat16, 99.9 is
    100, which clips nothing.

    Args:
      percentile: p in [0, 100], a number or a scalar array, as in `clip_grad_percentile`.
      method: "linear", "lower", "higher", "nearest" or "midpoint".
      scope: "global", one b from all leaves; "leaf", one for each leaf.
      over: "all" elements, or the "nonzero" ones only.
      sharded_over: as in `grad_norm`.

    Returns:
      A transformation with state `ClipByPercentileState(bound, clipped_fraction)`, float32 scalars of the last update
      (before the first: 0), with scope "leaf" a tree of bounds.

    Raises:
      ValueError: as in `clip_grad_percentile`; or, with scope "leaf", the updates' tree differs from that of the
        parameters given to `init`.

    Example:
      >>> tx = clip_by_percentile(75)
      >>> grads = jnp.array([1.0, -2.0, 3.0, -40.0, 5.0])
      >>> clipped, state = tx.update(grads, tx.init(grads))
      >>> clipped, state.bound, state.clipped_fraction
      (Array([ 1., -2.,  3., -5.,  5.], dtype=float32), Array(5., dtype=float32), Array(0.2, dtype=float32))

    Sources: as of `clip_grad_percentile`.
    """
    rule = _PercentileRule.checked(percentile, method, scope, over, sharded_over)

    def init_fn(params: optax.Params) -> ClipByPercentileState:
        zero = jnp.zeros((), jnp.float32)
        bounds = jax.tree.map(lambda _: jnp.zeros((), jnp.float32), params) if scope == "leaf" else zero
        return ClipByPercentileState(bound=bounds, clipped_fraction=jnp.zeros((), jnp.float32))

    def update_fn(
        updates: optax.Updates,
        state: ClipByPercentileState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ClipByPercentileState]:
        del params, extra_args
        clipped, bounds, clipped_fraction = _clip_percentile(updates, rule, start=state.bound)
        bounds = jax.tree.map(lambda b: b.astype(jnp.float32), bounds)
        if scope == "leaf":
            bounds = _like(state.bound, bounds, absent=0.0)
        return clipped, ClipByPercentileState(bound=bounds, clipped_fraction=clipped_fraction)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def global_norm(grads: Any, ord: float, axes: Axes) -> Scaled:
    """The norm of all gradients together."""
    return _norms.measure([x for x in _checks.gradient_leaves(grads)[1] if is_counted(x)], ord, "global", axes)


def hold_to(grads: Tree, norm: Scaled, limit: Scaled) -> tuple[Tree, Factor]:
    """The gradients, whose norm is given, scaled to the limit if they are above it; and what they were scaled by."""
    _, leaves, treedef = _checks.gradient_leaves(grads)
    factor = _norms.clip_factor(norm, limit)
    return treedef.unflatten([_norms.scale(x, factor) if is_counted(x) else x for x in leaves]), factor


def _clip_to(max_norm: Scalar, grads: Tree, ord: float, axes: Axes) -> tuple[Tree, Scaled, Factor]:
    norm = global_norm(grads, ord, axes)
    clipped, factor = hold_to(grads, norm, _norms.limit(max_norm, norm))
    return clipped, norm, factor


class _PercentileRule(NamedTuple):
    """The checked arguments of a percentile clip."""

    percentile: Fraction | jax.Array
    method: Method
    scope: Scope
    over: Over
    axes: Axes

    @classmethod
    def checked(cls, percentile: Any, method: Any, scope: Any, over: Any, sharded_over: Any) -> "_PercentileRule":
        return cls(
            _checks.percentile(percentile),
            _checks.choice("method", method, get_args(Method)),
            _checks.choice("scope", scope, get_args(Scope)),
            _checks.choice("over", over, get_args(Over)),
            _checks.sharded_over(sharded_over),
        )


def _clip_percentile(grads: Tree, rule: _PercentileRule, start: Any) -> tuple[Tree, Any, jax.Array]:
    """The clipped gradients, the bound or bounds, and the clipped share of the elements."""
    _, leaves, treedef = _checks.gradient_leaves(grads)
    counted = [i for i, x in enumerate(leaves) if is_counted(x)]
    of_leaf = rule.scope == "leaf"
    if start is not None and of_leaf:
        # Where there is no gradient (None), what the state has is not needed.
        starts = jax.tree.leaves(jax.tree.map(lambda s, g: None if g is None else s, start, grads))
        start = jnp.stack([starts[i] for i in counted]) if counted else None
    selected = select(
        [leaves[i] for i in counted],
        rule.percentile,
        method=rule.method,
        scope=rule.scope,
        over=rule.over,
        axes=rule.axes,
        start=start,
    )
    bounds: list[Any] = [jnp.zeros((), jnp.float32)] * len(leaves)
    for place, i in enumerate(counted):
        bound, bits = (x[place] if of_leaf else x for x in (selected.bound, selected.bits))
        leaves[i] = _clip_to_selected(leaves[i], bound, bits, rule.percentile)
        bounds[i] = bound
    clipped_fraction = jnp.sum(selected.above) / jnp.maximum(jnp.sum(selected.elements), 1)
    return treedef.unflatten(leaves), treedef.unflatten(bounds) if of_leaf else selected.bound, clipped_fraction


def _clip_to_selected(x: Any, bound: jax.Array, bits: jax.Array, percentile: Fraction | jax.Array) -> jax.Array:
    precision = _norms.real_dtype(x)
    if jnp.finfo(precision).bits < 16:  # of these, some have no infinity
        own = _norms.round_toward_zero(bound, precision)
        clipped = _clip_magnitude(x, own, _norms.magnitude_bits(own))
    else:
        limit = _norms.narrower_bits(bits, bound.dtype, precision)
        clipped = _clip_magnitude(x, lax.bitcast_convert_type(limit, precision), limit)
    clipped = jnp.where(percentile >= 100, x, clipped)
    return jnp.where(jnp.isnan(bound), jnp.nan, clipped)


def _like(tree: Tree, measured: Any, absent: float) -> Tree:
    """`measured` in the structure of `tree`: where there was no gradient (None), `absent`."""
    return jax.tree.map(lambda _, m: jnp.asarray(absent, jnp.float32) if m is None else m, tree, measured)


def _clip_leaf_value(x: Any, max_value: Scalar) -> jax.Array:
    if isinstance(max_value, float) and math.isinf(max_value):
        return x
    bound = _norms.round_toward_zero(max_value, _norms.real_dtype(x))
    # A threshold that the backend flushes counts as 0: here too, where only its bits are compared.
    clipped = _clip_magnitude(x, bound, jnp.where(bound == 0, 0, _norms.magnitude_bits(bound)))
    if isinstance(max_value, jax.Array):
        clipped = jnp.where(jnp.isnan(max_value), jnp.nan, clipped)
        clipped = jnp.where(max_value == jnp.inf, x, clipped)
    return clipped


def _clip_magnitude(x: Any, bound: jax.Array, limit: jax.Array) -> jax.Array:
    """Limits |x| to `bound`, which has the bits `limit`, both in x's precision. NaN stays NaN."""
    if _norms.is_complex(x):
        return _clip_modulus(x, bound)
    # Compared as integers, which no backend flushes; selected, not computed, so that what stays keeps its bits.
    magnitude, is_negative = _norms.magnitude_bits(x), _norms.sign_bit(x)
    clipped = jnp.where((magnitude > limit) & ~jnp.isnan(x), jnp.where(is_negative, -bound, bound), x)
    # A limit of 0 by itself: LLVM turns a comparison of bits with 0 back into one of floats.
    zero = jnp.zeros((), x.dtype)
    return jnp.where((limit == 0) & ~jnp.isnan(x), jnp.where(is_negative, -zero, zero), clipped)


def _clip_modulus(x: Any, bound: jax.Array) -> jax.Array:
    # Scaled by a power of two first, so that the modulus stays in range.
    up = _norms.power_of_two_for(jnp.maximum(jnp.abs(x.real), jnp.abs(x.imag)))
    scaled = _norms.times(x, up)
    modulus = jnp.abs(scaled)
    phase = _norms.times(scaled, 1 / jnp.where(modulus > 0, modulus, 1))
    clipped = jnp.where(modulus > bound * up, _norms.times(phase, bound), x)
    return jnp.where(jnp.isfinite(x), clipped, jnp.nan)
