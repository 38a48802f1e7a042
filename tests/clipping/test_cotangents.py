"""`clip_cotangent`: each row of its table, backward passes clipped by hand, and JAX's other transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bits, exact, exact_root, mesh_of, thorough, true_norm
from jax.sharding import PartitionSpec as P
from speed import quick_jit, users_jit

from shrewjax import clip_cotangent, spec


def clipped(cotangent, max_norm, **options):
    """Returns a cotangent, or a tree of them, as the backward pass leaves it."""
    zeros = jax.tree.map(jnp.zeros_like, cotangent)
    _, backward = jax.vjp(lambda x: clip_cotangent(x, max_norm, **options), zeros)
    return backward(cotangent)[0]


def by_hand(cotangent, max_norm):
    """The same of slices along the last axis, in float64."""
    norm = np.linalg.norm(cotangent, axis=-1, keepdims=True)
    return cotangent * np.minimum(1, max_norm / np.where(norm > 0, norm, 1))


def relative_error(actual, expected):
    return np.max(np.abs(np.asarray(actual, np.float64) - expected)) / np.max(np.abs(expected))


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


# --- whole backward passes, against NumPy in float64 --------------------------------------------------------------

LIMIT = 0.3


def recurrent_net(params, xs):
    recurrent, entry, readout = params

    def step(h, x):
        h = clip_cotangent(jnp.tanh(h @ recurrent + x @ entry), LIMIT)
        return h, jnp.sum((h @ readout) ** 2)

    return jnp.sum(jax.lax.scan(step, jnp.zeros((xs.shape[1], len(recurrent)), xs.dtype), xs)[1])


def recurrent_net_by_hand(params, xs):
    recurrent, entry, readout = params
    states = [np.zeros((xs.shape[1], len(recurrent)))]
    for x in xs:
        states.append(np.tanh(states[-1] @ recurrent + x @ entry))
    grads, above, seen = [np.zeros_like(w) for w in params], np.zeros_like(states[0]), []
    for x, before, after in zip(xs[::-1], states[-2::-1], states[:0:-1], strict=True):
        of_output = 2 * after @ readout
        grads[2] += after.T @ of_output
        above = above + of_output @ readout.T
        seen.append(above)
        above = by_hand(above, LIMIT) * (1 - after**2)
        grads[0] += before.T @ above
        grads[1] += x.T @ above
        above = above @ recurrent.T
    return grads, seen


def attention_block(params, x):
    query, key, value, out = params
    read = clip_cotangent(x, LIMIT)
    scores = (read @ query) @ jnp.swapaxes(read @ key, 1, 2)
    mixed = clip_cotangent(jax.nn.softmax(scores) @ (read @ value), LIMIT)
    return jnp.sum((x + mixed @ out) ** 2)


def attention_block_by_hand(params, x):
    query, key, value, out = params

    def flat(a, b):
        return np.einsum("btd,bte->de", a, b)

    q, k, v = x @ query, x @ key, x @ value
    scores = q @ k.swapaxes(1, 2)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    mixed = weights @ v
    above = 2 * (x + mixed @ out)
    of_mixed = above @ out.T
    below = by_hand(of_mixed, LIMIT)
    of_weights = below @ v.swapaxes(1, 2)
    of_scores = weights * (of_weights - np.sum(of_weights * weights, -1, keepdims=True))
    of_q, of_k, of_v = of_scores @ k, of_scores.swapaxes(1, 2) @ q, weights.swapaxes(1, 2) @ below
    of_read = of_q @ query.T + of_k @ key.T + of_v @ value.T
    grads = [flat(x, of_q), flat(x, of_k), flat(x, of_v), flat(mixed, above)]
    return [*grads, above + by_hand(of_read, LIMIT)], [of_mixed, of_read]


NETS = {
    "scan of 50 steps": (
        recurrent_net,
        recurrent_net_by_hand,
        [0.6 * normal(1, 5, 5), normal(2, 3, 5), 0.1 * normal(3, 5, 2)],
        normal(9, 50, 4, 3),
    ),
    "attention": (
        attention_block,
        attention_block_by_hand,
        [normal(i, 6, 6) / 2 for i in range(4)],
        normal(9, 2, 7, 6),
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_gradient_is_that_of_the_backward_pass_clipped_by_hand(name):
    net, net_by_hand, params, x = NETS[name]
    params, x = [w.astype(np.float32) for w in params], x.astype(np.float32)
    of_params, of_x = quick_jit(jax.grad(net, argnums=(0, 1)))(params, x)
    expected, seen = net_by_hand([w.astype(np.float64) for w in params], x.astype(np.float64))
    norms = np.concatenate([np.linalg.norm(a, axis=-1).ravel() for a in seen])
    assert 0 < np.mean(norms > LIMIT) < 1  # there is something to clip, and something to leave
    for actual, wanted in zip([*of_params, of_x], expected, strict=False):
        assert relative_error(actual, wanted) < 1e-5


# --- the table ----------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
# Slices of two, a threshold, and what comes out; None: the slice as it is.
ROWS = {
    "inside": ([[0.3, -0.4], [1e-41, -0.0]], 1.0, [None, None]),
    "on the limit": ([[3.0, 4.0]], 5.0, [None]),
    "outside, beside inside": ([[3.0, 4.0], [0.3, 0.4], [-6.0, 8.0]], 1.0, [[0.6, 0.8], None, [-0.6, 0.8]]),
    "zeros": ([[0.0, -0.0], [3.0, 4.0]], 1.0, [None, [0.6, 0.8]]),
    "1e20": ([[3e20, 4e20], [1.0, 0.0]], 1.0, [[0.6, 0.8], None]),
    "1e20, held to 1e19": ([[3e20, 4e20]], 1e19, [[6e18, 8e18]]),
    "norm beyond the dtype": ([[2.4e38, 3.2e38]], 1.0, [[0.6, 0.8]]),
    "1e-20, inside": ([[3e-20, 4e-20]], 1.0, [None]),
    "1e-20, outside": ([[3e-20, 4e-20], [3e-22, 4e-22]], 1e-20, [[6e-21, 8e-21], None]),
    "threshold 0": ([[3.0, 4.0], [0.0, 0.0], [NAN, 0.0]], 0.0, [[0.0, 0.0], [0.0, 0.0], [NAN, NAN]]),
    "threshold inf": ([[3e38, 3e38], [NAN, 1.0], [INF, 1.0]], INF, [None, None, None]),
    "NaN": ([[NAN, 1.0], [3.0, 4.0], [0.3, 0.4]], 1.0, [[NAN, NAN], [0.6, 0.8], None]),
    "inf": ([[-INF, 1.0], [3.0, 4.0], [0.3, 0.4]], 1.0, [[NAN, NAN], [0.6, 0.8], None]),
}


# Compiled once for all rows, and again for each threshold that is a constant.
jitted, scheduled = users_jit(clipped, static_argnums=1), users_jit(clipped)
KINDS = {
    "scheduled": lambda cotangent, max_norm: scheduled(cotangent, np.float32(max_norm)),
    "jitted": lambda cotangent, max_norm: jitted(cotangent, max_norm),
    "not jitted": lambda cotangent, max_norm: clipped(cotangent, max_norm),
    "a constant": lambda cotangent, max_norm: users_jit(lambda: clipped(cotangent, max_norm))(),
}


@pytest.mark.parametrize("kind", ["scheduled", "jitted", *thorough("a constant", "not jitted")])
def test_slices_follow_the_table(kind):
    for row, (slices, max_norm, expected) in ROWS.items():
        others = [[0.0, -0.0]] * (3 - len(slices))  # so that all rows are of one shape
        cotangent = np.array([*slices, *others], np.float32)
        actual = np.asarray(KINDS[kind](cotangent, max_norm))
        for of_slice, before, wanted in zip(actual, cotangent, [*expected, *[None] * len(others)], strict=True):
            if wanted is None:
                assert bits(of_slice) == bits(before), row
            else:
                np.testing.assert_allclose(of_slice, wanted, rtol=3e-7, err_msg=row)


def test_scheduled_threshold_of_nan_or_below_0():
    cotangent = np.float32([[3, 4], [0, 0], [0, 1]])
    for limit, expected in ((NAN, NAN), (-1.0, 0.0)):
        np.testing.assert_array_equal(scheduled(cotangent, np.float32(limit)), np.full((3, 2), expected))


@pytest.mark.parametrize(
    "dtypes", [("float16", "bfloat16", "float32", "complex64"), ("float64", "complex128")], ids=["x32", "x64"]
)
def test_each_dtype_is_held_to_the_limit_within_2_eps(dtypes):
    real, imaginary = (normal(i, 8, 16) * np.logspace(-2, 2, 8)[:, None] for i in range(2))
    cotangents = {
        dtype: (real + 1j * imaginary if "complex" in dtype else real).astype(jnp.dtype(dtype)) for dtype in dtypes
    }
    with jax.enable_x64("float64" in dtypes):
        results = jax.device_get(users_jit(lambda tree: clipped(tree, max_norm=3.0))(cotangents))
    for dtype, actual in results.items():
        cotangent = cotangents[dtype]
        assert actual.dtype == dtype
        before, after = ([float(true_norm(x)) for x in a] for a in (cotangent, actual))
        assert min(before) < 3 < max(before)
        eps = float(jnp.finfo(dtype).eps)
        for i in range(8):
            if before[i] <= 3:
                assert bits(actual[i]) == bits(cotangent[i]), dtype
            else:
                assert after[i] == pytest.approx(3, rel=2 * eps), dtype
                direction = np.asarray(cotangent[i], np.clongdouble) * 3 / before[i]
                np.testing.assert_allclose(np.asarray(actual[i], np.clongdouble), direction, rtol=4 * eps)


# Any number from 1 on is an order: one of each kind in the default run.
@pytest.mark.parametrize("ord", [1, 1.5, INF, *thorough(2, 3, 4)])
def test_each_order_holds_its_own_norm_of_every_slice(ord):
    cotangent = (normal(0, 3, 4, 5) * np.array([1e-3, 1, 1e25])[:, None, None]).astype(np.float32)
    actual = np.asarray(users_jit(functools.partial(clipped, max_norm=1.0, axis=(1,), ord=ord))(cotangent))
    for i, k in np.ndindex(3, 5):
        before, after = cotangent[i, :, k], actual[i, :, k]
        if true_norm(before, ord) <= 1:
            assert bits(before) == bits(after)
        else:
            assert float(true_norm(after, ord)) == pytest.approx(1, rel=5e-7)


def test_axis_says_what_shares_a_norm():
    cotangent = normal(0, 2, 3, 4).astype(np.float32)
    moved = {0: (0,), (0, -1): (0, 2), None: (0, 1, 2), (): ()}
    every_way = quick_jit(lambda cotangent: [clipped(cotangent, 0.7, axis=axis) for axis in moved])
    for axis, found in zip(moved, every_way(cotangent), strict=True):
        norms = np.sqrt(np.sum(cotangent.astype(np.float64) ** 2, axis=moved[axis], keepdims=True))
        expected = cotangent * np.minimum(1, 0.7 / norms)
        np.testing.assert_allclose(found, expected, rtol=5e-7, err_msg=f"axis={axis}")


def test_slices_are_those_of_the_definition():
    for seed in range(5):
        rng = np.random.default_rng(seed)
        cotangent = (rng.normal(size=(6, 3)) * 10.0 ** rng.integers(-30, 30, (6, 1))).astype(np.float32)
        max_norm = np.float32(10.0 ** rng.integers(-30, 30))
        expected = spec.clip_cotangent_spec([exact(s) for s in cotangent], exact(max_norm)[0], sqrt=exact_root)
        actual = scheduled(cotangent, max_norm)
        np.testing.assert_allclose(actual, np.array(expected, np.float64), rtol=3e-7, err_msg=f"seed {seed}")


# --- forward --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attention", *thorough("scan of 50 steps")])
def test_forward_values_and_derivatives_are_those_without_the_clip_to_the_last_bit(name, monkeypatch):
    net, _, params, x = NETS[name]
    params, x = [w.astype(np.float32) for w in params], x.astype(np.float32)

    def value_and_derivative(params, x):
        return jax.jvp(net, (params, x), (params[::1], jnp.cos(x)))

    with_clip = users_jit(value_and_derivative)(params, x)
    monkeypatch.setitem(globals(), "clip_cotangent", lambda x, max_norm: x)
    assert bits(with_clip) == bits(users_jit(lambda *args: value_and_derivative(*args))(params, x))


def test_forward_jacobian_is_the_identity_and_the_reverse_one_is_clipped():
    def jacobians(x):
        return [jacobian(lambda x: clip_cotangent(x, 0.5))(x) for jacobian in (jax.jacfwd, jax.jacrev)]

    forward, reverse = quick_jit(jacobians)(np.float32([1, 2]))
    np.testing.assert_array_equal(forward, np.eye(2))
    np.testing.assert_array_equal(reverse, np.eye(2) / 2)


def test_hessian_vector_product_is_the_derivative_of_the_clipped_gradient():
    def gradient(x):
        return jax.grad(lambda x: jnp.sum(jnp.sin(clip_cotangent(x, 1.0)) ** 3))(x)

    with jax.enable_x64(True):
        x, v = normal(0, 4, 3), normal(1, 4, 3)
        norms = np.linalg.norm(3 * np.sin(x) ** 2 * np.cos(x), axis=-1)
        assert norms.min() < 1 < norms.max()
        _, product = quick_jit(lambda x, v: jax.jvp(gradient, (x,), (v,)))(x, v)
        beyond, before = (quick_jit(gradient)(x + eps * v) for eps in (1e-6, -1e-6))
        difference = (beyond - before) / 2e-6
        np.testing.assert_allclose(product, difference, rtol=1e-7)


def test_threshold_has_a_derivative_of_0_and_a_second_one_of_its_own():
    def loss(x, max_norm):
        return jnp.sum(jnp.array([3.0, 4.0]) * clip_cotangent(x, max_norm))

    x, max_norm = jnp.zeros(2), jnp.float32(1.0)
    assert quick_jit(jax.grad(loss, argnums=1))(x, max_norm) == 0
    # The clipped gradient is (0.6, 0.8) max_norm.
    second = quick_jit(jax.jacfwd(jax.grad(loss), argnums=1))(x, max_norm)
    np.testing.assert_allclose(second, [0.6, 0.8], rtol=1e-6)


# --- in the company of ----------------------------------------------------------------------------------------------


def score(x, w, max_norm, zero):
    """A loss of one example, with a slice for each of its rows."""
    return jnp.sum(jnp.tanh(clip_cotangent(jnp.sin(x) @ w, max_norm, counter=zero)) ** 3)


BATCH = normal(0, 4, 5, 3).astype(np.float32)
WEIGHTS = normal(1, 3, 3).astype(np.float32)
LIMITS = np.float32([0.1, 0.5, 1.0, 100.0])
gradients_of_one = quick_jit(jax.grad(score, argnums=(0, 3)))


def example_by_example(limits):
    found = [gradients_of_one(x, WEIGHTS, limit, np.float32(0)) for x, limit in zip(BATCH, limits, strict=True)]
    grads, counts = zip(*found, strict=True)
    return np.stack(grads), np.stack(counts)


def test_each_example_of_a_vmapped_loss_has_its_own_slices():
    def loss(batch, limits, zero):
        return jnp.sum(jax.vmap(score, in_axes=(0, None, 0, None))(batch, WEIGHTS, limits, zero))

    gradients = quick_jit(jax.grad(loss, argnums=(0, 2)))
    for limits in (LIMITS, np.full(4, 0.5, np.float32)):
        grads, count = gradients(BATCH, limits, np.float32(0))
        expected, counts = example_by_example(limits)
        np.testing.assert_allclose(grads, expected, rtol=1e-5, atol=1e-7)
        assert 0 < count == counts.sum() < 20


def test_vmapped_gradients_are_clipped_and_counted_by_example():
    by_example = jax.vmap(jax.grad(score, argnums=(0, 3)), in_axes=(0, None, 0, None))
    grads, counts = quick_jit(by_example)(BATCH, WEIGHTS, LIMITS, np.float32(0))
    expected, expected_counts = example_by_example(LIMITS)
    np.testing.assert_allclose(grads, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(counts, expected_counts)


def test_vmap_along_another_axis_than_the_first():
    def loss(x):
        return jnp.sum(jax.vmap(lambda x: clip_cotangent(x, 1.0) * 3, in_axes=2)(x))

    np.testing.assert_allclose(quick_jit(jax.grad(loss))(jnp.zeros((2, 4, 3))), np.full((2, 4, 3), 0.5), rtol=1e-6)


@pytest.mark.parametrize("name", ["scan of 50 steps", *thorough("attention")])
def test_rematerialized_backward_pass_is_the_same(name):
    net, net_by_hand, params, x = NETS[name]
    params, x = [w.astype(np.float32) for w in params], x.astype(np.float32)
    found = quick_jit(jax.grad(jax.checkpoint(net)))(params, x)
    expected, _ = net_by_hand([w.astype(np.float64) for w in params], x.astype(np.float64))
    for actual, wanted in zip(found, expected, strict=False):
        assert relative_error(actual, wanted) < 1e-5


def test_leaves_of_a_tree_are_clipped_each_on_its_own_and_the_others_pass():
    tree = {"h": np.zeros((2, 2), np.float32), "c": np.zeros(3, jnp.bfloat16), "step": np.int32(3), "none": None}
    above = {"h": np.full((2, 2), 4, np.float32), "c": np.full(3, 0.5, jnp.bfloat16)}

    @quick_jit
    def run(above):
        out, backward = jax.vjp(lambda tree: clip_cotangent(tree, 1.0), tree)
        (cotangent,) = backward(above | {"step": np.zeros((), jax.dtypes.float0), "none": None})
        assert cotangent.pop("step").dtype == jax.dtypes.float0
        return out["step"], cotangent

    steps, cotangent = run(above)
    assert steps == 3
    np.testing.assert_allclose(cotangent["h"], np.full((2, 2), 0.5**0.5), rtol=1e-6)
    assert bits(cotangent["c"]) == bits(above["c"])


# --- counting -------------------------------------------------------------------------------------------------------


def test_counter_of_the_slices_shape_tells_which_were_clipped():
    above = np.float32([[3, 4], [0.3, 0.4], [0, 0], [NAN, 0]])

    @quick_jit
    def count(zero, max_norm):
        return jax.vjp(lambda zero: clip_cotangent(jnp.zeros((4, 2)), max_norm, counter=zero), zero)[1](above)[0]

    np.testing.assert_array_equal(count(np.zeros(4, np.float32), 1.0), [1, 0, 0, 1])
    scalar = np.float32(0)
    assert count(scalar, 1.0) == 2
    assert count(scalar, 0.0) == 3  # of nothing, nothing is clipped
    assert count(scalar, INF) == 0


def test_counter_does_nothing_to_the_value():
    x = jnp.arange(4.0)
    assert bits(clip_cotangent(x, 1.0, counter=jnp.float32(7))) == bits(x)


def test_steps_of_a_recurrence_are_told_apart_by_scanned_counters():
    def last(h, zeros):
        return jax.lax.scan(lambda h, zero: (3 * clip_cotangent(h, 10.0, counter=zero), None), h, zeros)[0][0]

    grad, counts = jax.jit(jax.grad(last, argnums=(0, 1)))(jnp.ones(1), jnp.zeros(5))
    np.testing.assert_array_equal(grad, [10])
    np.testing.assert_array_equal(counts, [1, 1, 1, 0, 0])  # from the end: 3, 9, then 27, 30, 30


# --- many devices ---------------------------------------------------------------------------------------------------


def over_devices(in_spec, sharded_over, *, check_vma=True):
    def part(cotangent, zero):
        def out(x, zero):
            return clip_cotangent(x, 1.0, counter=zero, sharded_over=sharded_over)

        _, backward = jax.vjp(out, jnp.zeros_like(cotangent) + 0 * cotangent, zero)
        return backward(cotangent)

    specs = in_spec, P()
    return quick_jit(
        jax.shard_map(part, mesh=mesh_of(data=2, model=4), in_specs=specs, out_specs=specs, check_vma=check_vma)
    )


CASES = {
    "other slices": (P(("data", "model")), ()),
    "other slices and divided": (P("data", "model"), "model"),
    "divided": (P(None, ("data", "model")), ("data", "model")),
    "the same on all": (P(), None),
    "the same along one": (P("data"), ()),
}


UNTRACKED = [("other slices and divided", False), *thorough(("other slices", False), ("divided", False))]


@pytest.mark.parametrize(("case", "check_vma"), [*((case, True) for case in CASES), *UNTRACKED])
def test_slices_over_devices_are_those_of_the_whole(case, check_vma):
    spec_of_x, sharded_over = CASES[case]
    cotangent = (normal(0, 8, 16) * np.logspace(-2, 1, 8)[:, None]).astype(np.float32)
    expected = by_hand(np.asarray(cotangent, np.float64), 1.0)
    found, count = over_devices(spec_of_x, sharded_over, check_vma=check_vma)(cotangent, np.float32(0))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    if check_vma:  # otherwise each device has a count of its own
        assert 0 < int(count) == np.sum(np.linalg.norm(cotangent, axis=-1) > 1) < 8


@pytest.mark.parametrize("check_vma", [True, False], ids=["tracked", "untracked"])
def test_parts_that_nobody_told_of_are_an_error(check_vma):
    with pytest.raises(ValueError, match=r"leaf \(the tree itself\).*Pass sharded_over=.*, \(\) for none"):
        over_devices(P("data"), None, check_vma=check_vma)(jnp.ones((8, 16)), jnp.zeros(()))


def test_a_mapped_axis_that_does_not_exist_is_an_error():
    with pytest.raises(ValueError, match=r"sharded_over \('modle',\): 'modle' is no mapped axis"):
        over_devices(P("data", "model"), "modle")(jnp.ones((8, 16)), jnp.zeros(()))


@pytest.mark.parametrize("case", ["divided", "the same on all"])
def test_each_device_may_have_a_counter_of_its_own(case):
    spec_of_x, sharded_over = CASES[case]

    def count(cotangent, zero):
        out = lambda x, zero: clip_cotangent(x, 1.0, counter=zero[0], sharded_over=sharded_over)  # noqa: E731
        return jax.vjp(out, jnp.zeros_like(cotangent), zero)[1](cotangent)[1]

    each = P(("data", "model"))
    mapped = jax.shard_map(count, mesh=mesh_of(data=2, model=4), in_specs=(spec_of_x, each), out_specs=each)
    found = quick_jit(mapped)(np.diag(np.arange(8, dtype=np.float32)), np.zeros(8, np.float32))
    np.testing.assert_array_equal(found, [6] * 8)  # 2 to 7 are clipped


@pytest.mark.parametrize("case", ["divided", "the same on all", "the same along one"])
def test_a_limit_that_differs_between_devices_of_one_slice_is_an_error(case):
    spec_of_x, sharded_over = CASES[case]

    def part(x):
        limit = jax.lax.axis_index("model").astype(jnp.float32)
        return clip_cotangent(x, limit, sharded_over=sharded_over)

    mapped = jax.shard_map(part, mesh=mesh_of(data=2, model=4), in_specs=spec_of_x, out_specs=spec_of_x)
    with pytest.raises(ValueError, match=r"max_norm may differ over 'model'.*leaf .*Reduce it by jax"):
        jax.eval_shape(mapped, np.ones((8, 16), "f4"))


def test_sharded_slices_under_jit_need_nothing():
    mesh = mesh_of(data=2, model=4)
    cotangent = normal(0, 8, 16).astype(np.float32) * 0.3
    with jax.set_mesh(mesh):
        placed = jax.device_put(cotangent, jax.sharding.NamedSharding(mesh, P("data", "model")))
        found = jax.jit(functools.partial(clipped, max_norm=1.0))(placed)
    np.testing.assert_allclose(found, by_hand(cotangent.astype(np.float64), 1.0), rtol=1e-6)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_norm": -1.0}, "max_norm must be >= 0 and not NaN"),
        ({"max_norm": jnp.ones(2)}, "max_norm must be a real scalar, got an array"),
        ({"axis": 2}, r"axis \(2,\) is out of range .*\['h'\] of shape \(2, 3\)"),
        ({"axis": 0.5}, "axis must be ints"),
        ({"ord": 0.5}, "ord must be >= 1"),
        ({"counter": 0}, "counter must be a float32 zero"),
        ({"counter": jnp.zeros((), jnp.bfloat16)}, "counter must be a float32 zero.*got bfloat16"),
        ({"counter": jnp.zeros(3)}, r"counter of shape \(3,\) must broadcast to \(2,\), the slices of leaf \['h'\]"),
        ({"sharded_over": "data"}, "'data' is no mapped axis"),
    ],
)
def test_wrong_arguments_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        clip_cotangent({"h": jnp.ones((2, 3))}, **{"max_norm": 1.0} | options)


@pytest.mark.parametrize("spec_of_x", [P("data", "model"), *thorough(P("data"), P(None, "model"))], ids=str)
def test_on_an_explicit_mesh_a_counter_counts_what_one_device_counts(spec_of_x):
    cotangent = np.linspace(0.1, 3, 16 * 8, dtype=np.float32).reshape(16, 8)
    is_clipped = np.linalg.norm(cotangent.astype(np.float64), axis=1) > 4
    mesh = mesh_of("Explicit", data=2, model=4)

    def loss(x, counter, cotangent):
        return jnp.sum(clip_cotangent(x, 4.0, counter=counter) * cotangent)

    def of_both(x, scalar, each, cotangent):
        return loss(x, scalar, cotangent) + loss(x, each, cotangent)

    with jax.set_mesh(mesh):
        x, placed = (
            jax.device_put(a, jax.sharding.NamedSharding(mesh, spec_of_x)) for a in (jnp.zeros((16, 8)), cotangent)
        )
        of_x, scalar, each = quick_jit(jax.grad(of_both, argnums=(0, 1, 2)))(x, jnp.zeros(()), jnp.zeros(16), placed)
    assert of_x.sharding.is_equivalent_to(x.sharding, 2)
    assert int(scalar) == is_clipped.sum()
    np.testing.assert_array_equal(each, is_clipped)
    np.testing.assert_allclose(of_x, 2 * by_hand(cotangent.astype(np.float64), 4.0), rtol=1e-6)
