"""A run that is killed in mid-window after a save, and resumed, ends bit for bit as one that is not killed."""

import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from helpers import thorough

import shrewjax

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


@pytest.mark.parametrize(
    "wrap", [shrewjax.skip_nonfinite, lambda tx: shrewjax.accumulate(tx, 2)], ids=["guard", "window"]
)
def test_a_state_that_orbax_restored_without_a_target_is_an_error_whose_remedy_works(tmp_path, wrap):
    params, tx = {"w": jnp.ones(2)}, wrap(optax.sgd(0.1, momentum=0.9))
    _, state = tx.update(params, tx.init(params), params)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        bare = checkpointer.restore(tmp_path / "state")
        restored = checkpointer.restore(tmp_path / "state", tx.init(params))
    with pytest.raises(
        ValueError, match=r"got dict\. .* Or, if it was restored, restore it with tx\.init\(params\) as the target$"
    ):
        tx.update(params, bare, params)
    found, expected = (tx.update(params, s, params) for s in (restored, state))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
