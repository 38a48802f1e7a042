"""Trains a small transformer on Python's documentation, from micro-batches with very different numbers of characters.

Paragraphs differ in length, and so do micro-batches of them: here, as in loaders that save padding, paragraphs of like
length go together. The loss is a mean over the characters of a micro-batch. The mean of such means is not the mean over
the window, and neither is its gradient: a character counts for more where there are fewer. With `weight=` the number
of characters, the window equals the one large batch. The example measures both against that batch, as it trains.

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
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from tqdm import tqdm

import shrewjax

MICRO_BATCH, ACCUM_STEPS = 8, 4
WIDTH, HEADS = 64, 4
LEARNING_RATE, MAX_NORM = 3e-3, 1.0
SHORTEST = 32  # a micro-batch is padded to this length, or twice, four times, ... as much


WINDOW = shrewjax.GradAccumulator(ACCUM_STEPS)  # an accumulation without an optimizer, to look at its average


class Texts(NamedTuple):
    """Paragraphs of one micro-batch, padded."""

    codes: np.ndarray  # shape (paragraphs, length), int32
    lengths: np.ndarray  # shape (paragraphs,), int32

    @property
    def predicted(self) -> int:
        """The number of characters that have one before them, which the loss is a mean over."""
        return int((self.lengths - 1).sum())


class Block(nnx.Module):
    """Attention to what came before, and two linear layers, each added to what it read."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.attention_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Shape (batch, length, WIDTH) in and out."""
        x = x + self.attention(self.attention_norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class CharacterTransformer(nnx.Module):
    """The next character's logits at every position."""

    def __init__(self, characters: int, longest: int, layers: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(characters, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(longest, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.readout = nnx.Linear(WIDTH, characters, rngs=rngs)

    def __call__(self, codes: jax.Array) -> jax.Array:
        """Logits of shape (batch, length, characters) from codes of shape (batch, length), int32."""
        x = self.embed(codes) + self.positions(jnp.arange(codes.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.readout(self.norm(x))


def paragraphs(longest: int) -> tuple[list[np.ndarray], int]:
    """Python's documentation in codes, cut at its empty lines and after `longest` characters; the number of codes."""
    texts, alphabet = _common.documentation()
    whole = [part for text in texts for part in re.split(r"\n\s*\n", text)]
    cut = [part[i : i + longest] for part in whole for i in range(0, len(part), longest)]
    return [np.array([alphabet[c] for c in part], np.int32) for part in cut if len(part) > 1], len(alphabet)


def padded(texts: list[np.ndarray], length: int) -> Texts:
    """Zeros after the end of each; the loss does not look there."""
    codes = np.zeros((len(texts), length), np.int32)
    for row, text in zip(codes, texts, strict=True):
        row[: len(text)] = text
    return Texts(codes, np.array([len(text) for text in texts], np.int32))


def windows(texts: list[np.ndarray], number: int, longest: int, seed: int) -> Iterator[list[Texts]]:
    """Lists of ACCUM_STEPS micro-batches: paragraphs at random, sorted by length within the window."""
    rng = np.random.default_rng(seed)
    for _ in range(number):
        drawn = [texts[i] for i in rng.choice(len(texts), MICRO_BATCH * ACCUM_STEPS, replace=False)]
        drawn.sort(key=len)
        parts = [drawn[i : i + MICRO_BATCH] for i in range(0, len(drawn), MICRO_BATCH)]
        # Few lengths, as each is compiled for.
        yield [padded(part, min(longest, max(SHORTEST, 1 << (len(part[-1]) - 1).bit_length()))) for part in parts]


def joined(window: list[Texts]) -> Texts:
    """The one large batch."""
    longest = window[-1].codes.shape[1]
    codes = [np.pad(part.codes, ((0, 0), (0, longest - part.codes.shape[1]))) for part in window]
    return Texts(np.concatenate(codes), np.concatenate([part.lengths for part in window]))


def loss_of(graph: nnx.GraphDef) -> Callable[[nnx.State, Texts], jax.Array]:
    """The loss as a function of the weights: cross-entropy of each next character, averaged over those that exist."""

    def mean_loss(weights: nnx.State, texts: Texts) -> jax.Array:
        logits = nnx.merge(graph, weights)(texts.codes[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, texts.codes[:, 1:])
        exists = jnp.arange(1, texts.codes.shape[1]) < texts.lengths[:, None]
        return jnp.where(exists, losses, 0).sum() / exists.sum()

    return mean_loss


class Difference(NamedTuple):
    """How far a window's loss and gradient are from those of the one large batch."""

    loss: float  # the difference, in nats a character
    gradient: float  # the difference's norm, in norms of the large batch's gradient


def compare(
    loss_and_grad: Callable[[nnx.State, Texts], tuple[jax.Array, nnx.State]], weights: nnx.State, window: list[Texts]
) -> dict[str, Difference]:
    """Weighted by characters, and not, against the large batch."""
    whole_loss, whole = loss_and_grad(weights, joined(window))
    parts = [loss_and_grad(weights, part) for part in window]
    differences = {}
    for name, counts in (("weight=", [p.predicted for p in window]), ("mean of means", [1] * len(window))):
        state = WINDOW.init(weights)
        for (_, grads), weight in zip(parts, counts, strict=True):
            average, state = WINDOW.step(state, grads, weight)
        loss = np.average([float(loss) for loss, _ in parts], weights=counts)
        error = shrewjax.grad_norm(jax.tree.map(jnp.subtract, average, whole)) / shrewjax.grad_norm(whole)
        differences[name] = Difference(abs(loss - float(whole_loss)), float(error))
    return differences


def plot(losses: np.ndarray, counts: np.ndarray, compared: dict[int, dict[str, Difference]], path: Path) -> None:
    """The loss, the sizes of micro-batches, and both gradients' errors over training."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    loss_axes, size_axes, error_axes = figure.subplots(1, 3)
    loss_axes.plot(np.arange(1, len(losses) + 1), losses, linewidth=1)
    loss_axes.set(xlabel="window", ylabel="loss (nats a character)")
    size_axes.hist(counts.ravel(), bins=30)
    size_axes.set(xlabel="characters in a micro-batch", ylabel="micro-batches")
    for name in ("mean of means", "weight="):
        errors = [difference[name].gradient for difference in compared.values()]
        error_axes.plot(list(compared), errors, "o-", markersize=3, label=name)
    error_axes.set(yscale="log", xlabel="window", ylabel="gradient: distance from the large batch's / its norm")
    error_axes.legend(frameon=False)
    _common.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Trains with weights, compares on the way, reports and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=200)
    parser.add_argument("--length", type=int, default=128, help="longest paragraph, in characters")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--compare-every", type=int, default=20, help="windows between two comparisons")
    parser.add_argument("--out", type=Path, default=Path("out/train_transformer.png"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    texts, characters = paragraphs(args.length)
    model = CharacterTransformer(characters, args.length, args.layers, nnx.Rngs(args.seed))
    graph, weights = nnx.split(model, nnx.Param)
    schedule = optax.cosine_decay_schedule(LEARNING_RATE, args.windows)  # counts windows: it is inside
    tx = shrewjax.accumulate(optax.chain(shrewjax.clip_by_global_norm(MAX_NORM), optax.adamw(schedule)), ACCUM_STEPS)
    opt_state = tx.init(weights)
    loss_and_grad = jax.value_and_grad(loss_of(graph))

    def train_step(
        weights: nnx.State, opt_state: optax.OptState, texts: Texts, weight: int
    ) -> tuple[nnx.State, optax.OptState, jax.Array]:
        loss, grads = loss_and_grad(weights, texts)
        # In the place of nnx.Optimizer: a call that does not close the window does not touch the weights.
        weights, opt_state = shrewjax.apply_gradients(tx, grads, opt_state, weights, weight=weight)
        return weights, opt_state, loss

    train_step, measure = jax.jit(train_step, donate_argnums=(0, 1)), jax.jit(loss_and_grad)
    losses, counts, compared = [], [], {}
    with tqdm(windows(texts, args.windows, args.length, args.seed), total=args.windows, unit="window") as bar:
        for number, window in enumerate(bar, start=1):
            if number == 1 or number % args.compare_every == 0:
                compared[number] = compare(measure, weights, window)
                errors = [f"{name} off by {found.gradient:.1e}" for name, found in compared[number].items()]
                bar.set_postfix_str("gradient: " + ", ".join(errors))
            counts.append([part.predicted for part in window])
            for part, count in zip(window, counts[-1], strict=True):
                weights, opt_state, loss = train_step(weights, opt_state, part, count)
                losses.append(loss)

    counts = np.array(counts)
    by_window = np.average(np.array(jax.device_get(losses)).reshape(counts.shape), weights=counts, axis=1)
    print(f"characters in a micro-batch: {counts.min()} to {counts.max()}")
    print(f"loss a character: {by_window[0]:.3f} at first, {by_window[-10:].mean():.3f} at last")
    for name in ("weight=", "mean of means"):
        loss, gradient = (max(values) for values in zip(*(found[name] for found in compared.values()), strict=True))
        print(
            f"{name} against the large batch, at worst: loss off by {loss:.1e}, gradient by {gradient:.1e} of its norm"
        )
    plot(by_window, counts, compared, args.out)


if __name__ == "__main__":
    main()
