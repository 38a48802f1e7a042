"""The cost of a measured threshold over a given one: every adaptive rule and guard against `clip_by_global_norm`s.

    python examples/benchmarks/unit_norms.py [--json FILE] [--quick]

All rules run in one process, alternating, on a 6-layer GPT-2 with 58.7 million float32 parameters in 76 leaves: the
clip alone, of gradients that stay; and a donated training step, clip, AdamW and the parameters' update. The other side
is `clip_by_global_norm`, in one row that of this package, in the next Optax's.
"""

from functools import partial
from typing import Any

import _harness
import jax
import optax
from _harness import Loop, Row

import shrewjax

BASE, OPTAX, LIVE = "clip_by_global_norm", "optax.clip_by_global_norm", "no-zeros"
# Thresholds that clip, where the rule allows it: a clip that does nothing may write nothing.
ONE_NORM = {
    BASE: shrewjax.clip_by_global_norm(1.0),
    "clip_by_norm_percentile": shrewjax.clip_by_norm_percentile(10.0),
    "clip_by_norm_zscore": shrewjax.clip_by_norm_zscore(max_norm=1.0),
}
MANY_NORMS = {
    "clip_by_block_rms": shrewjax.clip_by_block_rms(0.1),
    "clip_by_leaf_norm_ema": shrewjax.clip_by_leaf_norm_ema(),
    "adaptive_grad_clip, tensors": shrewjax.adaptive_grad_clip(
        0.01, axis=lambda _, leaf: tuple(range(leaf.ndim))
    ),
    "adaptive_grad_clip, units": shrewjax.adaptive_grad_clip(0.01),
}
GIVEN = {OPTAX: optax.clip_by_global_norm(1.0)}
BARS = dict.fromkeys(ONE_NORM, 1.1) | dict.fromkeys(MANY_NORMS, 1.3)
GUARDS = {
    "skip_nonfinite(optimizer)": shrewjax.skip_nonfinite,
    "skip_on_spike(optimizer)": shrewjax.skip_on_spike,
}


def clip_alone(quick: bool) -> list[Row]:
    """The clip itself: every time the same gradients, and new buffers for what comes out."""
    grads, params = _harness.gpt2(quick, seed=1), _harness.gpt2(quick)
    sides = {}
    for name, tx in (GIVEN | ONE_NORM | MANY_NORMS).items():
        state = tx.init(params)
        compiled = jax.jit(tx.update).lower(grads, state, params).compile()
        sides[name] = partial(_harness.finish, compiled, grads, state, params)
    return _rows("clip alone", _harness.alternate(sides, 3 if quick else 25))


def training_step(quick: bool) -> list[Row]:
    """Clip, AdamW and the parameters' update in one donated program."""
    grads, start = _harness.gpt2(quick, seed=1), _harness.gpt2(quick)
    plain = optax.chain(ONE_NORM[BASE], optax.adamw(1e-3))
    rules = {
        name: optax.chain(tx, optax.adamw(1e-3))
        for name, tx in (GIVEN | ONE_NORM | MANY_NORMS).items()
    }
    rules |= {name: guard(plain) for name, guard in GUARDS.items()}
    steps = {name: (tx, _harness.updated) for name, tx in rules.items()}
    steps |= {f"{name}, apply_gradients": (rules[name], _harness.applied) for name in GUARDS}
    loops = {}
    for name, (tx, step) in steps.items():
        params = jax.tree.map(jax.numpy.copy, start)
        loops[name] = Loop(partial(step, tx), (params, tx.init(params)), grads)
    sides = {name: partial(loop.run, 1) for name, loop in loops.items()}
    rows = _rows("clip + adamw + apply_updates", _harness.alternate(sides, 3 if quick else 15))
    for name in steps:
        share = _harness.temporary_share(loops[name].compiled, grads)
        rows.append(
            Row(
                f"its temporary memory, {name}",
                share,
                bar="shrewjax < 0.05" if name in BARS else None,
            )
        )
    return rows


def zero_gradients(quick: bool) -> list[Row]:
    """The training step with a leaf, or a unit of it, whose gradient is zero, over the same step with none."""
    live, start = _harness.gpt2(quick, seed=1), _harness.gpt2(quick)

    def without(part: Any) -> Any:
        up = live["layer_0"]["up"]
        return live | {"layer_0": live["layer_0"] | {"up": up | {"w": up["w"].at[part].set(0)}}}

    zeroed = {LIVE: live, "a leaf of zeros": without(...), "a unit of zeros": without((..., 0))}
    rows = []
    for name, tx in (MANY_NORMS | {"clip_by_leaf_norm": shrewjax.clip_by_leaf_norm(0.1)}).items():
        sides = {}
        for what, grads in zeroed.items():
            params = jax.tree.map(jax.numpy.copy, start)
            chained = optax.chain(tx, optax.adamw(1e-3))
            loop = Loop(partial(_harness.updated, chained), (params, chained.init(params)), grads)
            sides[what] = partial(loop.run, 1)
        times = _harness.alternate(sides, 3 if quick else 11)
        rows += [
            Row(
                f"clip + adamw, {name}, {what}", times[what], times[LIVE], f"shrewjax/{LIVE} <= 1.1"
            )
            for what in times
            if what != LIVE
        ]
    return rows


def _rows(what: str, times: dict[str, _harness.Figure]) -> list[Row]:
    return [
        Row(
            f"{what}, {name}",
            time,
            times[base],
            f"shrewjax/{base} <= {BARS[name]}" if name in BARS else None,
        )
        for name, time in times.items()
        for base in (BASE, OPTAX)
        if name not in (base, OPTAX)
    ]


if __name__ == "__main__":
    _harness.main(__doc__, [clip_alone, training_step, zero_gradients])
