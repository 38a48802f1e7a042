"""Rules by unit against their papers' equations in float64, and measured thresholds at every edge."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import bits, lenient, quick_jit, tree_of, true_norm, users_jit
from steps import NORMS, agc, f32, run, vectors

import shrewjax

BAD = pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])


# --- the papers' equations, plainly -------------------------------------------------------------------------------


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


@pytest.mark.parametrize("rule", ["clip_by_leaf_norm", "adaptive_grad_clip", "clip_by_block_rms"])
def test_a_unit_of_zeros_is_not_clipped_even_at_a_limit_of_zero(rule):
    grads = {"zeros": jnp.zeros(3), "ones": jnp.ones(3)}
    tx = getattr(shrewjax, rule)(0.0)
    updates, state = quick_jit(lambda g: tx.update(g, tx.init(g), g))(grads)
    assert not any(np.any(x) for x in jax.tree.leaves(updates))
    assert float(shrewjax.metrics(state)[f"{rule}/clipped_fraction"]) == 0.5


def test_thresholds_by_default_are_those_of_the_papers():
    """AGC: 0.01, and 1e-3 for parameters of zero (Brock et al. 2021). Adafactor: 1 (Shazeer and Stern 2018)."""
    grads, params = f32([[30, 30], [40, 40]]), f32([[300, 0], [400, 0]])
    updates, _ = quick_jit(lambda g, w: shrewjax.adaptive_grad_clip().update(g, None, w))(grads, params)
    np.testing.assert_allclose(updates, [[3, 0.6e-5], [4, 0.8e-5]], rtol=1e-5)
    updates, _ = quick_jit(lambda g: shrewjax.clip_by_block_rms().update(g, None))(f32([2, -2, 2, 2]))
    np.testing.assert_allclose(updates, [1, -1, 1, 1], rtol=1e-6)


# --- AdaGC --------------------------------------------------------------------------------------------------------


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


# --- AGC and block RMS --------------------------------------------------------------------------------------------


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


# --- one bad gradient ---------------------------------------------------------------------------------------------

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


# --- beginnings and edges -----------------------------------------------------------------------------------------


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
        """The updates after one number of the second unit is set, the gradients before, and the state."""
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


def test_the_derivative_of_agc_without_a_limit_is_that_of_the_identity():
    tx = shrewjax.adaptive_grad_clip(jnp.inf)
    slopes = quick_jit(jax.grad(lambda u, w: jnp.sum(tx.update(u, None, w)[0]), argnums=(0, 1)))
    by_gradient, by_weight = slopes(jnp.float32([[3, 0], [0.5, -0.5]]), jnp.ones((2, 2)))
    assert by_gradient.tolist() == [[1, 1], [1, 1]]
    assert by_weight.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("devices", ["one", "many"])
def test_usual_units_clip_as_in_any_range(devices, monkeypatch):
    if devices == "one":  # as in a process with one device, where the numbers of all leaves are joined
        monkeypatch.setattr("shrewjax._clipping.units.may_be_partitioned", lambda: False)
    rng = np.random.default_rng(0)
    shapes = [(6, 4), (4,), (6, 4), (2, 3, 4), ()]
    grads, params = ([np.float32(rng.normal(size=shape)) for shape in shapes] for _ in range(2))
    grads[2] *= 1e-4  # not clipped
    step = users_jit(lambda grads, params: shrewjax.adaptive_grad_clip(0.5).update(grads, None, params))
    usual, state = step(grads, params)
    # Beside a leaf that is read again, units are measured and clipped as numbers of any range.
    beside, state_beside = step([*grads, np.full((6, 4), 1e-25, f32)], [*params, np.ones((6, 4), f32)])
    assert bits(usual) == bits(beside[:-1])
    assert bits(state.ratio_max) == bits(state_beside.ratio_max)
    assert 0 < state.clipped_fraction < 1
