"""Data parallel training with the sums kept on each device: the trajectory of one device, one all-reduce a window."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import MAPPED, TRANSFORMATIONS, assert_close, bits, lenient, mesh_of, own_params, placed, thorough
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from speed import quick_jit, users_jit

import shrewjax

ROWS, INPUTS, OUTPUTS = 16, 8, 3
PARAMS = {"w": np.linspace(-1, 1, INPUTS * OUTPUTS, dtype="f").reshape(INPUTS, OUTPUTS), "b": np.zeros(OUTPUTS, "f")}
SGD = lenient(optax.sgd(0.1))
ADAM = lenient(optax.adam(0.01))


def micro_batches(n, seed=0):
    """Inputs, targets, and which rows count: uneven ones."""
    rng = np.random.default_rng(seed)
    for _ in range(n):
        yield (
            rng.normal(size=(ROWS, INPUTS)).astype("f"),
            rng.normal(size=(ROWS, OUTPUTS)).astype("f"),
            (rng.uniform(size=ROWS) < 0.7).astype("f"),
        )


def summed_loss(w, b, x, y, counts):
    """The squares of all rows that count; of others, whatever they hold, nothing."""
    errors = jnp.where(counts[:, None] > 0, x @ w + b[None] - y, 0)
    return jnp.sum(errors * errors)


def one_device(tx, batches):
    """The parameters and the state after each micro-batch."""

    @quick_jit
    def step(params, state, x, y, counts):
        n = jnp.sum(counts)
        grads = jax.grad(lambda p: summed_loss(p["w"], p["b"], x, y, counts) / n)(params)
        return shrewjax.apply_gradients(tx, grads, state, params, weight=n)

    params, state = PARAMS, tx.init(PARAMS)
    for batch in batches:
        params, state = step(params, state, *batch)
        yield jax.device_get(params), state


def large_batches(inner, accum_steps, batches):
    """The parameters after each micro-batch: every window one large batch, its gradient by hand, in float64."""
    params, state, update = PARAMS, inner.init(PARAMS), quick_jit(inner.update)
    for i in range(0, len(batches), accum_steps):
        x, y, counts = (np.concatenate(parts) for parts in zip(*batches[i : i + accum_steps], strict=True))
        errors = 2 * (x.astype(np.float64) @ params["w"] + params["b"] - y) * counts[:, None] / counts.sum()
        grads = {"w": np.float32(x.T @ errors), "b": np.float32(errors.sum(axis=0))}
        yield from [params] * (accum_steps - 1)
        updates, state = update(grads, state, params)
        params = jax.tree.map(np.add, params, jax.device_get(updates))
        yield params


SHARDED = {"w": P("fsdp"), "b": P()}


def mapped_step(tx, mesh, specs, check_vma=True):
    """Parameters sharded over "fsdp", batches over both axes; gradients are local along "data"."""

    def step(params, state, x, y, counts):
        n = jax.lax.psum(jnp.sum(counts), "fsdp")
        own = own_params(params, "data") if check_vma else params

        def loss(p):
            return summed_loss(jax.lax.all_gather(p["w"], "fsdp", tiled=True), p["b"], x, y, counts) / n

        grads = jax.grad(loss)(own)
        if not check_vma:  # untracked, what is replicated has to be summed by hand
            grads["b"] = jax.lax.psum(grads["b"], "fsdp")
        return shrewjax.apply_gradients(tx, grads, state, params, weight=n)

    rows = P(("data", "fsdp"))
    return jax.shard_map(
        step, mesh=mesh, in_specs=(SHARDED, specs, rows, rows, rows), out_specs=(SHARDED, specs), check_vma=check_vma
    )


def many_devices(tx, batches, mesh, check_vma=True):
    params = placed(PARAMS, mesh, SHARDED)
    state = tx.init(params)
    step = quick_jit(mapped_step(tx, mesh, shrewjax.state_specs(state), check_vma), donate_argnums=(0, 1))
    for batch in batches:
        params, state = step(params, state, *batch)
        yield jax.device_get(params), state


def inner_of(name, mapped):
    if name == "accumulate":
        return SGD
    return optax.chain((MAPPED if mapped else TRANSFORMATIONS)[name](), SGD)


# One that counts all elements, one by unit, a guard around a clip by norm, and SGD alone; `test_processes.py` has the
# z-score.
OF_EACH_KIND = "clip_by_percentile", "adaptive_grad_clip", "skip_on_spike"


@pytest.mark.parametrize("name", ["accumulate", *thorough(*OF_EACH_KIND)])
def test_trajectory_is_that_of_one_device(name):
    batches = list(micro_batches(24))
    expected = large_batches(inner_of(name, False), 3, batches)
    tx = shrewjax.accumulate(inner_of(name, True), 3, sum_over="data")
    results = enumerate(many_devices(tx, batches, mesh_of(data=2, fsdp=4)), start=1)
    for (i, (params, state)), alone in zip(results, expected, strict=True):
        assert_close(params, alone, rtol=1e-5, atol=1e-6)
        assert int(state.windows) == i // 3


@pytest.mark.thorough
@pytest.mark.parametrize("nonfinite", ["drop_micro_batch", "drop_window", "extend_window"])
@pytest.mark.parametrize("check_vma", [True, False], ids=["tracked", "untracked"])
def test_one_bad_shard_makes_the_micro_batch_bad_on_every_device(nonfinite, check_vma):
    batches = list(micro_batches(8))
    batches[3][0][5, 0], batches[3][2][5] = np.nan, 1
    batches[5][2][:8] = 0  # on half of the devices no row counts: 0 / 0, which weighs nothing and is not bad
    expected = one_device(shrewjax.accumulate(SGD, 2, nonfinite=nonfinite), batches)
    tx = shrewjax.accumulate(SGD, 2, sum_over="data", nonfinite=nonfinite)
    results = many_devices(tx, batches, mesh_of(data=2, fsdp=4), check_vma)
    for (params, state), (alone, alone_state) in zip(results, expected, strict=True):
        assert_close(params, alone, rtol=1e-5, atol=1e-6)
        for field in ("micro_step", "windows", "applied", "window_bad", "dropped"):
            assert bits(getattr(state, field)) == bits(getattr(alone_state, field)), field
    assert int(state.dropped) == 1


@pytest.mark.parametrize("nonfinite", ["drop_micro_batch", *thorough("drop_window", "extend_window")])
def test_a_bad_part_of_a_sharded_gradient_makes_the_micro_batch_bad_on_every_device(nonfinite):
    """Without `sum_over`: the parameter is sharded, and gradients are reduced. Against whole arrays."""
    params = {"whole": jnp.ones(3), "sharded": jnp.arange(16.0)}
    tx = shrewjax.accumulate(SGD, 2, nonfinite=nonfinite)
    state = tx.init(params)
    of_params, of_state = (
        jax.tree.map(lambda x: P("fsdp") if x.shape == (16,) else P(), tree) for tree in (params, state)
    )
    in_specs = of_params, of_state, of_params
    step = partial(shrewjax.apply_gradients, tx)
    mapped = jax.shard_map(
        lambda params, state, grads: step(grads, state, params),
        mesh=mesh_of(fsdp=8),
        in_specs=in_specs,
        out_specs=(of_params, of_state),
    )
    found, expected = (params, state), (params, state)
    on_devices, alone = quick_jit(mapped), quick_jit(step)
    for k in range(4):
        grads = {"whole": jnp.full(3, 1.0 + k), "sharded": jnp.full(16, 1.0 + k)}
        if k == 1:
            grads["sharded"] = grads["sharded"].at[5].set(jnp.nan)
        found = on_devices(*found, grads)
        expected = alone(grads, *expected[::-1])
        assert bits(found) == bits(expected)


def test_a_gradient_that_is_bad_on_one_device_drops_its_micro_batch_on_all():
    """The gradient of the root of 0 is infinite, in one part of a sharded parameter. Against whole arrays."""

    def loss(params, x, axis=()):
        return jnp.mean(jax.lax.psum(jnp.sum(jnp.sqrt(x * params[None]), axis=-1), axis))

    x = np.random.default_rng(0).uniform(1, 2, (4, 16)).astype("f")
    x[1, 5] = 0
    options = {"micro_batches": 4, "nonfinite": "drop_micro_batch"}
    expected = quick_jit(shrewjax.accumulated_value_and_grad(loss, **options))(jnp.ones(16), x)
    of_part = shrewjax.accumulated_value_and_grad(partial(loss, axis="fsdp"), **options)
    mapped = jax.shard_map(
        of_part, mesh=mesh_of(fsdp=8), in_specs=(P("fsdp"), P(None, "fsdp")), out_specs=(P(), P("fsdp"))
    )
    assert_close(quick_jit(mapped)(jnp.ones(16), x), expected, rtol=1e-5)
    assert np.isfinite(expected[1]).all()


@pytest.mark.parametrize("ord", [1, 3, 5, np.inf])
def test_leaf_norms_of_any_order_have_leaves_that_devices_share_beside_their_own(ord):
    """With `sharded_over=()`, each device clips its own part."""
    grads = {"own": np.arange(16.0, dtype="f").reshape(8, 2) - 4, "shared": np.float32([3, -4])}
    specs = {"own": P("data"), "shared": P()}
    tx = shrewjax.clip_by_leaf_norm(1.5, ord=ord, sharded_over=())
    mapped = jax.shard_map(
        lambda g: tx.update(g, tx.init(g))[0], mesh=mesh_of(data=8), in_specs=(specs,), out_specs=specs
    )
    own = [x * min(1, 1.5 / np.linalg.norm(x, ord)) for x in (*grads["own"], grads["shared"])]
    assert_close(quick_jit(mapped)(grads), {"own": np.stack(own[:-1]), "shared": own[-1]}, rtol=1e-6)


@pytest.mark.parametrize("ord", [1, 3])
def test_a_leaf_that_is_large_on_one_device_makes_no_other_wait(ord):
    """Types are not tracked. One device's sum leaves the range, and then all devices read both leaves again."""
    large = np.ones((8, 2), "f")
    large[2] = 1e38 if ord == 1 else 1e30
    grads = {"sharded": np.arange(16, dtype="f").reshape(8, 2) - 4, "own": large * 3}
    tx = shrewjax.clip_by_leaf_norm(1.5, ord=ord, sharded_over=lambda name, _: "data" if "sharded" in name else ())
    clip = lambda g: tx.update(g, tx.init(g))[0]  # noqa: E731
    mapped = jax.shard_map(clip, mesh=mesh_of(data=8), in_specs=P("data"), out_specs=P("data"), check_vma=False)
    clipped = jax.device_get(quick_jit(mapped)(grads))
    norms = [np.linalg.norm(np.float64(x), ord) for x in (clipped["sharded"].ravel(), *clipped["own"])]
    np.testing.assert_allclose(norms, 1.5, rtol=1e-5)


