"""What all other packages build on: dtypes, pytrees, contexts, and the words of messages.

Read in this order:

- `dtypes.py`: the names of floating dtypes, and which of them a program can compute in.
- `trees.py`: which leaves of a pytree are arrays, casts of them, whether all are finite, and how
  `jax.export` serializes classes of pytrees.
- `axes.py`: mapped axes, and which arrays vary along them.
- `matmul.py`: the algorithm of matrix products, and the context that sets it.
- `contexts.py`: the contexts that are open in a thread, as parts of the keys of JAX's caches.
- `stateful.py`: finds NNX objects in pytrees, and runs functions of them as pure functions.
- `mappings.py`: nested mappings of configuration files, with the path of each value.
- `messages.py`: describes a wrong value, finds the nearest name and the user's line.
- `public.py`: imports public names when they are used. `made_once.py`: a cache for all threads.

It imports JAX, NumPy and Python, and no other package of jmpx.
"""
