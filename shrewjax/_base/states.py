"""States: named tuples of arrays, the few helpers that several share, and `metrics`, which finds what they measured.

`described` gives each field its description from the class's docstring, so that `help` shows it. A state that measured
something returns its scalars from a method `metrics`.

A state does not hold the arguments of its transformation, and `from_optax` needs some of them. So an `init` can `note`
them for a caller that asks by `init_with_notes`.
"""

import inspect
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from shrewjax._base.flax_names import is_variable
from shrewjax._base.types import AnyState, Argument, Flag, KeyPath, Leaf, Metrics, PyTree, State


def described(state: type[State]) -> type[State]:
    """Decorates a state class: copies what its docstring says of each attribute into the field's docstring."""
    text_of_class = inspect.getdoc(state) or ""
    found = re.findall(r"^  (\w+): (.*(?:\n    .*)*)", text_of_class, re.MULTILINE)
    for name, text in found:
        getattr(state, name).__doc__ = " ".join(text.split())
    return state


def fields(state: AnyState, *names: str) -> Metrics:
    return {name: getattr(state, name) for name in names}


def require_state(opt_state: AnyState) -> None:
    if hasattr(type(opt_state), "init") and hasattr(type(opt_state), "update"):
        raise ValueError(
            "opt_state must be a state, got a transformation. Pass what tx.init or tx.update returned"
        )


def require_state_of(
    state: AnyState,
    kind: type,
    order: str = "update(grads, state, params) or apply_gradients(tx, grads, state, params)",
) -> None:
    """Raises unless this is the state that a rule's own `init` makes. Rules that read no state do not call it."""
    if isinstance(state, kind):
        return
    ways = ""
    if isinstance(state, dict | list):
        ways = ". Or, if it was restored, restore it with tx.init(params) as the target"
    elif type(state).__name__ == kind.__name__:
        ways = ". Or, if shrewjax was imported again, call tx.init(params) again"
    else:
        if type(state).__module__.startswith("optax."):
            ways = ". Or convert Optax's state: shrewjax.from_optax(state, tx, params)"
        if "inner_state" in getattr(kind, "_fields", ()):
            ways += (
                ". Or, if the state is that of a running job without this wrapper, put it into a new one: "
                "state = tx.init(params)._replace(inner_state=state), where tx is this wrapper"
            )
    raise ValueError(
        f"state must be the {kind.__name__} of init, got {type(state).__name__}. Pass the state of this "
        f"transformation, in the order {order}{ways}"
    )


def require_made_with(argument: str, state: AnyState, field: str, new: str = "") -> None:
    """Raises if a field that an argument adds is empty, because the state was made without this argument.

    `new` is the value that the field gets, if it is not that of a new state.
    """
    value = getattr(state, field)
    if isinstance(value, tuple) and not value:
        raise ValueError(
            f"the {type(state).__name__} was made without {argument}. Pass "
            f"state._replace({field}={new or f'tx.init(params).{field}'}), where tx has {argument}. Or leave "
            f"out {argument}"
        )


Notes: TypeAlias = dict[str, Argument]
"""Arguments of a transformation, by their names."""

_notes: ContextVar[list[tuple[Leaf, Notes]] | None] = ContextVar("notes", default=None)


def note(key: Leaf, **arguments: Argument) -> None:
    """Notes the arguments of a transformation in its `init`, if the caller asks. `key` is an array of the new state."""
    notes = _notes.get()
    if notes is not None:
        notes.append((key, arguments))


def init_with_notes(
    init: Callable[[PyTree], AnyState], params: PyTree
) -> tuple[AnyState, Callable[[Leaf], Notes | None]]:
    """Returns `init(params)`, and a function that returns what was noted with an array of this state, at any depth."""
    notes: list[tuple[Leaf, Notes]] = []
    context = copy_context()
    context.run(_notes.set, notes)
    state = context.run(init, params)
    return state, lambda key: next((arguments for array, arguments in notes if array is key), None)


def without_variables(state: AnyState) -> AnyState:
    """Returns the state with arrays in the places of Flax's variables, in which `nnx.Optimizer` keeps each array.

    A variable adds and multiplies as its array does, but does not compare (tests/promises/test_nnx_optimizer.py).
    """

    def value(x: Leaf) -> Leaf:
        if not is_variable(x):
            return x
        # Its one child, because in the variable of a masked parameter that is a node without leaves.
        return jax.tree.leaves(x, is_leaf=lambda y: y is not x)[0]

    return jax.tree.map(value, state, is_leaf=is_variable)


