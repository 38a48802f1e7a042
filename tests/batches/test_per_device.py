"""`per_device`: each row is what the function returns on one device's examples, and a window of rows trains as one."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import CASES, assert_close, mesh_of, placed, thorough
from jax.sharding import PartitionSpec as P
from speed import quick_jit

import shrewjax
import shrewjax.flax
from shrewjax import per_device

pytestmark = pytest.mark.usefixtures("as_users_have_it")

DEVICES, B, WIDTH, CALLS, LENGTH = 8, 32, 8, 8, 4
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(WIDTH, WIDTH)).astype("f"), "b": RNG.normal(size=WIDTH).astype("f")}
X, Y = RNG.normal(size=(2, B, WIDTH)).astype("f")
KEY = jax.random.key(0)


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)


def by_device(devices, *batch):
    return [[x[i : i + B // devices] for x in batch] for i in range(0, B, B // devices)]


EIGHT, TWO = {"data": 8}, {"pod": 2, "data": 4}
PARALLEL = {"data": 4, "model": 2}
MESHES = {
    "Auto": (EIGHT, "data", "Auto", P("data"), P()),
    "Explicit": (EIGHT, "data", "Explicit", P("data"), P()),
    "two axes": (TWO, ("pod", "data"), "Auto", P(("pod", "data")), P()),
    "two Explicit axes in the other order": (TWO, ("data", "pod"), "Explicit", P(), P()),
    "one of two axes": (TWO, "data", "Auto", P(("pod", "data")), P()),
    "parameters over the axis": (EIGHT, "data", "Auto", P("data"), P("data")),
    "parameters over the Explicit axis": (EIGHT, "data", "Explicit", P("data"), P("data")),
    "parameters over another axis": (PARALLEL, "data", "Auto", P(("data", "model")), P("model")),
    "parameters over another Explicit axis": (PARALLEL, "data", "Explicit", P("data"), P(None, "model")),
}


@pytest.mark.parametrize("name", ["Auto", *thorough(*(name for name in MESHES if name != "Auto"))])
def test_rows_are_what_the_function_returns_on_each_devices_examples(name):
    axes, over, kind, batch_spec, spec = MESHES[name]
    mesh = mesh_of(kind, **axes)
    devices = np.prod([axes[a] for a in (over if isinstance(over, tuple) else (over,))])

    def of_all(params, key, x, *, scale, y):
        value, grads = jax.value_and_grad(loss)(params, x, y["y"])
        return value * scale, grads, jax.random.uniform(key)

    parts = by_device(devices, X, Y)
    run = quick_jit(jax.value_and_grad(loss))
    expected = jax.tree.map(lambda *rows: np.stack(rows), *(run(PARAMS, *part) for part in parts))
    draws = [jax.random.uniform(jax.random.fold_in(KEY, d)) for d in range(devices)]

    def of_examples(params, key, x, y, *, scale):
        return of_all(params, key, x, y=y, scale=scale)

    with jax.set_mesh(mesh):
        x, y = placed((X, Y), mesh, (batch_spec, batch_spec))
        params = {"w": placed(PARAMS["w"], mesh, spec), "b": PARAMS["b"]}
        call = per_device(of_examples, over, rng_argnums=1)
        value, grads, drawn = quick_jit(lambda *args: call(*args, scale=2))(params, KEY, x, {"y": y})
    assert_close((value / 2, grads), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(drawn, draws, rtol=1e-6)
    names = over if isinstance(over, tuple) else (over,)
    along = {d: slice(i, i + 1) for i, d in enumerate(np.moveaxis(mesh.devices, 0, 0).flat)}
    if len(axes) == len(names) and tuple(axes) == names:  # a device has its own row
        assert {s.device: s.index[0] for s in value.addressable_shards} == along


def with_window(tx, step, params, batches, mesh, spec):
    """The parameters after these calls, each of which adds a row for each device."""
    with jax.set_mesh(mesh):
        params = placed(params, mesh, spec)
        state = tx.init(params)
        run = quick_jit(step)
        for batch in batches:
            params, state = run(params, state, *placed(batch, mesh, tuple(P("data") for _ in batch)))
    return jax.device_get(params), state


def masked_loss(params, x, y, mask):
    errors = jnp.where(mask[:, None] > 0, jnp.tanh(x @ params["w"] + params["b"]) - y, 0)
    return jnp.sum(errors**2) / jnp.maximum(jnp.sum(mask), 1)


def uneven_batches():
    rng = np.random.default_rng(1)
    for i in range(CALLS):
        x, y = rng.normal(size=(2, B, WIDTH)).astype("f")
        mask = (rng.random(B) < 0.6).astype("f")
        mask[: B // DEVICES] *= i != 1  # a device without examples
        yield x, y, mask


def by_hand(batches, length, rate):
    """Momentum on the gradient of each large batch, in float64."""
    params = {k: np.float64(v) for k, v in PARAMS.items()}
    trace = {k: np.zeros_like(v) for k, v in params.items()}
    for i in range(0, len(batches), length):
        x, y, mask = (np.float64(np.concatenate(part)) for part in zip(*batches[i : i + length], strict=True))
        h = np.tanh(x @ params["w"] + params["b"])
        back = 2 * (h - y) * mask[:, None] / mask.sum() * (1 - h**2)
        grads = {"w": x.T @ back, "b": back.sum(0)}
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        trace = {k: 0.9 * trace[k] + g * min(1, 0.3 / norm) for k, g in grads.items()}
        params = {k: params[k] - rate * trace[k] for k in params}
    return params


def guarded():
    clip = optax.chain(shrewjax.clip_by_global_norm(0.3), optax.sgd(0.1, momentum=0.9))
    return shrewjax.skip_on_spike(shrewjax.skip_nonfinite(clip), warmup_steps=4)


@pytest.mark.parametrize("kind", ["Auto", *thorough("Explicit")])
@pytest.mark.parametrize("axes", [EIGHT, *thorough(PARALLEL)], ids=str)
def test_windows_of_rows_with_uneven_counts_and_an_empty_device_are_large_batches(kind, axes):
    tx = shrewjax.accumulate(guarded(), LENGTH, sum_over="data")
    batches = list(uneven_batches())

    def step(params, state, x, y, mask):
        counts = per_device(jnp.sum, "data", batch_argnums=0)(mask)
        value, grads = per_device(jax.value_and_grad(masked_loss), "data")(params, x, y, mask)
        return shrewjax.apply_gradients(tx, grads, state, params, weight=counts, value=value)

    spec = {"w": P(None, "model"), "b": P()} if "model" in axes else P()
    params, state = with_window(tx, step, PARAMS, batches, mesh_of(kind, **axes), spec)
    assert_close(params, by_hand(batches, LENGTH, 0.1), rtol=2e-6, atol=2e-6)
    assert int(state.windows) == CALLS // LENGTH


def test_policy_within_a_call_weighs_what_it_kept():
    """A device drops a micro-batch with a NaN. Its weight is the examples that it kept, and not all of them."""
    batches = list(uneven_batches())
    for x, _, mask in batches[::3]:
        x[5], mask[5] = np.nan, 1
    kept = [(np.nan_to_num(x), y, mask.copy()) for x, y, mask in batches]
    for _, _, mask in kept[::3]:
        mask[[5, 7]] = 0  # the micro-batch of device 1 that has example 5

    def with_count(params, x, y, mask):
        return masked_loss(params, x, y, mask), jnp.sum(mask)

    own = shrewjax.accumulated_value_and_grad(
        with_count,
        2,
        has_aux=True,
        aux_reduction="sum",
        nonfinite="drop_micro_batch",
        weight_fn=lambda params, x, y, mask: jnp.sum(mask),
    )
    tx = shrewjax.accumulate(guarded(), LENGTH, sum_over="data")

    def step(params, state, x, y, mask):
        (value, count), grads = per_device(own, "data")(params, x, y, mask)
        return shrewjax.apply_gradients(tx, grads, state, params, weight=count, value=value)

    params, _ = with_window(tx, step, PARAMS, batches, mesh_of(data=DEVICES), P())
    assert_close(params, by_hand(kept, LENGTH, 0.1), rtol=2e-6, atol=2e-6)


# --- keys, statistics, models of NNX and Equinox ------------------------------------------------------------------


def on_eight(call, *args, jit=quick_jit):
    with jax.set_mesh(mesh_of(data=DEVICES)):
        return jit(call)(*args)


@pytest.mark.parametrize("key", [KEY, *thorough(jax.random.PRNGKey(0))], ids=["typed", "raw"])
def test_dropout_masks_of_devices_differ(key):
    def mask(params, x, key):
        return jax.random.bernoulli(key, 0.5, (64,))

    masks = on_eight(per_device(mask, "data", rng_argnums=2), PARAMS, X, key)
    assert len(np.unique(masks, axis=0)) == DEVICES
    own = per_device(lambda p, x, keys: mask(p, x, keys[0]), "data")
    keys = jax.random.split(jax.random.key(1), DEVICES)
    assert len(np.unique(on_eight(own, PARAMS, X, keys), axis=0)) == DEVICES


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=False, momentum=0.5)(x))


@pytest.mark.thorough
def test_batch_statistics_of_devices_are_averaged_in_one_line():
    variables = quick_jit(Normed().init)(KEY, X)
    params, statistics = variables["params"], variables["batch_stats"]

    def of_model(params, statistics, x):
        y, new = Normed().apply({"params": params, "batch_stats": statistics}, x, mutable=["batch_stats"])
        return jnp.mean(y**2), new["batch_stats"]

    own = per_device(jax.value_and_grad(of_model, has_aux=True), "data", batch_argnums=2)

    def step(params, statistics, x):
        (_, rows), _ = own(params, statistics, x)
        return jax.tree.map(lambda x: x.mean(0), rows)

    (found,) = on_eight(step, params, statistics, X).values()
    by_device = X.reshape(DEVICES, -1, WIDTH)
    np.testing.assert_allclose(found["mean"], by_device.mean(1).mean(0) / 2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["var"], 0.5 + by_device.var(1).mean(0) / 2, rtol=1e-5)


class _Nnx(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, rngs=None):
        return self.dropout(self.norm(self.linear(x)), rngs=rngs)


@pytest.mark.thorough
def test_a_model_of_nnx_is_split_and_merged_in_the_function():
    graph, params, others = nnx.split(_Nnx(nnx.Rngs(0)), nnx.Param, ...)
    statistics = nnx.filter_state(others, nnx.BatchStat)

    def of_model(params, statistics, x, key):
        model = nnx.merge(graph, params, statistics, nnx.filter_state(others, nnx.RngState), copy=True)
        y = model(x, nnx.Rngs(dropout=key))
        return jnp.mean(y**2), nnx.state(model, nnx.BatchStat)

    own = jax.value_and_grad(of_model, has_aux=True)
    call = per_device(own, "data", batch_argnums=2, rng_argnums=3)
    tx = shrewjax.accumulate(optax.sgd(0.1), 1, sum_over="data")

    def step(params, state, statistics, x, key):
        (value, rows), grads = call(params, statistics, x, key)
        statistics = jax.tree.map(lambda x: x.mean(0), rows)
        params, state = shrewjax.apply_gradients(tx, grads, state, params, value=value)
        return params, state, statistics

    with jax.set_mesh(mesh_of(data=DEVICES)):
        got, _, new = quick_jit(step)(params, tx.init(params), statistics, X, KEY)
    parts = [
        jax.value_and_grad(of_model, has_aux=True)(params, statistics, x, jax.random.fold_in(KEY, d))
        for d, (x,) in enumerate(by_device(DEVICES, X))
    ]
    mean = jax.tree.map(lambda *x: np.mean(x, axis=0), *((grads, its) for (_, its), grads in parts))
    wanted = jax.tree.map(lambda p, g: p - 0.1 * g, params, mean[0])
    for pair in ((got, wanted), (new, mean[1])):
        assert_close(*map(jax.tree.leaves, pair), rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_a_model_of_nnx_without_other_state_goes_in_whole():
    """An optimizer of Flax's takes the rows."""
    model = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))
    kernel = np.asarray(model.kernel[...])

    def of_model(model, x, y):
        return jnp.mean((model(x) - y) ** 2)

    def step(model, optimizer, x, y):
        value, grads = per_device(nnx.value_and_grad(of_model), "data")(model, x, y)
        optimizer.update(model, grads, weight=jnp.full(DEVICES, B // DEVICES), value=value)

    with jax.set_mesh(mesh_of(data=DEVICES)):
        tx = shrewjax.accumulate(optax.sgd(0.1), 2, sum_over="data")
        optimizer = shrewjax.flax.Optimizer(model, tx, wrt=nnx.Param)
        for x, y in ((X, Y), (Y, X)):
            nnx.jit(step)(model, optimizer, x, y)
    grad = sum(2 * x.T @ (x @ kernel - y) / x.size for x, y in ((X, Y), (Y, X))) / 2
    np.testing.assert_allclose(model.kernel[...], kernel - 0.1 * grad, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
def test_a_model_of_equinox_goes_in_whole_with_its_functions():
    model = eqx.nn.MLP(WIDTH, 1, WIDTH, 1, activation=jnp.tanh, key=KEY)

    def of_model(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    own = eqx.filter_value_and_grad(of_model)
    value, grads = on_eight(per_device(own, "data"), model, X, jit=eqx.filter_jit)
    expected = [own(model, x) for (x,) in by_device(DEVICES, X)]
    wanted = jax.tree.map(lambda *rows: np.stack(rows), *expected)
    assert_close(*(jax.tree.leaves(x) for x in ((value, grads), wanted)), rtol=1e-5, atol=1e-6)


# --- what stands around a window of rows -------------------------------------------------------------------------

ROWS = {"w": np.float32([[1, 2], [3, 4]]), "frozen": np.ones((2, 3), np.float32)}
BY_NAME = {"w": "trained", "frozen": "frozen"}


def summed_in(tx):
    """Applies a row for each of two devices in two calls, the second of which closes the window."""

    def step(params, state):
        return shrewjax.apply_gradients(tx, ROWS, state, params, weight=np.float32([1, 3]))

    params = {"w": jnp.zeros(2), "frozen": jnp.zeros(3)}
    with jax.set_mesh(mesh_of(data=2)):
        state = tx.init(params)
        for _ in range(2):
            params, state = step(params, state)
    return params


def of_rows(inner):
    return shrewjax.accumulate(inner, 2, sum_over="data")


AROUND = {
    name: lambda make=case.make: optax.chain(make(), of_rows(optax.sgd(1.0)))
    for name, case in CASES.items()
    if name not in ("skip_nonfinite", "skip_on_spike", "accumulate")
} | {
    "skip_on_spike": lambda: shrewjax.skip_on_spike(of_rows(optax.sgd(1.0))),
    "partition": lambda: optax.partition({"trained": of_rows(optax.sgd(1.0)), "frozen": optax.set_to_zero()}, BY_NAME),
    "masked": lambda: optax.masked(of_rows(optax.sgd(1.0)), {"w": True, "frozen": False}),
}


FEW = "clip_by_global_norm", "partition"


@pytest.mark.parametrize("name", [*FEW, *thorough(*(name for name in AROUND if name not in FEW))])
def test_what_measures_or_passes_rows_on_around_a_window_is_an_error(name):
    with pytest.raises(ValueError, match=r"got \(2, 3\)\. Put this transformation inside accumulate") as error:
        summed_in(AROUND[name]())
    assert len(str(error.value)) <= 700


RIGHT = {
    "everything inside": lambda: of_rows(optax.chain(shrewjax.clip_by_global_norm(1e3), optax.sgd(1.0))),
    "skip_nonfinite": lambda: shrewjax.skip_nonfinite(of_rows(optax.sgd(1.0))),
    "inject_hyperparams": lambda: optax.inject_hyperparams(lambda rate: of_rows(optax.sgd(rate)))(rate=1.0),
    "partition inside": lambda: of_rows(
        optax.partition({"trained": optax.sgd(1.0), "frozen": optax.set_to_zero()}, BY_NAME)
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_looks_for_nan_alone_is_right_around_a_window_of_rows(name):
    params = summed_in(RIGHT[name]())
    np.testing.assert_allclose(params["w"], [-2.5, -3.5])
    np.testing.assert_allclose(params["frozen"], 0 if name == "partition inside" else -1)


# --- what already sums over devices ------------------------------------------------------------------------------


def summed_loss(params, x, y):
    return len(x) * loss(params, x, y)


@pytest.mark.parametrize("kind", ["Auto", *thorough("Explicit")])
def test_rows_of_a_sum_are_own_sums_and_a_sum_over_devices_as_rows_is_an_error(kind):
    """A window of summed gradients adds rows up, so rows that are the sum of all devices come to eight times it."""

    def found(reduction, sum_over):
        fun = summed_loss if reduction == "sum" else loss
        own = per_device(shrewjax.accumulated_value_and_grad(fun, 2, reduction=reduction, sum_over=sum_over), "data")
        tx = shrewjax.accumulate(optax.sgd(1.0), 1, reduction=reduction, sum_over="data")

        def step(params):
            value, grads = own(params, X, Y)
            return shrewjax.apply_gradients(tx, grads, tx.init(params), params, value=value)[0]

        with jax.set_mesh(mesh_of(kind, data=DEVICES)):
            new = quick_jit(step)(jax.tree.map(jnp.asarray, PARAMS))
        return jax.tree.map(lambda x, y: x - y, PARAMS, new)

    for fun, reduction, ways in ((summed_loss, "sum", ((), None)), (loss, "mean", ("data", ()))):
        expected = quick_jit(jax.grad(fun))(PARAMS, X, Y)
        for sum_over in ways:
            assert_close(found(reduction, sum_over), expected, rtol=1e-4, atol=1e-5)
    for sum_over in ("data", ("data",)):
        with pytest.raises(
            ValueError, match=r"^reduction='sum' must not have sum_over=\('data',\).* Leave out sum_over="
        ):
            found("sum", sum_over)


def test_a_sum_over_devices_in_a_micro_batched_loss_is_an_error():
    of_batch = shrewjax.micro_batched(summed_loss, 2, sum_over="data")
    with pytest.raises(ValueError, match=r"^sum_over must not name mapped axes, got \('data',\)"):
        on_eight(per_device(jax.grad(of_batch), "data"), PARAMS, X, Y)


@pytest.mark.parametrize("make", [lambda: jnp.ones(WIDTH), lambda: jax.random.key(0)], ids=["an array", "a key"])
def test_closures_on_an_explicit_mesh_are_an_error_of_per_device_and_others_are_whole(make):
    def using(x, closed_over):
        def of_closure(params, x):
            is_key = jnp.issubdtype(closed_over.dtype, jax.dtypes.prng_key)
            return jnp.sum(x * (jax.random.uniform(closed_over) if is_key else closed_over))

        return per_device(of_closure, "data")(0.0, x)

    factor = jax.random.uniform(make()) if make().ndim == 0 else 1
    rows = factor * X.reshape(DEVICES, -1).sum(1)
    np.testing.assert_allclose(on_eight(using, X, make()), rows, rtol=1e-4)
    with jax.set_mesh(mesh_of("Explicit", data=DEVICES)):
        with pytest.raises(ValueError, match=r"^In per_device, fun must not close over arrays on the mesh\. Pass them"):
            jax.jit(using)(X, make())
        found = quick_jit(lambda x: using(x, np.ones(WIDTH, "f")))(X)
    np.testing.assert_allclose(found, rows / factor, rtol=1e-4)


# --- errors ------------------------------------------------------------------------------------------------------


def in_shard_map():
    mapped = jax.shard_map(per_device(loss, "data"), in_specs=(P(), P("data"), P("data")), out_specs=P("data"))
    return on_eight(mapped, PARAMS, X, Y)


def changes_its_model():
    return on_eight(per_device(lambda model, x: jnp.sum(model(x)), "data"), nnx.BatchNorm(WIDTH, rngs=nnx.Rngs(0)), X)


def call(*args, axes="data", fun=loss, **options):
    named = {name: options.pop(name) for name in ("mask", "key") if name in options}
    return lambda: on_eight(lambda *args: per_device(fun, axes, **options)(*args, **named), *args)


def constrained(params, x, y):
    return loss(params, jax.lax.with_sharding_constraint(x, P("data")), y)


ERRORS = {
    "no mesh": (
        lambda: per_device(loss, "data")(PARAMS, X, Y),
        r"axis_names must name axes of the mesh, got \('data',\), and the mesh has \(\)\. Call",
    ),
    "an unknown axis": (call(PARAMS, X, Y, axes=("data", "pod")), r"got \('data', 'pod'\), and the mesh has \('data'"),
    "no axis": (lambda: per_device(loss, ()), r"axis_names must name axes of the mesh, got"),
    "in shard_map": (in_shard_map, r"outside of shard_map.*, got axis_names=\('data',\)\. Call fun itself"),
    "examples": (
        call(PARAMS, X[:30], Y[:30]),
        r"argument 1 must .* 8 devices divide, got shape \(30, 8\)\. Pad .* to 32",
    ),
    "a scalar": (call(PARAMS, X, np.float32(1)), r"argument 2 must have a first axis.*batch_argnums="),
    "no examples": (
        call(X),
        r"no argument holds examples, because all are in what stays whole by default\. .* batch_argnums=",
    ),
    "a key": (call(PARAMS, X, KEY), r"argument 2 is a PRNG key, and each device needs its own\. Pass rng_argnums=2"),
    "a key in a model": (
        call({"key": KEY}, X, Y),
        r"argument 0\['key'\] is a PRNG key, and each device needs its own\. Pass rng_argnums=0\.",
    ),
    "numbers like a raw key": (
        call(PARAMS, X, np.ones(2, np.uint32)),
        r"argument 2 is a PRNG key, and each device needs its own\. .* convert them to int32",
    ),
    "a key beside examples": (
        call(PARAMS, {"x": X, "key": KEY}),
        r"argument 1\['key'\] is a PRNG key, .*\. Pass it as an argument of its own, and name that in rng_argnums=",
    ),
    "a key by keyword": (call(PARAMS, X, Y, key=KEY), r"keyword argument key is a PRNG key.*rng_argnums='key'"),
    "keys": (
        call(PARAMS, X, jax.random.split(KEY, 8), rng_argnums=2),
        r"argument 2 in rng_argnums must be one PRNG key",
    ),
    "rows": (
        call(PARAMS, X, Y, mask=X[:, 0]),
        r"mask has as many rows .* pass batch_argnums=\(1, 2, 'mask'\)\. Otherwise .*, with batch_argnums=\(1, 2\)",
    ),
    "roles": (
        call(PARAMS, X, Y, batch_argnums=(1, 2), rng_argnums=2),
        r"argument 2 is in rng_argnums and in batch_arg",
    ),
    "a new value": (
        changes_its_model,
        r"must not change its arguments, but it changed argument 0\.mean.*\. Split the model",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_work_says_what_to_do(name):
    run, message = ERRORS[name]
    with pytest.raises(ValueError, match=message) as error:
        run()
    assert len(str(error.value)) <= 700


def test_arrays_of_examples_may_have_other_numbers_of_rows():
    sizes = on_eight(
        per_device(lambda _, x, y: jnp.stack([x.shape[0] + 0 * x.sum(), y.shape[0]]), "data"), 0.0, X, X[:8]
    )
    np.testing.assert_array_equal(sizes, [[B // DEVICES, 1]] * DEVICES)


def test_a_loss_that_places_examples_is_told_to_leave_the_axis_out():
    with pytest.raises((ValueError, AssertionError)) as error:
        call(PARAMS, X, Y, fun=constrained)()
    if isinstance(error.value, ValueError):  # JAX 0.8 has an assertion without words
        assert "In per_device, fun has a device's own examples" in " ".join(error.value.__notes__)
