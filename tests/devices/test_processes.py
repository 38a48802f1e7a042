"""Two real processes on this machine train as one device does, also where one of them meets a NaN."""

import pathlib
import socket

import jax
import numpy as np
import optax
import pytest
from speed import quick_jit
from train_processes import ACCUM_STEPS, NAN_STEPS, PROCESSES, STEPS, batch, first_params, inner, nonfinite

pytestmark = pytest.mark.thorough

SCRIPT = pathlib.Path(__file__).with_name("train_processes.py")
# What the processes train, one after another: a clip, a rule with a history, a guard.
NAMES = "clip_by_global_norm", "clip_by_norm_zscore", "skip_nonfinite"


def on_one_device(name, nan_steps):
    """The parameters at the end of each window: every window one large batch, its gradient by hand, in float64."""
    tx, params = inner(name), first_params()
    state, at_end = tx.init(params), []
    update = quick_jit(tx.update)
    for first in range(0, STEPS, ACCUM_STEPS):
        window = [i for i in range(first, first + ACCUM_STEPS) if nonfinite(name) == "propagate" or i not in nan_steps]
        x, y, kept = (np.concatenate(parts) for parts in zip(*(batch(i, nan_steps) for i in window), strict=True))
        errors = 2 * (x.astype(np.float64) @ params["w"] + params["b"] - y)[kept] / kept.sum()
        grads = {"w": x[kept].T @ errors, "b": errors.sum(axis=0)}
        updates, state = update({k: np.float32(g) for k, g in grads.items()}, state, params)
        params = jax.device_get(optax.apply_updates(params, updates))
        at_end.append(params)
    return {k: np.stack([x[k] for x in at_end]) for k in params}


def test_two_processes_follow_one_device_also_where_one_of_them_meets_a_nan(forks, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ended = forks(*((SCRIPT, tmp_path, port, i, *NAMES) for i in range(PROCESSES)), folder=tmp_path)
    assert [code for code, _, _ in ended] == [0] * PROCESSES, ended
    for name in NAMES:
        for kind, nan_steps in (("clean", ()), ("nan", NAN_STEPS)):
            own, others = ({**np.load(tmp_path / f"{name}-{kind}-{i}.npz")} for i in range(PROCESSES))
            expected = on_one_device(name, nan_steps)
            for leaf in expected:
                case = f"{name}, {kind}, {leaf}"
                assert own[leaf].tobytes() == others[leaf].tobytes(), case
                error = np.abs(own[leaf] - expected[leaf]).max(axis=tuple(range(1, own[leaf].ndim)))
                size = np.abs(expected[leaf]).max(axis=tuple(range(1, own[leaf].ndim)))
                assert np.all(error <= 1e-5 * size), f"{case}: {error / size}"
            drops = len(nan_steps) if nonfinite(name) == "drop_micro_batch" else 0
            assert own["dropped"] == others["dropped"] == drops
