"""A loss whose derivatives are computed in micro-batches. The oracle is JAX on the whole batch, in float64."""

import inspect
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.dynamic_scale import DynamicScale
from helpers import assert_close, mesh_of, placed, thorough
from jax import P
from speed import quick_jit

import shrewjax
import shrewjax.flax

B, K = 8, 4
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(3, 4)), "a": RNG.normal(size=(4, 2)), "b": RNG.normal(size=(2, 4))}
LAM, X, Y = np.float64(0.3), RNG.normal(size=(B, 3)), RNG.normal(size=B)
F32 = jax.tree.map(lambda x: np.asarray(x, "f"), (PARAMS, LAM, X, Y))
DIRECTION = jax.tree.map(np.cos, PARAMS)


def loss(params, lam, x, y):
    """A mean over examples, with an adapter and a penalty that couples both arguments."""
    h = jnp.tanh(x @ params["w"] @ (jnp.eye(4, dtype=x.dtype) + params["a"] @ params["b"]))
    return jnp.mean((jnp.mean(h, axis=1) - y) ** 2) + lam**2 * jnp.sum(jnp.sin(params["a"]))


def with_aux(*args):
    value = loss(*args)
    return value, {"loss": value, "count": len(args[2])}


of_batch = shrewjax.micro_batched(loss, K, batch_argnums=(2, 3))


def held(function, *args):
    """The bytes of a program's temporaries."""
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes


# --- every derivative is that of the whole batch ---------------------------------------------------------------------


def of_params(f):
    return lambda params: f(params, LAM, X, Y)


def hessian_times_vector(f):
    return jax.jvp(jax.grad(of_params(f)), (PARAMS,), (DIRECTION,))[1]


def reverse_over_reverse(f):
    def along(params):
        return optax.tree.vdot(jax.grad(of_params(f))(params), DIRECTION)

    return jax.grad(along)(PARAMS)


def mixed(f):
    return jax.jacfwd(lambda lam: jax.grad(f)(PARAMS, lam, X, Y))(LAM), jax.grad(
        lambda lam: jnp.sum(jax.grad(f)(PARAMS, lam, X, Y)["a"])
    )(LAM)


def adapter_alone(f):
    return jax.grad(lambda adapter: f(PARAMS | adapter, LAM, X, Y))({"a": PARAMS["a"], "b": PARAMS["b"]})


def steps(f):
    """Descent in a scan, recomputed and differentiated by its start, and one that stops by a condition."""

    def step(params, _):
        grads = jax.grad(of_params(f))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), f(params, LAM, X, Y)

    def last(params):
        return jnp.sum(jax.lax.scan(jax.checkpoint(step), params, None, 2)[1])

    stopped = jax.lax.while_loop(lambda p: f(p, LAM, X, Y) > 0.9, lambda p: step(p, None)[0], PARAMS)
    chosen = jax.grad(lambda p: jax.lax.cond(p["w"][0, 0] > 9, lambda p: 0.0, of_params(f), p))(PARAMS)
    return jax.grad(last)(PARAMS), stopped, chosen


def mapped(f):
    many = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), PARAMS)
    batches = jnp.stack([X, -X])
    of_each = jax.vmap(f, (0, None, 0, None))
    return (
        jax.vmap(jax.grad(f), (0, None, None, None))(many, LAM, X, Y),
        jax.grad(lambda many: jnp.sum(of_each(many, LAM, batches, Y)))(many),
        jax.vmap(f, (None, 0, None, None))(PARAMS, jnp.ones(2), X, Y),
    )


def implicit(f):
    """The derivative of a minimizer by another argument, as solvers have it."""

    def gradient(lam):
        return lambda lr: jax.grad(f)(PARAMS | {"b": lr * PARAMS["b"]}, lam, X, Y)["a"][0, 0] - lr

    def minimizer(lam):
        def solve(g, start):
            return jax.lax.fori_loop(0, 20, lambda _, lr: lr + 0.5 * g(lr), start)

        return jax.lax.custom_root(gradient(lam), 0.1, solve, lambda g, y: y / g(1.0))

    return jax.grad(minimizer)(LAM)


