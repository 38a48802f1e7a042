"""Training runs in a process of their own: whole, killed in mid-window after a save, or resumed.

A whole run goes on with other devices where the others save and resume. With another sharding XLA may round otherwise:
it compiles `a + b * c` of a few elements as one operation or as two, which jaxlib 0.12 decides by their number.
"""

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


def main(folder, kind, devices_before, devices_after, *runs):
    jax.config.update("jax_num_cpu_devices", 8)

    def place(tree, devices):
        mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])
        specs = (jax.P("data"), jax.P())
        return jax.tree.map(lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, specs[x.ndim == 0])), tree)

    # clipped by value: a norm's rounding may differ from one sharding to another
    tx = shrewjax.accumulate(optax.chain(shrewjax.clip_by_value(0.5), optax.adamw(0.1)), 4)
    step = jax.jit(lambda p, s, g: shrewjax.apply_gradients(tx, g, s, p, weight=2.5), donate_argnums=(0, 1))

    def train(run):
        params = {"w": jnp.ones((8, 3)), "b": jnp.zeros(8, jnp.bfloat16)}  # anew: the step takes their memory
        state, start = place((params, tx.init(params)), int(devices_before)), 0
        if run == "resumed":
            state, start = restore(folder, kind, place(state, int(devices_after))), SAVED_AFTER
        for i in range(start, STEPS):
            if i == SAVED_AFTER:
                state = place(state, int(devices_after))
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
