"""Accumulation against optax.MultiSteps: time and memory of a window and of a micro-step, error of the average.

    python examples/benchmarks/accumulation.py [--json FILE] [--quick]

All sides run in one process, alternating: windows of 8 micro-batches, with `chain(clip, adamw)` inside. The model is a
6-layer GPT-2 with 58.7 million float32 parameters in 76 leaves.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import _harness
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from _harness import Figure, Loop, Row

import shrewjax

MICRO_BATCHES = 8
MODES = ("propagate", "drop_micro_batch", "drop_window", "extend_window")
VARIANTS: Any = {mode: {"nonfinite": mode} for mode in MODES} | {
    "noise_decay": {"noise_decay": 0.99}
}


def _ours() -> optax.GradientTransformation:
    return optax.chain(shrewjax.clip_by_global_norm(1.0), optax.adamw(1e-3))


class HostDriven:
    """A window as two programs: one that adds, and one that takes the average and runs the optimizer."""

    def __init__(self, params: Any, grads: Any) -> None:
        window, inner = shrewjax.GradAccumulator(MICRO_BATCHES), _ours()
        self._adding = Loop(window.add, window.init(params), grads)
        self._closed = (params, inner.init(params))
        close = jax.jit(partial(_harness.close, window, inner), donate_argnums=0)
        self._close = close.lower((*self._closed, self._adding.carry)).compile()
        self.programs = {"add": self._adding.compiled, "close": self._close}

    def run(self) -> None:
        """One window."""
        self._adding.run(MICRO_BATCHES)
        *self._closed, self._adding.carry = self._close((*self._closed, self._adding.carry))
        jax.block_until_ready(self._closed)


def window(quick: bool) -> list[Row]:
    """Eight micro-batches, the last one with the optimizer."""
    grads = _harness.gpt2(quick, seed=1)

    def loop(step: Callable[..., Any], tx: optax.GradientTransformation) -> Loop:
        params = _harness.gpt2(quick)
        return Loop(partial(step, tx), (params, tx.init(params)), grads)

    theirs = _harness.multi_steps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), MICRO_BATCHES
    )
    loops = {
        "apply_gradients": loop(_harness.applied, shrewjax.accumulate(_ours(), MICRO_BATCHES)),
        "update + apply_updates": loop(
            _harness.updated, shrewjax.accumulate(_ours(), MICRO_BATCHES)
        ),
        "MultiSteps": loop(_harness.updated, theirs),
    }
    host_driven = HostDriven(_harness.gpt2(quick), grads)
    sides: dict[str, Callable[[], None]] = {
        k: partial(loop.run, MICRO_BATCHES) for k, loop in loops.items()
    }
    times = _harness.alternate(sides | {"host-driven": host_driven.run}, 3 if quick else 9)
    memory = {k: _harness.temporary_share(loop.compiled, grads) for k, loop in loops.items()}
    memory |= {
        f"host-driven, {k}": _harness.temporary_share(p, grads)
        for k, p in host_driven.programs.items()
    }

    speed_bars = {"apply_gradients": 9, "update + apply_updates": 2.5, "host-driven": None}
    rows = [
        Row(
            f"window, {k} (MultiSteps)",
            times[k],
            times["MultiSteps"],
            f"MultiSteps/shrewjax >= {bar}" if bar else None,
        )
        for k, bar in speed_bars.items()
    ]
    memory_bars = {"apply_gradients": 0.05, "update + apply_updates": 1.0}
    for name, figure in memory.items():
        if name != "MultiSteps":
            bar = f"shrewjax <= {memory_bars[name]}" if name in memory_bars else None
            rows.append(
                Row(f"temporary memory, {name} (MultiSteps)", figure, memory["MultiSteps"], bar)
            )
    return rows


def micro_step(quick: bool) -> list[Row]:
    """A micro-batch that does not close the window, against `sum + gradients` in place; in blocks of a window."""
    grads = _harness.gpt2(quick, seed=1)
    rows = []
    for variant, options in VARIANTS.items():
        loops = {"floor": Loop(partial(jax.tree.map, jnp.add), _harness.gpt2(quick), grads)}
        tx = shrewjax.accumulate(_ours(), 2**20, **options)
        params = _harness.gpt2(quick)
        loops["apply_gradients"] = Loop(
            partial(_harness.applied, tx), (params, tx.init(params)), grads
        )
        accumulator = shrewjax.GradAccumulator(2**20, **options)
        loops["GradAccumulator.add"] = Loop(accumulator.add, accumulator.init(grads), grads)
        sides = {k: partial(loop.run, MICRO_BATCHES) for k, loop in loops.items()}
        times = _harness.alternate(sides, 3 if quick else 25, MICRO_BATCHES)
        bar = f"shrewjax/floor <= {1.15 if variant == 'propagate' else 1.6}"
        for name in ("apply_gradients", "GradAccumulator.add"):
            rows.append(
                Row(
                    f"micro-step, {name}, {variant} (floor: sum + gradients)",
                    times[name],
                    times["floor"],
                    bar,
                )
            )
    return rows


def executions(quick: bool) -> list[Row]:
    """How often the wrapped optimizer runs in 8 micro-steps with windows of 4."""
    del quick

    def count(
        accumulate: Callable[[optax.GradientTransformation, int], optax.GradientTransformation],
    ) -> Figure:
        runs: list[None] = []
        sgd = optax.sgd(0.1)

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            jax.debug.callback(lambda: runs.append(None))
            return sgd.update(updates, state, params)

        tx = accumulate(optax.GradientTransformation(sgd.init, update), 4)
        Loop(partial(_harness.updated, tx), (jnp.zeros(3), tx.init(jnp.zeros(3))), jnp.ones(3)).run(
            8
        )
        jax.effects_barrier()
        return Figure(len(runs))

    ours, other = count(shrewjax.accumulate), count(_harness.multi_steps)
    return [
        Row(
            "runs of inner, 8 micro-steps in windows of 4 (MultiSteps)",
            ours,
            other,
            "shrewjax == 2",
        )
    ]


def average_error(quick: bool) -> list[Row]:
    """The average of 512 micro-batches' bfloat16 gradients in float32, against float64."""
    micro_batches, size = 512, 1_000 if quick else 100_000
    rng = np.random.default_rng(0)
    # MultiSteps holds the average of an open window, and casts what it emits: its window is longer, and is read open.
    accumulator, theirs = (
        shrewjax.GradAccumulator(micro_batches),
        _harness.multi_steps(optax.identity(), micro_batches + 1),
    )
    add, update = (
        jax.jit(accumulator.add, donate_argnums=0),
        jax.jit(theirs.update, donate_argnums=1),
    )
    params, exact = jnp.zeros(size), np.zeros(size)
    opened, state = accumulator.init(params), theirs.init(params)
    for _ in range(micro_batches):
        grads = rng.standard_normal(size, np.float32).astype(ml_dtypes.bfloat16)
        exact += grads.astype(np.float64)
        opened = add(opened, grads)
        _, state = update(grads, state, params)
    exact /= micro_batches

    def error(average: Any) -> Figure:
        return Figure(
            float(np.linalg.norm(np.asarray(average, np.float64) - exact) / np.linalg.norm(exact))
        )

    measure = "L2 error of the average, 512 bfloat16 gradients, float32 sum (MultiSteps)"
    return [
        Row(measure, error(accumulator.take(opened)[0]), error(state.acc_grads), "shrewjax < 1e-6")
    ]


if __name__ == "__main__":
    _harness.main(__doc__, [window, micro_step, executions, average_error])
