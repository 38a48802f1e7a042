"""Units that are spread over devices are those of one device."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, quick_jit
from sharded import SPECS, place
from steps import agc, f32

import shrewjax

P = jax.P


SHAPES = {"rows": (16, 4), "columns": (3, 8), "replicated": (5, 2)}

MAPPED = {
    "agc": lambda **k: shrewjax.adaptive_grad_clip(0.05, unit="tensor", **k),
    "block_rms": lambda **k: shrewjax.clip_by_block_rms(0.5, **k),
    "percentile": lambda **k: shrewjax.clip_by_norm_percentile(30.0, **k),
    "zscore": lambda **k: shrewjax.clip_by_norm_zscore(0.1, warmup_steps=1, **k),
    "leaf_ema": lambda **k: shrewjax.clip_by_leaf_norm_ema(warmup_steps=1, **k),
}


def trees(scale=1.0):
    for seed in range(3):
        rng = np.random.default_rng(seed)
        yield {k: f32(scale * np.exp(rng.normal()) * rng.normal(size=s)) for k, s in SHAPES.items()}


def mapped_mesh():
    return jax.make_mesh((4, 2), ("data", "model"))


@cache
def on_one_device_and_mapped(rule):
    tx = MAPPED[rule]()
    mapped = jax.shard_map(tx.update, mesh=mapped_mesh(), in_specs=(SPECS, P(), SPECS), out_specs=(SPECS, P()))
    return tx, quick_jit(tx.update), quick_jit(mapped)


@pytest.mark.parametrize("scale", [1.0, 1e25])
@pytest.mark.parametrize("rule", MAPPED)
def test_shard_map_gives_the_unsharded_answer(rule, scale):
    tx, update, mapped = on_one_device_and_mapped(rule)
    params, *gradients = trees(scale)
    state, mesh = tx.init(params), mapped_mesh()
    mapped_state = place(state, mesh, jax.tree.map(lambda _: P(), state))  # as updates leave it: one program
    for g in gradients:
        expected, state = update(g, state, params)
        updates, mapped_state = mapped(place(g, mesh), mapped_state, place(params, mesh))
        assert_close(updates, expected, rtol=1e-5)
        assert_close(mapped_state, state, rtol=1e-5)


# Units are columns: divided on devices, whole on one of them, or all of them on each.
UNIT_SHAPES = {"divided": (16, 4), "whole": (3, 8), "both": (8, 2), "everywhere": (5, 2)}

UNIT_SPECS = {"divided": P("x"), "whole": P(None, "y"), "both": P("x", "y"), "everywhere": P()}


def spec_of(name, leaf):
    return UNIT_SPECS[name[2:-2]]


def unit_rules(**sharded_over):
    return {
        "agc": shrewjax.adaptive_grad_clip(1.0, **sharded_over),
        "block_rms": shrewjax.clip_by_block_rms(1.0, batch_axes=1, **sharded_over),
        "leaf_ema": shrewjax.clip_by_leaf_norm_ema(batch_axes=1, warmup_max_norm=2.0, **sharded_over),
    }


def all_updates(rules):
    return lambda g, states, w: {name: tx.update(g, states[name], w) for name, tx in rules.items()}


@cache
def units_on_one_device():
    rng = np.random.default_rng(0)
    g, w = ({k: f32(np.exp(rng.normal(size=s)) * rng.normal(size=s)) for k, s in UNIT_SHAPES.items()} for _ in range(2))
    g["whole"][:, 0] *= f32(1e25)  # so that one device alone has to measure again
    arguments = g, {name: tx.init(w) for name, tx in unit_rules().items()}, w
    return arguments, quick_jit(all_updates(unit_rules()))(*arguments)


def unit_mesh():
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_units_spread_over_devices_each_leaf_in_its_own_way_are_those_of_one_device(check_vma):
    (g, start, w), expected = units_on_one_device()
    rules = unit_rules(sharded_over=spec_of)
    state_specs = {k: jax.tree.map(lambda _: P(), start[k]) for k in start}
    of_units = {k: P(*spec[1:]) for k, spec in UNIT_SPECS.items()}
    state_specs["leaf_ema"] = state_specs["leaf_ema"]._replace(norm_ema=of_units)
    mapped = jax.shard_map(
        all_updates(rules),
        mesh=unit_mesh(),
        in_specs=(UNIT_SPECS, state_specs, UNIT_SPECS),
        out_specs={k: (UNIT_SPECS, state_specs[k]) for k in rules},
        check_vma=check_vma,
    )
    assert_close(quick_jit(mapped)(g, start, w), expected, rtol=1e-5)
    assert 0 < float(expected["agc"][1].clipped_fraction) < 1
    assert 0 < float(expected["block_rms"][1].clipped_fraction) < 1


@pytest.mark.parametrize(
    ("spec", "names", "check_vma"),
    [(P(None, "x"), (), True), (P("x"), "x", True), (P("x"), ("x", "y"), False), (P(), P(), False)],
    ids=["whole, tracked", "divided, tracked", "divided, untracked", "everywhere, untracked"],
)
def test_names_of_mapped_axes_do_for_units_that_are_alike(spec, names, check_vma):
    g, w = (f32(np.exp(np.random.default_rng(i).normal(size=(16, 8)))) for i in range(2))
    tx = shrewjax.adaptive_grad_clip(1.0, sharded_over=names)
    mapped = jax.shard_map(
        lambda g, w: tx.update(g, tx.init(w), w),
        mesh=jax.make_mesh((8, 1), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2),
        in_specs=(spec, spec),
        out_specs=(spec, P()),
        check_vma=check_vma,
    )
    updates, state = quick_jit(mapped)(g, w)
    np.testing.assert_allclose(updates, agc(g, w, 0, clipping=1.0), rtol=1e-5)
    ratios = np.linalg.norm(np.float64(g), axis=0) / np.linalg.norm(np.float64(w), axis=0)
    assert float(state.ratio_max) == pytest.approx(ratios.max(), rel=1e-5)
    assert float(state.clipped_fraction) == np.mean(ratios > 1)
    assert 0 < np.mean(ratios > 1) < 1


@pytest.mark.parametrize("rule", unit_rules())
@pytest.mark.parametrize(
    ("sharded_over", "check_vma", "message"),
    [
        (None, True, r"leaf \['whole'\].*several units.* sharded over 'y': devices may hold.*Pass sharded_over="),
        (None, False, r"leaf \['whole'\].*several units.*over 'x', 'y' inside shard_map.check_vma=False"),
        ((), False, r"over 'x', 'y' inside.*sharded_over=jax\.P\(\)"),
        (("y",), False, r"sharded over 'x' inside"),
        (lambda name, leaf: P(None, "x"), True, r"P\(None, 'x'\) is not how leaf \['whole'\] is sharded.*\('y',\)"),
        (P(), True, r"P\(\) is not how leaf \['whole'\] is sharded"),
        (P(None, None, "y"), True, r"more entries than leaf \['whole'\] of shape \(3, 4\) has dimensions"),
        (lambda name, leaf: spec_of, True, r"sharded_over must return .*got the function"),
    ],
    ids=["tracked", "untracked", "no names", "too few names", "wrong", "everywhere", "too long", "function"],
)
def test_units_on_devices_that_nothing_tells_of_are_an_error(rule, sharded_over, check_vma, message):
    tx = unit_rules(sharded_over=sharded_over)[rule]
    mapped = jax.shard_map(
        lambda g: tx.update(g, tx.init(g), g)[0],
        mesh=unit_mesh(),
        in_specs=({"whole": P(None, "y")},),
        out_specs={"whole": P(None, "y")},
        check_vma=check_vma,
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mapped, {"whole": jnp.ones((3, 8))})


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_stacked_layers_sharded_along_the_stack(axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType[axis_type],))
    place = lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, P("data")))  # noqa: E731
    tx = shrewjax.clip_by_leaf_norm_ema(warmup_steps=1, batch_axes=0)
    gradients = [f32(np.exp(np.random.default_rng(i).normal(size=(8, 1))) * np.ones((8, 3))) for i in range(3)]
    state, sharded_state = tx.init(gradients[0]), tx.init(place(gradients[0]))
    update = quick_jit(tx.update)
    for g in gradients:
        expected, state = update(g, state)
        updates, sharded_state = update(place(g), sharded_state)
        assert_close(updates, expected, rtol=1e-6)
        assert_close(sharded_state, state, rtol=1e-6)


BY_UNIT = {
    "agc": lambda: shrewjax.adaptive_grad_clip(0.1),
    "leaf_norm": lambda: shrewjax.clip_by_leaf_norm(0.5, batch_axes=0),
    "block_rms": lambda: shrewjax.clip_by_block_rms(0.5, batch_axes=0),
    "leaf_ema": lambda: shrewjax.clip_by_leaf_norm_ema(1.5, batch_axes=0, warmup_steps=0),
}


@pytest.mark.parametrize("specs", [(P(None, "model"), P("model", None), P()), (P("data"), P("data"), P("model"))])
@pytest.mark.parametrize("rule", BY_UNIT)
def test_units_on_an_explicit_mesh_are_those_of_one_device(rule, specs):
    """Leaves of one shape, whose units lie on devices in different ways. A zero leaf is read again."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    tx, rng = BY_UNIT[rule](), np.random.default_rng(0)
    grads = [f32(rng.normal(size=(8, 8)) * scale) for scale in (3, 0, 1e25)]
    params = [np.ones((8, 8), np.float32)] * 3
    update = quick_jit(tx.update)
    expected, state = update(grads, tx.init(params), params)
    placed = place(params, mesh, list(specs))
    updates, on_devices = update(place(grads, mesh, list(specs)), tx.init(placed), placed)
    assert_close(updates, expected, rtol=1e-6, atol=0)
    assert_close(on_devices, state, rtol=1e-6, atol=0)


def test_a_replicated_leaf_of_several_units_stays_replicated_beside_one_that_is_not():
    def axes_of(name, leaf):
        return P("data") if "rows" in name else P()

    tx = shrewjax.clip_by_leaf_norm_ema(1.5, batch_axes=1, sharded_over=axes_of)
    specs = {"rows": P("data"), "replicated": P()}
    grads = {"rows": f32(np.ones((8, 3))), "replicated": f32(np.ones((4, 3)))}
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    step = jax.shard_map(lambda g: tx.update(g, tx.init(g), g)[0], mesh=mesh, in_specs=(specs,), out_specs=specs)
    assert_close(quick_jit(step)(grads), tx.update(grads, tx.init(grads), grads)[0], rtol=1e-6, atol=0)


def test_parameter_that_differs_between_devices_more_than_its_gradient_is_an_error():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = shrewjax.adaptive_grad_clip(0.1, sharded_over=())
    step = jax.shard_map(
        lambda g, w: tx.update(g, tx.init(w), w)[0], mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
    )
    with pytest.raises(
        ValueError, match=r"parameter leaf .* may differ between devices along 'data', but its gradient"
    ):
        jax.eval_shape(step, jnp.ones((2, 3)), jnp.ones((16, 3)))
