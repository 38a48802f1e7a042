"""Wrappers run the wrapped transformation, or leave everything as it is, also if a library has rebuilt them."""

import copy
import functools
from typing import Any

import equinox
import equinox.internal
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import TRANSFORMATIONS, assert_close, bits, thorough
from speed import quick_jit

import shrewjax

pytestmark = pytest.mark.usefixtures("one_device")


def vector(*values):
    return jnp.asarray(values, jnp.float32)


# --- the wrapped transformation's state, and its updates ----------------------------------------------------------


@pytest.mark.parametrize("new", [lambda n: n + 1, lambda n: 7], ids=["a counter", "a new number"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: shrewjax.accumulate(inner, 1),
        lambda inner: shrewjax.accumulate(inner, 2),
        shrewjax.skip_nonfinite,
        shrewjax.skip_on_spike,
    ],
    ids=["window of one", "accumulate", "skip_nonfinite", "skip_on_spike"],
)
def test_inner_may_keep_python_numbers_in_its_state(wrap, new):
    inner = optax.GradientTransformation(lambda p: {"n": 6}, lambda g, s, p=None: (g, {"n": new(s["n"])}))
    tx = wrap(inner)
    state = tx.init(vector(0.0))
    for update in (tx.update, tx.update, quick_jit(tx.update), tx.update):
        before = int(state.inner_state["n"])
        _, state = update(vector(1.0), state)
        assert int(state.inner_state["n"]) == (new(before) if bool(state.applied) else before)
    assert bool(state.applied)


@pytest.mark.parametrize(
    "wrap",
    [optax.with_extra_args_support, functools.partial(shrewjax.accumulate, accum_steps=2), shrewjax.skip_nonfinite],
    ids=["Optax", "accumulate", "guard"],
)
def test_apply_gradients_leaves_parameters_to_which_nothing_can_be_added(wrap):
    params = {"x": vector(1.0), "i": jnp.arange(3), "key": jax.random.key(1)}
    grads = {"x": vector(4.0), "i": np.zeros(3, jax.dtypes.float0), "key": jax.random.key(2)}
    tx = wrap(optax.identity())
    state, step = tx.init(params), quick_jit(lambda state, params: shrewjax.apply_gradients(tx, grads, state, params))
    new_params = params
    for _ in range(2):
        new_params, state = step(state, new_params)
    assert float(new_params["x"][0]) > 1
    np.testing.assert_array_equal(new_params["i"], params["i"])
    assert new_params["key"] == params["key"]


def test_keys_among_gradients_pass_through_guards_around_an_accumulation():
    params = {"x": vector(1.0), "key": jax.random.key(1)}
    tx = shrewjax.skip_nonfinite(shrewjax.accumulate(optax.identity(), 1), max_consecutive=1, at_limit="zero_nonfinite")
    updates, _ = tx.update({"x": vector(np.nan), "key": params["key"]}, tx.init(params), params)
    assert float(updates["x"][0]) == 0
    assert updates["key"].dtype == params["key"].dtype


# --- transformations that a library has rebuilt -----------------------------------------------------------------


class Module(equinox.Module):
    tx: Any


# Optax's transformations are local functions, which pickle refuses.
REBUILT = {
    "jax.tree": lambda tx: jax.tree.map(lambda x: x, tx),
    "deepcopy": copy.deepcopy,
    "equinox.Module": lambda tx: jax.tree.map(lambda x: x, Module(tx)).tx,
    "equinox.partition": lambda tx: equinox.combine(*equinox.partition(tx, equinox.is_array)),
    "rebuilt closures": lambda tx: jax.tree.map(lambda x: x, equinox.internal.closure_to_pytree(tx)),
    "other functions": lambda tx: tx._replace(
        init=lambda params: tx.init(params), update=lambda *args, **kwargs: tx.update(*args, **kwargs)
    ),
}


# One of each way to be made: of a rule, of a rule by unit, around another one, around a window.
ONE_OF_EACH = "clip_by_global_norm", "adaptive_grad_clip", "skip_on_spike", "accumulate"


@pytest.mark.parametrize(
    "name", [*ONE_OF_EACH, *thorough(*(name for name in TRANSFORMATIONS if name not in ONE_OF_EACH))]
)
def test_a_rebuilt_transformation_makes_the_same_updates(name):
    tx, params = TRANSFORMATIONS[name](), vector(1.0, 2.0)
    state = tx.init(params)

    def program_of(tx):
        return str(jax.make_jaxpr(tx.update)(params, state, params))

    program = program_of(tx)
    assert {way for way, rebuild in REBUILT.items() if program_of(rebuild(tx)) != program} == set()


