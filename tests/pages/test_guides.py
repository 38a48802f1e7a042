"""The recipes of the guides give what an oracle gives that is not theirs, and the usual mistake does not.

With `-s`, tests print the figures of the pages.
"""

import functools
import pathlib
import re
import runpy
from types import SimpleNamespace

import fit_micro_batches
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from helpers import bits, distance, mesh_of, norm, own_params, run_page
from PIL import Image
from speed import quick_jit, users_jit

import shrewjax

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("as_users_have_it")]

DOCS = pathlib.Path(__file__).parent.parent.parent / "docs"


@functools.cache
def page(name):
    """The names that the code of a page defines; a model of the test's own replaces the page's by `vars(page)`."""
    return SimpleNamespace(names=run_page(DOCS / name))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


# --- docs/guide/any_loss.md, how_it_is_divided.md ----------------------------------------------------------------

CHARACTERS, WIDTH, SAMPLES, TIME = 11, 6, 16, 9
LENGTHS = np.array([9, 1, 2, 0, 0, 3, 9, 0, 1, 2, 5, 0, 0, 0, 0, 0])  # nothing counts in the last prompt
PROMPT = np.arange(SAMPLES) // 4


@pytest.fixture(scope="module")
def losses():
    # The first test that asks for the page may have turned float64 on.
    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return SimpleNamespace(**page("guide/any_loss.md").names)


def towers(losses):
    shapes = {"pixels": (12, 16), "image": (16, 8), "embedding": (20, 16), "text": (16, 8)}
    params = losses.normal(jax.random.key(0), **shapes) | {"temperature": np.log(1 / 0.07)}
    return jax.tree.map(np.float64, params), normal(32, 12), np.random.default_rng(1).integers(0, 20, (32, 5))


def experts(losses):
    shapes = {"embedding": (512, 8), "router": (8, 4), "experts": (4, 8, 8), "readout": (8, 512)}
    params = losses.normal(jax.random.key(4), **shapes)
    return jax.tree.map(np.float64, params), losses.tokens, np.arange(12) < np.arange(1, 17)[:, None]


@pytest.mark.usefixtures("x64_only")
@pytest.mark.parametrize("name", ["token_loss", "grpo_loss", "expert_loss", "clip_loss"])
def test_each_loss_of_the_page_is_plain_jax_of_the_whole_batch(losses, name):
    """And the mean over micro-batches, which is the mistake, is another."""
    params = jax.tree.map(np.float64, losses.params)
    text = normal(3, 16, 12)
    loss, given = {
        "token_loss": (losses.token_loss, (params, losses.tokens, np.float64(losses.mask))),
        "grpo_loss": (
            losses.grpo_loss,
            (params, losses.tokens, np.float64(losses.mask), -np.abs(text[0]), text[1] - 3, text[2, :, 0]),
        ),
        "expert_loss": (losses.expert_loss, experts(losses)),
        "clip_loss": (losses.clip_loss, towers(losses)),
    }[name]
    divided = {"grpo_loss": losses.grpo, "expert_loss": losses.balanced, "clip_loss": losses.contrastive}
    ours = divided.get(name, shrewjax.value_and_grad(loss, 4))
    found, expected = quick_jit(lambda *args: (ours(*args), jax.value_and_grad(loss)(*args)))(*given)
    assert found[0] == pytest.approx(float(expected[0]), rel=1e-12)
    assert distance(found[1], expected[1]) < 1e-12
    in_parts = [jax.value_and_grad(loss)(given[0], *(x[i * 4 : i * 4 + 4] for x in given[1:]))[1] for i in range(4)]
    assert distance(jax.tree.map(lambda *x: sum(x) / 4, *in_parts), expected[1]) > 0.01


def test_the_page_shows_what_is_printed_of_its_program(tmp_path, capsys):
    text = (DOCS / "guide" / "how_it_is_divided.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    (tmp_path / "loss.py").write_text(code)
    runpy.run_path(str(tmp_path / "loss.py"))
    assert capsys.readouterr().out == shown


def attention_model(params, tokens):
    """Log-probabilities of the next tokens by one layer of causal attention, which never predicts the padding, 0."""
    x = params["embedding"][tokens[:, :-1]]
    scores = (x @ params["query"]) @ jnp.swapaxes(x @ params["key"], 1, 2)
    causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
    x = x + jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)) @ (x @ params["value"])
    logits = (x @ params["readout"]).at[..., 0].set(-jnp.inf)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)[..., 0]


def grpo_by_hand(params, tokens, mask, before, reference, reward):
    """From the tokens that count alone, each mean as one of a list."""
    at = np.nonzero(mask)
    now = attention_model(params, tokens)[at]
    ratio = jnp.exp(now - before[at])
    groups = [reward[p == PROMPT] for p in range(4)]
    a = np.concatenate([(r - r.mean()) / (r.std() + 1e-4) for r in groups])[at[0]]
    gain = jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
    log_ratio = reference[at] - now
    means = [jnp.mean(gain[np.flatnonzero(at[0] == i)]) for i in np.unique(at[0])]
    return 0.1 * jnp.mean(jnp.exp(log_ratio) - log_ratio - 1) - sum(means) / len(means)


