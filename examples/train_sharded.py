"""Trains a small transformer on many devices, its parameters sharded, with one all-reduce of gradients a window.

The devices form a grid. Along "fsdp" each holds a part of every parameter and of the optimizer's state: XLA gathers
parameters for use, and sums their gradients over "fsdp". Along "data" parameters are the same. `per_device` keeps each
row's gradients its own, and the accumulator adds them up; rows meet when the window closes, in one all-reduce, and then
the gradient's norm is clipped. Micro-batches are paragraphs of Python's documentation of very different
lengths: `weight=` the number of characters makes a window equal to the one large batch. Now and then all of this goes
to a checkpoint, also in mid-window, from which `--resume` goes on, on as many devices as there are then.

On the eight devices that one CPU can pretend to be:

    python -m pip install -e '.[examples]'
    python examples/train_sharded.py --devices 8
    python examples/train_sharded.py --devices 4 --resume --micro-steps 600

In two processes, each of which reads its own part of every micro-batch (so with i = 0 and 1, at the same time):

    python examples/train_sharded.py --devices 4 --checkpoints out/two --coordinator localhost:9123 --num-processes 2 \
        --process-id i

On a cluster, where the checkpoints' folder is one that all processes see: the same for each process, without
`--devices`; or, under Slurm, Open MPI, Kubernetes and on TPU pods, `--cluster` alone, from which JAX finds the rest.

It takes a minute or two on two CPU cores, downloads nothing, prints each window's loss and the number of all-reduces
over "data" in the compiled step, and writes out/train_sharded.png and the checkpoints. To run elsewhere it needs
_common.py, _figures.py and train_transformer.py beside it.
"""

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import _figures
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax import P
from jax.sharding import Mesh, NamedSharding
from matplotlib.figure import Figure
from tqdm import tqdm
from train_transformer import CharacterTransformer, Texts, padded, paragraphs

import shrewjax

ACCUM_STEPS = 8
LEARNING_RATE, MAX_NORM = 3e-3, 1.0
CHARACTERS = 128  # more than there are, so that every leaf can be divided


class Training(NamedTuple):
    """The weights and the optimizer's state, which go from step to step and into checkpoints."""

    weights: nnx.State
    opt_state: shrewjax.AccumulateState


def start(args: argparse.Namespace) -> None:
    """Before anything else asks JAX for its devices: how many a CPU has, and which other processes there are."""
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    if args.coordinator:
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)
    elif args.cluster:
        jax.distributed.initialize()


def divided(shape: tuple[int, ...], devices: int) -> P:
    """The largest dimension that can be divided among the devices is."""
    dims = [dim for dim, size in enumerate(shape) if size % devices == 0]
    return P(*[None] * max(dims, key=lambda dim: shape[dim]), "fsdp") if dims else P()


def new_training(
    tx: optax.GradientTransformation, mesh: Mesh, args: argparse.Namespace
) -> tuple[Any, Training]:
    """The model without its weights, and the weights, made where they belong."""

    def model() -> CharacterTransformer:
        return CharacterTransformer(CHARACTERS, args.length, args.layers, nnx.Rngs(args.seed))

    graph, shapes = nnx.split(nnx.eval_shape(model), nnx.Param)
    shardings = jax.tree.map(
        lambda x: NamedSharding(mesh, divided(x.shape, mesh.shape["fsdp"])), shapes
    )
    weights = jax.jit(lambda: nnx.state(model(), nnx.Param), out_shardings=shardings)()
    return graph, Training(weights, tx.init(weights))


