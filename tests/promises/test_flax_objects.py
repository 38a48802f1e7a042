"""`shrewjax.flax` with several nnx objects, in one argument or in several, does what Flax does with each."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_close, bits, mesh_of
from nnx_steps import compiled, in_mode
from speed import quick_jit

import shrewjax
import shrewjax.flax

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("as_users_have_it")]

K = 2
X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


class Net(nnx.Module):
    """A body and a head, with dropout, batch statistics and a count of calls between them."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.body = nnx.Linear(3, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.calls = nnx.Variable(jnp.array(0))
        self.head = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        self.calls[...] += 1
        return self.head(self.norm(self.dropout(jnp.tanh(self.body(x)))))[:, 0]


def still(seed=0):
    net = Net(seed)
    net.eval()
    return net


def dropping(seed=0):
    """With running averages, because batch statistics in training are those of micro-batches."""
    net = Net(seed)
    net.norm.use_running_average = True
    return net


def numbers(state):
    return [x for x in jax.tree.leaves(state) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]


# --- the first argument ------------------------------------------------------------------------------------------


def nets_of(tree):
    return [x for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Module)) if isinstance(x, Net)]


def numbers_of(tree):
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Pytree | nnx.Variable))
    return [x[...] for x in leaves if isinstance(x, jax.Array | nnx.Variable)]


def loss_of_all(tree, x):
    """Of all nets, scaled by all variables and arrays beside them."""
    scale = 1 + sum(jnp.sum(jnp.asarray(n) ** 2) for n in numbers_of(tree))
    return scale * jnp.mean(sum(net(x) for net in nets_of(tree)) ** 2)


FIRST_ARGUMENTS = {
    "one": lambda: still(),
    "a tuple": lambda: (still(), nnx.Rngs(0)),
    "a list": lambda: [nnx.Rngs(0), still(1), still(2)],
    "a dict": lambda: {"net": still(), "rest": (still(1), None)},
    "a variable and an array": lambda: (still(), {"v": nnx.Variable(jnp.float32(3.0)), "a": jnp.arange(2.0)}),
    "in an nnx.List": lambda: (nnx.List([still()]),),
}
FILTERS = {
    "all but the heads": nnx.All(nnx.Param, nnx.Not(lambda path, _: "head" in path[:1])),
    "the heads": lambda path, _: "head" in path[:1],
    "kernels": nnx.PathContains("kernel"),
}


@pytest.mark.parametrize("name", FIRST_ARGUMENTS)
def test_paths_begin_at_each_object_as_in_flax(name):
    """Values, gradients and their structure against Flax's own with `DiffState`, of one whole batch."""
    if name == "in an nnx.List" and not hasattr(nnx, "List"):
        pytest.skip("newer than this Flax")
    filters = {k: v for k, v in FILTERS.items() if name != "in an nnx.List" or k == "kernels"}

    def both(tree, x):
        makes = shrewjax.flax.value_and_grad, shrewjax.flax.accumulated_value_and_grad
        ours = [make(loss_of_all, K, wrt=f)(tree, x) for make in makes for f in filters.values()]
        theirs = [nnx.value_and_grad(loss_of_all, argnums=nnx.DiffState(0, f))(tree, x) for f in filters.values()]
        return ours, theirs * 2

    (ours, theirs), _ = compiled(both, FIRST_ARGUMENTS[name](), X)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


WRTS = {"all": nnx.Param, "kernels": nnx.PathContains("kernel"), "heads": lambda path, _: "head" in path[1:]}


@pytest.mark.parametrize("wrt", WRTS.values(), ids=WRTS)
def test_an_optimizer_of_a_tuple_trains_as_an_nnx_optimizer(wrt):
    """Its paths begin at the tuple, as in `nnx.Optimizer`. The gradients are Flax's in one, and ours in the other."""
    trained = []
    for cls, grad in (
        (shrewjax.flax.Optimizer, shrewjax.flax.value_and_grad(loss_of_all, 1)),
        (nnx.Optimizer, nnx.value_and_grad(loss_of_all)),
    ):
        nets = still(), still(1)

        def step(nodes, x, grad=grad):
            nets, optimizer = nodes
            optimizer.update(nets, grad(nets, x)[1])

        _, state = compiled(step, (nets, cls(nets, optax.adam(1e-2), wrt=wrt)), X)
        trained.append(numbers(state))
    assert_close(*trained, rtol=1e-5, atol=1e-6)


