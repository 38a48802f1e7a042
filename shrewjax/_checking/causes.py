"""Why micro-batches give another result than the whole batch: the option, or the lines of the loss, and a remedy.

`option` tries other options. If none fits, `lines` finds the lines where a result parts from that of the whole batch.
Each has the first cause of `_CAUSES` that it shows. The surest of all lines are told.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from shrewjax._base.types import Function, PyTree
from shrewjax._checking.results import Batches, Results
from shrewjax._numerics.relations import Array, Division, Relation, numbers, relations, shares_of
from shrewjax._programs import jaxprs, lockstep
from shrewjax._programs.lockstep import Programs, Value, is_made_from

Values: TypeAlias = tuple[Value, ...]
"""A value in several runs, at other parameters."""


class Case(NamedTuple):
    """A check that failed."""

    fun: Function  # the user's loss
    batches: Batches
    runs: Sequence[Results]  # at several parameters
    wrong: Sequence[Results]  # those that differ
    division: Division
    reduction: str
    weights: Sequence[float] | None  # those of `weight_fn`
    rtol: float

    def fits(self, reduction: str, weights: Sequence[float] | None) -> bool:
        """Returns whether loss and gradients agree with this option and these weights."""
        shares = shares_of(reduction, weights or [1.0] * len(self.division.shares))
        division = self.division._replace(shares=shares)
        return all(x.fit(division, self.rtol) for x in self.runs)

    def related(self, value: Values) -> set[Relation]:
        """Returns the relations that a value has in each run."""
        each = (relations(x.whole, x.parts, self.division, self.rtol) for x in value)
        return set.intersection(*each)

    def share(self) -> str:
        if self.weights:
            return "w / W, where w is the micro-batch's weight, and W the sum of all weights"
        return "len(x) / B, where x is the micro-batch, and B the number of examples in the whole batch"


class Parting:
    """A value without a relation, made from related ones.

    Attributes:
      found: the relations of each operand.
      rows: the operands that have the rows of examples.
      statistics: those of which each micro-batch has its own, such as a sum.
      is_trained: whether one of the rows or the statistics depends on parameters.
    """

    def __init__(self, case: Case, value: Values) -> None:
        self.case, self.value = case, value[0]
        self.operands = [x for x, *_ in lockstep.operands_of(value)]
        self.found = [case.related(x) for x in lockstep.operands_of(value)]
        pairs = [*zip(self.operands, self.found, strict=True)]
        self.rows = [x for x, found in pairs if "rows" in found]
        to_all = {"same", "rows", "scaled"}
        self.statistics = [x for x, found in pairs if found and not found & to_all]
        self.is_trained = self.depend_on_params(self.statistics or self.rows)

    def depend_on_params(self, values: Sequence[Value]) -> bool:
        params = self.case.batches.with_role("argnums", self.case.wrong[0].args)
        return any(is_made_from(x, params, by_floats=True) for x in values)

    def is_result_of(self, *operations: Callable[[Array, Array], Array]) -> bool:
        """Returns whether the value is that of an operation of NumPy on two operands."""
        if len(self.operands) != 2:
            return False
        a, b, result = (numbers(x.whole) for x in (*self.operands, self.value))
        with np.errstate(all="ignore"):
            made = [f(a, b) for f in operations if a.shape == b.shape or not a.ndim or not b.ndim]
        return any(np.allclose(x, result, 1e-2, equal_nan=True) for x in made)

    def has(self, before: str = "") -> str:
        """Returns the numbers of the first statistic that is a scalar, or nothing."""
        scalars = [x for x in self.statistics if np.ndim(x.whole) == 0]
        return before + _both(scalars[0]) if scalars else ""


def option(case: Case) -> str | None:
    """Returns the option with which loss and gradients agree, or None."""
    counts = [float(len(x)) for x in case.division.examples]
    without = ", without weight_fn=" if case.weights else ""
    options = [
        ("mean", case.weights, ""),
        ("sum_over_weights" if case.weights else "sum", case.weights, ""),
        ("mean", None, without),
        ("sum", None, without),
        ("mean", counts, ", and weight_fn=, a function that returns the number of examples"),
    ]
    for reduction, weights, rest in options:
        if case.fits(reduction, weights):
            kind = "mean" if reduction == "mean" else "sum"
            return f"The loss is a {kind} over examples. Pass reduction={reduction!r}{rest}."
    return None


def lines(
    case: Case,
    programs: Programs,
    pick: Callable[[PyTree], Value],
    remedy: str | None = None,
) -> str:
    """Returns the lines where a result parts from that of the whole batch, and the remedies, or the given one.

    `pick` returns the result from those of the programs.
    """
    own_file = getattr(getattr(case.fun, "__code__", None), "co_filename", "")
    trees = [
        lockstep.run(programs, x.args, case.division.rows, by_equation=True) for x in case.wrong
    ]
    results = [*map(pick, trees)]
    if programs.differing is not None:
        return (
            f"The programs differ from this line on:\n  {lockstep.line_of(results[0], own_file)}\n    `fun` runs other "
            "operations for another number of examples. If it takes rows of an array by their places, pass that as an "
            "argument that holds examples. Otherwise pass a batch with more examples in each micro-batch."
        )
    causes: dict[str, tuple[int, str]] = {}
    for value in lockstep.partings(results, cache(lambda value: bool(case.related(value)))):
        parting, line = Parting(case, value), lockstep.line_of(value[0], own_file)
        told = [(rank, text) for rank, cause in enumerate(_CAUSES) if (text := cause(parting))]
        causes[line] = min(*told[:1], causes.get(line, told[0]))
    best = min(rank for rank, _ in causes.values())
    found = [(line, remedy or text) for line, (rank, text) in causes.items() if rank == best]
    shown = [f"\n  {line}\n    {text}" for line, text in found]
    return "They part here:" + "".join(shown[:3])


def _both(value: Value) -> str:
    """Returns the numbers of a scalar on both sides."""
    whole, *parts = (f"{float(np.real(numbers(x))):.4g}" for x in value.each)
    listed = ", ".join(parts[:4]) + (", ..." if len(parts) > 4 else "")
    return f" {listed} in the micro-batches, and {whole} in the whole batch"


Cause: TypeAlias = str | Literal[False]
"""What a line does, and the remedy, or False if it does something else. Tests follow each remedy."""

_TWO_PASSES = (
    "Let micro_batch_map return what this line needs of each example, and compute the rest outside"
)
_BEFORE = (
    "Compute it for the whole batch before the call, and pass it as an argument without examples"
)


def _count(parting: Parting) -> Cause:
    for x in parting.statistics:
        counts = [float(np.real(numbers(m))) if np.ndim(m) == 0 else -1.0 for m in x.parts]
        # The remedy is tried: loss and gradients agree with it.
        if min(counts) >= 0 < max(counts) and parting.case.fits("mean", counts):
            option = "" if parting.case.reduction == "mean" else ", and reduction='mean'"
            verb = "counts" if all(map(float.is_integer, counts)) else "has"
            return f"This line {verb}{_both(x)}. Pass weight_fn=, a function that returns this number{option}."
    return False


def _key(parting: Parting) -> Cause:
    return any(jaxprs.is_key(x.whole) for x in parting.operands) and (
        "This line draws the same random numbers in each micro-batch. Pass the key as an argument, and name it in "
        "rng_argnums=."
    )


def _term(parting: Parting) -> Cause:
    case, own = parting.case, parting.statistics
    terms = [x for x in parting.operands if x not in own]
    is_sum = parting.is_result_of(np.add, np.subtract) and not parting.rows and len(own) == 1
    option = "" if case.reduction != "mean" or case.weights else ", and pass reduction='sum'"
    return (is_sum and parting.depend_on_params(terms)) and (
        "This line adds a term without examples to a sum over examples, so each micro-batch adds it again. Multiply "
        f"the term by {case.share()}{option}."
    )


def _divisor(parting: Parting) -> Cause:
    divisors = [x for x in parting.operands[-1:] if x in parting.statistics]
    if not (divisors and parting.is_result_of(np.divide)) or parting.depend_on_params(divisors):
        return False
    number = [_both(x) for x in divisors if np.ndim(x.whole) == 0] or [
        " a number of the micro-batch"
    ]
    # A mean needs no share, nor does a sum that the call adds up. What is divided decides, and for rows the divisor.
    found = parting.found[-1 if parting.rows else 0]
    is_shared = "sum" in found and "result" not in found
    share = f" times {parting.case.share()}" if is_shared else ""
    return (
        f"This line divides by{number[0]}. Compute this number for the whole batch before the call, and divide by "
        f"it{share}."
    )


def _denominators(parting: Parting) -> Cause:
    is_sum = len(parting.statistics) == 2 and parting.is_result_of(np.add, np.subtract)
    named = [" or ".join(sorted({*x} - {"result"})) or "weighted mean" for x in parting.found]
    first, second = named if is_sum else ("", "")
    return is_sum and (
        f"This line adds up terms of different denominators: the whole batch has the {first} of one, and the {second} "
        "of the other. Divide both by the same number."
    )


def _constant(parting: Parting) -> Cause:
    return not all(parting.found) and (
        "This line takes other numbers in each micro-batch, which come from no argument. Pass them as an argument that "
        "holds examples."
    )


def _statistic(parting: Parting) -> Cause:
    keep = f"{_TWO_PASSES}. Or keep it, if each micro-batch may have its own, as in batch norm"
    return bool(parting.rows and parting.statistics) and (
        f"This line gives each example a statistic of its micro-batch{parting.has(':')}. "
        f"{keep if parting.is_trained else _BEFORE}."
    )


def _scaled(parting: Parting) -> Cause:
    case = parting.case
    loss, _ = case.wrong[0].errors(case.division, case.rtol)
    where = (
        "The losses agree, so the backward pass differs. In clip_cotangent, or a custom_vjp, multiply what is compared "
        "with cotangents by B / len(x), where x is the micro-batch, and B the number of examples in the whole batch."
        if loss <= case.rtol
        else "Take derivatives of a sum in `fun`, and divide them by no number of examples."
    )
    return {"scaled"} in parting.found and (
        f"This line reads derivatives of a mean, which are larger in a micro-batch. {where}"
    )


def _lookup(parting: Parting) -> Cause:
    case = parting.case
    examples = case.batches.with_role("batch_argnums", case.wrong[0].args)
    made = [{n for x, n in examples.items() if is_made_from(row, [x])} for row in parting.rows]
    # An argument that alone is beside values of others.
    alone = [x for x in made if len(x) == 1 and sum(x <= y for y in made) == 1 and len(made) > 1]
    return bool(alone) and (
        f"This line looks up examples of {min(alone[0])}. If that holds no examples, leave it out of batch_argnums=. "
        f"Otherwise c{_TWO_PASSES[1:]}."
    )


def _loop(parting: Parting) -> Cause:
    scan = parting.value.equation and jaxprs.scan_of(parting.value.equation)
    return scan is not None and (
        "This loop runs over examples, or is too long to look into. If the first axis of its arrays is time, move the "
        f"axis of examples to the front. Otherwise pass sequences of at most {lockstep.TURNS} steps."
    )


def _comparison(parting: Parting) -> Cause:
    apart = (
        "If rows next to each other belong together, reshape the arrays before the call, so that they are one example. "
        "Otherwise compute this for the whole batch before the call, and pass its rows as an argument that holds "
        "examples"
    )
    remedy = _TWO_PASSES if parting.is_trained else apart
    return bool(parting.rows) and f"This line compares or mixes examples. {remedy}."


def _function(parting: Parting) -> Cause:
    return bool(parting.statistics) and (
        f"This line applies a function that is not linear to a statistic of the micro-batch{parting.has(':')}. "
        f"{_TWO_PASSES if parting.is_trained else _BEFORE}."
    )


def _numbering(_: Parting) -> Cause:
    return (
        "This line numbers the rows of each micro-batch from 0. Pass these numbers as an argument that holds "
        "examples."
    )


# The surest first.
_CAUSES = (
    *(_count, _key, _term, _divisor, _denominators, _constant, _statistic),
    *(_scaled, _lookup, _loop, _comparison, _function, _numbering),
)
