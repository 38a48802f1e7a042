"""The plan: which steps of a program run before the loop over micro-batches, in it, and after it.

==========  ===========================================================================================
part        its steps
==========  ===========================================================================================
once        a function of parameters alone, whose derivative needs the gradient of the whole batch
before      data that a micro-batch cannot make of its own slices, such as statistics of the labels
loop        what makes the frontier, for one micro-batch; also its slices of data
after       all others
==========  ===========================================================================================

The *frontier* is what the loop returns and the rest needs: sums over micro-batches, and rows, which are joined. It is
small: a sum before its rows, losses before logits, and a value before it is broadcast.

A plan goes through the program once, from the results back, so that it knows all readers of what a step makes.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from shrewjax._division import labels
from shrewjax._division.kinds import MIXED, SUM, Program, Slices, Step, Var, along, slices
from shrewjax._division.rows import Rows
from shrewjax._programs.jaxprs import Atom, is_variable, shape_of

Key: TypeAlias = tuple[Var, Rows | None]
"""A value, and which slice of it, or None for the whole."""


class Task(NamedTuple):
    """A step for a micro-batch: the slices that it takes of the operands, and makes of the results."""

    step: Step
    takes: Slices
    makes: Slices

    def reads(self) -> list[Key]:
        """Returns the values that it reads, each with its slice."""
        pairs = zip(self.step.equation.invars, self.takes, strict=True)
        return [(x, rows) for x, rows in pairs if is_variable(x)]

    def results(self) -> list[Key]:
        """Returns the values that it makes, each with its slice."""
        return [*zip(self.step.equation.outvars, self.makes, strict=True)]


class Plan:
    """The parts of a program. With `wanted`, the loop makes these slices of the results, as inside of others."""

    def __init__(self, program: Program, wanted: Iterable[Key] | None = None) -> None:
        self.program = program
        self.once: list[Step] = []
        self.before: list[Step] = []
        self.loop: list[Task] = []
        self.after: list[Step] = []
        self.frontier: list[Var] = []
        # The values that planned steps read: steps of the loop, steps before and after it, and steps that run once.
        self._slices: dict[Var, dict[Rows | None, None]] = {}
        self._whole, self._once = set[Var](), set[Var]()
        if wanted is None:
            self._whole.update(filter(is_variable, program.results))
        self._want(wanted or ())
        for step in reversed(program.steps):
            if step.is_free:
                self._add_free(step)
            else:
                self._add_data(step)
        for part in (self.once, self.before, self.loop, self.after):
            part.reverse()

    def _want(self, keys: Iterable[Key]) -> None:
        for x, rows in keys:
            if is_variable(x):
                self._slices.setdefault(x, {})[rows] = None

    def _add_free(self, step: Step) -> None:
        """Plans a free step. It may stand in several parts."""
        program, outs = self.program, step.equation.outvars
        # 1. It runs once, as does what such a step reads. That may run in the loop or after it, too, so go on.
        is_read = any(x in self._whole or x in self._slices for x in outs)
        if not self._once.isdisjoint(outs) or (step.is_once and is_read):
            self._add(self.once, step, self._once)
            if step.is_once:
                return
        # 2. A step after the loop reads it. The loop makes it, as the frontier, if it is rows or a sum and its operands
        # are no smaller. Otherwise it runs after the loop, too.
        read = [x for x in outs if x in self._whole]
        is_mixed = MIXED in program.kinds_of(read)
        can_be_frontier = not is_mixed and any(map(program.is_divided, read))
        if can_be_frontier and not self._is_smaller_before(step):
            self.frontier += read
            self._want((x, program.slice(x)) for x in read)
        elif read:
            self._add(self.after, step, self._whole)
        # 3. The loop needs it.
        self._add_tasks(step)
        # 4. It prints rows in the loop, and all else after it.
        if step.only_prints:
            takes = slices(program.kinds_of(step.equation.invars))
            if step.takes is not None and any(takes):
                self._add_task(Task(step, takes, []))
            else:
                self._add(self.after, step, self._whole)

    def _add_data(self, step: Step) -> None:
        self._add_tasks(step)
        is_read = not self._whole.union(self._once).isdisjoint(step.equation.outvars)
        if is_read or step.only_prints:
            self._add(self.before, step, self._whole)

    def _add(self, part: list[Step], step: Step, reads: set[Var]) -> None:
        part.append(step)
        reads.update(filter(is_variable, step.equation.invars))

    def _is_smaller_before(self, step: Step) -> bool:
        """Returns whether the operands of a step are a better frontier than its results.

        Operands that a step after the loop reads anyway, and all but rows and sums, cost nothing. So a sum leaves the
        loop before it is divided, and a value before it is broadcast. A contraction stays, unless its operands are
        sums. Operands of equal size are better if they are sums, or if the step only moves them, as a transpose does.
        """
        names = filter(is_variable, step.equation.invars)
        operands = {x for x in names if self.program.is_divided(x)}
        is_sum = {*map(self.program.kind, operands)} == {SUM}
        if step.programs or (labels.contracts(step.equation) and not is_sum):
            return False
        old = sum(map(size_of, operands - self._whole))
        new = sum(map(size_of, step.equation.outvars))
        return old < new or (old == new and (is_sum or labels.moves(step.equation)))

    # Tasks.

    def _add_tasks(self, step: Step) -> None:
        """Adds the tasks of a step that make what the loop reads. Data that it cannot make so is wanted whole."""
        tasks: list[Task] = []
        for at, x in enumerate(step.equation.outvars):
            for rows in self._slices.get(x, ()):
                task = self._task(step, at, rows)
                if task is None:
                    self._whole.add(x)
                elif task not in tasks:
                    tasks.append(task)
        for task in tasks:
            self._add_task(task)

    def _add_task(self, task: Task) -> None:
        self.loop.append(task)
        self._want(task.reads())

    def _task(self, step: Step, at: int, rows: Rows | None) -> Task | None:
        """Returns the task that makes a slice of a result, or None for data that is sliced from a whole of `before`."""
        x, takes = step.equation.outvars[at], step.takes
        by_kinds = Task(step, takes or [None] * len(step.equation.invars), step.makes)
        # 1. A value that depends on examples is made by the slices that were found.
        is_as_found = step.is_free and rows == step.makes[at]
        if is_as_found or not self.program.fact(x).may_be_sliced:
            return by_kinds
        # 2. Others are data, SAME or ZERO, so any slice is right. If a task reads the whole, or it is kept, slice that.
        has_whole = None in self._slices[x] or (x in self._whole and not step.is_free)
        found = rows and not has_whole and self._task_by_result(step, at, rows)
        if found:
            return found
        # 3. Otherwise the whole. `by_kinds` makes it of a free value, whose kind is SAME or ZERO here.
        # `MicroBatch.read` slices it.
        return by_kinds if step.is_free else None

    def _task_by_result(self, step: Step, at: int, rows: Rows) -> Task | None:
        """Returns the task that makes a slice of a result, from slices of the operands, or None if there is none."""
        equation = step.equation
        # 1. As it was found.
        if step.takes is not None and step.makes[at] == rows:
            return Task(step, step.takes, step.makes)
        ins, outs = labels.shapes_of(equation)
        # 2. A draw by one key. Generators other than threefry draw other numbers for each slice, so all tasks must read
        # the same one.
        if labels.is_draw(equation) and not ins[0]:
            is_one = len(self._slices[equation.outvars[0]]) == 1
            can_part = is_one or labels.is_drawn_by_position(equation)
            return Task(step, [None], [rows]) if can_part else None
        # 3. A reshape.
        if labels.is_reshape(equation):
            before = rows.reshaped(outs[0], ins[0])
            return Task(step, [before], [rows]) if before else None
        # 4. Along a label.
        its = labels.labels_of(equation)
        label = its and its.outs[at][rows.axis]
        if its is None or label is None or not rows.fits(outs[at]):
            return None
        takes, makes = (along(label, rows.sets, x) for x in (its.ins, its.outs))
        return None if None in makes else Task(step, takes, makes)


def size_of(x: Atom) -> int:
    """Returns the bytes of a value. A symbol of `jax.export` counts as a large number."""
    shape = [n if isinstance(n, int) else 2**16 for n in shape_of(x.aval)]
    return math.prod(shape) * x.aval.dtype.itemsize if hasattr(x.aval, "dtype") else 0
