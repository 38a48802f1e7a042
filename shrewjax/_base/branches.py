r"""Branches: one conditional that copies nothing on any backend, and compiles nothing outside of jit.

XLA's conditional passes an operand through in place only in its branch 0. Any other branch copies the operands that it
returns unchanged. `lax.cond` numbers its two branches differently on different backends. On CUDA, an open window then
copied parameters and state on every call. `run_if` therefore uses `lax.switch` and puts the idle branch first (XLA-1,
`tests/devices/test_accelerators.py`). It can be `lax.cond` again when pyproject.toml asks for JAX 0.11.1, whose XLA
returns operands in place from both branches. Tags such as XLA-1 lead to `docs/internals/xla.md`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from shrewjax._base.types import Flag, PyTree


def run_if(flag: Flag, run: Callable[[], PyTree], idle: Callable[[], PyTree]) -> PyTree:
    """Returns `run()` if the flag is set, otherwise `idle()`, which should return existing arrays unchanged."""
    if isinstance(flag, jax.core.Tracer):
        return lax.switch(flag.astype(jnp.int32), [idle, run])
    # Outside of jit, `lax.switch` would compile both branches on every call, because they are new functions each time
    # (XLA-21; tests/promises/test_train_steps.py, "outside of jit").
    return run() if flag else idle()
