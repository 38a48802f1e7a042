"""The way from Optax's states to this package's, for a job that is running.

`from_optax` walks the saved state and a new one together. Nodes of one type are taken from the saved state, leaf by
leaf. `_converted` has the other pairs of types that correspond. Any other pair is an error.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey, keystr

from shrewjax._base.axes import mapped_axes
from shrewjax._base.mesh import is_traced
from shrewjax._base.states import init_with_notes, nodes_in, without_variables
from shrewjax._base.trees import is_gradient
from shrewjax._base.types import AnyState, DType, KeyPath, Leaf, PyTree
from shrewjax._numerics import floats
from shrewjax._skipping.guards import SkipNonfiniteState
from shrewjax._windows.window_state import AccumulateState


def from_optax(opt_state: AnyState, tx: optax.GradientTransformation, params: PyTree) -> AnyState:
    r"""Returns the state of `tx` that goes on from the state of the corresponding Optax transformation.

    .. math:: \mathrm{gradient\_sum} = n \, \mathrm{acc\_grads}, \qquad
              \mathrm{sum\_of\_weights} = n = \mathrm{mini\_step}

    `tx` has the transformations that made `opt_state`, in their order, with this package's in the places of Optax's.
    The run goes on as with Optax, also in mid-window. Moments, positions in schedules and injected hyperparameters
    stay. A state does not record arguments, so another rate raises no error, and neither does another transformation
    with the same kind of state. The page "Moving here" shows the calls for Orbax and Flax.

    ==========================  ===================================================================================
    `opt_state` has             the new state has
    ==========================  ===================================================================================
    `MultiStepsState`           `AccumulateState`, a window of n micro-batches of weight 1; `windows` is
                                `gradient_step`
    `ApplyIfFiniteState`        `SkipNonfiniteState`; `consecutive` is `notfinite_count`, and `skipped` is
                                `total_notfinite`, which also counts the steps that Optax applied beyond its limit;
                                `limit_reached` is False until the next step
    `EmptyState`                itself, or the state of a clipping rule as `init` makes it
    any other node              the same, if its type is that of `tx.init`; otherwise an error
    an array                    the same, if shape and dtype are those of `tx.init`; otherwise an error
    a Python number             an array, if the dtype of `tx.init` holds its kind; otherwise an error
    a NumPy array               its numbers, placed as `tx.init` places its own, outside of jit
    ==========================  ===================================================================================

    The state does not say whether `acc_grads` is a mean or a sum (`use_grad_mean` of `optax.MultiSteps`), so `tx`
    decides: a sum with `reduction="sum"`, otherwise a mean. With `sum_over`, each device gets an equal share.
    `optax.skip_not_finite` corresponds to `nonfinite="extend_window"`. To go on without another
    `should_skip_update_fn`, pass the state with `skip_state=()`. `optax.microbatching` keeps no state.

    Measurements start again from nothing. Optax keeps no losses, so that of the open window is inf. If inner takes
    `value`, move at the end of a window. The averages of `noise_decay` skip the open window.

    Arrays keep their sharding, and the new state shares them with `opt_state`. A donated one needs less memory:
    `jax.jit(from_optax, static_argnums=1, donate_argnums=0)(opt_state, tx, params)`.

    Args:
      opt_state: the state, restored with the transformation that made it. That of `nnx.Optimizer` may have variables.
      tx: the transformation to go on with.
      params: the parameters, as `tx.init` takes them.

    Returns:
      A state of the structure, shapes and dtypes of `tx.init(params)`, with arrays in the places of variables.

    Raises:
      ValueError: a part of `opt_state` has no counterpart, which the message names; `tx` is no transformation.
      Exception: an error of `tx.init`.

    Example:
      >>> old = optax.MultiSteps(optax.chain(optax.clip(9.0), optax.sgd(1.0)), 2)
      >>> new = accumulate(optax.chain(clip_by_value(9.0), optax.sgd(1.0)), 2)
      >>> params = jnp.zeros(2)
      >>> _, state = old.update(jnp.array([1.0, 2.0]), old.init(params), params)
      >>> state = from_optax(state, new, params)
      >>> updates, state = new.update(jnp.array([5.0, 6.0]), state, params)
      >>> updates, state.windows
      (Array([-3., -4.], dtype=float32), Array(1, dtype=int32))

    Source: the states of Optax 0.2.6 to 0.2.8, and the arithmetic of `optax.MultiSteps` and `optax.apply_if_finite`.
    """
    is_state = nodes_in(params, (optax.MultiStepsState, optax.ApplyIfFiniteState))
    if is_state or not isinstance(tx, optax.GradientTransformation):
        raise ValueError(
            f"tx must be an optax.GradientTransformation and params no state, got {_what(tx)} and {_what(params)}. "
            "Pass opt_state, tx and params, in this order"
        )
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(opt_state)):
        raise ValueError(
            "opt_state must hold arrays, got shapes. Restore them first, or call jax.eval_shape"
        )
    fresh, noted = init_with_notes(tx.init, params)
    pair = _Pair(without_variables(opt_state), without_variables(fresh))
    return _converted(pair, noted)


class _Pair(NamedTuple):
    """Two nodes at one place of the states. Their paths differ below a window, because its fields have other names."""

    old: PyTree
    fresh: PyTree
    old_path: KeyPath = ()
    fresh_path: KeyPath = ()

    def child(self, old: PyTree, fresh: PyTree, old_key: KeyPath, key: KeyPath) -> "_Pair":
        return _Pair(old, fresh, (*self.old_path, *old_key), (*self.fresh_path, *key))

    def field(self, old_name: str, name: str) -> "_Pair":
        keys = (GetAttrKey(old_name),), (GetAttrKey(name),)
        return self.child(getattr(self.old, old_name), getattr(self.fresh, name), *keys)

    def error(self, remedy: str = "", *, expected: str = "", got: str = "") -> ValueError:
        return ValueError(
            f"opt_state{keystr(self.old_path)} must correspond to tx.init(params){keystr(self.fresh_path)}, "
            f"{expected or _what(self.fresh)}, got {got or _what(self.old)}. {remedy or _SAME_ORDER}"
        )


_SAME_ORDER = (
    "Make tx of the transformations that made opt_state, in their order, with shrewjax's in the places of Optax's. "
    "Restore opt_state with the transformation that made it, and pass its parameters. Or, to start this part anew, put "
    "that of tx.init(params) in its place"
)

Noted = Callable[[Leaf], dict[str, Any] | None]
"""Returns the arguments of a window in the new state, by its `micro_step`."""


def _converted(pair: _Pair, noted: Noted) -> PyTree:
    fresh = pair.fresh
    match pair.old, fresh:
        case optax.MultiStepsState(), AccumulateState():
            return _window(pair, noted)
        case optax.ApplyIfFiniteState(), SkipNonfiniteState():
            return fresh._replace(
                skipped=_counter(pair.field("total_notfinite", "skipped")),
                consecutive=_counter(pair.field("notfinite_count", "consecutive")),
                inner_state=_converted(pair.field("inner_state", "inner_state"), noted),
            )
        case optax.EmptyState(), _ if _is_rule(fresh):
            return fresh
    return _mapped(pair, _taken, partial(_converted, noted=noted))


def _is_rule(state: AnyState) -> bool:
    """Returns whether a state is that of a clipping rule: one that measures and wraps nothing."""
    return hasattr(type(state), "metrics") and not hasattr(state, "inner_state")


def _window(pair: _Pair, noted: Noted) -> AccumulateState:
    # 1. May the window be converted?
    fresh: AccumulateState = pair.fresh
    options = noted(fresh.micro_step)
    if options is None:
        raise pair.error(
            "Leave out the jit around tx.init", expected="a window of unknown reduction"
        )
    rows = fresh.sum_of_weights.shape
    if rows and mapped_axes()[0]:
        raise pair.error(
            "Call from_optax outside of it",
            expected="a window with sum_over inside jax.shard_map",
        )
    _check_skip_state(pair.field("skip_state", "dropped"), options["nonfinite"])
    # 2. A row has the weight of the whole window or of one device, and so has its sum.
    micro_step = _counter(pair.field("mini_step", "micro_step"))
    weight = micro_step.astype(fresh.sum_of_weights.dtype)
    factor = weight
    if options["reduction"] == "sum":
        factor = jnp.ones_like(weight) / fresh.sum_of_weights.size
    sum_of = partial(_sum_of, factor=factor, rows=rows)
    # 3. Optax does not keep the losses and the norms of the micro-batches. Infinite sums enter no average.
    unknown = jnp.where(micro_step > 0, jnp.inf, 0)
    noise = fresh.noise and fresh.noise._replace(
        square_sums=_filled(fresh.noise.square_sums, unknown)
    )
    return fresh._replace(
        micro_step=micro_step,
        windows=_counter(pair.field("gradient_step", "windows")),
        sum_of_weights=_filled(fresh.sum_of_weights, weight),
        value_sum=_filled(fresh.value_sum, unknown),
        noise=noise,
        gradient_sum=_mapped(pair.field("acc_grads", "gradient_sum"), sum_of),
        inner_state=_converted(pair.field("inner_opt_state", "inner_state"), noted),
    )


def _mapped(
    pair: _Pair,
    of_leaf: Callable[[_Pair], Leaf],
    of_child: Callable[[_Pair], PyTree] | None = None,
) -> PyTree:
    """Returns two trees as one: `of_leaf` of two leaves, or a node of `of_child` of each two children.

    Without `of_child`, this function itself maps the children.
    """
    (olds, node), (news, fresh_node) = map(_one_level, (pair.old, pair.fresh))
    if () in olds and () in news:
        return of_leaf(pair)
    if type(pair.old) is not type(pair.fresh):
        is_window = isinstance(pair.old, optax.MultiStepsState)
        raise pair.error("Wrap this part of tx in accumulate" if is_window else "")
    children = [
        pair.child(olds.get(path, _NOTHING), news.get(path, _NOTHING), path, path)
        for path in olds | news
    ]
    for child in children:
        if child.old is _NOTHING or child.fresh is _NOTHING:
            raise child.error()
    # They differ in the order of keys, or in what a class keeps beside its leaves.
    if node != fresh_node:
        raise pair.error(expected=str(fresh_node), got=str(node))
    return node.unflatten(map(of_child or partial(_mapped, of_leaf=of_leaf), children))


_NOTHING = object()


def _one_level(tree: PyTree) -> tuple[dict[KeyPath, PyTree], Any]:
    """Returns the children of a node by their paths, and its structure. A leaf is its own child, at the path ()."""
    children, node = jax.tree.flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    return dict(children), node


def _taken(pair: _Pair) -> jax.Array:
    """Returns a leaf of the old state, as an array with the dtype and placement of the new one.

    Raises unless their shapes and dtypes agree. A Python number is cast.
    """
    x, like = pair.old, pair.fresh
    like = like if hasattr(like, "dtype") else jnp.asarray(like)
    # It may be a hyperparameter that a user set.
    if isinstance(x, bool | int | float) and _holds(like.dtype, x):
        x = jnp.asarray(x, like.dtype)
    if _what(x) != _what(like):
        raise pair.error(expected=_what(like))
    return _placed(x, like)


def _holds(dtype: DType, x: float) -> bool:
    """Returns whether an array of this dtype holds a Python number of this kind and size."""
    if isinstance(x, bool):
        return dtype == jnp.bool
    if isinstance(x, int) and jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min <= x <= jnp.iinfo(dtype).max
    return jnp.issubdtype(dtype, jnp.inexact)


def _counter(pair: _Pair) -> jax.Array:
    """Returns a counter of the old state. Raises if it is known to be negative."""
    count = _taken(pair)
    if not is_traced(count) and count < 0:
        raise pair.error("Restore the state again", expected="a number >= 0", got=str(int(count)))
    return count


def _sum_of(pair: _Pair, factor: jax.Array, rows: tuple[int, ...]) -> jax.Array:
    """Returns a leaf of the sum of a window: `factor * acc_grads` in each row, or in its only one."""
    acc, total = pair.old, pair.fresh
    if not is_gradient(total):
        return total  # the number in the place of an integer parameter
    expected = _what(total)
    if rows:
        expected += f", with a row for each of {rows[0]} devices"
    shape = total.shape[len(rows) :]
    if not hasattr(acc, "dtype") or not is_gradient(acc) or acc.shape != shape:
        raise pair.error(expected=expected)
    if floats.is_complex(acc) and not floats.is_complex(total):
        remedy = "If the parameter is real, put the real part in its place"
        raise pair.error(remedy, expected=expected)
    acc = _placed(acc, total)
    dtype = floats.sum_dtype(acc)
    summed = floats.mul_real(floats.upcast(acc, dtype), factor.astype(dtype))
    return _filled(total, summed)


def _filled(zeros: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `x` in the dtype of `zeros`, and in each of its rows if it has rows."""
    x = x.astype(zeros.dtype)
    if x.shape == zeros.shape:
        return x
    return zeros + (x[None] if x.ndim else x)  # the sum has the sharding of the rows


