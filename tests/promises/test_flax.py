"""`shrewjax.flax` does what Flax's own classes do around `optax.MultiSteps`, and what K calls by hand do."""

import functools

import flax.jax_utils
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import linen, nnx
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from helpers import assert_close, bits, distance, mesh_of
from nnx_steps import MODES, in_mode, of_states
from speed import quick_jit, users_jit

import shrewjax
import shrewjax.flax

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("as_users_have_it")]

X = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
Y = np.arange(12, dtype=np.float32) / 6


class Net(nnx.Module):
    """Dropout, batch statistics, a low-rank layer and a count of calls."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        # Without a bias: before a normalization its gradient is rounding noise.
        self.linear = nnx.Linear(5, 7, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(7, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.lora = nnx.LoRA(7, 2, 1, rngs=rngs)
        self.lora.lora_b[...] = jnp.ones((2, 1))
        self.calls = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.calls[...] += 1
        return self.lora(self.dropout(self.norm(self.linear(x))))[:, 0]


def mean_loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def loss_and_largest(model, x, y):
    errors = (model(x) - y) ** 2
    return jnp.mean(errors), {"largest": jnp.max(errors), "rows": len(x)}


def step_of(change, *nodes):
    """A compiled function of arrays that changes the nodes, and returns its result."""
    call = of_states(lambda nodes, *args: change(*nodes, *args), nodes)

    def step(*args):
        result, state = call(nnx.state(nodes), *args)
        nnx.update(nodes, state)
        return result

    return step


def state_without_keys(model):
    return nnx.state(model, nnx.Not(nnx.RngKey))


# --- the optimizer ----------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(optax.linear_schedule(1e-2, 0.0, 5)),
    "clip and adamw": optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2)),
    "lamb": optax.lamb(1e-2),
    "lion": optax.lion(1e-2),
    "rmsprop": optax.rmsprop(1e-2),
    "adagrad": optax.adagrad(1e-1),
    "adafactor": optax.adafactor(1e-2),
    "nadam": optax.nadam(1e-2),
    "radam": optax.radam(1e-2),
    "novograd": optax.novograd(1e-2),
}


@pytest.mark.combinations
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trajectory_is_that_of_an_nnx_optimizer_around_multi_steps(name):
    """With dropout and batch statistics. One of the optimizers trains the low-rank layer alone."""
    wrt = nnx.LoRAParam if name == "adam" else nnx.Param
    models = Net(), Net()
    ours = shrewjax.flax.Optimizer(models[0], shrewjax.accumulate(OPTIMIZERS[name], 2), wrt=wrt)
    theirs = nnx.Optimizer(models[1], optax.MultiSteps(OPTIMIZERS[name], 2).gradient_transformation(), wrt=wrt)

    def both(model, ours, its, theirs, x, y):
        for net, optimizer in ((model, ours), (its, theirs)):
            grads = nnx.grad(mean_loss, argnums=nnx.DiffState(0, wrt))(net, x, y)
            optimizer.update(net, grads)

    step = step_of(both, models[0], ours, models[1], theirs)
    for i in range(6):
        rows = np.arange(4) + 4 * (i % 3)
        step(X[rows], Y[rows])
    assert_close(*map(state_without_keys, models), rtol=1e-6, atol=1e-6)
    moved = jax.tree.map(lambda a, b: jnp.any(a != b), nnx.state(models[0], wrt), nnx.state(Net(), wrt))
    assert any(jax.tree.leaves(moved))
    assert ours.step[...] == theirs.step[...] == 6
    assert isinstance(ours, nnx.Optimizer)


def test_update_takes_weight_flush_and_value_and_returns_what_was_measured(mode):
    model = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0))
    start = np.asarray(model.kernel[...])
    optimizer = shrewjax.flax.Optimizer(model, shrewjax.accumulate(optax.sgd(1.0), 9), wrt=nnx.Param)

    def update(model, optimizer, number, weight, flush):
        grads = jax.tree.map(lambda p: jnp.full_like(p, number), nnx.state(model, nnx.Param))
        return optimizer.update(model, grads, weight=weight, flush=flush, value=10 * number)

    step = step_of(update, model, optimizer)
    metrics = step(2.0, 3, False)
    assert not metrics["accumulate/applied"]
    np.testing.assert_array_equal(model.kernel[...], start)
    metrics = step(6.0, 1, True)
    assert metrics["accumulate/applied"]
    assert metrics["accumulate/windows"] == optimizer.opt_state.windows[...] == 1
    np.testing.assert_allclose(metrics["accumulate/value"], 30)
    np.testing.assert_allclose(model.kernel[...], start - 3, rtol=1e-6)


def test_open_call_in_a_donated_nnx_jit_holds_no_more_than_the_model_and_a_sum():
    """The program that adds gradients to a sum by hand, with the same model, is the measure."""
    model = nnx.Sequential(*(nnx.Linear(256, 256, rngs=nnx.Rngs(i)) for i in range(4)))
    size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
    tx = shrewjax.accumulate(optax.chain(shrewjax.clip_by_global_norm(1.0), optax.adamw(1e-3)), 8)

    def held(optimizer, add):
        nodes = model, optimizer
        graph, state = nnx.split(nodes)

        def step(state, x):
            model, optimizer = nnx.merge(graph, state)
            add(model, optimizer, nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model))
            return nnx.state((model, optimizer))

        program = users_jit(step, donate_argnums=0).lower(state, jnp.ones((2, 256))).compile()
        return program.memory_analysis().temp_size_in_bytes / size

    def by_hand(model, optimizer, grads):
        total = optimizer.opt_state.gradient_sum
        nnx.update(total, jax.tree.map(jnp.add, *map(shrewjax.flax._arrays, (total, grads))))

    flax_own, ours = nnx.Optimizer(model, tx, wrt=nnx.Param), shrewjax.flax.Optimizer(model, tx, wrt=nnx.Param)
    update = lambda model, optimizer, grads: optimizer.update(model, grads) and None  # noqa: E731
    floor, found = held(flax_own, by_hand), held(ours, update)
    if jax.__version_info__ < (0, 9):
        pytest.skip("XLA:CPU of jaxlib 0.8 copies the parameters around any conditional")
    assert found <= floor + 0.05
    assert held(flax_own, update) > floor + 0.4  # the measure sees a tree of updates


def test_fsdp_keeps_every_leaf_where_it_was_placed():
    mesh = mesh_of(data=8)
    sharded = jax.sharding.NamedSharding(mesh, jax.P("data"))
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    nnx.update(model, jax.device_put(nnx.state(model), sharded))
    tx = shrewjax.accumulate(optax.chain(shrewjax.clip_by_global_norm(0.5), optax.sgd(1e-2, momentum=0.9)), 2)
    optimizer = shrewjax.flax.Optimizer(model, tx, wrt=nnx.Param)
    expected = jax.tree.map(lambda x: x.sharding, nnx.state((model, optimizer)))
    assert optimizer.opt_state.gradient_sum["kernel"][...].sharding.spec == jax.P("data")

    @nnx.jit(donate_argnames=("model", "optimizer"))
    def step(model, optimizer, x):
        value, grads = shrewjax.flax.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2), 2)(model, x)
        optimizer.update(model, grads)
        return value

    for _ in range(3):
        step(model, optimizer, jax.device_put(jnp.ones((32, 16)), sharded))
    found = nnx.state((model, optimizer))
    for (path, sharding), x in zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(found), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim) or not x.ndim, jax.tree_util.keystr(path)


def arrays_of(nodes):
    """By their paths. Keys are numbers, which every version of Orbax saves."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    leaves = jax.tree.leaves_with_path(nnx.state(nodes))
    return {jax.tree_util.keystr(path): jax.random.key_data(x) if is_key(x) else x for path, x in leaves}


