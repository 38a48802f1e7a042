r"""The gradient noise scale, measured in the windows of an accumulation.

The gradient g_i of micro-batch i is the mean over w_i independent examples. So it has the mean G and the covariance
Sigma / w_i. A window has K micro-batches of the weight W = sum w_i, and their average g = sum w_i g_i / W:

.. math:: q = \sum_i w_i |g_i|^2, \qquad S = \frac{q - W |g|^2}{K - 1}, \qquad G_2 = |g|^2 - \frac{S}{W}

For any weights, S has the mean tr Sigma, and G_2 has the mean norm(G)^2. For equal weights, these are the estimates of
McCandlish et al. 2018, appendix A.1. Unbiased averages of S and of G_2 over windows give the noise scale
tr Sigma / norm(G)^2. A window of that weight has as much noise as signal. G_2 of one window may be negative.

q is kept at three scales, `_SCALES`, because the square of a norm above 1e19 or below 1e-19 leaves the range of
float32. A closing window takes the scale at which q is in range.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shrewjax._base import arguments, trees
from shrewjax._base.states import described, increment_if
from shrewjax._base.types import DType, Flag, Metrics, Number, Scalar
from shrewjax._numerics import floats, histories
from shrewjax._numerics.floats import ExtendedFloat
from shrewjax._numerics.norms import RANGE

# The range in which a sum of squares is trusted, and the exponents of two that bring norms there.
_TRUSTED_ABOVE, _SHRINK, _GROW = RANGE[jnp.dtype(jnp.float32)]


_SCALES = (0, _SHRINK, _GROW)


@described
class NoiseState(NamedTuple):
    """The sums of the open window and the averages over closed ones. Its fields are a file format.

    Attributes:
      square_sums: float32 (3,), or (devices, 3): sum of w abs(g)^2 in the window, at three scales
      kept: float32 (), or (devices,): number of micro-batches in that sum
      recorded: int32 (): number of windows in the averages
      noise_trace: float32 (): average of S, in units of 4**exponent
      signal: float32 (): average of G2, in units of 4**exponent
      exponent: int32 (): exponent of two of the gradients' scale
    """

    square_sums: jax.Array
    kept: jax.Array
    recorded: jax.Array
    noise_trace: jax.Array
    signal: jax.Array
    exponent: jax.Array


# For a state without noise, whose window may be open: NaN sums, so that this window has no estimate. The next window's
# first micro-batch replaces them.
FOR_AN_OPEN_WINDOW = "(n := tx.init(params).noise)._replace(square_sums=n.square_sums + jnp.nan)"


def checked_decay(value: Number) -> Scalar:
    """Returns a decay below 1, also in float32, in which 1 would make every average NaN."""
    decay = arguments.real("noise_decay", value, at_least=0)
    if isinstance(decay, float) and np.float32(decay) >= 1:
        raise ValueError(f"noise_decay must be below 1, got {trees.shown(value)}")
    return decay


def empty(zeros: Callable[[tuple[int, ...], DType], jax.Array]) -> NoiseState:
    """Returns the state before the first window. `zeros` makes the sums, which may have a row for each device."""
    return NoiseState(
        square_sums=zeros((len(_SCALES),), jnp.float32),
        kept=zeros((), jnp.float32),
        recorded=jnp.zeros((), jnp.int32),
        noise_trace=jnp.zeros((), jnp.float32),
        signal=jnp.zeros((), jnp.float32),
        exponent=jnp.zeros((), jnp.int32),
    )


def added(
    state: NoiseState,
    norm: ExtendedFloat,
    of_square: jax.Array,
    is_kept: Flag,
    is_first: Flag,
) -> NoiseState:
    """Returns the state with of_square * norm**2 added if the micro-batch is kept.

    The first micro-batch of a window replaces the sums.
    """
    of_norm = jnp.sqrt(of_square.astype(jnp.float32))
    shifts = np.asarray(_SCALES, np.int32).reshape(*[1] * norm.exponent.ndim, len(_SCALES))
    mantissa = (norm.mantissa.astype(jnp.float32) * of_norm)[..., None]
    terms = jnp.square(floats.times_power_of_two(mantissa, norm.exponent[..., None] + shifts))
    kept = jnp.asarray(is_kept, jnp.float32) + jnp.zeros_like(state.kept)
    terms = jnp.where(kept[..., None] > 0, terms, 0)
    return state._replace(
        square_sums=jnp.where(is_first, 0, state.square_sums) + terms,
        kept=jnp.where(is_first, 0, state.kept) + kept,
    )


def closed(
    state: NoiseState,
    totals: NoiseState,
    sum_of_weights: jax.Array,
    norm: ExtendedFloat,
    decay: Scalar,
) -> NoiseState:
    """Returns the state after a window whose average has this norm. `totals` has its sums over all devices.

    1. Has the window an estimate? It needs two micro-batches, a weight, and finite norms.
    2. Take its norms in one unit with the averages.
    3. Estimate S and G_2.
    4. Average them with those of the windows before.
    5. Choose the unit of the new averages. Without an estimate, the state stays.
    """
    # 1. Has it an estimate?
    root = _norm_of(totals.square_sums)
    weight = sum_of_weights.astype(jnp.float32)
    has_estimate = (totals.kept >= 2) & (weight > 0) & jnp.isfinite(weight)
    has_estimate &= jnp.isfinite(root.mantissa) & jnp.isfinite(norm.mantissa)
    # Otherwise the numbers below are computed of zeros, and not used.
    weight = jnp.where(has_estimate, weight, 1)
    nothing = ExtendedFloat(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32))
    root, norm = optax.tree.where(has_estimate, (root, norm), (nothing, nothing))

    # 2. All squares come in the unit 4**exponent, which holds the largest of them, so that none leaves the range.
    window_exponent = jnp.maximum(root.exponent, norm.exponent)
    old_exponent = jnp.where(state.recorded > 0, state.exponent, window_exponent)
    exponent = jnp.maximum(window_exponent, old_exponent)
    root_q, average = (
        floats.times_power_of_two(x.mantissa.astype(jnp.float32), x.exponent - exponent)
        for x in (root, norm)
    )

    # 3. S is computed as a product, because the difference of the squares would lose the last digits twice.
    weighted_average = jnp.sqrt(weight) * average
    product = (root_q - weighted_average) * (root_q + weighted_average)
    trace = product / jnp.maximum(totals.kept - 1, 1)
    signal = jnp.square(average) - trace / weight

    # 4. The share makes the average over n windows that of exponential weights, corrected for its start.
    n = increment_if(True, state.recorded)
    beta = jnp.asarray(decay, jnp.float32)
    share = (1 - beta) / (1 - beta ** n.astype(jnp.float32))
    change = 2 * (old_exponent - exponent)
    old_trace = floats.times_power_of_two(state.noise_trace, change)
    old_signal = floats.times_power_of_two(state.signal, change)
    trace = histories.ema(old_trace, trace, share)
    signal = histories.ema(old_signal, signal, share)

    # 5. Choose the unit again, so that the averages neither leave the range nor lose digits.
    largest = jnp.maximum(jnp.abs(trace), jnp.abs(signal))
    shift = jnp.where(largest > 0, floats.exponent_of(largest) // 2, 0)
    new = state._replace(
        recorded=n,
        noise_trace=floats.times_power_of_two(trace, -2 * shift),
        signal=floats.times_power_of_two(signal, -2 * shift),
        exponent=exponent + shift,
    )
    return optax.tree.where(has_estimate, new, state)


@partial(jax.jit, inline=True)  # as `states.largest`
def metrics_of_noise(state: NoiseState) -> Metrics:
    """Returns the two averages and their quotient, the noise scale: inf before the first estimate."""
    has_estimate = state.recorded > 0
    trace = floats.times_power_of_two(state.noise_trace, 2 * state.exponent)
    signal = floats.times_power_of_two(state.signal, 2 * state.exponent)
    scale = state.noise_trace / jnp.where(state.signal != 0, state.signal, 1)
    scale = jnp.where(has_estimate & (state.signal != 0), scale, jnp.inf)
    return {
        "noise_scale": scale,
        "noise_trace": jnp.where(has_estimate, trace, jnp.inf),
        "signal_squared": jnp.where(has_estimate, signal, jnp.inf),
    }


def _norm_of(square_sums: jax.Array) -> ExtendedFloat:
    """Returns the square root of q from its sums at three scales: the one that neither overflows nor underflows."""
    plain, shrunk, grown = square_sums
    is_large, is_small = ~jnp.isfinite(plain), plain < _TRUSTED_ABOVE
    chosen = jnp.where(is_large, shrunk, jnp.where(is_small, grown, plain))
    shift = _SHRINK * is_large.astype(jnp.int32) + _GROW * is_small.astype(jnp.int32)
    return floats.shifted(jnp.sqrt(chosen), -shift)
