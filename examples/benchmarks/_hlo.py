"""Reads the text of an optimized program into computations and their instructions.

The text is that of `jax.stages.Compiled.as_text()`, after fusion and scheduling, from the compiler of any backend.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_ARRAY = re.compile(r"\b(pred|token|opaque|[a-z]+\d+[a-z\d]*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_HEADING = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)")
_INDEX = re.compile(r"/\*index=\d+\*/")
_NAME = re.compile(r"%([\w.\-]+)")
_MARK = re.compile(
    r'"(?:[^"\\]|\\.)*"|[()\[\]{},]'
)  # a quoted text, which may hold any of the others, or one of them
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CALLS = (
    "calls",
    "to_apply",
    "body",
    "true_computation",
    "false_computation",
    "branch_computations",
)


class Array(NamedTuple):
    """An array of a shape: its dtype as XLA writes it, its dimensions, and its layout, which may be empty."""

    dtype: str
    dims: tuple[int, ...]
    layout: str

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.dims)

    @property
    def size(self) -> float:
        """Its bytes."""
        bits = re.search(r"\d+", "pred8" if self.dtype == "pred" else self.dtype)
        return self.elements * int(bits[0] if bits else 0) / 8

    @property
    def on_chip(self) -> bool:
        """Whether it lies in a memory on the chip, such as a TPU's VMEM."""
        return "S(" in self.layout


def arrays(shape: str) -> list[Array]:
    """Returns the arrays of a shape, which may be a tuple."""
    found = _ARRAY.findall(shape)
    return [
        Array(d, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n), layout)
        for d, dims, layout in found
    ]


def split(text: str) -> tuple[list[str], str]:
    """Returns the parts between commas, up to the end or a bracket that closes what did not open, and what follows."""
    parts, depth, start = [], 0, 0
    for mark in _MARK.finditer(text):
        if mark[0] in ("(", "[", "{"):
            depth += 1
        elif mark[0] in (")", "]", "}"):
            depth -= 1
        if depth < 0 or (depth == 0 and mark[0] == ","):
            parts.append(text[start : mark.start()].strip())
            start = mark.end()
        if depth < 0:
            break
    else:
        parts.append(text[start:].strip())
        start = len(text)
    return [part for part in parts if part], text[start:]


@dataclasses.dataclass(eq=False, repr=False)
class Instruction:
    """A line of a program: `name = shape op(operands), attributes`."""

    name: str
    shape: str
    op: str
    operands: list["Instruction"]
    given: str  # the operands as they are written: a constant's value, a parameter's number
    attributes: dict[str, str]  # as they are written
    called: list["Computation"]  # that it runs, in the order of the text; not a loop's condition
    is_root: bool

    @functools.cached_property
    def arrays(self) -> list[Array]:
        """The arrays of its result."""
        return arrays(self.shape)

    @property
    def size(self) -> float:
        """The bytes of its result."""
        return sum(x.size for x in self.arrays)

    @property
    def trips(self) -> int:
        """The trips of a loop, where they are known, and otherwise 1."""
        found = _TRIPS.search(self.attributes.get("backend_config", ""))
        return int(found[1]) if found else 1


@dataclasses.dataclass(eq=False, repr=False)
class Computation:
    """A function of a program: the entry, a loop's body, a branch, what is fused, what reduces."""

    name: str
    is_entry: bool
    instructions: list[Instruction] = dataclasses.field(default_factory=list)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    @property
    def root(self) -> Instruction:
        """The instruction whose result it returns."""
        return next(x for x in self if x.is_root)


def parse(text: str) -> list[Computation]:
    """Returns the computations of a program, each after those that it calls. Raises if a line has another form."""
    computations: dict[str, Computation] = {}
    known: dict[str, Instruction] = {}
    inside = None
    for line in text.splitlines():
        if heading := _HEADING.match(line):
            inside = computations[heading[2]] = Computation(heading[2], bool(heading[1]))
            known = {}
        elif line.startswith("}"):
            inside = None
        elif inside:
            found = _INSTRUCTION.match(_INDEX.sub("", line))
            if not found:
                raise ValueError(f"no instruction of HLO: {line}")
            root, name, shape, op, rest = found.groups()
            given, rest = split(rest)
            attributes = dict(x.split("=", 1) for x in split(rest)[0] if "=" in x)
            known[name] = Instruction(
                name=name,
                shape=shape,
                op=op,
                operands=[known[x] for text in given for x in _NAME.findall(text)],
                given=", ".join(given),
                attributes=attributes,
                called=[
                    computations[x]
                    for key in _CALLS
                    if key in attributes
                    for x in _NAME.findall(attributes[key])
                ],
                is_root=bool(root),
            )
            inside.instructions.append(known[name])
    return list(computations.values())
