"""Finds the fewest micro-batches whose train step fits into memory, before anything runs.

A residual net of eight layers takes a batch of 4,096 rows. JAX compiles its train step for each number of micro-batches
and says how much memory the program will hold. No step runs, no array exists, and nothing has to run out of memory. The
figure shows what the step holds, and the budget.

Run it with

    python -m pip install -e '.[examples]'
    python examples/fit_micro_batches.py --budget 60

It takes well under a minute on two CPU cores, prints a table and the fewest micro-batches that fit, and writes
out/fit_micro_batches.png. With `--devices 4` the batch is divided among four devices, and numbers are for one of them.
On CPU this needs XLA_FLAGS=--xla_force_host_platform_device_count=4.

To use it for your own step, replace `abstract_arguments` and `train_step`. `fewest` and `memory_of` stay as they are.

Conclusions that hold here:

* Micro-batches shrink activations alone. Parameters, the optimizer's state, the batch and one more tree of gradients
  remain, so from some number on, more micro-batches save nothing.
* The compiler's number is exact for its program. It knows neither what else is on the device nor an allocator's
  fragments. So leave a margin: here a tenth of the budget.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import _figures
import jax
import jax.numpy as jnp
import optax
from _figures import BLUE, GREEN, INK, PURPLE, VERMILLION
from matplotlib.figure import Figure
from tqdm import tqdm

import shrewjax

LAYERS, WIDTH = 8, 256
MIB = 2**20

Params = dict[str, jax.Array]


class Memory(NamedTuple):
    """The bytes that a step holds on one device."""

    arguments: int  # parameters, state and batch; donated ones are results as well
    results: int  # those that are not in a donated argument's place
    temporaries: int  # activations, gradients and their sum

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def mean_loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """The squared error of the net, averaged over rows."""
    for i in range(LAYERS):
        x = x + jnp.tanh(x @ params[f"in_{i}"]) @ params[f"out_{i}"]
    return jnp.mean((x - y) ** 2)


TX = optax.chain(shrewjax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def train_step(micro_batches: int) -> Callable[..., Any]:
    """Returns the jitted step of a whole batch, divided into `micro_batches`."""

    def step(
        params: Params, opt_state: optax.OptState, x: jax.Array, y: jax.Array
    ) -> tuple[Params, optax.OptState, jax.Array]:
        loss, grads = shrewjax.value_and_grad(mean_loss, micro_batches)(params, x, y)
        params, opt_state = shrewjax.apply_gradients(TX, grads, opt_state, params)
        return params, opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def abstract_arguments(rows: int, devices: int) -> tuple[Any, ...]:
    """Returns shapes, dtypes and shardings of the step's arguments: whole parameters, and a divided batch."""
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def placed(spec: jax.P) -> Callable[[Any], Any]:
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    kernel = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
    params = {f"{part}_{i}": kernel for part in ("in", "out") for i in range(LAYERS)}
    whole = jax.tree.map(placed(jax.P()), (params, jax.eval_shape(TX.init, params)))
    batch = jax.tree.map(
        placed(jax.P("data")), [jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)] * 2
    )
    return *whole, *batch


def memory_of(step: Callable[..., Any], *arguments: Any) -> Memory:
    """Returns the memory of a jitted step for one device, from its compiled program. Shapes suffice as arguments."""
    used = step.lower(*arguments).compile().memory_analysis()
    results = used.output_size_in_bytes - used.alias_size_in_bytes
    return Memory(used.argument_size_in_bytes, results, used.temp_size_in_bytes)


def divisors(rows: int, devices: int) -> list[int]:
    """Returns the numbers of micro-batches that divide the rows of each device."""
    return [k for k in range(1, rows // devices + 1) if rows % (k * devices) == 0]


def fewest(needed: Iterator[tuple[int, Memory]], budget: float) -> int:
    """Returns the fewest micro-batches whose memory is within the budget. Raises if none is."""
    least = None
    for micro_batches, memory in needed:
        if memory.total <= budget:
            return micro_batches
        least = min(least or memory, memory, key=lambda memory: memory.total)
    assert least is not None
    missing = least.total - budget
    raise SystemExit(
        f"No number of micro-batches fits into {budget / MIB:.1f} MiB: the least is {least.total / MIB:.1f} MiB, "
        f"{missing / MIB:.1f} MiB too much. Of it, {least.arguments / MIB:.1f} MiB are parameters, state and batch, "
        "which micro-batches do not shrink. Raise --budget. Or divide the batch by --devices, or parameters and state."
    )


def plot(found: dict[int, Memory], budget: float, chosen: int, path: Path) -> None:
    """Draws the memory over the number of micro-batches, in parts, and the budget."""
    figure = Figure(figsize=(8, 4))
    axes = figure.subplots()
    places = range(len(found))
    below = [0.0] * len(found)
    parts = (("parameters, state and batch", BLUE), ("results", PURPLE), ("temporaries", GREEN))
    for at, (label, color) in enumerate(parts):
        heights = [memory[at] / MIB for memory in found.values()]
        if max(heights) > 0.01:
            axes.bar(places, heights, bottom=below, color=color, label=label, width=0.7)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    for place, (k, top) in enumerate(zip(found, below, strict=True)):
        weight = "bold" if k == chosen else "normal"
        axes.annotate(
            f"{top:.0f}",
            (place, top),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            weight=weight,
        )
    _figures.threshold(axes, budget / MIB, "budget less the margin", color=VERMILLION)
    axes.set_xticks(list(places), [str(k) for k in found])
    axes.get_xticklabels()[list(found).index(chosen)].set_fontweight("bold")
    axes.set(title="Memory of a train step, on one device", xlabel="micro-batches", ylabel="MiB")
    axes.legend(labelcolor=INK)
    _figures.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Compiles, prints and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=4096, help="of the whole batch")
    parser.add_argument("--budget", type=float, default=60, help="MiB on each device")
    parser.add_argument(
        "--margin", type=float, default=0.1, help="share of the budget that stays free"
    )
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--most", type=int, default=64, help="micro-batches to try")
    parser.add_argument("--out", type=Path, default=Path("out/fit_micro_batches.png"))
    args = parser.parse_args(argv)
    if jax.device_count() < args.devices:
        raise SystemExit(
            f"--devices {args.devices} needs as many devices, and there are {jax.device_count()}. On CPU, set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={args.devices}"
        )

    arguments = abstract_arguments(args.rows, args.devices)
    found: dict[int, Memory] = {}
    with tqdm(
        [k for k in divisors(args.rows, args.devices) if k <= args.most], unit="program"
    ) as bar:
        for k in bar:
            found[k] = memory_of(train_step(k), *arguments)

    print(f"{'micro-batches':>13} {'arguments':>10} {'results':>8} {'temporaries':>12} {'MiB':>7}")
    for k, memory in found.items():
        columns = [size / MIB for size in (*memory, memory.total)]
        print("{:13d} {:10.1f} {:8.1f} {:12.1f} {:7.1f}".format(k, *columns))
    least = min(memory.total for memory in found.values())
    flat = next(k for k, memory in found.items() if memory.total < 1.01 * least)
    print(f"more than {flat} micro-batches save less than 1 %")
    budget = MIB * args.budget * (1 - args.margin)
    chosen = fewest(iter(found.items()), budget)
    print(f"fewest micro-batches within {budget / MIB:.1f} MiB: {chosen}")
    plot(found, budget, chosen, args.out)


if __name__ == "__main__":
    main()
