"""A micro-batch's gradients: whether they fit the window's sums."""

from collections.abc import Callable

import jax

from shrewjax._base import trees
from shrewjax._base.trees import is_gradient, leaf_name
from shrewjax._base.types import ArrayTree, KeyPath, Leaf, PyTree
from shrewjax._numerics import floats

Remedy = Callable[[tuple[int, ...], tuple[int, ...]], str]
"""The remedy for a gradient of a wrong shape, from its shape and that of its accumulator."""


def checked_gradients(
    grads: ArrayTree, gradient_sum: ArrayTree, remedy_of_shape: Remedy
) -> ArrayTree:
    """Returns the gradients, with None for each leaf that adds nothing.

    Raises if a leaf does not fit its accumulator. A parameter that is not floating has an int32 scalar in the place of
    its accumulator. The loss and the averaged aux of `accumulated_value_and_grad` come here, too. Gradients that a scan
    has added itself come as None.
    """
    same_leaves(grads, gradient_sum, remedy_of_shape)
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
            f"{name} is {grad.dtype}, but its accumulator is {total.dtype}. Leave out accumulator_dtype= if its "
            "parameter is complex. Otherwise pass the real part"
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


def same_leaves(grads: PyTree, gradient_sum: PyTree, remedy_of_shape: Remedy) -> None:
    """Raises, while tracing, unless gradients have the accumulator's structure and shapes.

    A gradient of None fits every leaf, and so does any shape if one of the two leaves is no gradient. Flax's statistics
    have a sum of None (`_overwritten`), and there a gradient must be None, too.
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
                f"{grad.shape}. {remedy_of_shape(grad.shape, total.shape)}"
            )

    jax.tree.map_with_path(check, gradient_sum, given)
