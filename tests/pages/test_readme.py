"""The README's steps, as they stand there, are as small and as right as it says; so is the padded one of "Windows"."""

import re
from pathlib import Path

import edges
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import run_page
from speed import users_options

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
BEFORE, AFTER = r"(?m)^\+.*\n|^[- ]", r"(?m)^-.*\n|^[+ ]"  # what to leave out of a diff, for each of its sides
ANY_LOSS, ONE_BY_ONE = 0, 1  # the diffs


@pytest.fixture(scope="module")
def names():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return run_page(README)


def side(diff, leave_out, names):
    """The names that one side of a diff of the README defines, among those given."""
    names = dict(names)
    exec(re.sub(leave_out, "", re.findall(r"```diff\n(.*?)```", README.read_text(), re.DOTALL)[diff]), names)
    return names


@pytest.fixture(scope="module")
def steps(names):
    """Each step with its optimizer, the size of its batch, and what follows the batch in its arguments."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        padded, one_by_one = run_page(ROOT / "docs" / "guide" / "windows.md"), side(ONE_BY_ONE, AFTER, names)
    mask_and_flush = [jax.ShapeDtypeStruct((1,), bool), jax.ShapeDtypeStruct((), bool)]
    return {
        "whole batch": (names["step"], names["tx"], 4, []),
        "one by one": (one_by_one["step"], one_by_one["tx"], 1, []),
        "padded": (padded["padded_step"], padded["padded_tx"], 1, mask_and_flush),
    }


@pytest.mark.parametrize("name", ["whole batch", "one by one", "padded"])
def test_step_holds_no_second_copy_of_twenty_million_parameters(steps, name):
    """The same step, not donated, returns parameters and state in memory of its own, and copies them there."""
    step, tx, rows, others = steps[name]
    params = {"w": jax.ShapeDtypeStruct((20_000_000,), jnp.float32)}
    batch = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, 20_000_000), (rows,))]
    state = jax.eval_shape(tx.init, params)
    options = users_options()

    def compiled(step):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            program = step.lower(params, state, *batch, *others).compile(compiler_options=options)
        return program.memory_analysis(), len(re.findall(r"= f32\[20000000\]\S* copy\(", program.as_text()))

    def trees(memory):
        """The memory beside that of the arguments, in trees of parameters."""
        return (memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes) / 80_000_000

    memory, copies = compiled(step)
    undonated, more_copies = compiled(jax.jit(step.__wrapped__))
    assert copies == 0
    if name == "whole batch":
        assert trees(memory) < 2.001  # the sum, and the gradients of a micro-batch
        assert trees(undonated) > 2.99
    else:
        assert trees(memory) < 0.001
        assert trees(undonated) > 3.99  # parameters, two moments, and the window's sum
        assert more_copies >= 3


def test_both_sides_of_the_diff_for_any_loss_have_the_same_loss_and_gradients(names):
    """The mean over micro-batches, which is the mistake, is another."""
    x, y = np.random.default_rng(0).normal(size=(2, 8, 3)).astype(np.float32)
    mask = np.arange(8) % 4 < 1 + np.arange(8) // 4 * 3
    given = {"jax": jax, "jnp": jnp, "params": {"w": jnp.ones(3)}, "x": x, "y": y[:, 0], "mask": mask}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        before = side(ANY_LOSS, BEFORE, given)
        after = side(ANY_LOSS, AFTER, given | {"shrewjax": names["shrewjax"]})
        parts = [before["step"](given["params"], x[i::4], y[i::4, 0], mask[i::4])[0] for i in range(4)]
    assert before["step"] is not after["step"]
    assert np.abs(before["grads"]["w"]).min() > 1e-2
    assert abs(np.mean(parts) / before["loss"] - 1) > 0.02
    np.testing.assert_allclose(after["loss"], before["loss"], rtol=1e-5)
    np.testing.assert_allclose(after["grads"]["w"], before["grads"]["w"], rtol=1e-5)


def test_both_sides_of_the_diff_for_micro_batches_train_alike_if_they_are_even(names):
    x, y = np.random.default_rng(0).normal(size=(2, 8, 4, 3)).astype(np.float32)
    after = []
    for leave_out in (BEFORE, AFTER):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            at = side(ONE_BY_ONE, leave_out, names)
            params = {"w": jnp.zeros(3)}
            state = at["tx"].init(params)
            for i in range(8):
                params, state = at["step"](params, state, x[i], y[i, :, 0])
        after.append(params["w"])
    assert np.abs(after[0]).min() > 1e-4  # it trained
    np.testing.assert_allclose(*after, rtol=1e-5)


def section(title):
    return README.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_results_that_differ_are_those_that_the_benchmark_prints():
    with jax.numpy_dtype_promotion("standard"):
        rows = [*edges.clipped_norm(True), *edges.windows(True)]
    shown = {
        "norm after clipping 10 float16 gradients of 300 ": lambda norm: f"{norm:.0f}",
        "share of finite averages from the accumulator after a window with a NaN": lambda share: {
            1: "finite",
            0: "NaN for ever",
        }[share],
        "error of a window of 20, 3, 8 and 1 examples": lambda error: (
            f"{error:.0e}" if error < 0.01 else f"{error:.0%}"
        ),
    }
    expected = []
    for measure, of in shown.items():
        (row,) = (row for row in rows if row.measure.startswith(measure))
        expected.append([of(row.ours.value).replace("e-0", "e-"), of(row.other.value)])
    cells = re.findall(
        r"^\| (?!case).*? \| (.*?) (?:\(.*?\) )?\| (.*?) (?:\(.*?\) )?\|$", section("Results that differ"), re.M
    )
    assert list(map(list, cells)) == expected


def test_time_and_memory_are_those_of_the_page_of_costs():
    """The README shows the scanned transformer."""
    costs = (ROOT / "docs" / "cost.md").read_text()

    header, *rows = (
        line[2:-2].split(" | ") for line in costs.partition("## Whole steps on a CPU")[2].splitlines() if "|" in line
    )
    column = header.index("transformer, scanned")

    def on_cpu(way):
        cell = next(row for row in rows if row[0] == f"`{way}`")[column]
        memory, time = re.fullmatch(r"(\d\.\d) P, (\d+) ms", cell).groups()
        return f"{int(time) / 1000:.2f}", memory

    expected = [*on_cpu("shrewjax.accumulate"), *on_cpu("optax.MultiSteps")]
    assert re.findall(r"\d\.\d+", section("Results that differ").partition("More rows")[2]) == expected
