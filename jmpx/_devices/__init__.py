"""Parameters and gradients over several devices: which are shards, and how they are summed.

Read in this order:

1. `shards.py`: finds in a program the gathers of parameters, and the other operations by which the
   loss of a device depends on other devices; `jmpx.Over`; decides which parameters are shards and
   which are copies.
2. `gather.py`: the mean of a loss and of its gradients, in the dtype of the policy's reduce;
   `jmpx.distributed.gather`, which gathers in the compute dtype and sums gradients in the reduce
   dtype.

The package imports `_base`, `_jaxprs` (to trace a function and to walk through its program),
`_policies` and `_scales`. It knows no framework, no optimizer, and nothing of batches.
"""
