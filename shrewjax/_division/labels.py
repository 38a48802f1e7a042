"""What operations do to dimensions: the table by which examples are followed through a program.

A rule labels each dimension of an equation's operands and results. Along a label, any slice of the results is that of
the same slice of the operands. A label that only operands have is summed, or cannot be divided. None stands for a
dimension that cannot be divided. A wrong row would be silently wrong, so `tests/division/test_labels.py` runs each on
random slices. An operation that the table lacks is not divided.

Only this module and `_programs/jaxprs.py` name primitives, except that `draws` binds threefry.
"""

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from shrewjax._programs import jaxprs
from shrewjax._programs.jaxprs import Atom, Equation, shape_of

Label: TypeAlias = Hashable | None
Shape: TypeAlias = Sequence[int]
Shapes: TypeAlias = list[tuple[int, ...]]
Dims: TypeAlias = Sequence[Label]


class Labels(NamedTuple):
    """A label for each dimension of the operands and the results, and those which are summed."""

    ins: Sequence[Dims]
    outs: Sequence[Dims]
    summed: Sequence[Label] = ()


class Given(NamedTuple):
    """The shapes of an equation's operands and results, and its parameters."""

    ins: Shapes
    outs: Shapes
    params: dict[str, Any]

    def in_place(self, lost: Sequence[int] = ()) -> Labels:
        """Dimensions keep their places, and the lost ones cannot be divided. Scalars have none."""
        dims = [None if d in lost else d for d in range(len(self.ins[0]))]
        ins = [dims if len(x) else () for x in self.ins]
        return Labels(ins, [dims] * len(self.outs))

    def first(self, count: int) -> Labels:
        """Dimensions keep their places, and only the first ones can be divided."""
        dims = lambda x: [d if d < count else None for d in range(len(x))]  # noqa: E731
        return Labels([*map(dims, self.ins)], [*map(dims, self.outs)])

    def with_new_axis(self, axis: int) -> Labels:
        """One side has a new axis."""
        shorter, longer = sorted((self.ins[0], self.outs[0]), key=len)
        dims, axis = [*range(len(shorter))], axis % len(longer)
        new = [*dims[:axis], None, *dims[axis:]]
        of = lambda side: [dims if len(x) == len(shorter) else new for x in side]  # noqa: E731
        return Labels(of(self.ins), of(self.outs))


Rule: TypeAlias = Callable[[Given], Labels]


def labels_of(equation: Equation) -> Labels | None:
    """Returns the labels of an equation's dimensions, or None if the table lacks it."""
    rule = _LABELS.get(equation.primitive.name)
    if rule is None or not all(map(_draws_by_position, equation.invars)):
        return None
    return rule(Given(*shapes_of(equation), equation.params))


def is_known(equation: Equation) -> bool:
    """Returns whether something is known of the operation beside its name."""
    name = equation.primitive.name
    is_named = name in _LABELS or name in _RETURNS_OPERANDS or is_reshape(equation)
    return is_named or any(map(bool, jaxprs.jaxprs_on_operands(equation)))


def shapes_of(equation: Equation) -> tuple[Shapes, Shapes]:
    """Returns the shapes of the operands, and of the results."""
    sides = equation.invars, equation.outvars
    ins, outs = ([shape_of(x.aval) for x in side] for side in sides)
    return ins, outs


def _draws_by_position(x: Any) -> bool:
    """Returns whether an operand is no key, or one of threefry. JAX draws from the first of several keys of `rbg`."""
    return not jnp.issubdtype(x.aval.dtype, jax.dtypes.prng_key) or is_threefry(x.aval)


def is_threefry(key: Any) -> bool:
    """Returns whether keys of this type are of the default generator."""
    return "fry" in str(key.dtype)


# Rules.


