"""Runs scripts in forks of one process, which has imported, with warnings as errors, what takes seconds to import.

A script finds no more than a new process would: none of the tests' modules, and JAX without devices as yet.
Each line of the input is a list of scripts to run at the same time. The answer is a list of their exit codes.
"""

import gc
import json
import os
import runpy
import signal
import sys
import warnings

# ruff: noqa: F401
import equinox
import flax.linen
import flax.nnx
import flax.serialization
import matplotlib.backends.backend_agg
import matplotlib.figure
import optax
import orbax.checkpoint
import PIL.PngImagePlugin
import sklearn.datasets
import sklearn.model_selection
import tensorboardX
import tqdm

import shrewjax

SECONDS = 300


def start(command, folder, printed, errors, environment):
    """As `python command` in this folder would. Returns the number of the process."""
    with warnings.catch_warnings():
        # From Python 3.12 on, of the threads of NumPy's library, which stop for a fork and start again.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process:
        return process
    signal.alarm(SECONDS)
    os.chdir(folder)
    os.environ.update(environment)
    for path, stream in ((printed, sys.stdout), (errors, sys.stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream.fileno())
    sys.argv = command
    sys.path[0] = os.path.dirname(command[0])
    runpy.run_path(command[0], run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    # Otherwise each fork's collector looks at all that was imported, again and again.
    gc.freeze()
    gc.set_threshold(100_000)  # as in conftest.py
    for line in sys.stdin:
        processes = [start(**script) for script in json.loads(line)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
        print(json.dumps(codes), flush=True)
