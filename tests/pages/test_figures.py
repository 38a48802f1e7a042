"""Every figure of the documentation is small and legible on light and dark pages; redrawing one says the same again."""

import re
from pathlib import Path
from xml.etree import ElementTree

import explain
import jax
import numpy as np
import pytest

pytestmark = pytest.mark.thorough

FIGURES = Path(__file__).parent.parent.parent / "docs" / "figures"
FILES = sorted(FIGURES.iterdir())
assert FILES
PAGES = {"light": "#ffffff", "dark": "#121212"}
BLACK = "#000000"  # the fill of a text that has none
MEASURED = {f"explain_parts-{page}.svg" for page in PAGES}
SVG = "{http://www.w3.org/2000/svg}"


def texts(root):
    """The texts of a figure, in the order in which they are drawn."""
    return ["".join(text.itertext()).strip() for text in root.iter(f"{SVG}text")]


def coordinates(root):
    """The coordinates of each path and of each mark, in points."""
    paths = [path.get("d") for path in root.iter(f"{SVG}path")]
    marks = [f"{mark.get('x', 0)} {mark.get('y', 0)}" for mark in root.iter(f"{SVG}use")]
    return [[float(x) for x in re.findall(r"-?[\d.]+", numbers)] for numbers in (*paths, *marks)]


def luminance(color):
    """The relative luminance of the Web Content Accessibility Guidelines."""
    channels = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def contrast(color, other):
    darker, lighter = sorted((luminance(color), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_figures_are_smaller_than_100_kb():
    assert {path.name: path.stat().st_size for path in FILES if path.stat().st_size >= 100_000} == {}


def test_texts_have_a_contrast_of_4_5_with_the_page():
    for path in FILES:
        page = PAGES[path.stem.rsplit("-")[-1]]
        for text in ElementTree.parse(path).iter(f"{SVG}text"):
            style = " ".join(part.get("style", "") for part in text.iter())  # of a formula, that of each character
            assert "opacity" not in style, path.name
            for color in re.findall(r"fill: (#\w{6})", style) or [BLACK]:
                assert contrast(color, page) >= 4.5, (path.name, "".join(text.itertext()))


def test_figures_show_the_same_on_light_and_dark_pages():
    for name in sorted({path.stem.rsplit("-", 1)[0] for path in FILES}):
        light, dark = (ElementTree.parse(FIGURES / f"{name}-{page}.svg").getroot() for page in PAGES)
        assert texts(light), name
        assert texts(light) == texts(dark), name
        assert coordinates(light) == coordinates(dark), name


def test_sharded_training_was_drawn_on_eight_devices():
    """The gallery, and the command in `explain.py`, say eight."""
    for page in PAGES:
        assert "Training on 8 devices" in texts(ElementTree.parse(FIGURES / f"train_sharded-{page}.svg").getroot())


@pytest.fixture(scope="module")
def redrawn(tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        explain.main(["--out", str(folder / "explain.svg")])
    return {path.name: ElementTree.parse(path).getroot() for path in folder.iterdir()}


def test_parts_of_a_gradient_and_its_memory_are_as_the_figure_says(redrawn):
    """Bytes depend on the version of XLA, and the numbers of operations on that of JAX."""
    for name in MEASURED:
        drawn, committed = (texts(root) for root in (redrawn[name], ElementTree.parse(FIGURES / name).getroot()))
        assert [re.sub(r"\d+ (MiB|operations?)", r"\1", text) for text in drawn] == [
            re.sub(r"\d+ (MiB|operations?)", r"\1", text) for text in committed
        ]
        divided, at_once = (int(size) for size in re.findall(r"(\d+) MiB", drawn[-1]))
        assert at_once > 10 * divided
        before, loop, after = (int(re.search(r"(\d+) operation", text)[1]) for text in drawn if "operation" in text)
        assert loop > 10 * (before + after)


def test_redrawing_says_what_the_committed_figures_say(redrawn):
    committed = {path.name for path in FILES if path.name.startswith("explain_")}
    assert committed == set(redrawn)
    for name in committed - MEASURED:
        before = ElementTree.parse(FIGURES / name).getroot()
        assert texts(redrawn[name]) == texts(before), name
        for drawn, as_before in zip(coordinates(redrawn[name]), coordinates(before), strict=True):
            np.testing.assert_allclose(drawn, as_before, atol=1, err_msg=name)
