"""All transformations together in one `nnx.Optimizer`, which keeps each array of the state in a variable."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import TRANSFORMATIONS, assert_close, bits
from speed import quick_jit

import shrewjax

pytestmark = pytest.mark.thorough

RULES = [
    make() for name, make in TRANSFORMATIONS.items() if name not in ("skip_nonfinite", "skip_on_spike", "accumulate")
]
PARAMS = {"bias": jnp.float32([0.1, -0.2, 0.3]), "kernel": jnp.float32([[1.0, -2.0, 0.5], [0.25, 3.0, -1.0]])}
GRADS = [jax.tree.map(lambda x, s=s: s * x + 0.1, PARAMS) for s in (1.0, -0.5, 2.0, 0.25)]


def everything():
    """Every transformation, and every option that adds to the metrics."""
    rules = optax.chain(shrewjax.clip_by_percentile(90, scope="leaf"), *RULES, optax.sgd(0.1))
    return shrewjax.accumulate(shrewjax.skip_nonfinite(shrewjax.skip_on_spike(rules)), 2, noise_decay=0.9)


def optimizer_in_nnx():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    model.bias[...], model.kernel[...] = PARAMS["bias"], PARAMS["kernel"]
    return model, nnx.Optimizer(model, everything(), wrt=nnx.Param)


def assert_metrics_are_those_of(plain, *states):
    expected = shrewjax.metrics(plain)
    assert {"accumulate/noise_scale", "skip_on_spike/threshold", "clip_by_leaf_norm/grad_norm_max"} <= set(expected)
    for found in states:
        assert sorted(found) == sorted(expected)
        assert all(isinstance(x, jax.Array) for x in found.values())
        assert_close(dict(sorted(found.items())), dict(sorted(expected.items())), rtol=1e-5, atol=1e-6)


def test_metrics_of_all_transformations_are_those_without_flax():
    """Each array of the state has other numbers, so that no metric can be taken from the wrong one."""
    _, optimizer = optimizer_in_nnx()
    leaves, treedef = jax.tree.flatten(everything().init(PARAMS))
    leaves = [(np.arange(x.size).reshape(x.shape) + i + 1).astype(x.dtype) for i, x in enumerate(leaves)]
    variables = jax.tree.leaves(optimizer.opt_state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for variable, x in zip(variables, leaves, strict=True):
        assert (variable.shape, variable.dtype) == (x.shape, x.dtype)
        variable[...] = x
    graph, state = nnx.split(optimizer)
    inside_jit = quick_jit(lambda state: shrewjax.metrics(nnx.merge(graph, state).opt_state))(state)
    assert_metrics_are_those_of(treedef.unflatten(leaves), shrewjax.metrics(optimizer.opt_state), inside_jit)


def test_metrics_and_parameters_are_those_without_flax_after_training():
    """After four micro-batches, and so are the parameters."""
    model, optimizer = optimizer_in_nnx()
    graph, nnx_state = nnx.split((model, optimizer))
    like = jax.tree.structure(nnx.state(model, nnx.Param))

    @quick_jit
    def nnx_step(state, grads):
        model, optimizer = nnx.merge(graph, state)
        optimizer.update(model, jax.tree.unflatten(like, jax.tree.leaves(grads)), weight=2.0)
        return nnx.state((model, optimizer)), shrewjax.metrics(optimizer.opt_state)

    tx = everything()
    step = quick_jit(lambda grads, state, params: shrewjax.apply_gradients(tx, grads, state, params, weight=2.0))
    params, state = PARAMS, tx.init(PARAMS)
    for grads in GRADS:
        nnx_state, measured = nnx_step(nnx_state, grads)
        params, state = step(grads, state, params)
    model, optimizer = nnx.merge(graph, nnx_state)
    assert_metrics_are_those_of(state, shrewjax.metrics(optimizer.opt_state), measured)
    assert_close({"bias": model.bias[...], "kernel": model.kernel[...]}, params, rtol=1e-5, atol=1e-6)
    assert bits(params) != bits(PARAMS)


def test_check_window_reads_the_window():
    _, optimizer = optimizer_in_nnx()
    of_nnx = optimizer.opt_state
    shrewjax.check_window(of_nnx, 2)
    spoilt = of_nnx._replace(micro_step=type(of_nnx.micro_step)(jnp.int32(7)))
    with pytest.raises(AssertionError, match="micro_step must be between 0 and 1"):
        shrewjax.check_window(spoilt, 2)
    with pytest.raises(ValueError, match="must contain a window"):
        shrewjax.check_window(
            nnx.Optimizer(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), optax.sgd(1.0), wrt=nnx.Param).opt_state, 2
        )


def test_norms_by_leaf_have_the_names_of_the_models_leaves():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, shrewjax.clip_by_global_norm(1.0, per_leaf=True), wrt=nnx.Param)
    found = shrewjax.metrics(optimizer.opt_state)
    names = {name.removeprefix("clip_by_global_norm/leaf_norm/") for name in found if "leaf_norm/" in name}
    assert names == {"bias", "kernel"}
    np.testing.assert_array_equal(found["clip_by_global_norm/largest_share"], 0)
