"""How to choose max_norm: trains without clipping, records the gradient norms, and replays every rule on them.

A small GRU learns to predict the next character of Python's own documentation. The norms of its gradients decide
how much a threshold clips. The figure shows their history and quantiles, the threshold of each rule at each step, and
the share of steps that each rule would have clipped or skipped. A heat map below shows the norm of each layer's
gradient over the training: which layers make up the norm, and whether one of them decides the clip.

Run it with

    python -m pip install -e '.[examples]'
    python examples/choose_max_norm.py

It takes about a minute on two CPU cores, downloads nothing, prints the quantiles, the shares and the largest layer, and
writes out/choose_max_norm.png.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import _common
import _figures
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _figures import INK, MUTED, VERMILLION
from flax import nnx
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from tqdm import tqdm

import shrewjax

BATCH, LENGTH, WIDTH = 32, 48, 96
LEARNING_RATE = 1e-2
GRAD_NORM = "clip_by_global_norm/grad_norm"
LEAF_NORM = "clip_by_global_norm/leaf_norm/"
QUANTILES = (0.5, 0.9, 0.99)

# Each is replayed on the norms of the same run. A leaf of one element has its own norm, so AdaGC sees one leaf.
RULES = {
    "AutoClip, 10th percentile": shrewjax.clip_by_norm_percentile(10.0),
    "AutoClip, 90th percentile": shrewjax.clip_by_norm_percentile(90.0),
    "ZClip": shrewjax.clip_by_norm_zscore(),
    "AdaGC, as one leaf": shrewjax.clip_by_leaf_norm_ema(warmup_max_norm=jnp.inf, warmup_steps=25),
    "skip on spike": shrewjax.skip_on_spike(optax.identity()),
}


class CharacterModel(nnx.Module):
    """An embedding, a GRU and a linear layer: the next character's logits at every position."""

    def __init__(self, characters: int, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(characters, WIDTH, rngs=rngs)
        self.recurrent = nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs))
        self.readout = nnx.Linear(WIDTH, characters, rngs=rngs)

    def __call__(self, characters: jax.Array) -> jax.Array:
        """Logits of shape (batch, length, characters) from characters of shape (batch, length), int32."""
        return self.readout(self.recurrent(self.embed(characters)))


def mean_loss(model: CharacterModel, text: jax.Array) -> jax.Array:
    """Cross-entropy of each next character, averaged."""
    return optax.softmax_cross_entropy_with_integer_labels(model(text[:, :-1]), text[:, 1:]).mean()


@nnx.jit(donate_argnames=("model", "optimizer"))
def train_step(
    model: CharacterModel, optimizer: nnx.Optimizer, text: jax.Array
) -> dict[str, jax.Array]:
    """One step; the loss, the gradients' norm and the norm of each leaf."""
    loss, grads = nnx.value_and_grad(mean_loss)(model, text)
    optimizer.update(model, grads)
    # A threshold of inf clips nothing and measures.
    return {"loss": loss} | shrewjax.metrics(optimizer.opt_state)


