"""Calls that a type checker refuses: each `type: ignore` hides an error, and one that hides none is an error itself."""

import jax
import jax.numpy as jnp
import optax

import shrewjax


def loss_fn(params: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((x @ params - y) ** 2)


def calls_that_lack_arguments(params: jax.Array, x: jax.Array) -> None:
    shrewjax.value_and_grad(loss_fn, 4)(params)  # type: ignore
    shrewjax.value_and_grad(loss_fn, 4)(params, x, "y")  # type: ignore
    shrewjax.micro_batched(loss_fn, 4)(params, x, x, x, x)  # type: ignore
    shrewjax.micro_batched(loss_fn, 4)(params, x, z=x)  # type: ignore


def words_for_numbers() -> None:
    shrewjax.clip_by_global_norm("one")  # type: ignore
    shrewjax.clip_by_value(None)  # type: ignore
    shrewjax.skip_nonfinite(optax.sgd(0.1), max_consecutive="5")  # type: ignore
    shrewjax.skip_on_spike(optax.sgd(0.1), max_value=[1.0], max_consecutive=2)  # type: ignore
    shrewjax.accumulate(optax.sgd(0.1), 4, noise_decay="0.9")  # type: ignore


def words_that_are_no_choice() -> None:
    shrewjax.value_and_grad(loss_fn, "4")  # type: ignore
    shrewjax.accumulated_value_and_grad(loss_fn, 4, reduction="average")  # type: ignore
    shrewjax.accumulate(optax.sgd(0.1), 4, nonfinite="drop")  # type: ignore
    shrewjax.accumulated_value_and_grad(loss_fn, 4, weight=len)  # type: ignore


def words_of_micro_batches_of_their_own() -> None:
    shrewjax.value_and_grad(loss_fn, 4, weight_fn=len)  # type: ignore
    shrewjax.value_and_grad(loss_fn, 4, reduction="sum")  # type: ignore
    shrewjax.micro_batched(loss_fn, 4, skip_empty=True)  # type: ignore
