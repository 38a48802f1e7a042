"""The check passes for losses whose micro-batches are right, finds one that is wrong, and says what it cannot check."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shrewjax
from shrewjax import check_micro_batches

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


def two(v, w, x, y):
    return mean(v * w, x, y)


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
    "a carry and an aux": (
        with_carry,
        {"carry_argnum": 3, "has_aux": True, "aux_reduction": "max"},
        (W, X, Y, np.float32(0)),
    ),
    "several arguments that are trained": (two, {"argnums": (0, 1)}, (W, W + 1, X, Y)),
    "a penalty in a mean": (lambda w, x, y: mean(w, x, y) + jnp.sum(w**2), {}, (W, X, Y)),
    "a loop of Python over examples": (
        lambda w, x, y: sum(mean(w, a[None], b[None]) for a, b in zip(x, y, strict=True)) / len(x),
        {},
        (W, X, Y),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_passes(name):
    loss, options, args = RIGHT[name]
    assert check_micro_batches(loss, K, **options)(*args) is None


def test_the_whole_batch_is_the_one_that_was_passed_so_that_rows_torn_apart_are_seen():
    """Micro-batch i has the rows i, i + K, and so on, so neighbours come apart."""

    def pairs(w, x, y):
        return jnp.mean((jnp.tanh(x[::2] @ w) - y[1::2]) ** 2)

    with pytest.raises(AssertionError, match="compares or mixes examples"):
        check_micro_batches(pairs, 2)(W, X, Y)


def test_parameters_near_the_given_ones_show_what_zeros_hide():
    def adapted(b, x, y):
        delta = x @ b
        return mean(W, x, y) + jnp.mean(delta) ** 2  # HERE

    message = message_of(check_micro_batches(adapted, K), np.zeros(3, "f"), X, Y)
    assert "return mean(W, x, y) + jnp.mean(delta) ** 2" in message


def test_keyword_arguments_and_python_numbers_come_as_in_the_call():
    def loss(w, *, x, y, layers, table):
        for _ in range(layers):
            x = jnp.tanh(x)
        return mean(w, x, y) + jnp.sum(table[(y > 0).astype(jnp.int32)]) / len(x)

    table = np.asarray([1.0, 2.0], "f")
    check_micro_batches(loss, K, batch_argnums=("x", "y"))(W, x=X, y=Y, layers=2, table=table)


def message_of(check, *args):
    with pytest.raises(AssertionError) as caught:
        check(*args)
    return str(caught.value)


def test_the_error_says_how_far_results_are_off_where_and_what_to_do():
    message = message_of(check_micro_batches(of_tokens, K), W, X, Y, MASK)
    counts = ", ".join(f"{MASK[i::K].sum():g}" for i in range(K))
    losses = [of_tokens(W, *(x[i::K] for x in (X, Y, MASK))) for i in range(K)]
    whole = of_tokens(W, X, Y, MASK)
    off = abs(np.mean(losses) - whole) / max(whole, np.mean(losses))
    assert "4 micro-batches give another result than the whole batch: the gradients are " in message
    assert f" % off, the loss {float(f'{100 * off:.2g}'):g} %. They part here:\n  test_micro_batches.py:" in message
    assert f"counts {counts} in the micro-batches, and {MASK.sum():g} in the whole batch. Pass weight_fn=" in message


def test_a_key_that_the_loss_closes_over_or_makes_is_named():
    closed = jax.random.key(3)
    for key in (lambda: closed, lambda: jax.random.key(3), lambda: jax.random.PRNGKey(3)):

        def loss(w, x, y, key=key):
            return mean(w, x + jax.random.normal(key(), x.shape), y)  # HERE

        message = message_of(check_micro_batches(loss, K), W, X, Y)
        assert "return mean(w, x + jax.random.normal(key(), x.shape), y)" in message
        assert "name it in rng_argnums=" in message


def test_an_aux_of_another_name_is_an_error_that_names_one_that_fits():
    def loss(w, x, y, mask):
        aux = {
            "count": jnp.sum(mask),
            "least": jnp.min(x),
            "rows": jnp.tanh(x @ w),
            "accuracy": jnp.sum(mask * y) / jnp.sum(mask),
        }
        return mean(w, x, y), aux

    names = {"count": "sum", "least": "min", "rows": "examples", "accuracy": "last"}
    check = lambda **other: check_micro_batches(loss, 2, has_aux=True, aux_reduction=names | other)  # noqa: E731
    check()(W, X, Y, MASK)
    for leaf, right in list(names.items())[:3]:
        message = message_of(check(**{leaf: "max"}), W, X, Y, MASK)
        assert f"leaf ['{leaf}'] of the aux has another 'max' in 2 micro-batches" in message
        assert message.endswith(f"Name it {right!r} in aux_reduction=.")
    message = message_of(check(accuracy="mean"), W, X, Y, MASK)
    assert "They part here:" in message
    assert '"accuracy": jnp.sum(mask * y) / jnp.sum(mask),' in message


def test_what_cannot_be_checked_is_an_error_or_a_warning():
    with pytest.raises(ValueError, match="micro-batches must have different examples"):
        check_micro_batches(mean, K)(W, np.ones_like(X), np.zeros_like(Y))
    with pytest.raises(ValueError, match="must be finite, got a loss of nan"):
        check_micro_batches(mean, K)(W * np.nan, X, Y)
    with pytest.raises(ValueError, match="batch_argnums must name an argument that holds examples"):
        check_micro_batches(lambda w: jnp.sum(w), K, batch_argnums=())(W)
    with pytest.raises(ValueError, match="weight must be 0, or between"):
        check_micro_batches(mean, K, weight_fn=lambda w, x, y: -1.0)(W, X, Y)
    with pytest.raises(ValueError, match="micro_batches must be a Python int >= 2"):
        check_micro_batches(mean, 1)
    with pytest.raises(ValueError, match="does not divide"):
        check_micro_batches(mean, 3)(W, X, Y)
    with pytest.warns(UserWarning, match="mask counts 2 in each micro-batch, so a mean over it is not checked") as told:
        check_micro_batches(of_tokens, K)(W, X, Y, np.ones(B, "f"))
    assert told[0].filename == __file__


def test_rtol_is_the_largest_error():
    def nearly(w, x, y):
        return mean(w, x, y) + 1e-3 * jnp.mean(y) ** 2

    check_micro_batches(nearly, K, rtol=0.1)(W, X, Y)
    with pytest.raises(AssertionError):
        check_micro_batches(nearly, K)(W, X, Y)


def test_a_difference_in_the_backward_pass_alone_is_found():
    @jax.custom_vjp
    def normalized(x):
        return x

    normalized.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.sqrt(jnp.sum(g**2)),))

    def loss(w, x, y):
        return jnp.mean((normalized(x @ w) - y) ** 2)

    message = message_of(check_micro_batches(loss, K), W, X, Y)
    assert "return jnp.mean((normalized(x @ w) - y) ** 2)" in message
    assert "the backward pass differs" in message


def test_a_statistic_that_the_loss_hides_and_the_gradient_shows_is_named_where_it_is_made():
    def surrogate(w, x, y):
        advantage = y - jnp.mean(y)
        z = x @ w
        return jnp.mean(advantage * (z - jax.lax.stop_gradient(z)))

    message = message_of(check_micro_batches(surrogate, K), W, X, Y)
    assert "advantage = y - jnp.mean(y)\n    This line gives each example a statistic of its micro-batch" in message


def test_programs_that_differ_are_named():
    def loss(w, x, y):
        if len(x) > 2:
            return jnp.mean(errors(w, x, y) ** 2)
        return mean(w, x, y)

    assert "The programs differ from this line on:" in message_of(check_micro_batches(loss, K), W, X, Y)


def test_gradients_of_the_check_are_those_of_value_and_grad():
    """What passes the check is right in a step: the same options, the same numbers."""
    args = W, X, Y, MASK
    check_micro_batches(of_tokens, K, weight_fn=tokens)(*args)
    _, grads = jax.jit(shrewjax.value_and_grad(of_tokens, K, weight_fn=tokens))(*args)
    np.testing.assert_allclose(grads, jax.grad(of_tokens)(*args), rtol=1e-5)


@pytest.mark.parametrize(
    ("micro_batches", "options", "message"),
    [
        ([jnp.ones((4, 2)), jnp.ones((4, 2))], {}, "micro_batches must be a number, or a list of tuples"),
        ([(jnp.ones((4, 2)), jnp.ones(4)), (jnp.ones((4, 2)),)], {}, "a list of tuples of one length"),
        (2, {"rtol": -1.0}, "rtol must be >= 0"),
        (2, {"rtol": "x"}, "rtol must be"),
        (2, {"weight_fn": lambda w, x: x}, r"weight must be a real scalar.*jnp\.sum"),
    ],
)
def test_a_mistaken_argument_of_the_check_is_named(micro_batches, options, message):
    check = shrewjax.check_micro_batches(lambda w, x: jnp.mean(x @ w), micro_batches, **options)
    args = () if isinstance(micro_batches, list) else (np.arange(16.0).reshape(8, 2),)
    with pytest.raises(ValueError, match=message):
        check(jnp.ones(2), *args)
