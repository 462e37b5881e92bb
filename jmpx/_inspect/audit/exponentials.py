"""Findings: exponentials, logarithms, powers and what else needs digits or range, in 16 bits."""

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from jmpx._inspect.audit.remedies import Remedies
from jmpx._inspect.audit.signs import is_at_most_zero, is_sum_of_exponentials
from jmpx._inspect.audit.step import Found, Kind, Step
from jmpx._inspect.audit.values import (
    digits,
    is_view,
    largest_count,
    low_dtype,
    low_nbytes,
    number,
    source,
    worst,
)
from jmpx._inspect.graph import Node, Value

_EXP = Kind("low-exp", Remedies.wider_operations)
KINDS = (_EXP,)
_LEAST_CAP = 4.0  # smaller factors belong to activations
# Functions of JAX that are written so that no number is lost, if their argument is at most 0.
_STABLE = frozenset({"softplus", "logaddexp", "elu", "selu", "celu", "log_sigmoid"})

# How bad it is, and what 16 bits do to the operation, behind its name; None for no hazard.
_Hazard: TypeAlias = tuple[str, str] | None


def search(step: Step) -> Iterator[Found]:
    """Yields `low-exp`; a backward pass repeats what its forward pass did."""
    for node in step.graph.nodes:
        hazard = _HAZARDS.get("" if node.is_structure else node.name)
        dtype = low_dtype(node)
        if hazard is None or dtype is None or node.is_backward or id(node) in step.explained:
            continue
        is_constant = all(source(value).constant is not None for value in node.operands)
        found = None if is_constant or _is_derivative(node) else hazard(node, dtype)
        if found is not None:
            advice = f"x.astype(jnp.float32) before {node.name}"
            message = f"{node.name} in {dtype.name} {found[1]}."
            yield step.found(_EXP, found[0], node, message, advice, nbytes=low_nbytes(node))


def _is_derivative(node: Node) -> bool:
    """Whether an exponential is the derivative of an error function, `exp(-x**2)`."""
    negated = node.operands[0].node
    squared = negated.operands[0].node if negated is not None and negated.name == "neg" else None
    return squared is not None and any(
        reader.name in ("erf", "erfc") for reader in squared.operands[0].readers
    )


def _grows(node: Node, dtype: np.dtype) -> _Hazard:
    info = jnp.finfo(dtype)
    rate = math.log(2) if node.name == "exp2" else 1.0
    error = f"is off by up to {8 * rate * float(info.eps) / 2:.1%} near"
    if is_at_most_zero(node.operands[0]):
        message = f"cannot overflow, as its argument is at most 0, but {error} -8"
        return None if _is_stable(node) else ("low", message)
    limit = math.log(float(info.max)) / rate + (node.name in ("sinh", "cosh")) * math.log(2)
    return worst(dtype), f"overflows beyond {limit:.2f}, and {error} 8"


def _logarithm(node: Node, dtype: np.dtype) -> _Hazard:
    info = jnp.finfo(dtype)
    if is_sum_of_exponentials(node.operands[0]):
        message = f"of a sum of exponentials keeps {digits(dtype)}"
        return None if _is_stable(node) else ("low", message)
    if node.name == "log1p":
        return "low", f"keeps {digits(dtype)}"
    message = f"takes numbers within {float(info.eps) / 2:.2%} of 1 for 1"
    if dtype == jnp.float16:
        message += f", and those below {float(info.smallest_subnormal):.0e} for 0"
    return worst(dtype), message


def _root(node: Node, dtype: np.dtype) -> _Hazard:
    info, message = jnp.finfo(dtype), f"reads an argument that keeps {digits(dtype)}"
    if dtype == jnp.float16:
        least = float(info.smallest_subnormal)
        message += f", is infinite beyond {float(info.max):.0f}, and 0 below {least:.0e}"
    return worst(dtype), message


def _power(node: Node, dtype: np.dtype) -> _Hazard:
    limit = float(jnp.finfo(dtype).max)
    message = f"overflows beyond {limit:.0f}, and" if dtype == jnp.float16 else "loses digits:"
    return worst(dtype), f"{message} its exponent multiplies the relative error of its base"


def _periodic(node: Node, dtype: np.dtype) -> _Hazard:
    count = largest_count(dtype)
    return "medium", (
        f"of numbers beyond {count} is noise: they are rounded to steps of 2 and more"
    )


def _sensitive(node: Node, dtype: np.dtype) -> _Hazard:
    return "medium", f"loses digits: its argument keeps {digits(dtype)}, whose error grows"


def _capped(node: Node, dtype: np.dtype) -> _Hazard:
    """Returns the hazard of a soft-cap, `cap * tanh(x / cap)`; other uses of tanh have none."""
    scaled = source(node.operands[0]).node
    cap = _factor(node.results[0])
    if dtype != jnp.bfloat16 or cap < _LEAST_CAP or scaled is None or _number_in(scaled) is None:
        return None
    step = cap * float(jnp.finfo(dtype).eps) / 2
    return "medium", f"makes a coarse soft-cap: numbers near {cap:g} are {step:.2g} apart"


def _factor(value: Value) -> float:
    """Returns the size of the number that an array is multiplied by; 0 without one."""
    for reader in value.readers:
        if is_view(reader):
            return _factor(reader.results[0])
        if reader.name == "mul":
            return abs(_number_in(reader) or 0)
    return 0


def _number_in(node: Node) -> float | None:
    """Returns the number by which a node multiplies or divides; None if it does not."""
    if node.name not in ("mul", "div"):
        return None
    return next((n for n in map(number, node.operands) if n is not None), None)


def _is_stable(node: Node) -> bool:
    """Whether a node is inside of a function of `_STABLE`."""
    around = node.around
    while around is not None and around.eqn.params.get("name") not in _STABLE:
        around = around.around
    return around is not None


_HAZARDS: dict[str, Callable[[Node, np.dtype], _Hazard]] = {
    name: hazard
    for names, hazard in (
        ("exp exp2 expm1 sinh cosh", _grows),
        ("log log1p", _logarithm),
        ("rsqrt", _root),
        ("pow", _power),
        ("tanh", _capped),
        ("sin cos tan", _periodic),
        ("acos acosh asin asinh atanh erf_inv lgamma digamma cumlogsumexp", _sensitive),
    )
    for name in names.split()
}
