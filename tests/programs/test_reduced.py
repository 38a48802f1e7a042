"""Gradients on Explicit meshes: summed over devices once, by their types, with the numbers of one device."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import mesh_of, placed, thorough
from jax.sharding import PartitionSpec as P
from speed import users_jit

import shrewjax
import shrewjax.flax
from shrewjax._programs.reduced import axes_of_examples, marked

pytestmark = [
    pytest.mark.usefixtures("as_users_have_it"),
    pytest.mark.skipif(not hasattr(jax, "reshard"), reason="this JAX has no types for sums over devices"),
]

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
MATRICES = {(WIDTH, WIDTH), (LAYERS, WIDTH, WIDTH)}


def layer(h, w):
    return h + jnp.tanh(h @ w["up"] + w["bias"]) @ w["down"], None


def scanned(params, x, y):
    h, _ = jax.lax.scan(jax.checkpoint(layer), x @ params["in"], params["layers"])
    return jnp.mean((h @ params["out"] - y) ** 2)


def listed(params, x, y):
    h = x @ params["in"]
    for i in range(LAYERS):
        h, _ = layer(h, jax.tree.map(lambda w, i=i: w[i], params["layers"]))
    return jnp.mean((h @ params["out"] - y) ** 2)


def count(params, x, y):
    return jnp.sum(y[:, 0] > 0)


def of_model(x):
    """Columns of matrices over "model"; vectors on every device."""
    return P(*(None,) * (x.ndim - 1), "model") if x.shape in MATRICES else P()


PLACES = {
    "data": ({"data": 8}, P(), P("data")),
    "data and model": ({"data": 4, "model": 2}, jax.tree.map(of_model, PARAMS), P("data")),
    "two axes of data": ({"replica": 2, "data": 4}, P(), P(("replica", "data"))),
}


def sent(compiled, least=WIDTH * WIDTH):
    """The elements of all-reduces of a size or more, inside of loops and outside."""
    inside, outside = 0, 0
    for line in compiled.as_text().splitlines():
        if found := re.search(r"= (.*?) all-reduce(?:-start)?\(", line):
            size = sum(
                int(np.prod([int(n) for n in dims.split(",") if n])) for dims in re.findall(r"\[([\d,]*)\]", found[1])
            )
            if size >= least:
                inside, outside = (inside + size, outside) if "/while/" in line else (inside, outside + size)
    return inside, outside


def close(found, expected, rtol=1e-5):
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=rtol, atol=1e-5 * np.abs(np.asarray(e)).max())


def of_micro_batches(loss, weights):
    parts = [jax.value_and_grad(loss)(PARAMS, X[i::K], Y[i::K]) for i in range(K)]
    return jax.tree.map(lambda *x: sum(w * g for w, g in zip(weights, x, strict=True)) / sum(weights), *parts)


LOSSES = {"scanned": scanned, "listed": listed}
WEIGHTS = {"unweighted": None, "weighted": count}
# Without `jax.set_mesh`, a new array has no mesh.
CONTEXTS = {"set_mesh": jax.set_mesh, "no context": lambda mesh: contextlib.nullcontext()}
# Each place, each kind of weight and each context once, with layers that are scanned; the same with layers in a list.
SCANNED = [
    ("data", "scanned", "unweighted", "set_mesh"),
    ("data and model", "scanned", "weighted", "no context"),
    ("two axes of data", "scanned", "weighted", "set_mesh"),
]
LISTED = [
    ("data", "listed", "weighted", "no context"),
    ("data and model", "listed", "unweighted", "set_mesh"),
    ("two axes of data", "listed", "unweighted", "no context"),
]


@pytest.mark.needs_passes
@pytest.mark.parametrize(("place", "loss", "weight", "context"), [*SCANNED, *thorough(*LISTED)])
def test_gradients_of_matrices_are_reduced_once_after_the_loop(place, loss, weight, context):
    (axes, spec, of_examples), loss, weight = PLACES[place], LOSSES[loss], WEIGHTS[weight]
    weights = [1.0] * K if weight is None else [np.sum(Y[i::K, 0] > 0) for i in range(K)]
    expected = of_micro_batches(loss, weights)
    mesh = mesh_of("Explicit", **axes)
    with CONTEXTS[context](mesh):
        params, x, y = placed(PARAMS, mesh, spec), *placed((X, Y), mesh, of_examples)
        compiled = users_jit(shrewjax.value_and_grad(loss, K, weight=weight)).lower(params, x, y).compile()
        value, grads = compiled(params, x, y)
    close((value, grads), expected)
    for g, p in zip(jax.tree.leaves(grads), jax.tree.leaves(params), strict=True):
        assert g.sharding.is_equivalent_to(p.sharding, p.ndim)
    matrices = sum(x.size for x in jax.tree.leaves(PARAMS) if x.shape in MATRICES)
    inside, outside = sent(compiled, least=WIDTH * WIDTH // 2)
    assert inside == 0
    assert outside == pytest.approx(matrices // axes.get("model", 1), rel=0.05)


def test_the_measure_finds_what_is_reduced_in_loops():
    mesh = mesh_of("Explicit", data=8)
    with jax.set_mesh(mesh):
        params, x, y = placed(PARAMS, mesh, P()), *placed((X, Y), mesh, P("data"))
        step = shrewjax.value_and_grad(scanned, K, nonfinite="drop_microbatch")
        compiled = users_jit(step).lower(params, x, y).compile()
        found = compiled(params, x, y)
    close(found, of_micro_batches(scanned, [1.0] * K))
    assert sent(compiled)[0] > 0


def penalized(params, x, y):
    return scanned(params, x, y) + 0.1 * jnp.sum(params["in"] ** 2), {"norm": jnp.sum(params["out"] ** 2)}


def carried(params, x, y, carry):
    value = scanned(params, x, y)
    return value, (value, carry + jnp.mean(x))


@pytest.mark.parametrize("context", CONTEXTS)
def test_penalties_aux_and_carry_have_the_numbers_and_types_of_one_device(context):
    (value, aux), grads = jax.value_and_grad(penalized, has_aux=True)(PARAMS, X, Y)
    mesh = mesh_of("Explicit", data=8)
    with CONTEXTS[context](mesh):
        params, x, y = placed(PARAMS, mesh, P()), *placed((X, Y), mesh, P("data"))
        step = shrewjax.value_and_grad(penalized, K, has_aux=True)
        found, eager = jax.jit(step)(params, x, y), step(params, x, y)
        step = shrewjax.value_and_grad(carried, K, has_aux=True, carry_argnum=3)
        (_, (_, carry)), _ = jax.jit(step)(params, x, y, jnp.zeros(()))
    close((found, eager), (((value, aux), grads),) * 2)
    np.testing.assert_allclose(carry, sum(np.mean(X[i::K]) for i in range(K)), rtol=1e-4)


def convolved(params, x, y):
    """Its first operation has no rule for these types."""
    kernel = params["in"].reshape(1, WIDTH, 1, WIDTH)
    h = jax.lax.conv_general_dilated(
        x.reshape(-1, 1, WIDTH, 1), kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.mean((h.mean((1, 2)) @ params["out"] - y) ** 2)


def test_a_loss_whose_operations_do_not_know_these_types_is_still_right():
    used = {name: PARAMS[name] for name in ("in", "out")}
    expected = jax.value_and_grad(convolved)(used, X, Y)
    mesh = mesh_of("Explicit", data=8)
    with jax.set_mesh(mesh):
        params, x, y = placed(used, mesh, P()), *placed((X, Y), mesh, P("data"))
        found = jax.jit(shrewjax.value_and_grad(convolved, K))(params, x, y)
    close(found, expected, rtol=1e-4)


def products(params, x):
    return jnp.mean(jnp.tanh(x @ params) ** 2)


def in_part_of_shard_map(step):
    specs = {"in_specs": (P(), P("data")), "out_specs": (P(), P()), "axis_names": {"data"}}
    return jax.shard_map(step(sum_over="data"), **specs)


def without_jit(step):
    def run(params, x):
        with jax.disable_jit():
            return step()(params, x)

    return run


WITHOUT_TYPES = {
    "shard_map": (in_part_of_shard_map, {"data": 2, "model": 4}, P(("data", "model"))),
    "vmap": (lambda step: jax.jit(jax.vmap(step(), (0, None))), {"data": 8}, P("data")),
    "no jit": (without_jit, {"data": 8}, P("data")),
}


@pytest.mark.parametrize("name", WITHOUT_TYPES)
def test_gradients_are_right_where_jax_does_not_know_these_types(name):
    run, axes, of_examples = WITHOUT_TYPES[name]
    params = np.stack([PARAMS["in"], PARAMS["out"]]) if name == "vmap" else PARAMS["in"]
    each = jax.value_and_grad(products)
    expected = jax.vmap(each, (0, None))(params, X) if name == "vmap" else each(params, X)
    mesh = mesh_of("Explicit", **axes)
    with jax.set_mesh(mesh):
        here, x = placed(params, mesh, P()), placed(X, mesh, of_examples)
        found = run(lambda **options: shrewjax.value_and_grad(products, K, **options))(here, x)
    close(found, expected)


@pytest.mark.parametrize("weight", [None, lambda params, x: jnp.sum(x[:, 0] > -1)])
def test_complex_parameters_and_those_of_numpy_have_the_gradients_of_one_device(weight):
    params = {"complex": PARAMS["in"] + 1j * PARAMS["out"], "numpy": PARAMS["in"]}
    loss = lambda p, x: jnp.mean(jnp.abs((x @ p["numpy"]).astype(np.complex64) @ p["complex"]) ** 2)  # noqa: E731
    mesh = mesh_of("Explicit", data=8)
    with jax.set_mesh(mesh):
        here, x = params | {"complex": placed(params["complex"], mesh, P())}, placed(X, mesh, P("data"))
        found = users_jit(shrewjax.value_and_grad(loss, K, weight=weight))(here, x)
    close(found, jax.value_and_grad(loss)(params, X))


def test_parameters_that_the_loss_does_not_use_have_gradients_of_zero():
    unused = {"matrix": normal(WIDTH, WIDTH), "vector": normal(WIDTH), "scalar": np.float32(2)}
    mesh = mesh_of("Explicit", data=8)
    with jax.set_mesh(mesh):
        params, x = placed({"in": PARAMS["in"], **unused}, mesh, P()), placed(X, mesh, P("data"))
        step = shrewjax.value_and_grad(lambda p, x: jnp.mean((x @ p["in"]) ** 2), K)
        _, grads = users_jit(step)(params, x)
    expected = 2 * X.T @ (X @ PARAMS["in"]) / X.size
    close(grads, {"in": expected, **jax.tree.map(np.zeros_like, unused)})


@pytest.mark.needs_passes
def test_marks_are_on_parameters_of_products_and_lookups_alone():
    mesh = mesh_of("Explicit", data=8)
    with jax.set_mesh(mesh):
        params, x, y = placed(PARAMS, mesh, P()), *placed((X, Y), mesh, P("data"))

        def types(params, x, y):
            found = marked(lambda p: scanned(p, x, y), params, (x, y), axes_of_examples((x, y), params))
            jax.tree.map(lambda p: of_leaves.append(jax.typeof(p).sharding.spec.reduced), found)
            return x

        of_leaves = []
        jax.eval_shape(types, params, x, y)
    assert [bool(marks) for marks in of_leaves] == [True, False, True, True, True]  # in, bias, down, up, out


@pytest.mark.needs_passes
def test_functions_that_call_each_other_twice_are_followed_once():
    """2**30 ways lead through these."""
    run = lambda w, h: jnp.tanh(h @ w)  # noqa: E731
    for _ in range(30):
        run = jax.jit(lambda w, h, run=run: run(w, run(w, h)))
    mesh = mesh_of("Explicit", data=8)
    with jax.set_mesh(mesh):
        w, x = placed(PARAMS["in"], mesh, P()), placed(X, mesh, P("data"))
        found = []

        def types(w, x):
            marks = marked(lambda w: jnp.mean(run(w, x)), w, x, axes_of_examples(x, w))
            found.append(jax.typeof(marks).sharding.spec.reduced)
            return x

        jax.eval_shape(types, w, x)
    assert found == [{"data"}]


def test_examples_that_no_mesh_shards_need_no_types():
    assert axes_of_examples((X, Y), PARAMS) == frozenset()
    mesh = mesh_of(data=8)
    assert axes_of_examples(placed(X, mesh, P("data")), PARAMS) == frozenset()


def reduced(tree, axis="data"):
    return jax.tree.map(lambda x: jax.reshard(x, P(*jax.typeof(x).sharding.spec, reduced={axis})), tree)


def test_parameters_that_come_as_reduced_give_gradients_that_are_unreduced_as_in_jax():
    mesh = mesh_of("Explicit", data=8)
    used = {name: PARAMS[name] for name in ("in", "out")}
    loss = lambda p, x, y: jnp.mean((jnp.tanh(x @ p["in"]) @ p["out"] - y) ** 2)  # noqa: E731
    expected = jax.value_and_grad(loss)(used, X, Y)[1]
    with jax.set_mesh(mesh):
        params, x, y = placed(used, mesh, P()), *placed((X, Y), mesh, P("data"))

        def step(params, x, y):
            _, grads = shrewjax.value_and_grad(loss, K)(reduced(params), x, y)
            seen.append({jax.typeof(g).sharding.spec.unreduced for g in jax.tree.leaves(grads)})
            return jax.tree.map(lambda g: jax.reshard(g, P("data")), grads)  # a reduce-scatter

        seen = []
        compiled = users_jit(step).lower(params, x, y).compile()
        found = compiled(params, x, y)
    assert seen[0] == {frozenset({"data"})}
    close(found, expected)
    assert sent(compiled)[0] == 0


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


def test_a_clip_in_shard_map_sums_gradients_that_come_as_unreduced():
    mesh = mesh_of(data=8)
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)  # noqa: E731

    def norm(w, x):
        return shrewjax.grad_norm(jax.grad(loss)(jax.lax.pcast(w, "data", to="reduced"), x))

    found = jax.jit(jax.shard_map(norm, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))(PARAMS["in"], X)
    np.testing.assert_allclose(found, np.linalg.norm(jax.grad(loss)(PARAMS["in"], X)), rtol=1e-5)


@pytest.mark.needs_passes
def test_a_model_of_flax_is_reduced_once_too():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.second = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, x):
            return self.second(jnp.tanh(self.first(x)))

    loss = lambda model, x, y: jnp.mean((model(x) - y) ** 2)  # noqa: E731
    graph, state = nnx.split(Model(nnx.Rngs(0)))
    expected = nnx.value_and_grad(loss)(nnx.merge(graph, state), X, Y)
    mesh = mesh_of("Explicit", data=8)
    with jax.set_mesh(mesh):
        here, x, y = placed(state, mesh, P()), *placed((X, Y), mesh, P("data"))

        def step(state, x, y):
            return shrewjax.flax.value_and_grad(loss, K)(nnx.merge(graph, state), x, y)

        compiled = users_jit(step).lower(here, x, y).compile()
        found = compiled(here, x, y)
    close(found, expected)
    assert sent(compiled)[0] == 0
