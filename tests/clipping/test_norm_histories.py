"""Thresholds of the global norm from past norms, against their papers' equations in float64, and at their beginning."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bits, thorough, true_norm
from speed import quick_jit
from steps import NORMS, f32, run, stacked, step_of, vectors, zscore_steps

import shrewjax

pytestmark = pytest.mark.usefixtures("one_device")


def norms_of(updates):
    """The norm of each step's updates."""
    leaves = [np.reshape(np.float64(x), (len(x), -1)) for x in jax.tree.leaves(updates)]
    return np.linalg.norm(np.concatenate(leaves, axis=1), axis=1)


GRADIENTS = list(vectors(NORMS))
GIVEN = norms_of(stacked(GRADIENTS))


# --- the papers' equations, plainly -------------------------------------------------------------------------------


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


# --- AutoClip -----------------------------------------------------------------------------------------------------

OTHER_PAIRS = (1, False), (7, True), (1024, False)


@pytest.mark.parametrize(("length", "traced"), [(1, True), (7, False), (1024, True), *thorough(*OTHER_PAIRS)], ids=str)
def test_percentile_of_the_history_is_numpys_at_every_step(length, traced):
    make = partial(shrewjax.clip_by_norm_percentile, history_length=length)
    gradients, norms = GRADIENTS[:50], GIVEN[:50]
    # Each static one is compiled.
    for p in f32([0, 1, 10, 33.3, 50, 99.9, 100] if traced else [0, 99.9, 100]):
        given = {"percentile": float(p)}
        updates, states = run(make, gradients, **given) if traced else run(partial(make, **given), gradients)
        expected = list(autoclip(norms, float(p), length))
        np.testing.assert_allclose(states.threshold, expected, rtol=1e-5, err_msg=str(p))
        np.testing.assert_allclose(norms_of(updates), np.minimum(norms, expected), rtol=1e-5, err_msg=str(p))
        if p == 100:
            assert bits(updates) == bits(stacked(gradients))


def test_percentile_100_leaves_gradients_of_any_size_alone():
    with jax.enable_x64(True):
        gradients = [np.float64([1 + 1e-12 * i, 1e-40]) for i in range(4)]
        updates, _ = run(partial(shrewjax.clip_by_norm_percentile, 100.0), gradients)
        assert bits(updates) == bits(np.stack(gradients))


def test_percentile_before_there_is_a_history_lets_pass_what_is_not_recorded():
    beyond, bad = f32([3e38, 3e38]), f32([np.nan, 1])
    updates, states = run(partial(shrewjax.clip_by_norm_percentile, 50.0), [beyond, bad, f32([3, 4]), beyond, bad])
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


# --- ZClip --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_norm", [np.inf, 2.0])
@pytest.mark.parametrize("arguments", [{}, {"max_zscore": 1.0, "decay": 0.9, "warmup_steps": 3, "eps": 0.1}], ids=str)
def test_zscore_follows_the_papers_equations_at_every_step(arguments, max_norm):
    # Without arguments, by the rule's own defaults.
    steps = zscore_steps if arguments else partial(run, shrewjax.clip_by_norm_zscore)
    updates, states = steps(GRADIENTS, **arguments, max_norm=max_norm)
    names = {"warmup_steps": "warmup"}
    left, mean, std = np.transpose(list(zclip(GIVEN, **{names.get(k, k): v for k, v in arguments.items()})))
    assert (left < GIVEN).sum() > 3  # there were spikes
    np.testing.assert_allclose(states.mean, mean, rtol=1e-5)
    np.testing.assert_allclose(states.std, std, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(norms_of(updates), np.minimum(left, max_norm), rtol=1e-5)


@pytest.mark.parametrize(("z", "expected"), [(2.5, 2.5), (3, 2.0833333), (5, 1.25), (10, 0.625), (100, 0.0625)])
def test_zscore_table(z, expected):
    # Warm-up norms 1 and 3: mean 2, deviation 1.
    norms = [1.0, 3.0, 2.0 + z]
    updates, _ = zscore_steps([f32([n]) for n in norms], warmup_steps=2, eps=0)
    assert float(updates[2][0]) - 2 == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("norm", [1.0, 0.1, 7e9, 3e-20])
def test_zscore_of_a_constant_norm_keeps_its_mean_to_the_last_bit(norm):
    updates, states = run(shrewjax.clip_by_norm_zscore, [f32([norm])] * 300)
    np.testing.assert_array_equal(states.mean, np.full(300, f32(norm)))
    np.testing.assert_array_equal(states.std, np.zeros(300))
    np.testing.assert_array_equal(updates, np.full((300, 1), f32(norm)))


def test_zscore_statistics_stay_in_range():
    norms = [1e30, 3e30, 1e30, 3e30, 1e38]
    _, states = zscore_steps([f32([n]) for n in norms], warmup_steps=4)
    np.testing.assert_allclose(states.std[3], 1e30, rtol=1e-5)
    assert np.isfinite(states.std[4])
    beyond = [*norms[:4], 3e38 * np.ones(2)]
    updates, states = zscore_steps([f32(n) * np.ones(2, f32) for n in beyond], warmup_steps=4)
    assert np.isfinite(states.mean).all()
    np.testing.assert_allclose(true_norm(updates[4]), states.mean[3], rtol=1e-5)


@pytest.mark.parametrize("warmup", [0, 3])
def test_zscore_without_a_mean_to_compare_with_lets_norms_pass(warmup):
    updates, states = zscore_steps([f32([norm]) for norm in [0] * warmup + [1] * 3], warmup_steps=warmup)
    np.testing.assert_array_equal(updates[-3:], np.ones((3, 1)))
    assert states.mean[-1] > 0


@pytest.mark.parametrize("argument", ["max_zscore", "eps", "decay"])
def test_zscore_with_a_nan_argument_records_nothing_that_is_not_finite(argument):
    step, state = step_of(shrewjax.clip_by_norm_zscore), shrewjax.clip_by_norm_zscore().init(None)
    usual = {"max_zscore": f32(2.5), "decay": f32(0.97), "warmup_steps": f32(1), "eps": f32(1e-6), "max_norm": f32(9)}
    finite, odd = (usual | {argument: f32(value)} for value in (0.9, np.nan))
    for norm in (1.0, 1.2, 0.9):
        _, state = step(finite, f32([norm]), state, None)
    updates, spoiled = step(odd, f32([1]), state, None)
    assert np.isfinite(spoiled.mean)
    assert np.isfinite(spoiled.std)
    assert argument == "decay" or np.isnan(updates[0])
    assert np.isfinite(step(finite, f32([1]), spoiled, None)[0][0])


# --- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: shrewjax.clip_by_norm_percentile(101), r"percentile must be between 0 and 100 and not NaN, got 101"),
        (lambda: shrewjax.clip_by_norm_percentile(10.0, history_length=jnp.int32(9)), r"history_length.*static_args"),
        (lambda: shrewjax.clip_by_norm_zscore(decay=1.5), r"decay must be between 0 and 1"),
    ],
)
def test_what_is_wrong_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
