"""Parameters and gradients over several devices: which are shards, and how they are summed.

The way through it, in the order of reading:

1. `shards`: `jmpx.Over`, and the decision which parameters are shards and which are copies. To
   change it, or what it refuses, open this file.
2. `exchanges`: what the decision reads from the program: the gathers of parameters, and the other
   operations by which the loss of a device depends on other devices.
3. `reduction`: the mean of a loss and of its gradients, in the dtype of the policy's reduce.
4. `gather`: `jmpx.distributed.gather`, which gathers in the compute dtype, and sums gradients in
   the reduce dtype.

The room imports `_base`, `_jaxprs` (to trace a function and to walk through its program),
`_policies` and `_scales`. It knows no framework, no optimizer, and nothing of batches.
"""
