"""Trains three small models under seven clips and without one, and draws what each clip did to the loss.

* `transformer`: three scanned layers with norms learn Python's documentation, character by character. Adam, with a
  warm-up and a decay of the rate.
* `no norms`: the same layers without norms, and larger weights at first. AdamW at one rate from the first step on.
* `GRU`: reads handwritten digits, one row of pixels after the other. SGD with momentum, at one rate.

Each job runs at a rate that suits it, at a high rate, and at one that is too high. A fourth run has the first rate and
nine bad batches: characters drawn at random, or pixels that someone forgot to divide by 16. A seed has the same weights
and batches under all rules, so that each difference is one within a seed.

Two thresholds are measured: the median and the 90th percentile of the norms at the rate that suits, without the first
quarter of the steps.

Run it with

    python -m pip install -e '.[examples]'
    python examples/which_rule.py

It takes ten minutes of one CPU core and downloads nothing. It writes a row of out/which_rule.csv for each rule, job and
condition, and draws out/which_rule.png. With `--rows examples/which_rule.csv` it draws the published rows in seconds.
"""

import argparse
import csv
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import _common
import _figures
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _figures import BLUE, VERMILLION
from flax import nnx
from matplotlib.figure import Figure
from tqdm import tqdm

import shrewjax

WIDTH, HEADS, LAYERS, ROWS, LENGTH = 32, 2, 3, 4, 32  # of the transformers
PIXELS, DIGITS, IMAGES = 8, 10, 32  # of the GRU
CONDITIONS = "rate suits", "rate high", "rate too high", "bad batches"
COLUMNS = ["job", "condition", "rate", "rule", "threshold", "steps"]
COLUMNS += ["guess", "median", "lowest", "highest", "losses", "jax"]

DARKEST = 0.5  # nats: from this difference on, a cell has the strongest color

Row = dict[str, Any]
Batch = tuple[jax.Array, jax.Array]  # what the model reads, and the labels
Optimizer = Callable[[Any, int], optax.GradientTransformation]  # from the rate and the steps
Rates = tuple[float, float, float]  # one that suits, a high one, one that is too high


class Block(nnx.Module):
    """Attention to what came before, and two linear layers, each added to what it read."""

    def __init__(self, normalized: bool, rngs: nnx.Rngs) -> None:
        # With norms as in GPT-2: all layers together add as much as one.
        scale = 1 / (2 * LAYERS) if normalized else 1.0
        into_sum = nnx.initializers.variance_scaling(scale, "fan_in", "normal")
        self.norms = nnx.List(
            [nnx.LayerNorm(WIDTH, rngs=rngs) if normalized else nnx.identity for _ in range(2)]
        )
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, out_kernel_init=into_sum, rngs=rngs
        )
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, kernel_init=into_sum, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Shape (batch, length, WIDTH) in and out."""
        before, between = self.norms
        x = x + self.attention(before(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(between(x))))


class Transformer(nnx.Module):
    """The next character's logits at every position. No norm precedes the readout."""

    def __init__(self, characters: int, normalized: bool, rngs: nnx.Rngs) -> None:
        initial = nnx.initializers.normal(0.02 if normalized else 1.0)
        self.embed = nnx.Embed(characters, WIDTH, embedding_init=initial, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, embedding_init=initial, rngs=rngs)
        layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(functools.partial(Block, normalized)))
        self.blocks = layers(rngs)
        self.readout = nnx.Linear(WIDTH, characters, rngs=rngs)

    def __call__(self, codes: jax.Array) -> jax.Array:
        """Logits of codes of shape (batch, LENGTH)."""
        x = self.embed(codes) + self.positions(jnp.arange(LENGTH))
        scan = nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return self.readout(scan(lambda x, block: block(x))(x, self.blocks))


class Reader(nnx.Module):
    """A GRU over the rows of an image, and the digit's logits after the last row."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.recurrent = nnx.RNN(nnx.GRUCell(PIXELS, WIDTH, rngs=rngs))
        self.readout = nnx.Linear(WIDTH, DIGITS, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits of images of shape (batch, PIXELS, PIXELS)."""
        at_first = jnp.zeros((len(images), WIDTH))
        return self.readout(self.recurrent(images, initial_carry=at_first)[:, -1])


class Job(NamedTuple):
    """A model, its data and its optimizer."""

    model: Callable[[nnx.Rngs], nnx.Module]
    batch: Callable[[jax.Array, jax.Array], Batch]  # from a key, and whether the batch is bad
    held_out: Batch
    optimizer: Optimizer
    rates: Rates
    classes: int


def warmed_adam(rate: Any, steps: int) -> optax.GradientTransformation:
    """Adam whose rate rises for 20 steps, and falls to 0 in the last fifth."""

    def schedule(step: jax.Array) -> jax.Array:
        rise, fall = (step + 1) / 20, (steps - step) / (0.2 * steps)
        return rate * jnp.minimum(1, jnp.minimum(rise, fall))

    return optax.adam(schedule)


