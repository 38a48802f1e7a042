"""The micro-batches of the check are those of `value_and_grad`, and parameters move by a tenth of their size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shrewjax._batches.roles import roles_of
from shrewjax._batches.value_and_grad import Options
from shrewjax._checking.results import batches_of, moved

X, Y = np.arange(12.0, dtype="f").reshape(6, 2), np.arange(6)
OWN = {"argnums": (0,), "carry_argnum": ()}


def loss(w, x, y, *, scale):
    return scale * jnp.sum(x @ w) + jnp.sum(y).astype(jnp.float32)


def test_a_batch_is_divided_as_value_and_grad_does_and_the_rest_stays_as_it_is():
    batches = batches_of(roles_of(loss, OWN, (), None), Options(3), [(X[0], X, Y)], {"scale": 2})
    assert [e.tolist() for e in batches.examples] == [[0, 3], [1, 4], [2, 5]]
    assert [x.tolist() for x in batches.each[1][1:]] == [X[[0, 3]].tolist(), [0, 3]]
    assert batches.names == [("argnums", "w"), ("batch_argnums", "x"), ("batch_argnums", "y")]
    assert batches.loss(*batches.each[0]) == (loss(X[0], X, Y, scale=2), ())


def test_a_list_of_micro_batches_makes_a_whole_one_in_its_order():
    calls = [(X[0], X[:4], Y[:4]), (X[0], X[4:], Y[4:])]
    batches = batches_of(roles_of(loss, OWN, (), None), Options(2), calls, {"scale": 2})
    assert [e.tolist() for e in batches.examples] == [[0, 1, 2, 3], [4, 5]]
    np.testing.assert_array_equal(batches.each[0][1], X)


@pytest.mark.parametrize("x", [np.zeros(1000, "f"), np.full(1000, 3, "f"), np.full(1000, 2, np.float16)])
def test_parameters_move_by_a_tenth_of_their_size_and_zeros_by_a_hundredth(x):
    size = float(np.abs(x).max()) or 0.1
    step = np.asarray(moved(x), np.float64) - np.asarray(x, np.float64)
    assert np.std(step) == pytest.approx(0.1 * size, rel=0.1)
    assert moved(x).dtype == jnp.asarray(x).dtype


def test_complex_parameters_and_python_numbers_move():
    assert moved(1 + 1j).dtype == jax.numpy.result_type(1j)
    assert moved(2.0) != 2.0
