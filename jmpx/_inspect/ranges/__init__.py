"""The ranges of a train step: how large and how small its numbers are, `jmpx.inspect.ranges`.

A program runs once in float32, and the numbers of its operations are counted by exponent, so that
the losses in each narrow format and a loss scale follow without another run.

The way through it:

- `api.py` is what users call. `plan.py` says which equations count, and for which scope.
- `counting.py` runs the program and counts, in the bins whose edges `formats.py` knows.
- `data.py` holds the histograms; `report.py` is the result, `Ranges`, and its text, and `plot.py`
  draws it.

It reads programs through `_inspect/programs.py` and `graph.py`, and runs them through
`_inspect/watched.py` and `_inspect/running.py`.
"""
