"""A loop around convolutions, unrolled on a CPU, where XLA runs a convolution in a loop 15 to 37 times slower (XLA-36).

What it saves: time on a CPU, from 14.1 s to 0.77 s for six convolutions of 64 images. Numbers do not depend on it. It
can be deleted when XLA:CPU runs such a loop as fast as one convolution, which no version does so far.

Each turn waits for the one before it (`lax.optimization_barrier`). Otherwise XLA runs all turns at once, and holds
their memory. Before jaxlib 0.12 it does so all the same, so there the loop stays. Other backends keep it, too.
"""

import jax
import jax.numpy as jnp
from jax import lax

from shrewjax._base.types import Function, PyTree
from shrewjax._programs.jaxprs import is_jit_disabled
from shrewjax._programs.switch import are_passes_disabled

_HOLDS_TURNS_APART = jax.version.__version_info__ >= (0, 12)
# A ResNet-18 compiles 3 times as long as in a loop with 8, and 12 times with 32.
_MOST_TURNS = 16


def scan_in_order(turn: Function, start: PyTree, turns: int, *, has_convolutions: bool) -> PyTree:
    """Returns `lax.scan` of `turn` over the numbers of the turns."""
    looped = lambda state: lax.scan(turn, state, jnp.arange(turns, dtype=jnp.int32))  # noqa: E731
    is_slow = has_convolutions and _HOLDS_TURNS_APART and turns <= _MOST_TURNS
    if not is_slow or are_passes_disabled() or is_jit_disabled():
        return looped(start)
    turn_once = jax.jit(turn)  # traced once

    def unrolled(state: PyTree) -> PyTree:
        made = []
        for i in range(turns):
            state, number = lax.optimization_barrier((state, jnp.int32(i)))
            state, result = turn_once(state, number)
            made.append(result)
        return state, jax.tree.map(lambda *x: jnp.stack(x), *made)

    return lax.platform_dependent(start, cpu=unrolled, default=looped)
