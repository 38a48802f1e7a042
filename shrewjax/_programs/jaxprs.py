"""Jaxprs, JAX's lists of the operations of a traced function: the names that this package needs of JAX's inside.

A jaxpr has arguments (`invars`), constants (`constvars`), equations (`eqns`) and results (`outvars`). Loops and calls
are equations, with the jaxprs that they run among their parameters. A closed jaxpr comes with the values of its
constants.

JAX promises neither the names of primitives nor those of their parameters. An equation with other names is not taken
apart, so that a function runs as JAX traced it. `tests/programs/test_jaxprs.py` tells which name is new
("names_are_those_of_this_jax"), and that others do no harm ("other_names").

The core relies on these names, too. An operation that the division does not know is refused. With other names,
`axes_of_collectives` finds too many axes, and a right step is refused, or too few, and devices wait forever. `types_of`
raises. `frames_of` reads what JAX keeps for its own messages. Without it, an error names no line.
"""

import functools
import linecache
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import partial_eval as pe

from shrewjax._base.axes import axes_by_dimension
from shrewjax._base.mesh import explicit_axes
from shrewjax._base.trees import replaced
from shrewjax._base.types import AxisNames, Function, Leaf, PyTree

Jaxpr: TypeAlias = Any  # jax.extend.core.Jaxpr
Equation: TypeAlias = Any  # jax.extend.core.JaxprEqn
# An equation, or whatever has its primitive and its parameters.
Operation: TypeAlias = Any
Atom: TypeAlias = Any  # jax.extend.core.Var or Literal, an operand or a result

Frame: TypeAlias = Any  # one of a traceback, with a file_name and a line_num

_core: Any = core

_JAXPR_OF_LOOP = {"scan": "jaxpr", "while": "body_jaxpr"}
LOOPS = {*_JAXPR_OF_LOOP}
_CHECKPOINT = "remat2"
# Calls run one jaxpr with all of their operands, and return its results.
_BRINGS_DERIVATIVE = "custom_jvp_call", "custom_vjp_call"
_JAXPR_OF_CALL = dict.fromkeys(("jit", _CHECKPOINT), "jaxpr")
_JAXPR_OF_CALL |= dict.fromkeys(_BRINGS_DERIVATIVE, "call_jaxpr")
# What runs in the place of a call that only names, or maps, it.
_JITS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "custom_vmap_call": "call"}
_PRINTS = "DebugEffect"
_REDUCTIONS_OVER_DEVICES = {"psum", "psum2", "psum_invariant", "pmax", "pmin"}
_TRANSPOSE, _RESHAPE = "transpose", "reshape"
SCATTER_ADDS = {"scatter-add", "scatter-sub"}
ADD_ANY = "add_any"  # the sum of two cotangents
ADDS = {"add", ADD_ANY}
# Operations of one operand, by what they do to its elements: reorder them, keep or cast them, round them, place them.
REORDERS = {_RESHAPE, _TRANSPOSE}
COPIES = {"convert_element_type", "copy"}
ROUNDING = "reduce_precision"
CONSTRAINT = "sharding_constraint"


def is_jit_disabled() -> bool:
    """Returns whether functions run operation by operation, which a jaxpr does not (`jax.disable_jit`)."""
    config: Any = jax.config
    return config.jax_disable_jit


def shape_of(aval: Leaf) -> tuple[int, ...]:
    """Returns the shape of a type. A token has none, and counts as a scalar."""
    return getattr(aval, "shape", ())


def is_variable(atom: Atom) -> bool:
    """Returns whether an operand or a result has a name. Others are literal numbers."""
    return not isinstance(atom, core.Literal)


def is_jaxpr(x: Leaf) -> bool:
    return isinstance(x, _core.Jaxpr | _core.ClosedJaxpr)


def opened(jaxpr: Jaxpr) -> Jaxpr:
    return getattr(jaxpr, "jaxpr", jaxpr)


def constants_of(jaxpr: Jaxpr) -> Sequence[Leaf]:
    """Returns the values of a jaxpr's constants. An open one has none."""
    return getattr(jaxpr, "consts", ())


def closed_jaxpr(jaxpr: Jaxpr, constants: Sequence[Leaf] = ()) -> Jaxpr:
    return _core.ClosedJaxpr(jaxpr, constants)


def traced(function: Function, argument: PyTree) -> Jaxpr:
    return jax.make_jaxpr(function)(argument)


