"""The states of windows, which people save: their fields, and the scalars of them that `metrics` returns.

`accumulate` and `GradAccumulator` have one each. `window` has the arithmetic that changes them.
CONTRIBUTING has all that changes with a field.
"""

from typing import NamedTuple

import jax
import optax

from shrewjax._base.states import described, fields, increment_if, window_around_inner
from shrewjax._base.types import AnyState, Metrics, PyTree
from shrewjax._windows import _noise
from shrewjax._windows._noise import NoiseState as NoiseState  # a public name of the package


@described
class GradAccumulatorState(NamedTuple):
    """A window, open or empty. Its fields are a file format.

    Attributes:
      micro_step: int32 (): number of micro-batches in the open window
      windows: int32 (): number of windows closed with an average
      sum_of_weights: float32 or float64 (), or (devices,) with sum_over: weight of the open window
      window_bad: bool (): drop_window will discard the open window
      dropped: int32 (): number of non-finite micro-batches so far; 0 if they propagate
      value_sum: like sum_of_weights: weighted sum of `value` in the open window; inf without one
      loss: like a weight (): the loss of the last window with an average; inf before it
      weight: like a weight (): the weight of the last window with an average; 0 before it
      noise: sums and averages of the gradient noise, () without noise_decay
      gradient_sum: like the parameters, in the accumulator's dtype, with a leading axis of devices with
        sum_over; meaningless while micro_step is 0
    """

    micro_step: jax.Array
    windows: jax.Array
    sum_of_weights: jax.Array
    window_bad: jax.Array
    dropped: jax.Array
    value_sum: jax.Array
    loss: jax.Array
    weight: jax.Array
    noise: AnyState
    gradient_sum: PyTree

    def metrics(self) -> Metrics:
        """Returns the entries of `shrewjax.metrics`."""
        return metrics_of_window(self)


@described
@window_around_inner
class AccumulateState(NamedTuple):
    """A window and the wrapped optimizer, which runs for each average. Its fields are a file format.

    Attributes:
      micro_step: int32 (): number of micro-batches in the open window
      windows: int32 (): number of windows closed with an average
      applied: bool (): the last call ran inner
      sum_of_weights: float32 or float64 (), or (devices,) with sum_over: weight of the open window
      window_bad: bool (): drop_window will discard the open window
      dropped: int32 (): number of non-finite micro-batches so far; 0 if they propagate
      value_sum: like sum_of_weights: weighted sum of `value` in the open window; inf without one
      loss: like a weight (): the loss of the last window with an average; inf before it
      weight: like a weight (): the weight of the last window with an average; 0 before it
      noise: sums and averages of the gradient noise, () without noise_decay
      gradient_sum: like the parameters, in the accumulator's dtype, with a leading axis of devices with
        sum_over; meaningless while micro_step is 0
      inner_state: the wrapped optimizer's state
    """

    micro_step: jax.Array
    windows: jax.Array
    applied: jax.Array
    sum_of_weights: jax.Array
    window_bad: jax.Array
    dropped: jax.Array
    value_sum: jax.Array
    loss: jax.Array
    weight: jax.Array
    noise: AnyState
    gradient_sum: PyTree
    inner_state: AnyState

    def metrics(self) -> Metrics:
        """Returns the entries of `shrewjax.metrics`."""
        return metrics_of_window(self) | fields(self, "applied")


WINDOW_STATES = (GradAccumulatorState, AccumulateState)


def metrics_of_window(state: AnyState) -> Metrics:
    """Returns the scalars of a window, without the sum of weights if each device has its own.

    Keys are the names of the arguments. Fields have others, because Optax looks for some of these names in a state
    (tests/windows/test_window_state.py).
    """
    found = fields(state, "micro_step", "windows", "window_bad", "dropped", "weight")
    found["value"] = state.loss
    if state.sum_of_weights.ndim == state.micro_step.ndim:
        found["weight_sum"] = state.sum_of_weights
    return found | (_noise.metrics_of_noise(state.noise) if state.noise else {})


def measured(source: AnyState) -> Metrics:
    """Returns the fields that each average replaces. `source` is a state or an `Average`, which have the same names."""
    return fields(source, "loss", "weight", "noise")


def after_average(state: AnyState, new: Metrics, has_average: jax.Array) -> AnyState:
    """Returns the state with these measured fields, and with one window more, if there is an average."""
    windows = increment_if(has_average, state.windows)
    return state._replace(windows=windows, **optax.tree.where(has_average, new, measured(state)))
