"""Kinds: what is rows, a sum or mixed. Each fault of these rules would be a wrong number without an error."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compared import RNG, B, D, T, W, X, Y, check, names, plan_of
from jax import lax

import shrewjax

pytestmark = pytest.mark.usefixtures("as_users_have_it", "x64_only")

ORDER = RNG.permutation(B)
LABELS = RNG.integers(0, D, B)
SQUARE = {"a": RNG.normal(size=(B, B)), "b": RNG.normal(size=(B, B))}
XX = RNG.normal(size=(B, B))  # as many features as examples


def h(w, x):
    return jnp.tanh(x @ w["a"])


# Rows that are no rows of the same axis, and sums that are no sums.
FAULTS = {
    "a window of more than one row": lambda w, x: jax.vmap(
        lambda i: lax.dynamic_slice(jnp.pad(h(w, x), ((0, 1), (0, 0))), (i, 0), (2, D))
    )(jnp.arange(B)),
    "own rows beside another axis": lambda w, x: h(w, x)[ORDER][:, ORDER].T * h(w, x),
    "pairs in another order": lambda w, x: (LABELS[:, None] == LABELS[None])[ORDER].T * h(w, x),
    "a square": lambda w, x: jnp.trace(h(w, x)) + h(w, x) * h(w, x).T,
    "own elements": lambda w, x: h(w, x)[jnp.arange(B), LABELS],
    "own elements of another row": lambda w, x: h(w, x)[jnp.arange(B)[::-1], LABELS],
    "own elements by themselves": lambda w, x: h(w, x)[jnp.arange(B), jnp.argmax(h(w, x), -1)],
    "own elements that are set": lambda w, x: h(w, x).at[jnp.arange(B), LABELS].set(0.5),
    "an integer division": lambda w, x: h(w, x).mean() * lax.div(jnp.sum(h(w, x) > 0), 2),
    "a cast that truncates": lambda w, x: jnp.sum(h(w, x)).astype(int) * 2 + jnp.sum(h(w, x)),
    "a cast to int8": lambda w, x: jnp.sum(h(w, x) * 40).astype(jnp.int8) + jnp.sum(h(w, x)),
    "a fill value": lambda w, x: jnp.take(jnp.sum(h(w, x), 0), np.array([0, 9]), mode="fill", fill_value=1.0),
    "a sum times infinity": lambda w, x: jnp.minimum(jnp.abs(jnp.sum(h(w, x) ** 2)) * np.inf, 3) + jnp.sum(h(w, x)),
    "a sum by a tiny number": lambda w, x: jnp.minimum(jnp.sum(h(w, x) ** 2) / 1e-310, 2.0) * jnp.sum(h(w, x)),
    # Of signs, because other bits depend on rounding. There are as many bytes as examples.
    "bits": lambda w, x: jnp.sum(lax.bitcast_convert_type(jnp.sign(h(w, x)), np.uint8).astype(float), -1) * h(w, x),
    "a sum that is scattered": lambda w, x: jnp.ones(D).at[LABELS].add(h(w, x)[:, 0]) ** 2,
    "a scatter from zeros": lambda w, x: jnp.zeros(D).at[LABELS].add(h(w, x)[:, 0]) ** 2,
    "a maximum of a sum": lambda w, x: jnp.maximum(jnp.sum(h(w, x), 0), 0),
    "no examples in one": lambda w, x: jnp.sum(h(w, x)[:0]) + jnp.sum(h(w, x)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_no_slice_and_no_sum_is_not_taken_for_one(name):
    is_square = name in ("own rows beside another axis", "pairs in another order", "a square")
    check(FAULTS[name], *((SQUARE, XX) if is_square else (W, X)), micro_batches=(4,))


# Batches of any layout.
LAYOUTS = {
    "joined and taken apart": lambda w, x, y: jnp.subtract(*jnp.split(h(w, jnp.concatenate([x, y])), 2)),
    "three, sliced": lambda w, x, y: h(w, jnp.concatenate([x, y, x]))[B : 2 * B] * h(w, x),
    "repeated": lambda w, x, y: h(w, jnp.repeat(x, 2, 0)).reshape(B, 2, D)[:, 1],
    "tiled": lambda w, x, y: h(w, jnp.tile(x, (2, 1))).reshape(2, B, D).mean(0),
    "stacked": lambda w, x, y: h(w, jnp.stack([x, y], 1)).reshape(2 * B, D)[::2],
    "time first": lambda w, x, y: h(w, jnp.stack([x, y, x])).reshape(3 * B, D).reshape(3, B, D)[1],
    "merged behind": lambda w, x, y: h(w, jnp.stack([x, y], 1).reshape(B * 2, D)).reshape(B, 2 * D) @ np.ones(2 * D),
    "groups of two": lambda w, x, y: h(w, x).reshape(B // 2, 2, D).mean(1) ** 2,
    "transposed": lambda w, x, y: (h(w, x).T * y.T).sum(0),
    "flipped and rolled": lambda w, x, y: jnp.roll(h(w, x), 1, 0) * y + jnp.flip(h(w, x), 0),
    "sorted": lambda w, x, y: jnp.sort(h(w, x)[:, 0]) * jnp.arange(B),
    "permuted data": lambda w, x, y: h(w, 0.3 * x + 0.7 * x[ORDER]),
    "looked up": lambda w, x, y: w["b"][LABELS] * h(w, x),
    "one hot": lambda w, x, y: optax.softmax_cross_entropy(h(w, x), jax.nn.one_hot(LABELS, D)),
    "statistics of data": lambda w, x, y: h(w, x) * ((y - y.mean(0)) / y.std(0)),
    "ranks of data": lambda w, x, y: h(w, x)[:, 0] * jnp.argsort(jnp.argsort(y[:, 0])),
    "segments": lambda w, x, y: jax.ops.segment_sum(h(w, x), LABELS, D) ** 2,
    "a convolution": lambda w, x, y: lax.conv(h(w, x)[:, None], w["b"][:, None], (1,), "SAME"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_batches_of_any_layout_are_those_of_jax(name):
    check(LAYOUTS[name], W, X, Y)


def test_row_numbers_may_be_joined_with_columns_of_any_width():
    dims = lax.GatherDimensionNumbers((), (0, 1, 2), (0, 1, 2))

    def picked(w, x, pairs):
        elements = h(w, x)[:, :, None] * w["b"]
        indices = jnp.concatenate([jnp.arange(B)[:, None], pairs], 1)
        return jnp.var(lax.gather(elements, indices, dims, (1, 1, 1)))

    pairs = np.stack([LABELS, LABELS[::-1]], 1)
    check(picked, W, X, pairs)
    assert "gather" in names(plan_of(picked, W, X, pairs).loop)


def test_sets_of_several_sizes_are_divided_each_for_itself():
    """As FixMatch, with few labelled examples and many others, in one call of the model."""
    many = RNG.normal(size=(21, D))

    def fixmatch(w, x, y, u):
        z = h(w, jnp.concatenate([x, u, u + 0.1]))
        few, weak, strong = z[: len(x)], z[len(x) : len(x) + len(u)], z[len(x) + len(u) :]
        guess = lax.stop_gradient(jax.nn.softmax(4 * weak))
        each = -jnp.sum(guess * jax.nn.log_softmax(strong), -1)
        return jnp.mean((few - y) ** 2) + jnp.mean(each * (guess.max(-1) > 0.5))

    check(fixmatch, W, X, Y, many, micro_batches=(2, 4, 5))
    assert names(plan_of(fixmatch, W, X, Y, many).loop).count("dot_general") == 1


# Loops, branches and checkpoints.


def ctc(w, x):
    """Carries begin as zeros with an axis of examples."""
    logits = h(w, jnp.stack([x, x * 2, x - 1], 1))
    targets = jnp.asarray(LABELS[:, None] % (D - 1) + 1)
    return optax.ctc_loss(logits, jnp.zeros((B, 3)), targets, jnp.zeros((B, 1)))


def recurrent(w, x):
    def cell(carry, _):
        state, total, count = carry
        state = jnp.tanh(state @ w["a"] + x)
        return (state, total + jnp.sum(state**2), count + 1), state[:, 0]

    (state, total, count), outs = lax.scan(cell, (jnp.zeros((B, D)), 0.0, 0), None, T, reverse=True)
    return state, total**2, outs.T, count


def chosen(w, x):
    key = lax.cond(jnp.sum(W["a"]) > 0, lambda x: x @ w["a"], lambda x: x * 2, x)
    of_parameter = lax.switch(jnp.int32(w["a"][0, 0] > 9), [jnp.sin, jnp.cos], x @ w["b"])
    of_examples = lax.cond(jnp.sum(h(w, x)) > 0, lambda z: z**2, lambda z: z, h(w, x))
    return key * of_parameter + of_examples


def turned(w, x):
    stop = lax.stop_gradient(h(w, x).sum(-1))
    counts = jax.vmap(
        lambda z: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + jnp.abs(z) + 0.1, c[1] + 1), (z, 0))
    )
    to_five = lax.fori_loop(0, 5, lambda i, z: jnp.tanh(z @ w["b"] + i), h(w, x))
    return counts(stop)[1] * h(w, x)[:, 0] + to_five[:, 0]


def checkpointed(w, x):
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    layer = jax.checkpoint(lambda z, v: (jnp.tanh(z @ v), jnp.sum(z)), policy=policy)
    z, sums = lax.scan(layer, x, jnp.stack([w["a"], w["b"]]))
    return jnp.log(jnp.sum(z**2)) + jnp.prod(sums)


def experts(w, x):
    """A balance loss of sums inside of scanned, checkpointed layers: it becomes a scan of its own."""

    @jax.checkpoint
    def layer(carry, v):
        z, balance = carry
        share = jax.nn.softmax(z @ v)
        chosen = jax.nn.one_hot(jnp.argmax(share, -1), D)
        balance += D * jnp.sum(share.mean(0) * chosen.mean(0))
        return (z + jnp.tanh(z @ v), balance), jnp.max(share.mean(0)) * balance

    (z, balance), seen = lax.scan(layer, (x, 0.0), jnp.stack([w["a"], w["b"]]))
    return jnp.mean(z**2) + 0.1 * balance + jnp.sum(seen)


def solved(w, x):
    features = h(w, jnp.stack([x, x * 2, x - 1], 1))
    system = jnp.einsum("bti,btj->bij", features, features) + jnp.eye(D)
    mean = jnp.linalg.solve(w["a"] @ w["a"].T + jnp.eye(D), w["b"][0])  # of parameters alone
    return jnp.linalg.solve(system, features[:, 0, :, None]) + mean[:, None]


def drawn(w, x):
    key, keys = jax.random.key(3), jax.random.split(jax.random.key(4), B)
    kept = jax.random.bernoulli(key, 0.7, (B, D))
    noise = jax.random.normal(jax.random.PRNGKey(1), (D, B)).T + jax.vmap(lambda k: jax.random.normal(k, (D,)))(keys)
    return jnp.where(kept, h(w, x), 0) * noise + jnp.mean(kept) * jax.random.permutation(key, B)[:, None]


NESTED = [ctc, recurrent, chosen, turned, checkpointed, experts, solved, drawn]
NESTED += [
    lambda w, x: lax.map(lambda x: jnp.tanh(x @ w["a"]).sum() ** 2, x),
    lambda w, x: jnp.interp(h(w, x), np.linspace(-1, 1, 7), np.arange(7.0) ** 2),
]


@pytest.mark.parametrize("fun", NESTED, ids=lambda f: f.__name__)
def test_loops_branches_solves_and_draws_are_those_of_jax(fun):
    check(fun, W, X)


def test_experts_have_their_layers_in_the_loop():
    plan = plan_of(experts, W, X)
    assert names(plan.loop).count("scan") == 1
    assert names(plan.after).count("scan") == 1
    assert {str(x.aval.shape) for x in plan.frontier} == {"()", f"(2, {D})"}


# Functions that bring their derivative.


def custom(forward, backward):
    @jax.custom_vjp
    def function(x):
        return forward(x)

    function.defvjp(lambda x: (forward(x), x), lambda x, g: (backward(x, g),))
    return function


straight = custom(lambda x: jnp.round(4 * x) / 4, lambda x, g: g * (jnp.abs(x) < 1))
clipped_by_batch = custom(lambda x: x, lambda x, g: g / jnp.maximum(1, 30 * jnp.linalg.norm(g)))


@jax.custom_jvp
def rectified(x):
    return jnp.maximum(x, 0)


rectified.defjvps(lambda t, _, x: 2 * t * (x > 0))


@jax.custom_jvp
def centred_tangent(x):
    return x


centred_tangent.defjvps(lambda t, _, x: t - jnp.mean(t, 0))

CUSTOM = {
    "of each example": (lambda w, x: straight(h(w, x)) * rectified(x @ w["b"]), "loop"),
    "of zeros and rows": (lambda w, x: jnp.logaddexp(jnp.zeros((B, D)), h(w, x)), "loop"),
    "a gradient that mixes": (lambda w, x: clipped_by_batch(h(w, x)) ** 2, "after"),
    "a tangent that mixes": (lambda w, x: centred_tangent(h(w, x)) ** 2, "after"),
    "of parameters": (lambda w, x: jnp.mean((x @ clipped_by_batch(w["a"])) ** 2) + jnp.sum(w["a"]), "once"),
    "in a scan": (lambda w, x: lax.scan(lambda z, v: (straight(z @ v), None), x, jnp.stack([w["a"]] * 2))[0], None),
}


@pytest.mark.parametrize("name", CUSTOM)
def test_a_derivative_that_a_function_brings_is_divided_if_it_is_of_each_example(name):
    fun, part = CUSTOM[name]
    check(fun, W, X)
    if part:
        steps = names(getattr(plan_of(lambda w, x: jnp.sum(fun(w, x)), W, X), part))
        assert [x for x in steps if x.startswith("custom")]


def test_a_second_derivative_that_mixes_examples_is_an_error_and_no_wrong_number():
    @jax.custom_jvp
    def sine(x):
        return jnp.sin(x)

    @jax.custom_jvp
    def slope(x):
        return jnp.cos(x)

    sine.defjvps(lambda t, _, x: t * slope(x))
    slope.defjvps(lambda t, _, x: -t * jnp.mean(jnp.sin(x), 0))
    loss = lambda w, x: jnp.mean(sine(x @ w["a"]))  # noqa: E731
    check(loss, W, X)
    message = r"^the second derivative of a jax.custom_vjp or custom_jvp must not mix"
    with pytest.raises(ValueError, match=message):
        jax.hessian(shrewjax.micro_batched(loss, 4))(W, X)


# Inner gradients.

INNER = {
    "a penalty on slopes": lambda w, x: jnp.mean(
        (jnp.linalg.norm(jax.grad(lambda x: jnp.sum(h(w, x) ** 3))(x), axis=-1) - 1) ** 2
    ),
    "a step on each task": lambda w, x: jax.vmap(
        lambda x: jnp.sum((x @ (w["a"] - 0.1 * jax.grad(lambda a: jnp.sum(jnp.tanh(x @ a) ** 2))(w["a"]))) ** 2)
    )(x),
    "a step on the batch": lambda w, x: jnp.mean(
        h({"a": w["a"] - 0.1 * jax.grad(lambda a: jnp.mean(jnp.tanh(x @ a) ** 2))(w["a"])}, x) ** 2
    ),
    "a curvature": lambda w, x: jax.vmap(lambda x: jnp.trace(jax.hessian(lambda x: jnp.sum(h(w, x) ** 2))(x)))(x),
}


@pytest.mark.parametrize("name", INNER)
def test_inner_gradients_are_those_of_jax(name):
    check(INNER[name], W, X)
