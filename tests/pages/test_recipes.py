"""The chains of docs/recipes.md and docs/guide/flax.md train, and do what the pages say, by arithmetic in float64."""

import functools
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import bits, norm, run_page
from speed import quick_jit

import shrewjax
import shrewjax.flax

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("as_users_have_it")]

DOCS = pathlib.Path(__file__).parent.parent.parent / "docs"
PAGE = DOCS / "recipes.md"
PAGE_NAMES = SimpleNamespace(**run_page(PAGE))


@functools.cache
def flax_page():
    """The names of the page for Flax. It compiles, so no worker runs it that has none of its tests."""
    return SimpleNamespace(**run_page(DOCS / "guide" / "flax.md"))


def train(tx, params, loss, steps):
    """Each step's loss, gradients, updates and metrics, and the parameters at the end."""

    @quick_jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, (value, grads, updates, shrewjax.metrics(state))

    state, history = tx.init(params), []
    for _ in range(steps):
        params, state, seen = step(params, state)
        history.append(jax.device_get(seen))
    return history, params


class Adam:
    """Adam's update of one array, before the learning rate, in float64."""

    def __init__(self, eps=1e-8):
        self.m = self.v = self.t = 0
        self.eps = eps

    def __call__(self, g):
        self.t += 1
        self.m = 0.9 * self.m + 0.1 * np.float64(g)
        self.v = 0.999 * self.v + 0.001 * np.float64(g) ** 2
        m, v = self.m / (1 - 0.9**self.t), self.v / (1 - 0.999**self.t)
        return m / (np.sqrt(v) + self.eps)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_muon_beside_adamw_clips_the_leaves_of_adamw_alone_and_reports_the_whole_norm():
    x = normal(32, 6, seed=1)
    y = jnp.tanh(x @ normal(6, 3, seed=2)) + 2
    params = {"kernel": 0.1 * normal(6, 3), "bias": jnp.zeros(3), "scale": jnp.ones(3)}

    def loss(params):
        return 10 * jnp.mean(((x @ params["kernel"] + params["bias"]) * params["scale"] - y) ** 2)

    history, _ = train(PAGE_NAMES.muon_beside_adamw, params, loss, 60)
    assert history[-1][0] < history[0][0] / 3

    muon = optax.contrib.muon(0.02)
    muon_state = muon.init({"kernel": params["kernel"]})
    adams, weights = {"bias": Adam(), "scale": Adam()}, {k: np.float64(params[k]) for k in ("bias", "scale")}
    scales = []
    for _, grads, updates, measured in history[:10]:
        assert measured["clip_by_global_norm/grad_norm"] == pytest.approx(norm(grads), rel=1e-5)
        of_adamw = norm([grads["bias"], grads["scale"]])
        (name,) = (k for k in measured if k.endswith("adamw/inner_state/0/clip_by_global_norm/grad_norm"))
        assert name in PAGE.read_text()
        assert measured[name] == pytest.approx(of_adamw, rel=1e-5)
        scales.append(min(1, 1 / of_adamw))
        for key, adam in adams.items():
            expected = -0.01 * (adam(scales[-1] * grads[key]) + 1e-4 * weights[key])
            np.testing.assert_allclose(updates[key], expected, rtol=1e-4, atol=1e-8)
            weights[key] += expected
        alone, muon_state = muon.update({"kernel": grads["kernel"]}, muon_state, {"kernel": params["kernel"]})
        np.testing.assert_allclose(updates["kernel"], alone["kernel"], rtol=1e-3, atol=1e-6)
    assert min(scales) < 0.5


