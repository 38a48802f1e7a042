"""Rewrites the optimized HLO of a partitioned CUDA program into plain HLO, which a CPU runs on as many replicas.

The program is the one that the code generators get: partitioned, fused and scheduled. So a fault of any HLO pass is in
the rewritten program, too. The rewriting leaves out how the program computes, and keeps what it computes:

* A fusion is a call.
* The `-done` of an asynchronous pair is the operation, and the `-start` is nothing.
* A bitcast, which gives memory another shape, is transposes around a reshape.
* A device is a replica, not a partition.
* A call of a library is a call of a JAX function that does the same (`library_calls`).
* Layouts, schedules, costs and aliases are left out.

Everything else stays as it is. An operation that has no plain form here raises `UntranslatableError`.
"""

import math
import re
from collections.abc import Iterable

import _hlo
import jax
import library_calls
import numpy as np
from _hlo import Array, Instruction

# Attributes that say where and when an operation runs, and what it may write over.
_HINTS = {"algorithm", "async_execution_thread", "backend_config", "channel_id", "control-predecessors", "kind"}
_HINTS |= {"cross_program_prefetch_index", "frontend_attributes", "metadata", "origin", "output_to_operand_aliasing"}
_HINTS |= {"sharding", "use_global_device_ids"}

_COLLECTIVES = {"all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"}
# Operations of devices that are no replicas, and of hosts.
_NOT_PLAIN = {"collective-broadcast", "domain", "infeed", "outfeed", "ragged-all-to-all", "recv", "send"}
_NOT_PLAIN |= {"recv-done", "send-done", "rng-get-and-update-state"}


class UntranslatableError(NotImplementedError):
    """A program has an operation that this module cannot rewrite; the message names it."""

    def __init__(self, x: Instruction, reason: str) -> None:
        super().__init__(f"cannot run `{x.op}` on a CPU: {reason}, in %{x.name} = {x.shape} {x.op}({x.given})")


def translate(text: str) -> str:
    """Returns a program as plain HLO. Its text has all constants in full. Raises `UntranslatableError`."""
    program = ["HloModule plain"]
    for computation in _hlo.parse(text):
        body = _Body(program)
        for x in computation:
            body.add(x)
        program.append("\n".join([f"{'ENTRY ' * computation.is_entry}%{computation.name} {{", *body.lines, "}"]))
    return "\n\n".join(program)


