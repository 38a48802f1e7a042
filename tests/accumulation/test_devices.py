"""Per-device rows: each device's own weight counts, and what is wrong with one of them is wrong with all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of, placed
from recording import recorder
from speed import compiled

import shrewjax


@functools.cache
def one_call_over_devices():
    return compiled(shrewjax.accumulate(recorder(), 1, sum_over="data"))


@functools.cache
def params_on_two_devices():
    mesh = mesh_of(data=2)
    return placed(jnp.zeros(3), mesh, jax.P())


def test_a_call_without_a_gradient_of_a_bare_parameter_counts():
    params = params_on_two_devices()
    tx = shrewjax.accumulate(recorder(), 2, sum_over="data")
    _, state = tx.update(None, tx.init(params), params)
    assert int(state.micro_step) == 1
    np.testing.assert_array_equal(state.weight_sum, [1, 1])
    updates, state = tx.update(jnp.full((2, 3), 4.0), state, params)
    assert int(state.windows) == 1
    np.testing.assert_array_equal(updates, [2, 2, 2])


@pytest.mark.parametrize("weight", [np.nan, -1.0, 2.0**-31])
def test_a_weight_of_one_device_that_python_would_refuse_makes_the_average_nan(weight):
    """Also if the sum over devices is in range, such as 3 - 1."""
    params = params_on_two_devices()
    tx = one_call_over_devices()
    updates, state = tx.update(jnp.ones((2, 3)), tx.init(params), params, weight=jnp.float32([3, weight]))
    assert bool(state.applied)
    assert np.isnan(updates).all()
