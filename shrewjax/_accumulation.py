"""The accumulation window: sum micro-batches, then let the optimizer see their average once.

`GradAccumulator` is the window alone and holds all of its arithmetic; `accumulate` wraps an optimizer in one.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from shrewjax import _checks, _norms, _rows
from shrewjax._checks import Tree
from shrewjax._reductions import (
    AxisName,
    all_finite,
    anywhere,
    demand_agreement,
    demand_axis_name,
    is_counted,
    is_mapped,
    is_same_along,
    newly_varying,
    row_sums,
    varying_over,
)
from shrewjax._states import State, described
from shrewjax._wrapping import (
    Flag,
    Gradients,
    check_unchanged,
    inner_transformation,
    run_or_skip,
    update_or_apply,
    wrapper,
)

Reduction = Literal["mean", "sum_over_weights", "sum"]
Nonfinite = Literal["propagate", "drop_microbatch", "drop_window", "extend_window"]
AccumSteps = int | jax.Array | Callable[[jax.Array], Any]


@described
class GradAccumulatorState(NamedTuple):
    """A window, open or empty. Its fields are a file format: a change to them breaks checkpoints."""

    micro_step: Annotated[jax.Array, "int32 (): micro-batches in the open window"]
    windows: Annotated[jax.Array, "int32 (): windows closed with a weight other than 0, without discarded ones"]
    weight_sum: Annotated[jax.Array, "float32 or float64 (), or (devices,): weight of the open window"]
    window_bad: Annotated[jax.Array, "bool (): the open window is to be discarded"]
    dropped: Annotated[jax.Array, "int32 (): non-finite micro-batches met so far, unless they propagate"]
    gradient_sum: Annotated[Any, "as in `AccumulateState`"]


@described
class AccumulateState(NamedTuple):
    """A window and the wrapped optimizer. Its fields are a file format: a change to them breaks checkpoints."""

    micro_step: Annotated[jax.Array, "int32 (): micro-batches in the open window"]
    windows: Annotated[jax.Array, "int32 (): windows so far in which inner ran"]
    applied: Annotated[jax.Array, "bool (): the last call ran inner"]
    weight_sum: Annotated[jax.Array, "float32 or float64 (), or (devices,): weight of the open window"]
    window_bad: Annotated[jax.Array, "bool (): the open window is to be discarded"]
    dropped: Annotated[jax.Array, "int32 (): non-finite micro-batches met so far, unless they propagate"]
    gradient_sum: Annotated[
        Any,
        "like the parameters, with a leading axis of all devices where there is an axis_name, in the accumulator's "
        "dtype; meaningless while micro_step is 0",
    ]
    inner_state: Annotated[Any, "the wrapped optimizer's state"]


_WINDOWS = (GradAccumulatorState, AccumulateState)
_State = TypeVar("_State", GradAccumulatorState, AccumulateState)


class _Folded(NamedTuple):
    """What a call has made of a window. Flags are Python bools where they are known at trace time."""

    state: Any  # after the call; where the window closes, `gradient_sum` is its average, but for rows
    weight_sum: jax.Array  # of the window, also where it closes
    closes: Flag  # it closes, and has an average as far as that is known without the other devices
    weighs: Flag  # known to have a weight other than 0


class GradAccumulator:
    r"""A window of micro-batches for loops driven from the host.

    .. math:: \bar g = \frac{\sum_i w_i g_i}{\sum_i w_i}

    The object holds the window's rules and no data; the data is a state that goes in and comes out, so that `add`
    and `take` can be jitted, with the state donated. One program that only adds, in place, and one that closes the
    window and runs the optimizer. Whatever a compiler makes of branches, the optimizer's cost falls on the second.

    The arguments, the rules at the edges and the errors are those of `accumulate`.

    Attributes:
      accum_steps: what was passed.

    Example:
      >>> window = GradAccumulator(2)
      >>> state = window.init({"w": jnp.zeros(2)})
      >>> average, state = window.step(state, {"w": jnp.array([1.0, 2.0])})
      >>> print(average)
      None
      >>> average, state = window.step(state, {"w": jnp.array([3.0, 4.0])})
      >>> average
      {'w': Array([2., 3.], dtype=float32)}

    In a training loop, jitted and in place:
      >>> add = jax.jit(window.add, donate_argnums=0)
      >>> state = add(state, {"w": jnp.array([1.0, 2.0])})
      >>> bool(window.ready(state)), int(window.current_step(state))
      (False, 1)
    """

    def __init__(
        self,
        accum_steps: AccumSteps,
        *,
        reduction: Reduction = "mean",
        accumulator_dtype: Any = None,
        nonfinite: Nonfinite = "propagate",
        axis_name: AxisName | None = None,
    ) -> None:
        self.accum_steps = _checks.accum_steps(accum_steps)
        self._reduction = _checks.choice("reduction", reduction, ("mean", "sum_over_weights", "sum"))
        self._dtype = _checks.accumulator_dtype(accumulator_dtype)
        self._nonfinite = _checks.choice(
            "nonfinite", nonfinite, ("propagate", "drop_microbatch", "drop_window", "extend_window")
        )
        self._axes = _checks.axis_names(axis_name)

    def init(self, params: Any) -> GradAccumulatorState:
        """An empty window for gradients like `params`, sharded as they are."""
        gradient_sum, scalar = self._zeros(params)
        wide = any(_norms.accumulator_dtype(x) == jnp.float64 for x in jax.tree.leaves(gradient_sum) if is_counted(x))
        return GradAccumulatorState(
            micro_step=jnp.zeros((), jnp.int32),
            windows=jnp.zeros((), jnp.int32),
            weight_sum=scalar(jnp.float64 if wide else jnp.float32),
            window_bad=jnp.zeros((), bool),
            dropped=jnp.zeros((), jnp.int32),
            gradient_sum=gradient_sum,
        )

    def add(self, state: GradAccumulatorState, grads: Any, weight: Any = 1) -> GradAccumulatorState:
        """The window with one more micro-batch. It goes on growing if nobody takes it when it is ready.

        Args:
          state: the window so far; may be donated.
          grads: the micro-batch's gradients, like the parameters given to `init`.
          weight: its number of examples or tokens, as in `accumulate`.
        """
        return self._fold(state, grads, weight, flush=False, when_full=False).state

    def ready(self, state: GradAccumulatorState) -> jax.Array:
        """Whether the window has as many micro-batches as it should. Shape (), bool."""
        return state.micro_step >= self._steps(state.windows)

    def take(self, state: GradAccumulatorState) -> tuple[Any, GradAccumulatorState]:
        """Closes whatever is open: its average, in the accumulator's dtype, and an empty window.

        The average is zeros if the window is empty, weighs nothing or is to be discarded; `windows` then stays as it
        was, which tells whether to run the optimizer. It shares its buffer with the state: use it before the state is
        donated, best in one program with the optimizer:

          >>> window, inner = GradAccumulator(2), optax.sgd(1.0)
          >>> def close(params, opt_state, state):
          ...     average, emptied = window.take(state)
          ...     def idle():
          ...         return params, opt_state
          ...     def apply():
          ...         updates, new = inner.update(average, opt_state, params)
          ...         return optax.apply_updates(params, updates), new
          ...     counts = emptied.windows != state.windows
          ...     return *jax.lax.switch(counts.astype(int), [idle, apply]), emptied
          >>> params = jnp.zeros(2)
          >>> state = window.add(window.init(params), jnp.array([1.0, 2.0]))
          >>> jax.jit(close, donate_argnums=(0, 1, 2))(params, inner.init(params), state)[0]
          Array([-1., -2.], dtype=float32)

        The branch also spares XLA:CPU a copy of the accumulator. Write it as a `switch` whose first branch is the idle
        one, because only that branch returns its operands without a copy. `jax.lax.cond` puts the other one first on a
        GPU, and then copies parameters and optimizer state on every call.
        """
        folded = self._fold(state, None, 0, flush=True, when_full=False)
        total, weighs = self._average(folded)
        has_average = _both(folded.closes, weighs)
        average = jax.tree.map(lambda x: jnp.where(has_average, x, jnp.zeros_like(x)), total)
        state = folded.state._replace(windows=_counted_if(has_average, state.windows))
        return average, state if self._axes else state._replace(gradient_sum=average)

    def reset(self, state: GradAccumulatorState) -> GradAccumulatorState:
        """Empties the window; what was counted stays."""
        return state._replace(
            micro_step=jnp.zeros_like(state.micro_step),
            weight_sum=jnp.zeros_like(state.weight_sum),
            window_bad=jnp.zeros_like(state.window_bad),
        )

    def step(self, state: GradAccumulatorState, grads: Any, weight: Any = 1) -> tuple[Any | None, GradAccumulatorState]:
        """Adds a micro-batch, and takes the average if that fills the window; else None. Not for use under jit."""
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((state, grads, weight))):
            raise ValueError("step decides on the host and cannot be traced: use add, ready and take under jit")
        weight = _checks.weight(weight, {(), state.weight_sum.shape})  # while its value is known
        state = _jitted_add(self, state, grads, weight)
        return self.take(state) if self.ready(state) else (None, state)

    def current_step(self, state: GradAccumulatorState) -> jax.Array:
        """The number of micro-batches in the open window. Shape (), int32."""
        return state.micro_step

    def _zeros(self, params: chex.ArrayTree) -> tuple[chex.ArrayTree, Callable[[Any], jax.Array]]:
        """The empty sums, and what makes an empty weight of a dtype."""
        axes = self._axes
        params = _checks.parameter_arrays(params)
        if axes:
            mesh = _rows.mesh_of(params, axes)

        def zeros(x: Any, dtype: Any, name: str) -> jax.Array:
            return _rows.zeros(x, dtype, axes, mesh, name) if axes else jnp.zeros_like(x, dtype=dtype)

        def sum_like(path: _checks.KeyPath, param: Any) -> jax.Array:
            if not is_counted(param):
                return jnp.zeros((), jnp.int32)  # holds no sum
            dtype = self._dtype
            if dtype is None:
                dtype = _norms.wide_dtype(param, _norms.accumulator_dtype(param))
            return zeros(param, dtype, _checks.leaf_name(path))

        return jax.tree.map_with_path(sum_like, params), lambda dtype: zeros(jnp.zeros(()), dtype, "")

    def _steps(self, windows: jax.Array) -> jax.Array:
        given = self.accum_steps
        steps = jnp.asarray(_checks.steps_of_schedule(given(windows)) if callable(given) else given, jnp.float32)
        # A NaN is not >= 1.
        return jnp.where(steps >= 1, jnp.ceil(jnp.minimum(steps, 2.0**24)), jnp.ones_like(steps)).astype(jnp.int32)

    def _fold(
        self, state: _State, grads: chex.ArrayTree | None, weight: Any, *, flush: Flag, when_full: bool
    ) -> _Folded:
        """All arithmetic of the window: adds a micro-batch (None: there is none), then closes the window if it is due.

        Due is a window that is flushed or, `when_full`, full.
        """
        demand_axis_name("accumulation", self._axes)
        if grads is not None:
            grads = self._checked_gradients(grads, state.gradient_sum)
        weight = _checks.weight(weight, {(), state.weight_sum.shape})
        if not self._axes:
            demand_agreement("weight", weight)
        dtype = state.weight_sum.dtype
        one, zero = jnp.ones((), dtype), jnp.zeros((), dtype)

        # Whatever a gradient of weight 0 holds, it contributes nothing, and is not bad.
        keeps: Flag = grads is not None and weight != 0
        bad: Flag = False
        if keeps is not False and self._nonfinite != "propagate":
            bad = self._is_bad(grads, keeps)
            keeps = keeps & ~bad
        own_weight = jnp.asarray(weight).astype(dtype)
        kept_weight = jnp.where(keeps, own_weight, zero)
        is_step: Flag = grads is not None
        if is_step and self._nonfinite == "extend_window":
            is_step = ~jnp.asarray(bad)

        micro_step = state.micro_step + jnp.asarray(is_step, jnp.int32)
        weight_sum = state.weight_sum + kept_weight
        window_bad = state.window_bad | bad if self._nonfinite == "drop_window" else state.window_bad
        due = flush
        if when_full and flush is not True:
            due = _either(flush, self._is_full(state.windows, micro_step, is_step))
        demand_agreement("what closes a window (flush, accum_steps, micro_step)", due)
        # A micro-batch that is known to weigh something settles it.
        weighs: Flag = True if keeps is True else weight_sum != 0
        counts = ~window_bad if self._axes else _both(weighs, ~window_bad)
        if weighs is True and self._nonfinite != "drop_window":
            counts = True

        # The average is made in the pass that closes the window: no pass of its own, and the buffer itself is what the
        # optimizer reads. (Of rows, it takes all devices' to make one.)
        scale = None
        if self._reduction != "sum" and due is not False and not self._axes:
            scale = jnp.where(due, _reciprocal(weight_sum, weighs), one)
        factor = None if self._reduction != "mean" or (isinstance(weight, float) and weight == 1) else own_weight
        if grads is None:
            grads = jax.tree.map(lambda _: None, state.gradient_sum)
        gradient_sum = jax.tree.map(
            lambda total, g: _fold_leaf(total, g, state.micro_step == 0, keeps, factor, scale),
            state.gradient_sum,
            grads,
        )

        new_state = state._replace(
            micro_step=jnp.where(due, jnp.zeros_like(micro_step), micro_step),
            weight_sum=jnp.where(due, zero, weight_sum),
            window_bad=jnp.where(due, jnp.zeros_like(window_bad), window_bad),
            dropped=_counted_if(bad, state.dropped),
            gradient_sum=gradient_sum,
        )
        return _Folded(new_state, weight_sum, _both(due, counts), weighs)

    def _average(self, folded: _Folded) -> tuple[chex.ArrayTree, Flag]:
        """The average of a window that closes, and whether it weighs anything. Rows meet here, once a window."""
        if not self._axes:
            return folded.state.gradient_sum, True
        leaves, treedef = jax.tree.flatten(folded.state.gradient_sum)
        weight_sum, *sums = row_sums([folded.weight_sum, *(x for x in leaves if x.ndim)], self._axes)
        demand_agreement("weight, summed over axis_name,", weight_sum)
        weighs = folded.weighs if folded.weighs is True else weight_sum != 0
        if self._reduction != "sum":
            scale = _reciprocal(weight_sum, weighs)
            sums = [_scaled(x, scale) for x in sums]
        left = iter(sums)
        return jax.tree.unflatten(treedef, [next(left) if x.ndim else x for x in leaves]), weighs

    def _emptied_rows(self, folded: _Folded, average: chex.ArrayTree) -> chex.ArrayTree:
        """The rows of a window that has closed, which mean nothing: the average, where it is as large as they are."""
        axes, rows = self._axes, folded.state.gradient_sum
        if not axes or not is_mapped(axes):
            return rows
        # Because XLA keeps both otherwise: memory of the parameters' size on CUDA and TPU (tests/test_accelerators.py).
        return jax.tree.map(lambda row, x: varying_over(x[None], axes) if row.ndim else row, rows, average)

    def _without_rows(self, grads: chex.ArrayTree) -> chex.ArrayTree:
        """Returns the gradients, or, where they are rows, the shapes and dtypes of one row."""
        if not self._axes or is_mapped(self._axes):
            return grads
        return jax.tree.map(lambda g: jax.ShapeDtypeStruct(g.shape[1:], g.dtype), grads)

    def _is_bad(self, grads: chex.ArrayTree, keeps: Flag) -> jax.Array:
        """Whether a gradient that weighs something is not finite, on any device."""
        leaves = [g for g in jax.tree.leaves(grads) if is_counted(g)]
        if not self._axes:
            return keeps & ~all_finite(leaves, self._axes)
        bad = jnp.any(keeps & ~all_finite(leaves, [()] * len(leaves), kept=(0,)))
        return anywhere([bad], self._axes)[0]

    def _checked_gradients(self, grads: chex.ArrayTree, gradient_sum: chex.ArrayTree) -> chex.ArrayTree:
        """At trace time: the gradients fit the accumulator, leaf by leaf. As rows, if that has rows."""
        axes, what = self._axes, "accumulator"
        grads = _checks.gradient_arrays(grads)
        if axes and is_mapped(axes):

            def row(path: _checks.KeyPath, grad: Any) -> Any:
                if is_counted(grad) and is_same_along(grad, axes):
                    raise ValueError(
                        f"gradient leaf {_checks.leaf_name(path)} is the same on all devices along axis_name {axes!r}: "
                        "it is reduced already. Differentiate with respect to parameters that are a device's own, made "
                        f"outside of what is differentiated by jax.lax.pcast(params, {axes!r}, to='varying'); or leave "
                        "out axis_name"
                    )
                return grad[None] if is_counted(grad) else grad

            grads = jax.tree.map_with_path(row, grads)
        elif axes:
            what = f"accumulator, which has a row for each device along {', '.join(map(repr, axes))}"
        _checks.same_leaves(grads, gradient_sum, compared=is_counted, what=what)

        def check(path: _checks.KeyPath, total: jax.Array, grad: Any) -> None:
            if grad is None or grad.dtype == jax.dtypes.float0 or not (is_counted(grad) or is_counted(total)):
                return
            name = f"gradient leaf {_checks.leaf_name(path)}"
            if not is_counted(grad):
                raise ValueError(
                    f"{name} is {grad.dtype}, but its parameter is floating, with an accumulator of {total.dtype}. "
                    "Convert the gradient to the parameter's dtype. If there is no gradient, pass None in its place"
                )
            if not is_counted(total):
                raise ValueError(
                    f"{name} is {grad.dtype}, but its parameter is not floating, and has no accumulator. Pass float0, "
                    "as jax.grad(..., allow_int=True) does, or None in its place"
                )
            if _norms.is_complex(grad) and not _norms.is_complex(total):
                raise ValueError(
                    f"{name} is {grad.dtype}, its accumulator {total.dtype}, which would lose the imaginary part"
                )
            along = newly_varying(grad, total)
            if along:
                raise ValueError(
                    f"{name} may differ between devices along {along}, its parameter does not: the gradients are not "
                    f"reduced. Reduce them first, by jax.lax.pmean(grads, {along}) for instance. Or pass "
                    f"axis_name={along}, and they are summed when the window closes"
                )

        jax.tree.map_with_path(check, gradient_sum, grads)
        return grads

    def _is_full(self, windows: jax.Array, micro_step: jax.Array, is_step: Flag) -> Flag:
        if isinstance(self.accum_steps, int) and self.accum_steps == 1 and is_step is True:
            return True
        # A step that does not count closes nothing, not even a window that a resumed run left longer than it should be.
        return _both(is_step, micro_step >= self._steps(windows))


# Jitted once for the class, because an object that holds a jitted function cannot be pickled.
_jitted_add = jax.jit(GradAccumulator.add, static_argnums=0)


def _fold_leaf(
    total: jax.Array, grad: Any, first: jax.Array, keeps: Flag, factor: jax.Array | None, scale: jax.Array | None
) -> jax.Array:
    """One read and one write: total + factor * grad, times scale. A window's first gradient replaces what was there."""
    if not is_counted(total):
        return total
    wide = _norms.accumulator_dtype(total)
    fresh = jnp.zeros_like(total)
    if isinstance(keeps, jax.Array):
        keeps = _rows.along(keeps, total)
    if grad is None or not is_counted(grad) or keeps is False:  # or float0
        total = jnp.where(first, fresh, total)
    else:
        if factor is not None:
            grad = _norms.times(_norms.widen(grad, wide), _rows.along(factor, total).astype(wide))
        grad = grad.astype(total.dtype)
        if keeps is not True:
            # Discarded by selection, because 0 * inf is NaN. Before the sum, because XLA otherwise leaves the
            # all-reduce of a gradient inside a loop on CUDA and TPU (tests/test_accelerators.py).
            grad = jnp.where(keeps, grad, fresh)
        total = jnp.where(first, grad, total + grad)
    return total if scale is None else _scaled(total, scale)


