"""The accumulation window: the arithmetic that adds micro-batches and averages them.

`accumulate` and `GradAccumulator` go through `Window.advance`, which decides in this order.
`accumulated_value_and_grad` knows how many micro-batches it has: it adds them by `Window.update`, or `adder_in_loop`
where a scan of the loss adds them itself, and divides once, by `Window.finalize`.

1. Is the micro-batch kept? Its weight must not be 0. Unless `nonfinite` is `"propagate"`, its gradients must also be
   finite on all devices.
2. Is it a step, which counts towards `accum_steps`? All are, except a non-finite one under `"extend_window"`.
3. Is the window closing? It closes on a flush, or if this step makes it full.
4. Does the closing window have an average? Its weight must not be 0, and `"drop_window"` must not discard it. With
   partial sums, `average` tells whether it has a weight.
5. Update each leaf in one pass (`_advance_leaf`): select, replace or add, and divide if the window is closing. The sum
   is not cleared on closing. The first gradient of the next window overwrites it, which saves a write.
6. Reset the counters of a closing window.

The loss (`value`) is added by the same weights, and, with `noise_decay`, the squared norms of the gradients (`_noise`).

With `sum_over`, sums and weights are partial until `average` takes their total. `_devices` has all that differs then.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from shrewjax._base import arguments, trees
from shrewjax._base.mesh import partitioned_like, placed_like
from shrewjax._base.states import increment_if, require_made_with
from shrewjax._base.trees import is_gradient
from shrewjax._base.types import (
    AnyState,
    ArrayTree,
    AxisName,
    DType,
    Flag,
    KeyPath,
    Leaf,
    Number,
    PyTree,
    Scalar,
)
from shrewjax._numerics import floats
from shrewjax._numerics.reductions import device_sums
from shrewjax._programs.scatters import unknown_true
from shrewjax._windows import _noise
from shrewjax._windows._devices import Devices, expand_like
from shrewjax._windows.window_state import GradAccumulatorState

Reduction = Literal["mean", "sum_over_weights", "sum"]


Nonfinite = Literal["propagate", "drop_micro_batch", "drop_window", "extend_window"]


NonfiniteOfBatch = Literal["propagate", "drop_micro_batch"]
"""The policies of `accumulated_value_and_grad`, whose window is one batch."""


AccumSteps = int | jax.Array | Callable[[jax.Array], Number]


class Advanced(NamedTuple):
    """The result of `Window.advance`. Flags are Python bools if they are known at trace time."""

    state: AnyState  # if the window closes, `gradient_sum` is its average, or partial
    sum_of_weights: jax.Array  # the window's weight, not reset if the window closes
    closes: Flag  # the window closes, and is not discarded; with a weight it has an average
    has_weight: Flag  # the weight is not 0; of partial ones, the device's own


class Average(NamedTuple):
    gradients: ArrayTree  # the average in the accumulator's dtypes
    has_weight: Flag  # the window's weight, over all devices, is not 0
    loss: jax.Array  # of `value`, divided as the gradients are
    weight: jax.Array  # the window's, over all devices
    noise: AnyState  # the state of the noise with this window
    total: ArrayTree  # the gradients before the division, if sums are partial


class Window:
    """The rules of a window, without its data. The arguments are those of `accumulate`."""

    def __init__(
        self,
        accum_steps: AccumSteps = 1,
        *,
        reduction: Reduction = "mean",
        accumulator_dtype: DType = None,
        nonfinite: Nonfinite = "propagate",
        sum_over: AxisName | None = None,
        sharded_over: AxisName | None = None,
        noise_decay: Number | None = None,
    ) -> None:
        self.accum_steps = arguments.accum_steps(accum_steps)
        self._reduction = arguments.choice("reduction", reduction, get_args(Reduction))
        self._dtype = arguments.inexact_dtype("accumulator_dtype", accumulator_dtype)
        self.nonfinite = arguments.choice("nonfinite", nonfinite, get_args(Nonfinite))
        self.axes = arguments.axis_names("sum_over", sum_over)
        sharded_axes = arguments.axis_names("sharded_over", sharded_over)
        self.devices = Devices(self.axes, sharded_axes)
        self._noise_decay = None if noise_decay is None else _noise.checked_decay(noise_decay)

    def init(self, params: PyTree) -> GradAccumulatorState:
        """Returns an empty window for gradients like `params`, with the sharding of `params`."""
        params = trees.parameter_arrays(params)
        zeros_like = self.devices.zeros_maker(params)

        def empty_sum(path: KeyPath, param: Leaf) -> jax.Array:
            if not is_gradient(param):
                return jnp.zeros((), jnp.int32)  # has no sum
            dtype = self._dtype
            if dtype is None:
                dtype = floats.upcast_dtype(param, floats.sum_dtype(param))
            return zeros_like(param, dtype, trees.leaf_name(path))

        def zeros(shape: tuple[int, ...], dtype: DType) -> jax.Array:
            return zeros_like(jnp.zeros(shape), dtype, "")

        gradient_sum = jax.tree.map_with_path(empty_sum, params)
        dtype = floats.sum_dtype(*filter(is_gradient, jax.tree.leaves(gradient_sum)))
        return GradAccumulatorState(
            micro_step=jnp.zeros((), jnp.int32),
            windows=jnp.zeros((), jnp.int32),
            sum_of_weights=zeros((), dtype),
            window_bad=jnp.zeros((), bool),
            dropped=jnp.zeros((), jnp.int32),
            value_sum=zeros((), dtype),
            loss=jnp.full((), jnp.inf, dtype),
            weight=jnp.zeros((), dtype),
            noise=() if self._noise_decay is None else _noise.empty(zeros),
            gradient_sum=gradient_sum,
        )

    def length(self, windows: jax.Array) -> jax.Array:
        """Returns the window's length, at least 1. `windows` is the argument of a schedule."""
        given: Any = self.accum_steps
        if callable(given):
            given = arguments.steps_of_schedule(given, windows)
        steps = jnp.asarray(given, jnp.float32)
        is_valid = steps >= 1  # and not `maximum`, because a NaN then counts as 1
        rounded = jnp.ceil(jnp.minimum(steps, 2.0**24))
        return jnp.where(is_valid, rounded, jnp.ones_like(steps)).astype(jnp.int32)

    def advance(
        self,
        state: AnyState,
        grads: ArrayTree,
        weight: Scalar,
        value: Number | None,
        *,
        flush: Flag = False,
        when_full: bool = False,
    ) -> Advanced:
        """Adds a micro-batch, and closes the window if it is flushed or, `when_full`, full.

        Gradients come as arrays (`trees.gradient_arrays`), and the weight as `arguments.weight` returns it. The total
        of partial sums is left to `average`. The module's docstring has the order of its decisions.
        """
        # Check that the micro-batch and the state fit.
        grads, value = self.devices.checked(grads, weight, value, state)
        if self._noise_decay is not None:
            require_made_with("noise_decay", state, "noise", _noise.FOR_AN_OPEN_WINDOW)

        # 1. Is it kept? If it is not, its weight is 0.
        is_kept, is_nonfinite = self._is_kept(grads, weight != 0, state.sum_of_weights)
        sum_of_weights = _with_weight(state.sum_of_weights, weight, is_kept)
        window_bad = state.window_bad
        if self.nonfinite == "drop_window":
            window_bad = window_bad | is_nonfinite

        # 2. Is it a step? Count it.
        is_step: Flag = True
        if self.nonfinite == "extend_window":
            is_step = ~jnp.asarray(is_nonfinite)
        micro_step = state.micro_step + jnp.asarray(is_step, jnp.int32)

        # 3. Is the window closing?
        is_closing = flush
        if when_full:
            is_closing = self._is_closing(flush, state.windows, micro_step, is_step)

        # 4. Does it have a weight, and is it not discarded? `is_closing` resets the counters. `closes` says that the
        # window also passes on an average. If `is_kept` is True, not traced, the weight is a positive number, and so is
        # the sum.
        has_weight: Flag = True if is_kept is True else sum_of_weights != 0
        closes: Flag = is_closing
        needs_branch = isinstance(is_closing, jax.Array) or has_weight is not True
        if self.nonfinite == "drop_window" or needs_branch:
            # If inner surely runs, `closes` stays True, so that inner needs no branch. XLA-32: a second flag stands
            # beside the closing flag, also without "drop_window", where `window_bad` is False, unless a state comes
            # from another policy. Otherwise XLA on CUDA holds all gradients of layers in a list
            # (tests/devices/test_scanned_layers.py, "as_they_come"). `logical_not`, because another wrapper may have
            # made an int of `window_bad`, and `~0` is -1 (tests/promises/test_compatibility.py).
            closes = is_closing & jnp.logical_not(window_bad)

        # 5. Update each leaf in one pass, which also divides if the window is closing. Then add the loss, which
        # `average` divides, and the noise.
        scale = self._scale(is_closing, sum_of_weights, has_weight)
        is_first = state.micro_step == 0
        factor = self._factor(weight, sum_of_weights)
        gradient_sum = jax.tree.map(
            lambda total, g: _advance_leaf(total, g, is_kept, factor, is_first, scale),
            state.gradient_sum,
            grads,
        )
        if value is None and is_kept is not False:
            # The window has no loss. On an Explicit mesh without a context, full_like drops the sharding of rows, and
            # the next call compiles again (test_sharded_state.py, "compiles_once").
            value_sum = jnp.where(True, jnp.inf, state.value_sum)
        else:
            value_sum = _advance_leaf(state.value_sum, value, is_kept, factor, is_first)
        noise = self._noise_added(state, grads, weight, is_kept)

        # 6. A closing window resets its counters.
        def reset(counter: jax.Array) -> jax.Array:
            return jnp.where(is_closing, jnp.zeros((), counter.dtype), counter)

        new_state = state._replace(
            micro_step=reset(micro_step),
            sum_of_weights=reset(sum_of_weights),
            window_bad=reset(window_bad),
            dropped=increment_if(is_nonfinite, state.dropped),
            value_sum=value_sum,
            noise=noise,
            gradient_sum=gradient_sum,
        )
        return Advanced(new_state, sum_of_weights, closes, has_weight)

    def _is_kept(
        self, grads: ArrayTree, has_weight: Flag, sum_of_weights: jax.Array
    ) -> tuple[Flag, Flag]:
        """Returns whether a micro-batch is kept, and whether it counts as non-finite. One without weight never does."""
        if has_weight is False or self.nonfinite == "propagate":
            return has_weight, False
        is_nonfinite = self.devices.is_nonfinite(grads, has_weight, sum_of_weights)
        return has_weight & ~is_nonfinite, is_nonfinite

    def _is_closing(
        self, flush: Flag, windows: jax.Array, micro_step: jax.Array, is_step: Flag
    ) -> Flag:
        """Returns whether the window is flushed or full. A window of one is known to be full, and needs no branch."""
        is_of_one = isinstance(self.accum_steps, int) and self.accum_steps == 1
        if flush is True or (is_of_one and is_step is True):
            return True
        # A micro-batch that is no step closes nothing, not even a window that is longer than a resumed run's
        # accum_steps.
        return flush | (is_step & (micro_step >= self.length(windows)))

    def _scale(
        self, is_closing: Flag, sum_of_weights: jax.Array, has_weight: Flag
    ) -> jax.Array | None:
        """Returns the factor of the new sums: 1 / W if the window is closing, 1 if not, None if nothing is divided.

        A separate division would cost another pass and, on XLA:CPU, a second buffer (tests/windows/test_window.py,
        "written_in_place"). `average` divides the total of partial sums.
        """
        if self._reduction == "sum" or is_closing is False or self.is_partial:
            return None
        of_closing = _reciprocal(sum_of_weights, has_weight)
        return jnp.where(is_closing, of_closing, jnp.ones((), sum_of_weights.dtype))

    def _factor(self, weight: Scalar, sum_of_weights: jax.Array) -> jax.Array | None:
        """Returns the factor of a micro-batch's gradients, None if it is 1."""
        is_one = isinstance(weight, float) and weight == 1
        if is_one or self._reduction != "mean":
            return None
        return jnp.asarray(weight).astype(sum_of_weights.dtype)

    def _noise_added(
        self, state: AnyState, grads: PyTree, weight: Scalar, is_kept: Flag
    ) -> AnyState:
        """Returns the sums of squared norms with this micro-batch's, if the window measures its noise.

        A gradient of the least weight is left out, because its norm, divided by the weight, would be all of the noise.
        A user gives that weight to a gradient without examples (`reduction` of `accumulate`).
        """
        noise = state.noise
        if self._noise_decay is None:
            return noise
        own = jnp.asarray(weight).astype(state.sum_of_weights.dtype)
        is_kept = is_kept & (own > arguments.LEAST_WEIGHT)
        # A mean gradient's square counts by its weight. A summed gradient is the mean one times the weight.
        nonzero = jnp.where(own != 0, own, jnp.ones((), own.dtype))
        of_square = nonzero if self._reduction == "mean" else 1 / nonzero
        norm = self.devices.own_norm(grads, varies_like=noise.kept)
        return _noise.added(noise, norm, of_square, is_kept, state.micro_step == 0)

    def update(
        self, state: AnyState, grads: ArrayTree, weight: Scalar, is_present: Flag = True
    ) -> AnyState:
        """Adds a micro-batch in a loop of the compiled program, unless `is_present` is False. Returns the new state.

        The sums begin as zeros. So no gradient replaces them, and no select stands around them (XLA-24). `finalize`
        divides them.
        """
        grads, _ = self.devices.checked(trees.gradient_arrays(grads), weight, None, state)
        has_weight = (weight != 0) & is_present & unknown_true()
        is_kept, is_nonfinite = self._is_kept(grads, has_weight, state.sum_of_weights)
        factor = self._factor(weight, state.sum_of_weights)
        return state._replace(
            sum_of_weights=_with_weight(state.sum_of_weights, weight, is_kept),
            dropped=increment_if(is_nonfinite, state.dropped),
            gradient_sum=jax.tree.map(
                lambda total, g: _advance_leaf(total, g, is_kept, factor),
                state.gradient_sum,
                grads,
            ),
        )

    def finalize(self, state: AnyState) -> tuple[Average, Flag]:
        """Returns the average of what `update` has added, and whether it has a weight."""
        weight = state.sum_of_weights
        added = Advanced(state, weight, closes=True, has_weight=weight != 0)
        average = self.average(added, is_divided=False)
        return average, average.has_weight

    def divided(self, state: AnyState) -> AnyState:
        """Returns a window whose partial sums are divided by the total weight, to be closed as a "sum".

        Then nothing stands between the total of gradients and the slice of it that is kept. XLA makes one
        reduce-scatter of both (tests/devices/test_network.py, "FSDP").
        """
        (sum_of_weights,) = device_sums([state.sum_of_weights], self.axes or ())
        scale = _reciprocal(sum_of_weights, sum_of_weights != 0)
        return state._replace(gradient_sum=_all_scaled(state.gradient_sum, scale))

    def adder_in_loop(
        self, state: AnyState, weight: Scalar
    ) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Returns a function of a leaf's sum, or a slice of it, and a gradient, which returns the new sum."""
        is_kept = (jnp.asarray(weight) != 0) & unknown_true()  # XLA-27
        factor = self._factor(weight, state.sum_of_weights)
        return lambda total, grad: _advance_leaf(total, grad, is_kept, factor)

    @property
    def is_partial(self) -> bool:
        """Whether sums and weights are parts, whose total `average` takes."""
        return bool(self.axes)

    def average(self, added: Advanced, *, is_divided: bool = True) -> Average:
        """Returns what a closing window passes on. Takes the total of partial sums, in one collective.

        It divides the loss and this total. Other gradients are divided already, unless `is_divided` is False.
        """
        whole = self._total(added) if self.is_partial else added
        gradients = total = whole.state.gradient_sum
        loss, sum_of_weights = whole.state.value_sum, whole.sum_of_weights
        scale = _reciprocal(sum_of_weights, whole.has_weight)
        if self._reduction != "sum":
            loss = loss * scale
            if self.is_partial or not is_divided:
                # XLA-35: a select by a known True. Without it XLA:CPU holds 0.43 of the gradients of scanned layers
                # beside their sum (tests/programs/test_loops.py, "hold_no_tree").
                selected = jnp.where(True, scale, jnp.ones((), scale.dtype))
                gradients = _all_scaled(gradients, selected)
        noise = added.state.noise
        if self._noise_decay is not None:
            norm = self.devices.norm(gradients, sum_of_weights)
            if self._reduction == "sum":  # the mean times the window's weight
                mantissa = norm.mantissa * scale.astype(norm.mantissa.dtype)
                norm = floats.shifted(mantissa, norm.exponent)
            # A device's row stays in the state. The estimate needs the total over devices.
            noise = _noise.closed(noise, whole.state.noise, sum_of_weights, norm, self._noise_decay)
        return Average(gradients, whole.has_weight, loss, sum_of_weights, noise, total)

    def _total(self, added: Advanced) -> Advanced:
        """Returns `added` with totals in the places of partial sums."""
        noise = added.state.noise
        numbers = [added.sum_of_weights, added.state.value_sum]
        if noise:  # one array for each scale, because the last axis numbers the scales
            numbers += [noise.kept, *jnp.moveaxis(noise.square_sums, -1, 0)]
        (sum_of_weights, value_sum, *of_noise), gradient_sum = self.devices.total(
            numbers, added.state.gradient_sum
        )
        if noise:
            noise = noise._replace(kept=of_noise[0], square_sums=jnp.stack(of_noise[1:]))
        has_weight = True if added.has_weight is True else sum_of_weights != 0
        state = added.state._replace(value_sum=value_sum, noise=noise, gradient_sum=gradient_sum)
        return Advanced(state, sum_of_weights, added.closes, has_weight)


