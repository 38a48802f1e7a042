"""The tests run on the newest JAX as on the oldest."""

import jax.numpy as jnp
import numpy as np
import pytest
import xla_flags
from helpers import users_jit

import shrewjax


def test_flag_that_no_jaxlib_has_is_not_passed_and_ends_no_process():
    asked = {"xla_no_such_flag": "1", "xla_backend_optimization_level": "0"}
    assert xla_flags.known(asked) == ["xla_backend_optimization_level"]


@pytest.mark.parametrize("clip", ["value", "percentile"])
def test_clip_with_a_traced_threshold_keeps_subnormal_bfloat16_in_vectors_and_beside_them(clip):
    """A CPU with bfloat16 instructions flushes subnormals in them (XLA-28); in loops of 17, in the last element."""
    functions = {"value": shrewjax.clip_grad_value, "percentile": lambda x, p: shrewjax.clip_grad_percentile(x, p)[0]}
    clipped = users_jit(functions[clip])
    for size in (2, 17):
        units = (np.arange(1, size + 1) | (np.arange(size) % 2 << 15)).astype(np.uint16)  # of both signs
        x = jnp.asarray(units.view(jnp.bfloat16))
        assert np.asarray(clipped(x, jnp.float32(100))).view(np.uint16).tolist() == units.tolist()
