"""The classes of what jmpx's functions return and keep, to annotate and to match."""

from jmpx._base.public import public_names

__getattr__, __dir__ = public_names(__name__, __file__)
