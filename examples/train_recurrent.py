"""Trains a recurrent net on Python's documentation, at a length where its gradients explode, with three ways to clip.

Each state of the net depends on the one before it through the same weights. The backward pass through hundreds of
characters multiplies a gradient by these weights as many times. The gradient grows, until the first characters decide
all of it.

* Without clipping, the first steps throw the weights out of the range where the net learns.
* A global norm shortens the step, but its direction is still that of the explosion.
* `clip_cotangent` limits the gradient of each state, so that no character outweighs the others.

Run it with

    python -m pip install -e '.[examples]'
    python examples/train_recurrent.py

It takes a minute or two on two CPU cores, downloads nothing, prints the losses and norms, and writes
out/train_recurrent.png. The figure shows the loss and the gradient's norm before the clip by global norm. It also shows
how the gradients of the states grow on the way back through the untrained net.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import _common
import _figures
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _figures import BLUE, PURPLE, VERMILLION
from matplotlib.figure import Figure
from tqdm import tqdm

import shrewjax

Params = dict[str, jax.Array]

WIDTH, ROWS = 128, 32
GAIN = 2.0  # of the recurrent weights; from 1 on, gradients grow on the way back
LEARNING_RATE = 0.5
MAX_NORM = 1.0  # with 0.3, 3 or 10 the loss ends higher
# The largest gradient of a state, where 1 is about that of its own character's loss.
MAX_FLOW = 4.0


class Way(NamedTuple):
    """How a run clips."""

    name: str
    max_norm: float = np.inf  # of all gradients together
    max_flow: float = np.inf  # of the gradient of a state


WAYS = [
    Way("without clipping"),
    Way("global norm", max_norm=MAX_NORM),
    Way("clip_cotangent", max_flow=MAX_FLOW),
]


def init(characters: int, seed: int) -> Params:
    """Returns weights whose repeated products grow."""
    recurrent, entry, readout = jax.random.split(jax.random.key(seed), 3)
    return {
        "recurrent": GAIN * jax.random.normal(recurrent, (WIDTH, WIDTH)) / WIDTH**0.5,
        "entry": jax.random.normal(entry, (characters, WIDTH)),
        "readout": jax.random.normal(readout, (WIDTH, characters)) / WIDTH**0.5,
        "bias": jnp.zeros(characters),
    }


def loss_fn(params: Params, codes: jax.Array, nudges: jax.Array, max_flow: float) -> jax.Array:
    """Returns the mean loss of each next character. `nudges`, one a character and row, are added to the states."""
    max_norm = max_flow / codes[:, 1:].size

    def step(h: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        code, nudge = x
        h = jnp.tanh(h @ params["recurrent"] + params["entry"][code]) + nudge
        h = shrewjax.clip_cotangent(h, max_norm)
        return h, h

    _, states = jax.lax.scan(step, jnp.zeros((len(codes), WIDTH)), (codes[:, :-1].T, nudges))
    logits = states @ params["readout"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, codes[:, 1:].T).mean()


def flow(params: Params, codes: jax.Array, max_flow: float) -> jax.Array:
    """Returns the gradient norms of the states, the largest over the rows. Shape (characters,)."""
    nudges = jnp.zeros((codes.shape[1] - 1, len(codes), WIDTH))
    into_states = jax.grad(loss_fn, argnums=2)(params, codes, nudges, max_flow)
    return jnp.linalg.norm(into_states, axis=-1).max(axis=1)


def train(
    way: Way, params: Params, length: int, steps: int, seed: int, bar: tqdm
) -> tuple[np.ndarray, np.ndarray]:
    """Returns each step's loss, and its gradient norm before a clip by it."""
    tx = optax.chain(shrewjax.clip_by_global_norm(way.max_norm), optax.sgd(LEARNING_RATE))

    def step(
        params: Params, opt_state: optax.OptState, codes: jax.Array
    ) -> tuple[Params, Any, jax.Array, jax.Array]:
        nudges = jnp.zeros((length, ROWS, WIDTH))
        loss, grads = jax.value_and_grad(loss_fn)(params, codes, nudges, way.max_flow)
        params, opt_state = shrewjax.apply_gradients(tx, grads, opt_state, params)
        return params, opt_state, loss, opt_state[0].grad_norm

    step, opt_state = jax.jit(step, donate_argnums=(0, 1)), tx.init(params)
    params = jax.tree.map(jnp.copy, params)  # the caller starts other runs from them
    found = []
    for codes in _common.passages(ROWS, length + 1, steps, seed):
        params, opt_state, *measured = step(params, opt_state, codes)
        found.append(measured)
        bar.update()
    losses, norms = np.array(jax.device_get(found)).T
    return losses, norms


