"""Windows of micro-batches: around an optimizer, or from the host.

* `window_state`: the states that people save.
* `window`: the arithmetic that adds micro-batches and averages them.
* `accumulate`: a window around an optimizer.
* `grad_accumulator`: a window that the host drives.
* `sharded_state`: states on a mesh.
* `from_optax`: the way from Optax's states to these.

Private modules hold the parts:

* `_gradients`: checks of a micro-batch's gradients.
* `_devices`: the devices over which a window sums, and the rows in which each has its own sum.
* `_noise`: the noise scale.

These modules import `_base`, `_programs`, `_numerics` and `_skipping.wrapping`. Only `from_optax` also imports the
state of a guard.
"""
