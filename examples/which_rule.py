"""Trains one small transformer that spikes under every clip and every guard, and measures which of them helps.

A transformer of three scanned layers learns Python's documentation, character by character, with Adam. Five things
happen to it:

* `calm`: nothing. The rate suits it.
* `by itself`: the rate is 13 times as high. The loss of most seeds spikes by itself, for no cause that one could name.
* `too high`: the rate is 27 times as high. The loss spikes from the first steps on.
* `corrupted`: the rate suits it, but nine batches are noise, one alone and then eight in a row.
* `overflow`: the rate suits it, but the activations are bfloat16, and in one step those of one row are multiplied by
  1e30. bfloat16 holds them, and not their squares. The other runs are in float32.

Every rule trains the same models on the same batches: five seeds with the documented value, and a sixth with that one
and three others. `--tuned` also trains the five seeds with the value that was the best on the sixth. The batches of a
seed are the same under all rules and causes. So the difference from the calm run without a rule has no noise from them.

Run it with

    python -m pip install -e '.[examples]'
    python examples/which_rule.py

It takes a quarter of an hour on one CPU core, or twenty minutes with `--tuned`, and downloads nothing. Each run's row
is in out/which_rule.jsonl as soon as it has ended, and a command that was stopped goes on with the next run. When all
rows are there, it takes seconds. It prints the tables of the page "Which rule?", and writes out/which_rule.png.
`--quick` takes a minute or two: four rules, one seed, the documented values.
"""

import argparse
import functools
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import _common
import _figures
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _figures import BLUE, FAINT, MUTED, VERMILLION
from flax import nnx
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from tqdm import tqdm

import shrewjax

WIDTH, HEADS, LAYERS, ROWS, LENGTH = 32, 2, 3, 4, 32
WARMUP = 20  # steps, in which the rate rises
DECAY = 0.2  # the last part of the steps, in which the rate falls to 0
SEEDS, TUNING_SEED = (0, 1, 2, 3, 4), 5
TUNED_ON = "by itself", "too high", "corrupted"
UNIFORM = math.log(
    103
)  # the loss of a uniform guess among the characters, and in the tuning that of NaN

Transform = optax.GradientTransformation


class Cause(NamedTuple):
    """The rate of a run, its precision, and its faulty steps: counted from 0, in shares of the run."""

    rate: float
    dtype: Any = jnp.float32  # of the activations; parameters are float32
    corrupted: tuple[tuple[float, int], ...] = ()  # where batches are noise, and how many in a row
    overflows: tuple[float, ...] = ()


CAUSES = {
    "calm": Cause(3e-3),
    "by itself": Cause(4e-2),
    "too high": Cause(8e-2),
    "corrupted": Cause(3e-3, corrupted=((0.45, 1), (0.6, 8))),
    "overflow": Cause(3e-3, dtype=jnp.bfloat16, overflows=(0.5,)),
}


