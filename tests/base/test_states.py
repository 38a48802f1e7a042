"""Metrics find what was measured wherever it sits."""

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import TRANSFORMATIONS, lenient
from speed import quick_jit

import shrewjax
from shrewjax._base.states import init_with_notes, note

GRADS = {"a": np.float32([3, 4]), "b": np.float32([0.6])}
NORM = float(np.sqrt(25.36))


def after_one_update(tx):
    params = jax.tree.map(np.zeros_like, GRADS)
    return quick_jit(lenient(tx).update)(GRADS, tx.init(params), params)[1]


def values(metrics):
    return {k: float(v) for k, v in metrics.items()}


COUNTS = ("count", "clipped", "clip_rate")
BEFORE_THE_FIRST = {"count": 0, "clipped": 0, "clip_rate": pytest.approx(np.nan, nan_ok=True)}


def test_names_are_those_of_the_transformations():
    tx = optax.chain(optax.identity(), shrewjax.clip_by_global_norm(1.0), shrewjax.clip_by_leaf_norm(0.6))
    state = after_one_update(tx)
    assert values(quick_jit(shrewjax.metrics)(state)) == {
        "clip_by_global_norm/grad_norm": pytest.approx(NORM),
        "clip_by_global_norm/clip_scale": pytest.approx(1 / NORM),
        **{f"clip_by_global_norm/{name}": 1 for name in COUNTS},
        "clip_by_leaf_norm/grad_norm_max": pytest.approx(5 / NORM),
        "clip_by_leaf_norm/clipped_fraction": 0.5,
        **{f"clip_by_leaf_norm/{name}": 1 for name in COUNTS},
    }
    assert shrewjax.metrics(optax.adam(0.1).init(GRADS)) == {}
    assert values(shrewjax.metrics(shrewjax.clip_by_leaf_norm(1.0).init({}))) == {
        "clip_by_leaf_norm/grad_norm_max": 0,
        "clip_by_leaf_norm/clipped_fraction": 0,
        **{f"clip_by_leaf_norm/{name}": value for name, value in BEFORE_THE_FIRST.items()},
    }


def test_a_second_one_of_a_kind_has_its_path_and_names_stay_when_a_link_is_added():
    clips = [shrewjax.clip_by_global_norm(1.0), shrewjax.clip_by_global_norm(0.5)]
    state = after_one_update(optax.chain(shrewjax.clip_by_value(9.0), *clips))
    found = values(shrewjax.metrics(state[1:]))  # as of a chain of these two
    assert list(found) == [
        "clip_by_global_norm/grad_norm",
        "clip_by_global_norm/clip_scale",
        *[f"clip_by_global_norm/{name}" for name in COUNTS],
        "1/clip_by_global_norm/grad_norm",
        "1/clip_by_global_norm/clip_scale",
        *[f"1/clip_by_global_norm/{name}" for name in COUNTS],
    ]
    assert found["1/clip_by_global_norm/grad_norm"] == pytest.approx(1)
    longer = values(shrewjax.metrics(state))
    assert longer["clip_by_global_norm/grad_norm"] == found["clip_by_global_norm/grad_norm"]


SGD = optax.sgd(0.1, momentum=0.9)
SWITCHED_ON = {
    "leaves of a clip": (
        shrewjax.clip_by_global_norm(1.0),
        shrewjax.clip_by_global_norm(1.0, per_leaf=True),
        "per_leaf",
    ),
    "leaves of a guard": (shrewjax.skip_nonfinite(SGD), shrewjax.skip_nonfinite(SGD, per_leaf=True), "per_leaf"),
    "noise": (shrewjax.accumulate(SGD, 3), shrewjax.accumulate(SGD, 3, noise_decay=0.5), "noise_decay"),
    "guard around a window": (
        shrewjax.accumulate(SGD, 3),
        shrewjax.skip_nonfinite(shrewjax.accumulate(SGD, 3)),
        "wrapper",
    ),
    "guard around Optax": (SGD, shrewjax.skip_on_spike(SGD), "wrapper"),
    "window around Optax": (SGD, shrewjax.accumulate(SGD, 1), "wrapper"),
}


