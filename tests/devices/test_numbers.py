"""Numbers out of programs for eight H100s, which run on CPU devices: models, windows and rules, divided as users do.

The oracle of a gradient is `jax.value_and_grad` of the whole batch on one CPU device. That of a window is its large
batch, with a gradient by hand in float64.
"""

import executed
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import MAPPED, TRANSFORMATIONS, mesh_of, placed, thorough
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from models import MODELS, REFUSED
from optax.losses import softmax_cross_entropy_with_integer_labels as cross_entropy
from speed import quick_jit
from test_distribution import PARAMS, SHARDED, large_batches, mapped_step, micro_batches, summed_loss
from weights import filled, integers, normal, table

import shrewjax

pytestmark = pytest.mark.usefixtures("as_users_have_it", "h100")


# A whole batch in one call.

# The loss of the whole batch is divided, or each micro-batch has one of its own.
DIVIDED = [("value_and_grad", name) for name in MODELS if name not in REFUSED]
OWN = [("accumulated_value_and_grad", name) for name in MODELS if "of each example" not in name]
THREE = [
    ("value_and_grad", "transformer, FSDP"),
    ("value_and_grad", "ring, of each example"),
    ("accumulated_value_and_grad", "experts by scatters"),
]


@pytest.mark.combinations
@pytest.mark.parametrize(("divide", "name"), [*THREE, *thorough(*(row for row in DIVIDED + OWN if row not in THREE))])
def test_gradients_of_models_are_those_of_the_whole_batch(divide, name):
    model = MODELS[name]()
    one = Mesh(np.reshape(jax.devices("cpu")[:1], [1] * len(model.axes)), tuple(model.axes))
    arguments = model.params, model.batch
    expected = quick_jit(jax.value_and_grad(model.loss(one)))(*arguments)
    mesh = executed.gpus(**model.axes)
    step = getattr(shrewjax, divide)(model.loss(mesh), 4)
    executed.assert_right(step, arguments, (model.specs, model.batch_spec), mesh, expected)


@pytest.mark.parametrize("name", REFUSED)
def test_models_whose_examples_share_places_are_refused_with_the_line(name):
    model = MODELS[name]()
    with pytest.raises(ValueError, match=REFUSED[name]):
        jax.eval_shape(shrewjax.value_and_grad(model.loss(executed.gpus(**model.axes)), 4), model.params, model.batch)


class Convolutions(nn.Module):
    """Two convolutions with batch statistics, which a step hands on."""

    @nn.compact
    def __call__(self, images):
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3), use_bias=False)(images)))
        x = nn.relu(nn.Conv(16, (3, 3), strides=2)(nn.max_pool(x, (2, 2), (2, 2))))
        return nn.Dense(10)(jnp.mean(x, axis=(1, 2)))


def of_images(params, images, labels, statistics):
    """The loss, numbers of the batch, and the statistics."""
    variables = {"params": params, "batch_stats": statistics}
    logits, changed = Convolutions().apply(variables, images, mutable=["batch_stats"])
    right = logits.argmax(-1) == labels
    numbers = {
        "right": jnp.sum(right),
        "right by label": jax.ops.segment_sum(right.astype(jnp.float32), labels, 10),
        "largest": jnp.zeros(10).at[labels].max(jax.nn.softmax(logits).max(-1)),
        "mean logits": jnp.mean(logits, axis=0),
        "each": cross_entropy(logits, labels),
    }
    return jnp.mean(cross_entropy(logits, labels)), (numbers, changed["batch_stats"])


