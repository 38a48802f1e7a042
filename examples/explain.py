"""Draws figures that explain the package: the parts of a loss, a window, a norm in range, a window on many devices.

* `explain_parts`: the three parts of a program, as `print_micro_batches` counts their operations, and the memory of its
  gradient, at once and in 16 micro-batches. It is measured: a transformer on 64 paragraphs of Python's documentation.
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
import contextlib
import functools
import io
import re
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


PARAGRAPHS, CHARACTERS, LAYERS, DIVISOR = 64, 128, 4, 16
MIB = 2**20


class Parts(NamedTuple):
    """A gradient in micro-batches: what is printed of it, and the bytes that it holds beside parameters and batch."""

    printed: str
    held: int  # by the whole batch at once
    held_divided: int
    distance: float  # from the gradient at once, in multiples of its largest element

    def operations(self, part: str) -> int:
        """The number of operations of a part."""
        return int(re.search(rf"(?m)^{part} +(\d+) operation", self.printed)[1])


def parts_of_a_transformer() -> Parts:
    """Measures one batch of paragraphs, at once and in micro-batches."""
    texts, alphabet = train_transformer.paragraphs(CHARACTERS)
    chosen = np.random.default_rng(0).choice(len(texts), PARAGRAPHS, replace=False)
    batch = train_transformer.padded([texts[i] for i in chosen], CHARACTERS)
    model = train_transformer.CharacterTransformer(alphabet, CHARACTERS, LAYERS, nnx.Rngs(0))
    graph, weights = nnx.split(model)
    loss = functools.partial(train_transformer.loss_of(graph), deterministic=True)
    arguments = weights, jax.tree.map(jnp.asarray, batch), jax.random.key(0)

    def measured(value_and_grad: Callable[..., Any]) -> tuple[int, list[np.ndarray]]:
        compiled = jax.jit(value_and_grad).lower(*arguments).compile()
        memory = compiled.memory_analysis()
        _, grads = compiled(*arguments)
        held = memory.temp_size_in_bytes + memory.output_size_in_bytes
        return held, [np.asarray(x) for x in jax.tree.leaves(grads)]

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        shrewjax.print_micro_batches(loss, DIVISOR, *arguments, batch_argnums=1)
    held, whole = measured(jax.value_and_grad(loss))
    held_divided, grads = measured(shrewjax.value_and_grad(loss, DIVISOR, batch_argnums=1))
    largest = max(np.abs(x).max() for x in whole)
    distance = max(np.abs(a - b).max() for a, b in zip(grads, whole, strict=True)) / largest
    return Parts(printed.getvalue(), held, held_divided, distance)


def plot_parts(parts: Parts, path: Path) -> None:
    """Draws the three parts from top to bottom, narrow enough that a phone does not shrink the letters."""
    figure, axes = sketch(4.0, 3.0)
    rows = (
        ("before", BLUE, "masks, the number of characters", "once"),
        (
            "loop",
            GREEN,
            "the model, forward and backward",
            f"{DIVISOR} times, 4 of {PARAGRAPHS} texts",
        ),
        ("after", VERMILLION, "sum of losses / number", "once"),
    )
    for place, (name, color, what, when) in enumerate(rows):
        y = 2.65 - 0.92 * place
        box(axes, 0.5, y, 0.85, 0.62, name, color)
        axes.text(1.05, y + 0.12, what, va="center")
        count = parts.operations(name)
        text = f"{count} operation{'s' * (count > 1)}, {when}"
        axes.text(1.05, y - 0.14, text, va="center", color=MUTED)
        if place:
            arrow(axes, (0.5, y + 0.6), (0.5, y + 0.32))
    axes.text(0.65, 1.27, "keeps one sum", va="center", color=MUTED)
    at_once, divided = (f"{x / MIB:.0f} MiB" for x in (parts.held, parts.held_divided))
    axes.text(0.08, 0.17, f"The same gradient in {divided}, not in {at_once}", va="center")
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
    parts = parts_of_a_transformer()
    print(parts.printed)
    print(
        f"held: {parts.held / MIB:.1f} MiB at once, {parts.held_divided / MIB:.1f} MiB in micro-batches; gradients "
        f"within {parts.distance:.0e}"
    )
    for name, plot in (
        ("parts", functools.partial(plot_parts, parts)),
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
