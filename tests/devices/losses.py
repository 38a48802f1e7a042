"""Losses whose scans look rows up, so that their backward loops add up scatters.

JAX 0.10.1 to 0.11.2 lose such sums on several GPUs (XLA-27), also without micro-batches. The scans go over time,
layers, chunks of a sequence, or rounds of messages. Each scan has parameters that all its trips share.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
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


def _attend(x: jax.Array, weights: jax.Array, bias: jax.Array | float = 0.0) -> jax.Array:
    scores = jnp.einsum("btd,bsd->bts", x @ weights, x) / WIDTH**0.5 + bias
    earlier = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(jnp.where(earlier, scores, -1e9)), x)


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


def called() -> Loss:
    """A jitted function looks tokens up in a scan and runs scanned layers of its own. The loss calls it three times."""

    def of_examples(w, tokens):
        @jax.jit
        def run(state, layers):
            turn = lambda state, token: (jnp.tanh((state + w["table"][token]) @ w["cell"]), None)  # noqa: E731
            state, _ = lax.scan(turn, state, tokens.T)
            return lax.scan(lambda state, layer: (jnp.tanh(state @ layer), None), state, layers)[0]

        state = jnp.zeros((len(tokens), WIDTH))
        for layers in w["layers"]:
            state = run(state, layers)
        return cross_entropy(state @ w["out"], tokens[:, 0])

    layers = [jnp.stack([normal(10 * i + j, WIDTH, WIDTH) for j in range(LAYERS)]) for i in range(1, 4)]
    return Loss(of_examples, {"table": TABLE, "cell": normal(3, WIDTH, WIDTH), "layers": layers, "out": OUT}, (TOKENS,))


def shared_bias(*, remat: bool = False) -> Loss:
    """The layers of a transformer share a table of biases, which pairs of tokens look up. It may be rematerialized."""

    def of_examples(w, tokens):
        pairs = (tokens[:, :, None] * 7 + tokens[:, None, :]) % 32

        def layer(x, weights):
            return x + _attend(x, weights, w["bias"][pairs]), None

        # As libraries have it: a scan of a rematerialized and jitted layer.
        body = jax.checkpoint(jax.jit(layer)) if remat else layer
        x, _ = lax.scan(body, w["table"][tokens], w["layers"])
        return _of_next_tokens(w, x, tokens)

    params = {
        "table": TABLE,
        "bias": normal(3, 32, scale=1.0),
        "layers": normal(4, LAYERS, WIDTH, WIDTH),
    }
    return Loss(of_examples, params | {"out": OUT}, (TOKENS,))


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


def packed() -> Loss:
    """A `fori_loop` over layers adds embeddings of positions in each. Packed documents have their own positions."""

    def of_examples(w, tokens, positions):
        def layer(i, x):
            x = x + w["positions"][positions]
            return x + _attend(x, lax.dynamic_index_in_dim(w["layers"], i, keepdims=False))

        return _of_next_tokens(w, lax.fori_loop(0, LAYERS, layer, w["table"][tokens]), tokens)

    starts = integers(5, TIME, EXAMPLES, 1)
    positions = np.where(np.arange(TIME) < starts, np.arange(TIME), np.arange(TIME) - starts)
    params = {
        "table": TABLE,
        "positions": normal(2, TIME, WIDTH, scale=0.3),
        "layers": normal(4, LAYERS, WIDTH, WIDTH),
    }
    return Loss(of_examples, params | {"out": OUT}, (TOKENS, np.int32(positions)))


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


def nested() -> Loss:
    """A scan over chunks of a scan over the time steps in them. Chunks are rematerialized, which bounds the memory."""

    def of_examples(w, tokens):
        def cell(state, token):
            state = jnp.tanh(state @ w["cell"] + w["table"][token])
            return state, state

        def chunk(state, tokens):
            return lax.scan(cell, state, tokens)

        parts = tokens.T.reshape(4, TIME // 4, -1)
        _, states = lax.scan(jax.checkpoint(chunk), jnp.zeros((len(tokens), WIDTH)), parts)
        return _of_next_tokens(w, states.reshape(TIME, -1, WIDTH).swapaxes(0, 1), tokens)

    params = {
        "table": TABLE,
        "cell": normal(3, WIDTH, WIDTH),
        "out": OUT,
    }
    return Loss(of_examples, params, (TOKENS,))


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


class _Layer(nnx.Module):
    """A layer of a transformer in NNX, with a bias of its attention that all layers share."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.query = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, bias: nnx.Embed, pairs: jax.Array) -> jax.Array:
        return x + _attend(x, self.query.kernel[...], bias(pairs)[..., 0])


class _Transformer(nnx.Module):
    """Layers that `nnx.scan` goes over."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.bias = nnx.Embed(32, 1, rngs=rngs)
        self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(_Layer))(rngs)
        self.out = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        pairs = (tokens[:, :, None] * 7 + tokens[:, None, :]) % 32

        @nnx.scan(in_axes=(nnx.Carry, 0, None, None), out_axes=nnx.Carry)
        def run(x, layer, bias, pairs):
            return layer(x, bias, pairs)

        return self.out(run(self.table(tokens), self.layers, self.bias, pairs))


def of_nnx() -> Loss:
    """NNX's `nnx.scan` over layers that share an embedding."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: _Transformer(nnx.Rngs(0))))

    def of_examples(params, tokens):
        logits = nnx.merge(graph, params)(tokens)
        return jnp.mean(cross_entropy(logits[:, :-1], tokens[:, 1:]), axis=1)

    return Loss(of_examples, filled(nnx.to_pure_dict(shapes)), (TOKENS,))


LOSSES: dict[str, Callable[[], Loss]] = {
    "recurrent": recurrent,
    "recurrent, tied": partial(recurrent, tied=True),
    "shared bias": shared_bias,
    "shared bias, remat": partial(shared_bias, remat=True),
    "chunks": chunks,
    "packed positions": packed,
    "experts": experts,
    "graphs": graphs,
    "nested": nested,
    "linen": linen,
    "nnx": of_nnx,
    "called": called,
}
