"""Errors of `shrewjax.flax.value_and_grad` name the arguments that the caller passed, and no others."""

import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_close, bits

import shrewjax
import shrewjax.flax

pytestmark = pytest.mark.thorough

X = np.ones((4, 3), np.float32)


def loss(model, x):
    return jnp.mean(model(x))


def model():
    return nnx.Linear(3, 1, rngs=nnx.Rngs(0))


def test_no_examples_counts_the_arguments_of_the_call():
    with pytest.raises(ValueError, match=r"because all are in wrt\. Pass the batch\."):
        shrewjax.flax.value_and_grad(loss, 2)(model())


@pytest.mark.parametrize("named", [None, 1, "x"])
def test_the_batch_may_come_by_keyword(named):
    step, expected = shrewjax.flax.value_and_grad(loss, 2, batch_argnums=named), nnx.value_and_grad(loss)(model(), X)
    assert_close(step(model(), x=X), expected, rtol=1e-5)
    assert_close(step(model=model(), x=X), expected, rtol=1e-5)
    with pytest.raises(ValueError, match=r"^the first argument must be the model, got none by position"):
        step(x=X)


@pytest.mark.parametrize("at", [2, -3])
def test_position_behind_the_last_argument_is_out_of_range(at):
    with pytest.raises(
        ValueError,
        match=rf"^batch_argnums has the position {at}, but 2 arguments came by position\. Pass it by position$",
    ):
        shrewjax.flax.value_and_grad(loss, 2, batch_argnums=at)(model(), X)


def test_model_as_examples_has_two_roles():
    with pytest.raises(ValueError, match=r"^argument 0 is in wrt and in batch_argnums\."):
        shrewjax.flax.value_and_grad(loss, 2, batch_argnums=(0, 1))(model(), X)


@pytest.mark.parametrize("keyword", [False, True])
def test_the_model_behind_arrays_is_an_error_and_not_a_gradient_by_the_arrays(keyword):
    step = shrewjax.flax.value_and_grad(lambda x, y, model: loss(model, x), 2)
    with pytest.raises(
        ValueError, match=r"^the first argument must be the model.* Linear in argument (2|model) matches wrt="
    ):
        step(X, X, model=model()) if keyword else step(X, X, model())
    scale = jnp.ones(3)
    _, grads = shrewjax.flax.value_and_grad(lambda scale, x, rngs: jnp.mean(x @ scale), 2)(scale, X, nnx.Rngs(0))
    np.testing.assert_allclose(grads, X.mean(0))


def test_gradients_without_variables_of_wrt_are_an_error_that_names_one():
    trained = model()
    optimizer = shrewjax.flax.Optimizer(trained, shrewjax.accumulate(optax.sgd(1.0), 2), wrt=nnx.Param)
    grads = nnx.grad(loss)(trained, X)
    message = r"^grads must hold the variables of wrt=.*Param.*, got {} without \['{}'\].*\. Pass"
    with pytest.raises(ValueError, match=message.format("dict", ".*")):
        optimizer.update(trained, nnx.to_pure_dict(grads))
    del grads["bias"]
    with pytest.raises(ValueError, match=message.format("State", "bias")):
        optimizer.update(trained, grads)


def test_weight_takes_the_arguments_of_the_loss_the_model_too():
    with pytest.raises(ValueError, match=r"^weight_fn is called with the 2 arguments of fun, but it takes \(x\)"):
        shrewjax.flax.accumulated_value_and_grad(loss, 2, weight_fn=lambda x: len(x))(model(), X)


@pytest.mark.parametrize("extra", [{"weight": 1.0}, {"weight": np.float32(1)}, {"flush": np.bool_(False)}], ids=repr)
def test_a_train_state_without_a_window_takes_defaults_of_any_type(extra):
    state = shrewjax.flax.TrainState.create(apply_fn=None, params={"w": jnp.zeros(2)}, tx=optax.sgd(1.0))
    np.testing.assert_array_equal(state.apply_gradients(grads={"w": jnp.ones(2)}, **extra).params["w"], [-1, -1])


@pytest.mark.parametrize("extra", [{"weight": 3}, {"weight": jnp.ones(())}, {"flush": True}], ids=repr)
def test_a_train_state_without_a_window_takes_no_other_weight_and_no_flush(extra):
    state = shrewjax.flax.TrainState.create(apply_fn=None, params={"w": jnp.zeros(2)}, tx=optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"needs a window, and opt_state has none"):
        state.apply_gradients(grads={"w": jnp.ones(2)}, **extra)


