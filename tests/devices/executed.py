"""Runs the compiled program of several GPUs on CPU devices, and compares its results with numbers known to be right.

The program is compiled for H100s that need not be here. `plain_hlo` rewrites its optimized HLO, and as many CPU devices
run it. So a wrong result was made by a pass of the compiler for GPUs: one that partitions, fuses or moves collectives.
Kernels and the sharing of memory come after these passes, and are not run.

    mesh = executed.gpus(data=8)
    expected = jax.jit(jax.value_and_grad(loss))(params, batch)  # the whole batch, on one CPU device
    executed.assert_right(jax.value_and_grad(loss), (params, batch), (P(), P("data")), mesh, expected)

It needs eight CPU devices (`jax_num_cpu_devices`) and the extra `gpu-compiler`.
"""

import math
from collections.abc import Callable
from typing import Any

import _compiled
import jax
import jax.numpy as jnp
import numpy as np
import plain_hlo
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

TOLERANCE = 1e-5


def gpus(**axes: int) -> Mesh:
    """Returns a mesh of H100s with these axes. Raises `_compiled.MissingCompilerError` without their compiler."""
    devices = _compiled.Target("h100").mesh(math.prod(axes.values())).devices
    return Mesh(devices.reshape(*axes.values()), tuple(axes))


def compile_for_gpus(
    function: Callable[..., Any], arguments: Any, specs: Any, mesh: Mesh, **options: Any
) -> jax.stages.Compiled:
    """Compiles a function of arrays that lie on `mesh` by `specs`, a prefix of the arguments' tree.

    `options` are XLA's flags, for this program alone.
    """

    def place(spec: P, subtree: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), subtree)

    placed = jax.tree.map(place, specs, arguments, is_leaf=lambda x: isinstance(x, P))
    return jax.jit(function).trace(*placed).lower(lowering_platforms=("cuda",)).compile(compiler_options=options)


def on_cpus(compiled: jax.stages.Compiled) -> Callable[..., Any]:
    """Returns the program of GPUs as a function that runs on as many CPU devices.

    It takes and returns arrays that lie on these devices as on the GPUs. Results may be given to the next call; a
    device's copy of a replicated array stays as it is, also if it differs from another device's.

    Raises:
        plain_hlo.UntranslatableError: The program has an operation that cannot be rewritten.
    """
    gpus = {x.mesh for x in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))}
    (mesh,) = gpus
    cpus = Mesh(np.reshape(jax.devices("cpu")[: mesh.size], mesh.devices.shape), mesh.axis_names)
    inputs = jax.tree.leaves(compiled.input_shardings[0], is_leaf=lambda x: x is None)  # None: the argument is unused
    outputs = [(x.shape, NamedSharding(cpus, x.sharding.spec)) for x in jax.tree.leaves(compiled.out_info)]
    program = _program_of_replicas(plain_hlo.translate(_text(compiled)), list(cpus.devices.flat))

    def run(*arguments: Any) -> Any:
        pairs = zip(jax.tree.leaves(arguments), inputs, strict=True)
        placed = [jax.device_put(_raw(x), NamedSharding(cpus, sharding.spec)) for x, sharding in pairs if sharding]
        shards = program.execute_sharded(placed).disassemble_into_single_device_arrays()
        results = [
            jax.make_array_from_single_device_arrays(shape, sharding, parts)
            for (shape, sharding), parts in zip(outputs, shards, strict=True)
        ]
        return jax.tree.unflatten(compiled.out_tree, results)

    return run


def numbers(compiled: jax.stages.Compiled, arguments: Any, expected: Any) -> dict[str, float]:
    """Runs a program of GPUs on CPU devices. Returns the error of each result, by its path in the tree.

    An error is the largest of any element on any device, relative to the largest magnitude of what is expected. NaN and
    infinity have to be where they are expected; otherwise the error is infinite.
    """
    return differences(on_cpus(compiled)(*arguments), expected)


def differences(results: Any, expected: Any) -> dict[str, float]:
    """Returns the error of each array, as `numbers` does, over what all devices have of it."""
    errors = {}
    paths = jax.tree_util.tree_leaves_with_path(results)
    for (path, result), wanted in zip(paths, jax.tree.leaves(expected), strict=True):
        whole = np.asarray(_raw(wanted))
        assert result.shape == whole.shape, f"{jax.tree_util.keystr(path)}: {result.shape}, expected {whole.shape}"
        magnitude = np.abs(whole.astype(np.float64))[np.isfinite(whole)].max(initial=np.finfo(np.float32).tiny)
        shards = [(np.asarray(x.data), whole[x.index]) for x in result.addressable_shards]
        errors[jax.tree_util.keystr(path)] = float(max(_difference(*pair) for pair in shards) / magnitude)
    return errors


def assert_right(
    function: Callable[..., Any],
    arguments: Any,
    specs: Any,
    mesh: Mesh,
    expected: Any,
    *,
    tolerance: float = TOLERANCE,
    **options: Any,
) -> None:
    """Compiles a function for GPUs, runs it on CPU devices, and raises an AssertionError if a result is wrong."""
    errors = numbers(compile_for_gpus(function, arguments, specs, mesh, **options), arguments, expected)
    wrong = {path: f"{error:.1e}" for path, error in errors.items() if not error <= tolerance}
    assert not wrong, f"relative errors above {tolerance:.0e}, of {len(errors)} results: {wrong}"


def _raw(x: Any) -> Any:
    """The array itself; of random keys, their numbers, which a program has."""
    return jax.random.key_data(x) if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) else x


def _difference(got: np.ndarray, want: np.ndarray) -> float:
    same = (got == want) | ((got != got) & (want != want))
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0, np.abs(got.astype(np.float64) - want.astype(np.float64)))
    return float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max(initial=0))


# Everything below is private to jaxlib: the text with its constants, and a program of replicas from plain HLO. If a
# version of JAX has it elsewhere, as JAX 0.8 has, the tests of `test_executed.py` fail here.


def _text(compiled: jax.stages.Compiled) -> str:
    """The optimized program. `compiled.as_text()` leaves large constants out."""
    from jaxlib import _hlo

    options = _hlo.HloPrintOptions()
    options.print_large_constants = True
    options.print_metadata = False
    (module,) = compiled.runtime_executable().hlo_modules()
    return module.to_string(options)


# Passes of the CPU's compiler that do other arithmetic than is written. They would add faults of the CPU (XLA-7).
_CPU_PASSES = "algsimp,constant_folding,simplify-fp-conversions"


def _program_of_replicas(text: str, devices: list[jax.Device]) -> Any:
    """Compiles plain HLO for one replica on each device."""
    from jaxlib import _hlo, _jax

    module = _hlo.hlo_module_from_text(text)
    computation = _hlo.XlaComputation(module.as_serialized_hlo_module_proto())
    options = _jax.CompileOptions()
    options.num_replicas, options.num_partitions = len(devices), 1
    options.device_assignment = _jax.DeviceAssignment.create(np.arange(len(devices)).reshape(-1, 1))
    debug = options.executable_build_options.debug_options
    debug.xla_backend_optimization_level, debug.xla_llvm_disable_expensive_passes = 0, True
    debug.xla_disable_hlo_passes = _CPU_PASSES
    stablehlo = _jax.mlir.xla_computation_to_mlir_module(computation)
    return devices[0].client.compile_and_load(stablehlo, _jax.DeviceList(tuple(devices)), options)