class _Body:
    """The lines of one computation. Functions that they call are added to the program."""

    def __init__(self, program: list[str]) -> None:
        self.program = program
        self.lines: list[str] = []

    def add(self, x: Instruction) -> None:
        """Adds the plain form of an instruction, under its name."""
        if x.op in _NOT_PLAIN:
            raise UntranslatableError(x, "it has no plain form")
        if x.op.endswith(("-start", "-update")):
            return
        start = x
        while start.op.endswith(("-done", "-update")):
            (start,) = start.operands
        op = start.op.removesuffix("-start")
        operands = [f"%{y.name}" for y in start.operands] or [start.given]
        attributes = {name: value for name, value in start.attributes.items() if name not in _HINTS}
        if op in ("fusion", "async", "call"):
            self._write(_name(x), _shape(x), "call", operands, to_apply=f"%{start.called[0].name}")
        elif op == "bitcast":
            self._bitcast(x, start.operands[0])
        elif op == "partition-id":
            self._write(_name(x), _shape(x), "replica-id", [])
        elif op in _COLLECTIVES:
            self._collective(x, start, op, operands, attributes)
        elif op == "custom-call":
            self._library_call(x, start, operands)
        elif op == "constant" and "{...}" in start.given:
            raise UntranslatableError(x, "its value is left out of the text")
        else:
            self._write(_name(x), _shape(x), op, operands, **attributes)

    def _write(self, name: str, shape: str, op: str, operands: Iterable[str], **attributes: str) -> None:
        line = f"  {name} = {shape} {op}({', '.join(operands)})"
        self.lines.append(", ".join([line, *(f"{key}={value}" for key, value in attributes.items())]))

    def _bitcast(self, x: Instruction, operand: Instruction) -> None:
        """Puts the dimensions in the order of the memory, gives them their new sizes, and puts those in order."""
        (old,), (new,) = operand.arrays, x.arrays
        source, stored, reshaped = (f"%plain_{i}.{x.name}" for i in range(3))
        if old.dtype == new.dtype:
            source = f"%{operand.name}"
        else:
            self._write(source, _array(new.dtype, old.dims), "bitcast-convert", [f"%{operand.name}"])
        order, new_order = _major_to_minor(old), _major_to_minor(new)
        in_memory, new_in_memory = [old.dims[i] for i in order], [new.dims[i] for i in new_order]
        self._write(stored, _array(new.dtype, in_memory), "transpose", [source], dimensions=_list(order))
        self._write(reshaped, _array(new.dtype, new_in_memory), "reshape", [stored])
        self._write(_name(x), _shape(x), "transpose", [reshaped], dimensions=_list(np.argsort(new_order)))

    def _collective(
        self, x: Instruction, start: Instruction, op: str, operands: list[str], attributes: dict[str, str]
    ) -> None:
        """Runs over replicas. Several operands at once, which the CPU does not know, are sent one after another."""
        if "channel_id" not in start.attributes:
            raise UntranslatableError(x, "it is not over partitions")
        if "replica_groups" in attributes:
            written = attributes["replica_groups"] + attributes.pop("device_ids", "")
            if op in ("all-gather", "all-reduce", "reduce-scatter") and "use_global_device_ids" not in start.attributes:
                written = "{}" if written == "{{0}}" else "groups of replicas"  # replica 0 is all partitions
            attributes["replica_groups"] = _groups(written)
            if not attributes["replica_groups"]:
                raise UntranslatableError(x, f"no meaning is known for {written}")
        if len(operands) == 1 or op == "all-to-all":
            self._write(_name(x), _shape(x), op, operands, **attributes)
            return
        parts = [f"%plain_{i}.{x.name}" for i in range(len(operands))]
        for part, array, operand in zip(parts, x.arrays, operands, strict=True):
            self._write(part, _array(array.dtype, array.dims), op, [operand], **attributes)
        self._write(_name(x), _shape(x), "tuple", parts)

    def _library_call(self, x: Instruction, start: Instruction, operands: list[str]) -> None:
        function = library_calls.function_for(start)
        if function is None:
            raise UntranslatableError(x, f"no function is known for {start.attributes['custom_call_target']}")
        arguments = [library_calls.abstract(a) for y in start.operands for a in y.arrays]
        text = jax.jit(function, keep_unused=True).lower(*arguments).as_text("hlo").split("\n", 1)[1]
        names = re.findall(r"^(?:ENTRY )?([\w.\-]+) \{$", text, re.MULTILINE)
        own = f"of_{x.name}.{len(self.program)}."  # the program has other functions of JAX's names
        text = re.sub(rf"(?<![\w.\-])({'|'.join(map(re.escape, names))})(?![\w.\-])", rf"{own}\1", text)
        self.program.append(text.replace("ENTRY ", ""))
        self._write(_name(x), _shape(x), "call", operands, to_apply=f"%{own}{names[-1]}")


def _name(x: Instruction) -> str:
    return f"{'ROOT ' * x.is_root}%{x.name}"


def _shape(x: Instruction) -> str:
    """The shape without layouts."""
    return re.sub(r"(?<=\])\{[^}]*\}", "", x.shape)


def _array(dtype: str, dims: Iterable[int]) -> str:
    return f"{dtype}[{','.join(map(str, dims))}]"


def _list(numbers: Iterable[object]) -> str:
    return "{" + ",".join(map(str, numbers)) + "}"


_ORDER = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"  # [2,4]T(1,0): the devices 0 to 7 in two rows, column by column
_IOTA = re.compile(rf"\[([\d,]+)\]<={_ORDER}")
_MESH = re.compile(rf"mesh\[((?:'\w+'=\d+,?)+)\](?:\({_ORDER}\))? \{{((?:'\w+',?)+)\}}")


def _groups(written: str) -> str:
    """Returns groups of devices one by one, or nothing if they are written in a way that is not known here.

    JAX 0.10.2 takes groups of a mesh with axes of size 1 for others as it hands HLO to the CPU's compiler.
    """
    if re.fullmatch(r"[{},\d ]*", written):
        return written
    if iota := _IOTA.fullmatch(written):
        groups = _devices(iota[2], iota[3]).reshape(_numbers(iota[1]))
    elif mesh := _MESH.fullmatch(written):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        inside = [[*sizes].index(name) for name in re.findall(r"\w+", mesh[4])]
        others = [i for i in range(len(sizes)) if i not in inside]
        devices = _devices(mesh[2] or str(math.prod(sizes.values())), mesh[3]).reshape([*sizes.values()])
        groups = devices.transpose(others + inside).reshape(-1, math.prod(devices.shape[i] for i in inside))
    else:
        return ""
    return _list(map(_list, groups))


def _devices(shape: str, order: str | None) -> np.ndarray:
    sizes = _numbers(shape)
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    return devices.transpose(_numbers(order)) if order else devices


def _numbers(written: str) -> list[int]:
    return [int(n) for n in written.split(",")]


def _major_to_minor(x: Array) -> list[int]:
    """The dimensions in the order of the memory."""
    return _numbers(x.layout.split(":")[0])[::-1] if x.dims else []
