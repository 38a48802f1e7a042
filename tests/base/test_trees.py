"""Which leaves are gradients, how they become arrays, and what messages call them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import true_norm
from jax.experimental import sparse
from speed import quick_jit

import shrewjax
from shrewjax._base import trees

f32 = np.float32


def test_leaf_that_is_no_array_is_named():
    with pytest.raises(ValueError, match=r"gradient leaf \['layer'\]\[1\] must be an array or a number, got 'text'"):
        shrewjax.grad_norm({"layer": [np.ones(2, f32), "text"]})


@pytest.mark.parametrize("name", ["clip_by_global_norm", "clip_by_leaf_norm", "clip_by_value"])
def test_what_holds_no_floats_passes_through(name):
    tree = {
        "int": np.arange(3),
        "flag": np.array([True]),
        "float0": np.zeros(2, jax.dtypes.float0),
        "key": jax.random.key(0),
        "none": None,
        "masked": optax.MaskedNode(),
        "empty": np.zeros((0, 3), f32),
        "x": f32([3, 4]),
    }
    tx = getattr(shrewjax, name)(1.0)
    clipped, _ = tx.update(tree, tx.init(tree))
    assert jax.tree.structure(clipped) == jax.tree.structure(tree)
    for k in ("int", "flag", "float0", "empty"):
        assert clipped[k].dtype == tree[k].dtype
        np.testing.assert_array_equal(clipped[k], tree[k])
    assert clipped["key"] is tree["key"]
    assert float(true_norm(clipped["x"])) == pytest.approx(1.0 if "norm" in name else 2**0.5, rel=3e-7)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_numpy_leaves_wider_than_jax_allows_are_taken_as_jax_has_them(dtype):
    leaf = np.asarray([3, 4], dtype)
    narrow = {"float64": jnp.float32, "complex128": jnp.complex64}[dtype]
    window = shrewjax.GradAccumulator(1)

    @quick_jit
    def run():
        by_value = shrewjax.clip_grad_value([leaf], 1.0)[0]
        return *shrewjax.clip_grad_norm([leaf], 1.0), by_value, window.take(window.add(start, [leaf]))[0][0]

    start = window.init([jnp.asarray(leaf)])
    clipped, norm, by_value, average = run()
    assert (clipped[0].dtype, norm.dtype) == (narrow, jnp.float32)
    np.testing.assert_allclose(clipped[0], leaf / 5, rtol=3e-7)
    np.testing.assert_allclose(by_value, [1, 1], rtol=3e-7)
    np.testing.assert_array_equal(average, leaf)


def test_python_numbers_are_leaves():
    clipped, norm = shrewjax.clip_grad_norm({"a": 3.0, "b": 4.0, "n": 7}, 1.0)
    assert float(norm) == 5
    np.testing.assert_allclose([clipped["a"], clipped["b"]], [0.6, 0.8], rtol=1e-6)
    assert clipped["n"] == 7


@pytest.mark.parametrize(
    ("tree", "names"),
    [
        ({"dense": {"kernel": 1, "bias": 2}}, ["dense/bias", "dense/kernel"]),
        ({"a/b": 1, "a": {"b": 2}}, ["['a']['b']", "['a/b']"]),
        (1, ["(the tree itself)"]),
    ],
    ids=["short", "of two leaves the same", "the tree itself"],
)
def test_leaves_have_short_names_in_logs_unless_these_are_empty_or_of_two_leaves(tree, names):
    assert trees.leaf_names(tree) == names


def test_a_sparse_gradient_that_may_repeat_an_index_is_an_error_with_a_remedy_that_is_right():
    repeated = sparse.BCOO((jnp.ones((2, 1)), jnp.array([[1], [1]])), shape=(4, 1))
    for call in (shrewjax.grad_norm, jax.jit(shrewjax.grad_norm), lambda g: shrewjax.clip_grad_value(g, 0.5)):
        with pytest.raises(ValueError, match=r"\['table'\] must have each index once, .* Call its sum_duplicates"):
            call({"table": repeated})
    for x in (repeated.sum_duplicates(nse=repeated.nse), repeated.todense()):
        assert shrewjax.grad_norm({"table": x}) == 2


class AttrDict(dict):
    __getattr__ = dict.__getitem__


jax.tree_util.register_pytree_node(
    AttrDict, lambda x: (tuple(x.values()), tuple(x)), lambda names, values: AttrDict(zip(names, values, strict=True))
)


def test_a_container_that_raises_for_missing_attributes_holds_leaves_as_any_other():
    grads = AttrDict(a=jnp.full(2, 3.0), b=jnp.full(2, 4.0))
    np.testing.assert_allclose(shrewjax.grad_norm(grads), np.sqrt(50), rtol=1e-6)
    value, found = shrewjax.value_and_grad(lambda p, x: jnp.mean(x * p.a[0] + p.b[0]), 2)(grads, jnp.ones(4))
    assert value == 7
    np.testing.assert_array_equal(found["a"], [1, 0])
    tx = shrewjax.accumulate(optax.sgd(1.0), 1)
    updates, state = tx.update(grads, tx.init(grads), grads)
    np.testing.assert_array_equal(updates.a, -grads.a)
    assert shrewjax.metrics(AttrDict(optimizer=state))["accumulate/windows"] == 1
