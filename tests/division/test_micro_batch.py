"""A micro-batch runs each operation of the loop with its own sizes: what it prints, integers, branches, derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compared import RNG, B, D, W, X, check
from helpers import assert_close
from jax import lax
from speed import quick_jit

import shrewjax

pytestmark = pytest.mark.usefixtures("as_users_have_it", "x64_only")

K = 3  # it does not divide B


def h(w, x):
    return jnp.tanh(x @ w["a"])


# --- prints ----------------------------------------------------------------------------------------------------------

NORMALIZED = "of rows whose loss takes two passes"
LOSSES = {
    "of rows": lambda z: jnp.mean(z**2),
    NORMALIZED: lambda z: -jnp.mean(jnp.diag(jax.nn.log_softmax(z @ z.T))),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "in a scan and a checkpoint"])
def test_a_print_of_rows_runs_once_for_each_micro_batch_and_others_once(name, is_nested):
    seen = {"rows": [], "data": [], "sum": []}

    def saying(kind, x):
        jax.debug.callback(lambda x: seen[kind].append(np.asarray(x)), x)

    def layer(z, v):
        z = jnp.tanh(z @ v)
        saying("rows", z[:, 0])
        return z, None

    def loss(w, x, y):
        mean = jnp.mean(y)
        saying("data", mean)
        z = lax.scan(jax.checkpoint(layer), x, w["a"][None])[0] if is_nested else layer(x, w["a"])[0]
        total = LOSSES[name](z * (y - mean)[:, None])
        saying("sum", total)
        return total

    y = RNG.normal(size=B)
    value, _ = quick_jit(shrewjax.value_and_grad(loss, K))(W, X, y)
    jax.effects_barrier()
    count = 1 + is_nested  # the forward pass of a checkpoint runs twice
    rows = np.array(sorted(np.concatenate(seen["rows"])))
    np.testing.assert_allclose(rows, sorted([*np.tanh(X @ W["a"])[:, 0]] * (len(rows) // B)), rtol=1e-10)
    assert K <= len(seen["rows"]) <= K * count
    assert sorted({len(x) for x in seen["rows"]}) == [B // K, -(-B // K)]
    assert_close([*map(list, (seen["data"], seen["sum"]))], [[np.mean(y)], [value]], rtol=1e-10)


# --- operations ------------------------------------------------------------------------------------------------------


@jax.custom_vjp
def counted(n, z):
    """An integer and a smooth operand, and as many results."""
    return n + 1, z * n[:, None]


counted.defvjp(lambda n, z: (counted(n, z), n), lambda n, g: (None, 2 * g[1] * n[:, None]))


@jax.custom_jvp
def signed(z):
    return z * jnp.sign(z), (z > 0).astype(int)


@signed.defjvp
def tangents_of_signed(primals, tangents):
    (z,), (t,) = primals, tangents
    made = signed(z)
    return made, (t * made[1] * 3, np.zeros(z.shape, jax.dtypes.float0))


N = RNG.integers(0, 5, B)


def on_platforms(w, x):
    return lax.platform_dependent(h(w, x), x, cpu=lambda z, x: z * x, default=lambda z, x: z - x)


def sums_in_a_branch(w, x):
    """A branch that makes a sum, and one that makes rows."""
    z = h(w, x)
    total = lax.cond(w["a"][0, 0] > 9, lambda z: jnp.sum(z), lambda z: jnp.sum(z**2), z)
    return total * lax.cond(jnp.sum(x) > 0, lambda z: z, lambda z: -z, z)


def until_each_stops(w, x):
    """A loop that goes on for each row alone, with whole numbers and rows of parameters in its carry."""

    def turn(c):
        z, count = c
        return z + 0.3, count + 1

    steps = jax.vmap(lambda z: lax.while_loop(lambda c: c[0] < 1, turn, (z, 0))[1])(lax.stop_gradient(h(w, x)[:, 0]))
    return steps[:, None] * h(w, x)


OPERATIONS = {
    "integers beside a custom_vjp": lambda w, x: jnp.multiply(*(y.T for y in counted(jnp.asarray(N), h(w, x)))),
    "integers of a custom_jvp": lambda w, x: jnp.multiply(*signed(h(w, x))),
    "on_platforms": on_platforms,
    "sums_in_a_branch": sums_in_a_branch,
    "until_each_stops": until_each_stops,
    "a complex transform": lambda w, x: jnp.abs(jnp.fft.fft(h(w, x), axis=1)) ** 2,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_with_the_sizes_of_a_micro_batch_is_that_of_the_whole_batch(name):
    check(OPERATIONS[name], W, X, micro_batches=(K,))


def test_the_second_derivative_of_a_function_that_brings_its_first_is_that_of_jax():
    @jax.custom_jvp
    def sine(z):
        return jnp.sin(z)

    sine.defjvps(lambda t, _, z: t * jnp.cos(z))

    def loss(w, x, scale):
        return jnp.mean(sine(x @ w * scale) ** 2)

    w, scale = W["a"][0], jnp.float64(0.7)
    part = shrewjax.micro_batched(loss, K, batch_argnums=1)
    for of in (jax.hessian, lambda f: jax.jacrev(jax.grad(f, 2)), lambda f: jax.jacfwd(jax.grad(f, 2))):
        assert_close(quick_jit(of(part))(w, X, scale), quick_jit(of(loss))(w, X, scale), rtol=1e-10)


def test_a_layer_of_bfloat16_has_the_dtypes_and_the_roundings_of_its_own():
    """A micro-batch rounds as the whole batch does, as no sum over examples is in between."""
    w, x = jnp.asarray(W["a"], jnp.bfloat16), jnp.asarray(X, jnp.bfloat16)

    def rounded(w, x):
        z = jnp.tanh(x @ w)
        return {"z": z, "low": z.astype(jnp.float8_e4m3fn), "integers": (z * 100).astype(jnp.int8), "half": z * 0.3}

    found, expected = (quick_jit(f)(w, x) for f in (shrewjax.micro_batched(rounded, K), rounded))
    for name, y in expected.items():
        assert found[name].dtype == y.dtype, name
        np.testing.assert_array_equal(found[name].astype("f"), y.astype("f"), err_msg=name)
    assert found["z"].shape == (B, D)
