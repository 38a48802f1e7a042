r"""Checks of arguments. Each function returns a checked argument, or raises a `ValueError` that names it.

The value of a Python or NumPy number is checked. A JAX array is checked for its shape and dtype alone.
"""

import inspect
import math
import numbers
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shrewjax._base.axes import are_whole, axes_by_dimension, is_bound, mapped_axes, row_axes
from shrewjax._base.trees import array_leaf, is_gradient, leaf_name, short_leaf_name, shown
from shrewjax._base.types import (
    Argument,
    Axes,
    AxisNames,
    DType,
    Flag,
    Function,
    KeyPath,
    Leaf,
    Number,
    PyTree,
    Scalar,
)

Shardings = Axes | jax.P | Callable[[str, Leaf], Argument]
"""Checked `sharded_over`."""

AxesOf = tuple[int, ...] | Callable[[str, Leaf], Argument] | None
"""Checked axes of leaves."""


LEAST_WEIGHT, LARGEST_WEIGHT = 2.0**-30, 2.0**100
RANGE_OF_WEIGHTS = "0, or between 2**-30 and 2**100"
"""The range of weights other than 0. A sum of weights in it has a float32 reciprocal, and no product that matters is
flushed."""


def among(function: Function, given: Mapping[str, Argument]) -> dict[str, Argument]:
    """Returns the parameters of a function among the arguments of another, by their names (`locals()`)."""
    return {x: given[x] for x in inspect.signature(function).parameters if x in given}


def is_weight(number: Scalar) -> Flag:
    """Returns whether a weight, or a sum of weights, is 0 or in range. A NaN is not."""
    return (number == 0) | (number >= LEAST_WEIGHT) & (number <= LARGEST_WEIGHT)


def threshold(name: str, value: Argument) -> Scalar:
    """Returns a threshold: a real scalar that is neither negative nor NaN if its value is known."""
    return real(name, value, at_least=0)


def real(name: str, value: Argument, *, at_least: float, at_most: float = math.inf) -> Scalar:
    """Returns a real scalar that is between two bounds, and so not NaN, if its value is known."""
    if isinstance(value, jax.Array):
        return _real_array(name, value, {()})
    bounds = f">= {at_least}" if at_most == math.inf else f"between {at_least} and {at_most}"
    number = _static_real(name, value, f"a real scalar {bounds}")
    if not at_least <= number <= at_most:
        raise ValueError(f"{name} must be {bounds} and not NaN, got {shown(value)}")
    return number + 0.0  # -0.0 is 0


def percent(value: Argument) -> Scalar:
    """Returns a percentile in [0, 100]. A known number between 0 and 1 is an error, because it is a fraction."""
    number = real("percentile", value, at_least=0, at_most=100)
    if not isinstance(number, jax.Array) and 0 < number < 1:
        raise ValueError(
            f"percentile must be from 0 to 100, got {shown(value)}. Pass {number * 100:g}, or, below one percent, "
            f"jnp.float32({number:g})"
        )
    return number


def percentile(value: Argument) -> Fraction | jax.Array:
    """Returns a percentile in [0, 100]: a number as the fraction that its decimal digits denote, an array as it is."""
    number = percent(value)
    if isinstance(number, jax.Array):
        return number
    is_written_out = isinstance(value, int | float | np.generic | np.ndarray)
    # str(np.float32(99.9)) is "99.9", that of its float is not.
    return Fraction(str(value if is_written_out else number))


def length(name: str, value: Argument, *, default: int) -> int:
    """Returns the static length of an array in a state: an int >= 1. `None` means the default."""
    _require_static(name, value)
    return default if value is None else integer(name, value, at_least=1)


def _require_static(name: str, value: Argument) -> None:
    if isinstance(value, jax.Array):
        raise ValueError(
            f"{name} must be static, got the array {shown(value)}. Under optax.inject_hyperparams, name it in "
            "static_args"
        )


