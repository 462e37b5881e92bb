"""Flax's Linen: the policy of each module, under a context around `init` and `apply`.

`policies.py` intercepts the calls of modules under a policy map; `modules.py` tells what a module
is in a call. `adapter.py` is what other rooms see: marks for autocast, and the creation of
parameters by `init`.
"""
