r"""A traced function, whose results are added to sums where the function's own loops compute them.

What it saves: a tree of stacked gradients, beside their sum. Numbers do not depend on it. It can be deleted when XLA
adds into a sum what a loop stacks; no version of JAX does so far.

The backward scan of scanned layers returns stacked gradients, which a loop over micro-batches would hold beside the
sum. Instead the sum becomes a carry of the backward scan, which adds each layer's gradient in place.

`_plan` goes back from a result until it finds scans that stack it. It passes equations that only add values, or reorder
or convert the elements of one::

    result <- convert <- transpose <- scan        the scan adds each slice, transposed and converted
    result <- add_any <- scan, scan               both scans add
    result <- add_any <- scan, anything else      the scan adds, and the other value is added as a whole
    result <- jit or checkpoint <- scan           as above, after the equations inside have taken its place
    result <- anything else                       the caller adds it

A value that anything else reads is added as a whole. `_Evaluation` then runs the equations. Those that add nothing run
as they are, so that their names in a profile stay. A scan that adds is a new `lax.scan` around the old body.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from shrewjax._base.mesh import varying_axes
from shrewjax._base.types import Function, Leaf, PyTree
from shrewjax._programs.jaxprs import (
    Atom,
    Equation,
    Jaxpr,
    constants_of,
    context_of,
    is_jit_disabled,
    is_variable,
    jaxpr_of_call,
    may_be_inlined,
    opened,
    part_of,
    scan_of,
)
from shrewjax._programs.lost_scatters import warn_if_lost
from shrewjax._programs.scatters import LOSES_SCATTERS, hide_scatters
from shrewjax._programs.switch import are_passes_disabled, naming_the_switch

Add: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
"""A function of a sum and a result, or of the same slice of both, that returns the new sum."""


class Traced:
    """A function of trees of arrays, traced once, to be called with other arrays of the same types."""

    def __init__(self, function: Function, *arguments: PyTree) -> None:
        self._function = function
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        self._structure: Any = jax.tree.structure(shapes)
        self._closed: Jaxpr = closed
        if LOSES_SCATTERS and are_passes_disabled():
            warn_if_lost(closed.jaxpr.eqns)
        elif LOSES_SCATTERS:
            self._closed = hide_scatters(closed)
        self.results: PyTree = jax.tree.unflatten(self._structure, closed.out_avals)  # their types
        self.numbers: PyTree = jax.tree.unflatten(self._structure, range(len(closed.out_avals)))

    def __call__(self, *arguments: PyTree) -> PyTree:
        if (
            is_jit_disabled()
        ):  # then users look at numbers in the function, which a jaxpr does not run
            return self._function(*arguments)
        return jax.tree.unflatten(
            self._structure, core.jaxpr_as_fun(self._closed)(*jax.tree.leaves(arguments))
        )

    @naming_the_switch()
    def added_to(
        self, sums: dict[int, jax.Array], add: Add, *arguments: PyTree
    ) -> tuple[PyTree, dict[int, jax.Array]]:
        """Returns the results and the new sums. A result that scans have added to its sum is None.

        The key of a sum is the number of its result among all leaves. A sum may begin with more dimensions, of size 1.
        """
        if is_jit_disabled() or are_passes_disabled():
            return self(*arguments), dict(sums)
        jaxpr = self._closed.jaxpr
        plan = _plan(jaxpr, {at: _Way(at, ()) for at in sums})
        evaluation = _Evaluation(sums, add)
        results = evaluation.run(jaxpr, self._closed.consts, jax.tree.leaves(arguments), plan)
        return jax.tree.unflatten(self._structure, results), evaluation.sums


class _Way(NamedTuple):
    """The way of a value to the function's result number `result`: the equations that it still goes through."""

    result: int
    equations: tuple[Equation, ...]


class _Place(NamedTuple):
    """The place of a scan's trip i in an array: `width` elements along `axis`, from i * width on."""

    axis: int
    width: int


class _Stack(NamedTuple):
    """A value that a scan stacks: its way, and the place of a trip before the way and after each of its equations."""

    way: _Way
    places: list[_Place]


class _Plan(NamedTuple):
    """How to evaluate a jaxpr. Equations are named by their places in it."""

    added: set[int]  # the function's results that scans add
    scans: dict[
        int, dict[int, _Stack]
    ]  # scans that add: their stacks, by the places among their results
    calls: dict[int, "_Plan"]  # equations whose inner equations take their place
    wholes: list[tuple[Atom, _Way]]  # values that are added as they are
    skipped: set[int]  # equations that only lead to results that scans add


# The equations that a way may go through: `add_any`, and those of one operand.
_ELEMENTWISE = {"convert_element_type", "copy", "reduce_precision", "sharding_constraint"}
_PASSED = _ELEMENTWISE | {"add_any", "reshape", "transpose"}