def _with_weight(sum_of_weights: jax.Array, weight: Scalar, is_kept: Flag) -> jax.Array:
    """Returns the window's weight with that of a micro-batch, if this is kept.

    An array's value is not checked before. A weight out of range adds NaN here, and so the average is NaN. `_factor`
    returns the weight itself, because a select in the factor keeps XLA on CUDA from moving an all-reduce out of a loop
    (tests/devices/test_accelerators.py, "once_after_the_loop").
    """
    own = jnp.asarray(weight).astype(sum_of_weights.dtype)
    kept = jnp.where(is_kept, own, jnp.zeros((), own.dtype))
    # On an Explicit mesh inside vmap (tests/devices/test_models_on_devices.py, "begins_inside").
    kept = placed_like(kept, sum_of_weights)
    if not isinstance(weight, float):
        kept = jnp.where(arguments.is_weight(kept), kept, jnp.nan)
    return sum_of_weights + kept


def _advance_leaf(
    total: jax.Array,
    grad: Leaf,
    is_kept: Flag,
    factor: jax.Array | None,
    is_first: Flag = False,
    scale: jax.Array | None = None,
) -> jax.Array:
    """Returns (total + factor * grad) * scale, in one read and one write.

    A first gradient replaces the old total, because to clear it at the close costs a copy on XLA:CPU (XLA-16). `grad`
    is None if the caller passed None, if the call only closes the window, or if a loop has added the gradient already.
    """
    if not is_gradient(total):
        return total
    if isinstance(is_kept, jax.Array):
        is_kept = expand_like(is_kept, total)
    # 1. Without a gradient, the sum stays, or a new window begins with zeros.
    if grad is None or is_kept is False:
        if is_first is not False:
            total = jnp.where(is_first, jnp.zeros_like(total), total)
    else:
        # 2. Multiply the gradient.
        grad = partitioned_like(grad, total)
        if factor is not None:
            dtype = floats.sum_dtype(total)
            factor = expand_like(factor, total).astype(dtype)
            grad = floats.mul_real(floats.upcast(grad, dtype), factor)
        grad = grad.astype(total.dtype)
        if is_kept is not True:
            # 3. If it is not kept, put -0.0 in its place.
            # Select, because multiplying by a weight of 0 would not discard an infinity: 0 * inf is NaN
            # (tests/windows/test_window.py, "micro_batch_of_weight_zero"). XLA-24: select before adding,
            # because on CUDA and TPU XLA otherwise leaves the all-reduce of a gradient inside a loop.
            # XLA-31: -0.0, because XLA merges +0.0 with the zeros from which a backward pass starts its sums, and then
            # copies a tree in each micro-batch. A sum with -0.0 has the same bits.
            grad = jnp.where(is_kept, grad, jnp.full_like(total, -0.0))
        # 4. Add it. The window's first one replaces the old sum.
        total = total + grad if is_first is False else jnp.where(is_first, grad, total + grad)
    # 5. Divide if the window is closing.
    return total if scale is None else _scaled(total, scale)


def _scaled(total: jax.Array, scale: jax.Array) -> jax.Array:
    dtype = floats.sum_dtype(total)
    return floats.mul_real(floats.upcast(total, dtype), scale.astype(dtype)).astype(total.dtype)


def _all_scaled(sums: ArrayTree, scale: jax.Array) -> ArrayTree:
    return jax.tree.map(lambda x: _scaled(x, scale) if is_gradient(x) else x, sums)


def checked_weight(weight: Number, state: AnyState) -> Scalar:
    """Returns a user's weight for a window in this state: one number, or one for each row."""
    return arguments.weight(weight, {(), state.sum_of_weights.shape})


def _reciprocal(sum_of_weights: jax.Array, has_weight: Flag) -> jax.Array:
    """Returns 1 / sum_of_weights, 1 if the weight is 0, or NaN if the weight sum is out of range."""
    at_least, at_most = arguments.LEAST_WEIGHT, arguments.LARGEST_WEIGHT
    is_in_range = (sum_of_weights >= at_least) & (sum_of_weights <= at_most)
    in_range = jnp.where(is_in_range, sum_of_weights, jnp.nan)
    return 1 / jnp.where(has_weight, in_range, jnp.ones_like(sum_of_weights))
