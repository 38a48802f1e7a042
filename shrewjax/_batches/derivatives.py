"""A divided program on operands: its results, and its derivatives.

1. Compute what runs once, of parameters, and the data that the rest needs (`plan.once`, `plan.before`).
2. Run a pass of the loops, which returns the frontier, and the gradients by what is free for cotangents of the
   frontier (`divided`).
3. Compute the results from the frontier (`plan.after`).

Do the cotangents depend on the frontier? In a mean over a mask they do not, so they are computed first, and everything
in *one pass*. Otherwise there are two: one for the frontier, and one for the gradients.
"""

import itertools
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shrewjax._base.axes import as_varying, varying_axes
from shrewjax._base.mesh import explicit_axes
from shrewjax._base.types import Function, Leaf, PyTree
from shrewjax._batches.divided import Divided, Frontier, Pass, as_declared
from shrewjax._division.kinds import Step, Var, names_made
from shrewjax._division.micro_batch import function_of_steps
from shrewjax._division.report import described
from shrewjax._numerics.reductions import combined_over
from shrewjax._programs import jaxprs


def run_by_rules(function: Function, *operands: PyTree) -> PyTree:
    """Returns `function(*operands)` as a derivative computes it: a `jax.custom_vjp` may have other results there."""
    return jax.vjp(function, *operands)[0]


