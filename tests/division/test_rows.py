"""Rows: which elements belong to a micro-batch's examples. The oracle numbers the example of each element by hand."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from shrewjax._division.rows import Rows, joined, turns

K = 3
# An axis of rows, and how many neighbours an example has in each block. The other axes are 2 and 3.
LAYOUTS = [
    (Rows(0, (8,)), 1),
    (Rows(1, (8,)), 2),
    (Rows(2, (8, 8)), 1),
    (Rows(1, (8, 5, 5, 8)), 3),
    (Rows(0, (4, 5)), 2),
]


def examples(rows, shape):
    """The number of the example that each element belongs to, in its own set."""
    neighbours = shape[rows.axis] // sum(rows.sets)
    along = np.concatenate([np.repeat(np.arange(size), neighbours) for size in rows.sets])
    return np.broadcast_to(along.reshape([-1 if d == rows.axis else 1 for d in range(len(shape))]), shape)


def shape_of(rows, neighbours):
    shape = [2, 3]
    shape.insert(rows.axis, sum(rows.sets) * neighbours)
    return tuple(shape)


@pytest.mark.parametrize(("rows", "neighbours"), LAYOUTS, ids=str)
def test_a_part_has_the_elements_of_every_kth_example_in_their_order_and_parts_make_the_whole(rows, neighbours):
    shape = shape_of(rows, neighbours)
    x, whole = np.arange(math.prod(shape)).reshape(shape), {s: s for s in rows.sets}
    pieces = rows.apart(jnp.asarray(x), whole)
    np.testing.assert_array_equal(rows.together(pieces, shape, whole), x)
    by_piece = [[] for _ in pieces]
    for its in turns(whole, K):
        of_turns = [its.of(piece, s, K) for piece, s in zip(pieces, rows.sets_of_pieces(), strict=True)]
        for i in range(its.first, its.last):
            of_part = rows.shape(shape, its.sizes)
            found = rows.together([y[:, i - its.first] for y in of_turns], of_part, its.sizes)
            is_own = np.moveaxis(examples(rows, shape), rows.axis, 0)[:, 0, 0] % K == i
            np.testing.assert_array_equal(found, np.compress(is_own, x, rows.axis))
            # Where a block ends in the part, all own elements before its end in the whole have come.
            assert all(own == is_own[:end].sum() for end, own in rows.bounds(shape, its.sizes).items())
        for parts, y in zip(by_piece, of_turns, strict=True):
            parts.append(y.swapaxes(0, 1))
    for piece, parts in zip(pieces, by_piece, strict=True):
        np.testing.assert_array_equal(joined(parts), piece)


@pytest.mark.parametrize("counts", [(8,), (9,), (7, 16, 3), (112, 16), (4,)], ids=str)
def test_all_micro_batches_run_and_those_of_one_loop_have_as_many_examples(counts):
    loops = turns({n: n for n in counts}, K)
    assert [i for its in loops for i in range(its.first, its.last)] == [*range(K)]
    for its in loops:
        for i in range(its.first, its.last):
            assert its.sizes == {n: len(range(i, n, K)) for n in counts}
    assert all(a.sizes != b.sizes for a, b in itertools.pairwise(loops))


def test_a_reshape_keeps_rows_only_if_each_element_stays_with_its_example():
    """Tries each reshape of 48 elements into at most three axes, also with axes that are as long as others."""
    shapes = [s for n in (1, 2, 3) for s in itertools.product((1, 2, 3, 4, 6, 8, 12, 24, 48), repeat=n)]
    shapes = [s for s in shapes if math.prod(s) == 48]
    kept = 0
    for old, new, sets in itertools.product(shapes, shapes, [(4,), (2,), (2, 2), (4, 2), (3, 3, 6)]):
        for axis in range(len(old)):
            rows = Rows(axis, sets)
            found = rows.reshaped(old, new) if rows.fits(old) else None
            if found:
                kept += 1
                assert found.fits(new), (rows, old, new)
                there = examples(rows, old).reshape(new)
                np.testing.assert_array_equal(examples(found, new), there, err_msg=f"{rows} {old} {new} {found}")
    assert kept > 1000


@pytest.mark.parametrize(
    ("rows", "old", "new", "expected"),
    [
        (Rows(0, (8,)), (8, 3, 4), (24, 4), Rows(0, (8,))),
        (Rows(0, (8,)), (24, 4), (8, 3, 4), Rows(0, (8,))),
        (Rows(1, (8,)), (3, 8, 4), (24, 4), Rows(0, (8,) * 3)),
        (Rows(0, (8,) * 3), (24, 4), (3, 8, 4), Rows(1, (8,))),
        (Rows(0, (8, 5)), (13, 4), (13, 2, 2), Rows(0, (8, 5))),
        (Rows(0, (8,)), (8, 3), (4, 6), None),
        (Rows(0, (8, 5)), (13, 4), (4, 13), None),
    ],
    ids=str,
)
def test_batches_and_axes_of_time_join_and_part_in_both_orders(rows, old, new, expected):
    assert rows.reshaped(old, new) == expected
