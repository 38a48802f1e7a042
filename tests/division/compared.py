"""A divided function beside plain JAX, in float64: values and gradients, for two numbers of micro-batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_close
from speed import quick_jit

import shrewjax
from shrewjax._batches import divided

B, T, D = 8, 3, 4
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(B, D)), RNG.normal(size=(B, D))
W = {"a": RNG.normal(size=(D, D)), "b": RNG.normal(size=(D, D))}


def check(fun, *args, micro_batches=(4, 3), argnums=0, rtol=1e-10, **options):
    """Compares a loss, or any function by the sum of the squares of its results."""

    def squared(*args):
        leaves = jax.tree.leaves(fun(*args))
        return sum(jnp.sum(jnp.abs(x.astype(float)) ** 2) for x in leaves)

    is_loss = jax.eval_shape(fun, *args).shape == () if hasattr(jax.eval_shape(fun, *args), "shape") else False
    loss = fun if is_loss else squared
    expected = quick_jit(jax.value_and_grad(loss, argnums))(*args)
    for k in micro_batches:
        found = quick_jit(jax.value_and_grad(shrewjax.micro_batched(loss, k, **options), argnums))(*args)
        assert_close(found, expected, rtol=rtol, atol=1e-12)


def plan_of(fun, *args, micro_batches=4):
    """The plan for the parameters, which come first."""
    seen = []

    class Seen(divided.Divided):
        def __init__(self, *given):
            super().__init__(*given)
            seen.append(self.plan)

    part = shrewjax.micro_batched(fun, micro_batches)
    original = divided.Divided
    from shrewjax._batches import micro_batched

    micro_batched.Divided = Seen
    try:
        jax.eval_shape(functools.partial(jax.grad(lambda *args: jnp.sum(part(*args)))), *args)
    finally:
        micro_batched.Divided = original
    return seen[0]


def names(steps):
    return [getattr(x, "step", x).equation.primitive.name for x in steps]
