"""TODO."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from shrewjax import _arguments, _floats, _gradients, _per_device
from shrewjax._gradients import is_gradient
from shrewjax._mesh import (
    AxisName,
    as_varying,
    is_mapped,
    is_replicated_over,
    newly_varying,
    require_replicated,
    require_sum_over,
)
from shrewjax._reductions import all_finite, any_device, row_sums
from shrewjax._states import described, fields
from shrewjax._wrapping import Flag

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

    def metrics(self) -> dict[str, Any]:
        """Returns what `shrewjax.metrics` shows."""
        return metrics_of_window(self)


def metrics_of_window(state: Any) -> dict[str, Any]:
    found = fields(state, "micro_step", "windows", "weight_sum", "window_bad", "dropped")
    if state.weight_sum.ndim > state.micro_step.ndim:  # the rows of several devices
        del found["weight_sum"]
    return found


class WindowStep(NamedTuple):
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
        sum_over: AxisName | None = None,
    ) -> None:
        self.accum_steps = _arguments.accum_steps(accum_steps)
        self._reduction = _arguments.choice("reduction", reduction, ("mean", "sum_over_weights", "sum"))
        self._dtype = _arguments.accumulator_dtype(accumulator_dtype)
        self._nonfinite = _arguments.choice(
            "nonfinite", nonfinite, ("propagate", "drop_microbatch", "drop_window", "extend_window")
        )
        self._axes = _arguments.axis_names("sum_over", sum_over)

    def init(self, params: Any) -> GradAccumulatorState:
        """An empty window for gradients like `params`, sharded as they are."""
        gradient_sum, scalar = self._zeros(params)
        wide = any(_floats.accumulator_dtype(x) == jnp.float64 for x in jax.tree.leaves(gradient_sum) if is_gradient(x))
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
        return self._advance(state, grads, weight, flush=False, when_full=False).state

    def ready(self, state: GradAccumulatorState) -> jax.Array:
        """Whether the window has as many micro-batches as it should. Shape (), bool."""
        return state.micro_step >= self._steps(state.windows)

    def take(self, state: GradAccumulatorState) -> tuple[Any, jax.Array, GradAccumulatorState]:
        """Closes whatever is open: its average, in the accumulator's dtype, whether there is one, and an empty window.

        There is none if the window is empty, has a weight of 0 or is to be discarded: the average is then zeros, and
        `windows` does not grow. Run the optimizer only if there is one. The average shares its buffer with the state:
        use it before the state is donated, best in one program with the optimizer:

          >>> window, inner = GradAccumulator(2), optax.sgd(1.0)
          >>> def close(params, opt_state, state):
          ...     average, closed, state = window.take(state)
          ...     def idle():
          ...         return params, opt_state
          ...     def apply():
          ...         updates, new = inner.update(average, opt_state, params)
          ...         return optax.apply_updates(params, updates), new
          ...     return *jax.lax.switch(closed.astype(int), [idle, apply]), state
          >>> params = jnp.zeros(2)
          >>> state = window.add(window.init(params), jnp.array([1.0, 2.0]))
          >>> jax.jit(close, donate_argnums=(0, 1, 2))(params, inner.init(params), state)[0]
          Array([-1., -2.], dtype=float32)

        The branch also spares XLA:CPU a copy of the accumulator. Write it as a `switch` whose first branch is the idle
        one, because only that branch returns its operands without a copy. `jax.lax.cond` puts the other one first on a
        GPU, and then copies parameters and optimizer state on every call.
        """
        stepped = self._advance(state, None, 0, flush=True, when_full=False)
        total, weighs = self._average(stepped)
        has_average = _both(stepped.closes, weighs)
        average = jax.tree.map(lambda x: jnp.where(has_average, x, jnp.zeros_like(x)), total)
        state = stepped.state._replace(windows=increment_if(has_average, state.windows))
        return average, jnp.asarray(has_average), state if self._axes else state._replace(gradient_sum=average)

    def reset(self, state: GradAccumulatorState) -> GradAccumulatorState:
        """Empties the window; what was counted stays."""
        return state._replace(
            micro_step=jnp.zeros_like(state.micro_step),
            weight_sum=jnp.zeros_like(state.weight_sum),
            window_bad=jnp.zeros_like(state.window_bad),
        )

    def step(self, state: GradAccumulatorState, grads: Any, weight: Any = 1) -> tuple[Any | None, GradAccumulatorState]:
        """Adds a micro-batch, and takes the average if that fills the window. Not for use under jit.

        Returns:
          The average, or None if the window is still open or closed without one; and the state.
        """
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((state, grads, weight))):
            raise ValueError("step decides on the host and cannot be traced: use add, ready and take under jit")
        weight = _arguments.weight(weight, {(), state.weight_sum.shape})  # while its value is known
        state = _jitted_add(self, state, grads, weight)
        if not self.ready(state):
            return None, state
        average, closed, state = self.take(state)
        return (average if closed else None), state

    def current_step(self, state: GradAccumulatorState) -> jax.Array:
        """The number of micro-batches in the open window. Shape (), int32."""
        return state.micro_step

    def _zeros(self, params: chex.ArrayTree) -> tuple[chex.ArrayTree, Callable[[Any], jax.Array]]:
        """The empty sums, and what makes an empty weight of a dtype."""
        axes = self._axes
        params = _gradients.parameter_arrays(params)
        if axes:
            mesh = _per_device.mesh_of(params, axes)

        def zeros(x: Any, dtype: Any, name: str) -> jax.Array:
            return _per_device.zero_rows(x, dtype, axes, mesh, name) if axes else jnp.zeros_like(x, dtype=dtype)

        def sum_like(path: _gradients.KeyPath, param: Any) -> jax.Array:
            if not is_gradient(param):
                return jnp.zeros((), jnp.int32)  # holds no sum
            dtype = self._dtype
            if dtype is None:
                dtype = _floats.upcast_dtype(param, _floats.accumulator_dtype(param))
            return zeros(param, dtype, _gradients.leaf_name(path))

        return jax.tree.map_with_path(sum_like, params), lambda dtype: zeros(jnp.zeros(()), dtype, "")

    def _steps(self, windows: jax.Array) -> jax.Array:
        given = self.accum_steps
        steps = jnp.asarray(_arguments.steps_of_schedule(given(windows)) if callable(given) else given, jnp.float32)
        # A NaN is not >= 1.
        return jnp.where(steps >= 1, jnp.ceil(jnp.minimum(steps, 2.0**24)), jnp.ones_like(steps)).astype(jnp.int32)

    def _advance(
        self, state: Any, grads: chex.ArrayTree | None, weight: Any, *, flush: Flag, when_full: bool
    ) -> WindowStep:
        """All arithmetic of the window: adds a micro-batch (None: there is none), then closes the window if it is due.

        Due is a window that is flushed or, `when_full`, full.
        """
        require_sum_over("accumulation", self._axes)
        if grads is not None:
            grads = self._checked_gradients(grads, state.gradient_sum)
        weight = _arguments.weight(weight, {(), state.weight_sum.shape})
        if not self._axes:
            require_replicated("weight", weight)
        dtype = state.weight_sum.dtype
        one, zero = jnp.ones((), dtype), jnp.zeros((), dtype)

        # Whatever a gradient of weight 0 holds, it contributes nothing, and is not bad.
        keeps: Flag = grads is not None and weight != 0
        bad: Flag = False
        if keeps is not False and self._nonfinite != "propagate":
            bad = self._is_bad(grads, keeps)
            keeps = keeps & ~bad
        kept_weight = jnp.where(keeps, jnp.asarray(weight).astype(dtype), zero)
        is_step: Flag = grads is not None
        if is_step and self._nonfinite == "extend_window":
            is_step = ~jnp.asarray(bad)

        micro_step = state.micro_step + jnp.asarray(is_step, jnp.int32)
        weight_sum = state.weight_sum + kept_weight
        window_bad = state.window_bad | bad if self._nonfinite == "drop_window" else state.window_bad
        due = flush
        if when_full and flush is not True:
            due = _either(flush, self._is_full(state.windows, micro_step, is_step))
        require_replicated("what closes a window (flush, accum_steps, micro_step)", due)
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
        factor = None if self._reduction != "mean" or (isinstance(weight, float) and weight == 1) else kept_weight
        if grads is None:
            grads = jax.tree.map(lambda _: None, state.gradient_sum)
        gradient_sum = jax.tree.map(
            lambda total, g: _advance_leaf(total, g, state.micro_step == 0, keeps, factor, scale),
            state.gradient_sum,
            grads,
        )

        new_state = state._replace(
            micro_step=jnp.where(due, jnp.zeros_like(micro_step), micro_step),
            weight_sum=jnp.where(due, zero, weight_sum),
            window_bad=jnp.where(due, jnp.zeros_like(window_bad), window_bad),
            dropped=increment_if(bad, state.dropped),
            gradient_sum=gradient_sum,
        )
        return WindowStep(new_state, weight_sum, _both(due, counts), weighs)

    def _average(self, stepped: WindowStep) -> tuple[chex.ArrayTree, Flag]:
        """The average of a window that closes, and whether it weighs anything. Rows meet here, once a window."""
        if not self._axes:
            return stepped.state.gradient_sum, True
        leaves, treedef = jax.tree.flatten(stepped.state.gradient_sum)
        weight_sum, *sums = row_sums([stepped.weight_sum, *(x for x in leaves if x.ndim)], self._axes)
        require_replicated("weight, summed over sum_over,", weight_sum)
        weighs = stepped.weighs if stepped.weighs is True else weight_sum != 0
        if self._reduction != "sum":
            scale = _reciprocal(weight_sum, weighs)
            sums = [_scaled(x, scale) for x in sums]
        left = iter(sums)
        return jax.tree.unflatten(treedef, [next(left) if x.ndim else x for x in leaves]), weighs

    def _emptied_rows(self, stepped: WindowStep, average: chex.ArrayTree) -> chex.ArrayTree:
        """The rows of a window that has closed, which mean nothing: the average, where it is as large as they are."""
        axes, rows = self._axes, stepped.state.gradient_sum
        if not axes or not is_mapped(axes):
            return rows
        # Because XLA keeps both otherwise: memory of the parameters' size on CUDA and TPU (tests/test_accelerators.py).
        return jax.tree.map(lambda row, x: as_varying(x[None], axes) if row.ndim else row, rows, average)

    def _without_rows(self, grads: chex.ArrayTree) -> chex.ArrayTree:
        """Returns the gradients, or, where they are rows, the shapes and dtypes of one row."""
        if not self._axes or is_mapped(self._axes):
            return grads
        return jax.tree.map(lambda g: jax.ShapeDtypeStruct(g.shape[1:], g.dtype), grads)

    def _is_bad(self, grads: chex.ArrayTree, keeps: Flag) -> jax.Array:
        """Whether a gradient that weighs something is not finite, on any device."""
        leaves = [g for g in jax.tree.leaves(grads) if is_gradient(g)]
        if not self._axes:
            return keeps & ~all_finite(leaves, self._axes)
        bad = jnp.any(keeps & ~all_finite(leaves, [()] * len(leaves), unit_dims=(0,)))
        return any_device([bad], self._axes)[0]

    def _checked_gradients(self, grads: chex.ArrayTree, gradient_sum: chex.ArrayTree) -> chex.ArrayTree:
        """At trace time: the gradients fit the accumulator, leaf by leaf. As rows, if that has rows."""
        axes, what = self._axes, "accumulator"
        grads = _gradients.gradient_arrays(grads)
        if axes and is_mapped(axes):

            def row(path: _gradients.KeyPath, grad: Any) -> Any:
                if is_gradient(grad) and is_replicated_over(grad, axes):
                    raise ValueError(
                        f"gradient leaf {_gradients.leaf_name(path)} is already reduced over sum_over={axes!r}. "
                        f"To keep gradients local, compute own = jax.lax.pcast(params, {axes!r}, to='varying') outside "
                        "the loss and differentiate with respect to own. To accumulate reduced gradients, leave out "
                        "sum_over"
                    )
                return grad[None] if is_gradient(grad) else grad

            grads = jax.tree.map_with_path(row, grads)
        elif axes:
            what = f"accumulator, which has a row for each device along {', '.join(map(repr, axes))}"
        _gradients.same_leaves(grads, gradient_sum, compared=is_gradient, what=what)

        def check(path: _gradients.KeyPath, total: jax.Array, grad: Any) -> None:
            if grad is None or grad.dtype == jax.dtypes.float0 or not (is_gradient(grad) or is_gradient(total)):
                return
            name = f"gradient leaf {_gradients.leaf_name(path)}"
            if not is_gradient(grad):
                raise ValueError(
                    f"{name} is {grad.dtype}, but its parameter is floating, with an accumulator of {total.dtype}. "
                    "Convert the gradient to the parameter's dtype. If there is no gradient, pass None in its place"
                )
            if not is_gradient(total):
                raise ValueError(
                    f"{name} is {grad.dtype}, but its parameter is not floating, and has no accumulator. Pass float0, "
                    "as jax.grad(..., allow_int=True) does, or None in its place"
                )
            if _floats.is_complex(grad) and not _floats.is_complex(total):
                raise ValueError(
                    f"{name} is {grad.dtype}, its accumulator {total.dtype}, which would lose the imaginary part"
                )
            along = newly_varying(grad, total)
            if along:
                raise ValueError(
                    f"{name} may differ between devices along {along}, its parameter does not: the gradients are not "
                    f"reduced. Reduce them first, by jax.lax.pmean(grads, {along}) for instance. Or pass "
                    f"sum_over={along}, and they are summed when the window closes"
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


def _advance_leaf(
    total: jax.Array, grad: Any, first: jax.Array, keeps: Flag, factor: jax.Array | None, scale: jax.Array | None
) -> jax.Array:
    """One read and one write: total + factor * grad, times scale. A window's first gradient replaces what was there."""
    if not is_gradient(total):
        return total
    wide = _floats.accumulator_dtype(total)
    fresh = jnp.zeros_like(total)
    if isinstance(keeps, jax.Array):
        keeps = _per_device.along(keeps, total)
    if grad is None or not is_gradient(grad) or keeps is False:  # or float0
        total = jnp.where(first, fresh, total)
    else:
        if factor is not None:
            grad = _floats.mul_real(_floats.upcast(grad, wide), _per_device.along(factor, total).astype(wide))
        grad = grad.astype(total.dtype)
        added = jnp.where(first, grad, total + grad)
        # Discarded by selection: 0 * inf is NaN.
        total = added if keeps is True else jnp.where(keeps, added, jnp.where(first, fresh, total))
    return total if scale is None else _scaled(total, scale)


