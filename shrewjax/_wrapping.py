"""What transformations that wrap another one share: running it, or leaving it alone."""

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax

Flag = bool | jax.Array
"""A bool where it is known while tracing."""


def inner_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    """The argument `inner`, checked, as one that takes extra arguments."""
    if not isinstance(inner, optax.GradientTransformation):
        raise ValueError(f"inner must be an optax.GradientTransformation, got {inner!r}")
    return optax.with_extra_args_support(inner)


def zero_updates(like: optax.Updates) -> optax.Updates:
    """What a call returns that changes nothing."""
    # Not `jnp.zeros(shape)`: what is like an update is sharded as it is.
    return jax.tree.map(jnp.zeros_like, like)


def run_or_idle(
    runs: Flag,
    run_inner: Callable[[], tuple[optax.Updates, Any]],
    inner_state: Any,
    *,
    output: Callable[[optax.Updates], Any] = lambda updates: updates,
    idle: Callable[[optax.Updates], Any] = zero_updates,
) -> tuple[Any, Any]:
    """Inner's updates and new state if it `runs`; else its state untouched, and what `idle` makes of such updates."""
    updates_like, state_like = jax.eval_shape(run_inner)
    check_unchanged(state_like, inner_state, "inner's update changed its state")

    def run() -> tuple[Any, Any]:
        updates, new_state = run_inner()
        return output(updates), new_state

    return _cond(runs, run, lambda: (idle(updates_like), inner_state))


def check_unchanged(new: Any, old: Any, what: str) -> None:
    """At trace time: structure, shapes and dtypes are the same. Adds no operation to the program."""
    chex.assert_trees_all_equal_structs(new, old, custom_message=f"{what} in structure")
    chex.assert_trees_all_equal_shapes_and_dtypes(new, old, custom_message=f"{what} in shapes or dtypes")


def _cond(flag: Flag, on_true: Callable[[], Any], on_false: Callable[[], Any]) -> Any:
    """`lax.cond`, but a plain branch where the flag is known: outside of jit each call would compile both anew."""
    if isinstance(flag, jax.core.Tracer):
        return lax.cond(flag, on_true, on_false)
    return on_true() if flag else on_false()
