"""Losses that compare examples, in two passes: value and gradient are those of the whole batch in one piece.

The oracle is `jax.value_and_grad` of features and loss together, mostly in float64. With `-s`, tests print the errors.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_close, distance, mesh_of, own_params
from jax import P
from speed import quick_jit, users_jit

import shrewjax

B, K = 32, 4
two_passes = shrewjax.two_pass_value_and_grad


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


# --- losses ------------------------------------------------------------------------------------------------------

PARAMS = {
    "pixels": normal(12, 16, seed=1),
    "image": normal(16, 8, seed=2),
    "embedding": normal(20, 16, seed=3),
    "text": normal(16, 8, seed=4),
    "temperature": np.log(np.float64(1 / 0.07)),
}
PIXELS = normal(B, 12)
TOKENS = np.random.default_rng(1).integers(0, 20, (B, 5))
LABELS = np.random.default_rng(2).integers(0, 6, B)


def unit(z):
    return z / jnp.linalg.norm(z, axis=-1, keepdims=True)


def image_features(params, pixels):
    return unit(jnp.tanh(pixels @ params["pixels"]) @ params["image"])


def clip_features(params, pixels, tokens):
    text = jnp.mean(params["embedding"][tokens], axis=1) @ params["text"]
    return {"image": image_features(params, pixels), "text": unit(text)}


def clip_loss(params, z, gathered=None):
    """InfoNCE from images to texts and back, by the table of similarities. `gathered`: keys of more than these rows."""
    keys, first = (z, 0) if gathered is None else gathered
    scale, at = jnp.exp(params["temperature"]), first + jnp.arange(len(z["image"]))
    ways = scale * z["image"] @ keys["text"].T, scale * z["text"] @ keys["image"].T
    chosen = [jnp.take_along_axis(jax.nn.log_softmax(way), at[:, None], axis=1) for way in ways]
    return -sum(map(jnp.mean, chosen)) / 2


def two_views(params, pixels, others):
    return image_features(params, pixels), image_features(params, others)


def simclr_loss(params, z):
    labels = jnp.concatenate([jnp.arange(len(z[0]))] * 2)
    return jnp.mean(optax.losses.ntxent(jnp.concatenate(z), labels, jnp.asarray(0.1, z[0].dtype)))


def barlow_loss(params, z):
    u, v = ((x - jnp.mean(x, 0, keepdims=True)) / jnp.std(x, 0, keepdims=True) for x in z)
    return jnp.sum((u.T @ v / len(u) - jnp.eye(8)) ** 2)


def labelled_features(params, pixels, labels):
    """With a label, a mask and a complex leaf."""
    z = image_features(params, pixels)
    return {"z": z, "label": labels, "counts": pixels[:, 0] > -1, "wave": jax.lax.complex(z[:, 0], z[:, 1] ** 2)}


def supervised_loss(params, z):
    table = z["z"] @ z["z"].T * 5
    alike = (z["label"][:, None] == z["label"]) & z["counts"] & z["counts"][:, None]
    waves = jnp.abs(jnp.sum(z["wave"] ** 2))
    return waves - jnp.sum(jnp.where(alike, jax.nn.log_softmax(table), 0)) / jnp.sum(alike).astype(table.dtype)


LOSSES = {
    "CLIP": (clip_features, clip_loss, (PIXELS, TOKENS)),
    "SimCLR": (two_views, simclr_loss, (PIXELS, normal(B, 12, seed=5))),
    "Barlow Twins": (two_views, barlow_loss, (PIXELS, normal(B, 12, seed=5))),
    "labels, a mask, complex features": (labelled_features, supervised_loss, (PIXELS, LABELS)),
}


def whole(features, loss, has_aux=False):
    """The value and the gradient of the whole batch in one piece."""
    return jax.value_and_grad(lambda params, *batch: loss(params, features(params, *batch)), has_aux=has_aux)


@pytest.mark.usefixtures("x64_only", "as_users_have_it")
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_the_whole_batchs_and_those_of_one_pass_are_not(name):
    features, loss, batch = LOSSES[name]

    def found(params):
        one_pass = shrewjax.value_and_grad(lambda p, *part: loss(p, features(p, *part)), K)
        return (
            whole(features, loss)(params, *batch),
            two_passes(features, loss, K)(params, *batch),
            two_passes(features, loss, 1)(params, *batch),
            one_pass(params, *batch),
        )

    (value, grads), *ours, (_, mistake) = quick_jit(found)(PARAMS)
    for our_value, our_grads in ours:
        assert our_value == pytest.approx(float(value), rel=1e-13)
        assert distance(our_grads, grads) < 1e-13
    print(f"{name}: {distance(ours[0][1], grads):.0e}, one pass {distance(mistake, grads):.0%}")
    assert distance(mistake, grads) > 0.1


def test_the_loss_gets_the_features_in_the_order_of_the_batch_and_may_return_an_aux():
    """Micro-batch i has the examples i, i + K, and so on, as a mean over its rows shows."""

    def features(params, x):
        means = jnp.broadcast_to(jnp.mean(x, axis=0, keepdims=True), x.shape)
        return {"x": params["w"] * x, "row": x[:, 0].astype(jnp.int32), "mean": means}

    def loss(params, z):
        return jnp.mean(z["x"]), z

    x = np.arange(B, dtype="f")[:, None] * np.ones((1, 3), "f")
    step = quick_jit(two_passes(features, loss, K, has_aux=True))
    (value, z), grads = step({"w": np.float32(2)}, x)
    np.testing.assert_array_equal(z["x"], 2 * x)
    np.testing.assert_array_equal(z["row"], np.arange(B))
    np.testing.assert_allclose(z["mean"][:, 0], np.arange(B) % K + (B - K) / 2)
    np.testing.assert_allclose([value, grads["w"]], [B - 1, (B - 1) / 2])


def dropped_features(params, pixels, tokens, key):
    kept = jax.random.bernoulli(key, 0.8, pixels.shape)
    return clip_features(params, jnp.where(kept, pixels / 0.8, 0), tokens)


def with_keys(keys, params, pixels, tokens):
    """The features of the whole batch, where micro-batch i has the key `keys[i]`."""
    parts = [dropped_features(params, pixels[i::K], tokens[i::K], key) for i, key in enumerate(keys)]
    return jax.tree.map(lambda *z: jnp.stack(z, axis=1).reshape(-1, z[0].shape[-1]), *parts)


@pytest.mark.usefixtures("x64_only")
def test_a_micro_batch_has_the_same_key_in_both_passes_and_the_one_of_value_and_grad():
    """Other keys in the second pass are the mistake. By keyword, `features` gets arguments whole."""
    key = jax.random.key(7)
    keys = [jax.random.fold_in(key, i) for i in range(K)]

    def found(params):
        z = with_keys(keys, params, PIXELS, TOKENS)
        c = jax.lax.stop_gradient(jax.grad(clip_loss, 1)(params, z))
        others = jax.grad(lambda p: optax.tree.vdot(with_keys(keys[::-1], p, PIXELS, TOKENS), c))(params)
        step = two_passes(dropped_features, clip_loss, K, rng_argnums=-1)
        by_keyword = two_passes(lambda p, x, key, tokens: tokens(p, x, key), clip_loss, K, rng_argnums=2)
        tokens = lambda p, x, key: dropped_features(p, *x, key)  # noqa: E731
        return (
            whole(partial(with_keys, keys), clip_loss)(params, PIXELS, TOKENS),
            step(params, PIXELS, TOKENS, key),
            by_keyword(params, (PIXELS, TOKENS), key, tokens=tokens),
            (0, others),
        )

    (value, grads), *ours, (_, mistake) = quick_jit(found)(PARAMS)
    for our_value, our_grads in ours:
        assert our_value == pytest.approx(float(value), rel=1e-13)
        assert distance(our_grads, grads) < 1e-13
    assert distance(mistake, grads) > 0.05


@pytest.mark.usefixtures("as_users_have_it")
def test_bfloat16_is_as_near_as_the_whole_batch():
    """Parameters, features and coefficients in bfloat16, the loss in float32."""
    low, exact = jax.tree.map(jnp.bfloat16, PARAMS), jax.tree.map(np.float32, PARAMS)

    def features(params, pixels, tokens):
        z = clip_features(params, pixels.astype(params["pixels"].dtype), tokens)
        return jax.tree.map(lambda x: x.astype(params["pixels"].dtype), z)

    def loss(params, z):
        return clip_loss(*jax.tree.map(lambda x: x.astype(jnp.float32), (params, z)))

    def found(exact, low):
        step, coarse = (two_passes(features, loss, K, accumulator_dtype=x) for x in (None, jnp.bfloat16))
        reference = whole(features, loss)
        results = [of(low, PIXELS, TOKENS) for of in (reference, step, coarse)]
        return [reference(exact, PIXELS, TOKENS), *results]

    (_, exact), (_, once), (_, ours), (_, coarse) = quick_jit(found)(exact, low)
    assert {x.dtype for x in jax.tree.leaves(ours)} == {jnp.dtype(jnp.bfloat16)}
    error, expected = distance(ours, exact), distance(once, exact)
    print(f"bfloat16: {error:.1%}, the whole batch {expected:.1%}")
    assert error < 1.2 * expected
    assert distance(coarse, ours) > 1e-4


# --- many devices ------------------------------------------------------------------------------------------------

IN_SINGLE = jax.tree.map(np.float32, PARAMS)
BATCH = np.float32(normal(64, 12)), np.random.default_rng(1).integers(0, 20, (64, 5)).astype(np.int32)


def gathering(params, z):
    """The loss of a device's own rows, with the keys of all devices."""
    keys = jax.tree.map(lambda x: jax.lax.all_gather(x, "data", tiled=True), z)
    return clip_loss(params, z, (keys, len(z["image"]) * jax.lax.axis_index("data")))


