"""A whole batch in one call: what `value_and_grad` makes of it, and of each micro-batch."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, bits, lenient, mesh_of, own_params, placed, thorough
from jax.sharding import PartitionSpec as P
from speed import quick_jit

import shrewjax

B, K, INPUTS = 16, 4, 3
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=INPUTS).astype("f"), "b": np.zeros((), "f")}
X, Y = RNG.normal(size=(B, INPUTS)).astype("f"), RNG.normal(size=B).astype("f")
COUNTS = RNG.uniform(size=B) < 0.6  # examples that are real, and not padding


def squares(params, x, y):
    return (x @ params["w"] + params["b"] - y) ** 2


def mean_loss(params, x, y):
    errors = squares(params, x, y)
    return jnp.mean(errors), {"error": jnp.mean(errors), "worst": jnp.max(errors)}


def summed_loss(params, x, y, counts):
    errors = jnp.where(counts, squares(params, x, y), 0)
    return jnp.sum(errors), {"error": jnp.sum(errors), "worst": jnp.max(errors)}


def masked_loss(params, x, y, counts):
    total, aux = summed_loss(params, x, y, counts)
    n = jnp.sum(counts).astype(total.dtype)
    return total / n, {"error": aux["error"] / n, "worst": aux["worst"]}


def number(params, x, y, counts, *others):
    return jnp.sum(counts)


def close(actual, expected, rtol=1e-6):
    """Leaf by leaf, relative to the leaf's norm."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (e.dtype, e.shape)
        a, e = (np.asarray(x, np.complex128 if x.dtype.kind == "c" else np.float64) for x in (a, e))
        assert np.linalg.norm(a - e) <= rtol * np.linalg.norm(e), (a, e)


@jax.jit
def large_batch(*batch):
    """The value, aux and gradients of the masked loss of a batch in one piece."""
    return jax.value_and_grad(masked_loss, has_aux=True)(PARAMS, *batch)


# --- the batch -------------------------------------------------------------------------------------------------

