"""An argument's name in messages, and which leaves are keys."""

import jax
import numpy as np
import pytest

from shrewjax._batches._call import Call, is_key

CALL = Call((0, 1, "y"), (1.0, {"x": [2.0]}, 3.0), {"batch_argnums": (1, 2), "rng_argnums": ()}, 4, "device")


def test_names_are_those_that_a_caller_writes():
    (path, _), *_ = CALL.leaves(1)
    assert CALL.name(1, path) == "argument 1['x'][0]"
    assert CALL.name(2, ()) == "keyword argument y"
    assert CALL.as_role("batch_argnums", 2, 1) == "batch_argnums=(1, 'y')"
    assert CALL.as_role("rng_argnums", 2) == "rng_argnums='y'"
    assert CALL.as_role("batch_argnums") == "batch_argnums=()"
    assert CALL.whole() == [0]
    assert CALL.keys_and_examples() == {"rng_argnums": (), "batch_argnums": (1, "y")}


def test_a_function_gets_its_arguments_as_they_came():
    assert CALL.in_order(lambda *args, **kwargs: (args, kwargs))(1, 2, 3) == ((1, 2), {"y": 3})


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (jax.random.key(0), True),
        (jax.random.split(jax.random.key(0), 3), True),
        (jax.random.PRNGKey(0), True),
        (np.ones(4, np.uint32), True),
        (np.ones(3, np.uint32), False),
        (np.ones((2, 2), np.uint32), False),
        (np.ones(2, np.int32), False),
        ("key", False),
    ],
    ids=str,
)
def test_keys_are_typed_ones_and_arrays_like_raw_ones(leaf, expected):
    assert is_key(leaf) == expected
