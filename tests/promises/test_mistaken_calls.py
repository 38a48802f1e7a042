"""Calls that once gave a wrong result in silence: each is an error that names the remedy, or gives what it says."""

import contextlib
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_close, mesh_of, placed
from speed import quick_jit

import shrewjax

pytestmark = pytest.mark.thorough

PARAMS = {"w": jnp.zeros(3)}
GRADS = {"w": jnp.ones(3)}
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 3)).astype(np.float32), RNG.normal(size=8).astype(np.float32)
WEIGHTS = {"w": jnp.asarray([0.5, -1.0, 2.0])}


def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] - y) ** 2)


# --- extra arguments of update ----------------------------------------------------------------------------------


def with_extra(record):
    """An optimizer that writes down its extra arguments, and declares `values` as one of its own."""

    def update(updates, state, params=None, *, values=None, **extra_args):
        record.update(extra_args, values=values)
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def calls_of(tx, params=PARAMS):
    state = tx.init(params)
    return {
        "update": lambda **extra: tx.update(GRADS, state, params, **extra),
        "apply_gradients": lambda **extra: shrewjax.apply_gradients(tx, GRADS, state, params, **extra),
        "flush": lambda **extra: shrewjax.flush(tx, state, params, **extra),
    }


@pytest.mark.parametrize("name", ["weights", "wieght", "WEIGHT", "height", "flsuh", "flushs"])
def test_a_misspelled_weight_or_flush_is_an_error_of_update_too(name):
    meant = "flush" if name.startswith("fl") else "weight"
    with pytest.raises(ValueError, match=rf"^{name}= is no argument of accumulate\. Pass {meant}=$"):
        calls_of(shrewjax.accumulate(optax.sgd(1.0), 2))["update"](**{name: 1.0})


# Words of trainers and of users, none of which a transformation takes.
OTHERS = dict.fromkeys(
    ("mask", "count", "n", "num", "bs", "size", "length", "k", "scale", "num_tokens", "batch_size", "losses"), 3.0
) | dict.fromkeys(
    ("final", "end", "done", "finish", "close", "boundary", "apply", "update", "do_step", "step", "obj_fn"), True
)


def test_update_ignores_words_that_no_transformation_takes_as_optax_does():
    tx = shrewjax.accumulate(optax.sgd(1.0), 1)
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS, **OTHERS)
    np.testing.assert_array_equal(updates["w"], -GRADS["w"])


@pytest.mark.parametrize(("name", "meant"), [("loss", "value"), ("last", "flush")])
def test_a_trainer_s_loss_or_last_is_one_warning_unless_value_or_flush_comes_too(name, meant):
    call = calls_of(shrewjax.accumulate(optax.sgd(1.0), 1))["update"]
    with pytest.warns(UserWarning, match=rf"^{name}= is no argument of accumulate\. Pass {meant}=$") as caught:
        updates, _ = call(**{name: True}, obj_fn=loss_fn)
    assert len(caught) == 1
    np.testing.assert_array_equal(updates["w"], -GRADS["w"])
    call(**{name: True, meant: 1.0 if meant == "value" else True})


@pytest.mark.parametrize("call", ["apply_gradients", "flush"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.sgd(1.0),
        lambda: optax.chain(shrewjax.clip_by_global_norm(1.0), optax.masked(optax.adamw(1.0), {"w": True})),
        lambda: shrewjax.skip_on_spike(optax.inject_hyperparams(optax.lion)(1.0)),
    ],
    ids=["sgd", "a chain", "a guard and injected hyperparameters"],
)
def test_a_step_refuses_each_word_that_no_transformation_takes(call, make):
    calls = calls_of(shrewjax.accumulate(make(), 2))
    for name in (*OTHERS, "loss", "last"):
        with pytest.raises(ValueError, match=rf"^no transformation in tx takes {name}=\. Pass .*=\. Or leave it out$"):
            calls[call](**{name: 3.0})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("weights", "weight="),
        ("sample_weight", "weight="),
        ("loss_weight", "weight="),
        ("force_flush", "flush="),
        ("valeu", "value="),
        ("gradd", "grad="),
        ("obj_fun", "obj_fn="),
        ("scale", "flush= or grad= or value= or weight="),
    ],
)
def test_a_step_names_the_nearest_argument_that_a_transformation_takes(name, meant):
    tx = optax.chain(optax.contrib.hutchinson_estimator_diag_hessian(), optax.sgd(1.0))
    call = calls_of(shrewjax.accumulate(tx, 2))["apply_gradients"]
    with pytest.raises(ValueError, match=rf"^no transformation in tx takes {name}=\. Pass {meant}\. Or leave it out$"):
        call(**{name: 1.0})


