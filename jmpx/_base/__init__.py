"""What all other packages build on: dtypes, pytrees, contexts, and the words of messages.

Read in this order:

- `dtypes.py`: the names of floating dtypes, which of them a program can compute in, and the
  algorithm of matrix products. `formats.py`: rounding to formats of fewer bits, and the devices
  that multiply them.
- `trees.py`: which leaves of a pytree are arrays, casts of them, whether all are finite, and how
  `jax.export` serializes classes of pytrees.
- `axes.py`: mapped axes, and which arrays vary along them.
- `contexts.py`: the contexts that are open in a thread, as parts of the keys of JAX's caches.
- `stateful.py`: finds NNX objects in pytrees, and runs functions of them as pure functions.
- `messages.py`: describes a wrong value, finds the nearest name and the user's line, and the place
  of a value in a string or a nested mapping.
- `public.py`: imports public names when they are used. `made_once.py`: a cache for all threads.

It imports JAX, NumPy and Python, and no other package of jmpx.
"""
