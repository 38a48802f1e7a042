"""Steps of devices that have weights in other micro-batches, in a process of its own: XLA ends one that hangs.

Four devices along "data" have examples in `REAL`, and along "model" two have the same. Each case prints its name.
"""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import bits, mesh_of
from jax import P, lax
from speed import quick_jit

import shrewjax

K, ROWS, WIDTH = 4, 2, 4  # micro-batches, examples in each on a device
REAL = {3}, {0}, {1, 2}, {0, 1, 2, 3}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, ROWS, K, WIDTH)).astype("f")
COUNTS = np.stack([[np.isin(np.arange(K), [*real])] * ROWS for real in REAL]).astype("f")
W = RNG.normal(size=WIDTH).astype("f")
BAD = 2, 0, 1  # the device, the example and the micro-batch of a NaN


def partitioned(x):
    """A roll over an axis that XLA partitions: parts move between devices."""
    return jnp.roll(lax.with_sharding_constraint(x, P(None, "model")), 1, axis=1)


# Losses differ in how they mix the examples of devices.
MIXES = {
    "its own": lambda x: x,
    "synchronized batch norm": lambda x: x - lax.pmean(jnp.mean(x, 0), "data"),
    "sum over another axis": lambda x: lax.psum(x, "model") / 2,
    "permutation over another axis": lambda x: x + lax.ppermute(x, "model", [(0, 1), (1, 0)]),
    "parts over another axis": partitioned,
}
# The policy, and whether types are tracked.
CASES = {
    "its own": [("propagate", True), ("drop_micro_batch", False)],
    "synchronized batch norm": [("propagate", True), ("drop_micro_batch", False)],
    "sum over another axis": [("propagate", True), ("propagate", False)],
    "permutation over another axis": [("propagate", False)],
    "parts over another axis": [("propagate", None)],  # the call maps "data" itself
}


def loss(mix, w, x, counts):
    total = jnp.sum(counts * (mix(x) @ w - 1) ** 2) / jnp.maximum(jnp.sum(counts), 1)
    return total, {"sum": jnp.sum(counts), "mean": total, "max": jnp.max(x)}


def in_float64(name, x, counts):
    """The batch's value. A micro-batch in which a device has a NaN counts nowhere."""
    x, w = x.astype("float64"), W.astype("float64")
    if name == "synchronized batch norm":
        x = x - x.mean((0, 1))
    if name.startswith("permutation"):
        x = 2 * x
    if name.startswith("parts"):
        x = np.roll(x, 1, axis=-1)
    kept = np.isfinite(x).all((0, 1, 3)) * counts
    return np.sum(np.where(kept > 0, (x @ w - 1) ** 2, 0)) / kept.sum()


def run(name, nonfinite, is_tracked, x, skip_empty):
    step = shrewjax.accumulated_value_and_grad(
        lambda *args: loss(MIXES[name], *args),
        K,
        has_aux=True,
        aux_reduction={"sum": "sum", "mean": "mean", "max": "max"},
        weight_fn=lambda w, x, counts: jnp.sum(counts),
        nonfinite=nonfinite,
        sum_over="data",
        skip_empty=skip_empty,
    )
    mesh = mesh_of(data=4, model=2)
    if is_tracked is not None:
        in_specs = P(), P("data"), P("data")
        step = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=P(), check_vma=is_tracked)
    with jax.set_mesh(mesh):
        return jax.block_until_ready(quick_jit(step)(W, x.reshape(-1, WIDTH), COUNTS.reshape(-1)))


def main():
    jax.config.update("jax_num_cpu_devices", 8)
    for name, cases in CASES.items():
        for nonfinite, is_tracked in cases:
            x = X.copy()
            if nonfinite == "drop_micro_batch":
                x[BAD] = np.nan
            found, expected = (run(name, nonfinite, is_tracked, x, skip_empty) for skip_empty in (True, False))
            assert bits(found) == bits(expected), (name, nonfinite)
            np.testing.assert_allclose(found[0][0], in_float64(name, x, COUNTS), rtol=1e-6)
            print(name, nonfinite, flush=True)


if __name__ == "__main__":
    main()
