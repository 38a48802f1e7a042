"""A call as a function of its arrays: which are free, which fixed, and which its function closes over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shrewjax
from shrewjax._batches._of_arrays import call_of_arrays
from shrewjax._batches.value_and_grad import Options

X = jnp.arange(6.0).reshape(6, 1)


def call_of(fun, *args, **kwargs):
    roles = {"rng_argnums": (), "batch_argnums": (1,)}

    def value(call, arrays):
        its_args, its_kwargs, outer = call.arguments(arrays, absent=[])
        return call.with_params(fun, [], outer, *its_args, {}, **its_kwargs)

    return call_of_arrays(fun, Options(2), roles, args, kwargs, value)


def test_floating_arrays_are_free_examples_and_integers_fixed_and_all_else_stays():
    call = call_of(
        lambda w, x, n, act, *, y: act(x @ w["w"]),
        {"w": jnp.ones((1, 2)), "k": 3},
        X,
        jnp.int32(1),
        jnp.sin,
        y=np.ones(2),
    )
    kinds = {name: [call.place(at) for at in getattr(call, name)] for name in ("free", "fixed")}
    assert kinds == {"free": [0, "y"], "fixed": [1, 2]}
    assert call.programs is None


def test_a_traced_array_that_the_function_closes_over_is_a_leaf_by_which_there_is_a_derivative():
    def of_outer(outer):
        call = call_of(lambda w, x: w * x * outer, 2.0, X)
        assert call.num_given == 2
        assert call.free == [2]
        given = call.by_number(*call.operands()) | {2: jnp.float32(5)}
        args, kwargs, arrays = call.arguments(given, absent=[])
        return call.with_params(call.fun, [], arrays, *args, {}, **kwargs)

    np.testing.assert_allclose(jax.jit(of_outer)(3.0), 10 * X)  # 5 in the place of the 3 that is closed over


@pytest.mark.parametrize("map_", [shrewjax.micro_batched, shrewjax.micro_batch_map])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_mutable_array_that_the_function_closes_over_is_an_error_as_it_would_be_written_twice(map_, transform):
    def step(x):
        calls = jax.new_ref(jnp.zeros(()))

        def fun(w, x):
            calls[...] += 1.0
            return jnp.mean(w * x) if map_ is shrewjax.micro_batched else w * x

        return map_(fun, 2)(2.0, x)

    with pytest.raises(ValueError, match=r"^fun must not close over a mutable array \(jax\.new_ref\)"):
        transform(step)(X)
