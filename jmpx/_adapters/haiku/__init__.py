"""Haiku: policies of module classes and paths.

`policies.py` intercepts the calls of modules under a policy map. `adapter.py` is what other rooms
see: Haiku's own registry, marks for autocast, and how `init` creates parameters.
"""
