"""Trains an NNX model on eight devices, in a process of its own: whole, saved in mid-window, or resumed."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
from flax import nnx

import shrewjax
import shrewjax.flax

STEPS, SAVED_AFTER = 7, 4  # windows of three: the save falls in the middle of the second one


class Net(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def arrays(node):
    """The keys as numbers, which every version of Orbax saves."""
    return {
        jax.tree_util.keystr(path): jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for path, x in jax.tree.leaves_with_path(nnx.state(node))
    }


def place(x):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    is_sharded = x.ndim and x.shape[0] % 8 == 0
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P("data") if is_sharded else jax.P()))


def main(folder, *runs):
    jax.config.update("jax_num_cpu_devices", 8)

    @nnx.jit(donate_argnames=("model", "optimizer"))
    def step(model, optimizer, x):
        _, grads = shrewjax.flax.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2), 2)(model, x)
        optimizer.update(model, grads, weight=len(x))

    for run in runs:
        model = Net()
        # Clipped by value: a norm's rounding may differ from one sharding to another.
        tx = shrewjax.accumulate(optax.chain(shrewjax.clip_by_value(0.5), optax.adamw(0.1)), 3)
        nodes = model, shrewjax.flax.Optimizer(model, tx, wrt=nnx.Param)
        nnx.update(nodes, jax.tree.map(place, nnx.state(nodes)))
        start = 0
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            if run == "resumed":
                saved, state = checkpointer.restore(folder / "orbax", arrays(nodes)), nnx.state(nodes)
                with_keys = (
                    jax.random.wrap_key_data(new) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else new
                    for x, new in zip(jax.tree.leaves(state), saved.values(), strict=True)
                )
                nnx.update(nodes, jax.tree.unflatten(jax.tree.structure(state), with_keys))
                start = SAVED_AFTER
                kernel = nodes[1].opt_state.gradient_sum["linear"]["kernel"][...]
                assert kernel.sharding.spec == jax.P("data"), kernel.sharding
            for i in range(start, STEPS):
                x = np.random.default_rng(i).normal(size=(32, 8)).astype(np.float32)
                step(*nodes, place(jnp.asarray(x)))
                if run == "saved" and i + 1 == SAVED_AFTER:
                    assert int(nodes[1].opt_state.micro_step[...]) == 1
                    checkpointer.save(folder / "orbax", arrays(nodes))
                    checkpointer.wait_until_finished()
                    break
            else:
                (folder / run).write_bytes(b"".join(np.asarray(x).tobytes() for x in arrays(nodes).values()))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
