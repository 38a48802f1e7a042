"""A run that is killed in mid-window after a save, and resumed, ends bit for bit as one that is not killed."""

import pathlib
import signal

import pytest
from helpers import thorough

SCRIPT = pathlib.Path(__file__).with_name("resume_training.py")


@pytest.mark.parametrize(
    ("kind", "devices_before", "devices_after"),
    [("orbax", 2, 8), *thorough(("flax", 1, 4), ("orbax", 1, 1))],
)
def test_killed_in_mid_window_and_resumed_ends_bit_identically(forks, tmp_path, kind, devices_before, devices_after):
    arguments = (SCRIPT, tmp_path, kind, devices_before, devices_after)
    ((code, _, errors),) = forks((*arguments, "whole", "killed"), folder=tmp_path)
    assert code == -signal.SIGKILL, errors
    ((code, _, errors),) = forks((*arguments, "resumed"), folder=tmp_path)
    assert code == 0, errors
    assert (tmp_path / "resumed").read_bytes() == (tmp_path / "whole").read_bytes()
    assert not (tmp_path / "killed").exists()
