"""The plan: what runs before the loop, in it and after it, and what is kept between them."""

import types

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compared import RNG, B, D, W, X, Y, check, names, plan_of

from shrewjax._division.plan import size_of

pytestmark = pytest.mark.usefixtures("as_users_have_it", "x64_only")

CLASSES, LABELS = 64, RNG.integers(0, 64, B)
HEAD = {"a": W["a"], "b": RNG.normal(size=(D, CLASSES))}
MASK = np.arange(B) < 5


def h(w, x):
    return jnp.tanh(x @ w["a"])


def logits(w, x):
    return h(w, x) @ w["b"]


def losses(w, x):
    return optax.softmax_cross_entropy_with_integer_labels(logits(w, x), LABELS)


def classes(w, x, y):
    """Class weights, whose sum divides the loss."""
    weights = jnp.asarray(np.arange(1.0, CLASSES + 1))[LABELS]
    return jnp.sum(weights * losses(w, x)) / jnp.sum(weights)


def hardest(w, x, y):
    each, index = jax.lax.top_k(losses(w, x), 3)
    return jnp.mean(each) + 0 * jnp.sum(index)


def covariance(w, x, y):
    z = h(w, x)
    return jnp.linalg.norm(z.T @ z / B - jnp.eye(D)) + jnp.linalg.norm(jnp.mean(z, 0))


# What is kept: shapes and which are sums, "s", or rows, "r".
KEPT = {
    "a mean": (lambda w, x, y: jnp.mean((h(w, x) - y) ** 2), {((), "s")}),
    "a masked mean": (lambda w, x, y: jnp.sum(losses(w, x) * MASK) / jnp.sum(MASK), {((), "s")}),
    "class weights": (classes, {((), "s")}),
    "losses and not logits": (hardest, {((B,), "r")}),
    "a sum before its square": (lambda w, x, y: jnp.sum(h(w, x), 0) @ jnp.sum(h(w, x) ** 2, 0), {((D,), "s")}),
    "products of features": (covariance, {((D, D), "s"), ((D,), "s")}),
    "a value before it is broadcast": (
        lambda w, x, y: jnp.sort(jnp.broadcast_to(jnp.sum(h(w, x), -1)[:, None], (B, CLASSES)), 0)[0].sum(),
        {((B,), "r")},
    ),
    "rows before they meet": (lambda w, x, y: jax.nn.logsumexp(h(w, x) @ h(w, y).T), {((B, D), "r")}),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_is_kept_is_small_and_the_loss_is_that_of_jax(name):
    fun, expected = KEPT[name]
    plan = plan_of(fun, HEAD, X, Y)
    found = {(x.aval.shape, "r" if plan.program.slice(x) else "s") for x in plan.frontier}
    assert found == expected
    check(fun, HEAD, X, Y, micro_batches=(3,))


def test_statistics_of_data_come_before_and_the_rest_of_data_in_the_loop():
    def loss(w, x, y):
        return jnp.mean((h(w, x) - (jnp.cos(y) - jnp.mean(jnp.sin(y), 0))) ** 2)

    plan = plan_of(loss, W, X, Y)
    assert {"sin", "reduce_sum"} <= {*names(plan.before)}
    assert "cos" not in names(plan.before)
    assert "cos" in names(plan.loop)
    assert not {"sin", "cos"} & {*names(plan.after)}


def test_what_nothing_reads_and_what_weights_alone_make_has_its_place():
    """Unread layers run nowhere. A function of weights runs in the loop for its rows, and after it for the rest."""

    def loss(w, x):
        jnp.cos(x @ w["b"])
        scale = jnp.exp(w["b"][0])
        return jnp.mean(h(w, x) * scale) + jnp.sum(scale**2)

    plan = plan_of(loss, W, X)
    parts = {part: names(getattr(plan, part)) for part in ("once", "before", "loop", "after")}
    assert "cos" not in str(parts)
    assert [part for part in parts for name in parts[part] if name == "exp"] == ["loop", "after"]
    assert parts["loop"].count("dot_general") == 1
    assert "dot_general" not in parts["after"]


def test_a_derivative_that_needs_the_whole_batch_runs_once_and_so_does_what_it_reads():
    @jax.custom_vjp
    def clipped(w):
        return w

    clipped.defvjp(lambda w: (w, None), lambda _, g: (g / jnp.maximum(1, 30 * jnp.linalg.norm(g)),))

    def loss(w, x):
        return jnp.mean((x @ clipped(jnp.exp(w["a"]))) ** 2)

    plan = plan_of(loss, W, X)
    assert names(plan.once) == ["exp", "custom_vjp_call"]
    check(loss, W, X, micro_batches=(3,))


def test_whole_rows_of_data_and_its_slices_are_those_of_the_whole_batch():
    """The loop takes another slice of data than it made: by columns, in another order, of a longer axis."""

    def loss(w, x, y):
        order = jnp.argsort(y[:, 0])
        distances = jnp.abs(y[:, :1] - y[:, 0])  # examples are on both axes
        near = jnp.exp(-distances)
        z = h(w, x)
        return jnp.mean(near.T * near[:, order]) + jnp.mean(jnp.sum(near, 1) * z[:, 0] * jnp.cumsum(y[:, 1])[order])

    check(loss, W, X, Y, micro_batches=(3, 4))


def test_the_size_of_a_value_is_its_bytes_and_a_symbol_of_an_export_is_large():
    (n,) = jax.export.symbolic_shape("n")
    sizes = [((3, 2), jnp.bfloat16), ((), np.float64), ((n, 3), np.float32), ((4,), jax.random.key(0).dtype)]
    found = [size_of(types.SimpleNamespace(aval=jax.ShapeDtypeStruct(*x))) for x in sizes]
    assert found[:2] == [12, 8]
    assert found[2] >= 2**16 * 12
    assert found[3] == 4 * 8
