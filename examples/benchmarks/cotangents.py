"""The cost of `clip_cotangent` in a transformer's backward pass: time and memory with it, and without.

    python examples/benchmarks/cotangents.py [--json FILE] [--quick]

A block of width 512 and 2,048 tokens, float32; what flows back is clipped token by token in two places.
"""

from functools import partial

import _harness
import jax
import jax.numpy as jnp
import numpy as np
from _harness import Figure, Row

import shrewjax


def transformer_block(quick: bool) -> list[Row]:
    """Forward and backward, in turn: where no token is clipped, and where all are."""
    kernels, x = _harness.block_shapes(*((2, 8, 64) if quick else (8, 256, 512)))
    rng = np.random.default_rng(0)
    arrays = jax.tree.map(
        lambda s: jnp.array(rng.standard_normal(s.shape, np.float32) / s.shape[-1] ** 0.5), kernels
    )
    inputs = (arrays, *(jnp.array(rng.standard_normal(x.shape, np.float32)) for _ in range(2)))
    clips = {
        "without": _harness.unclipped,
        "no token is clipped": partial(shrewjax.clip_cotangent, max_norm=1e6),
        "all tokens are": partial(shrewjax.clip_cotangent, max_norm=1e-3),
    }
    programs = {
        k: jax.jit(partial(_harness.block_gradient, clip)).lower(*inputs).compile()
        for k, clip in clips.items()
    }
    runs = {name: partial(_harness.finish, program, *inputs) for name, program in programs.items()}
    times = _harness.alternate(runs, 3 if quick else 30)
    held = {
        k: Figure(p.memory_analysis().temp_size_in_bytes / inputs[1].nbytes, "cotangents")
        for k, p in programs.items()
    }
    other = times.pop("without")
    rows = [
        Row(f"a block's gradient with two clip_cotangent (without): {k}", t, other)
        for k, t in times.items()
    ]
    return [*rows, Row("its temporary memory (without)", held["all tokens are"], held["without"])]


if __name__ == "__main__":
    _harness.main(__doc__, [transformer_block])
