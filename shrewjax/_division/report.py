"""What a plan divides, for people: the error if it is too little, and the text of `print_micro_batches`."""

import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import jax

from shrewjax._base.types import Function
from shrewjax._division import labels
from shrewjax._division.kinds import MIXED, SHARED, Program, Step, Var
from shrewjax._division.plan import Plan, size_of
from shrewjax._programs import jaxprs
from shrewjax._programs.jaxprs import Equation, Frame, is_variable, shape_of


def bytes_made(steps: Iterable[Step]) -> int:
    """Returns the bytes of all that steps compute, of the whole batch, those inside of loops each time."""
    return sum(_bytes_of(step.equation) for step in steps)


def _bytes_of(equation: Equation) -> int:
    scan = jaxprs.scan_of(equation)
    inner = sum(map(_bytes_of, _inside(equation)))
    return sum(map(size_of, equation.outvars)) + inner * (scan.length if scan else 1)


def _inside(equation: Equation) -> Iterator[Equation]:
    for jaxpr in jaxprs.jaxprs_in(equation):
        yield from jaxprs.opened(jaxpr).eqns


def share_in_loop(plan: Plan) -> float:
    """Returns which part of the bytes that a program makes it makes in the loop."""
    loop = bytes_made({task.step: None for task in plan.loop})
    rest = bytes_made([*plan.before, *plan.once, *plan.after])
    return loop / max(loop + rest, 1)


def check_share(plan: Plan, fun: Function) -> None:
    """Raises if less than half is divided, and weights act on what is not: then it is the model that mixes examples.

    Without weights it is a loss, such as a small example of a contrastive one, in which there is little to divide.
    """
    share = share_in_loop(plan)
    if share >= 0.5:
        return
    acting = [x for x in plan.after if _weights_act(plan.program, x)]
    if not acting:
        return
    first = _first_mixed(plan.program, acting) or acting[:1]
    unknown = sorted({name for x in first for name in _unknown_in(x.equation)})
    lines = "; ".join(dict.fromkeys(line_of(x, fun) for x in first[:3]))
    if unknown:
        cause = f"{', '.join(unknown)} may mix examples"
        remedy = "If it does not, wrap the function that calls it in of_each_example"
    else:
        cause = "examples mix"
        remedy = (
            "Put the examples of all arguments first, as by swapaxes. Pad graphs to one size, and jax.vmap over them. "
            "For batch norm, call accumulated_value_and_grad, where each micro-batch has statistics of its own"
        )
    raise ValueError(
        f"fun must act on each example alone before examples mix, but {cause} at {lines}, so that only "
        f"{share:.0%} could be divided. {remedy}"
    )


def _weights_act(program: Program, step: Step) -> bool:
    """Returns whether a step contracts parameters with something else."""
    operands = {*filter(is_variable, step.equation.invars)}
    free = {x for x in operands if program.fact(x).is_free and shape_of(x.aval)}
    weights = {x for x in free if program.kind(x) in SHARED}
    others = [x for x in operands - weights if not program.is_made_of_nothing(x)]
    return bool(weights and others) and _contracts(step.equation)


def _contracts(equation: Equation) -> bool:
    return labels.contracts(equation) or any(map(_contracts, _inside(equation)))


def _unknown_in(equation: Equation) -> Iterator[str]:
    """Yields the names of operations of which nothing is known, not those inside them."""
    if not labels.is_known(equation):
        yield equation.primitive.name
        return
    for inner in _inside(equation):
        yield from _unknown_in(inner)


def _first_mixed(program: Program, steps: Sequence[Step]) -> list[Step]:
    """Returns the first steps, on the way to these, at which examples mix."""
    read = {x for step in steps for x in step.equation.invars if is_variable(x)}
    found = []
    for step in reversed(program.steps):
        if step.mixes and not read.isdisjoint(step.equation.outvars):
            mixed = [x for x in step.equation.invars if program.kind(x) is MIXED]
            read.update(mixed)
            found += [] if mixed else [step]
    return found[::-1]


def line_of(step: Step, fun: Function) -> str:
    """Returns the line of the user's code that made a step."""
    file_of_function = getattr(getattr(fun, "__code__", None), "co_filename", "")

    def is_users(frame: Frame) -> bool:
        file = frame.file_name
        is_installed = file.startswith(_INSTALLED) and file != file_of_function
        return not is_installed and not file.startswith(_OURS)

    # JAX cuts a traceback at a jit, so those of the calls around it count, too.
    equations = step.equation, *step.calls[::-1]
    frames = [*filter(is_users, chain.from_iterable(map(jaxprs.frames_of, equations)))]
    return jaxprs.shown_line(frames[0]) if frames else step.equation.primitive.name


_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep, "<frozen"
# Not all of `get_paths()`: its prefix, such as /usr or /usr/local, may hold the user's project.
_FOLDERS = "stdlib", "platstdlib", "purelib", "platlib"
# JAX may lie elsewhere, such as in an environment that this one is over.
_INSTALLED = (
    *(sysconfig.get_path(x) + os.sep for x in _FOLDERS),
    f"{Path(jax.__file__).parents[1]}{os.sep}",
)


def described(plan: Plan, fun: Function, sizes: str, passes: str) -> str:
    """Returns the text of `print_micro_batches`. `sizes` says how the examples are divided."""
    program = plan.program
    read = {x for task in plan.loop for x, _ in task.reads()}
    read_after = [x for step in plan.after for x in step.equation.invars]
    read.update(filter(is_variable, read_after))
    of_data = [x for step in plan.before for x in step.equation.outvars if x in read]

    def kept(x: Var) -> str:
        what = "the same for all"
        if not program.fact(x).is_free:
            what = "data"
        elif program.is_divided(x):
            what = "rows" if program.slice(x) else "a sum"
        line = line_of(program.step_of[x], fun)
        return f"{x.aval.str_short(short_dtypes=True)}, {what}: {line}"

    def indented(lines: Iterable[str]) -> list[str]:
        return [f"{'':8}{x}" for x in dict.fromkeys(lines)]

    lines = [
        f"before  {_operations(plan.before)} of the whole batch",
        *indented(map(kept, of_data)),
        f"loop    {_operations(plan.loop)}, {sizes}, {passes}",
        f"        {share_in_loop(plan):.0%} of the bytes that are computed",
        "kept    of the whole batch",
        *indented(map(kept, plan.frontier)),
        f"after   {_operations(plan.after)} of the whole batch",
        *indented(line_of(x, fun) for x in plan.after),
    ]
    return "\n".join(lines)


def _operations(steps: Sequence[object]) -> str:
    return f"{len(steps)} operation{'s' * (len(steps) != 1)}"
