r"""A traced function, whose results are added to sums where the function's own loops compute them.

What it saves: a tree of stacked gradients, beside their sum. Apart from rounding, numbers do not depend on it. It can
be deleted when XLA adds into a sum what a loop stacks, or JAX's own refs do what it does; no version does so far.

The backward scan of scanned layers returns stacked gradients, which a loop over micro-batches would hold beside the
sum. Instead the sum becomes a carry of the backward scan, which adds each layer's gradient in place.

`_Plans` goes back from a result until it finds scans that stack it. It passes equations that only add values, or
reorder or convert the elements of one::

    result <- convert <- transpose <- scan        the scan adds each slice, transposed and converted
    result <- add_any <- scan, scan               both scans add
    result <- add_any <- scan, anything else      the scan adds, and the other value is added as a whole
    result <- jit or checkpoint <- scan           as above, inside
    result <- anything else                       the caller adds it

A value that anything else reads is added as a whole. `_Evaluation` then runs the equations. Those that add nothing run
as they are, so that their names in a profile stay. A scan that adds is a new `lax.scan` around the old body, and a
`jit` around one is a new `jit`, the same for all calls that add in the same way.

JAX has its own way: `jax.vjp(loss, params)[1].with_refs(refs)` adds gradients into refs inside the backward scan. It
does not replace this pass, because it holds more, and is wrong in versions that we allow. These are temporaries of a
step with twelve scanned layers on an H100 with JAX 0.12, in trees of float32 gradients::

                            one micro-batch   by hand   this pass   refs
    float32                            0.53      1.53        0.53   0.68
    float32, `weight_fn=`                                    0.53   1.53
    bfloat16 parameters                0.53                  1.18   1.53

A ref must have the gradient's dtype. So a scan of bfloat16 layers stacks their gradients before a float32 ref gets
them. If a scan both scans an array and closes over it, JAX 0.10 and 0.11 lose gradients without an error, and 0.12
raises one. Compare again when `pyproject.toml` asks for `jax>=0.12` and a float32 ref takes a bfloat16 gradient.
examples/benchmarks/whole_steps.py measures both.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import dropwhile
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from shrewjax._base.axes import varying_axes
from shrewjax._base.trees import replaced
from shrewjax._base.types import Function, Leaf, PyTree
from shrewjax._programs.jaxprs import (
    ADD_ANY,
    CONSTRAINT,
    COPIES,
    REORDERS,
    ROUNDING,
    Atom,
    Equation,
    Jaxpr,
    axes_of_constraints,
    constants_of,
    context_of,
    has_convolutions,
    is_checkpoint,
    is_jit_disabled,
    is_plain_jit,
    is_plain_reshape,
    is_variable,
    jaxpr_of_call,
    name_of_jit,
    opened,
    permutation_of,
    prevents_cse,
    run_equation,
    scan_of,
)
from shrewjax._programs.lost_scatters import warn_if_lost
from shrewjax._programs.scatters import LOSES_SCATTERS, hide_scatters
from shrewjax._programs.switch import are_passes_disabled, naming_the_switch

Add: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
"""A function of a sum and a result, or of the same slice of both, that returns the new sum."""

Index: TypeAlias = int
"""An equation, by its index in its jaxpr."""

ResultAt: TypeAlias = int
"""A result of an equation, or of a whole jaxpr, by its index among the results."""

SumNumber: TypeAlias = int
"""A sum. Outside of all calls, it is the number of the function's result that is added to it."""

Sums: TypeAlias = dict[SumNumber, jax.Array]


