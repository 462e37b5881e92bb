"""Parameters, optimizer states and averages in 16 bits that keep what they are given."""

from jmpx._base.public import public_names

__getattr__, __dir__ = public_names(__name__, __file__)
