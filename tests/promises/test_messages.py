"""Errors of wrong calls: each names the argument or leaf, the requirement, what came, and the remedy."""

import collections
import functools
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import mesh_of, own_params, placed

import shrewjax
import shrewjax.flax

pytestmark = pytest.mark.thorough

PARAMS = {"w": jnp.zeros(3)}
X, Y = jnp.ones((8, 3)), jnp.ones(8)
GRADS = {"w": jnp.ones(3)}
TX = shrewjax.accumulate(optax.sgd(1.0), 2)
STATE = TX.init(PARAMS)
GUARDS = {
    "skip_nonfinite": shrewjax.skip_nonfinite(optax.sgd(1.0)),
    "skip_on_spike": shrewjax.skip_on_spike(optax.sgd(1.0)),
}
WINDOW = shrewjax.GradAccumulator(2)


def loss_fn(params, x, y):
    return jnp.mean((x @ params["w"] - y) ** 2)


def dropout_loss(params, x, key):
    return jnp.mean((x * jax.random.bernoulli(key, 0.5, x.shape)) @ params["w"])


def traced(loss=loss_fn, micro_batches=4, args=(PARAMS, X, Y), kwargs=None, **options):
    """Traces `accumulated_value_and_grad` of a loss."""
    return jax.eval_shape(shrewjax.accumulated_value_and_grad(loss, micro_batches, **options), *args, **(kwargs or {}))


def divided(loss=loss_fn, micro_batches=4, args=(PARAMS, X, Y), kwargs=None, **options):
    """Traces `value_and_grad` of a loss."""
    return jax.eval_shape(shrewjax.value_and_grad(loss, micro_batches, **options), *args, **(kwargs or {}))


def on_data(function, *args, in_specs):
    """Traces a function in `shard_map` over the axis "data" of eight devices."""
    mesh = mesh_of(data=8)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=jax.P("data"))
    return jax.eval_shape(mapped, *args)


def with_rows():
    """Returns an accumulation with per-device rows, and parameters on the mesh."""
    mesh = mesh_of(data=8)
    return shrewjax.accumulate(optax.sgd(1.0), 2, sum_over="data"), placed(PARAMS, mesh, jax.P())


def state_without_specs():
    tx, params = with_rows()

    def step(params, state, x, y):
        grads = jax.grad(loss_fn)(own_params(params, "data"), x, y)
        return shrewjax.apply_gradients(tx, grads, state, params)[0]["w"][None]

    return on_data(step, params, tx.init(params), X, Y, in_specs=(jax.P(), jax.P(), jax.P("data"), jax.P("data")))


def rows_under_plain_jit():
    tx, params = with_rows()
    return jax.eval_shape(lambda p, s, g: shrewjax.apply_gradients(tx, g, s, p), params, tx.init(params), GRADS)


def loss_reduced_by_fun(value_and_grad):
    def loss(params, x, y):
        return jax.lax.pmean(loss_fn(params, x, y), "data")

    def step(params, x, y):
        return value_and_grad(loss, 1, sum_over="data")(params, x, y)[0][None]

    return on_data(step, PARAMS, X, Y, in_specs=(jax.P(), jax.P("data"), jax.P("data")))


class Dense(eqx.Module):
    weight: jax.Array
    activation: object

    def __call__(self, x):
        return self.activation(x @ self.weight)


MODEL = Dense(jnp.ones(3), jax.nn.relu)


def module_loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


class Dropping(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear, self.dropout = nnx.Linear(3, 1, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))[:, 0]


def of_module(model):
    return shrewjax.accumulated_value_and_grad(module_loss, 4)(model, X, Y)


def writing_loss(params, x, y):
    cell = jax.new_ref(jnp.zeros(()))
    cell[...] = loss_fn(params, x, y)
    return cell[...]


def ordered_loss(params, x, y):
    jax.debug.print("{}", x[0, 0], ordered=True)
    return loss_fn(params, x, y)


def normalized_loss(params, x, y):
    hidden = x @ params["w"]
    hidden = (hidden - hidden.mean()) / (1 + hidden.std())
    return jnp.mean((hidden[:, None, None] @ params["w"][None]) ** 2)


def summing(params, x):
    return jnp.sum(x @ params["w"])