def _scaled(total: jax.Array, scale: jax.Array) -> jax.Array:
    wide = _floats.accumulator_dtype(total)
    return _floats.mul_real(_floats.upcast(total, wide), scale.astype(wide)).astype(total.dtype)


def zero_like(x: Any) -> Any:
    return np.zeros(x.shape, x.dtype) if x.dtype == jax.dtypes.float0 else jnp.zeros_like(x)


def increment_if(flag: Flag, count: jax.Array) -> jax.Array:
    return jnp.where(flag, optax.safe_increment(count), count)


def _reciprocal(weight_sum: jax.Array, weighs: Flag) -> jax.Array:
    """Returns 1 / weight_sum. The sums are multiplied, because XLA:CPU writes out a quotient that is used twice.

    It is NaN for a weight sum out of range, because the reciprocal of a larger one is flushed to 0, and so are the
    products w g of a smaller one.
    """
    in_range = (weight_sum >= _arguments.LEAST_WEIGHT) & (weight_sum <= _arguments.LARGEST_WEIGHT)
    known = jnp.where(in_range, weight_sum, jnp.nan)
    return 1 / jnp.where(weighs, known, jnp.ones_like(weight_sum))


def _either(a: Flag, b: Flag) -> Flag:
    return True if a is True or b is True else a | b


def _both(a: Flag, b: Flag) -> Flag:
    return False if a is False or b is False else a & b
