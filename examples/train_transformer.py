"""Trains a small transformer on Python's documentation: a whole batch of uneven texts in one call, with dropout.

A batch is 32 paragraphs, of two characters or of a hundred. `shrewjax.value_and_grad` takes them 8 at a time, inside
one jitted step, and needs the memory of 8. The loss is a mean over the characters of the batch, and stays as it is.
Loss and gradient are those of the one large batch. A mean of the micro-batches' means is another number, and so is
its gradient: a character counts for more where there are fewer. The example measures both against the large batch, as
it trains.

Run it with

    python -m pip install -e '.[examples]'
    python examples/train_transformer.py

It takes a minute or two on two CPU cores, downloads nothing, prints the loss and the differences, and writes
out/train_transformer.png. It shows that the gradients differ, and by how much; whether a model ends up the worse for
the wrong ones depends on whether short texts are unlike long ones.
"""

import argparse
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import _common
import _figures
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from tqdm import tqdm

import shrewjax

BATCH, MICRO_BATCHES = 32, 4
WIDTH, HEADS, DROPOUT = 64, 4, 0.05
LEARNING_RATE, MAX_NORM = 3e-3, 1.0


class Texts(NamedTuple):
    """Paragraphs, padded."""

    codes: np.ndarray  # shape (paragraphs, length), int32
    lengths: np.ndarray  # shape (paragraphs,), int32


