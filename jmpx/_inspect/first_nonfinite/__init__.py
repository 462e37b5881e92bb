"""The first operation of a step that makes an infinity or a NaN: `jmpx.inspect.first_nonfinite`.

A program runs once, with a check of each result; the infinities that reach a result are followed
back to the operation that made the first one, and rules that may mend it are tried.

The way through it:

- `api.py` is what users call; `replay.py` leads through a search, at several loss scales and with
  rules (`remedies.py`).
- `search.py` runs the program and notes where infinities and NaNs appear.
- `flow.py` follows them backwards through the graph of the program.
- `causes.py` says why an operation made one; `report.py` is the result, `FirstNonfinite`.

It reads programs through `_inspect/programs.py` and `graph.py`, and runs them through
`_inspect/watched.py` and, in float32, `_inspect/running.py`.
"""

from jmpx._inspect.first_nonfinite.api import first_nonfinite as first_nonfinite
from jmpx._inspect.first_nonfinite.report import FirstNonfinite as FirstNonfinite
