"""Trains a small convolutional net on handwritten digits, with clipping inside of gradient accumulation.

Every optimizer step sees the average gradient of four micro-batches, clipped to a global norm. The train step returns
measurements, and the figure shows them: the norms of the micro-batches, the norm of each window's average, which is
smaller because noise averages out, and how much the clip takes off.

Run it with

    python -m pip install -e '.[examples]'
    python examples/train_digits.py

It takes well under a minute on two CPU cores, downloads nothing, prints the accuracy on held-out images, and writes
out/train_digits.png.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import _common
import _figures
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _figures import BLUE, FAINT, VERMILLION
from flax import nnx
from matplotlib.figure import Figure
from tqdm import tqdm

import shrewjax
import shrewjax.flax

MICRO_BATCH = 32
ACCUM_STEPS = 4
MAX_NORM = 0.5
LEARNING_RATE = 5e-3

# Names of measurements: print(shrewjax.metrics(opt_state).keys()) shows all of them.
GRAD_NORM = "clip_by_global_norm/grad_norm"
CLIP_SCALE = "clip_by_global_norm/clip_scale"
MICRO_BATCH_NORM = "micro_batch/grad_norm"


class DigitNet(nnx.Module):
    """Two convolutions and a linear layer: 8 x 8 x 1 images in, 10 logits out."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
        self.linear = nnx.Linear(2 * 2 * 64, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits of shape (batch, 10) from images of shape (batch, 8, 8, 1)."""
        x = nnx.max_pool(nnx.relu(self.conv1(images)), (2, 2), strides=(2, 2))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), (2, 2), strides=(2, 2))
        return self.linear(x.reshape(len(x), -1))


def mean_loss(model: DigitNet, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross-entropy, averaged over the micro-batch."""
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


@nnx.jit(donate_argnames=("model", "optimizer"))
def train_step(
    model: DigitNet,
    optimizer: shrewjax.flax.Optimizer,
    images: jax.Array,
    labels: jax.Array,
    flush: jax.Array,
) -> dict[str, jax.Array]:
    """Takes one micro-batch; every fourth one, or one with `flush`, changes the model."""
    loss, grads = nnx.value_and_grad(mean_loss)(model, images, labels)
    # The loss is a mean, and the last micro-batch of an epoch is smaller: the weight makes all examples count alike.
    metrics = optimizer.update(model, grads, weight=len(labels), flush=flush)
    return {"loss": loss, MICRO_BATCH_NORM: shrewjax.grad_norm(grads)} | metrics


@nnx.jit
def accuracy(model: DigitNet, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The share of images whose largest logit is that of their label."""
    return (model(images).argmax(axis=-1) == labels).mean()


class Windows(NamedTuple):
    """The measurements of each window; shape (windows,)."""

    norm: np.ndarray  # of the average, before the clip
    is_clipped: np.ndarray
    smallest: np.ndarray  # norm among its micro-batches
    largest: np.ndarray


def windows_of(history: dict[str, np.ndarray]) -> Windows:
    """Returns the windows' measurements from those of the micro-batches."""
    last = np.flatnonzero(history["accumulate/applied"])
    first = np.append(0, last[:-1] + 1)
    smallest, largest = (
        which.reduceat(history[MICRO_BATCH_NORM], first) for which in (np.minimum, np.maximum)
    )
    return Windows(history[GRAD_NORM][last], history[CLIP_SCALE][last] < 1, smallest, largest)


def plot_norms(windows: Windows, max_norm: float, path: Path) -> None:
    """Draws the norms of the windows and of their micro-batches, the threshold, and what the clip takes off."""
    figure = Figure(figsize=(8, 4.2))
    axes = figure.add_subplot()
    step = np.arange(1, len(windows.norm) + 1)
    axes.fill_between(
        step,
        windows.smallest,
        windows.largest,
        color=FAINT,
        linewidth=0,
        label="micro-batches, smallest to largest",
    )
    _figures.threshold(axes, max_norm, f"max_norm = {max_norm:g}")
    cut = windows.is_clipped
    axes.vlines(
        step[cut],
        max_norm,
        windows.norm[cut],
        color=VERMILLION,
        linewidth=0.8,
        label="taken off by the clip",
    )
    for which, color, name in ((~cut, BLUE, "left alone"), (cut, VERMILLION, "before the clip")):
        label = f"average of a window, {name} ({which.sum()})"
        axes.plot(step[which], windows.norm[which], ".", color=color, markersize=5, label=label)
    axes.set(title="Gradient norms of a small network that learns to read digits", yscale="log")
    axes.set(
        xlabel=f"optimizer step: a window of {ACCUM_STEPS} micro-batches", ylabel="gradient norm"
    )
    _figures.plain_ticks(axes.yaxis)
    axes.margins(x=0.01)
    figure.legend(loc="outside upper center", ncols=2)
    _figures.save(figure, path)


def main(argv: list[str] | None = None) -> float:
    """Trains, reports, and returns the accuracy on the test images."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=22)
    parser.add_argument("--max-norm", type=float, default=MAX_NORM)
    parser.add_argument("--out", type=Path, default=Path("out/train_digits.png"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    train_images, test_images, train_labels, test_labels = _common.digits()
    model = DigitNet(nnx.Rngs(args.seed))
    # Clip inside of accumulate: what is clipped is the window's average, not each micro-batch.
    tx = shrewjax.accumulate(
        optax.chain(shrewjax.clip_by_global_norm(args.max_norm), optax.adamw(LEARNING_RATE)),
        ACCUM_STEPS,
    )
    optimizer = shrewjax.flax.Optimizer(model, tx, wrt=nnx.Param)

    batches = list(_common.shuffled_batches(len(train_labels), MICRO_BATCH, args.epochs, args.seed))
    history = []
    with tqdm(batches, unit="batch") as bar:
        for step, rows in enumerate(bar, start=1):
            # The last window may be incomplete. As an array, the flag is traced, and the flush compiles nothing anew.
            flush = jnp.asarray(step == len(batches))
            history.append(
                train_step(model, optimizer, train_images[rows], train_labels[rows], flush)
            )
            if step % 20 == 0 or step == len(batches):  # reading a value waits for the device
                bar.set_postfix_str(
                    f"loss {history[-1]['loss']:.3f}, gradient norm {history[-1][GRAD_NORM]:.3f}"
                )

    windows = windows_of(_common.columns(history))
    test_accuracy = float(accuracy(model, test_images, test_labels))

    print(f"test accuracy: {test_accuracy:.4f}")
    print(f"clipped windows: {windows.is_clipped.mean():.0%} of {len(windows.norm)}")
    plot_norms(windows, args.max_norm, args.out)
    return test_accuracy


if __name__ == "__main__":
    main()