def inside(wrap, *others):
    return lambda: functools.reduce(lambda tx, wrap: wrap(tx), reversed((wrap, *others)), optax.trace(0.9))


three_steps = functools.partial(shrewjax.accumulate, accum_steps=3)


WRAPPED = {
    "accumulate": inside(three_steps),
    "skip_nonfinite": inside(shrewjax.skip_nonfinite),
    "skip_on_spike": inside(shrewjax.skip_on_spike),
    "accumulate of skip_nonfinite": inside(three_steps, shrewjax.skip_nonfinite),
    "accumulate of skip_on_spike": inside(three_steps, shrewjax.skip_on_spike),
    "skip_nonfinite of accumulate": inside(shrewjax.skip_nonfinite, three_steps),
    "skip_on_spike of skip_nonfinite": inside(shrewjax.skip_on_spike, shrewjax.skip_nonfinite),
}


def steps(tx):
    """The parameters and the state after a step, what the next one makes of them, and what flushing a window does."""
    params, grads = jnp.ones(2), jnp.asarray([3.0, -4.0])
    params, state = shrewjax.apply_gradients(tx, grads, tx.init(params), params)
    flushed = shrewjax.flush(tx, state, params) if hasattr(state, "micro_step") else ()
    return params, state, tx.update(grads, state, params), flushed


@functools.cache
def as_made(name):
    return bits(steps(WRAPPED[name]()))


# Each wrapper in one way, and one that is around another in each way.
REBUILT_WRAPPERS = [
    *((name, "jax.tree") for name in WRAPPED),
    *(("accumulate of skip_nonfinite", way) for way in REBUILT if way != "jax.tree"),
]


@pytest.mark.parametrize(("name", "way"), REBUILT_WRAPPERS)
def test_a_rebuilt_wrapper_does_what_the_original_does(name, way):
    assert bits(steps(REBUILT[way](WRAPPED[name]()))) == as_made(name)


def test_rebuilt_wrappers_go_through_filter_jit_as_arguments():
    made = {name: make() for name, make in WRAPPED.items()}
    found = equinox.filter_jit(lambda txs: {name: steps(tx) for name, tx in txs.items()})(made)
    assert_close(found, {name: steps(tx) for name, tx in made.items()}, rtol=1e-6)


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize("wrap", [lambda tx: shrewjax.accumulate(tx, 1), shrewjax.skip_nonfinite])
def test_a_state_in_bfloat16_that_float32_hyperparameters_widen_keeps_its_dtype(wrap):
    """The first update is Optax's. Later ones round the mean of gradients, as `optax.adam` does by itself."""
    params, grads = (jnp.asarray(x, jnp.bfloat16) for x in ([1.0, -2.0, 0.5], [0.3, 0.2, -0.1]))
    inner = optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(1e-2)
    tx = wrap(inner)
    first = tx.init(params)
    new_params, state = jax.jit(functools.partial(shrewjax.apply_gradients, tx))(grads, first, params)
    assert [x.dtype for x in jax.tree.leaves(state)] == [x.dtype for x in jax.tree.leaves(first)]
    updates, _ = jax.jit(inner.update)(grads, inner.init(params), params)
    assert new_params.tolist() == optax.apply_updates(params, updates).tolist()


def test_a_state_that_becomes_floating_or_leaves_the_range_of_its_dtype_stays_an_error():
    for old, new in ((jnp.int32, jnp.float32), (jnp.float16, jnp.float32)):
        inner = optax.GradientTransformation(
            lambda p, old=old: jnp.zeros((), old), lambda g, s, p=None, new=new: (g, s.astype(new))
        )
        tx = shrewjax.skip_nonfinite(inner)
        with pytest.raises(AssertionError, match=r"must stay .*, got float32 of shape \(\)\. Cast it"):
            tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


@pytest.mark.parametrize(
    "wrap", [lambda tx: shrewjax.accumulate(tx, 2), shrewjax.skip_nonfinite, shrewjax.skip_on_spike]
)
def test_init_of_a_whole_equinox_model_names_the_leaf_that_is_no_parameter(wrap):
    model = equinox.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))
    for inner in (optax.sgd(0.1), optax.adamw(0.1)):
        with pytest.raises(ValueError, match=r"parameter leaf .*activation must be an array .*eqx.is_inexact_array"):
            wrap(inner).init(model)
