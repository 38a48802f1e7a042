r"""Wrappers: run the wrapped transformation, or skip it.

A skipped step leaves parameters and the wrapped transformation's state unchanged. If updates are wanted, it writes a
zero for every parameter. If new parameters are wanted, it returns the old ones and writes nothing. So one call of a
wrapper is a `Step`, which says which of the two is wanted, and whether the step runs at all::

    update(updates, state, params)     a step whose result is updates
    apply_gradients(tx, grads, ...)    a step whose result is new parameters
    a wrapper's `step_fn`              decides from a few scalars, and passes the step on to what it wraps (`run_step`)
    the innermost transformation       runs in one branch, or is skipped (`Step.run_or_skip`)

A guard passes its decision on, and opens no branch around what it wraps, because on CUDA XLA copies what a nested
branch returns unchanged (XLA-2). Gradients are passed on as a function that computes them, because an array that enters
a branch is materialized, even if the branch is not taken (XLA-3).

`step_fn` is an attribute of the wrapper's `update` function, because libraries take transformations apart and rebuild
them (`tests/skipping/test_wrapping.py`, "rebuilt"). If they replace the function too, only `update` is left, with the
same results.
"""

import inspect
import os
import types
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shrewjax._base.axes import newly_varying, varying_axes
from shrewjax._base.branches import run_if
from shrewjax._base.mesh import partitioned_like, placed_like, summed
from shrewjax._base.states import require_state_of, with_own_buffers
from shrewjax._base.trees import (
    check_unchanged,
    is_typed_key,
    leaf_name,
    parameter_arrays,
    require_no_device_rows,
    require_structure,
)
from shrewjax._base.types import (
    AnyState,
    Argument,
    DType,
    ExtraArgs,
    Flag,
    KeyPath,
    Leaf,
    Params,
    PyTree,
)
from shrewjax._programs.jaxprs import axes_of_collectives, types_of

Result: TypeAlias = tuple[PyTree, AnyState]
"""Updates, or new parameters, and the new state."""


class Step(NamedTuple):
    """One call of a transformation, as wrappers pass it on."""

    # Computes them in the branch that needs them (XLA-3).
    make_gradients: Callable[[], optax.Updates]
    state: AnyState
    params: Params
    # A mapping, because inner may have an argument of any name, such as `runs`.
    extra_args: ExtraArgs
    as_params: bool  # the result has new parameters, and not updates
    runs: Flag = True  # otherwise parameters and state stay as they are

    def run_or_skip(
        self, run: Callable[[], Result], what_changed: str = "inner's update changed its state"
    ) -> Result:
        """Returns `run()`, or `skipped` if the step does not run.

        `run` returns updates, or new parameters if `as_params`, and the new state, whose structure has to stay.
        `what_changed` begins the error if it does not.
        """

        # 1. Run it. Cast a widened float back, and check that structure, shapes and dtypes of the state stay.
        def run_in_place() -> Result:
            returned, new_state = run()
            requirement = f"{what_changed}: the structure must stay"
            remedy = ". If a restore made lists of tuples, give it tx.init(params) as the target"
            require_structure(new_state, self.state, requirement, remedy)
            of_params = {x.dtype for x in jax.tree.leaves(self.params) if hasattr(x, "dtype")}
            new_state = jax.tree.map(partial(_in_dtype_of, of_params), new_state, self.state)
            check_unchanged(new_state, self.state, what_changed)
            return returned, jax.tree.map(partitioned_like, new_state, self.state)

        if self.runs is True:
            return run_in_place()
        # 2. Run it in a branch. Both branches have to return the same types. Zero updates are made with the updates'
        # types. The old parameters and the old state keep their own types, so these are compared. `run` is also traced
        # to find its types and its collectives.
        ran_types = types_of(run_in_place)
        _require_agreement(self.runs, run)
        _check_devices(ran_types[1], self.state, "inner's state after a step")
        if self.as_params:
            _check_devices(ran_types[0], self.params, "the new parameters")
        return run_if(self.runs, run_in_place, partial(self.skipped, ran_types[0]))

    def skipped(self, returned: PyTree) -> Result:
        """Returns zero updates like `returned`, or the parameters if `as_params`, and the state."""
        if self.as_params:
            return self.params, self.state
        # `zeros_like` keeps the updates' sharding. The other branch's type differs from that of `jnp.zeros(shape)` on
        # an Explicit mesh and in a tracked shard_map, and JAX raises (tests/devices/test_distribution.py). In
        # `jax.vmap` without `jax.set_mesh` the zeros have no mesh. `placed_like` replicates them there, and
        # `partitioned_like` shards them as the updates (tests/devices/test_models_on_devices.py, "begins_inside").
        zeros = placed_like(optax.tree.zeros_like(returned), returned)
        return jax.tree.map(partitioned_like, zeros, returned), self.state


StepFn: TypeAlias = Callable[[Step], Result]


def first_step(updates: PyTree, state: AnyState, params: Params, **others: Any) -> Step:
    """Returns the step of a call. `others` are the step's other fields."""
    grads = summed(updates)
    # A hyperparameter may be set to a number by hand.
    return Step(lambda: grads, _without_numbers(state), params, **others)


