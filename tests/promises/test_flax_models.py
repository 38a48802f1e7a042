"""Whole batches in one call, of models as users have them: transformed, scanned, with variables that hold trees."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_close
from nnx_steps import compiled
from speed import users_jit

import shrewjax.flax

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("as_users_have_it")]

K = 4
X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
Y = np.arange(8, dtype=np.float32) / 4


def mean_loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def results(grad, model):
    """What a compiled call returns, and the model's state after it."""
    return compiled(lambda model: grad(model, X, Y), model)


BOTH = shrewjax.flax.value_and_grad, shrewjax.flax.accumulated_value_and_grad


def assert_that_of_the_whole_batch(model, loss=mean_loss, micro_batches=K):
    """The model's state is that of one call of Flax's function, and its gradients those of ours, too."""

    def both(model, *args):
        ours = shrewjax.flax.value_and_grad(loss, micro_batches)
        return ours(model, *args), shrewjax.flax.accumulated_value_and_grad(loss, K)(nnx.clone(model), *args)

    found, state = results(both, model)
    (expected, expected_grads), expected_state = results(nnx.value_and_grad(loss), model)
    for value, grads in found:
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        assert jax.tree.structure(grads) == jax.tree.structure(expected_grads)
        assert_close(grads, expected_grads, rtol=1e-5, atol=1e-6)
    assert_close(state, expected_state, rtol=0)


# --- transformed parts ------------------------------------------------------------------------------------------


class Net(nnx.Module):
    """A layer that is called by `through`, a transformation, and a head."""

    def __init__(self, through=lambda layer, x: layer(x)):
        rngs = nnx.Rngs(0)
        self.layer, self.head = nnx.Linear(4, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
        self.through = through

    def __call__(self, x):
        return self.head(jnp.tanh(self.through(self.layer, x)))[:, 0]


class WithMethod(Net):
    @nnx.remat
    def block(self, x):
        return self.layer(x)

    def __call__(self, x):
        return self.head(jnp.tanh(self.block(x)))[:, 0]


class Scanned(nnx.Module):
    """Three layers, stacked along an axis of their parameters, and rematerialized."""

    def __init__(self, axis=0):
        self.axes = nnx.StateAxes({nnx.Param: axis, ...: 0})
        stack = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs), out_axes=self.axes)
        self.layers = nnx.split_rngs(splits=3)(stack)(nnx.Rngs(0))

    def __call__(self, x):
        block = nnx.remat(lambda layer, x: jnp.tanh(layer(x)))
        return nnx.scan(block, in_axes=(self.axes, nnx.Carry), out_axes=nnx.Carry)(self.layers, x)[:, 0]


def call(layer, x):
    return layer(x)


def in_a_loop(layer, x):
    def turn(_, both):
        layer, x = both
        return layer, nnx.remat(call)(layer, x)

    return nnx.fori_loop(0, 2, turn, (layer, x))[1]


MODELS = {
    "remat": lambda: Net(nnx.remat(call)),
    "remat of a method": WithMethod,
    "jit": lambda: Net(nnx.jit(call)),
    "jit in remat": lambda: Net(nnx.remat(nnx.jit(call))),
    "vmap over examples": lambda: Net(nnx.vmap(nnx.remat(call), in_axes=(None, 0))),
    "one of two branches": lambda: Net(lambda layer, x: nnx.cond(x[0, 0] > 9, call, nnx.remat(call), layer, x)),
    "loop": lambda: Net(in_a_loop),
    "scanned": Scanned,
    "scanned along axis 1": lambda: Scanned(1),
}


@pytest.mark.combinations
@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_transformed_parts_has_the_whole_batchs_gradients(name):
    assert_that_of_the_whole_batch(MODELS[name](), micro_batches=3 if name == "scanned" else K)


@pytest.mark.parametrize("transform", [nnx.remat, nnx.jit])
def test_a_loss_may_be_transformed_as_a_whole(transform):
    assert_that_of_the_whole_batch(Net(), transform(mean_loss))


