"""Strict settings for every test: no implicit promotion of dtypes or ranks, warnings as errors, eight CPU devices."""

# JAX reads the environment when it is imported.
# ruff: noqa: E402

import logging
import os
from collections import Counter

import speed

speed.prepare()

import helpers
import hypothesis
import jax
import pytest

from shrewjax._programs.switch import are_passes_disabled

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same examples on every machine, more of them in CI; `search` draws thousands of random ones on demand.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.register_profile("search", deadline=None, max_examples=5000, database=None)
# For mutation testing, which asks whether a test fails, not at what.
hypothesis.settings.register_profile(
    "no_shrinking", hypothesis.settings.get_profile("ci"), phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
)
hypothesis.settings.register_profile("quick", hypothesis.settings.get_profile("ci"), max_examples=20)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_addoption(parser):
    parser.addoption(
        "--every",
        type=int,
        default=1,
        metavar="N",
        help="of rows marked `combinations`, the first and each N-th after it",
    )


@pytest.hookimpl(trylast=True)  # after `-m` and `-k`: the N-th of those that they leave
def pytest_collection_modifyitems(config, items):
    leave_out_rows(config, items)
    skip_claims_about_passes(items)


def leave_out_rows(config, items):
    """With `--every N`, a test of combinations keeps one row in N, the same ones in every run."""
    seen, kept, left_out = Counter(), [], []
    for item in items:
        test = item.parent.nodeid, item.originalname
        is_left_out = item.get_closest_marker("combinations") and seen[test] % config.getoption("every")
        (left_out if is_left_out else kept).append(item)
        seen[test] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def skip_claims_about_passes(items):
    """With the passes off (`SHREWJAX_DISABLE_PASSES=1`), what they save is not there."""
    if are_passes_disabled():
        skip = pytest.mark.skip(reason="claims about passes, which are switched off")
        for item in items:
            if item.get_closest_marker("needs_passes"):
                item.add_marker(skip)


def pytest_terminal_summary(terminalreporter):
    """A line for each reason why tests were skipped, with their number."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[-1].removeprefix("Skipped: ") for report in skipped)
    for reason, number in sorted(reasons.items()):
        terminalreporter.write_line(f"{number} skipped: {reason}")


def pytest_unconfigure():
    """After any call of `chexify`, chex warns at exit that nobody waited for its checks, also if somebody did."""
    logging.getLogger("absl").setLevel(logging.ERROR)


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def x64(request):
    with jax.enable_x64(request.param):
        yield request.param


@pytest.fixture
def x64_only():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def as_users_have_it():
    """Implicit promotion, as without these strict settings: Optax mixes dtypes, Flax and Equinox ranks, too."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(params=["Auto", "Explicit"])
def mesh(request):
    return helpers.mesh_of(request.param, data=4, model=2)


@pytest.fixture(scope="module")
def one_device():
    """As in a process with one device, in which such programs compile faster, too."""
    with helpers.seeming_to_have(1):
        yield


@pytest.fixture(scope="module")
def either_world(request):
    """As in a process with as many devices as the test's row says."""
    with helpers.seeming_to_have(request.param) as devices:
        yield devices


@pytest.fixture(scope="session")
def forks():
    """Runs scripts at the same time, each in a process of its own; returns exit code, output and errors of each."""
    with speed.forked() as run:
        yield run
