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


Shapes = Collection[tuple[int, ...]]
"""The shapes that an array may have."""


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
    bounds = f">= {at_least}" if at_most == math.inf else f"between {at_least} and {at_most}"
    if isinstance(value, jax.Array):
        return _real_array(name, value, {()})
    number = _static_real(name, value, f"a real scalar {bounds}")
    if not at_least <= number <= at_most:
        raise _wrong(name, f"{bounds} and not NaN", value)
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
    # str(np.float32(99.9)) is "99.9", that of its float is not.
    is_written_out = isinstance(value, int | float | np.generic | np.ndarray)
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
        raise _wrong("ord", ">= 1 or inf", ord)
    return number


def integer(name: str, value: Argument, *, at_least: int | None = None) -> int:
    """Returns an int from a Python or NumPy integer, which may not be below `at_least`. Arrays are refused."""
    expected = "a Python int" if at_least is None else f"a Python int >= {at_least}"
    if not _is_int(value) or (at_least is not None and value < at_least):
        raise _wrong(name, expected, value)
    return int(value)


def positions(name: str, value: Argument) -> tuple[int, ...]:
    return tuple(integer(name, at) for at in _each(value))


def places(name: str, value: Argument) -> tuple[int | str, ...]:
    """Returns arguments of a function by their positions or names."""
    for at in _each(value):
        if not isinstance(at, str) and not _is_int(at):
            raise _wrong(name, "positions or names of arguments, such as 2 or ('x', 'y')", at)
    return tuple(at if isinstance(at, str) else int(at) for at in _each(value))


def _each(value: Argument) -> Sequence[Argument]:
    return value if isinstance(value, tuple | list | range) else (value,)


def choice(name: str, value: Argument, choices: Sequence[str]) -> Any:
    if value not in choices:
        raise _wrong(name, f"one of {', '.join(map(repr, choices))}", value)
    return value


def value_of_loss(value: Argument, shapes: Shapes) -> Scalar:
    """Returns the `value` of a micro-batch, a real scalar or an array of one of the shapes; it may be non-finite."""
    return _real("value", value, shapes, "a real scalar")


def flag(name: str, value: Argument) -> Flag:
    """Returns a bool or a boolean scalar array."""
    if isinstance(value, bool | np.bool):
        return bool(value)
    is_array = isinstance(value, jax.Array | np.ndarray)
    if is_array and value.shape == () and value.dtype == np.bool:
        return jnp.asarray(value)
    raise _wrong(name, "a bool or a boolean scalar array", value)


def static_flag(name: str, value: Argument) -> bool:
    """Returns a flag that decides what is compiled: a bool."""
    if isinstance(value, bool | np.bool):
        return bool(value)
    raise _wrong(name, "True or False", value)


def accum_steps(value: Argument) -> int | jax.Array | Callable[[jax.Array], Number]:
    """Returns the length of a window in micro-steps: an int >= 1, a scalar array, or a function of closed windows."""
    if callable(value):
        return value
    if isinstance(value, jax.Array):
        return _real_array("accum_steps", value, {()})
    if isinstance(value, np.ndarray) and value.shape == ():
        value = value[()]
    if not _is_int(value) or not 1 <= value < 2**24:
        expected = "an int in [1, 2**24), a scalar array or a function of windows"
        raise _wrong("accum_steps", expected, value)
    return int(value)


def steps_of_schedule(accum_steps: Function, windows: jax.Array) -> Scalar:
    """Returns the window length that a function returns: a real scalar that is >= 1 if its value is known."""
    what = "the number of closed windows"
    remedy = "Let it take one argument"
    _require_call("accum_steps", accum_steps, what, remedy, (windows,), {})
    return real(_LENGTH, accum_steps(windows), at_least=1)


def require_arguments_of_fun(
    name: str, function: Function | None, args: PyTree, kwargs: PyTree
) -> None:
    """Raises unless a function takes these arguments, which are those of `fun`."""
    if function is not None:
        others = f" and {', '.join(sorted(kwargs))}" if kwargs else ""
        what = f"the {len(args)} arguments of fun{others}"
        remedy = f"Give {name} the same arguments as fun"
        _require_call(name, function, what, remedy, args, kwargs)


def _require_call(
    name: str, function: Function, what: str, remedy: str, args: PyTree, kwargs: PyTree
) -> None:
    """Raises unless a function takes these arguments, which are `what` in the message."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except ValueError:  # a function in C tells no signature
        return
    except TypeError as error:
        raise ValueError(
            f"{name} is called with {what}, but it takes {inspect.signature(function)}: {error}. {remedy}"
        ) from error


def weight(value: Argument, shapes: Shapes) -> Scalar:
    """Returns a micro-batch's weight: a Python number in range, or an array of one of `shapes`. True is 1, False 0."""
    if isinstance(value, bool):
        value = float(value)
    elif getattr(value, "dtype", None) == np.bool and hasattr(value, "astype"):
        value = value.astype(np.float32)
    number = _real("weight", value, shapes, "a real scalar >= 0")
    if not isinstance(number, jax.Array) and not is_weight(number):
        raise _wrong("weight", RANGE_OF_WEIGHTS, value)
    return number


def inexact_dtype(name: str, value: Argument) -> DType:
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        raise _wrong(name, "a floating or complex dtype or None", value)
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
        raise _wrong(name, "ints, None or a function of name and leaf", value)
    return tuple(int(a) for a in numbers_)


