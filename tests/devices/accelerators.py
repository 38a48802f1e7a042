"""Targets whose compilers may not be installed, and what is read from programs for them."""

import importlib.metadata
import os
from collections import Counter

import _compiled
import pytest

ACCELERATORS = ["h100", "v5e"]


def target_named(name):
    try:
        return _compiled.Target(name)
    except _compiled.MissingCompilerError:
        if os.environ.get("SHREWJAX_COMPILES_FOR") == name:
            raise
        pytest.skip("need a compiler for GPUs or TPUs: see tests/README.md")


def all_reduced(program, least=1e6):
    """The bytes of all-reduces of a size or more, by when they are sent, in P; the compiler may split one in two."""
    sent = Counter()
    for (op, when, size), number in program.collectives.items():
        if op == "all-reduce" and size >= least:
            sent[when] += size * number / program.unit
    return sent


def loses_sums(target):
    """Whether this compiler loses sums of scatters in loops (XLA-27), by the table in docs/internals/xla.md."""
    name, first, last = {
        "h100": ("jax_cuda12_plugin", (0, 10, 1), (0, 11, 2)),
        "v5e": ("libtpu", (0, 0, 41), (0, 0, 48)),
    }[target.name]
    return first <= tuple(int(n) for n in importlib.metadata.version(name).split(".")[:3]) <= last