def text_jobs() -> dict[str, Job]:
    """Two transformers that learn nine of ten topics, and are tested on passages of the others."""
    topics, alphabet = _common.documentation()
    training = "".join(text for i, text in enumerate(topics) if i % 10)
    others = "".join(topics[::10])
    passages = [others[i : i + LENGTH + 1] for i in range(0, len(others) - LENGTH, LENGTH + 1)]
    unseen = [passage for passage in passages if passage not in training][::2]
    text = jnp.array([alphabet[x] for x in training])
    held_out = jnp.array([[alphabet[x] for x in passage] for passage in unseen])
    classes = len(alphabet)

    def batch(key: jax.Array, is_bad: jax.Array) -> Batch:
        starts = jax.random.randint(key, (ROWS, 1), 0, len(text) - LENGTH)
        codes = text[starts + jnp.arange(LENGTH + 1)]
        codes = jnp.where(is_bad, jax.random.randint(key, codes.shape, 0, classes), codes)
        return codes[:, :-1], codes[:, 1:]

    def job(normalized: bool, optimizer: Optimizer, rates: Rates) -> Job:
        model = functools.partial(Transformer, classes, normalized)
        return Job(model, batch, (held_out[:, :-1], held_out[:, 1:]), optimizer, rates, classes)

    without_schedule = job(False, lambda rate, _: optax.adamw(rate), (8e-3, 1.8e-2, 2.5e-2))
    return {"transformer": job(True, warmed_adam, (3e-3, 4e-2, 8e-2)), "no norms": without_schedule}


def digits_job() -> Job:
    """A GRU that reads handwritten digits."""
    images, test_images, digits, test_digits = map(jnp.asarray, _common.digits())

    def batch(key: jax.Array, is_bad: jax.Array) -> Batch:
        chosen = jax.random.randint(key, (IMAGES,), 0, len(images))
        return images[chosen, ..., 0] * jnp.where(is_bad, 16, 1), digits[chosen]

    def optimizer(rate: Any, _: int) -> optax.GradientTransformation:
        return optax.sgd(rate, momentum=0.9)

    held_out = test_images[..., 0], test_digits
    return Job(Reader, batch, held_out, optimizer, (0.2, 0.3, 0.5), DIGITS)


def is_stacked(name: str, _: Any) -> tuple[int, ...]:
    """The blocks' leaves stack layers along their first axis."""
    return (0,) if "blocks" in name else ()


by_leaf = functools.partial(shrewjax.clip_by_leaf_norm, stacked_axes=is_stacked)
by_leaf_ema = functools.partial(shrewjax.clip_by_leaf_norm_ema, stacked_axes=is_stacked)
# A clip and its threshold: a number, or a function of the norms of runs without a rule at the rate that suits.
RULES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "none": (shrewjax.clip_by_global_norm, math.inf),
    "global 1.0": (shrewjax.clip_by_global_norm, 1.0),
    "global 90th pct": (shrewjax.clip_by_global_norm, lambda norms: np.percentile(norms, 90)),
    "global median": (shrewjax.clip_by_global_norm, np.median),
    "leaf 1.0": (by_leaf, 1.0),
    "leaf EMA": (by_leaf_ema, 1.04),
    "percentile 10": (shrewjax.clip_by_norm_percentile, 10.0),
    "z-score": (shrewjax.clip_by_norm_zscore, 2.5),
}


