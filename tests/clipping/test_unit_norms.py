"""Thresholds that are measured, against their papers' equations in float64 and at every edge."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, bits, lenient, quick_jit, tree_of, true_norm

import shrewjax

f32 = np.float32
P = jax.P
NORMS = np.exp(np.random.default_rng(0).normal(size=150))  # heavy enough a tail for spikes
BAD = pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])


@cache
def loop(tx):
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return state, (updates, state)

    return quick_jit(lambda params, s, g: jax.lax.scan(partial(step, params), s, g))


def run(tx, gradients, params=None):
    """The updates and the states of every step, in one compiled loop; another one for each object `tx`."""
    stacked = jax.tree.map(lambda *x: np.stack(x), *gradients)
    start = params if params is not None else gradients[0]
    _, (updates, states) = loop(tx)(params, tx.init(start), stacked)
    return updates, states


def vectors(norms, size=5):
    """A gradient of each norm, of two leaves, in a direction of its own."""
    rng = np.random.default_rng(1)
    for norm in norms:
        g = rng.normal(size=size)
        g = f32(g * (norm / np.linalg.norm(g)))
        yield {"a": g[:2], "b": g[2:]}


def norms_of(updates):
    """The norm of each step's updates."""
    on_host = jax.tree.map(np.asarray, updates)
    return [float(true_norm(jax.tree.map(lambda x, i=i: x[i], on_host))) for i in range(len(on_host["a"]))]


# --- the papers' equations, plainly ------------------------------------------------------------------------------


def autoclip(norms, p, length):
    for t in range(len(norms)):
        yield np.percentile(norms[max(0, t + 1 - length) : t + 1], p)


def zclip(norms, max_zscore=2.5, decay=0.97, warmup=25, eps=1e-6):
    """The norm that the rule leaves, the mean and the deviation, step by step."""
    mean = var = 0.0
    for t, norm in enumerate(norms):
        left = norm
        if t < warmup:
            mean, var = np.mean(norms[: t + 1]), np.var(norms[: t + 1])
        else:
            z = (norm - mean) / (np.sqrt(var) + eps)
            left = mean + max_zscore**2 / z * np.sqrt(var) if z > max_zscore else norm
            mean = decay * mean + (1 - decay) * left
            var = decay * var + (1 - decay) * (left - mean) ** 2
        yield left, mean, np.sqrt(var)


def adagc(leaf_norms, ratio=1.04, decay=0.99, warmup=100, max_norm=1.0):
    """The leaves' norms afterwards and their averages, step by step."""
    gamma = np.full(leaf_norms.shape[1], np.inf)
    for t, norms in enumerate(leaf_norms):
        if t < warmup:
            left = norms * min(1, max_norm / np.linalg.norm(norms))
            gamma = np.minimum(gamma, left)
        else:
            left = norms * np.minimum(1, ratio * gamma / norms)
            gamma = decay * gamma + (1 - decay) * left
        yield left, gamma


# --- AutoClip ----------------------------------------------------------------------------------------------------


PERCENTILES = f32([0, 1, 10, 33.3, 50, 99.9, 100])


@pytest.mark.parametrize("traced", [False, True], ids=["static", "traced"])
@pytest.mark.parametrize("length", [1, 7, 1024])
def test_percentile_of_the_history_is_numpys_at_every_step(length, traced):
    gradients = list(vectors(NORMS))
    stacked = jax.tree.map(lambda *x: np.stack(x), *gradients)

    def steps(p):
        tx = shrewjax.clip_by_norm_percentile(p, history_length=length)

        def step(state, g):
            updates, state = tx.update(g, state)
            return state, (updates, state.threshold)

        return jax.lax.scan(step, tx.init(None), stacked)[1]

    norms = [float(true_norm(g)) for g in gradients]
    if traced:
        of_all = quick_jit(jax.vmap(steps))(PERCENTILES)
    else:
        of_all = jax.tree.map(lambda *x: np.stack(x), *quick_jit(lambda: [steps(p) for p in PERCENTILES])())
    for i, p in enumerate(PERCENTILES):
        updates, thresholds = jax.tree.map(lambda x, i=i: x[i], of_all)
        expected = list(autoclip(norms, float(p), length))
        np.testing.assert_allclose(thresholds, expected, rtol=1e-5, err_msg=str(p))
        np.testing.assert_allclose(norms_of(updates), np.minimum(norms, expected), rtol=1e-5, err_msg=str(p))
        if p == 100:
            assert bits(updates) == bits(stacked)


def test_percentile_100_leaves_gradients_of_any_size_alone():
    with jax.enable_x64(True):
        gradients = [np.float64([1 + 1e-12 * i, 1e-40]) for i in range(4)]
        updates, _ = run(shrewjax.clip_by_norm_percentile(100.0), gradients)
        assert bits(updates) == bits(np.stack(gradients))


def test_percentile_survives_a_norm_beyond_float32():
    updates, states = run(shrewjax.clip_by_norm_percentile(100.0), [f32([3, 4]), f32([3e38, 3e38]), f32([3, 4])])
    np.testing.assert_array_equal(states.threshold, [5, 5, 5])
    np.testing.assert_allclose(updates[1], f32([1, 1]) * 5 / 2**0.5, rtol=1e-6)