def _plan(jaxpr: Jaxpr, wanted: dict[int, _Way]) -> _Plan:
    plan = _Plan(set(), {}, {}, [], set())
    ways: dict[Atom, _Way] = {}
    leads_to: dict[int, int] = {}  # the result, by the place of an equation on its way
    reads = Counter(x for equation in jaxpr.eqns for x in equation.invars if is_variable(x))
    reads.update(x for x in jaxpr.outvars if is_variable(x))

    def follow(x: Atom, way: _Way) -> None:
        if is_variable(x) and reads[x] == 1:
            ways[x] = way
        else:  # something else reads the value, so it is needed as it is
            plan.wholes.append((x, way))

    for at, way in wanted.items():
        follow(jaxpr.outvars[at], way)
    for place, equation in reversed([*enumerate(jaxpr.eqns)]):
        here = {at: ways.pop(x) for at, x in enumerate(equation.outvars) if x in ways}
        if not here:
            continue
        name = equation.primitive.name
        if name in _PASSED:
            (way,) = here.values()
            leads_to[place] = way.result
            for x in equation.invars:
                follow(
                    x, way if name == "add_any" else _Way(way.result, (equation, *way.equations))
                )
            continue
        added: set[int] = set()
        if may_be_inlined(equation):
            inner = _plan(opened(jaxpr_of_call(equation)), here)
            if inner.added:
                plan.calls[place] = inner
                added = {at for at, way in here.items() if way.result in inner.added}
        stacks = {at: stack for at, way in here.items() if (stack := _stack(equation, at, way))}
        if stacks:
            plan.scans[place] = stacks
            added = {*stacks}
        plan.added.update(here[at].result for at in added)
        plan.wholes.extend(
            (equation.outvars[at], way) for at, way in here.items() if at not in added
        )
    plan.wholes.extend(ways.items())  # the jaxpr's arguments
    plan.wholes[:] = [(x, way) for x, way in plan.wholes if way.result in plan.added]
    plan.skipped.update(place for place, result in leads_to.items() if result in plan.added)
    return plan


def _stack(equation: Equation, at: int, way: _Way) -> _Stack | None:
    """Returns result `at` of an equation as a stack, or None if it is none, or if no slice of it can be added."""
    scan = scan_of(equation)
    if scan is None or scan.body.effects or at < scan.carries or not scan.length:
        return None
    shape, places = equation.outvars[at].aval.shape, [_Place(0, 1)]
    for number, passed in enumerate(way.equations):
        place = _place_after(passed, shape, places[-1], scan.length)
        # The constraint is put on the whole sum, so no reshape or transpose may follow it.
        is_for_sum = all(x.primitive.name in _ELEMENTWISE for x in way.equations[number:])
        if place is None or (passed.primitive.name == "sharding_constraint" and not is_for_sum):
            return None
        places.append(place)
        shape = passed.outvars[0].aval.shape
    return _Stack(way, places)