def _scaled(total: jax.Array, scale: jax.Array) -> jax.Array:
    wide = _norms.accumulator_dtype(total)
    return _norms.times(_norms.widen(total, wide), scale.astype(wide)).astype(total.dtype)


def accumulate(
    inner: optax.GradientTransformation,
    accum_steps: AccumSteps,
    *,
    reduction: Reduction = "mean",
    accumulator_dtype: Any = None,
    nonfinite: Nonfinite = "propagate",
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Lets an optimizer see the average of `accum_steps` micro-batches' gradients, once.

    .. math:: \bar g = \frac{\sum_i w_i g_i}{\sum_i w_i}

    On all but the last call of a window the updates are zeros, and neither inner's state nor its counters and
    schedules move. On the last one inner gets the average. The optimizer is wrapped, not preceded: an optimizer with a
    state must not see the calls that do not close a window. Put what belongs to the large batch, such as clipping,
    inside: `accumulate(optax.chain(clip_by_global_norm(1.0), optax.adamw(1e-3)), 4)`.

    `update` takes two more arguments, which are not passed on:

    * `weight=1`: the micro-batch's number of examples or tokens, a real scalar, also traced: 0, or between 2**-30 and
      2**100. Weights are summed in float32 (in float64 beside a float64 sum), so whole numbers count exactly to 2**24.
      Above that a weight of 1 is lost: count in larger units, such as batches, or sum in float64.
    * `flush=False`: closes the window with this call, however many micro-batches it has. A bool, also traced.

    ================================================  ==========================================================
    what happens                                      result
    ================================================  ==========================================================
    a micro-batch of weight 0                         contributes nothing, whatever its gradient holds; is a step
    a window of weight 0                              inner is not run, updates are zeros
    a known weight that is out of range or NaN        an error
    a weight sum that is out of range or NaN          the average is NaN; a `"sum"` is not divided, and stays
    a product w g, or a sum, too large for its dtype  the average is infinite or NaN, under every `nonfinite`
    a product w g below the smallest normal number    may count as 0; larger weights avoid it
    accum_steps = 1                                   what inner does, on every call
    accum_steps shrinks, by schedule or on resuming   the open window closes when it has that many or more
    a gradient of None where there is a parameter     adds zero
    integer, boolean and key parameters               hold no sum, get zero updates; gradients of the same, or float0
    ================================================  ==========================================================

    A micro-batch whose gradients hold a NaN or an infinity, by `nonfinite`:

    ====================  ======================================================================================
    `"propagate"`         is taken as it is: the average is what arithmetic says, and the next window is clean
    `"drop_microbatch"`   weighs 0; the window closes on schedule, over the others
    `"drop_window"`       takes the whole window with it: zero updates, inner is not run
    `"extend_window"`     is as if it had never come: the window waits for another
    ====================  ======================================================================================

    `nonfinite` looks at the gradients alone. `skip_nonfinite` inside, around the optimizer, looks at the average.

    What surprises: unknown keywords go to inner, as everywhere in Optax, so a misspelt `weights=` is not noticed here.
    A gradient tree of `None`s is a micro-batch of zeros; to close a window without one, use `flush`.
    `optax.masked(accumulate(...), mask)` lets the raw gradients of masked-out leaves through on every call. A link
    after `accumulate` in a chain moves on every call. A line search, or a rule that looks at the loss, sees the
    `value` of the closing call.

    Args:
      inner: the transformation to wrap, usually a whole optimizer.
      accum_steps: calls a window. An int >= 1, a scalar array, or a function of `windows` (int32) that returns one, or
        a float, which is rounded up. In an array, a number below 1 or NaN counts as 1.
      reduction: `"mean"` for gradients of a mean loss: sum(w g) / sum(w), equal to the gradient of the one large
        batch. `"sum_over_weights"` for gradients of a summed loss: sum(g) / sum(w). `"sum"`: sum(g).
      accumulator_dtype: dtype of the sum; by default the wider of float32 and the parameter's (complex for complex).
        The average is cast to the gradient's dtype on its way into inner, within 2 ulp of the exact quotient.
      nonfinite: what to do with a bad micro-batch, see above; counted in the state as `dropped`. All but `"propagate"`
        read the gradients once more.
      axis_name: the mapped axis, or axes, over which the gradients are still to be summed, see below. `()` says that
        they are the same on every device, which must be said where no type tells it (`check_vma=False`, `jax.pmap`).

    Many devices: where the gradients come reduced, as under `jax.jit`, there is nothing to do, and every micro-step
    costs an all-reduce. With `axis_name="data"` each device adds up its own gradients, and sum(w g) and sum(w) cross
    the network once a window, when it closes, in one all-reduce:

    * in `jax.shard_map` over that axis the gradients are a device's own, and `weight` is its own number of examples (of
      all devices that share its batch, where parameters are sharded over other axes: what the loss is divided by). By
      default JAX reduces the gradient of replicated parameters as it makes it; to keep it local, let
      `own = jax.lax.pcast(params, "data", to="varying")` and then take `jax.grad(loss)(own)`. Under `check_vma=False`
      it is local already; do not accumulate over an axis that parameters are sharded over.
    * under plain `jax.jit` the gradients, as made by `jax.vmap`, have a leading axis with a row for each device, and
      `weight` is a scalar or a vector of them.
    * in `jax.vmap(..., axis_name="data")` each row is such a device; map `init` likewise.

    The sums and the weight in the state have such a leading axis, sharded over `axis_name`: `init` finds its size from
    parameters that are placed on a mesh, or from `jax.set_mesh`; `state_specs` has the specs for `shard_map`;
    `redistribute` moves a state to another number of devices. If `nonfinite` is not `"propagate"`, one flag is reduced
    on every micro-step: a micro-batch that is bad on one device is bad on all. Parameters may be sharded over other
    axes of the mesh. The transformations inside see the average, the same on every device along `axis_name`: where they
    need an `axis_name` of their own (`check_vma=False`, `jax.pmap`), it is that of the parameters' shards, or `()`.

    Returns:
      A transformation with state `AccumulateState`, whose structure, shapes and dtypes never change.

    Raises:
      ValueError: an argument is not as described; `inner` is itself what `accumulate` returned; a complex gradient
        comes for a real accumulator, an integer one for a floating parameter; a gradient is known to be reduced over
        `axis_name` already, or, without it, known not to be; devices may differ on when a window closes; no type tells
        whether gradients are reduced, and `axis_name` is missing; `init` does not find the mesh.
      AssertionError: from chex, while tracing: the gradients' structure or a leaf's shape differs from the parameters
        given to `init`, or inner changes the structure, shapes or dtypes of its state.

    Example:
      >>> tx = accumulate(optax.sgd(1.0), 2)
      >>> params = jnp.zeros(2)
      >>> state = tx.init(params)
      >>> updates, state = tx.update(jnp.array([1.0, 2.0]), state, params)
      >>> updates, state.micro_step
      (Array([0., 0.], dtype=float32), Array(1, dtype=int32))
      >>> updates, state = tx.update(jnp.array([5.0, 6.0]), state, params, weight=3)
      >>> updates, state.windows
      (Array([-4., -5.], dtype=float32), Array(1, dtype=int32))

    The weighted mean is the large batch's gradient by linearity; the mean of means is not, see "Bugs in LLM Training -
    Gradient Accumulation Fix", Unsloth, 2024.
    """
    if isinstance(inner, _Accumulation):
        raise ValueError("inner is itself an accumulation: multiply the accum_steps instead of nesting them")
    wrapped = inner_transformation(inner)
    window = GradAccumulator(
        accum_steps,
        reduction=reduction,
        accumulator_dtype=accumulator_dtype,
        nonfinite=nonfinite,
        axis_name=axis_name,
    )

    def init_fn(params: optax.Params) -> AccumulateState:
        return AccumulateState(
            **window.init(params)._asdict(), applied=jnp.zeros((), bool), inner_state=wrapped.init(params)
        )

    def step_fn(
        gradients: Gradients,
        state: AccumulateState,
        params: optax.Params | None,
        /,
        *,
        apply: bool,
        runs: Flag,
        **extra_args: Any,
    ) -> tuple[Any, AccumulateState]:
        def run() -> tuple[Any, AccumulateState]:
            return fold_and_close(gradients(), state, params, apply=apply, **extra_args)

        return run_or_skip(runs, run, state, params, apply=apply)

    def fold_and_close(
        grads: optax.Updates,
        state: AccumulateState,
        params: optax.Params | None,
        /,
        *,
        apply: bool,
        weight: Any = 1,
        flush: Any = False,
        **extra_args: Any,
    ) -> tuple[Any, AccumulateState]:
        folded = window._fold(state, grads, weight, flush=_checks.flag("flush", flush), when_full=True)
        like = window._without_rows(_checks.gradient_arrays(grads))
        typed_params = _checks.parameter_arrays(params)

        def run_inner(average: chex.ArrayTree, runs: Flag) -> tuple[Any, Any]:
            def gradients() -> optax.Updates:
                return _as_gradients(average, like, typed_params)

            return update_or_apply(wrapped, gradients, state.inner_state, params, apply=apply, runs=runs, **extra_args)

        def reduce_and_run() -> tuple[Any, tuple[Any, ...]]:
            average, weighs = window._average(folded)
            returned, inner_state = run_inner(average, True)
            if weighs is not True:  # selected, because a branch within a branch would copy on CUDA
                unchanged = params if apply else optax.tree.zeros_like(returned), state.inner_state
                returned, inner_state = optax.tree.where(weighs, (returned, inner_state), unchanged)
            return returned, (inner_state, jnp.asarray(weighs), window._emptied_rows(folded, average))

        gradient_sum = folded.state.gradient_sum
        if window._axes:
            idle = (state.inner_state, jnp.zeros((), bool), gradient_sum)
            returned, after = run_or_skip(folded.closes, reduce_and_run, idle, params, apply=apply)
            inner_state, applied, gradient_sum = after
        else:
            returned, inner_state = run_inner(gradient_sum, folded.closes)
            applied = jnp.asarray(folded.closes)
        returned = _with_integers(returned, like, params if apply else None)
        new_state = folded.state._replace(
            windows=_counted_if(applied, state.windows),
            applied=applied,
            gradient_sum=gradient_sum,
            inner_state=inner_state,
        )
        check_unchanged(new_state, state, "the accumulation's state changed")
        return returned, new_state

    def update_fn(
        updates: optax.Updates,
        state: AccumulateState,
        params: optax.Params | None = None,
        *,
        weight: Any = 1,
        flush: Any = False,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AccumulateState]:
        return fold_and_close(updates, state, params, apply=False, weight=weight, flush=flush, **extra_args)

    return _Accumulation(init_fn, wrapper(update_fn, step_fn))


def apply_gradients(
    tx: optax.GradientTransformation,
    grads: Any,
    opt_state: State,
    params: Tree,
    **extra_args: Any,
) -> tuple[Tree, State]:
    """`tx.update` and `optax.apply_updates` in one, for any Optax transformation.

    For what `accumulate` returned, a call that does not close the window touches nothing but the accumulator: neither
    updates nor parameters are read or written. Programs compiled for CPU, GPU and TPU are tested to do so.
    Donate both, in a step that takes them in the order in which it returns them, such as
    `jax.jit(step, donate_argnums=(0, 1))` for `step(params, opt_state, ...) -> (params, opt_state)`: JAX pairs donated
    buffers with results in order, and a wrong pair costs a copy. An accumulation inside another transformation, such
    as `optax.chain`, is not seen; the result is the same. Parameters to which nothing can be added stay: keys, and
    those whose gradient is float0.

    Args:
      tx: any transformation.
      grads: the gradients.
      opt_state: its state.
      params: the parameters.
      **extra_args: passed to `tx.update`, `weight` and `flush` included.

    Returns:
      The new parameters and the new state.

    Raises:
      What `tx.update` raises.

    Example:
      >>> tx = accumulate(optax.sgd(1.0), 2)
      >>> params = jnp.zeros(2)
      >>> state = tx.init(params)
      >>> params, state = apply_gradients(tx, jnp.array([1.0, 2.0]), state, params)
      >>> params, state = apply_gradients(tx, jnp.array([3.0, 4.0]), state, params)
      >>> params
      Array([-2., -3.], dtype=float32)
    """
    # Outside of jit, a NumPy array would come back itself from a call that leaves it alone, and be shared.
    params = jax.tree.map(jnp.asarray, params)
    return update_or_apply(tx, lambda: grads, opt_state, params, apply=True, runs=True, **extra_args)


def flush(tx: optax.GradientTransformation, opt_state: State, params: Tree, **extra_args: Any) -> tuple[Tree, State]:
    """Closes a window that is open, at the end of an epoch or of training, over the micro-batches that it has.

    The divisor is the weight that came, not `accum_steps`. An empty window is left alone: zero updates. To close a
    window together with its last micro-batch, pass `flush=True` to `update` instead. Through `nnx.Optimizer`, which
    holds state and parameters as variables, call `optimizer.update(model, grads, weight=0, flush=True)` with any
    gradients: at weight 0 they contribute nothing.

    Args:
      tx: what `accumulate` returned. An accumulation inside another transformation (`optax.chain`, `optax.masked`,
        `optax.inject_hyperparams`) cannot be flushed from outside: what is around it would see a gradient that never
        was. There, pass `flush=True` to `update`, as above.
      opt_state: its state.
      params: the parameters; the average is cast to their dtypes.
      **extra_args: passed to the wrapped optimizer.

    Returns:
      The updates and the new state.

    Raises:
      ValueError: `tx` is not what `accumulate` returned.

    Example:
      >>> tx = accumulate(optax.sgd(1.0), 4)
      >>> params = jnp.zeros(2)
      >>> _, state = tx.update(jnp.array([1.0, 2.0]), tx.init(params), params)
      >>> updates, state = flush(tx, state, params)
      >>> updates
      Array([-1., -2.], dtype=float32)
    """
    if not isinstance(tx, _Accumulation):
        raise ValueError(
            f"tx must be what accumulate returned itself, got {tx!r}. Where accumulate is inside of another "
            "transformation, pass flush=True to update with the last micro-batch. Or call "
            "tx.update(grads, opt_state, params, weight=0, flush=True) with any finite grads, which contribute nothing"
        )
    no_gradients = jax.tree.map(lambda _: None, params)
    return tx.update(no_gradients, opt_state, params, weight=0, flush=True, **extra_args)


def check_window(opt_state: Any, accum_steps: int, *, weight: Any = 1) -> None:
    """Checks the values in a window, where wanted: under `chex.chexify`, or outside of jit.

    For every window found in the state: `0 <= micro_step < accum_steps` (`<=` for `GradAccumulator`, whose full window
    waits to be taken) and a finite `weight_sum >= 0`; and a finite `weight >= 0`. What is known while tracing is always
    checked by `accumulate` itself; values can only be checked when the program runs.

    Args:
      opt_state: a state that holds windows, at any depth.
      accum_steps: the length of a window.
      weight: the weight about to be passed to `update`.

    Returns:
      Nothing.

    Raises:
      AssertionError: from chex; under `chex.chexify` when the program runs.
      RuntimeError: from chex; in a jitted function that is not inside `chex.chexify`.
      ValueError: the state holds no window.

    Example:
      >>> tx = accumulate(optax.sgd(0.1), 2)
      >>> @chex.chexify
      ... @jax.jit
      ... def step(grads, state, weight):
      ...     check_window(state, 2, weight=weight)
      ...     return tx.update(grads, state, weight=weight)
      >>> updates, state = step(jnp.ones(2), tx.init(jnp.zeros(2)), 3.0)
      >>> chex.block_until_chexify_assertions_complete()
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, _WINDOWS))
    windows = [x for x in nodes if isinstance(x, _WINDOWS)]
    if not windows:
        raise ValueError("check_window found no window in the state")
    _assert_values(jnp.isfinite(weight) & (jnp.asarray(weight) >= 0), f"weight {weight} is not finite and >= 0")
    for window in windows:
        longest = accum_steps - isinstance(window, AccumulateState)
        in_range = (window.micro_step >= 0) & (window.micro_step <= longest)
        _assert_values(in_range, f"micro_step is not between 0 and {longest}")
        _assert_values(jnp.isfinite(window.weight_sum) & (window.weight_sum >= 0), "weight_sum is not finite and >= 0")