@pytest.mark.usefixtures("x64_only")
def test_grpo_of_the_page_is_that_of_the_tokens_that_count(losses, monkeypatch):
    """Padding of log-probability -inf, and texts in which nothing counts. Without any token, gradients are zeros."""
    shapes = dict.fromkeys(("query", "key", "value"), (WIDTH, WIDTH))
    shapes |= {"embedding": (CHARACTERS, WIDTH), "readout": (WIDTH, CHARACTERS)}
    params = {k: normal(*s, seed=i) for i, (k, s) in enumerate(shapes.items())}
    mask = np.arange(TIME) < LENGTHS[:, None]
    tokens = np.random.default_rng(2).integers(1, CHARACTERS, size=(SAMPLES, TIME + 1))
    tokens[:, 1:] *= mask  # padded
    before, reference = (-np.abs(normal(SAMPLES, TIME, seed=i)) - 1 for i in (3, 4))
    others = before, reference, normal(SAMPLES, seed=5)
    monkeypatch.setitem(losses.grpo_loss.__globals__, "log_probabilities", attention_model)
    step = quick_jit(shrewjax.value_and_grad(losses.grpo_loss, 4))
    value, grads = step(params, tokens, np.float64(mask), *others)
    expected, of_hand = quick_jit(jax.value_and_grad(lambda p: grpo_by_hand(p, tokens, mask, *others)))(params)
    assert value == pytest.approx(float(expected), rel=1e-12)
    assert distance(grads, of_hand) < 1e-12
    value, grads = step(params, tokens, np.zeros((SAMPLES, TIME)), *others)
    assert value == 0
    assert not any(np.any(g) for g in jax.tree.leaves(grads))


@pytest.mark.usefixtures("x64_only")
def test_mean_of_means_counts_each_sequence_prompt_or_packed_text_once(losses):
    x = normal(2, 9)
    row = np.array([[0, 0, 0, 1, 1, 2, 2, 2, 2], [3, 3, 3, 3, 3, 3, 4, 5, 5]])
    counted = np.array([[0.0, 1, 1, 0, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1, 0, 0, 1]])
    for unit, units in ((row, 6), (np.arange(2)[:, None], 2), (0, 1)):
        of = np.broadcast_to(unit, (2, 9))
        means = [x[(of == u) & (counted > 0)].mean() for u in np.unique(of) if counted[of == u].any()]
        assert losses.mean_of_means(x, counted, unit, units) == pytest.approx(np.mean(means), rel=1e-12)


def features(losses, params, pixels, tokens):
    """The embeddings of the page's loss."""
    image = jnp.tanh(pixels @ params["pixels"]) @ params["image"]
    return losses.normalized(image), losses.normalized(jnp.mean(params["embedding"][tokens], axis=1) @ params["text"])


def table_loss(params, image, text):
    """InfoNCE by the whole table of similarities."""
    table = jnp.exp(params["temperature"]) * image @ text.T
    return -sum(jnp.mean(jnp.diagonal(jax.nn.log_softmax(table, axis))) for axis in (0, 1)) / 2


@pytest.mark.usefixtures("x64_only")
def test_contrastive_losses_of_the_page_are_that_of_the_whole_table(losses):
    """On one device and on eight, and in blocks of eight rows."""
    params, *batch = towers(losses)

    def found(params, *batch):
        image, text = features(losses, params, *batch)
        sums = jax.nn.logsumexp(image @ text.T, axis=1)
        whole = jax.value_and_grad(lambda p: table_loss(p, *features(losses, p, *batch)))(params)
        gather = functools.partial(jax.lax.all_gather, axis_name="data", tiled=True)
        mapped = jax.shard_map(
            shrewjax.value_and_grad(lambda *args: jax.lax.pmean(losses.clip_loss(*args, gather), "data"), 2),
            mesh=mesh_of(data=jax.device_count()),
            in_specs=(jax.P(), jax.P("data"), jax.P("data")),
            out_specs=jax.P(),
        )
        return (
            whole,
            [step(params, *batch) for step in (losses.contrastive, mapped)],
            sums - losses.log_sums(image, text, block=8),
        )

    (value, grads), ours, difference = quick_jit(found)(params, *batch)
    assert np.max(np.abs(difference)) < 1e-12
    for our_value, our_grads in ours:
        assert our_value == pytest.approx(float(value), rel=1e-12)
        assert distance(our_grads, grads) < 1e-12


@pytest.mark.usefixtures("x64_only")
def test_a_pad_of_zeros_and_a_mask_that_is_uneven_over_devices_give_the_gradient_of_the_pairs_alone(losses):
    """A mean over a device's own rows is the mistake, and the plain quotient by the norm in `normalized`."""
    params, pixels, tokens = towers(losses)
    mask = np.arange(32) < 18  # the last three of eight devices have no pairs
    padded = np.where(mask[:, None], pixels, 0), tokens

    def loss(params, mask, *batch, is_right):
        image, v = features(losses, params, *batch)
        u = jnp.exp(params["temperature"]) * image
        everyones = functools.partial(jax.lax.all_gather, axis_name="data", tiled=True)
        both = sum(
            jax.nn.logsumexp(jnp.where(everyones(mask), a @ everyones(b).T, -jnp.inf), axis=1)
            for a, b in ((u, v), (v, u))
        )
        own = jnp.sum(jnp.where(mask, both / 2 - jnp.sum(u * v, axis=1), 0))
        if is_right:
            return jax.lax.psum(own, "data") / jax.lax.psum(jnp.sum(mask), "data")
        return jax.lax.pmean(own / jnp.maximum(jnp.sum(mask), 1), "data")

    def found(params):
        mapped = [
            jax.shard_map(
                shrewjax.value_and_grad(functools.partial(loss, is_right=is_right), 2),
                mesh=mesh_of(data=jax.device_count()),
                in_specs=(jax.P(), *[jax.P("data")] * 3),
                out_specs=jax.P(),
            )(params, mask, *padded)[1]
            for is_right in (True, False)
        ]
        pairs = pixels[:18], tokens[:18]
        with_norm = jax.grad(lambda z: jnp.sum(z / jnp.linalg.norm(z, axis=-1, keepdims=True)))(jnp.zeros((2, 3)))
        return jax.grad(lambda p: table_loss(p, *features(losses, p, *pairs)))(params), mapped, with_norm

    expected, (right, wrong), of_plain_quotient = quick_jit(found)(params)
    assert distance(right, expected) < 1e-12
    assert distance(wrong, expected) > 0.2
    assert np.isnan(of_plain_quotient).all()


