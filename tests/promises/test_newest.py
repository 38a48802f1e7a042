"""The package and its tests run on the newest JAX as on the oldest. JAX promises nothing of what is used here."""

import ast
import importlib
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
import xla_flags
from helpers import users_jit

import shrewjax


def test_flag_that_no_jaxlib_has_is_not_passed_and_ends_no_process():
    asked = {"xla_no_such_flag": "1", "xla_backend_optimization_level": "0"}
    assert xla_flags.known(asked) == ["xla_backend_optimization_level"]


def attributes(path):
    """The names that a file takes from each module, as far as they are imported by name."""
    tree = ast.parse(path.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr


def test_one_room_takes_from_jax_interpreters_and_jax_still_has_what_it_takes():
    """JAX's promise of compatibility leaves that module out, and there is no other way to register a primitive."""
    package = pathlib.Path(shrewjax.__file__).parent
    taken = {p.name: [a for a in attributes(p) if a[0].startswith("jax.interpreters")] for p in package.rglob("*.py")}
    assert [name for name, found in taken.items() if found] == ["cotangents.py"]
    for module, name in taken["cotangents.py"]:
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name} any more"


def test_jax_still_makes_its_mlir_contexts_where_conftest_shares_one():
    assert hasattr(importlib.import_module("jax._src.interpreters.mlir").make_ir_context, "cache_info")


@pytest.mark.parametrize("clip", ["value", "percentile"])
def test_clip_with_a_traced_threshold_keeps_subnormal_bfloat16_in_vectors_and_beside_them(clip):
    """A CPU with bfloat16 instructions flushes subnormals in them (XLA-28); in loops of 17, in the last element."""
    functions = {"value": shrewjax.clip_grad_value, "percentile": lambda x, p: shrewjax.clip_grad_percentile(x, p)[0]}
    clipped = users_jit(functions[clip])
    for size in (2, 17):
        units = (np.arange(1, size + 1) | (np.arange(size) % 2 << 15)).astype(np.uint16)  # of both signs
        x = jnp.asarray(units.view(jnp.bfloat16))
        assert np.asarray(clipped(x, jnp.float32(100))).view(np.uint16).tolist() == units.tolist()
