"""Each cause: the line that is named, what is said of it, and that the remedy is right when it is followed.

A row has a loss with one mistake, whose line ends in `# HERE`, and the loss with the remedy. Its oracle
is `jax.value_and_grad` of the first loss on the whole batch.
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
MASK = (np.arange(B) % 3 > 0).astype("f")  # counts 2 and 3
OTHER = (np.arange(B) < 3).astype("f")
W = np.asarray([0.5, -1.0, 2.0], "f")
GROUP = np.repeat(np.arange(4), 2)


def errors(w, x, y):
    return (jnp.tanh(x @ w) - y) ** 2


def count_of_tokens(w, x, y, mask):
    return jnp.sum(errors(w, x, y) * mask) / jnp.sum(mask)  # HERE


def two_divisors(w, x, y, mask, other):
    first = jnp.sum(errors(w, x, y) * mask) / jnp.sum(mask)
    return first + jnp.sum(errors(w, x, y) * other) / jnp.sum(other)  # HERE


def two_divisors_of_the_batch(w, x, y, mask, other):
    share = len(x) / B
    first = jnp.sum(errors(w, x, y) * mask) / (MASK.sum() * share)
    return first + jnp.sum(errors(w, x, y) * other) / (OTHER.sum() * share)


def divisor_beside_a_weight(w, x, y, mask, other):
    share = jnp.sum(mask) / MASK.sum()
    first = jnp.sum(errors(w, x, y) * mask) / jnp.sum(mask)
    return first + jnp.sum(errors(w, x, y) * other) / (OTHER.sum() * share)


def penalty(w, x, y):
    return jnp.sum(errors(w, x, y)) + jnp.sum(w**2)  # HERE


def penalty_of_a_share(w, x, y):
    return jnp.sum(errors(w, x, y)) + jnp.sum(w**2) * len(x) / B


def penalty_beside_a_weight(w, x, y, mask):
    return jnp.sum(errors(w, x, y) * mask) + jnp.sum(w**2) * jnp.sum(mask) / MASK.sum()


def penalty_of_tokens(w, x, y, mask):
    return jnp.sum(errors(w, x, y) * mask) + jnp.sum(w**2)  # HERE


def sum_and_mean(w, x, y):
    return jnp.sum(errors(w, x, y)) + jnp.mean(jnp.tanh(x @ w))  # HERE


def sum_of_both(w, x, y):
    return jnp.sum(errors(w, x, y)) + jnp.sum(jnp.tanh(x @ w)) / B


def statistic_of_the_data(w, x, y):
    y = y - jnp.mean(y)  # HERE
    return jnp.mean(errors(w, x, y))


def statistic_before_the_call(w, x, y, mean):
    return jnp.mean(errors(w, x, y - mean))


def lookup(w, x, y, table):
    return jnp.mean(errors(w, x, table[y]))  # HERE


def neighbours(w, x, y):
    return jnp.mean(errors(w, x[::2] - x[1::2], y[::2]))  # HERE


def pairs(w, x, y):
    return jnp.mean(errors(w, x[:, 0] - x[:, 1], y[:, 0]))


def reversed_rows(w, x, y):
    return jnp.mean(errors(w, x[::-1], y))  # HERE


def rows_before_the_call(w, x, y):
    return jnp.mean(errors(w, x, y))


def numbered(w, x, y):
    return jnp.mean(errors(w, x, jnp.take(jnp.arange(2.0 * B), jnp.arange(len(x)))) + 0 * y)  # HERE


def numbers_passed(w, x, y, n):
    return jnp.mean(errors(w, x, jnp.take(jnp.arange(2.0 * B), n)) + 0 * y)


def function_of_the_data(w, x, y):
    return jnp.mean(errors(w, x, y)) * jnp.exp(jnp.mean(y))  # HERE


def factor_before_the_call(w, x, y, factor):
    return jnp.mean(errors(w, x, y)) * factor


def time_first(w, x):
    def step(h, row):
        return jnp.tanh(h + row @ w), None

    return jnp.mean(jax.lax.scan(step, jnp.zeros_like(x[0]), x)[0])  # HERE


def time_second(w, x):
    def step(h, row):
        return jnp.tanh(h + row @ w), None

    return jnp.mean(jax.lax.scan(step, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))[0])


def clipped_rows(w, x, y):
    z = shrewjax.clip_cotangent((x @ w)[:, None], 0.01)  # HERE
    return jnp.mean((jnp.tanh(z[:, 0]) - y) ** 2)


def clipped_by_the_batch(w, x, y):
    z = shrewjax.clip_cotangent((x @ w)[:, None], 0.01 * B / len(x))
    return jnp.mean((jnp.tanh(z[:, 0]) - y) ** 2)


XYM = W, X, Y, MASK
TIMES = RNG.normal(size=(B, 4, 3)).astype("f")
TABLE = np.arange(float(B), dtype="f") / B
ROWS = {
    "counts 2, 3 in": (count_of_tokens, {}, XYM, count_of_tokens, {"weight_fn": lambda w, x, y, m: jnp.sum(m)}, XYM),
    "divides by": (two_divisors, {}, (*XYM, OTHER), two_divisors_of_the_batch, {}, (*XYM, OTHER)),
    "times w / W": (
        two_divisors,
        {"weight_fn": lambda w, x, y, m, o: jnp.sum(m)},
        (*XYM, OTHER),
        divisor_beside_a_weight,
        {"weight_fn": lambda w, x, y, m, o: jnp.sum(m)},
        (*XYM, OTHER),
    ),
    "reduction='sum'": (penalty, {}, (W, X, Y), penalty_of_a_share, {"reduction": "sum"}, (W, X, Y)),
    "len(x) / B": (penalty, {"reduction": "sum"}, (W, X, Y), penalty_of_a_share, {"reduction": "sum"}, (W, X, Y)),
    "by w / W": (
        penalty_of_tokens,
        {"reduction": "sum_over_weights", "weight_fn": lambda w, x, y, m: jnp.sum(m)},
        XYM,
        penalty_beside_a_weight,
        {"reduction": "sum_over_weights", "weight_fn": lambda w, x, y, m: jnp.sum(m)},
        XYM,
    ),
    "different denominators": (sum_and_mean, {}, (W, X, Y), sum_of_both, {"reduction": "sum"}, (W, X, Y)),
    "gives each example a statistic": (
        statistic_of_the_data,
        {},
        (W, X, Y),
        statistic_before_the_call,
        {"batch_argnums": (1, 2)},
        (W, X, Y, Y.mean()),
    ),
    "leave it out of batch_argnums=": (
        lookup,
        {},
        (W, X, np.arange(B)[::-1].copy(), TABLE),
        lookup,
        {"batch_argnums": (1, 2)},
        (W, X, np.arange(B)[::-1].copy(), TABLE),
    ),
    "reshape the arrays": (
        neighbours,
        {},
        (W, X, Y),
        pairs,
        {},
        (W, X.reshape(4, 2, 3), Y.reshape(4, 2)),
    ),
    "pass its rows": (reversed_rows, {}, (W, X, Y), rows_before_the_call, {}, (W, X[::-1].copy(), Y)),
    "numbers the rows": (numbered, {}, (W, X, Y), numbers_passed, {}, (W, X, Y, np.arange(B))),
    "is not linear": (
        function_of_the_data,
        {},
        (W, X, Y),
        factor_before_the_call,
        {"batch_argnums": (1, 2)},
        (W, X, Y, np.exp(Y.mean())),
    ),
    "axis of examples to the front": (time_first, {}, (X[:3], TIMES), time_second, {}, (X[:3], TIMES.swapaxes(0, 1))),
    "multiply what is compared with cotangents": (clipped_rows, {}, (W, X, Y), clipped_by_the_batch, {}, (W, X, Y)),
}


def line_of(function):
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if "# HERE" in line)


@pytest.mark.parametrize("words", ROWS)
def test_a_mistake_is_named_with_its_line_and_its_remedy_is_right_when_followed(words):
    wrong, options, args, fixed, fixed_options, fixed_args = ROWS[words]
    with pytest.raises(AssertionError, match="2 micro-batches give another result than the whole batch") as caught:
        shrewjax.check_micro_batches(wrong, K, **options)(*args)
    message = str(caught.value)
    number = line_of(wrong)
    assert f"\n  test_causes.py:{number}: {linecache.getline(__file__, number).strip()}\n    " in message
    assert words in message

    shrewjax.check_micro_batches(fixed, K, **fixed_options)(*fixed_args)
    of_batch = shrewjax.value_and_grad(fixed, K, **fixed_options)
    value, grads = jax.jit(of_batch)(*fixed_args)
    whole, whole_grads = jax.value_and_grad(wrong)(*args)
    if wrong is not sum_and_mean and "weights" not in str(options.get("reduction")):
        np.testing.assert_allclose(value, whole, rtol=1e-4)
        np.testing.assert_allclose(grads, whole_grads, rtol=1e-3, atol=1e-5)


def bias(params, x):
    return x @ params["w"] + params["b"][None]


PARAMS = {"w": np.diag(W), "b": W}


def compares(params, x):
    z = bias(params, x)
    return jnp.mean(jax.nn.logsumexp(z @ z.T, axis=1) - jnp.sum(z**2, 1))  # HERE


def root_of_a_mean(params, x):
    return jnp.sqrt(jnp.mean(bias(params, x) ** 2))  # HERE


def centered(params, x):
    z = bias(params, x)
    z = z - jnp.mean(z, 0, keepdims=True)  # HERE
    return jnp.mean(z**4)


@pytest.mark.parametrize(
    ("wrong", "words", "of_features"),
    [
        (
            compares,
            "compares or mixes examples",
            lambda p, z: jnp.mean(jax.nn.logsumexp(z @ z.T, 1) - jnp.sum(z**2, 1)),
        ),
        (root_of_a_mean, "is not linear", lambda p, z: jnp.sqrt(jnp.mean(z**2))),
        (
            centered,
            "Or keep it, if each micro-batch may have its own",
            lambda p, z: jnp.mean((z - jnp.mean(z, 0, keepdims=True)) ** 4),
        ),
    ],
)
def test_what_depends_on_parameters_is_sent_to_micro_batch_map_which_give_the_gradients_of_the_whole_batch(
    wrong, words, of_features
):
    with pytest.raises(AssertionError) as caught:
        shrewjax.check_micro_batches(wrong, K)(PARAMS, X)
    message = str(caught.value)
    assert f"test_causes.py:{line_of(wrong)}:" in message
    assert words in message
    assert "Let micro_batch_map return" in message
    rows = shrewjax.micro_batch_map(bias, K)
    value, grads = jax.jit(jax.value_and_grad(lambda p: of_features(p, rows(p, X))))(PARAMS)
    whole, whole_grads = jax.value_and_grad(wrong)(PARAMS, X)
    np.testing.assert_allclose(value, whole, rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), grads, whole_grads)


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
        with pytest.raises(AssertionError) as caught:
            shrewjax.check_micro_batches(loss, K, **options)(W, X, Y)
        assert str(caught.value).endswith(words), caught.value
        assert "test_causes.py" not in str(caught.value)


def test_micro_batches_of_several_sizes_need_the_number_of_examples():
    def of_mean(w, x, y):
        return jnp.mean(errors(w, x, y))

    batches = [(X[:5], Y[:5]), (X[5:], Y[5:])]
    with pytest.raises(
        AssertionError, match="Pass reduction='mean', and weight_fn=, a function that returns the number"
    ):
        shrewjax.check_micro_batches(of_mean, batches)(W)
    shrewjax.check_micro_batches(of_mean, batches, weight_fn=lambda w, x, y: len(x))(W)


SIZE = 16
INPUTS, GOALS = np.random.default_rng(5).normal(size=(SIZE, 3)).astype("f"), np.arange(SIZE, dtype="f") / SIZE
PRIORITIES = np.random.default_rng(6).uniform(size=SIZE).astype("f")


def square_error(p, x, y):
    return (x @ p - y) ** 2


def second_term(p, x):
    return 0.1 * (x @ p)


# The loss of a divisor, the divisor of the batch, and the reduction.
DIVIDED = {
    "each by the largest": (lambda p, x, y, w, d: jnp.mean(square_error(p, x, y) * w / d), np.max, "mean"),
    "a mean by the largest": (lambda p, x, y, w, d: jnp.mean(square_error(p, x, y)) / d, np.max, "mean"),
    "each by the mean": (
        lambda p, x, y, w, d: jnp.mean(square_error(p, x, y) * (w / d)) + jnp.mean(second_term(p, x)), np.mean, "mean",
    ),
    "a sum by the sum": (
        lambda p, x, y, w, d: jnp.sum(square_error(p, x, y) * w) / d + jnp.mean(second_term(p, x)), np.sum, "mean",
    ),
    "a mean by the sum": (
        lambda p, x, y, w, d: jnp.mean(square_error(p, x, y) * w) / d + jnp.mean(second_term(p, x)), np.sum, "mean",
    ),
    "a sum by the sum, of a sum": (
        lambda p, x, y, w, d: jnp.sum(square_error(p, x, y) * w) / d + jnp.sum(second_term(p, x)), np.sum, "sum",
    ),
    "each by the largest, in a sum": (lambda p, x, y, w, d: jnp.sum(square_error(p, x, y) * w / d), np.max, "sum"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIVIDED)
def test_the_remedy_of_a_divisor_gives_the_gradient_of_the_whole_batch(name):
    """The message says whether a share stands beside the divisor. The test writes what it says."""
    loss, divisor, reduction = DIVIDED[name]
    of_jax = {np.max: jnp.max, np.mean: jnp.mean, np.sum: jnp.sum}[divisor]
    params, d = jnp.ones(3), divisor(PRIORITIES)

    def mistaken(p, x, y, w):
        return loss(p, x, y, w, of_jax(w))

    with pytest.raises(AssertionError, match="This line divides by") as error:
        shrewjax.check_micro_batches(mistaken, 4, reduction=reduction)(params, INPUTS, GOALS, PRIORITIES)
    has_share = "times len(x) / B" in str(error.value)

    def mended(p, x, y, w):
        return loss(p, x, y, w, d * len(x) / SIZE if has_share else d)

    step = jax.jit(shrewjax.value_and_grad(mended, 4, reduction=reduction))
    expected = jax.grad(lambda p: loss(p, INPUTS, GOALS, PRIORITIES, d))(params)
    np.testing.assert_allclose(step(params, INPUTS, GOALS, PRIORITIES)[1], expected, rtol=1e-5)


def test_a_constant_of_the_micro_batch_is_named():
    def loss(p, x):
        return jnp.mean((x @ p - GOALS[: len(x)]) ** 2)

    with pytest.raises(AssertionError, match=r"come from no argument. Pass them as an argument that holds examples"):
        shrewjax.check_micro_batches(loss, 4)(jnp.ones(3), INPUTS)
