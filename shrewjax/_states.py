"""States: named tuples of arrays, each field with a description beside it, which `help` shows."""

from typing import TypeVar, get_type_hints

State = TypeVar("State")
"""A state that comes back as the type that went in."""


def described(state: type[State]) -> type[State]:
    """The state, whose fields are `Annotated` with their descriptions: these become docstrings, types stay types."""
    for name, hint in get_type_hints(state, include_extras=True).items():
        (getattr(state, name).__doc__,) = hint.__metadata__
    state.__annotations__ = state.__new__.__annotations__ = get_type_hints(state)
    return state
