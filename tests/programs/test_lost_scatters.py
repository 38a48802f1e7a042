"""Gradients that come out of a user's own loop: a warning if it adds scatters up, and none where nothing is lost."""

import warnings

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import mesh_of
from lookups import LOSSES, ROWS, TABLE, TOKENS, WIDTH, branch, over_time, take

import shrewjax
from shrewjax._programs import loops, lost_scatters


@pytest.fixture
def gpus(monkeypatch):
    """A process with several GPUs, whose XLA loses lost_scatters, and that has not warned yet."""
    monkeypatch.setattr(lost_scatters, "LOSES_SCATTERS", True)
    monkeypatch.setattr(lost_scatters, "_warned", [])
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
    mesh = mesh_of(data=8)
    return jax.shard_map(run, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P(), check_vma=False)


def averaged(table, tokens):
    return jax.lax.pmean(jax.grad(over_time(take))(table, tokens), "data")


RIGHT = {
    "shard_map": lambda table: on_every_device(averaged)(table, TOKENS),
    "a lookup in a branch": lambda table: jax.grad(over_time(branch))(table, TOKENS),
    "messages": lambda table: jax.grad(of_messages)(table, TOKENS),
    "a lookup outside of the loop": lambda table: jax.grad(lambda t: jnp.mean(t[TOKENS] ** 2))(table),
    "stacked tables": lambda table: jax.grad(of_rows)(table, TOKENS),
    "value_and_grad": lambda table: shrewjax.accumulated_value_and_grad(over_time(take), 1)(table, TOKENS)[1],
    "value_and_grad, several": lambda table: shrewjax.accumulated_value_and_grad(over_time(take), 2)(table, TOKENS)[1],
}


OF_PASSES = {"value_and_grad", "value_and_grad, several"}


@needs_parents
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.needs_passes] * (name in OF_PASSES)) for name in RIGHT]
)
def test_accumulate_does_not_warn_of_gradients_that_are_right(name, gpus):
    assert warnings_of(RIGHT[name]) == []


@needs_parents
def test_value_and_grad_warns_if_passes_are_off(gpus, monkeypatch):
    monkeypatch.setattr(loops, "LOSES_SCATTERS", True)
    monkeypatch.setenv("SHREWJAX_DISABLE_PASSES", "1")
    with pytest.warns(RuntimeWarning, match="may lose parts of these gradients"):
        jax.eval_shape(shrewjax.accumulated_value_and_grad(over_time(take), 2), TABLE, TOKENS)


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
        monkeypatch.setattr(lost_scatters, "LOSES_SCATTERS", True)
    else:
        monkeypatch.setattr(lost_scatters, "LOSES_SCATTERS", False)
    assert warnings_of(lambda table: jax.grad(over_time(take))(table, TOKENS)) == []
