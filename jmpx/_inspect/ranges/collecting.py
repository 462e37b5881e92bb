"""Makes the ranges of a program out of the measurements."""

import numpy as np

from jmpx._inspect.graph import Graph, Node, Value
from jmpx._inspect.ranges.data import Histogram, Operation, Range
from jmpx._inspect.ranges.measuring import Measured
from jmpx._inspect.ranges.plan import Plan, Row, is_gradient, sources
from jmpx._inspect.ranges.report import Ranges
from jmpx._inspect.ranges.statistics import as_number


def collected(graph: Graph, plan: Plan, measured: Measured) -> Ranges:
    """Returns the ranges of a program."""
    largest = {
        id(node): as_number(bits)
        for node, bits in zip(plan.nodes, measured.extremes[:, 0], strict=True)
    }

    def size_of(value: Value) -> float:
        if value.node is not None:
            return largest.get(id(value.node), 0.0)
        if value.kind == "input":
            return as_number(measured.entered[value.index])
        return _largest_constant(value.constant)

    entering = [0.0] * len(plan.table)
    for node, row in zip(plan.nodes, plan.rows, strict=True):
        for value in sources(node):
            if _enters(graph, value, plan.table[row]):
                entering[row] = max(entering[row], size_of(value))
    forward, backward = [], []
    for index, row in enumerate(plan.table):
        operations = _operations(graph, plan, measured, index)
        histogram = Histogram.of(measured.counts[index])
        found = Range(row.scope, row.selector, operations, entering[index], histogram)
        (backward if row.is_gradient else forward).append(found)
    program = graph.program
    is_step = program.has_backward and not program.is_differentiated
    return Ranges(program.name, tuple(forward), tuple(backward), plan.masks, is_step)


def _enters(graph: Graph, value: Value, row: Row) -> bool:
    """Whether a value is from another scope, and from the same pass."""
    if value.node is None:
        return not row.is_gradient
    is_alike = is_gradient(value.node) == row.is_gradient
    return is_alike and graph.selector(value.node) != row.selector


def _largest_constant(constant: object) -> float:
    numbers = np.abs(np.asarray(constant).astype(np.float64))
    return float(np.max(numbers, initial=0.0, where=np.isfinite(numbers)))


def _operations(graph: Graph, plan: Plan, measured: Measured, row: int) -> tuple[Operation, ...]:
    """Returns the extremes of each operation in a row, the largest first."""
    extremes: dict[str, list[tuple[float, float, Node]]] = {}
    for node, each, (large, small) in zip(plan.nodes, plan.rows, measured.extremes, strict=True):
        if each == row:
            found = as_number(large), as_number(small) if large else 0.0, node
            extremes.setdefault(node.name, []).append(found)
    operations = []
    for name, found in extremes.items():
        largest, _, node = max(found, key=lambda each: each[0])
        smallest = min((each[1] for each in found if each[1]), default=0.0)
        operations.append(Operation(name, largest, smallest, str(graph.place(node) or "")))
    return tuple(sorted(operations, key=lambda operation: -operation.largest))