def compiled_step(
    tx: optax.GradientTransformation,
    graph: nnx.GraphDef,
    training: Training,
    texts: Texts,
    mesh: Mesh,
) -> Callable[[Training, Texts], tuple[Training, dict[str, jax.Array]]]:
    """One micro-step of all devices: a new state and what was measured."""

    def mean_loss(weights: nnx.State, texts: Texts) -> tuple[jax.Array, jax.Array]:
        """Over the characters of a row of devices, and their number."""
        texts = jax.lax.with_sharding_constraint(texts, P("fsdp"))
        model = nnx.merge(graph, jax.lax.with_sharding_constraint(weights, P()))  # gathered
        logits = model(
            texts.codes[:, :-1], jax.random.key(0), deterministic=True
        )  # no dropout, so no key is used
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, texts.codes[:, 1:])
        exists = jnp.arange(1, texts.codes.shape[1]) < texts.lengths[:, None]
        number = exists.sum()
        return jnp.where(exists, losses, 0).sum() / number, number

    loss_and_grad = shrewjax.per_device(jax.value_and_grad(mean_loss, has_aux=True), "data")

    def step(
        weights: nnx.State, opt_state: Any, texts: Texts
    ) -> tuple[nnx.State, Any, dict[str, jax.Array]]:
        (losses, numbers), grads = loss_and_grad(weights, texts)
        weights, opt_state = shrewjax.apply_gradients(tx, grads, opt_state, weights, weight=numbers)
        norm = shrewjax.metrics(opt_state)["clip_by_global_norm/grad_norm"]
        measured = {"loss": losses @ numbers, "characters": numbers.sum(), "norm": norm}
        return weights, opt_state, measured

    with jax.set_mesh(mesh):
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*training, texts).compile()
    report_all_reduces(compiled.as_text(), training.weights)

    def call(training: Training, texts: Texts) -> tuple[Training, dict[str, jax.Array]]:
        weights, opt_state, measured = compiled(*training, texts)
        return Training(weights, opt_state), measured

    return call


def all_reduces(program: str) -> list[int]:
    """How many numbers each of them sums over "data", as the text of a compiled program has it.

    Those of `per_device`, a shard_map, stay within a row of devices: they sum over "fsdp".
    """
    results = re.findall(r" = (\S+|\(.*?\)) all-reduce(?:-start)?\((?!.*/shard_map/)", program)
    shapes = [re.findall(r"\w+\[([\d,]*)\]", result) for result in results]
    return [
        sum(math.prod(int(n) for n in dims.split(",") if n) for dims in of_one) for of_one in shapes
    ]


def report_all_reduces(program: str, weights: nnx.State) -> None:
    """Prints how much each micro-step sends over "data", and how much the branch that closes a window."""
    leaves = jax.tree.leaves(weights)
    own = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in leaves)
    log(
        f"parameters: {sum(x.size for x in leaves)} in {len(leaves)} leaves, {own} of them on each device"
    )
    branches, always = program.split("\nENTRY ")
    for when, sent in (
        ("when a window closes", all_reduces(branches)),
        ("on every micro-step", all_reduces(always)),
    ):
        gradients = [
            n for n in sent if n > len(leaves)
        ]  # the others measure, at most a number for each leaf
        others = f"{len(sent) - len(gradients)} others, of at most {len(leaves)}"
        log(
            f"{when}: {len(gradients)} all-reduce of gradients, of {sum(gradients)} numbers; {others}"
        )


def micro_batch(texts: list[np.ndarray], step: int, mesh: Mesh, args: argparse.Namespace) -> Texts:
    """Paragraphs at random; each process reads its own part of them. Depends on the step alone: nothing to save."""
    drawn = np.random.default_rng((args.seed, step)).choice(len(texts), args.batch, replace=False)
    own = np.split(drawn, jax.process_count())[jax.process_index()]
    sharding = NamedSharding(mesh, P(("data", "fsdp")))
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x, (args.batch, *x.shape[1:])),
        padded([texts[i] for i in own], args.length),
    )


def restored(checkpoints: ocp.CheckpointManager, step: int, like: Training) -> Training:
    """From however many devices along "data" to as many as there are now."""
    (rows,) = checkpoints.item_metadata(step)["opt_state"]["sum_of_weights"].shape

    def as_saved(x: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(x.sharding.mesh, P(None, *x.sharding.spec[1:]))
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype, sharding=sharding)

    window = like.opt_state
    rows_of = ("sum_of_weights", "value_sum", "gradient_sum")
    saved = window._replace(
        **{name: jax.tree.map(as_saved, getattr(window, name)) for name in rows_of}
    )
    arguments = ocp.args.StandardRestore(like._replace(opt_state=saved))
    return shrewjax.redistribute(checkpoints.restore(step, args=arguments), like)


def log(line: str) -> None:
    """Prints, in the first process only."""
    if jax.process_index() == 0:
        tqdm.write(line)


