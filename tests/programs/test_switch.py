"""Without the passes a loss runs as JAX traced it, with the same numbers. An error of a pass names the way there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mesh_of
from speed import quick_jit

import shrewjax
from shrewjax._programs import loops, scatters, switch

K, LAYERS, WIDTH = 2, 3, 4
RNG = np.random.default_rng(0)
STACK, X = RNG.normal(size=(LAYERS, WIDTH, WIDTH)).astype("f"), RNG.normal(size=(8, WIDTH)).astype("f")


def loss(stack, x):
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)[0] ** 2)


def expected():
    return jax.value_and_grad(loss)(STACK, X)


@pytest.fixture
def broken(monkeypatch):
    """A JAX under which each pass fails."""

    def fail(*_, **__):
        raise KeyError("a new name")

    monkeypatch.delenv(switch.SWITCH, raising=False)
    monkeypatch.setattr(loops, "scan_of", fail)
    monkeypatch.setattr(loops, "LOSES_SCATTERS", True)
    monkeypatch.setattr(scatters, "opened", fail)


@pytest.mark.parametrize("of", ["loops", "scatters"])
def test_an_error_from_inside_a_pass_names_the_switch(of, broken, monkeypatch):
    if of == "loops":
        monkeypatch.setattr(loops, "LOSES_SCATTERS", False)
    with pytest.raises(KeyError, match="a new name") as caught:
        jax.make_jaxpr(shrewjax.accumulated_value_and_grad(loss, K))(STACK, X)
    assert "set the environment variable SHREWJAX_DISABLE_PASSES=1" in " ".join(caught.value.__notes__)


def test_an_error_of_the_loss_does_not(monkeypatch):
    monkeypatch.delenv(switch.SWITCH, raising=False)
    with pytest.raises(TypeError) as caught:
        jax.make_jaxpr(shrewjax.accumulated_value_and_grad(lambda stack, x: loss(stack, x @ x[:1]), K))(STACK, X)
    assert not any("SHREWJAX" in note for note in getattr(caught.value, "__notes__", ()))


def test_with_the_switch_no_pass_runs_and_numbers_are_the_same(broken, monkeypatch):
    monkeypatch.setenv(switch.SWITCH, "1")
    found = quick_jit(shrewjax.accumulated_value_and_grad(loss, K))(STACK, X)
    for a, e in zip(found, expected(), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-7)


def test_on_an_explicit_mesh_too(broken, monkeypatch):
    monkeypatch.setenv(switch.SWITCH, "1")
    mesh = mesh_of("Explicit", data=8)
    x = np.tile(X, (2, 1))
    with jax.set_mesh(mesh):
        found = quick_jit(shrewjax.accumulated_value_and_grad(loss, K))(
            jax.device_put(STACK, jax.P()), jax.device_put(x, jax.P("data"))
        )
    for a, e in zip(found, expected(), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("value", "meant"), [("1", True), ("true", True), ("0", False), ("", False), (None, False)])
def test_the_switch_is_read_whenever_a_function_is_traced(value, meant, monkeypatch):
    monkeypatch.delenv(switch.SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(switch.SWITCH, value)
    program = str(jax.make_jaxpr(shrewjax.accumulated_value_and_grad(loss, K))(STACK, X))
    monkeypatch.setenv(switch.SWITCH, "1" if meant else "0")
    assert program == str(jax.make_jaxpr(shrewjax.accumulated_value_and_grad(loss, K))(STACK, X))
    monkeypatch.setenv(switch.SWITCH, "0" if meant else "1")
    assert program != str(jax.make_jaxpr(shrewjax.accumulated_value_and_grad(loss, K))(STACK, X))


def test_another_value_of_the_switch_is_an_error(monkeypatch):
    monkeypatch.setenv(switch.SWITCH, "maybe")
    with pytest.raises(ValueError, match="SHREWJAX_DISABLE_PASSES must be 1 or 0, got 'maybe'"):
        jax.make_jaxpr(shrewjax.accumulated_value_and_grad(loss, K))(STACK, X)
