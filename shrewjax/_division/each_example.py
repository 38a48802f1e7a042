"""`of_each_example`: a function that the user says to be of each example alone, as one operation of a program."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from shrewjax._base.trees import replaced
from shrewjax._base.types import Function, Leaf
from shrewjax._division.labels import OF_EACH_EXAMPLE

P = ParamSpec("P")
Result = TypeVar("Result")


def of_each_example(fun: Callable[P, Result]) -> Callable[P, Result]:
    r"""Says that a function computes each example alone, for operations that `micro_batched` cannot look into.

    .. math:: f(\theta, x)_j = f(\theta, x_j)

    Take it for a kernel inside a loss: `jax.experimental.pallas`, `jax.ffi`, `custom_partitioning`, a `shard_map`.
    Nothing checks the claim. For a micro-batch, the function is traced again, with fewer examples. Outside of
    `micro_batched` and `value_and_grad` it is the function itself.

    Args:
      fun: a function of trees of arrays. It returns arrays with a row for each example. An argument with a row for each
        example is divided, and others, such as parameters, are passed on whole.

    Returns:
      A function with the same arguments, results and derivatives.

    Example:
      >>> import shrewjax
      >>> def kernel(w, x):  # such as one of pallas
      ...     return jnp.tanh(x @ w)
      >>> def loss(w, x):
      ...     return jnp.mean(of_each_example(kernel)(w, x) ** 2)
      >>> w, x = jnp.ones((2, 3)), jnp.eye(8, 2)
      >>> value, grad = jax.jit(shrewjax.value_and_grad(loss, micro_batches=4))(w, x)

    Source: `jax.experimental.custom_partitioning`, which also takes a function at its word.
    """

    @wraps(fun)
    def of_leaves(*args: P.args, **kwargs: P.kwargs) -> Result:
        leaves, structure = jax.tree.flatten((args, kwargs))
        places = [i for i, x in enumerate(leaves) if hasattr(x, "dtype")]
        returned: Any = None

        def of_arrays(*arrays: Leaf) -> list[Leaf]:
            nonlocal returned
            its_leaves = replaced(leaves, places, arrays)
            its_args, its_kwargs = jax.tree.unflatten(structure, its_leaves)
            made, returned = jax.tree.flatten(fun(*its_args, **its_kwargs))
            return made

        made = _primitive.bind(*(leaves[i] for i in places), function=of_arrays)
        return jax.tree.unflatten(returned, made)

    return of_leaves


_primitive = core.Primitive(OF_EACH_EXAMPLE)
_primitive.multiple_results = True


def _run(*operands: Leaf, function: Function) -> Sequence[Leaf]:
    return function(*operands)


def _types(*operands: Any, function: Function) -> Sequence[Any]:
    return jax.make_jaxpr(function)(*operands).out_avals


def _derivative(primals: Any, tangents: Any, *, function: Function) -> Any:
    given = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def of_given(*some: Leaf) -> Sequence[Leaf]:
        return function(*replaced(primals, given, some))

    return jax.jvp(of_given, [primals[i] for i in given], [tangents[i] for i in given])


def _mapped(operands: Any, dims: Any, *, function: Function) -> Any:
    made = jax.vmap(function, dims)(*operands)
    return made, [0] * len(made)


_primitive.def_impl(_run)
_primitive.def_abstract_eval(_types)
ad.primitive_jvps[_primitive] = _derivative
batching.primitive_batchers[_primitive] = _mapped
mlir.register_lowering(_primitive, mlir.lower_fun(_run, multiple_results=True))
