"""Theorems about the definition, shown for all numbers by a solver.

A theorem is a function that must return True, whatever numbers it is given. Beside it stands a mutant: a slip in the
definition, as old text and new, for which the solver must find numbers that make the theorem False. Each test is both.
"""

import inspect
import math
import types
from fractions import Fraction

import pytest
from prover import Pair, Reals, Refuted, RoundedReals, Scalar, Vector, assume, exactly, floats, identical, prove, sqrt

from shrewjax import spec as definition

pytestmark = pytest.mark.thorough


def theorem(*sizes, mutant, over=Reals):
    """Makes a test of a claim: it holds for vectors of these sizes, and not for all of them with the mutant."""

    def declare(claim):
        @pytest.mark.parametrize("case", [*sizes, "mutant"])
        def test(case):
            if case == "mutant":
                wrong = altered(*mutant)
                with pytest.raises(Refuted):
                    any(prove(claim, wrong, size, over) for size in sizes)
            else:
                prove(claim, definition, case, over)

        test.__doc__ = claim.__doc__
        return test

    return declare


def altered(old, new):
    """The definition with one piece of a line replaced, so that no mutant depends on where its lines break."""
    assert old == old.strip(), f"{old!r} depends on the spaces around it"
    source = inspect.getsource(definition)
    assert source.count(old) == 1, f"{source.count(old)} places read {old!r}"
    module = types.ModuleType("altered")
    exec(source.replace(old, new), vars(module))
    return module


def clip(spec, g, c):
    return spec.clip_gradients_spec(g, c, sqrt=sqrt)


def norm(spec, g):
    return spec.global_norm_spec(g, sqrt=sqrt)


def square(v):
    return sum(x * x for x in v)


def plus(a, b):
    return [x + y for x, y in zip(a, b, strict=True)]


def minus(a, b):
    return [x - y for x, y in zip(a, b, strict=True)]


def times(k, v):
    return [k * x for x in v]


def negative(v):
    return [-x for x in v]


def mean(v):
    return sum(v) / len(v)


# --- the norm ---------------------------------------------------------------------------------------------------


@theorem(1, 2, 3, mutant=("return sqrt(_sum_of_squares(gradient))", "return sqrt(abs(sum(gradient)))"))
def test_norm_is_zero_for_zeros_only(spec, g: Vector):
    r = norm(spec, g)
    return r >= 0 and (r == 0) == all(x == 0 for x in g)


@theorem(1, 2, 3, mutant=("return sqrt(_sum_of_squares(gradient))", "return _sum_of_squares(gradient)"))
def test_norm_may_be_taken_of_entries_in_another_unit(spec, g: Vector, k: Scalar):
    """So an implementation may scale the entries into range first."""
    assume(k > 0)
    return k * norm(spec, [x / k for x in g]) == norm(spec, g)


@theorem(1, 2, mutant=("return sqrt(_sum_of_squares(gradient))", "return sqrt(_sum_of_squares(gradient) / 2)"))
def test_norm_is_the_norm_of_the_leaves_norms(spec, a: Vector, b: Pair):
    """So an implementation may reduce leaf by leaf, and shard by shard."""
    return norm(spec, [norm(spec, a), norm(spec, b)]) == norm(spec, a + b)


@theorem(2, mutant=("return sqrt(_sum_of_squares(gradient))", "return _sum_of_squares(gradient)"))
def test_norm_of_a_sum_is_at_most_the_sum_of_the_norms(spec, a: Scalar, b: Pair):
    """In every dimension: a and b span a plane, and the first axis is laid along a."""
    a = [a, 0]
    return norm(spec, plus(a, b)) <= norm(spec, a) + norm(spec, b)


# --- the norm clip ----------------------------------------------------------------------------------------------


@theorem(1, 2, 3, mutant=("radius * radius < sum_of_squares", "radius < sum_of_squares"))
def test_clipped_norm_is_at_most_the_threshold(spec, g: Vector, c: Scalar):
    return square(clip(spec, g, c)) <= c * c


