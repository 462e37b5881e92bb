"""A jaxpr as a flat graph: inner jaxprs are inlined, and loops are tied together by nodes."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from jmpx._inspect.programs import Program
from jmpx._jaxprs import core
from jmpx._jaxprs.core import Equation, Jaxpr, Place, operation_name, place_of
from jmpx._jaxprs.marks import Module
from jmpx._policies.places import modules_of, selector, where

Aval: TypeAlias = Any  # of an array, a random key, a token or a mutable reference


class Value:
    """What an equation reads or computes.

    Attributes:
        dtype: its dtype; that of a boolean for what has none, such as a token.
        shape: its shape.
        weak: whether it has JAX's weak type, as a Python number has.
        kind: `input`, `const` (an array that the function closes over), `literal` or `computed`.
        node: what computes it; None for the other kinds.
        constant: the number or numbers of a constant or a literal; None for the other kinds.
        readers: the nodes that read it, in the order of the program.
        index: the number of an input; -1 for the other kinds.
        is_output: whether the program returns it.
    """

    __slots__ = (
        "constant",
        "dtype",
        "index",
        "is_output",
        "kind",
        "node",
        "readers",
        "shape",
        "weak",
    )

    def __init__(self, aval: Aval, kind: str, constant: Any = None, index: int = -1) -> None:
        self.dtype: np.dtype = getattr(aval, "dtype", np.dtype(bool))
        self.shape: tuple[int, ...] = getattr(aval, "shape", ())
        self.weak: bool = getattr(aval, "weak_type", False)
        self.kind = kind
        self.node: Node | None = None
        self.constant = constant
        self.readers: list[Node] = []
        self.index = index
        self.is_output = False

    @property
    def size(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return self.size * self.dtype.itemsize


class Node:
    """An equation, or what ties the body of a loop to the program around it.

    The latter are structural nodes: `carry` reads a first value and what the body returns next, and
    makes what a trip of the loop starts with; `slice` makes a trip's part of an array, `stack` an
    array out of what each trip returns, `result` what the last trip hands out, `join` the result of
    whichever branch runs, `shard` and `unshard` a device's part of an array, and the array.

    Attributes:
        name: the name of the primitive, as policy rules spell it, or of the structural node.
        eqn: the equation; of a structural node, the one that holds the inner jaxpr.
        operands: what it reads.
        results: what it makes.
        scope: its scopes, marks of modules among them.
        times: how often it runs: the product of the lengths of the scans around it.
        in_while: whether a while loop is around it, which runs nobody knows how often.
        is_backward: whether it belongs to a backward pass.
        is_structure: whether it is a structural node.
        around: the equation whose jaxpr it is from, as a node; None at the top.
    """

    __slots__ = (
        "around",
        "eqn",
        "in_while",
        "is_backward",
        "is_structure",
        "name",
        "operands",
        "results",
        "scope",
        "times",
    )

    def __init__(
        self, name: str, eqn: Equation, scope: str, is_backward: bool, around: "Node | None"
    ) -> None:
        self.name = name
        self.eqn = eqn
        self.operands: list[Value] = []
        self.results: list[Value] = []
        self.scope = scope
        self.times: int = 1 if around is None else around.times
        self.in_while: bool = around is not None and around.in_while
        self.is_backward = is_backward
        self.is_structure = False
        self.around = around

    @property
    def is_carry(self) -> bool:
        """Whether it ties what the body of a loop returns to what it starts with."""
        return self.is_structure and self.name == "carry"

    @property
    def first_operands(self) -> list[Value]:
        """Its operands, but for what the body of a loop returns to a carry, which comes later."""
        return self.operands[:1] if self.is_carry else self.operands


class Graph:
    """A program as nodes and values.

    Args:
        program: the program.
        platform: such as "tpu": of a `lax.platform_dependent`, the branch of this platform is in
            the graph, and no other; None for the platform of this machine.

    Attributes:
        program: the program.
        nodes: all nodes in the order of the program; a `carry` stands before the body that reads
            it, and all others behind what they read.
        inputs: the program's arguments.
        outputs: its results.
    """

    def __init__(self, program: Program, platform: str | None = None) -> None:
        self.program = program
        self.nodes: list[Node] = []
        jaxpr = _open(program.jaxpr)
        self.inputs = [Value(var.aval, "input", index=i) for i, var in enumerate(jaxpr.invars)]
        self.outputs = _Builder(self.nodes, platform).run(program.jaxpr, self.inputs, None)
        for value in self.outputs:
            value.is_output = True

    def path(self, node: Node) -> str:
        """Returns the path of the innermost module of a node and the named scopes inside of it."""
        return where(node.scope).path

    def selector(self, node: Node) -> str | None:
        """Returns a selector of policy map rules for the innermost module or scope of a node."""
        return selector(node.scope)

    def outermost(self) -> frozenset[Module]:
        """Returns the modules that all others are in: a rule for one would be for all of a model.

        A layer alone is none.
        """
        scopes = [modules_of(scope) for scope in {node.scope for node in self.nodes}]
        around = [modules for modules in scopes if modules]
        outermost = frozenset.intersection(*around) if around else frozenset()
        return outermost if frozenset().union(*around) > outermost else frozenset()

    def place(self, node: Node) -> Place | None:
        """Returns the line of the user's code that a node is from, or its call is."""
        each: Node | None = node
        while each is not None:
            called = each.around.eqn.params.get("name", "") if each.around else ""
            place = place_of(each.eqn, called if isinstance(called, str) else "")
            if place is not None:
                return place
            each = each.around
        return None

    def policy(self, node: Node) -> str:
        """Returns the policy under which the module of a node ran; empty if an adapter ran none."""
        module = where(node.scope).module
        return "" if module is None else self.program.policies.get(module.path, "")


