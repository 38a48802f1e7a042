r"""Branches: one conditional that copies nothing on any backend, and compiles nothing outside of jit.

XLA's conditional passes an operand through in place only in its branch 0. Any other branch copies the operands that it
returns unchanged. `lax.cond` numbers its two branches differently on different backends. On CUDA, an open window then
copied parameters and state on every call. `run_if` therefore uses `lax.switch` and puts the idle branch first (XLA-1,
`tests/devices/test_accelerators.py`). It can be `lax.cond` again when pyproject.toml asks for JAX 0.11.1, whose XLA
returns operands in place from both branches. Tags such as XLA-1 lead to `docs/internals/xla.md`.

`jax.vmap` of a conditional selects, operand by operand. JAX cannot, if an operand is sharded over an Explicit axis, or
the flag alone varies over devices in `shard_map`. There, one conditional runs for all if any flag is set, and its run
branch selects results (`_where_own`). Without `jax.vmap` that selection is by a constant, which XLA removes.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from shrewjax._base.axes import varying_axes
from shrewjax._base.mesh import explicit_axes
from shrewjax._base.types import Flag, PyTree


def run_if(flag: Flag, run: Callable[[], PyTree], idle: Callable[[], PyTree]) -> PyTree:
    """Returns `run()` if the flag is set, otherwise `idle()`, which should return existing arrays unchanged."""
    if not isinstance(flag, jax.core.Tracer):
        # Outside of jit, `lax.switch` would compile both branches on every call, because they are new functions each
        # time (XLA-21; tests/promises/test_train_steps.py, "outside of jit").
        return run() if flag else idle()
    if explicit_axes(flag) or varying_axes(flag):
        return lax.switch(
            _any(flag).astype(jnp.int32), [idle, partial(_where_own, flag, run, idle)]
        )
    return lax.switch(flag.astype(jnp.int32), [idle, run])


def _where_own(flag: jax.Array, run: Callable[[], PyTree], idle: Callable[[], PyTree]) -> PyTree:
    return jax.tree.map(partial(jnp.where, _own(flag)), run(), idle())


@custom_vmap
def _any(flag: jax.Array) -> jax.Array:
    """Returns the flag. In `jax.vmap`, it is whether any of the mapped flags is set."""
    return flag


@_any.def_vmap
def _any_of(_: int, __: list[bool], flags: jax.Array) -> tuple[jax.Array, bool]:
    return _any(jnp.any(flags)), False


@custom_vmap
def _own(flag: jax.Array) -> jax.Array:
    """Returns True. In `jax.vmap`, it is the flag."""
    # In `shard_map`, `ones_like` would vary over devices as the flag does, and so would a replicated result.
    return jnp.ones((), bool) if varying_axes(flag) else jnp.ones_like(flag)


@_own.def_vmap
def _own_of(_: int, __: list[bool], flags: jax.Array) -> tuple[jax.Array, bool]:
    return flags, True