@pytest.fixture(scope="module")
def large():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return jax.device_get(quick_jit(whole(clip_features, clip_loss))(IN_SINGLE, *BATCH))


def mapped(step, **options):
    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": (P(), P())}
    return jax.shard_map(step, mesh=mesh_of(data=8), **specs, **options)


def reduced(params, z):
    return jax.lax.pmean(gathering(params, z), "data")


ON_DEVICES = {
    "shard_map": mapped(two_passes(clip_features, gathering, 2, sum_over="data")),
    "a loss that is reduced": mapped(two_passes(clip_features, reduced, 2, sum_over="data")),
    "untracked types": mapped(two_passes(clip_features, gathering, 2, sum_over="data"), check_vma=False),
    "plain jit": two_passes(clip_features, clip_loss, 2),
}


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize("name", ON_DEVICES)
def test_eight_devices_are_the_whole_batch(large, name):
    """Negatives come from all devices. A temperature has a gradient on each."""
    mesh = mesh_of(data=8)
    placed = jax.device_put((IN_SINGLE, *BATCH), tuple(jax.NamedSharding(mesh, s) for s in (P(), P("data"), P("data"))))
    value, grads = quick_jit(ON_DEVICES[name])(*placed)
    print(f"{name}: {distance(grads, large[1]):.0e}")
    assert value == pytest.approx(float(large[0]), rel=1e-6)
    assert distance(grads, large[1]) < 1e-6
    by_temperature = grads["temperature"] / large[1]["temperature"]
    assert by_temperature == pytest.approx(1, rel=1e-5)


