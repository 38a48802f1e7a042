"""What compiled programs move, hold and send, on devices that need not be here: read from the programs, not timed.

    python examples/benchmarks/compiled.py --device h100|v5e|v6e|cpu|here [--quick] [--only TEXT] [--json FILE]

`h100` needs the extra `gpu-compiler`, TPUs, by libtpu's names, need `tpu-compiler`; `here` is JAX's default device. P
is the parameters' bytes on a device. A figure in parentheses is Optax's. Calls that leave a window open, or that a guard
skips, are under open. A loop whose trips the data decides counts as one trip.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import _compiled
import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _compiled import Program, Target, place, replicated, sharded
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import shrewjax

MICRO_BATCHES = 8
Compile = Callable[[], Program]


class Row(NamedTuple):
    """Programs that do the same."""

    measure: str
    ours: Compile
    theirs: Compile | None = None


def leaves(dtype: Any = np.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """Eight of 1024 x 1024, which show what a model shows."""
    return {f"w{i}": jax.ShapeDtypeStruct((1024, 1024), dtype) for i in range(8)}


def step(
    target: Target,
    apply: Callable[..., Any],
    tx: optax.GradientTransformation,
    params: Any,
    grads: Any = None,
    *,
    unit: float | None = None,
    devices: int = 1,
    spec: Callable[[Any], P] = replicated,
) -> Program:
    """A training step that is handed gradients; parameters, gradients and state are placed by `spec`."""
    mesh = target.mesh(devices)
    state = place(jax.eval_shape(tx.init, params), mesh, spec)
    grads, params = place(params if grads is None else grads, mesh, spec), place(params, mesh, spec)
    unit = unit or _compiled.bytes_on_a_device(params)
    return _compiled.compile_for(target, partial(apply, tx), (params, state), grads, unit=unit)


def loss(params: Any, x: jax.Array) -> jax.Array:
    """Of a network that has the leaves as its layers."""
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def batch(devices: int) -> jax.ShapeDtypeStruct:
    """Few rows a device, so that the parameters' passes are what counts."""
    return jax.ShapeDtypeStruct((64 * devices, 1024), np.float32)


def placed_window(target: Target, apply: Callable[..., Any], tx: optax.GradientTransformation, devices: int) -> Program:
    """Data parallel with parameters replicated, and all of the state that is like them sharded."""
    mesh, params = target.mesh(devices), leaves()
    state = place(jax.eval_shape(tx.init, params), mesh, sharded)
    params, x = place(params, mesh), place(batch(devices), mesh, sharded)

    def train(carry: Any, x: jax.Array) -> Any:
        return apply(tx, carry, jax.grad(loss)(carry[0], x))

    carry = (params, state)
    placed = jax.tree.map(lambda a: a.sharding, carry)
    unit = _compiled.bytes_on_a_device(params)
    return _compiled.compile_for(target, train, carry, x, unit=unit, out_shardings=placed)


def window_over_devices(target: Target, devices: int) -> Program:
    """Data parallel in `jax.shard_map`, each device with a window of its own."""
    mesh, params = target.mesh(devices), leaves()
    tx = shrewjax.accumulate(ours(), MICRO_BATCHES, axis_name="data")
    with jax.sharding.use_abstract_mesh(AbstractMesh((devices,), ("data",), axis_types=(AxisType.Explicit,))):
        state = jax.eval_shape(tx.init, params)
    specs = shrewjax.state_specs(state)

    def train(carry: Any, x: jax.Array) -> Any:
        own = jax.lax.pcast(carry[0], "data", to="varying")
        return _harness.applied(tx, carry, jax.grad(loss)(own, x))

    mapped = jax.shard_map(train, mesh=mesh, in_specs=((P(), specs), P("data")), out_specs=(P(), specs))
    params, x = place(params, mesh), place(batch(devices), mesh, sharded)
    state = jax.tree.map(lambda a, s: place(a, mesh, lambda _: s), state, specs)
    return _compiled.compile_for(target, mapped, (params, state), x, unit=_compiled.bytes_on_a_device(params))