@theorem(1, 2, 3, mutant=("radius / sqrt(sum_of_squares)", "radius / (sqrt(sum_of_squares) + Fraction(1, 10**6))"))
def test_gradient_outside_lands_on_the_sphere(spec, g: Vector, c: Scalar):
    assume(square(g) > c * c)
    return square(clip(spec, g, c)) == c * c


@theorem(1, 2, 3, mutant=("radius * radius < sum_of_squares", "sum_of_squares > 0"))
def test_gradient_inside_is_unchanged(spec, g: Vector, c: Scalar):
    assume(square(g) <= c * c)
    return clip(spec, g, c) == g


@theorem(1, 2, 3, mutant=("radius / sqrt(sum_of_squares)", "radius / sum_of_squares"))
def test_clipping_twice_is_clipping_once(spec, g: Vector, c: Scalar):
    once = clip(spec, g, c)
    return clip(spec, once, c) == once


@theorem(1, 2, 3, mutant=("radius = abs(max_norm)", "radius = max_norm"))
def test_clipping_keeps_the_direction(spec, g: Vector, c: Scalar):
    p = clip(spec, g, c)
    parallel = all(p[i] * g[j] == p[j] * g[i] for i in range(len(g)) for j in range(i))
    return parallel and all(x * y >= 0 for x, y in zip(p, g, strict=True))


@theorem(2, mutant=("sqrt(sum_of_squares)", "sqrt(sum_of_squares + radius * radius)"))
def test_no_point_of_the_ball_is_nearer(spec, g: Scalar, y: Pair, c: Scalar):
    """In every dimension: g and y span a plane, and the first axis is laid along g."""
    assume(square(y) <= c * c)
    g = [g, 0]
    return square(minus(g, clip(spec, g, c))) <= square(minus(g, y))


@theorem(2, mutant=("radius / sqrt(sum_of_squares)", "radius / sum_of_squares"))
def test_clipping_brings_no_two_gradients_further_apart(spec, a: Scalar, b: Pair, c: Scalar):
    a = [a, 0]
    return square(minus(clip(spec, a, c), clip(spec, b, c))) <= square(minus(a, b))


@theorem(1, 2, mutant=("radius / sqrt(sum_of_squares)", "radius / sqrt(sum_of_squares + gradient[0] * gradient[0])"))
def test_scale_depends_on_the_norm_alone(spec, g: Vector, h: Vector, c: Scalar):
    """So clipping commutes with every rotation, and what is shown in a plane holds in every plane."""
    assume(square(g) == square(h))
    p, q = clip(spec, g, c), clip(spec, h, c)
    return all(p[i] * h[j] == q[j] * g[i] for i in range(len(g)) for j in range(len(h)))


@theorem(1, 2, 3, mutant=("radius / sqrt(sum_of_squares)", "radius / (sqrt(sum_of_squares) + Fraction(1, 10**6))"))
def test_clipping_passes_a_loss_scale_through(spec, g: Vector, c: Scalar, k: Scalar):
    assume(k > 0)
    return clip(spec, times(k, g), k * c) == times(k, clip(spec, g, c))


# --- the clip of a cotangent, slice by slice ---------------------------------------------------------------------


@theorem(1, 2, mutant=("(entries, max_norm, sqrt=sqrt)", "(sum(slices, entries), max_norm, sqrt=sqrt)[: len(entries)]"))
def test_slice_is_clipped_as_if_it_were_alone(spec, a: Vector, b: Pair, c: Scalar):
    """So a NaN, or an explosion, stays in its slice."""
    return spec.clip_cotangent_spec([a, b], c, sqrt=sqrt) == [clip(spec, a, c), clip(spec, b, c)]


# --- the value clip ---------------------------------------------------------------------------------------------

NEGATIVE_SIDE = "return -max_value"
POSITIVE_SIDE = "return max_value"


@theorem(1, 2, mutant=(NEGATIVE_SIDE, "return g"))
def test_value_clip_stays_in_the_box(spec, g: Vector, c: Scalar):
    assume(c >= 0)
    return all(-c <= x <= c for x in spec.clip_by_value_spec(g, c))


