"""Twice as many leaves of the same shapes need no more distinct kernels, because compilers share equal ones."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bits, users_jit

import shrewjax

SHAPES = ((32, 48), (48,))
RULES = {
    "leaf norm": lambda: shrewjax.clip_by_leaf_norm(1.0),
    "leaf norm, ord=inf": lambda: shrewjax.clip_by_leaf_norm(1.0, ord=np.inf),
    "block rms": lambda: shrewjax.clip_by_block_rms(1.0),
    "average of norms": lambda: shrewjax.clip_by_leaf_norm_ema(),
    "adaptive": lambda: shrewjax.adaptive_grad_clip(),
    "norms by leaf": lambda: shrewjax.clip_by_global_norm(1.0, leaves=True),
    "percentile by leaf": lambda: shrewjax.clip_by_percentile(99, scope="leaf"),
}


def leaves(layers):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for _ in range(layers) for shape in SHAPES]


def distinct_kernels(function, *arguments):
    """The number of fusions that differ after their names are replaced by numbers."""
    text = re.sub(r", metadata=\{[^}]*\}", "", users_jit(function).lower(*arguments).compile().as_text())
    bodies = dict(re.findall(r"^%?([\w.\-]+) \(.*?\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE))
    called = re.findall(r"= (\S+|\(.*?\)) fusion\(.*?calls=%?([\w.\-]+)", text)
    assert called

    def renamed(body):
        names = {}
        return re.sub(r"%[\w.\-]+", lambda name: names.setdefault(name[0], f"%{len(names)}"), body)

    return len({(shape, renamed(bodies[name])) for shape, name in called})


@pytest.fixture
def one_device(monkeypatch):
    """As in a process with one device, where the numbers of leaves of several units are stacked; the suite's has 8."""
    monkeypatch.setattr("shrewjax._clipping.units.may_be_partitioned", lambda: False)


# The last is a large program: half a minute with the newest jaxlib.
ALL = [*list(RULES)[:-1], pytest.param(list(RULES)[-1], marks=pytest.mark.thorough)]


@pytest.mark.parametrize("rule", ALL)
def test_more_leaves_of_the_same_shapes_need_no_more_kernels(rule, one_device):
    tx = RULES[rule]()
    few, many = (
        distinct_kernels(lambda *x: tx.update(*x), grads, jax.eval_shape(tx.init, grads), grads)
        for grads in (leaves(5), leaves(10))
    )
    assert many < few + 5  # a kernel of its own for each added leaf of a shape would be five


def test_numbers_of_units_are_the_same_stacked_or_not(one_device, monkeypatch):
    rng = np.random.default_rng(0)
    grads, params = ([np.float32(rng.normal(size=(6, 4))) for _ in range(3)] for _ in range(2))
    grads[0][:, 0], grads[0][:, 1], grads[1][0, 2], grads[2][:, 3] = 1e25, 1e-25, np.nan, 0
    tx = shrewjax.adaptive_grad_clip(0.1)
    stacked, apart = ([], [])
    for results in (stacked, apart):
        results += bits(users_jit(lambda *x: tx.update(*x))(grads, tx.init(params), params))
        monkeypatch.undo()
    assert stacked == apart


def test_an_index_in_each_leafs_kernel_is_noticed():
    def scaled(grads):
        norms = jnp.stack([jnp.sum(g * g) for g in grads])
        return [g * scale for g, scale in zip(grads, jnp.sqrt(norms), strict=True)]

    few, many = (distinct_kernels(scaled, leaves(layers)) for layers in (5, 10))
    assert many == few + 5 * len(SHAPES)
