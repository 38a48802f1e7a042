"""A job that moves from Optax to shrewjax goes on as Optax itself does, which is the oracle of each trajectory."""

import functools
import inspect
import re
from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from helpers import CASES, assert_close, bits, mesh_of, own_params, placed, thorough
from jax.sharding import NamedSharding
from sklearn.datasets import load_digits
from speed import quick_jit, users_jit

import shrewjax
import shrewjax.flax

pytestmark = pytest.mark.usefixtures("as_users_have_it")

STEPS = 14
K = 4


class Net(linen.Module):
    """A convolution, two scanned layers and a classifier, for images of eight by eight."""

    dtype: Any = jnp.float32

    @linen.compact
    def __call__(self, x):
        x = linen.tanh(linen.Conv(3, (3, 3), strides=2, param_dtype=self.dtype, name="conv")(x))
        x = x.reshape(len(x), -1)
        layer = linen.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = layer(self.dtype, name="layers")(x, None)
        return linen.Dense(10, param_dtype=self.dtype, name="head")(x)


class Layer(linen.Module):
    """One of the scanned layers."""

    dtype: Any

    @linen.compact
    def __call__(self, x, _):
        return x + linen.tanh(linen.Dense(x.shape[-1], param_dtype=self.dtype)(x)), None


@functools.cache
def digits():
    data = load_digits()
    x = np.float32(data.images[: 16 * STEPS, ..., None] / 16).reshape(STEPS, 16, 8, 8, 1)
    return x, data.target[: 16 * STEPS].reshape(STEPS, 16)


def parameters(dtype=jnp.float32):
    return Net(dtype).init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)))["params"]


def loss(params, x, y):
    logits = Net().apply({"params": params}, x).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def train_step(tx, apply):
    """A step of a whole program. A factor of NaN makes its gradients NaN."""

    def step(params, state, x, y, factor):
        grads = jax.tree.map(lambda g: g * factor.astype(g.dtype), jax.grad(loss)(params, x, y))
        return apply(tx, grads, state, params)

    return step


