"""Forwarding: which results of a function are the arguments that it was given, whatever they went through.

What it saves: a copy of frozen layers in each micro-batch, and an error for a model that comes back out of `nnx.remat`.
Except for keys that a loop carries, numbers do not depend on it. It can be deleted when JAX returns an unchanged array
as it is; no version does so far. It rebuilds nothing, so the switch leaves it on.

A compiled function and a loop return new tracers, also for an array that they return unchanged. So `returned_as_given`
traces the function, and follows each argument through its operations.

An operation that this module does not know counts as a change. So if JAX renames one, a caller gets an error and no
wrong result (tests/programs/test_forwarding.py, "followed_through").
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax

from shrewjax._base.types import Function, PyTree
from shrewjax._programs.jaxprs import (
    Atom,
    Equation,
    Jaxpr,
    ShardMap,
    carry_of,
    is_variable,
    jaxprs_on_operands,
    opened,
    permutation_of,
    shape_of,
    shard_map_of,
)


class _Given(NamedTuple):
    """One of several arrays, by its number, with its dimensions in this order."""

    number: int
    dims: tuple[int, ...]


Arrays: TypeAlias = list[_Given | None]
"""The array that each result is, or None."""


def returned_as_given(function: Function, argument: PyTree) -> list[bool]:
    """Returns, for each leaf of `function(argument)`, whether it is the leaf in the same place of `argument`.

    Traces the function once. It may close over traced arrays.
    """
    jaxpr: Jaxpr = jax.make_jaxpr(function)(argument)
    given = _all_of(jaxpr.jaxpr.invars)
    return [x == own for x, own in zip(_forwarded(jaxpr), given, strict=True)]


def _all_of(arrays: Sequence[Atom]) -> list[_Given]:
    ranks = [len(shape_of(x.aval)) for x in arrays]
    return [_Given(i, tuple(range(rank))) for i, rank in enumerate(ranks)]


def _forwarded(jaxpr: Jaxpr) -> Arrays:
    """Returns, for each result of a jaxpr, the argument that it is, or None."""
    jaxpr = opened(jaxpr)
    found = dict(zip(jaxpr.invars, _all_of(jaxpr.invars), strict=True))
    for equation in jaxpr.eqns:
        for result, operand in zip(equation.outvars, _operands(equation), strict=True):
            array = None if operand is None else equation.invars[operand.number]
            if operand and is_variable(array) and array in found:
                number, dims = found[array]
                found[result] = _Given(number, tuple(dims[a] for a in operand.dims))
    return [found.get(x) if is_variable(x) else None for x in jaxpr.outvars]


def _operands(equation: Equation) -> Arrays:
    """Returns, for each result of an operation, the operand that it is, or None."""
    permutation = permutation_of(equation)
    if permutation is not None:
        return [_Given(0, tuple(permutation))]
    mapped = shard_map_of(equation)
    if mapped is not None:
        return _operands_of_shard_map(mapped)
    jaxprs = [*map(opened, jaxprs_on_operands(equation))]
    if jaxprs:
        return _operands_of_jaxprs(equation, jaxprs)
    return [None] * len(equation.outvars)


def _operands_of_shard_map(mapped: ShardMap) -> Arrays:
    """Returns the operands that leave a `shard_map` as they came in."""

    def is_same(x: _Given, spec: jax.P) -> bool:
        return x.dims == tuple(range(len(x.dims))) and mapped.in_specs[x.number] == spec

    found = zip(_forwarded(mapped.body), mapped.out_specs, strict=True)
    return [x if x and is_same(x, spec) else None for x, spec in found]


def _operands_of_jaxprs(equation: Equation, jaxprs: Sequence[Jaxpr]) -> Arrays:
    """Returns what all branches of a conditional, all turns of a loop, or the one jaxpr of a call return."""
    # 1. What all jaxprs return, by the numbers of their own arguments.
    by_result = zip(*map(_forwarded, jaxprs), strict=True)
    results = [x if {x, *others} == {x} else None for x, *others in by_result]
    carry = carry_of(equation)
    if carry is not None:
        results = _after_all_turns(results, _all_of(jaxprs[0].invars), carry)
    # 2. The same by the numbers of the operands. The jaxprs take the last of them.
    before = len(equation.invars) - len(jaxprs[0].invars)
    return [x and x._replace(number=before + x.number) for x in results]


def _after_all_turns(results: Arrays, given: list[_Given], carry: slice) -> Arrays:
    """Returns, for each result of a loop, the operand that it is, from those of one turn.

    Operands are constants, carries and slices; results are carries and slices. A turn has one axis less of a slice.
    """
    carries = given[carry]
    kept = [x if x == own else None for x, own in zip(results, carries, strict=False)]
    first_slice = len(given[: carry.start]) + len(carries)
    slices = (x if x and x.number >= first_slice else None for x in results[len(carries) :])
    stacked = [x and _Given(x.number, (0, *(a + 1 for a in x.dims))) for x in slices]
    return [*kept, *stacked]
