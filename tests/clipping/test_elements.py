"""Every row of the table of the percentile clip."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bits, flat, thorough
from speed import quick_jit, users_jit

import shrewjax

f32 = np.float32

pytestmark = pytest.mark.usefixtures("one_device")


@functools.cache
def compiled(jit, is_argument, **options):
    """The first step of the transformation as a program, of which a number as percentile is a part."""

    def first_step(tree, percentile):
        tx = shrewjax.clip_by_percentile(percentile, **options)
        return tx.update(tree, tx.init(tree))

    return jit(first_step, static_argnums=() if is_argument else 1)


def by_percentile(tree, percentile, *, jit=quick_jit, **options):
    clipped, state = jax.device_get(compiled(jit, isinstance(percentile, jax.Array), **options)(tree, percentile))
    return clipped, state.bound, state


TREE = {"a": f32([1, 2, 3]), "n": np.arange(2), "none": None, "b": f32([10, 20, 60])}


@pytest.mark.parametrize("scope", ["leaf", *thorough("global")])
def test_the_function_clips_as_the_transformation(scope):
    clipped, bound = quick_jit(lambda tree: shrewjax.clip_grad_percentile(tree, 50, scope=scope))(TREE)
    expected, expected_bound, _ = by_percentile(TREE, 50, scope=scope)
    assert bits(clipped) == bits(expected)
    assert bits(bound) == bits(expected_bound)


# `numerics/test_percentiles.py` has all methods in the default run.
@pytest.mark.parametrize("method", ["linear", "lower"])
def test_percentile_clip_limits_what_is_above_and_keeps_every_other_bit(method):
    rng = np.random.default_rng(0)
    tree = {"a": f32(rng.standard_normal((20, 5))), "b": f32([1e-40, -0.0, -1e-41, 1e3])}
    jit = users_jit if method == "linear" else quick_jit  # the other picks an element
    clipped, bound, state = by_percentile(tree, 80, method=method, jit=jit)
    everything = np.concatenate([np.ravel(x) for x in tree.values()])
    expected_bound = np.percentile(np.abs(everything.astype(float)), 80, method=method)
    np.testing.assert_allclose(bound, expected_bound, rtol=1e-7)
    for name, x in tree.items():
        expected = np.where(np.abs(x) > bound, np.copysign(bound, x), x)
        assert bits(clipped[name]) == bits(expected)
    np.testing.assert_allclose(state.clipped_fraction, np.mean(np.abs(everything) > bound), rtol=2e-7)


def test_the_bound_is_rounded_toward_zero_to_each_leafs_dtype():
    tree = {"f": f32([1, 1.7, 3]), "h": np.asarray([1, 4, 8], jnp.bfloat16)}
    clipped, bound, _ = by_percentile(tree, 43)
    assert 1 < float(bound) < 2
    h = clipped["h"].astype(float)
    assert h[0] == 1
    assert h[1] == h[2] <= float(bound) < h[1] + 2.0**-7
    assert clipped["h"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("dtype", "integers", "given_as"),
    [("float32", "i4", jnp.float32), ("bfloat16", "i2", int), *thorough(("float32", "i4", int))],
)
def test_percentile_of_the_subnormal_is_subnormal(dtype, integers, given_as):
    units = np.asarray([0, 1, 2, 3, 100, 6, 7], integers)  # multiples of the smallest number
    clipped, _, _ = by_percentile(units.view(jnp.dtype(dtype)), given_as(50), method="lower", jit=users_jit)
    assert clipped.view(integers).tolist() == [0, 1, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("given_as", [float, jnp.float32])
def test_percentile_100_is_the_identity_and_zero_the_smallest(given_as):
    tree = {"a": f32([np.inf, 2, -3]), "z": np.complex64([3 + 4j, 1e-30j])}
    clipped, bound, state = by_percentile(tree, given_as(100))
    assert bits(clipped) == bits(tree)
    assert bound == np.inf
    assert state.clipped_fraction == 0
    clipped, bound, _ = by_percentile(tree | {"z": np.complex64([2, -5j])}, given_as(0))
    assert clipped["a"].tolist() == [2, 2, -2]
    assert clipped["z"].tolist() == [2, -2j]
    assert bound == 2


def test_infinity_counts_as_the_largest_and_is_clipped():
    clipped, bound, state = by_percentile(f32([np.inf, 1, -2, -np.inf, 3]), jnp.float32(50))
    assert clipped.tolist() == [3, 1, -2, -3, 3]
    assert bound == 3
    assert float(state.clipped_fraction) == f32(0.4)


@pytest.mark.parametrize("given_as", [jnp.float32, *thorough(int)])
def test_a_nan_makes_every_floating_leaf_nan_or_its_own(given_as):
    tree = {"a": f32([1, np.nan]), "b": np.asarray([1, 2], jnp.bfloat16), "n": np.arange(3)}
    for percentile in (50, 100, 0):
        clipped, bound, state = by_percentile(tree, given_as(percentile))
        assert np.isnan(flat(clipped)).all(), percentile
        assert np.isnan(bound)
        assert np.isnan(state.clipped_fraction)
        assert clipped["n"].tolist() == [0, 1, 2]
        clipped, bounds, _ = by_percentile(tree, given_as(percentile), scope="leaf")
        assert np.isnan(clipped["a"]).all(), percentile
        assert not np.isnan(flat(clipped["b"])).any()
        assert np.isnan(bounds["a"])


def test_traced_percentiles_outside_of_the_range_count_as_its_ends():
    x = f32([1, 2, 3, 4, 5])
    for value, end in ((-5.0, 0), (250.0, 100), (np.inf, 100), (-np.inf, 0)):
        clipped, expected = (by_percentile(x, jnp.float32(percentile))[0] for percentile in (value, end))
        assert bits(clipped) == bits(expected), value
        assert clipped.tolist() == ([1, 2, 3, 4, 5] if end else [1] * 5)
    assert np.isnan(by_percentile(x, jnp.float32(np.nan))[0]).all()


def test_sparse_gradients_are_zeroed_unless_only_the_nonzero_count():
    sparse = f32([1, 2, -3, 40] + [0] * 96)
    clipped, bound, _ = by_percentile(sparse, 90)
    assert bound == 0
    assert not np.any(clipped)
    clipped, bound, state = by_percentile(sparse, 50, over="nonzero")
    assert bound == 2.5
    assert clipped[:4].tolist() == [1, 2, -2.5, 2.5]
    assert float(state.clipped_fraction) == f32(0.02)
    nothing = f32([0.0, -0.0] * 50)
    assert bits(by_percentile(nothing, 50, over="nonzero")[0]) == bits(nothing)


def test_one_bound_a_leaf_and_a_tree_of_them():
    clipped, bounds, state = by_percentile(TREE, 50, scope="leaf")
    assert clipped["a"].tolist() == [1, 2, 2]
    assert clipped["b"].tolist() == [10, 20, 20]
    assert bounds["a"] == 2
    assert bounds["b"] == 20
    assert bounds["n"] == 0
    assert bounds["none"] is None
    assert float(state.clipped_fraction) == f32(2 / 6)


def test_no_gradient_where_the_state_has_a_bound():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    tx = shrewjax.clip_by_percentile(50, scope="leaf")
    clipped, state = quick_jit(tx.update)({"a": jnp.float32([1, 3]), "b": None}, tx.init(params))
    assert clipped["a"].tolist() == [1, 2]
    assert clipped["b"] is None
    assert state.bound == {"a": 2, "b": 0}
    assert by_percentile({"n": None}, 50.0, scope="leaf")[0] == {"n": None}


def test_many_small_leaves_take_no_memory():
    leaves = [np.ones(2**14, f32)] * 16
    program = users_jit(lambda g: shrewjax.clip_grad_percentile(g, 90)[1]).lower(leaves).compile()
    assert program.memory_analysis().temp_size_in_bytes < 0.05 * 16 * 2**16


def test_complex_elements_are_clipped_by_modulus_and_keep_their_phase():
    z = np.complex64([3 + 4j, 0.1j, -30 + 40j, 0])
    clipped, bound, _ = by_percentile(z, 75, method="lower")
    np.testing.assert_allclose(bound, 5, rtol=2e-7)
    np.testing.assert_allclose(clipped, [3 + 4j, 0.1j, -3 + 4j, 0], rtol=1e-6)


def test_the_gradient_through_a_percentile_clip_takes_the_bound_as_constant():
    def loss(x):
        return jnp.sum(shrewjax.clip_grad_percentile(x, 50)[0])

    assert quick_jit(jax.grad(loss))(f32([1, -2, 5])).tolist() == [1, 1, 0]


def test_the_search_starts_from_the_state_and_ends_at_the_same_bits():
    rng = np.random.default_rng(0)
    tx = shrewjax.clip_by_percentile(90)
    update, afresh = quick_jit(tx.update), quick_jit(lambda x: shrewjax.clip_grad_percentile(x, 90)[0])
    state = tx.init(jnp.zeros(3))
    for scale in (1, 1.01, 1e-6, 1e6, 0, 1):
        x = f32(scale * rng.standard_normal(500))
        clipped, state = update(x, state)
        assert bits(clipped) == bits(afresh(x)), scale


def clip_to_each(x, bounds):
    return [shrewjax.clip_grad_value(x, bound) for bound in bounds]


def test_a_threshold_that_is_flushed_leaves_zeros_alone():
    x = f32([0.0, -0.0, 1.0, -2.0])
    for clipped in jax.device_get(quick_jit(lambda x, limit: clip_to_each(x, (1e-41, limit)))(x, f32(1e-41))):
        assert np.all(np.abs(clipped) <= 1e-41)
        assert bits(clipped[:2]) == bits(x[:2])


# --- the rows of the value table ----------------------------------------------------------------------------------

FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2]


BOUNDS = [0.0, 0.1, 1.0, 1 / 3, 7.3, 1e6, np.float64(0.1), jnp.float32(0.1), jnp.bfloat16(0.3)]


@pytest.mark.parametrize("dtype", FLOATS)
def test_value_clip_never_leaves_the_interval_and_touches_nothing_inside(dtype):
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    x = np.asarray([0.0, -0.0, smallest, -smallest, 0.05, -0.05, 0.1, 1, -1, 7, 400, -400], dtype)
    for bound, clipped in zip(BOUNDS, jax.device_get(quick_jit(lambda x: clip_to_each(x, BOUNDS))(x)), strict=True):
        exact, before, after = float(bound), np.float64(x), np.float64(clipped)
        assert clipped.dtype == dtype
        assert (np.abs(after) <= exact).all(), bound
        assert bits(clipped[np.abs(before) <= exact]) == bits(x[np.abs(before) <= exact]), bound
        outside = np.abs(before) > exact
        assert (after[outside] * before[outside] >= 0).all(), bound
        # nothing between the result and the bound: the next number up is beyond it
        nearest = np.float64(np.asarray(exact, dtype)) if exact < float(jnp.finfo(dtype).max) else np.inf
        distance = np.abs(np.abs(after[outside]) - exact)
        assert (distance <= abs(nearest) * float(jnp.finfo(dtype).eps)).all(), bound


def test_value_clip_of_nan_and_infinities():
    x = f32([np.nan, np.inf, -np.inf, 2])
    for given_as in (float, np.float32, jnp.float32):
        np.testing.assert_array_equal(shrewjax.clip_grad_value(x, given_as(1.0)), f32([np.nan, 1, -1, 1]))
        assert bits(shrewjax.clip_grad_value(x, given_as(np.inf))) == bits(x), given_as


def test_value_clip_with_odd_traced_bounds():
    x = f32([1, -1, 0, np.nan])
    np.testing.assert_array_equal(shrewjax.clip_grad_value(x, jnp.float32(-3)), f32([0, 0, 0, np.nan]))
    assert np.isnan(shrewjax.clip_grad_value(x, jnp.float32(np.nan))).all()
    np.testing.assert_array_equal(shrewjax.clip_grad_value(4 * x, jnp.int32(2)), f32([2, -2, 0, np.nan]))


def test_value_clip_of_complex_limits_the_modulus_and_keeps_the_phase():
    z = np.complex64([3 + 4j, 0.3 + 0.4j, -1e30j, 3e38 + 3e38j, 1e-30j, 0, np.inf, 1j * np.nan])
    clipped, unclipped = jax.device_get(quick_jit(lambda z: clip_to_each(z, (1.0, np.inf)))(z))
    np.testing.assert_allclose(clipped[:4], np.complex64([0.6 + 0.8j, 0.3 + 0.4j, -1j, 0.5**0.5 * (1 + 1j)]), rtol=3e-7)
    assert bits(clipped[4:6]) == bits(z[4:6])
    assert np.isnan(clipped[6:]).all()
    assert bits(unclipped) == bits(z)


@pytest.mark.usefixtures("x64_only")
def test_value_clip_of_complex_rounds_a_wider_threshold_toward_zero():
    clip = lambda limit: jnp.abs(shrewjax.clip_grad_value(np.complex64([3]), limit)[0])  # noqa: E731
    limit, slope = jax.value_and_grad(clip)(jnp.float64(0.1))
    assert float(limit) == np.nextafter(f32(0.1), f32(0))  # f32(0.1) is above 0.1
    assert float(slope) == 1


def test_derivative_through_the_value_clip_of_a_complex_zero_is_that_of_the_identity():
    def parts_of_the_clipped(parts):
        clipped = shrewjax.clip_grad_value(jax.lax.complex(*parts), 2.0)
        return jnp.sum(clipped.real) + jnp.sum(clipped.imag)

    np.testing.assert_array_equal(quick_jit(jax.grad(parts_of_the_clipped))(jnp.zeros((2, 1))), [[1], [1]])


def test_derivative_through_the_value_clip():
    slope = quick_jit(jax.grad(lambda x: jnp.sum(shrewjax.clip_grad_value(x, 1.0))))(jnp.array([0.5, -2.0, 0.0, 3.0]))
    np.testing.assert_array_equal(slope, [1, 0, 1, 0])
    slope = quick_jit(jax.grad(lambda c: jnp.sum(shrewjax.clip_grad_value(jnp.array([2.0, -3.0, 5.0, 0.1]), c))))(1.0)
    assert float(slope) == 1


@pytest.mark.parametrize("rule", [shrewjax.clip_by_percentile, functools.partial(shrewjax.clip_grad_percentile, {})])
def test_a_scope_is_global_or_leaf_and_the_error_offers_no_other(rule):
    with pytest.raises(ValueError, match=r"^scope must be one of 'global', 'leaf', got 'both'$"):
        rule(90, scope="both")


@pytest.mark.parametrize("clip", ["value", "percentile"])
def test_clip_with_a_traced_threshold_keeps_subnormal_bfloat16_in_vectors_and_beside_them(clip):
    """A CPU with bfloat16 instructions flushes subnormals in them (XLA-28); in loops of 17, in the last element."""
    functions = {"value": shrewjax.clip_grad_value, "percentile": lambda x, p: shrewjax.clip_grad_percentile(x, p)[0]}
    clipped = users_jit(functions[clip])
    for size in (2, 17):
        units = (np.arange(1, size + 1) | (np.arange(size) % 2 << 15)).astype(np.uint16)  # of both signs
        x = jnp.asarray(units.view(jnp.bfloat16))
        assert np.asarray(clipped(x, jnp.float32(100))).view(np.uint16).tolist() == units.tolist()
