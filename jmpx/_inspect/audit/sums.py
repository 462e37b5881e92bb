"""Findings: long sums in 16 bits, sums over devices, and gradients that stay rounded."""

import math
from collections.abc import Callable, Iterator

import numpy as np

from jmpx._inspect.audit.remedies import Remedies
from jmpx._inspect.audit.step import Found, Kind, Step
from jmpx._inspect.audit.values import (
    CAST,
    MOVES,
    before,
    digits,
    is_low,
    largest_count,
    low_dtype,
    low_nbytes,
    source,
    worst,
)
from jmpx._inspect.graph import Node, Value
from jmpx._jaxprs.marks import ROUNDED

_SUM = Kind("low-sum", Remedies.wider_operations)
_COLLECTIVE = Kind("low-collective")
_GRADIENT = Kind("rounded-gradient")
KINDS = (_SUM, _COLLECTIVE, _GRADIENT)
_COLLECTIVES = frozenset({"psum", "psum_invariant", "reduce_scatter"})


def search(step: Step) -> Iterator[Found]:
    """Yields `low-sum`, `low-collective` and `rounded-gradient`.

    A backward pass repeats what its forward pass did, on whose line it is found. Only a sum that
    it adds, of the gradients of one row of a table or one parameter, is its own.
    """
    for node in step.graph.nodes:
        if node.name == CAST and ROUNDED in node.scope:
            yield from _gradient(step, node)
            continue
        dtype = None if node.is_structure else low_dtype(node)
        if dtype is None or id(node) in step.explained:
            continue
        if node.name in _COLLECTIVES and (axes := _named_axes(node)):
            yield _collective(step, node, dtype, axes)
        elif node.name in _TERMS and is_low(node.results[0]):
            yield from _sum(step, node, dtype)


def _sum(step: Step, node: Node, dtype: np.dtype) -> Iterator[Found]:
    is_scatter = node.name == "scatter_add"
    terms, limit = _TERMS[node.name](node), largest_count(dtype)
    if terms <= limit or (node.is_backward and not is_scatter):
        return
    severity = "medium"
    if is_scatter:
        # Where there are more terms than places can take, some place gets too many.
        places = node.operands[0].size * terms // max(node.operands[2].size, 1)
        severity = "high" if terms > limit * places else "medium"
    what = "The gradient of a lookup" if node.is_backward else node.name
    message = (
        f"{what} adds up to {terms:,} terms in {dtype.name}, which counts exactly only to {limit}: "
        "there a sum may stand still."
    )
    advice = "x.astype(jnp.float32) before it, and the cast to 16 bits behind it"
    yield step.found(_SUM, severity, node, message, advice, nbytes=low_nbytes(node))


def _gradient(step: Step, cast: Node) -> Iterator[Found]:
    """Yields a finding about a gradient that `r=f32` has widened after it was rounded."""
    rounded = cast.operands[0]
    maker = before(rounded, MOVES).node or cast
    is_sum = maker.name in ("reduce_sum", "mul")
    message = (
        f"{maker.name} makes a gradient in {rounded.dtype.name}, which stays rounded although the "
        f"policy says r=f32: {'it reads too much memory' if is_sum else 'no rule widens it'}."
    )
    advice = "the cast of the parameter inside of the function whose derivative this is"
    yield step.found(_GRADIENT, "medium", maker, message, advice, nbytes=rounded.nbytes)


def _reduced(node: Node) -> int:
    return node.operands[0].size // max(node.results[0].size, 1)


def _scattered(node: Node) -> int:
    """Returns how many updates a scatter may add to one place; 0 if each place gets one."""
    operand, indices, updates = node.operands[:3]
    dimensions = node.eqn.params["dimension_numbers"]
    if node.eqn.params["unique_indices"] or _are_distinct(indices):
        return 0
    rows = math.prod(
        n for i, n in enumerate(updates.shape) if i not in dimensions.update_window_dims
    )
    return rows // max(math.prod(operand.shape[i] for i in dimensions.operand_batching_dims), 1)


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


# How many terms an operation adds up.
_TERMS: dict[str, Callable[[Node], int]] = {
    "reduce_sum": _reduced,
    "cumsum": lambda node: node.operands[0].shape[node.eqn.params["axis"]],
    "scatter_add": _scattered,
    "psum": _reduced,  # over an axis of jax.vmap
}


def _named_axes(node: Node) -> list[str]:
    """Returns the names of the axes over which a node sums; under `jax.vmap` some are numbers."""
    params = node.eqn.params
    axes = params["axes"] if "axes" in params else params["axis_name"]
    each = axes if isinstance(axes, tuple) else (axes,)
    return [str(axis) for axis in each if not isinstance(axis, int)]


def _collective(step: Step, node: Node, dtype: np.dtype, axes: list[str]) -> Found:
    over = ", ".join(map(repr, axes))
    message = f"{node.name} over {over} sums in {dtype.name}, which keeps {digits(dtype)}."
    advice = (
        "r=f32 in the policy of jmpx's gradient functions, or the cast to float32 before the sum"
    )
    select = None if node.is_backward else step.graph.selector(node)
    rules = () if select is None else (f"{select}: full",)
    nbytes = low_nbytes(node)
    return step.found(_COLLECTIVE, worst(dtype), node, message, advice, *rules, nbytes=nbytes)
