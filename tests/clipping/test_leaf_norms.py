"""`clip_by_global_norm(per_leaf=True)` names the leaf that blew up, and clips as it does without."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import bits, flat, mesh_of, true_norm
from speed import quick_jit

import shrewjax

f32 = np.float32
pytestmark = pytest.mark.usefixtures("one_device")
KIND = "clip_by_global_norm/"


@functools.cache
def step_of(max_norm, leaves):
    """A step, compiled once for all gradients of the same shapes."""
    tx = shrewjax.clip_by_global_norm(max_norm, per_leaf=leaves)
    return quick_jit(lambda grads: tx.update(grads, tx.init(grads)))


def clipped(grads, max_norm=1.0, leaves=True):
    """The updates and the state of one jitted call."""
    return step_of(max_norm, leaves)(grads)


metrics_in_a_step = quick_jit(shrewjax.metrics)


def metrics_of(state):
    """Returns the metrics of the transformation, as a jitted step does."""
    return {name.removeprefix(KIND): value for name, value in jax.device_get(metrics_in_a_step(state)).items()}


def largest_leaf(measured):
    """As the docstring of `metrics` says."""
    names = sorted(name for name in measured if name.startswith("leaf_norm/"))
    return names[measured["largest_leaf"]].removeprefix("leaf_norm/")


def mixed():
    rng = np.random.default_rng(0)
    normal = lambda *shape: f32(rng.normal(size=shape))  # noqa: E731
    return {
        "dense": {"kernel": normal(3, 4), "bias": 1e3 * normal(4).astype(np.float16)},
        "half": normal(130).astype(jnp.bfloat16),
        "complex": normal(5) + np.complex64(1j) * normal(5),
        "empty": np.zeros((0, 2), f32),
        "count": np.arange(3),
        "none": None,
        "masked": optax.MaskedNode(),
        # Eleven layers, because jit returns metrics in the order of names, where "10" comes before "2".
        "stack": [normal(2) * f32(1e4 if i == 2 else 1) for i in range(11)],
    }


def test_each_leaf_has_its_norm_under_its_name():
    grads = mixed()
    _, state = clipped(grads)
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


def test_updates_norm_and_scale_are_to_the_last_bit_those_without():
    def step(grads, max_norm, leaves):
        tx = shrewjax.clip_by_global_norm(max_norm, per_leaf=leaves)
        return tx.update(grads, tx.init(grads))

    with_norms, without_norms = (quick_jit(functools.partial(step, leaves=leaves)) for leaves in (True, False))
    for scale, max_norm in itertools.product([1.0, 1e25, 1e-25, np.nan, np.inf], [0.0, 1.0, np.inf]):
        grads = {"a": f32([3, -4, 1e-3]) * f32(scale), "b": f32([[0.1], [7]])}
        updates, state = with_norms(grads, f32(max_norm))
        expected, without = without_norms(grads, f32(max_norm))
        assert bits(updates) == bits(expected), (scale, max_norm)
        assert bits(state[:2]) == bits(without[:2]), (scale, max_norm)
        assert without.leaf_norms == ()


def leaves_of(*values):
    """Leaves a, b and c of one shape, filled up with zeros: one program for all."""
    return {name: f32([*x, 0, 0, 0])[:4] for name, x in itertools.zip_longest("abc", values, fillvalue=[0])}


HUGE, SMALL = [3e20, 4e20], [3e-16, 4e-16]
EDGES = {
    "one leaf": ({"a": f32([3, 4])}, [5], 1, "a"),
    "the whole tree": (f32([3, 4]), [5], 1, "(the tree itself)"),
    "NaN": (leaves_of([1], [np.nan, 1], [9]), [1, np.nan, 9], np.nan, "b"),
    "NaN beside infinity": (leaves_of([np.inf], [np.nan]), [np.inf, np.nan, 0], np.nan, "b"),
    "infinity": (leaves_of([1e-9], [1, -np.inf]), [1e-9, np.inf, 0], 1, "b"),
    "two infinities": (leaves_of([np.inf], [1], [-np.inf]), [np.inf, 1, np.inf], 0.5, "a"),
    "zeros": (leaves_of([0, -0.0], [0]), [0, 0, 0], 0, "a"),
    "a zero leaf": (leaves_of([0], [2]), [0, 2, 0], 1, "b"),
    "squares above float32": (leaves_of(HUGE, [1e-3]), [5e20, 1e-3, 0], 1, "a"),
    "a sum above float32": (leaves_of([1.5e19], [1.5e19]), [1.5e19, 1.5e19, 0], 0.5, "a"),
    "squares below float32": (leaves_of([1e-30], [3e-30, 4e-30]), [1e-30, 5e-30, 0], 25 / 26, "b"),
    "squares above the smallest normal": (leaves_of(SMALL, [2]), [5e-16, 2, 0], 1, "b"),
    "a flushed leaf": (leaves_of([1e-20], [2]), [0, 2, 0], 1, "b"),
    "a leaf beyond float32": (leaves_of([3e38] * 4, [1e38]), [np.inf, 1e38, 0], 1, "a"),
    "float16": ({"a": np.full(10, 300, np.float16), "b": np.ones(1, np.float16)}, [300 * 10**0.5, 1], None, "a"),
    "names that are alike": ({"a/b": f32([1]), "a": {"b": f32([2])}}, [2, 1], 0.8, "['a']['b']"),
}


@pytest.mark.parametrize(("grads", "norms", "share", "name"), EDGES.values(), ids=EDGES)
def test_norms_by_leaf_follow_the_table(grads, norms, share, name):
    _, state = clipped(grads)
    np.testing.assert_allclose(jax.tree.leaves(state.leaf_norms), norms, rtol=1e-6)
    measured = metrics_of(state)
    if share is not None:
        np.testing.assert_allclose(measured["largest_share"], share, rtol=1e-6)
    assert largest_leaf(measured) == name


def test_no_leaves_have_no_norms():
    assert set(metrics_of(clipped({})[1])) == {"grad_norm", "clip_scale", "count", "clipped", "clip_rate"}


def test_float64_leaves_are_measured_in_float64(x64):
    grads = {"a": np.full(4, 1e-200, np.float64 if x64 else f32), "b": np.zeros(1, f32)}
    _, state = clipped(grads)
    norms = (state.grad_norm, state.clip_scale, state.leaf_norms)
    assert {x.dtype for x in jax.tree.leaves(norms)} == {jnp.dtype(jnp.float64 if x64 else jnp.float32)}
    if x64:
        wide = {"a": np.full(4, 1e25), "b": np.full(1, 1e-3, f32)}
        found = clipped(wide)[1].leaf_norms
        np.testing.assert_allclose([found["a"], found["b"]], [2e25, 1e-3], rtol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_norms_of_sharded_leaves_are_those_of_the_whole(check_vma):
    mesh = mesh_of(data=8)
    rng = np.random.default_rng(3)
    grads = {"sharded": f32(rng.normal(size=(16, 3))), "whole": f32(rng.normal(size=4))}
    specs = {"sharded": jax.P("data"), "whole": jax.P()}
    if not check_vma:  # then all are shards
        grads["whole"], specs["whole"] = f32(rng.normal(size=(8, 4))), jax.P("data")
    tx = shrewjax.clip_by_global_norm(1.0, per_leaf=True, sharded_over=None if check_vma else "data")

    def update(grads):
        updates, state = tx.update(grads, tx.init(jax.tree.map(jnp.zeros_like, grads)))
        return updates, state

    mapped = jax.shard_map(update, mesh=mesh, in_specs=(specs,), out_specs=(specs, jax.P()), check_vma=check_vma)
    updates, state = quick_jit(mapped)(grads)
    for name, leaf in grads.items():
        assert float(state.leaf_norms[name]) == pytest.approx(float(true_norm(leaf)), rel=1e-6)
    assert float(true_norm(updates)) == pytest.approx(1, rel=1e-6)


def test_rows_of_vmap_have_norms_of_their_own_and_so_do_their_metrics():
    tx = shrewjax.clip_by_global_norm(1.0, per_leaf=True)

    @quick_jit
    def run(grads):
        states = jax.vmap(lambda g: tx.update(g, tx.init(g))[1])(grads)
        return states, shrewjax.metrics(states), jax.vmap(shrewjax.metrics)(states)

    states, *metrics = run({"a": f32([[3, 4], [0, 0], [3e25, 4e25]]), "b": f32([1, 2, 1e-3])})
    np.testing.assert_allclose(states.leaf_norms["a"], f32([5, 0, 5e25]), rtol=1e-6)
    np.testing.assert_allclose(states.leaf_norms["b"], f32([1, 2, 1e-3]), rtol=1e-6)
    for found in metrics:
        np.testing.assert_allclose(found[KIND + "largest_share"], [25 / 26, 1, 1], rtol=1e-6)
        np.testing.assert_array_equal(found[KIND + "largest_leaf"], [0, 1, 0])


def test_derivative_through_the_clip_is_that_without():
    def loss(grads, leaves):
        tx = shrewjax.clip_by_global_norm(2.0, per_leaf=leaves)
        updates, state = tx.update(grads, tx.init(grads))
        return jnp.sum(updates["a"] ** 3) + updates["b"][0] + state.grad_norm

    def norm_of_a_leaf(grads):
        tx = shrewjax.clip_by_global_norm(2.0, per_leaf=True)
        return tx.update(grads, tx.init(grads))[1].leaf_norms["a"]

    @quick_jit
    def slopes(grads):
        losses = (functools.partial(loss, leaves=leaves) for leaves in (True, False))
        return [jax.grad(function)(grads) for function in (*losses, norm_of_a_leaf)]

    found, expected, of_a_leaf = slopes({"a": f32([3, -4]), "b": f32([0.5])})
    np.testing.assert_allclose(flat(found), flat(expected), rtol=1e-6)
    assert not np.any(flat(of_a_leaf))


def test_metrics_of_zeros_and_of_norms_beyond_float32_make_no_nan():
    with jax.debug_nans(True):
        for scale in (0.0, 3e38):
            _, state = clipped({"a": np.full(4, scale, f32), "b": np.ones(1, f32)}, np.inf)
            shrewjax.metrics(state)


def test_the_state_is_a_tree_like_the_parameters_and_stays_one():
    grads = mixed()
    tx = shrewjax.clip_by_global_norm(1.0, per_leaf=True)
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
        (lambda: shrewjax.clip_by_global_norm(1.0, per_leaf=1), r"per_leaf must be True or False, got 1"),
        (lambda: shrewjax.clip_by_global_norm(1.0, per_leaf=jnp.array(True)), r"per_leaf must be True or False"),
        (
            lambda: shrewjax.clip_by_global_norm(1.0, ord=1, per_leaf=True),
            r"ord must be 2 with per_leaf=True, got 1.0. Leave out ord or per_leaf",
        ),
        (
            lambda: shrewjax.clip_by_global_norm(1.0, per_leaf=True).update(
                {"new": jnp.ones(1)}, shrewjax.clip_by_global_norm(1.0, per_leaf=True).init({"old": jnp.ones(1)})
            ),
            r"gradient leaves \['new'\] have no numbers in the state. Call init with parameters like",
        ),
    ],
)
def test_what_is_wrong_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_scheduled_threshold_keeps_the_norms():
    tx = optax.inject_hyperparams(shrewjax.clip_by_global_norm)(max_norm=1.0, per_leaf=True)
    grads = {"a": f32([3]), "b": f32([4])}
    _, state = quick_jit(lambda grads: tx.update(grads, tx.init(grads)))(grads)
    assert float(metrics_of(state)["largest_share"]) == pytest.approx(0.64)