def order(ord: Argument) -> float:
    """Returns the static order of a norm: any number >= 1, or inf. `None` means 2."""
    if ord is None:
        return 2.0
    _require_static("ord", ord)
    number = _static_real("ord", ord, "a number >= 1, inf or None (2)")
    if not number >= 1:
        raise ValueError(f"ord must be >= 1 or inf, got {shown(ord)}")
    return number


def integer(name: str, value: Argument, *, at_least: int | None = None) -> int:
    """Returns an int from a Python or NumPy integer, which may not be below `at_least`. Arrays are refused."""
    expected = "a Python int" if at_least is None else f"a Python int >= {at_least}"
    if not _is_int(value) or (at_least is not None and value < at_least):
        raise ValueError(f"{name} must be {expected}, got {shown(value)}")
    return int(value)


def positions(name: str, value: Argument) -> tuple[int, ...]:
    given = value if isinstance(value, tuple | list | range) else (value,)
    return tuple(integer(name, at) for at in given)


def places(name: str, value: Argument) -> tuple[int | str, ...]:
    """Returns arguments of a function by their positions or names."""
    given = value if isinstance(value, tuple | list | range) else (value,)
    for at in given:
        if not isinstance(at, str) and not _is_int(at):
            raise ValueError(
                f"{name} must be positions or names of arguments, such as 2 or ('x', 'y'), got {shown(at)}"
            )
    return tuple(at if isinstance(at, str) else int(at) for at in given)


def choice(name: str, value: Argument, choices: Sequence[str]) -> Any:
    if value not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, choices))}, got {shown(value)}"
        )
    return value


def value_of_loss(value: Argument, shapes: Collection[tuple[int, ...]]) -> Scalar:
    """Returns the `value` of a micro-batch, a real scalar or an array of one of the shapes; it may be non-finite."""
    if isinstance(value, np.ndarray) and value.shape != ():
        value = jnp.asarray(value)
    if isinstance(value, jax.Array):
        return _real_array("value", value, shapes)
    return _static_real("value", value, "a real scalar")


def flag(name: str, value: Argument) -> Flag:
    """Returns a bool or a boolean scalar array."""
    if isinstance(value, bool | np.bool):
        return bool(value)
    if isinstance(value, jax.Array | np.ndarray) and value.shape == () and value.dtype == np.bool:
        return jnp.asarray(value)
    raise ValueError(f"{name} must be a bool or a boolean scalar array, got {shown(value)}")


def static_flag(name: str, value: Argument) -> bool:
    """Returns a flag that decides what is compiled: a bool."""
    if isinstance(value, bool | np.bool):
        return bool(value)
    raise ValueError(f"{name} must be True or False, got {shown(value)}")


def accum_steps(value: Argument) -> int | jax.Array | Callable[[jax.Array], Number]:
    """Returns the length of a window in micro-steps: an int >= 1, a scalar array, or a function of closed windows."""
    if callable(value):
        return value
    if isinstance(value, jax.Array):
        return _real_array("accum_steps", value, {()})
    if isinstance(value, np.ndarray) and value.shape == ():
        value = value[()]
    if not _is_int(value) or not 1 <= value < 2**24:
        raise ValueError(
            f"accum_steps must be an int in [1, 2**24), a scalar array or a function of windows, got {shown(value)}"
        )
    return int(value)


def steps_of_schedule(accum_steps: Function, windows: jax.Array) -> Scalar:
    """Returns the window length that a function returns: a real scalar that is >= 1 if its value is known."""
    what = "the number of closed windows"
    require_call("accum_steps", accum_steps, what, "Let it take one argument", windows)
    return real(_LENGTH, accum_steps(windows), at_least=1)


def require_arguments_of_fun(
    name: str, function: Function | None, args: Sequence[PyTree], kwargs: dict[str, PyTree]
) -> None:
    """Raises unless a function takes these arguments, which are those of `fun`."""
    if function is not None:
        others = f" and {', '.join(sorted(kwargs))}" if kwargs else ""
        what = f"the {len(args)} arguments of fun{others}"
        remedy = f"Give {name} the same arguments as fun"
        require_call(name, function, what, remedy, *args, **kwargs)


