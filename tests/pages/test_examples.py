"""Every example runs as its user would run it, without a warning, and what it reports holds.

Each is a fork of one process that has imported what they import. Most of the time is compilation, so nothing is
optimized, and they run as short as their claims allow. All but the main one are `thorough`: CI runs them.
"""

import csv
import re
import socket
import struct
from pathlib import Path

import pytest
import speed
from PIL import Image
from tensorboardX.proto.event_pb2 import Event

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
# Nothing optimized compiles fastest.
QUICKLY = {"XLA_FLAGS": speed.as_xla_flags(*speed.FLAGS)}


@pytest.fixture
def run(forks, tmp_path):
    # In a new folder, so that the example is seen to need nothing but the installed packages and to make its folder.
    def run(name, *arguments, out, beside=()):
        """Runs an example, and a second process with the arguments `beside` if given. Returns texts and the file."""
        commands = [(EXAMPLES / name, *arguments, "--out", tmp_path / out)]
        commands += [(EXAMPLES / name, *beside)] if beside else []
        results = forks(*commands, folder=tmp_path, environment=QUICKLY)
        for code, _, errors in results:
            assert code == 0, errors
        assert "100%" in results[0][2]  # the progress bar's end
        printed = [printed for _, printed, _ in results]
        return (*printed, tmp_path / out)

    return run


def numbers(pattern, text):
    """The groups of the one line that looks like this, as floats."""
    (found,) = re.findall(rf"^{pattern}$", text, re.MULTILINE)
    return [float(x.replace(",", "")) for x in (found if isinstance(found, tuple) else (found,))]


def assert_is_drawn(path):
    with Image.open(path) as figure:
        assert figure.format == "PNG"
        assert len(figure.getcolors(figure.width * figure.height)) > 20


def test_nnx_example_recognises_95_percent_of_digits(run):
    printed, figure = run("train_digits.py", "--epochs", 6, out="new/digits.png")

    assert numbers(r"test accuracy: (\S+)", printed) > [0.95]
    assert_is_drawn(figure)


def test_choose_max_norm_example_replays_every_rule(run):
    printed, figure = run("choose_max_norm.py", "--steps", 50, out="new/norms.png")

    shares = dict(re.findall(r"^(.+): acts on (\S+)% of 50 steps$", printed, re.MULTILINE))
    assert len(shares) == 5
    # By its definition, all but one in ten, and fewer while the norms fall.
    assert 50 < float(shares["AutoClip, 10th percentile"]) <= 90
    (largest,) = numbers(r"largest leaf: [a-z/_]+, (\d+)% of the squared norm in the median", printed)
    assert 100 / 6 < largest < 100  # of six leaves
    assert_is_drawn(figure)


def test_choose_batch_size_example_sees_the_noise_grow_and_what_long_windows_cost(run):
    arguments = ("--images", 24576, "--seeds", 2, "--target", 0.2)
    printed, figure = run("choose_batch_size.py", *arguments, out="new/batch_size.png")

    line = r"noise scale (\S+) early, (\S+) at last; loss 0.2 after (\S+) images in (\S+) steps \(predicted: .*\)"
    early, late, images, steps = zip(
        *(numbers(f"windows of {size}: {line}", printed) for size in (16, 128, 1024)), strict=True
    )
    assert all(0 < first < last < 1024 for first, last in zip(early, late, strict=True))
    assert images[0] < images[1] < images[2] / 2
    assert steps[0] > 3 * steps[1] > 3 * steps[2]
    assert_is_drawn(figure)


def test_linen_example_learns_in_float16_and_drops_exactly_what_overflowed(run):
    printed, figure = run("train_linen.py", "--epochs", 6, out="new/linen.png")

    assert numbers(r"test accuracy: (\S+)", printed) > [0.9]
    # By two that look for themselves: the accumulation, and Flax's loss scale.
    dropped, halved = numbers(r"micro-batches dropped: (\d+); loss scale halved: (\d+) times", printed)
    assert dropped == halved > 0
    assert_is_drawn(figure)


