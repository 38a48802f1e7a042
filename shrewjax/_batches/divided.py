"""A traced function of a whole batch, divided, on its arguments.

Values that are differentiated are *free*. `Divided` plans a program for the free ones. A `Run` is one call of it:

1. Compute what runs once, of parameters, and the data that the rest needs (`plan.once`, `plan.before`).
2. Run the loops, which return the frontier, and the gradients by what is free for cotangents of the frontier.
3. Compute the results from the frontier (`plan.after`).

Do the cotangents depend on the frontier? In a mean over a mask they do not, so they are computed first, and everything
in *one pass*. Otherwise there are two: one for the frontier, and one for the gradients.

The loop is that of `accumulated_value_and_grad`. Its examples are the numbers of the micro-batches, its aux are sums,
and stacks of rows. With `sum_over`, it alone is mapped over the mesh.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from shrewjax._base.axes import as_varying, varying_axes
from shrewjax._base.mesh import explicit_axes, on_each_device
from shrewjax._base.types import AxisNames, DType, Function, Leaf, PyTree
from shrewjax._batches.accumulated import Options, of_options
from shrewjax._division.kinds import SAME, Fact, Program, Step, Var, is_inexact, made_by
from shrewjax._division.micro_batch import Env, MicroBatch, function_of_steps
from shrewjax._division.plan import Plan
from shrewjax._division.report import check_share, described
from shrewjax._division.rows import Rows, Turns, joined, turns
from shrewjax._numerics.reductions import combined_over
from shrewjax._programs import jaxprs
from shrewjax._programs.jaxprs import Jaxpr, shape_of

Key: TypeAlias = tuple[Any, Rows | None]
"""A value, by its name, and which slice of it."""


class Setting(NamedTuple):
    micro_batches: int
    sets: tuple[int, ...]  # the sizes of the sets of examples
    accumulator_dtype: DType
    axes: AxisNames  # of `sum_over`, over which the loop is mapped
    devices: int  # along these axes, or 1


class Divided:
    """A program, divided for the arguments that are free. `are_rows` says which arguments hold examples."""

    def __init__(
        self,
        fun: Function,
        jaxpr: Jaxpr,
        setting: Setting,
        are_rows: Sequence[bool],
        are_free: Sequence[bool],
    ) -> None:
        self.fun, self.setting = fun, setting
        sizes = [shape_of(x)[:1] for x in jaxpr.in_avals]
        kinds = [Rows(0, n) if is_row else SAME for n, is_row in zip(sizes, are_rows, strict=True)]
        self.program = Program(jaxpr, [*map(Fact, kinds, are_free)], setting.sets)
        self.plan = Plan(self.program)
        check_share(self.plan, fun)
        once = made_by(self.plan.once)
        self.arguments = [x for x, y in zip(self.program.arguments, are_free, strict=True) if y]
        self.free: list[Var] = [*self.arguments, *once]
        # If types are tracked, all of the loop varies over these axes. So JAX does not sum gradients inside of it.
        found = [varying_axes(x.aval) for x in self.plan.frontier]
        self.varying = tuple(sorted(frozenset.intersection(*found), key=str)) if found else ()

    def on(self, operands: Sequence[Leaf]) -> "Run":
        return Run(self, operands)


class _Cotangent(NamedTuple):
    """The name of a cotangent, beside those of values."""

    of: Var


Slice: TypeAlias = tuple[Any, Rows]


class _Inputs(NamedTuple):
    """What micro-batches read: parameters, whole values, and pieces of rows, whose first axis numbers examples."""

    params: dict[Var, Leaf]
    whole: dict[Key, Leaf]
    pieces: dict[Slice, list[Leaf]]
    shapes: dict[Slice, tuple[int, ...]]  # of the arrays that the pieces are of


def _run(function: Function, *operands: PyTree) -> PyTree:
    return function(*operands)


def run_by_rules(function: Function, *operands: PyTree) -> PyTree:
    """Returns `function(*operands)`, where functions that bring a derivative run as in a derivative, by their rules."""
    return jax.vjp(function, *operands)[0]


class Run:
    """A divided program on operands.

    Attributes:
      arguments: the values of the arguments that are free.
      smooth: the names of the frontier's values that are differentiated.
      others: the names of its other values.
    """

    def __init__(self, divided: Divided, operands: Sequence[Leaf]) -> None:
        self.divided, self.program, self.plan = divided, divided.program, divided.plan
        given = dict(zip(self.program.arguments, operands, strict=True))
        self.arguments = [given.pop(x) for x in divided.arguments]
        known = given | self.program.constants
        names = made_by(self.plan.before)
        self.data = known | dict(zip(names, _made(self.plan.before, known, names), strict=True))
        self._passes = "two passes"
        self.smooth = [*filter(self.program.has_derivative, self.plan.frontier)]
        self.others = [x for x in self.plan.frontier if x not in self.smooth]

    # Results, and derivatives.

    def value(self, run: Function = _run) -> tuple[list[Leaf], list[Leaf]]:
        """Returns the results, and the frontier. With `run_by_rules`, as for a derivative."""
        free = run(self._free, self.arguments)
        _, frontier = self._loops(free, None, returns_frontier=True, run=run)
        smooth, after = self._after(frontier, prints=True)
        return run(after, smooth, free), frontier

    def value_and_grad(self) -> tuple[list[Leaf], list[Leaf]]:
        """Returns the results, and the gradients of the first one."""
        free, pull_once = jax.vjp(self._free, self.arguments)
        # 1. Differentiate what the result depends on. A cotangent of zero could make a NaN of other values.
        zeros = [_zeros(x.aval) for x in (*self.smooth, *self.others)]
        used = jaxprs.reads(lambda values: self._results(values, free)[0], zeros)
        names = [*self.smooth, *self.others]
        self.smooth = [x for x, y in zip(self.smooth, used, strict=False) if y]
        self.others = [x for x in names if x not in self.smooth]
        # 2. One pass, if cotangents do not depend on the frontier. Otherwise the first of two passes.
        zeros = [_zeros(x.aval) for x in (*self.smooth, *self.others)]
        cotangents = partial(self._cotangents, free)
        prints = any(jaxprs.prints(x.equation) and not x.only_prints for x in self.plan.after)
        is_one_pass = not prints and not any(jaxprs.reads(cotangents, zeros))
        self._passes = "one pass" if is_one_pass else "two passes"
        of_frontier = cotangents(zeros) if is_one_pass else None
        grads, frontier = self._loops(free, of_frontier, returns_frontier=True, run=run_by_rules)
        # 3. Compute the results, and the gradients by the frontier and by what is free.
        smooth, after = self._after(frontier, prints=True)

        def first(smooth: list[Leaf], free: list[Leaf]) -> tuple[Leaf, list[Leaf]]:
            results = after(smooth, free)
            return results[0], results

        result, pull, results = jax.vjp(first, smooth, free, has_aux=True)
        of_frontier, of_free = pull(jnp.ones_like(result))
        # 4. The second pass.
        if not is_one_pass:
            grads, _ = self._loops(free, of_frontier, returns_frontier=False)
        return results, self._gradients(pull_once, grads, of_free)

    def cotangents(self, frontier: list[Leaf], of_results: list[Leaf]) -> list[Leaf]:
        """Returns the cotangents of the free arguments for those of the results."""
        free, pull_once = jax.vjp(self._free, self.arguments)
        smooth, after = self._after(frontier)
        _, pull = jax.vjp(after, smooth, free)
        of_frontier, of_free = pull(of_results)
        grads, _ = self._loops(free, of_frontier, returns_frontier=False)
        return self._gradients(pull_once, grads, of_free)

    def _cotangents(self, free: list[Leaf], frontier: list[Leaf]) -> list[Leaf]:
        """Returns the cotangents of the frontier for a cotangent 1 of the first result."""
        smooth, after = self._after(frontier)
        result, pull = jax.vjp(lambda smooth: after(smooth, free)[0], smooth)
        return pull(jnp.ones_like(result))[0]

    def _gradients(
        self, pull_once: Function, grads: dict[Var, Leaf], of_free: list[Leaf]
    ) -> list[Leaf]:
        """Returns the gradients by the arguments: through the loop, beside it, and through what runs once."""
        pairs = zip(self.divided.free, of_free, strict=True)
        total = [
            summed_like(grads[x], y).astype(y.dtype) + y if x in grads else y for x, y in pairs
        ]
        return [*map(_as_declared, self.divided.arguments, pull_once(total)[0])]

    def described(self) -> str:
        """Returns the text of `print_micro_batches`, after a derivative was taken."""
        setting = self.divided.setting
        sizes = [f"{n} examples in {setting.micro_batches} micro-batches" for n in setting.sets]
        return described(self.plan, self.divided.fun, " and ".join(sizes), self._passes)

    # Around the loops.

    def _free(self, arguments: list[Leaf]) -> list[Leaf]:
        """Returns the free arguments, and what runs once of them."""
        names = self.divided.arguments
        known = self.data | dict(zip(names, arguments, strict=True))
        return [*arguments, *_made(self.plan.once, known, self.divided.free[len(names) :])]

    def _after(self, frontier: list[Leaf], *, prints: bool = False) -> tuple[list[Leaf], Function]:
        """Returns the values of `smooth`, and the results as a function of these and of what is free."""
        smooth, others = frontier[: len(self.smooth)], frontier[len(self.smooth) :]
        return smooth, lambda smooth, free: self._results([*smooth, *others], free, prints=prints)

    def _results(
        self, frontier: list[Leaf], free: list[Leaf], *, prints: bool = False
    ) -> list[Leaf]:
        names = *self.smooth, *self.others, *self.divided.free
        known = self.data | dict(zip(names, (*frontier, *free), strict=True))
        steps = [x for x in self.plan.after if prints or not x.only_prints]
        return _made(steps, known, self.program.results)

    # The loops.

    def _loops(
        self,
        free: list[Leaf],
        cotangents: list[Leaf] | None,
        *,
        returns_frontier: bool,
        run: Function = _run,
    ) -> tuple[dict[Var, Leaf], list[Leaf]]:
        """Returns the gradients by what is free, for these cotangents of `smooth`, and the frontier."""
        program, axes = self.program, self.divided.setting.axes
        inputs = self._inputs(dict(zip(self.divided.free, free, strict=True)), cotangents)
        frontier = [*self.smooth, *self.others] if returns_frontier else []
        # Gradients by examples are rows.
        rows = [
            x
            for x in self.divided.free
            if cotangents is not None and (x, program.slice(x)) in inputs.pieces
        ]
        # 1. Run them, on each device if asked for.
        turns_of = partial(self._turns, inputs, frontier, rows, cotangents is not None, run)
        arrays = [*inputs.pieces.values()], ([*inputs.whole.values()], [*inputs.params.values()])
        if axes:
            parts = False, True, False
            sums, pieces, grads = on_each_device(turns_of, axes, *arrays, returns_parts=parts)
        else:
            sums, pieces, grads = turns_of(*arrays)
        # 2. Put sums and rows in their places.
        of_sums, of_rows = iter(sums), iter(pieces)

        def made(x: Var) -> Leaf:
            its = program.slice(x)
            if its is None:
                return next(of_sums).astype(x.aval.dtype)
            return its.together(next(of_rows), shape_of(x.aval), its.whole)

        values = {x: made(x) for x in frontier}
        by_param = dict(zip(inputs.params, grads, strict=True))
        return by_param | {x: made(x) for x in rows}, [*values.values()]

    def _inputs(self, free: dict[Var, Leaf], cotangents: list[Leaf] | None) -> _Inputs:
        program, sets = self.program, self.divided.setting.sets
        known = self.data | {x: as_varying(y, self.divided.varying) for x, y in free.items()}
        is_param = lambda x: cotangents is not None and x in free and program.slice(x) is None  # noqa: E731
        tasks = self.plan.loop
        made = {key for y in tasks for key in y.results()}
        reads = [
            key
            for y in tasks
            for key in y.reads()
            if key not in made and (key[0], None) not in made
        ]
        arrays: dict[Key, Leaf] = {(x, r): known[x] for x, r in reads if not is_param(x)}
        params = {x: known[x] for x, _ in reads if is_param(x)}
        for x, y in zip(self.smooth, cotangents or [], strict=cotangents is not None):
            arrays[_Cotangent(x), program.slice(x)] = as_varying(y, self.divided.varying)
        arrays |= {(s, Rows(0, (s,))): jnp.arange(s, dtype=jnp.int32) for s in sets}
        whole = {key: x for key, x in arrays.items() if key[1] is None}
        sliced = {(name, r): x for (name, r), x in arrays.items() if r is not None}
        pieces = {(name, r): r.apart(x, r.whole) for (name, r), x in sliced.items()}
        return _Inputs(params, whole, pieces, {key: x.shape for key, x in sliced.items()})

    def _turns(
        self,
        inputs: _Inputs,
        frontier: list[Var],
        rows: list[Var],
        has_gradients: bool,
        run_forward: Function,
        pieces: list[list[Leaf]],
        others: tuple[list[Leaf], list[Leaf]],
    ) -> tuple[list[Leaf], list[list[Leaf]], list[Leaf]]:
        """Runs all micro-batches, of this device. Returns sums, pieces of rows, and gradients by parameters."""
        whole, params = others
        setting = self.divided.setting
        known: Env = dict(zip(inputs.whole, whole, strict=True))
        of_pieces = dict(zip(inputs.pieces, pieces, strict=True))
        counts = {s: s // setting.devices for s in setting.sets}

        def of_turns(its: Turns) -> tuple[Any, Any]:
            """Runs the micro-batches that have as many examples."""
            by_turn = {
                key: [
                    its.of(x, s, setting.micro_batches)
                    for x, s in zip(xs, key[1].sets_of_pieces(), strict=True)
                ]
                for key, xs in of_pieces.items()
            }

            def of_micro_batch(number: jax.Array, params: list[Leaf]) -> Any:
                take = lambda x: lax.dynamic_index_in_dim(x, number[0], 1, keepdims=False)  # noqa: E731
                own = {
                    key: key[1].together(
                        [*map(take, xs)], key[1].shape(inputs.shapes[key], its.sizes), its.sizes
                    )
                    for key, xs in by_turn.items()
                }
                batch = MicroBatch(
                    its.sizes,
                    {s: own.pop((s, Rows(0, (s,)))) for s in setting.sets},
                    self.divided.varying,
                    setting.axes,
                    prints=bool(frontier),
                )
                its_params = {(x, None): y for x, y in zip(inputs.params, params, strict=True)}
                env = {
                    key: _as_declared(key[0], y) for key, y in (known | own | its_params).items()
                }
                return self._of_micro_batch(
                    batch, env, [*inputs.params], rows, frontier, has_gradients, run_forward
                )

            count = its.last - its.first
            options = Options(
                count,
                has_aux=True,
                aux_reduction=("sum", "stack"),
                reduction="sum",
                accumulator_dtype=setting.accumulator_dtype,
                sum_over=setting.axes,
            )
            run = of_options(of_micro_batch, options, 1, batch_argnums=(0,), has_gradients=True)
            (_, (sums, stacks)), grads = run(jnp.arange(count), params)
            return (sums, grads), stacks

        totals, stacks = zip(*map(of_turns, turns(counts, setting.micro_batches)), strict=True)
        sums, grads = jax.tree.map(lambda *x: sum(x[1:], start=x[0]), *totals)
        return sums, jax.tree.map(lambda *x: joined(x), *stacks), grads

    def _of_micro_batch(
        self,
        batch: MicroBatch,
        env: Env,
        params: list[Var],
        rows: list[Var],
        frontier: list[Var],
        has_gradients: bool,
        run_forward: Function,
    ) -> Any:
        """Returns what the loop adds up and stacks, in the form of `((loss, aux), gradients)`."""
        program = self.program
        free = {x for x in self.divided.free if is_inexact(x.aval)}
        by_name = [(x, program.slice(x)) for x in (*params, *rows)]
        keys = by_name if has_gradients else [key for key in env if key[0] in free]
        is_first = batch.positions[self.divided.setting.sets[0]][0] == 0

        def of_free(values: list[Leaf]) -> tuple[list[Leaf], list[Leaf]]:
            its = env | dict(zip(keys, values, strict=True))
            batch.run(self.plan.loop, its)

            def found(x: Var) -> Leaf:
                y = batch.read(its, x, program.slice(x))
                # A sum over micro-batches adds a value that is the same in all of them once.
                return y if program.is_divided(x) else jnp.where(is_first, y, jnp.zeros_like(y))

            return [*map(found, self.smooth)], [*map(found, self.others)]

        values = [env[key] for key in keys]
        if has_gradients:
            smooth, pull, others = jax.vjp(of_free, values, has_aux=True)
            (grads,) = pull([env[_Cotangent(x), program.slice(x)] for x in self.smooth])
        else:
            (smooth, others), grads = run_forward(of_free, values), []
        made = [*zip(frontier, [*smooth, *others], strict=False)]
        sums = [y for x, y in made if program.slice(x) is None]
        its_rows = [*made, *zip(rows, grads[len(params) :], strict=False)]
        pairs = [(program.slice(x), y) for x, y in its_rows]
        stacks = [its.apart(y, batch.sizes) for its, y in pairs if its]
        loss = as_varying(jnp.float32(0), self.divided.varying)
        return (loss, (sums, stacks)), grads[: len(params)]


def _made(steps: Sequence[Step], known: dict[Var, Leaf], names: Sequence[Any]) -> list[Leaf]:
    """Returns what steps make of the whole batch."""
    run = function_of_steps(steps, [*known], names)
    return run(*map(_as_declared, known, known.values()))


def _as_declared(x: Any, value: Leaf) -> Leaf:
    """Returns a value in its own dtype, which a second derivative gives a wider one."""
    return (
        value
        if not hasattr(x, "aval") or value.dtype == x.aval.dtype
        else value.astype(x.aval.dtype)
    )


def summed_like(x: Leaf, like: Leaf) -> Leaf:
    """Returns a sum over those mapped axes over which `x` varies, and `like` does not."""
    axes = tuple(varying_axes(x) - varying_axes(like))
    return combined_over(axes, ["sum"], [x])[0]


def _zeros(aval: Any) -> Leaf:
    """Returns zeros of a type: placed on an Explicit mesh, and varying over mapped axes, as it says."""
    where = {"out_sharding": aval.sharding} if explicit_axes(aval) else {}
    return as_varying(jnp.zeros(aval.shape, aval.dtype, **where), tuple(varying_axes(aval)))