# --- ZClip -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [np.inf, 2.0])
@pytest.mark.parametrize("arguments", [{}, {"max_zscore": 1.0, "decay": 0.9, "warmup_steps": 3, "eps": 0.1}], ids=str)
def test_zscore_follows_the_papers_equations_at_every_step(arguments, max_norm):
    gradients = list(vectors(NORMS))
    updates, states = run(shrewjax.clip_by_norm_zscore(**arguments, max_norm=max_norm), gradients)
    names = {"warmup_steps": "warmup"}
    oracle = zclip([float(true_norm(g)) for g in gradients], **{names.get(k, k): v for k, v in arguments.items()})
    left, mean, std = np.transpose(list(oracle))
    assert (left < [float(true_norm(g)) for g in gradients]).sum() > 3  # there were spikes
    np.testing.assert_allclose(states.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(states.std, std, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(norms_of(updates), np.minimum(left, max_norm), rtol=1e-5)


@pytest.mark.parametrize(("z", "expected"), [(2.5, 2.5), (3, 2.0833333), (5, 1.25), (10, 0.625), (100, 0.0625)])
def test_zscore_table(z, expected):
    # Warm-up norms 1 and 3: mean 2, deviation 1.
    norms = [1.0, 3.0, 2.0 + z]
    updates, _ = run(shrewjax.clip_by_norm_zscore(warmup_steps=2, eps=0), [f32([n]) for n in norms])
    assert float(updates[2][0]) - 2 == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("norm", [1.0, 0.1, 7e9, 3e-20])
def test_zscore_of_a_constant_norm_keeps_its_mean_to_the_last_bit(norm):
    updates, states = run(shrewjax.clip_by_norm_zscore(max_norm=np.inf), [f32([norm])] * 300)
    np.testing.assert_array_equal(states.mean, np.full(300, f32(norm)))
    np.testing.assert_array_equal(states.std, np.zeros(300))
    np.testing.assert_array_equal(updates, np.full((300, 1), f32(norm)))


def test_zscore_statistics_stay_in_range():
    norms = [1e30, 3e30, 1e30, 3e30, 1e38]
    _, states = run(shrewjax.clip_by_norm_zscore(warmup_steps=4), [f32([n]) for n in norms])
    np.testing.assert_allclose(states.std[3], 1e30, rtol=1e-5)
    assert np.isfinite(states.std[4])
    beyond = [*norms[:4], 3e38 * np.ones(2)]
    updates, states = run(shrewjax.clip_by_norm_zscore(warmup_steps=4), [f32(n) * np.ones(2, f32) for n in beyond])
    assert np.isfinite(states.mean).all()
    np.testing.assert_allclose(true_norm(updates[4]), states.mean[3], rtol=1e-5)


# --- AdaGC -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [{}, {"max_ratio": 1.5, "decay": 0.7, "warmup_steps": 5, "warmup_max_norm": 3.0}], ids=str
)
def test_leaf_ema_follows_the_papers_equations_at_every_step(arguments):
    gradients = list(vectors(NORMS))
    leaf_norms = np.float64([[true_norm(g["a"]), true_norm(g["b"])] for g in gradients])
    updates, states = run(shrewjax.clip_by_leaf_norm_ema(**arguments), gradients)
    names = {"max_ratio": "ratio", "warmup_steps": "warmup", "warmup_max_norm": "max_norm"}
    oracle = list(adagc(leaf_norms, **{names.get(k, k): v for k, v in arguments.items()}))
    for i, leaf in enumerate("ab"):
        np.testing.assert_allclose(states.norm_ema[leaf], [gamma[i] for _, gamma in oracle], rtol=1e-5)
        left = np.linalg.norm(np.float64(updates[leaf]), axis=1)
        np.testing.assert_allclose(left, [left[i] for left, _ in oracle], rtol=1e-5)


def test_leaf_ema_a_zero_gradient_in_the_warmup_does_not_kill_a_leaf():
    gradients = [{"a": f32([0, 0]), "b": f32([0.3, 0.4])}] + [{"a": f32([0.3, 0.4]), "b": f32([0.3, 0.4])}] * 5
    updates, states = run(shrewjax.clip_by_leaf_norm_ema(warmup_steps=3), gradients)
    np.testing.assert_allclose(updates["a"][1:], [[0.3, 0.4]] * 5, rtol=1e-6)
    np.testing.assert_allclose(states.norm_ema["a"], [0] + [0.5] * 5, rtol=1e-6)


def test_leaf_ema_a_leaf_that_wakes_up_after_the_warmup_starts_then():
    asleep, awake = {"a": f32([0]), "b": f32([0.5])}, {"a": f32([3]), "b": f32([0.5])}
    updates, states = run(shrewjax.clip_by_leaf_norm_ema(warmup_steps=2), [asleep] * 5 + [awake] * 3)
    np.testing.assert_array_equal(states.norm_ema["a"][:5], np.zeros(5))
    together = 3 / np.hypot(3, 0.5)  # as in the warm-up: all gradients to norm 1
    assert float(updates["a"][5][0]) == pytest.approx(together, rel=1e-6)
    assert float(updates["a"][6][0]) == pytest.approx(1.04 * together, rel=1e-6)


def test_leaf_ema_grows_by_no_more_than_it_says():
    gradients = [f32([1e-3])] * 3 + [f32([1e3])] * 200
    _, states = run(shrewjax.clip_by_leaf_norm_ema(warmup_steps=3), gradients)
    growth = np.float64(states.norm_ema[3:]) / np.float64(states.norm_ema[2:-1])
    np.testing.assert_allclose(growth, 1 + (1 - 0.99) * (1.04 - 1), rtol=1e-6)


def test_leaf_ema_floor_shortens_the_way_up():
    gradients = [f32([1e-12])] + [f32([1.0])] * 3
    _, states = run(shrewjax.clip_by_leaf_norm_ema(warmup_steps=1, min_norm=0.1), gradients)
    np.testing.assert_allclose(states.norm_ema[:2], [0.1, 0.1 * 1.0004], rtol=1e-6)


def test_leaf_ema_of_stacked_layers_is_that_of_each_layer():
    norms = np.exp(np.random.default_rng(2).normal(size=(40, 3)))
    direction = np.random.default_rng(3).normal(size=(3, 4))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    stacked = [{"layers": f32(n[:, None] * direction)} for n in norms]
    apart = [{str(i): g["layers"][i] for i in range(3)} for g in stacked]
    updates, states = run(shrewjax.clip_by_leaf_norm_ema(warmup_steps=5, batch_axes=0), stacked)
    expected, expected_states = run(shrewjax.clip_by_leaf_norm_ema(warmup_steps=5), apart)
    assert states.norm_ema["layers"].shape == (40, 3)
    for i in range(3):
        np.testing.assert_allclose(updates["layers"][:, i], expected[str(i)], rtol=1e-6)
        np.testing.assert_allclose(states.norm_ema["layers"][:, i], expected_states.norm_ema[str(i)], rtol=1e-6)
    np.testing.assert_allclose(states.clipped_fraction, expected_states.clipped_fraction, rtol=1e-6)


# --- AGC and block RMS ---------------------------------------------------------------------------------------------


def agc(g, w, axis, clipping=0.1, eps=1e-3):
    """Equation 3 in float64; `axis` are those that share a norm."""
    g, w = np.float64(g), np.float64(w)
    norm = lambda x: np.sqrt(np.sum(x**2, axis=axis, keepdims=True))  # noqa: E731
    bound = clipping * np.maximum(norm(w), eps)
    return np.where(norm(g) > bound, g * bound / norm(g), g)


def kernels_by_their_middle(name, leaf):
    return (0, 2) if "kernel" in name and leaf.ndim == 3 else None


@pytest.mark.parametrize(
    ("shape", "arguments", "axis"),
    [
        ((), {}, ()),
        ((4,), {}, 0),
        ((4, 3), {}, 0),
        ((4, 3, 2), {}, 0),
        ((3, 3, 4, 2), {}, (0, 1, 2)),
        ((2, 3, 3, 4, 2), {}, (0, 1, 2, 3)),
        ((5, 4, 3), {"batch_axes": 0}, 1),
        ((5, 4), {"batch_axes": 0}, 1),
        ((4, 5, 3), {"batch_axes": -2}, 0),
        ((5, 3, 3, 4, 2), {"batch_axes": (0,)}, (1, 2, 3)),
        ((4, 3), {"unit": "tensor"}, (0, 1)),
        ((5, 4, 3), {"unit": "tensor", "batch_axes": 0}, (1, 2)),
        ((4, 3), {"axis": 1}, 1),
        ((4, 3), {"axis": (-1, 0)}, (0, 1)),
        ((4, 3, 2), {"axis": kernels_by_their_middle}, (0, 2)),
    ],
    ids=lambda value: str(
        {k: getattr(v, "__name__", v) for k, v in value.items()} if isinstance(value, dict) else value
    ),
)
def test_agc_is_equation_3_for_every_rank_and_choice_of_axes(shape, arguments, axis):
    rng = np.random.default_rng(0)
    scale = np.exp(rng.normal(size=shape))
    g, w = f32(rng.normal(size=shape) * scale * 0.1), f32(rng.normal(size=shape))
    updates, _ = run(shrewjax.adaptive_grad_clip(0.1, **arguments), [{"kernel": g}], {"kernel": w})
    expected = agc(g, w, axis)
    assert not np.array_equal(expected, np.float64(g)) or shape == ()
    np.testing.assert_allclose(updates["kernel"][0], expected, rtol=1e-5)


def test_agc_where_parameters_are_zero_still_learns_and_says_what_it_saw():
    tx = shrewjax.adaptive_grad_clip(0.5, eps=1e-3)
    params = {"w": jnp.array([[1.0, 0.0], [0.0, 0.0]])}
    updates, state = quick_jit(tx.update)({"w": jnp.array([[0.3, 3.0], [0.4, 4.0]])}, tx.init(params), params)
    np.testing.assert_allclose(updates["w"], [[0.3, 3e-4], [0.4, 4e-4]], rtol=1e-6)
    assert float(state.ratio_max) == pytest.approx(5000, rel=1e-6)
    assert float(state.clipped_fraction) == 0.5


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_unit_norms_neither_overflow_nor_underflow(scale):
    g, w = f32([[3, 1], [4, 1]]) * f32(scale), f32([[1, 1], [1, 1]]) * f32(scale)
    updates, _ = run(shrewjax.adaptive_grad_clip(0.1, eps=0), [g], w)
    np.testing.assert_allclose(
        np.float64(updates[0]) / scale, agc(g / f32(scale), np.ones((2, 2)), 0, eps=0), rtol=1e-5
    )
    updates, states = run(shrewjax.clip_by_block_rms(scale * 0.1, batch_axes=1), [g])
    np.testing.assert_allclose(np.sqrt(np.mean((np.float64(updates[0]) / scale) ** 2, axis=0)), [0.1, 0.1], rtol=1e-5)
    assert float(states.rms_max[0]) == pytest.approx(12.5**0.5 * scale, rel=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64])
