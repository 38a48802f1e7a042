"""Inside mapped functions a norm is the whole gradient's, or an error: never silently a shard's own."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import bits, mesh_of, thorough, true_norm
from sharded import GRADS, SPECS, P, clip, place
from speed import quick_jit, users_jit

import shrewjax
from shrewjax._numerics import reductions


@pytest.mark.parametrize(("ord", "scales"), [(1, [1]), (2, [1, 1e25, 1e-25]), (3, [1e25]), (np.inf, [1])])
def test_tracked_shard_map_counts_every_element_once(mesh, ord, scales):
    program = jax.jit(
        jax.shard_map(lambda g: clip(g, ord), mesh=mesh, in_specs=(SPECS,), out_specs=(SPECS, P())),
    )
    for scale in scales:
        grads = jax.tree.map(lambda x, scale=scale: x * np.float32(scale), GRADS)
        clipped, norm = program(place(grads, mesh))
        assert float(norm) == pytest.approx(float(true_norm(grads, ord)), rel=1e-6, abs=0), scale
        expected = 1.0 if scale >= 1 else float(norm)
        assert float(true_norm(clipped, ord)) == pytest.approx(expected, rel=1e-6, abs=0), scale


def test_partly_manual_mesh_counts_every_element_once(mesh):
    specs = SPECS | {"columns": P()}
    mapped = jax.shard_map(clip, mesh=mesh, in_specs=(specs,), out_specs=(specs, P()), axis_names={"data"})
    _, norm = jax.jit(mapped)(place(GRADS, mesh))
    assert float(norm) == pytest.approx(float(true_norm(GRADS)), rel=1e-6)


@pytest.mark.parametrize(
    ("specs", "most"),
    [([P("fsdp")], 1), ([P("fsdp"), P(None, "tensor"), P("fsdp", "tensor"), P()], 3)],
    ids=["FSDP", "FSDP, tensor-parallel, both and replicated"],
)
def test_one_norm_of_fifty_leaves_needs_an_all_reduce_for_each_set_of_axes(specs, most):
    mesh = mesh_of(fsdp=4, tensor=2)
    leaves = [
        jax.ShapeDtypeStruct(
            (8 * (1 + i % 3), 4), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, specs[i % len(specs)])
        )
        for i in range(50)
    ]
    text = users_jit(shrewjax.grad_norm).lower(leaves).compile().as_text()
    entry = text[text.index("ENTRY") :]
    assert 1 <= entry.count(" all-reduce(") <= most
    assert "all-gather" not in text


def test_one_bad_shard_is_bad_everywhere():
    grads = np.ones((8, 2), np.float32)
    mapped = jax.shard_map(
        lambda g: reductions.all_finite([g], None), mesh=mesh_of(data=8), in_specs=P("data"), out_specs=P()
    )
    is_finite = quick_jit(mapped)
    assert is_finite(grads)
    grads[5, 1] = np.inf
    assert not is_finite(grads)


# --- percentiles ------------------------------------------------------------------------------------------------


def lower_of_a_traced_percentile(grads, percentile):
    return shrewjax.clip_grad_percentile(grads, percentile, over="nonzero", method="lower")


# As users compile it where a float is rounded; the lower element is compared. A number is part of the program.
PERCENTILE_CLIPS = {
    "known": (users_jit(lambda grads: shrewjax.clip_grad_percentile(grads, 60)), ()),
    "by leaf": (users_jit(lambda grads: shrewjax.clip_grad_percentile(grads, 60, scope="leaf")), ()),
    "traced": (quick_jit(lower_of_a_traced_percentile), (np.float32(60),)),
}


def on_one_device(name, grads):
    """Bounds without a rounding are NumPy's bits. The others are those of the same program, not partitioned."""
    elements = np.concatenate([np.abs(x).ravel() for x in jax.tree.leaves(grads)])
    if name == "traced":
        bound = np.percentile(elements[elements > 0], 60, method="lower")
    elif name == "known" and np.percentile(elements, 60).is_integer():
        bound = np.percentile(elements, 60)
    else:
        return PERCENTILE_CLIPS[name][0](grads)
    return jax.tree.map(lambda x: np.clip(x, -np.float32(bound), np.float32(bound)), grads), np.float32(bound)


# Each on a mesh of one kind; CI has both.
ON_MESHES = ("Auto", "known"), ("Explicit", "by leaf"), ("Auto", "traced")
ON_OTHERS = ("Explicit", "known"), ("Auto", "by leaf"), ("Explicit", "traced")


@pytest.mark.parametrize(("mesh", "name"), [*ON_MESHES, *thorough(*ON_OTHERS)], indirect=["mesh"])
def test_sharded_percentiles_have_the_same_bits_without_a_gather_or_a_sort(mesh, name):
    grads = place(GRADS, mesh)
    update, percentile = PERCENTILE_CLIPS[name]
    program = update.lower(grads, *percentile).compile()
    assert bits(program(grads, *percentile)) == bits(on_one_device(name, GRADS))
    text = program.as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text
    assert "sort(" not in text


# All axes are manual inside, so their types change little.
ONE_MESH = pytest.mark.parametrize("mesh", ["Auto", *thorough("Explicit")], indirect=True)


@ONE_MESH
@pytest.mark.parametrize("check_vma", [True, False])
def test_percentiles_inside_shard_map_are_those_of_the_whole(mesh, check_vma):
    grads = {k: GRADS[k] for k in ("rows", "replicated")}
    specs = {k: SPECS[k] for k in grads}
    if not check_vma:  # without types, the axis holds for all leaves
        grads, specs = {"rows": grads["rows"]}, {"rows": specs["rows"]}

    def percentile_clip(grads):
        clipped, bound = shrewjax.clip_grad_percentile(grads, 60, sharded_over=None if check_vma else "data")
        return clipped, bound

    mapped = jax.shard_map(percentile_clip, mesh=mesh, in_specs=(specs,), out_specs=(specs, P()), check_vma=check_vma)
    placed = place(grads, mesh, specs)
    program = users_jit(mapped).lower(placed).compile()
    assert bits(program(placed)) == bits(on_one_device("known", grads))
    text = program.as_text()
    assert "all-gather" not in text
    assert "sort(" not in text


@ONE_MESH
def test_leaves_of_several_dtypes_are_counted_in_64_bits_inside_shard_map(mesh, monkeypatch):
    monkeypatch.setattr(reductions, "_LARGEST_COUNT", 5)  # as if 32 bits held no more
    values = np.random.default_rng(3).standard_normal((3, 16, 3))
    dtypes = {"wide": np.float32, "half": np.float16, "brain": ml_dtypes.bfloat16}
    grads = {name: values[i].astype(dtype) for i, (name, dtype) in enumerate(dtypes.items())}
    specs = dict.fromkeys(grads, P("data"))

    def bounds(grads):
        def bound(percentile):
            return shrewjax.clip_grad_percentile(grads, percentile, method="lower")[1]

        return jax.vmap(bound)(jnp.float32([10, 60, 99]))

    found = quick_jit(jax.shard_map(bounds, mesh=mesh, in_specs=(specs,), out_specs=P()))(place(grads, mesh, specs))
    magnitudes = np.concatenate([np.abs(np.float64(x)).ravel() for x in grads.values()])
    np.testing.assert_array_equal(found, np.percentile(magnitudes, [10, 60, 99], method="lower"))


def test_a_maximum_norm_of_sharded_gradients_is_no_gather(mesh):
    text = users_jit(lambda g: shrewjax.grad_norm(g, np.inf)).lower(place(GRADS, mesh)).compile().as_text()
    assert "all-gather" not in text
