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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from shrewjax._base.axes import varying_axes
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
    Scan,
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
    program_of,
    read_by,
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
        self.result_types: PyTree = jax.tree.unflatten(self._structure, closed.out_avals)
        self.numbers: PyTree = jax.tree.unflatten(self._structure, range(len(closed.out_avals)))

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
        # 1. Plan which scans add to which sums.
        with naming_the_switch():
            plan = _Plans().of(self._closed, {at: _Way(at, ()) for at in sums})
        if not plan.added:
            return self(*arguments), sums
        # 2. Run the equations, those scans with their sums.
        operands = jax.tree.leaves(arguments)
        with naming_the_switch():
            results, sums = _Evaluation(add).run(self._closed, operands, plan, sums)
        return jax.tree.unflatten(self._structure, results), sums


class _Move(NamedTuple):
    """An equation of one operand that moves a value on its way. Its text says all that it does."""

    primitive: Any
    params: Mapping[str, Any]
    type: Any  # of its result

    @property
    def name(self) -> str:
        return self.primitive.name

    def run(self, x: jax.Array) -> jax.Array:
        return self.primitive.bind(x, **self.params)


class _Way(NamedTuple):
    """The way of a value to a sum: the moves that it still makes."""

    sum: SumNumber
    moves: tuple[_Move, ...]


class _Block(NamedTuple):
    """The elements of an array that a scan's trip i makes: `width` of them along `axis`, from i * width on."""

    axis: int
    width: int


class _Inside(NamedTuple):
    """A call whose inner scans add. Inside, the sums that its results lead to are numbered from 0 on."""

    plan: "_Plan"
    numbers_outside: list[SumNumber]  # of these sums, by their numbers inside


class _Plan(NamedTuple):
    """How to evaluate a jaxpr."""

    added: set[SumNumber]  # the sums to which scans add
    # Which results of a scan are added.
    scans: dict[Index, dict[ResultAt, _Way]]
    calls: dict[Index, _Inside]
    wholes: list[tuple[Atom, _Way]]  # values that are added as they are
    skipped: set[Index]  # equations that only lead to results that scans add


# The equations that a way may go through: `add_any`, and those of one operand.
_IN_PLACE = COPIES | {ROUNDING, CONSTRAINT}
_PASSED = _IN_PLACE | REORDERS | {ADD_ANY}


class _Plans:
    """The plans of a function and of those that it calls. Calls of one jaxpr on the same ways have one plan."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], _Plan] = {}

    def of(self, jaxpr: Jaxpr, wanted: Mapping[ResultAt, _Way]) -> _Plan:
        """Returns the plan of a jaxpr whose results in `wanted` go these ways."""
        key = id(jaxpr), str(wanted)
        if key not in self._known:
            self._known[key] = self._made(opened(jaxpr), wanted)
        return self._known[key]

    def _made(self, jaxpr: Jaxpr, wanted: Mapping[ResultAt, _Way]) -> _Plan:
        # 1. Start at the results, and visit each equation after all that read what it makes.
        back = _WayBack(jaxpr)
        for at, way in wanted.items():
            back.follow(jaxpr.outvars[at], way)
        for index, equation in reversed([*enumerate(jaxpr.eqns)]):
            here = back.ways_of_results(equation)
            # 2. An equation on the way: go on from its operands.
            if here and equation.primitive.name in _PASSED:
                back.go_through(index, equation, here)
            # 3. The end of the way: a scan or a call adds what it can, and other values are added as a whole.
            elif here:
                added = self._add_inside(back.plan, index, equation, here)
                left = ((equation.outvars[at], here[at]) for at in here if at not in added)
                back.plan.wholes.extend(left)
        # 4. Leave to the caller what no scan adds.
        return back.finished()

    def _add_inside(
        self, plan: _Plan, index: Index, equation: Equation, here: Mapping[ResultAt, _Way]
    ) -> Mapping[ResultAt, _Way]:
        """Plans what an equation adds inside: slices of stacks, or what a call's own scans add. Returns these ways."""
        # 1. A scan adds the stacks that it makes, slice by slice.
        stacks = {at: way for at, way in here.items() if _is_stack(equation, at, way)}
        if stacks:
            plan.scans[index] = stacks
            plan.added.update(way.sum for way in stacks.values())
            return stacks
        # 2. A call adds what its own scans add.
        call = self._call(equation, here)
        if call is None or not call.plan.added:
            return {}
        plan.calls[index] = call
        added = {call.numbers_outside[inside] for inside in call.plan.added}
        plan.added.update(added)
        return {at: way for at, way in here.items() if way.sum in added}

    def _call(self, equation: Equation, here: Mapping[ResultAt, _Way]) -> _Inside | None:
        if not (is_checkpoint(equation) or is_plain_jit(equation)):
            return None
        # Numbered from 0 on inside, so that calls of one jaxpr that lead to different sums have one plan.
        outside = [*dict.fromkeys(way.sum for way in here.values())]
        wanted = {at: way._replace(sum=outside.index(way.sum)) for at, way in here.items()}
        return _Inside(self.of(jaxpr_of_call(equation), wanted), outside)


