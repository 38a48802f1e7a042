"""The same function of the whole batch, with derivatives in micro-batches. The oracle is JAX, in float64."""

import gc
import inspect
from collections import UserDict
from functools import partial

import equinox as eqx
import jax
import jax.export
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
    exact = jax.grad(loss)(*jax.tree.map(lambda x: np.asarray(x, "f"), (params, lam, x, y)))
    assert_close(jax.tree.map(lambda g: g.astype("f"), grads), exact, rtol=16 * float(jnp.finfo(dtype).eps), atol=0.02)


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


# --- arrays that the loss closes over --------------------------------------------------------------------------------

C = RNG.normal(size=(3, 4))


def of(c, f):
    """The loss of the parameters, plain or in micro-batches. It closes over an array that multiplies one of them."""

    def closing(params, x, y):
        return loss(params | {"w": params["w"] * c}, LAM, x, y)

    fun = shrewjax.micro_batched(closing, K) if f is of_batch else closing
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


CLOSING = {x.__name__: x for x in (both_ways, maml, of_turns, mapped_and_chosen, of_nnx)}


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


def test_the_loop_of_value_and_grad_has_nothing_of_its_turns_before_it():
    """Where JAX linearizes a loop, it computes before the loop what each turn has in common, and holds it."""

    def deep(params, x):
        half = params.astype(jnp.bfloat16)  # in each turn, and not held beside the parameters
        h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x.astype(half.dtype), half)[0]
        return jnp.mean(h.astype(params.dtype) ** 2)

    program = jax.make_jaxpr(shrewjax.value_and_grad(deep, K))(np.ones((3, 4, 4), "f"), np.ones((B, 4), "f"))
    rule = next((e.params["call_jaxpr"] for e in program.eqns if "call_jaxpr" in e.params), program)
    before = [e.outvars[0].aval for e in rule.eqns[: [e.primitive.name for e in rule.eqns].index("scan")]]
    assert not {x.dtype for x in before} & {jnp.dtype(jnp.bfloat16)}


def test_the_value_runs_no_backward_pass():
    @jax.custom_vjp
    def noisy(x):
        return x

    def backward(_, g):
        jax.debug.callback(lambda: ran.append(1))
        return (g,)

    ran = []
    noisy.defvjp(lambda x: (x, None), backward)
    part = jax.jit(shrewjax.micro_batched(lambda p, x: jnp.mean(noisy(x @ p)), K))
    jax.block_until_ready(part(np.ones(3, "f"), X.astype("f")))
    jax.effects_barrier()
    assert not ran


# --- results of any kind ---------------------------------------------------------------------------------------------


def features(params, lam, x, y):
    z = jnp.tanh(x @ params["w"]) * lam
    return {"z": z, "count": jnp.sum(z > 0), "sign": y > 0, "none": None, "std": jnp.std(z)}


def test_any_results_have_the_values_and_the_reverse_mode_of_jax(x64_only):
    def pulled(f):
        made, pull = jax.vjp(lambda params, x: f(params, LAM, x, Y), PARAMS, X)
        return made, pull(jax.tree.map(ones, made))

    def ones(x):
        is_smooth = jnp.issubdtype(x.dtype, jnp.inexact)
        return jnp.ones_like(x) if is_smooth else np.zeros(x.shape, jax.dtypes.float0)

    part = shrewjax.micro_batched(features, 3, batch_argnums=(2, 3))  # 3 does not divide 8
    found, expected = quick_jit(lambda: pulled(part))(), quick_jit(lambda: pulled(features))()
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(expected)]
    assert_close(found, expected, rtol=1e-12)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(lambda p: part(p, LAM, X, Y)["std"], (PARAMS,), (PARAMS,))


def test_gradients_by_examples_and_an_aux_of_any_kind_are_those_of_jax(x64_only):
    def with_features(*args):
        return loss(*args), features(*args) | {"name": 3}

    def both(value_and_grad):
        return quick_jit(value_and_grad(with_features, argnums=(0, 2), has_aux=True))(PARAMS, LAM, X, Y)

    found = both(partial(shrewjax.value_and_grad, micro_batches=3, batch_argnums=(2, 3)))
    assert_close(found, both(jax.value_and_grad), rtol=1e-12)


