"""A traced function of a whole batch, divided, and one pass of its loops over micro-batches.

Here *free* are the values by which loops are differentiated: arguments, and what runs once of them. `Divided` plans a
program for the free ones. A `Pass` runs the loops:

1. Find what micro-batches read: parameters, whole values, and rows, which come in pieces, with the examples first.
2. Run the loops. All micro-batches of one loop have as many examples. With `sum_over`, the loops are mapped over the
   mesh, and nothing else is.
3. In a micro-batch, run the tasks of the plan on its examples. With cotangents of the frontier, differentiate them.
4. Put sums and rows in their places.

A loop is that of `accumulated_value_and_grad`. Its aux are sums, and stacks of rows.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from shrewjax._base.axes import as_varying, varying_axes
from shrewjax._base.mesh import on_each_device
from shrewjax._base.types import AxisNames, DType, Function, Leaf
from shrewjax._batches.accumulated import sums_over_turns
from shrewjax._division.kinds import SAME, Fact, Program, Var, is_inexact, names_made
from shrewjax._division.micro_batch import Env, MicroBatch
from shrewjax._division.plan import Plan
from shrewjax._division.report import check_share
from shrewjax._division.rows import Rows, Turns, joined, turns
from shrewjax._programs.jaxprs import Jaxpr, shape_of
from shrewjax._windows.window import Window


class Setting(NamedTuple):
    micro_batches: int
    sets: tuple[int, ...]  # the sizes of the sets of examples
    accumulator_dtype: DType
    axes: AxisNames  # of `sum_over`, over which the loop is mapped
    devices: int  # along these axes, or 1


Flags: TypeAlias = Sequence[tuple[bool, bool]]


class Divided:
    """A program, divided. `flags` says of each argument whether it holds examples, and is free."""

    def __init__(self, fun: Function, jaxpr: Jaxpr, setting: Setting, flags: Flags) -> None:
        self.fun, self.setting = fun, setting
        facts = [
            Fact(Rows(0, shape_of(x)[:1]) if is_row else SAME, is_free)
            for x, (is_row, is_free) in zip(jaxpr.in_avals, flags, strict=True)
        ]
        self.program = Program(jaxpr, facts, setting.sets)
        self.plan = Plan(self.program)
        check_share(self.plan, fun)
        are_free = [is_free for _, is_free in flags]
        self.free_arguments = [*itertools.compress(self.program.arguments, are_free)]
        self.free: list[Var] = [*self.free_arguments, *names_made(self.plan.once)]
        # The mapped axes over which all of the frontier varies. The loop's values are cast to vary over them, so that
        # JAX sums no gradient inside of it.
        found = [varying_axes(x.aval) for x in self.plan.frontier]
        of_all = frozenset.intersection(*found) if found else ()
        self.varying = tuple(sorted(of_all, key=str))


class _Cotangent(NamedTuple):
    """The name of a cotangent, beside those of values."""

    of: Var


class _Positions(NamedTuple):
    """The name of the numbers of all examples of a set."""

    of: int


Key: TypeAlias = tuple[Any, Rows | None]
"""A value, by its name, and which slice of it."""


class Frontier(NamedTuple):
    """The names of what the loops return: first the values that are differentiated."""

    smooth: list[Var]
    others: list[Var]

    @classmethod
    def of(cls, names: Sequence[Var], is_smooth: Callable[[Var], bool]) -> "Frontier":
        smooth = [*filter(is_smooth, names)]
        return cls(smooth, [x for x in names if x not in smooth])

    @property
    def all(self) -> list[Var]:
        return [*self.smooth, *self.others]


class Pass:
    """One pass of the loops.

    Attributes:
      returned: the frontier, or nothing.
      params: the free values that are whole, by name. Gradients by them are sums.
      rows: the names of the free values that are rows; none without gradients. Gradients by them are rows, too.
      whole, sliced: the other arrays that tasks read, by name and slice.
      apply: how the first of two passes calls the tasks, such as `run_by_rules`.
    """

    def __init__(
        self,
        divided: Divided,
        known: dict[Var, Leaf],
        frontier: Frontier,
        cotangents: list[Leaf] | None = None,
        *,
        returns_frontier: bool = True,
        apply: Function = operator.call,
    ) -> None:
        self.divided, self.program, self.apply = divided, divided.program, apply
        self.frontier, self.has_gradients = frontier, cotangents is not None
        self.returned = frontier.all if returns_frontier else []
        # 1. Find what tasks read because no task makes it: neither that slice nor the whole.
        tasks = divided.plan.loop
        made = {key for task in tasks for key in task.results()}
        every = [key for task in tasks for key in task.reads()]
        reads = [key for key in every if made.isdisjoint({key, (key[0], None)})]
        # 2. Free values that are whole are parameters, if there are gradients. All else is an array.
        slice_of = self.program.slice
        free = divided.free if self.has_gradients else []
        whole_free = {x for x in free if slice_of(x) is None}
        self.params = {x: known[x] for x, _ in reads if x in whole_free}
        others = [key for key in reads if key[0] not in whole_free]
        arrays: dict[Key, Leaf] = {key: known[key[0]] for key in others}
        # 3. Add the cotangents, and the numbers of the examples. Without cotangents, nothing is added for them.
        for x, y in zip(frontier.smooth, cotangents or [], strict=self.has_gradients):
            arrays[_Cotangent(x), slice_of(x)] = as_varying(y, divided.varying)
        for s in divided.setting.sets:
            arrays[_Positions(s), Rows(0, (s,))] = jnp.arange(s, dtype=jnp.int32)
        # 4. Part what each micro-batch reads whole from what it reads in slices.
        self.whole = {key: x for key, x in arrays.items() if key[1] is None}
        self.sliced: dict[tuple[Any, Rows], Leaf] = {
            (name, rows): x for (name, rows), x in arrays.items() if rows is not None
        }
        self.rows = [x for x in free if (x, slice_of(x)) in self.sliced]

    def results(self) -> tuple[dict[Var, Leaf], list[Leaf]]:
        """Returns the gradients by what is free, and the frontier."""
        # 1. Run the loops, on each device if asked for.
        pieces = [rows.apart(x, rows.whole) for (_, rows), x in self.sliced.items()]
        arrays = pieces, ([*self.whole.values()], [*self.params.values()])
        run, axes = self._of_device, self.divided.setting.axes
        if axes:
            run = partial(on_each_device, run, axes, returns_parts=(False, True, False))
        made = run(*arrays)
        # 2. Put sums and rows in their places. They come as `_micro_batch` orders them: frontier, then gradients by
        # rows.
        next_sum, next_rows, of_params = map(iter, made)

        def placed(x: Var) -> Leaf:
            rows = self.program.slice(x)
            if rows is None:
                return next(next_sum).astype(x.aval.dtype)
            return rows.together(next(next_rows), shape_of(x.aval), rows.whole)

        frontier = [*map(placed, self.returned)]
        by_rows = {x: placed(x) for x in self.rows}
        return dict(zip(self.params, of_params, strict=True)) | by_rows, frontier

    def _of_device(
        self, pieces: list[list[Leaf]], others: tuple[list[Leaf], list[Leaf]]
    ) -> tuple[list[Leaf], list[list[Leaf]], list[Leaf]]:
        """Runs the loops of a device. Returns sums, pieces of rows, and gradients by parameters."""
        whole, params = others
        env: Env = dict(zip(self.whole, whole, strict=True))
        of_rows = dict(zip(self.sliced, pieces, strict=True))
        setting = self.divided.setting
        counts = {s: s // setting.devices for s in setting.sets}
        all_turns = turns(counts, setting.micro_batches)
        loops = [self._loop(x, env, of_rows, params) for x in all_turns]
        totals, stacks = zip(*loops, strict=True)
        # Loops differ in the number of examples. Add their sums, without a 0 before them, and join their stacks.
        sums, grads = jax.tree.map(lambda *x: sum(x[1:], start=x[0]), *totals)
        return sums, jax.tree.map(lambda *x: joined(x), *stacks), grads

    def _loop(
        self, its: Turns, env: Env, pieces: dict[Any, list[Leaf]], params: list[Leaf]
    ) -> tuple[Any, Any]:
        """Runs the micro-batches that have as many examples. Returns sums and gradients, and stacks."""
        setting, varying = self.divided.setting, self.divided.varying

        # 1. Put the micro-batches of this loop along a second axis.
        def pieces_of_loop(xs: list[Leaf], rows: Rows) -> list[Leaf]:
            pairs = zip(xs, rows.sets_of_pieces(), strict=True)
            return [its.of(x, s, setting.micro_batches) for x, s in pairs]

        by_turn = {key: pieces_of_loop(xs, key[1]) for key, xs in pieces.items()}

        def turn(i: jax.Array, params: list[Leaf]) -> Any:
            # 2. Take this micro-batch's slices, and the numbers of its examples apart from them.
            def slice_of_turn(name: Any, rows: Rows) -> Leaf:
                taken = [_at(i, x) for x in by_turn[name, rows]]
                shape = rows.shape(self.sliced[name, rows].shape, its.sizes)
                return rows.together(taken, shape, its.sizes)

            of_params = {(x, None): y for x, y in zip(self.params, params, strict=True)}
            values = env | {key: slice_of_turn(*key) for key in by_turn} | of_params
            names = {s: (_Positions(s), Rows(0, (s,))) for s in setting.sets}
            positions = {s: values.pop(name) for s, name in names.items()}
            # 3. Run it. The second of two passes returns no frontier, and must not print again.
            prints = bool(self.returned)
            batch = MicroBatch(its.sizes, positions, varying, setting.axes, prints)
            declared = {key: as_declared(key[0], y) for key, y in values.items()}
            return self._micro_batch(batch, declared)

        dtype, count = setting.accumulator_dtype, its.last - its.first
        window = Window(reduction="sum", accumulator_dtype=dtype, sum_over=setting.axes)
        (_, (sums, stacks)), grads = sums_over_turns(turn, params, count, window)
        return (sums, grads), stacks

    def _micro_batch(self, batch: MicroBatch, env: Env) -> Any:
        """Returns what a loop adds up and stacks: `((loss, (sums, rows)), gradients by parameters)`."""
        program = self.program
        # 1. Run the tasks, as a function of what is free. With gradients, `keys` follow `params` and `rows`, because
        # step 3 parts them in this order. Without, both are empty. All free floats are then arguments, so that
        # `run_by_rules` runs the forward rule of a `jax.custom_vjp`.
        if self.has_gradients:
            keys = [(x, program.slice(x)) for x in (*self.params, *self.rows)]
        else:
            free = {x for x in self.divided.free if is_inexact(x.aval)}
            keys = [key for key in env if key[0] in free]
        is_first = batch.positions[self.divided.setting.sets[0]][0] == 0

        def of_free(values: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
            its = env | dict(zip(keys, values, strict=True))
            batch.run(self.divided.plan.loop, its)

            def found(x: Var) -> Leaf:
                y = batch.read(its, x, program.slice(x))
                if program.is_divided(x):
                    return y
                # A step that makes rows may also return a value that is the same for all. The first micro-batch alone
                # adds it.
                return jnp.where(is_first, y, jnp.zeros_like(y))

            smooth = [*map(found, self.frontier.smooth)]
            return smooth, [*map(found, self.frontier.others)]

        # 2. Differentiate it.
        values = [env[key] for key in keys]
        if self.has_gradients:
            smooth, pull, others = jax.vjp(of_free, values, has_aux=True)
            names = self.frontier.smooth
            (grads,) = pull([env[_Cotangent(x), program.slice(x)] for x in names])
        else:
            (smooth, others), grads = self.apply(of_free, values), []
        # 3. Part what is added up from what is stacked.
        of_params, of_rows = grads[: len(self.params)], grads[len(self.params) :]
        made = [*smooth, *others] if self.returned else []
        frontier = [*zip(self.returned, made, strict=True)]
        sums = [y for x, y in frontier if program.slice(x) is None]
        pairs = [*frontier, *zip(self.rows, of_rows, strict=True)]
        of_slices = [(program.slice(x), y) for x, y in pairs]
        stacks = [rows.apart(y, batch.sizes) for rows, y in of_slices if rows]
        # The loop needs a loss, whose axes `_own_axes` reads. It is 0, because `sums` has the results.
        loss = as_varying(jnp.float32(0), self.divided.varying)
        return (loss, (sums, stacks)), of_params


def _at(i: jax.Array, x: Leaf) -> jax.Array:
    """Returns the part of micro-batch i, which the second axis numbers."""
    return lax.dynamic_index_in_dim(x, i, 1, keepdims=False)


def as_declared(x: Any, value: Leaf) -> Leaf:
    """Returns a value in its own dtype, which a second derivative gives a wider one."""
    is_own = not hasattr(x, "aval") or value.dtype == x.aval.dtype
    return value if is_own else value.astype(x.aval.dtype)
