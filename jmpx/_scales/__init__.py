"""Loss scales: the pytrees that keep float16 gradients from underflowing.

Read in this order:

- `scaling.py`: the table of arguments, with keys and ranges, by which constructors, strings and
  flags check numbers; numbers as texts, such as `2**15`; checkpoints of Flax; the base class.
- `kinds.py`: `DynamicLossScale`, `NoOpLossScale` and `StaticLossScale`; `LossScale`, their union.
- `strings.py`: `get_loss_scale`, and `MixedPrecision`, a policy map and a loss scale in one value
  and one string.

A new argument is a line in the table of `scaling.py`, a field of `DynamicLossScale`, and its part
in `adjust`.

It may import `_base`, `_jaxprs` and `_policies`. Which steps are skipped is in `_steps`.
"""