def train(
    job: Job, clip: Callable[[Any], Any], threshold: Any, seed: Any, rate: Any, is_bad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the held-out loss after as many steps as `is_bad` has, and each step's norm before a clip."""
    key, steps = jax.random.key(seed), len(is_bad)
    graph, params, rest = nnx.split(job.model(nnx.Rngs(params=key)), nnx.Param, ...)
    tx = optax.chain(clip(threshold), job.optimizer(rate, steps))

    def loss_fn(params: nnx.State, inputs: jax.Array, labels: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params, rest)(inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def step(carry: Any, drawn: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        params, opt_state = carry
        grads = jax.grad(loss_fn)(params, *job.batch(*drawn))
        carry = shrewjax.apply_gradients(tx, grads, opt_state, params)
        return carry, shrewjax.grad_norm(grads)

    keys = jax.random.split(jax.random.fold_in(key, 1), steps)
    (params, _), norms = jax.lax.scan(step, (params, tx.init(params)), (keys, is_bad))
    return loss_fn(params, *job.held_out), norms


def measure(name: str, job: Job, seeds: list[int], steps: int, bar: tqdm) -> Iterator[Row]:
    """Yields a row for each rule and condition."""
    is_bad = np.zeros((len(CONDITIONS), steps), bool)
    for start, number in ((0.45, 1), (0.6, 8)):
        is_bad[-1, round(start * steps) :][:number] = True
    guess = f"{math.log(job.classes):.3f}"
    rates = np.array([*job.rates, job.rates[0]], np.float32)
    programs, norms = {}, None
    for rule, (clip, threshold) in RULES.items():
        bar.set_postfix_str(f"{name}, {rule}")
        if clip not in programs:  # compiled once for all thresholds
            of_seeds = jax.vmap(functools.partial(train, job, clip), (None, 0, None, None))
            programs[clip] = jax.jit(jax.vmap(of_seeds, (None, None, 0, 0)))
        if callable(threshold):
            threshold = float(threshold(norms))
        found, recorded = programs[clip](threshold, np.array(seeds), rates, is_bad)
        if rule == "none":  # at the rate that suits, without the first quarter
            norms = np.asarray(recorded[0, :, steps // 4 :])
        for condition, rate, losses in zip(CONDITIONS, rates, np.asarray(found), strict=True):
            low, middle, high = np.quantile(np.nan_to_num(losses, nan=np.inf), (0, 0.5, 1))
            each = " ".join(f"{loss:.4g}" for loss in losses)
            of_run = name, condition, f"{rate:.3g}", rule, f"{threshold:.3g}", steps, guess
            of_losses = f"{middle:.4g}", f"{low:.4g}", f"{high:.4g}", each, jax.__version__
            yield dict(zip(COLUMNS, (*of_run, *of_losses), strict=True))
        bar.update()


def capped(row: Row) -> np.ndarray:
    """Each seed's loss, or that of a uniform guess if it is above that or not finite."""
    losses, guess = np.array(row["losses"].split(), float), float(row["guess"])
    return np.where(losses < guess, losses, guess)


def cell(row: Row, without: Row) -> tuple[str, str, float]:
    """The text, the color and the strength of a rule's cell, from its row and the row without a rule."""
    losses, above = capped(row), capped(row) - capped(without)
    middle = float(np.median(above))
    if np.median(losses) >= float(row["guess"]):
        text = "fails"
    elif row is without:
        text = f"{np.median(losses):.2f}"
    else:
        text = f"{middle:+.2f}" if abs(middle) >= 0.005 else "0.00"
    is_noise = not (np.all(above < 0) or np.all(above > 0))
    strength = 0.0 if is_noise else 0.15 + 0.4 * min(abs(middle) / DARKEST, 1)
    return text.replace("-", "\N{MINUS SIGN}"), BLUE if middle < 0 else VERMILLION, strength


def plot(rows: list[Row], path: Path) -> None:
    """Draws a heat map: a line for each condition of each job, a column for each rule."""
    by_run: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        by_run.setdefault((row["job"], row["condition"]), {})[row["rule"]] = row
    names = list(dict.fromkeys(job for job, _ in by_run))
    figure = Figure(figsize=(5.2, 1.1 + 1.4 * len(names)))
    axes = figure.add_subplot()
    lines = {}
    for (job, condition), of_run in by_run.items():
        line = lines[job, condition] = names.index(job) * 0.9 + len(lines)
        for column, row in enumerate(map(of_run.get, RULES)):
            text, color, strength = cell(row, of_run["none"])
            if strength:
                axes.barh(line, 0.96, 0.92, column - 0.48, color=color, alpha=strength)
            axes.text(column, line, text, ha="center", va="center", fontsize=10)
    for job in names:
        above = lines[job, CONDITIONS[0]] - 0.75
        axes.text(-0.6, above, job, ha="right", va="center", weight="bold")
    axes.set_yticks([*lines.values()], [condition for _, condition in lines])
    axes.set_xticks(range(len(RULES)), RULES, rotation=40, ha="left", rotation_mode="anchor")
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=10)
    axes.spines[:].set_visible(False)
    axes.set_xlim(-0.5, len(RULES) - 0.5)
    axes.set_ylim(line + 0.5, -1.0)
    _figures.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Trains, writes the rows and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", nargs="+", default=["transformer", "no norms", "GRU"])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--rows", type=Path, help="draw the rows of this file, without training")
    parser.add_argument("--out", type=Path, default=Path("out/which_rule.png"))
    args = parser.parse_args(argv)

    rows = args.rows or args.out.with_suffix(".csv")
    if not args.rows:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        jobs = text_jobs() | {"GRU": digits_job()}
        chosen = {name: job for name, job in jobs.items() if name in args.jobs}
        bar = tqdm(total=len(chosen) * len(RULES), unit="rule")
        with rows.open("w") as file, bar:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            for name, job in chosen.items():
                for row in measure(name, job, args.seeds, args.steps, bar):
                    writer.writerow(row)
                    file.flush()
    with rows.open() as file:
        plot([row for row in csv.DictReader(file) if row["losses"]], args.out)


if __name__ == "__main__":
    main()
