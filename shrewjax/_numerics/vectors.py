"""Numbers of leaves and units, such as norms and scales: joined in few vectors, and cut from them again.

Arithmetic on joined numbers is compiled once, not once a leaf. To cut a vector must cost no kernel for each leaf, and
must not repeat the arithmetic that made it.
"""

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax._base.axes import UnitDims
from shrewjax._base.branches import run_if
from shrewjax._base.mesh import explicit_axes
from shrewjax._base.types import Leaf, PyTree

Groups = tuple[tuple[int, ...], ...]
"""The places of leaves whose units' numbers are joined in one vector, so that their arithmetic is compiled once."""


def join(per_leaf: Sequence[PyTree], groups: Groups) -> list[PyTree]:
    """Returns a vector of the numbers of each group's units. A leaf alone keeps its shape, unless it is ()."""

    def joined(*xs: jax.Array) -> jax.Array:
        if len(xs) == 1 and xs[0].ndim:
            return xs[0]
        return jnp.concatenate([lax.reshape(x, (x.size,)) for x in xs])

    return [jax.tree.map(joined, *(per_leaf[i] for i in group)) for group in groups]


def split(
    numbers: Sequence[PyTree], groups: Groups, shapes: Sequence[tuple[int, ...]]
) -> list[PyTree]:
    """Returns the numbers leaf by leaf: the inverse of `join`."""
    per_leaf: list[PyTree] = [None] * len(shapes)
    for group, of_group in zip(groups, numbers, strict=True):
        parts, structure = jax.tree.flatten(of_group)
        sizes = tuple(math.prod(shapes[i]) for i in group)
        of_leaves = pieces(parts, sizes) if len(group) > 1 else [parts]
        for i, of_leaf in zip(group, of_leaves, strict=True):
            shaped = [x.reshape(shapes[i]) for x in of_leaf]
            per_leaf[i] = jax.tree.unflatten(structure, shaped)
    return per_leaf


def shape_of_units(leaf: Leaf, dims: UnitDims) -> tuple[int, ...]:
    return tuple(leaf.shape[a] for a in dims)


def broadcast_to_leaf(of_units: jax.Array, leaf: Leaf, dims: UnitDims) -> jax.Array:
    if not dims:
        return of_units
    return lax.expand_dims(of_units, [a for a in range(leaf.ndim) if a not in dims])


@partial(jax.jit, static_argnums=1, inline=True)  # XLA-21
def pieces(vectors: Sequence[jax.Array], sizes: tuple[int, ...]) -> list[list[jax.Array]]:
    """Returns consecutive pieces, of these sizes, of vectors of one shape and dtype: for each size, one of each vector.

    The vectors may also be matrices, whose rows are cut.
    """
    if not sizes:
        return []
    starts = np.cumsum((0, *sizes[:-1]), dtype=np.uint32)

    def by_operand(vectors: Sequence[jax.Array]) -> list[list[jax.Array]]:
        # Stacked, because each cut is a kernel.
        stack = _computed_once(jnp.stack(vectors))
        each = zip(_in_pairs(starts), sizes, strict=True)
        return [list(_first_piece_of_two(stack, pair, size)) for pair, size in each]

    def by_number(vectors: Sequence[jax.Array]) -> list[list[jax.Array]]:
        # `lax.slice_in_dim`, because tracing `x[start:stop]` takes several times as long, for the same program.
        cuts = [(a, a + n) for a, n in zip(starts.tolist(), sizes, strict=True)]
        return [[lax.slice_in_dim(x, a, b) for x in vectors] for a, b in cuts]

    def in_a_kernel(vectors: Sequence[jax.Array]) -> list[list[jax.Array]]:
        return jax.tree.map(_in_a_kernel, by_number(vectors))

    # If vmap maps models on an Explicit mesh, JAX 0.10.2 refuses operands that are constants of a branch, as those of
    # `by_operand` are (tests/devices/test_models_on_devices.py).
    on_cpu = by_number if explicit_axes(vectors[0]) else by_operand
    return lax.platform_dependent(
        vectors, cpu=on_cpu, cuda=in_a_kernel, rocm=in_a_kernel, default=by_number
    )


def scalars(vector: jax.Array) -> list[jax.Array]:
    """Returns the elements of a vector as scalars, or the rows of a matrix as vectors."""
    return [x.reshape(x.shape[1:]) for (x,) in pieces([vector], (1,) * len(vector))]


def _in_pairs(places: np.ndarray) -> np.ndarray:
    """Returns each place beside another one, for a kernel that gets both and reads only at the first.

    XLA-30: leaves share a kernel only if the place is an operand, because a constant would make a kernel for each
    place. XLA turns an operand of one number into a constant, but not a vector of two different ones
    (tests/numerics/test_compile_size.py).
    """
    return np.stack([places, np.roll(places, -1)], axis=1)


@partial(jax.jit, static_argnums=2)
def _first_piece_of_two(stack: jax.Array, starts: jax.Array, size: int) -> jax.Array:
    piece = partial(lax.dynamic_slice_in_dim, stack, slice_size=size, axis=1)
    return jax.vmap(piece)(starts)[0]


def _computed_once(numbers: jax.Array) -> jax.Array:
    """Returns the same numbers, out of one of two branches that both return them."""
    # XLA-5: without a branch, XLA repeats the arithmetic of the numbers in each kernel that reads one of them. Which
    # side runs does not matter, so the condition is any that XLA cannot know. Without the barrier the two sides are
    # equal, and the branch is dropped. tests/numerics/test_compile_size.py notices both.
    behind_barrier = partial(lax.optimization_barrier, numbers)
    return run_if(jnp.any(numbers != 0), behind_barrier, lambda: numbers)


def _in_a_kernel(x: jax.Array) -> jax.Array:
    """Returns x, after an operation that does nothing."""
    # XLA-33: XLA:GPU starts a kernel for each slice that is a result as it is. With an operation behind it, one kernel
    # writes all of them (tests/devices/test_accelerators.py, "norms by leaf").
    return jnp.where(jnp.isnan(x), jnp.nan, x) if x.dtype.kind == "f" else x
