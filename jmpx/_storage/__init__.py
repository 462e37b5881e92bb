"""Storage between steps: 16-bit parameters and optimizer states, and averages in float32.

Read in this order:

- `rounding.py`: `stochastic_round`, up or down by chance; a float32 master as a bfloat16 parameter
  and the 16 bits that it lacks.
- `low_precision_params.py`: wraps optax optimizers so that they store parameters in one of these
  ways, or their own state in another dtype.
- `ema.py`: moving averages of parameters, in float32.

The public names are in `jmpx.optim` and `jmpx.types`. This package may import `_scales`,
`_policies`, `_jaxprs` and `_base`.
"""
