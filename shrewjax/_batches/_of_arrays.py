"""A call as a function of its arrays, for rules of JAX that differentiate it, also by arrays that it closes over.

1. Flatten the arguments. Floating arrays are free leaves, except those with a role: examples, keys, the carry. Other
   arrays of JAX are fixed leaves. All else, such as a number or a function, stays as it is.
2. Trace the call. If `fun` or `weight_fn` closes over traced arrays, these are leaves, too. Their programs then run in
   the place of the functions, because JAX may call a rule after the trace of these arrays has ended.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from shrewjax._base.axes import as_varying
from shrewjax._base.mesh import is_traced
from shrewjax._base.trees import is_gradient, is_zero_tangent
from shrewjax._base.types import AxisNames, Function, KeyPath, Leaf, Place, PyTree
from shrewjax._batches.value_and_grad import Options
from shrewjax._programs.jaxprs import function_of_constants

Arrays = dict[int, jax.Array]
"""Leaves by their numbers."""


class OfArrays(NamedTuple):
    """A call of `fun`. Its leaves are numbered: those of all arguments, then the closed-over ones.

    Attributes:
      roles: arguments of `value_and_grad`.
      leaves: of all arguments, then the traced arrays that `fun` and `weight_fn` close over.
      paths: of the arguments' leaves.
      structure: of the arguments.
      free: the leaves by which there are derivatives.
      fixed: other arrays of JAX: examples, keys, the carry, integers.
      constants: all arrays that `fun` and `weight_fn` close over.
      programs: the programs of `fun` and `weight_fn` by the types of their arguments, or None if they close over no
        traced array.
    """

    fun: Function
    roles: dict[str, Any]
    options: Options
    leaves: list[Leaf]
    paths: list[KeyPath]
    structure: Any
    free: list[int]
    fixed: list[int]
    constants: list[Leaf]
    programs: dict[Any, Any] | None

    @property
    def sum_over(self) -> AxisNames:
        return self.options.axes

    @property
    def num_given(self) -> int:
        """Returns the number of the arguments' leaves. Those of a higher number are closed over."""
        return self.structure.num_leaves

    @property
    def has_carry(self) -> bool:
        return self.roles.get("carry_argnum") is not None

    def place(self, at: int) -> Place:
        """Returns how the argument came that has this leaf."""
        return _place_of_leaf(self.paths[at])

    def operands(self) -> list[list[Leaf]]:
        """Returns the arrays, for a rule that takes the free ones and the fixed ones."""
        return [[self.leaves[at] for at in numbers] for numbers in (self.free, self.fixed)]

    def by_number(self, free: list[Any], fixed: list[Any]) -> dict[int, Any]:
        return dict(zip(self.free + self.fixed, free + fixed, strict=True))

    def arguments(
        self, arrays: Arrays, absent: list[int]
    ) -> tuple[list[PyTree], dict[str, PyTree], list[jax.Array]]:
        """Returns the arguments with these arrays as leaves, by position and by keyword, and the closed-over arrays.

        None stands in the place of the absent ones, because `sum_over` would pass them to all devices twice.
        """
        leaves = _replaced(self.leaves, arrays | dict.fromkeys(absent))
        args, kwargs = self.structure.unflatten(leaves[: self.num_given])
        return args, kwargs, leaves[self.num_given :]

    def with_params(
        self,
        function: Function,
        numbers: list[int],
        closed_over: list[jax.Array],
        *args: PyTree,
        **kwargs: PyTree,
    ) -> PyTree:
        """Returns the result of `function`, with those parameters, which come last by position, in their places.

        If it closes over arrays, its program runs, with `closed_over` as arguments.
        """
        *others, params = args
        # 1. Put the parameters in their places.
        leaves = [*self.structure.flatten_up_to((tuple(others), kwargs)), *closed_over]
        leaves = _replaced(leaves, {at: params[at] for at in numbers})
        given, closed_over = leaves[: self.num_given], leaves[self.num_given :]
        run = functools.partial(self._of_leaves, function, given)
        if self.programs is None:
            return run({})
        # 2. Find the program. Types of arrays are the same, whichever of them a caller differentiates.
        arrays = {at: x for at, x in enumerate(given) if isinstance(x, jax.Array)}
        inside = [at for at in self.free if at < len(given)]
        arrays |= {at: as_varying(given[at], self.sum_over) for at in inside}
        types = function is self.options.weight_fn, *((x.shape, x.dtype) for x in arrays.values())
        if types not in self.programs:
            self.programs[types] = function_of_constants(run, arrays)
        program, constants = self.programs[types]
        if not is_traced(constants):
            return run({})
        # 3. Run it, with these arrays in the place of those that it was traced with.
        pairs = zip(self.leaves[self.num_given :], closed_over, strict=True)
        by_id = {id(x): y for x, y in pairs}
        return program([by_id[id(x)] if is_traced(x) else x for x in constants], arrays)

    def _of_leaves(self, function: Function, leaves: list[Leaf], arrays: Arrays) -> PyTree:
        """Returns the result of `function`, with the arguments' leaves, of which `arrays` replace some."""
        given = _replaced(leaves, arrays)
        args, kwargs = self.structure.unflatten(given)
        # A dict or a list may change, because it is a copy that no caller sees.
        objects = jax.tree.leaves(
            (args, kwargs), is_leaf=lambda x: not isinstance(x, dict | list | tuple)
        )
        returned = function(*args, **kwargs)
        now = jax.tree.leaves(objects)
        if len(now) != len(given) or not all(map(operator.is_, now, given)):
            raise ValueError(
                "fun must not change its arguments. Return the new values as aux. In Flax NNX, call the function of "
                "this name in shrewjax.flax"
            )
        return returned


