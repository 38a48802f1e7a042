r"""The definition of clipping and accumulation. The tests compare every fast path of this package with it.

It is plain Python over lists of numbers. It needs `+ - * / <` and `abs`, and a square root as an argument. So the same
lines run on floats (`sqrt=math.sqrt`), NumPy scalars, `fractions.Fraction`, and the unknown numbers of a solver, which
proves theorems about them.

A gradient is the flat list of all its entries. Entries are finite; thresholds and weights are not negative. All other
cases are in the tables of the fast paths, or mentioned here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import compress, starmap
from math import ceil, floor
from operator import itemgetter
from typing import Any, Literal, NamedTuple

Number = Any
"""Anything with `+ - * / <` and `abs`: a float, a Fraction, a NumPy scalar, a term of a solver."""

Gradient = Sequence[Number]
"""The flat list of all entries."""

Batches = Sequence[tuple[Gradient, Number]]
"""The gradient and the weight of each micro-batch."""

Sqrt = Callable[[Number], Number]
"""The square root of such numbers."""


# --- clipping --------------------------------------------------------------------------------------------------


def global_norm_spec(gradient: Gradient, *, sqrt: Sqrt) -> Number:
    r"""Returns the Euclidean length of all entries together.

    .. math:: \|g\| = \sqrt{\textstyle\sum_i g_i^2}

    Args:
      gradient: the entries.
      sqrt: the square root of such numbers.

    Returns:
      The norm; 0 without entries.

    Example:
      >>> global_norm_spec([3.0, 0.0, 4.0], sqrt=math.sqrt)
      5.0

    Defines `shrewjax.grad_norm`. Source: the Euclidean norm.
    """
    return sqrt(_sum_of_squares(gradient))


def clip_gradients_spec(gradient: Gradient, max_norm: Number, *, sqrt: Sqrt) -> list[Number]:
    r"""Returns the point of the ball of radius abs(max_norm) that is nearest to the gradient.

    .. math:: g \cdot |c| / \|g\| \;\text{ if } \|g\|^2 > c^2, \text{ else } g


    Args:
      gradient: the entries.
      max_norm: c; its sign does not matter.
      sqrt: the square root of such numbers.

    Returns:
      The clipped entries.

    Example:
      >>> clip_gradients_spec([3.0, 4.0], 2.5, sqrt=math.sqrt)
      [1.5, 2.0]

    Defines `shrewjax.clip_grad_norm`, `clip_by_global_norm` and, for each leaf, `clip_by_leaf_norm`.

    Source: R. Pascanu, T. Mikolov, Y. Bengio, 2013, arXiv:1211.5063, Algorithm 1. This form, with squares and abs(c):
    `clipGradientsSpec` in TorchLean.
    """
    radius = abs(max_norm)
    sum_of_squares = _sum_of_squares(gradient)
    if radius * radius < sum_of_squares:
        scale = radius / sqrt(sum_of_squares)
        return [scale * g for g in gradient]
    return list(gradient)


def clip_cotangent_spec(
    slices: Sequence[Gradient], max_norm: Number, *, sqrt: Sqrt
) -> list[list[Number]]:
    r"""Returns the cotangent of a value that is passed on unchanged: each slice is clipped as a gradient of its own.

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

    Defines `shrewjax.clip_cotangent`.

    Source: A. Graves, 2013, arXiv:1308.0850, section 2.1, there element by element.
    """
    return [clip_gradients_spec(entries, max_norm, sqrt=sqrt) for entries in slices]


def clip_by_value_spec(gradient: Gradient, max_value: Number) -> list[Number]:
    r"""Returns each entry's nearest point in [-max_value, max_value].

    .. math:: \min(c, \max(-c, g_i))

    A NaN stays, because it is neither above nor below a bound.

    Args:
      gradient: the entries, infinities and NaN included.
      max_value: c >= 0.

    Returns:
      The clipped entries.

    Example:
      >>> clip_by_value_spec([0.5, -3.0, math.inf, math.nan], 1.0)
      [0.5, -1.0, 1.0, nan]

    Defines `shrewjax.clip_grad_value` and `clip_by_value`.

    Source: `clipByValueSpec` in TorchLean.
    """

    def clip(g: Number) -> Number:
        if max_value < g:
            return max_value
        if g < -max_value:
            return -max_value
        return g

    return [clip(g) for g in gradient]


# --- percentiles -----------------------------------------------------------------------------------------------

Method = Literal["lower", "linear"]


def percentile_spec(values: Sequence[Number], percentile: Any, method: Method = "lower") -> Number:
    r"""Returns the value `percentile` per cent of the way up the sorted values, counted in ranks.

    It defines the bound of `shrewjax.clip_grad_percentile`, whose default method is `"linear"`.

    .. math:: v_{(r)}, \qquad r = \frac{p\,(n-1)}{100}

    The rank r is a rational number, exact at any size. If it is no integer, `"lower"` returns the lower of the two
    neighbours, and `"linear"` the point between them that is linear in r, as in NumPy.

    Args:
      values: at least one.
      percentile: p in [0, 100]. It means exactly the decimal or fraction that it is written as.
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
    if method == "lower" or not beyond:
        return low
    return low + (high - low) * beyond.numerator / beyond.denominator


