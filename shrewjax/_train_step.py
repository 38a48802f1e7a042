"""The calls of a train step beside `tx.update`: apply the gradients, flush a window, check the windows' values."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from shrewjax._accumulation import WINDOW_STATES, AccumulateState, Accumulation
from shrewjax._gradients import Tree
from shrewjax._states import State
from shrewjax._wrapping import update_or_apply


def apply_gradients(
    tx: optax.GradientTransformation,
    grads: Any,
    opt_state: State,
    params: Tree,
    **extra_args: Any,
) -> tuple[Tree, State]:
    r"""Calls `tx.update` and `optax.apply_updates` in one, for any Optax transformation.

    .. math:: (u_t, s_{t+1}) = \text{update}(g_t, s_t, \theta_t), \qquad \theta_{t+1} = \theta_t + u_t

    If `accumulate` returned `tx`, a call that does not close the window touches only the accumulator. It neither reads
    nor writes updates and parameters. Tests check this in programs compiled for CPU, GPU and TPU. An accumulation
    inside an Optax transformation, such as `optax.chain`, gives the same result without this saving.

    Donate parameters and state. The step has to return them in the order in which it takes them, such as
    `step(params, opt_state, ...) -> (params, opt_state)` with `jax.jit(step, donate_argnums=(0, 1))`. JAX pairs donated
    buffers with results in order, and a wrong pair costs a copy. Keys, and parameters whose gradient is float0, stay
    unchanged.

    Args:
      tx: any transformation.
      grads: the gradients.
      opt_state: its state.
      params: the parameters.
      **extra_args: passed to `tx.update`, `weight` and `flush` included.

    Returns:
      The new parameters and the new state.

    Raises:
      The errors of `tx.update`.

    Example:
      >>> tx = accumulate(optax.sgd(1.0), 2)
      >>> params = jnp.zeros(2)
      >>> state = tx.init(params)
      >>> params, state = apply_gradients(tx, jnp.array([1.0, 2.0]), state, params)
      >>> params, state = apply_gradients(tx, jnp.array([3.0, 4.0]), state, params)
      >>> params
      Array([-2., -3.], dtype=float32)

    Source: the result is that of `tx.update` and `optax.apply_updates`, Optax's own two calls.
    """
    # Outside of jit, a skipped step would otherwise return the caller's own NumPy arrays, which then share memory
    # (tests/test_train_steps.py, "returns_jax_arrays_too").
    params = jax.tree.map(jnp.asarray, params)
    return update_or_apply(tx, lambda: grads, opt_state, params, apply=True, runs=True, **extra_args)


def flush(tx: optax.GradientTransformation, opt_state: State, params: Tree, **extra_args: Any) -> tuple[Tree, State]:
    r"""Closes an open window, at the end of an epoch or of training, with the micro-batches that it has.

    .. math:: \bar g = \frac{\sum_{i \le k} w_i g_i}{\sum_{i \le k} w_i}
              \;\text{ over the } k \text{ micro-batches so far}

    The divisor is the window's weight so far, not `accum_steps`. For an empty window, the updates are zeros and inner
    does not run. To close a window together with its last micro-batch, pass `flush=True` to `update` instead. With
    `nnx.Optimizer`, which holds state and parameters as variables, call
    `optimizer.update(model, grads, weight=0, flush=True)`. At weight 0 any gradients add nothing.

    Args:
      tx: the transformation that `accumulate` returned. An accumulation inside another transformation (`optax.chain`,
        `optax.masked`, `optax.inject_hyperparams`) cannot be flushed from outside, because the outer one would process
        a gradient that does not exist. There, pass `flush=True` to `update`, as above.
      opt_state: its state.
      params: the parameters. The average is cast to their dtypes.
      **extra_args: passed to the wrapped optimizer.

    Returns:
      The updates and the new state.

    Raises:
      ValueError: `tx` was not returned by `accumulate`.

    Example:
      >>> tx = accumulate(optax.sgd(1.0), 4)
      >>> params = jnp.zeros(2)
      >>> _, state = tx.update(jnp.array([1.0, 2.0]), tx.init(params), params)
      >>> updates, state = flush(tx, state, params)
      >>> updates
      Array([-1., -2.], dtype=float32)

    Source: by linearity of the gradient, the average is the gradient of the mean loss over these micro-batches alone.
    """
    if not isinstance(tx, Accumulation):
        raise ValueError(
            f"tx must be the transformation that accumulate returned, got {tx!r}. If accumulate is inside another "
            "transformation, pass flush=True to update with the last micro-batch. Or call "
            "tx.update(grads, opt_state, params, weight=0, flush=True) with any finite grads, which add nothing"
        )
    no_gradients = jax.tree.map(lambda _: None, params)
    return tx.update(no_gradients, opt_state, params, weight=0, flush=True, **extra_args)


def check_window(opt_state: Any, accum_steps: int, *, weight: Any = 1) -> None:
    r"""Checks the values in all windows of a state, under `chex.chexify` or outside of jit.

    .. math:: 0 \le \text{micro\_step} < \text{accum\_steps}, \qquad 0 \le \text{weight\_sum} < \infty, \qquad
              0 \le \text{weight} < \infty

    This must hold in every window. A full window of `GradAccumulator` waits for `take`, so its `micro_step` may also be
    `accum_steps`. `accumulate` itself always checks shapes, dtypes and all values that are known while tracing. Other
    values can only be checked when the program runs.

    Args:
      opt_state: a state that contains windows, at any depth.
      accum_steps: the length of a window.
      weight: the weight about to be passed to `update`.

    Returns:
      Nothing.

    Raises:
      AssertionError: from chex; under `chex.chexify` when the program runs.
      RuntimeError: from chex, in a jitted function that is not inside `chex.chexify`.
      ValueError: the state contains no window.

    Example:
      >>> tx = accumulate(optax.sgd(0.1), 2)
      >>> @chex.chexify
      ... @jax.jit
      ... def step(grads, state, weight):
      ...     check_window(state, 2, weight=weight)
      ...     return tx.update(grads, state, weight=weight)
      >>> updates, state = step(jnp.ones(2), tx.init(jnp.zeros(2)), 3.0)
      >>> chex.block_until_chexify_assertions_complete()

    Source: the checks are value assertions of chex, with the contract of `chex.chexify`.
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, WINDOW_STATES))
    windows = [x for x in nodes if isinstance(x, WINDOW_STATES)]
    if not windows:
        raise ValueError("opt_state must contain a window of accumulate or GradAccumulator, got a state with no window")
    _assert_values(jnp.isfinite(weight) & (jnp.asarray(weight) >= 0), f"weight must be finite and >= 0, got {weight}")
    for window in windows:
        longest = accum_steps - isinstance(window, AccumulateState)
        in_range = (window.micro_step >= 0) & (window.micro_step <= longest)
        _assert_values(in_range, f"micro_step must be between 0 and {longest}")
        _assert_values(jnp.isfinite(window.weight_sum) & (window.weight_sum >= 0), "weight_sum must be finite and >= 0")


def _assert_values(is_valid: jax.Array, message: str) -> None:
    chex.assert_trees_all_equal(is_valid, jnp.ones_like(is_valid), custom_message=message)
