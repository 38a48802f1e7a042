"""The package stays as it was designed: imports go one way, names are exported once."""

import ast
import inspect
import pathlib
import pickle
import pydoc
import re
import sys
import tomllib

import jax
import pytest

import shrewjax

PACKAGE = pathlib.Path(shrewjax.__file__).parent
# Each module may import from those before it.
ORDER = [
    "_compat",
    "_branches",
    "_states",
    "_gradients",
    "_arguments",
    "_floats",
    "_extended",
    "_mesh",
    "_reductions",
    "_range",
    "_unit_numbers",
    "_norms",
    "_scaling",
    "_cotangents",
    "_ranks",
    "_keys",
    "_selection",
    "_history",
    "_units",
    "_clipping",
    "_clipping_percentile",
    "_clipping_history",
    "_clipping_units",
    "_clipping_averages",
    "_wrapping",
    "_guards",
    "_per_device",
    "_micro_batch",
    "_noise",
    "_window",
    "_accumulator",
    "_accumulation",
    "_train_step",
    "_batch_arguments",
    "_batch_aux",
    "_batches",
    "_sharded_state",
    "_metrics",
]
# The definition stands apart: it imports none of them, and none imports it.
APART = "spec"


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_has_its_place():
    assert {p.stem for p in PACKAGE.glob("*.py")} == {*ORDER, APART, "__init__"}


def test_contributing_lists_the_modules_in_this_order():
    table = re.findall(r"^\| (`_.*?) \|", (PACKAGE.parent / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert re.findall(r"`(\w+)`", "".join(table)) == ORDER


def test_imports_go_one_way():
    for place, name in enumerate(ORDER):
        ours = {m.split(".")[1] for m in imported_modules(PACKAGE / f"{name}.py") if m.startswith("shrewjax.")}
        assert ours <= set(ORDER[:place]), name


def test_definition_needs_nothing_but_python():
    imported = {m.split(".")[0] for m in imported_modules(PACKAGE / f"{APART}.py")}
    assert imported <= sys.stdlib_module_names


def test_only_reductions_talk_to_mapped_axes():
    for path in PACKAGE.glob("*.py"):
        calls = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
        if path.stem not in ("_mesh", "_reductions"):
            assert not calls & {"psum", "pmax", "pmean", "axis_index", "all_gather"}, path.stem


def test_catalogue_holds_imports_names_and_the_version_and_defines_nothing():
    imports, assigned = [], []
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            imports += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign):
            assigned += [target.id for target in node.targets]
        else:
            assert isinstance(node, ast.Expr | ast.For), ast.unparse(node)
    assert assigned == ["__version__", "__all__"]
    public = [name for name in imports if not name.startswith("_")]
    assert sorted(public) == sorted(shrewjax.__all__)


def test_help_shows_every_public_name_and_the_version():
    text = pydoc.render_doc(shrewjax, renderer=pydoc.plaintext)
    functions = {n for n in shrewjax.__all__ if inspect.isfunction(getattr(shrewjax, n))}
    classes = {n for n in shrewjax.__all__ if inspect.isclass(getattr(shrewjax, n))}
    assert functions | classes | {"spec"} == set(shrewjax.__all__)
    assert not {n for n in functions if f"\n    {n}(" not in text}
    assert not {n for n in classes if f"\n    class {n}(" not in text}
    assert f"VERSION\n    {shrewjax.__version__}" in text


@pytest.mark.parametrize("name", [n for n in shrewjax.__all__ if inspect.isfunction(getattr(shrewjax, n))])
def test_functions_are_of_the_package_and_their_source_is_found(name):
    function = getattr(shrewjax, name)
    assert (function.__module__, function.__qualname__) == ("shrewjax", name)
    assert pickle.loads(pickle.dumps(function)) is function
    assert inspect.getsource(function).startswith(f"def {name}(")


STATES = [getattr(shrewjax, n) for n in shrewjax.__all__ if n.endswith("State")] + [shrewjax._history.History]


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_help_says_what_each_field_of_a_state_is(state):
    text = pydoc.render_doc(state, renderer=pydoc.plaintext)
    assert "Alias for field number" not in text
    assert "Annotated" not in text
    assert all(len(getattr(state, name).__doc__) > 10 for name in state._fields)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_states_are_named_tuples_that_pickle(state):
    made = state(*range(len(state._fields)))
    assert state.__bases__ == (tuple,)
    assert pickle.loads(pickle.dumps(made)) == made
    assert type(jax.tree.map(lambda x: x, made)) is state


def test_version_is_that_of_the_source_whatever_is_installed():
    source = (PACKAGE / "__init__.py").read_text()
    assert f'\n__version__ = "{shrewjax.__version__}"\n' in source
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    assert settings["project"]["dynamic"] == ["version"]
    assert (PACKAGE.parent / settings["tool"]["hatch"]["version"]["path"]) == PACKAGE / "__init__.py"


def test_every_tag_of_a_workaround_has_its_entry_and_every_entry_its_tag():
    entries = re.findall(r"^\| (XLA-\d+) \|", (PACKAGE.parent / "docs" / "xla.md").read_text(), re.MULTILINE)
    tags = {tag for path in PACKAGE.glob("*.py") for tag in re.findall(r"XLA-\d+", path.read_text())}
    assert len(entries) == len(set(entries))
    assert tags == set(entries)
