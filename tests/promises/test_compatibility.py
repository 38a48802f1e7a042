"""Every public transformation in the company that it keeps: Optax's wrappers and optimizers, checkpoints.

`test_nnx_optimizer.py`, `test_flax.py` and `test_equinox.py` have the frameworks.

The oracle of a cell is what the transformation does alone (other tests hold that to definitions), put in its place: a
`tape` that plays those updates back is wrapped in the same way, so that what differs is the fault of the meeting.
"""

import functools
import itertools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint
import pytest
from helpers import CASES, TRANSFORMATIONS, assert_close, bits
from speed import compiled

import shrewjax

pytestmark = pytest.mark.thorough

each = pytest.mark.parametrize("name", TRANSFORMATIONS)


@pytest.fixture(autouse=True)
def lenient_promotion():
    """Optax mixes dtypes; other tests hold the package to strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def tree_like_a_layer(seed, scale=1.0):
    """One shape for all cells, so that few programs are compiled."""
    rng = np.random.default_rng(seed)
    return {
        "bias": jnp.asarray(scale * rng.normal(size=3), jnp.float32),
        "kernel": jnp.asarray(scale * rng.normal(size=(2, 3)), jnp.float32),
    }


PARAMS = tree_like_a_layer(0)
GRADS = [tree_like_a_layer(i, scale) for i, scale in enumerate((1.0, 0.5, 1.5, 1.0, 30.0, 2.0), start=1)]
BROKEN = jax.tree.map(lambda x: x.at[0].set(jnp.nan), GRADS[0])


@functools.cache
def core(name):
    """The transformation, compiled once for each kind of tree."""
    return compiled(TRANSFORMATIONS[name]())


def run(tx, grads, params, *, moves=False, **extra_args):
    """The updates of each call, and the last state; the parameters stay where they are unless they move."""
    state, updates = tx.init(params), []
    for g in grads:
        update, state = tx.update(g, state, params, **extra_args)
        updates.append(update)
        if moves:
            params = optax.apply_updates(params, update)
    return updates, state


def tape(recorded):
    """A transformation that plays back recorded updates, one a call, whatever it gets.

    They are in its state, not in the program, so that one program plays all of them.
    """
    stacked = [np.stack(leaves) for leaves in zip(*map(jax.tree.leaves, recorded), strict=True)]

    def init(params):
        return {"calls": jnp.zeros((), jnp.int32), "recorded": [jnp.asarray(x) for x in stacked]}

    def update(updates, state, params=None, **extra_args):
        played = jax.tree.unflatten(jax.tree.structure(updates), [x[state["calls"]] for x in state["recorded"]])
        return played, state | {"calls": state["calls"] + 1}

    return optax.GradientTransformationExtraArgs(init, update)


class Wrapper(NamedTuple):
    """One way of wrapping, and what the wrapped transformation sees of it."""

    wrap: Callable[[Any], Any]
    given: Callable[[Any], Any] = lambda tree: tree  # what goes in, of the layer's tree
    params: Callable[[Any], Any] = lambda tree: tree
    seen: Callable[[Any], Any] = lambda tree: tree  # what the transformation sees, of the layer's tree
    calls: Callable[[list[Any]], list[Any]] = lambda grads: grads  # the calls that it sees
    broken_at: int | None = None  # a call with a NaN, which it does not see
    branches: bool = False  # on data: Optax compiles the branch on each call unless all is compiled
    moves: bool = False  # what it does depends on where the parameters go, so they go there
    extra_args: Any = MappingProxyType({})


def beside_another(tree):
    return {"off": jnp.ones(2), "on": tree}


def as_vector(tree):
    return jnp.concatenate([x.ravel() for x in jax.tree.leaves(tree)])


def means_of_two(grads):
    return [jax.tree.map(lambda a, b: (a + b) / 2, *pair) for pair in zip(grads[::2], grads[1::2], strict=True)]


def sgd():
    return optax.sgd(0.1, momentum=0.9)


LABELS = {"off": "off", "on": "on"}
EXTRA_ARGS = {"value": 1.0, "unknown": 2.0}  # the same in all cells, because others are another program
CONTRIB = {
    "adopt": optax.contrib.adopt(0.1),
    "momo": optax.contrib.momo(0.1),
    "muon": optax.contrib.muon(0.1),
    "prodigy": optax.contrib.prodigy(0.1),
    "reduce_on_plateau": optax.contrib.reduce_on_plateau(),
}
CONTRIB_COMPILED = {name: compiled(optimizer) for name, optimizer in CONTRIB.items()}
WRAPPERS = {
    "chain": Wrapper(lambda tx: optax.chain(tx, sgd())),
    "named_chain": Wrapper(lambda tx: optax.named_chain(("ours", tx), ("sgd", sgd()))),
    "with_extra_args": Wrapper(optax.with_extra_args_support, extra_args=EXTRA_ARGS),
    "masked": Wrapper(
        lambda tx: optax.masked(tx, {"off": False, "on": True}), given=beside_another, params=beside_another
    ),
    "partition": Wrapper(
        lambda tx: optax.partition({"on": tx, "off": optax.sgd(0.1)}, LABELS),
        given=beside_another,
        params=beside_another,
    ),
    "multi_transform": Wrapper(
        lambda tx: optax.multi_transform({"on": tx, "off": optax.set_to_zero()}, LABELS),
        given=beside_another,
        params=beside_another,
    ),
    "flatten": Wrapper(optax.flatten, seen=as_vector),
    "lookahead": Wrapper(
        lambda tx: optax.lookahead(optax.chain(tx, sgd()), sync_period=2, slow_step_size=0.5),
        params=optax.LookaheadParams.init_synced,
        moves=True,
    ),
    "schedule_free": Wrapper(lambda tx: optax.contrib.schedule_free(optax.chain(tx, optax.sgd(0.1)), 0.1), moves=True),
    "mechanize": Wrapper(
        lambda tx: optax.contrib.mechanize(optax.chain(tx, optax.sgd(0.1))), branches=True, moves=True
    ),
    "conditionally_transform": Wrapper(
        lambda tx: optax.conditionally_transform(tx, lambda step: step % 2 == 0),
        calls=lambda grads: grads[::2],
        branches=True,
    ),
    "apply_if_finite": Wrapper(lambda tx: optax.apply_if_finite(tx, 3), broken_at=2, branches=True),
    "MultiSteps": Wrapper(
        lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(), calls=means_of_two, branches=True
    ),
} | {
    f"contrib.{k}": Wrapper(lambda tx, optimizer=optimizer: optax.chain(tx, optimizer), extra_args=EXTRA_ARGS)
    for k, optimizer in CONTRIB_COMPILED.items()
}


@functools.cache
def alone(name, seen, calls):
    """Each call's updates, and the last state, of the transformation alone, given what a wrapper would pass it."""
    return run(core(name), calls([seen(g) for g in GRADS]), seen(PARAMS))


