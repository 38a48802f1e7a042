"""Programs of a whole batch and of its micro-batches, run side by side, equation by equation.

1. `trace` makes the programs of a function, one for each shape of its arguments.
2. `run` runs them in lockstep. Each value of the whole batch stands beside those of the micro-batches, with the
   equation that made them and its operands (`Value`). Calls and scans are opened. An equation runs as a program of its
   own, so no operation is named.
3. An equation that draws random numbers gives each micro-batch the rows of the whole batch's. So both compute with
   the same numbers.
4. `partings` walks back from a result that is wrong, over values that have no relation, to those which were made from
   related ones. `line_of` names their lines.

If the programs have other equations for another number of examples, they run as one equation.
"""

import os
import sysconfig
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, takewhile
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from shrewjax._base.types import Function, Leaf, PyTree
from shrewjax._programs import jaxprs
from shrewjax._programs.jaxprs import Atom, Equation, Jaxpr, Scan

TURNS = 64
"""The length of the longest scan that is opened, because each turn takes the time of its equations. With a key, each
scan is opened."""

Rows: TypeAlias = Callable[[Leaf, Sequence[Leaf]], Iterator[Sequence[Leaf]]]
"""A function that yields the rows of micro-batches in a value of the whole batch. It also gets their own values."""


Calls: TypeAlias = tuple[Equation, ...]
"""The equations around another one, the outermost first."""


@dataclass(frozen=True, eq=False)
class Value:
    """A value of the whole batch and those of its micro-batches, and how they were made."""

    each: Sequence[Leaf]  # the first one is the whole batch's
    equation: Equation | None = None  # None: an argument or a constant
    calls: Calls = ()
    operands: Sequence["Value"] = ()

    whole = property(lambda self: self.each[0])
    parts = property(lambda self: self.each[1:])


class Programs(NamedTuple):
    """The program for the whole batch, and then one for each micro-batch."""

    jaxprs: Sequence[Jaxpr]
    results: PyTree  # their types, for the whole batch
    differing: Equation | None  # from which on another program differs
    steps: dict[tuple[int, ...], list["_Step"]]  # those that were made, by their jaxprs


def trace(function: Function, each: Sequence[Sequence[PyTree]]) -> Programs:
    """Returns the programs of a function for the arguments of the whole batch and of each micro-batch."""
    traced: dict[PyTree, tuple[Jaxpr, PyTree]] = {}
    types = [tuple(map(jax.typeof, jax.tree.leaves(args))) for args in each]
    for key, args in zip(types, each, strict=True):
        if key not in traced:
            traced[key] = jaxprs.traced(function, *args)
    programs = [traced[key][0] for key in types]
    return Programs(programs, traced[types[0]][1], jaxprs.first_difference(programs), {})


def run(programs: Programs, args: Sequence[Value], rows: Rows, *, by_equation: bool) -> PyTree:
    """Runs the programs. Returns the tree of their results, each a `Value`.

    With `by_equation` all values on the way are known. Otherwise what lies between two draws runs as one program, which
    is faster: JAX compiles two of them, and not each operation.
    """
    if programs.differing is None:
        values = _Run(args, rows, by_equation, programs.steps).program(programs.jaxprs, args, ())
    else:
        functions = [*map(jaxprs.function_of, programs.jaxprs)]
        values = _called(functions, programs.differing, (), args)
    return jax.tree.unflatten(jax.tree.structure(programs.results), values)


def _called(
    functions: Sequence[Function],
    equation: Equation | None,
    calls: Calls,
    operands: Sequence[Value],
) -> list[Value]:
    """Returns the results of functions, one for the whole batch and one for each micro-batch."""
    made = [f(*(x.each[i] for x in operands)) for i, f in enumerate(functions)]
    return [Value(each, equation, calls, operands) for each in zip(*made, strict=True)]


class _Step(NamedTuple):
    """Equations that run as one. Operands and functions are of the whole batch and then of each micro-batch."""

    operands: Sequence[Sequence[Atom]]
    results: Sequence[Atom]  # in the program of the whole batch
    functions: Sequence[Function]
    equation: Equation | None = None  # of the whole batch, if it is one
    calls: Sequence[Jaxpr] = ()  # to be opened, if it is a call
    scans: Sequence[Scan] = ()  # to be opened, if it is a scan


class _Run(NamedTuple):
    args: Sequence[Value]
    rows: Rows
    by_equation: bool
    steps: dict[tuple[int, ...], list[_Step]]

    def program(
        self, programs: Sequence[Jaxpr], args: Sequence[Value], calls: Calls
    ) -> list[Value]:
        insides = [*map(jaxprs.opened, programs)]
        consts = map(Value, zip(*map(jaxprs.constants_of, programs), strict=True))
        names = [*insides[0].constvars, *insides[0].invars]
        known = dict(zip(names, [*consts, *args], strict=True))

        def read(atoms: Sequence[Atom]) -> Value:
            if jaxprs.is_variable(atoms[0]):
                return known[atoms[0]]
            return Value([*map(jaxprs.value_of_literal, atoms)])

        key = (self.by_equation, *map(id, insides))
        if key not in self.steps:
            self.steps[key] = [*_steps(insides, self.by_equation)]
        for step in self.steps[key]:
            results = self._results(step, [*map(read, step.operands)], calls)
            known.update(zip(step.results, results, strict=True))
        return [*map(read, zip(*(x.outvars for x in insides), strict=True))]

    def _results(self, step: _Step, operands: Sequence[Value], calls: Calls) -> list[Value]:
        if step.calls:
            return self.program(step.calls, operands, (*calls, step.equation))
        if step.scans:
            return self._turns(step.scans, operands, step.equation, calls)
        return [*map(self._drawn, _called(step.functions, step.equation, calls, operands))]

    def _drawn(self, value: Value) -> Value:
        """Gives the micro-batches the rows of what the whole batch draws from a key that is an argument's."""
        keys = [x for x in value.operands if jaxprs.is_key(x.whole)]
        if not any(is_made_from(x, self.args) for x in keys):
            return value
        rows = next(self.rows(value.whole, value.parts), value.parts)
        return replace(value, each=[value.whole, *rows])

    def _turns(
        self,
        scans: Sequence[Scan],
        operands: Sequence[Value],
        equation: Equation,
        calls: Calls,
    ) -> list[Value]:
        scan, bodies = scans[0], [x.body for x in scans]
        constants, others = operands[: scan.constants], operands[scan.constants :]
        carry, stacks = others[: scan.carries], others[scan.carries :]
        order, rows = -1 if scan.options["reverse"] else 1, []
        for t in range(scan.length)[::order]:
            slices = [Value([m[t] for m in x.each], equation, calls, [x]) for x in stacks]
            args = [*constants, *carry, *slices]
            results = self.program(bodies, args, (*calls, equation))
            carry = results[: scan.carries]
            rows.append(results[scan.carries :])
        columns = [*zip(*rows[::order], strict=True)]
        stacked = [[jnp.stack(m) for m in zip(*(x.each for x in c), strict=True)] for c in columns]
        values = zip(stacked, columns, strict=True)
        return [*carry, *(Value(x, equation, calls, c) for x, c in values)]