def _placed(x: Leaf, like: jax.Array) -> jax.Array:
    """Returns an array that is on a device, or a NumPy array as `like` is placed. Rows have no place of their own."""
    if isinstance(x, jax.Array):
        return x
    has_place = not is_traced(like) and like.committed and x.shape == like.shape
    return jax.device_put(x, like.sharding) if has_place else jnp.asarray(x)


def _check_skip_state(pair: _Pair, nonfinite: str) -> None:
    """Raises if `optax.MultiSteps` skipped micro-batches by a rule that the new window does not have."""
    skip_state = pair.old
    if isinstance(skip_state, tuple) and not skip_state:
        return
    rule = "another should_skip_update_fn"
    remedy = "To go on without it, pass opt_state with skip_state=()"
    if isinstance(skip_state, dict) and "num_not_finite" in skip_state:
        if nonfinite == "extend_window":
            return
        rule = "optax.skip_not_finite"
        remedy = f'Pass nonfinite="extend_window" to accumulate. {remedy}'
    raise pair.error(remedy, expected=f"that of nonfinite={nonfinite!r}", got=f"that of {rule}")


def _what(x: Leaf) -> str:
    if x is _NOTHING:
        return "nothing"
    is_array = hasattr(x, "shape") and hasattr(x, "dtype")
    return f"{x.dtype} of shape {x.shape}" if is_array else type(x).__name__