@pytest.mark.parametrize("name", SWITCHED_ON)
def test_what_is_switched_on_in_a_running_job_names_the_line_by_which_the_job_goes_on(name):
    old, tx, argument = SWITCHED_ON[name]
    params, expected = jax.tree.map(jnp.asarray, GRADS), []
    update = quick_jit(lenient(old).update)
    state = old.init(params)
    for _ in range(8):
        updates, state = update(GRADS, state, params)
        expected.append(updates)
    state = old.init(params)
    for _ in range(4):  # in mid-window
        _, state = update(GRADS, state, params)
    with pytest.raises(ValueError, match=argument) as raised:
        tx.update(GRADS, state, params)
    message = str(raised.value)
    assert len(message) < 700
    (line,) = re.findall(r"(state\._replace.*|tx\.init.*), where", message)
    names = {"tx": tx, "params": params, "state": state, "jnp": jnp}
    state = eval(line, names)
    assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
    update = quick_jit(lenient(tx).update)
    for i in range(4):
        updates, state = update(GRADS, state, params)
        for x, y in zip(jax.tree.leaves(updates), jax.tree.leaves(expected[4 + i]), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)
        if argument == "noise_decay":  # the open window has no estimate. The next one closes later
            assert int(state.noise.recorded) == 0
    if argument == "noise_decay":
        _, state = update(GRADS, state, params)
        assert int(state.noise.recorded) == 1


def test_several_in_groups_have_the_groups_names_and_one_alone_has_none():
    def grouped(**rules):
        return optax.partition(rules, {"a": "body", "b": "head"})

    def norms(tx):
        found = values(shrewjax.metrics(after_one_update(tx)))
        return {name.removesuffix("/grad_norm"): x for name, x in found.items() if name.endswith("grad_norm")}

    clip = shrewjax.clip_by_global_norm(100.0)
    both = {"body/clip_by_global_norm": 5, "head/clip_by_global_norm": pytest.approx(0.6)}
    assert norms(grouped(body=clip, head=optax.chain(clip, optax.sgd(0.1)))) == both
    assert norms(grouped(body=clip, head=optax.sgd(0.1))) == {"clip_by_global_norm": 5}
    whole = {"clip_by_global_norm": pytest.approx(NORM)}
    assert norms(optax.chain(grouped(body=clip, head=clip), clip)) == both | whole
    assert norms(shrewjax.accumulate(grouped(body=clip, head=clip), 1)) == both
    twice = {"body/clip_by_global_norm": 5, "inner_states/body/inner_state/1/clip_by_global_norm": 5}
    assert norms(grouped(body=optax.chain(clip, clip), head=optax.sgd(0.1))) == twice
    inside = optax.partition({"x": clip, "y": optax.sgd(0.1)}, {"a": "x", "b": "y"})
    assert norms(grouped(body=inside, head=clip)) == {
        "body/x/clip_by_global_norm": 5,
        "head/clip_by_global_norm": pytest.approx(0.6),
    }


class MyRuleState(NamedTuple):
    shown: jax.Array
    inner_state: object

    def metrics(self):
        return {"shown": self.shown}


def test_states_of_users_take_part_and_those_inside_them_too():
    inner_state = shrewjax.clip_by_global_norm(1.0).init(GRADS)
    found = values(shrewjax.metrics((MyRuleState(jnp.ones(()), inner_state), optax.EmptyState())))
    of_clip = {"grad_norm": 0, "clip_scale": 1, **BEFORE_THE_FIRST}
    assert found == {"my_rule/shown": 1, **{f"clip_by_global_norm/{name}": value for name, value in of_clip.items()}}


