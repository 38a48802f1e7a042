"""The table of labels: each operation of a slice is that slice of the operation, and its sums are sums of slices."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

from shrewjax._division import labels
from shrewjax._programs import jaxprs

RNG = np.random.default_rng(0)
N = 4  # the same size of several dimensions, so that a rule cannot tell them apart by it


def floats(*shape, dtype=np.float32):
    return jnp.asarray(RNG.standard_normal(shape).astype(dtype))


def integers(*shape, below=N, dtype=np.int32):
    return jnp.asarray(RNG.integers(0, below, shape).astype(dtype))


def gathers(mode):
    """Lookups of every kind: by rows, in rows, of windows, in batches; some indices are out of bounds."""
    x, i = floats(N, N, N), integers(N, N, below=2 * N if mode != "promise_in_bounds" else N)
    fill = {"fill_value": 0.5} if mode == "fill" else {}
    for at in ((i,), (slice(None), i), (..., i)):
        yield lambda at=at: x.at[at].get(mode=mode, **fill)
    yield lambda: jnp.take_along_axis(x, i[:, :, None], axis=2, mode=mode)
    yield lambda: jnp.take_along_axis(x, i[:, None, :], axis=1, mode=mode)
    yield lambda: x.at[np.arange(N), i[0]].get(mode=mode)
    yield lambda: x.at[i[0], :, i[1]].get(mode=mode)
    yield lambda: jax.vmap(lambda x, i: x.at[i].get(mode=mode))(x, i)
    yield lambda: jax.vmap(lambda x, i: lax.dynamic_slice(x, (i, 0), (2, N)))(x, i[0])
    yield lambda: jax.vmap(lambda x, i: lax.dynamic_slice(x, (0, i), (N, 2)), in_axes=(2, 0))(x, i[0])


def scatters(name):
    x, i = floats(N, N, N), integers(N, below=N)
    rows = floats(N, N, N)
    put = lambda x, at, y: getattr(x.at[at], name)(y)  # noqa: E731
    yield lambda: put(x, i, rows)
    yield lambda: put(x, (slice(None), i), rows)
    yield lambda: put(x, (np.arange(N), i), rows[0])
    yield lambda: jax.vmap(lambda x, i, y: put(x, i, y))(x, i, rows[0])
    yield lambda: jax.vmap(lambda x, i, y: put(x, i, y), in_axes=(1, 0, 1))(x, i, rows[0])
    yield lambda: jax.vmap(lambda x, i, y: lax.dynamic_update_slice(x, y, (i, 0)))(x, i, floats(N, 2, N))


def convolutions():
    x, kernel = floats(N, N, 6, 6), floats(N, N, 3, 3)
    conv = functools.partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME")
    yield lambda: conv(x, kernel)
    last = lambda x: jnp.moveaxis(x, 1, -1)  # noqa: E731
    yield lambda: conv(last(x), jnp.transpose(kernel), dimension_numbers=("NHWC", "HWIO", "NHWC"))
    yield lambda: conv(x, kernel[:, :1], feature_group_count=N)
    yield lambda: conv(x, kernel[:, :2], feature_group_count=2)
    yield lambda: conv(x, kernel, batch_group_count=2)
    yield lambda: conv(x, kernel, padding="VALID", rhs_dilation=(1, 2))
    loss = lambda x, kernel: jnp.sum(conv(x, kernel) ** 2)  # noqa: E731
    yield lambda: jax.grad(loss, (0, 1))(x, kernel)
    yield lambda: jax.vmap(jax.grad(loss), (0, None))(x[None], kernel)
    yield lambda: jax.vmap(conv, (None, 0))(x, jnp.stack([kernel, kernel]))


def windows():
    x = floats(N, 6, 6, N)
    for size, strides, padding in (
        ((1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        ((1, 3, 3, 1), (1, 1, 1, 1), "SAME"),
        ((2, 1, 1, 1), (1, 1, 1, 1), "SAME"),
        ((1, 1, 1, 1), (2, 1, 1, 1), "VALID"),
        ((1, 1, 1, 1), (1, 1, 1, 1), ((1, 0), (0, 0), (0, 0), (0, 1))),
    ):
        for start, function in ((-np.inf, lax.max), (np.inf, lax.min), (0.0, lax.add), (1.0, lax.mul)):
            pool = functools.partial(
                lax.reduce_window,
                init_value=np.float32(start),
                computation=function,
                window_dimensions=size,
                window_strides=strides,
                padding=padding,
            )
            yield lambda pool=pool: pool(x)
            if function is lax.max:
                yield lambda pool=pool: jax.grad(lambda x: jnp.sum(pool(x) ** 2))(x)
                yield lambda pool=pool: jax.jvp(pool, (x,), (x,))
    dilated = functools.partial(lax.reduce_window, init_value=np.float32(0), computation=lax.add)
    yield lambda: dilated(
        x, window_dimensions=(1,) * 4, window_strides=(1,) * 4, padding="VALID", base_dilation=(2, 1, 1, 1)
    )


def draws():
    keys = jax.random.split(jax.random.key(0), (N, N))
    raw = jax.random.key_data(keys)
    each = lambda f: jax.vmap(jax.vmap(f))  # noqa: E731
    for bits in (8, 16, 32):
        yield lambda bits=bits: each(lambda k: jax.random.bits(k, (N,), f"uint{bits}"))(keys)
    yield lambda: each(jax.random.split)(keys)
    yield lambda: each(lambda k: jax.random.fold_in(k, 3))(keys)
    yield lambda: jax.vmap(jax.random.fold_in, (None, 0))(keys[0, 0], integers(N, dtype=np.uint32))
    yield lambda: each(jax.random.normal)(raw)
    yield lambda: each(jax.random.clone)(keys)
    yield lambda: jax.vmap(jax.random.key)(integers(N))
    yield lambda: jax.random.key_data(keys)
    yield lambda: jax.vmap(jax.random.gamma)(keys[0], jnp.abs(floats(N)))
    yield lambda: jax.random.gamma(keys[0, 0], jnp.abs(floats(N, N)))


def linear_algebra():
    x = floats(N, N, N, N)
    positive = x @ x.swapaxes(-1, -2) + N * np.eye(N, dtype=np.float32)
    yield lambda: jnp.linalg.cholesky(positive)
    yield lambda: lax.linalg.triangular_solve(positive, x, left_side=True, lower=True)
    yield lambda: lax.linalg.lu(positive)
    yield lambda: lax.linalg.qr(x)
    yield lambda: lax.linalg.eigh(positive)
    yield lambda: lax.linalg.eigh(positive)[1]
    yield lambda: lax.linalg.svd(x)
    yield lambda: lax.linalg.svd(x, compute_uv=False)
    yield lambda: lax.linalg.householder_product(x, x[..., 0])
    yield lambda: lax.linalg.tridiagonal_solve(x[..., 0], 4 + x[..., 1] ** 2, x[..., 2], x)
    yield lambda: lax.linalg.lu_pivots_to_permutation(lax.linalg.lu(positive)[1], N)
    yield lambda: jnp.fft.fft(x)
    yield lambda: jnp.fft.irfft2(x.astype(np.complex64))
    if jax.default_backend() == "cpu":
        yield lambda: lax.linalg.eig(x)
        yield lambda: lax.linalg.hessenberg(x)
        yield lambda: lax.linalg.schur(x)


def moves():
    x, y = floats(N, N, N), floats(N, 1, N)
    for axis in range(3):
        yield lambda axis=axis: jnp.cumsum(x, axis)
        yield lambda axis=axis: lax.cumprod(x, axis, reverse=True)
        yield lambda axis=axis: lax.cummax(x, axis)
        yield lambda axis=axis: lax.cummin(x, axis)
        yield lambda axis=axis: lax.cumlogsumexp(x, axis)
        yield lambda axis=axis: lax.sort([x, x * 2], dimension=axis)
        yield lambda axis=axis: jnp.flip(x, axis)
        yield lambda axis=axis: lax.split(x, (1, N - 1), axis)
        yield lambda axis=axis: jnp.concatenate([x, x * 2], axis)
        yield lambda axis=axis: jnp.stack([x, x * 2], axis)
        yield lambda axis=axis: jnp.unstack(x, axis=axis)
        yield lambda axis=axis: jnp.tile(x, [1 + (axis == d) for d in range(3)])
        yield lambda axis=axis: lax.argmax(x, axis, np.int32)
        yield lambda axis=axis: lax.argmin(x, axis, np.int32)
        yield lambda axis=axis: [jnp.sum(x, axis), jnp.max(x, axis), jnp.min(x, axis), jnp.prod(x, axis)]
        yield lambda axis=axis: [jnp.all(x > 0, axis), jnp.any(x > 0, axis)]
        yield lambda axis=axis: lax.reduce_xor(integers(N, N, N), (axis,))
        yield lambda axis=axis: lax.reduce(x, np.float32(1), lambda a, b: a * b, [axis])
        yield lambda axis=axis: lax.dynamic_slice_in_dim(x, jnp.int32(1), 2, axis)
        yield lambda axis=axis: lax.slice_in_dim(x, 1, N, axis=axis)
        yield lambda axis=axis: lax.slice_in_dim(x, 0, N, 2, axis=axis)
        yield lambda axis=axis: lax.dynamic_update_slice_in_dim(
            x, lax.slice_in_dim(x, 0, 2, axis=axis), jnp.int32(1), axis
        )
        yield lambda axis=axis: lax.broadcasted_iota(np.int32, (N, N, N), axis)
        yield lambda axis=axis: jnp.pad(x, [(axis == d, 0) for d in range(3)])
    yield lambda: lax.pad(x, np.float32(0), [(0, 0, 1), (-1, 0, 0), (0, 0, 0)])
    yield lambda: jnp.sum(x, (0, 2))
    yield lambda: lax.top_k(x, 2)
    yield lambda: lax.approx_max_k(x, 2, reduction_dimension=1)
    yield lambda: jnp.transpose(x, (2, 0, 1))
    yield lambda: lax.broadcast_in_dim(y, (N, N, N), (0, 1, 2))
    yield lambda: jnp.broadcast_to(y, (2, N, N, N))
    yield lambda: jnp.einsum("abc,acd->bd", x, x)
    yield lambda: jnp.einsum("abc,dc->adb", x, x[0])
    yield lambda: jnp.einsum("abc,bac->ab", x, x)
    yield lambda: lax.bitcast_convert_type(x, np.uint8)
    yield lambda: lax.bitcast_convert_type(integers(N, N, 4, dtype=np.uint8), np.int32)
    yield lambda: lax.bitcast_convert_type(x, np.int32)


def elementwise():
    x, y, wide, i = floats(N, N), floats(N, N) ** 2 + 0.5, floats(N, 1), integers(N, N, dtype=np.uint32)
    unit = jnp.tanh(x)
    scalar = np.float32(2)
    one = """abs ceil log2 cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor is_finite lgamma log log1p logistic
        neg real_if_close round rsqrt sign sin sinh sqrt square tan tanh bessel_i0e bessel_i1e cbrt acosh asinh atan"""
    of_positive = {"lgamma", "log", "log2", "log1p", "sqrt", "rsqrt", "digamma"}
    for name in one.split():
        if hasattr(lax, name):
            z = {"acosh": y + 1, "erf_inv": unit}.get(name, y if name in of_positive else x)
            yield lambda name=name, z=z: getattr(lax, name)(z)
    for name in ["acos", "asin", "atanh"]:
        yield lambda name=name: getattr(lax, name)(unit)
    two = "add sub mul div rem max min atan2 nextafter eq ne lt le gt ge"
    for name in two.split():
        yield lambda name=name: getattr(lax, name)(x, y)
    for name in ["add", "mul", "max"]:
        yield lambda name=name: getattr(lax, name)(x, scalar)
        yield lambda name=name: getattr(jnp, {"add": "add", "mul": "multiply", "max": "maximum"}[name])(x, wide)
    for name in ["pow", "igamma", "igammac", "polygamma", "zeta", "random_gamma_grad", "igamma_grad_a"]:
        if hasattr(lax, name):
            yield lambda name=name: getattr(lax, name)(y + 1, y)
    of_bits = "bitwise_and bitwise_or bitwise_xor shift_left shift_right_logical shift_right_arithmetic"
    for name in of_bits.split():
        yield lambda name=name: getattr(lax, name)(i, i)
    yield lambda: lax.betainc(y, y, jnp.abs(unit))
    yield lambda: [lax.population_count(i), lax.clz(i), lax.bitwise_not(i), lax.integer_pow(x, 3)]
    yield lambda: [lax.real(x + 1j), lax.imag(x + 1j), lax.conj(x + 1j), lax.complex(x, y)]
    yield lambda: [lax.reduce_precision(x, 5, 10), lax.convert_element_type(x, np.int32), jnp.copy(x)]
    yield lambda: [lax.clamp(np.float32(0), x, y), lax.clamp(x, y, y + 1), lax.stop_gradient(x)]
    yield lambda: [lax.select(x > 0, x, y), lax.select_n(np.int32(1), x, y)]
    yield lambda: jax.jvp(jnp.tanh, (x,), (y,))
    yield lambda: lax.sort([x, y])
    yield lambda: checkpoint_name(x, "x")
    yield lambda: jax.random.bits(jax.random.wrap_key_data(integers(2, dtype=np.uint32)), (N,))


CASES = {
    **{f"gather_{mode}": lambda mode=mode: gathers(mode) for mode in ("fill", "clip", "promise_in_bounds")},
    **{
        f"scatter_{name}": lambda name=name: scatters(name)
        for name in ("set", "add", "subtract", "multiply", "min", "max")
    },
    "convolutions": convolutions,
    "windows": windows,
    "draws": draws,
    "linear_algebra": linear_algebra,
    "moves": moves,
    "elementwise": elementwise,
}
# What no test here traces: collectives and types of mapped axes, which the folder `devices` has, older names, an
# operation of Pallas, and the clip of the backward pass, which promises/test_mistaken_calls.py has.
ELSEWHERE = """
    psum psum_invariant psum2 pmax pmin ppermute all_gather all_gather_invariant reduce_scatter all_to_all
    pvary pcast mesh_cast reshard sharding_constraint threefry2x32 copy_p add_any le_to lt_to eq_to reciprocal
    clip_cotangent
