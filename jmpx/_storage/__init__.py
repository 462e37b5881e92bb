"""What is stored in 16 bits between steps: parameters, optimizer states, and averages of them.

Read in this order:

- `rounding.py`: `stochastic_round`, up or down by chance; a float32 master as a bfloat16 parameter
  and the 16 bits that it lacks.
- `low_precision_params.py`: optax optimizers whose parameters are stored in one of these ways, or
  whose own state is stored in another dtype; which optimizers such wrappers take.
- `ema.py`: moving averages of parameters, in float32.

The public names are in `jmpx.optim` and `jmpx.types`. This room may import `_scales`, `_policies`,
`_jaxprs` and `_base`.
"""
