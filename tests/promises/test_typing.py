"""The code that the type checkers are shown (`typing/user_code.py`) is code that works. They refuse mistakes."""

import importlib.util
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from speed import quick_jit

pytestmark = pytest.mark.thorough

ROOT = pathlib.Path(__file__).parents[2]
PATH = pathlib.Path(__file__).parent / "typing" / "user_code.py"
spec = importlib.util.spec_from_file_location("user_code", PATH)
user_code = importlib.util.module_from_spec(spec)
spec.loader.exec_module(user_code)

EXPECTED = {
    "clips_of_trees": lambda nothing: nothing is None,
    "recurrence": lambda count: count == 1,
    "train_step_of_a_chain": lambda norm: norm > 0,
    "whole_batch_in_one_call": lambda loss: loss == 0,
    "loss_of_the_whole_batch": lambda difference: difference == 0,
    "state_with_its_type": lambda applied: applied is True,
    "loop_of_the_host": lambda params: (params["w"] != 0).all(),
    "loss_and_noise_of_windows": lambda metrics: metrics["accumulate/value"] == pytest.approx(0.16),
    "scheduled_and_split": lambda metrics: len(metrics) > 5,
}


JITTED = {"clips_of_trees", "recurrence"}  # which compile each of their operations outside of jit


@pytest.mark.parametrize("name", EXPECTED)
def test_typed_user_code_runs(name):
    run = getattr(user_code, name)
    with jax.numpy_dtype_promotion("standard"):
        assert EXPECTED[name](quick_jit(run)() if name in JITTED else run())


def test_typed_updates_as_optax_has_them_run():
    assert user_code.updates_as_optax_has_them(jnp.ones(2)).tolist() == pytest.approx([0.9, 0.9])


def test_typed_user_code_silences_no_checker():
    assert "ignore" not in PATH.read_text()


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_checkers_accept_what_is_right_and_refuse_each_mistake(checker):
    """In `mistaken_code.py`, an ignored error that is none is reported."""
    pytest.importorskip(checker)
    found = subprocess.run([sys.executable, "-m", checker], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
