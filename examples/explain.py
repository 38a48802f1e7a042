"""Draws figures that explain the package: its memory, a window, a norm in range, and a window on many devices.

* `explain_memory`: what a gradient of one batch holds, by `jax.value_and_grad` and over micro-batches, and how far the
  gradients are apart. It is measured: a transformer on 64 paragraphs of Python's documentation.
* `explain_window`: micro-batches are added up, the average is clipped, and the optimizer runs once a window.
* `explain_norm`: gradients from the smallest to the largest that float16 and float32 hold, and the norm of them that
  Optax and `shrewjax.grad_norm` compute. It is measured, not sketched.
* `explain_devices`: each device adds up its own gradients, and the sums meet once a window.

Run it with

    python -m pip install -e '.[examples]'
    python examples/explain.py

It takes under a minute on a CPU, and writes out/explain_window.png, out/explain_window_stacked.png, which goes from top
to bottom and fits on a phone, and so on. An `--out` that ends in .svg gives two files each, for light and for dark
pages. This redraws all figures of the documentation, in ten minutes or so:

    for name in explain choose_batch_size choose_max_norm fit_micro_batches train_batch_norm train_digits \
        train_equinox train_linen train_ppo train_recurrent train_transformer; do
        python examples/$name.py --out docs/figures/$name.svg
    done
    python examples/train_sharded.py --devices 8 --checkpoints $(mktemp -d) --out docs/figures/train_sharded.svg

The figure of `which_rule.py --out docs/figures/which_rule.svg` takes longer.
"""

import argparse
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import _figures
import jax
import jax.numpy as jnp
import numpy as np
import optax
import train_transformer
from _figures import BLUE, GREEN, INK, MUTED, VERMILLION
from flax import nnx
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

import shrewjax

ELEMENTS = 1000
POINTS = 61
# Powers of ten of the norms. In between, no gradient is rounded to zeros only, and every element is finite.
RANGES = {"float16": (-6, 5.5), "float32": (-34, 38)}
MICRO_BATCHES = ("32 examples", "32 examples", "8 examples", "20 examples")
ONCE_A_WINDOW = (
    ("window\naverage by\nexample", VERMILLION),
    ("clip\nnorm \N{LESS-THAN OR EQUAL TO} 1", VERMILLION),
    ("optimizer\none step", GREEN),
)
ALL_REDUCE = "one all-reduce\nwhen the\nwindow closes"
SAME = "clip, optimizer:\nthe same on\nevery device"
DEVICES = 4


PARAGRAPHS, CHARACTERS, LAYERS = 64, 128, 4
MIB = 2**20


class Gradient(NamedTuple):
    """A gradient of a whole batch, and the bytes that its program holds beside parameters and batch."""

    held: int
    leaves: list[np.ndarray]

    def distance(self, other: "Gradient") -> float:
        """The largest difference, in multiples of the other gradient's largest element."""
        pairs = list(zip(self.leaves, other.leaves, strict=True))
        return max(np.abs(a - b).max() for a, b in pairs) / max(np.abs(b).max() for _, b in pairs)


def gradients_of_a_transformer() -> dict[str, Gradient]:
    """Measures one batch of paragraphs, at once and over 4 and 16 micro-batches, whose weights are characters."""
    texts, alphabet = train_transformer.paragraphs(CHARACTERS)
    chosen = np.random.default_rng(0).choice(len(texts), PARAGRAPHS, replace=False)
    batch = train_transformer.padded([texts[i] for i in chosen], CHARACTERS)
    model = train_transformer.CharacterTransformer(alphabet, CHARACTERS, LAYERS, nnx.Rngs(0))
    graph, weights = nnx.split(model)
    loss = functools.partial(train_transformer.loss_of(graph), deterministic=True)
    functions = {"jax.value_and_grad": jax.value_and_grad(loss)}
    for k in (4, 16):
        functions[f"shrewjax, {k} micro-batches"] = shrewjax.accumulated_value_and_grad(
            loss, k, weight_fn=train_transformer.predicted, rng_argnums=2
        )
    arguments = weights, jax.tree.map(jnp.asarray, batch), jax.random.key(0)

    def measured(value_and_grad: Callable[..., Any]) -> Gradient:
        compiled = jax.jit(value_and_grad).lower(*arguments).compile()
        memory = compiled.memory_analysis()
        _, grads = compiled(*arguments)
        held = memory.temp_size_in_bytes + memory.output_size_in_bytes
        return Gradient(held, [np.asarray(x) for x in jax.tree.leaves(grads)])

    return {name: measured(function) for name, function in functions.items()}


