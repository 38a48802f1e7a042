"""A state on a mesh: how it is sharded, and what comes of it on another number of devices."""

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from helpers import assert_close, lenient, mesh_of, placed, thorough
from jax.sharding import PartitionSpec as P
from speed import quick_jit

import shrewjax

SHAPE = (8, 3)
TX = shrewjax.accumulate(optax.trace(0.9), 3, sum_over="data")


def params_on(data, axis_type="Auto"):
    """Parameters that are sharded over another axis than the data."""
    mesh = mesh_of(axis_type, data=data, model=2)
    return placed(jnp.zeros(SHAPE), mesh, P("model"))


def test_specs_have_the_axis_of_the_rows_before_those_of_the_parameter():
    specs = shrewjax.state_specs(TX.init(params_on(4)))
    assert specs.gradient_sum == P(("data",), "model")
    assert specs.sum_of_weights == P(("data",))
    assert specs.inner_state.trace == P("model")
    assert specs.windows == P()
    of_rows = shrewjax.state_specs(TX.init(params_on(4)), axis_names={"data"})
    assert of_rows.gradient_sum == P(("data",), None)
    assert of_rows.inner_state.trace == P(None)
    over_both = placed(jnp.zeros(SHAPE), params_on(4).sharding.mesh, P(("data", "model")))
    assert shrewjax.state_specs(over_both, axis_names={"model"}) == P(("model",))
    assert shrewjax.state_specs({"counter": jnp.zeros(()), "number": 1.0}) == {"counter": P(), "number": P()}


@pytest.mark.parametrize("context", ["no context", "set_mesh", *thorough("set_mesh of the old one")])
@pytest.mark.parametrize(
    ("devices", "axis_type", "from_one"), [(2, "Auto", False), (1, "Explicit", False), *thorough((2, "Auto", True))]
)
def test_the_sum_of_the_rows_stays_and_all_of_it_is_in_the_first(devices, axis_type, from_one, context):
    """Also if a checkpoint was restored to one device, which need not be among those of `jax.set_mesh`."""
    rows = np.random.default_rng(0).integers(-9, 9, size=(4, *SHAPE)).astype(np.float32)
    old, new = (params_on(n, axis_type) for n in (4, devices))
    state, like = TX.init(old), TX.init(new)
    weights = jax.device_put(np.float32([1, 2, 3, 4]), state.sum_of_weights.sharding)
    state = state._replace(gradient_sum=jax.device_put(rows, state.gradient_sum.sharding), sum_of_weights=weights)
    trace = jax.device_put(rows[0], state.inner_state.trace.sharding)
    state = state._replace(micro_step=jnp.int32(2), inner_state=state.inner_state._replace(trace=trace))
    state = jax.device_put(state, jax.devices()[7]) if from_one else state
    contexts = {"no context": contextlib.nullcontext, "set_mesh": lambda: jax.set_mesh(new.sharding.mesh)}
    with contexts.get(context, lambda: jax.set_mesh(old.sharding.mesh))():
        moved = shrewjax.redistribute(state, like)
        assert (jax.sharding.get_abstract_mesh().axis_names == ()) == (context == "no context")
    others = np.zeros((devices - 1, *SHAPE))
    np.testing.assert_array_equal(moved.gradient_sum, [rows.sum(0), *others])
    np.testing.assert_array_equal(moved.sum_of_weights, [10] + [0] * (devices - 1))
    assert int(moved.micro_step) == 2
    np.testing.assert_array_equal(moved.inner_state.trace, rows[0])  # its first dimension has no rows
    assert [x.sharding for x in jax.tree.leaves(moved)] == [x.sharding for x in jax.tree.leaves(like)]