def _elementwise(given: Given) -> Labels:
    """Operands have the shape of the results, but for dimensions of size 1, or are scalars."""
    full = given.outs[0]

    def dims(shape: Shape) -> Dims:
        is_like = len(shape) == len(full)
        return [d if is_like and n == full[d] else None for d, n in enumerate(shape)]

    return Labels([*map(dims, given.ins)], [*map(dims, given.outs)])


_NAMED_AXES = "axis", "dimension", "dimensions", "reduction_dimension"


def _except_named(given: Given) -> Labels:
    """Dimensions keep their places, except for those that a parameter names, by default the last one."""
    (named,) = [given.params[x] for x in _NAMED_AXES if x in given.params] or [-1]
    return given.in_place([*np.atleast_1d(named) % len(given.ins[0])])


def _reduction(given: Given) -> Labels:
    lost: Shape = given.params.get("axes") or given.params.get("dimensions", ())
    kept = [d for d in range(len(given.ins[0])) if d not in lost]
    return Labels(given.in_place().ins, [kept] * len(given.outs))


def _sum(given: Given) -> Labels:
    return _reduction(given)._replace(summed=given.params["axes"])


def _broadcast(given: Given) -> Labels:
    pairs = zip(given.params["broadcast_dimensions"], given.ins[0], strict=True)
    kept = [int(d) if n == given.outs[0][d] else None for d, n in pairs]
    return Labels([kept], [range(len(given.outs[0]))])


def _iota(given: Given) -> Labels:
    lost = given.params["dimension"]
    return Labels([], [[None if d == lost else d for d in range(len(given.outs[0]))]])


def _transpose(given: Given) -> Labels:
    return Labels([range(len(given.ins[0]))], [given.params["permutation"]])


def _pad(given: Given) -> Labels:
    padding = given.params["padding_config"]
    return given.in_place([d for d, x in enumerate(padding) if any(x)])


def _stack(given: Given) -> Labels:
    return given.with_new_axis(given.params["axis"])


def _taken_whole(given: Given) -> Labels:
    """A slice, an update of one, or copies. A dimension can be divided if all of it is taken, once."""
    is_update = len(given.ins) > 1 and len(given.ins[1]) == len(given.ins[0]) > 0
    part = given.ins[1] if is_update else given.outs[0]
    return given.in_place([d for d, n in enumerate(given.ins[0]) if n != part[d]])


def _dot(given: Given) -> Labels:
    contracted, batched = given.params["dimension_numbers"]
    sides = enumerate(given.ins)
    labels: list[list[Label]] = [[(i, d) for d in range(len(x))] for i, x in sides]
    for left, right in [*zip(*contracted, strict=True), *zip(*batched, strict=True)]:
        labels[1][right] = labels[0][left]
    shared, summed = ([labels[0][d] for d in dims[0]] for dims in (batched, contracted))
    free = [x for side in labels for x in side if x not in (*shared, *summed)]
    return Labels(labels, [[*shared, *free]], summed)


def _conv(given: Given) -> Labels:
    """Labels examples, and the input's features, over which it sums: a kernel's gradient has examples there."""
    (batch, feature, *_), of_right, of_out = given.params["dimension_numbers"]
    nothing: list[Label] = [None] * len(given.ins[0])
    left, right, out = [*nothing], [*nothing], [*nothing]
    if given.params["batch_group_count"] == 1:
        left[batch] = out[of_out[0]] = "examples"
        if given.params["feature_group_count"] == 1:
            left[feature] = right[of_right[1]] = "features"
    return Labels([left, right], [out], ["features"])


def _window(given: Given) -> Labels:
    """A dimension can be divided if each window is one element of it."""
    names = "window_dimensions", "window_strides", "base_dilation"
    sizes = [given.params.get(name) or [1] * len(given.ins[0]) for name in names]
    by_dimension = zip(given.params["padding"], *sizes, strict=True)
    is_lost = [any(padding) or {*x} != {1} for padding, *x in by_dimension]
    return given.in_place([d for d, x in enumerate(is_lost) if x])


