"""Strict settings for every test: no implicit promotion of dtypes or ranks, warnings as errors, eight CPU devices."""

import atexit
import gc
import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

# JAX keeps compiled programs in this folder until the session ends, so that no worker, and no process that a test
# starts, compiles what another has compiled. It finds them by the program, the options and its own version.
# A folder that the environment already names stays as it is: with one, a second run compiles only what has changed.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="shrewjax_programs_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import xla_flags

# `helpers.users_jit` compiles as users do. libtpu reads the same variable, does not know the older emitters' flag, and
# would end the process. The compiler for a GPU reads the level, too.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + xla_flags.flags("xla_cpu_parallel_codegen_split_count")
if importlib.util.find_spec("libtpu") is None:
    os.environ["XLA_FLAGS"] += xla_flags.flags("xla_cpu_use_fusion_emitters")
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        os.environ["XLA_FLAGS"] += xla_flags.flags("xla_backend_optimization_level")

import helpers
import hypothesis
import jax
import pytest

from shrewjax._programs.switch import are_passes_disabled

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tracing makes objects by the million, and at Python's own threshold the collector is busy with 4 % of the time.
gc.set_threshold(100_000)

# The same examples on every machine, more of them in CI; a wider, random search runs on demand (-m slow).
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.register_profile("search", deadline=None, max_examples=5000)
# For mutation testing, which asks whether a test fails, not at what.
hypothesis.settings.register_profile(
    "no_shrinking", hypothesis.settings.get_profile("ci"), phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate]
)
hypothesis.settings.register_profile("quick", hypothesis.settings.get_profile("ci"), max_examples=20)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


def pytest_collection_modifyitems(items):
    """With the passes off (`SHREWJAX_DISABLE_PASSES=1`), what they save is not there."""
    if are_passes_disabled():
        skip = pytest.mark.skip(reason="what passes save")
        for item in items:
            if item.get_closest_marker("needs_passes"):
                item.add_marker(skip)


@pytest.fixture(params=[False, True], ids=["x32", "x64"])
def x64(request):
    with jax.enable_x64(request.param):
        yield request.param


@pytest.fixture
def as_users_have_it():
    """Implicit promotion, as without these strict settings: Optax mixes dtypes, Flax and Equinox ranks, too."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(params=["Auto", "Explicit"])
def mesh(request):
    axis_type = jax.sharding.AxisType[request.param]
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type, axis_type))


@pytest.fixture(scope="module")
def one_device():
    """As in a process with one device, in which such programs compile faster, too."""
    with helpers.seeming_to_have(1):
        yield


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="one_device"), pytest.param(8, id="eight_devices", marks=pytest.mark.thorough)],
)
def either_world(request):
    """As in a process with one device; in CI, with eight, too."""
    with helpers.seeming_to_have(request.param) as devices:
        yield devices


@pytest.fixture(scope="session")
def forks():
    """Runs scripts at the same time, each in a process of its own; returns exit code, output and errors of each.

    Warnings are errors, except one about the cache of programs that the tests share: see pyproject.toml.
    """
    ignored = "ignore:Error reading persistent compilation cache entry"
    command = [sys.executable, "-W", "error", "-W", ignored, pathlib.Path(__file__).with_name("forks.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:

        def run(*commands, folder, environment=None):
            printed, errors = ([str(folder / f"{name}-{i}") for i in range(len(commands))] for name in ("out", "err"))
            scripts = [
                {
                    "command": [str(part) for part in command],
                    "folder": str(folder),
                    "printed": printed[i],
                    "errors": errors[i],
                    "environment": environment or {},
                }
                for i, command in enumerate(commands)
            ]
            server.stdin.write(json.dumps(scripts) + "\n")
            server.stdin.flush()
            codes = json.loads(server.stdout.readline())
            texts = ([pathlib.Path(path).read_text() for path in paths] for paths in (printed, errors))
            return list(zip(codes, *texts, strict=True))

        yield run
