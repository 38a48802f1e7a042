"""Models on meshes of eight devices, by the ways in which people divide them, at small sizes.

Each loss is a mean over examples. `loss(mesh)` is the same function on a mesh of one device, which is the oracle.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.losses import softmax_cross_entropy_with_integer_labels as cross_entropy
from weights import filled, integers, normal, table

import shrewjax

EXAMPLES, TIME, VOCABULARY, WIDTH, HIDDEN, LAYERS = 64, 8, 128, 32, 64, 2


class Model(NamedTuple):
    """A loss of parameters and a batch for a mesh of these axes, with small numbers for both and their places."""

    axes: dict[str, int]
    loss: Callable[[Mesh], Callable[[Any, Any], jax.Array]]
    params: Any
    specs: Any
    batch: Any
    batch_spec: P = P("data")


TOKENS = integers(0, VOCABULARY, EXAMPLES, TIME)


def _params(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    makers = {name: table if name.startswith("table") else normal for name in shapes}
    return {name: makers[name](i, *shape) for i, (name, shape) in enumerate(shapes.items())}


def _of_next_tokens(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.mean(cross_entropy(logits[:, :-1], tokens[:, 1:]))


def experts(dispatch: str, axes: dict[str, int]) -> Model:
    """Each token goes to two of eight experts, which lie on the last axis: by products, by scatters, or sorted."""
    number, chosen = 8, 2
    *_, axis = axes

    def loss(mesh: Mesh) -> Callable[[Any, Any], jax.Array]:
        def place(x: jax.Array) -> jax.Array:
            return lax.with_sharding_constraint(x, NamedSharding(mesh, P(axis)))

        def run(w: Any, slots: jax.Array) -> jax.Array:
            hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", place(slots), w["up"]))
            return place(jnp.einsum("ecf,efd->ecd", hidden, w["down"]))

        def of_batch(w: Any, tokens: jax.Array) -> jax.Array:
            x = w["table"][tokens]
            flat = x.reshape(-1, WIDTH)
            logits = flat @ w["router"]
            gates, expert = lax.top_k(jax.nn.softmax(logits), chosen)
            expert = expert.reshape(-1)
            is_for = jax.nn.one_hot(expert, number, dtype=jnp.int32)
            slot = jnp.sum((jnp.cumsum(is_for, 0) - 1) * is_for, axis=1)
            copies = jnp.repeat(flat, chosen, axis=0)
            if dispatch == "products":
                sent = jax.nn.one_hot(expert, number)[:, :, None] * jax.nn.one_hot(slot, len(flat))[:, None]
                y = jnp.einsum("nec,ecd->nd", sent, run(w, jnp.einsum("nec,nd->ecd", sent, copies)))
            elif dispatch == "scatters":
                slots = jnp.zeros((number, len(flat), WIDTH)).at[expert, slot].add(copies)
                y = run(w, slots)[expert, slot]
            else:
                order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=number)
                hidden = jax.nn.gelu(lax.ragged_dot(copies[order], w["up"], sizes))
                y = jnp.zeros_like(copies).at[order].set(lax.ragged_dot(hidden, w["down"], sizes))
            y = jnp.sum(y.reshape(-1, chosen, WIDTH) * gates[..., None], axis=1)
            small_logits = jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
            return _of_next_tokens((flat + y).reshape(x.shape) @ w["out"], tokens) + 1e-2 * small_logits

        return of_batch

    params = _params(
        table=(VOCABULARY, WIDTH),
        router=(WIDTH, number),
        up=(number, WIDTH, HIDDEN),
        down=(number, HIDDEN, WIDTH),
        out=(WIDTH, VOCABULARY),
    )
    specs = {name: P(axis) if name in ("up", "down") else P() for name in params}
    return Model(axes, loss, params, specs, TOKENS, P(tuple(axes)))


class _Block(nn.Module):
    """A layer of a transformer in Linen; `constrain` places the activations."""

    constrain: Callable[[jax.Array], jax.Array]

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, None]:
        x = self.constrain(x + nn.MultiHeadDotProductAttention(4, use_bias=False)(nn.LayerNorm()(x), mask=mask))
        hidden = nn.gelu(nn.Dense(HIDDEN, use_bias=False, name="up")(nn.LayerNorm()(x)))
        return self.constrain(x + nn.Dense(WIDTH, use_bias=False, name="down")(hidden)), None


class _Transformer(nn.Module):
    """A language model of scanned and rematerialized layers; the table is the output's, too."""

    constrain: Callable[[jax.Array], jax.Array]

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCABULARY, WIDTH, name="table")
        over_layers = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": LAYERS}
        layers = nn.scan(nn.remat(_Block), in_axes=nn.broadcast, **over_layers)(self.constrain, name="layers")
        x, _ = layers(self.constrain(embed(tokens)), nn.make_causal_mask(tokens))
        return embed.attend(nn.LayerNorm()(x))