@pytest.mark.parametrize(("before", "after"), [(8, 4), *thorough((4, 8), (8, 1))])
def test_a_window_saved_by_orbax_goes_on_on_another_number_of_devices(before, after, tmp_path):
    """In mid-window, with uneven weights, against the weighted mean over rows and calls."""
    rng = np.random.default_rng(1)
    tx = shrewjax.accumulate(shrewjax.skip_nonfinite(optax.trace(0.9)), 3, sum_over="data")
    total, weights = np.zeros(3), 0.0

    def called(state, params, calls):
        nonlocal total, weights
        devices = state.sum_of_weights.shape[0]
        for _ in range(calls):
            rows, weight = rng.normal(size=(devices, 3)).astype("f"), rng.integers(0, 5, devices).astype("f")
            total, weights = total + weight @ rows.astype(float), weights + weight.sum()
            updates, state = tx.update(rows, state, params, weight=jnp.asarray(weight))
        return updates, state

    old, new = (placed(jnp.zeros(3), mesh_of(data=n), P()) for n in (before, after))
    _, state = called(tx.init(old), old, 2)
    on_new = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=new.sharding), state)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", on_new)
    moved = shrewjax.redistribute(restored, like=tx.init(new))
    updates, state = called(moved, new, 1)
    assert int(state.windows) == 1
    assert state.gradient_sum.shape == (after, 3)
    assert_close(updates, total / weights, rtol=1e-6)


@pytest.mark.parametrize("with_context", [False, *thorough(True)], ids=["no context", "set_mesh"])
@pytest.mark.parametrize("axis_type", ["Auto", *thorough("Explicit")])
@pytest.mark.parametrize("sum_over", ["data", *thorough(None)])
def test_a_step_compiles_once(axis_type, with_context, sum_over):
    """XLA compiles it. On an Explicit mesh JAX traces it again."""
    mesh = mesh_of(axis_type, data=4)
    inner = shrewjax.skip_on_spike(shrewjax.skip_nonfinite(lenient(optax.adam(0.1))))
    tx = shrewjax.accumulate(inner, 2, sum_over=sum_over)
    tx = tx if sum_over else shrewjax.skip_nonfinite(tx)  # a guard would select shardings that a bare window loses
    step = jax.jit(partial(shrewjax.apply_gradients, tx), donate_argnums=(1, 2))
    compiled = []
    with jax.set_mesh(mesh) if with_context else contextlib.nullcontext():
        params = placed({"w": jnp.ones((8, 3))}, mesh, P())
        state = tx.init(params)
        assert {x.sharding.mesh for x in jax.tree.leaves(state)} == {mesh}
        grads = jax.tree.map(lambda x: jnp.ones((4, *x.shape) if sum_over else x.shape), params)
        grads = placed(grads, mesh, P("data") if sum_over else P())
        jax.monitoring.register_event_duration_secs_listener(
            lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
        )
        for _ in range(4):
            params, state = step(grads, state, params)
    jax.monitoring.clear_event_listeners()
    assert len(compiled) == 1
    assert int(shrewjax.metrics(state)["accumulate/windows"]) == 2


def test_a_step_returns_each_array_with_the_spec_that_init_gave_it():
    """A `PartitionSpec` may end in None or not, and `jax.jit` tells the two apart."""
    mesh = mesh_of(data=4, model=2)
    inner = optax.chain(shrewjax.clip_by_leaf_norm_ema(stacked_axes=0), shrewjax.clip_by_norm_zscore(), optax.sgd(0.1))
    tx = shrewjax.accumulate(inner, 2, sum_over="data")
    step = jax.jit(partial(shrewjax.apply_gradients, tx), donate_argnums=(1, 2))
    with jax.set_mesh(mesh):
        params = placed(
            {"sharded": jnp.ones(SHAPE), "whole": jnp.ones(SHAPE)}, mesh, {"sharded": P("model", None), "whole": P()}
        )
        grads = placed(jax.tree.map(lambda x: jnp.ones((4, *x.shape)), params), mesh, P("data"))
        state = tx.init(params)
        before = {path: x.sharding for path, x in jax.tree.leaves_with_path(state)}
        for _ in range(2):
            params, state = step(grads, state, params)
            assert {path: x.sharding for path, x in jax.tree.leaves_with_path(state)} == before


