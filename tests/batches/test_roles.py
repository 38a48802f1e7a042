"""Arguments have their roles however they come, and what fits no role is an error."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close

from shrewjax import accumulated_value_and_grad
from shrewjax._batches.roles import Call, is_key

W = jnp.array([0.5, -1.0, 2.0])
X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = np.arange(8, dtype=np.float32)
KEY = jax.random.key(3)


def scaled(w, x, y, scale=1.0):
    return jnp.mean((scale * x @ w - y) ** 2)


def by_keys(w, **batch):
    return scaled(w, batch["x"], batch["y"])


def only_keywords(w, *, x, y, scale):
    return scaled(w, x, y, scale)


def flagged(w, x, y, *, negate):
    return -scaled(w, x, y) if negate == "yes" else scaled(w, x, y)


# fun, the arguments by position and by keyword, and the options of accumulated_value_and_grad
ROLES = {
    "a scale by keyword stays whole": (scaled, (W, X, Y), {"scale": 2.0}, {}),
    "what is no array stays as it is": (flagged, (W, X, Y), {"negate": "yes"}, {}),
    "the batch by keyword": (scaled, (W,), {"y": Y, "x": X}, {}),
    "the batch by keys": (by_keys, (W,), {"x": X, "y": Y}, {}),
    "named, beside one that stays whole": (scaled, (W,), {"x": X, "y": Y, "scale": 2.0}, {"batch_argnums": ("x", "y")}),
    "keyword-only, named": (only_keywords, (W,), {"x": X, "y": Y, "scale": 2.0}, {"batch_argnums": ("x", "y")}),
    "a position of what comes by keyword": (scaled, (W,), {"scale": 2.0, "x": X, "y": Y}, {"batch_argnums": (1, 2)}),
    "a name of what comes by position": (scaled, (W, X, Y, 2.0), {}, {"batch_argnums": ("y", "x")}),
    "a position and a name": (scaled, (W, X), {"y": Y, "scale": 2.0}, {"batch_argnums": (1, "y")}),
    "counted from the back": (lambda w, s, x, y: scaled(w, x, y, s), (W, 2.0, X, Y), {}, {"batch_argnums": (-1, -2)}),
    "parameters by keyword": (scaled, (), {"x": X, "w": W, "y": Y}, {}),
    "partial, by keyword": (partial(scaled, scale=2.0), (W, X, Y), {}, {}),
    "partial, by position": (partial(lambda c, *args: c * scaled(*args), 3.0), (W, X, Y), {}, {}),
    "partial, then positions": (
        partial(lambda c, w, x, y: c * scaled(w, x, y), 3.0), (W,), {"y": Y, "x": X}, {"batch_argnums": (1, 2)}
    ),
    "partial of an array of the batch's length": (partial(scaled, scale=np.float32(2)), (W,), {"x": X, "y": Y}, {}),
    "no signature": (jax.jit(lambda *args, **kw: scaled(*args, **kw)), (W, X), {"y": Y}, {"batch_argnums": (1, "y")}),
}  # fmt: skip


@pytest.mark.parametrize("case", ROLES)
def test_arguments_have_their_roles_however_they_are_passed(case):
    fun, args, kwargs, options = ROLES[case]

    def of_params(w):
        return fun(w, *args[1:], **kwargs) if args else fun(**(kwargs | {"w": w}))

    assert_close(
        accumulated_value_and_grad(fun, 4, **options)(*args, **kwargs), jax.value_and_grad(of_params)(W), rtol=1e-5
    )


def noisy(w, key, **batch):
    noise = jax.random.normal(key, batch["x"].shape)
    return jnp.mean((batch["x"] + noise) @ w * batch["y"])


@pytest.mark.parametrize("named", [1, "key", ("key",)], ids=repr)
@pytest.mark.parametrize("by_keyword", [False, True])
def test_keys_beside_a_batch_by_keyword_are_folded(named, by_keyword):
    batch = {"x": X, "y": Y}
    by_hand = [jax.value_and_grad(noisy)(W, jax.random.fold_in(KEY, i), x=X[i::4], y=Y[i::4]) for i in range(4)]
    expected = jax.tree.map(lambda *of_all: sum(of_all) / 4, *by_hand)
    call = accumulated_value_and_grad(noisy, 4, rng_argnums=named)
    assert_close(call(W, key=KEY, **batch) if by_keyword else call(W, KEY, **batch), expected, rtol=1e-5)


def test_carry_and_weight_may_come_by_keyword():
    def loss(w, x, count, y):
        return scaled(w, x, y), ((), count + len(x))

    call = accumulated_value_and_grad(loss, 4, has_aux=True, carry_argnum=2, weight_fn=lambda w, x, count, y: 1 + count)
    (value, (_, count)), _ = call(W, count=jnp.float32(0), y=Y, x=X)
    expected = [scaled(W, X[i::4], Y[i::4]) * (1 + 2 * i) for i in range(4)]
    np.testing.assert_allclose(value, sum(expected) / 16, rtol=1e-5)
    assert count == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"batch_argnums": "z"},
            r"batch_argnums has the name 'z', but .* Name one of w, x, y\. Or pass",
        ),
        ({"batch_argnums": ("x", 1)}, r"argument 1 is in batch_argnums and in batch_argnums"),
        ({"rng_argnums": "y"}, r"keyword argument y in rng_argnums must be one PRNG key"),
        (
            {"rng_argnums": 5},
            r"rng_argnums has the position 5, but 2 arguments came by position, and by keyword y\.",
        ),
        ({"batch_argnums": 1.0}, r"batch_argnums must be positions or names of arguments, .* got 1\.0"),
    ],
)
def test_a_name_or_a_position_of_no_argument_is_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        accumulated_value_and_grad(scaled, 4, **options)(W, X, y=Y)


def test_remedy_for_a_first_axis_as_long_as_the_batch_keeps_the_argument_whole():
    def loss(w, x, scale):
        return jnp.mean(x @ (scale * w))

    w, x, scale = np.ones(4, np.float32), np.arange(16, dtype=np.float32).reshape(4, 4), np.arange(4, dtype=np.float32)
    remedy = r"scale has as many rows as the batch.* Otherwise pass it by position, with batch_argnums=1$"
    with pytest.raises(ValueError, match=remedy):
        accumulated_value_and_grad(loss, 2)(w, x, scale=scale)
    for _, grad in (
        accumulated_value_and_grad(partial(loss, scale=scale), 2)(w, x),
        accumulated_value_and_grad(loss, 2, batch_argnums=1)(w, x, scale),
    ):
        np.testing.assert_allclose(grad, (x * scale).mean(0))


def test_numbers_that_look_like_a_raw_key_pass_as_int32():
    def loss(w, x, sizes):
        return jnp.mean(x) * w * jnp.float32(sizes[0])

    w, x = np.float32(1), np.ones(4, np.float32)
    with pytest.raises(ValueError, match=r"^argument 2 is a PRNG key.*no key, convert them to int32$"):
        accumulated_value_and_grad(loss, 2, batch_argnums=1)(w, x, np.array([3, 1], np.uint32))
    assert accumulated_value_and_grad(loss, 2, batch_argnums=1)(w, x, np.array([3, 1], np.int32))[0] == 3


# --- one call: names in messages, and which leaves are keys --------------------------------------------------------

CALL = Call((0, 1, "y"), (1.0, {"x": [2.0]}, 3.0), {"batch_argnums": (1, 2), "rng_argnums": ()}, 4, "device")


def test_names_are_those_that_a_caller_writes():
    ((_, path, _),) = CALL.leaves(1)
    assert CALL.name(1, path) == "argument 1['x'][0]"
    assert CALL.name(2, ()) == "keyword argument y"
    assert CALL.as_role("batch_argnums", 2, 1) == "batch_argnums=(1, 'y')"
    assert CALL.as_role("rng_argnums", 2) == "rng_argnums='y'"
    assert CALL.as_role("batch_argnums") == "batch_argnums=()"
    assert CALL.whole() == [0]


def test_a_function_gets_its_arguments_as_they_came():
    assert CALL.in_order(lambda *args, **kwargs: (args, kwargs))(1, 2, 3) == ((1, 2), {"y": 3})


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (jax.random.key(0), True),
        (jax.random.split(jax.random.key(0), 3), True),
        (jax.random.PRNGKey(0), True),
        (np.ones(4, np.uint32), True),
        (np.ones(3, np.uint32), False),
        (np.ones((2, 2), np.uint32), False),
        (np.ones(2, np.int32), False),
        ("key", False),
    ],
    ids=str,
)
def test_keys_are_typed_ones_and_arrays_like_raw_ones(leaf, expected):
    assert is_key(leaf) == expected
