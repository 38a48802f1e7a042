"""Training runs in a process of their own: whole, killed in mid-window after a save, or resumed."""

import os
import pathlib
import signal
import sys

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint

import shrewjax

STEPS, SAVED_AFTER = 11, 6  # windows of four: the save falls in the middle of the second one


def gradients(step, params):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda p: p + jnp.asarray(rng.normal(size=p.shape), p.dtype), params)


def restore(folder, kind, fresh):
    if kind == "flax":
        return flax.serialization.from_bytes(fresh, (folder / "state").read_bytes())
    return orbax.checkpoint.StandardCheckpointer().restore(folder / "orbax", fresh)


def save(folder, kind, state):
    if kind == "flax":
        (folder / "state").write_bytes(flax.serialization.to_bytes(state))
        return
    checkpointer = orbax.checkpoint.StandardCheckpointer()
    checkpointer.save(folder / "orbax", state)
    checkpointer.wait_until_finished()


def main(folder, kind, devices, *runs):
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((int(devices),), ("data",), devices=jax.devices()[: int(devices)])

    def place(x):
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.P("data") if x.ndim else jax.P()))

    # clipped by value: a norm's rounding may differ from one sharding to another
    tx = shrewjax.accumulate(optax.chain(shrewjax.clip_by_value(0.5), optax.adamw(0.1)), 4)
    step = jax.jit(lambda p, s, g: shrewjax.apply_gradients(tx, g, s, p, weight=2.5), donate_argnums=(0, 1))

    def train(run):
        params = {"w": jnp.ones((8, 3)), "b": jnp.zeros(8, jnp.bfloat16)}  # anew: the step takes their memory
        state, start = jax.tree.map(place, (params, tx.init(params))), 0
        if run == "resumed":
            state, start = jax.tree.map(place, restore(folder, kind, state)), SAVED_AFTER
        for i in range(start, STEPS):
            state = step(*state, gradients(i, state[0]))
            if run == "killed" and i + 1 == SAVED_AFTER:
                assert int(state[1].micro_step) == 2
                save(folder, kind, state)
            if run == "killed" and i == SAVED_AFTER:
                os.kill(os.getpid(), signal.SIGKILL)
        (folder / run).write_bytes(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(state)))

    for run in runs:
        train(run)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
