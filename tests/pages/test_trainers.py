"""The ways of docs/guide/trainers.md, and the section on Keras of docs/from_torch.md.

The oracle is `jax.grad` of all tokens of a window at once, with Optax alone. Beside it stands the usual mistake.
"""

import pathlib
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import distance, norm, run_page
from speed import quick_jit, users_jit

import shrewjax

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("as_users_have_it")]

DOCS = pathlib.Path(__file__).parent.parent.parent / "docs"
SIZES = 2 * (8, 8, 3, 1, 8, 5, 1)  # two epochs; tokens of windows of four and of three
WINDOWS = [range(4), range(4, 7), range(7, 11), range(11, 14)]


@pytest.fixture(scope="module")
def guide():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return run_page(DOCS / "guide" / "trainers.md")


def joined(batches, window):
    return [np.concatenate([batches[i][part] for i in window]) for part in range(3)]


def mean_grad(w, batch):
    """By hand, in float64."""
    x, y, mask = (np.float64(part) for part in batch)
    return 2 * x.T @ (mask * (x @ w - y)) / mask.sum()


def windows_of(inner, accum_steps):
    return shrewjax.accumulate(inner, accum_steps, reduction="sum_over_weights")


def clipped(g, threshold=1.0):
    return g * min(1, threshold / norm(g))


def trainer(loss_fn, params, tx, batches):
    """Stands for a trainer that calls `tx.update` without other arguments."""

    def step(params, opt_state, batch):
        grads = jax.grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state, step = tx.init(params), quick_jit(step)
    for batch in batches:
        params, opt_state = step(params, opt_state, batch)
    return params


def micro_batches(sizes):
    rng = np.random.default_rng(0)
    for size in sizes:
        x, y = rng.normal(size=(8, 3)), rng.normal(size=8)
        yield np.float32(x), np.float32(y), np.arange(8) < size


# --- Optimizers that call the loss -------------------------------------------------------------------------------


def regression():
    x, y = (np.random.default_rng(i).normal(size=shape).astype("f") for i, shape in enumerate([(16, 3), (16,)]))
    return (x, y, np.ones(16, bool)), np.linalg.lstsq(x.astype(float), y.astype(float))


def test_an_optimizer_that_takes_the_loss_finds_the_whole_batchs_minimum(guide):
    batch, (best, (rest,), *_) = regression()
    params = {"w": jnp.zeros(3)}
    state = guide["lbfgs"].init(params)
    for _ in range(5):
        params, state, loss = guide["lbfgs_step"](params, state, batch)
    np.testing.assert_allclose(params["w"], best, rtol=1e-3)
    np.testing.assert_allclose(loss, rest / len(batch[0]), rtol=1e-3)


@pytest.mark.filterwarnings("ignore")  # of jaxopt, which is old
def test_the_lines_for_other_packages_do_with_micro_batches_what_they_do_with_the_loss(guide):
    needs = "need the extra solvers: see tests/README.md"
    names = {name: pytest.importorskip(name, reason=needs) for name in ("optimistix", "blackjax", "jaxopt")}
    (lines,) = re.findall(r"```py\n(.*?)```", (DOCS / "guide" / "trainers.md").read_text(), re.DOTALL)
    batch, (best, *_) = regression()
    names |= guide | {
        "params": {"w": jnp.zeros(3)},
        "batch": jax.tree.map(jnp.asarray, batch),
        "log_prior": lambda params: -jnp.sum(params["w"] ** 2),
    }
    whole = names | {"of_batch": names["loss_fn"]}
    for namespace in (names, whole):
        exec(compile(lines, "trainers.md", "exec"), namespace)
    for found in (names["solution"].value, names["result"].params):
        np.testing.assert_allclose(found["w"], best, atol=1e-3)

    def drawn(sampler):
        state = sampler.init({"w": jnp.ones(3)})
        return users_jit(sampler.step)(jax.random.key(0), state)[0].position["w"]

    np.testing.assert_allclose(drawn(names["sampler"]), drawn(whole["sampler"]), rtol=1e-4)