def plot(history: dict[int, tuple[float, float]], path: Path) -> None:
    """Draws the loss and the gradient's norm, window by window."""
    figure = Figure(figsize=(8, 3.5))
    loss_axes, norm_axes = figure.subplots(1, 2)
    losses, norms = zip(*history.values(), strict=True)
    loss_axes.plot(list(history), losses)
    loss_axes.set(
        title=f"Training on {jax.device_count()} devices",
        xlabel="window",
        ylabel="loss (nats per character)",
    )
    norm_axes.plot(list(history), norms)
    norm_axes.set(title="Before clipping", xlabel="window", ylabel="gradient norm", yscale="log")
    _figures.plain_ticks(norm_axes.yaxis)
    _figures.threshold(norm_axes, MAX_NORM, f"max_norm = {MAX_NORM:g}")
    _figures.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Trains, saves, reports and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--micro-steps",
        type=int,
        default=400,
        help="from the very first one on, also when resuming",
    )
    parser.add_argument(
        "--batch", type=int, default=16, help="paragraphs in a micro-batch, of all devices together"
    )
    parser.add_argument("--length", type=int, default=128, help="longest paragraph, in characters")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--devices", type=int, help="devices that this process's CPU pretends to be"
    )
    parser.add_argument(
        "--rows", type=int, default=2, help='devices along "data"; the others are along "fsdp"'
    )
    parser.add_argument("--coordinator", help="host:port of the first process")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="one of many processes, as the cluster's manager says",
    )
    parser.add_argument(
        "--checkpoints",
        type=Path,
        default=Path("out/train_sharded"),
        help="folder, empty unless resuming",
    )
    parser.add_argument(
        "--save-every", type=int, default=50, help="micro-steps between two checkpoints"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--out", type=Path, default=Path("out/train_sharded.png"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    start(args)
    devices = jax.device_count()
    if args.batch % devices or devices % args.rows:
        parser.error(
            f"there are {devices} devices: --batch must be a multiple of that, and --rows a divisor"
        )
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh(
        (args.rows, devices // args.rows), ("data", "fsdp"), axis_types=(auto, auto)
    )
    texts, _ = paragraphs(args.length)
    tx = shrewjax.accumulate(
        optax.chain(shrewjax.clip_by_global_norm(MAX_NORM), optax.adamw(LEARNING_RATE)),
        ACCUM_STEPS,
        sum_over="data",
        nonfinite="drop_micro_batch",
    )
    graph, training = new_training(tx, mesh, args)
    done, window, history = 0, [], {}
    checkpoints = ocp.CheckpointManager(
        args.checkpoints.resolve(),
        item_handlers=ocp.StandardCheckpointHandler(),
        options=ocp.CheckpointManagerOptions(max_to_keep=2),
    )
    with checkpoints:
        latest = checkpoints.latest_step()
        if args.resume != (latest is not None):
            parser.error(
                f"{'no' if args.resume else 'there are'} checkpoints in {args.checkpoints}"
            )
        if args.resume:
            done, training = latest, restored(checkpoints, latest, training)
            if jax.process_count() == 1:  # it reads the weights of all devices
                shrewjax.check_window(training.opt_state, ACCUM_STEPS)
            log(
                f"resumed after {done} micro-steps, {int(training.opt_state.micro_step)} of them in an open window"
            )
        step = compiled_step(tx, graph, training, micro_batch(texts, done, mesh, args), mesh)
        for number in tqdm(
            range(done, args.micro_steps), unit="micro-step", disable=jax.process_index() > 0
        ):
            training, measured = step(training, micro_batch(texts, number, mesh, args))
            if (number + 1) % args.save_every == 0:
                checkpoints.save(number + 1, args=ocp.args.StandardSave(training))
            window.append(measured)
            if (number + 1) % ACCUM_STEPS == 0:
                # Only here does the host wait for the devices.
                values, window = jax.device_get(window), []
                loss = sum(x["loss"] for x in values) / sum(x["characters"] for x in values)
                closed, norm = (number + 1) // ACCUM_STEPS, values[-1]["norm"]
                history[closed] = loss, norm
                log(
                    f"window {closed}: loss {loss:.6f} in {len(values)} micro-steps, gradient norm {norm:.6f}"
                )
    if jax.process_index() == 0 and history:
        plot(history, args.out)


if __name__ == "__main__":
    main()