INNERS = {
    "accumulate": lambda tx: shrewjax.accumulate(tx, 2),
    "guards in a window": lambda tx: shrewjax.accumulate(shrewjax.skip_on_spike(shrewjax.skip_nonfinite(tx)), 2),
    "a guard": shrewjax.skip_nonfinite,
    "a history": lambda tx: shrewjax.skip_on_spike(optax.chain(shrewjax.clip_by_leaf_norm_ema(), tx)),
    "layers": lambda tx: shrewjax.skip_nonfinite(optax.chain(*OF_LAYERS, tx)),
}
OF_LAYERS = (
    shrewjax.clip_by_leaf_norm_ema(stacked_axes=0),
    shrewjax.adaptive_grad_clip(0.1, stacked_axes=0),
)


FIRST = ("accumulate", "set_mesh")
OTHERS = [("accumulate", "beside an Auto axis"), ("accumulate", "no context"), ("layers", "set_mesh")]
OTHERS += [
    ("a history", "beside an Auto axis"),
    ("guards in a window", "beside an Auto axis"),
    ("a guard", "no context"),
]


@pytest.mark.combinations
@pytest.mark.parametrize(("name", "kind"), [FIRST, *thorough(*OTHERS)])
def test_a_state_may_be_sharded_finer_than_gradients_and_parameters_on_an_explicit_mesh(name, kind):
    """ZeRO, and the reverse. The numbers are those of one device, and no sharding changes."""
    mesh, with_context = mesh_of("Explicit", data=4), kind != "no context"
    if kind == "beside an Auto axis":  # where `jax.eval_shape` drops shardings
        kinds = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    tx = INNERS[name](lenient(optax.adam(0.1)))
    tree = {"w": jnp.linspace(-1, 1, 24).reshape(SHAPE), "b": jnp.ones(4)}
    whole, divided = (placed(tree, mesh, spec) for spec in (P(), P("data")))
    apply, update = (quick_jit(f) for f in (partial(shrewjax.apply_gradients, tx), tx.update))

    def steps(params, grads, state):
        for _ in range(2):
            updates, _ = update(grads, state, params)
            assert shardings(updates) == shardings(params)
            before, (params, state) = (params, state), apply(grads, state, params)
            assert shardings((params, state)) == shardings(before)
        return params

    expected = steps(tree, tree, tx.init(tree))
    with jax.set_mesh(mesh) if with_context else contextlib.nullcontext():
        for params, grads, like in (
            (divided, divided, divided),
            (whole, whole, divided),
            (whole, divided, divided),
            (divided, whole, divided),
            (whole, divided, whole),
        ):
            assert_close(steps(params, grads, tx.init(like)), expected, rtol=1e-6)


def shardings(tree):
    """The parts of each leaf's first dimension, because a `PartitionSpec` has several spellings."""
    return [x.addressable_shards[0].data.shape for x in jax.tree.leaves(tree)]


def test_init_under_jit_gives_each_device_its_row():
    mesh = mesh_of(data=4)
    params = placed(jnp.ones(SHAPE), mesh, P())
    with jax.set_mesh(mesh):
        state = jax.jit(TX.init)(params)
    assert state.gradient_sum.sharding.spec == TX.init(params).gradient_sum.sharding.spec
    assert state.sum_of_weights.addressable_shards[0].data.shape == (1,)


def test_a_window_without_rows_moves_as_it_is():
    whole = shrewjax.accumulate(optax.sgd(1.0), 3).init(jnp.arange(3.0))
    state = whole._replace(gradient_sum=jnp.arange(3.0))
    np.testing.assert_array_equal(shrewjax.redistribute(state, whole).gradient_sum, [0, 1, 2])


def test_error_has_the_whole_path_of_a_leaf_that_does_not_fit():
    like = (TX.init(params_on(2)), jnp.zeros(2))
    restored = like[0]._replace(micro_step=jnp.zeros((), jnp.float32))
    with pytest.raises(ValueError, match=r"leaf \[0\]\.micro_step must be int32"):
        shrewjax.redistribute((restored, like[1]), like)
    with pytest.raises(ValueError, match=r"leaf \[1\] must be float32 of shape \(2,\)"):
        shrewjax.redistribute((like[0], jnp.zeros(3)), like)