# --- Trainers that get micro-batches -----------------------------------------------------------------------------


def test_micro_batched_as_the_trainers_loss_takes_the_steps_of_the_whole_batch(guide):
    """The mean of the losses of micro-batches is the mistake."""
    batches = [tuple(joined([*micro_batches(SIZES)], range(4)))] * 3
    start, tx = {"w": jnp.zeros(3)}, optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    w = np.zeros(3)
    for batch in batches:
        w = w - 0.1 * clipped(mean_grad(w, batch))
    unweighted = shrewjax.micro_batched(guide["loss_fn"], 4)
    right, wrong = (trainer(loss, start, tx, batches)["w"] for loss in (guide["of_batch"], unweighted))
    np.testing.assert_allclose(right, w, rtol=2e-6)
    assert distance(wrong, w) > 1e-3


def test_the_count_as_a_gradient_takes_the_steps_of_windows_of_tokens(guide):
    """Windows end with their epochs. `optax.MultiSteps`, which is given the same windows, is the mistake."""
    batches, start = [*micro_batches(SIZES)], {"w": jnp.zeros(3), "count": jnp.zeros(())}
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    tx = guide["weight_from_gradient"](windows_of(inner, guide["epochs_of_seven"]))
    found = trainer(guide["counted_loss"], start, tx, batches)
    w = np.zeros(3)
    for window in WINDOWS:
        w = w - 0.1 * clipped(mean_grad(w, joined(batches, window)))
    multi = optax.MultiSteps(inner, guide["epochs_of_seven"])
    wrong = trainer(guide["loss_fn"], {"w": jnp.zeros(3)}, multi, batches)
    np.testing.assert_allclose(found["w"], w, rtol=2e-6)
    assert found["count"] == 0
    assert distance(wrong["w"], w) > 0.05


def on_two_devices(reduce, factor):
    """A trainer whose devices have micro-batches of their own. It reduces and scales gradients, and clips them."""

    def trainer(loss_fn, params, tx, batches):
        def step(params, opt_state, batch):
            grads = jax.vmap(
                lambda own: jax.tree.map(lambda g: factor * reduce(g, "data"), jax.grad(loss_fn)(params, own)),
                axis_name="data", out_axes=None,
            )(batch)  # fmt: skip
            grads, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        opt_state, step = tx.init(params), quick_jit(step)
        for batch in batches:
            params, opt_state = step(params, opt_state, batch)
        return params

    return trainer


@pytest.mark.parametrize("reduce", [jax.lax.pmean, jax.lax.psum])
def test_the_count_survives_a_trainer_that_reduces_scales_and_clips_gradients(guide, reduce):
    """The mean with the count as `weight=`, without e and the sum, is the mistake."""
    batches = [*micro_batches(SIZES)]
    pairs = [
        tuple(np.stack(x) for x in zip(*two, strict=True)) for two in zip(batches[::2], batches[1::2], strict=True)
    ]
    inner, start = optax.sgd(0.1), {"w": jnp.zeros(3), "count": jnp.zeros(())}
    train = on_two_devices(reduce, 0.37)
    w = np.zeros(3)
    for window in (range(6), range(6, 12)):
        w = w - 0.1 * mean_grad(w, joined(batches, window))
    tx = guide["weight_from_gradient"](windows_of(inner, 3))
    np.testing.assert_allclose(train(guide["counted_loss"], start, tx, pairs[:6])["w"], w, rtol=2e-6)

    def mean_and_count(params, batch):
        n, c = guide["count"](params, batch), params["count"]
        return guide["loss_fn"](params, batch) + n * (c - jax.lax.stop_gradient(c))

    wrong = guide["weight_from_gradient"](shrewjax.accumulate(inner, 3))
    assert distance(train(mean_and_count, start, wrong, pairs[:6])["w"], w) > 0.05


