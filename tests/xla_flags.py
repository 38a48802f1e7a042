"""The flags of XLA that make tests faster, if this jaxlib knows them. At one that it does not know it ends the process.

Asking takes a process of one second, once: processes that this one starts find the answer in their environment.
"""

import os
import subprocess
import sys

_WANTED = {
    # XLA's older emitters compile for CPU in half the time. jaxlib 0.12 has them no more.
    "xla_cpu_use_fusion_emitters": "false",
    # Tiny programs compile a quarter faster in one piece than divided among threads, to the same code.
    "xla_cpu_parallel_codegen_split_count": "1",
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": "true",
}
_ANSWER = "SHREWJAX_TESTS_KNOWN_XLA_FLAGS"
# One fork for each flag, of a process that has imported JAX but has no devices yet.
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


def known(flags):
    """Of these flags with values, the names of those that this jaxlib knows; none if it cannot be asked."""
    command = [sys.executable, "-c", _QUESTION, *(f"{name}={value}" for name, value in flags.items())]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    asked = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
    )
    return asked.stdout.split()


if _ANSWER not in os.environ:
    os.environ[_ANSWER] = " ".join(known(_WANTED))


def knows(name):
    """Whether this jaxlib has a flag, and a compiler option, of this name: one of those above."""
    assert name in _WANTED
    return name in os.environ[_ANSWER].split()


def flags(*names):
    """What to append to XLA_FLAGS: of these flags, those that this jaxlib knows."""
    return "".join(f" --{name}={_WANTED[name]}" for name in names if knows(name))


def options(**wanted):
    """Of these compiler options, those that this jaxlib knows."""
    return {name: value for name, value in wanted.items() if knows(name)}
