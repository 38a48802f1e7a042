"""A skipped step touches nothing, exactly the right steps are skipped, and no guard locks up."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import bits, lenient, mesh_of
from speed import compiled, quick_jit, users_jit

import shrewjax

f32 = np.float32
INNER = lenient(optax.adam(0.1))
BAD = pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])


def run(tx, gradients, **extra):
    """Updates and states of every step; each value in `extra` has one number a step."""
    params = np.zeros_like(gradients[0])
    update = quick_jit(lambda g, s, extra: tx.update(g, s, params, **extra))
    state, steps = tx.init(params), []
    for i, g in enumerate(gradients):
        updates, state = update(g, state, {k: f32(v[i]) for k, v in extra.items()})
        steps.append((updates, state))
    return jax.device_get(steps)


def applied(steps):
    return [bool(state.applied) for _, state in steps]


def spikes(values, history_length=128, max_zscore=6.0, warmup_steps=64, floor=1e-3, max_value=np.inf):
    """The rule in float64: which values are spikes against the recorded ones before."""
    recorded = []
    for x in values:
        before = recorded[-history_length:]
        stands_out = False
        if len(before) >= warmup_steps:
            std = max(np.std(before, ddof=1), floor * abs(np.mean(before)))
            stands_out = x > np.mean(before) + max_zscore * std
        yield stands_out or x > max_value
        if x <= max_value:
            recorded.append(x)


# --- non-finite gradients -----------------------------------------------------------------------------------------


@BAD
def test_a_bad_gradient_is_skipped_and_inner_never_knows(bad):
    good = [f32([1, 2]), f32([3, -1]), f32([0.5, 1])]
    steps = run(shrewjax.skip_nonfinite(INNER), [good[0], f32([1, bad]), *good[1:]])
    clean = run(INNER, good)
    assert applied(steps) == [True, False, True, True]
    assert bits(steps[1][0]) == bits(f32([0, 0]))
    assert bits(steps[1][1].inner_state) == bits(steps[0][1].inner_state)
    assert bits([(u, s.inner_state) for u, s in (steps[0], *steps[2:])]) == bits(clean)
    assert [int(s.skipped) for _, s in steps] == [0, 1, 1, 1]
    assert [int(s.consecutive) for _, s in steps] == [0, 1, 0, 0]


def test_apply_gradients_leaves_a_skipped_step_s_parameters_alone_and_writes_in_place():
    tx = shrewjax.skip_nonfinite(shrewjax.skip_on_spike(INNER))
    step = users_jit(lambda p, s, g: shrewjax.apply_gradients(tx, g, s, p), donate_argnums=(0, 1))
    params, bad = np.ones((256, 256), f32), np.full((256, 256), np.nan, f32)
    state = quick_jit(tx.init)(params)
    compiled = step.lower(params, state, params).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.05 * params.nbytes
    after, state = compiled(jnp.asarray(params), state, bad)
    assert bits(after) == bits(params)
    assert int(state.skipped) == 1


def test_only_leaves_gives_the_state_a_count_for_each_leaf_of_the_calls_in_which_it_was_bad():
    params = {"w": jnp.zeros(2), "b": jnp.zeros(()), "i": jnp.arange(2)}
    assert shrewjax.skip_nonfinite(optax.identity()).init(params).nonfinite_leaves == ()
    tx = compiled(shrewjax.skip_nonfinite(optax.identity(), per_leaf=True))
    state, counts = tx.init(params), []
    for w, b in ((1, 1), (np.nan, 1), (np.inf, np.nan), (1, 1), (np.nan, 1)):
        _, state = tx.update({"w": jnp.full(2, w, f32), "b": f32(b), "i": params["i"]}, state, params)
        counts.append({name: int(n) for name, n in state.nonfinite_leaves.items()})
    assert [c["w"] for c in counts] == [0, 1, 2, 2, 3]
    assert [c["b"] for c in counts] == [0, 0, 1, 1, 1]
    assert [c["i"] for c in counts] == [0] * 5
    assert state.nonfinite_leaves["w"].dtype == jnp.int32


def test_gradients_whose_norm_leaves_float32_are_not_skipped():
    assert applied(run(shrewjax.skip_nonfinite(optax.identity()), [f32([3e38, 3e38])])) == [True]


@pytest.mark.parametrize("at_limit", ["keep_skipping", "zero_nonfinite"])
def test_at_the_limit_it_says_so_and_does_what_was_chosen(at_limit):
    bad, good = f32([1, np.nan]), f32([2, 3])
    tx = shrewjax.skip_nonfinite(optax.sgd(1.0), max_consecutive=2, at_limit=at_limit)
    steps = run(tx, [bad, bad, bad, good, bad])
    assert [bool(s.limit_reached) for _, s in steps] == [False, True, True, False, False]
    from_the_limit_on = [0, 0] if at_limit == "keep_skipping" else [-1, 0]
    expected = [[0, 0], from_the_limit_on, from_the_limit_on, [-2, -3], [0, 0]]
    np.testing.assert_array_equal([u for u, _ in steps], expected)
    assert [int(s.skipped) for _, s in steps] == ([1, 2, 3, 3, 4] if at_limit == "keep_skipping" else [1, 1, 1, 1, 2])


def test_what_is_no_number_passes_and_does_not_count():
    tree = {"w": jnp.ones(2), "i": jnp.arange(3), "n": None, "m": optax.MaskedNode()}
    tx = shrewjax.skip_nonfinite(optax.identity())
    updates, state = quick_jit(tx.update)(tree, tx.init(tree))
    assert bits(updates) == bits(tree)
    assert bool(state.applied)


# --- spikes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["grad_norm", "value"])
@pytest.mark.parametrize("arguments", [{}, {"history_length": 20, "max_zscore": 2.0, "warmup_steps": 5}], ids=str)
def test_the_spikes_are_those_of_the_rule_in_float64(of, arguments):
    rng = np.random.default_rng(0)
    values = np.float64(f32(3 + 0.3 * rng.normal(size=300)))
    values[[50, 80, 81, 150, 250]] *= 3
    extra = {"value": values} if of == "value" else {}
    gradients = [f32([x]) if of == "grad_norm" else f32([1]) for x in values]
    steps = run(shrewjax.skip_on_spike(optax.identity(), monitor=of, **arguments), gradients, **extra)
    expected = list(spikes(values, **arguments))
    assert sum(expected) >= 2
    assert applied(steps) == [not spike for spike in expected]
    assert int(steps[-1][1].skipped) == sum(expected)


@pytest.mark.parametrize("level", [1.0, 2.3e-20, 1e30, -5.0])
def test_of_a_constant_history_only_what_stands_out_is_a_spike(level):
    values = [level] * 10 + [level + 1e-3 * abs(level), level, level + 0.1 * abs(level)]
    tx = shrewjax.skip_on_spike(optax.identity(), monitor="value", warmup_steps=8)
    assert applied(run(tx, [f32([1])] * len(values), value=values)) == [True] * 12 + [False]


def test_a_new_level_becomes_the_usual_one():
    norms = [1 + 0.01 * (i % 3) for i in range(20)] + [10.0] * 30
    steps = run(shrewjax.skip_on_spike(optax.identity(), history_length=16, warmup_steps=8), [f32([n]) for n in norms])
    assert not applied(steps)[20]
    assert sum(not a for a in applied(steps)) <= 2


@BAD
@pytest.mark.parametrize("when", [2, 20], ids=["before it is on", "later"])
def test_a_bad_gradient_costs_one_step_and_leaves_no_trace(bad, when):
    norms = [f32([1 + 0.1 * (i % 4), 0]) for i in range(30)]
    tx = shrewjax.skip_on_spike(INNER, history_length=16, warmup_steps=8)
    steps, clean = run(tx, [*norms[:when], f32([1, bad]), *norms[when:]]), run(tx, norms)
    assert applied(steps) == [i != when for i in range(31)]
    remembered = [(u, s.history, s.inner_state) for u, s in steps]
    assert bits(remembered[:when] + remembered[when + 1 :]) == bits([(u, s.history, s.inner_state) for u, s in clean])
    assert bits(remembered[when][1:]) == bits(remembered[when - 1][1:])


def test_value_reaches_inner_and_must_be_there():
    def update(updates, state, params=None, *, value, **extra_args):
        return jax.tree.map(lambda g: g * value, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
    tx = shrewjax.skip_on_spike(inner, monitor="value")
    step = quick_jit(lambda g, **value: tx.update(g, tx.init(g), **value)[0])
    np.testing.assert_array_equal(step(np.ones(1, f32), value=f32(3)), [3])
    with pytest.raises(ValueError, match="needs value="):
        step(np.ones(1, f32))


# --- a fixed limit ------------------------------------------------------------------------------------------------


def applied_at_most(is_spike, max_consecutive):
    """Whether each step runs, if at most `max_consecutive` spikes in a row are skipped. None is a non-finite step."""
    in_a_row = 0
    for spike in is_spike:
        yield spike is not None and (not spike or in_a_row >= max_consecutive)
        if spike is not None:
            in_a_row = in_a_row + 1 if spike and in_a_row < max_consecutive else 0


@pytest.mark.parametrize("as_arrays", [False, True], ids=["numbers", "arrays"])
def test_both_rules_share_the_run_and_only_the_history_of_one_grows(as_arrays):
    rng = np.random.default_rng(1)
    values = np.float64(f32(3 + 0.3 * rng.normal(size=120)))
    values[[40, 41, 60, 61, 62, 63, 64]] = [50, 7, 7, 50, 50, 7, 50]
    values[100:110] = np.inf, 50, 50, np.nan, 50, 50, np.nan, 50, 3, 50
    rule = {"history_length": 20, "max_zscore": 3.0, "warmup_steps": 5}
    limits = {"max_value": 20.0, "max_consecutive": 2}
    given = {k: jnp.asarray(v) for k, v in limits.items()} if as_arrays else limits
    tx = shrewjax.skip_on_spike(optax.identity(), monitor="value", **rule, **given)
    steps = run(tx, [f32([1])] * len(values), value=values)

    finite = np.isfinite(values)
    found = iter([*spikes(values[finite], max_value=20.0, **rule)])
    is_spike = [bool(next(found)) if ok else None for ok in finite]
    expected = list(applied_at_most(is_spike, 2))
    assert any(spike and value < 20 for spike, value in zip(is_spike, values, strict=True))
    assert applied(steps) == expected
    np.testing.assert_array_equal([u for u, _ in steps], np.where(expected, 1, 0)[:, None])
    last = steps[-1][1]
    assert int(last.skipped) == expected.count(False)
    assert int(last.spikes_applied) == sum(bool(s) and a for s, a in zip(is_spike, expected, strict=True)) > 1
    recorded = [v for v in values[finite] if v <= 20][-20:]
    np.testing.assert_array_equal(last.history.values, f32(recorded))


def test_a_bad_gradient_is_not_applied_even_after_at_most_and_leaves_the_run_alone():
    high = f32([5, 0])
    tx = shrewjax.skip_on_spike(INNER, max_value=1.0, max_consecutive=2)
    steps = run(tx, [high, high, f32([np.nan, 0]), f32([-np.inf, 0]), high, high])
    assert applied(steps) == [False] * 4 + [True, False]
    assert [int(s.consecutive) for _, s in steps] == [1, 2, 2, 2, 0, 1]
    assert int(steps[-1][1].spikes_applied) == 1
    assert np.isfinite(steps[4][0]).all()


LIMITS = [
    (np.nan, 1, [False, True, False]),
    (0.5, np.nan, [True] * 3),
    (0.5, 0, [True] * 3),
    (0.5, 0.5, [True] * 3),
    (0.5, np.inf, [False] * 3),
    (np.inf, 1, [True] * 3),
    (1.0, 1, [True] * 3),
    (0, 1.5, [False, False, True]),
]


def test_the_limits_follow_the_table():
    @quick_jit
    def step(state, max_value, max_consecutive):
        return shrewjax.skip_on_spike(optax.identity(), max_value=max_value, max_consecutive=max_consecutive).update(
            jnp.ones(1), state
        )

    for max_value, max_consecutive, expected in LIMITS:
        state = shrewjax.skip_on_spike(optax.identity()).init(np.zeros(1, f32))
        for is_applied in expected:
            _, state = step(state, f32(max_value), f32(max_consecutive))
            assert bool(state.applied) == is_applied, (max_value, max_consecutive)


@pytest.mark.parametrize(
    ("max_value", "max_consecutive", "expected"), [(1e40, 1, [True] * 3), (0.5, jnp.int32(0), [True] * 3)]
)
def test_the_limits_may_be_an_integer_or_beyond_float32(max_value, max_consecutive, expected):
    tx = shrewjax.skip_on_spike(optax.identity(), max_value=max_value, max_consecutive=max_consecutive)
    assert applied(run(tx, [f32([1])] * 3)) == expected


def test_a_value_may_have_a_negative_limit():
    tx = shrewjax.skip_on_spike(optax.identity(), monitor="value", max_value=-2.0, max_consecutive=5)
    steps = run(tx, [f32([1])] * 3, value=[-3.0, -1.0, -2.0])
    assert applied(steps) == [True, False, True]
    assert float(steps[-1][1].threshold) == -2


def test_a_scheduled_limit_is_that_of_its_step():
    tx = optax.inject_hyperparams(shrewjax.skip_on_spike)(
        optax.identity(), max_value=optax.linear_schedule(3.0, 1.0, 2), max_consecutive=5
    )
    assert [bool(state.inner_state.applied) for _, state in run(tx, [f32([2])] * 3)] == [True, True, False]


# --- both ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("make", [partial(shrewjax.skip_nonfinite, per_leaf=True), shrewjax.skip_on_spike])
def test_one_bad_shard_skips_the_step_on_every_device(make, check_vma):
    """And is counted in its leaf alone."""
    mesh = mesh_of(data=8)
    specs = {"sharded": jax.P("data"), "whole": jax.P()}
    tx = make(optax.identity(), sharded_over=None if check_vma else "data")

    def update(g):
        updates, state = tx.update(g, tx.init(g))
        return updates, (state.skipped, getattr(state, "nonfinite_leaves", ()))

    mapped = jax.shard_map(update, mesh=mesh, in_specs=(specs,), out_specs=(specs, jax.P()), check_vma=check_vma)
    grads = {"sharded": np.ones((8, 2), f32), "whole": np.ones(3, f32)}
    step = quick_jit(mapped)
    assert bits(step(grads)[0]) == bits(grads)
    bad = grads | {"sharded": np.where(np.arange(16).reshape(8, 2) == 11, f32(np.nan), grads["sharded"])}
    updates, (skipped, counts) = step(bad)
    assert bits(updates) == bits(jax.tree.map(np.zeros_like, grads))
    assert int(skipped) == 1
    assert counts in ((), {"sharded": 1, "whole": 0})


def test_a_device_s_own_loss_decides_nothing():
    mesh = mesh_of(data=8)
    tx = shrewjax.skip_on_spike(optax.identity(), monitor="value")

    def update(g):
        return tx.update(g, tx.init(g), value=g[0, 0])[1].skipped

    mapped = jax.shard_map(update, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
    with pytest.raises(ValueError, match="value must be the same on every device, got one that may differ over 'data'"):
        jax.eval_shape(mapped, jnp.ones((8, 2)))


def test_metrics_look_through_guards():
    tx = shrewjax.skip_nonfinite(shrewjax.skip_on_spike(shrewjax.clip_by_global_norm(1.0)))
    _, state = quick_jit(lambda g: tx.update(g, tx.init(g)))(f32([3, 4]))
    found = {k: float(v) for k, v in shrewjax.metrics(state).items()}
    assert found["skip_nonfinite/skipped"] == 0
    assert found["skip_nonfinite/limit_reached"] == 0
    assert found["skip_on_spike/measured"] == 5
    assert found["skip_on_spike/threshold"] == np.inf
    assert found["clip_by_global_norm/grad_norm"] == 5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: shrewjax.skip_nonfinite(3), r"inner must be .*, got int\. Pass it first, before the other arguments"),
        (lambda: shrewjax.skip_nonfinite(INNER, at_limit="zero_nonfinite"), r"'zero_nonfinite'.*Pass max_consecutive"),
        (lambda: shrewjax.skip_nonfinite(INNER, max_consecutive=0, at_limit="keep_skipping"), r"max_consecutive must"),
        (lambda: shrewjax.skip_nonfinite(INNER, max_consecutive=3, at_limit="apply"), r"at_limit must be one of"),
        (lambda: shrewjax.skip_nonfinite(INNER, per_leaf=1), r"per_leaf must be True or False"),
        (
            lambda: shrewjax.skip_nonfinite(INNER, per_leaf=True).update(
                {"b": jnp.ones(2)}, shrewjax.skip_nonfinite(INNER, per_leaf=True).init({"a": jnp.ones(2)})
            ),
            r"gradient leaves \['b'\] have no numbers in the state",
        ),
        (lambda: shrewjax.skip_on_spike(INNER, monitor="loss"), r"monitor must be one of 'grad_norm', 'value'"),
        (
            lambda: shrewjax.skip_on_spike(INNER, history_length=8),
            r"warmup_steps must be at most history_length, 8, got",
        ),
        (lambda: shrewjax.skip_on_spike(INNER, history_length=jnp.int32(8)), r"history_length.*static_args"),
        (lambda: shrewjax.skip_on_spike(INNER, max_zscore=-1), r"max_zscore must be >= 0"),
        (
            lambda: shrewjax.skip_on_spike(INNER, max_value=1.0),
            r"max_value and max_consecutive must come together, got max_value alone. Pass max_consecutive",
        ),
        (
            lambda: shrewjax.skip_on_spike(INNER, max_consecutive=3),
            r"got max_consecutive alone. Pass max_value$",
        ),
        (
            lambda: shrewjax.skip_on_spike(INNER, max_value=-1, max_consecutive=3),
            r"max_value must be >= 0 and not NaN, got -1",
        ),
        (
            lambda: shrewjax.skip_on_spike(INNER, max_value=1.0, max_consecutive=0),
            r"max_consecutive must be >= 1 and not NaN, got 0",
        ),
        (
            lambda: shrewjax.skip_on_spike(INNER, monitor="value", max_value=np.nan, max_consecutive=3),
            r"max_value must be >= -inf and not NaN, got nan",
        ),
    ],
)
def test_what_is_wrong_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("arguments", [{"max_zscore": np.inf, "warmup_steps": 4}, {"warmup_steps": 0}], ids=str)
def test_a_guard_that_is_off_lets_a_constant_of_zero_pass(arguments):
    tx = shrewjax.skip_on_spike(optax.identity(), monitor="value", **arguments)
    assert applied(run(tx, [f32([1])] * 8, value=[0.0] * 8)) == [True] * 8


def test_rows_of_examples_belong_in_front_of_a_guard():
    aggregate = optax.contrib.differentially_private_aggregate(1.0, 0.0, 0)
    params, rows = jnp.zeros(2), jnp.asarray([[3.0, 4.0], [0.0, 0.0]])
    outside = shrewjax.skip_on_spike(optax.chain(aggregate, optax.sgd(1.0)))
    with pytest.raises(ValueError, match=r"inside accumulate, or behind what reduces rows"):
        outside.update(rows, outside.init(params), params)
    tx = optax.chain(aggregate, shrewjax.skip_on_spike(optax.sgd(1.0)))
    updates, _ = tx.update(rows, tx.init(params), params)
    np.testing.assert_allclose(updates, [-0.3, -0.4], rtol=1e-6)


def test_python_numbers_are_gradients_also_where_nonfinite_ones_are_zeroed():
    tx = shrewjax.skip_nonfinite(optax.identity(), max_consecutive=1, at_limit="zero_nonfinite")
    updates, _ = tx.update({"a": 2.0, "b": np.nan}, tx.init({"a": 1.0, "b": 1.0}))
    assert (float(updates["a"]), float(updates["b"])) == (2, 0)


def test_the_callers_loss_does_not_become_a_part_of_the_state():
    # If outside of jit the two shared a buffer, a step that donates the state would delete the caller's loss.
    tx = shrewjax.skip_on_spike(optax.identity(), monitor="value")
    grads, loss = jnp.ones(2), jnp.float32(0.5)
    _, state = tx.update(grads, tx.init(grads), value=loss)
    assert state.measured.unsafe_buffer_pointer() != loss.unsafe_buffer_pointer()
