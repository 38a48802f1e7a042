"""Runs scripts in forks of one process, which imports, with warnings as errors, what takes them seconds to import.

A script finds what a new process would, and `helpers.py`, which train_processes.py needs. JAX has no devices as yet.
Each line of the input is a list of scripts to run at the same time. The answer is a list of their exit codes.
"""

import ast
import gc
import importlib
import json
import os
import pathlib
import runpy
import signal
import sys
import warnings

SECONDS = 300


def import_packages_of(script):
    """Imports the packages that a script imports first, itself and by the files beside it."""
    for node in ast.parse(script.read_text()).body:
        for name in [node.module] if isinstance(node, ast.ImportFrom) else [x.name for x in getattr(node, "names", ())]:
            beside = script.with_name(f"{name}.py")
            if beside.exists():
                import_packages_of(beside)
            else:
                importlib.import_module(name)


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
    gc.set_threshold(100_000)  # as in conftest.py
    for line in sys.stdin:
        scripts = json.loads(line)
        for script in scripts:
            import_packages_of(pathlib.Path(script["command"][0]))
        gc.freeze()  # otherwise each fork's collector looks at all that was imported, again and again
        processes = [start(**script) for script in scripts]
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
        print(json.dumps(codes), flush=True)
