"""What the rules share: the head of every `update`, and the counts of updates that a rule for norms keeps."""

from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax

from shrewjax._base.arguments import Shardings
from shrewjax._base.axes import are_whole, as_varying, varying_axes
from shrewjax._base.mesh import placed_like
from shrewjax._base.states import increment_if, require_state_of
from shrewjax._base.trees import require_no_device_rows
from shrewjax._base.types import AnyState, Argument, Function, Metrics, Params, PyTree

Updated: TypeAlias = tuple[PyTree, AnyState]
"""Clipped updates, and the new state."""


def clipping_rule(
    kind: type,
    init_fn: optax.TransformInitFn,
    update_fn: Function,
    *,
    takes_any_state: bool = False,
    sharded_over: Shardings = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns a clipping rule, whose `update` ignores extra arguments. `kind` is the class of its state.

    With `takes_any_state`, any other state counts as a new one. Optax's clips read none, so some callers pass None.
    With `sharded_over=()`, each device has a model of its own, and so a state.
    """

    def update(
        updates: PyTree, state: AnyState, params: Params = None, **extra_args: Argument
    ) -> Updated:
        del extra_args
        require_no_device_rows(updates, params)
        if takes_any_state and not isinstance(state, kind):
            state = init_fn(updates)
        require_state_of(state, kind)
        return update_fn(updates, state, params)

    def init(params: optax.Params) -> AnyState:
        # Inside `jax.vmap` it has no mesh (tests/devices/test_models_on_devices.py, "begins_inside").
        state = placed_like(init_fn(params), params)
        own = (
            {a for x in jax.tree.leaves(params) for a in varying_axes(x)}
            if are_whole(sharded_over)
            else ()
        )
        return jax.tree.map(lambda x: as_varying(x, tuple(own)), state)

    return optax.GradientTransformationExtraArgs(init, update)


def new_counts() -> Metrics:
    """Returns the fields of a new state. Each has a buffer of its own, because states are donated."""
    return {"calls": jnp.zeros((), jnp.int32), "clipped": jnp.zeros((), jnp.int32)}


def counted(state: AnyState, is_above: jax.Array) -> Metrics:
    """Returns the fields after one more update. Counters stop at the largest int32."""
    clipped = increment_if(is_above, state.clipped)
    # `calls` is never below `clipped`. XLA does not know this, and on an H100 computes both in one kernel.
    calls = jnp.maximum(optax.safe_increment(state.calls), clipped)
    return {"calls": calls, "clipped": clipped}


def metrics_of_counts(state: AnyState) -> Metrics:
    rate = _rate(state.calls, state.clipped)
    return {"count": state.calls, "clipped": state.clipped, "clip_rate": rate}


@partial(jax.jit, inline=True)  # outside of jit, constants would be sent to the device
def _rate(calls: jax.Array, clipped: jax.Array) -> jax.Array:
    """Returns the share of clipped updates, float32; NaN before the first update."""
    rate = clipped.astype(jnp.float32) / jnp.maximum(calls, 1).astype(jnp.float32)
    return jnp.where(calls > 0, rate, jnp.nan)