def test_saved_in_mid_window_model_and_optimizer_go_on_bit_identically_in_others(tmp_path):
    tx = shrewjax.accumulate(optax.chain(shrewjax.clip_by_global_norm(0.5), optax.adamw(0.1)), 3)

    def trained(nodes, steps):
        def update(model, optimizer, x, y):
            _, grads = shrewjax.flax.accumulated_value_and_grad(mean_loss, 2)(model, x, y)
            optimizer.update(model, grads, weight=len(x))

        step = step_of(update, *nodes)
        for i in steps:
            step(np.roll(X, i, axis=0), Y)
        return arrays_of(nodes)

    whole, saved, other = ((model, shrewjax.flax.Optimizer(model, tx, wrt=nnx.Param)) for model in map(Net, (0, 0, 1)))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "nodes", trained(saved, range(4)))
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "nodes", arrays_of(other))
    assert int(saved[1].opt_state.micro_step[...]) == 1
    leaves, structure = jax.tree.flatten(nnx.state(other))
    with_keys = [
        jax.random.wrap_key_data(new) if jnp.issubdtype(old.dtype, jax.dtypes.prng_key) else new
        for old, new in zip(leaves, restored.values(), strict=True)
    ]
    nnx.update(other, jax.tree.unflatten(structure, with_keys))
    assert bits(trained(other, range(4, 7))) == bits(trained(whole, range(7)))


