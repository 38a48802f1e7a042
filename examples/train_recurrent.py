"""Trains a recurrent net on Python's documentation, at a length where its gradients explode, with three ways to clip.

Each state of the net depends on the one before it through the same weights. On the way back through hundreds of
characters, a gradient is multiplied by them as often: it grows until it says nothing but how the first states wobble.

* Without clipping, the first steps throw the weights out of the range where the net learns.
* A global norm shortens the step, but its direction is still that of the explosion.
* `clip_cotangent` limits what flows back into each state, so that no character outweighs the others.

Run it with

    python -m pip install -e '.[examples]'
    python examples/train_recurrent.py

It takes a minute or two on two CPU cores, downloads nothing, prints the losses and norms, and writes
out/train_recurrent.png: the loss, the gradient's norm before the clip by global norm, and, for the net as it is at
first, how what flows back grows on its way.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import _common
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import tqdm

import shrewjax

Params = dict[str, jax.Array]

WIDTH, ROWS = 128, 32
GAIN = 1.5  # of the recurrent weights: from 1 on, what flows back grows
LEARNING_RATE, MAX_NORM = 0.5, 1.0
# What flows back into a state, in units of what flows back from its own character's loss.
MAX_FLOW = 4.0


class Way(NamedTuple):
    """How a run clips."""

    name: str
    max_norm: float = np.inf  # of all gradients together
    max_flow: float = np.inf  # of what flows back into a state


WAYS = [
    Way("without clipping"),
    Way("global norm", max_norm=MAX_NORM),
    Way("clip_cotangent", max_flow=MAX_FLOW),
]


def init(characters: int, seed: int) -> Params:
    """Weights whose products with themselves grow."""
    recurrent, entry, readout = jax.random.split(jax.random.key(seed), 3)
    return {
        "recurrent": GAIN * jax.random.normal(recurrent, (WIDTH, WIDTH)) / WIDTH**0.5,
        "entry": jax.random.normal(entry, (characters, WIDTH)),
        "readout": jax.random.normal(readout, (WIDTH, characters)) / WIDTH**0.5,
        "bias": jnp.zeros(characters),
    }


def loss_fn(params: Params, codes: jax.Array, nudges: jax.Array, max_flow: float) -> jax.Array:
    """The mean loss of each next character; `nudges` are added to the states, one for each character and row."""
    max_norm = max_flow / codes[:, 1:].size

    def step(h: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        code, nudge = x
        h = jnp.tanh(h @ params["recurrent"] + params["entry"][code]) + nudge
        h = shrewjax.clip_cotangent(h, max_norm)
        return h, h

    _, states = jax.lax.scan(step, jnp.zeros((len(codes), WIDTH)), (codes[:, :-1].T, nudges))
    logits = states @ params["readout"] + params["bias"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, codes[:, 1:].T).mean()
