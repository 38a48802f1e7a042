"""The package stays as it was designed: imports go one way, names are exported once."""

import ast
import inspect
import pathlib
import pickle
import pickletools
import pydoc
import re
import sys
import tomllib

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen import fp8_ops
from helpers import CASES
from jax.extend.core import Primitive, primitives

import shrewjax

PACKAGE = pathlib.Path(shrewjax.__file__).parent
# The modules of each private package. A module may import from those before it.
PACKAGES = {
    "_base": ["types", "axes", "mesh", "branches", "flax_names", "trees", "states", "arguments"],
    "_programs": ["switch", "jaxprs", "forwarding", "scatters", "lost_scatters", "unrolled", "loops"],
    "_numerics": ["floats", "reductions", "vectors", "norms", "scaling", "percentiles", "histories"],
    "_clipping": ["rule", "units", "global_norm", "unit_norms", "elements", "cotangents"],
    "_skipping": ["wrapping", "guards"],
    "_windows": [
        "_noise",
        "_gradients",
        "_devices",
        "window_state",
        "window",
        "accumulate",
        "grad_accumulator",
        "sharded_state",
        "from_optax",
    ],
    "_division": ["rows", "labels", "fission", "kinds", "plan", "draws", "micro_batch", "each_example", "report"],
    "_batches": [
        "_aux",
        "_overwritten",
        "roles",
        "batch",
        "accumulated",
        "divided",
        "derivatives",
        "micro_batched",
        "per_device",
    ],
}
ORDER = [("shrewjax", package, module) for package, names in PACKAGES.items() for module in names]
# Two modules are in none of these packages, which do not import them. The definition imports nothing of `shrewjax`. The
# module for Flax may import all else, and nothing imports it, because Flax may not be installed.
APART = "spec"
FOR_FLAX = "flax"


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules():
    """Returns the path of each file of `shrewjax`, and the module's name as a tuple of its parts."""
    return {path: path.relative_to(PACKAGE.parent).with_suffix("").parts for path in PACKAGE.rglob("*.py")}


def test_every_module_has_its_place():
    apart = [("shrewjax", "__init__"), ("shrewjax", APART), ("shrewjax", FOR_FLAX)]
    assert set(modules().values()) == {*ORDER, *apart, *(("shrewjax", package, "__init__") for package in PACKAGES)}


def test_every_module_has_the_test_file_of_its_path():
    tests = PACKAGE.parent / "tests"
    files = {module: tests / module[1].lstrip("_") / f"test_{module[2].lstrip('_')}.py" for module in ORDER}
    assert not {module: file for module, file in files.items() if not file.exists()}


def test_imports_go_down():
    for place, module in enumerate(ORDER):
        path = PACKAGE.parent.joinpath(*module).with_suffix(".py")
        imported = {tuple(m.split(".")[:3]) for m in imported_modules(path) if m.startswith("shrewjax.")}
        assert {m for m in imported if len(m) == 3} <= set(ORDER[:place]), module


def test_only_the_module_for_flax_imports_flax_and_nothing_imports_that():
    """`import flax` is Flax's own everywhere, because imports are absolute."""
    for path, module in modules().items():
        imported = {*imported_modules(path)}
        assert not {m for m in imported if m.split(".")[:2] == ["shrewjax", FOR_FLAX]}, module
        assert module[-1] == FOR_FLAX or not {m for m in imported if m.split(".")[0] == "flax"}, module


def test_only_one_module_beside_that_for_flax_has_names_of_flax_in_its_code():
    """Strings with a space are messages, which may name Flax."""
    of_variables = {name for name in dir(nnx.Variable) if "value" in name or "metadata" in name} - {"value"}
    assert {"raw_value", "get_metadata"} <= of_variables
    for path, module in modules().items():
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        words = {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        found = {w for w in words if w.startswith(("flax.", fp8_ops.OVERWRITE_WITH_GRADIENT)) and " " not in w}
        found |= words & of_variables | {n.attr for n in nodes if isinstance(n, ast.Attribute)} & of_variables
        found |= {n.id for n in nodes if isinstance(n, ast.Name)} & {"nnx", "linen"}
        assert bool(found) == (module[-1] in (FOR_FLAX, "flax_names")), (module, found)


def test_an_underscore_means_that_only_its_folder_may_import_it():
    for path, module in modules().items():
        folder = module[:-1]
        for name in imported_modules(path):
            target = tuple(name.split("."))
            for i, part in enumerate(target):
                assert not part.startswith("_") or target[:i] == folder[:i] or target[0] != "shrewjax", (module, name)


def test_the_init_of_a_package_names_its_modules_and_imports_nothing():
    for package, names in PACKAGES.items():
        tree = ast.parse((PACKAGE / package / "__init__.py").read_text())
        assert len(tree.body) == 1, package
        assert not {n for n in names if f"`{n}`" not in ast.get_docstring(tree)}, package


def test_definition_needs_nothing_but_python():
    imported = {m.split(".")[0] for m in imported_modules(PACKAGE / f"{APART}.py")}
    assert imported <= sys.stdlib_module_names


def test_only_reductions_and_the_modules_of_axes_and_meshes_talk_to_mapped_axes():
    for path, module in modules().items():
        calls = {n.attr for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)}
        if module[-1] not in ("axes", "mesh", "reductions"):
            assert not calls & {"psum", "pmax", "pmean", "axis_index", "all_gather"}, module


