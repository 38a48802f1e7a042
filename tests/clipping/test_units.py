"""Units that are spread over devices are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, mesh_of, seeming_to_have, thorough
from sharded import SPECS, place
from speed import quick_jit
from steps import adagc, agc, f32

import shrewjax
from shrewjax._clipping.units import find_units
from shrewjax._numerics import reductions

P = jax.P


SHAPES = {"rows": (16, 4), "columns": (3, 8), "replicated": (5, 2)}

MAPPED = {
    "adaptive_grad_clip": shrewjax.adaptive_grad_clip(0.05, axis=lambda name, leaf: tuple(range(leaf.ndim))),
    "clip_by_block_rms": shrewjax.clip_by_block_rms(0.5),
    "clip_by_norm_percentile": shrewjax.clip_by_norm_percentile(30.0),
    "clip_by_norm_zscore": shrewjax.clip_by_norm_zscore(0.1, warmup_steps=1),
    "clip_by_leaf_norm_ema": shrewjax.clip_by_leaf_norm_ema(warmup_steps=1),
}


def trees(scale):
    for seed in range(3):
        rng = np.random.default_rng(seed)
        yield {k: f32(scale * np.exp(rng.normal()) * rng.normal(size=s)) for k, s in SHAPES.items()}


# The next test has AdaGC by default.
@pytest.mark.parametrize("rule", [*list(MAPPED)[:-1], *thorough(list(MAPPED)[-1])])
def test_shard_map_gives_the_unsharded_answer(rule):
    tx, mesh, update = MAPPED[rule], jax.make_mesh((4, 2), ("data", "model")), quick_jit(MAPPED[rule].update)
    specs = SPECS, P(), SPECS
    mapped = quick_jit(jax.shard_map(tx.update, mesh=mesh, in_specs=specs, out_specs=specs[:2]))
    for params, *gradients in map(trees, (1.0, 1e25)):
        state = tx.init(params)
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
    return UNIT_SPECS[name]


def unit_rules(**sharded_over):
    return {
        "agc": shrewjax.adaptive_grad_clip(1.0, **sharded_over),
        "block_rms": shrewjax.clip_by_block_rms(1.0, stacked_axes=1, **sharded_over),
        "leaf_ema": shrewjax.clip_by_leaf_norm_ema(stacked_axes=1, warmup_max_norm=2.0, **sharded_over),
        "leaf_norm": shrewjax.clip_by_leaf_norm(1.0, stacked_axes=1, **sharded_over),
    }


def in_float64(rule, g, w):
    """The first updates of one of these rules, and numbers of the state that it then has."""
    g, w = ({k: np.float64(x) for k, x in tree.items()} for tree in (g, w))
    norms = {k: np.linalg.norm(x, axis=0) for k, x in g.items()}
    if rule == "leaf_ema":  # the start of its history: all gradients together to a norm of 2
        scale = 2 / np.linalg.norm(np.concatenate([*norms.values()]))
        averages = {k: np.where(x > 0, np.maximum(x * scale, 1e-6), 0) for k, x in norms.items()}
        return {k: x * scale for k, x in g.items()}, {"norm_ema": averages}
    by_rule = {
        "agc": lambda x: np.linalg.norm(x, axis=0),
        "block_rms": lambda x: len(x) ** 0.5,
        "leaf_norm": lambda x: 1,
    }
    ratios = {k: norms[k] / by_rule[rule](w[k]) for k in g}
    updates = {k: x / np.maximum(1, ratios[k]) for k, x in g.items()}
    if rule == "leaf_norm":
        return updates, {"grad_norm": norms}
    every_ratio = np.concatenate([*ratios.values()])
    largest = {"agc": "ratio_max", "block_rms": "rms_max"}[rule]
    return updates, {largest: np.max(every_ratio), "clipped_fraction": np.mean(every_ratio > 1)}


def assert_first_step(rule, step, g, w):
    updates, state = step
    expected, numbers = in_float64(rule, g, w)
    assert_close(updates, expected, rtol=1e-5)
    assert_close({name: getattr(state, name) for name in numbers}, numbers, rtol=1e-5)
    assert 0 < numbers.get("clipped_fraction", 0.5) < 1


def unit_mesh():
    return mesh_of(x=4, y=2)


@pytest.mark.parametrize(
    ("rule", "check_vma"),
    [
        ("agc", True),
        ("block_rms", False),
        ("leaf_ema", True),
        *thorough(("agc", False), ("block_rms", True), ("leaf_ema", False)),
    ],
)
def test_units_spread_over_devices_each_leaf_in_its_own_way_are_those_of_one_device(rule, check_vma):
    rng = np.random.default_rng(0)
    g, w = ({k: f32(np.exp(rng.normal(size=s)) * rng.normal(size=s)) for k, s in UNIT_SHAPES.items()} for _ in range(2))
    g["whole"][:, 0] *= f32(1e25)  # so that one device alone has to measure again
    tx, start = unit_rules(sharded_over=spec_of)[rule], unit_rules()[rule].init(w)
    specs_of_state = jax.tree.map(lambda _: P(), start)
    if rule == "leaf_ema":
        specs_of_state = specs_of_state._replace(norm_ema={k: P(*spec[1:]) for k, spec in UNIT_SPECS.items()})
    mapped = jax.shard_map(
        tx.update,
        mesh=unit_mesh(),
        in_specs=(UNIT_SPECS, specs_of_state, UNIT_SPECS),
        out_specs=(UNIT_SPECS, specs_of_state),
        check_vma=check_vma,
    )
    assert_first_step(rule, quick_jit(mapped)(g, start, w), g, w)


@pytest.mark.parametrize(
    ("spec", "names", "check_vma"),
    [
        pytest.param(P(None, "x"), "y", True, id="whole, tracked"),
        pytest.param(P("x"), ("x", "y"), False, id="divided, untracked"),
        pytest.param(P(), P(), False, id="everywhere, untracked"),
    ],
)
def test_names_of_mapped_axes_do_for_units_that_are_alike(spec, names, check_vma):
    g, w = (f32(np.exp(np.random.default_rng(i).normal(size=(16, 8)))) for i in range(2))
    tx = shrewjax.adaptive_grad_clip(1.0, sharded_over=names)
    mapped = jax.shard_map(
        lambda g, w: tx.update(g, tx.init(w), w),
        mesh=mesh_of(x=8, y=1),
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


def test_a_leaf_with_one_long_axis_is_one_unit_where_its_spec_tells_and_an_error_elsewhere():
    g, w = (f32(np.random.default_rng(i).normal(size=(1, 16))) for i in range(2))

    def clipped(sharded_over):
        tx = shrewjax.adaptive_grad_clip(0.5, sharded_over=sharded_over)
        return jax.shard_map(
            lambda g, w: tx.update(g, None, w)[0],
            mesh=mesh_of(x=8),
            in_specs=(P(None, "x"), P(None, "x")),
            out_specs=P(None, "x"),
        )

    updates = quick_jit(clipped(lambda name, leaf: P(None, "x")))(g, w)
    np.testing.assert_allclose(updates, agc(g, w, (0, 1), clipping=0.5), rtol=1e-5)
    with pytest.raises(ValueError, match=r"cannot tell the units of leaf .* shape \(1, 2\) on each device"):
        jax.eval_shape(clipped("x"), g, w)


@pytest.mark.parametrize(
    ("rule", "sharded_over", "check_vma", "message"),
    [
        ("agc", None, True, r"cannot tell how leaf \['whole'\] is sharded over 'y'\. Pass sharded_over="),
        (
            "leaf_norm",
            None,
            False,
            r"cannot tell how leaf \['whole'\] is sharded over 'x', 'y'\. Pass sharded_over=fn",
        ),
        ("leaf_ema", ("y",), False, r"sharded over 'x'\..*sharded_over=fn.* PartitionSpec"),
        ("leaf_norm", P(None, "x"), True, r"P\(None, 'x'\) is not how leaf \['whole'\] is sharded.*\('y',\)"),
        ("agc", P(), True, r"P\(\) is not how leaf \['whole'\] is sharded"),
        ("block_rms", P(None, None, "y"), True, r"more entries than leaf \['whole'\] of shape \(3, 4\) has dimensions"),
        ("leaf_ema", lambda name, leaf: spec_of, True, r"sharded_over must return .*got <function"),
    ],
    ids=["tracked", "untracked", "too few names", "wrong", "everywhere", "too long", "function"],
)
def test_units_on_devices_that_nothing_tells_of_are_an_error(rule, sharded_over, check_vma, message):
    tx, spec = unit_rules(sharded_over=sharded_over)[rule], {"whole": P(None, "y")}
    update = lambda g: tx.update(g, tx.init(g), g)[0]  # noqa: E731
    mapped = jax.shard_map(update, mesh=unit_mesh(), in_specs=(spec,), out_specs=spec, check_vma=check_vma)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(mapped, {"whole": jnp.ones((3, 8))})


@pytest.mark.parametrize("axis_type", ["Auto", *thorough("Explicit")])
def test_stacked_layers_sharded_along_the_stack(axis_type):
    mesh = mesh_of(axis_type, data=8)
    place = lambda x: jax.device_put(x, jax.sharding.NamedSharding(mesh, P("data")))  # noqa: E731
    tx = shrewjax.clip_by_leaf_norm_ema(warmup_steps=1, stacked_axes=0)
    gradients = [f32(np.exp(np.random.default_rng(i).normal(size=(8, 1))) * np.ones((8, 3))) for i in range(3)]
    norms = np.stack([np.linalg.norm(np.float64(g), axis=1) for g in gradients])
    state, update = tx.init(place(gradients[0])), quick_jit(tx.update)
    for g, before, (left, averages) in zip(gradients, norms, adagc(norms, warmup=1), strict=True):
        updates, state = update(place(g), state)
        assert_close(updates, g * (left / before)[:, None], rtol=1e-5)
        assert_close(state.norm_ema, averages, rtol=1e-5)
        assert float(state.clipped_fraction) == pytest.approx(np.mean(left < before))


# Leaves of one shape, whose units lie on devices in different ways.
PLACES = {
    "one whole": {"a": P(None, "model"), "b": P("model", None), "c": P()},
    "all divided": {"a": P("data"), "b": P(None, "data"), "c": P("model")},
}


@pytest.mark.parametrize(
    ("rule", "places"),
    [
        ("agc", "one whole"),
        ("leaf_ema", "all divided"),
        *thorough(("agc", "all divided"), ("leaf_ema", "one whole"), ("block_rms", "one whole")),
        *thorough(("leaf_norm", "all divided")),
    ],
)
def test_units_on_an_explicit_mesh_are_those_of_one_device(rule, places):
    """A zero leaf is read again."""
    mesh = mesh_of("Explicit", data=2, model=4)
    tx, specs, rng = unit_rules()[rule], PLACES[places], np.random.default_rng(0)
    grads = {k: f32(rng.normal(size=(8, 8)) * scale) for k, scale in {"a": 3, "b": 0, "c": 1e25}.items()}
    params = dict.fromkeys(grads, np.ones((8, 8), f32))
    placed = place(params, mesh, specs)
    assert_first_step(rule, quick_jit(tx.update)(place(grads, mesh, specs), tx.init(placed), placed), grads, params)


def test_a_replicated_leaf_of_several_units_stays_replicated_beside_one_that_is_not():
    def axes_of(name, leaf):
        return P("data") if "rows" in name else P()

    tx = shrewjax.clip_by_leaf_norm_ema(1.5, stacked_axes=1, sharded_over=axes_of)
    specs = {"rows": P("data"), "replicated": P()}
    grads = {"rows": f32(np.ones((8, 3))), "replicated": f32(np.ones((4, 3)))}
    mesh = mesh_of(data=8)
    step = jax.shard_map(lambda g: tx.update(g, tx.init(g), g)[0], mesh=mesh, in_specs=(specs,), out_specs=specs)
    expected = jax.tree.map(lambda x: x / 6, grads)  # of norm 6 together, which the start of a history clips to 1
    assert_close(quick_jit(step)(grads), expected, rtol=1e-6, atol=0)


def test_parameter_that_differs_between_devices_more_than_its_gradient_is_an_error():
    mesh = mesh_of(data=8)
    tx = shrewjax.adaptive_grad_clip(0.1, sharded_over=())
    step = jax.shard_map(
        lambda g, w: tx.update(g, tx.init(w), w)[0], mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
    )
    with pytest.raises(ValueError, match=r"parameter leaf .* may differ over 'data', but its gradient"):
        jax.eval_shape(step, jnp.ones((2, 3)), jnp.ones((16, 3)))


@pytest.mark.parametrize(("devices", "joined"), [(1, True), (8, False)])
def test_numbers_of_several_units_are_joined_in_a_process_with_one_device_alone(devices, joined):
    """Holds what `one_device` and `either_world` of conftest.py are for."""
    with seeming_to_have(devices):
        units = find_units({"a": jnp.ones((2, 3)), "b": jnp.ones((2, 3))}, lambda path, leaf: (0,))
        assert (len(units.groups) == 1) == joined
        assert (len(reductions.grouped([jnp.ones(3)] * 32, [()] * 32)) < 32) == joined
