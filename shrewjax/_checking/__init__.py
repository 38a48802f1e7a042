"""A check of a user's loss: whether its micro-batches give what the whole batch gives.

* `results`: a divided call, with the whole batch and with each micro-batch.
* `causes`: the lines where they part, and the remedies.
* `micro_batches`: the check.

These modules import `_base`, `_programs`, `_numerics` and `_batches`. No other package imports them.
"""
