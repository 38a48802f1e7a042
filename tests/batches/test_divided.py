"""A divided function on its arguments: one pass or two, sizes that K does not divide, and JAX's own transformations."""

import gc

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close, mesh_of, placed
from jax import P
from speed import quick_jit

import shrewjax

pytestmark = pytest.mark.usefixtures("as_users_have_it", "x64_only")

B, D, K = 10, 4, 3  # K does not divide B
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(2, B, D))
W = RNG.normal(size=(D, D))
MASK = np.arange(B) < 7
KEY = jax.random.key(0)


def h(w, x):
    return jnp.tanh(x @ w)


def masked(w, x, y):
    return jnp.sum(jnp.sum((h(w, x) - y) ** 2, 1) * MASK) / jnp.sum(MASK)


def contrastive(w, x, y):
    """Pairs of rows with dropout, beside a penalty and a mean over a mask."""
    kept = jax.random.bernoulli(KEY, 0.8, x.shape)
    u, v = jnp.where(kept, h(w, x), 0), h(w.T, y)
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(u @ v.T))) + 0.1 * jnp.sum(w**2) + masked(w, x, y)


def both(derivative, fun=contrastive, **options):
    """A derivative of a function, and that of the function in micro-batches."""
    part = shrewjax.micro_batched(fun, K, **options)
    return tuple(quick_jit(lambda f=f: derivative(f))() for f in (part, fun))


# --- passes ----------------------------------------------------------------------------------------------------------


def loops(function, *args):
    """How many loops run micro-batches: those that multiply by parameters."""
    text = str(jax.make_jaxpr(function)(*args))
    return text.count(" scan[")


def squared_mean(w, x, y):
    return jnp.mean(h(w, x)) ** 2


def with_gradient_beside(w, x, y):
    return jnp.mean((h(w, x) - y) ** 2), {"norm": jnp.linalg.norm(h(w, x).sum(0)), "top": jnp.max(h(w, x))}


@pytest.mark.parametrize(
    ("fun", "passes"),
    [
        (masked, 1),
        (lambda w, x, y: jnp.sum((h(w, x) - y) ** 2), 1),
        (lambda w, x, y: jnp.mean(h(w, x)) * jnp.mean(y) + jnp.sum(w**3), 1),
        (with_gradient_beside, 1),  # an aux has no gradient
        (squared_mean, 2),
        (contrastive, 2),
    ],
    ids=["masked mean", "sum", "mean and penalty", "aux of sums", "squared mean", "contrastive"],
)
def test_a_gradient_takes_one_pass_unless_it_depends_on_sums_or_rows(fun, passes):
    """In a pass, micro-batches of two sizes run in two loops, and those of one size in one."""
    has_aux = fun is with_gradient_beside
    for k, sizes in ((K, 2), (5, 1)):
        step = shrewjax.value_and_grad(fun, k, has_aux=has_aux)
        assert loops(step, W, X, Y) == passes * sizes
        found, expected = quick_jit(step)(W, X, Y), quick_jit(jax.value_and_grad(fun, has_aux=has_aux))(W, X, Y)
        assert_close(found, expected, rtol=1e-10)


def test_the_value_and_a_function_of_rows_run_forward_alone():
    assert loops(shrewjax.micro_batched(contrastive, 5), W, X, Y) == 1
    flops = lambda f, k: jax.jit(shrewjax.micro_batched(f, k)).lower(W, X, Y).as_text().count("dot_general")  # noqa: E731
    assert flops(masked, 5) == 1


# --- sets and sizes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [3, 5, 7, 16], ids=lambda k: f"K={k}")
def test_few_labelled_and_many_other_examples_are_divided_each_for_itself(k):
    """FixMatch, with 16 and 112 examples, in one call of the model; gradients by both sets come back as rows."""
    few, many = RNG.normal(size=(16, D)), RNG.normal(size=(112, D))
    labels = jnp.asarray(RNG.integers(0, D, 16))

    def fixmatch(w, few, many, labels):
        z = h(w, jnp.concatenate([few, many, many + 0.1]))
        known, weak, strong = jnp.split(z, [16, 128])
        guess = jax.lax.stop_gradient(jax.nn.softmax(8 * weak))
        each = -jnp.sum(guess * jax.nn.log_softmax(strong), -1) * (guess.max(-1) > 0.6)
        known = optax.softmax_cross_entropy_with_integer_labels(known, labels)
        return jnp.mean(known) + jnp.mean(each), {"each": each, "accuracy": jnp.mean(known < 1), "known": known}

    options = {"argnums": (0, 1, 2), "has_aux": True}
    found = quick_jit(shrewjax.value_and_grad(fixmatch, k, batch_argnums=(1, 2, 3), **options))(W, few, many, labels)
    assert_close(found, quick_jit(jax.value_and_grad(fixmatch, **options))(W, few, many, labels), rtol=1e-10)


