"""The README's own steps, as they stand there, with 20 million parameters: a window of 8 micro-batches.

    python examples/benchmarks/readme.py [--json FILE] [--quick]

`micro_step` is that of the README's code, and the step with `optax.MultiSteps` that of its first diff. Both are timed
donated and not donated, in one process, alternating. The loss is a dot product, so that its gradient costs nothing and
the rest of the step is all that is timed.
"""

import contextlib
import io
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


def sides() -> dict[str, tuple[Callable[..., Any], Any, int]]:
    """The README's step and the one before its diff: function, optimizer, and how many arguments follow the batch."""
    text = README.read_text()
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec("".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), names)
    names["masked_loss"] = names["loss_fn"] = lambda params, x, *_: jnp.vdot(params["w"], x)
    names["accumulating"] = shrewjax.accumulate(names["tx"], MICRO_BATCHES)

    before = dict(names)
    exec(
        re.sub(r"(?m)^\+.*\n|^[- ]", "", re.findall(r"```diff\n(.*?)```", text, re.DOTALL)[0]),
        before,
    )
    clip_and_adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    before["tx"] = optax.MultiSteps(clip_and_adamw, MICRO_BATCHES)
    return {
        "README": (names["micro_step"].__wrapped__, names["accumulating"], 3),
        "MultiSteps": (before["step"].__wrapped__, before["tx"], 1),
    }


def run(step: Callable[..., Any], carry: list[Any], batch: tuple[Any, ...]) -> None:
    """One window; the carry is parameters and state."""
    for _ in range(MICRO_BATCHES):
        carry[:] = step(*carry, *batch)[:2]
    jax.block_until_ready(carry)


def window(quick: bool) -> list[Row]:
    """The time of a window, donated and not."""
    size = 2_000 if quick else 20_000_000
    x = jax.random.normal(jax.random.key(0), (size,))
    runs: dict[str, Callable[[], None]] = {}
    for name, (step, tx, others) in sides().items():
        batch = (x, jnp.ones(1), jnp.ones(1), False)[: 1 + others]  # x, y, mask, flush
        for donated in ("donated", "not donated"):
            jitted = jax.jit(step, donate_argnums=(0, 1) if donated == "donated" else ())
            params = {"w": jnp.zeros(size)}
            runs[f"{name}, {donated}"] = partial(run, jitted, [params, tx.init(params)], batch)
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
