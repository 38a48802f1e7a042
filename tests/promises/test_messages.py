"""Errors of wrong calls: each names the argument or leaf, the requirement, what came, and the remedy."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import mesh_of, own_params, placed

import shrewjax

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


def loss_reduced_by_fun():
    def loss(params, x, y):
        return jax.lax.pmean(loss_fn(params, x, y), "data")

    def step(params, x, y):
        return shrewjax.value_and_grad(loss, 1, sum_over="data")(params, x, y)[0][None]

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
    return shrewjax.value_and_grad(module_loss, 4)(model, X, Y)


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
        r"^argument 3 has no axis of examples, but shape \(\)\. If it is the same for all micro-batches, pass "
        r"batch_argnums=\(1, 2\)\. ",
    ),
    "an array that holds no examples": (
        lambda: traced(lambda p, x, y, scale: loss_fn(p, x * scale, y), args=(PARAMS, X, Y, jnp.ones(3))),
        r"^argument 3 has 3 examples along its first axis, argument 1 has 8\. If argument 3 is the same for all "
        r"micro-batches, pass batch_argnums=\(1, 2\)",
    ),
    "a matrix of the transposed examples": (
        lambda: traced(args=(PARAMS, X.T, Y)),
        r"^argument 1 has 3 examples along its first axis, argument 2 has 8\. .* pass jnp\.moveaxis\(x, 1, 0\)",
    ),
    "parts of a graph that no axis numbers": (
        lambda: traced(args=(PARAMS, {"edges": jnp.ones(100), "nodes": jnp.ones(40)})),
        r"^argument 1\['nodes'\] has 40 examples along its first axis, argument 1\['edges'\] has 100\. .* "
        r"stack 4 padded batches along a new first axis, and let fun take x\[0\]",
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
        r"^gradient leaf \['w'\] must have the shape of its accumulator, \(8, 3\), got \(3,\)\. .*Call the step inside "
        r"jax\.shard_map over 'data'.*leave out sum_over",
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
    "a batch by keyword, beside rng_argnums": (
        lambda: traced(
            lambda p, x, k: dropout_loss(p, x, k),
            args=(PARAMS,),
            kwargs={"x": X},
            rng_argnums=2,
        ),
        r"^rng_argnums has the position 2, but 1 argument came by position, and by keyword x\. Name what came",
    ),
    "check_window with a schedule": (
        lambda: shrewjax.check_window(STATE, lambda windows: 2),
        r"^accum_steps must be a number of micro-batches, got <function .*Pass the schedule's value for this window",
    ),
    "a loss that fun has reduced": (
        loss_reduced_by_fun,
        r"^the loss is already reduced over sum_over=\('data',\).*Let fun return the loss of the device's own examples",
    ),
    **{
        f"a key in the aux: {name}": (
            functools.partial(
                traced, lambda p, x, y: (loss_fn(p, x, y), {"key": jax.random.key(0)}), has_aux=True, aux=name
            ),
            r"^leaf \['key'\] of the aux is a PRNG key, .*Leave it out of the aux.*jax\.random\.key_data.*\"stack\"",
        )
        for name in ("mean", "sum", "last", "stack")
    },
    "a whole Equinox module: init": (
        lambda: TX.init(MODEL),
        r"^parameter leaf \.activation must be an array or a number, got <.*\. Pass the arrays alone, in Equinox "
        r"eqx\.filter\(model, eqx\.is_inexact_array\)",
    ),
    "a whole Equinox module: clip": (
        lambda: shrewjax.clip_grad_norm(MODEL, 1.0),
        r"^gradient leaf \.activation must be an array or a number, got <.*\. Pass the arrays alone, in Equinox "
        r"eqx\.filter\(model, eqx\.is_inexact_array\)",
    ),
    "a whole Equinox module: value_and_grad": (
        lambda: of_module(MODEL),
        r"^argument 0\.activation must be a floating or complex array, because it is in argnums, got <.*eqx\.partition",
    ),
    "integers among the parameters: value_and_grad": (
        lambda: traced(args=({"w": jnp.zeros(3), "n": jnp.arange(3)}, X, Y)),
        r"^argument 0\['n'\] must be a floating or complex array, because it is in argnums, got int32 of shape \(3,\)",
    ),
    "an NNX module with dropout: value_and_grad": (
        lambda: of_module(Dropping()),
        r"^argument 0 is an NNX object .* Call shrewjax\.flax\.value_and_grad",
    ),
}


@pytest.mark.parametrize("call", WRONG_CALLS)
def test_error_names_what_is_wrong_what_came_and_the_remedy(call):
    wrong, message = WRONG_CALLS[call]
    with pytest.raises((ValueError, AssertionError), match=message):
        wrong()


def test_a_scalar_error_does_not_blame_an_argument_that_was_not_passed():
    with pytest.raises(ValueError, match="argument 2") as raised:
        traced(dropout_loss, args=(PARAMS, X, np.float32(1)))
    assert "Leave the argument out of batch_argnums" not in str(raised.value)