# --- the train state --------------------------------------------------------------------------------------------


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(linen.tanh(linen.Dense(4)(x)))[:, 0]


NET = LinenNet()


@functools.cache
def variables():
    return NET.init(jax.random.key(0), X[:1])["params"]


def grads_of(params, rows):
    x, y = jnp.asarray(X)[rows], jnp.asarray(Y)[rows]
    return jax.grad(lambda params: jnp.mean((NET.apply({"params": params}, x) - y) ** 2))(params)


@pytest.mark.parametrize("name", ["sgd", "adafactor", "lion"])
def test_trajectory_is_that_of_linens_train_state_around_multi_steps_or_accumulate(name):
    inner = OPTIMIZERS[name]
    states = [
        cls.create(apply_fn=NET.apply, params=variables(), tx=tx)
        for cls, tx in (
            (shrewjax.flax.TrainState, shrewjax.accumulate(inner, 2)),
            (TrainState, optax.MultiSteps(inner, 2).gradient_transformation()),
            (TrainState, shrewjax.accumulate(inner, 2)),
        )
    ]

    @quick_jit
    def step(states, rows):
        return [state.apply_gradients(grads=grads_of(state.params, rows)) for state in states]

    for i in range(6):
        states = step(states, np.arange(2 * i, 2 * i + 2))
    for state in states[1:]:
        assert_close(states[0].params, state.params, rtol=1e-6, atol=1e-6)
    assert states[0].step == states[1].step == 6
    assert bits(states[0].params) != bits(variables())


def test_apply_gradients_of_a_train_state_takes_weight_flush_value_and_fields():
    class WithScale(shrewjax.flax.TrainState):
        loss_scale: DynamicScale

    tx = shrewjax.accumulate(optax.sgd(1.0), 9)
    state = WithScale.create(apply_fn=None, params={"w": jnp.zeros(2)}, tx=tx, loss_scale=DynamicScale())
    assert isinstance(state, TrainState)
    state = state.apply_gradients(grads={"w": jnp.full(2, 2.0)}, weight=3, value=20.0)
    other = DynamicScale(scale=jnp.float32(4.0))
    state = state.apply_gradients(grads={"w": jnp.full(2, 6.0)}, flush=True, value=60.0, loss_scale=other)
    np.testing.assert_allclose(state.params["w"], [-3, -3])
    assert (state.step, state.opt_state.windows, state.opt_state.loss) == (2, 1, 30)
    assert state.loss_scale.scale == 4
    with pytest.raises(TypeError, match="weights"):
        state.apply_gradients(grads={"w": jnp.zeros(2)}, weights=3)


def test_train_state_without_a_value_hands_none_on():
    """`reduce_on_plateau` needs one, and says so."""
    state = shrewjax.flax.TrainState.create(
        apply_fn=None, params={"w": jnp.zeros(2)}, tx=optax.contrib.reduce_on_plateau()
    )
    with pytest.raises(TypeError, match="value"):
        state.apply_gradients(grads={"w": jnp.ones(2)})
    state.apply_gradients(grads={"w": jnp.ones(2)}, value=jnp.float32(1))


