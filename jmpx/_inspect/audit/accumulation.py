"""Findings: sums and moving averages that are kept in 16 bits while a loop or training goes on."""

from collections.abc import Iterable, Iterator, Sequence

from jmpx._inspect.audit.recurrences import Loop, Recurrence, recurrences, trips
from jmpx._inspect.audit.remedies import Remedies
from jmpx._inspect.audit.step import Found, Kind, Step
from jmpx._inspect.audit.values import largest_count
from jmpx._inspect.graph import Graph, Node, Value

_CARRY = Kind("low-carry", Remedies.wider)
_AVERAGE = Kind("low-average", Remedies.wider)
KINDS = (_CARRY, _AVERAGE)


def search(step: Step) -> Iterator[Found]:
    """Yields `low-carry` and `low-average`."""
    found = list(recurrences(step.graph))
    dependence = _Dependence(step.graph, found) if found else None
    for each in found:
        if dependence is not None and dependence.is_of_itself(each):
            continue
        if each.is_average:
            yield _average(step, each)
        elif each.loop is not None and trips(each.loop) not in (0, 1):
            yield from _carry(step, each, each.loop)


def _carry(step: Step, found: Recurrence, loop: Loop) -> Iterator[Found]:
    node, name, limit = found.node, found.dtype.name, largest_count(found.dtype)
    count = trips(loop)
    is_long = count is None or count > limit
    is_short = count is not None and count <= limit // 16
    what = f"The loop sums in a carry in {name}"
    advice = "start the carry in float32, as jnp.zeros(shape, jnp.float32), and add in float32"
    if node.is_backward:
        if not is_long:  # Each scan over layers sums the gradients of what it closes over.
            return
        what = f"The gradient of a value that the loop closes over is summed in {name}"
        advice = (
            "cast the value to 16 bits inside of the loop: its gradient is then summed in float32"
        )
        node = loop[0]  # JAX's versions give the addition itself different lines.
    many = "an unknown number of" if count is None else f"{count:,}"
    yield step.found(
        _CARRY,
        "high" if is_long else "low" if is_short else "medium",
        node,
        f"{what} over {many} trips: a term below 1/{limit} of the sum so far may be lost.",
        advice,
        count=1,
        nbytes=found.old.nbytes * (count or 1),
    )


def _average(step: Step, found: Recurrence) -> Found:
    lost = 1 / (largest_count(found.dtype) * (1 - found.decay))
    what = f"A moving average with decay {found.decay:.4g} is kept in {found.dtype.name}"
    return step.found(
        _AVERAGE,
        "high" if lost > 0.1 else "medium" if lost > 0.01 else "low",
        found.node,
        f"{what}: it may stay where it is if new values differ by less than {lost:.1%}.",
        "keep it in float32, in optax by accumulator_dtype or mu_dtype=jnp.float32",
        count=1,
        nbytes=found.old.nbytes * found.node.times,
    )


class _Dependence:
    """Which values of recurrences contribute to which values, found in one pass over a graph."""

    def __init__(self, graph: Graph, found: Sequence[Recurrence]) -> None:
        loops = [each.loop for each in found if each.loop is not None and not each.is_average]
        self._carries = {id(carry.results[0]): carry for loop in loops for carry in loop}
        asked = dict.fromkeys((*self._carries, *(id(each.old) for each in found)))
        self._bits = {key: 1 << i for i, key in enumerate(asked)}
        # The bits of what contributes to a value.
        self._masks: dict[int, int] = {id(v): self._bits.get(id(v), 0) for v in graph.inputs}
        inner: dict[int, list[Node]] = {}  # a loop's equation -> its carries
        for node in graph.nodes:
            if node.is_carry:
                inner.setdefault(id(node.eqn), []).append(node)
            mask = self._union(node.first_operands)
            if node.is_structure and node.name in ("result", "stack"):
                # In later trips, all of a loop's body may depend on all that it carries.
                carries = inner.get(id(node.eqn), ())
                mask |= self._union(value for each in carries for value in each.operands)
            for value in node.results:
                self._masks[id(value)] = mask | self._bits.get(id(value), 0)

    def _union(self, values: Iterable[Value]) -> int:
        mask = 0
        for value in values:
            mask |= self._masks.get(id(value), 0)
        return mask

    def is_of_itself(self, found: Recurrence) -> bool:
        """Whether what is added depends on the old value.

        What a layer adds to a residual stream depends on the stream, in this trip or the next; what
        is averaged may depend on the average in later ones, as gradients do on momentum.
        """
        mask = self._union(found.addends)
        if not found.is_average:
            mask = self._in_any_trip(mask)
        return bool(mask & self._bits[id(found.old)])

    def _in_any_trip(self, mask: int) -> int:
        """Returns the bits of what contributes in this trip or, by way of carries, a later one."""
        reached = 0
        while mask != reached:
            reached = mask
            carries = [c for key, c in self._carries.items() if self._bits[key] & reached]
            mask |= self._union(carry.operands[-1] for carry in carries)
        return reached
