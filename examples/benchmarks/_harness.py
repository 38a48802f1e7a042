"""Shared by the benchmarks: the model's tree, steps in place, alternating timings, and the table."""

import argparse
import json
import math
import operator
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import shrewjax

_COMPARISONS = {"<": operator.lt, "<=": operator.le, "==": operator.eq, ">=": operator.ge}


class Figure(NamedTuple):
    """A measured number; for a median with its quartiles."""

    value: float
    unit: str = ""
    quartiles: tuple[float, ...] = ()

    def __str__(self) -> str:
        value, *quartiles = (
            f"{x:.4g}" if x < 1000 else f"{x:.0f}" for x in (self.value, *self.quartiles)
        )
        return " ".join(
            [value, *([f"({' to '.join(quartiles)})"] if quartiles else []), self.unit]
        ).strip()


class Row(NamedTuple):
    """One comparison. A bar is `shrewjax < 2` or, with shrewjax as A or B, `A/B >= 2`."""

    measure: str
    ours: Figure
    other: Figure | None = None
    bar: str | None = None

    def judge(self) -> tuple[float | None, bool | None]:
        """The ratio, and whether the bar is met."""
        subject, comparison, limit = (self.bar or "other/shrewjax >= 0").split()
        ours, other = self.ours.value, math.nan if self.other is None else self.other.value
        above, below = (ours, other) if subject.startswith("shrewjax/") else (other, ours)
        ratio = above / below if below else math.inf
        met = _COMPARISONS[comparison](ours if subject == "shrewjax" else ratio, float(limit))
        return ratio if self.other else None, met if self.bar else None


class Loop:
    """A compiled step `carry, *inputs -> carry` that runs in place: the carry is donated, and the old one forgotten."""

    def __init__(self, step: Callable[..., Any], carry: Any, *inputs: Any) -> None:
        self.compiled = jax.jit(step, donate_argnums=0).lower(carry, *inputs).compile()
        self.carry, self._inputs = carry, inputs

    def run(self, steps: int) -> None:
        """So many steps, to their end."""
        for _ in range(steps):
            self.carry = self.compiled(self.carry, *self._inputs)
        jax.block_until_ready(self.carry)


def applied(
    tx: optax.GradientTransformation, carry: tuple[Any, Any], grads: Any
) -> tuple[Any, Any]:
    """A training step by `shrewjax.apply_gradients`; the carry is parameters and state."""
    params, state = carry
    return shrewjax.apply_gradients(tx, grads, state, params)


def updated(
    tx: optax.GradientTransformation, carry: tuple[Any, Any], grads: Any
) -> tuple[Any, Any]:
    """The same by `update` and `optax.apply_updates`."""
    params, state = carry
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def close(
    window: shrewjax.GradAccumulator, tx: optax.GradientTransformation, carry: tuple[Any, Any, Any]
) -> tuple[Any, Any, Any]:
    """The program that closes a host-driven window; the carry is parameters and both states."""
    params, opt_state, opened = carry
    average, closed, emptied = window.take(opened)

    def idle() -> tuple[Any, Any]:
        return params, opt_state

    def apply() -> tuple[Any, Any]:
        updates, new_state = tx.update(average, opt_state, params)
        return optax.apply_updates(params, updates), new_state

    return *jax.lax.switch(closed.astype(int), [idle, apply]), emptied


def multi_steps(
    inner: optax.GradientTransformation, micro_batches: int
) -> optax.GradientTransformation:
    """Optax's accumulation."""
    return optax.MultiSteps(inner, micro_batches).gradient_transformation()