def test_a_step_without_a_window_takes_the_loss_and_no_unknown_word():
    calls = calls_of(optax.chain(shrewjax.clip_by_global_norm(1.0), optax.sgd(1.0)))
    calls["apply_gradients"](value=1.0, grad=GRADS)
    with pytest.raises(
        ValueError, match=r"^no transformation in tx takes mask=\. Pass grad= or value=\. Or leave it out$"
    ):
        calls["apply_gradients"](mask=1.0)


def test_a_step_hands_any_word_to_an_optimizer_that_takes_any():
    record = {}
    calls_of(shrewjax.accumulate(optax.chain(with_extra(record)), 1))["apply_gradients"](**OTHERS)
    assert record == OTHERS | {"values": None}
    condition = optax.conditionally_transform(
        optax.sgd(1.0), lambda step, **extra: record.update(extra) or step < 2, True
    )
    calls_of(shrewjax.accumulate(condition, 1))["apply_gradients"](anything=5.0)
    assert record["anything"] == 5.0


def test_names_for_value_fn_and_of_neighbours_pass():
    record = {}
    call = calls_of(shrewjax.accumulate(with_extra(record), 1))["update"]
    own = {"value_fn": 1, "batch_size": 2, "num_items": 3, "is_last": 4, "num_tokens": 5}
    call(**own)
    assert record == own | {"values": None}
    for name in (
        "temperature",
        "batch",
        "size",
        "last_loss",
        "last_grad",
        "step",
        "labels",
        "is_training",
        "asynchronous",
    ):
        call(**{name: 1})
        assert record[name] == 1


def test_a_line_search_hands_any_name_to_its_function():
    """Names near those of `accumulate`, and words for a count."""
    names = ("weights", "values", "grads", "height", "num_tokens", "loss", "last")

    def loss(params, weights, values, grads, height, num_tokens, loss, last):
        return jnp.sum((params["w"] - weights - values - grads - height - num_tokens - loss - last) ** 2)

    search = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(20))
    given = dict.fromkeys(names, jnp.float32(0.5))
    value, grad = jax.value_and_grad(loss)(PARAMS, **given)
    given |= {"value": value, "grad": grad, "value_fn": loss}
    with jax.numpy_dtype_promotion("standard"):
        expected, _ = search.update(grad, search.init(PARAMS), PARAMS, **given)
        tx = shrewjax.accumulate(search, 1)
        found, _ = tx.update(grad, tx.init(PARAMS), PARAMS, **given)
    assert_close(found, expected, rtol=1e-6)


def test_a_misspelled_name_beside_a_line_search_is_an_error_of_optax():
    tx = shrewjax.accumulate(optax.lbfgs(), 1)
    given = {"value": jnp.float32(0), "grad": GRADS, "value_fn": lambda params: jnp.sum(params["w"])}
    with pytest.raises(TypeError, match=r"not consumed by `value_fn`: .*wieght"):
        tx.update(GRADS, tx.init(PARAMS), PARAMS, wieght=2, **given)


@pytest.mark.parametrize(
    "wrap",
    [lambda tx: optax.chain(optax.identity(), tx), shrewjax.skip_nonfinite],
    ids=["chain", "guard"],
)
def test_near_miss_is_found_when_accumulate_is_inside_another_transformation(wrap):
    tx = wrap(shrewjax.accumulate(optax.sgd(1.0), 2))
    with pytest.raises(ValueError, match=r"^weights= is no argument"):
        tx.update(GRADS, tx.init(PARAMS), PARAMS, weights=3)


