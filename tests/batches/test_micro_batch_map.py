"""`micro_batch_map`: a loss of the whole batch, with its rows computed in micro-batches, is what plain JAX makes of it.

The oracle is the same program in plain JAX, with the identity in the place of the map, in float64.
"""

import gc
import re
from functools import partial

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, mesh_of
from jax import P
from speed import quick_jit

from shrewjax import micro_batch_map

pytestmark = pytest.mark.usefixtures("as_users_have_it")

B, K = 12, 3
RNG = np.random.default_rng(0)
X, Y, MASK = RNG.normal(size=(B, 4)), RNG.normal(size=(B, 5)), (np.arange(B) % 5 < 3) * 1.0
PARAMS = {"a": RNG.normal(size=(4, 5)), "t": np.float64(0.3), "unused": np.ones(2)}


def in_plain_jax(fun, micro_batches, **_):
    return fun


def features(params, x, y):
    return {"z": jnp.tanh(x @ params["a"]) * params["t"], "sign": jnp.float64(y[:, 0] > 0), "none": None, "y": y}


# --- losses, as people write them for the whole batch ------------------------------------------------------------


def masked_mean(rows, params, x, y, mask):
    squares = jnp.sum((rows["z"] - rows["y"]) ** 2, -1)
    return jnp.sum(squares * mask) / jnp.sum(mask)


def contrastive(rows, params, x, y, mask):
    table = rows["z"] @ rows["z"].T / params["t"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(table, jnp.arange(B)))


def advantages(rows, params, x, y, mask):
    reward = jax.lax.stop_gradient(jnp.sum(rows["z"], -1))
    return -jnp.mean((reward - reward.mean()) / reward.std() * rows["z"][:, 0])


def two_denominators(rows, params, x, y, mask):
    z = rows["z"]
    first = jnp.sum(jnp.abs(z[:, 0]) * mask) / jnp.sum(mask)
    return first + jnp.max(z) + jnp.sum(z[:, 1] * rows["sign"]) / jnp.sum(rows["sign"])


def covariance(rows, params, x, y, mask):
    centred = rows["z"] - rows["z"].mean(0)
    return jnp.sum((centred.T @ centred / B - jnp.eye(5)) ** 2) + 0.1 * jnp.sum(params["a"] ** 2)


LOSSES = [masked_mean, contrastive, advantages, two_denominators, covariance]


def of_batch(loss, map_, params, x, y, mask):
    return loss(map_(features, K)(params, x, y), params, x, y, mask)


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("loss", LOSSES, ids=lambda x: x.__name__)
def test_value_and_gradients_by_parameters_and_examples_are_those_of_plain_jax(loss):
    found, expected = (
        jax.jit(jax.value_and_grad(partial(of_batch, loss, map_), argnums=(0, 1, 2)))(PARAMS, X, Y, MASK)
        for map_ in (micro_batch_map, in_plain_jax)
    )
    assert_close(found, expected, rtol=1e-10, atol=1e-12)


def penalty(map_, params, x):  # of the gradient by examples, as in a GAN
    critic = map_(lambda params, x: jnp.sum(jnp.tanh(x @ params["a"]) ** 2, -1), K)
    by_x = jax.grad(lambda x: jnp.sum(critic(params, x)))(x)
    return jnp.mean((jnp.linalg.norm(by_x, axis=-1) - 1) ** 2)


def two_in_a_row(map_, params, x):  # the second gets examples that depend on parameters
    hidden = map_(lambda params, x: jnp.tanh(x @ params["a"]), K)(params, x)
    return jnp.sum(map_(lambda params, h: h * params["t"] + h**2, K)(params, hidden) ** 3)


def closed_over(map_, params, x):
    return jnp.sum(map_(lambda scale, x: scale * jnp.sin(x @ params["a"]) * params["t"], K)(2.0, x) ** 2)


def inner_step(map_, params, x):  # a gradient through a step of training
    def loss(params):
        rows = map_(lambda params, x: jnp.tanh(x @ params["a"]) * params["t"], K)(params, x)
        return jnp.mean(rows**2) / jnp.sum(jnp.abs(rows))

    return loss(jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params)))


