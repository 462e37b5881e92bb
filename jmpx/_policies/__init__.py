"""Policies: in which dtype a model stores, computes and returns, for all of it or by parts.

The values, from the smallest to the largest:

- `policy.py`: a `Policy`, three dtypes and two more precisions, with the casts to them.
- `rules.py`: a `Rule` for the parts of a model that a selector matches; how globs and class names
  match.
- `maps.py`: a `PolicyMap`, a default policy, rules and the way to apply them; the warnings of rules
  that matched nothing.

Their grammar, which reads strings and nested mappings as entries, keys and values that know their
places for error messages:

- `strings.py`: `get_policy`; the keys, the presets, and how each value is read.
- `map_strings.py`: `get_policy_map`; rules, selectors and the sections of a mapping.

What holds while a program runs:

- `registry.py`: `set_policy` and its relatives attach policies to classes, per thread.
- `frameworks.py` and `modules.py`: what an adapter of a framework offers to the files of this room.

It may import `_base` and `_jaxprs`. Casts at the calls of modules are in `_adapters`, those of
operations in `_autocast`.
"""