def test_unit_rules_keep_dtypes_and_leave_small_units_bit_for_bit(dtype):
    g, w = np.asarray([[300.0, 1e-3], [400.0, 6e-8]], dtype), np.ones((2, 2), f32)
    for tx, share in ((shrewjax.adaptive_grad_clip(0.1), 0.5), (shrewjax.clip_by_block_rms(1.0, batch_axes=1), 0.5)):
        updates, state = jax.tree.map(np.asarray, quick_jit(tx.update)(g, tx.init(w), w))
        assert updates.dtype == g.dtype
        assert bits(updates[:, 1]) == bits(g[:, 1])
        assert float(state.clipped_fraction) == share
        np.testing.assert_allclose(
            np.complex128(updates[1, 0]) / np.complex128(updates[0, 0]), 4 / 3, rtol=4 * float(jnp.finfo(dtype).eps)
        )


def test_agc_infinite_threshold_is_the_identity_and_a_bad_unit_spoils_no_other():
    g, w = f32([[np.nan, 1], [1, 1]]), np.zeros((2, 2), f32)
    updates, _ = run(shrewjax.adaptive_grad_clip(np.inf, eps=0), [g], w)
    assert bits(updates[0]) == bits(g)
    updates, states = run(shrewjax.adaptive_grad_clip(0.1, eps=1.0), [g], w)
    assert np.isnan(updates[0][:, 0]).all()
    np.testing.assert_allclose(updates[0][:, 1], [0.1 / 2**0.5] * 2, rtol=1e-6)
    assert np.isnan(states.ratio_max[0])


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_block_rms_is_adafactors_on_random_updates(size):
    gradients = [f32(np.random.default_rng(i).normal(size=size) * 2) for i in range(5)]
    updates, _ = run(shrewjax.clip_by_block_rms(0.7), gradients)
    for update, g in zip(updates, gradients, strict=True):
        rms = np.sqrt(np.mean(np.float64(g) ** 2))
        np.testing.assert_allclose(update, np.float64(g) / max(1, rms / 0.7), rtol=1e-5)


