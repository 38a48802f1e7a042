"""Rows of docs/guide/sharp_edges.md: the edge is as sharp as the page says, and what stands beside it is right."""

import dataclasses
import pathlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import distance, mesh_of, own_params
from speed import quick_jit

import shrewjax

PAGE = (pathlib.Path(__file__).parent.parent.parent / "docs" / "guide" / "sharp_edges.md").read_text()
pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("as_users_have_it")]


def rates(tx, state_of, grads):
    """The schedule's count after these calls."""
    state = tx.init(jnp.float32(0))
    update = quick_jit(lambda g, s: tx.update(g, s, jnp.float32(0))[1])
    for g in np.float32(grads):
        state = update(g, state)
    return int(state_of(state).count)


@pytest.mark.parametrize(
    ("wrapper", "grads", "steps"),
    [(partial(shrewjax.accumulate, accum_steps=4), [1] * 8, 2), (shrewjax.skip_nonfinite, [1, np.nan, np.nan, 1], 2)],
)
def test_hyperparameters_inside_count_steps_and_around_count_calls(wrapper, grads, steps):
    rate = optax.linear_schedule(1.0, 0.0, 10)
    inside = wrapper(optax.inject_hyperparams(optax.sgd)(learning_rate=rate))
    around = optax.inject_hyperparams(lambda learning_rate: wrapper(optax.sgd(learning_rate)))(learning_rate=rate)
    assert rates(inside, lambda state: state.inner_state, grads) == steps
    assert rates(around, lambda state: state, grads) == len(grads)


def test_a_window_in_shard_map_without_sum_over_adds_up_over_devices():
    """The gradient of p * x is the mean of x, 2. With `sum_over=`, parameters are each device's own."""
    mesh, p = mesh_of(data=8), jnp.float32(0)

    def updates(own, **options):
        tx = shrewjax.accumulate(optax.sgd(1.0), 1, **options)

        def step(p, x):
            grads = jax.grad(lambda p: jnp.mean(p * x))(own_params(p, "data") if own else p)
            return tx.update(grads, tx.init(p), p)[0]

        return jax.shard_map(step, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())(p, jnp.full(8, 2.0))

    added, right = quick_jit(lambda: (updates(False), updates(True, sum_over="data")))()
    assert (added, right) == (-16, -2)


def test_outside_of_jit_a_step_compiles_in_each_call_and_inside_once():
    programs = []

    def loss(p, x):
        programs.append(1)
        return jnp.mean(p * x)

    step = shrewjax.value_and_grad(loss, 2)
    for calls in (step, quick_jit(step)):
        programs.clear()
        for _ in range(3):
            calls(jnp.float32(1), jnp.ones(4))
        assert len(programs) == (3 if calls is step else 1)


def test_what_needs_concrete_indices_fails_in_a_loop_alone():
    def loss(p, x):
        return jnp.mean(p * x), jnp.sum(x[x > 0])

    def masked(p, x):
        return jnp.mean(p * x), jnp.sum(jnp.where(x > 0, x, 0))

    p, x = jnp.float32(1), jnp.arange(-2.0, 2.0)
    assert jax.value_and_grad(loss, has_aux=True)(p, x)[0][1] == 1
    with pytest.raises(jax.errors.NonConcreteBooleanIndexError):
        shrewjax.value_and_grad(loss, 2, has_aux=True)(p, x)
    assert shrewjax.accumulated_value_and_grad(masked, 2, has_aux=True, aux_reduction="sum")(p, x)[0][1] == 1


@partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["size"])
@dataclasses.dataclass
class Batch:
    x: jax.Array
    size: int


def test_a_static_size_is_the_whole_batchs_and_that_of_no_micro_batch_of_its_own():
    def by_field(p, b):
        return jnp.sum(p * b.x) / b.size

    def by_length(p, b):
        return jnp.sum(p * b.x) / len(b.x)

    def found(x):
        ways = shrewjax.value_and_grad, shrewjax.accumulated_value_and_grad
        batch = Batch(x, len(x))
        return [[way(loss, 4)(jnp.float32(1), batch)[1] for loss in (by_field, by_length)] for way in ways]

    ours, of_their_own = quick_jit(found)(jnp.arange(8.0))
    assert ours == [3.5, 3.5]
    assert of_their_own == [3.5 / 4, 3.5]


