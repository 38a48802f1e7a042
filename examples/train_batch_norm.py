"""Trains a linen model with batch normalization: its running statistics go from micro-batch to micro-batch.

Batch normalization has two sides. In training each micro-batch is normalized by its own mean and variance, so micro-
batches are not one large batch, and their number changes the model a little. And each of them moves the running mean
and variance that evaluation uses. These are no parameters and have no gradient: they come in as an argument of the loss
and go out beside it. With `carry_argnum`, `shrewjax.value_and_grad` hands them from one micro-batch to the next. What
carries other state, such as the amax of fp8, does the same.

Run it with

    python -m pip install -e '.[examples]'
    python examples/train_batch_norm.py

It takes well under a minute on two CPU cores, trains with 1 micro-batch a step and with 8, prints the accuracy of both
on held-out digits and how far the running mean is from the data's, and writes out/train_batch_norm.png.
"""

import argparse
from pathlib import Path
from typing import Any

import _common
import _figures
import jax
import numpy as np
import optax
from flax import linen
from flax.training.train_state import TrainState
from matplotlib.figure import Figure
from tqdm import tqdm

import shrewjax

BATCH, MICRO_BATCHES = 128, 8
LEARNING_RATE, MAX_NORM, MOMENTUM = 3e-3, 1.0, 0.95


class NormalizedState(TrainState):
    """A TrainState with the running statistics."""

    batch_stats: Any


class DigitNet(linen.Module):
    """Normalized images, and two layers."""

    @linen.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Logits of shape (batch, 10) from images of shape (batch, 8, 8, 1)."""
        x = images.reshape(len(images), -1)
        x = linen.BatchNorm(not train, momentum=MOMENTUM, name="input")(x)
        x = linen.Dense(128)(x)
        x = linen.relu(linen.BatchNorm(not train, momentum=MOMENTUM)(x))
        return linen.Dense(10)(x)


def create_state(seed: int, sample: np.ndarray) -> NormalizedState:
    """Parameters, statistics, and an optimizer that sees the whole batch's gradients."""
    model = DigitNet()
    variables = jax.jit(model.init, static_argnames="train")(
        jax.random.key(seed), sample, train=False
    )
    tx = optax.chain(shrewjax.clip_by_global_norm(MAX_NORM), optax.adamw(LEARNING_RATE))
    return NormalizedState.create(
        apply_fn=model.apply,
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        tx=tx,
    )


def train_step(
    state: NormalizedState, images: jax.Array, labels: jax.Array, micro_batches: int
) -> tuple[NormalizedState, dict[str, jax.Array]]:
    """Takes one batch; the new state and what was measured."""

    def mean_loss(
        params: Any, images: jax.Array, labels: jax.Array, batch_stats: Any
    ) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": batch_stats}
        logits, changed = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        aux = {"accuracy": (logits.argmax(axis=-1) == labels).mean()}
        return loss, (aux, changed["batch_stats"])

    step = shrewjax.accumulated_value_and_grad(
        mean_loss, micro_batches, has_aux=True, carry_argnum=3
    )
    (loss, (aux, batch_stats)), grads = step(state.params, images, labels, state.batch_stats)
    state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
    return state, {"loss": loss, **aux, **shrewjax.metrics(state.opt_state)}


@jax.jit
def accuracy(state: NormalizedState, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The share of images whose largest logit is that of their label, by the running statistics."""
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    return (state.apply_fn(variables, images, train=False).argmax(axis=-1) == labels).mean()


def plot(histories: dict[int, dict[str, np.ndarray]], path: Path) -> None:
    """Draws the losses of both."""
    figure = Figure(figsize=(8, 4))
    axes = figure.subplots()
    for micro_batches, history in histories.items():
        plural = "es" if micro_batches > 1 else ""
        label = f"{micro_batches} micro-batch{plural} of {BATCH // micro_batches} images"
        axes.plot(np.arange(1, len(history["loss"]) + 1), history["loss"], linewidth=1, label=label)
    axes.set(title="Loss with batch normalization, by the size of the micro-batches", yscale="log")
    axes.set(xlabel=f"step, each of {BATCH} images", ylabel="loss (nats)")
    _figures.plain_ticks(axes.yaxis)
    axes.legend()
    _figures.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Trains, reports and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("out/train_batch_norm.png"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    train_images, test_images, train_labels, test_labels = _common.digits()
    histories = {}
    for micro_batches in (1, MICRO_BATCHES):
        state = create_state(args.seed, train_images[:1])
        step = jax.jit(train_step, static_argnames="micro_batches", donate_argnums=0)
        rows = list(_common.shuffled_batches(len(train_labels), BATCH, args.epochs, args.seed))
        batches = [
            chosen for chosen in rows if len(chosen) == BATCH
        ]  # an epoch's last one is smaller
        history = []
        for chosen in tqdm(batches, unit="batch"):
            state, measured = step(
                state, train_images[chosen], train_labels[chosen], micro_batches=micro_batches
            )
            history.append(measured)
        histories[micro_batches] = _common.columns(history)
        plural = "es" if micro_batches > 1 else ""
        print(
            f"{micro_batches} micro-batch{plural} a step: test accuracy {accuracy(state, test_images, test_labels):.4f}"
        )

    mean = train_images.reshape(len(train_images), -1).mean(axis=0)
    error = np.linalg.norm(state.batch_stats["input"]["mean"] - mean) / np.linalg.norm(mean)
    print(f"running mean: off by {error:.4f} of the data's")
    plot(histories, args.out)


if __name__ == "__main__":
    main()