def test_aux_and_statistics_of_convolutions_are_those_of_micro_batches_one_by_one():
    images, labels = normal(0, 64, 8, 8, 3, scale=1.0), integers(1, 10, 64)
    variables = filled(jax.eval_shape(Convolutions().init, jax.random.key(0), images))
    params, statistics = variables["params"], variables["batch_stats"]
    kinds = {"right": "sum", "right by label": "sum", "largest": "max", "mean logits": "mean", "each": "stack"}
    run = quick_jit(jax.value_and_grad(of_images, has_aux=True))
    parts, carry = [], statistics
    for i in range(4):
        (value, (numbers, carry)), grads = run(params, images[i::4], labels[i::4], carry)
        parts.append((value, grads, numbers))
    value, grads = jax.tree.map(lambda *x: np.mean(np.float64(x), axis=0), *(part[:2] for part in parts))
    reduce = {"sum": np.sum, "max": np.max, "mean": np.mean, "stack": lambda x, axis: np.stack(x)}
    numbers = {name: reduce[kind]([part[2][name] for part in parts], axis=0) for name, kind in kinds.items()}
    step = shrewjax.accumulated_value_and_grad(of_images, 4, has_aux=True, carry_argnum=3, aux_reduction=kinds)
    executed.assert_right(
        step,
        (params, images, labels, statistics),
        (P(), P("data"), P("data"), P()),
        executed.gpus(data=8),
        ((value, (numbers, carry)), grads),
    )


def each_looked_up(params, tokens):
    logits = jnp.tanh(params["table"][tokens]) @ params["out"]
    return jnp.mean(cross_entropy(logits, jnp.roll(tokens, -1, axis=1)), axis=1)


def looked_up(params, tokens, counts):
    """The mean over those examples that count."""
    return jnp.sum(jnp.where(counts > 0, each_looked_up(params, tokens), 0)) / jnp.sum(counts)


def summed_over_devices(mesh, **options):
    """Each device's micro-batches have their own weights. Without `mesh` the call maps itself."""
    options |= {"weight_fn": lambda params, tokens, counts: jnp.sum(counts), "sum_over": "data"}
    step = shrewjax.accumulated_value_and_grad(looked_up, 2, **options)
    if mesh is None:
        return step
    split = P("data")
    return jax.shard_map(step, mesh=mesh, in_specs=(P(), split, split), out_specs=P())


def whole_over_devices(mesh):
    """The loss of the whole batch reduces over devices itself, as in plain JAX."""

    def loss(params, tokens, counts):
        total = jnp.sum(jnp.where(counts > 0, each_looked_up(params, tokens), 0))
        return jax.lax.psum(total, "data") / jax.lax.psum(jnp.sum(counts), "data")

    places = {"in_specs": (P(), P("data"), P("data")), "out_specs": P()}
    return jax.shard_map(shrewjax.value_and_grad(loss, 2), mesh=mesh, **places)


MAPPED_STEPS = {
    "whole, plain jit": lambda mesh: shrewjax.value_and_grad(looked_up, 2, sum_over="data"),
    "whole, shard_map": whole_over_devices,
    "plain jit": lambda mesh: summed_over_devices(None),
    "shard_map": summed_over_devices,
    "drop_micro_batch": lambda mesh: summed_over_devices(mesh, nonfinite="drop_micro_batch"),
}


IN_JIT = "plain jit", "whole, plain jit"


@pytest.mark.parametrize("name", [*IN_JIT, *thorough(*(name for name in MAPPED_STEPS if name not in IN_JIT))])
def test_gradients_that_are_summed_over_devices_are_those_of_the_whole_batch(name):
    counts = np.float32(np.random.default_rng(0).random(64) < 0.7)
    counts[:8:2] = 0  # a micro-batch of the first device has weight 0
    arguments = {"table": table(1, 64, 16), "out": normal(2, 16, 64)}, integers(3, 64, 64, 8), counts
    expected = quick_jit(jax.value_and_grad(looked_up))(*arguments)
    mesh = executed.gpus(data=8)
    with jax.set_mesh(mesh):
        executed.assert_right(MAPPED_STEPS[name](mesh), arguments, (P(), P("data"), P("data")), mesh, expected)


# Windows and rules, call by call.

