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
from collections.abc import Iterable, Sequence
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
Kinds: TypeAlias = list[Kind]
Calls: TypeAlias = tuple[Equation, ...]
Slices: TypeAlias = Sequence[Rows | None]
"""What a micro-batch takes, or makes, of each value: a part of it, or None for the whole."""


def slices(kinds: Iterable[Kind]) -> list[Rows | None]:
    """Returns what a micro-batch takes of values of these kinds."""
    return [x if isinstance(x, Rows) else None for x in kinds]


class Fact(NamedTuple):
    """Facts about a value.

    Attributes:
      kind: its kind.
      is_free: whether it depends on what is differentiated.
      is_smooth: whether it may have a derivative. Behind `jax.lax.stop_gradient` it has none.
    """

    kind: Kind
    is_free: bool
    is_smooth: bool = False

    @property
    def may_be_sliced(self) -> bool:
        """Returns whether a micro-batch may have the whole value, or any slice of it."""
        return not self.is_free or self.kind in SHARED


@dataclasses.dataclass(eq=False)
class Step:
    """An equation of a program, and what was found of it.

    Attributes:
      kinds: of its results.
      takes: the slices that a micro-batch takes of the operands, or None if all micro-batches do the same.
      programs: those inside of it.
      derivative: the programs of a derivative that a function brings.
      is_once: whether it runs once, before the loop, because its derivative needs the cotangent of the whole batch.
      is_free: whether what it does depends on what is differentiated. Inside a loop, all does.
      calls: the equations of the calls around it, the outermost first.
    """

    equation: Equation
    kinds: Sequence[Kind]
    takes: Slices | None = None
    programs: Sequence["Program"] = ()
    derivative: Sequence["Program"] = ()
    is_once: bool = False
    is_free: bool = True
    calls: Calls = ()

    @property
    def makes(self) -> Slices:
        """Returns the slices of the results that a micro-batch makes."""
        return slices(self.kinds)

    @property
    def mixes(self) -> bool:
        """Returns whether examples mix in a result."""
        return MIXED in self.kinds

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
        self.step_of: dict[Var, Step] = {}
        self.constants: dict[Var, Leaf] = {}
        self.arguments: list[Var] = [*opened(jaxpr).invars]
        self._facts: dict[Var, Fact] = {}
        for x, (kind, is_free, _) in zip(self.arguments, facts, strict=True):
            self._facts[x] = Fact(kind, is_free, is_free and is_inexact(x.aval))
        self.results: list[Atom] = self._add(jaxpr, self.arguments, ())
        self.result_kinds: Kinds = self.kinds_of(self.results)

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

    def kinds_of(self, atoms: Iterable[Atom]) -> Kinds:
        """Returns the kinds of values."""
        return [*map(self.kind, atoms)]

    def slice(self, x: Atom) -> Rows | None:
        """Returns what a micro-batch has of a value: its rows, or None for the whole."""
        return slices([self.kind(x)])[0]

    def is_divided(self, x: Atom) -> bool:
        """Returns whether a free value is rows or a sum, so that a loop over micro-batches can make it."""
        kind, is_free, _ = self.fact(x)
        return is_free and (isinstance(kind, Rows) or kind is SUM)

    def has_derivative(self, x: Atom) -> bool:
        """Returns whether a value may have a derivative."""
        return self.fact(x).is_smooth

    def constant(self, x: Atom) -> Leaf | None:
        """Returns what a value is in every call, or None if it depends on arguments."""
        if not is_variable(x):
            return jaxprs.value_of_literal(x)
        if x in self.step_of:
            return labels.by_numpy(self.step_of[x].equation, self.constant)
        return self.constants.get(x)

    def constant_column(self, x: Atom, column: int) -> Leaf | None:
        """Returns what a column of the last axis is in every call. Others may depend on arguments."""
        step = self.step_of.get(x) if is_variable(x) else None
        if step and (columns := labels.columns_of(step.equation)):
            return self.constant_column(*columns[column])
        value = self.constant(x)
        return None if value is None else np.asarray(value)[..., column]

    # Steps.

    def _add(self, jaxpr: Jaxpr, operands: Sequence[Atom], calls: Calls) -> list[Atom]:
        """Adds the equations of a jaxpr, with those of its calls in their place. Returns its results."""
        known: dict[Var, Atom] = dict(zip(opened(jaxpr).invars, operands, strict=True))
        names, values = opened(jaxpr).constvars, jaxprs.constants_of(jaxpr)
        for x, value in zip(names, values, strict=True):
            known[x] = name = core.Var(x.aval)
            self._facts[name], self.constants[name] = Fact(SAME, is_free=False), value
        read = lambda x: known[x] if is_variable(x) else x  # noqa: E731
        for equation in jaxprs.one_by_one(opened(jaxpr).eqns):
            given = [*map(read, equation.invars)]
            made = [core.Var(x.aval) for x in equation.outvars]
            inner = jaxprs.jaxpr_of_jit(equation)
            if inner is None:
                inner = self._put(equation.replace(invars=given, outvars=made), calls)
            # The equations of a call, or of a loop in two halves, come in its place.
            if inner is not None:
                made = self._add(inner, given, (*calls, equation))
            known.update(zip(equation.outvars, made, strict=True))
        return [*map(read, opened(jaxpr).outvars)]

    def _put(self, equation: Equation, calls: Calls) -> Jaxpr | None:
        """Adds a step. If only a part of it can be divided, adds nothing, and returns the jaxpr of two halves."""
        facts = [*map(self.fact, equation.invars)]
        is_free = self._is_inside or any(x.is_free for x in facts)
        # 1. Find its kinds. A loop or a checkpoint that mixes some results is cut in two (`in_two`). All else that
        # mixes is MIXED in all results.
        find = self._found if is_free else self._found_of_data
        step = find(equation, facts)
        if step and step.programs and MIXED in (*step.kinds, *(x.kind for x in facts)):
            parts = in_two(equation, step.programs[0], [x is MIXED for x in step.kinds])
            if parts is not None:
                return parts
            step = None
        step = step or Step(equation, [MIXED] * len(equation.outvars))
        # 2. Record it.
        step.is_free, step.calls = is_free, calls
        self.steps.append(step)
        stops = labels.stops_gradient(equation)
        is_smooth = not stops and any(x.is_smooth for x in facts)
        for x, kind in zip(equation.outvars, step.kinds, strict=True):
            self._facts[x] = Fact(kind, is_free, is_smooth and is_inexact(x.aval))
            self.step_of[x] = step
        return None

    def _found_of_data(self, equation: Equation, facts: list[Fact]) -> Step:
        """Finds kinds of data, which need no proof: those of its labels, or likely rows. SAME says nothing of data."""
        if not any(isinstance(x.kind, Rows) for x in facts):
            return Step(equation, [SAME] * len(equation.outvars))
        step = self._found(equation, facts)
        # A sum of data, such as of a mask, is known whole before the loop. So it is SAME, or likely rows, and never
        # SUM.
        if step and not {SUM, MIXED} & {*step.kinds}:
            return step
        _, outs = labels.shapes_of(equation)
        return Step(equation, [*map(self._likely, outs)])

    def _likely(self, shape: Shape) -> Kind:
        """Returns the rows that data of this shape probably has."""
        found = [Rows(d, (s,)) for d in range(len(shape)) for s in self.sets]
        multiples = [x for x in found if shape[x.axis] and x.fits(shape)]
        exact = [x for x in multiples if shape[x.axis] == x.sets[0]]
        return next(iter(exact + multiples), SAME)

    def _found(self, equation: Equation, facts: list[Fact]) -> Step | None:
        """Finds the kinds of an equation's results. Returns the step, or None if examples mix, or may mix.

        The first test that applies decides.
        """
        kinds = [x.kind for x in facts]
        # 1. A scan or a checkpoint, of which a part can be divided even if some operands are mixed.
        if jaxprs.scan_of(equation):
            return self._scan(equation, kinds)
        if jaxprs.is_checkpoint(equation):
            return self._checkpoint(equation, kinds)
        if MIXED in kinds:
            return None
        # 2. Others with programs inside.
        for is_it, find in (
            (jaxprs.branches_of, self._cond),
            (jaxprs.while_of, self._while),
            (jaxprs.linear_solve_of, self._linear_solve),
            (jaxprs.brings_derivative, self._custom),
        ):
            if is_it(equation):
                return find(equation, facts)
        # 3. All else.
        return self._of_operation(equation, facts)

    def _of_operation(self, equation: Equation, facts: list[Fact]) -> Step | None:
        """Finds the kinds of an operation without programs inside, as `_found` does."""
        kinds, count = [x.kind for x in facts], len(equation.outvars)
        # 1. Operands that depend on no example.
        if all(x in SHARED for x in kinds):
            is_zero = kinds and SAME not in kinds and labels.is_additive(equation)
            return Step(equation, [ZERO if is_zero else SAME] * count)
        # 2. Results that are operands.
        if labels.returns_operands(equation) or not count:
            return Step(equation, kinds[:count], slices(kinds))
        # 3. Sums. A linear operation gives a sum, and after any other one examples mix.
        if any(x.is_free and x.kind is SUM for x in facts):
            are_whole = all(x.may_be_sliced or x.kind is SUM for x in facts)
            are_sums, are_zeros = ([x is kind for x in kinds] for kind in (SUM, ZERO))
            if not are_whole or not labels.is_linear(equation, are_sums, are_zeros):
                return None
            return Step(equation, [SUM] * count, [None] * len(kinds))
        # 4. Rows.
        return self._by_labels(equation, facts)

    def _by_labels(self, equation: Equation, facts: list[Fact]) -> Step | None:
        """Finds the kinds of an operation on rows: reshapes, `of_each_example`, labels, own rows, and blocks."""
        # 1. Find the axis of examples. Operands that are proven rows lead, because they must be sliced so.
        proven = [at for at, x in enumerate(facts) if not x.may_be_sliced]
        of_rows = [at for at, x in enumerate(facts) if isinstance(x.kind, Rows)]
        lead = (proven or of_rows)[0]
        rows: Any = facts[lead].kind
        ins, outs = labels.shapes_of(equation)
        if labels.is_reshape(equation):
            made = rows.reshaped(ins[0], outs[0])
            return made and Step(equation, [made], [rows])
        if labels.is_of_each_example(equation):
            return self._of_each_example(equation, facts)
        its = labels.labels_of(equation)
        label = its and its.ins[lead][rows.axis]
        if its is None or label is None:
            own_rows = self._by_own_rows(equation, facts)
            return own_rows or _by_blocks(equation, facts, lead)
        # 2. Slice each operand along its label.
        takes = along(label, rows.sets, its.ins)
        if any(takes[i] != facts[i].kind for i in proven):
            return None
        # 3. Results that lack it are sums, or cannot be divided.
        from_zero = labels.sums_from_zero(equation, facts[0].kind is ZERO)
        lost = SUM if label in its.summed and from_zero else MIXED
        makes = [x or lost for x in along(label, rows.sets, its.outs)]
        return Step(equation, makes, takes)

    def _by_own_rows(self, equation: Equation, facts: list[Fact]) -> Step | None:
        """`x[jnp.arange(B), labels]`: each row is asked for its own elements.

        The indices have shape (B, 2). Their column 0 is known, and along dimension 0 it is 0, 1, 2 and so on. So that
        dimension numbers the rows of x.
        """
        rows: Any = facts[0].kind
        found = isinstance(rows, Rows) and labels.of_own_rows(equation, rows.axis)
        if not found:
            return None
        column, its = found
        values: Any = self.constant_column(equation.invars[1], column)
        size = shape_of(equation.invars[0].aval)[rows.axis]
        # Find the dimension of the indices along which this column counts the rows.
        for d, n in enumerate(np.shape(values)):
            label = its.ins[1][d]
            counts = n == size and np.all(np.moveaxis(values, d, -1) == np.arange(n))
            # The operand may have this label elsewhere.
            if not counts or label in its.ins[0]:
                continue
            takes = [rows, *along(label, rows.sets, its.ins[1:])]
            pairs = zip(facts, takes, strict=True)
            if all(x.may_be_sliced or x.kind == y for x, y in pairs):
                makes = [x or rows for x in along(label, rows.sets, its.outs)]
                return Step(equation, makes, takes)
        return None

    def _of_each_example(self, equation: Equation, facts: list[Fact]) -> Step | None:
        """The results of `of_each_example` are rows along the first axis."""
        ins, outs = labels.shapes_of(equation)
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
        for at, x in enumerate(equation.invars):
            # A parameter stays whole, even with as many rows.
            is_param = facts[at].is_free and not self._is_inside
            if takes[at] is not None or is_param or ins[at][:1] != (count,):
                continue
            if not self.is_made_of_nothing(x):
                raise ValueError(
                    f"of_each_example cannot tell whether the array of shape {ins[at]} holds examples. If so, pass it "
                    "in batch_argnums=. Otherwise pass x[None]"
                )
            takes[at] = its
        return Step(equation, [its] * len(outs), takes)

    def is_made_of_nothing(self, x: Atom) -> bool:
        """Returns whether a value depends on shapes alone, such as `jnp.arange(B)`."""
        if not is_variable(x):
            return True
        step = self.step_of.get(x)
        if step is None:
            return False
        return all(map(self.is_made_of_nothing, step.equation.invars))

    # Equations with programs inside.

    def body(self, jaxpr: Jaxpr, kinds: Kinds, derives: bool = False) -> "Program":
        """Returns the program of a body, or of a derivative, for operands of these kinds."""
        facts = [Fact(kind, is_free=True) for kind in kinds]
        return Program(jaxpr, facts, self.sets, True, derives or self._is_derivative)

    def _checkpoint(self, equation: Equation, kinds: Kinds) -> Step:
        body = self.body(jaxprs.jaxpr_of_call(equation), kinds)
        return Step(equation, body.result_kinds, slices(kinds), [body])

    def _scan(self, equation: Equation, kinds: Kinds) -> Step | None:
        scan: Any = jaxprs.scan_of(equation)
        n, first = scan.constants, scan.constants + scan.carries
        stacks = kinds[first:]
        # 1. A scan over examples without a carry, as of `jax.lax.map`. Each trip is one example, so results are rows.
        if any(isinstance(x, Rows) and x.axis == 0 for x in stacks):
            rows: set[Any] = {x for x in stacks if x not in SHARED}
            if scan.carries or len(rows) != 1 or not {*kinds[:n]} <= {*SHARED}:
                return None
            takes = [None] * n + [*rows] * len(stacks)
            return Step(equation, [*rows] * len(equation.outvars), takes)
        # 2. Others: the axis of examples is one less in a slice of a stack.
        inside = [_moved(x, -1) for x in stacks]
        carry, body = self._until_kept(scan.body, kinds[:n], kinds[n:first], inside)
        stacked = [_moved(x, 1) for x in body.result_kinds[scan.carries :]]
        takes = slices([*kinds[:n], *carry, *stacks])
        return Step(equation, [*carry, *stacked], takes, [body])

    def _until_kept(
        self, jaxpr: Jaxpr, constants: Kinds, carry: Kinds, stacks: Kinds
    ) -> tuple[Kinds, "Program"]:
        """Returns the kinds of a carry that a body keeps, and the body."""
        while True:
            body = self.body(jaxpr, [*constants, *carry, *stacks])
            new = [*map(either, carry, body.result_kinds[: len(carry)])]
            if new == carry:
                return carry, body
            carry = new

    def _cond(self, equation: Equation, facts: list[Fact]) -> Step | None:
        if not facts[0].may_be_sliced:
            return None
        kinds = [x.kind for x in facts[1:]]
        bodies = [self.body(x, kinds) for x in jaxprs.branches_of(equation)]
        by_branch = [x.result_kinds for x in bodies]
        made = [functools.reduce(either, x) for x in zip(*by_branch, strict=True)]
        return Step(equation, made, [None, *slices(kinds)], bodies)

    def _while(self, equation: Equation, facts: list[Fact]) -> Step | None:
        loop: Any = jaxprs.while_of(equation)
        kinds = [x.kind for x in facts]
        n, m = loop.of_condition, loop.of_condition + loop.of_body
        carry = kinds[m:]
        while True:
            # 1. The kinds that the body keeps, and that of the condition.
            carry, body = self._until_kept(loop.body, kinds[n:m], carry, [])
            goes_on = self.body(loop.condition, [*kinds[:n], *carry])
            of_condition = goes_on.result_kinds[0]
            takes = slices([*kinds[:m], *carry])
            # 2. The condition must be the same for all, or of the rows that are carried.
            if of_condition in SHARED or {*carry} == {of_condition}:
                return Step(equation, carry, takes, [goes_on, body])
            # 3. If each row decides when it stops, all that is carried must be rows. Look again with these.
            new = [of_condition if x in SHARED else x for x in carry]
            if not isinstance(of_condition, Rows) or new == carry:
                return None
            carry = new

    def _linear_solve(self, equation: Equation, facts: list[Fact]) -> Step | None:
        """Each function must make rows of rows, as of systems of equations that are solved one for each example."""
        solve: Any = jaxprs.linear_solve_of(equation)
        kinds = [x.kind for x in facts]
        rows: set[Any] = {x for x in kinds if x not in SHARED} or {SAME}
        if len(rows) > 1 or SUM in rows:
            return None
        solution_kinds, start, programs = [*rows] * len(equation.outvars), 0, []
        for name, function in solve.functions.items():
            constants = kinds[start : start + solve.constants[name]]
            start += len(constants)
            if function is not None:
                programs.append(self.body(function, [*constants, *solution_kinds]))
        if any(x.result_kinds != solution_kinds for x in programs):
            return None
        takes = slices([*kinds[:start], *solution_kinds])
        return Step(equation, solution_kinds, takes, programs)

    # Functions that bring their derivative.

    def _custom(self, equation: Equation, facts: list[Fact]) -> Step | None:
        kinds = [x.kind for x in facts]
        body = self.body(jaxprs.jaxpr_of_call(equation), kinds)
        made = body.result_kinds
        # 1. Nobody differentiates it, so it is a function like others.
        if self._is_derivative or not any(x.is_free for x in facts):
            return Step(equation, made, slices(kinds), [body])
        # 2. It must not close over what is free. JAX raises for that.
        closed_over = facts[: jaxprs.count_closed_over(equation)]
        is_error = not self._is_inside and any(x.is_free for x in closed_over)
        if MIXED in made or is_error:
            return None
        # 3. Its derivative must be of each example alone, too.
        its_kinds, derivative = self.derivative(equation, kinds, made)
        if derivative:
            body = self.body(jaxprs.jaxpr_of_call(equation), its_kinds)
            return Step(equation, made, slices(its_kinds), [body], derivative)
        # 4. Otherwise it may run once, if it reads parameters alone.
        is_once = not self._is_inside and {*kinds} <= {*SHARED}
        return Step(equation, made, programs=[body], is_once=True) if is_once else None

    def derivative(
        self, equation: Equation, kinds: Kinds, made: Kinds
    ) -> tuple[Kinds, list["Program"]]:
        """Returns the kinds of the operands, and the programs of a derivative. There are none if it mixes examples."""
        smooth, results = smooth_of(equation)
        # 1. A custom_jvp: tangents must have the kinds of the results.
        if jaxprs.is_custom_jvp(equation):
            jaxpr = jaxprs.tangent_program(equation, smooth, results)
            tangents = [kinds[i] for i in smooth]
            program = self.body(jaxpr, [*kinds, *tangents], derives=True)
            wanted = [*made, *(made[i] for i in results)]
            is_right = all(map(_stands_for, program.result_kinds, wanted))
            return kinds, [program] if is_right else []
        # 2. A custom_vjp: cotangents of results have dual kinds (`_dual`). Repeat, because a constant operand that is
        # sliced changes what the programs make.
        forward, backward = jaxprs.cotangent_programs(equation, smooth, results)
        cotangents = [_dual(made[i]) for i in results]
        while True:
            first = self.body(forward, kinds, derives=True)
            residuals = first.result_kinds[len(made) :]
            second = self.body(backward, [*residuals, *cotangents], derives=True)
            gradients = dict(zip(smooth, second.result_kinds, strict=True))
            # A constant with an axis of examples, such as zeros, is sliced, because its gradient is.
            new = [*kinds]
            for i, x in gradients.items():
                if kinds[i] in SHARED and isinstance(x, Rows):
                    new[i] = x
            if new == kinds:
                break
            kinds = new
        # 3. Gradients must have the dual kinds of the operands.
        is_right = all(_stands_for(x, _dual(kinds[i])) for i, x in gradients.items())
        return kinds, [first, second] if is_right else []


