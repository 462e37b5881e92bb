"""Parameters and gradients over several devices: which are shards, and how they are summed.

The way through it, in the order of reading:

1. `shards.py`: `jmpx.Over`, and the decision which parameters are shards and which are copies. It
   reads the gathers of parameters from the program, and the other operations by which the loss of
   a device depends on other devices.
2. `gather.py`: the mean of a loss and of its gradients, in the dtype of the policy's reduce;
   `jmpx.distributed.gather`, which gathers in the compute dtype and sums gradients in the reduce
   dtype.

The room imports `_base`, `_jaxprs` (to trace a function and to walk through its program),
`_policies` and `_scales`. It knows no framework, no optimizer, and nothing of batches.
"""