def test_equinox_example_trains_a_new_head_and_nothing_else(run):
    printed, figure = run("train_equinox.py", "--epochs", 8, out="new/equinox.png")

    body, head = 64 * 128 + 128 + 128 * 128 + 128, 128 * 10 + 10
    sizes = re.findall(r"^training (\d+) of (\d+) numbers, with (\d+) in the accumulator$", printed, re.MULTILINE)
    assert [[int(x) for x in row] for row in sizes] == [[body + head] * 3, [head, body + head, head]]
    assert "\nbody unchanged: True\n" in printed
    share = r"(\S+)% of digits 0 to 4, (\S+)% of digits 5 to 9"
    seen, unseen = numbers(f"all trained on 0 to 4: {share}", printed)
    assert seen > 95
    assert unseen == 0
    assert min(numbers(f"new head on all, body frozen: {share}", printed)) > 50
    assert_is_drawn(figure)


def test_ppo_example_keeps_the_pole_up_longer_with_either_optimizer(run):
    printed, figure = run("train_ppo.py", "--calls", 2, "--iterations", 5, out="new/ppo.png")

    for name in ("shrewjax", "Optax"):
        first, last, steps, rate = numbers(
            rf"{name}: episodes of (\S+) steps at first, (\S+) at last; (\d+) micro-steps, (\d+) a second; .*", printed
        )
        assert first < 60
        assert last > 3 * first
        assert steps == 2 * 5 * 128
        assert rate > 0
    assert_is_drawn(figure)


def test_recurrent_example_explodes_and_learns_soonest_where_what_flows_back_is_clipped(run):
    printed, figure = run("train_recurrent.py", "--steps", 18, out="new/recurrent.png")

    last, first = numbers("without clipping: the gradient of the last state is (.+), of the first (.+)", printed)
    assert first > 1e4 * last
    _, clipped = numbers("clip_cotangent: the gradient of the last state is (.+), of the first (.+)", printed)
    assert clipped == pytest.approx(4 / (32 * 200), rel=0.05)
    line = r": loss (\S+) at first, (\S+) at last; gradient norm \S+ in the median, (\S+) at most"
    runs = {name: numbers(name + line, printed) for name in ("without clipping", "global norm", "clip_cotangent")}
    assert not runs["without clipping"][1] < runs["without clipping"][0] - 1  # it is NaN, or as bad as at first
    assert runs["clip_cotangent"][1] < runs["global norm"][1] - 1
    assert runs["clip_cotangent"][2] < 10 < 100 < runs["global norm"][2]
    assert_is_drawn(figure)


def test_transformer_example_has_the_gradient_of_the_large_batch_from_uneven_micro_batches(run):
    arguments = ("--steps", 16, "--length", 32, "--layers", 1, "--compare-every", 8)
    printed, figure = run("train_transformer.py", *arguments, out="new/transformer.png")

    least, most = numbers("characters in a micro-batch: (.+) to (.+)", printed)
    assert most > 1.2 * least
    first, last = numbers("loss a character: (.+) at first, (.+) at last", printed)
    assert last < first - 1
    error = r"against the large batch, at worst: loss off by (\S+), gradient by (\S+) of its norm"
    divided_loss, divided = numbers(f"value_and_grad {error}", printed)
    mean_loss, mean = numbers(f"mean of means {error}", printed)
    assert divided < 1e-5  # rounding
    assert mean > 5e-3
    assert divided_loss < 1e-5 < mean_loss
    assert_is_drawn(figure)


def test_batch_norm_example_learns_from_eight_micro_batches_a_step_as_from_one_batch(run):
    printed, figure = run("train_batch_norm.py", "--epochs", 5, out="new/batch_norm.png")

    ours, whole = (numbers(rf"{k} micro-batch.*: test accuracy (\S+)", printed)[0] for k in (8, 1))
    assert min(ours, whole) > 0.9
    (distance,) = numbers(r"running mean: off by (\S+) of the data's", printed)
    assert distance < 0.05
    assert_is_drawn(figure)