@theorem(1, 2, mutant=(POSITIVE_SIDE, "return 0"))
def test_no_point_of_the_box_is_nearer(spec, g: Vector, y: Vector, c: Scalar):
    assume(all(abs(x) <= c for x in y))
    clipped = spec.clip_by_value_spec(g, c)
    return all(abs(x - p) <= abs(x - z) for x, p, z in zip(g, clipped, y, strict=True))


@theorem(1, 2, 3, mutant=("return g", "return g / 2"))
def test_inside_the_box_nothing_changes(spec, g: Vector, c: Scalar):
    assume(all(abs(x) <= c for x in g))
    return spec.clip_by_value_spec(g, c) == g


# --- percentiles ------------------------------------------------------------------------------------------------

PERCENTILES = [0, 50, "99.9"]
METHODS = ["lower", "linear"]


@theorem(1, 2, 3, mutant=("percentile_spec([abs(g) for g in gradient]", "percentile_spec([g for g in gradient]"))
def test_percentile_clip_changes_at_most_its_share(spec, g: Vector):
    """Fewer than (100 - p) / 100 (n - 1) + 1 entries. (The plain (100 - p) / 100 n is false: n = 2, p = 99.)"""

    def share_is_kept(p):
        changed = sum(x != y for x, y in zip(g, spec.clip_by_percentile_spec(g, p), strict=True))
        return 100 * (changed - 1) < (100 - float(p)) * (len(g) - 1)

    return all(share_is_kept(p) for p in PERCENTILES)


@theorem(1, 2, 3, mutant=("sorted(values)", "sorted(values, reverse=True)"))
def test_percentile_has_its_rank(spec, g: Vector):
    def has_its_rank(p):
        bound, rank = spec.percentile_spec(g, p), math.floor(float(p) * (len(g) - 1) / 100)
        return sum(x < bound for x in g) <= rank < sum(x <= bound for x in g)

    return all(has_its_rank(p) for p in PERCENTILES)


@theorem(2, 3, mutant=("ordered = sorted(values)", "ordered = [sum(values) / len(values)] * len(values)"))
def test_one_wild_entry_moves_the_percentile_by_one_rank_at_most(spec, g: Vector, wild: Scalar):
    bound, ordered, rank = spec.percentile_spec([wild, *g[1:]], 50), sorted(g), (len(g) - 1) // 2
    return (rank == 0 or ordered[rank - 1] <= bound) and (rank + 1 == len(g) or bound <= ordered[rank + 1])


@theorem(1, 2, 3, mutant=("/ 100", "/ 101"))
def test_percentile_100_changes_nothing(spec, g: Vector):
    return all(spec.clip_by_percentile_spec(g, 100, method) == g for method in METHODS)


def neighbours(g, p):
    """The sorted entries around the rank of a percentile."""
    rank = Fraction(str(p)) * (len(g) - 1) / 100
    return sorted(g)[math.floor(rank)], sorted(g)[math.ceil(rank)]


@theorem(2, 3, mutant=("low + (high - low)", "low + 2 * (high - low)"))
def test_every_method_stays_between_its_neighbours(spec, g: Vector):
    def between(p, method):
        low, high = neighbours(g, p)
        return low <= spec.percentile_spec(g, p, method) <= high

    return all(between(p, method) for p in (25, "66.7") for method in METHODS)


@theorem(2, 3, mutant=("beyond.numerator / beyond.denominator", "beyond.denominator / beyond.numerator"))
def test_linear_percentile_is_a_weighted_mean_of_its_neighbours(spec, g: Vector):
    low, high = neighbours(g, 20)
    fraction = 20 * (len(g) - 1) % 100
    return 100 * spec.percentile_spec(g, 20, "linear") == (100 - fraction) * low + fraction * high


# --- the window -------------------------------------------------------------------------------------------------

WEIGHTED = 'weight if reduction == "mean" else 1'
DIVIDED = "total / weight_sum"


