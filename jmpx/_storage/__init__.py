"""What is stored in 16 bits between steps, and what a checkpoint says of its precision.

Optimizers of 16-bit parameters, in the order of reading:

- `rounding.py`: `stochastic_round`, up or down by chance, on the bits of arrays.
- `split_master.py`: a float32 master as a bfloat16 parameter and the 16 bits that it lacks.
- `low_precision_params.py`: an optax optimizer whose parameters are stored in one of these ways.
- `state_dtype.py`: an optax optimizer whose own state is stored in another dtype.
- `transformations.py`: what such wrappers share: which optimizers they take, keys, updates.

What is stored beside them, or told about it:

- `ema.py`: moving averages of parameters, in float32.

The public names are in `jmpx.optim`, `jmpx.inspect` and `jmpx.types`. This room may import
`_scales`, `_policies`, `_jaxprs` and `_base`.
"""
