"""`plan`: what each policy costs on a chip, before the chip is rented.

- `api.py` is what users call, and its result, a table.
- `chips.py` knows the chips, and the settings and options of their compilers, which need no chip.
- `compiling.py` exports a traced step, asks a process of its own, and keeps the answer in the
  user's cache, under a key of the program, the chip and all versions. Each program has a process,
  so that the settings of a compiler, its memory and its end concern nothing else.

The parent traces, so that steps of notebooks and closures need not be pickled; its own backend
takes no part. Counts of the trace are those of `audit`; the other process asks `compiled`.
"""
