"""Fission: a scan or a checkpoint of which a part can be divided becomes two.

The balance loss of a mixture of experts is an example: inside of scanned layers, it multiplies sums over examples. The
first scan runs the layers, and stacks these sums. The second one multiplies them. So only the second is undivided.

1. The second half has the steps that mix examples, and what they need that is the same for all examples.
2. The first half has all steps that do not mix examples, also those that the second half repeats. It also returns what
   the second half reads of it.
3. A scan stacks that. Each half carries what its own steps make.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
from jax import lax

from shrewjax._base.types import Leaf
from shrewjax._programs import jaxprs
from shrewjax._programs.jaxprs import Atom, Equation, Jaxpr, is_variable

Values: TypeAlias = dict[Atom, Leaf]


class _Half:
    """Steps of a body, which is a `Program`, as a function of the values that they `read`, by name."""

    def __init__(self, body: Any, steps: list[Any], results: list[Atom]) -> None:
        equations = [step.equation for step in steps]
        self.reads, self._constants = jaxprs.read_by(equations, results), body.constants
        program = jaxprs.program_of(equations, self.reads, results)
        self._run = jaxprs.function_of(program)

    def __call__(self, values: Values) -> list[Leaf]:
        known = self._constants | values
        return [*self._run(*(known[x] for x in self.reads))]


def in_two(equation: Equation, body: Any, is_mixed: Sequence[bool]) -> Jaxpr | None:
    """Returns what runs in the place of a scan or a checkpoint, or None if nothing of it can be divided.

    `body` is the `Program` inside of it. `is_mixed` says which results are mixed.
    """
    scan = jaxprs.scan_of(equation)
    if not (scan or jaxprs.is_checkpoint(equation)):
        return None
    mixed = [at for at, x in enumerate(is_mixed) if x]
    kept = [at for at, x in enumerate(is_mixed) if not x]
    of_mixed, of_kept = ([body.results[at] for at in x] for x in (mixed, kept))
    first, second, needed = _parts(body, of_mixed)
    if not any(body.is_divided(x) for step in first for x in step.equation.outvars):
        return None
    # 1. The second half gets what is rows or a sum, and what the first half carries.
    names = body.arguments[scan.constants :] if scan else []
    count = scan.carries if scan else 0
    carries, stacks = names[:count], names[count:]
    of_first = [x for at, x in enumerate(carries) if at in kept]
    of_second = [x for at, x in enumerate(carries) if at in mixed]
    given = [x for x in needed if body.is_divided(x) or x in of_first]
    halves = _Half(body, first, [*of_kept, *given]), _Half(body, second, of_mixed)
    # 2. Both, one after the other. The first half's results end with what it hands on.
    run = partial(_scan, scan) if scan else partial(_checkpoint, equation)

    def of_operands(*operands: Leaf) -> list[Leaf]:
        known = dict(zip(body.arguments, operands, strict=True))
        made = run(halves[0], known, of_first, stacks)
        known.update(zip(given, made[len(kept) :], strict=True))
        rest = run(halves[1], known, of_second, [*stacks, *given])
        by_place = dict(zip(kept + mixed, made[: len(kept)] + rest, strict=True))
        return [by_place[at] for at in range(len(by_place))]

    with jaxprs.context_of(equation):
        return jax.make_jaxpr(of_operands)(*(x.aval for x in equation.invars))


def _parts(body: Any, results: list[Atom]) -> tuple[list[Any], list[Any], list[Atom]]:
    """Returns the steps of both halves, and what the second one needs for its results."""
    # Going back: rows and sums come from the first half. The second one makes all else again.
    needed, second = dict.fromkeys(filter(is_variable, results)), list[Any]()
    for step in reversed(body.steps):
        outs = step.equation.outvars
        if any(x in needed for x in outs) and not any(map(body.is_divided, outs)):
            second.insert(0, step)
            needed |= dict.fromkeys(filter(is_variable, step.equation.invars))
    return [x for x in body.steps if not x.mixes], second, [*needed]


def _checkpoint(equation: Equation, half: _Half, known: Values, *_: Any) -> list[Leaf]:
    names = [x for x in half.reads if x in known]
    of_values = lambda *values: half(dict(zip(names, values, strict=True)))  # noqa: E731
    options = jaxprs.options_of_checkpoint(equation)
    return jax.checkpoint(of_values, **options)(*(known[x] for x in names))


def _scan(
    scan: jaxprs.Scan, half: _Half, known: Values, carries: list[Atom], stacks: list[Atom]
) -> list[Leaf]:
    stacks = [x for x in stacks if x in half.reads]
    names = [*carries, *stacks]

    def trip(carry: list[Leaf], slices: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
        made = half(known | dict(zip(names, [*carry, *slices], strict=True)))
        return made[: len(carries)], made[len(carries) :]

    start, slices = ([known[x] for x in names] for names in (carries, stacks))
    carry, made = lax.scan(trip, start, slices, scan.length, **scan.options)
    return [*carry, *made]
