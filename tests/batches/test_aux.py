"""The aux of a batch: each leaf is reduced by its name, and one of each example is no mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, bits, mesh_of
from speed import quick_jit

import shrewjax

B, K, INPUTS = 8, 4, 3
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(B, INPUTS)).astype(np.float32), RNG.normal(size=B).astype(np.float32)
PARAMS = {"w": jnp.zeros(INPUTS)}
WEIGHTS = {"w": jnp.asarray([0.5, -1.0, 2.0])}


def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] - y) ** 2)


def traced(loss, *args, micro_batches=4, **options):
    return jax.eval_shape(shrewjax.accumulated_value_and_grad(loss, micro_batches, **options), *args)


# --- reduced by name ----------------------------------------------------------------------------------------------


def aux_of(x):
    return {"a": x[0], "b": (jnp.abs(x[0]), x.astype("bfloat16")), "n": jnp.sum(x > 0), "t": x[0] > 0, "i": 1}


AUX = {"a": "mean", "b": "max", "n": "sum", "t": "min", "i": "stack"}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_each_leaf_of_the_aux_is_reduced_by_its_name(reduction):
    weights = np.float32([1, 0, 3, 2])
    step = shrewjax.accumulated_value_and_grad(
        lambda w, x, own: (w * jnp.sum(x), aux_of(x)),
        K,
        has_aux=True,
        weight_fn=lambda w, x, own: own[0],
        aux_reduction=AUX,
        reduction=reduction,
    )
    x = X[:, 0]
    (_, found), _ = jax.jit(step)(1.0, x, np.tile(weights, B // K))
    parts = [x[i::K] for i in (0, 2, 3)]
    firsts = np.stack([p[0] for p in parts])
    np.testing.assert_allclose(found["a"], np.average(np.float64(firsts), weights=[1, 3, 2]), rtol=1e-6)
    assert found["b"][0] == np.abs(firsts).max()
    assert bits(found["b"][1]) == bits(jnp.asarray(np.max(parts, axis=0), jnp.bfloat16))
    assert (found["n"], found["n"].dtype) == (sum((p > 0).sum() for p in parts), jnp.int32)
    assert (found["t"], found["t"].dtype) == ((firsts > 0).all(), np.bool)
    np.testing.assert_array_equal(found["i"], [1, 0, 1, 1])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("sum", [10, 6]), ("max", [4, 3]), ("min", [1, 0]), ("last", [4, 3]), ("stack", [[1, 2, 3, 4], [0, 1, 2, 3]])],
)
def test_one_name_goes_for_all_of_the_aux(name, expected):
    step = shrewjax.accumulated_value_and_grad(lambda w, x, n: (w, (x[0], n[0])), K, has_aux=True, aux_reduction=name)
    (_, found), _ = jax.jit(step)(1.0, np.arange(1, 5, dtype="f"), np.arange(4, dtype=np.int32))
    assert [x.tolist() for x in found] == expected
    assert [x.dtype for x in found] == [jnp.float32, jnp.int32]


def test_sum_of_the_aux_has_the_dtype_of_jax_numpys():
    ones = {dtype: np.ones((), dtype) for dtype in ("int8", "uint8", "int32", "bool", "bfloat16", "complex64")}
    step = shrewjax.accumulated_value_and_grad(
        lambda w, x: (w, jax.tree.map(jnp.asarray, ones)), 300, has_aux=True, aux_reduction="sum"
    )
    (_, found), _ = quick_jit(step)(1.0, np.ones(300, "f"))
    for dtype, expected in jax.eval_shape(lambda: jax.tree.map(jnp.sum, ones)).items():
        assert found[dtype].dtype == expected.dtype, dtype
        assert np.asarray(found[dtype]) == 300, dtype


def test_an_extreme_of_a_float8_needs_no_infinity():
    values = np.float32([[-8, -2], [-0.5, 4], [-1, 0.25], [-4, np.nan]])
    dtypes = ("float8_e4m3fn", "float8_e4m3b11fnuz", "float8_e5m2", "float8_e5m2fnuz")
    x = {dtype: values.astype(jnp.dtype(dtype)) for dtype in dtypes}

    def loss(w, x):
        first = {dtype: leaf[0] for dtype, leaf in x.items()}
        return w, {"max": first, "min": first}

    step = shrewjax.accumulated_value_and_grad(loss, 4, has_aux=True, aux_reduction={"max": "max", "min": "min"})
    (_, aux), _ = quick_jit(step)(np.float32(1), x)
    for name, expected in (("max", [-0.5, np.nan]), ("min", [-8, np.nan])):
        for dtype, found in jax.device_get(aux[name]).items():
            assert found.dtype.name == dtype
            np.testing.assert_array_equal(found.astype(np.float32), expected, err_msg=f"{name} of {dtype}")


def test_a_metric_that_fun_has_reduced_over_devices_is_its_own_mean():
    mesh = mesh_of(data=2)

    def loss_and_metrics(params, x, y):
        loss = loss_fn(params, x, y)
        return loss, {"own": loss, "of all": jax.lax.pmean(loss, "data"), "constant": jnp.float32(3)}

    step = shrewjax.accumulated_value_and_grad(loss_and_metrics, K // 2, has_aux=True, sum_over="data")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(jax.P(), jax.P("data"), jax.P("data")), out_specs=jax.P())
    (value, aux), _ = quick_jit(mapped)(WEIGHTS, X, Y)
    expected = np.mean((X.astype(np.float64) @ np.asarray(WEIGHTS["w"], np.float64) - Y) ** 2)
    assert_close([value, aux["own"], aux["of all"], aux["constant"]], [expected] * 3 + [3], 1e-6)


@pytest.mark.parametrize("sum_over", [(), ("fsdp",)])
def test_a_mean_may_differ_between_devices_whose_loss_is_the_same(sum_over):
    """Devices along "data" reduce the loss, and keep a mean of their own in the aux."""

    def fun(params, x, y):
        loss = loss_fn(params, x, y)
        own = loss if sum_over else jax.lax.pmean(loss, "fsdp")
        return jax.lax.pmean(own, "data"), own

    def step(params, x, y):
        (loss, own), _ = shrewjax.accumulated_value_and_grad(fun, 2, has_aux=True, sum_over=sum_over or None)(
            params, x, y
        )
        return loss, own[None]

    specs = (jax.P(), jax.P(("data", "fsdp")), jax.P(("data", "fsdp")))
    mapped = jax.shard_map(step, mesh=mesh_of(data=2, fsdp=2), in_specs=specs, out_specs=(jax.P(), jax.P("data")))
    own = [loss_fn(WEIGHTS, x, y) for x, y in zip(np.split(X, 2), np.split(Y, 2), strict=True)]
    assert_close(quick_jit(mapped)(WEIGHTS, X, Y), (np.mean(own), np.stack(own)), rtol=1e-6)


def test_a_metric_that_fun_has_reduced_takes_weights_that_differ_between_devices():
    def loss_and_metrics(params, x, y, mask):
        loss = jnp.sum(mask * (x @ params["w"] - y) ** 2) / jnp.maximum(jnp.sum(mask), 1)
        return loss, dict.fromkeys(names, jnp.float32(3))

    names = {"sum": "sum", "max": "max", "min": "min", "mean": "mean"}
    options = {"has_aux": True, "aux_reduction": names, "weight_fn": lambda *args: jnp.sum(args[-1])}
    step = shrewjax.accumulated_value_and_grad(loss_and_metrics, 2, sum_over="data", **options)
    data = jax.P("data")
    mapped = jax.shard_map(step, mesh=mesh_of(data=2), in_specs=(jax.P(), data, data, data), out_specs=jax.P())
    # The first device has examples in one of its two micro-batches, the second in both.
    (_, aux), _ = quick_jit(mapped)(WEIGHTS, X, Y, np.float32([1, 0, 1, 0, 1, 1, 1, 1]))
    assert jax.device_get(aux) == {"sum": 9, "max": 3, "min": 3, "mean": 3}


# --- of each example ----------------------------------------------------------------------------------------------


def with_logits(params, x, y):
    logits = x @ params["w"]
    return jnp.mean((logits - y) ** 2), {"loss": jnp.mean(logits), "logits": logits}


@pytest.mark.parametrize("aux", ["mean", {"loss": "last", "logits": "mean"}], ids=repr)
@pytest.mark.parametrize("micro_batches", [4, 8])
def test_a_mean_of_predictions_is_an_error_that_asks_for_examples(micro_batches, aux):
    size = 8 // micro_batches
    got = rf"got \({size},\), and \(8,\) for the whole batch\. Give it 'examples' in"
    message = rf"^leaf \['logits'\] of the aux must have one shape for 'mean', {got}"
    with pytest.raises(ValueError, match=message):
        traced(with_logits, PARAMS, X, Y, has_aux=True, aux_reduction=aux, micro_batches=micro_batches)


@pytest.mark.parametrize(
    "leaf",
    [lambda x: x.T, lambda x: jnp.stack([x, x]), lambda x: jnp.ravel(x)],
    ids=["second axis", "inner axis", "flattened with another"],
)
def test_aux_with_examples_along_another_axis_is_an_error_too(leaf):
    def loss(params, x, y):
        return loss_fn(params, x, y), leaf(x)

    with pytest.raises(
        ValueError, match=r"^leaf \(the tree itself\) of the aux must have one shape .* Give it '(stack|examples)'"
    ):
        traced(loss, PARAMS, X, Y, has_aux=True)


def test_an_aux_that_is_no_array_is_an_error_that_names_it():
    loss = lambda w, x: (jnp.mean((x @ w) ** 2), {"size": "small"})  # noqa: E731
    with pytest.raises(ValueError, match=r"^leaf \['size'\] of the aux must be an array, got 'small'\. Leave it out"):
        shrewjax.accumulated_value_and_grad(loss, 2, has_aux=True)(jnp.ones(3), jnp.ones((4, 3)))


def test_stacked_aux_of_each_example_comes_back_in_the_order_of_the_examples():
    step = shrewjax.accumulated_value_and_grad(
        with_logits, 4, has_aux=True, aux_reduction={"loss": "mean", "logits": "stack"}
    )
    (_, aux), _ = quick_jit(step)(WEIGHTS, X, Y)
    restored = jnp.swapaxes(aux["logits"], 0, 1).reshape(8)
    np.testing.assert_allclose(restored, X @ np.asarray(WEIGHTS["w"]), rtol=1e-5)


def predicting(params, x, y):
    scores = x @ params["w"]
    return jnp.mean((scores - y) ** 2), {"loss": jnp.mean(scores), "scores": scores, "x": x.astype(jnp.bfloat16)}


NAMES = {"loss": "mean", "scores": "examples", "x": "examples"}


@pytest.mark.parametrize("micro_batches", [1, 4, 8])
def test_rows_of_examples_come_in_the_order_of_the_batch(micro_batches):
    step = shrewjax.accumulated_value_and_grad(predicting, micro_batches, has_aux=True, aux_reduction=NAMES)
    (_, aux), _ = quick_jit(step)(WEIGHTS, X, Y)
    np.testing.assert_allclose(aux["scores"], X @ np.asarray(WEIGHTS["w"]), rtol=1e-5)
    assert bits(aux["x"]) == bits(jnp.asarray(X, jnp.bfloat16))


@pytest.mark.parametrize("skip_empty", [False, True])
def test_rows_of_a_micro_batch_without_a_weight_are_zeros(skip_empty):
    step = shrewjax.accumulated_value_and_grad(
        lambda params, x, y, mask: predicting(params, x, y),
        K,
        has_aux=True,
        weight_fn=lambda params, x, y, mask: mask.sum(),
        aux_reduction=NAMES,
        skip_empty=skip_empty,
    )
    mask = np.arange(B) % K != 2
    (_, aux), _ = quick_jit(step)(WEIGHTS, X, Y, mask)
    np.testing.assert_allclose(aux["scores"], np.where(mask, X @ np.asarray(WEIGHTS["w"]), 0), rtol=1e-5)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("sum_over", [None, "data"])
def test_rows_of_a_batch_on_a_mesh_come_in_its_order(sum_over, kind):
    step = quick_jit(
        shrewjax.accumulated_value_and_grad(predicting, 2, has_aux=True, aux_reduction=NAMES, sum_over=sum_over)
    )
    with jax.set_mesh(mesh_of(kind, data=2)):
        (_, aux), _ = step(WEIGHTS, jax.device_put(X, jax.P("data")), jax.device_put(Y, jax.P("data")))
    np.testing.assert_allclose(aux["scores"], X @ np.asarray(WEIGHTS["w"]), rtol=1e-5)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_rows_of_no_example_are_an_error(micro_batches):
    message = rf"^leaf \['loss'\] must have {8 // micro_batches} rows, one for each example, got shape "
    with pytest.raises(ValueError, match=message):
        traced(predicting, PARAMS, X, Y, has_aux=True, aux_reduction="examples", micro_batches=micro_batches)


def test_aux_whose_size_is_that_of_a_micro_batch_by_chance_is_averaged():
    def loss(params, x, y):  # a micro-batch has 2 examples; the aux has 2 numbers for any batch
        errors = x @ params["w"] - y
        return jnp.mean(errors**2), jnp.stack([jnp.mean(errors), jnp.mean(jnp.abs(errors))])

    found = quick_jit(shrewjax.accumulated_value_and_grad(loss, 4, has_aux=True))(WEIGHTS, X, Y)
    assert_close(found, quick_jit(jax.value_and_grad(loss, has_aux=True))(WEIGHTS, X, Y), rtol=1e-5)


def test_aux_of_a_function_that_takes_no_other_batch_size_is_averaged():
    def loss(params, x, y):
        assert len(x) == 2, "this function takes micro-batches of two examples"
        return loss_fn(params, x, y), jnp.mean(x, axis=0)[:2]

    (_, aux), _ = quick_jit(shrewjax.accumulated_value_and_grad(loss, 4, has_aux=True))(WEIGHTS, X, Y)
    np.testing.assert_allclose(aux, np.mean(X, axis=0)[:2], rtol=1e-5, atol=1e-7)


def test_aux_of_scalars_costs_no_other_trace_of_the_function():
    sizes = []

    def loss(params, x, y):
        sizes.append(len(x))
        return loss_fn(params, x, y), {"loss": jnp.mean(x), "largest": jnp.max(y)}

    traced(loss, PARAMS, X, Y, has_aux=True)
    assert {*sizes} == {2}


@pytest.mark.parametrize("sum_over", [None, "data"])
def test_leaves_that_are_sharded_over_explicit_axes_stay_so_and_are_reduced(sum_over):
    mesh = mesh_of("Explicit", data=2, model=2)
    reductions = {"mean": jnp.mean, "sum": jnp.sum, "max": jnp.max, "min": jnp.min}
    names = {name: name for name in (*reductions, "last", "stack")}

    def loss(w, x):
        outputs = x @ w
        by_feature = {name: reduce(outputs, axis=0) for name, reduce in reductions.items()}
        return jnp.mean(outputs**2), by_feature | {"last": outputs, "stack": outputs}

    w = RNG.normal(size=(INPUTS, 4)).astype(np.float32)
    step = quick_jit(shrewjax.accumulated_value_and_grad(loss, 2, has_aux=True, aux_reduction=names, sum_over=sum_over))
    with jax.set_mesh(mesh):
        (_, aux), _ = step(jax.device_put(w, jax.P(None, "model")), jax.device_put(X, jax.P("data")))
    assert all(x.sharding.spec[-1] == "model" for x in aux.values())
    outputs = X @ w
    expected = {name: reduce(outputs, axis=0) for name, reduce in reductions.items()}
    expected |= {"last": outputs[1::2], "stack": np.stack([outputs[::2], outputs[1::2]])}
    assert_close(aux, expected, rtol=1e-5, atol=1e-6)