def test_state_of_a_rematerialized_layer_goes_from_micro_batch_to_micro_batch_or_is_that_of_one_call():
    class Counting(nnx.Linear):
        def __call__(self, x):
            self.calls[...] += 1
            return super().__call__(x)

    model = Net(nnx.remat(call))
    model.layer = Counting(4, 4, rngs=nnx.Rngs(0))
    model.layer.calls = nnx.BatchStat(jnp.array(0))
    counts = [results(make(mean_loss, K), model)[1]["layer"]["calls"][...] for make in BOTH]
    assert counts == [1, K]


def doubled(layer, x):
    layer.kernel[...] *= 2
    return layer(x)


def swapped(layer, x):
    layer.kernel[...], layer.other[...] = layer.other[...], layer.kernel[...]
    return layer(x)


@pytest.mark.parametrize("change", [doubled, swapped])
@pytest.mark.parametrize("transform", [nnx.remat, nnx.jit])
def test_a_change_of_a_parameter_in_a_transformed_part_is_an_error(change, transform):
    model = Net(transform(change))
    model.layer.other = nnx.Param(jnp.ones((4, 4)))
    for make in BOTH:
        with pytest.raises(
            ValueError, match=r"fun must not change the variable \['layer'\]\['kernel'\] in wrt\. Leave"
        ):
            make(mean_loss, K)(model, X, Y)


def test_a_model_that_returns_other_tracers_is_traced_once_more():
    def calls_of(make, model):
        calls = []

        def loss(model, x, y):
            calls.append(1)
            return mean_loss(model, x, y)

        results(make(loss, K), model)
        return len(calls)

    for make in BOTH:
        assert calls_of(make, MODELS["remat"]()) == calls_of(make, Net()) + 1
    assert calls_of(shrewjax.flax.value_and_grad, Net()) == 1


def test_frozen_layers_of_a_scan_are_not_copied():
    """`nnx.value_and_grad` holds a copy of them: a scan stacks what each turn returns."""

    class Adapted(nnx.Module):
        def __init__(self, rngs):
            self.frozen = nnx.Linear(256, 256, use_bias=False, rngs=rngs)
            self.adapter = nnx.LoRA(256, 1, 256, rngs=rngs)

        def __call__(self, x):
            return jnp.tanh(self.frozen(x) + self.adapter(x))

    stack = nnx.vmap(Adapted, in_axes=0, out_axes=0)
    layers = nnx.split_rngs(splits=4)(stack)(nnx.Rngs(0))
    graph, state = nnx.split(layers)
    weights = layers.frozen.kernel[...].nbytes

    def loss(layers, x):
        block = nnx.remat(lambda layer, x: layer(x))
        return jnp.mean(nnx.scan(block, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(layers, x) ** 2)

    def held(grad):
        def step(state, x):
            merged = nnx.merge(graph, state)
            return grad(merged, x), nnx.state(merged)

        program = users_jit(step, donate_argnums=0).lower(state, jnp.ones((8, 256))).compile()
        return program.memory_analysis().temp_size_in_bytes / weights

    for make in BOTH:
        assert held(make(loss, K, wrt=nnx.LoRAParam)) < 0.5
    assert held(nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))) > 0.9  # the measure sees a copy


def test_padded_rows_count_in_batch_statistics_unless_the_norm_gets_the_mask():
    """Against statistics by NumPy of the rows that count, micro-batch by micro-batch."""

    class Normed(nnx.Module):
        def __init__(self, masked):
            self.norm, self.masked = nnx.BatchNorm(4, momentum=0.5, rngs=nnx.Rngs(0)), masked

        def __call__(self, x, mask):
            return jnp.sum(self.norm(x, mask=mask[:, None] if self.masked else None), axis=1)

    mask = np.arange(8) < 6
    x = np.where(mask[:, None], X, 100)

    def masked_loss(model, x, y, mask):
        return jnp.sum(jnp.where(mask, (model(x, mask) - y) ** 2, 0)) / jnp.sum(mask)

    def mean_after(masked):
        model = Normed(masked)
        grad = shrewjax.flax.accumulated_value_and_grad(
            masked_loss, 2, weight_fn=lambda model, x, y, mask: jnp.sum(mask)
        )
        _, state = results(lambda model, *_: grad(model, x, Y, mask), model)
        return np.asarray(state["norm"]["mean"][...])

    expected = 0
    for i in range(2):
        expected = 0.5 * expected + 0.5 * x[i::2][mask[i::2]].mean(axis=0)
    np.testing.assert_allclose(mean_after(True), expected, rtol=1e-5)
    assert np.all(mean_after(False) > 5)


