"""Two real processes on this machine train as one device does, and neither waits for ever for the other."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import optax
import pytest
import xla_flags
from helpers import TRANSFORMATIONS, quick_jit
from train_processes import ACCUM_STEPS, NAN_STEPS, PROCESSES, STEPS, batch, first_params, inner, nonfinite

SCRIPT = pathlib.Path(__file__).with_name("train_processes.py")
FEW = ("clip_by_global_norm", "clip_by_norm_zscore", "skip_nonfinite")


@contextlib.contextmanager
def processes(folder, mode, names):
    """Both of them, and what they print in the folder; none outlives the block."""
    # Compiled as quickly as it can be; without the eight devices that other tests want.
    environment = os.environ | {
        "XLA_FLAGS": xla_flags.flags("xla_cpu_use_fusion_emitters", "xla_cpu_parallel_codegen_split_count"),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent.parent), os.environ.get("PYTHONPATH", "")]),  # for helpers.py
    }
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = []
    try:
        for i in range(PROCESSES):
            command = [sys.executable, SCRIPT, folder, mode, str(port), str(i), *names]
            with (folder / f"printed-{i}").open("wb") as printed:
                started.append(subprocess.Popen(command, env=environment, stdout=printed, stderr=subprocess.STDOUT))
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def printed(folder):
    return "\n".join((folder / f"printed-{i}").read_text() for i in range(PROCESSES))


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


@pytest.mark.parametrize(
    ("names", "timeout"),
    [(FEW, 200), pytest.param(tuple(TRANSFORMATIONS), 500, marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_two_processes_follow_one_device_also_where_one_of_them_meets_a_nan(tmp_path, names, timeout):
    with processes(tmp_path, "to_the_end", names) as both:
        deadline = time.monotonic() + timeout
        codes = [process.wait(timeout=deadline - time.monotonic()) for process in both]
    assert codes == [0, 0], printed(tmp_path)

    for name in names:
        for kind, nan_steps in (("clean", ()), ("nan", NAN_STEPS)):
            own, others = ({**np.load(tmp_path / f"{name}-{kind}-{i}.npz")} for i in range(PROCESSES))
            expected = on_one_device(name, nan_steps)
            for leaf in expected:
                case = f"{name}, {kind}, {leaf}"
                assert own[leaf].tobytes() == others[leaf].tobytes(), case
                error = np.abs(own[leaf] - expected[leaf]).max(axis=tuple(range(1, own[leaf].ndim)))
                size = np.abs(expected[leaf]).max(axis=tuple(range(1, own[leaf].ndim)))
                assert np.all(error <= 1e-5 * size), f"{case}: {error / size}"
            drops = len(nan_steps) if nonfinite(name) == "drop_microbatch" else 0
            assert own["dropped"] == others["dropped"] == drops


@pytest.mark.parametrize("killed", [0, 1], ids=["the_coordinator", "the_other"])
def test_a_process_ends_with_an_error_soon_after_the_other_is_killed(tmp_path, killed):
    with processes(tmp_path, "for_ever", FEW[:1]) as both:
        deadline = time.monotonic() + 100
        while not all((tmp_path / f"training-{i}").exists() for i in range(PROCESSES)):
            assert time.monotonic() < deadline, printed(tmp_path)
            assert [process.poll() for process in both] == [None, None], printed(tmp_path)
            time.sleep(0.1)
        both[killed].kill()
        code = both[1 - killed].wait(timeout=60)
    assert code != 0
    assert "another task died" in (tmp_path / f"printed-{1 - killed}").read_text()
