"""Scatters in loops, hidden from the versions of XLA that lose their sums on several GPUs or TPUs (XLA-27).

What it saves: right numbers with JAX 0.10.1 to 0.11.2. With other versions numbers do not depend on it. It can be
deleted when pyproject.toml asks for JAX 0.12, except `unknown_true`, without which scatters are reduced in each trip.

The gradient of a lookup is a scatter. The loop over micro-batches adds scatters up, and so does each loop of a loss
that looks rows up. If XLA knows that a scatter is added, it makes the scatter a part of the loop's sum, and then loses
parts of the sum. `unknown_true` hides this from XLA where the package itself adds, and `hide_scatters` does so in the
loops of a traced function.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import mlir

from shrewjax._programs.jaxprs import (
    LOOPS,
    SCATTER_ADDS,
    Atom,
    Equation,
    Jaxpr,
    closed_jaxpr,
    context_of,
    is_jaxpr,
    is_variable,
    opened,
)
from shrewjax._programs.switch import naming_the_switch

# Only in these versions scatters of the loss are hidden, and lost ones warned of.
LOSES_SCATTERS = (0, 10, 1) <= jax.__version_info__[:3] <= (0, 11, 2)


def unknown_true() -> jax.Array:
    """Returns True. In a program for several GPUs or TPUs, it is a value that XLA does not know.

    A loop over micro-batches selects by it what it adds. Without it, XLA of JAX 0.10.1 to 0.11.2 loses sums of scatters
    (XLA-27), and other versions reduce them in each trip (tests/devices/test_embeddings_compiled.py).
    """
    return _unknown_true.bind()


@naming_the_switch()
def hide_scatters(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a closed jaxpr whose loops select the result of each scatter by `unknown_true`.

    It is the jaxpr itself if there is no scatter in a loop. It also looks into the jaxprs of calls, loops and
    conditionals.
    """
    return _Hiding().of(jaxpr, in_loop=False)


class _Hiding:
    """A walk through a jaxpr and those inside it. One that several equations run is rebuilt once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bool], tuple[Jaxpr, Jaxpr]] = {}

    def of(self, jaxpr: Jaxpr, in_loop: bool) -> Jaxpr:
        """Returns an open or closed jaxpr with its scatters hidden, itself if it has none."""
        key = id(jaxpr), in_loop
        if key not in self._known:
            # Kept with the jaxpr, because its id is free for others once it is gone.
            self._known[key] = jaxpr, self._rebuilt(jaxpr, in_loop)
        return self._known[key][1]

    def _rebuilt(self, jaxpr: Jaxpr, in_loop: bool) -> Jaxpr:
        old = opened(jaxpr).eqns
        new = [x for equation in old for x in self._equations(equation, in_loop)]
        if all(x is y for x, y in zip(new, old, strict=False)):
            return jaxpr
        rebuilt = opened(jaxpr).replace(eqns=new)
        return rebuilt if opened(jaxpr) is jaxpr else closed_jaxpr(rebuilt, jaxpr.consts)

    def _equations(self, equation: Equation, in_loop: bool) -> list[Equation]:
        if in_loop and equation.primitive.name in SCATTER_ADDS:
            return _selected(equation)
        in_loop = in_loop or equation.primitive.name in LOOPS
        params = {name: self._param(x, in_loop) for name, x in equation.params.items()}
        is_same = all(params[name] is x for name, x in equation.params.items())
        return [equation if is_same else equation.replace(params=params)]

    def _param(self, value: Any, in_loop: bool) -> Any:
        if is_jaxpr(value):
            return self.of(value, in_loop)
        if isinstance(value, tuple) and any(map(is_jaxpr, value)):
            new = tuple(self._param(x, in_loop) for x in value)
            if all(x is y for x, y in zip(new, value, strict=True)):
                return value
            # `custom_linear_solve` has a named one.
            return type(value)._make(new) if hasattr(value, "_make") else new
        return value


def _selected(scatter: Equation) -> list[Equation]:
    """Returns the equation of a scatter, and those that select its result."""
    (result,) = scatter.outvars
    hidden = core.Var(result.aval)
    # In its context, because JAX refuses a scatter of another mesh (tests/programs/test_scatters.py, "other_mesh").
    with context_of(scatter):
        kept = lambda x: lax.select(unknown_true(), x, jnp.full_like(x, -0.0))  # noqa: E731
        select: Jaxpr = jax.make_jaxpr(kept)(result.aval).jaxpr
    places = {select.invars[0]: hidden, select.outvars[0]: result}

    def placed(atoms: Sequence[Atom]) -> list[Atom]:
        return [places.get(x, x) if is_variable(x) else x for x in atoms]

    return [
        scatter.replace(outvars=[hidden]),
        *(x.replace(invars=placed(x.invars), outvars=placed(x.outvars)) for x in select.eqns),
    ]


_unknown_true = core.Primitive("unknown_true")
_unknown_true.def_impl(lambda: jnp.bool_(True))
_unknown_true.def_abstract_eval(lambda: jax.core.ShapedArray((), jnp.dtype(bool)))


def _is_for_one_device(context: Any) -> bool:
    """Returns whether a program is for one device. If JAX does not tell, it may be for several.

    `axis_context` is no public name of JAX (tests/programs/test_scatters.py, "one_device").
    """
    axes = getattr(context.module_context, "axis_context", None)
    mesh = getattr(axes, "mesh", None)
    return (getattr(axes, "num_devices", None) if mesh is None else mesh.size) == 1


def _lowered(context: Any, *, hides: bool) -> Any:
    """Returns the lowered value of `unknown_true`. `hides`: the platform may have an XLA that loses scatters."""
    is_known = not hides or _is_for_one_device(context)
    value = lambda: jnp.bool_(True) if is_known else lax.optimization_barrier(jnp.bool_(True))  # noqa: E731
    return mlir.lower_fun(value, multiple_results=False)(context)


mlir.register_lowering(_unknown_true, partial(_lowered, hides=False))
for _platform in ("cuda", "rocm", "tpu"):
    mlir.register_lowering(_unknown_true, partial(_lowered, hides=True), platform=_platform)
