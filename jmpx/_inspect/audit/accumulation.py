"""Findings: sums that a loop keeps in 16 bits while it goes on."""

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
            addition = _addition(carry)
            if addition is not None:
                yield from _found(step, carry, addition)


def _trips(carry: Node) -> int | None:
    return carry.eqn.params.get("length")


def _found(step: Step, carry: Node, addition: Node) -> Iterator[Found]:
    total, count = carry.results[0], _trips(carry)
    limit = largest_count(total.dtype)
    severity = "high" if count is None or count > limit else "medium"
    if count is not None and count <= limit // 16:
        severity = "low"
    node, what = addition, f"The loop sums in a carry in {total.dtype.name}"
    advice = "start the carry in float32, as jnp.zeros(shape, jnp.float32), and add in float32"
    if addition.is_backward:
        if severity != "high":  # Each scan over layers sums the gradients of what it closes over.
            return
        node = carry  # JAX's versions give the addition itself different lines.
        what = f"The gradient of a value that the loop closes over is summed in {total.dtype.name}"
        advice = "cast the value to 16 bits inside of the loop, so that the sum is in float32"
    many = "an unknown number of" if count is None else f"{count:,}"
    text = f"{what} over {many} trips: a term below 1/{limit} of the sum so far may be lost."
    nbytes = total.nbytes * (count or 1)
    yield step.found(_CARRY, severity, node, text, advice, count=1, nbytes=nbytes)


def _addition(carry: Node) -> Node | None:
    """Returns the addition that makes a carry out of what it was; None if it is no plain sum."""
    old, new = carry.results[0], carry.operands[-1]
    pending: list[tuple[Value, Node | None, list[Value]]] = [(new, None, [])]
    seen = {id(new)}
    while pending:
        value, addition, addends = pending.pop()
        if value is old:
            if addition is not None and not _depends(addends, old):
                return addition
            continue
        for held, *added in _held(value.node):
            if held is old or id(held) not in seen:
                seen.add(id(held))
                pending.append((held, value.node if added else addition, [*addends, *added]))
    return None


def _held(node: Node | None) -> list[tuple[Value, ...]]:
    """Returns the operands that may be the sum so far, each with what the node adds to it."""
    if node is None:
        return []
    if is_view(node):
        return [(node.operands[0],)]
    if node.name in ("select_n", "join"):
        return [(value,) for value in node.operands]
    if node.name not in ("add", "add_any", "sub"):
        return []
    left, right = node.operands
    both = [(left, right), (right, left)]
    return [each for each in both[: 1 + (node.name != "sub")] if not _is_of_own_part(each[1])]


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
