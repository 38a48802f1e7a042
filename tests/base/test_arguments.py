"""A wrong argument is an error that names it."""

import fractions
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_refused, bits
from speed import quick_jit

import shrewjax
from shrewjax._base import arguments

f32 = np.float32


NORM_CLIPS = shrewjax.clip_by_global_norm, shrewjax.clip_by_leaf_norm


def test_static_threshold_below_zero_or_nan_is_an_error_that_names_it():
    bad = [-1, -1e-30, float("nan"), f32(-2), np.float64("nan"), -np.inf, -(10**400)]
    assert_refused([*NORM_CLIPS, partial(shrewjax.clip_grad_norm, jnp.ones(2))], bad, "max_norm must be")
    assert_refused([shrewjax.clip_by_value, partial(shrewjax.clip_grad_value, jnp.ones(2))], bad, "max_value must be")


def test_threshold_that_is_no_real_scalar_is_an_error_that_names_it():
    bad = ["1", None, 1j, True, np.True_, np.ones(2), jnp.ones(2), jnp.ones((), complex), jnp.ones((), bool), len]
    assert_refused(NORM_CLIPS, bad, "max_norm must be a real scalar")
    assert_refused([shrewjax.clip_by_value], bad, "max_value must be a real scalar")


def test_minus_zero_as_threshold_is_zero():
    clips = quick_jit(lambda x: (shrewjax.clip_grad_norm(x, -0.0)[0], shrewjax.clip_grad_value(x, -0.0)))
    for clipped in clips(f32([1, 2])):
        assert bits(clipped) == bits(f32([0, 0]))


def test_a_schedule_as_threshold_is_an_error_that_tells_the_way():
    with pytest.raises(ValueError, match="inject_hyperparams"):
        shrewjax.clip_by_global_norm(optax.constant_schedule(1.0))


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        (None, "For no limit, pass jnp.inf"),
        ({"w": np.ones(2, f32)}, "If these are gradients, pass them before max_norm, or to update"),
        ([1.0, 2.0], None),
    ],
    ids=str,
)
def test_a_threshold_that_is_no_number_speaks_of_gradients_only_if_it_holds_arrays(given, remedy):
    with pytest.raises(ValueError, match=r"^max_norm must be a real scalar >= 0, got ") as raised:
        shrewjax.clip_grad_norm(1.0, given)
    assert str(raised.value).partition(". ")[2] == (remedy or "")
    assert bits(shrewjax.clip_grad_norm(f32([3, 4]), np.inf)[0]) == bits(f32([3, 4]))


def test_a_function_of_leaves_gets_a_name_and_the_leaf():
    params = {"w": jnp.ones((2, 3))}
    for argument in ("stacked_axes", "sharded_over"):
        tx = shrewjax.clip_by_leaf_norm(1.0, **{argument: lambda name: None})
        with pytest.raises(
            ValueError, match=rf"^{argument} is called with a leaf's name and the leaf, but it takes \(name"
        ):
            tx.update(params, tx.init(params))


def test_percentile_outside_of_its_range_is_an_error_that_names_it():
    bad = [-1, 100.5, np.nan, np.inf, f32(-1e-30), "50", True, 1j, [50], None]
    clips = shrewjax.clip_by_percentile, partial(shrewjax.clip_grad_percentile, jnp.ones(2))
    assert_refused(clips, bad, "percentile must be")


def test_length_of_a_history_that_makes_no_sense_is_an_error():
    make = lambda length: shrewjax.clip_by_norm_percentile(10.0, history_length=length)  # noqa: E731
    assert_refused([make], [0, -1, 2.5, "3", True], "history_length must be a Python int >= 1")


@pytest.mark.parametrize("option", ["method", "scope", "over"])
def test_an_unknown_choice_is_an_error_that_lists_the_known_ones(option):
    with pytest.raises(ValueError, match=f"{option} must be one of .*got 'median'"):
        shrewjax.clip_by_percentile(50, **{option: "median"})


def test_ord_out_of_range_is_an_error():
    assert_refused([partial(shrewjax.grad_norm, [np.ones(2, f32)])], [0, 0.99, -1, np.nan, "2", True], "ord must be")


def test_traced_ord_is_an_error_that_says_why():
    with pytest.raises(ValueError, match=r"ord must be static.*inject_hyperparams"):
        jax.jit(lambda p: shrewjax.grad_norm([jnp.ones(2)], p))(2.0)
    with pytest.raises(ValueError, match="ord"):
        shrewjax.grad_norm([jnp.ones(2)], jnp.float32(2))


@pytest.mark.parametrize("end", [2.0**-30, 2.0**100])
def test_weights_are_refused_from_the_first_float_beyond_their_range(end):
    beyond = np.nextafter(end, 0 if end < 1 else np.inf)
    assert arguments.weight(end, {()}) == end
    with pytest.raises(ValueError, match=r"weight must be 0, or between 2\*\*-30 and 2\*\*100, got"):
        arguments.weight(beyond, {()})


@pytest.mark.parametrize(
    ("given", "digits"),
    [(99.9, "99.9"), (f32(99.9), "99.9"), (np.asarray(2.1, f32), "2.1"), (0, "0"), (100, "100")],
    ids=str,
)
def test_a_percentile_is_the_fraction_that_its_digits_denote(given, digits):
    assert arguments.percentile(given) == fractions.Fraction(digits)


def test_a_percentile_of_another_type_is_that_of_its_float():
    assert arguments.percentile(fractions.Fraction(4, 3)) == fractions.Fraction("1.3333333333333333")


@pytest.mark.parametrize(
    ("given", "expected"), [(-1, (2,)), ((2, -3), (0, 2)), ([1, -2], (1,)), ((), ()), (None, None)], ids=str
)
def test_axes_of_a_leaf_are_counted_from_the_front_once_each_and_in_order(given, expected):
    leaf, path = jnp.zeros((2, 3, 4)), (jax.tree_util.DictKey("w"),)
    assert arguments.axes_of_leaf("axis", arguments.axes("axis", given), path, leaf) == expected
    assert arguments.axes_of_leaf("axis", lambda name, leaf: given, path, leaf) == expected
    names = []
    nested = (*path, jax.tree_util.GetAttrKey("b"), jax.tree_util.SequenceKey(2))
    for place in (nested, ()):
        arguments.axes_of_leaf("axis", lambda name, leaf: names.append(name), place, leaf)
        arguments.axis_names_of_leaf(lambda name, leaf: names.append(name), place, leaf)
    assert names == ["w/b/2", "w/b/2", "(the tree itself)", "(the tree itself)"]  # as `metrics` names them
    with pytest.raises(ValueError, match=r"axis \(3,\) is out of range for gradient leaf \['w'\] of shape \(2, 3, 4\)"):
        arguments.axes_of_leaf("axis", (3,), path, leaf)