def with_arrays_as_arguments(closed: Jaxpr) -> tuple[Jaxpr, list[jax.Array]]:
    """Returns a closed jaxpr whose constants that are arrays of JAX are its first arguments, and these arrays.

    It drops equations that nothing reads, and such operands of loops. Results would otherwise seem to depend on them.
    """
    are_read = [True] * len(closed.out_avals)
    jaxpr, _ = pe.dce_jaxpr(opened(closed), are_read, instantiate=True)
    constants = dict(zip(jaxpr.constvars, constants_of(closed), strict=True))
    arrays = {x: value for x, value in constants.items() if isinstance(value, jax.Array)}
    others = {x: value for x, value in constants.items() if x not in arrays}
    moved = jaxpr.replace(constvars=[*others], invars=[*arrays, *jaxpr.invars])
    return closed_jaxpr(moved, [*others.values()]), [*arrays.values()]


def has_convolutions(jaxpr: Jaxpr) -> bool:
    """Returns whether a program has a convolution outside of loops."""
    outside = equations_in(jaxpr, outside_loops=True)
    return any(x.primitive.name == "conv_general_dilated" for x in outside)


def has_collective(jaxpr: Jaxpr) -> bool:
    """Returns whether devices wait for each other in a jaxpr."""
    return bool(_axes_of_collectives(jaxpr))


def context_of(equation: Equation) -> AbstractContextManager[Any]:
    """Returns the context in which JAX traced an equation, such as its mesh: another one in `shard_map`."""
    return equation.ctx.manager


def context_here() -> Any:
    """Returns the context of an equation that JAX traces here."""
    (equation,) = opened(jax.make_jaxpr(jnp.sin)(0.0)).eqns
    return equation.ctx


_SHARDINGS = "sharding", "out_sharding", "dst_sharding"


def inside_shard_map(equation: Equation, context: Any, axes: AxisNames) -> Equation:
    """Returns an equation of a program outside of `shard_map` for a device's part along these axes of the mesh."""
    mesh, params = jax.sharding.get_abstract_mesh(), dict(equation.params)
    for name in _SHARDINGS:
        spec = getattr(params.get(name), "spec", None)
        if spec is not None:
            names = axes_by_dimension(spec)
            kept = [tuple(a for a in x if a not in axes) or None for x in names]
            params[name] = jax.NamedSharding(mesh, jax.P(*kept))
    return equation.replace(params=params, ctx=context)


def jaxprs_in(equation: Equation) -> Iterator[Jaxpr]:
    return filter(is_jaxpr, jax.tree.leaves(equation.params, is_leaf=is_jaxpr))


def axes_of_collectives(function: Callable[[], PyTree]) -> set[Hashable]:
    """Returns the mapped axes along which devices wait for each other in a function."""
    return _axes_of_collectives(jax.make_jaxpr(function)())


_WAITS_FOR_NOBODY = {"axis_index", "pvary", "pbroadcast", "pcast"}
# XLA:CPU waits for all devices of the program, whatever the axis (tests/devices/test_sum_over.py, "never_hangs").
_WAITS_FOR_ALL = {"ppermute"}


def _axes_of_collectives(jaxpr: Jaxpr) -> set[Hashable]:
    found: set[Hashable] = set()
    for equation in equations_in(jaxpr):
        if equation.primitive.name not in _WAITS_FOR_NOBODY:
            # By these parameters, so that no collective has to be named.
            given = [equation.params.get(name) for name in ("axes", "axis_name")]
            found.update(a for a in jax.tree.leaves(given) if not isinstance(a, int))
        if equation.primitive.name in _WAITS_FOR_ALL:
            found.update(jax.sharding.get_abstract_mesh().manual_axes)
    return found


def axes_of_constraints(jaxpr: Jaxpr) -> set[Hashable]:
    """Returns the mesh axes over which a jaxpr, or one inside it, asks to shard arrays."""
    shardings = (x.params.get("sharding") for x in equations_in(jaxpr))
    return {*jax.tree.leaves([tuple(getattr(x, "spec", ())) for x in shardings])}


def jaxpr_of_call(equation: Equation) -> Jaxpr | None:
    """Returns the jaxpr that a call runs, or None if the equation is no call."""
    return equation.params.get(_JAXPR_OF_CALL.get(equation.primitive.name))


def branches_of(equation: Equation) -> Sequence[Jaxpr]:
    """Returns the jaxprs of which a conditional runs that with the number of its first operand, or none."""
    return equation.params.get("branches", ())


