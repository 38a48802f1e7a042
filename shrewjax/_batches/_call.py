"""The arguments of one call in one order, with their roles, and their names in messages."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shrewjax._base.types import DType, Function, KeyPath, Leaf, Place, PyTree

Part = Literal["micro-batch", "device"]


def label(place: Place) -> str:
    """Returns an argument's name in messages."""
    return f"argument {place}" if isinstance(place, int) else f"keyword argument {place}"


class Call(NamedTuple):
    """The arguments of one call in one order, those by position first. Roles have their numbers in this order."""

    places: tuple[Place, ...]
    values: tuple[PyTree, ...]
    roles: dict[str, tuple[int, ...]]
    parts: int  # the number of micro-batches or devices, among which the examples are divided
    part: Part

    def label(self, at: int) -> str:
        return label(self.places[at])

    def name(self, at: int, path: KeyPath) -> str:
        return self.label(at) + jax.tree_util.keystr(path)

    def leaves(self, at: int) -> list[tuple[KeyPath, Leaf]]:
        return jax.tree.leaves_with_path(self.values[at])

    def whole(self) -> list[int]:
        """Returns the arguments without one of these four roles."""
        names = "argnums", "rng_argnums", "carry_argnum", "batch_argnums"
        with_role = {at for name in names for at in self.roles.get(name, ())}
        return [at for at in range(len(self.values)) if at not in with_role]

    def keys_and_examples(self) -> dict[str, tuple[Place, ...]]:
        """Returns two roles as a caller writes them."""
        names = "rng_argnums", "batch_argnums"
        return {name: tuple(self.places[at] for at in self.roles[name]) for name in names}

    def in_order(self, function: Function) -> Function:
        """Returns `function` of arguments in this order. It gets them as they came, by position or by keyword."""
        names = [at for at in self.places if isinstance(at, str)]
        count = len(self.places) - len(names)

        def of_values(*values: PyTree) -> PyTree:
            return function(*values[:count], **dict(zip(names, values[count:], strict=True)))

        return of_values

    def as_role(self, name: str, *numbers: int) -> str:
        """Returns what a caller writes for a role of these arguments, such as `batch_argnums=(1, 'y')`."""
        places = tuple(self.places[at] for at in sorted({*numbers}))
        return f"{name}={(places[0] if len(places) == 1 else places)!r}"


def is_key(x: Leaf) -> bool:
    """Returns whether a leaf is a PRNG key, or several, or looks like a raw one."""
    dtype: DType = getattr(x, "dtype", np.object_)
    is_typed: bool = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    return is_typed or (dtype == np.uint32 and np.shape(x) in ((2,), (4,)))
