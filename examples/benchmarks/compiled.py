"""Reads from compiled programs the bytes that they move, hold and send, on devices that need not be here.

    python examples/benchmarks/compiled.py --device h100|v5e|v6e|cpu|here [--quick] [--only TEXT] [--json FILE]

`h100` needs the extra `gpu-compiler`; a TPU, by libtpu's name, needs `tpu-compiler`; `here` is JAX's device. P is the
parameters' bytes on a device. A figure in parentheses is Optax's. Calls that leave a window open, or that a guard
skips, are under open. A loop whose trips the data decides counts as one trip.
`recorded/compiled.csv` has, from JAX 0.10.2, the traffic of a call in an open window, that of the call which closes it,
and the temporary memory, in P. One cell differs with JAX 0.12.0.1: Optax's ZeRO on v5e is 9.8 / 9.8 / 1.01.
"""

import argparse
import json
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
from _harness import applied, updated
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shrewjax

MICRO_BATCHES = 8
Compile = Callable[[], Program]


class Row(NamedTuple):
    """Programs that do the same."""

    measure: str
    ours: Compile
    theirs: Compile | None = None


def leaves(target: Target, dtype: Any = np.float32) -> dict[str, jax.ShapeDtypeStruct]:
    """Eight, which show what a model shows: of 1024 x 1024, or together more than a TPU's VMEM holds."""
    rows = 8192 if target.platform == "tpu" else 1024
    return {f"w{i}": jax.ShapeDtypeStruct((rows, 1024), dtype) for i in range(8)}


def wide(target: Target) -> int:
    """The bytes of all leaves in float32."""
    return 4 * sum(x.size for x in leaves(target).values())


def optimizer(library: Any, **options: Any) -> optax.GradientTransformation:
    """Returns the optimizer of most rows, with the library's clip."""
    return optax.chain(library.clip_by_global_norm(1.0), optax.adamw(1e-3, **options))


def window(
    inner: optax.GradientTransformation | None = None, **options: Any
) -> optax.GradientTransformation:
    """Our accumulation."""
    return shrewjax.accumulate(
        optimizer(shrewjax) if inner is None else inner, MICRO_BATCHES, **options
    )


