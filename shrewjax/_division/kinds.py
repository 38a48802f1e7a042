"""Kinds: what each value of a traced program has to do with examples.

A `Program` goes through a jaxpr of the whole batch. A value is *free* if it depends on what is differentiated. The
table of labels must prove its kind. All other values are data. They are known before the loop, so any slice
of them is right, and their kind only says which axis probably holds examples.

=========  ======================================================================
kind       a value of a micro-batch
=========  ======================================================================
`Rows`     is the part of the whole batch's value that its examples make
`SAME`     is the whole batch's value, which depends on no example
`ZERO`     the same, and it is zero, so that it may begin a sum
`SUM`      adds up, over all micro-batches, to the whole batch's value
`MIXED`    says nothing about the whole batch's value
=========  ======================================================================

1. A call (`jit`) is replaced by the equations inside it.
2. An operation of data has no kind to prove.
3. A loop, a branch or a checkpoint has programs inside, which are analysed in turn, a carry until its kinds stay.
4. A function that brings its derivative (`jax.custom_vjp`, `jax.custom_jvp`) needs it to be of each example alone, too.
5. A linear operation of a sum gives a sum.
6. All other operations follow their labels: the operands must be sliced along the label of the rows.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from shrewjax._base.types import Leaf
from shrewjax._division import labels
from shrewjax._division.fission import in_two
from shrewjax._division.labels import Label
from shrewjax._division.rows import Rows, Shape
from shrewjax._programs import jaxprs
from shrewjax._programs.jaxprs import Atom, Equation, Jaxpr, is_variable, opened, shape_of

Var: TypeAlias = Atom  # one with a name


class WithoutRows(Enum):
    """The kinds that have no axis of examples."""

    SAME = "depends on no example"
    ZERO = "is zero"
    SUM = "is a sum over micro-batches"
    MIXED = "mixes examples"


SAME, ZERO, SUM, MIXED = WithoutRows
SHARED = SAME, ZERO
Kind: TypeAlias = Rows | WithoutRows
Slices: TypeAlias = Sequence[Rows | None]
"""What a micro-batch takes, or makes, of each value: a part of it, or None for the whole."""


def slices(kinds: Iterable[Kind]) -> list[Rows | None]:
    """Returns what a micro-batch takes of values of these kinds."""
    return [x if isinstance(x, Rows) else None for x in kinds]


class Fact(NamedTuple):
    """What is known of a value: its kind, and whether it depends on what is differentiated."""

    kind: Kind
    is_free: bool

    @property
    def may_be_sliced(self) -> bool:
        """Returns whether a micro-batch may have the whole value, or any slice of it."""
        return not self.is_free or self.kind in SHARED


@dataclasses.dataclass(eq=False)
class Step:
    """An equation of a program, and what was found of it.

    Attributes:
      calls: those around it, the outermost first.
      kinds: of its results.
      takes: the slices that a micro-batch takes of the operands, or None if all micro-batches do the same.
      programs: those inside of it.
      derivative: the programs of a derivative that a function brings.
      own_rows: of a lookup of each row's own elements, the column of the indices that numbers the rows.
      is_once: whether it runs once, before the loop, because its derivative needs the cotangent of the whole batch.
    """

    equation: Equation
    calls: tuple[Equation, ...] = ()
    kinds: Sequence[Kind] = ()
    takes: Slices | None = None
    programs: Sequence["Program"] = ()
    derivative: Sequence["Program"] = ()
    own_rows: int | None = None
    is_once: bool = False

    def found(self, kinds: Sequence[Kind], takes: Slices | None = None, **others: Any) -> "Step":
        """Returns the step itself, with what was found."""
        vars(self).update(others, kinds=kinds, takes=takes)
        return self

    @property
    def makes(self) -> Slices:
        """Returns the slices of the results that a micro-batch makes."""
        return slices(self.kinds)

    @property
    def only_prints(self) -> bool:
        """Returns whether it prints, and makes nothing."""
        return jaxprs.prints(self.equation) and not self.equation.outvars


class Program:
    """A jaxpr with the kinds of its values. `sets` are the sizes of the sets of examples.

    Inside a scan or a branch, every value counts as free (`is_inside`), because it runs in the loop over micro-batches.
    A derivative is not differentiated unless somebody asks for a second one, which is then analysed (`is_derivative`).
    """

    def __init__(
        self,
        jaxpr: Jaxpr,
        facts: Sequence[Fact],
        sets: tuple[int, ...],
        is_inside: bool = False,
        is_derivative: bool = False,
    ) -> None:
        self.sets, self._is_inside, self._is_derivative = sets, is_inside, is_derivative
        self.steps: list[Step] = []
        self.made_by: dict[Var, Step] = {}
        self.constants: dict[Var, Leaf] = {}
        self.arguments: list[Var] = [*opened(jaxpr).invars]
        self._facts: dict[Var, Fact] = dict(zip(self.arguments, facts, strict=True))
        self._smooth = {x for x in self.arguments if self._facts[x].is_free and is_inexact(x.aval)}
        self.results: list[Atom] = self._add(jaxpr, self.arguments, ())

    # Values.

    def fact(self, x: Atom) -> Fact:
        """Returns what is known of a value."""
        if is_variable(x):
            return self._facts[x]
        value = np.asarray(jaxprs.value_of_literal(x))
        is_zero = value.dtype.kind in "biufc" and not value.ndim and value == 0
        return Fact(ZERO if is_zero else SAME, is_free=False)

    def kind(self, x: Atom) -> Kind:
        """Returns the kind of a value."""
        return self.fact(x).kind

    def slice(self, x: Atom) -> Rows | None:
        """Returns what a micro-batch has of a value: its rows, or None for the whole."""
        return slices([self.kind(x)])[0]

    def is_mixed(self, x: Atom) -> bool:
        """Returns whether examples mix in a value."""
        return self.kind(x) is MIXED

    def is_divided(self, x: Atom) -> bool:
        """Returns whether a free value is rows or a sum, so that a loop over micro-batches can make it."""
        kind, is_free = self.fact(x)
        return is_free and (isinstance(kind, Rows) or kind is SUM)

    def is_free(self, step: Step) -> bool:
        """Returns whether what a step does depends on what is differentiated. Inside a loop, all does."""
        names = filter(is_variable, (*step.equation.invars, *step.equation.outvars))
        return self._is_inside or any(x in self._facts and self._facts[x].is_free for x in names)

    def constant(self, x: Atom, column: int | None = None) -> Leaf | None:
        """Returns what a value is in every call, or a column of its last axis. None if it depends on arguments."""
        value: Any = None
        step = self.made_by.get(x) if is_variable(x) else None
        if step is None:
            value = self.constants.get(x) if is_variable(x) else jaxprs.value_of_literal(x)
        elif column is not None and (part := labels.part_of_column(step.equation, column)):
            return self.constant(step.equation.invars[part[0]], part[1])
        elif compute := labels.by_numpy(step.equation):
            known = [*map(self.constant, step.equation.invars)]
            if all(y is not None for y in known):
                value = compute(*map(np.asarray, known))
        return value if value is None or column is None else value[..., column]

    def has_derivative(self, x: Atom) -> bool:
        """Returns whether a value may have a derivative. Behind `jax.lax.stop_gradient` it has none."""
        return is_variable(x) and x in self._smooth

    # Steps.

    def _add(
        self, jaxpr: Jaxpr, operands: Sequence[Atom], calls: tuple[Equation, ...]
    ) -> list[Atom]:
        """Adds the equations of a jaxpr, with those of its calls in their place. Returns its results."""
        known: dict[Var, Atom] = dict(zip(opened(jaxpr).invars, operands, strict=True))
        for x, value in zip(opened(jaxpr).constvars, jaxprs.constants_of(jaxpr), strict=True):
            known[x] = name = core.Var(x.aval)
            self._facts[name], self.constants[name] = Fact(SAME, is_free=False), value
        read = lambda x: known[x] if is_variable(x) else x  # noqa: E731
        for equation in jaxprs.one_by_one(opened(jaxpr).eqns):
            given = [*map(read, equation.invars)]
            made = [core.Var(x.aval) for x in equation.outvars]
            inner = jaxprs.jaxpr_of_jit(equation) or self._put(
                Step(equation.replace(invars=given, outvars=made), calls)
            )
            if inner is not None:
                made = self._add(inner, given, (*calls, equation))
            known.update(zip(equation.outvars, made, strict=True))
        return [*map(read, opened(jaxpr).outvars)]

    def _put(self, step: Step) -> Jaxpr | None:
        """Adds a step and returns None. Or returns a jaxpr to be added in its place, of which a part can be divided."""
        equation, is_free = step.equation, self.is_free(step)
        facts = [*map(self.fact, equation.invars)]
        # 1. Find its kinds. A loop or a checkpoint in which examples mix may be two, of which one mixes examples.
        found = self._found(step, facts) if is_free else self._found_of_data(step, facts)
        if found and step.programs and MIXED in (*step.kinds, *(x.kind for x in facts)):
            are_mixed = [x is MIXED for x in step.kinds]
            can_part = jaxprs.is_scan(equation) or jaxprs.is_checkpoint(equation)
            if can_part and (parts := in_two(equation, step.programs[0], are_mixed)):
                return parts
            found = None
        if found is None:
            step.found([MIXED] * len(equation.outvars), programs=())
        # 2. Record it.
        self._facts |= {
            x: Fact(y, is_free) for x, y in zip(equation.outvars, step.kinds, strict=True)
        }
        if any(map(self.has_derivative, equation.invars)) and not labels.stops_gradient(equation):
            self._smooth.update(x for x in equation.outvars if is_inexact(x.aval))
        self.made_by |= dict.fromkeys(equation.outvars, step)
        self.steps.append(step)
        return None

    def _found_of_data(self, step: Step, facts: list[Fact]) -> Step:
        """Finds kinds of data, which need no proof: those of its labels, or likely rows. SAME says nothing of data."""
        shapes = [shape_of(x.aval) for x in step.equation.outvars]
        if not any(isinstance(x.kind, Rows) for x in facts):
            return step.found([SAME] * len(shapes))
        found = self._found(step, facts)
        is_right = found and not {SUM, MIXED} & {*step.kinds}
        return step if is_right else step.found([*map(self._likely, shapes)], programs=())

    def _likely(self, shape: Shape) -> Kind:
        """Returns the rows that data of this shape probably has."""
        pairs = [(d, n, s) for d, n in enumerate(shape) for s in self.sets if n and n % s == 0]
        exact = [(d, n, s) for d, n, s in pairs if n == s]
        return next((Rows(d, (s,)) for d, _, s in exact + pairs), SAME)

    def _found(self, step: Step, facts: list[Fact]) -> Step | None:
        """Finds the kinds of an equation's results. Returns the step, or None if examples mix, or may mix."""
        # The first test that applies decides: programs inside, mixed operands, none of examples, results that are
        # operands, sums, of which only a linear operation is known, and labels.
        equation, kinds = step.equation, [x.kind for x in facts]
        count = len(equation.outvars)
        nested = self._nested(equation)
        if nested is not None:
            return nested(step, facts)
        if MIXED in kinds:
            return None
        if all(x in SHARED for x in kinds):
            is_zero = kinds and SAME not in kinds and labels.is_additive(equation)
            return step.found([ZERO if is_zero else SAME] * count)
        if labels.returns_operands(equation) or not count:
            return step.found(kinds[:count], slices(kinds))
        if any(x.is_free and x.kind is SUM for x in facts):
            are_known = all(x.may_be_sliced or x.kind is SUM for x in facts)
            is_sum = are_known and labels.is_linear(
                equation, [x is SUM for x in kinds], [x is ZERO for x in kinds]
            )
            return step.found([SUM] * count, [None] * len(kinds)) if is_sum else None
        return self._by_labels(step, facts)

    def _by_labels(self, step: Step, facts: list[Fact]) -> Step | None:
        # 1. Find the axis of examples. Operands that are proven rows lead, because they must be sliced so.
        equation = step.equation
        proven = [at for at, x in enumerate(facts) if not x.may_be_sliced]
        at = (proven or [at for at, x in enumerate(facts) if isinstance(x.kind, Rows)])[0]
        rows: Any = facts[at].kind
        ins, outs = labels.shapes_of(equation)
        if labels.is_reshape(equation):
            made = rows.reshaped(ins[0], outs[0])
            return made and step.found([made], [rows])
        if labels.is_of_each_example(equation):
            return self._of_each_example(step, facts)
        its = labels.labels_of(equation)
        label = its and its.ins[at][rows.axis]
        if its is None or label is None:
            return self._by_own_rows(step, facts) or _by_blocks(step, facts, at)
        # 2. Slice each operand along its label.
        takes = along(label, rows.sets, its.ins, ins)
        if takes is None or any(takes[i] != facts[i].kind for i in proven):
            return None
        # 3. Results that lack it are sums, or cannot be divided.
        is_sum = label in its.summed and labels.sums_from_zero(equation, facts[0].kind is ZERO)
        lost = SUM if is_sum else MIXED
        return step.found([x or lost for x in _along(label, rows.sets, its.outs)], takes)

    def _by_own_rows(self, step: Step, facts: list[Fact]) -> Step | None:
        """`x[jnp.arange(B), labels]`: each row is asked for its own elements.

        The indices have shape (B, 2). Their column 0 is known, and along dimension 0 it is 0, 1, 2 and so on. So that
        dimension numbers the rows of x.
        """
        rows: Any = facts[0].kind
        found = isinstance(rows, Rows) and labels.of_own_rows(step.equation, rows.axis)
        if not found:
            return None
        column, its = found
        numbers: Any = self.constant(step.equation.invars[1], column)
        size = shape_of(step.equation.invars[0].aval)[rows.axis]
        for d, n in enumerate(np.shape(numbers)):
            is_shared = its.ins[1][d] in its.ins[0]  # by another dimension of the operand
            if n == size and not is_shared and np.all(np.moveaxis(numbers, d, -1) == np.arange(n)):
                takes = [rows, *_along(its.ins[1][d], rows.sets, its.ins[1:])]
                makes = [x or rows for x in _along(its.ins[1][d], rows.sets, its.outs)]
                if all(x.may_be_sliced or x.kind == y for x, y in zip(facts, takes, strict=True)):
                    return step.found(makes, takes, own_rows=column)
        return None

    def _of_each_example(self, step: Step, facts: list[Fact]) -> Step | None:
        """The results of `of_each_example` are rows along the first axis."""
        ins, outs = labels.shapes_of(step.equation)
        rows = {x.kind for x in facts if isinstance(x.kind, Rows)}
        if len(rows) != 1 or not {x.kind for x in facts if not x.may_be_sliced} <= rows:
            return None
        (its,) = rows
        if its.axis or not all(map(its.fits, outs)):
            raise ValueError(
                f"of_each_example must return a row for each of {its.sets[0]} examples, got shapes {outs}"
            )
        # Data with as many rows is divided, too, if it depends on shapes alone. Otherwise nobody knows what it holds.
        takes = slices(x.kind for x in facts)
        count = next(shape[0] for x, shape in zip(takes, ins, strict=True) if x)
        for at, x in enumerate(step.equation.invars):
            is_param = facts[at].is_free and not self._is_inside
            if takes[at] is not None or is_param or ins[at][:1] != (count,):
                continue
            if not self.is_made_of_nothing(x):
                raise ValueError(
                    f"of_each_example cannot tell whether the array of shape {ins[at]} holds examples. If so, pass it "
                    "in batch_argnums=. Otherwise pass x[None]"
                )
            takes[at] = its
        return step.found([its] * len(outs), takes)

    def is_made_of_nothing(self, x: Atom) -> bool:
        """Returns whether a value depends on shapes alone, such as `jnp.arange(B)`."""
        if not is_variable(x):
            return True
        step = self.made_by.get(x)
        return step is not None and all(map(self.is_made_of_nothing, step.equation.invars))

    # Equations with programs inside.

    def _nested(self, equation: Equation) -> Callable[[Step, list[Fact]], Step | None] | None:
        finds: list[tuple[Any, Callable[[Step, list[Fact]], Step | None]]] = [
            (jaxprs.is_scan(equation), self._scan),
            (jaxprs.branches_of(equation), self._cond),
            (jaxprs.while_of(equation), self._while),
            (jaxprs.is_checkpoint(equation), self._checkpoint),
            (jaxprs.linear_solve_of(equation), self._linear_solve),
            (jaxprs.brings_derivative(equation), self._custom),
        ]
        return next((find for is_it, find in finds if is_it), None)

    def body(
        self, jaxpr: Jaxpr, kinds: Sequence[Kind], *, is_derivative: bool = False
    ) -> "Program":
        """Returns the program of a body, for operands of these kinds."""
        facts = [Fact(kind, is_free=True) for kind in kinds]
        return Program(jaxpr, facts, self.sets, True, is_derivative or self._is_derivative)

    def kinds_of(self, atoms: Iterable[Atom]) -> list[Kind]:
        """Returns the kinds of values."""
        return [*map(self.kind, atoms)]

    def _checkpoint(self, step: Step, facts: list[Fact]) -> Step:
        kinds = [x.kind for x in facts]
        body = self.body(jaxprs.jaxpr_of_call(step.equation), kinds)
        return step.found(body.kinds_of(body.results), slices(kinds), programs=[body])

    def _scan(self, step: Step, facts: list[Fact]) -> Step | None:
        scan, kinds = jaxprs.scan_of(step.equation), [x.kind for x in facts]
        if scan is None:
            return None
        n, first = scan.constants, scan.constants + scan.carries
        constants, start, stacks = kinds[:n], kinds[n:first], kinds[first:]
        if any(isinstance(x, Rows) and x.axis == 0 for x in stacks):
            return self._scan_of_examples(step, scan, kinds[:first], stacks)
        inside = [_moved(x, -1) for x in stacks]
        carry, body = self._until_kept(scan.body, constants, start, inside)
        stacked = [_moved(x, 1) for x in body.kinds_of(body.results[scan.carries :])]
        takes = slices([*constants, *carry, *stacks])
        return step.found([*carry, *stacked], takes, programs=[body])

    def _scan_of_examples(
        self, step: Step, scan: jaxprs.Scan, others: list[Kind], stacks: list[Kind]
    ) -> Step | None:
        """`jax.lax.map`: what it computes of one example stands for this example alone."""
        rows: set[Any] = {x for x in stacks if x not in SHARED}
        if scan.carries or len(rows) != 1 or not {*others} <= {*SHARED}:
            return None
        made = [*rows] * len(scan.body.out_avals)
        return step.found(made, [None] * len(others) + [*rows] * len(stacks))

    def _until_kept(
        self, jaxpr: Jaxpr, constants: list[Kind], carry: list[Kind], stacks: list[Kind]
    ) -> tuple[list[Kind], "Program"]:
        """Returns the kinds of a carry that a body keeps, and the body."""
        while True:
            body = self.body(jaxpr, [*constants, *carry, *stacks])
            made = body.kinds_of(body.results[: len(carry)])
            new = [*map(either, carry, made)]
            if new == carry:
                return carry, body
            carry = new

    def _cond(self, step: Step, facts: list[Fact]) -> Step | None:
        kinds = [x.kind for x in facts]
        if not facts[0].may_be_sliced or MIXED in kinds:
            return None
        bodies = [self.body(x, kinds[1:]) for x in jaxprs.branches_of(step.equation)]
        made = zip(*(x.kinds_of(x.results) for x in bodies), strict=True)
        takes = [None, *slices(kinds[1:])]
        return step.found([functools.reduce(either, x) for x in made], takes, programs=bodies)

    def _while(self, step: Step, facts: list[Fact]) -> Step | None:
        loop, kinds = jaxprs.while_of(step.equation), [x.kind for x in facts]
        if loop is None or MIXED in kinds:
            return None
        n, m = loop.of_condition, loop.of_condition + loop.of_body
        new = kinds[m:]
        while True:
            # 1. The kinds that the body keeps, and that of the condition.
            carry, body = self._until_kept(loop.body, kinds[n:m], new, [])
            goes_on = self.body(loop.condition, [*kinds[:n], *carry])
            of_condition = goes_on.kind(goes_on.results[0])
            # 2. A condition of rows goes on for each row alone, so that all which it carries are rows. Look again.
            new = [of_condition if x in SHARED else x for x in carry]
            if not isinstance(of_condition, Rows) or new == carry:
                break
        # 3. The condition must be the same for all, or of the rows that are carried.
        if of_condition not in SHARED and {*carry} != {of_condition}:
            return None
        return step.found(carry, slices([*kinds[:m], *carry]), programs=[goes_on, body])

    def _linear_solve(self, step: Step, facts: list[Fact]) -> Step | None:
        """Each function must make rows of rows, as of systems of equations that are solved one for each example."""
        solve, kinds = jaxprs.linear_solve_of(step.equation), [x.kind for x in facts]
        rows: set[Any] = {x for x in kinds if x not in SHARED}
        if solve is None or len(rows) > 1 or not all(isinstance(x, Rows) for x in rows):
            return None
        rows = rows or {SAME}
        right, start, programs = [*rows] * len(step.equation.outvars), 0, []
        for name, function in solve.functions.items():
            constants = kinds[start : start + solve.constants[name]]
            start += len(constants)
            if function is not None:
                programs.append(self.body(function, [*constants, *right]))
        if any(x.kinds_of(x.results) != right for x in programs):
            return None
        return step.found(right, slices([*kinds[:start], *right]), programs=programs)

    # Functions that bring their derivative.

    def _custom(self, step: Step, facts: list[Fact]) -> Step | None:
        kinds = [x.kind for x in facts]
        if MIXED in kinds:
            return None
        body = self.body(jaxprs.jaxpr_of_call(step.equation), kinds)
        made = body.kinds_of(body.results)
        # 1. Nobody differentiates it, so it is a function like others.
        if self._is_derivative or not any(x.is_free for x in facts):
            return step.found(made, slices(kinds), programs=[body])
        # 2. It must not close over what is free. JAX raises for that.
        closed_over = facts[: jaxprs.count_closed_over(step.equation)]
        is_error = not self._is_inside and any(x.is_free for x in closed_over)
        if MIXED in made or is_error:
            return None
        # 3. Its derivative must be of each example alone, too.
        its_kinds, derivative = self.derivative(step.equation, kinds, made)
        if derivative:
            body = self.body(jaxprs.jaxpr_of_call(step.equation), its_kinds)
            return step.found(made, slices(its_kinds), programs=[body], derivative=derivative)
        # 4. Otherwise it may run once, if it reads parameters alone.
        is_once = not self._is_inside and {*kinds} <= {*SHARED}
        return step.found(made, programs=[body], is_once=True) if is_once else None

    def derivative(
        self, equation: Equation, kinds: list[Kind], made: list[Kind]
    ) -> tuple[list[Kind], list["Program"]]:
        """Returns the kinds of the operands, and the programs of a derivative. There are none if it mixes examples."""
        smooth, results = smooth_of(equation)
        # 1. A custom_jvp: tangents must have the kinds of the results.
        if jaxprs.is_custom_jvp(equation):
            jaxpr = jaxprs.tangent_program(equation, smooth, results)
            program = self.body(jaxpr, [*kinds, *(kinds[i] for i in smooth)], is_derivative=True)
            wanted = [*made, *(made[i] for i in results)]
            is_right = all(map(_stands_for, program.kinds_of(program.results), wanted))
            return kinds, [program] if is_right else []
        # 2. A custom_vjp: the cotangents of the results have dual kinds. Find those of the gradients until they stay.
        forward, backward = jaxprs.cotangent_programs(equation, smooth, results)
        of_results = [_dual(made[i]) for i in results]
        while True:
            first = self.body(forward, kinds, is_derivative=True)
            residuals = first.kinds_of(first.results[len(made) :])
            second = self.body(backward, [*residuals, *of_results], is_derivative=True)
            gradients = dict(zip(smooth, second.kinds_of(second.results), strict=True))
            # A constant with an axis of examples, such as zeros, is sliced, because its gradient is.
            new = [
                gradients[i] if x in SHARED and isinstance(gradients.get(i), Rows) else x
                for i, x in enumerate(kinds)
            ]
            if new == kinds:
                break
            kinds = new
        # 3. Gradients must have the dual kinds of the operands.
        is_right = all(_stands_for(x, _dual(kinds[i])) for i, x in gradients.items())
        return kinds, [first, second] if is_right else []


