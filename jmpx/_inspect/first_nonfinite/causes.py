"""Why an operation makes an infinity or a NaN, and what mends it."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jmpx._inspect.first_nonfinite.numbers import is_inexact, numbers_of
from jmpx._inspect.first_nonfinite.search import Event
from jmpx._inspect.running import is_narrow, run_widened, widened
from jmpx._jaxprs.core import Array, operation_name


class Cause(NamedTuple):
    """Why a number is not finite."""

    reason: str  # the reason, a sentence without its full stop
    remedy: str  # the remedy, another one
    rule: str = ""  # the rule to paste; empty if no rule mends it
    # The remedy in the code, where float32 mends it but no rule does; may be empty.
    in_code: str = ""
    is_of_dtype: bool = False  # whether it is finite in float32

    def with_rule(self, rule: str, *, is_tried: bool) -> "Cause":
        """Returns the cause with the rule that mended it in a replay.

        Args:
            rule: the rule; empty if none mended it.
            is_tried: whether rules were tried.
        """
        how = _ANYWHERE if rule.startswith("op.") else ""
        if not rule and self.in_code:
            how = f"{', but no rule mends it' if is_tried else ''}: {self.in_code}"
        return self._replace(remedy=self.remedy + how, rule=rule)

    def __str__(self) -> str:
        """Returns both sentences."""
        return f"{self.reason}. {self.remedy}."


_GUARD = (
    "add a small number to what it reads, one that the dtype holds (1e-8 is zero in float16: write "
    "1e-4), or replace the zeros by jnp.where before it, not after"
)
_ANYWHERE = (
    ": the rule is for jmpx.autocast, and for all such operations; to select this one, name its "
    "line by jax.named_scope"
)
_SUBTRACT = "subtract the largest number first, as jax.nn.softmax and jax.nn.logsumexp do"
# operation -> (whether an operand is out of range, what the operation does then, the remedy)
_OUT_OF_RANGE = {
    "acos": (lambda x: np.abs(x) > 1, "reads a number beyond 1", "clip it with jnp.clip"),
    "acosh": (lambda x: x < 1, "reads a number below 1", "clip it with jnp.clip"),
    "asin": (lambda x: np.abs(x) > 1, "reads a number beyond 1", "clip it with jnp.clip"),
    "atanh": (lambda x: np.abs(x) >= 1, "reads 1 or more", "clip it with jnp.clip"),
    "div": (lambda x: x == 0, "divides by zero", _GUARD),
    "erf_inv": (lambda x: np.abs(x) >= 1, "reads 1 or more", "clip it with jnp.clip"),
    "integer_pow": (lambda x: x == 0, "divides by zero", _GUARD),
    "log": (lambda x: x <= 0, "reads zero or less", _GUARD),
    "log1p": (lambda x: x <= -1, "reads -1 or less", _GUARD),
    "pow": (lambda x: x <= 0, "raises zero or less to a power", _GUARD),
    "rem": (lambda x: x == 0, "divides by zero", _GUARD),
    "rsqrt": (lambda x: x <= 0, "reads zero or less", _GUARD),
    "sqrt": (lambda x: x < 0, "reads less than zero", "clip it with jnp.maximum"),
}
_DIVISIONS, _EXPONENTIALS = ("div", "rem"), ("exp", "exp2", "expm1")
_SCALE_DOWN = "make what it reads smaller, by a norm or a smaller learning rate"
_OF_INFINITIES = {
    "add": "inf - inf",
    "add_any": "inf - inf",
    "cumsum": "inf - inf",
    "div": "inf / inf",
    "dot_general": "0 * inf",
    "mul": "0 * inf",
    "reduce_sum": "inf - inf",
    "sub": "inf - inf",
}


def cause_of_event(
    event: Event, operands: Sequence[Array], results: Sequence[Array], maker: str
) -> Cause:
    """Returns why an equation made an infinity or a NaN.

    Args:
        event: the equation.
        operands: its operands; None for random keys and the like.
        results: its results.
        maker: the operation that made its first operand, or `const` or `literal`; else empty.
    """
    name = operation_name(event.site.equation.primitive.name)
    if not event.is_made:
        return Cause(
            f"It computes {_OF_INFINITIES.get(name, 'a NaN')} of intentional infinities, as in a "
            "row that a mask of -inf masks as a whole",
            "No dtype mends it: mask by jnp.finfo(x.dtype).min, or leave a number in each row",
        )
    largest = _largest_in_float32(event, operands)
    if largest is None:
        return _of_numbers(name, event, operands, results)
    dtypes = (x.dtype for x in (*results, *operands) if is_inexact(x) and is_narrow(x.dtype))
    dtype = next(dtypes)
    beyond = f"beyond {dtype.name}, whose largest number is {float(jnp.finfo(dtype).max):g}"
    if name != "convert_element_type":
        return in_float32(f"It gives up to {largest:.4g}, {beyond}")
    if maker not in ("const", "literal"):
        what = f" {maker} gives" if maker else " it reads"
        cause = in_float32(f"What{what}, up to {largest:.4g}, is {beyond}")
        return cause._replace(in_code="keep it in float32")
    return Cause(
        f"The constant {np.asarray(operands[0]).flat[0]:g} is {beyond}",
        "Write jnp.finfo(x.dtype).min where it masks something, or keep it in float32",
        is_of_dtype=True,
    )


def in_float32(reason: str, what: str = "it is finite") -> Cause:
    """Returns the cause of an infinity or a NaN that float32 mends."""
    in_code = "cast what it reads with .astype(jnp.float32)"
    return Cause(reason, f"In float32 {what}", in_code=in_code, is_of_dtype=True)


def _largest_in_float32(event: Event, operands: Sequence[Array]) -> float | None:
    """Returns the largest magnitude of an equation's results in float32.

    None if they are not finite there either, if all its dtypes are wide, or if it cannot run alone.
    """
    eqn = event.site.equation
    dtypes = (getattr(atom.aval, "dtype", None) for atom in (*eqn.invars, *eqn.outvars))
    if not any(map(is_narrow, dtypes)) or any(operand is None for operand in operands):
        return None
    try:
        results = run_widened(eqn, list(map(widened, operands)))
    except NameError:  # JAX's error for an axis that is mapped only inside of the program
        return None
    found = [numbers_of(result) for result in results if is_inexact(result)]
    if any(each.nans or each.infs for each in found):
        return None
    return max((each.largest or 0.0 for each in found), default=None)


def _of_numbers(
    name: str, event: Event, operands: Sequence[Array], results: Sequence[Array]
) -> Cause:
    """Returns the cause of an infinity or a NaN that float32 does not mend."""
    if name in _OUT_OF_RANGE:
        is_bad, what, remedy = _OUT_OF_RANGE[name]
        operand = np.asarray(operands[1 if name in _DIVISIONS else 0])
        is_power = name == "integer_pow" and event.site.equation.params["y"] >= 0
        if not is_power and not np.iscomplexobj(operand) and bool(is_bad(operand).any()):
            return Cause(
                f"It {what}, here or in a derivative", f"No dtype of its own mends it: {remedy}"
            )
    dtype = next(x.dtype for x in results if is_inexact(x))
    return Cause(
        f"It gives more than {dtype.name}'s largest number, {float(jnp.finfo(dtype).max):.3g}",
        f"No rule mends it: {_SUBTRACT if name in _EXPONENTIALS else _SCALE_DOWN}",
    )