def _params(equation: Equation, operation: str, names: Sequence[str]) -> Any:
    """Returns these parameters of an operation; None if the equation is another one, or has other names for them."""
    if equation.primitive.name != operation or not {*names} <= {*equation.params}:
        return None
    return [equation.params[name] for name in names]


class While(NamedTuple):
    """A `while` loop, whose operands are constants of its condition, constants of its body, and the carry."""

    condition: Jaxpr
    body: Jaxpr
    of_condition: int  # the number of its constants
    of_body: int


def while_of(equation: Equation) -> While | None:
    names = "cond_jaxpr", _JAXPR_OF_LOOP["while"], "cond_nconsts", "body_nconsts"
    params = _params(equation, "while", names)
    return None if params is None else While(*params)


def brings_derivative(equation: Equation) -> bool:
    """Returns whether an equation is a function with a derivative of its own."""
    return equation.primitive.name in _BRINGS_DERIVATIVE


def is_custom_jvp(equation: Equation) -> bool:
    return equation.primitive.name == _BRINGS_DERIVATIVE[0]


def count_closed_over(equation: Equation) -> int:
    """Returns how many operands such a function closes over. They come first, and JAX does not differentiate them."""
    return equation.params.get("num_consts", 0)


def tangent_program(equation: Equation, smooth: Sequence[int], results: Sequence[int]) -> Jaxpr:
    """Returns a program of operands, and of tangents of the smooth ones. It returns results, and tangents of some."""

    def run(operands: list[Leaf], tangents: list[Leaf]) -> PyTree:
        def of_smooth(*some: Leaf) -> Sequence[Leaf]:
            return run_equation(equation, replaced(operands, smooth, some))

        made, its_tangents = jax.jvp(of_smooth, [operands[i] for i in smooth], tangents)
        return made, [its_tangents[i] for i in results]

    operands = _types(equation.invars)
    return jax.make_jaxpr(run)(operands, [operands[i] for i in smooth])


def cotangent_programs(
    equation: Equation, smooth: Sequence[int], results: Sequence[int]
) -> tuple[Jaxpr, Jaxpr]:
    """Returns two programs: of operands, with the results and residuals, and of residuals and cotangents of results.

    The second returns the cotangents of the smooth operands.
    """

    def forward(operands: list[Leaf]) -> PyTree:
        def of_smooth(*some: Leaf) -> PyTree:
            made = run_equation(equation, replaced(operands, smooth, some))
            return [made[i] for i in results], made

        _, pull, made = jax.vjp(of_smooth, *(operands[i] for i in smooth), has_aux=True)
        return made, pull

    first, shapes = jax.make_jaxpr(forward, return_shape=True)(_types(equation.invars))
    _, residuals = jax.tree.unflatten(jax.tree.structure(shapes), first.out_avals)
    cotangents = _types([equation.outvars[i] for i in results])
    return first, jax.make_jaxpr(lambda pull, given: pull(given))(residuals, cotangents)


def platforms_of(equation: Equation) -> Sequence[Sequence[str] | None] | None:
    """Returns for which platforms each branch is (`lax.platform_dependent`), None if the first operand decides."""
    return equation.params.get("branches_platforms")


class LinearSolve(NamedTuple):
    """A `custom_linear_solve`: its functions by name, or None, and the numbers of their constants.

    Its operands are the constants of each function, one after the other, and then the right-hand side.
    """

    functions: dict[str, Jaxpr | None]
    constants: dict[str, int]


def linear_solve_of(equation: Equation) -> LinearSolve | None:
    params = _params(equation, "custom_linear_solve", ("jaxprs", "const_lengths"))
    return None if params is None else LinearSolve(*(x._asdict() for x in params))


def is_checkpoint(equation: Equation) -> bool:
    return equation.primitive.name == _CHECKPOINT and jaxpr_of_call(equation) is not None


def options_of_checkpoint(equation: Equation) -> dict[str, Any]:
    """Returns the arguments of `jax.checkpoint` that the equation has."""
    return {name: equation.params[name] for name in ("policy", "prevent_cse")}


def prevents_cse(checkpoint: Equation) -> bool:
    """Returns whether JAX keeps XLA from merging what a checkpoint computes again with what was computed before."""
    return bool(checkpoint.params.get("prevent_cse", True))


