"""Audits: which operations of a program run in which dtype, and where precision leaks.

The way through it:

- `api.py` is `jmpx.inspect.audit`: it traces the program, makes its graph (`_inspect/graph.py`) and
  fills the report. `report.py` is that report, whose fields are in `data.py`.
- `findings.py` runs the searches for findings, one file each: `leaks.py` (float32 in a step of 16
  bits), `rounding.py` (constants and casts), `logits.py`, `exponentials.py`, `sums.py`,
  `accumulation.py` and `hardware.py`. **A new kind of finding** is such a file, with `KINDS` and
  `search`, its name in `findings.py`, and a row in the table of `docs/audit.md`.
- What searches share: `step.py` is the program that they search, `values.py` says where numbers are
  from, `streams.py` what becomes of float32 values, `signs.py` which numbers cannot be positive.
- `remedies.py` proposes rules of policy maps for a finding, and `trying.py` traces the program
  under each, so that only rules that mend are printed.
- `summary.py` counts products, saved values, casts and scopes; `flops.py` the FLOPs of products.
- `text.py` prints a report, `alike.py` joins layers that differ in their numbers alone.

It imports `_autocast` for the table of products, `_policies` for rules and scopes, `_jaxprs` and
`_base`, and from `_inspect` the graph and its program.
"""
