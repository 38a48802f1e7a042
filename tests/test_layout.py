"""The package stays as it was designed: imports go one way, names are exported once."""

import ast
import pathlib
import sys

import shrewjax

PACKAGE = pathlib.Path(shrewjax.__file__).parent
# Each module may import from those before it.
ORDER = [
    "_branches",
    "_checks",
    "_wide",
    "_reductions",
    "_rows",
    "_norms",
    "_selection",
    "_statistics",
    "_clipping",
    "_adaptive",
    "_wrapping",
    "_guards",
    "_accumulation",
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
        if path.stem != "_reductions":
            assert not calls & {"psum", "pmax", "pmean", "axis_index", "all_gather"}, path.stem


def test_catalogue_holds_imports_and_nothing_else():
    body = ast.parse((PACKAGE / "__init__.py").read_text()).body
    imports = [n for n in body if not isinstance(n, ast.Expr)]
    assert all(isinstance(n, ast.ImportFrom) for n in imports)
    assert all(a.asname == a.name for n in imports for a in n.names)
