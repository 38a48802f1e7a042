"""Reductions of a list of leaves to one number per leaf or unit, over every device that holds a part of it.

Under `jax.jit` XLA reduces over shards. Inside `shard_map` and `pmap` a leaf is one device's part, and its sum is only
a partial sum:

* If types are tracked (`shard_map`'s default), the partial sum is reduced over exactly the axes over which the leaf
  varies. So a replicated leaf is counted once.
* Otherwise (`check_vma=False`, `pmap`) the caller names the axes in `sharded_over`.

Types cannot tell a sharded gradient from one that still has to be summed over devices. Callers must sum the second kind
before they call these functions.

A leaf may have several units, such as stacked layers. Its `unit_dims` index the units, and its result has their sizes.
Along a mapped axis devices hold other units, or parts of the same ones (`axes.unit_axes`).
"""

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shrewjax._base.axes import (
    UnitDims,
    as_varying,
    axes_to_reduce,
    is_bound,
    is_mapped,
    mapped_axes,
    varying_axes,
)
from shrewjax._base.branches import run_if
from shrewjax._base.mesh import is_traced, may_be_partitioned, spec_of_result
from shrewjax._base.trees import is_typed_key
from shrewjax._base.types import Axes, AxisNames, DType, Function, Leaf, Number, PyTree

Group = tuple[Leaf, ...]
"""Leaves of one shape and dtype, which a reduction combines element by element as if they were one leaf."""


def leaf_sums(
    terms: Sequence[jax.Array],
    *,
    axes: Axes | list[Axes],
    unit_dims: Sequence[UnitDims] | None = None,
) -> list[jax.Array]:
    """Returns the sum of each leaf's terms, an array of the leaf's shape, over its elements and devices.

    If `axes` has several entries, there is one per leaf. An entry overrides the leaf's type. None means "use the type".
    """
    unit_dims = [()] * len(terms) if unit_dims is None else unit_dims
    sums = [_sum(x, dims) for x, dims in zip(terms, unit_dims, strict=True)]
    return _over_devices(lax.psum, sums, axes)


def leaf_maxima(
    keys: Callable[..., Sequence[jax.Array]],
    leaves: Sequence[Leaf],
    *per_leaf: Sequence[PyTree],
    axes: Axes | list[Axes],
) -> list[jax.Array]:
    """Returns, for each leaf, a vector with the maximum of each array in `keys(leaf, *scalars)`, over all devices.

    The arrays hold integers, because XLA:CPU's maximum of floats can lose a NaN (XLA-10). An empty one gives 0,
    and so does one of negative numbers alone. `axes` is as in `leaf_sums`.
    """
    each = zip(leaves, *per_leaf, strict=True)
    partials = [_reduced(keys, lax.max, *of_leaf) for of_leaf in each]
    return _over_devices(lax.pmax, partials, axes)


def leaf_counts(
    flags: Callable[..., Sequence[jax.Array]],
    leaves: Sequence[Leaf],
    *per_leaf: Sequence[PyTree],
    dtype: DType,
    axes: Axes | list[Axes],
) -> list[jax.Array]:
    """Returns, for each leaf, a vector with the sum of each array in `flags(leaf, *scalars)`, over all devices.

    The arrays hold integers in which the leaf's own sum fits (`count_dtype`). That of all devices must fit in `dtype`.
    """
    each = zip(leaves, *per_leaf, strict=True)
    partials = [_reduced(flags, lax.add, *of_leaf).astype(dtype) for of_leaf in each]
    return _over_devices(lax.psum, partials, axes)


def are_known(counts: Sequence[Number]) -> bool:
    """Returns whether all counts are numbers. In `jax.export`, a dimension of a leaf may be symbolic."""
    return all(isinstance(n, int) for n in counts)


def count_dtype(counts: Sequence[int]) -> DType:
    """Returns the narrowest dtype that holds each count, because 64-bit integers are slower."""
    is_small = are_known(counts) and max(counts) <= _LARGEST_COUNT
    return jnp.dtype(jnp.uint32 if is_small else jnp.uint64)