def test_micro_batches_without_positives_keep_the_gradient_of_their_negatives_by_the_least_weight():
    """One by one; the weight 0 is the mistake. Against the whole batch by hand, in float64."""
    p, x = np.float32([0.5, -0.2]), np.float32(normal(12, 2))
    t = np.float32([1, 0] * 3 + [0] * 6)  # the last of three micro-batches has no positives
    scores = np.float64(x) @ p
    signed = np.where(t > 0, -scores, scores)
    value = np.log1p(np.exp(signed)).sum() / t.sum()
    grad = x.T @ (np.where(t > 0, -1, 1) / (1 + np.exp(-signed))) / t.sum()
    tx = shrewjax.accumulate(optax.identity(), 3, reduction="sum_over_weights")

    def detection_loss(p, x, t):
        return jnp.sum(jax.nn.softplus(jnp.where(t > 0, -x @ p, x @ p)))

    def streamed(p, least):
        state = tx.init(p)
        for rows in np.split(np.arange(12), 3):
            loss, grads = jax.value_and_grad(detection_loss)(p, x[rows], t[rows])
            weight = jnp.maximum(t[rows].sum(), least)
            updates, state = tx.update(grads, state, p, weight=weight, value=loss)
        return state.loss, updates

    (our_value, ours), (_, wrong) = quick_jit(lambda p: (streamed(p, 2.0**-30), streamed(p, 0.0)))(p)
    assert our_value == pytest.approx(value, rel=2e-6)
    assert distance(ours, grad) < 2e-6
    assert distance(wrong, grad) > 0.2


# --- docs/guide/nonfinite.md ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return SimpleNamespace(**page("guide/nonfinite.md").names)


def flags_of(metrics):
    """The leaves that the guard names."""
    return {name for name, count in counts_of(metrics).items() if count}


def counts_of(metrics):
    """How often each leaf was non-finite."""
    return {k.rpartition("nonfinite_leaf/")[2]: int(v) for k, v in metrics.items() if "nonfinite_leaf/" in k}


def test_guard_names_the_leaves_that_are_not_finite_and_the_clip_inside_it_does_not(broken):
    """The page's model: its backward pass breaks between two layers, and a good step follows the bad one."""
    grads = quick_jit(jax.grad(broken.loss_fn))
    found = grads(broken.params, broken.with_zeros, broken.y)
    bad = {name for name, g in found.items() if not np.isfinite(g).all()}
    assert bad == {"layer_0", "layer_1"} == flags_of(broken.metrics)

    # The mistake: norms by leaf inside the guard are those of the last step that was not skipped.
    inside = shrewjax.skip_nonfinite(optax.chain(shrewjax.clip_by_global_norm(1.0, per_leaf=True), optax.adamw(1e-3)))
    step = quick_jit(lambda g, s, p: shrewjax.apply_gradients(inside, g, s, p)[1])
    good = grads(broken.params, broken.x, broken.y)
    state = step(found, step(good, inside.init(broken.params), broken.params), broken.params)
    norms = {k: v for k, v in shrewjax.metrics(state).items() if "/leaf_norm/" in k}
    assert len(norms) == 4
    assert np.isfinite([*norms.values()]).all()


def test_stack_shows_which_micro_batch_was_dropped(broken):
    losses, grads = quick_jit(jax.vmap(jax.value_and_grad(broken.loss_fn), in_axes=(None, 1, 1)))(
        broken.params, broken.with_zeros.reshape(4, 8, 4), broken.y.reshape(4, 8)
    )
    assert np.isfinite(losses).all()  # the loss alone does not tell
    expected = np.all([np.isfinite(g).reshape(8, -1).all(axis=1) for g in jax.tree.leaves(grads)], axis=0)
    np.testing.assert_array_equal(broken.aux["kept"], expected.astype(int))
    assert 13 in np.concatenate(broken.suspects)


@pytest.mark.parametrize("at", [1, 3], ids=["a call", "the call that flushes"])
def test_a_guard_around_a_window_names_the_leaves_in_that_call_extends_the_window_and_loses_its_flush(broken, at):
    """The one inside a window whose policy drops the micro-batch names nothing."""
    inner = shrewjax.skip_nonfinite(optax.sgd(1.0), per_leaf=True)
    inside = shrewjax.accumulate(inner, 4, nonfinite="drop_micro_batch")
    params = {"a": jnp.zeros(2), "b": jnp.zeros(2)}

    def measured(tx):
        step = quick_jit(lambda g, s, flush: tx.update(g, s, params, flush=flush)[1])
        state = tx.init(params)
        for i in range(5):
            grads = {"a": jnp.ones(2), "b": jnp.where(i == at, jnp.nan, jnp.ones(2))}
            state = step(grads, state, i == 3)
            yield shrewjax.metrics(state)

    assert not any(flags_of(metrics) for metrics in measured(inside))
    found = [*measured(broken.naming)]
    assert [flags_of(metrics) for metrics in found] == [set()] * at + [{"b"}] * (5 - at)
    assert [int(metrics["skip_nonfinite/skipped"]) for metrics in found] == [0] * at + [1] * (5 - at)
    steps = [int(metrics["accumulate/micro_step"]) for metrics in found]
    assert steps == {1: [1, 1, 2, 0, 1], 3: [1, 2, 3, 3, 0]}[at]  # at 3 the flush is lost, and the next call fills it


