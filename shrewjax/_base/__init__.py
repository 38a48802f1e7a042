"""What every module may use: arguments, trees, states, mapped axes, branches.

* `types`: the types that signatures name.
* `branches`: one conditional that copies nothing, and flags that are known while tracing.
* `mesh`: mapped axes: over which an array varies, along which a reduction must run.
* `trees`: a tree of gradients: which leaves count, and their names in messages.
* `states`: what state classes share, and `metrics`.
* `arguments`: a checked argument, or an error that names it.

These modules import JAX and those above them.
"""
