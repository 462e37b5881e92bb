"""Jaxprs: functions as lists of equations, which jmpx traces, reads, changes and runs again.

The way through it:

- `core.py` traces a function, reads equations and their scopes, and runs an equation on other
  operands. It is the only file that uses `jax.extend`, which `extend.py` imports with jmpx, and
  hides what differs between versions of JAX. `types.py` names the types that JAX does not make
  public.
- `inner.py` says how calls, branches, loops and shard maps run the jaxprs that they hold, and goes
  through a jaxpr on values of any kind. Whoever interprets a program begins here.
- `backward.py` searches from results backwards, through calls, loops and branches, such as for the
  variables that reach a product. `pieces.py` makes one jaxpr of some equations of another.
- `passed_on.py` finds the parameters of NNX that a function hands out as it was given them.
- `gathers.py` has the gradients of gathers from 16-bit tables summed in float32.
- `places.py` finds the line of the user's code that an equation is from.
- `marks.py` tells autocast which module an equation belongs to; `scopes.py` names the other scopes
  that autocast reads, among them `jmpx.full_precision`.
- `rewriting.py` changes equations and the jaxprs in their parameters; `structure.py` makes a key of
  a jaxpr, by which programs that were traced apart are known to be the same.
- `moves.py` lists the primitives that only move numbers, and those that hide what they compute.

It imports only `_base`.
"""