def test_update_norm_rises_while_the_gradients_norm_does_not():
    """Against Adam in float64. The gradients are drawn again."""
    rng, names = np.random.default_rng(0), page("recipes.md").names
    m = v = 0
    expected = []
    for t in range(60):
        g = rng.choice([-1.0, 1.0], 100) if t < 50 else np.ones(100)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        expected.append(np.linalg.norm(m / (1 - 0.9 ** (t + 1)) / (np.sqrt(v / (1 - 0.999 ** (t + 1))) + 1e-8)))
    np.testing.assert_allclose(names["update_norms"], expected, rtol=1e-4)
    assert names["update_norms"][59] > 2 * max(names["update_norms"][30:50])


def test_loop_stops_after_three_skipped_steps_in_a_row_one_step_late(broken):
    calls = []

    def counted(*arguments):
        calls.append(1)
        return broken.step(*arguments)

    names = page("guide/nonfinite.md").names
    names["step"] = counted
    two, _ = broken.train(*jax.tree.map(jnp.copy, (broken.params, broken.opt_state)), broken.batches[:2])
    params, _ = broken.train(*jax.tree.map(jnp.copy, (broken.params, broken.opt_state)), broken.batches)
    names["step"] = broken.step
    assert len(calls) == 2 + (2 + 3 + 1)
    assert bits(params) == bits(two)


def test_counts_by_leaf_cost_no_read():
    """Counted in the compiled program. A clip with leaves outside the guard is the other way."""
    shapes = {f"w{i}": jax.ShapeDtypeStruct((512, 512), jnp.float32) for i in range(3)}
    size = 3 * 512 * 512 * 4

    def passes_of(tx):
        def step(params, state, x):
            grads = jax.grad(lambda p: sum(jnp.sum(jnp.tanh(x @ w)) for w in p.values()))(params)
            return shrewjax.apply_gradients(tx, grads, state, params)

        jitted = users_jit(step, donate_argnums=(0, 1))
        program = jitted.lower(shapes, jax.eval_shape(tx.init, shapes), np.ones((2, 512), np.float32)).compile()
        return program.cost_analysis()["bytes accessed"] / size

    def guard(**options):
        return shrewjax.skip_nonfinite(optax.adamw(1e-3), **options)

    plain = passes_of(guard())
    assert passes_of(guard(per_leaf=True)) == pytest.approx(plain, abs=0.01)
    outside = optax.chain(shrewjax.clip_by_global_norm(float("inf"), per_leaf=True), guard())
    assert passes_of(outside) > plain + 2


