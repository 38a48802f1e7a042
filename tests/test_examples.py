import re
import subprocess
import sys
from pathlib import Path

from matplotlib import image

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_digits_example_trains_to_95_percent_and_draws_its_figure_without_a_warning(tmp_path):
    # In a new folder, so that the example is seen to need nothing but the installed packages and to make its folder.
    figure = tmp_path / "new" / "norms.png"
    command = [sys.executable, "-W", "error", EXAMPLES / "train_digits.py", "--epochs", "14", "--out", figure]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)

    assert run.returncode == 0, run.stderr
    assert float(re.search(r"^test accuracy: (\S+)$", run.stdout, re.MULTILINE)[1]) > 0.95
    assert figure.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = image.imread(figure)
    assert len({tuple(pixel) for pixel in pixels.reshape(-1, pixels.shape[-1])}) > 20


def test_choose_max_norm_example_draws_every_rule_without_a_warning(tmp_path):
    figure = tmp_path / "new" / "norms.png"
    command = [sys.executable, "-W", "error", EXAMPLES / "choose_max_norm.py", "--steps", "120", "--out", figure]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)

    assert run.returncode == 0, run.stderr
    shares = dict(re.findall(r"^(.+): acts on (\S+)% of 120 steps$", run.stdout, re.MULTILINE))
    assert len(shares) == 5
    assert float(shares["AutoClip, 10th percentile"]) > 70  # by its definition, nearly nine in ten
    assert figure.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = image.imread(figure)
    assert len({tuple(pixel) for pixel in pixels.reshape(-1, pixels.shape[-1])}) > 20
