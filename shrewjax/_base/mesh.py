"""Arrays on a mesh: whether XLA partitions them here, how their types say so, and how to place one as another.

Axes of a mesh that are not mapped (`axes`) are left to XLA, and arrays are whole. Along *Auto* axes XLA chooses how it
partitions an array. Along *Explicit* axes the array's type says it, and JAX refuses operands of other partitions.
`partitioned_like` and `placed_like` do nothing where no type says anything. `on_each_device` maps axes itself.

`context_mesh` hides a spelling that differs between JAX's versions, and `_CLOSED_OVER` has texts of JAX's errors.
"""

import contextlib
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding

from shrewjax._base.axes import axes_by_dimension, is_mapped, mapped_axes, partitions, type_of
from shrewjax._base.types import AnyState, AxisNames, Function, Leaf, MeshAxes, PyTree


def devices_to_map(argument: str, axes: AxisNames) -> int:
    """Returns over how many devices the call itself has to map these axes of the mesh. 0 if they are mapped already.

    Raises if it cannot: if they are no axes of the mesh, or inside `shard_map` over others.
    """
    if not axes or is_mapped(axes):
        return 0
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes or not {*axes} <= {*mesh.axis_names}:
        remedy = f"Call the step under jax.set_mesh(mesh), with a mesh that has {axes!r}"
        if mesh.manual_axes:
            remedy = "Name them in axis_names= of the jax.shard_map around this call"
        raise ValueError(
            f"{argument} must name axes of the mesh, got {axes!r}, and the mesh has {mesh.axis_names}. "
            f"{remedy}"
        )
    return math.prod(mesh.shape[a] for a in axes)


def on_each_device(
    function: Function,
    axes: AxisNames,
    divided: PyTree,
    whole: PyTree,
    *,
    returns_parts: PyTree,
) -> PyTree:
    """Returns what `function(divided, whole)` returns on each device along these axes of the mesh.

    A device gets its part of the first axis of the arrays in `divided`. `returns_parts` is a tree prefix of the
    results: a device returns its part of the first axis if it is True, and otherwise the same as all others. XLA still
    partitions over all other axes.
    """
    leaves, structure = jax.tree.flatten(whole)
    # Arguments, because JAX has no derivative by an array that the function closes over. Numbers and names stay known.
    kinds = jax.Array | np.ndarray
    arrays = [_partitioned(x, axes) if isinstance(x, kinds) else None for x in leaves]

    def run(divided: PyTree, arrays: list[Leaf]) -> PyTree:
        given = [x if y is None else y for x, y in zip(leaves, arrays, strict=True)]
        return function(divided, jax.tree.unflatten(structure, given))

    # check_vma=False: otherwise a scan of the loss that starts from `jnp.zeros` is an error, because its carry begins
    # to vary (tests/devices/test_sum_over.py, "start_from_zeros").
    part, rest = jax.P(axes), jax.P()
    out_specs = jax.tree.map(lambda is_part: part if is_part else rest, returns_parts)
    specs = {"in_specs": (part, rest), "out_specs": out_specs, "axis_names": {*axes}}
    mapped = jax.shard_map(run, check_vma=False, **specs)
    divided = jax.tree.map(lambda x: _partitioned(x, axes, axes), divided)
    try:
        return jax.jit(mapped)(divided, arrays)
    except (ValueError, NotImplementedError) as error:
        names = ", ".join(map(repr, axes))
        where, remedy = "With sum_over", ". Or leave out sum_over"
        if returns_parts is True:
            where, remedy = "In per_device", ""
        if re.search(_CLOSED_OVER, str(error)):
            raise ValueError(
                f"{where}, fun must not close over arrays on the mesh. Pass them as arguments. Place arrays by a jax.P "
                f"without {names}"
            ) from error
        if "mesh" in str(error) or "PartitionSpec" in str(error):
            error.add_note(
                f"{where}, fun has a device's own examples, so it must not place arrays over {names}. Pass "
                f"jax.lax.with_sharding_constraint a jax.P without {names}, and no NamedSharding. In Flax's logical "
                f"axis rules, map the axis of examples to None inside fun{remedy}"
            )
        raise


