"""Steps of a rule, one after another, and gradients of given norms."""

from functools import cache

import jax
import numpy as np
from speed import quick_jit

import shrewjax

f32 = np.float32


NORMS = np.exp(np.random.default_rng(0).normal(size=150))  # heavy enough a tail for spikes


def stacked(steps):
    return jax.tree.map(lambda *x: np.stack(x), *steps)


@cache
def step_of(make):
    """One step of a rule, compiled once for all numbers that `make` takes, and for all gradients of the same shapes."""
    return quick_jit(lambda numbers, grads, state, params: make(**numbers).update(grads, state, params))


def run(make, gradients, params=None, **numbers):
    """The updates and the states of every step. `make` returns the rule, given the numbers as arrays."""
    step, state, steps = step_of(make), make(**numbers).init(gradients[0] if params is None else params), []
    numbers = {name: f32(number) for name, number in numbers.items()}
    for g in gradients:
        updates, state = step(numbers, g, state, params)
        steps.append((updates, state))
    return stacked(jax.device_get(steps))


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


def zscore_steps(gradients, **numbers):
    """Steps of ZClip. One program for gradients of the same shapes, because all numbers are its arguments."""
    by_default = {"max_zscore": 2.5, "decay": 0.97, "warmup_steps": 25, "eps": 1e-6, "max_norm": np.inf}
    return run(shrewjax.clip_by_norm_zscore, gradients, **by_default | numbers)


def adagc(leaf_norms, ratio=1.04, decay=0.99, warmup=100, max_norm=1.0):
    """AdaGC, step by step: the leaves' norms afterwards and their averages."""
    gamma = np.full(leaf_norms.shape[1], np.inf)
    for t, norms in enumerate(leaf_norms):
        if t < warmup:
            left = norms * min(1, max_norm / np.linalg.norm(norms))
            gamma = np.minimum(gamma, left)
        else:
            left = norms * np.minimum(1, ratio * gamma / norms)
            gamma = decay * gamma + (1 - decay) * left
        yield left, gamma
