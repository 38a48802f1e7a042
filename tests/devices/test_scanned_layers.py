"""What steps of models with scanned layers hold, in programs compiled for an H100 and a TPU v5e.

The model is a small transformer, whose layers are rematerialized, and scanned except in `LISTED`. P is the bytes of its
parameters in float32. A stacked gradient of all layers is 0.9 P here. `examples/benchmarks/scanned_layers.py` prints
the same figures of a larger one.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from _transformer import Transformer
from helpers import thorough
from scanned_layers import OF_OPTAX, WINDOWS, Lookup, beyond_one, window

pytestmark = pytest.mark.usefixtures("as_users_have_it")

SEQUENCES = 2
SMALL = Transformer(layers=6, width=512, heads=4, vocabulary=1024, tokens=128)
LISTED = dataclasses.replace(SMALL, layers=4, heads=8, tokens=256, is_scanned=False)


OURS = [name for name in WINDOWS if name != OF_OPTAX]


# A TPU's VMEM has room for much of so small a model, and less for a window. With 160 million parameters both hold the
# same there (docs/cost.md).
@pytest.mark.thorough
@pytest.mark.parametrize("name", OURS)
def test_a_window_holds_no_more_than_that_of_optax(name, h100):
    found, of_optax = (window(h100, x, SMALL, SEQUENCES).temporary for x in (name, OF_OPTAX))
    assert found < of_optax + 0.05


@pytest.mark.thorough  # a minute of a core
def test_a_window_adds_the_gradients_of_layers_in_a_list_as_they_come(h100):
    found, of_optax = (window(h100, x, LISTED, 4).temporary for x in ("plain", OF_OPTAX))
    assert found < of_optax


WAYS = ["weighted", "masked", *thorough("value_and_grad", "skip_empty", "contrastive")]


# Beyond one micro-batch: the sum alone, or not even that. A loop by hand holds 1 P more, and 1.2 P on a v5e.
@pytest.mark.parametrize("way", WAYS)
def test_scanned_layers_add_their_gradients_to_the_sum_themselves(way, target):
    assert beyond_one(target, way, SMALL, SEQUENCES) < {"h100": 0.1, "v5e": 0.3}[target.name]
    assert beyond_one(target, "by hand", SMALL, SEQUENCES) > 0.9


@pytest.mark.thorough
def test_a_divided_loss_holds_no_more_than_micro_batches_of_their_own(target):
    accumulated = beyond_one(target, "weighted", SMALL, SEQUENCES)
    for way in ("value_and_grad", "masked"):
        assert beyond_one(target, way, SMALL, SEQUENCES) <= accumulated + 0.02, way  # the logits of an example


@pytest.mark.thorough
def test_bfloat16_parameters_are_summed_in_float32_without_a_tree_of_bfloat16_gradients(target):
    # The gradients that are returned are bfloat16, so the sum is temporary.
    ours, by_hand = (beyond_one(target, way, SMALL, SEQUENCES, jnp.bfloat16) for way in ("value_and_grad", "by hand"))
    assert ours < min(by_hand + 0.01, 1.05)


@pytest.mark.thorough
def test_sharded_layers_add_their_gradients_to_the_sum_themselves(target):
    on_eight = SMALL, SEQUENCES, np.float32, 8
    assert beyond_one(target, "value_and_grad", *on_eight) < beyond_one(target, "by hand", *on_eight)


def test_rows_of_a_table_are_added_to_the_sum(target):
    assert beyond_one(target, "value_and_grad", Lookup(), SEQUENCES) < 0.1