# --- one bad gradient -----------------------------------------------------------------------------------------------

RULES = {
    "percentile": shrewjax.clip_by_norm_percentile(50.0, history_length=5),
    "zscore": shrewjax.clip_by_norm_zscore(1.0, warmup_steps=3, max_norm=1.0),
    "leaf_ema": shrewjax.clip_by_leaf_norm_ema(warmup_steps=3),
}
REMEMBERED = {
    "percentile": lambda s: s.history,
    "zscore": lambda s: (s.recorded, s.mean, s.std),
    "leaf_ema": lambda s: (s.recorded, s.norm_ema),
}


@BAD
@pytest.mark.parametrize("when", [1, 6], ids=["in the warm-up", "later"])
@pytest.mark.parametrize("rule", RULES)
def test_a_bad_gradient_is_as_if_it_had_not_been(rule, when, bad):
    gradients = list(vectors(NORMS[:10]))
    spoilt = {"a": jnp.asarray([1.0, bad], jnp.float32), "b": gradients[0]["b"]}
    _, clean = run(RULES[rule], gradients)
    updates, states = run(RULES[rule], [*gradients[:when], spoilt, *gradients[when:]])
    for seen, expected in zip(
        jax.tree.leaves(REMEMBERED[rule](states)), jax.tree.leaves(REMEMBERED[rule](clean)), strict=True
    ):
        np.testing.assert_array_equal(np.delete(seen, when, axis=0), expected)
        np.testing.assert_array_equal(seen[when], seen[when - 1])
    assert np.isnan(updates["a"][when]).all()  # seen, not hidden


# --- bias ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [0.5, 1, 2, 4])
def test_clipping_bias_has_its_fixed_point_where_theory_says(c):
    """f = x**2 / 2, noise +9 with probability 0.1, -1 with 0.9: the clipped field vanishes at 1 - c / 9."""
    tx = optax.chain(shrewjax.clip_by_global_norm(c), optax.sgd(0.05))

    @quick_jit
    def mean_step(x):
        def step(noise):
            return tx.update(x + noise, tx.init(x))[0]

        return x + 0.1 * step(9.0) + 0.9 * step(-1.0)

    x = jnp.asarray(0.3)
    for _ in range(3000):
        x = mean_step(x)
    assert float(x) == pytest.approx(1 - c / 9, rel=0.02)


