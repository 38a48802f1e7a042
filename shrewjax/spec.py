r"""The definition: what clipping and accumulation mean, and what every fast path in this package is held to.

Plain Python over lists of numbers. It needs `+ - * / <` and `abs`, and a square root that is handed in. So the same
lines run on floats (`sqrt=math.sqrt`) and NumPy scalars, exactly on `fractions.Fraction`, and on the unknown numbers of
a solver, which proves theorems about them.

A gradient is the flat list of all its entries: how they are spread over leaves and devices must not matter. Entries
are finite, thresholds and weights are not negative; what holds elsewhere is in the tables of the fast paths, save for
what is said here of NaN and infinities.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import starmap
from math import ceil, floor
from typing import Any, Literal, NamedTuple

Number = Any
"""Anything with `+ - * / <` and `abs`: a float, a Fraction, a NumPy scalar, a term of a solver."""


# --- clipping --------------------------------------------------------------------------------------------------


def global_norm_spec(gradient: Sequence[Number], *, sqrt: Callable[[Number], Number]) -> Number:
    r"""The Euclidean length of all entries together.

    .. math:: \|g\| = \sqrt{\textstyle\sum_i g_i^2}

    Args:
      gradient: the entries.
      sqrt: the square root of such numbers.

    Returns:
      The norm; 0 where there are no entries.

    Example:
      >>> global_norm_spec([3.0, 0.0, 4.0], sqrt=math.sqrt)
      5.0

    Defines `grad_norm`.
    """
    return sqrt(_sum_of_squares(gradient))


def clip_gradients_spec(
    gradient: Sequence[Number], max_norm: Number, *, sqrt: Callable[[Number], Number]
) -> list[Number]:
    r"""The point of the ball of radius |max_norm| that is nearest to the gradient.

    .. math:: g \cdot |c| / \|g\| \;\text{ if } \|g\|^2 > c^2, \text{ else } g

    Squares are compared, so a root is taken, and divided by, only where it is positive.

    Args:
      gradient: the entries.
      max_norm: c; its sign does not matter.
      sqrt: the square root of such numbers.

    Returns:
      The clipped entries.

    Example:
      >>> clip_gradients_spec([3.0, 4.0], 2.5, sqrt=math.sqrt)
      [1.5, 2.0]

    Defines `clip_grad_norm`, `clip_by_global_norm` and, for each leaf, `clip_by_leaf_norm`. The rule: R. Pascanu,
    T. Mikolov, Y. Bengio, 2013, arXiv:1211.5063, Algorithm 1. This form of it, with squares and |c|:
    `clipGradientsSpec` in TorchLean.
    """
    radius = abs(max_norm)
    sum_of_squares = _sum_of_squares(gradient)
    if radius * radius < sum_of_squares:
        scale = radius / sqrt(sum_of_squares)
        return [scale * g for g in gradient]
    return list(gradient)


def clip_cotangent_spec(
    slices: Sequence[Sequence[Number]], max_norm: Number, *, sqrt: Callable[[Number], Number]
) -> list[list[Number]]:
    r"""The cotangent of a value that is passed on as it is: each slice clipped as a gradient of its own.

    .. math:: y = x, \qquad \bar x_s = \operatorname{clip}(\bar y_s, c)

    Args:
      slices: the entries of the value's own cotangent, slice by slice.
      max_norm: c; its sign does not matter.
      sqrt: the square root of such numbers.

    Returns:
      The clipped entries, slice by slice.

    Example:
      >>> clip_cotangent_spec([[3.0, 4.0], [0.0, 2.0]], 2.5, sqrt=math.sqrt)
      [[1.5, 2.0], [0.0, 2.0]]

    Defines `clip_cotangent`.
    """
    return [clip_gradients_spec(entries, max_norm, sqrt=sqrt) for entries in slices]


def clip_by_value_spec(gradient: Sequence[Number], max_value: Number) -> list[Number]:
    r"""Each entry's nearest point in [-max_value, max_value].

    .. math:: \min(c, \max(-c, g_i))

    A NaN is on neither side of anything, and stays.

    Args:
      gradient: the entries, infinities and NaN included.
      max_value: c >= 0.

    Returns:
      The clipped entries.

    Example:
      >>> clip_by_value_spec([0.5, -3.0, math.inf, math.nan], 1.0)
      [0.5, -1.0, 1.0, nan]

    Defines `clip_grad_value` and `clip_by_value`. Source: `clipByValueSpec` in TorchLean.
    """

    def clip(g: Number) -> Number:
        if max_value < g:
            return max_value
        if g < -max_value:
            return -max_value
        return g

    return [clip(g) for g in gradient]


# --- percentiles -----------------------------------------------------------------------------------------------

Method = Literal["lower", "higher", "nearest", "midpoint", "linear"]


def percentile_spec(values: Sequence[Number], percentile: Any, method: Method = "lower") -> Number:
    r"""The value that `percentile` per cent of the way up the sorted values one finds, counted in ranks.

    .. math:: v_{(r)}, \qquad r = \frac{p\,(n-1)}{100}

    The rank r is a rational number, exact at any size. Where it is no integer, `method` makes one value of the two
    neighbours, as in NumPy: the `"lower"`, the `"higher"`, the `"nearest"` (the even rank of two equally near ones),
    their `"midpoint"`, or the point between them that is `"linear"` in r.

    Args:
      values: at least one.
      percentile: p in [0, 100], taken as the decimal or fraction that it is written as.
      method: as above.

    Returns:
      One of the values, or a point between two of them.

    Example:
      >>> percentile_spec([30, 10, 20], 50), percentile_spec([30, 10, 20], 99.9)
      (20, 20)
      >>> percentile_spec([10.0, 20.0], 75, "linear")
      17.5

    Source: R. J. Hyndman, Y. Fan, "Sample quantiles in statistical packages", The American Statistician 50 (1996),
    definition 7, for `"linear"`; the names are those of `numpy.percentile`.
    """
    ordered = sorted(values)
    rank = Fraction(str(percentile)) * (len(ordered) - 1) / 100
    low, high, beyond = ordered[floor(rank)], ordered[ceil(rank)], rank - floor(rank)
    if method == "nearest":
        return ordered[round(rank)]
    if method == "midpoint":
        return (low + high) / 2 if beyond else low
    if method == "linear":
        return low + (high - low) * beyond.numerator / beyond.denominator if beyond else low
    return {"lower": low, "higher": high}[method]


def clip_by_percentile_spec(gradient: Sequence[Number], percentile: Any, method: Method = "lower") -> list[Number]:
    r"""The value clip whose bound is a percentile of the entries' own magnitudes.

    .. math:: \min(b, \max(-b, g_i)), \qquad b = \operatorname{sorted}(|g|)_{\lfloor p\,(n-1)/100 \rfloor}

    Args:
      gradient: the entries.
      percentile: p in [0, 100], as in `percentile_spec`.
      method: what to make of a rank that is no integer, as in `percentile_spec`; the formula is for `"lower"`.

    Returns:
      The clipped entries.

    Example:
      >>> clip_by_percentile_spec([1, -9, 2, 4], 50)
      [1, -2, 2, 2]

    Source: `clipByPercentileSpec` in TorchLean.
    """
    if not gradient:
        return []
    return clip_by_value_spec(gradient, percentile_spec([abs(g) for g in gradient], percentile, method))


# --- accumulation ----------------------------------------------------------------------------------------------

Reduction = Literal["mean", "sum_over_weights", "sum"]
Nonfinite = Literal["propagate", "drop_microbatch", "drop_window", "extend_window"]


class MicroBatch(NamedTuple):
    """One call of `update`. A flush without a micro-batch is one of weight 0 that closes the window."""

    gradient: Sequence[Number]
    weight: Number = 1  # its number of examples or tokens, >= 0
    flush: bool = False  # close the window with it


def window_spec(batches: Sequence[tuple[Sequence[Number], Number]], reduction: Reduction = "mean") -> list[Number]:
    r"""What the gradients of a window come to.

    .. math:: \frac{\sum_i w_i g_i}{\sum_i w_i}, \qquad \frac{\sum_i g_i}{\sum_i w_i}, \qquad \sum_i g_i

    `"mean"`, for gradients of a mean loss; `"sum_over_weights"`, for gradients of a summed loss; `"sum"`.

    Args:
      batches: pairs of a gradient and its weight, at least one; the weights' sum is positive.
      reduction: as above.

    Returns:
      One entry for each entry of the gradients.

    Example:
      >>> window_spec([([1.0], 3), ([5.0], 1)])
      [2.0]

    By linearity the first is the gradient of the mean loss over all examples; the mean of means is not, see "Bugs in
    LLM Training - Gradient Accumulation Fix", Unsloth, 2024.
    """
    factors = [weight if reduction == "mean" else 1 for _, weight in batches]
    totals = [
        sum(factor * g for factor, g in zip(factors, entry, strict=True))
        for entry in zip(*(gradient for gradient, _ in batches), strict=True)
    ]
    if reduction == "sum":
        return totals
    weight_sum = sum(weight for _, weight in batches)
    return [total / weight_sum for total in totals]


def accumulate_spec(
    micro_batches: Iterable[tuple[Any, ...]],
    accum_steps: int | Callable[[int], int],
    *,
    reduction: Reduction = "mean",
    nonfinite: Nonfinite = "propagate",
) -> Iterator[list[Number] | None]:
    """What the wrapped optimizer is given at each micro-step: a gradient, or None, and then it is not run.

    A window closes with its `accum_steps`-th micro-batch, or with one that flushes. It comes to the `window_spec` of
    what it has kept, or to None if it has kept nothing. A micro-batch of weight 0 is a step, but is not kept, whatever
    it holds. Neither is a bad one, whose gradient has a NaN or an infinity, unless it is to `"propagate"`; and

    * `"drop_microbatch"`: it is a step;
    * `"extend_window"`: it is no step;
    * `"drop_window"`: it is a step, and the window comes to None.

    Args:
      micro_batches: `MicroBatch`es, or their fields as tuples.
      accum_steps: micro-steps a window, or a function of the number of windows so far that came to a gradient.
      reduction: as in `window_spec`.
      nonfinite: what to do with a bad micro-batch, as above.

    Returns:
      An iterator with one item for each micro-batch.

    Example:
      >>> list(accumulate_spec([([1.0], 3), ([5.0], 1), ([7.0], 2, True)], accum_steps=2))
      [None, [2.0], [7.0]]

    Defines `accumulate` and `GradAccumulator`.
    """
    windows = 0
    kept: list[tuple[Sequence[Number], Number]] = []
    steps, spoiled = 0, False
    for gradient, weight, flush in starmap(MicroBatch, micro_batches):
        counts = weight > 0
        bad = counts and nonfinite != "propagate" and not all(_is_finite(g) for g in gradient)
        if counts and not bad:
            kept.append((gradient, weight))
        if not (bad and nonfinite == "extend_window"):
            steps += 1
        spoiled = spoiled or (bad and nonfinite == "drop_window")
        if not flush and steps < (accum_steps(windows) if callable(accum_steps) else accum_steps):
            yield None
            continue
        if kept and not spoiled:
            yield window_spec(kept, reduction)
            windows += 1
        else:
            yield None
        kept, steps, spoiled = [], 0, False


def _sum_of_squares(gradient: Sequence[Number]) -> Number:
    return sum(g * g for g in gradient)


def _is_finite(x: Number) -> bool:
    return abs(x - x) < 1  # x - x is NaN for a NaN and for an infinity
