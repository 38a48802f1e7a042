"""Equinox models, split by `eqx.partition`, train as by Equinox and Optax alone, and open windows cost nothing."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, bits
from speed import users_options

import shrewjax

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("as_users_have_it")]

K = 2
X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = np.arange(8, dtype=np.float32) / 4
# Optax's clip, one that reads the parameters, and one whose state is like them.
RULES = optax.clip_by_global_norm(0.5), shrewjax.adaptive_grad_clip(0.1), shrewjax.clip_by_leaf_norm_ema(warmup_steps=1)
INNER = optax.chain(*RULES, optax.adamw(1e-2))


class Model(eqx.Module):
    """Arrays to train, an integer array, a function and a string."""

    mlp: eqx.nn.MLP
    table: jax.Array
    name: str

    def __init__(self):
        self.mlp = eqx.nn.MLP(3, 1, 4, 1, activation=jax.nn.gelu, key=jax.random.key(0))
        self.table, self.name = jnp.arange(3), "model"

    def __call__(self, x):
        return self.mlp(x[self.table])[0]


def loss_of_model(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


def loss(trained, frozen, x, y):
    return loss_of_model(eqx.combine(trained, frozen), x, y)


@functools.cache
def by_equinox(steps):
    """The model after whole batches, by Equinox's own functions."""
    model = Model()
    state = INNER.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state):
        grads = eqx.filter_grad(loss_of_model)(model, X, Y)
        updates, state = INNER.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state

    for _ in range(steps):
        model, state = step(model, state)
    return model


def assert_trained_like(model, expected):
    assert_close(*(eqx.filter(m, eqx.is_inexact_array) for m in (model, expected)), rtol=1e-5, atol=1e-6)
    assert bits(model.table) == bits(expected.table)
    assert model.mlp.activation is jax.nn.gelu
    assert model.name == "model"
    assert bits(eqx.filter(model, eqx.is_inexact_array)) != bits(eqx.filter(Model(), eqx.is_inexact_array))


@pytest.mark.parametrize("name", ["value_and_grad", "accumulated_value_and_grad"])
def test_whole_batch_in_parts_trains_a_partitioned_model(name):
    trained, frozen = eqx.partition(Model(), eqx.is_inexact_array)
    state = INNER.init(trained)
    # A divided loss takes the frozen part as any argument.
    options = {} if name == "value_and_grad" else {"batch_argnums": (2, 3)}

    @eqx.filter_jit
    def step(frozen, trained, state):
        _, grads = getattr(shrewjax, name)(loss, K, **options)(trained, frozen, X, Y)
        assert grads.table is grads.name is grads.mlp.activation is None
        return shrewjax.apply_gradients(INNER, grads, state, trained)

    for _ in range(2):
        trained, state = step(frozen, trained, state)
    assert_trained_like(eqx.combine(trained, frozen), by_equinox(2))


class Attending(eqx.Module):
    """Static fields, a key beside the model, and a state that the call returns."""

    embed: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    dropout: eqx.nn.Dropout
    norm: eqx.nn.LayerNorm
    depth: int = eqx.field(static=True)
    name: str = eqx.field(static=True)

    def __init__(self, depth):
        keys = jax.random.split(jax.random.key(0), 2)
        self.embed, self.dropout, self.norm = (
            eqx.nn.Embedding(7, 4, key=keys[0]),
            eqx.nn.Dropout(0.3),
            eqx.nn.LayerNorm(4),
        )
        self.attention = eqx.nn.MultiheadAttention(2, 4, key=keys[1])
        self.depth, self.name = depth, "attending"

    def __call__(self, tokens, mask, key):
        x = jax.vmap(self.embed)(tokens)
        for own in jax.random.split(key, self.depth):
            h = jax.vmap(self.norm)(x)
            x = x + self.dropout(self.attention(h, h, h, mask=jnp.broadcast_to(mask, (len(mask),) * 2)), key=own)
        return x @ self.embed.weight.T


