"""Sums of scatters in programs compiled for eight H100s and eight TPU v5e: does a loop over micro-batches lose any?

The gradient of an embedding is a scatter. Some versions of XLA let it add into the loop's own sum, set this sum to 0 on
all devices but one in each trip, and all-reduce it after the loop (XLA-27). Only the last micro-batch is then left on
the other devices. No CPU shows it, so these tests read compiled programs. `sums_on_devices.py` compares numbers.
"""

import importlib.metadata
import math
import re

import _compiled
import jax
import pytest
from _compiled import place, sharded
from accelerators import ACCELERATORS, all_reduced, target_named
from jax.sharding import PartitionSpec as P
from sums_on_devices import BATCH, COUNTS, LOOPS, PARAMS, STEPS, TIED, WAYS, by_hand, errors_on

PLACES = {"replicated": P(), "rows": P("data"), "columns": P(None, "data")}
SMALLEST = min(math.prod(x.shape) for x in PARAMS.values()) // 8  # elements of a shard


@pytest.fixture(scope="module", params=ACCELERATORS)
def target(request):
    return target_named(request.param)


@pytest.fixture(autouse=True)
def _as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = \(?\w+\[([\d,]*)\].*? ([\w\-]+)\(([^)]*)\)(.*)")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)")


def sums_selected_by_device(text, elements):
    """The selects by device in a loop's sum, of at least `elements` elements.

    A select whose condition differs between elements does not count: it picks the device's rows of a sharded table.
    """
    computations, inside, known = {}, None, {}
    for line in text.splitlines():
        if heading := _COMPUTATION.match(line):
            inside = known = computations.setdefault(heading[1], {})
        elif inside is not None and (found := _INSTRUCTION.match(line)):
            name, dims, op, operands, rest = found.groups()
            size = math.prod(int(n) for n in dims.split(",") if n)
            known[name] = size, op, re.findall(r"%([\w.\-]+)", operands) or [operands], _CALLED.findall(rest)
    calls = {c: (outer, x[2]) for outer, names in computations.items() for x in names.values() for c in x[3]}
    bodies = {c for names in computations.values() for x in names.values() if x[1] == "while" for c in x[3]}

    def in_loop(computation):
        return computation in bodies or (computation in calls and in_loop(calls[computation][0]))

    def tells_devices_apart(computation, name, is_scalar=False):
        if name not in computations[computation]:
            return False
        size, op, operands, _ = computations[computation][name]
        if op in ("partition-id", "replica-id"):
            return True
        if op == "parameter":
            if computation not in calls or computation in bodies:
                return False
            outer, given = calls[computation]
            return int(operands[0]) < len(given) and tells_devices_apart(outer, given[int(operands[0])], is_scalar)
        if op == "broadcast" and not is_scalar:
            (operand,) = operands
            size = computations[computation].get(operand, (0,))[0]
            return size == 1 and tells_devices_apart(computation, operand, True)
        if size != 1 and op not in ("bitcast", "copy", "reshape", "and", "not"):
            return False
        return any(tells_devices_apart(computation, x, is_scalar) for x in operands)

    def is_carried(computation, name):
        _, op, operands, _ = computations[computation].get(name, (0, "", [], []))
        if op == "parameter" and computation not in bodies and computation in calls:
            outer, given = calls[computation]
            return int(operands[0]) < len(given) and is_carried(outer, given[int(operands[0])])
        if op in ("get-tuple-element", "bitcast", "copy", "convert", "reshape"):
            return is_carried(computation, operands[0])
        return op == "parameter" and computation in bodies

    return [
        f"{computation}: {name}"
        for computation, names in computations.items()
        for name, (size, op, operands, _) in names.items()
        if op == "select" and size >= elements and in_loop(computation)
        if tells_devices_apart(computation, operands[0]) and any(is_carried(computation, x) for x in operands[1:])
    ]


def compiled_step(target, step, spec=PLACES["replicated"], params=PARAMS):
    mesh = target.mesh(8)
    unit = _compiled.bytes_on_a_device(place(params, mesh))
    params = place(params, mesh, lambda _: spec)
    return _compiled.compile_for(
        target, step, params, place(BATCH, mesh, sharded), place(COUNTS, mesh), unit=unit, donate=()
    )


@pytest.mark.parametrize(
    ("name", "where"),
    [*[(name, "replicated") for name in STEPS], ("mean", "rows"), ("mean", "columns"), ("weighted", "rows")],
)
def test_no_sum_of_scatters_is_lost_and_gradients_are_reduced_once(name, where, target):
    program = compiled_step(target, STEPS[name], PLACES[where])
    assert " while(" in program.text
    assert sums_selected_by_device(program.text, SMALLEST) == []
    sent = all_reduced(program, 4 * SMALLEST)
    if name == "drop_microbatch":  # all devices have to know whether the sum over devices is finite
        assert sent["every trip"] > 0.5
    else:
        assert sent["every trip"] == 0
        assert 0 < sent["every call"] <= 1.01


def test_no_sum_of_a_tied_embedding_is_lost(target):
    # XLA all-reduces the output's part of the gradient before the scatter adds to it: in each trip.
    program = compiled_step(target, STEPS["mean"], params=TIED)
    assert sums_selected_by_device(program.text, SMALLEST) == []
    assert all_reduced(program, 4 * SMALLEST)["every call"] > 0.9


@pytest.mark.parametrize("name", LOOPS)
def test_no_sum_of_scatters_is_lost_where_windows_are_loops(name, target):
    # The select after the sum keeps the all-reduce in each trip (XLA-24).
    program = compiled_step(target, LOOPS[name])
    assert sums_selected_by_device(program.text, SMALLEST) == []
    assert all_reduced(program, 4 * SMALLEST)["every trip"] > 0.5


def loses_sums(target):
    """Whether this compiler does, by the table in docs/compatibility.md."""
    name, first, last = {
        "h100": ("jax_cuda12_plugin", (0, 10, 1), (0, 11, 2)),
        "v5e": ("libtpu", (0, 0, 41), (0, 0, 48)),
    }[target.name]
    return first <= tuple(int(n) for n in importlib.metadata.version(name).split(".")[:3]) <= last


def test_sums_of_a_loop_by_hand_are_seen_to_be_lost_where_they_are(target):
    program = compiled_step(target, by_hand)
    is_lost = sums_selected_by_device(program.text, SMALLEST) and not all_reduced(program, 4 * SMALLEST)["every trip"]
    assert bool(is_lost) == loses_sums(target)


@pytest.mark.parametrize("names", [{"weighted", "accumulate"}, pytest.param(WAYS, marks=pytest.mark.thorough)], ids=len)
def test_sums_on_cpu_devices_are_those_of_their_parts(names):
    for name, error in errors_on(jax.devices(), names).items():
        assert error < 1e-5, name
