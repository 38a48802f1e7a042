"""Counts of the updates that a rule for norms has seen and clipped, which its state keeps in two fields."""

from functools import partial
from typing import Annotated

import jax
import jax.numpy as jnp
import optax

from shrewjax._base.states import fields, increment_if
from shrewjax._base.types import AnyState, Metrics

Count = Annotated[jax.Array, "int32 (): number of updates"]
Clipped = Annotated[
    jax.Array, "int32 (): number of updates in which a finite norm was above its threshold"
]


def new_counts() -> Metrics:
    """Returns the fields of a new state. Each has a buffer of its own, because states are donated."""
    return {"count": jnp.zeros((), jnp.int32), "clipped": jnp.zeros((), jnp.int32)}


def counted(state: AnyState, is_clipped: jax.Array) -> Metrics:
    """Returns the fields after one more update. Counters stop at the largest int32."""
    clipped = increment_if(is_clipped, state.clipped)
    # No count is below `clipped`. XLA does not know this, and on an H100 computes both in one kernel.
    return {"count": jnp.maximum(optax.safe_increment(state.count), clipped), "clipped": clipped}


def metrics_of_counts(state: AnyState) -> Metrics:
    return fields(state, "count", "clipped") | {"clip_rate": _rate(state.count, state.clipped)}


@partial(jax.jit, inline=True)  # outside of jit, constants would be sent to the device
def _rate(count: jax.Array, clipped: jax.Array) -> jax.Array:
    """Returns the share of clipped updates, float32; NaN before the first update."""
    rate = clipped.astype(jnp.float32) / jnp.maximum(count, 1).astype(jnp.float32)
    return jnp.where(count > 0, rate, jnp.nan)