def test_fun_may_have_a_keyword_named_function():
    def scaled(model, x, *, function):
        return jnp.mean(function(model(x)))

    value, _ = shrewjax.flax.value_and_grad(scaled, 2)(model(), X, function=jnp.zeros_like)
    assert value == 0


def test_model_and_gradients_in_the_wrong_order_are_an_error_and_change_nothing():
    trained = model()
    optimizer = shrewjax.flax.Optimizer(trained, optax.sgd(1.0), wrt=nnx.Param)
    grads = nnx.grad(loss)(trained, X)
    if not isinstance(grads, nnx.State):
        pytest.skip("in tree mode gradients have the type of the model")
    before = bits((nnx.state(trained), grads, nnx.state(optimizer)))
    with pytest.raises(ValueError, match=r"^update takes the model first, .* Call optimizer\.update\(model, grads\)$"):
        optimizer.update(grads, trained)
    assert bits((nnx.state(trained), grads, nnx.state(optimizer))) == before
    optimizer.update(nnx.state(trained), grads)  # a state may be trained, too


@pytest.mark.parametrize("wrt", [nnx.LoRAParam, "params", lambda path, _: "lora" in path], ids=["type", "tag", "path"])
def test_a_filter_that_matches_nothing_is_an_error(wrt):
    wanted = r"^wrt=.* must match a variable of the model, got Linear without one\. Pass such as nnx\.Param"
    with pytest.raises(ValueError, match=wanted):
        shrewjax.flax.Optimizer(model(), optax.sgd(1.0), wrt=wrt)
    with pytest.raises(ValueError, match=wanted):
        shrewjax.flax.value_and_grad(loss, 2, wrt=wrt)(model(), X)


@pytest.mark.parametrize("name", ["weight", "flush", "value"])
def test_a_field_with_the_name_of_an_argument_is_an_error_that_says_so(name):
    with pytest.raises(ValueError, match=rf"^Mine must not have a field named {name}, .* Rename it$"):
        type("Mine", (shrewjax.flax.TrainState,), {"__annotations__": {name: object}, name: None})


def test_a_field_of_another_name_is_replaced():
    class WithValues(shrewjax.flax.TrainState):
        values: object = None

    state = WithValues.create(apply_fn=None, params={"w": jnp.zeros(2)}, tx=optax.sgd(1.0))
    assert state.apply_gradients(grads={"w": jnp.ones(2)}, values=3).values == 3


def test_the_module_is_loaded_on_demand_and_no_other_name_is(monkeypatch):
    """As after `import shrewjax` alone. Without Flax, the error is that of `import shrewjax.flax`."""
    monkeypatch.delitem(vars(shrewjax), "flax")
    assert shrewjax.flax.Optimizer is sys.modules["shrewjax.flax"].Optimizer
    with pytest.raises(AttributeError, match=r"^module 'shrewjax' has no attribute 'flex'$"):
        shrewjax.flex  # noqa: B018
    monkeypatch.setitem(sys.modules, "flax", None)
    monkeypatch.delitem(sys.modules, "shrewjax.flax")
    monkeypatch.delitem(vars(shrewjax), "flax", raising=False)
    with pytest.raises(ImportError, match=r"shrewjax\.flax needs Flax.*pip install flax"):
        shrewjax.flax  # noqa: B018


def test_statistics_of_fp8_layers_in_wrt_are_an_error():
    kind = nnx.variable_type_from_name("_overwrite_with_gradient", allow_register=True)
    with_statistic = model()
    with_statistic.largest = kind(jnp.zeros(3))
    with pytest.raises(
        ValueError, match=r"must not match variables of the type _overwrite_with_gradient.* Leave them out"
    ):
        shrewjax.flax.value_and_grad(loss, 2, wrt=(nnx.Param, kind))(with_statistic, X)
    with pytest.raises(
        ValueError, match=r"must not match variables of the type _overwrite_with_gradient.* Leave them out"
    ):
        shrewjax.flax.Optimizer(with_statistic, optax.sgd(1.0), wrt=(nnx.Param, kind))
    shrewjax.flax.value_and_grad(loss, 2)(with_statistic, X)