@pytest.mark.parametrize("name", ["clip_by_leaf_norm", "clip_by_leaf_norm_ema"])
def test_states_that_init_in_shard_map_returns_keep_their_types(name):
    """A leaf's norm is that of all its parts, so it is the same on all devices, and so is the state. In a scan."""
    tx = shrewjax.accumulate(getattr(shrewjax, name)(1.5), 2)
    grads = jax.tree.map(lambda x: np.float32(1 + np.arange(x.size)).reshape(x.shape), PARAMS)

    def run(params, grads):
        def step(state, scale):
            return tx.update(jax.tree.map(lambda g: scale * g, grads), state, params)[::-1]

        return jax.lax.scan(step, tx.init(params), jnp.asarray([1.0, 2.0, 0.01, 3.0]))[1]

    mapped = jax.shard_map(
        run, mesh=mesh_of(fsdp=8), in_specs=(SHARDED, SHARDED), out_specs={"w": P(None, "fsdp"), "b": P()}
    )
    assert_close(quick_jit(mapped)(PARAMS, grads), quick_jit(run)(PARAMS, grads), rtol=1e-5)


def all_reduces(text):
    """The element counts of every all-reduce in a compiled program, one list an operation."""
    results = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
    return [
        [int(np.prod([int(n) for n in shape.split(",") if n])) for shape in re.findall(r"\w+\[([\d,]*)\]", result)]
        for result in results
    ]