class Block(nnx.Module):
    """Attention to what came before, and two linear layers, each added to what it read."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        # As in GPT-2, all layers together add as much as one.
        into_sum = nnx.initializers.variance_scaling(1 / (2 * LAYERS), "fan_in", "normal")
        self.attention_norm = nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS, WIDTH, decode=False, dtype=dtype, out_kernel_init=into_sum, rngs=rngs
        )
        self.mlp_norm = nnx.LayerNorm(WIDTH, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, dtype=dtype, kernel_init=into_sum, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Shape (batch, length, WIDTH) in and out."""
        x = x + self.attention(self.attention_norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    """The next character's logits at every position. No norm precedes the readout, so that a high rate shows."""

    def __init__(self, characters: int, dtype: Any, rngs: nnx.Rngs) -> None:
        small = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(characters, WIDTH, dtype=dtype, embedding_init=small, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, dtype=dtype, embedding_init=small, rngs=rngs)
        self.blocks = nnx.split_rngs(splits=LAYERS)(nnx.vmap(functools.partial(Block, dtype)))(rngs)
        self.readout = nnx.Linear(WIDTH, characters, dtype=dtype, rngs=rngs)

    def __call__(
        self, codes: jax.Array, factor: jax.Array, clip: Callable[[jax.Array], jax.Array]
    ) -> jax.Array:
        """Float32 logits of codes of shape (batch, LENGTH). `factor` multiplies the first row's activations."""
        x = self.embed(codes) + self.positions(jnp.arange(LENGTH))
        x = x.at[0].multiply(factor.astype(x.dtype))

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def forward(x: jax.Array, block: Block) -> jax.Array:
            return block(clip(x))

        return self.readout(clip(forward(x, self.blocks))).astype(jnp.float32)


class Texts(NamedTuple):
    """Codes of characters."""

    training: np.ndarray  # shape (characters,), int32
    held_out: (
        np.ndarray
    )  # shape (passages, LENGTH + 1): of other topics, and nowhere in the training text
    characters: int


def texts() -> Texts:
    """Nine of ten topics of Python's documentation to train on, and passages of the others."""
    topics, alphabet = _common.documentation()
    training = "".join(text for i, text in enumerate(topics) if i % 10)
    others = "".join(topics[::10])
    passages = [others[i : i + LENGTH + 1] for i in range(0, len(others) - LENGTH, LENGTH + 1)]
    new = [passage for passage in passages if passage not in training][::2]

    def codes(text: str) -> list[int]:
        return [alphabet[character] for character in text]

    return Texts(
        np.array(codes(training), np.int32), np.array([*map(codes, new)], np.int32), len(alphabet)
    )


class Watched(NamedTuple):
    """The state of a clip, and whether its last call changed a finite gradient."""

    inner: Any
    acted: jax.Array


def watched(clip: Transform) -> optax.GradientTransformationExtraArgs:
    """The same clip, which also says whether it acted. It compares what goes in with what comes out, for any clip."""
    clip = optax.with_extra_args_support(clip)

    def update(grads: Any, state: Watched, params: Any = None, **extra: Any) -> tuple[Any, Watched]:
        updates, inner = clip.update(grads, state.inner, params, **extra)
        changed = jax.tree.map(lambda x, y: jnp.any((x != y) & jnp.isfinite(x)), grads, updates)
        return updates, Watched(inner, jnp.stack(jax.tree.leaves(changed)).any())

    return optax.GradientTransformationExtraArgs(
        lambda params: Watched(clip.init(params), jnp.zeros((), bool)), update
    )


def identity(_: Any) -> Transform:
    """No clip."""
    return optax.identity()


class Rule(NamedTuple):
    """One way to train. Each part gets the rule's value, a number or a traced scalar."""

    clip: Callable[[Any], Transform] = identity  # of the gradients
    clip_update: Callable[[Any], Transform] = identity  # of Adam's update, before the rate
    guard: Callable[[Transform, Any], Transform] = lambda inner, _: inner
    clip_flow: bool = False  # whether the value limits the cotangents of each character's activations, see `train`
    documented: float | None = (
        None  # the value of the docstring or the guide; None for a rule without one
    )
    others: tuple[float, ...] = ()  # the values that are tried, too

    def optimizer(
        self, value: Any, schedule: optax.Schedule
    ) -> optax.GradientTransformationExtraArgs:
        """Adam with this rule."""
        parts = watched(self.clip(value)), optax.scale_by_adam(), watched(self.clip_update(value))
        inner = optax.chain(*parts, optax.scale_by_learning_rate(schedule))
        return optax.with_extra_args_support(self.guard(inner, value))


def is_stacked(name: str, _: Any) -> tuple[int, ...]:
    """The blocks' leaves stack layers along their first axis."""
    return (0,) if "blocks" in name else ()


RULES = {
    "none": Rule(),
    "optax.clip_by_global_norm": Rule(optax.clip_by_global_norm, documented=1.0),
    "optax.apply_if_finite": Rule(
        guard=lambda inner, _: optax.apply_if_finite(inner, max_consecutive_errors=5)
    ),
    "clip_by_global_norm": Rule(
        shrewjax.clip_by_global_norm, documented=1.0, others=(0.1, 0.3, 3.0)
    ),
    "clip_by_leaf_norm": Rule(
        lambda value: shrewjax.clip_by_leaf_norm(value, batch_axes=is_stacked),
        documented=1.0,
        others=(0.03, 0.2, 3.0),
    ),
    "clip_by_value": Rule(shrewjax.clip_by_value, documented=0.5, others=(3e-3, 0.05, 5.0)),
    "clip_by_percentile": Rule(
        shrewjax.clip_by_percentile, documented=99.0, others=(50.0, 90.0, 99.9)
    ),
    "clip_by_block_rms, of the update": Rule(
        clip_update=lambda value: shrewjax.clip_by_block_rms(value, batch_axes=is_stacked),
        documented=1.0,
        others=(0.2, 0.5, 2.0),
    ),
    "adaptive_grad_clip": Rule(
        lambda value: shrewjax.adaptive_grad_clip(value, batch_axes=is_stacked),
        documented=0.01,
        others=(0.003, 0.03, 0.1),
    ),
    "clip_by_leaf_norm_ema": Rule(
        lambda value: shrewjax.clip_by_leaf_norm_ema(value, batch_axes=is_stacked),
        documented=1.04,
        others=(1.2, 1.5, 3.0),
    ),
    "clip_by_norm_percentile": Rule(
        shrewjax.clip_by_norm_percentile, documented=90.0, others=(20.0, 50.0, 75.0)
    ),
    "clip_by_norm_zscore": Rule(
        shrewjax.clip_by_norm_zscore, documented=2.5, others=(1.0, 1.7, 3.5)
    ),
    "clip_by_norm_zscore, of the update": Rule(
        clip_update=shrewjax.clip_by_norm_zscore, documented=2.5, others=(1.0, 1.7, 3.5)
    ),
    "clip_cotangent": Rule(clip_flow=True, documented=4.0, others=(0.3, 1.0, 2.0)),
    "skip_nonfinite": Rule(guard=lambda inner, _: shrewjax.skip_nonfinite(inner)),
    "skip_on_spike": Rule(
        guard=lambda inner, value: shrewjax.skip_on_spike(inner, max_zscore=value),
        documented=6.0,
        others=(2.0, 3.0, 4.0),
    ),
    "skip_on_spike, by the loss": Rule(
        guard=lambda inner, value: shrewjax.skip_on_spike(inner, monitor="value", max_zscore=value),
        documented=6.0,
        others=(2.0, 3.0, 4.0),
    ),
    "skip_on_spike, above a limit": Rule(
        guard=lambda inner, value: shrewjax.skip_on_spike(inner, above=value, at_most=3),
        documented=100.0,
        others=(5.0, 15.0, 30.0),
    ),
    "skip_on_spike, clip_by_norm_zscore": Rule(
        lambda _: shrewjax.clip_by_norm_zscore(),
        guard=lambda inner, _: shrewjax.skip_on_spike(inner),
    ),
    "skip_nonfinite, clip_by_global_norm": Rule(
        lambda _: shrewjax.clip_by_global_norm(1.0),
        guard=lambda inner, _: shrewjax.skip_nonfinite(inner),
    ),
    "skip_nonfinite, clip_by_leaf_norm": Rule(
        lambda _: shrewjax.clip_by_leaf_norm(1.0, batch_axes=is_stacked),
        guard=lambda inner, _: shrewjax.skip_nonfinite(inner),
    ),
}


QUICK = ("none", "clip_by_global_norm", "skip_on_spike", "skip_nonfinite")


class Faults(NamedTuple):
    """A cause, step by step."""

    rates: jax.Array  # float32 (steps,)
    corrupted: jax.Array  # bool (steps,)
    factors: jax.Array  # float32 (steps,)


def faults(cause: Cause, steps: int) -> Faults:
    """The rate of each step, which are corrupted, and what multiplies the first row's activations."""
    at, corrupted, factors = np.arange(steps), np.zeros(steps, bool), np.ones(steps, np.float32)
    rates = (
        cause.rate
        * np.minimum((at + 1) / WARMUP, 1)
        * np.minimum((steps - at) / (DECAY * steps), 1)
    )
    for share, number in cause.corrupted:
        corrupted[round(share * steps) :][:number] = True
    for share in cause.overflows:
        factors[round(share * steps)] = 1e30
    return Faults(jnp.asarray(rates, jnp.float32), jnp.asarray(corrupted), jnp.asarray(factors))


def is_faulty(cause: Cause, steps: int) -> np.ndarray:
    """Which steps have a batch or an activation that is not the calm run's: bool, of shape (steps,)."""
    of_cause = faults(cause, steps)
    return np.asarray(of_cause.corrupted | (of_cause.factors != 1))


class Trained(NamedTuple):
    """A run's losses, and its parameters at the end."""

    losses: Any  # (steps,): of the batch that the step took
    acted: Any  # (steps,): whether the rule clipped or skipped
    params: nnx.State


def mean_loss(
    params: nnx.State,
    graph: nnx.GraphDef,
    codes: jax.Array,
    factor: Any,
    clip: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """The loss of the next characters, in nats a character."""
    logits = nnx.merge(graph, params)(codes[:, :-1], factor, clip)
    return optax.softmax_cross_entropy_with_integer_labels(logits, codes[:, 1:]).mean()


def train(
    rule: Rule,
    graph: nnx.GraphDef,
    value: Any,
    params: nnx.State,
    seed: Any,
    faults: Faults,
    training: jax.Array,
) -> Trained:
    """Trains a model, in one scan over the steps. A rule compiles once for all values, seeds and causes."""
    steps, characters = len(faults.rates), params["readout"]["bias"].get_value().size
    tx = rule.optimizer(value, lambda step: faults.rates[step])

    def loss_of(
        params: nnx.State, codes: jax.Array, factor: jax.Array, counter: jax.Array
    ) -> jax.Array:
        # In a mean over characters, the cotangents of one character are about 1 / characters.
        limit = value / (ROWS * LENGTH)
        clip = (
            (lambda x: shrewjax.clip_cotangent(x, limit, counter=counter))
            if rule.clip_flow
            else lambda x: x
        )
        return mean_loss(params, graph, codes, factor, clip)

    def step(
        carry: Any, inputs: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        (params, state), (key, is_corrupted, factor) = carry, inputs
        starts = jax.random.randint(key, (ROWS, 1), 0, len(training) - LENGTH)
        codes = training[starts + jnp.arange(LENGTH + 1)]
        codes = jnp.where(is_corrupted, jax.random.randint(key, codes.shape, 0, characters), codes)
        loss, (grads, clipped) = jax.value_and_grad(loss_of, argnums=(0, 3))(
            params, codes, factor, jnp.zeros(())
        )
        updates, state = tx.update(grads, state, params, value=loss)
        states = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Watched))
        flags = [x.acted for x in states if isinstance(x, Watched)]
        skipped = jnp.stack([jnp.all(x == 0) for x in jax.tree.leaves(updates)]).all()
        acted = functools.reduce(jnp.logical_or, flags) | skipped | (clipped > 0)
        return (optax.apply_updates(params, updates), state), (loss, acted)

    keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), steps)
    inputs = keys, faults.corrupted, faults.factors
    (params, _), (losses, acted) = jax.lax.scan(step, (params, tx.init(params)), inputs)
    return Trained(losses, acted, params)