def _by_blocks(step: Step, facts: list[Fact], at: int) -> Step | None:
    """Batches one after the other on one axis, as of chosen and rejected answers: joined, or taken apart.

    With `x` of B rows, `concatenate([x, zeros of 2 B])` has the blocks B, B, B.
    """
    rows: Any = facts[at].kind
    axis, sets = rows
    ins, _ = labels.shapes_of(step.equation)
    neighbours = ins[at][axis] // sum(sets)

    def blocks(fact: Fact, shape: Shape) -> Sequence[int] | None:
        size = shape[axis] if axis < len(shape) else -1
        if isinstance(fact.kind, Rows) and fact.kind.axis == axis:
            return fact.kind.sets if size == sum(fact.kind.sets) * neighbours else None
        count, rest = divmod(size, sets[0] * neighbours)
        return sets[:1] * count if fact.may_be_sliced and not rest else None

    given = [*map(blocks, facts, ins)]
    known = [x for x in given if x is not None]
    made = len(known) == len(given) and labels.blocks_after(step.equation, axis, known, neighbours)
    if not made or not all(made):
        return None
    of = lambda each: [Rows(axis, tuple(x)) for x in each]  # noqa: E731
    return step.found(of(made), of(known))


def along(
    label: Label, sets: tuple[int, ...], dims: Sequence[labels.Dims], shapes: Sequence[Shape]
) -> Slices | None:
    """Returns the slices of values along a label, or None if an axis does not hold these sets."""
    found = _along(label, sets, dims)
    pairs = zip(found, shapes, strict=True)
    return found if all(x is None or x.fits(shape) for x, shape in pairs) else None


