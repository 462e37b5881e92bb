"""`plan`: what each policy costs on a chip, before the chip is rented.

- `chips.py` knows the chips, and what their compilers, which need no chip, want to be told.
- `compiling.py` exports a traced step, asks a process of its own, and keeps what that says in the
  user's cache, under a key of the program, the chip and all versions.
- `child.py` is that process: it compiles for devices that are not there. Each program has one, so
  that the settings of a compiler, its memory and its end concern nothing else.
- `report.py` is the table; `api.py` is what users call.

The parent traces, so that steps of notebooks and closures need not be pickled; its own backend
takes no part. Counts of the trace are those of `audit`; `child.py` asks `collectives`.
"""
