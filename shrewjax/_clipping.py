"""Clipping to a given threshold: by global norm, by leaf norm, by value.

Leaves that hold no floating or complex numbers, and places without a leaf (`None`, `optax.MaskedNode`), pass
through untouched and are not counted.
"""

import math
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from shrewjax import _checks, _norms
from shrewjax._checks import Scalar
from shrewjax._norms import Factor, Scaled
from shrewjax._reductions import Axes, AxisName, is_counted


def grad_norm(grads: chex.ArrayTree, ord: float | None = None, *, axis_name: AxisName | None = None) -> jax.Array:
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
      axis_name: mapped axes over which the gradients are sharded; only needed inside `jax.shard_map` with
        `check_vma=False` and inside `jax.pmap`. With `check_vma=True` the leaves' types tell.

    Returns:
      float32 scalar; float64 if a leaf is float64 or complex128.

    Raises:
      ValueError: `ord` is traced, below 1 or NaN; a leaf is neither an array nor a number; the leaves' mapped axes
        cannot be known and `axis_name` is missing.

    Example:
      >>> grad_norm({"w": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])})
      Array(5., dtype=float32)
      >>> grad_norm(jnp.full(4, 1e20, jnp.float32))
      Array(2.e+20, dtype=float32)

    The scaled second pass follows the idea of J. L. Blue, "A portable Fortran program to find the Euclidean norm of a
    vector", ACM TOMS 4 (1978).
    """
    return _norms.join(global_norm(grads, _checks.order(ord), _checks.axis_names(axis_name)))


def clip_grad_norm(
    grads: chex.ArrayTree, max_norm: Any, *, ord: float | None = None, axis_name: AxisName | None = None
) -> tuple[chex.ArrayTree, jax.Array]:
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
      axis_name: as in `grad_norm`.

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
        _checks.threshold("max_norm", max_norm), grads, _checks.order(ord), _checks.axis_names(axis_name)
    )
    return clipped, _norms.join(norm)


def clip_grad_value(grads: chex.ArrayTree, max_value: Any) -> chex.ArrayTree:
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
      ValueError: `max_value` is a Python or NumPy number that is negative or NaN, or is no real scalar; a leaf is
        neither an array nor a number.

    Example:
      >>> clip_grad_value(jnp.array([0.5, -3.0, jnp.inf]), 1.0)
      Array([ 0.5, -1. ,  1. ], dtype=float32)

    The name is that of `torch.nn.utils.clip_grad_value_`.
    """
    max_value = _checks.threshold("max_value", max_value)
    _, leaves, treedef = _checks.gradient_leaves(grads)
    return treedef.unflatten([_clip_leaf_value(x, max_value) if is_counted(x) else x for x in leaves])


class ClipByGlobalNormState(NamedTuple):
    """What the last update measured."""

    grad_norm: jax.Array  # float32 (): the norm before clipping
    clip_scale: jax.Array  # float32 (): what the gradients were multiplied by; 1 if not clipped


