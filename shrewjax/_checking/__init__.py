"""A check of a user's loss: whether its micro-batches give what the whole batch gives.

* `results`: the batch and its micro-batches, and how far their results differ.
* `causes`: the lines where they part, and the remedies.
* `micro_batches`: the check.

These modules import `_base`, `_programs`, `_numerics` and `_batches`. Of the package, `shrewjax.flax` alone imports
them.
"""
