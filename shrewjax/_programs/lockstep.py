"""A function of a whole batch and of its micro-batches, run side by side, equation by equation.

`run` traces the function for each shape of its arguments. Each value of the whole batch then stands beside those of the
micro-batches, with the equation that made them and its operands (`Value`). Calls and the branch that runs are opened,
and loops if asked for. An equation runs as a program of its own, so no operation is named. Programs that have other
equations for another number of examples run as one equation. `compiled` returns the results alone, which is faster.

An equation that draws random numbers gives each micro-batch the rows of the whole batch's. So both compute with the
same numbers. `walk` goes back from a result to what it was made from. `expressions_of` returns the user's code that
made a value.
"""

import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, TypeAlias

import jax

from shrewjax._base.trees import is_typed_key
from shrewjax._base.types import Function, Leaf, PyTree
from shrewjax._programs import jaxprs
from shrewjax._programs.jaxprs import Atom, Equation, Frame, Jaxpr

Source: TypeAlias = tuple[str, str]
"""The role of a leaf of the arguments, and its name in messages."""

Equations: TypeAlias = tuple[Equation, ...]
"""The calls around an equation, the outermost first, and the equation itself."""

Rows: TypeAlias = Callable[[Leaf, Sequence[Leaf]], Sequence[Leaf]]
"""A function that returns the rows of micro-batches in a value of the whole batch. It also gets their own values."""


@dataclass(frozen=True, eq=False)
class Value:
    """A value of the whole batch and those of its micro-batches, and how they were made."""

    each: Sequence[Leaf]  # the first one is the whole batch's
    sources: frozenset[Source] = frozenset()  # the leaves of arguments that it is made from
    equations: Equations = ()  # that made it; none made an argument or a constant
    operands: Sequence["Value"] = ()
    is_alike: bool = True  # whether the same operations made all

    whole = property(lambda self: self.each[0])
    parts = property(lambda self: self.each[1:])

    def depends_on(self, role: str) -> bool:
        return any(its_role == role for its_role, _ in self.sources)


def compiled(function: Function, each: Sequence[PyTree]) -> PyTree:
    """Returns the tree of results for the whole batch and for each micro-batch, without what they were made from."""
    made = map(jax.jit(function), *zip(*each, strict=True))
    return jax.tree.map(lambda *xs: Value(xs), *made)


def run(
    function: Function,
    each: Sequence[PyTree],
    sources: Sequence[Source],
    rows: Rows,
    *,
    is_unrolled: bool,
) -> PyTree:
    """Returns the tree of results, with all values on the way to them, also those inside of loops that are unrolled.

    `sources` are those of the arguments' leaves.
    """
    columns = zip(sources, *map(jax.tree.leaves, each), strict=True)
    args = [Value(x, frozenset([source])) for source, *x in columns]
    with jax.disable_jit(is_unrolled):
        traceable = jax.jit(function)
        traced = [traceable.trace(*point) for point in each]
    results = _run([x.jaxpr for x in traced], args, rows)
    return jax.tree.unflatten(jax.tree.structure(traced[0].out_info), results)


def _run(
    programs: Sequence[Jaxpr], args: Sequence[Value], rows: Rows, calls: Equations = ()
) -> list[Value]:
    """Runs closed jaxprs, one for the whole batch and one for each micro-batch. What differs runs as one equation."""
    each = [*map(jaxprs.opened, programs)]
    constants = map(Value, _together(map(jaxprs.constants_of, programs)))
    # By tuples of variables, one of each program, so that an operand which is another one elsewhere has none.
    known = dict(_together([_together(x.constvars for x in each), constants]))
    num_constants = len(known)
    known |= _together([_together(x.invars for x in each), args])

    def read(atoms: tuple[Atom, ...]) -> Any:
        if any(map(jaxprs.is_variable, atoms)):
            return known.get(atoms) if all(map(jaxprs.is_variable, atoms)) else None
        return Value([*map(jaxprs.value_of_literal, atoms)])

    done = 0
    for equations in _together(x.eqns for x in each):
        operands = [*map(read, _together(e.invars for e in equations))]
        forms = {(e.primitive, len(e.invars), len(e.outvars)) for e in equations}
        if None in operands or len(forms) > 1:
            break
        functions = map(jaxprs.function_of_equation, each, equations)
        around = *calls, equations[0]
        made = _run_equation(equations, functions, operands, rows, around)
        known |= _together([_together(e.outvars for e in equations), made])
        done += 1
    results = [*map(read, _together(x.outvars for x in each))]
    if None not in results and all(len(x.eqns) == done for x in each):
        return results
    # The rest, as one equation, which keeps its constants.
    variables = [*known][num_constants:]
    rest = [jaxprs.rest_of(x, done, [v[i] for v in variables]) for i, x in enumerate(programs)]
    around = *calls, *(each[0].eqns[done : done + 1] or each[0].eqns[-1:])
    functions, operands = map(jaxprs.function_of, rest), [known[v] for v in variables]
    made = _made(functions, operands, around)
    # Each result keeps only its own operands, because the equation takes those of all. The whole batch's program tells.
    used = (
        [known[v] for v in variables if v[0] in of_result]
        for of_result in jaxprs.used_by_results(rest[0])
    )
    return [replace(x, operands=y, is_alike=False) for x, y in _together([made, used])]


