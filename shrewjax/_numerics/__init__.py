"""Numbers over leaves and devices: how a tree of gradients becomes a few scalars, and a scalar is applied to it.

* `floats`: floats and their bits; numbers with an exponent of their own.
* `reductions`: one number per leaf or unit, over every device that holds a part. All collectives are here,
  but one in `mesh.summed`.
* `vectors`: numbers of leaves and units in few vectors, joined and cut.
* `norms`: norms that neither overflow nor underflow: of all leaves, by leaf, by unit and by slice.
* `scaling`: from a norm and its limit to the scale, and its product with a leaf.
* `percentiles`: the exact percentile of magnitudes, by counting.
* `histories`: past measurements: their percentile, their moving averages.

These modules import `_base` and those above them. No rule and no policy is decided here.
"""
