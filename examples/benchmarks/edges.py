"""Compares the results of Optax and of shrewjax at the edges: overflow, NaN, order, shards, windows, dtypes.

    python examples/benchmarks/edges.py [--json FILE]

Nothing is timed. On a CPU, eight devices are made of one.
"""

import itertools
from typing import Any

import _harness
import clipping
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Figure, Row

import shrewjax


def clipped_norm(quick: bool) -> list[Row]:
    """The norm of a clipped gradient whose squares leave the range; max_norm is 1."""
    del quick
    rows = []
    for value, dtype in ((300.0, jnp.float16), (1e20, jnp.float32), (1e-4, jnp.float16)):
        grads = jnp.full(
            10**6 if value < 1 else 10, value, dtype
        )  # of 1e-4, the norm is 0.1: to be left alone

        def norm(clip: optax.GradientTransformation, grads: Any = grads) -> Figure:
            clipped = np.asarray(jax.jit(clip.update)(grads, clip.init(grads))[0], np.float64)
            return Figure(float(np.linalg.norm(clipped)))

        max_norm = 0.01 if value < 1 else 1.0
        measure = f"norm after clipping {grads.size:,} {grads.dtype} gradients of {value:g} to {max_norm:g}"
        ours, other = (
            norm(shrewjax.clip_by_global_norm(max_norm)),
            norm(optax.clip_by_global_norm(max_norm)),
        )
        rows.append(Row(measure, ours, other))
    return rows


def leaf_order(quick: bool) -> list[Row]:
    """How much the norm of the same leaves depends on their names, which decide their order."""
    del quick
    rng = np.random.default_rng(0)
    leaves = [
        jnp.asarray(rng.normal(size=1000), dtype)
        for dtype in ("bfloat16", "bfloat16", "bfloat16", "float32")
    ]

    def spread(norm: Any) -> Figure:
        orders = itertools.permutations(leaves)
        norms = [float(jax.jit(norm)(dict(zip("abcd", order, strict=True)))) for order in orders]
        return Figure((max(norms) - min(norms)) / min(norms))

    return [
        Row(
            "relative spread of the norm over the order of four leaves",
            *map(spread, (shrewjax.grad_norm, optax.tree.norm)),
        )
    ]


def shards(quick: bool) -> list[Row]:
    """The norm inside shard_map of a gradient with a part on each device, against that of the whole."""
    del quick
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    grads = np.random.default_rng(0).normal(size=(8 * jax.device_count(), 4)).astype(np.float32)

    def error(norm: Any) -> Figure:
        def on_device(g: jax.Array) -> jax.Array:
            return norm(g)[None]

        mapped = jax.shard_map(
            on_device, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"), check_vma=False
        )
        return Figure(float(np.max(np.abs(jax.jit(mapped)(grads) / np.linalg.norm(grads) - 1))))

    ours = error(lambda g: shrewjax.grad_norm(g, sharded_over="data"))
    return [
        Row(
            f"relative error of the norm inside shard_map, {jax.device_count()} devices",
            ours,
            error(optax.tree.norm),
        )
    ]


def windows(quick: bool) -> list[Row]:
    """Uneven micro-batches, a NaN in one window, and a last window that is not full."""
    del quick
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 5)).astype(np.float32), rng.normal(size=32).astype(np.float32)
    gradient = jax.jit(jax.grad(lambda w, x, y: jnp.mean((x @ w - y) ** 2)))
    w, pieces = jnp.zeros(5), np.split(np.arange(32), [20, 23, 31])
    ours, theirs = (
        shrewjax.accumulate(optax.identity(), 4),
        _harness.multi_steps(optax.identity(), 4),
    )
    mean, of_means = None, None
    state, their_state = ours.init(w), theirs.init(w)
    for rows in pieces:
        g = gradient(w, x[rows], y[rows])
        mean, state = ours.update(g, state, w, weight=len(rows))
        of_means, their_state = theirs.update(g, their_state, w)
    exact = np.asarray(gradient(w, x, y))
    uneven = [
        Figure(float(np.linalg.norm(g - exact) / np.linalg.norm(exact))) for g in (mean, of_means)
    ]

    def finite_after_a_nan(tx: optax.GradientTransformation) -> Figure:
        state, update = tx.init(w), jax.jit(tx.update)
        for i in range(8):
            updates, state = update(jnp.full(5, np.nan if i == 1 else 1.0), state, w)
        return Figure(float(np.mean(np.isfinite(updates))))

    def used_of_ten(tx: optax.GradientTransformation) -> Figure:
        state, used = tx.init(w), 0.0
        for _ in range(10):
            updates, state = tx.update(jnp.ones(5), state, w)
            used += 4 * float(updates[0])  # the average of four
        if tx is ours:
            used += 2 * float((shrewjax.flush(tx, state, w)[0] - w)[0])
        return Figure(used)

    # With a state inside, the average of the broken window must not get there either.
    adam = optax.adam(0.1)
    dropping = shrewjax.accumulate(adam, 4, nonfinite="drop_micro_batch")
    adams = (dropping, _harness.multi_steps(adam, 4))

    return [
        Row("error of a window of 20, 3, 8 and 1 examples against the one large batch", *uneven),
        Row(
            "share of finite averages from the accumulator after a window with a NaN, both with defaults",
            *map(finite_after_a_nan, (ours, theirs)),
        ),
        Row(
            "share of finite updates of adam after a window with a NaN, drop_micro_batch (MultiSteps, defaults)",
            *map(finite_after_a_nan, adams),
        ),
        Row(
            "micro-batches used of 10, in windows of 4 (with flush)",
            *map(used_of_ten, (ours, theirs)),
        ),
    ]


def dtypes(quick: bool) -> list[Row]:
    """Windows of complex gradients, and of float64 ones."""
    del quick

    def error(tx: optax.GradientTransformation, gradients: np.ndarray) -> Figure:
        exact = gradients.mean(axis=0)
        average, state = None, tx.init(jnp.zeros_like(exact))
        for gradient in gradients:
            average, state = tx.update(jnp.asarray(gradient), state, jnp.zeros_like(exact))
        return Figure(float(np.linalg.norm(average - exact) / np.linalg.norm(exact)))

    rows = []
    for what, gradients in (
        ("[1+2j, 3-1j] twice", np.complex64([[1 + 2j, 3 - 1j]] * 2)),
        (
            "eight float64 gradients of 1,000 elements",
            np.random.default_rng(0).normal(size=(8, 1000)),
        ),
    ):
        with jax.enable_x64(gradients.dtype == np.float64):
            txs = (
                make(optax.identity(), len(gradients))
                for make in (shrewjax.accumulate, _harness.multi_steps)
            )
            rows.append(
                Row(
                    f"relative error of the average of {what}",
                    *(error(tx, gradients) for tx in txs),
                )
            )
    return rows


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    _harness.main(__doc__, [clipped_norm, clipping.norm_error, leaf_order, shards, windows, dtypes])
