"""Draws: a micro-batch draws its own part of what the whole batch draws.

Threefry draws element j from the key and j alone, if `jax_threefry_partitionable` is on, as it is by default. So the
part is drawn bit by bit, wherever it lies. Other generators draw an array at once. A micro-batch then draws from a key
of its own: the same distribution, and other numbers.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from shrewjax._base.types import Leaf
from shrewjax._division import labels
from shrewjax._division.rows import Rows
from shrewjax._programs import jaxprs
from shrewjax._programs.jaxprs import Equation, shape_of


def part_of_draw(equation: Equation, key: Leaf, rows: Rows, batch: Any) -> Leaf:
    """Returns the random bits of the examples of a `MicroBatch`."""
    shape = shape_of(equation.outvars[0].aval)
    if labels.is_drawn_by_position(equation):
        positions = _positions(shape, rows, batch)
        return _threefry_bits(key, equation.params["bit_width"], positions)
    first = batch.positions[rows.sets[0]][0]
    params = equation.params | {"shape": rows.shape(shape, batch.sizes)}
    own = equation.replace(params=params)
    return jaxprs.run_equation(own, [jax.random.fold_in(key, first)])[0]


def _positions(shape: Sequence[int], rows: Rows, batch: Any) -> jax.Array:
    """Returns, for each element of a micro-batch, its number in the whole array."""
    positions = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(shape):
        dims = [size if d == axis else 1 for d in range(len(shape))]
        along = lax.broadcasted_iota(jnp.uint32, dims, axis)
        along = batch.part(along, rows) if axis == rows.axis else along
        positions = positions * np.uint32(size) + along
    return positions


def _threefry_bits(key: Leaf, width: int, positions: jax.Array) -> jax.Array:
    first, second = jax.random.key_data(key)
    operands = first, second, jnp.zeros_like(positions), positions
    wide = [jnp.broadcast_to(x, positions.shape) for x in operands]
    high, low = threefry2x32_p.bind(*wide)
    dtype = jnp.dtype(f"uint{width}")
    if width == 64:
        high = lax.shift_left(high.astype(dtype), np.asarray(32, dtype))
        return high | low.astype(dtype)
    return (high ^ low).astype(dtype)