def test_a_nan_in_optaxs_sum_moves_in_mid_window_and_stays_behind_at_its_end():
    old, new = optax.MultiSteps(optax.sgd(1.0), 4), shrewjax.accumulate(optax.sgd(1.0), 4)
    params = jnp.ones(2)
    add, step = quick_jit(old.update), quick_jit(new.update)
    state = old.init(params)
    for i in range(4):
        _, state = add(jnp.where(i == 1, jnp.nan, jnp.ones(2)), state, params)
        if i in (1, 3):
            moved = shrewjax.from_optax(state, new, params)
            while not moved.applied:
                updates, moved = step(jnp.ones(2), moved, params)
            assert np.isnan(updates).any() == (i == 1)


def test_agc_takes_kernels_with_outputs_first_by_axis():
    """Each output's row of a kernel of (out, in), and of a convolution, by hand; a bias is one unit, in each shape."""
    axis = "lambda name, x: tuple(range(1, x.ndim)) if x.size > max(x.shape, default=1) else None"
    assert f"axis={axis}" in PAGE
    rng = np.random.default_rng(0)
    shapes = {"linear": (5, 4), "convolution": (5, 4, 3, 3), "bias": (5,), "of images": (5, 1, 1)}
    grads, params = ({name: np.float32(rng.normal(size=s)) for name, s in shapes.items()} for _ in range(2))

    def clipped(**options):
        tx = shrewjax.adaptive_grad_clip(1.0, **options)
        return tx.update(grads, tx.init(params), params)[0]

    right, wrong = quick_jit(lambda: (clipped(axis=eval(axis)), clipped()))()
    for name, g in grads.items():
        over = None if name in ("bias", "of images") else tuple(range(1, g.ndim))
        limit, size = (np.sqrt(np.sum(np.float64(x) ** 2, axis=over, keepdims=True)) for x in (params[name], g))
        np.testing.assert_allclose(right[name], g * np.minimum(1, limit / size), rtol=1e-5)
        assert np.allclose(wrong[name], right[name], rtol=1e-3) == (name in ("bias", "of images"))


def test_a_table_with_as_many_rows_as_examples_is_no_mistake_but_for_micro_batches_of_their_own():
    """Weights of as many classes as there are examples, in a mean and in a sum; the oracle is plain JAX."""
    rng = np.random.default_rng(0)
    w, x = np.float32(rng.normal(size=(3, 16))), np.float32(rng.normal(size=(16, 3)))
    labels, of_class = rng.integers(0, 16, 16), np.float32(rng.uniform(0.2, 2, 16))

    def loss(w, x, labels, of_class, reduce=jnp.mean):
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(x @ w, labels)
        return reduce(losses * jnp.take(of_class, labels, mode="clip"))

    def found(*args):
        summed = partial(loss, reduce=jnp.sum)
        ours, own = shrewjax.value_and_grad, partial(shrewjax.accumulated_value_and_grad, batch_argnums=(1, 2))
        return (
            [jax.grad(loss)(*args), jax.grad(summed)(*args)],
            [ours(loss, 4)(*args)[1], ours(summed, 4)(*args)[1]],
            [own(loss, 4)(*args)[1], own(summed, 4, reduction="sum")(*args)[1]],
            shrewjax.accumulated_value_and_grad(loss, 4)(*args)[1],
        )

    expected, ours, named, cut = quick_jit(found)(w, x, labels, of_class)
    assert distance(cut, expected[0]) > 0.3
    for grads in (ours, named):
        for found_one, right in zip(grads, expected, strict=True):
            np.testing.assert_allclose(found_one, right, rtol=1e-4, atol=1e-6)


def test_the_quotient_of_counts_averaged_by_weight_is_no_accuracy():
    """16 of 16 in the first micro-batch, 0 of 4 in the second."""
    right, mask = jnp.arange(32) % 2 == 0, (jnp.arange(32) % 2 == 0) | (jnp.arange(32) < 8)

    def loss(p, right, mask):
        return jnp.sum(p * mask) / jnp.sum(mask), {"right": jnp.sum(right & mask), "all": jnp.sum(mask * 1.0)}

    def accuracy(aux):
        options = {"weight_fn": lambda p, right, mask: jnp.sum(mask), "has_aux": True, "aux_reduction": aux}
        (_, counts), _ = shrewjax.accumulated_value_and_grad(
            lambda *args: jax.tree.map(lambda x: x * 1.0, loss(*args)), 2, **options
        )(1.0, right, mask)
        return counts["right"] / counts["all"]

    by_weight, summed = quick_jit(lambda: (accuracy("mean"), accuracy("sum")))()
    assert summed == np.float32(16 / 20)
    assert by_weight == pytest.approx(16 * 16 / (16 * 16 + 4 * 4))


