"""A mistake is named with its line, and the remedy, followed to the letter, gives the whole batch's results.

The oracle is `jax.value_and_grad` of the loss as it is written, on the whole batch.
"""

import inspect
import linecache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shrewjax

B, K = 8, 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, 3)).astype("f")
Y = RNG.normal(size=B).astype("f")
MASK = (np.arange(B) % 3 > 0).astype("f")
OTHER = (np.arange(B) < 3).astype("f")
W = np.asarray([0.5, -1.0, 2.0], "f")
PLACES = np.arange(B)[::-1].copy()

BY_MAP = "for each example by micro_batch_map, and the rest outside, on the whole batch"
BEFORE = "Compute what they give on the whole batch before, and pass that with the examples"


def errors(w, x, y):
    return (jnp.tanh(x @ w) - y) ** 2


def of_tokens(w, x, y, mask):
    rows = errors(w, x, y)
    return jnp.sum(rows * mask) / jnp.sum(mask)  # HERE


def of_tokens_mended(w, x, y, mask):
    rows = shrewjax.micro_batch_map(lambda w, x, y, mask: errors(w, x, y) * mask, K)(w, x, y, mask)
    return jnp.sum(rows) / jnp.sum(mask)


def two_divisors(w, x, y, mask, other):
    rows = errors(w, x, y)
    first, second = jnp.sum(rows * mask), jnp.sum(rows * other)
    return first / jnp.sum(mask) + second / jnp.sum(other)  # HERE


def two_divisors_mended(w, x, y, mask, other):
    def rows(w, x, y, mask, other):
        rows = errors(w, x, y)
        return rows * mask, rows * other

    first, second = shrewjax.micro_batch_map(rows, K)(w, x, y, mask, other)
    return jnp.sum(first) / jnp.sum(mask) + jnp.sum(second) / jnp.sum(other)


def penalty(w, x, y, mask):
    rows = errors(w, x, y)
    return jnp.sum(rows) + jnp.sum(w**2)  # HERE


def penalty_mended(w, x, y, mask):
    return jnp.sum(shrewjax.micro_batch_map(errors, K)(w, x, y)) + jnp.sum(w**2)


def normalized(w, x, y, mask):
    z = x @ w
    z = (z - jnp.mean(z)) / jnp.std(z)  # HERE
    return jnp.mean((z - y) ** 2)


def normalized_mended(w, x, y, mask):
    z = shrewjax.micro_batch_map(lambda w, x: x @ w, K)(w, x)
    z = (z - jnp.mean(z)) / jnp.std(z)
    return jnp.mean((z - y) ** 2)


def contrastive(w, x, y, mask):
    z = jnp.tanh(x * w[None])
    return jnp.mean(jax.nn.logsumexp(z @ z.T, axis=1))  # HERE


def contrastive_mended(w, x, y, mask):
    z = shrewjax.micro_batch_map(lambda w, x: jnp.tanh(x * w[None]), K)(w, x)
    return jnp.mean(jax.nn.logsumexp(z @ z.T, axis=1))


@pytest.mark.parametrize(
    ("wrong", "named", "mended"),
    [
        (of_tokens, ["rows * mask"], of_tokens_mended),
        (two_divisors, ["rows * other", "rows * mask"], two_divisors_mended),
        (penalty, ["rows = errors(w, x, y)"], penalty_mended),
        (normalized, ["x @ w"], normalized_mended),
        (contrastive, ["jnp.tanh(x * w[None])"], contrastive_mended),
    ],
)
def test_the_named_expressions_by_micro_batch_map_give_the_whole_batch(wrong, named, mended):
    args = (W, X, Y, MASK, OTHER) if "two" in wrong.__name__ else (W, X, Y, MASK)
    message = message_of(wrong, args)
    number = line_of(wrong)
    assert f"\n  test_causes.py:{number}: {linecache.getline(__file__, number).strip()}\n" in message
    assert BY_MAP in message
    found = [line.split(": ", 1)[1] for line in message.partition("batch norm:")[2].splitlines() if line]
    assert {*found} <= {*named, "errors(w, x, y)"}
    assert found
    assert shrewjax.check_micro_batches(mended, *args) < 1e-5
    whole, step = jax.value_and_grad(wrong), jax.value_and_grad(mended)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), step(*args), whole(*args))


def centered_data(w, x, y):
    x = x - jnp.mean(x, 0, keepdims=True)  # HERE
    return jnp.mean(errors(w, x, y))


def reversed_rows(w, x, y):
    return jnp.mean(errors(w, x[::-1], y))  # HERE


