"""`plan`: what each policy costs on a chip, before the chip is rented.

- `api.py` is the public function, and its result, a table.
- `chips.py` knows the chips, and the settings and options of their compilers, which need no chip.
- `compiling.py` exports a traced step, compiles it in another process, and keeps the answer in the
  user's cache, under a key of the program, the chip and all versions. Each program has a process
  of its own, so that a compiler's settings, memory and crashes affect nothing else.

The parent process traces, so that steps from notebooks and closures need not be pickled; its own
backend is not used. The trace is counted as by `audit`, the compiled program by `compiled`.
"""
