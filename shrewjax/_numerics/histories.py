r"""Histories and moving averages of past measurements, in float32.

A non-finite measurement is never recorded.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shrewjax._base.states import described
from shrewjax._base.types import Scalar
from shrewjax._numerics import floats


@described
class HistoryState(NamedTuple):
    """The last values, oldest first. Its fields are a file format.

    Attributes:
      values: float32 (length,): only the last `filled` of them are recorded values
      filled: int32 (): number of recorded values, at most the length
    """

    values: jax.Array
    filled: jax.Array


def empty_history(length: int) -> HistoryState:
    return HistoryState(jnp.zeros((length,), jnp.float32), jnp.zeros((), jnp.int32))


def push(history: HistoryState, value: jax.Array) -> HistoryState:
    """Returns the history with one more value if that is finite. A full history drops its oldest value."""
    finite = jnp.isfinite(value)
    # Shifted instead of written into a ring buffer, so that values are in order. A copy of a few kilobytes is cheap.
    shifted = jnp.concatenate([history.values[1:], value.astype(jnp.float32)[None]])
    values = jnp.where(finite, shifted, history.values)
    filled = jnp.minimum(history.filled + 1, history.values.size)
    return HistoryState(values, jnp.where(finite, filled, history.filled))


def percentile(history: HistoryState, p: Scalar) -> jax.Array:
    """Returns NumPy's "linear" percentile of the history; inf if the history is empty. Shape ().

    Not `jnp.nanpercentile`, because it may be one ulp off between two equal values, and so clip a constant norm.
    The test is `test_percentile_of_the_history_is_numpys_at_every_step`.
    """
    last = jnp.maximum(history.filled - 1, 0)
    steps, p = last.astype(jnp.float32), jnp.asarray(p, jnp.float32)
    # The last value itself for p >= 100, because float32 rounds the rank in a history of more than 2**24 / 100 values.
    rank = jnp.where(p < 100, jnp.maximum(p, 0) * steps / 100, steps)
    below = jnp.floor(rank).astype(jnp.int32)
    fraction = rank - jnp.floor(rank)

    ordered = jnp.sort(jnp.where(_is_filled(history), history.values, jnp.inf))
    low, high = ordered[below], ordered[jnp.minimum(below + 1, last)]
    # Equal neighbours are the percentile itself. Interpolated, two infinite ones would give inf - inf = NaN.
    between = jnp.where(low == high, low, low + fraction * (high - low))
    return jnp.where(jnp.isnan(p), jnp.nan, between)


def mean_and_std(history: HistoryState) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and the sample standard deviation, with n - 1 in the denominator. Shapes ()."""
    is_filled = _is_filled(history)
    # Scaled by a power of two, which is exact, so that the squares stay in range.
    largest = jnp.max(jnp.where(is_filled, jnp.abs(history.values), 0))
    up = floats.power_of_two_for(largest)
    values = history.values * up
    n = history.filled.astype(jnp.float32)
    mean = jnp.sum(values, where=is_filled) / jnp.maximum(n, 1)
    squares = jnp.sum((values - mean) ** 2, where=is_filled) / jnp.maximum(n - 1, 1)
    return mean / up, jnp.sqrt(squares) / up


def ema(average: jax.Array, value: jax.Array, share: jax.Array) -> jax.Array:
    """Returns a moving average with one more value of weight `share`. A constant value keeps it to the last bit."""
    return average + share * (value - average)


class Moments(NamedTuple):
    """The weighted mean and standard deviation of the values so far."""

    recorded: jax.Array  # int32 (): number of values
    mean: jax.Array  # float32 ()
    std: jax.Array  # float32 ()


def update_moments(
    moments: Moments, value: jax.Array, share: jax.Array, averages_all: jax.Array
) -> Moments:
    """Returns the moments with one more value of weight `share`; of the same weight as each before if `averages_all`.

    A constant value keeps its mean to the last bit. If a moment would be non-finite, all of them stay.
    """
    n = optax.safe_increment(moments.recorded)
    share = jnp.where(averages_all, 1 / n.astype(jnp.float32), share)
    mean = ema(moments.mean, value, share)
    # With equal weights, the exact square to add is (value - old mean) (value - new mean), as in Welford's algorithm.
    by_both_means = jnp.sqrt(1 - share) * (value - moments.mean)
    deviation = jnp.where(averages_all, by_both_means, value - mean)
    # The root of the average of squares, by `hypot`, because the squares themselves may leave the range. From JAX 0.12
    # on its derivative at (0, 0) is NaN: `test_derivative_through_steps_of_equal_norms_is_finite`.
    past, present = jnp.sqrt(1 - share) * moments.std, jnp.sqrt(share) * deviation
    is_zero = (past == 0) & (present == 0)
    std = jnp.where(is_zero, 0, jnp.hypot(jnp.where(is_zero, 1, past), present))
    finite = jnp.isfinite(value) & jnp.isfinite(mean) & jnp.isfinite(std)
    return optax.tree.where(finite, Moments(n, mean, std), moments)


def _is_filled(history: HistoryState) -> jax.Array:
    length = history.values.size
    return jnp.arange(length, dtype=jnp.int32) >= length - history.filled
