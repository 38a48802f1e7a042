"""Balances a pole with PPO, in thousands of tiny optimizer steps inside one compiled loop, beside Optax's own.

Networks this small are differentiated in a fraction of a millisecond, so what clipping, accumulation and dispatch add
to each step is what one waits for. Here everything is in `jax.lax.scan`: the environment (CartPole, written in JAX),
the advantages, and all epochs and micro-batches of the update; Python makes one call for several iterations. The same
loop runs with `shrewjax.accumulate` and with `optax.MultiSteps`, by turns, and the example prints how fast each was.

Run it with

    python -m pip install -e '.[examples]'
    python examples/train_ppo.py

It takes well under a minute on two CPU cores, prints how long the pole stayed up and the steps per second of both, and
writes out/train_ppo.png, the learning curves. Both do the same arithmetic up to rounding, which reinforcement learning
soon makes visible: expect curves that start alike and part.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import _figures
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from tqdm import tqdm

import shrewjax

ENVIRONMENTS, HORIZON = 16, 128  # steps that one iteration sees: their product
EPOCHS, MINIBATCHES, ACCUM_STEPS = 4, 8, 4  # micro-batches of 64 steps, four to a minibatch
MICRO_STEPS = EPOCHS * MINIBATCHES * ACCUM_STEPS
LEARNING_RATE, MAX_NORM = 1e-3, 0.5
DISCOUNT, TRACE, RATIO_CLIP, ENTROPY_BONUS = 0.99, 0.95, 0.2, 0.01
WIDTH = 64
LONGEST = 500  # an episode that gets here has balanced the pole

Params = dict[str, Any]


class Environments(NamedTuple):
    """Many cart-poles at once."""

    state: jax.Array  # position, velocity, angle, angular velocity of each. Shape (environments, 4)
    age: jax.Array  # steps since the episode began. Shape (environments,), int32


class Rollout(NamedTuple):
    """Observations, actions and results. The leading shape is (HORIZON, ENVIRONMENTS), later (MICRO_STEPS, ...)."""

    state: jax.Array
    action: jax.Array  # True: to the right
    log_prob: jax.Array
    value: jax.Array
    done: jax.Array
    length: jax.Array  # of the episode that ended here


class Learner(NamedTuple):
    """All that one iteration hands to the next."""

    params: Params
    opt_state: optax.OptState
    environments: Environments
    key: jax.Array


def cart_pole(
    env: Environments, action: jax.Array, starts: jax.Array
) -> tuple[Environments, jax.Array]:
    """One step of Barto, Sutton and Anderson's pole with Gym's constants; episodes that are done begin anew."""
    _, velocity, angle, spin = env.state.T
    force = jnp.where(action, 10.0, -10.0)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    push = (force + 0.05 * spin**2 * sin) / 1.1
    spin_rate = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    acceleration = push - 0.05 * spin_rate * cos / 1.1
    rates = jnp.stack([velocity, acceleration, spin, spin_rate], axis=1)
    state, age = env.state + 0.02 * rates, env.age + 1
    done = (jnp.abs(state[:, 0]) > 2.4) | (jnp.abs(state[:, 2]) > 0.2095) | (age >= LONGEST)
    return Environments(jnp.where(done[:, None], starts, state), jnp.where(done, 0, age)), done


def init_params(seed: int) -> Params:
    """Policy and value, each with two hidden layers; the policy's last one small, so that it starts undecided."""
    rng = np.random.default_rng(seed)

    def layers(outputs: int, last_scale: float) -> list[tuple[jax.Array, jax.Array]]:
        sizes = ((4, WIDTH, 2**0.5), (WIDTH, WIDTH, 2**0.5), (WIDTH, outputs, last_scale))
        return [
            (
                jnp.asarray(scale / rows**0.5 * rng.standard_normal((rows, columns), np.float32)),
                jnp.zeros(columns),
            )
            for rows, columns, scale in sizes
        ]

    return {"policy": layers(2, 0.01), "value": layers(1, 1.0)}


