"""Branches: one form that is right on every backend, and outside of jit.

XLA's conditional can hand an operand through in place only in its branch 0; any other branch copies what it returns
unchanged. `lax.cond` numbers its two branches differently on different backends. On CUDA, an open accumulation window
then copied parameters and optimizer state on every call, and under FSDP returned them replicated. So `run_if` puts
the idle branch first, with `lax.switch`. `tests/test_accelerators.py` holds this for CUDA and TPU.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def run_if(flag: bool | jax.Array, run: Callable[[], Any], idle: Callable[[], Any]) -> Any:
    """Returns `run()` if the flag is set, else `idle()`, which should return what it has, unchanged."""
    if isinstance(flag, jax.core.Tracer):
        return lax.switch(flag.astype(jnp.int32), [idle, run])
    # Outside of jit, `lax.switch` would compile both branches on every call, because they are new functions each time.
    return run() if flag else idle()