class Key(NamedTuple):
    """Which run."""

    rule: str
    value: float | None
    cause: str
    seed: int
    steps: int


Row = dict[str, Any]


class Model(NamedTuple):
    """A transformer of one precision."""

    graph: nnx.GraphDef
    initial: Callable[[int], nnx.State]  # the parameters, by seed
    held_out: Callable[[nnx.State], jax.Array]  # the loss of passages that were not trained on

    @classmethod
    def of(cls, text: Texts, dtype: Any) -> "Model":
        """The model of these characters."""

        def split(seed: Any) -> tuple[nnx.GraphDef, nnx.State]:
            return nnx.split(
                Transformer(text.characters, dtype, nnx.Rngs(params=jax.random.key(seed)))
            )

        graph, _ = nnx.eval_shape(lambda: split(0))
        codes = jnp.asarray(text.held_out)
        held_out = jax.jit(
            lambda params: mean_loss(params, graph, codes, jnp.ones(()), lambda x: x)
        )
        return cls(graph, jax.jit(lambda seed: split(seed)[1]), held_out)


class Laboratory:
    """Runs that were made are read from a file of JSON lines. Others are made, and written there."""

    def __init__(self, path: Path, steps: int) -> None:
        self.text, self.steps, self.path = texts(), steps, path
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.read_text() if path.exists() else ""
        complete = written[
            : written.rfind("\n") + 1
        ]  # a run that was stopped while writing left half a line
        path.write_text(complete)
        rows = map(json.loads, complete.splitlines())
        self._models = {cause.dtype: Model.of(self.text, cause.dtype) for cause in CAUSES.values()}
        self._programs: dict[tuple[str, Any], jax.stages.Compiled] = {}
        self.rows: dict[Key, Row] = {Key(*(row[name] for name in Key._fields)): row for row in rows}

    def run(self, rule: str, value: float | None, cause: str, seed: int) -> Row:
        """The row of a run."""
        key = Key(rule, value, cause, seed, self.steps)
        if key not in self.rows:
            dtype = CAUSES[cause].dtype
            model = self._models[dtype]
            inputs = (
                jnp.float32(0 if value is None else value),
                model.initial(seed),
                jnp.int32(seed),
                faults(CAUSES[cause], self.steps),
                jnp.asarray(self.text.training),
            )
            if (rule, dtype) not in self._programs:
                program = jax.jit(functools.partial(train, RULES[rule], model.graph))
                self._programs[rule, dtype] = program.lower(*inputs).compile()
            start = time.process_time()
            trained = jax.block_until_ready(self._programs[rule, dtype](*inputs))
            seconds = time.process_time() - start
            row = key._asdict() | {
                "held_out": float(model.held_out(trained.params)),
                "acted": float(trained.acted.mean()),
                "seconds": seconds,
                "losses": [float(f"{loss:.5g}") for loss in np.asarray(trained.losses).tolist()],
            }
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            self.rows[key] = row
        return self.rows[key]


