"""Each row of docs/from_torch.md gives torch's numbers, by a NumPy transcription of torch's loop.

`code` takes the row's own code from the page. Beside it stands the mistake that the row is there for. Other files have
the rows of frozen parameters (`test_recipes.py`), of schedules and of devices (`test_guides.py`).
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import distance, norm
from speed import quick_jit

import shrewjax

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("as_users_have_it")]

PAGE = (pathlib.Path(__file__).parent.parent.parent / "docs" / "from_torch.md").read_text()


def code(text, **names):
    """The value of an expression that stands on the page."""
    assert text in PAGE, text
    return eval(text, {"jax": jax, "jnp": jnp, "optax": optax, **vars(shrewjax), **names})


def normal(*shape, seed=0):
    return np.float32(np.random.default_rng(seed).normal(size=shape))


def torch_clip(grads, max_norm):
    """`torch.nn.utils.clip_grads_with_norm_`: the norm has 1e-6 added, and the factor is at most 1."""
    scale = min(1, max_norm / (norm(grads) + 1e-6))
    return {name: np.float64(g) * scale for name, g in grads.items()}


class TorchAdamW:
    """`torch.optim.AdamW`, which leaves a parameter without a gradient and its moments alone."""

    def __init__(self, w, lr, decay=1e-2):
        self.w, self.lr, self.decay, self.m, self.v, self.t = np.float64(w), lr, decay, 0, 0, 0

    def step(self, g):
        if g is not None:
            self.t += 1
            self.m, self.v = 0.9 * self.m + 0.1 * g, 0.999 * self.v + 0.001 * g**2
            self.w = self.w * (1 - self.lr * self.decay)
            spread = np.sqrt(self.v / (1 - 0.999**self.t)) + 1e-8
            self.w = self.w - self.lr * self.m / (1 - 0.9**self.t) / spread


def mean_loss(w, x, y):
    return jnp.mean((x @ w - y) ** 2)


def mean_grad(w, x, y):
    """Its gradient by hand, in float64."""
    x = np.float64(x)
    return 2 * x.T @ (x @ w - y) / len(x)


SIZES = (8, 8, 3, 8, 5, 1)  # in windows of four, of which the second is short
ROWS = [(normal(n, 3, seed=i), normal(n, seed=10 + i)) for i, n in enumerate(SIZES)]
WINDOWS = [ROWS[:4], ROWS[4:]]


def joined(rows):
    return [np.concatenate(parts) for parts in zip(*rows, strict=True)]


def trained(step, *carry):
    """What remains of the carry after all rows, of which the last one flushes."""
    for i, row in enumerate(ROWS):
        carry = step(*carry, *row, i == len(ROWS) - 1)
    return carry


# --- norms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "takes_off"), [(1e-6, 0.5), (1e-4, 0.01), (100, 0)])
def test_torchs_clip_has_1e_6_in_it_and_ours_has_not(size, takes_off):
    """Thresholds below the norm by a hair, so that only the 1e-6 differs."""
    grads = {"a": np.float32([0.6 * size]), "b": np.float32([0.8 * size])}
    total = code("grad_norm(grads)", grads=grads)
    assert total == pytest.approx(norm(grads), rel=1e-6)
    threshold = 0.999 * size
    text = "jax.tree.map(lambda g: g * jnp.minimum(1, 1.0 / (norm + 1e-6)), grads)"
    assert text in PAGE
    found = eval(text.replace("1.0", str(threshold)), {"jax": jax, "jnp": jnp, "norm": total, "grads": grads})
    np.testing.assert_allclose(found["a"], torch_clip(grads, threshold)["a"], rtol=1e-6)
    ours, _ = shrewjax.clip_grad_norm(grads, threshold)
    assert 1 - norm(found) / norm(ours) == pytest.approx(takes_off, rel=0.02, abs=1e-6)


def test_one_infinite_gradient_makes_all_nan_and_torchs_zeros():
    grads = {"a": np.float32([1, np.inf]), "b": np.float32([2])}
    with np.errstate(invalid="ignore"):
        theirs = torch_clip(grads, 1.0)
    np.testing.assert_array_equal([*theirs["a"], *theirs["b"]], [0, np.nan, 0])
    ours, total = quick_jit(lambda g: shrewjax.clip_grad_norm(g, 1.0))(grads)
    assert total == np.inf
    assert all(np.isnan(g).all() for g in ours.values())


def test_groups_are_clipped_by_their_own_norms_or_by_one():
    grads = {"a": np.float32([3, 4]), "b": np.float32([0.3, 0.4])}
    parts, labels = {"a": optax.sgd(1.0), "b": optax.sgd(2.0)}, {"a": "a", "b": "b"}
    clip = shrewjax.clip_by_global_norm(1.0)
    own = optax.partition({name: optax.chain(clip, part) for name, part in parts.items()}, labels)
    shared = optax.chain(clip, optax.partition(parts, labels))
    found = quick_jit(lambda g: [tx.update(g, tx.init(g))[0] for tx in (own, shared)])(grads)
    by_group = {name: torch_clip({name: g}, 1.0)[name] for name, g in grads.items()}
    for ours, clipped in zip(found, (by_group, torch_clip(grads, 1.0)), strict=True):
        np.testing.assert_allclose(ours["a"], -clipped["a"], rtol=1e-5)
        np.testing.assert_allclose(ours["b"], -2 * clipped["b"], rtol=1e-5)


def unit_norms(x):
    """timm's `unitwise_norm`, in torch's layout."""
    return np.sqrt(np.sum(np.float64(x) ** 2, axis=None if x.ndim <= 1 else tuple(range(1, x.ndim)), keepdims=True))


@pytest.mark.parametrize(
    ("axis", "shape", "to_torch"),
    [
        ("axis=1", (5, 4), (0, 1)),  # rows of an embedding
        ("axis=(0, 1)", (3, 4, 5), (2, 1, 0)),  # Conv1d: (width, in, out) to (out, in, width)
        ("axis=(0, 1, 3)", (3, 3, 4, 5), (2, 3, 0, 1)),  # ConvTranspose2d: (h, w, in, out) to (in, out, h, w)
        ("axis=(1, 2, 3)", (5, 1, 1, 1), (0, 1, 2, 3)),  # gains
        (None, (4, 5), (1, 0)),  # Linear and Conv2d, as they are
        (None, (3, 3, 4, 5), (3, 2, 0, 1)),
    ],
)
def test_agc_is_timms_by_the_pages_axis(axis, shape, to_torch):
    g, w = normal(*shape), 10 * normal(*shape, seed=1)
    clips = [shrewjax.adaptive_grad_clip(0.1)]
    if axis:
        assert f"`{axis}`" in PAGE
        clips.append(shrewjax.adaptive_grad_clip(0.1, **eval(f"dict({axis})")))
    found = quick_jit(lambda g, w: [tx.update(g, tx.init(w), w)[0] for tx in clips])(g, w)
    theirs, weights = (np.transpose(x, to_torch) for x in (g, w))
    limit, norms = 0.1 * np.maximum(unit_norms(weights), 1e-3), unit_norms(theirs)
    expected = np.where(norms > limit, theirs * (limit / np.maximum(norms, 1e-6)), theirs)
    assert 0 < np.mean(norms > limit) < 1
    np.testing.assert_allclose(np.transpose(found[-1], to_torch), expected, rtol=1e-5)
    if axis:
        assert distance(np.transpose(found[0], to_torch), expected) > 1e-2


# --- losses ------------------------------------------------------------------------------------------------------


def test_torchs_own_numbers_come_from_the_loss_over_k_and_a_sum():
    """Every window is divided by k, and every mean counts alike. With `reduction="mean"` they differ."""

    def train(reduction, k):
        tx = shrewjax.accumulate(optax.sgd(0.1), 4, reduction=reduction)

        @quick_jit
        def step(w, state, x, y, flush):
            grads = jax.grad(lambda w: mean_loss(w, x, y) / k)(w)
            return shrewjax.apply_gradients(tx, grads, state, w, flush=flush)

        return trained(step, jnp.zeros(3), tx.init(jnp.zeros(3)))[0]

    w = np.zeros(3)
    for window in WINDOWS:
        w = w - 0.1 * sum(mean_grad(w, *row) / 4 for row in window)
    np.testing.assert_allclose(train("sum", 4), w, rtol=1e-5)
    assert distance(train("mean", 1), w) > 0.1


def test_factors_of_tasks_belong_into_the_loss_and_cancel_in_weight():
    """Tasks take turns: the second counts a tenth."""

    def of_window(loss_factor, weight_factor):
        def loss(w, x, y, factor):
            return jnp.mean((x @ w - y) ** 2 * jnp.where(loss_factor, factor, 1))

        def weight(w, x, y, factor):
            return jnp.where(weight_factor, factor[0], 1)

        return shrewjax.accumulated_value_and_grad(loss, 2, weight_fn=weight)(jnp.zeros(3), x, y, factor)[1]

    x, y, factor = normal(8, 3), normal(8, seed=1), np.float32([1, 0.1] * 4)
    expected = (mean_grad(np.zeros(3), x[::2], y[::2]) + 0.1 * mean_grad(np.zeros(3), x[1::2], y[1::2])) / 2
    right, wrong = quick_jit(lambda: (of_window(True, False), of_window(False, True)))()
    np.testing.assert_allclose(right, expected, rtol=1e-5)
    assert distance(wrong, expected) > 0.1


def test_a_sum_over_the_number_of_items_is_the_whole_batchs_in_both_forms():
    x, y = joined(ROWS[:4])
    x, y = x[:24], y[:24]
    mask = np.arange(24) % 5 < np.arange(24) % 3  # different numbers in each of three micro-batches

    def summed(w, x, y, mask, items):
        return jnp.sum(jnp.where(mask, (x @ w - y) ** 2, 0)) / items

    def found(w, items):
        by_items = shrewjax.accumulated_value_and_grad(summed, 3, reduction="sum", batch_argnums=(1, 2, 3))
        divided = shrewjax.accumulated_value_and_grad(
            summed, 3, weight_fn=lambda w, x, y, mask, items: jnp.sum(mask), reduction="sum_over_weights",
            batch_argnums=(1, 2, 3),
        )  # fmt: skip
        return by_items(w, x, y, mask, items)[1], divided(w, x, y, mask, 1)[1]

    for ours in quick_jit(found)(jnp.ones(3), mask.sum()):
        np.testing.assert_allclose(ours, mean_grad(np.ones(3), x[mask], y[mask]), rtol=1e-5)


def test_truncated_backpropagation_passes_the_state_on_and_no_gradient_through_it():
    """K chunks of T steps of a linear recurrence, by hand. The batch as it comes has other chunks."""
    K, T, B = 3, 4, 2
    x = normal(K * T, B)

    def chunk(w, x, h):
        def advance(h, x):
            return w * h + x, (w * h + x) ** 2

        h, squares = jax.lax.scan(advance, h, x)
        return jnp.mean(squares), ((), h)

    w, h, expected = 0.7, np.zeros(B), 0
    for own in np.float64(x).reshape(K, T, B):
        dh = np.zeros(B)  # detached
        for row in own:
            h, dh = w * h + row, h + w * dh
            expected += np.mean(2 * h * dh) / T / K

    def found(w, x):
        loss_and_grad = shrewjax.accumulated_value_and_grad(chunk, K, has_aux=True, carry_argnum=2)
        ordered = code("x.reshape(K, T, B).swapaxes(0, 1).reshape(K * T, B)", x=x, K=K, T=T, B=B)
        (_, (_, end)), grad = loss_and_grad(w, ordered, jnp.zeros(B))
        return grad, end, loss_and_grad(w, x, jnp.zeros(B))[1]

    grad, end, wrong = quick_jit(found)(jnp.float32(w), x)
    np.testing.assert_allclose(grad, expected, rtol=1e-5)
    np.testing.assert_allclose(end, h, rtol=1e-5)
    assert abs(wrong / expected - 1) > 0.01


def test_centres_move_once_by_sums_and_counts_of_all_micro_batches():
    """Each centre goes a tenth of the way to the mean of its own rows. A carry moves it once a micro-batch."""
    x, own = normal(12, 2), np.arange(12) ** 2 % 3
    centres = jnp.asarray(normal(3, 2, seed=1))

    def loss(w, x, own, centres):
        one_hot = jax.nn.one_hot(own, 3)
        return jnp.mean((w * x - centres[own]) ** 2), {"sums": one_hot.T @ x, "counts": one_hot.sum(axis=0)}

    def carried(w, x, own, centres):
        value, aux = loss(w, x, own, centres)
        return value, ((), moved(centres, aux))

    def moved(centres, aux):
        return centres + 0.1 * jnp.where(
            aux["counts"][:, None] > 0, aux["sums"] / jnp.maximum(aux["counts"], 1)[:, None] - centres, 0
        )

    def found(w):
        step = shrewjax.accumulated_value_and_grad(loss, 4, has_aux=True, aux_reduction="sum", batch_argnums=(1, 2))
        (_, aux), _ = step(w, x, own, centres)
        chained = shrewjax.accumulated_value_and_grad(carried, 4, has_aux=True, carry_argnum=3)
        return moved(centres, aux), chained(w, x, own, centres)[0][1][1]

    expected = np.array(centres, np.float64)
    for i in set(own):
        expected[i] += 0.1 * (np.float64(x[own == i]).mean(axis=0) - centres[i])
    once, wrong = quick_jit(found)(jnp.float32(1))
    np.testing.assert_allclose(once, expected, rtol=1e-5)
    assert distance(wrong, expected) > 0.05


def test_the_scale_moves_once_a_window_as_torchs_does():
    """`GradScaler`: halved if any micro-batch of the window overflows, doubled after two windows without.

    Its own factor of 1 / k makes its scale k times ours.
    """
    k, largest = 3, 2.0**14
    gradients = np.float32([1, 2, 3, 1, 9, 2, 2, 2, 2, 1, 1, 1, 1, 2, 1, 3, 1, 1])  # 9 overflows at first
    tx = shrewjax.accumulate(optax.sgd(1.0), k, nonfinite="drop_window")

    @quick_jit
    def step(w, state, scale, good, g):
        scaled = jnp.where(scale * g > largest, jnp.inf, scale * g)  # a narrow dtype
        w, state = shrewjax.apply_gradients(tx, scaled / scale, state, w)
        lost = code("(state.micro_step == 0) & ~state.applied", state=state)
        good = jnp.where(lost, 0, good + state.applied)
        scale = jnp.where(lost, scale / 2, jnp.where(good == 2, 2 * scale, scale))
        return w, state, scale, good % 2

    w, scale, good, seen = 0.0, k * 2.0**11, 0, []
    for window in gradients.reshape(-1, k):
        scaled = scale * window / k
        if np.any(scaled > largest):
            scale, good = scale / 2, 0
        else:
            w, good = w - scaled.sum() / scale, good + 1
        if good == 2:
            scale, good = 2 * scale, 0
        seen.append((w, scale / k))
    ours = jnp.float32(0), tx.init(jnp.float32(0)), jnp.float32(2.0**11), jnp.int32(0)
    for i, g in enumerate(gradients):
        ours = step(*ours, g)
        if i % k == k - 1:
            np.testing.assert_allclose((ours[0], ours[2]), seen[i // k], rtol=1e-6)
    assert len({scale for _, scale in seen}) > 2


# --- steps -------------------------------------------------------------------------------------------------------


def test_adamw_decays_as_torchs_by_the_pages_argument():
    txs = code("optax.adamw(1e-3, weight_decay=1e-2)"), optax.adamw(1e-3)
    theirs, gradients = TorchAdamW(np.full(3, 9.0), 1e-3), normal(5, 3)
    for g in gradients:
        theirs.step(np.float64(g))

    def train(tx, w):
        state = tx.init(w)
        for g in gradients:
            w, state = shrewjax.apply_gradients(tx, g, state, w)
        return w

    right, wrong = quick_jit(lambda w: [train(tx, w) for tx in txs])(jnp.full(3, 9.0))
    np.testing.assert_allclose(right, theirs.w, rtol=1e-6)
    assert np.max(np.abs(wrong - theirs.w)) > 1e-4


def test_rmsprop_is_torchs_by_the_pages_arguments():
    tx = code("optax.rmsprop(1e-2, decay=0.99, eps=1e-8, eps_in_sqrt=False)")
    w = w_torch = np.full(3, 9.0)
    state, square = tx.init(jnp.asarray(w, jnp.float32)), 0.0
    for g in 1e-4 * normal(5, 3):
        w, state = shrewjax.apply_gradients(tx, g, state, jnp.asarray(w, jnp.float32))
        square = 0.99 * square + 0.01 * np.float64(g) ** 2
        w_torch = w_torch - 1e-2 * g / (np.sqrt(square) + 1e-8)
    np.testing.assert_allclose(w, w_torch, rtol=1e-6)


def test_a_rate_behind_the_guard_moves_on_in_skipped_windows():
    schedule = optax.piecewise_constant_schedule(1.0, {1: 0.5, 2: 0.5})
    rate = code("optax.scale_by_learning_rate(schedule)", schedule=schedule)
    tx = shrewjax.accumulate(optax.chain(shrewjax.skip_nonfinite(optax.identity()), rate), 2)
    inside = shrewjax.accumulate(shrewjax.skip_nonfinite(rate), 2)

    def train(tx):
        w, state = jnp.float32(0), tx.init(jnp.float32(0))
        for g in np.float32([1, 1, np.nan, 1, 1, 1]):
            w, state = shrewjax.apply_gradients(tx, g, state, w)
        return w

    np.testing.assert_array_equal([train(tx), train(inside)], [-1.25, -1.5])  # rates 1, (0.5) and 0.25


def test_what_follows_the_optimizers_step_runs_once_a_window():
    """A clamp and an average of parameters, which moves in open calls too if `applied` does not guard it."""
    clamp = code("optax.stateless(lambda u, p: jax.tree.map(lambda u, p: jnp.clip(p + u, -c, c) - p, u, p))", c=0.01)
    tx = shrewjax.accumulate(optax.chain(optax.sgd(0.1), clamp), 4)
    guarded = "optax.tree.where(state.applied, new, old)"

    @quick_jit
    def step(params, state, ema, unguarded, x, y, flush):
        grads = jax.grad(mean_loss)(params, x, y)
        params, state = shrewjax.apply_gradients(tx, grads, state, params, weight=len(x), flush=flush)
        ema = code(guarded, state=state, new=optax.incremental_update(params, ema, 0.01), old=ema)
        return params, state, ema, optax.incremental_update(params, unguarded, 0.01)

    w, ema, sizes = np.zeros(3), np.zeros(3), set()
    for window in WINDOWS:
        w = np.clip(w - 0.1 * mean_grad(w, *joined(window)), -0.01, 0.01)
        ema = 0.99 * ema + 0.01 * w
        sizes |= {*np.abs(w)}
    assert 0.01 in sizes
    assert min(sizes) < 0.01
    zeros = jnp.zeros(3)
    params, _, ours, unguarded = trained(step, zeros, tx.init(zeros), zeros, zeros)
    np.testing.assert_allclose(params, w, rtol=1e-5)
    np.testing.assert_allclose(ours, ema, rtol=1e-5)
    assert distance(unguarded, ema) > 0.1


def test_a_head_without_a_gradient_stays_by_weight_0_and_moves_by_zeros():
    own, plain = code("accumulate(tx, 1)", tx=optax.adamw(0.1, weight_decay=1e-2)), optax.adamw(0.1, weight_decay=1e-2)
    assert "`weight=is_used`" in PAGE
    gradients, used = normal(6, 2), (True, False, True, False, False, True)

    @quick_jit
    def step(a, of_a, b, of_b, g, is_used):
        g = jnp.where(is_used, g, 0)
        a, of_a = shrewjax.apply_gradients(own, g, of_a, a, weight=is_used)
        return a, of_a, *shrewjax.apply_gradients(plain, g, of_b, b)

    theirs, start = TorchAdamW(np.ones(2), 0.1), jnp.ones(2)
    carry = start, own.init(start), start, plain.init(start)
    for g, is_used in zip(gradients, used, strict=True):
        theirs.step(np.float64(g) if is_used else None)
        carry = step(*carry, g, is_used)
    np.testing.assert_allclose(carry[0], theirs.w, rtol=1e-5)
    assert distance(carry[2], theirs.w) > 0.01


def test_weights_copied_before_the_first_donated_step_stay():
    tx, params = optax.sgd(1.0), {"w": jnp.ones(3)}
    kept = code("jax.tree.map(jnp.copy, params)", params=params)
    step = quick_jit(lambda p, s: shrewjax.apply_gradients(tx, p, s, p), donate_argnums=(0, 1))
    new, _ = step(params, tx.init(params))
    np.testing.assert_array_equal(new["w"], np.zeros(3))
    np.testing.assert_array_equal(kept["w"], np.ones(3))
    assert params["w"].is_deleted()


def test_a_state_in_host_memory_stays_there_and_trains_alike():
    space = jax.memory.Space

    def in_host_memory(inner):
        def update(grads, state, params=None):
            updates, state = inner.update(grads, jax.device_put(state, space.Device), params)
            return updates, code("jax.device_put(state, jax.memory.Space.Host)", state=state)

        return optax.GradientTransformation(lambda p: jax.device_put(inner.init(p), space.Host), update)

    def train(tx):
        step = quick_jit(lambda p, s, g: shrewjax.apply_gradients(tx, g, s, p), donate_argnums=(0, 1))
        params, state = jnp.ones(3), tx.init(jnp.ones(3))
        for g in normal(4, 3):
            params, state = step(params, state, g)
            kinds.update(x.sharding.memory_kind for x in jax.tree.leaves(state.inner_state))
        return params

    kinds = set()
    moved = train(shrewjax.accumulate(in_host_memory(optax.adamw(0.1)), 2))
    assert kinds == {"pinned_host"}
    np.testing.assert_allclose(moved, train(shrewjax.accumulate(optax.adamw(0.1), 2)), rtol=1e-6)
