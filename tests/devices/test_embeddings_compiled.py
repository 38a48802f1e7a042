"""Sums of scatters in programs compiled for eight H100s and eight TPU v5e: does a loop over micro-batches lose any?

The gradient of an embedding is a scatter. Some versions of XLA let it add into the loop's own sum, set this sum to 0 on
all devices but one in each trip, and all-reduce it after the loop (XLA-27). Only the last micro-batch is then left on
the other devices. Programs for H100s run on CPU devices here, and their numbers are compared. Those for TPUs are read.
`sums_on_devices.py` compares numbers on devices that are here.
"""

import functools
import math

import _compiled
import _hlo
import executed
import jax
import numpy as np
import pytest
from _compiled import place, sharded
from accelerators import all_reduced, loses_sums
from helpers import thorough
from jax.sharding import PartitionSpec as P
from sums_on_devices import (
    BATCH,
    COUNTS,
    LOOPS,
    PARAMS,
    STEPS,
    TIED,
    VOCABULARY,
    WAYS,
    by_hand,
    errors_on,
    expected_of,
    values,
)

pytestmark = pytest.mark.usefixtures("as_users_have_it")

PLACES = {"replicated": P(), "rows": P("data"), "columns": P(None, "data")}
SMALLEST = min(math.prod(x.shape) for x in PARAMS.values()) // 8  # elements of a shard


def sums_selected_by_device(text, elements):
    """The selects by device in a loop's sum, of at least `elements` elements.

    A select whose condition differs between elements does not count: it picks the device's rows of a sharded table.
    """
    computations = _hlo.parse(text)
    home = {x: computation for computation in computations for x in computation}
    callers = {called: x for x in home for called in x.called}
    bodies = {called for called, x in callers.items() if x.op == "while"}

    def in_loop(computation):
        return computation in bodies or (computation in callers and in_loop(home[callers[computation]]))

    def elements_of(x):
        return x.arrays[0].elements if x.arrays else 0

    def given_to(parameter):
        """What the caller of a fusion gives it; of a loop, nothing."""
        caller = callers.get(home[parameter])
        operands = caller.operands if caller and home[parameter] not in bodies else []
        return operands[int(parameter.given) :][:1]

    def tells_devices_apart(x, is_scalar=False):
        if x.op in ("partition-id", "replica-id"):
            return True
        if x.op == "parameter":
            return any(tells_devices_apart(y, is_scalar) for y in given_to(x))
        if x.op == "broadcast" and not is_scalar:
            return elements_of(x.operands[0]) == 1 and tells_devices_apart(x.operands[0], True)
        if elements_of(x) != 1 and x.op not in ("bitcast", "copy", "reshape", "and", "not"):
            return False
        return any(tells_devices_apart(y, is_scalar) for y in x.operands)

    def is_carried(x):
        if x.op == "parameter" and home[x] not in bodies:
            return any(is_carried(y) for y in given_to(x))
        if x.op in ("get-tuple-element", "bitcast", "copy", "convert", "reshape"):
            return is_carried(x.operands[0])
        return x.op == "parameter"

    return [
        f"{home[x].name}: {x.name}"
        for x in home
        if x.op == "select" and elements_of(x) >= elements and in_loop(home[x])
        if tells_devices_apart(x.operands[0]) and any(is_carried(y) for y in x.operands[1:])
    ]


@functools.cache
def arguments_and_expected(tied=False):
    """Numbers for a step, and the results of each way to write it."""
    params, tokens = values(TIED if tied else PARAMS)
    return (params, tokens, np.zeros(VOCABULARY, np.float32)), expected_of(params, tokens)


def assert_nothing_is_lost(target, program, name, **options):
    """Of a program for H100s, by its numbers; of one for TPUs, by its text."""
    if target.name == "h100":
        arguments, expected = arguments_and_expected(**options)
        errors = executed.numbers(program.compiled, arguments, expected[name])
        assert max(errors.values()) < executed.TOLERANCE, errors
    else:
        assert sums_selected_by_device(program.text, SMALLEST) == []


def compiled_step(target, step, spec=PLACES["replicated"], params=PARAMS):
    mesh = target.mesh(8)
    unit = _compiled.bytes_on_a_device(place(params, mesh))
    params = place(params, mesh, lambda _: spec)
    return _compiled.compile_for(
        target, step, params, place(BATCH, mesh, sharded), place(COUNTS, mesh), unit=unit, donate=()
    )


@pytest.mark.combinations
@pytest.mark.parametrize(
    ("name", "where"),
    [*[(name, "replicated") for name in STEPS], ("mean", "rows"), ("mean", "columns"), ("weighted", "rows")],
)
def test_no_sum_of_scatters_is_lost_and_gradients_are_reduced_once(name, where, target):
    program = compiled_step(target, STEPS[name], PLACES[where])
    assert " while(" in program.text
    assert_nothing_is_lost(target, program, name)
    sent = all_reduced(program, 4 * SMALLEST)
    if name == "drop_micro_batch":  # all devices have to know whether the sum over devices is finite
        assert sent["every trip"] > 0.5
    else:
        assert sent["every trip"] == 0
        assert 0 < sent["every call"] <= 1.01


def test_no_sum_of_a_tied_embedding_is_lost(target):
    # XLA all-reduces the output's part of the gradient before the scatter adds to it: in each trip.
    program = compiled_step(target, STEPS["mean"], params=TIED)
    assert_nothing_is_lost(target, program, "mean", tied=True)
    assert all_reduced(program, 4 * SMALLEST)["every call"] > 0.9


@pytest.mark.parametrize("name", LOOPS)
def test_no_sum_of_scatters_is_lost_where_windows_are_loops(name, target):
    # The select after the sum keeps the all-reduce in each trip (XLA-24).
    program = compiled_step(target, LOOPS[name])
    assert_nothing_is_lost(target, program, name)
    assert all_reduced(program, 4 * SMALLEST)["every trip"] > 0.5


def test_sums_of_a_loop_by_hand_are_seen_to_be_lost_where_they_are(target):
    program = compiled_step(target, by_hand)
    is_lost = sums_selected_by_device(program.text, SMALLEST) and not all_reduced(program, 4 * SMALLEST)["every trip"]
    assert bool(is_lost) == loses_sums(target)


@pytest.mark.parametrize("names", [{"weighted", "accumulate"}, *thorough(WAYS)], ids=len)
def test_sums_on_cpu_devices_are_those_of_their_parts(names):
    for name, error in errors_on(jax.devices(), names).items():
        assert error < 1e-5, name
