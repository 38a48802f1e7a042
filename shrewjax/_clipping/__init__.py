"""The clipping rules, by what they clip.

* `global_norm`: all gradients together, by their norm, to a threshold or to one from past norms.
* `unit_norms`: leaves, layers, rows or columns, each by its own norm.
* `elements`: element by element, to a bound or to a percentile of the magnitudes.
* `cotangents`: the cotangent of a value, in the backward pass.

`rule` has what all rules share, and counts updates. `units` finds, measures and scales units, also the leaves of
`per_leaf=True`.
These modules import `_base` and `_numerics`.
"""
