"""Jaxprs, JAX's lists of the operations of a traced function: the names that this package needs of JAX's inside.

A jaxpr has arguments (`invars`), constants (`constvars`), equations (`eqns`) and results (`outvars`). Loops and calls
are equations, with the jaxprs that they run among their parameters. A closed jaxpr comes with the values of its
constants.

JAX promises neither the names of primitives nor those of their parameters. An equation with other names is not taken
apart, so that a function runs as JAX traced it. `tests/programs/test_jaxprs.py` tells which name is new
("names_are_those_of_this_jax"), and that others do no harm ("other_names").

Three functions are no part of a pass, and the core relies on them. With other names, `axes_of_collectives` finds too
many axes, and a right step is refused, or too few, and devices wait forever. The others, `types_of` and
`function_of_constants`, raise. `frames_of` reads what JAX keeps for its own messages. Without it, the check of
micro-batches names no line.
"""

import linecache
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.extend import core

from shrewjax._base.mesh import explicit_axes
from shrewjax._base.types import DType, Function, Leaf, PyTree

Jaxpr: TypeAlias = Any  # jax.extend.core.Jaxpr
Equation: TypeAlias = Any  # jax.extend.core.JaxprEqn
# An equation, or whatever has its primitive and its parameters.
Operation: TypeAlias = Any
Atom: TypeAlias = Any  # jax.extend.core.Var or Literal, an operand or a result

_core: Any = core

