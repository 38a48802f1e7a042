"""Mutation testing of a module or a package, on demand: does a slip in it make a test fail?

    python -m pip install cosmic-ray
    python tests/mutate.py _skipping --sample 20 --seed 1 --seconds 40
    python tests/mutate.py _numerics/norms --sample 60 --seconds 25

A mutant is a copy of the repository with one place of the module, or of the package's modules, changed. A place is an
operator, a number, a comparison, a condition, a loop or a decorator; what is put there is drawn among all that
cosmic-ray knows. The tests of its package run on it, until one fails. A line is printed for each mutant, the difference
for each that survives, and the share of those killed at the end. The same `--seed` draws the same mutants.

Left out are annotations, as they have no effect when the code runs, texts of messages (f-strings), and what is no
Python or the same syntax tree again. What is the same for every input although it is written differently, or is only
slower, is not: it survives.

Each mutant is a fork of a process that has imported the tests' libraries. First come the tests that take least time and
have killed most; after `--seconds` no other is begun. Programs are compiled once for all mutants that leave them as
they are: JAX keeps them in JAX_COMPILATION_CACHE_DIR, by default in the folder for temporary files, which the first
run, of the unchanged code, fills. A test that takes more than a minute of a core hangs: that kills its mutant.
"""

import argparse
import ast
import collections
import contextlib
import difflib
import importlib
import itertools
import math
import os
import pathlib
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings

import pytest
from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db

ROOT = pathlib.Path(__file__).parent.parent
# A package's tests are in the folder of its name. Slips in these packages also show in tests of their callers.
FOLDERS = {
    "_base": ["base", "numerics", "windows", "batches", "promises"],
    "_numerics": ["numerics", "definition"],
    "_skipping": ["skipping", "windows"],
}
LONGEST = 60  # seconds of a core for one test


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("module", help="such as _numerics/norms, or a package, such as _numerics")
    parser.add_argument("--sample", type=int, help="how many places to try; all if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="how many of them were tried before")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of a core, after which a mutant has survived")
    parser.add_argument("--marks", default="", help="which tests may run, such as 'not thorough'; all by default")
    parser.add_argument("--files", action="store_true", help="name the test files that no mutant needs")
    parser.add_argument("--line", type=int, help="try only places in this line", action="append")
    arguments = parser.parse_args()
    package, _, module = arguments.module.partition("/")
    files = [f"{module}.py"] if module else sorted(x.name for x in (ROOT / "shrewjax" / package).glob("*.py"))
    originals = {f"shrewjax/{package}/{name}": (ROOT / "shrewjax" / package / name).read_text() for name in files}
    tests = Tests(FOLDERS.get(package, [package.removeprefix("_")]), arguments.seconds, arguments.marks)

    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        for name in ("shrewjax", "tests", "examples", "docs"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, copy)
        os.chdir(copy)
        sys.path[:0] = [folder]  # before an installed one
        if failed := tests.first_to_fail():
            sys.exit(f"without any change, {failed} fails")
        print(f"without any change, {len(tests.seconds)} tests pass in {sum(tests.seconds.values()):.0f} s", flush=True)

        killed = tried = 0
        unneeded = {name.partition("::")[0] for name in tests.seconds}
        chosen = mutants(originals, random.Random(arguments.seed), arguments.line)
        tries = itertools.islice(itertools.islice(chosen, arguments.skip, None), arguments.sample)
        for file, line, mutant in tries:
            pathlib.Path(file).write_text(mutant)
            killer = tests.first_to_fail()
            killing_file = killer.partition("::")[0]
            alone = arguments.files and killing_file in unneeded and not tests.first_to_fail(without=killing_file)
            pathlib.Path(file).write_text(originals[file])
            tried, killed = tried + 1, killed + bool(killer)
            fate = f"killed by {killer}" if killer else "SURVIVED"
            if alone:
                fate += ", and by no other file"
                unneeded.remove(killing_file)
            print(f"{arguments.skip + tried}: {file}:{line} {fate}", flush=True)
            if not killer:
                print(*difference(originals[file], mutant), sep="\n", flush=True)
    print(f"{killed} of {tried} killed, {killed / tried:.1%}")
    if arguments.files:
        print("no mutant needs", *sorted(unneeded))