def jaxpr_of_jit(equation: Equation) -> Jaxpr | None:
    """Returns the jaxpr that runs in the place of an equation, or None if the equation has more to it than that."""
    if equation.primitive.name in _JITS:
        return equation.params.get(_JITS[equation.primitive.name])
    # An operation of JAX's hijax (`call_hi_primitive`) says itself how it expands.
    expand = getattr(equation.params.get("_prim"), "expand", None)
    if expand is None or any(jnp.issubdtype(x.aval.dtype, jnp.inexact) for x in equation.outvars):
        return None  # it may have a derivative of its own
    run = jax.make_jaxpr(lambda *x: jax.tree.leaves(expand(*x)))
    return run(*_types(equation.invars))


def _types(atoms: Sequence[Atom]) -> list[Any]:
    return [x.aval for x in atoms]


def prints(equation: Equation) -> bool:
    """Returns whether an equation prints, or calls the host only to debug, in any order."""
    return any(type(x).__name__ == _PRINTS for x in equation.effects)


def other_effects(jaxpr: Jaxpr) -> list[str]:
    """Returns the names of what a jaxpr does beside computing and printing: ordered prints, calls of the host, refs."""
    names = {type(x).__name__ for x in jaxpr.effects} - {_PRINTS, "NamedAxisEffect"}
    return sorted(names)


def one_by_one(equations: Sequence[Equation]) -> Iterator[Equation]:
    """Yields equations, and a collective of several operands as one of each."""
    for equation in equations:
        if equation.primitive.name in _REDUCTIONS_OVER_DEVICES:
            for x, y in zip(equation.invars, equation.outvars, strict=True):
                yield equation.replace(invars=[x], outvars=[y])
        else:
            yield equation


def is_plain_jit(equation: Equation) -> bool:
    """Returns whether an equation is a `jit` without shardings, of which others could be made."""
    names = "in_shardings", "out_shardings", "jaxpr", "name"
    params = _params(equation, "jit", names)
    if params is None:
        return False
    return all(type(x).__name__ == "UnspecifiedValue" for x in (*params[0], *params[1]))


def name_of_jit(equation: Equation) -> str:
    """Returns the name of a plain `jit` in a profile."""
    return equation.params["name"]


def permutation_of(operation: Operation) -> tuple[int, ...] | None:
    """Returns the order of the dimensions after a transpose, or None if it is another operation."""
    return operation.params.get("permutation")


def is_plain_reshape(operation: Operation) -> bool:
    """Returns whether an operation is a reshape that keeps the order of the elements."""
    is_reshape = operation.primitive.name == _RESHAPE
    return is_reshape and operation.params.get("dimensions", ()) is None


def jaxprs_on_operands(equation: Equation) -> Sequence[Jaxpr]:
    """Returns the jaxprs that a call, a loop or a conditional runs, or none. They take the last of its operands."""
    names = _JAXPR_OF_CALL | _JAXPR_OF_LOOP
    inner = equation.params.get(names.get(equation.primitive.name))
    return branches_of(equation) if inner is None else [inner]


def is_whole_shard_map(equation: Equation) -> bool:
    """Returns whether an equation is a `shard_map` over all axes of its mesh. `newly_manual_axes`: JAX 0.10.2."""
    params = equation.params
    if equation.primitive.name != "shard_map" or "mesh" not in params:
        return False
    manual = params.get("newly_manual_axes", params.get("manual_axes", ()))
    return {*manual} == {*params["mesh"].axis_names}


class ShardMap(NamedTuple):
    """A `shard_map`, with a `PartitionSpec` for each operand and each result."""

    body: Jaxpr
    in_specs: Sequence[jax.P]
    out_specs: Sequence[jax.P]


def shard_map_of(equation: Equation) -> ShardMap | None:
    """Returns the `shard_map` of an equation, or None if it is another equation."""
    params = _params(equation, "shard_map", ("jaxpr", "in_specs", "out_specs"))
    return None if params is None else ShardMap(*params)


class Scan(NamedTuple):
    """A scan, whose operands are constants, the carry and stacks, in this order. It returns the carry and stacks."""

    body: Jaxpr  # a closed jaxpr, of one slice of each stack
    constants: int
    carries: int
    length: int
    options: dict[str, Any]  # arguments of `jax.lax.scan`


