"""Programs for eight H100s that run on CPU devices: faults of the compiler are seen, and nothing else is."""

import math
from functools import partial

import executed
import jax
import jax.numpy as jnp
import numpy as np
import plain_hlo
import pytest
from accelerators import loses_sums
from jax import P, lax
from jax.sharding import Mesh
from speed import quick_jit
from sums_on_devices import MICRO_BATCHES, PARAMS, VOCABULARY, by_hand, expected_of, loss, micro_batch, values

pytestmark = pytest.mark.usefixtures("as_users_have_it")

WITHOUT_THE_PASS = {"xla_disable_hlo_passes": "while-loop-all-reduce-code-motion"}


@pytest.fixture
def gpus(h100):
    return executed.gpus(data=8)


def compiled_by_hand(gpus, **options):
    """A scan by hand over micro-batches, whose gradients are scatters; its arguments; and the right results."""
    params, tokens = values(PARAMS)
    arguments = params, tokens, np.zeros(VOCABULARY, np.float32)
    compiled = executed.compile_for_gpus(by_hand, arguments, (P(), P("data"), P()), gpus, **options)
    return compiled, arguments, expected_of(params, tokens)["a scan by hand"]


def what_is_left(params, tokens):
    """Sums of gradients that are whole on device 0, and on the others those of the last micro-batch."""
    run = quick_jit(jax.grad(loss))
    parts = [micro_batch(tokens, i) for i in range(MICRO_BATCHES)]
    own = len(parts[0]) // 8
    kept = [*(part[:own] for part in parts), *(parts[-1][own * i :][:own] for i in range(1, 8))]
    return jax.tree.map(lambda *x: sum(np.asarray(y, np.float64) for y in x) / 8, *(run(params, x) for x in kept))


def test_a_sum_that_a_compiler_loses_is_wrong_by_what_is_lost(gpus, h100):
    compiled, arguments, (value, grads) = compiled_by_hand(gpus)
    errors = executed.numbers(compiled, arguments, (value, grads))
    wrong = {path: error for path, error in errors.items() if error > executed.TOLERANCE}
    if loses_sums(h100):
        assert wrong.keys() == {"[1]['along']", "[1]['dispatched']", "[1]['table']"}
        assert min(wrong.values()) > 0.5
        left = what_is_left(*arguments[:2]) | {"out": grads["out"]}
        assert max(executed.numbers(compiled, arguments, (value, left)).values()) < executed.TOLERANCE
    else:
        assert not wrong


def test_the_same_sum_is_right_without_the_pass_that_loses_it(gpus):
    compiled, arguments, expected = compiled_by_hand(gpus, **WITHOUT_THE_PASS)
    assert max(executed.numbers(compiled, arguments, expected).values()) < executed.TOLERANCE


def test_an_operation_that_cannot_be_rewritten_is_named(gpus):
    x = np.eye(8, dtype=np.float32)
    compiled = executed.compile_for_gpus(jnp.linalg.cholesky, (x,), (P(),), gpus)
    with pytest.raises(plain_hlo.UntranslatableError, match=r"custom-call.*cusolver_potrf"):
        executed.on_cpus(compiled)


# What is rewritten, beside the same functions on CPU devices.


def convolutions(x, filters, by_channel):
    """Strides, dilations and groups; the gradients call cuDNN in other ways."""

    def run(x, filters, by_channel):
        convolve = partial(lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))
        channels = x.shape[-1]
        return (
            jax.nn.relu(convolve(x, filters, (1, 1), "SAME") * 2 + 1),
            convolve(x, filters, (2, 2), [(0, 1), (2, 1)]),
            convolve(x, filters, (1, 1), "VALID", rhs_dilation=(2, 1)),
            convolve(x, filters, (1, 1), [(1, 1), (2, 0)], lhs_dilation=(2, 2)),
            convolve(x, by_channel, (2, 1), "SAME", feature_group_count=channels),
        )

    return run(x, filters, by_channel), jax.grad(lambda *a: sum(jnp.sum(y**2) for y in run(*a)), (0, 1, 2))(
        x, filters, by_channel
    )


