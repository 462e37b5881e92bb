"""The ranges of a train step: how large and how small its numbers are, `jmpx.inspect.ranges`.

A program runs once in float32, and the numbers of its operations are counted by exponent, so that
the losses in each narrow format, a loss scale and a policy map follow without another run.

The way through it:

- `api.py` is what users call. `plan.py` picks the operations that are measured, and says which row
  of the table each belongs to.
- `measuring.py` runs the program; `statistics.py` measures one array on its device, in bins whose
  edges `formats.py` knows.
- `collecting.py` makes `data.py`'s frozen data out of it, by scope.
- `report.py` is the result: `Ranges`, with `advice.py` (loss scale and rules), `text.py` (tables)
  and `plot.py` (the picture).

It reads programs through `_inspect/programs.py` and `graph.py`, and runs them through
`_jaxprs/watched.py` and `_inspect/widening.py`.
"""
