"""Flax: policy maps for Linen modules, and for NNX modules.

`policies` is for Linen, a context around `init` and `apply`; `with_policies` is for NNX, a view of
a model that is made inside the loss function.
"""

from jmpx._policies.frameworks import required_package

with required_package("flax", "Flax"):
    from jmpx._adapters.linen import policies as policies
    from jmpx._adapters.nnx.views import with_policies as with_policies

__all__ = ("policies", "with_policies")
