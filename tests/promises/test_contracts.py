"""What every public transformation promises, checked for each of them."""

import inspect
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import CASES, TRANSFORMATIONS, assert_close, each_world, mesh_of, placed, small_tree, thorough, tree_of
from speed import quick_jit

import shrewjax

each = pytest.mark.parametrize("name", TRANSFORMATIONS)
# Also where `either_world` has just been one device for the tests above.
with_eight_devices = pytest.mark.parametrize("either_world", [8], indirect=True, ids=["eight_devices"])


TRACED = []  # the name of the transformation, for each time that its update is traced


@cache
def jitted_update(name):
    """Returns the program of all tests here, whose arguments have the same shapes."""

    def update(grads, state, params):
        TRACED.append(name)
        return TRANSFORMATIONS[name]().update(grads, state, params)

    return quick_jit(update)


def signature(tree):
    return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def test_no_public_transformation_is_forgotten():
    annotated = {
        name
        for name, value in vars(shrewjax).items()
        if inspect.isfunction(value)
        and inspect.signature(value).return_annotation is optax.GradientTransformationExtraArgs
    }
    assert annotated == set(TRANSFORMATIONS)


@each
def test_is_an_optax_transformation_with_its_signature_to_the_letter(name):
    tx = TRANSFORMATIONS[name]()
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    first, second, third, *others = inspect.signature(tx.update).parameters.values()
    assert [p.name for p in (first, second, third)] == ["updates", "state", "params"]
    assert third.default is None
    assert others[-1].kind is inspect.Parameter.VAR_KEYWORD
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in others[:-1])
    state = tx.init(tree_of())
    if not CASES[name].needs_params:
        jax.eval_shape(tx.update, tree_of(1), state)
    jax.eval_shape(partial(tx.update, value=1.0, unknown="ignored"), tree_of(1), state, tree_of())


@each
def test_arguments_after_the_first_are_keyword_only(name):
    parameters = list(inspect.signature(getattr(shrewjax, name)).parameters.values())
    positional = 2 if name == "accumulate" else 1
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters[positional:])


@each_world
@each
def test_state_and_updates_keep_structure_shapes_and_dtypes(name, x64, either_world):
    params = tree_of() | {
        "half": jnp.ones(3, jnp.bfloat16),
        "count": jnp.arange(2),
        "none": None,
        "m": optax.MaskedNode(),
    }
    if x64:
        params["double"] = jnp.ones(2, jnp.float64)
    tx = TRANSFORMATIONS[name]()
    state = tx.init(params)
    updates, new = jax.eval_shape(tx.update, params, state, params)
    assert signature(updates) == signature(params)
    assert signature(new) == signature(state)
    assert signature(jax.eval_shape(tx.init, params)) == signature(state)
    assert x64 or all(x.dtype != jnp.float64 for x in jax.tree.leaves(new))


@pytest.mark.combinations
@each_world
@each
@pytest.mark.parametrize("x64", [False, *thorough(True)], ids=["x32", "x64"], indirect=True)
def test_jit_and_no_jit_agree(name, x64, either_world):
    tx, params = TRANSFORMATIONS[name](), small_tree()
    plain_state = jitted_state = tx.init(params)
    traced = TRACED.count(name)
    for i in range(3):
        plain, plain_state = tx.update(jax.device_put(small_tree(i)), plain_state, params)
        jitted, jitted_state = jitted_update(name)(small_tree(i), jitted_state, params)
        assert_close(plain, jitted, rtol=1e-6)
        assert_close(plain_state, jitted_state, rtol=1e-6)
    assert TRACED.count(name) <= traced + 1  # whichever test of `jitted_update` comes first traces once


ROWS = [[small_tree(10 * row + i, scale) for i in range(10)] for row, scale in enumerate((1.0, 1e25, 1e-3))]


@cache
def scanned_rows(name, devices):
    """The last states and all updates of a scan over the steps of each row, under vmap: one program for two claims."""
    tx = TRANSFORMATIONS[name]()

    def scan(grads, params):
        return jax.lax.scan(lambda state, g: tx.update(g, state, params)[::-1], tx.init(params), grads)

    stacked = [jax.tree.map(lambda *x: np.stack(x), *row) for row in ROWS]
    grads = jax.tree.map(lambda *x: np.stack(x), *stacked)
    return jax.device_get(quick_jit(jax.vmap(scan))(grads, jax.tree.map(lambda x: x[:, 0], grads)))


def step_by_step(name, row):
    """The last state and all updates of one row, by calls of one program."""
    params, all_updates = row[0], []
    state = TRANSFORMATIONS[name]().init(params)
    for grads in row:
        updates, state = jitted_update(name)(grads, state, params)
        all_updates.append(jax.device_get(updates))
    return state, jax.tree.map(lambda *x: np.stack(x), *all_updates)


@pytest.mark.combinations
@each_world
@each
def test_is_a_scan_carry_and_compiles_once(name, either_world):
    traced = TRACED.count(name)
    expected = step_by_step(name, ROWS[0])
    assert TRACED.count(name) <= traced + 1
    assert_close(jax.tree.map(lambda x: x[0], scanned_rows(name, either_world)), expected, rtol=1e-6)


@each_world
@each
def test_vmap_gives_what_each_row_gives(name, either_world):
    for i, row in enumerate(ROWS):
        found = jax.tree.map(lambda x, i=i: x[i], scanned_rows(name, either_world))
        assert_close(found, step_by_step(name, row), rtol=1e-6)


# --- on many devices --------------------------------------------------------------------------------------------


@pytest.mark.combinations
@pytest.mark.parametrize("axis_type", ["Auto", *thorough("Explicit")])
@each
@with_eight_devices
def test_sharded_inputs_give_the_unsharded_answer(name, axis_type, either_world):
    mesh = mesh_of(axis_type, data=8)
    spec = {"w": jax.P("data"), "scalar": jax.P()}
    grads = {"w": np.arange(32, dtype=np.float32).reshape(16, 2), "scalar": np.float32(1)}

    tx, sharded = TRANSFORMATIONS[name](), placed(grads, mesh, spec)
    state, sharded_state = tx.init(grads), tx.init(sharded)
    sharded_state = placed(sharded_state, mesh, shrewjax.state_specs(sharded_state))  # as updates leave it: one program
    update = quick_jit(tx.update).lower(sharded, sharded_state, sharded).compile()
    for _ in range(2):
        expected, state = jitted_update(name)(grads, state, grads)
        updates, sharded_state = update(sharded, sharded_state, sharded)
        assert_close(updates, expected, rtol=1e-6)
        assert updates["w"].sharding.is_equivalent_to(sharded["w"].sharding, 2)
    assert "all-gather" not in update.as_text()


@with_eight_devices
def test_the_text_of_a_program_that_gathers_says_so(either_world):
    """Such sharded inputs are sorted here, which needs all of them on each device."""
    mesh = mesh_of(data=8)
    sharded = placed(np.zeros((16, 2), np.float32), mesh, jax.P("data"))
    program = quick_jit(lambda x: jnp.sort(x, axis=0)).lower(sharded).compile()
    assert "all-gather" in program.as_text()
