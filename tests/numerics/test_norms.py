"""Norms are right in range, precision and derivative."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import each_world, thorough, true_norm
from speed import quick_jit, users_jit

import shrewjax
from shrewjax._base.axes import unit_axes
from shrewjax._numerics import floats
from shrewjax._numerics.norms import (
    _cube_root,
    _global,
    _in_float64,
    _in_two_passes,
    combine,
    measure_units,
)
from shrewjax._numerics.vectors import broadcast_to_leaf, split

pytestmark = [each_world, pytest.mark.usefixtures("either_world")]
ORDERS = [1, 2, 3, 1000, np.inf]
f32 = np.float32


# Leaves of the same dtypes have the same shapes, with zeros at the end, so that one program takes their norms.
IN_RANGE = [
    [f32([3, 4, 0]), f32([0, 0, 0])],
    [f32([1e20, 1e20, 0]), f32([1e20, 0, 0])],
    [f32([1e-25, 1e-25, 0]), f32([0, 0, 0])],
    [f32([3e-30, 4e-30, 0]), f32([0, 0, 0])],
    [f32([1e30, 0, 0]), f32([1e-30, 0, 0])],
    [f32([1e-18, 1e-19, 1e-20]), f32([0, 0, 0])],
    [np.float16([300] * 50)],
    [np.float16([6e-8] * 4 + [0] * 46)],
    [np.ones(300, jnp.bfloat16)] * 3,
    [np.float16([1.0]), f32([1e5])],
    [np.complex64([3 + 4j, 1j]), f32([0])],
    [np.complex64([1e25 + 1e25j, 0]), f32([1e25])],
    [np.complex64([1e-25 + 1e-25j, 0]), f32([0])],
    [np.complex64([2e-38, 0]), f32([0])],  # half of it is subnormal
    [np.complex64([2e-38 + 2e-38j, 3e-38j]), f32([3e-38])],
    [np.complex64([2e-38, 1e20j]), f32([1e-30])],
    [np.zeros((0,), f32), np.ones((), f32), np.full((1, 2, 3), f32(2))],
]


@quick_jit
def norms_of_every_order(leaves):
    """In one program, because compilation takes most of the time."""
    return {ord: shrewjax.grad_norm(leaves, ord) for ord in ORDERS}


def test_norm_neither_overflows_nor_underflows():
    for case, leaves in enumerate(IN_RANGE):
        for ord, found in norms_of_every_order(leaves).items():
            assert float(found) == pytest.approx(float(true_norm(leaves, ord)), rel=1e-6, abs=0), (case, ord)


FORMS = {"in a branch": functools.partial(_in_two_passes, rescales_small=None), "in float64": _in_float64}


@pytest.mark.parametrize("form", FORMS)
def test_each_platforms_form_neither_overflows_nor_underflows(form):
    """That of GPUs runs on a CPU as well."""

    @quick_jit
    def norms(leaves):
        return [floats.from_extended(FORMS[form](leaves, kind=_global(leaves, ord, None))[0]) for ord in (1, 2)]

    narrow = {"bfloat16": (2e38, 1.0, 4e-38), "float16": (6e4, 1.0, 6e-8), "float8_e5m2": (5e4, 1.0, 2e-5)}
    narrow = [[np.asarray([x, x / 2]).astype(dtype)] for dtype, values in narrow.items() for x in values]
    for case, leaves in enumerate([*IN_RANGE, *narrow]):
        for ord, norm in zip((1, 2), norms(leaves), strict=True):
            assert float(norm) == pytest.approx(float(true_norm(leaves, ord)), rel=1e-6, abs=0), (case, ord)
    for bad, expected in ((np.nan, np.nan), (np.inf, np.inf)):
        np.testing.assert_array_equal(norms([f32([3, 4, 0]), f32([0, bad, 0])]), [expected] * 2)


def test_norm_of_float64_leaves_is_float64_and_neither_overflows_nor_underflows():
    with jax.enable_x64(True):
        for values in ([3e200, 4e200], [3e-200, 4e-200], [3e-310, 4e-310], [1.0, 1e-9]):
            leaves = [np.float64(values), np.float32([1.0]) * 0]
            norm = shrewjax.grad_norm(leaves)
            assert norm.dtype == jnp.float64
            tolerance = 1e-15 if values[0] > 1e-300 else 1.0  # subnormals are flushed on CPU
            assert float(norm) == pytest.approx(float(true_norm(leaves)), rel=tolerance, abs=0)


@pytest.mark.parametrize(("dtype", "smallest"), [(np.complex64, 2e-38), (np.complex128, 4e-308)])
def test_complex_numbers_whose_halves_are_subnormal_count_in_every_order(dtype, smallest):
    leaf = np.asarray([smallest, smallest * 1j, 0], dtype)
    orders = [1, 1.5, 2, 3, 4, np.inf]
    with jax.enable_x64(True):
        norms = quick_jit(lambda x: [shrewjax.grad_norm([x], ord) for ord in orders])(leaf)
        clipped = quick_jit(lambda x: shrewjax.clip_grad_norm(x, smallest / 2, ord=np.inf)[0])(leaf)
    for ord, norm in zip(orders, norms, strict=True):
        # In units of the smallest, because the definition's powers would leave the range.
        assert float(norm) / smallest == pytest.approx(float(true_norm([leaf / smallest], ord)), rel=1e-6), ord
    assert np.abs(clipped).max() <= 0.5001 * smallest


def of_one_element(value, dtype):
    """Leaves whose units have one element, and in which the compiler finds no sum to take."""
    return [jnp.full(shape, value, dtype) for shape in ((), (1,), (2, 1))]


def norms_of_one(leaves):
    """Their norms of orders 1 and 2: of all, by leaf, and by unit."""
    found = {}
    for ord in (1, 2):
        rules = [
            shrewjax.clip_by_leaf_norm(1, ord=ord, stacked_axes=axes)
            for axes in (None, lambda _, x: 0 if x.ndim else None)
        ]
        states = [tx.update(leaves, tx.init(leaves))[1].grad_norm for tx in rules]
        found[str(ord)] = shrewjax.grad_norm(leaves, ord), *states
    tx = shrewjax.clip_by_global_norm(1, per_leaf=True)
    return found | {"leaves": tx.update(leaves, tx.init(leaves))[1].leaf_norms}


def known_gradients(value, dtype):
    """Gradients that the compiler knows; those of parameters that are not used if the value is 0."""
    return jax.grad(lambda params: sum((jnp.sum((x * value).real) for x in params if value), 0.0))(
        of_one_element(1, dtype)
    )


WAYS = {
    "argument": lambda trees: jax.jit(lambda trees: [*map(norms_of_one, trees)])(trees),
    "eager": lambda trees: [*map(norms_of_one, trees)],
    "vmap": lambda trees: [
        jax.tree.map(lambda x, i=i: x[i], rows)
        for rows in [jax.jit(jax.vmap(norms_of_one))(jax.tree.map(lambda *xs: jnp.stack(xs), *trees))]
        for i in range(len(trees))
    ],
}


CASES = [(jnp.float32, "argument"), (jnp.float32, "gradient")]
OTHERS = [
    *((jnp.float32, way) for way in ("constant", "eager", "vmap")),
    (jnp.bfloat16, "gradient"),
    (jnp.float16, "vmap"),
    (jnp.complex64, "constant"),
    (jnp.float64, "constant"),
]


@pytest.mark.combinations
@pytest.mark.parametrize(("dtype", "way"), [*CASES, *thorough(*OTHERS)])
def test_a_leaf_of_one_element_has_a_norm_in_every_range(dtype, way):
    """XLA-7: two known scales of an element would be multiplied by each other first."""
    values = {jnp.float16: [0, 3, 6e4, 6e-8], jnp.float64: [0, 3, 1e200, 1e-200]}.get(dtype, [0, 3, 1e20, 1e-25])
    with jax.enable_x64(dtype == jnp.float64):
        if way == "constant":
            found = jax.jit(lambda: [norms_of_one(of_one_element(v, dtype)) for v in values])()
        elif way == "gradient":
            found = jax.jit(lambda: [norms_of_one(known_gradients(v, dtype)) for v in values])()
        else:
            found = WAYS[way]([of_one_element(v, dtype) for v in values])
    for value, norms in zip(values, found, strict=True):
        value = float(jnp.asarray(value, dtype if dtype != jnp.complex64 else f32)) if dtype != jnp.float64 else value
        of = np.float64 if dtype == jnp.float64 else f32
        for ord in (1, 2):
            total, by_leaf, by_unit = norms[str(ord)]
            np.testing.assert_allclose(total, value * 4 ** (1 / ord), rtol=1e-6, err_msg=f"{value} {ord}")
            np.testing.assert_allclose(
                by_leaf, of([value, value, value * 2 ** (1 / ord)]), rtol=1e-6, err_msg=f"{value} {ord}"
            )
            for x in jax.tree.leaves(by_unit):
                np.testing.assert_allclose(x, of(value), rtol=1e-6)
        np.testing.assert_allclose(norms["leaves"], of([value, value, value * 2**0.5]), rtol=1e-6)


def test_norm_of_nothing_is_zero():
    nothing = [np.zeros((0, 3), f32)], [np.zeros(3, f32)] * 2, {"i": np.arange(3), "flag": np.ones(2, bool)}
    for tree in ({}, None, *nothing):
        assert {ord: float(norm) for ord, norm in norms_of_every_order(tree).items()} == dict.fromkeys(ORDERS, 0), tree


@pytest.mark.parametrize("shape", [(3,), (300, 400)], ids=str)
def test_norm_of_nan_is_nan_and_of_inf_is_inf(shape):
    for bad, expected in ((np.nan, np.nan), (np.inf, np.inf), (-np.inf, np.inf)):
        x = np.ones(shape, f32)
        x.flat[x.size // 2] = bad
        for other, norm in ((f32([1, 1, 1]), expected), (f32([np.nan, 1, 1]), np.nan)):
            found = jax.device_get(norms_of_every_order([x, other]))
            np.testing.assert_equal(found, dict.fromkeys(ORDERS, f32(norm)))


def test_norm_beyond_float32_reads_inf():
    leaves = [np.complex64([3e38 + 3e38j, 3e38]), f32([3e38])]
    assert {*map(float, norms_of_every_order(leaves).values())} == {np.inf}


norms_of_four_orders = users_jit(lambda leaves: {ord: shrewjax.grad_norm(leaves, ord) for ord in (1, 2, 3, np.inf)})


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, *thorough(jnp.float16)])
@pytest.mark.parametrize("kind", ["normal", "constant", *thorough("heavy tail")])
def test_norm_of_a_million_elements_is_within_1e_6(dtype, kind):
    rng = np.random.default_rng(0)
    draw = {"normal": rng.normal, "constant": lambda size: np.full(size, 0.1), "heavy tail": rng.standard_cauchy}[kind]
    leaves = [np.clip(draw(size=s), -6e4, 6e4).astype(dtype) for s in ((1000, 900), (99_999,), (1,))]
    for ord, found in norms_of_four_orders(leaves).items():
        assert float(found) == pytest.approx(float(true_norm(leaves, ord)), rel=1e-6, abs=0), ord


def test_norm_does_not_depend_on_the_order_of_the_leaves():
    """Three orders, because each is a program; and many gradients."""
    rng = np.random.default_rng(1)
    kinds = [
        (7, 0, jnp.float32),
        (100, -2, jnp.bfloat16),
        (3, 2, jnp.float16),
        (50, 1, jnp.float32),
        (1, 0, jnp.complex64),
    ]
    gradients = [[(rng.normal(size=n) * 10.0**k).astype(d) for n, k, d in kinds] for _ in range(20)]
    norm = users_jit(shrewjax.grad_norm)
    expected = [norm(leaves) for leaves in gradients]
    assert expected[0].dtype == jnp.float32
    for order in ([4, 3, 2, 1, 0], [2, 0, 3, 4, 1], [1, 4, 0, 2, 3]):
        assert [float(norm([leaves[i] for i in order])) for leaves in gradients] == list(map(float, expected)), order


def test_three_hundred_bfloat16_leaves_do_not_stall():
    """A sum of ones in bfloat16 stalls at 256."""
    leaves = [np.ones((), jnp.bfloat16)] * 300
    assert float(quick_jit(shrewjax.grad_norm)(leaves)) == pytest.approx(300**0.5, rel=1e-6, abs=0)


@functools.cache
def slope(ord):
    """The derivative of the norm of two leaves, of one element and of three."""
    return quick_jit(jax.grad(lambda x: shrewjax.grad_norm([x[:1], x[1:]], ord)))


@pytest.mark.parametrize("ord", [1, 2, 3, np.inf])
def test_derivative_of_the_norm(ord):
    x = np.float64([3, -4, 1, 2])
    if ord == np.inf:
        expected = np.float64([0, -1, 0, 0])
    else:  # d norm / d x_i = sign(x_i) (|x_i| / norm) ** (p - 1)
        expected = np.sign(x) * (np.abs(x) / np.linalg.norm(x, ord)) ** (ord - 1)
    for scale in (1.0, 1e25, 1e-25):
        np.testing.assert_allclose(slope(ord)(f32(scale * x)), expected, rtol=1e-5, err_msg=str(scale))


@pytest.mark.parametrize(
    ("x", "expected"), [([2, -2, 1, 0], [0.5, -0.5, 0, 0]), ([1, 2, -2, 0], [0, 0.5, -0.5, 0])], ids=str
)
def test_derivative_of_the_largest_is_shared_between_ties(x, expected):
    np.testing.assert_array_equal(slope(np.inf)(f32(x)), expected)


@pytest.mark.parametrize("ord", [1, 2, 3, np.inf])
def test_derivative_at_a_zero_norm_is_zero(ord):
    np.testing.assert_array_equal(slope(ord)(np.zeros(4, f32)), np.zeros(4))


def test_derivative_of_a_complex_leaf_is_that_of_its_parts():
    def norm(parts):
        return shrewjax.grad_norm([jax.lax.complex(parts[0], parts[1]), parts[2]])

    parts = f32([[3.0, 1.0], [-2.0, 0.5], [0.0, 4.0]])
    np.testing.assert_allclose(quick_jit(jax.grad(norm))(parts), parts / np.linalg.norm(parts), rtol=1e-6)


def test_second_derivative_of_the_norm():
    x = f32([3.0, 4.0])
    hessian = quick_jit(jax.hessian(lambda x: shrewjax.grad_norm([x])))(x)
    unit = np.float64(x) / 5
    np.testing.assert_allclose(hessian, (np.eye(2) - np.outer(unit, unit)) / 5, rtol=1e-5, atol=1e-7)


def test_norm_under_vmap_takes_each_row_through_its_own_range():
    rows = jnp.array([[3.0, 4.0], [3e25, 4e25], [3e-25, 4e-25], [0.0, 0.0], [jnp.inf, 1.0]])
    np.testing.assert_allclose(jax.vmap(shrewjax.grad_norm)(rows), [5, 5e25, 5e-25, 0, np.inf], rtol=1e-6)


def test_common_case_reads_the_gradients_once():
    """On a CPU the scaled pass sits in a branch: outside of it there is one reduction of the data."""
    jaxpr = jax.make_jaxpr(lambda x: _in_two_passes([x], None, _global([x], 2, None)))(jnp.ones((8, 8)))
    reductions = [e for e in jaxpr.eqns if e.primitive.name == "reduce_sum" and e.invars[0].aval.shape == (8, 8)]
    assert len(reductions) == 1
    assert [e.primitive.name for e in jaxpr.eqns].count("cond") == 1


@pytest.mark.parametrize("scale", [1.0, 1e25, 1e-25])
def test_norms_of_units_and_of_all_of_them_together(scale):
    leaves = [f32(scale) * x for x in (np.arange(60, dtype=f32).reshape(3, 4, 5), np.arange(1, 4, dtype=f32), f32(1))]
    kept = ((0, 2), (), ())
    by_unit, spread, together = norms_of_units(leaves, kept)
    for x, keep, norm, on_leaf in zip(leaves, kept, by_unit, spread, strict=True):
        rest = tuple(a for a in range(x.ndim) if a not in keep)
        expected = np.sqrt(np.sum(np.float64(x) ** 2, axis=rest))
        np.testing.assert_allclose(norm, expected, rtol=1e-6)
        assert np.broadcast_shapes(on_leaf.shape, x.shape) == x.shape
    assert float(together) == pytest.approx(float(true_norm(leaves)), rel=1e-6)


@functools.partial(quick_jit, static_argnums=1)
def norms_of_units(leaves, kept):
    """Norms of the units of three leaves; as `broadcast_to_leaf` has them; the norm of all."""
    groups, shapes = ((0,), (1, 2)), [(3, 5), (), ()]
    axes = tuple(unit_axes("", x, keep, None) for x, keep in zip(leaves, kept, strict=True))
    joined = measure_units(leaves, kept, axes, groups)
    norms = split(list(map(floats.from_extended, joined)), groups, shapes)
    spread = [broadcast_to_leaf(norm, x, keep) for x, keep, norm in zip(leaves, kept, norms, strict=True)]
    return norms, spread, floats.from_extended(combine(joined, [None, None]))


def test_norm_of_no_units_is_zero():
    assert measure_units([], (), (), ()) == []
    assert float(floats.from_extended(combine([], []))) == 0


def test_a_second_read_of_large_leaves_takes_no_memory():
    """XLA-6: a scalar that leaves share would be held as an array of each leaf's size."""
    leaves = [jax.ShapeDtypeStruct((2**18,), f32)] * 8
    compiled = users_jit(shrewjax.grad_norm).lower(leaves).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.01 * 8 * 4 * 2**18


def test_cube_roots_in_float64_are_right_to_one_eps():
    """XLA-20: `lax.cbrt` is off by more."""
    with jax.enable_x64(True):
        x = np.random.default_rng(0).uniform(1, 8, 10_000) * 10.0 ** (np.arange(10_000) % 180)
        root = np.asarray(users_jit(_cube_root)(x))
    # The relative error of a root r of x is (r**3 - x) / (3 x), but for its square.
    errors = [
        abs(Fraction(float(r)) ** 3 - Fraction(float(v))) / (3 * Fraction(float(v)))
        for r, v in zip(root, x, strict=True)
    ]
    assert max(errors) < np.finfo(np.float64).eps