def clip_by_percentile_spec(
    gradient: Gradient, percentile: Any, method: Method = "lower"
) -> list[Number]:
    r"""Clips entries by value, at a percentile of their own magnitudes.

    .. math:: \min(b, \max(-b, g_i)), \qquad b = \operatorname{sorted}(|g|)_{\lfloor p\,(n-1)/100 \rfloor}

    Args:
      gradient: the entries.
      percentile: p in [0, 100], as in `percentile_spec`.
      method: how to treat a rank that is no integer, as in `percentile_spec`. The formula is for `"lower"`.

    Returns:
      The clipped entries.

    Example:
      >>> clip_by_percentile_spec([1, -9, 2, 4], 50)
      [1, -2, 2, 2]

    Source: `clipByPercentileSpec` in TorchLean.
    """
    if not gradient:
        return []
    bound = percentile_spec([abs(g) for g in gradient], percentile, method)
    return clip_by_value_spec(gradient, bound)


# --- accumulation ----------------------------------------------------------------------------------------------

Reduction = Literal["mean", "sum_over_weights", "sum"]
Nonfinite = Literal["propagate", "drop_micro_batch", "drop_window", "extend_window"]


class MicroBatch(NamedTuple):
    """One call of `update`. A flush without a micro-batch is one of weight 0 that closes the window."""

    gradient: Gradient  #: of its loss
    weight: Number = 1  #: its number of examples or tokens, >= 0
    flush: bool = False  #: whether it closes the window


