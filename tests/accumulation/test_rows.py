"""Per-device rows: each device's own weight counts, and what is wrong with one of them is wrong with all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from recording import recorder

import shrewjax


@functools.cache
def params_on_two_devices():
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(jnp.zeros(3), jax.sharding.NamedSharding(mesh, jax.P()))


def test_a_nan_among_the_weights_of_devices_makes_the_average_nan():
    params = params_on_two_devices()
    tx = shrewjax.accumulate(recorder(), 1, sum_over="data")
    updates, state = jax.jit(tx.update)(jnp.ones((2, 3)), tx.init(params), weight=jnp.float32([1, jnp.nan]))
    assert bool(state.applied)
    assert np.isnan(updates).all()
