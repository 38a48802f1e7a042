"""What every public transformation promises, checked for each of them."""

import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import TRANSFORMATIONS, assert_close, lenient, tree_of

import shrewjax

NEEDS_PARAMS = {"adaptive_grad_clip"}

each = pytest.mark.parametrize("name", TRANSFORMATIONS)


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
    if name not in NEEDS_PARAMS:
        tx.update(tree_of(1), state)
    tx.update(tree_of(1), state, tree_of(), value=1.0, unknown="ignored")


@each
def test_arguments_after_the_first_are_keyword_only(name):
    parameters = list(inspect.signature(getattr(shrewjax, name)).parameters.values())
    positional = 2 if name == "accumulate" else 1
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters[positional:])


@each
def test_state_and_updates_keep_structure_shapes_and_dtypes(name, x64):
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
    updates, new = jax.jit(tx.update)(params, state, params)
    assert signature(updates) == signature(params)
    assert signature(new) == signature(state)
    assert signature(jax.eval_shape(tx.init, params)) == signature(state)
    assert all(x.dtype != jnp.float64 for x in jax.tree.leaves(new)) or (x64 and name == "accumulate")


@each
def test_jit_and_no_jit_agree(name, x64):
    tx, params = TRANSFORMATIONS[name](), tree_of()
    plain_state = jitted_state = tx.init(params)
    update = jax.jit(tx.update)
    for i in range(3):
        plain, plain_state = tx.update(tree_of(i), plain_state, params)
        jitted, jitted_state = update(tree_of(i), jitted_state, params)
        assert_close(plain, jitted, rtol=1e-6)
        assert_close(plain_state, jitted_state, rtol=1e-6)


@each
def test_is_a_scan_carry_and_compiles_once(name):
    tx, params = TRANSFORMATIONS[name](), tree_of()
    chex.clear_trace_counter()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(grads, state):
        return tx.update(grads, state, params)

    state = looped = tx.init(params)
    for i in range(10):
        updates, looped = step(tree_of(i), looped)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(tree_of(i) for i in range(10)))
    scanned, all_updates = jax.lax.scan(lambda s, g: tx.update(g, s, params)[::-1], state, stacked)
    assert_close(scanned, looped, rtol=1e-6)
    assert_close(jax.tree.map(lambda x: x[-1], all_updates), updates, rtol=1e-6)


@each
def test_vmap_gives_what_each_row_gives(name):
    tx, rows = TRANSFORMATIONS[name](), [tree_of(i, scale) for i, scale in enumerate((1.0, 1e25, 1e-3))]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *rows)
    states = jax.vmap(tx.init)(stacked)
    updates, states = jax.vmap(tx.update)(stacked, states, stacked)
    for i, row in enumerate(rows):
        alone, state = tx.update(row, tx.init(row), row)
        assert_close(jax.tree.map(lambda x, i=i: x[i], updates), alone, rtol=1e-6)
        assert_close(jax.tree.map(lambda x, i=i: x[i], states), state, rtol=1e-6)


# --- inside Optax's own wrappers --------------------------------------------------------------------------------

LABELS = {"w": "on", "b": "on", "scalar": "off"}


def wrappers(make):
    """Wrapped transformations, each with the function that says which leaves the inner one sees."""
    everything = lambda tree: tree  # noqa: E731
    masked_in = lambda tree: {k: v for k, v in tree.items() if LABELS[k] == "on"}  # noqa: E731
    return {
        "chain": (optax.chain(make(), optax.identity()), everything),
        "named_chain": (optax.named_chain(("ours", make()), ("identity", optax.identity())), everything),
        "masked": (optax.masked(make(), {k: v == "on" for k, v in LABELS.items()}), masked_in),
        "partition": (optax.partition({"on": make(), "off": optax.identity()}, LABELS), masked_in),
        "apply_if_finite": (lenient(optax.apply_if_finite(make(), 3)), everything),
        "with_extra_args": (optax.with_extra_args_support(make()), everything),
    }