def with_own_buffers(state: State, params: PyTree) -> State:
    """Returns a new state in which no array shares a buffer with a parameter, or with another array of the state.

    An optimizer's state may begin as the parameters. A step that donates both would then fail
    (tests/promises/test_donated_optimizers.py). Only arrays that share are copied. While tracing, none has a buffer.
    """
    taken = {buffer for x in jax.tree.leaves(params) for buffer in _buffers(x)}

    def unshared(x: Leaf) -> Leaf:
        new = x if taken.isdisjoint(_buffers(x)) else jnp.copy(x)  # keeps the sharding
        taken.update(_buffers(new))
        return new

    return jax.tree.map(unshared, state)


def _buffers(x: Leaf) -> set[tuple[Any, int]]:
    """Returns the buffers of an array on the devices of this process, by device and address."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return set()
    try:
        shards = x.addressable_shards
        return {(shard.device, shard.data.unsafe_buffer_pointer()) for shard in shards}
    except RuntimeError:
        # The backend has no addresses. One array object in two places is then found alone.
        return {(None, id(x))}


def increment_if(flag: Flag, count: jax.Array) -> jax.Array:
    """Returns a counter plus 1 if the flag is set. A counter stops at its dtype's largest value."""
    return jnp.where(flag, optax.safe_increment(count), count)


@partial(jax.jit, inline=True)  # outside of jit, constants would be sent to the device
def largest(tree: PyTree) -> jax.Array:
    """Returns the largest number in a tree: NaN if any is NaN, at least 0, and 0 for no numbers. Shape ()."""
    leaves = [jnp.ravel(jnp.asarray(x)) for x in jax.tree.leaves(tree)]
    if not leaves:
        return jnp.zeros((), jnp.float32)
    return jnp.max(jnp.concatenate(leaves), initial=0.0)


