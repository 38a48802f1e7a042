"""What programs compiled for an H100 and a TPU move, hold and send; neither device has to be here.

A device whose compiler is not installed is skipped, unless `SHREWJAX_COMPILES_FOR` names it.
P is the parameters' bytes.
"""

import functools
import itertools
import json
from functools import partial

import _compiled
import compiled
import executed
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from _compiled import place, sharded
from _harness import applied, unclipped, updated
from accelerators import ACCELERATORS, all_reduced
from helpers import seeming_to_have, thorough
from jax.sharding import PartitionSpec as P

import shrewjax

pytestmark = pytest.mark.usefixtures("as_users_have_it")


# The counter, on programs whose costs are known.

LEAF = jax.ShapeDtypeStruct((8192, 1024), np.float32)  # three of them, on a TPU, are more than stay in its VMEM


def leaves(target, number=4):
    return place({str(i): LEAF for i in range(number)}, target.mesh())


def compile_tree(target, function, *arguments, **options):
    return _compiled.compile_for(
        target, function, *arguments, unit=_compiled.bytes_on_a_device(arguments[0]), **options
    )


def test_a_sum_in_place_is_counted_as_three_passes(any_target):
    program = compile_tree(any_target, partial(jax.tree.map, jnp.add), leaves(any_target), leaves(any_target))
    assert program.open == program.closing == 3


def test_a_branch_is_counted_on_closing_calls_alone(any_target):
    flag = place(jax.ShapeDtypeStruct((), np.bool_), any_target.mesh())

    def step(total, grads, flag):
        def add():
            return jax.tree.map(jnp.add, total, grads)

        return jax.lax.switch(flag.astype(jnp.int32), [lambda: total, add])

    program = compile_tree(any_target, step, leaves(any_target), leaves(any_target), flag)
    assert program.open == pytest.approx(0, abs=0.01)
    assert program.closing == pytest.approx(3, abs=0.01)
    assert "add" not in program.operations(closing=False, elements=LEAF.size)
    assert "add" in program.operations(closing=True, elements=LEAF.size)


def test_a_swap_of_donated_arrays_is_counted_as_copies(any_target):
    program = compile_tree(any_target, lambda pair: {"0": pair["1"], "1": pair["0"]}, leaves(any_target, 2))
    assert program.open >= 2


def test_a_slice_is_counted_as_what_it_takes(any_target):
    program = compile_tree(any_target, partial(jax.tree.map, lambda x: x[1024:5120]), leaves(any_target), donate=())
    assert 1 <= program.open < 1.4  # of half the elements; 1.5, if all were read


