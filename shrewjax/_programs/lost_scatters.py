"""Warnings of gradients that come out of a user's own loop, in which XLA loses sums of scatters (XLA-27).

What it saves: a search for wrong numbers with JAX 0.10.1 to 0.11.2. Numbers do not depend on it. It can be deleted when
pyproject.toml asks for JAX 0.12.

`scatters` cannot mend such a loop, because JAX has traced it already. So `warn_of_lost_scatters` looks where the
gradients came from.
"""

import os
import warnings
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax

from shrewjax._base.mesh import may_be_partitioned
from shrewjax._base.types import Leaf, PyTree
from shrewjax._programs.jaxprs import (
    ADDS,
    COPIES,
    REORDERS,
    SCATTER_ADDS,
    Atom,
    Equation,
    Jaxpr,
    carry_of,
    is_variable,
    is_whole_shard_map,
    jaxpr_of_call,
    jaxprs_in,
    jaxprs_on_operands,
    opened,
)
from shrewjax._programs.scatters import LOSES_SCATTERS

_XLA_PASS = "while-loop-all-reduce-code-motion"


def warn_of_lost_scatters(grads: PyTree) -> None:
    """Warns, once in a process, if XLA may lose parts of these gradients.

    It warns if traced gradients come out of a loop that adds scatters up, in a process with several GPUs whose XLA
    loses them. A program that runs on one of these GPUs makes it warn, too. In `shard_map` nothing is lost, unless XLA
    partitions the program over other axes.
    """
    if _may_lose():
        warn_if_lost(_equations_before(jax.tree.leaves(grads)))


def warn_if_lost(equations: Iterable[Equation]) -> None:
    """Warns, as above, if one of these equations is a loop that adds scatters up, or has such a loop inside."""
    if _may_lose() and any(map(_LostSums().are_in, equations)):
        _warned.append(True)
        warnings.warn(
            "XLA of JAX 0.10.1 to 0.11.2 may lose parts of these gradients on several GPUs. Install JAX 0.12 or "
            f"newer. Or start Python with XLA_FLAGS=--xla_disable_hlo_passes={_XLA_PASS}",
            RuntimeWarning,
            stacklevel=3,
        )


_warned: list[bool] = []


def _may_lose() -> bool:
    if not LOSES_SCATTERS or _warned or _XLA_PASS in os.environ.get("XLA_FLAGS", ""):
        return False
    return jax.default_backend() == "gpu" and may_be_partitioned()


def _equations_before(tracers: list[Leaf]) -> Iterator[Equation]:
    """Yields the equations that lead to these tracers, as JAX records them while it traces."""
    seen: set[int] = set()
    while tracers:
        equation = getattr(tracers.pop(), "parent", None)
        if equation is not None and id(equation) not in seen:
            seen.add(id(equation))
            yield equation
            tracers.extend(equation.in_tracers)


_SUMS = ADDS | COPIES | REORDERS


class _Summands(NamedTuple):
    """The values that a result is a sum of, as far as they are known."""

    has_scatter: bool
    arguments: set[Atom]  # of the jaxpr


class _LostSums:
    """A search for loops that add scatters up. It looks at a jaxpr once, also if several equations run it."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._known: dict[tuple[int, Atom], _Summands] = {}

    def are_in(self, equation: Equation) -> bool:
        """Returns whether an equation is a loop that adds scatters to what it carries, or has such a loop inside."""
        if is_whole_shard_map(equation):  # XLA does not partition the loops inside
            return False
        if self._adds_scatters_up(equation):
            return True
        new_jaxprs = [x for x in map(opened, jaxprs_in(equation)) if id(x) not in self._seen]
        self._seen.update(map(id, new_jaxprs))
        return any(self.are_in(x) for jaxpr in new_jaxprs for x in jaxpr.eqns)

    def _adds_scatters_up(self, equation: Equation) -> bool:
        carry = carry_of(equation)
        if carry is None:
            return False
        (body,) = map(opened, jaxprs_on_operands(equation))
        # The results after the carries are stacks.
        for old, new in zip(body.invars[carry], body.outvars, strict=False):
            found = self._summands(body, new)
            if found.has_scatter and old in found.arguments:
                return True
        return False

    def _summands(self, jaxpr: Jaxpr, result: Atom) -> _Summands:
        """Returns the summands of a result of an open jaxpr."""
        if not is_variable(result):
            return _Summands(False, set())
        if (id(jaxpr), result) not in self._known:
            self._known[id(jaxpr), result] = self._found(jaxpr, result)
        return self._known[id(jaxpr), result]

    def _found(self, jaxpr: Jaxpr, result: Atom) -> _Summands:
        made = {x: equation for equation in jaxpr.eqns for x in equation.outvars}
        waiting, seen, has_scatter, arguments = [result], set(), False, set()
        while waiting:
            x = waiting.pop()
            if not is_variable(x) or x in seen:
                continue
            seen.add(x)
            equation = made.get(x)
            if equation is None:
                arguments.add(x)
                continue
            inner = opened(jaxpr_of_call(equation))
            if equation.primitive.name in SCATTER_ADDS:
                has_scatter = True
                waiting.append(equation.invars[0])  # the array that the scatter adds to
            elif equation.primitive.name in _SUMS:
                waiting.extend(equation.invars)
            elif inner is not None:
                found = self._summands(inner, inner.outvars[equation.outvars.index(x)])
                has_scatter = has_scatter or found.has_scatter
                operands = zip(inner.invars, equation.invars, strict=True)
                waiting.extend(outer for own, outer in operands if own in found.arguments)
        return _Summands(has_scatter, arguments)
