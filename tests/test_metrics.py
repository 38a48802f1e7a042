"""Metrics find what was measured wherever it sits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import lenient, quick_jit

import shrewjax

GRADS = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.6])}
NORM = float(np.sqrt(25.36))


def after_one_update(tx):
    params = jax.tree.map(jnp.zeros_like, GRADS)
    return quick_jit(lenient(tx).update)(GRADS, tx.init(params), params)[1]


def values(metrics):
    return {k: float(v) for k, v in metrics.items()}


def test_names_are_paths_of_fields_and_indices():
    tx = optax.chain(optax.identity(), shrewjax.clip_by_global_norm(1.0), shrewjax.clip_by_leaf_norm(0.6))
    state = after_one_update(tx)
    assert values(shrewjax.metrics(state)) == {
        "1/grad_norm": pytest.approx(NORM),
        "1/clip_scale": pytest.approx(1 / NORM),
        "2/grad_norm_max": pytest.approx(5 / NORM),
        "2/clipped_share": 0.5,
    }
    assert shrewjax.metrics(optax.adam(0.1).init(GRADS)) == {}
    assert values(shrewjax.metrics(shrewjax.clip_by_leaf_norm(1.0).init({}))) == {
        "grad_norm_max": 0,
        "clipped_share": 0,
    }


@pytest.mark.parametrize(
    ("wrap", "name", "norm"),
    [
        (lambda tx: optax.chain(optax.identity(), optax.chain(tx)), "1/0/grad_norm", NORM),
        (lambda tx: optax.named_chain(("clip", tx)), "clip/grad_norm", NORM),
        (lambda tx: optax.masked(tx, {"a": True, "b": False}), "inner_state/grad_norm", 5),
        (lambda tx: optax.partition({"x": tx}, {"a": "x", "b": "x"}), "inner_states/x/inner_state/grad_norm", NORM),
        (lambda tx: optax.apply_if_finite(tx, 3), "inner_state/grad_norm", NORM),
        (lambda tx: shrewjax.accumulate(tx, 1), "inner_state/grad_norm", NORM),
        (lambda tx: shrewjax.accumulate(optax.chain(tx, optax.sgd(0.1)), 1), "inner_state/0/grad_norm", NORM),
        (lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(), "inner_opt_state/grad_norm", NORM),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_found_inside_wrappers(wrap, name, norm):
    found = values(shrewjax.metrics(after_one_update(wrap(shrewjax.clip_by_global_norm(1.0)))))
    assert found[name] == pytest.approx(norm)


def test_found_inside_inject_hyperparams():
    state = after_one_update(optax.inject_hyperparams(shrewjax.clip_by_global_norm)(max_norm=1.0))
    assert values(shrewjax.metrics(state)) == {
        "inner_state/grad_norm": pytest.approx(NORM),
        "inner_state/clip_scale": pytest.approx(1 / NORM),
    }


def test_window_is_reported_and_inner_values_date_from_the_last_window_that_closed():
    params = jnp.zeros(2)
    tx = shrewjax.accumulate(shrewjax.clip_by_global_norm(1.0), 2, nonfinite="drop_microbatch")
    state, seen = tx.init(params), []
    for g in ([3.0, 4.0], [3.0, 4.0], [jnp.nan, 1.0]):
        _, state = tx.update(jnp.array(g), state, params, weight=3)
        seen.append(values(shrewjax.metrics(state)))
    expected = {"micro_step": [1, 0, 1], "windows": [0, 1, 1], "applied": [0, 1, 0], "weight_sum": [3, 0, 0],
                "dropped": [0, 0, 1], "window_bad": [0, 0, 0], "inner_state/grad_norm": [0, 5, 5]}  # fmt: skip
    for name, want in expected.items():
        assert [s[name] for s in seen] == want, name


def test_under_jit_and_vmap():
    tx = optax.chain(shrewjax.clip_by_global_norm(1.0), shrewjax.clip_by_leaf_norm(0.9))

    @quick_jit
    @jax.vmap
    def norms(g):
        return shrewjax.metrics(tx.update({"a": g, "b": 0 * g}, tx.init({"a": g, "b": g}))[1])

    found = norms(jnp.array([[3.0, 4.0], [0.3, 0.4]]))
    np.testing.assert_allclose(found["0/grad_norm"], [5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(found["1/grad_norm_max"], [1, 0.5], rtol=1e-6)
    np.testing.assert_allclose(found["1/clipped_share"], [0.5, 0])


def test_host_driven_window():
    window = shrewjax.GradAccumulator(2)
    state = window.add(window.init(jnp.zeros(2)), jnp.ones(2), weight=5)
    assert values(shrewjax.metrics(state)) == {
        "micro_step": 1, "windows": 0, "weight_sum": 5, "window_bad": 0, "dropped": 0
    }  # fmt: skip


def test_in_an_nnx_optimizer_inside_a_jitted_step():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    tx = shrewjax.accumulate(lenient(optax.chain(shrewjax.clip_by_global_norm(0.1), optax.adam(0.1))), 2)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        grads = nnx.grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads, weight=2)
        return shrewjax.metrics(optimizer.opt_state), optax.tree.norm(jax.tree.leaves(grads))

    seen = [step(model, optimizer, jnp.ones((3, 2))) for _ in range(2)]
    (first, _), (last, norm) = seen
    assert float(first["micro_step"]) == 1
    assert float(last["inner_state/0/grad_norm"]) == pytest.approx(float(norm), rel=1e-5)
    assert values(shrewjax.metrics(optimizer.opt_state)) == values(last)


def test_percentile_clips_show_their_bound_and_what_they_clipped():
    grads = {"a": jnp.float32([1, 2, 3]), "b": jnp.float32([10, 20, 60])}
    for scope, bound, fraction in (("global", 6.5, 0.5), ("leaf", 20.0, 2 / 6)):
        tx = shrewjax.clip_by_percentile(50, scope=scope)
        _, state = tx.update(grads, tx.init(grads))
        assert values(shrewjax.metrics(state)) == {"bound": bound, "clipped_fraction": np.float32(fraction)}
