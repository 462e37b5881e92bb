"""What a step sends between devices: `jmpx.inspect.collectives`.

Nothing runs: the collectives are read from a lowered or compiled program, with their bytes, how
often they run, which input they carry and which output they become.

The way through it:

- `report.py` is what users call, and its result, `Collectives`; `text.py` prints it.
- `hlo.py` reads the text of a program, as JAX lowers it or as XLA compiles it, as the blocks of
  operations that `dataflow.py` evaluates without numbers, to follow inputs to collectives and
  collectives to outputs, through calls, branches and loops.
- `data.py` says what a collective is, and how many bytes it sends.

The names of operations are those of HLO, not the primitives of JAX. It imports only `_base`,
`_jaxprs/places.py` and `reports.py`.
"""
