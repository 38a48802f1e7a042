"""Compares gradients that are added over micro-batches on all devices with the gradients of the large batch.

    python tests/devices/sums_on_devices.py --devices 2

All gradients here are scatters, which some versions of XLA:GPU lose in a loop (XLA-27): those of embeddings, tied or
not, of `take_along_axis`, and the counts in the aux and in the carry. It prints a line for each way to write the loop,
and exits with 1 if a row of shrewjax is wrong.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shrewjax

MICRO_BATCHES, VOCABULARY, WIDTH, EXPERTS = 4, 4096, 32, 4
LEAF = jax.ShapeDtypeStruct((VOCABULARY, WIDTH), jnp.float32)
PARAMS = {"table": LEAF, "along": LEAF, "dispatched": LEAF, "out": LEAF}
TIED = {"table": LEAF, "along": LEAF, "dispatched": LEAF}  # the table is also the output's
BATCH = jax.ShapeDtypeStruct((64, 4), jnp.int32)
COUNTS = jax.ShapeDtypeStruct((VOCABULARY,), jnp.float32)


def loss_and_counts(params, tokens, counts):
    """A loss whose gradients are scatters; in the aux, how often each token is there; the carry counts them, too."""
    flat = tokens.reshape(-1)
    expert = flat % EXPERTS
    slots = jnp.zeros((EXPERTS, len(flat), WIDTH)).at[expert, jnp.arange(len(flat))].add(params["dispatched"][flat])
    x = jnp.tanh(
        params["table"][flat]
        + jnp.take_along_axis(params["along"], flat[:, None], axis=0)
        + jnp.tanh(slots)[expert, jnp.arange(len(flat))]
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(
        x @ params.get("out", params["table"]).T, jnp.roll(tokens, -1, 1).reshape(-1)
    )
    seen = jax.ops.segment_sum(jnp.ones(len(flat)), flat, VOCABULARY)
    return jnp.mean(losses), (seen, counts + seen)


def loss(params, tokens):
    """The loss alone."""
    return loss_and_counts(params, tokens, jnp.zeros(VOCABULARY))[0]


def count(params, tokens, counts):
    """A weight."""
    return jnp.sum(tokens > 0).astype(jnp.float32)


def whole(**options):
    """Our step, with the counts in the aux and in the carry."""
    return shrewjax.accumulated_value_and_grad(
        loss_and_counts, MICRO_BATCHES, has_aux=True, carry_argnum=2, aux_reduction="sum", **options
    )


STEPS = {
    "mean": whole(),
    "sum": whole(reduction="sum"),
    "weighted": whole(weight_fn=count),
    "weight 2": whole(weight_fn=lambda *_: 2),
    "drop_micro_batch": whole(nonfinite="drop_micro_batch"),
}


def micro_batch(tokens, i):
    """Micro-batch i, as `value_and_grad` takes it."""
    return tokens.reshape(-1, MICRO_BATCHES, tokens.shape[1])[:, i]


def by_hand(params, tokens, counts):
    """The loop that everybody writes."""

    def add(total, i):
        value, grads = jax.value_and_grad(loss)(params, micro_batch(tokens, i))
        return jax.tree.map(jnp.add, total, (value, grads)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(add, zeros, jnp.arange(MICRO_BATCHES))[0]


def by_accumulate(params, tokens, counts):
    """Our transformation in a scan; its updates are the mean gradient."""
    tx = shrewjax.accumulate(optax.sgd(-1.0), MICRO_BATCHES)

    def add(carry, i):
        grads = jax.grad(loss)(params, micro_batch(tokens, i))
        updates, state = tx.update(grads, carry[1], params)
        return (updates, state), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    return jnp.zeros(()), jax.lax.scan(add, (zeros, tx.init(params)), jnp.arange(MICRO_BATCHES))[0][0]


def by_accumulator(params, tokens, counts):
    """Our accumulator in a scan."""
    accumulator = shrewjax.GradAccumulator(MICRO_BATCHES)

    def add(state, i):
        return accumulator.add(state, jax.grad(loss)(params, micro_batch(tokens, i))), None

    state, _ = jax.lax.scan(add, accumulator.init(params), jnp.arange(MICRO_BATCHES))
    return jnp.zeros(()), accumulator.take(state)[0]


LOOPS = {"accumulate": by_accumulate, "GradAccumulator": by_accumulator}
OTHERS = {"a scan by hand": by_hand}


def values(shapes, seed=0):
    """Parameters and tokens."""
    rng = np.random.default_rng(seed)
    params = {name: rng.standard_normal(x.shape, np.float32) for name, x in shapes.items()}
    return params, rng.integers(0, VOCABULARY, BATCH.shape).astype(np.int32)


def expected_of(params, tokens):
    """The results of each way: sums over micro-batches, each of which is computed alone on one device, in float64."""
    run = jax.jit(jax.value_and_grad(loss))
    parts = [run(params, micro_batch(tokens, i)) for i in range(MICRO_BATCHES)]
    weights = [float(count(params, micro_batch(tokens, i), None)) for i in range(MICRO_BATCHES)]
    seen = np.bincount(tokens.reshape(-1), minlength=VOCABULARY)

    def combined(weights):
        return jax.tree.map(
            lambda *x: sum(w * np.asarray(y, np.float64) for w, y in zip(weights, x, strict=True)), *parts
        )

    total, mean = combined([1] * MICRO_BATCHES), combined([1 / MICRO_BATCHES] * MICRO_BATCHES)
    by_weight = combined([w / sum(weights) for w in weights])
    of_steps = dict.fromkeys(STEPS, mean) | {"sum": total, "weighted": by_weight}
    of_steps = {name: ((value, (seen, seen)), grads) for name, (value, grads) in of_steps.items()}
    return of_steps | dict.fromkeys(OTHERS, total) | dict.fromkeys(LOOPS, (0.0, mean[1]))


WAYS = {**STEPS, **LOOPS, **OTHERS}


def errors_on(devices, names=WAYS):
    """For each way to write the loop, the largest error of a gradient or count, relative to the largest element."""
    params, tokens = values(PARAMS)
    mesh = Mesh(np.array(devices), ("data",))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    placed = (
        jax.device_put(params, whole),
        jax.device_put(tokens, split),
        jax.device_put(np.zeros(VOCABULARY, np.float32), whole),
    )
    wanted = expected_of(params, tokens)
    errors = {}
    for name in names:
        pairs = zip(jax.tree.leaves(jax.jit(WAYS[name])(*placed)), jax.tree.leaves(wanted[name]), strict=True)
        errors[name] = max(np.abs(np.asarray(x) - y).max() / max(np.abs(y).max(), 1e-30) for x, y in pairs)
    return errors


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, help="the number of devices, which divides 16; default: all")
    number = parser.parse_args().devices or jax.device_count()
    devices = jax.devices()[:number]
    if len(devices) < number or number < 2:
        parser.error(f"needs two devices or as many as --devices says, found {jax.device_count()}")
    print(f"jax {jax.__version__}, {number} x {devices[0].device_kind}")
    errors = errors_on(devices)
    for name, error in errors.items():
        print(f"{name:20s} {'WRONG' if error > 1e-3 else 'right'}   largest relative error {error:.1e}")
    sys.exit(any(errors[name] > 1e-3 for name in (*STEPS, *LOOPS)))


if __name__ == "__main__":
    main()
