"""Scatters in loops: hidden from the XLA that loses them, in all that a loss may consist of, and nothing else changes.

The numbers of programs for several GPUs are in `tests/devices`.
"""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import bits
from jax.extend import core
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from speed import quick_jit

import shrewjax
from shrewjax._programs import scatters
from shrewjax._programs.jaxprs import SCATTER_ADDS, jaxprs_in, opened

ROWS, WIDTH = 8, 4
RNG = np.random.default_rng(0)
TABLE = RNG.normal(size=(ROWS, WIDTH)).astype("f")
TOKENS = RNG.integers(0, ROWS, (8, 5)).astype(np.int32)


@jax.custom_vjp
def lookup(table, at):
    return table[at]


lookup.defvjp(lambda table, at: (table[at], at), lambda at, g: (jnp.zeros_like(TABLE).at[at].add(g), None))


def over_time(look, wrap=lambda turn: turn, **options):
    """A loss whose scan over time looks rows up."""

    def loss(table, tokens):
        turn = wrap(lambda h, at: (jnp.tanh(h + look(table, at)), None))
        h, _ = jax.lax.scan(turn, jnp.zeros((len(tokens), WIDTH)), tokens.T, **options)
        return jnp.mean(h**2)

    return loss


def take(table, at):
    return table[at]


def branch(table, at):
    return jax.lax.cond(at[0] % 2 == 0, lambda: table[at], lambda: 2 * table[at])


def in_fori_loop(table, tokens):
    turn = lambda t, h: jnp.tanh(h + table[jnp.asarray(tokens)[:, t]])  # noqa: E731
    return jnp.mean(jax.lax.fori_loop(0, tokens.shape[1], turn, jnp.zeros((len(tokens), WIDTH))) ** 2)


def in_scan_of_scans(table, tokens):
    one = over_time(take)
    return jax.lax.scan(lambda c, part: (c + one(table, part), None), 0.0, tokens.reshape(2, 4, -1))[0]


def of_counts(table, tokens):
    """A carry that is itself the operand of a scatter, also of integers."""
    turn = lambda c, at: ((c[0].at[at].add(jnp.tanh(table[at, 0])), c[1].at[at].add(1)), None)  # noqa: E731
    start = jnp.zeros(ROWS), jnp.zeros(ROWS, jnp.int32)
    sums, counts = jax.lax.scan(turn, start, tokens.T)[0]
    return jnp.mean(sums**2 / (1 + counts.astype(jnp.float32)))


LOSSES = {
    "scan": over_time(take),
    "reverse, unrolled": over_time(take, reverse=True, unroll=2),
    "checkpoint": over_time(take, jax.checkpoint),
    "jit": jax.jit(over_time(jax.jit(take))),
    "custom_vjp": over_time(lookup),
    "cond": over_time(branch),
    "fori_loop": in_fori_loop,
    "scan of scans": in_scan_of_scans,
    "checkpoint of all": jax.checkpoint(over_time(take)),
    "counts": of_counts,
}


def scatters_in_loops(jaxpr, in_loop=False):
    """The number of scatters in loops, and of those whose result is selected and read by nothing else."""
    found = np.zeros(2, int)
    for equation in opened(jaxpr).eqns:
        if in_loop and equation.primitive.name in SCATTER_ADDS:
            readers = [x for x in opened(jaxpr).eqns if equation.outvars[0] in [*x.invars]]
            found += 1, [x.primitive.name for x in readers] == ["select_n"]
        for inner in jaxprs_in(equation):
            found += scatters_in_loops(inner, in_loop or equation.primitive.name in ("scan", "while"))
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_each_scatter_in_a_loop_is_selected_and_no_bit_changes(name):
    program = jax.make_jaxpr(jax.value_and_grad(LOSSES[name]))(TABLE, TOKENS)
    hidden = scatters.hide_scatters(program)
    count, before = scatters_in_loops(program)
    assert count > 0
    assert before == 0
    assert list(scatters_in_loops(hidden)) == [count, count]
    run = [quick_jit(core.jaxpr_as_fun(x))(TABLE, TOKENS) for x in (program, hidden)]
    assert bits(run[0]) == bits(run[1])


