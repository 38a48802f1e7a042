"""Clipping to a given threshold, by global norm and by value, as functions and as transformations.

Only floating and complex leaves are measured and clipped. Other leaves, `None` and `optax.MaskedNode` pass through.
"""

import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shrewjax import _arguments, _extended, _floats, _gradients, _norms, _scaling
from shrewjax._arguments import Scalar
from shrewjax._extended import ExtendedFloat
from shrewjax._gradients import Tree, is_gradient
from shrewjax._mesh import Axes, AxisName
from shrewjax._scaling import ClipScale
from shrewjax._states import described, fields
from shrewjax._units import find_units, stacked_layers


def grad_norm(grads: Any, ord: float | None = None, *, sharded_over: AxisName | None = None) -> jax.Array:
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
      sharded_over: mapped axes over which the gradients are sharded. It is only needed inside `jax.shard_map` with
        `check_vma=False` and inside `jax.pmap`, because there the leaves' types do not record it.

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

    Source: the scaled second pass follows the idea of J. L. Blue, "A portable Fortran program to find the Euclidean
    norm of a vector", ACM TOMS 4 (1978).
    """
    return _extended.from_extended(global_norm(grads, _arguments.order(ord), _arguments.sharded_over(sharded_over)))


def clip_grad_norm(
    grads: Tree, max_norm: Any, *, ord: float | None = None, sharded_over: AxisName | None = None
) -> tuple[Tree, jax.Array]:
    r"""Scales all gradients by one number so that their norm is at most `max_norm`, and returns the norm before, too.

    .. math:: g \leftarrow g \cdot \min\Big(1, \frac{\text{max\_norm}}{\|g\|}\Big)

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

    There is no epsilon in the denominator. The clip is differentiable; at a zero norm its derivative is that of the
    identity.

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
    max_norm, ord = _arguments.threshold("max_norm", max_norm), _arguments.order(ord)
    norm = global_norm(grads, ord, _arguments.sharded_over(sharded_over))
    clipped, _ = clip_to_limit(grads, norm, _scaling.as_limit(max_norm, norm))
    return clipped, _extended.from_extended(norm)


