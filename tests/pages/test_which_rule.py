"""docs/guide/clipping.md is short, its numbers are those of the rows beside the script, and so is its figure.

A quick part of the runs is in `test_examples.py`.
"""

import csv
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import which_rule
from _figures import BLUE, VERMILLION
from test_figures import PAGES, texts

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "guide" / "clipping.md").read_text()
ROWS = ROOT / "examples" / "which_rule.csv"
with ROWS.open() as file:
    ALL = list(csv.DictReader(file))
MEASURED = [row for row in ALL if row["losses"]]


def test_page_has_at_most_800_words_and_one_figure():
    assert len(PAGE.split()) <= 800
    assert PAGE.count("<img ") == 1


def test_rows_hold_three_jobs_under_every_rule_and_condition_from_five_seeds():
    runs = [(row["job"], row["condition"], row["rule"]) for row in MEASURED]
    jobs = ("transformer", "no norms", "GRU")
    assert sorted(runs) == sorted(
        (job, condition, rule) for job in jobs for condition in which_rule.CONDITIONS for rule in which_rule.RULES
    )
    for row in MEASURED:
        losses = sorted(float(loss) for loss in row["losses"].split())
        assert len(losses) == 5
        stated = [float(row[name]) for name in ("lowest", "median", "highest")]
        assert stated == pytest.approx([losses[0], losses[2], losses[4]], rel=1e-3)


def median(job, condition, rule):
    (row,) = (row for row in MEASURED if (row["job"], row["condition"], row["rule"]) == (job, condition, rule))
    return "fails" if float(row["median"]) > float(row["guess"]) else f"{float(row['median']):.2f}"


def test_table_of_the_page_has_the_medians_of_the_rows():
    (table,) = re.findall(r"\n\| job \| rate suits, no rule.*\n.*\n((?:\|.*\n)+)", PAGE)
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    runs = (("rate suits", "none"), ("rate too high", "none"), ("rate too high", "percentile 10"))
    assert shown == [[job, *(median(job, *run) for run in runs)] for job in ("transformer", "no norms", "GRU")]


def test_figure_is_that_of_the_rows(tmp_path):
    which_rule.main(["--rows", str(ROWS), "--out", str(tmp_path / "which_rule.svg")])
    for page in PAGES:
        name = f"which_rule-{page}.svg"
        drawn, committed = (ElementTree.parse(folder / name) for folder in (tmp_path, ROOT / "docs" / "figures"))
        assert texts(drawn.getroot()) == texts(committed.getroot())


def row(*losses, guess=2.3):
    return {"losses": " ".join(map(str, losses)), "guess": str(guess)}


@pytest.mark.parametrize(
    ("losses", "text", "color"),
    [
        ((1.1, 1.2, 1.4), "+0.20", VERMILLION),
        ((0.9, 0.5, 0.8), "\N{MINUS SIGN}0.20", BLUE),
        ((0.9, 0.5, 1.1), "\N{MINUS SIGN}0.10", None),  # of three seeds, one ends higher
        ((0.9, 0.5, 1.0), "\N{MINUS SIGN}0.10", None),
        ((2.3, 1e9, "nan"), "fails", VERMILLION),
    ],
)
def test_cell_is_colored_only_if_all_seeds_agree(losses, text, color):
    found, of_cell, strength = which_rule.cell(row(*losses), row(1, 1, 1))
    assert found == text
    assert (of_cell if strength else None) == color
