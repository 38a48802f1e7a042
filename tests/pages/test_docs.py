"""Every example in the documentation runs; docstrings print what they say; pages name what exists."""

import ast
import doctest
import importlib
import inspect
import math
import pathlib
import re
from typing import Never

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import run_page

import shrewjax
import shrewjax.flax

pytestmark = pytest.mark.thorough

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
PUBLIC = {
    k: v
    for k, v in vars(shrewjax).items()
    if not k.startswith("_") and getattr(v, "__module__", "").startswith("shrewjax")
}
DEFINITION = {k: v for k, v in vars(shrewjax.spec).items() if k.endswith("_spec")}
FOR_FLAX = {f"flax.{k}": getattr(shrewjax.flax, k) for k in shrewjax.flax.__all__}
FUNCTIONS = {k: v for k, v in PUBLIC.items() if not k.endswith("State")} | DEFINITION | FOR_FLAX


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_example_runs(name):
    modules = {"chex": chex, "jax": jax, "jnp": jnp, "math": math, "np": np, "optax": optax, "shrewjax": shrewjax}
    globs = modules | PUBLIC | DEFINITION
    tests = doctest.DocTestFinder().find(FUNCTIONS[name], name, module=False, globs=globs)
    examples = [t for t in tests if t.examples]
    assert examples, f"{name} has no example"
    with jax.numpy_dtype_promotion("standard"):
        for test in examples:
            result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test)
            assert result.failed == 0


@pytest.mark.parametrize("name", [k for k in FUNCTIONS if not inspect.isclass(FUNCTIONS[k])])
def test_docstring_says_what_every_argument_is(name):
    doc = inspect.getdoc(FUNCTIONS[name])
    for parameter, of in inspect.signature(FUNCTIONS[name]).parameters.items():
        if of.annotation is Never:  # no argument may be given there
            continue
        assert re.search(rf"^\s+\**{parameter}:", doc, re.MULTILINE), parameter
    assert "Returns:" in doc


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_has_a_formula_an_example_and_a_source(name):
    doc = inspect.getdoc(FUNCTIONS[name])
    assert ".. math:: " in doc
    assert ">>> " in doc
    assert re.search(r"\bSource: \S", doc)


PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
# Tests of these run their code once, for what it defines.
RUN_ELSEWHERE = {
    "README.md",
    "docs/recipes.md",
    "docs/guide/flax.md",
    "docs/guide/large_models.md",
    "docs/guide/trainers.md",
    *(f"docs/{page}" for page in re.findall(r'page\("([\w/]+\.md)"\)', (HERE / "test_guides.py").read_text())),
}
WITH_CODE = [page for page in PAGES if "```python\n" in (ROOT / page).read_text() and page not in RUN_ELSEWHERE]


@pytest.mark.parametrize("page", WITH_CODE)
def test_code_of_a_page_runs_from_top_to_bottom(page):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        run_page(ROOT / page)


@pytest.mark.parametrize("page", PAGES)
def test_files_that_a_page_names_exist(page):
    """`test_github.py` has the links."""
    text = (ROOT / page).read_text()
    files = set(re.findall(r"`((?:examples|tests|docs)/[\w/]+\.\w+)", text))
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_readme_is_short_and_shows_how_to_install_it_and_code_at_once():
    text = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(text.split()) <= 600
    assert text[: text.index("pip install")].count("\n") < 10
    assert text[: text.index("```diff")].count("\n") < 20
    assert program.count("\n") <= 25
    assert re.findall("^(?:python -m )?pip install.*", text, re.MULTILINE) == [  # .ci/run takes these two
        "python -m pip install -e '.[examples]' && python examples/train_digits.py",
        "python -m pip install -e '.[test]' && python -m pytest",
    ]


def test_every_public_name_stands_on_one_page_of_the_reference():
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    names = {*shrewjax.__all__, *(f"shrewjax.{name}" for name in FOR_FLAX)} - {"spec"}
    assert sorted(re.findall(r"auto(?:function|class):: ([\w.]+)", pages)) == sorted(names)
    assert "automodule:: shrewjax.spec\n   :members:" in pages


def test_modules_say_what_they_are_for():
    package = pathlib.Path(shrewjax.__file__).parent
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        assert importlib.import_module(".".join(parts).removesuffix(".__init__")).__doc__, path


def docstrings():
    """All docstrings of the package by their place, those of private functions, too."""
    for path in sorted(pathlib.Path(shrewjax.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (doc := ast.get_docstring(node)):
                yield f"{path.name}, {getattr(node, 'name', 'module')}", doc


# Words that only stand inside of a phrase, and mostly before or after a break.
BREAKS = re.compile(r"(,|\b(a|an|the|of|with|that|is|are|or|and|to|in|for|from|if|not|than|as))$")
GOES_ON = re.compile(r"(of|with|that|is|are|or|and|to|for|from|than|as)\b")


def half_rows(doc):
    """Lines of tables that Sphinx reads as rows of their own, and that are parts of rows.

    A line with text in the first column begins a row. So it needs a second cell, and a first one that is whole.
    """
    second = None
    for line in doc.splitlines():
        if re.fullmatch(r"=+( +=+)+", line.strip()):
            second = line.index("= ") + 1
        elif not line.strip():
            second = None
        elif second:
            first, rest = line[:second].strip(), line[second:].strip()
            if first and (not rest or BREAKS.search(first) or GOES_ON.match(first)):
                yield line.strip()


def test_a_row_of_a_docstrings_table_is_not_split_in_two():
    assert {place: rows for place, doc in docstrings() if (rows := [*half_rows(doc)])} == {}


@pytest.mark.parametrize("row", ["a weight that   is an\nis NaN          error", "a weight\nthat is NaN     an error"])
def test_a_split_row_is_found(row):
    border = "==============  ========"
    assert [*half_rows(f"{border}\n{row}\n{border}")]
    assert not [*half_rows(f"{border}\na NaN weight    is an\n                error\n{border}")]
