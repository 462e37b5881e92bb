"""A jaxpr as a flat graph, with the module, the scope and the line of each node.

Inner jaxprs are inlined, and structural nodes tie loops and branches to the program around them.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np

from jmpx._inspect.programs import Program
from jmpx._jaxprs import core, equations
from jmpx._jaxprs.core import Array, Atom, Aval, Equation, Jaxpr
from jmpx._jaxprs.equations import FLOPS, IDENTITIES, PLACEMENTS, RESHAPES, ROUNDINGS, Place
from jmpx._jaxprs.inner import Inner, inner_of, walk
from jmpx._jaxprs.marks import FULL_PRECISION, WHY, Module, is_own_name, module_of, split_policy
from jmpx._policies.maps import Rule
from jmpx._policies.strings import get_policy

# --- Scopes: the module of an operation, and the rule that selects it ---

# Names that JAX itself adds to name stacks, subscripts of an einsum and parts of a checkpoint, and
# those that jmpx adds.
_NOT_OF_USERS = re.compile(r".*->.*|checkpoint|rematted_computation|jmpx\..*")
_NOT_IN_SELECTORS = re.compile(r"[\s=,:;|?]")


class Where(NamedTuple):
    """The parts of a scope that mean something to a user."""

    path: str  # of the innermost module, and the named scopes inside of it
    module: Module | None  # the innermost one; None outside of modules
    names: str  # the named scopes inside of the module, joined by slashes
    is_full: bool  # in `jmpx.full_precision`, or where autocast computes in float32 by a rule


@functools.lru_cache(maxsize=4096)
def where(scope: str) -> Where:
    """Returns the parts of a scope whose modules have marks: see `core.scope_of`."""
    parts = scope.split("/")
    module, start = None, 0
    for index, part in enumerate(parts):
        found = module_of(part)
        if found is not None:
            module, start = found, index + 1
    names = [part for part in parts[start:] if not _NOT_OF_USERS.fullmatch(part)]
    while module is not None and names and is_own_name(module, names[0]):
        del names[0]
    outer = "" if module is None else module.path or module.cls.__name__
    inner = "/".join(names)
    return Where("/".join(filter(None, (outer, inner))), module, inner, FULL_PRECISION in parts)


def modules_of(scope: str) -> frozenset[Module]:
    """Returns the modules around an operation of a scope."""
    return frozenset(filter(None, map(module_of, scope.split("/"))))


@functools.lru_cache(maxsize=4096)
def selector(scope: str) -> str | None:
    """Returns a selector of policy map rules that matches a scope; None if none does.

    A module is selected by its path, else by its class. Outside of modules it is the named scope,
    which only rules of `jmpx.autocast` match.
    """
    path, module, names, _ = where(scope)
    text = names if module is None else module.path
    tried = [text] if "/" in text else []
    tried += [f"*/{text}"] if text else []
    tried += [] if module is None else [module.cls.__name__]
    for each in tried:
        rule = Rule(each)
        matches = rule.matches_scope(path) if module is None else rule.matches(*module)
        if matches and not _NOT_IN_SELECTORS.search(each):
            return each
    return None


# --- Nodes and values ---

LOW = frozenset(map(np.dtype, (jnp.float16, jnp.bfloat16)))
# Primitives that return all numbers of their one operand; a barrier may have several operands.
_VIEWS = (IDENTITIES - {"optimization_barrier"}) | PLACEMENTS | RESHAPES | ROUNDINGS
WIDE = frozenset(map(np.dtype, (jnp.float32, jnp.float64)))


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Value:
    """An array or a number that an equation reads or computes."""

    aval: Aval
    kind: str  # `input`, `const` (an array that the function closes over), `literal` or `computed`
    constant: Array | None = None  # the numbers of a constant or a literal
    index: int = -1  # the number of an input
    node: "Node | None" = None  # the node that computes it
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

    @property
    def numbers(self) -> np.ndarray:
        """The numbers of a constant or a literal, in float64; none if they are not known."""
        try:
            return np.asarray([] if self.constant is None else self.constant, np.float64)
        except TypeError:  # an abstract array
            return np.empty(0)

    @property
    def unmoved(self) -> "Value":
        """The value from which casts, copies and reshapes made it."""
        value = self
        while value.node is not None and value.node.is_view:
            value = value.node.operands[0]
        return value

    @property
    def number(self) -> float | None:
        """The number that it is known to be when the program is traced; else None."""
        value = self.unmoved
        is_real = any(jnp.issubdtype(value.dtype, kind) for kind in (jnp.floating, jnp.integer))
        is_known = is_real and value.size == 1 and value.constant is not None
        return float(np.asarray(value.constant).reshape(())) if is_known else None

    @property
    def is_low(self) -> bool:
        """Whether it is a floating array of 16 bits."""
        return self.dtype in LOW

    @property
    def is_wide(self) -> bool:
        """Whether it is a floating array of 32 or 64 bits."""
        return self.dtype in WIDE


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Node:
    """An equation, or a structural node, which ties an inner jaxpr to the program around it.

    The structural nodes:

    - `carry` joins the initial value of a loop's carry and the value that the body returns.
    - `slice` takes the part of an array for one trip, and `stack` joins the results of all trips.
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
        """Whether it is a structural node `carry`."""
        return self.is_structure and self.name == "carry"

    @property
    def is_view(self) -> bool:
        """Whether it returns the numbers of its first operand, in another shape or dtype."""
        return self.name in (("shard", "unshard") if self.is_structure else _VIEWS)

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product or a convolution."""
        return self.name in FLOPS

    @property
    def flops(self) -> int:
        """The FLOPs of all its runs; 0 unless it is a product.

        A while loop counts as one trip, and a `shard_map` counts on one device.
        """
        return self.times * FLOPS[self.name](self.eqn) if self.is_product else 0

    @property
    def first_operands(self) -> list[Value]:
        """Its operands; for a carry, only the initial value, as the other is computed later."""
        return self.operands[:1] if self.is_carry else self.operands

    @property
    def key(self) -> tuple[int, ...]:
        """Equal to the key of the site of its equation: see `watched.Site`."""
        return tuple(id(each.eqn) for each in self.outwards)[::-1]

    @property
    def module(self) -> Module | None:
        """The innermost module around it; None outside of modules."""
        return where(self.scope).module

    @property
    def path(self) -> str:
        """The path of the innermost module, and the named scopes inside of it."""
        return where(self.scope).path

    @property
    def selector(self) -> str | None:
        """A selector of policy map rules for the innermost module or scope."""
        return selector(self.scope)

    @property
    def place(self) -> Place | None:
        """The line of the user's code that it is from, else that of a call that holds it."""
        for each in self.outwards:
            called = each.around.eqn.params.get("name", "") if each.around else ""
            place = equations.place_of(each.eqn, called if isinstance(called, str) else "")
            if place is not None:
                return place
        return None

    @property
    def user_call(self) -> object:
        """The user's call of which it is a part; None if it is unknown."""
        calls = (equations.call_of(each.eqn) for each in self.outwards)
        return next((found for found in calls if found is not None), None)

    @property
    def outwards(self) -> "Iterator[Node]":
        """The node, then the calls, loops and branches that hold it, the innermost first."""
        each: Node | None = self
        while each is not None:
            yield each
            each = each.around


