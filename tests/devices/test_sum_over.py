"""`sum_over=` under plain `jax.jit`: the call maps axes of the mesh itself, and results are those of the whole batch.

Eight CPU devices. `test_network.py` has what crosses the network, in programs for H100s and TPUs.
"""

import pathlib
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, mesh_of, placed, thorough
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from speed import quick_jit

import shrewjax
import shrewjax.flax

pytestmark = pytest.mark.usefixtures("as_users_have_it")

UNEVEN = pathlib.Path(__file__).with_name("uneven_devices.py")
B, K, WIDTH = 64, 2, 8
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(WIDTH, WIDTH)).astype("f"), "b": RNG.normal(size=WIDTH).astype("f")}
X, Y = RNG.normal(size=(2, B, WIDTH)).astype("f")
COUNTS = (RNG.uniform(size=B) < 0.6).astype("f")
COUNTS[:4] = 0  # a device of eight has no examples that count in its first micro-batch, or in any
KEY = jax.random.key(0)


def losses(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2, axis=1)


def weight(params, scale, x, y, counts, carry, key, **_):
    return jnp.sum(counts)


def loss(params, scale, x, y, counts, carry, key, *, offset, is_on):
    """The mean over the examples that count, with everything beside it that a call can have."""
    assert is_on is True  # not an array
    each = losses(params, x, y)
    n = jnp.sum(counts)
    value = scale * jnp.sum(jnp.where(counts > 0, each, 0)) / n + offset
    aux = {
        "mean": value,
        "sum": n,
        "max": jnp.max(each),
        "each": each,
        "rows": x[:, None],
        "last": y,
        "key": x[:, 0] * 0 + jax.random.uniform(key),
    }
    carry = carry | {"mean": 0.5 * carry["mean"] + jnp.mean(x, 0), "calls": carry["calls"] + 1}
    return value, (aux, carry)


CARRY = {"mean": np.ones(WIDTH, "f"), "calls": np.int32(3), "frozen": np.ones(2, "f"), "key": KEY}
KINDS = {"mean": "mean", "sum": "sum", "max": "max", "each": "stack", "rows": "stack", "last": "last", "key": "stack"}
OPTIONS = {
    "argnums": (0, 1),
    "has_aux": True,
    "weight_fn": weight,
    "aux_reduction": KINDS,
    "carry_argnum": 5,
    "rng_argnums": -1,
}