def splits(n):
    return [[k, *rest] for k in range(1, n + 1) for rest in splits(n - k)] if n else [[]]


def single(g, w):
    """Micro-batches of one entry each."""
    return [([x], v) for x, v in zip(g, w, strict=True)]


def positive(w):
    return all(v > 0 for v in w)


@theorem(1, 2, 3, 5, mutant=(WEIGHTED, "1"))
def test_every_split_into_micro_batches_is_the_one_big_batch(spec, examples: Vector):
    """It holds for any gradients of the examples, because the gradient of a mean loss is their mean."""

    def window(split):
        left = iter(examples)
        batches = [([mean([next(left) for _ in range(k)])], k) for k in split]
        return list(spec.accumulate_spec(batches, len(split)))

    return all(window(split) == [None] * (len(split) - 1) + [[mean(examples)]] for split in splits(len(examples)))


@theorem(2, 3, mutant=(WEIGHTED, "weight"))
def test_summed_losses_over_weights_are_mean_losses_weighted(spec, g: Vector, w: Vector):
    assume(positive(w))
    summed = [([x * v], v) for x, v in zip(g, w, strict=True)]
    return spec.window_spec(summed, "sum_over_weights") == spec.window_spec(single(g, w))


@theorem(2, 3, mutant=("return totals", "return [total / len(batches) for total in totals]"))
def test_sum_is_the_mean_times_the_weights_sum(spec, g: Vector, w: Vector):
    assume(positive(w))
    summed = [([x * v], v) for x, v in zip(g, w, strict=True)]
    return spec.window_spec(summed, "sum") == times(sum(w), spec.window_spec(single(g, w)))


@theorem(2, 3, mutant=("if has_weight and not is_refused", "if has_weight"))
def test_dropped_micro_batch_leaves_no_trace(spec, g: Vector, w: Vector, weight: Scalar):
    """Whatever its weight and place, and whatever it holds besides the NaN."""
    assume(positive([*w, weight]))
    clean, bad = single(g, w), ([math.nan], weight)
    expected = list(spec.accumulate_spec(clean, len(g)))

    def with_bad(place, steps, policy):
        return list(spec.accumulate_spec([*clean[:place], bad, *clean[place:]], steps, nonfinite=policy))

    return all(
        with_bad(place, len(g) + 1, "drop_micro_batch") == [None, *expected]
        and [x for x in with_bad(place, len(g), "extend_window") if x] == expected[-1:]
        for place in range(len(g) + 1)
    )


@theorem(1, 2, mutant=("has_weight = weight > 0", "has_weight = True"))
def test_micro_batch_of_weight_zero_contributes_nothing(spec, g: Vector, w: Vector, anything: Scalar):
    """Under every reduction and policy, also if it holds a NaN; and it is a step."""
    assume(positive(w))
    clean = single(g, w)

    def unchanged(empty, reduction, policy):
        options = {"reduction": reduction, "nonfinite": policy}
        alone = list(spec.accumulate_spec(clean, len(g), **options))
        return list(spec.accumulate_spec([([empty], 0), *clean], len(g) + 1, **options)) == [None, *alone]

    policies = ("propagate", "drop_micro_batch", "drop_window", "extend_window")
    reductions = ("mean", "sum_over_weights", "sum")
    return all(unchanged(x, r, p) for x in (anything, math.nan) for r in reductions for p in policies)


@theorem(1, 2, mutant=("kept, steps, is_dropped = [], 0, False", "steps, is_dropped = 0, False"))
def test_after_a_bad_window_the_next_one_is_clean(spec, g: Vector, w: Vector):
    assume(positive(w))
    clean = single(g, w)
    expected = list(spec.accumulate_spec(clean, len(g)))
    return all(
        list(spec.accumulate_spec([([math.nan], 1, True), *clean], len(g), nonfinite=policy))[1:] == expected
        for policy in ("propagate", "drop_micro_batch", "drop_window", "extend_window")
    )