WRONG_CALLS = {
    "a typed key that rng_argnums forgot": (
        lambda: traced(dropout_loss, args=(PARAMS, X, jax.random.key(0))),
        r"^argument 2 is a PRNG key, and each micro-batch needs its own\. Pass rng_argnums=2",
    ),
    "keys of a tree that rng_argnums forgot": (
        lambda: traced(lambda p, x, rngs: dropout_loss(p, x, rngs["a"]), args=(PARAMS, X, {"a": jax.random.key(0)})),
        r"^argument 2\['a'\] is a PRNG key, and each micro-batch needs its own\. Pass rng_argnums=2",
    ),
    "a scalar that holds no examples": (
        lambda: traced(lambda p, x, y, rate: rate * loss_fn(p, x, y), args=(PARAMS, X, Y, 0.5)),
        r"^argument 3 must have a first axis of 8 examples, as argument 1 has, got shape \(\)\. If argument 3 is "
        r"the same for all micro-batches, pass batch_argnums=\(1, 2\)",
    ),
    "an array that holds no examples": (
        lambda: traced(lambda p, x, y, scale: loss_fn(p, x * scale, y), args=(PARAMS, X, Y, jnp.ones(3))),
        r"^argument 3 must have a first axis of 8 examples, as argument 1 has, got shape \(3,\)\. Pass "
        r"parameters first, and as many examples in each array\. If argument 3 .*, pass batch_argnums=\(1, 2\)",
    ),
    "a matrix of the transposed examples": (
        lambda: traced(args=(PARAMS, X.T, Y)),
        r"^argument 1 must have a first axis of 8 examples, as argument 2 has, got shape \(3, 8\)",
    ),
    "a batch that is no tree": (
        lambda: shrewjax.accumulated_value_and_grad(loss_fn, 4)(PARAMS, collections.UserDict(x=X, y=Y)),
        r"^argument 1 must be a tree of arrays, got UserDict\. Pass a dict\.",
    ),
    "no batch": (
        lambda: traced(args=(PARAMS, X, Y), batch_argnums=()),
        r"^batch_argnums must name arrays of examples, got none, .* Pass arguments with a first axis",
    ),
    "a function for a window": (
        lambda: shrewjax.accumulate(optax.sgd(1.0), 2, sharded_over=lambda name, leaf: "data"),
        r"^sharded_over must be a mapped axis, or a tuple of different ones, got <function",
    ),
    "parts of a graph that no axis numbers": (
        lambda: traced(args=(PARAMS, {"edges": jnp.ones(100), "nodes": jnp.ones(40)})),
        r"^argument 1\['nodes'\] must have a first axis of 100 examples, as argument 1\['edges'\] has, got shape "
        r"\(40,\)\. Pass parameters .*\. If it is the same .*, pass it as an argument of its own, with "
        "batch_argnums=1",
    ),
    "two numbers of examples that K divides": (
        lambda: traced(args=(PARAMS, jnp.ones((32, 3)), jnp.ones(28))),
        r"^argument 1 must have a first axis of 28 examples, as argument 2 has, got shape \(32, 3\)\. Pass "
        r"parameters first, and as many examples in each array\. If argument 1 is the same .*, pass batch_argnums=2",
    ),
    "examples along the second axis": (
        lambda: traced(args=(PARAMS, X, jnp.ones((3, 8, 5)))),
        r"^argument 2 must .*, got shape \(3, 8, 5\)\. Pass parameters first, and as many examples in each array\. If ",
    ),
    "lists of numbers": (
        lambda: traced(args=(PARAMS, X.tolist(), Y.tolist())),
        r"^argument 1\[0\]\[0\] must have an axis of examples, got shape \(\)\. Pass jnp\.asarray of the list",
    ),
    "a list of numbers beside an array": (
        lambda: traced(args=(PARAMS, X, Y.tolist())),
        r"^argument 2\[0\] must .*, got shape \(\)\. Pass jnp\.asarray of the list",
    ),
    "a flag by position": (
        lambda: shrewjax.accumulated_value_and_grad(lambda p, x, y, train: loss_fn(p, x, y), 4)(PARAMS, X, Y, True),
        r"^argument 3 must .*\. If argument 3 is the same .* batch_argnums=\(1, 2\)$",
    ),
    "names among the examples": (
        lambda: shrewjax.accumulated_value_and_grad(lambda p, b: loss_fn(p, b["x"], Y), 4)(
            PARAMS, {"x": X, "names": ["a"] * 8}
        ),
        r"^argument 1\['names'\]\[0\] must .*, got str\. If it is the same for all micro-batches, pass it as an arg",
    ),
    "more micro-batches than examples": (
        lambda: traced(micro_batches=64),
        r"^argument 1 has 8 examples, which micro_batches=64 does not divide\. Pad the batch to 64, ",
    ),
    "micro-batches that do not divide the examples": (
        lambda: traced(micro_batches=4, args=(PARAMS, jnp.ones((30, 3)), jnp.ones(30))),
        r"^argument 1 has 30 examples, which micro_batches=4 does not divide\. Pad the batch to 32, ",
    ),
    "a number as the function of weights": (
        lambda: shrewjax.accumulated_value_and_grad(loss_fn, 4, weight_fn=8),
        r"^weight_fn must be a function, got 8\. Pass such as lambda params, x, y: len\(x\)$",
    ),
    "a weight of each example": (
        lambda: traced(weight_fn=lambda p, x, y: jnp.ones(len(x))),
        r"^weight must be a real scalar, got an array of shape \(2,\) and dtype float32\. Pass jnp\.sum of it",
    ),
    "a loss of each example": (
        lambda: traced(lambda p, x, y: x @ p["w"] - y),
        r"^fun must return a scalar, got shape \(2,\)\. Return jnp\.mean of it, or jnp\.sum with reduction='sum'",
    ),
    "a loss of each example, in a sum": (
        lambda: traced(lambda p, x, y: x @ p["w"] - y, reduction="sum"),
        r"^fun must return a scalar, got shape \(2,\)\. Return jnp\.sum of it",
    ),
    "a loss of each example, of an NNX model": (
        lambda: shrewjax.flax.accumulated_value_and_grad(lambda model, x: model(x), 4)(LINEAR, X),
        r"^fun must return a scalar, got shape \(2, 1\)\. Return jnp\.mean of it, ",
    ),
    "an aux that has_aux does not announce": (
        lambda: traced(lambda p, x, y: (loss_fn(p, x, y), x)),
        r"^fun must return a scalar with has_aux=False, got 2 values\. Return that, or pass has_aux=True",
    ),
    "no aux where has_aux announces one": (
        lambda: traced(has_aux=True),
        r"^fun must return \(loss, aux\) with has_aux=True, got 1 value\. Return that, or pass has_aux=False",
    ),
    "an optimizer that is not called": (
        lambda: shrewjax.accumulate(optax.sgd, 4),
        r"^inner must be an optax\.GradientTransformation, got function\. Call it, as in optax\.sgd\(0\.1\)$",
    ),
    "the number of steps before the optimizer": (
        lambda: shrewjax.accumulate(4, optax.sgd(1.0)),
        r"^inner must be an optax\.GradientTransformation, got int\. Pass it first, before the other arguments$",
    ),
    "Optax's object for a window in a window": (
        lambda: shrewjax.accumulate(optax.MultiSteps(optax.sgd(1.0), 4), 4),
        r"^inner is itself an accumulation\. Multiply the accum_steps instead of nesting accumulations$",
    ),
    "Optax's object for a window in a guard": (
        lambda: shrewjax.skip_nonfinite(optax.MultiSteps(optax.sgd(1.0), 4)),
        r"^inner must be an optax\.GradientTransformation, got MultiSteps\. Pass its gradient_transformation\(\)$",
    ),
    "an aux with the differences of rows": (
        lambda: traced(lambda p, x, y: (loss_fn(p, x, y), jnp.diff(y)), has_aux=True),
        r"^leaf .* of the aux must have one shape for 'mean', got .* for the whole batch\. Give it 'stack'",
    ),
    "a count in the aux": (
        lambda: traced(lambda p, x, y: (loss_fn(p, x, y), {"n": jnp.sum(y > 0)}), has_aux=True),
        r"^leaf \['n'\] of the aux is int32, which 'mean' does not take\. Pass a tree of names as aux_reduction=, "
        "with 'sum' for this leaf",
    ),
    "the pair of value_and_grad": (
        lambda: shrewjax.apply_gradients(TX, (jnp.float32(1), GRADS), STATE, PARAMS),
        r"^grads must be a tree like params, got a pair, such as \(value, grads\)\. Pass its second element$",
    ),
    "the order of Flax in apply_gradients": (
        lambda: shrewjax.apply_gradients(GRADS, STATE, PARAMS, TX),
        r"^tx must be a transformation, got dict\. Pass tx, grads, opt_state and params, in this order$",
    ),
    "the state before the transformation": (
        lambda: shrewjax.apply_gradients(STATE, TX, GRADS, PARAMS),
        r"^tx must be a transformation, got AccumulateState\. Pass tx, grads",
    ),
    "a state without its specs": (
        state_without_specs,
        r"^gradient leaf \['w'\] must have the shape of its accumulator, \(8, 3\), got \(1, 3\)\. .*Pass the state "
        r"to jax\.shard_map with in_specs=shrewjax\.state_specs\(opt_state\)",
    ),
    "sum_over under plain jit": (
        rows_under_plain_jit,
        r"^gradient leaf \['w'\] must have the shape of its accumulator, \(8, 3\), got \(3,\)\. .*Compute them with "
        r"shrewjax\.per_device\(fun, \('data',\)\)\..*leave out sum_over",
    ),
    "rows without sum_over": (
        lambda: TX.update({"w": jnp.ones((8, 3))}, STATE, PARAMS),
        r"^gradient leaf \['w'\] must .* \(3,\), got \(8, 3\)\. If these are rows of per_device, pass its axes to "
        r"accumulate as sum_over=\. Otherwise pass gradients of the parameters that init got$",
    ),
    "a transformation for its state: state_specs": (
        lambda: shrewjax.state_specs(TX),
        r"^opt_state must be a state, got a transformation\. Pass what tx\.init or tx\.update returned$",
    ),
    "state and parameters swapped: update": (
        lambda: TX.update(GRADS, PARAMS, STATE),
        r"^state must be the AccumulateState .* got dict\. .* update\(grads, state, params\)",
    ),
    "state and parameters swapped: apply_gradients": (
        lambda: shrewjax.apply_gradients(TX, GRADS, PARAMS, STATE),
        r"^state must be the AccumulateState .* got dict\. .* apply_gradients\(tx, grads, state, params\)",
    ),
    "a state of Optax": (
        lambda: TX.update(GRADS, optax.MultiSteps(optax.sgd(0.1), 2).init(PARAMS), PARAMS),
        r"^state must .* got MultiStepsState\. .* Or convert .*: shrewjax\.from_optax\(state, tx, params\)",
    ),
    "a list as the state": (
        lambda: TX.update(GRADS, [STATE], PARAMS),
        r"^state must be the AccumulateState .* got list\. ",
    ),
    "gradients and state swapped: GradAccumulator.add": (
        lambda: WINDOW.add(GRADS, WINDOW.init(PARAMS)),
        r"^state must be the GradAccumulatorState .* got dict\. .* add\(state, grads\)",
    ),
    "parameters as the state: GradAccumulator.take": (
        lambda: WINDOW.take(PARAMS),
        r"^state must be the GradAccumulatorState .* got dict\. .* add\(state, grads\)",
    ),
    **{
        f"state and parameters swapped: {name}": (
            functools.partial(shrewjax.apply_gradients, tx, GRADS, PARAMS, tx.init(PARAMS)),
            rf"^state must be the {type(tx.init(PARAMS)).__name__} .* got dict\. ",
        )
        for name, tx in GUARDS.items()
    },
    "gradients in other nodes": (
        lambda: shrewjax.accumulate(optax.sgd(1.0), 2).update((jnp.ones(3),), TX.init([jnp.zeros(3)])),
        r"^the gradients must have the structure of the accumulator, but expected PyTreeDef\(\[\*\]\), got "
        r"PyTreeDef\(\(\*,\)\)\. ",
    ),
    "an inner state that grows": (
        lambda: shrewjax.accumulate(
            optax.GradientTransformation(lambda _: {"m": jnp.zeros(1)}, lambda g, *_: (g, {"m": jnp.zeros(2)})), 2
        ).update(GRADS, TX.init(PARAMS)._replace(inner_state={"m": jnp.zeros(1)}), PARAMS),
        r"^inner's update changed its state: leaf \['m'\] must stay float32 of shape \(1,\), got .* shape \(2,\)",
    ),
    "an array before keywords": (
        lambda: traced(args=(PARAMS, jnp.ones(3)), kwargs={"x": X, "y": Y}),
        r"^argument 1 has 3 examples, .* If it holds none, pass parameters first, or pass "
        "batch_argnums=",
    ),
    "parameters after the batch": (
        lambda: traced(lambda batch, p: loss_fn(p, batch, Y), args=(X, jnp.ones(3))),
        r"^argument 1 has 3 examples, .* If it holds none, pass parameters first, ",
    ),
    "keywords of a function that takes no position": (
        lambda: shrewjax.micro_batched(lambda *, p, x: jnp.mean(x * p), 2)(p=jnp.ones(3), x=X),
        r"^batch_argnums has the position 0, but 0 arguments came by position, and by keyword p, x\. Name it, such as "
        r"batch_argnums='x'",
    ),
    "no arguments": (
        lambda: shrewjax.micro_batched(lambda: jnp.ones(()), 2)(),
        r"^batch_argnums has the position 0, but 0 arguments came by position\. Pass it by position$",
    ),
    "parameters of a function that takes no position": (
        lambda: shrewjax.accumulated_value_and_grad(lambda *, p, x: jnp.mean(x * p), 2)(p=jnp.ones(3), x=X),
        r"^argnums has the position 0, but 0 arguments came by position, and by keyword p, x\. Pass it by position$",
    ),
    "a batch by keyword, beside rng_argnums": (
        lambda: traced(
            lambda p, x, k: dropout_loss(p, x, k),
            args=(PARAMS,),
            kwargs={"x": X},
            rng_argnums=2,
        ),
        r"^rng_argnums has the position 2, but 1 argument came by position, and by keyword x\. Name it, such as rng_",
    ),
    "check_window with a schedule": (
        lambda: shrewjax.check_window(STATE, lambda windows: 2),
        r"^accum_steps must be a number of micro-batches, got <function .*Pass accum_steps\(state\.windows\)",
    ),
    "take of a window that was made without noise_decay": (
        lambda: shrewjax.GradAccumulator(2, noise_decay=0.9).take(WINDOW.init(PARAMS)),
        r"^the GradAccumulatorState was made without noise_decay\. Pass state\._replace\(noise=.*out noise_decay$",
    ),
    "a loss that fun has reduced": (
        lambda: loss_reduced_by_fun(shrewjax.accumulated_value_and_grad),
        r"^the loss is already reduced over 'data' of sum_over=\('data',\).*Return the loss of the device's own "
        "examples.*Or leave out sum_over",
    ),
    **{
        f"a key in the aux: {name}": (
            functools.partial(
                traced, lambda p, x, y: (loss_fn(p, x, y), {"key": jax.random.key(0)}), has_aux=True, aux_reduction=name
            ),
            r"^leaf \['key'\] of the aux is a PRNG key\. Return its jax\.random\.key_data.*\"stack\"",
        )
        for name in ("mean", "sum", "last", "stack")
    },
    "a whole Equinox module: init": (
        lambda: TX.init(MODEL),
        r"^parameter leaf \.activation must be an array or a number, got <.*\. Of a model, take params, static = "
        r"eqx\.partition\(model, eqx\.is_inexact_array\), and eqx\.combine\(params, static\)$",
    ),
    "a whole Equinox module: clip": (
        lambda: shrewjax.clip_grad_norm(MODEL, 1.0),
        r"^gradient leaf \.activation must be an array or a number, got <.*\. Of a model, take params, static = "
        r"eqx\.partition\(model, eqx\.is_inexact_array\), and eqx\.combine\(params, static\)$",
    ),
    "a whole Equinox module: accumulated_value_and_grad": (
        lambda: of_module(MODEL),
        r"^argument 0\.activation in argnums must be floating or complex, got <.*eqx\.partition",
    ),
    "integers among the parameters: accumulated_value_and_grad": (
        lambda: traced(args=({"w": jnp.zeros(3), "n": jnp.arange(3)}, X, Y)),
        r"^argument 0\['n'\] in argnums must be floating or complex, got int32 of shape \(3,\)",
    ),
    "an NNX module with dropout: accumulated_value_and_grad": (
        lambda: of_module(Dropping()),
        r"^argument 0 is an NNX object, .* Call the function of this name in shrewjax\.flax",
    ),
    "an NNX module with dropout: value_and_grad": (
        lambda: shrewjax.value_and_grad(module_loss, 4)(Dropping(), X, Y),
        r"^argument 0 is an NNX object, .* Call the function of this name in shrewjax\.flax",
    ),
    # Of a divided function.
    "words for micro-batches of their own": (
        lambda: divided(weight_fn=len, reduction="sum"),
        r"^value_and_grad and micro_batched take no weight_fn, reduction\. Leave it out\. Or call "
        "accumulated_value_and_grad, in which",
    ),
    "a word for micro-batches of their own: micro_batched": (
        lambda: shrewjax.micro_batched(loss_fn, 4, nonfinite="drop_micro_batch"),
        r"^value_and_grad and micro_batched take no nonfinite\. .* Or call accumulated_value_and_grad",
    ),
    "a word for micro-batches of their own: shrewjax.flax": (
        lambda: shrewjax.flax.value_and_grad(loss_fn, 4, rng_argnums=2),
        r"^value_and_grad and micro_batched take no rng_argnums\. .* Or call accumulated_value_and_grad",
    ),
    "an Equinox model": (
        lambda: shrewjax.value_and_grad(lambda p, x: jnp.mean(x @ p["w"]), 4)(PARAMS | {"act": jnp.tanh}, X),
        r"^argument 0\['act'\] in argnums must be floating .* Split models by eqx\.partition",
    ),
    "batch norm in training": (
        lambda: divided(normalized_loss),
        r"^fun must act on each example alone before .*, but examples mix at test_messages\.py:\d+: hidden = \(hidden "
        r"- hidden\.mean.* only \d+% could be divided\. .* by swapaxes\. .* For batch norm, call accumulated",
    ),
    "a reference": (
        lambda: divided(writing_loss),
        r"^fun must only compute, and print in any order, got .*\. Return what it writes or sends, ",
    ),
    "a print that is ordered": (
        lambda: divided(ordered_loss),
        r"^fun must only compute, and print in any order, got Ordered.*, or pass ordered=False to jax",
    ),
    "a sum in the place of rows of examples": (
        lambda: divided(lambda p, x, y: shrewjax.of_each_example(summing)(p, x)),
        r"^of_each_example must return a row for each of 8 examples, got shapes \[\(\)\]",
    ),
    **{
        f"a batch that is no tree of arrays: {type(batch).__name__}": (
            functools.partial(shrewjax.value_and_grad(lambda p, b: summing(p, b["x"]), 4), PARAMS, batch),
            rf"^argument 1 must be a tree of arrays, got {type(batch).__name__}\. Pass a dict\. Or register its ",
        )
        for batch in (collections.UserDict(x=X), types.SimpleNamespace(x=X))
    },
    "a batch of lists": (
        lambda: divided(args=(PARAMS, X.tolist(), Y.tolist())),
        r"^argument 1 or argument 2 must hold arrays of examples, got none\. Pass jnp\.asarray of a list\. ",
    ),
    "no argument with examples": (
        lambda: divided(batch_argnums=()),
        r"^batch_argnums must hold arrays of examples, got none\. .* name the batch in batch_",
    ),
    "sum_over inside shard_map": (
        lambda: loss_reduced_by_fun(shrewjax.value_and_grad),
        r"^sum_over must not name mapped axes, got \('data',\)\. Leave it out, and let fun reduce, .*jax\.lax\.pmean",
    ),
    "examples by a name that is wrong": (
        lambda: divided(batch_argnums="labels"),
        r"^batch_argnums has the name 'labels', but 3 arguments came by position\. Name one of params, x, y\. ",
    ),
}


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_error_names_what_is_wrong_what_came_and_the_remedy(call):
    wrong, message = WRONG_CALLS[call]
    with pytest.raises((ValueError, TypeError, AssertionError), match=message):
        wrong()


