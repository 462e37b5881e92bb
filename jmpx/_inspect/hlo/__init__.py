"""Programs as XLA writes them, for `jmpx.inspect.collectives` and `jmpx.inspect.products`.

The way through it:

- `module.py` reads the text of a module of HLO: computations, instructions and their places.
- `dataflow.py` evaluates it without numbers, to count what is found in it, and to follow inputs to
  that and that to outputs, through calls, branches and loops.
- `programs.py` takes what users have: a lowered or compiled step, or a text. A function that it is
  given says what is found in an instruction. Reports on a program share how they become data.
- `tables.py` prints what was found, the largest first.

The names of operations are those of HLO, not the primitives of JAX. It imports only `_base` and
`_jaxprs/places.py`.
"""
