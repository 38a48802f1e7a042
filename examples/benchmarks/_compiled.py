"""Compiles steps for a device that need not be here, and counts what the optimized program moves, holds and sends.

A program is read as a list of instructions. Each of them reads its operands from the device's memory and writes its
result there; what stays on the chip (a TPU's VMEM) costs nothing. A conditional that returns arrays of the parameters'
size is the one that runs the optimizer or leaves it alone: its costly side belongs to a closing call, its cheap side to
an open one. Any other conditional is a rescue pass, for sums that left the range of floats, and takes its cheap side.
"""

import functools
import importlib.util
import itertools
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import _hlo
import jax
import numpy as np
from _hlo import Computation, Instruction
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

_INSTALL = "install it into this environment: python -m pip install -e '.[{}]'"

# An H100 SXM by its data sheet and CUDA's occupancy tables, in the fields of XLA's GpuTargetConfigProto.
_H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  l2_cache_size: 52428800 memory_bandwidth: 3352320000000 device_memory_size: 84929347584
}
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
runtime_version { major: 12 minor: 8 }
dnn_version_info { major: 9 minor: 7 }
"""

# libtpu otherwise asks the network which TPU it runs on, and refuses to be used by two processes at a time.
_NO_TPU_HERE = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


class MissingCompilerError(RuntimeError):
    """The device's compiler is not installed; the message says what to install."""


class Target:
    """The target device: `h100`, `cpu`, `here` (JAX's default device), or a TPU's name: `v5e`, `v6e`, `v5p`, ..."""

    def __init__(self, name: str) -> None:
        self.name = name
        if name not in ("cpu", "here"):
            package, extra = (
                ("jax_cuda12_plugin", "gpu-compiler")
                if name == "h100"
                else ("libtpu", "tpu-compiler")
            )
            if importlib.util.find_spec(package) is None:
                raise MissingCompilerError(
                    f"{name} needs the compiler {package}; {_INSTALL.format(extra)}"
                )
        platform = (
            jax.default_backend()
            if name == "here"
            else {"h100": "gpu", "cpu": "cpu"}.get(name, "tpu")
        )
        self.platform = "cuda" if platform == "gpu" else platform  # as JAX calls it when it lowers
        self.mesh()  # fails on names that nobody knows

    def mesh(self, devices: int = 1) -> Mesh:
        """So many of those devices, along the axis "data"."""
        return Mesh(np.array(self._devices(devices)[:devices]), ("data",))

    def _devices(self, number: int) -> Any:
        if self.name == "here":
            return jax.devices()
        if self.name == "cpu":
            return jax.devices("cpu")
        if self.name == "h100":
            return _h100(math.ceil(number / 8))
        for variable, value in _NO_TPU_HERE.items():
            os.environ.setdefault(variable, value)
        return _tpu(self.name, 16 if number > 8 else 2)


@functools.cache  # devices of one topology are not those of another
def _h100(hosts: int) -> Any:
    # The plugin otherwise asks the driver for its version.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    return topologies.get_topology_desc(
        "h100", "cuda", topology=f"1x{hosts}x8", target_config=_H100
    ).devices


@functools.cache
def _tpu(name: str, side: int) -> Any:
    """So many chips, or a few more: on a plane, or for generations that are no plane in space."""
    errors = []
    for topology in (f"{name}:{side}x{max(side, 4)}", f"{name}:2x2x{side * side // 2}"):
        try:
            return topologies.get_topology_desc(topology, "tpu").devices
        except jax.errors.JaxRuntimeError as error:
            errors.append(f"{topology}: {error}")
    raise ValueError(
        f"device must be h100, cpu, here, or a TPU that libtpu knows by this name; {'; '.join(errors)}"
    )


def replicated(_: Any) -> PartitionSpec:
    """The same on every device."""
    return PartitionSpec()


def sharded(x: Any) -> PartitionSpec:
    """By the first axis; a scalar is the same on every device."""
    return PartitionSpec("data") if x.ndim else PartitionSpec()