def test_a_models_state_counts_micro_batches_as_a_carry_and_is_exact_by_its_moments():
    """The oracle is one call of the whole batch, with a moving average of its mean."""
    x, state = np.float32(np.random.default_rng(0).normal(3, 1, 32)), {"calls": np.int32(0), "mean": np.float32(0)}

    def advanced(state, mean):
        return {"calls": state["calls"] + 1, "mean": 0.9 * state["mean"] + 0.1 * mean}

    def loss(p, state, x):
        return jnp.mean(p * x), advanced(state, jnp.mean(x))

    def of_moments(p, state, x):
        return jnp.mean(p * x), {"moments": jnp.mean(x)}

    def found(p, state, x):
        examples = {"has_aux": True, "batch_argnums": 2}
        carried = shrewjax.accumulated_value_and_grad(
            lambda *args: (loss(*args)[0], ({}, loss(*args)[1])), 8, carry_argnum=1, **examples
        )(p, state, x)[0][1][1]
        returned = shrewjax.accumulated_value_and_grad(loss, 8, aux_reduction="last", **examples)(p, state, x)[0][1]
        moments = shrewjax.accumulated_value_and_grad(of_moments, 8, **examples)(p, state, x)[0][1]["moments"]
        return carried, returned, advanced(state, moments), loss(p, state, x)[1]

    carried, returned, exact, whole = quick_jit(found)(np.float32(1), state, x)
    assert (carried["calls"], returned["calls"], exact["calls"]) == (8, 1, 1)
    assert exact["mean"] == pytest.approx(float(whole["mean"]), rel=1e-6)
    assert carried["mean"] == pytest.approx(3 * (1 - 0.9**8), rel=0.1)  # moved eight times
    assert abs(returned["mean"] / whole["mean"] - 1) > 0.01  # the last micro-batch's alone


def test_a_sum_in_bfloat16_stops_growing():
    ones, noisy = np.ones((1024, 1), np.float32), np.float32(np.random.default_rng(0).normal(3, 1, (512, 1000)))

    def average(grads, dtype=None):
        tx = shrewjax.accumulate(optax.identity(), len(grads), accumulator_dtype=dtype)
        params = grads[0]
        state = tx.init(params)
        return jax.lax.scan(lambda s, g: tx.update(g, s, params)[::-1], state, grads)[1][-1]

    def found(ones, noisy):
        return (
            [average(grads, jnp.bfloat16) for grads in (ones[:256], ones[:512], ones, noisy)],
            [average(noisy), jnp.mean(noisy, axis=0)],
        )

    (at_256, at_512, at_1024, of_noise), (ours, right) = quick_jit(found)(ones, noisy)
    assert (at_256, at_512, at_1024) == (1, 0.5, 0.25)
    assert distance(of_noise, right) == pytest.approx(0.18, abs=0.005)
    assert distance(ours, right) < 1e-6


def test_parameters_share_a_buffer_with_device_put_of_them():
    whole = jax.sharding.NamedSharding(mesh_of(data=8), jax.P())
    step = jax.jit(lambda p: p + 1, donate_argnums=0)
    params, kept = jnp.ones(1000), jnp.ones(1000)
    step(jax.device_put(params, whole))
    step(jax.device_put(jnp.copy(kept), whole))
    assert np.sum(kept) == 1000
    with pytest.raises((RuntimeError, ValueError), match="has been deleted"):
        np.sum(params)


def test_a_loss_that_is_no_mean_over_examples_is_right_as_it_stands():
    """Plain JAX is the oracle. The mean of micro-batches' own losses is the mistake."""
    rng = np.random.default_rng(0)
    w, x = np.float32(np.random.default_rng(1).normal(size=(3, 5))), np.float32(rng.normal(size=(32, 3)))
    classes, of_class = rng.integers(0, 5, 32), np.float32(rng.uniform(0.2, 2, 5))
    boxes = np.float32(rng.integers(0, 3, 32) * (np.arange(32) % 4 > 0))  # none in the first micro-batch

    def class_weights(w, x, classes):
        losses = optax.losses.softmax_cross_entropy_with_integer_labels(x @ w, classes)
        return jnp.sum(jnp.asarray(of_class)[classes] * losses) / jnp.sum(jnp.asarray(of_class)[classes])

    def by_boxes(w, x, boxes):
        return jnp.sum(boxes[:, None] * (x @ w - 1) ** 2) / jnp.maximum(jnp.sum(boxes), 1)

    def root(w, x):
        return jnp.sqrt(jnp.mean((x @ w - 1) ** 2))

    def penalized(w, x):
        return jnp.sum((x @ w - 1) ** 2) + 50 * jnp.sum(w**2)

    rows = [
        (class_weights, (x, classes), 0.07),
        (by_boxes, (x, boxes), 0.26),
        (root, (x,), 0.06),
        (penalized, (x,), 0.3),
    ]

    def found(w):
        for loss, batch, _ in rows:
            ways = (
                jax.value_and_grad(loss),
                shrewjax.value_and_grad(loss, 4),
                shrewjax.accumulated_value_and_grad(loss, 4),
            )
            yield [way(w, *batch) for way in ways]

    for (loss, _, off), ways in zip(rows, quick_jit(lambda w: [*found(w)])(w), strict=True):
        (value, grads), (our_value, ours), (_, wrong) = ways
        assert our_value == pytest.approx(float(value), rel=1e-5), loss
        assert distance(ours, grads) < 1e-5, loss
        assert distance(wrong, grads) > off - 0.01, loss