def run_step(tx: optax.GradientTransformation, step: Step) -> Result:
    step_fn: StepFn | None = getattr(tx.update, "step_fn", None)
    if step_fn is not None:
        return step_fn(step)
    return step.run_or_skip(partial(_run_innermost, tx, step))


def _run_innermost(tx: optax.GradientTransformation, step: Step) -> Result:
    update = optax.with_extra_args_support(tx).update
    updates, new_state = update(step.make_gradients(), step.state, step.params, **step.extra_args)
    returned = _applied(step.params, updates) if step.as_params else updates
    structure: Any = jax.tree.structure(returned)
    if structure == jax.tree.structure(step.params):
        # An optimizer's state may be sharded finer than parameters (ZeRO), and then its updates are.
        returned = jax.tree.map(partitioned_like, returned, step.params)
    return returned, _without_numbers(new_state)


def update_of_wrapper(kind: type, run: StepFn) -> optax.TransformUpdateExtraArgsFn:
    """Returns the `update` function of a wrapper. It calls `run(step)`, or skips the call if a guard outside says so.

    `kind` is the class of its state.
    """

    def step_fn(step: Step) -> Result:
        require_state_of(step.state, kind)
        return step.run_or_skip(partial(run, step), f"the {kind.__name__} changed")

    return _update_by(step_fn)


def update_of_guard(
    wrapped: optax.GradientTransformationExtraArgs,
    kind: type,
    decide: Callable[[Step], tuple[jax.Array, AnyState]],
    repaired: Callable[[optax.Updates], optax.Updates] | None = None,
) -> optax.TransformUpdateExtraArgsFn:
    """Returns the `update` function of a wrapper that runs `wrapped` if `decide` says so.

    `kind` is the class of its state. `decide(step)` returns the decision, and the new state without that of `wrapped`.
    `repaired` changes the gradients before `wrapped` gets them.
    """

    def step_fn(step: Step) -> Result:
        require_state_of(step.state, kind)
        # 1. Decide, unless a wrapper outside has decided to skip. Without `inner_state`, as `decide` returns the state,
        # because both branches need one structure. `zeros_like`, because models that are mapped over devices decide
        # one by one.
        idle = jnp.zeros_like(step.state.applied), step.state._replace(inner_state=())
        wrapped_runs, new_state = run_if(step.runs, partial(decide, step), lambda: idle)
        # 2. Pass the decision on, with gradients that are repaired where they are used.
        inner_step = step._replace(state=step.state.inner_state, runs=wrapped_runs)
        if repaired is not None:
            inner_step = inner_step._replace(make_gradients=lambda: repaired(step.make_gradients()))
        returned, inner_state = run_step(wrapped, inner_step)
        return returned, new_state._replace(inner_state=inner_state)

    return _update_by(step_fn)


def _update_by(step_fn: StepFn) -> optax.TransformUpdateExtraArgsFn:
    """Returns an `update` function, to which `step_fn` is attached for `run_step`."""

    def update_fn(
        updates: PyTree, state: AnyState, params: Params = None, **extra_args: Argument
    ) -> Result:
        step = first_step(updates, state, params, extra_args=extra_args, as_params=False)
        return step_fn(step)

    cast(Any, update_fn).step_fn = step_fn
    return update_fn


def inner_transformation(inner: Argument) -> optax.GradientTransformationExtraArgs:
    """Returns `inner` as a transformation that takes extra arguments. Raises if it is no transformation.

    The arrays of its first state have buffers of their own, so that a step can donate state and parameters.
    """
    if not isinstance(inner, optax.GradientTransformation):
        remedy = "Pass it first, before the other arguments"
        if hasattr(inner, "gradient_transformation"):  # optax.MultiSteps
            remedy = "Pass its gradient_transformation()"
        elif callable(inner):
            remedy = "Call it, as in optax.sgd(0.1)"
        raise ValueError(
            f"inner must be an optax.GradientTransformation, got {type(inner).__name__}. {remedy}"
        )
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> AnyState:
        # This names a leaf that is no array, before inner's `init` raises without a name.
        parameter_arrays(params)
        return with_own_buffers(_without_numbers(inner.init(params)), params)

    return inner._replace(init=init_fn)


def declared_arguments(tx: optax.GradientTransformation) -> tuple[set[str], bool]:
    """Returns which extra arguments `update` of the transformation, or of one inside it, declares.

    The second says whether one of them may take any argument.

    * A function of Optax or of this package passes extra arguments on. It declares what follows `params`.
    * A user's function declares all its arguments. It may take any if it has `**extra_args`.
    * A user's factory in `optax.inject_hyperparams` makes an unknown function. It may take any, also `value`.
    """
    names, takes_any = set[str](), False
    for x in _reachable(tx.update):
        if x is _UNKNOWN_FACTORY:
            takes_any = True
            names.add("value")
        elif isinstance(x, types.CodeType):
            taken = x.co_varnames[: x.co_argcount + x.co_kwonlyargcount]
            if _is_known(x):
                taken = (*dropwhile(lambda name: name != "params", taken),)
            else:
                takes_any |= bool(x.co_flags & inspect.CO_VARKEYWORDS)
            # Without `params`, or the first argument, such as `updates`.
            names.update(taken[1:])
    return names, takes_any