def test_train_state_is_saved_to_bytes_and_replicated_in_mid_window():
    create = functools.partial(
        shrewjax.flax.TrainState.create,
        apply_fn=NET.apply,
        params=variables(),
        tx=shrewjax.accumulate(optax.adam(1e-2), 2),
    )
    step = quick_jit(lambda state, rows: state.apply_gradients(grads=grads_of(state.params, rows), weight=2))
    saved = step(create(), np.arange(2))
    assert int(saved.opt_state.micro_step) == 1
    restored = flax.serialization.from_bytes(create(), flax.serialization.to_bytes(saved))
    assert bits(step(restored, np.arange(2, 4))) == bits(step(saved, np.arange(2, 4)))
    replicated = flax.jax_utils.unreplicate(flax.jax_utils.replicate(saved, jax.devices()[:2]))
    assert bits(replicated) == bits(saved)


def test_parameters_that_their_gradient_overwrites_are_overwritten_as_in_flax():
    name = "_overwrite_with_gradient"
    params = {"params": {"w": jnp.zeros(2)}, name: {"scale": jnp.ones(())}}
    grads = {"params": {"w": jnp.ones(2)}, name: {"scale": jnp.full((), 7.0)}}
    found, expected = (
        cls.create(apply_fn=None, params=params, tx=optax.sgd(0.5)).apply_gradients(grads=grads).params
        for cls in (shrewjax.flax.TrainState, TrainState)
    )
    assert found[name]["scale"] == 7
    assert_close(found, expected, rtol=0)


# --- accumulated_value_and_grad ---------------------------------------------------------------------------------------

K = 4


def by_hand(model, x, y, wrt, kept=range(K)):
    """Calls of `nnx.value_and_grad`, one after another, and their means."""
    grad = nnx.value_and_grad(loss_and_largest, argnums=nnx.DiffState(0, wrt), has_aux=True)
    step = step_of(lambda model, x, y: grad(model, x, y), model)
    results, grads = zip(*(step(x[i::K], y[i::K]) for i in kept), strict=True)
    values, auxes = zip(*results, strict=True)
    mean = lambda *values: np.mean(np.float64(values), axis=0)  # noqa: E731
    return (mean(*values), max(aux["largest"] for aux in auxes)), jax.tree.map(mean, *grads)


@pytest.mark.parametrize("wrt", [nnx.Param, nnx.LoRAParam], ids=["all", "low rank"])
def test_value_gradients_aux_and_state_are_those_of_k_calls_by_hand(mode, wrt):
    ours, theirs = Net(), Net()
    grad = shrewjax.flax.accumulated_value_and_grad(
        loss_and_largest, K, wrt=wrt, has_aux=True, aux_reduction={"largest": "max", "rows": "sum"}
    )
    (value, aux), grads = step_of(lambda model, x, y: grad(model, x, y), ours)(X, Y)
    with in_mode("graph"):  # which has DiffState
        (expected, largest), expected_grads = by_hand(theirs, X, Y, wrt)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(aux["largest"], largest, rtol=1e-6)
    assert aux["rows"] == len(X)
    assert jax.tree.structure(grads) == jax.tree.structure(expected_grads)
    assert_close(grads, expected_grads, rtol=1e-6, atol=1e-6)
    assert_close(state_without_keys(ours), state_without_keys(theirs), rtol=1e-6, atol=1e-7)
    assert ours.calls[...] == ours.dropout.rngs.count[...] == theirs.dropout.rngs.count[...] == K
    assert bits(jax.random.key_data(ours.dropout.rngs.key[...])) == bits(
        jax.random.key_data(theirs.dropout.rngs.key[...])
    )


def test_batch_statistics_that_would_be_lost_are_an_error():
    def loss(model, x):
        return jnp.mean(model(x))

    with (
        in_mode("graph"),
        pytest.raises(ValueError, match=r"Call the function of this name in shrewjax.flax"),
    ):
        nnx.grad(shrewjax.micro_batched(loss, K))(nnx.BatchNorm(X.shape[1], rngs=nnx.Rngs(0)), X)


