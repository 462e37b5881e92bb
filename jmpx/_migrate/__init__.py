"""Rewrites programs of JMP, MPX, Flax's `DynamicScale` and `hk.mixed_precision`.

In the order of reading:

- `names.py`: where each name is now; to which import a name of a module is bound, by libcst, and
  which uses of a variable each of its definitions reaches.
- `scales.py`: the edits of Flax's `DynamicScale`.
- `edits.py`: the edits of imports; rewrites the source of one module. It changes names of these
  libraries, never names that only look alike. Where it is not sure, it leaves a comment above that
  says what to write.
- `files.py`: many files: their diffs, what is left to do, the writing.

The command `migrate` of `_cli` calls it. This package imports `jmpx.mpx` for its names alone.
"""
