"""Compares two functions of one model, scope by scope, behind `jmpx.inspect.compare`.

The way through it:

- `outputs.py` runs a program twice, in float32 and as it is written, and keeps what leaves each
  module and each named scope; turns of a scan are stacked.
- `pairs.py` finds which outputs of the two functions are the same numbers: those that agree in
  float32, in whatever order of their axes.
- `report.py` holds what was found, and prints it; `api.py` is the function.

Imports go from the bottom to the top.
"""
