"""Autocast: mixed precision per operation, of any function, without a cast in it.

Open `README.md` beside this file first: it lists the files, follows one operation through them, and
says how to add a rule. The table in `kinds.py` is the design. This package imports `_policies`,
`_remat`, `_jaxprs` and `_base`. Rules reach the interpreter through their `Operation`.
"""

# These fill the registry of rules.
from jmpx._autocast import control_flow, kinds  # noqa: F401
from jmpx._autocast.wrapped import Autocast as Autocast, autocast as autocast