def mutants(originals, rng, lines=None):
    """The file, the line and the code of one mutation for each place of these files, in a random order."""
    trees = {file: ast.parse(original) for file, original in originals.items()}
    by_place = collections.defaultdict(list)
    for file, original in originals.items():
        ignored = [*ignored_places(trees[file])]
        with tempfile.TemporaryDirectory() as folder, use_db(f"{folder}/session.sqlite", WorkDB.Mode.create) as db:
            path = pathlib.Path(folder, "module.py")
            path.write_text(original)
            init([path], db, {})
            for mutation in (item.mutations[0] for item in db.work_items):
                if not any(start <= mutation.start_pos < end for start, end in ignored):
                    by_place[file, mutation.start_pos].append(mutation)
    places = sorted(by_place)
    rng.shuffle(places)
    for file, place in places:
        candidates = sorted(by_place[file, place], key=lambda m: (m.operator_name, m.occurrence))
        rng.shuffle(candidates)
        if lines and place[0] not in lines:
            continue
        for mutation in candidates:
            operator = get_operator(mutation.operator_name)(**mutation.operator_args)
            mutant = mutate_code(originals[file], operator, mutation.occurrence)
            with contextlib.suppress(SyntaxError), warnings.catch_warnings(action="ignore"):
                if ast.dump(ast.parse(mutant)) != ast.dump(trees[file]):
                    yield file, place[0], mutant
                    break


def ignored_places(tree):
    for parent in ast.walk(tree):
        for node in (parent if isinstance(parent, ast.JoinedStr) else None, *annotations(parent)):
            if node is not None:
                yield (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def annotations(node):
    return getattr(node, "annotation", None), getattr(node, "returns", None)


def difference(original, mutant):
    """The changed lines."""
    lines = difflib.unified_diff(original.splitlines(), mutant.splitlines(), lineterm="", n=0)
    return [line for line in lines if not line.startswith(("---", "+++"))]


class Tests:
    """Runs tests in forks of this process."""

    def __init__(self, folders, limit, marks):
        self.limit = limit
        self.arguments = [f"tests/{folder}" for folder in folders]
        self.options = [
            "-x",
            "-q",
            "-m",
            marks,
            "-n0",
            "-pno:cacheprovider",
            "-Wignore::pytest.PytestAssertRewriteWarning",
        ]
        self.kills = collections.Counter()
        self.seconds = {}
        os.environ["HYPOTHESIS_PROFILE"] = "no_shrinking"
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "shrewjax_mutants"))
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        for library in ("hypothesis.extra.numpy", "hypothesis.stateful", "jax.numpy", "chex", "optax"):
            importlib.import_module(library)

    def first_to_fail(self, without=None):
        """The name of the first test to fail, of all files but `without`; of the one that hangs; "import"; or ""."""
        reading, writing = os.pipe()
        with warnings.catch_warnings(action="ignore"):  # JAX has threads only once it computes
            child = os.fork()
        if child == 0:
            os.close(reading)
            self.report = os.fdopen(writing, "w", buffering=1)
            try:
                os._exit(self.run(without))
            finally:
                os._exit(1)
        os.close(writing)
        with os.fdopen(reading) as lines:
            seen = [line.rstrip("\n").split("\t") for line in lines]
        status = os.waitpid(child, 0)[1]
        if status == 0:
            self.seconds.update({name: float(seconds) for name, seconds in seen if seconds != "started"})
            return ""
        killer = seen[-1][0] if seen else "import"
        self.kills[killer] += 1
        return killer

    def run(self, without):
        sys.dont_write_bytecode = bool(self.seconds)  # only of the unchanged code
        silence = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(silence, stream)
        ignored = [f"--ignore={without}"] if without else []
        return pytest.main([*self.options, *ignored, *self.arguments], plugins=[self])

    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: self.seconds.get(item.nodeid, 0) / (self.kills[item.nodeid] + 0.1))

    def pytest_runtest_setup(self):
        if self.seconds and time.process_time() > self.limit:
            pytest.skip()

    def pytest_runtest_logstart(self, nodeid):
        signal.setitimer(signal.ITIMER_PROF, LONGEST)  # ends the process
        print(nodeid, "started", sep="\t", file=self.report)

    def pytest_runtest_logreport(self, report):
        if report.when == "call":
            print(report.nodeid, report.duration, sep="\t", file=self.report)


if __name__ == "__main__":
    main()
