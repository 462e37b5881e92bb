"""Rewrites programs of JMP, MPX, jmpx 0.2, Flax's `DynamicScale` and `hk.mixed_precision`.

- `moves` says where each name is now, `names` to which import a name of a module is bound.
- `edits` rewrites the source of one module by libcst: names of these libraries, never names that
  only look alike. It leaves what it is not sure of, with a comment above that says what to write.
- `files` shows the diff of many files, and writes them. A file is written as a whole or not at all.

It is the only room that needs libcst, which the extra `migrate` installs. To teach it a name that
moved, add it to `RENAMED` in `jmpx/_base/moved.py`, or to the tables of `moves` if its arguments
changed, too.
"""
