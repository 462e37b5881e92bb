"""A jaxpr as a flat graph: inner jaxprs are inlined, and loops are tied together by nodes."""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from jmpx._inspect.programs import Program
from jmpx._inspect.where import modules_of, selector, where
from jmpx._jaxprs.core import is_literal, operation_name, scope_within
from jmpx._jaxprs.equations import Place, place_of
from jmpx._jaxprs.inner import Inner, inner_of, walk
from jmpx._jaxprs.marks import Array, Atom, Aval, Equation, Jaxpr, Module, NameStack, split_policy


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Value:
    """An array or a number that an equation reads or computes."""

    aval: Aval
    kind: str  # `input`, `const` (an array that the function closes over), `literal` or `computed`
    constant: Array | None = None  # the numbers of a constant or a literal
    index: int = -1  # of an input: its number
    node: "Node | None" = None  # the one that computes it
    readers: "list[Node]" = dataclasses.field(default_factory=list)  # in the program's order
    is_output: bool = False
    dtype: np.dtype = dataclasses.field(init=False)  # bool for a token, which has no dtype
    shape: tuple[int, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.dtype = getattr(self.aval, "dtype", np.dtype(bool))
        self.shape = getattr(self.aval, "shape", ())

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return self.size * self.dtype.itemsize


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Node:
    """An equation, or a structural node, which ties an inner jaxpr to the program around it.

    The structural nodes:

    - `carry` joins the initial value of a loop's carry and the one that the body returns.
    - `slice` takes one trip's part of an array, and `stack` puts the results of all trips together.
    - `result` is the carry after the last trip.
    - `join` is the result of the branch that runs.
    - `shard` takes one device's part of an array, and `unshard` puts the parts together.
    """

    name: str  # of the primitive, as policy rules spell it, or of the structural node
    eqn: Equation  # of a structural node, the one that holds the inner jaxpr
    scope: str  # its scopes, marks of modules among them
    is_backward: bool
    around: "Node | None"  # the call, loop or branch whose jaxpr holds it; None at the top
    times: int = 1  # how often it runs: the product of the lengths of the scans around it
    in_while: bool = False  # it runs an unknown number of times
    is_structure: bool = False
    operands: list[Value] = dataclasses.field(default_factory=list)
    results: list[Value] = dataclasses.field(default_factory=list)

    @property
    def is_carry(self) -> bool:
        """Whether it joins the initial value of a loop and the one that the body returns."""
        return self.is_structure and self.name == "carry"

    @property
    def first_operands(self) -> list[Value]:
        """Its operands, of a carry the initial value alone: the other one is computed later."""
        return self.operands[:1] if self.is_carry else self.operands

    @property
    def outwards(self) -> "Iterator[Node]":
        """The node, then the calls, loops and branches that hold it, the innermost first."""
        each: Node | None = self
        while each is not None:
            yield each
            each = each.around


class Graph:
    """A program as nodes and values, with the values of its arguments and of its results.

    The nodes are in the order of the program: a `carry` stands before the body that reads it, and
    all others behind the nodes that they read. A `lax.platform_dependent` has only the branch of
    the platform in the graph, which is this machine's for None.
    """

    def __init__(self, program: Program, platform: str | None = None) -> None:
        self.program = program
        self.nodes: list[Node] = []
        avals = enumerate(program.jaxpr.in_avals)
        self.inputs = [Value(aval, "input", index=i) for i, aval in avals]
        self.outputs = _Builder(self.nodes, platform).run(program.jaxpr, self.inputs, None)
        for value in self.outputs:
            value.is_output = True

    @staticmethod
    def back(
        values: Iterable[Value],
        through: Callable[[Node], Iterable[Value]],
        limit: int | None = None,
    ) -> Iterator[Node]:
        """Yields the nodes behind values, each once, the nearest first.

        Args:
            values: the values to start from.
            through: returns the operands of a node to go on with, or none to stop there.
            limit: the walk ends as soon as it knows so many nodes, those not yet yielded included.
        """
        return _nearest(
            values, lambda value: () if value.node is None else (value.node,), through, limit
        )

    @staticmethod
    def forward(
        values: Iterable[Value], through: Callable[[Node], Iterable[Value]]
    ) -> Iterator[Node]:
        """Yields the nodes that read values, each once, the nearest first.

        Args:
            values: the values to start from.
            through: returns the results of a node to go on with, or none to stop there.
        """
        return _nearest(values, lambda value: value.readers, through, None)

    def path(self, node: Node) -> str:
        """Returns the path of the innermost module of a node and the named scopes inside of it."""
        return where(node.scope).path

    def selector(self, node: Node) -> str | None:
        """Returns a selector of policy map rules for the innermost module or scope of a node."""
        return selector(node.scope)

    def outermost(self) -> frozenset[Module]:
        """Returns the modules that hold all others: a rule for one would be for the whole model.

        If the program has one layer alone, there are none.
        """
        scopes = [modules_of(scope) for scope in {node.scope for node in self.nodes}]
        around = [modules for modules in scopes if modules]
        outermost = frozenset.intersection(*around) if around else frozenset()
        return outermost if frozenset().union(*around) > outermost else frozenset()

    def place(self, node: Node) -> Place | None:
        """Returns the line of the user's code that a node is from, else of a call that holds it."""
        for each in node.outwards:
            called = each.around.eqn.params.get("name", "") if each.around else ""
            place = place_of(each.eqn, called if isinstance(called, str) else "")
            if place is not None:
                return place
        return None

    def policy(self, node: Node) -> str:
        """Returns the policy under which a node or its module ran; empty if none was in force."""
        _, policy = split_policy(node.scope)
        if policy:
            return policy
        module = where(node.scope).module
        return "" if module is None else self.program.policies.get(module.path, "")


def _nearest(
    values: Iterable[Value],
    neighbours: Callable[[Value], Sequence[Node]],
    through: Callable[[Node], Iterable[Value]],
    limit: int | None,
) -> Iterator[Node]:
    waiting, seen = deque[Node](), set[Node]()
    while True:
        new = dict.fromkeys(node for value in values for node in neighbours(value))
        waiting += (node for node in new if node not in seen)
        seen.update(new)
        if not waiting or (limit is not None and len(seen) >= limit):
            return
        yield (node := waiting.popleft())
        values = through(node)


class _Builder:
    """Adds the equations of a jaxpr to a list of nodes."""

    def __init__(self, nodes: list[Node], platform: str | None) -> None:
        self.nodes, self.platform = nodes, platform
        self.consts: dict[int, Value] = {}
        self.stacks: dict[tuple[str, int], tuple[NameStack, str, bool]] = {}

    def run(self, jaxpr: Jaxpr, operands: Sequence[Value], around: Node | None) -> list[Value]:
        """Adds the equations of a jaxpr that the node around holds, and returns its results."""

        def step(eqn: Equation, operands: list[Value]) -> Sequence[Value]:
            return self.equation(self.node(eqn, around), operands)

        return walk(jaxpr, operands, step, self.constant)

    def constant(self, atom: Atom, constant: Array) -> Value:
        if is_literal(atom):
            return Value(atom.aval, "literal", constant)
        return self.consts.setdefault(id(constant), Value(atom.aval, "const", constant))

    def node(self, eqn: Equation, around: Node | None) -> Node:
        stack, outer = eqn.source_info.name_stack, "" if around is None else around.scope
        key = outer, id(stack)
        if key not in self.stacks:  # Equations share stacks, and to spell one takes time.
            self.stacks[key] = stack, scope_within(outer, eqn), "transpose(" in str(stack)
        _, scope, is_backward = self.stacks[key]
        node = Node(operation_name(eqn.primitive.name), eqn, scope, is_backward, around)
        if around is not None:
            node.times, node.in_while = around.times, around.in_while
            node.is_backward |= around.is_backward
        return node

    def equation(self, node: Node, operands: list[Value]) -> Sequence[Value]:
        """Adds an equation, or the equations of its inner jaxprs, and returns its results."""
        outs = [var.aval for var in node.eqn.outvars]
        inner = inner_of(node.eqn, self.platform)
        if node.name == "platform_index":  # read by the cond that has a branch for each platform
            return [Value(aval, "literal") for aval in outs]
        if inner is None:
            return self.add(node, operands, outs)
        node.operands = operands
        if inner.kind in ("scan", "while"):
            return self.loop(node, inner, outs)
        operands = operands[inner.first :]
        if inner.kind == "shard_map":
            avals = [var.aval for var in inner.jaxprs[0].invars]
            shards = self.ties("shard", node, operands, avals)
            return self.ties("unshard", node, self.run(inner.jaxprs[0], shards, node), outs)
        branches = [self.run(jaxpr, operands, node) for jaxpr in inner.jaxprs]
        if len(branches) == 1:
            return branches[0]
        columns = zip(zip(*branches, strict=True), outs, strict=True)
        return [self.tie("join", node, list(values), aval) for values, aval in columns]

    def loop(self, node: Node, inner: Inner, outs: Sequence[Aval]) -> list[Value]:
        # Nodes inside run once per trip, the node of the loop as often as its surroundings.
        inside = dataclasses.replace(
            node, times=node.times * (1 if inner.trips is None else inner.trips)
        )
        inside.in_while |= inner.trips is None
        consts, first, arrays = inner.split(node.operands)
        (body,), end = inner.jaxprs, inner.consts + inner.carry
        avals = [var.aval for var in body.invars]
        carry = self.ties("carry", inside, first, avals[inner.consts : end])
        slices = self.ties("slice", inside, arrays, avals[end:])
        if inner.condition is not None:
            self.run(inner.condition, [*node.operands[: inner.first], *carry], inside)
        results = self.run(body, [*consts, *carry, *slices], inside)
        for value, new in zip(carry, results, strict=False):
            if value.node is not None:
                value.node.operands.append(new)
                new.readers.append(value.node)
        last = self.ties("result", node, results[: inner.carry], outs[: inner.carry])
        return last + self.ties("stack", node, results[inner.carry :], outs[inner.carry :])

    def add(self, node: Node, operands: list[Value], avals: Sequence[Aval]) -> list[Value]:
        """Adds a node, and returns its results."""
        node.operands = operands
        for value in operands:
            value.readers.append(node)
        node.results = [Value(aval, "computed", node=node) for aval in avals]
        self.nodes.append(node)
        return node.results

    def tie(self, name: str, at: Node, operands: list[Value], aval: Aval) -> Value:
        """Adds a structural node of a loop or a branch, and returns its result."""
        node = dataclasses.replace(at, name=name, is_structure=True)
        return self.add(node, operands, [aval])[0]

    def ties(
        self, name: str, at: Node, values: Sequence[Value], avals: Sequence[Aval]
    ) -> list[Value]:
        """Adds a structural node for each value."""
        pairs = zip(values, avals, strict=True)
        return [self.tie(name, at, [value], aval) for value, aval in pairs]