@each
@pytest.mark.parametrize("wrapper", wrappers(lambda: optax.identity()))
def test_inside_a_wrapper_it_does_to_its_leaves_what_it_does_alone(name, wrapper):
    wrapped, seen = wrappers(TRANSFORMATIONS[name])[wrapper]
    alone, params = TRANSFORMATIONS[name](), tree_of()
    state, alone_state = wrapped.init(params), alone.init(seen(params))
    update = jax.jit(wrapped.update)
    for i in range(1, 5):
        updates, state = update(tree_of(i), state, params)
        expected, alone_state = alone.update(seen(tree_of(i)), alone_state, seen(params))
        assert_close(seen(updates), expected, rtol=1e-6)
        outside = {k: v for k, v in updates.items() if k not in seen(params)}
        assert_close(outside, {k: tree_of(i)[k] for k in outside}, rtol=0)


INJECTED = {
    "clip_by_global_norm": (shrewjax.clip_by_global_norm, {"max_norm": 0.5}),
    "clip_by_leaf_norm": (shrewjax.clip_by_leaf_norm, {"max_norm": 0.5}),
    "clip_by_value": (shrewjax.clip_by_value, {"max_value": 0.1}),
    "clip_by_percentile": (shrewjax.clip_by_percentile, {"percentile": 75}),
    "adaptive_grad_clip": (shrewjax.adaptive_grad_clip, {"clipping": 0.1}),
    "clip_by_block_rms": (shrewjax.clip_by_block_rms, {}),
    "clip_by_norm_percentile": (shrewjax.clip_by_norm_percentile, {}),
    "clip_by_norm_zscore": (shrewjax.clip_by_norm_zscore, {}),
    "clip_by_leaf_norm_ema": (shrewjax.clip_by_leaf_norm_ema, {}),
    "skip_nonfinite": (
        shrewjax.skip_nonfinite,
        {"inner": optax.identity(), "max_consecutive": 2, "at_limit": "zero_nonfinite"},
    ),
    "skip_on_spike": (shrewjax.skip_on_spike, {"inner": optax.identity()}),
    "accumulate": (shrewjax.accumulate, {"inner": optax.identity(), "accum_steps": 2}),
}


@each
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inject_hyperparams_traces_every_number_and_nothing_else_changes(name, dtype):
    factory, arguments = INJECTED[name]
    params = jax.tree.map(lambda x: x.astype(dtype), tree_of())
    wrapped, plain = lenient(optax.inject_hyperparams(factory)(**arguments)), factory(**arguments)
    state, plain_state = wrapped.init(params), plain.init(params)
    update = jax.jit(wrapped.update)
    for i in range(1, 4):
        grads = jax.tree.map(lambda x: x.astype(dtype), tree_of(i))
        updates, state = update(grads, state, params)
        expected, plain_state = plain.update(grads, plain_state, params)
        # hyper-parameters arrive in the parameters' dtype
        assert_close(updates, expected, rtol=1e-6 if dtype == "float32" else 2e-2)
        assert jax.tree.map(lambda x: x.dtype, updates) == jax.tree.map(lambda x: x.dtype, grads)


def test_a_threshold_can_be_scheduled_down_to_zero():
    tx = optax.inject_hyperparams(shrewjax.clip_by_global_norm)(max_norm=optax.linear_schedule(1.0, 0.0, 2))
    params, state = jnp.zeros(2), None
    tx = lenient(tx)
    state = tx.init(params)
    for limit in (1.0, 0.5, 0.0, 0.0):
        updates, state = tx.update(jnp.array([3.0, 4.0]), state, params)
        np.testing.assert_allclose(jnp.linalg.norm(updates), limit, rtol=3e-7)


# --- on many devices --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=lambda t: t.name
)
@each
def test_sharded_inputs_give_the_unsharded_answer(name, axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    spec = {"w": jax.P("data"), "b": jax.P()}
    grads = {"w": jnp.arange(32.0).reshape(16, 2), "b": jnp.ones(3)}
    place = lambda tree: jax.tree.map(lambda x, s: jax.device_put(x, jax.sharding.NamedSharding(mesh, s)), tree, spec)  # noqa: E731
    tx = TRANSFORMATIONS[name]()
    state, sharded_state = tx.init(grads), tx.init(place(grads))
    update = jax.jit(tx.update)
    for _ in range(2):
        expected, state = tx.update(grads, state, grads)
        updates, sharded_state = update(place(grads), sharded_state, place(grads))
        assert_close(updates, expected, rtol=1e-6)
        assert updates["w"].sharding.is_equivalent_to(place(grads)["w"].sharding, 2)
    assert "all-gather" not in update.lower(place(grads), sharded_state, place(grads)).compile().as_text()