def by_optax(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def schedule(init=0.02, steps=STEPS):
    return optax.linear_schedule(init, 0.0, steps)


def kernels(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


def labels(params):
    return {name: "head" if name == "head" else "body" for name in params}


class Row(NamedTuple):
    """An optimizer by Optax, the same with shrewjax, the micro-steps after which the job moves, and bad gradients."""

    old: Any
    new: Any
    moves: tuple[int, ...]
    nan_at: tuple[int, ...] = ()


def windows(old, new, moves=(3, 6, 8, 9), nan_at=(), options=None, **multi_steps):
    """A row of `optax.MultiSteps`: in mid-window after 3, 6 and 9 micro-steps, at its end after 8."""
    new = shrewjax.accumulate(new, multi_steps.pop("every_k_schedule", K), **options or {})
    return Row(optax.MultiSteps(old, K, **multi_steps), new, moves, nan_at)


def pair(make):
    """What `make` returns, by Optax and by shrewjax."""
    return tuple(make(library) for library in (optax, shrewjax))


def clipped(library, max_norm=1.5):
    """Some steps and windows are clipped, among them the second window, and others are not."""
    return optax.chain(library.clip_by_global_norm(max_norm), optax.adamw(schedule()))


def injected(library):
    def make(learning_rate, max_norm):
        return optax.chain(library.clip_by_global_norm(max_norm), optax.adam(learning_rate))

    return optax.inject_hyperparams(make)(learning_rate=schedule(), max_norm=1.5)


def accumulated(library, inner):
    if library is shrewjax:
        return shrewjax.accumulate(inner, K)
    return optax.MultiSteps(inner, K).gradient_transformation()


def clips_of(library):
    by_value = library.clip(0.01) if library is optax else library.clip_by_value(0.01)
    return {
        "value": optax.chain(by_value, optax.adamw(0.01)),
        "agc": optax.chain(library.adaptive_grad_clip(0.02), optax.sgd(0.5, momentum=0.9)),
    }


def skipping(library, inner):
    return optax.apply_if_finite(inner, 3) if library is optax else shrewjax.skip_nonfinite(inner)


OF_LENGTH = lambda windows: jnp.where(windows < 1, 2, 4)  # noqa: E731
ROWS = {
    "chain": Row(*pair(clipped), moves=(5,)),
    "windows": windows(*pair(clipped)),
    "windows of sums": windows(
        *pair(lambda library: clipped(library, max_norm=6.0)), use_grad_mean=False, options={"reduction": "sum"}
    ),
    "windows that are extended": windows(
        *pair(clipped),
        moves=(4, 5, 6, 10),
        nan_at=(1, 4, 6, 9),
        should_skip_update_fn=optax.skip_not_finite,
        options={"nonfinite": "extend_window"},
    ),
    "windows of a scheduled length": Row(
        optax.MultiSteps(clipped(optax), OF_LENGTH), shrewjax.accumulate(clipped(shrewjax), OF_LENGTH), (1, 2, 4, 6)
    ),
    "windows in a chain": Row(
        *pair(lambda library: optax.chain(accumulated(library, clipped(library)), optax.scale(0.5))), moves=(6, 8)
    ),
    "apply_if_finite": Row(*pair(lambda lib: skipping(lib, clipped(lib))), moves=(3, 5), nan_at=(2, 4, 7)),
    "windows around apply_if_finite": windows(*pair(lambda lib: skipping(lib, clipped(lib))), moves=(5, 8)),
    "masked": Row(*pair(lambda lib: optax.masked(accumulated(lib, clipped(lib)), kernels)), moves=(6, 8)),
    "partition": Row(
        *pair(
            lambda lib: optax.partition(
                {"head": clipped(lib), "body": accumulated(lib, optax.sgd(0.1, momentum=0.9))}, labels
            )
        ),
        moves=(6,),
    ),
    "muon": windows(
        *pair(lambda lib: optax.chain(lib.clip_by_global_norm(1.5), optax.contrib.muon(schedule()))), moves=(6,)
    ),
    "injected hyperparameters": windows(*pair(injected), moves=(6,)),
    "hyperparameters injected around windows": Row(
        *pair(
            lambda lib: optax.inject_hyperparams(lambda learning_rate: accumulated(lib, optax.adam(learning_rate)))(
                learning_rate=schedule()
            )
        ),
        moves=(6,),
    ),
    "value clip": windows(*pair(lambda lib: clips_of(lib)["value"]), moves=(6,)),
    "AGC": windows(*pair(lambda lib: clips_of(lib)["agc"]), moves=(6,)),
}


@functools.cache
def whole_run(name):
    """The parameters and states of the job that is not moved, after each micro-step."""
    row = ROWS[name]
    x, y = digits()
    step = quick_jit(train_step(row.old, by_optax))
    params = parameters()
    run = [(params, row.old.init(params))]
    for i in range(STEPS):
        run.append(step(*run[-1], x[i], y[i], factor(row, i)))
    return run


def factor(row, i):
    return jnp.float32(np.nan if i in row.nan_at else 1.0)


def distance(one, other):
    """The largest difference of two trees of parameters."""
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return np.max([np.max(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))) for a, b in leaves])


OTHER_ROWS = [
    "AGC",
    "injected hyperparameters",
    "partition",
    "windows of sums",
    "windows that are extended",
    "windows of a scheduled length",
    "windows in a chain",
    "windows around apply_if_finite",
    "muon",
    "hyperparameters injected around windows",
    "value clip",
]


@pytest.mark.combinations
@pytest.mark.parametrize("name", [*(name for name in ROWS if name not in OTHER_ROWS), *thorough(*OTHER_ROWS)])
def test_a_moved_job_goes_on_as_the_one_that_was_not_moved(name):
    row = ROWS[name]
    x, y = digits()
    run = whole_run(name)
    move = quick_jit(shrewjax.from_optax, static_argnums=1)
    step = quick_jit(train_step(row.new, shrewjax.apply_gradients), donate_argnums=1)
    assert distance(run[0][0], run[-1][0]) > 0.01
    farthest = 0.0
    for moved_after in row.moves:
        params, old_state = run[moved_after]
        state = move(old_state, row.new, params)
        assert types(state) == types(row.new.init(params))
        for i in range(moved_after, STEPS):
            params, state = step(params, state, x[i], y[i], factor(row, i))
            farthest = np.maximum(farthest, distance(params, run[i + 1][0]))
        assert int(shrewjax.metrics(state).get("accumulate/windows", 0)) == windows_of(run[-1][1])
    assert farthest <= 2e-6


