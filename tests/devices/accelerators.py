"""Targets whose compilers may not be installed, what is read from programs for them, and a loop by hand beside ours."""

import importlib.metadata
import os
from collections import Counter

import _compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest

ACCELERATORS = ["h100", "v5e"]


def target_named(name):
    try:
        return _compiled.Target(name)
    except _compiled.MissingCompilerError as error:
        if os.environ.get("SHREWJAX_COMPILES_FOR") == name:
            raise
        pytest.skip(str(error))


def all_reduced(program, least=1e6):
    """The bytes of all-reduces of a size or more, by when they are sent, in P; the compiler may split one in two."""
    sent = Counter()
    for (op, when, size), number in program.collectives.items():
        if op == "all-reduce" and size >= least:
            sent[when] += size * number / program.unit
    return sent


def loses_sums(target):
    """Whether this compiler loses sums of scatters in loops (XLA-27), by the table in docs/xla.md."""
    name, first, last = {
        "h100": ("jax_cuda12_plugin", (0, 10, 1), (0, 11, 2)),
        "v5e": ("libtpu", (0, 0, 41), (0, 0, 48)),
    }[target.name]
    return first <= tuple(int(n) for n in importlib.metadata.version(name).split(".")[:3]) <= last


def sum_by_hand(loss, steps, params, batch):
    """Value and gradients of a loop that adds up gradients in float32."""

    def add(sums, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return (sums[0] + value, jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums[1], grads)), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, np.float32), params)
    micro_batches = batch.reshape(-1, steps, *batch.shape[1:]).swapaxes(0, 1)
    (value, total), _ = jax.lax.scan(add, (jnp.float32(0), zeros), micro_batches)
    return value / steps, jax.tree.map(lambda x, p: (x / steps).astype(p.dtype), total, params)