def test_what_has_no_scatter_in_a_loop_stays_the_same_object():
    def loss(w, x):
        h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0]
        return jnp.mean(TABLE[TOKENS] @ h.T)

    program = jax.make_jaxpr(jax.value_and_grad(loss))(np.ones((2, WIDTH, WIDTH), "f"), np.ones((3, WIDTH), "f"))
    assert scatters.hide_scatters(program) is program


def test_a_function_that_is_called_often_is_rebuilt_once():
    one = jax.jit(over_time(take))
    program = jax.make_jaxpr(lambda table: one(table, TOKENS) + one(table, TOKENS))(TABLE)
    hidden = scatters.hide_scatters(jax.make_jaxpr(jax.grad(lambda t: one(t, TOKENS) + one(t, TOKENS)))(TABLE))
    for jaxpr in (program, hidden):
        inner = [x for e in jaxpr.jaxpr.eqns if e.primitive.name == "jit" for x in jaxprs_in(e)]
        assert len({id(x) for x in inner}) < len(inner)


# --- where True is unknown -------------------------------------------------------------------------------------


def lowered(platform, devices, function=lambda x: jnp.where(scatters.unknown_true(), x, 0.0)):
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("data",)), P("data"))
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding)
    return jax.jit(function).trace(x).lower(lowering_platforms=(platform,)).as_text()


LOOKUPS = jnp.asarray(np.random.default_rng(0).normal(size=(5, 4)), jnp.float32)
LOOKED_UP = np.arange(24).reshape(8, 3) % 5


def _recurrent(look, start):
    def loss(rows, tokens):
        last, _ = jax.lax.scan(lambda h, i: (jnp.tanh(h + look(rows, i)), None), start(tokens), tokens.T)
        return jnp.mean(last**2)

    return loss


def _zeros(tokens):
    return jnp.zeros((tokens.shape[0], 4))


