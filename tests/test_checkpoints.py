"""A run that is killed in mid-window after a save, and resumed, ends bit for bit where it would have ended."""

import pathlib
import signal
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("resume_training.py")


def run(folder, kind, devices, *runs):
    command = [sys.executable, SCRIPT, folder, kind, str(devices), *runs]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("kind", "devices_before", "devices_after"), [("orbax", 1, 1), ("orbax", 2, 8), ("flax", 1, 4)]
)
def test_killed_in_mid_window_and_resumed_ends_bit_identically(tmp_path, kind, devices_before, devices_after):
    killed = run(tmp_path, kind, devices_before, "whole", "killed")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run(tmp_path, kind, devices_after, "resumed")
    assert resumed.returncode == 0, resumed.stderr
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "whole").read_bytes()
    assert not (tmp_path / "killed").exists()
