"""Every timed row of the README's tables, and more.

    python examples/benchmarks/all.py [--json FILE] [--quick]

All benchmarks run in one process, one after the other; each prints its own rows, too, when run by itself.
It takes many minutes on two CPU cores; rows are printed as they come. edges.py is not timed.
`recorded/all.csv` has medians of two CPU cores with JAX 0.10.2 and Optax 0.2.8, of 58 million float32 parameters in 76
leaves, donated. Memory is temporary, in multiples of the parameters.
"""

import _harness
import accumulation
import clipping
import cotangents
import percentile
import readme
import small
import unit_norms
import value_and_grad

if __name__ == "__main__":
    _harness.main(
        __doc__,
        [
            *(
                clipping.training_step,
                clipping.norm_error,
                clipping.compile_time,
                clipping.small_trees,
            ),
            readme.window,
            *(
                accumulation.window,
                accumulation.micro_step,
                accumulation.executions,
                accumulation.average_error,
            ),
            *(value_and_grad.time_and_memory, value_and_grad.difference),
            *(percentile.cold_search, percentile.reads, percentile.whole_clip),
            *(unit_norms.clip_alone, unit_norms.training_step),
            cotangents.transformer_block,
            *(small.step_time, small.compile_time),
        ],
    )
