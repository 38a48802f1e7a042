"""The README's steps, as they stand there, are as small and as right as it says."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import run_page
from speed import users_options

import shrewjax
import shrewjax.flax

README = Path(__file__).parent.parent.parent / "README.md"
BEFORE, AFTER = r"(?m)^\+.*\n|^[- ]", r"(?m)^-.*\n|^[+ ]"  # what to leave out of a diff, for each of its sides


@pytest.fixture(scope="module")
def names():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return run_page(README)


def side(diff, leave_out, names):
    """The names that one side of a diff of the README defines, among those given."""
    names = dict(names)
    exec(re.sub(leave_out, "", re.findall(r"```diff\n(.*?)```", README.read_text(), re.DOTALL)[diff]), names)
    return names


def test_uneven_micro_batches_and_the_flush_are_one_program(names):
    assert names["micro_step"]._cache_size() == 1
    assert names["metrics"]["accumulate/windows"] == 2


@pytest.mark.parametrize("name", ["step", "micro_step"])
def test_step_holds_no_second_copy_of_twenty_million_parameters(names, name):
    """The same step, not donated, returns parameters and state in memory of its own, and copies them there."""
    params = {"w": jax.ShapeDtypeStruct((20_000_000,), jnp.float32)}
    tx = names["tx" if name == "step" else "accumulating"]
    rows = 4 if name == "step" else 1
    batch = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, 20_000_000), (rows,))]
    batch += [] if name == "step" else [jax.ShapeDtypeStruct((rows,), bool), jax.ShapeDtypeStruct((), bool)]
    state = jax.eval_shape(tx.init, params)
    options = users_options()

    def compiled(step):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            program = step.lower(params, state, *batch).compile(compiler_options=options)
        return program.memory_analysis(), len(re.findall(r"= f32\[20000000\]\S* copy\(", program.as_text()))

    def trees(memory):
        """The memory beside that of the arguments, in trees of parameters."""
        return (memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes) / 80_000_000

    memory, copies = compiled(names[name])
    undonated, more_copies = compiled(jax.jit(names[name].__wrapped__))
    assert copies == 0
    if name == "micro_step":
        assert trees(memory) < 0.001
        assert trees(undonated) > 3.99  # parameters, two moments, and the window's sum
        assert more_copies >= 3
    else:
        assert trees(memory) < 2.001  # the sum, and the gradients of a micro-batch
        assert trees(undonated) > 2.99


def test_both_sides_of_the_diff_train_alike_on_even_micro_batches(names):
    x, y = np.random.default_rng(0).normal(size=(2, 8, 4, 3)).astype(np.float32)
    after = []
    for leave_out in (BEFORE, AFTER):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            at = side(0, leave_out, names)
            params = {"w": jnp.zeros(3)}
            state = at["tx"].init(params)
            for i in range(8):
                params, state = at["step"](params, state, x[i], y[i, :, 0])
        after.append(params["w"])
    assert np.abs(after[0]).min() > 1e-4  # it trained
    np.testing.assert_allclose(*after, rtol=1e-5)


def test_both_sides_of_the_diff_for_flax_have_the_same_loss_and_gradients():
    def loss_fn(model, x, y):
        return jnp.mean((model(x)[:, 0] - y) ** 2)

    x, y = np.random.default_rng(0).normal(size=(2, 8, 3)).astype(np.float32)
    names = {"nnx": nnx, "shrewjax": shrewjax, "tx": optax.sgd(0.1), "loss_fn": loss_fn, "x": x, "y": y[:, 0]}
    names["model"] = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        before, after = (side(1, leave_out, names) for leave_out in (BEFORE, AFTER))
    assert isinstance(after["optimizer"], shrewjax.flax.Optimizer)
    np.testing.assert_allclose(after["loss"], before["loss"], rtol=1e-5)
    for ours, theirs in zip(*(jax.tree.leaves(at["grads"]) for at in (after, before)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
