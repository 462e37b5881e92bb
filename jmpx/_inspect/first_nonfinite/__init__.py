"""The first operation of a train step that makes an infinity or a NaN: `api.py` begins."""

from jmpx._inspect.first_nonfinite.api import first_nonfinite as first_nonfinite
from jmpx._inspect.first_nonfinite.report import FirstNonfinite as FirstNonfinite