def _replaced(leaves: list[Leaf], by_number: dict[int, Any]) -> list[Leaf]:
    return [by_number.get(at, x) for at, x in enumerate(leaves)]


def call_of_arrays(
    fun: Function,
    options: Options,
    roles: dict[str, Any],
    args: tuple[PyTree, ...],
    kwargs: dict[str, PyTree],
    value: Callable[[OfArrays, Arrays], PyTree],
) -> OfArrays:
    """Returns a call as a function of its arrays. `value` is traced to find those that its functions close over."""
    # 1. The leaves by which there are derivatives, and the other arrays.
    leaves, structure = jax.tree.flatten((args, kwargs))
    paths = [path for path, _ in jax.tree.leaves_with_path((args, kwargs))]
    carry = roles.get("carry_argnum")
    with_role = {*roles["rng_argnums"], *roles["batch_argnums"], carry}
    have_role = [_place_of_leaf(path) in with_role for path in paths]
    free, fixed = _leaf_numbers(leaves, have_role)
    call = OfArrays(fun, roles, options, leaves, paths, structure, free, fixed, [], None)

    # 2. Traced arrays that the functions close over.
    arrays = call.by_number(*call.operands())

    def constants(call: OfArrays) -> list[Leaf]:
        return [*function_of_constants(functools.partial(value, call), arrays)[1]]

    closed_over = constants(call)
    if any(type(jax.typeof(x)).__name__ == "AbstractRef" for x in closed_over):
        raise ValueError(
            "fun must not close over a mutable array (jax.new_ref). Return its new values as aux or rows"
        )
    outer = [x for x in closed_over if is_traced(x)]
    if outer:
        call = call._replace(leaves=leaves + outer, programs={})
        constants(call)  # makes the programs
    free, fixed = _leaf_numbers(call.leaves, [*have_role, *[False] * len(outer)])
    return call._replace(free=free, fixed=fixed, constants=closed_over)


def _leaf_numbers(leaves: list[Leaf], have_role: list[bool]) -> tuple[list[int], list[int]]:
    """Returns which leaves are free and fixed. An argument with a role, such as examples, is not free."""
    free, fixed = [], []
    for at, (x, has_role) in enumerate(zip(leaves, have_role, strict=True)):
        # NumPy's, too, because the value drops those micro-batches that a derivative by them would drop.
        if isinstance(x, jax.Array | np.ndarray) and is_gradient(x) and not has_role:
            free.append(at)
        elif isinstance(x, jax.Array):
            fixed.append(at)
    return free, fixed


def perturbed_among(tangents: Arrays) -> Arrays:
    """Returns the tangents that are not known to be zeros: those of leaves that a caller differentiates."""
    return {at: t for at, t in tangents.items() if not is_zero_tangent(t)}


def _place_of_leaf(path: KeyPath) -> Place:
    """Returns how the argument came that has a leaf of `(args, kwargs)`."""
    at: Place = path[1].idx if path[0].idx == 0 else path[1].key
    return at
