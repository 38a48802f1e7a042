"""Every example in the documentation runs, and says what it prints."""

import doctest
import importlib
import inspect
import math
import pathlib
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shrewjax

ROOT = pathlib.Path(__file__).parent.parent
PUBLIC = {
    k: v
    for k, v in vars(shrewjax).items()
    if not k.startswith("_") and getattr(v, "__module__", "").startswith("shrewjax")
}
DEFINITION = {k: v for k, v in vars(shrewjax.spec).items() if k.endswith("_spec")}
FUNCTIONS = {k: v for k, v in PUBLIC.items() if not k.endswith("State")} | DEFINITION


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_example_runs(name):
    modules = {"chex": chex, "jax": jax, "jnp": jnp, "math": math, "np": np, "optax": optax, "shrewjax": shrewjax}
    globs = modules | PUBLIC | DEFINITION
    tests = doctest.DocTestFinder().find(FUNCTIONS[name], name, globs=globs)
    examples = [t for t in tests if t.examples]
    assert examples, f"{name} has no example"
    with jax.numpy_dtype_promotion("standard"):
        for test in examples:
            result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test)
            assert result.failed == 0


@pytest.mark.parametrize("name", [k for k in FUNCTIONS if not inspect.isclass(FUNCTIONS[k])])
def test_docstring_says_what_every_argument_is(name):
    doc = inspect.getdoc(FUNCTIONS[name])
    for parameter in inspect.signature(FUNCTIONS[name]).parameters:
        assert re.search(rf"^\s+\**{parameter}:", doc, re.MULTILINE), parameter
    assert "Returns:" in doc


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_has_a_formula_an_example_and_a_source(name):
    doc = inspect.getdoc(FUNCTIONS[name])
    assert ".. math:: " in doc
    assert ">>> " in doc
    assert re.search(r"\bSource: \S", doc)


def python_blocks(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


def test_readme_code_runs_from_top_to_bottom():
    blocks = python_blocks(ROOT / "README.md")
    assert blocks
    names = {}
    with jax.numpy_dtype_promotion("standard"):
        for block in blocks:
            exec(compile(block, "README.md", "exec"), names)


def test_readme_names_every_public_name():
    text = (ROOT / "README.md").read_text()
    missing = [name for name in FUNCTIONS if f"`{name}" not in text]
    assert not missing


def test_modules_say_what_they_are_for():
    for path in pathlib.Path(shrewjax.__file__).parent.glob("*.py"):
        assert importlib.import_module(f"shrewjax.{path.stem}" if path.stem != "__init__" else "shrewjax").__doc__
