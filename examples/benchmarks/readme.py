"""The README's step for micro-batches one by one, with 20 million parameters: a window of 8.

    python examples/benchmarks/readme.py [--json FILE] [--quick]

Both sides of the README's diff are timed, donated and not donated, in one process, alternating. The loss is a dot
product, so that its gradient costs nothing and the rest of the step is all that is timed.
"""

import functools
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import _harness
import jax
import jax.numpy as jnp
import optax
from _harness import Row

import shrewjax

README = Path(__file__).parent.parent.parent / "README.md"
MICRO_BATCHES = 8


def sides() -> dict[str, tuple[Callable[..., Any], Any]]:
    """The steps after the README's diff and before it, each with its optimizer."""
    diff = re.findall(r"```diff\n(.*?)```", README.read_text(), re.DOTALL)[1]
    found = {}
    for name, left_out in (("README", "-"), ("MultiSteps", "+")):
        names: dict[str, Any] = {"functools": functools, "jax": jax, "optax": optax}
        names |= {"shrewjax": shrewjax, "loss_fn": lambda params, x, _: jnp.vdot(params["w"], x)}
        lines = (line[1:] for line in diff.splitlines() if not line.startswith(left_out))
        exec("\n".join(lines).replace(", 4)", f", {MICRO_BATCHES})"), names)
        found[name] = names["step"].__wrapped__, names["tx"]
    return found


def run(step: Callable[..., Any], carry: list[Any], batch: tuple[Any, ...]) -> None:
    """One window; the carry is parameters and state."""
    for _ in range(MICRO_BATCHES):
        carry[:] = step(*carry, *batch)
    jax.block_until_ready(carry)


def window(quick: bool) -> list[Row]:
    """The time of a window, donated and not."""
    size = 2_000 if quick else 20_000_000
    x = jax.random.normal(jax.random.key(0), (size,))
    runs: dict[str, Callable[[], None]] = {}
    for name, (step, tx) in sides().items():
        for donated in ("donated", "not donated"):
            jitted = jax.jit(step, donate_argnums=(0, 1) if donated == "donated" else ())
            params = {"w": jnp.zeros(size)}
            runs[f"{name}, {donated}"] = partial(
                run, jitted, [params, tx.init(params)], (x, jnp.ones(1))
            )
    times = _harness.alternate(runs, 3 if quick else 9)
    ours, theirs = times["README, donated"], times["MultiSteps, not donated"]
    return [
        Row(
            "a window of 8, the README's step (before its diff)",
            ours,
            theirs,
            "other/shrewjax >= 9",
        ),
        Row("the same (before its diff, donated)", ours, times["MultiSteps, donated"]),
        Row("the same, not donated (before its diff)", times["README, not donated"], theirs),
        Row("the same (the README's step, not donated)", ours, times["README, not donated"]),
    ]


if __name__ == "__main__":
    _harness.main(__doc__, [window])
