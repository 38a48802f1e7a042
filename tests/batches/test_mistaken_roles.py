"""Leaves with another role than their argument's: the remedy in each message, applied, gives the right gradient."""

import dataclasses
import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

import shrewjax

pytestmark = pytest.mark.thorough

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 3)).astype(np.float32), RNG.normal(size=8).astype(np.float32)
WEIGHTS = {"w": jnp.asarray([0.5, -1.0, 2.0])}


def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] - y) ** 2)


def noisy(params, x, key, scale=1.0):
    return jnp.mean((x + scale * jax.random.normal(key, x.shape)) @ params["w"])


def traced(loss, *args):
    return jax.eval_shape(shrewjax.accumulated_value_and_grad(loss, 4), *args)


class Examples(NamedTuple):
    x: jax.Array
    y: jax.Array
    rate: float | None


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x", "y", "rate"], meta_fields=[])
@dataclasses.dataclass
class Data:
    x: jax.Array
    y: jax.Array
    rate: float | None


def rated(params, x, y, rate):
    return loss_fn(params, x * jnp.broadcast_to(rate, x.shape), y)


def dot(params, x):
    return jnp.mean(x @ params["w"])


def of_fields(params, batch):
    return rated(params, batch.x, batch.y, batch.rate)


def noisy_in_dict(params, batch, **others):
    return noisy(params, batch["x"], batch["key"], **others)


def gan(generator, critic, z):
    return jnp.mean(jnp.tanh(z @ jnp.diag(generator["w"])) @ critic["w"]) * critic["b"].sum()


CLASSES = np.float32([1, 2, 3])
CRITIC = {"w": jnp.ones((3, 4)), "b": jnp.arange(4.0)}
RATED = {"x": X, "y": Y, "rate": 0.5}
RAW, KEY = jax.random.PRNGKey(0), jax.random.key(0)
NOISE = {"key": KEY, "scale": 2.0}

# fun, the arguments by position and by keyword, and the options of accumulated_value_and_grad.
MISTAKEN_ROLES = {
    "a scalar by position": (rated, (WEIGHTS, X, Y, 0.5), {}, {}),
    "settings": (lambda p, h, x, y: rated(p, x, y, h["r"]), (WEIGHTS, {"r": 0.5, "s": 1.0}, X, Y), {}, {}),
    "a scalar in a dict": (lambda p, batch: rated(p, **batch), (WEIGHTS, RATED), {}, {}),
    "a scalar deep in a dict": (lambda p, b: rated(p, **b["of{i}"][0]), (WEIGHTS, {"of{i}": [RATED]}), {}, {}),
    "a scalar in a tuple": (lambda p, batch: rated(p, *batch), (WEIGHTS, (X, Y, 0.5)), {}, {}),
    "a scalar in a list": (lambda p, batch: rated(p, *batch), (WEIGHTS, [X, Y, 0.5]), {}, {}),
    "a scalar in a named tuple": (of_fields, (WEIGHTS, Examples(X, Y, 0.5)), {}, {}),
    "a scalar in a dataclass": (of_fields, (WEIGHTS, Data(X, Y, 0.5)), {}, {}),
    "a scalar in a dict by keyword": (lambda p, *, batch: rated(p, **batch), (WEIGHTS,), {"batch": RATED}, {}),
    "a scalar among keywords": (rated, (WEIGHTS,), RATED, {}),
    "a scalar before keywords": (lambda p, r, x, y: rated(p, x, y, r), (WEIGHTS, 0.5), {"x": X, "y": Y}, {}),
    "half of the batch by keyword": (loss_fn, (WEIGHTS, X), {"y": Y}, {}),
    "an array by position": (rated, (WEIGHTS, X, Y, CLASSES), {}, {}),
    "an array in a dict": (lambda p, batch: rated(p, **batch), (WEIGHTS, RATED | {"rate": CLASSES}), {}, {}),
    "an array of a length that K divides": (lambda p, c, x: dot(p, x) * c.sum(), (WEIGHTS, Y[:4], X), {}, {}),
    "a function in a dict": (lambda p, b: b["f"](dot(p, b["x"])), (WEIGHTS, {"x": X, "f": jnp.negative}), {}, {}),
    "text by position": (lambda p, x, y, kind: loss_fn(p, x, y) * len(kind), (WEIGHTS, X, Y, "mean"), {}, {}),
    "a frozen tree first": (lambda p, c, x, y: loss_fn(p, x, y) * c["b"].sum(), (WEIGHTS, CRITIC, X, Y), {}, {}),
    "a frozen tree last": (lambda p, x, y, c: loss_fn(p, x, y) * c["b"].sum(), (WEIGHTS, X, Y, CRITIC), {}, {}),
    "an average of parameters": (lambda p, q, x: dot(p, x) * q["w"].sum(), (WEIGHTS, {"w": jnp.ones(3)}, X), {}, {}),
    "two networks": (gan, ({"w": jnp.ones(3)}, CRITIC, X), {}, {}),
    "two networks, by the second": (lambda c, g, z: gan(g, c, z), (CRITIC, {"w": CLASSES}, X), {}, {}),
    "two networks and a wrong position": (gan, ({"w": jnp.ones(3)}, CRITIC, X), {}, {"batch_argnums": 1}),
    "a forgotten key": (noisy, (WEIGHTS, X, KEY), {}, {}),
    "a forgotten raw key by keyword": (noisy, (WEIGHTS, X), {"key": RAW}, {}),
    "a key among keywords": (noisy, (WEIGHTS,), {"x": X, "key": KEY}, {}),
    "two keys": (lambda p, j, x, k: noisy(p, x, j) * noisy(p, x, k), (WEIGHTS, KEY, X, RAW), {}, {"rng_argnums": 1}),
    "a key in a dict": (noisy_in_dict, (WEIGHTS, {"x": X, "key": KEY}), {}, {}),
    "a raw key in a dict": (noisy_in_dict, (WEIGHTS, {"x": X, "key": RAW}), {}, {}),
    "a key in settings": (lambda p, x, c: noisy(p, x, **c), (WEIGHTS, X, NOISE), {}, {"batch_argnums": 1}),
}  # fmt: skip


