"""Numbers of leaves come out of a joined vector at constant places. The tests of norms hold that they are right."""

import jax
import jax.numpy as jnp
import pytest

from shrewjax._numerics.vectors import pieces, scalars


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_other_devices_cut_at_constants(platform):
    def cut(x):
        return pieces([x], (2, 3)), scalars(x)

    lowered = jax.jit(cut).trace(jnp.zeros(5)).lower(lowering_platforms=(platform,))
    assert "dynamic" not in lowered.as_text()
    assert "gather" not in lowered.as_text()