class Block(nnx.Module):
    """Attention to what came before, and two linear layers, each added to what it read."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(DROPOUT)

    def __call__(self, x: jax.Array, key: jax.Array, deterministic: bool) -> jax.Array:
        """Shape (batch, length, WIDTH) in and out."""
        x = x + self.attention(self.attention_norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        wide = self.dropout(
            nnx.gelu(self.up(self.mlp_norm(x))), deterministic=deterministic, rngs=key
        )
        return x + self.down(wide)


class CharacterTransformer(nnx.Module):
    """The next character's logits at every position."""

    def __init__(self, characters: int, longest: int, layers: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(characters, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(longest, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.readout = nnx.Linear(WIDTH, characters, rngs=rngs)

    def __call__(self, codes: jax.Array, key: jax.Array, deterministic: bool = False) -> jax.Array:
        """Logits of shape (batch, length, characters) from codes of shape (batch, length), int32."""
        x = self.embed(codes) + self.positions(jnp.arange(codes.shape[1]))
        for block, block_key in zip(
            self.blocks, jax.random.split(key, len(self.blocks)), strict=True
        ):
            x = block(x, block_key, deterministic)
        return self.readout(self.norm(x))


def paragraphs(longest: int) -> tuple[list[np.ndarray], int]:
    """Python's documentation in codes, cut at its empty lines and after `longest` characters; the number of codes."""
    texts, alphabet = _common.documentation()
    whole = [part for text in texts for part in re.split(r"\n\s*\n", text)]
    cut = [part[i : i + longest] for part in whole for i in range(0, len(part), longest)]
    return [np.array([alphabet[c] for c in part], np.int32) for part in cut if len(part) > 1], len(
        alphabet
    )


def padded(texts: list[np.ndarray], length: int) -> Texts:
    """Zeros after the end of each text; the loss does not look there."""
    codes = np.zeros((len(texts), length), np.int32)
    for row, text in zip(codes, texts, strict=True):
        row[: len(text)] = text
    return Texts(codes, np.array([len(text) for text in texts], np.int32))


def batches(texts: list[np.ndarray], number: int, longest: int, seed: int) -> Iterator[Texts]:
    """Paragraphs at random."""
    rng = np.random.default_rng(seed)
    for _ in range(number):
        yield padded([texts[i] for i in rng.choice(len(texts), BATCH, replace=False)], longest)


def loss_of(graph: nnx.GraphDef) -> Callable[..., jax.Array]:
    """The loss as a function of the weights: cross-entropy of each next character, averaged over those that exist."""

    def mean_loss(
        weights: nnx.State, texts: Texts, key: jax.Array, *, deterministic: bool = False
    ) -> jax.Array:
        logits = nnx.merge(graph, weights)(texts.codes[:, :-1], key, deterministic)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, texts.codes[:, 1:])
        exists = jnp.arange(1, texts.codes.shape[1]) < texts.lengths[:, None]
        return jnp.where(exists, losses, 0).sum() / exists.sum()

    return mean_loss


class Difference(NamedTuple):
    """How far a step's loss and gradient are from those of the one large batch."""

    loss: float  # the difference, in nats a character
    gradient: float  # the difference's norm, in norms of the large batch's gradient


def comparison(mean_loss: Callable[..., jax.Array]) -> Callable[..., dict[str, Difference]]:
    """Compares the divided loss, and a mean of the micro-batches' means, with the large batch, without dropout."""
    sides = {
        "value_and_grad": shrewjax.value_and_grad(mean_loss, MICRO_BATCHES),
        "mean of means": shrewjax.accumulated_value_and_grad(
            mean_loss, MICRO_BATCHES, rng_argnums=2
        ),
    }

    @jax.jit
    def compare(weights: nnx.State, texts: Texts, key: jax.Array) -> dict[str, Difference]:
        whole_loss, whole = jax.value_and_grad(mean_loss)(weights, texts, key, deterministic=True)
        differences = {}
        for name, step in sides.items():
            loss, grads = step(weights, texts, key, deterministic=True)
            error = shrewjax.grad_norm(
                jax.tree.map(jnp.subtract, grads, whole)
            ) / shrewjax.grad_norm(whole)
            differences[name] = Difference(abs(loss - whole_loss), error)
        return differences

    return compare


def plot(
    losses: np.ndarray, counts: np.ndarray, compared: dict[int, dict[str, Difference]], path: Path
) -> None:
    """Draws the loss, the sizes of micro-batches, and both gradients' errors over training."""
    figure = Figure(figsize=(8, 7))
    loss_axes, size_axes, error_axes = figure.subplot_mosaic("LL;SE").values()
    loss_axes.plot(np.arange(1, len(losses) + 1), losses, linewidth=1)
    loss_axes.set(title="Loss", xlabel="step", ylabel="nats per character")
    size_axes.hist(counts.ravel(), bins=30)
    size_axes.set(
        title="Sizes of the micro-batches",
        xlabel="characters in a micro-batch",
        ylabel="micro-batches",
    )
    for name in ("mean of means", "value_and_grad"):
        errors = [difference[name].gradient for difference in compared.values()]
        error_axes.plot(list(compared), errors, "o-", markersize=3, label=name)
    error_axes.set(yscale="log", xlabel="step", ylabel="relative to its norm")
    error_axes.set(title="Gradient: distance from the large batch's")
    error_axes.legend()
    _figures.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Trains, compares on the way, reports and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--length", type=int, default=128, help="longest paragraph, in characters")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--compare-every", type=int, default=20, help="steps between two comparisons"
    )
    parser.add_argument("--out", type=Path, default=Path("out/train_transformer.png"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    texts, characters = paragraphs(args.length)
    model = CharacterTransformer(characters, args.length, args.layers, nnx.Rngs(args.seed))
    graph, weights = nnx.split(model, nnx.Param)
    schedule = optax.cosine_decay_schedule(LEARNING_RATE, args.steps)
    tx = optax.chain(shrewjax.clip_by_global_norm(MAX_NORM), optax.adamw(schedule))
    opt_state = tx.init(weights)
    mean_loss = loss_of(graph)
    loss_and_grad = shrewjax.value_and_grad(mean_loss, MICRO_BATCHES)

    def train_step(
        weights: nnx.State, opt_state: optax.OptState, texts: Texts, key: jax.Array
    ) -> tuple[nnx.State, optax.OptState, jax.Array]:
        loss, grads = loss_and_grad(weights, texts, key)
        weights, opt_state = shrewjax.apply_gradients(tx, grads, opt_state, weights)
        return weights, opt_state, loss

    train_step, compare = jax.jit(train_step, donate_argnums=(0, 1)), comparison(mean_loss)
    losses, counts, compared = [], [], {}
    with tqdm(
        batches(texts, args.steps, args.length, args.seed), total=args.steps, unit="step"
    ) as bar:
        for number, batch in enumerate(bar, start=1):
            key = jax.random.fold_in(jax.random.key(args.seed), number)
            if number == 1 or number % args.compare_every == 0:
                compared[number] = jax.device_get(compare(weights, batch, key))
                errors = [
                    f"{name} off by {found.gradient:.1e}"
                    for name, found in compared[number].items()
                ]
                bar.set_postfix_str("gradient: " + ", ".join(errors))
            counts.append(
                [(batch.lengths[i::MICRO_BATCHES] - 1).sum() for i in range(MICRO_BATCHES)]
            )
            weights, opt_state, loss = train_step(weights, opt_state, batch, key)
            losses.append(loss)

    counts, losses = np.array(counts), np.array(jax.device_get(losses))
    print(f"characters in a micro-batch: {counts.min()} to {counts.max()}")
    print(f"loss a character: {losses[0]:.3f} at first, {losses[-10:].mean():.3f} at last")
    for name in ("value_and_grad", "mean of means"):
        loss, gradient = (
            max(values)
            for values in zip(*(found[name] for found in compared.values()), strict=True)
        )
        print(
            f"{name} against the large batch, at worst: loss off by {loss:.1e}, gradient by {gradient:.1e} of its norm"
        )
    plot(losses, counts, compared, args.out)


if __name__ == "__main__":
    main()
