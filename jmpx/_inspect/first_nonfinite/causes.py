"""Why an operation makes an infinity or a NaN, and what mends it."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jmpx._inspect.first_nonfinite.report import numbers_of
from jmpx._inspect.first_nonfinite.search import Event, is_inexact
from jmpx._inspect.running import is_narrow, run_widened, widened
from jmpx._jaxprs.core import Array, operation_name


class Cause(NamedTuple):
    """Why a number is not finite."""

    reason: str  # the reason, a sentence without its full stop
    remedy: str  # the remedy, another one
    in_code: str = ""  # the cast to write, where float32 mends it; else empty

    def text(self, rule: str, is_tried: bool) -> str:
        """Returns both sentences, given the rule that mended it, and whether rules were tried."""
        how = _ANYWHERE if rule.startswith("op.") else ""
        if self.in_code and not rule:
            how = f"{', but no rule mends it' if is_tried else ''}: {self.in_code}"
        return f"{self.reason}. {self.remedy}{how}."


_ANYWHERE = (
    ": the rule is for jmpx.autocast, and for all such operations; to select this one, name its "
    "line by jax.named_scope"
)
_UNCAST = "keep it in float32, or write jnp.finfo(x.dtype).min if it is a mask"
_GUARD = (
    "No dtype of its own mends it: clip what it reads, or add a small number, one that the dtype "
    "holds (1e-8 is zero in float16: write 1e-4), before it; jnp.where after it is too late"
)
_SCALE_DOWN = (
    "No rule mends it: make what it reads smaller, by a norm or a smaller learning rate; of what "
    "exp reads, subtract the largest number first, as jax.nn.softmax does"
)
# operation -> whether an operand is out of range, and what the operation does then
_OUT_OF_RANGE = {
    "div": (lambda x: x == 0, "divides by zero"),
    "integer_pow": (lambda x: x == 0, "divides by zero"),
    "log": (lambda x: x <= 0, "reads zero or less"),
    "log1p": (lambda x: x <= -1, "reads -1 or less"),
    "pow": (lambda x: x <= 0, "raises zero or less to a power"),
    "rsqrt": (lambda x: x <= 0, "reads zero or less"),
    "sqrt": (lambda x: x < 0, "reads less than zero"),
}


def cause_of_event(event: Event, operands: Sequence[Array], results: Sequence[Array]) -> Cause:
    """Returns why an equation made an infinity or a NaN; operands like random keys are None."""
    name = operation_name(event.site.equation.primitive.name)
    if not event.is_made:
        return Cause(
            "It makes a NaN of intentional infinities, as in a row that a mask of -inf masks as a "
            "whole",
            "No dtype mends it: mask by jnp.finfo(x.dtype).min, or leave a number in each row",
        )
    largest = _largest_in_float32(event, operands)
    if largest is None:
        return _of_numbers(name, operands, results)
    dtypes = (x.dtype for x in (*results, *operands) if is_inexact(x) and is_narrow(x.dtype))
    dtype = next(dtypes)
    beyond = f"beyond {dtype.name}, whose largest number is {float(jnp.finfo(dtype).max):g}"
    reason = f"It gives up to {largest:.4g}, {beyond}"
    return in_float32(reason, _UNCAST) if name == "convert_element_type" else in_float32(reason)


def in_float32(reason: str, in_code: str = "cast what it reads with .astype(jnp.float32)") -> Cause:
    """Returns the cause of an infinity or a NaN that float32 mends."""
    return Cause(reason, "In float32 it is finite", in_code)


def _largest_in_float32(event: Event, operands: Sequence[Array]) -> float | None:
    """Returns the largest magnitude of the results in float32; None if float32 does not help."""
    eqn = event.site.equation
    dtypes = (getattr(atom.aval, "dtype", None) for atom in (*eqn.invars, *eqn.outvars))
    if not any(map(is_narrow, dtypes)) or any(operand is None for operand in operands):
        return None
    try:
        results = run_widened(eqn, list(map(widened, operands)))
    except NameError:  # JAX's error for an axis that is mapped only inside of the program
        return None
    found = [numbers_of(result) for result in results if is_inexact(result)]
    if any(each.is_broken for each in found):
        return None
    return max((each.largest or 0.0 for each in found), default=None)


def _of_numbers(name: str, operands: Sequence[Array], results: Sequence[Array]) -> Cause:
    """Returns the cause of an infinity or a NaN that float32 does not mend."""
    result = next(np.asarray(x) for x in results if is_inexact(x) and numbers_of(x).is_broken)
    is_bad, what = _OUT_OF_RANGE.get(name, (np.isnan, ""))
    operand = np.asarray(operands[1 if name == "div" else 0])
    if what and not np.iscomplexobj(operand) and (is_bad(operand) & ~np.isfinite(result)).any():
        return Cause(f"It {what}, here or in a derivative", _GUARD)
    if np.isnan(result).any():
        return Cause("It makes a NaN of finite numbers", _GUARD)
    limits = jnp.finfo(result.dtype)
    return Cause(
        f"It gives more than {limits.dtype}'s largest number, {limits.max:.3g}", _SCALE_DOWN
    )
