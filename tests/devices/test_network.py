"""How often gradients cross the network: the rows of the tables of `docs/guide/devices.md`, in compiled programs.

A step of eight devices with four micro-batches is compiled for H100s and for TPUs v5e, and its collectives are read.
What programs for H100s compute is compared with JAX's gradient of the whole batch on one device, on CPUs. P is the
bytes of all parameters. Three models have six layers, which are rematerialized: `LISTED` and `SCANNED` transformers,
and a network whose matrices an Explicit mesh can shard. `losses.py` has models that look rows up in their scans.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import _compiled
import executed
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from _transformer import Transformer
from helpers import thorough
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from losses import LOSSES
from scanned_layers import sum_by_hand
from weights import filled, integers, normal

import shrewjax

pytestmark = pytest.mark.usefixtures("as_users_have_it")

DEVICES, K = 8, 4
SCANNED = Transformer(layers=6, width=64, heads=4, vocabulary=128, tokens=32, dtype=np.float32)
LISTED = dataclasses.replace(SCANNED, is_scanned=False)
WIDTH = 64


class Model(NamedTuple):
    """A mean over what counts in a batch, the number that counts, and numbers for both."""

    loss: Any
    weight: Any
    params: Any
    batch: tuple[Any, ...]
    on_one_device: Any  # the loss

    def expected(self):
        return jax.jit(jax.value_and_grad(self.on_one_device))(self.params, *self.batch)


def transformer(of, *, is_weighted=False, is_explicit=False):
    """A language model, of which all tokens count, or some."""

    def weight(params, tokens):
        return jnp.sum(tokens < 50) if is_weighted else tokens.size

    def loss_of(model):
        def loss(params, tokens):
            counts = tokens < 50 if is_weighted else jnp.ones_like(tokens)
            return jnp.sum(model.losses(params, tokens) * counts) / jnp.sum(counts)

        return loss

    loss = loss_of(dataclasses.replace(of, looked_up=P("data")) if is_explicit else of)
    params = filled(of.shapes())
    params["embedding"] *= of.width**-0.5  # it is the output's, too
    tokens = integers(0, of.vocabulary, DEVICES * K, of.tokens)
    return Model(loss, weight, params, (tokens,), loss_of(of))


def network():
    """Layers of one matrix. The weight is the number of positive targets; only these count."""

    def weight(params, x, y):
        return jnp.sum(y[:, 0] > 0)

    def loss(params, x, y):
        def layer(h, w):
            return jnp.tanh(h @ w), None

        h, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        counts = (y > 0).astype(jnp.float32)
        return jnp.sum(counts * (h @ params["out"] - y) ** 2) / jnp.sum(counts)

    params = {"layers": normal(0, 6, WIDTH, WIDTH), "out": normal(1, WIDTH, 1)}
    x, y = normal(2, DEVICES * K, WIDTH), normal(3, DEVICES * K, 1)
    return Model(loss, weight, params, (x, y), loss)


class Form(NamedTuple):
    """A step on a mesh: how it is divided, and what crosses the network how often, in P."""

    model: Model
    axes: dict[str, int]
    step: Any  # of the mesh
    spec: Any = P()  # of the parameters
    batch_specs: Any = P("data")
    kind: AxisType = AxisType.Auto
    sent: Mapping[str, float] = MappingProxyType({"all-reduce": 1.0})
    is_gathered: bool = False  # over an axis other than "data", in each micro-batch


def of_batch(model, **options):
    return lambda mesh: shrewjax.accumulated_value_and_grad(model.loss, K, weight_fn=model.weight, **options)


def of_whole(model, **options):
    """The loss of the whole batch, divided."""
    return lambda mesh: shrewjax.value_and_grad(model.loss, K, **options)


def in_shard_map(**options):
    """In `shard_map` over "data" that the caller writes."""
    model = transformer(SCANNED, **options)
    return _in_shard_map(model, of_batch(model, sum_over="data"))


def whole_in_shard_map():
    """The loss reduces over devices itself, as in plain JAX."""
    model = transformer(SCANNED, is_weighted=True)

    def loss(params, tokens):
        count = model.weight(params, tokens)
        return jax.lax.psum(model.loss(params, tokens) * count, "data") / jax.lax.psum(count, "data")

    return _in_shard_map(model, lambda mesh: shrewjax.value_and_grad(loss, K))


def _in_shard_map(model, of_device):
    def step(mesh):
        run = of_device(mesh)
        specs = (P(), *[P("data")] * len(model.batch))
        return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P(), axis_names={"data"})

    return Form(model, {"data": DEVICES}, step)


def on_explicit(of, divide=of_batch, **options):
    """A loss of the whole batch says where what it looks up lies, as in plain JAX."""
    model = transformer(of, is_explicit=divide is of_whole, **options)
    return summed_over(model, divide)._replace(kind=AxisType.Explicit)


def typed_reduced():
    """Parameters that come as `reduced`: JAX sums gradients once a micro-batch, and XLA once after the loop."""
    model = network()

    def step(mesh):
        def run(params, *batch):
            reduced = jax.tree.map(lambda x: jax.reshard(x, P(reduced={"data"})), params)
            value, grads = of_batch(model)(mesh)(reduced, *batch)
            return value, jax.tree.map(lambda x: jax.reshard(x, P()), grads)

        return run

    return Form(model, {"data": DEVICES}, step, kind=AxisType.Explicit)


def tensor_parallel(kind, divide=of_batch):
    """Half of each matrix on a device."""
    model, is_explicit = network(), kind == AxisType.Explicit
    specs = {"layers": P(None, None, "model"), "out": P()}
    batch_specs = (P("data", "model"), P("data")) if is_explicit else P("data")  # of activations, by their types
    axes, step = {"data": 4, "model": 2}, divide(model, sum_over="data")
    return Form(model, axes, step, specs, batch_specs, kind, sent={"all-reduce": 0.5})


def columns(of):
    """The parameters' last axes over "fsdp"."""
    return jax.tree.map(lambda x: P(*[None] * (x.ndim - 1), "fsdp"), of.params)


