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
from shrewjax._base.trees import replaced
from shrewjax._base.types import AxisNames, Function, Leaf
from shrewjax._division import draws, labels
from shrewjax._division.kinds import Program, Slices, Step, smooth_of
from shrewjax._division.plan import Plan, Task
from shrewjax._division.rows import Rows, Sizes
from shrewjax._programs import jaxprs
from shrewjax._programs.jaxprs import Atom, Equation, is_variable

Leaves: TypeAlias = list[Leaf]
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
        pairs = zip(rows.apart(whole, rows.whole), rows.sets_of_pieces(), strict=True)
        taken = [jnp.take(x, self.positions[s], axis=0, mode="clip") for x, s in pairs]
        return rows.together(taken, rows.shape(whole.shape, self.sizes), self.sizes)

    def read(self, env: Env, x: Atom, rows: Rows | None) -> Leaf:
        """Returns a slice of a value, or the whole."""
        found: Leaf = None
        if is_variable(x):
            found, whole = env.get((x, rows)), env.get((x, None))
        else:
            whole = np.asarray(jaxprs.value_of_literal(x), x.aval.dtype)
        if found is None:
            found = self.part(whole, rows) if rows else whole
        return as_varying(found, self.varying) if self.varying else found

    # Programs.

    def run(self, tasks: Sequence[Task], env: Env) -> None:
        """Runs tasks, and adds what they make to the values."""
        for task in tasks:
            equation = task.step.equation
            if task.step.only_prints and not self.prints:
                continue
            pairs = zip(equation.invars, task.takes, strict=True)
            made = self._made(task, [self.read(env, x, rows) for x, rows in pairs])
            env.update(zip(task.results(), made, strict=True))

    def _of(self, program: Program, wanted: Slices, *operands: Leaf) -> Leaves:
        """Returns slices of a body's results, from its arguments, which are sliced by their kinds."""
        env: Env = {(x, None): y for x, y in program.constants.items()}
        for x, y in zip(program.arguments, operands, strict=True):
            env[x, program.slice(x)] = y
        pairs = [*zip(program.results, wanted, strict=True)]
        self.run(Plan(program, pairs).loop, env)
        return [self.read(env, x, rows) for x, rows in pairs]

    def _made(self, task: Task, given: Leaves) -> Sequence[Leaf]:
        step, takes, makes = task
        equation = step.equation
        # 1. Cast anew if the step makes a value vary over devices, because the operand may vary here already.
        if self.varying and labels.makes_varying(equation):
            return [as_varying(given[0], tuple(varying_axes(equation.outvars[0].aval)))]
        # 2. An equation that takes and makes whole values runs as it stands.
        is_sliced = any(takes) or any(makes)
        is_silenced = jaxprs.prints(equation) and not self.prints
        # A body runs anew, because JAX traced it outside of the mapped axes, or with values that did not vary.
        body_runs_anew = step.programs and (self.varying or self.mapped)
        if not (is_sliced or is_silenced or body_runs_anew):
            return self._run(equation, given)
        # 3. A part of a draw.
        if labels.is_draw(equation) and makes[0] is not None and not any(takes):
            return [draws.part_of_draw(equation, given[0], makes[0], self)]
        # 4. A scan, an operation of other sizes, or what has programs inside.
        if jaxprs.scan_of(equation):
            return self._scan(task, given)
        if not step.programs:
            return self._run(*self._resized(task, given))
        with contextlib.nullcontext() if self.mapped else jaxprs.context_of(equation):
            return self._nested(task, given)

    def _run(self, equation: Equation, operands: Leaves) -> Sequence[Leaf]:
        if self.mapped:
            here = jaxprs.context_here()
            equation = jaxprs.inside_shard_map(equation, here, self.mapped)
        return jaxprs.run_equation(equation, operands)

    def _resized(self, task: Task, given: Leaves) -> tuple[Equation, Leaves]:
        """Returns the equation in a micro-batch's sizes, and its operands."""
        (step, takes, makes), bounds = task, {}
        ins, outs = labels.shapes_of(step.equation)
        if takes and takes[0]:
            bounds = takes[0].bounds(ins[0], self.sizes)
            # `x[arange(B), labels]`: a micro-batch's rows count from 0, so put new numbers into that column.
            own_rows = labels.of_own_rows(step.equation, takes[0].axis)
            if own_rows and takes[1]:
                numbers, axis, (column, _) = given[1], takes[1].axis, own_rows
                own = lax.broadcasted_iota(numbers.dtype, numbers.shape[:-1], axis)
                given = [given[0], numbers.at[..., column].set(own), *given[2:]]
        pairs = zip(outs, makes, strict=True)
        outs = [rows.shape(x, self.sizes) if rows else x for x, rows in pairs]
        ins = [x.shape for x in given]
        return labels.resized(step.equation, ins, outs, bounds), given

    def _scan(self, task: Task, given: Leaves) -> Leaves:
        step, takes, makes = task
        scan: Any = jaxprs.scan_of(step.equation)
        n, first, length = scan.constants, scan.constants + scan.carries, scan.length
        body: Function = jaxprs.function_of(scan.body)
        if step.programs:
            inside = [x and x._replace(axis=x.axis - 1) for x in makes[scan.carries :]]
            wanted = [*takes[n:first], *inside]
            body = functools.partial(self._of, step.programs[0], wanted)
        elif any(takes):
            # A scan over examples, of which a micro-batch has fewer. So `lax.scan` reads the length from the stacks.
            length = None

        def trip(carry: Leaves, slices: Leaves) -> tuple[Leaves, Leaves]:
            made = body(*given[:n], *carry, *slices)
            return [*made[: scan.carries]], [*made[scan.carries :]]

        start, stacks = given[n:first], given[first:]
        carry, stacked = lax.scan(trip, start, stacks, length, **scan.options)
        return [*carry, *stacked]

    def _nested(self, task: Task, given: Leaves) -> Leaves:
        (step, takes, makes), equation = task, task.step.equation
        if jaxprs.branches_of(equation):
            branches = [functools.partial(self._of, x, makes) for x in step.programs]
            platforms = jaxprs.platforms_of(equation)
            if platforms is None:
                return lax.switch(given[0], branches, *given[1:])
            by_platform = dict[str, Function]()
            for names, branch in zip(platforms, branches, strict=True):
                by_platform |= dict.fromkeys(names or ["default"], branch)
            return lax.platform_dependent(*given[1:], **by_platform)
        if jaxprs.is_checkpoint(equation):
            run = functools.partial(self._of, step.programs[0], makes)
            return jax.checkpoint(run, **jaxprs.options_of_checkpoint(equation))(*given)
        if jaxprs.brings_derivative(equation):
            is_jvp = jaxprs.is_custom_jvp(equation)
            custom = self._custom_jvp if is_jvp else self._custom_vjp
            return custom(task)(self.positions, *given)
        if jaxprs.linear_solve_of(equation):
            return self._linear_solve(step, makes, given)
        return self._while(step, takes, given)

    def _linear_solve(self, step: Step, makes: Slices, given: Leaves) -> Leaves:
        solve: Any = jaxprs.linear_solve_of(step.equation)
        programs, functions, start = iter(step.programs), dict[str, Any](), 0
        for name, count in solve.constants.items():
            constants = given[start : start + count]
            start += count
            if solve.functions[name] is not None:
                of = functools.partial(self._of, next(programs), makes, *constants)
                # The values come last: JAX passes a product before the right-hand side.
                functions[name] = lambda *x, of=of: of(*x[-1])
        solves: Any = [functions.get(x) for x in ("solve", "transpose_solve")]
        return lax.custom_linear_solve(functions["matvec"], given[start:], *solves)

    def _while(self, step: Step, takes: Slices, given: Leaves) -> Leaves:
        condition, body = step.programs
        loop: Any = jaxprs.while_of(step.equation)
        n, m = loop.of_condition, loop.of_condition + loop.of_body
        rows = condition.slice(condition.results[0])

        def goes_on(carry: Leaves) -> Leaf:
            return self._of(condition, [rows], *given[:n], *carry)[0]

        def turn(carry: Leaves) -> Leaves:
            made = self._of(body, takes[m:], *given[n:m], *carry)
            if rows is None:
                return made
            # Rows that have stopped stay as they are.
            on = goes_on(carry)
            go = [jnp.expand_dims(on, [*range(on.ndim, x.ndim)]) for x in made]
            return [*map(jnp.where, go, made, carry)]

        return lax.while_loop(lambda carry: jnp.any(goes_on(carry)), turn, given[m:])

    # Functions that bring their derivative. Positions are arguments, because JAX lets such a function close over no
    # traced value.

    def _at(self, positions: dict[int, jax.Array]) -> "MicroBatch":
        return dataclasses.replace(self, positions=positions)

    def _custom_jvp(self, task: Task) -> Callable[..., Any]:
        step, _, makes = task
        smooth, results = smooth_of(step.equation)
        count = len(makes)

        @jax.custom_jvp
        def run(positions: Any, *operands: Leaf) -> Leaves:
            return self._at(positions)._of(step.programs[0], makes, *operands)

        @run.defjvp
        def rule(primals: Any, tangents: Any) -> Any:
            positions, *operands = primals
            (program,) = _derivative(step)
            wanted = [*makes, *(makes[i] for i in results)]
            # The positions come first, and have no tangent.
            operands += [tangents[1 + i] for i in smooth]
            made = self._at(positions)._of(program, wanted, *operands)
            nothing = [np.zeros(x.shape, jax.dtypes.float0) for x in made[:count]]
            return made[:count], replaced(nothing, results, made[count:])

        return run

    def _custom_vjp(self, task: Task) -> Callable[..., Any]:
        step, takes, makes = task
        smooth, results = smooth_of(step.equation)
        count = len(makes)

        @jax.custom_vjp
        def run(positions: Any, *operands: Leaf) -> Leaves:
            return self._at(positions)._of(step.programs[0], makes, *operands)

        def forward(positions: Any, *operands: Leaf) -> Any:
            program, _ = _derivative(step)
            residuals = [*map(program.slice, program.results[count:])]
            made = self._at(positions)._of(program, [*makes, *residuals], *operands)
            return made[:count], (positions, made[count:])

        def backward(saved: Any, cotangents: Leaves) -> Any:
            positions, residuals = saved
            _, program = _derivative(step)
            given = *residuals, *(cotangents[i] for i in results)
            made = self._at(positions)._of(program, [takes[i] for i in smooth], *given)
            return None, *replaced([None] * len(takes), smooth, made)

        run.defvjp(forward, backward)
        return run


def _derivative(step: Step) -> Sequence[Program]:
    """Returns the programs of the derivative. Those of a second derivative are analysed when JAX asks for them."""
    if step.derivative:
        return step.derivative
    (body,) = step.programs
    kinds = body.kinds_of(body.arguments)
    its_kinds, programs = body.derivative(step.equation, kinds, body.result_kinds)
    if not programs or its_kinds != kinds:
        raise ValueError(
            "the second derivative of a jax.custom_vjp or custom_jvp must not mix examples. Pass micro_batches=1"
        )
    return programs


def function_of_steps(
    steps: Sequence[Step], arguments: Sequence[Atom], results: Sequence[Atom]
) -> Callable[..., Leaves]:
    """Returns what steps make of the whole batch, as a function of these values."""
    equations = [x.equation for x in steps]
    run = jaxprs.function_of(jaxprs.program_of(equations, arguments, results))
    return lambda *values: [*run(*values)]