@pytest.mark.parametrize(
    ("wrong", "before"), [(centered_data, (X - X.mean(0), Y)), (reversed_rows, (X[::-1].copy(), Y))]
)
def test_what_mixes_examples_before_a_parameter_is_computed_before(wrong, before):
    message = message_of(wrong, (W, X, Y))
    assert f"test_causes.py:{line_of(wrong)}:" in message
    assert BEFORE in message
    step = shrewjax.value_and_grad(lambda w, x, y: jnp.mean(errors(w, x, y)), K)
    assert shrewjax.check_micro_batches(step, W, *before) < 1e-5
    np.testing.assert_allclose(step(W, *before)[1], jax.grad(wrong)(W, X, Y), rtol=1e-4)


def test_a_table_that_is_looked_up_is_left_out_of_the_examples():
    def lookup(w, x, places, table):
        return jnp.mean(errors(w, table[places], x[:, 0]))

    args = W, X, PLACES, X + 1
    assert "leave it out of batch_argnums=" in message_of(lookup, args)
    step = shrewjax.value_and_grad(lookup, K, batch_argnums=(1, 2))
    assert shrewjax.check_micro_batches(step, *args) < 1e-5
    np.testing.assert_allclose(jax.jit(step)(*args)[1], jax.grad(lookup)(*map(jnp.asarray, args)), rtol=1e-4)


def test_an_option_that_fits_is_proposed_before_any_line():
    def of_sum(w, x, y):
        return jnp.sum(errors(w, x, y))

    def of_mean(w, x, y):
        return jnp.mean(errors(w, x, y))

    tokens = {"weight_fn": lambda w, x, y: 1 + jnp.sum(y > 0)}
    rows = [
        (of_sum, {}, "The loss is a sum over examples. Pass reduction='sum'."),
        (of_mean, {"reduction": "sum"}, "The loss is a mean over examples. Pass reduction='mean'."),
        (of_mean, tokens, "Pass reduction='mean', without weight_fn=."),
        (of_sum, tokens, "Pass reduction='sum_over_weights'."),
    ]
    for loss, options, words in rows:
        message = message_of(loss, (W, X, Y), **options)
        assert message.endswith(words), message
        assert "test_causes.py" not in message


def test_a_key_that_the_loss_closes_over_or_makes_is_named():
    closed = jax.random.key(3)
    for key in (lambda: closed, lambda: jax.random.key(3), lambda: jax.random.PRNGKey(3)):

        def loss(w, x, y, key=key):
            return jnp.mean(errors(w, x + jax.random.normal(key(), x.shape), y))

        message = message_of(loss, (W, X, Y))
        assert "x + jax.random.normal(key(), x.shape)" in message
        assert message.endswith("Name its key in rng_argnums=.")


def test_an_aux_of_another_name_is_an_error_that_names_one_that_fits():
    def loss(w, x, y, mask):
        aux = {
            "count": jnp.sum(mask),
            "least": jnp.min(x),
            "rows": jnp.tanh(x @ w),
            "accuracy": jnp.sum(mask * y) / jnp.sum(mask),
        }
        return jnp.mean(errors(w, x, y)), aux

    names = {"count": "sum", "least": "min", "rows": "examples", "accuracy": "last"}
    args = W, X, Y, MASK
    of = lambda **other: shrewjax.value_and_grad(loss, K, has_aux=True, aux_reduction=names | other)  # noqa: E731
    shrewjax.check_micro_batches(of(), *args)
    for leaf, wrong in {"count": "max", "least": "max"}.items():
        with pytest.raises(AssertionError) as caught:
            shrewjax.check_micro_batches(of(**{leaf: wrong}), *args)
        assert f"leaf ['{leaf}'] of the aux has another 'max' in micro-batches" in str(caught.value)
        assert str(caught.value).endswith(f"Name it {names[leaf]!r} in aux_reduction=.")
    with pytest.raises(AssertionError, match=r"accuracy.*\n.*test_causes.py.*jnp.sum\(mask \* y\)") as caught:
        shrewjax.check_micro_batches(of(accuracy="mean"), *args)
    assert "Return sums" in str(caught.value)


def test_a_difference_in_the_backward_pass_alone_is_found():
    @jax.custom_vjp
    def normalized(x):
        return x

    normalized.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.sqrt(jnp.sum(g**2)),))

    def loss(w, x, y):
        return jnp.mean((normalized(x @ w) - y) ** 2)

    message = message_of(loss, (W, X, Y))
    assert "return jnp.mean((normalized(x @ w) - y) ** 2)" in message
    assert "The gradient parts, and the loss does not" in message


def test_programs_that_differ_are_named():
    def loss(w, x, y):
        h = jnp.zeros(())
        for row in x:
            h = jnp.tanh(h + row @ w)  # HERE
        return h

    assert "`fun` runs other operations for another number of examples" in message_of(loss, (W, X, Y))


def message_of(loss, args, **options):
    with pytest.raises(AssertionError) as caught:
        shrewjax.check_micro_batches(shrewjax.value_and_grad(loss, K, **options), *args)
    return str(caught.value)


def line_of(function):
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if "# HERE" in line)
