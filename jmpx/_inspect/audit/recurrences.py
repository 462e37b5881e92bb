"""Recurrences: values that a loop, or a step that is called again and again, computes anew."""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from jmpx._inspect.audit.values import is_low, is_view, number, source
from jmpx._inspect.graph import Graph, Node, Value

_FEW = 64  # An average is a few operations away from what it was; layers are many.


Loop: TypeAlias = tuple[Node, ...]  # its carries


def trips(loop: Loop) -> int | None:
    """Returns how often the body of a loop runs; None for a while loop."""
    return loop[0].eqn.params.get("length")


class BackwardPath(NamedTuple):
    """The way from a new value back to one that it is made of by additions and a decay."""

    value: Value  # the earlier value
    decay: float = 1.0  # the number by which it is multiplied
    addends: tuple[Value, ...] = ()  # what is added
    node: Node | None = None  # the addition
    dtype: np.dtype | None = None  # the 16-bit dtype that it has somewhere on its way

    def back(self, operand: Value, factor: float = 1.0, *added: Value) -> "BackwardPath":
        """Returns the way to an operand that is multiplied by a factor, and added to others."""
        node = self.value.node if added else self.node
        dtype = operand.dtype if is_low(operand) else self.dtype
        return BackwardPath(operand, self.decay * factor, (*self.addends, *added), node, dtype)


class Recurrence(NamedTuple):
    """A value in 16 bits that is made of an earlier one of itself.

    Attributes:
        old: the earlier value: what a trip of a loop starts with, or an argument of the step.
        decay: the number by which it is multiplied.
        addends: what is added to it.
        node: the addition.
        dtype: the 16-bit dtype of the value.
        loop: the loop; None for an argument of the step.
    """

    old: Value
    decay: float
    addends: tuple[Value, ...]
    node: Node
    dtype: np.dtype
    loop: Loop | None

    @property
    def is_average(self) -> bool:
        """Whether the earlier value decays."""
        return _is_decay(self.decay)


def _is_decay(factor: float) -> bool:
    """Whether a value that is multiplied by a factor decays, and most of it is kept."""
    return 0.5 <= factor < 1 - 1e-6


def recurrences(graph: Graph) -> Iterator[Recurrence]:
    """Yields the sums and averages that are kept in 16 bits."""
    for path, loop in (*_in_loops(graph), *_over_calls(graph)):
        old, decay, addends, node, dtype = path
        is_kept = _is_decay(decay) or (decay == 1 and loop is not None)
        if is_kept and node is not None and dtype is not None:
            yield Recurrence(old, decay, addends, node, dtype, loop)


def _loops(graph: Graph) -> Iterator[Loop]:
    """Yields the loops of a graph that carry something."""
    by_loop = itertools.groupby(graph.nodes, lambda n: id(n.eqn) if n.is_carry else None)
    for loop, together in by_loop:
        if loop is not None:
            yield tuple(together)


def _in_loops(graph: Graph) -> Iterator[tuple[BackwardPath, Loop]]:
    for loop in _loops(graph):
        for carry in loop:
            old, new = carry.results[0], carry.operands[-1]
            for path in _paths(new, lambda value, old=old: value is old):
                yield path, loop


def _over_calls(graph: Graph) -> Iterator[tuple[BackwardPath, None]]:
    """Yields the ways back to averages among the arguments of a step that it returns anew.

    What nothing reads is looked at, too: a program drops the new state of NNX's objects.
    """
    unread = (value for node in graph.nodes for value in node.results if not value.readers)
    for new in {id(value): value for value in (*graph.outputs, *unread)}.values():
        paths = _paths(new, lambda value, new=new: _may_be_state(value, new), _FEW)
        averages = [path for path in paths if path.addends and _is_decay(path.decay)]
        if averages:  # What is averaged may be an argument, too; the average decays least.
            yield max(averages, key=lambda path: path.decay), None


def _may_be_state(value: Value, new: Value) -> bool:
    is_constant = value.kind == "const" and value.shape != ()  # as an NNX module's state is
    return (value.kind == "input" or is_constant) and value.size == new.size


def _paths(
    new: Value, is_old: Callable[[Value], bool], most: int | None = None
) -> list[BackwardPath]:
    """Returns the ways from a new value to old ones.

    Over several calls of a step, `most` is the number of values to look at; None is for a loop.
    """
    pending = [BackwardPath(new, dtype=new.dtype if is_low(new) else None)]
    seen, found = {id(new)}, []
    while pending:
        for path in _back(pending.pop(), over_calls=most is not None):
            if is_old(path.value):
                found.append(path)
            elif id(path.value) not in seen and (most is None or len(seen) < most):
                seen.add(id(path.value))
                pending.append(path)
    return found


def _back(path: BackwardPath, *, over_calls: bool) -> list[BackwardPath]:
    """Returns the ways to the operands that a value is a sum or a multiple of."""
    node = path.value.node
    if node is None:
        return []
    name, operands = node.name, node.operands
    if is_view(node) or (over_calls and node.is_structure and name in ("slice", "stack")):
        return [path.back(operands[0])]
    if node.is_structure:
        return [path.back(operand) for operand in operands] if name == "join" else []
    if name == "select_n":
        return [path.back(operand) for operand in operands[1:]]
    if name in ("scatter_add", "scatter_sub"):
        return [path.back(operands[0], 1.0, operands[2])]
    if name == "scatter" and operands[2].size == operands[0].size:  # x[...] = new
        return [path.back(operands[2])]
    if name in ("add", "add_any"):
        return _added(path, *operands) + _added(path, *operands[::-1])
    if name == "sub":
        return _added(path, *operands)
    if name == "div":
        divisor = number(operands[1])
        return [path.back(operands[0], 1 / divisor)] if divisor else []
    factors = ((held, number(scale)) for held, scale in _factors(node))
    return [path.back(held, factor) for held, factor in factors if factor is not None]


def _added(path: BackwardPath, held: Value, addend: Value) -> list[BackwardPath]:
    """Returns the way past an addition; that of `rate * (x - held)` lets what is held decay."""
    node = source(addend).node
    if node is None:
        return [path.back(held, 1.0, addend)]
    if node.name == "dynamic_update_slice" and number(node.operands[0]) == 0:
        return []  # Each trip adds to a part of its own, as the gradient of `x[i]` does.
    for scale, difference in _factors(node):
        rate, inner = number(scale), source(difference).node
        if rate is not None and inner is not None and inner.name == "sub":
            if source(inner.operands[1]) is source(held):
                return [path.back(held, 1 - rate, inner.operands[0])]
    return [path.back(held, 1.0, addend)]


def _factors(node: Node) -> list[tuple[Value, Value]]:
    """Returns the two factors of a product, in either order; none if it is something else."""
    if node.name != "mul":
        return []
    left, right = node.operands
    return [(left, right), (right, left)]
