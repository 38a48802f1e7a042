"""States: named tuples of arrays, each field with a description beside it, which `help` shows.

A state that measured something says so by a method `metrics`, which `shrewjax.metrics` calls.
"""

from typing import Any, TypeVar, get_type_hints

import jax
import jax.numpy as jnp

State = TypeVar("State")
"""A state that comes back as the type that went in."""


def described(state: type[State]) -> type[State]:
    """The state, whose fields are `Annotated` with their descriptions: these become docstrings, types stay types."""
    for name, hint in get_type_hints(state, include_extras=True).items():
        (getattr(state, name).__doc__,) = hint.__metadata__
    state.__annotations__ = state.__new__.__annotations__ = get_type_hints(state)
    return state


def fields(state: Any, *names: str) -> dict[str, Any]:
    """Returns these fields of a state, by name."""
    return {name: getattr(state, name) for name in names}


def largest(tree: Any) -> jax.Array:
    """Returns the largest of all numbers in a tree, NaN if there is one, 0 if there is nothing. Shape (), float32."""
    leaves = [jnp.ravel(jnp.asarray(x, jnp.float32)) for x in jax.tree.leaves(tree)]
    return jnp.max(jnp.concatenate(leaves), initial=0.0) if leaves else jnp.zeros((), jnp.float32)
