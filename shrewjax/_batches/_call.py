"""The arguments of one call in one order, with their roles, and their names in messages."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shrewjax._base.types import DType, KeyPath, Leaf, Place, PyTree


def label(place: Place) -> str:
    """Returns an argument's name in messages."""
    return f"argument {place}" if isinstance(place, int) else f"keyword argument {place}"


class Call(NamedTuple):
    """The arguments of one call in one order, those by position first. Roles have their numbers in this order."""

    places: tuple[Place, ...]
    values: tuple[PyTree, ...]
    roles: dict[str, tuple[int, ...]]
    steps: int

    def label(self, at: int) -> str:
        return label(self.places[at])

    def name(self, at: int, path: KeyPath) -> str:
        return self.label(at) + jax.tree_util.keystr(path)

    def leaves(self, at: int) -> list[tuple[KeyPath, Leaf]]:
        return jax.tree.leaves_with_path(self.values[at])

    def whole(self) -> list[int]:
        """Returns the arguments without a role."""
        with_role = {at for role in self.roles.values() for at in role}
        return [at for at in range(len(self.values)) if at not in with_role]

    def as_role(self, name: str, *numbers: int) -> str:
        """Returns what a caller writes for a role of these arguments, such as `batch_argnums=(1, 'y')`."""
        places = tuple(self.places[at] for at in sorted({*numbers}))
        return f"{name}={(places[0] if len(places) == 1 else places)!r}"


def is_key(x: Leaf) -> bool:
    """Returns whether a leaf is a PRNG key, or several, or looks like a raw one."""
    dtype: DType = getattr(x, "dtype", np.object_)
    is_typed: bool = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return is_typed or (dtype == np.uint32 and np.shape(x) in ((2,), (4,)))
