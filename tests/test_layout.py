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
from shrewjax._numerics import histories

PACKAGE = pathlib.Path(shrewjax.__file__).parent
# The rooms of each wing, in the order of its title page. A room may import from those before it.
WINGS = {
    "_base": ["branches", "mesh", "trees", "states", "arguments"],
    "_numerics": ["floats", "reductions", "norms", "scaling", "percentiles", "histories"],
    "_clipping": ["units", "global_norm", "unit_norms", "elements", "cotangents"],
    "_skipping": ["wrapping", "guards"],
    "_accumulation": [
        "_noise",
        "_micro_batch",
        "window",
        "accumulate",
        "grad_accumulator",
        "_aux",
        "value_and_grad",
        "sharded_state",
    ],
}
ORDER = [("shrewjax", wing, room) for wing, rooms in WINGS.items() for room in rooms]
# Two stand apart, and no wing imports them. The definition imports nothing of the package. The module for Flax imports
# its public names and rooms, and nothing imports it, because Flax may not be installed.
APART = "spec"
FOR_FLAX = "flax"


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def rooms():
    """The path of each file of the package, and its place as a tuple of names."""
    return {path: path.relative_to(PACKAGE.parent).with_suffix("").parts for path in PACKAGE.rglob("*.py")}


def test_every_room_has_its_place():
    apart = [("shrewjax", "__init__"), ("shrewjax", APART), ("shrewjax", FOR_FLAX)]
    assert set(rooms().values()) == {*ORDER, *apart, *(("shrewjax", wing, "__init__") for wing in WINGS)}


def test_every_room_has_the_test_file_of_its_path():
    tests = PACKAGE.parent / "tests"
    files = {room: tests / room[1].lstrip("_") / f"test_{room[2].lstrip('_')}.py" for room in ORDER}
    assert not {room: file for room, file in files.items() if not file.exists()}


def test_imports_go_down():
    for place, room in enumerate(ORDER):
        path = PACKAGE.parent.joinpath(*room).with_suffix(".py")
        imported = {tuple(m.split(".")[:3]) for m in imported_modules(path) if m.startswith("shrewjax.")}
        assert {m for m in imported if len(m) == 3} <= set(ORDER[:place]), room


def test_only_the_module_for_flax_imports_flax_and_nothing_imports_that():
    """`import flax` is Flax's own everywhere, because imports are absolute."""
    for path, room in rooms().items():
        imported = {*imported_modules(path)}
        assert not {m for m in imported if m.split(".")[:2] == ["shrewjax", FOR_FLAX]}, room
        assert room[-1] == FOR_FLAX or not {m for m in imported if m.split(".")[0] == "flax"}, room


def test_an_underscore_means_that_only_its_folder_may_import_it():
    for path, room in rooms().items():
        folder = room[:-1]
        for module in imported_modules(path):
            target = tuple(module.split("."))
            for i, part in enumerate(target):
                assert not part.startswith("_") or target[:i] == folder[:i] or target[0] != "shrewjax", (room, module)


def test_the_title_page_of_a_wing_names_its_rooms_and_imports_nothing():
    for wing, names in WINGS.items():
        tree = ast.parse((PACKAGE / wing / "__init__.py").read_text())
        assert len(tree.body) == 1, wing
        assert not {n for n in names if f"`{n}`" not in ast.get_docstring(tree)}, wing


def test_definition_needs_nothing_but_python():
    imported = {m.split(".")[0] for m in imported_modules(PACKAGE / f"{APART}.py")}
    assert imported <= sys.stdlib_module_names


def test_only_reductions_talk_to_mapped_axes():
    for path, room in rooms().items():
        calls = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
        if room[-1] not in ("mesh", "reductions"):
            assert not calls & {"psum", "pmax", "pmean", "axis_index", "all_gather"}, room


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


STATES = [getattr(shrewjax, n) for n in shrewjax.__all__ if n.endswith("State")] + [histories.History]


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
    tags = {tag for path in rooms() for tag in re.findall(r"XLA-\d+", path.read_text())}
    assert len(entries) == len(set(entries))
    assert tags == set(entries)


def test_every_test_named_in_the_code_or_on_a_page_exists():
    root = PACKAGE.parent
    tests = {path.relative_to(root).as_posix(): path.read_text() for path in (root / "tests").rglob("*.py")}
    of_file = {path.rsplit("/", 1)[-1].removesuffix(".py"): text for path, text in tests.items()}
    names = {name for text in tests.values() for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    for page in [*rooms(), *root.glob("*.md"), *(root / "docs").rglob("*.md"), root / "tests" / "README.md"]:
        text = re.sub(r"\n *#", "", page.read_text())
        assert not {p for p in re.findall(r"\btests/[\w/]+\.py", text) if p not in tests}, page
        assert not {n for n in re.findall(r"`(test_\w+)`", text) if n not in names and n not in of_file}, page
        for path, phrase in re.findall(r'(tests/[\w/]+\.py)`?, "([^"]+)"', text):
            assert phrase in tests[path] or phrase.replace(" ", "_") in tests[path], (page, phrase)
        for file, cited in re.findall(r"`(test_\w+)`: ((?:`test_\w+`(?:, )?)+)", text):
            assert not {n for n in re.findall(r"test_\w+", cited) if f"def {n}(" not in of_file[file]}, (page, cited)