@pytest.mark.thorough
def test_gradients_cross_the_network_once_a_window():
    mesh, batch = mesh_of(data=8, fsdp=1), next(micro_batches(1))
    whole = placed(PARAMS, mesh, {"w": P(), "b": P()})

    def compiled(tx, state, specs, is_local):
        def step(params, state, x, y, counts):
            p = own_params(params, "data") if is_local else params
            grads = jax.grad(lambda p: summed_loss(p["w"], p["b"], x, y, counts))(p)
            return shrewjax.apply_gradients(tx, grads, state, params)

        mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), specs, *[P("data")] * 3), out_specs=(P(), specs))
        return users_jit(mapped).lower(whole, state, *batch).compile().as_text()

    clip = optax.chain(shrewjax.clip_by_global_norm(1.0), SGD)
    ours = shrewjax.accumulate(clip, 8, sum_over="data")
    state = ours.init(whole)
    text = compiled(ours, state, shrewjax.state_specs(state), is_local=True)
    gradient = INPUTS * OUTPUTS + OUTPUTS
    assert [sum(n) for n in all_reduces(text)] == [
        gradient + 2
    ]  # the weight, `value`; in the branch that closes a window
    assert "all-gather" not in text
    entry = text[text.index("ENTRY") :]
    assert "all-reduce" not in entry
    assert "conditional" in entry

    theirs = lenient(optax.MultiSteps(clip, 8).gradient_transformation())
    text = compiled(theirs, theirs.init(whole), P(), is_local=False)
    assert sum(sum(n) for n in all_reduces(text)) == gradient
    assert "all-reduce" in text[text.index("ENTRY") :]  # on every micro-step


@pytest.mark.thorough
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_plain_jit_takes_a_row_of_gradients_for_each_device(axis_type):
    mesh = mesh_of(axis_type, data=8)
    tx = shrewjax.accumulate(ADAM, 2, sum_over="data")
    params = placed(PARAMS, mesh, {"w": P(), "b": P()})
    state = tx.init(params)
    assert state.gradient_sum["w"].shape == (8, INPUTS, OUTPUTS)
    assert state.gradient_sum["w"].addressable_shards[0].data.shape == (1, INPUTS, OUTPUTS)

    @jax.jit
    def step(params, state, x, y, counts):
        def grads_of(x, y, counts):
            grads = jax.grad(lambda p: summed_loss(p["w"], p["b"], x, y, counts) / jnp.sum(counts))(params)
            return grads, jnp.sum(counts)

        grads, n = jax.vmap(grads_of)(x, y, counts)
        return shrewjax.apply_gradients(tx, grads, state, params, weight=n)

    batches = list(micro_batches(4))
    for batch, alone in zip(batches, large_batches(ADAM, 2, batches), strict=True):
        rows = [placed(a.reshape(8, 2, *a.shape[1:]), mesh, P("data")) for a in batch]
        params, state = step(params, state, *rows)
        assert_close(params, alone, rtol=1e-5, atol=1e-6)
    text = step.lower(params, state, *rows).compile().as_text()
    assert "all-gather" not in text
    assert "all-reduce" in text
    assert "all-reduce" not in text[text.index("ENTRY") :]


@pytest.mark.thorough
def test_pmap_step_that_reduces_its_gradients_itself_passes_no_axis():
    def optimizer(axes=None):
        inner = optax.chain(shrewjax.clip_by_global_norm(0.1, sharded_over=axes), optax.sgd(1.0))
        return shrewjax.skip_nonfinite(shrewjax.accumulate(inner, 2, sum_over=axes), sharded_over=axes)

    def step(tx, params, state, rows):
        grads = jax.lax.pmean(rows, "i")  # of a loss that is linear in the parameters
        return shrewjax.apply_gradients(tx, grads, state, params)

    rows = np.random.default_rng(0).normal(size=(2, 8, 3)).astype("f")
    params = np.zeros((8, 3), "f")
    state = jax.tree.map(lambda a: jnp.stack([a] * 8), optimizer(()).init(jnp.zeros(3)))
    pmapped = jax.pmap(partial(step, optimizer(())), axis_name="i")
    for of_devices in rows:
        params, state = pmapped(params, state, of_devices)
    mean = rows.astype(np.float64).mean((0, 1))
    expected = -mean * min(1, 0.1 / np.linalg.norm(mean))
    np.testing.assert_allclose(params, np.stack([expected] * 8), rtol=1e-5)
    with pytest.raises(ValueError, match=r"Pass (sum|sharded)_over= .* \(\) for none"):
        jax.pmap(partial(step, optimizer()), axis_name="i")(params, state, rows[0])


