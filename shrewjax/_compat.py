"""JAX's spellings that differ between the versions this package supports, from 0.8.0 on.

Each function says which version brought today's spelling: the other one can go when that is the oldest supported.
"""

from collections.abc import Hashable
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh


def context_mesh() -> Any:
    """Returns the mesh of `jax.set_mesh`, an empty one if there is none. `jax.sharding.get_mesh`: from JAX 0.9.1 on."""
    if hasattr(jax.sharding, "get_mesh"):
        return jax.sharding.get_mesh()
    from jax._src.mesh import get_concrete_mesh

    return get_concrete_mesh() or Mesh((), ())


def as_varying(x: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Returns x as varying over these mapped axes too. `jax.lax.pcast`: from JAX 0.9.0 on."""
    spelling: Any = lax
    return spelling.pcast(x, axes, to="varying") if hasattr(lax, "pcast") else spelling.pvary(x, axes)


def varying_axes(aval: Any) -> frozenset[Hashable]:
    """Returns the mapped axes over which a type varies. `manual_axis_type`: from JAX 0.10.0 on.

    A shape that says nothing of axes, as `jax.ShapeDtypeStruct` may, has None.
    """
    if hasattr(aval, "manual_axis_type"):
        return aval.manual_axis_type.varying if aval.manual_axis_type else frozenset()
    return getattr(aval, "vma", None) or frozenset()