def remedied(message, fun, args, kwargs, options):
    """Returns the call with the remedy of a message applied: its roles, or a leaf as an argument of its own, `leaf`."""
    roles = re.findall(r"\b(batch_argnums|rng_argnums)=(\([^()]*\)|-?\d+|'\w+')", message)
    options = options | {name: eval(places) for name, places in reversed(roles)}  # of two remedies the first
    if "an argument of its own" not in message:
        return fun, args, kwargs, options
    place, path = re.match(r"(?:keyword )?argument (\w+)(\S*) ", message).groups()
    place = int(place) if place.isdigit() else place
    given = dict(enumerate(args)) | kwargs
    leaves, structure = jax.tree.flatten_with_path(given[place])
    (at,) = [i for i, (of, _) in enumerate(leaves) if jax.tree_util.keystr(of) == path]
    rest = [x for _, x in leaves[:at] + leaves[at + 1 :]]

    def with_leaf(*args, leaf, **kwargs):
        own = dict(enumerate(args)) | kwargs
        own[place] = structure.unflatten([*own[place][:at], leaf, *own[place][at:]])
        return fun(*(own[i] for i in range(len(args))), **{name: own[name] for name in kwargs})

    if "name that in rng_argnums=" in message:
        before = options.get("rng_argnums", ())
        options["rng_argnums"] = (*(before if isinstance(before, tuple) else (before,)), "leaf")
    given[place] = rest
    named = {name: given[name] for name in kwargs} | {"leaf": leaves[at][1]}
    return with_leaf, tuple(given[i] for i in range(len(args))), named, options


def with_own_keys(fun, args, kwargs):
    """The mean gradient over micro-batches of their own examples and keys, by hand."""

    def part(i):
        def of(x):
            if isinstance(x, jax.Array) and (x.dtype == np.uint32 or jnp.issubdtype(x.dtype, jax.dtypes.prng_key)):
                return jax.random.fold_in(x, i)
            return x[i::4] if np.ndim(x) and x.shape[0] == 8 else x

        others, by_name = jax.tree.map(of, (args[1:], kwargs))
        return jax.grad(fun)(args[0], *others, **by_name)

    return jax.tree.map(lambda *of_all: sum(of_all) / 4, *map(part, range(4)))


