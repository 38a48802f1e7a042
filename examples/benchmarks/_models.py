"""Flax models for whole steps: a transformer with scanned layers or a list, a convolutional net, LoRA, and a lookup."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


class Model(NamedTuple):
    """A mean loss over examples, and the shapes of what it takes.

    `loss(params, statistics, frozen, batch)` returns the loss and new statistics.
    """

    loss: Callable[..., tuple[jax.Array, Any]]
    init: Callable[[], tuple[Any, Any, Any]]  # parameters, statistics, frozen
    batch: Callable[
        [int], Any
    ]  # the shapes of that many examples, whose integers are less than `classes`
    classes: int


class Sizes(NamedTuple):
    """Sizes of the transformers, from which those of the other models follow."""

    layers: int
    width: int
    vocabulary: int
    tokens: int
    dtype: Any = jnp.bfloat16  # of activations and products


class Block(nn.Module):
    """A layer of the transformer. Its parameters are float32, or of `param_dtype`."""

    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:
        """Returns new activations of the same shape."""
        of = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        width = x.shape[-1]
        mask = nn.make_causal_mask(x[..., 0])
        attend = nn.MultiHeadDotProductAttention(max(width // 64, 1), use_bias=False, **of)
        x = x + attend(nn.LayerNorm(use_bias=False, **of)(x), mask=mask)
        up = nn.gelu(
            nn.Dense(4 * width, use_bias=False, **of)(nn.LayerNorm(use_bias=False, **of)(x))
        )
        return x + nn.Dense(width, use_bias=False, **of)(up), None


class Transformer(nn.Module):
    """A causal transformer, whose layers are rematerialized, and scanned or in a list."""

    sizes: Sizes
    is_scanned: bool
    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits of each next token."""
        of = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        layers, width, vocabulary, *_ = self.sizes
        embed = nn.Embed(vocabulary, width, embedding_init=nn.initializers.normal(0.02), **of)
        x, block = embed(tokens), nn.remat(Block, prevent_cse=not self.is_scanned)
        if self.is_scanned:
            scanned = nn.scan(
                block, variable_axes={"params": 0}, split_rngs={"params": True}, length=layers
            )
            x, _ = scanned(**of)(x)
        else:
            for _ in range(layers):
                x, _ = block(**of)(x)
        return embed.attend(nn.LayerNorm(use_bias=False, **of)(x)).astype(jnp.float32)