# JAX's words for an array from outside that a function in `shard_map` uses, on an Explicit mesh of several axes and of
# one, and on any mesh in `table[y]`.
_CLOSED_OVER = "should match the aval mesh|Closing over inputs to shard_map|index_to_gather"


def _partitioned(x: Leaf, over: AxisNames, first: AxisNames = ()) -> Leaf:
    """Returns an array whose type is sharded over no Explicit axis of `over`, except `first` in its first dimension."""
    if not {*over} & _explicit(jax.sharding.get_abstract_mesh()):
        return x
    kept = [tuple(a for a in axes if a not in over) for axes in axes_by_dimension(_spec(x))]
    kept[:1] = [(*first, *axes) for axes in kept[:1]]
    return jax.sharding.reshard(x, jax.P(*(axes or None for axes in kept)))


def partitioned_like(x: Leaf, like: Leaf) -> Leaf:
    """Returns an array with the partitions of `like`, which types show on the Explicit axes of a mesh.

    A select and a branch refuse operands of other partitions, such as the gradient and its finer sharded sum. Without
    types, XLA places them itself.
    """
    if not hasattr(x, "dtype") or x.dtype == jax.dtypes.float0 or not explicit_axes(x):
        return x
    spec = _spec(like)
    # One entry for each dimension, because a spec may have none for the last ones.
    current, wanted = ([*axes_by_dimension(s), *[()] * x.ndim][: x.ndim] for s in (_spec(x), spec))
    if current == wanted:
        return x
    spec = jax.P(*partitions(spec))
    if is_traced(x):
        return jax.sharding.reshard(x, NamedSharding(type_of(x).sharding.mesh, spec))
    return jax.device_put(x, NamedSharding(x.sharding.mesh, spec))


def on_mesh_of(params: PyTree, state: AnyState) -> AnyState:
    """Returns a new state on the parameters' mesh. What `init` placed nowhere, such as a counter, is replicated.

    A step returns them there. Its second call would compile again if they began elsewhere
    (tests/windows/test_sharded_state.py, "compiles_once").
    """
    state = placed_like(state, params)
    arrays = filter(_is_concrete, jax.tree.leaves(params))
    shardings = [x.sharding for x in arrays if isinstance(x.sharding, NamedSharding)]
    if len({sharding.mesh for sharding in shardings}) != 1:
        return state
    everywhere = NamedSharding(shardings[0].mesh, jax.P())

    def placed(x: Leaf) -> Leaf:
        is_anywhere = _is_concrete(x) and not x.committed
        return jax.device_put(x, everywhere) if is_anywhere else x

    return jax.tree.map(placed, state)


def _is_concrete(x: Leaf) -> bool:
    return isinstance(x, jax.Array) and not is_traced(x)


def spec_of_result(mesh: Any, spec: Any) -> jax.P:
    """Returns a spec without a None at the end, as a step returns it on an Auto mesh. `jax.jit` tells the two apart."""
    entries = [*partitions(spec)]
    while entries and entries[-1] is None and AxisType.Explicit not in mesh.axis_types:
        entries.pop()
    return jax.P(*entries)


def explicit_axes(x: Leaf) -> MeshAxes:
    """Returns the Explicit axes of the mesh on which an array, or a type, is."""
    return _explicit(getattr(type_of(x).sharding, "mesh", None))


def _explicit(mesh: Any) -> MeshAxes:
    if mesh is None or not mesh.axis_types:
        return frozenset()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(a for a, kind in kinds if kind == AxisType.Explicit)


