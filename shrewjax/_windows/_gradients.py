"""A micro-batch's gradients: whether they fit the window's sums."""

from collections.abc import Callable
from functools import partial

import jax

from shrewjax._base import trees
from shrewjax._base.axes import newly_varying
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
    require_structure_of(gradient_sum, grads)
    checked = partial(_checked_gradient, remedy_of_shape)
    return jax.tree.map_with_path(checked, gradient_sum, grads)


def require_structure_of(gradient_sum: PyTree, grads: PyTree) -> None:
    """Raises, while tracing, unless gradients have the accumulator's structure. A gradient of None fits every leaf.

    Flax's statistics have a sum of None (`_overwritten`), and there a gradient must be None, too.
    """
    sums = jax.tree.leaves_with_path(gradient_sum, is_leaf=lambda x: x is None)
    without_sum = {path for path, total in sums if total is None}

    # 0 stands for any leaf, because None has no leaf in a structure.
    def filled(path: KeyPath, grad: Leaf) -> Leaf:
        return 0 if grad is None and path not in without_sum else grad

    trees.require_structure(
        jax.tree.map_with_path(filled, grads, is_leaf=lambda x: x is None),
        gradient_sum,
        "the gradients must have the structure of the accumulator",
        ". Pass gradients like the parameters that init got, with None for a leaf without one",
    )


def _checked_gradient(remedy_of_shape: Remedy, path: KeyPath, total: jax.Array, grad: Leaf) -> Leaf:
    if grad is None or grad.dtype == jax.dtypes.float0:
        return None
    name = f"gradient leaf {leaf_name(path)}"
    if is_gradient(grad) != is_gradient(total):
        raise ValueError(f"{name} is {grad.dtype}, but {_remedy_of_kind(total)}")
    if not is_gradient(grad):
        return None
    if grad.shape != total.shape:
        raise AssertionError(
            f"{name} must have the shape of its accumulator, {total.shape}, got {grad.shape}. "
            f"{remedy_of_shape(grad.shape, total.shape)}"
        )
    if floats.is_complex(grad) and not floats.is_complex(total):
        raise ValueError(
            f"{name} is {grad.dtype}, but its accumulator is {total.dtype}. Leave out accumulator_dtype= if its "
            "parameter is complex. Otherwise pass the real part"
        )
    # The sum's type would change, and JAX would raise at the end of a loop or a branch.
    if along := newly_varying(grad, total):
        raise ValueError(
            f"{name} may differ over {along}, but its parameter does not. Pass jax.lax.pmean(grads, {along}). Or pass "
            f"sum_over={along}"
        )
    return grad


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
