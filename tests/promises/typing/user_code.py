"""What users write, with types: accepted by mypy and pyright, both strict, and run by `test_typing.py`."""

from typing import NamedTuple, assert_type

import jax
import jax.numpy as jnp
import optax

import shrewjax

Params = dict[str, jax.Array]


class Model(NamedTuple):
    kernel: jax.Array
    bias: jax.Array


def loss_fn(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((x @ params["w"] - y) ** 2)


def batches() -> list[tuple[jax.Array, jax.Array]]:
    return [(jnp.ones((size, 3)), jnp.ones(size)) for size in (4, 4, 2, 4)]


def clips_of_trees() -> None:
    params: Params = {"w": jnp.full(3, 2.0)}
    assert_type(shrewjax.clip_grad_norm(params, 1.0)[0]["w"], jax.Array)
    clipped, norm = shrewjax.clip_grad_norm(params, 1.0, ord=float("inf"))
    assert_type(clipped, Params)
    assert_type(norm, jax.Array)
    assert_type(shrewjax.clip_grad_value(params, jnp.float32(0.5))["w"], jax.Array)
    assert_type(shrewjax.clip_grad_percentile(params, 90, scope="leaf")[0]["w"], jax.Array)
    model = shrewjax.clip_grad_value(Model(jnp.ones(2), jnp.ones(())), 0.5)
    assert_type(model, Model)
    assert_type(model.bias, jax.Array)
    assert_type(shrewjax.clip_grad_norm(jnp.ones(3), 1.0)[0], jax.Array)
    assert_type(shrewjax.grad_norm(model), jax.Array)


def recurrence() -> jax.Array:
    def step(carry: Model, x: jax.Array) -> tuple[Model, None]:
        clipped = shrewjax.clip_cotangent(carry, 1.0, axis=None)
        assert_type(clipped, Model)
        return Model(jnp.tanh(clipped.kernel * x), clipped.bias), None

    def loss(start: Model, xs: jax.Array, counter: jax.Array) -> jax.Array:
        last: Model = jax.lax.scan(step, start, xs)[0]
        kernel = shrewjax.clip_cotangent(last.kernel, jnp.float32(0.5), ord=float("inf"), counter=counter)
        assert_type(kernel, jax.Array)
        return jnp.sum(kernel**2)

    grads: tuple[Model, jax.Array] = jax.grad(loss, argnums=(0, 2))(
        Model(jnp.ones(2), jnp.ones(())), jnp.ones((3, 2)), jnp.zeros(())
    )
    return grads[1]


def train_step_of_a_chain() -> float:
    tx = shrewjax.accumulate(optax.chain(shrewjax.clip_by_global_norm(1.0), optax.adamw(1e-3)), accum_steps=4)

    def step(
        params: Params, opt_state: optax.OptState, x: jax.Array, y: jax.Array
    ) -> tuple[Params, optax.OptState, dict[str, jax.Array]]:
        grads: Params = jax.grad(loss_fn)(params, x, y)
        params, opt_state = shrewjax.apply_gradients(tx, grads, opt_state, params, weight=len(x))
        return params, opt_state, shrewjax.metrics(opt_state)

    params: Params = {"w": jnp.zeros(3)}
    opt_state = tx.init(params)
    measured: dict[str, jax.Array] = {}
    jitted = jax.jit(step, donate_argnums=(0, 1))
    for x, y in batches():
        params, opt_state, measured = jitted(params, opt_state, x, y)
    return float(measured["clip_by_global_norm/grad_norm"])


def masked_loss(params: Params, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    loss = jnp.sum(jnp.where(mask, x @ params["w"], 0)) / jnp.sum(mask)
    return loss, {"kept": jnp.ones((), jnp.int32)}


def real_examples(params: Params, x: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.sum(mask)


def whole_batch_in_one_call() -> float:
    tx = optax.chain(shrewjax.clip_by_global_norm(1.0), optax.sgd(0.1))
    loss_and_grad = shrewjax.accumulated_value_and_grad(
        masked_loss,
        4,
        has_aux=True,
        weight_fn=real_examples,
        aux_reduction={"kept": "sum"},
        nonfinite="drop_micro_batch",
    )

    def step(
        params: Params, opt_state: optax.OptState, x: jax.Array, mask: jax.Array
    ) -> tuple[Params, optax.OptState, jax.Array]:
        (loss, _), grads = loss_and_grad(params, x, mask)
        params, opt_state = shrewjax.apply_gradients(tx, grads, opt_state, params)
        return params, opt_state, loss

    params: Params = {"w": jnp.zeros(3)}
    params, _, loss = jax.jit(step)(params, tx.init(params), jnp.ones((8, 3)), jnp.arange(8) < 5)
    return float(loss)


def loss_of_the_whole_batch() -> float:
    def loss(params: Params, x: jax.Array, mask: jax.Array) -> jax.Array:
        hidden = shrewjax.of_each_example(jnp.tanh)(x @ params["w"])
        return jnp.sum(jnp.where(mask, hidden, 0)) / jnp.sum(mask)

    params: Params = {"w": jnp.ones(3)}
    x, mask = jnp.ones((8, 3)), jnp.arange(8) < 5
    shrewjax.print_micro_batches(loss, 4, params, x, mask)
    of_batch = shrewjax.micro_batched(loss, 4)
    assert_type(of_batch(params, x, mask), jax.Array)
    grads: Params = jax.grad(of_batch)(params, x, mask)
    _, same = shrewjax.value_and_grad(loss, 4)(params, x, mask)
    (_, aux), _ = shrewjax.value_and_grad(masked_loss, 4, has_aux=True)(params, x, mask)
    return float(jnp.sum(jnp.abs(grads["w"] - same["w"])) + 1 - aux["kept"])


def state_with_its_type() -> bool:
    tx = shrewjax.accumulate(optax.sgd(0.1), 3)

    def step(params: Params, state: shrewjax.AccumulateState) -> tuple[Params, shrewjax.AccumulateState]:
        grads: Params = jax.tree.map(jnp.sign, params)
        return shrewjax.apply_gradients(tx, grads, state, params)

    def rest(params: Params, state: shrewjax.AccumulateState) -> tuple[Params, shrewjax.AccumulateState]:
        if state.micro_step == 0:
            return params, state
        params, state = shrewjax.flush(tx, state, params)
        assert_type(params, Params)
        assert_type(state, shrewjax.AccumulateState)
        return params, state

    params: Params = {"w": jnp.ones(3)}
    state = tx.init(params)
    assert isinstance(state, shrewjax.AccumulateState)
    params, state = rest(*step(params, state))
    return bool(state.applied)


def updates_as_optax_has_them(params: optax.Params) -> optax.Params:
    tx = shrewjax.skip_nonfinite(shrewjax.skip_on_spike(optax.sgd(0.1)), max_consecutive=5, at_limit="keep_skipping")
    updates, state = tx.update(params, tx.init(params), params)
    assert isinstance(state, shrewjax.SkipNonfiniteState)
    assert_type(state.skipped, jax.Array)
    return optax.apply_updates(params, updates)


def loss_and_noise_of_windows() -> dict[str, jax.Array]:
    tx = shrewjax.accumulate(shrewjax.skip_on_spike(optax.sgd(0.1), monitor="value"), 2, noise_decay=0.9)
    window = shrewjax.GradAccumulator(2, noise_decay=jnp.float32(0.9))
    params: Params = {"w": jnp.zeros(3)}
    opt_state, state = tx.init(params), window.init(params)
    for x, y in batches():
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        _, state = window.step(state, grads, weight=len(x), value=loss)
        params, opt_state = shrewjax.apply_gradients(tx, grads, opt_state, params, weight=len(x), value=loss)
    assert_type(state.loss, jax.Array)
    return shrewjax.metrics(opt_state) | shrewjax.metrics(state)


def loop_of_the_host() -> Params:
    window = shrewjax.GradAccumulator(2, accumulator_dtype=jnp.float32)
    tx = optax.sgd(0.1)
    params: Params = {"w": jnp.zeros(3)}
    opt_state, state = tx.init(params), window.init(params)
    for x, y in batches():
        grads: Params = jax.grad(loss_fn)(params, x, y)
        average, state = window.step(state, grads, weight=len(x))
        if average is not None:
            params, opt_state = shrewjax.apply_gradients(tx, average, opt_state, params)
    assert_type(state, shrewjax.GradAccumulatorState)
    state = jax.jit(window.add, donate_argnums=0)(state, params)
    if window.current_step(state) > 0 and not window.ready(state):
        average, closed, state = window.take(state)
        if closed:
            params, opt_state = shrewjax.apply_gradients(tx, average, opt_state, params)
    return params


def scheduled_and_split() -> dict[str, jax.Array]:
    warming = optax.inject_hyperparams(shrewjax.clip_by_global_norm)(max_norm=optax.linear_schedule(10.0, 1.0, 100))
    parts = optax.partition({"head": shrewjax.clip_by_global_norm(0.1), "body": warming}, {"w": "body", "b": "head"})
    params: Params = {"w": jnp.zeros(3), "b": jnp.zeros(1)}
    tx = optax.chain(parts, optax.masked(shrewjax.clip_by_norm_zscore(), {"w": True, "b": False}))
    _, opt_state = jax.jit(tx.update)(params, tx.init(params), params)
    return shrewjax.metrics(opt_state)