@functools.cache
def update_around_a_tape(wrapper):
    """Returns one program for every tape, because the recorded updates are in its state."""
    return compiled(WRAPPERS[wrapper].wrap(tape([PARAMS]))).update


@each
def test_the_transformation_does_something_on_these_gradients(name):
    updates, _ = run(core(name), GRADS, PARAMS)
    assert any(not np.array_equal(u["kernel"], g["kernel"]) for u, g in zip(updates, GRADS, strict=True))


# Each transformation in a chain, and one that needs the parameters and one with a window in each wrapper.
CELLS = dict.fromkeys(
    [
        *((name, "chain") for name in TRANSFORMATIONS),
        *itertools.product(("adaptive_grad_clip", "accumulate"), WRAPPERS),
    ]
)
del CELLS["accumulate", "MultiSteps"]  # an error: windows of windows


@pytest.mark.parametrize(("name", "wrapper"), CELLS)
def test_inside_a_wrapper_it_does_what_it_does_alone(name, wrapper):
    cell = WRAPPERS[wrapper]
    recorded, alone_state = alone(name, cell.seen, cell.calls)
    given = [cell.given(g) for g in GRADS]
    if cell.broken_at is not None:
        given.insert(cell.broken_at, BROKEN)
    if cell.branches:
        ours = compiled(cell.wrap(TRANSFORMATIONS[name]()))
        expected = optax.GradientTransformationExtraArgs(cell.wrap(tape(recorded)).init, update_around_a_tape(wrapper))
    else:
        ours, expected = cell.wrap(core(name)), cell.wrap(tape(recorded))

    # AGC looks at the parameters, and was recorded where they stay.
    extra_args = {"moves": cell.moves and name != "adaptive_grad_clip", **cell.extra_args}
    updates, state = run(ours, given, cell.params(PARAMS), **extra_args)
    expected_updates, _ = run(expected, given, cell.params(PARAMS), **extra_args)

    assert_close(updates, expected_updates, rtol=1e-5, atol=1e-7)
    assert_metrics_are_found(state, alone_state)