def test_extra_arguments_of_an_inner_optimizer_pass_also_if_they_are_near_ones_that_it_declares():
    record = {}
    tx = shrewjax.accumulate(with_extra(record), 1)
    given = {"value_fn": 1, "grad_fn": 2, "batch_size": 3, "loss": 4, "params_ema": 5, "key": 6, "values": 7}
    calls_of(tx)["update"](**given)
    assert record == given


class Scaling:
    """A transformation whose functions are methods."""

    def __init__(self, inner):
        self.inner = inner

    def init(self, params):
        return self.inner.init(params)

    def update(self, updates, state, params=None, **extra_args):
        return self.inner.update(updates, state, params, **extra_args)


def declaring(record):
    """Declares `height` and `num_tokens`, as a transformation of a user may."""

    def update(updates, state, params=None, *, height=1.0, num_tokens=1, **extra_args):
        record.update(height=height, num_tokens=num_tokens)
        return updates, state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def as_methods(tx):
    return optax.GradientTransformationExtraArgs(Scaling(tx).init, Scaling(tx).update)


WRAPPERS = {
    "nothing": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.identity(), tx, optax.sgd(1.0)),
    "named_chain": lambda tx: optax.named_chain(("first", optax.chain(tx)), ("second", optax.sgd(1.0))),
    "masked": lambda tx: optax.masked(tx, {"w": True}),
    "partition": lambda tx: optax.partition({"a": tx}, {"w": "a"}),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(lambda rate: optax.chain(tx, optax.sgd(rate)))(rate=1.0),
    "flatten": lambda tx: optax.flatten(tx),
    "guards": lambda tx: shrewjax.skip_nonfinite(shrewjax.skip_on_spike(tx)),
    "methods": as_methods,
    "compiled": lambda tx: optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update)),
    "partial": lambda tx: optax.GradientTransformationExtraArgs(tx.init, functools.partial(tx.update, key=1)),
}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_transformation_that_declares_an_argument_gets_it_however_deep_it_stands(wrap):
    record = {}
    calls_of(shrewjax.accumulate(WRAPPERS[wrap](declaring(record)), 1))["apply_gradients"](height=2.0, num_tokens=3.0)
    assert {name: isinstance(x, jax.Array) or x for name, x in record.items()} in (
        {"height": True, "num_tokens": True},
        {"height": 2.0, "num_tokens": 3.0},
    )


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_an_argument_that_none_inside_declares_is_an_error_however_deep_one_stands(wrap):
    with pytest.raises(ValueError, match=r"^weights= is no argument of accumulate\. Pass weight="):
        calls_of(shrewjax.accumulate(WRAPPERS[wrap](declaring({})), 1))["update"](weights=2.0)