# --- on many devices ----------------------------------------------------------------------------------------------

SHAPES = {"rows": (16, 4), "columns": (3, 8), "replicated": (5, 2)}
SPECS = {"rows": P("data"), "columns": P(None, "model"), "replicated": P()}
MAPPED = {
    "agc": lambda **k: shrewjax.adaptive_grad_clip(0.05, unit="tensor", **k),
    "block_rms": lambda **k: shrewjax.clip_by_block_rms(0.5, **k),
    "percentile": lambda **k: shrewjax.clip_by_norm_percentile(30.0, **k),
    "zscore": lambda **k: shrewjax.clip_by_norm_zscore(0.1, warmup_steps=1, **k),
    "leaf_ema": lambda **k: shrewjax.clip_by_leaf_norm_ema(warmup_steps=1, **k),
}


def trees(scale=1.0):
    for seed in range(3):
        rng = np.random.default_rng(seed)
        yield {k: f32(scale * np.exp(rng.normal()) * rng.normal(size=s)) for k, s in SHAPES.items()}


def mapped_mesh():
    return jax.make_mesh((4, 2), ("data", "model"))


def on_mesh(tree, specs):
    return jax.tree.map(lambda x, s: jax.device_put(x, jax.sharding.NamedSharding(mapped_mesh(), s)), tree, specs)


@cache
def on_one_device_and_mapped(rule):
    tx = MAPPED[rule]()
    mapped = jax.shard_map(tx.update, mesh=mapped_mesh(), in_specs=(SPECS, P(), SPECS), out_specs=(SPECS, P()))
    return tx, quick_jit(tx.update), quick_jit(mapped)


@pytest.mark.parametrize("scale", [1.0, 1e25])
@pytest.mark.parametrize("rule", MAPPED)
def test_shard_map_gives_the_unsharded_answer(rule, scale):
    tx, update, mapped = on_one_device_and_mapped(rule)
    params, *gradients = trees(scale)
    state = tx.init(params)
    mapped_state = on_mesh(state, jax.tree.map(lambda _: P(), state))  # as updates leave it: one program
    for g in gradients:
        expected, state = update(g, state, params)
        updates, mapped_state = mapped(on_mesh(g, SPECS), mapped_state, on_mesh(params, SPECS))
        assert_close(updates, expected, rtol=1e-5)
        assert_close(mapped_state, state, rtol=1e-5)


# Units are columns: divided on devices, whole on one of them, or all of them on each.
UNIT_SHAPES = {"divided": (16, 4), "whole": (3, 8), "both": (8, 2), "everywhere": (5, 2)}
UNIT_SPECS = {"divided": P("x"), "whole": P(None, "y"), "both": P("x", "y"), "everywhere": P()}


def spec_of(name, leaf):
    return UNIT_SPECS[name[2:-2]]


def unit_rules(**sharded_over):
    return {
        "agc": shrewjax.adaptive_grad_clip(1.0, **sharded_over),
        "block_rms": shrewjax.clip_by_block_rms(1.0, batch_axes=1, **sharded_over),
        "leaf_ema": shrewjax.clip_by_leaf_norm_ema(batch_axes=1, warmup_max_norm=2.0, **sharded_over),
    }


def all_updates(rules):
    return lambda g, states, w: {name: tx.update(g, states[name], w) for name, tx in rules.items()}


@cache
def units_on_one_device():
    rng = np.random.default_rng(0)
    g, w = ({k: f32(np.exp(rng.normal(size=s)) * rng.normal(size=s)) for k, s in UNIT_SHAPES.items()} for _ in range(2))
    g["whole"][:, 0] *= f32(1e25)  # so that one device alone has to measure again
    arguments = g, {name: tx.init(w) for name, tx in unit_rules().items()}, w
    return arguments, quick_jit(all_updates(unit_rules()))(*arguments)


def unit_mesh():
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_units_spread_over_devices_each_leaf_in_its_own_way_are_those_of_one_device(check_vma):
    (g, start, w), expected = units_on_one_device()
    rules = unit_rules(sharded_over=spec_of)
    state_specs = {k: jax.tree.map(lambda _: P(), start[k]) for k in start}
    of_units = {k: P(*spec[1:]) for k, spec in UNIT_SPECS.items()}
    state_specs["leaf_ema"] = state_specs["leaf_ema"]._replace(norm_ema=of_units)
    mapped = jax.shard_map(
        all_updates(rules),
        mesh=unit_mesh(),
        in_specs=(UNIT_SPECS, state_specs, UNIT_SPECS),
        out_specs={k: (UNIT_SPECS, state_specs[k]) for k in rules},
        check_vma=check_vma,
    )
    assert_close(quick_jit(mapped)(g, start, w), expected, rtol=1e-5)
    assert 0 < float(expected["agc"][1].clipped_fraction) < 1
    assert 0 < float(expected["block_rms"][1].clipped_fraction) < 1