def tuned(laboratory: Laboratory, rules: Sequence[str]) -> dict[str, float]:
    """The value of each rule that has several, with the lowest mean loss on the sixth seed; the first of equal ones."""
    runs = [
        (name, value, cause)
        for name in rules
        if RULES[name].others
        for value in (RULES[name].documented, *RULES[name].others)
        for cause in TUNED_ON
    ]
    losses: dict[str, dict[float, float]] = {}
    for name, value, cause in tqdm(runs, desc="tuning", unit="run"):
        held_out = laboratory.run(name, value, cause, TUNING_SEED)["held_out"]
        of_values = losses.setdefault(name, {})
        of_values[value] = of_values.get(value, 0) + float(capped(held_out))
    return {name: min(of_values, key=of_values.get) for name, of_values in losses.items()}


def measure(
    laboratory: Laboratory, chosen: Sequence[tuple[str, float | None]], seeds: Sequence[int]
) -> None:
    """Trains rules with these values, seed by seed."""
    runs = [(*rule, cause, seed) for seed in seeds for rule in chosen for cause in CAUSES]
    for run in tqdm(runs, desc="measuring", unit="run"):
        laboratory.run(*run)


def spike_score(losses: np.ndarray, faulty: np.ndarray) -> float:
    """The share of losses that stand ten standard deviations or more from the mean of up to 1,000 losses before.

    That is AdaGC's spike score. Here it looks at steps from the 100th on, and at the losses before from the 50th on,
    because the first ones fall steeply. A loss that is not finite is a spike, and no part of a mean. A faulty step is
    neither, because no rule can change its loss.
    """
    settled, first = 50, 100
    spikes, judged = 0, 0
    for step in range(first, len(losses)):
        if faulty[step]:
            continue
        before = losses[settled:step][~faulty[settled:step]][-1000:]
        before = before[np.isfinite(before)]
        deviation = abs(losses[step] - before.mean()) if len(before) else np.nan
        spikes += not deviation < 10 * before.std()
        judged += 1
    return spikes / judged


