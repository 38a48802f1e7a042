"""Passes over traced programs, which are rebuilt because XLA would make a slow, large or wrong one of them.

The core is right without a pass: each says what it saves, and when it can be deleted. With
`SHREWJAX_DISABLE_PASSES=1` no program is rebuilt.

* `switch`: that variable.
* `jaxprs`: the names that this package needs of JAX's inside.
* `forwarding`: which results of a function are its own arguments.
* `scatters`: the scatters in loops that XLA would lose on several GPUs or TPUs.
* `lost_scatters`: a warning of those that a user's own loop loses.
* `unrolled`: a loop around convolutions, unrolled on a CPU.
* `loops`: the gradients of scanned layers, added to the sum in their own loop.

An operation that a module does not know stays as JAX traced it. These modules import `_base`.
"""
