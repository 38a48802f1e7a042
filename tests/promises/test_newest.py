"""What the package and its tests use of JAX and XLA, which promise none of it, is there in the installed version."""

import ast
import importlib
import pathlib

import pytest
import speed

import shrewjax

pytestmark = pytest.mark.thorough


def test_flag_that_no_jaxlib_has_is_not_passed_and_ends_no_process():
    asked = {"xla_no_such_flag": "1", "xla_backend_optimization_level": "0"}
    assert speed.known_by_jaxlib(asked) == ["xla_backend_optimization_level"]


def attributes(path):
    """The names that a file takes from each module, as far as they are imported by name."""
    tree = ast.parse(path.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield modules[node.value.id], node.attr


def test_four_modules_take_from_jax_interpreters_and_jax_still_has_what_they_take():
    """JAX's promise of compatibility leaves that module out. Nothing else registers a primitive, or drops dead code."""
    package = pathlib.Path(shrewjax.__file__).parent
    taken = {p.name: [a for a in attributes(p) if a[0].startswith("jax.interpreters")] for p in package.rglob("*.py")}
    taking = {name for name, found in taken.items() if found}
    assert taking == {"cotangents.py", "each_example.py", "jaxprs.py", "scatters.py"}
    for module, name in {of for file in taking for of in taken[file]}:
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name} any more"
