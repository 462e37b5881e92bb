"""Findings: attention that a GPU could compute in fused kernels."""

from collections.abc import Iterator

from jmpx._inspect.audit.flops import is_product
from jmpx._inspect.audit.step import Found, Kind, Step
from jmpx._inspect.audit.values import is_low
from jmpx._inspect.graph import Node
from jmpx._inspect.text import bytes_text
from jmpx._remat.saving import is_batched_product

_ATTENTION = Kind("unfused-attention")
KINDS = (_ATTENTION,)


def search(step: Step) -> Iterator[Found]:
    """Yields `unfused-attention`, if the platform is a GPU."""
    if step.platform != "gpu":
        return
    for node in step.graph.nodes:
        if not node.is_backward and _is_low_batched(node) and _meets_softmax(node):
            size = node.times * node.results[0].nbytes
            text = f"An attention writes its scores, {bytes_text(size)}: cuDNN's kernel does not."
            advice = "jax.nn.dot_product_attention(q, k, v, implementation='cudnn')"
            yield step.found(_ATTENTION, "low", node, text, advice, nbytes=size)


def _is_low_batched(node: Node) -> bool:
    """Whether a node is a matrix product with dimensions of a batch, of operands in 16 bits."""
    is_batched = not node.is_structure and is_batched_product(node.eqn)
    return is_batched and all(map(is_low, node.operands[:2]))


def _meets_softmax(node: Node) -> bool:
    """Whether exponentials of a product are summed, and reach the next product, also batched."""
    waiting, seen = [(value, False) for value in node.results], set[tuple[int, bool]]()
    while waiting:
        value, is_softmax = waiting.pop()
        for reader in value.readers:
            if reader.is_backward or (id(reader), is_softmax) in seen:
                continue
            seen.add((id(reader), is_softmax))
            if is_product(reader):
                if is_softmax and _is_low_batched(reader):
                    return True
                continue
            is_sum = is_softmax or (reader.name == "exp" and _is_summed(reader))
            waiting += [(result, is_sum) for result in reader.results]
    return False


def _is_summed(node: Node) -> bool:
    """Whether the results of a node, or casts of them, are summed."""
    readers = [reader for value in node.results for reader in value.readers]
    casts = [reader for reader in readers if reader.name == "convert_element_type"]
    return any(reader.name == "reduce_sum" for reader in readers) or any(map(_is_summed, casts))
