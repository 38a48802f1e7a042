"""Statistics that Flax's fp8 layers return as gradients: a batch has the largest, and no norm or sum counts them."""

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen import fp8_ops
from helpers import assert_close, mesh_of
from speed import quick_jit

import shrewjax
import shrewjax.flax

K = 4
NAME = "_overwrite_with_gradient"
X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
X[1] *= 50  # an outlier in micro-batch 1


@jax.custom_vjp
def seen(statistic, x):
    """The identity of x, whose backward pass returns (the largest magnitude, a number that only falls)."""
    return x


def seen_backward(residuals, g):
    statistic, x = residuals
    return jnp.stack([jnp.max(jnp.abs(x)), statistic[1] / 2]), g


seen.defvjp(lambda statistic, x: (x, (statistic, x)), seen_backward)


def loss(params, x):
    return jnp.mean(seen(params[NAME]["statistic"], x @ params["params"]["w"]) ** 2)


PARAMS = {"params": {"w": jnp.ones(16)}, NAME: {"statistic": jnp.array([3.0, 8.0])}}


def by_hand(weights):
    """The largest of what each kept micro-batch returns, from NumPy."""
    largest = [np.abs(X[i::K] @ np.ones(16)).max() for i in range(K) if weights[i]]
    return [max(largest), 4.0] if largest else [3.0, 8.0]


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (2, 0, 1, 3), (0, 0, 0, 0)], ids=str)
def test_a_statistic_is_the_largest_of_the_kept_micro_batches_or_stays(weights):
    def weighted(params, x, w):
        return loss(params, x)

    w = np.tile(np.float32(weights), 2)
    grad = shrewjax.accumulated_value_and_grad(weighted, K, weight_fn=lambda params, x, w: jnp.max(w), argnums=0)
    _, grads = quick_jit(grad)(PARAMS, X, w)
    np.testing.assert_allclose(grads[NAME]["statistic"], by_hand(weights), rtol=1e-6)
    assert jax.tree.structure(grads) == jax.tree.structure(PARAMS)


def test_a_dropped_micro_batch_has_no_part_in_a_statistic_and_gradients_keep_their_places():
    x = X.copy()
    x[1] = np.inf
    grad = shrewjax.accumulated_value_and_grad(
        lambda first, x, second: loss(first, x) + loss(second, x), K, argnums=(2, 0), batch_argnums=1,
        nonfinite="drop_micro_batch",
    )  # fmt: skip
    _, (second, first) = quick_jit(grad)(PARAMS, x, PARAMS["params"] | PARAMS)
    np.testing.assert_allclose(first[NAME]["statistic"], by_hand((1, 0, 1, 1)), rtol=1e-6)
    assert_close({"params": first["params"], NAME: first[NAME]}, {n: second[n] for n in ("params", NAME)}, rtol=0)


def test_a_statistic_is_the_largest_of_all_devices():
    mesh = mesh_of(data=2)
    grad = shrewjax.accumulated_value_and_grad(loss, 2, sum_over="data")
    mapped = jax.shard_map(grad, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
    _, grads = quick_jit(mapped)(PARAMS, X)
    np.testing.assert_allclose(grads[NAME]["statistic"], by_hand((1, 1, 1, 1)), rtol=1e-6)


def test_flaxs_fp8_trains_as_by_hand_with_gradients_averaged_and_statistics_at_their_largest():
    layer = flax.linen.Dense(16, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp, use_bias=False)
    variables = layer.init(jax.random.key(0), X)
    grad_of = jax.value_and_grad(lambda variables, x: jnp.mean(layer.apply(variables, x) ** 2))
    with jax.numpy_dtype_promotion("standard"):
        _, grads = quick_jit(shrewjax.accumulated_value_and_grad(lambda v, x: jnp.mean(layer.apply(v, x) ** 2), K))(
            variables, X
        )
        each = [quick_jit(grad_of)(variables, X[i::K])[1] for i in range(K)]
    assert_close(grads[NAME], jax.tree.map(lambda *x: np.max(x, axis=0), *(g[NAME] for g in each)), rtol=1e-6)
    mean = jax.tree.map(lambda *x: np.mean(x, axis=0), *(g["params"] for g in each))
    assert_close(grads["params"], mean, rtol=1e-5, atol=1e-6)

    states = [
        cls.create(apply_fn=None, params=variables, tx=optax.chain(clip(0.1), optax.sgd(1.0)))
        for cls, clip in (
            (shrewjax.flax.TrainState, shrewjax.clip_by_global_norm),
            (flax.training.train_state.TrainState, optax.clip_by_global_norm),
        )
    ]
    ours, theirs = (state.apply_gradients(grads=grads).params for state in states)
    assert_close(ours, theirs, rtol=1e-6)


RULES = {
    "norm": lambda grads: shrewjax.grad_norm(grads),
    "clip": lambda grads: shrewjax.clip_grad_norm(grads, 1.0),
    "clip_by_value": lambda grads: shrewjax.clip_by_value(1.0).update(grads, shrewjax.clip_by_value(1.0).init(grads)),
    "leaf norm": lambda grads: shrewjax.clip_by_leaf_norm(1.0).update(
        grads, shrewjax.clip_by_leaf_norm(1.0).init(grads)
    ),
    "guard": lambda grads: update(shrewjax.skip_nonfinite(optax.sgd(1.0)), grads),
    "window": lambda grads: update(shrewjax.accumulate(optax.sgd(1.0), 2), grads),
    "GradAccumulator": lambda grads: shrewjax.GradAccumulator(2).add(shrewjax.GradAccumulator(2).init(grads), grads),
}


def update(tx, grads):
    return tx.update(grads, tx.init(grads), grads)


@pytest.mark.parametrize("rule", RULES)
def test_a_norm_a_clip_a_guard_or_a_sum_of_statistics_is_an_error_that_says_what_to_pass(rule):
    wanted = rf"^gradient leaf \['{NAME}'\]\['statistic'\] is a value that Flax writes\. Pass grads\[\"params\"\] alone"
    with pytest.raises(ValueError, match=wanted):
        RULES[rule](PARAMS)
    RULES[rule](PARAMS["params"])