@pytest.mark.parametrize(
    ("wrap", "norm"),
    [
        (lambda tx: optax.chain(optax.identity(), optax.chain(tx)), NORM),
        (lambda tx: optax.named_chain(("clip", tx)), NORM),
        (lambda tx: optax.masked(tx, {"a": True, "b": False}), 5),
        (lambda tx: optax.partition({"x": tx}, {"a": "x", "b": "x"}), NORM),
        (lambda tx: optax.apply_if_finite(tx, 3), NORM),
        (lambda tx: shrewjax.accumulate(tx, 1), NORM),
        (lambda tx: shrewjax.skip_nonfinite(shrewjax.skip_on_spike(tx)), NORM),
        (lambda tx: optax.inject_hyperparams(lambda rate: optax.chain(tx, optax.scale(rate)))(rate=1.0), NORM),
        (lambda tx: shrewjax.accumulate(optax.chain(tx, optax.sgd(0.1)), 1), NORM),
        (lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(), NORM),
    ],
    ids=[
        "chain",
        "named_chain",
        "masked",
        "partition",
        "apply_if_finite",
        "accumulate",
        "guards",
        "inject_hyperparams",
        "accumulate-chain",
        "MultiSteps",
    ],
)
def test_found_inside_wrappers(wrap, norm):
    def update(updates, state, params=None):
        return updates, MyRuleState(optax.tree.norm(updates), state.inner_state)

    measured = optax.GradientTransformation(lambda params: MyRuleState(jnp.zeros(()), ()), update)
    assert values(shrewjax.metrics(after_one_update(wrap(measured))))["my_rule/shown"] == pytest.approx(norm)


def test_window_is_reported_and_inner_values_date_from_the_last_window_that_closed():
    params = jnp.zeros(2)
    tx = shrewjax.accumulate(shrewjax.clip_by_global_norm(1.0), 2, nonfinite="drop_micro_batch")
    state, seen = tx.init(params), []
    for g in ([3.0, 4.0], [3.0, 4.0], [jnp.nan, 1.0]):
        _, state = tx.update(jnp.array(g), state, params, weight=3)
        seen.append(values(shrewjax.metrics(state)))
    expected = {
        "accumulate/micro_step": [1, 0, 1],
        "accumulate/windows": [0, 1, 1],
        "accumulate/applied": [0, 1, 0],
        "accumulate/weight_sum": [3, 0, 0],
        "accumulate/weight": [0, 6, 6],
        "accumulate/dropped": [0, 0, 1],
        "accumulate/window_bad": [0, 0, 0],
        "clip_by_global_norm/grad_norm": [0, 5, 5],
    }
    for name, want in expected.items():
        assert [s[name] for s in seen] == want, name


def test_under_jit_and_vmap():
    tx = optax.chain(shrewjax.clip_by_global_norm(1.0), shrewjax.clip_by_leaf_norm(0.9))

    @quick_jit
    @jax.vmap
    def norms(g):
        return shrewjax.metrics(tx.update({"a": g, "b": 0 * g}, tx.init({"a": g, "b": g}))[1])

    found = norms(np.float32([[3, 4], [0.3, 0.4]]))
    np.testing.assert_allclose(found["clip_by_global_norm/grad_norm"], [5, 0.5], rtol=1e-6)
    np.testing.assert_allclose(found["clip_by_leaf_norm/grad_norm_max"], [1, 0.5], rtol=1e-6)
    np.testing.assert_allclose(found["clip_by_leaf_norm/clipped_fraction"], [0.5, 0])


def test_host_driven_window():
    window = shrewjax.GradAccumulator(2)
    state = window.add(window.init(jnp.zeros(2)), jnp.ones(2), weight=5)
    expected = {
        "micro_step": 1,
        "windows": 0,
        "weight_sum": 5,
        "window_bad": 0,
        "dropped": 0,
        "value": np.inf,
        "weight": 0,
    }
    assert values(shrewjax.metrics(state)) == {f"grad_accumulator/{k}": v for k, v in expected.items()}


def test_percentile_clips_show_their_bound_and_what_they_clipped():
    grads = {"a": np.float32([1, 2, 3]), "b": np.float32([10, 20, 60])}
    for scope, bound, fraction in (("global", 6.5, 0.5), ("leaf", 20.0, 2 / 6)):
        tx = shrewjax.clip_by_percentile(50, scope=scope)
        assert values(quick_jit(lambda g, tx=tx: shrewjax.metrics(tx.update(g, tx.init(g))[1]))(grads)) == {
            "clip_by_percentile/bound": bound,
            "clip_by_percentile/clipped_fraction": np.float32(fraction),
        }