DERIVATIVES = {
    "value": lambda f: f(PARAMS, LAM, X, Y),
    "value_and_grad": lambda f: jax.value_and_grad(f, (0, 1))(PARAMS, LAM, X, Y),
    "jvp": lambda f: jax.jvp(of_params(f), (PARAMS,), (DIRECTION,)),
    "linearize": lambda f: jax.linearize(of_params(f), PARAMS)[1](DIRECTION),
    "forward over reverse": hessian_times_vector,
    "reverse over reverse": reverse_over_reverse,
    "mixed": mixed,
    "adapter alone": adapter_alone,
    "steps in loops": steps,
    "mapped": mapped,
    "implicit": implicit,
    "jit inside": lambda f: jax.grad(jax.jit(f))(PARAMS, LAM, X, Y),
}


@pytest.mark.parametrize("name", [*[*DERIVATIVES][:7], *thorough(*[*DERIVATIVES][7:])])
def test_derivative_is_that_of_the_whole_batch(name, x64_only):
    derivative = DERIVATIVES[name]
    expected = quick_jit(partial(derivative, loss))()
    assert_close(quick_jit(partial(derivative, of_batch))(), expected, rtol=1e-12)


def test_outside_of_jit_it_is_the_same(x64_only):
    assert_close(jax.value_and_grad(of_batch)(PARAMS, LAM, X, Y), jax.value_and_grad(loss)(PARAMS, LAM, X, Y), 1e-12)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_gradients_have_the_dtypes_of_the_parameters(dtype):
    params, lam, x, y = jax.tree.map(lambda x: jnp.asarray(x, dtype), (PARAMS, LAM, X, Y))
    d = jax.tree.map(jnp.ones_like, params)
    grads = quick_jit(jax.grad(of_batch))(params, lam, x, y)
    value, tangent = quick_jit(lambda p, d: jax.jvp(lambda p: of_batch(p, lam, x, y), (p,), (d,)))(params, d)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {value.dtype, tangent.dtype} == {np.dtype(dtype)}
    _, expected = quick_jit(shrewjax.value_and_grad(loss, K, batch_argnums=(2, 3)))(params, lam, x, y)
    assert_close(grads, expected, rtol=1e-6)


def test_complex_parameters_have_the_convention_of_jax(x64_only):
    params, direction = RNG.normal(size=(2, 3)) + 1j * RNG.normal(size=(2, 3))

    def of_complex(params, x):
        z = x.astype(params.dtype) @ params
        return jnp.mean(jnp.abs(z + 1j) ** 2 + jnp.sin(z).real)

    def both(f):
        of = partial(f, x=X)
        gradient = jax.grad(of)
        return gradient(params), jax.jvp(of, (params,), (direction,))

    part = shrewjax.micro_batched(of_complex, K, batch_argnums="x")
    found, expected = (jax.tree.leaves(both(f)) for f in (part, of_complex))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-12)
    assert_close(found[1:], expected[1:], rtol=1e-12)


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("sum_over", [None, "data"])
def test_on_a_mesh_every_derivative_is_that_of_the_whole_batch(axis_type, sum_over, x64_only):
    params, lam, x, y = PARAMS, LAM, X, Y
    part = shrewjax.micro_batched(loss, 2, batch_argnums=(2, 3), sum_over=sum_over)

    def both(f, params, lam, x, y):
        gradient = jax.grad(lambda p: f(p, lam, x, y))
        return f(params, lam, x, y), gradient(params), jax.jvp(gradient, (params,), (DIRECTION,))[1]

    expected = quick_jit(partial(both, loss))(params, lam, x, y)
    mesh = mesh_of(axis_type, data=2)
    batch = placed((x, y), mesh, P("data"))
    with jax.set_mesh(mesh):
        found = quick_jit(partial(both, part))(placed(params, mesh, P()), lam, *batch)
    assert_close(found, expected, rtol=1e-12)


