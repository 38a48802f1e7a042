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
from typing import Any

import jax
from jax import lax

from shrewjax._base.types import Leaf
from shrewjax._programs import jaxprs
from shrewjax._programs.jaxprs import Atom, Equation, Jaxpr, is_variable


class _Half:
    """Steps of a body, which is a `Program`, as a function of what they read.

    Attributes:
      places: the numbers of the body's results that it makes.
      reads: the values that it reads.
    """

    def __init__(
        self, body: Any, steps: Sequence[Any], places: list[int], more: Sequence[Atom] = ()
    ) -> None:
        outs = [*(body.results[at] for at in places), *more]
        equations = [step.equation for step in steps]
        self.places, self.reads = places, jaxprs.read_by(equations, outs)
        self._known = body.constants
        self._run = jaxprs.function_of(jaxprs.program_of(equations, self.reads, outs))

    def __call__(self, values: dict[Atom, Leaf]) -> list[Leaf]:
        known = self._known | values
        return [*self._run(*(known[x] for x in self.reads))]


def in_two(equation: Equation, body: Any, is_mixed: Sequence[bool]) -> Jaxpr | None:
    """Returns what runs in the place of a scan or a checkpoint, or None if nothing of it can be divided.

    `body` is the `Program` inside of it. `is_mixed` says which results are mixed.
    """
    scan = jaxprs.scan_of(equation)
    if not (scan or jaxprs.is_checkpoint(equation)):
        return None
    mixed, kept = ([at for at, x in enumerate(is_mixed) if x == y] for y in (True, False))
    # 1. The second half, from its results back.
    needed = dict.fromkeys(filter(is_variable, (body.results[at] for at in mixed)))
    second: list[Any] = []
    for step in reversed(body.steps):
        outs = step.equation.outvars
        if any(x in needed for x in outs) and not any(map(body.is_divided, outs)):
            second.insert(0, step)
            needed |= dict.fromkeys(filter(is_variable, step.equation.invars))
    # 2. The first half.
    first = [x for x in body.steps if not x.mixes]
    if not any(body.is_divided(x) for step in first for x in step.equation.outvars):
        return None
    # 3. The second half gets what is rows or a sum, and what the first half carries.
    carries = body.arguments[scan.constants :][: scan.carries] if scan else []
    of_first = [x for at, x in enumerate(carries) if at in kept]
    given = [x for x in needed if body.is_divided(x) or x in of_first]
    halves = _Half(body, first, kept, given), _Half(body, second, mixed)
    # 4. Both, one after the other.
    run = partial(_scan, scan, body) if scan else partial(_checkpoint, equation)

    def of_operands(*operands: Leaf) -> list[Leaf]:
        known, count = dict(zip(body.arguments, operands, strict=True)), len(kept)
        made = run(halves[0], known, {})
        rest = run(halves[1], known, dict(zip(given, made[count:], strict=True)))
        by_place = dict(zip(kept + mixed, made[:count] + rest, strict=True))
        return [by_place[at] for at in range(len(by_place))]

    with jaxprs.context_of(equation):
        return jax.make_jaxpr(of_operands)(*(x.aval for x in equation.invars))


def _checkpoint(
    equation: Equation, half: _Half, known: dict[Atom, Leaf], handed_on: dict[Atom, Leaf]
) -> list[Leaf]:
    known = known | handed_on
    names = [x for x in half.reads if x in known]
    of_values = lambda *values: half(dict(zip(names, values, strict=True)))  # noqa: E731
    options = jaxprs.options_of_checkpoint(equation)
    return jax.checkpoint(of_values, **options)(*(known[x] for x in names))


def _scan(
    scan: jaxprs.Scan,
    body: Any,
    half: _Half,
    known: dict[Atom, Leaf],
    handed_on: dict[Atom, Leaf],
) -> list[Leaf]:
    names = body.arguments
    constants = {x: known[x] for x in names[: scan.constants]}
    carries = [names[scan.constants + at] for at in half.places if at < scan.carries]
    stacks = {x: known[x] for x in names[scan.constants + scan.carries :] if x in half.reads}
    stacks |= handed_on

    def trip(carry: list[Leaf], slices: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
        its = zip([*carries, *stacks], [*carry, *slices], strict=True)
        made = half(constants | dict(its))
        return made[: len(carries)], made[len(carries) :]

    start = [known[x] for x in carries]
    carry, made = lax.scan(trip, start, [*stacks.values()], scan.length, **scan.options)
    return [*carry, *made]