# --- docs/guide/experts.md ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moe():
    """The page's functions, parameters that never send a token to the last expert, and the gradients on one device."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        guide = SimpleNamespace(**page("guide/experts.md").names)
    params = jax.tree.map(np.array, guide.initial(jax.random.key(0)))  # NumPy's, because steps donate
    params["router"][:, -1] = params["router"][:, :2].mean(axis=1)
    grads = quick_jit(jax.grad(guide.loss_fn))(params, guide.x, guide.y)
    return guide, params, jax.tree.map(np.float64, jax.device_get(grads))


def expert_norms(leaf):
    return np.linalg.norm(leaf.reshape(len(leaf), -1), axis=1)


def test_each_expert_has_its_norm_and_its_clip_under_jit_and_in_shard_map(moe):
    guide, params, grads = moe
    whole = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
    _, jitted, metrics, by_expert = guide.step(
        guide.on_mesh(params), guide.one_by_one.init(guide.on_mesh(params)), guide.x, guide.y
    )
    _, mapped = guide.mapped_step(guide.on_mesh(params), guide.mapped_tx.init(guide.on_mesh(params)), guide.x, guide.y)
    assert mapped[0].grad_norm == pytest.approx(whole, rel=1e-6)
    for name in ("up", "down"):
        expected = expert_norms(grads[name])
        assert expected[-1] == 0 < expected[:-1].min()
        scale = np.minimum(1, 0.01 / np.where(expected > 0, expected, 0.01))
        for state in (jitted[0], mapped[1]):
            np.testing.assert_allclose(state.grad_norm[name], expected * min(1, 1 / whole), rtol=1e-5)
            np.testing.assert_allclose(state.clip_scale[name], scale, rtol=1e-5)
        np.testing.assert_allclose(by_expert[name], expected, rtol=1e-5)
    assert metrics["clip_by_leaf_norm/grad_norm_max"] == pytest.approx(
        max(expert_norms(grads["up"]).max(), expert_norms(grads["down"]).max(), np.linalg.norm(grads["router"])),
        rel=1e-5,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norm_of_experts_on_two_devices_is_that_of_all_and_a_devices_own_is_not(moe, dtype):
    guide, *_ = moe
    cast = functools.partial(jax.tree.map, lambda x: np.asarray(x).astype(dtype))
    sharded = {"shared": jax.P(), "experts": jax.P("expert")}
    two = {"experts": jax.P("expert")}
    assert guide.norm_of(cast(guide.two), two) == pytest.approx(120**0.5, rel=1e-6)
    assert guide.norm_of(cast(guide.four), sharded) == pytest.approx(10, rel=1e-6)

    def mapped(function, out):
        return quick_jit(jax.shard_map(function, mesh=guide.mesh, in_specs=(two,), out_specs=out))(cast(guide.two))

    assert float(mapped(lambda g: shrewjax.grad_norm(g, jnp.inf), jax.P())) == 8
    # The mistake: each device has the norm of its own experts. Their mean was DeepSpeed's.
    own = np.float64(mapped(lambda g: optax.tree.norm(jax.tree.map(jnp.float32, g))[None], jax.P("expert")))
    np.testing.assert_allclose(own, [20**0.5, 10], rtol=1e-6)
    assert own.mean() == pytest.approx(7.236, abs=1e-3)


def test_experts_beside_a_window_over_another_axis_are_counted_once(moe):
    """Each row of devices adds up its own tokens; each column has its own experts."""
    guide, params, grads = moe
    mesh = mesh_of(data=2, expert=2)
    specs = {"router": jax.P(), "up": jax.P("expert"), "down": jax.P("expert")}
    tx = shrewjax.accumulate(optax.chain(shrewjax.clip_by_global_norm(1.0), optax.sgd(0.1)), 2, sum_over="data")
    placed = jax.device_put(params, {k: jax.sharding.NamedSharding(mesh, s) for k, s in specs.items()})
    state = tx.init(placed)
    state_specs = shrewjax.state_specs(state)

    def own_forward(params, x):
        gates = jax.nn.softmax(x @ params["router"])
        chosen = gates * jax.nn.one_hot(jnp.argmax(gates, axis=-1), guide.experts)
        chosen = jax.lax.dynamic_slice_in_dim(chosen, jax.lax.axis_index("expert") * 2, 2, axis=1)
        hidden = jnp.tanh(jnp.einsum("bd,edf->ebf", x, params["up"]))
        out = jnp.einsum("ebf,efd->bed", hidden, params["down"])
        return jax.lax.psum(jnp.einsum("bed,be->bd", out, chosen), "expert")

    def step(params, state, x, y):
        own = own_params(params, "data")
        grads = jax.grad(lambda p: jnp.mean((own_forward(p, x) - y) ** 2))(own)
        return shrewjax.apply_gradients(tx, grads, state, params, weight=len(x))

    mapped = quick_jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(specs, state_specs, jax.P("data"), jax.P("data")), out_specs=(specs, state_specs)
        )
    )
    for i in range(2):
        placed, state = mapped(placed, state, guide.x[i::2], guide.y[i::2])
    assert shrewjax.metrics(state)["clip_by_global_norm/grad_norm"] == pytest.approx(norm(grads), rel=1e-5)


# --- docs/guide/windows.md ---------------------------------------------------------------------------------------


def test_moments_of_an_aux_move_running_averages_once_by_the_whole_batch_and_a_carry_moves_them_k_times():
    x, y = np.float32(1 + normal(16, 3)), np.float32(normal(16, seed=1))
    averages = jnp.zeros(3), jnp.ones(3)

    def normalized_loss(params, x, y):
        moments = jnp.mean(x, axis=0), jnp.mean(x**2, axis=0)
        scaled = (x - moments[0]) / jnp.sqrt(moments[1] - moments[0] ** 2 + 1e-5)
        return jnp.mean((scaled @ params["w"] - y) ** 2), moments

    def carried(params, averages, x, y):
        value, moments = normalized_loss(params, x, y)
        return value, ((), optax.incremental_update(moments, averages, 0.1))

    def found(params):
        (_, moments), _ = shrewjax.accumulated_value_and_grad(normalized_loss, 8, has_aux=True)(params, x, y)
        once = optax.incremental_update(moments, averages, 0.1)
        step = shrewjax.accumulated_value_and_grad(carried, 8, has_aux=True, carry_argnum=1, batch_argnums=(2, 3))
        return once, step(params, averages, x, y)[0][1][1]

    once, wrong = quick_jit(found)({"w": jnp.ones(3)})
    expected = 0.1 * np.mean(np.float64(x), axis=0), 0.9 + 0.1 * np.mean(np.float64(x) ** 2, axis=0)
    assert distance(once, expected) < 1e-6
    assert distance(wrong, expected) > 0.5


def test_a_line_search_in_a_window_is_exact_by_the_value_fn_of_the_whole_window():
    x, y = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[1.0, 1.0], [2.0, 8.0]])
    tx = shrewjax.accumulate(optax.lbfgs(), 2)

    def loss(p, x, y):
        return jnp.mean((p * x - y) ** 2)

    @quick_jit
    def step(p, state, x_i, y_i):
        value, grad = jax.value_and_grad(loss)(p, x_i, y_i)
        value_fn = lambda p: loss(p, x, y)  # noqa: E731
        return shrewjax.apply_gradients(tx, grad, state, p, value=value, grad=grad, value_fn=value_fn)

    p, state = jnp.float32(1), tx.init(jnp.float32(1))
    for i in range(8):
        p, state = step(p, state, x[i % 2], y[i % 2])
    assert p == pytest.approx(41 / 30, rel=1e-5)  # sum(x y) / sum(x**2)


def updates_of(tx, state, params, grads, **extra_args):
    """The parameters and the state after these gradients."""
    for g in grads:
        params, state = shrewjax.apply_gradients(tx, g, state, params, **extra_args)
    return params, state


def test_a_window_is_dropped_by_the_line_of_the_page_and_another_reduction_mixes_both():
    line = "tx.init(params)._replace(inner_state=state.inner_state, windows=state.windows)"
    assert f"`{line}`" in (DOCS / "guide" / "windows.md").read_text()
    tx, grads = shrewjax.accumulate(optax.adam(1e-2), 3), np.float32(normal(8, 4))
    params = jnp.zeros(4)
    start = updates_of(tx, tx.init(params), params, grads[:3])
    params, state = updates_of(tx, start[1], start[0], grads[3:5])
    state = eval(line)
    dropped, kept = (updates_of(tx, s, p, grads[5:]) for p, s in ((params, state), start))
    assert bits(dropped) == bits(kept)
    mean, total = (shrewjax.accumulate(optax.sgd(1.0), 2, reduction=r) for r in ("mean", "sum"))
    state = updates_of(mean, mean.init(0.0), 0.0, [1.0], weight=4)[1]
    assert updates_of(total, state, 0.0, [5.0], weight=4)[0] == -(4 * 1 + 5)  # the mean is 3, the sum 6


# --- docs/guide/equinox.md ---------------------------------------------------------------------------------------


def test_lora_in_equinox_begins_as_the_layer_and_trains_its_factors_alone():
    guide = SimpleNamespace(**page("guide/equinox.md").names)
    new, x = guide.eqx.combine(guide.trained, guide.frozen), jnp.float32(normal(3))
    layer = guide.model.layers[0]
    np.testing.assert_array_equal(guide.LoRALinear(layer, 2, jax.random.key(2))(x), layer(x))
    for old, adapted in zip(guide.model.layers, new.layers, strict=True):
        assert bits(adapted.linear) == bits(old)
        assert np.any(adapted.b)


# --- docs/recipes.md: a token budget -----------------------------------------------------------------------------


def test_padding_fills_whole_micro_batches():
    names = SimpleNamespace(**page("recipes.md").names)
    rows = np.arange(1, 31)
    batch = names.laid_out(rows, 16, 8)
    found = np.concatenate([batch[i::16] for i in range(16)])
    np.testing.assert_array_equal(found, np.r_[rows, np.zeros(16 * 8 - 30, int)])
    counts = [names.examples[2][i::16].sum() for i in range(16)]
    assert counts == [8, 8, 8, 6, *[0] * 12]


# --- docs/recipes.md: float16 ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return SimpleNamespace(**page("recipes.md").names)


def scale_of(half, first):
    return half.DynamicScale(fin_steps=jnp.int32(0), scale=jnp.float32(first), growth_interval=50)


def test_an_overflow_drops_its_micro_batch_and_halves_the_scale_within_the_window(half):
    """The window is the average of the other micro-batches, which came with two scales. All overflow: none is left."""
    x = np.random.default_rng(0).normal(size=(4, 8, 3)).astype(np.float32)
    x[1, 0, 0] = 60000
    y = np.ones(8, np.float32)
    params = {"w": jnp.full(3, 2.0)}
    kept = [quick_jit(jax.grad(half.half_loss))(params, x[i], y)["w"] for i in (0, 2, 3)]
    expected = norm(np.mean(kept, axis=0))
    state, scale = half.half_tx.init(params), scale_of(half, 2.0**8)
    for i in range(4):
        params, state, scale = half.half_step(params, state, scale, x[i], y)
    measured = shrewjax.metrics(state)
    assert (measured["accumulate/dropped"], measured["accumulate/windows"], scale.scale) == (1, 1, 2**7)
    assert measured["clip_by_global_norm/grad_norm"] == pytest.approx(expected, rel=2e-3)
    before = bits(params)
    for _ in range(4):
        params, state, scale = half.half_step(params, state, scale, x[1], y)
    assert bits(params) == before
    assert scale.scale == 2**3


def half_batches(half, model):
    """The page's step in plain JAX or in NNX, as a function of a batch that returns parameters and scale."""
    params, scale = {"w": jnp.full(3, 2.0)}, scale_of(half, 2.0**8).replace(growth_interval=2)
    if model == "plain":
        step, state = quick_jit(half.half_batch), half.guarded.init(params)

        def call(x, y):
            nonlocal params, state, scale
            params, state, scale = step(params, state, scale, x, y)
            return params["w"], scale, shrewjax.metrics(state)

        return call

    class Linear(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(params["w"])

    net = Linear()
    optimizer = shrewjax.flax.Optimizer(net, half.guarded, wrt=nnx.Param)

    @nnx.jit
    def nnx_step(net, optimizer, scale, x, y):
        def scaled(net, x, y):
            w, x, y = (jnp.float16(a) for a in (net.w[...], x, y))
            return scale.scale * half.half_loss({"w": w}, x, y)

        _, grads = shrewjax.flax.value_and_grad(scaled, 4)(net, x, y)
        metrics = optimizer.update(net, jax.tree.map(lambda g: g / scale.scale, grads))
        return metrics, half.next_scale(scale, metrics["skip_nonfinite/applied"])

    def nnx_call(x, y):
        nonlocal scale
        metrics, scale = nnx_step(net, optimizer, scale, x, y)
        return net.w[...], scale, metrics

    return nnx_call


@pytest.mark.parametrize("model", ["plain", "nnx"])
def test_a_whole_batch_that_overflows_is_skipped_by_name_and_halves_the_scale_and_others_double_it(half, model):
    """AdamW by hand from float64 gradients; the scale as `DynamicScale`'s own rule has it, which doubles at n + 1."""
    x = np.random.default_rng(0).normal(size=(7, 16, 3)).astype(np.float32)
    x[3, 0, 0] = 60000
    y = np.ones(16, np.float32)
    flaxs, call = scale_of(half, 2.0**8).replace(growth_interval=2), half_batches(half, model)
    w, m, v, t = np.full(3, 2.0), 0, 0, 0
    for i in range(7):
        ours, scale, metrics = call(x[i], y)
        if i != 3:
            g, t = 2 * np.float64(x[i]).T @ (np.float64(x[i]) @ w - 1) / 16, t + 1
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            w = w - 1e-3 * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8) + 1e-4 * w)
        flaxs = flaxs.value_and_grad(lambda w, bad=i == 3: jnp.where(bad, jnp.inf, 1.0) * w)(1.0)[0]
        assert (scale.scale, scale.fin_steps) == (flaxs.scale, flaxs.fin_steps), i
        np.testing.assert_allclose(ours, w, rtol=1e-4)
    assert counts_of(metrics) == {"w": 1}
    assert scale.scale == 2.0**9  # 2, 1 and 2 times the first


