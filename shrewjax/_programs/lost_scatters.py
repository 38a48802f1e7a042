"""Warnings of gradients that come out of a user's own loop, in which XLA loses sums of scatters (XLA-27).

What it saves: a search for wrong numbers with JAX 0.10.1 to 0.11.2. Numbers do not depend on it. It can be deleted when
pyproject.toml asks for JAX 0.12.

`scatters` cannot mend such a loop, because JAX has traced it already. So `warn_of_lost_scatters` looks where the
gradients came from.
"""

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, TypeAlias

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
    warn_if_lost(_equations_before(jax.tree.leaves(grads)))


def warn_if_lost(equations: Iterable[Equation]) -> None:
    """Warns, as above, if one of these equations is a loop that adds scatters up, or has such a loop inside."""
    if _may_lose() and _add_scatters_up(equations):
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


Summands: TypeAlias = list[set[Atom]]
"""The summands of each result of a jaxpr, as far as they are known: its arguments, and `_SCATTER` for any scatter."""

_SUMS = ADDS | COPIES | REORDERS
_SCATTER = "a scatter"


def _add_scatters_up(equations: Iterable[Equation]) -> bool:
    """Returns whether an equation is a loop that adds scatters to what it carries, or has such a loop inside.

    It looks at a jaxpr once, also if several equations run it.
    """

    def is_lost(equation: Equation) -> bool:
        if is_whole_shard_map(equation):  # XLA does not partition the loops inside
            return False
        carry = carry_of(equation)
        if carry is not None:
            (body,) = map(opened, jaxprs_on_operands(equation))
            # The results after the carries are stacks.
            pairs = zip(body.invars[carry], summands_of(body), strict=False)
            if any({old, _SCATTER} <= new for old, new in pairs):
                return True
        return any(is_lost_in(opened(x)) for x in jaxprs_in(equation))

    @cache
    def is_lost_in(jaxpr: Jaxpr) -> bool:
        return any(map(is_lost, jaxpr.eqns))

    @cache
    def summands_of(jaxpr: Jaxpr) -> Summands:
        return _summands(jaxpr, summands_of)

    return any(map(is_lost, equations))


def _summands(jaxpr: Jaxpr, summands_of: Callable[[Jaxpr], Summands]) -> Summands:
    """Returns the summands of an open jaxpr. `summands_of` returns those of a jaxpr inside it."""
    found = {x: {x} for x in jaxpr.invars}

    def known(x: Atom) -> set[Atom]:
        return found.get(x, set()) if is_variable(x) else set()

    for equation in jaxpr.eqns:
        name, inner = equation.primitive.name, opened(jaxpr_of_call(equation))
        given = [*map(known, equation.invars)]
        results: Summands = []
        if name in SCATTER_ADDS:
            # The first operand is the array that it adds to.
            results = [given[0] | {_SCATTER}]
        elif name in _SUMS:
            results = [set().union(*given)]
        elif inner is not None:
            outside: Any = dict(zip(inner.invars, given, strict=True))
            outside[_SCATTER] = {_SCATTER}
            inside = summands_of(inner)
            results = [set().union(*map(outside.get, own)) for own in inside]
        found |= zip(equation.outvars, results, strict=False)
    return [*map(known, jaxpr.outvars)]