def transformer(axes: dict[str, int], *, sharded: bool = False) -> Model:
    """A transformer: replicated, or sharded over `data`; over `model`, if there is one, heads and hidden units are."""
    tensor = "model" if "model" in axes else None
    data = "data" if sharded else None

    def place(path: Any, x: Any) -> P:
        *_, module, leaf = (key.key for key in path)
        if leaf == "embedding":
            return P(tensor, data)
        if leaf != "kernel":
            return P()
        by_column = module != "down" and "out" not in module
        of_layer = (data, tensor) if by_column else (tensor, data)
        return P(None, *of_layer, *[None] * (x.ndim - 3)) if module != "out" else P(None, tensor, None, data)

    def model(mesh: Mesh) -> _Transformer:
        spec = P("data", tensor)
        return _Transformer(lambda x: lax.with_sharding_constraint(x, NamedSharding(mesh, spec)))

    def loss(mesh: Mesh) -> Callable[[Any, Any], jax.Array]:
        return lambda params, tokens: _of_next_tokens(model(mesh).apply(params, tokens), tokens)

    one = Mesh(np.array(jax.devices("cpu")[:1]).reshape([1] * len(axes)), tuple(axes))
    shapes = jax.eval_shape(model(one).init, jax.random.key(0), TOKENS)
    params = filled(shapes)
    params["params"]["table"]["embedding"] *= WIDTH**-0.5  # it is the output's, too
    return Model(axes, loss, params, jax.tree_util.tree_map_with_path(place, shapes), TOKENS)


