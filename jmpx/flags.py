"""absl flags for policies and loss scales. Importing this module registers no flag."""

from jmpx._flags import (
    DEFINE_loss_scale as DEFINE_loss_scale,
    DEFINE_policy as DEFINE_policy,
    DEFINE_policy_map as DEFINE_policy_map,
    MixedPrecisionFlags as MixedPrecisionFlags,
    define_mp_flags as define_mp_flags,
)

__all__ = (
    "DEFINE_loss_scale",
    "DEFINE_policy",
    "DEFINE_policy_map",
    "MixedPrecisionFlags",
    "define_mp_flags",
)