def require_call(
    name: str, function: Function, what: str, remedy: str, /, *args: PyTree, **kwargs: PyTree
) -> None:
    """Raises unless a function takes these arguments, which are `what` in the message."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a function in C
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ValueError(
            f"{name} is called with {what}, but it takes {signature}: {error}. {remedy}"
        ) from error


def weight(value: Argument, shapes: Collection[tuple[int, ...]]) -> Scalar:
    """Returns a micro-batch's weight: a Python number in range, or an array of one of `shapes`. True is 1, False 0."""
    if isinstance(value, np.ndarray) and value.shape != ():
        value = jnp.asarray(value)
    if isinstance(value, jax.Array):
        if value.dtype == np.bool:
            value = value.astype(jnp.float32)
        return _real_array("weight", value, shapes)
    if isinstance(value, bool | np.bool) or (
        isinstance(value, np.ndarray) and value.dtype == np.bool
    ):
        value = float(value)
    number = _static_real("weight", value, "a real scalar >= 0")
    if not is_weight(number):
        raise ValueError(f"weight must be {RANGE_OF_WEIGHTS}, got {shown(value)}")
    return number


def inexact_dtype(name: str, value: Argument) -> DType:
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(f"{name} must be a floating or complex dtype or None, got {shown(value)}")
    if dtype != jax.dtypes.canonicalize_dtype(dtype):
        raise ValueError(f"{name} {dtype} needs 64-bit types. Set jax_enable_x64")
    return dtype


def axes(name: str, value: Argument) -> AxesOf:
    """Returns dimensions of leaves as a tuple of ints. None, or a function of a leaf's name and the leaf, stays."""
    if value is None or callable(value):
        return value
    _require_static(name, value)
    numbers_ = tuple(value) if isinstance(value, tuple | list) else (value,)
    if not all(map(_is_int, numbers_)):
        raise ValueError(
            f"{name} must be ints, None or a function of name and leaf, got {shown(value)}"
        )
    return tuple(int(a) for a in numbers_)


def axes_of_leaf(name: str, given: AxesOf, path: KeyPath, leaf: Leaf) -> tuple[int, ...] | None:
    """Returns the axes of one leaf, counted from the front; None if `given` has none for it."""
    chosen = axes(name, _of_leaf(name, given, path, leaf)) if callable(given) else given
    if callable(chosen):
        raise ValueError(
            f"{name} must return dimensions or None, got {shown(chosen)} for leaf {leaf_name(path)}"
        )
    if chosen is None:
        return None
    if any(not -leaf.ndim <= a < leaf.ndim for a in chosen):
        raise ValueError(
            f"{name} {chosen} is out of range for gradient leaf {leaf_name(path)} of shape {leaf.shape}. Pass a "
            "function of name and leaf"
        )
    return tuple(sorted({a % leaf.ndim for a in chosen}))


def axis_names(name: str, value: Argument, remedy: str = "") -> Axes:
    """Returns mapped axes as a tuple; None if types give them."""
    if value is None:
        return None
    names = tuple(value) if isinstance(value, tuple | list) else (value,)

    def is_axis(x: Any) -> bool:
        return (
            isinstance(x, Hashable) and not isinstance(x, jax.P | tuple | None) and not callable(x)
        )

    if not all(map(is_axis, names)) or len({*names}) < len(names):
        raise ValueError(
            f"{name} must be a mapped axis, or a tuple of different ones, got {shown(value)}{remedy}"
        )
    return names


def sharded_over(value: Argument) -> Shardings:
    """Returns mapped axes as a tuple, a PartitionSpec for all leaves, or a function. None if types give them."""
    if isinstance(value, jax.P) or callable(value):
        return value
    return axis_names("sharded_over", value, ". If leaves differ, pass a function of name and leaf")


