"""Rules by unit against their papers' equations in float64, and measured thresholds at every edge."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import bits, each_world, lenient, thorough, tree_of, true_norm
from speed import quick_jit, users_jit
from steps import NORMS, adagc, agc, f32, run, step_of, vectors

import shrewjax

pytestmark = [each_world, pytest.mark.usefixtures("either_world")]


def test_a_unit_of_zeros_is_not_clipped_even_at_a_limit_of_zero():
    rules = [shrewjax.clip_by_leaf_norm(0.0), shrewjax.adaptive_grad_clip(0.0), shrewjax.clip_by_block_rms(0.0)]
    grads = {"zeros": f32([0, 0, 0]), "ones": f32([1, 1, 1])}

    @quick_jit
    def run_all(g):
        steps = [tx.update(g, tx.init(g), g) for tx in rules]
        return [updates for updates, _ in steps], [shrewjax.metrics(state) for _, state in steps]

    updates, metrics = run_all(grads)
    assert not any(np.any(x) for x in jax.tree.leaves(updates))
    fractions = [float(x) for found in metrics for name, x in found.items() if name.endswith("/clipped_fraction")]
    assert fractions == [0.5, 0.5, 0.5]


def test_thresholds_by_default_are_those_of_the_papers():
    """AGC: 0.01, and 1e-3 for parameters of zero (Brock et al. 2021). Adafactor: 1 (Shazeer and Stern 2018)."""
    grads, params = f32([[30, 30], [40, 40]]), f32([[300, 0], [400, 0]])
    updates, _ = quick_jit(lambda g, w: shrewjax.adaptive_grad_clip().update(g, None, w))(grads, params)
    np.testing.assert_allclose(updates, [[3, 0.6e-5], [4, 0.8e-5]], rtol=1e-5)
    updates, _ = quick_jit(lambda g: shrewjax.clip_by_block_rms().update(g, None))(f32([2, -2, 2, 2]))
    np.testing.assert_allclose(updates, [1, -1, 1, 1], rtol=1e-6)


# --- norms by leaf ------------------------------------------------------------------------------------------------


def test_leaf_norms_are_clipped_one_by_one():
    tree = {
        "big": f32([30, 40]),
        "small": f32([0.3, 0.4]),
        "bad": f32([np.nan]),
        "huge": f32([3e30, 4e30]),
        "zero": f32([0]),
    }
    tx = shrewjax.clip_by_leaf_norm(1.0)
    clipped, state = quick_jit(lambda tree: tx.update(tree, tx.init(tree)))(tree)
    expected = {"big": [0.6, 0.8], "small": [0.3, 0.4], "bad": [np.nan], "huge": [0.6, 0.8], "zero": [0]}
    for k, v in expected.items():
        np.testing.assert_allclose(clipped[k], f32(v), rtol=2.4e-7)
    assert bits(clipped["small"]) == bits(tree["small"])
    norms = {"big": 50, "small": 0.5, "bad": np.nan, "huge": 5e30, "zero": 0}
    scales = {"big": 0.02, "small": 1, "bad": np.nan, "huge": 2e-31, "zero": 1}
    for k in tree:
        np.testing.assert_allclose(state.grad_norm[k], f32(norms[k]), rtol=1e-6)
        np.testing.assert_allclose(state.clip_scale[k], f32(scales[k]), rtol=1e-6)


@pytest.mark.parametrize("ord", [1, 2])
def test_layers_of_a_stacked_leaf_are_clipped_one_by_one(ord):
    layers = np.random.default_rng(0).standard_normal((3, 2, 4)) * np.reshape([1e20, 0.1, 3], (3, 1, 1))
    grads = {"layers": f32(layers), "head": f32([0.3, 0.4])}
    tx = shrewjax.clip_by_leaf_norm(1.0, ord=ord, stacked_axes=lambda name, leaf: 0 if "layers" in name else None)

    @quick_jit
    def step(grads):
        clipped, state = tx.update(grads, tx.init(grads))
        return clipped, state, shrewjax.metrics(state)

    clipped, state, found = step(grads)
    norms = np.linalg.norm(layers.reshape(3, -1), ord, axis=1)
    np.testing.assert_allclose(state.grad_norm["layers"], norms, rtol=1e-6)
    np.testing.assert_allclose(state.clip_scale["layers"], np.minimum(1, 1 / norms), rtol=1e-6)
    np.testing.assert_allclose(clipped["layers"], layers * np.minimum(1, 1 / norms)[:, None, None], rtol=1e-6)
    np.testing.assert_array_equal(clipped["head"], grads["head"])
    assert float(found["clip_by_leaf_norm/grad_norm_max"]) == pytest.approx(max(norms), rel=1e-6)
    assert float(found["clip_by_leaf_norm/clipped_fraction"]) == np.float32(np.mean([*(norms > 1), False]))


def test_leaf_norm_state_keeps_its_structure_when_a_gradient_is_missing():
    tx = shrewjax.clip_by_leaf_norm(1.0)
    state = tx.init({"a": f32([3, 4]), "b": f32([1])})
    clipped, new = tx.update({"a": f32([3, 4]), "b": None}, state)
    assert clipped["b"] is None
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert (float(new.grad_norm["b"]), float(new.clip_scale["b"])) == (0, 1)


# --- AdaGC --------------------------------------------------------------------------------------------------------


def ema_steps(gradients, **numbers):
    """Steps of AdaGC. One program for gradients of the same shapes, because all numbers are its arguments."""
    by_default = {"max_ratio": 1.04, "decay": 0.99, "warmup_steps": 100, "warmup_max_norm": 1.0, "min_norm": 1e-6}
    return run(shrewjax.clip_by_leaf_norm_ema, gradients, **by_default | numbers)


def a_and_b(a, b=0.5):
    """Leaves of these norms, of the shapes that `vectors` gives them."""
    return {"a": f32([0.6 * a, 0.8 * a]), "b": f32([0, 0.6 * b, 0.8 * b])}


@pytest.mark.parametrize(
    "arguments", [{}, {"max_ratio": 1.5, "decay": 0.7, "warmup_steps": 5, "warmup_max_norm": 3.0}], ids=str
)
def test_leaf_ema_follows_the_papers_equations_at_every_step(arguments):
    gradients = list(vectors(NORMS))
    leaf_norms = np.float64([[true_norm(g["a"]), true_norm(g["b"])] for g in gradients])
    updates, states = (ema_steps if arguments else partial(run, shrewjax.clip_by_leaf_norm_ema))(gradients, **arguments)
    names = {"max_ratio": "ratio", "warmup_steps": "warmup", "warmup_max_norm": "max_norm"}
    oracle = list(adagc(leaf_norms, **{names.get(k, k): v for k, v in arguments.items()}))
    for i, leaf in enumerate("ab"):
        np.testing.assert_allclose(states.norm_ema[leaf], [gamma[i] for _, gamma in oracle], rtol=1e-5)
        left = np.linalg.norm(np.float64(updates[leaf]), axis=1)
        np.testing.assert_allclose(left, [left[i] for left, _ in oracle], rtol=1e-5)


def test_leaf_ema_a_zero_gradient_in_the_warmup_does_not_kill_a_leaf():
    updates, states = ema_steps([a_and_b(0)] + [a_and_b(0.5)] * 5, warmup_steps=3)
    np.testing.assert_allclose(updates["a"][1:], [[0.3, 0.4]] * 5, rtol=1e-6)
    np.testing.assert_allclose(states.norm_ema["a"], [0] + [0.5] * 5, rtol=1e-6)


def test_leaf_ema_a_leaf_that_wakes_up_after_the_warmup_starts_then():
    updates, states = ema_steps([a_and_b(0)] * 5 + [a_and_b(3)] * 3, warmup_steps=2)
    np.testing.assert_array_equal(states.norm_ema["a"][:5], np.zeros(5))
    together = 3 / np.hypot(3, 0.5)  # as in the warm-up: all gradients to norm 1
    assert np.linalg.norm(updates["a"][5]) == pytest.approx(together, rel=1e-6)
    assert np.linalg.norm(updates["a"][6]) == pytest.approx(1.04 * together, rel=1e-6)


def test_leaf_ema_floor_shortens_the_way_up():
    _, states = ema_steps([a_and_b(1e-12)] + [a_and_b(1)] * 3, warmup_steps=1, min_norm=0.1)
    np.testing.assert_allclose(states.norm_ema["a"][:2], [0.1, 0.1 * 1.0004], rtol=1e-6)


def test_leaf_ema_of_stacked_layers_is_that_of_each_layer():
    norms = np.exp(np.random.default_rng(2).normal(size=(40, 3)))
    direction = np.random.default_rng(3).normal(size=(3, 4))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    stacked = [{"layers": f32(n[:, None] * direction)} for n in norms]
    updates, states = run(lambda: shrewjax.clip_by_leaf_norm_ema(warmup_steps=5, stacked_axes=0), stacked)
    left, averages = map(np.stack, zip(*adagc(norms, warmup=5), strict=True))
    assert states.norm_ema["layers"].shape == (40, 3)
    np.testing.assert_allclose(updates["layers"], left[..., None] * direction, rtol=1e-5)
    np.testing.assert_allclose(states.norm_ema["layers"], averages, rtol=1e-5)
    np.testing.assert_allclose(states.clipped_fraction, np.mean(left < norms, axis=1), rtol=1e-6)


# --- AGC and block RMS --------------------------------------------------------------------------------------------


def whole_leaf(name, leaf):
    return tuple(range(leaf.ndim))


# Arguments, the shape of a leaf, and which of its axes share a norm. Below, Optax has those by default.
AXES = [
    ({"stacked_axes": -2}, (4, 5, 3), 0),
    ({"axis": whole_leaf}, (4, 3), (0, 1)),
    ({"axis": whole_leaf, "stacked_axes": 0}, (5, 4, 3), (1, 2)),
    ({"axis": 1}, (4, 3), 1),
    ({"axis": (-1, 0)}, (4, 3), (0, 1)),
    ({"axis": lambda name, leaf: (0, 2) if "kernel" in name else None}, (4, 3, 2), (0, 2)),
]


def test_agc_is_equation_3_for_every_choice_of_axes():
    rng = np.random.default_rng(0)
    gs = [f32(rng.normal(size=shape) * np.exp(rng.normal(size=shape)) * 0.1) for _, shape, _ in AXES]
    ws = [f32(rng.normal(size=shape)) for _, shape, _ in AXES]
    rules = [shrewjax.adaptive_grad_clip(0.1, **arguments) for arguments, _, _ in AXES]

    @quick_jit
    def clipped(gs, ws):
        return [tx.update({"kernel": g}, None, {"kernel": w})[0] for tx, g, w in zip(rules, gs, ws, strict=True)]

    for update, g, w, (arguments, _, axis) in zip(clipped(gs, ws), gs, ws, AXES, strict=True):
        expected = agc(g, w, axis)
        assert not np.array_equal(expected, np.float64(g))
        np.testing.assert_allclose(update["kernel"], expected, rtol=1e-5, err_msg=str(arguments))


def test_agc_where_parameters_are_zero_still_learns_and_says_what_it_saw():
    g, w = f32([[0.3, 3], [0.4, 4]]), f32([[1, 0], [0, 0]])
    updates, state = run(shrewjax.adaptive_grad_clip, [g], w, clipping=0.5, eps=1e-3)
    np.testing.assert_allclose(updates[0], [[0.3, 3e-4], [0.4, 4e-4]], rtol=1e-6)
    assert float(state.ratio_max[0]) == pytest.approx(5000, rel=1e-6)
    assert float(state.clipped_fraction[0]) == 0.5


block_rms_of_columns = partial(shrewjax.clip_by_block_rms, stacked_axes=1)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_unit_norms_neither_overflow_nor_underflow(scale):
    g, w = f32([[3, 1], [4, 1]]) * f32(scale), f32([[1, 1], [1, 1]]) * f32(scale)
    updates, _ = run(shrewjax.adaptive_grad_clip, [g], w, clipping=0.1, eps=0)
    np.testing.assert_allclose(
        np.float64(updates[0]) / scale, agc(g / f32(scale), np.ones((2, 2)), 0, eps=0), rtol=1e-5
    )
    updates, states = run(block_rms_of_columns, [g], threshold=scale * 0.1)
    np.testing.assert_allclose(np.sqrt(np.mean((np.float64(updates[0]) / scale) ** 2, axis=0)), [0.1, 0.1], rtol=1e-5)
    assert float(states.rms_max[0]) == pytest.approx(12.5**0.5 * scale, rel=1e-5)


@pytest.mark.parametrize("dtypes", [("float16", "complex64"), *thorough((("float32", "bfloat16"),))], ids=str)
def test_unit_rules_keep_dtypes_and_leave_small_units_bit_for_bit(dtypes):
    grads = {dtype: np.asarray([[300.0, 1e-3], [400.0, 6e-8]], dtype) for dtype in dtypes}
    params = dict.fromkeys(dtypes, np.ones((2, 2), f32))
    for tx in (shrewjax.adaptive_grad_clip(0.1), block_rms_of_columns(1.0)):
        updates, state = jax.device_get(quick_jit(tx.update)(grads, tx.init(params), params))
        assert float(state.clipped_fraction) == 0.5
        for dtype, g in grads.items():
            of_leaf = updates[dtype]
            assert of_leaf.dtype == dtype
            assert bits(of_leaf[:, 1]) == bits(g[:, 1])
            ratio = np.complex128(of_leaf[1, 0]) / np.complex128(of_leaf[0, 0])
            np.testing.assert_allclose(ratio, 4 / 3, rtol=4 * float(jnp.finfo(dtype).eps))


def test_agc_infinite_threshold_is_the_identity_and_a_bad_unit_spoils_no_other():
    g, w = f32([[np.nan, 1], [1, 1]]), np.zeros((2, 2), f32)
    updates, _ = run(shrewjax.adaptive_grad_clip, [g], w, clipping=np.inf, eps=0)
    assert bits(updates[0]) == bits(g)
    updates, states = run(shrewjax.adaptive_grad_clip, [g], w, clipping=0.1, eps=1)
    assert np.isnan(updates[0][:, 0]).all()
    np.testing.assert_allclose(updates[0][:, 1], [0.1 / 2**0.5] * 2, rtol=1e-6)
    assert np.isnan(states.ratio_max[0])


def test_block_rms_is_adafactors_on_random_updates():
    rng = np.random.default_rng(0)
    gradients = [[f32(rng.normal(size=size) * 2) for size in (1, 7, 1000)] for _ in range(5)]
    updates, _ = run(lambda: shrewjax.clip_by_block_rms(0.7), gradients)
    for i, leaves in enumerate(gradients):
        for update, g in zip(updates, leaves, strict=True):
            rms = np.sqrt(np.mean(np.float64(g) ** 2))
            np.testing.assert_allclose(update[i], np.float64(g) / max(1, rms / 0.7), rtol=1e-5)


# --- one bad gradient ---------------------------------------------------------------------------------------------

RULES = {
    "percentile": lambda: shrewjax.clip_by_norm_percentile(50.0, history_length=5),
    "zscore": lambda: shrewjax.clip_by_norm_zscore(1.0, warmup_steps=3, max_norm=1.0),
    "leaf_ema": lambda: shrewjax.clip_by_leaf_norm_ema(warmup_steps=3),
}

REMEMBERED = {
    "percentile": lambda s: s.history,
    "zscore": lambda s: (s.recorded, s.mean, s.std),
    "leaf_ema": lambda s: (s.recorded, s.norm_ema),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_bad_gradient_is_as_if_it_had_not_been(rule):
    gradients = list(vectors(NORMS[:10]))
    _, clean = run(RULES[rule], gradients)
    for bad, when in itertools.product([np.nan, np.inf, -np.inf], [1, 6]):  # in the warm-up, and later
        spoilt = {"a": f32([1, bad]), "b": gradients[0]["b"]}
        updates, states = run(RULES[rule], [*gradients[:when], spoilt, *gradients[when:]])
        remembered = zip(*(jax.tree.leaves(REMEMBERED[rule](s)) for s in (states, clean)), strict=True)
        for seen, expected in remembered:
            np.testing.assert_array_equal(np.delete(seen, when, axis=0), expected, err_msg=f"{bad}, {when}")
            np.testing.assert_array_equal(seen[when], seen[when - 1], err_msg=f"{bad}, {when}")
        assert np.isnan(updates["a"][when]).all(), (bad, when)  # seen, not hidden


# --- arguments ----------------------------------------------------------------------------------------------------


def update_of_other_layers(tx):
    return tx.update({"w": jnp.ones((2, 1))}, tx.init({"w": jnp.ones((3, 1))}))


OTHER_LAYERS = r"\['w'\] of shape \(2, 1\) has units of shape \(2,\), but the state has \(3,\)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: shrewjax.clip_by_leaf_norm(1.0, ord=3, stacked_axes=0),
            r"ord must be 1 or 2 with stacked_axes, got 3",
        ),
        (lambda: update_of_other_layers(shrewjax.clip_by_leaf_norm(1.0, stacked_axes=0)), OTHER_LAYERS),
        (lambda: update_of_other_layers(shrewjax.clip_by_leaf_norm_ema(stacked_axes=0)), OTHER_LAYERS),
        (lambda: shrewjax.clip_by_leaf_norm_ema(0.9), r"max_ratio must be >= 1"),
        (lambda: shrewjax.adaptive_grad_clip(axis=1.5), r"axis must be ints, None or a function"),
        (lambda: shrewjax.adaptive_grad_clip(axis=jnp.int32(1)), r"axis must be static.*static_args"),
        (lambda: shrewjax.clip_by_block_rms(-1), r"threshold must be >= 0"),
        (
            lambda: shrewjax.clip_by_block_rms(stacked_axes=1).init({"b": jnp.ones(3)}),
            r"stacked_axes \(1,\) is out of range for gradient leaf \['b'\] of shape \(3,\)",
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
    before = tx.init({"a": f32(0), "b": f32(0)})._replace(recorded=np.int32(1), norm_ema={"a": f32(1), "b": f32(2)})
    updates, after = quick_jit(tx.update)({"a": f32(3), "b": None}, before)
    assert updates["b"] is None
    assert after.norm_ema["b"] == 2
    assert after.norm_ema["a"] > 1


def test_each_measured_threshold_is_in_the_metrics():
    params = tree_of()
    tx = optax.chain(*(lenient(rule()) for rule in RULES.values()))
    found = jax.eval_shape(lambda g: shrewjax.metrics(tx.update(g, tx.init(params), params)[1]), tree_of(1))
    assert {name for name in found if "threshold" in name} == {
        "clip_by_norm_percentile/threshold",
        "clip_by_norm_zscore/threshold",
        "clip_by_leaf_norm_ema/threshold_max",
    }


# --- beginnings and edges -----------------------------------------------------------------------------------------


def test_ema_with_a_nan_argument_records_nothing_that_is_not_finite():
    @quick_jit
    def step(state, decay):
        return shrewjax.clip_by_leaf_norm_ema(decay=decay, warmup_steps=1).update(jnp.full(2, 0.1), state)

    state = shrewjax.clip_by_leaf_norm_ema().init(f32([0, 0]))
    for decay in (0.9, 0.9, np.nan, 0.9):
        updates, state = step(state, f32(decay))
    assert np.isfinite(state.norm_ema)
    assert np.isfinite(updates).all()


def test_leaf_ema_records_no_norm_beyond_float32():
    """Such a norm passes if no limit is finite. The global norm is then finite, too, because its range is wider."""
    beyond, one = {"a": f32([3e38, 3e38]), "b": f32([0, 0, 1])}, a_and_b(1)
    _, states = ema_steps([beyond, one, beyond], warmup_steps=1, warmup_max_norm=np.inf, max_ratio=np.inf)
    np.testing.assert_allclose(states.norm_ema["a"], [0, 1, 1], rtol=1e-6)
    np.testing.assert_array_equal(states.recorded, [1, 2, 3])


@pytest.mark.parametrize("sizes", [(3, 6, 11, 49, 196), *thorough(range(1, 200, 5))])
def test_a_block_of_ones_has_a_root_mean_square_of_one(sizes):
    blocks = [np.ones(size, np.float32) for size in sizes]
    tx = shrewjax.clip_by_block_rms(1.0)
    assert bits(quick_jit(lambda blocks: tx.update(blocks, tx.init(blocks))[0])(blocks)) == bits(blocks)


def test_agc_with_an_eps_or_parameters_that_are_not_finite_is_as_its_table_says():
    g, w = f32([[3, 3], [4, 4]]), f32([[300, 1], [400, 1]])  # one unit is within a tenth of its parameters
    inf, nan = np.inf, np.nan
    start = shrewjax.adaptive_grad_clip().init(w)

    def column(clipping, eps, parameter=1.0, gradient=3.0):
        """The updates after one number of the second unit is set, the gradients before, and the state."""
        of_g, of_w = g.copy(), w.copy()
        of_g[0, 1], of_w[0, 1] = gradient, parameter
        updates, state = step_of(shrewjax.adaptive_grad_clip)(
            {"clipping": f32(clipping), "eps": f32(eps)}, of_g, start, of_w
        )
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


def test_leaf_ema_shows_no_threshold_and_no_clip_of_a_leaf_that_never_had_a_gradient():
    idle = {"idle": f32([0, 0]), "empty": np.zeros((0,), f32)}
    gradients = [idle | {"a": f32([norm])} for norm in (5, 0.25, 0.25, 4)]
    _, states = run(lambda: shrewjax.clip_by_leaf_norm_ema(2.0, decay=0.5, warmup_steps=2), gradients)
    np.testing.assert_allclose(states.threshold_max, [1, 1, 0.5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(states.clipped_fraction, [1 / 3, 0, 0, 1 / 3], rtol=1e-6)
    np.testing.assert_array_equal(states.norm_ema["idle"], np.zeros(4))


def test_leaf_ema_without_a_finite_threshold_lets_a_bad_gradient_pass_as_it_is():
    bad, good = a_and_b(np.nan), a_and_b(5)
    updates, states = ema_steps([bad, good, bad], warmup_steps=1, warmup_max_norm=np.inf)
    assert bits(jax.tree.map(lambda x: x[0], updates)) == bits(bad)
    assert np.isnan(updates["a"][2]).all()
    np.testing.assert_array_equal(updates["b"][2], bad["b"])
    np.testing.assert_array_equal(states.recorded, [0, 1, 1])
    updates, _ = ema_steps([good, bad], max_ratio=np.inf, warmup_steps=0)
    assert bits(jax.tree.map(lambda x: x[1], updates)) == bits(bad)


def test_the_derivative_where_a_unit_is_zero_is_that_of_the_identity():
    tx = shrewjax.clip_by_block_rms(1.0, stacked_axes=0)
    slope = quick_jit(jax.grad(lambda u: jnp.sum(tx.update(u, tx.init(u))[0])))
    gradient = slope(jnp.float32([[0, 0], [0.5, -0.5]]))
    assert gradient.tolist() == [[1, 1], [1, 1]]


def test_the_derivative_of_agc_without_a_limit_is_that_of_the_identity():
    tx = shrewjax.adaptive_grad_clip(jnp.inf)
    slopes = quick_jit(jax.grad(lambda u, w: jnp.sum(tx.update(u, None, w)[0]), argnums=(0, 1)))
    by_gradient, by_weight = slopes(jnp.float32([[3, 0], [0.5, -0.5]]), jnp.ones((2, 2)))
    assert by_gradient.tolist() == [[1, 1], [1, 1]]
    assert by_weight.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(("of_grads", "of_params"), [("float32", "float64"), ("float64", "float32")])
def test_agc_measures_gradients_and_parameters_of_two_dtypes_each_in_its_range(of_grads, of_params):
    norms = {"a": 5e-11, "b": np.hypot(1e-18, 1e-19)}
    with jax.enable_x64(True):
        grads = {"a": np.asarray([3e-12, 4e-12], of_grads), "b": np.asarray([1, 0], of_grads)}
        params = {"a": np.asarray([3e-11, 4e-11], of_params), "b": np.asarray([1e-18, 1e-19], of_params)}
        tx = shrewjax.adaptive_grad_clip(0.01, eps=0.0)
        updates, state = quick_jit(tx.update)(grads, tx.init(params), params)
    for name, norm in norms.items():
        assert np.linalg.norm(np.float64(updates[name])) == pytest.approx(0.01 * norm, rel=1e-5), name
    assert float(state.clipped_fraction) == 1


def test_units_clip_as_they_do_beside_a_leaf_that_is_read_again():
    rng = np.random.default_rng(0)
    shapes = [(6, 4), (4,), (6, 4), ()]
    grads, params = ([np.float32(rng.normal(size=shape)) for shape in shapes] for _ in range(2))
    grads[2] *= 1e-4  # not clipped
    step = users_jit(lambda grads, params: shrewjax.adaptive_grad_clip(0.5).update(grads, None, params))
    usual, state = step([*grads, np.full((6, 4), 1e-3, f32)], [*params, np.ones((6, 4), f32)])
    # Beside a leaf that is read again, units are measured and clipped as numbers of any range.
    beside, state_beside = step([*grads, np.full((6, 4), 1e-25, f32)], [*params, np.ones((6, 4), f32)])
    assert bits(usual[:-1]) == bits(beside[:-1])
    assert bits(state.ratio_max) == bits(state_beside.ratio_max)
    assert 0 < state.clipped_fraction < 1


SHAPES = [(), (4,), (4, 1), (1, 4), (1, 1, 4), (1, 4, 1), (4, 1, 1), (1, 1, 1, 4), (1, 1, 1), (3, 4), (1, 3, 4)]
SHAPES += [(3, 1, 4), (2, 3, 4), (1, 1, 3, 4), (2, 3, 2, 4), (1, 3, 2, 4), (2, 2, 3, 2, 4)]


def test_units_of_every_shape_are_those_of_optax():
    rng = np.random.default_rng(0)
    grads, params = ({str(shape): f32(rng.normal(size=shape)) for shape in SHAPES} for _ in range(2))
    rules = shrewjax.adaptive_grad_clip(0.5), optax.adaptive_grad_clip(0.5)
    ours, theirs = (quick_jit(lambda g, w, tx=tx: tx.update(g, tx.init(w), w)[0])(grads, params) for tx in rules)
    for name in grads:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, err_msg=name)


def test_units_beside_stacked_layers_are_those_of_each_layer():
    rng = np.random.default_rng(0)
    grads, params = ({str(shape): f32(rng.normal(size=(3, *shape))) for shape in SHAPES} for _ in range(2))
    stacked, alone = shrewjax.adaptive_grad_clip(0.5, stacked_axes=0), optax.adaptive_grad_clip(0.5)
    ours = quick_jit(lambda g, w: stacked.update(g, None, w)[0])(grads, params)
    layer = quick_jit(lambda g, w: alone.update(g, alone.init(w), w)[0])
    for i in range(3):
        expected = layer(*({name: x[i] for name, x in tree.items()} for tree in (grads, params)))
        for name in grads:
            np.testing.assert_allclose(ours[name][i], expected[name], rtol=1e-5, err_msg=name)
