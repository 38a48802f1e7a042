"""What `value_and_grad` does with arguments at the edge of what its docstring describes."""

import jax.numpy as jnp
import numpy as np
import pytest

from shrewjax import value_and_grad


def test_a_batch_of_no_examples_with_a_matrix_in_the_aux_is_an_empty_mean():
    def loss(w, x):
        return jnp.sum(x) * w, {"matrix": jnp.ones((2, 2))}

    (value, aux), grad = value_and_grad(loss, 2, has_aux=True)(1.0, np.zeros((0, 3), np.float32))
    assert (value, grad) == (0, 0)
    np.testing.assert_array_equal(aux["matrix"], np.ones((2, 2)))


def test_remedy_for_a_first_axis_as_long_as_the_batch_keeps_the_argument_whole():
    def loss(w, x, scale):
        return jnp.mean(x @ (scale * w))

    w, x, scale = np.ones(4, np.float32), np.arange(16, dtype=np.float32).reshape(4, 4), np.arange(4, dtype=np.float32)
    with pytest.raises(ValueError, match=r"scale has a first axis of 4.*leave its position out of batch_argnums=$"):
        value_and_grad(loss, 2)(w, x, scale=scale)
    _, grad = value_and_grad(loss, 2, batch_argnums=1)(w, x, scale)
    np.testing.assert_allclose(grad, (x * scale).mean(0))


def test_numbers_that_look_like_a_raw_key_pass_as_int32():
    def loss(w, x, sizes):
        return jnp.mean(x) * w * jnp.float32(sizes[0])

    w, x = np.float32(1), np.ones(4, np.float32)
    with pytest.raises(ValueError, match=r"^argument 2 is a PRNG key.*no key, convert them to int32$"):
        value_and_grad(loss, 2, batch_argnums=1)(w, x, np.array([3, 1], np.uint32))
    assert value_and_grad(loss, 2, batch_argnums=1)(w, x, np.array([3, 1], np.int32))[0] == 3
