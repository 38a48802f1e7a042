"""Whether micro-batches give what the whole batch gives, and if not, the lines where they part, and a remedy.

The remedy never changes the loss. `Case.cut` walks back from a result to the last values that depend on parameters and
have the rows of examples. `micro_batch_map` can compute these, and the rest stands outside of it, on the whole batch.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np

from shrewjax._base import trees
from shrewjax._base.types import PyTree
from shrewjax._batches.value_and_grad import Options
from shrewjax._checking.results import Batches
from shrewjax._numerics.relations import Division, as_float64, shares_of
from shrewjax._programs import jaxprs
from shrewjax._programs.lockstep import Value, expressions_of, walk

# The name that fits a leaf of the aux with this relation, in the order in which they are proposed.
_NAMES = dict(result="mean", sum="sum", max="max", min="min", rows="examples")  # noqa: C408


class Why(NamedTuple):
    """What differs, where and why."""

    text: str
    where: Sequence[Value] = ()

    def is_told(self) -> bool:
        """Returns whether these values are known, and come from no loop, which could be unrolled."""
        return all(x.equations and not any(jaxprs.jaxprs_in(x.equations[-1])) for x in self.where)


class Case(NamedTuple):
    """Loss, aux and the leaves of the gradients, of the whole batch and of the micro-batches."""

    batches: Batches
    options: Options
    weights: Sequence[float]  # of the micro-batches
    rtol: float
    loss: Value
    aux: Any
    grads: PyTree

    @property
    def division(self) -> Division:
        reduction = "sum" if self.batches.returns_rows else self.options.reduction
        return Division(self.batches.num_examples, shares_of(reduction, self.weights))

    @property
    def leaves(self) -> list[Value]:
        return jax.tree.leaves(self.grads)

    def is_finite(self) -> bool:
        each = (as_float64(x.whole) for x in (self.loss, *self.leaves))
        return all(np.isfinite(x).all() for x in each)

    @np.errstate(all="ignore")
    def errors(self) -> list[float]:
        """Returns how far the loss, and then each gradient, of the micro-batches is off, in units of its size.

        The size of a leaf is its own and a part of the whole gradient's, so that a gradient of rounding alone, such as
        that of the keys' bias in attention, may be off by eps of the whole. `rtol` is eps^(2/3).
        """

        made, leaves = self.division.made, self.leaves

        def error(value: Value, more: Any = 0.0) -> float:
            whole, *parts = map(as_float64, value.each)
            result, terms = (made(x)["result"] for x in (parts, [*map(np.abs, parts)]))
            of, size, off = (np.linalg.norm(x.ravel()) for x in (whole, terms, result - whole))
            return float(off / (max(of, size) + more or 1.0))

        norm = np.sqrt(sum(np.sum(np.abs(as_float64(x.whole)) ** 2) for x in leaves))
        return [error(self.loss), *(error(x, self.rtol**0.5 * norm) for x in leaves)]

    def fits(self, reduction: Any, weights: Sequence[float]) -> bool:
        """Returns whether loss and gradients agree with this option and these weights."""
        options = self.options._replace(reduction=reduction)
        case = self._replace(options=options, weights=weights)
        return all(x <= self.rtol for x in case.errors())

    def why(self) -> Why | None:
        """Returns why micro-batches give another result than the whole batch, or None if they give the same."""
        of_rows = self._why_aux() if self.batches.returns_rows else None
        if of_rows:
            return of_rows
        of_loss, *of_grads = [*self.errors(), 0.0]  # errors; there may be no gradient
        worst = int(np.argmax(of_grads))  # a NaN is the largest
        off = f"the gradients are {_percent(of_grads[worst])} off"
        off += "" if self.batches.returns_rows else f", the loss {_percent(of_loss)}"
        what = f"Micro-batches give another result than the whole batch: {off}."
        if not of_loss <= self.rtol:
            option = self._option()
            return Why(f"{what} {option}") if option else self.lines(what, self.loss)
        if not all(x <= self.rtol for x in of_grads):
            return self.lines(what, self.leaves[worst], _BACKWARD)
        return None if self.batches.returns_rows else self._why_aux()

    def _why_aux(self) -> Why | None:
        is_rows = self.batches.returns_rows
        given = "examples" if is_rows else self.options.aux_reduction
        leaves = jax.tree.leaves_with_path(self.aux)
        names = jax.tree.leaves(jax.tree.broadcast(given, self.aux))
        division = Division(self.batches.num_examples, shares_of("mean", self.weights))
        for name, (path, value) in zip(names, leaves, strict=True):
            related = division.relations(value.whole, value.parts, self.rtol)
            fitting = [x for relation, x in _NAMES.items() if relation in related]
            # A micro-batch's own, "last" or "stack", is right.
            if name not in (*fitting, "last", "stack"):
                if is_rows:
                    return self.lines("Micro-batches give other rows than the whole batch.", value)
                leaf = f"leaf {trees.leaf_name(path)} of the aux"
                what = f"{leaf} has another {name!r} in micro-batches than in the whole batch."
                if fitting:
                    return Why(f"{what} Name it {fitting[0]!r} in aux_reduction=.")
                return self.lines(what, value, _SUMS)
        return None

    def _option(self) -> str | None:
        """Returns a sentence with the option with which loss and gradients agree, or None."""
        if self.batches.returns_rows:
            return None
        weigh, given, ones = self.options.weight_fn, self.weights, [1.0] * len(self.weights)
        of_sum = "sum_over_weights" if weigh else "sum"
        tried = ("mean", given), (of_sum, given), ("mean", ones), ("sum", ones)
        for name, weights in tried:
            if self.fits(name, weights):
                rest = ", without weight_fn=" if weigh and weights is ones else ""
                kind = name.partition("_")[0]
                return f"The loss is a {kind} over examples. Pass reduction={name!r}{rest}."
        return None

    def related(self, value: Value) -> set[str]:
        return self.division.relations(value.whole, value.parts, self.rtol)

    def has_rows(self, value: Value) -> bool:
        """Returns whether the first axis of a value numbers the examples."""
        is_first = np.shape(value.whole)[:1] == (self.batches.num_examples,)
        return is_first and "rows" in self.related(value)

    def lines(self, what: str, result: Value, remedy: str = "") -> Why:
        """Returns the lines where a result parts from the whole batch's, and the remedy, which for a key is its own."""
        related = cache(self.related)
        is_constant_key = lambda x: trees.is_typed_key(x.whole) and not x.sources  # noqa: E731
        # From what is not related, back to where all operands are.
        apart = cache(lambda x: [y for y in x.operands if y.equations and not related(y)])
        where = [x for x in walk(result, apart) if not apart(x)][::-1]
        keys = [x for x in where if any(map(is_constant_key, x.operands))]
        rows, mixed = self.cut(result)
        if keys:
            where, remedy = keys, _KEY
        elif mixed and not remedy and result.is_alike:
            where, remedy = mixed, _BEFORE
        unknown = _MODEL if result.is_alike else _OTHER
        remedy = remedy or (_ROWS + _listed(rows.values()) if rows else unknown)
        lines = _listed(map(self._line, where))
        return Why(f"{what} They part here:{lines}\n{remedy}", where)

    def cut(self, result: Value) -> tuple[dict[Value, str], list[Value]]:
        """Returns the last values before a result that have rows of examples and depend on parameters, with their text.

        An expression of the user's gives each, and another one makes of it what has no rows. Also returns what meets
        parameters beside them, and comes from examples without being rows of theirs.
        """
        has_rows = cache(self.has_rows)
        frames = cache(lambda x: expressions_of(x, self.batches.fun))
        roles = "argnums", "batch_argnums"
        # Operands that come from the model: from parameters and examples.
        of_model = cache(lambda x: [y for y in x.operands if all(map(y.depends_on, roles))])
        until_rows = cache(lambda x: [] if has_rows(x) else of_model(x))

        def own_text(early: Value, late: Value) -> list[str]:
            """Returns the outermost expression of the user's that made `early` and not `late`."""
            pairs = zip(frames(early), frames(late), strict=False)
            apart = [a for a, b in pairs if a != b and has_rows(early)]
            return [a.shown(expression=True) for a in apart[:1]]

        def expressions(early: Value, late: Value) -> dict[Value, str]:
            before = walk(early, lambda x: [] if own_text(x, late) else of_model(x))
            return {x: texts[0] for x in before if (texts := own_text(x, late))}

        # 1. Walk back to the last values with rows, and pair each with what is made of it.
        walked = [*walk(result, until_rows)]
        pairs = [(y, x) for x in walked for y in until_rows(x) if has_rows(y)]
        # 2. Find the user's expressions that give them, or else their lines.
        rows = {z: text for pair in pairs for z, text in expressions(*pair).items()}
        rows = rows or {y: self._line(y) for y, _ in pairs}
        # 3. Leave out those that are made of others.
        made = [x for x in rows if _is_made_of(x, {*rows} - {x})]
        # 4. Find operands that mix examples, at those ends of the walk that have no rows.
        ends = [x for x in walked if not has_rows(x) and not of_model(x)]
        mixed = [y for x in ends for y in x.operands if self._is_mixed(y)]
        return {x: rows[x] for x in rows if x not in made}, mixed

    def _is_mixed(self, x: Value) -> bool:
        has_axis = any(np.shape(m) != np.shape(x.whole) for m in x.parts)
        is_of_batch = has_axis or x.depends_on("batch_argnums")
        return is_of_batch and self.related(x).isdisjoint({"rows", "same"})

    def _line(self, value: Value) -> str:
        shown = (x.shown(expression=False) for x in expressions_of(value, self.batches.fun))
        return ["a line of an installed package", *shown][-1]


