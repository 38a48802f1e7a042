"""A whole batch in one call: `jax.value_and_grad` from several micro-batches, in a loop of the compiled program.

Data goes one way: split the batch, run `fun` on a micro-batch, decide whether it is kept, add it up, close. All that
is divided by a weight is a `GradAccumulator`'s sum: one of the loss and the gradients, one of the aux that is averaged.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shrewjax import _arguments, _floats, _gradients
from shrewjax._gradients import is_gradient
from shrewjax._mesh import AxisName, as_varying, device_index, require_mapped, varying_axes
from shrewjax._reductions import combined_over
from shrewjax._window import GradAccumulator, GradAccumulatorState, Reduction
from shrewjax._wrapping import Flag, check_unchanged


class _Averaged(NamedTuple):
    """What the window averages."""

    value: Any
    gradients: Any


class _MicroBatch(NamedTuple):
    """What `fun` made of one micro-batch."""

    weight: Any
    averaged: _Averaged
    aux: Any
    carried: list[Any]  # of one argument, or of none


class _SoFar(NamedTuple):
    """What goes from one micro-batch to the next."""

    window: GradAccumulatorState
    aux: "_AuxSums"
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
    r"""`jax.value_and_grad` of a batch that is too large to be taken at once: micro-batch by micro-batch, in one call.

    .. math:: \ell = \frac{\sum_i w_i \ell_i}{\sum_i w_i}, \qquad \bar g = \frac{\sum_i w_i g_i}{\sum_i w_i}

    The function that it returns is called as `fun` is, and returns what `jax.value_and_grad(fun, argnums, has_aux)`
    does. Inside it, `fun` sees one micro-batch at a time. A step holds one more tree of gradients, the sum, and the
    memory of one micro-batch. Nothing is kept from one step to the next. Call it under `jax.jit`: outside of it, the
    loop is compiled on every call.

    The split: of each array in `batch_argnums`, the first axis has the examples, B of them in all arrays. Micro-batch i
    of K has the examples i, i + K, i + 2 K, and so on, so that an axis that is sharded over devices stays where it is.

    ==============================================  ============================================================
    what happens                                    result
    ==============================================  ============================================================
    a micro-batch of weight 0                       contributes nothing to value, gradients and aux, whatever its
                                                    loss and gradients hold; the carry stays as it was before
    a bad micro-batch, `nonfinite="propagate"`      value and gradients are what arithmetic says
    the same, `nonfinite="drop_microbatch"`         is as one of weight 0
    no micro-batch weighs anything                  the gradients are zeros, the value and every `"mean"` are NaN
    a weight sum that is out of range or NaN        value and gradients are NaN; a `"sum"` is not divided, and stays
    micro_batches = 1                               what `jax.value_and_grad` does
    ==============================================  ============================================================

    A micro-batch is bad if its loss or its gradients hold a NaN or an infinity. To read how many were dropped, let
    `fun` return a 1 in its aux, and sum it: `aux={"kept": "sum", ...}`. With `"stack"` it says which.

    The aux of micro-batches becomes one, leaf by leaf. A leaf keeps its dtype, but a sum of booleans counts in int32:

    =========  ==================================================  ==================================  =============
    `aux`      over the micro-batches that weigh something         over devices, with `sum_over`       of none
    =========  ==================================================  ==================================  =============
    `"mean"`   sum(w a) / sum(w), whatever `reduction` is          the same, over all of them          NaN
    `"sum"`    sum(a), which is not weighted                       the same                            0
    `"max"`    the largest                                         the same                            least number
    `"min"`    the smallest                                        the same                            largest number
    `"last"`   the last one's                                      a device's own                      0
    `"stack"`  all, along a new first axis of K; the others are 0  a device's own                      0
    =========  ==================================================  ==================================  =============

    Args:
      fun: the loss, a scalar; with `has_aux` a pair of that and anything else. As for `jax.value_and_grad`.
      micro_batches: K, an int >= 1, into which the examples can be divided.
      argnums: the positional argument, or arguments, to differentiate with respect to.
      has_aux: whether `fun` returns a pair.
      batch_argnums: the positional arguments that hold examples, trees of arrays. None: all but those of `argnums`,
        `rng_argnums` and `carry_argnum`. Other arguments, and those by keyword, reach every micro-batch whole.
      weight: a function of `fun`'s arguments, as the micro-batch has them, that returns its number of examples or
        tokens: a real scalar, 0 or between 2**-30 and 2**100. None: all micro-batches weigh the same.
      aux: what becomes of the aux, see above: one name for all of it, or a tree prefix of names.
      rng_argnums: the positional arguments that are trees of PRNG keys, of either kind. Micro-batch i has
        `jax.random.fold_in(key, i)`; on device d along `sum_over`, `fold_in(key, d * K + i)`.
      carry_argnum: a positional argument that goes through the micro-batches in their order, such as batch statistics.
        `fun` then returns `(loss, (aux, carry))`, and the result is `((value, (aux, carry)), grads)`.
      reduction: `"mean"` for a mean loss, as above. `"sum_over_weights"` for a summed loss: sum(l) / sum(w) and
        sum(g) / sum(w). `"sum"`: sum(l) and sum(g).
      nonfinite: what to do with a bad micro-batch, see above. `"drop_microbatch"` reads the gradients once more.
      accumulator_dtype: dtype of the gradients' sum; by default the wider of float32 and the parameter's (complex for
        complex). Gradients are returned in the dtypes that `jax.value_and_grad` gives.
      sum_over: the mapped axis, or axes, over which the batch is divided, see below. `()` says that the gradients are
        the same on every device, which must be said where no type tells it (`check_vma=False`, `jax.pmap`).

    Many devices: under plain `jax.jit`, with a batch that is sharded over its examples, there is nothing to say. XLA
    adds up each device's own gradients in the loop, weighted or not, and reduces them once after it (tested for CUDA
    and TPU). With `nonfinite="drop_microbatch"` it reduces those of every micro-batch, because all devices have to know
    whether they are finite. Let K times the number of devices divide B, or examples move.

    Inside `jax.shard_map` over the axis "data", let `sum_over="data"`: a device takes K micro-batches of its own, and
    sum(w g) and sum(w) cross the network once, after the loop. Parameters come as they are, replicated over "data", and
    so do value, gradients and aux return. To drop a bad micro-batch takes one flag of each. A micro-batch that is bad
    on one device is bad on all.

    Returns:
      A function of `fun`'s arguments: `(value, grads)`, or `((value, aux), grads)` with `has_aux`. The gradients are
      a tuple if `argnums` is a sequence.

    Raises:
      ValueError: an argument is not as described; two roles are given to the same argument; an array of examples has no
        axis, another number of examples than the first, or a number that K does not divide; the aux does not fit;
        `sum_over` is no mapped axis; inside `shard_map`, loss or gradients are not reduced and `sum_over` is missing.

    Example:
      >>> def loss(params, x, y):
      ...     return jnp.mean((x @ params - y) ** 2)
      >>> params, x, y = jnp.zeros(2), jnp.ones((8, 2)), jnp.arange(8.0)
      >>> value, grads = jax.jit(value_and_grad(loss, micro_batches=4))(params, x, y)
      >>> value, grads
      (Array(17.5, dtype=float32), Array([-7., -7.], dtype=float32))

      Texts of different lengths, whose loss is a mean over what the mask leaves: weigh by what it leaves.
      >>> def masked_loss(params, x, y, mask):
      ...     errors = jnp.where(mask, (x @ params - y) ** 2, 0)
      ...     return jnp.sum(errors) / jnp.sum(mask), {"kept": 1}
      >>> step = value_and_grad(
      ...     masked_loss, 4, has_aux=True, weight=lambda params, x, y, mask: jnp.sum(mask), aux={"kept": "sum"}
      ... )
      >>> (value, aux), grads = jax.jit(step)(params, x, y, y % 4 > 1)  # two of the four have nothing to predict
      >>> value, aux["kept"]
      (Array(24.5, dtype=float32), Array(2, dtype=int32))

    The weighted mean is the large batch's by linearity; the mean of means is not, see "Bugs in LLM Training - Gradient
    Accumulation Fix", Unsloth, 2024.
    """
    steps = _arguments.integer("micro_batches", micro_batches, at_least=1)
    has_carry = carry_argnum is not None
    if has_carry and not has_aux:
        raise ValueError("carry_argnum needs has_aux=True, because fun returns (loss, (aux, carry))")
    if weight is not None and not callable(weight):
        raise ValueError(f"weight must be a function of fun's arguments or None, got {weight!r}")
    for name in jax.tree.leaves(aux, is_leaf=lambda x: x is None):
        _arguments.choice("aux", name, ("mean", "stack", *_COMBINE))
    _arguments.choice("nonfinite", nonfinite, ("propagate", "drop_microbatch"))
    axes = _arguments.axis_names("sum_over", sum_over) or ()
    options: Any = {"reduction": reduction, "nonfinite": nonfinite, "sum_over": sum_over}
    window = GradAccumulator(steps, accumulator_dtype=accumulator_dtype, **options)
    loss_window = GradAccumulator(steps, **options)
    given = {
        "argnums": _arguments.positions("argnums", argnums),
        "rng_argnums": _arguments.positions("rng_argnums", rng_argnums),
        "carry_argnum": (_arguments.integer("carry_argnum", carry_argnum),) if has_carry else (),
        "batch_argnums": None if batch_argnums is None else _arguments.positions("batch_argnums", batch_argnums),
    }
    micro_value_and_grad = jax.value_and_grad(fun, argnums, has_aux)

    def value_and_grad_of_batch(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        roles = _roles(given, len(args))
        require_mapped("sum_over", axes)
        first_number = device_index(axes) * steps if axes else 0
        examples = _split({at: args[at] for at in roles["batch_argnums"]}, steps)
        # As a device's own, because in `shard_map` JAX reduces the gradients of shared ones on every micro-batch.
        own_params = {at: jax.tree.map(lambda x: as_varying(x, axes), args[at]) for at in roles["argnums"]}

        def run(i: Any, carried: list[Any]) -> _MicroBatch:
            """Micro-batch i."""
            replaced = own_params | _micro_batch_of(examples, i)
            replaced |= {at: _folded(f"argument {at}", args[at], first_number + i) for at in roles["rng_argnums"]}
            replaced |= dict(zip(roles["carry_argnum"], carried, strict=True))
            arguments = [replaced.get(at, x) for at, x in enumerate(args)]
            its_weight = 1 if weight is None else weight(*arguments, **kwargs)
            returned, grads = micro_value_and_grad(*arguments, **kwargs)
            loss, its_aux = returned if has_aux else (returned, ())
            if has_carry:
                its_aux, *carried = _aux_and_carry(its_aux)
            return _MicroBatch(its_weight, _Averaged(loss, grads), its_aux, carried)

        carried = [jax.tree.map(jnp.asarray, args[at]) for at in roles["carry_argnum"]]
        like = jax.eval_shape(run, 0, carried)
        check_unchanged(like.carried, carried, "the carry that fun returns differs from the one that it is given,")
        aux_leaves = _AuxLeaves(aux, like.aux, steps, sum_over)

        def add(so_far: _SoFar, i: jax.Array) -> tuple[_SoFar, list[jax.Array]]:
            """The sums with micro-batch i, and what is stacked of it."""
            its = run(i, so_far.carried)
            added = window.add(_begun(so_far.window), its.averaged, its.weight)
            kept: Flag = its.weight != 0
            if nonfinite != "propagate" and kept is not False:
                kept = kept & (added.dropped == so_far.window.dropped)
            aux_sums, stacked = aux_leaves.add(so_far.aux, its.aux, its.weight, kept)
            return _SoFar(added, aux_sums, _selected(kept, its.carried, so_far.carried)), stacked

        params = tuple(args[at] for at in roles["argnums"])
        zero = jnp.zeros((), like.averaged.value.dtype)
        opened = window.init(_Averaged(zero, params if isinstance(argnums, Sequence) else params[0]))
        # The accumulator's dtype is meant for the gradients.
        sums = opened.gradient_sum._replace(value=loss_window.init(zero).gradient_sum)
        start = _SoFar(opened._replace(gradient_sum=sums), aux_leaves.open(), carried)
        end, stacked = lax.scan(add, start, jnp.arange(steps, dtype=jnp.int32))

        average, has_average = _average(window, end.window)
        value, grads = jax.tree.map(_in_dtype_of, average, like.averaged)
        if reduction != "sum":
            value = _nan_unless(has_average, value)
        if not has_aux:
            return value, grads
        whole_aux = aux_leaves.close(end.aux, stacked)
        return (value, (whole_aux, *end.carried) if has_carry else whole_aux), grads

    return value_and_grad_of_batch


# --- the arguments of a micro-batch ----------------------------------------------------------------------------


def _roles(given: Mapping[str, tuple[int, ...] | None], count: int) -> dict[str, tuple[int, ...]]:
    """The positions of the arguments by what they are for, each counted from the front and in one role alone."""
    roles: dict[str, tuple[int, ...]] = {}
    taken: dict[int, str] = {}
    for name, positions in given.items():
        if positions is None:
            positions = tuple(at for at in range(count) if at not in taken)
            if not positions:
                raise ValueError(
                    f"no argument holds examples: fun has {count} positional arguments, and all are in "
                    f"{', '.join(dict.fromkeys(taken.values()))}. Pass the batch by position, or batch_argnums=() if "
                    "there is none"
                )
        for at in positions:
            if not -count <= at < count:
                raise ValueError(f"{name} has the position {at}, but {count} arguments came by position")
            if at % count in taken:
                raise ValueError(f"argument {at % count} is in {taken[at % count]} and in {name}: one role each")
            taken[at % count] = name
        roles[name] = tuple(at % count for at in positions)
    return roles


def _split(arguments: dict[int, Any], steps: int) -> dict[int, Any]:
    """Arrays of shape (B, ...) as (B / K, K, ...): a micro-batch is taken along the second axis.

    So each device's examples of an axis that is sharded over devices are divided among all micro-batches.
    """
    counts: dict[str, int] = {}

    def split(path: _gradients.KeyPath, x: Any) -> jax.Array:
        name = f"argument {path[0].key}{jax.tree_util.keystr(path[1:])}"
        if np.ndim(x) == 0:
            raise ValueError(
                f"{name} has no axis of examples, but shape (): leave the argument out of batch_argnums, or give each "
                "example its own number"
            )
        (count, *rest), (first, of_first) = np.shape(x), next(iter(counts.items()), (name, len(x)))
        counts[name] = count
        if count != of_first:
            raise ValueError(f"{name} has {count} examples along its first axis, {first} has {of_first}")
        if count % steps:
            raise ValueError(
                f"{name} has {count} examples, which micro_batches={steps} does not divide: pad the batch to "
                f"{-(-count // steps) * steps}, and let weight= count those that are real. With a mean loss, let fun "
                "take the mean over these, too"
            )
        return jnp.asarray(x).reshape(count // steps, steps, *rest)

    return jax.tree.map_with_path(split, arguments)


def _micro_batch_of(examples: dict[int, Any], i: Any) -> dict[int, Any]:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False), examples)


def _folded(name: str, keys: Any, number: Any) -> Any:
    """The keys of the micro-batch of this number."""

    def fold(path: _gradients.KeyPath, key: Any) -> jax.Array:
        dtype: Any = getattr(key, "dtype", np.object_)
        is_typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
        is_raw = not is_typed and dtype == np.uint32
        if np.ndim(key) != (0 if is_typed else 1) or not (is_typed or is_raw):
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} is in rng_argnums and must be one PRNG key, got {key!r}: make it "
                "by jax.random.key"
            )
        return jax.random.fold_in(key, number)

    return jax.tree.map_with_path(fold, keys)


def _aux_and_carry(returned: Any) -> tuple[Any, Any]:
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise ValueError(
            f"with carry_argnum, fun must return (loss, (aux, carry)); beside the loss it has {returned!r}"
        )
    aux, carry = returned
    return aux, carry


# --- the sums --------------------------------------------------------------------------------------------------


def _begun(state: GradAccumulatorState) -> GradAccumulatorState:
    """A window of zeros, or more, that is known to have begun: there is no stale sum to be replaced.

    XLA moves the all-reduce of the gradients out of a loop only if the loop does nothing but add them
    (tests/test_accelerators.py).
    """
    return state._replace(micro_step=jnp.ones((), jnp.int32))


def _average(window: GradAccumulator, state: GradAccumulatorState) -> tuple[Any, Flag]:
    """Returns the window's average, and whether it has one. If not, the sums are still zeros."""
    # Not by `take`, which selects zeros. For a transformer on CUDA, XLA holds them, a quarter of the gradients' size.
    stepped = window._advance(_begun(state), None, 0, None, flush=True, when_full=False)
    average = window._average(stepped)
    return average.gradients, stepped.has_average & average.has_weight