def scan_of(equation: Equation) -> Scan | None:
    """Returns the scan of an equation, or None if it is another equation.

    JAX 0.11 gave other names to the numbers of constants and carries. So they are read from the shapes: a stack has
    one dimension more than its slice in the body.
    """
    names = _JAXPR_OF_LOOP["scan"], "length", "reverse", "unroll"
    params = _params(equation, "scan", names)
    if params is None:
        return None
    body, length, reverse, unroll = params

    def count_unstacked(outer: Sequence[Atom], inner: Sequence[Leaf]) -> int | None:
        pairs = zip(outer, inner, strict=True)
        shapes = [(shape_of(x.aval), shape_of(y)) for x, y in pairs]
        count = sum(x == y for x, y in shapes)
        return count if all(x == (length, *y) for x, y in shapes[count:]) else None

    carries = count_unstacked(equation.outvars, body.out_avals)
    unstacked = count_unstacked(equation.invars, body.in_avals)
    if carries is None or unstacked is None:
        return None
    options = {"reverse": reverse, "unroll": unroll}
    return Scan(body, unstacked - carries, carries, length, options)


def carry_of(equation: Equation) -> slice | None:
    """Returns the places of a loop's carry among the arguments of its body, or None if the equation is no loop.

    A `while` loop has a carry and no stacks.
    """
    loop, scan = while_of(equation), scan_of(equation)
    if loop is not None:
        return slice(loop.of_body, None)
    return None if scan is None else slice(scan.constants, scan.constants + scan.carries)


def read_by(equations: Sequence[Equation], results: Sequence[Atom] = ()) -> list[Atom]:
    """Returns the variables that equations read, and those among some results, unless the equations make them."""
    made = {x for equation in equations for x in equation.outvars}
    read = (*(x for equation in equations for x in equation.invars), *results)
    return [x for x in dict.fromkeys(filter(is_variable, read)) if x not in made]


def types_of(function: Callable[[], PyTree]) -> PyTree:
    """Returns `jax.eval_shape`, with the shardings that JAX drops there if the mesh has Explicit axes and Auto ones."""
    traced = jax.jit(function).trace()
    shapes, structure = jax.tree.flatten(traced.out_info)
    pairs = zip(shapes, traced.jaxpr.out_avals, strict=True)
    typed = [x.update(sharding=y.sharding) if explicit_axes(y) else x for x, y in pairs]
    return jax.tree.unflatten(structure, typed)


@functools.cache
def _empty_jaxpr() -> Jaxpr:
    """Returns a jaxpr from which others are made, because JAX warns of one without its information for debuggers."""
    return jax.make_jaxpr(lambda: ())().jaxpr


def program_of(
    equations: Sequence[Equation], arguments: Sequence[Atom], results: Sequence[Atom]
) -> Jaxpr:
    """Returns equations as a closed jaxpr of these arguments, with these results."""
    eqns, names, outs = [*equations], [*arguments], [*results]
    return closed_jaxpr(_empty_jaxpr().replace(invars=names, outvars=outs, eqns=eqns))


def run_equation(equation: Equation, operands: Sequence[Leaf]) -> Sequence[Leaf]:
    """Returns the results of an equation for other operands, as JAX runs it: with its names, its mesh, its line."""
    names = [core.Var(x.aval) for x in equation.invars]
    alone = program_of([equation.replace(invars=names)], names, equation.outvars)
    return core.jaxpr_as_fun(alone)(*operands)


def reads(function: Function, argument: PyTree) -> list[bool]:
    """Returns which leaves of a tree the results of a function depend on. The function is traced, and not run."""
    traced = jax.make_jaxpr(function)(argument).jaxpr
    return pe.dce_jaxpr(traced, [True] * len(traced.outvars))[1]


def value_of_literal(literal: Atom) -> Leaf:
    return literal.val


def function_of(jaxpr: Jaxpr) -> Callable[..., Sequence[Leaf]]:
    """Returns a closed jaxpr as a function of its arguments."""
    return core.jaxpr_as_fun(jaxpr)


def equations_in(jaxpr: Jaxpr, *, outside_loops: bool = False) -> Iterator[Equation]:
    """Yields the equations of a jaxpr, and of those inside it."""
    for equation in opened(jaxpr).eqns:
        yield equation
        if not (outside_loops and equation.primitive.name in LOOPS):
            for inner in jaxprs_in(equation):
                yield from equations_in(inner, outside_loops=outside_loops)


def frames_of(equation: Equation) -> Sequence[Frame]:
    """Returns the frames that made an equation, the innermost first, or none if JAX does not tell."""
    made_at: Any = getattr(getattr(equation, "source_info", None), "traceback", None)
    return getattr(made_at, "frames", ())


def shown_line(frame: Frame) -> str:
    """Returns file, line and the text of the line."""
    text = linecache.getline(frame.file_name, frame.line_num).strip()
    return f"{os.path.basename(frame.file_name)}:{frame.line_num}: {text}"
