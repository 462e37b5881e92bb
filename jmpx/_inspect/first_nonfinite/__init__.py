"""The first operation of a step that makes an infinity or a NaN: `jmpx.inspect.first_nonfinite`.

- `search.py` runs the program once, notes where infinities and NaNs appear, and follows those that
  reach a result back to the operation that made the first one.
- `api.py` repeats the search at several loss scales and with rules, and finds the cause;
  `report.py` is the result, `FirstNonfinite`.
"""
