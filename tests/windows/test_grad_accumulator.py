"""The window that the host drives."""

import copy
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from recording import BAD_WEIGHTS, POLICIES, recorder, vector
from speed import quick_jit

import shrewjax


@pytest.mark.parametrize("nonfinite", POLICIES)
@pytest.mark.parametrize("reduction", ["mean", "sum_over_weights", "sum"])
def test_host_driven_window_gives_what_accumulate_gives(nonfinite, reduction):
    params = vector(0.0, 0.0)
    window = shrewjax.GradAccumulator(3, reduction=reduction, nonfinite=nonfinite)
    tx = shrewjax.accumulate(recorder(), 3, reduction=reduction, nonfinite=nonfinite)
    add, take = quick_jit(window.add, donate_argnums=0), quick_jit(window.take)
    update, state, host = quick_jit(tx.update), tx.init(params), window.init(params)
    rows = np.random.default_rng(0).normal(size=(11, 2)).astype(np.float32)
    rows[4] = np.nan
    for i, grads in enumerate(rows):
        updates, state = update(grads, state, params, weight=np.float32(i % 4))
        host = add(host, grads, np.float32(i % 4))
        assert int(window.current_step(host)) % 3 == int(state.micro_step)
        if window.ready(host):
            average, _, host = take(host)
            assert_close(average, updates, rtol=3e-7)
    host, state = jax.device_get((host, state))
    for name in ("micro_step", "windows", "sum_of_weights", "window_bad", "dropped"):
        assert getattr(host, name) == getattr(state, name), name


def test_step_gives_the_average_when_the_window_is_full():
    window = shrewjax.GradAccumulator(2)
    state = window.init(vector(0.0))
    for i in range(3):
        average, state = window.step(state, vector(2.0 * i))
        assert average is None
        average, state = window.step(state, vector(4.0), weight=3)
        assert float(average[0]) == pytest.approx((2.0 * i + 12) / 4)
    assert window.accum_steps == 2
    with pytest.raises(ValueError, match="step decides on the host"):
        jax.jit(window.step)(state, vector(0.0))


def test_step_raises_what_add_raises_of_a_weight():
    window = shrewjax.GradAccumulator(2)
    state = window.init(vector(0.0))
    for bad in BAD_WEIGHTS:
        with pytest.raises(ValueError, match="weight must be") as of_add:
            window.add(state, vector(1.0), bad)
        with pytest.raises(ValueError, match=re.escape(str(of_add.value))):
            window.step(state, vector(1.0), bad)


def longer(windows):
    return 2 + windows


class Longer(shrewjax.GradAccumulator):
    def __init__(self):
        super().__init__(longer, accumulator_dtype="bfloat16", nonfinite="drop_micro_batch")


COPIES = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "copy": copy.copy, "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("how", COPIES)
def test_copy_of_a_window_does_what_the_window_does(how):
    window = Longer()
    _, state = window.step(window.init(vector(0.0)), vector(2.0))
    copied = COPIES[how](window)
    average, _ = copied.step(COPIES[how](state), vector(4.0))
    assert average.dtype == jnp.bfloat16
    assert float(average[0]) == 3


def test_take_and_reset_of_open_and_empty_windows():
    window = shrewjax.GradAccumulator(4)
    empty = window.init(vector(0.0))
    average, closed, state = window.take(empty)
    assert (float(average[0]), bool(closed)) == (0, False)
    assert int(state.windows) == 0
    state = window.add(window.add(empty, vector(2.0)), vector(4.0))
    assert int(window.current_step(window.reset(state))) == 0
    average, _, _ = window.take(window.add(window.reset(state), vector(7.0)))
    assert float(average[0]) == 7
    average, closed, state = window.take(state)
    assert (float(average[0]), bool(closed)) == (3, True)
    assert (int(state.micro_step), int(state.windows)) == (0, 1)