@pytest.mark.usefixtures("as_users_have_it")
def test_negatives_of_one_device_alone_are_the_mistake(large):
    step = mapped(two_passes(clip_features, clip_loss, 2, sum_over="data"))
    assert distance(quick_jit(step)(IN_SINGLE, *BATCH)[1], large[1]) > 0.2


@pytest.mark.usefixtures("as_users_have_it")
def test_an_explicit_mesh_is_the_whole_batch():
    """The loss gathers by `reshard`. The oracle is one device."""
    mesh = mesh_of("Explicit", data=8)
    params = {k: IN_SINGLE[k] for k in ("pixels", "image", "temperature")}
    batch = BATCH[0], np.float32(normal(64, 12, seed=5))

    def loss(params, z, gather=lambda x: x):
        u, v = map(gather, z)
        return clip_loss(params, {"image": u, "text": v})

    value, grads = quick_jit(whole(two_views, loss))(params, *batch)
    with jax.set_mesh(mesh):
        placed = jax.device_put(
            (params, *batch), tuple(jax.NamedSharding(mesh, s) for s in (P(), P("data"), P("data")))
        )
        reshard = partial(loss, gather=lambda x: jax.sharding.reshard(x, P()))
        ours, our_grads = quick_jit(two_passes(two_views, reshard, 2))(*placed)
    assert ours == pytest.approx(float(value), rel=1e-6)
    assert distance(our_grads, grads) < 1e-6