def test_a_flush_that_is_a_python_bool_compiles_one_program():
    traced = []
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    optimizer = shrewjax.flax.Optimizer(model, shrewjax.accumulate(optax.sgd(0.1), 4), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x, flush):
        traced.append(flush)
        grads = nnx.grad(lambda model: jnp.mean(model(x)))(model)
        return optimizer.update(model, grads, flush=flush)

    applied = [bool(step(model, optimizer, X, flush=i == 2)["accumulate/applied"]) for i in range(4)]
    assert applied == [False, False, True, False]
    assert len(traced) == 1


# --- variables that hold trees ----------------------------------------------------------------------------------


class Caching(nnx.Module):
    """A linear map whose variables hold trees: its parameters and what it has seen."""

    def __init__(self, params, seen):
        self.params, self.seen = nnx.Param(params), nnx.Cache(seen)

    def __call__(self, x):
        self.seen.set_value(jax.tree.map(lambda s: s + 1, self.seen.get_value()))
        first, *others = jax.tree.leaves(self.params.get_value())
        return x @ first + sum(map(jnp.sum, others))


TREES = {
    "empty": {},
    "one": {"a": jnp.zeros(())},
    "two": {"a": jnp.zeros(()), "b": jnp.ones(2)},
    "nested": {"a": {"b": jnp.zeros(2)}, "c": ()},
    "a tuple": (jnp.zeros(2), jnp.ones(())),
}


holds_trees = pytest.mark.skipif(not hasattr(nnx.Variable, "set_value"), reason="Flax 0.12.0 and older hold arrays")


@holds_trees
@pytest.mark.parametrize("name", TREES)
def test_variables_may_hold_trees(name):
    model = Caching({"a": jnp.ones(4), "b": {"c": jnp.zeros(())}}, TREES[name])
    assert_that_of_the_whole_batch(model)
    for make, calls in zip(BOTH, (1, K), strict=True):
        (_, grads), state = results(make(mean_loss, K), model)
        assert grads["params"].get_value()["a"].shape == (4,)
        assert_close(state["seen"].get_value(), jax.tree.map(lambda s, calls=calls: s + calls, TREES[name]), rtol=0)


@holds_trees
def test_a_tree_that_grows_is_an_error_that_names_the_variable():
    def loss(model, x, y):
        model.seen.set_value({"new": jnp.zeros(())})
        return mean_loss(model, x, y)

    for make in BOTH:
        with pytest.raises(ValueError, match=r"\['seen'\]\['new'\] was missing"):
            make(loss, K)(Caching({"a": jnp.ones(4)}, {}), X, Y)


@pytest.mark.skipif(not hasattr(nnx, "WeightNorm"), reason="newer than Flax 0.12.0")
def test_weight_norm_which_writes_its_kernel_is_an_error_whose_remedy_gives_the_whole_batchs_gradients():
    layer = nnx.WeightNorm(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    written, copied = Net(), Net(lambda layer, x: nnx.clone(layer)(x))
    written.layer = copied.layer = layer
    (expected, expected_grads), _ = results(nnx.value_and_grad(mean_loss), written)
    for make in BOTH:
        with pytest.raises(ValueError, match=r"\['kernel'\] in wrt.*nnx\.clone\(layer\)\(x\)"):
            make(mean_loss, K)(written, X, Y)
        (value, grads), _ = results(make(mean_loss, K), copied)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        assert_close(grads, expected_grads, rtol=1e-5, atol=1e-6)