def placed_like(tree: PyTree, like: PyTree) -> PyTree:
    """Returns a tree whose traced arrays without a mesh are on the Explicit mesh of arrays in `like`, if they have one.

    A new array has no mesh inside `jax.vmap`, nor without `jax.set_mesh`. If `vmap` maps a sharded axis, JAX refuses a
    loop that begins with one, a branch that reads one, and a choice between two (tests/devices/test_explicit.py,
    "vmap", and tests/devices/test_models_on_devices.py).
    """
    arrays = [x for x in jax.tree.leaves(like) if hasattr(x, "dtype")]
    meshes = [type_of(x).sharding.mesh for x in arrays if explicit_axes(x)]
    if not meshes:
        return tree

    def placed(x: Leaf) -> Leaf:
        if not is_traced(x) or explicit_axes(x):
            return x
        return jax.sharding.reshard(x, jax.NamedSharding(meshes[0], jax.P()))

    return jax.tree.map(placed, tree)


def summed(tree: PyTree) -> PyTree:
    """Returns a tree whose arrays have neither the type `reduced` nor `unreduced`. The latter are summed over devices.

    JAX leaves the sum of a gradient to the caller, as `unreduced`, if its parameter is `reduced`.
    """
    return jax.tree.map(_summed, tree)


def _summed(x: Leaf) -> Leaf:
    if not isinstance(x, jax.Array):
        return x
    spec = _spec(x)
    # On an Explicit mesh. `partitions` leaves out both marks, so that `reshard` sums.
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        mesh = type_of(x).sharding.mesh
        x = jax.sharding.reshard(x, jax.NamedSharding(mesh, jax.P(*partitions(spec))))
    # Inside `shard_map`, the type says it.
    axis_type = getattr(jax.typeof(x), "manual_axis_type", None)
    mapped = getattr(axis_type, "unreduced", None)
    return lax.psum(x, tuple(mapped)) if mapped else x


def is_traced(tree: PyTree) -> bool:
    return any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(tree))


def is_tracing() -> bool:
    """Returns whether JAX traces here, so that new arrays are traced, too."""
    return is_traced(jnp.zeros(()))


def _spec(x: Leaf) -> Any:
    return getattr(type_of(x).sharding, "spec", None) or ()


def may_be_partitioned() -> bool:
    """Returns whether XLA may shard an array here over devices, so that its shape is not that of one device's part."""
    mesh = jax.sharding.get_abstract_mesh()
    is_mapped_whole = mesh.manual_axes and {*mesh.manual_axes} == {*mesh.axis_names}
    return jax.device_count() > 1 and not is_mapped_whole


def axes_beside_partitions() -> AxisNames:
    """Returns the mapped axes if XLA may partition arrays over other axes of the mesh, and otherwise none.

    XLA then decides which devices wait for each other. It moves parts by permutations, for which all devices wait.
    """
    mesh = jax.sharding.get_abstract_mesh()
    others = {*mesh.axis_names} - {*mesh.manual_axes}
    return mesh.manual_axes if any(mesh.shape[a] > 1 for a in others) else ()


def is_typed_by_device(x: jax.Array) -> bool:
    """Returns whether JAX's type of an array can say how it is sharded: in shard_map, and on an Explicit mesh."""
    return bool(mapped_axes()[0] or explicit_axes(x))


def context_mesh() -> Any:
    """Returns the mesh of `jax.set_mesh`, or an empty mesh if none is set. `jax.sharding.get_mesh`: JAX 0.9.1."""
    if hasattr(jax.sharding, "get_mesh"):
        return jax.sharding.get_mesh()
    from jax._src.mesh import get_concrete_mesh

    return get_concrete_mesh()


def without_context_mesh() -> contextlib.AbstractContextManager[None]:
    """Returns a context without the mesh of `jax.set_mesh`, for arrays on another. While JAX traces, it stays set."""
    if is_tracing():
        return contextlib.nullcontext()
    return jax.set_mesh(Mesh(np.empty((), object), ()))
