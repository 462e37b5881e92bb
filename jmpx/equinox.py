"""Equinox: the compute view of a model, in which each part has the policy that a map gives it."""

from jmpx._adapters.equinox.views import with_policies as with_policies

__all__ = ("with_policies",)