@pytest.mark.parametrize("name", ACCELERATORS)
def test_a_missing_compiler_says_what_to_install(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(_compiled.MissingCompilerError, match=r"pip install -e '\.\[(gpu|tpu)-compiler\]'"):
        _compiled.Target(name)


def test_the_table_is_printed_for_a_cpu(forks, tmp_path):
    table = tmp_path / "rows.json"
    command = compiled.__file__, "--device", "cpu", "--only", "^GradAccumulator", "--json", table
    ((code, _, errors),) = forks(command, folder=tmp_path)
    assert code == 0, errors
    rows = json.loads(table.read_text())["rows"]
    assert [row["measure"] for row in rows] == [
        "GradAccumulator.add",
        "GradAccumulator.take",
        "GradAccumulator, closing program",
    ]
    assert rows[0]["shrewjax"]["open, P"] == 3


# One device.


@pytest.fixture
def one_device_here():
    """As in a process with one device, where the numbers of all leaves are joined. `one_device` lasts for a module."""
    with seeming_to_have(1):
        yield


def accumulate(target, apply=applied, inner=None, **options):
    return compiled.step(target, apply, compiled.window(inner, **options), compiled.leaves(target))


def guarded(target, guard):
    return compiled.step(target, applied, guard(compiled.optimizer(shrewjax)), compiled.leaves(target))


# Passes of an open and of a closing call, and temporary memory. To copy one leaf of eight is 0.25 passes, more than
# the bounds leave, so nothing is copied. An H100's temporary memory is scalars; a TPU's is also what it fetches ahead.
STEPS = {
    "accumulate": (accumulate, 3.1, 11.1, 0.01),
    "accumulate, adamw alone": (lambda t: accumulate(t, inner=optax.adamw(1e-3)), 3.1, 10.1, 0.01),
    "accumulate, update": (lambda t: accumulate(t, updated), 8.0, 14.1, 1.01),
    **{
        f"accumulate, {policy}": (lambda t, policy=policy: accumulate(t, nonfinite=policy), 4.1, 12.1, 0.01)
        for policy in ("drop_micro_batch", "drop_window", "extend_window")
    },
    # On an H100 the norms come from the pass that adds: 3.0 passes. On a TPU three of the eight leaves are read again.
    "accumulate, noise_decay": (lambda t: accumulate(t, noise_decay=0.99), 3.4, 11.4, 0.02),
    "accumulate, bfloat16": (compiled.bfloat16_window, 2.6, 8.6, 0.02),
    "GradAccumulator, closing program": (compiled.closed_window, 2.1, 10.1, 0.01),
    "skip_nonfinite": (lambda t: guarded(t, shrewjax.skip_nonfinite), 1.1, 9.1, 0.01),
    "skip_on_spike": (lambda t: guarded(t, shrewjax.skip_on_spike), 1.1, 9.1, 0.01),
}
FETCHED_AHEAD = {"h100": 0.0, "v5e": 0.4}


@pytest.mark.combinations
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.usefixtures("one_device_here")
def test_step_moves_and_holds_what_it_has_to(name, target):
    build, opened, closing, temporary = STEPS[name]
    program = build(target)
    assert program.open <= opened
    assert program.closing <= closing
    assert program.temporary <= temporary + FETCHED_AHEAD[target.name]
    sqrt, elements = {"sqrt", "rsqrt"}, compiled.leaves(target)["w0"].size  # of the second moments
    assert not sqrt & program.operations(closing=False, elements=elements)
    assert sqrt & program.operations(closing=True, elements=elements)


@functools.cache
def rule_step(target, rule, dtype, devices):
    with seeming_to_have(devices):
        return compiled.rule_step(target, rule, compiled.leaves(target), compiled.leaves(target, dtype))


RULES = [name for name, (_, other) in compiled.RULES.items() if other]
DTYPES = (jnp.float32, jnp.bfloat16)
IN_FLOAT32 = [(name, jnp.float32, 1) for name in RULES]
OTHERS = [row for row in itertools.product(RULES, DTYPES, (1, 8)) if row not in IN_FLOAT32]


# The program of a process with this number of devices, because with one the numbers of all units are joined.
@pytest.mark.combinations
@pytest.mark.parametrize(("name", "dtype", "devices_here"), [*IN_FLOAT32, *thorough(*OTHERS)])
def test_rule_moves_and_holds_no_more_than_optax(name, dtype, devices_here, target):
    rule, optax_rule = compiled.RULES[name]
    ours, theirs = rule_step(target, rule, dtype, devices_here), rule_step(target, optax_rule, dtype, 1)
    # A TPU reads a leaf once that stays in its VMEM from the norm to the update: of some leaves in one program only.
    assert ours.closing <= theirs.closing + {"h100": 0.03, "v5e": 0.8}[target.name]
    assert ours.temporary <= theirs.temporary + 0.02


@pytest.mark.parametrize("devices", [1, 8])
def test_norms_by_leaf_cost_no_pass_no_all_reduce_and_two_launches_at_most(devices, target):
    def run(leaves):
        tx = optax.chain(shrewjax.clip_by_global_norm(1.0, per_leaf=leaves), optax.adamw(1e-3))
        spec = sharded if devices > 1 else _compiled.replicated
        with seeming_to_have(devices):
            return compiled.step(target, updated, tx, compiled.leaves(target), devices=devices, spec=spec)

    program, without = run(True), run(False)
    assert program.closing == pytest.approx(without.closing, abs=1e-3)
    assert program.temporary == pytest.approx(without.temporary, abs=0.01)
    # One kernel of an H100 writes all norms, and not one for each (XLA-33). A TPU runs two scalar operations more.
    assert program.launches <= without.launches + {"h100": 1, "v5e": 2}[target.name]
    assert program.collectives == without.collectives


CONDITIONALS = {
    "clip_by_global_norm": (lambda: shrewjax.clip_by_global_norm(1.0), 0),
    "adaptive_grad_clip": (lambda: shrewjax.adaptive_grad_clip(), 0),
    "clip_by_leaf_norm": (lambda: shrewjax.clip_by_leaf_norm(1.0), 0),
    "skip_nonfinite": (lambda: shrewjax.skip_nonfinite(shrewjax.clip_by_global_norm(1.0)), 1),
    "accumulate": (lambda: shrewjax.accumulate(shrewjax.clip_by_global_norm(1.0), 4), 1),
}
TWO, OTHER_WRAPPERS = [*CONDITIONALS][:2], [*CONDITIONALS][2:]


@pytest.mark.parametrize("name", [*TWO, *thorough(*OTHER_WRAPPERS)])
@pytest.mark.usefixtures("one_device_here")
def test_a_clip_on_a_gpu_has_no_branch_and_a_wrapper_has_its_own(name, h100):
    make, number = CONDITIONALS[name]
    params = place({"w": jnp.zeros((64, 32)), "b": jnp.zeros(32)}, h100.mesh())
    program = compiled.step(h100, applied, make(), params)
    assert program.text.count(" conditional(") == number


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.usefixtures("one_device_here")
def test_norms_for_gpus_are_right_at_every_magnitude(dtype, h100):
    """Leaves of float32 are summed in float64, and those of float64 twice."""
    del h100
    largest = float(np.finfo(dtype).max)
    magnitudes = [1, largest / 2, largest**0.5, largest**-0.4, largest**-0.6, largest**-0.9, 0, np.inf, np.nan]
    row = np.asarray([0.5, 0.25, 0.125, 0.75])
    rows = (np.reshape(magnitudes, (-1, 1)) * row).astype(dtype)
    by_row = shrewjax.clip_by_leaf_norm(1.0, stacked_axes=0)

    def norms(rows, eights):
        # Known to the compiler: a zero, and a factor that makes a finite number infinite.
        known = (
            shrewjax.grad_norm([rows[0], jnp.zeros(3, rows.dtype)]),
            shrewjax.clip_grad_norm(eights * largest, 1.0)[0][0],
        )
        tracked = shrewjax.clip_by_global_norm(1.0, per_leaf=True)
        of_leaves = [tracked.update([row], tracked.init([row]))[1].leaf_norms[0] for row in rows]
        of_columns = shrewjax.adaptive_grad_clip(0.5).update(rows.T, None, jnp.ones_like(rows.T))[0]
        return (
            jnp.stack([shrewjax.grad_norm([row]) for row in rows]),
            jnp.stack(of_leaves),
            by_row.update(rows, by_row.init(rows))[1].grad_norm,
            jnp.stack([shrewjax.grad_norm([row], 1) for row in rows]),
            of_columns,
            known,
        )

    with jax.enable_x64(True):
        arguments = rows, np.asarray([8, 8], dtype)
        compiled_norms = executed.compile_for_gpus(norms, arguments, (P(), P()), executed.gpus(data=1))
        of_all, of_leaves, of_rows, sums, columns, known = jax.device_get(executed.on_cpus(compiled_norms)(*arguments))
    expected = np.asarray(magnitudes) * np.linalg.norm(row)
    np.testing.assert_allclose(of_all, expected, rtol=1e-6)
    np.testing.assert_allclose(of_rows, expected, rtol=1e-6)
    np.testing.assert_allclose(of_leaves, expected, rtol=1e-6)
    np.testing.assert_allclose(sums, np.asarray(magnitudes) * np.sum(row), rtol=1e-6)
    scales = np.minimum(1, 0.5 * 2 / np.where(np.isfinite(expected) & (expected > 0), expected, np.nan))
    scales[expected == 0] = 1
    np.testing.assert_allclose(columns, rows.T * scales, rtol=1e-6)
    np.testing.assert_allclose(known, [expected[0], np.nan], rtol=1e-6)


def squared_powers_of_two(program):
    """Products of a number, made by a shift of its exponent, with itself."""

    def source(x):
        while x.op in ("bitcast", "bitcast-convert", "broadcast", "copy", "reshape", "slice"):
            (x,) = x.operands
        return x

    products = [x.operands for x in program.instructions() if x.op == "multiply"]
    return [source(a) for a, b in products if a is b and source(a).op == "shift-left"]


@pytest.mark.parametrize("target", ["v5e"], indirect=True)  # an H100 scales nothing
@pytest.mark.parametrize("name", ["clip_by_leaf_norm", "adaptive_grad_clip"])
@pytest.mark.usefixtures("one_device_here")
def test_square_of_a_scaled_zero_is_not_regrouped(name, target):
    # (0 * c) * (0 * c) is 0, but 0 * (c * c), which XLA may make of it where it knows the zero, is NaN.
    (rule, _), mesh = compiled.RULES[name], target.mesh()
    params = place({"live": jnp.zeros(4), "frozen": jnp.zeros(4)}, mesh)
    tx = optax.chain(rule(), optax.sgd(0.1))

    def step(carry, x):
        def loss(params):
            return jnp.sum(params["live"] * x) + jnp.sum(jax.lax.stop_gradient(params["frozen"]) * x)

        return updated(tx, carry, jax.grad(loss)(carry[0]))

    carry = params, place(jax.eval_shape(tx.init, params), mesh)
    program = compile_tree(target, step, carry, place(jnp.zeros(4), mesh))
    assert "shift-left" in {x.op for x in program.instructions()}
    assert squared_powers_of_two(program) == []


@pytest.mark.thorough  # a minute of a core for v5e
@pytest.mark.usefixtures("one_device_here")
def test_clipped_cotangent_is_read_once_more_and_held_by_nothing(target):
    clip = partial(shrewjax.clip_cotangent, max_norm=1.0)
    program, without = (compiled.block_gradient(target, side) for side in (clip, unclipped))
    number = 2  # of cotangents that are clipped
    assert program.open <= without.open + number * 1.1
    # Where slices are clipped, what is scaled is read and written, too, because products read it.
    assert program.closing <= without.open + number * 3.1
    assert program.temporary <= without.temporary + 0.1


# Many devices.


def gathers(program, when=("every call", "every trip", "closing call", "rescue")):
    return [x for x in program.collectives if x[0] == "all-gather" and x[1] in when]


@pytest.mark.parametrize(
    ("tx", "opened"),
    [(lambda: compiled.window(), 3.1), (lambda: shrewjax.skip_nonfinite(compiled.optimizer(shrewjax)), 1.1)],
    ids=["accumulate", "skip_nonfinite"],
)
def test_sharded_parameters_stay_sharded_and_are_not_gathered(tx, opened, target):
    params = compiled.leaves(target)
    program = compiled.step(target, applied, tx(), params, devices=8, spec=sharded)
    new_params, new_state = program.outputs
    assert {x.spec for x in jax.tree.leaves(new_params)} == {P("data")}
    state = jax.tree.leaves(jax.eval_shape(tx().init, params))
    specs = [x.spec for x in jax.tree.leaves(new_state)]
    assert specs == [P("data") if x.ndim else P() for x in state]
    assert gathers(program) == []
    fetched_ahead = {"h100": 0.0, "v5e": 0.8}[target.name]  # small shards, before the branch
    assert program.open <= opened + fetched_ahead


@pytest.mark.parametrize("is_weighted", [False, True])
def test_window_over_devices_sends_gradients_once_and_on_closing_calls_alone(is_weighted, target):
    program = compiled.window_over_devices(target, 8, is_weighted=is_weighted)
    assert all_reduced(program) == {"closing call": pytest.approx(1)}
    assert not [x for x in program.collectives if x[1] == "every call"]
    # Besides the sums, XLA:GPU holds two copies of those leaves that it sends together, of seven, and some averages. It
    # holds the same with Optax's clip.
    assert program.temporary <= {"h100": 1.9, "v5e": 0.3}[target.name]
    assert program.closing <= {"h100": 23.0, "v5e": 13.4}[target.name]  # XLA-2: 23.7 if a branch holds a branch


def test_shards_are_summed_once_a_window_and_gathered_for_the_model_alone(target):
    program = compiled.window_over_devices(target, 8, fsdp=4)
    assert all_reduced(program) == {"closing call": pytest.approx(1)}
    assert gathers(program)
    assert gathers(program, ["closing call", "rescue"]) == []
    new_params, new_state = program.outputs
    assert {x.spec for x in jax.tree.leaves(new_params)} == {P("fsdp")}
    assert {x.spec for x in jax.tree.leaves(new_state.gradient_sum)} == {P("data", "fsdp")}
    assert {x.spec for x in jax.tree.leaves(new_state.inner_state[1][0].mu)} == {P("fsdp")}


def test_parameters_of_a_sharded_window_are_gathered_on_closing_calls_alone(target):
    program = compiled.placed_window(target, applied, compiled.window, shrewjax, 8)
    assert gathers(program, ["every call", "rescue"]) == []
    assert gathers(program, ["closing call"])
    assert all_reduced(program) == {}
    new_params, new_state = program.outputs
    assert {x.spec for x in jax.tree.leaves(new_params)} == {P()}
    assert {x.spec for x in jax.tree.leaves(new_state) if x.spec != P()} == {P("data")}
    assert {x.spec for x in jax.tree.leaves(new_state.gradient_sum)} == {P("data")}


def test_sharded_leaf_of_more_than_two_to_the_32_elements_is_counted_where_it_lies(target):
    leaf = place(jax.ShapeDtypeStruct((2**17, 2**16), np.dtype(jnp.bfloat16)), target.mesh(8), sharded)
    program = compile_tree(target, lambda leaf: shrewjax.clip_grad_percentile([leaf], 99.9)[0], leaf)
    # One read, a trip of the loop, then the clip. XLA:GPU takes two kernels, so two reads, for eleven 64-bit counts.
    assert program.closing <= {"h100": 4.01, "v5e": 2.01}[target.name]
    assert program.temporary <= 0.01
    assert max(size for _, _, size in program.collectives) <= 2048


# A whole batch in one call.


@pytest.mark.parametrize("name", ["unweighted", "weighted"])
def test_gradients_of_a_batch_are_reduced_once_after_the_loop(name, target):
    step = shrewjax.accumulated_value_and_grad(compiled.masked_loss, 8, **compiled.BATCHES[name])
    program = compiled.whole_batch(target, step, 8)
    assert " while(" in program.text
    assert all_reduced(program) == {"every call": pytest.approx(1)}
    assert gathers(program) == []


def test_sharded_parameters_are_gathered_and_their_gradients_reduced_with_each_micro_batch(any_target):
    program = compiled.whole_batch(any_target, compiled.sharded_step(any_target, 4, 8), 8, spec=sharded)
    sent = {op for op, when, size in program.collectives if when == "every trip" and size > 5e5}
    assert "all-gather" in sent
    assert sent & {"reduce-scatter", "all-reduce"}


@pytest.mark.parametrize("name", ["weighted", "drop_micro_batch"])
def test_devices_sums_of_a_batch_are_reduced_once_after_the_loop(name, target):
    step = shrewjax.accumulated_value_and_grad(compiled.masked_loss, 8, sum_over="data", **compiled.BATCHES[name])
    program = compiled.whole_batch(target, step, 8, mapped=True)
    assert " while(" in program.text
    assert all_reduced(program) == {"every call": pytest.approx(1)}


def test_batch_holds_one_tree_of_gradients_more_than_its_micro_batch(target):
    step = shrewjax.accumulated_value_and_grad(compiled.masked_loss, 8, weight_fn=compiled.counted)
    held = compiled.whole_batch(target, step, 1).temporary
    assert held <= compiled.whole_batch(target, compiled.optax_batch, 1).temporary + 0.01
    if target.name == "h100":  # here a TPU holds half of the micro-batch's gradients, too, and so it does for Optax
        part = compiled.whole_batch(target, jax.value_and_grad(compiled.masked_loss), 1, parts=8)
        assert held <= part.temporary + 1.1