class _Lookup(NamedTuple):
    """The dimension numbers of a gather or a scatter, by one name for both, in the order of JAX.

    Attributes:
      windows: dimensions of the result, or of the updates, that are a window of the operand.
      single: dimensions of the operand of which an index takes one element.
      columns: dimensions of the operand that the last axis of the indices numbers.
      batching: dimensions of the operand that number the same things as dimensions of the indices.
      batching_indices: these dimensions of the indices.
    """

    windows: Shape
    single: Shape
    columns: Shape
    batching: Shape
    batching_indices: Shape


def _of_lookup(given: Given, shape: Shape) -> list[Dims]:
    """Returns the labels of a gather's or a scatter's operand and indices, and of its result or updates, of a shape."""
    # Gather and scatter have these fields in the same order.
    its, (operand, indices) = _Lookup(*given.params["dimension_numbers"]), given.ins[:2]
    of_indices: list[Label] = [("index", d) for d in range(len(indices) - 1)]
    # 1. A dimension of the operand can be divided if windows take all of it, or if it numbers what the indices do.
    of_operand: list[Label] = [None] * len(operand)
    outside, windows = {*its.single, *its.batching}, its.windows
    in_window = [d for d in range(len(operand)) if d not in outside]
    for d, place in zip(in_window, windows, strict=True):
        of_operand[d] = ("window", d) if shape[place] == operand[d] else None
    for d, i in zip(its.batching, its.batching_indices, strict=True):
        of_operand[d] = of_indices[i]
    # 2. The result has dimensions of windows and of indices, each in their order.
    by_window, by_index = iter([of_operand[d] for d in in_window]), iter(of_indices)
    of_shape = [next(by_window if d in windows else by_index) for d in range(len(shape))]
    return [of_operand, [*of_indices, None], of_shape]


def _gather(given: Given) -> Labels:
    operand, indices, result = _of_lookup(given, given.outs[0])
    return Labels([operand, indices], [result])


def _scatter(given: Given) -> Labels:
    operand, indices, updates = _of_lookup(given, given.ins[2])
    return Labels([operand, indices, updates], [operand])


def _scatter_add(given: Given) -> Labels:
    its = _scatter(given)
    return its._replace(summed=[x for x in its.ins[1][:-1] if x not in its.ins[0]])


def _leading(lost: int) -> Rule:
    """The last dimensions of the first operand, which others or results may lack, belong together."""

    def rule(given: Given) -> Labels:
        count = len(given.params.get("fft_lengths", range(lost)))
        return given.first(len(given.ins[0]) - count)

    return rule


def _triangular_solve(given: Given) -> Labels:
    """Each column of the right side is solved alone. If the matrix stands at the right, it is each row."""
    matrix, right = ([*x] for x in given.first(len(given.ins[0]) - 2).ins)
    right[-1 if given.params["left_side"] else -2] = "columns"
    return Labels([matrix, right], [right])


def _prefix(given: Given) -> Labels:
    """The dimensions that all have."""
    return given.first(min(map(len, given.ins + given.outs)))


def _exchanged(given: Given) -> Labels:
    """Devices have the same rows at once, so what they exchange are rows again."""
    names = "all_gather_dimension", "scatter_dimension", "split_axis", "concat_axis"
    lost = [given.params[x] for x in names if x in given.params]
    is_stack = len(given.ins[0]) != len(given.outs[0])
    return given.with_new_axis(lost[0]) if is_stack else given.in_place(lost)


def _clip_cotangent(given: Given) -> Labels:
    """The package's own operation clips each slice alone. Its zeros and limits have one number for each slice."""
    dims = given.params["slices"].dims
    of_slices = [d if d in dims else None for d in range(len(given.ins[0]))]
    return Labels([of_slices, *(dims[: len(x)] for x in given.ins[1:])], [of_slices])


