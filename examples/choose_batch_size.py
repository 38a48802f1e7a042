"""Measures the gradient noise scale while training, and what three batch sizes cost: is a window too short or too long?

A small net learns handwritten digits from micro-batches of 8 images, with windows of 16, 128 and 1024 images.
`accumulate(..., noise_decay=...)` measures the noise scale: the window at which noise and signal are equal. `value=`
gives each window's loss. The figure shows the noise scale beside the windows, the loss, and what each window needed to
reach a given loss, in images and in optimizer steps, beside the trade that the noise scale predicts.

Run it with

    python -m pip install -e '.[examples]'
    python examples/choose_batch_size.py

It takes well under a minute on two CPU cores, downloads nothing, prints the same numbers, and writes
out/choose_batch_size.png.

Conclusions that hold here:

* From 16, below the noise scale, to 128, near it, a window can grow: steps are six times fewer, for 1.4 times the
  images.
* From 128 to 1024, far above it, a window should not grow: steps halve, for over four times the images.
* The noise scale grows as the loss falls. A measurement early in training says little about its end.

Conclusions that do not follow:

* The noise scale is no batch size to set, only an order of magnitude. The theory (S. McCandlish et al., 2018,
  arXiv:1812.06162) is of plain gradient descent. Here, with Adam, long windows cost about half of what it predicts.
* It is no controller either. W. Merrill et al., 2025, arXiv:2505.23971, doubt that it can be trusted on language
  models, and branch runs into several batch sizes instead. The test of a batch size is to train with it, as here.
* It depends on the learning rate and on the progress of the run, not only on the data. Each window has its own rate
  here: of 0.002 times powers of two, the one with which it needed the fewest images.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import NamedTuple

import _common
import _figures
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _figures import BLUE, GREEN, MUTED, VERMILLION
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tqdm import tqdm

import shrewjax

MICRO_BATCH, WIDTH = 8, 32
LEARNING_RATES = {16: 0.016, 128: 0.064, 1024: 0.064}  # of Adam, by the window's number of images
AVERAGED_OVER = 4096  # images, in every run, so that the noise scales compare
LOSS_OVER = 512  # images, because the loss of 16 says little
SPREAD = (0.1, 0.5, 0.9)  # quantiles over seeds
DRAWN = 150  # points of a line, because thousands make a figure of megabytes

BESIDE = {"textcoords": "offset points", "fontsize": "small"}

Params = dict[str, jax.Array]


class Windows(NamedTuple):
    """The measurements of each window, of shape (seeds, windows)."""

    noise_scale: np.ndarray
    loss: np.ndarray


class Cost(NamedTuple):
    """The number of images until a run's loss fell below the target, and the noise scale then."""

    images: np.ndarray  # shape (seeds,)
    noise_scale: np.ndarray  # shape (seeds,)


def initial(key: jax.Array) -> Params:
    """Parameters of two linear layers with a relu between them."""
    hidden, readout = jax.random.split(key)
    glorot = jax.nn.initializers.glorot_uniform()
    return {
        "hidden": glorot(hidden, (64, WIDTH)),
        "bias": jnp.zeros(WIDTH),
        "readout": glorot(readout, (WIDTH, 10)),
    }