def scaled_by_radius(rate):
    """A transformation of a user's module, which its other functions know by name."""

    def update(updates, state, params=None, *, radius, **extra_args):
        return jax.tree.map(lambda u: -rate * radius * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


class Factory:
    def __call__(self, rate):
        return scaled_by_radius(rate)


FACTORIES = {
    "itself": scaled_by_radius,
    "calls another by its name": lambda rate: optax.chain(optax.identity(), scaled_by_radius(rate)),
    "partial": functools.partial(scaled_by_radius),
    "object": Factory(),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_of_a_user_may_make_a_transformation_that_takes_any_argument(name):
    def factory(rate):
        return FACTORIES[name](rate)

    for called in (factory, FACTORIES[name]):
        tx = shrewjax.accumulate(optax.inject_hyperparams(called)(rate=0.5), 1)
        params, _ = shrewjax.apply_gradients(tx, GRADS, tx.init(PARAMS), PARAMS, radius=3.0)
        np.testing.assert_array_equal(params["w"], -1.5 * GRADS["w"])


def test_a_function_whose_closure_has_an_empty_cell_is_searched_too():
    record = {}

    def make(tx):
        def update(updates, state, params=None, **extra_args):
            return tx.update(updates, state, params, **extra_args) if tx else later(updates)

        if not tx:
            later = make
        return optax.GradientTransformationExtraArgs(tx.init, update)

    calls_of(shrewjax.accumulate(make(declaring(record)), 1))["update"](height=2.0)
    assert record["height"] == 2.0


# Arguments without which Optax's functions make no transformation of `MATRIX`.
SGD = optax.sgd(0.1)
MATRIX = {"w": jnp.ones((4, 3)), "b": jnp.ones(3)}
GROUPS = {"transforms": {"a": SGD}, "param_labels": {"w": "a", "b": "a"}}
MASK = {"w": True, "b": False}
NEEDED = {
    "accumulator_dtype": jnp.float32, "base_optimizer": SGD, "clipping": 0.01, "decay": 0.9, "eta": 0.1, "gamma": 0.1,
    "inner": SGD, "l2_norm_clip": 1.0, "learning_rate": 0.1, "max_backtracking_steps": 3, "max_consecutive_errors": 2,
    "max_delta": 1.0, "max_linesearch_steps": 3, "max_norm": 1.0, "noise_multiplier": 1.0, "opt": SGD, "scale": 0.1,
    "step_size": 0.1, "step_size_fn": lambda count: -0.1, "threshold": 1.0, "weight_decay": 0.1, "seed": 0, "tx": SGD,
    "optimizer": SGD, "adv_optimizer": SGD, "freeze_mask": MASK, "mask": MASK, "f": lambda updates, params: updates,
    "should_transform_fn": lambda step: step < 2, **GROUPS,
}  # fmt: skip


def makers_of_optax():
    """Returns Optax's functions that make a transformation, with the arguments that they need."""
    found = {}
    for module in (optax, optax.contrib):
        for name, make in inspect.getmembers(module, inspect.isfunction):
            parameters = inspect.signature(make).parameters.values()
            needed = [x.name for x in parameters if x.default is x.empty]
            is_sam = name == "sam"  # its state of rounds and the gradients that it takes again
            if {*needed} <= NEEDED.keys() and not name.startswith("_"):
                given = {x: NEEDED[x] for x in needed} | ({"opaque_mode": True, "sync_period": 2} if is_sam else {})
                with contextlib.suppress(Exception):
                    if isinstance(make(**given), optax.GradientTransformation):
                        found[name] = make, given
    return found


def quadratic(params, *_):
    return sum(jnp.sum(x * x) for x in params.values())


LINE_SEARCH = {"value": jnp.float32(15.0), "grad": MATRIX, "value_fn": quadratic}
OWN_ARGUMENTS = {
    "hutchinson_estimator_diag_hessian": {"obj_fn": quadratic},
    "lbfgs": LINE_SEARCH,
    "sam": {"grad_fn": lambda params, _: jax.grad(quadratic)(params)},
    "scale_by_backtracking_linesearch": LINE_SEARCH,
    "scale_by_zoom_linesearch": LINE_SEARCH,
    "sophia": {"obj_fn": quadratic},
}
# Optax's updates of these fail with `MATRIX`: they need gradients of each example, or a mask.
NOT_RUN = ("differentially_private_aggregate", "dpsgd", "scale_by_muon")


def chain_of(make, given):
    return lambda rate: optax.chain(make(**given), optax.scale(rate))


@pytest.mark.filterwarnings("ignore")
def test_each_transformation_of_optax_gets_its_own_arguments_and_refuses_others_wherever_it_stands():
    makers = makers_of_optax()
    assert len(makers) >= 115, len(makers)
    for name, (make, given) in makers.items():
        injected = optax.inject_hyperparams(make, static_args=[*inspect.signature(make).parameters])
        places = {
            "alone": make(**given),
            "in accumulate": shrewjax.accumulate(make(**given), 2),
            "in inject_hyperparams": injected(**given),
            "made by a user's factory": optax.inject_hyperparams(chain_of(make, given))(rate=1.0),
        }
        own = OWN_ARGUMENTS.get(name, {"value": jnp.float32(15.0)})
        for place, tx in places.items():

            def step(tx=tx, own=own, **other):
                return shrewjax.apply_gradients(tx, MATRIX, tx.init(MATRIX), MATRIX, **own, **other)

            if name not in NOT_RUN:
                with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
                    jax.eval_shape(step)
            if place != "made by a user's factory" and "value_fn" not in own:
                with pytest.raises(ValueError, match=r"^no transformation in tx takes obj_func=\. Pass "):
                    jax.eval_shape(lambda: step(obj_func=quadratic))


def test_a_weight_that_a_transformation_in_a_chain_declares_needs_no_window():
    def update(updates, state, params=None, *, weight, **extra_args):
        return jax.tree.map(lambda u: weight * u, updates), state

    weighing = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    tx = optax.chain(weighing, optax.sgd(1.0))
    params, _ = shrewjax.apply_gradients(tx, GRADS, tx.init(PARAMS), PARAMS, weight=3.0)
    np.testing.assert_array_equal(params["w"], -3 * GRADS["w"])


@pytest.mark.parametrize(
    "wrap",
    [lambda tx: shrewjax.accumulate(tx, 1), shrewjax.skip_nonfinite, shrewjax.skip_on_spike],
    ids=["accumulate", "skip_nonfinite", "skip_on_spike"],
)
@pytest.mark.parametrize("call", ["update", "apply_gradients"])
def test_an_inner_optimizer_may_take_arguments_that_are_named_as_the_packages_own_inside(wrap, call):
    record = {}
    given = {"apply": 1, "runs": 2, "gradients": 3, "make_gradients": 4, "extra_args": 5}
    calls_of(wrap(with_extra(record)))[call](**given)
    assert record == given | {"values": None}


@pytest.mark.parametrize("extra", [{"weight": 3}, {"flush": True}, {"weight": jnp.ones(())}], ids=repr)
@pytest.mark.parametrize(
    "make",
    [
        lambda: optax.adam(1e-3),
        lambda: optax.chain(shrewjax.clip_by_global_norm(1.0), optax.adam(1e-3)),
        lambda: shrewjax.skip_nonfinite(optax.adam(1e-3)),
    ],
    ids=["Optax alone", "a chain that takes any argument", "a guard"],
)
def test_apply_gradients_with_a_weight_or_a_flush_but_no_window_is_an_error(make, extra):
    call = calls_of(make())["apply_gradients"]
    (name,) = extra
    with pytest.raises(ValueError, match=rf"^{name}= needs a window, and opt_state has none\. Wrap .* in accumulate"):
        call(**extra)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: tx,
        lambda tx: optax.chain(optax.identity(), tx),
        lambda tx: optax.masked(tx, {"w": True}),
        shrewjax.skip_nonfinite,
        lambda tx: optax.partition({"a": tx}, {"w": "a"}),
    ],
    ids=["alone", "chain", "masked", "guard", "partition"],
)
def test_apply_gradients_passes_the_weight_to_an_accumulation_at_any_depth(wrap):
    call = calls_of(wrap(shrewjax.accumulate(optax.sgd(1.0), 2)))["apply_gradients"]
    _, state = call(weight=3)
    assert float(shrewjax.metrics(state)["accumulate/weight_sum"]) == 3


