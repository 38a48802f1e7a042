"""Parameters on an Explicit mesh whose gradients, by their types, are summed over devices once after all micro-batches.

What it saves: the sum over devices in each micro-batch, and in each trip of a scan. Numbers do not depend on it. It can
be deleted when JAX gives gradients such types itself; no version does so far.

If examples are sharded over a mesh axis and a parameter is not, each device has a part of the gradient. JAX sums these
parts in each micro-batch, and in each trip of a scan over layers. If the parameter has the type `reduced` along that
axis, JAX leaves the parts apart: the gradient has the type `unreduced`.

Only matrix products and lookups take a `reduced` array beside one that is sharded over the same axis. A bias that is
added to activations would raise an error, so it is not marked, and its gradient is summed in each micro-batch. `marked`
follows each parameter through the loss, and marks those that meet no other operation.
"""

from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from shrewjax._base.mesh import explicit_axes, mapped_axes, partition_axes, reduced_axes, retyped
from shrewjax._base.types import Function, Leaf, MeshAxes, PyTree
from shrewjax._programs.jaxprs import (
    LOOPS,
    Atom,
    Equation,
    Jaxpr,
    is_in_vmap,
    is_jit_disabled,
    is_variable,
    jaxprs_on_operands,
    opened,
    scan_of,
)
from shrewjax._programs.switch import are_passes_disabled

Marks: TypeAlias = frozenset[tuple[int, Hashable]]
"""Pairs of a parameter's number and an axis along which it is `reduced`."""


def axes_of_examples(examples: PyTree, params: PyTree) -> MeshAxes:
    """Returns the Explicit mesh axes over which examples are sharded, along which parameters may be `reduced`.

    Empty if this JAX has no `jax.reshard`, inside `shard_map` and `jax.vmap`, and without jit, because JAX does not
    know these types there (tests/programs/test_reduced.py, "where_jax_does_not_know_these_types").
    """
    is_off = is_jit_disabled() or are_passes_disabled() or not hasattr(jax, "reshard")
    if is_off or mapped_axes()[0] or is_in_vmap((examples, params)):
        return frozenset()
    of_each = (partition_axes(x) & explicit_axes(x) for x in jax.tree.leaves(examples))
    return frozenset().union(*of_each)


def marked(loss: Function, params: PyTree, examples: PyTree, axes: MeshAxes) -> PyTree:
    """Returns the parameters of a loss, `reduced` along the axes over which they are not sharded, where they may be.

    `axes` are those of the examples.
    """
    # 1. Mark all parameters that could be reduced later.
    leaves, structure = jax.tree.flatten(params)
    wanted: list[Marks] = [frozenset()] * len(leaves)
    for at, x in enumerate(leaves):
        # No scalar is marked. The gradient of one that the loss does not use is a literal 0.0 without such a type, and
        # an error where it is added (tests/programs/test_reduced.py, "does_not_use"). Others meet no matrix product. No
        # complex array is marked, because XLA's partitioner crashes on their sums (the same file, "complex").
        if jnp.ndim(x) and not jnp.iscomplexobj(x):
            wanted[at] = frozenset((at, a) for a in axes - partition_axes(x) - reduced_axes(x))

    # 2. Follow the marks through the loss. Those that reach its result are refused, too.
    walk = _Walk()
    walk.refuse(*walk.through(jax.make_jaxpr(loss)(params).jaxpr, wanted))

    # 3. Give the type to the parameters that keep a mark.
    example = next(x for x in jax.tree.leaves(examples) if axes & partition_axes(x))

    def mark(x: Leaf, marks: Marks) -> Leaf:
        along = frozenset(a for _, a in marks - walk.refused)
        return retyped(x, reduced=reduced_axes(x) | along, like=example) if along else x

    return jax.tree.unflatten(structure, map(mark, leaves, wanted))


# Operations whose result is `reduced` as their first operand is.
_KEEPS = {"copy", "dynamic_slice", "gather", "slice", "squeeze", "transpose"}
_KEEPS |= {"convert_element_type", "reduce_precision"}


class _Walk:
    """The way of marks through a jaxpr that was traced without that type, and the marks that an operation refuses."""

    def __init__(self) -> None:
        self.refused: Marks = frozenset()
        self._known: dict[Any, list[Marks]] = {}

    def refuse(self, *marks: Marks) -> None:
        self.refused = self.refused.union(*marks)

    def through(self, jaxpr: Jaxpr, given: Sequence[Marks]) -> list[Marks]:
        """Returns the marks of an open jaxpr's results, if its arguments have the given ones."""
        key = id(jaxpr), *given
        if key not in self._known:  # calls of one function with the same marks
            self._known[key] = self._found(jaxpr, given)
        return self._known[key]

    def _found(self, jaxpr: Jaxpr, given: Sequence[Marks]) -> list[Marks]:
        known = dict(zip(jaxpr.invars, given, strict=True))

        def read(atoms: Sequence[Atom]) -> list[Marks]:
            return [known.get(x, Marks()) if is_variable(x) else Marks() for x in atoms]

        for equation in jaxpr.eqns:
            operands = read(equation.invars)
            if any(operands):
                known.update(zip(equation.outvars, self._results(equation, operands), strict=True))
        return read(jaxpr.outvars)

    def _results(self, equation: Equation, operands: list[Marks]) -> list[Marks]:
        name = equation.primitive.name
        # 1. A scan: its carry has to keep one type.
        scan = scan_of(equation)
        if scan is not None:
            whole = scan.constants + scan.carries
            results = self.through(opened(scan.body), operands)
            self.refuse(*operands[scan.constants : whole], *results[: scan.carries])
            return [*[Marks()] * scan.carries, *results[scan.carries :]]
        # 2. A call or a conditional.
        jaxprs = [] if name in LOOPS else [*map(opened, jaxprs_on_operands(equation))]
        if jaxprs:
            of_each = [self.through(x, operands[len(operands) - len(x.invars) :]) for x in jaxprs]
            return [frozenset().union(*marks) for marks in zip(*of_each, strict=True)]
        # 3. A product with an array that is sharded over the axis: it is sharded over it, too.
        along = partition_axes(equation.outvars[0].aval)
        if name == "dot_general" and not all(operands):
            self.refuse(*(_beside(along, marks) for marks in operands))
            return [Marks()]
        # 4. An operation that keeps the type, or any other one.
        if name in _KEEPS and not any(operands[1:]):
            return [_beside(along, operands[0])]
        self.refuse(*operands)
        return [Marks()] * len(equation.outvars)


def _beside(axes: MeshAxes, marks: Marks) -> Marks:
    return frozenset(mark for mark in marks if mark[1] not in axes)