def axes_by_leaf(given: Shardings, grads: PyTree) -> Axes | tuple[Axes, ...]:
    """Returns the axes for each leaf of `trees.floating(grads)`, or for all; None if types give them."""
    if not (isinstance(given, jax.P) or callable(given)):
        return given
    is_tracked = mapped_axes()[1]

    def axes(path: KeyPath, leaf: Leaf) -> Axes:
        of_leaf = axis_names_of_leaf(given, path, leaf)
        if is_tracked:
            return () if are_whole(of_leaf) else None
        if not isinstance(of_leaf, jax.P):
            return of_leaf
        names = (a for of_dimension in axes_by_dimension(of_leaf) for a in of_dimension)
        return tuple(a for a in names if is_bound(a) and a not in row_axes())

    leaves = jax.tree.leaves_with_path(grads)
    return tuple(axes(path, x) for path, x in leaves if is_gradient(array_leaf(path, x)))


def axis_names_of_leaf(given: Shardings, path: KeyPath, leaf: Leaf) -> AxisNames | jax.P | None:
    """Returns the mapped axes, or the PartitionSpec, of one leaf; None if the leaf's type has to tell.

    Raises if the user's function returns a function.
    """
    if not callable(given):
        return given
    chosen = sharded_over(_of_leaf("sharded_over", given, path, leaf))
    if callable(chosen):
        raise ValueError(
            f"sharded_over must return mapped axes or a PartitionSpec, got {shown(chosen)} for leaf "
            f"{leaf_name(path)}"
        )
    return chosen


def _of_leaf(name: str, function: Function, path: KeyPath, leaf: Leaf) -> Argument:
    """Returns what a user's function returns for a leaf."""
    given = short_leaf_name(path), leaf
    what, remedy = "a leaf's name and the leaf", "Let it take both"
    require_call(name, function, what, remedy, *given)
    return function(*given)


def _is_int(value: Argument) -> bool:
    """Returns whether this is a Python or NumPy integer. A bool is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


_LENGTH = "the number that the function accum_steps returns"
_REMEDIES = {
    _LENGTH: "Let it return a number of micro-batches",
    "weight": "Give the number of examples or tokens, such as len(x)",
    "value": "Pass the loss alone, without its aux",
}
"""The remedies for arguments that are no numbers. Those for thresholds depend on what came."""


def _static_real(name: str, value: Argument, expected: str) -> float:
    if isinstance(value, np.ndarray) and value.shape == ():
        value = value[()]
    # `numbers.Real` leaves out bfloat16 and float8, whose scalars are NumPy scalars.
    is_real = isinstance(value, numbers.Real) or (
        isinstance(value, np.generic) and jnp.issubdtype(value.dtype, jnp.floating)
    )
    if not is_real or isinstance(value, bool | np.bool):
        remedy = _REMEDIES.get(name, "")
        if not remedy and callable(value):
            remedy = "To schedule it, use optax.inject_hyperparams"
        elif not remedy and value is None and name.startswith("max_"):
            remedy = "For no limit, pass jnp.inf"
        elif not remedy and any(hasattr(x, "shape") for x in jax.tree.leaves(value)):
            remedy = f"If these are gradients, pass them before {name}, or to update"
        raise ValueError(
            f"{name} must be {expected}, got {shown(value)}" + (remedy and f". {remedy}")
        )
    try:
        return float(value)
    except OverflowError:
        # It is an int such as 10**400. Callers' checks of its range then see an infinity.
        return math.inf if value > 0 else -math.inf


def _real_array(name: str, value: jax.Array, shapes: Collection[tuple[int, ...]]) -> jax.Array:
    """Returns an array of real numbers in float32, or in float64 if it has that. Callers compute in no other dtype."""
    is_real = any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer))
    if value.shape not in shapes or not is_real:
        expected = " or ".join(
            "a real scalar" if s == () else f"a real array of shape {s}" for s in sorted(shapes)
        )
        raise ValueError(
            f"{name} must be {expected}, got an array of shape {value.shape} and dtype {value.dtype}"
            + (". Pass jnp.sum of it" if name == "weight" else "")
        )
    return value.astype(jnp.float64 if value.dtype == jnp.float64 else jnp.float32)