def multi_steps(inner: optax.GradientTransformation | None = None) -> optax.GradientTransformation:
    """Optax's."""
    return _harness.multi_steps(optimizer(optax) if inner is None else inner, MICRO_BATCHES)


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
    """Returns the loss of a network that has the leaves as its layers."""
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def model(
    target: Target, devices: int
) -> tuple[dict[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """That network's layers, and a batch: few rows a device, so that the parameters' passes are what counts."""
    width = 4096 if target.platform == "tpu" else 1024  # see `leaves`
    weights = {f"w{i}": jax.ShapeDtypeStruct((width, width), np.float32) for i in range(8)}
    return weights, jax.ShapeDtypeStruct((64 * devices, width), np.float32)


def placed_window(
    target: Target,
    apply: Callable[..., Any],
    accumulated: Callable[..., Any],
    library: Any,
    devices: int,
) -> Program:
    """Data parallel with parameters replicated, and all of the state that is like them sharded."""
    mesh, (params, x) = target.mesh(devices), model(target, devices)
    whole = NamedSharding(mesh, P())
    replicate = optax.stateless(lambda updates, _: jax.lax.with_sharding_constraint(updates, whole))
    tx = accumulated(optax.chain(optimizer(library), replicate))
    state = place(jax.eval_shape(tx.init, params), mesh, sharded)
    params, x = place(params, mesh), place(x, mesh, sharded)

    def train(carry: Any, x: jax.Array) -> Any:
        return apply(tx, carry, jax.grad(loss)(carry[0], x))

    return _compiled.compile_for(
        target, train, (params, state), x, unit=_compiled.bytes_on_a_device(params)
    )


def window_over_devices(
    target: Target, devices: int, fsdp: int = 1, *, is_weighted: bool = False
) -> Program:
    """Data parallel in `jax.shard_map`, each device with a window of its own; parameters are sharded over "fsdp".

    The weight of a micro-batch is a number, or is computed from it.
    """
    grid, names = (devices // fsdp, fsdp), ("data", "fsdp")
    mesh, (params, x) = (
        Mesh(target.mesh(devices).devices.reshape(grid), names),
        model(target, devices),
    )
    of_params = P("fsdp") if fsdp > 1 else P()
    tx = window(sum_over="data")
    abstract = AbstractMesh(grid, names, axis_types=(AxisType.Explicit,) * 2)
    with jax.sharding.use_abstract_mesh(abstract):
        state = jax.eval_shape(tx.init, place(params, abstract, lambda _: of_params))
    specs = shrewjax.state_specs(state, axis_names={"data"})

    def train(carry: Any, x: jax.Array) -> Any:
        own = jax.lax.pcast(carry[0], "data", to="varying")
        weight = jnp.sum(x[:, 0] > 0) if is_weighted else 1
        return shrewjax.apply_gradients(
            tx, jax.grad(loss)(own, x), carry[1], carry[0], weight=weight
        )

    mapped = jax.shard_map(
        train,
        mesh=mesh,
        in_specs=((P(), specs), P("data")),
        out_specs=(P(), specs),
        axis_names={"data"},
    )
    params, x = place(params, mesh, lambda _: of_params), place(x, mesh, lambda _: P(names))
    state = jax.tree.map(
        lambda a, spec: place(a, mesh, lambda _: spec), state, shrewjax.state_specs(state)
    )
    return _compiled.compile_for(
        target, mapped, (params, state), x, unit=_compiled.bytes_on_a_device(params)
    )


def masked_loss(params: Any, x: jax.Array, counts: jax.Array) -> jax.Array:
    """The loss of the rows that count."""
    for w in params.values():
        x = jnp.tanh(x @ w)
    return jnp.sum(jnp.mean(x**2, axis=1) * counts) / jnp.sum(counts)


def counted(params: Any, x: jax.Array, counts: jax.Array) -> jax.Array:
    """How many rows do."""
    del params, x
    return jnp.sum(counts)


def whole_batch(
    target: Target,
    step: Callable[..., Any],
    devices: int,
    parts: int = 1,
    *,
    mapped: bool = False,
    spec: Callable[[Any], P] = replicated,
) -> Program:
    """One of the `parts` of a batch, data parallel: under plain jit, or `mapped` over the devices.

    P is the bytes of all parameters, which are placed by `spec`.
    """
    mesh, (params, x) = target.mesh(devices), model(target, devices)
    x = jax.ShapeDtypeStruct((x.shape[0] // parts, *x.shape[1:]), x.dtype)
    batch = place((x, jax.ShapeDtypeStruct(x.shape[:1], np.float32)), mesh, sharded)
    unit = _compiled.bytes_on_a_device(place(params, mesh))
    params = place(params, mesh, spec)
    if mapped:
        step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    return _compiled.compile_for(target, step, params, *batch, unit=unit, donate=())


def sharded_step(target: Target, micro_batches: int, devices: int) -> Callable[..., Any]:
    """Returns the step of a whole batch whose gradients are sharded as the parameters are."""
    run = shrewjax.value_and_grad(masked_loss, micro_batches)
    divided = NamedSharding(target.mesh(devices), P("data"))

    def step(*args: Any) -> Any:
        value, grads = run(*args)
        return value, jax.lax.with_sharding_constraint(grads, divided)

    return step


def optax_batch(params: Any, x: jax.Array, counts: jax.Array) -> Any:
    """Optax's microbatching, whose mean is that of micro-batches."""
    run = optax.microbatching.microbatch(
        jax.value_and_grad(masked_loss),
        (1, 2),
        len(x) // MICRO_BATCHES,
        optax.microbatching.AccumulationType.MEAN,
    )
    return run(params, x, counts)


BATCHES: dict[str, dict[str, Any]] = {
    "unweighted": {},
    "weighted": {"weight_fn": counted},
    "drop_micro_batch": {"nonfinite": "drop_micro_batch"},
}


def batches(target: Target) -> Iterator[Row]:
    """A whole batch in one call, of 8 micro-batches."""
    here = target.name == "here" and jax.device_count()
    for n in [n for n in (1, 8, 256) if n <= (here or {"cpu": 8}.get(target.name, 256))]:
        for name, options in BATCHES.items():
            ours = shrewjax.accumulated_value_and_grad(masked_loss, MICRO_BATCHES, **options)
            yield Row(
                f"accumulated_value_and_grad over {n}, {name}",
                partial(whole_batch, target, ours, n),
                partial(whole_batch, target, optax_batch, n),
            )
            if n > 1:
                ours = shrewjax.accumulated_value_and_grad(
                    masked_loss, MICRO_BATCHES, sum_over="data", **options
                )
                yield Row(
                    f"accumulated_value_and_grad over {n}, {name}, in shard_map",
                    partial(whole_batch, target, ours, n, mapped=True),
                )
        if n > 1:
            yield Row(
                f"value_and_grad, FSDP on {n}, 4 micro-batches (one); P: of all devices",
                *[
                    partial(whole_batch, target, sharded_step(target, k, n), n, spec=sharded)
                    for k in (4, 1)
                ],
            )


MIXED = {"mu_dtype": np.float32}


def bfloat16_window(target: Target) -> Program:
    """Parameters, gradients and the second moment in bfloat16."""
    tx = window(optimizer(shrewjax, **MIXED), accumulator_dtype=np.float32)
    return step(target, applied, tx, leaves(target, jnp.bfloat16), unit=wide(target))


def closed_window(target: Target) -> Program:
    """The one that closes a host-driven window."""
    accumulator, inner, params = (
        shrewjax.GradAccumulator(MICRO_BATCHES),
        optimizer(shrewjax),
        leaves(target),
    )
    carry = params, jax.eval_shape(inner.init, params), jax.eval_shape(accumulator.init, params)
    run = partial(_harness.close, accumulator, inner)
    return _compiled.compile_for(target, run, place(carry, target.mesh()), unit=wide(target))


def windows(target: Target) -> Iterator[Row]:
    """Accumulation."""
    grads, run = leaves(target), partial(step, target)
    theirs = partial(run, updated, multi_steps(), grads)
    yield Row("accumulate, apply_gradients", partial(run, applied, window(), grads), theirs)
    yield Row("accumulate, update", partial(run, updated, window(), grads), theirs)
    for policy in ("drop_micro_batch", "drop_window", "extend_window"):
        yield Row(f"accumulate, {policy}", partial(run, applied, window(nonfinite=policy), grads))
    yield Row("accumulate, noise_decay", partial(run, applied, window(noise_decay=0.99), grads))
    theirs = partial(run, updated, multi_steps(optax.adamw(1e-3)), grads)
    yield Row(
        "accumulate, adamw without a clip",
        partial(run, applied, window(optax.adamw(1e-3)), grads),
        theirs,
    )
    yield Row(
        "accumulate, bfloat16 but for the sum and the first moment (P: float32)",
        partial(bfloat16_window, target),
        partial(
            run,
            updated,
            multi_steps(optimizer(optax, **MIXED)),
            leaves(target, jnp.bfloat16),
            unit=wide(target),
        ),
    )
    accumulator, mesh = shrewjax.GradAccumulator(MICRO_BATCHES), target.mesh()
    opened = place(jax.eval_shape(accumulator.init, grads), mesh)
    run = partial(_compiled.compile_for, target, unit=wide(target))
    yield Row("GradAccumulator.add", partial(run, accumulator.add, opened, place(grads, mesh)))
    yield Row("GradAccumulator.take", partial(run, accumulator.take, opened))
    yield Row("GradAccumulator, closing program", partial(closed_window, target))


def guards(target: Target) -> Iterator[Row]:
    """Guards around clip + adamw."""
    params = leaves(target)
    theirs = partial(step, target, updated, optax.apply_if_finite(optimizer(optax), 10), params)
    for guard, others in ((shrewjax.skip_nonfinite, theirs), (shrewjax.skip_on_spike, None)):
        tx = guard(optimizer(shrewjax))
        yield Row(
            f"{guard.__name__}, apply_gradients", partial(step, target, applied, tx, params), others
        )
        yield Row(f"{guard.__name__}, update", partial(step, target, updated, tx, params), others)


def _global_norm() -> optax.GradientTransformation:
    return optax.clip_by_global_norm(1.0)


def _block_rms() -> optax.GradientTransformation:
    return optax.clip_by_block_rms(1.0)


# With Optax's own rule, or with the one of its rules that reads as much.
RULES: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {
    "clip_by_global_norm": (lambda: shrewjax.clip_by_global_norm(1.0), _global_norm),
    **{
        f"clip_by_global_norm, ord={p}": (
            partial(shrewjax.clip_by_global_norm, 1.0, ord=p),
            _global_norm,
        )
        for p in (1, 3, np.inf)
    },
    "clip_by_norm_percentile": (lambda: shrewjax.clip_by_norm_percentile(10.0), _global_norm),
    "clip_by_norm_zscore": (lambda: shrewjax.clip_by_norm_zscore(), _global_norm),
    "clip_by_leaf_norm": (lambda: shrewjax.clip_by_leaf_norm(1.0), _block_rms),
    "clip_by_leaf_norm_ema": (lambda: shrewjax.clip_by_leaf_norm_ema(), _block_rms),
    "clip_by_block_rms": (lambda: shrewjax.clip_by_block_rms(1.0), _block_rms),
    "adaptive_grad_clip": (
        lambda: shrewjax.adaptive_grad_clip(0.01),
        lambda: optax.adaptive_grad_clip(0.01),
    ),
    "clip_by_value": (lambda: shrewjax.clip_by_value(1.0), lambda: optax.clip(1.0)),
    "clip_by_percentile": (lambda: shrewjax.clip_by_percentile(99.0), None),
}


def rule_step(target: Target, rule: Callable[[], Any], params: Any, grads: Any = None) -> Program:
    """A rule with adamw."""
    return step(target, updated, optax.chain(rule(), optax.adamw(1e-3)), params, grads)


def rules(target: Target) -> Iterator[Row]:
    """Every public rule, with float32 parameters."""
    for dtype in (jnp.float32, jnp.bfloat16):
        for name, sides in RULES.items():
            programs = [
                partial(rule_step, target, x, leaves(target), leaves(target, dtype))
                for x in sides
                if x
            ]
            yield Row(f"{name} + adamw, {jnp.dtype(dtype).name} gradients", *programs)


def norms(target: Target) -> Iterator[Row]:
    """Norms alone."""
    grads = place(leaves(target), target.mesh())

    def run(norm: Callable[..., Any], order: float) -> Program:
        return _compiled.compile_for(
            target, partial(norm, ord=order), grads, unit=wide(target), donate=()
        )

    for order in (1, 2, 3, np.inf):
        theirs = None if order == 3 else partial(run, optax.tree.norm, order)
        yield Row(f"grad_norm, ord={order}", partial(run, shrewjax.grad_norm, order), theirs)


def block_gradient(
    target: Target, clip: Callable[[jax.Array], jax.Array], dtype: Any = np.float32
) -> Program:
    """Forward and backward through a transformer's block. P is the bytes of a cotangent that is clipped: of two."""
    tokens = 16 if target.platform == "tpu" else 4  # more than its VMEM holds, see `leaves`
    kernels, x = place(_harness.block_shapes(tokens, 512, 1024, dtype), target.mesh())
    run = partial(_harness.block_gradient, clip)
    return _compiled.compile_for(
        target, run, kernels, x, x, unit=_compiled.bytes_on_a_device(x), donate=()
    )


def cotangents(target: Target) -> Iterator[Row]:
    """Clipping in the backward pass; beside it, in parentheses, the same without."""
    for dtype in (jnp.float32, jnp.bfloat16):
        for order in (2, np.inf):
            clip = partial(shrewjax.clip_cotangent, max_norm=1.0, ord=order)
            sides = [
                partial(block_gradient, target, side, dtype) for side in (clip, _harness.unclipped)
            ]
            measure = (
                "clip_cotangent, twice in a block's gradient (without); open: nothing is clipped"
            )
            yield Row(f"{measure}; ord={order}, {jnp.dtype(dtype).name}", *sides)


def devices(target: Target) -> Iterator[Row]:
    """Eight devices, or 256."""
    here = target.name == "here" and jax.device_count()
    for n in [n for n in (8, 256) if n <= (here or {"cpu": 8}.get(target.name, 256))]:
        fsdp = partial(step, target, params=leaves(target), devices=n, spec=sharded)
        guard, theirs = (
            shrewjax.skip_nonfinite(optimizer(shrewjax)),
            optax.apply_if_finite(optimizer(optax), 10),
        )
        pairs = {
            "accumulate": ((applied, window()), (updated, multi_steps())),
            "skip_nonfinite": ((applied, guard), (updated, theirs)),
            "clip + adamw": ((updated, optimizer(shrewjax)), (updated, optimizer(optax))),
        }
        for name, sides in pairs.items():
            yield Row(f"FSDP on {n}, {name}", *[partial(fsdp, *side) for side in sides])
        sides = ((applied, window, shrewjax, n), (updated, multi_steps, optax, n))
        yield Row(
            f"ZeRO by placement on {n}, with the model",
            *[partial(placed_window, target, *x) for x in sides],
        )
        yield Row(f"window over {n}, with the model", partial(window_over_devices, target, n))
        yield Row(
            f"HSDP, window over {n // 4}, with the model",
            partial(window_over_devices, target, n, 4),
        )


def large(target: Target) -> Iterator[Row]:
    """A model of 76 leaves, and 1,000 narrow leaves."""
    model = _harness.transformer_shapes(6, 768, 20_000, 1024)
    many = _harness.transformer_shapes(83, 16, 64, 32)
    sides = ((applied, window()), (updated, multi_steps()))
    yield Row("76 leaves, accumulate", *[partial(step, target, *side, model) for side in sides])
    for name in (
        "clip_by_global_norm",
        "clip_by_leaf_norm",
        "adaptive_grad_clip",
        "clip_by_percentile",
    ):
        yield Row(
            f"76 leaves, {name} + adamw",
            *[partial(rule_step, target, x, model) for x in RULES[name] if x],
        )
    for name in ("clip_by_global_norm", "clip_by_leaf_norm"):
        yield Row(
            f"1,000 leaves, {name} + adamw",
            *[partial(rule_step, target, x, many) for x in RULES[name] if x],
        )


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
        f"{len(sizes)} {name} of {sum(sizes) / program.unit:.2f} P, {when}"
        for (name, when), sizes in total.items()
    )


def outputs(program: Program) -> str:
    """The specs of the new parameters and of the new state, on several devices."""
    trees = (
        program.outputs if isinstance(program.outputs, tuple) and len(program.outputs) == 2 else ()
    )
    if not trees or all(len(x.device_set) == 1 for x in jax.tree.leaves(trees)):
        return ""
    found = [
        dict.fromkeys(str(getattr(x, "spec", x)) for x in jax.tree.leaves(tree)) for tree in trees
    ]
    return "; ".join(
        f"{name} {', '.join(kinds)}".replace("PartitionSpec", "P")
        for name, kinds in zip(("parameters", "state"), found, strict=True)
    )


def main() -> None:
    """Prints the table, row by row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", required=True, help="h100, cpu, here, or a TPU such as v5e")
    parser.add_argument("--quick", action="store_true", help="leave out the large models")
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="the rows whose names this regular expression finds",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows to this file, too"
    )
    options = parser.parse_args()

    if (
        options.device != "here"
    ):  # nothing runs, so no device is touched; rows for many CPUs need as many
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 8)
    try:
        target = Target(options.device)
    except (_compiled.MissingCompilerError, ValueError) as error:
        parser.error(str(error))
    print(f"{_harness.versions()}, compiled for {target.name}\n")
    print(f"| measure | {' | '.join(COLUMNS)} |\n|{'---|' * (len(COLUMNS) + 1)}", flush=True)
    records = []
    sections = (
        windows,
        batches,
        guards,
        rules,
        norms,
        cotangents,
        devices,
        *([] if options.quick else [large]),
    )
    all_rows = {row.measure: row for section in sections for row in section(target)}
    for name in _harness.chosen([*all_rows], options.only):
        row = all_rows[name]
        programs = {"shrewjax": row.ours(), **({"Optax": row.theirs()} if row.theirs else {})}
        cells = {
            side: {name: read(x) for name, read in COLUMNS.items()} for side, x in programs.items()
        }
        texts = [
            "" if cells["shrewjax"][name] is None else str(cells["shrewjax"][name])
            for name in COLUMNS
        ]
        if row.theirs:
            others = [
                "" if cells["Optax"][name] is None else str(cells["Optax"][name])
                for name in COLUMNS
            ]
            texts = [
                f"{a or '-'} ({b or '-'})" if a or b else ""
                for a, b in zip(texts, others, strict=True)
            ]
        print(f"| {row.measure} | {' | '.join(texts)} |", flush=True)
        records.append({"measure": row.measure, **cells})
    if options.json:
        options.json.write_text(
            json.dumps({"device": target.name, "rows": records}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