class Traced:
    """A function of trees of arrays, traced once, to be called with other arrays of the same types."""

    def __init__(self, function: Function, *arguments: PyTree) -> None:
        # 1. Trace. JAX keeps what it traced of a jitted function. `inline` puts this into the caller's program.
        self._function = jax.jit(function, inline=True)
        closed, shapes = jax.make_jaxpr(self._function, return_shape=True)(*arguments)
        self._structure: Any = jax.tree.structure(shapes)
        self._traced: Jaxpr = closed
        # 2. Hide scatters from versions of XLA that lose their sums.
        self._closed: Jaxpr = closed
        if LOSES_SCATTERS and are_passes_disabled():
            warn_if_lost(closed.jaxpr.eqns)
        elif LOSES_SCATTERS:
            self._closed = hide_scatters(closed)
        # 3. Put the types of the results, and their numbers, into the results' structure.
        self.result_types = jax.tree.unflatten(self._structure, closed.out_avals)
        self.numbers = jax.tree.unflatten(self._structure, range(len(closed.out_avals)))

    def __call__(self, *arguments: PyTree) -> PyTree:
        # Without jit, users look at numbers in the function, which a jaxpr does not run.
        if self._closed is self._traced or is_jit_disabled():
            return self._function(*arguments)
        results = core.jaxpr_as_fun(self._closed)(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(self._structure, results)

    def constrained_axes(self) -> set[Hashable]:
        """Returns the mesh axes over which the function asks to shard arrays."""
        return axes_of_constraints(self._closed)

    def has_convolutions(self) -> bool:
        """Returns whether it has a convolution outside of its own loops."""
        return has_convolutions(self._closed)

    def added_to(self, sums: Sums, add: Add, *arguments: PyTree) -> tuple[PyTree, Sums]:
        """Returns the results and the new sums. A result that scans have added to its sum is None.

        The key of a sum is the number of its result among all leaves. A sum may begin with more dimensions, of size 1.
        """
        if is_jit_disabled() or are_passes_disabled():
            return self(*arguments), sums
        with naming_the_switch():
            plan = _Plans().of(self._closed, {at: _Way(at, ()) for at in sums})
            if plan.added:
                operands = jax.tree.leaves(arguments)
                results, sums = _Evaluation(add).run(self._closed, operands, plan, sums)
                return jax.tree.unflatten(self._structure, results), sums
        return self(*arguments), sums


class _Move(NamedTuple):
    """An equation of one operand that moves a value on its way. Its text says all that it does."""

    primitive: Any
    params: Mapping[str, Any]
    type: Any  # of its result

    def run(self, x: jax.Array) -> jax.Array:
        return self.primitive.bind(x, **self.params)


class _Way(NamedTuple):
    """The way of a value to a sum: the moves that it still makes."""

    sum: SumNumber
    moves: tuple[_Move, ...]


_Ways: TypeAlias = Mapping[ResultAt, _Way]
"""The ways of an equation's results, or of a jaxpr's."""


class _Inside(NamedTuple):
    """A call whose inner scans add. Inside, the sums that its results lead to are numbered from 0 on."""

    plan: "_Plan"
    numbers_outside: list[SumNumber]  # of these sums


class _Plan(NamedTuple):
    """How to evaluate a jaxpr."""

    added: set[SumNumber]  # the sums to which scans add
    # The equations that add: the results of a scan that are added slice by slice, or a call.
    adding: dict[Index, _Ways | _Inside]
    wholes: list[tuple[Atom, _Way]]  # values that are added as they are
    skipped: set[Index]  # equations that only lead to these sums


# The equations that a way may go through: `add_any`, and those of one operand.
_PASSED = COPIES | REORDERS | {ROUNDING, CONSTRAINT, ADD_ANY}


class _Plans:
    """The plans of a function and of those that it calls. Calls of one jaxpr on the same ways have one plan."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _Plan] = {}

    def of(self, jaxpr: Jaxpr, wanted: _Ways) -> _Plan:
        """Returns the plan of a jaxpr whose results in `wanted` go these ways. Its caller adds what no scan adds."""
        key = id(jaxpr), str(wanted)
        if key not in self._known:
            # Plan once to find the sums to which scans add, and again for these alone. Any other result, such as the
            # sum of two gradients, would otherwise be added in parts.
            added = self._made(opened(jaxpr), wanted).added
            wanted = {at: way for at, way in wanted.items() if way.sum in added}
            self._known[key] = self._made(opened(jaxpr), wanted)
        return self._known[key]

    def _made(self, jaxpr: Jaxpr, wanted: _Ways) -> _Plan:
        plan = _Plan(set(), {}, [], set())
        ways: dict[Atom, _Way] = {}  # of the values that were reached so far
        read = [*(x for y in jaxpr.eqns for x in y.invars), *jaxpr.outvars]
        reads = Counter(filter(is_variable, read))

        def follow(x: Atom, way: _Way) -> None:
            if is_variable(x) and reads[x] == 1:
                ways[x] = way
            else:  # something else reads the value, so it is needed as it is
                plan.wholes.append((x, way))

        # 1. Start at the results, and visit each equation after all that read what it makes.
        for at, way in wanted.items():
            follow(jaxpr.outvars[at], way)
        for index, equation in reversed([*enumerate(jaxpr.eqns)]):
            results, primitive = enumerate(equation.outvars), equation.primitive
            here = {at: ways.pop(x) for at, x in results if x in ways}
            # 2. An equation on the way: go on from its operands.
            if here and primitive.name in _PASSED:
                plan.skipped.add(index)
                way = here[0]
                if primitive.name != ADD_ANY:
                    move = _Move(primitive, equation.params, equation.outvars[0].aval)
                    way = way._replace(moves=(move, *way.moves))
                for x in equation.invars:
                    follow(x, way)
            # 3. The end of the way.
            elif here:
                self._end(plan, index, equation, here)
        # 4. Ways that reach no equation end at the jaxpr's own arguments. These are added as a whole.
        plan.wholes.extend(ways.items())
        return plan

    def _end(self, plan: _Plan, index: Index, equation: Equation, here: _Ways) -> None:
        """Plans how results at the end of their ways are added: by a scan or a call if it can, otherwise as a whole."""
        added = {at: way for at, way in here.items() if _is_stack(equation, at, way)}
        call = self._call(equation, here)
        if added:
            plan.adding[index] = added
        elif call is not None:
            plan.adding[index] = call
            sums = {call.numbers_outside[i] for i in call.plan.added}
            added = {at: way for at, way in here.items() if way.sum in sums}
        plan.added.update(way.sum for way in added.values())
        left = here.keys() - added.keys()
        plan.wholes.extend((equation.outvars[at], here[at]) for at in sorted(left))

    def _call(self, equation: Equation, here: _Ways) -> _Inside | None:
        """Returns how the scans inside a call add its results, or None if they do not, or it is no call."""
        if not (is_checkpoint(equation) or is_plain_jit(equation)):
            return None
        # Numbered from 0 on inside, so that calls of one jaxpr that lead to different sums have one plan.
        outside = [*dict.fromkeys(way.sum for way in here.values())]
        wanted = {at: way._replace(sum=outside.index(way.sum)) for at, way in here.items()}
        plan = self.of(jaxpr_of_call(equation), wanted)
        return _Inside(plan, outside) if plan.added else None


def _is_stack(equation: Equation, at: ResultAt, way: _Way) -> bool:
    """Returns whether result `at` of an equation is a stack whose slices can be added.

    XLA unrolls a scan whole if it has at most one trip left. Each layer's addition would then be a slice of the whole
    sum, which XLA takes out and puts back (tests/programs/test_loops.py, "unrolls_whole").
    """
    scan = scan_of(equation)
    if scan is None or scan.body.effects or 2 * scan.options["unroll"] > scan.length:
        return False
    # The constraint is put on the whole sum, so no reshape or transpose may follow it.
    after = dropwhile(lambda move: move.primitive.name != CONSTRAINT, way.moves)
    if at < scan.carries or any(move.primitive.name in REORDERS for move in after):
        return False
    stack = equation.outvars[at].aval
    part = jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)
    return jax.eval_shape(lambda x: _moved(x, way, scan.length), part) is not None


def _moved(part: jax.Array, way: _Way, length: int) -> tuple[jax.Array, int] | None:
    """Returns a trip's slice of a stack as a slice of the sum, and its axis there; None if a move makes pieces of it.

    Along this axis, the slices of all trips lie one behind the other. A stack's first axis numbers trips.
    """
    part, axis = part[None], 0
    for move in way.moves:
        permutation = permutation_of(move)
        if permutation is not None:
            part, axis = lax.transpose(part, permutation), permutation.index(axis)
        elif move.primitive.name in REORDERS:
            new_axis = _axis_after(move, part, axis, length)
            if new_axis is None:
                return None
            shape = [*move.type.shape]
            shape[new_axis] //= length
            part, axis = part.reshape(shape), new_axis
        elif move.primitive.name == ROUNDING:
            part = move.run(part)
        else:
            part = part.astype(move.type.dtype)
    return part, axis


def _axis_after(reshape: _Move, part: jax.Array, axis: int, length: int) -> int | None:
    """Returns the axis of a trip's slice after a reshape, or None if the reshape makes pieces of it."""
    if not is_plain_reshape(reshape):
        return None
    # The slice stays one block if the product of the dimensions before its axis is unchanged. With 4 trips, (4, 6) may
    # become (4, 2, 3) or (24,). (3, 8) would cut it.
    before, shape = math.prod(part.shape[:axis]), reshape.type.shape
    for at, n in enumerate(shape):
        if math.prod(shape[:at]) == before and n and n % length == 0:
            return at
    return None


class _Evaluation:
    """An evaluation by plan, which adds to sums."""

    def __init__(self, add: Add) -> None:
        self._add = add
        self._functions: dict[int, Function] = {}

    def run(
        self, closed: Jaxpr, operands: Sequence[Leaf], plan: _Plan, sums: Sums
    ) -> tuple[list[Leaf], Sums]:
        """Returns the results of a jaxpr, with None for those that are added, and the new sums."""
        jaxpr, sums = opened(closed), dict(sums)
        values = dict(zip(jaxpr.constvars, constants_of(closed), strict=True))
        values |= zip(jaxpr.invars, operands, strict=True)

        def value(x: Atom) -> Leaf:
            return values.get(x) if is_variable(x) else jnp.asarray(x.val, x.aval.dtype)

        # 1. Run all equations but the skipped ones. Planned scans and calls add to their sums.
        for index, equation in enumerate(jaxpr.eqns):
            if index in plan.skipped:
                continue
            given = [*map(value, equation.invars)]
            own = plan.adding.get(index)
            if own is not None:
                run: Any = self._run_call if isinstance(own, _Inside) else self._run_scan
                with context_of(equation), _names_of(equation):
                    returned, added = run(equation, given, own, sums)
                sums |= added
            else:
                returned = [*run_equation(equation, given)]
            values |= zip(equation.outvars, returned, strict=True)
        # 2. Add the values that no scan adds.
        for x, way in plan.wholes:
            whole = value(x)
            for move in way.moves:
                whole = move.run(whole)
            sums[way.sum] = self._add(sums[way.sum], whole)
        return [*map(value, jaxpr.outvars)], sums

    def _run_call(
        self, equation: Equation, operands: Sequence[Leaf], call: _Inside, sums: Sums
    ) -> tuple[list[Leaf], Sums]:
        """Runs a jit or a checkpoint whose inner scans add."""
        # 1. A jit becomes a jit again. A checkpoint is inlined behind barriers, as by JAX, or XLA would undo it.
        inner, plan, outside = jaxpr_of_call(equation), call.plan, call.numbers_outside
        run: Any = lambda operands, sums: self.run(inner, operands, plan, sums)  # noqa: E731
        # All calls of this jaxpr by this plan share one function.
        if is_plain_jit(equation):
            run.__name__ = name_of_jit(equation)
            run = self._functions.setdefault(id(plan), jax.jit(run))
        elif prevents_cse(equation):
            operands = _behind_barriers(operands)
        # 2. Run it on its sums, which have other numbers inside.
        own = {inside: sums[outside[inside]] for inside in plan.added}
        returned, own = run(operands, own)
        return returned, {outside[inside]: total for inside, total in own.items()}

    def _run_scan(
        self, equation: Equation, operands: Sequence[Leaf], stacks: _Ways, sums: Sums
    ) -> tuple[list[Leaf], Sums]:
        """Runs the scan with the sums beside its own carry. The stacks that it adds are not made."""
        scan = scan_of(equation)
        assert scan is not None
        length, whole = scan.length, scan.constants + scan.carries
        constants, carry = operands[: scan.constants], operands[scan.constants : whole]
        body = core.jaxpr_as_fun(scan.body)

        # 1. A trip runs the old body, adds its slice of each of these stacks, and returns its slices of the others.
        def trip(state: Any, given: Any) -> tuple[Any, Any]:
            (carry, sums), (i, slices) = state, given
            returned, sums = body(*constants, *carry, *slices), dict(sums)
            for at, way in stacks.items():
                total = sums[way.sum]
                sums[way.sum] = self._with_slice(total, returned[at], way, i, length)
                returned[at] = None
            return (returned[: scan.carries], sums), returned[scan.carries :]

        # 2. Scan, from the sums as they are sharded in the end.
        own = {way.sum: _constrained(sums[way.sum], way) for way in stacks.values()}
        trips = jnp.arange(length, dtype=jnp.int32)
        start, slices = ([*carry], own), (trips, [*operands[whole:]])
        (carry, own), stacked = lax.scan(trip, start, slices, **scan.options)
        return [*carry, *stacked], own

    def _with_slice(
        self, total: jax.Array, part: jax.Array, way: _Way, trip: jax.Array, length: int
    ) -> jax.Array:
        """Returns a sum to which a trip's slice of a stack is added."""
        # 1. Take the slice on its way to the sum, which may begin with more dimensions.
        moved = _moved(part, way, length)
        assert moved is not None  # `_is_stack` has asked for it
        part, axis = moved
        width, more = part.shape[axis], total.ndim - part.ndim
        # 2. Take the same slice of the sum, add, and put it back.
        start, axis = trip * width, axis + more
        old = lax.dynamic_slice_in_dim(total, start, width, axis)
        new = self._add(old, lax.expand_dims(part, range(more)))
        return lax.dynamic_update_slice_in_dim(total, new, start, axis)


def _constrained(total: jax.Array, way: _Way) -> jax.Array:
    """Returns a sum with the sharding that the function wants for its result."""
    for move in way.moves:
        if move.primitive.name == CONSTRAINT and total.ndim == move.type.ndim:
            total = move.run(total)
    return total


def _behind_barriers(operands: Sequence[Leaf]) -> list[Leaf]:
    """Returns the operands behind one barrier for all that vary over the same mapped axes.

    In JAX 0.10.2, the results of a shared barrier vary over the axes of all its operands
    (tests/programs/test_loops.py, "checkpoint_in_shard_map").
    """
    behind, axes = [*operands], [*map(varying_axes, operands)]
    for same in dict.fromkeys(axes):
        alike = [i for i, own in enumerate(axes) if own == same]
        together = lax.optimization_barrier([operands[i] for i in alike])
        behind = replaced(behind, alike, together)
    return behind


def _names_of(equation: Equation) -> AbstractContextManager[Any]:
    """Returns the context with an equation's names in a profile."""
    names = str(equation.source_info.name_stack)
    return jax.named_scope(names) if names else nullcontext()
