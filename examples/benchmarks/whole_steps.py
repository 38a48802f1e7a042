"""Whole train steps of Flax models, with the model's own passes: time, memory, and bytes sent.

    python examples/benchmarks/whole_steps.py [--device cpu|h100|v5e|here] [--only TEXT] [--times 5] [--json FILE]

A step takes a window of eight micro-batches, clips by the global norm, and runs AdamW. On `cpu` and `here` it is timed,
all ways in turn in one process. For `h100` (extra `gpu-compiler`) and `v5e` (`tpu-compiler`) programs are compiled and
read, and no device is needed. P is the bytes of all parameters in float32, frozen ones too. "held" is the memory of a
call beside its donated arguments: temporaries and new results. "sent" is that of eight devices, under plain `jax.jit`.

The way `jax.vjp, with_refs` adds gradients into refs in the backward pass. It is left out with JAX before 0.12, which
loses gradients of an array that a scan both scans and closes over. A ref sums bfloat16 gradients in bfloat16.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import _compiled
import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _compiled import Program, Target, place, sharded
from _models import MODELS, Model, Sizes

import shrewjax

K = 8
EXAMPLES = 4  # of a micro-batch, on a device
SIZES = {
    True: Sizes(
        layers=6, width=256, vocabulary=2048, tokens=32, dtype=np.float32
    ),  # on a CPU, which has no bfloat16
    False: Sizes(layers=12, width=1024, vocabulary=8192, tokens=512),
}
LEAST = 1e-3  # P: smaller collectives are not counted
WITH_REFS = "jax.vjp, with_refs"
HAS_REFS = jax.__version_info__ >= (0, 12)


class Way(NamedTuple):
    """A step `(carry, frozen, batch) -> carry` of a whole batch or of a micro-batch, and its optimizer."""

    step: Callable[..., Any]
    tx: Any
    calls: int = 1  # for one window
    donates: bool = True


def optimizer(library: Any) -> optax.GradientTransformation:
    """Returns clip + AdamW, with the library's clip."""
    return optax.chain(library.clip_by_global_norm(1.0), optax.adamw(1e-3))


def split(batch: Any) -> Any:
    """Returns micro-batches, of which number i has the examples i, i + K, i + 2 K and so on."""
    return jax.tree.map(lambda x: x.reshape(-1, K, *x.shape[1:]).swapaxes(0, 1), batch)


