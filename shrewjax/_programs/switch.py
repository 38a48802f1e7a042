"""The switch that turns all passes off: with `SHREWJAX_DISABLE_PASSES=1` in the environment, no program is rebuilt.

A pass reads and rebuilds what JAX traced, and a new JAX may break one. Without the passes a loss runs as JAX traced it.
Numbers are the same, except where XLA itself loses sums (`scatters`), and a step takes more memory and network.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH = "SHREWJAX_DISABLE_PASSES"
_MEANINGS = dict.fromkeys(("1", "true", "yes", "on"), True)
_MEANINGS |= dict.fromkeys(("", "0", "false", "no", "off"), False)


def are_passes_disabled() -> bool:
    """Returns whether the environment disables the passes. It is read whenever a function is traced."""
    value = os.environ.get(SWITCH, "")
    if value.lower() not in _MEANINGS:
        raise ValueError(f"the environment variable {SWITCH} must be 1 or 0, got {value!r}")
    return _MEANINGS[value.lower()]


@contextmanager
def naming_the_switch() -> Iterator[None]:
    """Adds to an error from inside a pass the way to go on without it."""
    try:
        yield
    except Exception as error:
        error.add_note(
            "This error comes from a pass of shrewjax over the program that JAX traced. To go on without the passes, "
            f"set the environment variable {SWITCH}=1. A step may then hold more memory. Numbers stay "
            "the same, except that XLA of JAX 0.10.1 to 0.11.2 may lose sums of scatters on several GPUs."
        )
        raise
