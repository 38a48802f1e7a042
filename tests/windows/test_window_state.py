"""The states of windows, which people save."""

import shrewjax


def test_both_states_of_a_window_have_the_same_fields_in_one_order():
    around = [name for name in shrewjax.AccumulateState._fields if name not in ("applied", "inner_state")]
    assert around == [*shrewjax.GradAccumulatorState._fields]
