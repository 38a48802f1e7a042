"""Keys: the magnitudes of leaves as integers, and the two reads of them that a percentile takes.

The bits of |x|, read as an integer, are the *key* of x: keys order as the magnitudes do (`_floats`). A read counts the
keys at or below some pivots (`counts`), or finds the keys next to a bracket (`neighbours`). Neither sorts, copies or
gathers the data. In `shard_map`, a read needs one collective for each set of mapped axes.

Keys and pivots of a search are those of one common dtype. A leaf of a narrower dtype compares its own keys with pivots
that were rounded down to its dtype. So only elements of 8-bit leaves are converted.
"""

from collections.abc import Sequence
from functools import reduce
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
    own = _for_each_group(groups, pivots, dtype, scope)
    by_group = jnp.stack(leaf_counts(_at_or_below, groups, own, dtype=integers, axes=axes))
    return by_group if scope == "leaf" else jnp.sum(by_group, axis=0, keepdims=True, dtype=integers)


def neighbours(
    groups: Sequence[Group], below: jax.Array, above: jax.Array, dtype: Any, scope: Scope, axes: Axes
) -> tuple[jax.Array, jax.Array]:
    """Returns the largest key at or below `below` and the smallest above `above`, (1 or leaves,) each.

    If there is none, they are 0 and infinity.
    """
    own = _for_each_group(groups, jnp.stack([below, above], axis=-1), dtype, scope)
    maxima = leaf_maxima(_beside, groups, own, axes=axes)
    found, ends = (jnp.stack([x.astype(integers(dtype)) for x in of_groups]) for of_groups in (maxima, own))
    largest = np.asarray([[np.iinfo(m.dtype).max] for m in maxima], found.dtype)
    keys = jnp.where(np.asarray([[True, False]]), ends - (largest - found), ends + 1 + (largest - found))
    own_dtypes = [_floats.real_dtype(x) for x, *_ in groups]
    for narrow in set(own_dtypes) - {dtype}:
        is_narrow = np.asarray([[d == narrow] for d in own_dtypes])
        keys = jnp.where(is_narrow, _floats.wider_bits(keys, narrow, dtype), keys)
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
    """Returns the integer dtype in which a search computes with keys and their differences."""
    return jnp.dtype(jnp.int64 if dtype == jnp.float64 else jnp.int32)


def _keys_of(x: Any) -> jax.Array:
    """Returns the keys of a leaf. A complex element has that of its modulus."""
    return _floats.magnitude_bits(lax.abs(x) if _floats.is_complex(x) else x)


def _at_or_below(group: Group, pivots: jax.Array) -> list[jax.Array]:
    """Returns, for each pivot and each place of the group, the number of its keys at or below the pivot."""
    keys = [_keys_of(x) for x in group]
    return [reduce(lax.add, [(k <= p).astype(jnp.uint32) for k in keys]) for p in pivots]


def _beside(group: Group, below_and_above: jax.Array) -> list[jax.Array]:
    """Returns two arrays whose maxima give the neighbours: the closer a key, the larger; negative on the wrong side."""
    keys = [_keys_of(x) for x in group]
    below, above = below_and_above
    # A key on the wrong side makes the sum exceed the largest integer and wrap around to a negative one. So no key has
    # to be compared.
    largest = jnp.asarray(jnp.iinfo(below.dtype).max, below.dtype)
    up_to, beyond = [k + (largest - below) for k in keys], [(above + 1 + largest) - k for k in keys]
    return [reduce(lax.max, up_to), reduce(lax.max, beyond)]


def _for_each_group(groups: Sequence[Group], keys: jax.Array, dtype: Any, scope: Scope) -> list[jax.Array]:
    """Returns the keys (1 or leaves, k), rounded down to each group's own dtype, as a vector (k,) for each group."""
    own_dtypes = [_floats.real_dtype(x) for x, *_ in groups]
    own = {d: _floats.narrower_bits(keys, dtype, d) for d in dict.fromkeys(own_dtypes)}
    if scope == "leaf":
        return [own[d][i] for i, d in enumerate(own_dtypes)]
    shared = {d: of_all[0] for d, of_all in own.items()}
    return [shared[d] for d in own_dtypes]
