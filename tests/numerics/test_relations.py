"""Relations hold for numbers that were made so, and for no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shrewjax._numerics.relations import Division, as_float64, shares_of, tolerance

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(6, 4)).astype("f")
EXAMPLES = [np.array([0, 2, 4]), np.array([1, 3, 5])]
WEIGHTS = [1.0, 3.0]
DIVISION = Division(6, shares_of("mean", WEIGHTS))
PARTS = RNG.normal(size=(2, 5)).astype("f")


def found(whole, parts, division=DIVISION, rtol=1e-5):
    return division.relations(whole, list(parts), rtol)


@pytest.mark.parametrize(
    ("relation", "whole"),
    [
        ("result", (PARTS[0] + 3 * PARTS[1]) / 4),
        ("sum", PARTS[0] + PARTS[1]),
        ("unweighted_mean", (PARTS[0] + PARTS[1]) / 2),
        ("max", np.maximum(*PARTS)),
        ("min", np.minimum(*PARTS)),
    ],
)
def test_a_value_made_of_all_has_its_relation_alone(relation, whole):
    assert found(whole, PARTS) == {relation}
    assert found(whole + np.float32(1e-3), PARTS) == set()
    assert found(np.where(np.arange(5) == 3, whole + np.float32(1e-3), whole), PARTS) == set()


def test_the_same_in_all_is_the_same_and_their_mean():
    assert found(PARTS[0], [PARTS[0], PARTS[0]]) == {"same", "unweighted_mean", "result", "max", "min"}
    assert found(PARTS[0], [4 * PARTS[0], 4 / 3 * PARTS[0]]) == {"scaled"}


@pytest.mark.parametrize(
    "whole",
    [ROWS, ROWS.T, ROWS.reshape(24), ROWS.T.reshape(24), np.stack([ROWS, ROWS]).reshape(12, 4)],
    ids=["first axis", "last axis", "merged after", "merged before", "two batches"],
)
def test_rows_are_found_along_any_axis_that_holds_examples(whole):
    def of(rows):
        shapes = {
            (6, 4): lambda r: r,
            (4, 6): lambda r: r.T,
            (12, 4): lambda r: np.stack([r, r]).reshape(-1, 4),
        }
        if whole.shape == (24,):
            return (rows if whole[1] == ROWS[0, 1] else rows.T).reshape(-1)
        return shapes[whole.shape](rows)

    parts = [of(ROWS[e]) for e in EXAMPLES]
    assert found(whole, parts) == {"rows"}
    assert found(whole, parts[::-1]) == set()
    assert found(whole, [4 * parts[0], parts[1] / np.float32(0.75)]) == {"scaled"}


def test_a_table_of_pairs_of_examples_has_no_rows():
    assert found(ROWS @ ROWS.T, [ROWS[e] @ ROWS[e].T for e in EXAMPLES]) == set()


def test_a_micro_batch_without_a_weight_adds_nothing_not_even_a_nan():
    division = Division(6, shares_of("mean", [0, 2]))
    assert found(PARTS[1], [PARTS[0] * np.nan, PARTS[1]], division) >= {"result", "sum", "max"}
    assert list(shares_of("sum_over_weights", [0, 2])) == [0, 1]


def test_integers_are_compared_exactly_and_keys_by_their_numbers():
    assert "sum" in found(np.int32(30_000_001), np.array([10_000_000, 20_000_001], np.int32))
    assert "sum" not in found(np.int32(30_000_001), np.array([10_000_000, 20_000_000], np.int32))
    keys = jax.random.split(jax.random.key(0), 6)
    assert found(keys, [keys[e] for e in EXAMPLES]) == {"rows"}
    assert as_float64(np.zeros(2, jax.dtypes.float0)).tolist() == [0, 0]
    assert as_float64(jnp.bfloat16(3)).dtype == np.float64


def test_one_large_number_does_not_widen_the_tolerance_for_the_rest():
    whole = np.array([-1e9, 1, 2, 3], "f")
    assert "same" not in found(whole, [whole, whole + np.array([0, 0, 0.1, 0], "f")])


def test_the_tolerance_is_that_of_the_coarsest_dtype():
    assert tolerance([np.float32, np.int8]) == pytest.approx(2.4e-5, rel=0.05)
    assert tolerance([np.float32, jnp.bfloat16]) == pytest.approx(0.039, rel=0.05)
    assert tolerance([np.complex64]) == tolerance([np.float32])
    for narrow in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e3m4):
        assert tolerance([np.float32, narrow]) == tolerance([np.float32])
