"""The memory of gradients and windows of a transformer with scanned layers, in compiled programs that are not run.

    python examples/benchmarks/scanned_layers.py --device h100|v5e|cpu|here

`h100` needs the extra `gpu-compiler`; a TPU, by libtpu's name, needs `tpu-compiler`. P is the bytes of a device's
parameters in float32. A batch has four micro-batches, and its gradients are compared with those of one micro-batch.
`recorded/scanned_layers.csv` has the P of gradients beyond `jax.value_and_grad` of one micro-batch: JAX 0.10.2, and
in brackets 0.12.0.1. Windows take the temporary memory of `optax.MultiSteps`: 1.41 P on an H100, 1.63 P on a v5e.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import _compiled
import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _compiled import Program, Target, place, sharded
from _transformer import Transformer
from jax.sharding import PartitionSpec as P

import shrewjax

MICRO_BATCHES = 4


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A table of rows, and a small layer."""

    rows: int = 32768
    width: int = 256

    def shapes(self, dtype: Any = np.float32) -> dict[str, Any]:
        """Returns the parameters' shapes."""
        table, out = ((self.rows, self.width), (self.width, 1))
        return {
            "table": jax.ShapeDtypeStruct(table, dtype),
            "out": jax.ShapeDtypeStruct(out, dtype),
        }

    def batch(self, examples: int) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of a batch of examples."""
        return jax.ShapeDtypeStruct((examples, 32), np.int32)

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Returns a mean over examples."""
        return jnp.mean(self.losses(params, tokens))

    def losses(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Returns a square for each example."""
        return (jnp.mean(params["table"][tokens], axis=1) @ params["out"] - 1) ** 2


def weight(tokens: jax.Array) -> jax.Array:
    """Returns the number of tokens that count."""
    return jnp.sum(tokens > 3)


def sum_by_hand(loss: Callable[..., Any], steps: int, params: Any, batch: Any) -> Any:
    """Value and gradients of a loop that adds up gradients in float32."""

    def add(sums: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return (
            sums[0] + value,
            jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums[1], grads),
        ), None

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, np.float32), params)
    micro_batches = batch.reshape(-1, steps, *batch.shape[1:]).swapaxes(0, 1)
    (value, total), _ = jax.lax.scan(add, (jnp.float32(0), zeros), micro_batches)
    return value / steps, jax.tree.map(lambda x, p: (x / steps).astype(p.dtype), total, params)


def masked(model: Any, params: Any, tokens: jax.Array) -> jax.Array:
    """Returns the mean over the valid tokens of the whole batch."""
    mask = tokens > 3
    return jnp.sum(model.losses(params, tokens) * mask) / jnp.sum(mask)


def contrastive(model: Any, params: Any, tokens: jax.Array) -> jax.Array:
    """Returns a loss that compares each sequence with all others."""
    rows = model.losses(params, tokens)
    labels = jnp.arange(len(rows))
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(rows @ rows.T, labels))


def divided(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Value and gradients of a loss of the whole batch."""
    return shrewjax.value_and_grad(loss, MICRO_BATCHES)


ONE = "one micro-batch"
WAYS: dict[str, Callable[[Any], Any]] = {
    ONE: lambda model: jax.value_and_grad(model.loss),
    "by hand": lambda model: functools.partial(sum_by_hand, model.loss, MICRO_BATCHES),
    "value_and_grad": lambda model: divided(model.loss),
    "masked": lambda model: divided(functools.partial(masked, model)),
    "contrastive": lambda model: divided(functools.partial(contrastive, model)),
    "weighted": lambda model: shrewjax.accumulated_value_and_grad(
        model.loss, MICRO_BATCHES, weight_fn=lambda _, tokens: weight(tokens)
    ),
    "skip_empty": lambda model: shrewjax.accumulated_value_and_grad(
        model.loss,
        MICRO_BATCHES,
        weight_fn=lambda _, tokens: weight(tokens),
        skip_empty=True,
    ),
}


@functools.cache
def gradients(
    target: Target, way: str, model: Any, sequences: int, dtype: Any = np.float32, devices: int = 1
) -> Program:
    """The program of `sequences` examples in a micro-batch, on a device.

    On several devices parameters are sharded by their last axes (FSDP).
    """
    mesh = target.mesh(devices)
    number = sequences * devices * (1 if way == ONE else MICRO_BATCHES)

    def spec(x: Any) -> P:
        return (
            P(*[None] * (x.ndim - 1), "data") if devices > 1 and x.shape[-1] % devices == 0 else P()
        )

    unit = _compiled.bytes_on_a_device(place(model.shapes(), mesh, spec))
    params, batch = (
        place(model.shapes(dtype), mesh, spec),
        place(model.batch(number), mesh, sharded),
    )
    return _compiled.compile_for(target, WAYS[way](model), params, batch, unit=unit, donate=())


def beyond_one(target: Target, way: str, *args: Any, **options: Any) -> float:
    """The temporary memory beyond that of one micro-batch's `jax.value_and_grad`, in P."""
    alone = gradients(target, ONE, *args, **options).temporary
    return gradients(target, way, *args, **options).temporary - alone


def optimizer(library: Any) -> optax.GradientTransformation:
    """Returns clip + AdamW, with the library's clip."""
    return optax.chain(library.clip_by_global_norm(1.0), optax.adamw(1e-3))


def _of_optax(tx: Any, carry: Any, grads: Any, tokens: jax.Array) -> Any:
    del tokens
    return _harness.updated(tx, carry, grads)


def _plain(tx: Any, carry: Any, grads: Any, tokens: jax.Array) -> Any:
    del tokens
    return _harness.applied(tx, carry, grads)


def _weighted(tx: Any, carry: Any, grads: Any, tokens: jax.Array) -> Any:
    params, state = carry
    return shrewjax.apply_gradients(tx, grads, state, params, weight=weight(tokens))


OF_OPTAX = "optax.MultiSteps"
WINDOWS: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = {
    OF_OPTAX: (_of_optax, lambda: _harness.multi_steps(optimizer(optax), MICRO_BATCHES)),
    "plain": (_plain, lambda: _window()),
    "weighted": (_weighted, lambda: _window()),
    "drop_micro_batch": (_plain, lambda: _window(nonfinite="drop_micro_batch")),
}


def _window(**options: Any) -> optax.GradientTransformation:
    return shrewjax.accumulate(optimizer(shrewjax), MICRO_BATCHES, **options)


def window(target: Target, name: str, model: Any, sequences: int) -> Program:
    """The step of a window around clip + AdamW, one of `WINDOWS`, which donates parameters and state."""
    apply, make = WINDOWS[name]
    tx = make()
    params, tokens = (place(x, target.mesh()) for x in (model.shapes(), model.batch(sequences)))
    state = place(jax.eval_shape(tx.init, params), target.mesh())

    def step(carry: Any, tokens: jax.Array) -> Any:
        return apply(tx, carry, jax.grad(model.loss)(carry[0], tokens), tokens)

    return _compiled.compile_for(
        target, step, (params, state), tokens, unit=_compiled.bytes_on_a_device(params)
    )


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="h100", help="h100, cpu, here, or a TPU such as v5e")
    options = parser.parse_args()
    if options.device != "here":
        jax.config.update("jax_platforms", "cpu")
    target, model = Target(options.device), Transformer()
    print(f"{_harness.versions()}, compiled for {options.device}\n")

    names = [name for name in WAYS if name != ONE]
    print(f"| beyond one micro-batch, P | {' | '.join(names)} |\n|{'---|' * (1 + len(names))}")
    rows: dict[str, tuple[Any, ...]] = {"float32": (model, 4), "bfloat16": (model, 4, jnp.bfloat16)}
    if options.device not in ("cpu", "here"):
        rows["float32, FSDP on eight"] = (model, 4, np.float32, 8)
    rows["a table of rows"] = (Lookup(), 16)
    for label, arguments in rows.items():
        found = [f"{beyond_one(target, name, *arguments):.2f}" for name in names]
        print(f"| {label} | {' | '.join(found)} |", flush=True)

    print(
        f"\n| a window's temporary memory, P | {' | '.join(WINDOWS)} |\n|{'---|' * (1 + len(WINDOWS))}"
    )
    print(
        f"| float32 | {' | '.join(f'{window(target, name, model, 4).temporary:.2f}' for name in WINDOWS)} |"
    )


if __name__ == "__main__":
    main()
