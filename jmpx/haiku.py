"""Haiku: policies of module classes, kept in Haiku's own registry.

`jmpx.set_policy` and its kin come here for every Haiku module class, so
`hk.mixed_precision` and jmpx never disagree. There is no need to import this module.
"""

try:
    import haiku as hk
except ModuleNotFoundError as error:
    if error.name != "haiku":
        raise
    raise ModuleNotFoundError(
        "jmpx.haiku needs Haiku, which is not installed: pip install 'jmpx[haiku]'.", name="haiku"
    ) from None

set_policy = hk.mixed_precision.set_policy
push_policy = hk.mixed_precision.push_policy
clear_policy = hk.mixed_precision.clear_policy
policy_of = hk.mixed_precision.get_policy
current_policy = hk.mixed_precision.current_policy