_JAXPR_OF_LOOP = {"scan": "jaxpr", "while": "body_jaxpr"}
LOOPS = {*_JAXPR_OF_LOOP}
_CHECKPOINT = "remat2"
# Calls run one jaxpr with all of their operands, and return its results.
_JAXPR_OF_CALL = {
    "jit": "jaxpr",
    _CHECKPOINT: "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
_SHARDINGS_OF_JIT = "in_shardings", "out_shardings"
_OF_JIT = "jaxpr", "name", *_SHARDINGS_OF_JIT
_OPTIONS_OF_SCAN = "reverse", "unroll"
_OF_SCAN = _JAXPR_OF_LOOP["scan"], "length", *_OPTIONS_OF_SCAN
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


def function_of_constants(function: Function, argument: PyTree) -> tuple[Function, Sequence[Leaf]]:
    """Traces a function of a tree. Returns it as one of its constants and the tree, and the constants."""
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(argument)
    structure = jax.tree.structure(shapes)

    def of_constants(constants: Sequence[Leaf], argument: PyTree) -> PyTree:
        run = core.jaxpr_as_fun(closed_jaxpr(opened(traced), constants))
        return jax.tree.unflatten(structure, run(*jax.tree.leaves(argument)))

    return of_constants, constants_of(traced)


def context_of(equation: Equation) -> AbstractContextManager[Any]:
    """Returns the context in which JAX traced an equation, such as its mesh: another one in `shard_map`."""
    return equation.ctx.manager


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
    for equation in opened(jaxpr).eqns:
        if equation.primitive.name not in _WAITS_FOR_NOBODY:
            # By these parameters, so that no collective has to be named.
            given = [equation.params.get(name) for name in ("axes", "axis_name")]
            found.update(a for a in jax.tree.leaves(given) if not isinstance(a, int))
        if equation.primitive.name in _WAITS_FOR_ALL:
            found.update(jax.sharding.get_abstract_mesh().manual_axes)
        found.update(*map(_axes_of_collectives, jaxprs_in(equation)))
    return found


def axes_of_constraints(jaxpr: Jaxpr) -> set[Hashable]:
    """Returns the mesh axes over which a jaxpr, or one inside it, asks to shard arrays."""
    found: set[Hashable] = set()
    for equation in opened(jaxpr).eqns:
        spec = getattr(equation.params.get("sharding"), "spec", ())
        inner = map(axes_of_constraints, jaxprs_in(equation))
        found.update(jax.tree.leaves(tuple(spec)), *inner)
    return found


def jaxpr_of_call(equation: Equation) -> Jaxpr | None:
    """Returns the jaxpr that a call runs, or None if the equation is no call."""
    return equation.params.get(_JAXPR_OF_CALL.get(equation.primitive.name))


def branches_of(equation: Equation) -> Sequence[Jaxpr]:
    """Returns the jaxprs of which a conditional runs that with the number of its first operand, or none."""
    is_cond = equation.primitive.name == "cond"
    return equation.params.get("branches", ()) if is_cond else ()


def is_checkpoint(equation: Equation) -> bool:
    is_named = equation.primitive.name == _CHECKPOINT
    return is_named and jaxpr_of_call(equation) is not None


def prevents_cse(checkpoint: Equation) -> bool:
    """Returns whether JAX keeps XLA from merging what a checkpoint computes again with what was computed before."""
    return bool(checkpoint.params.get("prevent_cse", True))


def is_plain_jit(equation: Equation) -> bool:
    """Returns whether an equation is a `jit` without shardings, of which others could be made."""
    if equation.primitive.name != "jit" or not {*_OF_JIT} <= {*equation.params}:
        return False
    shardings = [x for name in _SHARDINGS_OF_JIT for x in equation.params[name]]
    return all(type(x).__name__ == "UnspecifiedValue" for x in shardings)


def name_of_jit(equation: Equation) -> str:
    """Returns the name of a plain `jit` in a profile."""
    return equation.params["name"]


def permutation_of(operation: Operation) -> tuple[int, ...] | None:
    """Returns the order of the dimensions after a transpose, or None if it is another operation."""
    is_transpose = operation.primitive.name == _TRANSPOSE
    return operation.params.get("permutation") if is_transpose else None


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
    names = "jaxpr", "in_specs", "out_specs"
    if equation.primitive.name != "shard_map" or not {*names} <= {*equation.params}:
        return None
    return ShardMap(*(equation.params[name] for name in names))


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
    params = equation.params
    if equation.primitive.name != "scan" or not {*_OF_SCAN} <= {*params}:
        return None
    body, length = params[_JAXPR_OF_LOOP["scan"]], params["length"]
    options = {name: params[name] for name in _OPTIONS_OF_SCAN}

    def count_others(outer: Sequence[Atom], inner: Sequence[Leaf]) -> int | None:
        pairs = zip(outer, inner, strict=True)
        shapes = [(shape_of(x.aval), shape_of(y)) for x, y in pairs]
        count = sum(x == y for x, y in shapes)
        return count if all(x == (length, *y) for x, y in shapes[count:]) else None

    carries = count_others(equation.outvars, body.out_avals)
    others = count_others(equation.invars, body.in_avals)
    if carries is None or others is None:
        return None
    return Scan(body, others - carries, carries, length, options)


def carry_of(equation: Equation) -> slice | None:
    """Returns the places of a loop's carry among the arguments of its body, or None if the equation is no loop.

    A `while` loop has a carry and no stacks.
    """
    if equation.primitive.name == "while":
        body = opened(equation.params.get(_JAXPR_OF_LOOP["while"]))
        return None if body is None else slice(len(body.invars) - len(body.outvars), None)
    scan = scan_of(equation)
    return None if scan is None else slice(scan.constants, scan.constants + scan.carries)


def part_of(jaxpr: Jaxpr, equations: Sequence[Equation], results: Sequence[Atom]) -> Jaxpr:
    """Returns some equations of an open jaxpr as a closed one, with these results."""
    made = {x for equation in equations for x in equation.outvars}
    read = (x for equation in equations for x in equation.invars)
    given = [x for x in dict.fromkeys(filter(is_variable, read)) if x not in made]
    part = jaxpr.replace(constvars=(), invars=given, outvars=[*results], eqns=[*equations])
    return closed_jaxpr(part)


def types_of(function: Callable[[], PyTree]) -> PyTree:
    """Returns `jax.eval_shape`, with the shardings that JAX drops there if the mesh has Explicit axes and Auto ones."""
    traced = jax.jit(function).trace()
    leaves, structure = jax.tree.flatten(traced.out_info)

    def typed(shape: Leaf, aval: Leaf) -> Leaf:
        is_complete = shape.sharding is not None or not explicit_axes(aval)
        return shape if is_complete else shape.update(sharding=aval.sharding)

    return jax.tree.unflatten(structure, map(typed, leaves, traced.jaxpr.out_avals))


def value_of_literal(literal: Atom) -> Leaf:
    return literal.val


def function_of(jaxpr: Jaxpr) -> Callable[..., Sequence[Leaf]]:
    """Returns a closed jaxpr as a function of its arguments."""
    return core.jaxpr_as_fun(jaxpr)


def function_of_equation(jaxpr: Jaxpr, equation: Equation) -> Callable[..., Sequence[Leaf]]:
    """Returns an equation of an open jaxpr as a function of its operands."""
    run = function_of(part_of(jaxpr, [equation], equation.outvars))

    def of_operands(*values: Leaf) -> Sequence[Leaf]:
        pairs = zip(equation.invars, values, strict=True)
        return run(*{x: value for x, value in pairs if is_variable(x)}.values())

    return of_operands


def rest_of(jaxpr: Jaxpr, first: int, names: Sequence[Atom]) -> Jaxpr:
    """Returns the equations of a jaxpr from a number on, as a closed one of values with these names."""
    inside = opened(jaxpr)
    rest = inside.replace(invars=[*names], eqns=inside.eqns[first:])
    return closed_jaxpr(rest, constants_of(jaxpr))


def used_by_results(jaxpr: Jaxpr) -> Iterator[set[Atom]]:
    """Yields, for each result of a jaxpr, the names of the values that it is made from."""
    for result in opened(jaxpr).outvars:
        used = {result} if is_variable(result) else set[Atom]()
        for equation in opened(jaxpr).eqns[::-1]:
            if not used.isdisjoint(equation.outvars):
                used.update(filter(is_variable, equation.invars))
        yield used


def equations_in(jaxpr: Jaxpr) -> Iterator[Equation]:
    """Yields the equations of a jaxpr, and of those inside it."""
    for equation in opened(jaxpr).eqns:
        yield equation
        for inner in jaxprs_in(equation):
            yield from equations_in(inner)


def dtypes_in(jaxpr: Jaxpr) -> Iterator[DType]:
    """Yields the dtypes of all that a jaxpr computes."""
    made = (x.aval for equation in equations_in(jaxpr) for x in equation.outvars)
    return (x.dtype for x in made if hasattr(x, "dtype"))


def may_run_forever(jaxpr: Jaxpr) -> bool:
    """Returns whether a jaxpr has a loop that goes on until its values meet a condition."""
    return any(equation.primitive.name == "while" for equation in equations_in(jaxpr))


class Frame(NamedTuple):
    """An expression in a program, from a column of one line to a column of another. Python may not know columns."""

    filename: str
    line: int
    end_line: int
    column: int
    end_column: int

    def shown(self, *, expression: bool) -> str:
        """Returns file and line, and the text of the expression, if it is asked for and on one line, or of the line."""
        text = linecache.getline(self.filename, self.line)
        if expression and self.line == self.end_line:
            text = text.encode()[self.column : self.end_column].decode()
        return f"{os.path.basename(self.filename)}:{self.line}: {text.strip()}"


def frames_of(equation: Equation) -> list[Frame]:
    """Returns the expressions that made an equation, the innermost first, or none if JAX does not tell."""
    made_at: Any = getattr(getattr(equation, "source_info", None), "traceback", None)
    raw_frames = getattr(made_at, "raw_frames", tuple)
    pairs = zip(*raw_frames(), strict=True)
    return [Frame(x.co_filename, *[*x.co_positions()][at // 2]) for x, at in pairs]