def events(folder):
    """The event file's records: a length and its checksum (12 bytes), the record, its checksum (4 bytes)."""
    (path,) = folder.glob("events.out.tfevents.*")
    data = path.read_bytes()
    while data:
        (length,) = struct.unpack_from("<Q", data)
        yield Event.FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_tensorboard_example_logs_each_window_of_every_metric(run):
    printed, folder = run("log_tensorboard.py", "--epochs", 6, out="new/events")

    accuracy, windows = numbers(r"test accuracy: (\S+) after (\d+) optimizer steps", printed)
    logged = {}
    for event in events(folder):
        for value in event.summary.value:
            logged.setdefault(value.tag, []).append((event.step, value.simple_value))
    of_guard = ("skip_nonfinite/applied", "skip_nonfinite/skipped")
    of_clip = tuple(f"clip_by_norm_percentile/{x}" for x in ("grad_norm", "threshold", "clip_scale"))
    leaves = [f"clip_by_global_norm/leaf_norm/{layer}/{x}" for layer in range(3) for x in ("bias", "kernel")]
    share = "clip_by_global_norm/largest_share"
    names = ("loss", "accumulate/windows", "accumulate/weight_sum", *of_guard, *of_clip, *leaves, share)
    assert {f"train/{x}" for x in names} < set(logged)
    for tag, points in logged.items():
        if tag.startswith("train/"):
            assert [step for step, _ in points] == list(range(1, int(windows) + 1)), tag

    def values(tag):
        return [value for _, value in logged[tag]]

    assert values("train/accumulate/windows") == list(range(1, int(windows) + 1))
    loss = values("train/loss")
    assert sum(loss[-7:]) < sum(loss[:7]) / 2  # by epochs of seven windows
    norms, thresholds, scales = (values(f"train/{name}") for name in of_clip)
    assert [scale < 1 for scale in scales] == [
        norm > threshold for norm, threshold in zip(norms, thresholds, strict=True)
    ]
    by_leaf = zip(*(values(f"train/{name}") for name in leaves), strict=True)
    squares = [[norm**2 for norm in of_window] for of_window in by_leaf]
    assert [sum(x) ** 0.5 for x in squares] == pytest.approx(norms, rel=1e-5)
    assert [max(x) / sum(x) for x in squares] == pytest.approx(values(f"train/{share}"), rel=1e-5)
    assert len(values("test/accuracy")) == 6
    assert values("test/accuracy")[-1] == pytest.approx(accuracy, abs=1e-4)
    assert accuracy > 0.9


def test_sharded_example_resumes_in_mid_window_on_fewer_devices_in_two_processes(run):
    script = "train_sharded.py"
    arguments = ("--micro-steps", 32, "--save-every", 21, "--length", 32, "--layers", 1, "--checkpoints", "saved")
    whole, figure = run(script, "--devices", 8, *arguments, out="new/sharded.png")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    arguments += ("--resume", "--devices", 2, "--rows", 4, "--coordinator", coordinator, "--num-processes", 2)
    first, second = ((*arguments, "--process-id", i) for i in (0, 1))
    resumed, others, _ = run(script, *first, out="new/resumed.png", beside=second)
    assert "window" not in others  # the first process reports for both

    for printed in (whole, resumed):
        assert numbers("when a window closes: (.+) all-reduce of gradients, .*", printed) == [1]
        assert numbers("on every micro-step: (.+) all-reduce of gradients, .*", printed) == [0]
    assert numbers("resumed after (.+) micro-steps, (.+) of them in an open window", resumed) == [21, 5]
    window = r"^window (\d+): loss (\S+) in 8 micro-steps, gradient norm (\S+)$"
    expected = {number: values for number, *values in re.findall(window, whole, re.MULTILINE)}
    found = {number: values for number, *values in re.findall(window, resumed, re.MULTILINE)}
    assert list(expected) == ["1", "2", "3", "4"]
    assert float(expected["4"][0]) < float(expected["1"][0]) - 1
    assert list(found) == ["4"]
    for value, same in zip(found["4"], expected["4"], strict=True):
        assert float(value) == pytest.approx(float(same), rel=1e-4)
    # The window that was open when it was saved: its gradients, of which most had been added up by then.
    norms = [numbers(r"window 3: .*, gradient norm (\S+)", printed) for printed in (whole, resumed)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert_is_drawn(figure)


def test_which_rule_example_writes_what_every_rule_did_to_a_gru_and_draws_it(run):
    _, figure = run("which_rule.py", "--jobs", "GRU", "--steps", 250, "--seeds", 0, out="new/rule.png")

    with figure.with_suffix(".csv").open() as file:
        rows = {(row["condition"], row["rule"]): row for row in csv.DictReader(file)}
    assert len(rows) == 4 * 8
    losses = {key: [float(loss) for loss in row["losses"].split()] for key, row in rows.items()}
    assert max(losses["rate too high", "percentile 10"]) < 0.3 < min(losses["rate too high", "none"])
    assert max(losses["rate suits", "none"]) < 0.3
    measured = [float(rows["rate suits", f"global {name}"]["threshold"]) for name in ("median", "90th pct")]
    assert 0 < measured[0] < measured[1] < 3
    assert_is_drawn(figure)
