"""Traced programs, taken apart and put together again, because XLA would make a slow, large or wrong one of them.

* `jaxprs`: the names that this package needs of JAX's inside.
* `forwarding`: which results of a function are its own arguments.
* `scatters`: the scatters in loops that XLA would lose on several GPUs or TPUs.
* `loops`: the gradients of scanned layers, added to the sum in their own loop.
* `reduced`: the types by which an Explicit mesh sums gradients once.

An operation that a module does not know stays as JAX traced it. These modules import `_base`.
"""
