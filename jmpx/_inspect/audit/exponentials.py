"""Findings: exponentials, logarithms, powers and what else needs digits or range, in 16 bits."""

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from jmpx._inspect.audit.remedies import Remedies
from jmpx._inspect.audit.signs import is_at_most_zero, is_sum_of_exponentials
from jmpx._inspect.audit.step import Found, Kind, Step
from jmpx._inspect.audit.values import digits, largest_count, low_dtype, low_nbytes, source, worst
from jmpx._inspect.graph import Node

_EXP = Kind("low-exp", Remedies.wider_operations)
KINDS = (_EXP,)
# Functions of JAX that are written so that no number is lost, if their argument is at most 0.
_STABLE = frozenset({"softplus", "logaddexp", "log_sigmoid"})

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
        found = None if is_constant else hazard(node, dtype)
        if found is not None:
            advice = f"x.astype(jnp.float32) before {node.name}"
            message = f"{node.name} in {dtype.name} {found[1]}."
            yield step.found(_EXP, found[0], node, message, advice, nbytes=low_nbytes(node))


def _exponential(node: Node, dtype: np.dtype) -> _Hazard:
    if _is_derivative(node):
        return None
    info = jnp.finfo(dtype)
    rate = math.log(2) if node.name == "exp2" else 1.0
    error = f"is off by up to {8 * rate * float(info.eps) / 2:.1%} near"
    if is_at_most_zero(node.operands[0]):
        message = f"cannot overflow, as its argument is at most 0, but {error} -8"
        return None if _is_stable(node) else ("low", message)
    limit = math.log(float(info.max)) / rate
    return worst(dtype), f"overflows beyond {limit:.2f}, and {error} 8"


def _logarithm(node: Node, dtype: np.dtype) -> _Hazard:
    info = jnp.finfo(dtype)
    if is_sum_of_exponentials(node.operands[0]):
        return "low", f"of a sum of exponentials keeps {digits(dtype)}"
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
    text = f"of numbers beyond {largest_count(dtype)} is noise: they are rounded to steps of 2"
    return "medium", f"{text} and more"


def _is_derivative(node: Node) -> bool:
    """Whether an exponential comes with the gradient of `expm1` or, as `exp(-x**2)`, of `erf`."""
    values, functions = node.operands, ("expm1",)
    negated = values[0].node
    if negated is not None and negated.name == "neg":
        squared = negated.operands[0].node
        values, functions = squared.operands[:1] if squared else [], ("erf", "erfc")
    return any(reader.name in functions for value in values for reader in value.readers)


def _is_stable(node: Node) -> bool:
    """Whether a node is inside of a function of `_STABLE`."""
    around = node.around
    while around is not None and around.eqn.params.get("name") not in _STABLE:
        around = around.around
    return around is not None


_HAZARDS: dict[str, Callable[[Node, np.dtype], _Hazard]] = {
    **dict.fromkeys(("exp", "exp2"), _exponential),
    "log": _logarithm,
    "rsqrt": _root,
    "pow": _power,
    **dict.fromkeys(("sin", "cos", "tan"), _periodic),
}
