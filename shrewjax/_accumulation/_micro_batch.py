"""A micro-batch's gradients: whether they fit the window, contain a NaN or an infinity, and what norm they have.

With `sum_over`, gradients and sums have per-device rows (`_rows`).
"""

import jax
import jax.numpy as jnp

from shrewjax._accumulation import _rows
from shrewjax._base import trees
from shrewjax._base.mesh import is_mapped, newly_varying
from shrewjax._base.trees import is_gradient, leaf_name
from shrewjax._base.types import ArrayTree, Axes, Flag, KeyPath, Leaf, PyTree
from shrewjax._numerics import floats
from shrewjax._numerics.floats import ExtendedFloat
from shrewjax._numerics.norms import measure, measure_local
from shrewjax._numerics.reductions import all_finite, any_device


def checked_gradients(grads: ArrayTree, gradient_sum: ArrayTree, axes: Axes) -> ArrayTree:
    """Returns the gradients, inside `shard_map` with a device's row, and None for each leaf that adds nothing.

    Raises if a leaf does not fit its accumulator. A parameter that is not floating has an int32 scalar in the place of
    its accumulator. The loss and the averaged aux of `value_and_grad` come here, too. Gradients that a scan has added
    itself come as None.
    """
    grads = _rows.of_device(grads, axes)
    same_leaves(grads, gradient_sum, axes)
    return jax.tree.map_with_path(_checked_gradient, gradient_sum, grads)


def _checked_gradient(path: KeyPath, total: jax.Array, grad: Leaf) -> Leaf:
    if grad is None or grad.dtype == jax.dtypes.float0:
        return None
    is_added = is_gradient(grad)
    name = f"gradient leaf {leaf_name(path)}"
    if is_added != is_gradient(total):
        raise ValueError(f"{name} is {grad.dtype}, but {_remedy_of_kind(total)}")
    if is_added and floats.is_complex(grad) and not floats.is_complex(total):
        raise ValueError(
            f"{name} is {grad.dtype}, but its accumulator is {total.dtype} and would lose the imaginary part. Pass the "
            "real part of the gradient. Or call init with a complex parameter"
        )
    # A sum that is the same on every device cannot take a gradient that differs, because its type would change and JAX
    # would raise at the end of a loop or a branch. With sum_over, sums differ between devices, too.
    along = is_added and newly_varying(grad, total)
    if along:
        raise ValueError(
            f"{name} may differ between devices along {along}, but its parameter does not, because the gradients are "
            f"not reduced. Reduce them first, for example with jax.lax.pmean(grads, {along}). Or pass sum_over={along} "
            "to sum them when the window closes"
        )
    return grad if is_added else None


def _remedy_of_kind(total: jax.Array) -> str:
    if is_gradient(total):
        return (
            f"its parameter is floating, with an accumulator of {total.dtype}. Convert the gradient to the parameter's "
            "dtype. Or pass None in its place if there is no gradient"
        )
    return (
        "its parameter is not floating and has no accumulator. Pass None in its place. Or pass float0, as "
        "jax.grad(..., allow_int=True) returns it"
    )


def is_nonfinite_micro_batch(grads: ArrayTree, has_weight: Flag, axes: Axes) -> jax.Array:
    leaves = jax.tree.leaves(grads)
    if not axes:
        return has_weight & ~all_finite(leaves, axes)
    is_nonfinite = jnp.any(has_weight & ~all_finite(leaves, [()] * len(leaves), unit_dims=(0,)))
    return any_device([is_nonfinite], axes)[0]


def norm_of_gradients(grads: ArrayTree, axes: Axes) -> ExtendedFloat:
    leaves = jax.tree.leaves(grads)
    if not axes:
        return measure_local(leaves, ())
    if is_mapped(axes):
        norm = measure_local([g[0] for g in leaves], axes)
        return ExtendedFloat(norm.mantissa[None], norm.exponent[None])
    return jax.vmap(lambda rows: measure(rows, 2, ()))(leaves)


def same_leaves(grads: PyTree, gradient_sum: PyTree, axes: Axes) -> None:
    """Raises, while tracing, unless gradients have the accumulator's structure and shapes.

    A gradient of None fits every leaf, and so does any shape if one of the two leaves is no gradient.
    """
    sums = jax.tree.leaves_with_path(gradient_sum, is_leaf=lambda x: x is None)
    without_sum = {path for path, total in sums if total is None}

    def filled(path: KeyPath, grad: Leaf) -> Leaf:
        return 0 if grad is None and path not in without_sum else grad

    given = jax.tree.map_with_path(filled, grads, is_leaf=lambda x: x is None)
    trees.require_structure(
        given,
        gradient_sum,
        "the gradients must have the structure of the accumulator",
        ". Pass gradients like the parameters that init got, with None for a leaf without one",
    )

    def check(path: KeyPath, total: Leaf, grad: Leaf) -> None:
        if (
            hasattr(grad, "dtype")
            and grad.shape != total.shape
            and is_gradient(grad)
            and is_gradient(total)
        ):
            raise AssertionError(
                f"gradient leaf {leaf_name(path)} must have the shape of its accumulator, {total.shape}, got "
                f"{grad.shape}. {_remedy_of_shape(grad.shape, total.shape, axes)}"
            )

    jax.tree.map_with_path(check, gradient_sum, given)


def _remedy_of_shape(given: tuple[int, ...], expected: tuple[int, ...], axes: Axes) -> str:
    if axes and not is_mapped(axes):
        return (
            f"With sum_over={axes!r}, gradients outside of jax.shard_map have a row for each device. Call the step "
            f"inside jax.shard_map over {', '.join(map(repr, axes))}. Or, if jax.jit reduces them, leave out sum_over"
        )
    if axes and given[1:] == expected[1:]:
        return (
            "The state came with the rows of all devices. Pass the state to jax.shard_map with "
            "in_specs=shrewjax.state_specs(opt_state), and return it with the same out_specs"
        )
    return "Pass gradients of the parameters that init got. Or call init with the parameters of these gradients"
