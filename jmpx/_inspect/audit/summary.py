"""Counts for the report: products, saved values and casts by dtype, and operations by scope."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jmpx._base.dtypes import eight_bits
from jmpx._base.trees import is_floating_dtype
from jmpx._inspect.audit.report import Cast, EightBits, Products, Scope
from jmpx._inspect.audit.values import CAST, MOVES, multiplied
from jmpx._inspect.graph import Graph, Node, where
from jmpx._jaxprs.core import operation_name
from jmpx._jaxprs.equations import EXCHANGES, FLOPS, JOINS, KERNELS
from jmpx._jaxprs.inner import holds
from jmpx._jaxprs.marks import WHY, Equation, split_policy

_LEAST_SHARE = 0.005  # of the work of a scope, for a dtype or a policy to be named
_NO_WORK = MOVES | JOINS | EXCHANGES


def products(graph: Graph) -> tuple[Products, ...]:
    """Returns the matrix products and convolutions by operand dtypes, the most FLOPs first.

    A product with an algorithm of 16 bits, such as BF16_BF16_F32, has the dtypes of the algorithm.
    The backward pass swaps operands, so both orders of two dtypes are one row.
    """
    found = (node for node in graph.nodes if node.is_product)
    rows = ((" x ".join(sorted(multiplied(node))), node.times, node.flops) for node in found)
    return tuple(Products(dtypes, size, count) for dtypes, count, size in _totals(rows))


def in_eight_bits(graph: Graph) -> tuple[EightBits, ...]:
    """Returns the forward products to which rules give 8 bits, by why they do not run so."""
    rows = list[tuple[str, int, int]]()
    for node in graph.nodes:
        if node.is_product and not node.is_backward:
            policy, _, why = split_policy(node.scope)[1].partition(WHY)
            if eight_bits(policy.partition(",matmul=")[2]):
                rows.append((why, node.times, node.flops))
    return tuple(EightBits(why, size, count) for why, count, size in _totals(rows))


def casts(graph: Graph) -> tuple[Cast, ...]:
    """Returns the casts from one floating dtype to another, the most bytes first."""
    pairs = ((n, n.operands[0].dtype, n.results[0]) for n in graph.nodes if n.name == CAST)
    rows = (
        ((source.name, result.dtype.name), node.times, node.times * result.nbytes)
        for node, source, result in pairs
        if source != result.dtype and is_floating_dtype(source) and is_floating_dtype(result.dtype)
    )
    totals = _totals(rows)
    return tuple(Cast(source, target, count, size) for (source, target), count, size in totals)


def _totals(rows: Iterable[tuple[Any, int, int]]) -> Iterator[tuple[Any, int, int]]:
    """Yields each key with its counts and its sizes added up, the largest size first."""
    counts, sizes = Counter[Any](), Counter[Any]()
    for key, count, size in rows:
        counts[key] += count
        sizes[key] += size
    return ((key, counts[key], size) for key, size in sizes.most_common())


def uncounted(graph: Graph) -> tuple[str, ...]:
    """Returns the names of operations whose products are unknown, such as `pallas_call`."""

    def is_hiding(node: Node) -> bool:
        is_leaf = not (node.is_structure or node.is_product)  # a linear solve has inner jaxprs
        return node.name.startswith(KERNELS) or (is_leaf and holds(node.eqn, _is_product))

    return tuple(dict.fromkeys(node.name for node in graph.nodes if is_hiding(node)))


def _is_product(eqn: Equation) -> bool:
    return operation_name(eqn.primitive.name) in FLOPS


def saved(graph: Graph) -> dict[str, int]:
    """Returns the bytes that the forward pass keeps for the backward pass, by dtype; most first.

    Arguments and constants are held anyway, and do not count. A loop that holds both passes counts
    once, for one trip.
    """
    # A call in the backward pass may read operands that no node inside of it reads.
    calls = (each for node in graph.nodes for each in node.outwards if each.is_backward)
    found = Counter[str]()
    for value in dict.fromkeys(v for reader in dict.fromkeys(calls) for v in reader.operands):
        if value.node is not None and not value.node.is_backward:
            found[value.dtype.name] += value.nbytes
    return dict(found.most_common())


def scopes(graph: Graph) -> tuple[Scope, ...]:
    """Returns the operations of each module or named scope, except those of inner scopes."""
    by_path: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if not node.is_structure:
            by_path.setdefault(node.path, []).append(node)
    found: list[Scope] = []
    for path, nodes in by_path.items():
        _, module, names, _ = where(nodes[0].scope)
        name = "" if module is None or names else module.cls.__name__
        times, work = sum(node.times for node in nodes), sum(each.flops for each in nodes)
        found.append(Scope(path, name, _policy(graph, nodes), times, _dtypes(nodes), work))
    return tuple(found)


def _policy(graph: Graph, nodes: list[Node]) -> str:
    """Returns the policies under which operations ran, the one with the most FLOPs first."""
    size = Counter[str]()
    for node in nodes:
        if policy := graph.policy(node):
            size[policy] += node.flops or 1
    least = _LEAST_SHARE * size.total()
    return "; ".join(policy for policy, part in size.most_common() if part >= least)


def _dtypes(nodes: list[Node]) -> str:
    """Returns the dtypes in which operations compute, or that they move if none computes."""
    work, made = Counter[np.dtype](), Counter[np.dtype]()
    for node in nodes:
        if node.name != CAST:
            values = node.operands[:2] if node.is_product else node.results[:1]
            size = node.times * sum(value.size for value in node.results)
            for dtype in filter(is_floating_dtype, {value.dtype for value in values}):
                work[dtype] += node.flops or size * (node.name not in _NO_WORK)
                made[dtype] += size
    parts = work if work.total() else made
    least = max(_LEAST_SHARE * parts.total(), 1)
    return ", ".join(dtype.name for dtype, part in parts.most_common() if part >= least)