def expected(devices, micro_batches=K):
    """The results of the whole batch by JAX alone, and of each device's micro-batches by their definitions."""

    def whole(params, scale):
        return scale * jnp.sum(losses(params, X, Y) * COUNTS) / COUNTS.sum() + 1

    value, grads = jax.value_and_grad(whole, (0, 1))(PARAMS, np.float32(2))
    each = np.asarray(losses(PARAMS, X, Y))
    own = X.reshape(devices, -1, micro_batches, WIDTH)
    statistics = np.broadcast_to(CARRY["mean"], (devices, WIDTH))
    kept = COUNTS.reshape(devices, -1, micro_batches).sum(1) > 0
    for i in range(micro_batches):
        statistics = np.where(kept[:, i : i + 1], 0.5 * statistics + own[:, :, i].mean(1), statistics)
    kept_rows = np.repeat(kept, B // devices // micro_batches, axis=0)  # by example and micro-batch
    draws = [
        [float(jax.random.uniform(jax.random.fold_in(KEY, d * micro_batches + i))) for i in range(micro_batches)]
        for d in range(devices)
    ]

    def stacked(x):
        x = x.reshape(-1, micro_batches, *x.shape[1:]).swapaxes(0, 1)
        return np.where(kept_rows.T.reshape(*x.shape[:2], *[1] * (x.ndim - 2)), x, 0)

    aux = {
        "mean": value,
        "sum": COUNTS.sum(),
        "max": stacked(each).max(),
        "each": stacked(each),
        "rows": stacked(X[:, None]),
        "key": np.where(kept_rows.T, np.repeat(draws, B // devices // micro_batches, axis=0).T, 0),
    }
    calls = CARRY["calls"] + kept.sum(1).max()
    return value, grads, aux, {"mean": statistics[kept.any(1)].mean(0), "calls": calls, "frozen": CARRY["frozen"]}


EIGHT = {"data": 8}
MESHES = {
    "Auto": (EIGHT, "data", "Auto", P("data"), P()),
    "Explicit": (EIGHT, "data", "Explicit", P("data"), P()),
    "two axes": ({"pod": 2, "data": 4}, ("pod", "data"), "Auto", P(("pod", "data")), P()),
    "two axes in the other order": ({"pod": 2, "data": 4}, ("data", "pod"), "Explicit", P(), P()),
    "a batch that is not sharded": (EIGHT, "data", "Auto", P(), P()),
    "parameters over the axis": (EIGHT, "data", "Auto", P("data"), P("data")),
    "parameters over the Explicit axis": (EIGHT, "data", "Explicit", P("data"), P("data")),
    "parameters over another axis": ({"data": 4, "model": 2}, "data", "Auto", P(("data", "model")), P("model")),
    "another Explicit axis": ({"data": 4, "model": 2}, "data", "Explicit", P("data"), P(None, "model")),
}


@pytest.mark.combinations
@pytest.mark.parametrize("skip_empty", [False, *thorough(True)])
@pytest.mark.parametrize("name", ["Auto", *thorough(*(name for name in MESHES if name != "Auto"))])
def test_results_are_those_of_the_whole_batch(name, skip_empty):
    axes, sum_over, kind, batch_spec, spec = MESHES[name]
    mesh = mesh_of(kind, **axes)
    devices = np.prod([axes[a] for a in (sum_over if isinstance(sum_over, tuple) else (sum_over,))])
    value, grads, aux, carry = expected(devices)
    step = shrewjax.accumulated_value_and_grad(loss, K, sum_over=sum_over, skip_empty=skip_empty, **OPTIONS)
    with jax.set_mesh(mesh):
        batch = jax.device_put((X, Y, COUNTS), NamedSharding(mesh, batch_spec))
        params = {"w": jax.device_put(PARAMS["w"], NamedSharding(mesh, spec)), "b": PARAMS["b"]}
        run = quick_jit(lambda *args: step(*args, offset=jnp.float32(1), is_on=True))
        (got, (its_aux, its_carry)), its_grads = run(params, np.float32(2), *batch, CARRY, KEY)
    assert_close((got, its_grads), (value, grads), rtol=1e-5, atol=2e-6)
    assert its_aux.pop("last").shape == (B // K, WIDTH)
    assert_close(its_aux, aux, rtol=1e-5, atol=2e-6)
    assert jnp.array_equal(its_carry.pop("key"), KEY)
    assert_close(its_carry, carry, rtol=1e-5, atol=2e-6)
    if kind == "Explicit":
        assert jax.typeof(its_grads[0]["w"]) == jax.typeof(params["w"])


def mean_loss(params, x, y):
    return jnp.mean(losses(params, x, y))


def masked_mean(params, scale, x, y, counts, key):
    """A loss of the whole batch, whose examples count differently on each device, with draws and an aux."""
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    kept = jax.random.bernoulli(key, 0.7, hidden.shape)
    each = jnp.mean((jnp.where(kept, hidden / 0.7, 0) - y) ** 2, axis=1)
    value = scale * jnp.sum(each * counts) / jnp.sum(counts)
    return value, {"each": each, "largest": jnp.max(each), "n": jnp.sum(counts), "rows": x[:, None], "size": len(x)}


@pytest.mark.combinations
@pytest.mark.parametrize("is_mapped", [True, *thorough(False)], ids=lambda x: "sum_over" if x else "plain jit")
@pytest.mark.parametrize("name", ["Auto", *thorough(*(name for name in MESHES if name != "Auto"))])
def test_an_uneven_masked_mean_is_right_without_a_word(name, is_mapped):
    """Three micro-batches do not divide a device's part."""
    axes, sum_over, kind, batch_spec, spec = MESHES[name]
    arguments = PARAMS, np.float32(2)
    expected = quick_jit(jax.value_and_grad(masked_mean, (0, 1), has_aux=True))(*arguments, X, Y, COUNTS, KEY)
    options = {"sum_over": sum_over} if is_mapped else {}
    # On an Explicit mesh, JAX cuts no sharded array into parts that the devices do not divide.
    micro_batches = 3 if is_mapped or kind == "Auto" else K
    step = shrewjax.value_and_grad(masked_mean, micro_batches, argnums=(0, 1), has_aux=True, **options)
    mesh = mesh_of(kind, **axes)
    with jax.set_mesh(mesh):
        batch = jax.device_put((X, Y, COUNTS), NamedSharding(mesh, batch_spec))
        params = {"w": jax.device_put(PARAMS["w"], NamedSharding(mesh, spec)), "b": PARAMS["b"]}
        found = quick_jit(step)(params, np.float32(2), *batch, KEY)
    assert_close(found, expected, rtol=1e-5, atol=2e-6)
    if kind == "Explicit":
        assert jax.typeof(found[1][0]["w"]) == jax.typeof(params["w"])


def on_eight(run, *arguments, jit=quick_jit):
    with jax.set_mesh(mesh_of(data=8)):
        return jit(run)(*arguments)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [{"reduction": "sum"}, {"micro_batches": 1}, {"accumulator_dtype": jnp.bfloat16}],
    ids=repr,
)
def test_other_arguments_keep_their_meaning(options):
    value, grads = jax.value_and_grad(mean_loss)(PARAMS, X, Y)
    times = 16 if "reduction" in options else 1
    step = shrewjax.accumulated_value_and_grad(mean_loss, **{"micro_batches": K, "sum_over": "data"} | options)
    tolerance = 3e-2 if "accumulator_dtype" in options else 1e-5
    wanted = jax.tree.map(lambda x: times * x, (value, grads))
    assert_close(on_eight(step, PARAMS, X, Y), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.thorough
def test_a_micro_batch_that_is_bad_on_one_device_is_dropped_on_all():
    x = X.copy()
    x[5] = np.nan
    kept = np.arange(B) % K != 5 % K
    expected = jax.value_and_grad(mean_loss)(PARAMS, X[kept], Y[kept])
    step = shrewjax.accumulated_value_and_grad(mean_loss, K, sum_over="data", nonfinite="drop_micro_batch")
    assert_close(on_eight(step, PARAMS, x, Y), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_a_batch_that_weighs_nothing_or_too_much_is_as_without_sum_over():
    def run(weight):
        step = shrewjax.accumulated_value_and_grad(
            lambda p, x, y, w: mean_loss(p, x, y), K, sum_over="data", weight_fn=lambda p, x, y, w: w[0]
        )
        return step(PARAMS, X, Y, jnp.full(B, weight))

    (nothing, zeros), (value, grads) = on_eight(lambda: (run(jnp.float32(0)), run(jnp.float32(1e38))))
    assert np.isnan([nothing, value]).all()
    assert not any(x.any() for x in jax.tree.leaves(zeros))
    assert all(np.isnan(x).all() for x in jax.tree.leaves(grads))


@pytest.mark.thorough
def test_devices_that_have_only_padding_leave_the_carry_to_the_others():
    """The padding of a last batch, which stands on half of the devices."""

    def with_average(params, x, counts, carry):
        n = jnp.maximum(jnp.sum(counts), 1)
        return jnp.sum(counts * (x @ params["w"])[:, 0]) / n, ((), counts @ x / n)

    counts = np.float32(np.arange(B) < B // 2)
    options = {"has_aux": True, "carry_argnum": 3, "weight_fn": lambda params, x, counts, carry: jnp.sum(counts)}
    step = shrewjax.accumulated_value_and_grad(with_average, K, sum_over="data", **options)
    (_, (_, carry)), _ = on_eight(step, PARAMS, X, counts, np.full(WIDTH, 100, np.float32))
    last = X.reshape(8, B // 8 // K, K, WIDTH)[:4, :, -1]  # the last micro-batch of each of the others
    np.testing.assert_allclose(carry, last.mean((0, 1)), rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_skip_empty_gives_the_same_and_never_hangs_where_devices_have_other_micro_batches(forks, tmp_path):
    ((code, printed, errors),) = forks((UNEVEN,), folder=tmp_path)
    assert code == 0, (printed, errors[-2000:])


@pytest.mark.thorough
def test_one_micro_batch_is_divided_over_devices_so_keywords_with_rows_and_keys_are_errors():
    one = partial(shrewjax.accumulated_value_and_grad, micro_batches=1, sum_over="data")
    step = one(lambda params, x, *rest, **_: jnp.mean(x @ params["w"]))
    with pytest.raises(ValueError, match=r"keyword argument counts has as many rows as the batch"):
        on_eight(lambda: step(PARAMS, X, counts=COUNTS))
    with pytest.raises(ValueError, match=r"argument 2 is a PRNG key.*rng_argnums=2"):
        on_eight(lambda: one(mean_loss, batch_argnums=1)(PARAMS, X, KEY))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["value_and_grad", "accumulated_value_and_grad"])
def test_derivatives_and_vmap_of_the_results_are_those_of_the_whole_batch(name):
    def derivatives(value_and_grad, params):
        tangents = jax.tree.map(jnp.ones_like, params)
        many = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params)

        def norm(params):
            return sum(jnp.sum(g**2) for g in jax.tree.leaves(value_and_grad(params, X, Y)[1]))

        _, forward = jax.jvp(lambda p: value_and_grad(p, X, Y), (params,), (tangents,))
        return jax.grad(norm)(params), forward, jax.vmap(lambda p: value_and_grad(p, X, Y))(many)

    wanted = quick_jit(lambda params: derivatives(jax.value_and_grad(mean_loss), params))(PARAMS)
    step = getattr(shrewjax, name)(mean_loss, K, sum_over="data")
    assert_close(on_eight(lambda params: derivatives(step, params), PARAMS), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["value_and_grad", "accumulated_value_and_grad"])
def test_a_loss_may_close_over_arrays_and_its_scans_start_from_zeros(name):
    """With types that record what varies, a scan's carry of zeros would be an error."""

    def of(scale, y):
        def loss(params, x):
            state, _ = jax.lax.scan(
                lambda h, i: (jnp.tanh(h + x @ params["w"]), None), jnp.zeros(x.shape), jnp.arange(2)
            )
            return jnp.mean((state + params["b"] - jnp.mean(y, 0)) ** 2) * scale

        return loss

    scale, fixed = jnp.float32(3), jnp.asarray(Y)
    expected = jax.value_and_grad(of(scale, fixed))(PARAMS, X)

    def step(scale, params, x):
        return getattr(shrewjax, name)(of(scale, fixed), K, sum_over="data")(params, x)

    assert_close(on_eight(step, scale, PARAMS, X), expected, rtol=1e-5, atol=1e-6)
    assert_close(on_eight(step, scale, PARAMS, X, jit=lambda run: run), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_a_loss_without_examples_has_the_keys_of_all_devices():
    def loss(params, key):
        return jnp.sum(params["b"]) * jax.random.uniform(key)

    step = shrewjax.accumulated_value_and_grad(loss, K, rng_argnums=1, batch_argnums=(), sum_over="data")
    draws = [float(jax.random.uniform(jax.random.fold_in(KEY, i))) for i in range(8 * K)]
    _, grads = on_eight(step, PARAMS, KEY)
    np.testing.assert_allclose(grads["b"], np.full(WIDTH, np.mean(draws)), rtol=1e-6)


def pairs(w, ids, dense):
    """Products of pairs of fields, of which constant indices choose some, joined to the others by `concatenate`."""
    bottom = jnp.tanh(dense @ w["bottom"])
    fields = [jnp.sum(w["tables"][i][ids[:, i]], 1) / 2 for i in range(4)]
    z = jnp.stack([*fields, bottom, sum(jnp.sum(w["shared"][ids[:, i]], 1) for i in range(4))], 1)
    products = jnp.einsum("bfd,bgd->bfg", z, z)[:, jnp.array([0, 0, 1, 2, 3]), jnp.array([1, 2, 3, 4, 5])]
    return jnp.mean(jax.nn.softplus(-(jnp.concatenate([products / 32, bottom], -1) @ w["top"])[:, 0]))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "micro_batches"),
    [(None, 1), ("value_and_grad", 1), ("value_and_grad", 4), ("accumulated_value_and_grad", 4)],
)
def test_constant_pairs_on_a_mesh_of_two_axes_are_right_with_sum_over_and_wrong_in_plain_jax(name, micro_batches):
    """The page says so, and names versions. Once JAX alone is right, it needs another word there."""
    shapes = {"tables": (4, 40, 32), "shared": (40, 32), "bottom": (13, 32), "top": (37, 1)}
    w = {name: RNG.normal(size=shape).astype("f") for name, shape in shapes.items()}
    batch = RNG.integers(0, 40, size=(B, 4, 2)), RNG.normal(size=(B, 13)).astype("f")
    mesh = mesh_of(data=2, model=4)
    specs = {"tables": P(None, None, "model"), "shared": P(None, "model"), "bottom": P(None, "model"), "top": P()}
    on_mesh = placed(w, mesh, specs)
    differentiated = jax.value_and_grad(pairs)
    if name:
        differentiated = getattr(shrewjax, name)(pairs, micro_batches, sum_over="data")
    with jax.set_mesh(mesh):
        _, grads = jax.jit(differentiated)(on_mesh, *jax.device_put(batch, NamedSharding(mesh, P("data"))))
    _, expected = quick_jit(jax.value_and_grad(pairs))(w, *batch)
    error = max(np.abs(grads[name] - expected[name]).max() / np.abs(expected[name]).max() for name in w)
    is_wrong = name is None and jax.__version_info__ >= (0, 10)  # older ones are not known
    assert error > 0.5 if is_wrong else name is None or error < 2e-6, error


@pytest.mark.thorough
def test_a_loss_that_compares_examples_has_those_of_all_devices():
    def features(params, x, y):
        return {"x": x @ params["w"], "y": y + params["b"]}

    def loss(params, z):
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(z["x"] @ z["y"].T)))

    def of_batch(features, params, *batch):
        return loss(params, features(params, *batch))

    expected = jax.value_and_grad(partial(of_batch, features))(PARAMS, X, Y)
    divided = partial(shrewjax.micro_batched, micro_batches=K, sum_over="data")
    for of_loss in (partial(of_batch, divided(features)), divided(partial(of_batch, features))):
        found = on_eight(jax.value_and_grad(of_loss), PARAMS, X, Y)
        assert_close(found, expected, rtol=1e-5, atol=1e-6)


class _Model(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(jnp.ones(())), self.norm(x), self.linear(x)


@pytest.mark.thorough
def test_an_nnx_model_has_one_state_and_other_dropout_on_each_device():
    def loss(model, x):
        mask, _, y = model(x)
        return jnp.mean(y**2), jnp.broadcast_to(mask, len(x))

    model = _Model(nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    run = shrewjax.flax.accumulated_value_and_grad(loss, K, has_aux=True, aux_reduction="stack", sum_over="data")
    with jax.set_mesh(mesh_of(data=8)):
        (value, masks), grads = nnx.jit(run)(model, X)
    kernel = np.asarray(params["linear"]["kernel"][...])
    np.testing.assert_allclose(value, np.mean((X @ kernel) ** 2), rtol=1e-5)
    np.testing.assert_allclose(grads["linear"]["kernel"][...], 2 * X.T @ (X @ kernel) / X.size, rtol=1e-4, atol=1e-6)
    by_micro_batch = X.reshape(-1, K, WIDTH).mean(0)
    np.testing.assert_allclose(
        model.norm.mean[...], by_micro_batch[0] / 4 + by_micro_batch[1] / 2, rtol=1e-5, atol=1e-6
    )
    assert int(model.dropout.rngs.count[...]) == K
    assert len(np.unique(np.asarray(masks).reshape(K, 8, -1)[:, :, 0], axis=1).T) > 1


@pytest.mark.thorough
def test_a_divided_nnx_loss_has_the_dropout_and_the_state_of_one_call_of_the_whole_batch():
    def masked(model, x, counts):
        _, normed, y = model(x)
        return jnp.sum((model.dropout(y + normed) ** 2).mean(1) * counts) / jnp.sum(counts)

    def results(make):
        model = _Model(nnx.Rngs(0))
        model.norm.use_running_average = True
        value, grads = nnx.jit(make(masked))(model, X, COUNTS)
        return value, nnx.as_pure(grads), int(model.dropout.rngs.count[...])

    expected = results(nnx.value_and_grad)
    with jax.set_mesh(mesh_of(data=8)):
        found = results(partial(shrewjax.flax.value_and_grad, micro_batches=K, sum_over="data"))
    assert_close(found, expected, rtol=1e-4, atol=1e-6)


# --- errors ------------------------------------------------------------------------------------------------------


def traced(fun=mean_loss, *, mesh=EIGHT, kind="Auto", sum_over="data", rows=B, **options):
    batch = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    with jax.set_mesh(mesh_of(kind, **mesh)):
        return jax.eval_shape(
            shrewjax.accumulated_value_and_grad(fun, K, sum_over=sum_over, **options), PARAMS, batch, batch
        )


def constrained(place):
    return lambda params, x, y: mean_loss(params, place(x), y)


def stacked(params, x, y):
    return mean_loss(params, x, y), {"a": jnp.mean(x)}


def stacked_by_two(params, x, y):
    assert len(x) == B // (8 * K), "this function takes the examples of one micro-batch"
    return mean_loss(params, x, y), {"a": x}


def inside(sum_over):
    step = shrewjax.value_and_grad(mean_loss, K, sum_over=sum_over)
    mapped = jax.shard_map(step, in_specs=(P(), P("pod"), P("pod")), out_specs=P(), axis_names={"pod"})
    with jax.set_mesh(mesh_of(pod=2, data=4)):
        jax.eval_shape(mapped, PARAMS, X, Y)


def placed_by(spec, *, is_named=False, then=lambda x: x, **axes):
    place = NamedSharding(mesh_of(**axes), spec) if is_named else spec
    return traced(constrained(lambda x: then(jax.lax.with_sharding_constraint(x, place))), mesh=axes)


class _Placed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.with_logical_constraint(nn.Dense(WIDTH)(x), ("batch", "features"))


NO_AXIS = r"sum_over must name axes of the mesh.*"
PLACED = (
    r"(?s)mesh.*fun has a device's own examples.* must not place arrays over 'data'.* a jax.P without 'data', and no"
)
WITHOUT_EXAMPLES = r"leaf \['a'\] of the aux must have an axis of examples for '{}', .* Give it another aux_reduction"
ERRORS = {
    "no mesh": (
        lambda: shrewjax.value_and_grad(mean_loss, K, sum_over="data")(PARAMS, X, Y),
        NO_AXIS + r"mesh has \(\)\. Call the step under jax.set_mesh\(mesh\), with a mesh that has \('data',\)",
    ),
    "examples of a divided loss": (
        lambda: on_eight(partial(shrewjax.value_and_grad(mean_loss, K, sum_over="data"), PARAMS, X[:20], Y[:20])),
        r"sum_over=\('data',\) needs a number of examples that its 8 devices divide, got 20\. Pad the batch, and mask ",
    ),
    "a divided loss inside a map": (
        lambda: jax.eval_shape(
            jax.shard_map(
                shrewjax.value_and_grad(mean_loss, K, sum_over="data"),
                mesh=mesh_of(data=8),
                in_specs=(P(), P("data"), P("data")),
                out_specs=P(),
            ),
            PARAMS,
            X,
            Y,
        ),
        r"sum_over must not name mapped axes, got \('data',\)\. Leave it out, and let fun reduce, as by ",
    ),
    "an unknown axis": (lambda: traced(sum_over="dta"), NO_AXIS + r"got \('dta',\), and the mesh has \('data',\)"),
    "one unknown axis": (lambda: traced(sum_over=("data", "pod")), NO_AXIS + r"with a mesh that has \('data', 'pod'\)"),
    "partly mapped": (
        lambda: inside(("pod", "data")),
        r"contains 'data', which is not mapped.*axis_names=",
    ),
    "inside a map": (lambda: inside("data"), NO_AXIS + r"got .*\. Name them in axis_names="),
    "examples": (
        lambda: traced(rows=24),
        r"argument 1 has 24 examples, which micro_batches=2 on each of 8 devices does not divide\. Pad the batch to 32",
    ),
    "a constraint": (lambda: placed_by(P("data"), data=8), PLACED),
    "a constraint with a mesh": (lambda: placed_by(P("data"), is_named=True, data=8), PLACED),
    "a mesh, and a lookup": (
        lambda: placed_by(P(None, "model"), is_named=True, then=lambda x: x[jnp.arange(8)], data=4, model=2),
        r"must not close over arrays .* Place arrays by a jax\.P without 'data'",
    ),
    "reshard": (
        lambda: traced(constrained(lambda x: jax.sharding.reshard(x, P("data"))), kind="Explicit"),
        "must not place",
    ),
    "a stack": (lambda: traced(stacked, has_aux=True, aux_reduction="stack"), WITHOUT_EXAMPLES.format("stack")),
    "the last": (lambda: traced(stacked, has_aux=True, aux_reduction="last"), WITHOUT_EXAMPLES.format("last")),
    "a fixed number": (
        lambda: traced(stacked_by_two, has_aux=True, aux_reduction="stack"),
        r"\(4, 8\), and no shape, because fun does not take it",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_work_says_what_to_do(name):
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call()


PLACEMENTS = {
    "over another axis": ("Auto", lambda x, mesh: jax.lax.with_sharding_constraint(x, P(None, "model"))),
    "over both": ("Auto", lambda x, mesh: jax.lax.with_sharding_constraint(x, P("data", "model"))),
    "with a mesh": ("Auto", lambda x, mesh: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))),
    "reshard": ("Explicit", lambda x, mesh: jax.sharding.reshard(x, P("data", "model"))),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_loss_that_places_arrays_is_right_and_in_micro_batches_of_their_own_over_other_axes_alone(name):
    kind, place = PLACEMENTS[name]
    mesh = mesh_of(kind, data=4, model=2)

    def loss(params, x, y):
        x = place(x, mesh)
        return mean_loss(params, jax.sharding.reshard(x, P("data")) if kind == "Explicit" else x, y)

    expected = jax.value_and_grad(mean_loss)(PARAMS, X, Y)
    names = ["value_and_grad"] + ["accumulated_value_and_grad"] * (name == "over another axis")
    with jax.set_mesh(mesh):
        batch = jax.device_put((X, Y), NamedSharding(mesh, P("data")))
        for make in names:
            results = quick_jit(getattr(shrewjax, make)(loss, K, sum_over="data"))(PARAMS, *batch)
            assert_close(results, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("batch", ["data", None])
def test_flax_rules_that_map_the_batch_to_none_are_the_remedy(batch):
    model = _Placed()
    params = model.init(jax.random.key(0), X)

    def loss(params, x):
        with nn.logical_axis_rules([("batch", batch), ("features", "model")]):
            return jnp.mean(model.apply(params, x) ** 2)

    step = shrewjax.accumulated_value_and_grad(loss, K, sum_over="data")
    divided = shrewjax.value_and_grad(loss, K, sum_over="data")
    expected = quick_jit(jax.value_and_grad(loss))(params, X)
    with jax.set_mesh(mesh_of(data=4, model=2)):
        assert_close(quick_jit(divided)(params, X), expected, rtol=1e-5, atol=1e-6)
        if batch:
            with pytest.raises(ValueError, match="In Flax's logical axis rules, map the axis of examples to None"):
                jax.eval_shape(step, params, X)
        else:
            jax.eval_shape(step, params, X)


@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "model": 2}])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_table_on_the_mesh_that_the_loss_indexes_has_to_be_an_argument_of_it(kind, axes):
    """The test does what the message says."""
    labels, table = np.arange(B) % 5, np.arange(5, dtype="f")
    loss = lambda w, x, labels, table: jnp.mean((x @ w - table[labels]) ** 2)  # noqa: E731
    mesh = mesh_of(kind, **axes)
    with jax.set_mesh(mesh):
        here = placed(table, mesh, P())
        closing = lambda w, x, labels: loss(w, x, labels, here)  # noqa: E731
        for call in (
            shrewjax.accumulated_value_and_grad(closing, K, sum_over="data"),
            shrewjax.per_device(closing, "data"),
        ):
            with pytest.raises(ValueError, match=r"must not close over arrays on the mesh\. Pass them as arguments\."):
                jax.jit(call)(PARAMS["b"], X, labels)
        w = placed(PARAMS["b"], mesh, P())
        step = shrewjax.accumulated_value_and_grad(loss, K, batch_argnums=(1, 2), sum_over="data")
        found = [jax.jit(step)(w, X, labels, here)]
        # A divided loss may close over it.
        found += [jax.jit(shrewjax.value_and_grad(closing, K, sum_over="data"))(w, X, labels)]
    for its in found:
        assert_close(its, jax.value_and_grad(loss)(PARAMS["b"], X, labels, table), rtol=1e-5)


# --- a divided loss inside of `shard_map` and `pmap` ----------------------------------------------------------------


def in_map(run, tracked, *arguments, specs, axes=EIGHT):
    """Returns what each device has, also where JAX gives each device its own."""

    def own(*args):
        return jax.tree.map(lambda x: jnp.asarray(x)[None], run(*args))

    if tracked == "pmap":
        stacked = [
            jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), a) if spec else a
            for a, spec in zip(arguments, specs, strict=True)
        ]
        in_axes = tuple(0 if spec else None for spec in specs)
        return jax.pmap(own, "data", in_axes=in_axes)(*stacked)
    places = {"in_specs": specs, "out_specs": P(tuple(axes))}
    mapped = jax.shard_map(own, mesh=mesh_of(**axes), check_vma=tracked == "tracked", **places)
    return quick_jit(mapped)(*arguments)


def pmean_loss(w, x, y):
    return jax.lax.pmean(jnp.mean((jnp.tanh(x @ w) - y) ** 2), "data")


def inner_step(w, x, y):
    """As in MAML. JAX adds up the inner gradient over devices, where parameters are the same on all of them."""
    return pmean_loss(w - 0.1 * jax.grad(pmean_loss)(w, x, y), x, y)


DERIVATIVES = {
    "the value": lambda f: f,
    "a gradient through a step": lambda f: jax.grad(lambda w: f(w - 0.1 * jax.grad(f)(w))),
    "a third derivative": lambda f: jax.grad(
        lambda w: jnp.sum(jax.grad(lambda w: jnp.sum(jax.grad(f)(w) ** 2))(w) ** 2)
    ),
    "a product with the Hessian": lambda f: lambda w: jax.jvp(jax.grad(f), (w,), (w,))[1],
    "a Hessian in reverse mode": lambda f: jax.jacrev(jax.grad(f)),
}
WAYS = ["tracked", "untracked", "pmap"]


@pytest.mark.parametrize("tracked", ["tracked", *thorough("untracked", "pmap")])
@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("a gradient through a step", pmean_loss),
        *thorough(*((name, pmean_loss) for name in DERIVATIVES if "step" not in name), ("the value", inner_step)),
    ],
)
def test_derivatives_inside_a_map_are_those_of_plain_jax_there(name, loss, tracked):
    """With tracked types, they are also those of the whole batch."""
    w, y = PARAMS["w"][:, 0] / 8, Y[:, 0]

    def both(w, x, y):
        ours = partial(shrewjax.micro_batched(loss, 3), x=x, y=y)
        return [DERIVATIVES[name](f)(w) for f in (ours, partial(loss, x=x, y=y))]

    found, expected = in_map(both, tracked, w, X, y, specs=(P(), P("data"), P("data")))
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if tracked == "tracked" and loss is pmean_loss:
        whole = DERIVATIVES[name](lambda w: jnp.mean((jnp.tanh(X @ w) - y) ** 2))(w)
        np.testing.assert_allclose(found[0], whole, rtol=1e-4, atol=1e-5)