@pytest.mark.parametrize("check_vma", [True, False], ids=["tracked", "untracked"])
def test_inside_shard_map_the_derivative_is_that_of_all_devices(check_vma, x64_only):
    params, lam, x, y = PARAMS, LAM, X, Y
    part = shrewjax.micro_batched(loss, 2, batch_argnums=(2, 3), sum_over="data")
    specs = {"in_specs": (P(), P(), P("data"), P("data")), "out_specs": P(), "check_vma": check_vma}
    step = jax.shard_map(jax.value_and_grad(part), mesh=mesh_of(data=2), **specs)
    assert_close(quick_jit(step)(params, lam, x, y), jax.value_and_grad(loss)(params, lam, x, y), rtol=1e-12)


# --- arrays that the loss closes over --------------------------------------------------------------------------------

C = RNG.normal(size=(3, 4))


def of(c, f, **options):
    """The loss of the parameters, plain or in micro-batches. It closes over an array that multiplies one of them."""

    def closing(params, x, y):
        return loss(params | {"w": params["w"] * c}, LAM, x, y)

    fun = shrewjax.micro_batched(closing, K, **options) if f is of_batch else closing
    return lambda params: fun(params, X, Y)


def both_ways(f):
    """Value, gradients by the array and by the parameters, and tangents of both."""
    value = lambda c, params: of(c, f)(params)  # noqa: E731
    mixed = jax.jvp(lambda c: jax.grad(value, (0, 1))(c, PARAMS), (C,), (np.cos(C),))
    return jax.value_and_grad(value, (0, 1))(C, PARAMS), mixed, jax.grad(jax.jit(value))(C, PARAMS)


def maml(f):
    """Steps of the parameters in a scan and in a checkpoint, and the derivative of the last loss by the array."""

    def last(c):
        def step(params, _):
            grads = jax.grad(of(c, f))(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), None

        return jax.checkpoint(of(c, f))(jax.lax.scan(step, PARAMS, None, 2)[0])

    return jax.grad(last)(C)


def of_turns(f):
    """The arrays belong to a turn of a scan: one of its slices, what it computes, a key, a number."""

    def total(c, params):
        def turn(sum_, own):
            key, i = own
            scale = jnp.sin(c) * jax.random.normal(key, c.shape, c.dtype) * (i + 1).astype(c.dtype)
            return sum_ + of(scale, f)(params), None

        return jax.lax.scan(turn, 0.0, (jax.random.split(jax.random.key(0), 2), jnp.arange(2)))[0]

    return jax.grad(total, (0, 1))(C, PARAMS)


def mapped_and_chosen(f):
    value = lambda c: of(c, f)(PARAMS)  # noqa: E731
    rows = jnp.stack([C, 2 * C])
    chosen = jax.grad(lambda c: jax.lax.cond(c[0, 0] > 9, lambda c: 0.0, value, c))(C)
    return jax.vmap(jax.grad(value))(rows), jax.grad(lambda rows: jnp.sum(jax.vmap(value)(rows)))(rows), chosen


def with_weight(f):
    """The weight closes over a mask of a turn, and `fun` over nothing traced."""

    def total(params):
        def turn(sum_, count):
            return sum_ + of(C, f, weight_fn=lambda params, x, y: count)(params), None

        return jax.lax.scan(turn, 0.0, jnp.arange(1, 3))[0]

    return jax.grad(total)(PARAMS)


def dropping(f):
    """The loss closes over a teacher that nothing differentiates, whose own gradient is not finite."""

    def value(teacher, params):
        def closing(params, x, y):
            return loss(params, LAM, x, y) + jnp.sum(jnp.sqrt(teacher)) * jnp.sum(params["a"])

        part = shrewjax.micro_batched(closing, K, nonfinite="drop_micro_batch") if f is of_batch else closing
        return part(params, X, Y)

    return jax.grad(value, 1)(jnp.zeros(2), PARAMS)


def of_nnx(f):
    """A model of Flax NNX, in a turn of a scan."""
    graph, params = nnx.split(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))

    def total(scales, params):
        def turn(sum_, scale):
            def closing(model, x, y):
                return jnp.mean((model(x * scale)[:, 0] - y) ** 2)

            fun = shrewjax.flax.micro_batched(closing, K) if f is of_batch else closing
            return sum_ + fun(nnx.merge(graph, params), XF, YF), None

        return jax.lax.scan(turn, jnp.float32(0), scales)[0]

    return jax.grad(total, (0, 1))(jnp.arange(1, 3, dtype="f"), params)