def steps_lost(losses: np.ndarray, calm: np.ndarray, faulty: np.ndarray) -> int:
    """How many losses are 0.5 nats or more above those of the calm run without a rule, on the same batches."""
    return int(np.sum(~(losses < calm + 0.5) & ~faulty))


def code(rule: str) -> str:
    """A rule's name, with its functions as code."""
    return re.sub(r"[a-z.]+_\w+", lambda function: f"`{function[0]}`", rule)


def capped(loss: Any) -> Any:
    """A loss, or that of a uniform guess if it is above that or not finite."""
    return np.where(loss < UNIFORM, loss, UNIFORM)


class Result(NamedTuple):
    """A rule's runs with one value and one cause, over the seeds."""

    rule: str
    value: float | None
    is_tuned: bool
    held_out: np.ndarray  # (seeds,)
    above_calm: (
        np.ndarray
    )  # (seeds,): the held-out loss above that of the same seed's calm run without a rule
    highest: np.ndarray  # (seeds,): the highest loss
    seconds: list[float]  # of each seed's run, in CPU time
    score: float
    lost: float
    acted: float

    @property
    def name(self) -> str:
        """The rule, with its functions as code."""
        return code(self.rule)

    @property
    def label(self) -> str:
        """The value, and whether it is a tuned one."""
        value = "" if self.value is None else f"{self.value:g}"
        return f"{value}, tuned" if self.is_tuned else value