def test_bfloat16_parameters_have_sums_in_float32_and_second_derivatives_too():
    size = 256
    x = RNG.normal(size=(size, 3)).astype("f")
    w = jnp.asarray(RNG.normal(size=3), jnp.bfloat16)

    def squares(w, x):
        return jnp.mean((x @ w.astype(x.dtype)) ** 2)

    def second(f):
        return lambda w: jax.grad(lambda w: jnp.sum(jax.grad(f)(w, x).astype("f")))(w)

    part = shrewjax.micro_batched(squares, size, accumulator_dtype=jnp.float32)
    for found, exact in (
        (jax.jit(jax.grad(part))(w, x), jax.grad(squares)(w.astype("f"), x)),
        (jax.jit(second(part))(w), second(squares)(w.astype("f"))),
    ):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(found.astype("f"), exact, rtol=2**-7, atol=2**-8)


def test_calls_outside_of_jit_keep_no_arrays_alive():
    step = jax.value_and_grad(of_batch)
    params, *batch = jax.tree.map(jnp.asarray, F32)
    for turn in range(3):
        step(params, *batch)
        gc.collect()
        if turn == 0:
            before = len(jax.live_arrays())
    assert len(jax.live_arrays()) <= before


def test_a_program_for_any_number_of_examples_can_be_exported():
    (n,) = jax.export.symbolic_shape(f"{K}*n")
    shapes = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((3,), (n, 3), (n,)))
    exported = jax.export.export(jax.jit(shrewjax.value_and_grad(scaled, K)))(*shapes)
    assert_close(exported.call(W, XF, YF), jax.value_and_grad(scaled)(W, XF, YF), rtol=1e-5)


def test_of_functions_inside_of_each_other_the_outermost_is_divided(x64_only):
    inner = shrewjax.micro_batched(of_batch, 2, batch_argnums=(2, 3))
    assert_close(jax.value_and_grad(inner)(PARAMS, LAM, X, Y), jax.value_and_grad(loss)(PARAMS, LAM, X, Y), rtol=1e-12)


def test_without_jit_the_function_sees_numbers():
    seen = []
    with jax.disable_jit():
        shrewjax.micro_batched(lambda w, x: seen.append(float(x[0, 0])) or jnp.sum(x @ w), K)(W, XF)
    assert seen == [float(XF[0, 0])]


# --- arguments -------------------------------------------------------------------------------------------------------

W = RNG.normal(size=3).astype("f")
XF, YF = X.astype("f"), Y.astype("f")
KEY = jax.random.key(0)


def scaled(w, x, y, scale=1.0):
    return scale * jnp.mean((x @ w - y) ** 2)


def noisy(w, key, **batch):
    return scaled(w, **batch) * jax.random.normal(key)


def named(w, x, y, scale, name):
    return getattr(jnp, name)(scale * (x @ w - y) ** 2)


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


