"""Audits: which operations of a program run in which dtype, and where precision leaks.

- `api.py` is `jmpx.inspect.audit`: it traces the program, makes its graph (`_inspect/graph.py`),
  runs the searches for findings, and traces the program again under rules that may fix them.
- `report.py` is the report: its data, its text, and its check for tests.
- The searches: `rounding.py` (logits, constants and casts), `leaks.py` (float32 in a step of 16
  bits), `hazards.py` (operations and sums in 16 bits) and `hardware.py` (what a platform does).
  **A new kind of finding** is a name in `KINDS` of one of them, code in its `search`, and a row in
  the table of `docs/findings.md`. A new file needs its name in `_SEARCHES`, too.
- The searches share `step.py` (the audited step, its streams of float32 values, how a finding is
  made, and rules that may fix it) and `values.py` (facts about nodes and values).
- `trying.py` runs the program, with rules and with the edits of advice, and compares the errors.
- `summary.py` counts products, saved values, casts and scopes.

It imports `_autocast` for the table of products, `_remat` for batched ones, `_policies` for rules
and scopes, `_jaxprs` and `_base`, and from `_inspect` the graph, its program, reports, and the runs
of `blame`.
"""
