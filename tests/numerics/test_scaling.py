"""The scale of a clip is right where one factor would leave the range."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from speed import quick_jit

from shrewjax._numerics import floats, scaling


@pytest.mark.parametrize("x64", [False, True])
def test_factors_of_a_clip_multiply_to_limit_over_norm_and_each_is_normal(x64):
    with jax.enable_x64(x64):
        dtype = jnp.float64 if x64 else jnp.float32
        info = jnp.finfo(dtype)
        below = np.arange(0, 3 * info.maxexp - 9, 1 if not x64 else 11)
        norm = floats.ExtendedFloat(jnp.full(below.shape, 1.75, dtype), jnp.full(below.shape, 9, jnp.int32))
        limit = floats.ExtendedFloat(jnp.full(below.shape, 1.25, dtype), jnp.asarray(9 - below, jnp.int32))
        factor = quick_jit(scaling._scale_to_limit)(norm, limit, np.ones(below.shape, bool))
        first, second = (np.asarray(part, np.float64) for part in factor)
        assert (first >= info.tiny).all()
        assert (second >= info.tiny).all()
        for a, b, n in zip(first, second, below.tolist(), strict=True):
            assert Fraction(a) * Fraction(b) ** 2 == Fraction(float(dtype(1.25) / dtype(1.75))) / 2**n
        once = below < info.maxexp - 3
        assert (second[once] == 1).all()


@pytest.mark.parametrize("value", [1e-38, 1e-45, -1e-45, -0.0, np.inf, np.nan])
def test_threshold_in_an_array_keeps_its_value_unless_it_is_negative(value):
    """Also if it is subnormal: a maximum with 0 would flush it (XLA-18)."""
    limit = scaling.as_limit(jnp.asarray(np.float32(value)), jnp.zeros((), jnp.float32))
    expected = np.float64(np.float32(value)) if value > 0 or value != value else 0.0
    found = np.ldexp(np.float64(limit.mantissa), limit.exponent)
    np.testing.assert_array_equal(found, expected)