def ways(model: Model) -> dict[str, Way]:
    """Returns each way to train, by its name."""
    grad = jax.value_and_grad(model.loss, has_aux=True)
    ours, theirs = optimizer(shrewjax), optimizer(optax)
    accumulating = shrewjax.accumulate(ours, K)
    multi_steps = _harness.multi_steps(theirs, K)

    def whole(carry: Any, frozen: Any, batch: Any) -> Any:
        params, state, stats = carry

        def loss(params: Any, stats: Any, batch: Any) -> Any:
            value, stats = model.loss(params, stats, frozen, batch)
            return value, (None, stats)

        run = shrewjax.accumulated_value_and_grad(
            loss, K, has_aux=True, batch_argnums=2, carry_argnum=1
        )
        (_, (_, stats)), grads = run(params, stats, batch)
        return *_harness.applied(ours, (params, state), grads), stats

    def divided(carry: Any, frozen: Any, batch: Any) -> Any:
        params, state, stats = carry

        def loss(params: Any, batch: Any) -> Any:
            return model.loss(params, stats, frozen, batch)

        (_, stats), grads = shrewjax.value_and_grad(loss, K, has_aux=True)(params, batch)
        return *_harness.applied(ours, (params, state), grads), stats

    def by_hand(carry: Any, frozen: Any, batch: Any) -> Any:
        params, state, stats = carry

        def add(sums: Any, micro_batch: Any) -> Any:
            total, stats = sums
            (_, stats), grads = grad(params, stats, frozen, micro_batch)
            return (jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, grads), stats), None

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, np.float32), params)
        (total, stats), _ = jax.lax.scan(add, (zeros, stats), split(batch))
        grads = jax.tree.map(lambda x, p: (x / K).astype(p.dtype), total, params)
        return *_harness.updated(theirs, (params, state), grads), stats

    def by_refs(carry: Any, frozen: Any, batch: Any) -> Any:
        params, state, stats = carry
        refs = jax.tree.map(lambda x: jax.new_ref(jnp.zeros_like(x)), params)

        def add(stats: Any, micro_batch: Any) -> Any:
            def loss(params: Any) -> Any:
                return model.loss(params, stats, frozen, micro_batch)

            value, backward, stats = jax.vjp(loss, params, has_aux=True)
            backward.with_refs(refs)(jnp.ones_like(value))
            return stats, None

        stats, _ = jax.lax.scan(add, stats, split(batch))
        grads = jax.tree.map(lambda ref: jax.freeze(ref) / K, refs)
        return *_harness.updated(theirs, (params, state), grads), stats

    def microbatching(carry: Any, frozen: Any, batch: Any) -> Any:
        params, state, stats = carry
        run = optax.microbatching.microbatch(
            lambda batch: grad(params, stats, frozen, batch),
            0,
            jax.tree.leaves(batch)[0].shape[0] // K,
            optax.microbatching.AccumulationType.MEAN,
        )
        (_, new_stats), grads = run(batch)
        return *_harness.updated(theirs, (params, state), grads), new_stats

    def one_by_one(apply: Callable[..., Any], tx: Any, carry: Any, frozen: Any, batch: Any) -> Any:
        params, state, stats = carry
        (_, stats), grads = grad(params, stats, frozen, batch)
        return *apply(tx, (params, state), grads), stats

    of_optax = partial(one_by_one, _harness.updated, multi_steps)
    has_statistics = bool(
        jax.tree.leaves(jax.eval_shape(model.init)[1])
    )  # batch norm mixes examples
    return {
        **({} if has_statistics else {"shrewjax.value_and_grad": Way(divided, ours)}),
        "shrewjax.accumulated_value_and_grad": Way(whole, ours),
        "optax.microbatching": Way(microbatching, theirs),
        "a loop by hand": Way(by_hand, theirs),
        **({WITH_REFS: Way(by_refs, theirs)} if HAS_REFS else {}),
        "shrewjax.accumulate": Way(
            partial(one_by_one, _harness.applied, accumulating), accumulating, K
        ),
        "optax.MultiSteps": Way(of_optax, multi_steps, K),
        "optax.MultiSteps, not donated": Way(of_optax, multi_steps, K, donates=False),
    }


def carry_of(model: Model, way: Way) -> Any:
    """Returns parameters, state, statistics, and frozen parameters."""
    params, stats, frozen = model.init()
    return (params, way.tx.init(params), stats), frozen


def unit_of(model: Model) -> float:
    """Returns P."""
    params, _, frozen = jax.eval_shape(model.init)
    return 4.0 * sum(x.size for x in jax.tree.leaves((params, frozen)))