def results(
    laboratory: Laboratory,
    chosen: Sequence[tuple[str, float | None]],
    seeds: Sequence[int],
    cause: str,
) -> list[Result]:
    """The runs of a cause, from the lowest held-out loss to the highest."""
    faulty = is_faulty(CAUSES[cause], laboratory.steps)
    calm = [laboratory.run("none", None, "calm", seed) for seed in seeds]
    collected = []
    for rule, value in chosen:
        rows = [laboratory.run(rule, value, cause, seed) for seed in seeds]
        losses = [np.array(row["losses"]) for row in rows]
        held_out = np.array([row["held_out"] for row in rows])
        lost = [
            steps_lost(ours, np.array(other["losses"]), faulty)
            for ours, other in zip(losses, calm, strict=True)
        ]
        collected.append(
            Result(
                rule,
                value,
                value != RULES[rule].documented,
                held_out,
                held_out - [row["held_out"] for row in calm],
                np.array([x.max() for x in losses]),
                [row["seconds"] for row in rows],
                float(np.mean([spike_score(x, faulty) for x in losses])),
                float(np.median(lost)),
                float(np.mean([row["acted"] for row in rows])),
            )
        )
    return sorted(
        collected, key=lambda result: np.nan_to_num(np.median(result.held_out), nan=np.inf)
    )


