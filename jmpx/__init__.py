"""jmpx: mixed precision for JAX, from a policy string.

A training script finds all that it needs here. Submodules have the rest: `jmpx.inspect` looks at
programs and values, `jmpx.optim` stores in 16 bits, `jmpx.distributed` gathers shards, `jmpx.types`
has the classes of results and states, `jmpx.mpx` has MPX's names, `jmpx.flags` flags of absl, and
`jmpx.haiku`, `jmpx.equinox` and `jmpx.flax` are for modules of these frameworks.
"""

# These add parts to the keys of JAX's caches, which have to be there before the first trace.
from jmpx._base import contexts as _contexts, dtypes as _dtypes  # noqa: F401
from jmpx._base.public import public_names
from jmpx._jaxprs import extend as _extend  # noqa: F401

__getattr__, __dir__ = public_names(__name__, __file__)
__version__ = "0.3.0"
