"""The classes of results and states of jmpx's functions, for annotations and `isinstance`."""

from jmpx._base.public import public_names

__getattr__, __dir__ = public_names(__name__, __file__)
