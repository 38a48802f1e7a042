"""The page "Which rule?" compares every rule, and its script measures what the page says that it measures.

A quick part of the runs is in `test_examples.py`.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import which_rule

import shrewjax

pytestmark = pytest.mark.thorough

PAGE = (Path(__file__).parent.parent.parent / "docs" / "guide" / "which_rule.md").read_text()
NOBODY = np.zeros(400, bool)


def quiet():
    """Losses that stand 0.1 to either side of 2, so that their standard deviation is 0.1."""
    return np.where(np.arange(400) % 2, 2.1, 1.9)


def test_every_clip_and_every_guard_of_the_package_is_compared_and_on_the_page():
    clips = ("clip_by_", "adaptive_grad_clip", "clip_cotangent", "skip_")
    public = {name for name in shrewjax.__all__ if name.startswith(clips)}
    measured = {part for name in which_rule.RULES for part in name.split(", ")}
    assert public <= measured
    plain = PAGE.replace("`", "")
    assert [name for name in which_rule.RULES if f"| {name} |" not in plain] == []


@pytest.mark.parametrize(("loss", "spikes"), [(2.99, 0), (3.01, 1), (0.99, 1), (np.nan, 1), (np.inf, 1)])
def test_spike_score_counts_losses_ten_standard_deviations_from_the_mean_before(loss, spikes):
    losses = quiet()
    losses[250] = loss
    assert which_rule.spike_score(losses, NOBODY) == spikes / 300


def test_spike_score_leaves_out_faulty_steps_and_the_first_hundred():
    losses = quiet()
    losses[[20, 250]] = 1e28, np.nan
    assert which_rule.spike_score(losses, np.arange(400) == 250) == 0


def test_spike_score_forgets_what_is_more_than_a_thousand_steps_ago():
    losses = np.where(np.arange(2500) % 2, 2.1, 1.9)
    losses[60] = 50  # until it is forgotten, the standard deviation is 1.5 and more
    losses[[900, 2000]] = 4
    assert which_rule.spike_score(losses, np.zeros(2500, bool)) == pytest.approx(1 / 2400)


def test_steps_lost_are_those_half_a_nat_above_the_calm_run_or_not_finite():
    calm, losses = quiet(), quiet()
    losses[[3, 4, 5, 6]] += 0.49, 0.51, np.nan, np.inf
    assert which_rule.steps_lost(losses, calm, NOBODY) == 3
    assert which_rule.steps_lost(losses, calm, np.arange(400) == 5) == 2


def test_a_run_that_was_stopped_while_it_wrote_loses_its_last_row_alone(tmp_path):
    row = {"rule": "none", "value": None, "cause": "calm", "seed": 0, "steps": 400}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps(row | {"seed": 1})[:30])
    laboratory = which_rule.Laboratory(path, 400)
    assert list(laboratory.rows) == [which_rule.Key(**row)]
    assert path.read_text() == json.dumps(row) + "\n"