def types(state):
    """The structure, shapes and dtypes of a state."""
    return jax.tree.structure(state), [(x.shape, x.dtype) for x in jax.tree.leaves(state)]


def windows_of(state):
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, optax.MultiStepsState))
    return sum(int(x.gradient_step) for x in nodes if isinstance(x, optax.MultiStepsState))


# The window, field by field.

PARAMS = {"w": jnp.float32([[1.0, -2.0], [0.5, 4.0]]), "none": None, "steps": jnp.int32([7, 8])}


def open_window(dtype=jnp.float32, n=3, **options):
    """Parameters, and the state of `optax.MultiSteps` with the mean -w of n micro-batches."""
    params = {"w": PARAMS["w"].astype(dtype), "none": None, "steps": PARAMS["steps"]}
    state = optax.MultiSteps(optax.sgd(0.1), K, **options).init(params)
    acc = state.acc_grads | {"w": (-PARAMS["w"]).astype(state.acc_grads["w"].dtype)}
    return params, state._replace(mini_step=jnp.int32(n), gradient_step=jnp.int32(5), acc_grads=acc)


@pytest.mark.parametrize("accumulator_dtype", [None, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_open_window_has_the_sum_of_its_micro_batches_in_its_own_dtype(dtype, accumulator_dtype):
    params, old = open_window(dtype)
    tx = shrewjax.accumulate(optax.sgd(0.1), K, accumulator_dtype=accumulator_dtype)
    state = shrewjax.from_optax(old, tx, params)
    assert types(state) == types(tx.init(params))
    np.testing.assert_array_equal(np.asarray(state.gradient_sum["w"], np.float64), -3 * np.float64(PARAMS["w"]))
    assert (state.gradient_sum["none"], int(state.gradient_sum["steps"])) == (None, 0)
    assert (int(state.micro_step), int(state.windows), float(state.sum_of_weights)) == (3, 5, 3.0)
    assert (float(state.value_sum), float(state.loss)) == (np.inf, np.inf)
    assert not any((state.applied, state.window_bad, state.dropped))


@pytest.mark.parametrize("n", [0, 2])
def test_a_window_that_optax_opened_has_no_mean_loss_and_no_noise_and_the_next_one_has(n):
    params, old = open_window(n=n)
    tx = shrewjax.accumulate(optax.sgd(0.0), K, noise_decay=0.5)
    state = shrewjax.from_optax(old, tx, params)
    step = quick_jit(tx.update)
    for i in range(n, K):
        _, state = step({"w": PARAMS["w"] * i, "none": None, "steps": None}, state, params, value=2.0)
    assert int(state.windows) == 6
    assert float(state.loss) == (np.inf if n else 2.0)
    assert int(state.noise.recorded) == (0 if n else 1)
    for i in range(K):
        _, state = step({"w": PARAMS["w"] * i, "none": None, "steps": None}, state, params, value=3.0)
    assert float(state.loss) == 3.0
    assert int(state.noise.recorded) == (1 if n else 2)
    assert np.isfinite(shrewjax.metrics(state)["accumulate/noise_trace"])


def test_a_weight_counts_against_the_micro_batches_of_the_open_window():
    """Three micro-batches of weight 1 with the mean -w, and one of weight 5 with the gradient 3 w."""
    params, old = open_window()
    tx = shrewjax.accumulate(optax.sgd(1.0), K)
    grads = {"w": 3 * PARAMS["w"], "none": None, "steps": None}
    updates, _ = tx.update(grads, shrewjax.from_optax(old, tx, params), params, weight=5)
    np.testing.assert_allclose(updates["w"], -(3 * -1 + 5 * 3) / 8 * PARAMS["w"], rtol=1e-6)


def test_a_complex_sum_stays_complex_and_fits_no_real_accumulator():
    params, acc = jnp.zeros(2, jnp.complex64), jnp.complex64([1 + 2j, 3j])
    old = optax.MultiSteps(optax.sgd(0.1), K, **accumulating_in(jnp.complex64)).init(params)
    old = old._replace(mini_step=jnp.int32(2), acc_grads=acc)
    state = shrewjax.from_optax(old, shrewjax.accumulate(optax.sgd(0.1), K), params)
    np.testing.assert_array_equal(state.gradient_sum, 2 * np.asarray(acc))
    message = (
        r"^opt_state\.acc_grads .* float32 of shape \(2,\), got complex64 of .* If the parameter is real, put the real"
    )
    with pytest.raises(ValueError, match=message):
        shrewjax.from_optax(old, shrewjax.accumulate(optax.sgd(0.1), K), jnp.zeros(2))


def accumulating_in(dtype):
    """The argument of newer versions of Optax."""
    is_new = "accumulator_dtype" in inspect.signature(optax.MultiSteps).parameters
    return {"accumulator_dtype": dtype} if is_new else {}


def test_a_sum_that_is_nan_in_optax_for_good_is_left_behind_at_the_end_of_the_window():
    params, old = open_window(n=0)
    old = old._replace(acc_grads=old.acc_grads | {"w": old.acc_grads["w"] * jnp.nan})
    tx = shrewjax.accumulate(optax.sgd(1.0), 1)
    updates, _ = tx.update(PARAMS | {"steps": None}, shrewjax.from_optax(old, tx, params), params)
    np.testing.assert_array_equal(updates["w"], -PARAMS["w"])


def test_a_guard_has_optax_counts():
    old = optax.apply_if_finite(optax.sgd(0.1), 3)
    state = old.init(jnp.zeros(1))
    for bad in (np.nan, 1.0, np.inf, np.nan):
        _, state = old.update(jnp.float32([bad]), state)
    state = shrewjax.from_optax(state, shrewjax.skip_nonfinite(optax.sgd(0.1), per_leaf=True), jnp.zeros(1))
    assert (int(state.skipped), int(state.consecutive), bool(state.nonfinite_leaves)) == (3, 2, False)
    assert not any((state.applied, state.limit_reached))


def test_a_state_of_the_new_transformation_is_returned_as_it_is():
    tx = shrewjax.accumulate(shrewjax.skip_nonfinite(clipped(shrewjax)), K, noise_decay=0.9)
    params = parameters()
    leaves, treedef = jax.tree.flatten(tx.init(params))
    state = treedef.unflatten([(x + i).astype(x.dtype) for i, x in enumerate(leaves)])
    assert bits(shrewjax.from_optax(state, tx, params)) == bits(state)


def test_an_empty_state_becomes_the_fresh_state_of_each_clipping_rule():
    params = parameters()
    for name, case in CASES.items():
        if name not in ("accumulate", "skip_nonfinite", "skip_on_spike"):
            fresh = case.make().init(params)
            assert bits(shrewjax.from_optax(optax.EmptyState(), case.make(), params)) == bits(fresh), name
            assert types(shrewjax.from_optax(optax.EmptyState(), case.make(), params)) == types(fresh), name


def test_a_hyperparameter_that_the_user_has_set_to_a_python_number_is_an_array():
    state = optax.inject_hyperparams(optax.sgd)(0.1).init(PARAMS["w"])
    state.hyperparams["learning_rate"] = 0.25
    moved = shrewjax.from_optax(state, optax.inject_hyperparams(optax.sgd)(0.1), PARAMS["w"])
    assert isinstance(moved.hyperparams["learning_rate"], jax.Array)
    assert float(moved.hyperparams["learning_rate"]) == 0.25


def test_a_python_number_that_the_dtype_does_not_hold_is_an_error():
    own = optax.GradientTransformation(lambda _: {"count": jnp.int32(0)}, lambda u, s, _: (u, s))
    tx = optax.chain(shrewjax.clip_by_global_norm(1.0), own)
    message = "opt_state[1]['count'] must correspond to tx.init(params)[1]['count'], int32 of shape (), got float"
    with pytest.raises(ValueError, match=re.escape(message)):
        shrewjax.from_optax((optax.EmptyState(), {"count": 2.5}), tx, PARAMS["w"])
    assert int(shrewjax.from_optax((optax.EmptyState(), {"count": 2}), tx, PARAMS["w"])[1]["count"]) == 2


@pytest.mark.parametrize(
    ("mini_step", "came"),
    [(jnp.int32(-1), "a number >= 0, got -1"), (-1, "a number >= 0, got -1")]
    + [(x, f"int32 of shape (), got {type(x).__name__}") for x in (2**31, -(2**40), True)],
)
def test_a_count_that_no_window_can_have_is_an_error(mini_step, came):
    state = multi(optax.sgd(1.0)).init(TREE)
    message = f"opt_state.mini_step must correspond to tx.init(params).micro_step, {came}."
    with pytest.raises(ValueError, match=re.escape(message)):
        shrewjax.from_optax(state._replace(mini_step=mini_step), ours(optax.sgd(1.0)), TREE)


def test_a_transformation_of_the_user_may_make_python_numbers():
    own = optax.GradientTransformation(lambda _: {"count": 0}, lambda u, s, _: (u, {"count": s["count"] + 1}))
    tx = optax.chain(shrewjax.clip_by_global_norm(1.0), own)
    moved = shrewjax.from_optax((optax.EmptyState(), {"count": jnp.int32(5)}), tx, PARAMS["w"])
    assert int(moved[1]["count"]) == 5


# Devices.

MODEL = {"kernel": (64, 32), "bias": (32,)}
X = np.random.default_rng(0).normal(size=(STEPS, 16, 64)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(STEPS, 16, 32)).astype(np.float32)


def linear_loss(params, x, y):
    return jnp.mean((x @ params["kernel"] + params["bias"] - y) ** 2)


def linear_step(tx, apply):
    def step(params, state, x, y):
        return apply(tx, jax.grad(linear_loss)(params, x, y), state, params)

    return step


def on_devices(axis_type="Auto"):
    """A mesh of all devices, the sharding of FSDP, and parameters that have it."""
    mesh = mesh_of(axis_type, data=8)
    divided = NamedSharding(mesh, jax.P("data"))
    return mesh, divided, {k: jax.device_put(np.full(s, 0.1, np.float32), divided) for k, s in MODEL.items()}


def place_all(state, mesh):
    """A state whose counters are on the mesh, too."""
    return placed(state, mesh, shrewjax.state_specs(state))


def through_orbax(folder, state, like):
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", like)


def through_flax(_, state, like):
    return flax.serialization.from_bytes(like, flax.serialization.to_bytes(state))


@pytest.mark.parametrize("through", [through_orbax, through_flax])
def test_a_checkpoint_of_optax_alone_goes_on_under_fsdp_on_eight_devices(tmp_path, through):
    mesh, divided, start = on_devices()
    old, new = (
        wrap(chain, K) for wrap, chain in zip((optax.MultiSteps, shrewjax.accumulate), pair(clipped), strict=True)
    )
    step = quick_jit(linear_step(old, by_optax))
    run = [(start, place_all(old.init(start), mesh))]
    for x, y in zip(X, Y, strict=True):
        run.append(step(*run[-1], x, y))
    params, saved = run[6]

    restored = through(tmp_path, saved, place_all(old.init(start), mesh))
    state = shrewjax.from_optax(restored, new, params)
    assert bits(state.inner_state[1]) == bits(saved.inner_opt_state[1])
    assert bits((state.micro_step, state.windows)) == bits((saved.mini_step, saved.gradient_step))
    for sharded in (state.gradient_sum, state.inner_state[1][0].mu, state.inner_state[1][0].nu):
        assert {x.sharding for x in jax.tree.leaves(sharded)} == {divided}

    step = quick_jit(linear_step(new, shrewjax.apply_gradients), donate_argnums=1)
    for i in range(6, STEPS):
        params, state = step(params, state, X[i], Y[i])
        assert distance(params, run[i + 1][0]) <= 2e-6
    assert state.inner_state[1][0].mu["kernel"].sharding == divided


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_a_donated_state_moves_under_jit_without_a_second_one_and_stays_sharded(axis_type):
    mesh, divided, params = on_devices(axis_type)
    old, new = (
        wrap(chain, K) for wrap, chain in zip((optax.MultiSteps, shrewjax.accumulate), pair(clipped), strict=True)
    )
    with jax.set_mesh(mesh):
        state = place_all(old.init(params), mesh)
        state = state._replace(mini_step=state.mini_step + 2, acc_grads=jax.tree.map(lambda x: x + 0.25, params))
        expected = jax.tree.map(lambda x: 2 * np.asarray(x), state.acc_grads), bits(state.inner_opt_state[1])
        move = users_jit(shrewjax.from_optax, static_argnums=1, donate_argnums=0)
        memory = move.lower(state, new, params).compile().memory_analysis()
        moved = move(state, new, params)
    size = sum(x.nbytes for x in jax.tree.leaves(params)) // 8
    assert memory.alias_size_in_bytes >= 3 * size  # two moments and the sum
    # Two, because JAX pairs donated buffers with results in their order, and the sum stands before the moments.
    assert memory.temp_size_in_bytes < 2.2 * size
    assert all(x.is_deleted() for x in jax.tree.leaves((state.acc_grads, state.inner_opt_state[1])))
    assert_close(moved.gradient_sum, expected[0], rtol=0)
    assert bits(moved.inner_state[1]) == expected[1]
    for sharded in (moved.gradient_sum, moved.inner_state[1][0].mu, moved.inner_state[1][0].nu):
        assert all(x.sharding.is_equivalent_to(divided, x.ndim) for x in jax.tree.leaves(sharded))


def test_no_two_arrays_of_a_moved_state_share_a_buffer():
    row = ROWS["windows"]
    params, old = whole_run("windows")[6]
    for state in (
        shrewjax.from_optax(old, row.new, params),
        quick_jit(shrewjax.from_optax, static_argnums=1)(old, row.new, params),
    ):
        pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((state, params))]
        assert len(pointers) == len({*pointers})


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_window_moves_to_sums_of_each_device(reduction):
    """Optax's job reduces gradients in every micro-step. The new one does so once a window."""
    mesh, _, params = on_devices()
    params = placed(params, mesh, jax.P())
    is_mean = reduction == "mean"
    old = optax.MultiSteps(clipped(optax), K, use_grad_mean=is_mean)
    new = shrewjax.accumulate(clipped(shrewjax), K, reduction=reduction, sum_over="data")
    step = quick_jit(linear_step(old, by_optax))
    run = [(params, place_all(old.init(params), mesh))]
    for x, y in zip(X, Y, strict=True):
        run.append(step(*run[-1], x, y))

    params = run[6][0]
    state = shrewjax.from_optax(run[6][1], new, params)
    assert types(state) == types(new.init(params))
    assert shrewjax.state_specs(state.gradient_sum) == shrewjax.state_specs(new.init(params).gradient_sum)
    specs = shrewjax.state_specs(place_all(state, mesh))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(jax.P(), specs, jax.P("data"), jax.P("data")), out_specs=(jax.P(), specs)
    )
    def sharded_step(params, state, x, y):
        loss = linear_loss if is_mean else lambda *args: linear_loss(*args) / 8
        return shrewjax.apply_gradients(new, jax.grad(loss)(own_params(params, "data"), x, y), state, params)

    sharded_step = quick_jit(sharded_step)
    state = place_all(state, mesh)
    for i in range(6, STEPS):
        params, state = sharded_step(params, state, X[i], Y[i])
        assert distance(params, run[i + 1][0]) <= 2e-6
    assert int(state.windows) == int(run[-1][1].gradient_step)