@pytest.mark.usefixtures("as_users_have_it")
def test_keys_differ_between_devices_and_an_aux_stays_a_devices_own():
    """Micro-batch i of device d has the key d * 2 + i."""

    def features(params, x, key):
        return params["w"] * x + jax.random.uniform(key)

    def loss(params, z):
        return jnp.mean(z**2), z

    step = two_passes(features, loss, 2, has_aux=True, rng_argnums=2, sum_over="data")
    specs = {"in_specs": (P(), P("data"), P()), "out_specs": ((P(), P("data")), P())}
    on_devices = quick_jit(jax.shard_map(step, mesh=mesh_of(data=8), **specs))
    x, key = np.arange(32, dtype="f"), jax.random.key(0)
    (value, z), grads = on_devices({"w": np.float32(1)}, x, key)
    number = 2 * (np.arange(32) // 4) + np.arange(32) % 2
    expected = x + np.array([jax.random.uniform(jax.random.fold_in(key, n)) for n in range(16)])[number]
    np.testing.assert_allclose(z, expected, rtol=1e-6)
    np.testing.assert_allclose([value, grads["w"]], [np.mean(expected**2), np.mean(2 * expected * x)], rtol=1e-6)


@pytest.mark.usefixtures("as_users_have_it")
def test_without_a_sum_each_device_keeps_its_own_results():
    own = two_passes(clip_features, clip_loss, 2, sum_over=())

    def rows(params, *batch):
        return jax.tree.map(lambda x: x[None], own(own_params(params, "data"), *batch))

    specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P("data")}
    values, grads = quick_jit(jax.shard_map(rows, mesh=mesh_of(data=8), **specs))(IN_SINGLE, *BATCH)
    split = [x.reshape(8, 8, -1) for x in BATCH]
    expected = quick_jit(jax.vmap(whole(clip_features, clip_loss), (None, 0, 0)))(IN_SINGLE, *split)
    np.testing.assert_allclose(values, expected[0], rtol=1e-6)
    assert distance(grads, expected[1]) < 1e-6


# --- memory ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_users_have_it")
def test_temporaries_fall_with_the_micro_batch_and_only_features_grow_with_the_batch():
    """By XLA's analysis. Nothing runs."""
    hidden, width, size = 2048, 8, 16
    params = {
        "in": jax.ShapeDtypeStruct((width, hidden), np.float32),
        "out": jax.ShapeDtypeStruct((hidden, size), np.float32),
    }

    def features(params, x):
        return jnp.tanh(x @ params["in"]) @ params["out"]

    def loss(params, z):
        return jnp.sum((z.T @ z / len(z) - jnp.eye(size)) ** 2)

    def temporaries(examples, k):
        x = jax.ShapeDtypeStruct((examples, width), np.float32)
        step = two_passes(features, loss, k)
        return users_jit(step).lower(params, x).compile().memory_analysis().temp_size_in_bytes

    by_k = {k: temporaries(4096, k) for k in (2, 8, 16)}
    activations = (by_k[2] - by_k[16]) / (4096 / 2 - 4096 / 16)  # of an example of a micro-batch
    assert by_k[8] - by_k[16] == pytest.approx(activations * (4096 / 8 - 4096 / 16), rel=0.1)
    growth = (temporaries(8192, 32) - by_k[16]) / 4096  # micro-batches have 256 examples in both
    print(f"an example: {growth:.0f} B, its features {size * 4} B, its activations {activations:.0f} B")
    assert growth < 4 * size * 4
    assert activations > 100 * size * 4


# --- masks -------------------------------------------------------------------------------------------------------


def masked_features(params, x, mask):
    return {"z": jnp.tanh(x @ params), "mask": mask}


def loss_of_rows(z, keys):
    """The cross-entropy of each row, in which padding is no negative."""
    table = jnp.where(keys["mask"], z["z"] @ keys["z"].T, -jnp.inf)
    alike = jnp.sum(z["z"] * z["z"], axis=1)
    return z["mask"].astype("f") * (jax.nn.logsumexp(table, axis=1) - alike)


def masked_loss(params, z):
    return jnp.sum(loss_of_rows(z, z)) / jnp.sum(z["mask"].astype("f"))


def test_padding_with_a_mask_among_the_features_mends_a_batch_that_k_does_not_divide():
    w, x = np.float32(normal(12, 3, seed=7)), np.float32(PIXELS[:27])
    padded, mask = np.concatenate([x, np.ones((1, 12), "f")]), np.arange(28) < 27
    found = two_passes(masked_features, masked_loss, K)(w, padded, mask)
    expected = whole(masked_features, masked_loss)(w, x, np.ones(27, bool))
    assert distance(found, expected) < 1e-5


@pytest.mark.parametrize("tracked", [True, False])
def test_a_mask_that_is_uneven_over_devices_is_right_with_the_scaled_sum_of_the_docstring(tracked):
    w, x = np.float32(normal(12, 3, seed=7)), np.float32(PIXELS)
    mask = np.random.default_rng(3).random(B) < np.linspace(0.2, 1, B)

    def of_device(scaled, params, z):
        keys = jax.tree.map(lambda x: jax.lax.all_gather(x, "data", tiled=True), z)
        own, count = loss_of_rows(z, keys), jnp.sum(z["mask"].astype("f"))
        if scaled:
            return 8 * jnp.sum(own) / jax.lax.psum(count, "data")
        return jnp.sum(own) / jnp.maximum(count, 1)

    def found(scaled):
        step = two_passes(masked_features, partial(of_device, scaled), 2, sum_over="data")
        return quick_jit(mapped(step, check_vma=tracked))(w, x, mask)

    expected = whole(masked_features, masked_loss)(w, x, mask)
    assert distance(found(True), expected) < 1e-5
    assert distance(found(False), expected) > 0.05  # a mean of means