CLOSING = {x.__name__: x for x in (both_ways, maml, of_turns, mapped_and_chosen, with_weight, dropping, of_nnx)}


@pytest.mark.parametrize("name", [*[*CLOSING][:3], *thorough(*[*CLOSING][3:])])
def test_a_loss_may_close_over_what_is_traced_and_differentiated(name, x64_only):
    derivative = CLOSING[name]
    expected = quick_jit(partial(derivative, loss))()
    assert_close(quick_jit(partial(derivative, of_batch))(), expected, rtol=1e-5 if name == "of_nnx" else 1e-12)


@pytest.mark.thorough
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_a_loss_may_close_over_what_is_on_a_mesh(axis_type, x64_only):
    sum_over = "data" if axis_type == "Auto" else None

    def gradients(f, c, params, x, y):
        def closing(params, x, y):
            return loss(params | {"w": params["w"] * c}, LAM, x, y)

        fun = shrewjax.micro_batched(closing, 2, sum_over=sum_over) if f is of_batch else closing
        return fun(params, x, y)

    expected = quick_jit(jax.grad(partial(gradients, loss), (0, 1)))(C, PARAMS, X, Y)
    mesh = mesh_of(axis_type, data=2)
    with jax.set_mesh(mesh):
        given = *placed((C, PARAMS), mesh, P()), *placed((X, Y), mesh, P("data"))
        found = quick_jit(jax.grad(partial(gradients, of_batch), (0, 1)))(*given)
    assert_close(found, expected, rtol=1e-12)


@pytest.mark.parametrize("check_vma", [True, *thorough(False)])
def test_inside_shard_map_a_loss_may_close_over_what_nothing_differentiates(check_vma, x64_only):
    """An array of the device's function, and a key of a scan."""

    def total(f, params, c, x, y):
        def turn(sum_, key):
            def closing(params, x, y):
                scale = c * jax.random.normal(key, c.shape, c.dtype)
                return loss(params | {"w": params["w"] * scale}, LAM, x, y)

            fun = shrewjax.micro_batched(closing, 2, sum_over="data") if f is of_batch else closing
            return sum_ + fun(params, x, y), None

        return jax.lax.scan(turn, 0.0, jax.random.split(jax.random.key(0), 2))[0]

    expected = quick_jit(jax.grad(partial(total, loss)))(PARAMS, C, X, Y)
    specs = {"in_specs": (P(), P(), P("data"), P("data")), "out_specs": P(), "check_vma": check_vma}

    def step(argnums):
        return jax.shard_map(jax.grad(partial(total, of_batch), argnums), mesh=mesh_of(data=2), **specs)

    assert_close(quick_jit(step(0))(PARAMS, C, X, Y), expected, rtol=1e-12)
    if check_vma:
        with pytest.raises(
            ValueError, match="fun must not close over an array that is differentiated, inside shard_map"
        ):
            jax.eval_shape(step(1), PARAMS, C, X, Y)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_it_holds_one_micro_batch_and_the_gradients_that_are_wanted():
    width, rows = 64, 2048
    params = {"layers": jnp.zeros((5, width, width)), "adapter": jnp.ones(width)}

    def deep(params, x):
        h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params["layers"])[0]
        return jnp.mean((h @ params["adapter"]) ** 2)

    def adapter(f):
        return lambda adapter, params, x: f(params | {"adapter": adapter}, x)

    part, x = shrewjax.micro_batched(deep, 16), jnp.ones((rows, width))
    tree, micro_batch = params["layers"].nbytes, x.nbytes / 16
    assert held(part, params, x) < 3 * micro_batch
    assert held(jax.value_and_grad(part), params, x) < held(jax.value_and_grad(deep), params, x) / 8
    of_all = held(jax.grad(part), params, x)
    of_adapter = held(jax.grad(adapter(part)), params["adapter"], params, x)
    assert of_adapter < of_all - 0.9 * tree or of_adapter < 8 * micro_batch