@pytest.mark.thorough
def test_host_driven_window_adds_alone_and_meets_when_it_is_taken():
    mesh = mesh_of(data=8, fsdp=1)
    window = shrewjax.GradAccumulator(2, sum_over="data")
    state = window.init(placed(np.zeros(3, "f"), mesh, P()))
    specs = shrewjax.state_specs(state)
    on_mesh = partial(jax.shard_map, mesh=mesh)
    add = jax.jit(
        on_mesh(lambda s, g, w: window.add(s, g[0], w[0]), in_specs=(specs, P("data"), P("data")), out_specs=specs)
    )
    take = jax.jit(on_mesh(window.take, in_specs=(specs,), out_specs=(P(), P(), specs)))
    rng = np.random.default_rng(0)
    grads, weights = rng.normal(size=(2, 8, 3)).astype("f"), rng.integers(0, 4, size=(2, 8)).astype("f")
    for g, w in zip(grads, weights, strict=True):
        state = add(state, g, w)
    assert "all-reduce" not in add.lower(state, grads[0], weights[0]).compile().as_text()
    assert bool(window.ready(state))
    average, closed, state = take(state)
    assert bool(closed)
    np.testing.assert_allclose(average, np.average(grads.reshape(16, 3), axis=0, weights=weights.ravel()), rtol=1e-5)
    average, closed, emptied = take(state)
    assert not bool(closed)
    np.testing.assert_array_equal(average, np.zeros(3))
    assert int(emptied.windows) == 1


@pytest.mark.thorough
def test_flush_closes_a_window_over_what_all_devices_have():
    mesh = mesh_of(data=8, fsdp=1)
    tx = shrewjax.accumulate(optax.sgd(1.0), 4, sum_over="data")
    params = placed(np.zeros(3, "f"), mesh, P())
    state = tx.init(params)
    specs = shrewjax.state_specs(state)
    grads = np.arange(24, dtype="f").reshape(8, 3)

    def step(state, params, g):
        _, state = tx.update(g[0], state, params)
        return shrewjax.flush(tx, state, params)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(specs, P(), P("data")), out_specs=(P(), specs))
    params, state = jax.jit(mapped)(state, params, grads)  # begins at 0
    np.testing.assert_allclose(params, -grads.mean(0), rtol=1e-6)
    assert int(state.windows) == 1


@pytest.mark.thorough
def test_a_window_goes_on_bit_for_bit_elsewhere_and_on_half_as_many_devices():
    batches = list(micro_batches(6))
    tx = shrewjax.accumulate(ADAM, 3, sum_over="data")
    expected = list(large_batches(ADAM, 3, batches))
    *_, (params, state) = many_devices(tx, batches[:2], mesh_of(data=8, fsdp=1))
    half = mesh_of(data=4, fsdp=1)
    params = placed(params, half, SHARDED)
    like = tx.init(params)
    state = shrewjax.redistribute(state, like)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, like)
    assert state.gradient_sum["w"].shape == (4, INPUTS, OUTPUTS)
    step = quick_jit(mapped_step(tx, half, shrewjax.state_specs(state)), donate_argnums=(0, 1))
    for batch, alone in zip(batches[2:], expected[2:], strict=True):
        params, state = step(params, state, *batch)
        assert_close(params, alone, rtol=1e-5, atol=1e-6)
    with pytest.raises(
        ValueError, match=r"\['b'\] must be float32 of shape \(4, 4\), as in like, got float32 of shape \(4, 3\)"
    ):
        shrewjax.redistribute(state, tx.init(placed({"w": PARAMS["w"], "b": np.zeros(4, "f")}, half, SHARDED)))
    with pytest.raises(ValueError, match=r"must be float32 of shape .*, as in like, got float32 of shape"):
        shrewjax.redistribute(state, shrewjax.accumulate(ADAM, 3).init(params))
    key = jax.random.key(1)
    assert bits(jax.random.key_data(shrewjax.redistribute(key, jax.random.key(2)))) == bits(jax.random.key_data(key))
    with pytest.raises(ValueError, match="opt_state must have the structure of like"):
        shrewjax.redistribute(state, SGD.init(params))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["clip_by_leaf_norm", "clip_by_leaf_norm_ema"])
def test_state_specs_have_a_mesh_axis_of_size_1(name):
    """As a program for several devices has it on one."""
    mesh = mesh_of(expert=1, tensor=4)
    params = placed({"up": np.ones((4, 8, 8), "f")}, mesh, {"up": P("expert", None, "tensor")})
    state = getattr(shrewjax, name)(1.5, stacked_axes=0).init(params)
    pairs = zip(*map(jax.tree.leaves, (state, shrewjax.state_specs(state))), strict=True)
    assert {spec for x, spec in pairs if x.ndim} == {P("expert")}


@pytest.mark.thorough
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_initial_sums_are_spread_as_the_parameters_wherever_init_is_called(axis_type):
    mesh = mesh_of(axis_type, data=2, fsdp=4)
    params = placed(PARAMS, mesh, SHARDED)
    tx = shrewjax.accumulate(SGD, 2, sum_over="data")
    sums = tx.init(params).gradient_sum
    assert jax.tree.map(lambda x: x.sharding.spec, sums) == {"w": P(("data",), "fsdp"), "b": P(("data",))}
    assert tx.init(params).sum_of_weights.sharding.spec == P(("data",))
    with jax.set_mesh(mesh):
        assert jax.tree.map(np.shape, tx.init(PARAMS)) == jax.tree.map(np.shape, tx.init(params))
        if axis_type == "Explicit":
            jitted, abstract = jax.jit(tx.init)(params), jax.eval_shape(tx.init, params)
            assert [*jitted.gradient_sum["w"].sharding.spec] == ["data", "fsdp", None]
            assert shrewjax.state_specs(abstract).gradient_sum["w"] == P("data", "fsdp", None)
        else:
            with pytest.raises(
                ValueError, match=r"under jit how parameter \['b'\] is sharded\. Call init outside of jit"
            ):
                jax.jit(tx.init)(params)
    with pytest.raises(ValueError, match="must be an array on a device, got ndarray"):
        shrewjax.state_specs(jax.tree.map(np.asarray, tx.init(params)))
    with pytest.raises(ValueError, match="of like must be an array on a device, got array"):
        shrewjax.redistribute(tx.init(params), jax.tree.map(np.asarray, tx.init(params)))


