"""Draws of a micro-batch: those of the whole batch bit for bit, or of another key where a generator draws at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compared import RNG, B, D, T, W, X
from helpers import assert_close
from jax import lax
from speed import quick_jit

import shrewjax

pytestmark = pytest.mark.usefixtures("as_users_have_it", "x64_only")

K = 3  # it does not divide B
KEY, RAW = jax.random.key(7), jax.random.PRNGKey(7)


def in_scan(key, x):
    return lax.scan(lambda key, _: (jax.random.split(key)[0], jax.random.normal(key, (B, D))), key, None, T)[1][-1] * x


def in_scan_of_keys(key, x):
    return lax.scan(lambda z, k: (z + jax.random.uniform(k, x.shape), None), x, jax.random.split(key, T))[0]


def in_checkpoint(key, x):
    return jax.checkpoint(lambda key, x: jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0.0))(key, x)


def in_branch(key, x):
    return lax.cond(x.shape[0] > 1, lambda: jax.random.normal(key, x.shape), lambda: x) * x


def of_examples(key, x):
    return jax.vmap(lambda k, x: x * jax.random.normal(jax.random.fold_in(k, 2), x.shape))(jax.random.split(key, B), x)


def of_raw_examples(key, x):
    raw = jax.random.split(jax.random.PRNGKey(jax.random.bits(key)), B)
    return jax.vmap(lambda k, x: x + jax.random.normal(k, x.shape))(raw, x)


# Draws of a key and rows, each of which a loop may make in parts.
DRAWS = {
    "rows last": lambda key, x: jax.random.normal(key, (T, D, B))[0].T * x,
    "rows in the middle": lambda key, x: jax.random.normal(key, (T, B, D))[1] * x,
    "time and rows on one axis": lambda key, x: jax.random.normal(key, (T * B, D)).reshape(T, B, D)[2] * x,
    "8 bits": lambda key, x: jax.random.bits(key, (B, D), np.uint8) * x,
    "16 bits": lambda key, x: jax.random.bits(key, (B, D), np.uint16) * x,
    "64 bits": lambda key, x: jax.random.bits(key, (B, D), np.uint64) * x,
    "integers": lambda key, x: jax.random.randint(key, (B, 1), 0, 100) * x,
    "categorical": lambda key, x: jax.random.categorical(key, x)[:, None] * x,
    "a gamma": lambda key, x: jax.random.gamma(key, 2.0, x.shape) * x,
    "for all alike": lambda key, x: jax.random.normal(key, (D,)) * x,
    **{f.__name__: f for f in (in_scan, in_scan_of_keys, in_checkpoint, in_branch, of_examples, of_raw_examples)},
}


@pytest.mark.parametrize(
    ("key", "names"),
    [(KEY, [*DRAWS]), (RAW, ["in_scan_of_keys", "in_checkpoint", "of_examples"])],
    ids=["typed", "raw"],
)
def test_a_threefry_draw_is_the_whole_batch_s_own(key, names):
    def all_drawn(key, w, x):
        return {name: DRAWS[name](key, jnp.tanh(x @ w["a"])) for name in names}

    found = quick_jit(shrewjax.micro_batched(all_drawn, K, batch_argnums=2))(key, W, X)
    expected = quick_jit(all_drawn)(key, W, X)
    for name, its in found.items():
        assert_close({name: its}, {name: expected[name]}, rtol=1e-12)


@pytest.mark.parametrize("is_typed", [True, False], ids=["typed", "raw"])
def test_keys_among_the_examples_stay_with_their_examples(is_typed):
    keys = jax.random.split(KEY, B)
    keys = keys if is_typed else jax.random.key_data(keys)

    def loss(w, x, keys):
        noise = jax.vmap(lambda k: jax.random.normal(k, (D,)))(keys)
        return jnp.mean((jnp.tanh(x @ w["a"]) + noise) ** 4)

    found = quick_jit(shrewjax.value_and_grad(loss, K))(W, X, keys)
    assert_close(found, quick_jit(jax.value_and_grad(loss))(W, X, keys), rtol=1e-10)


def contrastive(z):
    """A loss that takes two passes."""
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(z @ z.T)))


@pytest.mark.parametrize("generator", ["rbg", "unsafe_rbg", "threefry, not partitionable"])
def test_another_generator_draws_alike_in_both_passes_and_other_numbers_in_each_micro_batch(generator):
    is_threefry = generator.startswith("threefry")
    key = jax.random.key(3) if is_threefry else jax.random.key(3, impl=generator)

    def noisy(w, x):
        z = jnp.tanh(x @ w["a"]) * jax.random.normal(key, (B, D))
        return contrastive(z), z

    with jax.threefry_partitionable(False):
        (value, z), grads = quick_jit(shrewjax.value_and_grad(noisy, K, has_aux=True))(W, X)
    noise = z / np.tanh(X @ W["a"])
    expected = quick_jit(jax.value_and_grad(lambda w, x: contrastive(jnp.tanh(x @ w["a"]) * noise)))(W, X)
    assert_close((value, grads), expected, rtol=1e-10)
    assert np.min(np.abs(np.diff(np.sort(noise.ravel())))) > 1e-6
    assert 0.3 < np.std(noise) < 2


@pytest.mark.parametrize("generator", ["rbg", "threefry, not partitionable"])
def test_rows_and_columns_of_a_draw_are_of_one_draw_and_so_is_its_mean(generator):
    key = jax.random.key(3, impl=None if generator.startswith("threefry") else generator)

    def scaled(w, x):
        noise, whole = jax.random.normal(key, (B, B)), jax.random.normal(jax.random.fold_in(key, 1), (B, B))
        z = jnp.ones((B, B)) + 0 * (x @ w["a"])[:, :1]
        return z * noise, z * noise.T, z * whole, jnp.mean(z) * jnp.mean(whole)

    with jax.threefry_partitionable(False):
        rows, columns, whole, mean = quick_jit(shrewjax.micro_batched(scaled, K))(W, X)
    np.testing.assert_allclose(rows, columns.T, rtol=1e-12)
    np.testing.assert_allclose(np.mean(whole), mean, rtol=1e-12)
    assert len(np.unique(rows)) == B * B


def test_masks_of_dropout_in_bfloat16_are_the_whole_batch_s():
    w, x = jnp.asarray(W["a"], jnp.bfloat16), jnp.asarray(RNG.normal(size=(B, D)), jnp.bfloat16)

    def dropped(w, x, key):
        kept = jax.random.bernoulli(key, 0.7, x.shape)
        return jnp.where(kept, x @ w, 0), jax.random.normal(key, x.shape, x.dtype)

    found = quick_jit(shrewjax.micro_batched(dropped, K, batch_argnums=1))(w, x, KEY)
    expected = quick_jit(dropped)(w, x, KEY)
    np.testing.assert_array_equal(found[0] == 0, expected[0] == 0)
    np.testing.assert_array_equal(found[1], expected[1])
