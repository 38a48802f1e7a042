"""States and signatures stay as `golden.txt` has them, so that a change to one is a decision.

If a change is meant, write the file again: `python tests/promises/test_golden.py`. After the first release, first say
in `CHANGELOG.md`, under "Changed", what to do with an old checkpoint or call.
"""

import inspect
import pathlib
import sys

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
    import conftest  # noqa: F401  (eight devices)

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import CASES, mesh_of

import shrewjax
import shrewjax.flax

pytestmark = pytest.mark.thorough

GOLDEN = pathlib.Path(__file__).with_name("golden.txt")
PARAMS = {"b": jnp.zeros(4, jnp.bfloat16), "none": None, "steps": jnp.int32(0), "w": jnp.zeros((3, 2))}
INNER = optax.identity()


def states():
    """Each state, as the transformations make it: with each option that adds fields."""
    mesh = mesh_of(data=8)
    placed = jax.device_put(PARAMS, jax.sharding.NamedSharding(mesh, jax.P()))
    made = {name: case.make().init(PARAMS) for name, case in CASES.items()}
    return made | {
        "clip_by_global_norm(per_leaf=True)": shrewjax.clip_by_global_norm(1.0, per_leaf=True).init(PARAMS),
        "clip_by_leaf_norm(stacked_axes=0)": shrewjax.clip_by_leaf_norm(1.0, stacked_axes=0).init({"w": PARAMS["w"]}),
        'clip_by_percentile(scope="leaf")': shrewjax.clip_by_percentile(90, scope="leaf").init(PARAMS),
        "skip_nonfinite(per_leaf=True)": shrewjax.skip_nonfinite(INNER, per_leaf=True).init(PARAMS),
        "accumulate(noise_decay=0.9)": shrewjax.accumulate(INNER, 2, noise_decay=0.9).init(PARAMS),
        'accumulate(sum_over="data", noise_decay=0.9)': shrewjax.accumulate(
            INNER, 2, sum_over="data", noise_decay=0.9
        ).init(placed),
        "accumulate(accumulator_dtype=bfloat16)": shrewjax.accumulate(INNER, 2, accumulator_dtype=jnp.bfloat16).init(
            PARAMS
        ),
        "GradAccumulator": shrewjax.GradAccumulator(2).init(PARAMS),
    }


def public_functions():
    """Each public function and method by its name."""
    found = {name: getattr(shrewjax, name) for name in shrewjax.__all__}
    found = {name: x for name, x in found.items() if not name.endswith("State") and name != "spec"}
    found |= {f"flax.{name}": getattr(shrewjax.flax, name) for name in shrewjax.flax.__all__}
    found |= {f"spec.{name}": x for name, x in vars(shrewjax.spec).items() if name.endswith("_spec")}
    for name, x in found.items():
        if not inspect.isclass(x):
            yield name, x
            continue
        if x.__module__ != "shrewjax.flax":  # Flax makes the objects
            yield name, x.__init__
        of_class = {key: method for key, method in vars(x).items() if inspect.isfunction(method) and key[0] != "_"}
        yield from (
            (f"{name}.{key}", method) for key, method in of_class.items() if method.__module__.startswith("shrewjax")
        )


def signature(function):
    """Arguments and defaults. Types are left out, because Python's versions print them in other ways."""
    parameters = inspect.signature(function).parameters.values()
    return str(inspect.Signature([p.replace(annotation=inspect.Parameter.empty) for p in parameters]))


def text():
    lines = ["# Leaves of the states, in their order"]
    for name, state in states().items():
        lines += ["", f"{name}: {type(state).__name__}"]
        for path, x in jax.tree.leaves_with_path(state):
            lines.append(f"    {jax.tree_util.keystr(path)}: {x.dtype} {x.shape}")
    lines += ["", "# Fields of the public states", ""]
    for name in sorted(n for n in shrewjax.__all__ if n.endswith("State")):
        lines.append(f"{name}({', '.join(getattr(shrewjax, name)._fields)})")
    lines += ["", "# Signatures", ""]
    lines += sorted(name + signature(function) for name, function in public_functions())
    return "\n".join(lines) + "\n"


def test_states_and_signatures_are_those_of_the_file():
    assert text().splitlines() == GOLDEN.read_text().splitlines(), __doc__


def test_the_file_has_every_transformation_state_and_function():
    golden = GOLDEN.read_text()
    for name in {*CASES, *shrewjax.__all__} - {"spec"}:
        assert f"\n{name}" in golden, name


if __name__ == "__main__":
    GOLDEN.write_text(text())