def ring(of_examples: Callable[..., Any] = lambda fun: fun) -> Model:
    """Attention over a sequence that is divided over devices in `shard_map`; keys and values go round.

    `of_examples` goes around the `shard_map`.
    """
    examples, time = 8, 32

    def loss(mesh: Mesh) -> Callable[[Any, Any], jax.Array]:
        devices, whole = mesh.size, P(None, "data")

        @of_examples
        @partial(jax.shard_map, mesh=mesh, in_specs=(whole,) * 3, out_specs=whole)
        def attend(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
            device, own = lax.axis_index("data"), queries.shape[1]
            times = device * own + jnp.arange(own)

            def step(carry: Any, i: jax.Array) -> Any:
                keys, values, largest, total, result = carry
                scores = jnp.einsum("btd,bsd->bts", queries, keys) / WIDTH**0.5
                of_keys = (device - i) % devices * own + jnp.arange(own)
                scores = jnp.where(times[:, None] >= of_keys, scores, -1e9)
                new = jnp.maximum(largest, scores.max(-1))
                weights, kept = jnp.exp(scores - new[..., None]), jnp.exp(largest - new)
                total = total * kept + weights.sum(-1)
                result = result * kept[..., None] + jnp.einsum("bts,bsd->btd", weights, values)
                keys, values = lax.ppermute((keys, values), "data", [(j, (j + 1) % devices) for j in range(devices)])
                return (keys, values, new, total, result), None

            zeros = jnp.zeros_like(queries[..., 0])
            carry, _ = lax.scan(step, (keys, values, zeros - 1e9, zeros, queries * 0), jnp.arange(devices))
            return carry[4] / carry[3][..., None]

        def of_batch(w: Any, tokens: jax.Array) -> jax.Array:
            x = w["table"][tokens] + w["table of positions"]
            return _of_next_tokens((x + attend(*jnp.split(x @ w["qkv"], 3, -1))) @ w["out"], tokens)

        return of_batch

    shapes = {"table": (VOCABULARY, WIDTH), "table of positions": (time, WIDTH)}
    params = _params(**shapes, qkv=(WIDTH, 3 * WIDTH), out=(WIDTH, VOCABULARY))
    tokens = integers(0, VOCABULARY, examples, time)
    return Model({"data": 8}, loss, params, jax.tree.map(lambda _: P(), params), tokens, P(None, "data"))


def lookups(spec: P) -> Model:
    """A tied table, `take_along_axis`, messages of graphs, the largest of segments, the largest after a sort."""
    nodes, edges, segments = TIME, 20, 16

    def loss(mesh: Mesh) -> Callable[[Any, Any], jax.Array]:
        def of_graph(w: Any, x: jax.Array, ends: jax.Array) -> jax.Array:
            return jax.ops.segment_sum(x[ends[:, 0]] @ w["dense"], ends[:, 1], nodes)

        def of_example(w: Any, tokens: jax.Array, ends: jax.Array) -> jax.Array:
            x = w["table"][tokens] + jnp.take_along_axis(w["table along"], tokens[:, None], axis=0)
            x = jnp.tanh(x + of_graph(w, x, ends))
            largest = jax.ops.segment_max(x[:, 0], tokens % segments, segments)
            largest = jnp.sum(jnp.where(jnp.isfinite(largest), largest, 0) ** 2) + jnp.sum(jnp.sort(x[:, 1])[-3:])
            return jnp.mean(cross_entropy(x[:-1] @ w["table"].T, tokens[1:])) + 1e-2 * largest

        return lambda w, batch: jnp.mean(jax.vmap(partial(of_example, w))(*batch))

    params = _params(**{"table": (VOCABULARY, WIDTH), "table along": (VOCABULARY, WIDTH), "dense": (WIDTH, WIDTH)})
    batch = TOKENS, integers(2, nodes, EXAMPLES, edges, 2)
    return Model({"data": 8}, loss, params, jax.tree.map(lambda _: spec, params), batch)


# Why a loss of the whole batch is not divided, if it is not: the place of a token depends on those of other examples.
REFUSED = {
    **dict.fromkeys(
        ("experts by products", "experts by scatters", "experts by scatters, two axes"),
        r"examples mix at models\.py:\d+: slot = jnp\.sum\(\(jnp\.cumsum",
    ),
    "experts by sorting": r"examples mix at models\.py:\d+: order, sizes = jnp\.argsort\(expert\)",
    "ring": r"shard_map may mix examples at models\.py:\d+: .* wrap the function that calls it in of_each_example",
}
ONE, TWO = {"data": 8}, {"data": 2, "model": 4}
MODELS: dict[str, Callable[[], Model]] = {
    **{f"experts by {how}": partial(experts, how, ONE) for how in ("products", "scatters", "sorting")},
    "experts by scatters, two axes": partial(experts, "scatters", TWO),
    "transformer": partial(transformer, ONE),
    "transformer, FSDP": partial(transformer, ONE, sharded=True),
    "transformer, tensor parallel": partial(transformer, TWO),
    "transformer, FSDP and tensor parallel": partial(transformer, TWO, sharded=True),
    "ring": ring,
    "ring, of each example": partial(ring, shrewjax.of_each_example),
    "lookups": partial(lookups, P()),
    "lookups, rows": partial(lookups, P("data")),
    "lookups, columns": partial(lookups, P(None, "data")),
}
