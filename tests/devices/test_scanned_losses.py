"""Gradients of losses that look rows up in their scans, out of programs for eight H100s that run on CPU devices.

JAX 0.10.1 to 0.11.2 lose sums of scatters in loops (XLA-27). Under plain `jax.jit`, `jax.value_and_grad` of the whole
batch is then wrong for all of these losses but `chunks`: of a gradient of `recurrent`, by 1.1.
In `jax.shard_map` it is right, because there is no partitioner to split the scatters.
"""

import itertools

import executed
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerators import loses_sums
from helpers import thorough
from jax import P
from losses import EXAMPLES, LOSSES

import shrewjax

pytestmark = pytest.mark.usefixtures("as_users_have_it")

KEPT = np.float32(np.random.default_rng(9).random(EXAMPLES) < 0.7)


def counted(params, kept, *batch):
    """A weight."""
    return jnp.sum(kept)


FORMS = {
    "1 micro-batch": {"micro_batches": 1},
    "4 micro-batches": {"micro_batches": 4},
    "4 weighted": {"micro_batches": 4, "weight_fn": counted},
    "in shard_map": {"micro_batches": 4, "weight_fn": counted, "sum_over": "data"},
}
FOUR = [
    ("recurrent", "1 micro-batch"),
    ("chunks", "4 micro-batches"),
    ("graphs", "4 weighted"),
    ("recurrent", "in shard_map"),
]
OTHERS = [pair for pair in itertools.product(LOSSES, FORMS) if pair not in FOUR]


def errors_of(name, form, differentiated=None):
    """The relative errors of value and gradients on eight GPUs, against JAX on one device."""
    loss = LOSSES[name]()

    def mean(params, kept, *batch):
        losses = loss.of_examples(params, *batch)
        return jnp.sum(jnp.where(kept > 0, losses, 0)) / jnp.sum(kept)

    kept = KEPT if "weight_fn" in FORMS[form] else np.ones_like(KEPT)
    arguments = loss.params, kept, *loss.batch
    expected = jax.jit(jax.value_and_grad(mean))(*arguments)
    mesh, specs = executed.gpus(data=8), (P(), *[P("data")] * (1 + len(loss.batch)))
    # Each micro-batch with a loss of its own. Experts have slots for all tokens, so theirs is refused.
    is_own = name == "experts" or form == "1 micro-batch" or "weight_fn" in FORMS[form]
    ours = shrewjax.accumulated_value_and_grad if is_own else shrewjax.value_and_grad
    step = (differentiated or ours)(mean, **FORMS[form])
    if form == "in shard_map":
        step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    compiled = executed.compile_for_gpus(step, arguments, specs, mesh)
    return executed.numbers(compiled, arguments, expected)


@pytest.mark.combinations
@pytest.mark.parametrize(("name", "form"), [*FOUR, *thorough(*OTHERS)])
def test_gradients_of_a_scan_that_looks_rows_up_are_those_of_the_whole_batch(name, form, h100):
    errors = errors_of(name, form)
    assert max(errors.values()) < executed.TOLERANCE, errors


def test_gradients_of_jax_alone_are_wrong_where_xla_loses_sums(h100):
    """So these losses have sums that are lost. The test above would not notice if they had none."""
    errors = errors_of("recurrent", "1 micro-batch", lambda loss, micro_batches: jax.value_and_grad(loss))
    assert (max(errors.values()) > 0.5) == loses_sums(h100), errors
