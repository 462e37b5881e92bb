"""Rewrites programs of JMP, MPX, jmpx 0.2, Flax's `DynamicScale` and `hk.mixed_precision`.

`moves` says where each name is now, `names` to which import a name of a module is bound. `edits`
rewrites the source of one module by libcst: names of these libraries, never names that only look
alike. What it is not sure of it leaves, with a comment above that says what to write. `files` shows
the diff of many files, and writes them.
"""
