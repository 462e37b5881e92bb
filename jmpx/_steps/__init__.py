"""The train step: gradients of a scaled loss, optimizer steps that are skipped, and their counts.

The way through it, in the order of reading:

1. `gradient`: `value_and_grad` and `grad`. `options` checks what they are given,
   `results` has what they return.
2. `differentiation`: one call of a gradient function, from the arguments to the flag that says
   whether all gradients are finite. `arrays` takes the parameters out of the first argument,
   `model_state` hands running statistics on, and keeps the old ones where a gradient overflowed;
   `widening` has gradients leave their products in float32.
3. `batches` splits the arguments of a call. `microbatches` sums the gradients of the parts in a
   loop.
4. `optimizer`: `optimizer_update` and `skip_nonfinite`; `skipping` selects between the old and the
   new state, or raises. `checks` refuses wrong arguments, also those of other files.
5. `progress` tells on the host that a run only skips; `metrics` has the numbers to plot.
6. `mpx`: the same functions by MPX's names, arguments and defaults.

To change how a skipped step is counted, open `optimizer` (`_SkipNonfinite.counted`); `progress` and
`metrics` read the counts by name.

The room imports `_base`, `_jaxprs`, `_policies`, `_scales`, `_storage`, `_adapters` (how a function
runs under a policy) and `_devices` (shards, and means over devices). Optax is imported by the
functions that need it alone.
"""