class Spread(NamedTuple):
    """Over seeds. NaN counts as infinite."""

    low: float
    middle: float
    high: float

    @classmethod
    def over(cls, losses: np.ndarray) -> "Spread":
        """The range and the median."""
        losses = np.nan_to_num(losses, nan=np.inf)
        return cls(float(losses.min()), float(np.median(losses)), float(losses.max()))

    def __str__(self) -> str:
        low, middle, high = (f"{x:.2f}".replace("inf", "NaN") for x in self)
        return low if low == high == "NaN" else f"{middle} ({low} to {high})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def table_of_cause(found: Sequence[Result]) -> str:
    """Each rule under one cause, the best first."""
    head = (
        "rule",
        "value",
        "held-out loss, median (range)",
        "spike score",
        "steps lost",
        "clipped or skipped",
    )
    return table(
        head,
        (
            (
                x.name,
                x.label,
                str(Spread.over(x.held_out)),
                f"{100 * x.score:.1f} %",
                f"{x.lost:.0f}",
                f"{100 * x.acted:.0f} %"
                if np.isfinite(x.held_out).all()
                else "",  # NaN is clipped or not, by accident
            )
            for x in found
        ),
    )


def overall(by_cause: Mapping[str, Sequence[Result]]) -> list[tuple[Result, list[float]]]:
    """Each rule's calm result, and the loss above calm under each cause, from the best mean to the worst.

    A loss that is not finite, or above that of a uniform guess, counts as that of the guess.
    """
    by_rule = [{(x.rule, x.value): x for x in found} for found in by_cause.values()]
    rows = []
    for key, calm in {(x.rule, x.value): x for x in by_cause["calm"]}.items():
        reference = calm.held_out - calm.above_calm
        rows.append(
            (calm, [float(np.mean(capped(found[key].held_out) - reference)) for found in by_rule])
        )
    return sorted(rows, key=lambda row: np.mean(row[1]))


def table_of_all(by_cause: Mapping[str, Sequence[Result]]) -> str:
    """Each rule's loss above that of the calm run without a rule: the mean over the seeds, and over the causes."""
    seconds: dict[str, list[float]] = {}
    for found in by_cause.values():
        for x in found:
            seconds.setdefault(x.rule, []).extend(x.seconds)
    cost = {
        rule: np.quantile(of_rule, 0.25) for rule, of_rule in seconds.items()
    }  # the machine does other things, too
    return table(
        ("rule", "value", "mean", *by_cause, "time of a step"),
        (
            (
                x.name,
                x.label,
                f"{np.mean(above):.2f}",
                *(f"{round(y, 2) + 0:.2f}" for y in above),  # not -0.00
                f"{cost[x.rule] / cost['none']:.2f} x",
            )
            for x, above in overall(by_cause)
        ),
    )


def table_of_values(laboratory: Laboratory) -> str:
    """Each value that was tried on the sixth seed, with its mean loss over the causes it was tuned on."""
    rows = []
    for name, rule in RULES.items():
        means = {}
        for value in (rule.documented, *rule.others) if rule.others else ():
            keys = [Key(name, value, cause, TUNING_SEED, laboratory.steps) for cause in TUNED_ON]
            if all(key in laboratory.rows for key in keys):
                means[value] = np.mean([capped(laboratory.rows[key]["held_out"]) for key in keys])
        if means:
            rows.append((code(name), *(f"{value:g}: {mean:.2f}" for value, mean in means.items())))
    return table(("rule", "documented", "others", "", ""), rows) if rows else ""


