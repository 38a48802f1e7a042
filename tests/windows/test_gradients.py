"""A micro-batch's gradients: those that fit no sum are named, and a bad number in any dtype is seen."""

import re

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, tree_of
from recording import recorder, recording_window, run_compiled
from speed import quick_jit

import shrewjax
from shrewjax._skipping import wrapping
from shrewjax._windows import _gradients

BAD_GRADIENTS = {
    "shape": ({"w": jnp.ones((3, 1)), "b": jnp.ones(4)}, AssertionError, r"\['w'\] must have .*\(3, 4\), got \(3, 1\)"),
    "scalar": ({"w": jnp.ones(()), "b": jnp.ones(4)}, AssertionError, r"\['w'\] must have .*\(3, 4\), got \(\)"),
    "missing": ({"w": jnp.ones((3, 4))}, AssertionError, r"\['b'\] is missing"),
    "unexpected": (
        {"w": jnp.ones((3, 4)), "b": jnp.ones(4), "c": jnp.ones(1)},
        AssertionError,
        r"\['c'\] is unexpected",
    ),
    "complex": ({"w": jnp.ones((3, 4)), "b": jnp.ones(4, complex)}, ValueError, r"\['b'\] is complex64"),
    "no array": ({"w": jnp.ones((3, 4)), "b": "text"}, ValueError, r"\['b'\] must be an array"),
}


@pytest.mark.parametrize("case", BAD_GRADIENTS)
def test_bad_gradients_are_named_and_leave_the_state_usable(case):
    grads, error, message = BAD_GRADIENTS[case]
    params = {"w": jnp.zeros((3, 4)), "b": jnp.zeros(4)}
    window, tx = shrewjax.GradAccumulator(2), shrewjax.accumulate(recorder(), 2)
    state, host = tx.init(params), window.init(params)
    with pytest.raises(error, match=message):
        tx.update(grads, state, params)
    with pytest.raises(error, match=message):
        window.add(host, grads)
    if case != "no array":
        with pytest.raises(error, match=message):
            quick_jit(tx.update, donate_argnums=1)(grads, state, params)
    updates, _ = tx.update(params, state, params)
    assert_close(updates, params, rtol=0)


def test_checks_add_nothing_to_the_program(monkeypatch):
    params = tree_of()
    tx = shrewjax.accumulate(recorder(), 2)

    def program():  # of a new function, because JAX would not trace the same one again
        return str(jax.make_jaxpr(lambda grads, state: tx.update(grads, state, params))(params, tx.init(params)))

    with_checks = program()
    monkeypatch.setattr(_gradients, "require_structure_of", lambda *_: None)
    monkeypatch.setattr(wrapping, "check_unchanged", lambda *_: None)
    assert program() == with_checks


NOT_FLOATING = {"int32": jnp.int32(1), "bool": jnp.ones((), bool), "key": jax.random.key(0)}


@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
@pytest.mark.parametrize("dtype", NOT_FLOATING)
def test_gradient_that_is_not_floating_for_a_parameter_that_is_is_an_error_that_names_both(dtype, shape):
    params = {"w": jnp.ones(shape)}
    grads = {"w": jnp.broadcast_to(NOT_FLOATING[dtype], shape)}
    window, tx = shrewjax.GradAccumulator(2), shrewjax.accumulate(optax.identity(), 2)
    message = rf"\['w'\] is {re.escape(str(grads['w'].dtype))}.*floating.*float32"
    for call in (
        lambda: tx.update(grads, tx.init(params), params),
        lambda: tx.update(grads, tx.init(params)),
        lambda: window.add(window.init(params), grads),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("shape", [(), (2,)], ids=["scalar", "vector"])
def test_floating_gradient_for_an_integer_parameter_is_an_error_that_names_it(shape):
    tx = shrewjax.accumulate(optax.identity(), 2)
    with pytest.raises(ValueError, match=r"\['i'\] is float32, but its parameter is not floating"):
        tx.update({"i": jnp.ones(shape)}, tx.init({"i": jnp.ones(shape, jnp.int32)}))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "complex64"])
def test_policies_see_bad_values_in_every_dtype_and_no_overflow_of_finite_ones(dtype):
    largest, dtype = float(jnp.finfo(dtype).max), jnp.dtype(dtype)
    tx = recording_window(1, nonfinite="drop_micro_batch")
    params = np.zeros((300, 4), dtype)
    infinity, nan = (complex(0, x) if dtype == "complex64" else x for x in (np.inf, np.nan))

    def with_bad(*values):
        grads = params.copy()
        grads[[200, 7][: len(values)], 1] = values
        return grads

    for case, grads, dropped in (
        ("the largest everywhere", np.full_like(params, largest), 0),  # the sum overflows, no element does
        ("an infinity", with_bad(infinity), 1),
        ("a NaN", with_bad(nan), 1),
        ("infinities of both signs", with_bad(np.inf, -np.inf), 1),
    ):
        _, state = run_compiled(tx, [(grads, {})], params)[-1]
        assert int(state.dropped) == dropped, case


def test_a_sparse_gradient_has_no_window_and_a_guard_takes_it():
    """A sum of two would have the indices of neither. Whether all is finite does not depend on repeated indices."""
    params = {"w": jnp.zeros(4)}
    grads = {"w": jax.experimental.sparse.BCOO((jnp.array([1.0, jnp.nan]), jnp.array([[0], [0]])), shape=(4,))}
    tx = shrewjax.accumulate(optax.sgd(1.0), 2)
    with pytest.raises(ValueError, match=r"gradient leaf \['w'\] must be dense, got BCOO. Call its todense\(\)"):
        tx.update(grads, tx.init(params), params)
    guard = shrewjax.skip_nonfinite(optax.identity())
    _, state = guard.update(grads, guard.init(params))
    assert int(state.skipped) == 1