def test_only_passes_and_the_division_take_traced_programs_apart_or_name_a_primitive_of_jax():
    """`max` and `min` are also names of an aux, and `complex` is a kind of dtype."""
    names = {x.name for x in vars(primitives).values() if isinstance(x, Primitive)} - {"max", "min", "complex"}
    assert {"scan", "jit", "transpose", "scatter-add"} <= names
    inside = {"primitive", "eqns", "invars", "outvars", "make_jaxpr", "jaxpr_as_fun"}
    for path, module in modules().items():
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        found = {n.value for n in nodes if isinstance(n, ast.Constant)} & names
        found |= {n.attr for n in nodes if isinstance(n, ast.Attribute)} & inside
        assert not found or module[1] in ("_programs", "_division"), (module, found)
        # One module of each has all names, so that another JAX changes one file.
        assert not found & names or module[1:] in (("_programs", "jaxprs"), ("_division", "labels")), (module, found)


def test_each_pass_says_what_it_saves_and_when_it_can_be_deleted():
    for name in PACKAGES["_programs"]:
        if name not in ("switch", "jaxprs"):
            _, paragraph, *_ = ast.get_docstring(ast.parse((PACKAGE / "_programs" / f"{name}.py").read_text())).split(
                "\n\n"
            )
            text = " ".join(paragraph.split())
            assert text.startswith("What it saves: "), name
            assert "umbers do not depend on it." in text, name
            assert re.search(
                r"It can be deleted when (pyproject\.toml asks for JAX [\d.]+|.*no version .*so far)", text
            ), name


def test_shrewjax_init_holds_imports_names_and_the_version_and_defines_nothing_but_the_way_to_the_module_for_flax():
    imports, assigned, defined = [], [], []
    for node in ast.parse((PACKAGE / "__init__.py").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            imports += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign):
            assigned += [target.id for target in node.targets]
        elif isinstance(node, ast.If):
            defined += [ast.unparse(node.test), *(function.name for function in node.body)]
        else:
            assert isinstance(node, ast.Expr | ast.For | ast.Import), ast.unparse(node)
    assert assigned == ["__version__", "__all__"]
    assert defined == ["not _typing.TYPE_CHECKING", "__getattr__"]
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


def test_functions_are_of_the_package_and_their_source_is_found():
    for name, function in inspect.getmembers(shrewjax, inspect.isfunction):
        if name in shrewjax.__all__:
            assert (function.__module__, function.__qualname__) == ("shrewjax", name)
            assert pickle.loads(pickle.dumps(function)) is function
            assert inspect.getsource(function).startswith(f"def {name}(")


STATES = [getattr(shrewjax, n) for n in shrewjax.__all__ if n.endswith("State")]


def test_help_says_what_each_field_of_a_state_is():
    for state in STATES:
        text = pydoc.render_doc(state, renderer=pydoc.plaintext)
        assert "Alias for field number" not in text, state
        assert "Attributes:" in state.__doc__, state
        assert all(len(getattr(state, name).__doc__) > 10 for name in state._fields), state


def test_states_are_named_tuples_that_pickle():
    for state in STATES:
        made = state(*range(len(state._fields)))
        assert state.__bases__ == (tuple,)
        assert pickle.loads(pickle.dumps(made)) == made
        assert repr(state) == f"<class 'shrewjax.{state.__name__}'>"
        assert type(jax.tree.map(lambda x: x, made)) is state


def test_pickle_of_a_state_names_public_modules_alone():
    """A module that moves would break every pickle that names it. Of Optax's states, Optax decides."""
    for name, case in CASES.items():
        state = jax.device_get(case.make().init({"w": jnp.zeros(2)}))
        assert not modules_of_pickle(state, "shrewjax._"), name
        assert repr(state).count("shrewjax") == 0, name


def test_pickle_and_repr_of_all_else_that_is_saved_name_public_modules_alone():
    window = shrewjax.GradAccumulator(2, nonfinite="drop_window", noise_decay=0.9)
    state = jax.device_get(window.init({"w": jnp.zeros(2)}))
    spiky = shrewjax.skip_on_spike(shrewjax.accumulate(shrewjax.clip_by_norm_zscore(), 2, noise_decay=0.5))
    for saved in (window, state, jax.device_get(spiky.init({"w": jnp.zeros(2)}))):
        assert not modules_of_pickle(saved, "shrewjax._")
        assert modules_of_pickle(saved, "shrewjax")
    assert repr(window).startswith("GradAccumulator(accum_steps=2, reduction='mean', ")
    assert eval(repr(window), vars(shrewjax)) == window