def assert_metrics_are_found(state, alone_state):
    """Every measurement is in the state around it, by the same name."""
    found = shrewjax.metrics(state)
    for name, value in shrewjax.metrics(alone_state).items():
        if name != "accumulate/value":  # alone, it was given none
            np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)


AROUND = {
    "accumulate": (lambda optimizer: shrewjax.accumulate(optimizer, 2), means_of_two),
    "skip_nonfinite": (shrewjax.skip_nonfinite, lambda grads: grads),
    "skip_on_spike": (shrewjax.skip_on_spike, lambda grads: grads),
}


@pytest.mark.parametrize("optimizer", CONTRIB)
@pytest.mark.parametrize("name", AROUND)
def test_around_a_contributed_optimizer_the_optimizer_does_what_it_does_alone(name, optimizer):
    wrap, calls = AROUND[name]
    expected, _ = run(CONTRIB_COMPILED[optimizer], calls(GRADS), PARAMS, value=1.0)
    grads = GRADS if name == "accumulate" else [BROKEN, *GRADS]
    updates, _ = run(compiled(wrap(CONTRIB[optimizer])), grads, PARAMS, value=1.0)
    applied = updates[1::2] if name == "accumulate" else updates[1:]
    idle = updates[::2] if name == "accumulate" else updates[:1]
    assert_close(applied, expected, rtol=1e-5, atol=1e-7)
    assert all(not np.any(x) for x in jax.tree.leaves(idle))


def test_lookahead_that_resets_states_by_arithmetic_is_refused_by_accumulate():
    # Optax multiplies the state with 0 and 1, which makes integers of flags.
    tx = optax.lookahead(shrewjax.accumulate(sgd(), 2), sync_period=2, slow_step_size=0.5, reset_state=True)
    with pytest.raises(
        AssertionError, match=r"the AccumulateState changed: leaf .*applied must stay int32 .* got bool"
    ):
        run(tx, GRADS, optax.LookaheadParams.init_synced(PARAMS))


@pytest.mark.parametrize("name", sorted(set(TRANSFORMATIONS) - {"accumulate"}))
def test_lookahead_that_resets_states_by_arithmetic_leaves_no_nan_in_the_updates(name):
    tx = optax.lookahead(core(name), sync_period=2, slow_step_size=0.5, reset_state=True)
    updates, _ = run(tx, GRADS, optax.LookaheadParams.init_synced(PARAMS))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(updates))
    # Every second call is a fresh start.
    expected = [run(core(name), GRADS[i : i + 2], PARAMS)[0] for i in (0, 2, 4)]
    assert_close([u.fast for u in updates[::2]], [first for first, _ in expected], rtol=1e-5)


# --- hyper-parameters as arrays ---------------------------------------------------------------------------------


def injected(name):
    """The factory of a transformation, and arguments for it."""
    return getattr(shrewjax, name), CASES[name].injected


@pytest.mark.combinations
@each
def test_inject_hyperparams_traces_every_number_and_nothing_else_changes(name):
    factory, arguments = injected(name)
    wrapped, plain = compiled(optax.inject_hyperparams(factory)(**arguments)), compiled(factory(**arguments))
    updates, state = run(wrapped, GRADS, PARAMS)
    expected, plain_state = run(plain, GRADS, PARAMS)
    assert_close(updates, expected, rtol=1e-6)
    assert_metrics_are_found(state, plain_state)