@theorem(1, 2, mutant=('refused and nonfinite == "drop_window"', "refused and not kept"))
def test_one_bad_micro_batch_takes_its_window_with_it_on_demand(spec, g: Vector, w: Vector):
    assume(positive(w))
    clean, bad, n = single(g, w), ([math.nan], 1), len(g) + 1
    return all(
        list(spec.accumulate_spec([*clean[:i], bad, *clean[i:]], n, nonfinite="drop_window")) == [None] * n
        for i in range(n)
    )


@theorem(1, 2, 3, mutant=("if not flush and steps", "if steps"))
def test_flush_closes_over_what_came(spec, g: Vector, w: Vector):
    assume(positive(w))
    *first, (gradient, weight) = single(g, w)
    flushed = list(spec.accumulate_spec([*first, (gradient, weight, True)], len(g) + 1))
    afterwards = list(spec.accumulate_spec([*first, (gradient, weight), ([math.nan], 0, True)], len(g) + 2))
    return flushed[-1] == afterwards[-1] == spec.window_spec(single(g, w))


@theorem(2, 3, mutant=("windows += 1", "windows += 0"))
def test_schedule_counts_the_windows_that_came_to_something(spec, g: Vector):
    """Windows of one, two, three micro-batches; a window that weighs nothing is not counted."""
    batches = [([math.nan], 0), *single(g, [1] * len(g)), *single(g, [1] * len(g))]
    given = list(spec.accumulate_spec(batches, lambda windows: windows + 1))
    return given[:4] == [None, [g[0]], None, [mean([g[1], (g + g)[2]])]]


@theorem(2, 3, mutant=("squares - weight_sum * of_average", "squares - of_average"))
def test_noise_is_the_weighted_spread_around_the_average(spec, g: Vector, w: Vector):
    assume(positive(w))
    (average,) = spec.window_spec(single(g, w))
    spread = sum(v * (x - average) * (x - average) for x, v in zip(g, w, strict=True))
    trace, signal = spec.noise_spec(single(g, w))
    return trace * (len(g) - 1) == spread and signal + trace / sum(w) == average * average


# --- a whole batch ----------------------------------------------------------------------------------------------


def divisors(n):
    return [k for k in range(1, n + 1) if n % k == 0]


@theorem(1, 2, 4, mutant=("examples[i::micro_batches]", "examples[i:i + 1]"))
def test_batch_comes_to_the_same_in_any_number_of_micro_batches(spec, examples: Vector):
    """Value, gradient and aux, of a mean loss weighed by its examples."""

    def run(part):
        return mean(part), [mean(times(3, part))], len(part), [mean(part)]

    whole = mean(examples), [mean(times(3, examples))], [mean(examples)]
    return all(spec.accumulated_value_and_grad_spec(examples, k, run) == whole for k in divisors(len(examples)))


@theorem(2, 4, mutant=("sum(weight for _, weight in batches)", "len(batches)"))
def test_batch_of_uneven_tokens_comes_to_their_mean(spec, g: Vector, w: Vector):
    """The loss is a mean over a micro-batch's tokens, w of each example."""
    assume(positive(w))

    def run(part):
        tokens = sum(v for _, v in part)
        total = sum(x * v for x, v in part)
        return total / tokens, [total / tokens], tokens, [tokens]

    average = sum(x * v for x, v in zip(g, w, strict=True)) / sum(w)
    return all(
        spec.accumulated_value_and_grad_spec(list(zip(g, w, strict=True)), k, run, aux_reduction="sum")
        == (average, [average], [sum(w)])
        for k in divisors(len(g))
    )


def with_and_without_dropped_parts(spec, g, w, weight, aux):
    """The results of a batch with a dropped part in each place, and without one."""
    assume(positive([*w, weight]))
    clean = [(x, [x], v, [x]) for x, v in zip(g, w, strict=True)]
    bad, empty = (g[0], [math.nan], weight, [weight]), (math.nan, [g[0]], 0, [math.nan])

    def batch(parts):
        return spec.accumulated_value_and_grad_spec(
            parts, len(parts), lambda part: part[0], nonfinite="drop_micro_batch", aux_reduction=aux
        )

    places = [[*clean[:i], part, *clean[i:]] for i in range(len(g) + 1) for part in (bad, empty)]
    return [batch(parts) for parts in places], batch(clean)