def test_dropped_micro_batch_leaves_the_models_state_alone():
    ours, theirs = Net(), Net()
    x = np.where(np.arange(len(X))[:, None] % K == 2, np.inf, X).astype(np.float32)
    grad = shrewjax.flax.accumulated_value_and_grad(mean_loss, K, nonfinite="drop_micro_batch")
    value, grads = step_of(lambda model, *args: grad(model, *args), ours)(x, Y)
    (expected, _), expected_grads = by_hand(theirs, X, Y, nnx.Param, kept=(0, 1, 3))
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert_close(grads, expected_grads, rtol=1e-6, atol=1e-6)
    assert_close(state_without_keys(ours), state_without_keys(theirs), rtol=1e-6, atol=1e-7)


def test_a_tuple_of_model_and_rngs_positions_and_keywords_are_those_of_fun(mode):
    """Flax's other way to draw: the loss takes the model and the keys. Arguments keep their positions."""
    model, rngs = nnx.Linear(5, 1, rngs=nnx.Rngs(0)), nnx.Rngs(3)

    def loss(both, x, scale, key, y, *, power):
        model, rngs = both
        noise = jax.random.normal(rngs(), y.shape) + jax.random.uniform(key, y.shape)
        return jnp.mean((model(x)[:, 0] + scale * noise - y) ** power)

    both, key = (model, rngs), jax.random.key(5)
    grad = shrewjax.flax.accumulated_value_and_grad(loss, K, batch_argnums=(1, -1), rng_argnums=3)
    value, grads = step_of(lambda *args: grad(args[:2], *args[2:], power=2), *both)(X, 2.0, key, Y)

    copied, keys = nnx.Linear(5, 1, rngs=nnx.Rngs(0)), nnx.Rngs(3)
    folded = [jax.random.fold_in(key, i) for i in range(K)]
    expected = [loss((copied, keys), X[i::K], 2.0, folded[i], Y[i::K], power=2) for i in range(K)]
    np.testing.assert_allclose(value, np.mean(expected), rtol=1e-6)
    assert rngs.default.count[...] == keys.default.count[...]
    assert grads[0]["kernel"].shape == (5, 1)


# --- value_and_grad, micro_batched ------------------------------------------------------------------------------


def with_running_averages():
    model = Net()
    model.norm.use_running_average = True
    model.norm.mean[...] = jnp.linspace(-1.0, 1.0, 7)
    return model


def masked_loss(model, x, y):
    errors = (model(x) - y) ** 2
    kept = y < 1.5
    return jnp.sum(errors * kept) / jnp.sum(kept), {"largest": jnp.max(errors), "each": errors, "rows": len(x)}


def of_micro_batched(*args, wrt=nnx.Param, **options):
    """`nnx.value_and_grad` of `micro_batched`, in the place of `value_and_grad`."""
    part = shrewjax.flax.micro_batched(*args, wrt=wrt, **options)
    return nnx.value_and_grad(part, argnums=nnx.DiffState(0, wrt), has_aux=options.get("has_aux", False))


def of_whole_batch(fun, micro_batches, *, wrt=nnx.Param, **options):
    return nnx.value_and_grad(fun, argnums=nnx.DiffState(0, wrt), **options)


def after_a_step(make, fun, model, x, **options):
    """What a gradient function returns, and the model's state after it, with its counts of keys."""
    grad = make(fun, wrt=options.pop("wrt", nnx.Param), **options)
    returned, grads = step_of(lambda model, x: grad(model, x, Y), model)(x)
    return returned, jax.tree.leaves(grads), state_without_keys(model), model.dropout.rngs.count[...]


