"""The check for NNX models: it finds what its plain form finds, and leaves the model as it was."""

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


def test_a_model_with_dropout_is_checked_and_stays_as_it_was():
    model = Model(nnx.Rngs(0))
    model.norm.use_running_average = True
    before = jax.device_get(jax.tree.leaves(nnx.as_pure(nnx.state(model, nnx.Not(nnx.RngKey)))))
    right = shrewjax.flax.value_and_grad(loss, 2, weight_fn=count)
    assert shrewjax.check_micro_batches(right, model, X, MASK) < 1e-4
    with pytest.raises(AssertionError, match=r"test_flax_check.py:.* return jnp.mean\(.*\n.*by micro_batch_map"):
        shrewjax.check_micro_batches(shrewjax.flax.value_and_grad(loss, 2), model, X, MASK)
    after = jax.device_get(jax.tree.leaves(nnx.as_pure(nnx.state(model, nnx.Not(nnx.RngKey)))))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_batch_norm_differs_at_its_line():
    model = Model(nnx.Rngs(0))
    with pytest.raises(AssertionError, match=r"return self.dropout\(self.norm.*\n.*Or keep what parts, if each"):
        shrewjax.check_micro_batches(shrewjax.flax.value_and_grad(loss, 2, weight_fn=count), model, X, MASK)
