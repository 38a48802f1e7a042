"""JAX functions for what CUDA programs call libraries for: products, convolutions, the largest elements."""

import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from _hlo import Array, Instruction
from jax import lax

Function = Callable[..., Any]

_DTYPES = {"pred": np.dtype(bool), "bf16": np.dtype(ml_dtypes.bfloat16)}
_DTYPES |= {f"f{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)}
_DTYPES |= {f"s{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)}
_DTYPES |= {f"u{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)}


def abstract(x: Array) -> jax.ShapeDtypeStruct:
    """Returns the array's shape and dtype in JAX's words."""
    return jax.ShapeDtypeStruct(x.dims, _DTYPES[x.dtype])


def function_for(call: Instruction) -> Function | None:
    """Returns a function of the call's operands that returns its results, or None if none is known here."""
    make = _FUNCTIONS.get(call.attributes["custom_call_target"].strip('"'))
    known = all(x.dtype in _DTYPES for y in (call, *call.operands) for x in y.arrays)
    return make(call) if make and known else None


def _identity(call: Instruction) -> Function:
    return lambda x: x


def _unwritten(call: Instruction) -> Function:
    """Memory before anything is written there: NaN, so that it is seen where a program reads it."""
    (result,) = map(abstract, call.arrays)
    number = jnp.nan if jnp.issubdtype(result.dtype, jnp.inexact) else 1
    return lambda: jnp.full(result.shape, number, result.dtype)


def _largest(call: Instruction) -> Function:
    return partial(lax.top_k, k=call.arrays[0].dims[-1])


def _product(call: Instruction) -> Function | None:
    """alpha * lhs @ rhs + beta * addend + bias, and an activation."""
    config = json.loads(call.attributes["backend_config"])["gemm_backend_config"]
    epilogue = set(config["epilogue"].split("_")) - {"DEFAULT"}
    if config.get("alpha_imag") or epilogue - {"BIAS", *_ACTIVATIONS}:
        return None
    named = config["dot_dimension_numbers"]
    contracted, batched = (
        tuple(tuple(map(int, named.get(f"{side}_{kind}_dimensions", ()))) for side in ("lhs", "rhs"))
        for kind in ("contracting", "batch")
    )

    def run(lhs: jax.Array, rhs: jax.Array, *others: jax.Array) -> jax.Array:
        rest = list(others)
        result = config["alpha_real"] * lax.dot_general(lhs, rhs, (contracted, batched))
        if config["beta"]:
            result += config["beta"] * rest.pop(0)
        if "BIAS" in epilogue:
            result += jnp.broadcast_to(rest.pop(0), result.shape)
        assert not rest
        for name in epilogue & {*_ACTIVATIONS}:
            result = _ACTIVATIONS[name](result)
        return result

    return _in_float32(call, run)


def _convolution(call: Instruction) -> Function | None:
    """A convolution, or its gradient by its input or its filter, which cuDNN describes by the same numbers."""
    config = json.loads(call.attributes["backend_config"])["cudnn_conv_backend_config"]
    activation = _ACTIVATIONS.get(config["activation_mode"].removeprefix("k").upper())
    if activation is None:
        return None
    window = dict(re.findall(r"(\w+)=([\w\-]+)", call.attributes["window"]))
    axes = len(window["size"].split("x"))

    def each(name: str, otherwise: int) -> list[int]:
        """A number of the window for each axis."""
        return [int(n) for n in window[name].split("x")] if name in window else [otherwise] * axes

    labels = re.split("_|->", call.attributes["dim_labels"])
    turned = [labels[1].index(str(axis)) for axis, is_turned in enumerate(each("rhs_reversal", 0)) if is_turned]
    numbers = {
        "window_strides": each("stride", 1),
        "padding": [
            tuple(map(int, pair.split("_"))) for pair in window.get("pad", "x".join(["0_0"] * axes)).split("x")
        ],
        "lhs_dilation": each("lhs_dilate", 1),
        "rhs_dilation": each("rhs_dilate", 1),
        "dimension_numbers": tuple(label.translate(str.maketrans("bfoi", "NCOI")) for label in labels),
        "feature_group_count": int(call.attributes.get("feature_group_count", 1)),
        "batch_group_count": int(call.attributes.get("batch_group_count", 1)),
    }

    def convolve(x: jax.Array, filters: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, lax.rev(filters, turned), **numbers)

    result = jax.ShapeDtypeStruct(call.arrays[0].dims, np.float32)

    def forward(x: jax.Array, filters: jax.Array, *others: jax.Array) -> jax.Array:
        total = config["conv_result_scale"] * convolve(x, filters)
        if others:
            bias, *addends = others
            channels = labels[2].index("f")
            total += lax.broadcast_in_dim(bias, total.shape, [channels])
            for addend in addends:
                total += config["side_input_scale"] * addend
        return activation(total)

    def by_input(cotangent: jax.Array, filters: jax.Array) -> jax.Array:
        (gradient,) = jax.linear_transpose(lambda x: convolve(x, filters), result)(cotangent)
        return config["conv_result_scale"] * gradient

    def by_filters(x: jax.Array, cotangent: jax.Array) -> jax.Array:
        (gradient,) = jax.linear_transpose(lambda filters: convolve(x, filters), result)(cotangent)
        return config["conv_result_scale"] * gradient

    name = call.attributes["custom_call_target"]
    run = by_input if "BackwardInput" in name else by_filters if "BackwardFilter" in name else forward
    return _in_float32(call, run)


def _in_float32(call: Instruction, function: Function) -> Function | None:
    """The function on float32; a library rounds to narrower floats once, and hands its workspace back, too."""
    result, *workspace = map(abstract, call.arrays)
    if result.dtype not in (np.float32, np.float16, ml_dtypes.bfloat16):
        return None

    def run(*operands: jax.Array) -> Any:
        value = function(*(x.astype(np.float32) for x in operands)).astype(result.dtype)
        others = (jnp.zeros(x.shape, x.dtype) for x in workspace)
        return (value, *others) if call.shape.startswith("(") else value

    return run


_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "NONE": lambda x: x,
    "RELU": jax.nn.relu,
    "GELU": jax.nn.gelu,
}
_FUNCTIONS: dict[str, Callable[[Instruction], Function | None]] = {
    "AllocateBuffer": _unwritten,
    "AssumeGatherIndicesInBound": _identity,
    "__cublas$gemm": _product,
    "__cublas$lt$matmul": _product,
    "__cudnn$convBackwardFilter": _convolution,
    "__cudnn$convBackwardInput": _convolution,
    "__cudnn$convBiasActivationForward": _convolution,
    "__cudnn$convForward": _convolution,
    "__gpu$TopK": _largest,
}
