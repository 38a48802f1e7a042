"""Every check of an argument, and its message.

A value is checked when it is known: Python and NumPy scalars at once, `jax.Array`s (traced or not, so that
jit and no jit agree) by shape and dtype only.
"""

import math
import numbers
from collections.abc import Callable, Collection, Hashable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar

import chex
import jax
import jax.numpy as jnp
import numpy as np

KeyPath = tuple[Any, ...]
Tree = TypeVar("Tree")
"""A pytree that comes back as the type that went in. Its leaves come back as JAX arrays."""
AxesOf = tuple[int, ...] | Callable[[str, Any], Any] | None
"""Checked axes of leaves."""
UnitAxisNames = tuple[Hashable, ...] | jax.P | Callable[[str, Any], Any] | None
"""Checked mapped axes of leaves of several units."""
Scalar = float | jax.Array
"""A checked scalar: a Python float, or a float32 or float64 array of shape () whose value is not looked at."""

LEAST_WEIGHT, LARGEST_WEIGHT = 2.0**-30, 2.0**100
"""Between these a weight sum has a float32 reciprocal, and no product that matters is lost. 0 is a weight, too."""


def threshold(name: str, value: Any) -> Scalar:
    """A threshold: a real scalar, not negative and not NaN where its value is known."""
    return real(name, value, at_least=0)


def real(name: str, value: Any, *, at_least: float, at_most: float = math.inf) -> Scalar:
    """A real scalar between two bounds, and so not NaN, where its value is known."""
    if isinstance(value, jax.Array):
        return _real_scalar_array(name, value)
    bounds = f">= {at_least}" if at_most == math.inf else f"between {at_least} and {at_most}"
    number = _static_real(name, value, f"a real scalar {bounds}")
    if not at_least <= number <= at_most:
        raise ValueError(f"{name} must be {bounds} and not NaN, got {value!r}")
    return number + 0.0  # -0.0 is 0


def percentile(value: Any) -> Fraction | jax.Array:
    """A percentile in [0, 100]: a known one exactly as its decimal digits say, an array as it is."""
    number = real("percentile", value, at_least=0, at_most=100)
    if isinstance(number, jax.Array):
        return number
    is_written_out = isinstance(value, int | float | np.generic | np.ndarray)
    return Fraction(str(value if is_written_out else number))  # str(np.float32(99.9)) is "99.9", its float is not


def any_real(name: str, value: Any) -> Scalar:
    """A real scalar, of whatever value."""
    if isinstance(value, jax.Array):
        return _real_scalar_array(name, value)
    return _static_real(name, value, "a real scalar")