def test_lora_clips_by_the_norm_of_what_is_trained_and_leaves_frozen_leaves_alone():
    x, y = normal(32, 6, seed=1), normal(32, 4, seed=2)
    kernel = 5 * normal(6, 4)
    params = {"kernel": kernel, "lora_a": normal(6, 2, seed=3), "lora_b": jnp.zeros((2, 4))}

    def loss(params):
        return jnp.mean((x @ (params["kernel"] + params["lora_a"] @ params["lora_b"]) - y) ** 2)

    history, trained = train(flax_page().lora, params, loss, 60)
    assert history[-1][0] < history[0][0] / 2
    assert bits(trained["kernel"]) == bits(kernel)
    adams = {"lora_a": Adam(), "lora_b": Adam()}
    weights = {key: np.float64(params[key]) for key in adams}
    for _, grads, updates, measured in history[:10]:
        of_trained = norm([grads[key] for key in adams])
        (found,) = (v for k, v in measured.items() if k.endswith("grad_norm"))
        assert found == pytest.approx(of_trained, rel=1e-5)
        assert norm(grads) > 1.01 * of_trained
        for key, adam in adams.items():
            expected = -0.05 * (adam(min(1, 1 / of_trained) * grads[key]) + 1e-4 * weights[key])
            np.testing.assert_allclose(updates[key], expected, rtol=1e-4, atol=1e-7)
            weights[key] += expected


def test_leaves_of_lists_and_of_an_nnx_state_are_named():
    model = nnx.LoRALinear(3, 2, lora_rank=2, rngs=nnx.Rngs(0))
    parts = flax_page().trained_or_frozen(nnx.state(model, nnx.Param)["lora"])
    assert jax.tree.leaves(parts) == ["trained", "trained"]
    assert jax.tree.leaves(flax_page().trained_or_frozen(nnx.state(model, nnx.Not(nnx.LoRAParam)))) == ["frozen"] * 2
    layers = [{"kernel": 1.0, "lora_a": 1.0}, ({"lora_b": 1.0}, 2.0)]
    expected = [{"kernel": "frozen", "lora_a": "trained"}, ({"lora_b": "trained"}, "frozen")]
    assert flax_page().trained_or_frozen(layers) == expected


def test_optimizer_of_flax_holds_sums_of_the_trained_variables_alone():
    model = nnx.LoRALinear(3, 2, lora_rank=2, rngs=nnx.Rngs(0))
    tx = shrewjax.accumulate(optax.sgd(0.1), 2)
    optimizer = shrewjax.flax.Optimizer(model, tx, wrt=nnx.LoRAParam)
    sums = jax.tree.leaves(optimizer.opt_state.gradient_sum)
    assert sorted(x.shape for x in sums) == [(2, 2), (3, 2)]


def test_accumulate_inside_the_trained_part_holds_no_sums_of_frozen_leaves_and_trains_alike():
    inside, around = flax_page().accumulated_lora, shrewjax.accumulate(flax_page().lora, 4)

    def bytes_of_sums(tx):
        shapes = {"kernel": (1024, 1024), "lora_a": (1024, 8), "lora_b": (8, 1024)}
        params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        sums = jax.tree.leaves(optax.tree.get(jax.eval_shape(tx.init, params), "gradient_sum"))
        return sum(4 * x.size for x in sums)

    assert bytes_of_sums(inside) == 64 * 2**10
    assert bytes_of_sums(around) == pytest.approx(4.06 * 2**20, rel=1e-3)

    @functools.partial(quick_jit, static_argnums=0)
    def call(tx, params, state, grads, weight, flush):
        return shrewjax.apply_gradients(tx, grads, state, params, weight=weight, flush=flush)

    start = {"kernel": normal(6, 4), "lora_a": normal(6, 2, seed=3), "lora_b": jnp.zeros((2, 4))}
    results = []
    for tx in (inside, around):
        params, state = start, tx.init(start)
        for i in range(6):
            grads = jax.tree.map(lambda x, i=i: jnp.sin(x + i), start)
            params, state = call(tx, params, state, grads, float(1 + i), i == 5)
        (windows,) = (v for k, v in shrewjax.metrics(state).items() if k.endswith("accumulate/windows"))
        assert windows == 2
        results.append(params)
    assert bits(results[0]["kernel"]) == bits(results[1]["kernel"]) == bits(start["kernel"])
    for name in ("lora_a", "lora_b"):
        assert norm(results[1][name] - start[name]) > 0.1
        np.testing.assert_allclose(results[0][name], results[1][name], rtol=1e-6)


