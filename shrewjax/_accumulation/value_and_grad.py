"""A whole batch in one call: `jax.value_and_grad` from several micro-batches, in one loop of the compiled program.

Data goes one way: split the batch, run `fun` on a micro-batch, decide whether it is kept, add it, divide at the end.
`Window`s hold the sums that are divided by a weight: one for the loss and the gradients, one for the averaged leaves of
the aux. An argument of `fun` holds examples, a key or the carry, or it is the same for all micro-batches.
"""

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax._accumulation._aux import COMBINE, AuxLeaves, AuxSums, in_dtype_of, nan_unless, selected
from shrewjax._accumulation.window import GradAccumulatorState, Reduction, Window, already_begun, unknown_true
from shrewjax._base import arguments, trees
from shrewjax._base.mesh import (
    Axes,
    AxisName,
    as_varying,
    device_index,
    is_replicated_over,
    newly_varying,
    require_mapped,
    varying_axes,
)
from shrewjax._base.trees import check_unchanged, is_gradient


class _Averaged(NamedTuple):
    """The quantities that the window averages."""

    value: Any
    gradients: Any


class _MicroBatch(NamedTuple):
    """The results of `fun` for one micro-batch, and its weight."""

    weight: Any
    averaged: _Averaged
    aux: Any
    carried: list[Any]  # the new value of the argument `carry_argnum`, or empty


class _Batch(NamedTuple):
    """The arguments of one call, by what a micro-batch gets of them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    roles: dict[str, tuple[int, ...]]
    own_params: dict[int, Any]  # those of `argnums`, by position
    examples: dict[int, Any]  # as `split_examples` returns them
    first_number: Any  # of the device's first micro-batch, over all devices

    def arguments(self, i: Any, carried: list[Any]) -> list[Any]:
        """Returns the arguments of micro-batch i."""
        replaced = self.own_params | micro_batch_of(self.examples, i)
        for at in self.roles["rng_argnums"]:
            replaced[at] = folded_keys(f"argument {at}", self.args[at], self.first_number + i)
        replaced |= dict(zip(self.roles["carry_argnum"], carried, strict=True))
        return [replaced.get(at, x) for at, x in enumerate(self.args)]

    def whole_arguments(self) -> list[Any]:
        """Returns the arguments of the whole batch. Copies the trees, because `fun` may change them."""
        return jax.tree.map(lambda x: x, [self.own_params.get(at, x) for at, x in enumerate(self.args)])


class _LoopState(NamedTuple):
    """The loop's state between two micro-batches."""

    window: GradAccumulatorState
    aux: AuxSums
    carried: list[Any]