@each
def test_inject_hyperparams_in_bfloat16_keeps_every_dtype(name):
    factory, arguments = injected(name)
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    tx = optax.inject_hyperparams(factory)(**arguments)
    state = tx.init(params)
    updates, new_state = jax.eval_shape(tx.update, params, state, params)
    assert jax.tree.map(lambda x: x.dtype, updates) == jax.tree.map(lambda x: x.dtype, params)
    assert jax.tree.map(lambda x: x.dtype, new_state) == jax.tree.map(lambda x: x.dtype, state)


@pytest.mark.parametrize("name", ["clip_by_global_norm", "clip_by_value", "accumulate"])
def test_inject_hyperparams_rounds_them_to_bfloat16_parameters(name):
    factory, arguments = injected(name)
    params, *grads = (jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree) for tree in (PARAMS, *GRADS))
    updates, _ = run(compiled(optax.inject_hyperparams(factory)(**arguments)), grads, params)
    expected, _ = run(compiled(factory(**arguments)), grads, params)
    assert_close(updates, expected, rtol=2e-2)


@pytest.mark.parametrize(
    ("factory", "structural"),
    [
        (shrewjax.clip_by_global_norm, {"max_norm": 1.0, "ord": 1}),
        (shrewjax.clip_by_norm_percentile, {"percentile": 10.0, "history_length": 4}),
        (shrewjax.adaptive_grad_clip, {"axis": 0}),
        (shrewjax.clip_by_block_rms, {"stacked_axes": 0}),
        (shrewjax.skip_on_spike, {"inner": optax.identity(), "history_length": 128}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_inject_hyperparams_of_what_decides_the_program_raises_and_says_what_to_do(factory, structural):
    argument = list(structural)[-1]
    with pytest.raises(ValueError, match=f"{argument} must be .*inject_hyperparams, name it in static_args"):
        optax.inject_hyperparams(factory)(**structural).init(PARAMS)
    optax.inject_hyperparams(factory, static_args=argument)(**structural).init(PARAMS)


def test_a_threshold_can_be_scheduled_down_to_zero():
    tx = optax.inject_hyperparams(shrewjax.clip_by_global_norm)(max_norm=optax.linear_schedule(1.0, 0.0, 2))
    updates, _ = run(tx, [jnp.array([3.0, 4.0])] * 4, jnp.zeros(2))
    np.testing.assert_allclose([jnp.linalg.norm(u) for u in updates], [1.0, 0.5, 0.0, 0.0], rtol=3e-7)


# --- optax.tree -------------------------------------------------------------------------------------------------


@each
def test_tree_get_and_set_carry_a_state_over_field_by_field(name):
    tx = optax.chain(core(name), optax.identity())
    _, state = run(tx, GRADS[:3], PARAMS)
    fields = state[0]._fields
    copy = tx.init(PARAMS)
    for field in fields:
        value = optax.tree.get(state, field)
        assert value is getattr(state[0], field)
        copy = optax.tree.set(copy, **{field: value})
    assert bits(copy) == bits(state)
    assert jax.tree.structure(copy) == jax.tree.structure(state)


@each
def test_tree_map_params_finds_the_fields_that_are_like_the_parameters(name):
    tx = TRANSFORMATIONS[name]()
    state = tx.init(PARAMS)
    marks = {"bias": "the bias's", "kernel": "the kernel's"}
    marked = optax.tree.map_params(tx, lambda x, mark: mark, state, marks, transform_non_params=lambda x: "another")
    assert jax.tree.structure(marked) == jax.tree.structure(state)
    like_params = {field for field in state._fields if getattr(marked, field) == marks}
    assert like_params == set(CASES[name].like_params)
    others = [getattr(marked, field) for field in state._fields if field not in like_params]
    assert all(mark == "another" for mark in jax.tree.leaves(others))


# --- checkpoints ------------------------------------------------------------------------------------------------


# States with a history, with an average for each leaf, with flags, and with a window.
@pytest.mark.parametrize("name", ["clip_by_norm_zscore", "clip_by_leaf_norm_ema", "skip_on_spike", "accumulate"])
def test_saved_and_restored_by_orbax_it_goes_on_bit_identically(name, tmp_path):
    tx = optax.chain(core(name), sgd())
    _, state = run(tx, GRADS[:3], PARAMS)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(tx.init, PARAMS))
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(tx.update(GRADS[3], restored, PARAMS)) == bits(tx.update(GRADS[3], state, PARAMS))
