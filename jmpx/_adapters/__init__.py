"""Adapters: policies inside of Haiku, Equinox and Flax, and `jmpx.apply_policy` over all of them.

Read `applying.py` first: it runs a function as its policy map says, with its arguments cast, by
modules, or under autocast. `function_casts.py` has the functions that cast without a policy. For
modules, each framework has a file, `haiku` or `linen`, or a package, `equinox` or `nnx`, whose
`adapter` fills in the class in `_policies/frameworks.py`. They share:

- `scopes.py`: which policy a module has, and the warnings of rules without effect.
- `boundaries.py`: calls whose arguments and results are cast, the casts of parameters, the `dtype`
  fields of layers, and proxy classes.

Words: a *boundary* is a call of a module's public method that casts its arguments to the compute
dtype of a policy, the *boundary policy*, and its result to the output dtype. The *surrounding
policy* of a call is that of the call around it; the outermost call has none. A *view* is a model
that `with_policies` made: its parameters are cast, and its modules cast at their boundaries. A
*proxy class* is a subclass that an adapter makes of the class that the user wrote, the *plain
class*. The *carry* of a loop is the value that each step takes and hands on; JAX requires that it
keeps its dtype.

The adapters import from `_autocast` and the packages below it. Those of the frameworks do not
import each other, and jmpx imports none before its framework.
"""