def transformer(sizes: Sizes, dtype: Any, *, is_scanned: bool) -> Model:
    """A language model, with parameters in `dtype`."""
    module = Transformer(sizes, is_scanned, sizes.dtype, dtype)

    def batch(examples: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((examples, sizes.tokens), np.int32)

    def loss(params: Any, statistics: Any, frozen: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        del frozen
        labels = jnp.roll(tokens, -1, 1)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            module.apply(params, tokens), labels
        )
        return jnp.mean(losses), statistics

    def init() -> tuple[Any, Any, Any]:
        return module.init(jax.random.key(0), jnp.zeros((1, sizes.tokens), np.int32)), {}, {}

    return Model(loss, init, batch, sizes.vocabulary)


class Convolutions(nn.Module):
    """Eight convolutions, each with batch norm, of images of 32 x 32."""

    width: int
    dtype: Any
    param_dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits of ten classes."""
        of = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        for i in range(8):
            x = nn.Conv(
                self.width * 2 ** (i // 2),
                (3, 3),
                strides=1 + (i > 0 and i % 2 == 0),
                use_bias=False,
                **of,
            )(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, **of)(x))
        return nn.Dense(10, **of)(jnp.mean(x, (1, 2))).astype(jnp.float32)


def convolutions(sizes: Sizes, dtype: Any) -> Model:
    """A convolutional net, whose statistics each micro-batch passes on to the next."""
    module = Convolutions(sizes.width // 8, sizes.dtype, dtype)

    def batch(examples: int) -> Any:
        image = jax.ShapeDtypeStruct((examples, 32, 32, 3), np.float32)
        return image, jax.ShapeDtypeStruct((examples,), np.int32)

    def loss(params: Any, statistics: Any, frozen: Any, batch: Any) -> tuple[jax.Array, Any]:
        del frozen
        images, labels = batch
        variables = {"params": params, "batch_stats": statistics}
        logits, updated = module.apply(variables, images, mutable=["batch_stats"])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels)), updated[
            "batch_stats"
        ]

    def init() -> tuple[Any, Any, Any]:
        made = module.init(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
        return made["params"], made["batch_stats"], {}

    return Model(loss, init, batch, 10)


class Adapted(nnx.Module):
    """Layers of two matrices, each with an adapter of rank 8; only the adapters are trained."""

    def __init__(self, sizes: Sizes, dtype: Any, rngs: nnx.Rngs) -> None:
        layers, width, vocabulary, *_ = sizes
        linear = partial(nnx.LoRALinear, lora_rank=8, use_bias=False, dtype=sizes.dtype, rngs=rngs)
        linear = partial(linear, param_dtype=dtype, lora_param_type=nnx.LoRAParam)
        self.embed = nnx.Embed(vocabulary, width, dtype=sizes.dtype, param_dtype=dtype, rngs=rngs)
        self.up = nnx.List([linear(width, 4 * width) for _ in range(layers)])
        self.down = nnx.List([linear(4 * width, width) for _ in range(layers)])
        self.norm = nnx.RMSNorm(width, dtype=sizes.dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits of each next token, from those before it."""
        x = self.embed(tokens)
        for up, down in zip(self.up, self.down, strict=True):
            mixed = jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
            x = x + down(nnx.gelu(up(self.norm(mixed))))
        return self.embed.attend(x).astype(jnp.float32)


def lora(sizes: Sizes, dtype: Any) -> Model:
    """A fine-tune of adapters, of a model that is frozen."""
    graph, *_ = nnx.split(
        nnx.eval_shape(lambda: Adapted(sizes, dtype, nnx.Rngs(0))), nnx.LoRAParam, ...
    )

    def batch(examples: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((examples, sizes.tokens), np.int32)

    def loss(params: Any, statistics: Any, frozen: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        logits = nnx.merge(graph, params, frozen)(tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1, 1))
        return jnp.mean(losses), statistics

    def init() -> tuple[Any, Any, Any]:
        _, params, frozen = nnx.split(Adapted(sizes, dtype, nnx.Rngs(0)), nnx.LoRAParam, ...)
        return nnx.pure(params), {}, nnx.pure(frozen)

    return Model(loss, init, batch, sizes.vocabulary)


def lookup(sizes: Sizes, dtype: Any) -> Model:
    """A large table that is looked up, and a small layer: recommendation."""
    rows, width = 16 * sizes.vocabulary, sizes.width

    def batch(examples: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((examples, sizes.tokens), np.int32)

    def loss(params: Any, statistics: Any, frozen: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        del frozen
        x = jnp.mean(params["table"][tokens * 16], axis=1)
        return jnp.mean(jnp.square(jnp.tanh(x @ params["out"]) - 1)), statistics

    def init() -> tuple[Any, Any, Any]:
        keys = jax.random.split(jax.random.key(0))
        table = jax.random.normal(keys[0], (rows, width), dtype)
        return {"table": table, "out": jax.random.normal(keys[1], (width, 1), dtype)}, {}, {}

    return Model(loss, init, batch, sizes.vocabulary)


MODELS: dict[str, Callable[[Sizes, Any], Model]] = {
    "transformer, scanned layers": partial(transformer, is_scanned=True),
    "transformer, layers in a list": partial(transformer, is_scanned=False),
    "convolutions with batch norm": convolutions,
    "LoRA of a frozen model": lora,
    "a table of rows": lookup,
}
