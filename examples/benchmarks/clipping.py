"""Clipping against Optax: time and memory of a training step, error of the norm, compile time.

    python examples/benchmarks/clipping.py [--json FILE] [--quick]

Both sides run in one process, alternating. The model is a 6-layer GPT-2 with 58.7 million float32 parameters in 76
leaves.
"""

import itertools
import math
import time
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

MAX_NORM = 1.0
CLIPS = {
    "shrewjax": shrewjax.clip_by_global_norm(MAX_NORM),
    "Optax": optax.clip_by_global_norm(MAX_NORM),
}


def training_step(quick: bool) -> list[Row]:
    """Clip, AdamW and the parameters' update in one donated program, with gradients that are clipped."""
    grads = _harness.gpt2(quick, seed=1)
    loops = {}
    for name, clip in CLIPS.items():
        tx = optax.chain(clip, optax.adamw(1e-3))
        params = _harness.gpt2(quick)
        loops[name] = Loop(partial(_harness.updated, tx), (params, tx.init(params)), grads)
    steps = 3
    times = _harness.alternate(
        {k: partial(loop.run, steps) for k, loop in loops.items()}, 3 if quick else 15, steps
    )
    memory = {k: _harness.temporary_share(loop.compiled, grads) for k, loop in loops.items()}
    return [
        Row(
            "clip + adamw + apply_updates",
            times["shrewjax"],
            times["Optax"],
            "Optax/shrewjax >= 1.6",
        ),
        Row("its temporary memory", memory["shrewjax"], memory["Optax"], "shrewjax < 0.05"),
    ]


def norm_error(quick: bool) -> list[Row]:
    """The worst relative error of every public norm, of one leaf, against float64 of the same elements."""
    size = 10_000 if quick else 10_000_000
    rows = []
    for dtype in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)):
        ours: tuple[float, str] = (0.0, "")
        other = 0.0
        programs = {order: _norms(order) for order in (1, 2, 3, math.inf)}
        for distribution, values in _distributions(size, dtype):
            leaf, exact = jnp.array(values), np.abs(values.astype(np.float64))
            for order, norms in programs.items():
                reference = _exact_norm(exact, order)
                for name, norm in norms.items():
                    error = abs(float(norm({"w": leaf})) - reference) / reference
                    error = math.inf if math.isnan(error) else error
                    if name == "Optax":
                        other = max(other, error)
                    else:
                        ours = max(ours, (error, f"{name}, ord {order}, {distribution}"))
        measure = f"norm error, {dtype.name}, {size:,} elements (worst: {ours[1]})"
        rows.append(Row(measure, Figure(ours[0]), Figure(other), "shrewjax < 1e-6"))
    return rows


def _distributions(size: int, dtype: np.dtype[Any]) -> list[tuple[str, np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(0)
    largest = float(jnp.finfo(dtype).max)
    return [
        ("normal", rng.standard_normal(size).astype(dtype)),
        ("constant", np.full(size, 0.1, dtype)),
        ("heavy tail", np.clip(rng.standard_cauchy(size), -largest, largest).astype(dtype)),
    ]


def _exact_norm(magnitudes: np.ndarray[Any, Any], order: float) -> float:
    return float(
        magnitudes.max() if order == math.inf else np.sum(magnitudes**order) ** (1 / order)
    )


def _norms(order: float) -> dict[str, Callable[[Any], jax.Array]]:
    def by_transformation(tx: optax.GradientTransformation, grads: Any) -> tuple[Any, Any]:
        return tx.update(grads, tx.init(grads))

    measure = jax.jit(partial(shrewjax.grad_norm, ord=order))
    clip = jax.jit(partial(shrewjax.clip_grad_norm, max_norm=MAX_NORM, ord=order))
    by_global = jax.jit(
        partial(by_transformation, shrewjax.clip_by_global_norm(MAX_NORM, ord=order))
    )
    by_leaf = jax.jit(partial(by_transformation, shrewjax.clip_by_leaf_norm(MAX_NORM, ord=order)))
    norms: dict[str, Callable[[Any], jax.Array]] = {
        "grad_norm": measure,
        "clip_grad_norm": lambda grads: clip(grads)[1],
        "clip_by_global_norm": lambda grads: by_global(grads)[1].grad_norm,
        "clip_by_leaf_norm": lambda grads: by_leaf(grads)[1].grad_norm["w"],
    }
    return norms if order == 3 else norms | {"Optax": jax.jit(partial(optax.tree.norm, ord=order))}


def compile_time(quick: bool) -> list[Row]:
    """From cleared caches to an executable, for the clip alone of 83 narrow layers: 1,000 leaves."""
    grads = _harness.transformer(1 if quick else 83, 16, 64, 32)
    phases: dict[str, dict[str, list[float]]] = {
        k: {"all": [], "lower": [], "compile": []} for k in CLIPS
    }
    for repetition in range(3 if quick else 6):
        for name, clip in CLIPS.items():
            jax.clear_caches()
            state = clip.init(grads)
            start = time.perf_counter()
            lowered = jax.jit(clip.update).lower(grads, state)
            middle = time.perf_counter()
            lowered.compile()
            end = time.perf_counter()
            if repetition > 0:
                phases[name]["all"].append(end - start)
                phases[name]["lower"].append(middle - start)
                phases[name]["compile"].append(end - middle)
    ours, other = ({k: _harness.median(v, "s") for k, v in phases[name].items()} for name in CLIPS)
    return [
        Row(
            "clip of 1,000 leaves: trace, lower, compile",
            ours["all"],
            other["all"],
            "shrewjax/Optax <= 1.3",
        ),
        Row("of this, trace and lower", ours["lower"], other["lower"]),
        Row("of this, compile", ours["compile"], other["compile"]),
    ]


def small_trees(quick: bool) -> list[Row]:
    """The clip alone where the number of leaves counts and their size does not."""
    widths = (784, 256, 256, 10)
    trees = {
        "a 3-layer MLP": [
            {"w": jnp.ones(layer), "b": jnp.ones(layer[1])} for layer in itertools.pairwise(widths)
        ],
        "1,000 tiny leaves": _harness.transformer(1 if quick else 83, 16, 64, 32),
    }
    rows = []
    for name, grads in trees.items():
        steps = 3 if quick else 30
        sides = {
            k: partial(_clip_alone, clip, jax.jit(clip.update), grads, steps)
            for k, clip in CLIPS.items()
        }
        times = _harness.alternate(sides, 3 if quick else 20, steps)
        rows.append(Row(f"clip alone, {name}", times["shrewjax"], times["Optax"]))
    return rows


def _clip_alone(
    clip: optax.GradientTransformation, update: Callable[..., Any], grads: Any, steps: int
) -> None:
    state = clip.init(grads)
    for _ in range(steps):
        clipped, state = update(grads, state)
    jax.block_until_ready((clipped, state))


if __name__ == "__main__":
    _harness.main(__doc__, [training_step, norm_error, compile_time, small_trees])