def record_norms(steps: int, seed: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Trains without clipping; the norm of every step's gradient, and those of its leaves by name."""
    model = CharacterModel(len(_common.documentation()[1]), nnx.Rngs(seed))
    tx = optax.chain(
        shrewjax.clip_by_global_norm(float("inf"), per_leaf=True), optax.adam(LEARNING_RATE)
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    history = []
    with tqdm(_common.passages(BATCH, LENGTH, steps, seed), total=steps, unit="step") as bar:
        for step, text in enumerate(bar):
            history.append(train_step(model, optimizer, text))
            if step % 20 == 0:  # reading a value waits for the device
                bar.set_postfix_str(
                    f"loss {history[-1]['loss']:.2f}, gradient norm {history[-1][GRAD_NORM]:.2f}"
                )
    by_name = _common.columns(history)
    by_leaf = {
        name.removeprefix(LEAF_NORM): norms
        for name, norms in by_name.items()
        if name.startswith(LEAF_NORM)
    }
    return by_name[GRAD_NORM], by_leaf


@jax.jit
def replay(norms: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
    """For each rule, its threshold at each step and whether it acts: a gradient of one element is its own norm."""

    def of_rule(tx: optax.GradientTransformationExtraArgs) -> tuple[jax.Array, jax.Array]:
        def step(
            state: optax.OptState, norm: jax.Array
        ) -> tuple[optax.OptState, tuple[jax.Array, jax.Array]]:
            update, state = tx.update(norm, state)
            (threshold,) = (x for name, x in shrewjax.metrics(state).items() if "threshold" in name)
            return state, (threshold, update != norm)

        return jax.lax.scan(step, tx.init(norms[0]), norms)[1]

    return {name: of_rule(tx) for name, tx in RULES.items()}


def draw_leaves(axes: Axes, by_leaf: Mapping[str, np.ndarray]) -> None:
    """Draws a heat map: a row for each leaf, from the largest to the smallest, and a column for each step."""
    by_size = sorted(by_leaf, key=lambda name: -np.median(by_leaf[name]))
    norms = np.stack([by_leaf[name] for name in by_size])
    colors = LogNorm(*np.quantile(norms[norms > 0], (0.01, 1)))
    edges = np.arange(norms.shape[1] + 1) + 0.5
    image = axes.pcolormesh(
        edges, np.arange(len(by_size) + 1), norms, norm=colors, cmap="cividis", rasterized=True
    )
    axes.set_yticks(
        np.arange(len(by_size)) + 0.5,
        [name.removesuffix("/value") for name in by_size],
        fontsize="small",
    )
    axes.invert_yaxis()
    axes.set(title="Gradient norms by leaf", xlabel="step")
    ticks = LogLocator(subs=(1, 2, 5))
    bar = axes.figure.colorbar(
        image, ax=axes, label="gradient norm", ticks=ticks, format="{x:g}", pad=0.01
    )
    bar.ax.minorticks_off()


def plot(
    norms: np.ndarray,
    by_leaf: Mapping[str, np.ndarray],
    replayed: Mapping[str, tuple[np.ndarray, np.ndarray]],
    path: Path,
) -> None:
    """Draws norms and thresholds over the steps, the norms' quantiles, the share of clipped steps, norms by leaf."""
    figure = Figure(figsize=(8, 10))
    above, below = figure.subfigures(2, 1, height_ratios=(2, 1))
    over_time, quantiles, shares = above.subplot_mosaic("TT;QS").values()
    steps = np.arange(1, len(norms) + 1)

    over_time.plot(steps, norms, color=MUTED, linewidth=0.5, label="gradient norm")
    colors = {}
    for name, (thresholds, _) in replayed.items():
        shown = np.where(np.isfinite(thresholds), thresholds, np.nan)
        (line,) = over_time.plot(steps, shown, linewidth=1.2, label=name)
        colors[name] = line.get_color()
    over_time.set(
        title="Gradient norms, and the threshold of each rule",
        yscale="log",
        xlabel="step",
        ylabel="norm",
    )
    over_time.set_ylim(norms.min() / 1.2, norms.max() * 1.5)
    over_time.legend(fontsize="small")

    quantiles.plot(np.linspace(0, 100, len(norms)), np.sort(norms), color=INK)
    for q in QUANTILES:
        value = np.quantile(norms, q)
        quantiles.plot(100 * q, value, "o", color=VERMILLION, markersize=4)
        quantiles.annotate(
            f"{value:.2g}", (100 * q, value), xytext=(-4, 4), textcoords="offset points", ha="right"
        )
    quantiles.set(
        title="Percentiles of the norms", yscale="log", xlabel="percentile", ylabel="gradient norm"
    )

    acting = {name: 100 * acts.mean() for name, (_, acts) in replayed.items()}
    bars = shares.barh(list(acting), list(acting.values()), color=[colors[name] for name in acting])
    shares.bar_label(bars, fmt="%.1f %%", padding=3)
    shares.set(
        title="Steps that a rule clips or skips", xlabel="share of the steps (%)", xlim=(0, 119)
    )
    shares.invert_yaxis()
    draw_leaves(below.add_subplot(), by_leaf)
    _figures.plain_ticks(over_time.yaxis, quantiles.yaxis)
    _figures.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Trains, replays, prints and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, default=Path("out/choose_max_norm.png"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    norms, by_leaf = record_norms(args.steps, args.seed)
    replayed = jax.device_get(replay(jnp.asarray(norms)))
    replayed = {name: replayed[name] for name in RULES}  # jit sorts keys

    print(
        "norms: "
        + ", ".join(f"{100 * q:g} % are below {np.quantile(norms, q):.3g}" for q in QUANTILES)
    )
    for name, (_, acts) in replayed.items():
        print(f"{name}: acts on {acts.mean():.1%} of {len(norms)} steps")
    shares = {name: float(np.median(of_leaf**2 / norms**2)) for name, of_leaf in by_leaf.items()}
    largest = max(shares, key=shares.get)
    print(
        f"largest leaf: {largest.removesuffix('/value')}, {shares[largest]:.0%} of the squared norm in the median"
    )
    plot(norms, by_leaf, replayed, args.out)


if __name__ == "__main__":
    main()
