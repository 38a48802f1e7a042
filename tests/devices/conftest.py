"""The devices for which programs are compiled here. None of them has to be here."""

import pytest
from accelerators import ACCELERATORS, target_named


@pytest.fixture(scope="module", params=ACCELERATORS)
def target(request):
    return target_named(request.param)


@pytest.fixture(scope="module", params=[*ACCELERATORS, "cpu"])
def any_target(request):
    return target_named(request.param)


@pytest.fixture(scope="module", params=["h100"])
def h100(request):
    """Of these, the one whose programs can be executed on CPU devices."""
    return target_named(request.param)
