"""A whole batch in one call: its arguments, divided, and a loop over its micro-batches.

* `roles`: which arguments of a call hold examples, keys, parameters; its
  checks, and messages for a leaf of another role.
* `batch`: the arguments of a call, divided among micro-batches.
* `accumulated`: micro-batches with losses of their own, in one loop of the compiled program. All calls of this package
  run it.
* `divided`: a divided program (`_division`), and a pass of its loops.
* `derivatives`: its results and derivatives, in one pass or two.
* `micro_batched`: a function of the whole batch, with these derivatives.
* `per_device`: a function's results on each device's own examples, as rows.

Private modules hold the parts:

* `_aux`: the aux, reduced leaf by leaf.
* `_overwritten`: the statistics of Flax's fp8 layers, which come as gradients.

These modules import `_base`, `_programs`, `_numerics`, `_division` and, of `_windows`, `window` and `window_state`
alone.
"""
