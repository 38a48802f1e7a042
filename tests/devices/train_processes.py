"""One of two processes, of four devices each, that train together: a linear model, sharded along both mesh axes."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from helpers import MAPPED, TRANSFORMATIONS, mesh_of, own_params
from jax import P
from jax.sharding import NamedSharding

import shrewjax

PROCESSES, DEVICES = 2, 4
STEPS, ACCUM_STEPS = 24, 3
NAN_STEPS = (4, 10)  # in the second window and the fourth
EXAMPLES, INPUTS, OUTPUTS = 16, 6, 4


def inner(name, transformations=TRANSFORMATIONS):
    """The transformation, before an optimizer that has a state."""
    sgd = optax.sgd(0.1, momentum=0.9)
    return sgd if name == "accumulate" else optax.chain(transformations[name](), sgd)


def nonfinite(name):
    """A bad micro-batch goes as far as to the guard, where there is one."""
    return "propagate" if name == "skip_nonfinite" else "drop_micro_batch"


def batch(step, nan_steps=()):
    """Inputs, targets, and which examples are there: of the first four, those of two devices, at times none."""
    rng = np.random.default_rng(step)
    x, y = rng.normal(size=(EXAMPLES, INPUTS)), rng.normal(size=(EXAMPLES, OUTPUTS))
    kept = rng.random(EXAMPLES) < 0.7
    kept[:4] &= step % 5 != 0
    kept[-1] = True
    if step in nan_steps:
        x[-1, 0] = np.nan  # the last example is one of the second process
    return x.astype(np.float32), y.astype(np.float32), kept


def first_params():
    rng = np.random.default_rng(1000)
    return {"w": rng.normal(size=(INPUTS, OUTPUTS)).astype(np.float32), "b": np.zeros(OUTPUTS, np.float32)}


def mean_loss(params, x, y, kept):
    """The mean loss of all examples along "fsdp", and their number. Without examples it is 0 / 0."""
    w = jax.lax.all_gather(params["w"], "fsdp", axis=0, tiled=True)
    errors = jnp.sum((x @ w + params["b"] - y) ** 2, axis=1)
    total, number = jax.lax.psum((jnp.sum(jnp.where(kept, errors, 0)), jnp.sum(kept)), "fsdp")
    return total / number, number


class Training:
    """Parameters, state and the compiled step of one transformation inside an accumulation."""

    def __init__(self, name):
        self.mesh = mesh_of(data=4, fsdp=2)
        self.tx = shrewjax.accumulate(inner(name, MAPPED), ACCUM_STEPS, sum_over="data", nonfinite=nonfinite(name))
        self.reset()
        specs = shrewjax.state_specs((self.params, self.state))

        def step(params, state, *of_batch):
            own = own_params(params, "data")
            grads, number = jax.grad(mean_loss, has_aux=True)(own, *of_batch)
            return shrewjax.apply_gradients(self.tx, grads, state, params, weight=number)

        in_specs = (*specs, *[P(("data", "fsdp"))] * 3)
        mapped = jax.shard_map(step, mesh=self.mesh, in_specs=in_specs, out_specs=specs)
        self.compiled = jax.jit(mapped, donate_argnums=(0, 1))

    def reset(self):
        specs = {"w": P("fsdp"), "b": P()}
        self.params = jax.tree.map(self.place, first_params(), specs)
        self.state = self.tx.init(self.params)
        self.state = jax.tree.map(self.place, self.state, shrewjax.state_specs(self.state))

    def place(self, x, spec):
        return jax.device_put(x, NamedSharding(self.mesh, spec))

    def step(self, number, nan_steps=()):
        """Each process brings its own half of the examples."""
        sharding = NamedSharding(self.mesh, P(("data", "fsdp")))
        own = (np.split(x, PROCESSES)[jax.process_index()] for x in batch(number, nan_steps))
        placed = [jax.make_array_from_process_local_data(sharding, x) for x in own]
        self.params, self.state = self.compiled(self.params, self.state, *placed)

    def trajectory(self, nan_steps=()):
        """The parameters at the end of each window, as this process has them, and what was dropped."""
        self.reset()
        at_end = []
        for i in range(STEPS):
            self.step(i, nan_steps)
            if (i + 1) % ACCUM_STEPS == 0:
                at_end.append({k: own_copy(x) for k, x in self.params.items()})
        return {k: np.stack([x[k] for x in at_end]) for k in at_end[0]} | {"dropped": own_copy(self.state.dropped)}


def own_copy(x):
    """The whole array from the shards on this process's devices, which agree to the last bit."""
    whole, again = np.zeros(x.shape, x.dtype), np.zeros(x.shape, x.dtype)
    for shards, copy in ((x.addressable_shards, whole), (reversed(x.addressable_shards), again)):
        for shard in shards:
            copy[shard.index] = shard.data
    assert whole.tobytes() == again.tobytes()
    return whole


def main(folder, port, process, *names):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_disable_most_optimizations", True)
    jax.distributed.initialize(f"localhost:{port}", PROCESSES, int(process), initialization_timeout=60)
    for name in names:
        training = Training(name)
        for kind, nan_steps in (("clean", ()), ("nan", NAN_STEPS)):
            np.savez(folder / f"{name}-{kind}-{process}.npz", **training.trajectory(nan_steps))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