def value_and_grad(
    fun: Callable[..., Any],
    micro_batches: int,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] | None = None,
    weight: Callable[..., Any] | None = None,
    aux: Any = "mean",
    rng_argnums: int | Sequence[int] = (),
    carry_argnum: int | None = None,
    reduction: Reduction = "mean",
    nonfinite: Literal["propagate", "drop_microbatch"] = "propagate",
    accumulator_dtype: Any = None,
    sum_over: AxisName | None = None,
) -> Callable[..., tuple[Any, Any]]:
    r"""Returns `jax.value_and_grad` of `fun`, computed micro-batch by micro-batch, for batches that do not fit at once.

    .. math:: \ell = \frac{\sum_i w_i \ell_i}{\sum_i w_i}, \qquad \bar g = \frac{\sum_i w_i g_i}{\sum_i w_i}

    The returned function takes the arguments of `fun`, with the whole batch. It returns what
    `jax.value_and_grad(fun, argnums, has_aux)` returns. `fun` itself sees one micro-batch at a time. A step takes the
    memory of one micro-batch and of one more tree of gradients, the sum. Call the returned function under `jax.jit`,
    because outside of it each call compiles the loop again.

    The arguments in `batch_argnums` are split. The first axis of each of their arrays numbers the examples, B of them
    in all arrays. Micro-batch i of K has the examples i, i + K, i + 2 K, and so on. So an axis that is sharded over
    devices is split without moving data.

    ==============================================  ============================================================
    condition                                       result
    ==============================================  ============================================================
    a micro-batch of weight 0                       adds nothing to value, gradients and aux, even if its loss or its
                                                    gradients are NaN; the carry stays unchanged
    a non-finite one, `nonfinite="propagate"`       it is added like any other, so the results are non-finite
    a non-finite one, `"drop_microbatch"`           it gets weight 0
    every micro-batch has weight 0 or is dropped    the gradients are zeros, the value and every `"mean"` are NaN;
                                                    with `reduction="sum"`, the value is 0
    a weight sum that is out of range or NaN        value, gradients and every `"mean"` are NaN; a sum is not
                                                    divided by it, and not affected
    ==============================================  ============================================================

    A micro-batch is non-finite if its loss or its gradients contain a NaN or an infinity, and its weight is not 0.

    The aux is reduced leaf by leaf. A leaf keeps its dtype; a `"sum"` of booleans or short integers has `jnp.sum`'s.

    =========  ==================================================  ==================================  =============
    `aux`      over the micro-batches that are kept                over devices, with `sum_over`       none is kept
    =========  ==================================================  ==================================  =============
    `"mean"`   sum(w a) / sum(w), for every `reduction`            the same, over all of them          NaN
    `"sum"`    sum(a), which is not weighted                       the same                            0
    `"max"`    the largest, NaN if one is NaN                      the same                            least number
    `"min"`    the smallest, NaN if one is NaN                     the same                            largest number
    `"last"`   the last one's                                      a device's own                      0
    `"stack"`  all, along a new first axis of K; the others are 0  a device's own                      0
    =========  ==================================================  ==================================  =============

    A stack of one number per example has the shape (K, B / K). `jnp.swapaxes(stack, 0, 1).reshape(B)` restores the
    order of the examples. If a `"mean"` leaf has an axis of a multiple of B / K, `fun` is traced once more, with the
    whole batch, to find out whether the mean would mix examples.

    Args:
      fun: the loss function, as for `jax.value_and_grad`. It returns a scalar; with `has_aux`, a pair of that and
        anything else.
      micro_batches: K, an int >= 1, into which the examples can be divided.
      argnums: the position, or positions, of the arguments to differentiate with respect to.
      has_aux: whether `fun` returns a pair.
      batch_argnums: the positions of the arguments that hold examples, trees of arrays. None: all except those of
        `argnums`, `rng_argnums` and `carry_argnum`. All other arguments, and those passed by keyword, reach every
        micro-batch whole. They may hold no PRNG key, and those by keyword no array of B rows.
      weight: a function of `fun`'s arguments for one micro-batch, which returns the number of examples or tokens
        that its mean counts: with a mask, those in the mask. A real scalar, 0 or between 2**-30 and 2**100, or a
        boolean. None: all micro-batches have the same weight.
      aux: how the aux is reduced, see above: one name for all leaves, or a tree prefix of names. A leaf whose shape
        depends on the number of examples has no `"mean"`.
      rng_argnums: the positions of the arguments that are trees of PRNG keys, typed or raw. Micro-batch i gets
        `jax.random.fold_in(key, i)`. On device d along `sum_over`, it gets `fold_in(key, d * K + i)`.
      carry_argnum: the position of an argument that each micro-batch passes on to the next, such as batch statistics.
        `fun` then returns `(loss, (aux, carry))`, and the result is `((value, (aux, carry)), grads)`. With `sum_over`,
        each device has its own carry, unless `fun` reduces it.
      reduction: `"mean"` for a mean loss, as above. `"sum_over_weights"` for a summed loss, with `weight`:
        sum(l) / sum(w) and sum(g) / sum(w). `"sum"`: sum(l) and sum(g).
      nonfinite: how to treat a non-finite micro-batch, see above. `"drop_microbatch"` reads the gradients once more.
      accumulator_dtype: dtype of the gradients' sum; by default the wider of float32 and the parameter's (complex for
        complex). Gradients are returned in the dtypes that `jax.value_and_grad` gives.
      sum_over: the mapped axis, or axes, over which the batch is divided. `()` sums over no axis: each device's results
        stay its own, for `accumulate(sum_over=)`. With `check_vma=False` and in `jax.pmap`, pass `()` also if the
        gradients are the same on every device, because no type tells it there.

    A batch that is sharded over its examples needs no argument under plain `jax.jit`: see the guide "Many devices". The
    guide "Windows, weights and state" has a step with a mask, keys, aux and carry. A `clip_cotangent` inside a mean
    loss is K times as tight in a micro-batch. Sum the loss, with `reduction="sum_over_weights"`. Or pass
    `max_norm * B / len(x)`, where x is the micro-batch.

    Returns:
      A function of `fun`'s arguments: `(value, grads)`, or `((value, aux), grads)` with `has_aux`. The gradients are
      a tuple if `argnums` is a sequence.

    Raises:
      ValueError: an argument is not as described; an argument has two roles; an array of examples has no axis, or
        another number of examples than the first array, or a number that K does not divide; `aux` does not fit the aux;
        a parameter is not floating; a key or an array of B rows comes as described under `batch_argnums`; `sum_over` is
        no mapped axis; or, inside `shard_map`, the loss is not reduced and `sum_over` is missing, or it is reduced
        already.
      AssertionError: `fun` returns a carry of another structure, shape or dtype.

    Example:
      >>> def loss(params, x, y):
      ...     return jnp.mean((x @ params - y) ** 2)
      >>> params, x, y = jnp.zeros(2), jnp.ones((8, 2)), jnp.arange(8.0)
      >>> value, grads = jax.jit(value_and_grad(loss, micro_batches=4))(params, x, y)
      >>> value, grads
      (Array(17.5, dtype=float32), Array([-7., -7.], dtype=float32))

    Source: by linearity of the gradient, the weighted mean is the large batch's gradient. The mean of means is not, see
    "Bugs in LLM Training - Gradient Accumulation Fix", Unsloth, 2024.
    """
    # The docstring has more than 70 lines, because its tables and its arguments are promises that tests hold.
    steps = arguments.integer("micro_batches", micro_batches, at_least=1)
    has_carry = carry_argnum is not None
    if has_carry and not has_aux:
        raise ValueError("carry_argnum needs has_aux=True, because fun returns (loss, (aux, carry))")
    if weight is not None and not callable(weight):
        raise ValueError(f"weight must be a function of fun's arguments or None, got {weight!r}")
    if not has_aux and aux != "mean":
        raise ValueError(f"aux needs has_aux=True, because fun returns (loss, aux), got aux={aux!r}")
    for name in jax.tree.leaves(aux, is_leaf=lambda x: x is None):
        arguments.choice("aux", name, ("mean", "stack", *COMBINE))
    arguments.choice("nonfinite", nonfinite, ("propagate", "drop_microbatch"))
    window = Window(
        steps, reduction=reduction, nonfinite=nonfinite, accumulator_dtype=accumulator_dtype, sum_over=sum_over
    )
    if reduction == "sum_over_weights" and weight is None:
        raise ValueError(
            "reduction='sum_over_weights' needs weight=, because it divides by the weights, got weight=None. Pass a "
            "function that returns the number of examples. Or pass reduction='mean' for a mean loss, 'sum' for a sum"
        )
    axes = window.axes or ()
    given = {
        "argnums": arguments.positions("argnums", argnums),
        "rng_argnums": arguments.positions("rng_argnums", rng_argnums),
        "carry_argnum": (arguments.integer("carry_argnum", carry_argnum),) if has_carry else (),
        "batch_argnums": None if batch_argnums is None else arguments.positions("batch_argnums", batch_argnums),
    }
    micro_value_and_grad = jax.value_and_grad(fun, argnums, has_aux)

    def run(batch: _Batch, i: Any, carried: list[Any]) -> _MicroBatch:
        """Returns the results of micro-batch i."""
        its_arguments = batch.arguments(i, carried)
        its_weight = 1 if weight is None else _relative_weight(weight(*its_arguments, **batch.kwargs), reduction)
        returned, grads = micro_value_and_grad(*its_arguments, **batch.kwargs)
        loss, its_aux = returned if has_aux else (returned, ())
        if has_carry:
            its_aux, *carried = aux_and_carry(its_aux)
        return _MicroBatch(its_weight, _Averaged(loss, grads), its_aux, carried)

    def add(
        batch: _Batch, aux_leaves: AuxLeaves, own: tuple[Hashable, ...], state: _LoopState, i: jax.Array
    ) -> tuple[_LoopState, list[jax.Array]]:
        """Returns the sums with micro-batch i added, and those of its leaves that are stacked."""
        part = run(batch, i, state.carried)
        added = window.add_in_loop(state.window, part.averaged, part.weight)
        # Sums of scatters in the aux and in the carry are lost, too, if XLA knows that they are kept (XLA-27).
        kept = unknown_true() & (part.weight != 0)
        if nonfinite != "propagate":
            kept = kept & (added.dropped == state.window.dropped)
        aux_sums, stacked = aux_leaves.add(state.aux, part.aux, part.weight, kept)
        new_state = _LoopState(added, aux_sums, selected(kept, part.carried, state.carried))
        return sums_of_device(new_state, own), stacked

    def aux_of_whole_batch(batch: _Batch) -> Any:
        """Returns the aux that `jax.value_and_grad` would return."""
        its_aux = fun(*batch.whole_arguments(), **batch.kwargs)[1]
        return aux_and_carry(its_aux)[0] if has_carry else its_aux

    def value_and_grad_of_batch(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        roles = roles_of_arguments(given, len(args), kwargs)
        require_mapped("sum_over", axes)
        batch = batch_of_arguments(args, kwargs, roles, steps, axes)
        carried = [jax.tree.map(jnp.asarray, args[at]) for at in roles["carry_argnum"]]
        like = jax.eval_shape(partial(run, batch), 0, carried)
        params = tuple(args[at] for at in roles["argnums"])
        own = own_axes(like.averaged.value, params, window.axes)
        check_carried(like.carried, carried, like.weight)
        aux_leaves = AuxLeaves(aux, like.aux, steps, sum_over)
        split = jax.tree.leaves(batch.examples)
        if steps > 1 and split:
            aux_leaves.check_shapes(partial(aux_of_whole_batch, batch), split[0].shape[0])

        zero = jnp.zeros((), like.averaged.value.dtype)
        opened = window.init(_Averaged(zero, params if isinstance(argnums, Sequence) else params[0]))
        # `accumulator_dtype` is for the gradients alone, so the loss has the default one.
        sums = opened.gradient_sum._replace(value=Window(steps, sum_over=sum_over).init(zero).gradient_sum)
        start = sums_of_device(_LoopState(opened._replace(gradient_sum=sums), aux_leaves.open(), carried), own)
        end, stacked = lax.scan(partial(add, batch, aux_leaves, own), start, jnp.arange(steps, dtype=jnp.int32))

        average, has_average, _ = window.close(already_begun(end.window))
        # If no micro-batch is kept, the sums are still zeros, and so are the gradients.
        value, grads = jax.tree.map(in_dtype_of, average.gradients, like.averaged)
        if reduction != "sum":
            value = nan_unless(has_average, value)
        if not has_aux:
            return value, grads
        whole_aux = aux_leaves.close(end.aux, stacked)
        return (value, (whole_aux, *end.carried) if has_carry else whole_aux), grads

    return value_and_grad_of_batch


def batch_of_arguments(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    roles: dict[str, tuple[int, ...]],
    steps: int,
    axes: tuple[Hashable, ...],
) -> _Batch:
    """Returns a call's arguments, checked and split."""
    first_number = device_index(axes) * steps if axes else 0
    check_parameters({at: args[at] for at in roles["argnums"]})
    examples = split_examples({at: args[at] for at in roles["batch_argnums"]}, steps)
    if steps > 1:
        with_role = {at for positions in roles.values() for at in positions}
        check_whole({at: x for at, x in enumerate(args) if at not in with_role}, kwargs, examples)
    # Parameters become a device's own. In `shard_map`, JAX would otherwise reduce their gradients on every
    # micro-batch (tests/accumulation/test_value_and_grad.py, "cross_the_network_once").
    own_params = {at: jax.tree.map(lambda x: as_varying(x, axes), args[at]) for at in roles["argnums"]}
    return _Batch(args, kwargs, roles, own_params, examples, first_number)


def sums_of_device(state: _LoopState, own: tuple[Hashable, ...]) -> _LoopState:
    """Returns the loop's state with sums that, by their types, are each device's own, before and after each turn."""
    if not own:
        return state
    window, aux = jax.tree.map(lambda x: as_varying(x, own), (state.window, state.aux))
    return state._replace(window=window, aux=aux)


def roles_of_arguments(
    given: Mapping[str, tuple[int, ...] | None], count: int, keywords: Collection[str]
) -> dict[str, tuple[int, ...]]:
    """Returns the positions of each role's arguments, counted from the front.

    A role given as None has all arguments that none before it has, so it comes last. Raises if none is left for it, if
    a position is out of range, or if an argument has two roles.
    """
    plural = "" if count == 1 else "s"
    roles: dict[str, tuple[int, ...]] = {}
    taken: dict[int, str] = {}
    for name, positions in given.items():
        if positions is None:
            positions = tuple(at for at in range(count) if at not in taken)
            if not positions:
                raise ValueError(
                    f"no argument holds examples, because the call has {count} positional argument"
                    f"{plural}, in {', '.join(dict.fromkeys(taken.values()))}. Pass the batch by "
                    "position. Or pass batch_argnums=() if there is none"
                )
        for at in positions:
            if not -count <= at < count:
                came = f"{name} has the position {at}, but {count} argument{plural} came by position"
                remedy = (
                    f", and by keyword {', '.join(keywords)}. Pass what {name} names by position" if keywords else ""
                )
                raise ValueError(came + remedy)
            if at % count in taken:
                raise ValueError(
                    f"argument {at % count} is in {taken[at % count]} and in {name}. Give it one of the two"
                )
            taken[at % count] = name
        roles[name] = tuple(at % count for at in positions)
    return roles


def split_examples(arguments: dict[int, Any], steps: int) -> dict[int, Any]:
    """Returns arrays of shape (B, ...) as (B / K, K, ...), in which the second axis numbers the micro-batches.

    If the first axis is sharded over devices, each device's examples are so divided among all micro-batches.
    """
    counts: dict[str, int] = {}

    def split(path: trees.KeyPath, x: Any) -> jax.Array:
        name = f"argument {path[0].key}{jax.tree_util.keystr(path[1:])}"
        others = tuple(at for at in arguments if at != path[0].key)
        if np.ndim(x) == 0:
            check_key(name, x, path[0].key)
            raise ValueError(
                f"{name} has no axis of examples, but shape (). If it is the same for all micro-batches, pass "
                f"batch_argnums={others}. If each example has its own, pass an array of them"
            )
        (count, *rest), (first, of_first) = np.shape(x), next(iter(counts.items()), (name, np.shape(x)[0]))
        counts[name] = count
        if count != of_first:
            check_key(name, x, path[0].key)
            raise ValueError(
                f"{name} has {count} examples along its first axis, {first} has {of_first}. If argument {path[0].key} "
                f"is the same for all micro-batches, pass batch_argnums={others}"
            )
        if count % steps:
            raise ValueError(
                f"{name} has {count} examples, which micro_batches={steps} does not divide. Pad the batch to "
                f"{-(-count // steps) * steps}, and let weight= count the real ones. If the loss is a mean, let fun "
                "take it over the real ones, too"
            )
        x = jnp.asarray(x)
        devices = devices_along_first_axis(x)
        if count // steps % devices:
            padded = -(-count // (steps * devices)) * steps * devices
            raise ValueError(
                f"{name} has {count} examples, sharded over {devices} devices, in micro-batches of {count // steps}, "
                f"which {devices} does not divide. Pad the batch to {padded}, and let weight= count the real ones. Or "
                "use a mesh with Auto axes, on which examples may move between devices"
            )
        return x.reshape(count // steps, steps, *rest)

    return jax.tree.map_with_path(split, arguments)


def devices_along_first_axis(x: jax.Array) -> int:
    """Returns over how many devices the type of an array shards its first axis: more than one on an Explicit mesh."""
    sharding: Any = jax.typeof(x).sharding
    names = sharding.spec[0] if sharding.spec else None
    over = names if isinstance(names, tuple) else () if names is None else (names,)
    return math.prod(sharding.mesh.shape[a] for a in over)


def check_key(name: str, x: Any, at: int | None) -> None:
    """Raises if a leaf is a PRNG key, or looks like a raw one. `at` is the argument's position, if it has one."""
    dtype: Any = getattr(x, "dtype", np.object_)
    is_typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if is_typed or (dtype == np.uint32 and np.shape(x) in ((2,), (4,))):
        remedy = "it by position, and its position in rng_argnums=" if at is None else f"rng_argnums={at}"
        raise ValueError(
            f"{name} is a PRNG key, and each micro-batch needs its own. Pass {remedy}. If all shall have the same one, "
            "let fun close over it" + ("" if is_typed else ". If these numbers are no key, convert them to int32")
        )


def check_whole(arguments: dict[int, Any], keywords: dict[str, Any], examples: dict[int, Any]) -> None:
    """Raises if arguments that every micro-batch gets whole hold PRNG keys, or those by keyword as many rows as B."""
    sizes = {x.shape[0] * x.shape[1] for x in jax.tree.leaves(examples)}

    def check(path: trees.KeyPath, x: Any) -> None:
        of, at = path[0].key, path[0].key if path[0].key in arguments else None
        name = f"{'keyword argument' if at is None else 'argument'} {of}{jax.tree_util.keystr(path[1:])}"
        check_key(name, x, at)
        if at is None and np.ndim(x) and np.shape(x)[0] in sizes:
            raise ValueError(
                f"{name} has {np.shape(x)[0]} rows, as many as the batch has examples, but every micro-batch gets "
                "arguments by keyword whole. Pass it by position. If it holds no examples, leave its position out of "
                "batch_argnums="
            )

    jax.tree.map_with_path(check, arguments)
    jax.tree.map_with_path(check, keywords)


def check_parameters(params: dict[int, Any]) -> None:
    """Raises if a leaf to differentiate with respect to is neither floating nor complex."""

    def check(path: trees.KeyPath, x: Any) -> None:
        dtype: Any = getattr(x, "dtype", np.object_)
        if not isinstance(x, float | complex) and not jnp.issubdtype(dtype, jnp.inexact):
            name = f"argument {path[0].key}{jax.tree_util.keystr(path[1:])}"
            given = f"{dtype} of shape {x.shape}" if hasattr(x, "dtype") else repr(x)
            raise ValueError(
                f"{name} must be a floating or complex array, because it is in argnums, got {given}. Split the model, "
                "and merge it in fun: in Equinox with eqx.partition(model, eqx.is_inexact_array), in Flax NNX with "
                "nnx.split(model, nnx.Param, ...)"
            )

    jax.tree.map_with_path(check, params)


def micro_batch_of(examples: dict[int, Any], i: Any) -> dict[int, Any]:
    """Returns the examples of micro-batch i."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False), examples)


def folded_keys(name: str, keys: Any, number: Any) -> Any:
    """Folds `number`, which counts micro-batches over all devices, into each key. Raises if a leaf is no single key."""

    def fold(path: trees.KeyPath, key: Any) -> jax.Array:
        dtype: Any = getattr(key, "dtype", np.object_)
        is_typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        is_raw = not is_typed and dtype == np.uint32
        if np.ndim(key) != (0 if is_typed else 1) or not (is_typed or is_raw):
            given = f"shape {key.shape} and dtype {dtype}" if hasattr(key, "dtype") else repr(key)
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} is in rng_argnums and must be one PRNG key, got {given}. Make it "
                "with jax.random.key. If each example has a key, put the argument into batch_argnums"
            )
        return jax.random.fold_in(key, number)

    return jax.tree.map_with_path(fold, keys)


def aux_and_carry(returned: Any) -> tuple[Any, Any]:
    """Returns the pair (aux, carry). Raises if `fun` returned something else beside the loss."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise ValueError(f"with carry_argnum, fun must return (loss, (aux, carry)), got {returned!r} beside the loss")
    aux, carry = returned
    return aux, carry


def own_axes(loss: Any, params: Any, sum_over: Axes) -> tuple[Hashable, ...]:
    """Returns the mapped axes along which a device's results stay its own. Raises if the loss differs along others.

    They are those along which the loss and all parameters differ, and only with `sum_over=()`. If parameters were the
    same on every device, JAX would sum their gradients over devices in each micro-batch.
    """
    axes = sum_over or ()
    if axes and is_replicated_over(loss, axes):
        raise ValueError(
            f"the loss is already reduced over sum_over={axes!r}, or does not depend on the examples. Let fun return "
            "the loss of the device's own examples, without jax.lax.pmean or psum. Or leave out sum_over"
        )
    along = sorted(varying_axes(loss) - set(axes), key=str)
    leaves = [x for x in jax.tree.leaves(trees.parameter_arrays(params)) if is_gradient(x)]
    if along and sum_over == () and all(set(along) <= varying_axes(x) for x in leaves):
        return tuple(along)
    if along:
        wanted = (*axes, *along)
        raise ValueError(
            f"the loss may differ between devices along {', '.join(map(repr, along))}, which is not in sum_over. "
            f"Pass sum_over={wanted if len(wanted) > 1 else along[0]!r} if devices have different examples. Otherwise "
            "reduce the loss in fun, for example with jax.lax.pmean. To keep each device's own gradients, pass "
            f"sum_over=(), and the parameters as jax.lax.pcast(params, {tuple(along)}, to='varying')"
        )
    return ()


def check_carried(new: list[Any], carried: list[Any], weight: Any) -> None:
    """Raises if a micro-batch would change the carry's structure, shapes, dtypes or the axes over which it varies."""
    check_unchanged(new, carried, "the carry that fun returns differs from the one that it is given,")

    def check(path: trees.KeyPath, new: Any, old: Any) -> None:
        along = newly_varying(new, old) or newly_varying(weight, old)
        if along:
            raise ValueError(
                f"leaf {trees.leaf_name(path[1:])} of the carry may differ between devices along {along}, but the "
                f"one that is passed does not. Reduce it in fun, for example with jax.lax.pmean(carry, {along}). If "
                "weights differ between devices, pass each device a carry of its own"
            )

    jax.tree.map_with_path(check, new, carried)


def _relative_weight(weight: Any, reduction: Reduction) -> arguments.Scalar:
    """Returns a weight, or 1 for a number in a mean: it is the same for all micro-batches, and so cancels.

    XLA leaves an all-reduce inside the loop if a constant multiplies it (XLA-24).
    """
    weight = arguments.weight(weight, {()})
    return 1.0 if reduction == "mean" and isinstance(weight, float) and weight else weight