def _steps(insides: Sequence[Jaxpr], by_equation: bool) -> Iterator[_Step]:
    """Yields the steps of programs that differ in shapes alone. Equations without results, as prints, do not run."""
    rows = zip(*(x.eqns for x in insides), strict=True)
    of_results = (row for row in rows if row[0].outvars)
    is_alone = lambda row: by_equation or jaxprs.has_keys(row[0])  # noqa: E731
    for alone, group in groupby(of_results, is_alone):
        if alone:
            yield from map(partial(_one, insides), group)
        else:
            yield _many(insides, list(group))


def _many(insides: Sequence[Jaxpr], rows: Sequence[Sequence[Equation]]) -> _Step:
    # Micro-batches of one shape share their program, so that it is compiled once.
    made = {
        id(x): jaxprs.with_used_results(x, y)
        for x, y in zip(insides, zip(*rows, strict=True), strict=True)
    }
    compiled = {key: jax.jit(jaxprs.function_of(x)) for key, x in made.items()}
    parts = [jaxprs.opened(made[id(x)]) for x in insides]
    operands = [*zip(*(x.invars for x in parts), strict=True)]
    return _Step(operands, parts[0].outvars, [compiled[id(x)] for x in insides])


def _one(insides: Sequence[Jaxpr], each: Sequence[Equation]) -> _Step:
    operands = [*zip(*(e.invars for e in each), strict=True)]
    functions = [*map(jaxprs.function_of_equation, insides, each)]
    step = _Step(operands, each[0].outvars, functions, each[0])
    calls = [x for x in map(jaxprs.jaxpr_of_call, each) if x is not None]
    scans = [x for x in map(jaxprs.scan_of, each) if x is not None]
    if calls and jaxprs.first_difference(calls) is None:
        return step._replace(calls=calls)
    if len({x.length for x in scans}) != 1:
        return step
    is_short = scans[0].length <= TURNS or jaxprs.has_keys(each[0])
    is_alike = jaxprs.first_difference([x.body for x in scans]) is None
    return step._replace(scans=scans) if is_short and is_alike else step


def is_made_from(value: Value, others: Collection[Value], *, by_floats: bool = False) -> bool:
    """Returns whether a value depends on one of the others. `stop_gradient` leaves no trace, so it does not count."""
    seen, todo = set[Value](), [value]
    while todo:
        x = todo.pop()
        if x not in seen and not (by_floats and not jaxprs.is_float(x.whole)):
            seen.add(x)
            todo += x.operands
    return not seen.isdisjoint(others)


def partings(
    results: Sequence[Value], is_related: Callable[[tuple[Value, ...]], bool]
) -> list[tuple[Value, ...]]:
    """Returns the unrelated values on the way to a result that were made from related ones, the first one first.

    A value is that of several runs of the same programs, so that a relation in one of them may be chance. A constant
    that is unrelated counts as related, because nothing made it.
    """
    found, seen, todo = [], set[tuple[Value, ...]](), [tuple(results)]
    while todo:
        value = todo.pop()
        if value not in seen:
            seen.add(value)
            unrelated = [x for x in operands_of(value) if x[0].equation and not is_related(x)]
            todo += unrelated
            found += [] if unrelated else [value]
    return found[::-1]


def operands_of(value: tuple[Value, ...]) -> list[tuple[Value, ...]]:
    """Returns the operands of a value of several runs."""
    return [*zip(*(x.operands for x in value), strict=True)]


_NOT_THE_USERS = (
    *sysconfig.get_paths().values(),
    os.path.dirname(os.path.dirname(__file__)),
    "<frozen",
)


def line_of(value: Value, own_file: str) -> str:
    """Returns the line of the user's code that made a value: the innermost one outside of installed packages.

    One of `own_file` is the user's, wherever that is installed. JAX cuts a traceback at a jit. Then the call's counts.
    """
    for equation in (value.equation, *reversed(value.calls)):
        frames = jaxprs.frames_of(equation) if equation else []
        # From the innermost one to that of `trace`, which is the caller of the loss.
        for frame in takewhile(lambda x: x.filename != __file__, reversed(frames)):
            if frame.filename == own_file or not frame.filename.startswith(_NOT_THE_USERS):
                return f"{os.path.basename(frame.filename)}:{frame.lineno}: {frame.line}"
    return "a line of an installed package"
