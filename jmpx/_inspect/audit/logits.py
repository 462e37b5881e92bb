"""Findings: logits that are rounded to 16 bits before the softmax of a loss reads them.

The gradient of such a loss is a difference of probabilities. Where these are close, as those of a
model that is nearly right, or near its teacher, the rounding of the logits is most of it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jmpx._inspect.audit.data import Finding
from jmpx._inspect.audit.dependence import reaches_end
from jmpx._inspect.audit.flops import flops, is_product, multiplied
from jmpx._inspect.audit.low_values import LOW, MOVES, is_view, modules_with_parts
from jmpx._inspect.audit.signs import is_at_most_zero
from jmpx._inspect.graph import Graph, Node, Value
from jmpx._jaxprs.marks import Module
from jmpx._policies.places import where

_AUTOCAST = "jmpx.autocast"
_ALGORITHMS = {"bfloat16": "BF16_BF16_F32", "float16": "F16_F16_F32"}
# Between a product and the softmax: biases, temperatures, masks and soft-caps.
_BETWEEN = frozenset("add sub mul div neg tanh max min clamp select_n concatenate pad".split())
# Between an exponential and the logarithm of a loss: `log(sum(exp))` or `log(softmax + 1e-6)`.
_OF_SOFTMAX = frozenset("reduce_sum div add max clamp mul select_n abs".split())
_TIES = frozenset({"slice", "stack", "result", "join", "shard", "unshard"})
_NEAREST = 4  # products that may add up to the logits; a residual stream has more


class Logits:
    """The softmaxes of losses whose logits are rounded.

    Args:
        graph: the graph.

    Attributes:
        found: the findings, one for each product that makes such logits.
        explained: the ids of the nodes from these products to the softmaxes: of no other finding.
    """

    def __init__(self, graph: Graph) -> None:
        self.explained: set[int] = set()
        products: dict[int, _Rounded] = {}
        for node in graph.nodes if graph.program.has_backward else ():
            if node.name == "log" and not node.is_backward and reaches_end(node):
                for exponential in _exponentials(node.operands[0]):
                    found, between = _rounded(exponential.operands[0])
                    if found:
                        self.explained.update(map(id, (node, exponential, *between)))
                        self.explained.update(id(each.product) for each in found)
                        products.update({id(each.product): each for each in found})
        self.found = list(_findings(graph, list(products.values()))) if products else []


class _Rounded(NamedTuple):
    """A product whose result is rounded to 16 bits.

    Attributes:
        product: the product.
        value: the first value behind it that has 16 bits.
    """

    product: Node
    value: Value


def _through(node: Node, names: frozenset[str]) -> Sequence[Value]:
    """Returns the operands of a node to go on with, if it is a move or has one of these names."""
    if node.is_structure:
        return node.operands if node.name in _TIES else ()
    if node.name in MOVES or is_view(node):
        return node.operands[:1]
    if node.name in names:
        return node.operands[node.name == "select_n" :]
    return ()


def _exponentials(value: Value) -> list[Node]:
    """Returns the exponentials of numbers up to 0 that a value is a sum or a share of."""
    found, pending, seen = [], [value], {id(value)}
    while pending and len(seen) < 64:
        node = pending.pop().node
        if node is None:
            continue
        if node.name == "exp" and is_at_most_zero(node.operands[0]):
            found.append(node)
        new = [each for each in _through(node, _OF_SOFTMAX) if id(each) not in seen]
        seen.update(map(id, new))
        pending += new
    return found


def _rounded(value: Value) -> tuple[list[_Rounded], list[Node]]:
    """Returns the products behind a value that are rounded on the way, and what is between."""
    found: list[_Rounded] = []
    between: list[Node] = []
    pending: list[tuple[Value, Value | None]] = [(value, None)]
    seen: set[int] = set()
    while pending and len(found) < _NEAREST:
        each, low = pending.pop(0)
        low = each if each.dtype in LOW else low
        node = each.node
        if node is None or id(each) in seen:
            continue
        seen.add(id(each))
        if not is_product(node):
            between.append(node)
            pending += [(operand, low) for operand in _through(node, _BETWEEN)]
        elif low is not None:
            found.append(_Rounded(node, low))
    return found, between


def _findings(graph: Graph, products: list[_Rounded]) -> Iterator[Finding]:
    sizes: dict[tuple[object, ...], int] = {}  # of a product and those of its backward pass
    for node in filter(is_product, graph.nodes):
        key = graph.path(node), graph.place(node)
        sizes[key] = sizes.get(key, 0) + flops(node)
    parents = modules_with_parts(graph)
    for product, value in products:
        dtype, path, place = value.dtype.name, graph.path(product), graph.place(product)
        yield Finding(
            "rounded-logits",
            "high",
            f"Logits are rounded to {dtype} before the softmax of a loss: its gradient is a "
            "difference of probabilities, which may be smaller than what the rounding changes.",
            place,
            path,
            _rule(graph, product, value.dtype, parents),
            count=product.times,
            flops=sizes.pop((path, place), 0),
        )


def _rule(graph: Graph, product: Node, dtype: np.dtype, parents: set[Module]) -> str:
    """Returns the rule that keeps logits in float32, or what to write."""
    is_low = dtype.name in multiplied(product)
    policy = "compute=float32,output=float32"
    if product.name == "dot_general" and is_low:  # JAX ignores the algorithm of a convolution
        policy += f",matmul={_ALGORITHMS[dtype.name]}"
    selector, module = graph.selector(product), where(product.scope).module
    takers = graph.program.takers
    is_selected = _AUTOCAST in takers if module is None else module not in parents
    if takers and selector is not None and is_selected:
        return f"{selector}: {policy}"
    if _AUTOCAST in takers:
        return f"jax.named_scope around the product, and a rule for the scope with {policy}"
    if is_low:
        return "preferred_element_type=jnp.float32 in the product, and no cast behind it"
    return "leave out the cast to 16 bits"
