"""The style of the examples' figures, set when this module is imported, and a way to save them for light and dark.

Colour-blind readers can tell the four hues apart. Each colour except FAINT has enough contrast for text on its page.
`save` draws a figure once, in the colours for a white page. For a dark page it replaces each colour.
"""

import io
import re
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

BLUE, VERMILLION, GREEN, PURPLE = "#0072b2", "#c04a00", "#00805e", "#a3478a"
INK, MUTED, FAINT = (
    "#24292f",
    "#656d76",
    "#d0d7de",
)  # for text and axes, for what is less important, for areas
FOR_DARK = {
    BLUE: "#56b4e9",
    VERMILLION: "#ff8142",
    GREEN: "#00b284",
    PURPLE: "#dd8fc4",
    INK: "#e6edf3",
    MUTED: "#9198a1",
    FAINT: "#3d444d",
}

mpl.rcParams.update(
    {
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "axes.linewidth": 0.6,
        "axes.prop_cycle": mpl.cycler(color=[BLUE, VERMILLION, GREEN, PURPLE, INK]),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": INK,
        "axes.titlelocation": "left",
        "axes.titlesize": "medium",
        "figure.constrained_layout.h_pad": 0.08,
        "figure.constrained_layout.use": True,
        "figure.constrained_layout.w_pad": 0.08,
        "font.family": "DejaVu Sans",  # comes with Matplotlib, so that the layout is the same everywhere
        "legend.frameon": False,
        "lines.linewidth": 1.2,
        "path.simplify_threshold": 0.2,
        "svg.fonttype": "none",  # texts stay texts
        "svg.hashsalt": "shrewjax",  # else every drawing has other names inside
        "text.color": INK,
        "xtick.color": MUTED,
        "xtick.labelcolor": INK,
        "xtick.minor.width": 0.4,
        "ytick.color": MUTED,
        "ytick.labelcolor": INK,
        "ytick.minor.width": 0.4,
    }
)


def threshold(
    axes: Axes, value: float, text: str, *, side: str = "right", color: str = INK
) -> None:
    """Draws a dashed line at the value, with the text above its left or right end."""
    axes.axhline(value, color=color, linestyle="--", linewidth=1)
    place = {"xycoords": ("axes fraction", "data"), "xytext": (0, 3), "textcoords": "offset points"}
    axes.annotate(text, ({"left": 0.02, "right": 1}[side], value), **place, ha=side, color=color)


def plain_ticks(*axes: Axis) -> None:
    """Writes the ticks of logarithmic axes as plain numbers: 0.5, 1, 2, 5."""
    for axis in axes:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")


def save(figure: Figure, path: Path) -> None:
    """Writes the figure, and its folder, and says so. NAME.svg becomes NAME-light.svg and NAME-dark.svg."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".svg":
        figure.savefig(path, dpi=150)
        print(f"figure: {path}")
        return
    drawn = io.StringIO()
    # Without a date and a version, a figure that has not changed is the same file.
    figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    # Matplotlib names no other font, and a reader without this one would get one with serifs.
    light = drawn.getvalue().replace("'DejaVu Sans'", "'DejaVu Sans', Verdana, sans-serif")
    # A hundredth of a point is fine enough.
    light = re.sub(r'(?<= d=")[^"]*', lambda d: re.sub(r"\n|(?<=\.\d\d)\d+", "", d[0]), light)
    unlisted = set(re.findall(r"#[0-9a-f]{6}\b", light)) - set(FOR_DARK)
    if unlisted:
        raise ValueError(
            f"{path.name} has the colours {sorted(unlisted)}, which FOR_DARK does not list. Use one of its own"
        )
    dark = re.sub("|".join(FOR_DARK), lambda color: FOR_DARK[color[0]], light)
    for name, svg in (("light", light), ("dark", dark)):
        variant = path.with_stem(f"{path.stem}-{name}")
        variant.write_text(re.sub(r"\s+$", "\n", svg, flags=re.MULTILINE))
        print(f"figure: {variant}")
