"""Makes the ranges of a program out of what was measured."""

import numpy as np

from jmpx._inspect.graph import Graph, Node, Value
from jmpx._inspect.ranges.data import Histogram, Operation, Range
from jmpx._inspect.ranges.measuring import Measured, Plan, Row
from jmpx._inspect.ranges.report import Ranges
from jmpx._inspect.ranges.sources import is_gradient, sources
from jmpx._inspect.ranges.statistics import as_number


def collected(graph: Graph, plan: Plan, measured: Measured) -> Ranges:
    """Returns the ranges of a program.

    Args:
        graph: the program.
        plan: what was measured.
        measured: the measurements.
    """
    largest = {
        id(node): as_number(bits)
        for node, bits in zip(plan.nodes, measured.extremes[:, 0], strict=True)
    }

    def size_of(value: Value) -> float:
        if value.node is not None:
            return largest.get(id(value.node), 0.0)
        if value.kind == "input":
            return as_number(measured.entered[value.index, 0])
        return _largest_constant(value.constant)

    entering = [0.0] * len(plan.table)
    for node, row in zip(plan.nodes, plan.rows, strict=True):
        for value in sources(node):
            if _enters(graph, value, plan.table[row]):
                entering[row] = max(entering[row], size_of(value))
    ranges = [
        _range(graph, plan, measured, index, row, entering[index])
        for index, row in enumerate(plan.table)
    ]
    pairs = list(zip(plan.table, ranges, strict=True))
    program = graph.program
    return Ranges(
        program.name,
        tuple(found for row, found in pairs if not row.is_gradient),
        tuple(found for row, found in pairs if row.is_gradient),
        plan.masks,
        is_step=program.has_backward and not program.is_differentiated,
    )


def _enters(graph: Graph, value: Value, row: Row) -> bool:
    """Whether a value is from elsewhere; what the forward pass saved enters no gradients."""
    if value.node is None:
        return not row.is_gradient
    is_alike = is_gradient(value.node) == row.is_gradient
    return is_alike and graph.selector(value.node) != row.selector


def _largest_constant(constant: object) -> float:
    numbers = np.abs(np.asarray(constant).astype(np.float64))
    return float(np.max(numbers, initial=0.0, where=np.isfinite(numbers)))


def _range(
    graph: Graph, plan: Plan, measured: Measured, index: int, row: Row, entering: float
) -> Range:
    """Returns the range of a row, with the extremes of each operation in it."""
    extremes: dict[str, list[tuple[float, float, Node]]] = {}
    for position, each in enumerate(plan.rows):
        if each == index:
            node, (largest, smallest) = plan.nodes[position], measured.extremes[position]
            found = as_number(largest), as_number(smallest) if largest else 0.0, node
            extremes.setdefault(node.name, []).append(found)
    operations = []
    for name, found in extremes.items():
        largest, _, node = max(found, key=lambda each: each[0])
        smallest = min((each[1] for each in found if each[1]), default=0.0)
        place = graph.place(node)
        operations.append(Operation(name, largest, smallest, "" if place is None else str(place)))
    operations.sort(key=lambda operation: -operation.largest)
    histogram = None if measured.counts is None else Histogram.of(measured.counts[index])
    return Range(row.scope, row.selector, tuple(operations), entering, histogram)