@pytest.mark.parametrize(
    ("spec", "names", "check_vma"),
    [(P(None, "x"), (), True), (P("x"), "x", True), (P("x"), ("x", "y"), False), (P(), P(), False)],
    ids=["whole, tracked", "divided, tracked", "divided, untracked", "everywhere, untracked"],
)
def test_names_of_mapped_axes_do_for_units_that_are_alike(spec, names, check_vma):
    g, w = (f32(np.exp(np.random.default_rng(i).normal(size=(16, 8)))) for i in range(2))
    tx = shrewjax.adaptive_grad_clip(1.0, sharded_over=names)
    mapped = jax.shard_map(
        lambda g, w: tx.update(g, tx.init(w), w),
        mesh=jax.make_mesh((8, 1), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2),
        in_specs=(spec, spec),
        out_specs=(spec, P()),
        check_vma=check_vma,
    )
    updates, state = quick_jit(mapped)(g, w)
    np.testing.assert_allclose(updates, agc(g, w, 0, clipping=1.0), rtol=1e-5)
    ratios = np.linalg.norm(np.float64(g), axis=0) / np.linalg.norm(np.float64(w), axis=0)
    assert float(state.ratio_max) == pytest.approx(ratios.max(), rel=1e-5)
    assert float(state.clipped_fraction) == np.mean(ratios > 1)
    assert 0 < np.mean(ratios > 1) < 1


@pytest.mark.parametrize("rule", unit_rules())
@pytest.mark.parametrize(
    ("sharded_over", "check_vma", "message"),
    [
        (None, True, r"leaf \['whole'\].*several units.* sharded over 'y': devices may hold.*Pass sharded_over="),
        (None, False, r"leaf \['whole'\].*several units.*over 'x', 'y' inside shard_map.check_vma=False"),
        ((), False, r"over 'x', 'y' inside.*sharded_over=jax\.P\(\)"),
        (("y",), False, r"sharded over 'x' inside"),
        (lambda name, leaf: P(None, "x"), True, r"P\(None, 'x'\) is not how leaf \['whole'\] is sharded.*\('y',\)"),
        (P(), True, r"P\(\) is not how leaf \['whole'\] is sharded"),
        (P(None, None, "y"), True, r"more entries than leaf \['whole'\] of shape \(3, 4\) has dimensions"),
        (lambda name, leaf: spec_of, True, r"sharded_over must return .*got the function"),
    ],
    ids=["tracked", "untracked", "no names", "too few names", "wrong", "everywhere", "too long", "function"],
)
def test_units_on_devices_that_nothing_tells_of_are_an_error(rule, sharded_over, check_vma, message):
    tx = unit_rules(sharded_over=sharded_over)[rule]
    mapped = jax.shard_map(
        lambda g: tx.update(g, tx.init(g), g)[0],
        mesh=unit_mesh(),
        in_specs=({"whole": P(None, "y")},),
        out_specs={"whole": P(None, "y")},
        check_vma=check_vma,
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mapped, {"whole": jnp.ones((3, 8))})


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_stacked_layers_sharded_along_the_stack(axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType[axis_type],))
    place = lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, P("data")))  # noqa: E731
    tx = shrewjax.clip_by_leaf_norm_ema(warmup_steps=1, batch_axes=0)
    gradients = [f32(np.exp(np.random.default_rng(i).normal(size=(8, 1))) * np.ones((8, 3))) for i in range(3)]
    state, sharded_state = tx.init(gradients[0]), tx.init(place(gradients[0]))
    update = quick_jit(tx.update)
    for g in gradients:
        expected, state = update(g, state)
        updates, sharded_state = update(place(g), sharded_state)
        assert_close(updates, expected, rtol=1e-6)
        assert_close(sharded_state, state, rtol=1e-6)


