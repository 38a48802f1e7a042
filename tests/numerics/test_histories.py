"""Past measurements, against a list of them in NumPy's float64."""

import numpy as np
import pytest
from speed import quick_jit

from shrewjax._numerics import histories

f32 = np.float32
LENGTH = 4


def pushed(values):
    """The history after each value, and the last finite ones."""
    push, history, recorded = quick_jit(histories.push), histories.empty_history(LENGTH), []
    for value in f32(values):
        history, recorded = push(history, value), recorded + [value] * bool(np.isfinite(value))
        yield history, recorded[-LENGTH:]


def test_a_history_has_the_last_finite_values_oldest_first():
    for history, recorded in pushed([3, np.nan, 1, 4, np.inf, 1, -5, 9, -np.inf, 2]):
        assert int(history.filled) == len(recorded)
        assert np.asarray(history.values)[LENGTH - len(recorded) :].tolist() == recorded


@pytest.mark.parametrize("scale", [1e-37, 1.0, 3e37])
def test_mean_and_deviation_are_numpys_where_squares_leave_the_range(scale):
    mean_and_std = quick_jit(histories.mean_and_std)
    for history, recorded in pushed(scale * np.asarray([3, np.nan, 1, 4, 1, 5, 9])):
        mean, std = mean_and_std(history)
        np.testing.assert_allclose(mean, np.mean(recorded, dtype=np.float64), rtol=1e-6)
        expected = np.std(recorded, ddof=1, dtype=np.float64) if len(recorded) > 1 else 0
        np.testing.assert_allclose(std, expected, rtol=1e-6)


@pytest.mark.parametrize("averages_all", [True, False])
def test_moments_are_those_of_all_values_or_of_weights_that_decay(averages_all):
    values, share = f32([3, 1, 4, 1, 5]), f32(0.25)
    update, moments = quick_jit(histories.update_moments), histories.Moments(np.int32(0), f32(0), f32(0))
    mean, variance = 0.0, 0.0
    for i, value in enumerate(values.tolist()):
        moments = update(update(moments, value, share, averages_all), f32(np.nan), share, averages_all)
        mean = 0.75 * mean + 0.25 * value
        variance = 0.75 * variance + 0.25 * (value - mean) ** 2
        if averages_all:
            mean, variance = np.mean(values[: i + 1], dtype=np.float64), np.var(values[: i + 1], dtype=np.float64)
        assert int(moments.recorded) == i + 1
        np.testing.assert_allclose([moments.mean, moments.std], [mean, variance**0.5], rtol=1e-6)


def test_percentile_100_is_the_last_value_of_a_history_of_any_length():
    """In float32, 100 * 700_001 / 100 is less than 700_001."""
    length = 700_002
    history = histories.HistoryState(values=np.arange(length, dtype=f32), filled=np.int32(length))
    assert float(quick_jit(histories.percentile)(history, 100.0)) == length - 1
