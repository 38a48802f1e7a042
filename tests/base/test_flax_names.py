"""The names are those of the Flax that is installed, and nothing needs it."""

import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax.linen import fp8_ops

from shrewjax._base import flax_names


class Model(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))


def test_a_statistic_of_fp8_layers_has_the_name_that_flax_gives_it():
    tree = {fp8_ops.OVERWRITE_WITH_GRADIENT: {"scale": jnp.ones(1)}, "params": {"scale": jnp.ones(1)}}
    found = {path[0].key: flax_names.is_overwritten(path) for path, _ in jax.tree.leaves_with_path(tree)}
    assert found == {fp8_ops.OVERWRITE_WITH_GRADIENT: True, "params": False}


def test_variables_and_objects_of_nnx_are_told_from_arrays_and_trees():
    model = Model()
    state = nnx.state(model)
    variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    assert len(variables) > 4
    assert all(flax_names.is_variable(x) for x in variables)
    assert not any(flax_names.is_variable(x) for x in (jnp.ones(2), 1.0, None, model, state))
    assert flax_names.is_of_nnx(state)
    assert not flax_names.is_of_nnx(nnx.to_pure_dict(state))


@pytest.mark.parametrize(("is_model", "expected"), [(True, ["dropout", "norm"]), (False, ["dropout"])])
def test_batch_statistics_change_in_a_model_and_keys_everywhere(is_model, expected, monkeypatch):
    tree = {"array": jnp.ones(2), "linear": nnx.Linear(2, 2, rngs=nnx.Rngs(0)), **vars(Model())}
    found = {path[0].key: kind[:3] for path, kind in flax_names.changing_state(tree, is_model=is_model)}
    assert found == {name: {"dropout": "Rng", "norm": "Bat"}[name] for name in expected}
    monkeypatch.delitem(sys.modules, "flax.nnx")  # as in a process that has not imported Flax
    assert not [*flax_names.changing_state(tree, is_model=is_model)]