# --- arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: shrewjax.clip_by_norm_percentile(101), r"percentile must be between 0 and 100 and not NaN, got 101"),
        (lambda: shrewjax.clip_by_norm_percentile(10.0, history_length=0), r"history_length must be an int >= 1"),
        (lambda: shrewjax.clip_by_norm_percentile(10.0, history_length=jnp.int32(9)), r"history_length.*static_args"),
        (lambda: shrewjax.clip_by_norm_zscore(decay=1.5), r"decay must be between 0 and 1"),
        (lambda: shrewjax.clip_by_leaf_norm_ema(0.9), r"max_ratio must be >= 1"),
        (lambda: shrewjax.adaptive_grad_clip(unit="row"), r"unit must be one of 'auto', 'tensor', got 'row'"),
        (lambda: shrewjax.adaptive_grad_clip(axis=1.5), r"axis must be an int, a tuple of ints, None or a function"),
        (lambda: shrewjax.adaptive_grad_clip(axis=jnp.int32(1)), r"axis must be static.*static_args"),
        (lambda: shrewjax.clip_by_block_rms(-1), r"threshold must be >= 0"),
        (
            lambda: shrewjax.clip_by_block_rms(batch_axes=1).init({"b": jnp.ones(3)}),
            r"batch_axes \(1,\) is out of range for gradient leaf \['b'\] of shape \(3,\)",
        ),
        (lambda: shrewjax.adaptive_grad_clip().update(jnp.ones(3), None), r"Pass params to update"),
        (
            lambda: shrewjax.adaptive_grad_clip(axis=lambda name, leaf: len).init(jnp.ones(3)),
            r"axis must return dimensions or None, got <built-in function len> for leaf \(the tree itself\)",
        ),
        (
            lambda: shrewjax.adaptive_grad_clip().update({"a": jnp.ones(3)}, None, {"a": jnp.ones(4)}),
            r"\['a'\] must have the shape of its .*parameter, got float32 of shape \(3,\) for float32 of shape \(4,\)",
        ),
        (
            lambda: shrewjax.adaptive_grad_clip().update({"a": jnp.ones(3)}, None, {"c": jnp.ones(3)}),
            r"gradient leaves \['a'\] need parameters at the same places.*params like the gradients",
        ),
    ],
)
def test_what_is_wrong_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_place_without_a_gradient_keeps_its_average():
    tx = shrewjax.clip_by_leaf_norm_ema(warmup_steps=1)
    params = tree_of()
    update = quick_jit(tx.update)
    _, state = update(tree_of(1), tx.init(params))
    updates, after = update(tree_of(2) | {"b": None}, state)
    assert updates["b"] is None
    assert after.norm_ema["b"] == state.norm_ema["b"]
    assert after.norm_ema["w"] != state.norm_ema["w"]


def test_each_measured_threshold_is_in_the_metrics():
    params = tree_of()
    tx = optax.chain(*(lenient(rule) for rule in RULES.values()))
    _, state = quick_jit(tx.update)(tree_of(1), tx.init(params), params)
    assert {name for name in shrewjax.metrics(state) if "threshold" in name} == {
        "clip_by_norm_percentile/threshold",
        "clip_by_norm_zscore/threshold",
        "clip_by_leaf_norm_ema/threshold_max",
    }


# --- beginnings and edges ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("warmup", [0, 3])
def test_zscore_without_a_mean_to_compare_with_lets_norms_pass(warmup):
    tx = shrewjax.clip_by_norm_zscore(warmup_steps=warmup)
    state, update = tx.init(jnp.zeros(1)), quick_jit(tx.update)
    for _ in range(warmup):
        _, state = update(jnp.zeros(1), state)
    for norm in (1.0, 1.0, 1.0):
        updates, state = update(jnp.full(1, norm), state)
        assert updates[0] == norm
    assert float(state.mean) > 0


@pytest.mark.parametrize("argument", ["max_zscore", "eps", "decay"])
def test_zscore_with_a_nan_argument_records_nothing_that_is_not_finite(argument):
    @quick_jit
    def step(state, norm, value):
        tx = shrewjax.clip_by_norm_zscore(warmup_steps=1, **{argument: value})
        return tx.update(jnp.full(1, norm), state)

    state = shrewjax.clip_by_norm_zscore().init(jnp.zeros(1))
    for norm in (1.0, 1.2, 0.9):
        _, state = step(state, norm, jnp.float32(0.9))
    updates, spoiled = step(state, 1.0, jnp.float32(np.nan))
    assert np.isfinite(spoiled.mean)
    assert np.isfinite(spoiled.std)
    assert argument == "decay" or np.isnan(updates[0])
    assert np.isfinite(step(spoiled, 1.0, jnp.float32(0.9))[0][0])


def test_ema_with_a_nan_argument_records_nothing_that_is_not_finite():
    @quick_jit
    def step(state, decay):
        return shrewjax.clip_by_leaf_norm_ema(decay=decay, warmup_steps=1).update(jnp.full(2, 0.1), state)

    state = shrewjax.clip_by_leaf_norm_ema().init(jnp.zeros(2))
    for decay in (0.9, 0.9, np.nan, 0.9):
        updates, state = step(state, jnp.float32(decay))
    assert np.isfinite(state.norm_ema)
    assert np.isfinite(updates).all()


def test_a_block_of_ones_has_a_root_mean_square_of_one():
    blocks = [np.ones(size, np.float32) for size in range(1, 200, 5)]
    tx = shrewjax.clip_by_block_rms(1.0)
    assert bits(quick_jit(lambda blocks: tx.update(blocks, tx.init(blocks))[0])(blocks)) == bits(blocks)