def _in_other_mesh(form, mesh):
    """Losses with a scatter in a loop that JAX traces in another context than the caller's."""
    is_explicit = mesh.axis_types[0] == AxisType.Explicit

    def start(tokens):
        return jax.reshard(_zeros(tokens), P("data")) if is_explicit else _zeros(tokens)

    def look(rows, i):
        return jax.shard_map(lambda rows, i: rows[i], mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))(
            rows, i
        )

    def inside(rows, tokens):
        varying = _recurrent(lambda rows, i: rows[i], lambda x: jax.lax.pcast(_zeros(x), "data", to="varying"))
        run = lambda rows, tokens: jax.lax.pmean(varying(rows, tokens), "data")  # noqa: E731
        return jax.shard_map(run, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(rows, tokens)

    return {
        "shard_map in a scan": _recurrent(look, start),
        "scan in shard_map": inside,
        "lookup with a sharding": _recurrent(lambda rows, i: rows.at[i].get(out_sharding=P("data")), start),
    }[form]


@pytest.mark.skipif(not hasattr(jax.lax, "pcast"), reason="this JAX has no jax.lax.pcast")
@pytest.mark.parametrize(
    ("form", "kind"),
    [
        ("shard_map in a scan", AxisType.Auto),
        ("shard_map in a scan", AxisType.Explicit),
        ("scan in shard_map", AxisType.Auto),
        ("lookup with a sharding", AxisType.Explicit),
    ],
)
def test_scatters_of_another_mesh_context_are_hidden_in_theirs(form, kind):
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",), axis_types=(kind,))
    loss = _in_other_mesh(form, mesh)
    with jax.set_mesh(mesh):
        arguments = jax.device_put(LOOKUPS, P()), jax.device_put(LOOKED_UP, P("data"))
        grads = quick_jit(shrewjax.value_and_grad(loss, 2))(*arguments)[1]
    expected = jax.grad(_recurrent(lambda rows, i: rows[i], _zeros))(LOOKUPS, LOOKED_UP)
    np.testing.assert_allclose(grads, expected, rtol=1e-5, atol=1e-7)


def test_scatter_in_a_linear_solve_is_no_error():
    """`custom_linear_solve` keeps its jaxprs in a named tuple."""

    def loss(scale, x):
        def matvec(v):
            return scale * v + jnp.zeros_like(v).at[jnp.array([1, 2, 3, 0])].add(0.1 * v)

        return jnp.mean(jax.vmap(lambda row: jax.scipy.sparse.linalg.cg(matvec, row)[0])(x) ** 2)

    x = np.float32(np.random.default_rng(0).normal(size=(4, 4)))
    value, grad = quick_jit(shrewjax.value_and_grad(loss, 2))(jnp.float32(2), x)
    expected, of_whole = quick_jit(jax.value_and_grad(loss))(jnp.float32(2), x)
    np.testing.assert_allclose((value, grad), (expected, of_whole), rtol=1e-5)


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu", "cpu"])
@pytest.mark.parametrize("devices", [1, 8])
def test_true_is_a_constant_for_one_device_and_for_cpus(platform, devices):
    is_hidden = platform != "cpu" and devices > 1
    assert ("optimization_barrier" in lowered(platform, devices)) == is_hidden


def test_true_is_unknown_in_shard_map_over_several_devices():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    unknown = lambda x: jnp.where(scatters.unknown_true(), x, 0.0)  # noqa: E731
    mapped = jax.shard_map(unknown, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert "optimization_barrier" in lowered("cuda", 8, mapped)


def test_true_is_true_outside_of_jit_under_vmap_and_in_derivatives():
    def select(x):
        return jnp.where(scatters.unknown_true(), x, 0.0) * 2

    np.testing.assert_array_equal(select(np.ones(2, "f")), [2, 2])
    np.testing.assert_array_equal(jax.vmap(jax.grad(select))(np.ones(2, "f")), [2, 2])
    np.testing.assert_array_equal(jax.jit(jax.hessian(lambda x: select(x) ** 2))(np.float32(1)), 8)


# --- gradients that come from elsewhere ------------------------------------------------------------------------


@pytest.fixture
def gpus(monkeypatch):
    """A process with several GPUs, whose XLA loses scatters, and that has not warned yet."""
    monkeypatch.setattr(scatters, "LOSES_SCATTERS", True)
    monkeypatch.setattr(scatters, "_warned", [])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("XLA_FLAGS")


def warnings_of(gradients, tx=None):
    """The texts of the warnings of a train step that is traced."""
    tx = tx or shrewjax.accumulate(optax.sgd(0.1), 2)

    def step(table, state):
        return tx.update(gradients(table), state, table)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(step, TABLE, jax.eval_shape(tx.init, TABLE))
    return [str(x.message) for x in caught]


needs_parents = pytest.mark.skipif(
    not (0, 10, 1) <= jax.__version_info__[:3] <= (0, 11, 2), reason="reads how these versions of JAX record a trace"
)


@needs_parents
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "cond"])
def test_accumulate_warns_of_gradients_that_add_up_scatters_in_a_loop(name, gpus):
    (text,) = warnings_of(lambda table: jax.grad(LOSSES[name])(table, TOKENS))
    assert "0.10.1 to 0.11.2" in text
    assert "--xla_disable_hlo_passes=while-loop-all-reduce-code-motion" in text
    assert warnings_of(lambda table: jax.grad(LOSSES[name])(table, TOKENS)) == []  # once


@needs_parents
def test_a_clip_and_a_guard_around_the_gradients_do_not_hide_them(gpus):
    inner = shrewjax.accumulate(optax.sgd(0.1), 2)
    grads = jax.grad(over_time(take))
    clip = optax.chain(shrewjax.clip_by_global_norm(1.0), inner)
    assert len(warnings_of(lambda table: grads(table, TOKENS), clip)) == 1


