"""Windows around an optimizer that records what it was given."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
from speed import compiled

import shrewjax

POLICIES = ["propagate", "drop_micro_batch", "drop_window", "extend_window"]


def recorder():
    """An optimizer whose updates are what it was given, and which counts its runs."""
    return optax.GradientTransformation(
        lambda params: {"runs": jnp.zeros((), jnp.int32)}, lambda g, s, params=None: (g, {"runs": s["runs"] + 1})
    )


def run(tx, steps, params):
    """Feeds (gradient, keyword arguments) pairs to a jitted update; returns the updates and states."""
    return run_compiled(compiled(tx), steps, params)


def run_compiled(tx, steps, params):
    state, history = tx.init(params), []
    for gradient, kwargs in steps:
        updates, state = tx.update(gradient, state, params, **kwargs)
        history.append((updates, state))
    return history


@cache
def recording_window(accum_steps, **rules):
    """A window around the recorder, compiled once for all tests and each kind of argument."""
    return compiled(shrewjax.accumulate(recorder(), accum_steps, **rules))


def vector(*values):
    return jnp.asarray(values, jnp.float32)


FLOAT0 = np.zeros((), jax.dtypes.float0)
BAD_WEIGHTS = [
    -1.0,
    np.nan,
    np.inf,
    3e38,
    1e-30,
    np.float32(-1),
    np.float64(np.nan),
    np.array(-1),
    "1",
    None,
    1j,
    FLOAT0,
]