def place(
    tree: Any, mesh: Mesh | AbstractMesh, spec: Callable[[Any], PartitionSpec] = replicated
) -> Any:
    """Arrays of these shapes and dtypes on the devices, each by its spec."""

    def placed(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec(x)))

    return jax.tree.map(placed, tree)


def bytes_on_a_device(tree: Any) -> int:
    """Returns the bytes that one device holds of arrays that are placed."""
    shards = [(x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in jax.tree.leaves(tree)]
    return sum(math.prod(shape) * itemsize for shape, itemsize in shards)


# Instructions that move nothing, because they rename memory or wait for what was counted where it started.
_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "opt-barrier",
    "after-all",
    "partition-id",
}
_FREE |= {
    "replica-id",
    "all-reduce-done",
    "all-gather-done",
    "collective-permute-done",
    "async-done",
    "async-update",
}
_FREE |= {"copy-start", "slice-start"}
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


def _in_memory(x: Instruction) -> float:
    """The bytes of its result in the device's memory, without those on the chip."""
    return sum(array.size for array in x.arrays if not array.on_chip)


def _has_operands(x: Instruction) -> bool:
    """Whether the result of a collective's start has the operands inside; an all-reduce's has since JAX 0.11."""
    return x.size > sum(y.size for y in x.operands)


def _cuts(x: Instruction) -> bool:
    """Whether it takes slices and does nothing else."""
    fused = {y.op for called in x.called for y in called} if x.op == "fusion" else {x.op}
    return "slice" in fused and fused <= _FREE | {"slice"}


def _moved(x: Instruction) -> float:
    """The bytes that it reads from the device's memory and writes there."""
    if x.op in (
        "copy-done",
        "slice-done",
    ):  # of a prefetch: what arrives, not all of what it is taken from
        ends = (x, *(end for start in x.operands for end in start.operands))
        return x.size * sum(_in_memory(end) > 0 for end in ends)
    if x.op in _FREE:
        return 0.0
    if x.op.endswith("-start") and _has_operands(x):
        return _in_memory(x)
    read = sum(_in_memory(y) for y in set(x.operands))
    return _in_memory(x) + (min(read, x.size) if _cuts(x) else read)


class Step(NamedTuple):
    """An instruction, and when it runs: on "every call", "every trip" of a loop, a "closing call", in a "rescue"."""

    instruction: Instruction
    when: str
    times: int

    @property
    def moved(self) -> float:
        """The bytes of all its runs."""
        return _moved(self.instruction) * self.times


