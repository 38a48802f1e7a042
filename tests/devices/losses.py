"""Losses whose scans look rows up, so that their backward loops add up scatters.

JAX 0.10.1 to 0.11.2 lose such sums on several GPUs (XLA-27), also without micro-batches. The scans go over time,
layers, chunks of a sequence, or rounds of messages. Each scan has parameters that all its trips share.
`tests/programs/lookups.py` has the forms of loops, such as a `checkpoint` or a `fori_loop`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from optax.losses import softmax_cross_entropy_with_integer_labels as cross_entropy
from weights import filled, integers, normal, table

EXAMPLES, TIME, VOCABULARY, WIDTH, LAYERS = 64, 16, 256, 32, 3


class Loss(NamedTuple):
    """The loss of each example from parameters and a batch, and small numbers for both."""

    of_examples: Callable[..., jax.Array]
    params: Any
    batch: tuple[Any, ...]


TOKENS = integers(0, VOCABULARY, EXAMPLES, TIME)
TABLE, OUT = table(1, VOCABULARY, WIDTH), normal(2, WIDTH, VOCABULARY)


def _of_next_tokens(w: Any, states: jax.Array, tokens: jax.Array) -> jax.Array:
    """The mean over time of the losses of the next tokens."""
    return jnp.mean(cross_entropy(states[:, :-1] @ w.get("out", w["table"].T), tokens[:, 1:]), axis=1)


def recurrent(*, tied: bool = False) -> Loss:
    """A recurrent language model looks its tokens up one by one. Its table may also be the output's."""

    def of_examples(w, tokens):
        def cell(state, token):
            state = jnp.tanh(jnp.concatenate([state, w["table"][token]], -1) @ w["cell"])
            return state, state

        _, states = lax.scan(cell, jnp.zeros((len(tokens), WIDTH)), tokens.T)
        return _of_next_tokens(w, states.swapaxes(0, 1), tokens)

    params = {"table": TABLE, "cell": normal(3, 2 * WIDTH, WIDTH)}
    return Loss(of_examples, params if tied else params | {"out": OUT}, (TOKENS,))


def chunks() -> Loss:
    """A sampled softmax goes over chunks of the sequence, and looks the targets' and the negatives' rows up."""

    def of_examples(w, tokens):
        states = jnp.tanh(w["table"][tokens] @ w["dense"])
        parts = jax.tree.map(lambda x: jnp.stack(jnp.split(x, 4, axis=1)), (states, tokens))

        def add(total, chunk):
            states, targets = chunk
            right = jnp.sum(states * w["rows"][targets], -1)
            wrong = jnp.einsum("btd,bnd->btn", states, w["rows"][(targets * 13 + 5) % VOCABULARY])
            return total + jnp.mean(jax.nn.softplus(-right), 1) + jnp.mean(jax.nn.softplus(wrong), (1, 2)), None

        return lax.scan(add, jnp.zeros(len(tokens)), parts)[0]

    return Loss(
        of_examples,
        {"table": TABLE, "dense": normal(3, WIDTH, WIDTH), "rows": table(4, VOCABULARY, WIDTH)},
        (TOKENS,),
    )


def experts() -> Loss:
    """A universal transformer: its layers share experts, whose outputs a `segment_sum` brings back to the tokens."""
    number, chosen, hidden = 8, 2, 16

    def of_examples(w, tokens):
        def layer(x, router):
            flat = x.reshape(-1, WIDTH)
            gates, expert = lax.top_k(jax.nn.softmax(flat @ router), chosen)
            token = jnp.repeat(jnp.arange(len(flat)), chosen)
            up, down = w["up"][expert.reshape(-1)], w["down"][expert.reshape(-1)]
            outputs = jnp.einsum("nf,nfd->nd", jax.nn.gelu(jnp.einsum("nd,ndf->nf", flat[token], up)), down)
            return x + jax.ops.segment_sum(outputs * gates.reshape(-1, 1), token, len(flat)).reshape(x.shape), None

        return _of_next_tokens(w, lax.scan(layer, w["table"][tokens], w["routers"])[0], tokens)

    params = {
        "table": TABLE,
        "routers": normal(2, LAYERS, WIDTH, number),
        "out": OUT,
    }
    params |= {"up": normal(4, number, WIDTH, hidden), "down": normal(5, number, hidden, WIDTH)}
    return Loss(of_examples, params, (TOKENS,))


def graphs() -> Loss:
    """Each round of a graph net looks the types of the edges up, and sums the messages of each node."""
    nodes, edges, types, rounds, classes = 12, 40, 16, 4, 10

    def of_examples(w, atoms, ends, bonds, labels):
        def of_graph(x, ends, bonds):
            def exchange(x, _):
                messages = jax.nn.relu(x[ends[:, 0]] @ w["message"] + w["bonds"][bonds])
                summed = jax.ops.segment_sum(messages, ends[:, 1], nodes)
                return jnp.tanh(x + summed @ w["update"]), None

            return jnp.sum(lax.scan(exchange, x, None, rounds)[0], axis=0)

        return cross_entropy(jax.vmap(of_graph)(w["atoms"][atoms], ends, bonds) @ w["out"], labels)

    params = {"atoms": table(1, types, WIDTH), "bonds": table(2, types, WIDTH), "out": normal(3, WIDTH, classes)}
    params |= {"message": normal(4, WIDTH, WIDTH), "update": normal(5, WIDTH, WIDTH)}
    batch = integers(6, types, EXAMPLES, nodes), integers(7, nodes, EXAMPLES, edges, 2)
    return Loss(of_examples, params, (*batch, integers(8, types, EXAMPLES, edges), integers(9, classes, EXAMPLES)))


class _Cell(nn.Module):
    """A step of a recurrent language model in Linen."""

    @nn.compact
    def __call__(self, state: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
        state, output = nn.GRUCell(WIDTH)(state, nn.Embed(VOCABULARY, WIDTH)(token))
        return state, nn.Dense(VOCABULARY)(output)


def linen() -> Loss:
    """Linen's `nn.scan` over a cell that has its embedding inside."""
    over_time = {"variable_broadcast": "params", "split_rngs": {"params": False}, "in_axes": 1, "out_axes": 1}
    model = nn.scan(_Cell, **over_time)()

    def of_examples(params, tokens):
        _, logits = model.apply(params, jnp.zeros((len(tokens), WIDTH)), tokens)
        return jnp.mean(cross_entropy(logits[:, :-1], tokens[:, 1:]), axis=1)

    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((EXAMPLES, WIDTH)), TOKENS)
    return Loss(of_examples, filled(shapes), (TOKENS,))


LOSSES: dict[str, Callable[[], Loss]] = {
    "recurrent": recurrent,
    "recurrent, tied": partial(recurrent, tied=True),
    "chunks": chunks,
    "experts": experts,
    "graphs": graphs,
    "linen": linen,
}