def operations(x, tokens):
    """Products, sorts, loops, branches, constants and dtypes."""
    narrow = jnp.round(x).astype(jnp.bfloat16)
    table = jnp.asarray(np.random.default_rng(1).standard_normal((40, 64)).astype(np.float32))  # a large constant
    steps, found = lax.while_loop(lambda c: jnp.sum(c[1]) > 1, lambda c: (c[0] + 1, c[1] / 2), (0, jnp.abs(x)))
    return {
        "product": x @ table.T,
        "batched": jnp.einsum("ij,kj,ki->ik", x, x, x[:, :64]),
        "narrow": jnp.matmul(narrow, narrow.T, preferred_element_type=jnp.float32),
        "float16": jnp.tanh(x.astype(jnp.float16)),
        "sorted": jax.lax.sort((tokens, x[:, 0]), num_keys=1),
        "largest": lax.top_k(jnp.tile(x, (1, 40)), 3),
        "argmax": jnp.argmax(x, -1),
        "cumulative": jnp.cumsum(x, axis=1),
        "scattered": jnp.zeros((40, 64)).at[tokens].add(x).at[tokens[:3]].max(1.0),
        "gathered": table[tokens],
        "segments": jax.ops.segment_max(x, tokens, 40),
        "pooled": jax.grad(lambda x: jnp.sum(lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID") ** 2))(x),
        "loop": (steps, found),
        "branch": lax.switch(tokens[0] % 3, [jnp.sin, jnp.cos, jnp.tan], x),
        "bits": lax.bitcast_convert_type(x, jnp.int32) >> 3,
        "random": jax.random.normal(jax.random.wrap_key_data(tokens[:2].astype(jnp.uint32)), (3, 5)),
        "transposed": x.reshape(8, 8, 64).transpose(2, 0, 1).reshape(64, -1),
        "integers": (tokens * 7 % 5).astype(jnp.int8),
        "masks": (x > 0) & (tokens[:, None] % 2 == 0),
        "not finite": jnp.where(x > 1, jnp.nan, jnp.where(x < -1, -jnp.inf, x)),
    }


def test_operations_have_the_numbers_that_they_have_on_a_cpu(h100):
    rng = np.random.default_rng(0)
    x, tokens = rng.standard_normal((64, 64), np.float32), rng.integers(0, 40, 64, np.int32)
    images = rng.standard_normal((8, 8, 8, 3), np.float32)
    filters, by_channel = rng.standard_normal((3, 3, 3, 4), np.float32), rng.standard_normal((3, 3, 1, 3), np.float32)
    mesh = executed.gpus(data=2, model=4)

    def run(x, tokens, *others):
        return operations(x, tokens), convolutions(*others)

    arguments = x, tokens, images, filters, by_channel
    expected = quick_jit(run)(*arguments)
    specs = P("model", "data"), P(), P(("data", "model")), P(), P()
    executed.assert_right(run, arguments, specs, mesh, expected, tolerance=2e-5)


def collectives(x):
    """All that `shard_map` sends, over each axis and over both."""
    sizes = {"data": 2, "model": 4}
    results = [x * (1 + lax.axis_index("model"))]
    for axes in ("data", "model", ("data", "model")):
        number = math.prod(sizes[axis] for axis in ([axes] if isinstance(axes, str) else axes))
        turned = [(i, (i + 1) % number) for i in range(number)]
        results += [
            lax.psum(x, axes),
            lax.pmax(x, axes),
            lax.all_gather(x, axes),
            lax.all_gather(x.T, axes, tiled=True),
            lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True),
            lax.all_to_all(x, axes, 1, 0, tiled=True),
            lax.ppermute(x, axes, turned),
        ]
    return jax.tree.map(lambda y: y[None], results)


def test_collectives_have_the_numbers_that_they_have_on_cpus(h100):
    x = np.random.default_rng(0).standard_normal((8 * 4, 16), np.float32)
    gpus, cpus = executed.gpus(data=2, model=4), Mesh(np.reshape(jax.devices("cpu"), (2, 4)), ("data", "model"))
    split = P(("data", "model"))

    def on(mesh):
        return jax.shard_map(collectives, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)

    expected = quick_jit(on(cpus))(x)
    executed.assert_right(on(gpus), (x,), (split,), gpus, expected, tolerance=1e-6)