def _run_equation(
    equations: Sequence[Equation],
    functions: Iterable[Function],
    operands: Sequence[Value],
    rows: Rows,
    around: Equations,
) -> Sequence[Value]:
    """Runs an equation of each program. Opens a call, and the branch that runs. `around` ends with the equation."""
    inner = [x for x in map(jaxprs.jaxpr_of_call, equations) if x is not None]
    branches = [*map(jaxprs.branches_of, equations)]
    at = {int(x) for x in operands[0].each} if branches[0] else set[int]()
    if len(at) == 1:
        (branch,) = at
        inner, operands = [x[min(branch, len(x) - 1)] for x in branches], operands[1:]
    if inner:
        return _run(inner, operands, rows, around)
    if not equations[0].outvars:  # a print, which does not run
        return ()
    made = _made(functions, operands, around)
    if not any(is_typed_key(x.whole) and x.sources for x in operands):
        return made
    # Micro-batches get their rows of what the whole batch draws from a key that is an argument's.
    return [replace(x, each=[x.whole, *rows(x.whole, x.parts)]) for x in made]


def _together(lists: Iterable[Iterable[Any]]) -> Iterator[Any]:
    return zip(*lists, strict=False)


def _made(
    functions: Iterable[Function], operands: Sequence[Value], equations: Equations
) -> list[Value]:
    """Returns the results of functions, one for the whole batch and one for each micro-batch."""
    each = [f(*(x.each[i] for x in operands)) for i, f in enumerate(functions)]
    sources = frozenset[Source]().union(*(x.sources for x in operands))
    return [Value(x, sources, equations, operands) for x in zip(*each, strict=True)]


def walk(start: Value, inner: Callable[[Value], Iterable[Value]]) -> Iterator[Value]:
    """Yields a value, those that `inner` returns for it, those that it returns for these, and so on, each once."""
    seen, todo = set[Value](), [start]
    while todo:
        value = todo.pop()
        if value not in seen:
            seen.add(value)
            yield value
            todo += inner(value)


_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep, "<frozen"
# Not all of `get_paths()`: its prefix, such as /usr or /usr/local, may hold the user's project.
_FOLDERS = "stdlib", "platstdlib", "purelib", "platlib"
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in _FOLDERS)


def expressions_of(value: Value, function: Function) -> list[Frame]:
    """Returns the expressions of the user's code that made a value, the outermost first.

    Those in a file outside of installed packages, or in the file of the function, are the user's.
    """
    file_of_function = getattr(getattr(function, "__code__", None), "co_filename", "")

    def is_own(frame: Frame) -> bool:
        is_users = frame.filename == file_of_function or not frame.filename.startswith(_INSTALLED)
        return is_users and not frame.filename.startswith(_OURS)

    # JAX cuts a traceback at a jit, so the calls' count, too.
    each = map(jaxprs.frames_of, value.equations)
    # From the innermost one to that of `run`, which is the caller of the loss.
    inner = (takewhile(lambda x: x.filename != __file__, frames) for frames in each)
    return [*dict.fromkeys(y for x in inner for y in [*filter(is_own, x)][::-1])]
