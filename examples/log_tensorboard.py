"""Logs what clipping and accumulation measured to TensorBoard, without waiting for the device at every step.

Plain JAX and Optax: a small network learns to tell malignant from benign breast tumours by 30 measurements
(scikit-learn's copy of the Wisconsin data). The jitted step returns `shrewjax.metrics`, a dictionary of scalars by
name. They stay on the device until enough have come to be fetched at once, and those of calls that did not close a
window are left out: there, what is measured inside dates from the window before.

Run it with

    python -m pip install -e '.[examples]' tensorboard
    python examples/log_tensorboard.py
    tensorboard --logdir out/tensorboard

It takes a few seconds on two CPU cores, downloads nothing, prints the accuracy on held-out patients, and writes an
event file, in which the step is the number of optimizer steps. TensorBoard itself is only needed to look at it.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from tensorboardX import SummaryWriter
from tqdm import tqdm

import shrewjax

MICRO_BATCH, ACCUM_STEPS = 16, 4
LEARNING_RATE, WIDTH = 3e-3, 32
FETCH_EVERY = 50  # micro-batches

Params = list[dict[str, jax.Array]]

# A threshold that follows the norms, so that there is something to see, inside of a guard against steps that diverge.
# The first clip clips nothing. It measures the norm of each leaf.
CLIPS = (
    shrewjax.clip_by_global_norm(float("inf"), per_leaf=True),
    shrewjax.clip_by_norm_percentile(90.0),
)
TX = shrewjax.accumulate(
    shrewjax.skip_nonfinite(optax.chain(*CLIPS, optax.adamw(LEARNING_RATE))),
    ACCUM_STEPS,
)


def init_params(seed: int) -> Params:
    """Two layers, one logit."""
    rng = np.random.default_rng(seed)
    return [
        {
            "kernel": jnp.asarray(
                (2 / rows) ** 0.5 * rng.standard_normal((rows, columns), np.float32)
            ),
            "bias": jnp.zeros(columns),
        }
        for rows, columns in ((30, WIDTH), (WIDTH, WIDTH), (WIDTH, 1))
    ]


@jax.jit
def logits(params: Params, x: jax.Array) -> jax.Array:
    """Positive for benign. Shape (batch,) from (batch, 30)."""
    *hidden, last = params
    for layer in hidden:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    return (x @ last["kernel"] + last["bias"])[:, 0]


def mean_loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Cross-entropy, averaged over the micro-batch."""
    return optax.sigmoid_binary_cross_entropy(logits(params, x), y).mean()


def train_step(
    params: Params, opt_state: optax.OptState, x: jax.Array, y: jax.Array, flush: jax.Array
) -> tuple[Params, optax.OptState, dict[str, jax.Array]]:
    """Takes one micro-batch."""
    loss, grads = jax.value_and_grad(mean_loss)(params, x, y)
    params, opt_state = shrewjax.apply_gradients(
        TX, grads, opt_state, params, weight=len(y), flush=flush
    )
    return params, opt_state, {"loss": loss} | shrewjax.metrics(opt_state)


def write(writer: SummaryWriter, fetched: list[dict[str, Any]]) -> None:
    """The scalars of the calls that closed a window, at the number of windows closed so far."""
    for measured in fetched:
        if measured["accumulate/applied"]:
            for name, value in measured.items():
                writer.add_scalar(
                    f"train/{name}", float(value), int(measured["accumulate/windows"])
                )


def main(argv: list[str] | None = None) -> None:
    """Trains, logs and reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("out/tensorboard"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    x, y = load_breast_cancer(return_X_y=True)
    train_x, test_x, train_y, test_y = train_test_split(
        x, y, test_size=0.25, stratify=y, random_state=0
    )
    mean, std = train_x.mean(axis=0), train_x.std(axis=0)
    train_x, test_x = (((part - mean) / std).astype(np.float32) for part in (train_x, test_x))
    train_y = train_y.astype(np.float32)

    params = init_params(args.seed)
    opt_state = TX.init(params)
    step = jax.jit(train_step, donate_argnums=(0, 1))
    rng = np.random.default_rng(args.seed)
    waiting = []
    with SummaryWriter(str(args.out)) as writer, tqdm(range(args.epochs), unit="epoch") as bar:
        for _ in bar:
            # Without its last rows, which would be a batch of another size and compile another program.
            order = rng.permutation(len(train_y) // MICRO_BATCH * MICRO_BATCH).reshape(
                -1, MICRO_BATCH
            )
            for number, rows in enumerate(order, start=1):
                flush = jnp.asarray(
                    number == len(order)
                )  # windows do not reach over the end of an epoch
                params, opt_state, measured = step(
                    params, opt_state, train_x[rows], train_y[rows], flush
                )
                waiting.append(measured)
                if len(waiting) == FETCH_EVERY:
                    write(writer, jax.device_get(waiting))
                    waiting.clear()
            correct = (np.asarray(logits(params, test_x)) > 0) == test_y
            writer.add_scalar("test/accuracy", correct.mean(), int(opt_state.windows))
            bar.set_postfix_str(f"loss {measured['loss']:.3f}, test accuracy {correct.mean():.3f}")
        write(writer, jax.device_get(waiting))

    print(f"test accuracy: {correct.mean():.4f} after {opt_state.windows} optimizer steps")
    print(f"events: {args.out}")


if __name__ == "__main__":
    main()