def program(target: Target, model: Model, way: Way, devices: int = 1) -> Program:
    """Returns the compiled step. Parameters are on all devices, examples are divided."""
    mesh = target.mesh(devices)
    carry, frozen = place(jax.eval_shape(partial(carry_of, model, way)), mesh)
    batch = place(model.batch(EXAMPLES * devices * K // way.calls), mesh, sharded)
    donate = (0,) if way.donates else ()
    return _compiled.compile_for(
        target, way.step, carry, frozen, batch, unit=unit_of(model), donate=donate
    )


def held(model: Model, compiled: Any) -> float:
    """The memory that a call takes beside its arguments, in P."""
    memory = compiled.memory_analysis()
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return (memory.temp_size_in_bytes + new) / unit_of(model)


def sent(compiled: Program, way: Way) -> float:
    """The bytes of collectives in a window, in P."""

    def of_call(closing: bool) -> float:
        return compiled.sent(closing=closing, least=LEAST * compiled.unit)

    return ((way.calls - 1) * of_call(False) + of_call(True)) / compiled.unit


def read(target: Target, model: Model, way: Way) -> dict[str, float]:
    """Returns what is read of the programs for one device and for eight."""
    alone, on_eight = (program(target, model, way, devices) for devices in (1, 8))
    return {"held, P": held(model, alone.compiled), "sent, P": sent(on_eight, way)}


class Run:
    """Compiles a step for the devices that are here, and takes windows."""

    def __init__(self, model: Model, way: Way) -> None:
        """Makes the parameters and the batch."""
        self._carry, self._frozen = jax.jit(partial(carry_of, model, way))()
        shapes = model.batch(EXAMPLES * K // way.calls)
        self._batch = jax.tree.map(partial(numbers, model.classes), shapes)
        step = jax.jit(way.step, donate_argnums=(0,) if way.donates else ())
        self._step = step.lower(self._carry, self._frozen, self._batch).compile()
        self._calls = way.calls
        self.held = held(model, self._step)

    def window(self) -> None:
        """Takes one, to its end."""
        for _ in range(self._calls):
            self._carry = self._step(self._carry, self._frozen, self._batch)
        jax.block_until_ready(self._carry)


def numbers(classes: int, x: Any) -> jax.Array:
    """Returns an array of a shape: labels or tokens, or normal numbers."""
    rng = np.random.default_rng(0)
    return jnp.asarray(
        rng.integers(0, classes, x.shape) if x.dtype == np.int32 else rng.normal(size=x.shape),
        x.dtype,
    )


def timed(model: Model, times: int) -> dict[str, dict[str, float]]:
    """Returns the memory and the median time of each way, all in turn."""
    runs = {name: Run(model, way) for name, way in ways(model).items()}
    of_window = _harness.alternate({name: run.window for name, run in runs.items()}, times)
    return {
        name: {"held, P": run.held, "window, ms": of_window[name].value}
        for name, run in runs.items()
    }


def main() -> None:
    """Prints the table, model by model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu, here, h100, or a TPU such as v5e")
    parser.add_argument(
        "--only",
        default="",
        metavar="TEXT",
        help="the models with names that this regular expression finds",
    )
    parser.add_argument(
        "--times", type=int, default=5, help="windows of which the median time is taken"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the rows to this file, too"
    )
    options = parser.parse_args()
    models = {
        f"{name}, {jnp.dtype(dtype).name}": (make, dtype)
        for name, make in MODELS.items()
        for dtype in (np.float32, jnp.bfloat16)
    }
    labels = _harness.chosen([*models], options.only)

    runs_here = options.device in ("cpu", "here")
    if options.device != "here":
        jax.config.update("jax_platforms", "cpu")
    print(
        f"{_harness.versions()}, {'' if runs_here else 'compiled for '}{options.device}\n",
        flush=True,
    )
    if not HAS_REFS:
        print(f"without {WITH_REFS}, which needs JAX 0.12\n")
    rows = []
    for label in labels:
        make, dtype = models[label]
        model = make(SIZES[options.device == "cpu"], dtype)
        if runs_here:
            found = timed(model, options.times)
        else:
            target = Target(options.device)
            found = {way: read(target, model, x) for way, x in ways(model).items() if x.donates}
        columns = list(next(iter(found.values())))
        print(f"| {label} | {' | '.join(columns)} |\n|{'---|' * (1 + len(columns))}")
        for way, figures in found.items():
            print(f"| {way} | {' | '.join(f'{figures[column]:.2f}' for column in columns)} |")
        print(flush=True)
        rows.append({"model": label, "ways": found})
    if options.json:
        options.json.write_text(
            json.dumps({"device": options.device, "rows": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