@pytest.mark.parametrize(("wrt", "micro_batches"), [(nnx.Param, 5), (nnx.LoRAParam, 4)], ids=["all", "low rank"])
def test_a_divided_loss_has_the_values_gradients_and_state_of_one_call_of_the_whole_batch(mode, wrt, micro_batches):
    """Dropout draws what it draws for the whole batch, and its stream advances once. Five do not divide twelve."""
    options = {"wrt": wrt, "micro_batches": micro_batches, "has_aux": True}
    with in_mode("graph"):  # which has DiffState
        expected = after_a_step(of_whole_batch, masked_loss, with_running_averages(), X, **options)
    found = after_a_step(shrewjax.flax.value_and_grad, masked_loss, with_running_averages(), X, **options)
    assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert found[3] == 1
    if mode == "graph":
        found = after_a_step(of_micro_batched, masked_loss, with_running_averages(), X, **options)
        assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_in_bfloat16_a_divided_loss_is_as_near_to_float32_as_that_of_the_whole_batch():
    def grads(make, dtype):
        model = with_running_averages()
        nnx.update(model, jax.tree.map(lambda x: x.astype(dtype), nnx.state(model, nnx.Param)))
        (value, _), leaves, *_ = after_a_step(make, masked_loss, model, X.astype(dtype), micro_batches=4, has_aux=True)
        return [value, *leaves]

    expected = grads(of_whole_batch, jnp.float32)
    found, whole = (grads(make, jnp.bfloat16) for make in (shrewjax.flax.value_and_grad, of_whole_batch))
    assert [x.dtype for x in found] == [x.dtype for x in whole]
    assert distance(found, expected) < max(1.5 * distance(whole, expected), 2**-8)


def test_a_divided_loss_updates_the_state_without_a_derivative_too():
    models = with_running_averages(), with_running_averages()
    functions = shrewjax.flax.micro_batched(mean_loss, K), mean_loss
    found, expected = (
        step_of(lambda model, x, y, run=run: run(model, x, y), model)(X, Y)
        for run, model in zip(functions, models, strict=True)
    )
    assert_close(found, expected, rtol=1e-6)
    assert_close(*map(state_without_keys, models), rtol=1e-6)
    assert models[0].calls[...] == models[0].dropout.rngs.count[...] == 1


def test_batch_norm_in_training_is_refused_with_its_line_and_the_model_stays_as_it_was(mode):
    message = (
        r"but examples mix at test_flax\.py:\d+: return self\.lora\(self\.dropout\(self\.norm\(.* For batch norm, "
        r"call accumulated_value_and_grad"
    )
    for make in (shrewjax.flax.value_and_grad, shrewjax.flax.micro_batched):
        model = Net()
        with pytest.raises(ValueError, match=message):
            make(mean_loss, K)(model, X, Y)
        assert bits(state_without_keys(model)) == bits(state_without_keys(Net()))


# --- linen ------------------------------------------------------------------------------------------------------


class Blocks(linen.Module):
    """Scanned, rematerialized layers with dropout, a norm with running averages, a tied embedding."""

    @linen.compact
    def __call__(self, tokens):
        embed = linen.Embed(11, 6, name="embed")
        block = linen.scan(
            linen.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=3
        )
        x, _ = block(name="blocks")(embed(tokens), None)
        x = linen.BatchNorm(use_running_average=True, name="norm")(x)
        return embed.attend(linen.LayerNorm()(x))


