"""Gradients whose leaves are sharded over the fixture `mesh`, each in its own way."""

import jax
import numpy as np
from helpers import placed

import shrewjax

P = jax.P
GRADS = {
    "rows": np.float32(np.arange(16).reshape(8, 2)),
    "columns": np.float32(np.ones((3, 8))),
    "replicated": np.float32([3, -4]),
}
SPECS = {"rows": P("data"), "columns": P(None, "model"), "replicated": P()}


def place(grads, mesh, specs=SPECS):
    return placed(grads, mesh, specs)


def clip(grads, ord=None, sharded_over=None):
    return shrewjax.clip_grad_norm(grads, 1.0, ord=ord, sharded_over=sharded_over)
