"""What makes the tests fast. Compiling takes most of their time, and importing JAX, Flax and Orbax most of the rest.

* **A folder of compiled programs** (`prepare`). Workers, and the processes that tests start, compile nothing twice. JAX
  finds a program there by its text, its options and its own version. The folder goes when the session ends, unless
  JAX_COMPILATION_CACHE_DIR names one: then a second session compiles only what has changed.
* **Flags of XLA** (`prepare`, `FLAGS`). Tiny programs compile a quarter faster in one piece than divided among
  threads, to the same code. The older emitters for CPU take half the time; jaxlib 0.12 has them no more. libtpu reads
  XLA_FLAGS too, does not know the emitters' flag, and would end the process, so it is not set where libtpu is. The
  compiler for a GPU reads the level of optimization, so that is not set beside it.
* **Two ways to compile.** `quick_jit` skips LLVM's optimizations: 0.1 to 0.3 s of a core for a program, in the place of
  0.3 to 1 s. Operations outside of jit compile so, too. `users_jit` compiles as users do: for rounding, for two
  programs that must agree bit for bit, for compiled text, memory and costs, and for programs that run longer than they
  compile.
* **Forks** (`forked`). A process takes 3 s and more to import what a script needs. So scripts run in forks of one
  process that has imported it, with warnings as errors. JAX has no devices there as yet.
* **The garbage collector** (`prepare`). Tracing makes objects by the million. At Python's own threshold the collector
  is busy with 4 % of the time.

JAX is imported by functions here, because it reads the environment when it is imported.
"""

import ast
import atexit
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import pathlib
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings

FLAGS = {
    "xla_cpu_use_fusion_emitters": "false",
    "xla_cpu_parallel_codegen_split_count": "1",
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": "true",
}


def prepare():
    """Sets the environment of this process, before it imports JAX, and of those that it starts."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="shrewjax_programs_")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

    has_tpu_compiler = importlib.util.find_spec("libtpu") is not None
    has_gpu_compiler = importlib.util.find_spec("jax_cuda12_plugin") is not None
    wanted = ["xla_cpu_parallel_codegen_split_count"]
    wanted += [] if has_tpu_compiler else ["xla_cpu_use_fusion_emitters"]
    wanted += [] if has_tpu_compiler or has_gpu_compiler else ["xla_backend_optimization_level"]
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + as_xla_flags(*wanted)

    gc.set_threshold(100_000)


# --- flags ----------------------------------------------------------------------------------------------------------

_ANSWER = "SHREWJAX_TESTS_KNOWN_XLA_FLAGS"  # an environment variable, so that one process asks for all
# One fork for each flag, because XLA ends a process at a flag that it does not know.
_QUESTION = """
import os, sys, jax
for name, value in (argument.split("=") for argument in sys.argv[1:]):
    child = os.fork()
    if not child:
        os.environ["XLA_FLAGS"] = f"--{name}={value}"
        jax.devices()
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        print(name)
"""


def known_by_jaxlib(flags):
    """Returns the names of those of these flags, with values, that this jaxlib knows; none if it cannot be asked."""
    command = [sys.executable, "-c", _QUESTION, *(f"{name}={value}" for name, value in flags.items())]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    asked = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
    )
    return asked.stdout.split()


def is_known(name):
    if _ANSWER not in os.environ:
        os.environ[_ANSWER] = " ".join(known_by_jaxlib(FLAGS))
    return name in os.environ[_ANSWER].split()


def as_xla_flags(*names):
    """Returns the text to append to XLA_FLAGS for those of these flags that this jaxlib knows."""
    return "".join(f" --{name}={FLAGS[name]}" for name in names if is_known(name))


# --- two ways to compile --------------------------------------------------------------------------------------------


def compiler_options(**wanted):
    """Returns those of these options that this jaxlib knows; None if programs are not for a CPU."""
    import jax

    is_for_cpu = jax.default_backend() == "cpu"
    return {name: value for name, value in wanted.items() if is_known(name)} if is_for_cpu else None


def quick_jit(function, **options):
    """`jax.jit` for tests of what programs do together, not of their last bits."""
    import jax

    quick = compiler_options(xla_cpu_use_fusion_emitters=False, xla_backend_optimization_level=0)
    return jax.jit(function, compiler_options=quick, **options)


def compiled(tx):
    """The transformation with `quick_jit` around its update, for use outside of compiled functions only."""
    import optax

    return optax.GradientTransformationExtraArgs(tx.init, quick_jit(optax.with_extra_args_support(tx).update))


def users_options():
    return compiler_options(xla_cpu_use_fusion_emitters=True, xla_backend_optimization_level=3)


def users_jit(function, **options):
    """`jax.jit` as users have it."""
    import jax

    return jax.jit(function, compiler_options=users_options(), **options)


# --- forks ----------------------------------------------------------------------------------------------------------

SECONDS = 300  # after which a script is stopped


@contextlib.contextmanager
def forked():
    """Yields a function that runs scripts at the same time, each in a fork, and returns exit code, output and errors.

    Warnings are errors, except one about the folder of compiled programs: see pyproject.toml.
    """
    ignored = "ignore:Error reading persistent compilation cache entry"
    command = [sys.executable, "-W", "error", "-W", ignored, __file__]
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


def _import_packages_of(script):
    """Imports the packages that a script imports first, itself and by the files beside it."""
    for node in ast.parse(script.read_text()).body:
        for name in [node.module] if isinstance(node, ast.ImportFrom) else [x.name for x in getattr(node, "names", ())]:
            beside = script.with_name(f"{name}.py")
            if beside.exists():
                _import_packages_of(beside)
            else:
                importlib.import_module(name)


def _start(command, folder, printed, errors, environment):
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


def _serve():
    """Answers each line of the input, a list of scripts to run at the same time, with a list of their exit codes."""
    gc.set_threshold(100_000)
    for line in sys.stdin:
        scripts = json.loads(line)
        for script in scripts:
            _import_packages_of(pathlib.Path(script["command"][0]))
        gc.freeze()  # otherwise each fork's collector looks at all that was imported, again and again
        processes = [_start(**script) for script in scripts]
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    _serve()
