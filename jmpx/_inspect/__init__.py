"""Looks at a train step: its dtypes, its numbers and what it sends, behind `jmpx.inspect`.

The way through it:

- `programs.py` traces a loss, with its gradient, or a step; `graph.py` makes a flat graph of the
  program. `running.py` says which node is which equation of a program that runs, and runs
  equations of 16 bits in float32. `compiled.py` compiles it once for all programs that do the same.
- `reports.py` and `progress.py` are what reports share: JSON, a table, and a progress bar.
- `emulate.py` makes a function round its 16-bit results where it writes them.
- `compare/` runs two functions of one model so, and says where their numbers part.
- `blame/` runs a function so, and in float32, and gives each rounding its share of the difference.
- `plan/` compiles a step for chips that are not there, and tells what each policy costs.
- `choose/` searches the parts that need float32, by blame and plan.
- `audit/` reads the graph, without numbers: casts, saved bytes, FLOPs by dtype, and findings.
- `ranges/` runs the program in float32, and counts the magnitudes of its numbers.
- `first_nonfinite/` runs the program as it is, and finds the origin of an infinity or a NaN.
- `hlo/` reads a lowered or compiled program: what it multiplies, sends between devices and keeps.

Each of them has half a page of its own, and opens with `api.py` or `report.py`. They do not import
each other, but for `blame`, which asks `first_nonfinite` for what is not finite; `plan`, which
counts as `audit` and reads what devices send by `hlo`; and `choose`, which stands on blame
and plan. The room imports from all rooms below it, most of all `_jaxprs` and `_policies`; of
`_adapters` it reads the policies under which modules ran, and `blame` puts a function under one.
"""
