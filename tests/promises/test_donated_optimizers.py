"""Optimizers whose state begins as the parameters: steps that donate both give what steps that donate nothing give."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from helpers import assert_close, thorough
from jax.sharding import NamedSharding

import shrewjax
import shrewjax.flax

SGD = optax.sgd(0.1)
OPTIMIZERS = {
    "cocob": lambda: optax.contrib.cocob(),
    "dog": lambda: optax.contrib.dog(1.0),
    "dowg": lambda: optax.contrib.dowg(1.0),
    "lbfgs": lambda: optax.lbfgs(0.1, linesearch=None),
    "madgrad": lambda: optax.contrib.madgrad(0.1),
    "mechanize": lambda: optax.contrib.mechanize(SGD),
    "prodigy": lambda: optax.contrib.prodigy(1.0),
    "sam": lambda: optax.contrib.sam(SGD, SGD, sync_period=2),
    # Their states begin as other arrays.
    "ademamix": lambda: optax.contrib.ademamix(0.1),
    "dadapt_adamw": lambda: optax.contrib.dadapt_adamw(1.0),
    "muon": lambda: optax.contrib.muon(0.1),
    "schedule_free": lambda: optax.contrib.schedule_free(SGD, 0.1),
}
if not hasattr(optax.contrib, "madgrad"):  # before Optax 0.2.8
    del OPTIMIZERS["madgrad"]
ALWAYS = ("prodigy",)


def params():
    return {"b": jnp.float32([0.3, -0.2, 1.0]), "w": jnp.arange(1.0, 13.0).reshape(4, 3) / 7}


def step_of(tx, **jit):
    """A step on the loss (p - 1)**2 / 2, with the gradients in the same program."""

    def step(p, s):
        grads = jax.grad(lambda p: sum(jnp.sum((x - 1) ** 2) for x in jax.tree.leaves(p)) / 2)(p)
        return shrewjax.apply_gradients(tx, grads, s, p)

    return jax.jit(step, **jit)


def trained(step, p, s, steps=3):
    for _ in range(steps):
        p, s = step(p, s)
    return jax.device_get(p)


WAYS = {
    "bare, by the page's copy": (lambda tx: tx, lambda tx, p: jax.tree.map(jnp.copy, tx.init(p))),
    "bare, by the page's jit": (lambda tx: tx, lambda tx, p: jax.jit(tx.init)(p)),
    "accumulate": (lambda tx: shrewjax.accumulate(tx, 1), lambda tx, p: tx.init(p)),
    "guards": (lambda tx: shrewjax.skip_nonfinite(shrewjax.skip_on_spike(tx)), lambda tx, p: tx.init(p)),
    "window around a guard": (
        lambda tx: shrewjax.accumulate(shrewjax.skip_nonfinite(tx), 1),
        lambda tx, p: tx.init(p),
    ),
}


@pytest.fixture(autouse=True)
def lenient_promotion():
    """Optax mixes dtypes; other tests hold the package to strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.combinations
@pytest.mark.parametrize("name", [*ALWAYS, *thorough(*sorted(OPTIMIZERS.keys() - ALWAYS))])
def test_donated_steps_are_those_without_donation(name):
    tx = OPTIMIZERS[name]()
    expected = trained(step_of(tx), params(), tx.init(params()))
    found = {}
    for way, (wrap, init) in WAYS.items():
        wrapped, p = wrap(tx), params()
        found[way] = trained(step_of(wrapped, donate_argnums=(0, 1)), p, init(wrapped, p))
    assert_close(found, dict.fromkeys(WAYS, expected), rtol=1e-5)


def pointers(*trees):
    arrays = [x for x in jax.tree.leaves(trees) if isinstance(x, jax.Array)]
    return [(s.device, s.data.unsafe_buffer_pointer()) for x in arrays for s in x.addressable_shards]


def test_flaxs_optimizer_and_train_state_donate_their_first_step():
    tx = optax.contrib.prodigy(1.0)
    expected = trained(step_of(tx), params(), tx.init(params()))
    p = params()
    state = shrewjax.flax.TrainState.create(apply_fn=None, params=p, tx=tx)
    assert len({*pointers(p, state.opt_state)}) == len(pointers(p, state.opt_state))
    step = step_of(tx, donate_argnums=(0, 1))
    assert_close(trained(step, p, state.opt_state), expected, rtol=1e-5)

    class Model(nnx.Module):
        def __init__(self):
            self.b, self.w = map(nnx.Param, params().values())

    model = Model()
    optimizer = shrewjax.flax.Optimizer(model, tx, wrt=nnx.Param)
    assert optimizer.tx is tx

    @nnx.jit(donate_argnames=("model", "optimizer"))
    def nnx_step(model, optimizer):
        grads = nnx.grad(lambda m: (jnp.sum((m.b[...] - 1) ** 2) + jnp.sum((m.w[...] - 1) ** 2)) / 2)(model)
        optimizer.update(model, grads)

    for _ in range(3):
        nnx_step(model, optimizer)
    assert_close({"b": model.b[...], "w": model.w[...]}, expected, rtol=1e-5)


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_on_a_mesh_copies_keep_shardings_and_what_shares_nothing_is_not_copied(axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType[axis_type],))
    specs = {"b": jax.P(), "w": jax.P("data")}
    p = {"b": jnp.ones(3), "w": jnp.ones((8, 3))}
    p = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in p.items()}
    made = []

    def init(p):
        made.append({"first": p, "again": p, "zeros": jax.tree.map(jnp.zeros_like, p), "key": jax.random.key(0)})
        return made[-1]

    tx = optax.GradientTransformation(init, lambda g, s, p=None: (g, s))
    for wrap in (lambda tx: shrewjax.accumulate(tx, 2), shrewjax.skip_nonfinite, shrewjax.skip_on_spike):
        with jax.set_mesh(mesh):
            state = wrap(tx).init(p)
        assert len({*pointers(p, state)}) == len(pointers(p, state))
        inner = state.inner_state
        assert inner["zeros"] == made[-1]["zeros"]  # the same objects
        assert inner["key"] is made[-1]["key"]
        for of in ("first", "again"):
            for name, x in inner[of].items():
                assert x.sharding.is_equivalent_to(p[name].sharding, x.ndim), (of, name)
                np.testing.assert_array_equal(x, p[name])