# A tree whose arrays would fill a page.
LARGE = {f"layer {i}": {"w": jnp.ones((8, 8)), "b": jnp.ones(8)} for i in range(30)}
LARGE_STATE = TX.init(LARGE)
MOMENTUM = optax.sgd(0.1, momentum=0.9)
OF_MOMENTUM = shrewjax.accumulate(MOMENTUM, 2)
LINEAR = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
LINEAR_GRADS = nnx.grad(lambda model, x: jnp.mean(model(x)))(LINEAR, X)


def a_float_loss(params, x):
    return jnp.mean(x)


MISTAKEN_CALLS = {
    "flush": lambda: shrewjax.flush(LARGE_STATE, TX, LARGE),
    "flush without its state": lambda: shrewjax.flush(TX, LARGE, LARGE_STATE),
    "clip_grad_norm": lambda: shrewjax.clip_grad_norm(1.0, LARGE),
    "clip_grad_value": lambda: shrewjax.clip_grad_value(1.0, LARGE),
    "clip_grad_percentile": lambda: shrewjax.clip_grad_percentile(99.0, LARGE),
    "grad_norm": lambda: shrewjax.grad_norm(2.0, LARGE),
    "clip_by_global_norm": lambda: shrewjax.clip_by_global_norm(LARGE),
    "clip_by_global_norm of an array": lambda: shrewjax.clip_by_global_norm(np.ones((100, 100))),
    "clip_by_leaf_norm": lambda: shrewjax.clip_by_leaf_norm(LARGE),
    "clip_by_leaf_norm_ema": lambda: shrewjax.clip_by_leaf_norm_ema(LARGE),
    "clip_by_norm_zscore": lambda: shrewjax.clip_by_norm_zscore(LARGE),
    "clip_by_block_rms": lambda: shrewjax.clip_by_block_rms(LARGE),
    "clip_by_value": lambda: shrewjax.clip_by_value(LARGE),
    "adaptive_grad_clip": lambda: shrewjax.adaptive_grad_clip(LARGE),
    "adaptive_grad_clip by axis": lambda: shrewjax.adaptive_grad_clip(0.1, axis=LARGE),
    "clip_cotangent": lambda: shrewjax.clip_cotangent(X, LARGE),
    "sharded_over": lambda: shrewjax.clip_by_global_norm(1.0, sharded_over=LARGE),
    "accumulate": lambda: shrewjax.accumulate(optax.sgd(1.0), LARGE),
    "accumulate of many numbers": lambda: shrewjax.accumulate(optax.sgd(1.0), np.arange(1e3)),
    "accumulate of parameters": lambda: shrewjax.accumulate(LARGE, 2),
    "noise_decay": lambda: shrewjax.accumulate(optax.sgd(1.0), 2, noise_decay=LARGE),
    "weight": lambda: TX.update(LARGE, LARGE_STATE, LARGE, weight=LARGE),
    "flush=": lambda: TX.update(LARGE, LARGE_STATE, LARGE, flush=LARGE),
    "value": lambda: TX.update(LARGE, LARGE_STATE, LARGE, value=LARGE),
    "gradients of another tree": lambda: TX.update({"of": LARGE}, LARGE_STATE, LARGE),
    "gradients in a list": lambda: TX.update([*LARGE.values()], LARGE_STATE, LARGE),
    "gradients in other nodes": lambda: TX.update({k: (*v.values(),) for k, v in LARGE.items()}, LARGE_STATE, LARGE),
    "argnums": lambda: shrewjax.value_and_grad(a_float_loss, 2, argnums=LARGE),
    "batch_argnums": lambda: shrewjax.value_and_grad(a_float_loss, 2, batch_argnums=LARGE),
    "fun": lambda: shrewjax.value_and_grad(LARGE, 2),
    "micro_batches": lambda: shrewjax.value_and_grad(a_float_loss, LARGE),
    "weight of value_and_grad": lambda: shrewjax.accumulated_value_and_grad(a_float_loss, 2, weight_fn=LARGE),
    "aux": lambda: shrewjax.accumulated_value_and_grad(a_float_loss, 2, aux_reduction=LARGE),
    "aux of a loss with one": lambda: shrewjax.accumulated_value_and_grad(
        a_float_loss, 2, has_aux=True, aux_reduction=LARGE
    ),
    "an aux that is no tree prefix": lambda: traced(
        lambda p, x, y: (loss_fn(p, x, y), LARGE), has_aux=True, aux_reduction={"other": "mean"}
    ),
    "a carry": lambda: traced(
        lambda p, x, c: (jnp.mean(x), LARGE), args=(PARAMS, X, 0.0), has_aux=True, carry_argnum=2
    ),
    "a carry of other nodes": lambda: traced(
        lambda p, x, c: (jnp.mean(x), (0.0, LARGE)), args=(PARAMS, X, 0.0), has_aux=True, carry_argnum=2
    ),
    "parameters that are text": lambda: shrewjax.clip_grad_norm({"w": "a" * 1000}, 1.0),
    "parameters that are an object": lambda: shrewjax.accumulated_value_and_grad(loss_fn, 4)({"w": "a" * 1000}, X, Y),
    "a batch that is no tree": lambda: shrewjax.value_and_grad(summing, 4)(PARAMS, collections.UserDict(LARGE)),
    "GradAccumulator": lambda: shrewjax.GradAccumulator(LARGE),
    "a weight of GradAccumulator": lambda: WINDOW.add(WINDOW.init(LARGE), LARGE, LARGE),
    "from_optax": lambda: shrewjax.from_optax(LARGE, TX, LARGE),
    "check_window": lambda: shrewjax.check_window(LARGE, 2),
    "wrt": lambda: shrewjax.flax.value_and_grad(a_float_loss, 2, wrt=LARGE),
}