def _along(label: Label, sets: tuple[int, ...], dims: Sequence[labels.Dims]) -> Slices:
    return [Rows([*x].index(label), sets) if label in x else None for x in dims]


def _moved(kind: Kind, by: int) -> Kind:
    return kind._replace(axis=kind.axis + by) if isinstance(kind, Rows) else kind


def either(x: Kind, y: Kind) -> Kind:
    """Returns the kind of a value that is one or the other.

    SAME stands for rows, too, because any slice of it is right. ZERO also stands for a sum. All other pairs are MIXED.
    """
    if x == y:
        return x
    others = {x, y}.difference(SHARED)
    if not others:
        return SAME
    (other, *more) = others
    return other if not more and (isinstance(other, Rows) or SAME not in (x, y)) else MIXED


def _dual(kind: Kind) -> Kind:
    """Returns the kind of a cotangent. Micro-batches add to that of a shared value, and share that of a sum."""
    if isinstance(kind, Rows):
        return kind
    return {SAME: SUM, ZERO: SUM, SUM: SAME}.get(kind, kind)


def _stands_for(kind: Kind, wanted: Kind) -> bool:
    """Returns whether a tangent, or a cotangent, has a kind, or can be sliced so."""
    return kind in (wanted, ZERO) or (kind is SAME and isinstance(wanted, Rows))


def is_inexact(aval: Any) -> bool:
    """Returns whether values of a type may have derivatives."""
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)


def smooth_of(equation: Equation) -> tuple[list[int], list[int]]:
    """Returns which operands and which results have derivatives."""
    sides = equation.invars, equation.outvars
    smooth, results = ([i for i, x in enumerate(y) if is_inexact(x.aval)] for y in sides)
    return [i for i in smooth if i >= jaxprs.count_closed_over(equation)], results


def made_by(steps: Sequence[Step]) -> list[Var]:
    """Returns the names of what steps make."""
    return [x for step in steps for x in step.equation.outvars]
