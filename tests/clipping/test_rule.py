"""Counts of clips: `clip_rate` against a host's count in NumPy, and what an update counts as."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import mesh_of, thorough
from speed import quick_jit

import shrewjax

f32 = np.float32
STEPS, WINDOW, LIMIT = 500, 4, 1.0


def random_steps():
    """Gradients of two leaves, whose norms lie around the limit. Some have a NaN."""
    rng = np.random.default_rng(7)
    grads = rng.normal(size=(STEPS, 2, 3)).astype(f32) * f32(0.9)
    grads[rng.random(STEPS) < 0.05, 0, 0] = np.nan
    return grads


def as_tree(grad):
    return {"a": grad[0], "b": grad[1]}


def norms_of(grads, by):
    """The norms of each step's units, in float64."""
    squares = np.sum(np.float64(grads) ** 2, axis=-1)
    return np.sqrt(squares if by == "leaf" else squares.sum(axis=-1, keepdims=True))


def host_counts(grads, by, guarded, windowed):
    """The updates that ran, and those of them that clipped a unit of finite norm, one by one."""
    open_window, count, clipped = [], 0, 0
    for grad in grads:
        if windowed:
            open_window.append(grad)
            if len(open_window) < WINDOW:
                continue
            grad, open_window = np.mean(open_window, axis=0, dtype=np.float64), []
        if guarded and not np.isfinite(grad).all():
            continue
        norms = norms_of(grad, by)
        count += 1
        clipped += bool(np.any(np.isfinite(norms) & (norms > LIMIT)))
    return count, clipped


@pytest.mark.parametrize("by", ["tree", "leaf"])
@pytest.mark.parametrize("wraps", ["", "guard", "window", "guard in a window", "injected"])
def test_the_rate_is_the_count_of_a_host(by, wraps):
    rule = shrewjax.clip_by_global_norm if by == "tree" else shrewjax.clip_by_leaf_norm
    tx = optax.inject_hyperparams(rule)(max_norm=LIMIT) if wraps == "injected" else rule(LIMIT)
    tx = shrewjax.skip_nonfinite(tx) if "guard" in wraps else tx
    tx = shrewjax.accumulate(tx, WINDOW) if "window" in wraps else tx
    grads = random_steps()

    def step(state, grad):
        return tx.update(as_tree(grad), state)[1], ()

    state, _ = quick_jit(lambda s, g: jax.lax.scan(step, s, g), donate_argnums=0)(tx.init(as_tree(grads[0])), grads)
    kind = "clip_by_global_norm/" if by == "tree" else "clip_by_leaf_norm/"
    found = {k.removeprefix(kind): float(v) for k, v in shrewjax.metrics(state).items() if k.startswith(kind)}
    count, clipped = host_counts(grads, by, "guard" in wraps, "window" in wraps)
    assert 0 < clipped < count
    assert (found["count"], found["clipped"]) == (count, clipped)
    assert found["clip_rate"] == f32(clipped) / f32(count)


RULES = {
    "clip_by_global_norm": shrewjax.clip_by_global_norm(1.0),
    "clip_by_leaf_norm": shrewjax.clip_by_leaf_norm(1.0),
    "adaptive_grad_clip": shrewjax.adaptive_grad_clip(1.0, eps=1.0),
    "clip_by_block_rms": shrewjax.clip_by_block_rms(1.0),
    "clip_by_norm_percentile": shrewjax.clip_by_norm_percentile(50.0),
    "clip_by_norm_zscore": shrewjax.clip_by_norm_zscore(warmup_steps=100, max_norm=1.0),
    "clip_by_leaf_norm_ema": shrewjax.clip_by_leaf_norm_ema(1.0, warmup_steps=1),
}


@pytest.mark.parametrize("dtype", [jnp.float32, *thorough(jnp.bfloat16)])
@pytest.mark.parametrize("name", RULES)
def test_an_update_counts_as_clipped_if_a_finite_norm_was_above_its_threshold(name, dtype):
    tx, params = RULES[name], {"a": jnp.zeros(1, dtype), "b": jnp.zeros(1, dtype)}
    state = tx.init(params)
    assert np.isnan(shrewjax.metrics(state)[f"{name}/clip_rate"])
    update = quick_jit(lambda g, s: tx.update(g, s, params)[1])
    for value in (0.5, 4.0, np.nan, np.inf, 0.0):
        state = update({"a": jnp.full(1, value, dtype), "b": jnp.full(1, 0.25, dtype)}, state)
    assert (int(state.calls), int(state.clipped)) == (5, 1)
    assert shrewjax.metrics(state)[f"{name}/clip_rate"] == f32(0.2)


def test_counts_stop_at_the_largest_number():
    tx, most = shrewjax.clip_by_global_norm(1.0), np.iinfo(np.int32).max
    state = tx.init(jnp.zeros(1))._replace(calls=jnp.int32(most - 1), clipped=jnp.int32(most))
    for _ in range(3):
        _, state = tx.update(jnp.full(1, 2.0), state)
        assert (int(state.calls), int(state.clipped)) == (most, most)