# --- what is refused ------------------------------------------------------------------------------------------------


def traced(f, *args, check_vma=True, specs=None):
    specs = (P("data"),) * len(args) if specs is None else specs
    mapped = jax.shard_map(f, mesh=mesh_of(data=8, fsdp=1), in_specs=specs, out_specs=P(), check_vma=check_vma)
    return jax.eval_shape(mapped, *args)


@pytest.mark.thorough
def test_reduced_gradients_are_not_summed_again():
    tx = shrewjax.accumulate(SGD, 2, sum_over="data")
    f = lambda g: tx.update({"w": jax.lax.psum(g, "data")}, tx.init({"w": jnp.zeros(1)}))[1].micro_step  # noqa: E731
    with pytest.raises(
        ValueError, match=r"gradient leaf \['w'\] is already reduced over 'data' of sum_over=.* leave out sum_over"
    ):
        traced(f, jnp.ones(8))


@pytest.mark.thorough
def test_gradients_reduced_over_one_of_two_axes_name_it_and_sum_over_the_other():
    def f(sum_over, x):
        tx = shrewjax.accumulate(SGD, 2, sum_over=sum_over)
        grad = jax.grad(lambda own: jnp.sum(own * x))(own_params(jnp.zeros(1), "data"))
        return jax.lax.psum(tx.update(grad, tx.init(jnp.zeros(1)))[1].gradient_sum, ("data",))

    specs, x = (P(("data", "fsdp")),), jnp.ones(8)
    message = r"is already reduced over 'fsdp' of sum_over=\('data', 'fsdp'\)\. .* pass sum_over=\('data',\)"
    with pytest.raises(ValueError, match=message):
        traced(partial(f, ("data", "fsdp")), x, specs=specs)
    assert traced(partial(f, ("data",)), x, specs=specs).shape == (1, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("nonfinite", ["propagate", "drop_window"])
def test_untracked_accumulation_wants_to_be_told(nonfinite):
    tx = shrewjax.accumulate(SGD, 2, nonfinite=nonfinite)
    f = lambda g: tx.update(g, tx.init(g))[1].micro_step  # noqa: E731
    with pytest.raises(ValueError, match=r"already summed over 'data', .*Pass sum_over=.*Pass sharded_over=, too"):
        traced(f, jnp.ones(8), check_vma=False)
    told = shrewjax.accumulate(SGD, 2, nonfinite=nonfinite, sum_over=())
    assert traced(lambda g: told.update(g, told.init(g))[1].micro_step, jnp.ones(8), check_vma=False).shape == ()


@pytest.mark.thorough
def test_devices_must_agree_on_when_a_window_closes():
    tx = shrewjax.accumulate(SGD, 2, sum_over="data")
    f = lambda g: tx.update(g, tx.init(jnp.zeros(1)), flush=g[0] > 0)[1].micro_step  # noqa: E731
    with pytest.raises(ValueError, match=r"flush.* may differ over 'data'"):
        traced(f, jnp.ones(8))


@pytest.mark.thorough
def test_devices_must_agree_on_the_weight_of_what_they_share():
    reduced = shrewjax.accumulate(SGD, 2)
    f = lambda g: reduced.update(jnp.zeros(1), reduced.init(jnp.zeros(1)), weight=g[0])[1].micro_step  # noqa: E731
    with pytest.raises(ValueError, match=r"weight must be the same on every device, .* over 'data'"):
        traced(f, jnp.ones(8))
    tx = shrewjax.accumulate(SGD, 2, sum_over="fsdp")
    own = lambda: own_params(jnp.zeros(1), "fsdp")  # noqa: E731
    f = lambda g: tx.update(own(), tx.init(jnp.zeros(1)), weight=g[0])[1].micro_step  # noqa: E731
    with pytest.raises(ValueError, match=r"weight, summed over sum_over, must be the same .* over 'data'"):
        traced(f, jnp.ones(8))


@pytest.mark.thorough
def test_init_says_what_it_misses():
    tx = shrewjax.accumulate(SGD, 2, sum_over="data")
    with pytest.raises(ValueError, match=r"sum_over=\('data',\) needs a mesh .* init under jax\.set_mesh\(mesh\)$"):
        tx.init(PARAMS)
    with pytest.raises(ValueError, match=r"parameter \['w'\] must not be sharded over sum_over=\('data',\)"):
        tx.init(placed(PARAMS, mesh_of(data=8, fsdp=1), {"w": P("data"), "b": P()}))
    with pytest.raises(
        ValueError, match=r"parameter \(the tree itself\) must not be sharded over sum_over=\('data',\)"
    ):
        traced(lambda p: tx.init(p).micro_step, jnp.ones(8))
    for wrong in ({"data"}, P("data"), ("data", "data")):
        with pytest.raises(ValueError, match="sum_over must be a mapped axis, or a tuple of different ones, got"):
            shrewjax.accumulate(SGD, 2, sum_over=wrong)
    both = shrewjax.accumulate(SGD, 2, sum_over=("data", "model"))
    with pytest.raises(ValueError, match=r"contains 'model', which is not mapped\. Name it in axis_names="):
        traced(lambda g: both.init(jnp.zeros(1)).micro_step, jnp.ones(8))


@pytest.mark.thorough
def test_gradients_without_rows_do_not_pass_for_rows():
    tx = shrewjax.accumulate(SGD, 2, sum_over="data")
    state = tx.init(placed(np.zeros((8, 3), "f"), mesh_of(data=8, fsdp=1), P()))
    with pytest.raises(AssertionError, match=r"got \(8, 3\)\. .* have a row for each device"):
        tx.update(jnp.ones((8, 3)), state)
    with pytest.raises(ValueError, match=r"weight must be a real scalar or a real array of shape \(8,\)"):
        tx.update(jnp.ones((8, 8, 3)), state, weight=np.ones(3))
    assert tx.update(jnp.ones((8, 8, 3)), state, weight=np.arange(8))[1].sum_of_weights.tolist() == [*range(8)]


@pytest.mark.thorough
def test_integer_leaves_hold_no_rows_and_get_zero_updates():
    params = placed({"f": np.zeros(2, "f"), "i": np.arange(4)}, mesh_of(data=8, fsdp=1), {"f": P(), "i": P()})
    tx = shrewjax.accumulate(optax.sgd(1.0), 1, sum_over="data")
    grads = {"f": jnp.ones((8, 2)), "i": jnp.ones((8, 4), int)}
    step = quick_jit(lambda p, s, g, w: shrewjax.apply_gradients(tx, g, s, p, weight=w))
    for weight, moved in ((0.0, 0.0), (2.0, -1.0)):
        with jax.numpy_dtype_promotion("standard"):
            after, _ = step(params, tx.init(params), grads, weight)
        assert after["f"].tolist() == [moved] * 2
        assert after["i"].tolist() == [0, 1, 2, 3]


@pytest.mark.thorough
def test_metrics_of_rows_are_scalars():
    tx = shrewjax.accumulate(SGD, 2, sum_over="data")
    found = shrewjax.metrics(tx.init(placed(PARAMS, mesh_of(data=8, fsdp=1), {"w": P(), "b": P()})))
    assert set(found) == {
        f"accumulate/{x}" for x in ("micro_step", "windows", "window_bad", "dropped", "applied", "weight", "value")
    }
    assert all(x.shape == () for x in found.values())


CLIP_ADAMW = optax.chain(shrewjax.clip_by_global_norm(1.0), lenient(optax.adamw(0.01)))


def shardings(*trees):
    """The shardings of all arrays that have an axis."""
    return [x.sharding for x in jax.tree.leaves(trees) if x.ndim]


@pytest.mark.thorough
def test_parameters_stay_whole_and_the_state_in_parts_where_they_are_placed_so():
    mesh, batches = mesh_of(data=8, fsdp=1), list(micro_batches(9))
    whole = NamedSharding(mesh, P())
    replicate = optax.stateless(lambda updates, _: jax.lax.with_sharding_constraint(updates, whole))
    tx = shrewjax.accumulate(optax.chain(CLIP_ADAMW, replicate), 3)
    params = placed(PARAMS, mesh, {"w": P(), "b": P()})
    state = tx.init(placed(PARAMS, mesh, {"w": P("data"), "b": P()}))
    given = shardings(params, state)
    assert [x.spec for x in given].count(P("data")) == 3  # the sum and both moments of one leaf

    @partial(quick_jit, donate_argnums=(0, 1))
    def step(params, state, x, y, counts):
        n = jnp.sum(counts)
        grads = jax.grad(lambda p: summed_loss(p["w"], p["b"], x, y, counts) / n)(params)
        return shrewjax.apply_gradients(tx, grads, state, params, weight=n)

    for batch, alone in zip(batches, large_batches(CLIP_ADAMW, 3, batches), strict=True):
        params, state = step(params, state, *placed(list(batch), mesh, [P("data")] * 3))
        assert_close(params, alone, rtol=1e-5, atol=1e-6)
        assert shardings(params, state) == given
    assert int(state.windows) == 3


@pytest.mark.thorough
def test_step_that_is_manual_over_data_alone_leaves_shards_where_they_are():
    mesh, batches = mesh_of(data=2, fsdp=4), list(micro_batches(9))
    tx = shrewjax.accumulate(CLIP_ADAMW, 3, sum_over="data")
    params = placed(PARAMS, mesh, SHARDED)
    state = tx.init(params)
    given = shardings(params, state)
    specs = shrewjax.state_specs(state, axis_names={"data"})
    assert specs.gradient_sum == {"w": P(("data",), None), "b": P(("data",))}

    def step(params, state, x, y, counts):
        n, own = jnp.sum(counts), own_params(params, "data")
        grads = jax.grad(lambda p: summed_loss(p["w"], p["b"], x, y, counts) / n)(own)
        return shrewjax.apply_gradients(tx, grads, state, params, weight=n)

    rows = P("data")
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs, rows, rows, rows), out_specs=(P(), specs), axis_names={"data"}
    )
    step = quick_jit(mapped, donate_argnums=(0, 1))
    for batch, alone in zip(batches, large_batches(CLIP_ADAMW, 3, batches), strict=True):
        params, state = step(params, state, *placed(list(batch), mesh, [P(("data", "fsdp"))] * 3))
        assert_close(params, alone, rtol=1e-5, atol=1e-6)
        for x, before in zip(shardings(params, state), given, strict=True):
            assert x.is_equivalent_to(before, 3)  # dimensions, at most
    assert int(state.windows) == 3