class _WayBack:
    """The way back from a jaxpr's results through its equations, and the plan that comes of it."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.plan = _Plan(set(), {}, {}, [], set())
        self._ways: dict[Atom, _Way] = {}  # of the values that were reached so far
        self._leads_to: dict[Index, SumNumber] = {}  # of the equations on a way
        reads = [*(x for y in jaxpr.eqns for x in y.invars), *jaxpr.outvars]
        self._reads = Counter(filter(is_variable, reads))

    def follow(self, x: Atom, way: _Way) -> None:
        if is_variable(x) and self._reads[x] == 1:
            self._ways[x] = way
        else:  # something else reads the value, so it is needed as it is
            self.plan.wholes.append((x, way))

    def ways_of_results(self, equation: Equation) -> dict[ResultAt, _Way]:
        """Returns the ways of an equation's results."""
        made = enumerate(equation.outvars)
        return {at: self._ways.pop(x) for at, x in made if x in self._ways}

    def go_through(self, index: Index, equation: Equation, here: Mapping[ResultAt, _Way]) -> None:
        """Follows the operands of an equation that makes one value."""
        (way,) = here.values()
        self._leads_to[index] = way.sum
        for x in equation.invars:
            self.follow(x, _way_before(equation, way))

    def finished(self) -> _Plan:
        plan = self.plan
        plan.wholes.extend(self._ways.items())  # the jaxpr's arguments
        plan.wholes[:] = [(x, way) for x, way in plan.wholes if way.sum in plan.added]
        plan.skipped.update(index for index, to in self._leads_to.items() if to in plan.added)
        return plan


def _way_before(equation: Equation, way: _Way) -> _Way:
    if equation.primitive.name == ADD_ANY:
        return way
    move = _Move(equation.primitive, equation.params, equation.outvars[0].aval)
    return way._replace(moves=(move, *way.moves))


def _is_stack(equation: Equation, at: ResultAt, way: _Way) -> bool:
    """Returns whether result `at` of an equation is a stack whose slices can be added.

    XLA unrolls a scan whole if it has at most one trip left. Each layer's addition would then be a slice of the whole
    sum, which XLA takes out and puts back (tests/programs/test_loops.py, "unrolls_whole").
    """
    scan = scan_of(equation)
    if scan is None or scan.body.effects or 2 * scan.options["unroll"] > scan.length:
        return False
    return at >= scan.carries and _blocks(equation.outvars[at], way, scan) is not None


def _blocks(stack: Atom, way: _Way, scan: Scan) -> list[_Block] | None:
    """Returns the block of a trip in a stack, and one after each move of its way; None if a move makes pieces of it."""
    shape, blocks = stack.aval.shape, [_Block(0, 1)]
    for number, move in enumerate(way.moves):
        # The constraint is put on the whole sum, so no reshape or transpose may follow it.
        is_for_sum = all(x.name in _IN_PLACE for x in way.moves[number:])
        after = _block_after(move, shape, blocks[-1], scan.length)
        if after is None or (move.name == CONSTRAINT and not is_for_sum):
            return None
        blocks.append(after)
        shape = move.type.shape
    return blocks


