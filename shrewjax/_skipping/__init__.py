"""Steps that are skipped: run the optimizer, or leave parameters and its state as they are.

* `wrapping`: runs a wrapped transformation or skips it, as updates or as new parameters.
* `guards`: `skip_nonfinite` and `skip_on_spike`: from a few scalars to "run" or "skip".

These modules import `_base` and `_numerics`, from `_programs` `jaxprs`, and from `_clipping` `global_norm` and `units`.
"""