@pytest.mark.parametrize(
    "make",
    [lambda: shrewjax.clip_by_global_norm(1.0), lambda: optax.adam(1e-3), lambda: optax.MultiSteps(optax.sgd(1.0), 2)],
    ids=["ours", "Optax's", "MultiSteps"],
)
def test_metrics_of_a_transformation_is_an_error(make):
    with pytest.raises(
        ValueError,
        match=r"^opt_state must be a state, got a transformation\. Pass what tx\.init or tx\.update returned",
    ):
        shrewjax.metrics(make())


@pytest.mark.parametrize("state", [(), None, {}, optax.adam(1e-3).init(GRADS), jnp.zeros(3)], ids=lambda s: type(s))
def test_metrics_of_a_state_without_measurements_is_empty(state):
    assert shrewjax.metrics(state) == {}


@pytest.mark.parametrize("wrap", [lambda tx: tx, lambda tx: optax.chain(optax.identity(), tx)], ids=["alone", "chain"])
def test_a_window_inside_one_of_optax_is_an_error_where_both_states_are_seen(wrap):
    window = wrap(shrewjax.accumulate(optax.sgd(1.0), 4))
    state = optax.MultiSteps(window, 4).init(GRADS)
    for look in (shrewjax.metrics, lambda state: shrewjax.check_window(state, 4)):
        with pytest.raises(
            ValueError, match=r"^opt_state has a window of accumulate inside .*multiply the accum_steps$"
        ):
            look(state)
        look(window.init(GRADS))
    assert shrewjax.metrics(optax.MultiSteps(shrewjax.clip_by_global_norm(1.0), 4).init(GRADS))


def test_metrics_of_masked_parameters_in_an_nnx_optimizer():
    """The variable of a masked parameter holds a node without leaves."""
    mask = nnx.State({"kernel": True, "bias": False})
    tx = optax.masked(optax.chain(shrewjax.clip_by_leaf_norm(1.0), optax.adam(0.1)), mask)
    optimizer = nnx.Optimizer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), tx, wrt=nnx.Param)
    assert list(shrewjax.metrics(optimizer.opt_state)) == [
        "clip_by_leaf_norm/grad_norm_max",
        "clip_by_leaf_norm/clipped_fraction",
        *[f"clip_by_leaf_norm/{name}" for name in COUNTS],
    ]


def test_notes_of_an_init_reach_the_innermost_caller_that_asks_and_no_other():
    def init(params):
        note(params, kind="inner")
        return params

    def asking(params):
        state, noted = init_with_notes(init, params)
        assert noted(state) == {"kind": "inner"}
        return (state,)

    def failing(params):
        init(params)
        raise KeyError

    array = jnp.zeros(())
    note(array, kind="nobody asks")
    state, noted = init_with_notes(asking, array)
    assert state == (array,)
    assert noted(array) is None
    with pytest.raises(KeyError):
        init_with_notes(failing, array)
    state, noted = init_with_notes(jax.jit(init), array)  # an array of the trace, not of the state
    assert noted(state) is None


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_metrics_outside_of_jit_send_nothing_to_the_device(name):
    """A training loop that forbids transfers calls `metrics` on its state."""
    state = TRANSFORMATIONS[name]().init({"w": jnp.ones(2)})
    with jax.transfer_guard("disallow"):
        found = shrewjax.metrics(state)
    assert found or name == "clip_by_value"


@pytest.mark.parametrize(
    "make",
    [
        lambda: shrewjax.clip_by_global_norm(1.0, per_leaf=True),
        lambda: shrewjax.accumulate(optax.sgd(1.0), 2, noise_decay=0.5),
        lambda: shrewjax.skip_nonfinite(optax.sgd(1.0), per_leaf=True),
    ],
    ids=["leaves", "noise", "guard"],
)
def test_optional_metrics_outside_of_jit_send_nothing_to_the_device(make):
    state = make().init({"w": jnp.ones(2)})
    with jax.transfer_guard("disallow"):
        assert shrewjax.metrics(state)
