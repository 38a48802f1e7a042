"""What transformations that wrap another one share: running it, or leaving it alone.

Left alone, the wrapped transformation's state is what it was, and the step changes nothing. Written as updates that is
an array of zeros for every parameter; written as new parameters it costs nothing at all. So a wrapper does not return
updates but a `Result` of them, which `apply_gradients` chooses, and which goes through wrappers inside wrappers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jax import lax

Flag = bool | jax.Array
"""A bool where it is known while tracing."""


class Result(NamedTuple):
    """What a call is to return."""

    of: Callable[[optax.Updates], Any]  # where the wrapped transformation ran: of its updates
    idle: Callable[[optax.Updates], Any]  # where it was left alone: in the place of such updates


class Wrapper(optax.GradientTransformationExtraArgs):
    """A transformation that may leave the one that it wraps alone, with a more general form of `update`."""

    advance: Callable[..., tuple[Any, Any]]
    """As `update`, with a `Result` after `params`."""


def wrapper(
    init_fn: optax.TransformInitFn, advance_fn: Callable[..., tuple[Any, Any]]
) -> optax.GradientTransformationExtraArgs:
    """The transformation that advances so."""

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        return advance_fn(updates, state, params, UPDATES, **extra_args)

    transformation = Wrapper(init_fn, update_fn)
    transformation.advance = advance_fn
    return transformation


def inner_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    """The argument `inner`, checked, as one that takes extra arguments."""
    if not isinstance(inner, optax.GradientTransformation):
        raise ValueError(f"inner must be an optax.GradientTransformation, got {inner!r}")
    return optax.with_extra_args_support(inner)


def zero_updates(like: optax.Updates) -> optax.Updates:
    """What a call returns that changes nothing."""
    # Not `jnp.zeros(shape)`: what is like an update is sharded as it is.
    return jax.tree.map(jnp.zeros_like, like)


UPDATES = Result(of=lambda updates: updates, idle=zero_updates)
"""What `update` returns."""


def new_parameters(params: optax.Params) -> Result:
    """The parameters with the updates applied, or as they are."""
    return Result(of=partial(optax.apply_updates, params), idle=lambda _: params)


def advance(
    tx: optax.GradientTransformation,
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None,
    result: Result,
    /,
    **extra_args: Any,
) -> tuple[Any, Any]:
    """The result of `tx.update`, and the new state."""
    if isinstance(tx, Wrapper):
        return tx.advance(updates, state, params, result, **extra_args)
    new_updates, new_state = optax.with_extra_args_support(tx).update(updates, state, params, **extra_args)
    return result.of(new_updates), new_state


def run_or_idle(runs: Flag, run: Callable[[Result], tuple[Any, Any]], state: Any, result: Result) -> tuple[Any, Any]:
    """The result and the new state that `run` makes, if it `runs`; else the state as it is."""
    updates_like, state_like = jax.eval_shape(partial(run, UPDATES))
    check_unchanged(state_like, state, "inner's update changed its state")
    return _cond(runs, partial(run, result), lambda: (result.idle(updates_like), state))


def check_unchanged(new: Any, old: Any, what: str) -> None:
    """At trace time: structure, shapes and dtypes are the same. Adds no operation to the program."""
    chex.assert_trees_all_equal_structs(new, old, custom_message=f"{what} in structure")
    chex.assert_trees_all_equal_shapes_and_dtypes(new, old, custom_message=f"{what} in shapes or dtypes")


def _cond(flag: Flag, on_true: Callable[[], Any], on_false: Callable[[], Any]) -> Any:
    """`lax.cond`, but a plain branch where the flag is known: outside of jit each call would compile both anew."""
    if isinstance(flag, jax.core.Tracer):
        return lax.cond(flag, on_true, on_false)
    return on_true() if flag else on_false()