@pytest.mark.parametrize("call", MISTAKEN_CALLS)
def test_no_error_is_long_or_shows_the_numbers_of_arrays(call):
    with pytest.raises((ValueError, AssertionError)) as raised:
        MISTAKEN_CALLS[call]()
    message = str(raised.value).split("\n---")[0]  # before JAX's own line
    assert len(message) <= 700
    assert "[1., 1." not in message


def restored(state):
    """As a restore without a target leaves a state: lists for tuples, but named tuples kept."""
    return state._replace(inner_state=[*state.inner_state])


@pytest.mark.parametrize(
    ("tx", "state"),
    [
        (MOMENTUM, [*MOMENTUM.init(PARAMS)]),
        (OF_MOMENTUM, restored(OF_MOMENTUM.init(PARAMS))),
        (shrewjax.skip_nonfinite(MOMENTUM), restored(shrewjax.skip_nonfinite(MOMENTUM).init(PARAMS))),
        (optax.chain(MOMENTUM, OF_MOMENTUM), [*optax.chain(MOMENTUM, OF_MOMENTUM).init(PARAMS)]),
    ],
    ids=["Optax's own", "accumulate", "a guard", "a chain"],
)
def test_a_tuple_that_a_restore_made_a_list_is_named_with_the_target_to_restore_into(tx, state):
    with pytest.raises(
        AssertionError, match=r"If a restore made lists of tuples, give it tx\.init\(params\) as the target"
    ):
        shrewjax.apply_gradients(tx, GRADS, state, PARAMS)


