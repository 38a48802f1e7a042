"""What rules remember of past steps: float32 scalars, and only finite ones.

A measurement that is not finite is never recorded: one would stay in an average for ever, and in a history for as long
as the history is.
"""

import math
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shrewjax import _floats
from shrewjax._arguments import Scalar
from shrewjax._states import described


@described
class History(NamedTuple):
    """The last so many values, oldest first. Its fields are a file format: a change to them breaks checkpoints."""

    values: Annotated[jax.Array, "float32 (length,): only the last `filled` mean something"]
    filled: Annotated[jax.Array, "int32 (): how many there are, at most the length"]


def empty_history(length: int) -> History:
    """A history in which nothing is recorded yet."""
    return History(values=jnp.zeros((length,), jnp.float32), filled=jnp.zeros((), jnp.int32))


def push(history: History, value: jax.Array) -> History:
    """The history with one more value, if it is finite; the oldest one makes place for it."""
    finite = jnp.isfinite(value)
    # Moved along rather than written round a ring: the order shows, and a few kilobytes cost nothing.
    shifted = jnp.concatenate([history.values[1:], value.astype(jnp.float32)[None]])
    return History(
        values=jnp.where(finite, shifted, history.values),
        filled=jnp.where(finite, jnp.minimum(history.filled + 1, history.values.size), history.filled),
    )


def percentile(history: History, p: Scalar) -> jax.Array:
    """NumPy's percentile, "linear", of what is in the history; inf if nothing is. Shape ()."""
    steps = jnp.maximum(history.filled - 1, 0)
    # The rank p (n - 1) / 100 in two parts, the whole percents in integers: float32 would lose the fraction.
    if isinstance(p, jax.Array):
        p = jnp.clip(p.astype(jnp.float32), 0, 100)
        whole, rest = jnp.floor(p), p - jnp.floor(p)
        percents = jnp.where(jnp.isnan(p), 0, whole).astype(jnp.int32)
    else:
        percents, rest = jnp.asarray(math.floor(p), jnp.int32), jnp.asarray(p - math.floor(p), jnp.float32)
    hundredths = percents * steps
    beyond = ((hundredths % 100).astype(jnp.float32) + rest * steps.astype(jnp.float32)) / 100
    below = hundredths // 100 + jnp.floor(beyond).astype(jnp.int32)
    fraction = beyond - jnp.floor(beyond)

    ordered = jnp.sort(jnp.where(_is_filled(history), history.values, jnp.inf))
    low, high = ordered[below], ordered[jnp.minimum(below + 1, steps)]
    # Equal neighbours, infinite ones included, are the answer themselves.
    return jnp.where(low == high, low, low + fraction * (high - low)) + jnp.where(jnp.isnan(rest), jnp.nan, 0)


def mean_and_std(history: History) -> tuple[jax.Array, jax.Array]:
    """The mean, and the standard deviation with n - 1 in the denominator, as of a sample; shapes ()."""
    there = _is_filled(history)
    # Scaled, exactly, so that the squares stay in range.
    largest = jnp.max(jnp.where(there, jnp.abs(history.values), 0))
    up = _floats.power_of_two_for(largest)
    values = history.values * up
    n = history.filled.astype(jnp.float32)
    mean = jnp.sum(values, where=there) / jnp.maximum(n, 1)
    squares = jnp.sum((values - mean) ** 2, where=there) / jnp.maximum(n - 1, 1)
    return mean / up, jnp.sqrt(squares) / up


def ema(average: jax.Array, value: jax.Array, share: jax.Array) -> jax.Array:
    """A moving average with one more value, which counts for `share`; a constant keeps it to the last bit."""
    return average + share * (value - average)


class Moments(NamedTuple):
    """The mean and the standard deviation of the values so far, by whatever weights."""

    recorded: jax.Array  # int32 (): how many values
    mean: jax.Array  # float32 ()
    std: jax.Array  # float32 ()


def update_moments(moments: Moments, value: jax.Array, share: jax.Array, averages_all: jax.Array) -> Moments:
    """The moments with one more value, which counts for `share`, or, where that is said, as much as each before.

    A constant keeps its mean to the last bit. Where a moment would not be finite, they stay.
    """
    n = optax.safe_increment(moments.recorded)
    share = jnp.where(averages_all, 1 / n.astype(jnp.float32), share)
    mean = ema(moments.mean, value, share)
    # Of an average over all, the square that is added is (value - old mean) (value - new mean): no less is exact.
    deviation = jnp.where(averages_all, jnp.sqrt(1 - share) * (value - moments.mean), value - mean)
    # The root of the moving average of squares; never the squares themselves, which leave the range.
    std = jnp.hypot(jnp.sqrt(1 - share) * moments.std, jnp.sqrt(share) * deviation)
    finite = jnp.isfinite(value) & jnp.isfinite(mean) & jnp.isfinite(std)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), Moments(n, mean, std), moments)


def _is_filled(history: History) -> jax.Array:
    length = history.values.size
    return jnp.arange(length, dtype=jnp.int32) >= length - history.filled
