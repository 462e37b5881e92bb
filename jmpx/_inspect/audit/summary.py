"""What a report counts of a program: products, saved values and casts by dtype, and its scopes."""

import dataclasses
from collections import Counter
from collections.abc import Iterator

import numpy as np

from jmpx._base.leaves import is_floating_dtype
from jmpx._inspect.audit.data import Cast, Products, Scope
from jmpx._inspect.audit.flops import flops, is_counted, is_product, multiplied
from jmpx._inspect.graph import Graph, Node
from jmpx._policies.places import where

_LEAST_SHARE = 0.005  # of the work of a scope, for a dtype to be named


def products(graph: Graph) -> tuple[Products, ...]:
    """Returns the matrix products and convolutions by operand dtypes, the most FLOPs first.

    Of a product with an algorithm of 16 bits, such as BF16_BF16_F32, they are that algorithm's.

    The backward pass swaps operands, so both orders of two dtypes are one row.
    """
    found: dict[str, tuple[int, int]] = {}
    for node in graph.nodes:
        if is_product(node):
            dtypes = " x ".join(sorted(multiplied(node)))
            total, count = found.get(dtypes, (0, 0))
            found[dtypes] = total + flops(node), count + node.times
    rows = (Products(dtypes, *counts) for dtypes, counts in found.items())
    return tuple(sorted(rows, key=lambda row: -row.flops))


def other_flops(graph: Graph) -> int:
    """Returns the FLOPs of all that is no product, every branch of a `cond` included."""
    return sum(flops(node) for node in graph.nodes if not is_product(node))


def uncounted(graph: Graph) -> tuple[str, ...]:
    """Returns the names of operations whose FLOPs nobody knows, such as `pallas_call`."""
    names = (node.name for node in graph.nodes if not node.is_structure)
    return tuple(dict.fromkeys(name for name in names if not is_counted(name)))


def saved(graph: Graph) -> dict[str, int]:
    """Returns the bytes that the forward pass keeps for the backward pass, by dtype; most first.

    Each value counts once that a forward operation computed and that a backward operation, or a
    function that the backward pass calls, is handed. Arguments and constants are there anyway, and
    do not count. Of a loop that holds both passes, it is what one trip keeps.
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
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for node in graph.nodes:
        if _is_cast(node):
            value, result = node.operands[0], node.results[0]
            key = value.dtype.name, result.dtype.name
            count, nbytes = found.get(key, (0, 0))
            found[key] = count + node.times, nbytes + node.times * result.nbytes
    rows = (Cast(*dtypes, *counts) for dtypes, counts in found.items())
    return tuple(sorted(rows, key=lambda row: -row.nbytes))


def _is_cast(node: Node) -> bool:
    if node.name != "convert_element_type":
        return False
    source, target = node.operands[0].dtype, node.results[0].dtype
    return source != target and is_floating_dtype(source) and is_floating_dtype(target)


@dataclasses.dataclass
class _Row:
    """What is known of a scope so far.

    Attributes:
        module: the name of the module's class; empty for a named scope.
        policy: the policy that held.
        operations: how many there are.
        flops: the FLOPs of the products.
        work: the FLOPs by dtype.
        made: the elements by dtype of what takes none.
    """

    module: str
    policy: str
    operations: int = 0
    flops: int = 0
    work: Counter[np.dtype] = dataclasses.field(default_factory=Counter)
    made: Counter[np.dtype] = dataclasses.field(default_factory=Counter)

    @property
    def dtypes(self) -> str:
        """The dtypes of its work, or of what it makes if it only moves data; most first."""
        parts = self.work if self.work.total() else self.made
        least = _LEAST_SHARE * parts.total()
        return ", ".join(dtype.name for dtype, part in parts.most_common() if part >= least)


def scopes(graph: Graph) -> tuple[Scope, ...]:
    """Returns the operations by module, or by named scope, in the order of the program.

    Each row has what runs directly in it, not in the modules and named scopes inside of it.
    """
    rows: dict[str, _Row] = {}
    by_scope: dict[str, _Row] = {}  # with marks: several are one path
    for node in graph.nodes:
        if node.is_structure:
            continue
        row = by_scope.get(node.scope)
        if row is None:
            row = by_scope[node.scope] = _row(graph, node, rows)
        row.operations += node.times
        _add_work(row, node)
    return tuple(
        Scope(path, row.module, row.policy, row.operations, row.dtypes, row.flops)
        for path, row in rows.items()
    )


def _row(graph: Graph, node: Node, rows: dict[str, _Row]) -> _Row:
    """Returns the row of a node's path, which is added if it is new."""
    found = where(node.scope)
    is_module = found.module is not None and not found.names
    module = found.module.cls.__name__ if found.module is not None and is_module else ""
    return rows.setdefault(found.path, _Row(module, graph.policy(node)))


def _add_work(row: _Row, node: Node) -> None:
    """Adds a node's FLOPs to the dtypes in which it computes: of a product, those of its operands.

    A cast does no work in either of its dtypes.
    """
    total = flops(node)
    if is_product(node):
        row.flops += total
        dtypes = {value.dtype for value in node.operands[:2]}
    elif node.name == "convert_element_type" or not node.results:
        return
    else:
        dtypes = {node.results[0].dtype}
    for dtype in filter(is_floating_dtype, dtypes):
        if total:
            row.work[dtype] += total
        else:
            row.made[dtype] += node.times * sum(value.size for value in node.results)
