"""Thresholds of the global norm from past norms, against their papers' equations in float64."""

import jax
import numpy as np
import pytest
from helpers import bits, quick_jit, true_norm
from steps import NORMS, f32, run, vectors

import shrewjax


def norms_of(updates):
    """The norm of each step's updates."""
    on_host = jax.tree.map(np.asarray, updates)
    return [float(true_norm(jax.tree.map(lambda x, i=i: x[i], on_host))) for i in range(len(on_host["a"]))]


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


# --- ZClip --------------------------------------------------------------------------------------------------------


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