def rows_of(params, x):
    return jnp.tanh(x @ params["w"]) + params["b"]


def psum_of_a_mask(params, x, y, counts):
    each = jnp.mean((rows_of(params, x) - y) ** 2, 1)
    return jax.lax.psum(jnp.sum(each * counts), "data") / jax.lax.psum(jnp.sum(counts), "data")


def pmean_of_a_loss_of_its_own(params, x, y, counts):
    return jax.lax.pmean(jnp.sum((rows_of(params, x) - y) ** 2), "data")


def all_gather_of_rows(params, x, y, counts):
    """Contrastive, over the examples of all devices."""
    others = jax.lax.all_gather(rows_of(params, y), "data", tiled=True)
    first = jax.lax.axis_index("data") * len(x)
    scores = jax.nn.log_softmax(rows_of(params, x) @ others.T)
    return -jax.lax.pmean(jnp.mean(scores[jnp.arange(len(x)), first + jnp.arange(len(x))]), "data")


def all_gather_of_features(params, x, y, counts):
    rows = jax.lax.all_gather(rows_of(params, x), "data", axis=1)
    return jax.lax.pmean(jnp.mean(jnp.sum(rows, 1) ** 2), "data")


def ppermute_of_rows(params, x, y, counts):
    ring = [(i, (i + 1) % 8) for i in range(8)]
    others = jax.lax.ppermute(rows_of(params, x), "data", ring)
    return jax.lax.pmean(jnp.mean((others * rows_of(params, y)) ** 2), "data")


