"""Which results of a function are its arguments: through each operation that hands arrays on, and only if they stay."""

import jax
import jax.numpy as jnp
import pytest
from helpers import mesh_of
from jax import lax

from shrewjax._programs.forwarding import returned_as_given

PAIR = jnp.ones((3, 4)), jnp.ones((3, 4))
remat = jax.checkpoint(lambda x: x)


def custom_vjp(x):
    function = jax.custom_vjp(lambda x: x)
    function.defvjp(lambda x: (x, None), lambda _, g: (g,))
    return function(x)


def custom_jvp(x):
    function = jax.custom_jvp(lambda x: x)
    function.defjvp(lambda primals, tangents: (*primals, *tangents))
    return function(x)


def of_gradient(x):
    """As `nnx.grad` returns a model: beside the gradients, out of a differentiated function."""
    loss = jax.jit(lambda x: (jnp.sum(x[0] * x[1]), remat(x)))
    (_, returned), _ = jax.value_and_grad(loss, has_aux=True)(x)
    return returned


def mapped(function, in_spec, out_spec):
    mesh = mesh_of(a=2)
    specs = {"in_specs": in_spec, "out_specs": out_spec, "check_vma": False}
    return lambda x: jax.shard_map(function, mesh=mesh, **specs)(x)


SHARDED = jax.P(None, "a")

HANDED_ON = {
    "directly": lambda x: x,
    "jit": jax.jit(lambda x: x),
    "remat": remat,
    "remat in jit in remat": jax.checkpoint(jax.jit(remat)),
    "custom_vjp": custom_vjp,
    "custom_jvp": custom_jvp,
    "gradient": of_gradient,
    "vmap": jax.vmap(remat, in_axes=1, out_axes=1),
    "transposed and back": lambda x: jax.tree.map(lambda a: remat(remat(a.T).T), x),
    "slices of a scan": lambda x: lax.scan(lambda c, a: (c + 1, remat(a)), 0, x)[1],
    "slices along axis 1": lambda x: jax.tree.map(
        lambda a: jnp.moveaxis(lax.scan(lambda c, a: (c, remat(a)), 0, jnp.moveaxis(a, 1, 0))[1], 0, 1), x
    ),
    "carry of a scan": lambda x: lax.scan(lambda c, i: (remat(c), i), x, jnp.arange(3))[0],
    "carry beside constants": lambda x: lax.scan(
        lambda c, _: ((c[0] + jnp.sum(x[0]), remat(c[1])), None), (0.0, x), length=3
    )[0][1],
    "carry of a while": lambda x: lax.while_loop(
        lambda c: c[0] < jnp.sum(x[0]), lambda c: (c[0] + jnp.sum(x[1]), remat(c[1])), (0.0, x)
    )[1],
    "shard_map": mapped(remat, SHARDED, SHARDED),
    "both branches": lambda x: lax.cond(x[0][0, 0] > 0, remat, lambda x: x, x),
}


@pytest.mark.parametrize("name", HANDED_ON)
def test_a_value_is_followed_through(name):
    """If this fails with a new JAX, an operation has another name there, or a parameter: see the module."""
    assert returned_as_given(HANDED_ON[name], PAIR) == [True, True]


@pytest.mark.parametrize("name", HANDED_ON)
def test_a_change_is_seen_wherever_it_happens(name):
    """The second array is changed before it is handed on, and the first one is not."""
    found = returned_as_given(lambda x: HANDED_ON[name]((x[0], x[1] * 2)), PAIR)
    assert found == [True, False]


CHANGED = {
    "swapped in shard_map": mapped(lambda x: x[::-1], SHARDED, SHARDED),
    "a device's part": mapped(lambda x: x, SHARDED, jax.P()),
    "other parts": mapped(lambda x: x, jax.P(), SHARDED),
    "swapped": jax.jit(lambda x: x[::-1]),
    "changed in a remat": jax.checkpoint(lambda x: (x[1] * 2, x[0] + 1)),
    "swapped in each turn": lambda x: lax.scan(lambda c, _: (remat(c[::-1]), None), x, length=3)[0],
    "the constant, not the carry": lambda x: lax.scan(lambda c, _: (x, None), (x[0] * 2, x[1] * 2), length=3)[0],
    "swapped in one branch": lambda x: lax.cond(x[0][0, 0] > 0, remat, lambda x: x[::-1], x),
    "transposed": lambda x: jax.tree.map(lambda a: remat(a[:, :3].T), x),
    "constants": lambda x: (jnp.ones((3, 4)), jnp.zeros((3, 4))),
}


@pytest.mark.parametrize("name", CHANGED)
def test_another_value_is_none_that_was_given(name):
    assert returned_as_given(CHANGED[name], PAIR) == [False, False]


def test_a_square_matrix_that_is_transposed_in_each_slice_is_changed():
    cubes = (jnp.ones((2, 3, 3)),)
    turned = lambda x: lax.scan(lambda c, a: (c, (remat(a[0].T),)), 0, x)[1]  # noqa: E731
    assert returned_as_given(turned, cubes) == [False]
    assert returned_as_given(lambda x: turned(turned(x)), cubes) == [True]


def test_the_function_may_close_over_traced_arrays():
    found = []

    @jax.jit
    def program(x, y):
        found.extend(returned_as_given(lambda x: jax.jit(lambda x: (x, x + y))(x)[0], x))
        return x

    jax.eval_shape(program, 1.0, 2.0)
    assert found == [True]