def clip_by_global_norm(
    max_norm: Any, *, ord: float | None = None, axis_name: AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Clips the norm of all gradients together: `clip_grad_norm` as an Optax transformation.

    .. math:: g \leftarrow g \cdot \min\Big(1, \frac{\text{max\_norm}}{\|g\|}\Big)

    The table of `clip_grad_norm` says what happens at the edges. Chain it before the optimizer; inside `accumulate`
    it sees the window's average, which is what most people want. To schedule the threshold, wrap it in
    `optax.inject_hyperparams`.

    Args:
      max_norm: the threshold, a real scalar >= 0, or a scalar array of any real dtype.
      ord: p of the norm, any Python number >= 1 or inf. `None` means 2.
      axis_name: as in `grad_norm`.

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
    axes = _checks.axis_names(axis_name)

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


class ClipByLeafNormState(NamedTuple):
    """What the last update measured, leaf by leaf: trees like the parameters."""

    grad_norm: chex.ArrayTree  # float32 () each: the leaf's norm before clipping; 0 for leaves that do not count
    clip_scale: chex.ArrayTree  # float32 () each: what the leaf was multiplied by; 1 if not clipped


def clip_by_leaf_norm(
    max_norm: Any, *, ord: float | None = None, axis_name: AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Clips the norm of each leaf on its own.

    .. math:: g_\ell \leftarrow g_\ell \cdot \min\Big(1, \frac{\text{max\_norm}}{\|g_\ell\|}\Big)

    The table of `clip_grad_norm` holds leaf by leaf: a NaN in one leaf leaves the others alone. The direction of
    the whole gradient changes. A leaf that stacks layers counts as one.

    Args:
      max_norm: the threshold of every leaf, a real scalar >= 0, or a scalar array of any real dtype.
      ord: p of the norm, any Python number >= 1 or inf. `None` means 2.
      axis_name: as in `grad_norm`.

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
    axes = _checks.axis_names(axis_name)

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


def global_norm(grads: chex.ArrayTree, ord: float, axes: Axes) -> Scaled:
    """The norm of all gradients together."""
    return _norms.measure([x for x in _checks.gradient_leaves(grads)[1] if is_counted(x)], ord, "global", axes)


def hold_to(grads: chex.ArrayTree, norm: Scaled, limit: Scaled) -> tuple[chex.ArrayTree, Factor]:
    """The gradients, whose norm is given, scaled to the limit if they are above it; and what they were scaled by."""
    _, leaves, treedef = _checks.gradient_leaves(grads)
    factor = _norms.clip_factor(norm, limit)
    return treedef.unflatten([_norms.scale(x, factor) if is_counted(x) else x for x in leaves]), factor


def _clip_to(max_norm: Scalar, grads: chex.ArrayTree, ord: float, axes: Axes) -> tuple[chex.ArrayTree, Scaled, Factor]:
    norm = global_norm(grads, ord, axes)
    clipped, factor = hold_to(grads, norm, _norms.limit(max_norm, norm))
    return clipped, norm, factor


def _like(tree: chex.ArrayTree, measured: chex.ArrayTree, absent: float) -> chex.ArrayTree:
    """`measured` in the structure of `tree`: where there was no gradient (None), `absent`."""
    return jax.tree.map(lambda _, m: jnp.asarray(absent, jnp.float32) if m is None else m, tree, measured)


def _clip_leaf_value(x: Any, max_value: Scalar) -> jax.Array:
    if isinstance(max_value, float) and math.isinf(max_value):
        return x
    clip = _clip_modulus if _norms.is_complex(x) else _clip_magnitude
    clipped = clip(x, _norms.round_toward_zero(max_value, _norms.real_dtype(x)))
    if isinstance(max_value, jax.Array):
        clipped = jnp.where(jnp.isnan(max_value), jnp.asarray(jnp.nan, x.dtype), clipped)
        clipped = jnp.where(max_value == jnp.inf, x, clipped)
    return clipped


def _clip_magnitude(x: Any, bound: jax.Array) -> jax.Array:
    # Compared as integers, which no backend flushes; selected, not computed, so that what stays keeps its bits.
    # A bound of 0 by itself: LLVM turns a comparison of bits with 0 back into one of floats.
    beyond = ((_norms.magnitude_bits(x) > _norms.magnitude_bits(bound)) | (bound == 0)) & ~jnp.isnan(x)
    return jnp.where(beyond, jnp.where(_norms.sign_bit(x), -bound, bound), x)


def _clip_modulus(x: Any, bound: jax.Array) -> jax.Array:
    # Scaled by a power of two first, so that the modulus stays in range.
    up = _norms.power_of_two_for(jnp.maximum(jnp.abs(x.real), jnp.abs(x.imag)))
    scaled = _norms.times(x, up)
    modulus = jnp.abs(scaled)
    phase = _norms.times(scaled, 1 / jnp.where(modulus > 0, modulus, 1))
    clipped = jnp.where(modulus > bound * up, _norms.times(phase, bound), x)
    return jnp.where(jnp.isfinite(x), clipped, jnp.asarray(jnp.nan, x.dtype))
