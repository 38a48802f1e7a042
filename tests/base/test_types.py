"""Types have their names in one module: each is described, and some signature has it."""

import ast
import pathlib

import shrewjax

PACKAGE = pathlib.Path(shrewjax.__file__).parent
TYPES = PACKAGE / "_base" / "types.py"


def aliases_of(path):
    """The names that a file gives to types, each with the statement behind it."""
    body = ast.parse(path.read_text()).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
            yield node.target.id, ast.unparse(node.value), after
        elif isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("TypeVar("):
            yield node.targets[0].id, "TypeVar", after


def test_every_type_is_described_and_used():
    imported = {
        alias.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "shrewjax._base.types"
        for alias in node.names
    }
    for name, _, after in aliases_of(TYPES):
        assert isinstance(after, ast.Expr), name
        assert len(after.value.value) > 20, name
        assert name in imported, name


def test_any_has_other_names_there_alone():
    """Except what a jaxpr holds: `jaxprs` is the one module that knows JAX's inside."""
    for path in {*PACKAGE.rglob("*.py")} - {TYPES, PACKAGE / "_programs" / "jaxprs.py"}:
        assert not {name for name, value, _ in aliases_of(path) if value == "Any"}, path
