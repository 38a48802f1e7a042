"""Keys: the magnitudes of leaves as integers, and the two reads of them that a percentile takes.

The bits of |x|, read as an integer, are the *key* of x: keys order as the magnitudes do (`_floats`). A read counts the
keys at or below some pivots (`counts`), or finds the keys next to a bracket (`neighbours`). Neither sorts, copies or
gathers the data. In `shard_map`, a read needs one collective for each set of mapped axes.

Keys and pivots of a search are those of one common dtype, the narrowest that holds every leaf's magnitudes. So bfloat16
leaves alone have few keys, and take few reads. Keys are compared as integers of at least 32 bits, because those of 16
bits take longer (XLA-26).
"""

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax import _floats
from shrewjax._mesh import Axes
from shrewjax._norms import Scope
from shrewjax._reductions import Group, leaf_counts, leaf_maxima


def counts(
    groups: Sequence[Group], pivots: jax.Array, dtype: Any, scope: Scope, integers: Any, axes: Axes
) -> jax.Array:
    """Returns how many keys are at or below each pivot, over all devices, as `integers` that hold the largest count.

    `pivots` and the result have the shape (leaves, pivots); for scope "global", (1, pivots).
    """
    own = _by_group(groups, pivots, scope)
    by_group = jnp.stack(leaf_counts(partial(_at_or_below, dtype), groups, own, dtype=integers, axes=axes))
    return by_group if scope == "leaf" else jnp.sum(by_group, axis=0, keepdims=True, dtype=integers)


def neighbours(
    groups: Sequence[Group], below: jax.Array, above: jax.Array, dtype: Any, scope: Scope, axes: Axes
) -> tuple[jax.Array, jax.Array]:
    """Returns the largest key at or below `below` and the smallest above `above`, (1 or leaves,) each.

    If there is none, they are 0 and infinity.
    """
    own = _by_group(groups, jnp.stack([below, above], axis=-1), scope)
    found, ends = jnp.stack(leaf_maxima(partial(_beside, dtype), groups, own, axes=axes)), jnp.stack(own)
    distances = np.asarray(np.iinfo(found.dtype).max, found.dtype) - found
    keys = jnp.where(np.asarray([[True, False]]), ends - distances, ends + 1 + distances)
    nothing = np.asarray([[0, _floats.infinity_bits(dtype)]], found.dtype)
    largest_below, smallest_above = jnp.where(found <= 0, nothing, keys).T
    if scope == "global":
        return jnp.max(largest_below)[None], jnp.min(smallest_above)[None]
    return largest_below, smallest_above


def at_least_16_bits(x: Any) -> jax.Array:
    """Returns a leaf of 8 bits as bfloat16, which is exact, and any other as it is."""
    return x.astype(jnp.bfloat16) if jnp.finfo(x.dtype).bits < 16 else x


def common_dtype(leaves: Sequence[Any]) -> Any:
    """Returns the dtype of the pivots' keys: the narrowest that holds every leaf's magnitudes."""
    dtypes = {_floats.real_dtype(x) for x in leaves}
    if len(dtypes) == 1:
        return dtypes.pop()
    return jnp.dtype(jnp.float64 if jnp.dtype(jnp.float64) in dtypes else jnp.float32)


def integers(dtype: Any) -> Any:
    """Returns the integer dtype in which a search compares keys and computes their differences."""
    # XLA-26: not int16 for 16-bit leaves.
    return jnp.dtype(jnp.int64 if dtype == jnp.float64 else jnp.int32)


def _keys_of(x: Any, dtype: Any) -> jax.Array:
    """Returns the keys of a leaf, in the search's dtype. A complex element has that of its modulus."""
    bits = _floats.magnitude_bits(lax.abs(x) if _floats.is_complex(x) else x)
    return _floats.wider_bits(bits, _floats.real_dtype(x), dtype).astype(integers(dtype))


def _at_or_below(dtype: Any, group: Group, pivots: jax.Array) -> list[jax.Array]:
    """Returns, for each pivot and each place of the group, the number of its keys at or below the pivot."""
    keys = [_keys_of(x, dtype) for x in group]
    return [reduce(lax.add, [(k <= p).astype(jnp.uint32) for k in keys]) for p in pivots]


def _beside(dtype: Any, group: Group, below_and_above: jax.Array) -> list[jax.Array]:
    """Returns two arrays whose maxima give the neighbours: the closer a key, the larger; negative on the wrong side."""
    keys = [_keys_of(x, dtype) for x in group]
    below, above = below_and_above
    # A key on the wrong side makes the sum exceed the largest integer and wrap around to a negative one. So no key has
    # to be compared.
    largest = jnp.asarray(jnp.iinfo(below.dtype).max, below.dtype)
    up_to, beyond = [k + (largest - below) for k in keys], [(above + 1 + largest) - k for k in keys]
    return [reduce(lax.max, up_to), reduce(lax.max, beyond)]


def _by_group(groups: Sequence[Group], keys: jax.Array, scope: Scope) -> list[jax.Array]:
    """Returns each group's keys (k,) of an array (1 or leaves, k): for scope "global" all have the same."""
    return list(keys) if scope == "leaf" else [keys[0]] * len(groups)