def ours() -> optax.GradientTransformation:
    """The optimizer of most rows."""
    return optax.chain(shrewjax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def optaxs() -> optax.GradientTransformation:
    """The same by Optax."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def windows(target: Target) -> Iterator[Row]:
    """Accumulation."""
    wide, narrow = leaves(), leaves(jnp.bfloat16)
    unit = 4 * sum(x.size for x in wide.values())
    for name, inner, others in (("clip + adamw", ours, optaxs), *[("adamw", *[lambda: optax.adamw(1e-3)] * 2)]):
        theirs = partial(step, target, _harness.updated, _harness.multi_steps(others(), MICRO_BATCHES), wide)
        tx = shrewjax.accumulate(inner(), MICRO_BATCHES)
        yield Row(f"accumulate({name}), apply_gradients", partial(step, target, _harness.applied, tx, wide), theirs)
        yield Row(f"accumulate({name}), update", partial(step, target, _harness.updated, tx, wide), theirs)
    for policy in ("drop_microbatch", "drop_window", "extend_window"):
        tx = shrewjax.accumulate(ours(), MICRO_BATCHES, nonfinite=policy)
        yield Row(f"accumulate, {policy}, apply_gradients", partial(step, target, _harness.applied, tx, wide))
    tx = shrewjax.accumulate(ours(), MICRO_BATCHES, accumulator_dtype=jnp.float32)
    yield Row(
        "accumulate, bfloat16 gradients and parameters (P: in float32), apply_gradients",
        partial(step, target, _harness.applied, tx, narrow, unit=unit),
        partial(step, target, _harness.updated, _harness.multi_steps(optaxs(), MICRO_BATCHES), narrow, unit=unit),
    )
    accumulator = shrewjax.GradAccumulator(MICRO_BATCHES)
    mesh = target.mesh()
    grads, opened = place(wide, mesh), place(jax.eval_shape(accumulator.init, wide), mesh)
    yield Row("GradAccumulator.add", partial(_compiled.compile_for, target, accumulator.add, opened, grads, unit=unit))
    yield Row("GradAccumulator.take", partial(_compiled.compile_for, target, accumulator.take, opened, unit=unit))


def guards(target: Target) -> Iterator[Row]:
    """Guards around clip + adamw: a call that they skip is under open."""
    theirs = partial(step, target, _harness.updated, optax.apply_if_finite(optaxs(), 10), leaves())
    for guard, others in ((shrewjax.skip_nonfinite, theirs), (shrewjax.skip_on_spike, None)):
        for apply in (_harness.applied, _harness.updated):
            name = "apply_gradients" if apply is _harness.applied else "update"
            yield Row(f"{guard.__name__}, {name}", partial(step, target, apply, guard(ours()), leaves()), others)


RULES: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {
    "clip_by_global_norm": (lambda: shrewjax.clip_by_global_norm(1.0), lambda: optax.clip_by_global_norm(1.0)),
    **{
        f"clip_by_global_norm, ord={p}": (partial(shrewjax.clip_by_global_norm, 1.0, ord=p), None)
        for p in (1, 3, np.inf)
    },
    # Optax clips the norms of blocks as root mean squares alone.
    "clip_by_leaf_norm": (lambda: shrewjax.clip_by_leaf_norm(1.0), lambda: optax.clip_by_block_rms(1.0)),
    "clip_by_block_rms": (lambda: shrewjax.clip_by_block_rms(1.0), lambda: optax.clip_by_block_rms(1.0)),
    "clip_by_value": (lambda: shrewjax.clip_by_value(1.0), lambda: optax.clip(1.0)),
    "clip_by_percentile": (lambda: shrewjax.clip_by_percentile(99.0), None),
    "adaptive_grad_clip": (lambda: shrewjax.adaptive_grad_clip(0.01), lambda: optax.adaptive_grad_clip(0.01)),
    "clip_by_norm_percentile": (lambda: shrewjax.clip_by_norm_percentile(10.0), None),
    "clip_by_norm_zscore": (lambda: shrewjax.clip_by_norm_zscore(), None),
    "clip_by_leaf_norm_ema": (lambda: shrewjax.clip_by_leaf_norm_ema(), None),
}


def rule_step(target: Target, rule: Callable[[], Any], params: Any, grads: Any = None) -> Compile:
    """A rule with adamw."""
    return lambda: step(target, _harness.updated, optax.chain(rule(), optax.adamw(1e-3)), params, grads)


def rules(target: Target) -> Iterator[Row]:
    """Every public transformation, chained with adamw, on float32 parameters."""
    for dtype in (jnp.float32, jnp.bfloat16):
        for name, (rule, other) in RULES.items():
            sides = [rule_step(target, x, leaves(), leaves(dtype)) for x in (rule, other) if x]
            yield Row(f"{name} + adamw, {jnp.dtype(dtype).name} gradients", *sides)


def norms(target: Target) -> Iterator[Row]:
    """Norms alone."""
    for order in (1, 2, 3, np.inf):
        grads = place(leaves(), target.mesh())

        def measure(norm: Callable[..., Any], grads: Any = grads, order: float = order) -> Compile:
            unit = _compiled.bytes_on_a_device(grads)
            return lambda: _compiled.compile_for(target, partial(norm, ord=order), grads, unit=unit, donate=())

        others = None if order == 3 else measure(optax.tree.norm)
        yield Row(f"grad_norm, ord={order}", measure(shrewjax.grad_norm), others)


def devices(target: Target) -> Iterator[Row]:
    """Eight devices, or a pod."""
    counts = [8] if target.name in ("cpu", "here") else [8, 256]
    multi_steps, tx = _harness.multi_steps(optaxs(), MICRO_BATCHES), shrewjax.accumulate(ours(), MICRO_BATCHES)
    for n in counts:
        if target.name == "here" and jax.device_count() < n:
            continue
        fsdp = partial(step, target, params=leaves(), devices=n, spec=sharded)
        yield Row(
            f"FSDP on {n}, accumulate",
            partial(fsdp, _harness.applied, tx),
            partial(fsdp, _harness.updated, multi_steps),
        )
        guarded = shrewjax.skip_nonfinite(ours())
        yield Row(
            f"FSDP on {n}, skip_nonfinite",
            partial(fsdp, _harness.applied, guarded),
            partial(fsdp, _harness.updated, optax.apply_if_finite(optaxs(), 10)),
        )
        yield Row(
            f"FSDP on {n}, clip + adamw",
            partial(fsdp, _harness.updated, ours()),
            partial(fsdp, _harness.updated, optaxs()),
        )
        yield Row(
            f"ZeRO by placement on {n}, with the model",
            partial(placed_window, target, _harness.applied, tx, n),
            partial(placed_window, target, _harness.updated, multi_steps, n),
        )
        yield Row(f"window over {n}, with the model", partial(window_over_devices, target, n))


def large(target: Target) -> Iterator[Row]:
    """A model of 76 leaves, and 1,000 narrow leaves."""
    model = _harness.transformer_shapes(6, 768, 20_000, 1024)
    many = _harness.transformer_shapes(83, 16, 64, 32)
    multi_steps, tx = _harness.multi_steps(optaxs(), MICRO_BATCHES), shrewjax.accumulate(ours(), MICRO_BATCHES)
    yield Row(
        "76 leaves, accumulate, apply_gradients",
        partial(step, target, _harness.applied, tx, model),
        partial(step, target, _harness.updated, multi_steps, model),
    )
    for name in ("clip_by_global_norm", "clip_by_leaf_norm", "adaptive_grad_clip", "clip_by_percentile"):
        sides = [rule_step(target, x, model) for x in RULES[name] if x]
        yield Row(f"76 leaves, {name} + adamw", *sides)
    for name in ("clip_by_global_norm", "clip_by_leaf_norm"):
        yield Row(f"1,000 leaves, {name} + adamw", *[rule_step(target, x, many) for x in RULES[name] if x])


COLUMNS: dict[str, Callable[[Program], Any]] = {
    "open, P": lambda x: round(x.open, 2),
    "closing, P": lambda x: round(x.closing, 2),
    "temporary, P": lambda x: round(x.temporary, 4),
    "launches": lambda x: x.launches,
    "collectives": lambda x: collectives(x) or None,
    "outputs": lambda x: outputs(x) or None,
    "compile, s": lambda x: round(x.seconds, 1),
}


def collectives(program: Program) -> str:
    """How many there are of each kind, with the bytes of those of parameters, and when they run."""
    total: dict[tuple[str, str], list[float]] = {}
    for (name, when, size), count in program.collectives.items():
        total.setdefault((name, when), []).extend([size] * count)
    return "; ".join(
        f"{len(sizes)} {name} of {sum(sizes) / program.unit:.2f} P, {when}" for (name, when), sizes in total.items()
    )


def outputs(program: Program) -> str:
    """The specs of the new parameters and of the new state, on several devices."""
    trees = program.outputs if isinstance(program.outputs, tuple) and len(program.outputs) == 2 else ()
    if not trees or all(len(x.device_set) == 1 for x in jax.tree.leaves(trees)):
        return ""
    found = [dict.fromkeys(str(getattr(x, "spec", x)) for x in jax.tree.leaves(tree)) for tree in trees]
    return "; ".join(
        f"{name} {', '.join(kinds)}".replace("PartitionSpec", "P")
        for name, kinds in zip(("parameters", "state"), found, strict=True)
    )


def main() -> None:
    """Prints the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", required=True, help="h100, cpu, here, or a TPU such as v5e")
    parser.add_argument("--quick", action="store_true", help="leave out the large models")
    parser.add_argument("--only", default="", metavar="TEXT", help="the rows whose names this regular expression finds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file, too")
    options = parser.parse_args()

    if options.device != "here":  # nothing runs, so no device is touched; rows for many CPUs need as many
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
    try:
        target = Target(options.device)
    except _compiled.MissingCompilerError as error:
        parser.error(str(error))
    print(f"{_harness.versions()}, compiled for {target.name}\n")
    print(f"| measure | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}", flush=True)
    records = []
    for section in (windows, guards, rules, norms, devices, *([] if options.quick else [large])):
        for row in section(target):
            if not re.search(options.only, row.measure):
                continue
            programs = {"shrewjax": row.ours(), **({"Optax": row.theirs()} if row.theirs else {})}
            cells = {side: {name: read(x) for name, read in COLUMNS.items()} for side, x in programs.items()}
            texts = ["" if cells["shrewjax"][name] is None else str(cells["shrewjax"][name]) for name in COLUMNS]
            if row.theirs:
                others = ["" if cells["Optax"][name] is None else str(cells["Optax"][name]) for name in COLUMNS]
                texts = [f"{a or '-'} ({b or '-'})" if a or b else "" for a, b in zip(texts, others, strict=True)]
            print(f"| {row.measure} | {' | '.join(texts)} |", flush=True)
            records.append({"measure": row.measure, **cells})
    if options.json:
        options.json.write_text(json.dumps({"device": target.name, "rows": records}, indent=2) + "\n")


if __name__ == "__main__":
    main()
