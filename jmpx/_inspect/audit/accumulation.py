"""Findings: sums that a loop keeps in 16 bits while it goes on."""

import math
from collections.abc import Iterator

from jmpx._inspect.audit.remedies import Remedies
from jmpx._inspect.audit.step import Found, Kind, Step
from jmpx._inspect.audit.values import is_low, is_view, largest_count, number, source
from jmpx._inspect.graph import Node, Value

_CARRY = Kind("low-carry", Remedies.wider)
KINDS = (_CARRY,)


def search(step: Step) -> Iterator[Found]:
    """Yields `low-carry`; a loop of one trip adds only once."""
    for carry in step.graph.nodes:
        if carry.is_carry and is_low(carry.results[0]) and _trips(carry) not in (0, 1):
            addition, decay = _addition(carry)
            if addition is not None:
                yield from _found(step, carry, addition, decay)


def _trips(carry: Node) -> int | None:
    return carry.eqn.params.get("length")


def _found(step: Step, carry: Node, addition: Node, decay: float) -> Iterator[Found]:
    total, count = carry.results[0], _trips(carry)
    limit = largest_count(total.dtype)
    many = min(math.inf if count is None else count, math.inf if decay == 1 else 1 / (1 - decay))
    severity = "high" if many > limit else "medium" if many > limit // 16 else "low"
    if severity == "low" and decay < 1:  # as the state of a recurrent layer, which forgets
        return
    node, what = addition, f"The loop sums in a carry in {total.dtype.name}"
    advice = "start the carry in float32, as jnp.zeros(shape, jnp.float32), and add in float32"
    if addition.is_backward:
        if severity != "high":  # Each scan over layers sums the gradients of what it closes over.
            return
        node = carry  # JAX's versions give the addition itself different lines.
        what = f"The gradient of a value that the loop closes over is summed in {total.dtype.name}"
        advice = "cast the value to 16 bits inside of the loop, so that the sum is in float32"
    trips = "an unknown number of" if count is None else f"{count:,}"
    text = f"{what} over {trips} trips: a term below 1/{limit} of the sum so far may be lost."
    nbytes = total.nbytes * (count or 1)
    yield step.found(_CARRY, severity, node, text, advice, count=1, nbytes=nbytes)


def _addition(carry: Node) -> tuple[Node | None, float]:
    """Returns the addition that makes a carry out of what it was; None if it is no plain sum.

    With it, the number by which the carry is multiplied in each trip, as a moving average is.
    """
    old, new = carry.results[0], carry.operands[-1]
    pending: list[tuple[Value, Node | None, list[Value], float]] = [(new, None, [], 1.0)]
    seen = {id(new)}
    while pending:
        value, addition, addends, decay = pending.pop()
        if value is old:
            if addition is not None and not _depends(addends, old):
                return addition, decay
            continue
        for held, factor, *added in _held(value.node):
            if held is old or id(held) not in seen:
                seen.add(id(held))
                node = value.node if added else addition
                pending.append((held, node, [*addends, *added], decay * factor))
    return None, 1.0


def _held(node: Node | None) -> list[tuple[Value, float, *tuple[Value, ...]]]:
    """Returns the operands that may be the sum so far, their factors, and what is added to them."""
    if node is None:
        return []
    if is_view(node):
        return [(node.operands[0], 1.0)]
    if node.name in ("select_n", "join"):
        return [(value, 1.0) for value in node.operands]
    if node.name not in ("add", "add_any", "sub", "mul"):
        return []
    left, right = node.operands
    both = [(left, right), (right, left)]
    if node.name == "mul":
        factors = ((value, number(other)) for value, other in both)
        return [(value, by) for value, by in factors if by is not None and 0 < by <= 1]
    both = both[: 1 + (node.name != "sub")]
    return [(value, 1.0, other) for value, other in both if not _is_of_own_part(other)]


def _is_of_own_part(addend: Value) -> bool:
    """Whether each trip adds to a part of its own, as the gradient of `x[i]` does."""
    node = source(addend).node
    return (
        node is not None and node.name == "dynamic_update_slice" and number(node.operands[0]) == 0
    )


def _depends(values: list[Value], old: Value) -> bool:
    """Whether values depend on an old one, as what a layer adds to a residual stream does."""
    pending, seen = list(values), set(map(id, values))
    while pending:
        value = pending.pop()
        if value is old:
            return True
        # A carry is followed to what the body returns, too, which a later trip starts with.
        new = [] if value.node is None else [v for v in value.node.operands if id(v) not in seen]
        seen.update(map(id, new))
        pending += new
    return False
