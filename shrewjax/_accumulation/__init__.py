"""Windows of micro-batches: around an optimizer, from the host, or in one call.

| room | it holds |
|---|---|
| `window` | the window: its states, and the arithmetic that adds micro-batches and averages them |
| `accumulate` | a window around an optimizer: `accumulate`, `apply_gradients`, `flush`, `check_window` |
| `grad_accumulator` | `GradAccumulator`, a window that the host drives |
| `value_and_grad` | a whole batch in one call, in one loop of the compiled program |
| `sharded_state` | `state_specs` and `redistribute`: states on a mesh |

`_micro_batch`, `_noise` and `_aux` hold what one micro-batch adds, the noise scale, and the reduced aux. Data goes one
way: a micro-batch is checked, decided on, added to the sum, and the sum is divided as the window closes. These rooms
import `_base`, `_numerics`, and `_skipping.wrapping`, which runs the wrapped optimizer. They import no clipping rule.
"""
