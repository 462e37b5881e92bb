"""Reports on a step: its dtypes, its numbers and its compiled program, behind `jmpx.inspect`.

All reports share these files:

- `programs.py` traces a loss, with its gradient, or a step. `graph.py` makes a flat graph of the
  program, whose nodes know their module, their scope, and the rule that selects it.
- `watched.py` runs a program and shows each equation to a watcher. `running.py` runs it in float32
  in place of 16 bits, and compiles it once for all programs of one structure.
- `reports.py` makes text, HTML and JSON of a report, a frozen dataclass that yields blocks of text
  and tables; `text.py` spells numbers and policies.

Reports that read programs without running them:

- `audit/` reads the graph: casts, saved bytes, FLOPs by dtype, and findings.
- `hlo/` reads lowered and compiled programs for the report `jmpx.inspect.compiled`: products,
  collectives and memory.
- `plan/` compiles a step for chips that are not there, and shows the cost of each policy.

Reports that run programs:

- `ranges/` runs in float32, and counts numbers by magnitude.
- `first_nonfinite/` runs the program as it is, and finds the origin of an infinity or a NaN.
- `emulate.py` makes a function round its 16-bit results where it writes them.
- `compare.py` runs two functions of one model with these roundings, and shows where they differ.
- `blame/` runs a function with these roundings and in float32, and gives each rounding its share of
  the difference.
- `choose/` searches for the parts that need float32, by blame and plan.

And two that look at arrays alone: `restored.py` checks the dtypes of a restored state, and
`update_report.py` counts updates that round to nothing.

Reports do not import each other, with four exceptions: `blame` and `compare` round as `emulate`
does, `blame` calls `first_nonfinite`, `plan` counts as `audit` and `hlo` do, and `choose` uses
`blame` and `plan`. Of the core they import four packages, `_base`, `_jaxprs`, `_policies` and
`_scales`, and a few modules for one purpose each:

- `_adapters.applying` puts a function under a policy, and `_adapters.scopes` records the policies
  under which modules run.
- `_autocast.kinds` and `rules` know how an operation can run in float32, and `_autocast.value`
  which scopes a rule selects.
- `_remat.saving` knows which products a policy saves for the backward pass.

The contracts in `pyproject.toml` hold both lists; only `_cli` imports this package.
"""