def hybrid(divide=of_batch):
    model = transformer(SCANNED)
    step = divide(model, sum_over="data")
    both = P(("data", "fsdp"))
    return Form(model, {"data": 4, "fsdp": 2}, step, columns(model), both, sent={"all-reduce": 0.5}, is_gathered=True)


def fsdp(kind, divide=of_batch):
    """Parameters sharded over "data", as the page says. On an Explicit mesh types ask for shards of the gradients."""
    model, specs = network(), {"layers": P(None, "data"), "out": P("data")}

    def step(mesh):
        def run(shards, *batch):
            value, grads = divide(model, sum_over="data")(mesh)(shards, *batch)
            is_auto = kind == AxisType.Auto
            return value, jax.lax.with_sharding_constraint(grads, specs) if is_auto else grads

        return run

    sent = {"all-gather": 1.0, "reduce-scatter": 1.0}  # bytes before they are scattered
    return Form(model, {"data": DEVICES}, step, specs, kind=kind, sent=sent)


def summed_over(model, divide=of_batch, **options):
    return Form(model, {"data": DEVICES}, divide(model, sum_over="data", **options))


def with_scans(name, divide=of_batch):
    """A model that looks rows up in its scans."""
    loss = LOSSES[name]()

    def mean(params, *batch):
        return jnp.mean(loss.of_examples(params, *batch))

    return summed_over(Model(mean, None, loss.params, loss.batch, mean), divide)


