"""What the benchmarks share: model trees, compiled steps in place, alternating timings, and the table."""

import argparse
import dataclasses
import json
import operator
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
import optax

_COMPARISONS = {"<": operator.lt, "<=": operator.le, "==": operator.eq, ">=": operator.ge}


@dataclasses.dataclass(frozen=True)
class Figure:
    """A measured number, and for a median its quartiles."""

    value: float
    unit: str = ""
    quartiles: tuple[float, float] | None = None

    def __str__(self) -> str:
        spread = "" if self.quartiles is None else f" ({_digits(self.quartiles[0])} to {_digits(self.quartiles[1])})"
        return f"{_digits(self.value)}{spread} {self.unit}".strip()


def _digits(value: float) -> str:
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


@dataclasses.dataclass(frozen=True)
class Row:
    """One comparison. The bar names what it is about: `A/B >= 2` the ratio, with shrewjax as A or B, `shrewjax < 2`."""

    measure: str
    ours: Figure
    other: Figure | None = None
    bar: str | None = None

    @property
    def ratio(self) -> float | None:
        if self.other is None:
            return None
        ours, other = np.float64(self.ours.value), np.float64(self.other.value)
        with np.errstate(all="ignore"):
            return float(ours / other if (self.bar or "").startswith("shrewjax/") else other / ours)

    @property
    def met(self) -> bool | None:
        if self.bar is None:
            return None
        subject, comparison, limit = self.bar.split()[:3]
        value = self.ours.value if subject == "shrewjax" else self.ratio
        return bool(_COMPARISONS[comparison](value, float(limit)))


class Loop:
    """A compiled step `carry, *inputs -> carry` that runs in place: the carry is donated, and the old one forgotten."""

    def __init__(self, step: Callable[..., Any], carry: Any, *inputs: Any) -> None:
        self.compiled = jax.jit(step, donate_argnums=0).lower(carry, *inputs).compile()
        self.carry, self._inputs = carry, inputs

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.carry = self.compiled(self.carry, *self._inputs)
        jax.block_until_ready(self.carry)


def transformer(layers: int, width: int, vocabulary: int, positions: int, seed: int = 0) -> dict[str, Any]:
    """GPT-2's parameters, or gradients like them: random float32 arrays on the device, 4 leaves and 12 a layer."""
    norm = {"scale": (width,), "bias": (width,)}
    dense = {"qkv": (width, 3 * width), "proj": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    layer = {"norm_1": norm, "norm_2": norm} | {k: {"w": s, "b": s[1:]} for k, s in dense.items()}
    shapes = {"tokens": (vocabulary, width), "positions": (positions, width), "norm": norm}
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jax.numpy.array(rng.standard_normal(shape, np.float32)),
        shapes | {f"layer_{i}": layer for i in range(layers)},
        is_leaf=lambda x: isinstance(x, tuple),
    )


def gpt2(quick: bool, seed: int = 0) -> dict[str, Any]:
    """The model of the benchmarks: 58.7 million parameters in 76 leaves."""
    return transformer(2, 16, 64, 32, seed) if quick else transformer(6, 768, 20_000, 1024, seed)


def alternate(sides: Mapping[str, Callable[[], Any]], repetitions: int, steps: int = 1) -> dict[str, Figure]:
    """The median time of a step, for runs of `steps` that finish their work: side by side, after one run each."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for repetition in range(repetitions + 1):
        for name, run in sides.items():
            start = time.perf_counter()
            run()
            if repetition > 0:
                times[name].append((time.perf_counter() - start) / steps * 1e3)
    return {name: median(of_side, "ms") for name, of_side in times.items()}


def median(values: Sequence[float], unit: str) -> Figure:
    """The median with the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Figure(middle, unit, (low, high))


def temporary_share(compiled: Any, params: Any) -> Figure:
    """What a program allocates beyond its inputs and outputs, as a multiple of the parameters."""
    in_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
    return Figure(compiled.memory_analysis().temp_size_in_bytes / in_bytes, "x parameters")


def main(description: str | None, benchmarks: Sequence[Callable[[bool], list[Row]]]) -> None:
    """Runs the benchmarks and prints the table."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file, too")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: whether it runs, not how fast")
    options = parser.parse_args()

    versions = f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, optax {optax.__version__}"
    device = f"{jax.devices()[0].device_kind} ({jax.default_backend()}), {versions}, {os.cpu_count()} CPU cores"
    print(f"{device}; medians (quartiles)\n", flush=True)
    print("| measure | shrewjax | Optax, or as named | ratio | bar | met |\n|---|---|---|---|---|---|", flush=True)
    records = []
    for benchmark in benchmarks:
        for row in benchmark(options.quick):
            ratio = "" if row.ratio is None else _digits(row.ratio)
            met = "" if row.met is None else "yes" if row.met else "**no**"
            print(f"| {row.measure} | {row.ours} | {row.other or ''} | {ratio} | {row.bar or ''} | {met} |", flush=True)
            records.append(dataclasses.asdict(row) | {"ratio": row.ratio, "met": row.met})
    if options.json:
        options.json.write_text(json.dumps({"device": device, "rows": records}, indent=2) + "\n")