def test_a_module_with_static_fields_and_keys_for_examples_has_the_gradients_of_filter_value_and_grad():
    """Three do not divide eight. The loss is a mean over a mask, with a key for each example."""
    rng = np.random.default_rng(1)
    tokens, mask = rng.integers(0, 7, (8, 5)), np.arange(5) < rng.integers(2, 6, 8)[:, None]

    def masked(model, tokens, mask, key):
        logits = jax.vmap(model)(tokens, mask, jax.random.split(key, len(tokens)))
        errors = optax.softmax_cross_entropy_with_integer_labels(logits, tokens) * mask
        return jnp.sum(errors) / jnp.sum(mask), jnp.argmax(logits, -1)

    model, key = Attending(2), jax.random.key(3)
    expected = eqx.filter_jit(eqx.filter_value_and_grad(masked, has_aux=True))(model, tokens, mask, key)
    of_batch = shrewjax.micro_batched(masked, 3, has_aux=True)
    found = eqx.filter_jit(eqx.filter_value_and_grad(of_batch, has_aux=True))(model, tokens, mask, key)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_micro_batches_one_by_one_train_a_partitioned_model():
    trained, frozen = eqx.partition(Model(), eqx.is_inexact_array)
    tx = shrewjax.accumulate(INNER, K)
    state = tx.init(trained)
    assert state.gradient_sum.table is state.gradient_sum.name is None

    @eqx.filter_jit
    def step(frozen, trained, state, x, y):
        grads = eqx.filter_grad(loss)(trained, frozen, x, y)
        return shrewjax.apply_gradients(tx, grads, state, trained)

    for i in range(2 * K):
        trained, state = step(frozen, trained, state, X[i % K :: K], Y[i % K :: K])
    assert_trained_like(eqx.combine(trained, frozen), by_equinox(2))


def test_layers_that_are_not_trained_stay_and_have_no_sum():
    model = Model()
    nothing = jax.tree.map(lambda _: False, model)
    of_last_layer = lambda m: (m.mlp.layers[-1].weight, m.mlp.layers[-1].bias)  # noqa: E731
    trained, frozen = eqx.partition(model, eqx.tree_at(of_last_layer, nothing, (True, True)))
    tx = shrewjax.accumulate(INNER, 1)
    state = tx.init(trained)
    assert len(jax.tree.leaves(state.gradient_sum)) == 2

    @eqx.filter_jit
    def step(frozen, trained, state):
        grads = jax.grad(loss)(trained, frozen, X, Y)
        return shrewjax.apply_gradients(tx, grads, state, trained)

    changed = eqx.combine(step(frozen, trained, state)[0], frozen)
    assert bits(changed.mlp.layers[:-1]) == bits(model.mlp.layers[:-1])
    assert bits(changed.mlp.layers[-1]) != bits(model.mlp.layers[-1])


def test_open_call_of_a_donated_filter_jit_holds_no_tree_of_parameters():
    """The step takes and returns a whole model. The program that adds gradients to a sum by hand is the measure."""
    model = eqx.nn.MLP(128, 128, 128, 5, key=jax.random.key(0))
    size = sum(x.nbytes for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    # Not Optax's clip, which holds the clipped tree when the window closes.
    tx = shrewjax.accumulate(optax.chain(shrewjax.clip_by_global_norm(0.5), optax.adamw(1e-2)), 8)
    state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    def by_hand(grads, state, trained):
        return trained, state._replace(gradient_sum=jax.tree.map(jnp.add, state.gradient_sum, grads))

    def by_equinox(grads, state, trained):
        updates, state = tx.update(grads, state, trained)
        return eqx.apply_updates(trained, updates), state

    def held(update):
        def step(model, state):
            trained, frozen = eqx.partition(model, eqx.is_inexact_array)
            grads = jax.grad(lambda t: jnp.mean(jax.vmap(eqx.combine(t, frozen))(np.ones((2, 128), np.float32)) ** 2))(
                trained
            )
            trained, state = update(grads, state, trained)
            return eqx.combine(trained, frozen), state

        program = eqx.filter_jit(step, donate="all", compiler_options=users_options())
        program = program.lower(model, state).compile()
        return program.compiled.memory_analysis().temp_size_in_bytes / size

    if jax.__version_info__ < (0, 9):
        pytest.skip("XLA:CPU of jaxlib 0.8 copies the parameters around any conditional")
    floor = held(by_hand)
    assert held(functools.partial(shrewjax.apply_gradients, tx)) <= floor + 0.05
    assert held(by_equinox) > floor + 0.4