def plot_memory(gradients: dict[str, Gradient], path: Path) -> None:
    """Draws a bar of memory for each gradient, and how far it is from the first."""
    figure = Figure(figsize=(8, 1.9))
    axes = figure.subplots()
    first = next(iter(gradients.values()))
    for place, (name, gradient) in enumerate(gradients.items()):
        is_first = gradient is first
        color = MUTED if is_first else GREEN
        axes.barh(place, gradient.held / MIB, color=color, height=0.62, gid=f"held-{place}")
        text = f"{gradient.held / MIB:.0f} MiB"
        if not is_first:
            power = math.ceil(np.log10(gradient.distance(first)))
            text += f": the same gradient within 1e{power}"
        end = (gradient.held / MIB, place)
        axes.annotate(text, end, xytext=(5, 0), textcoords="offset points", va="center")
        axes.text(-8, place, name, ha="right", va="center")
    axes.set(xlim=(0, 1.14 * first.held / MIB), ylim=(len(gradients) - 0.5, -0.5))
    axes.set_title("Memory of the gradient of 64 paragraphs: a transformer, compiled for a CPU")
    axes.set_axis_off()
    _figures.save(figure, path)


class Norms(NamedTuple):
    """The norms of gradients from small to large: in float64, and as Optax and shrewjax compute them."""

    true: np.ndarray
    optax: np.ndarray
    shrewjax: np.ndarray


def measure(dtype: str) -> Norms:
    """Returns the norms of one random gradient, multiplied by numbers over the range of the dtype."""
    gradient = np.random.default_rng(0).standard_normal(ELEMENTS)
    scales = np.logspace(*RANGES[dtype], POINTS) / np.linalg.norm(gradient)
    gradients = (scales[:, None] * gradient).astype(dtype)
    ours, theirs = (
        jax.jit(jax.vmap(norm))(jnp.asarray(gradients))
        for norm in (shrewjax.grad_norm, optax.tree.norm)
    )
    return Norms(
        np.linalg.norm(gradients.astype(np.float64), axis=1),
        *(np.float64(x) for x in (theirs, ours)),
    )


def draw_norms(axes: Axes, dtype: str, norms: Norms) -> None:
    """Draws both norms over the true one. The lowest tick stands for 0, the highest for infinity."""
    low, high = RANGES[dtype]
    margin = (high - low) / 8
    zero, infinity = 10.0 ** (low - margin), 10.0 ** min(high + margin, 300)
    axes.plot(
        norms.true,
        norms.shrewjax,
        color=BLUE,
        linewidth=3,
        label="shrewjax.grad_norm",
        gid=f"shrewjax-{dtype}",
    )
    shown = np.clip(norms.optax, zero, infinity)
    axes.plot(
        norms.true,
        shown,
        ".-",
        color=VERMILLION,
        linewidth=1,
        label="optax.tree.norm",
        gid=f"optax-{dtype}",
    )
    axes.text(
        norms.true[0], infinity, "squares overflow:\nclipped to zeros", color=VERMILLION, va="top"
    )
    axes.text(
        norms.true[-1], zero, "squares underflow:\nnever clipped", color=VERMILLION, ha="right"
    )
    axes.set(xscale="log", yscale="log", title=f"gradients in {dtype}")
    axes.set(xlabel="true norm of the gradient", ylabel="computed norm")
    powers = 10.0 ** np.linspace(np.ceil(low), np.floor(high), 4).round()
    axes.xaxis.set_major_locator(FixedLocator(powers))
    axes.yaxis.set_major_locator(FixedLocator([zero, *powers, infinity]))
    ends = {zero: "0", infinity: "infinity"}
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda y, _: ends.get(y, rf"$\mathdefault{{10^{{{np.log10(y):.0f}}}}}$"))
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())


def plot_norms(measured: dict[str, Norms], path: Path, *, stacked: bool) -> None:
    """Draws the norms of both dtypes, beside or below each other."""
    figure = Figure(figsize=(4, 6.4) if stacked else (8, 3.6))
    panels = figure.subplots(2, 1) if stacked else figure.subplots(1, 2)
    for axes, (dtype, norms) in zip(panels, measured.items(), strict=True):
        draw_norms(axes, dtype, norms)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    _figures.save(figure, path)