def _place_after(
    equation: Equation, shape: tuple[int, ...], place: _Place, length: int
) -> _Place | None:
    """Returns the place of a trip after an equation, or None if it is in several pieces there."""
    if equation.primitive.name == "transpose":
        permutation = equation.params.get("permutation")
        return None if permutation is None else place._replace(axis=permutation.index(place.axis))
    if equation.primitive.name == "reshape":
        # A trip's elements stay one block if the product of the dimensions before its axis is unchanged.
        before, new = math.prod(shape[: place.axis]), equation.outvars[0].aval.shape
        axes = [
            axis
            for axis, n in enumerate(new)
            if math.prod(new[:axis]) == before and n and n % length == 0
        ]
        return (
            _Place(axes[0], new[axes[0]] // length)
            if axes and equation.params.get("dimensions", ()) is None
            else None
        )
    return place


def _slice_after(equation: Equation, x: jax.Array, place: _Place) -> jax.Array:
    """Returns a trip's slice after an equation, which puts it at `place`."""
    result = equation.outvars[0].aval
    if equation.primitive.name == "transpose":
        return lax.transpose(x, equation.params["permutation"])
    if equation.primitive.name == "reshape":
        return x.reshape(*result.shape[: place.axis], place.width, *result.shape[place.axis + 1 :])
    if equation.primitive.name == "reduce_precision":
        return lax.reduce_precision(x, **equation.params)
    return x.astype(result.dtype)


class _Evaluation:
    """An evaluation by plan, and its sums, by the numbers of the function's results."""

    def __init__(self, sums: dict[int, jax.Array], add: Add) -> None:
        self.sums = dict(sums)
        self._add = add

    def run(
        self, jaxpr: Jaxpr, constants: Sequence[Leaf], arguments: Sequence[Leaf], plan: _Plan
    ) -> list[Leaf]:
        """Returns the results of a jaxpr, with None for those that are added."""
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))

        def read(atoms: Iterable[Atom]) -> list[Leaf]:
            return [
                values.get(x) if is_variable(x) else jnp.asarray(x.val, x.aval.dtype) for x in atoms
            ]

        groups = [*_groups(jaxpr, plan)]
        for number, (place, equations) in enumerate(groups):
            if place is None:
                later = [
                    x
                    for _, group in groups[number + 1 :]
                    for equation in group
                    for x in equation.invars
                ]
                later += [*jaxpr.outvars, *(x for x, _ in plan.wholes)]
                part = part_of(jaxpr, equations, {x for x in later if is_variable(x)})
                values.update(
                    zip(
                        part.jaxpr.outvars,
                        core.jaxpr_as_fun(part)(*read(part.jaxpr.invars)),
                        strict=True,
                    )
                )
                continue
            (equation,) = equations
            with _names_of(equation):
                given = read(equation.invars)
                if place in plan.scans:
                    returned = self._run_scan(equation, given, plan.scans[place])
                else:
                    returned = self._run_call(equation, given, plan.calls[place])
            values.update(zip(equation.outvars, returned, strict=True))
        for x, way in plan.wholes:
            (value,) = read([x])
            for equation in way.equations:
                value = equation.primitive.bind(value, **equation.params)
            self.sums[way.result] = self._add(self.sums[way.result], value)
        return read(jaxpr.outvars)

    def _run_call(self, equation: Equation, arguments: Sequence[Leaf], plan: _Plan) -> list[Leaf]:
        if equation.params.get("prevent_cse"):  # as `checkpoint` does itself, or XLA would undo it
            arguments = _behind_barriers(arguments)
        inner = jaxpr_of_call(equation)
        return self.run(opened(inner), constants_of(inner), arguments, plan)

    def _run_scan(
        self, equation: Equation, arguments: Sequence[Leaf], stacks: dict[int, _Stack]
    ) -> list[Leaf]:
        scan = scan_of(equation)
        assert scan is not None
        whole = scan.constants + scan.carries
        constants, carry, sliced = (
            arguments[: scan.constants],
            arguments[scan.constants : whole],
            arguments[whole:],
        )
        body = core.jaxpr_as_fun(scan.body)

        def trip(
            state: tuple[list[Leaf], dict[int, jax.Array]], given: tuple[jax.Array, list[Leaf]]
        ) -> tuple[Any, Any]:
            (carry, sums), (i, slices) = state, given
            returned = body(*constants, *carry, *slices)
            new_sums = dict(sums)
            for at, stack in stacks.items():
                new_sums[stack.way.result] = self._added(
                    new_sums[stack.way.result], returned[at][None], i, stack
                )
            others = [x for at, x in enumerate(returned) if at >= scan.carries and at not in stacks]
            return (list(returned[: scan.carries]), new_sums), others

        start = {stack.way.result: self._constrained(stack.way) for stack in stacks.values()}
        trips = jnp.arange(scan.length, dtype=jnp.int32)
        (carry, sums), others = lax.scan(
            trip, (list(carry), start), (trips, list(sliced)), **scan.options
        )
        self.sums |= sums
        remaining = iter(others)
        count = len(equation.outvars)
        return [
            *carry,
            *(None if at in stacks else next(remaining) for at in range(scan.carries, count)),
        ]

    def _added(self, total: jax.Array, part: jax.Array, i: jax.Array, stack: _Stack) -> jax.Array:
        for equation, place in zip(stack.way.equations, stack.places[1:], strict=True):
            part = _slice_after(equation, part, place)
        more = total.ndim - part.ndim
        axis, width = stack.places[-1]
        old = lax.dynamic_slice_in_dim(total, i * width, width, axis + more)
        new = self._add(old, lax.expand_dims(part, range(more)))
        return lax.dynamic_update_slice_in_dim(total, new, i * width, axis + more)

    def _constrained(self, way: _Way) -> jax.Array:
        """Returns a result's sum, with the sharding that the function wants for the result."""
        total = self.sums[way.result]
        for equation in way.equations:
            if (
                equation.primitive.name == "sharding_constraint"
                and total.ndim == equation.outvars[0].aval.ndim
            ):
                total = equation.primitive.bind(total, **equation.params)
        return total


def _behind_barriers(arguments: Sequence[Leaf]) -> list[Leaf]:
    """Returns the arguments behind one barrier for all that vary over the same mapped axes.

    In JAX 0.10.2, the results of a shared barrier vary over the axes of all its operands
    (tests/programs/test_loops.py, "checkpoint_in_shard_map").
    """
    places: dict[frozenset[Any], list[int]] = {}
    for i, x in enumerate(arguments):
        places.setdefault(varying_axes(x), []).append(i)
    behind = list(arguments)
    for alike in places.values():
        for i, x in zip(
            alike, lax.optimization_barrier([arguments[i] for i in alike]), strict=True
        ):
            behind[i] = x
    return behind


def _groups(jaxpr: Jaxpr, plan: _Plan) -> Iterator[tuple[int | None, list[Equation]]]:
    """Yields the equations in their order: one that takes part, with its place, or all up to the next such one."""
    plain: list[Equation] = []
    for place, equation in enumerate(jaxpr.eqns):
        if place in plan.scans or place in plan.calls:
            yield None, plain
            yield place, [equation]
            plain = []
        elif place not in plan.skipped:
            plain.append(equation)
    yield None, plain


def _names_of(equation: Equation) -> ExitStack:
    """Returns the context in which an equation was traced: its names in a profile, and settings such as its mesh."""
    context = ExitStack()
    names = str(equation.source_info.name_stack)
    if names:
        context.enter_context(jax.named_scope(names))
    context.enter_context(context_of(equation))
    return context
