"""Random trees of gradients, and each way to give a threshold."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

f32 = np.float32


each_threshold = pytest.mark.parametrize("given_as", [float, np.float32, jnp.float32], ids=["python", "numpy", "jax"])


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
        tree.append(jnp.asarray(x.astype(dtype)))
    return tree
