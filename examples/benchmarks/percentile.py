"""The percentile clip against sorting: time, reads of the data, memory, compile time.

    python examples/benchmarks/percentile.py [--json FILE] [--quick]

All sides run in one process, alternating. The gradients are those of a 6-layer GPT-2, 58.7 million in 76 leaves,
normal, with a scale of its own for each leaf. Every side starts from the leaves. `np.partition` works on the host, on
their magnitudes in one array; `jnp.quantile` sorts that, once, as it takes long.
"""

import statistics
import time
from fractions import Fraction
from functools import partial
from typing import Any

import _harness
import jax
import jax.numpy as jnp
import numpy as np
from _harness import Figure, Row

import shrewjax
from shrewjax._numerics.percentiles import Rule, Selected, select

PERCENTILES = ("1", "10", "50", "90", "99", "99.9")


def gradients(quick: bool, dtype: Any = jnp.float32) -> list[jax.Array]:
    """GPT-2's leaves, each of another scale."""
    rng = np.random.default_rng(2)
    leaves = jax.tree.leaves(_harness.gpt2(quick, seed=1))
    return [(x * np.float32(np.exp(rng.normal(-6, 1.5)))).astype(dtype) for x in leaves]


def search(percentile: str, leaves: list[jax.Array], start: jax.Array | None = None) -> Selected:
    """Finds the bound as `clip_grad_percentile` does, and also counts the reads."""
    rule = Rule(Fraction(percentile), method="linear", scope="global", over="all", axes=None)
    return select(leaves, rule, start)


def cold_search(quick: bool) -> list[Row]:
    """The bound alone, with no start, against its place in sorted order."""
    leaves = gradients(quick)
    on_host = [np.asarray(x) for x in leaves]
    rows, slowest = [], Figure(0.0, "ms")
    for percentile in PERCENTILES:
        find = jax.jit(partial(search, percentile))
        index = int(Fraction(percentile) * (sum(x.size for x in leaves) - 1) / 100)
        sides = {
            "shrewjax": partial(_harness.finish, find, leaves),
            "np.partition": lambda index=index: np.partition(_magnitudes(on_host), index)[index],
        }
        times = _harness.alternate(sides, 3 if quick else 5)
        slowest = max(slowest, times["shrewjax"])
        measure = f"percentile {percentile}, {int(find(leaves).reads)} reads (other: np.partition)"
        rows.append(Row(measure, times["shrewjax"], times["np.partition"], "other/shrewjax >= 2"))

    joining = _harness.alternate({"other": lambda: _magnitudes(on_host)}, 3 if quick else 5)[
        "other"
    ]
    rows.append(Row("of np.partition's time, to join the magnitudes", joining))
    quantile = jax.jit(
        lambda leaves: jnp.quantile(jnp.abs(jnp.concatenate([x.ravel() for x in leaves])), 0.9)
    )
    compiled = quantile.lower(leaves).compile()
    start = time.perf_counter()
    jax.block_until_ready(compiled(leaves))
    sorting = Figure((time.perf_counter() - start) * 1e3, "ms")
    rows.append(
        Row("the slowest of these (other: jnp.quantile)", slowest, sorting, "other/shrewjax >= 100")
    )
    return rows


def _magnitudes(leaves: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    joined = np.concatenate([np.ravel(x) for x in leaves])
    return np.abs(joined, out=joined)


def reads(quick: bool) -> list[Row]:
    """How often the data is read: with no start, from the last step's bound, and in 16 bits."""
    leaves, half = gradients(quick), gradients(quick, jnp.bfloat16)
    cold: dict[str, list[int]] = {"float32": [], "bfloat16": []}
    warm = []
    for percentile in PERCENTILES:
        find = jax.jit(partial(search, percentile))
        found = find(leaves)
        cold["float32"].append(int(found.reads))
        cold["bfloat16"].append(int(find(half).reads))
        for seed, drift in enumerate((0.95, 1.0, 1.05)):
            moved = [_moved(x, seed, drift) for x in leaves]
            warm.append(int(find(moved, found.bound).reads))
    ours, other = (Figure(statistics.mean(cold[k])) for k in ("bfloat16", "float32"))
    return [
        Row(f"reads from the last bound, median of {len(warm)}", Figure(statistics.median(warm))),
        Row("the most of these", Figure(max(warm)), None, "shrewjax <= 5"),
        Row("reads with no start, the most", Figure(max(cold["float32"]))),
        Row(
            "reads with no start, mean, bfloat16 (other: float32)",
            ours,
            other,
            "shrewjax/other <= 0.5",
        ),
    ]


def _moved(x: jax.Array, seed: int, drift: float) -> jax.Array:
    """Every element by 5 %, at random, and all of them by the drift."""
    return x * (drift + 0.05 * jax.random.normal(jax.random.key(seed), x.shape, x.dtype))


def compile_times(function: Any, *arguments: Any, repetitions: int) -> tuple[Any, Figure]:
    """The executable, and the median time from cleared caches to it, the first time left out."""
    seconds = []
    for _ in range(repetitions):
        jax.clear_caches()
        start = time.perf_counter()
        compiled = jax.jit(function).lower(*arguments).compile()
        seconds.append(time.perf_counter() - start)
    return compiled, _harness.median(seconds[1:], "s")


def whole_clip(quick: bool) -> list[Row]:
    """`clip_by_percentile`'s update: memory, compile time, and time beside the clip by norm."""
    leaves = gradients(quick)
    percentile, norm = shrewjax.clip_by_percentile(90), shrewjax.clip_by_global_norm(1e-3)
    state = percentile.init(leaves)

    repetitions = 3 if quick else 5
    compiled, seconds = compile_times(percentile.update, leaves, state, repetitions=repetitions)
    _, find_seconds = compile_times(partial(search, "90"), leaves, repetitions=repetitions)

    _, state = compiled(leaves, state)
    other = jax.jit(norm.update).lower(leaves, norm.init(leaves)).compile()
    sides = {
        "percentile": partial(_harness.finish, compiled, leaves, state),
        "norm": partial(_harness.finish, other, leaves, norm.init(leaves)),
    }
    times = _harness.alternate(sides, 3 if quick else 7)
    return [
        Row(
            "temporary memory", _harness.temporary_share(compiled, leaves), None, "shrewjax < 0.01"
        ),
        Row("search: trace, lower, compile", find_seconds, None, "shrewjax < 2"),
        Row("search and clip: trace, lower, compile", seconds, None, "shrewjax < 2"),
        Row(
            "search and clip from the last bound (other: clip_by_global_norm)",
            times["percentile"],
            times["norm"],
        ),
    ]


if __name__ == "__main__":
    _harness.main(__doc__, [cold_search, reads, whole_clip])
