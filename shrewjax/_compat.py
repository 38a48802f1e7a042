"""JAX's spellings that differ between the versions this package supports, from 0.8.0 on.

Each function names the JAX version that brought today's spelling. Delete the older spelling when that version is the
oldest supported one.
"""

from collections.abc import Hashable
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh


def context_mesh() -> Any:
    """Returns the mesh of `jax.set_mesh`, or an empty mesh if none is set. `jax.sharding.get_mesh`: JAX 0.9.1."""
    if hasattr(jax.sharding, "get_mesh"):
        return jax.sharding.get_mesh()
    from jax._src.mesh import get_concrete_mesh

    return get_concrete_mesh() or Mesh((), ())


def as_varying(x: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Returns `x` with a type that also varies over these mapped axes. `jax.lax.pcast`: JAX 0.9.0."""
    spelling: Any = lax
    return spelling.pcast(x, axes, to="varying") if hasattr(lax, "pcast") else spelling.pvary(x, axes)


def varying_axes(aval: Any) -> frozenset[Hashable]:
    """Returns the mapped axes over which a type varies. `manual_axis_type`: JAX 0.10.0.

    A `jax.ShapeDtypeStruct` that was made without mapped axes has None there.
    """
    if hasattr(aval, "manual_axis_type"):
        return aval.manual_axis_type.varying if aval.manual_axis_type else frozenset()
    return getattr(aval, "vma", None) or frozenset()