def _block_after(move: _Move, shape: tuple[int, ...], block: _Block, length: int) -> _Block | None:
    if move.name in _IN_PLACE:
        return block
    permutation = permutation_of(move)
    if permutation is not None:
        return block._replace(axis=permutation.index(block.axis))
    if is_plain_reshape(move):
        # A trip's elements stay one block if the product of the dimensions before its axis is unchanged.
        before, new = math.prod(shape[: block.axis]), move.type.shape
        for axis, n in enumerate(new):
            if math.prod(new[:axis]) == before and n and n % length == 0:
                return _Block(axis, n // length)
    return None


def _slice_after(move: _Move, x: jax.Array, block: _Block) -> jax.Array:
    """Returns a trip's slice after a move, which makes it this block."""
    permutation = permutation_of(move)
    if permutation is not None:
        return lax.transpose(x, permutation)
    if is_plain_reshape(move):
        before, after = move.type.shape[: block.axis], move.type.shape[block.axis + 1 :]
        return x.reshape(*before, block.width, *after)
    return move.run(x) if move.name == ROUNDING else x.astype(move.type.dtype)


class _Evaluation:
    """An evaluation by plan, which adds to sums."""

    def __init__(self, add: Add) -> None:
        self._add = add
        self._functions: dict[tuple[int, int], Function] = {}

    def run(
        self, closed: Jaxpr, operands: Sequence[Leaf], plan: _Plan, sums: Sums
    ) -> tuple[list[Leaf], Sums]:
        """Returns the results of a jaxpr, with None for those that are added, and the new sums."""
        jaxpr, sums = opened(closed), dict(sums)
        values = dict(zip(jaxpr.constvars, constants_of(closed), strict=True))
        values |= zip(jaxpr.invars, operands, strict=True)

        def value(x: Atom) -> Leaf:
            return values.get(x) if is_variable(x) else jnp.asarray(x.val, x.aval.dtype)

        # 1. Run the equations: those that add one by one, and the others between them together.
        plans: dict[Index, Any] = plan.scans | plan.calls
        for index, part in _parts(jaxpr, plan):
            if index is None:
                returned = core.jaxpr_as_fun(part)(*map(value, part.jaxpr.invars))
                values |= zip(part.jaxpr.outvars, returned, strict=True)
                continue
            equation = jaxpr.eqns[index]
            given = [*map(value, equation.invars)]
            run: Any = self._run_scan if index in plan.scans else self._run_call
            with _names_of(equation):
                returned, added = run(equation, given, plans[index], sums)
            values |= zip(equation.outvars, returned, strict=True)
            sums |= added
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
        # 1. Make the call again around the evaluation of its jaxpr, so that it stays a call in the program.
        inner, plan = jaxpr_of_call(equation), call.plan
        run: Any = lambda operands, sums: self.run(inner, operands, plan, sums)  # noqa: E731
        # All calls of this jaxpr by this plan share one function.
        if is_plain_jit(equation):
            run.__name__ = name_of_jit(equation)
            run = self._functions.setdefault((id(inner), id(plan)), jax.jit(run))
        elif prevents_cse(equation):  # as JAX does itself, or XLA would undo it
            operands = _behind_barriers(operands)
        # 2. Run it on its sums, which have other numbers inside.
        outside = call.numbers_outside
        own = {inside: sums[outside[inside]] for inside in plan.added}
        returned, own = run(operands, own)
        return returned, {outside[inside]: total for inside, total in own.items()}

    def _run_scan(
        self, equation: Equation, operands: Sequence[Leaf], stacks: dict[ResultAt, _Way], sums: Sums
    ) -> tuple[list[Leaf], Sums]:
        """Runs the scan with the sums beside its own carry. The stacks that it adds are not made."""
        scan = scan_of(equation)
        assert scan is not None
        whole, count = scan.constants + scan.carries, len(equation.outvars)
        constants, carry = operands[: scan.constants], operands[scan.constants : whole]
        body = core.jaxpr_as_fun(scan.body)
        others = [at for at in range(scan.carries, count) if at not in stacks]
        blocks: dict[ResultAt, Any] = {
            at: _blocks(equation.outvars[at], way, scan) for at, way in stacks.items()
        }

        # 1. A trip runs the old body, adds its slice of each of these stacks, and returns its slices of the others.
        def trip(state: Any, given: Any) -> tuple[Any, Any]:
            (carry, sums), (i, slices) = state, given
            returned, sums = body(*constants, *carry, *slices), dict(sums)
            for at, way in stacks.items():
                total, part = sums[way.sum], returned[at]
                sums[way.sum] = self._with_slice(total, part, way, blocks[at], i)
            return (returned[: scan.carries], sums), [returned[at] for at in others]

        # 2. Scan, from the sums as they are sharded in the end.
        own = {way.sum: _constrained(sums[way.sum], way) for way in stacks.values()}
        trips = jnp.arange(scan.length, dtype=jnp.int32)
        start, slices = ([*carry], own), (trips, [*operands[whole:]])
        (carry, own), stacked = lax.scan(trip, start, slices, **scan.options)
        # 3. Return the results in their places, with None for those that are added.
        kept = dict(zip(others, stacked, strict=True))
        return [*carry, *map(kept.get, range(scan.carries, count))], own

    def _with_slice(
        self,
        total: jax.Array,
        part: jax.Array,
        way: _Way,
        blocks: Sequence[_Block],
        trip: jax.Array,
    ) -> jax.Array:
        """Returns a sum to which a trip's slice of a stack is added."""
        # 1. Take the slice, with a first axis of 1, on its way to the sum.
        part = part[None]
        for move, after in zip(way.moves, blocks[1:], strict=True):
            part = _slice_after(move, part, after)
        # 2. Take the same slice of the sum, which may begin with more dimensions.
        block, more = blocks[-1], total.ndim - part.ndim
        start, axis = trip * block.width, block.axis + more
        old = lax.dynamic_slice_in_dim(total, start, block.width, axis)
        # 3. Add, and put it back.
        new = self._add(old, lax.expand_dims(part, range(more)))
        return lax.dynamic_update_slice_in_dim(total, new, start, axis)


def _constrained(total: jax.Array, way: _Way) -> jax.Array:
    """Returns a sum with the sharding that the function wants for its result."""
    for move in way.moves:
        if move.name == CONSTRAINT and total.ndim == move.type.ndim:
            total = move.run(total)
    return total


def _behind_barriers(operands: Sequence[Leaf]) -> list[Leaf]:
    """Returns the operands behind one barrier for all that vary over the same mapped axes.

    In JAX 0.10.2, the results of a shared barrier vary over the axes of all its operands
    (tests/programs/test_loops.py, "checkpoint_in_shard_map").
    """
    places: dict[frozenset[Any], list[int]] = {}
    for i, x in enumerate(operands):
        places.setdefault(varying_axes(x), []).append(i)
    behind: dict[int, Leaf] = {}
    for alike in places.values():
        together = lax.optimization_barrier([operands[i] for i in alike])
        behind |= zip(alike, together, strict=True)
    return [behind[i] for i in range(len(operands))]


def _parts(jaxpr: Jaxpr, plan: _Plan) -> Iterator[tuple[Index | None, Jaxpr]]:
    """Yields the index of each equation that adds, and between them the other equations, as a closed jaxpr."""
    # 1. Find where each value is read last, which tells the results of a part.
    end = len(jaxpr.eqns)
    last_read: dict[Atom, int] = {}
    for index, equation in enumerate(jaxpr.eqns):
        last_read |= dict.fromkeys(filter(is_variable, equation.invars), index)
    kept = [*jaxpr.outvars, *(x for x, _ in plan.wholes)]
    last_read |= dict.fromkeys(filter(is_variable, kept), end)

    # 2. Collect equations up to one that adds. Leave out those that only lead to results that scans add.
    plain: list[Equation] = []
    for index in range(end + 1):
        if index == end or index in plan.scans or index in plan.calls:
            made = (x for equation in plain for x in equation.outvars)
            results = [x for x in made if last_read.get(x, -1) >= index]
            yield None, program_of(plain, read_by(plain), results)
            if index < end:
                yield index, None
            plain = []
        elif index not in plan.skipped:
            plain.append(jaxpr.eqns[index])


def _names_of(equation: Equation) -> ExitStack:
    """Returns the context in which an equation was traced: its names in a profile, and settings such as its mesh."""
    context = ExitStack()
    if names := str(equation.source_info.name_stack):
        context.enter_context(jax.named_scope(names))
    context.enter_context(context_of(equation))
    return context