def test_time_first_is_refused_and_right_when_transposed_and_a_loss_over_k_is_that():
    rng = np.random.default_rng(0)
    w, x = np.float32(rng.normal(size=(3, 3))), np.float32(rng.normal(size=(8, 4, 3)))

    def recurrent(w, x):  # (time, batch, features)
        def advance(h, x):
            h = jnp.tanh(h @ w + x)
            return h, jnp.mean(h**2)

        return jnp.mean(jax.lax.scan(advance, jnp.zeros(x.shape[1:]), x)[1])

    def batch_first(w, x):
        return recurrent(w, x.swapaxes(0, 1))

    with pytest.raises(ValueError, match="examples mix"):
        jax.eval_shape(shrewjax.value_and_grad(recurrent, 4), w, x)
    expected, ours, quarter = quick_jit(
        lambda w, x: (
            jax.grad(recurrent)(w, x),
            shrewjax.value_and_grad(batch_first, 4)(w, x.swapaxes(0, 1))[1],
            shrewjax.value_and_grad(lambda *args: batch_first(*args) / 4, 4)(w, x.swapaxes(0, 1))[1],
        )
    )(w, x)
    assert distance(ours, expected) < 1e-5
    assert distance(4 * quarter, expected) < 1e-5


def test_windows_clip_after_the_average_and_divide_sums_by_their_weights():
    """Two micro-batches of norms 10 and 1 in opposite directions, and sums of four examples each."""

    def updates(tx, **given):
        params = jnp.float32(0)
        state = tx.init(params)
        for g in (10.0, -1.0):
            update, state = tx.update(jnp.float32(g), state, params, **given)
        return update

    def found():
        clip, identity = shrewjax.clip_by_global_norm(1.0), optax.identity()
        summed = shrewjax.accumulate(identity, 2, reduction="sum_over_weights")
        return (
            updates(optax.chain(clip, shrewjax.accumulate(identity, 2))),
            updates(shrewjax.accumulate(clip, 2)),
            updates(summed),
            updates(summed, weight=4),
        )

    before, inside, of_sums, of_mean = quick_jit(found)()
    assert (before, inside) == (0, 1)
    assert (of_sums, of_mean) == (4.5, 9 / 8)


def test_a_weight_beside_per_device_counts_for_each_device_alone():
    """Each device has two examples, and a mask that keeps one of them or both."""
    mesh, p = mesh_of(data=8), jnp.float32(1)
    x, mask = np.float32(np.random.default_rng(0).normal(1, 1, 16)), np.arange(16) % 4 < 3
    tx = shrewjax.accumulate(optax.sgd(1.0), 1, sum_over="data")

    def loss(p, x, mask):
        return jnp.sum(mask * (p * x - 1) ** 2) / jnp.sum(mask)

    def count(p, x, mask):
        return jnp.sum(mask)

    def update(p, x, mask, weight):
        grads = shrewjax.per_device(jax.grad(loss), "data")(p, x, mask)
        return tx.update(grads, tx.init(p), p, weight=weight(p, x, mask))[0]

    with jax.set_mesh(mesh):
        p = jax.device_put(p, jax.NamedSharding(mesh, jax.P()))
        of_each = shrewjax.per_device(count, "data")
        right, wrong = quick_jit(lambda *args: (update(*args, of_each), update(*args, count)))(p, x, mask)
    expected = np.sum(2 * x[mask] * (x[mask] - 1)) / np.sum(mask)
    assert -right == pytest.approx(expected, rel=1e-5)
    assert abs(-wrong / expected - 1) > 0.05