class Run:
    """A divided program on operands.

    Attributes:
      free_arguments: the values of the arguments that are free.
      data: all values that are not free, and known before the loops.
      frontier: the names of what the loops return.
    """

    def __init__(self, divided: Divided, operands: Sequence[Leaf]) -> None:
        self.divided, self.plan = divided, divided.plan
        program = divided.program
        given = dict(zip(program.arguments, operands, strict=True))
        self.free_arguments = [given.pop(x) for x in divided.free_arguments]
        known = given | program.constants
        before = names_made(self.plan.before)
        made = _made(self.plan.before, known, before)
        self.data = known | dict(zip(before, made, strict=True))
        self.frontier = Frontier.of(self.plan.frontier, program.has_derivative)
        self._passes = "two passes"

    # Results, and derivatives.

    def value(self, apply: Function = operator.call) -> tuple[list[Leaf], list[Leaf]]:
        """Returns the results, and the frontier. With `run_by_rules`, as for a derivative."""
        free = apply(self._with_once, self.free_arguments)
        _, made = self._pass(self.frontier, free, apply=apply)
        smooth, after = self._after(self.frontier, made, prints=True)
        return apply(after, smooth, free), made

    def value_and_grad(self) -> tuple[list[Leaf], list[Leaf]]:
        """Returns the results, and the gradients of the first one."""
        free, pull_once = jax.vjp(self._with_once, self.free_arguments)
        # 1. Differentiate by those values of the frontier that the first result, the loss, reads. Others would get a
        # cotangent of 0, and 0 times infinity in the loop is NaN.
        names = self.frontier.all
        zeros = [zeros_of(x.aval) for x in names]
        loss = partial(self._loss, self.frontier, free)
        read_by_loss = {*itertools.compress(names, jaxprs.reads(loss, zeros))}
        differentiated = read_by_loss.intersection(self.frontier.smooth)
        frontier = Frontier.of(names, lambda x: x in differentiated)
        # 2. Ask whether the cotangents read the frontier. If not, any frontier gives them, such as zeros, and one pass
        # does. An operation of `after` that prints and computes would print these zeros, so it takes two passes.
        any_values = [zeros_of(x.aval) for x in frontier.all]
        cotangents = partial(self._cotangents_of_loss, frontier, free)
        computes = [x.equation for x in self.plan.after if not x.only_prints]
        prints = any(map(jaxprs.prints, computes))
        is_one_pass = not prints and not any(jaxprs.reads(cotangents, any_values))
        self._passes = "one pass" if is_one_pass else "two passes"
        early = cotangents(any_values) if is_one_pass else None
        grads, made = self._pass(frontier, free, early, apply=run_by_rules)
        # 3. Compute the results, and the gradients by the frontier and by what is free.
        smooth, after = self._after(frontier, made, prints=True)

        def with_first(smooth: list[Leaf], free: list[Leaf]) -> tuple[Leaf, list[Leaf]]:
            results = after(smooth, free)
            return results[0], results

        result, pull, results = jax.vjp(with_first, smooth, free, has_aux=True)
        of_frontier, of_free = pull(jnp.ones_like(result))
        # 4. The second pass.
        if not is_one_pass:
            grads, _ = self._pass(frontier, free, of_frontier, returns_frontier=False)
        return results, self._gradients(pull_once, grads, of_free)

    def cotangents(self, made: list[Leaf], of_results: list[Leaf]) -> list[Leaf]:
        """Returns the cotangents of the free arguments for those of the results. `made` is the frontier."""
        free, pull_once = jax.vjp(self._with_once, self.free_arguments)
        smooth, after = self._after(self.frontier, made)
        _, pull = jax.vjp(after, smooth, free)
        of_frontier, of_free = pull(of_results)
        grads, _ = self._pass(self.frontier, free, of_frontier, returns_frontier=False)
        return self._gradients(pull_once, grads, of_free)

    def _loss(self, frontier: Frontier, free: list[Leaf], made: list[Leaf]) -> Leaf:
        smooth, after = self._after(frontier, made)
        return after(smooth, free)[0]

    def _cotangents_of_loss(self, frontier: Frontier, free: list[Leaf], made: list[Leaf]) -> Any:
        """Returns the cotangents of the frontier for a cotangent 1 of the first result."""
        smooth, after = self._after(frontier, made)
        result, pull = jax.vjp(lambda smooth: after(smooth, free)[0], smooth)
        return pull(jnp.ones_like(result))[0]

    def _gradients(
        self, pull_once: Function, grads: dict[Var, Leaf], of_free: list[Leaf]
    ) -> list[Leaf]:
        """Returns the gradients by the arguments: through the loop, beside it, and through what runs once."""

        def both(x: Var, beside: Leaf) -> Leaf:
            if x not in grads:
                return beside
            return summed_like(grads[x], beside).astype(beside.dtype) + beside

        total = [*map(both, self.divided.free, of_free)]
        return [*map(as_declared, self.divided.free_arguments, pull_once(total)[0])]

    def described(self) -> str:
        """Returns the text of `print_micro_batches`, after a derivative was taken."""
        setting = self.divided.setting
        parts = f"examples in {setting.micro_batches} micro-batches"
        sizes = " and ".join(f"{n} {parts}" for n in setting.sets)
        return described(self.plan, self.divided.fun, sizes, self._passes)

    # The parts.

    def _with_once(self, arguments: list[Leaf]) -> list[Leaf]:
        """Returns the free arguments, and what runs once of them."""
        names = self.divided.free_arguments
        known = self.data | dict(zip(names, arguments, strict=True))
        made = _made(self.plan.once, known, self.divided.free[len(names) :])
        return [*arguments, *made]

    def _pass(
        self, frontier: Frontier, free: list[Leaf], cotangents: PyTree = None, **options: Any
    ) -> tuple[dict[Var, Leaf], list[Leaf]]:
        """Returns the gradients by what is free, and the frontier, of a pass with these cotangents."""
        own = [as_varying(x, self.divided.varying) for x in free]
        known = self.data | dict(zip(self.divided.free, own, strict=True))
        return Pass(self.divided, known, frontier, cotangents, **options).results()

    def _after(
        self, frontier: Frontier, made: list[Leaf], *, prints: bool = False
    ) -> tuple[list[Leaf], Function]:
        """Returns the smooth values of the frontier, and the results as a function of these and of what is free."""
        count = len(frontier.smooth)
        names = *frontier.all, *self.divided.free
        steps = [x for x in self.plan.after if prints or not x.only_prints]

        def results(smooth: list[Leaf], free: list[Leaf]) -> list[Leaf]:
            values = *smooth, *made[count:], *free
            known = self.data | dict(zip(names, values, strict=True))
            return _made(steps, known, self.divided.program.results)

        return made[:count], results


def _made(steps: Sequence[Step], known: dict[Var, Leaf], names: Sequence[Any]) -> Any:
    """Returns what steps make of the whole batch."""
    run = function_of_steps(steps, [*known], names)
    return run(*map(as_declared, known, known.values()))


def summed_like(x: Leaf, like: Leaf) -> Leaf:
    """Returns a sum over those mapped axes over which `x` varies, and `like` does not."""
    axes = tuple(varying_axes(x) - varying_axes(like))
    return combined_over(axes, ["sum"], [x])[0]


def zeros_of(aval: Any) -> Leaf:
    """Returns zeros of a type: placed on an Explicit mesh, and varying over mapped axes, as it says."""
    where = {"out_sharding": aval.sharding} if explicit_axes(aval) else {}
    zeros = jnp.zeros(aval.shape, aval.dtype, **where)
    return as_varying(zeros, tuple(varying_axes(aval)))
