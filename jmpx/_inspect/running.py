"""How watched programs run: their arrays, their sites, and float32 in place of 16 bits."""

from collections.abc import Callable, Sequence

import jax
import jax.core
import numpy as np
from jax import lax

from jmpx._autocast.kinds import keep
from jmpx._autocast.rules import lookup
from jmpx._base.dtypes import is_dtype
from jmpx._base.trees import is_floating_dtype
from jmpx._inspect.graph import Node
from jmpx._inspect.programs import Program
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Array, Atom, Equation, Params, operation_name
from jmpx._scales.kinds import DynamicLossScale


def check_arrays(program: Program, caller: str) -> None:
    """Refuses arguments without values, on behalf of a public function."""
    for name, array in zip(program.names, program.arrays, strict=True):
        if isinstance(array, jax.core.Tracer):
            raise TypeError(f"Cannot look at the traced {name}: call {caller} outside of jax.jit.")
        if not isinstance(array, jax.Array | np.ndarray | np.generic):
            raise TypeError(
                f"Expected arrays, got a shape as {name}: {caller} runs it, so pass arrays, "
                "or call jmpx.inspect.audit, which takes shapes."
            )


def key_of(node: Node) -> tuple[int, ...]:
    """Returns the key of a node; the site of the same equation has an equal one."""
    key, around = [id(node.eqn)], node.around
    while around is not None:
        key.append(id(around.eqn))
        around = around.around
    return tuple(reversed(key))


def scale_text(scale: float) -> str:
    """Returns the string of a dynamic loss scale that begins with this number."""
    return str(DynamicLossScale(scale, min_loss_scale=min(scale, 1.0)))


# Equations of these hold a jaxpr of numbers in the traced dtypes, and cannot run on others.
_SCATTERS: dict[str, Callable[..., Array]] = {
    "scatter": lax.scatter,
    "scatter_add": lax.scatter_add,
    "scatter_max": lax.scatter_max,
    "scatter_min": lax.scatter_min,
    "scatter_mul": lax.scatter_mul,
}


_FLOAT32 = np.dtype(np.float32)


def widened(array: Array, wide: np.dtype = _FLOAT32) -> Array:
    """Returns an array in a wide dtype if its floating dtype has fewer bits."""
    if not is_narrow(getattr(array, "dtype", None), wide):
        return array
    if isinstance(array, np.ndarray | np.generic):
        return np.asarray(array, wide)
    return lax.convert_element_type(array, wide)


def run_widened(eqn: Equation, operands: Sequence[Array], wide: np.dtype = _FLOAT32) -> list[Array]:
    """Runs an equation that was traced in fewer bits in a wide dtype, on wide operands.

    If its result depends on the dtype, such as that of a bitcast, or its primitive is unknown, it
    runs as it was traced, and the results are widened. An equation without results, such as a
    print, does not run.
    """
    if not eqn.outvars:
        return []
    atoms = (*eqn.invars, *eqn.outvars)
    if not any(is_narrow(getattr(atom.aval, "dtype", None), wide) for atom in atoms):
        return core.bind(eqn, operands)
    name = operation_name(eqn.primitive.name)
    if name == "convert_element_type" and is_narrow(eqn.params["new_dtype"], wide):
        dtype = operands[0].dtype
        is_wide = is_floating_dtype(dtype) and not is_narrow(dtype, wide)  # float64 stays float64
        return [operands[0] if is_wide else lax.convert_element_type(operands[0], wide)]
    if name in _SCATTERS:
        keys = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return [_SCATTERS[name](*operands, **{key: eqn.params[key] for key in keys})]
    entry = lookup(eqn)
    if entry is None or entry.rule is keep or _has_algorithm(eqn) or core.inner_jaxprs(eqn.params):
        pairs = zip(operands, eqn.invars, strict=True)
        results = core.bind(eqn, [_as_traced(*pair, wide) for pair in pairs])
        return [widened(array, wide) for array in results]
    params: Params = {key: wide for key, dtype in eqn.params.items() if is_narrow(dtype, wide)}
    return core.bind(eqn, operands, **params)


def _has_algorithm(eqn: Equation) -> bool:
    """Whether a product names an algorithm, which asks for operands of certain dtypes."""
    precision = eqn.params.get("precision")
    parts = precision if isinstance(precision, tuple) else (precision,)
    return any(part is not None and not isinstance(part, lax.Precision) for part in parts)


def _as_traced(array: Array, atom: Atom, wide: np.dtype) -> Array:
    is_low = is_narrow(getattr(atom.aval, "dtype", None), wide)
    return lax.convert_element_type(array, atom.aval.dtype) if is_low else array


def is_narrow(dtype: object, wide: np.dtype = _FLOAT32) -> bool:
    """Whether something is a floating dtype of fewer bits than a wide one."""
    if not is_dtype(dtype) or not is_floating_dtype(dtype):
        return False
    return np.dtype(dtype).itemsize < wide.itemsize
