"""The train step: gradients of a scaled loss, optimizer steps that are skipped, and their counts.

Read in this order:

1. `gradient.py`: `value_and_grad` and `grad`. `options.py` has model state, the checked arguments,
   and the classes of the results.
2. `differentiation.py`: one call of a gradient function, from the arguments to the flag that says
   whether all gradients are finite. `widening.py` has products return gradients in float32.
3. `batches.py`: takes the arrays out of the arguments, splits them into micro-batches, and sums the
   gradients of these in a loop.
4. `optimizer.py`: `optimizer_update` and `skip_nonfinite`, which select between the old and the new
   state. `checks.py` refuses wrong arguments, also those of other files.
5. `progress.py`: counts of skipped steps, which the host checks and a logger plots.

To change how a skipped step is counted, open `optimizer.py` (`_SkipNonfinite.counted`);
`progress.py` reads the counts by name. MPX's names are in `jmpx/mpx.py`.

The package imports `_base`, `_jaxprs`, `_policies`, `_scales`, `_storage`, `_adapters` (how a
function runs under a policy) and `_devices` (shards, and means over devices). Only the functions
that need optax import it.
"""