def test_an_optimizer_of_a_tuple_whose_filter_means_paths_in_a_model_says_where_paths_begin():
    """`nnx.Optimizer` fails as well. The remedy trains."""
    frozen = nnx.All(nnx.Param, nnx.Not(lambda path, _: path[0] == "head"))
    nets = still(), nnx.Rngs(0)
    _, grads = shrewjax.flax.value_and_grad(loss_of_all, K, wrt=frozen)(nets, X)
    both = shrewjax.flax.Optimizer(nets, optax.sgd(0.1), wrt=frozen)
    with pytest.raises(ValueError, match=r"without \[0\]\['head'\].* make an optimizer for each model$"):
        both.update(nets, grads)
    before = bits(nnx.state(nets[0].head)), bits(nnx.state(nets[0].body))
    shrewjax.flax.Optimizer(nets[0], optax.sgd(0.1), wrt=frozen).update(nets[0], grads[0])
    assert (bits(nnx.state(nets[0].head)) == before[0], bits(nnx.state(nets[0].body)) == before[1]) == (True, False)


# --- other arguments ---------------------------------------------------------------------------------------------


def distilled(model, teacher, x):
    return jnp.mean((model(x) - teacher(x)) ** 2)


def noisy(model, rngs, x):
    return jnp.mean((model(x) + jax.random.normal(rngs.noise(), (len(x),))) ** 2)


def measured(model, metric, x):
    loss = jnp.mean(model(x) ** 2)
    metric.update(values=loss)
    return loss


def counted(model, calls, x):
    calls[...] += len(x)
    return jnp.mean(model(x) ** 2)


SECOND_ARGUMENTS = {
    "a teacher in eval mode": (distilled, lambda: still(7)),
    "a second model with dropout and batch statistics": (distilled, lambda: Net(7)),
    "keys": (noisy, lambda: nnx.Rngs(noise=7)),
    "a metric": (measured, nnx.metrics.Average),
    "a variable": (counted, lambda: nnx.Variable(jnp.array(0))),
}


@pytest.mark.combinations
@pytest.mark.parametrize("skip_empty", [False, True])
@pytest.mark.parametrize("name", SECOND_ARGUMENTS)
def test_a_second_object_is_that_of_k_calls_by_hand(mode, name, skip_empty):
    """Value, gradients, and the state of both objects, with a micro-batch in the middle that counts nothing."""
    fun, make = SECOND_ARGUMENTS[name]

    def weight(model, other, x):
        return jnp.isfinite(x[0, 0]) * model.dropout.rate

    grad = shrewjax.flax.accumulated_value_and_grad(fun, 3, weight_fn=weight, skip_empty=skip_empty)
    x = np.concatenate([X, X[:4]])
    x[1::3] = np.nan

    ((value, grads), state) = compiled(lambda nodes, x: grad(*nodes, x), (Net(), make()), x)
    with in_mode():

        def by_hand(nodes, x):
            results = [nnx.value_and_grad(fun)(*nodes, x[i::3]) for i in (0, 2)]
            return jax.tree.map(lambda *parts: sum(parts) / 2, *results)

        (expected, expected_grads), expected_state = compiled(by_hand, (Net(), make()), x)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    assert_close(grads, expected_grads, rtol=1e-5, atol=1e-6)
    assert_close(numbers(state), numbers(expected_state), rtol=1e-5, atol=1e-6)


@pytest.mark.combinations
@pytest.mark.parametrize("name", SECOND_ARGUMENTS)
def test_in_a_divided_loss_a_second_object_is_that_of_one_call_of_the_whole_batch(mode, name):
    """Value, gradients, and the state of both objects. Three micro-batches of eight examples."""
    fun, make = SECOND_ARGUMENTS[name]
    if name == "a second model with dropout and batch statistics":
        make = partial(dropping, 7)
    nodes = dropping(), make()
    found, state = compiled(lambda nodes, x: shrewjax.flax.value_and_grad(fun, 3)(*nodes, x), nodes, X)
    with in_mode():
        expected, expected_state = compiled(lambda nodes, x: nnx.value_and_grad(fun)(*nodes, x), nodes, X)
    assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert_close(numbers(state), numbers(expected_state), rtol=1e-5, atol=1e-6)


def test_objects_may_come_by_keyword_in_trees_and_with_positions():
    def loss(model, pair, x, *, metric):
        teacher, scale = pair
        metric.update(values=jnp.mean(x))
        return jnp.mean((model(x) - scale * teacher(x)) ** 2)

    totals = {
        shrewjax.flax.accumulated_value_and_grad: np.sum([np.mean(X[i::K]) for i in range(K)]),
        shrewjax.flax.value_and_grad: np.mean(X),
    }
    for make, total in totals.items():
        grad = make(loss, K, batch_argnums=-1)
        nodes = still(), still(1), nnx.metrics.Average()
        run = lambda nodes, x, grad=grad: grad(nodes[0], (nodes[1], 2.0), x, metric=nodes[2])  # noqa: E731
        (value, _), state = compiled(run, nodes, X)
        np.testing.assert_allclose(value, loss(nodes[0], (nodes[1], 2.0), X, metric=nodes[2]), rtol=1e-6)
        np.testing.assert_allclose(state[2]["total"], total, rtol=1e-5)