def box(axes: Axes, x: float, y: float, width: float, height: float, text: str, color: str) -> None:
    """Draws a box with its center at (x, y)."""
    corner = x - width / 2, y - height / 2
    axes.add_patch(
        FancyBboxPatch(
            corner,
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor="none",
            edgecolor=color,
            linewidth=1.6,
        )
    )
    axes.text(x, y, text, ha="center", va="center")


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draws an arrow."""
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": INK, "shrinkA": 0})


def sketch(width: float, height: float) -> tuple[Figure, Axes]:
    """Returns an empty figure, in units of an inch."""
    figure = Figure(figsize=(width, height), layout="none")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_axis_off()
    return figure, axes


def plot_window(path: Path) -> None:
    """Draws the micro-batches of a window, and what runs when it closes."""
    figure, axes = sketch(9.6, 1.9)
    y, height = 0.95, 0.8
    for call, held in enumerate(MICRO_BATCHES, start=1):
        x = 1.3 * call - 0.6
        box(axes, x, y, 1.15, height, f"micro-batch\n{held}", BLUE)
        axes.text(x, y + 0.6, f"call {call}", ha="center", color=MUTED)
    for number, (text, color) in enumerate(ONCE_A_WINDOW):
        x = 6.2 + 1.4 * number
        box(axes, x, y, 1.05, height, text, color)
        arrow(axes, (x - 0.86, y), (x - 0.55, y))
    for first, last, text in (
        (0.12, 5.18, "each call adds its gradient to the window"),
        (5.67, 9.53, "runs once a window, in the call that closes it"),
    ):
        axes.plot((first, last), (0.4, 0.4), color=MUTED, linewidth=0.8)
        axes.text((first + last) / 2, 0.17, text, ha="center", va="center")
    _figures.save(figure, path)


def stack_window(path: Path) -> None:
    """Draws the same from top to bottom."""
    figure, axes = sketch(3.6, 5.9)
    x = 1.45
    for call, held in enumerate(MICRO_BATCHES, start=1):
        y = 6.2 - 0.7 * call
        box(axes, x, y, 1.2, 0.55, f"micro-batch\n{held}", BLUE)
        axes.text(0.75, y, f"call {call}", ha="right", va="center", color=MUTED)
    for number, (text, color) in enumerate(ONCE_A_WINDOW):
        y = 2.3 - 0.95 * number
        box(axes, x, y, 1.2, 0.65, text, color)
        arrow(axes, (x, y + 0.6), (x, y + 0.35))
    for top, bottom, text in (
        (5.78, 3.12, "each call\nadds its\ngradient to\nthe window"),
        (2.63, 0.07, "runs once\na window, in\nthe call that\ncloses it"),
    ):
        axes.plot((2.25, 2.25), (top, bottom), color=MUTED, linewidth=0.8)
        axes.text(2.37, (top + bottom) / 2, text, va="center")
    _figures.save(figure, path)


def plot_devices(path: Path) -> None:
    """Draws a mesh of four devices whose sums meet once a window."""
    figure, axes = sketch(9.0, 2.7)
    meeting = 5.9, 1.35
    for device in range(DEVICES):
        y = 2.33 - 0.65 * device
        box(axes, 0.95, y, 1.4, 0.5, f"device {device}", BLUE)
        axes.text(1.8, y, "adds up its own gradients,\nmicro-batch by micro-batch", va="center")
        arrow(axes, (3.95, y), (meeting[0] - 0.72, meeting[1] + (y - meeting[1]) / 4))
    box(axes, *meeting, 1.4, 1.0, ALL_REDUCE, VERMILLION)
    box(axes, 8.05, meeting[1], 1.6, 1.0, SAME, GREEN)
    arrow(axes, (6.65, meeting[1]), (7.22, meeting[1]))
    _figures.save(figure, path)


def stack_devices(path: Path) -> None:
    """Draws the same from top to bottom."""
    figure, axes = sketch(3.6, 4.2)
    axes.text(
        1.8,
        3.9,
        "each device adds up its own gradients,\nmicro-batch by micro-batch",
        ha="center",
        va="center",
    )
    for device in range(DEVICES):
        x = 0.6 + 0.8 * device
        box(axes, x, 3.25, 0.7, 0.6, f"device\n{device}", BLUE)
        arrow(axes, (x, 2.92), (1.8 + (x - 1.8) / 3, 2.38))
    box(axes, 1.8, 1.95, 1.6, 0.8, ALL_REDUCE, VERMILLION)
    box(axes, 1.8, 0.55, 1.6, 0.8, SAME, GREEN)
    arrow(axes, (1.8, 1.52), (1.8, 0.98))
    _figures.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Measures, and draws all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("out/explain.png"), help="the names start like this"
    )
    args = parser.parse_args(argv)

    measured = {dtype: measure(dtype) for dtype in RANGES}
    for dtype, norms in measured.items():
        wrong = ~(np.abs(norms.optax / norms.true - 1) < 0.01)
        print(f"{dtype}: of {POINTS} norms, Optax's is more than 1 % off in {wrong.sum()}")
    gradients = gradients_of_a_transformer()
    for name, gradient in gradients.items():
        print(f"{name}: {gradient.held / MIB:.1f} MiB")
    for name, plot in (
        ("memory", functools.partial(plot_memory, gradients)),
        ("window", plot_window),
        ("window_stacked", stack_window),
        ("devices", plot_devices),
        ("devices_stacked", stack_devices),
        ("norm", functools.partial(plot_norms, measured, stacked=False)),
        ("norm_stacked", functools.partial(plot_norms, measured, stacked=True)),
    ):
        plot(args.out.with_stem(f"{args.out.stem}_{name}"))


if __name__ == "__main__":
    main()