CALLS, LENGTH = 6, 3
RULES = [name for name in TRANSFORMATIONS if name != "accumulate"]


def in_jit(tx, is_window):
    """A step of parameters that are sharded over one of two axes, over both of which the batch is."""

    def step(params, state, x, y, counts):
        n = jnp.sum(counts)
        grads = jax.grad(lambda p: summed_loss(p["w"], p["b"], x, y, counts) / n)(params)
        return shrewjax.apply_gradients(tx, grads, state, params, **({"weight": n} if is_window else {}))

    return step


def assert_trajectory(how, tx, batches, expected, *, is_window=True):
    """Runs steps on eight GPUs, each from the results of the one before; `expected` are the parameters after each."""
    mesh, gpus = mesh_of(data=2, fsdp=4), executed.gpus(data=2, fsdp=4)
    params = placed(PARAMS, mesh, SHARDED)
    state = tx.init(params)
    specs = shrewjax.state_specs(state)
    step = in_jit(tx, is_window) if how == "jit" else mapped_step(tx, gpus, specs)
    compiled = executed.compile_for_gpus(
        step, (params, state, *batches[0]), (SHARDED, specs, *[P(("data", "fsdp"))] * 3), gpus
    )
    run = executed.on_cpus(compiled)
    for i, (batch, wanted) in enumerate(zip(batches, expected, strict=True)):
        params, state = run(params, state, *batch)
        errors = executed.differences(params, wanted)
        assert max(errors.values()) < executed.TOLERANCE, f"call {i}: {errors}"


def around_sgd(rule):
    return optax.chain(rule, optax.sgd(0.1, momentum=0.9))


@pytest.mark.parametrize("how", ["jit", "shard_map"])
@pytest.mark.parametrize("name", ["clip_by_global_norm", *thorough(*RULES[1:])])
def test_windows_around_each_rule_are_those_of_large_batches(name, how):
    batches = list(micro_batches(CALLS))
    expected = large_batches(around_sgd(TRANSFORMATIONS[name]()), LENGTH, batches)
    rule = (TRANSFORMATIONS if how == "jit" else MAPPED)[name]()
    tx = shrewjax.accumulate(around_sgd(rule), LENGTH, sum_over=None if how == "jit" else "data")
    assert_trajectory(how, tx, batches, expected)


@pytest.mark.parametrize("how", ["jit", "shard_map"])
def test_a_micro_batch_with_a_nan_on_one_device_is_dropped_on_all(how):
    batches = list(micro_batches(CALLS))
    empty = [jax.tree.map(np.zeros_like, batch) if i == 1 else batch for i, batch in enumerate(batches)]
    expected = large_batches(around_sgd(optax.identity()), LENGTH, empty)
    batches[1][0][5, 0], batches[1][2][5] = np.nan, 1
    sum_over = None if how == "jit" else "data"
    tx = shrewjax.accumulate(around_sgd(optax.identity()), LENGTH, sum_over=sum_over, nonfinite="drop_micro_batch")
    assert_trajectory(how, tx, batches, expected)


@pytest.mark.parametrize("name", ["skip_nonfinite", *thorough("skip_on_spike")])
def test_a_guard_skips_a_bad_step_and_leaves_no_trace_of_it(name):
    bad, batches = 4, list(micro_batches(CALLS))
    expected = list(large_batches(around_sgd(optax.identity()), 1, [*batches[:bad], *batches[bad + 1 :]]))
    expected.insert(bad, expected[bad - 1])
    batches[bad][1][5], batches[bad][2][5] = np.nan if name == "skip_nonfinite" else 1e6, 1
    inner = around_sgd(optax.identity())
    guard = {
        "skip_nonfinite": shrewjax.skip_nonfinite(inner),
        "skip_on_spike": shrewjax.skip_on_spike(inner, warmup_steps=2, history_length=8, max_zscore=100.0),
    }[name]
    assert_trajectory("jit", guard, batches, expected, is_window=False)