def dense(layers: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
    """A network with tanh between its layers."""
    for weights, bias in layers[:-1]:
        x = jnp.tanh(x @ weights + bias)
    weights, bias = layers[-1]
    return x @ weights + bias


def policy_and_value(params: Params, state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities of left and right, and the return that is expected."""
    return jax.nn.log_softmax(dense(params["policy"], state)), dense(params["value"], state)[..., 0]


def chosen(log_probs: jax.Array, action: jax.Array) -> jax.Array:
    """The log-probability of what was done."""
    return jnp.where(action, log_probs[:, 1], log_probs[:, 0])


def ppo_loss(params: Params, batch: Rollout, advantage: jax.Array, target: jax.Array) -> jax.Array:
    """Clipped surrogate, squared error of the value, and a bonus for entropy, averaged over the micro-batch."""
    log_probs, value = policy_and_value(params, batch.state)
    ratio = jnp.exp(chosen(log_probs, batch.action) - batch.log_prob)
    clipped = jnp.clip(ratio, 1 - RATIO_CLIP, 1 + RATIO_CLIP)
    surrogate = jnp.minimum(ratio * advantage, clipped * advantage)
    entropy = -(jnp.exp(log_probs) * log_probs).sum(axis=-1)
    return (0.5 * (value - target) ** 2 - surrogate - ENTROPY_BONUS * entropy).mean()


def play(params: Params, env: Environments, key: jax.Array) -> tuple[Environments, Rollout]:
    """HORIZON steps in all environments."""

    def step(env: Environments, draws: jax.Array) -> tuple[Environments, Rollout]:
        log_probs, value = policy_and_value(params, env.state)
        action = jnp.log(draws[:, 0]) < log_probs[:, 1]
        after, done = cart_pole(env, action, 0.1 * draws[:, 1:] - 0.05)
        return after, Rollout(
            env.state, action, chosen(log_probs, action), value, done, env.age + 1
        )

    # All random numbers in one go: an action and, should the episode end, a start for each step.
    return jax.lax.scan(step, env, jax.random.uniform(key, (HORIZON, ENVIRONMENTS, 5)))


def advantages(rollout: Rollout, last_value: jax.Array) -> jax.Array:
    """Generalised advantage estimates; every step earns 1."""

    def step(
        carry: tuple[jax.Array, jax.Array], seen: Rollout
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        advantage, next_value = carry
        alive = 1.0 - seen.done
        surprise = 1.0 + DISCOUNT * next_value * alive - seen.value
        advantage = surprise + DISCOUNT * TRACE * alive * advantage
        return (advantage, seen.value), advantage

    return jax.lax.scan(step, (jnp.zeros_like(last_value), last_value), rollout, reverse=True)[1]


def iteration(
    tx: optax.GradientTransformation, learner: Learner, _: None
) -> tuple[Learner, tuple[jax.Array, jax.Array]]:
    """Plays, then takes MICRO_STEPS micro-steps; of the episodes that ended, their summed lengths and their number."""
    key, play_key, shuffle_key = jax.random.split(learner.key, 3)
    environments, rollout = play(learner.params, learner.environments, play_key)
    last_value = policy_and_value(learner.params, environments.state)[1]
    advantage = advantages(rollout, last_value)
    target = advantage + rollout.value
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)

    # A new order in each epoch, cut into micro-batches.
    samples = ENVIRONMENTS * HORIZON
    rows = jnp.argsort(jax.random.uniform(shuffle_key, (EPOCHS, samples))).reshape(MICRO_STEPS, -1)
    data = jax.tree.map(lambda x: x.reshape(samples, *x.shape[2:]), (rollout, advantage, target))

    def micro_step(
        carry: tuple[Params, optax.OptState], rows: jax.Array
    ) -> tuple[tuple[Params, optax.OptState], None]:
        params, opt_state = carry
        grads = jax.grad(ppo_loss)(params, *jax.tree.map(lambda x: x[rows], data))
        # For any Optax transformation; what `accumulate` returned leaves the parameters alone until its window closes.
        return shrewjax.apply_gradients(tx, grads, opt_state, params), None

    (params, opt_state), _ = jax.lax.scan(micro_step, (learner.params, learner.opt_state), rows)
    ended = rollout.done.sum()
    return Learner(params, opt_state, environments, key), (
        jnp.where(rollout.done, rollout.length, 0).sum(),
        ended,
    )


class Run:
    """One of the two sides: its learner, its compiled loop, what it measured."""

    def __init__(self, tx: optax.GradientTransformation, iterations: int, seed: int) -> None:
        self.lengths, self.seconds = [], 0.0
        self.learner = start(tx, seed)
        loop = partial(jax.lax.scan, partial(iteration, tx), length=iterations)
        began = time.perf_counter()
        self.loop = jax.jit(loop, donate_argnums=0).lower(self.learner).compile()
        self.compile_seconds = time.perf_counter() - began

    def advance(self) -> None:
        """Runs the iterations of one call."""
        began = time.perf_counter()
        self.learner, (steps, ended) = jax.block_until_ready(self.loop(self.learner))
        self.seconds += time.perf_counter() - began
        # NaN where no episode ended, as can be once they are longer than the horizon.
        self.lengths += [
            float(s / e) if e else np.nan
            for s, e in zip(*jax.device_get((steps, ended)), strict=True)
        ]


def start(tx: optax.GradientTransformation, seed: int) -> Learner:
    """A new network, and carts that stand still."""
    params = init_params(seed)
    environments = Environments(jnp.zeros((ENVIRONMENTS, 4)), jnp.zeros(ENVIRONMENTS, jnp.int32))
    return Learner(params, tx.init(params), environments, jax.random.key(seed))


def optimizers() -> dict[str, optax.GradientTransformation]:
    """Clip inside of accumulation, before Adam, from here and from Optax."""
    adam = optax.adam(LEARNING_RATE, eps=1e-5)
    clip_and_adam = optax.chain(optax.clip_by_global_norm(MAX_NORM), adam)
    return {
        "shrewjax": shrewjax.accumulate(
            optax.chain(shrewjax.clip_by_global_norm(MAX_NORM), adam), ACCUM_STEPS
        ),
        "Optax": optax.MultiSteps(clip_and_adam, ACCUM_STEPS).gradient_transformation(),
    }


def plot(runs: dict[str, Run], path: Path) -> None:
    """Draws how long the pole stayed up, over the steps of the environments."""
    figure = Figure(figsize=(8, 4.5))
    axes = figure.add_subplot()
    for name, run in runs.items():
        seen = ENVIRONMENTS * HORIZON * np.arange(1, len(run.lengths) + 1)
        axes.plot(seen, run.lengths, label=name)
    _figures.threshold(axes, LONGEST, "balanced to the end")
    axes.set(title="Balancing a pole by PPO, with accumulation and clip of either package")
    axes.set(
        xlabel="environment steps",
        ylabel="mean length of the episodes that ended",
        ylim=(0, 1.08 * LONGEST),
    )
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.legend()
    _figures.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Trains both by turns, reports and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=16, help="compiled calls of --iterations each")
    parser.add_argument(
        "--iterations", type=int, default=5, help=f"of {ENVIRONMENTS * HORIZON} environment steps"
    )
    parser.add_argument("--out", type=Path, default=Path("out/train_ppo.png"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)

    runs = {name: Run(tx, args.iterations, args.seed) for name, tx in optimizers().items()}
    with tqdm(range(args.calls), unit="call") as bar:
        for _ in bar:
            for run in runs.values():
                run.advance()
            bar.set_postfix_str(
                ", ".join(f"{name} {run.lengths[-1]:.0f} steps" for name, run in runs.items())
            )

    taken = args.calls * args.iterations * MICRO_STEPS
    for name, run in runs.items():
        # Four horizons are longer than the longest episode.
        first, last = (np.nanmean(part) for part in (run.lengths[:4], run.lengths[-4:]))
        print(
            f"{name}: episodes of {first:.0f} steps at first, {last:.0f} at last; {taken} micro-steps, "
            f"{taken / run.seconds:.0f} a second; compiled in {run.compile_seconds:.1f} s"
        )
    plot(runs, args.out)


if __name__ == "__main__":
    main()