class Program:
    """A compiled function. Sizes are in multiples of P, the parameters' bytes on a device."""

    def __init__(
        self, compiled: jax.stages.Compiled, unit: float, devices: int, seconds: float
    ) -> None:
        self.compiled = compiled
        self.text = compiled.as_text()
        self.seconds = seconds
        self.unit = unit
        self._large = unit / (2 * devices)  # the new state, also where it alone is sharded
        self.outputs = compiled.output_shardings
        self.temporary = compiled.memory_analysis().temp_size_in_bytes / unit
        self._computations = _hlo.parse(self.text)

    def steps(self, *, closing: bool | None) -> list[Step]:
        """Returns the steps of a closing call, or of an open one; with None, of both."""
        (entry,) = (x for x in self._computations if x.is_entry)
        return self._steps(entry, closing, "every call", 1)

    def _steps(
        self, computation: Computation, closing: bool | None, when: str, times: int
    ) -> list[Step]:
        steps: list[Step] = []
        for x in computation:
            if x.op == "conditional":
                optimizes = x.size >= self._large
                inside = "closing call" if optimizes and when != "rescue" else "rescue"
                sides = [self._steps(side, closing, inside, times) for side in x.called]
                if closing is None:
                    steps += itertools.chain(*sides)
                else:
                    steps += (max if closing and optimizes else min)(sides, key=_total)
            elif x.op in ("while", "call"):
                inside = "every trip" if (x.op, when) == ("while", "every call") else when
                steps += self._steps(x.called[0], closing, inside, times * x.trips)
            else:
                steps.append(Step(x, when, times))
        return steps

    @functools.cached_property
    def open(self) -> float:
        """The traffic of an open call."""
        return _total(self.steps(closing=False)) / self.unit

    @functools.cached_property
    def closing(self) -> float:
        """The traffic of a closing call, or of a step that has no window."""
        return _total(self.steps(closing=True)) / self.unit

    @property
    def launches(self) -> int:
        """The kernels and transfers that every call starts."""
        steps = self.steps(closing=None)
        return sum(
            x.when in ("every call", "every trip") and x.instruction.op not in _FREE for x in steps
        )

    def instructions(self) -> Iterator[Instruction]:
        """All that there are, of fusions, too."""
        return itertools.chain(*self._computations)

    def operations(self, *, closing: bool, elements: int) -> set[str]:
        """Returns the operations on arrays of this many elements, also those inside fusions."""
        called = [x.instruction for x in self.steps(closing=closing)]
        inner = [y for x in called if x.op == "fusion" for fused in x.called for y in fused]
        return {x.op for x in [*called, *inner] if x.arrays and x.arrays[0].elements == elements}

    def sent(self, *, closing: bool, least: float) -> float:
        """The bytes of the collectives of a call, of those of a size or more, with each trip of a loop."""
        found = [
            (size, times)
            for x, _, times in self.steps(closing=closing)
            for _, size in self._collectives(x)
        ]
        return sum(size * times for size, times in found if size >= least)

    @property
    def collectives(self) -> Counter[tuple[str, str, float]]:
        """The number of collectives by name, by when they run, and by the bytes of their arrays before any cut."""
        found: Counter[tuple[str, str, float]] = Counter()
        for x, when, _ in self.steps(closing=None):
            for name, size in self._collectives(x):
                found[name, when, size] += 1
        return found

    def _collectives(self, x: Instruction) -> Iterator[tuple[str, float]]:
        """Itself, or those that a fusion or an asynchronous call has inside."""
        name = x.op.removesuffix("-start")
        if name in _COLLECTIVES:
            operands = sum(y.size for y in x.operands)
            yield name, max(operands, x.size - operands * (x.op != name and _has_operands(x)))
        elif x.op in ("fusion", "async-start"):
            for inner in itertools.chain(*x.called):
                for name, size in self._collectives(inner):
                    # A TPU reduces and cuts in one fusion.
                    yield "reduce-scatter" if name == "all-reduce" and x.size < size else name, size


def _total(steps: list[Step]) -> float:
    return sum(x.moved for x in steps)


def distinct_kernels(text: str) -> int:
    """The number of fusions of a compiled program that differ in more than names."""
    return len(
        {_kernel(x) for computation in _hlo.parse(text) for x in computation if x.op == "fusion"}
    )


def _kernel(x: Instruction) -> tuple[Any, ...]:
    """A fusion, with numbers for names."""
    number = {y: i for i, y in enumerate(itertools.chain(*x.called))}
    lines = []
    for y in number:
        attributes = (
            x for x in y.attributes.items() if x[0] != "metadata" and "%" not in x[1]
        )  # "%": a name
        operands = tuple(number[z] for z in y.operands) or y.given
        lines.append((y.shape, y.op, operands, *attributes, _kernel(y) if y.called else ()))
    return (x.shape, *lines)


def compile_for(
    target: Target,
    function: Callable[..., Any],
    *arguments: Any,
    unit: float,
    donate: tuple[int, ...] = (0,),
) -> Program:
    """The program of a function of placed arrays. `unit` is P, in bytes; compile time counts tracing, too."""
    devices = len(jax.tree.leaves(arguments)[0].sharding.device_set)
    start = time.perf_counter()
    traced = jax.jit(function, donate_argnums=donate).trace(*arguments)
    compiled = traced.lower(lowering_platforms=(target.platform,)).compile()
    return Program(compiled, unit, devices, time.perf_counter() - start)
