"""Rewrites programs of JMP, MPX, jmpx 0.2, Flax's `DynamicScale` and `hk.mixed_precision`.

In the order of reading:

- `moves.py`: where each name and argument is now.
- `names.py`: to which import a name of a module is bound, by libcst, and whether all its uses are
  known.
- `definitions.py`: which uses of a variable each of its definitions reaches.
- `marks.py`: what the edits have in common: facts, and marks of what is left to do.
- `imports.py`, `calls.py`, `scales.py`: the edits of imports, of arguments of jmpx 0.2, and of
  Flax's `DynamicScale`.
- `edits.py`: rewrites the source of one module. It takes names of these libraries, never names that
  only look alike. What it is not sure of it leaves, with a comment above that says what to write.
- `files.py`: many files: their diffs, what is left to do, the writing.

The command `migrate` of `_cli` calls it. This room may import `_base`.
"""