class Block(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        attend = linen.MultiHeadDotProductAttention(2, qkv_features=6)
        x = x + attend(linen.LayerNorm()(x), mask=linen.make_causal_mask(x[..., 0]))
        return x + linen.Dropout(0.3, deterministic=False)(linen.Dense(6)(linen.gelu(linen.Dense(12)(x)))), None


def test_a_language_model_in_linen_has_the_whole_batchs_loss_aux_gradients_and_draws():
    """Padded tokens, keys by keyword, a fixed collection of variables: `apply` as users call it. K is 3 for 10."""
    rng = np.random.default_rng(1)
    tokens, lengths = rng.integers(0, 11, (10, 8)), rng.integers(2, 8, 10)
    net = Blocks()
    variables = quick_jit(net.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, tokens)
    fixed = {"batch_stats": jax.tree.map(lambda x: x + 0.1, variables["batch_stats"])}

    def loss(params, tokens, lengths, rngs):
        logits = net.apply({"params": params, **fixed}, tokens, rngs=rngs)
        errors = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        mask = jnp.arange(1, 8) < lengths[:, None]
        per_example = jnp.sum(errors * mask, axis=1)
        return jnp.sum(per_example) / jnp.sum(mask), {"tokens": jnp.sum(mask), "perplexity": per_example}

    args = variables["params"], jnp.asarray(tokens), jnp.asarray(lengths), {"dropout": jax.random.key(2)}
    expected = quick_jit(jax.value_and_grad(loss, has_aux=True))(*args)
    found = quick_jit(shrewjax.value_and_grad(loss, 3, has_aux=True))(*args)
    assert_close(found, expected, rtol=1e-4, atol=1e-6)


# --- both ways --------------------------------------------------------------------------------------------------


def test_a_shared_variable_has_one_gradient():
    class Tied(nnx.Module):
        def __init__(self):
            self.first = nnx.Linear(5, 5, rngs=nnx.Rngs(0))
            self.second = self.first

        def __call__(self, x):
            return jnp.sum(self.second(jnp.tanh(self.first(x))), axis=1)

    ours = Tied()
    _, expected = step_of(lambda *args: nnx.value_and_grad(mean_loss)(*args), ours)(X, Y)
    for make in (shrewjax.flax.value_and_grad, shrewjax.flax.accumulated_value_and_grad):
        _, grads = step_of(lambda *args, make=make: make(mean_loss, K)(*args), ours)(X, Y)
        assert len(jax.tree.leaves(grads)) == 2
        assert_close(grads, expected, rtol=1e-5, atol=1e-6)


# --- errors -----------------------------------------------------------------------------------------------------


def traced(fun, *, make=shrewjax.flax.accumulated_value_and_grad, **options):
    graph, state = nnx.split(with_running_averages())
    return jax.eval_shape(lambda s: make(fun, K, **options)(nnx.merge(graph, s), X, Y), state)


def change_parameter(model, x, y):
    model.linear.kernel[...] *= 2
    return mean_loss(model, x, y)


def add(model, x, y):
    model.seen = nnx.Intermediate(x)
    return mean_loss(model, x, y)


def remove(model, x, y):
    loss = mean_loss(model, x, y)
    del model.calls
    return loss


def change_attribute(model, x, y):
    model.dropout.rate = 0.25
    return mean_loss(model, x, y)


def pop(model, x, y):
    loss = add(model, x, y)
    seen = nnx.pop(model, nnx.Intermediate)
    return loss, jnp.mean(seen["seen"][...])


@pytest.mark.parametrize(
    ("fun", "message"),
    [
        (change_parameter, r"fun must not change the variable \['linear'\]\['kernel'\] in wrt\. Leave"),
        (add, r"\['seen'\] was missing and is float32 .*nnx.pop"),
        (remove, r"\['calls'\] was int32 of shape \(\) and is missing"),
        (change_attribute, "Python attribute.*before the call"),
    ],
)
def test_change_that_would_be_lost_is_an_error(fun, message):
    for make in (shrewjax.flax.accumulated_value_and_grad, shrewjax.flax.value_and_grad, shrewjax.flax.micro_batched):
        with pytest.raises(ValueError, match=message):
            traced(fun, make=make)


def test_a_weight_that_reads_state_is_an_error_with_skip_empty():
    with pytest.raises(ValueError, match=r"weight_fn must not read the carry .*state outside of wrt"):
        traced(mean_loss, weight_fn=lambda model, x, y: model.calls[...], skip_empty=True)


@pytest.mark.skipif(
    len(MODES) == 1, reason="older versions of Flax do not forget the names of variables that are popped"
)
def test_added_variables_may_be_popped_and_returned():
    for make in (shrewjax.flax.accumulated_value_and_grad, shrewjax.flax.value_and_grad):
        (_, aux), _ = traced(pop, has_aux=True, make=make)
        assert aux.shape == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aux_reduction": "max"}, "aux_reduction='max' needs has_aux=True"),
        ({"reduction": "average"}, "reduction"),
        ({"weight_fn": 3}, "weight_fn"),
        ({"skip_empty": True}, "skip_empty=True needs weight_fn="),
    ],
)
def test_wrong_argument_raises_before_the_call(options, message):
    with pytest.raises(ValueError, match=message):
        shrewjax.flax.accumulated_value_and_grad(mean_loss, K, **options)