# --- errors ------------------------------------------------------------------------------------------------------


def first(params, x):
    return x * params


def mean(params, z):
    return jnp.mean(z)


ERRORS = {
    "parameters that are integers": (
        {"features": lambda p, x: x * p.astype(jnp.float32), "args": (np.int32(1), np.float32(PIXELS))},
        "argument 0 must be a floating or complex array, because it is in argnums",
    ),
    "a key that is no role's": (
        {"args": (np.float32(1), PIXELS, jax.random.key(0)), "features": lambda p, x, key: x * p, "batch_argnums": 1},
        "argument 2 is a PRNG key, and each micro-batch needs its own",
    ),
    "an axis that is not mapped": ({"sum_over": "data"}, "('data',)"),
    "features without rows": (
        {"features": lambda p, x: {"z": jnp.mean(x) * p}},
        "leaf ['z'] must have 8 rows, one for each example of the micro-batch, got shape ()",
    ),
    "features of other rows": (
        {"features": lambda p, x: x.T * p},
        "must have 8 rows, one for each example of the micro-batch, got shape (12, 8)",
    ),
    "a loss of each example": (
        {"loss": lambda p, z: jnp.mean(z, axis=1)},
        "loss must return a scalar, got shape (32,). Return jnp.mean or jnp.sum of it",
    ),
    "an aux that has_aux does not announce": (
        {"loss": lambda p, z: (jnp.mean(z), z)},
        "loss must return a scalar with has_aux=False, got 2 values. Return that, or pass has_aux=True",
    ),
    "features without the parameters": (
        {"features": lambda x: x},
        "features is called with the 2 arguments of the call, but it takes (x): too many positional arguments",
    ),
    "pairs that the micro-batches do not divide": (
        {"args": (np.float32(1), np.float32(PIXELS[:27]))},
        "the batch has 27 examples, which 4 micro-batches on all devices do not divide. Pad it to 28, return a mask "
        "among the features",
    ),
    "features that are integers": (
        {"features": lambda p, x: x.astype(jnp.int32), "loss": lambda p, z: jnp.mean(z.astype(jnp.float32)) * p},
        "features must return at least one floating array",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument_or_the_leaf(name):
    call, message = ERRORS[name]
    call = {"features": first, "loss": mean, "micro_batches": K, "args": (np.float32(1), np.float32(PIXELS))} | call
    args = call.pop("args")
    with pytest.raises(ValueError, match=re.escape(message)):
        jax.eval_shape(two_passes(**call), *args)


@pytest.mark.parametrize("tracked", [True, False])
def test_an_axis_that_is_missing_in_sum_over_is_an_error(tracked):
    step = mapped(lambda p, x, y: two_passes(first, mean, 2)(p, x), check_vma=tracked)
    with pytest.raises(ValueError, match="sum_over"):
        jax.eval_shape(step, np.float32(1), np.zeros(32, "f"), np.zeros(32, "f"))


class Towers(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.image, self.text = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(3, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs, deterministic=True)
        self.temperature = nnx.Param(jnp.zeros(()))

    def __call__(self, x, y):
        return self.dropout(self.image(x)), self.text(y)


def contrastive_of(model, z):
    scores = jnp.exp(model.temperature[...]) * z[0] @ z[1].T
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores)))


def test_an_nnx_model_is_an_error_whose_remedy_gives_the_gradient_of_the_batch():
    x, y = (np.random.default_rng(i).normal(size=(8, 3)).astype(np.float32) for i in range(2))
    model = Towers()
    with pytest.raises(
        ValueError, match=r"^argument 0 is an NNX object .* Split the model by nnx\.split\(.*nnx\.merge"
    ):
        two_passes(lambda m, x, y: m(x, y), contrastive_of, 4)(model, x, y)
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def features(params, x, y):
        return nnx.merge(graph, params, rest)(x, y)

    def loss(params, z):
        return contrastive_of(nnx.merge(graph, params, rest), z)

    _, found = jax.jit(two_passes(features, loss, 4))(params, x, y)
    assert_close(found, jax.jit(jax.grad(lambda p: loss(p, features(p, x, y))))(params), rtol=1e-5, atol=1e-7)
