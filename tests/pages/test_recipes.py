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
from helpers import bits, mesh_of, norm, run_page
from speed import quick_jit

import shrewjax
import shrewjax.flax

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("as_users_have_it")]

DOCS = pathlib.Path(__file__).parent.parent.parent / "docs"
PAGE = DOCS / "recipes.md"
with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
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
        name = "adamw/clip_by_global_norm/grad_norm"
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


def test_the_linen_step_of_the_page_drops_out_as_the_whole_batch_does():
    """One key for all micro-batches, which would draw the same for each, is the mistake."""
    guide = flax_page()
    x, y = normal(32, 3), normal(32, seed=1)
    state = guide.TrainState.create(
        apply_fn=guide.net.apply,
        params=jax.tree.map(jnp.copy, guide.state.params),
        tx=guide.clip_and_adam,
        key=jax.random.key(7),
    )
    key = jax.random.fold_in(state.key, 0)

    def loss(params, x, y):
        out = guide.net.apply({"params": params}, x, train=True, rngs={"dropout": key})
        return jnp.mean((out - y) ** 2)

    value, grads = quick_jit(jax.value_and_grad(loss))(state.params, x, y)
    alike = quick_jit(lambda p: sum(loss(p, x[i::4], y[i::4]) for i in range(4)) / 4)(state.params)
    _, metrics = guide.linen_step(state, x, y)
    assert metrics["loss"] == pytest.approx(float(value), rel=1e-6)
    assert metrics["clip_by_global_norm/grad_norm"] == pytest.approx(norm(grads), rel=1e-6)
    assert abs(alike / value - 1) > 1e-4


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


# --- Independent models ------------------------------------------------------------------------------------------


class ClippedAdamW:
    """clip_by_global_norm(1) and adamw(0.01) of one array, in float64."""

    def __init__(self, w):
        self.w, self.adam = np.float64(w), Adam()

    def step(self, g):
        self.w = self.w - 0.01 * (self.adam(g * min(1, 1 / norm(g))) + 1e-4 * self.w)


def linear_gradient(w, x, y):
    return 2 * np.float64(x).T @ (np.float64(x) @ w - y) / len(x)


@pytest.mark.parametrize("placed", ["vmap", "shard_map"])
def test_independent_models_train_as_in_a_loop_and_diloco_joins_them(placed):
    """One model's batch is a spike. Without `sharded_over=()` its norm clips the other models too, on devices."""
    n, rounds, steps = jax.device_count(), 2, 3
    x, y = np.array(normal(rounds, steps, n, 4, 3)), normal(rounds, steps, n, 4, seed=1)
    x[:, 1, 2] *= 100
    step = PAGE_NAMES.on_devices if placed == "shard_map" else quick_jit(PAGE_NAMES.models)

    start, velocity = np.zeros(3), 0
    alone = [ClippedAdamW(start) for _ in range(n)]
    params = {"w": jnp.zeros(3)}
    models = {"w": jnp.zeros((n, 3))}
    states, outer_state = jax.vmap(PAGE_NAMES.own.init)(models), PAGE_NAMES.outer.init(params)
    for r in range(rounds):
        for s in range(steps):
            for i, model in enumerate(alone):
                model.step(linear_gradient(model.w, x[r, s, i], y[r, s, i]))
            models, states = step(models, states, x[r, s], y[r, s])
        np.testing.assert_allclose(models["w"], [model.w for model in alone], rtol=1e-4)
        moved = start - np.mean([model.w for model in alone], axis=0)
        velocity = moved + 0.9 * velocity
        start = start - 0.7 * (moved + 0.9 * velocity)
        for model in alone:
            model.w = start
        params, outer_state, models = PAGE_NAMES.outer_step(params, outer_state, models)
        np.testing.assert_allclose(params["w"], start, rtol=1e-4)
        np.testing.assert_allclose(models["w"], [start] * n, rtol=1e-4)


