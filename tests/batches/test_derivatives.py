"""Derivatives of a divided program: what runs by a rule, and what has none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, mesh_of, placed, thorough
from jax import P
from speed import quick_jit

import shrewjax

pytestmark = pytest.mark.usefixtures("as_users_have_it", "x64_only")

B, D, K = 10, 4, 3  # K does not divide B
RNG = np.random.default_rng(0)
X, W = RNG.normal(size=(B, D)), RNG.normal(size=(D, D))


@jax.custom_jvp
def straight_through(z):
    return jnp.round(z)


@straight_through.defjvp
def _straight_through_jvp(primals, tangents):
    return jnp.round(*primals), 0.6 * tangents[0]


@pytest.mark.parametrize("power", [1, 2], ids=["one pass", "two passes"])
def test_values_in_a_second_derivative_are_those_of_rules_as_in_jax(power):
    """A rule whose value has another derivative than the function, as straight-through estimators have."""
    loss = lambda w, x: jnp.sum(straight_through(3 * x @ w) ** 2 + x @ w) ** power  # noqa: E731
    w, x = W, X

    def product(fun):
        return quick_jit(lambda w: jax.jvp(lambda v: jax.value_and_grad(fun)(v, x), (w,), (jnp.sin(w),)))(w)

    assert_close(product(shrewjax.micro_batched(loss, 3)), product(loss), rtol=1e-10, atol=1e-12)


def test_what_a_loop_reads_and_does_not_use_makes_nothing_depend_on_parameters():
    def loss(w, x):
        ones = jax.lax.map(lambda _: jnp.ones(()), jnp.tanh(x @ w))
        scaled = jnp.ones(4).at[jnp.zeros(2, jnp.int32)].mul(jnp.sum(ones))  # JAX has no gradient of it
        return jnp.sum(scaled) + jnp.mean((x @ w) ** 2)

    w, x = W, X
    found, expected = (quick_jit(f)(w, x) for f in (shrewjax.value_and_grad(loss, 3), jax.value_and_grad(loss)))
    assert_close(found, expected, rtol=1e-10)


def halvings(w, x):
    h = x @ w
    count = jax.lax.while_loop(lambda v: v > 1e-3, lambda v: v * 0.5, jnp.mean(jax.lax.stop_gradient(h) ** 2))
    return jnp.mean(h * count)


def matched(w, x):  # as in detection
    h = x @ w
    costs = jax.lax.stop_gradient(h @ h.T)
    of_host = lambda c: np.argsort(c, 1)[:, 0].astype(np.int32)  # noqa: E731
    return jnp.mean((h - h[jax.pure_callback(of_host, jax.ShapeDtypeStruct((B,), jnp.int32), costs)]) ** 2)


@pytest.mark.parametrize("loss", [halvings, matched])
def test_what_stop_gradient_returns_needs_no_derivative(loss):
    """After the loop a `while` and a callback read rows. Neither has a derivative in reverse."""
    found, expected = (quick_jit(f)(W, X) for f in (shrewjax.value_and_grad(loss, K), jax.value_and_grad(loss)))
    assert_close(found, expected, rtol=1e-10, atol=1e-14)


def of_rows(w, x):
    return jnp.sum(x @ w), x @ w, jnp.arange(3), jnp.zeros(2, jnp.bfloat16)


@pytest.mark.parametrize("axis_type", ["Auto", *thorough("Explicit")])
def test_results_that_are_not_used_have_cotangents_of_their_types(axis_type):
    """In a tracked shard_map they vary over devices, on an Explicit mesh they are placed."""

    def gradients(w, x, fun):
        return jax.vjp(lambda w, x: fun(w, x)[0], w, x)[1](jnp.ones(()))

    mesh, x = mesh_of(axis_type, data=4), np.arange(24.0).reshape(8, 3)
    w, part = np.ones((3, 2)), shrewjax.micro_batched(of_rows, 2)
    expected = gradients(w, x, of_rows)
    if axis_type == "Auto":

        def own(w, x):
            value = lambda w, x: jax.lax.psum(part(w, x)[0], "data")  # noqa: E731
            return jax.grad(value, (0, 1))(w, x)

        mapped = jax.shard_map(own, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P("data")))
        found = jax.jit(mapped)(w, x)
    else:
        with jax.set_mesh(mesh):
            found = jax.jit(lambda w, x: gradients(w, x, part))(*placed((w, x), mesh, (P(), P("data"))))
    assert_close(found, expected, rtol=1e-10)