def called(fun, args, kwargs, options):
    """Returns the message of the error, or what the call returns."""
    try:
        return "", shrewjax.accumulated_value_and_grad(fun, 4, **options)(*args, **kwargs)
    except ValueError as error:
        return str(error), None


@pytest.mark.parametrize("case", MISTAKEN_ROLES)
def test_the_remedy_for_a_mistaken_role_gives_the_right_gradient(case):
    fun, args, kwargs, options = MISTAKEN_ROLES[case]
    expected = with_own_keys(fun, args, kwargs)
    message, _ = called(fun, args, kwargs, options)
    for _ in range(2):  # the second may have another message
        fun, args, kwargs, options = remedied(message, fun, args, kwargs, options)
        message, returned = called(fun, args, kwargs, options)
        if not message:
            break
    assert_close(returned[1], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("fun", "args", "options"),
    [
        (lambda x, y, p: loss_fn(p, x, y), (X, Y, WEIGHTS), {"batch_argnums": 1}),
        (loss_fn, (WEIGHTS, X, Y), {"argnums": (0, 1)}),
    ],
    ids=["parameters last", "a gradient by examples"],
)
def test_examples_among_the_parameters_get_a_note_that_says_where_each_goes(fun, args, options):
    with pytest.raises(TypeError) as raised:
        jax.eval_shape(shrewjax.accumulated_value_and_grad(fun, 4, **options), *args)
    assert any("pass their indices as the batch" in note for note in raised.value.__notes__)


def test_a_gradient_by_examples_is_right_if_they_are_parameters_and_their_indices_the_batch():
    step = shrewjax.accumulated_value_and_grad(
        lambda p, x, at: loss_fn(p, x[at], jnp.asarray(Y)[at]), 4, argnums=(0, 1)
    )
    assert_close(step(WEIGHTS, X, np.arange(8))[1], jax.grad(loss_fn, (0, 1))(WEIGHTS, X, Y), rtol=1e-5)


def test_a_selection_by_a_mask_gets_a_note_with_the_mean_that_is_right():
    mask = Y > 0

    def selecting(params, x, y, mask):
        return loss_fn(params, x[mask], y[mask])

    with pytest.raises(jax.errors.NonConcreteBooleanIndexError) as raised:
        shrewjax.accumulated_value_and_grad(selecting, 4)(WEIGHTS, X, Y, mask)
    assert any("jnp.where(mask, ...) over the mask, and let weight_fn= count it" in x for x in raised.value.__notes__)

    def masked(params, x, y, mask):
        return jnp.sum(jnp.where(mask, (x @ params["w"] - y) ** 2, 0)) / jnp.maximum(jnp.sum(mask), 1).astype("f")

    step = shrewjax.accumulated_value_and_grad(masked, 4, weight_fn=lambda p, x, y, mask: mask.sum())
    assert_close(step(WEIGHTS, X, Y, mask)[1], jax.grad(selecting)(WEIGHTS, X, Y, mask), rtol=1e-5)


@pytest.mark.parametrize(("reduce", "options"), [(jnp.mean, {}), (jnp.sum, {"reduction": "sum"})])
def test_each_remedy_for_a_loss_of_each_example_gives_the_gradient_of_the_batch(reduce, options):
    def loss(params, x, y):
        return reduce((x @ params["w"] - y) ** 2)

    step = shrewjax.accumulated_value_and_grad(loss, 4, **options)
    assert_close(step(WEIGHTS, X, Y)[1], jax.grad(loss)(WEIGHTS, X, Y), rtol=1e-5)


def test_the_sum_of_a_mean_is_k_times_its_gradient_whatever_the_weights():
    step = shrewjax.accumulated_value_and_grad(loss_fn, 4, reduction="sum", weight_fn=lambda p, x, y: len(x))
    expected = jax.tree.map(lambda x: 4 * x, jax.grad(loss_fn)(WEIGHTS, X, Y))
    assert_close(step(WEIGHTS, X, Y)[1], expected, rtol=1e-5)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["size"])
