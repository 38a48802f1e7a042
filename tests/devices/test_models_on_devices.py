"""Independent models, one a device, train as each does alone: by `vmap` and by `shard_map`."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import lenient, mesh_of, placed, thorough
from jax.sharding import PartitionSpec as P

import shrewjax

MODELS, STEPS = 4, 3
ALONE = {"sharded_over": ()}
ADAM = lenient(optax.adam(1e-2))


def layers(_, leaf):
    return 0 if leaf.ndim == 3 else None


RULES = {
    "global norm": lambda kw: shrewjax.clip_by_global_norm(1.0, per_leaf=True, **kw),
    "spikes": lambda kw: shrewjax.skip_on_spike(ADAM, warmup_steps=1, history_length=4, **kw),
    "adaptive": lambda kw: shrewjax.adaptive_grad_clip(0.1, stacked_axes=layers, **kw),
    "percentile": lambda kw: shrewjax.clip_by_percentile(75, **kw),
    "leaf norm": lambda kw: shrewjax.clip_by_leaf_norm(1.0, stacked_axes=layers, **kw),
    "leaf norm, order 3": lambda kw: shrewjax.clip_by_leaf_norm(1.0, ord=3, **kw),
    "global norm, largest": lambda kw: shrewjax.clip_by_global_norm(1.0, ord=np.inf, **kw),
    "block rms": lambda kw: shrewjax.clip_by_block_rms(1.0, **kw),
    "value": lambda _: shrewjax.clip_by_value(0.5),
    "percentile by leaf": lambda kw: shrewjax.clip_by_percentile(75, scope="leaf", **kw),
    "percentile of nonzeros": lambda kw: shrewjax.clip_by_percentile(75, method="lower", over="nonzero", **kw),
    "average of norms": lambda kw: shrewjax.clip_by_leaf_norm_ema(1.5, warmup_steps=1, **kw),
    "percentile of norms": lambda kw: shrewjax.clip_by_norm_percentile(50.0, history_length=4, **kw),
    "z-score": lambda kw: shrewjax.clip_by_norm_zscore(warmup_steps=1, **kw),
    "non-finite": lambda kw: shrewjax.skip_nonfinite(ADAM, per_leaf=True, **kw),
    "both guards": lambda kw: shrewjax.skip_nonfinite(
        shrewjax.skip_on_spike(optax.chain(shrewjax.clip_by_global_norm(1.0, **kw), ADAM), warmup_steps=1, **kw), **kw
    ),
}


def stacked(trees):
    return jax.tree.map(lambda *xs: np.stack([np.asarray(x) for x in xs]), *trees)


def of_model(i, tree):
    return jax.tree.map(lambda x: x[i], tree)


def gradients(step):
    """One model has a spike, one a norm whose square leaves float32, one a NaN in the second step."""
    rng = np.random.default_rng(step)
    sizes = np.float32([1, 1e-2, 30, 1e22 if step == 2 else 0.5])
    shapes = {"kernel": (3, 4), "scalar": (), "layers": (2, 3, 2)}
    grads = {k: rng.normal(size=(MODELS, *s)).astype(np.float32) for k, s in shapes.items()}
    grads = {k: x * sizes.reshape(-1, *[1] * (x.ndim - 1)) for k, x in grads.items()}
    if step == 1:
        grads["kernel"][1, 0, 0] = np.nan
    return grads


PARAMS = jax.tree.map(np.ones_like, gradients(0))


def first_state(tx):
    return stacked([tx.init(of_model(i, PARAMS)) for i in range(MODELS)])


def each_alone(tx):
    update, states, results = jax.jit(tx.update), [tx.init(of_model(i, PARAMS)) for i in range(MODELS)], []
    for step in range(STEPS):
        pairs = [update(of_model(i, gradients(step)), states[i], of_model(i, PARAMS)) for i in range(MODELS)]
        states = [state for _, state in pairs]
        results.append(stacked(pairs))
    return results


def on_devices(tx, mesh, update):
    def put(tree):
        def place(x):
            inside = ("width",) if "width" in mesh.axis_names and x.shape[-1:] == (4,) and x.ndim == 3 else ()
            return jax.device_put(x, jax.NamedSharding(mesh, P("model", *[None] * (x.ndim - 2), *inside)))

        return jax.tree.map(place, tree)

    params, state, results = put(PARAMS), put(first_state(tx)), []
    for step in range(STEPS):
        updates, state = update(put(gradients(step)), state, params)
        results.append(jax.device_get((updates, state)))
    return results


def assert_same(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-9), found, expected)


IN_JAX_0_8 = not hasattr(jax.sharding, "get_mesh")
GUARDS = {"spikes", "non-finite", "both guards"}
FIRST, OTHERS = [*RULES][:2], [*RULES][2:]


def rows(harder, easier):
    """Each rule in the harder way, and every third one in the other way, too."""
    others = [(rule, harder) for rule in OTHERS] + [(rule, easier) for rule in (*FIRST, *OTHERS[::3])]
    return [*((rule, harder) for rule in FIRST), *thorough(*others)]


# A flag of each model; two calls, the first of which leaves the window open; a measurement of the window.
STARTED_INSIDE = {
    "alone": shrewjax.clip_by_global_norm(1.0),
    "guard": shrewjax.accumulate(shrewjax.skip_nonfinite(optax.sgd(1.0)), 2),
    "clip": shrewjax.accumulate(optax.chain(shrewjax.clip_by_global_norm(1.0), ADAM), 2),
    "noise": shrewjax.accumulate(ADAM, 2, noise_decay=0.9),
    "bad windows": shrewjax.accumulate(ADAM, 2, nonfinite="drop_window"),
}


@pytest.mark.skipif(IN_JAX_0_8, reason="JAX 0.8 refuses a choice between constants there")
@pytest.mark.parametrize(
    ("rule", "is_set", "is_scan"),
    [
        ("guard", False, False),
        ("clip", True, True),
        *thorough(("clip", False, False), ("noise", True, False), ("alone", True, True), ("bad windows", False, False)),
    ],
)
def test_a_state_that_begins_inside_vmap_on_an_explicit_mesh_trains_as_each_model_alone(rule, is_set, is_scan):
    tx = STARTED_INSIDE[rule]

    def step(carry, g):
        params, state = carry
        updates, state = tx.update(g, state, params)
        return (optax.apply_updates(params, updates), state), None

    def train(params, *grads):
        carry = params, tx.init(params)
        if is_scan:
            return jax.lax.scan(step, carry, jnp.stack(grads))[0][0]
        for g in grads:
            carry, _ = step(carry, g)
        return carry[0]

    grads = [gradients(step)["layers"] for step in range(3)]
    params = PARAMS["layers"]
    expected = np.stack([jax.jit(train)(params[i], *(g[i] for g in grads)) for i in range(MODELS)])
    mesh = mesh_of("Explicit", model=MODELS)
    with jax.set_mesh(mesh) if is_set else contextlib.nullcontext():
        found = jax.jit(jax.vmap(train))(*placed((params, *grads), mesh, P("model")))
    assert_same(found, expected)


@pytest.mark.combinations
@pytest.mark.parametrize(("rule", "checked"), rows(True, False))
def test_models_in_shard_map_that_are_not_sharded_train_as_each_alone(rule, checked):
    if IN_JAX_0_8 and checked and rule in GUARDS:
        pytest.skip("JAX 0.8 refuses the zeros of a skipped step")
    tx, mesh = RULES[rule](ALONE), mesh_of(model=MODELS)

    def update(*arguments):
        return jax.tree.map(lambda x: x[None], tx.update(*of_model(0, arguments)))

    mapped = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=P("model"), out_specs=P("model"), check_vma=checked))
    assert_same(on_devices(tx, mesh, mapped), each_alone(RULES[rule]({})))


@pytest.mark.combinations
@pytest.mark.skipif(IN_JAX_0_8, reason="JAX 0.8 refuses a choice between constants there")
@pytest.mark.parametrize(("rule", "is_set"), rows(False, True))
def test_models_that_vmap_maps_on_an_explicit_mesh_train_as_each_alone(rule, is_set):
    tx, mesh = RULES[rule]({}), mesh_of("Explicit", model=MODELS)
    update = jax.jit(jax.vmap(tx.update))
    with jax.set_mesh(mesh if is_set else jax.sharding.get_mesh()):
        found = on_devices(tx, mesh, update)
    assert_same(found, each_alone(tx))


@pytest.mark.parametrize("rule", ["percentile of nonzeros", "both guards", *thorough("global norm", "block rms")])
def test_models_whose_layers_are_sharded_over_another_axis_train_as_each_alone(rule):
    """As ensembles and adapters are trained: `vmap` over models on an Explicit mesh, with a tensor parallel layer."""
    tx, mesh = RULES[rule]({}), mesh_of("Explicit", model=2, width=2)
    with jax.set_mesh(mesh):
        found = on_devices(tx, mesh, jax.jit(jax.vmap(tx.update)))
    assert_same(found, each_alone(tx))


CLIPS = {
    "function": lambda g: shrewjax.clip_grad_norm(g, 3.0, sharded_over=())[0],
    "cotangent": lambda g: jax.grad(lambda x: jnp.sum(shrewjax.clip_cotangent(x, 3.0, sharded_over=()) * g))(g),
    "transformation": lambda g: shrewjax.clip_by_global_norm(3.0, sharded_over=()).update(g, ())[0],
    "by leaf": lambda g: shrewjax.clip_by_leaf_norm(3.0, sharded_over=()).update(
        g, shrewjax.clip_by_leaf_norm(3.0).init(g)
    )[0],
}


@pytest.mark.parametrize("name", CLIPS)
def test_gradients_of_examples_are_clipped_each_alone_by_vmap_in_shard_map(name):
    grads = np.random.default_rng(0).normal(size=(8, 5)).astype("f") * np.linspace(0.1, 9, 8, dtype="f")[:, None]
    mapped = jax.shard_map(jax.vmap(CLIPS[name]), mesh=mesh_of(data=4), in_specs=P("data"), out_specs=P("data"))
    norms = np.linalg.norm(np.float64(grads), axis=1, keepdims=True)
    np.testing.assert_allclose(jax.jit(mapped)(grads), grads * np.minimum(1, 3 / norms), rtol=1e-5)


@pytest.mark.usefixtures("as_users_have_it")
def test_windows_of_models_with_a_sharded_layer_are_those_of_multi_steps():
    mesh = mesh_of("Explicit", model=2, width=2)
    tx = shrewjax.accumulate(optax.chain(shrewjax.clip_by_global_norm(1.0), ADAM), 2, noise_decay=0.5)
    multi = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), ADAM), 2)
    grads = np.random.default_rng(0).normal(size=(2, MODELS, 3, 4)).astype("f")
    params = np.zeros((MODELS, 3, 4), "f")
    with jax.set_mesh(mesh):
        here = jax.device_put(params, jax.NamedSharding(mesh, P("model", None, "width")))
        state = jax.vmap(tx.init)(here)
        for g in grads:
            found, state = jax.jit(jax.vmap(tx.update))(jax.device_put(g, here.sharding), state, here)
    state = jax.vmap(multi.init)(params)
    for g in grads:
        expected, state = jax.vmap(multi.update)(g, state, params)
    assert_same(found, expected)
