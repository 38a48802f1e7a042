"""One conditional, whose first branch is the idle one; and none where the condition is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shrewjax._base.branches import run_if


def test_a_traced_flag_makes_one_conditional_that_returns_operands_in_its_first_branch():
    """The other branches copy what they return unchanged (XLA-1)."""
    program = jax.make_jaxpr(lambda flag, x: run_if(flag, lambda: x + 1, lambda: x))(True, jnp.ones(3))
    (conditional,) = (equation for equation in program.eqns if equation.primitive.name == "cond")
    idle, run = conditional.params["branches"]
    assert [equation.primitive.name for equation in idle.eqns] == []
    assert [equation.primitive.name for equation in run.eqns] == ["add"]
    taken = jax.jit(lambda flag, x: run_if(flag, lambda: x + 1, lambda: x))
    assert [float(taken(flag, np.float32(1))) for flag in (True, False)] == [2, 1]


@pytest.mark.parametrize("known", [bool, np.bool, jnp.asarray], ids=["bool", "NumPy's", "array"])
def test_a_known_flag_calls_one_branch_and_does_not_trace_the_other(known):
    called = []
    for flag in (True, False):
        run_if(known(flag), lambda: called.append("run"), lambda: called.append("idle"))
    assert called == ["run", "idle"]
