"""The chips whose compilers need no chip."""

# Private: no public name lists them, what their compilers are told, and what of these is missing.
from jmpx._inspect.plan.chips import CHIPS as CHIPS, missing

MISSING = {name: missing(chip) for name, chip in CHIPS.items()}  # "" if the compiler is there