def redistribute(opt_state: State, like: State) -> State:
    """A state with windows of `accumulate(..., axis_name=...)`, in mid-window or not, on another number of devices.

    A window has a row for each device along `axis_name`, and only their sum means something: it goes to the first of
    as many rows as there are devices now. The other arrays stay as they are. All are placed as those of `like`.

    A checkpoint holds the rows of the devices that wrote it: that is what it has to be restored as, before it comes
    here. `examples/train_sharded.py` does so with Orbax.

    Args:
      opt_state: a state, from a checkpoint for instance, or a tree that holds one, such as `(params, state)`.
      like: the same as it is placed now, such as what `tx.init` makes of the parameters.

    Returns:
      The state with the values of `opt_state` and the shapes and shardings of `like`.

    Raises:
      ValueError: the two differ in structure, in a dtype, or in a shape but for the number of rows.

    Example:
      >>> tx = accumulate(optax.sgd(1.0), 2, axis_name="data")
      >>> def placed(axis_size):
      ...     mesh = jax.make_mesh((axis_size,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      ...     return jax.device_put(jnp.zeros(3), jax.sharding.NamedSharding(mesh, jax.P()))
      >>> state = tx.init(placed(jax.device_count()))
      >>> redistribute(state, like=tx.init(placed(1))).gradient_sum.shape
      (1, 3)
    """
    given, expected = jax.tree.structure(opt_state), jax.tree.structure(like)
    if str(given) != str(expected):
        raise ValueError(f"opt_state has the structure {given}, like has {expected}")

    def place(path: _checks.KeyPath, x: Any, like: Any) -> jax.Array:
        if not isinstance(like, jax.Array):
            raise ValueError(f"leaf {_checks.leaf_name(path)} of like is no array on a device, but {like!r}")
        x = x if isinstance(x, jax.Array) else jnp.asarray(x)
        if (x.shape, x.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"leaf {_checks.leaf_name(path)} is {x.dtype} of shape {x.shape}, like has {like.dtype} of {like.shape}"
            )
        if like.committed:
            return jax.device_put(x, like.sharding)
        # What is on no device in particular, such as a counter, stays so, or no program would take both.
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = jnp.asarray(np.asarray(jax.random.key_data(x)))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return jnp.asarray(np.asarray(x))

    def move(x: Any, like: Any) -> Any:
        """Rows, as many as there are now; what does not fit is left for `place` to refuse."""
        return _rows.moved(x, like) if x.ndim == like.ndim > 0 and x.shape[1:] == like.shape[1:] else x

    def place_window(path: _checks.KeyPath, window: Any, like: Any) -> Any:
        if not isinstance(window, _WINDOWS):
            return place(path, window, like)
        if window.weight_sum.ndim:
            window = window._replace(
                weight_sum=move(window.weight_sum, like.weight_sum),
                gradient_sum=jax.tree.map(move, window.gradient_sum, like.gradient_sum),
            )
        return type(window)(*(jax.tree.map_with_path(place, *fields) for fields in zip(window, like, strict=True)))

    return jax.tree.map_with_path(place_window, opt_state, like, is_leaf=lambda x: isinstance(x, _WINDOWS))


