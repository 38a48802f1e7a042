"""The check looks into one call: it passes what is right, finds what is wrong, and says what it cannot check."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shrewjax
from shrewjax import check_micro_batches, micro_batch_map, micro_batched, value_and_grad

B, K = 8, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, 3)).astype("f")
Y = RNG.normal(size=B).astype("f")
MASK = (np.arange(B) % 3 > 0).astype("f")
W = np.asarray([0.5, -1.0, 2.0], "f")


def errors(w, x, y):
    return (jnp.tanh(x @ w) - y) ** 2


def mean(w, x, y):
    return jnp.mean(errors(w, x, y))


def of_tokens(w, x, y, mask):
    return jnp.sum(errors(w, x, y) * mask) / jnp.maximum(jnp.sum(mask), 1.0)


def tokens(w, x, y, mask):
    return jnp.sum(mask)


def noisy(w, x, y, keys):
    keep = jax.random.bernoulli(keys["drop"], 0.5, x.shape)
    return mean(w + 0.1 * jax.random.normal(keys["w"], w.shape), jnp.where(keep, x, 0), y)


def with_carry(w, x, y, carry):
    return mean(w, x, y) + 0 * carry, ({"largest": jnp.max(x)}, carry + jnp.mean(x))


def converged(w, x, y):
    def more(c):
        return jnp.max(jnp.abs(c[0] - c[1])) > 1e-3

    root, _ = jax.lax.while_loop(more, lambda c: (0.5 * (c[0] + y / c[0]), c[0]), (y, y + 1))
    return mean(w, x, jax.lax.stop_gradient(root))


KEYS = {"drop": jax.random.key(0), "w": jax.random.PRNGKey(1)}
RIGHT = {
    "a mean": (mean, {}, (W, X, Y)),
    "a mean over tokens, one micro-batch without any": (
        of_tokens,
        {"weight_fn": tokens},
        (W, X, Y, np.where(np.arange(B) % K == 1, 0, MASK).astype("f")),
    ),
    "a sum": (lambda w, x, y: jnp.sum(errors(w, x, y)), {"reduction": "sum"}, (W, X, Y)),
    "a sum over weights": (
        lambda w, x, y, m: jnp.sum(errors(w, x, y) * m),
        {"reduction": "sum_over_weights", "weight_fn": tokens},
        (W, X, Y, MASK),
    ),
    "dropout and noise of weights, typed and raw keys": (noisy, {"rng_argnums": 3}, (W, X, Y, KEYS)),
    "a draw in a conditional": (
        lambda w, x, y, key: mean(w, jax.lax.cond(w[0] < 9, lambda: x * jax.random.normal(key, x.shape), lambda: x), y),
        {"rng_argnums": 3},
        (W, X, Y, jax.random.key(0)),
    ),
    "a carry and an aux": (
        with_carry,
        {"carry_argnum": 3, "has_aux": True, "aux_reduction": "max"},
        (W, X, Y, np.float32(0)),
    ),
    "a loop of Python over examples": (
        lambda w, x, y: sum(mean(w, a[None], b[None]) for a, b in zip(x, y, strict=True)) / len(x),
        {},
        (W, X, Y),
    ),
    "integers in the aux": (
        lambda w, x, y: (mean(w, x, y), jnp.mean(jnp.arange(len(x)) * 0 + 3)),
        {"has_aux": True},
        (W, X, Y),
    ),
    "noise without examples": (
        lambda w, key: jnp.sum(w * jax.random.normal(key, w.shape)),
        {"batch_argnums": (), "rng_argnums": 1},
        (W, jax.random.key(0)),
    ),
    "a loop that converges": (converged, {}, (W, X, 1 + Y**2)),
    "a weight of parameters": (
        lambda w, x, y: jnp.sum(errors(w, x, y), where=x @ w > -1) / jnp.maximum(jnp.sum(x @ w > -1), 1).astype("f"),
        {"weight_fn": lambda w, x, y: jnp.sum(x @ w > -1)},
        (W, X, Y),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_passes_and_the_error_is_returned(name):
    loss, options, args = RIGHT[name]
    assert 0 <= check_micro_batches(value_and_grad(loss, K, **options), *args) < 1e-5


def test_debug_nans_and_a_transfer_guard_do_not_stop_the_check():
    with jax.debug_nans(True), jax.transfer_guard("disallow"):
        assert check_micro_batches(value_and_grad(mean, K), W, X, Y) < 1e-5


def loss_of_rows(w, x, y, mask):
    rows = micro_batch_map(errors, K)(w, x, y)
    return jnp.sum(rows * mask) / jnp.sum(mask)


def test_divided_calls_are_found_in_a_loss_a_jitted_step_and_each_other():
    tx = optax.sgd(0.1)

    @jax.jit
    def step(w, state, x, y, mask):
        _, grads = value_and_grad(of_tokens, K)(w, x, y, mask)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(w, updates), state

    args = W, X, Y, MASK
    assert check_micro_batches(loss_of_rows, *args) < 1e-5
    assert check_micro_batches(jax.jit(loss_of_rows), *args) < 1e-5
    assert check_micro_batches(value_and_grad(mean, 2), W, X, Y) < 1e-5
    nested = value_and_grad(lambda w, x, y: jnp.mean(micro_batch_map(errors, 2)(w, x, y)), 2)
    assert check_micro_batches(nested, W, X, Y) < 1e-5
    for wrong in (step, micro_batched(of_tokens, K)):
        with pytest.raises(AssertionError, match="They part here"):
            check_micro_batches(wrong, *((W, tx.init(W), *args[1:]) if wrong is step else args))


def test_a_function_of_a_map_that_mixes_examples_is_named_with_its_line():
    def centered(w, x, y):
        z = x @ w
        return (z - jnp.mean(z)) * y

    def divided(w, x, y):
        return errors(w, x, y) / len(x)

    def of_places(w, x, y):
        return errors(w, x, y) * jnp.arange(len(x), dtype=x.dtype)

    for fun, line in {centered: "jnp.mean(z)", divided: "/ len(x)", of_places: ".arange(len(x)"}.items():
        with pytest.raises(AssertionError) as caught:
            check_micro_batches(micro_batch_map(fun, K), W, X, Y)
        assert "Micro-batches give other rows than the whole batch" in str(caught.value)
        assert line in str(caught.value).partition("They part here:")[2].splitlines()[1]


def test_a_map_that_mixes_examples_in_its_backward_pass_alone_is_found():
    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, g: (g - jnp.mean(g),))

    with pytest.raises(AssertionError, match="The gradient parts") as caught:
        check_micro_batches(micro_batch_map(lambda w, x, y: same(x @ w) * y, K), W, X, Y)
    assert "same(x @ w) * y" in str(caught.value)


def test_modules_with_functions_are_whole_arguments_of_a_map():
    model = {"w": W, "activation": jnp.tanh, "name": "model", "scale": 2}

    def rows(model, x, y):
        return model["scale"] * (model["activation"](x @ model["w"]) - y) ** 2

    assert check_micro_batches(micro_batch_map(rows, K), model, X, Y) < 1e-5


def test_rows_that_are_infinite_pass():
    def rows(w, x, y):
        return jnp.where(y > 0, -jnp.inf, errors(w, x, y))

    assert check_micro_batches(micro_batch_map(rows, K), W, X, Y) < 1e-5


def test_rows_torn_apart_are_seen():
    """Micro-batch i has the rows i, i + K, and so on, so neighbours come apart."""

    def pairs(w, x, y):
        return jnp.mean((jnp.tanh(x[::2] @ w) - y[1::2]) ** 2)

    with pytest.raises(AssertionError, match="They part here"):
        check_micro_batches(value_and_grad(pairs, 2), W, X, Y)


def test_parameters_near_the_given_ones_show_what_zeros_hide():
    def adapted(b, x, y):
        delta = x @ b
        return mean(W, x, y) + jnp.mean(delta) ** 2

    with pytest.raises(AssertionError, match=r"return mean\(W, x, y\) \+ jnp.mean\(delta\) \*\* 2"):
        check_micro_batches(value_and_grad(adapted, K), np.zeros(3, "f"), X, Y)


def test_keyword_arguments_and_python_numbers_come_as_in_the_call():
    def loss(w, *, x, y, layers, table):
        for _ in range(layers):
            x = jnp.tanh(x)
        return mean(w, x, y) + jnp.sum(table[(y > 0).astype(jnp.int32)]) / len(x)

    step = value_and_grad(loss, K, batch_argnums=("x", "y"))
    assert check_micro_batches(step, W, x=X, y=Y, layers=2, table=np.asarray([1.0, 2.0], "f")) < 1e-5


def test_an_argument_may_have_the_name_fun():
    assert check_micro_batches(lambda fun: micro_batch_map(lambda w, x: x @ w, K)(fun, X), fun=W) < 1e-5


def test_the_error_says_how_far_results_are_off():
    with pytest.raises(AssertionError) as caught:
        check_micro_batches(value_and_grad(of_tokens, K), jnp.ones(3), X, Y, MASK)
    assert str(caught.value).startswith("Micro-batches give another result than the whole batch: the gradients are ")
    assert " % off, the loss " in str(caught.value)


@pytest.mark.parametrize(
    ("fun", "message"),
    [
        (mean, "fun must call micro_batch_map, value_and_grad or micro_batched"),
        (jax.grad(micro_batched(mean, K)), "needs arrays, got tracers.*Check the loss itself"),
        (jax.checkpoint(micro_batched(mean, K)), "needs arrays, got tracers.*Check the loss itself"),
        (value_and_grad(mean, 1), "micro_batches >= 2"),
        (value_and_grad(mean, 3), "does not divide"),
        (value_and_grad(lambda w, x, y: mean(w, x, y) * jnp.nan, K), "must give finite results"),
        (micro_batch_map(mean, K), "must return arrays of numbers with a row for each example"),
        (value_and_grad(mean, K, weight_fn=lambda w, x, y: 0), "weight_fn must not return 0 for all"),
    ],
)
def test_what_cannot_be_checked_is_an_error(fun, message):
    with pytest.raises(ValueError, match=message):
        check_micro_batches(fun, W, X, Y)


def test_the_check_itself_is_not_traced():
    with pytest.raises(ValueError, match=r"got tracers of .* an outer jit"):
        jax.jit(lambda w: check_micro_batches(value_and_grad(mean, K), w, X, Y))(W)


def test_examples_that_are_all_the_same_are_a_warning():
    with pytest.warns(UserWarning, match="argument 3 is the same for each example, which hides mistakes"):
        check_micro_batches(value_and_grad(of_tokens, K, weight_fn=tokens), W, X, Y, np.ones(B, "f"))


def test_rtol_is_the_largest_error():
    def nearly(w, x, y):
        return mean(w, x, y) + 1e-3 * jnp.mean(y) ** 2

    error = check_micro_batches(value_and_grad(nearly, K), W, X, Y, rtol=0.1)
    assert 1e-6 < error < 0.1
    with pytest.raises(AssertionError):
        check_micro_batches(value_and_grad(nearly, K), W, X, Y)
    with pytest.raises(ValueError, match="rtol must be >= 0"):
        check_micro_batches(value_and_grad(nearly, K), W, X, Y, rtol=-1.0)


def test_an_error_that_fun_catches_leaves_its_next_call_checked():
    wrong = value_and_grad(of_tokens, K)  # without the weights

    def steps(*batch):
        with contextlib.suppress(AssertionError):
            return wrong(*batch)
        return wrong(*batch)

    with pytest.raises(AssertionError):
        check_micro_batches(steps, W, X, Y, MASK)


def test_a_call_after_the_check_is_as_before():
    check_micro_batches(loss_of_rows, W, X, Y, MASK)
    value, grads = jax.jit(jax.value_and_grad(loss_of_rows))(W, X, Y, MASK)
    expected = jax.value_and_grad(of_tokens)(W, X, Y, MASK)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), (value, grads), expected)
    assert shrewjax.micro_batched(mean, K)(W, X, Y).shape == ()
