"""Leaves of less than 16 bits: of all numbers of each dtype, against NumPy in float64; or refused by name."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import TRANSFORMATIONS, assert_refused, thorough
from speed import quick_jit, users_jit

import shrewjax

FLOATS = {name for name in dir(ml_dtypes) if name.startswith("float")}
REFUSED = {"float8_e8m0fnu", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"}


def all_numbers(dtype):
    """Every finite number of an eight-bit dtype."""
    numbers = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, dtype))
    return numbers[np.isfinite(numbers.astype(np.float64))]


# A leaf of each dtype, in float64 too; and its magnitudes in order.
LEAVES = {dtype: all_numbers(dtype) for dtype in sorted(FLOATS - REFUSED)}
VALUES = {dtype: leaf.astype(np.float64) for dtype, leaf in LEAVES.items()}
MAGNITUDES = {dtype: np.unique(np.abs(values)) for dtype, values in VALUES.items()}

each_jit = pytest.mark.parametrize("jit", [quick_jit, *thorough(users_jit)])


def limited(dtype, bound):
    values, magnitudes = VALUES[dtype], MAGNITUDES[dtype]
    return np.where(np.abs(values) > bound, np.copysign(magnitudes[magnitudes <= bound].max(), values), values)


@each_jit
def test_every_eight_bit_number_is_clipped_by_value(jit):
    clip = jit(shrewjax.clip_grad_value)
    for bound in (0.0, 1e-9, 0.5, 1.7, 100.0, np.inf):
        for dtype, clipped in clip(LEAVES, np.float32(bound)).items():
            np.testing.assert_array_equal(np.float64(clipped), limited(dtype, bound), err_msg=f"{dtype}, {bound}")
    for dtype, clipped in clip(LEAVES, np.float32(np.nan)).items():
        assert np.isnan(np.float64(clipped)).all(), dtype


def test_every_eight_bit_number_is_scaled_by_the_norm_clip():
    # As users compile it: XLA's older emitters round a small negative float8_e4m3b11fnuz to its NaN.
    clip = users_jit(
        lambda leaves, limits: {dtype: shrewjax.clip_grad_norm(leaves[dtype], limits[dtype]) for dtype in leaves}
    )
    norms = {dtype: np.sqrt((values**2).sum()) for dtype, values in VALUES.items()}
    for ratio in (0.0, 0.001, 1 / 3, np.inf):
        limits = {dtype: np.float32(ratio * norm) for dtype, norm in norms.items()}
        for dtype, (clipped, norm) in clip(LEAVES, limits).items():
            unit = float(ml_dtypes.finfo(LEAVES[dtype].dtype).eps)
            scaled = VALUES[dtype] * min(1, ratio)
            np.testing.assert_allclose(norm, norms[dtype], rtol=1e-6)
            np.testing.assert_allclose(
                np.float64(clipped), scaled, rtol=unit, atol=MAGNITUDES[dtype][1], err_msg=f"{dtype}, {ratio}"
            )


@each_jit
@pytest.mark.parametrize("method", ["lower", "linear"])
def test_every_eight_bit_number_is_clipped_to_a_percentile(jit, method):
    clip = jit(lambda leaves: shrewjax.clip_grad_percentile(leaves, 61.3, method=method, scope="leaf"))
    clipped, bounds = jax.device_get(clip(LEAVES))
    for dtype, bound in bounds.items():
        expected = np.percentile(np.abs(VALUES[dtype]), 61.3, method=method)
        np.testing.assert_allclose(bound, expected, rtol=1e-6, err_msg=dtype)
        np.testing.assert_array_equal(np.float64(clipped[dtype]), limited(dtype, float(bound)), err_msg=dtype)


@each_jit
def test_a_percentile_of_all_leaves_may_be_beyond_the_largest_number_of_an_eight_bit_dtype(jit):
    clipped, bound = jax.device_get(jit(lambda leaves: shrewjax.clip_grad_percentile(leaves, 95))(LEAVES))
    np.testing.assert_allclose(bound, np.percentile(np.abs(np.concatenate([*VALUES.values()])), 95), rtol=1e-6)
    assert bound > min(magnitudes.max() for magnitudes in MAGNITUDES.values())
    for dtype, leaf in clipped.items():
        np.testing.assert_array_equal(np.float64(leaf), limited(dtype, float(bound)), err_msg=dtype)


def test_eight_bit_infinities_stay_if_the_percentile_is_infinite():
    leaf = np.asarray([1, np.inf, -np.inf, 3], ml_dtypes.float8_e5m2)
    clipped, bound = quick_jit(lambda g: shrewjax.clip_grad_percentile(g, 99))(leaf)
    assert bound == np.inf
    np.testing.assert_array_equal(np.float64(clipped), [1, np.inf, -np.inf, 3])


def test_every_floating_dtype_is_either_clipped_or_refused():
    assert REFUSED < FLOATS
    assert all(ml_dtypes.finfo(name).bits == 8 for name in FLOATS - REFUSED)


@pytest.mark.parametrize("dtype", sorted(REFUSED))
def test_dtype_without_a_sign_or_a_nan_is_an_error_that_names_the_leaf(dtype):
    tree = {"w": jnp.ones(2), "q": np.ones(2).astype(getattr(ml_dtypes, dtype))}
    clips = shrewjax.clip_grad_norm, shrewjax.clip_grad_value, shrewjax.clip_grad_percentile
    functions = [shrewjax.grad_norm, *(lambda tree, clip=clip: clip(tree, 1.0) for clip in clips)]
    assert_refused(functions, [tree], rf"gradient leaf \['q'\] must have a dtype with sign and NaN, got {dtype}")


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations_refuse_a_dtype_without_a_sign(name):
    tx, params = TRANSFORMATIONS[name](), {"q": jnp.ones(2)}
    grads = {"q": jnp.ones(2, jnp.float8_e8m0fnu)}
    with pytest.raises(ValueError, match=r"gradient leaf \['q'\] must have a dtype with sign and NaN"):
        tx.update(grads, tx.init(params), params)