def test_a_gradient_is_the_loop_of_value_and_grad_with_nothing_before_it():
    """Where JAX linearizes a loop, it computes before the loop what each turn has in common, and holds it."""

    def deep(params, x):
        half = params.astype(jnp.bfloat16)  # in each turn, and not held beside the parameters
        h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x.astype(half.dtype), half)[0]
        return jnp.mean(h.astype(params.dtype) ** 2)

    def loop(f):
        program = jax.make_jaxpr(f)(np.ones((3, 4, 4), "f"), np.ones((B, 4), "f"))
        rule = next((e.params["call_jaxpr"] for e in program.eqns if "call_jaxpr" in e.params), program)
        names = [e.primitive.name for e in rule.eqns]
        at = names.index("scan")
        return names[:at], str(rule.eqns[at].params["jaxpr"].in_avals)

    part = jax.value_and_grad(shrewjax.micro_batched(deep, K))
    assert loop(part) == loop(shrewjax.value_and_grad(deep, K))


def test_the_value_runs_no_backward_pass_except_to_drop_micro_batches():
    @jax.custom_vjp
    def noisy(x):
        return x

    ran = []
    noisy.defvjp(lambda x: (x, None), lambda _, g: ran.append(1) or (g,))
    for nonfinite, expected in (("propagate", []), ("drop_micro_batch", [1])):
        ran.clear()
        part = shrewjax.micro_batched(lambda p, x: noisy(jnp.mean(x @ p)), K, nonfinite=nonfinite)
        jax.eval_shape(part, np.ones(3, "f"), X.astype("f")) if nonfinite == "propagate" else jax.eval_shape(
            jax.jit(part), np.ones(3, "f"), X.astype("f")
        )
        assert ran == expected


# --- arguments -------------------------------------------------------------------------------------------------------

W = RNG.normal(size=3).astype("f")
XF, YF = X.astype("f"), Y.astype("f")
KEY = jax.random.key(0)


def scaled(w, x, y, scale=1.0):
    return scale * jnp.mean((x @ w - y) ** 2)


def noisy(w, key, **batch):
    return scaled(w, **batch) + 0 * jax.random.normal(key)


def of_changed(w, batch):
    return scaled(w, batch.pop("x"), batch.pop("y"))


def of_classes(w, scales, x, y):
    each = scales[(y > 0).astype(int)]
    return jnp.sum(each * (x @ w - y) ** 2) / jnp.sum(each)


class Module(eqx.Module):
    linear: eqx.nn.Linear
    steps: jax.Array
    activation: object

    def __call__(self, x):
        return self.activation(jax.vmap(self.linear)(x)[:, 0]) * self.steps.astype(x.dtype)


def of_module(module, args):
    x, y, scale = args
    return scale * jnp.mean((module(x) - y) ** 2)


def of_module_in_parts(module, args):
    """A number beside examples in one tree comes by an argument of its own."""
    return shrewjax.micro_batched(
        lambda module, x, y, scale: of_module(module, (x, y, scale)), K, batch_argnums=(1, 2)
    )(module, *args)


