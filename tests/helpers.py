"""Oracles that share nothing with the package, and what several test files need."""

import contextlib
import itertools
import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shrewjax


class Case(NamedTuple):
    """A public transformation, as the tests use it: the one list of them all."""

    make: Callable[[], optax.GradientTransformationExtraArgs]  # with the arguments of a typical use
    injected: dict[str, Any]  # its arguments under `optax.inject_hyperparams`
    like_params: tuple[str, ...] = ()  # the fields of its state that have a number or an array for each leaf
    needs_params: bool = False
    # In a mapped program whose leaves are sharded along "fsdp" inside a unit: JAX's types do not record it.
    make_mapped: Callable[[], optax.GradientTransformationExtraArgs] | None = None


CASES = {
    "clip_by_global_norm": Case(lambda: shrewjax.clip_by_global_norm(0.5), {"max_norm": 0.5}),
    "clip_by_leaf_norm": Case(
        lambda: shrewjax.clip_by_leaf_norm(0.5), {"max_norm": 0.5}, like_params=("grad_norm", "clip_scale")
    ),
    "clip_by_value": Case(lambda: shrewjax.clip_by_value(0.1), {"max_value": 0.1}),
    "clip_by_percentile": Case(lambda: shrewjax.clip_by_percentile(75), {"percentile": 75}),
    "adaptive_grad_clip": Case(
        lambda: shrewjax.adaptive_grad_clip(0.1),
        {"clipping": 0.1},
        needs_params=True,
        make_mapped=lambda: shrewjax.adaptive_grad_clip(0.1, sharded_over="fsdp"),
    ),
    "clip_by_block_rms": Case(lambda: shrewjax.clip_by_block_rms(0.5), {}),
    "clip_by_norm_percentile": Case(
        lambda: shrewjax.clip_by_norm_percentile(50.0, history_length=4), {"percentile": 10.0}
    ),
    "clip_by_norm_zscore": Case(
        lambda: shrewjax.clip_by_norm_zscore(0.5, warmup_steps=1, max_norm=3.0),
        {"max_zscore": 0.5, "warmup_steps": 1, "max_norm": 3.0},
    ),
    "clip_by_leaf_norm_ema": Case(
        lambda: shrewjax.clip_by_leaf_norm_ema(warmup_steps=1), {"warmup_steps": 1}, like_params=("norm_ema",)
    ),
    "skip_nonfinite": Case(
        lambda: shrewjax.skip_nonfinite(shrewjax.clip_by_global_norm(0.5)),
        {"inner": optax.identity(), "max_consecutive": 2, "at_limit": "zero_nonfinite"},
    ),
    "skip_on_spike": Case(
        lambda: shrewjax.skip_on_spike(
            shrewjax.clip_by_global_norm(0.5), warmup_steps=2, history_length=3, max_zscore=1.0
        ),
        {"inner": optax.identity(), "max_value": 2.0, "max_consecutive": 2},
    ),
    "accumulate": Case(
        lambda: shrewjax.accumulate(optax.identity(), 2),
        {"inner": optax.identity(), "accum_steps": 2},
        like_params=("gradient_sum",),
    ),
}
TRANSFORMATIONS = {name: case.make for name, case in CASES.items()}
MAPPED = {name: case.make_mapped or case.make for name, case in CASES.items()}


def thorough(*rows):
    """Rows of a table, each a value or a tuple, with the marker of this name: `[*ROWS, *thorough(*OTHERS)]`."""
    return [pytest.param(*(row if type(row) is tuple else (row,)), marks=pytest.mark.thorough) for row in rows]


def assert_refused(calls, values, message):
    """Each call raises a `ValueError` of this message for each value."""
    for call, value in itertools.product(calls, values):
        with pytest.raises(ValueError) as raised:  # noqa: PT011, PT012
            call(value)
            pytest.fail(f"{value!r} is taken")
        assert re.search(message, str(raised.value)), f"{value!r}: {raised.value}"


# As in a process with one device; in CI, with eight, too (`either_world` in conftest.py).
WORLDS = [1, *thorough(8)]
each_world = pytest.mark.parametrize("either_world", WORLDS, indirect=True, ids=lambda n: f"devices{n}")