# Flax.


def test_a_linen_train_state_moves():
    old, new = ROWS["windows"][:2]
    run = whole_run("windows")
    state = TrainState(step=6, apply_fn=None, params=run[6][0], tx=old, opt_state=run[6][1])
    moved = shrewjax.flax.TrainState(
        step=state.step,
        apply_fn=state.apply_fn,
        params=state.params,
        tx=new,
        opt_state=shrewjax.from_optax(state.opt_state, new, state.params),
    )
    x, y = digits()
    step = quick_jit(lambda state, x, y: state.apply_gradients(grads=jax.grad(loss)(state.params, x, y)))
    for i in range(6, STEPS):
        moved = step(moved, x[i], y[i])
    assert distance(moved.params, run[-1][0]) <= 2e-6
    assert int(moved.step) == STEPS


class Classifier(nnx.Module):
    """Two layers, of which the second is not trained."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first, self.second = nnx.Linear(64, 16, rngs=rngs), nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        return self.second(nnx.tanh(self.first(x.reshape(len(x), -1))))


def nnx_loss(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


@nnx.jit
def nnx_step(model, optimizer, x, y):
    optimizer.update(model, nnx.grad(nnx_loss)(model, x, y))


@pytest.mark.parametrize("make", [optax.MultiSteps, lambda inner, k: optax.MultiSteps(optax.masked(inner, kernels), k)])
def test_an_nnx_optimizer_moves(make):
    x, y = digits()
    is_masked = make is not optax.MultiSteps
    inner = optax.masked(clipped(shrewjax), kernels) if is_masked else clipped(shrewjax)
    new = shrewjax.accumulate(inner, K)
    model = Classifier()
    optimizer = nnx.Optimizer(model, make(clipped(optax), K), wrt=nnx.Param)
    for i in range(6):
        nnx_step(model, optimizer, x[i], y[i])
    moved_model = nnx.clone(model)
    moved = shrewjax.flax.Optimizer(moved_model, new, wrt=nnx.Param)
    params = nnx.state(moved_model, nnx.Param)
    nnx.update(moved.opt_state, nnx.state(shrewjax.from_optax(optimizer.opt_state, new, params)))
    moved.step[...] = optimizer.step[...]
    for i in range(6, STEPS):
        nnx_step(model, optimizer, x[i], y[i])
        nnx_step(moved_model, moved, x[i], y[i])
    assert distance(nnx.state(model, nnx.Param), nnx.state(moved_model, nnx.Param)) <= 2e-6
    assert int(moved.step[...]) == STEPS
    assert int(shrewjax.metrics(moved.opt_state)["accumulate/windows"]) == 3


# States that do not correspond.

TREE = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}


def multi(inner, **options):
    return optax.MultiSteps(inner, K, **options)


def ours(inner, **options):
    return shrewjax.accumulate(inner, K, **options)


WRONG = {
    "another optimizer": (
        multi(optax.adam(1e-3)),
        ours(optax.sgd(1.0, momentum=0.9)),
        "opt_state.inner_opt_state[0] must correspond to tx.init(params).inner_state[0], TraceState, got "
        "ScaleByAdamState. Make tx of",
    ),
    "a clip that is left out": (
        optax.chain(optax.clip(1.0), optax.trace(0.9)),
        optax.chain(optax.trace(0.9)),
        "opt_state[1] must correspond to tx.init(params)[1], nothing, got TraceState. Make tx of",
    ),
    "another order in a named chain": (
        optax.named_chain(("a", optax.adam(1e-3)), ("b", optax.adam(1e-3))),
        optax.named_chain(("b", optax.adam(1e-3)), ("a", optax.adam(1e-3))),
        "opt_state must correspond to tx.init(params), PyTreeDef(CustomNode(OrderedDict[('b', 'a')], [*, *])), got "
        "PyTreeDef(CustomNode(OrderedDict[('a', 'b')], [*, *])). Make tx of",
    ),
    "a window that was not there": (
        optax.adam(1e-3),
        ours(optax.adam(1e-3)),
        "opt_state must correspond to tx.init(params), AccumulateState, got tuple. Make tx of",
    ),
    "a window whose place has none": (
        multi(optax.chain(optax.clip(1.0), optax.sgd(1.0))),
        optax.chain(shrewjax.clip_by_value(1.0), optax.sgd(1.0)),
        "opt_state must correspond to tx.init(params), tuple, got MultiStepsState. Wrap this part of tx in accumulate",
    ),
    "another shape": (
        multi(optax.sgd(1.0)),
        ours(optax.sgd(1.0)),
        "opt_state.acc_grads['b'] must correspond to tx.init(params).gradient_sum['b'], float32 of shape (3,), got "
        "float32 of shape (8, 3). Make tx of",
        {"w": TREE["w"], "b": jnp.zeros((8, 3))},
    ),
    "another shape than that of the rows": (
        multi(optax.sgd(1.0)),
        ours(optax.sgd(1.0), sum_over="data"),
        "opt_state.acc_grads['b'] must correspond to tx.init(params).gradient_sum['b'], float32 of shape (8, 3), with "
        "a row for each of 8 devices, got float32 of shape (8, 3). Make tx of",
        {"w": TREE["w"], "b": jnp.zeros((8, 3))},
    ),
    "another dtype": (
        multi(optax.adam(1e-3)),
        ours(optax.adam(1e-3, mu_dtype=jnp.bfloat16)),
        "opt_state.inner_opt_state[0].mu['b'] must correspond to tx.init(params).inner_state[0].mu['b'], bfloat16 of "
        "shape (3,), got float32 of shape (3,). Make tx of",
    ),
    "another mask": (
        multi(optax.masked(optax.adam(1e-3), {"w": True, "b": False})),
        ours(optax.masked(optax.adam(1e-3), {"w": True, "b": True})),
        "opt_state.inner_opt_state.inner_state[0].mu['b'] must correspond to "
        "tx.init(params).inner_state.inner_state[0].mu['b'], float32 of shape (3,), got MaskedNode. Make tx of",
    ),
    "another name of a hyperparameter": (
        optax.inject_hyperparams(optax.clip)(max_delta=1.0),
        optax.inject_hyperparams(shrewjax.clip_by_value)(max_value=1.0),
        "opt_state.hyperparams['max_delta'] must correspond to tx.init(params).hyperparams['max_delta'], nothing, got "
        "float32 of shape (). Make tx of",
    ),
    "skipped micro-batches": (
        multi(optax.sgd(1.0), should_skip_update_fn=optax.skip_not_finite),
        ours(optax.sgd(1.0), nonfinite="drop_micro_batch"),
        "opt_state.skip_state must correspond to tx.init(params).dropped, that of nonfinite='drop_micro_batch', got "
        'that of optax.skip_not_finite. Pass nonfinite="extend_window" to accumulate. To go on without it, pass '
        "opt_state with skip_state=()",
    ),
    "micro-batches that were skipped by their norm": (
        multi(optax.sgd(1.0), should_skip_update_fn=functools.partial(optax.skip_large_updates, max_squared_norm=1.0)),
        ours(optax.sgd(1.0), nonfinite="extend_window"),
        "opt_state.skip_state must correspond to tx.init(params).dropped, that of nonfinite='extend_window', got that "
        "of another should_skip_update_fn. To go on without it, pass opt_state with skip_state=()",
    ),
    "a window whose init is compiled": (
        multi(optax.sgd(1.0)),
        optax.GradientTransformation(jax.jit(ours(optax.sgd(1.0)).init), ours(optax.sgd(1.0)).update),
        "opt_state must correspond to tx.init(params), a window of unknown reduction, got MultiStepsState. Leave out "
        "the jit around tx.init",
    ),
    "no transformation": (
        multi(optax.sgd(1.0)),
        multi(optax.sgd(1.0)),
        "tx must be an optax.GradientTransformation and params no state, got MultiSteps and dict. Pass opt_state, tx "
        "and params, in this order",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_correspond_is_an_error_that_names_both_places(name):
    old, new, message, *saved = WRONG[name]
    mesh, _, _ = on_devices()
    params = placed(TREE, mesh, jax.P())
    state = old.init(saved[0] if saved else TREE)
    before = bits(state)
    with pytest.raises(ValueError, match=rf"^{re.escape(message)}"):
        shrewjax.from_optax(state, new, params)
    assert bits(state) == before
    if name == "a window whose place has none":  # the remedy
        assert int(shrewjax.from_optax(state, shrewjax.accumulate(new, K), params).windows) == 0


def test_states_in_the_place_of_parameters_and_shapes_in_that_of_a_state_are_errors():
    old, new = multi(optax.sgd(1.0)), ours(optax.sgd(1.0))
    with pytest.raises(
        ValueError,
        match=r"^tx must be .* and params no state, got Accumulation and MultiStepsState\. Pass opt_state, tx ",
    ):
        shrewjax.from_optax(TREE, new, old.init(TREE))
    with pytest.raises(ValueError, match=r"^opt_state must hold arrays, got shapes\. Restore them first"):
        shrewjax.from_optax(jax.eval_shape(old.init, TREE), new, TREE)


def test_a_part_of_the_new_state_starts_anew():
    """The remedy of the errors: another optimizer, and the window goes on."""
    old, new = multi(optax.adam(1e-3)).init(TREE), ours(optax.sgd(1.0, momentum=0.9))
    old = old._replace(mini_step=jnp.int32(2), inner_opt_state=new.init(TREE).inner_state)
    assert float(shrewjax.from_optax(old, new, TREE).sum_of_weights) == 2


def test_without_a_skip_function_the_job_goes_on_if_the_state_has_none():
    old = multi(optax.sgd(1.0), should_skip_update_fn=optax.skip_not_finite).init(TREE)
    moved = shrewjax.from_optax(old._replace(skip_state=()), ours(optax.sgd(1.0)), TREE)
    assert types(moved) == types(ours(optax.sgd(1.0)).init(TREE))


def test_rows_inside_shard_map_are_an_error():
    mesh, _, _ = on_devices()
    old, new = multi(optax.sgd(1.0)), ours(optax.sgd(1.0), sum_over="data")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    def move(params):
        return shrewjax.from_optax(old.init(params), new, params)

    with pytest.raises(
        ValueError, match=r"sum_over inside jax.shard_map, got MultiStepsState. Call from_optax outside"
    ):
        jax.eval_shape(move, TREE)