@theorem(2, 3, mutant=("part.weight > 0 and is_good", "part.weight > 0"))
def test_dropped_part_of_a_batch_leaves_no_trace(spec, g: Vector, w: Vector, weight: Scalar):
    """Neither does one of weight 0, whatever it holds."""
    for aux in ("mean", "sum", "last"):
        found, expected = with_and_without_dropped_parts(spec, g, w, weight, aux)
        if any(batch != expected for batch in found):
            return False
    return True


@theorem(2, 3, mutant=("part.weight > 0 and is_good", "part.weight > 0"))
def test_dropped_part_of_a_batch_is_neither_the_largest_nor_the_smallest(spec, g: Vector, w: Vector, weight: Scalar):
    """Apart from the other theorem: each order of the numbers is a case, and the sums are the same in all."""
    for aux in ("max", "min"):
        found, expected = with_and_without_dropped_parts(spec, g, w, weight, aux)
        if any(batch[2] != expected[2] for batch in found):
            return False
    return True


@theorem(2, 3, mutant=('"max": max', '"max": min'))
def test_largest_of_the_aux_is_one_of_them_and_no_less_than_any(spec, g: Vector):
    _, _, (largest,) = spec.accumulated_value_and_grad_spec(
        g, len(g), lambda part: (0, [], 1, part), aux_reduction="max"
    )
    return all(x <= largest for x in g) and any(x == largest for x in g)


# --- the window and the clip ------------------------------------------------------------------------------------


@theorem(2, mutant=("scale = radius / sqrt(sum_of_squares)", "scale = 0"))
def test_clipping_before_averaging_errs_by_at_most_the_spread(spec, g: Vector, c: Scalar):
    def clipped(x):
        return clip(spec, [x], c)[0]

    average = mean(g)
    return abs(clipped(average) - mean([clipped(x) for x in g])) <= mean([abs(x - average) for x in g])


# --- floats of any precision --------------------------------------------------------------------------------------


@theorem(
    1, over=RoundedReals, mutant=("[scale * g for g in gradient]", "[scale * g + g * scale / 64 for g in gradient]")
)
def test_rounding_leaves_the_norm_within_2_eps_of_the_threshold(spec, g: Vector, c: Scalar):
    """For one entry, or one that outweighs the others. An eps is two units of rounding."""
    (p,) = clip(spec, g, c)
    outside = abs(g[0]) > abs(c)
    with exactly(c) as unit:
        return abs(p) <= abs(c) * (1 + 4 * unit) and (not outside or abs(p) >= abs(c) * (1 - 4 * unit))


@theorem(1, 2, over=RoundedReals, mutant=("return list(gradient)", "return [1 * g for g in gradient]"))
def test_rounding_touches_nothing_inside(spec, g: Vector, c: Scalar):
    with exactly(c) as unit:
        assume(square(g) * (1 + 8 * unit) <= c * c)
    return clip(spec, g, c) == g


@theorem(2, over=RoundedReals, mutant=(DIVIDED, "total / weight_sum / weight_sum * weight_sum"))
def test_rounding_of_a_mean_is_within_its_operations(spec, g: Vector, w: Vector):
    """A mean of two has four rounded operations: a product, an addition, a division, and the sum of the weights."""
    assume(all(x >= 0 for x in g) and positive(w))
    (average,) = spec.window_spec(single(g, w))
    with exactly(average) as unit:
        (true,) = spec.window_spec(single(g, w))
        return true * (1 - 4 * unit) <= average <= true * (1 + 4 * unit + 10 * unit * unit)


# --- floats, bit by bit -----------------------------------------------------------------------------------------

FLOAT16, BFLOAT16, FLOAT32 = floats(5, 11), floats(8, 8), floats(8, 24)
TINY_FLOAT = floats(3, 3)  # of six bits: where there are products and quotients, more bits take long


def is_nan(x):
    return x != x