def mean_loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropy, averaged over the micro-batch."""
    x = jax.nn.relu(images.reshape(-1, 64) @ params["hidden"] + params["bias"])
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["readout"], labels).mean()


def train_one(
    key: jax.Array, images: jax.Array, labels: jax.Array, size: int, windows: int
) -> Windows:
    """Trains one net, with this many windows of `size` images."""
    steps = size // MICRO_BATCH
    # A weight is a number of images, so the noise scale is one, too.
    tx = shrewjax.accumulate(
        optax.adam(LEARNING_RATES[size]), steps, noise_decay=1 - size / AVERAGED_OVER
    )

    def micro_step(
        carry: tuple[Params, optax.OptState], rows: jax.Array
    ) -> tuple[tuple[Params, optax.OptState], None]:
        params, opt_state = carry
        loss, grads = jax.value_and_grad(mean_loss)(params, images[rows], labels[rows])
        return shrewjax.apply_gradients(
            tx, grads, opt_state, params, weight=len(rows), value=loss
        ), None

    def window(
        carry: tuple[Params, optax.OptState], key: jax.Array
    ) -> tuple[tuple[Params, optax.OptState], Windows]:
        # Drawn with replacement, because the estimate takes a window's examples as independent.
        rows = jax.random.randint(key, (steps, MICRO_BATCH), 0, len(labels))
        carry, _ = jax.lax.scan(micro_step, carry, rows)
        measured = shrewjax.metrics(carry[1])
        return carry, Windows(measured["accumulate/noise_scale"], measured["accumulate/value"])

    first, rest = jax.random.split(key)
    params = initial(first)
    return jax.lax.scan(window, (params, tx.init(params)), jax.random.split(rest, windows))[1]


@partial(jax.jit, static_argnames=("size", "windows"))
def train(
    keys: jax.Array, images: jax.Array, labels: jax.Array, *, size: int, windows: int
) -> Windows:
    """Trains a net for each key, all at once."""
    return jax.vmap(lambda key: train_one(key, images, labels, size, windows))(keys)


def smoothed(loss: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The loss over stretches of `LOSS_OVER` images, or of a longer window, and the number of images at their ends."""
    stretch = max(LOSS_OVER // size, 1)
    means = loss.reshape(len(loss), -1, stretch).mean(axis=-1)
    return means, size * stretch * np.arange(1, means.shape[1] + 1)


def cost_of(run: Windows, size: int, target: float) -> Cost:
    """Returns the images that each seed needed to reach the target."""
    loss, seen = smoothed(run.loss, size)
    reached = loss < target
    if not reached.any(axis=1).all():
        raise SystemExit(
            f"windows of {size} did not reach a loss of {target:g}. Raise --target or --images."
        )
    images = seen[reached.argmax(axis=1)]
    return Cost(
        images, np.take_along_axis(run.noise_scale, images[:, None] // size - 1, axis=1)[:, 0]
    )


def trade_off(cost: Cost, size: int, sizes: np.ndarray) -> np.ndarray:
    """The images that windows of these sizes need by theory, from what this size needed; shape (seeds, sizes)."""
    return (
        cost.images[:, None]
        * (cost.noise_scale[:, None] + sizes)
        / (cost.noise_scale[:, None] + size)
    )


def plot(runs: dict[int, Windows], costs: dict[int, Cost], target: float, path: Path) -> None:
    """Draws noise scale and loss over the images seen, and the images against the steps that each window needed."""
    figure = Figure(figsize=(8, 7.5))
    noise, losses, trade = figure.subplot_mosaic("NL;TT").values()

    def draw(
        axes: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str | None = None
    ) -> None:
        low, middle, high = np.quantile(y, SPREAD, axis=0)
        shown = np.unique(np.geomspace(1, len(x), DRAWN).astype(int)) - 1
        axes.fill_between(x[shown], low[shown], high[shown], color=color, alpha=0.2, linewidth=0)
        axes.plot(x[shown], middle[shown], color=color, label=label)

    before = None
    for (size, run), color in zip(runs.items(), (BLUE, GREEN, VERMILLION), strict=True):
        name = f"windows of {size}"
        draw(noise, size * np.arange(1, run.noise_scale.shape[1] + 1), run.noise_scale, color)
        _figures.threshold(noise, size, name, side="left", color=color)
        loss, seen = smoothed(run.loss, size)
        draw(losses, seen, loss, color, name)

        low, images, high = np.quantile(costs[size].images, SPREAD)
        steps = images / size
        trade.errorbar(
            steps, images, [[images - low], [high - images]], fmt="o", color=color, capsize=3
        )
        trade.annotate(f"{size}", (steps, high), xytext=(6, 4), color=color, **BESIDE)
        (by_theory,) = np.median(trade_off(costs[min(runs)], min(runs), np.array([size])), axis=0)
        trade.plot(by_theory / size, by_theory, "o", color=color, fillstyle="none")
        if before:
            fewer, more = before[0] / steps, images / before[1]
            trade.plot((before[0], steps), (before[1], images), color=MUTED, linewidth=1)
            middle = np.sqrt(before[0] * steps), np.sqrt(before[1] * images)
            note = f"steps / {fewer:.1f}\nimages x {more:.1f}"
            trade.annotate(
                note, middle, xytext=(-4, -4), ha="right", va="top", color=MUTED, **BESIDE
            )
        before = steps, images

    sizes = np.geomspace(min(runs), max(runs), 50)
    predicted = np.median(trade_off(costs[min(runs)], min(runs), sizes), axis=0)
    trade.plot(
        predicted / sizes,
        predicted,
        color=MUTED,
        linestyle=":",
        label="predicted by the noise scale",
        zorder=1,
    )

    extent = max(runs), seen[-1]
    noise.set(xscale="log", yscale="log", xlim=extent, ylim=(10, 2000))
    noise.set(title="Noise scale, and windows (dashed)", xlabel="images seen", ylabel="images")
    losses.set(xscale="log", yscale="log", xlim=extent, ylim=(target / 20, 4))
    losses.set(title="Loss", xlabel="images seen", ylabel="nats")
    _figures.threshold(losses, target, "target", side="left")
    losses.legend()
    trade.set(title="Cost of a target loss, by window", xscale="log", yscale="log")
    trade.set(
        xlabel=f"optimizer steps until the loss is {target:g}",
        ylabel=f"images until the loss is {target:g}",
    )
    trade.margins(x=0.3, y=0.2)
    trade.legend()
    for axes in (noise, losses, trade):
        _figures.plain_ticks(axes.xaxis, axes.yaxis)
    _figures.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Trains with each window, prints and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--images", type=int, default=49152, help="seen by each run; a multiple of 1024"
    )
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--target", type=float, default=0.1, help="the loss to reach")
    parser.add_argument("--out", type=Path, default=Path("out/choose_batch_size.png"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    images, _, labels, _ = _common.digits()
    keys = jax.random.split(jax.random.key(args.seed), args.seeds)
    runs, costs = {}, {}
    with tqdm(LEARNING_RATES, unit="run") as bar:
        for size in bar:
            bar.set_postfix_str(f"windows of {size}")
            runs[size] = jax.device_get(
                train(keys, images, labels, size=size, windows=args.images // size)
            )
            costs[size] = cost_of(runs[size], size, args.target)

    for size, run in runs.items():
        early, late = (
            np.median(run.noise_scale[:, args.images // size * part // 8 - 1]) for part in (1, 8)
        )
        needed = np.median(costs[size].images)
        (predicted,) = np.median(trade_off(costs[min(runs)], min(runs), np.array([size])), axis=0)
        print(
            f"windows of {size}: noise scale {early:.0f} early, {late:.0f} at last; loss {args.target:g} after "
            f"{needed:.0f} images in {needed / size:.0f} steps (predicted: {predicted:.0f} images)"
        )
    plot(runs, costs, args.target, args.out)


if __name__ == "__main__":
    main()
