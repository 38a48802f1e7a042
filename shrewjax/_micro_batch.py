"""The gradients of a micro-batch: checked against the accumulator, tested for NaN and infinity, and measured.

If each device sums its own gradients over the mapped axes of `sum_over`, they have per-device rows (`_per_device`).
"""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from shrewjax import _floats, _gradients, _norms
from shrewjax._extended import ExtendedFloat
from shrewjax._gradients import is_gradient
from shrewjax._mesh import Axes, is_mapped, is_replicated_over, newly_varying
from shrewjax._reductions import all_finite, any_device
from shrewjax._wrapping import Flag


def checked_gradients(grads: chex.ArrayTree, gradient_sum: chex.ArrayTree, axes: Axes) -> chex.ArrayTree:
    """Returns the gradients as arrays, with rows if the accumulator has them. Raises if a leaf does not fit it."""
    what = "accumulator"
    grads = _gradients.gradient_arrays(grads)
    if axes and is_mapped(axes):

        def row(path: _gradients.KeyPath, grad: Any) -> Any:
            if is_gradient(grad) and is_replicated_over(grad, axes):
                raise ValueError(
                    f"gradient leaf {_gradients.leaf_name(path)} is already reduced over sum_over={axes!r}. "
                    f"To keep gradients local, compute own = jax.lax.pcast(params, {axes!r}, to='varying') outside "
                    "the loss and differentiate with respect to own. To accumulate reduced gradients, leave out "
                    "sum_over"
                )
            return grad[None] if is_gradient(grad) else grad

        grads = jax.tree.map_with_path(row, grads)
    elif axes:
        what = f"accumulator, which has a row for each device along {', '.join(map(repr, axes))}"
    _gradients.same_leaves(grads, gradient_sum, what=what)

    def check(path: _gradients.KeyPath, total: jax.Array, grad: Any) -> None:
        if grad is None or grad.dtype == jax.dtypes.float0 or not (is_gradient(grad) or is_gradient(total)):
            return
        name = f"gradient leaf {_gradients.leaf_name(path)}"
        if not is_gradient(grad):
            raise ValueError(
                f"{name} is {grad.dtype}, but its parameter is floating, with an accumulator of {total.dtype}. "
                "Convert the gradient to the parameter's dtype. Or pass None in its place if there is no gradient"
            )
        if not is_gradient(total):
            raise ValueError(
                f"{name} is {grad.dtype}, but its parameter is not floating and has no accumulator. Pass None in "
                "its place. Or pass float0, as jax.grad(..., allow_int=True) returns it"
            )
        if _floats.is_complex(grad) and not _floats.is_complex(total):
            raise ValueError(
                f"{name} is {grad.dtype}, but its accumulator is {total.dtype} and would lose the imaginary part. "
                "Pass the real part of the gradient. Or call init with a complex parameter"
            )
        along = newly_varying(grad, total)
        if along:
            raise ValueError(
                f"{name} may differ between devices along {along}, but its parameter does not, because the "
                f"gradients are not reduced. Reduce them first, for example with jax.lax.pmean(grads, {along}). Or "
                f"pass sum_over={along} to sum them when the window closes"
            )

    jax.tree.map_with_path(check, gradient_sum, grads)
    return grads


def is_nonfinite_micro_batch(grads: chex.ArrayTree, has_weight: Flag, axes: Axes) -> jax.Array:
    """Returns whether a micro-batch of nonzero weight has a non-finite gradient on any device."""
    leaves = [g for g in jax.tree.leaves(grads) if is_gradient(g)]
    if not axes:
        return has_weight & ~all_finite(leaves, axes)
    is_nonfinite = jnp.any(has_weight & ~all_finite(leaves, [()] * len(leaves), unit_dims=(0,)))
    return any_device([is_nonfinite], axes)[0]


def norm_of_gradients(grads: chex.ArrayTree, axes: Axes) -> ExtendedFloat:
    """Returns the norm of the gradients: a single one, or one per row."""
    leaves = [g for g in jax.tree.leaves(grads) if is_gradient(g)]
    if not axes:
        return _norms.measure_local(leaves, ())
    if is_mapped(axes):
        norm = _norms.measure_local([g[0] for g in leaves], axes)
        return ExtendedFloat(norm.mantissa[None], norm.exponent[None])
    return jax.vmap(lambda rows: _norms.measure(rows, 2, ()))(leaves)


def without_rows(grads: chex.ArrayTree, axes: Axes) -> chex.ArrayTree:
    """Returns the gradients, or the shapes and dtypes of one row if they have per-device rows."""
    if not axes or is_mapped(axes):
        return grads
    return jax.tree.map(lambda g: jax.ShapeDtypeStruct(g.shape[1:], g.dtype), grads)