def grouped(leaves: Sequence[Leaf], axes: Sequence[Axes]) -> list[tuple[Group, Axes]]:
    """Returns the same elements in few groups, because each group costs one kernel to compile and to launch.

    `axes` has the mapped axes along which devices hold parts of each leaf. Each group comes with its own.

    The smallest leaves of each dtype become one vector, which copies at most 1/256 of all elements.
    """
    with_axes = [*zip(leaves, axes, strict=True)]
    if may_be_partitioned() or not are_known([x.size for x in leaves]):
        return [((x,), over) for x, over in with_axes]
    left = sum(x.size for x in leaves) // 256
    large: dict[tuple[Hashable, DType, Axes], list[Leaf]] = {}
    small: dict[tuple[DType, Axes], list[Leaf]] = {}
    for x, over in sorted(with_axes, key=lambda pair: pair[0].size):
        left -= x.size
        if left < 0:
            large.setdefault((x.shape, x.dtype, over), []).append(x)
        else:
            small.setdefault((x.dtype, over), []).append(jnp.ravel(x))
    vectors = [((jnp.concatenate(alike),), over) for (_, over), alike in small.items()]
    most = min(_MOST_IN_A_GROUP, sum(map(len, large.values())) // _FEWEST_GROUPS)
    return [
        (group, over) for (*_, over), alike in large.items() for group in _evenly(alike, most)
    ] + vectors


def sizes(
    leaves: Sequence[Leaf], *, axes: Axes | list[Axes], unit_dims: Sequence[UnitDims] | None = None
) -> list[int]:
    """Returns the number of elements that each sum of `leaf_sums` adds up. Shapes and axis sizes alone decide."""
    unit_dims = [()] * len(leaves) if unit_dims is None else unit_dims
    over = axes_to_reduce(leaves, axes)
    return [
        math.prod(n for a, n in enumerate(x.shape) if a not in dims)
        * (lax.psum(1, names) if names else 1)
        for x, dims, names in zip(leaves, unit_dims, over, strict=True)
    ]


def placed_as_units(numbers: jax.Array, leaf: Leaf, dims: UnitDims) -> jax.Array:
    """Returns numbers of a leaf's units, sharded as the dimensions `dims` of the leaf are. Traced ones stay."""
    sharding = None if is_traced(leaf) else getattr(leaf, "sharding", None)
    if not dims or not isinstance(sharding, NamedSharding):
        return numbers
    # XLA leaves out mesh axes of size 1, and `state_specs` would lack them (tests/devices/test_distribution.py,
    # "axis_of_size_1").
    mesh, kind = sharding.mesh, numbers.sharding.memory_kind
    spec = (*sharding.spec, *[None] * leaf.ndim)
    spec_of_units = spec_of_result(mesh, P(*(spec[a] for a in dims)))
    return jax.device_put(numbers, NamedSharding(mesh, spec_of_units, memory_kind=kind))


def any_device(flag: jax.Array, axes: AxisNames = ()) -> jax.Array:
    """Returns whether a flag is set on any device, so that all devices take the same branch.

    If `axes` contains axes of `jax.vmap`, it is also combined along these.
    """
    return any_device_along(flag, {*mapped_axes()[0], *axes})


def any_device_along(flags: jax.Array, axes: Collection[Hashable]) -> jax.Array:
    """Returns whether each flag is set on any device along these axes, mapped or of `jax.vmap`. Others stay apart."""
    mapped, is_tracked = mapped_axes()
    same = {*mapped} - varying_axes(flags) if is_tracked else ()
    over = tuple(sorted((a for a in axes if is_bound(a) and a not in same), key=str))
    return lax.pmax(flags.astype(jnp.int32), over) > 0 if over else flags


def device_sums(rows: Sequence[jax.Array], axes: AxisNames) -> list[jax.Array]:
    """Returns the sum of each array's rows, on this device and along mapped axes. One collective sums all arrays."""
    sums = [_sum(x, tuple(range(1, x.ndim))) for x in rows]
    return lax.psum(sums, axes) if is_mapped(axes) else sums


def agreed_over(new: jax.Array, old: jax.Array, is_new: jax.Array, axes: AxisNames) -> jax.Array:
    """Returns one array for all devices: of a floating one the mean over devices where it is new, or the old one.

    Arrays of other dtypes should be the same on all devices. The largest is taken.
    """
    if is_typed_key(new):
        data = lax.pmax(jax.random.key_data(new), axes)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(new))
    if not jnp.issubdtype(new.dtype, jnp.inexact):
        return lax.pmax(new, axes)
    # An integer, because a count in bfloat16 would stall at 256 devices.
    count = lax.psum(is_new.astype(jnp.int32), axes)
    total = lax.psum(jnp.where(is_new, new, jnp.zeros_like(new)), axes)
    return jnp.where(count > 0, total / jnp.maximum(count, 1).astype(new.real.dtype), old)


def joined_over(x: jax.Array, axes: AxisNames, axis: int) -> jax.Array:
    """Returns the arrays of all devices, concatenated."""
    return lax.all_gather(x, axes, axis=axis, tiled=True)


def combined_over(
    axes: AxisNames, names: Sequence[str], arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """Returns the "sum", "max" or "min" of each array along mapped axes. An array of another name stays local.

    A maximum or minimum is NaN if any device has a NaN.
    """
    results = list(arrays)
    if not axes:
        return results
    varying = [as_varying(x, axes) for x in arrays]
    collectives = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}
    for name, collective in collectives.items():
        chosen = [i for i, other in enumerate(names) if other == name]
        combined = collective([varying[i] for i in chosen], axes)
        for i, x in zip(chosen, combined, strict=True):
            results[i] = x
    # XLA-25: the all-reduce of XLA:CPU loses a NaN.
    extremes = [i for i, name in enumerate(names) if name in ("max", "min")]
    floats = [i for i in extremes if jnp.issubdtype(arrays[i].dtype, jnp.floating)]
    nans = lax.psum([jnp.isnan(varying[i]).astype(jnp.int32) for i in floats], axes)
    for i, count in zip(floats, nans, strict=True):
        results[i] = jnp.where(count > 0, jnp.full_like(results[i], jnp.nan), results[i])
    return results