# --- gradients that nobody reduced, and rows of vmap ------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("sum_over", [None, ()], ids=repr)
def test_gradients_that_are_not_reduced_are_an_error_that_says_so(sum_over):
    tx, window = (make(2, sum_over=sum_over) for make in (partial(shrewjax.accumulate, SGD), shrewjax.GradAccumulator))
    mesh = mesh_of(data=8, fsdp=1)
    own = placed(np.ones((8, 3), "f"), mesh, P("data"))
    for add in (
        lambda grads: tx.update({"w": grads}, tx.init({"w": jnp.zeros((1, 3))}))[1],
        lambda grads: window.add(window.init({"w": jnp.zeros((1, 3))}), {"w": grads}),
    ):
        mapped = jax.shard_map(add, mesh=mesh, in_specs=P("data"), out_specs=P())
        with pytest.raises(ValueError, match=r"\['w'\] may differ over 'data'.*Pass jax\.lax\.pmean.*sum_over="):
            jax.eval_shape(mapped, own)


@pytest.mark.thorough
@pytest.mark.parametrize("inner", [optax.sgd(0.1), optax.trace(0.9)], ids=["parameters", "state"])
@pytest.mark.parametrize("guard", [shrewjax.skip_nonfinite, shrewjax.skip_on_spike])
def test_guards_say_so_too_where_parameters_or_state_would_come_to_differ(guard, inner):
    tx, mesh, params = guard(inner), mesh_of(data=8, fsdp=1), {"w": jnp.ones(3)}

    def step(grads):
        return shrewjax.apply_gradients(tx, {"w": grads[0]}, tx.init(params), params)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P())
    with pytest.raises(
        ValueError, match=r"\['w'\] of .*may differ over 'data'.*Reduce the gradients over 'data'\. Or shard"
    ):
        jax.eval_shape(mapped, placed(np.ones((8, 3), "f"), mesh, P("data")))


