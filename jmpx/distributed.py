"""Parameters of which each device holds a shard."""

from jmpx._base.public import public_names

__getattr__, __dir__ = public_names(__name__, __file__)
