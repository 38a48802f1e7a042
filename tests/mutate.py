"""Mutation testing of one module, on demand: does a slip in it make a test fail?

    python -m pip install cosmic-ray
    python tests/mutate.py _norms --sample 30

Changes a copy of the repository, one place at a time, runs the tests that are about the module, and prints the mutants
that no test notices. A place is an operator, a number, a comparison, a branch or a decorator; what is put there is
drawn at random among what the tool knows.
"""

import argparse
import ast
import pathlib
import random
import shutil
import sys
import tempfile

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import TestOutcome

ROOT = pathlib.Path(__file__).parent.parent
# The quickest to fail come first.
TESTS = {
    "_norms": ["test_norms.py", "test_spec.py", "test_clipping.py"],
    "_clipping": ["test_clipping.py", "test_spec.py", "test_contracts.py"],
    "_selection": ["test_selection.py", "test_spec.py", "test_clipping.py"],
    "_accumulation": ["test_spec.py", "test_accumulation.py", "test_contracts.py"],
}
LONGEST = 600  # seconds; what takes longer hangs


def places(module):
    """One mutation for each place in the code, annotations left out: no test should notice those."""
    annotations = [
        (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        for parent in ast.walk(ast.parse(module.read_text()))
        for node in (getattr(parent, "annotation", None), getattr(parent, "returns", None))
        if node is not None
    ]
    with tempfile.TemporaryDirectory() as folder, use_db(f"{folder}/session.sqlite", WorkDB.Mode.create) as db:
        init([module], db, {})
        mutations = [item.mutations[0] for item in db.work_items]
    by_place = {}
    for mutation in mutations:
        start = mutation.start_pos
        if not any(a[:2] <= start < a[2:] for a in annotations):
            by_place.setdefault(start, []).append(mutation)
    return [random.choice(by_place[start]) for start in sorted(by_place)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", choices=TESTS)
    parser.add_argument("--sample", type=int, help="how many places to try; all if not given")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random.seed(arguments.seed)

    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for name in ("shrewjax", "tests", "examples"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, copy)
        module = copy / "shrewjax" / f"{arguments.module}.py"
        mutations = places(module)
        if arguments.sample is not None:
            mutations = sorted(
                random.sample(mutations, min(arguments.sample, len(mutations))), key=lambda m: m.start_pos
            )
        files = " ".join(f"tests/{name}" for name in TESTS[arguments.module])
        # From the copy: its package is found before an installed one.
        pytest = f"{sys.executable} -m pytest -x -q -n 0 -p no:cacheprovider {files}"
        command = f"env -C {copy} HYPOTHESIS_PROFILE=no_shrinking {pytest}"
        killed = 0
        for number, mutation in enumerate(mutations, 1):
            result = mutate_and_test([mutation], command, LONGEST)
            killed += result.test_outcome != TestOutcome.SURVIVED
            if result.test_outcome == TestOutcome.SURVIVED:
                print(result.diff, flush=True)
            print(f"{number} of {len(mutations)}: {killed} killed", flush=True)


if __name__ == "__main__":
    main()