@theorem(1, 2, over=FLOAT32, mutant=("if g < -max_value:", "if g < -max_value or not g <= max_value:"))
def test_value_clip_of_floats_stays_in_the_box_and_keeps_nan(spec, g: Vector, c: Scalar):
    """Infinite entries and thresholds, subnormals and both zeros included; and nothing else becomes NaN."""
    assume(c >= 0)
    clipped = spec.clip_by_value_spec(g, c)
    return all(is_nan(p) if is_nan(x) else -c <= p <= c for x, p in zip(g, clipped, strict=True))


@theorem(1, 2, over=FLOAT32, mutant=("return g", "return g + 0"))
def test_value_clip_of_floats_keeps_every_bit_inside_the_box(spec, g: Vector, c: Scalar):
    """That of -0 included."""
    assume(all(abs(x) <= c or is_nan(x) for x in g))
    return all(identical(x, p) for x, p in zip(g, spec.clip_by_value_spec(g, c), strict=True))


@theorem(2, over=FLOAT32, mutant=(POSITIVE_SIDE, "return 0"))
def test_value_clip_of_floats_keeps_their_order(spec, g: Vector, c: Scalar):
    assume(c >= 0 and g[0] <= g[1])
    p = spec.clip_by_value_spec(g, c)
    return p[0] <= p[1]


@theorem(1, over=FLOAT32, mutant=(NEGATIVE_SIDE, "return 0 - max_value"))
def test_value_clip_of_floats_is_odd_to_the_last_bit(spec, g: Vector, c: Scalar):
    """Also for a threshold of 0, where -0 comes out of what is below."""
    assume(c >= 0)
    below, above = spec.clip_by_value_spec(negative(g), c), spec.clip_by_value_spec(g, c)
    return all(identical(x, -y) for x, y in zip(below, above, strict=True))


@theorem(2, 3, over=FLOAT16, mutant=("beyond:\n        return low", "beyond:\n        return low / 2"))
def test_percentile_of_floats_is_one_of_them_to_the_last_bit(spec, g: Vector):
    assume(not any(is_nan(x) for x in g))
    bound = spec.percentile_spec(g, 50)
    return any(identical(bound, x) for x in g)


@theorem(1, 2, over=TINY_FLOAT, mutant=("if radius * radius < sum_of_squares", "if radius < sum_of_squares"))
def test_norm_clip_of_floats_lengthens_no_entry_and_turns_none(spec, g: Vector, c: Scalar):
    """Whatever overflows or underflows on the way."""
    assume(all(abs(x - x) < 1 for x in g) and not is_nan(c))
    return all(abs(p) <= abs(x) and p * x >= 0 for x, p in zip(g, clip(spec, g, c), strict=True))


@theorem(1, 2, over=TINY_FLOAT, mutant=("return list(gradient)", "return [1 * g + 0 for g in gradient]"))
def test_norm_clip_of_floats_keeps_every_bit_inside(spec, g: Vector, c: Scalar):
    assume(square(g) <= c * c)
    return all(identical(x, p) for x, p in zip(g, clip(spec, g, c), strict=True))


@theorem(2, over=FLOAT16, mutant=("return abs(x - x) < 1", "return not x < x and x == x"))
def test_no_policy_but_propagate_lets_a_nan_of_floats_through(spec, g: Vector):
    """Infinities of both signs, whose sum is NaN, included."""
    return not any(
        is_nan(x)
        for policy in ("drop_micro_batch", "drop_window", "extend_window")
        for average in spec.accumulate_spec(single(g, [1] * len(g)), len(g), nonfinite=policy)
        for x in average or []
    )


@theorem(1, over=FLOAT16, mutant=(DIVIDED, "total * (1 / (3 * weight_sum)) * 3"))
def test_window_of_one_is_its_gradient(spec, g: Vector):
    """NaN and infinities included; a -0 becomes the 0 that a sum starts from."""
    (average,) = spec.accumulate_spec([(g, 1)], 1)
    return all(is_nan(p) if is_nan(x) else p == x for x, p in zip(g, average, strict=True))
