"""What a report counts of a program: products, saved values and casts by dtype, and its scopes."""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from jmpx._base.trees import is_floating_dtype
from jmpx._inspect.audit.data import Cast, Products, Scope
from jmpx._inspect.audit.flops import flops, is_product, multiplied
from jmpx._inspect.audit.values import CAST, MOVES
from jmpx._inspect.graph import Graph, Node
from jmpx._inspect.where import where
from jmpx._jaxprs.equations import EXCHANGES, HIDING, JOINS

_LEAST_SHARE = 0.005  # of the work of a scope, for a dtype or a policy to be named
_NO_WORK = MOVES | JOINS | EXCHANGES


def products(graph: Graph) -> tuple[Products, ...]:
    """Returns the matrix products and convolutions by operand dtypes, the most FLOPs first.

    Of a product with an algorithm of 16 bits, such as BF16_BF16_F32, the dtypes are those of the
    algorithm. The backward pass swaps operands, so both orders of two dtypes are one row.
    """
    total: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for node in filter(is_product, graph.nodes):
        dtypes = " x ".join(sorted(multiplied(node)))
        total[dtypes] += flops(node)
        count[dtypes] += node.times
    return tuple(Products(dtypes, part, count[dtypes]) for dtypes, part in total.most_common())


def uncounted(graph: Graph) -> tuple[str, ...]:
    """Returns the names of operations whose products are unknown, such as `pallas_call`."""
    return tuple(dict.fromkeys(n.name for n in graph.nodes if n.name.startswith(HIDING)))


def saved(graph: Graph) -> dict[str, int]:
    """Returns the bytes that the forward pass keeps for the backward pass, by dtype; most first.

    Arguments and constants are there anyway, and do not count. Of a loop that holds both passes, it
    is what one trip keeps.
    """
    found: Counter[str] = Counter()
    seen: set[int] = set()
    for reader in _backward(graph):
        for value in reader.operands:
            is_forward = value.node is not None and not value.node.is_backward
            if is_forward and id(value) not in seen:
                seen.add(id(value))
                found[value.dtype.name] += value.nbytes
    return dict(found.most_common())


def _backward(graph: Graph) -> Iterator[Node]:
    """Yields the nodes of the backward pass, and the calls that hold them."""
    seen: set[int] = set()
    for node in graph.nodes:
        each: Node | None = node
        while each is not None and each.is_backward and id(each) not in seen:
            seen.add(id(each))
            yield each
            each = each.around


def casts(graph: Graph) -> tuple[Cast, ...]:
    """Returns the casts from one floating dtype to another, the most bytes first."""
    total: Counter[tuple[str, str]] = Counter()
    count: Counter[tuple[str, str]] = Counter()
    for node in graph.nodes:
        if node.name == CAST:
            source, target = node.operands[0].dtype, node.results[0].dtype
            if source != target and is_floating_dtype(source) and is_floating_dtype(target):
                total[source.name, target.name] += node.times * node.results[0].nbytes
                count[source.name, target.name] += node.times
    return tuple(Cast(*dtypes, count[dtypes], part) for dtypes, part in total.most_common())


def scopes(graph: Graph) -> tuple[Scope, ...]:
    """Returns the operations by module or named scope, without those of scopes inside of it."""
    by_path: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if not node.is_structure:
            by_path.setdefault(graph.path(node), []).append(node)
    return tuple(_scope(graph, path, nodes) for path, nodes in by_path.items())


def _scope(graph: Graph, path: str, nodes: list[Node]) -> Scope:
    _, module, names, _ = where(nodes[0].scope)
    return Scope(
        path,
        "" if module is None or names else module.cls.__name__,
        _policy(graph, nodes),
        sum(node.times for node in nodes),
        _dtypes(nodes),
        sum(map(flops, filter(is_product, nodes))),
    )


def _policy(graph: Graph, nodes: list[Node]) -> str:
    """Returns the policies under which operations ran, that of the most FLOPs first."""
    size: Counter[str] = Counter()
    for node in nodes:
        if policy := graph.policy(node):
            size[policy] += flops(node) or 1
    least = _LEAST_SHARE * size.total()
    return "; ".join(policy for policy, part in size.most_common() if part >= least)


def _dtypes(nodes: list[Node]) -> str:
    """Returns the dtypes of the work of operations, or of what they make if they only move data."""
    work: Counter[np.dtype] = Counter()
    made: Counter[np.dtype] = Counter()
    for node in nodes:
        if node.name != CAST:
            values = node.operands[:2] if is_product(node) else node.results[:1]
            size = node.times * sum(value.size for value in node.results)
            for dtype in filter(is_floating_dtype, {value.dtype for value in values}):
                work[dtype] += flops(node) or size * (node.name not in _NO_WORK)
                made[dtype] += size
    parts = work if work.total() else made
    least = max(_LEAST_SHARE * parts.total(), 1)
    return ", ".join(dtype.name for dtype, part in parts.most_common() if part >= least)
