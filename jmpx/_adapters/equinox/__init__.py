"""Equinox: the compute view of a model, in which each part has the policy that a map gives it.

`nodes.py` tells what a node of a model is, and maps nodes with their paths. `views.py` makes the
view of a model from instances of proxy classes. `adapter.py` is what other packages see: models
that are views, or that mark their calls for autocast, while a function runs.
"""

from jmpx._policies.frameworks import required_package

with required_package("equinox", "Equinox"):
    import equinox as equinox
