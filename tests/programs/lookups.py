"""Losses that look rows of a table up in a loop, so that their backward loops add scatters up."""

import jax
import jax.numpy as jnp
import numpy as np

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
