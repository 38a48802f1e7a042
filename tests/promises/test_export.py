"""`jax.export` with symbolic shapes: one program for all batch sizes and leaf sizes, with the bits of a fixed one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import TRANSFORMATIONS, bits, lenient

import shrewjax

pytestmark = pytest.mark.thorough


def layers(_, leaf):
    return 0 if leaf.ndim == 2 else ()


RULES = TRANSFORMATIONS | {
    "clip_by_global_norm, leaves": lambda: shrewjax.clip_by_global_norm(0.5, per_leaf=True),
    "clip_by_global_norm, ord": lambda: shrewjax.clip_by_global_norm(0.5, ord=3),
    "clip_by_leaf_norm, layers": lambda: shrewjax.clip_by_leaf_norm(0.5, stacked_axes=layers),
    "clip_by_percentile, leaf": lambda: shrewjax.clip_by_percentile(75, scope="leaf", over="nonzero"),
    "clip_by_block_rms, layers": lambda: shrewjax.clip_by_block_rms(0.5, stacked_axes=layers),
    "accumulate, noise": lambda: shrewjax.accumulate(lenient(optax.adam(0.1)), 2, noise_decay=0.9),
}


def symbolic(tree):
    """The same tree with an unknown first dimension in each leaf, its own for each leaf that has one."""
    scope = jax.export.SymbolicScope()

    def shape(i, x):
        rest = ", ".join(map(str, x.shape[1:]))
        spec = jax.export.symbolic_shape(f"n{i}, {rest}" if rest else f"n{i},", scope=scope) if x.ndim else ()
        return jax.ShapeDtypeStruct(spec, x.dtype)

    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([shape(i, x) for i, x in enumerate(leaves)])


def grads_of(size):
    rng = np.random.default_rng(size)
    shapes = {"kernel": (size, 4), "bias": (size + 1,), "scalar": ()}
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def step_of(tx):
    def step(grads, params):
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(grads, state, params, value=jnp.float32(1.0))
        return updates, state

    return step


@pytest.mark.combinations
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_of_symbolic_leaves_has_the_bits_of_fixed_ones(rule):
    step = jax.jit(step_of(optax.with_extra_args_support(RULES[rule]())))
    unknown = symbolic(grads_of(3))
    exported = jax.export.export(step)(unknown, unknown)
    grads = grads_of(9)
    params = jax.tree.map(jnp.cos, grads)
    assert bits(exported.call(grads, params)) == bits(step(grads, params))


def test_on_one_device_a_percentile_of_symbolic_leaves_has_the_bits_of_fixed_ones(monkeypatch):
    # With one device, small leaves are read as one vector, and a read has several operands.
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    clip = jax.jit(lambda grads: shrewjax.clip_grad_percentile(grads, 62.5))
    exported = jax.export.export(clip)(symbolic(grads_of(3)))
    assert bits(exported.call(grads_of(10))) == bits(clip(grads_of(10)))


def loss(params, x, counts):
    errors = jnp.sum(jnp.tanh(x @ params["w"] + params["b"][None]) ** 2, axis=1) * counts
    return jnp.sum(errors) / jnp.sum(counts), {"worst": jnp.max(errors), "each": errors}


accumulated = functools.partial(
    shrewjax.accumulated_value_and_grad,
    loss,
    4,
    has_aux=True,
    aux_reduction={"worst": "max", "each": "stack"},
)
STEPS = {
    "whole": lambda: shrewjax.value_and_grad(loss, 4, has_aux=True),
    "plain": accumulated,
    "weighted": lambda: accumulated(weight_fn=lambda params, x, counts: jnp.sum(counts)),
    "dropped": lambda: accumulated(nonfinite="drop_micro_batch"),
}


@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)
def test_a_whole_train_step_of_a_symbolic_batch_has_the_bits_of_a_fixed_one(make):
    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    tx = optax.chain(shrewjax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))
    grads_of_batch = make()

    @jax.jit
    def step(params, state, x, counts):
        (value, aux), grads = grads_of_batch(params, x, counts)
        return value, aux, *shrewjax.apply_gradients(tx, grads, state, params)

    (examples,) = jax.export.symbolic_shape("4*b")
    batch = (jax.ShapeDtypeStruct((examples, 3), np.float32), jax.ShapeDtypeStruct((examples,), np.float32))
    exported = jax.export.export(step)(params, tx.init(params), *batch)
    rng = np.random.default_rng(0)
    batch = rng.normal(size=(20, 3)).astype("f"), rng.integers(1, 3, 20).astype("f")
    carry = params, tx.init(params)
    assert bits(exported.call(*carry, *batch)) == bits(step(*carry, *batch))


def test_a_symbolic_batch_that_may_not_be_divisible_is_named():
    (examples,) = jax.export.symbolic_shape("b")
    batch = (jax.ShapeDtypeStruct((examples, 3), np.float32), jax.ShapeDtypeStruct((examples,), np.float32))
    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    messages = {
        "plain": "b examples, which micro_batches=4 does not divide",
        "whole": r"^micro_batches=4 must divide a symbolic number of examples, got b\. Export it for .*\('4\*b'\)",
    }
    for name, message in messages.items():
        with pytest.raises(ValueError, match=message):
            jax.export.export(jax.jit(STEPS[name]()))(params, *batch)