def test_rules_without_norms_count_nothing():
    for tx in (shrewjax.clip_by_value(1.0), shrewjax.clip_by_percentile(50.0)):
        assert not any("clip_rate" in name for name in shrewjax.metrics(tx.init(jnp.zeros(2))))


def test_the_weight_of_the_window_that_closed_is_shown():
    params, weights = jnp.zeros(2), [3, 5, 0, 0, 7, 4]
    window = shrewjax.GradAccumulator(2)
    tx, state = shrewjax.accumulate(optax.identity(), 2), window.init(params)
    of_tx, seen = tx.init(params), []
    for weight in weights:
        _, state = window.step(state, jnp.ones(2), weight)
        _, of_tx = tx.update(jnp.ones(2), of_tx, params, weight=weight)
        shown = shrewjax.metrics(state) | shrewjax.metrics(of_tx)
        seen.append([float(shown[f"{kind}/weight"]) for kind in ("accumulate", "grad_accumulator")])
    # A window of weight 0 has no average.
    assert seen == [[0] * 2, [8] * 2, [8] * 2, [8] * 2, [8] * 2, [11] * 2]


@pytest.mark.parametrize("name", RULES)
def test_norms_of_float64_gradients_are_kept_in_float64(name):
    with jax.enable_x64(True):
        params = {"a": jnp.zeros(1, jnp.float64), "b": jnp.zeros(1, jnp.float32)}
        tx = RULES[name]
        state = tx.init(params)
        _, new = tx.update({"a": jnp.full(1, 1e200), "b": jnp.ones(1, jnp.float32)}, state, params)
        dtypes = [x.dtype for x in jax.tree.leaves(new)]
        assert dtypes == [x.dtype for x in jax.tree.leaves(state)]
        fields = ("grad_norm", "ratio_max", "rms_max", "grad_norm_max")
        (shown,) = (getattr(new, field) for field in fields if hasattr(new, field))
        shown = shown["a"] if isinstance(shown, dict) else shown
        np.testing.assert_allclose(shown, 1e200, rtol=1e-14)


def test_a_scale_next_to_one_is_shown_in_float64():
    with jax.enable_x64(True):
        tx, grads = shrewjax.clip_by_global_norm(1.0), {"w": jnp.asarray([1 + 1e-9])}
        _, state = tx.update(grads, tx.init(grads))
        np.testing.assert_allclose(state.clip_scale, 1 / (1 + 1e-9), rtol=1e-15)
        # The state keeps the dtypes of `init`, whatever the gradients are.
        _, state = tx.update({"w": jnp.ones(1, jnp.float32)}, state)
        assert state.grad_norm.dtype == state.clip_scale.dtype == jnp.float64


@pytest.mark.parametrize("name", ["clip_by_global_norm", "clip_by_leaf_norm"])
def test_each_independent_model_has_its_own_counts(name):
    mesh, models = mesh_of(replica=4), jax.P("replica")
    tx = getattr(shrewjax, name)(1.0, sharded_over=())
    grads = f32([[3, 4], [0.3, 0.4], [np.nan, 4], [0, 1]])

    def counts(grad):
        _, state = tx.update(grad, tx.init(grad))
        _, state = tx.update(grad / 2, state)
        return jnp.stack([state.calls, state.clipped])[None]

    step = quick_jit(jax.shard_map(counts, mesh=mesh, in_specs=models, out_specs=models))
    assert step(grads).tolist() == [[2, 2], [2, 0], [2, 0], [2, 0]]


@pytest.mark.parametrize("wrap", [lambda rule: shrewjax.accumulate(rule, 2, sum_over=()), shrewjax.skip_nonfinite])
@pytest.mark.parametrize("make", [shrewjax.clip_by_norm_percentile, shrewjax.clip_by_norm_zscore])
def test_a_model_on_each_device_begins_with_a_state_of_its_own(make, wrap):
    """Two steps inside `shard_map`, in which `init` is called, too. The oracle is one device after the other."""
    rule = optax.chain(make(**({"percentile": 50} if "percentile" in make.__name__ else {}), sharded_over=()), SGD)
    tx = wrap(rule)

    def run(params, grads):
        state = tx.init(params)
        for scale in (1.0, 3.0):
            updates, state = tx.update(scale * grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    params, grads = jnp.ones(8), jnp.arange(8.0)
    inside = jax.shard_map(run, mesh=mesh_of(d=8), in_specs=jax.P("d"), out_specs=jax.P("d"))
    expected = jnp.concatenate([quick_jit(run)(params[i : i + 1], grads[i : i + 1]) for i in range(8)])
    np.testing.assert_array_equal(quick_jit(inside)(params, grads), expected)


SGD = optax.sgd(1.0)
