r"""Wrappers: run the wrapped transformation, or skip it.

A wrapper may skip a step. Parameters and the wrapped transformation's state then stay unchanged. Expressed as updates,
"unchanged" means writing zeros for every parameter. Expressed as new parameters, it costs nothing. A wrapper's `update`
function therefore has a second form, its attribute `update_or_apply`. It returns updates, or the new parameters if
`apply` is set.

Wrappers can be nested. Each one only decides whether the step `runs`, from a few scalars, and passes the decision on to
the next. The innermost transformation is no wrapper. It runs in one branch, or is skipped. No branch is nested in
another, because on CUDA XLA then copies the parameters and the state that the inner branch returns unchanged
(XLA-2). Gradients are passed on as a function that computes them. An array that enters a branch is materialized,
even if the branch is not taken (XLA-3).

The second form belongs to the function, not to the transformation. A transformation is a pytree of functions, which
libraries take apart and rebuild (`tests/skipping/test_wrapping.py`, "rebuilt"). If they replace the function too,
only `update` is left, with the same results.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import optax

from shrewjax._base.branches import Flag, run_if
from shrewjax._base.mesh import newly_varying
from shrewjax._base.states import require_own
from shrewjax._base.trees import KeyPath, check_unchanged, leaf_name

Params: TypeAlias = optax.Params | None


MakeGradients = Callable[[], optax.Updates]
"""A function that computes the gradients in the branch that needs them."""


UpdateOrApply = Callable[..., tuple[Any, Any]]
"""`(make_gradients, state, params, extra_args, *, apply, runs) -> (updates, or new parameters; new state)`.

The extra arguments are a dict, so that inner may have one of any name, such as `apply`.
"""


def wrapper(update_or_apply: UpdateOrApply) -> optax.TransformUpdateExtraArgsFn:
    """Returns a wrapper's `update` function, made from its second form, which is attached."""

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        return update_or_apply(lambda: updates, state, params, extra_args, apply=False, runs=True)

    cast(Any, update_fn).update_or_apply = update_or_apply
    return update_fn


def inner_transformation(inner: Any) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` as a transformation that takes extra arguments. Raises if it is no transformation."""
    if not isinstance(inner, optax.GradientTransformation):
        raise ValueError(f"inner must be an optax.GradientTransformation, got {inner!r}")
    inner = optax.with_extra_args_support(inner)
    return inner._replace(init=lambda params: _without_numbers(inner.init(params)))


def update_or_apply(
    tx: optax.GradientTransformation,
    make_gradients: MakeGradients,
    state: Any,
    params: Params,
    extra_args: Mapping[str, Any],
    *,
    apply: bool,
    runs: Flag,
) -> tuple[Any, Any]:
    """Returns the updates of any transformation, or the new parameters if `apply` is set, with the new state.

    If the step does not run, it returns zero updates, or the parameters, with the unchanged state.
    """
    second_form = getattr(tx.update, "update_or_apply", None)
    if second_form is not None:
        return second_form(make_gradients, state, params, extra_args, apply=apply, runs=runs)

    def run() -> tuple[Any, Any]:
        updates, new_state = optax.with_extra_args_support(tx).update(make_gradients(), state, params, **extra_args)
        return _applied(params, updates) if apply else updates, _without_numbers(new_state)

    return run_or_skip(runs, run, state, params, apply=apply)


def run_or_skip(
    runs: Flag,
    run: Callable[[], tuple[Any, Any]],
    state: Any,
    params: Params,
    *,
    apply: bool,
    what_changed: str = "inner's update changed its state",
) -> tuple[Any, Any]:
    """Returns `run()`, or, if the step does not run, zero updates (the parameters if `apply`) and the state.

    `run` returns updates, or new parameters if `apply`, and the new state, whose structure has to stay. `what_changed`
    begins the error if it does not.
    """
    ran = run() if runs is True else jax.eval_shape(run)
    check_unchanged(ran[1], state, what_changed)
    if runs is True:
        return ran
    # The types of both branches have to agree. Zero updates take those of the updates, but parameters and state of
    # before the step do not.
    _check_devices(ran[1], state, "inner's state after a step")
    if apply:
        _check_devices(ran[0], params, "the new parameters")

    def skip() -> tuple[Any, Any]:
        # `zeros_like` keeps the updates' sharding. The other branch's type differs from that of `jnp.zeros(shape)` on
        # an Explicit mesh and in a tracked shard_map, and JAX raises (tests/devices/test_distribution.py).
        return params if apply else optax.tree.zeros_like(ran[0]), state

    return run_if(runs, run, skip)


def guard(
    wrapped: optax.GradientTransformationExtraArgs,
    kind: type,
    decide: Callable[..., tuple[jax.Array, Any]],
    repaired: Callable[[optax.Updates], optax.Updates] | None = None,
) -> optax.TransformUpdateExtraArgsFn:
    """Returns the `update` function of a wrapper that runs `wrapped` if `decide` says so.

    `kind` is the class of its state. `decide(make_gradients, state, extra_args)` returns the decision, and the new
    state without that of `wrapped`. `wrapped` gets the gradients as `repaired` returns them.
    """

    def step_fn(
        make_gradients: MakeGradients,
        state: Any,
        params: Params,
        extra_args: Mapping[str, Any],
        *,
        apply: bool,
        runs: Flag,
    ) -> tuple[Any, Any]:
        require_own(state, kind)
        decision = partial(decide, make_gradients, state, extra_args)
        # Without `inner_state`, as `decide` returns the state, because both branches need one structure.
        idle = jnp.zeros((), bool), state._replace(inner_state=())
        wrapped_runs, new_state = decision() if runs is True else run_if(runs, decision, lambda: idle)
        for_inner = make_gradients if repaired is None else lambda: repaired(make_gradients())
        returned, inner_state = update_or_apply(
            wrapped, for_inner, state.inner_state, params, extra_args, apply=apply, runs=wrapped_runs
        )
        return returned, new_state._replace(inner_state=inner_state)

    return wrapper(step_fn)


def _applied(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """Returns `optax.apply_updates`, except that keys and parameters with a float0 update stay unchanged."""

    def add(param: Any, update: Any) -> Any:
        dtype: Any = getattr(update, "dtype", jnp.float32)
        is_nothing = dtype == jax.dtypes.float0 or jnp.issubdtype(dtype, jax.dtypes.prng_key)
        return param if is_nothing else optax.apply_updates(param, update)

    return jax.tree.map(add, params, updates, is_leaf=lambda x: x is None)


def _check_devices(new: Any, old: Any, what: str) -> None:
    """Raises, while tracing, if a leaf may differ between devices after the step but not before it."""

    def check(path: KeyPath, new: Any, old: Any) -> None:
        along = newly_varying(new, old)
        if along:
            raise ValueError(
                f"leaf {leaf_name(path)} of {what} may differ between devices along {along}, but it did not before the "
                f"step, because the gradients are not reduced. Reduce them first, for example with "
                f"jax.lax.pmean(grads, {along}). Or, if they are shards, pass parameters and state with the same "
                "sharding"
            )

    jax.tree.map_with_path(check, new, old)


def _without_numbers(state: Any) -> Any:
    """Returns the state with an array for each Python number, as under jit, so that no step changes its dtype."""

    def fixed(x: Any) -> Any:
        return jnp.array(x, jnp.asarray(x).dtype) if isinstance(x, bool | int | float | complex) else x

    return jax.tree.map(fixed, state)