def metrics(opt_state: AnyState) -> dict[str, jax.Array]:
    r"""Returns the scalars that transformations keep in a state, named by transformation.

    .. math:: \text{metrics}(s) = \bigcup_{s' \in s} \{\text{transformation}(s')/\text{name} \mapsto x :
              (\text{name}, x) \in s'.\text{metrics}()\}

    It finds states at any depth: in chains, in wrappers such as `optax.masked` or `optax.inject_hyperparams`, and in
    `nnx.Optimizer.opt_state`. It also works on traced states and under `vmap`.

    =======================  ===============================================================================
    transformation           names
    =======================  ===============================================================================
    clip_by_global_norm      grad_norm, clip_scale: other than 1 (NaN included) if it clipped by more than float32's
                             rounding. With `per_leaf=True` also largest_share of the squared norm; largest_leaf: its
                             place in the sorted names below; leaf_norm/NAME: the norm of the leaf NAME
    clip_by_leaf_norm        grad_norm_max: the largest leaf norm; clipped_fraction: clipped leaves / leaves
    clip_by_percentile       bound (the largest, if one per leaf); clipped_fraction of the elements
    clip_by_norm_percentile  threshold, grad_norm, clip_scale
    clip_by_norm_zscore      threshold, grad_norm, clip_scale, mean, std
    adaptive_grad_clip       ratio_max, clipped_fraction: clipped units / units
    clip_by_block_rms        rms_max, clipped_fraction
    clip_by_leaf_norm_ema    threshold_max, grad_norm_max, clipped_fraction
    each rule for norms      also count: its updates; clipped: those in which a finite norm, of any unit, was above its
                             threshold; clip_rate: clipped / count, NaN before the first
    skip_nonfinite           applied, skipped, consecutive, limit_reached. With `per_leaf=True` also nonfinite_leaf/NAME
    skip_on_spike            applied, skipped, consecutive, spikes_applied, measured, threshold
    accumulate               micro_step, windows, applied, weight_sum, window_bad, dropped. Of the last window with an
                             average: weight, such as its tokens, and value, its loss. With `noise_decay`:
                             noise_scale, in units of weight, noise_trace, signal_squared. Values measured inside are
                             those of the last closed window, or of init before the first one closes. With
                             `sum_over` there is no weight_sum, because each device has its own
    grad_accumulator         as accumulate, without applied
    =======================  ===============================================================================

    The name of the largest leaf, such as "dense/kernel", outside of jit:
    `sorted(k for k in measured if "/leaf_norm/" in k)[measured["clip_by_global_norm/largest_leaf"]]`.

    To take part, give the class of your state, a pytree node such as `MyRuleState`, a method `metrics`. It takes no
    arguments and returns a dictionary of scalars, which are named `"my_rule/..."`.

    Args:
      opt_state: the state of any Optax transformation.

    Returns:
      A dictionary from `"transformation/name"` to scalars, empty if no state has any. A name does not depend on the
      position in a chain. If there are several states of one kind, those in a group of `optax.partition` have its name
      in front, such as `"decoder/clip_by_global_norm/grad_norm"`. Of the others, and of several in one group, the names
      of all except the first start with their path, such as `"1/inner_state/clip_by_global_norm/grad_norm"`.

    Raises:
      ValueError: `opt_state` is a transformation, or has a window of `accumulate` inside one of `optax.MultiSteps`.

    Example:
      >>> tx = optax.chain(clip_by_global_norm(1.0), optax.sgd(0.1))
      >>> state = tx.init(jnp.zeros(2))
      >>> _, state = tx.update(jnp.array([3.0, 4.0]), state)
      >>> for name, value in metrics(state).items():
      ...     print(name, value)
      clip_by_global_norm/grad_norm 5.0
      clip_by_global_norm/clip_scale 0.2
      clip_by_global_norm/count 1
      clip_by_global_norm/clipped 1
      clip_by_global_norm/clip_rate 1.0

    Source: it finds values at any depth of a state, as `optax.tree.get` does.
    """
    require_state(opt_state)
    opt_state = without_variables(opt_state)
    require_one_window(opt_state)
    found: dict[str, jax.Array] = {}
    states = [(path, x, _name(type(x))) for path, x in _measuring(opt_state)]
    number = Counter(kind for _, _, kind in states)
    seen = set()
    for path, state, kind in states:
        where = _group(path) if number[kind] > 1 else ""
        if (where, kind) in seen:
            where = _written(path)
        seen.add((where, kind))
        for name, value in state.metrics().items():
            found[f"{where}{kind}/{name}"] = value
    return found


def _group(path: KeyPath) -> str:
    """Returns the group of `optax.partition` at this place of a state, or the groups if one is inside another."""
    groups = jax.tree_util.GetAttrKey("inner_states")
    return _written([key for above, key in itertools.pairwise(path) if above == groups])


def _written(path: Sequence[Any]) -> str:
    return "".join(jax.tree_util.keystr((key,), simple=True) + "/" for key in path)


def window_around_inner(state: type[State]) -> type[State]:
    """Decorates the state of a window whose inner runs once in a window: `require_one_window` looks for it."""
    _windows_around_inner.add(state)
    return state


_windows_around_inner: set[type] = set()


def require_one_window(opt_state: AnyState) -> None:
    """Raises if `optax.MultiSteps` is around `accumulate`, which knows nothing of what is around it."""
    for outer in nodes_in(opt_state, (optax.MultiStepsState,)):
        if nodes_in(outer, tuple(_windows_around_inner)):
            raise ValueError(
                "opt_state has a window of accumulate inside optax.MultiSteps. Leave out optax.MultiSteps, and "
                "multiply the accum_steps"
            )


def nodes_in(state: AnyState, kinds: tuple[type, ...]) -> list[AnyState]:
    """Returns the outermost nodes of these types."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, kinds))
    return [x for x in nodes if isinstance(x, kinds)]


def _measuring(tree: PyTree, path: KeyPath = ()) -> Iterator[tuple[KeyPath, AnyState]]:
    """Yields each state that has a method `metrics`, with its path. An outer state precedes those inside it."""
    if _measures(tree):
        yield path, tree

    def is_inner(x: PyTree) -> bool:
        return x is not tree and _measures(x)

    for below, node in jax.tree.leaves_with_path(tree, is_leaf=is_inner):
        if is_inner(node):
            yield from _measuring(node, (*path, *below))


def _measures(node: PyTree) -> bool:
    return callable(getattr(type(node), "metrics", None))


def _name(state: type) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", state.__name__.removesuffix("State")).lower()
