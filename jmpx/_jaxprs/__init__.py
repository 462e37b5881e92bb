"""Jaxprs: functions as lists of equations, which jmpx traces, reads, changes and runs again.

Read in this order:

- `core.py` traces a function, reads equations and their scopes, and runs an equation on other
  operands. It hides what differs between versions of JAX, and is the only file that uses
  `jax.extend`, which `extend.py` imports together with jmpx.
- `inner.py` says how calls, branches, loops and shard maps run the jaxprs that they hold. `walk`
  interprets a jaxpr on values of any kind, `find` searches from results backwards, `split` makes
  pieces, and `structure` makes a key that equal programs share.
- `equations.py` says which primitives only move numbers, counts FLOPs, and finds the user's line.
- `marks.py` tells which module an equation belongs to, and names the scopes that autocast reads,
  among them `jmpx.full_precision`. It also names the types that JAX does not make public.
- `rewriting.py` changes equations, and the jaxprs in their parameters.
- `gathers.py` sums the gradients of gathers from 16-bit tables in float32.
- `passed_on.py` finds the parameters of NNX that a function returns unchanged, in new arrays.

It imports only `_base`.
"""