def test_an_update_after_adam_is_at_most_one_in_root_mean_square_where_adams_own_is_five():
    grads = np.concatenate([1e-3 * normal(1000, 20), np.ones((10, 20), np.float32)])
    tx, params = PAGE_NAMES.update_clipped, jnp.zeros(20)
    scan = quick_jit(lambda state: jax.lax.scan(lambda s, g: tx.update(g, s, params)[::-1], state, grads)[1])
    adam, own = Adam(), []
    for g, updates in zip(grads, np.asarray(scan(tx.init(params))), strict=True):
        u = adam(g * min(1, 1 / norm(g)))
        own.append(np.sqrt(np.mean(u**2)))
        np.testing.assert_allclose(updates, -0.1 * u / max(1, own[-1]), rtol=1e-3, atol=1e-6)
    assert own[-1] == pytest.approx(5, rel=0.1)
    history, _ = train(tx, normal(50), lambda w: jnp.sum((w - 1) ** 2), 60)
    assert history[-1][0] < history[0][0] / 10


def test_layers_of_a_scanned_stack_are_clipped_one_by_one():
    x, y = normal(16, 4, seed=1), normal(16, 4, seed=2)
    params = {
        "layers": {"kernel": normal(5, 4, 4) * jnp.array([0.3, 0.3, 3, 0.3, 0.3])[:, None, None]},
        "out": normal(4, 4),
    }

    def loss(params):
        hidden, _ = jax.lax.scan(lambda h, layer: (h + jnp.tanh(h @ layer["kernel"]), None), x, params["layers"])
        return 5 * jnp.mean((hidden @ params["out"] - y) ** 2)

    history, _ = train(PAGE_NAMES.layer_by_layer, params, loss, 80)
    assert history[-1][0] < history[0][0] / 3
    clipped = set()
    for _, grads, updates, _ in history:
        for i, g in enumerate(grads["layers"]["kernel"]):
            scale = min(1, 0.5 / norm(g))
            clipped.add((i, scale < 1))
            np.testing.assert_allclose(updates["layers"]["kernel"][i], -0.1 * scale * g, rtol=1e-4, atol=1e-8)
        g = grads["out"]
        np.testing.assert_allclose(updates["out"], -0.1 * min(1, 0.5 / norm(g)) * g, rtol=1e-4, atol=1e-8)
    assert len(clipped) > 5  # some layer was clipped in one step, and not in another


def test_one_leaf_can_stall_all_others_under_a_global_norm_and_adam_share_shows_it():
    x = normal(32, 4, seed=1)
    y = x @ normal(4, seed=2)
    params = {"body": jnp.zeros(4), "drift": jnp.zeros(())}

    def loss(params):
        return jnp.mean((x @ params["body"] - y) ** 2) + 1e11 * params["drift"]

    def body_loss(params):
        return float(jnp.mean((x @ params["body"] - y) ** 2))

    stalled, after = train(PAGE_NAMES.stalling, params, loss, 100)
    adam = Adam(PAGE_NAMES.EPS)
    for _, grads, updates, measured in stalled[:10]:
        scale = 1 / norm(grads)
        assert measured["clip_by_global_norm/clip_scale"] == pytest.approx(scale, rel=1e-5)
        np.testing.assert_allclose(updates["body"], -0.05 * adam(scale * grads["body"]), rtol=1e-4)
        share = PAGE_NAMES.adam_share(measured, "body", 4)
        assert np.sqrt(np.mean((updates["body"] / 0.05) ** 2)) == pytest.approx(share, rel=0.05)
        assert share < 0.01
        assert PAGE_NAMES.adam_share(measured, "drift", 1) == pytest.approx(1)
        assert measured["clip_by_global_norm/largest_share"] == pytest.approx(1)
        names = sorted(k for k in measured if "/leaf_norm/" in k)
        assert names[measured["clip_by_global_norm/largest_leaf"]].endswith("/drift")
    first = body_loss(params)
    assert body_loss(after) > 0.95 * first
    _, after = train(PAGE_NAMES.not_stalling, params, loss, 100)
    assert body_loss(after) < 0.01 * first
