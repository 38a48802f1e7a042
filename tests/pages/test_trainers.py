"""The ways of docs/guide/trainers.md, and the section on Keras of docs/from_torch.md.

The oracle is `jax.grad` of all tokens of a window at once, with Optax alone. Beside it stands the usual mistake.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import distance, norm, run_page
from speed import quick_jit, users_jit

import shrewjax

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("as_users_have_it")]

DOCS = pathlib.Path(__file__).parent.parent.parent / "docs"
SIZES = (8, 8, 3, 1)  # tokens of the micro-batches of a batch


@pytest.fixture(scope="module")
def guide():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return run_page(DOCS / "guide" / "trainers.md")


def mean_grad(w, batch):
    """By hand, in float64."""
    x, y, mask = (np.float64(part) for part in batch)
    return 2 * x.T @ (mask * (x @ w - y)) / mask.sum()


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
    batches = [tuple(np.concatenate(x) for x in zip(*micro_batches(SIZES), strict=True))] * 3
    start, tx = {"w": jnp.zeros(3)}, optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    w = np.zeros(3)
    for batch in batches:
        w = w - 0.1 * clipped(mean_grad(w, batch))

    def mean_of_means(params, batch):
        return jnp.mean(jnp.stack([guide["loss_fn"](params, [x[i::4] for x in batch]) for i in range(4)]))

    right, wrong = (trainer(loss, start, tx, batches)["w"] for loss in (guide["of_batch"], mean_of_means))
    np.testing.assert_allclose(right, w, rtol=2e-6)
    assert distance(wrong, w) > 1e-3


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
