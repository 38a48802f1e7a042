"""Flax's modes: imported here alone, because Flax takes long to import."""

import pytest


@pytest.fixture(params=["graph", "tree"])
def mode(request):
    from nnx_steps import MODES, in_mode

    if request.param not in MODES:
        pytest.skip("newer than this Flax")
    with in_mode(request.param):
        yield request.param
