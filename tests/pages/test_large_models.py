"""The page "Parameters too large for a device": its three ways give the gradient of the whole batch on one device."""

import pathlib

import jax
import numpy as np
import pytest
from helpers import run_page

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("as_users_have_it")]

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "guide" / "large_models.md"


@pytest.fixture(scope="module")
def page():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return run_page(PAGE)


def by_hand(params, x, y, *, heads_loss, layer):
    """The loss of the whole batch: no scan, no micro-batches, no mesh."""
    h = params["embedding"][x]
    for i in range(len(params["layers"]["in"])):
        h = layer(jax.tree.map(lambda w, i=i: w[i], params["layers"]), h)
    return heads_loss(params["head"], h, y)


@pytest.mark.parametrize("way", ["around", "whole", "inner"])
def test_each_way_gives_the_gradient_of_the_whole_batch(page, way):
    one = jax.devices()[0]
    key = jax.random.key(1)
    tokens = jax.random.randint(key, (32, 4), 0, 32)
    params = jax.tree.map(lambda x: x + jax.random.normal(key, x.shape) / 4, jax.device_get(page["params"]))
    loss = lambda p: by_hand(p, tokens, tokens, heads_loss=page["token_loss"], layer=page["layer"])  # noqa: E731
    expected = jax.jit(jax.value_and_grad(loss))(jax.device_put(params, one))

    shards = page["placed"](params, page["specs"])
    batch = page["placed"](tokens, jax.P("data"))
    with jax.set_mesh(page["mesh"]):
        found = jax.jit(page[way])(shards, batch, batch)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6 * float(np.abs(theirs).max()))
