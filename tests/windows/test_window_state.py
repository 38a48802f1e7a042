"""The states of windows, which people save. No state has a field that Optax looks for."""

import functools
import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers import CASES

import shrewjax


def test_both_states_of_a_window_have_the_same_fields_in_one_order():
    around = [name for name in shrewjax.AccumulateState._fields if name not in ("applied", "inner_state")]
    assert around == [*shrewjax.GradAccumulatorState._fields]


# --- names that Optax looks for -----------------------------------------------------------------------------------

# Fields that a state of ours shares with one of Optax's, and why.
SHARED = {
    "inner_state": "Optax's own word for the state of what a wrapper wraps; nobody gets one of several by name",
    "micro_step": "optax.experimental's own windows have it, which stand where ours do",
    "values": "of a history; in Optax, of what a function of optax.microbatching returns, which is no state",
}


def fields_of_optax():
    """The fields of all named tuples in the loaded modules of Optax, with their classes."""
    found = {}
    for name, module in [*sys.modules.items()]:
        if name.split(".")[0] == "optax":
            for _, kind in inspect.getmembers(module, inspect.isclass):
                if kind.__module__.startswith("optax.") and hasattr(kind, "_fields"):
                    for field in kind._fields:
                        found.setdefault(field, set()).add(kind.__name__)
    return found


def test_no_field_of_a_state_has_the_name_of_one_of_optax():
    theirs = fields_of_optax()
    assert {"ScaleByAdamState", "ScaleByZoomLinesearchState", "ScheduleFreeState"} <= set().union(*theirs.values())
    states = [getattr(shrewjax, name) for name in shrewjax.__all__ if name.endswith("State")]
    ours = {field: state.__name__ for state in states for field in state._fields}
    assert {field: (ours[field], theirs[field]) for field in ours.keys() & theirs.keys() - SHARED.keys()} == {}


@functools.cache
def clipped_adam(name):
    return optax.chain(CASES[name].make(), optax.scale_by_adam(), optax.scale(-0.1))


@pytest.mark.parametrize("name", CASES)
def test_optax_finds_the_count_of_adam_beside_each_of_our_states(name):
    tx, params = clipped_adam(name), {"w": jnp.ones((4, 3))}
    state = tx.init(params)
    assert optax.tree.get(state, "count") == 0
    as_set = optax.tree.set(state, count=jnp.int32(7))
    assert int(as_set[1].count) == 7
    assert shrewjax.metrics(as_set).keys() == shrewjax.metrics(state).keys()
    for key, value in shrewjax.metrics(as_set).items():
        np.testing.assert_array_equal(value, shrewjax.metrics(state)[key], err_msg=key)


def test_optax_finds_weight_sum_and_trace_inside_a_window():
    params = jnp.ones(2)
    tx = shrewjax.accumulate(optax.contrib.schedule_free(optax.sgd(0.1, momentum=0.9), 0.1), 2, noise_decay=0.5)
    state = tx.update(jnp.ones(2), tx.init(params), params, value=3.0)[1]
    np.testing.assert_array_equal(optax.tree.get(state, "trace"), [0, 0])
    assert optax.tree.get(state, "weight_sum") == 0
    assert int(optax.tree.set(state, weight_sum=jnp.float32(4)).sum_of_weights) == 1


def test_value_and_grad_from_state_works_with_a_window_around_lbfgs():
    """A quadratic, whose minimum one window of a whole batch finds as L-BFGS alone does."""

    def loss(x):
        return jnp.sum(jnp.float32([1, 3]) * (x - 1) ** 2)

    def trajectory(tx, calls):
        params = jnp.float32([4, -2])
        state = tx.init(params)
        stored = optax.value_and_grad_from_state(loss)

        @jax.jit
        def step(params, state):
            value, grad = stored(params, state=state)
            updates, state = tx.update(grad, state, params, value=value, grad=grad, value_fn=loss)
            return optax.apply_updates(params, updates), state

        for _ in range(calls):
            params, state = step(params, state)
        return params

    with jax.numpy_dtype_promotion("standard"):
        alone, in_windows = trajectory(optax.lbfgs(), 3), trajectory(shrewjax.accumulate(optax.lbfgs(), 2), 6)
    np.testing.assert_allclose(in_windows, alone, rtol=1e-5)
