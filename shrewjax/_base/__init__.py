"""The ground: what every room may use.

| room | it holds |
|---|---|
| `branches` | one conditional that copies nothing, and flags that are known while tracing |
| `mesh` | mapped axes: over which an array varies, along which a reduction must run |
| `trees` | a tree of gradients: its floating leaves, the others that pass through, and leaves' names in messages |
| `states` | state classes: described fields, counters, and `metrics`, which finds what they measured |
| `arguments` | a checked argument, or an error that names it |

These rooms import JAX and each other, upward in this table, and no other wing. Nothing here computes with a gradient.
"""