def axes_of_leaf(name: str, given: AxesOf, path: KeyPath, leaf: Leaf) -> tuple[int, ...] | None:
    """Returns the axes of one leaf, counted from the front; None if `given` has none for it."""
    chosen: Any = given
    if callable(given):
        chosen = axes(name, _of_leaf(name, "dimensions or None", given, path, leaf))
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
    no_axis: Any = jax.P | tuple | Callable | None
    are_axes = all(isinstance(x, Hashable) and not isinstance(x, no_axis) for x in names)
    if not are_axes or len({*names}) < len(names):
        raise _wrong(name, "a mapped axis, or a tuple of different ones", value, remedy)
    return names


def sharded_over(value: Argument) -> Shardings:
    """Returns mapped axes as a tuple, a PartitionSpec for all leaves, or a function. None if types give them."""
    if isinstance(value, jax.P) or callable(value):
        return value
    remedy = ". If leaves differ, pass a function of name and leaf"
    return axis_names("sharded_over", value, remedy)


def axes_by_leaf(given: Shardings, grads: PyTree) -> Axes | tuple[Axes, ...]:
    """Returns the axes for each leaf of `trees.floating(grads)`, or for all; None if types give them."""
    if not (isinstance(given, jax.P) or callable(given)):
        return given
    is_tracked = mapped_axes()[1]

    def axes_of(path: KeyPath, leaf: Leaf) -> Axes:
        of_leaf = axis_names_of_leaf(given, path, leaf)
        if is_tracked:  # types tell the axes, and only () overrules them
            return () if are_whole(of_leaf) else None
        if not isinstance(of_leaf, jax.P):
            return of_leaf
        names = (a for of_dimension in axes_by_dimension(of_leaf) for a in of_dimension)
        # XLA reduces over axes that are not mapped.
        return tuple(a for a in names if is_bound(a) and a not in row_axes())

    leaves = jax.tree.leaves_with_path(grads)
    return tuple(axes_of(*x) for x in leaves if is_gradient(array_leaf(*x)))


def axis_names_of_leaf(given: Shardings, path: KeyPath, leaf: Leaf) -> Axes | jax.P:
    """Returns the mapped axes, or the PartitionSpec, of one leaf; None if the leaf's type has to tell.

    Raises if the user's function returns a function.
    """
    if not callable(given):
        return given
    wanted = "mapped axes or a PartitionSpec"
    of_leaf: Any = sharded_over(_of_leaf("sharded_over", wanted, given, path, leaf))
    return of_leaf


def _of_leaf(name: str, wanted: str, function: Function, path: KeyPath, leaf: Leaf) -> Argument:
    """Returns what a user's function returns for a leaf. Raises if that is a function."""
    given = short_leaf_name(path), leaf
    what, remedy = "a leaf's name and the leaf", "Let it take both"
    _require_call(name, function, what, remedy, given, {})
    chosen = function(*given)
    if callable(chosen):
        raise ValueError(
            f"{name} must return {wanted}, got {shown(chosen)} for leaf {leaf_name(path)}"
        )
    return chosen


def _wrong(name: str, expected: str, value: Argument, remedy: str = "") -> ValueError:
    return ValueError(f"{name} must be {expected}, got {shown(value)}{remedy}")


def _is_int(value: Argument) -> bool:
    """Returns whether this is a Python or NumPy integer. A bool is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _real(name: str, value: Argument, shapes: Shapes, expected: str) -> Scalar:
    """Returns a real number, or an array of real numbers of one of these shapes."""
    if isinstance(value, np.ndarray) and value.shape != ():
        value = jnp.asarray(value)
    if isinstance(value, jax.Array):
        return _real_array(name, value, shapes)
    return _static_real(name, value, expected)


def _static_real(name: str, value: Argument, expected: str) -> float:
    if isinstance(value, np.ndarray) and value.shape == ():
        value = value[()]
    # `numbers.Real` leaves out bfloat16 and float8, whose scalars are NumPy scalars.
    is_real = isinstance(value, numbers.Real) or (
        isinstance(value, np.generic) and jnp.issubdtype(value.dtype, jnp.floating)
    )
    if not is_real or isinstance(value, bool | np.bool):
        raise _wrong(name, expected, value, _remedy(name, value))
    try:
        return float(value)
    except OverflowError:
        # It is an int such as 10**400. Callers' checks of its range then see an infinity.
        return math.inf if value > 0 else -math.inf


def _remedy(name: str, value: Argument) -> str:
    """Returns the remedy, as text, for an argument that is no number."""
    if name in _REMEDIES:
        return _REMEDIES[name]
    if callable(value):
        return ". To schedule it, use optax.inject_hyperparams"
    if value is None and name.startswith("max_"):
        return ". For no limit, pass jnp.inf"
    if any(hasattr(x, "shape") for x in jax.tree.leaves(value)):
        return f". If these are gradients, pass them before {name}, or to update"
    return ""


_LENGTH = "the number that the function accum_steps returns"
_REMEDIES = {
    _LENGTH: ". Let it return a number of micro-batches",
    "weight": ". Give the number of examples or tokens, such as len(x)",
    "value": ". Pass the loss alone, without its aux",
}


def _real_array(name: str, value: jax.Array, shapes: Shapes) -> jax.Array:
    """Returns an array of real numbers in float32, or in float64 if it has that. Callers compute in no other dtype."""
    is_real = jnp.issubdtype(value.dtype, jnp.number) and not jnp.iscomplexobj(value)
    if value.shape not in shapes or not is_real:
        known = [f"a real array of shape {s}" if s else "a real scalar" for s in sorted(shapes)]
        remedy = ". Pass jnp.sum of it" if name == "weight" else ""
        raise _wrong(name, " or ".join(known), value, remedy)
    return value.astype(jnp.float64 if value.dtype == jnp.float64 else jnp.float32)