def test_agc_with_an_eps_or_parameters_that_are_not_finite_is_as_its_table_says():
    update = quick_jit(lambda clipping, eps, g, w: shrewjax.adaptive_grad_clip(clipping, eps=eps).update(g, None, w))
    g, w = f32([[3, 3], [4, 4]]), f32([[300, 1], [400, 1]])  # one unit is within a tenth of its parameters
    inf, nan = np.inf, np.nan

    def column(clipping, eps, parameter=1.0, gradient=3.0):
        """What is made of the second unit, when one of its numbers is set; the first stays as it is."""
        of_g, of_w = g.copy(), w.copy()
        of_g[0, 1], of_w[0, 1] = gradient, parameter
        updates, state = update(f32(clipping), f32(eps), of_g, of_w)
        return np.asarray(updates), of_g, state

    for clipping, eps, parameter, gradient in [
        (inf, nan, nan, nan),
        (inf, 1e-3, 1.0, inf),
        (0.1, inf, 1.0, nan),
        (nan, inf, 1.0, 3.0),
        (0.1, 1e-3, inf, 3.0),
        (0.1, inf, inf, inf),
    ]:
        updates, given, state = column(clipping, eps, parameter, gradient)
        assert bits(updates[:, 1]) == bits(given[:, 1]), (clipping, eps, parameter, gradient)
    for clipping, eps, parameter, gradient in [
        (0.1, nan, 1.0, 3.0),
        (0.1, inf, nan, 3.0),
        (0.1, nan, inf, 3.0),
        (0.1, 1e-3, 1.0, inf),
        (nan, 1e-3, 1.0, 3.0),
    ]:
        updates, _, state = column(clipping, eps, parameter, gradient)
        assert np.isnan(updates[:, 1]).all(), (clipping, eps, parameter, gradient)
        assert np.isnan(updates[:, 0]).all() == bool(np.isnan([clipping, eps]).any())
    updates, given, state = column(0.1, inf)
    assert bits(updates) == bits(given)
    assert (float(state.ratio_max), float(state.clipped_fraction)) == (0, 0)
    updates, _, _ = column(0.1, 1e-3)
    np.testing.assert_allclose(updates, agc(g, w, 0), rtol=1e-6)


def test_percentile_before_there_is_a_history_lets_pass_what_is_not_recorded():
    beyond, bad = f32([3e38, 3e38]), f32([np.nan, 1])
    updates, states = run(shrewjax.clip_by_norm_percentile(50.0), [beyond, bad, f32([3, 4]), beyond, bad])
    assert bits(updates[:3]) == bits(np.stack([beyond, bad, f32([3, 4])]))
    np.testing.assert_allclose(true_norm(updates[3]), 5, rtol=1e-6)
    assert np.isnan(updates[4]).all()
    np.testing.assert_array_equal(states.history.filled, [0, 0, 1, 1, 1])
    np.testing.assert_array_equal(states.threshold, [np.inf, np.inf, 5, 5, 5])


def test_percentile_that_is_nan_shows_and_the_norm_is_recorded():
    tx = lambda p: shrewjax.clip_by_norm_percentile(p, history_length=2)  # noqa: E731
    updates, state = quick_jit(lambda p, g, s: tx(p).update(g, s))(jnp.float32(np.nan), f32([3, 4]), tx(1.0).init(None))
    assert np.isnan(updates).all()
    np.testing.assert_array_equal(state.history.values, [0, 5])


def test_leaf_ema_shows_no_threshold_and_no_clip_of_a_leaf_that_never_had_a_gradient():
    idle = {"idle": f32([0, 0]), "empty": np.zeros((0,), f32)}
    gradients = [idle | {"a": f32([norm])} for norm in (5, 0.25, 0.25, 4)]
    _, states = run(shrewjax.clip_by_leaf_norm_ema(2.0, decay=0.5, warmup_steps=2), gradients)
    np.testing.assert_allclose(states.threshold_max, [1, 1, 0.5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(states.clipped_fraction, [1 / 3, 0, 0, 1 / 3], rtol=1e-6)
    np.testing.assert_array_equal(states.norm_ema["idle"], np.zeros(4))


def test_leaf_ema_names_a_leaf_that_changed_its_shape():
    tx = shrewjax.clip_by_leaf_norm_ema(batch_axes=0)
    state = tx.init({"layers": jnp.zeros((1, 2))})
    with pytest.raises(ValueError, match=r"\['layers'\] of shape \(3, 2\) has units of shape \(3,\).*shape \(1,\)"):
        tx.update({"layers": jnp.ones((3, 2))}, state)


def test_leaf_ema_without_a_finite_threshold_lets_a_bad_gradient_pass_as_it_is():
    bad = {"a": f32([np.nan, 1]), "b": f32([0.3])}
    good = {"a": f32([3, 4]), "b": f32([0.3])}
    updates, states = run(shrewjax.clip_by_leaf_norm_ema(warmup_steps=1, warmup_max_norm=np.inf), [bad, good, bad])
    assert bits(jax.tree.map(lambda x: x[0], updates)) == bits(bad)
    assert np.isnan(updates["a"][2]).all()
    np.testing.assert_array_equal(updates["b"][2], bad["b"])
    np.testing.assert_array_equal(states.recorded, [0, 1, 1])
    updates, _ = run(shrewjax.clip_by_leaf_norm_ema(np.inf, warmup_steps=0), [good, bad])
    assert bits(jax.tree.map(lambda x: x[1], updates)) == bits(bad)


def test_the_derivative_where_a_unit_is_zero_is_that_of_the_identity():
    tx = shrewjax.clip_by_block_rms(1.0, batch_axes=0)
    slope = quick_jit(jax.grad(lambda u: jnp.sum(tx.update(u, tx.init(u))[0])))
    gradient = slope(jnp.float32([[0, 0], [0.5, -0.5]]))
    assert gradient.tolist() == [[1, 1], [1, 1]]
