"""Every row of the tables of the norm clips and of the value clip."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import bits, flat, tree_of, true_norm
from hypothesis import given
from hypothesis import strategies as st

import shrewjax

f32 = np.float32
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


CLIPS = [by_function, by_transformation, by_leaf]
each_clip = pytest.mark.parametrize("clip", CLIPS)  # given a tree of one leaf, all three must do the same
each_threshold = pytest.mark.parametrize("given_as", [float, np.float32, jnp.float32], ids=["python", "numpy", "jax"])


def eps(tree):
    return max(float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(tree))


# --- the rows of the norm table ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, -1e-30, float("nan"), np.float32(-2), np.float64("nan"), -np.inf, -(10**400)])
@pytest.mark.parametrize("what", ["max_norm", "max_value"])
def test_static_threshold_below_zero_or_nan_is_an_error_that_names_it(bad, what):
    makers = {
        "max_norm": (shrewjax.clip_by_global_norm, shrewjax.clip_by_leaf_norm),
        "max_value": (shrewjax.clip_by_value,),
    }
    for make in makers[what]:
        with pytest.raises(ValueError, match=what):
            make(bad)
    plain = {"max_norm": shrewjax.clip_grad_norm, "max_value": shrewjax.clip_grad_value}[what]
    with pytest.raises(ValueError, match=what):
        plain(jnp.ones(2), bad)


@pytest.mark.parametrize(
    "bad",
    ["1", None, 1j, True, np.True_, np.ones(2), jnp.ones(2), jnp.ones((), complex), jnp.ones((), bool), lambda c: c],
)
def test_threshold_that_is_no_real_scalar_is_an_error_that_names_it(bad):
    for make in (shrewjax.clip_by_global_norm, shrewjax.clip_by_leaf_norm):
        with pytest.raises(ValueError, match="max_norm must be a real scalar"):
            make(bad)
    with pytest.raises(ValueError, match="max_value must be a real scalar"):
        shrewjax.clip_by_value(bad)


@pytest.mark.parametrize("function", [shrewjax.grad_norm, shrewjax.clip_grad_norm, shrewjax.clip_grad_percentile])
def test_arguments_after_the_second_are_keyword_only(function):
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    keyword_only = [kind is inspect.Parameter.KEYWORD_ONLY for kind in kinds]
    assert keyword_only == [False, False] + [True] * (len(kinds) - 2)
    assert kinds[0] is inspect.Parameter.POSITIONAL_OR_KEYWORD


def test_minus_zero_as_threshold_is_zero():
    for clipped in (shrewjax.clip_grad_norm(f32([1, 2]), -0.0)[0], shrewjax.clip_grad_value(f32([1, 2]), -0.0)):
        assert bits(clipped) == bits(f32([0, 0]))


def test_a_schedule_as_threshold_is_an_error_that_tells_the_way():
    with pytest.raises(ValueError, match="inject_hyperparams"):
        shrewjax.clip_by_global_norm(optax.constant_schedule(1.0))


@each_clip
@each_threshold
@pytest.mark.parametrize("values", [[3, 4], [np.nan, 1e-40], [np.inf, -0.0], [-np.inf, np.nan], [3e38, 3e38]], ids=str)
def test_infinite_threshold_leaves_every_bit_and_measures(clip, given_as, values):
    tree = [f32(values)]
    clipped, norm = clip(tree, given_as(np.inf))
    assert bits(clipped) == bits(tree)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(norm, np.float32(true_norm(tree)), rtol=1e-6)


@each_clip
@each_threshold
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("limit", [0.0, 1.0, 1e30])
def test_nonfinite_gradient_makes_every_floating_leaf_nan(clip, given_as, bad, limit):
    clipped, norm = clip([f32([1, bad, 0])], given_as(limit))
    assert np.isnan(clipped[0]).all()
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
@pytest.mark.parametrize("limit", [-1.0, -np.inf])
def test_traced_negative_threshold_is_as_zero(clip, limit):
    clipped, norm = clip([f32([3, -4])], jnp.float32(limit))
    np.testing.assert_array_equal(clipped[0], [0, 0])
    assert float(norm) == 5


@each_clip
@each_threshold
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_gradients_inside_keep_every_bit(clip, given_as, dtype):
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    tree = [jnp.asarray([3, 4, -0.0, 0.0, smallest, -smallest, 3 * smallest], dtype)]
    for limit in (5.0, 5.5, 3e38):
        clipped, norm = clip(tree, given_as(limit))
        assert bits(clipped) == bits(tree)
        assert float(norm) == 5


@each_clip
@each_threshold
@pytest.mark.parametrize("limit", [0.0, 1e-30, 1.0, np.inf])
def test_zero_gradients_stay_zero(clip, given_as, limit):
    clipped, norm = clip([f32([0, -0.0, 0])], given_as(limit))
    np.testing.assert_array_equal(clipped[0], [0, 0, 0])
    assert float(norm) == 0


@each_clip
@each_threshold
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30, 1e-40])
def test_zero_threshold_gives_zeros(clip, given_as, scale):
    clipped, _ = clip([f32([3 * scale, -4 * scale])], given_as(0.0))
    np.testing.assert_array_equal(clipped[0], [0, 0])


def norm_of(x, ord):
    return float(true_norm([x], ord))


@each_clip
@each_threshold
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("limit", [1.0, 0.3, 1e-3])
def test_gradients_outside_land_on_the_threshold_in_their_direction(clip, given_as, dtype, limit):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(40, 5)), dtype)
    (clipped,), norm = clip([x], given_as(limit))
    assert clipped.dtype == dtype
    exact = np.asarray(x, np.longdouble) * (np.longdouble(float(given_as(limit))) / true_norm([x]))
    underflow = float(jnp.finfo(dtype).tiny)
    np.testing.assert_allclose(np.float64(clipped), np.float64(exact), rtol=2 * eps([x]), atol=underflow)
    assert true_norm([clipped]) == pytest.approx(float(given_as(limit)), rel=2 * eps([x]), abs=200**0.5 * underflow)
    assert float(norm) == pytest.approx(float(true_norm([x])), rel=1e-6)


@each_clip
@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ([1e20, 1e20], 1.0),  # the squares overflow
        ([1e-25, 2e-25], 1e-26),  # the squares underflow
        ([3e38, 3e38, 3e38], 1.0),  # the norm overflows
        ([3e38, 3e38, 3e38], 3e38),
        ([2.0**33, 2.0**33], 2.0**-112),  # limit / norm underflows
        ([3e38, 1e38], 1e-37),
        ([2e-38, 2e-38], 2.4e-38),
        ([1e-10, 1e-10], 1e-11),
    ],
)
def test_neither_the_norm_nor_the_quotient_nor_the_product_leaves_the_range(clip, values, limit):
    (clipped,), _ = clip([f32(values)], limit)
    exact = np.longdouble(f32(values)) * (np.longdouble(limit) / true_norm([f32(values)]))
    subnormal = len(values) ** 0.5 * TINY if np.min(exact) < TINY else 0
    np.testing.assert_allclose(np.float64(clipped), np.float64(exact), rtol=2.4e-7, atol=subnormal)


@each_clip
def test_static_threshold_beyond_float32_is_finite_still(clip):
    tree = [f32([3e38, 3e38, 3e38])]
    clipped, norm = clip(tree, 1e300)
    assert bits(clipped) == bits(tree)
    assert float(norm) == np.inf  # the reading, not the decision
    assert np.isnan(clip([f32([np.inf])], 1e300)[0][0]).all()


@pytest.mark.parametrize("ord", [1, 1.5, 3, 10, np.inf])
@pytest.mark.parametrize("scale", [1.0, 1e25, 1e-25])
@each_clip
def test_other_norms_land_on_the_threshold(clip, ord, scale):
    x = f32(np.random.default_rng(1).normal(size=(7, 3)) * scale)
    (clipped,), norm = clip([x], 0.25 * scale, ord=ord)
    assert float(norm) == pytest.approx(norm_of(x, ord), rel=1e-6, abs=0)
    tolerance = (2 if ord == np.inf else 4) * 2.0**-23
    assert norm_of(clipped, ord) == pytest.approx(float(0.25 * scale), rel=tolerance, abs=0)


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
        clipped, norm = shrewjax.clip_grad_norm(tree, 1.0)
        assert norm.dtype == jnp.float64
        assert float(norm) == pytest.approx(5e200, rel=1e-15)
        assert [clipped[k].dtype for k in "abc"] == [jnp.float64, jnp.float32, jnp.complex128]
        assert float(true_norm(clipped)) == pytest.approx(1.0, rel=4e-16)


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


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_numpy_leaves_wider_than_jax_allows_are_taken_as_jax_has_them(dtype):
    leaf = np.asarray([3, 4], dtype)
    narrow = {"float64": jnp.float32, "complex128": jnp.complex64}[dtype]
    clipped, norm = shrewjax.clip_grad_norm([leaf], 1.0)
    assert (clipped[0].dtype, norm.dtype) == (narrow, jnp.float32)
    np.testing.assert_allclose(clipped[0], leaf / 5, rtol=3e-7)
    np.testing.assert_allclose(shrewjax.clip_grad_value([leaf], 1.0)[0], [1, 1], rtol=3e-7)
    window = shrewjax.GradAccumulator(1)
    np.testing.assert_array_equal(window.take(window.add(window.init([jnp.asarray(leaf)]), [leaf]))[0][0], leaf)


def test_python_numbers_are_leaves():
    clipped, norm = shrewjax.clip_grad_norm({"a": 3.0, "b": 4.0, "n": 7}, 1.0)
    assert float(norm) == 5
    np.testing.assert_allclose([clipped["a"], clipped["b"]], [0.6, 0.8], rtol=1e-6)
    assert clipped["n"] == 7


def test_derivative_through_the_clip():
    def clipped(x):
        return shrewjax.clip_grad_norm([x[:1], x[1:]], 1.0)[0]

    def projected(x):
        return [y / jnp.linalg.norm(x) for y in (x[:1], x[1:])]

    x = jnp.array([3.0, 4.0, -1.0])
    for got, want in zip(jax.jacobian(clipped)(x), jax.jacobian(projected)(x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(jnp.concatenate(jax.jacobian(clipped)(0.1 * x)), np.eye(3))
    np.testing.assert_array_equal(jnp.concatenate(jax.jacobian(clipped)(0 * x)), np.eye(3))
    slope = jax.grad(lambda c: sum(jnp.sum(y) for y in shrewjax.clip_grad_norm([x], c)[0]))(0.5)
    assert float(slope) == pytest.approx(6 / 26**0.5, rel=1e-6)


@pytest.mark.parametrize("ord", [1, 2, 3, np.inf])
@pytest.mark.parametrize("limit", [0.0, 1.0, np.inf])
def test_derivative_through_the_clip_at_a_zero_norm_is_finite(ord, limit):
    slope = jax.grad(lambda x: jnp.sum(shrewjax.clip_grad_norm([x], limit, ord=ord)[0][0]))(jnp.zeros(3))
    assert np.isfinite(slope).all()


def test_leaf_norms_are_clipped_one_by_one():
    tree = {
        "big": f32([30, 40]),
        "small": f32([0.3, 0.4]),
        "bad": f32([np.nan]),
        "huge": f32([3e30, 4e30]),
        "zero": f32([0]),
    }
    tx = shrewjax.clip_by_leaf_norm(1.0)
    clipped, state = tx.update(tree, tx.init(tree))
    expected = {"big": [0.6, 0.8], "small": [0.3, 0.4], "bad": [np.nan], "huge": [0.6, 0.8], "zero": [0]}
    for k, v in expected.items():
        np.testing.assert_allclose(clipped[k], f32(v), rtol=2.4e-7)
    assert bits(clipped["small"]) == bits(tree["small"])
    norms = {"big": 50, "small": 0.5, "bad": np.nan, "huge": 5e30, "zero": 0}
    scales = {"big": 0.02, "small": 1, "bad": np.nan, "huge": 2e-31, "zero": 1}
    for k in tree:
        np.testing.assert_allclose(state.grad_norm[k], f32(norms[k]), rtol=1e-6)
        np.testing.assert_allclose(state.clip_scale[k], f32(scales[k]), rtol=1e-6)


def test_leaf_norm_state_keeps_its_structure_when_a_gradient_is_missing():
    tx = shrewjax.clip_by_leaf_norm(1.0)
    state = tx.init({"a": f32([3, 4]), "b": f32([1])})
    clipped, new = tx.update({"a": f32([3, 4]), "b": None}, state)
    assert clipped["b"] is None
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert (float(new.grad_norm["b"]), float(new.clip_scale["b"])) == (0, 1)


def test_state_reports_the_norm_before_and_the_scale():
    tx = shrewjax.clip_by_global_norm(1.0)
    state = tx.init(tree_of())
    assert (float(state.grad_norm), float(state.clip_scale)) == (0, 1)
    for values, norm, scale in (([3, 4], 5, 0.2), ([0.3, 0.4], 0.5, 1), ([np.inf, 1], np.inf, np.nan), ([0, 0], 0, 1)):
        _, state = tx.update([f32(values)], state)
        np.testing.assert_allclose([state.grad_norm, state.clip_scale], [norm, scale], rtol=1e-6)
        assert state.grad_norm.dtype == state.clip_scale.dtype == jnp.float32


# --- the rows of the value table --------------------------------------------------------------------------------

FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "bound", [0.0, 0.1, 1.0, 1 / 3, 7.3, 1e6, np.float64(0.1), jnp.float32(0.1), jnp.bfloat16(0.3)]
)
def test_value_clip_never_leaves_the_interval_and_touches_nothing_inside(dtype, bound):
    smallest = float(jnp.finfo(dtype).smallest_subnormal)
    x = jnp.asarray([0.0, -0.0, smallest, -smallest, 0.05, -0.05, 0.1, 1, -1, 7, 400, -400], dtype)
    clipped = shrewjax.clip_grad_value([x], bound)[0]
    exact, before, after = float(bound), np.float64(x), np.float64(clipped)
    assert clipped.dtype == dtype
    assert (np.abs(after) <= exact).all()
    assert bits(clipped[np.abs(before) <= exact]) == bits(x[np.abs(before) <= exact])
    outside = np.abs(before) > exact
    assert (after[outside] * before[outside] >= 0).all()
    # nothing between the result and the bound: the next number up is beyond it
    nearest = np.float64(jnp.asarray(exact, dtype)) if exact < float(jnp.finfo(dtype).max) else np.inf
    assert (np.abs(np.abs(after[outside]) - exact) <= abs(nearest) * float(jnp.finfo(dtype).eps)).all()


@each_threshold
def test_value_clip_of_nan_and_infinities(given_as):
    x = f32([np.nan, np.inf, -np.inf, 2])
    np.testing.assert_array_equal(shrewjax.clip_grad_value(x, given_as(1.0)), f32([np.nan, 1, -1, 1]))
    assert bits(shrewjax.clip_grad_value(x, given_as(np.inf))) == bits(x)


def test_value_clip_with_odd_traced_bounds():
    x = f32([1, -1, 0, np.nan])
    np.testing.assert_array_equal(shrewjax.clip_grad_value(x, jnp.float32(-3)), f32([0, 0, 0, np.nan]))
    assert np.isnan(shrewjax.clip_grad_value(x, jnp.float32(np.nan))).all()
    np.testing.assert_array_equal(shrewjax.clip_grad_value(4 * x, jnp.int32(2)), f32([2, -2, 0, np.nan]))


def test_value_clip_of_complex_limits_the_modulus_and_keeps_the_phase():
    z = np.complex64([3 + 4j, 0.3 + 0.4j, -1e30j, 3e38 + 3e38j, 1e-30j, 0, np.inf, 1j * np.nan])
    clipped = shrewjax.clip_grad_value([z], 1.0)[0]
    np.testing.assert_allclose(clipped[:4], np.complex64([0.6 + 0.8j, 0.3 + 0.4j, -1j, 0.5**0.5 * (1 + 1j)]), rtol=3e-7)
    assert bits(clipped[4:6]) == bits(z[4:6])
    assert np.isnan(clipped[6:]).all()
    assert bits(shrewjax.clip_grad_value([z], np.inf)) == bits([z])


def test_derivative_through_the_value_clip_of_a_complex_zero_is_that_of_the_identity():
    def parts_of_the_clipped(parts):
        clipped = shrewjax.clip_grad_value(jax.lax.complex(*parts), 2.0)
        return jnp.sum(clipped.real) + jnp.sum(clipped.imag)

    np.testing.assert_array_equal(jax.grad(parts_of_the_clipped)(jnp.zeros((2, 1))), [[1], [1]])


def test_derivative_through_the_value_clip():
    slope = jax.grad(lambda x: jnp.sum(shrewjax.clip_grad_value(x, 1.0)))(jnp.array([0.5, -2.0, 0.0, 3.0]))
    np.testing.assert_array_equal(slope, [1, 0, 1, 0])
    slope = jax.grad(lambda c: jnp.sum(shrewjax.clip_grad_value(jnp.array([2.0, -3.0, 5.0, 0.1]), c)))(1.0)
    assert float(slope) == 1


# --- properties -------------------------------------------------------------------------------------------------

# Few structures, as each is compiled once.
STRUCTURES = [
    [((5,), jnp.float32)],
    [((3, 2), jnp.float32), ((), jnp.float32), ((7,), jnp.float32)],
    [((4,), jnp.bfloat16), ((2, 3), jnp.float16), ((3,), jnp.float32)],
    [((6,), jnp.float16)],
    [((3,), jnp.complex64), ((4,), jnp.float32)],
]


@st.composite
def trees(draw):
    structure = draw(st.sampled_from(STRUCTURES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tree = []
    for shape, dtype in structure:
        widest = min(30.0, float(np.log10(float(jnp.finfo(dtype).max))) - 1)
        exponent = draw(st.floats(-widest, widest))
        x = (
            rng.normal(size=(2, *shape))
            * 10.0**exponent
            * 10.0 ** rng.uniform(-draw(st.integers(0, 8)), 0, (2, *shape))
        )
        x = x[0] + 1j * x[1] if jnp.issubdtype(dtype, jnp.complexfloating) else x[0]
        x = np.where(rng.random(shape) < draw(st.sampled_from([0.0, 0.3])), 0, x)
        tree.append(jnp.asarray(x).astype(dtype))
    return tree


RATIOS = st.one_of(st.sampled_from([0.0, 0.5, 1 - 1e-6, 1.0, 1 + 1e-6, 2.0]), st.floats(1e-6, 3.0))
clip_jitted = jax.jit(shrewjax.clip_grad_norm)


@given(trees(), RATIOS)
def test_clipping_is_the_projection_onto_the_ball(tree, ratio):
    norm = true_norm(tree)
    limit = np.float32(min(ratio * norm, np.longdouble(3e38)))
    clipped, measured = clip_jitted(tree, jnp.asarray(limit))
    assert float(measured) == pytest.approx(float(norm), rel=1e-6, abs=TINY)
    if measured <= limit:
        assert bits(clipped) == bits(tree)
        return
    scale = np.longdouble(limit) / norm
    size = sum(x.size for x in tree)
    for x, y in zip(tree, clipped, strict=True):
        info = jnp.finfo(x.dtype)
        wide = np.clongdouble if np.iscomplexobj(x) else np.longdouble
        error = np.abs(np.asarray(y).astype(wide) - np.asarray(x).astype(wide) * scale)
        # 2 eps for the scale, half an eps more for the element's own rounding
        assert (error <= 2.5 * float(info.eps) * np.abs(np.asarray(x).astype(wide)) * scale + float(info.tiny)).all()
    floor = size**0.5 * max(float(jnp.finfo(x.dtype).tiny) for x in tree)
    assert abs(true_norm(clipped) - limit) <= 2 * eps(tree) * limit + floor


@given(trees(), RATIOS)
def test_clipping_again_changes_next_to_nothing(tree, ratio):
    limit = jnp.asarray(np.float32(min(ratio * true_norm(tree), np.longdouble(3e38))))
    once, _ = clip_jitted(tree, limit)
    twice, _ = clip_jitted(once, limit)
    for x, y in zip(once, twice, strict=True):
        info = jnp.finfo(x.dtype)
        assert (
            np.abs(np.asarray(x - y, np.complex128))
            <= 4 * eps(tree) * np.abs(np.asarray(x, np.complex128)) + float(info.tiny)
        ).all()


@given(trees(), st.floats(0, 2.0**127, width=32))
def test_value_clip_is_the_nearest_point_of_the_box(tree, bound):
    tree = [x for x in tree if not np.iscomplexobj(x)]
    for x, y in zip(tree, shrewjax.clip_grad_value(tree, bound), strict=True):
        before, after = np.float64(x), np.float64(y)
        assert (np.abs(after) <= bound).all()
        inside = np.abs(before) <= bound
        assert bits(np.asarray(y)[inside]) == bits(np.asarray(x)[inside])
        assert (
            np.abs(after - np.clip(before, -bound, bound))
            <= 2 * float(jnp.finfo(x.dtype).eps) * bound + float(jnp.finfo(x.dtype).tiny)
        ).all()


# --- percentile -------------------------------------------------------------------------------------------------


def by_percentile(tree, percentile, **options):
    clipped, bound = shrewjax.clip_grad_percentile(tree, percentile, **options)
    tx = shrewjax.clip_by_percentile(percentile, **options)
    updates, state = tx.update(tree, tx.init(tree))
    assert bits(updates) == bits(clipped)
    return clipped, bound, state


@pytest.mark.parametrize("bad", [-1, 100.5, np.nan, np.inf, np.float32(-1e-30), "50", True, 1j, [50], None])
def test_percentile_outside_of_its_range_is_an_error_that_names_it(bad):
    for make in (shrewjax.clip_by_percentile, lambda p: shrewjax.clip_grad_percentile(jnp.ones(2), p)):
        with pytest.raises(ValueError, match="percentile must be"):
            make(bad)


@pytest.mark.parametrize("option", ["method", "scope", "over"])
def test_an_unknown_choice_is_an_error_that_lists_the_known_ones(option):
    with pytest.raises(ValueError, match=f"{option} must be one of .*got 'median'"):
        shrewjax.clip_by_percentile(50, **{option: "median"})


def test_percentile_clip_limits_what_is_above_and_keeps_every_other_bit():
    rng = np.random.default_rng(0)
    tree = {"a": f32(rng.standard_normal((20, 5))), "b": f32([1e-40, -0.0, -1e-41, 1e3])}
    for method in ("linear", "lower", "higher", "nearest", "midpoint"):
        clipped, bound, state = by_percentile(jax.tree.map(jnp.asarray, tree), 80, method=method)
        everything = np.concatenate([np.ravel(x) for x in tree.values()])
        np.testing.assert_allclose(bound, np.percentile(np.abs(everything.astype(float)), 80, method=method), rtol=1e-7)
        bound = np.asarray(bound)
        for name, x in tree.items():
            expected = np.where(np.abs(x) > bound, np.copysign(bound, x), x)
            assert bits(clipped[name]) == bits(expected)
        assert float(state.clipped_fraction) == f32(np.mean(np.abs(everything) > bound))
        assert state.bound == bound


def test_the_bound_is_rounded_toward_zero_to_each_leafs_dtype():
    tree = {"f": jnp.float32([1, 1.7, 3]), "h": jnp.bfloat16([1, 4, 8])}
    clipped, bound, _ = by_percentile(tree, 43)
    assert 1 < float(bound) < 2
    h = np.asarray(clipped["h"]).astype(float)
    assert h[0] == 1
    assert h[1] == h[2] <= float(bound) < h[1] + 2.0**-7
    assert clipped["h"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("dtype", "integers", "given_as"), [("float32", "i4", int), ("float32", "i4", jnp.float32), ("bfloat16", "i2", int)]
)
def test_percentile_of_the_subnormal_is_subnormal(dtype, integers, given_as):
    units = np.asarray([0, 1, 2, 3, 100, 6, 7], integers)  # multiples of the smallest number
    clipped, _, _ = by_percentile(jnp.asarray(units.view(jnp.dtype(dtype))), given_as(50), method="lower")
    assert np.asarray(clipped).view(integers).tolist() == [0, 1, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("given_as", [float, jnp.float32])
def test_percentile_100_is_the_identity_and_zero_the_smallest(given_as):
    tree = {"a": jnp.float32([np.inf, 2, -3]), "z": jnp.complex64([3 + 4j, 1e-30j])}
    clipped, bound, state = by_percentile(tree, given_as(100))
    assert bits(clipped) == bits(tree)
    assert bound == np.inf
    assert state.clipped_fraction == 0
    clipped, bound, _ = by_percentile(tree["a"], given_as(0))
    assert clipped.tolist() == [2, 2, -2]
    assert bound == 2


def test_infinity_counts_as_the_largest_and_is_clipped():
    clipped, bound, state = by_percentile(jnp.float32([np.inf, 1, -2, -np.inf, 3]), 50)
    assert clipped.tolist() == [3, 1, -2, -3, 3]
    assert bound == 3
    assert float(state.clipped_fraction) == f32(0.4)


@pytest.mark.parametrize("percentile", [50, 100, 0])
def test_a_nan_makes_every_floating_leaf_nan_or_its_own(percentile):
    tree = {"a": jnp.float32([1, np.nan]), "b": jnp.bfloat16([1, 2]), "n": jnp.arange(3)}
    clipped, bound, state = by_percentile(tree, percentile)
    assert np.isnan(flat(clipped)).all()
    assert np.isnan(bound)
    assert np.isnan(state.clipped_fraction)
    assert clipped["n"].tolist() == [0, 1, 2]
    clipped, bounds, _ = by_percentile(tree, percentile, scope="leaf")
    assert np.isnan(np.asarray(clipped["a"])).all()
    assert not np.isnan(flat(clipped["b"])).any()
    assert np.isnan(bounds["a"])


def test_traced_percentiles_outside_of_the_range_count_as_its_ends():
    x = jnp.float32([1, 2, 3])
    for value, end in ((-5.0, 0), (250.0, 100), (np.inf, 100), (-np.inf, 0)):
        assert bits(by_percentile(x, jnp.float32(value))[0]) == bits(by_percentile(x, end)[0])
    assert np.isnan(by_percentile(x, jnp.float32(np.nan))[0]).all()


def test_sparse_gradients_are_zeroed_unless_only_the_nonzero_count():
    sparse = jnp.zeros(100).at[:4].set(jnp.float32([1, 2, -3, 40]))
    clipped, bound, _ = by_percentile(sparse, 90)
    assert bound == 0
    assert not np.any(clipped)
    clipped, bound, state = by_percentile(sparse, 50, over="nonzero")
    assert bound == 2.5
    assert clipped[:4].tolist() == [1, 2, -2.5, 2.5]
    assert float(state.clipped_fraction) == f32(0.02)
    nothing = jnp.float32([0.0, -0.0])
    assert bits(by_percentile(nothing, 50, over="nonzero")[0]) == bits(nothing)


def test_one_bound_a_leaf_and_a_tree_of_them():
    tree = {"a": jnp.float32([1, 2, 3]), "n": jnp.arange(2), "none": None, "b": jnp.float32([10, 20, 60])}
    clipped, bounds, state = by_percentile(tree, 50, scope="leaf")
    assert clipped["a"].tolist() == [1, 2, 2]
    assert clipped["b"].tolist() == [10, 20, 20]
    assert bounds["a"] == state.bound["a"] == 2
    assert bounds["b"] == 20
    assert bounds["n"] == 0
    assert bounds["none"] is None
    assert float(state.clipped_fraction) == f32(2 / 6)


def test_no_gradient_where_the_state_has_a_bound():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    tx = shrewjax.clip_by_percentile(50, scope="leaf")
    clipped, state = tx.update({"a": jnp.float32([1, 3]), "b": None}, tx.init(params))
    assert clipped["a"].tolist() == [1, 2]
    assert clipped["b"] is None
    assert state.bound == {"a": 2, "b": 0}


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"])
def test_eight_bit_leaves_are_clipped_to_what_they_can_hold(dtype):
    x = jnp.float32([224, 144, 160, 112, 10, -208]).astype(dtype)
    clipped, bound, _ = by_percentile({"q": x, "f": jnp.float32(1)}, 60, method="lower")
    values = np.asarray(x).astype(np.float32)
    assert float(bound) == np.sort(np.abs(np.append(values, 1)))[3]
    expected = np.where(np.abs(values) > float(bound), np.copysign(f32(bound), values), values)
    np.testing.assert_array_equal(np.asarray(clipped["q"]).astype(np.float32), expected)


def test_many_small_leaves_take_no_memory(monkeypatch):
    monkeypatch.setattr("shrewjax._reductions._may_be_partitioned", lambda: False)
    leaves = [jnp.ones(2**14)] * 64
    compiled = jax.jit(lambda g: shrewjax.clip_grad_percentile(g, 90)[1]).lower(leaves).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.05 * 64 * 2**16


def test_complex_elements_are_clipped_by_modulus_and_keep_their_phase():
    z = jnp.complex64([3 + 4j, 0.1j, -30 + 40j, 0])
    clipped, bound, _ = by_percentile(z, 75, method="lower")
    np.testing.assert_allclose(bound, 5, rtol=2e-7)
    np.testing.assert_allclose(clipped, [3 + 4j, 0.1j, -3 + 4j, 0], rtol=1e-6)


def test_the_gradient_through_a_percentile_clip_takes_the_bound_as_constant():
    def loss(x):
        return jnp.sum(shrewjax.clip_grad_percentile(x, 50)[0])

    assert jax.grad(loss)(jnp.float32([1, -2, 5])).tolist() == [1, 1, 0]


def test_the_search_starts_from_the_state_and_ends_at_the_same_bits():
    rng = np.random.default_rng(0)
    tx = shrewjax.clip_by_percentile(90)
    state = tx.init(jnp.zeros(3))
    for scale in (1, 1.01, 1e-6, 1e6, 0, 1):
        x = jnp.asarray(scale * rng.standard_normal(500), jnp.float32)
        clipped, state = tx.update(x, state)
        assert bits(clipped) == bits(shrewjax.clip_grad_percentile(x, 90)[0])


def test_a_threshold_that_is_flushed_leaves_zeros_alone():
    x = jnp.float32([0.0, -0.0, 1.0, -2.0])
    for limit in (1e-41, jnp.float32(1e-41)):
        assert np.all(np.abs(np.asarray(shrewjax.clip_grad_value(x, limit))) <= 1e-41)
        assert bits(shrewjax.clip_grad_value(x, limit)[:2]) == bits(x[:2])
