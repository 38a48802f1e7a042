"""A whole batch in one call: its arguments, divided, and a loop over its micro-batches.

* `roles`: which arguments of a call hold examples, keys, parameters; its
  checks, and messages for a leaf of another role.
* `batch`: the arguments of a call of `value_and_grad`, divided among micro-batches.
* `value_and_grad`: a whole batch in one call, in one loop of the compiled program.
* `micro_batched`: a loss whose derivatives are computed by it.
* `micro_batch_map`: the rows of a whole batch, for any loss, in two passes.
* `per_device`: a function's results on each device's own examples, as rows.

Private modules hold the parts:

* `_aux`: the aux, reduced leaf by leaf.
* `_of_arrays`: a call as a function of its arrays, for rules of JAX.
* `_overwritten`: the statistics of Flax's fp8 layers, which come as gradients.

These modules import `_base`, `_programs`, `_numerics` and, of `_windows`, `window` and `window_state` alone.
"""