def all_to_all_of_features(params, x, y, counts):
    rows = jax.lax.all_to_all(rows_of(params, x)[:, :, None], "data", 1, 2)
    return jax.lax.pmean(jnp.mean(jnp.sum(rows, 1) ** 3), "data")


def psum_scatter_of_features(params, x, y, counts):
    part = jax.lax.psum_scatter(rows_of(params, x), "data", scatter_dimension=1, tiled=True)
    return jax.lax.psum(jnp.mean(part**2), "data")


def pmax_of_scores(params, x, y, counts):
    rows = rows_of(params, x)
    largest = jax.lax.pmax(jax.lax.stop_gradient(rows), "data")
    return jax.lax.pmean(jnp.mean(jnp.exp(rows - largest)), "data")


def no_reduction(params, x, y, counts):
    return jnp.mean((rows_of(params, x) - y) ** 2)


COLLECTIVES = [
    psum_of_a_mask,
    pmean_of_a_loss_of_its_own,
    all_gather_of_rows,
    all_gather_of_features,
    ppermute_of_rows,
    all_to_all_of_features,
    psum_scatter_of_features,
    pmax_of_scores,
    no_reduction,
]


@pytest.mark.parametrize("tracked", ["tracked", *thorough("untracked", "pmap")])
def test_a_loss_with_collectives_is_that_of_plain_jax_in_the_same_map(tracked):
    """Values, an aux of rows, and gradients by parameters and by examples, in one program."""

    def run(make, params, x, y, counts):
        def of(loss):
            with_rows = lambda *args: (loss(*args), rows_of(args[0], args[1]))  # noqa: E731
            return make(with_rows, argnums=(0, 1), has_aux=True)(params, x, y, counts)

        return {loss.__name__: of(loss) for loss in COLLECTIVES}

    def both(*args):
        divided = partial(shrewjax.value_and_grad, micro_batches=3, batch_argnums=(1, 2, 3))
        return run(divided, *args), run(jax.value_and_grad, *args)

    specs = P(), P("data"), P("data"), P("data")
    found, expected = in_map(both, tracked, PARAMS, X, Y, COUNTS, specs=specs)
    assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_parameters_that_are_sharded_over_another_axis_have_all_derivatives_of_plain_jax():
    def loss(w, x):
        return jax.lax.pmean(jnp.mean(jnp.tanh(jax.lax.psum(x @ w, "model")) ** 2), "data")

    def derivatives(of_batch, w):
        return jax.grad(of_batch)(w), jax.jvp(jax.grad(of_batch), (w,), (w,))[1]

    def both(w, x):
        return [derivatives(partial(f, x=x), w) for f in (shrewjax.micro_batched(loss, K), loss)]

    def whole(w):
        return jnp.mean(jnp.tanh(X @ w) ** 2)

    w, axes = PARAMS["w"] / 8, {"data": 4, "model": 2}
    for tracked in ("tracked", "untracked"):
        found, expected = in_map(both, tracked, w, X, specs=(P("model"), P("data", "model")), axes=axes)
        assert_close(found, expected, rtol=1e-4, atol=1e-6)
        if tracked == "tracked":  # the first two devices have the parts of the parameters
            first = jax.tree.map(lambda x: x[:2].reshape(-1, *x.shape[2:]), found)
            assert_close(first, derivatives(whole, w), rtol=1e-4, atol=1e-6)


