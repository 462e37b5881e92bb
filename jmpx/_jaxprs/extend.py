"""The only import of `jax.extend`, which `import jmpx` makes."""

# It takes 30 ms. Since JAX 0.12 it adds to the keys of all of JAX's caches: a function in whose
# first trace it happened would be traced and compiled again at its second call.
from jax.extend import core as core, source_info_util as source_info_util