# --- arguments of a whole batch in one call ----------------------------------------------------------------------


def traced(loss, *args, micro_batches=4, kwargs=None, **options):
    return jax.eval_shape(shrewjax.accumulated_value_and_grad(loss, micro_batches, **options), *args, **(kwargs or {}))


def dropout_loss(params, x, key):
    return jnp.mean((x * jax.random.bernoulli(key, 0.5, x.shape)) @ params["w"])


KEYS = {
    "typed": lambda: jax.random.key(0),
    "raw": lambda: jax.random.PRNGKey(0),
    "several": lambda: jax.random.split(jax.random.key(0), 3),
}


class WithState(nnx.Module):
    def __init__(self, *layers):
        self.linear, self.layers = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), nnx.List(layers)

    def __call__(self, x):
        for layer in (self.linear, *self.layers):
            x = layer(x)
        return x


STATES = {
    "RngCount": lambda: (WithState(nnx.Dropout(0.5, rngs=nnx.Rngs(1))), X),
    "BatchStat": lambda: (WithState(nnx.BatchNorm(1, rngs=nnx.Rngs(1))), X),
}


@pytest.mark.parametrize("kind", STATES)
def test_nnx_state_that_fun_changes_is_an_error_that_names_the_module_for_flax(kind):
    with pytest.raises(
        ValueError,
        match=rf"^argument 0 is an NNX object, .* {kind[:3]}.* Call the function of this name in shrewjax\.flax",
    ):
        shrewjax.value_and_grad(lambda model, x: jnp.mean(model(x)), 4)(*STATES[kind]())
    with pytest.raises(ValueError, match=r"^argument 0 is an NNX object, .* in shrewjax\.flax"):
        shrewjax.micro_batched(lambda model, x: jnp.mean(model(x)), 4)(*STATES[kind]())
    with pytest.raises(ValueError, match=r"^keyword argument rngs\['a'\] is an NNX object, .* in shrewjax\.flax"):
        shrewjax.value_and_grad(lambda p, x, rngs: 0.0, 4)(PARAMS, X, rngs={"a": nnx.Rngs(0)})
    stateless = WithState()
    _, grads = shrewjax.value_and_grad(lambda model, x: jnp.mean(model(x)), 4)(stateless, X)
    np.testing.assert_allclose(grads.linear.kernel[...][:, 0], X.mean(0), rtol=1e-5)


