"""What a step sends between devices: `jmpx.inspect.collectives`.

Nothing runs: the collectives are read from a lowered or compiled program, with their bytes, how
often they run, which input they carry and which output they become.

The way through it:

- `report.py` is what users call, and its result, `Collectives`; `text.py` prints it.
- `hlo.py` finds collectives in the instructions of a program that `_inspect/hlo` reads and follows.
- `data.py` says what a collective is, and how many bytes it sends.

It imports only `_base`, `_inspect/hlo` and `_jaxprs/places.py`.
"""
