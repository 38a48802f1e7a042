"""Small networks, where what a program does around the arithmetic is what counts: a step's time, and its compile time.

    python examples/benchmarks/small.py [--json FILE] [--quick]

Windows of 4 micro-batches with `chain(clip, adam)` inside, against optax.MultiSteps with Optax's clip, both jitted, in
place, in one process, alternating. The networks: a 3-layer MLP, and 1,000 tiny leaves, which are
compiled a dozen times: that takes minutes.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import _harness
import jax
import jax.numpy as jnp
import optax
from _harness import Loop, Row

import shrewjax

ACCUM_STEPS = 4


def _ours() -> optax.GradientTransformation:
    return shrewjax.accumulate(
        optax.chain(shrewjax.clip_by_global_norm(1.0), optax.adam(1e-3)), ACCUM_STEPS
    )


def _theirs() -> optax.GradientTransformation:
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    return _harness.multi_steps(inner, ACCUM_STEPS)


STEPS: dict[str, tuple[Callable[..., Any], optax.GradientTransformation]] = {
    "apply_gradients": (_harness.applied, _ours()),
    "update + apply_updates": (_harness.updated, _ours()),
    "MultiSteps": (_harness.updated, _theirs()),
}


def _networks(quick: bool) -> dict[str, Any]:
    widths = (784, 256, 256, 10)
    return {
        "3-layer MLP": [
            {"w": jnp.ones(layer), "b": jnp.ones(layer[1])} for layer in itertools.pairwise(widths)
        ],
        "1,000 tiny leaves": _harness.transformer(1 if quick else 83, 16, 64, 32),
    }


def step_time(quick: bool) -> Iterator[Row]:
    """A micro-step, on average over whole windows: the optimizer's own loop, and a whole training step."""
    for network, grads in _networks(quick).items():
        loops = {}
        for name, (step, tx) in STEPS.items():
            params = jax.tree.map(jnp.copy, grads)
            loops[name] = Loop(partial(step, tx), (params, tx.init(params)), grads)
        steps = ACCUM_STEPS * (1 if quick else 25)
        sides = {name: partial(loop.run, steps) for name, loop in loops.items()}
        times = _harness.alternate(sides, 3 if quick else 15, steps)
        yield from _rows(f"micro-step, {network}", times)


def compile_time(quick: bool) -> Iterator[Row]:
    """From cleared caches to an executable of such a step."""
    for network, grads in _networks(quick).items():
        seconds: dict[str, list[float]] = {name: [] for name in STEPS}
        for repetition in range(4):
            for name, (step, tx) in STEPS.items():
                state = tx.init(grads)
                jax.clear_caches()
                start = time.perf_counter()
                jax.jit(partial(step, tx), donate_argnums=0).lower((grads, state), grads).compile()
                if repetition > 0:
                    seconds[name].append(time.perf_counter() - start)
        medians = {name: _harness.median(of_side, "s") for name, of_side in seconds.items()}
        yield from _rows(f"trace, lower, compile, {network}", medians)


def _rows(measure: str, figures: dict[str, _harness.Figure]) -> list[Row]:
    return [
        Row(
            f"{measure}, {name} (MultiSteps)",
            figure,
            figures["MultiSteps"],
            "shrewjax/MultiSteps <= 1",
        )
        for name, figure in figures.items()
        if name != "MultiSteps"
    ]


if __name__ == "__main__":
    _harness.main(__doc__, [step_time, compile_time])