@pytest.mark.parametrize("kind", KEYS)
def test_key_by_keyword_is_an_error_that_names_rng_argnums(kind):
    def loss(params, x, *, rngs):
        return jnp.mean(x @ params["w"])

    with pytest.raises(ValueError, match=r"^keyword argument rngs\['dropout'\]\S* is a .* key, .*rng_argnums="):
        traced(loss, PARAMS, X, kwargs={"rngs": {"dropout": KEYS[kind]()}})


def test_key_that_every_micro_batch_would_get_whole_is_an_error_by_position_too():
    with pytest.raises(ValueError, match=r"^argument 2 is a PRNG key, .*rng_argnums=2"):
        traced(dropout_loss, PARAMS, X, jax.random.key(0), batch_argnums=1)


@pytest.mark.parametrize("micro_batches", [2, 8], ids=["several examples each", "one example each, which broadcasts"])
def test_examples_by_keyword_are_an_error(micro_batches):
    with pytest.raises(
        ValueError,
        match=r"^keyword argument y\['of'\] has as many rows as the batch.* pass batch_argnums=\(1, 'y'\)",
    ):
        traced(
            lambda params, x, *, y: loss_fn(params, x, y["of"]),
            PARAMS,
            X,
            kwargs={"y": {"of": Y}},
            micro_batches=micro_batches,
        )


def test_one_micro_batch_takes_keywords_as_jax_does():
    keywords = {"y": Y}
    found = quick_jit(shrewjax.accumulated_value_and_grad(loss_fn, 1))(WEIGHTS, X, **keywords)
    assert_close(found, quick_jit(jax.value_and_grad(loss_fn))(WEIGHTS, X, **keywords), rtol=1e-6)


