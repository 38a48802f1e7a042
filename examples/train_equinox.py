"""Trains an Equinox model on five digits, then freezes its body and trains a new head on all ten.

An Equinox model is a pytree that holds arrays to train, arrays to leave alone, and things that are no arrays, such as
activation functions. `eqx.partition` splits it in two trees of the same shape, each with None where the other has a
leaf. Gradients, clip and accumulator see the trained half only: a None is no leaf, counts in no norm and holds no sum.

Run it with

    python -m pip install -e '.[examples]'
    python examples/train_equinox.py

It takes well under a minute on two CPU cores, prints the accuracy on held-out images of the digits seen first and of
those that only the new head has seen, and writes out/train_equinox.png.
"""

import argparse
from pathlib import Path
from typing import Any

import _common
import _figures
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import tqdm

import shrewjax

MICRO_BATCH, ACCUM_STEPS = 32, 2
LEARNING_RATE, MAX_NORM = 1e-2, 1.0


class DigitNet(eqx.Module):
    """A body of two layers and a linear head: one 8 x 8 x 1 image in, 10 logits out."""

    body: eqx.nn.MLP
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        body_key, head_key = jax.random.split(key)
        self.body = eqx.nn.MLP(64, 128, 128, depth=1, final_activation=jax.nn.relu, key=body_key)
        self.head = eqx.nn.Linear(128, 10, key=head_key)

    def __call__(self, image: jax.Array) -> jax.Array:
        """Logits of shape (10,) from an image of shape (8, 8, 1)."""
        return self.head(self.body(image.ravel()))


TX = shrewjax.accumulate(
    optax.chain(shrewjax.clip_by_global_norm(MAX_NORM), optax.adamw(LEARNING_RATE)), ACCUM_STEPS
)


def mean_loss(
    trained: DigitNet, frozen: DigitNet, images: jax.Array, labels: jax.Array
) -> jax.Array:
    """Cross-entropy, averaged over the micro-batch; differentiated with respect to the half that is trained."""
    logits = jax.vmap(eqx.combine(trained, frozen))(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


# The frozen half comes first and is not donated, as it is wanted again; what is handed back is.
@eqx.filter_jit(donate="all-except-first")
def train_step(
    frozen: DigitNet,
    trained: DigitNet,
    opt_state: optax.OptState,
    images: jax.Array,
    labels: jax.Array,
    flush: jax.Array,
) -> tuple[DigitNet, optax.OptState, jax.Array]:
    """Takes one micro-batch. Frozen leaves, and those that are no arrays, are None in `trained` and its gradient."""
    loss, grads = eqx.filter_value_and_grad(mean_loss)(trained, frozen, images, labels)
    # In the place of tx.update and eqx.apply_updates: a call that does not close the window writes no parameters.
    trained, opt_state = shrewjax.apply_gradients(TX, grads, opt_state, trained, flush=flush)
    return trained, opt_state, loss


def size(tree: Any) -> int:
    """How many numbers its arrays hold."""
    return sum(x.size for x in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))


def fit(
    model: DigitNet,
    trainable: DigitNet,
    images: np.ndarray,
    labels: np.ndarray,
    epochs: int,
    seed: int,
) -> DigitNet:
    """Trains the leaves that are True in `trainable`, which has the model's structure."""
    # Copied, as the step writes over what it is given, and the caller may want the model.
    trained, frozen = eqx.partition(
        jax.tree.map(lambda x: jnp.copy(x) if eqx.is_array(x) else x, model), trainable
    )
    opt_state = TX.init(trained)
    print(
        f"training {size(trained)} of {size(model)} numbers, with {size(opt_state.gradient_sum)} in the accumulator"
    )
    # Every batch has the same size, because JAX compiles for each size. Several sizes would need weight=len(labels).
    batches = [
        b
        for b in _common.shuffled_batches(len(labels), MICRO_BATCH, epochs, seed)
        if len(b) == MICRO_BATCH
    ]
    with tqdm(batches, unit="batch") as bar:
        for step, rows in enumerate(bar, start=1):
            flush = jnp.asarray(step == len(batches))
            trained, opt_state, loss = train_step(
                frozen, trained, opt_state, images[rows], labels[rows], flush
            )
            if step % 20 == 0:  # reading a value waits for the device
                bar.set_postfix_str(
                    f"loss {loss:.3f}, gradient norm {opt_state.inner_state[0].grad_norm:.3f}"
                )
    return eqx.combine(trained, frozen)


@eqx.filter_jit
def hits(model: DigitNet, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Whether each image's largest logit is that of its label."""
    return jax.vmap(model)(images).argmax(axis=-1) == labels


def plot(shares: dict[str, np.ndarray], path: Path) -> None:
    """Draws the accuracy by digit, before and after."""
    figure = Figure(figsize=(8, 4))
    axes = figure.add_subplot()
    for offset, (name, share) in zip((-0.2, 0.2), shares.items(), strict=True):
        axes.bar(np.arange(10) + offset, 100 * share, width=0.4, label=name)
    axes.set(xlabel="digit", ylabel="held-out images recognized (%)", xticks=range(10))
    axes.set(title="A new head on a frozen body learns digits that the body has never seen")
    figure.legend(loc="outside upper center", ncols=2)
    _figures.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Trains twice, reports and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30, help="of each of the two trainings")
    parser.add_argument("--out", type=Path, default=Path("out/train_equinox.png"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    train_images, test_images, train_labels, test_labels = _common.digits()
    first_half = train_labels < 5
    body_key, head_key = jax.random.split(jax.random.key(args.seed))
    model = DigitNet(body_key)
    everything = jax.tree.map(eqx.is_inexact_array, model)
    before = fit(
        model,
        everything,
        train_images[first_half],
        train_labels[first_half],
        args.epochs,
        args.seed,
    )

    fresh = eqx.tree_at(lambda m: m.head, before, eqx.nn.Linear(128, 10, key=head_key))
    nothing = jax.tree.map(lambda _: False, model)
    head_only = eqx.tree_at(lambda m: m.head, nothing, everything.head)
    after = fit(fresh, head_only, train_images, train_labels, args.epochs, args.seed)

    shares = {}
    for name, trained in (
        ("all trained on 0 to 4", before),
        ("new head on all, body frozen", after),
    ):
        hit = np.asarray(hits(trained, test_images, test_labels))
        shares[name] = np.array([hit[test_labels == digit].mean() for digit in range(10)])
        seen = test_labels < 5
        print(
            f"{name}: {hit[seen].mean():.1%} of digits 0 to 4, {hit[~seen].mean():.1%} of digits 5 to 9"
        )
    print(f"body unchanged: {bool(eqx.tree_equal(before.body, after.body))}")
    plot(shares, args.out)


if __name__ == "__main__":
    main()
