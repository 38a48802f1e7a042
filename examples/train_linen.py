"""Trains in float16 with linen's TrainState: unscale, check, accumulate, clip, step, in this order.

float16 ends at 65504 and, near zero, at 6e-8, so the loss is multiplied by a scale that keeps the gradients in between:
Flax's `DynamicScale` doubles it now and then and halves it when something overflowed. The order of the steps:

1. unscale: `DynamicScale.value_and_grad` hands out float32 gradients, divided by the scale that they were made with.
   The scale changes within a window, so a sum of gradients that are not unscaled means nothing.
2. check: an overflow is a NaN or an infinity by now. With `nonfinite="drop_micro_batch"` that micro-batch weighs 0.
3. accumulate: in float32, by the number of examples that came.
4. clip: the average, once a window, in units that do not depend on the scale.
5. step: the optimizer, whose moments have seen no infinity.

Run it with

    python -m pip install -e '.[examples]'
    python examples/train_linen.py

It takes well under a minute on two CPU cores (expect no speed from float16 on those), prints the accuracy on held-out
digits and how many micro-batches overflowed, and writes out/train_linen.png.
"""

import argparse
from pathlib import Path
from typing import Any

import _common
import _figures
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _figures import VERMILLION
from flax import linen
from flax.training.dynamic_scale import DynamicScale
from matplotlib.figure import Figure
from tqdm import tqdm

import shrewjax
import shrewjax.flax

MICRO_BATCH, ACCUM_STEPS = 32, 4
LEARNING_RATE, MAX_NORM = 3e-3, 1.0
FIRST_SCALE = 2.0**16
GROWTH_INTERVAL = (
    25  # micro-batches without overflow before the scale doubles; 2000 for training that takes days
)


class ScaledState(shrewjax.flax.TrainState):
    """A train state with Flax's loss scale.

    `step` counts micro-batches; optimizer steps, which schedules inside `accumulate` see, are its state's `windows`.
    """

    loss_scale: DynamicScale


class DigitNet(linen.Module):
    """Three layers that compute in float16, with parameters in float32."""

    @linen.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits of shape (batch, 10) from images of shape (batch, 8, 8, 1)."""
        x = images.reshape(len(images), -1)
        for width in (128, 128):
            x = linen.relu(linen.Dense(width, dtype=jnp.float16)(x))
        return linen.Dense(10, dtype=jnp.float16)(x)


def create_state(seed: int, sample: np.ndarray) -> ScaledState:
    """Parameters and an optimizer that sees the clipped average of ACCUM_STEPS micro-batches."""
    model = DigitNet()
    clip_and_adam = optax.chain(shrewjax.clip_by_global_norm(MAX_NORM), optax.adamw(LEARNING_RATE))
    return ScaledState.create(
        apply_fn=model.apply,
        params=jax.jit(model.init)(jax.random.key(seed), sample)["params"],
        tx=shrewjax.accumulate(clip_and_adam, ACCUM_STEPS, nonfinite="drop_micro_batch"),
        # Typed from the start: Python's numbers would come back as arrays of fixed types, and compile the step again.
        loss_scale=DynamicScale(
            growth_interval=GROWTH_INTERVAL, fin_steps=jnp.int32(0), scale=jnp.float32(FIRST_SCALE)
        ),
    )


def train_step(
    state: ScaledState, images: jax.Array, labels: jax.Array, flush: jax.Array
) -> tuple[ScaledState, dict[str, jax.Array]]:
    """Takes one micro-batch; the new state and what was measured."""

    def mean_loss(params: Any) -> jax.Array:
        logits = state.apply_fn({"params": params}, images).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    # `accumulate` checks for itself. To spare the second check, drop the policy and pass weight=finite * count.
    loss_scale, _, loss, grads = state.loss_scale.value_and_grad(mean_loss)(state.params)
    used_scale = state.loss_scale.scale
    state = state.apply_gradients(
        grads=grads, weight=len(labels), flush=flush, loss_scale=loss_scale
    )
    return state, {"loss": loss, "loss_scale": used_scale} | shrewjax.metrics(state.opt_state)


@jax.jit
def accuracy(state: ScaledState, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The share of images whose largest logit is that of their label."""
    return (state.apply_fn({"params": state.params}, images).argmax(axis=-1) == labels).mean()


def plot(history: dict[str, np.ndarray], path: Path) -> None:
    """Draws the loss scale at each micro-batch, where it was too large, and the gradient norm of each window."""
    figure = Figure(figsize=(8, 6))
    scale_axes, norm_axes = figure.subplots(2, sharex=True)
    micro_batch = np.arange(1, len(history["loss"]) + 1)
    overflowed = np.diff(history["accumulate/dropped"], prepend=0) > 0
    scale_axes.step(
        micro_batch, history["loss_scale"], where="mid", linewidth=1, label="loss scale"
    )
    scale_axes.plot(
        micro_batch[overflowed],
        history["loss_scale"][overflowed],
        "x",
        color=VERMILLION,
        label="overflow: the micro-batch is dropped",
    )
    scale_axes.set_yscale("log", base=2)
    scale_axes.set(title="Training in float16", ylabel="loss scale")
    scale_axes.legend()
    closed = history["accumulate/applied"]
    norm_axes.plot(
        micro_batch[closed], history["clip_by_global_norm/grad_norm"][closed], ".", markersize=4
    )
    _figures.threshold(norm_axes, MAX_NORM, f"max_norm = {MAX_NORM:g}")
    norm_axes.set(yscale="log", xlabel="micro-batch", ylabel="gradient norm of each window")
    _figures.plain_ticks(norm_axes.yaxis)
    _figures.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Trains, reports and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("out/train_linen.png"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    train_images, test_images, train_labels, test_labels = _common.digits()
    state = create_state(args.seed, train_images[:1])
    step = jax.jit(train_step, donate_argnums=0)
    batches = list(_common.shuffled_batches(len(train_labels), MICRO_BATCH, args.epochs, args.seed))
    history = []
    with tqdm(batches, unit="batch") as bar:
        for number, rows in enumerate(bar, start=1):
            flush = jnp.asarray(number == len(batches))
            state, measured = step(state, train_images[rows], train_labels[rows], flush)
            history.append(measured)
            if number % 20 == 0:  # reading a value waits for the device
                bar.set_postfix_str(
                    f"loss {measured['loss']:.3f}, loss scale {measured['loss_scale']:.0f}"
                )

    history = _common.columns(history)
    halved = (np.diff(history["loss_scale"], append=state.loss_scale.scale) < 0).sum()
    print(f"test accuracy: {accuracy(state, test_images, test_labels):.4f}")
    print(f"optimizer steps: {history['accumulate/windows'][-1]} from {state.step} micro-batches")
    print(
        f"micro-batches dropped: {history['accumulate/dropped'][-1]}; loss scale halved: {halved} times"
    )
    plot(history, args.out)


if __name__ == "__main__":
    main()
