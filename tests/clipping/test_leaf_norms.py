"""`clip_by_global_norm(leaves=True)` names the leaf that blew up, and clips as it does without."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import bits, flat, quick_jit, true_norm

import shrewjax

f32 = np.float32
KIND = "clip_by_global_norm/"


def clipped(grads, max_norm=1.0, **options):
    """The updates and the state of one jitted call."""
    tx = shrewjax.clip_by_global_norm(max_norm, **options)
    return quick_jit(tx.update)(grads, tx.init(grads))


def metrics_of(state):
    """Returns the metrics of the transformation, as a jitted step does."""
    found = quick_jit(shrewjax.metrics)(state)
    return {name.removeprefix(KIND): value for name, value in found.items()}


def largest_leaf(measured):
    """As the docstring of `metrics` says."""
    names = sorted(name for name in measured if name.startswith("leaf_norm/"))
    return names[measured["largest_leaf"]].removeprefix("leaf_norm/")


def mixed():
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {
        "dense": {"kernel": normal(3, 4), "bias": 1e3 * normal(4).astype(jnp.float16)},
        "half": normal(130).astype(jnp.bfloat16),
        "complex": jax.lax.complex(normal(5), normal(5)),
        "empty": jnp.zeros((0, 2)),
        "count": jnp.arange(3),
        "none": None,
        "masked": optax.MaskedNode(),
        "stack": [normal(2) for _ in range(11)],
    }


def test_each_leaf_has_its_norm_under_its_name():
    grads = mixed()
    _, state = clipped(grads, leaves=True)
    measured = metrics_of(state)
    expected = {
        "/".join(str(getattr(key, "key", getattr(key, "idx", None))) for key in path): float(true_norm(leaf))
        for path, leaf in jax.tree.leaves_with_path(grads)
    }
    expected["count"] = 0.0
    found = {k.removeprefix("leaf_norm/"): float(v) for k, v in measured.items() if k.startswith("leaf_norm/")}
    assert set(found) == set(expected)
    for name in expected:
        assert found[name] == pytest.approx(expected[name], rel=1e-6), name
    assert largest_leaf(measured) == max(expected, key=expected.get)
    squares = np.float64([*expected.values()]) ** 2
    assert float(measured["largest_share"]) == pytest.approx(squares.max() / squares.sum(), rel=1e-6)


@pytest.mark.parametrize("largest", [0, 2, 10])
def test_a_leaf_of_95_percent_of_the_squared_norm_is_found(largest):
    # Eleven layers, because jit returns metrics in the order of names, where "10" comes before "2".
    layers = [{"kernel": jnp.full((2, 2), np.sqrt(0.05 / 40), jnp.float32)} for _ in range(11)]
    layers[largest] = {"kernel": jnp.full((5, 19), 0.1, jnp.float32)}
    _, state = clipped({"layers": layers}, leaves=True)
    measured = metrics_of(state)
    assert float(measured["largest_share"]) == pytest.approx(0.95, rel=1e-6)
    assert largest_leaf(measured) == f"layers/{largest}/kernel"


@pytest.mark.parametrize("scale", [1.0, 1e25, 1e-25, np.nan, np.inf], ids=str)
@pytest.mark.parametrize("max_norm", [0.0, 1.0, np.inf])
def test_updates_norm_and_scale_are_to_the_last_bit_those_without(scale, max_norm):
    grads = {"a": f32([3, -4, 1e-3]) * f32(scale), "b": f32([[0.1], [7]])}
    updates, state = clipped(grads, max_norm, leaves=True)
    expected, without = clipped(grads, max_norm)
    assert bits(updates) == bits(expected)
    assert bits(state[:2]) == bits(without[:2])
    assert without.leaf_norms == ()


HUGE, SMALL = f32([3e20, 4e20]), f32([3e-16, 4e-16])
EDGES = {
    "one leaf": ({"a": f32([3, 4])}, [5], 1, "a"),
    "the whole tree": (f32([3, 4]), [5], 1, "(the tree itself)"),
    "NaN": ({"a": f32([1]), "b": f32([np.nan, 1]), "c": f32([9])}, [1, np.nan, 9], np.nan, "b"),
    "NaN beside infinity": ({"a": f32([np.inf]), "b": f32([np.nan])}, [np.inf, np.nan], np.nan, "b"),
    "infinity": ({"a": f32([1e-9]), "b": f32([1, -np.inf])}, [1e-9, np.inf], 1, "b"),
    "two infinities": ({"a": f32([np.inf]), "b": f32([1]), "c": f32([-np.inf])}, [np.inf, 1, np.inf], 0.5, "a"),
    "zeros": ({"a": f32([0, -0.0]), "b": f32([0])}, [0, 0], 0, "a"),
    "a zero leaf": ({"a": f32([0]), "b": f32([2])}, [0, 2], 1, "b"),
    "squares above float32": ({"a": HUGE, "b": f32([1e-3])}, [5e20, 1e-3], 1, "a"),
    "a sum above float32": ({"a": f32([1.5e19]), "b": f32([1.5e19])}, [1.5e19] * 2, 0.5, "a"),
    "squares below float32": ({"a": f32([1e-30]), "b": f32([3e-30, 4e-30])}, [1e-30, 5e-30], 25 / 26, "b"),
    "squares above the smallest normal": ({"a": SMALL, "b": f32([2])}, [5e-16, 2], 1, "b"),
    "a flushed leaf": ({"a": f32([1e-20]), "b": f32([2])}, [0, 2], 1, "b"),
    "a leaf beyond float32": ({"a": f32([3e38] * 4), "b": f32([1e38])}, [np.inf, 1e38], 1, "a"),
    "float16": ({"a": jnp.full(10, 300, jnp.float16), "b": jnp.ones(1, jnp.float16)}, [300 * 10**0.5, 1], None, "a"),
    "names that are alike": ({"a/b": f32([1]), "a": {"b": f32([2])}}, [2, 1], 0.8, "['a']['b']"),
}


@pytest.mark.parametrize(("grads", "norms", "share", "name"), EDGES.values(), ids=EDGES)
def test_norms_by_leaf_follow_the_table(grads, norms, share, name):
    _, state = clipped(grads, leaves=True)
    np.testing.assert_allclose(jax.tree.leaves(state.leaf_norms), norms, rtol=1e-6)
    measured = metrics_of(state)
    if share is not None:
        np.testing.assert_allclose(measured["largest_share"], share, rtol=1e-6)
    assert largest_leaf(measured) == name


def test_no_leaves_have_no_norms():
    assert set(metrics_of(clipped({}, leaves=True)[1])) == {"grad_norm", "clip_scale"}


def test_float64_leaves_are_measured_in_float64(x64):
    grads = {"a": jnp.full(2, 1e-200, jnp.float64 if x64 else jnp.float32), "b": jnp.zeros(1)}
    _, state = clipped(grads, leaves=True)
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype(jnp.float32)}
    if x64:
        wide = {"a": jnp.full(4, 1e25, jnp.float64), "b": jnp.full(1, 1e-3, jnp.float32)}
        found = clipped(wide, leaves=True)[1].leaf_norms
        np.testing.assert_allclose([found["a"], found["b"]], [2e25, 1e-3], rtol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_norms_of_sharded_leaves_are_those_of_the_whole(check_vma):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(3)
    grads = {"sharded": f32(rng.normal(size=(16, 3))), "whole": f32(rng.normal(size=4))}
    specs = {"sharded": jax.P("data"), "whole": jax.P()}
    if not check_vma:  # then all are shards
        grads["whole"], specs["whole"] = f32(rng.normal(size=(8, 4))), jax.P("data")
    tx = shrewjax.clip_by_global_norm(1.0, leaves=True, sharded_over=None if check_vma else "data")

    def update(grads):
        updates, state = tx.update(grads, tx.init(jax.tree.map(jnp.zeros_like, grads)))
        return updates, state

    mapped = jax.shard_map(update, mesh=mesh, in_specs=(specs,), out_specs=(specs, jax.P()), check_vma=check_vma)
    updates, state = quick_jit(mapped)(grads)
    for name, leaf in grads.items():
        assert float(state.leaf_norms[name]) == pytest.approx(float(true_norm(leaf)), rel=1e-6)
    assert float(true_norm(updates)) == pytest.approx(1, rel=1e-6)


def test_rows_of_vmap_have_norms_of_their_own_and_so_do_their_metrics():
    tx = shrewjax.clip_by_global_norm(1.0, leaves=True)
    grads = {"a": jnp.array([[3.0, 4.0], [0.0, 0.0], [3e25, 4e25]]), "b": jnp.array([1.0, 2.0, 1e-3])}
    states = quick_jit(jax.vmap(lambda g: tx.update(g, tx.init(g))[1]))(grads)
    np.testing.assert_allclose(states.leaf_norms["a"], f32([5, 0, 5e25]), rtol=1e-6)
    np.testing.assert_allclose(states.leaf_norms["b"], f32([1, 2, 1e-3]), rtol=1e-6)
    for found in (shrewjax.metrics(states), jax.vmap(shrewjax.metrics)(states)):
        np.testing.assert_allclose(found[KIND + "largest_share"], [25 / 26, 1, 1], rtol=1e-6)
        np.testing.assert_array_equal(found[KIND + "largest_leaf"], [0, 1, 0])


def test_derivative_through_the_clip_is_that_without():
    grads = {"a": jnp.array([3.0, -4.0]), "b": jnp.array([0.5])}

    def loss(grads, leaves):
        tx = shrewjax.clip_by_global_norm(2.0, leaves=leaves)
        updates, state = tx.update(grads, tx.init(grads))
        return jnp.sum(updates["a"] ** 3) + updates["b"][0] + state.grad_norm

    slopes = quick_jit(jax.grad(lambda g: loss(g, True)))(grads)
    expected = quick_jit(jax.grad(lambda g: loss(g, False)))(grads)
    np.testing.assert_allclose(flat(slopes), flat(expected), rtol=1e-6)
    tx = shrewjax.clip_by_global_norm(2.0, leaves=True)
    of_a_leaf = quick_jit(jax.grad(lambda g: tx.update(g, tx.init(g))[1].leaf_norms["a"]))(grads)
    assert not np.any(flat(of_a_leaf))


def test_metrics_of_zeros_and_of_norms_beyond_float32_make_no_nan():
    with jax.debug_nans(True):
        for scale in (0.0, 3e38):
            _, state = clipped({"a": jnp.full(4, scale, jnp.float32), "b": jnp.ones(1)}, np.inf, leaves=True)
            shrewjax.metrics(state)


def test_the_state_is_a_tree_like_the_parameters_and_stays_one():
    grads = mixed()
    tx = shrewjax.clip_by_global_norm(1.0, leaves=True)
    state = tx.init(grads)
    assert jax.tree.structure(state.leaf_norms) == jax.tree.structure(grads)
    _, new = jax.eval_shape(tx.update, grads | {"half": None}, state)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    marked = optax.tree.map_params(tx, lambda _: "like", state, transform_non_params=lambda _: "other")
    assert {*jax.tree.leaves(marked.leaf_norms)} == {"like"}
    assert marked.grad_norm == marked.clip_scale == "other"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: shrewjax.clip_by_global_norm(1.0, leaves=1), r"leaves must be True or False, because .*, got 1"),
        (lambda: shrewjax.clip_by_global_norm(1.0, leaves=jnp.array(True)), r"leaves must be True or False"),
        (
            lambda: shrewjax.clip_by_global_norm(1.0, ord=1, leaves=True),
            r"ord must be 2 with leaves=True, .*, got 1.0. Leave out ord. Or leave out leaves",
        ),
        (
            lambda: shrewjax.clip_by_global_norm(1.0, leaves=True).update(
                {"new": jnp.ones(1)}, shrewjax.clip_by_global_norm(1.0, leaves=True).init({"old": jnp.ones(1)})
            ),
            r"gradient leaves \['new'\] have no numbers in the state. Call init with parameters like",
        ),
    ],
)
def test_what_is_wrong_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_scheduled_threshold_keeps_the_norms():
    tx = optax.inject_hyperparams(shrewjax.clip_by_global_norm)(max_norm=1.0, leaves=True)
    grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
    _, state = tx.update(grads, tx.init(grads))
    assert float(shrewjax.metrics(state)[KIND + "largest_share"]) == pytest.approx(0.64)
