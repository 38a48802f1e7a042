"""A causal transformer. It rematerializes its layers, and the output shares the embedding."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class Transformer:
    """Its sizes, and its functions of parameters. By default it has 160 million of them."""

    layers: int = 12
    width: int = 1024
    heads: int = 16
    vocabulary: int = 8192
    tokens: int = 512  # in a sequence
    dtype: Any = jnp.bfloat16  # of activations and products
    is_scanned: bool = True  # otherwise a list of layers
    looked_up: jax.sharding.PartitionSpec | None = (
        None  # the sharding of embedded tokens, needed on an Explicit mesh
    )

    def shapes(self, dtype: Any = np.float32) -> dict[str, Any]:
        """Returns the parameters' shapes."""

        def of(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype)

        d = self.width
        layer = {
            "norm_in": of(d),
            "qkv": of(d, 3 * d),
            "out": of(d, d),
            "norm_up": of(d),
            "up": of(d, 4 * d),
            "down": of(4 * d, d),
        }
        stacked = {name: of(self.layers, *x.shape) for name, x in layer.items()}
        layers: Any = stacked if self.is_scanned else [layer] * self.layers
        return {"embedding": of(self.vocabulary, d), "layers": layers, "norm": of(d)}

    def batch(self, sequences: int) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of a batch of sequences of tokens."""
        return jax.ShapeDtypeStruct((sequences, self.tokens), np.int32)

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Returns the mean cross entropy of each next token."""
        return jnp.mean(self.losses(params, tokens))

    def losses(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Returns the cross entropy of each next token."""
        embedding = params["embedding"].astype(self.dtype)
        h = embedding.at[tokens].get(out_sharding=self.looked_up)
        layer = jax.checkpoint(self._layer)
        if self.is_scanned:
            h, _ = jax.lax.scan(layer, h, params["layers"])
        else:
            for of_layer in params["layers"]:
                h, _ = layer(h, of_layer)
        logits = (self._normed(h, params["norm"]) @ embedding.T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(tokens, -1, 1))

    def _layer(self, h: jax.Array, params: Any) -> tuple[jax.Array, None]:
        w = jax.tree.map(lambda x: x.astype(self.dtype), params)
        qkv = jnp.split(self._normed(h, params["norm_in"]) @ w["qkv"], 3, -1)
        query, key, value = (x.reshape(*h.shape[:2], self.heads, -1) for x in qkv)
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        h = h + mixed.reshape(h.shape) @ w["out"]
        return h + jax.nn.gelu(self._normed(h, params["norm_up"]) @ w["up"]) @ w["down"], None

    def _normed(self, h: jax.Array, gain: jax.Array) -> jax.Array:
        x = h.astype(jnp.float32)
        return (x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain).astype(
            self.dtype
        )
