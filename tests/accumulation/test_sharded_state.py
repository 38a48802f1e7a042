"""A state on a mesh: how it is sharded, and what comes of it on another number of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import mesh_of, placed
from jax.sharding import PartitionSpec as P

import shrewjax

SHAPE = (8, 3)
TX = shrewjax.accumulate(optax.trace(0.9), 3, sum_over="data")


def params_on(data):
    """Parameters that are sharded over another axis than the data."""
    mesh = mesh_of(data=data, model=2)
    return placed(jnp.zeros(SHAPE), mesh, P("model"))


def test_specs_have_the_axis_of_the_rows_before_those_of_the_parameter():
    specs = shrewjax.state_specs(TX.init(params_on(4)))
    assert specs.gradient_sum == P(("data",), "model")
    assert specs.weight_sum == P(("data",))
    assert specs.inner_state.trace == P("model")
    assert specs.windows == P()
    of_rows = shrewjax.state_specs(TX.init(params_on(4)), axis_names={"data"})
    assert of_rows.gradient_sum == P(("data",), None)
    assert of_rows.inner_state.trace == P(None)
    over_both = placed(jnp.zeros(SHAPE), params_on(4).sharding.mesh, P(("data", "model")))
    assert shrewjax.state_specs(over_both, axis_names={"model"}) == P(("model",))
    assert shrewjax.state_specs({"counter": jnp.zeros(()), "number": 1.0}) == {"counter": P(), "number": P()}


@pytest.mark.parametrize("devices", [2, 1])
def test_the_sum_of_the_rows_stays_and_all_of_it_is_in_the_first(devices):
    rows = np.random.default_rng(0).integers(-9, 9, size=(4, *SHAPE)).astype(np.float32)
    state, like = TX.init(params_on(4)), TX.init(params_on(devices))
    weights = jax.device_put(np.float32([1, 2, 3, 4]), state.weight_sum.sharding)
    state = state._replace(gradient_sum=jax.device_put(rows, state.gradient_sum.sharding), weight_sum=weights)
    trace = jax.device_put(rows[0], state.inner_state.trace.sharding)
    state = state._replace(micro_step=jnp.int32(2), inner_state=state.inner_state._replace(trace=trace))
    moved = shrewjax.redistribute(state, like)
    others = np.zeros((devices - 1, *SHAPE))
    np.testing.assert_array_equal(moved.gradient_sum, [rows.sum(0), *others])
    np.testing.assert_array_equal(moved.weight_sum, [10] + [0] * (devices - 1))
    assert int(moved.micro_step) == 2
    np.testing.assert_array_equal(moved.inner_state.trace, rows[0])  # its first dimension has no rows
    assert [x.sharding for x in jax.tree.leaves(moved)] == [x.sharding for x in jax.tree.leaves(like)]


def test_a_window_without_rows_moves_as_it_is():
    whole = shrewjax.accumulate(optax.sgd(1.0), 3).init(jnp.arange(3.0))
    state = whole._replace(gradient_sum=jnp.arange(3.0))
    np.testing.assert_array_equal(shrewjax.redistribute(state, whole).gradient_sum, [0, 1, 2])


def test_error_has_the_whole_path_of_a_leaf_that_does_not_fit():
    like = (TX.init(params_on(2)), jnp.zeros(2))
    restored = like[0]._replace(micro_step=jnp.zeros((), jnp.float32))
    with pytest.raises(ValueError, match=r"leaf \[0\]\.micro_step must be int32"):
        shrewjax.redistribute((restored, like[1]), like)
    with pytest.raises(ValueError, match=r"leaf \[1\] must be float32 of shape \(2,\)"):
        shrewjax.redistribute((like[0], jnp.zeros(3)), like)
