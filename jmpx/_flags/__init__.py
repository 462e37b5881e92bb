"""absl flags for policies and loss scales, the public names of `jmpx.flags`.

- `define.py`: flags that also parse what programs set; `DEFINE_policy`, `DEFINE_policy_map` and
  `DEFINE_loss_scale`, one flag each.
- `mixed_precision.py`: `define_mp_flags`: all flags of a program at once, the object that reads
  them, and what contradicts.

No file registers a flag when it is imported. Each file disclaims its flags, so that `--help` lists
them under the module that defines them. A flag's value is parsed by functions of `_policies` and
`_scales`, whose errors absl shows as usage errors.

To follow a flag to a module: `--mp_policy` gives `MixedPrecisionFlags.policy_map`, which a program
hands to `jmpx.apply_policy` or to `policy=` of a gradient function (`_adapters/applying.py`).

It may import every room but `_inspect` and `_cli`.
"""
