"""The definition of a loss with one denominator, as `shrewjax.spec` defines what the package computes.

The package has no function for it. The guide's page multiplies each token by a coefficient, and sums.
"""

from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

from shrewjax.spec import Number, Part, value_and_grad_spec


class Token(NamedTuple):
    """A token of a batch, and its loss."""

    value: Number  # its loss
    gradient: Sequence[Number]  # of its loss
    mask: Number = 1  # how much it counts, >= 0
    unit: Hashable = 0  # its sequence, or its prompt; the same for all tokens if the loss is their mean


def coefficients_spec(
    mask: Sequence[Number], units: Sequence[Hashable], of: Literal["means", "sums"] = "means"
) -> list[Number]:
    """The number by which a loss multiplies each token: a mean over units of their token means, or of their sums.

    The means by token and by sequence are those of DAPO, 2025, arXiv:2503.14476, and of GRPO, 2024, arXiv:2402.03300.
    """
    counts: dict[Hashable, Number] = {}
    for m, unit in zip(mask, units, strict=True):
        counts[unit] = counts.get(unit, 0) + m
    filled = sum(1 for count in counts.values() if count > 0)

    def coefficient(m: Number, count: Number) -> Number:
        if not count > 0:
            return 0
        return m / count / filled if of == "means" else m / filled

    return [coefficient(m, counts[unit]) for m, unit in zip(mask, units, strict=True)]


def one_denominator_spec(
    tokens: Sequence[Token], micro_batches: int, of: Literal["means", "sums"] = "means"
) -> tuple[Number, list[Number]]:
    """The value and the gradient of such a loss from a batch that is split into micro-batches.

    The coefficients are those of the whole batch.
    """
    batch = [Token(*token) for token in tokens]
    coefficients = coefficients_spec([token.mask for token in batch], [token.unit for token in batch], of)

    def run(part: Sequence[tuple[Number, Token]]) -> Part:
        entries = zip(*(token.gradient for _, token in part), strict=True)
        gradient = [sum(c * g for (c, _), g in zip(part, entry, strict=True)) for entry in entries]
        return Part(sum(c * token.value for c, token in part), gradient)

    summed = value_and_grad_spec(list(zip(coefficients, batch, strict=True)), micro_batches, run, reduction="sum")
    assert summed is not None  # each part has weight 1
    value, gradient, _ = summed
    return value, gradient
