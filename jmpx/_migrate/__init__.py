"""Rewrites programs of JMP, MPX, Flax's `DynamicScale` and `hk.mixed_precision`.

In the order of reading:

- `names.py`: where each name is now; to which import a name of a module is bound, by libcst, and
  which uses of a variable each of its definitions reaches.
- `imports.py` and `scales.py`: the edits of imports, and of Flax's `DynamicScale`.
- `edits.py`: rewrites the source of one module. It takes names of these libraries, never names that
  only look alike. What it is not sure of it leaves, with a comment above that says what to write.
- `files.py`: many files: their diffs, what is left to do, the writing.

The command `migrate` of `_cli` calls it. This room may import `_base`.
"""
