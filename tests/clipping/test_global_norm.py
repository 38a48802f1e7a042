"""The norm clip, row by row of its table. `definition/test_spec.py` has any gradients, in exact fractions."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bits, flat, tree_of, true_norm
from speed import quick_jit, users_jit

import shrewjax

f32 = np.float32
pytestmark = pytest.mark.usefixtures("one_device")
TINY = float(np.finfo(np.float32).tiny)


def by_function(tree, max_norm, ord=None):
    return shrewjax.clip_grad_norm(tree, max_norm, ord=ord)


def by_transformation(tree, max_norm, ord=None):
    tx = shrewjax.clip_by_global_norm(max_norm, ord=ord)
    clipped, state = tx.update(tree, tx.init(tree))
    return clipped, state.grad_norm


def by_leaf(tree, max_norm, ord=None):
    tx = shrewjax.clip_by_leaf_norm(max_norm, ord=ord)
    clipped, state = tx.update(tree, tx.init(tree))
    return clipped, jax.tree.leaves(state.grad_norm)[0]


# Given a tree of one leaf, all three must do the same. Each takes one kind of threshold where the kind matters.
CLIPS = [by_function, by_transformation, by_leaf]
each_clip = pytest.mark.parametrize("clip", CLIPS)
each_way = pytest.mark.parametrize(
    ("clip", "given_as"), [(by_function, float), (by_transformation, jnp.float32), (by_leaf, np.float32)]
)


def eps(tree):
    return max(float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(tree))


# --- the rows of the norm table -----------------------------------------------------------------------------------


@each_way
def test_infinite_threshold_leaves_every_bit_and_measures(clip, given_as):
    for values in ([3, 4], [np.nan, 1e-40], [np.inf, -0.0], [-np.inf, np.nan], [3e38, 3e38]):
        tree = [f32(values)]
        clipped, norm = clip(tree, given_as(np.inf))
        assert bits(clipped) == bits(tree), values
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(norm, np.float32(true_norm(tree)), rtol=1e-6)


@each_way
def test_nonfinite_gradient_makes_every_floating_leaf_nan(clip, given_as):
    for bad, limit in itertools.product([np.nan, np.inf, -np.inf], [0.0, 1.0, 1e30]):
        clipped, norm = clip([f32([1, bad, 0])], given_as(limit))
        assert np.isnan(clipped[0]).all(), (bad, limit)
        np.testing.assert_equal(float(norm), abs(bad))


def test_nonfinite_gradient_of_one_leaf_reaches_all_leaves_but_not_integers():
    tree = {"a": f32([1]), "b": np.float16([np.inf]), "c": np.complex64([1j]), "i": np.arange(2), "n": None}
    clipped, _ = shrewjax.clip_grad_norm(tree, 1.0)
    assert np.isnan(flat(clipped)).all()
    np.testing.assert_array_equal(clipped["i"], [0, 1])
    assert clipped["n"] is None


@each_clip
def test_traced_nan_threshold_makes_every_floating_leaf_nan(clip):
    for tree in ([f32([3, 4])], [f32([0, 0])]):
        assert np.isnan(clip(tree, jnp.float32(np.nan))[0][0]).all()


@each_clip
def test_traced_negative_threshold_is_as_zero(clip):
    for limit in (-1.0, -np.inf):
        clipped, norm = clip([f32([3, -4])], jnp.float32(limit))
        np.testing.assert_array_equal(clipped[0], [0, 0], err_msg=str(limit))
        assert float(norm) == 5


@each_way
def test_gradients_inside_keep_every_bit(clip, given_as):
    for dtype, limit in itertools.product([jnp.float32, jnp.bfloat16, jnp.float16], [5.0, 5.5, 3e38]):
        smallest = float(jnp.finfo(dtype).smallest_subnormal)
        tree = [jnp.asarray([3, 4, -0.0, 0.0, smallest, -smallest, 3 * smallest], dtype)]
        clipped, norm = clip(tree, given_as(limit))
        assert bits(clipped) == bits(tree), (dtype, limit)
        assert float(norm) == 5


@each_way
def test_zero_gradients_stay_zero(clip, given_as):
    for limit in (0.0, 1e-30, 1.0, np.inf):
        clipped, norm = clip([f32([0, -0.0, 0])], given_as(limit))
        np.testing.assert_array_equal(clipped[0], [0, 0, 0], err_msg=str(limit))
        assert float(norm) == 0


@each_way
def test_zero_threshold_gives_zeros(clip, given_as):
    for scale in (1.0, 1e30, 1e-30, 1e-40):
        clipped, _ = clip([f32([3 * scale, -4 * scale])], given_as(0.0))
        np.testing.assert_array_equal(clipped[0], [0, 0], err_msg=str(scale))


@each_way
def test_gradients_outside_land_on_the_threshold_in_their_direction(clip, given_as):
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        x = jnp.asarray(np.random.default_rng(0).normal(size=(40, 5)), dtype)
        underflow = float(jnp.finfo(dtype).tiny)
        for limit in map(given_as, (1.0, 0.3, 1e-3, (1 - 1e-6) * float(true_norm([x])))):
            (clipped,), norm = clip([x], limit)
            assert clipped.dtype == dtype
            exact = np.asarray(x, np.longdouble) * (np.longdouble(float(limit)) / true_norm([x]))
            rtol, case = 2 * eps([x]), f"{clipped.dtype}, {limit}"
            np.testing.assert_allclose(np.float64(clipped), np.float64(exact), rtol=rtol, atol=underflow, err_msg=case)
            assert true_norm([clipped]) == pytest.approx(float(limit), rel=rtol, abs=200**0.5 * underflow), case
            assert float(norm) == pytest.approx(float(true_norm([x])), rel=1e-6), case


RANGES = [
    ([1e20, 1e20], 1.0),  # the squares overflow
    ([1e-25, 2e-25], 1e-26),  # the squares underflow
    ([3e38, 3e38, 3e38], 1.0),  # the norm overflows
    ([3e38, 3e38, 3e38], 3e38),
    ([2.0**33, 2.0**33], 2.0**-112),  # limit / norm underflows
    ([2.0**127], 2.0**-126),  # from the largest norm to the smallest threshold
    ([3.4e38], 4e-38),
    ([3e38, 1e38], 1e-37),
    ([2e-38, 2e-38], 2.4e-38),
    ([1e-10, 1e-10], 1e-11),
]


@each_clip
def test_neither_the_norm_nor_the_quotient_nor_the_product_leaves_the_range(clip):
    for values, limit in RANGES:
        (clipped,), _ = clip([f32(values)], limit)
        exact = np.longdouble(f32(values)) * (np.longdouble(limit) / true_norm([f32(values)]))
        subnormal = len(values) ** 0.5 * TINY if np.min(exact) < TINY else 0
        case = f"{values}, {limit}"
        np.testing.assert_allclose(np.float64(clipped), np.float64(exact), rtol=2.4e-7, atol=subnormal, err_msg=case)


@each_clip
def test_static_threshold_beyond_float32_is_finite_still(clip):
    tree = [f32([3e38, 3e38, 3e38])]
    clipped, norm = clip(tree, 1e300)
    assert bits(clipped) == bits(tree)
    assert float(norm) == np.inf  # the reading, not the decision
    assert np.isnan(clip([f32([np.inf])], 1e300)[0][0]).all()


@pytest.mark.parametrize("ord", [1, 1.5, 3, 10, np.inf])
def test_other_norms_land_on_the_threshold(ord):
    for clip, scale in itertools.product(CLIPS, [1.0, 1e25, 1e-25]):
        x = f32(np.random.default_rng(1).normal(size=(7, 3)) * scale)
        (clipped,), norm = clip([x], 0.25 * scale, ord=ord)
        assert float(norm) == pytest.approx(float(true_norm([x], ord)), rel=1e-6, abs=0), (clip, scale)
        tolerance = (2 if ord == np.inf else 4) * 2.0**-23
        assert float(true_norm([clipped], ord)) == pytest.approx(0.25 * scale, rel=tolerance, abs=0), (clip, scale)


def test_mixed_dtypes_are_scaled_alike_and_kept():
    tree = {"half": np.float16([1.0]), "brain": jnp.ones(1, jnp.bfloat16), "single": f32([1e5])}
    clipped, norm = shrewjax.clip_grad_norm(tree, 6e4)
    assert {k: v.dtype for k, v in clipped.items()} == {k: v.dtype for k, v in tree.items()}
    assert float(norm) == pytest.approx(1e5, rel=1e-6)
    assert float(clipped["half"][0]) == pytest.approx(0.6, rel=1e-3)
    assert float(clipped["brain"][0]) == pytest.approx(0.6, rel=1e-2)
    assert float(clipped["single"][0]) == pytest.approx(6e4, rel=1e-6)


def test_float64_leaf_makes_the_whole_sum_float64():
    with jax.enable_x64(True):
        tree = {"a": np.float64([3e200]), "b": f32([4.0]), "c": np.complex128([4e200j])}
        clipped, norm = users_jit(shrewjax.clip_grad_norm)(tree, 1.0)
        assert norm.dtype == jnp.float64
        assert float(norm) == pytest.approx(5e200, rel=1e-15)
        assert [clipped[k].dtype for k in "abc"] == [jnp.float64, jnp.float32, jnp.complex128]
        assert float(true_norm(clipped)) == pytest.approx(1.0, rel=4e-16)


@each_clip
def test_empty_trees_and_leaves_pass_through(clip):
    if clip is not by_leaf:
        assert clip({}, 1.0)[0] == {}
        assert float(clip({}, 1.0)[1]) == 0
    assert clip([np.zeros((0, 2), f32)], 1.0)[0][0].shape == (0, 2)


def test_complex_gradients_keep_their_phase():
    z = np.complex64([3 + 4j, -12j, 0])
    clipped, norm = shrewjax.clip_grad_norm([z], 1.3)
    assert float(norm) == 13
    np.testing.assert_allclose(clipped[0], z / 10, rtol=3e-7)


def test_derivative_through_the_clip():
    def clipped(x):
        return shrewjax.clip_grad_norm([x[:1], x[1:]], 1.0)[0]

    def projected(x):
        return [y / jnp.linalg.norm(x) for y in (x[:1], x[1:])]

    x = jnp.array([3.0, 4.0, -1.0])
    jacobian = quick_jit(jax.jacobian(clipped))
    for got, want in zip(jacobian(x), quick_jit(jax.jacobian(projected))(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(np.concatenate(jacobian(0.1 * x)), np.eye(3))
    np.testing.assert_array_equal(np.concatenate(jacobian(0 * x)), np.eye(3))
    slope = quick_jit(jax.grad(lambda c: jnp.sum(shrewjax.clip_grad_norm(x, c)[0])))(0.5)
    assert float(slope) == pytest.approx(6 / 26**0.5, rel=1e-6)


def test_derivative_through_the_clip_at_a_zero_norm_is_finite():
    def slopes(x, limit):
        clipped = (lambda x, ord=ord: shrewjax.clip_grad_norm([x], limit, ord=ord)[0][0] for ord in (1, 2, 3, np.inf))
        return [jax.grad(lambda x, clip=clip: jnp.sum(clip(x)))(x) for clip in clipped]

    of_limit = quick_jit(slopes)
    for limit in (0.0, 1.0, np.inf):
        assert np.isfinite(of_limit(np.zeros(3, f32), f32(limit))).all(), limit


def test_state_reports_the_norm_before_and_the_scale():
    tx = shrewjax.clip_by_global_norm(1.0)
    state = tx.init(tree_of())
    assert (float(state.grad_norm), float(state.clip_scale)) == (0, 1)
    for values, norm, scale in (([3, 4], 5, 0.2), ([0.3, 0.4], 0.5, 1), ([np.inf, 1], np.inf, np.nan), ([0, 0], 0, 1)):
        _, state = tx.update([f32(values)], state)
        np.testing.assert_allclose([state.grad_norm, state.clip_scale], [norm, scale], rtol=1e-6)
        assert state.grad_norm.dtype == state.clip_scale.dtype == jnp.float32
