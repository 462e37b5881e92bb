"""Findings: operations in 16 bits that need the range or the digits of float32."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jmpx._inspect.audit.data import Finding
from jmpx._inspect.audit.low_values import (
    digits,
    full_rule_or,
    is_low,
    is_view,
    largest_count,
    low_dtype,
    number,
    scopes_of_products,
    source,
)
from jmpx._inspect.audit.signs import is_at_most_zero, is_sum_of_exponentials
from jmpx._inspect.graph import Graph, Node, Value


class _Hazard(NamedTuple):
    """What 16 bits do to an operation.

    Attributes:
        severity: how bad it is.
        message: a sentence that says so.
    """

    severity: str
    message: str


class _Found(NamedTuple):
    """A graph, and the scopes with products in it.

    Attributes:
        graph: the graph.
        with_products: the result of `scopes_of_products`.
    """

    graph: Graph
    with_products: set[str]

    def finding(self, name: str, node: Node, hazard: _Hazard, advice: str) -> Finding:
        """Returns a finding; its rule is one for the module if that has no products."""
        return Finding(
            name,
            hazard.severity,
            hazard.message,
            self.graph.place(node),
            self.graph.path(node),
            full_rule_or(self.graph, node, self.with_products, advice),
            count=node.times,
            nbytes=node.times * sum(value.nbytes for value in node.operands if is_low(value)),
        )


def low_precision(graph: Graph, explained: set[int]) -> Iterator[Finding]:
    """Yields `low-exp`, `low-sum` and `low-collective`.

    A backward pass repeats what its forward pass did, on whose line it is found. Only a sum that
    it adds, of the gradients of one row of a table or one parameter, is its own.

    Args:
        graph: the graph.
        explained: the ids of nodes that another finding is about.
    """
    found = _Found(graph, scopes_of_products(graph))
    for node in graph.nodes:
        dtype = None if node.is_structure else low_dtype(node)
        if dtype is None or id(node) in explained:
            continue
        if node.name in _EXPONENTIALS:
            yield from _exponential(found, node, dtype)
        elif node.name in _COLLECTIVES and (axes := _named_axes(node)):
            yield _collective(found, node, dtype, axes)
        elif node.name in _SUMS:
            yield from _sum(found, node, dtype)


# Exponentials, logarithms, powers and what else needs digits.


def _exponential(found: _Found, node: Node, dtype: np.dtype) -> Iterator[Finding]:
    is_constant = all(source(value).constant is not None for value in node.operands)
    if node.is_backward or is_constant or _is_derivative(node):
        return
    hazard = _EXPONENTIALS[node.name](node, dtype)
    if hazard is not None:
        advice = f"x.astype(jnp.float32) before {node.name}"
        yield found.finding("low-exp", node, hazard, advice)


def _is_derivative(node: Node) -> bool:
    """Whether an exponential is the derivative of an error function, `exp(-x**2)`."""
    negated = node.operands[0].node
    squared = negated.operands[0].node if negated is not None and negated.name == "neg" else None
    return squared is not None and any(
        reader.name in ("erf", "erfc") for reader in squared.operands[0].readers
    )


def _worst(dtype: np.dtype) -> str:
    """Returns the severity of a hazard to range in float16, and to digits in bfloat16."""
    return "high" if dtype == jnp.float16 else "medium"


def _grows(node: Node, dtype: np.dtype) -> _Hazard | None:
    info = jnp.finfo(dtype)
    rate = math.log(2) if node.name == "exp2" else 1.0
    error = f"is off by up to {8 * rate * float(info.eps) / 2:.1%} near"
    if is_at_most_zero(node.operands[0]):
        if _is_in(node, _STABLE):
            return None
        message = f"cannot overflow, as its argument is at most 0, but {error} -8"
        return _Hazard("low", f"{node.name} in {dtype.name} {message}.")
    limit = math.log(float(info.max)) / rate + (node.name in ("sinh", "cosh")) * math.log(2)
    return _Hazard(
        _worst(dtype), f"{node.name} in {dtype.name} overflows beyond {limit:.2f}, and {error} 8."
    )


def _logarithm(node: Node, dtype: np.dtype) -> _Hazard | None:
    info = jnp.finfo(dtype)
    if is_sum_of_exponentials(node.operands[0]):
        if _is_in(node, _STABLE):
            return None
        message = f"of a sum of exponentials keeps {digits(dtype)}"
        return _Hazard("low", f"{node.name} in {dtype.name} {message}.")
    if node.name == "log1p":
        return _Hazard("low", f"log1p in {dtype.name} keeps {digits(dtype)}.")
    message = f"takes numbers within {float(info.eps) / 2:.2%} of 1 for 1"
    if dtype == jnp.float16:
        message += f", and those below {float(info.smallest_subnormal):.0e} for 0"
    return _Hazard(_worst(dtype), f"{node.name} in {dtype.name} {message}.")


def _root(node: Node, dtype: np.dtype) -> _Hazard:
    info, message = jnp.finfo(dtype), f"keeps {digits(dtype)}"
    if dtype == jnp.float16:
        least = float(info.smallest_subnormal)
        message += f", is infinite beyond {float(info.max):.0f}, and 0 below {least:.0e}"
    return _Hazard(_worst(dtype), f"The argument of rsqrt in {dtype.name} {message}.")


def _power(node: Node, dtype: np.dtype) -> _Hazard:
    limit = float(jnp.finfo(dtype).max)
    message = f"overflows beyond {limit:.0f}, and" if dtype == jnp.float16 else "loses digits:"
    message += " its exponent multiplies the relative error of its base"
    return _Hazard(_worst(dtype), f"pow in {dtype.name} {message}.")


def _periodic(node: Node, dtype: np.dtype) -> _Hazard:
    count = largest_count(dtype)
    message = f"of numbers beyond {count} is noise: they are rounded to steps of 2 and more"
    return _Hazard("medium", f"{node.name} in {dtype.name} {message}.")


def _sensitive(node: Node, dtype: np.dtype) -> _Hazard:
    message = f"loses digits: its argument keeps {digits(dtype)}, whose error grows"
    return _Hazard("medium", f"{node.name} in {dtype.name} {message}.")


def _capped(node: Node, dtype: np.dtype) -> _Hazard | None:
    """Returns the hazard of a soft-cap, `cap * tanh(x / cap)`; other uses of tanh have none."""
    scaled = source(node.operands[0]).node
    cap = _factor(node.results[0])
    if dtype != jnp.bfloat16 or cap < _LEAST_CAP or scaled is None or _number_in(scaled) is None:
        return None
    step = cap * float(jnp.finfo(dtype).eps) / 2
    message = f"A soft-cap by tanh in {dtype.name}: numbers near {cap:g} are {step:.2g} apart."
    return _Hazard("medium", message)


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


_LEAST_CAP = 4.0  # smaller factors belong to activations

_EXPONENTIALS: dict[str, Callable[[Node, np.dtype], _Hazard | None]] = {
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

# Functions of JAX that are written so that no number is lost, if their argument is at most 0.
_STABLE = frozenset({"softplus", "logaddexp", "elu", "selu", "celu", "log_sigmoid"})


def _is_in(node: Node, names: frozenset[str]) -> bool:
    """Whether a node is inside of a jitted function, or one with a rule, that has such a name."""
    around = node.around
    while around is not None:
        if around.eqn.params.get("name") in names:
            return True
        around = around.around
    return False


# Sums over many terms.


def _sum(found: _Found, node: Node, dtype: np.dtype) -> Iterator[Finding]:
    is_scatter = node.name.startswith("scatter")
    if not is_low(node.results[0]) or (node.is_backward and not is_scatter):
        return
    terms, limit = _SUMS[node.name](node), largest_count(dtype)
    if terms <= limit:
        return
    if is_scatter:
        # Where there are more terms than places can take, some place gets too many.
        places = node.operands[0].size * terms // max(node.operands[2].size, 1)
        severity = "high" if terms > limit * places else "medium"
        what = "The gradient of a lookup" if node.is_backward else node.name
        what = f"{what} adds up to {terms:,} terms to one place in {dtype.name}"
        hazard = _Hazard(
            severity, f"{what}, one after the other: after {limit} it may stand still."
        )
        advice = "x.astype(jnp.float32) before it, and the cast to 16 bits behind it"
    else:
        what = f"{node.name} takes in {terms:,} terms in {dtype.name}"
        message = f"counts exactly only to {limit}, and may round each partial result"
        hazard = _Hazard("medium", f"{what}, which {message}.")
        advice = "dtype=jnp.float32 in the call, or x.astype(jnp.float32) before it"
    yield found.finding("low-sum", node, hazard, advice)


def _reduced(node: Node) -> int:
    return node.operands[0].size // max(node.results[0].size, 1)


def _cumulative(node: Node) -> int:
    return node.operands[0].shape[node.eqn.params["axis"]]


def _window(node: Node) -> int:
    return math.prod(node.eqn.params["window_dimensions"])


def _reduced_by(node: Node) -> int:
    """Returns how many terms a reduction with a function of the user takes in, if that adds."""
    jaxpr = node.eqn.params["jaxpr"]
    if not any(eqn.primitive.name in ("add", "mul") for eqn in jaxpr.eqns):
        return 0
    return _window(node) if node.name == "reduce_window" else _reduced(node)


def _scattered(node: Node) -> int:
    """Returns how many updates a scatter may add to one place; 0 if each place gets one."""
    operand, indices, updates = node.operands[:3]
    dimensions = node.eqn.params["dimension_numbers"]
    if node.eqn.params["unique_indices"] or _are_distinct(indices):
        return 0
    batched = getattr(dimensions, "operand_batching_dims", ())
    rows = math.prod(
        n for i, n in enumerate(updates.shape) if i not in dimensions.update_window_dims
    )
    return rows // max(math.prod(operand.shape[i] for i in batched), 1)


def _are_distinct(indices: Value) -> bool:
    """Whether indices count rows, as in `x[jnp.arange(n), labels]`, or are an order of rows."""
    pending, seen = [indices], 0
    while pending and seen < 32:
        node, seen = source(pending.pop()).node, seen + 1
        if node is None:
            continue
        if node.name in ("iota", "sort", "top_k"):
            return True
        if node.name in ("concatenate", "select_n", "add", "clamp"):
            pending += node.operands
    return False


_SUMS: dict[str, Callable[[Node], int]] = {
    "reduce": _reduced_by,
    "reduce_window": _reduced_by,
    "reduce_sum": _reduced,
    "reduce_prod": _reduced,
    "cumsum": _cumulative,
    "cumprod": _cumulative,
    "reduce_window_sum": _window,
    "scatter_add": _scattered,
    "scatter_sub": _scattered,
    "psum": _reduced,  # over an axis of jax.vmap
}


# Sums over devices.

_COLLECTIVES = frozenset({"psum", "psum_invariant", "reduce_scatter"})


def _named_axes(node: Node) -> list[str]:
    """Returns the names of the axes over which a node sums; under `jax.vmap` some are numbers."""
    params = node.eqn.params
    axes = params["axes"] if "axes" in params else params["axis_name"]
    each = axes if isinstance(axes, tuple) else (axes,)
    return [str(axis) for axis in each if not isinstance(axis, int)]


def _collective(found: _Found, node: Node, dtype: np.dtype, axes: list[str]) -> Finding:
    named = f"the axis {axes[0]!r}" if len(axes) == 1 else f"the axes {', '.join(map(repr, axes))}"
    message = f"sums in {dtype.name} over {named}: the parts and their sums keep {digits(dtype)}"
    hazard = _Hazard(_worst(dtype), f"{node.name} {message}.")
    advice = "r=f32 in the policy of jmpx's gradient functions, with axis_name=; or cast to \
float32 before the sum"
    finding = found.finding("low-collective", node, hazard, advice)
    return finding._replace(rule=advice) if node.is_backward else finding
