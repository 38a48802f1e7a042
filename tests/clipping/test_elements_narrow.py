"""Leaves of less than 16 bits: of all numbers of each dtype, against NumPy in float64; or refused by name."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import TRANSFORMATIONS, users_jit

import shrewjax

FLOATS = {name for name in dir(ml_dtypes) if name.startswith("float")}
REFUSED = {"float8_e8m0fnu", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"}


def all_numbers(dtype):
    """Every finite number of an eight-bit dtype, as a leaf and in float64; and their magnitudes in order."""
    leaf = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, dtype))
    leaf = leaf[np.isfinite(leaf.astype(np.float64))]
    values = leaf.astype(np.float64)
    return jnp.asarray(leaf), values, np.unique(np.abs(values))


def limited(values, magnitudes, bound):
    largest = magnitudes[magnitudes <= bound].max()
    return np.where(np.abs(values) > bound, np.copysign(largest, values), values)


@pytest.mark.parametrize("dtype", sorted(FLOATS - REFUSED))
def test_every_eight_bit_number_is_clipped_by_value(dtype):
    leaf, values, magnitudes = all_numbers(dtype)
    clip = users_jit(shrewjax.clip_grad_value)
    for bound in (0.0, 1e-9, 0.5, 1.7, 100.0, np.inf):
        clipped = np.float64(clip(leaf, jnp.float32(bound)))
        np.testing.assert_array_equal(clipped, limited(values, magnitudes, bound), err_msg=str(bound))
    assert np.isnan(np.float64(clip(leaf, jnp.float32(np.nan)))).all()


@pytest.mark.parametrize("dtype", sorted(FLOATS - REFUSED))
def test_every_eight_bit_number_is_scaled_by_the_norm_clip(dtype):
    leaf, values, magnitudes = all_numbers(dtype)
    clip = users_jit(shrewjax.clip_grad_norm)
    true_norm = np.sqrt((values**2).sum())
    for max_norm in (0.0, 1.0, true_norm / 3, np.inf):
        clipped, norm = clip(leaf, jnp.float32(max_norm))
        scaled = values * min(1, max_norm / true_norm)
        unit = float(ml_dtypes.finfo(leaf.dtype).eps)
        np.testing.assert_allclose(norm, true_norm, rtol=1e-6)
        np.testing.assert_allclose(np.float64(clipped), scaled, rtol=unit, atol=magnitudes[1], err_msg=str(max_norm))


@pytest.mark.parametrize("dtype", sorted(FLOATS - REFUSED))
def test_every_eight_bit_number_is_clipped_to_a_percentile(dtype):
    leaf, values, magnitudes = all_numbers(dtype)
    clipped, bound = users_jit(lambda g: shrewjax.clip_grad_percentile(g, 60, method="lower"))(leaf)
    assert float(bound) == np.percentile(np.abs(values), 60, method="lower")
    np.testing.assert_array_equal(np.float64(clipped), limited(values, magnitudes, float(bound)))


def test_eight_bit_infinities_stay_if_the_percentile_is_infinite():
    leaf = jnp.asarray(np.asarray([1, np.inf, -np.inf, 3], ml_dtypes.float8_e5m2))
    clipped, bound = users_jit(lambda g: shrewjax.clip_grad_percentile(g, 99))(leaf)
    assert bound == np.inf
    np.testing.assert_array_equal(np.float64(clipped), [1, np.inf, -np.inf, 3])


def test_every_floating_dtype_is_either_clipped_or_refused():
    assert REFUSED < FLOATS
    assert all(ml_dtypes.finfo(name).bits == 8 for name in FLOATS - REFUSED)


@pytest.mark.parametrize("dtype", sorted(REFUSED))
@pytest.mark.parametrize(
    "function",
    [
        shrewjax.grad_norm,
        lambda g: shrewjax.clip_grad_norm(g, 1.0),
        lambda g: shrewjax.clip_grad_value(g, 1.0),
        lambda g: shrewjax.clip_grad_percentile(g, 50),
    ],
    ids=["grad_norm", "clip_grad_norm", "clip_grad_value", "clip_grad_percentile"],
)
def test_dtype_without_a_sign_or_a_nan_is_an_error_that_names_the_leaf(function, dtype):
    leaf = np.ones(2).astype(getattr(ml_dtypes, dtype))
    with pytest.raises(ValueError, match=rf"gradient leaf \['q'\] must have a dtype with a sign.*got {dtype}"):
        function({"w": jnp.ones(2), "q": leaf})


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_transformations_refuse_a_dtype_without_a_sign(name):
    tx, params = TRANSFORMATIONS[name](), {"q": jnp.ones(2)}
    grads = {"q": jnp.ones(2, jnp.float8_e8m0fnu)}
    with pytest.raises(ValueError, match=r"gradient leaf \['q'\] must have a dtype with a sign"):
        tx.update(grads, tx.init(params), params)
