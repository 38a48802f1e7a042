"""A whole batch in one call: `accumulated_value_and_grad` against a scan by hand, Optax's microbatching, one batch.

    python examples/benchmarks/value_and_grad.py [--json FILE] [--quick]

All sides run in one process, alternating. The model is a GPT-2 of 10 million float32 parameters, the batch 64 texts of
32 tokens, taken as 8 micro-batches. Peak memory is that of the compiled program: arguments, results and temporaries.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import _harness
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _harness import Figure, Row

import shrewjax

MICRO_BATCHES = 8
BATCH, LENGTH = 64, 32
HEADS = 5
Step = Callable[..., Any]


def shapes(quick: bool) -> Any:
    """Returns the shapes of the parameters, 10.0 million numbers."""
    return (
        _harness.transformer_shapes(2, 20, 64, LENGTH)
        if quick
        else _harness.transformer_shapes(6, 320, 8192, LENGTH)
    )


def parameters(quick: bool) -> Any:
    """Small random ones."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(0.02 * rng.standard_normal(x.shape, np.float32)), shapes(quick)
    )


def batch(quick: bool, examples: int = BATCH) -> tuple[jax.Array, jax.Array]:
    """Tokens, and the mask of those that are real: texts of uneven lengths."""
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 64 if quick else 8192, (examples, LENGTH), np.int32)
    lengths = rng.integers(LENGTH // 4, LENGTH + 1, (examples, 1))
    return jnp.asarray(tokens), jnp.asarray(np.arange(LENGTH) < lengths)


def _normed(norm: Any, x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, epsilon=1e-5) * (1 + norm["scale"]) + norm["bias"]


def _dense(layer: Any, x: jax.Array) -> jax.Array:
    return x @ layer["w"] + layer["b"]


def losses(params: Any, tokens: jax.Array) -> jax.Array:
    """The cross-entropy of each next token."""
    x = params["tokens"][tokens[:, :-1]] + params["positions"][: tokens.shape[1] - 1]
    for name in sorted(params.keys() - {"tokens", "positions", "norm"}):
        layer = params[name]
        parts = jnp.split(_dense(layer["qkv"], _normed(layer["norm_1"], x)), 3, axis=-1)
        q, k, v = (part.reshape(*x.shape[:2], HEADS, -1) for part in parts)
        x = x + _dense(
            layer["proj"], jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        )
        x = x + _dense(layer["down"], jax.nn.gelu(_dense(layer["up"], _normed(layer["norm_2"], x))))
    logits = _normed(params["norm"], x) @ params["tokens"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def mean_loss(params: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the mean over all tokens, without regard to the mask."""
    del mask
    return jnp.mean(losses(params, tokens))


def masked_loss(params: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the mean over the tokens that are real."""
    return jnp.sum(losses(params, tokens) * mask[:, 1:]) / jnp.sum(mask[:, 1:])


def real_tokens(params: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """How many tokens `masked_loss` is a mean over."""
    del params, tokens
    return jnp.sum(mask[:, 1:])


def whole(loss: Step) -> Step:
    """The batch at once."""
    return jax.value_and_grad(loss)


def ours(loss: Step, **options: Any) -> Step:
    """Micro-batch by micro-batch."""
    return shrewjax.accumulated_value_and_grad(loss, MICRO_BATCHES, **options)


def by_hand(loss: Step) -> Step:
    """The same as a scan with a bare sum, as trainers have it."""

    def step(params: Any, *examples: jax.Array) -> Any:
        parts = [x.reshape(-1, MICRO_BATCHES, *x.shape[1:]).swapaxes(0, 1) for x in examples]

        def add(total: Any, part: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(params, *part)), None

        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
        total, _ = jax.lax.scan(add, zeros, parts)
        return jax.tree.map(lambda x: x * (1 / MICRO_BATCHES), total)

    return step


def optax_microbatch(loss: Step) -> Step:
    """Optax's own, with a mean."""
    mean = optax.microbatching.AccumulationType.MEAN

    def step(params: Any, *examples: jax.Array) -> Any:
        size = len(examples[0]) // MICRO_BATCHES
        run = optax.microbatching.microbatch(
            jax.value_and_grad(loss), range(1, 1 + len(examples)), size, mean
        )
        return run(params, *examples)

    return step


def compiled(step: Step, *arguments: Any) -> Any:
    """The program."""
    return jax.jit(step).lower(*arguments).compile()


def peak(program: Any) -> int:
    """The bytes that it holds."""
    memory = program.memory_analysis()
    return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes


def time_and_memory(quick: bool) -> list[Row]:
    """A step, unweighted and weighted."""
    params, examples = parameters(quick), batch(quick)
    trees = sum(x.nbytes for x in jax.tree.leaves(params))
    steps = {
        "mean loss": ours(mean_loss),
        "token weights": ours(masked_loss, weight_fn=real_tokens),
        "scan by hand": by_hand(mean_loss),
        "optax.microbatching": optax_microbatch(mean_loss),
        "one batch": whole(mean_loss),
    }
    programs = {name: compiled(step, params, *examples) for name, step in steps.items()}
    one_part = peak(compiled(whole(mean_loss), params, *batch(quick, BATCH // MICRO_BATCHES)))
    sides = {
        name: partial(_harness.finish, program, params, *examples)
        for name, program in programs.items()
    }
    times = _harness.alternate(sides, 3 if quick else 15)
    rows = [
        Row(f"a step, {name} ({other})", times[name], times[other], bar)
        for name, other, bar in (
            ("mean loss", "scan by hand", "shrewjax/scan <= 1.03"),
            ("mean loss", "optax.microbatching", "shrewjax/optax <= 1"),
            ("token weights", "scan by hand", None),
            ("mean loss", "one batch", None),
        )
    ]
    for name in ("mean loss", "token weights", "scan by hand", "optax.microbatching", "one batch"):
        beyond = Figure((peak(programs[name]) - one_part) / trees, "trees of gradients")
        bar = "shrewjax <= 1.1" if name in ("mean loss", "token weights") else None
        rows.append(Row(f"peak memory above that of one micro-batch, {name}", beyond, None, bar))
    return rows


def difference(quick: bool) -> list[Row]:
    """From the one large batch, whose gradients in float64 are the truth for both."""
    params, examples = parameters(quick), batch(quick)
    rows = []
    for name, loss, weight in (
        ("mean loss", mean_loss, None),
        ("token weights", masked_loss, real_tokens),
    ):
        value, grads = jax.jit(ours(loss, weight_fn=weight))(params, *examples)
        large_value, large = jax.jit(whole(loss))(params, *examples)
        with jax.enable_x64(True):
            exact_value, exact = jax.jit(whole(loss))(jax.tree.map(np.float64, params), *examples)
        errors = [Figure(_distance(found, exact)) for found in (grads, large)]
        rows.append(
            Row(f"gradients, {name}, from float64 (one batch)", *errors, "shrewjax <= 1e-6")
        )
        errors = [
            Figure(float(abs(np.float64(found) / float(exact_value) - 1)))
            for found in (value, large_value)
        ]
        rows.append(Row(f"value, {name}, from float64 (one batch)", *errors, "shrewjax <= 1e-6"))
    return rows


def _distance(found: Any, exact: Any) -> float:
    """In norms of the second."""
    off = jax.tree.map(lambda a, b: np.linalg.norm(np.float64(a) - np.asarray(b)), found, exact)
    size = jax.tree.map(lambda b: np.linalg.norm(np.asarray(b)), exact)
    return float(np.linalg.norm(jax.tree.leaves(off)) / np.linalg.norm(jax.tree.leaves(size)))


if __name__ == "__main__":
    _harness.main(__doc__, [time_and_memory, difference])