def transformer_shapes(layers: int, width: int, vocabulary: int, positions: int) -> dict[str, Any]:
    """GPT-2's parameters, float32: 4 leaves and 12 a layer."""
    norm = {"scale": (width,), "bias": (width,)}
    dense = {
        "qkv": (width, 3 * width),
        "proj": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    layer = {"norm_1": norm, "norm_2": norm} | {k: {"w": s, "b": s[1:]} for k, s in dense.items()}
    shapes = {"tokens": (vocabulary, width), "positions": (positions, width), "norm": norm}
    shapes |= {f"layer_{i}": layer for i in range(layers)}
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, np.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def transformer(
    layers: int, width: int, vocabulary: int, positions: int, seed: int = 0
) -> dict[str, Any]:
    """GPT-2's parameters, or gradients like them: random arrays on the device."""
    rng = np.random.default_rng(seed)

    def draw(like: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.numpy.array(rng.standard_normal(like.shape, np.float32))

    return jax.tree.map(draw, transformer_shapes(layers, width, vocabulary, positions))


def gpt2(quick: bool, seed: int = 0) -> dict[str, Any]:
    """The model of the benchmarks: 58.7 million parameters in 76 leaves."""
    return transformer(2, 16, 64, 32, seed) if quick else transformer(6, 768, 20_000, 1024, seed)


def block_shapes(
    batch: int, tokens: int, width: int, dtype: Any = np.float32
) -> tuple[dict[str, Any], Any]:
    """The kernels of a transformer's block, and its input."""
    shapes = {
        "qkv": (width, 3 * width),
        "proj": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    kernels = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}
    return kernels, jax.ShapeDtypeStruct((batch, tokens, width), dtype)


def block(
    clip: Callable[[jax.Array], jax.Array], kernels: dict[str, jax.Array], x: jax.Array
) -> jax.Array:
    """Attention and two linear layers, each added to what it read; what flows back into both places is clipped."""
    heads = (*x.shape[:2], x.shape[2] // 64, 64)
    x = clip(x)
    query, key, value = (
        y.reshape(heads) for y in jax.numpy.split(_normalized(x) @ kernels["qkv"], 3, axis=-1)
    )
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape)
    x = clip(x + mixed @ kernels["proj"])
    return x + jax.nn.gelu(_normalized(x) @ kernels["up"]) @ kernels["down"]


def _normalized(x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, epsilon=1e-5)


def block_gradient(
    clip: Callable[[jax.Array], jax.Array],
    kernels: dict[str, jax.Array],
    x: jax.Array,
    above: jax.Array,
) -> Any:
    """A forward and a backward pass through a block, from the cotangent `above` it."""
    return jax.vjp(lambda kernels, x: block(clip, kernels, x), kernels, x)[1](above)


def unclipped(x: jax.Array) -> jax.Array:
    """In the place of a clip."""
    return x


def alternate(
    sides: Mapping[str, Callable[[], Any]], repetitions: int, steps: int = 1
) -> dict[str, Figure]:
    """The median time of a step, for runs of `steps` that finish their work: side by side, after one run each."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repetitions + 1):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) / steps * 1e3)
    return {name: median(of_side[1:], "ms") for name, of_side in times.items()}


def finish(function: Callable[..., Any], *arguments: Any) -> None:
    """Calls it, and waits until its results are there."""
    jax.block_until_ready(function(*arguments))


def median(values: Sequence[float], unit: str) -> Figure:
    """The median, with the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Figure(middle, unit, (low, high))


def temporary_share(compiled: Any, params: Any) -> Figure:
    """Returns how much a program allocates beyond its inputs and outputs, as a multiple of the parameters."""
    in_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
    return Figure(compiled.memory_analysis().temp_size_in_bytes / in_bytes, "x parameters")


def chosen(names: Sequence[str], pattern: str) -> list[str]:
    """Returns the names that a regular expression finds. It ends the program if there is none."""
    found = [name for name in names if re.search(pattern, name)]
    if not found:
        sys.exit(
            f"--only={pattern!r} must find a name, got none. The names are: {'; '.join(names)}"
        )
    return found


def versions() -> str:
    """Returns the versions of the packages that decide the figures."""
    return ", ".join(
        f"{package} {metadata.version(package)}" for package in ("jax", "jaxlib", "optax")
    )


def main(description: str | None, benchmarks: Sequence[Callable[[bool], Iterable[Row]]]) -> None:
    """Runs the benchmarks and prints the table."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows to this file, too"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes, for which no bar is meant: does it run?"
    )
    options = parser.parse_args()

    device = f"{jax.devices()[0].device_kind} ({jax.default_backend()}), {versions()}, {os.cpu_count()} CPU cores"
    print(f"{device}; medians (quartiles); ratio: other side to shrewjax, or as the bar says\n")
    print("| measure | shrewjax | Optax (or as named) | ratio | bar | met |")
    print("|---|---|---|---|---|---|", flush=True)
    records = []
    for row in (row for benchmark in benchmarks for row in benchmark(options.quick)):
        ratio, met = row.judge()
        met = None if options.quick else met
        verdict = {None: "", True: "yes", False: "**no**"}[met]
        cells = (
            row.measure,
            row.ours,
            row.other or "",
            "" if ratio is None else Figure(ratio),
            row.bar or "",
            verdict,
        )
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        figures = {"shrewjax": row.ours._asdict(), "other": row.other and row.other._asdict()}
        records.append(
            {"measure": row.measure, **figures, "ratio": ratio, "bar": row.bar, "met": met}
        )
    if options.json:
        text = json.dumps({"device": device, "rows": records})
        options.json.write_text(
            json.dumps(json.loads(text, parse_constant=str), indent=2) + "\n"
        )  # "Infinity"