LOSSES = {
    "mean": (mean_loss, (X, Y), {"aux_reduction": {"error": "mean", "worst": "max"}}),
    "summed": (summed_loss, (X, Y, COUNTS), {"reduction": "sum", "aux_reduction": {"error": "sum", "worst": "max"}}),
    "by tokens": (
        masked_loss,
        (X, Y, COUNTS),
        {"weight_fn": number, "aux_reduction": {"error": "mean", "worst": "max"}},
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_value_gradients_and_aux_are_those_of_the_large_batch(name):
    loss, batch, options = LOSSES[name]
    found = jax.jit(shrewjax.accumulated_value_and_grad(loss, K, has_aux=True, **options))(PARAMS, *batch)
    close(found, jax.jit(jax.value_and_grad(loss, has_aux=True))(PARAMS, *batch))


def test_summed_loss_over_weights_is_the_mean():
    loss = lambda *args: summed_loss(*args)[0]  # noqa: E731
    step = shrewjax.accumulated_value_and_grad(loss, K, weight_fn=number, reduction="sum_over_weights")
    (value, _), grads = large_batch(X, Y, COUNTS)
    close(jax.jit(step)(PARAMS, X, Y, COUNTS), (value, grads))


@pytest.mark.parametrize("reduction", ["mean", "sum_over_weights", "sum"])
def test_gradients_are_those_of_a_window_fed_the_same_micro_batches(reduction):
    window = shrewjax.GradAccumulator(K, reduction=reduction)
    add, take = jax.jit(window.add), jax.jit(window.take)
    state = window.init(PARAMS)
    for i in range(K):
        part = X[i::K], Y[i::K], COUNTS[i::K]
        state = add(state, large_batch(*part)[1], np.sum(part[-1], dtype=np.int32))
    expected = take(state)[0]
    step = shrewjax.accumulated_value_and_grad(masked_loss, K, has_aux=True, weight_fn=number, reduction=reduction)
    _, found = jax.jit(step)(PARAMS, X, Y, COUNTS)
    for name in PARAMS:
        np.testing.assert_array_max_ulp(np.asarray(found[name]), np.asarray(expected[name]), maxulp=2)


def test_one_micro_batch_is_the_batch():
    found = jax.jit(shrewjax.accumulated_value_and_grad(mean_loss, 1, has_aux=True))(PARAMS, X, Y)
    close(found, jax.jit(jax.value_and_grad(mean_loss, has_aux=True))(PARAMS, X, Y), rtol=1e-7)


def test_micro_batch_i_has_the_examples_from_i_on_in_steps_of_k():
    def loss(w, examples, scale, *, offset):
        assert offset.shape == (2,)  # by keyword: whole
        assert scale.shape == (5,)  # not in batch_argnums: whole
        return w * jnp.sum(examples["at"]), (examples["at"], jax.random.key_data(examples["key"]))

    examples = {"at": np.arange(B, dtype="f"), "key": jax.random.split(jax.random.key(0), B)}
    step = shrewjax.accumulated_value_and_grad(loss, K, has_aux=True, batch_argnums=1, aux_reduction="stack")
    (_, (found, keys)), _ = jax.jit(step)(1.0, examples, np.ones(5), offset=np.zeros(2))
    np.testing.assert_array_equal(found, [np.arange(B)[i::K] for i in range(K)])
    np.testing.assert_array_equal(np.swapaxes(found, 0, 1).reshape(B), np.arange(B))
    data = np.asarray(jax.random.key_data(examples["key"]))
    np.testing.assert_array_equal(keys, [data[i::K] for i in range(K)])


@pytest.mark.parametrize("argnums", [1, -2, (1,), (2, 0), [0]])
def test_argnums_are_those_of_jax(argnums):
    def loss(a, b, c, x):
        return jnp.mean(a * x + b**2 * x + jnp.sin(c) * x)

    args = np.float32(1.0), np.float32(2.0), np.float32(3.0), X[:, 0]
    # The examples are named, because None would take the parameters that are not differentiated for some.
    found = jax.jit(shrewjax.accumulated_value_and_grad(loss, K, argnums=argnums, batch_argnums=-1))(*args)
    x, three = np.mean(X[:, 0]), np.float32(3)
    derivatives = x, 4 * x, np.cos(three) * x, None
    wanted = derivatives[argnums] if isinstance(argnums, int) else tuple(derivatives[i] for i in argnums)
    close(found, ((1 + 4 + np.sin(three)) * x, wanted))


# --- dtypes ----------------------------------------------------------------------------------------------------


def test_gradients_and_value_keep_their_dtypes_and_are_summed_in_float32():
    def loss(w, x):
        return jnp.sum(w * x.mean(0))

    x = RNG.normal(size=(512, 2)).astype("bfloat16")
    value, grads = jax.jit(shrewjax.accumulated_value_and_grad(loss, 256))(np.ones(2, "bfloat16"), x)
    parts = np.stack([np.mean(x[i::256].astype("float32"), axis=0).astype("bfloat16") for i in range(256)])
    parts = parts.astype("float64")
    assert value.dtype == grads.dtype == jnp.bfloat16
    assert bits(grads) == bits(parts.mean(0).astype("bfloat16"))  # a sum in bfloat16 is off by 5 %
    assert abs(float(value) - parts.sum(1).mean()) < 2**-8


def test_accumulator_dtype_is_that_of_the_gradients_alone():
    step = shrewjax.accumulated_value_and_grad(lambda w, x: jnp.sum(w * x) / 4, K, accumulator_dtype=jnp.bfloat16)
    x = np.float32([1 + 2**-10] * K)
    value, grads = jax.jit(step)(np.float32(4.0), x)
    assert (value, grads) == (1 + 2**-10, 0.25)
    assert grads.dtype == jnp.float32


def test_complex_and_float64_parameters_have_gradients_of_their_dtype(x64):
    dtypes = ("complex128", "float64") if x64 else ("complex64", "float32")
    params = tuple(np.ones((), dtype) for dtype in dtypes)

    def loss(params, x):
        return jnp.mean(jnp.abs(params[0]) ** 2 * x + params[1] * x)

    x = RNG.uniform(size=8).astype(dtypes[1])
    found = jax.jit(shrewjax.accumulated_value_and_grad(loss, 4, accumulator_dtype=dtypes[0]))(params, x)
    expected = 2 * x.mean(), (params[0] * 2 * x.mean(), x.mean())
    close(found, expected, rtol=1e-13 if x64 else 1e-6)


# --- micro-batches that contribute nothing ---------------------------------------------------------------------


def stateful_loss(params, x, y, counts, carry):
    loss, aux = masked_loss(params, x, y, counts)
    return loss, ({"loss": aux["error"], "kept": 1, "each": loss}, carry + jnp.sum(x))


STATEFUL = {"has_aux": True, "carry_argnum": 4, "aux_reduction": {"loss": "mean", "kept": "sum", "each": "stack"}}


def without(bad, x=X, y=Y, counts=COUNTS):
    """The large batch of all micro-batches but one, and its carry."""
    rows = np.arange(B) % K != bad
    (value, _), grads = large_batch(x[rows], y[rows], counts[rows])
    return value, grads, x[rows].sum()


@pytest.mark.parametrize("bad", [0, 2, K - 1])
@pytest.mark.parametrize("reason", ["weight 0", "dropped", "dropped for its loss"])
def test_micro_batch_that_weighs_nothing_contributes_nothing(reason, bad):
    x, counts = X.copy(), COUNTS.copy()
    counts[bad] = True
    value, grads, carry = without(bad, x, counts=counts)
    options = {"weight_fn": number}
    loss = stateful_loss
    if reason == "weight 0":
        counts[bad::K] = False  # 0 / 0
    else:
        options["nonfinite"] = "drop_micro_batch"
        x[bad] = np.nan
    if reason == "dropped for its loss":
        x[bad] = 7

        def loss(params, x, *args):
            value, aux = stateful_loss(params, x, *args)
            return value + jax.lax.stop_gradient(jnp.where(jnp.any(x == 7), jnp.inf, 0.0)), aux

    step = shrewjax.accumulated_value_and_grad(loss, K, **options, **STATEFUL)
    (found, (aux, found_carry)), found_grads = jax.jit(step)(PARAMS, x, Y, counts, np.float32(0))
    close((found, found_grads), (value, grads))
    close(aux["loss"], value)
    assert aux["kept"] == K - 1
    assert np.flatnonzero(np.asarray(aux["each"]) == 0).tolist() == [bad]
    np.testing.assert_allclose(found_carry, carry, rtol=1e-5)


@pytest.mark.parametrize("reduction", ["mean", "sum_over_weights"])
def test_a_traced_weight_that_python_would_refuse_makes_every_result_nan(reduction):
    """Weights of 3 and -1, whose sum is in range. The largest of the aux has no weight."""

    def loss(params, x):
        return params @ x[0], {"mean": jnp.sum(x), "max": jnp.max(x)}

    grad = shrewjax.accumulated_value_and_grad(
        loss,
        2,
        has_aux=True,
        aux_reduction={"mean": "mean", "max": "max"},
        weight_fn=lambda params, x: x[0, 0],
        reduction=reduction,
    )
    (value, aux), grads = quick_jit(grad)(jnp.ones(1), jnp.float32([[3], [-1]]))
    assert np.isnan([value, aux["mean"], grads[0]]).all()
    assert aux["max"] == 3


def test_bad_micro_batch_is_what_arithmetic_says_if_it_propagates():
    x = X.copy()
    x[5] = np.nan
    (value, aux), grads = jax.jit(shrewjax.accumulated_value_and_grad(mean_loss, K, has_aux=True, aux_reduction="max"))(
        PARAMS, x, Y
    )
    assert np.isnan([value, aux["worst"], *grads["w"], grads["b"]]).all()


@pytest.mark.parametrize("reduction", ["mean", "sum_over_weights", "sum"])
def test_batch_that_weighs_nothing_has_no_gradient_and_no_mean(reduction):
    nothing = np.zeros(B, bool)
    step = shrewjax.accumulated_value_and_grad(
        lambda *args: (
            masked_loss(*args)[0],
            dict.fromkeys(("mean", "sum", "max", "min", "last", "stack"), args[1][0, 0]),
        ),
        K,
        has_aux=True,
        weight_fn=number,
        reduction=reduction,
        aux_reduction={name: name for name in ("mean", "sum", "max", "min", "last", "stack")},
    )
    (value, aux), grads = jax.jit(step)(PARAMS, X, Y, nothing)
    assert bits(grads) == bits(jax.tree.map(np.zeros_like, PARAMS))
    assert value == 0 if reduction == "sum" else np.isnan(value)
    assert np.isnan(aux["mean"])
    assert {name: aux[name].tolist() for name in ("sum", "max", "min", "last", "stack")} == {
        "sum": 0,
        "max": -np.inf,
        "min": np.inf,
        "last": 0,
        "stack": [0] * K,
    }


# --- keys and carries ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey], ids=["typed", "raw"])
def test_each_micro_batch_has_a_key_of_its_own_whatever_it_weighs(make):
    def loss(w, x, keys, own):
        data = keys["dropout"] if make is jax.random.PRNGKey else jax.random.key_data(keys["dropout"])
        return w * jnp.sum(x), data

    def seen(weights):
        step = shrewjax.accumulated_value_and_grad(
            loss, K, has_aux=True, rng_argnums=2, aux_reduction="stack", weight_fn=lambda w, x, keys, own: own[0]
        )
        return np.asarray(jax.jit(step)(1.0, Y, {"dropout": make(3)}, np.tile(np.float32(weights), B // K))[0][1])

    folded = [jax.random.fold_in(make(3), i) for i in range(K)]
    expected = np.stack([k if make is jax.random.PRNGKey else jax.random.key_data(k) for k in folded])
    np.testing.assert_array_equal(seen([1, 1, 1, 1]), expected)
    assert len({tuple(key) for key in expected}) == K
    np.testing.assert_array_equal(seen([2, 0, 0, 5])[[0, 3]], expected[[0, 3]])


def test_carry_goes_through_the_micro_batches_in_their_order():
    def loss(w, x, carry):
        return w, ((), {"digits": carry["digits"] * 10 + x[0], "count": carry["count"] + 1})

    step = shrewjax.accumulated_value_and_grad(loss, K, has_aux=True, carry_argnum=2)
    carry = {"digits": np.int32(0), "count": np.uint8(7)}
    (_, (aux, found)), _ = jax.jit(step)(1.0, np.arange(1, 5, dtype=np.int32), carry)
    assert aux == ()
    assert (found["digits"], found["count"]) == (1234, 11)
    assert found["count"].dtype == np.uint8


# --- only the micro-batches that are there ---------------------------------------------------------------------

NAMES = "mean", "sum", "max", "min", "last", "stack"


def recording_loss(seen, params, x, y, counts, key, carry):
    """Everything that a call can have. It calls `seen` with the numbers of the micro-batches that run."""
    loss, aux = masked_loss(params, x, y, counts)
    jax.debug.callback(seen, x[0, 0])
    noise = jax.random.uniform(key)
    return loss * (1 + 0.1 * noise), (dict.fromkeys(NAMES, aux["worst"] + noise), 2 * carry + jnp.sum(x))


RECORDING = {
    "has_aux": True,
    "aux_reduction": {name: name for name in NAMES},
    "weight_fn": lambda params, x, y, counts, *_: jnp.sum(counts),
    "batch_argnums": (1, 2, 3),
    "rng_argnums": 4,
    "carry_argnum": 5,
}


@pytest.mark.parametrize(
    ("nonfinite", "reduction"), [("propagate", "mean"), *thorough(("drop_micro_batch", "sum_over_weights"))]
)
def test_skip_empty_runs_those_that_have_a_weight_alone_with_the_same_bits(nonfinite, reduction):
    ran = []
    options = {"nonfinite": nonfinite, "reduction": reduction, **RECORDING}
    steps = [
        jax.jit(shrewjax.accumulated_value_and_grad(partial(recording_loss, seen), K, skip_empty=skip_empty, **options))
        for seen, skip_empty in ((ran.append, True), (lambda x: None, False))
    ]
    for real in ([0, 1, 2, 3], [3], [0, 2], [1, 2], []):
        ran.clear()
        counts = COUNTS | (np.arange(B) < K)
        counts &= np.isin(np.arange(B) % K, real)
        x = np.where(counts[:, None], X, np.nan)  # padding may be anything
        x[:K, 0] = np.arange(K)
        found, expected = (step(PARAMS, x, Y, counts, jax.random.key(0), np.float32(3)) for step in steps)
        jax.effects_barrier()
        assert sorted(map(int, ran)) == real
        assert bits(found) == bits(expected), real


def skipping(params, counts, *, skip_empty=True):
    """The squared norm of a masked batch's gradient, and the loss."""

    def loss(params, x, y, counts):
        return summed_loss(params, x, y, counts)[0] / jnp.maximum(jnp.sum(counts), 1).astype("float32")

    step = shrewjax.accumulated_value_and_grad(loss, K, weight_fn=number, skip_empty=skip_empty)
    value, grads = step(params, X, Y, counts)
    return value + sum(jnp.sum(g**2) for g in jax.tree.leaves(grads))


SPARSE = np.arange(B) % K == 2  # micro-batch 2 alone
IN_REVERSE = "Reverse-mode differentiation does not work for lax.while_loop or lax.fori_loop with dynamic"


def test_skip_empty_has_a_forward_mode_and_outside_of_jit_a_reverse_mode():
    expected = quick_jit(jax.grad(partial(skipping, skip_empty=False)))(PARAMS, SPARSE)
    close(quick_jit(jax.jacfwd(skipping))(PARAMS, SPARSE), expected)
    close(jax.grad(skipping)(PARAMS, SPARSE), expected)
    with pytest.raises(ValueError, match=IN_REVERSE):
        jax.jit(jax.grad(skipping)).lower(PARAMS, SPARSE)
    assert IN_REVERSE in " ".join(shrewjax.accumulated_value_and_grad.__doc__.split())


def test_skip_empty_is_right_under_vmap_over_different_numbers():
    real = np.stack([np.isin(np.arange(B) % K, i) for i in ([1, 3], [], [0], [0, 1, 2, 3])])
    found = quick_jit(jax.vmap(skipping, (None, 0)))(PARAMS, real)
    np.testing.assert_array_equal(np.isnan(found), [False, True, False, False])  # no weight: no mean
    of_one = quick_jit(partial(skipping, skip_empty=False))
    np.testing.assert_allclose(found, [of_one(PARAMS, counts) for counts in real], rtol=1e-6)


# --- bad input -------------------------------------------------------------------------------------------------


def call(loss=mean_loss, args=(PARAMS, X, Y), micro_batches=K, **options):
    options.setdefault("has_aux", loss is mean_loss)
    return jax.eval_shape(shrewjax.accumulated_value_and_grad(loss, micro_batches, **options), *args)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        (r"micro_batches must be a Python int >= 1.*got 0", {"micro_batches": 0}),
        (r"micro_batches must be a Python int.*got True", {"micro_batches": True}),
        (r"micro_batches must be a Python int", {"micro_batches": jnp.ones((), jnp.int32)}),
        (r"argument 1 has 16 examples, which micro_batches=5 does not divide.*weight", {"micro_batches": 5}),
        (
            r"argument 3\['z'\] must have a first axis of 16 examples, .* shape \(\)\. .* pass batch_argnums=\(1, 2\)",
            {"args": (PARAMS, X, Y, {"z": 1.0})},
        ),
        (
            r"argument 2 must have a first axis of 16 examples, as argument 1 has, got shape \(15,",
            {"args": (PARAMS, X, Y[1:])},
        ),
        (
            r"no argument holds examples, because all are in argnums.* Pass the batch",
            {"args": (PARAMS,)},
        ),
        (r"argnums has the position 3, but 3 arguments", {"argnums": 3}),
        (r"argument 1 is in argnums and in batch_argnums", {"argnums": (0, 1), "batch_argnums": (1, 2)}),
        (r"argument 2 is in carry_argnum and in rng_argnums", {"rng_argnums": 2, "carry_argnum": -1}),
        (
            r"argument 2 in rng_argnums must be one PRNG key, got shape \(16,\) and dtype float32",
            {"rng_argnums": 2},
        ),
        (
            r"argument 2 is a PRNG key, and each micro-batch needs its own",
            {"args": (PARAMS, X, jax.random.PRNGKey(0, impl="rbg")), "batch_argnums": 1},
        ),
        (r"weight_fn must be a function", {"weight_fn": 2.0}),
        (
            r"weight_fn is called with the 3 arguments of fun, but it takes \(mask\): too many .* same arguments as",
            {"weight_fn": lambda mask: 1},
        ),
        (r"weight must be a real scalar.*shape \(4,\)", {"weight_fn": lambda params, x, y: y}),
        (r"weight must be 0, or between", {"weight_fn": lambda params, x, y: -1}),
        (r"aux_reduction must be one of 'mean', .*got 'median'", {"aux_reduction": {"error": "median"}}),
        (r"aux_reduction must be one of .*got None", {"aux_reduction": None}),
        (
            r"aux_reduction must name each leaf .* without \['error'\]\.",
            {"aux_reduction": {"errors": "mean", "worst": "max"}},
        ),
        (
            r"aux_reduction must name each leaf .* without \['error'\]\. Add it",
            {"aux_reduction": {"worst": "max"}},
        ),
        (
            r"aux_reduction must be one name or a tree prefix",
            {"aux_reduction": {"error": "mean", "worst": "max", "other": "max"}},
        ),
        (r"leaf \['n'\] of the aux is int32, which 'mean' does not take", {"loss": lambda p, x, y: (p["b"], {"n": 1})}),
        (
            r"leaf .* of the aux is complex64, which has no order for 'max'",
            {"loss": lambda p, x, y: (p["b"], 1j), "aux_reduction": "max"},
        ),
        (r"reduction must be one of", {"reduction": "average"}),
        (r"nonfinite must be one of 'propagate', 'drop_micro_batch', got", {"nonfinite": "drop_window"}),
        (r"accumulator_dtype must be", {"accumulator_dtype": "int32"}),
        (r"skip_empty=True needs weight_fn=, got None\. Pass a function", {"skip_empty": True}),
        (r"skip_empty must be True or False", {"skip_empty": jnp.array(True), "weight_fn": lambda *_: 1}),
        (
            r"weight_fn must not read the carry .*with skip_empty=True\. Let it count in the batch\. Or leave",
            {
                "loss": lambda p, x, carry: (p["b"], ((), carry)),
                "args": (PARAMS, X, (np.int32(0), jax.random.key(0))),
                "weight_fn": lambda p, x, carry: jax.random.randint(carry[1], (), 0, 3),
                "carry_argnum": 2,
                "skip_empty": True,
            },
        ),
        (r"sum_over must name axes of the mesh", {"sum_over": "data"}),
        (r"carry_argnum needs has_aux=True", {"carry_argnum": 2, "has_aux": False}),
        (r"aux_reduction='sum' needs has_aux=True", {"aux_reduction": "sum", "has_aux": False}),
        (r"carry_argnum must be a Python int", {"carry_argnum": (2,), "has_aux": True}),
        (
            r"fun must return \(loss, \(aux, carry\)\), got",
            {"carry_argnum": 2, "loss": lambda p, x, carry: (p["b"], carry), "args": (PARAMS, X, np.float32(0))},
        ),
    ],
)
def test_bad_input_is_an_error_that_names_it(message, options):
    if "loss" in options:
        options = {"has_aux": True, **options}
    with pytest.raises(ValueError, match=message):
        call(**options)


def test_examples_in_argnums_are_named_beside_the_error_of_the_loss():
    def loss(w, x, y):
        return jnp.mean((x @ w - y) ** 2)

    def gradients(argnums):
        return shrewjax.accumulated_value_and_grad(loss, 4, argnums=argnums)(PARAMS["w"], X, Y)

    with pytest.raises(TypeError, match="incompatible shapes") as error:
        gradients((0, 1))
    assert any("leave them in argnums, and pass their indices" in note for note in error.value.__notes__)
    close(gradients((0,))[1][0], jax.grad(loss)(PARAMS["w"], X, Y), rtol=1e-5)


def test_carry_that_changes_is_an_error():
    with pytest.raises(AssertionError, match=r"^the carry that fun returns must be like"):
        call(lambda p, x, c: (p["b"], ((), c.astype("bfloat16"))), (PARAMS, X, Y[0]), has_aux=True, carry_argnum=2)


# --- many devices ----------------------------------------------------------------------------------------------

DEVICES = 8
ROWS = 2 * K * DEVICES
MANY = (
    RNG.normal(size=(ROWS, INPUTS)).astype("f"),
    RNG.normal(size=ROWS).astype("f"),
    RNG.uniform(size=ROWS) < 0.3,  # some devices' micro-batches have none
)
WEIGHTED = {"has_aux": True, "weight_fn": number, "aux_reduction": {"error": "mean", "worst": "max"}}


@pytest.mark.parametrize("skip_empty", [False, *thorough(True)])
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_sharded_batch_is_split_without_moving_examples(axis_type, skip_empty):
    mesh = mesh_of(axis_type, data=DEVICES)
    params, batch = placed(PARAMS, mesh, P()), placed(MANY, mesh, P("data"))
    step = shrewjax.accumulated_value_and_grad(masked_loss, K, skip_empty=skip_empty, **WEIGHTED)
    step = quick_jit(step).lower(params, *batch).compile()
    close(step(params, *batch), large_batch(*MANY))
    first = quick_jit(lambda x: jnp.sum(x[: ROWS // K], axis=0)).lower(batch[0]).compile()  # it moves examples
    moves = r"all-gather|all-to-all|collective-permute"
    assert not re.search(moves, step.as_text())
    assert re.search(moves, first.as_text())


def on_each_device(step, mesh, check_vma=True, out_specs=None):
    specs = {"mesh": mesh, "in_specs": (P(), *[P("data")] * 3), "check_vma": check_vma}
    return quick_jit(jax.shard_map(step, out_specs=P() if out_specs is None else out_specs, **specs))


@pytest.mark.parametrize("check_vma", [True, False], ids=["tracked", "untracked"])
@pytest.mark.parametrize("nonfinite", ["propagate", "drop_micro_batch"])
@pytest.mark.parametrize("skip_empty", [False, *thorough(True)])
def test_each_devices_sums_come_to_those_of_the_large_batch(skip_empty, nonfinite, check_vma):
    options = {"nonfinite": nonfinite, "sum_over": "data", "skip_empty": skip_empty, **WEIGHTED}
    step = shrewjax.accumulated_value_and_grad(masked_loss, K, **options)
    close(on_each_device(step, mesh_of(data=DEVICES), check_vma)(PARAMS, *MANY), large_batch(*MANY))


@pytest.mark.parametrize("skip_empty", [False, *thorough(True)])
def test_sums_cross_the_network_once_after_the_loop(skip_empty):
    loss = lambda *args: masked_loss(*args)[0]  # noqa: E731
    step = shrewjax.accumulated_value_and_grad(loss, K, weight_fn=number, sum_over="data", skip_empty=skip_empty)
    text = on_each_device(step, mesh_of(data=DEVICES)).lower(PARAMS, *MANY).compile().as_text()
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 1
    assert " all-reduce" in text[text.index("ENTRY") :]
    assert " while(" in text


def test_micro_batch_that_is_bad_on_one_device_is_bad_on_all():
    x, y, counts = map(np.copy, MANY)
    x[1], counts[1] = np.nan, True  # in micro-batch 1 of device 0
    rows = np.arange(len(x)) % K != 1
    step = shrewjax.accumulated_value_and_grad(
        masked_loss, K, nonfinite="drop_micro_batch", sum_over="data", **WEIGHTED
    )
    close(
        on_each_device(step, mesh_of(data=DEVICES))(PARAMS, x, y, counts), large_batch(x[rows], y[rows], counts[rows])
    )


def test_keys_differ_between_devices_and_counts_add_up_over_them():
    def loss(params, x, y, counts, key):
        return mean_loss(params, x, y)[0], {"key": jax.random.key_data(key), "rows": len(x)}

    step = shrewjax.accumulated_value_and_grad(
        loss, K, has_aux=True, rng_argnums=4, aux_reduction={"key": "stack", "rows": "sum"}, sum_over="data"
    )
    key, out_specs = jax.random.key(1), ((P(), {"key": P("data"), "rows": P()}), P())
    mapped = jax.shard_map(step, mesh=mesh_of(data=DEVICES), in_specs=(P(), *[P("data")] * 3, P()), out_specs=out_specs)
    (_, found), _ = quick_jit(mapped)(PARAMS, *MANY, key)
    folded = quick_jit(jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(key, i))))
    np.testing.assert_array_equal(found["key"], folded(np.arange(DEVICES * K)))
    assert int(found["rows"]) == len(MANY[0])


def test_gradients_that_are_not_reduced_are_an_error():
    step = shrewjax.accumulated_value_and_grad(lambda *args: masked_loss(*args)[0], K)
    with pytest.raises(ValueError, match=r"the loss may differ over 'data'.*Pass sum_over='data'"):
        on_each_device(step, mesh_of(data=DEVICES)).lower(PARAMS, *MANY)
    with pytest.raises(ValueError, match="cannot tell whether gradients"):
        on_each_device(step, mesh_of(data=DEVICES), check_vma=False).lower(PARAMS, *MANY)


def test_a_loss_of_each_device_has_the_gradients_of_its_own_examples_by_the_remedy():
    loss = lambda params, x: jnp.mean(jnp.tanh(x @ params))  # noqa: E731
    params, x = np.ones(3, "f"), np.random.default_rng(2).normal(size=(DEVICES * K, 3)).astype("f")

    def on_devices(function):
        own = lambda params, x: jax.tree.map(lambda y: y[None], function(params, x))  # noqa: E731
        return jax.jit(jax.shard_map(own, mesh=mesh_of(data=DEVICES), in_specs=(P(), P("data")), out_specs=P("data")))

    remedy = r"For each device's own gradients, pass sum_over=\(\) and jax\.lax\.pcast\("
    with pytest.raises(ValueError, match=remedy + r"params, \('data',\), to='varying'\)"):
        on_devices(shrewjax.accumulated_value_and_grad(loss, K)).lower(params, x)
    step = shrewjax.accumulated_value_and_grad(loss, K, sum_over=())
    found = on_devices(lambda params, x: step(own_params(params, ("data",)), x))(params, x)
    expected = jax.vmap(jax.value_and_grad(loss), (None, 0))(params, x.reshape(DEVICES, K, 3))
    assert_close(found, expected, rtol=1e-5)


@pytest.mark.parametrize("check_vma", [True, False], ids=["tracked", "untracked"])
def test_largest_and_smallest_are_nan_if_one_device_has_a_nan(check_vma):
    def loss(params, x):
        return params, {"largest": jnp.max(x), "smallest": jnp.min(x)}

    names = {"largest": "max", "smallest": "min"}
    step = shrewjax.accumulated_value_and_grad(loss, 2, has_aux=True, aux_reduction=names, sum_over="data")
    mapped = jax.shard_map(
        step, mesh=mesh_of(data=DEVICES), in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    x = np.arange(2.0 * DEVICES, dtype="f")
    x[5] = np.nan
    (_, aux), _ = quick_jit(mapped)(jnp.ones(()), x)
    assert np.isnan(aux["largest"])
    assert np.isnan(aux["smallest"])


def carried_over_devices(carry_of, in_spec, **options):
    def loss(params, x, carry):
        return params * jnp.sum(x), ((), {"seen": carry_of(carry["seen"], jnp.sum(x))})

    step = shrewjax.accumulated_value_and_grad(loss, 2, has_aux=True, carry_argnum=2, sum_over="data", **options)
    out_specs = ((P(), ((), in_spec)), P())
    mapped = jax.shard_map(step, mesh=mesh_of(data=DEVICES), in_specs=(P(), P("data"), in_spec), out_specs=out_specs)
    start = np.zeros(DEVICES if in_spec else (), "f")
    (_, (_, carry)), _ = quick_jit(mapped)(np.ones((), "f"), np.arange(2 * DEVICES, dtype="f"), {"seen": start})
    return carry["seen"]


def test_carry_is_a_devices_own_or_reduced_in_fun():
    sums = np.arange(2 * DEVICES).reshape(DEVICES, 2).sum(1)
    np.testing.assert_array_equal(carried_over_devices(jnp.add, P("data")), sums)
    reduced = carried_over_devices(lambda carry, x: carry + jax.lax.psum(x, "data"), P())
    np.testing.assert_array_equal(reduced, sums.sum())


@pytest.mark.parametrize("weight", [None, lambda params, x, carry: jnp.sum(x)], ids=["unweighted", "weighted"])
def test_carry_that_comes_to_differ_between_devices_is_an_error(weight):
    carry_of = jnp.add if weight is None else lambda carry, x: carry + 1
    with pytest.raises(
        ValueError, match=r"\['seen'\] of the carry may differ over 'data'.*Return jax\.lax\.pmean\(carry, "
    ):
        carried_over_devices(carry_of, P(), weight_fn=weight)


# --- memory ----------------------------------------------------------------------------------------------------


LAYERS = [np.zeros((256, 256), "f")] * 6


def loss_of_layers(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def peak(step, examples):
    memory = quick_jit(step).lower(LAYERS, np.zeros((examples, 256), "f")).compile().memory_analysis()
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes


@pytest.mark.parametrize("weight", [None, lambda params, x: jnp.sum(x[:, 0] > 0)], ids=["unweighted", "weighted"])
def test_step_holds_one_micro_batch_and_one_tree_of_gradients(weight):
    tree, batch = sum(w.nbytes for w in LAYERS), 4 * 2048 * 256
    ours = peak(shrewjax.accumulated_value_and_grad(loss_of_layers, 8, weight_fn=weight), 2048)
    whole = jax.value_and_grad(loss_of_layers)
    assert ours <= peak(whole, 256) + batch + 1.1 * tree
    assert ours < peak(whole, 2048) / 2


# --- in company ------------------------------------------------------------------------------------------------


def test_an_adapter_trains_in_a_scan_of_steps_with_recomputation_and_windows_as_on_large_batches():
    """The base is frozen. Two whole batches, each of K micro-batches, make a window."""

    def loss(lora, base, x, y):
        return mean_loss({"w": base["w"] + lora["a"] @ lora["b"], "b": base["b"]}, x, y)[0]

    step = shrewjax.accumulated_value_and_grad(jax.checkpoint(loss), K, batch_argnums=(2, 3))
    sgd = lenient(optax.sgd(0.1, momentum=0.9))
    tx = shrewjax.accumulate(sgd, 2)

    def in_parts(carry, batch):
        lora, state = carry
        value, grads = step(lora, PARAMS, *batch)
        return shrewjax.apply_gradients(tx, grads, state, lora), value

    def large(carry, batch):
        lora, state = carry
        updates, state = sgd.update(jax.grad(loss)(lora, PARAMS, *batch), state, lora)
        return (optax.apply_updates(lora, updates), state), None

    lora = {"a": jnp.full((INPUTS, 1), 0.5), "b": jnp.ones(1)}
    batches = RNG.normal(size=(6, B, INPUTS)).astype("f"), RNG.normal(size=(6, B)).astype("f")
    pairs = tuple(x.reshape(3, 2 * B, *x.shape[2:]) for x in batches)
    (ours, state), _ = quick_jit(partial(jax.lax.scan, in_parts))((lora, tx.init(lora)), batches)
    (theirs, _), _ = quick_jit(partial(jax.lax.scan, large))((lora, sgd.init(lora)), pairs)
    close(ours, theirs, rtol=1e-5)
    assert state.windows == 3
    assert np.linalg.norm(ours["b"] - lora["b"]) > 0.01


def test_nothing_is_nan_outside_of_jit_under_debug_nans():
    with jax.debug_nans(True):
        (value, aux), _ = shrewjax.accumulated_value_and_grad(mean_loss, K, has_aux=True)(PARAMS, X, Y)
    assert np.isfinite(value)
    assert np.isfinite(aux["worst"])


def test_windows_of_whole_batches_send_one_all_reduce_and_equal_the_large_batch():
    # With parameters of its own, a device keeps its gradients, and the window sums them over devices as it closes.
    tx = shrewjax.accumulate(optax.sgd(0.5), 2, sum_over="data")
    own_batch = shrewjax.accumulated_value_and_grad(
        masked_loss, 2, sum_over=(), **WEIGHTED | {"aux_reduction": {"error": "mean", "worst": "max"}}
    )
    mesh = mesh_of(data=DEVICES)
    params = placed(jax.tree.map(jnp.asarray, PARAMS), mesh, P())
    state = tx.init(params)
    specs = shrewjax.state_specs(state)

    def on_device(params, state, *batch):
        (value, _), grads = own_batch(own_params(params, "data"), *batch)
        weight = number(params, *batch).astype(jnp.float32)
        return shrewjax.apply_gradients(tx, grads, state, params, weight=weight, value=value)

    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=(P(), specs, *[P("data")] * 3), out_specs=(P(), specs))
    halves = [x[: ROWS // 2] for x in MANY], [x[ROWS // 2 :] for x in MANY]
    step = quick_jit(mapped).lower(params, state, *halves[0]).compile()
    assert len(re.findall(r" all-reduce(?:-start)?\(", step.as_text())) == 1
    new, state = step(*step(params, state, *halves[0]), *halves[1])

    (value, _), grads = jax.device_get(large_batch(*MANY))
    close(new, jax.tree.map(lambda p, g: p - np.float32(0.5) * g, PARAMS, grads))
    np.testing.assert_allclose(state.loss, value, rtol=1e-6)


def test_gradients_that_jax_would_sum_in_each_micro_batch_are_refused():
    # If parameters are the same on every device, JAX adds up the devices' gradients, and does not average them.
    step = shrewjax.accumulated_value_and_grad(lambda *args: masked_loss(*args)[0], K, sum_over=())
    with pytest.raises(ValueError, match=r"the loss may differ .* pass sum_over=\(\) and jax.lax.pcast"):
        on_each_device(step, mesh_of(data=DEVICES))(PARAMS, *MANY)


def test_derivatives_of_results_with_a_nan_that_is_not_kept_are_right_forward_and_nan_in_reverse():
    """The docstring's row. Its way out, a loss without 0/0, is right in both."""
    x, mask = jnp.arange(1.0, 9.0), jnp.array([1.0, 0.0] * 4)  # micro-batch 1 of 2 has nothing that counts

    def norm_of_gradient(scale, guard):
        def loss(w, x, mask):
            return jnp.sum(mask * (w * x - scale) ** 2) / jnp.maximum(jnp.sum(mask), guard)

        run = shrewjax.accumulated_value_and_grad(loss, 2, weight_fn=lambda w, x, mask: jnp.sum(mask))
        return run(jnp.float32(1), x, mask)[1] ** 2

    def exact(scale):  # the gradient is 2 mean(x**2 - scale x), over the four that count
        mean = np.mean(np.arange(1.0, 9.0, 2.0))
        gradient = 2 * (np.mean(np.arange(1.0, 9.0, 2.0) ** 2) - scale * mean)
        return 2 * gradient * -2 * mean

    forward, reverse = (quick_jit(of(norm_of_gradient)) for of in (jax.jacfwd, jax.jacrev))
    assert float(forward(3.0, 0.0)) == pytest.approx(exact(3.0), rel=1e-6)
    assert np.isnan(float(reverse(3.0, 0.0)))
    assert float(forward(3.0, 1.0)) == pytest.approx(exact(3.0), rel=1e-6)
    assert float(reverse(3.0, 1.0)) == pytest.approx(exact(3.0), rel=1e-6)