_RULES: list[tuple[Rule, str]] = [
    (
        _elementwise,
        """
        abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex
        conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt
        igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max
        mesh_cast min mul name ne neg nextafter not one_minus_square or pcast polygamma population_count pow pvary
        random_clone random_fold_in random_seed real reciprocal reduce_precision regularized_incomplete_beta rem reshard
        round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic shift_right_logical sign sin sinh
        sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta
        psum psum_invariant psum2 pmax pmin ppermute
        """,
    ),
    (_except_named, "cumsum cumprod cummax cummin cumlogsumexp top_k approx_top_k"),
    (_except_named, "split sort concatenate rev"),
    (_sum, "reduce_sum"),
    (_reduction, "argmax argmin reduce_max reduce_min reduce_prod reduce"),
    (_reduction, "reduce_and reduce_or reduce_xor"),
    (_broadcast, "broadcast_in_dim"),
    (_iota, "iota"),
    (_transpose, "transpose"),
    (_pad, "pad"),
    (_stack, "stack unstack"),
    (_taken_whole, "slice dynamic_slice dynamic_update_slice tile"),
    (_dot, "dot_general"),
    (_conv, "conv_general_dilated"),
    (_window, "reduce_window reduce_window_max reduce_window_min reduce_window_sum"),
    (_window, "select_and_scatter_add select_and_gather_add"),
    (_gather, "gather"),
    (_scatter, "scatter scatter-mul scatter-min scatter-max"),
    (_scatter_add, "scatter-add scatter-sub"),
    (_leading(2), "cholesky lu qr eigh eig svd fft schur"),
    (_leading(2), "householder_product hessenberg"),
    (_triangular_solve, "triangular_solve"),
    (_leading(1), "tridiagonal_solve lu_pivots_to_permutation"),
    (_prefix, "random_bits random_split random_wrap random_unwrap random_gamma"),
    (_prefix, "bitcast_convert_type"),
    (_clip_cotangent, "clip_cotangent"),
    (_exchanged, "all_gather all_gather_invariant reduce_scatter all_to_all"),
]
_LABELS = {name: rule for rule, names in _RULES for name in names.split()}


# Groups of operations.


def _set(names: str) -> set[str]:
    return {*names.split()}


_RETURNS_OPERANDS = {"optimization_barrier", "device_put"}
# Linear in all operands together.
_ADDITIVE = _set(
    """
    add add_any broadcast_in_dim concatenate convert_element_type copy copy_p cumsum imag
    mesh_cast neg pad pcast pvary real reduce_sum reduce_window_sum reshape reshard rev
    sharding_constraint slice split squeeze stack stop_gradient sub tile transpose unstack
    """
)
_BILINEAR = {"mul", "dot_general"}
OF_EACH_EXAMPLE = "of_each_example"


def is_reshape(equation: Equation) -> bool:
    """Returns whether an operation keeps the order of the elements."""
    is_squeeze = equation.primitive.name == "squeeze"
    return is_squeeze or jaxprs.is_plain_reshape(equation)


def is_of_each_example(equation: Equation) -> bool:
    """Returns whether the user says that it computes each example alone."""
    return equation.primitive.name == OF_EACH_EXAMPLE


def makes_varying(equation: Equation) -> bool:
    """Returns whether it changes only over which mapped axes a value varies."""
    return equation.primitive.name in ("pvary", "pcast")


def stops_gradient(equation: Equation) -> bool:
    """Returns whether results have no derivative, by `jax.lax.stop_gradient`."""
    return equation.primitive.name == "stop_gradient"


def returns_operands(equation: Equation) -> bool:
    """Returns whether result i is operand i."""
    return equation.primitive.name in _RETURNS_OPERANDS


def is_additive(equation: Equation) -> bool:
    """Returns whether it is linear in all operands together."""
    return equation.primitive.name in _ADDITIVE


def sums_from_zero(equation: Equation, is_first_zero: bool) -> bool:
    """Returns whether what is summed along a label is all that results hold: a scatter adds to its first operand."""
    return is_first_zero or equation.primitive.name not in jaxprs.SCATTER_ADDS


