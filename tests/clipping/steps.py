"""Steps of a rule in one compiled loop, and gradients of given norms."""

from functools import cache, partial

import jax
import numpy as np
from helpers import quick_jit

f32 = np.float32


NORMS = np.exp(np.random.default_rng(0).normal(size=150))  # heavy enough a tail for spikes


@cache
def loop(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return state, (updates, state)

    return quick_jit(lambda params, s, g: jax.lax.scan(partial(step, params), s, g))


def run(tx, gradients, params=None):
    """The updates and the states of every step, in one compiled loop; another one for each object `tx`."""
    stacked = jax.tree.map(lambda *x: np.stack(x), *gradients)
    start = params if params is not None else gradients[0]
    _, (updates, states) = loop(tx)(params, tx.init(start), stacked)
    return updates, states


def vectors(norms, size=5):
    """A gradient of each norm, of two leaves, in a direction of its own."""
    rng = np.random.default_rng(1)
    for norm in norms:
        g = rng.normal(size=size)
        g = f32(g * (norm / np.linalg.norm(g)))
        yield {"a": g[:2], "b": g[2:]}


def agc(g, w, axis, clipping=0.1, eps=1e-3):
    """Equation 3 in float64; `axis` are those that share a norm."""
    g, w = np.float64(g), np.float64(w)
    norm = lambda x: np.sqrt(np.sum(x**2, axis=axis, keepdims=True))  # noqa: E731
    bound = clipping * np.maximum(norm(w), eps)
    return np.where(norm(g) > bound, g * bound / norm(g), g)