@dataclasses.dataclass
class Sized:
    x: jax.Array
    size: int


def test_a_static_size_is_the_whole_batch_s_and_summing_the_parts_mends_it():
    def loss(params, batch):
        return jnp.sum(batch.x @ params["w"]) / batch.size

    _, grads = shrewjax.accumulated_value_and_grad(loss, 4, reduction="sum")(WEIGHTS, Sized(X, 8))
    assert_close(grads, jax.grad(loss)(WEIGHTS, Sized(X, 8)), rtol=1e-5)


def test_another_number_of_examples_is_an_error_that_names_both_leaves_and_what_each_has():
    for args, wrong, like, shape in (
        ((X.T, Y), "argument 1", "argument 2", r"\(3, 8\)"),
        (((X, Y), np.ones((24, 3), "f")), r"argument 1\[0\]", "argument 2", r"\(8, 3\)"),
        (({"nodes": X, "edges": jnp.ones(22)},), r"argument 1\['edges'\]", r"argument 1\['nodes'\]", r"\(22,\)"),
    ):
        with pytest.raises(
            ValueError,
            match=rf"^{wrong} must have a first axis of \d+ examples, as {like} has, got shape {shape}\.",
        ):
            traced(loss_fn, WEIGHTS, *args)


def test_padding_is_the_right_remedy_for_a_number_that_k_does_not_divide():
    def masked(params, x, y, is_real):
        return jnp.sum(is_real.astype("f") * (x @ params["w"] - y) ** 2) / jnp.maximum(jnp.sum(is_real), 1).astype("f")

    with pytest.raises(ValueError, match=r"has 6 examples, .* to 8, and let weight_fn= count the real ones"):
        traced(loss_fn, WEIGHTS, X[:6], Y[:6])
    step = shrewjax.accumulated_value_and_grad(masked, 4, weight_fn=lambda p, x, y, is_real: is_real.sum())
    _, grads = step(WEIGHTS, X, Y, np.arange(8) < 6)
    assert_close(grads, jax.grad(loss_fn)(WEIGHTS, X[:6], Y[:6]), rtol=1e-5)


@pytest.mark.parametrize(
    "text", [["a"] * 8, np.array(["a"] * 8), np.array([object()] * 8)], ids=["list", "array", "objects"]
)
def test_leaves_that_are_no_numbers_are_errors_that_name_them(text):
    with pytest.raises(
        ValueError,
        match=r"^argument 1\['t'\]\S* must have a first axis of 8 examples, .* got \S+\. .* of its own, with batch_",
    ):
        shrewjax.accumulated_value_and_grad(lambda p, batch: loss_fn(p, batch["x"], batch["y"]), 4)(
            WEIGHTS, {"t": text, "x": X, "y": Y}
        )


def with_state(params, state, key, x, y):
    noise = jax.random.normal(key, y.shape)
    return loss_fn(params, x, y + noise), {"n": state["n"] + 1, "mean": state["mean"] + x.mean()}


def test_a_state_among_the_aux_is_an_error_that_names_the_argument_which_hands_it_on():
    state = {"n": jnp.int32(0), "mean": jnp.float32(0)}
    args = WEIGHTS, state, KEY, X, Y
    options = {"batch_argnums": (3, 4), "rng_argnums": 2}
    with pytest.raises(
        ValueError, match=r"int32, which 'mean' does not take\. .* with 'sum' .* state by carry_argnum="
    ):
        shrewjax.accumulated_value_and_grad(with_state, 4, has_aux=True, **options)(*args)

    def carrying(*args):
        value, state = with_state(*args)
        return value, ((), state)

    step = shrewjax.accumulated_value_and_grad(carrying, 4, has_aux=True, rng_argnums=2, carry_argnum=1)
    for _ in range(2):
        (_, (_, state)), _ = step(WEIGHTS, state, *args[2:])
    assert state["n"] == 8
    np.testing.assert_allclose(state["mean"], 8 * X.mean(), rtol=1e-5)
