"""Numbers of leaves come out of a joined vector as they went in, on a CPU and on other devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bits
from speed import quick_jit

from shrewjax._numerics.vectors import join, pieces, scalars, split

GROUPS = ((0, 3), (1,), (2, 4))
SHAPES = [(2, 3), (5,), (), (), (0,)]
FLAGS = [
    np.arange(max(np.prod(shape), 1)).reshape(-1)[: int(np.prod(shape))].reshape(shape) % 2 == 0 for shape in SHAPES
]
NUMBERS = [np.random.default_rng(i).standard_normal(shape).astype(np.float32) for i, shape in enumerate(SHAPES)]
COUNTS = [np.arange(x.size, dtype=np.int32).reshape(x.shape) for x in NUMBERS]


def test_numbers_of_leaves_are_joined_in_the_order_of_each_group():
    joined = join(NUMBERS, GROUPS)
    for vector, group in zip(joined, GROUPS, strict=True):
        np.testing.assert_array_equal(vector, np.concatenate([NUMBERS[i].ravel() for i in group]))


def test_split_undoes_join_for_numbers_of_several_dtypes():
    per_leaf = list(zip(NUMBERS, FLAGS, COUNTS, strict=True))
    found = quick_jit(lambda per_leaf: split(join(per_leaf, GROUPS), GROUPS, SHAPES))(per_leaf)
    assert bits(found) == bits(per_leaf)


@pytest.mark.parametrize("shape", [(1,), (4,), (3, 2)], ids=str)
def test_scalars_are_the_elements_of_a_vector_or_the_rows_of_a_matrix(shape):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    found = quick_jit(scalars)(x)
    assert bits(found) == bits(list(x))


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_other_devices_cut_at_constants(platform):
    def cut(x):
        return pieces([x], (2, 3)), scalars(x)

    lowered = jax.jit(cut).trace(jnp.zeros(5)).lower(lowering_platforms=(platform,))
    assert "dynamic" not in lowered.as_text()
    assert "gather" not in lowered.as_text()
