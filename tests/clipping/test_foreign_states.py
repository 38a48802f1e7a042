"""States that a rule did not make: a rule that reads none takes any; the others say which state they need."""

import itertools

import numpy as np
import optax
import pytest
from helpers import assert_close

import shrewjax

GRADS = {"w": np.asarray([3.0, -4.0], np.float32), "b": np.asarray([12.0], np.float32)}

FOREIGN = {
    "none": None,
    "empty": optax.EmptyState(),
    "of Optax's clip": optax.clip_by_global_norm(1.0).init(GRADS),
    "of an optimizer": optax.adam(1e-3).init(GRADS),
    "the parameters": GRADS,
}

# As many rules as have no history, no start and no norms by leaf.
STATELESS = {
    "clip_by_global_norm": (shrewjax.clip_by_global_norm, optax.clip_by_global_norm),
    "clip_by_block_rms": (shrewjax.clip_by_block_rms, optax.clip_by_block_rms),
    "clip_by_value": (shrewjax.clip_by_value, optax.clip),
}

STATEFUL = {
    "clip_by_global_norm(per_leaf=True)": shrewjax.clip_by_global_norm(1.0, per_leaf=True),
    "clip_by_leaf_norm": shrewjax.clip_by_leaf_norm(1.0),
    "clip_by_leaf_norm_ema": shrewjax.clip_by_leaf_norm_ema(),
    "clip_by_norm_percentile": shrewjax.clip_by_norm_percentile(90.0),
    "clip_by_norm_zscore": shrewjax.clip_by_norm_zscore(),
    "clip_by_percentile": shrewjax.clip_by_percentile(90.0),
}


@pytest.mark.parametrize("rule", STATELESS)
def test_a_rule_that_reads_no_state_takes_any_as_optax_does(rule):
    ours, theirs = STATELESS[rule]
    clipped = {name: ours(2.0).update(GRADS, state)[0] for name, state in FOREIGN.items()}
    expected = {name: theirs(2.0).update(GRADS, state)[0] for name, state in FOREIGN.items()}
    assert_close(clipped, expected, rtol=3e-7)


@pytest.mark.parametrize(("rule", "foreign"), [*zip(STATEFUL, itertools.cycle(FOREIGN), strict=False)])
def test_a_rule_that_reads_its_state_says_which_one_it_needs(rule, foreign):
    needed = type(STATEFUL[rule].init(GRADS)).__name__
    given = type(FOREIGN[foreign]).__name__
    with pytest.raises(ValueError, match=rf"^state must be the {needed} .* got {given}\. Pass the state"):
        STATEFUL[rule].update(GRADS, FOREIGN[foreign])
