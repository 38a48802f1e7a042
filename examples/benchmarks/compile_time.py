"""Times how long XLA compiles a step of each rule for a model of many leaves, on devices that need not be here.

    python examples/benchmarks/compile_time.py --device h100|v5e|cpu|here [--leaves 76] [--devices 1] [--times 1]
        [--only TEXT]

Seconds are those of a core, of this process and of the assemblers that it starts: medians of `--times` compilations of
a step, rule + adamw, with FSDP on several devices. A figure in parentheses is that of Optax's nearest rule.
Kernels are the fusions that differ from each other.
`recorded/compile_time.csv` has these figures from JAX 0.10.2. Its first column comes from three compilations, and the
others from one each. Differences below a fifth, or a third of single runs, mean nothing. Clips had branches in the
column of 304 leaves on an H100, which took longer.
"""

import argparse
import functools
import os
import statistics
from collections.abc import Callable
from typing import Any

import _compiled
import _harness
import compiled
import jax
import optax
from _compiled import Target, place, replicated, sharded

import shrewjax

PER_LAYER, OTHERS = 12, 4  # leaves of `_harness.transformer_shapes`
Rule = Callable[[], optax.GradientTransformation]
RULES: dict[str, tuple[Rule, Rule | None]] = compiled.RULES | {
    "clip_by_global_norm(per_leaf=True)": (
        lambda: shrewjax.clip_by_global_norm(1.0, per_leaf=True),
        compiled.RULES["clip_by_global_norm"][1],
    ),
    'clip_by_percentile(scope="leaf")': (
        lambda: shrewjax.clip_by_percentile(99.0, scope="leaf"),
        None,
    ),
    "accumulate": (
        lambda: compiled.window(optax.identity()),
        lambda: compiled.multi_steps(optax.identity()),
    ),
    "skip_nonfinite": (
        lambda: shrewjax.skip_nonfinite(optax.identity()),
        lambda: optax.apply_if_finite(optax.identity(), 10),
    ),
}


def seconds_of_a_core() -> float:
    """The CPU time of this process and of the children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the CPU time."""
    start = seconds_of_a_core()
    result = function()
    return result, seconds_of_a_core() - start


def compile_step(
    target: Target, rule: Rule, params: Any, devices: int, times: int
) -> tuple[float, float, int]:
    """Returns the CPU seconds of `.compile()`, those of tracing and lowering, and the distinct kernels."""
    mesh, spec = target.mesh(devices), sharded if devices > 1 else replicated
    tx = optax.chain(rule(), optax.adamw(1e-3))
    placed = [place(tree, mesh, spec) for tree in (params, jax.eval_shape(tx.init, params), params)]

    def lower() -> Any:
        step = jax.jit(lambda p, s, g: _harness.applied(tx, (p, s), g), donate_argnums=(0, 1))
        return step.trace(*placed).lower(lowering_platforms=(target.platform,))

    befores, seconds = [], []
    for _ in range(times):
        jax.clear_caches()  # JAX compiles no program twice
        lowered, before = timed(lower)
        program, own = timed(lowered.compile)
        befores.append(before)
        seconds.append(own)
    return (
        statistics.median(seconds),
        statistics.median(befores),
        _compiled.distinct_kernels(program.as_text()),
    )


def main() -> None:
    """Prints the table, row by row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", required=True, help="h100, cpu, here, or a TPU such as v5e")
    parser.add_argument("--leaves", type=int, default=76, help="about how many, 4 and 12 a layer")
    parser.add_argument(
        "--devices", type=int, default=1, help="number of devices that share the parameters"
    )
    parser.add_argument("--times", type=int, default=1, help="compile each step so often")
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="the rows whose names this regular expression finds",
    )
    options = parser.parse_args()
    names = _harness.chosen([*RULES], options.only)

    jax.config.update("jax_enable_compilation_cache", False)
    if options.device != "here":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices if options.device == "cpu" else 1)
    try:
        target = Target(options.device)
    except (_compiled.MissingCompilerError, ValueError) as error:
        parser.error(str(error))
    width = 64 if target.platform == "cpu" else 768
    params = _harness.transformer_shapes(
        (options.leaves - OTHERS) // PER_LAYER, width, 20_000 * width // 768, 1024
    )
    measure = functools.partial(
        compile_step, target, params=params, devices=options.devices, times=options.times
    )
    measure(optax.identity)  # the first compilation also starts the compiler
    number = len(jax.tree.leaves(params))
    print(f"{_harness.versions()}, compiled for {options.devices} {target.name}, {number} leaves\n")
    print(
        "| rule | compile, CPU s | trace and lower, CPU s | distinct kernels |\n|---|---|---|---|",
        flush=True,
    )
    known: dict[Any, tuple[float, float, int]] = {}
    for name in names:
        ours, theirs = RULES[name]
        sides = [measure(ours)]
        if theirs is not None:
            known[theirs] = known.get(theirs) or measure(theirs)
            sides.append(known[theirs])
        columns = [f"{x:.1f}" if isinstance(x, float) else str(x) for x in sides[0]]
        beside = (
            [f" ({x:.1f})" if isinstance(x, float) else f" ({x})" for x in sides[1]]
            if theirs
            else [""] * 3
        )
        print(
            f"| {name} | {' | '.join(map(''.join, zip(columns, beside, strict=True)))} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