@pytest.mark.thorough
@pytest.mark.parametrize("nonfinite", ["propagate", "drop_micro_batch"])
def test_rows_of_vmap_are_devices(nonfinite):
    """Two micro-batches of four rows; one row is NaN, which drops the micro-batch in all of them, or propagates."""
    tx = shrewjax.accumulate(optax.identity(), 3, sum_over="batch", nonfinite=nonfinite)
    rng = np.random.default_rng(0)
    grads, weights = rng.normal(size=(3, 4, 2)).astype("f"), rng.uniform(1, 2, size=(3, 4)).astype("f")
    bad = nonfinite != "propagate"
    if bad:
        grads[1, 2, 0] = np.nan
    mapped = partial(jax.vmap, axis_name="batch")
    state = mapped(tx.init, in_axes=None, axis_size=4)(jnp.zeros(2))
    update = quick_jit(mapped(lambda g, s, w: tx.update(g, s, weight=w)))
    for g, w in zip(grads, weights, strict=True):
        updates, state = update(g, state, w)
    kept = [0, 2] if bad else [0, 1, 2]
    g, w = np.float64(grads[kept]), np.float64(weights[kept])[..., None]
    expected = (w * g).sum((0, 1)) / w.sum()
    np.testing.assert_allclose(updates, np.tile(expected, (4, 1)), rtol=1e-6)
    assert state.dropped.tolist() == [int(bad)] * 4


@pytest.mark.thorough
def test_weights_of_devices_whose_sum_is_out_of_range_make_the_average_nan():
    tx = shrewjax.accumulate(optax.identity(), 1, sum_over="batch")
    state = jax.vmap(tx.init, in_axes=None, axis_size=4, axis_name="batch")(jnp.zeros(2))
    update = jax.vmap(lambda g, s, w: tx.update(g, s, weight=w), axis_name="batch")
    updates, _ = quick_jit(update)(jnp.ones((4, 2)), state, jnp.full(4, 3e37))
    assert np.isnan(updates).all()


EXPERTS_GRADIENTS = [
    {"shared": np.float32(1), "expert": np.where(np.arange(8) == 5, np.nan, 1).astype("f")},
    {"shared": np.float32(3), "expert": np.full(8, 3, "f")},
    {"shared": np.float32(5), "expert": np.full(8, 5, "f")},
]
DECIDED_TOGETHER = {"drop_window": [0, 0, 0, -5], "drop_micro_batch": [0, -3, 0, -5], "extend_window": [0, 0, -4, -5]}


@pytest.mark.parametrize(
    ("nonfinite", "way"), [("drop_window", "shard_map"), *thorough(*((x, "pmap") for x in DECIDED_TOGETHER))]
)
def test_devices_with_parts_of_one_model_decide_together_where_types_do_not_tell(nonfinite, way):
    """Eight experts, one with a NaN. Devices that decide apart would wait forever in the clip inside."""

    def axes(name, _):
        return "ep" if name == "expert" else ()

    inner = optax.chain(shrewjax.clip_by_global_norm(100.0, sharded_over=axes), optax.sgd(1.0))
    tx = shrewjax.accumulate(inner, 2, nonfinite=nonfinite, sum_over=(), sharded_over="ep")

    def train(*grads):
        params = {"shared": jnp.zeros(()), "expert": jnp.zeros(())}
        state, of_calls = tx.init(params), []
        for g in (*grads, grads[-1]):
            g = jax.tree.map(jnp.sum, g)  # a device's part as a scalar
            updates, state = tx.update(g, state, params, flush=len(of_calls) == 3)
            of_calls.append(jnp.stack(jax.tree.leaves(updates)))
        return jnp.stack(of_calls)[None]

    specs = {"shared": P(), "expert": P("ep")}
    if way == "pmap":
        axes_of_rows = ({"shared": None, "expert": 0},) * 3
        found = jax.pmap(train, "ep", in_axes=axes_of_rows)(*EXPERTS_GRADIENTS)[:, 0]
    else:
        mapped = jax.shard_map(train, mesh=mesh_of(ep=8), in_specs=(specs,) * 3, out_specs=P("ep"), check_vma=False)
        found = jax.jit(mapped)(*EXPERTS_GRADIENTS)
    np.testing.assert_allclose(found, np.tile(np.float32(DECIDED_TOGETHER[nonfinite])[:, None], (8, 1, 2)))