def plot(laboratory: Laboratory, by_cause: Mapping[str, Sequence[Result]], path: Path) -> None:
    """Draws one run that spikes, under three rules, and each rule's held-out losses under three causes."""
    (unclipped,) = (x for x in by_cause["by itself"] if x.rule == "none")
    seed = SEEDS[int(np.argmax(unclipped.highest))]
    names = [x.rule for x, _ in overall(by_cause) if not x.is_tuned][::-1]
    figure = Figure(figsize=(8, 9.5))
    above, below = figure.subfigures(2, 1, height_ratios=(1, 2.2))
    over_time = above.add_subplot()
    shown = {"none": MUTED, "skip_on_spike": VERMILLION, "clip_by_global_norm": BLUE}
    for name, color in shown.items():
        losses = laboratory.run(name, RULES[name].documented, "by itself", seed)["losses"]
        over_time.plot(
            np.arange(1, len(losses) + 1), losses, color=color, linewidth=0.8, label=name
        )
    over_time.set(
        title="Loss of a run that spikes by itself",
        yscale="log",
        xlabel="step",
        ylabel="nats per character",
    )
    over_time.legend(fontsize="small")
    _figures.plain_ticks(over_time.yaxis)

    causes = ("by itself", "too high", "corrupted")
    panels = below.subplots(1, len(causes), sharey=True)
    for axes, cause in zip(panels, causes, strict=True):
        drawn = [x for x in by_cause[cause] if x.rule in names]
        highs = [Spread.over(x.above_calm).high for x in drawn if not x.is_tuned]
        right = 1.4 * sorted(highs)[len(highs) * 3 // 5]
        for color, is_tuned, offset in ((BLUE, False, 0.12), (VERMILLION, True, -0.18)):
            places, lows, middles, highs = [], [], [], []
            for x in (x for x in drawn if x.is_tuned == is_tuned):
                low, middle, high = Spread.over(x.above_calm)
                place = names.index(x.rule) + offset
                if middle > right:
                    text = f"{middle:.1f} above"
                    axes.annotate(
                        text,
                        (right, place),
                        ha="right",
                        va="center",
                        fontsize="x-small",
                        color=color,
                    )
                else:
                    places, lows = [*places, place], [*lows, low]
                    middles, highs = [*middles, middle], [*highs, min(high, right)]
            axes.hlines(places, lows, highs, color=color, linewidth=1)
            axes.plot(
                middles,
                places,
                "o",
                color=color,
                markersize=3.5,
                label="tuned" if is_tuned else "documented",
            )
        axes.axvline(0, color=FAINT, linewidth=1, zorder=0)
        axes.set(title=cause, xlabel="nats above calm")
        axes.set_xlim(right=right)
        axes.xaxis.set_major_locator(MaxNLocator(3))
    panels[0].set_yticks(range(len(names)), names, fontsize="small")
    if any(x.is_tuned for x in by_cause["too high"]):
        below.legend(*panels[0].get_legend_handles_labels(), fontsize="small", loc="upper left")
    _figures.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Trains, prints and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--quick", action="store_true", help="four rules, one seed, and no other values"
    )
    parser.add_argument(
        "--tuned", action="store_true", help="the best of the other values on all seeds, too"
    )
    parser.add_argument("--out", type=Path, default=Path("out/which_rule.png"))
    parser.add_argument(
        "--rows",
        type=Path,
        default=Path("out/which_rule.jsonl"),
        help="where the runs' rows are kept",
    )
    args = parser.parse_args(argv)
    laboratory = Laboratory(args.rows, args.steps)
    rules, seeds = (QUICK, SEEDS[:1]) if args.quick else (RULES, SEEDS)
    chosen = [(name, RULES[name].documented) for name in rules]
    best = {} if args.quick else tuned(laboratory, list(rules))
    if args.tuned:
        chosen += [(name, value) for name, value in best.items() if value != RULES[name].documented]
    measure(laboratory, chosen, seeds)
    by_cause = {cause: results(laboratory, chosen, seeds, cause) for cause in CAUSES}
    for cause, found in by_cause.items():
        print(f"{cause}\n\n{table_of_cause(found)}\n")
    print(f"all\n\n{table_of_all(by_cause)}\n")
    print(f"values\n\n{table_of_values(laboratory)}\n")
    plot(laboratory, by_cause, args.out)


if __name__ == "__main__":
    main()
