"""The page "Check your loss": it shows what the call prints, and its test of a window fails on the usual mistakes."""

import pathlib
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import run_page

import shrewjax

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("as_users_have_it")]

PAGE = pathlib.Path(__file__).parent.parent.parent / "docs" / "guide" / "check.md"


def test_the_page_shows_what_the_check_prints(capsys):
    """The page breaks lines. Its code has no file here, in which Python would find the lines' text."""
    run_page(PAGE)
    (shown,) = re.findall(r"```text\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    printed = capsys.readouterr().out
    of_line = re.compile(r"\S+:\d+:[^\n]*(\n    [^\n]*)?")
    assert of_line.sub("LINE", printed).split() == of_line.sub("LINE", shown).split()


def test_the_tests_of_the_page_pass():
    names = run_page(PAGE)
    names["test_micro_batches_add_up"]()
    names["test_an_uneven_window_is_one_step_of_the_whole_batch"]()


def mistaken(names, name):
    """A step with one of the mistakes of a loop, in the place of the page's."""
    loss_fn = names["loss_fn"]

    def mean_weights(params, state, tx, x, y, mask):
        grads = jax.grad(loss_fn)(params, x, y, mask)
        return shrewjax.apply_gradients(tx, grads, state, params)

    def length(params, state, tx, x, y, mask):
        grads = jax.grad(loss_fn)(params, x, y, mask)
        return shrewjax.apply_gradients(tx, grads, state, params, weight=len(x))

    def divided(params, state, tx, x, y, mask):
        grads = jax.grad(lambda *args: loss_fn(*args) / 3)(params, x, y, mask)
        return shrewjax.apply_gradients(tx, grads, state, params, weight=jnp.sum(mask))

    def clipped_first(params, state, tx, x, y, mask):
        grads = jax.grad(loss_fn)(params, x, y, mask)
        grads, _ = optax.clip_by_global_norm(0.5).update(grads, optax.EmptyState())
        return shrewjax.apply_gradients(tx, grads, state, params, weight=jnp.sum(mask))

    return {f.__name__: f for f in (mean_weights, length, divided, clipped_first)}[name]


@pytest.mark.parametrize("name", ["mean_weights", "length", "divided", "clipped_first"])
def test_the_test_of_a_window_fails_on_a_mistaken_step(name):
    names = run_page(PAGE)
    names["step"] = mistaken(names, name)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        names["test_an_uneven_window_is_one_step_of_the_whole_batch"]()
