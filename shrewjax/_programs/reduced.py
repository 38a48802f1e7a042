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
from typing import TypeAlias

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

Marks: TypeAlias = frozenset[
    tuple[int, Hashable]
]  # a parameter's number, and an axis along which it is `reduced`


def axes_of_examples(examples: PyTree, params: PyTree) -> MeshAxes:
    """Returns the Explicit mesh axes over which examples are sharded, along which parameters may be `reduced`.

    Empty if this JAX has no `jax.reshard`, inside `shard_map` and `jax.vmap`, and without jit, because JAX does not
    know these types there (tests/programs/test_reduced.py, "where_jax_does_not_know_these_types").
    """
    if (
        not hasattr(jax, "reshard")
        or mapped_axes()[0]
        or is_jit_disabled()
        or are_passes_disabled()
        or is_in_vmap((examples, params))
    ):
        return frozenset()
    return frozenset().union(
        *(partition_axes(x) & explicit_axes(x) for x in jax.tree.leaves(examples))
    )


def marked(loss: Function, params: PyTree, examples: PyTree, axes: MeshAxes) -> PyTree:
    """Returns the parameters of a loss, `reduced` along the axes over which they are not sharded, where they may be.

    `axes` are those of the examples.
    """
    leaves, structure = jax.tree.flatten(params)
    jaxpr = jax.make_jaxpr(loss)(params).jaxpr
    # No scalar is marked. The gradient of one that the loss does not use is a literal 0.0 without such a type, and an
    # error where it is added (tests/programs/test_reduced.py, "does_not_use"). Others meet no matrix product. No
    # complex array is marked, because XLA's partitioner crashes on their sums (the same file, "complex").
    wanted = [
        frozenset((at, a) for a in axes - partition_axes(x) - reduced_axes(x))
        if jnp.ndim(x) and not jnp.iscomplexobj(x)
        else frozenset()
        for at, x in enumerate(leaves)
    ]
    example = next(x for x in jax.tree.leaves(examples) if axes & partition_axes(x))
    search = _Search()
    for marks in search.run(jaxpr, wanted):
        search.refused |= marks

    def mark(x: Leaf, marks: Marks) -> Leaf:
        along = frozenset(a for _, a in marks - search.refused)
        return retyped(x, reduced=reduced_axes(x) | along, like=example) if along else x

    return jax.tree.unflatten(structure, map(mark, leaves, wanted))


# Operations whose result is `reduced` as their first operand is.
_KEEPS = {
    "convert_element_type",
    "transpose",
    "copy",
    "slice",
    "squeeze",
    "dynamic_slice",
    "gather",
    "reduce_precision",
}


class _Search:
    """A search for the operations that a `reduced` array meets, by a jaxpr that was traced without that type."""

    def __init__(self) -> None:
        self.refused: Marks = frozenset()

    def run(self, jaxpr: Jaxpr, given: Sequence[Marks]) -> list[Marks]:
        """Returns the marks of a jaxpr's results, if its arguments have the given ones."""
        known = dict(zip(jaxpr.invars, given, strict=True))

        def read(atoms: Sequence[Atom]) -> list[Marks]:
            return [known.get(x, frozenset()) if is_variable(x) else frozenset() for x in atoms]

        for equation in jaxpr.eqns:
            operands = read(equation.invars)
            if any(operands):
                known.update(zip(equation.outvars, self._results(equation, operands), strict=True))
        return read(jaxpr.outvars)

    def _results(self, equation: Equation, operands: list[Marks]) -> list[Marks]:
        name = equation.primitive.name
        scan = scan_of(equation)
        if scan is not None:
            whole = scan.constants + scan.carries
            results = self.run(opened(scan.body), operands)
            self._refuse(*operands[scan.constants : whole], *results[: scan.carries])
            return [*[Marks()] * scan.carries, *results[scan.carries :]]
        jaxprs = [] if name in LOOPS else [*map(opened, jaxprs_on_operands(equation))]
        if jaxprs:
            of_each = [self.run(x, operands[len(operands) - len(x.invars) :]) for x in jaxprs]
            return [frozenset().union(*marks) for marks in zip(*of_each, strict=True)]
        along = partition_axes(equation.outvars[0].aval)
        if name == "dot_general" and not all(operands):
            # The product with an array that is sharded over the axis is sharded over it, too.
            self._refuse(
                *(frozenset(mark for mark in marks if mark[1] not in along) for marks in operands)
            )
            return [frozenset()]
        if name in _KEEPS and not any(operands[1:]):
            return [frozenset(mark for mark in operands[0] if mark[1] not in along)]
        self._refuse(*operands)
        return [frozenset()] * len(equation.outvars)

    def _refuse(self, *marks: Marks) -> None:
        self.refused = self.refused.union(*marks)