def of_rows(table, tokens):
    """A scan that looks up rows of tables of its own, which its backward pass stacks and does not add."""
    tables = jnp.stack([table, table])
    return jnp.mean(jax.lax.scan(lambda h, t: (jnp.tanh(h + t[tokens[:, 0]]), None), jnp.zeros((8, WIDTH)), tables)[0])


def of_messages(table, tokens):
    """Rounds of messages between rows: the carry is not only added to."""
    senders, receivers = tokens[:, :-1].ravel(), tokens[:, 1:].ravel()
    turn = lambda h, _: (jnp.tanh(h + jax.ops.segment_sum(h[senders], receivers, ROWS)), None)  # noqa: E731
    return jnp.mean(jax.lax.scan(turn, table, length=3)[0] ** 2)


def on_every_device(run):
    """In `shard_map`, where XLA does not partition the loop."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(run, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P(), check_vma=False)


def averaged(table, tokens):
    return jax.lax.pmean(jax.grad(over_time(take))(table, tokens), "data")


RIGHT = {
    "shard_map": lambda table: on_every_device(averaged)(table, TOKENS),
    "a lookup in a branch": lambda table: jax.grad(over_time(branch))(table, TOKENS),
    "messages": lambda table: jax.grad(of_messages)(table, TOKENS),
    "a lookup outside of the loop": lambda table: jax.grad(lambda t: jnp.mean(t[TOKENS] ** 2))(table),
    "stacked tables": lambda table: jax.grad(of_rows)(table, TOKENS),
    "value_and_grad": lambda table: shrewjax.value_and_grad(over_time(take), 1)(table, TOKENS)[1],
    "value_and_grad, several": lambda table: shrewjax.value_and_grad(over_time(take), 2)(table, TOKENS)[1],
}


@needs_parents
@pytest.mark.parametrize("name", RIGHT)
def test_accumulate_does_not_warn_of_gradients_that_are_right(name, gpus):
    assert warnings_of(RIGHT[name]) == []


@needs_parents
def test_accumulate_in_shard_map_does_not_warn(gpus):
    tx = shrewjax.accumulate(optax.sgd(0.1), 2, sum_over="data")

    def step(table, tokens):
        return tx.update(jax.grad(over_time(take))(table, tokens), tx.init(table), table)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(on_every_device(step), TABLE, TOKENS)


@needs_parents
def test_a_sum_of_sums_and_calls_of_calls_are_searched_once(gpus):
    """In this loop 2**40 ways lead from the carry to the result."""

    def doubled(h):
        for _ in range(40):
            h = h + h.astype(h.dtype)
        return h * 2.0**-40

    def loss(table):
        turn = lambda h, _: (doubled(jax.jit(doubled)(h)), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(turn, table, length=2)[0] ** 2)

    assert warnings_of(jax.grad(loss)) == []


@pytest.mark.parametrize("what", ["flag", "one device", "cpu", "version"])
def test_accumulate_does_not_warn_where_nothing_is_lost(what, gpus, monkeypatch):
    if what == "flag":
        monkeypatch.setenv("XLA_FLAGS", "--xla_disable_hlo_passes=foo,while-loop-all-reduce-code-motion")
    elif what == "one device":
        monkeypatch.setattr(jax, "device_count", lambda: 1)
    elif what == "cpu":
        monkeypatch.undo()
        monkeypatch.setattr(scatters, "LOSES_SCATTERS", True)
    else:
        monkeypatch.setattr(scatters, "LOSES_SCATTERS", False)
    assert warnings_of(lambda table: jax.grad(over_time(take))(table, TOKENS)) == []


def test_versions_that_lose_scatters_are_a_closed_set():
    def loses(*version):
        return functools.reduce(lambda x, y: x and y, [version >= (0, 10, 1), version <= (0, 11, 2)])

    assert loses(*jax.__version_info__[:3]) == scatters.LOSES_SCATTERS