def modules_of_pickle(value, prefix):
    return {text for _, text, _ in pickletools.genops(pickle.dumps(value)) if str(text).startswith(prefix)}


def test_version_is_that_of_the_source_whatever_is_installed():
    source = (PACKAGE / "__init__.py").read_text()
    assert f'\n__version__ = "{shrewjax.__version__}"\n' in source
    assert f"\nversion: {shrewjax.__version__}\n" in (PACKAGE.parent / "CITATION.cff").read_text()
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    assert settings["project"]["dynamic"] == ["version", "readme"]
    assert (PACKAGE.parent / settings["tool"]["hatch"]["version"]["path"]) == PACKAGE / "__init__.py"


def test_every_tag_of_a_workaround_has_its_entry_and_every_entry_its_tag():
    entries = re.findall(
        r"^\| (XLA-\d+) \|", (PACKAGE.parent / "docs" / "internals" / "xla.md").read_text(), re.MULTILINE
    )
    tags = {tag for path in modules() for tag in re.findall(r"XLA-\d+", path.read_text())}
    assert len(entries) == len(set(entries))
    assert tags == set(entries)


def entries_of_workarounds():
    """Each tag on the page with its test and the places of its lines: the last two cells of a row."""
    page = (PACKAGE.parent / "docs" / "internals" / "xla.md").read_text()
    return re.findall(r"^\| (XLA-\d+) \|.*\| ([^|]*) \| ([^|]*) \|$", page, re.MULTILINE)


def test_an_entry_of_a_workaround_names_the_modules_that_have_its_tag():
    source = {path.stem: path.read_text() for path in modules()}
    for tag, _, where in entries_of_workarounds():
        names = [name.split(".") for name in re.findall(r"`([\w.]+)`", where)]
        tagged = {module for module, text in source.items() if re.search(rf"{tag}\b", text)}
        assert {first for first, *_ in names if first in source} == tagged, tag
        for first, *rest in names:
            if rest and first in source:
                assert re.search(rf"^ *(def|class) {rest[-1]}\b", source[first], re.MULTILINE), (tag, first, rest)


def test_an_entry_of_a_workaround_has_a_test_or_the_day_and_versions_on_which_it_was_seen():
    """`test_every_test_named_in_the_code_or_on_a_page_exists` looks for the test."""
    for tag, test, _ in entries_of_workarounds():
        assert re.search(r"`test_\w+`: `test_\w+`|none; seen on \d{4}-\d\d-\d\d with JAX \d", test), tag
        assert not re.search(r"\bnone\b(?!; seen on \d{4}-\d\d-\d\d with JAX \d)", test), tag


def test_every_test_named_in_the_code_or_on_a_page_exists():
    root = PACKAGE.parent
    tests = {path.relative_to(root).as_posix(): path.read_text() for path in (root / "tests").rglob("*.py")}
    of_file = {path.rsplit("/", 1)[-1].removesuffix(".py"): text for path, text in tests.items()}
    names = {name for text in tests.values() for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    for page in [*modules(), *root.glob("*.md"), *(root / "docs").rglob("*.md"), root / "tests" / "README.md"]:
        text = re.sub(r"\n *#", "", page.read_text())
        assert not {p for p in re.findall(r"\btests/[\w/]+\.py", text) if p not in tests}, page
        assert not {n for n in re.findall(r"`(test_\w+)`", text) if n not in names and n not in of_file}, page
        for path, phrase in re.findall(r'(tests/[\w/]+\.py)`?, "([^"]+)"', text):
            assert phrase in tests[path] or phrase.replace(" ", "_") in tests[path], (page, phrase)
        for file, cited in re.findall(r"`(test_\w+)`: ((?:`test_\w+`(?:, )?)+)", text):
            assert not {n for n in re.findall(r"test_\w+", cited) if f"def {n}(" not in of_file[file]}, (page, cited)


# What was renamed before the first release. In `update`, `weight=` is a number; a function is `weight_fn=`.
OLD_NAMES = (
    r"drop_microbatch|contrastive_value_and_grad|\bbatch_axes\b|\bleaves=True|\babove=\d|\bper_device\(axes="
    r"|\bweight=lambda|\baux=[\"'{]|updates, \w+ = (shrewjax\.)?flush\("
)


def test_no_code_and_no_page_has_an_old_name():
    root = PACKAGE.parent
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.py")]
    for page in [*modules(), *pages, root / "tests" / "promises" / "golden.txt"]:
        assert not re.search(OLD_NAMES, page.read_text()), page
