"""Explicit meshes without `sum_over=`: the numbers of one device, also by types that leave a sum to the caller."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import mesh_of, placed, thorough
from jax.sharding import PartitionSpec as P

import shrewjax

pytestmark = pytest.mark.usefixtures("as_users_have_it")
has_reshard = pytest.mark.skipif(not hasattr(jax, "reshard"), reason="this JAX has no types for sums over devices")

K, LAYERS, WIDTH = 4, 3, 16
RNG = np.random.default_rng(0)


def normal(*shape):
    return (RNG.normal(size=shape) / 4).astype("f")


PARAMS = {
    "in": normal(WIDTH, WIDTH),
    "out": normal(WIDTH, WIDTH),
    "layers": {"up": normal(LAYERS, WIDTH, WIDTH), "down": normal(LAYERS, WIDTH, WIDTH), "bias": normal(LAYERS, WIDTH)},
}
X, Y = normal(64, WIDTH), normal(64, WIDTH)


def layer(h, w):
    return h + jnp.tanh(h @ w["up"] + w["bias"]) @ w["down"], None


def scanned(params, x, y):
    h, _ = jax.lax.scan(jax.checkpoint(layer), x @ params["in"], params["layers"])
    return jnp.mean((h @ params["out"] - y) ** 2)


def close(found, expected, rtol=1e-5):
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=1e-5 * np.abs(np.asarray(e)).max())


# Without `jax.set_mesh`, a new array has no mesh.
CONTEXTS = {"set_mesh": jax.set_mesh, "no context": lambda mesh: contextlib.nullcontext()}


def penalized(params, x, y):
    return scanned(params, x, y) + 0.1 * jnp.sum(params["in"] ** 2), {"norm": jnp.sum(params["out"] ** 2)}


def carried(params, x, y, carry):
    value = scanned(params, x, y)
    return value, (value, carry + jnp.mean(x))


@pytest.mark.parametrize("context", ["set_mesh", *thorough("no context")])
def test_penalties_aux_and_carry_have_the_numbers_and_types_of_one_device(context):
    (value, aux), grads = jax.value_and_grad(penalized, has_aux=True)(PARAMS, X, Y)
    mesh = mesh_of("Explicit", data=8)
    with CONTEXTS[context](mesh):
        params, x, y = placed(PARAMS, mesh, P()), *placed((X, Y), mesh, P("data"))
        step = shrewjax.value_and_grad(penalized, K, has_aux=True)
        accumulated = shrewjax.accumulated_value_and_grad(penalized, K, has_aux=True)
        # Outside of jit, `jax.value_and_grad` of any loss there needs the mesh.
        eager = step if context == "set_mesh" else accumulated
        found = [jax.jit(step)(params, x, y), eager(params, x, y), jax.jit(accumulated)(params, x, y)]
        step = shrewjax.accumulated_value_and_grad(carried, K, has_aux=True, carry_argnum=3)
        (_, (_, carry)), _ = jax.jit(step)(params, x, y, jnp.zeros(()))
    close(found, (((value, aux), grads),) * 3)
    np.testing.assert_allclose(carry, sum(np.mean(X[i::K]) for i in range(K)), rtol=1e-4)


def products(params, x):
    return jnp.mean(jnp.tanh(x @ params) ** 2)


@pytest.mark.parametrize("weight", [None, lambda params, x: jnp.sum(x[:, 0] > -1)])
def test_complex_parameters_and_those_of_numpy_have_the_gradients_of_one_device(weight):
    params = {"complex": PARAMS["in"] + 1j * PARAMS["out"], "numpy": PARAMS["in"]}
    loss = lambda p, x: jnp.mean(jnp.abs((x @ p["numpy"]).astype(np.complex64) @ p["complex"]) ** 2)  # noqa: E731
    mesh = mesh_of("Explicit", data=8)
    with jax.set_mesh(mesh):
        here, x = params | {"complex": placed(params["complex"], mesh, P())}, placed(X, mesh, P("data"))
        found = jax.jit(shrewjax.accumulated_value_and_grad(loss, K, weight_fn=weight))(here, x)
    close(found, jax.value_and_grad(loss)(params, X))


def test_parameters_that_the_loss_does_not_use_have_gradients_of_zero():
    unused = {"matrix": normal(WIDTH, WIDTH), "vector": normal(WIDTH), "scalar": np.float32(2)}
    mesh = mesh_of("Explicit", data=8)
    with jax.set_mesh(mesh):
        params, x = placed({"in": PARAMS["in"], **unused}, mesh, P()), placed(X, mesh, P("data"))
        makes = shrewjax.value_and_grad, shrewjax.accumulated_value_and_grad
        found = [jax.jit(make(lambda p, x: jnp.mean((x @ p["in"]) ** 2), K))(params, x)[1] for make in makes]
    expected = 2 * X.T @ (X @ PARAMS["in"]) / X.size
    close(found, [{"in": expected, **jax.tree.map(np.zeros_like, unused)}] * 2)


def reduced(tree, axis="data"):
    return jax.tree.map(lambda x: jax.reshard(x, P(*jax.typeof(x).sharding.spec, reduced={axis})), tree)


def count(params, x):
    return jnp.sum(x[:, 0] > 0)


OPTIONS = {"plain": {}, "weighted": {"weight_fn": count}, "drop_micro_batch": {"nonfinite": "drop_micro_batch"}}


def weighted_mean(loss, params, x, options):
    """By hand: the mean of the micro-batches, each with its weight."""
    of_each = options.get("weight_fn", lambda params, x: 1.0)
    parts = [(of_each(params, x[i::K]), jax.value_and_grad(loss)(params, x[i::K])) for i in range(K)]
    total = sum(w for w, _ in parts)
    return jax.tree.map(
        lambda *g: sum(w * y for (w, _), y in zip(parts, g, strict=True)) / total, *(g for _, g in parts)
    )


@has_reshard
@pytest.mark.parametrize("name", OPTIONS)
def test_parameters_may_come_as_reduced(name):
    """JAX then leaves the sum to the caller, who may take it as a reduce-scatter. Here the call takes it."""
    loss = lambda p, x: jnp.mean((jnp.tanh(x @ p["in"]) @ p["out"]) ** 2)  # noqa: E731
    used, options = {name: PARAMS[name] for name in ("in", "out")}, OPTIONS[name]
    mesh = mesh_of("Explicit", data=8)
    with jax.set_mesh(mesh):
        params, x = placed(used, mesh, P()), placed(X, mesh, P("data"))

        def step(params, x):
            step = shrewjax.accumulated_value_and_grad(lambda p, x: (loss(p, x), p["in"]), K, has_aux=True, **options)
            (value, same), grads = step(reduced(params), x)
            assert not jax.typeof(same).sharding.spec.reduced
            return value, jax.tree.map(lambda g: jax.reshard(g, P("data")), grads)

        found, eager = jax.jit(step)(params, x), step(params, x)
    close((found, eager), (weighted_mean(loss, used, X, options),) * 2)


def test_derivatives_by_parameters_and_by_a_weight_are_those_of_one_device():
    def outer(a, w, x):
        step = shrewjax.accumulated_value_and_grad(products, K, weight_fn=lambda w, x: jnp.sum((a * x) ** 2))
        value, grad = step(w, x)
        return value + jnp.sum(grad**2)

    expected = jax.grad(outer, (0, 1))(np.ones(WIDTH, "f"), PARAMS["in"], X)
    mesh = mesh_of("Explicit", data=8)
    with jax.set_mesh(mesh):
        given = *placed((np.ones(WIDTH, "f"), PARAMS["in"]), mesh, P()), placed(X, mesh, P("data"))
        close(jax.jit(jax.grad(outer, (0, 1)))(*given), expected, rtol=0.01)


MAPPED = {"both": (0, 0), "parameters": (0, None), "examples": (None, 0)}
# Each mapped argument, each option, each context and each order of jit and vmap once.
IN_VMAP = [
    ("both", "weighted", "set_mesh"),
    ("parameters", "plain", "no context"),
    ("examples", "drop_micro_batch", "set_mesh"),
]


@pytest.mark.parametrize(("mapped", "name", "context"), IN_VMAP)
def test_vmap_may_map_an_axis_that_is_sharded_or_not(mapped, name, context):
    options, axes, rng = OPTIONS[name], MAPPED[mapped], np.random.default_rng(1)
    params, x = (
        rng.normal(size=(*[8] * (axis == 0), *shape)).astype("f")
        for axis, shape in zip(axes, [(WIDTH, WIDTH), (64, WIDTH)], strict=True)
    )
    each = [[y[i] if axis == 0 else y for y, axis in zip((params, x), axes, strict=True)] for i in range(8)]
    expected = jax.tree.map(lambda *g: np.stack(g), *(weighted_mean(products, *given, options) for given in each))
    mesh = mesh_of("Explicit", data=8)
    step = shrewjax.accumulated_value_and_grad(products, K, **options)
    with CONTEXTS[context](mesh):
        over_mapped = [P("data") if axis == 0 else P() for axis in axes]
        over_examples = P(), P(None, "data") if axes[1] == 0 else P("data")
        for specs in (over_mapped, over_examples):
            given = [placed(y, mesh, spec) for y, spec in zip((params, x), specs, strict=True)]
            close(jax.jit(jax.vmap(step, axes))(*given), expected)
        close(jax.vmap(jax.jit(step), axes)(*given), expected)


RULES = {
    "clip_by_global_norm": shrewjax.clip_by_global_norm(0.01),
    "skip_nonfinite": shrewjax.skip_nonfinite(optax.sgd(1.0)),
    "accumulate": shrewjax.accumulate(optax.sgd(1.0), 1),
    "clip_by_leaf_norm": shrewjax.clip_by_leaf_norm(0.01),
    "clip_by_percentile": shrewjax.clip_by_percentile(50),
    "clip_by_value": shrewjax.clip_by_value(0.001),
    "adaptive_grad_clip": shrewjax.adaptive_grad_clip(0.01),
    "skip_on_spike": shrewjax.skip_on_spike(optax.sgd(1.0)),
}
KINDS, OTHERS = [*RULES][:3], [*RULES][3:]  # a clip, a guard, a window; more of these


@has_reshard
@pytest.mark.parametrize("name", [*KINDS, *thorough(*OTHERS)])
def test_rules_sum_gradients_that_come_as_unreduced(name):
    tx, params = RULES[name], {"w": PARAMS["in"]}
    loss = lambda p, x: jnp.mean(jnp.tanh(x @ p["w"]) ** 2)  # noqa: E731
    expected, _ = tx.update(jax.grad(loss)(params, X), tx.init(params), params)
    mesh = mesh_of("Explicit", data=8)
    with jax.set_mesh(mesh):
        here, x = placed(params, mesh, P()), placed(X, mesh, P("data"))
        step = jax.jit(lambda p, s, x: tx.update(jax.grad(loss)(reduced(p), x), s, p)[0])
        found = step(here, tx.init(here), x)
    close(found, expected)


@pytest.mark.parametrize("axes", [{"data": 8}, {"data": 4, "model": 2}])
def test_an_array_that_the_loss_closes_over_has_to_be_an_argument_of_it_unless_the_loss_is_divided(axes):
    """JAX's own errors name neither the loss nor the remedy. The test does what the message says."""
    scale, w = PARAMS["layers"]["bias"][0], PARAMS["in"]
    mesh = mesh_of("Explicit", **axes)
    loss = lambda w, x, scale: jnp.mean(jnp.tanh(x @ w * scale) ** 2)  # noqa: E731
    with jax.set_mesh(mesh):
        given = placed(w, mesh, P()), placed(X, mesh, P("data")), placed(scale, mesh, P())

        def closing(make):
            return lambda w, x, scale: make(lambda w, x: loss(w, x, scale), K, sum_over="data")(w, x)

        accumulated = shrewjax.accumulated_value_and_grad
        with pytest.raises(ValueError, match=r"must not close over arrays on the mesh\. Pass them as arguments\."):
            jax.jit(closing(accumulated))(*given)
        steps = accumulated(loss, K, batch_argnums=1, sum_over="data"), closing(shrewjax.value_and_grad)
        found = [jax.jit(step)(*given) for step in steps]
    close(found, [jax.value_and_grad(loss)(w, X, scale)] * 2)
