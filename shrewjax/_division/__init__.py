"""The division of a traced program of a whole batch into what runs before, in and after a loop over micro-batches.

* `labels`: the table of operations: along which dimensions they can be divided.
* `rows`: where in an array each example has its part, and the sizes of micro-batches.
* `fission`: a scan or a checkpoint, of which a part can be divided, becomes two.
* `kinds`: what each value has to do with examples: rows, a sum, the same for all, mixed.
* `plan`: the steps before the loop, in it and after it, and the frontier between.
* `draws`: the part of a draw of random bits that a micro-batch needs.
* `micro_batch`: the steps of the loop, run with the sizes of a micro-batch.
* `each_example`: a function that is taken at its word.
* `report`: the error if too little is divided, and the text of `print_micro_batches`.

Start at `kinds`. What depends on parameters is in the loop only if a rule proves it; all else is after it. These
modules import `_base` and `_programs`.
"""
