"""Functions of nnx objects, compiled, and Flax's two modes."""

import contextlib

from flax import nnx
from speed import quick_jit

# Flax 0.12.6 and later have two modes, of which the second has neither shared variables nor `DiffState`.
MODES = ["graph", "tree"] if hasattr(nnx, "set_graph_mode") else ["graph"]


def in_mode(mode="graph"):
    return nnx.set_graph_mode(mode == "graph") if len(MODES) == 2 else contextlib.nullcontext()


def of_states(function, nodes):
    """A compiled function of a state and of arrays: what `function(nodes, *arrays)` returns, and the new state.

    `nnx.jit` has no compiler options, with which these programs compile in half the time.
    """
    graph, _ = nnx.split(nodes)

    @quick_jit
    def call(state, *args):
        merged = nnx.merge(graph, state)
        return function(merged, *args), nnx.state(merged)

    return call


def compiled(function, nodes, *args):
    """What `function(nodes, *args)` returns, compiled, and the state of all nodes after it."""
    return of_states(function, nodes)(nnx.state(nodes), *args)