def is_linear(equation: Equation, is_sum: list[bool], is_zero: list[bool]) -> bool:
    """Returns whether results are linear in the operands that are sums, with the others given.

    A sum must keep its digits: no integer division, no cast to fewer, no sum of rounded numbers.
    """
    name, result = equation.primitive.name, equation.outvars[0]
    dtype = result.aval.dtype
    are_terms = [x or y for x, y in zip(is_sum, is_zero, strict=True)]
    if not all(map(_keeps_digits, (*equation.invars, result))):
        return False
    if name == "convert_element_type":
        return jnp.promote_types(equation.invars[0].aval.dtype, dtype) == dtype
    if name == "select_n":
        return not is_sum[0] and all(are_terms[1:])
    if name in _ADDITIVE:
        return all(are_terms)
    if sum(is_sum) != 1:
        return False
    if name == "div":
        return is_sum[0] and jnp.issubdtype(dtype, jnp.inexact)
    return name in _BILINEAR or (name == "dynamic_slice" and is_sum[0])


def _keeps_digits(x: Any) -> bool:
    dtype = x.aval.dtype
    return not jnp.issubdtype(dtype, jnp.inexact) or jnp.finfo(dtype).bits >= 32


# Batches one after the other on one axis.


def blocks_after(
    equation: Equation, axis: int, blocks: Sequence[Sequence[int]], neighbours: int
) -> list[Sequence[int]] | None:
    """Returns the blocks that the results have along an axis, or None if they begin or end inside of one.

    A block is given by its number of examples. Each has `neighbours` elements.
    """
    name, params = equation.primitive.name, equation.params
    if name == "concatenate" and params["dimension"] == axis:
        return [[x for each in blocks for x in each]]
    if name == "tile":
        return [[*blocks[0]] * params["reps"][axis]]
    ends = [0, *np.cumsum(blocks[0]) * neighbours]
    if name == "split" and params["axis"] == axis:
        cuts = [0, *np.cumsum(params["sizes"])]
    elif name == "slice" and (params["strides"] or [1] * (axis + 1))[axis] == 1:
        cuts = [params["start_indices"][axis], params["limit_indices"][axis]]
    else:
        return None
    if not {*cuts} <= {*ends}:
        return None
    at = [ends.index(x) for x in cuts]
    return [blocks[0][i:j] for i, j in itertools.pairwise(at)]


# Rows that are asked for their own elements.


def of_own_rows(equation: Equation, axis: int) -> tuple[int, Labels] | None:
    """Returns the column of the indices that numbers an axis of the operand, and the labels of the other operands.

    None if the equation does not take one element of that axis for each index.
    """
    is_lookup = _LABELS.get(equation.primitive.name) in (_gather, _scatter, _scatter_add)
    its = labels_of(equation) if is_lookup else None
    if its is None:
        return None
    lookup = _Lookup(*equation.params["dimension_numbers"])
    is_single = axis in lookup.columns and axis in lookup.single
    return (lookup.columns.index(axis), its) if is_single else None


# Other sizes.


def resized(equation: Equation, ins: Shapes, outs: Shapes, bounds: dict[int, int]) -> Equation:
    """Returns the equation for operands and results of these shapes. All other parameters stay as they are.

    `bounds` are the ends of blocks along the axis of the first operand that has another size.
    """
    name, params = equation.primitive.name, dict(equation.params)
    whole = [shape_of(x.aval) for x in equation.invars[:1]]
    if name in ("broadcast_in_dim", "iota"):
        params["shape"] = outs[0]
    elif name == "reshape":
        params["new_sizes"] = outs[0]
    elif name == "dynamic_slice":
        params["slice_sizes"] = outs[0]
    elif name == "split":
        params["sizes"] = tuple(x[params["axis"]] for x in outs)
    elif name == "gather":
        sizes = zip(params["slice_sizes"], *whole, ins[0], strict=True)
        params["slice_sizes"] = tuple(new if n == old else n for n, old, new in sizes)
    elif name == "slice":
        for side in ("start_indices", "limit_indices"):
            ends = zip(params[side], *whole, ins[0], strict=True)
            params[side] = tuple(x if old == new else bounds[x] for x, old, new in ends)
    return equation.replace(params=params)