def clip_grad_value(grads: Tree, max_value: Any) -> Tree:
    r"""Clips each element to [-max_value, max_value].

    .. math:: g_i \leftarrow \max(-\text{max\_value}, \min(g_i, \text{max\_value}))

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

    Unlike a norm clip, it changes the gradient's direction. It measures nothing, so it costs one read and one write.

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
    max_value = _arguments.threshold("max_value", max_value)
    _, leaves, treedef = _gradients.gradient_leaves(grads)
    return treedef.unflatten([_clip_leaf_value(x, max_value) if is_gradient(x) else x for x in leaves])


@described
class ClipByGlobalNormState(NamedTuple):
    """Measurements of the last update."""

    grad_norm: Annotated[jax.Array, "float32 (): the norm before clipping"]
    clip_scale: Annotated[jax.Array, "float32 (): the number that multiplied the gradients; 1 if not clipped"]
    leaf_norms: Annotated[
        Any, "with leaves=True, a tree like the parameters of norms before clipping, float32 (); otherwise ()"
    ] = ()

    def metrics(self) -> dict[str, Any]:
        """Returns the entries of `shrewjax.metrics`."""
        return fields(self, "grad_norm", "clip_scale") | _of_leaves(self.leaf_norms)


def clip_by_global_norm(
    max_norm: Any, *, ord: float | None = None, leaves: bool = False, sharded_over: AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Clips the norm of all gradients together: `clip_grad_norm` as an Optax transformation.

    .. math:: g \leftarrow g \cdot \min\Big(1, \frac{\text{max\_norm}}{\|g\|}\Big)

    The table of `clip_grad_norm` has the edge cases. Chain it before the optimizer. Inside `accumulate` it clips the
    window's average, as most people want. To schedule the threshold, wrap it in `optax.inject_hyperparams`.

    With `leaves=True` the state also has the norm of each leaf, which the same pass over the gradients computes.
    `metrics` shows each by the leaf's name, and says which leaf has the largest share of the squared norm:

    ======================================  =====================================================================
    gradients                               norms by leaf
    ======================================  =====================================================================
    one leaf                                its norm is `grad_norm`, and its share is 1
    a NaN in a leaf                         NaN for that leaf; `largest_share` is NaN and `largest_leaf` has the NaN
    an infinity and no NaN                  inf for its leaf; k infinite leaves have a share of 1/k each
    a leaf's norm beyond float32            inf, and a share as for an infinity. Beside a NaN, from 2**63 on
    all zero                                0, and `largest_share` is 0
    no leaves                               neither norms by leaf nor `largest_share`
    an element below 2**-63                 may count as 0 in its leaf's norm, unless `grad_norm` is below 2**-30
    complex, sharded, 16-bit leaves         as in `grad_norm`
    other leaves                            0
    ======================================  =====================================================================

    Args:
      max_norm: the threshold, a real scalar >= 0, or a scalar array of any real dtype.
      ord: p of the norm, any Python number >= 1 or inf. `None` means 2.
      leaves: whether the state has the leaves' norms, too; a bool. It requires order 2, and changes no update.
      sharded_over: as in `grad_norm`.

    Returns:
      A transformation with state `ClipByGlobalNormState(grad_norm, clip_scale, leaf_norms)`, measurements of the last
      update (before the first: 0, 1 and 0): float32 scalars, and a tree of them or (). The norms of the leaves have no
      derivative.

    Raises:
      ValueError: `leaves` is no bool, or is set although `ord` is not 2; with `leaves=True`, the updates' tree differs
        from that of the parameters given to `init`; or as in `clip_grad_norm`.

    Example:
      >>> tx = optax.chain(clip_by_global_norm(1.0), optax.sgd(0.1))
      >>> params = {"w": jnp.zeros(2)}
      >>> updates, state = tx.update({"w": jnp.array([3.0, 4.0])}, tx.init(params), params)
      >>> updates["w"].round(6), state[0].grad_norm
      (Array([-0.06, -0.08], dtype=float32), Array(5., dtype=float32))
      >>> tx = clip_by_global_norm(1.0, leaves=True)
      >>> grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
      >>> _, state = tx.update(grads, tx.init(grads))
      >>> state.leaf_norms["b"], state.metrics()["largest_share"].round(6)
      (Array(4., dtype=float32), Array(0.64, dtype=float32))

    Source: R. Pascanu, T. Mikolov, Y. Bengio, 2013, arXiv:1211.5063, Algorithm 1.
    """
    max_norm, ord = _arguments.threshold("max_norm", max_norm), _arguments.order(ord)
    leaves = _arguments.static_flag("leaves", leaves)
    if leaves and ord != 2:
        raise ValueError(
            f"ord must be 2 with leaves=True, because shares are of the squared norm, got {ord}. Leave out ord. Or "
            "leave out leaves"
        )
    axes = _arguments.sharded_over(sharded_over)

    def init_fn(params: optax.Params) -> ClipByGlobalNormState:
        return ClipByGlobalNormState(
            grad_norm=jnp.zeros((), jnp.float32),
            clip_scale=jnp.ones((), jnp.float32),
            leaf_norms=jax.tree.map(lambda _: jnp.zeros((), jnp.float32), params) if leaves else (),
        )

    def update_fn(
        updates: optax.Updates, state: ClipByGlobalNormState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, ClipByGlobalNormState]:
        del params, extra_args
        leaf_norms = state.leaf_norms
        if leaves:
            units = find_units(updates, stacked_layers(None))
            units.numbers_beside(leaf_norms)
            norm, grad_norm, norms = _norms.measure_with_leaves(units.leaves, axes)
            others = jax.tree.map(jnp.zeros_like, leaf_norms)
            leaf_norms = units.with_leaves(others, [norm.astype(jnp.float32) for norm in norms])
        else:
            norm = global_norm(updates, ord, axes)
            grad_norm = _extended.from_extended(norm)
        updates, scale = clip_to_limit(updates, norm, _scaling.as_limit(max_norm, norm))
        return updates, ClipByGlobalNormState(
            grad_norm=grad_norm.astype(jnp.float32), clip_scale=_scaling.applied_scale(scale), leaf_norms=leaf_norms
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def clip_by_value(max_value: Any) -> optax.GradientTransformationExtraArgs:
    r"""Clips each element to [-max_value, max_value]: `clip_grad_value` as an Optax transformation.

    .. math:: g_i \leftarrow \max(-\text{max\_value}, \min(g_i, \text{max\_value}))

    The table of `clip_grad_value` has the edge cases.

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

    Source: the rule is that of `torch.nn.utils.clip_grad_value_` and `optax.clip`.
    """
    max_value = _arguments.threshold("max_value", max_value)
    return optax.with_extra_args_support(optax.stateless(lambda updates, _: clip_grad_value(updates, max_value)))


def global_norm(grads: Any, ord: float, axes: Axes) -> ExtendedFloat:
    """Returns the norm of all gradients together."""
    return _norms.measure([x for x in _gradients.gradient_leaves(grads)[1] if is_gradient(x)], ord, axes)


def clip_to_limit(grads: Tree, norm: ExtendedFloat, limit: ExtendedFloat) -> tuple[Tree, ClipScale]:
    """Clips gradients of this norm to a limit, and returns the scale, too."""
    _, leaves, treedef = _gradients.gradient_leaves(grads)
    scale = _scaling.clip_scale(norm, limit)
    return treedef.unflatten([_scaling.apply_scale(x, scale) if is_gradient(x) else x for x in leaves]), scale


def clip_magnitude(x: Any, bound: jax.Array, limit: jax.Array) -> jax.Array:
    """Clips |x| to `bound`, whose bits are `limit`, both in x's precision. NaN stays NaN."""
    if _floats.is_complex(x):
        return _clip_modulus(x, bound)
    # Compared as integers, and selected instead of computed, because CPU and TPU flush subnormals in float arithmetic
    # (XLA-18). `test_value_clip_never_leaves_the_interval_and_touches_nothing_inside` holds this.
    magnitude, is_negative = _floats.magnitude_bits(x), _floats.sign_bit(x)
    clipped = jnp.where((magnitude > limit) & ~jnp.isnan(x), jnp.where(is_negative, -bound, bound), x)
    # XLA-17: a limit of 0 gets a line of its own, because on CPU LLVM turns a comparison of bits with 0 into one of
    # floats. That lets subnormals pass. The test is the same.
    zero = jnp.zeros((), x.dtype)
    return jnp.where((limit == 0) & ~jnp.isnan(x), jnp.where(is_negative, -zero, zero), clipped)


def _of_leaves(leaf_norms: Any) -> dict[str, Any]:
    """Returns the metrics of norms by leaf. There are none without leaves."""
    by_name = dict(sorted(zip(_gradients.leaf_names(leaf_norms), jax.tree.leaves(leaf_norms), strict=True)))
    if not by_name:
        return {}
    norms = jnp.stack([*by_name.values()])
    index = jnp.argmax(norms, axis=0)  # of the first NaN, if there is one
    largest = jnp.take_along_axis(norms, index[None], axis=0)
    is_largest = norms == largest
    # Relative to the largest, so that no square leaves the range. No 0 / 0 or inf / inf, which `jax_debug_nans` finds.
    others = jnp.where(is_largest, 0, norms) / jnp.where(largest == 0, 1, largest)
    share = 1 / jnp.sum(jnp.where(is_largest, 1, others * others), axis=0)
    return {
        "largest_share": jnp.where(largest[0] == 0, 0, share),
        "largest_leaf": index.astype(jnp.int32),
        **{f"leaf_norm/{name}": norm for name, norm in by_name.items()},
    }


def _clip_leaf_value(x: Any, max_value: Scalar) -> jax.Array:
    if isinstance(max_value, float) and math.isinf(max_value):
        return x
    bound = _floats.round_toward_zero(max_value, _floats.real_dtype(x))
    # A threshold that the backend flushes counts as 0. Without this line its bits would still count: see
    # `test_a_threshold_that_is_flushed_leaves_zeros_alone`.
    clipped = clip_magnitude(x, bound, jnp.where(bound == 0, 0, _floats.magnitude_bits(bound)))
    if isinstance(max_value, jax.Array):
        clipped = jnp.where(jnp.isnan(max_value), jnp.nan, clipped)
        clipped = jnp.where(max_value == jnp.inf, x, clipped)
    return clipped


def _clip_modulus(x: Any, bound: jax.Array) -> jax.Array:
    # Scaled by a power of two first, because the modulus may leave the range where the parts do not.
    up = _floats.power_of_two_for(jnp.maximum(jnp.abs(x.real), jnp.abs(x.imag)))
    scaled = _floats.mul_real(x, up)
    modulus = jnp.abs(scaled)
    phase = _floats.mul_real(scaled, 1 / jnp.where(modulus > 0, modulus, 1))
    clipped = jnp.where(modulus > bound * up, _floats.mul_real(phase, bound), x)
    return jnp.where(jnp.isfinite(x), clipped, jnp.nan)
