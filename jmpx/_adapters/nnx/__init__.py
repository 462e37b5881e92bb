"""Flax's NNX: the view of a model, in which each part has the policy that a map gives it.

`objects.py` tells what an object of NNX is in a model, and finds the models and their parts.
`views.py` turns a model into a view. `adapter.py` is what other packages see: models that are
views, or that mark their calls for autocast, while a function runs, and are restored afterwards.
"""