def flat(tree):
    """All floating elements, exactly, in extended precision and range."""
    leaves = [np.asarray(x) for x in jax.tree.leaves(tree)]
    parts = [np.ravel(x) for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
    wide = [x.astype(np.clongdouble if x.dtype.kind == "c" else np.longdouble) for x in parts]
    return np.concatenate([np.zeros(0, np.longdouble), *wide])


def true_norm(tree, p=2.0):
    """The p-norm in extended precision, whose range is that of float64 to the 16th power."""
    magnitudes = np.abs(flat(tree))
    largest = magnitudes.max(initial=0)
    if p == np.inf or largest == 0 or not np.isfinite(largest):
        return largest
    return largest * ((magnitudes / largest) ** p).sum() ** (1 / np.longdouble(p))


def norm(tree):
    """In float64."""
    return np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in jax.tree.leaves(tree)))


def distance(tree, other):
    """The norm of the difference over that of the other, in float64."""
    return norm(jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), tree, other)) / norm(other)


def exact(leaf):
    """The elements of a leaf as fractions; of a complex one, the parts."""
    x = np.asarray(leaf)
    parts = np.stack([x.real, x.imag], -1) if x.dtype.kind == "c" else x
    return [Fraction(value) for value in parts.astype(np.float64).ravel().tolist()]


def exact_root(x):
    """The square root of a fraction, rounded down to 128 bits or more."""
    shift = max(0, 128 - (x.numerator * x.denominator).bit_length() // 2)
    return Fraction(math.isqrt(x.numerator * x.denominator << 2 * shift), x.denominator << shift)


def bits(tree):
    """The leaves as bytes: equal only if every bit is."""
    return [(np.asarray(x).dtype, np.asarray(x).shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


@contextlib.contextmanager
def seeming_to_have(devices):
    """As in a process with so many devices, of which the suite's has eight: for programs that use one device alone.

    The package asks `jax.device_count`. With one device, reductions have several operands, and the numbers of leaves of
    several units are joined.
    """
    patch = pytest.MonkeyPatch()
    patch.setattr(jax, "device_count", lambda: devices)
    jax.clear_caches()
    yield devices
    patch.undo()
    jax.clear_caches()


def run_page(path):
    """Runs the Python code of a page from top to bottom, and returns the names that it defines."""
    names = {}
    for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
        exec(compile(block, path.name, "exec"), names)
    return names


def lenient(tx):
    """Optax mixes dtypes: lets it, so that only the package's own code is held to strict promotion."""

    def update(updates, state, params=None, **extra_args):
        with jax.numpy_dtype_promotion("standard"):
            return optax.with_extra_args_support(tx).update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def mesh_of(kind="Auto", **axes):
    """A mesh of these axes over the first devices, such as `mesh_of("Explicit", data=4, model=2)`."""
    devices = jax.devices()[: math.prod(axes.values())]
    kinds = (jax.sharding.AxisType[kind],) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices, axis_types=kinds)


def placed(tree, mesh, specs):
    """The arrays of a tree on a mesh. `specs` is one for all, or a tree of them."""
    return jax.device_put(tree, jax.tree.map(lambda spec: jax.sharding.NamedSharding(mesh, spec), specs))


def own_params(params, axis):
    """Parameters as each device's own, so that JAX leaves their gradients unreduced. Before JAX 0.9, pcast is pvary."""
    if hasattr(jax.lax, "pcast"):
        return jax.tree.map(lambda x: jax.lax.pcast(x, axis, to="varying"), params)
    return jax.tree.map(lambda x: jax.lax.pvary(x, axis), params)


def tree_of(seed=0, scale=1.0):
    """A small tree of float32 leaves with values of order `scale`.

    AGC has two units in `w` and two single ones, so that outside of jit operations on both are compiled once.
    """
    rng = np.random.default_rng(seed)
    shapes = {"w": (6, 2), "b": (4,), "scalar": ()}
    return {k: jnp.asarray(scale * rng.normal(size=s), jnp.float32) for k, s in shapes.items()}


def small_tree(seed=0, scale=1.0):
    """One of the same shapes for all tests of steps outside of jit, whose operations compile for each shape."""
    rng = np.random.default_rng(seed)
    return {k: np.float32(scale * rng.normal(size=shape)) for k, shape in (("w", (16, 2)), ("scalar", ()))}


def assert_close(actual, expected, rtol, atol=0.0):
    """Leaf by leaf, with the leaf's path in the message."""
    for (path, a), e in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(a, np.float64),
            np.asarray(e, np.float64),
            rtol=rtol,
            atol=atol,
            err_msg=jax.tree_util.keystr(path),
        )
