"""Per-device rows: each device's own weight counts, and what is wrong with one of them is wrong with all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, lenient, mesh_of, placed, thorough
from recording import recorder
from speed import compiled, quick_jit

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
    np.testing.assert_array_equal(state.sum_of_weights, [1, 1])
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


REPLICA = jax.P("replica")


def of_model(tree, i=0):
    return jax.tree.map(lambda x: x[i], tree)


@pytest.mark.parametrize("axis_type", ["Auto", *thorough("Explicit")])
@pytest.mark.parametrize(
    "options",
    [{"nonfinite": "drop_window", "noise_decay": 0.5}, *thorough({}, {"nonfinite": "extend_window"})],
    ids=str,
)
@pytest.mark.parametrize("check_vma", [True, *thorough(False)])
def test_models_of_their_own_on_each_device_have_windows_of_their_own(axis_type, options, check_vma):
    """Their windows close at different calls, and a NaN of one is no other's. Against a loop over the models."""
    mesh = mesh_of(axis_type, replica=4)
    tx = shrewjax.accumulate(lenient(optax.adam(0.1)), 2, sum_over=(), **options)

    def of_one(params, state, grads, weight, value):
        flush = weight > 3
        return shrewjax.apply_gradients(tx, grads, state, params, weight=weight, value=value, flush=flush)

    def of_device(*args):
        return jax.tree.map(lambda x: x[None], of_one(*of_model(args)))

    mapped = jax.jit(jax.shard_map(of_device, mesh=mesh, in_specs=REPLICA, out_specs=REPLICA, check_vma=check_vma))
    params = jnp.arange(12.0).reshape(4, 3)
    carry = params, jax.vmap(tx.init)(params)
    alone, step = [of_model(carry, i) for i in range(4)], quick_jit(of_one)
    rng = np.random.default_rng(0)
    for call in range(5):
        grads = rng.normal(size=(4, 3)).astype("f")
        grads[2, 0] = np.nan if call == 1 and options else 0
        rest = grads, rng.integers(1, 5, 4).astype("f"), rng.normal(size=4).astype("f")
        carry = mapped(*placed((*carry, *rest), mesh, REPLICA))
        alone = [step(*x, *of_model(rest, i)) for i, x in enumerate(alone)]
    assert len({*map(int, carry[1].windows)}) > 1
    assert_close(carry, jax.tree.map(lambda *x: jnp.stack(x), *alone), rtol=2e-6)


def test_a_collective_inside_that_some_devices_would_skip_is_an_error():
    tx = shrewjax.accumulate(optax.stateless(lambda u, _: jax.lax.psum(u, "replica")), 2, sum_over=())

    def step(state, grads):
        return jax.tree.map(lambda x: x[None], tx.update(grads[0], of_model(state))[0])

    params = jnp.ones((4, 3))
    mapped = jax.shard_map(step, mesh=mesh_of(replica=4), in_specs=REPLICA, out_specs=REPLICA)
    with pytest.raises(ValueError, match=r"^the decision .* may differ over 'replica', where inner has a coll"):
        jax.eval_shape(mapped, jax.vmap(tx.init)(params), params)