def length(name: str, value: Any, *, default: int) -> int:
    """The length of an array in a state, static: an int >= 1; None means the default."""
    if value is None:
        return default
    if isinstance(value, jax.Array):
        raise ValueError(
            f"{name} must be a Python int, got the array {value}: it is the shape of an array in the state. "
            f"Under optax.inject_hyperparams, name it in static_args or leave it out (None means {default})"
        )
    if isinstance(value, bool | np.bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be an int >= 1 or None ({default}), got {value!r}")
    return int(value)


def integer(name: str, value: Any, *, at_least: int | None = None) -> int:
    """A static int."""
    expected = "a Python int" if at_least is None else f"a Python int >= {at_least}"
    is_int = isinstance(value, int | np.integer) and not isinstance(value, bool | np.bool)
    if not is_int or (at_least is not None and value < at_least):
        raise ValueError(f"{name} must be {expected}, because it decides what is compiled; got {value!r}")
    return int(value)


def positions(name: str, value: Any) -> tuple[int, ...]:
    """Positions of arguments: an int, or a sequence of ints; static."""
    return tuple(integer(name, at) for at in (value if isinstance(value, tuple | list | range) else (value,)))


def axes(name: str, value: Any) -> AxesOf:
    """Axes of leaves: none (None), the same for all, or a function of a leaf's name and the leaf; static."""
    if value is None or callable(value):
        return value
    if isinstance(value, jax.Array):
        raise ValueError(
            f"{name} must be static, got the array {value}. Under optax.inject_hyperparams, name it in static_args"
        )
    numbers_ = tuple(value) if isinstance(value, tuple | list) else (value,)
    if any(isinstance(a, bool) or not isinstance(a, int | np.integer) for a in numbers_):
        raise ValueError(
            f"{name} must be an int, a tuple of ints, None or a function of a leaf's name and the leaf, got {value!r}"
        )
    return tuple(int(a) for a in numbers_)


def axes_of_leaf(name: str, given: AxesOf, path: KeyPath, leaf: Any) -> tuple[int, ...] | None:
    """What `axes` says of one leaf, counted from the front; None if it says nothing."""
    chosen = axes(name, given(leaf_name(path), leaf)) if callable(given) else given
    if chosen is None or callable(chosen):
        return None
    if any(not -leaf.ndim <= a < leaf.ndim for a in chosen):
        raise ValueError(
            f"{name} {chosen} is out of range for gradient leaf {leaf_name(path)} of shape {leaf.shape}: a function of "
            "the leaf's name and the leaf can tell leaves apart"
        )
    return tuple(sorted({a % leaf.ndim for a in chosen}))


def order(ord: Any) -> float:
    """The order of a norm, static: any p >= 1 or inf; None means 2."""
    if ord is None:
        return 2.0
    if isinstance(ord, jax.Array):
        raise ValueError(
            f"ord must be a Python number, got the array {ord}: the order decides what is compiled. "
            "Under optax.inject_hyperparams, name it in static_args or leave it out (None means 2)"
        )
    number = _static_real("ord", ord, "a number >= 1, inf or None (2)")
    if not number >= 1:
        raise ValueError(f"ord must be >= 1 (inf included), got {ord!r}")
    return number


def accum_steps(value: Any) -> int | jax.Array | Callable[[jax.Array], Any]:
    """The micro-steps of a window: an int >= 1, an array of shape (), or a function of the windows so far."""
    if callable(value):
        return value
    if isinstance(value, jax.Array):
        return _real_scalar_array("accum_steps", value)
    if isinstance(value, np.ndarray) and value.shape == ():
        value = value[()]
    if isinstance(value, bool | np.bool) or not isinstance(value, int | np.integer):
        raise ValueError(
            f"accum_steps must be an int >= 1, a scalar array or a function of the number of windows, got {value!r}"
        )
    if not 1 <= value < 2**24:
        raise ValueError(f"accum_steps must be >= 1 (and below 2**24), got {value!r}")
    return int(value)


def steps_of_schedule(value: Any) -> Scalar:
    """The window length that a function returned: a real scalar, at least 1 and not NaN where its value is known."""
    name = "the number that the function accum_steps returns"
    return _real_scalar_array(name, value) if isinstance(value, jax.Array) else real(name, value, at_least=1)


def weight(value: Any, shapes: Collection[tuple[int, ...]]) -> Scalar:
    """The weight of a micro-batch: a real scalar, in range where its value is known, or an array of such a shape."""
    if isinstance(value, np.ndarray) and value.shape != ():
        value = jnp.asarray(value)
    if isinstance(value, jax.Array):
        return _real_array("weight", value, shapes)
    number = _static_real("weight", value, "a real scalar >= 0")
    if number != 0 and not LEAST_WEIGHT <= number <= LARGEST_WEIGHT:
        raise ValueError(f"weight must be 0, or between 2**-30 and 2**100, got {value!r}")
    return number


def flag(name: str, value: Any) -> bool | jax.Array:
    """A bool, or a boolean scalar array."""
    if isinstance(value, bool | np.bool):
        return bool(value)
    if isinstance(value, jax.Array | np.ndarray) and value.shape == () and value.dtype == np.bool:
        return jnp.asarray(value)
    raise ValueError(f"{name} must be a bool or a boolean scalar array, got {value!r}")


def choice(name: str, value: Any, choices: Sequence[str]) -> Any:
    """One of the named choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def accumulator_dtype(value: Any) -> Any:
    """A floating or complex dtype, or None."""
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(f"accumulator_dtype must be a floating or complex dtype or None, got {value!r}")
    if dtype != jax.dtypes.canonicalize_dtype(dtype):
        raise ValueError(f"accumulator_dtype {dtype} needs jax_enable_x64")
    return dtype


def same_leaves(grads: Any, gradient_sum: Any, *, compared: Callable[[Any], bool], what: str) -> None:
    """At trace time: gradients have the accumulator's structure and, where both leaves are `compared`, its shapes.

    A gradient of None fits every leaf. Adds no operation to the program.
    """
    given, expected = (
        dict(jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is None)) for tree in (grads, gradient_sum)
    )
    wrong = [f"{leaf_name(path)} is missing" for path in expected.keys() - given.keys()]
    wrong += [
        f"{leaf_name(path)} is unexpected"
        for path, leaf in given.items()
        if leaf is not None and expected.get(path) is None
    ]
    filled = grads
    if not wrong:

        def fill(total: Any, grad: Any) -> Any:
            return grad if grad is not None and compared(grad) and compared(total) else total

        filled = jax.tree.map(fill, gradient_sum, grads)
    chex.assert_trees_all_equal_structs(
        filled,
        gradient_sum,
        custom_message=f"the gradients differ in structure from the {what}: {', '.join(sorted(wrong)) or 'nodes'}",
    )
    chex.assert_trees_all_equal_shapes(
        filled, gradient_sum, custom_message=f"the gradients differ in shape from the {what}"
    )


def axis_names(axis_name: Any) -> tuple[Hashable, ...] | None:
    """The mapped axes as a tuple; None if they are to be found."""
    if axis_name is None:
        return None
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    are_names = all(isinstance(a, Hashable) and not isinstance(a, jax.P | None) for a in names)
    if not are_names or len({*names}) < len(names):
        raise ValueError(f"axis_name must be a mapped axis, or a tuple of different ones, got {axis_name!r}")
    return names


def unit_axis_names(axis_name: Any) -> UnitAxisNames:
    """The mapped axes for a leaf of units: as above, how all leaves are sharded, or a function of a leaf."""
    return axis_name if isinstance(axis_name, jax.P) or callable(axis_name) else axis_names(axis_name)


def axis_names_of_leaf(given: UnitAxisNames, path: KeyPath, leaf: Any) -> tuple[Hashable, ...] | jax.P | None:
    """What `unit_axis_names` says of one leaf."""
    chosen = unit_axis_names(given(leaf_name(path), leaf)) if callable(given) else given
    if callable(chosen):
        raise ValueError(f"axis_name returned the function {chosen!r} for leaf {leaf_name(path)}")
    return chosen


def gradient_leaves(grads: Any) -> tuple[list[KeyPath], list[Any], Any]:
    """The leaves of gradients as arrays, where each is, and the tree's structure."""
    with_paths, treedef = jax.tree.flatten_with_path(grads)
    return [path for path, _ in with_paths], [array_leaf(path, leaf) for path, leaf in with_paths], treedef


def gradient_arrays(grads: Any) -> Any:
    """The same tree with such leaves."""
    return jax.tree.map_with_path(array_leaf, grads)


def parameter_arrays(params: Any) -> Any:
    """Parameters likewise, of whatever dtype."""
    return jax.tree.map_with_path(partial(_as_array, what="parameter"), params)


def array_leaf(path: KeyPath, leaf: Any) -> Any:
    """A gradient leaf: floating and complex NumPy arrays and Python numbers as JAX has them, the rest as it is."""
    if hasattr(leaf, "dtype") and not _holds_gradients(leaf.dtype):
        raise ValueError(
            f"gradient leaf {leaf_name(path)} must have a dtype with a sign, a zero and a NaN, got {leaf.dtype}: "
            "cast the leaf to float32, or leave it out by optax.masked"
        )
    return _as_array(path, leaf, what="gradient")


def _as_array(path: KeyPath, leaf: Any, what: str) -> Any:
    if hasattr(leaf, "dtype") and hasattr(leaf, "shape"):
        is_foreign = isinstance(leaf, np.ndarray | np.generic) and jnp.issubdtype(leaf.dtype, jnp.inexact)
        return jnp.asarray(leaf) if is_foreign else leaf
    if isinstance(leaf, bool | int | float | complex):
        return jnp.asarray(leaf)
    raise ValueError(f"{what} leaf {leaf_name(path)} must be an array or a number, got {leaf!r}")


def _holds_gradients(dtype: Any) -> bool:
    """Whether a number of the dtype can be negative or NaN: float8_e8m0fnu has no sign, narrower ones no NaN."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return True
    negative, nan = np.asarray([-1.0, np.nan]).astype(dtype)
    return bool(negative == -1 and np.isnan(nan))


def leaf_name(path: KeyPath) -> str:
    """How messages name the leaf at `path`; the tree itself may be the leaf."""
    return jax.tree_util.keystr(path) or "(the tree itself)"


def _static_real(name: str, value: Any, expected: str) -> float:
    if isinstance(value, np.ndarray) and value.shape == ():
        value = value[()]
    if callable(value):
        raise ValueError(
            f"{name} must be {expected}, got the function {value!r}: wrap the transformation in "
            "optax.inject_hyperparams to schedule it"
        )
    # bfloat16 and float8 scalars are NumPy scalars, but no numbers.Real.
    is_real = isinstance(value, numbers.Real) or (
        isinstance(value, np.generic) and jnp.issubdtype(value.dtype, jnp.floating)
    )
    if not is_real or isinstance(value, bool | np.bool):
        raise ValueError(f"{name} must be {expected}, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _real_scalar_array(name: str, value: jax.Array) -> jax.Array:
    return _real_array(name, value, {()})


def _real_array(name: str, value: jax.Array, shapes: Collection[tuple[int, ...]]) -> jax.Array:
    is_real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
    if value.shape not in shapes or not is_real:
        expected = " or ".join("a real scalar" if s == () else f"a real array of shape {s}" for s in sorted(shapes))
        raise ValueError(f"{name} must be {expected}, got an array of shape {value.shape} and dtype {value.dtype}")
    return value.astype(jnp.float64 if value.dtype == jnp.float64 else jnp.float32)
