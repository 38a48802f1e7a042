"""Train steps of 256 devices that are not there lower for every platform that JAX has."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import TRANSFORMATIONS, lenient, own_params
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import shrewjax

pytestmark = pytest.mark.thorough

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
SHAPES = {"w": (16, 4), "b": (4,)}
PARAMS = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
ELEMENTS = sum(int(np.prod(shape)) for shape in SHAPES.values())


def all_reduced(module):
    """The number of elements of every all-reduce in the text of a module."""
    operands = re.findall(r'"stablehlo.all_reduce".*?\}\) : \((.*?)\) ->', module, re.DOTALL)
    shapes = [shape for types in operands for shape in re.findall(r"tensor<((?:\d+x)*)\w+>", types)]
    return [int(np.prod([int(n) for n in shape.split("x") if n])) for shape in shapes]


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_train_step_on_256_devices_lowers_and_sends_the_gradient_once_a_window_and_scalars(name):
    adamw = lenient(optax.adamw(1e-3))
    inner = adamw if name == "accumulate" else optax.chain(TRANSFORMATIONS[name](), adamw)
    tx = shrewjax.accumulate(inner, 8, sum_over="data")
    mesh = AbstractMesh((256,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh):
        state = jax.eval_shape(tx.init, PARAMS)
    specs = shrewjax.state_specs(state)

    def step(params, state, x):
        own = own_params(params, "data")
        grads = jax.grad(lambda p: jnp.sum((x @ p["w"] + p["b"][None]) ** 2))(own)
        return shrewjax.apply_gradients(tx, grads, state, params)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
    x = jax.ShapeDtypeStruct((512, 16), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    exported = jax.export.export(jax.jit(mapped), platforms=PLATFORMS)(PARAMS, state, x)
    assert exported.nr_devices == 256
    sent = all_reduced(exported.mlir_module())
    assert sum(n for n in sent if n > 2) == ELEMENTS
    assert [n for n in sent if n <= 2] == [2]  # the weight and the sum of `value`
    assert "all_gather" not in exported.mlir_module()
