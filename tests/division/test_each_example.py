"""`of_each_example`: a function that nothing looks into, taken at its word. The oracle is the function itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compared import RNG, B, D, W, X, plan_of
from helpers import assert_close
from jax import lax
from jax.experimental import pallas
from speed import quick_jit

import shrewjax

pytestmark = pytest.mark.usefixtures("as_users_have_it", "x64_only")

K = 3  # it does not divide B


def kernel(w, z):
    """Row by row in Pallas, in its interpreter; with a derivative by hand, as kernels have it."""

    def of_block(w_ref, z_ref, out_ref):
        out_ref[...] = jnp.sin(z_ref[...]) * w_ref[...]

    @jax.custom_vjp
    def run(w, z):
        whole, row = pallas.BlockSpec(w.shape, lambda i: (0,)), pallas.BlockSpec((1, D), lambda i: (i, 0))
        shape = jax.ShapeDtypeStruct(z.shape, z.dtype)
        call = pallas.pallas_call(
            of_block, grid=z.shape[:1], in_specs=[whole, row], out_specs=row, out_shape=shape, interpret=True
        )
        return call(w, z)

    def backward(saved, g):
        w, z = saved
        return jnp.sum(g * jnp.sin(z), 0), g * jnp.cos(z) * w

    run.defvjp(lambda w, z: (run(w, z), (w, z)), backward)
    return run(w, z)


def loss(w, x, *, of=kernel):
    return jnp.mean(jnp.sum(of(w["b"][0], x @ w["a"]) ** 2, -1) ** 2)


marked = functools.partial(loss, of=shrewjax.of_each_example(kernel))


def test_a_kernel_is_in_the_loop_if_it_is_said_to_be_of_each_example():
    found = quick_jit(shrewjax.value_and_grad(marked, K))(W, X)
    assert_close(found, quick_jit(jax.value_and_grad(loss))(W, X), rtol=1e-10)
    plan = plan_of(marked, W, X)
    assert [x for x in plan.loop if "each_example" in x.step.equation.primitive.name]
    assert not any("each_example" in x.equation.primitive.name for x in plan.after)


def test_a_kernel_that_nothing_is_said_of_is_an_error_that_says_what_to_say():
    wide = functools.partial(loss, of=lambda w, z: kernel(w, z) @ np.ones((D, 1)) * w)
    with pytest.raises(ValueError, match=r"but pallas_call may mix examples at .*wrap .* in of_each_example"):
        quick_jit(shrewjax.value_and_grad(lambda w, x: wide(w, x) + jnp.mean(kernel(w["b"][0], x) @ w["a"]), K))(W, X)


def test_it_is_traced_again_with_the_examples_of_a_micro_batch():
    shapes = []

    @shrewjax.of_each_example
    def seeing(w, x):
        shapes.append((w.shape, x.shape))
        return x @ w

    quick_jit(shrewjax.micro_batched(lambda w, x: jnp.mean(seeing(w["a"], x) ** 2), 4))(W, X)
    assert {*shapes} == {((D, D), (B, D)), ((D, D), (B // 4, D))}


def tree(w, batch, kind, *, scale):
    """Trees of arrays, a name and a number, a whole number for each row, and a result that does not depend on w."""
    z = getattr(jnp, kind)(batch["x"] @ w["a"]) * scale
    return {"z": z, "first": batch["n"] + 1, "of": (z**2 * w["b"][0], jnp.sum(batch["x"], 1))}


N = RNG.integers(0, 5, B)


@pytest.mark.parametrize("is_divided", [True, False], ids=["micro_batched", "plain"])
def test_arguments_results_and_derivatives_of_any_order_are_those_of_the_function(is_divided):
    def total(fun, w, x, n):
        made = fun(w, {"x": x, "n": n}, "tanh", scale=0.7)
        return jnp.mean(made["z"] ** 2) + jnp.mean(made["of"][0].sum(-1) * made["of"][1] * made["first"])

    def derivatives(fun):
        of = functools.partial(total, fun)
        of = functools.partial(shrewjax.micro_batched(of, K, batch_argnums=(1, "n")) if is_divided else of, n=N)
        twice = jax.jvp(jax.grad(of), (W, X), (W, X))[1]
        return jax.value_and_grad(of, (0, 1))(W, X), twice

    found = quick_jit(lambda: derivatives(shrewjax.of_each_example(tree)))()
    assert_close(found, quick_jit(lambda: derivatives(tree))(), rtol=1e-10)
    assert shrewjax.of_each_example(tree).__doc__ == tree.__doc__


def test_it_may_be_mapped_and_stand_in_loops_and_checkpoints():
    def scanned(of, w, x):
        z = lax.scan(jax.checkpoint(lambda z, v: (of(v[0], z), None)), x, jnp.stack([w["a"], w["b"]]))[0]
        twice = jax.vmap(of, (None, 0))(w["b"][0], jnp.stack([z, 2 * z]))
        return jnp.mean(twice[0] ** 2 + 3 * twice[1])

    def rows(w, z):
        return jnp.sin(z) * w

    found = quick_jit(shrewjax.value_and_grad(functools.partial(scanned, shrewjax.of_each_example(rows)), K))(W, X)
    assert_close(found, quick_jit(jax.value_and_grad(functools.partial(scanned, rows)))(W, X), rtol=1e-10)


@pytest.mark.parametrize("fun", [lambda z: jnp.sum(z), lambda z: z.T], ids=["a sum", "examples last"])
def test_a_result_without_a_row_for_each_example_is_an_error_that_names_its_shape(fun):
    wrong = shrewjax.of_each_example(fun)
    message = rf"^of_each_example must return a row for each of {B} examples, got shapes \[\("
    with pytest.raises(ValueError, match=message):
        shrewjax.micro_batched(lambda w, x: jnp.sum(wrong(x @ w["a"])), 4)(W, X)


def test_rows_of_numbers_that_only_the_shape_says_are_those_of_the_examples():
    """Such as positions, or where documents begin. The kernel would take the first rows of the whole batch's."""

    def weighted(w, x):
        positions = jnp.arange(B, dtype=float)[:, None] * jnp.ones((B, D))
        return jnp.mean(shrewjax.of_each_example(weigh)(positions, x @ w["a"]))

    def weigh(weights, z):
        return z * weights[: len(z)]

    assert_close(quick_jit(shrewjax.micro_batched(weighted, K))(W, X), quick_jit(weighted)(W, X), rtol=1e-10)


def test_rows_of_which_nothing_says_whose_they_are_are_an_error_and_no_wrong_number():
    weights, weigh = RNG.normal(size=(B, 1)), shrewjax.of_each_example(lambda u, z: u[: len(z)] * z)

    def closing(w, x):
        return jnp.mean(weigh(weights, x @ w["a"]))

    message = rf"cannot tell whether the array of shape \({B}, 1\) holds examples\. If so, pass it in batch_argnums="
    with pytest.raises(ValueError, match=message):
        shrewjax.micro_batched(closing, K)(W, X)
    of_rows = lambda w, x, u: jnp.mean(weigh(u, x @ w["a"]))  # noqa: E731
    assert_close(shrewjax.micro_batched(of_rows, K)(W, X, weights), closing(W, X), rtol=1e-10)
    of_table = lambda w, x: jnp.mean(shrewjax.of_each_example(lambda u, z: z * u[0].sum())(weights[None], x @ w["a"]))  # noqa: E731
    assert_close(shrewjax.micro_batched(of_table, K)(W, X), of_table(W, X), rtol=1e-10)