@pytest.mark.thorough
def test_micro_batches_of_a_model_in_parts_are_dropped_on_all_its_devices():
    """Eight experts. Expert 5 makes a NaN of the first micro-batch."""

    def loss(params, x):
        return jnp.sum(params["shared"]) * jnp.mean(x[:, 0]) + jnp.sum(params["expert"]) * jnp.mean(x[:, 1])

    step = shrewjax.accumulated_value_and_grad(loss, 2, nonfinite="drop_micro_batch", sum_over=(), sharded_over="ep")
    x = np.full((8, 2, 2), [[1, 1], [3, 3]], "f")  # two examples on each device
    x[5, 0, 1] = np.nan
    mapped = jax.shard_map(
        lambda p, x: jax.tree.map(lambda g: g.reshape(1), step(p, x[0])[1]),
        mesh=mesh_of(ep=8),
        in_specs=({"shared": P(), "expert": P("ep")}, P("ep")),
        out_specs=P("ep"),
        check_vma=False,
    )
    grads = jax.jit(mapped)({"shared": np.ones(1, "f"), "expert": np.ones(8, "f")}, x)
    assert_close(grads, {"shared": np.full(8, 3, "f"), "expert": np.full(8, 3, "f")}, rtol=0)


# One leaf is sharded, and others are whole, as in tensor parallel layers. A function says which, because untracked
# types do not. All clips and guards take the same one.
WHOLE_AND_SHARDED = {
    "kernel": np.float32([[3, 0, -1, 4], [1, 2, 0.5, -6]]),
    "rest": (np.float32([5, -2]), np.float32(7)),
}
SHARDINGS = {
    "axes": lambda name, _: "model" if name == "kernel" else (),
    "spec": lambda name, _: P(None, "model") if name == "kernel" else P(),
}


def measured_and_clipped(axes, grads):
    guard = shrewjax.skip_on_spike(optax.sgd(1.0), warmup_steps=0, max_value=11.0, max_consecutive=2, sharded_over=axes)
    finite = shrewjax.skip_nonfinite(optax.sgd(1.0), per_leaf=True, sharded_over=axes)
    rules = (
        shrewjax.clip_by_global_norm(1.0, per_leaf=True, sharded_over=axes),
        shrewjax.clip_by_norm_percentile(50.0, history_length=4, sharded_over=axes),
        shrewjax.clip_by_norm_zscore(warmup_steps=0, max_norm=2.0, sharded_over=axes),
        shrewjax.clip_by_percentile(60, scope="leaf", sharded_over=axes),
        shrewjax.clip_by_leaf_norm(1.0, sharded_over=axes),
        shrewjax.clip_by_leaf_norm_ema(1.05, sharded_over=axes),
        shrewjax.adaptive_grad_clip(0.1, stacked_axes=(), sharded_over=axes),
        shrewjax.clip_by_block_rms(1.0, sharded_over=axes),
    )
    after = [tx.update(grads, tx.init(grads), grads) for tx in (*rules, guard, finite)]
    return {
        "norms": [shrewjax.grad_norm(grads, ord, sharded_over=axes) for ord in (1, 2, 3, np.inf)],
        "clipped": shrewjax.clip_grad_norm(grads, 2.0, sharded_over=axes)[1],
        "percentile": shrewjax.clip_grad_percentile(grads, 60, sharded_over=axes)[1],
        "states": [state.metrics() for _, state in after],
        "whole": [updates["rest"] for updates, _ in after],
    }


@pytest.mark.parametrize("sharding", [*SHARDINGS])
def test_a_function_says_which_leaves_are_whole_where_types_do_not_tell(sharding):
    expected = measured_and_clipped((), WHOLE_AND_SHARDED)
    specs = {"kernel": P(None, "model"), "rest": P()}
    found = jax.jit(
        jax.shard_map(
            partial(measured_and_clipped, SHARDINGS[sharding]),
            mesh=mesh_of(model=4),
            in_specs=(specs,),
            out_specs=P(),
            check_vma=False,
        )
    )(WHOLE_AND_SHARDED)
    assert found["norms"][1] == pytest.approx(
        np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(WHOLE_AND_SHARDED)))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)


def test_types_decide_against_a_function_of_axes_where_they_tell():
    grads = {"w": np.arange(8, dtype="f"), "v": np.arange(4, dtype="f")}
    norm = jax.shard_map(
        lambda g: shrewjax.grad_norm(g, sharded_over=lambda *_: "model"),
        mesh=mesh_of(model=4),
        in_specs=({"w": P(), "v": P("model")},),
        out_specs=P(),
    )
    assert float(norm(grads)) == pytest.approx(np.sqrt(140 + 14))


def test_a_tree_of_axes_is_an_error_that_names_the_function():
    with pytest.raises(ValueError, match=r"sharded_over must be a mapped axis, .*pass a function of name and leaf"):
        shrewjax.grad_norm(WHOLE_AND_SHARDED, sharded_over={"kernel": "model"})