"""


def equations(jaxpr):
    """Yields equations, those of calls in their place, with their operands."""
    for equation in jaxpr.jaxpr.eqns:
        inner = jaxprs.jaxpr_of_jit(equation) or jaxprs.jaxpr_of_call(equation)
        if inner is None:
            yield equation
        else:
            yield from equations(inner)


def values_of(function):
    """Yields the equations of a function without arguments that the table has, with their operands and results."""
    arrays = []

    def traced(*given):
        return function()

    flat = jax.make_jaxpr(traced)()

    def run(jaxpr, operands):
        env = dict(zip(jaxpr.jaxpr.invars, operands, strict=True)) | dict(
            zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)
        )
        read = lambda x: env[x] if jaxprs.is_variable(x) else jnp.asarray(x.val, x.aval.dtype)  # noqa: E731
        for equation in jaxpr.jaxpr.eqns:
            given = [*map(read, equation.invars)]
            inner = jaxprs.jaxpr_of_jit(equation) or jaxprs.jaxpr_of_call(equation)
            if inner is None:
                made = jaxprs.run_equation(equation, given)
                arrays.append((equation, given, made))
            else:
                made = run(inner, given)
            env.update(zip(equation.outvars, made, strict=True))
        return [*map(read, jaxpr.jaxpr.outvars)]

    run(flat, [])
    return arrays


def sliced(x, dims, label, rows):
    for axis, own in enumerate(dims):
        if own == label and label is not None:
            x = jnp.take(x, rows, axis, mode="clip")
    return x


def check(equation, operands, results):
    """Checks each label of an equation on a random slice. Returns whether it has one."""
    its = labels.labels_of(equation)
    if its is None:
        return
    assert [len(x) for x in its.ins] == [np.ndim(x) for x in operands], equation
    assert [len(x) for x in its.outs] == [np.ndim(x) for x in results], equation
    for label in {x for dims in its.outs for x in dims if x is not None}:
        sizes = {
            x.shape[d]
            for side, arrays in ((its.ins, operands), (its.outs, results))
            for dims, x in zip(side, arrays, strict=True)
            for d, y in enumerate(dims)
            if y == label
        }
        (size,) = sizes
        if size < 2:
            continue
        rows = np.sort(RNG.choice(size, RNG.integers(1, size), replace=False))
        given = [sliced(x, dims, label, rows) for x, dims in zip(operands, its.ins, strict=True)]
        wanted = [sliced(x, dims, label, rows) for x, dims in zip(results, its.outs, strict=True)]
        if any(label not in dims for dims in its.outs):
            continue
        resized = labels.resized(equation, [x.shape for x in given], [x.shape for x in wanted], {0: 0, size: len(rows)})
        for x, y in zip(jaxprs.run_equation(resized, given), wanted, strict=True):
            assert x.shape == y.shape, (equation, label)
            same(x, y, (equation, label))
    for label in its.summed:
        here = [d for dims in its.ins for d in dims if d == label]
        if label is None or not here:
            continue
        if not labels.sums_from_zero(equation, is_first_zero=False):
            zero = [jnp.zeros_like(operands[0]), *operands[1:]]
            results, operands = jaxprs.run_equation(equation, zero), zero
        size = next(
            x.shape[d] for dims, x in zip(its.ins, operands, strict=True) for d, y in enumerate(dims) if y == label
        )
        cut = RNG.permutation(size)
        parts = [np.sort(cut[: size // 2]), np.sort(cut[size // 2 :])]
        each = []
        for rows in parts:
            given = [sliced(x, dims, label, rows) for x, dims in zip(operands, its.ins, strict=True)]
            resized = labels.resized(equation, [x.shape for x in given], [x.shape for x in results], {})
            each.append(jaxprs.run_equation(resized, given)[0])
        same(each[0] + each[1], results[0], (equation, "sum", label))


def same(x, y, what):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4, err_msg=str(what))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("as_users_have_it")
def test_a_slice_of_an_operation_is_the_operation_of_a_slice(case):
    for function in CASES[case]():
        for equation, operands, results in values_of(function):
            check(equation, operands, results)


@pytest.mark.usefixtures("as_users_have_it")
def test_every_row_of_the_table_is_run_if_this_jax_has_the_operation():
    names = {x.name for x in gc.get_objects() if isinstance(x, Primitive)}
    seen = {x.primitive.name for case in CASES.values() for f in case() for x in equations(jax.make_jaxpr(f)())}
    assert not ({*labels._LABELS} & names) - seen - {*ELSEWHERE.split()}
