"""What a program does in which precision, and where its values leave the range of a dtype."""

from jmpx._base.public import public_names

__getattr__, __dir__ = public_names(__name__, __file__)