def convolutions(divide=of_batch):
    """A U-net of two levels with group norms."""

    def convolve(x, w, stride=1):
        names = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=names)

    def normed(x, gain):
        groups = x.reshape(len(x), -1, 4, x.shape[-1] // 4)
        mean, variance = (f(groups, axis=(1, 3), keepdims=True) for f in (jnp.mean, jnp.var))
        return jax.nn.silu(((groups - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape) * gain)

    def loss(params, x, y):
        high = normed(convolve(x, params["in"]), params["gain"])
        low = jnp.tanh(convolve(high, params["down"], stride=2))
        up = jax.image.resize(low, (*high.shape[:3], low.shape[-1]), "nearest")
        return jnp.mean((convolve(jnp.concatenate([up, high], -1), params["out"]) - y) ** 2)

    shapes = {"in": (3, 3, 3, 16), "down": (3, 3, 16, 32), "out": (3, 3, 48, 3)}
    params = {name: normal(i, *shape) / 3 for i, (name, shape) in enumerate(shapes.items())}
    x, y = (normal(seed, DEVICES * K, 8, 8, 3, scale=1.0) for seed in (3, 4))
    return summed_over(Model(loss, None, params | {"gain": np.ones(16, np.float32)}, (x, y), loss), divide)


def listed(divide=of_batch):
    model = transformer(LISTED)
    return Form(model, {"data": DEVICES}, divide(model))


OF_LOSSES = ["recurrent", "recurrent, tied", "chunks", "experts", "graphs", "linen"]
ONCE = {
    "sum_over, Explicit, scanned": functools.partial(on_explicit, SCANNED),
    "sum_over, Explicit, scanned, weighted": functools.partial(on_explicit, SCANNED, is_weighted=True),
    "sum_over, Explicit, listed": functools.partial(on_explicit, LISTED),
    "sum_over, Explicit, listed, weighted": functools.partial(on_explicit, LISTED, is_weighted=True),
    "Explicit, parameters that come as reduced": typed_reduced,
    "sum_over, model on another axis of an Explicit mesh": functools.partial(tensor_parallel, AxisType.Explicit),
    "Auto, listed": listed,
    "shard_map, scanned, weighted": functools.partial(in_shard_map, is_weighted=True),
    "sum_over, scanned, weighted": lambda: summed_over(transformer(SCANNED, is_weighted=True)),
    "sum_over, scanned, weighted, skip_empty": lambda: summed_over(
        transformer(SCANNED, is_weighted=True), skip_empty=True
    ),
    "sum_over, FSDP on another axis": hybrid,
    "sum_over, model on another axis": functools.partial(tensor_parallel, AxisType.Auto),
    "sum_over, FSDP": functools.partial(fsdp, AxisType.Auto),
    "sum_over, FSDP on an Explicit mesh": functools.partial(fsdp, AxisType.Explicit),
    "sum_over, convolutions": convolutions,
    **{f"sum_over, {name}": functools.partial(with_scans, name) for name in OF_LOSSES},
    "whole, sum_over, Explicit, scanned, weighted": functools.partial(on_explicit, SCANNED, of_whole, is_weighted=True),
    "whole, sum_over, Explicit, listed, weighted": functools.partial(on_explicit, LISTED, of_whole, is_weighted=True),
    "whole, sum_over, scanned, weighted": lambda: summed_over(transformer(SCANNED, is_weighted=True), of_whole),
    "whole, Auto, listed": functools.partial(listed, of_whole),
    "whole, shard_map, scanned, weighted": whole_in_shard_map,
    "whole, sum_over, FSDP on another axis": functools.partial(hybrid, of_whole),
    "whole, sum_over, model on another axis": functools.partial(tensor_parallel, AxisType.Auto, of_whole),
    "whole, sum_over, model on another axis of an Explicit mesh": functools.partial(
        tensor_parallel, AxisType.Explicit, of_whole
    ),
    "whole, sum_over, FSDP": functools.partial(fsdp, AxisType.Auto, of_whole),
    "whole, sum_over, FSDP on an Explicit mesh": functools.partial(fsdp, AxisType.Explicit, of_whole),
    "whole, sum_over, convolutions": functools.partial(convolutions, of_whole),
    **{f"whole, sum_over, {name}": functools.partial(with_scans, name, of_whole) for name in OF_LOSSES},
}
SOME = (
    "sum_over, Explicit, scanned, weighted",
    "sum_over, FSDP",
    "sum_over, experts",
    "whole, sum_over, scanned, weighted",
    "whole, Auto, listed",
    "whole, sum_over, FSDP on an Explicit mesh",
)


def compiled_form(form, target):
    devices = target.mesh(DEVICES).devices.reshape(*form.axes.values())
    mesh = Mesh(devices, tuple(form.axes), axis_types=(form.kind,) * len(form.axes))

    def place(spec, tree):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    params = jax.tree.map(place, form.spec, form.model.params, is_leaf=lambda x: isinstance(x, P))
    unit = sum(x.nbytes for x in jax.tree.leaves(form.model.params))
    with jax.set_mesh(mesh):
        batch = jax.tree.map(place, form.batch_specs, form.model.batch, is_leaf=lambda x: isinstance(x, P))
        return _compiled.compile_for(target, form.step(mesh), params, *batch, unit=unit, donate=())


def sent(program, when, least=0.04):
    """The bytes of the collectives of a size or more, by operation, in P.

    So the embedding, 0.03 P, is left out. XLA may reduce the output's part of its gradient in each micro-batch.
    """
    found = Counter()
    for (op, its_time, size), number in program.collectives.items():
        if (its_time == "every call") == (when == "once") and size >= least * program.unit:
            found[op] += size * number / program.unit
    return found


@pytest.mark.combinations
@pytest.mark.parametrize("name", [*SOME, *thorough(*(name for name in ONCE if name not in SOME))])
def test_gradients_cross_the_network_once(name, target):
    form = ONCE[name]()
    program = compiled_form(form, target)
    if target.name == "h100":
        arguments = form.model.params, *form.model.batch
        errors = executed.numbers(program.compiled, arguments, form.model.expected())
        assert max(errors.values()) < executed.TOLERANCE, errors
    in_loop, once = sent(program, "in loops"), sent(program, "once")
    if form.is_gathered:
        assert {*in_loop} <= {"all-gather", "reduce-scatter", "all-to-all"}
    else:
        assert not in_loop
    assert once == pytest.approx(dict(form.sent), abs=0.05)


@pytest.mark.thorough
@pytest.mark.parametrize("is_explicit", [False, True])
def test_a_loop_by_hand_sends_the_gradients_of_scanned_layers_with_each_micro_batch(is_explicit, target):
    """So the test above would notice. The compiler for TPUs does not say how many trips a loop has."""
    model = transformer(SCANNED, is_explicit=is_explicit)
    step = functools.partial(sum_by_hand, model.loss, K)
    kind = AxisType.Explicit if is_explicit else AxisType.Auto
    program = compiled_form(Form(model, {"data": DEVICES}, lambda mesh: step, kind=kind), target)
    if target.name == "h100":
        assert program.sent(closing=True, least=1e-3 * program.unit) / program.unit == pytest.approx(4, abs=0.15)
    assert sum(sent(program, "in loops").values()) > 0.04
