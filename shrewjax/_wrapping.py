"""Running a wrapped transformation, or skipping it.

A wrapper may skip a step; the parameters and the wrapped transformation's state then stay as they are. Expressed as
updates, "unchanged" means to write zeros for every parameter. Expressed as new parameters, it costs nothing. So a
wrapper's `update` function has a second form, the attribute `update_or_apply`: it returns updates, or the new
parameters if `apply` is set.

Wrappers may stand inside one another. Each only decides whether the step `runs`, from small numbers, and hands the
decision on; the innermost transformation, which is no wrapper, runs in one branch or is skipped. There is no branch
within a branch, because on CUDA XLA copies parameters and state where the inner one hands them through
(`tests/test_accelerators.py`). The gradients are handed on as a function that makes them, because what enters a
branch as an array is written out, also where the branch is not taken.

The second form belongs to the function, not to the transformation, because a transformation is a pytree of functions:
libraries take it apart and rebuild it. If they replace the function too, `update` alone is left, and gives the same
results.
"""

from collections.abc import Callable
from typing import Any, cast

import chex
import jax
import jax.numpy as jnp
import optax

from shrewjax._branches import run_if
from shrewjax._gradients import KeyPath, leaf_name
from shrewjax._mesh import newly_varying

Flag = bool | jax.Array
"""A bool where it is known while tracing."""


Gradients = Callable[[], optax.Updates]
"""Makes the gradients, where they are needed."""


UpdateOrApply = Callable[..., tuple[Any, Any]]
"""`(gradients, state, params, *, apply, runs, **extra_args) -> (updates, or new parameters; new state)`."""


def wrapper(update_fn: Callable[..., Any], update_or_apply: UpdateOrApply) -> optax.TransformUpdateExtraArgsFn:
    """Returns a wrapper's `update` function, which has both forms."""
    cast(Any, update_fn).update_or_apply = update_or_apply
    return update_fn


def inner_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    """Returns the argument `inner`, checked, as a transformation that takes extra arguments."""
    if not isinstance(inner, optax.GradientTransformation):
        raise ValueError(f"inner must be an optax.GradientTransformation, got {inner!r}")
    inner = optax.with_extra_args_support(inner)
    return inner._replace(init=lambda params: _without_numbers(inner.init(params)))


def _without_numbers(state: Any) -> Any:
    """Returns the state with arrays for Python numbers, whose dtypes no step changes. Under jit JAX converts them."""

    def fixed(x: Any) -> Any:
        return jnp.array(x, jnp.asarray(x).dtype) if isinstance(x, bool | int | float | complex) else x

    return jax.tree.map(fixed, state)


def update_or_apply(
    tx: optax.GradientTransformation,
    gradients: Gradients,
    state: Any,
    params: optax.Params | None,
    /,
    *,
    apply: bool,
    runs: Flag,
    **extra_args: Any,
) -> tuple[Any, Any]:
    """Returns the updates of any transformation, or the new parameters if `apply` is set; and the new state.

    If the step does not run: zero updates, or the parameters; and the state as it is.
    """
    of_wrapper = getattr(tx.update, "update_or_apply", None)
    if of_wrapper is not None:
        return of_wrapper(gradients, state, params, apply=apply, runs=runs, **extra_args)

    def run() -> tuple[Any, Any]:
        updates, new_state = optax.with_extra_args_support(tx).update(gradients(), state, params, **extra_args)
        return _applied(params, updates) if apply else updates, _without_numbers(new_state)

    return run_or_skip(runs, run, state, params, apply=apply)


def _applied(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """As `optax.apply_updates`, but parameters to which nothing can be added stay: keys, and where there is float0."""

    def add(param: Any, update: Any) -> Any:
        dtype: Any = getattr(update, "dtype", jnp.float32)
        is_nothing = dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.prng_key)
        return param if is_nothing else optax.apply_updates(param, update)

    return jax.tree.map(add, params, updates, is_leaf=lambda x: x is None)


def run_or_skip(
    runs: Flag, run: Callable[[], tuple[Any, Any]], state: Any, params: optax.Params | None, *, apply: bool
) -> tuple[Any, Any]:
    """Returns what `run()` does, or, if it is not to run, zero updates (the parameters if `apply`) and the state."""
    ran = run() if runs is True else jax.eval_shape(run)
    check_unchanged(ran[1], state, "inner's update changed its state")
    if runs is True:
        return ran
    _check_devices(ran[1], state, "inner's state after a step")
    if apply:
        _check_devices(ran[0], params, "the new parameters")

    def skip() -> tuple[Any, Any]:
        # Zeros like an array, not of a shape, because these are sharded as updates are.
        return params if apply else optax.tree.zeros_like(ran[0]), state

    return run_if(runs, run, skip)


def _check_devices(new: Any, old: Any, what: str) -> None:
    """Raises, while tracing, if a leaf may differ between devices after the step and does not before it."""

    def check(path: KeyPath, new: Any, old: Any) -> None:
        along = newly_varying(new, old)
        if along:
            raise ValueError(
                f"leaf {leaf_name(path)} of {what} may differ between devices along {along}, but before the step it "
                f"does not: the gradients are not reduced. Reduce them first, by jax.lax.pmean(grads, {along}) for "
                "instance. Or, if they are shards, pass parameters and a state that are sharded likewise"
            )

    jax.tree.map_with_path(check, new, old)


def decide_if(runs: Flag, decide: Callable[[], tuple[jax.Array, Any]], state: Any) -> tuple[Flag, Any]:
    """Returns what `decide()` does: a wrapper's own decision and numbers. If the step does not run: False, `state`."""
    if runs is True:
        return decide()
    return run_if(runs, decide, lambda: (jnp.zeros((), bool), state))


def check_unchanged(new: Any, old: Any, what: str) -> None:
    """Raises, while tracing, unless structure, shapes and dtypes are the same. Adds no operation to the program."""
    chex.assert_trees_all_equal_structs(new, old, custom_message=f"{what} in structure")
    chex.assert_trees_all_equal_shapes_and_dtypes(new, old, custom_message=f"{what} in shapes or dtypes")
