"""Equations in float32 instead of 8 or 16 bits, to see whether that would be finite."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jmpx import _jaxpr
from jmpx._first_nonfinite.numbers import is_inexact, is_narrow
from jmpx._first_nonfinite.search import silent
from jmpx._jaxpr import Equation

# These read or make bits, so that they run in the dtypes in which they were traced.
_BITS = ("bitcast_convert_type", "nextafter", "reduce_precision")


def widen(array: Any) -> Any:
    """Returns an array of 8 or 16 bits in float32, and any other as it is."""
    narrow = is_inexact(array) and is_narrow(array.dtype)
    return jnp.asarray(array, jnp.float32) if narrow else array


def run_wide(eqn: Equation, operands: list[Any]) -> list[Any]:
    """Runs an equation in float32 where it was traced in fewer bits."""
    if eqn.primitive.name in _BITS or _jaxpr.holds_jaxpr(eqn.params):
        pairs = zip(operands, eqn.invars, strict=True)
        return list(map(widen, silent(eqn, [_narrowed(array, atom.aval) for array, atom in pairs])))
    params: dict[str, Any] = {
        name: np.dtype(np.float32)
        for name, value in eqn.params.items()
        if _is_dtype(value) and is_narrow(value)
    }
    if not eqn.outvars:
        return []
    return _jaxpr.bind(eqn, list(map(widen, operands)), **params)


def _is_dtype(value: Any) -> bool:
    return isinstance(value, np.dtype) or (isinstance(value, type) and hasattr(value, "dtype"))


def _narrowed(array: Any, aval: Any) -> Any:
    narrow = is_inexact(aval) and is_narrow(aval.dtype)
    return jnp.asarray(array, aval.dtype) if narrow else array
