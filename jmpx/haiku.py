"""Haiku: policies of module classes and paths.

Haiku's own registry holds the policies of its module classes: `jmpx.set_policy` and the other
functions of jmpx's registry read and write it, so `hk.mixed_precision` and jmpx never disagree.
`policies` puts a policy map over `init` and `apply`.
"""

from jmpx._adapters.haiku import policies as policies

__all__ = ("policies",)
