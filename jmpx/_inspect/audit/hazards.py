"""Findings: operations that need more digits or range than 16 bits have, and sums in 16 bits.

Among them are decompositions of rounded matrices, and integers that 16 bits do not hold.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from jmpx._inspect.audit.step import AuditedStep, Remedies, UntriedFinding
from jmpx._inspect.audit.values import (
    CAST,
    MOVES,
    MOVES_AND_CASTS,
    is_at_most_zero,
    is_sum_of_exponentials,
)
from jmpx._inspect.graph import Graph, Node, Value, before, to_products
from jmpx._jaxprs.equations import DECOMPOSITIONS
from jmpx._jaxprs.marks import ROUNDED

KINDS = {
    **dict.fromkeys(("low-exp", "low-sum"), Remedies.wider_operations),
    **dict.fromkeys(("low-collective", "rounded-gradient")),
    **dict.fromkeys(("low-carry", "low-linalg", "rounded-integer"), Remedies.wider),
}

# Functions of JAX that lose no number if their argument is at most 0.
_STABLE = frozenset({"softplus", "logaddexp", "log_sigmoid"})
_FARTHEST = 64  # nodes behind indices that are looked at
_NEAR = 8  # nodes among which the product that makes angles is searched
_FEW = 64  # numbers of a parameter that may be rounded before an exponential
_COLLECTIVES = frozenset({"psum", "psum_invariant", "reduce_scatter"})
# A severity, and the end of a sentence that begins with the operation; None for no hazard.
_Hazard: TypeAlias = tuple[str, str] | None


def search(step: AuditedStep) -> Iterator[UntriedFinding]:
    """Yields the findings of `KINDS`.

    Operations that a backward pass repeats are found in the forward pass. Only sums of gradients,
    of one row of a table or of one parameter, are its own.
    """
    for node in filter(step.graph.live.__contains__, step.graph.nodes):
        if node.name == CAST and ROUNDED in node.scope:
            yield from _gradient(step, node)
        elif node.is_carry and node.results[0].is_low:
            yield from _carry(step, node)
        elif node.name in DECOMPOSITIONS and not node.is_backward:
            yield from _linalg(step, node)
        elif node.name in (CAST, "iota") and node.results[0].is_low and not node.is_backward:
            yield from _integer(step, node)
        dtype = next((value.dtype for value in node.operands if value.is_low), None)
        if dtype is None or node.is_structure or node in step.explained:
            continue
        if node.name in _HAZARDS and not node.is_backward:
            yield from _numeric(step, node, dtype)
        elif node.name in _COLLECTIVES and (axes := _named_axes(node)):
            yield _collective(step, node, dtype, axes)
        elif node.name in _TERMS and node.results[0].is_low:
            yield from _sum(step, node, dtype)


# --- Limits of 16 bits ---


def _largest_count(dtype: np.dtype) -> int:
    """Returns up to which number a dtype holds all integers: 256 for bfloat16, 2048 for float16.

    A sum in that dtype that has reached it no longer changes when 1 is added.
    """
    return 2 ** (int(jnp.finfo(dtype).nmant) + 1)


def _digits(dtype: np.dtype) -> str:
    """Returns how many decimal digits a dtype keeps, in words."""
    return "2 to 3 digits" if dtype == jnp.bfloat16 else "3 to 4 digits"


def _worst(dtype: np.dtype) -> str:
    """Returns the severity of a hazard that concerns range in float16, and digits in bfloat16."""
    return "high" if dtype == jnp.float16 else "medium"


def _low_nbytes(node: Node) -> int:
    """Returns the bytes of the 16-bit operands of all runs of a node."""
    return node.times * sum(value.nbytes for value in node.operands if value.is_low)


# --- Exponentials and similar functions ---


def _numeric(step: AuditedStep, node: Node, dtype: np.dtype) -> Iterator[UntriedFinding]:
    hazard = _HAZARDS[node.name](node, dtype)
    if hazard is not None and any(value.unmoved.constant is None for value in node.operands):
        (severity, message), what, flops = hazard, node.name, 0
        if _HAZARDS[node.name] is _periodic:  # a cast right before it would widen rounded angles
            what = f"the code that makes the angles of {what}"
            nodes = Graph.back(node.operands, to_products, _NEAR)
            flops = step.flops_of(itertools.islice((n for n in nodes if n.is_product), 1))
        is_few = node.results[0].size <= _FEW and step.rounded_argument(node.operands[0])
        severity = "low" if is_few and severity == "medium" else severity
        text = f"{node.name} in {dtype.name} {message}."
        advice = step.in_float32(node.operands[0], what)
        sizes = {"nbytes": _low_nbytes(node), "flops": flops}
        yield step.found("low-exp", severity, node, text, advice, **sizes)


def _exponential(node: Node, dtype: np.dtype) -> _Hazard:
    if _is_derivative(node):
        return None
    info = jnp.finfo(dtype)
    rate = math.log(2) if node.name == "exp2" else 1.0
    error = f"is off by up to {8 * rate * float(info.eps) / 2:.1%} near"
    if is_at_most_zero(node.operands[0]):
        message = f"cannot overflow, as its argument is at most 0, but {error} -8"
        is_stable = any(each.eqn.params.get("name") in _STABLE for each in node.outwards)
        return None if is_stable else ("low", message)
    limit = math.log(float(info.max)) / rate
    return _worst(dtype), f"overflows beyond {limit:.2f}, and {error} 8"


def _logarithm(node: Node, dtype: np.dtype) -> _Hazard:
    info = jnp.finfo(dtype)
    if is_sum_of_exponentials(node.operands[0]):
        return "low", f"of a sum of exponentials keeps {_digits(dtype)}"
    message = f"takes numbers within {float(info.eps) / 2:.2%} of 1 for 1"
    if dtype == jnp.float16:
        message += f", and those below {float(info.smallest_subnormal):.0e} for 0"
    return _worst(dtype), message


def _root(node: Node, dtype: np.dtype) -> _Hazard:
    limits = ", between 6e-8 and 65504" if dtype == jnp.float16 else ""
    return _worst(dtype), f"reads an argument that keeps {_digits(dtype)}{limits}"


def _power(node: Node, dtype: np.dtype) -> _Hazard:
    message = "overflows beyond 65504, and" if dtype == jnp.float16 else "loses digits:"
    return _worst(dtype), f"{message} its exponent multiplies the relative error of its base"


def _periodic(node: Node, dtype: np.dtype) -> _Hazard:
    error, limit = 4 * float(jnp.finfo(dtype).eps), _largest_count(dtype)
    text = f"reads angles that are off by up to {error:.1g} near 8, and by 1 above {limit}"
    return "medium" if dtype == jnp.bfloat16 else "low", text


def _is_derivative(node: Node) -> bool:
    """Whether an exponential is a part of the derivative of `expm1`, or of `erf`: `exp(-x**2)`."""
    values, functions = node.operands, ("expm1",)
    negated = values[0].node
    if negated is not None and negated.name == "neg":
        squared = negated.operands[0].node
        values, functions = squared.operands[:1] if squared else [], ("erf", "erfc")
    return any(reader.name in functions for value in values for reader in value.readers)


_HAZARDS: dict[str, Callable[[Node, np.dtype], _Hazard]] = {
    **dict.fromkeys(("exp", "exp2"), _exponential),
    "log": _logarithm,
    "rsqrt": _root,
    "pow": _power,
    **dict.fromkeys(("sin", "cos", "tan"), _periodic),
}


# --- Linear algebra ---


def _linalg(step: AuditedStep, node: Node) -> Iterator[UntriedFinding]:
    """Yields a finding about a matrix whose elements were rounded since a product made them."""

    def through(node: Node) -> list[Value]:
        return [] if node.is_product or node.name in DECOMPOSITIONS else node.operands

    matrix = node.operands[0]
    values = [matrix, *(v for each in Graph.back([matrix], through) for v in through(each))]
    low = [v for v in values if v.is_low and v.shape[-2:] == matrix.shape[-2:]]
    low = [value for value in low if _is_of_data(value)]  # no mask, and no identity
    if not low:
        return
    advice = step.in_float32(matrix, "the code that makes the matrix")
    is_made = before(low[0], MOVES_AND_CASTS).node is not None
    is_cholesky, dtype = node.name == "cholesky", low[0].dtype
    text = (
        f"{node.name} reads a matrix that was rounded to {dtype.name}: singular values below "
        f"1/{_largest_count(dtype)} of the largest are noise{', which may give NaN' * is_cholesky}."
    )
    severity = "high" if is_cholesky else "medium" if is_made else "low"
    makers = [value.node for value in low if value.node is not None]
    found = step.found("low-linalg", severity, node, text, advice, flops=step.flops_of(makers))
    yield found._replace(nodes=[*makers, node])


def _is_of_data(value: Value) -> bool:
    """Whether a value depends, by its numbers, on floating arrays that the program is given."""
    floats = lambda node: [v for v in node.operands if v.is_low or v.is_wide]  # noqa: E731
    behind = (v for node in Graph.back([value], floats) for v in floats(node))
    return any(each.kind in ("input", "const") for each in (value, *behind))


# --- Integers ---


def _integer(step: AuditedStep, node: Node) -> Iterator[UntriedFinding]:
    """Yields a finding about integers that become 16-bit numbers and are not all held exactly."""
    (result,), limit = node.results, _largest_count(node.results[0].dtype)
    source = before(result, MOVES_AND_CASTS | {"add", "sub", "max"})
    largest = 0.0
    if source.node is not None and source.node.name == "iota":
        params = source.node.eqn.params
        largest = params["shape"][params["dimension"]] - 1
    elif source.kind == "input" and jnp.issubdtype(source.dtype, jnp.integer):
        largest = math.inf if source.dtype.itemsize > 1 else 255
    elif source.kind == "const" and jnp.issubdtype(source.dtype, jnp.integer):
        largest = np.max(source.numbers, initial=0)
    of_jax = (str(each.eqn.params.get("name")) for each in node.outwards)
    if largest <= limit or any(name.endswith("linspace") for name in of_jax):
        return
    is_known = largest < math.inf
    which = f"Integers up to {largest:,.0f}" if is_known else "Integers of an unknown size"
    text = f"{which} become {result.dtype.name}, which holds them exactly only up to {limit}."
    by_cast = "x.astype(jnp.float32) in place of the cast, and 16 bits behind the arithmetic on it"
    advice = step.in_float32(source, "the arithmetic on it", by_cast)
    severity = "medium" if is_known else "low"
    nbytes = node.times * result.nbytes
    yield step.found("rounded-integer", severity, node, text, advice, nbytes=nbytes)


# --- Sums of many terms, over devices, and of gradients ---


def _sum(step: AuditedStep, node: Node, dtype: np.dtype) -> Iterator[UntriedFinding]:
    is_scatter = node.name == "scatter_add"
    terms, limit = _TERMS[node.name](node), _largest_count(dtype)
    if terms <= limit or (node.is_backward and not is_scatter):
        return
    # With more terms than all places together can count, some place gets too many.
    places = node.operands[0].size * terms // max(node.operands[-1].size, 1)
    severity = "high" if is_scatter and terms > limit * places else "medium"
    what = "The gradient of a lookup" if node.is_backward else node.name
    message = (
        f"{what} adds up to {terms:,} terms in {dtype.name}, which counts exactly only to {limit}: "
        "there a sum may stand still."
    )
    by_cast = "x.astype(jnp.float32) before it, and the cast to 16 bits behind it"
    advice = step.in_float32(node.operands[0], "it", by_cast)
    yield step.found("low-sum", severity, node, message, advice, nbytes=_low_nbytes(node))


def _gradient(step: AuditedStep, cast: Node) -> Iterator[UntriedFinding]:
    """Yields a finding about a gradient that was rounded before `r=f32` widened it."""
    rounded = cast.operands[0]
    maker = before(rounded, MOVES).node or cast
    is_sum = maker.name in ("reduce_sum", "mul")
    message = (
        f"{maker.name} makes a gradient in {rounded.dtype.name}, which stays rounded although the "
        f"policy says r=f32: {'it reads too much memory' if is_sum else 'no rule widens it'}."
    )
    advice = "the cast of the parameter inside of the function whose derivative this is"
    yield step.found("rounded-gradient", "medium", maker, message, advice, nbytes=rounded.nbytes)


def _reduced(node: Node) -> int:
    return node.operands[0].size // max(node.results[0].size, 1)


def _scattered(node: Node) -> int:
    """Returns how many updates a scatter may add to one place; 0 if each place gets one only."""
    operand, indices, updates = node.operands[:3]
    dimensions = node.eqn.params["dimension_numbers"]
    if node.eqn.params["unique_indices"] or _are_distinct(indices):
        return 0
    windows = dimensions.update_window_dims
    rows = math.prod(n for i, n in enumerate(updates.shape) if i not in windows)
    return rows // max(math.prod(operand.shape[i] for i in dimensions.operand_batching_dims), 1)


def _are_distinct(indices: Value) -> bool:
    """Whether indices hold a range, as in `x[jnp.arange(n), labels]`, or sort rows."""

    def through(node: Node) -> list[Value]:
        is_joined = node.name in ("concatenate", "select_n", "add", "clamp")
        return node.operands if is_joined else node.operands[: node.is_view]

    nodes = Graph.back([indices], through, _FARTHEST)
    return any(node.name in ("iota", "sort", "top_k") for node in nodes)


# How many terms each operation adds up.
_TERMS: dict[str, Callable[[Node], int]] = {
    "reduce_sum": _reduced,
    "cumsum": lambda node: node.operands[0].shape[node.eqn.params["axis"]],
    "scatter_add": _scattered,
    "psum": _reduced,  # over an axis of jax.vmap
}


def _named_axes(node: Node) -> list[str]:
    """Returns the names of the axes of several devices over which a node sums.

    Under `jax.vmap` some axes are numbers.
    """
    params = node.eqn.params
    meshes = [each.eqn.params["mesh"] for each in node.outwards if "mesh" in each.eqn.params]
    single = {axis for mesh in meshes for axis, size in mesh.shape.items() if size == 1}
    axes = params["axes"] if "axes" in params else params["axis_name"]
    each = axes if isinstance(axes, tuple) else (axes,)
    return [str(axis) for axis in each if not isinstance(axis, int) and axis not in single]


def _collective(step: AuditedStep, node: Node, dtype: np.dtype, axes: list[str]) -> UntriedFinding:
    over = ", ".join(map(repr, axes))
    message = f"{node.name} over {over} sums in {dtype.name}, which keeps {_digits(dtype)}."
    advice = "x.astype(jnp.float32) before the sum"
    behind = Graph.back(node.operands, lambda each: each.operands)
    if any(each.is_backward for each in behind):
        advice = f"r=f32 in the policy of jmpx.value_and_grad if that makes x, or {advice}"
    select = None if node.is_backward else node.selector
    rules = () if select is None else (f"{select}: full",)
    nbytes = _low_nbytes(node)
    return step.found("low-collective", _worst(dtype), node, message, advice, *rules, nbytes=nbytes)


# --- Sums that a loop carries ---


def _carry(step: AuditedStep, carry: Node) -> Iterator[UntriedFinding]:
    count = carry.eqn.params.get("length")  # None for an unknown number of trips
    addition, decay = (None, 1.0) if count in (0, 1) else _addition(carry)
    if addition is None:
        return
    total, limit = carry.results[0], _largest_count(carry.results[0].dtype)
    many = min(math.inf if count is None else count, math.inf if decay == 1 else 1 / (1 - decay))
    severity = "high" if many > limit else "medium" if many > limit // 16 else "low"
    if severity == "low" and decay < 1:  # the state of a recurrent layer forgets
        return
    node, what = addition, f"The loop sums in a carry in {total.dtype.name}"
    advice = "start the carry in float32, as jnp.zeros(shape, jnp.float32), and add in float32"
    if addition.is_backward:
        if severity != "high":  # every scan over layers sums gradients of values it closes over
            return
        node = carry  # The lines of the addition itself differ between versions of JAX.
        what = f"The gradient of a value that the loop closes over is summed in {total.dtype.name}"
        advice = "cast the value to 16 bits inside of the loop, so that the sum is in float32"
    trips = "an unknown number of" if count is None else f"{count:,}"
    text = f"{what} over {trips} trips: a term below 1/{limit} of the sum so far may be lost."
    nbytes = total.nbytes * (count or 1)
    yield step.found("low-carry", severity, node, text, advice, count=1, nbytes=nbytes)


def _addition(carry: Node) -> tuple[Node | None, float]:
    """Returns the addition by which a carry is a plain sum, or None, and its decay.

    The decay is the number by which each trip multiplies the carry, as in a moving average.
    """
    old, new = carry.results[0], carry.operands[-1]
    pending: list[tuple[Value, Node | None, list[Value], float]] = [(new, None, [], 1.0)]
    seen = {new}
    while pending:
        value, addition, addends, decay = pending.pop()
        if value is old:
            # The addends of a plain sum do not depend on the sum; those of a residual stream do.
            behind = Graph.back(addends, lambda node: node.operands)
            if addition is not None and carry not in behind:
                return addition, decay
            continue
        for held, factor, *added in _held(value.node):
            if held is old or held not in seen:
                seen.add(held)
                node = value.node if added else addition
                pending.append((held, node, [*addends, *added], decay * factor))
    return None, 1.0


def _held(node: Node | None) -> list[tuple[Value, float, *tuple[Value, ...]]]:
    """Returns the operands that may be the sum so far, each with its factor and its addend."""
    if node is None:
        return []
    if node.is_view:
        return [(node.operands[0], 1.0)]
    if node.name in ("select_n", "join"):
        return [(value, 1.0) for value in node.operands]
    if node.name not in ("add", "add_any", "sub", "mul"):
        return []
    left, right = node.operands
    both = [(left, right), (right, left)]
    if node.name == "mul":
        factors = ((value, other.number) for value, other in both)
        return [(value, by) for value, by in factors if by is not None and 0 < by <= 1]
    both = both[: 1 + (node.name != "sub")]
    return [(value, 1.0, other) for value, other in both if not _is_of_own_part(other)]


def _is_of_own_part(addend: Value) -> bool:
    """Whether an addend is 0 except in one part, as the gradient of `x[i]` is."""
    node = addend.unmoved.node
    if node is None or node.name != "dynamic_update_slice":
        return False
    return node.operands[0].number == 0