def window_spec(batches: Batches, reduction: Reduction = "mean") -> list[Number]:
    r"""Returns the gradient of a window.

    .. math:: \frac{\sum_i w_i g_i}{\sum_i w_i}, \qquad \frac{\sum_i g_i}{\sum_i w_i}, \qquad \sum_i g_i

    These are `"mean"`, for gradients of a mean loss; `"sum_over_weights"`, for gradients of a summed loss; and `"sum"`.

    Args:
      batches: pairs of a gradient and its weight, at least one; the weights' sum is positive.
      reduction: as above.

    Returns:
      One entry for each entry of the gradients.

    Example:
      >>> window_spec([([1.0], 3), ([5.0], 1)])
      [2.0]

    Source: by linearity, the first is the gradient of the mean loss over all examples; the mean of means is not.
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


def noise_spec(batches: Batches) -> tuple[Number, Number]:
    r"""Returns a window's estimates of the noise of gradients: tr Sigma per unit of weight, and the squared signal.

    .. math:: S = \frac{q - W |\bar g|^2}{K - 1}, \quad q = \sum_i w_i |g_i|^2, \qquad G^2 = |\bar g|^2 - S / W

    Args:
      batches: at least two pairs of a gradient of a mean loss and its positive weight.

    Returns:
      S and G^2.

    Example:
      >>> noise_spec([([3.0], 1), ([1.0], 1)])
      (2.0, 3.0)

    Source: for equal weights, S. McCandlish et al., 2018, arXiv:1812.06162, appendix A.1.
    """
    weight_sum = sum(w for _, w in batches)
    squares = sum(weight * _sum_of_squares(gradient) for gradient, weight in batches)
    of_average = _sum_of_squares(window_spec(batches))
    trace = (squares - weight_sum * of_average) / (len(batches) - 1)
    return trace, of_average - trace / weight_sum


def accumulate_spec(
    micro_batches: Iterable[tuple[Any, ...]],
    accum_steps: int | Callable[[int], int],
    *,
    reduction: Reduction = "mean",
    nonfinite: Nonfinite = "propagate",
) -> Iterator[list[Number] | None]:
    r"""Yields the gradient that the wrapped optimizer receives at each micro-step, or None if it does not run.

    .. math:: u_t = \text{window}(B_t) \;\text{ if the window closes at } t \text{ and } B_t \ne \emptyset,
              \text{ else None}

    A window closes with its `accum_steps`-th micro-batch, or with one that flushes. Its gradient is the `window_spec`
    of B_t, the micro-batches that it kept. One of weight 0 is not kept, even if its gradient is non-finite, but counts
    as a step. A non-finite micro-batch has a gradient with a NaN or an infinity. Its treatment depends on `nonfinite`:

    * `"propagate"`: it is kept, and counts as a step;
    * `"drop_micro_batch"`: it is not kept, but counts as a step;
    * `"extend_window"`: it is not kept, and does not count as a step;
    * `"drop_window"`: it counts as a step, and the gradient of the window is None.

    Args:
      micro_batches: the `MicroBatch` tuples, or plain tuples of their fields.
      accum_steps: micro-steps per window, or a function of the number of windows so far that had a gradient.
      reduction: as in `window_spec`.
      nonfinite: how to treat a non-finite micro-batch, as above.

    Returns:
      An iterator with one item for each micro-batch.

    Example:
      >>> list(accumulate_spec([([1.0], 3), ([5.0], 1), ([7.0], 2, True)], accum_steps=2))
      [None, [2.0], [7.0]]

    Defines `shrewjax.accumulate` and `GradAccumulator`. Source: by linearity, as in `window_spec`.
    """
    windows = 0
    kept: list[tuple[Gradient, Number]] = []
    steps, is_dropped = 0, False
    for gradient, weight, flush in starmap(MicroBatch, micro_batches):
        has_weight = weight > 0
        is_refused = has_weight and _is_refused(gradient, nonfinite)
        if has_weight and not is_refused:
            kept.append((gradient, weight))
        if not (is_refused and nonfinite == "extend_window"):
            steps += 1
        is_dropped = is_dropped or (is_refused and nonfinite == "drop_window")
        length = accum_steps(windows) if callable(accum_steps) else accum_steps
        if not flush and steps < length:
            yield None
            continue
        if kept and not is_dropped:
            windows += 1
            yield window_spec(kept, reduction)
        else:
            yield None
        kept, steps, is_dropped = [], 0, False


# --- a whole batch ---------------------------------------------------------------------------------------------

Aux = Literal["mean", "sum", "max", "min", "last", "stack", "examples"]


class Part(NamedTuple):
    """The results of the loss function for one micro-batch."""

    value: Number  #: its loss
    gradient: Gradient  #: of its loss
    weight: Number = 1  #: its number of examples or tokens, >= 0
    aux: Sequence[Number] = ()  #: its further results


def accumulated_value_and_grad_spec(
    examples: Sequence[Any],
    micro_batches: int,
    run: Callable[[Sequence[Any]], Part],
    *,
    reduction: Reduction = "mean",
    nonfinite: Literal["propagate", "drop_micro_batch"] = "propagate",
    aux_reduction: Aux = "mean",
) -> tuple[Number, list[Number], list[Any]] | None:
    r"""Returns the value, the gradient and the aux of a batch that is split into micro-batches.

    .. math:: (\ell, g) = \text{window}\{((\ell_i, g_i), w_i) : i \text{ is kept}\}

    Micro-batch i has the examples i, i + K, and so on, for K = `micro_batches`. It is kept if its weight is positive
    and, under `"drop_micro_batch"`, its value and gradient are finite. The mean of the aux is weighted under every
    `reduction`. All of its reductions take the kept micro-batches alone; a stack has zeros for the others. So have
    `"examples"`, where each further result is a list of numbers, one for each example.

    Args:
      examples: as many as `micro_batches` divides.
      micro_batches: at least one.
      run: the loss function: a micro-batch's `Part`, or its fields as a tuple.
      reduction: as in `window_spec`.
      nonfinite: as above.
      aux_reduction: how each number of the aux is reduced: `"mean"`, `"sum"`, `"max"`, `"min"`, `"last"`, `"stack"`
        or `"examples"`.

    Returns:
      The three, or None if nothing is kept.

    Example:
      >>> def run(part):
      ...     return sum(part), [len(part)], 1, [max(part)]
      >>> accumulated_value_and_grad_spec([1.0, 2.0, 3.0, 4.0], 2, run, reduction="sum", aux_reduction="stack")
      (10.0, [4], [[3.0, 4.0]])

    Defines `shrewjax.accumulated_value_and_grad`. Source: by linearity, as in `window_spec`.
    """
    parts = [Part(*run(examples[i::micro_batches])) for i in range(micro_batches)]
    are_kept = [_is_kept(part, nonfinite) for part in parts]
    kept = list(compress(parts, are_kept))
    if not kept:
        return None
    losses = [([part.value, *part.gradient], part.weight) for part in kept]
    value, *gradient = window_spec(losses, reduction)
    if aux_reduction == "mean":
        return value, gradient, window_spec([(part.aux, part.weight) for part in kept])
    if aux_reduction in ("stack", "examples"):
        return value, gradient, _stacked(parts, are_kept, aux_reduction)
    columns = zip(*(part.aux for part in kept), strict=True)
    combine: Any = {"sum": sum, "max": max, "min": min, "last": itemgetter(-1)}
    return value, gradient, [combine[aux_reduction](xs) for xs in columns]


def _is_kept(part: Part, nonfinite: Nonfinite) -> bool:
    is_good = not _is_refused((part.value, *part.gradient), nonfinite)
    return part.weight > 0 and is_good


def _is_refused(numbers: Sequence[Number], nonfinite: Nonfinite) -> bool:
    """Returns whether a number of a micro-batch is not finite, so that it is not kept."""
    return nonfinite != "propagate" and not all(map(_is_finite, numbers))


def _stacked(parts: Sequence[Part], are_kept: Sequence[bool], aux_reduction: Aux) -> list[Any]:
    """Returns each further result of all micro-batches, or of all examples in their order; 0 for those not kept."""
    pairs = list(zip(parts, are_kept, strict=True))
    if aux_reduction == "stack":
        rows = [p.aux if is_kept else [0 for _ in p.aux] for p, is_kept in pairs]
        return [list(column) for column in zip(*rows, strict=True)]
    rows = [p.aux if is_kept else [[0] * len(xs) for xs in p.aux] for p, is_kept in pairs]
    return [[x for xs in zip(*of, strict=True) for x in xs] for of in zip(*rows, strict=True)]


def _sum_of_squares(gradient: Gradient) -> Number:
    return sum(g * g for g in gradient)


def _is_finite(x: Number) -> bool:
    return abs(x - x) < 1  # x - x is NaN for a NaN and for an infinity