CALLS = {
    "a number by keyword": (scaled, {}, (W, XF, YF), {"scale": 2.0}),
    "an array by keyword": (scaled, {}, (W, XF, YF), {"scale": jnp.float32(2)}),
    "the batch by keyword": (scaled, {}, (W,), {"x": XF, "y": YF}),
    "a scale by position, and names": (scaled, {"batch_argnums": ("x", "y")}, (W, XF, YF, 2.0), {}),
    "positions, by keyword": (scaled, {"batch_argnums": (1, 2)}, (W,), {"y": YF, "x": XF, "scale": 2.0}),
    "params, key, **batch": (noisy, {"rng_argnums": "key"}, (W, KEY), {"x": XF, "y": YF}),
    "a dict that fun changes": (of_changed, {}, (W, {"x": XF, "y": YF}), {}),
    "a weight by what is not differentiated": (
        of_classes,
        {
            "batch_argnums": ("x", "y"),
            "weight_fn": lambda w, scales, x, y: jnp.sum(scales[(y > 0).astype(int)]),
            "nonfinite": "drop_micro_batch",
        },
        (W, jnp.array([0.5, 2.0]), XF, YF),
        {},
    ),
    "a partial": (partial(scaled, scale=2.0), {}, (W, XF, YF), {}),
    "a key by keyword": (
        noisy,
        {"rng_argnums": "key", "batch_argnums": ("x", "y")},
        (W,),
        {"key": KEY, "x": XF, "y": YF},
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_come_as_fun_takes_them(name):
    fun, options, args, kwargs = CALLS[name]
    part = shrewjax.micro_batched(fun, K, **options)
    found = quick_jit(lambda *args: jax.value_and_grad(part)(*args, **kwargs))(*args)
    assert_close(found, jax.value_and_grad(fun)(*args, **kwargs), rtol=1e-5)


def test_it_has_the_signature_the_name_and_the_docstring_of_fun():
    assert inspect.signature(of_batch) == inspect.signature(loss)
    assert (of_batch.__name__, of_batch.__doc__) == (loss.__name__, loss.__doc__)


def test_a_whole_equinox_module_with_integers_and_functions_is_an_argument():
    module = Module(eqx.nn.Linear(3, 1, key=KEY), jnp.int32(2), jax.nn.tanh)
    args = (XF, YF, 2.0)
    found = eqx.filter_jit(eqx.filter_value_and_grad(of_module_in_parts))(module, args)
    assert_close(found, eqx.filter_value_and_grad(of_module)(module, args), rtol=1e-5)


@pytest.mark.parametrize("skip_empty", [False, *thorough(True)])
def test_keys_weights_and_aux_are_those_of_value_and_grad(skip_empty):
    counts = np.arange(B) % 3 > 0
    counts[K - 1 :: K] = False

    def masked(w, key, x, y, counts):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        errors = jnp.where(counts, (jnp.where(keep, x, 0) @ w - y) ** 2, 0)
        error = jnp.sum(errors) / jnp.maximum(jnp.sum(counts), 1).astype(x.dtype)
        return error, {"error": error, "worst": jnp.max(y), "count": jnp.sum(counts)}

    options = {
        "has_aux": True,
        "rng_argnums": 1,
        "weight_fn": lambda w, key, x, y, counts: jnp.sum(counts),
        "aux_reduction": {"error": "mean", "worst": "max", "count": "sum"},
        "nonfinite": "drop_micro_batch",
    }
    args = (W, KEY, XF, np.where(np.arange(B) == 1, np.nan, YF).astype("f"), counts)
    part = shrewjax.micro_batched(masked, K, skip_empty=skip_empty, **options)
    expected = quick_jit(shrewjax.value_and_grad(masked, K, **options))(*args)
    found = quick_jit(jax.value_and_grad(part, has_aux=True))(*args)
    assert_close(found, expected, rtol=1e-6)
    assert_close(quick_jit(part)(*args), expected[0], rtol=1e-6)
    assert np.isfinite(found[0][0])
    assert found[0][1]["count"] < counts.sum()


def test_skip_empty_has_all_derivatives_except_reverse_over_reverse_under_jit(x64_only):
    """Without the rows of micro-batch 1."""
    kept = np.arange(B) % K != 1
    options = {"batch_argnums": (2, 3), "weight_fn": lambda params, lam, x, y: jnp.sum(y != 0)}
    part = shrewjax.micro_batched(loss, K, skip_empty=True, **options)
    of_kept = lambda params: loss(params, LAM, X[kept], Y[kept])  # noqa: E731
    ours = lambda params: part(params, LAM, X, np.where(kept, Y, 0))  # noqa: E731

    def along(f):
        return lambda params: optax.tree.vdot(jax.grad(f)(params), DIRECTION)

    def derivatives(f):
        return jax.value_and_grad(f)(PARAMS), jax.jvp(jax.grad(f), (PARAMS,), (DIRECTION,))[1]

    assert_close(quick_jit(lambda: derivatives(ours))(), quick_jit(lambda: derivatives(of_kept))(), rtol=1e-12)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work for"):
        jax.jit(jax.grad(along(ours))).lower(PARAMS)


def test_a_micro_batch_whose_gradient_alone_is_not_finite_is_dropped_from_the_value_too():
    x = np.where(np.arange(B)[:, None] == 1, 0, XF)  # the root has no derivative at 0
    part = shrewjax.micro_batched(lambda w, x: jnp.mean(jnp.sqrt(jnp.abs(x @ w))), K, nonfinite="drop_micro_batch")
    expected = np.mean(np.sqrt(np.abs(x @ W))[np.arange(B) % K != 1])
    found = jax.value_and_grad(part)(W, x)[0], part(jnp.asarray(W), x), part(W, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# --- errors, and what is not an error but said -----------------------------------------------------------------------


def smooth(params, lam, x, y):
    return jnp.sum(jnp.exp(x @ params["w"]))


REFUSED = {
    "examples": (
        lambda: jax.grad(of_batch, 2)(*F32),
        "argument 2 is differentiated, but micro_batched has no derivative by examples, keys or a carry",
    ),
    "examples by keyword": (
        lambda: jax.grad(lambda x: shrewjax.micro_batched(scaled, K)(W, x=x, y=YF))(XF),
        "keyword argument x is differentiated",
    ),
    "a smooth weight that closes over an array": (
        lambda: jax.grad(lambda lam: shrewjax.micro_batched(scaled, K, weight_fn=lambda w, x, y: lam)(W, XF, YF))(2.0),
        "weight_fn must return a constant",
    ),
    "a smooth weight": (
        lambda: jax.grad(shrewjax.micro_batched(loss, K, batch_argnums=(2, 3), weight_fn=smooth))(*F32),
        "weight_fn must return a constant",
    ),
    "a smooth weight of value_and_grad": (
        lambda: shrewjax.value_and_grad(loss, K, batch_argnums=(2, 3), weight_fn=smooth)(*F32),
        "weight_fn must return a constant",
    ),
    "no scalar": (
        lambda: shrewjax.micro_batched(lambda p, x: x @ p, K)(W, XF),
        r"^fun must return a scalar, got shape \(2,\)\. Return jnp.mean of it, or jnp.sum with reduction='sum'",
    ),
    "sum_over=()": (lambda: shrewjax.micro_batched(loss, K, sum_over=()), r"sum_over must be a mapped axis or None"),
    "a number among the examples": (
        lambda: shrewjax.micro_batched(of_module, K)(W, (XF, YF, 2.0)),
        r"argument 1\[2\] must have a first axis of 8 examples, .* got shape \(\)",
    ),
    "a key without a role": (lambda: shrewjax.micro_batched(noisy, K)(W, KEY, x=XF, y=YF), "rng_argnums=1"),
    "a wrong option": (lambda: shrewjax.micro_batched(loss, 0), "micro_batches must be a Python int >= 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_use_is_an_error_that_names_it(name):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert len(str(caught.value)) <= 700


@pytest.mark.parametrize(
    "weight",
    [
        lambda params, lam, x, y: jnp.sum(x @ params["w"] > 0),
        lambda params, lam, x, y: jax.lax.stop_gradient(smooth(params, lam, x, y)),
        lambda params, lam, x, y: jax.jit(lambda x, w: jnp.maximum(jnp.sum(jnp.where(x @ w > 0, 1.0, 0.0)), 1))(
            x, params["w"]
        ),
    ],
    ids=["mask", "stop_gradient", "mask in jit"],
)
def test_a_weight_that_only_counts_has_a_derivative_of_zero(weight):
    options = {"batch_argnums": (2, 3), "weight_fn": weight}
    found = quick_jit(jax.value_and_grad(shrewjax.micro_batched(loss, K, **options)))(*F32)

    def by_hand(params, lam, x, y):  # the average of micro-batches' losses, by weights that are numbers
        parts = [(x[i::K], y[i::K]) for i in range(K)]
        weights = [jax.lax.stop_gradient(weight(params, lam, *part)) for part in parts]
        weights = [w.astype("float32") for w in weights]
        return sum(w * loss(params, lam, *part) for w, part in zip(weights, parts, strict=True)) / sum(weights)

    assert_close(found, quick_jit(jax.value_and_grad(by_hand))(*F32), rtol=1e-4, atol=1e-6)


def test_with_a_sum_a_smooth_weight_is_no_error_because_nothing_is_divided_by_it():
    options = {"batch_argnums": (2, 3), "reduction": "sum"}
    found = jax.grad(shrewjax.micro_batched(loss, K, weight_fn=smooth, **options))(*F32)
    assert_close(found, jax.grad(shrewjax.micro_batched(loss, K, **options))(*F32), rtol=1e-6)


def test_a_derivative_of_the_aux_is_nan_and_jax_drops_it_where_nothing_uses_it():
    part = shrewjax.micro_batched(
        with_aux, K, has_aux=True, batch_argnums=(2, 3), aux_reduction={"loss": "mean", "count": "sum"}
    )

    def of_aux(*args):
        value, aux = part(*args)
        return value + aux["loss"]

    def in_company(*args):  # each of these has the aux among its results
        of_scan = jax.lax.scan(lambda c, _: (c + part(*args)[0], part(*args)[1]), 0.0, None, 1)[0]
        of_cond = jax.lax.cond(args[1] > 0, part, lambda *args: (jnp.zeros(()), part(*args)[1]), *args)[0]
        return of_scan + of_cond + jax.checkpoint(part)(*args)[0] + jax.jit(part)(*args)[0]

    (value, aux), grads = quick_jit(jax.value_and_grad(part, has_aux=True))(*F32)
    expected = quick_jit(jax.value_and_grad(loss))(*F32)
    assert_close((value, grads), expected, rtol=1e-4, atol=1e-6)
    assert_close(aux, {"loss": expected[0], "count": jnp.int32(B)}, rtol=1e-4, atol=1e-6)
    assert_close(
        quick_jit(jax.grad(in_company))(*F32), jax.tree.map(lambda g: 4 * g, expected[1]), rtol=1e-4, atol=1e-6
    )
    assert all(np.isnan(g).all() for g in jax.tree.leaves(quick_jit(jax.grad(of_aux))(*F32)))


def half(params, x, scale=1.0):
    """Its float16 gradients are about 1e-9, which is 0 in that dtype."""
    return 1e-5 * jnp.mean((1e-4 * (x @ params)).astype(jnp.float32)) * scale


def test_a_loss_scale_helps_inside_fun_and_not_around_it():
    params, x, scale = jnp.ones(3, jnp.float16), jnp.ones((B, 3), jnp.float16), 2.0**16
    part = shrewjax.micro_batched(half, K, batch_argnums=1)
    around = jax.grad(lambda p: scale * part(p, x))(params)
    inside = jax.grad(lambda p: part(p, x, jnp.float32(scale)))(params)
    assert not np.any(around)
    assert_close(inside, jax.grad(half)(params, x, scale), rtol=1e-2)
    assert np.all(inside > 0)


def test_flaxs_dynamic_scale_helps_if_fun_has_the_scale_and_the_result_is_divided_by_it():
    params, x, dynamic = (
        jnp.ones(3, jnp.float16),
        jnp.ones((B, 3), jnp.float16),
        DynamicScale(scale=jnp.float32(2.0**16)),
    )
    part = shrewjax.micro_batched(half, K, batch_argnums=1)
    *_, lost = dynamic.value_and_grad(lambda p: part(p, x))(params)
    *_, expected = dynamic.value_and_grad(lambda p: half(p, x))(params)
    _, is_finite, value, kept = dynamic.value_and_grad(lambda p: part(p, x, dynamic.scale) / dynamic.scale)(params)
    assert not np.any(lost)
    assert np.all(kept > 0) & is_finite
    assert_close((value, kept), (half(params, x), expected), rtol=1e-2)


def test_an_optimizer_that_takes_the_loss_goes_where_it_goes_with_the_whole_batch(x64_only, as_users_have_it):
    tx = optax.lbfgs()
    params = jax.tree.map(jnp.asarray, PARAMS)

    def step(f, params, state):
        of = of_params(f)
        value, grads = optax.value_and_grad_from_state(of)(params, state=state)
        updates, state = tx.update(grads, state, params, value=value, grad=grads, value_fn=of)
        return optax.apply_updates(params, updates), state

    def descend(f):
        return jax.lax.scan(lambda c, _: (step(f, *c), None), (params, tx.init(params)), None, 3)[0][0]

    assert_close(quick_jit(partial(descend, of_batch))(), quick_jit(partial(descend, loss))(), rtol=1e-9)
