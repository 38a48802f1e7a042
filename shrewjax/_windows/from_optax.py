"""The way from Optax's states to this package's, for a job that is running.

`from_optax` walks the saved state and a new one together. Nodes of one type are taken from the saved state, leaf by
leaf. `_Walk.converted` has the other pairs of types that correspond. Any other pair is an error.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shrewjax._base.axes import mapped_axes
from shrewjax._base.mesh import is_traced
from shrewjax._base.states import init_with_notes, nodes_in, without_variables
from shrewjax._base.trees import is_gradient
from shrewjax._base.types import AnyState, DType, Function, KeyPath, Leaf, PyTree
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
    walk = _Walk(noted)
    return walk.converted(_Paths((), ()), without_variables(opt_state), without_variables(fresh))


class _Paths(NamedTuple):
    """A place in both states. The paths differ below a window, because its fields have other names."""

    old: KeyPath
    new: KeyPath

    def child(self, path: KeyPath) -> "_Paths":
        return _Paths((*self.old, *path), (*self.new, *path))

    def field(self, old: str, new: str) -> "_Paths":
        return _Paths(
            (*self.old, jax.tree_util.GetAttrKey(old)), (*self.new, jax.tree_util.GetAttrKey(new))
        )

    def error(self, old: str, new: str, remedy: str = "") -> ValueError:
        old_path, new_path = map(jax.tree_util.keystr, self)
        return ValueError(
            f"opt_state{old_path} must correspond to tx.init(params){new_path}, {new}, got {old}. "
            + (remedy or _SAME_ORDER)
        )


_SAME_ORDER = (
    "Make tx of the transformations that made opt_state, in their order, with shrewjax's in the places of Optax's. "
    "Restore opt_state with the transformation that made it, and pass its parameters. Or, to start this part anew, put "
    "that of tx.init(params) in its place"
)


def _is_rule(state: AnyState) -> bool:
    """Returns whether a state is that of a clipping rule: one that measures and wraps nothing."""
    return hasattr(type(state), "metrics") and not hasattr(state, "inner_state")


class _Walk:
    """One pass over both states. `noted` has the arguments of the windows in the new one."""

    def __init__(self, noted: Callable[[Any], dict[str, Any] | None]) -> None:
        self.noted = noted

    def converted(self, at: _Paths, old: PyTree, fresh: PyTree) -> PyTree:
        match old, fresh:
            case optax.MultiStepsState(), AccumulateState():
                return self.window(at, old, fresh)
            case optax.ApplyIfFiniteState(), SkipNonfiniteState():
                return self.guard(at, old, fresh)
            case optax.EmptyState(), _ if _is_rule(fresh):
                return fresh
        return _mapped(at, old, fresh, self.converted, _taken)

    def window(
        self, at: _Paths, old: optax.MultiStepsState, fresh: AccumulateState
    ) -> AccumulateState:
        noted = self.noted(fresh.micro_step)
        if noted is None:
            raise at.error(
                _what(old), "a window of unknown reduction", "Leave out the jit around tx.init"
            )
        if fresh.sum_of_weights.ndim and mapped_axes()[0]:
            raise at.error(
                _what(old),
                "a window with sum_over inside jax.shard_map",
                "Call from_optax outside of it",
            )
        _check_skip_state(at.field("skip_state", "dropped"), old.skip_state, noted["nonfinite"])
        micro_step = _counter(at.field("mini_step", "micro_step"), old.mini_step, fresh.micro_step)
        # The weight and the sums of each row: of the whole window, or of one device.
        weight = micro_step.astype(fresh.sum_of_weights.dtype)
        factor = weight
        if noted["reduction"] == "sum":
            factor = jnp.ones_like(weight) / fresh.sum_of_weights.size

        def sum_of(at: _Paths, acc: PyTree, total: Leaf) -> jax.Array:
            return _sum_of(at, acc, total, factor, fresh.sum_of_weights.shape)

        def sums(at: _Paths, acc: PyTree, total: Leaf) -> Leaf:
            return _mapped(at, acc, total, sums, sum_of)

        of_sums = at.field("acc_grads", "gradient_sum")
        inner = at.field("inner_opt_state", "inner_state")
        # Optax does not keep the losses and the norms of the micro-batches. Infinite sums enter no average.
        unknown = jnp.where(micro_step > 0, jnp.inf, 0)
        noise = fresh.noise and fresh.noise._replace(
            square_sums=_filled(fresh.noise.square_sums, unknown)
        )
        return fresh._replace(
            micro_step=micro_step,
            windows=_counter(
                at.field("gradient_step", "windows"), old.gradient_step, fresh.windows
            ),
            sum_of_weights=_filled(fresh.sum_of_weights, weight),
            value_sum=_filled(fresh.value_sum, unknown),
            noise=noise,
            gradient_sum=sums(of_sums, old.acc_grads, fresh.gradient_sum),
            inner_state=self.converted(inner, old.inner_opt_state, fresh.inner_state),
        )

    def guard(
        self, at: _Paths, old: optax.ApplyIfFiniteState, fresh: SkipNonfiniteState
    ) -> SkipNonfiniteState:
        total, in_a_row, inner = (
            at.field("total_notfinite", "skipped"),
            at.field("notfinite_count", "consecutive"),
            at.field("inner_state", "inner_state"),
        )
        return fresh._replace(
            skipped=_counter(total, old.total_notfinite, fresh.skipped),
            consecutive=_counter(in_a_row, old.notfinite_count, fresh.consecutive),
            inner_state=self.converted(inner, old.inner_state, fresh.inner_state),
        )


def _mapped(
    at: _Paths, old: PyTree, fresh: PyTree, of_child: Function, of_leaf: Function
) -> PyTree:
    """Returns two nodes of one type as one: `of_child` of each pair of children, or `of_leaf` of two leaves."""
    (children, node), (fresh_children, fresh_node) = map(_one_level, (old, fresh))
    if () in children and () in fresh_children:
        return of_leaf(at, old, fresh)
    if type(old) is not type(fresh):
        is_window = isinstance(old, optax.MultiStepsState)
        remedy = "Wrap this part of tx in accumulate" if is_window else ""
        raise at.error(_what(old), _what(fresh), remedy)
    for path in children | fresh_children:
        if path not in children or path not in fresh_children:
            here = (
                _what(of[path]) if path in of else "nothing" for of in (children, fresh_children)
            )
            raise at.child(path).error(*here)
    # They differ in the order of keys, or in what a class keeps beside its leaves.
    if node != fresh_node:
        raise at.error(str(node), str(fresh_node))
    return node.unflatten(
        of_child(at.child(path), x, fresh_children[path]) for path, x in children.items()
    )


def _one_level(tree: PyTree) -> tuple[dict[KeyPath, PyTree], Any]:
    """Returns the children of a node by their paths, and its structure. A leaf is its own child, at the path ()."""
    children, node = jax.tree.flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    return dict(children), node


def _taken(at: _Paths, x: Leaf, like: Leaf) -> jax.Array:
    """Returns a leaf of the old state, as an array with the dtype and placement of the new leaf `like`.

    Raises unless their shapes and dtypes agree. A Python number is cast.
    """
    like = like if hasattr(like, "dtype") else jnp.asarray(like)
    # It may be a hyperparameter that a user set.
    if isinstance(x, bool | int | float) and _holds(like.dtype, x):
        x = jnp.asarray(x, like.dtype)
    if _what(x) != _what(like):
        raise at.error(_what(x), _what(like))
    return _placed(x, like)


def _holds(dtype: DType, x: float) -> bool:
    """Returns whether an array of this dtype holds a Python number of this kind and size."""
    if isinstance(x, bool) or dtype == jnp.bool:
        return isinstance(x, bool) and dtype == jnp.bool
    if jnp.issubdtype(dtype, jnp.integer):
        return isinstance(x, int) and jnp.iinfo(dtype).min <= x <= jnp.iinfo(dtype).max
    return jnp.issubdtype(dtype, jnp.inexact)


def _counter(at: _Paths, x: Leaf, like: jax.Array) -> jax.Array:
    """Returns a counter of the old state. Raises if it is known to be negative."""
    count = _taken(at, x, like)
    if not is_traced(count) and count < 0:
        raise at.error(str(int(count)), "a number >= 0", "Restore the state again")
    return count


def _sum_of(
    at: _Paths, acc: PyTree, total: Leaf, factor: jax.Array, rows: tuple[int, ...]
) -> jax.Array:
    """Returns a leaf of the sum of a window: `factor * acc` in each row, or in its only one."""
    if not is_gradient(total):
        return total  # the number in the place of an integer parameter
    is_sum = hasattr(acc, "dtype") and is_gradient(acc) and acc.shape == total.shape[len(rows) :]
    is_complex = is_sum and floats.is_complex(acc) and not floats.is_complex(total)
    if not is_sum or is_complex:
        remedy = "If the parameter is real, put the real part in its place" if is_complex else ""
        raise at.error(
            _what(acc),
            _what(total) + (f", with a row for each of {rows[0]} devices" if rows else ""),
            remedy,
        )
    acc = _placed(acc, total)
    dtype = floats.sum_dtype(acc)
    return _filled(total, floats.mul_real(floats.upcast(acc, dtype), factor.astype(dtype)))


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


def _check_skip_state(at: _Paths, skip_state: AnyState, nonfinite: str) -> None:
    """Raises if `optax.MultiSteps` skipped micro-batches by a rule that the new window does not have."""
    if isinstance(skip_state, tuple) and not skip_state:
        return
    of_nonfinite = {"should_skip", "num_not_finite"}
    is_nonfinite = isinstance(skip_state, dict) and skip_state.keys() == of_nonfinite
    if is_nonfinite and nonfinite == "extend_window":
        return
    rule = "another should_skip_update_fn"
    remedy = "To go on without it, pass opt_state with skip_state=()"
    if is_nonfinite:
        rule = "optax.skip_not_finite"
        remedy = f'Pass nonfinite="extend_window" to accumulate. {remedy}'
    raise at.error(f"that of {rule}", f"that of nonfinite={nonfinite!r}", remedy)


def _what(x: Leaf) -> str:
    is_array = hasattr(x, "shape") and hasattr(x, "dtype")
    return f"{x.dtype} of shape {x.shape}" if is_array else type(x).__name__