def _open(jaxpr: Jaxpr) -> Jaxpr:
    return getattr(jaxpr, "jaxpr", jaxpr)


class _Builder:
    """Adds the equations of a jaxpr to a list of nodes.

    Args:
        nodes: the list.
        platform: the platform whose branches count; None for this machine's.
    """

    def __init__(self, nodes: list[Node], platform: str | None) -> None:
        self.nodes, self.platform = nodes, platform
        self.consts: dict[int, Value] = {}
        self.stacks: dict[tuple[str, int], tuple[Any, str, bool]] = {}

    def run(self, jaxpr: Jaxpr, operands: Sequence[Value], around: Node | None) -> list[Value]:
        """Adds the equations of a jaxpr, and returns its results.

        Args:
            jaxpr: the jaxpr, closed or open.
            operands: its operands.
            around: the equation that holds it.
        """
        inner = _open(jaxpr)
        env: dict[Any, Value] = dict(zip(inner.invars, operands, strict=True))
        for var, const in zip(inner.constvars, core.consts_of(jaxpr), strict=False):
            env[var] = self.const(var.aval, const)

        def read(atom: Any) -> Value:
            # The class of literals is the one that has a value.
            if hasattr(atom, "val"):
                return Value(atom.aval, "literal", atom.val)
            return env[atom]

        for eqn in inner.eqns:
            if eqn.primitive.name == "platform_index":  # read by `_Builder.cond_` alone
                env[eqn.outvars[0]] = Value(eqn.outvars[0].aval, "literal")
                continue
            node = self.node(operation_name(eqn.primitive.name), eqn, around)
            results = self.equation(node, list(map(read, eqn.invars)))
            env.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, inner.outvars))

    def const(self, aval: Aval, const: Any) -> Value:
        if id(const) not in self.consts:
            self.consts[id(const)] = Value(aval, "const", const)
        return self.consts[id(const)]

    def node(self, name: str, eqn: Equation, around: Node | None) -> Node:
        stack, outer = eqn.source_info.name_stack, "" if around is None else around.scope
        key = outer, id(stack)
        if key not in self.stacks:  # Equations share stacks, and to spell one takes time.
            is_backward = "transpose(" in str(stack)
            self.stacks[key] = stack, core.scope_within(outer, eqn), is_backward
        _, scope, is_backward = self.stacks[key]
        is_backward |= around is not None and around.is_backward
        return Node(name, eqn, scope, is_backward, around)

    def equation(self, node: Node, operands: list[Value]) -> list[Value]:
        """Adds an equation, or those of the jaxpr that it holds, and returns its results."""
        if node.name in ("scan", "while", "cond", "shard_map"):
            return getattr(self, f"{node.name}_")(node, operands)
        for jaxpr in core.inner_jaxprs(node.eqn.params):
            inner = _open(jaxpr)
            if len(inner.invars) == len(operands) and _is_call(inner, node.eqn):
                node.operands = operands
                return self.run(jaxpr, operands, node)
        return self.add(node, operands, [var.aval for var in node.eqn.outvars])

    def add(self, node: Node, operands: list[Value], avals: Sequence[Aval]) -> list[Value]:
        """Adds a node, and returns its results."""
        node.operands = operands
        for value in operands:
            value.readers.append(node)
        for aval in avals:
            value = Value(aval, "computed")
            value.node = node
            node.results.append(value)
        self.nodes.append(node)
        return node.results

    def tie(self, name: str, at: Node, operands: list[Value], aval: Aval) -> Value:
        """Adds a structural node of a loop or a branch, and returns its result."""
        node = Node(name, at.eqn, at.scope, at.is_backward, at.around)
        node.times, node.in_while, node.is_structure = at.times, at.in_while, True
        return self.add(node, operands, [aval])[0]

    def scan_(self, node: Node, operands: list[Value]) -> list[Value]:
        num_consts, num_carry = core.scan_counts(node.eqn)
        node.operands = operands
        jaxpr, end = node.eqn.params["jaxpr"], num_consts + num_carry
        invars = _open(jaxpr).invars
        inside = self.inside(node, node.eqn.params["length"])
        carry = self.carry(inside, operands[num_consts:end], invars[num_consts:end])
        pairs = zip(operands[end:], invars[end:], strict=True)
        slices = [self.tie("slice", inside, [value], var.aval) for value, var in pairs]
        results = self.run(jaxpr, [*operands[:num_consts], *carry, *slices], inside)
        self.close(carry, results)
        return [
            self.tie("result" if i < num_carry else "stack", node, [value], var.aval)
            for i, (value, var) in enumerate(zip(results, node.eqn.outvars, strict=True))
        ]

    def while_(self, node: Node, operands: list[Value]) -> list[Value]:
        params = node.eqn.params
        node.operands = operands
        in_cond, in_body = params["cond_nconsts"], params["body_nconsts"]
        start = in_cond + in_body
        inside = self.inside(node, 1)
        inside.in_while = True
        carry = self.carry(inside, operands[start:], _open(params["body_jaxpr"]).invars[in_body:])
        self.run(params["cond_jaxpr"], [*operands[:in_cond], *carry], inside)
        results = self.run(params["body_jaxpr"], [*operands[in_cond:start], *carry], inside)
        self.close(carry, results)
        pairs = zip(results, node.eqn.outvars, strict=True)
        return [self.tie("result", node, [value], var.aval) for value, var in pairs]

    def inside(self, node: Node, times: int) -> Node:
        """Returns a node that stands for the inside of a loop: what is in it runs several times."""
        inside = Node(node.name, node.eqn, node.scope, node.is_backward, node.around)
        inside.times, inside.in_while = node.times * times, node.in_while
        return inside

    def carry(self, inside: Node, first: Sequence[Value], invars: Sequence[Any]) -> list[Value]:
        pairs = zip(first, invars, strict=True)
        return [self.tie("carry", inside, [value], var.aval) for value, var in pairs]

    def close(self, carry: list[Value], results: list[Value]) -> None:
        """Ties what a body returns to what it starts with."""
        for value, new in zip(carry, results, strict=False):
            if value.node is not None:
                value.node.operands.append(new)
                new.readers.append(value.node)

    def cond_(self, node: Node, operands: list[Value]) -> list[Value]:
        node.operands = operands
        branch = core.platform_branch(node.eqn, self.platform)
        if branch is not None:
            return self.run(node.eqn.params["branches"][branch], operands[1:], node)
        branches = [self.run(each, operands[1:], node) for each in node.eqn.params["branches"]]
        columns = zip(zip(*branches, strict=True), node.eqn.outvars, strict=True)
        return [self.tie("join", node, list(values), var.aval) for values, var in columns]

    def shard_map_(self, node: Node, operands: list[Value]) -> list[Value]:
        node.operands = operands
        jaxpr = node.eqn.params["jaxpr"]
        pairs = zip(operands, _open(jaxpr).invars, strict=True)
        shards = [self.tie("shard", node, [value], var.aval) for value, var in pairs]
        results = self.run(jaxpr, shards, node)
        pairs = zip(results, node.eqn.outvars, strict=True)
        return [self.tie("unshard", node, [value], var.aval) for value, var in pairs]


def _is_call(inner: Jaxpr, eqn: Equation) -> bool:
    """Whether an equation does nothing but run the jaxpr that it holds."""
    if len(inner.outvars) != len(eqn.outvars):
        return False
    pairs = (
        *zip(inner.invars, eqn.invars, strict=True),
        *zip(inner.outvars, eqn.outvars, strict=True),
    )
    return all(a.aval.shape == b.aval.shape for a, b in pairs if hasattr(a.aval, "shape"))
