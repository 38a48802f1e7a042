r"""Clipping inside the backward pass, where gradients blow up: each slice of the cotangent of a value.

`jax.custom_vjp` would refuse forward mode, and JAX transposes the tangents of a `jax.custom_jvp`, which would not clip.
So the clip is a primitive. It is linear and its own derivative, and its transpose clips.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from shrewjax._base import arguments, trees
from shrewjax._base.axes import (
    UnitDims,
    as_varying,
    slice_axes,
    varying_axes,
)
from shrewjax._base.trees import is_gradient
from shrewjax._base.types import (
    Argument,
    AxisName,
    AxisNames,
    KeyPath,
    Leaf,
    MeshAxes,
    Number,
    Scalar,
    Tree,
)
from shrewjax._numerics import scaling
from shrewjax._numerics.norms import measure_slices
from shrewjax._numerics.vectors import shape_of_units


def clip_cotangent(
    x: Tree,
    max_norm: Number,
    *,
    axis: Argument = -1,
    ord: float | None = None,
    counter: Argument = None,
    sharded_over: AxisName | None = None,
) -> Tree:
    r"""Returns `x`, and scales each slice of its cotangent to a norm of at most `max_norm` in the backward pass.

    .. math:: y = x, \qquad
              \bar x_s = \bar y_s \cdot \min\Big(1, \frac{\mathrm{max\_norm}}{\|\bar y_s\|}\Big)
              \;\text{ for each slice } s \text{ along } axis

    Use it on activations of recurrent, deep or long-context models. The sum of many clipped slices may still be large,
    so keep a `clip_by_global_norm` in the optimizer.

    The table of `clip_grad_norm` applies to each slice, so a NaN in one slice does not change the others.

    Values, and derivatives in forward mode (`jax.jvp`, `jax.jacfwd`), are those without the clip, to the last bit. The
    clipped gradient can be differentiated itself. `jax.jvp` of `jax.grad` is its derivative. `jax.grad` of `jax.grad`
    also clips in the outer backward pass. The first derivative with respect to `max_norm` is 0.

    The backward pass reads each cotangent once more, and writes it again only if a slice is clipped. In a mean loss
    over one of K micro-batches, the clip is K times as tight. For the large batch's clip, sum the loss, with
    `reduction="sum_over_weights"`. Or pass `max_norm * B / len(x)`, where x is the micro-batch.

    Args:
      x: an array, or a pytree whose leaves are clipped one by one. Integer, boolean and float0 leaves, keys and `None`
        are returned as they are.
      max_norm: the threshold, as in `clip_grad_norm`.
      axis: the axes of a slice, an int or a tuple of ints. There is one slice for each position along the other axes.
        `None` means that a leaf is a single slice. Or a function of a leaf's name (such as "dense/kernel") and the
        leaf.
      ord: p of the norm, as in `grad_norm`. For p other than 1, 2 and inf, the cotangent is read once more.
      counter: a float32 zero, which does not change the result. Its cotangent is the number of slices that were clipped
        or became NaN. It may also be an array that broadcasts to the slices (the leaf's shape without `axis`). Its
        elements then count apart.
      sharded_over: inside `jax.shard_map` and `jax.pmap`, the mapped axes along which devices hold parts of the same
        slices. Pass `()` if each device holds its slices whole.

    Returns:
      `x`. Each leaf keeps its dtype, and its cotangent has the same.

    Raises:
      ValueError: an argument is not as described; an axis is out of range for a leaf; a leaf differs between devices
        and `sharded_over` is missing; or `max_norm` differs between devices that share a slice.

    Example:
      >>> def loss(x):
      ...     return jnp.sum(jnp.array([[3.0, 4.0], [0.3, 0.4]]) * clip_cotangent(x, 1.0))
      >>> jax.grad(loss)(jnp.zeros((2, 2))).round(6)
      Array([[0.6, 0.8],
             [0.3, 0.4]], dtype=float32)

      In a recurrence, the clipped steps are counted by the cotangent of `counter`:

      >>> def last_state(h, zero):
      ...     grow = lambda _, h: 3 * clip_cotangent(h, 10.0, counter=zero)
      ...     return jax.lax.fori_loop(0, 8, grow, h)[0]
      >>> # 3 and 9 pass, 27 and five times 30 are clipped.
      >>> jax.grad(last_state, argnums=(0, 1))(jnp.ones(1), jnp.zeros(()))
      (Array([10.], dtype=float32), Array(6., dtype=float32))

    Source: A. Graves, "Generating sequences with recurrent neural networks", 2013, arXiv:1308.0850, section 2.1, there
    element by element.
    """
    max_norm, ord = arguments.threshold("max_norm", max_norm), arguments.order(ord)
    axis = arguments.axes("axis", axis)
    sharded_over = arguments.axis_names("sharded_over", sharded_over)
    traced_limit = [max_norm] if isinstance(max_norm, jax.Array) else []
    static_limit = math.inf if traced_limit else max_norm

    def guarded(path: KeyPath, leaf: Leaf) -> Leaf:
        if not is_gradient(leaf):
            return leaf
        name = trees.leaf_name(path)
        of_slice = arguments.axes_of_leaf("axis", axis, path, leaf)
        if of_slice is None:
            of_slice = tuple(range(leaf.ndim))
        dims = tuple(a for a in range(leaf.ndim) if a not in of_slice)
        divided = slice_axes(name, leaf, sharded_over)
        own_slices = varying_axes(leaf) - set(divided)
        for limit in traced_limit:
            _check_limit(limit, name, own_slices)
        zeros = _zeros(counter, name, shape_of_units(leaf, dims))
        zeros = as_varying(zeros, tuple(own_slices))
        slices = _Slices(dims, divided, ord, static_limit)
        return _guard.bind(leaf, zeros, *traced_limit, slices=slices)

    paths, leaves, treedef = trees.gradient_leaves(x)
    return treedef.unflatten(list(map(guarded, paths, leaves)))


def _check_limit(limit: jax.Array, name: str, own_slices: MeshAxes) -> None:
    """Raises if devices that share a slice may have different thresholds. They have own slices along `own_slices`."""
    along = varying_axes(limit) - own_slices
    if along:
        raise ValueError(
            f"max_norm may differ over {', '.join(sorted(map(repr, along)))}, but these share the "
            f"slices of leaf {name}. Reduce it by jax.lax.pmin"
        )


def _zeros(counter: Argument, name: str, shape: tuple[int, ...]) -> jax.Array:
    """Returns the counter's value for each slice of a leaf. JAX then sums the cotangents of slices that share one."""
    if counter is None:
        return jnp.zeros((), jnp.float32)
    counter = jnp.asarray(counter)
    if counter.dtype not in (jnp.float32, jnp.float64):
        raise ValueError(f"counter must be a float32 zero, got {counter.dtype}. Pass jnp.zeros(())")
    try:
        return jnp.broadcast_to(counter, shape)
    except ValueError as error:
        raise ValueError(
            f"counter of shape {counter.shape} must broadcast to {shape}, the slices of leaf {name}. Pass jnp.zeros(())"
        ) from error


class _Slices(NamedTuple):
    """The slices of a leaf, and how each is measured: the static parameters of the primitive."""

    dims: UnitDims  # the axes that number the slices
    divided: AxisNames  # mapped axes along which devices hold parts of the same slices
    ord: float
    limit: Scalar  # infinite if the limit is an operand

    def clip(self, cotangent: jax.Array, *traced_limit: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the clipped cotangent, and whether each slice was clipped."""
        (value,) = traced_limit or (self.limit,)
        # Under `jax.vmap`, each example may have its own, whose axes are then the first axes of the slices.
        if isinstance(value, jax.Array) and value.ndim > 0:
            value = lax.expand_dims(value, range(value.ndim, len(self.dims)))
        limit = scaling.as_limit(value, cotangent)
        norm = measure_slices(cotangent, self.ord, self.dims, self.divided, limit)
        clipped, applies = scaling.clip_slices(cotangent, norm, limit, self.dims)
        # With a limit of 0, `applies` is set for a slice of zeros, too, which does not count as clipped.
        return clipped, applies & (norm.mantissa != 0)


# Operands: the value; zeros, one for each slice, whose cotangents count; and the threshold, unless it is static.
_guard = Primitive("clip_cotangent")


def _value(x: Leaf, *_others: Leaf, **_slices: _Slices) -> Leaf:
    """Returns the first operand: the value, and the type, of the clip."""
    return x


_guard.def_impl(_value)
_guard.def_abstract_eval(_value)
mlir.register_lowering(_guard, mlir.lower_fun(_value, multiple_results=False))


def _jvp(primals: Sequence[Leaf], tangents: Sequence[Leaf], slices: _Slices) -> tuple[Leaf, Leaf]:
    """Returns the clip of the value and of its tangent, so that transposing the tangent clips."""
    _, _, *limit = primals  # its tangent is dropped: the value does not depend on it
    of_tangent = [*map(ad.instantiate_zeros, tangents[:2]), *limit]
    return _guard.bind(*primals, slices=slices), _guard.bind(*of_tangent, slices=slices)


def _transpose(cotangent: Leaf, x: Leaf, zeros: Leaf, *limit: Leaf, slices: _Slices) -> list[Leaf]:
    """Returns the clipped cotangent for the value, and for each zero, 1 if its slice was clipped."""
    if type(cotangent) is ad.Zero:
        cotangent = ad.instantiate_zeros(cotangent)
    clipped, is_clipped = slices.clip(cotangent, *limit)
    of_x = clipped if ad.is_undefined_primal(x) else None
    of_zeros = None
    if ad.is_undefined_primal(zeros):
        # Devices that share a slice may have a counter each.
        counts = is_clipped.astype(zeros.aval.dtype)
        of_counter = zeros.aval.sharding
        if jax.typeof(counts).sharding.spec != of_counter.spec:
            # On an Explicit mesh the counts are sharded as the slices are, and JAX demands the type of the zeros
            # (tests/clipping/test_cotangents.py, "explicit_mesh").
            counts = jax.sharding.reshard(counts, of_counter)
        of_zeros = as_varying(counts, tuple(varying_axes(zeros.aval)))
    return [of_x, of_zeros, *[None] * len(limit)]


def _batch(
    operands: Sequence[Leaf], dims: Sequence[int | None], *, slices: _Slices
) -> tuple[Leaf, int]:
    """Returns the clip of a batch, whose examples have their own slices, and the batch's axis."""
    with_dims = list(zip(operands, dims, strict=True))
    (size,) = {x.shape[d] for x, d in with_dims if d is not None}
    in_front = [batching.bdim_at_front(x, d, size) for x, d in with_dims]
    of_examples = slices._replace(dims=(0, *(a + 1 for a in slices.dims)))
    return _guard.bind(*in_front, slices=of_examples), 0


ad.primitive_jvps[_guard] = _jvp
ad.primitive_transposes[_guard] = _transpose
batching.primitive_batchers[_guard] = _batch