# --- examples/fit_micro_batches.py -------------------------------------------------------------------------------


def test_fit_example_finds_the_fewest_micro_batches_and_counts_what_they_do_not_shrink(capsys, tmp_path, monkeypatch):
    """On two devices, each with half of the batch. The table is the oracle of the choice, arithmetic of a column."""
    monkeypatch.setattr(fit_micro_batches, "LAYERS", 2)
    arguments = ["--devices", "2", "--rows", "4096", "--most", "2", "--budget", "17", "--margin", "0"]
    fit_micro_batches.main([*arguments, "--out", str(tmp_path / "new" / "fit.png")])
    printed = capsys.readouterr().out
    table = {
        int(row[0]): [float(x) for x in row[1:]]
        for row in re.findall(r"^ +(\d+) +(\S+) +(\S+) +(\S+) +(\S+)$", printed, re.M)
    }
    assert list(table) == [1, 2]
    in_mib = (3 * 4 * 256 * 256 * 4 + 2 * 2048 * 256 * 4) / 2**20  # parameters and two moments; half of x and of y
    for held, results, temporaries, total in table.values():
        assert held == pytest.approx(in_mib, abs=0.05)
        assert held + results + temporaries == pytest.approx(total, abs=0.2)
    fits = [k for k, row in table.items() if row[-1] <= 17]
    assert 1 not in fits
    assert f"fewest micro-batches within 17.0 MiB: {fits[0]}\n" in printed
    with Image.open(tmp_path / "new" / "fit.png") as figure:
        assert len(figure.getcolors(figure.width * figure.height)) > 20