def _is_made_of(value: Value, others: set[Value]) -> bool:
    """Returns whether a value depends on parameters through others alone."""
    trained = lambda x: [y for y in x.operands if y.depends_on("argnums")]  # noqa: E731
    ends = walk(value, lambda x: [] if x in others else trained(x))
    return all(x in others or trained(x) for x in ends)


def _listed(lines: Iterable[str]) -> str:
    return "".join(f"\n  {x}" for x in [*dict.fromkeys(lines)][:3])


def _percent(error: float) -> str:
    return f"{float(f'{100 * error:.2g}'):g} %"


_OUTSIDE = "for each example by micro_batch_map, and the rest outside, on the whole batch"
_ROWS = (
    f"Compute what these lines give {_OUTSIDE}. Or keep what parts, if each micro-batch may have its own, as in batch "
    "norm:"
)
_BACKWARD = f"The gradient parts, and the loss does not. Compute what these lines take {_OUTSIDE}."
_MODEL = f"Compute what the model gives {_OUTSIDE}."
_OTHER = (
    "`fun` runs other operations for another number of examples. If it is 1, pass more. Or move their axis to the "
    f"front of each array. Or c{_MODEL[1:]}"
)
_KEY = "This line draws the same random numbers in each micro-batch. Name its key in rng_argnums=."
_BEFORE = (
    "These lines mix examples before a parameter sees them. Compute what they give on the whole batch before, and pass "
    "that with the examples. If they look up an argument that holds no examples, leave it out of batch_argnums=. Or "
    "keep them, if each micro-batch may have its own."
)
_SUMS = "Return sums, each 'sum' in aux_reduction=, and compute this after the call."