def smooth(values: np.ndarray) -> np.ndarray:
    """Returns the mean of each value and up to nine before it."""
    return np.array([values[max(0, i - 9) : i + 1].mean() for i in range(len(values))])


def plot(
    runs: dict[str, tuple[np.ndarray, np.ndarray]], flows: dict[str, np.ndarray], path: Path
) -> None:
    """Draws the gradients of the states before training, and loss and norm over training."""
    figure = Figure(figsize=(8, 7.5))
    flow_axes, norm_axes, loss_axes = figure.subplot_mosaic("FF;NL").values()
    colors = dict(zip(runs, (VERMILLION, PURPLE, BLUE), strict=True))
    for name, by_character in flows.items():
        flow_axes.plot(
            np.arange(1, len(by_character) + 1), by_character, color=colors[name], label=name
        )
    flow_axes.set(
        title="Backward through a text, before training",
        xlabel="character",
        ylabel="gradient norm of the state",
        yscale="log",
    )
    flow_axes.legend()
    for name, (losses, norms) in runs.items():
        steps, is_finite = np.arange(1, len(losses) + 1), np.isfinite(losses)
        last = steps[is_finite][-1]
        for axes, values in ((norm_axes, norms), (loss_axes, losses)):
            shown = np.where(is_finite & np.isfinite(values), values, np.nan)
            axes.plot(steps, shown, color=colors[name], linewidth=0.5, alpha=0.4)
            axes.plot(steps[:last], smooth(shown[:last]), color=colors[name], label=name)
            if last < len(losses):
                axes.plot(
                    last,
                    np.nanmax(shown),
                    "X",
                    color=colors[name],
                    markersize=9,
                    label="NaN from here on",
                )
    norm_axes.set(
        title="Gradient norms over training",
        xlabel="step",
        ylabel="gradient norm, before a clip by it",
        yscale="log",
    )
    loss_axes.set(title="Loss over training", xlabel="step", ylabel="loss (nats per character)")
    loss_axes.legend()
    _figures.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Trains three times from the same weights on the same passages, reports and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--length", type=int, default=200, help="characters that a gradient flows back through"
    )
    parser.add_argument("--out", type=Path, default=Path("out/train_recurrent.png"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    params = init(len(_common.documentation()[1]), args.seed)
    (first,) = _common.passages(ROWS, args.length + 1, 1, args.seed)
    flows = {way.name: np.asarray(flow(params, first, way.max_flow)) for way in (WAYS[0], WAYS[2])}
    for name, by_character in flows.items():
        print(
            f"{name}: the gradient of the last state is {by_character[-1]:.1e}, of the first {by_character[0]:.1e}"
        )
    runs = {}
    with tqdm(total=len(WAYS) * args.steps, unit="step") as bar:
        for way in WAYS:
            bar.set_postfix_str(way.name)
            runs[way.name] = train(way, params, args.length, args.steps, args.seed, bar)
    for name, (losses, norms) in runs.items():
        print(
            f"{name}: loss {losses[0]:.3f} at first, {losses[-10:].mean():.3f} at last; gradient norm "
            f"{np.median(norms):.1e} in the median, {norms.max():.1e} at most"
        )
    plot(runs, flows, args.out)


if __name__ == "__main__":
    main()