def test_nnx_gradients_beside_a_module_are_an_error_that_names_the_optimizer_for_flax():
    message = (
        r"^grads and params must be trees of one kind, got State and Linear\. Pass nnx\.state\(model, .*Optimizer$"
    )
    with pytest.raises(ValueError, match=message):
        shrewjax.apply_gradients(TX, LINEAR_GRADS, TX.init(nnx.state(LINEAR, nnx.Param)), LINEAR)
    params = nnx.state(LINEAR, nnx.Param)
    shrewjax.apply_gradients(TX, LINEAR_GRADS, TX.init(params), params)
    with pytest.raises(
        ValueError, match=r"^tx must be a transformation, got Accumulation and then Linear\. Call Optimizer"
    ):
        shrewjax.flax.Optimizer(TX, LINEAR, wrt=nnx.Param)


PERCENTILES = {
    "clip_by_percentile": shrewjax.clip_by_percentile,
    "clip_by_norm_percentile": shrewjax.clip_by_norm_percentile,
    "clip_grad_percentile": lambda p: shrewjax.clip_grad_percentile(GRADS, p),
}


@pytest.mark.parametrize("name", PERCENTILES)
def test_a_fraction_is_no_percentile_unless_an_array_says_so(name):
    for fraction in (0.9, np.float32(0.99), 1e-3):
        with pytest.raises(
            ValueError, match=rf"^percentile must be from 0 to 100, .* Pass {float(fraction) * 100:.2g}, or, "
        ):
            PERCENTILES[name](fraction)
    for percent in (0, 1, 1.0, 100, jnp.float32(0.5)):
        PERCENTILES[name](percent)


def test_a_scalar_error_does_not_blame_an_argument_that_was_not_passed():
    with pytest.raises(ValueError, match="argument 2") as raised:
        traced(dropout_loss, args=(PARAMS, X, np.float32(1)))
    assert "Leave the argument out of batch_argnums" not in str(raised.value)