def test_every_device_of_a_shard_map_has_the_state_of_a_second_object():
    mesh = mesh_of(data=2)
    graph, start = nnx.split((still(), still(1)))

    def over_devices(*args):
        return jax.lax.pmean(distilled(*args), "data")

    expected = nnx.value_and_grad(distilled)(still(), still(1), X)
    makes = {
        K: shrewjax.flax.accumulated_value_and_grad(distilled, K, sum_over="data"),
        1: shrewjax.flax.value_and_grad(over_devices, K),
    }
    for calls, run in makes.items():

        def grad(state, x, run=run):
            nodes = nnx.merge(graph, state)
            return run(*nodes, x), nnx.state(nodes)

        mapped = jax.shard_map(grad, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P())
        found, state = quick_jit(mapped)(start, X)
        assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert state[0]["calls"][...] == state[1]["calls"][...] == calls


# --- errors, and what they advise ---------------------------------------------------------------------------------


def test_an_object_among_the_examples_or_keys_is_an_error_and_needs_no_position():
    with pytest.raises(ValueError, match=r"^argument 1 is in nnx objects \(they need no position\) and in rng_argnums"):
        shrewjax.flax.accumulated_value_and_grad(noisy, K, rng_argnums=1)(still(), nnx.Rngs(noise=0), X)
    with pytest.raises(
        ValueError, match=r"^argument 1 is in nnx objects \(they need no position\) and in batch_argnums"
    ):
        shrewjax.flax.value_and_grad(distilled, K, batch_argnums=(1, 2))(still(), still(1), X)
    with pytest.raises(ValueError, match=r"^no argument holds examples, .* in wrt, nnx objects .* Pass the batch"):
        shrewjax.flax.value_and_grad(distilled, K)(still(), still(1))
    with pytest.raises(ValueError, match=r"^keyword argument rngs is in nnx objects \(they need no position\) and in"):
        shrewjax.flax.accumulated_value_and_grad(noisy, K, rng_argnums="rngs")(still(), rngs=nnx.Rngs(noise=0), x=X)


ALL_BUT_HEADS = FILTERS["all but the heads"]


@pytest.mark.parametrize(
    ("fun", "wrt", "args"),
    [
        (distilled, nnx.Param, lambda net: (net, net)),
        (
            lambda nets, x: distilled(nets[0], lambda x: nets[1](nets[0].body(x))[:, 0], x),
            ALL_BUT_HEADS,
            lambda net: ((net, net.head),),
        ),
    ],
    ids=["in two arguments", "in two places of one"],
)
def test_a_variable_that_is_in_wrt_in_one_of_two_objects_is_an_error_as_in_flax_and_a_copy_is_not(mode, fun, wrt, args):
    args = args(still())
    message = r"share a variable that is in wrt in one .* Pass nnx\.clone\(x\) as the other$|[Dd]uplicate"
    with pytest.raises(ValueError, match=message):
        shrewjax.flax.value_and_grad(fun, K, wrt=wrt)(*args, X)
    argnum = nnx.DiffState(0, wrt)
    with in_mode(), pytest.raises(ValueError, match="aliasing"):
        nnx.value_and_grad(fun, argnums=argnum)(*args, X)
    *first, last = args if len(args) > 1 else args[0]
    copied = *first, nnx.clone(last)
    shrewjax.flax.value_and_grad(fun, K, wrt=wrt)(*(copied if len(args) > 1 else [copied]), X)


def test_a_variable_of_another_dtype_is_an_error_that_names_it_and_casts_are_not():
    def loss(model, x, cast):
        model.calls.set_value((model.calls[...] + 0.5).astype(cast))
        return jnp.mean(model.body(x))

    def run(cast, start, make=shrewjax.flax.accumulated_value_and_grad):
        net = still()
        net.calls = nnx.Variable(start)
        make(lambda model, x: loss(model, x, cast), K)(net, X)
        return net.calls[...]

    if not hasattr(nnx.Variable, "set_value"):
        pytest.skip("Flax 0.12.0 has no set_value")
    message = r"^fun must keep .* type, but \['calls'\] was int32 of shape \(\) and is float32 of shape \(\)\. Cast"
    for make, calls in ((shrewjax.flax.accumulated_value_and_grad, K), (shrewjax.flax.value_and_grad, 1)):
        with pytest.raises(ValueError, match=message):
            run(np.float32, jnp.array(0), make)
        assert run(np.int32, jnp.array(0), make) == 0
        assert run(np.float32, jnp.array(0.0), make) == 0.5 * calls


