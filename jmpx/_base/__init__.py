"""What every other room builds on: leaves, dtypes, casts, trees, and the words of messages.

To read, in this order:

- `leaves.py`: which leaves of a pytree are arrays, which are floating, which JAX can hold;
- `dtypes.py`: the names of floating dtypes, and which of them can be computed in;
- `casts.py`: casts of pytrees, within a trace and outside of one;
- `trees.py`: whether all of a pytree is finite, and a selection between two;
- `axes.py`: mapped axes, and what varies along them;
- `matmul.py`: the algorithm of matrix products, and the context that sets it;
- `contexts.py`: which contexts are open in a thread, and what JAX's caches know of them;
- `nnx_objects.py`, `stateful.py`: objects of Flax's NNX around a transformation;
- `mappings.py`: nested mappings of configuration files, with the path of each value;
- `messages.py`: the place, the nearest word and the line of the user;
- `moved.py`, `later.py`, `of_0_2.py`: names that moved, public names that their first use imports,
  and pickles of jmpx 0.2;
- `exported.py`: classes of pytrees that `jax.export` serializes;
- `delayed.py`: functions whose body runs after their call, which are refused;
- `made_once.py`: a cache whose results all threads share.

It imports JAX, NumPy and Python, and no other room.
"""