def test_one_key_of_all_micro_batches_is_an_argument_or_comes_by_its_data_on_an_explicit_mesh():
    def drawing(params, x, key):
        return jnp.mean((x @ params["w"]) * jax.random.normal(key, ()))

    def of_data(params, x, data):
        return drawing(params, x, jax.random.wrap_key_data(data.astype("uint32")))

    key = jax.random.key(3)
    accumulated = partial(shrewjax.accumulated_value_and_grad, micro_batches=K, sum_over="data")
    with jax.set_mesh(mesh_of("Explicit", data=8)):
        x = jax.device_put(X, P("data"))
        with pytest.raises(ValueError, match=r"If all share one, pass jax\.random\.key_data of it as int32"):
            accumulated(drawing)(PARAMS, x, key)
        found = [
            quick_jit(accumulated(of_data))(PARAMS, x, data=jax.random.key_data(key).astype("int32")),
            quick_jit(shrewjax.value_and_grad(drawing, K, sum_over="data"))(PARAMS, x, key),
        ]
    for its in found:
        assert_close(its, jax.value_and_grad(drawing)(PARAMS, X, key), rtol=1e-4, atol=1e-6)


def solving(params, x, y):
    """Systems of parameters alone, also in scanned layers."""

    def layer(x, a):
        return jnp.tanh(x @ jnp.linalg.inv(a)), None

    h = jax.lax.scan(layer, x, params["layers"])[0]
    return jnp.mean((h @ jnp.linalg.solve(params["a"], params["b"]) - y) ** 2)


def test_a_solve_of_parameters_runs_on_the_devices_of_the_loop():
    rng = np.random.default_rng(0)
    layers = np.eye(3, dtype="f") * 2 + 0.1 * rng.normal(size=(2, 3, 3)).astype("f")
    params = {"layers": layers, "a": layers[0] + 1, "b": np.ones(3, "f")}
    x, y = rng.normal(size=(16, 3)).astype("f"), np.ones(16, "f")
    with jax.set_mesh(mesh_of(data=4)):
        found = jax.jit(shrewjax.value_and_grad(solving, 2, sum_over="data"))(params, x, y)
    assert_close(found, jax.value_and_grad(solving)(params, x, y), rtol=1e-4, atol=1e-6)
