"""Programs as XLA writes them, lowered or compiled: `jmpx.inspect.compiled`.

- `module.py` reads the text of a module of HLO: computations, instructions and their places.
- `found.py` finds products and collectives in its instructions, and counts FLOPs and bytes. It
  evaluates a module without numbers: so it counts how often each runs, and follows inputs to them,
  and their results to outputs, through calls, branches and loops.
- `report.py` is the public function, and its result with its tables.

The names of operations are those of HLO, not of JAX's primitives. The package imports `_base`,
`_jaxprs`, and the reports and texts of `_inspect`.
"""