def of_tangents(map_, params, x):  # forward over reverse
    loss = jax.grad(lambda params: two_in_a_row(map_, params, x))
    return sum(map(jnp.sum, jax.tree.leaves(jax.jvp(loss, (params,), (params,))[1])))


def mapped(map_, params, x):
    stacked = jnp.stack([x, 2 * x])
    return jnp.sum(jax.vmap(lambda x: two_in_a_row(map_, params, x))(stacked) ** 2)


def in_checkpoint_scan_and_cond(map_, params, x):
    def turn(total, x):
        return jax.checkpoint(partial(two_in_a_row, map_))(params, x) / (1 + total**2), None

    last, _ = jax.lax.scan(turn, 1.0, jnp.stack([x, x + 1]))
    return jax.lax.cond(last > 0, lambda: closed_over(map_, params, x), lambda: last)


FORMS = [penalty, two_in_a_row, closed_over, inner_step, mapped, in_checkpoint_scan_and_cond]


@pytest.mark.parametrize("form", FORMS, ids=lambda x: x.__name__)
def test_derivatives_of_any_order_in_reverse_mode_are_those_of_plain_jax(form):
    params = jax.tree.map(jnp.asarray, PARAMS)
    found, expected = (
        jax.jit(jax.value_and_grad(partial(form, map_)))(params, jnp.asarray(X))
        for map_ in (micro_batch_map, in_plain_jax)
    )
    assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_forward_over_reverse_is_that_of_plain_jax_and_forward_mode_is_an_error():
    params = jax.tree.map(jnp.asarray, PARAMS)
    found, expected = (jax.jit(partial(of_tangents, map_))(params, X) for map_ in (micro_batch_map, in_plain_jax))
    assert_close(found, expected, rtol=1e-9)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda params: two_in_a_row(micro_batch_map, params, X), (params,), (params,))


def test_rows_come_back_in_the_order_of_the_batch_with_their_dtypes_and_containers():
    def fun(scale, x, labels):
        return [labels, (x[:, 0] > 0, None, {}), jax.lax.complex(x[:, :1], x[:, :1]), jnp.float16(x[:, 1])]

    labels = np.arange(B, dtype=np.int8)
    found = jax.jit(micro_batch_map(fun, K))(1.0, X, labels)
    expected = fun(1.0, X, labels)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(expected)]


def test_a_batch_of_no_examples_has_no_rows():
    assert micro_batch_map(lambda w, x: x * w, K)(2.0, X[:0]).shape == (0, 4)