def test_fit_example_says_what_is_missing_if_nothing_fits():
    mib = 2**20
    memory = {k: fit_micro_batches.Memory(20 * mib, 0, t * mib) for k, t in ((1, 70), (2, 40), (4, 43))}
    assert fit_micro_batches.fewest(iter(memory.items()), 60 * mib) == 2
    with pytest.raises(
        SystemExit, match=r"into 50.0 MiB: the least is 60.0 MiB, 10.0 MiB too much. .* 20.0 MiB are param"
    ):
        fit_micro_batches.fewest(iter(memory.items()), 50 * mib)
    assert fit_micro_batches.divisors(24, 2) == [1, 2, 3, 4, 6, 12]
    with pytest.raises(SystemExit, match="--devices 99 needs as many devices"):
        fit_micro_batches.main(["--devices", "99"])


# --- schedules, and a threshold from a run -----------------------------------------------------------------------


def test_schedules_count_windows_inside_and_steps_of_whole_batches():
    """By arithmetic: three windows at 1, 2/3 and 1/3. A schedule of micro-batches, not divided, is the mistake."""

    def trained(tx, calls, k=1):
        def step(carry, call):
            params, state = carry
            flush, weight, bad = call
            loss_and_grad = shrewjax.value_and_grad(lambda p, x: p * jnp.mean(x), k)
            _, grads = loss_and_grad(params, jnp.ones(4))
            grads = jnp.where(bad, jnp.nan, grads)
            if k == 1:
                return shrewjax.apply_gradients(tx, grads, state, params, weight=weight, flush=flush), params
            return shrewjax.apply_gradients(tx, grads, state, params), params

        start = jnp.zeros(()), tx.init(jnp.zeros(()))
        (params, _), _ = quick_jit(lambda calls: jax.lax.scan(step, start, calls))(
            tuple(map(np.array, zip(*calls, strict=True)))
        )
        return float(params)

    schedule = optax.linear_schedule(1.0, 0.0, 3)
    plain = [(False, 1, False)] * 12
    assert trained(shrewjax.accumulate(optax.sgd(schedule), 4), plain) == pytest.approx(-2, rel=1e-6)
    wrong = shrewjax.accumulate(optax.sgd(optax.linear_schedule(1.0, 0.0, 12)), 4)
    assert trained(wrong, plain) == pytest.approx(-(1 + 11 / 12 + 10 / 12), rel=1e-6)
    # A window that is flushed after one counts; one of weight 0 and one that the guard skips do not.
    rows = [(True, 1, False)] + [(False, 0, False)] * 4 + [(False, 1, True)] * 4 + [(False, 1, False)] * 4
    guarded = shrewjax.accumulate(shrewjax.skip_nonfinite(optax.sgd(schedule)), 4)
    assert trained(guarded, rows) == pytest.approx(-(1 + 2 / 3), rel=1e-6)
    # A whole batch in four micro-batches is one step.
    assert trained(optax.sgd(schedule), plain[:3], k=4) == pytest.approx(-2, rel=1e-6)


def test_threshold_from_a_run_is_the_percentile_of_its_settled_norms():
    """Log-normal norms have a known percentile: e to the 1.2816. Warm-up steps that stay in are the mistake."""
    names = page("guide/clipping.md").names
    threshold_from = names["threshold_from"]
    norms = np.exp(normal(4100))
    norms[:100] *= 100
    norms[[300, 500]] = np.nan, np.inf
    norms[[700, 900]] = 1e6
    found, wrong = threshold_from(norms), threshold_from(norms, warmup_steps=0)
    assert found == pytest.approx(np.exp(1.2816), rel=0.05)
    assert wrong > 1.1 * np.exp(1.2816)
    settled = np.float64(names["norms"])[100:]
    assert np.mean(settled > threshold_from(names["norms"])) == pytest.approx(0.1, abs=0.01)
    assert np.mean(np.float64(names["norms"]) > threshold_from(names["norms"])) > 0.15  # with those of the warmup