def _reachable(function: Any) -> list[Any]:
    """Returns the function and all that it calls or holds, at any depth."""
    found, seen = [function], {id(function)}
    # `found` grows below, and keeps each object, because another could get its id.
    for x in found:
        new = [part for part in _parts(x) if id(part) not in seen]
        seen.update(map(id, new))
        found += new
    return found


def _parts(x: Any) -> Iterable[Any]:
    """Returns what an object calls or holds itself."""
    match x:
        case types.CodeType():
            return x.co_consts  # functions that it makes
        case types.FunctionType():
            # Free variables come as a mapping by name. A case below knows those of `optax.inject_hyperparams`.
            free = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
            return x.__code__, {k: c.cell_contents for k, c in free if c != _EMPTY}
        case types.MethodType():
            return x.__func__, getattr(x.__self__, "__dict__", {})
        case partial():
            return x.func, x.args, x.keywords
        case {"inner_factory": factory}:  # the free variables of inject_hyperparams' update
            code: Any = getattr(factory, "__code__", None)
            if not _is_known(code):
                return *x.values(), _UNKNOWN_FACTORY
            # A factory of Optax calls functions of Optax, which are among its globals.
            named = map(factory.__globals__.get, code.co_names)
            return *x.values(), *filter(inspect.isfunction, named)
        case Mapping():
            return x.values()
        case list() | tuple():
            return x
        case _ if callable(x) and not isinstance(x, type):
            # A jitted function, or an object with `__call__`.
            called = getattr(x, "__wrapped__", type(x).__call__)
            return called, getattr(x, "__dict__", {})
    return ()


def _is_known(code: Any) -> bool:
    """Returns whether a function is one of Optax or of this package."""
    return getattr(code, "co_filename", "").startswith(_KNOWN)


_KNOWN = tuple(f"{x}{os.sep}" for x in (*optax.__path__, Path(__file__).parents[1]))
_EMPTY = types.CellType()  # of a name that is not bound yet
_UNKNOWN_FACTORY = object()  # what it makes may take any argument, also the loss


def _applied(params: optax.Params, updates: optax.Updates) -> optax.Params:
    """Returns `optax.apply_updates`, except that keys and parameters with a float0 update stay unchanged."""

    def add(param: Leaf, update: Leaf) -> Leaf:
        dtype: DType = getattr(update, "dtype", jnp.float32)
        is_nothing = dtype == jax.dtypes.float0 or is_typed_key(update)
        return param if is_nothing else optax.apply_updates(param, update)

    require_no_device_rows(updates, params)
    return jax.tree.map(add, params, updates, is_leaf=lambda x: x is None)


def _require_agreement(runs: Flag, run: Callable[[], Result]) -> None:
    """Raises if some devices would wait for others in a collective of `run` that these skip."""
    over = varying_axes(runs)
    if over and (waiting := over & axes_of_collectives(run)):
        names = ", ".join(sorted(map(repr, waiting)))
        raise ValueError(
            f"the decision to run inner (flush, accum_steps, micro_step or a guard's) may differ over {names}, where "
            f"inner has a collective. Reduce it over {names}"
        )


def _check_devices(new: PyTree, old: PyTree, what: str) -> None:
    """Raises, while tracing, if a leaf may differ between devices after the step but not before it."""

    def check(path: KeyPath, new: Leaf, old: Leaf) -> None:
        if along := newly_varying(new, old):
            raise ValueError(
                f"leaf {leaf_name(path)} of {what} may differ over {along}, but did not before. "
                f"Reduce the gradients over {along}. Or shard parameters and state alike"
            )

    jax.tree.map_with_path(check, new, old)


def _in_dtype_of(of_params: set[DType], new: Leaf, old: Leaf) -> Leaf:
    """Returns a state's float in the old dtype, if this has the new one's range or is a parameter's dtype.

    Hyperparameters or gradients in float32 widen a state that has a narrower parameter's dtype. Without these, inner
    itself would keep that dtype.
    """
    if not all(jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in (new, old)):
        return new
    fits = old.dtype in of_params or jnp.finfo(old.dtype).maxexp >= jnp.finfo(new.dtype).maxexp
    return new.astype(old.dtype) if fits else new


def _without_numbers(state: AnyState) -> AnyState:
    """Returns the state with an array for each Python or NumPy number, so that no step changes its dtype."""

    def fixed(x: Leaf) -> Leaf:
        is_number = isinstance(x, _MAY_BE_NUMBERS) and np.ndim(x) == 0
        return jnp.array(x, jnp.asarray(x).dtype) if is_number else x

    return jax.tree.map(fixed, state)


_MAY_BE_NUMBERS = bool | int | float | complex | np.generic | np.ndarray
