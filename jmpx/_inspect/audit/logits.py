"""Findings: logits that are rounded to 16 bits before the softmax of a loss reads them.

The gradient of such a loss is a difference of probabilities. Where these are close, as those of a
model that is nearly right, or near its teacher, the rounding of the logits is most of it.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from jmpx._inspect.audit.flops import flops, is_product, multiplied
from jmpx._inspect.audit.remedies import Remedies
from jmpx._inspect.audit.signs import is_at_most_zero
from jmpx._inspect.audit.step import Found, Key, Kind, Step
from jmpx._inspect.audit.values import AUTOCAST, LOW, MOVES, is_view, reaches_end
from jmpx._inspect.graph import Graph, Node, Value
from jmpx._inspect.where import modules_of, where

_LOGITS = Kind("rounded-logits", Remedies.wider)
KINDS = (_LOGITS,)
# Between a product and the softmax: biases, temperatures, masks and soft-caps.
_BETWEEN = frozenset("add sub mul div neg tanh max min clamp select_n concatenate pad".split())
# Between an exponential and the logarithm of a loss: `log(sum(exp))` or `log(softmax + 1e-6)`.
_OF_SOFTMAX = frozenset("reduce_sum div add max clamp mul select_n abs".split())
_TIES = frozenset({"slice", "stack", "result", "join", "shard", "unshard"})
_NEAREST = 4  # products that may add up to the logits; a residual stream has more


def search(step: Step) -> Iterator[Found]:
    """Yields a finding for each product whose rounded results are the logits of a loss.

    What is between these products and the softmaxes is explained by it.
    """
    rounded: dict[int, tuple[Node, np.dtype]] = {}
    for node in step.graph.nodes if step.graph.program.has_backward else ():
        if node.name == "log" and not node.is_backward and reaches_end(node):
            for exponential in _exponentials(node.operands[0]):
                products, between = _rounded(exponential.operands[0])
                rounded.update((id(product), (product, dtype)) for product, dtype in products)
                if products:
                    step.explained.update(map(id, (node, exponential, *between)))
    step.explained.update(rounded)
    sizes: Counter[Key] = Counter()  # of a product and those of its backward pass
    for node in filter(is_product, step.graph.nodes if rounded else ()):
        sizes[step.key(node)] += flops(node)
    for product, dtype in rounded.values():
        yield step.found(
            _LOGITS,
            "high",
            product,
            f"Logits are rounded to {dtype.name} before the softmax of a loss: its gradient is a "
            "difference of probabilities, which may be smaller than what the rounding changes.",
            *_remedy(step.graph, product, dtype),
            flops=sizes.pop(step.key(product), 0),
        )


def _through(node: Node, names: frozenset[str]) -> Sequence[Value]:
    """Returns the operands of a node to go on with, if it is a move or has one of these names."""
    if node.is_structure:
        return node.operands if node.name in _TIES else ()
    if node.name in MOVES or is_view(node):
        return node.operands[:1]
    return node.operands[node.name == "select_n" :] if node.name in names else ()


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


def _rounded(value: Value) -> tuple[list[tuple[Node, np.dtype]], list[Node]]:
    """Returns the products behind a value, with the dtype they are rounded to, and other nodes."""
    found: list[tuple[Node, np.dtype]] = []
    between: list[Node] = []
    pending: list[tuple[Value, np.dtype | None]] = [(value, None)]
    seen: set[int] = set()
    while pending and len(found) < _NEAREST:
        each, low = pending.pop(0)
        low = each.dtype if each.dtype in LOW else low
        node = each.node
        if node is None or id(each) in seen:
            continue
        seen.add(id(each))
        if not is_product(node):
            between.append(node)
            pending += [(operand, low) for operand in _through(node, _BETWEEN)]
        elif low is not None:
            found.append((node, low))
    return found, between


def _remedy(graph: Graph, product: Node, dtype: np.dtype) -> Iterator[str]:
    """Yields what to write so that logits stay in float32, and the rule that does the same."""
    is_low = dtype.name in multiplied(product)
    is_matrix_product = product.name == "dot_general" and is_low
    policy = "product=float32" if is_matrix_product else "compute=float32,output=float32"
    selector, module = graph.selector(product), where(product.scope).module
    is_autocast = AUTOCAST in graph.program.takers
    # A rule for a module that holds others would be for these, too.
    scopes = {node.scope for node in graph.nodes} if module is not None else ()
    has_parts = any(module in modules_of(s) and where(s).module != module for s in scopes)
    is_selected = selector is not None and (is_autocast if module is None else not has_parts)
    if is_autocast and not is_selected:
        yield f"jax.named_scope around the product, and a rule for the scope with {policy}"
    else:
        yield "preferred_element_type=jnp.float32 in the product, and no cast to 16 bits behind it"
    if is_selected:
        yield f"{selector}: {policy}"
