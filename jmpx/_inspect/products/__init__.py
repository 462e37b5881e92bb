"""Which products a compiled program multiplies in which dtype: `jmpx.inspect.products`.

Nothing runs. `jmpx.inspect.audit` says what a function asks for; this reads what a compiler makes
of it, or what JAX lowers for a platform that needs not be there.

The way through it:

- `report.py` is what users call, and its result, `Products`, with its text.
- `hlo.py` finds the products of a program, its own and those of cuBLAS and cuDNN, and their FLOPs.
- `data.py` says what a product is.

It imports `_base`, `_inspect/hlo` and `_jaxprs`.
"""
