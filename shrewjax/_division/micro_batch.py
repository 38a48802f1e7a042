"""A micro-batch: runs the tasks of a plan for some of the examples, by binding each equation with other sizes.

A value is known by its variable and the slice that it is. What is known whole is sliced where a task takes a slice.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax._base.axes import as_varying, varying_axes
from shrewjax._base.types import AxisNames, Function, Leaf
from shrewjax._division import draws, labels
from shrewjax._division.kinds import Program, Slices, Step, smooth_of
from shrewjax._division.plan import Plan, Task
from shrewjax._division.rows import Rows, Sizes
from shrewjax._programs import jaxprs
from shrewjax._programs.jaxprs import Atom, is_variable, shape_of

Env: TypeAlias = dict[tuple[Atom, Rows | None], Leaf]


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """The examples of a micro-batch.

    Attributes:
      sizes: the number of its examples in each set.
      positions: by set, the numbers of its examples in the whole batch.
      varying: the mapped axes over which all of its values vary, if types are tracked.
      mapped: the axes over which `sum_over` maps the loop. The program was traced outside of them.
      prints: whether it prints. The second of two passes does not.
    """

    sizes: Sizes
    positions: dict[int, jax.Array]
    varying: AxisNames = ()
    mapped: AxisNames = ()
    prints: bool = True

    # Values.

    def part(self, whole: Leaf, rows: Rows) -> Leaf:
        """Returns the slice that has these examples."""
        pieces = rows.apart(whole, rows.whole)
        sets = rows.sets_of_pieces()
        taken = [
            jnp.take(x, self.positions[s], axis=0, mode="clip")
            for x, s in zip(pieces, sets, strict=True)
        ]
        return rows.together(taken, rows.shape(whole.shape, self.sizes), self.sizes)

    def read(self, env: Env, x: Atom, rows: Rows | None) -> Leaf:
        """Returns a slice of a value, or the whole."""
        found = self._read(env, x, rows)
        return as_varying(found, self.varying) if self.varying else found

    def _read(self, env: Env, x: Atom, rows: Rows | None) -> Leaf:
        if not is_variable(x):
            value = jaxprs.value_of_literal(x)
            return self._sliced(np.asarray(value, x.aval.dtype), rows)
        if (x, rows) in env:
            return env[x, rows]
        return self._sliced(env[x, None], rows)

    def _sliced(self, whole: Leaf, rows: Rows | None) -> Leaf:
        return whole if rows is None else self.part(whole, rows)

    # Programs.

    def run(self, tasks: Sequence[Task], env: Env) -> None:
        """Runs tasks, and adds what they make to the values."""
        for task in tasks:
            equation = task.step.equation
            if task.step.only_prints and not self.prints:
                continue
            pairs = zip(equation.invars, task.takes, strict=True)
            made = self._made(task, [self.read(env, x, rows) for x, rows in pairs])
            env.update(zip(zip(equation.outvars, task.makes, strict=True), made, strict=True))

    def _of(self, program: Program, wanted: Slices, *operands: Leaf) -> list[Leaf]:
        """Returns slices of a body's results, from its arguments, which are sliced by their kinds."""
        env: Env = {
            (x, program.slice(x)): y for x, y in zip(program.arguments, operands, strict=True)
        }
        env |= {(x, None): y for x, y in program.constants.items()}
        pairs = [*zip(program.results, wanted, strict=True)]
        self.run(Plan(program, pairs).loop, env)
        return [self.read(env, x, rows) for x, rows in pairs]

    def _made(self, task: Task, given: list[Leaf]) -> Sequence[Leaf]:
        step, takes, makes = task
        equation = step.equation
        # 1. A cast that makes a value vary over devices is made anew, because the operand may vary already.
        if self.varying and labels.makes_varying(equation):
            return [as_varying(given[0], tuple(varying_axes(equation.outvars[0].aval)))]
        # 2. An equation that takes and makes whole values runs as it stands.
        is_sliced = any(takes) or any(makes)
        is_silenced = jaxprs.prints(equation) and not self.prints
        runs_elsewhere = step.programs and (self.varying or self.mapped)
        if not (is_sliced or is_silenced or runs_elsewhere):
            return self._run(equation, given)
        # 3. A part of a draw.
        if labels.is_draw(equation) and makes[0] is not None and not any(takes):
            return [draws.part_of_draw(equation, given[0], makes[0], self)]
        # 4. A scan, an operation of other sizes, or what has programs inside.
        if jaxprs.is_scan(equation):
            return self._scan(task, given)
        if not step.programs:
            return self._run(*self._resized(task, given))
        with contextlib.nullcontext() if self.mapped else jaxprs.context_of(equation):
            return self._nested(task, given)

    def _run(self, equation: jaxprs.Equation, operands: list[Leaf]) -> Sequence[Leaf]:
        if self.mapped:
            equation = jaxprs.inside_shard_map(equation, jaxprs.context_here(), self.mapped)
        return jaxprs.run_equation(equation, operands)

    def _resized(self, task: Task, given: list[Leaf]) -> tuple[jaxprs.Equation, list[Leaf]]:
        """Returns the equation in a micro-batch's sizes, and its operands. Own rows are numbered from 0 on there."""
        step, takes, makes = task
        of_indices = takes[1] if step.own_rows is not None and takes[0] is not None else None
        if of_indices is not None:
            numbers, axis = given[1], of_indices.axis
            own = lax.broadcasted_iota(numbers.dtype, numbers.shape[:-1], axis)
            given = [given[0], numbers.at[..., step.own_rows].set(own), *given[2:]]
        outs = [
            shape_of(x.aval) if rows is None else rows.shape(shape_of(x.aval), self.sizes)
            for x, rows in zip(step.equation.outvars, makes, strict=True)
        ]
        bounds = {}
        if takes and takes[0] is not None:
            bounds = takes[0].bounds(shape_of(step.equation.invars[0].aval), self.sizes)
        return labels.resized(step.equation, [x.shape for x in given], outs, bounds), given

    def _scan(self, task: Task, given: list[Leaf]) -> list[Leaf]:
        step, takes, makes = task
        scan: Any = jaxprs.scan_of(step.equation)
        n, first, length = scan.constants, scan.constants + scan.carries, scan.length
        if step.programs:
            slices = [x and x._replace(axis=x.axis - 1) for x in makes[scan.carries :]]
            body: Function = functools.partial(
                self._of, step.programs[0], [*takes[n:first], *slices]
            )
        else:  # of examples
            body, length = jaxprs.function_of(scan.body), None

        def trip(carry: list[Leaf], slices: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
            made = body(*given[:n], *carry, *slices)
            return [*made[: scan.carries]], [*made[scan.carries :]]

        carry, stacked = lax.scan(trip, given[n:first], given[first:], length, **scan.options)
        return [*carry, *stacked]

    def _nested(self, task: Task, given: list[Leaf]) -> list[Leaf]:
        (step, takes, makes), equation = task, task.step.equation
        if jaxprs.branches_of(equation):
            branches = [functools.partial(self._of, x, makes) for x in step.programs]
            platforms = jaxprs.platforms_of(equation)
            if platforms is None:
                return lax.switch(given[0], branches, *given[1:])
            pairs = [
                (name, x)
                for names, x in zip(platforms, branches, strict=True)
                for name in names or ["default"]
            ]
            return lax.platform_dependent(*given[1:], **dict(pairs))
        if jaxprs.is_checkpoint(equation):
            run = self._at_positions(lambda it, *x: it._of(step.programs[0], makes, *x))
            options = jaxprs.options_of_checkpoint(equation)
            return jax.checkpoint(run, **options)(self.positions, *given)
        if jaxprs.brings_derivative(equation):
            if jaxprs.is_custom_jvp(equation):
                return self._custom_jvp(step, makes)(self.positions, *given)
            return self._custom_vjp(step, takes, makes)(self.positions, *given)
        if jaxprs.linear_solve_of(equation):
            return self._linear_solve(step, makes, given)
        return self._while(step, takes, given)

    def _linear_solve(self, step: Step, makes: Slices, given: list[Leaf]) -> list[Leaf]:
        solve: Any = jaxprs.linear_solve_of(step.equation)
        programs, functions, start = iter(step.programs), {}, 0
        for name, count in solve.constants.items():
            constants = given[start : start + count]
            start += count
            if solve.functions[name] is not None:
                functions[name] = functools.partial(self._of, next(programs), makes, *constants)
        multiply, transposed = functions["matvec"], functions.get("transpose_solve")
        return lax.custom_linear_solve(
            lambda x: multiply(*x),
            given[start:],
            lambda _, b: functions["solve"](*b),
            transposed and (lambda _, b: transposed(*b)),
        )

    def _while(self, step: Step, takes: Slices, given: list[Leaf]) -> list[Leaf]:
        condition, body = step.programs
        loop: Any = jaxprs.while_of(step.equation)
        n, m = loop.of_condition, loop.of_condition + loop.of_body
        rows = condition.slice(condition.results[0])

        def goes_on(carry: list[Leaf]) -> Leaf:
            return self._of(condition, [rows], *given[:n], *carry)[0]

        def turn(carry: list[Leaf]) -> list[Leaf]:
            made = self._of(body, takes[m:], *given[n:m], *carry)
            if rows is None:
                return made
            return [_where_rows(goes_on(carry), x, y) for x, y in zip(made, carry, strict=True)]

        return lax.while_loop(lambda carry: jnp.any(goes_on(carry)), turn, given[m:])

    # Functions that bring their derivative. Positions are arguments, because they are traced.

    def _at_positions(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(positions: dict[int, jax.Array], *operands: Leaf) -> Any:
            return function(dataclasses.replace(self, positions=positions), *operands)

        return run

    def _derivative(self, step: Step) -> Sequence[Program]:
        """Returns the programs of the derivative. Those of a second derivative are analysed when JAX asks for them."""
        if step.derivative:
            return step.derivative
        (body,) = step.programs
        kinds = body.kinds_of(body.arguments)
        its_kinds, programs = body.derivative(step.equation, kinds, body.kinds_of(body.results))
        if not programs or its_kinds != kinds:
            raise ValueError(
                "the second derivative of a jax.custom_vjp or custom_jvp must not mix examples. Pass micro_batches=1"
            )
        return programs

    def _custom_jvp(self, step: Step, makes: Slices) -> Callable[..., Any]:
        smooth, results = smooth_of(step.equation)
        count = len(makes)

        def of_rule(it: MicroBatch, *operands: Leaf) -> list[Leaf]:
            (program,) = it._derivative(step)
            return it._of(program, [*makes, *(makes[i] for i in results)], *operands)

        run = jax.custom_jvp(self._at_positions(lambda it, *x: it._of(step.programs[0], makes, *x)))
        rule_at = self._at_positions(of_rule)

        def rule(primals: Any, tangents: Any) -> Any:
            made = rule_at(*primals, *(tangents[1 + i] for i in smooth))
            by_place = dict(zip(results, made[count:], strict=True))
            nothing = [np.zeros(x.shape, jax.dtypes.float0) for x in made[:count]]
            return made[:count], [by_place.get(i, x) for i, x in enumerate(nothing)]

        run.defjvp(rule)
        return run

    def _custom_vjp(self, step: Step, takes: Slices, makes: Slices) -> Callable[..., Any]:
        smooth, results = smooth_of(step.equation)
        count = len(makes)

        def of_forward(it: MicroBatch, *operands: Leaf) -> Any:
            program, _ = it._derivative(step)
            residuals = [*map(program.slice, program.results[count:])]
            made = it._of(program, [*makes, *residuals], *operands)
            return made[:count], (it.positions, made[count:])

        def of_backward(it: MicroBatch, *operands: Leaf) -> list[Leaf]:
            _, program = it._derivative(step)
            return it._of(program, [takes[i] for i in smooth], *operands)

        def backward(saved: Any, cotangents: list[Leaf]) -> Any:
            positions, residuals = saved
            of_results = [cotangents[i] for i in results]
            made = self._at_positions(of_backward)(positions, *residuals, *of_results)
            by_place = dict(zip(smooth, made, strict=True))
            return (None, *(by_place.get(i) for i in range(len(takes))))

        run = jax.custom_vjp(self._at_positions(lambda it, *x: it._of(step.programs[0], makes, *x)))
        run.defvjp(self._at_positions(of_forward), backward)
        return run


def function_of_steps(
    steps: Sequence[Step], arguments: Sequence[Atom], results: Sequence[Atom]
) -> Callable[..., list[Leaf]]:
    """Returns what steps make of the whole batch, as a function of these values."""
    run = jaxprs.function_of(jaxprs.program_of([x.equation for x in steps], arguments, results))
    return lambda *values: [*run(*values)]


def _where_rows(goes_on: Leaf, new: Leaf, old: Leaf) -> Leaf:
    shape = (*goes_on.shape, *[1] * (new.ndim - goes_on.ndim))
    return jnp.where(goes_on.reshape(shape), new, old)
