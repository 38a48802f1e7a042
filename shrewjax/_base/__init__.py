"""What every module may use: arguments, trees, states, axes, meshes, branches.

* `types`: the types that signatures name.
* `branches`: one conditional that copies nothing, and flags that are known while tracing.
* `axes`: mapped axes: over which an array varies, along which a reduction must run.
* `mesh`: arrays that XLA partitions over a mesh: what their types say, and how to place them.
* `flax_names`: names of Flax, which need not be installed.
* `trees`: a tree of gradients: which leaves count, and their names in messages.
* `states`: what state classes share, and `metrics`.
* `arguments`: a checked argument, or an error that names it.

These modules import JAX, Optax, NumPy and those above them.
"""