def test_a_trainer_that_passes_its_own_words_and_keywords_runs(guide):
    tx = guide["weight_from_gradient"](windows_of(optax.sgd(1.0), 1))
    params = {"w": jnp.zeros(3), "count": jnp.zeros(())}
    grads = {"w": jnp.full(3, 6.0), "count": jnp.float32(2)}
    updates, _ = tx.update(updates=grads, state=tx.init(params), params=params, value=1.0)
    np.testing.assert_array_equal(updates["w"], np.full(3, -3.0))
    with pytest.raises(AssertionError, match="must differentiate the count"):
        tx.update({"w": jnp.ones(3)}, tx.init(params), params)


class Fields(eqx.Module):
    w: jax.Array
    count: jax.Array


class Variables(nnx.Module):
    def __init__(self):
        self.w, self.count = nnx.Param(jnp.zeros(3)), nnx.Param(jnp.zeros(()))


@pytest.mark.parametrize("kind", ["equinox", "nnx"])
def test_the_wrapper_finds_the_count_in_other_trees(guide, kind):
    params = Fields(jnp.zeros(3), jnp.zeros(())) if kind == "equinox" else nnx.state(Variables(), nnx.Param)
    leaves, treedef = jax.tree.flatten(params)
    tx = guide["weight_from_gradient"](windows_of(optax.sgd(1.0), 2))

    def updates(params):
        state = tx.init(params)
        for number, count in ((1.0, 3.0), (5.0, 1.0)):
            grads = treedef.unflatten([jnp.full(x.shape, number if x.ndim else count) for x in leaves])
            found, state = tx.update(grads, state, params)
        return found

    for x in jax.tree.leaves(quick_jit(updates)(params)):
        np.testing.assert_array_equal(x, np.full(x.shape, -1.5 if x.ndim else 0))


# --- docs/from_torch.md: Keras ------------------------------------------------------------------------------------


def keras_sgd(gradients, rate, clip):
    """Keras's loop with `gradient_accumulation_steps=4`, in float64: the rate is that of the micro-batch's number."""
    w = dict.fromkeys(gradients[0], 0)
    for i in range(3, len(gradients), 4):
        mean = {k: np.mean([np.float64(g[k]) for g in gradients[i - 3 : i + 1]], axis=0) for k in w}
        w = {k: w[k] - rate(i) * g for k, g in clip(mean).items()}
    return w


def test_keras_clips_by_variable_and_its_schedules_count_micro_batches():
    rng = np.random.default_rng(0)
    gradients = [{k: np.float32(1 + rng.normal(size=n)) for k, n in (("a", 4), ("b", 1))} for _ in range(12)]
    text = (DOCS / "from_torch.md").read_text()
    assert "`clip_by_leaf_norm(1.0)`" in text
    assert "optax.sgd(lambda w: schedule(4 * w + 3))" in text
    schedule = optax.linear_schedule(0.1, 0.0, 12)
    keras = keras_sgd(gradients, lambda i: 0.1 * (1 - i / 12), lambda g: {k: clipped(x) for k, x in g.items()})

    def trained(clip, rate):
        tx, start = shrewjax.accumulate(optax.chain(clip, optax.sgd(rate)), 4), {"a": jnp.zeros(4), "b": jnp.zeros(1)}

        def step(carry, g):
            w, state = carry
            return shrewjax.apply_gradients(tx, g, state, w), None

        (w, _), _ = jax.lax.scan(step, (start, tx.init(start)), jax.tree.map(lambda *x: np.stack(x), *gradients))
        return w

    def counting_micro_batches(w):
        return schedule(4 * w + 3)

    clip, of_all = shrewjax.clip_by_leaf_norm(1.0), shrewjax.clip_by_global_norm(1.0)
    rows = quick_jit(
        lambda: [
            trained(clip, counting_micro_batches), trained(of_all, counting_micro_batches), trained(clip, schedule)
        ]
    )()  # fmt: skip
    right, *wrong = [distance(w, keras) for w in rows]
    assert right < 2e-6
    assert min(wrong) > 0.1
