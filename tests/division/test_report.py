"""What people read of a plan: the text of `print_micro_batches`, and the error if a model mixes examples."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compared import RNG, B, D, W, X, plan_of
from jax import lax
from jax.experimental import pallas

import shrewjax
from shrewjax._division import report

pytestmark = pytest.mark.usefixtures("as_users_have_it")

F32 = jax.tree.map(lambda x: np.asarray(x, "f"), (W, X))
MASK = np.arange(B) < 5


def masked(w, x, mask):
    each = jnp.sum(jnp.tanh(x @ w["a"]) ** 2, axis=-1)
    return jnp.sum(each * mask) / jnp.sum(mask)


def paired(w, x, y):
    u = jnp.tanh(x @ w["a"])
    v = jnp.tanh(y @ w["b"])
    return jnp.mean(jax.nn.logsumexp(u @ v.T, axis=1))


def normalized(w, x):
    z = x @ w["a"]
    centred = z - jnp.mean(z, axis=0)
    z = centred / jnp.sqrt(jnp.mean(centred**2, axis=0))
    return jnp.mean((z @ w["b"]) ** 2)


def place(function, code):
    """Where a line of a function stands, as an error shows it."""
    lines, first = inspect.getsourcelines(function)
    (at,) = [i for i, line in enumerate(lines) if code in line]
    return f"test_report.py:{first + at}: {lines[at].strip()}"


def printed(capsys, *args, **options):
    shrewjax.print_micro_batches(*args, **options)
    return capsys.readouterr().out


def test_the_text_has_three_parts_the_share_and_the_passes_and_the_lines_of_what_is_kept(capsys):
    text = printed(capsys, masked, 3, *F32, MASK)
    line, share = place(masked, "return"), int(re.search(r"(\d+)%", text)[1])
    assert re.sub(r"\d+ operations?", "n operations", text) == (
        f"before  n operations of the whole batch\n        f32[], data: {line}\n"
        "loop    n operations, 8 examples in 3 micro-batches, one pass\n"
        f"        {share}% of the bytes that are computed\n"
        f"kept    of the whole batch\n        f32[], a sum: {line}\n"
        f"after   n operations of the whole batch\n        {line}\n"
    )
    assert 85 < share < 100


def test_a_loss_of_pairs_takes_two_passes_and_keeps_the_rows_before_they_meet(capsys):
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1024, D), np.float32), (X, X))
    text = printed(capsys, paired, 4, F32[0], *types)
    assert "1024 examples in 4 micro-batches, two passes" in text
    for line in ("u = ", "v = "):
        assert f"f32[1024,{D}], rows: {place(paired, line)}\n" in text
    assert text.count("], rows: ") == 2


def test_sets_and_the_same_for_all_are_named_and_nothing_runs(capsys):
    def loss(w, few, many):
        of_weights = jnp.sum(w["a"] ** 2)
        jax.debug.callback(lambda: pytest.fail("it runs"))
        return jnp.mean(few @ w["a"]) + jnp.mean(many @ w["b"]) + of_weights, {"count": len(few)}

    text = printed(capsys, loss, 4, F32[0], np.ones((16, D), "f"), np.ones((112, D), "f"), has_aux=True)
    assert "16 examples in 4 micro-batches and 112 examples in 4 micro-batches" in text
    assert place(loss, "of_weights = ") in text[text.index("after") :]


def test_the_share_counts_bytes_of_each_turn_of_a_loop():
    """Five layers of B x D, by which a product of B x B is small or large."""

    def loss(w, x):
        z = lax.scan(lambda z, _: (jnp.tanh(z @ w["a"]), None), x, None, 5)[0]
        return jnp.mean(jnp.sort(z @ x.T, 0))

    (scan,) = [x for x in plan_of(loss, *F32).program.steps if x.equation.primitive.name == "scan"]
    of_layer = 2 * 4 * B * D  # a product and its tanh, in float32
    assert report.bytes_made([scan]) == 5 * of_layer + 4 * B * D
    plan = plan_of(loss, *F32)
    after = report.bytes_made(plan.after)
    in_loop = report.bytes_made({x.step: None for x in plan.loop})
    assert report.share_in_loop(plan) == pytest.approx(in_loop / (in_loop + after + report.bytes_made(plan.before)))
    assert after >= 4 * B * B


# --- refusals --------------------------------------------------------------------------------------------------------


@jax.jit
def of_batch(z):
    return z - jnp.mean(z, 0)


def in_jit(w, x):
    return jnp.mean((of_batch(x @ w["a"]) @ w["b"]) ** 2)


def in_layers(w, x):
    def layer(z, v):
        centred = z - jnp.mean(z, 0)
        return jnp.tanh(centred @ v), None

    return jnp.mean(lax.scan(layer, x @ w["a"], jnp.stack([w["a"], w["b"]]))[0] ** 2)


def with_kernel(w, x):
    doubled = lambda x_ref, out_ref: out_ref.__setitem__(..., 2 * x_ref[...])  # noqa: E731
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    z = pallas.pallas_call(doubled, out_shape=shape, interpret=True)(x @ w["a"])
    return jnp.mean((z @ w["b"]) ** 2)


REFUSED = {
    "batch norm in training": (normalized, "examples mix", place(normalized, "centred = z"), "statistics of its own"),
    "in a function under jit": (
        in_jit,
        "examples mix",
        place(of_batch.__wrapped__, "return z -"),
        "statistics of its own",
    ),
    "in scanned layers": (in_layers, "examples mix", place(in_layers, "lax.scan"), "statistics of its own"),
    "a kernel": (with_kernel, "pallas_call may mix examples", place(with_kernel, "pallas_call("), "of_each_example"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_mixes_examples_is_an_error_with_the_line_the_share_and_the_remedy(name):
    fun, cause, line, remedy = REFUSED[name]
    with pytest.raises(ValueError, match=r"^fun must act on each example alone before examples mix, but") as caught:
        jax.jit(shrewjax.value_and_grad(fun, 4))(*F32)
    text = str(caught.value)
    assert f"but {cause} at {line}, so that only " in text
    assert remedy in text
    assert int(re.search("only ([0-9]+)% could be divided", text)[1]) < 50
    assert len(text.split()) < 100


def test_statistics_of_the_batch_that_come_from_elsewhere_are_divided():
    """With running averages, or `stop_gradient` of data, nothing mixes before the weights."""

    def running(w, x, mean, std):
        return jnp.mean(((x @ w["a"] - mean) / std @ w["b"]) ** 2), jnp.mean(x @ w["a"], 0)

    args = *F32, np.ones(D, "f"), np.full(D, 2, "f")
    step = shrewjax.value_and_grad(running, 4, has_aux=True, batch_argnums=1)
    found, expected = (jax.jit(f)(*args) for f in (step, jax.value_and_grad(running, has_aux=True)))
    for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_a_small_loss_in_which_weights_do_not_act_on_what_mixes_is_divided():
    pairs = lambda w, x: jnp.mean(jax.nn.logsumexp(10 * (x @ w["a"]) @ (x @ w["a"]).T, 1))  # noqa: E731
    assert report.share_in_loop(plan_of(pairs, *F32)) < 0.5
    x = RNG.normal(size=(B, D)).astype("f")
    found = jax.jit(shrewjax.value_and_grad(pairs, 4))(F32[0], x)[0]
    np.testing.assert_allclose(found, pairs(F32[0], x), rtol=1e-5)


def test_an_inverse_of_parameters_beside_a_small_batch_is_no_model_that_mixes_examples():
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w) ** 2), jnp.linalg.inv(w)

    w, x = np.eye(5, dtype="f"), np.ones((8, 5), "f")
    (_, found), _ = jax.jit(shrewjax.value_and_grad(loss, 4, has_aux=True))(w, x)
    np.testing.assert_allclose(found, np.eye(5))
