"""The micro-batches of the check are those of `value_and_grad`, and parameters move by a tenth of their size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shrewjax._batches.value_and_grad import Options
from shrewjax._checking.results import batches_of, nearby

X, Y = np.arange(12.0, dtype="f").reshape(6, 2), np.arange(6)
ROLES = {"argnums": (0,), "carry_argnum": (), "rng_argnums": (), "batch_argnums": None}


def loss(w, x, y, *, scale):
    return scale * jnp.sum(x @ w) + jnp.sum(y).astype(jnp.float32)


def test_a_batch_is_divided_as_value_and_grad_does_and_the_rest_stays_as_it_is():
    batches = batches_of(loss, Options(3), ROLES, (X[0], X, Y), {"scale": 2}, returns_rows=False)
    params, first = batches.each[1]
    assert [np.asarray(x).tolist() for x in params.values()] == [X[0].tolist()]
    assert [np.asarray(first[i]).tolist() for i in (1, 2)] == [X[[0, 3]].tolist(), [0, 3]]
    assert [role for role, _ in batches.names()] == ["argnums", "", "batch_argnums", "batch_argnums"]
    assert batches.loss(*batches.each[0]) == (loss(X[0], X, Y, scale=2), ())


def test_floating_arrays_of_whole_arguments_are_the_parameters_of_a_map():
    tree = {"w": jnp.ones(2), "n": jnp.arange(2), "f": jnp.tanh, "scale": 2.0}
    roles = {"rng_argnums": (), "batch_argnums": (1,)}
    batches = batches_of(lambda p, x: x @ p["w"], Options(2), roles, (tree, X), {}, returns_rows=True)
    assert [x.shape for x in batches.each[0][0].values()] == [(2,)]


@pytest.mark.parametrize("x", [np.zeros(1000, "f"), np.full(1000, 3, "f"), np.full(1000, 2, np.float16)])
def test_parameters_move_by_a_tenth_of_their_size_and_zeros_by_a_hundredth(x):
    size = float(np.abs(x).max()) or 0.1
    step = np.asarray(nearby(x), np.float64) - np.asarray(x, np.float64)
    assert np.std(step) == pytest.approx(0.1 * size, rel=0.1)
    assert nearby(x).dtype == jnp.asarray(x).dtype


def test_complex_parameters_and_python_numbers_move():
    assert nearby(1 + 1j).dtype == jax.numpy.result_type(1j)
    assert nearby(2.0) != 2.0