def _by_blocks(equation: Equation, facts: list[Fact], at: int) -> Step | None:
    """Batches one after the other on one axis, as of chosen and rejected answers: joined, or taken apart.

    With `x` of B rows, `concatenate([x, zeros of 2 B])` has the blocks B, B, B.
    """
    rows: Any = facts[at].kind
    axis, sets = rows
    ins, _ = labels.shapes_of(equation)
    sizes = [shape[axis] if axis < len(shape) else -1 for shape in ins]
    neighbours = sizes[at] // sum(sets)
    # 1. The blocks of each operand: by default, as many of the first set as fill it. An example has `neighbours`
    # elements in a block. An operand without this axis fits nothing.
    blocks: list[Sequence[int]] = []
    for fact, size in zip(facts, sizes, strict=True):
        own_blocks = sets[:1] * (size // (sets[0] * neighbours))
        if isinstance(fact.kind, Rows) and fact.kind.axis == axis:
            own_blocks = fact.kind.sets
        elif not fact.may_be_sliced:
            return None
        if sum(own_blocks) * neighbours != size:
            return None
        blocks.append(own_blocks)
    # 2. The blocks of the results.
    made = labels.blocks_after(equation, axis, blocks, neighbours)
    if not made or not all(made):
        return None
    kinds, takes = ([Rows(axis, tuple(x)) for x in each] for each in (made, blocks))
    return Step(equation, kinds, takes)


def along(label: Label, sets: tuple[int, ...], dims: Sequence[labels.Dims]) -> Slices:
    """Returns the slices of values along a label."""
    return [Rows([*x].index(label), sets) if label in x else None for x in dims]


def _moved(kind: Kind, by: int) -> Kind:
    return kind._replace(axis=kind.axis + by) if isinstance(kind, Rows) else kind


def either(x: Kind, y: Kind) -> Kind:
    """Returns the kind of a value that is one or the other.

    SAME stands for rows, too, because any slice of it is right. ZERO also stands for a sum. All other pairs are MIXED.
    """
    if x == y:
        return x
    for one, other in ((x, y), (y, x)):
        if one in SHARED and isinstance(other, Rows):
            return other
        if one is ZERO and other in (SAME, SUM):
            return other
    return MIXED


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
    ins, outs = equation.invars, equation.outvars
    first = jaxprs.count_closed_over(equation)
    operands = [i for i in range(first, len(ins)) if is_inexact(ins[i].aval)]
    return operands, [i for i, x in enumerate(outs) if is_inexact(x.aval)]


def names_made(steps: Sequence[Step]) -> list[Var]:
    """Returns the names of what steps make."""
    return [x for step in steps for x in step.equation.outvars]