def test_a_divided_loss_takes_beside_its_examples_whatever_jax_takes():
    """Each is an error of `accumulated_value_and_grad`, which needs its role."""

    def loss(params, batch, key, rate, scale, train, name, *, y, rngs):
        kept = jax.random.bernoulli(rngs["mask"], 1 - rate, batch["x"].shape)
        x = jnp.where(kept, batch["x"] * scale, 0.0)
        noise = jax.random.normal(jax.random.wrap_key_data(key), x.shape) if train else 0.0
        return loss_fn(params, x + noise, y) + len(batch["names"]) * (name == "a")

    batch = {"x": X, "names": ["a"] * len(X), "text": np.asarray(["b"] * len(X)), "epoch": 3}
    of_batch = WEIGHTS, batch, jax.random.PRNGKey(1), 0.25, np.arange(1, 4, dtype=np.float32)[None], True, "a"
    by_keyword = {"y": Y, "rngs": {"mask": jax.random.key(0)}}
    expected = jax.value_and_grad(loss)(*of_batch, **by_keyword)
    for step in (shrewjax.value_and_grad(loss, 4), jax.value_and_grad(shrewjax.micro_batched(loss, 3))):
        assert_close(step(*of_batch, **by_keyword), expected, rtol=1e-5)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_sum_over_weights_without_a_weight_is_an_error(micro_batches):
    with pytest.raises(ValueError, match=r"^reduction='sum_over_weights' needs weight_fn=.* got None\. Pass"):
        shrewjax.accumulated_value_and_grad(loss_fn, micro_batches, reduction="sum_over_weights")


# --- a clip in the backward pass, micro-batched -----------------------------------------------------------------

B, K, LIMIT = 64, 8, 0.05
ROWS = RNG.normal(size=(B, 3)).astype(np.float32)
LAYERS = {"w": jnp.asarray(RNG.normal(size=(3, 4)), jnp.float32), "v": jnp.asarray(RNG.normal(size=4), jnp.float32)}


def errors_of(params, x, max_norm):
    return (shrewjax.clip_cotangent(x @ params["w"], max_norm) @ params["v"]) ** 2


def clipped_mean(params, x):
    return jnp.mean(errors_of(params, x, LIMIT))


def relative(found, expected):
    largest = jax.tree.map(lambda x, y: jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y)), found, expected)
    return float(max(jax.tree.leaves(largest)))


def test_clip_cotangent_of_a_mean_is_tighter_in_micro_batches():
    expected = quick_jit(jax.grad(clipped_mean))(LAYERS, ROWS)
    _, found = quick_jit(shrewjax.accumulated_value_and_grad(clipped_mean, K))(LAYERS, ROWS)
    assert relative(found["w"], expected["w"]) > 0.5  # most of the gradient is missing: the premise of the two cures


def test_clip_cotangent_of_a_sum_over_weights_is_that_of_the_large_batch():
    def clipped_sum(params, x, max_norm):
        return jnp.sum(errors_of(params, x, max_norm))

    # The large batch's loss is a mean, whose cotangents are those of the sum divided by B, and so is its limit.
    expected = quick_jit(jax.grad(clipped_mean))(LAYERS, ROWS)
    step = shrewjax.accumulated_value_and_grad(
        functools.partial(clipped_sum, max_norm=LIMIT * B),
        K,
        weight_fn=lambda params, x: len(x),
        reduction="sum_over_weights",
    )
    assert relative(quick_jit(step)(LAYERS, ROWS)[1], expected) < 1e-6


def test_clip_cotangent_with_a_limit_scaled_to_the_micro_batch_is_that_of_the_large_batch():
    def scaled(params, x):
        return jnp.mean(errors_of(params, x, LIMIT * B / len(x)))

    expected = quick_jit(jax.grad(clipped_mean))(LAYERS, ROWS)
    assert relative(quick_jit(shrewjax.accumulated_value_and_grad(scaled, K))(LAYERS, ROWS)[1], expected) < 1e-6


def test_counter_of_clip_cotangent_is_averaged_and_times_k_it_is_the_large_batch_s():
    def counted(params, counter, x):
        hidden = shrewjax.clip_cotangent(x @ params["w"], LIMIT * B / len(x), counter=counter)
        return jnp.mean((hidden @ params["v"]) ** 2)

    counts = [
        quick_jit(step)(LAYERS, jnp.zeros(()), ROWS)
        for step in (
            jax.grad(counted, argnums=1),
            shrewjax.accumulated_value_and_grad(counted, K, argnums=1, batch_argnums=2),
        )
    ]
    large, (_, averaged) = counts
    assert 0 < float(large) < B
    assert float(averaged) * K == pytest.approx(float(large))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda x: x.__name__)