def test_both_passes_draw_the_same_and_each_micro_batch_its_own():
    def dropped(params, x, key):
        return x * jnp.float64(jax.random.bernoulli(key, 0.5, x.shape)) * params["t"]

    rows, pull_back = jax.vjp(
        lambda params: micro_batch_map(dropped, K, rng_argnums=2)(params, X, jax.random.key(0)), PARAMS
    )
    kept = rows != 0
    keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(K)]
    expected = np.stack([jax.random.bernoulli(key, 0.5, (B // K, 4)) for key in keys], 1).reshape(B, 4)
    np.testing.assert_array_equal(kept, expected)
    np.testing.assert_allclose(pull_back(jnp.ones_like(rows))[0]["t"], np.sum(X * kept), rtol=1e-12)


def test_equinox_modules_are_arguments_or_closed_over():
    model = eqx.nn.MLP(4, 1, 8, 2, key=jax.random.key(0))

    def loss(model, map_, is_closed_over):
        fun = lambda given, x: jax.vmap(model if is_closed_over else given)(x)  # noqa: E731
        rows = map_(fun, K)(None if is_closed_over else model, X)
        return jnp.var(rows) / jnp.mean(rows**2)

    for is_closed_over in (False, True):
        found, expected = (
            eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, map_, is_closed_over)
            for map_ in (micro_batch_map, in_plain_jax)
        )
        assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_bfloat16_parameters_have_sums_in_float32():
    batch = 256
    x = np.random.default_rng(1).normal(size=(batch, 4)).astype("f")
    w = jnp.asarray(PARAMS["a"], jnp.bfloat16)

    def loss(w, map_):
        rows = map_(lambda w, x: jnp.sum((x @ w.astype("f")) ** 2, -1), batch // 2)(w, x)
        return jnp.sum(rows) / jnp.sum(jnp.abs(x))

    found = jax.jit(jax.grad(partial(loss, map_=micro_batch_map)))(w)
    exact = jax.grad(partial(loss, map_=in_plain_jax))(w.astype(jnp.float64))
    np.testing.assert_allclose(found.astype("f"), exact, rtol=2**-8)


# --- devices -----------------------------------------------------------------------------------------------------

D = 4
X8, MASK8 = np.random.default_rng(2).normal(size=(8 * K, 4)), (np.arange(8 * K) % 5 < 3) * 1.0


def device_loss(map_, params, x, mask, **options):
    rows = map_(lambda params, x: jnp.tanh(x @ params["a"]) * params["t"], K, **options)(params, x)
    return jnp.sum(jnp.sum(rows**2, -1) * mask) / jnp.sum(mask) + jnp.mean(jnp.sum(rows, 0) ** 2)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("options", [{}, {"sum_over": "data"}], ids=["plain", "sum_over"])
def test_a_mesh_has_the_numbers_of_one_device(kind, options):
    mesh = mesh_of(kind, data=D)
    expected = jax.value_and_grad(partial(device_loss, in_plain_jax), (0, 1))(PARAMS, X8, MASK8)
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(partial(device_loss, micro_batch_map, **options), (0, 1)))
        batch = [jax.device_put(x, jax.NamedSharding(mesh, P("data"))) for x in (X8, MASK8)]
        found = step(jax.device_put(PARAMS, jax.NamedSharding(mesh, P())), *batch)
    assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_with_sum_over_rows_stay_sharded_and_gradients_cross_the_network_once():
    mesh = mesh_of("Auto", data=D)

    def loss(params, x):
        rows = micro_batch_map(lambda params, x: x @ params["a"], K, sum_over="data")(params, x)
        return jnp.sum(rows**2)

    with jax.set_mesh(mesh):
        x = jax.device_put(X8, jax.NamedSharding(mesh, P("data")))
        params = jax.device_put({"a": PARAMS["a"]}, jax.NamedSharding(mesh, P()))
        text = jax.jit(jax.grad(loss)).lower(params, x).compile().as_text()
    assert not re.findall(r" all-gather\(", text)
    assert len(re.findall(r" all-reduce\(", text)) == 1


@pytest.mark.parametrize("tracked", [True, False])
def test_in_shard_map_a_device_has_its_own_rows_and_the_derivatives_of_jax(tracked):
    def of_device(map_, params, x, mask):
        def loss(params):
            rows = map_(lambda params, x: jnp.tanh(x @ params["a"]) * params["t"], K)(params, x)
            everyone = jax.lax.all_gather(rows, "data", tiled=True)
            own = jnp.sum(rows**2 * mask[:, None]) / jax.lax.psum(jnp.sum(mask), "data")
            return own + jnp.mean(rows @ everyone.T)

        value, grads = jax.value_and_grad(loss)(params)
        return value[None], jax.tree.map(lambda g: jax.lax.pmean(g, "data")[None], grads)

    mesh = mesh_of("Auto", data=D)
    found, expected = (
        quick_jit(
            jax.shard_map(
                partial(of_device, map_),
                mesh=mesh,
                in_specs=(P(), P("data"), P("data")),
                out_specs=P("data"),
                check_vma=tracked,
            )
        )(PARAMS, X8, MASK8)
        for map_ in (micro_batch_map, in_plain_jax)
    )
    assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_a_mapped_axis_in_sum_over_is_an_error_whose_remedy_is_right():
    def own(x, **options):
        return micro_batch_map(lambda w, x: w * x, K, **options)(2.0, x)

    on_four = partial(jax.shard_map, mesh=mesh_of("Auto", data=D), in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(ValueError, match=r"^sum_over must not name mapped axes, got .* Leave it out\."):
        on_four(partial(own, sum_over="data"))(X8)
    np.testing.assert_allclose(quick_jit(on_four(own))(X8), 2 * X8)


# --- mistakes ----------------------------------------------------------------------------------------------------

NEED = "fun must return arrays of numbers with a row for each example, got "
MISTAKES = {
    "a mean": (lambda w, x: jnp.mean(x @ w), NEED),
    "a scalar beside rows": (lambda w, x: (x @ w, jnp.sum(w)), NEED),
    "a length of one": (lambda w, x: jnp.sum(x @ w, 0, keepdims=True), NEED),
    "nothing": (lambda w, x: None, NEED + "None for 4 examples"),
    "a text": (lambda w, x: (x @ w, "name"), NEED + "'name' for 4 examples"),
    "a statistic that fits by chance": (lambda w, x: jnp.sum(x, 0)[:, None] * jnp.ones(4), NEED),
    "a covariance that fits by chance": (lambda w, x: x.T @ x, NEED),
    "pairs": (lambda w, x: (x @ w) @ (x @ w).T, NEED),
    "a key": (lambda w, x: jax.random.split(jax.random.key(0), len(x)), NEED + "key<fry>[4] for 4 examples"),
    "time before examples, by chance": (lambda w, x: (x @ w)[:, :4].T, NEED),
    "examples of the whole batch": (lambda w, x: X @ w, NEED),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_row_of_examples_is_an_error(name):
    fun, message = MISTAKES[name]  # four features, in micro-batches of four
    with pytest.raises(ValueError, match=r"^" + re.escape(message)) as caught:
        micro_batch_map(fun, K)(PARAMS["a"], X)
    assert str(caught.value).endswith("Compute the rest outside, on the whole batch")


def test_a_key_that_is_closed_over_is_an_error_whose_remedies_are_right():
    key = jax.random.key(0)

    def noisy(w, x, *own):
        return x @ w * jax.random.normal(own[0] if own else key, (len(x), 5))

    with pytest.raises(ValueError, match=r"^fun must not close over a PRNG key"):
        jax.jit(micro_batch_map(noisy, K))(PARAMS["a"], X)
    assert len(np.unique(micro_batch_map(noisy, K, rng_argnums=2)(PARAMS["a"], X, key))) == 5 * B

    def with_draws(w, x, draws):
        return x @ w * draws

    draws = jax.random.normal(key, (B, 5))
    found = micro_batch_map(with_draws, K)(PARAMS["a"], X, draws)
    np.testing.assert_allclose(found, X @ PARAMS["a"] * draws, rtol=1e-12)


def test_a_call_without_examples_and_a_number_that_k_does_not_divide_are_errors():
    with pytest.raises(ValueError, match=r"^an argument in batch_argnums must hold examples, got none"):
        micro_batch_map(lambda w, x: x, K)(1.0, None)
    with pytest.raises(
        ValueError, match=r"has 11 examples, .* Pad the batch to 12, and leave the padding out of the loss"
    ):
        micro_batch_map(lambda w, x: x, K)(1.0, X[:11])


def test_calls_outside_of_jit_keep_no_arrays_alive():
    step = jax.value_and_grad(partial(of_batch, masked_mean, micro_batch_map))
    params, batch = jax.tree.map(jnp.asarray, PARAMS), [*map(jnp.asarray, (X, Y, MASK))]
    for turn in range(4):
        step(params, *batch)
        gc.collect()
        if turn == 1:
            before = len(jax.live_arrays())
    assert len(jax.live_arrays()) <= before


def test_labels_that_are_closed_over_get_a_note_whose_remedy_is_right():
    with pytest.raises(TypeError) as raised:
        micro_batch_map(lambda w, x: x @ w - Y, K)(PARAMS["a"], X)
    assert any("as an argument of fun, in batch_argnums=" in note for note in raised.value.__notes__)
    found = micro_batch_map(lambda w, x, y: x @ w - y, K)(PARAMS["a"], X, Y)
    np.testing.assert_allclose(found, X @ PARAMS["a"] - Y, rtol=1e-12)


def test_a_program_for_any_number_of_examples_can_be_exported():
    rows = jax.jit(lambda w, x: micro_batch_map(lambda w, x: jnp.tanh(x @ w), K)(w, x))
    (n,) = jax.export.symbolic_shape("n")
    shapes = jax.ShapeDtypeStruct((4, 5), np.float64), jax.ShapeDtypeStruct((K * n, 4), np.float64)
    exported = jax.export.export(rows)(*shapes)
    np.testing.assert_allclose(exported.call(PARAMS["a"], X), np.tanh(X @ PARAMS["a"]), rtol=1e-12)