def all_finite(
    leaves: Sequence[Leaf], axes: Axes | list[Axes], unit_dims: UnitDims = ()
) -> jax.Array:
    """Returns whether all elements on all devices are finite. Shape (), or the sizes of the `unit_dims`."""
    return jnp.all(finite_leaves(leaves, axes, unit_dims), axis=0)


def finite_leaves(
    leaves: Sequence[Leaf], axes: Axes | list[Axes], unit_dims: UnitDims = ()
) -> jax.Array:
    """Returns for each leaf whether it is finite on all devices. Shape (leaves, *sizes of `unit_dims`)."""
    if not leaves:
        return jnp.ones((0,), bool)

    def sums_are_finite(terms: Sequence[jax.Array]) -> jax.Array:
        sums = leaf_sums(terms, axes=axes, unit_dims=[unit_dims] * len(leaves))
        return jnp.stack([jnp.isfinite(s) for s in sums])

    def exactly() -> jax.Array:
        # x - x is 0 for a finite x and NaN otherwise, so its sum does not overflow.
        return sums_are_finite([x - x for x in leaves])

    def by_plain_sums() -> jax.Array:
        # XLA-11: XLA:CPU reduces a plain sum at memory speed. If it is finite, so is every element. Otherwise the sum
        # may have overflowed.
        plain = sums_are_finite(leaves)
        return run_if(~jnp.all(plain), exactly, lambda: plain)

    return lax.platform_dependent(cuda=exactly, rocm=exactly, default=by_plain_sums)


def _evenly(alike: Sequence[Leaf], most: int) -> list[Group]:
    """Splits leaves of one shape into groups of nearly the same length, small enough to be counted in 32 bits."""
    most = max(min(most, _LARGEST_COUNT // max(alike[0].size, 1)), 1)
    groups = math.ceil(len(alike) / most)
    return [tuple(alike[i::groups]) for i in range(groups)]


def _sum(x: jax.Array, dims: UnitDims = ()) -> jax.Array:
    return lax.reduce(
        x, np.zeros((), x.dtype), lax.add, [a for a in range(x.ndim) if a not in dims]
    )


# Jitted, because each leaf of the same shape would otherwise be traced and lowered again.
@partial(jax.jit, static_argnums=(0, 1))
def _reduced(
    arrays_of: Callable[..., Sequence[jax.Array]], combine: Function, *of_leaf: Leaf
) -> jax.Array:
    """Returns the combined elements of each array in `arrays_of(*of_leaf)`, in one read of the data if possible.

    The arrays have one shape. Empty ones give 0.
    """
    operands = tuple(arrays_of(*of_leaf))
    zeros = tuple(np.zeros((), x.dtype) for x in operands)
    dims = tuple(range(operands[0].ndim))

    def combine_each(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(map(combine, a, b))

    if len(operands) > 1 and not may_be_partitioned():
        return jnp.stack(lax.reduce(operands, zeros, combine_each, dims))
    # XLA-9: if XLA partitions a reduction of several operands, it all-gathers the devices' results of each operand. It
    # all-reduces those of a single operand (tests/numerics/test_reductions.py, "without a gather"). XLA:GPU fuses such
    # reductions and still reads the data once.
    pairs = zip(operands, zeros, strict=True)
    return jnp.stack([lax.reduce(x, zero, combine, dims) for x, zero in pairs])


_LARGEST_COUNT = 2**32 - 1  # of 32 bits


# XLA-13: XLA cuts a fusion of many more operands in parts, and materializes the results between them.
_MOST_IN_A_GROUP = 8


# XLA-14: XLA:CPU runs up to eight kernels one after another, and more of them in parallel
# (tests/numerics/test_percentiles.py, "few kernels").
_FEWEST_GROUPS = 9


def _over_devices(
    collective: Function, partials: Sequence[jax.Array], axes: Axes | list[Axes]
) -> list[jax.Array]:
    """Combines the devices' partial results, with one collective for those of one type that vary over the same axes."""
    groups: dict[tuple[AxisNames, Hashable], list[int]] = {}
    for i, (x, over) in enumerate(zip(partials, axes_to_reduce(partials, axes), strict=True)):
        if over:
            groups.setdefault((over, jax.typeof(x)), []).append(i)
    results = list(partials)
    for (over, _), places in groups.items():
        combined = collective(jnp.stack([partials[i] for i in places]), over)
        for row, i in enumerate(places):
            results[i] = combined[row]
    return results
