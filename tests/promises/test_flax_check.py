"""The check for NNX models: it finds what it finds in plain functions, and the model has the state of one call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shrewjax.flax

X = np.random.default_rng(0).normal(size=(8, 3)).astype("f")
MASK = np.arange(8) % 3 > 0


class Model(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


def loss(model, x, mask):
    return jnp.mean(model(x) ** 2, where=mask[:, None])


def count(model, x, mask):
    return jnp.sum(mask)


def test_a_model_with_dropout_is_checked_and_has_the_state_of_one_call():
    model = Model(nnx.Rngs(0))
    model.norm.use_running_average = True
    twin = nnx.clone(model)
    step = shrewjax.flax.value_and_grad(loss, 2, weight_fn=count)
    assert shrewjax.check_micro_batches(step, model, X, MASK) < 1e-4
    step(twin, X, MASK)
    without_keys = lambda x: nnx.as_pure(nnx.state(x, nnx.Not(nnx.RngKey)))  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, without_keys(model), without_keys(twin))
    with pytest.raises(AssertionError, match=r"test_flax_check.py:.* return jnp.mean\(.*\n.*by micro_batch_map"):
        shrewjax.check_micro_batches(shrewjax.flax.value_and_grad(loss, 2), model, X, MASK)


def test_batch_norm_differs_at_its_line():
    model = Model(nnx.Rngs(0))
    with pytest.raises(AssertionError, match=r"return self.dropout\(self.norm.*\n.*Or keep what parts, if each"):
        shrewjax.check_micro_batches(shrewjax.flax.value_and_grad(loss, 2, weight_fn=count), model, X, MASK)
