"""Twice as many leaves of the same shapes need no more distinct kernels, and no more arithmetic of their numbers."""

import re

import _compiled
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import thorough
from speed import users_jit

import shrewjax

SHAPES = ((32, 48), (48,))
RULES = {
    "leaf norm": lambda: shrewjax.clip_by_leaf_norm(1.0),
    "adaptive": lambda: shrewjax.adaptive_grad_clip(),
    "leaf norm, ord=inf": lambda: shrewjax.clip_by_leaf_norm(1.0, ord=np.inf),
    "block rms": lambda: shrewjax.clip_by_block_rms(1.0),
    "average of norms": lambda: shrewjax.clip_by_leaf_norm_ema(),
    "norms by leaf": lambda: shrewjax.clip_by_global_norm(1.0, per_leaf=True),
    "percentile by leaf": lambda: shrewjax.clip_by_percentile(99, scope="leaf"),
}


def leaves(layers):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for _ in range(layers) for shape in SHAPES]


def program(function, *arguments):
    return users_jit(function).lower(*arguments).compile().as_text()


def distinct_kernels(text):
    kernels = _compiled.distinct_kernels(text)
    assert kernels
    return kernels


def clamps(text):
    """The number of clamps in a program, most of them in powers of two, which the arithmetic of norms computes."""
    return len(re.findall(r" clamp\(", text))


def step(rule):
    tx = RULES[rule]()
    return lambda grads, state, params: tx.update(grads, state, params), tx.init


# Two stand for other norms of units. The last is a large program: half a minute with the newest jaxlib.
TWO, OTHERS = [*RULES][:2], [*RULES][2:]


@pytest.mark.combinations
@pytest.mark.parametrize("rule", [*TWO, *thorough(*OTHERS)])
def test_more_leaves_of_the_same_shapes_need_no_more_kernels(rule, one_device):
    update, init = step(rule)
    few, many = (program(update, grads, jax.eval_shape(init, grads), grads) for grads in (leaves(5), leaves(10)))
    assert distinct_kernels(many) == distinct_kernels(few)
    assert clamps(many) == clamps(few) > 0  # XLA-5: numbers of leaves are computed together, and once


def test_an_index_in_each_leafs_kernel_is_noticed():
    def scaled(grads):
        norms = jnp.stack([jnp.sum(g * g) for g in grads])
        return [g * scale for g, scale in zip(grads, jnp.sqrt(norms), strict=True)]

    few, many = (distinct_kernels(program(scaled, leaves(layers))) for layers in (5, 10))
    assert many == few + 5 * len(SHAPES)
