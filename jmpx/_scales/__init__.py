"""Loss scales: the pytrees that keep float16 gradients from underflowing.

Read in this order:

- `arguments.py`: the one table of their arguments, with keys and ranges; constructors, strings
  and flags check numbers by it.
- `scaling.py`: what all loss scales share: the product with a pytree, and their string.
- `dynamic.py`: `DynamicLossScale`, when it grows and shrinks, and its leaves.
- `kinds.py`: `NoOpLossScale` and `StaticLossScale`; `LossScale`, the type of all three.
- `numbers.py`: numbers as texts, such as `2**15`.
- `strings.py`: `get_loss_scale`, the grammar in strings and in mappings; what decides `auto`.
- `mixed_precision.py`: `MixedPrecision`, a policy map and a loss scale in one value and one string.
- `flax_states.py`: how `flax.serialization` saves and restores them.

A new argument is a line in `arguments.py`, a field of `DynamicLossScale`, and what `adjust` does
with it.

It may import `_base`, `_jaxprs` and `_policies`. Which steps are skipped is in `_steps`.
"""
