"""Policies: in which dtypes a model, or a part of it, stores, computes and returns.

The values:

- `policy.py`: a `Policy`, three dtypes and two more precisions, with the casts to them.
- `maps.py`: a `Rule` for the parts of a model that a selector matches; a `PolicyMap`, which is a
  default policy, rules and the way to apply them; rules on trial, which reports add when they
  trace a program again.
- `unused.py`: warnings of rules that matched nothing, and what they suggest.

The grammar of strings and nested mappings; each value knows its place, for error messages:

- `strings.py`: `get_policy`; the keys, the presets, and how each value is read.
- `map_strings.py`: `get_policy_map`; rules, selectors and the sections of a mapping.

What holds while a program runs:

- `registry.py`: `set_policy` and its relatives attach policies to classes, per thread; the modules
  of a function under autocast ask it for theirs.
- `frameworks.py`: the interface that each framework's adapter implements, and calls of functions
  with proxies of their modules. To support another framework, begin there.

It may import `_base` and `_jaxprs`. Modules are cast in `_adapters`, operations in `_autocast`.
"""
