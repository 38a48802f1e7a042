"""A batch that cannot be divided among micro-batches is an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of, placed
from jax.sharding import PartitionSpec as P
from speed import quick_jit

from shrewjax import accumulated_value_and_grad

W = jnp.array([0.5, -1.0, 2.0])
X, Y = np.ones((8, 3), np.float32), np.arange(8, dtype=np.float32)


def loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_empty_batch_is_an_error_and_not_a_nan(micro_batches):
    with pytest.raises(ValueError, match=r"^argument 1 must hold an example, got none\. Leave out"):
        accumulated_value_and_grad(loss, micro_batches)(W, X[:0], Y[:0])


def test_on_an_explicit_mesh_each_device_must_have_examples_of_every_micro_batch():
    mesh = mesh_of("Explicit", data=4)

    def step(size):
        x = placed(np.ones((size, 3), "f"), mesh, P("data"))
        return accumulated_value_and_grad(lambda w, x: jnp.mean(x * w), 2)(jnp.float32(3), x)

    with jax.set_mesh(mesh):
        message = r"argument 1 has 12 examples, which micro_batches=2 on each of 4 devices does not divide\. Pad"
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda: step(12))
        value, grads = quick_jit(lambda: step(16))()
    assert (float(value), float(grads)) == (3, 1)
