r"""The window for loops that are driven from the host: a class whose methods add micro-batches and take the average."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from shrewjax._base import arguments, trees
from shrewjax._base.mesh import is_traced, on_mesh_of, summed
from shrewjax._base.states import require_state_of
from shrewjax._base.types import AnyState, Argument, AxisName, DType, Number, PyTree
from shrewjax._windows.window import (
    AccumSteps,
    Nonfinite,
    Reduction,
    Window,
    checked_weight,
)
from shrewjax._windows.window_state import GradAccumulatorState, after_average, measured


class GradAccumulator:
    r"""Averages micro-batches over a window, for loops driven from the host.

    .. math:: \bar g = \frac{\sum_i w_i g_i}{\sum_i w_i}

    The object has the window's rules and no data. Each method takes a state and returns the new one, so that `add` and
    `take` can be jitted, with the state donated. Jit two functions: one that adds a micro-batch in place, and one that
    takes the average and runs the optimizer.

    The arguments, the edge cases and the errors are those of `accumulate`.

    Example:
      >>> window = GradAccumulator(2)
      >>> state = window.init({"w": jnp.zeros(2)})
      >>> average, state = window.step(state, {"w": jnp.array([1.0, 2.0])})
      >>> print(average)
      None
      >>> average, state = window.step(state, {"w": jnp.array([3.0, 4.0])})
      >>> average
      {'w': Array([2., 3.], dtype=float32)}

    In a training loop, jitted and in place:
      >>> add = jax.jit(window.add, donate_argnums=0)
      >>> state = add(state, {"w": jnp.array([1.0, 2.0])})
      >>> bool(window.ready(state)), int(window.current_step(state))
      (False, 1)

    Source: by linearity of the gradient, the average is the gradient of the mean loss over the window's examples.
    """

    def __init__(
        self,
        accum_steps: AccumSteps,
        *,
        reduction: Reduction = "mean",
        accumulator_dtype: DType = None,
        nonfinite: Nonfinite = "propagate",
        sum_over: AxisName | None = None,
        sharded_over: AxisName | None = None,
        noise_decay: Number | None = None,
    ) -> None:
        self._given = arguments.among(Window, locals())
        self._window = Window(**self._given)

    def __getstate__(self) -> dict[str, Argument]:
        """Returns the arguments, so that a pickle names nothing private."""
        return self._given

    def __setstate__(self, given: dict[str, Argument]) -> None:
        self._given, self._window = given, Window(**given)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._given.items())
        return f"GradAccumulator({given})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GradAccumulator) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        """Returns all arguments, so that equal accumulators are one static argument of `jax.jit`.

        An array has no hash, and is equal to itself alone.
        """
        checked = vars(self._window).values()
        return tuple(id(x) if isinstance(x, jax.Array) else x for x in checked)

    @property
    def accum_steps(self) -> AccumSteps:
        """The number of micro-batches per window, as passed and checked."""
        return self._window.accum_steps

    def init(self, params: PyTree) -> GradAccumulatorState:
        """Returns an empty window for gradients like `params`, with the sharding of `params`."""
        return on_mesh_of(params, self._window.init(params))

    def add(
        self,
        state: GradAccumulatorState,
        grads: PyTree,
        weight: Number = 1,
        value: Number | None = None,
    ) -> GradAccumulatorState:
        """Adds a micro-batch to the window, even to a full one. Call `take` when `ready` is true.

        Args:
          state: the window so far; may be donated.
          grads: the micro-batch's gradients, like the parameters passed to `init`.
          weight: its number of examples or tokens, as in `accumulate`.
          value: its loss, as in `accumulate`. After `take`, the state has the window's in `loss`.
        """
        _require_window(state)
        arrays = trees.gradient_arrays(summed(grads))
        weight = checked_weight(weight, state)
        return self._window.advance(state, arrays, weight, value).state

    def ready(self, state: GradAccumulatorState) -> jax.Array:
        """Returns whether the window is full. Shape (), bool."""
        _require_window(state)
        return state.micro_step >= self._window.length(state.windows)

    def take(self, state: GradAccumulatorState) -> tuple[PyTree, jax.Array, GradAccumulatorState]:
        """Closes the window, full or not. Returns its average, whether it has one, and an empty window.

        The average has the accumulator's dtype. There is none if the window is empty, has a weight of 0 or is discarded
        by `"drop_window"`. The average is then zeros, and `windows` does not increase. Run the optimizer only if there
        is one. The average may share its buffer with the state. Use it before the state is donated, preferably in one
        program with the optimizer:

          >>> window, inner = GradAccumulator(2), optax.sgd(1.0)
          >>> def close(params, opt_state, state):
          ...     average, closed, state = window.take(state)
          ...     def idle():
          ...         return params, opt_state
          ...     def apply():
          ...         updates, new = inner.update(average, opt_state, params)
          ...         return optax.apply_updates(params, updates), new
          ...     return *jax.lax.switch(closed.astype(int), [idle, apply]), state
          >>> params = jnp.zeros(2)
          >>> state = window.add(window.init(params), jnp.array([1.0, 2.0]))
          >>> jax.jit(close, donate_argnums=(0, 1, 2))(params, inner.init(params), state)[0]
          Array([-1., -2.], dtype=float32)

        Write the branch as a `switch` whose first branch is the idle one, because only that branch returns its operands
        without a copy. `jax.lax.cond` puts the other one first on a GPU.
        """
        _require_window(state)
        no_gradients = jax.tree.map(lambda _: None, state.gradient_sum)
        added = self._window.advance(state, no_gradients, 0.0, None, flush=True)
        average = self._window.average(added)
        has_average = jnp.asarray(added.closes & average.has_weight)
        zeros = optax.tree.zeros_like(average.gradients)
        gradients = optax.tree.where(has_average, average.gradients, zeros)
        new_state = after_average(added.state, measured(average), has_average)
        if not self._window.is_partial:
            new_state = new_state._replace(gradient_sum=gradients)
        return gradients, has_average, new_state

    def reset(self, state: GradAccumulatorState) -> GradAccumulatorState:
        """Discards the open window. `windows`, `dropped`, `loss`, `weight` and the noise's averages stay unchanged."""
        _require_window(state)
        # The sums are not cleared, because the next micro-batch overwrites them.
        return state._replace(
            micro_step=jnp.zeros_like(state.micro_step),
            sum_of_weights=jnp.zeros_like(state.sum_of_weights),
            window_bad=jnp.zeros_like(state.window_bad),
        )

    def step(
        self,
        state: GradAccumulatorState,
        grads: PyTree,
        weight: Number = 1,
        value: Number | None = None,
    ) -> tuple[PyTree | None, GradAccumulatorState]:
        """Adds a micro-batch and, if the window is then full, takes its average. Cannot be used under jit.

        Returns:
          The average and the state. The average is None if the window is still open, or closed without one.
        """
        if is_traced((state, grads, weight, value)):
            raise ValueError(
                "step decides on the host and cannot be traced. Use add, ready and take under jit"
            )
        _require_window(state)
        # The weight is checked here, because jit hides its value.
        state = _jitted_add(self, state, grads, checked_weight(weight, state), value)
        if not self.ready(state):
            return None, state
        average, closed, state = self.take(state)
        return (average if closed else None), state

    def current_step(self, state: GradAccumulatorState) -> jax.Array:
        """Returns the number of micro-batches in the open window. Shape (), int32."""
        _require_window(state)
        return state.micro_step


def _require_window(state: AnyState) -> None:
    require_state_of(state, GradAccumulatorState, "add(state, grads)")


# Jitted once for the class, because an object that holds a jitted function cannot be pickled.
_jitted_add = jax.jit(GradAccumulator.add, static_argnums=0)