def _assert_values(holds: jax.Array, message: str) -> None:
    chex.assert_trees_all_equal(holds, jnp.ones_like(holds), custom_message=message)


class _Accumulation(optax.GradientTransformationExtraArgs):
    """What `accumulate` returns, known by its type."""


def _as_gradients(average: chex.ArrayTree, like: chex.ArrayTree, params: optax.Params | None) -> optax.Updates:
    """The average in the gradients' dtypes; where there was none, in the parameters'."""

    def cast(x: jax.Array, grad: Any, param: Any = None) -> Any:
        grad = param if grad is None else grad
        if grad is None:
            return x
        if not is_counted(grad):
            return _zero_like(grad)
        return x if _norms.is_complex(x) and not _norms.is_complex(grad) else x.astype(grad.dtype)

    return jax.tree.map(cast, average, like) if params is None else jax.tree.map(cast, average, like, params)


def _with_integers(returned: chex.ArrayTree, like: chex.ArrayTree, params: optax.Params | None) -> chex.ArrayTree:
    """Returns updates with zeros (new parameters with `params`) in the leaves that hold no sum."""

    def keep(grad: Any, new: Any, old: Any = None) -> Any:
        if grad is None or is_counted(grad):
            return new
        return _zero_like(grad) if old is None else old

    trees = (returned,) if params is None else (returned, params)
    return jax.tree.map(keep, like, *trees, is_leaf=lambda x: x is None)


def _zero_like(x: Any) -> Any:
    return np.zeros(x.shape, x.dtype) if x.dtype == jax.dtypes.float0 else jnp.zeros_like(x)


def _counted_if(flag: Flag, count: jax.Array) -> jax.Array:
    return jnp.where(flag, optax.safe_increment(count), count)


def _reciprocal(weight_sum: jax.Array, weighs: Flag) -> jax.Array:
    """Returns 1 / weight_sum. The sums are multiplied, because XLA:CPU writes out a quotient that is used twice.

    It is NaN for a weight sum out of range, because the reciprocal of a larger one is flushed to 0, and so are the
    products w g of a smaller one.
    """
    in_range = (weight_sum >= _checks.LEAST_WEIGHT) & (weight_sum <= _checks.LARGEST_WEIGHT)
    known = jnp.where(in_range, weight_sum, jnp.nan)
    return 1 / jnp.where(weighs, known, jnp.ones_like(weight_sum))


def _either(a: Flag, b: Flag) -> Flag:
    return True if a is True or b is True else a | b


def _both(a: Flag, b: Flag) -> Flag:
    return False if a is False or b is False else a & b