Through: TypeAlias = Callable[[Node], Iterable[Value]]  # the values to follow from a node


class Graph:
    """A program as nodes and values, with the values of its arguments and of its results.

    The nodes are in the order of the program: a `carry` precedes the body that reads it, and all
    others follow the nodes that they read. Of a `lax.platform_dependent`, the graph holds only the
    branch for the platform; None is the platform of this machine.
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
    def back(values: Iterable[Value], through: Through, limit: int | None = None) -> Iterator[Node]:
        """Yields the nodes that values are computed from, each once, the nearest first.

        Args:
            values: the values to start from.
            through: returns the operands of a node to follow, or none to stop there.
            limit: the walk ends as soon as it knows this many nodes, yielded or not.
        """
        return _nearest(values, lambda value: filter(None, [value.node]), through, limit)

    @staticmethod
    def forward(values: Iterable[Value], through: Through) -> Iterator[Node]:
        """Yields the nodes that read values, each once, the nearest first.

        Args:
            values: the values to start from.
            through: returns the results of a node to follow, or none to stop there.
        """
        return _nearest(values, lambda value: value.readers, through, None)

    @functools.cached_property
    def outermost(self) -> frozenset[Module]:
        """The modules that hold all others: a rule for one would select the whole model.

        A program of a single layer has none.
        """
        scopes = [modules_of(scope) for scope in {node.scope for node in self.nodes}]
        around = [modules for modules in scopes if modules]
        outermost = frozenset.intersection(*around) if around else frozenset()
        return outermost if frozenset().union(*around) > outermost else frozenset()

    @functools.cached_property
    def by_key(self) -> dict[tuple[int, ...], Node]:
        """The nodes of equations by their keys."""
        return {node.key: node for node in self.nodes if not node.is_structure}

    @functools.cached_property
    def live(self) -> frozenset[Node]:
        """The nodes on which results or effects depend; a compiler drops the others."""

        def read(node: Node) -> list[Value]:
            around = (each for each in node.outwards if each.name == "cond" and each is not node)
            return [*node.operands, *(each.operands[0] for each in around)]

        # Nothing reads the condition of a while loop.
        ends = [node for node in self.nodes if node.in_while or node.eqn.effects]
        values = itertools.chain(self.outputs, *map(read, ends))
        return frozenset([*ends, *Graph.back(values, read)])

    def without_dropped(self) -> "Graph":
        """Leaves out the products of gradients that the program drops, as of an input.

        The products of a loss whose value nothing reads stay: its gradient is compared with them.
        """
        dropped = {n for n in self.nodes if n.is_backward and n.is_product} - self.live
        self.nodes = [node for node in self.nodes if node not in dropped]
        for value in {value for node in dropped for value in node.operands}:
            value.readers = [node for node in value.readers if node not in dropped]
        return self

    def selects_all(self, rule: Rule) -> bool:
        """Whether a rule selects an outermost module, and so the whole model."""
        return any(rule.matches(*module) for module in self.outermost)

    def policy(self, node: Node) -> str:
        """Returns the policy under which a node or its module ran; empty if there was none."""
        policy, module = split_policy(node.scope)[1].partition(WHY)[0], node.module
        return policy or ("" if module is None else self.program.policies.get(module.path, ""))

    def compute_dtype(self, node: Node) -> np.dtype | None:
        """Returns the dtype in which the policy of a node computes; None if there was none."""
        return _compute_dtype(self.policy(node))

    @functools.cached_property
    def outermost_dtype(self) -> np.dtype | None:
        """The dtype in which the outermost policy computes; None if there is no policy."""
        return _compute_dtype(next(filter(None, self.program.policies.values()), ""))

    @functools.cached_property
    def half_dtype(self) -> str:
        """The name of the 16-bit dtype of a step: of most values, else of its policy."""
        values = Counter(v.dtype.name for node in self.nodes for v in node.results if v.is_low)
        return max(
            values, key=lambda name: values[name], default=str(self.outermost_dtype or "bfloat16")
        )


@functools.lru_cache(maxsize=1024)
def _compute_dtype(policy: str) -> np.dtype | None:
    text = policy.partition(",matmul=")[0]
    return np.dtype(get_policy(text).compute_dtype) if text else None


def to_products(node: Node) -> list[Value]:
    """Returns the operands of a node, to walk back as far as products."""
    return [] if node.is_product else node.operands


def before(value: Value, names: Collection[str]) -> Value:
    """Returns the value before nodes of some names, following their first operands."""
    while value.node is not None and value.node.name in names:
        value = value.node.operands[0]
    return value


def _nearest(
    values: Iterable[Value],
    neighbors: Callable[[Value], Iterable[Node]],
    through: Through,
    limit: int | None,
) -> Iterator[Node]:
    waiting, seen = deque[Node](), set[Node]()
    while True:
        new = dict.fromkeys(node for value in values for node in neighbors(value))
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
        self.stacks: dict[tuple[str, int], tuple[object, str, bool]] = {}

    def run(self, jaxpr: Jaxpr, operands: Sequence[Value], around: Node | None) -> list[Value]:
        """Adds the equations of a jaxpr that the node `around` holds, and returns its results."""

        def step(eqn: Equation, operands: list[Value]) -> Sequence[Value]:
            return self.equation(self.node(eqn, around), operands)

        return walk(jaxpr, operands, step, self.constant)

    def constant(self, atom: Atom, constant: Array) -> Value:
        if core.is_literal(atom):
            return Value(atom.aval, "literal", constant)
        return self.consts.setdefault(id(constant), Value(atom.aval, "const", constant))

    def node(self, eqn: Equation, around: Node | None) -> Node:
        stack, outer = eqn.source_info.name_stack, "" if around is None else around.scope
        key = outer, id(stack)
        if key not in self.stacks:  # Equations share stacks, and spelling one takes time.
            self.stacks[key] = stack, core.scope_within(outer, eqn), "transpose(" in str(stack)
        _, scope, is_backward = self.stacks[key]
        node = Node(core.operation_name(eqn.primitive.name), eqn, scope, is_backward, around)
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
        # Nodes inside run once per trip; the node of the loop runs as often as those around it.
        inside = dataclasses.replace(node, in_while=node.in_while or inner.trips is None)
        inside.times *= 1 if inner.trips is None else inner.trips
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
