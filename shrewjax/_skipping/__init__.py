"""Steps that are skipped: run the optimizer, or leave parameters and its state as they are.

| room | it holds |
|---|---|
| `wrapping` | runs a wrapped transformation or skips it, as updates or as new parameters |
| `guards` | `skip_nonfinite` and `skip_on_spike`: from a few scalars to "run" or "skip" |

A wrapper decides; the innermost transformation runs in one branch, or not at all. These rooms import `_base`,
`_numerics`, and of `_clipping` the global norm, by which a spike is measured, and units, which name leaves.
"""