def test_a_set_with_fewer_examples_than_micro_batches_stays_whole_and_one_example_each_is_enough():
    few, classes = RNG.normal(size=(2, D)), jnp.asarray([0, 1] * (B // 2))

    def prototypes(w, few, x):
        return jnp.mean(jax.nn.logsumexp(h(w, x) @ h(w, few).T, 1) - jnp.sum(h(w, x) * h(w, few)[classes], 1))

    for k in (K, B, 4 * B):
        step = shrewjax.value_and_grad(prototypes, k, argnums=(0, 1), batch_argnums=(1, 2))
        expected = quick_jit(jax.value_and_grad(prototypes, (0, 1)))(W, few, X)
        assert_close(quick_jit(step)(W, few, X), expected, rtol=1e-10)


# --- numbers ---------------------------------------------------------------------------------------------------------


def test_an_aux_without_a_finite_derivative_makes_no_nan_and_the_same_for_all_is_counted_once():
    def loss(w, x):
        z = x @ w
        block = jax.checkpoint(lambda z, w: (jnp.mean(z**2), jnp.sum(w**2), jnp.sum(w > 0)))
        value, of_weights, count = block(z, w)
        return value * of_weights, {"root": jnp.sum(jnp.sqrt(0 * z)), "count": count}

    part = shrewjax.value_and_grad(loss, K, has_aux=True)
    expected = quick_jit(jax.value_and_grad(loss, has_aux=True))(W, X)
    assert np.all(np.isfinite(expected[1]))
    assert_close(quick_jit(part)(W, X), expected, rtol=1e-10)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sums_of_low_precision_are_added_up_in_float32_and_come_back_in_their_dtype(dtype):
    """512 micro-batches, of which each adds less than half of the last place of the sum in 16 bits."""
    x = jnp.ones((512, 2), dtype)

    def loss(w, x):
        return jnp.sum((x @ w).astype(dtype)) / 4, {"sum": jnp.sum(x, 0), "rows": x @ w}

    w = jnp.ones(2, dtype)
    (value, aux), grads = quick_jit(shrewjax.value_and_grad(loss, 512, has_aux=True))(w, x)
    assert {y.dtype for y in jax.tree.leaves((value, aux, grads))} == {jnp.dtype(dtype)}
    np.testing.assert_array_equal(aux["sum"].astype("f"), [512, 512])
    np.testing.assert_array_equal(value.astype("f"), 256)
    np.testing.assert_array_equal(grads.astype("f"), [128, 128])


# --- transformations of JAX, of a loss that takes two passes ---------------------------------------------------------


def steps_of_descent(f):
    """A scan of steps, differentiated by its start and by the step size."""

    def last(w, rate):
        def step(w, _):
            value, grads = jax.value_and_grad(f)(w, X, Y)
            return w - rate * grads, value

        return jax.lax.scan(jax.checkpoint(step), w, None, 2)[1][-1]

    return jax.value_and_grad(last, (0, 1))(W, 0.1)


def over_seeds(f):
    """Parameters of several seeds, and batches of several."""
    many, batches = jnp.stack([W, -W]), jnp.stack([X, 2 * X])
    each = jax.vmap(jax.value_and_grad(f), (0, None, None))(many, X, Y)
    return each, jax.vmap(jax.grad(f, (0, 1)), (None, 0, None))(W, batches, Y)


TRANSFORMED = {
    "vmap over seeds": over_seeds,
    "checkpoint around": lambda f: jax.value_and_grad(jax.checkpoint(f), (0, 1, 2))(W, X, Y),
    "steps in a scan": steps_of_descent,
    "grad of grad": lambda f: jax.grad(lambda w: jnp.sum(jnp.sin(jax.grad(f)(w, X, Y))))(W),
    "jvp of grad": lambda f: jax.jvp(lambda w, x: jax.grad(f)(w, x, Y), (W, X), (Y[:D], Y)),
    "hessian": lambda f: jax.hessian(lambda scale: f(scale * W, X, Y))(jnp.ones(D)),
    "linearized": lambda f: jax.linearize(lambda w: f(w, X, Y), W)[1](Y[:D]),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_transformation_is_that_of_the_whole_batch(name):
    found, expected = both(TRANSFORMED[name])
    assert_close(found, expected, rtol=1e-8)


def test_a_vmap_over_keys_draws_for_each_key():
    def loss(w, x, key):
        return jnp.mean(jnp.where(jax.random.bernoulli(key, 0.5, x.shape), h(w, x), 0) ** 2)

    keys = jax.random.split(KEY, 3)
    of_all = lambda f: jax.vmap(jax.value_and_grad(f), (None, None, 0))(W, X, keys)  # noqa: E731
    assert_close(*both(of_all, loss, batch_argnums=1), rtol=1e-10)


def test_donated_parameters_and_batches_are_used_once_and_the_step_is_right():
    expected = W - quick_jit(jax.grad(contrastive))(W, X, Y)
    step = jax.jit(lambda w, x, y: w - shrewjax.value_and_grad(contrastive, K)(w, x, y)[1], donate_argnums=(0,))
    w = jnp.asarray(W)
    assert_close(step(w, jnp.asarray(X), jnp.asarray(Y)), expected, rtol=1e-10)
    assert w.is_deleted()


def test_an_exported_step_of_two_passes_takes_any_number_of_examples():
    (n,) = jax.export.symbolic_shape("n", constraints=["n >= 6"])
    types = (jax.ShapeDtypeStruct(s, np.float64) for s in ((D, D), (5 * n, D), (5 * n, D)))

    def pairs(w, x, y):
        return jnp.mean(jax.nn.logsumexp(h(w, x) @ h(w.T, y).T, 1))

    exported = jax.export.export(jax.jit(shrewjax.value_and_grad(pairs, 5)))(*types)
    x, y = RNG.normal(size=(2, 30, D))
    assert_close(exported.call(W, x, y), jax.value_and_grad(pairs)(W, x, y), rtol=1e-10)


def test_outside_of_jit_no_array_is_kept_and_under_disable_jit_and_debug_nans_results_are_the_same():
    expected = quick_jit(jax.value_and_grad(contrastive))(W, X, Y)
    step = shrewjax.value_and_grad(contrastive, K)
    for turn in range(3):
        assert_close(step(W, X, Y), expected, rtol=1e-10)
        gc.collect()
        if turn == 0:
            before = len(jax.live_arrays())
    assert len(jax.live_arrays()) <= before
    with jax.disable_jit():
        assert_close(step(W, X, Y), expected, rtol=1e-10)
    with jax.debug_nans(True):
        assert_close(jax.jit(step)(W, X, Y), expected, rtol=1e-10)
        with pytest.raises(FloatingPointError):
            jax.block_until_ready(jax.jit(step)(W, jnp.full_like(X, jnp.nan), Y))


# --- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fun", [masked, contrastive], ids=lambda f: f.__name__)
def test_sum_over_is_the_loss_of_the_whole_batch_on_devices_with_uneven_masks(fun):
    mesh = mesh_of(data=2)
    step = shrewjax.value_and_grad(fun, K, argnums=(0, 1), batch_argnums=(1, 2), sum_over="data")
    with jax.set_mesh(mesh):
        found = quick_jit(step)(placed(W, mesh, P()), *placed((X, Y), mesh, P("data")))
    assert_close(found, quick_jit(jax.value_and_grad(fun, (0, 1)))(W, X, Y), rtol=1e-10)


def test_sum_over_needs_a_number_of_examples_that_devices_divide():
    mesh = mesh_of(data=4)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"^sum_over=\('data',\) needs .* 4 devices .* got 10\."):
        shrewjax.value_and_grad(masked, K, sum_over="data")(W, X, Y)


@pytest.mark.parametrize("is_scatter", [False, True])
def test_a_diagonal_is_no_lookup_of_own_rows(is_scatter):
    """Column j is asked for row j. There are as many columns as examples."""

    def loss(w, x):
        h = jnp.tanh(x @ w) @ np.ones((D, B))
        if is_scatter:
            return jnp.mean(jax.vmap(lambda column, i: column.at[i].add(-3.0), (1, 0), 1)(h, jnp.arange(B)) ** 2)
        return jnp.mean(jnp.take_along_axis(h, jnp.arange(B)[None], 0) ** 2) + jnp.mean(h**2)

    found, expected = (quick_jit(f)(W, X) for f in (shrewjax.value_and_grad(loss, K), jax.value_and_grad(loss)))
    assert_close(found, expected, rtol=1e-10)