def _selected(kept: Flag, new: Any, old: Any) -> Any:
    return new if kept is True else jax.tree.map(lambda x, y: jnp.where(kept, x, y), new, old)


def _nan_unless(known: Flag, x: jax.Array) -> jax.Array:
    return jnp.where(known, x, jnp.full_like(x, jnp.nan))


def _in_dtype_of(x: jax.Array, like: Any) -> jax.Array:
    if not is_gradient(x):
        return x
    return (x.real if _floats.is_complex(x) and not _floats.is_complex(like) else x).astype(like.dtype)


class _AuxSums(NamedTuple):
    """What there is of the aux so far."""

    means: GradAccumulatorState
    others: list[jax.Array]


# How a leaf of the micro-batches before goes with the next one's.
_COMBINE: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "sum": lax.add,
    "max": lax.max,
    "min": lax.min,
    "last": lambda _, x: x,
}


class _AuxLeaves:
    """The leaves of the aux, each with what becomes of it."""

    def __init__(self, names: Any, like: Any, steps: int, sum_over: Any) -> None:
        leaves, self._structure = jax.tree.flatten_with_path(like)
        self._like = [x for _, x in leaves]
        self._names = _names_of_leaves(names, like)
        self._window = GradAccumulator(steps, sum_over=sum_over)
        self._sum_over = _arguments.axis_names("sum_over", sum_over) or ()
        for (path, x), name in zip(leaves, self._names, strict=True):
            _check_aux_leaf(_gradients.leaf_name(path), x, name)

    def _of(self, leaves: Sequence[Any], *names: str) -> list[Any]:
        return [x for x, name in zip(leaves, self._names, strict=True) if name in names]

    def open(self) -> _AuxSums:
        """Of no micro-batch."""
        means = [jnp.zeros(x.shape, x.dtype) for x in self._of(self._like, "mean")]
        others = [_empty(name, x) for name, x in zip(self._names, self._like, strict=True) if name in _COMBINE]
        return _AuxSums(self._window.init(means), others)

    def add(self, so_far: _AuxSums, aux: Any, weight: Any, kept: Flag) -> tuple[_AuxSums, list[jax.Array]]:
        """With one more micro-batch, and its leaves that are to be stacked."""
        leaves = [jnp.asarray(x) for x in jax.tree.leaves(aux)]
        if not isinstance(kept, bool):
            weight = jnp.where(kept, weight, jnp.zeros_like(weight))
        means = self._window.add(_begun(so_far.means), self._of(leaves, "mean"), weight)
        combine = self._of([_COMBINE.get(name) for name in self._names], *_COMBINE)
        others = [
            _selected(kept, f(old, x.astype(old.dtype)), old)
            for f, old, x in zip(combine, so_far.others, self._of(leaves, *_COMBINE), strict=True)
        ]
        return _AuxSums(means, others), [_selected(kept, x, jnp.zeros_like(x)) for x in self._of(leaves, "stack")]

    def close(self, so_far: _AuxSums, stacked: list[jax.Array]) -> Any:
        """The aux of the batch."""
        means, known = _average(self._window, so_far.means)
        names = self._of(self._names, *_COMBINE)
        results = {"mean": iter([_nan_unless(known, x) for x in means]), "stack": iter(stacked)}
        others = iter(combined_over(self._sum_over, names, so_far.others))
        leaves = [next(results.get(name, others)) for name in self._names]
        return jax.tree.unflatten(self._structure, map(_in_dtype_of, leaves, self._like))