def test_models_on_devices_that_share_a_norm_are_the_mistake():
    g = jnp.array([[3.0, 4], [0.3, 0.4]])
    mesh = mesh_of(model=2)

    def clipped(**options):
        tx, split = shrewjax.clip_by_global_norm(1.0, **options), jax.P("model")
        mapped = jax.shard_map(
            lambda g: tx.update(g, tx.init(g))[0], mesh=mesh, in_specs=split, out_specs=split, check_vma=False
        )
        return mapped(g)

    own, shared = quick_jit(lambda: (clipped(sharded_over=()), clipped(sharded_over="model")))()
    np.testing.assert_allclose(own, [[0.6, 0.8], [0.3, 0.4]], rtol=1e-6)
    np.testing.assert_allclose(shared, g / norm(g), rtol=1e-6)


# --- one clip, averages, growing batches ---------------------------------------------------------------------------


def test_one_clip_in_front_of_muon_and_adamw_is_by_the_whole_norm():
    """As the page says: 1.0 in front, and no clip inside."""
    parts = {"muon": optax.contrib.muon(0.02), "adamw": optax.adamw(0.01)}
    tx = optax.chain(shrewjax.clip_by_global_norm(1.0), optax.partition(parts, PAGE_NAMES.muon_or_adamw))
    params = {"kernel": normal(6, 3), "bias": normal(3, seed=1)}
    adam, muon = Adam(), parts["muon"]

    @quick_jit
    def both(g, state, of_muon):
        updates, state = tx.update(g, state, params)
        scaled = {"kernel": g["kernel"] / jnp.sqrt(sum(jnp.sum(x**2) for x in g.values()))}
        alone, of_muon = muon.update(scaled, of_muon, {"kernel": params["kernel"]})
        return updates, state, alone, of_muon

    state, of_muon = tx.init(params), muon.init({"kernel": params["kernel"]})
    for seed in range(3):
        g = {"kernel": normal(6, 3, seed=seed), "bias": 3 * normal(3, seed=seed + 9)}
        updates, state, alone, of_muon = both(g, state, of_muon)
        expected = -0.01 * (adam(g["bias"] / norm(g)) + 1e-4 * np.float64(params["bias"]))
        np.testing.assert_allclose(updates["bias"], expected, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(updates["kernel"], alone["kernel"], rtol=1e-3, atol=1e-6)


def test_an_average_of_parameters_moves_once_a_window():
    """Behind `accumulate` it moves four times as often."""
    text = "optax.tree.where(state.applied, optax.incremental_update(params, ema, 0.001), ema)"
    assert text in PAGE.read_text()
    tx = shrewjax.accumulate(optax.sgd(0.1), 4)

    @quick_jit
    def step(params, state, ema, behind):
        params, state = shrewjax.apply_gradients(tx, jnp.ones(2), state, params)
        ema = eval(text, {"optax": optax}, {"state": state, "params": params, "ema": ema})
        return params, state, ema, optax.incremental_update(params, behind, 0.001)

    start = jnp.zeros(2)
    carry = start, tx.init(start), start, start
    for _ in range(12):
        carry = step(*carry)
    expected = 0
    for window in range(1, 4):
        expected = 0.999 * expected - 0.001 * 0.1 * window
    np.testing.assert_allclose(carry[2], expected, rtol=1e-5)
    assert carry[3][0] / expected > 2


def test_a_growing_batch_has_the_rate_of_its_examples():
    """Warm-up and decay by examples seen. A schedule of windows that is as long as windows of one is the mistake."""
    lengths, rates = np.asarray(PAGE_NAMES.lengths), np.asarray(PAGE_NAMES.rates)
    seen = 8 * (np.cumsum(lengths) - lengths)
    assert seen[-1] < 4000 <= seen[-1] + 8 * lengths[-1]
    np.testing.assert_array_equal(lengths, 1 + seen // 1000)
    warm, decay = 0.01 * seen / 400, 0.01 * (1 + np.cos(np.pi * (seen - 400) / 3600)) / 2
    np.testing.assert_allclose(rates, np.where(seen < 400, warm, decay), rtol=1e-4, atol=1e-8)
    late = 0.01 * (1 + np.cos(np.pi * (len(rates) - 50) / 450)) / 2  # the last window's rate by 1 / 8 of the schedule
    assert late > 100 * rates[-1]

    tx = PAGE_NAMES.growing
    calls = int(np.sum(lengths[:130]))

    @quick_jit
    def train(state):
        def call(carry, _):
            params, state = shrewjax.apply_gradients(tx, jnp.float32(1), carry[1], carry[0])
            return (params, state), (params, state.applied, state.windows)

        return jax.lax.scan(call, (jnp.float32(0), state), length=calls)[1]

    params, applied, windows = train(tx.init(jnp.float32(0)))
    ends = np.flatnonzero(applied)
    np.testing.assert_array_equal(ends, np.cumsum(lengths)[:130] - 1)
    assert windows[-1] == 130
    moved = np.diff(np.float64(params)[ends], prepend=0)  # by AdamW, whose step is the rate for a constant gradient
    np.testing.assert_allclose(moved, -rates[:130], rtol=1e-3, atol=1e-6)


# --- loaders -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [20, 16, 3, 0])
def test_a_ragged_loader_comes_in_one_size_with_a_mask_and_a_flush(rows):
    """A generator in the shape of a torch DataLoader: tuples of arrays, of which the last are short."""
    x, y = np.array(normal(rows, 3)), np.array(normal(rows, seed=1))
    loader = ((x[i : i + 8], y[i : i + 8]) for i in range(0, rows, 8))
    calls = [*PAGE_NAMES.padded(loader, 8)]
    assert [call[0].shape for call in calls] == [(8, 3)] * len(calls)
    assert [call[3] for call in calls] == [i == len(calls) - 1 for i in range(len(calls))]
    for i, column in enumerate((x, y)):
        kept = [call[i][call[2]] for call in calls]
        np.testing.assert_array_equal(np.concatenate([column[:0], *kept]), column)


def test_an_empty_poisson_batch_adds_noise_and_runs_the_optimizer_by_weight_1():
    """The gradient by hand: clipped examples, over the expected number, and one noise a window."""
    x, noise = np.array(normal(2, 4, 3)), normal(3, seed=5)
    masks = np.array([[[1, 0, 1, 1], [0, 1, 0, 0]], [[0] * 4] * 2], bool)  # the second window is empty
    add_noise = optax.stateless(lambda g, _: g + noise / 4)
    tx = shrewjax.accumulate(optax.chain(add_noise, optax.sgd(1.0)), 2, reduction="sum")

    @functools.partial(quick_jit, static_argnames="counts")
    def step(params, state, x, mask, counts):
        clipped, _ = jax.vmap(lambda g: shrewjax.clip_grad_norm(g, 1.0))(x)
        grads = jnp.where(mask[:, None], clipped, 0).sum(axis=0) / 4
        weight = mask.sum() if counts else 1
        return shrewjax.apply_gradients(tx, grads, state, params, weight=weight)

    for counts in (False, True):
        params, expected = jnp.zeros(3), np.zeros(3)
        state = tx.init(params)
        for i, window in enumerate(masks):
            for own, mask in zip(x, window, strict=True):
                params, state = step(params, state, own, mask, counts)
                scales = np.minimum(1, 1 / np.linalg.norm(np.float64(own), axis=1))
                expected = expected - (own * (scales * mask)[:, None]).sum(axis=0) / 4
            expected = expected - np.float64(noise) / 4
            assert bool(state.applied) == (i == 0 or not counts)
        assert np.allclose(params, expected, rtol=1e-5) != counts


# --- logs ----------------------------------------------------------------------------------------------------------


def test_norms_by_layer_and_ratios_by_leaf_are_those_by_hand():
    grads = {"body": {"a": normal(4, 3), "b": normal(3, seed=1)}, "head": {"a": normal(5, seed=2)}}
    clip = shrewjax.clip_by_global_norm(1.0, per_leaf=True)
    new = jax.tree.map(lambda g: 1.01 * g, grads)
    metrics, ratios = quick_jit(
        lambda g, new: (shrewjax.metrics(clip.update(g, clip.init(g))[1]), PAGE_NAMES.update_ratios(new, g))
    )(grads, new)
    layers = PAGE_NAMES.norms_by_layer(jax.device_get(metrics))
    assert layers == {name: pytest.approx(norm(layer), rel=1e-6) for name, layer in grads.items()}
    leaves = PAGE_NAMES.norms_by_layer(jax.device_get(metrics), parts=2)
    assert leaves["body/b"] == pytest.approx(norm(grads["body"]["b"]), rel=1e-6)
    np.testing.assert_allclose(jax.tree.leaves(ratios), 0.01, rtol=1e-4)
