"""Errors of `shrewjax.flax.value_and_grad` name the arguments that the caller passed, and no others."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shrewjax.flax

X = np.ones((4, 3), np.float32)


def loss(model, x):
    return jnp.mean(model(x))


def model():
    return nnx.Linear(3, 1, rngs=nnx.Rngs(0))


def test_no_examples_counts_the_arguments_of_the_call():
    with pytest.raises(ValueError, match=r"the call has 1 positional argument, in wrt\. Pass the batch by position"):
        shrewjax.flax.value_and_grad(loss, 2)(model(), x=X)


@pytest.mark.parametrize("at", [2, -3])
def test_position_behind_the_last_argument_is_out_of_range(at):
    with pytest.raises(ValueError, match=rf"^batch_argnums has the position {at}, but 2 arguments came by position$"):
        shrewjax.flax.value_and_grad(loss, 2, batch_argnums=at)(model(), X)


def test_model_as_examples_has_two_roles():
    with pytest.raises(ValueError, match=r"^argument 0 is in wrt and in batch_argnums\."):
        shrewjax.flax.value_and_grad(loss, 2, batch_argnums=(0, 1))(model(), X)


def test_fun_may_have_a_keyword_named_function():
    def scaled(model, x, *, function):
        return jnp.mean(function(model(x)))

    value, _ = shrewjax.flax.value_and_grad(scaled, 2)(model(), X, function=jnp.zeros_like)
    assert value == 0