def _names_of_leaves(names: Any, like: Any) -> list[str]:
    try:
        return jax.tree.leaves(jax.tree.broadcast(names, like))
    except ValueError as error:
        raise ValueError(
            f"aux must be one name, or a tree prefix of what fun returns beside the loss, got {names!r} for a tree of "
            f"the structure {jax.tree.structure(like)}: {error}"
        ) from error


def _check_aux_leaf(leaf: str, x: Any, name: str) -> None:
    is_number = jnp.issubdtype(x.dtype, np.number) or x.dtype == np.bool
    if not is_number or (name == "mean" and not is_gradient(x)):
        raise ValueError(
            f"leaf {leaf} of the aux is {x.dtype}, and has no {name!r}: convert it to float32 in fun, or give it "
            "another name in aux=, such as 'sum' for a count"
        )
    if name in ("max", "min") and jnp.issubdtype(x.dtype, np.complexfloating):
        raise ValueError(f"leaf {leaf} of the aux is {x.dtype}, and has no {name!r}: let fun return its real parts")


def _empty(name: str, like: Any) -> jax.Array:
    """What the micro-batches before the first one come to."""
    dtype = like.dtype
    if name == "sum":
        is_float = is_gradient(like)
        dtype = (
            _floats.upcast_dtype(like, _floats.accumulator_dtype(like))
            if is_float
            else jax.eval_shape(jnp.sum, like).dtype
        )
    start: Any = 0
    if name in ("max", "min"):
        if is_gradient(like):
            least, largest = -np.inf, np.inf
        else:
            least, largest = (False, True) if dtype == np.bool else (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max)
        start = least if name == "max" else largest
    return as_varying(jnp.full(like.shape, start, dtype), tuple(varying_axes(like)))