@pytest.mark.parametrize("micro_batches", [K, 7])
def test_clip_cotangent_in_a_divided_loss_is_that_of_the_large_batch_and_so_is_its_counter(micro_batches, dtype):
    def counted(params, counter, x, limit):
        hidden = shrewjax.clip_cotangent(x @ params["w"], LIMIT / B, counter=counter)
        hidden = shrewjax.clip_cotangent(hidden, limit, ord=1, counter=counter)
        return jnp.mean(jnp.square(hidden @ params["v"]).astype(jnp.float32))

    args = jax.tree.map(lambda x: x.astype(dtype), (LAYERS, ROWS))
    args = args[0], jnp.zeros(()), args[1], jnp.float32(1.5 * LIMIT / B)
    expected, (grads, count) = quick_jit(jax.value_and_grad(counted, (0, 1)))(*args)
    step = shrewjax.value_and_grad(counted, micro_batches, argnums=(0, 1), batch_argnums=2)
    found, (its_grads, its_count) = quick_jit(step)(*args)
    close = 1e-6 if dtype == jnp.float32 else 2**-6
    assert 0 < float(count) < 2 * B
    assert float(its_count) == float(count)
    assert_close(found, expected, rtol=1e-6)
    assert relative(*(jax.tree.map(np.float32, x) for x in (its_grads, grads))) < close


def test_a_clip_of_one_norm_over_all_examples_is_refused_with_its_line():
    def clipped(params, x):
        return jnp.mean((shrewjax.clip_cotangent(x @ params["w"], LIMIT, axis=None) @ params["v"]) ** 2)

    with pytest.raises(ValueError, match=r"but examples mix at test_mistaken_calls\.py:\d+: .*clip_cotangent\(x @ "):
        jax.eval_shape(shrewjax.value_and_grad(clipped, K), LAYERS, ROWS)


# --- percentiles and weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [True, np.True_, jnp.asarray(True), np.asarray(True)], ids=repr)
@pytest.mark.parametrize("negated", [False, True])
def test_boolean_weight_is_one_or_zero(weight, negated):
    weight = (not weight) if isinstance(weight, bool) else (weight ^ True if negated else weight)
    tx, window = shrewjax.accumulate(optax.sgd(1.0), 2), shrewjax.GradAccumulator(2)
    _, state = tx.update(GRADS, tx.init(PARAMS), PARAMS, weight=weight)
    assert float(state.sum_of_weights) == float(weight)
    assert float(window.step(window.init(PARAMS), GRADS, weight)[1].sum_of_weights) == float(weight)
    shrewjax.check_window(state, 2, weight=weight)


def test_boolean_weights_of_micro_batches_leave_out_those_that_are_false():
    real = np.asarray([True, False, True, True, True, False, True, True])

    def weight(params, x, y, real):
        return real[0]

    def loss(params, x, y, real):
        return loss_fn(params, x, y), {"mean": x[0, 0], "kept": jnp.ones((), jnp.int32)}

    step = shrewjax.accumulated_value_and_grad(
        loss, 8, has_aux=True, weight_fn=weight, aux_reduction={"mean": "mean", "kept": "sum"}
    )
    (value, aux), grads = quick_jit(step)(WEIGHTS, X, Y, real)
    expected = quick_jit(jax.value_and_grad(loss_fn))(WEIGHTS, X[real], Y[real])
    assert_close((value, grads), expected, rtol=1e-5)
    assert int(aux["kept"]) == 6
    assert float(aux["mean"]) == pytest.approx(float(np.mean(X[real, 0])), rel=1e-5)


def test_boolean_weights_of_devices_count_as_zero_or_one():
    mesh = mesh_of(data=8)
    params = placed(PARAMS, mesh, jax.P())
    tx = shrewjax.accumulate(optax.sgd(1.0), 2, sum_over="data")
    rows = {"w": jnp.ones((8, 3))}
    _, state = tx.update(rows, tx.init(params), params, weight=np.arange(8) % 2 == 0)
    assert state.sum_of_weights.tolist() == [1, 0] * 4
