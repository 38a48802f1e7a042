"""States: named tuples of arrays, and the few helpers that several states share.

`described` turns the description beside each field into the docstring that `help` shows. A state that measured
something returns it from a method `metrics`, which `shrewjax.metrics` calls.
"""

from typing import Any, TypeVar, get_type_hints

import jax
import jax.numpy as jnp
import optax

State = TypeVar("State")
"""A state that is returned as the type that was passed in."""


def described(state: type[State]) -> type[State]:
    """Decorates a state class: moves each field's `Annotated` description into the field's docstring."""
    for name, hint in get_type_hints(state, include_extras=True).items():
        (getattr(state, name).__doc__,) = hint.__metadata__
    state.__annotations__ = state.__new__.__annotations__ = get_type_hints(state)
    return state


def fields(state: Any, *names: str) -> dict[str, Any]:
    """Returns the named fields of a state as a dictionary."""
    return {name: getattr(state, name) for name in names}


def increment_if(flag: bool | jax.Array, count: jax.Array) -> jax.Array:
    """Returns a counter plus 1 if the flag is set. A counter stops at its dtype's largest value."""
    return jnp.where(flag, optax.safe_increment(count), count)


def largest(tree: Any) -> jax.Array:
    """Returns the largest number in a tree: NaN if any is NaN, at least 0, and 0 for no numbers. Shape (), float32."""
    leaves = [jnp.ravel(jnp.asarray(x, jnp.float32)) for x in jax.tree.leaves(tree)]
    return jnp.max(jnp.concatenate(leaves), initial=0.0) if leaves else jnp.zeros((), jnp.float32)