@pytest.mark.parametrize("wrt", [nnx.DiffState(0, nnx.Param), 3], ids=["DiffState", "number"])
def test_wrt_that_is_no_filter_is_an_error_before_the_call(wrt):
    with pytest.raises(
        ValueError,
        match=r"^wrt must be a filter such as nnx\.Param, got .* For nnx\.DiffState\(0, f\), pass f$",
    ):
        shrewjax.flax.value_and_grad(distilled, K, wrt=wrt)
    with pytest.raises(ValueError, match=r"^wrt must be a filter such as nnx\.Param"):
        shrewjax.flax.Optimizer(still(), optax.sgd(1.0), wrt=wrt)


def test_an_integer_in_wrt_is_an_error_that_advises_no_other_framework():
    net = still()
    net.count = nnx.Param(jnp.array(0))

    def loss(model, x):
        return jnp.mean(model(x))

    with pytest.raises(
        ValueError, match=r"^the variable \['count'\] in wrt=.* must be floating .* got int32\. Leave it out of wrt$"
    ) as e:
        shrewjax.flax.value_and_grad(loss, K)(net, X)
    assert "eqx" not in str(e.value)
    net.count = nnx.Variable(net.count[...])
    shrewjax.flax.value_and_grad(loss, K)(net, X)


def test_a_key_beside_the_model_is_an_error_and_an_argument_of_its_own_is_not():
    """In one argument each micro-batch would draw alike, and Flax raises, too."""

    def with_key(model, key, x):
        return jnp.mean((model(x) + jax.random.normal(key, (len(x),))) ** 2)

    key = jax.random.key(0)
    with pytest.raises(
        ValueError, match=r"^the variable \[1\] in wrt=.* must be floating .* got key.* Leave it out of wrt$"
    ):
        shrewjax.flax.value_and_grad(lambda both, x: with_key(*both, x), K)((still(), key), X)
    value, _ = shrewjax.flax.accumulated_value_and_grad(with_key, K, rng_argnums=1)(still(), key, X)
    expected = [with_key(still(), jax.random.fold_in(key, i), X[i::K]) for i in range(K)]
    np.testing.assert_allclose(value, np.mean(expected), rtol=1e-6)
    value, _ = shrewjax.flax.value_and_grad(with_key, K)(still(), key, X)
    np.testing.assert_allclose(value, with_key(still(), key, X), rtol=1e-6)


# --- micro_batched, and several calls with one model ------------------------------------------------------------------


KEPT = np.arange(8) < 5


def own_squares(model, x):
    return model(x) ** 2


def mean_square(model, x):
    return jnp.mean(own_squares(model, x))


def masked(rows, model, x):
    return jnp.sum(rows(model, x) * KEPT) / 5


def two_views(rows, model, x):  # as in SimCLR and R-Drop
    first, second = rows(model, x), rows(model, x + 1)
    return jnp.mean(first * jnp.roll(second, 1)) + masked(rows, model, x)


def product(loss, model, x):
    return loss(model, x) * loss(model, x + 1)


@pytest.mark.parametrize(("loss", "fun"), [(masked, own_squares), (two_views, own_squares), (product, mean_square)])
def test_rows_and_losses_of_a_stateful_model_draw_as_its_own_calls_do_and_advance_its_state_as_often(loss, fun):
    found, expected = dropping(), dropping()
    results = [
        nnx.jit(nnx.value_and_grad(partial(loss, of_batch)))(model, X)
        for of_batch, model in ((shrewjax.flax.micro_batched(fun, 3), found), (fun, expected))
    ]
    assert_close(*results, rtol=1e-4, atol=1e-5)
    assert_close(numbers(nnx.state(found)), numbers(nnx.state(expected)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("returns", ["a loss", "rows"])
def test_a_teacher_of_an_outer_trace_is_an_argument_and_keeps_its_variables(returns):
    student, teacher = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(1))

    def squares(student, x, teacher):
        rows = (student(x) - teacher(x))[:, 0] ** 2
        return jnp.mean(rows) if returns == "a loss" else rows

    of_batch = shrewjax.flax.micro_batched(squares, 2)
    before = jax.tree.map(np.asarray, nnx.state(teacher))
    found = nnx.value_and_grad(lambda student: jnp.mean(of_batch(student, X, teacher)))(student)
    assert_close(found, nnx.value_and_grad(lambda s: jnp.mean(squares(s, X, teacher)))(student), rtol=1e-5)
    assert_close(nnx.state(teacher), before, rtol=0)
