"""Losses of all examples' features: their gradient micro-batch by micro-batch, in two passes over the batch.

1. The first pass computes the features of each micro-batch, and keeps nothing for a backward pass.
2. The loss of all features gives the value, the gradient of parameters that it reads itself, and a coefficient for each
   feature, which is the gradient by that feature.
3. The second pass adds up the gradients of features times their coefficients.

Both passes are `value_and_grad`, so that a micro-batch has the same examples and keys in both.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from shrewjax._base import arguments
from shrewjax._base.axes import axes_to_reduce, is_mapped
from shrewjax._base.mesh import devices_to_map
from shrewjax._base.types import AxisName, AxisNames, DType, Function, PyTree
from shrewjax._batches.roles import number_of_examples, roles_of
from shrewjax._batches.value_and_grad import Options, of_loss, of_options
from shrewjax._numerics.reductions import combined_over


def two_pass_value_and_grad(
    features: Function,
    loss: Function,
    micro_batches: int,
    *,
    has_aux: bool = False,
    batch_argnums: int | str | Sequence[int | str] | None = None,
    rng_argnums: int | str | Sequence[int | str] = (),
    accumulator_dtype: DType = None,
    sum_over: AxisName | None = None,
) -> Callable[..., tuple[PyTree, PyTree]]:
    r"""Returns `jax.value_and_grad` of `loss(params, features(params, batch))`, for any loss of all examples' features.

    .. math:: z_j = f(\theta, x_j), \qquad g = \frac{\partial \ell(\theta, z)}{\partial \theta}
        + \sum_j \frac{\partial \ell}{\partial z_j} \, \frac{\partial f(\theta, x_j)}{\partial \theta}

    It is exact for every such loss: contrastive ones with in-batch negatives (CLIP, SimCLR), statistics of the whole
    batch (the root of a mean, class means, an F-score, Barlow Twins), pairs and groups of examples, ranks, and the
    balance of experts. `value_and_grad` would compare the examples of one micro-batch alone.

    A step computes the features twice. It takes the memory of one micro-batch, of the sum of the gradients, of all
    features, and of the loss. Call the returned function under `jax.jit`, because outside of it each call compiles the
    loops again.

    The B examples are divided among K micro-batches as by `value_and_grad`.

    ==============================================  ============================================================
    condition                                       result
    ==============================================  ============================================================
    the loss reads parameters, as a temperature     both terms of the formula count
    integers and booleans among the features        the loss gets them: labels, a mask
    dropout, with its key in `rng_argnums`          a micro-batch has the same masks in both passes
    batch norm in `features`                        it sees one micro-batch
    features of a low precision                     coefficients have the features' dtypes, as in a backward pass
    ==============================================  ============================================================

    Args:
      features: a function of the parameters and a micro-batch's examples. It returns a tree of arrays of shape
        (B / K, ...), which have a row for each example.
      loss: a function of the parameters and the features of the whole batch, of shape (B, ...), in the order of the
        batch. It returns a scalar.
      micro_batches: K, as in `value_and_grad`.
      has_aux: whether `loss` returns a pair.
      batch_argnums: the arguments of `features` that hold examples, as in `value_and_grad`. Argument 0 is the
        parameters.
      rng_argnums: the arguments of `features` that are PRNG keys, as in `value_and_grad`.
      accumulator_dtype: as in `value_and_grad`.
      sum_over: as in `value_and_grad`. Inside `shard_map`, `loss` then gets the features of the device's own examples.
        Let it gather those of other devices by `jax.lax.all_gather`, and return the mean over its own. With a mask,
        devices may have other numbers of examples: return `devices * jnp.sum(own) / jax.lax.psum(jnp.sum(mask), axis)`.
        The value is the mean over devices, or the loss itself if types show that it is reduced already. The aux is a
        device's own.

    Returns:
      A function of the arguments of `features`: `(value, grads)`, or `((value, aux), grads)` with `has_aux`.

    Raises:
      ValueError: as in `value_and_grad`, or the features are not as described.

    Example:
      >>> import optax
      >>> def features(params, images, texts):
      ...     return {"image": images @ params["image"], "text": texts @ params["text"]}
      >>> def clip_loss(params, z):
      ...     table = jnp.exp(params["temperature"]) * z["image"] @ z["text"].T
      ...     pairs = jnp.arange(len(table))
      ...     ways = [optax.losses.softmax_cross_entropy_with_integer_labels(t, pairs) for t in (table, table.T)]
      ...     return sum(map(jnp.mean, ways)) / 2
      >>> params = {"image": jnp.eye(2), "text": jnp.eye(2), "temperature": jnp.zeros(())}
      >>> images = texts = jnp.eye(2)[jnp.arange(8) % 2]
      >>> value, grads = jax.jit(two_pass_value_and_grad(features, clip_loss, 4))(params, images, texts)
      >>> print(f"{value:.3f}, by the temperature {grads['temperature']:.3f}")
      1.700, by the temperature -0.269

    Source: Gao, Zhang, Han and Callan, "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup"
    (GradCache), 2021, https://arxiv.org/abs/2101.06983.
    """
    first_pass = Options(
        micro_batches, has_aux=True, aux_reduction="examples", sum_over=sum_over
    ).checked()
    # Inside `per_device`, rows of the sum of the second pass are those of a mean
    # (tests/batches/test_per_device.py, "in_two_passes_is_a_mean").
    second_pass = Options(
        micro_batches,
        reduction="sum",
        accumulator_dtype=accumulator_dtype,
        sum_over=sum_over,
        is_part_of_mean=True,
    ).checked()
    steps, axes = micro_batches, first_pass.axes
    roles = roles_of(features, {"argnums": (0,)}, rng_argnums, batch_argnums)

    def beside_features(*args: PyTree, **kwargs: PyTree) -> tuple[jax.Array, PyTree]:
        *args_of_features, unused = args
        return unused, features(*args_of_features, **kwargs)

    def weighted_sum(*args: PyTree, **kwargs: PyTree) -> jax.Array:
        *args_of_features, coefficients = args
        leaves = jax.tree.leaves(features(*args_of_features, **kwargs))
        sums = [jnp.sum(leaves[at] * c) for at, c in coefficients.items()]
        return sum((x.real.astype(jnp.float32) for x in sums), jnp.float32(0))

    def value_and_grad_of_batch(*args: PyTree, **kwargs: PyTree) -> tuple[PyTree, PyTree]:
        arguments.require_arguments_of_fun("features", features, args, kwargs, "the call")
        # Checked here, because both passes have one more argument, which no caller passed.
        call = roles.call(args, kwargs, steps)
        count = number_of_examples(call) or 0
        _require_divisible(count, steps * max(devices_to_map("sum_over", axes), 1))
        keys, examples = call.keys_and_examples().values()
        # 1. The gradient is by an argument that nothing reads, so that there is no backward pass.
        first = of_options(
            beside_features,
            first_pass,
            argnums=len(args),
            rng_argnums=keys,
            batch_argnums=examples,
        )
        (_, z), _ = first(*args, 0.0, **kwargs)
        # 2.
        own_axes = axes if is_mapped(axes) else ()
        its_loss = of_loss(loss, "loss", has_aux, "Return jnp.mean or jnp.sum of it")
        part = partial(_loss_of_device, its_loss, has_aux, own_axes)
        both = jax.value_and_grad(part, (0, 1), has_aux=True, allow_int=True)
        (value, aux), (direct, by_feature) = both(args[0], z)
        value, direct = _summed_over(own_axes, (value, direct))
        # 3.
        second = of_options(
            weighted_sum, second_pass, rng_argnums=keys, batch_argnums=(*examples, len(args))
        )
        _, through_features = second(*args, _coefficients(by_feature), **kwargs)
        grads = jax.tree.map(jnp.add, direct, through_features)
        return ((value, aux) if has_aux else value), grads

    return value_and_grad_of_batch


def _require_divisible(count: int, parts: int) -> None:
    """Raises if the parts, of all micro-batches and devices, do not divide the examples."""
    if count % parts:
        raise ValueError(
            f"the batch has {count} examples, which {parts} micro-batches on all devices do not divide. Pad it to "
            f"{-(-count // parts) * parts}, return a mask among the features, and let loss leave out the padding"
        )


def _loss_of_device(
    loss: Function, has_aux: bool, axes: AxisNames, params: PyTree, z: PyTree
) -> tuple[jax.Array, PyTree]:
    """Returns the device's part of the mean over devices, and the aux."""
    returned = loss(params, z)
    value, aux = returned if has_aux else (returned, ())
    devices = math.prod(lax.axis_size(a) for a in _axes_of_parts(value, axes))
    return (value / devices if devices > 1 else value), aux


def _axes_of_parts(x: jax.Array, axes: AxisNames) -> AxisNames:
    """Returns those of the axes over which an array is a device's part. If types are not tracked, these are all."""
    return tuple(a for a in axes_to_reduce([x], axes)[0] if a in axes)


def _summed_over(axes: AxisNames, tree: PyTree) -> PyTree:
    # If types are tracked, JAX has summed the gradients of parameters over devices already.
    return jax.tree.map(lambda x: combined_over(_axes_of_parts(x, axes), ["sum"], [x])[0], tree)


def _coefficients(by_feature: PyTree) -> dict[int, jax.Array]:
    """Returns the gradients by the floating leaves of the features, by their numbers. Raises if there are none."""
    leaves = jax.tree.leaves(by_feature)
    coefficients = {at: c for at, c in enumerate(leaves) if c.dtype != jax.dtypes.float0}
    if not coefficients:
        raise ValueError(
            "features must return at least one floating array, because gradients go through it, got "
            f"{len(leaves)} arrays of other dtypes. Convert one to float32"
        )
    return coefficients