def _broadcast_by_numpy(params: dict[str, Any], x: np.ndarray) -> np.ndarray:
    kept = params["broadcast_dimensions"]
    new = tuple(d for d in range(len(params["shape"])) if d not in kept)
    return np.broadcast_to(np.expand_dims(x, new), params["shape"])


def _iota_by_numpy(params: dict[str, Any]) -> np.ndarray:
    axis = params["dimension"]
    numbers = np.arange(params["shape"][axis])
    return _broadcast_by_numpy(params | {"broadcast_dimensions": [axis]}, numbers)


_BY_NUMPY: dict[str, Callable[..., np.ndarray]] = {
    "iota": _iota_by_numpy,
    "broadcast_in_dim": _broadcast_by_numpy,
    "reshape": lambda params, x: x.reshape(params["new_sizes"]),
    "squeeze": lambda params, x: np.squeeze(x, params["dimensions"]),
    "transpose": lambda params, x: x.transpose(params["permutation"]),
    "concatenate": lambda params, *x: np.concatenate(x, params["dimension"]),
    "convert_element_type": lambda params, x: x.astype(params["new_dtype"]),
    "copy": lambda _, x: x,
    "add": lambda _, x, y: x + y,
    "sub": lambda _, x, y: x - y,
    "lt": lambda _, x, y: x < y,
    "select_n": lambda _, which, *cases: np.choose(which, cases),
}


def by_numpy(equation: Equation, constant: Callable[[Atom], Any]) -> np.ndarray | None:
    """Returns the result of an operation by which indices are made, or None if it is another one, or not constant.

    On the host, because the mesh may have no device here.
    """
    compute = _BY_NUMPY.get(equation.primitive.name)
    operands = [*map(constant, equation.invars)] if compute else [None]
    if compute is None or any(x is None for x in operands):
        return None
    return compute(equation.params, *map(np.asarray, operands))


def columns_of(equation: Equation) -> list[tuple[Atom, int]]:
    """Returns, for each column that an operation joins along the last axis, the operand and its column there."""
    last = len(shape_of(equation.outvars[0].aval)) - 1
    if equation.primitive.name != "concatenate" or equation.params["dimension"] != last:
        return []
    return [(x, i) for x in equation.invars for i in range(shape_of(x.aval)[-1])]


# Draws, and what the frontier is chosen by.

_ACTS = _set("dot_general conv_general_dilated gather ragged_dot_general scatter-add")
_MOVES = _set(
    """
    transpose reshape broadcast_in_dim squeeze convert_element_type reshard sharding_constraint
    pcast pvary psum psum2 psum_invariant pmax pmin ppermute all_gather all_gather_invariant
    """
)


def contracts(equation: Equation) -> bool:
    """Returns whether weights act by such an operation."""
    return equation.primitive.name in _ACTS


def moves(equation: Equation) -> bool:
    """Returns whether an operation computes nothing of its own, or sends what it has over the network."""
    return equation.primitive.name in _MOVES


def is_draw(equation: Equation) -> bool:
    """Returns whether it draws random bits."""
    return equation.primitive.name == "random_bits"


def is_drawn_by_position(equation: Equation) -> bool:
    """Returns whether element j of a draw depends on the key and on j, so that any part of it can be drawn alone."""
    is_small = math.prod(shape_of(equation.outvars[0].aval)) < 2**32
    is_on = bool(jax.config.jax_threefry_partitionable)
    return is_on and is_small and is_threefry(equation.invars[0].aval)