CALLS = {
    "a number by keyword": (scaled, {}, (W, XF, YF), {"scale": 2.0}),
    "an array by keyword": (scaled, {}, (W, XF, YF), {"scale": jnp.float32(2)}),
    "the batch by keyword": (scaled, {}, (W,), {"x": XF, "y": YF}),
    "a scale by position, and names": (scaled, {"batch_argnums": ("x", "y")}, (W, XF, YF, 2.0), {}),
    "positions, by keyword": (scaled, {"batch_argnums": (1, 2)}, (W,), {"y": YF, "x": XF, "scale": 2.0}),
    "params, key, **batch": (noisy, {"batch_argnums": ("x", "y")}, (W, KEY), {"x": XF, "y": YF}),
    "a key among the examples": (noisy, {}, (W, KEY), {"x": XF, "y": YF}),
    "class weights among the examples": (of_classes, {}, (W, jnp.array([0.5, 2.0]), XF, YF), {}),
    "a dict that fun changes": (of_changed, {}, (W, {"x": XF, "y": YF}), {}),
    "a partial": (partial(scaled, scale=2.0), {}, (W, XF, YF), {}),
    "a key by keyword": (noisy, {"batch_argnums": ("x", "y")}, (W,), {"key": KEY, "x": XF, "y": YF}),
    "a raw key": (noisy, {}, (W, jax.random.PRNGKey(0)), {"x": XF, "y": YF}),
    "numbers and a name among the examples": (named, {}, (W, XF, YF, 2, "mean"), {}),
    "fewer examples than micro-batches": (scaled, {}, (W, XF[:3], YF[:3]), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_come_as_fun_takes_them(name):
    fun, options, args, kwargs = CALLS[name]
    part = shrewjax.micro_batched(fun, K, **options)
    found = quick_jit(lambda w: jax.value_and_grad(part)(w, *args[1:], **kwargs))(args[0])
    assert_close(found, jax.value_and_grad(fun)(*args, **kwargs), rtol=1e-5)


def test_it_has_the_signature_the_name_and_the_docstring_of_fun():
    assert inspect.signature(of_batch) == inspect.signature(loss)
    assert (of_batch.__name__, of_batch.__doc__) == (loss.__name__, loss.__doc__)


def test_a_whole_equinox_module_with_integers_and_functions_is_an_argument():
    module = Module(eqx.nn.Linear(3, 1, key=KEY), jnp.int32(2), jax.nn.tanh)
    args = (XF, YF, 2.0)
    found = eqx.filter_jit(eqx.filter_value_and_grad(shrewjax.micro_batched(of_module, K)))(module, args)
    assert_close(found, eqx.filter_value_and_grad(of_module)(module, args), rtol=1e-5)


# --- errors, and what is not an error but said -----------------------------------------------------------------------


REFUSED = {
    "no examples": (
        lambda: shrewjax.micro_batched(scaled, K)(W, 2.0, 3.0),
        "^argument 1 or argument 2 must hold arrays of examples, got none",
    ),
    "a list of numbers": (
        lambda: shrewjax.micro_batched(lambda w, x: jnp.sum(w * jnp.asarray(x)), K)(2.0, [1.0, 2.0]),
        "Pass jnp.asarray of a list\\.",
    ),
    "no batch": (lambda: shrewjax.micro_batched(scaled, K)(W), "no argument holds examples"),
    "an unknown class": (
        lambda: shrewjax.micro_batched(scaled, K)(W, UserDict(x=XF, y=YF)),
        r"^argument 1 must be a tree of arrays, got UserDict\. Pass a dict\. Or register",
    ),
    "a wrong option": (lambda: shrewjax.micro_batched(loss, 0), "micro_batches must be a Python int >= 1"),
    "an option of accumulated_value_and_grad": (
        lambda: shrewjax.value_and_grad(loss, K, weight_fn=len),
        r"weight_fn.* accumulated_value_and_grad",
    ),
    "a ref": (
        lambda: shrewjax.micro_batched(with_ref, K)(W, XF),
        "^fun must only compute, and print in any order, got InternalMutableArrayEffect",
    ),
    "an ordered print": (
        lambda: shrewjax.micro_batched(with_print, K)(W, XF),
        "got OrderedDebugEffect.* or pass ordered=False to jax.debug",
    ),
}


def with_ref(w, x):
    ref = jax.new_ref(w)
    ref[...] += 1
    return jnp.sum(x @ ref[...])


def with_print(w, x):
    jax.debug.print("{}", x @ w, ordered=True)
    return jnp.sum(x @ w)


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_use_is_an_error_that_names_it(name):
    call, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        call()
    assert len(str(caught.value)) <= 700


def test_a_derivative_of_the_aux_is_nan_and_jax_drops_it_where_nothing_uses_it():
    part = shrewjax.micro_batched(with_aux, K, has_aux=True, batch_argnums=(2, 3))

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


@pytest.mark.parametrize("argnums", [(0, 1), (2, 0), (0, 1, 2)])
def test_examples_in_argnums_are_divided_and_have_gradients_of_rows(argnums):
    w, x, y = (jax.random.normal(jax.random.key(i), (4 if i == 0 else 9, 4)) for i in range(3))

    def contrastive(w, x, y):
        similar = (jnp.tanh(x @ w) @ w) @ (y @ w).T
        return jnp.mean(jax.nn.logsumexp(similar, 1) - jnp.diag(similar))

    roles = {"batch_argnums": (1, 2)} if len(argnums) == 3 else {}
    got = jax.jit(shrewjax.value_and_grad(contrastive, 4, argnums=argnums, **roles))(w, x, y)
    assert_close(got, jax.jit(jax.value_and_grad(contrastive, argnums))(w, x, y), rtol=1e-4, atol=1e-5)
