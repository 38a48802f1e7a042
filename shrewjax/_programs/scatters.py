"""Scatters in loops, hidden from the versions of XLA that lose their sums on several GPUs or TPUs (XLA-27).

What it saves: right numbers with JAX 0.10.1 to 0.11.2. With other versions numbers do not depend on it. It can be
deleted when pyproject.toml asks for JAX 0.12, except `unknown_true`, without which scatters are reduced in each trip.

The gradient of a lookup is a scatter. The loop over micro-batches adds scatters up, and so does each loop of a loss
that looks rows up. If XLA knows that a scatter is added, it makes the scatter a part of the loop's sum, and then loses
parts of the sum. `unknown_true` hides this from XLA where the package itself adds, and `hide_scatters` does so in the
loops of a traced function.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.interpreters import mlir

from shrewjax._programs.jaxprs import (
    LOOPS,
    SCATTER_ADDS,
    Equation,
    Jaxpr,
    closed_jaxpr,
    context_of,
    is_jaxpr,
    jaxprs_in,
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

    @cache  # a jaxpr that several equations run is rebuilt once
    def hidden(jaxpr: Jaxpr, in_loop: bool) -> Jaxpr:
        old = opened(jaxpr).eqns
        new = [x for equation in old for x in _hidden_in(equation, in_loop, hidden)]
        if all(x is y for x, y in zip(new, old, strict=False)):
            return jaxpr
        rebuilt = opened(jaxpr).replace(eqns=new)
        return rebuilt if opened(jaxpr) is jaxpr else closed_jaxpr(rebuilt, jaxpr.consts)

    return hidden(jaxpr, False)


def _hidden_in(
    equation: Equation, in_loop: bool, hidden: Callable[[Jaxpr, bool], Jaxpr]
) -> list[Equation]:
    """Returns the equations in the place of one, itself if it has no scatter. `hidden` rebuilds the jaxprs inside."""
    if in_loop and equation.primitive.name in SCATTER_ADDS:
        return _selected(equation)

    def new(x: Any) -> Any:
        return hidden(x, in_loop or equation.primitive.name in LOOPS) if is_jaxpr(x) else x

    if all(new(x) is x for x in jaxprs_in(equation)):
        return [equation]
    return [equation.replace(params=jax.tree.map(new, equation.params, is_leaf=is_jaxpr))]


def _selected(scatter: Equation) -> list[Equation]:
    """Returns the equation of a scatter, and those that select its result."""
    # In its context, because JAX refuses a scatter of another mesh (tests/programs/test_scatters.py, "other_mesh").
    with context_of(scatter):
        kept = lambda x: lax.select(unknown_true(), x, jnp.full_like(x, -0.0))  # noqa: E731
        select: Jaxpr = jax.make_jaxpr(kept)(scatter.outvars[0].aval).jaxpr
    *before, last = select.eqns
    return [scatter.replace(outvars=select.invars), *before, last.replace(outvars=scatter.outvars)]


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


def _lowered(context: Any) -> Any:
    """Returns the lowered value of `unknown_true` for a platform that may have an XLA that loses scatters."""
    hide = (lambda x: x) if _is_for_one_device(context) else lax.optimization_barrier
    return mlir.lower_fun(lambda: hide(jnp.bool_(True)), multiple_results=False)(context)


_known = mlir.lower_fun(lambda: jnp.bool_(True), multiple_results=False)
mlir.register_lowering(_unknown_true, _known)
for _platform in ("cuda", "rocm", "tpu"):
    mlir.register_lowering(_unknown_true, _lowered, platform=_platform)
