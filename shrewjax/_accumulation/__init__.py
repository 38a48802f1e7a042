"""Windows of micro-batches: around an optimizer, from the host, or in one call.

* `window`: its states, and the arithmetic that adds micro-batches and averages them.
* `accumulate`: a window around an optimizer.
* `grad_accumulator`: a window that the host drives.
* `batch`: the arguments of a call of `value_and_grad`.
* `value_and_grad`: a whole batch in one call, in one loop of the compiled program.
* `micro_batched`: a loss whose derivatives are computed by it.
* `contrastive`: the same for losses that compare examples, in two passes.
* `per_device`: a function's results on each device's own examples, as rows.
* `sharded_state`: states on a mesh.
* `from_optax`: the way from Optax's states to these.

Private modules hold the parts:

* `_micro_batch`: checks of a micro-batch's gradients.
* `_devices`: the devices over which a window sums, and the rows in which each has its own sum.
* `_noise`: the noise scale.
* `_aux`: the aux, reduced leaf by leaf.
* `_mistaken_roles`: what is odd about the arguments of a call whose examples have no common number.
* `_overwritten`: the statistics of Flax's fp8 layers, which come as gradients.

These modules import `_base`, `_programs`, `_numerics` and `_skipping.wrapping`. Only `from_optax` also imports the
state of a guard.
"""
