"""The types that signatures name and JAX does not have.

Most are `Any` under a name that says what is meant, because a type checker cannot know what a pytree holds. A checked
type stands where one exists.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias, TypeVar

import jax
import optax

# Trees.

PyTree: TypeAlias = Any
"""Any pytree: parameters, gradients, the arguments of a loss, or what it returns."""

ArrayTree: TypeAlias = optax.Updates
"""A pytree of arrays alone."""

Params: TypeAlias = optax.Params | None
"""A pytree of parameters, or None if `update` got none."""

Tree = TypeVar("Tree")
"""A pytree that is returned as the type that was passed in. Its floating and complex leaves are returned as JAX
arrays, others as they are."""

Leaf: TypeAlias = Any
"""A leaf of a pytree: an array or its type, a number, or None."""

KeyPath: TypeAlias = tuple[Any, ...]
"""The way to a leaf: the keys of the nodes above it."""

# States.

AnyState: TypeAlias = Any
"""The state of any transformation."""

State = TypeVar("State")
"""A state that is returned as the type that was passed in."""

Metrics: TypeAlias = dict[str, Any]
"""Scalars of a state, by their names."""

# Functions, and what users pass.

Function: TypeAlias = Callable[..., Any]
"""A user's function, such as a loss."""

ExtraArgs: TypeAlias = Mapping[str, Any]
"""Arguments of `update` by keyword."""

Argument: TypeAlias = Any
"""An argument as a user passed it, which nobody has checked."""

Number: TypeAlias = jax.typing.ArrayLike
"""A number as a user passed it: Python's, NumPy's or an array."""

Place: TypeAlias = int | str
"""How an argument of a user's function came: its position, or its name if it came by keyword."""

DType: TypeAlias = Any
"""A dtype, or what NumPy takes for one. None is the default."""

Scalar: TypeAlias = float | jax.Array
"""A checked scalar: a Python float, or a float32 or float64 array, whose value is not checked. Its shape is (), or one
number for each device's row of a window."""

Flag: TypeAlias = bool | jax.Array
"""A condition: a Python bool if it is known while tracing."""

# Mapped axes.

AxisName: TypeAlias = Hashable | tuple[Hashable, ...]
"""Names of mapped axes, as users pass them in `sum_over`, and to windows in `sharded_over`."""

AxisNames: TypeAlias = tuple[Hashable, ...]
"""Checked names of mapped axes."""

ShardedOver: TypeAlias = AxisName | jax.P | Callable[[str, Leaf], Argument] | None
"""`sharded_over` as users pass it: mapped axes, a PartitionSpec, or a function of a leaf's name and the leaf."""

MeshAxes: TypeAlias = frozenset[Any]
"""Names of axes of a mesh."""

Axes: TypeAlias = AxisNames | None
"""Checked names of mapped axes. None means that they are read from types."""