# --- docs/guide/logging.md --------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_norm_after_clipping_is_the_product_of_two_metrics(scale):
    tx, grads = shrewjax.clip_by_global_norm(1.0), {"a": np.float32(scale * normal(6)), "b": np.float32([scale])}
    updates, state = quick_jit(tx.update)(grads, tx.init(grads))
    measured = shrewjax.metrics(state)
    product = measured["clip_by_global_norm/grad_norm"] * measured["clip_by_global_norm/clip_scale"]
    assert float(product) == pytest.approx(norm(updates), rel=1e-6)
    assert norm(updates) == pytest.approx(min(norm(grads), 1), rel=1e-6)


@pytest.mark.parametrize("nested", ["guard inside", "guard around", "clip alone"])
def test_changed_says_whether_the_call_changed_the_parameters(nested):
    """A NaN in the third of six micro-batches. `accumulate/applied` alone is the mistake, with a guard."""
    changed = page("guide/logging.md").names["changed"]
    sgd = optax.chain(shrewjax.clip_by_global_norm(1.0), optax.sgd(1.0))
    tx = {
        "guard inside": shrewjax.accumulate(shrewjax.skip_nonfinite(sgd), 2),
        "guard around": shrewjax.skip_nonfinite(shrewjax.accumulate(sgd, 2)),
        "clip alone": sgd,
    }[nested]

    def step(params, state, g):
        params, state = shrewjax.apply_gradients(tx, g, state, params)
        metrics = shrewjax.metrics(state)
        return params, state, changed(metrics), metrics.get("accumulate/applied", True)

    step, params, state, alone = quick_jit(step), jnp.zeros(2), tx.init(jnp.zeros(2)), []
    for i in range(6):
        before = params
        params, state, says, window = step(before, state, jnp.ones(2) * (np.nan if i == 2 and "guard" in nested else 1))
        assert says == np.any(params != before), i
        alone.append(says == window)
    assert all(alone) == (nested == "clip alone")


# --- docs/moving.md ---------------------------------------------------------------------------------------------


def test_large_updates_that_optax_skips_are_nan_in_a_window_that_is_extended():
    line = "jax.tree.map(lambda g: jnp.where(grad_norm(grads) ** 2 < m, g, jnp.nan), grads)"
    assert f"`{line}`" in (DOCS / "moving.md").read_text()
    m, sizes = 100.0, np.float32([1, 50, 1, 1, 50, 1, 1, 1])[:, None]
    batches = sizes * np.float32(normal(8, 4))
    skip = functools.partial(optax.skip_large_updates, max_squared_norm=m)
    old = optax.MultiSteps(optax.adam(1e-2), 3, should_skip_update_fn=skip)
    new = shrewjax.accumulate(optax.adam(1e-2), 3, nonfinite="extend_window")
    names = {"jax": jax, "jnp": jnp, "grad_norm": shrewjax.grad_norm, "m": m}
    theirs, ours = jnp.zeros(4), jnp.zeros(4)
    their_state, our_state = old.init(theirs), new.init(ours)
    for g in batches:
        updates, their_state = old.update(g, their_state, theirs)
        theirs = optax.apply_updates(theirs, updates)
        ours, our_state = shrewjax.apply_gradients(new, eval(line, names | {"grads": g}), our_state, ours)
    assert (our_state.windows, our_state.dropped) == (2, 2)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize(("away", "back"), [(6, 11), (6, 12), (8, 10)])
def test_a_job_that_returns_to_optax_goes_on_as_one_that_never_left(away, back):
    """It leaves and returns in mid-window, or at its end. A sum that is meaningless there does not stay."""
    names = page("moving.md").names
    x, y = normal(14, 8, 3), normal(14, 8, seed=1)

    def train(params, opt_state, steps, step):
        for i in steps:
            params, opt_state = step(params, opt_state, x[i], y[i])
        return params, opt_state

    def start():
        params = {"w": jnp.ones(3)}
        return params, names["old"].init(params)

    stayed, _ = train(*start(), range(14), names["old_step"])
    params, opt_state = train(*start(), range(away), names["old_step"])
    opt_state = shrewjax.from_optax(opt_state, names["new"], params)
    params, opt_state = train(params, opt_state, range(away, back), names["new_step"])
    if back == 12:
        assert np.max(np.abs(opt_state.gradient_sum["w"])) > 0
    opt_state = names["to_optax"](opt_state, params)
    params, _ = train(params, opt_state, range(back, 14), names["old_step"])
    np.testing.assert_allclose(params["w"], stayed["w"], rtol=0, atol=2e-6)
    assert np.max(np.abs(stayed["w"] - 1)) > 1e-3


def test_a_loss_scale_inside_the_loss_keeps_small_gradients_and_one_around_it_does_not():
    half_loss = page("recipes.md").names["half_loss"]
    small = jnp.full((8,), 2.0**-14, jnp.float16)
    params, x, y = {"w": jnp.zeros(3, jnp.float16)}, jnp.stack([small] * 3, axis=1), 2 * small
    dynamic = DynamicScale(scale=jnp.float32(2.0**15))
    of_batch = shrewjax.micro_batched(half_loss, 4)
    of_scaled = shrewjax.micro_batched(lambda *args: dynamic.scale * half_loss(*args), 4)
    *_, kept = dynamic.value_and_grad(lambda params: of_scaled(params, x, y) / dynamic.scale)(params)
    *_, lost = dynamic.value_and_grad(lambda params: of_batch(params, x, y))(params)
    np.testing.assert_array_equal(kept["w"], -(2.0**-26))  # 2 * 2**-13 * 2**-14
    assert not np.any(lost["w"])
