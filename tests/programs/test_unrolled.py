"""Loops around convolutions: unrolled on a CPU, in the memory of the loop, and nowhere else."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close
from sklearn.datasets import load_digits

import shrewjax
from shrewjax._programs import unrolled

IMAGES = jnp.tile(jnp.asarray(load_digits().images[:64, :, :, None] / 16, jnp.float32), (1, 4, 4, 1))
KERNELS = [jax.random.normal(jax.random.key(i), (3, 3, max(1, 16 * min(i, 1)), 16)) / 12 for i in range(4)]


def loss(kernels, images, keep):
    x = images
    for kernel in kernels:
        x = nn.relu(jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return jnp.mean(x.mean((1, 2, 3)) ** 2, where=keep)


def held(function):
    compiled = jax.jit(function).lower(KERNELS, IMAGES, KEEP).compile()
    return compiled.memory_analysis().temp_size_in_bytes, compiled.as_text().count(" while(")


KEEP = jnp.arange(64) % 3 > 0
FUNCTIONS = [shrewjax.value_and_grad, shrewjax.accumulated_value_and_grad]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_cpu_runs_convolutions_outside_of_a_loop_and_holds_no_more_than_a_few_turns(function, monkeypatch):
    memory, loops = held(function(loss, 16))
    whole, _ = held(jax.value_and_grad(loss))
    monkeypatch.setattr(unrolled, "_HOLDS_TURNS_APART", False)
    memory_of_loop, loops_of_loop = held(function(loss, 16))
    assert loops_of_loop > 0
    if jax.version.__version_info__ < (0, 12):
        assert loops == loops_of_loop
        return
    assert loops == 0
    assert memory < 2.5 * memory_of_loop
    assert memory < whole / 4


def test_results_are_those_of_the_whole_batch():
    expected = jax.jit(jax.value_and_grad(loss))(KERNELS, IMAGES, KEEP)
    got = jax.jit(shrewjax.value_and_grad(loss, 6))(KERNELS, IMAGES, KEEP)  # loops of two sizes
    assert_close(got, expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_other_backends_keep_the_loop(platform):
    step = jax.jit(shrewjax.value_and_grad(loss, 4))
    text = jax.export.export(step, platforms=[platform])(KERNELS, IMAGES, KEEP).mlir_module()
    assert text.count("stablehlo.while") == 1
    assert "optimization_barrier" not in text


def test_a_convolution_in_a_loop_of_the_loss_and_many_turns_keep_the_loop(monkeypatch):
    def over_time(kernels, images, keep):
        steps = jax.lax.scan(lambda x, _: (jnp.tanh(loss(kernels, images * x, keep)), None), jnp.float32(1), None, 2)
        return steps[0]

    jaxpr = jax.make_jaxpr(lambda *x: shrewjax.accumulated_value_and_grad(over_time, 4)(*x))
    assert "optimization_barrier" not in str(jaxpr(KERNELS, IMAGES, KEEP))
    monkeypatch.setattr(unrolled, "_MOST_TURNS", 3)
    jaxpr = jax.make_jaxpr(lambda *x: shrewjax.value_and_grad(loss, 4)(*x))
    assert "optimization_barrier" not in str(jaxpr(KERNELS, IMAGES, KEEP))
